"""Interfaces of gradient averagers, and the encoding of float64 values in float32 tensors.

`Averager` is the interface to the training loop, `Host` what an averager requires of its session. This module
implements no averager and no exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.tracing import Tracer
from offbeat.runtime.training.writes import Writes

WORD_S = 5.0  # added to a deadline, so that the coordinator's error, which names the late worker, comes first
LANES = 3  # float32 numbers that hold one float64


class Host(Protocol):
    """What an averager requires of its session."""

    @property
    def timer(self) -> PartTimer:
        """Splits the worker's wall time into parts."""

    @property
    def tracer(self) -> Tracer | None:
        """Records a timeline; None where no tracing was requested."""

    @property
    def writes(self) -> Writes:
        """Tracks what the program writes to parameters and optimizer state."""

    @property
    def is_signalled(self) -> bool:
        """Whether this worker knows of a preemption signal, its own or another worker's."""

    def check(self) -> None:
        """Raises an error if the job has failed."""

    def computed(self, compute_s: float) -> None:
        """Reports the compute time of a forward and backward pass; may block to inject slowness."""

    def ready(self, compute_s: float) -> tuple[int, int]:
        """Announces this worker's gradients, before it waits for any other member.

        Returns:
            The numbers of assigned blocks behind them: its own, and those that other workers computed for it.
        """

    def hyperparameters(self) -> list[float]:
        """This worker's hyperparameters; all members have equally many, and all use the first member's."""

    def take_hyperparameters(
        self, values: list[float], groups: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Applies the first member's values to `groups`, by default the optimizer's parameter groups."""


class Averager(Protocol):
    """Makes a worker's gradients the mean over its group."""

    @property
    def round(self) -> int:
        """Number of finished rounds."""

    @property
    def is_clear(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""

    @property
    def is_preempted(self) -> bool:
        """Whether a round that all members have finished reported a preemption signal."""

    def attach(self) -> None:
        """Registers the hooks on the model."""

    def detach(self) -> None:
        """Removes all hooks from the model."""

    def weigh(self, batches: float) -> None:
        """Sets the weight of the next backward passes, 1 for a whole batch; with 0 they have no effect."""

    def quiet(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate without an exchange, which follows the next one outside."""

    def before_step(self, *, has_closure: bool) -> None:
        """Prepares an optimizer's step; with `has_closure`, a closure computes its gradients."""

    def after_step(self) -> None:
        """Ends a step, in which one or several optimizers have stepped."""

    @property
    def puts_off(self) -> bool:
        """Whether the last step is still to be applied to some parameters."""

    def drain(self) -> None:
        """Applies the deferred part of the last step."""

    def flush(self) -> None:
        """Completes all outstanding work at the end of the loop."""


def spread(values: Sequence[float]) -> list[float]:
    """Splits float64 values into `LANES` float32 numbers each, whose sum is the value to its last bit."""
    lanes = []
    for value in values:
        for _ in range(LANES):
            lanes.append(float(torch.tensor(value, dtype=torch.float32, device="cpu")))
            value -= lanes[-1]
    return lanes


def gathered(lanes: Sequence[float]) -> list[float]:
    """Joins what `spread` split: sums each `LANES` numbers in float64."""
    return [sum(lanes[lane : lane + LANES]) for lane in range(0, len(lanes), LANES)]
