"""Open MPI's all-reduce on one host, beside `python -m benchmarks allreduce --one-host`.

MPI programs are started by `mpirun`, and their processes look for messages without sleeping. So each block of
all-reduces is a job of its own, which is over before the next side begins.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import time
from ctypes.util import find_library

from offbeat.errors import OffbeatError

_WARMUP_ROUNDS = 10


def is_installed() -> bool:
    """Whether this machine has Open MPI: in Debian, the packages openmpi-bin and libopenmpi3."""
    return shutil.which("mpirun") is not None and find_library("mpi") is not None


def all_reduce_s(nbytes: int, rounds: int, workers: int, *, limit_s: float) -> float:
    """Return the mean seconds of an all-reduce of `nbytes` of float32 by `workers` processes on this host.

    Raises:
        OffbeatError: a process failed, summed wrongly, or took longer than `limit_s`.
    """
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(workers)]
    command += [sys.executable, "-m", "benchmarks.mpi", str(nbytes), str(rounds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise OffbeatError(f"Open MPI took longer than {limit_s:g} s for {nbytes} bytes") from error
    if done.returncode:
        raise OffbeatError(f"Open MPI failed for {nbytes} bytes: {done.stderr.strip()}")
    return float(done.stdout)


def main() -> None:
    """Sum as one process of the job; rank 0 prints the seconds."""
    nbytes, rounds = int(sys.argv[1]), int(sys.argv[2])
    mpi = ctypes.CDLL(find_library("mpi"), mode=ctypes.RTLD_GLOBAL)
    mpi.MPI_Init(None, None)
    # Open MPI's constants are the addresses of its objects.
    world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
    kind = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_float"))
    operation = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_op_sum"))
    rank, size = ctypes.c_int(), ctypes.c_int()
    mpi.MPI_Comm_rank(world, ctypes.byref(rank))
    mpi.MPI_Comm_size(world, ctypes.byref(size))
    count = nbytes // 4
    own, total = (ctypes.c_float * count)(*[rank.value + 1] * count), (ctypes.c_float * count)()
    for number in range(_WARMUP_ROUNDS + rounds):
        if number == _WARMUP_ROUNDS:
            mpi.MPI_Barrier(world)
            began_s = time.perf_counter()
        mpi.MPI_Allreduce(own, total, count, kind, operation, world)
    duration_s = time.perf_counter() - began_s
    mpi.MPI_Finalize()
    expected = size.value * (size.value + 1) / 2
    if total[0] != expected or total[count - 1] != expected:
        sys.exit(f"expected the sum {expected}, got {total[0]} and {total[count - 1]}")
    if rank.value == 0:
        print(duration_s / rounds)


if __name__ == "__main__":
    main()
