"""The times of a worker's steps, until they are sent to the coordinator.

This module sends nothing.
"""

from __future__ import annotations

from typing import Final

from offbeat.events import Event, Ready, StepFinished, StepsTimed, StepTimes

STEPS_MAX: Final = 16
WALL_S_MAX: Final = 1.0
_STEP_REPORTS: Final = (Ready, StepFinished)


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
