"""Decides from an epoch's metrics whether it is the best so far, and whether to stop training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from offbeat.errors import OffbeatError

MetricMode: TypeAlias = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class EpochVerdict:
    """Result of one epoch: whether it is the best so far, and whether training should stop."""

    has_improved: bool
    should_stop: bool


class EarlyStopping:
    """Watches one metric, for the best snapshot and for early stopping.

    An epoch improves on the best one if its metric is better by more than `delta_min`; NaN never does. After
    `patience` epochs in a row without an improvement, training should stop.

    Source: L. Prechelt, "Early stopping - but when?", in Neural Networks: Tricks of the Trade, 1998, its
    third class of criteria (UP), counted in epochs that do not improve on the best.

    Args:
        metric: name of the metric in the result of `evaluate`.
        mode: whether a smaller ("min") or a larger ("max") value is better.
        patience: epochs without an improvement until training should stop, at least 1; None never stops.
        delta_min: the least improvement, in the metric's unit, at least 0.

    Raises:
        ValueError: an argument out of range.

    Attributes:
        best: the best value so far, None before the first number.
        best_epoch: the epoch of the best value, None before the first number.
    """

    def __init__(
        self, metric: str, *, mode: MetricMode = "min", patience: int | None = None, delta_min: float = 0.0
    ) -> None:
        if mode not in get_args(MetricMode):
            raise ValueError(f"expected mode 'min' or 'max', got {mode!r}")
        if patience is not None and patience < 1:
            raise ValueError(f"expected a patience of at least 1 epoch, got {patience}")
        if not 0 <= delta_min < math.inf:
            raise ValueError(f"expected delta_min to be finite and at least 0, got {delta_min}")
        self.metric = metric
        self._sign = 1.0 if mode == "max" else -1.0
        self._patience, self._delta_min = patience, delta_min
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._epochs_without_improvement = 0  # epochs in a row

    def __repr__(self) -> str:
        mode = "max" if self._sign > 0 else "min"
        return (
            f"{type(self).__name__}({self.metric!r}, mode={mode!r}, patience={self._patience}, "
            f"delta_min={self._delta_min!r})"
        )

    def value_of(self, metrics: Mapping[str, float]) -> float:
        """Return the value of the watched metric.

        Raises:
            OffbeatError: there is no metric of that name; the message lists the existing ones.
        """
        if self.metric not in metrics:
            names = ", ".join(metrics) or "none"
            raise OffbeatError(f"expected evaluate to return {self.metric!r}, which is watched, got {names}")
        return metrics[self.metric]

    def observe(self, epoch: int, metrics: Mapping[str, float]) -> EpochVerdict:
        """Record the metrics of an epoch, and return the verdict; epochs come in order."""
        value = self.value_of(metrics)
        improved = not math.isnan(value) and (
            self.best is None or self._sign * (value - self.best) > self._delta_min
        )
        if improved:
            self.best, self.best_epoch, self._epochs_without_improvement = value, epoch, 0
        else:
            self._epochs_without_improvement += 1
        return EpochVerdict(
            has_improved=improved,
            should_stop=self._patience is not None and self._epochs_without_improvement >= self._patience,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which a monitor with the same arguments can continue, as plain data."""
        return {"best": self.best, "best_epoch": self.best_epoch, "without": self._epochs_without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.best, self.best_epoch = state["best"], state["best_epoch"]
        self._epochs_without_improvement = state["without"]
