"""Splits a worker's wall time: a stopwatch that is always in exactly one named part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

TimerPart: TypeAlias = Literal[
    "batch",
    "compute",
    "apply",
    "communicate",
    "wait",
    "other",
    "push",
    "report",
    "pull",
    "process_cache",
    "thread_cache",
]
TIMER_PARTS: tuple[TimerPart, ...] = get_args(TimerPart)


class PartTimer:
    """Splits wall time into named parts that sum to it by construction.

    At every moment one part is running; `switch` ends it and begins another.

    Args:
        clock: returns monotonic seconds.

    Attributes:
        on_part: called with every part that has ended, its start and its end, in seconds; None for no call.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.on_part: Callable[[TimerPart, float, float], None] | None = None
        self._clock = clock
        self._part: TimerPart = "other"
        self._part_began_s = self._lap_began_s = clock()
        self._totals_s: dict[TimerPart, float] = dict.fromkeys(TIMER_PARTS, 0.0)
        self._lap_totals_s = dict(self._totals_s)

    @property
    def part(self) -> TimerPart:
        """The part that is running."""
        return self._part

    def switch(self, part: TimerPart) -> float:
        """End the running part, begin `part` and return the time of the change, in seconds."""
        now_s = self._clock()
        self._totals_s[self._part] += now_s - self._part_began_s
        if self.on_part is not None:
            self.on_part(self._part, self._part_began_s, now_s)
        self._part, self._part_began_s = part, now_s
        return now_s

    def move(self, source: TimerPart, target: TimerPart, amount_s: float) -> None:
        """Move up to `amount_s` seconds of this lap from `source` to `target`; the sum stays the same."""
        available_s = self._totals_s[source] - self._lap_totals_s[source]
        amount_s = max(0.0, min(amount_s, available_s))
        self._totals_s[source] -= amount_s
        self._totals_s[target] += amount_s

    def total_s(self, part: TimerPart) -> float:
        """Seconds in `part` since the timer was made, without the running interval."""
        return self._totals_s[part]

    def lap(self) -> tuple[float, dict[TimerPart, float]]:
        """End a step: return its wall time and its parts in seconds, and start the next one."""
        now_s = self.switch(self._part)
        wall_s = now_s - self._lap_began_s
        parts_s = {part: self._totals_s[part] - self._lap_totals_s[part] for part in TIMER_PARTS}
        self._lap_began_s, self._lap_totals_s = now_s, dict(self._totals_s)
        return wall_s, parts_s
