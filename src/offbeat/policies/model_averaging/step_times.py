"""How long the last steps of each worker took.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any


class StepTimes:
    """Medians of the times of each worker's last steps: a single pause does not change them.

    Args:
        kept: steps of each worker, at least 1.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._last_s: dict[int, list[float]] = {}
        self._medians_s: dict[int, float] = {}
        self._range_s: tuple[float, float] | None = None  # of the medians; None where it has to look

    def observe(self, worker: int, step_s: float) -> None:
        """Note how long a step of a worker took, in seconds."""
        last_s = self._last_s.setdefault(worker, [])
        last_s.append(step_s)
        if len(last_s) > self._kept:
            del last_s[0]
        self._set_median(worker, _median(last_s))

    def _set_median(self, worker: int, median_s: float) -> None:
        before_s, self._medians_s[worker] = self._medians_s.get(worker), median_s
        if self._range_s is not None and before_s != median_s:
            least_s, most_s = self._range_s
            if before_s in self._range_s:  # of this worker, perhaps of no other one
                self._range_s = None
            elif not least_s <= median_s <= most_s:
                self._range_s = min(least_s, median_s), max(most_s, median_s)

    def forget(self, worker: int) -> None:
        """Remove a worker, if it is there."""
        self._last_s.pop(worker, None)
        self._medians_s.pop(worker, None)
        self._range_s = None

    def median_s(self, worker: int) -> float | None:
        """Return a worker's median, in seconds; None before its first step."""
        return self._medians_s.get(worker)

    @property
    def fastest_s(self) -> float | None:
        """The shortest median; None before the first step of any worker."""
        return self._find_range_s()[0] if self._medians_s else None

    def slowest_s(self, *, besides: Set[int]) -> float | None:
        """Return the longest median of all workers but some; None before the first step of any."""
        if not besides:
            return self._find_range_s()[1] if self._medians_s else None
        medians_s = self._medians_s.items()
        return max((median_s for worker, median_s in medians_s if worker not in besides), default=None)

    def _find_range_s(self) -> tuple[float, float]:
        """Return the shortest and the longest median; it looks at all where one of these has changed."""
        if self._range_s is None:
            self._range_s = min(self._medians_s.values()), max(self._medians_s.values())
        return self._range_s

    def state_dict(self) -> list[Any]:
        """Return the whole state as plain data."""
        return [[worker, list(last_s)] for worker, last_s in self._last_s.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore a `state_dict` of an object with the same arguments."""
        self._last_s = {worker: list(last_s) for worker, last_s in state}
        self._medians_s = {worker: _median(last_s) for worker, last_s in self._last_s.items()}
        self._range_s = None


def _median(values: Sequence[float]) -> float:
    """Return the median, as `statistics.median` does, but several times faster for a few numbers."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
