"""The first paper's systems: averaging around the slow ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from offbeat.policies.membership.partial_groups import Monitor, PartialGroups
from offbeat.runtime.control.coordinator import PolicySpec
from offbeat.strategies.base import Averaging, assembly


class _AroundTheSlow(Averaging, ABC):
    """What both have in common: the groups."""

    survives: ClassVar[bool] = True
    takes_back: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        PartialGroups(1, **self._groups())

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """See `Strategy.policies`."""
        return (
            assembly(world, start_s, self.shards),
            PolicySpec(
                path="offbeat.policies.membership.partial_groups:PartialGroups",
                arguments={"world": world, **self._groups()},
            ),
        )

    def _groups(self) -> dict[str, Any]:
        return {"detector": self._detector(), "deadline_s": self.deadline_s}

    @abstractmethod
    def _detector(self) -> dict[str, Any]:
        """Arguments of `StragglerClassifier`."""


@dataclass(frozen=True, kw_only=True)
class PartialAllReduce(_AroundTheSlow):
    """Averages gradients over the workers that keep up; the others go on computing, and return recovered.

    A worker whose compute time is above `k` times the pace of the fastest in `limit` iterations more often
    than not is left out from the next step on. It computes and is timed at its own pace without anybody
    waiting for it; once that is fast again, it takes parameters, buffers and optimizer state from a member
    and joins at a named step. A worker that dies or hangs is left out too, and the round that it broke is
    repeated without it.

    Source: the first paper (dynamic worker classification), sections 4.1 to 4.3. Deviations: see
    `StragglerClassifier`; a return takes the state along, without which the models would differ.

    Args:
        k: how many times the fastest pace is too slow, or "auto".
        n_profile: iterations of the profiling window at the start of an epoch.
        limit: the counter's bound.
        monitor: "continuous" judges left-out workers at every iteration of their own; "epoch_window" takes
            everybody back for the profiling window of every epoch, as the paper's section 4.2 does.
        gate: "throughput" leaves workers out only where that raises the samples per second.
        shards: "dynamic" deals samples as they are needed, each once an epoch whoever is slow or dies;
            "equal" shares them out before, as the papers do: those of who is left out are not used.
        bucket_bytes: the largest bucket of several gradients, in bytes.
        deadline_s: how long the others wait for a live worker while no pace is known yet, in seconds.
        late: what the work of who is left out is worth. "drop": nothing, as in the paper. "join": it computes
            blocks on behalf of members, each of which takes a gradient in with its next round once that has
            come, weighted by samples. Needs shards="dynamic".
        staleness: how many steps old its parameters may be at most when its patron has the gradient, the step
            that takes it in counted; older
            gradients are thrown away. The default lets in who is five times as slow: five steps of computing,
            one for each of the two ways, and one more.

    Raises:
        ValueError: an argument out of range.
    """

    name: ClassVar[str] = "partial"

    k: float | Literal["auto"] = 2.0
    n_profile: int = 5
    limit: int = 10
    monitor: Monitor = "continuous"
    gate: Literal["throughput"] | None = None
    shards: Literal["dynamic", "equal"] = "dynamic"
    bucket_bytes: int = 25 * 2**20
    deadline_s: float = 600.0
    late: Literal["drop", "join"] = "drop"
    staleness: int = 8

    def __post_init__(self) -> None:
        if self.late not in ("drop", "join"):
            raise ValueError(f"expected late to be drop or join, got {self.late!r}")
        if self.staleness < 1:
            raise ValueError(f"expected a staleness of at least 1 step, got {self.staleness}")
        if self.late == "join" and self.shards != "dynamic":
            raise ValueError(
                "late=join needs shards=dynamic: of equal shards nobody knows which samples a worker that is "
                "left out has used"
            )
        super().__post_init__()

    def _groups(self) -> dict[str, Any]:
        lends = {"staleness_steps_max": self.staleness} if self.late == "join" else {}
        return {**super()._groups(), "monitor": self.monitor, **lends}

    def _detector(self) -> dict[str, Any]:
        return {"k": self.k, "n_profile": self.n_profile, "limit": self.limit, "gate": self.gate}


@dataclass(frozen=True, kw_only=True)
class DPAR(_AroundTheSlow):
    """Dynamic partial all-reduce: as `PartialAllReduce`, with a threshold that the user gives.

    Source: DPAR (ICCE 2023), of which the abstract is known, and the first paper's account of it: a static
    threshold, a counter, a ring among the rest. Deviations: the gate weighs samples per second, since how
    the paper weighs lost computing against the slowdown is not known.

    Args:
        threshold_ms: compute time of an iteration above which it is slow, in milliseconds.
        limit: the counter's bound.
        gate: "throughput" leaves workers out only where that raises the samples per second.
        shards: "dynamic" deals samples as they are needed, each once an epoch whoever is slow or dies;
            "equal" shares them out before, as the papers do: those of who is left out are not used.
        bucket_bytes: the largest bucket of several gradients, in bytes.
        deadline_s: how long the others wait at most for a live worker that is not heard of, in seconds.

    Raises:
        ValueError: an argument out of range.
    """

    name: ClassVar[str] = "dpar"

    threshold_ms: float
    limit: int = 10
    gate: Literal["throughput"] | None = None
    shards: Literal["dynamic", "equal"] = "dynamic"
    bucket_bytes: int = 25 * 2**20
    deadline_s: float = 600.0

    def _detector(self) -> dict[str, Any]:
        return {"threshold_s": self.threshold_ms / 1000, "limit": self.limit, "gate": self.gate}
