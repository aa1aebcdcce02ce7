"""Classification of the workers of a group and outside it, by their Readys; a component of group policies.

Two parts judge: `StragglerClassifier` by compute times, `LineMonitor` by the times of the group's exchanges.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from offbeat.events import Ready
from offbeat.policies.stragglers.classifier import (
    PAPER_LIMIT,
    THRESHOLD_FACTOR_MAX,
    ClassChange,
    StragglerClassifier,
)
from offbeat.policies.stragglers.lines import LineMonitor

MonitoringMode: TypeAlias = Literal["continuous", "epoch_window"]


class StragglerMonitor:
    """Gives the classifier each worker's place in its epoch, and returns which workers may be excluded now.

    A member's iteration is its round since the first one of the epoch. A worker outside the group has no
    rounds, and counts its iterations itself.

    Args:
        detector: arguments of `StragglerClassifier`.
        mode: "continuous" leaves stragglers out until they recover; "epoch_window" includes all workers in
            the profiling window of each epoch.

    Attributes:
        classifier: judges compute times.
        lines: judges lines, by the same `k` (2 where it is automatic) and `limit`.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, detector: dict[str, Any], mode: MonitoringMode) -> None:
        if mode not in ("continuous", "epoch_window"):
            raise ValueError(f"expected monitor 'continuous' or 'epoch_window', got {mode!r}")
        self.classifier = StragglerClassifier(**detector)
        k = detector.get("k", "auto")
        self.lines = LineMonitor(
            k=THRESHOLD_FACTOR_MAX if k == "auto" else k, limit=detector.get("limit", PAPER_LIMIT)
        )
        self._has_windows = mode == "epoch_window"
        self._is_in_window = True
        self._epoch_began: dict[int, int] = {}  # epoch: its first round

    @property
    def stragglers(self) -> frozenset[int]:
        """The workers that are classed, by compute times or by lines."""
        return self.classifier.stragglers | self.lines.stragglers

    @property
    def left_out(self) -> frozenset[int]:
        """The stragglers; where all workers are included now, those by their lines."""
        return self.lines.stragglers if self._has_windows and self._is_in_window else self.stragglers

    def time_to_classify_s(self) -> float | None:
        """Return how long the group waits for a slow member until it is classed; None without a threshold.

        At least twice as long as data took on the slowest connection: over such a line, a member's messages
        to the coordinator come late, too.
        """
        slow_s = self.classifier.time_to_classify_s(max(self._epoch_began, default=0))
        return None if slow_s is None else max(slow_s, 2 * self.lines.longest_s)

    def remove(self, worker: int) -> list[ClassChange]:
        """Remove a worker, and return the resulting changes of class of other workers."""
        self.lines.remove(worker)
        return self.classifier.remove(worker)

    def observe_member(self, event: Ready) -> tuple[list[ClassChange], bool]:
        """Judge a member's step; return changes of class, and whether a window has begun or ended."""
        began = self._epoch_began.get(event.epoch)
        if began is None:
            began = self._epoch_began[event.epoch] = event.round
            for epoch in [epoch for epoch in self._epoch_began if epoch < event.epoch - 1]:
                del self._epoch_began[epoch]
        iteration = max(0, event.round - began)
        changes = self.classifier.observe(
            event.worker, epoch=event.epoch, iteration=iteration, compute_s=event.compute_s
        )
        changes += self.lines.observe_member(event)
        if not self._has_windows:
            return changes, False
        was_in_window = self._is_in_window
        self._is_in_window = self.classifier.is_profiled(event.round - began + 1)
        return changes, self._is_in_window != was_in_window

    def observe(self, event: Ready, iteration: int) -> list[ClassChange]:
        """Judge a worker's step, which is this iteration of its epoch; return changes of class."""
        changes = self.classifier.observe(
            event.worker, epoch=event.epoch, iteration=iteration, compute_s=event.compute_s
        )
        return changes + self.lines.observe(event)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return {
            "classifier": self.classifier.state_dict(),
            "lines": self.lines.state_dict(),
            "is_in_window": self._is_in_window,
            "epoch_began": [list(entry) for entry in self._epoch_began.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a monitor with the same arguments."""
        self.classifier.load_state_dict(state["classifier"])
        self.lines.load_state_dict(state["lines"])
        self._is_in_window, self._epoch_began = state["is_in_window"], dict(state["epoch_began"])
