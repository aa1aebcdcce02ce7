"""The other side of `bench allreduce`: torch.distributed's gloo, driven as DDP drives it.

For comparison only: nothing in offbeat's own runtime exchanges tensors this way.
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
    """Return the least time in which an all-reduce can move its bytes, in seconds.

    Each worker must send and receive 2(p-1)/p of the tensor over its line, at the line's rate, headers and
    latency left out. TCP carries 956 of 1000 Mbit/s, so 1.046 is the least ratio to it that can be seen.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        section 3.

    Args:
        nbytes: size of the tensor on one worker.
        workers: p, at least 1.
        rate_bit_per_s: of each worker's line, each way.
    """
    return 2 * (workers - 1) / workers * nbytes * 8 / rate_bit_per_s


class GlooSide:
    """One worker's place in a gloo process group; a context manager that leaves it.

    It takes the process's default group, so there is one of it at a time.

    Args:
        rank: of this worker.
        world: number of workers.
        address: where rank 0 hosts the TCPStore.
        port: its port.
        interface: the network interface to bind to, None for the one of this host's name. On a host made by
            `namespaces.hosts` it must be given, for the machine's name belongs to another network there.
        limit_s: how long to wait for the others, at the start and in every all-reduce.
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
        """Return how long each of `rounds` all-reduces of `nbytes` of float32 took this worker, in seconds.

        Before each, the workers meet at a barrier, so that no time is counted that others were late by.
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
