"""The error of an averaging that the coordinator has cancelled."""

from __future__ import annotations

from offbeat.errors import WorkerError


class AveragingCancelledError(WorkerError):
    """An averaging was cancelled by the coordinator: the model keeps its values."""

    def __init__(self) -> None:
        super().__init__("the averaging was cancelled: a member cannot finish it")
