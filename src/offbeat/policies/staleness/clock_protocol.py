"""The worker's side of the strategies with bounded staleness."""

from __future__ import annotations

from offbeat.events import Action, AssignBlocks, Event, StepPermit
from offbeat.policies import unexpected_action
from offbeat.policies.data.block_queue import BlockQueue


class ClockProtocol:
    """Keeps the permit of the worker's next step, and its samples.

    Attributes:
        block_queue: the blocks of samples assigned to the worker.
        permit: the last StepPermit received; set to None before another is requested.
    """

    def __init__(self) -> None:
        self.block_queue = BlockQueue()
        self.permit: StepPermit | None = None

    @property
    def round(self) -> int:
        """See `WorkerProtocol.round`."""
        return 0

    def handle(self, action: Action) -> list[Event]:
        """See `WorkerProtocol.handle`."""
        match action:
            case StepPermit():
                self.permit = action
            case AssignBlocks():
                self.block_queue.on_assigned(action)
            case _:
                raise unexpected_action(self, action)
        return []
