"""What averages a worker's gradients, and what it needs of the session that it works for.

What all such averagers share is here: their two sides as protocols, and how numbers of double precision
travel among those of single precision. This module knows no averager, and nothing of how they exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.tracing import Tracer
from offbeat.runtime.training.writes import Writes

WORD_S = 5.0  # the coordinator has the same deadline and knows who is late, so it has the first word
LANES = 3  # numbers of single precision that hold one of double precision


class Host(Protocol):
    """What the averager needs of the session that it works for."""

    @property
    def timer(self) -> PartTimer:
        """Splits the worker's wall time into parts."""

    @property
    def tracer(self) -> Tracer | None:
        """Takes note of what happens when, if somebody wants to know."""

    @property
    def writes(self) -> Writes:
        """What the program writes to parameters and optimizer state."""

    @property
    def is_signalled(self) -> bool:
        """Whether this worker knows of a preemption signal, its own or another's."""

    def check(self) -> None:
        """Raises if the job has failed."""

    def computed(self, compute_s: float) -> None:
        """Hears how long a forward and backward pass computed; may delay its end (injected slowness)."""

    def ready(self, compute_s: float) -> tuple[int, int]:
        """Hears that this worker's gradients are on their way, before anybody is waited for.

        Returns:
            How many dealt blocks they are of: its own, and those that others have computed for it.
        """

    def hyperparameters(self) -> list[float]:
        """Numbers of which all members are to use the first one's, as many on all of them."""

    def take_hyperparameters(
        self, values: list[float], groups: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Hears the first member's; uses them in these groups, by default in the optimizer's."""


class Averager(Protocol):
    """Keeps a worker's gradients those of its group."""

    @property
    def round(self) -> int:
        """Rounds finished."""

    @property
    def is_clear(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""

    @property
    def is_preempted(self) -> bool:
        """Whether a round that all members have finished has said that one of them knows of a signal."""

    def attach(self) -> None:
        """Puts the hooks on the model."""

    def detach(self) -> None:
        """Takes every hook off the model again."""

    def weigh(self, batches: float) -> None:
        """Says what the next backward passes count, relative to a whole batch; with 0 they leave no trace."""

    def quiet(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate; the exchange comes with the next one outside."""

    def before_step(self, *, has_closure: bool) -> None:
        """An optimizer is about to step; `has_closure`: which computes its gradients by itself."""

    def after_step(self) -> None:
        """A step is over: an optimizer, or several, have stepped since the last call."""

    @property
    def puts_off(self) -> bool:
        """Whether the last step is yet to be taken with some parameters."""

    def drain(self) -> None:
        """Takes what has been put off of the last step."""

    def flush(self) -> None:
        """The loop is over: leaves nothing that is still to come."""


def spread(values: Sequence[float]) -> list[float]:
    """Returns numbers of single precision, `LANES` a value, that hold the values to their last bits."""
    lanes = []
    for value in values:
        for _ in range(LANES):
            lanes.append(float(torch.tensor(value, dtype=torch.float32, device="cpu")))
            value -= lanes[-1]
    return lanes


def gathered(lanes: Sequence[float]) -> list[float]:
    """Returns the values that were spread: their lanes' sums, in double precision."""
    return [sum(lanes[lane : lane + LANES]) for lane in range(0, len(lanes), LANES)]
