"""The worker's side of the strategies that average models."""

from __future__ import annotations

from typing import Final

from offbeat.errors import ProtocolError
from offbeat.events import Action, AssignBlocks, AverageModels, CancelAveraging, Event, ModelsAveraged
from offbeat.policies import unexpected_action
from offbeat.policies.data.block_queue import BlockQueue

EXCHANGE_IDS: Final = 8
"""Exchange ids that one averaging may use, from the one that names it."""


class ModelAveragingProtocol:
    """Keeps the averaging that a worker is in: at most one, from its action until the worker has ended it.

    Args:
        worker: the worker's id.

    Attributes:
        block_queue: the blocks of samples assigned to the worker.
        averaging: what the worker has to do now; None while it trains.
        is_cancelled: `averaging` cannot be finished.
        last: the last AverageModels received, None before the first.
        steps_left: optimizer steps until the worker is ready for the next averaging.
    """

    def __init__(self, worker: int) -> None:
        self.block_queue = BlockQueue()
        self.averaging: AverageModels | None = None
        self.is_cancelled = False
        self.last: AverageModels | None = None
        self.steps_left = 1
        self._worker, self._round = worker, 0

    @property
    def is_ready(self) -> bool:
        """Whether the worker is ready for an averaging, and in none."""
        return self.averaging is None and not self.steps_left

    @property
    def round(self) -> int:
        """See `WorkerProtocol.round`: averagings that the worker has ended."""
        return self._round

    def handle(self, action: Action) -> list[Event]:
        """See `WorkerProtocol.handle`."""
        match action:
            case AssignBlocks():
                self.block_queue.on_assigned(action)
            case AverageModels():
                if self.averaging is not None:
                    raise ProtocolError(
                        f"expected no averaging before the end of {self.averaging.exchange_id}, got "
                        f"{action.exchange_id}"
                    )
                self.averaging = self.last = action
                self.is_cancelled = False
            case CancelAveraging():
                if self.averaging is not None and self.averaging.exchange_id == action.exchange_id:
                    self.is_cancelled = True
            case _:
                raise unexpected_action(self, action)
        return []

    def count_step(self) -> None:
        """Count an optimizer step, unless it is made during an averaging, or while ready for one."""
        if self.averaging is None and self.steps_left:
            self.steps_left -= 1

    def finish(self, *, model_steps: int, has_mean: bool, now_s: float = 0.0) -> ModelsAveraged:
        """End the averaging; return the event that reports it.

        Args:
            model_steps: see `ModelsAveraged`.
            has_mean: the worker's model is the mean, or the state that it has received.
            now_s: of the event, where the coordinator does not set it.
        """
        averaging, self.averaging, self.is_cancelled = self.averaging, None, False
        assert averaging is not None
        self.steps_left = averaging.steps[averaging.members.index(self._worker)] if has_mean else 1
        self._round += 1
        return ModelsAveraged(
            now_s=now_s,
            worker=self._worker,
            exchange_id=averaging.exchange_id,
            model_steps=model_steps,
            has_mean=has_mean,
        )
