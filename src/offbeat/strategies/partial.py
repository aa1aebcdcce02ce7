"""Dynamic worker classification and DPAR: averaging over the workers that keep up, without stragglers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from offbeat.numerics.compressors.momentum import MomentumCorrecting
from offbeat.numerics.compressors.registry import AUTO, parse_compression
from offbeat.policies.membership.partial_groups import PartialGroups
from offbeat.policies.stragglers.monitor import MonitoringMode
from offbeat.runtime.averaging.group_binding import GroupBinding
from offbeat.runtime.averaging.interface import AveragerContext
from offbeat.runtime.averaging.skipped_rounds import SkippedRounds
from offbeat.runtime.control.configuration import PolicySpec
from offbeat.runtime.training.interface import TrainingLoop
from offbeat.runtime.training.trained import TrainingState
from offbeat.strategies.base import GroupAveraging, assembly_spec


class _PartialAveraging(GroupAveraging, ABC):
    """Common part of the strategies that average in groups without the stragglers."""

    survives_worker_loss: ClassVar[bool] = True
    readmits_workers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        PartialGroups(1, **self._group_arguments())

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """See `Strategy.policies`."""
        return (
            assembly_spec(world, start_s, self.shards),
            PolicySpec(
                path="offbeat.policies.membership.partial_groups:PartialGroups",
                arguments={"world": world, **self._group_arguments()},
            ),
        )

    def _group_arguments(self) -> dict[str, Any]:
        return {"detector": self._classifier_arguments(), "timeout_s": self.timeout_s}

    @abstractmethod
    def _classifier_arguments(self) -> dict[str, Any]:
        """Arguments of `StragglerClassifier`."""


@dataclass(frozen=True, kw_only=True)
class PartialAllReduce(_PartialAveraging):
    """Averages gradients over the workers that keep up; a straggler is excluded until it has recovered.

    A step is slow if its compute time is above `k` times the pace of the fastest worker. A slow step raises
    the worker's counter by 1, any other step lowers it by 1. A worker whose counter reaches `limit` is
    excluded from the next step on. It goes on computing and is timed at its own pace, and no worker waits for
    it. Once it is fast again, it copies parameters, buffers and optimizer state from a member of the group
    and joins at a named step. A worker that dies or hangs is excluded too, and the round that it interrupted
    is repeated without it.

    Source: the dynamic worker classification (DWC) paper, sections 4.1 to 4.3. Deviations: see
    `StragglerClassifier`; a worker that returns also receives the state, since the models would differ
    otherwise.

    Args:
        k: a step is slow above this multiple of the fastest pace; "auto" derives `k`, `n_profile` and `limit`
            from measured times.
        n_profile: iterations at the start of each epoch in which the fastest pace is measured.
        limit: value of the counter at which a worker is excluded.
        monitor: "continuous" judges excluded workers at each of their own iterations; "epoch_window" takes
            all workers back for the profiling window of every epoch, as in the paper's section 4.2.
        gate: "throughput" excludes a worker only where that raises the samples per second; None excludes all
            stragglers.
        shards: "dynamic" assigns samples as they are needed, each once an epoch even if workers are slow or
            die; "equal" splits them in advance, as the papers do: the shard of an excluded worker is not
            used.
        bucket_bytes: largest size of a bucket of several gradients, in bytes.
        timeout_s: how long the group waits for a live worker while no pace is known yet, in seconds.
        late: what happens to the work of an excluded worker. "drop": it is discarded, as in the paper.
            "join": the worker computes blocks on behalf of members; a member adds such a gradient,
            weighted by samples, to its next round after the gradient has arrived. Needs shards="dynamic".
        staleness: for late="join", the largest age in steps of the parameters that a late gradient was
            computed with, up to and including the step that applies it; older gradients are discarded. The
            default admits a worker that is five times as slow: five steps of computing, one for each of the
            two transfers, and one more. It bounds the gradients that a quorum makes late, too.
        quorum: how many members close a round: a number, or "n-1", "n-2", … for all but one, two, … members.
            Members that are not ready then, nor within `grace`, stay members: the round's mean lacks their
            gradients, which are added to a later round, weighted by samples. None waits for all members.
            It covers steps that are slow now and then, and the steps until a straggler is excluded. Gradients
            are sent once the backward pass has ended, not during it. It needs shards="dynamic", a model on
            the CPU, and one optimizer of torch.optim; and it has no effect if the program changes gradients
            between backward() and step(), as clipping does.
        grace: for a quorum, how long the late members have to become ready, in seconds; None for a quarter
            of the median of the members' last compute times.
        compress: what is sent of gradients; see `AllReduce`. A worker that receives the state of another one
            drops the errors that it has kept. Not with a quorum; "dgc" and "csc" not with late="join".

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "partial"

    k: float | Literal["auto"] = 2.0
    n_profile: int = 5
    limit: int = 10
    monitor: MonitoringMode = "continuous"
    gate: Literal["throughput"] | None = None
    shards: Literal["dynamic", "equal"] = "dynamic"
    bucket_bytes: int = 25 * 2**20
    timeout_s: float = 600.0
    late: Literal["drop", "join"] = "drop"
    staleness: int = 8
    quorum: int | str | None = None
    grace: float | None = None
    compress: str | None = None

    def __post_init__(self) -> None:
        if self.late not in ("drop", "join"):
            raise ValueError(f"expected late to be drop or join, got {self.late!r}")
        if self.staleness < 1:
            raise ValueError(f"expected a staleness of at least 1 step, got {self.staleness}")
        if self.late == "join" and self.shards != "dynamic":
            raise ValueError(
                "late=join needs shards=dynamic: with equal shards it is not known which samples an excluded "
                "worker has used"
            )
        if self.grace is not None and self.quorum is None:
            raise ValueError("grace is for a quorum, and none is given: pass quorum=n-1, for instance")
        if self.quorum is not None and self.shards != "dynamic":
            raise ValueError(
                "a quorum needs shards=dynamic: with equal shards the samples of late workers are left over"
            )
        if self.compress == AUTO:
            raise ValueError(
                "compress=auto needs a group that does not change, as that of bsp: give a method, such as "
                "powersgd:2"
            )
        if self.quorum is not None and self.compress is not None:
            raise ValueError("a quorum needs gradients that are sent whole: leave quorum or compress out")
        super().__post_init__()
        compression = None if self.compress is None else parse_compression(self.compress)
        if self.late == "join" and isinstance(compression, MomentumCorrecting):
            raise ValueError(
                f"late=join needs compression without momentum correction, got compress={self.compress}: use "
                "topk:RATIO or late=drop"
            )

    def _group_arguments(self) -> dict[str, Any]:
        late_arguments = {"staleness_steps_max": self.staleness} if self.late == "join" else {}
        arguments = {**super()._group_arguments(), "monitor": self.monitor, **late_arguments}
        if self.quorum is None:
            return arguments
        quorum = {"size": self.quorum, "grace_s": self.grace, "staleness_steps_max": self.staleness}
        return {**arguments, "quorum": quorum}

    def _make_skipped_rounds(
        self, loop: TrainingLoop, trained: TrainingState, binding: GroupBinding, context: AveragerContext
    ) -> SkippedRounds | None:
        if self.quorum is None:
            return None
        return SkippedRounds(
            trained,
            binding,
            context,
            workers=loop.world,
            bucket_bytes=self.bucket_bytes,
            timeout_s=self.timeout_s,
        )

    def _classifier_arguments(self) -> dict[str, Any]:
        return {"k": self.k, "n_profile": self.n_profile, "limit": self.limit, "gate": self.gate}


@dataclass(frozen=True, kw_only=True)
class DPAR(_PartialAveraging):
    """Dynamic partial all-reduce: as `PartialAllReduce`, with a fixed threshold.

    Source: DPAR (ICCE 2023), of which only the abstract was available, and the DWC paper's account of it: a
    static threshold, a counter, a ring of the remaining workers. Deviation: the gate compares samples per
    second, since how the paper weighs the lost computation against the slowdown is not known.

    Args:
        threshold_ms: compute time above which an iteration is slow, in milliseconds.
        limit: value of the counter at which a worker is excluded.
        gate: "throughput" excludes a worker only where that raises the samples per second; None excludes all
            stragglers.
        shards: "dynamic" assigns samples as they are needed, each once an epoch even if workers are slow or
            die; "equal" splits them in advance, as the papers do: the shard of an excluded worker is not
            used.
        bucket_bytes: largest size of a bucket of several gradients, in bytes.
        timeout_s: how long the group waits at most for a live worker that sends nothing, in seconds.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "dpar"

    threshold_ms: float
    limit: int = 10
    gate: Literal["throughput"] | None = None
    shards: Literal["dynamic", "equal"] = "dynamic"
    bucket_bytes: int = 25 * 2**20
    timeout_s: float = 600.0

    def _classifier_arguments(self) -> dict[str, Any]:
        return {"threshold_s": self.threshold_ms / 1000, "limit": self.limit, "gate": self.gate}
