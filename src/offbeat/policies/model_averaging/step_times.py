"""How long the last steps of each worker took.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

from collections.abc import Set
from statistics import median
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

    def observe(self, worker: int, step_s: float) -> None:
        """Note how long a step of a worker took, in seconds."""
        self._last_s[worker] = [*self._last_s.get(worker, []), step_s][-self._kept :]
        self._medians_s[worker] = median(self._last_s[worker])

    def forget(self, worker: int) -> None:
        """Remove a worker, if it is there."""
        self._last_s.pop(worker, None)
        self._medians_s.pop(worker, None)

    def median_s(self, worker: int) -> float | None:
        """Return a worker's median, in seconds; None before its first step."""
        return self._medians_s.get(worker)

    @property
    def fastest_s(self) -> float | None:
        """The shortest median; None before the first step of any worker."""
        return min(self._medians_s.values(), default=None)

    def slowest_s(self, *, besides: Set[int]) -> float | None:
        """Return the longest median of all workers but some; None before the first step of any."""
        if not besides:
            return max(self._medians_s.values(), default=None)
        medians_s = self._medians_s.items()
        return max((median_s for worker, median_s in medians_s if worker not in besides), default=None)

    def state_dict(self) -> list[Any]:
        """Return the whole state as plain data."""
        return [[worker, list(last_s)] for worker, last_s in self._last_s.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore a `state_dict` of an object with the same arguments."""
        self._last_s = {worker: list(last_s) for worker, last_s in state}
        self._medians_s = {worker: median(last_s) for worker, last_s in self._last_s.items()}
