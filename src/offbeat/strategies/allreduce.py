"""Bulk-synchronous training: everybody averages gradients with everybody, every step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from offbeat.runtime.coordinator import PolicySpec
from offbeat.runtime.group_synchronizer import GroupSynchronizer
from offbeat.runtime.synchronizer import Loop


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """Ring all-reduce of all gradients over all workers, overlapped with the backward pass.

    After each step all replicas are bit-identical, and training equals training in one process with the
    workers' batches joined. The slowest worker sets everybody's pace; a lost one ends the job.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms, section 4 (ring); Li et al.
    2020, PyTorch Distributed, section 3.2 (buckets, overlap), from where the 25 MiB come.

    Args:
        bucket_bytes: the largest bucket of several gradients, in bytes.
        deadline_s: how long a live worker may keep the others waiting, in seconds.
    """

    name: ClassVar[str] = "bsp"
    needs_coordinator: ClassVar[bool] = False
    survives: ClassVar[bool] = False
    takes_back: ClassVar[bool] = False
    shards: ClassVar[Literal["dynamic", "equal"]] = "equal"

    bucket_bytes: int = 25 * 2**20
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1 byte, got {self.bucket_bytes}")
        if not 0 < self.deadline_s < math.inf:
            raise ValueError(f"deadline_s must be finite and more than 0 s, got {self.deadline_s}")

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """See `Strategy.policies`."""
        return (
            PolicySpec(
                path="offbeat.policies.assembly:Assembly", arguments={"world": world, "deadline_s": start_s}
            ),
            PolicySpec(
                path="offbeat.policies.lockstep:Lockstep",
                arguments={"world": world, "deadline_s": self.deadline_s},
            ),
        )

    def synchronizer(self, loop: Loop, model: nn.Module, optimizer: Optimizer) -> GroupSynchronizer:
        """See `Strategy.synchronizer`."""
        return GroupSynchronizer(
            loop,
            model,
            optimizer,
            bucket_bytes=self.bucket_bytes,
            deadline_s=self.deadline_s,
            survives=self.survives,
            is_dealt=self.shards == "dynamic",
        )
