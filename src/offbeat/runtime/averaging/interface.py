"""Interfaces of gradient averagers, and the encoding of float64 values in float32 tensors.

`Averager` is the interface to the training loop, `AveragerContext` what an averager requires of its session.
This module implements no averager and no exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from offbeat.runtime.devices.interface import Device
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.tracing import Tracer
from offbeat.runtime.training.writes import WriteDetector

FLOAT32_PER_FLOAT64 = 3  # float32 numbers that hold one float64


class AveragerContext(Protocol):
    """What an averager requires of its session."""

    @property
    def timer(self) -> PartTimer:
        """Splits the worker's wall time into parts."""

    @property
    def device(self) -> Device:
        """The device that holds the model."""

    @property
    def tracer(self) -> Tracer | None:
        """Records a timeline; None where no tracing was requested."""

    @property
    def writes(self) -> WriteDetector:
        """Tracks what the program writes to parameters and optimizer state."""

    @property
    def has_preemption_signal(self) -> bool:
        """Whether this worker knows of a preemption signal, its own or another worker's."""

    def raise_if_failed(self) -> None:
        """Raise an error if the job has failed."""

    def on_computed(self, wait_for_compute_s: Callable[[], float]) -> None:
        """Report the end of a forward and backward pass; may block to inject slowness.

        Args:
            wait_for_compute_s: returns the compute time of the pass, in seconds; on an accelerator it blocks
                until the device has computed it, so that slowness begins where the pass ends.
        """

    def announce_gradients(self, compute_s: float) -> tuple[int, int]:
        """Announce this worker's gradients, before it waits for any other member.

        Returns:
            The numbers of assigned blocks behind them: its own, and those that other workers computed for it.
        """

    def hyperparameters(self) -> list[float]:
        """Return this worker's hyperparameters; each member has as many, and all use the first member's."""

    def apply_hyperparameters(
        self, values: list[float], groups: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Apply the first member's values to `groups`, by default the optimizer's parameter groups."""


class Averager(Protocol):
    """Makes a worker's gradients the mean over its group."""

    @property
    def round(self) -> int:
        """Number of finished rounds."""

    @property
    def has_no_pending_gradient(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""

    @property
    def is_preempted(self) -> bool:
        """Whether a round that all members have finished reported a preemption signal."""

    def attach(self) -> None:
        """Register the hooks on the model."""

    def detach(self) -> None:
        """Remove all hooks from the model."""

    def set_batch_weight(self, batches: float) -> None:
        """Set the weight of the next backward passes, 1 for a whole batch; with 0 they have no effect."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate without an exchange, which follows the next one outside."""

    def before_step(self, *, has_closure: bool) -> None:
        """Prepare an optimizer's step; with `has_closure`, a closure computes its gradients."""

    def after_step(self) -> None:
        """End a step, in which one or several optimizers have stepped."""

    @property
    def has_deferred_step(self) -> bool:
        """Whether the last step is still to be applied to some parameters."""

    def apply_deferred_step(self) -> None:
        """Apply the deferred part of the last step."""

    def flush(self) -> None:
        """Complete all outstanding work at the end of the loop."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds beyond model and optimizers, the same on all members."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, possibly of another averager; all members load the same."""

    def local_state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this worker alone."""

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `local_state_dict`, possibly of another averager.

        Raises:
            OffbeatError: it is of another model.
        """


def split_float64(values: Sequence[float]) -> list[float]:
    """Split float64 values into `FLOAT32_PER_FLOAT64` float32 numbers each, whose sum is the value to its
    last bit.
    """
    parts = []
    for value in values:
        for _ in range(FLOAT32_PER_FLOAT64):
            parts.append(float(torch.tensor(value, dtype=torch.float32, device="cpu")))
            value -= parts[-1]
    return parts


def join_float64(parts: Sequence[float]) -> list[float]:
    """Join what `split_float64` split: sum each `FLOAT32_PER_FLOAT64` numbers in float64."""
    return [
        sum(parts[start : start + FLOAT32_PER_FLOAT64]) for start in range(0, len(parts), FLOAT32_PER_FLOAT64)
    ]
