"""Bulk-synchronous training: gradients are averaged over all workers in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.runtime.control.configuration import PolicySpec
from offbeat.strategies.base import GroupAveraging, check_timeout, lockstep_specs


@dataclass(frozen=True, kw_only=True)
class AllReduce(GroupAveraging):
    """All-reduce of all gradients over all workers, overlapped with the backward pass.

    After each step all replicas are bit-identical, and training equals training in one process on the
    workers' concatenated batches. The slowest worker sets the pace; the loss of a worker ends the job.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms, section 4 (ring); Thakur et al.
    2005, Optimization of collective communication operations in MPICH, section 4.5 (up to 128 KiB); Li et al.
    2020, PyTorch Distributed, section 3.2 (buckets, overlap; the default of 25 MiB).

    Args:
        bucket_bytes: largest size of a bucket of several gradients, in bytes.
        timeout_s: how long the other workers wait for a live worker before the job fails, in seconds.
        compress: what is sent of gradients; None: all of it. "bf16", "fp16", "int8": 16 or 8 bits of each
            number. Of each gradient of at least two dimensions: "powersgd:RANK": an approximation of this
            rank; "topk:RATIO": this share, the largest numbers; "chunks:RATIO": the same of each 4,096
            numbers, rounded to 2 bits; "randomk:RATIO": other numbers in each step; "sign", "qsgd:LEVELS":
            signs, or numbers of so many levels. "dgc:RATIO", "csc:RATIO": this share of the numbers, or of
            chunks of them, with momentum correction; ":warmup=ROUNDS" and ":clip=NORM" may follow. What is
            not sent is added to the worker's next gradient, but under "bf16" and "fp16". "auto": nothing,
            "bf16" or "powersgd:2", whichever makes a step shortest in the job's first 19 steps, if by at
            least 5 %. It needs a model on the CPU.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "bsp"
    survives_worker_loss: ClassVar[bool] = False
    readmits_workers: ClassVar[bool] = False
    shards = "equal"  # not annotated: an annotation would make it a constructor argument

    bucket_bytes: int = 25 * 2**20
    timeout_s: float = 600.0
    compress: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_timeout(self.timeout_s)

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """See `Strategy.policies`."""
        return lockstep_specs(world, start_s, self.timeout_s)
