"""The times of a worker's steps, until they are sent to the coordinator, and their means for the program.

This module sends nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from typing import Final

from offbeat.events import Event, Ready, StepFinished, StepsTimed, StepTimes

STEPS_MAX: Final = 16
WALL_S_MAX: Final = 1.0
_STEP_REPORTS: Final = (Ready, StepFinished)
_DURATIONS: Final = {  # by field, the name of its mean
    field.name: field.name if field.name != "wall_s" else "step_s"
    for field in fields(StepTimes)
    if field.name.endswith("_s")
}


class StepTimesBuffer:
    """Collects the times of a worker's steps, to send those of several steps as one event.

    An event costs the coordinator as much as the times of many steps. They are due with every event but the
    report of a step, and with that once there are `STEPS_MAX` of them, or they sum to `WALL_S_MAX`: so an
    epoch's times are in the log before its end, and a worker that dies takes those of its last second, or of
    its last step, with it.
    """

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []

    def add(self, times: StepTimes) -> None:
        """Add the times of a step."""
        self._steps.append(times)

    def pop_due(self, event: Event, worker: int) -> list[Event]:
        """Return the times to send before an event of this worker, as no event or one, and forget them."""
        is_due = (
            not isinstance(event, _STEP_REPORTS)
            or len(self._steps) >= STEPS_MAX
            or sum(times.wall_s for times in self._steps) >= WALL_S_MAX
        )
        return self.pop_all(worker) if is_due else []

    def pop_all(self, worker: int) -> list[Event]:
        """Return all times, as no event or one of this worker, and forget them."""
        steps, self._steps = self._steps, []
        return [StepsTimed(now_s=0.0, worker=worker, steps=tuple(steps))] if steps else []


class StepMeans:
    """Means over the steps since they were last read, or, where there is no step since, the same again."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._steps = 0
        self._is_read = False

    def add(self, times: StepTimes) -> None:
        """Add the times of a step."""
        if self._is_read:
            self._sums.clear()
            self._steps, self._is_read = 0, False
        self._steps += 1
        self._sums["samples"] += times.samples
        for field in _DURATIONS:
            self._sums[field] += getattr(times, field)

    def read(self) -> dict[str, float]:
        """Return the means per step in seconds, and the samples per second; 0 before the first step."""
        self._is_read = True
        means = {name: self._sums[field] / max(self._steps, 1) for field, name in _DURATIONS.items()}
        wall_s = self._sums["wall_s"]
        return {**means, "samples_per_s": self._sums["samples"] / wall_s if wall_s else 0.0}
