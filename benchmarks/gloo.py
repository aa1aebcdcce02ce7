"""The other side of `python -m benchmarks allreduce`: torch.distributed's gloo, used as DDP uses it.

For comparison only: offbeat's own runtime does not exchange tensors this way.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist


def bound_s(nbytes: int, workers: int, rate_bit_per_s: float) -> float:
    """Return the least time of an all-reduce, in seconds.

    Each worker must send and receive 2(p-1)/p of the tensor over its line, at the line's rate, without
    headers and latency. TCP carries 956 of 1000 Mbit/s, so a measured ratio to this bound is at least 1.046.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        section 3.

    Args:
        nbytes: size of the tensor on one worker.
        workers: p, at least 1.
        rate_bit_per_s: of each worker's line, each way.
    """
    return 2 * (workers - 1) / workers * nbytes * 8 / rate_bit_per_s


class GlooSide:
    """One worker's membership in a gloo process group; a context manager that leaves the group.

    It uses the process's default group, so only one can exist at a time.

    Args:
        rank: of this worker.
        world: number of workers.
        address: where rank 0 hosts the TCPStore.
        port: of the TCPStore.
        interface: the network interface to bind to, None for that of this host's name. On a host from
            `namespaces.hosts` it is required, because the machine's name belongs to another network there.
        limit_s: timeout of the start and of every all-reduce, in seconds.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        address: str,
        port: int,
        *,
        interface: str | None = None,
        limit_s: float = 60.0,
    ) -> None:
        with _environment("GLOO_SOCKET_IFNAME", interface):
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{address}:{port}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=limit_s),
            )

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by the sum of all workers' tensors, in place."""
        dist.all_reduce(tensor)

    def times_s(self, nbytes: int, rounds: int, *, warmup_rounds: int = 3) -> list[float]:
        """Return the time of each of `rounds` all-reduces of `nbytes` of float32 at this worker, in seconds.

        A barrier before each one excludes the time by which other workers are late.
        """
        tensor = torch.zeros(max(1, nbytes // 4), dtype=torch.float32)
        times_s = []
        for _ in range(warmup_rounds + rounds):
            dist.barrier()
            began_s = time.perf_counter()
            self.all_reduce(tensor)
            times_s.append(time.perf_counter() - began_s)
        return times_s[warmup_rounds:]

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> GlooSide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif value is not None:
            del os.environ[name]
