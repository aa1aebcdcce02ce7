"""The server's step of the delayed block proximal gradient method, as an `Update`.

    minimise over w:  loss(w) + l1 |w|_1

Source: M. Li, D. G. Andersen, A. Smola and K. Yu, "Communication efficient distributed machine learning with
the parameter server", NIPS 2014, section 4, and its authors' code (dmlc/parameter_server) for the trust
region.

Shapes: D keys.
"""

# ruff: noqa: N803, N806 - shape suffixes in names are capitals

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

WIDTH_INITIAL = 1.0
WIDTH_MAX = 5.0
_BOUND_MIN = 1e-10


def soft_threshold_changes(
    weights_D: NDArray[np.floating],
    gradients_D: NDArray[np.floating],
    bounds_D: NDArray[np.floating],
    l1: float,
) -> NDArray[np.floating]:
    """Return the change of each weight that minimises g d + U d^2 / 2 + l1 |w + d|, (D,).

    d = -(g + l1) / U  where g + l1 <= U w,  -(g - l1) / U  where g - l1 >= U w,  else -w

    Args:
        weights_D: w.
        gradients_D: g.
        bounds_D: U, above 0.
        l1: weight of the penalty, at least 0.
    """
    threshold_D = bounds_D * weights_D
    rises, falls = gradients_D + l1, gradients_D - l1
    return np.where(
        rises <= threshold_D,
        -rises / bounds_D,
        np.where(falls >= threshold_D, -falls / bounds_D, -weights_D),
    )


def next_widths(changes_D: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return how far weights may move in the step after these changes: min(5, 2 |d| + 0.1), (D,).

    Worker and server compute it independently, from the same changes. Source: dmlc/parameter_server.
    """
    widths_D: NDArray[np.floating] = np.minimum(WIDTH_MAX, 2 * np.abs(changes_D) + 0.1)
    return widths_D


@dataclass(frozen=True, kw_only=True)
class BlockProximal:
    """The server's step on the sum of all workers' pushes; row by row, so that a block may be split anywhere.

    An `Update` for a namespace that aggregates: pushed rows are (gradient, bound), pulled rows are (weight,
    the sum of gradients of its last step). Weights start at zero.

    Args:
        l1: weight of the penalty, above 0.
        rate: eta, above 0. Each bound holds for one weight that moves alone, but all weights of a block move
            at once, and delays hide changes of other blocks; therefore the more features are correlated, the
            smaller the rate must be. The paper's theorem needs about 1 / (L_var + tau L_cov);
            `descent_rate` needs no search.

    Raises:
        ValueError: a number is out of range.
    """

    width: ClassVar[int] = 2

    l1: float
    rate: float

    def __post_init__(self) -> None:
        for name in ("l1", "rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} above 0, got {getattr(self, name)}")

    @property
    def states(self) -> tuple[str, ...]:
        """See `Update.states`; a weight's width is in the first column, 0 before its first step."""
        return ("widths",)

    def apply(
        self,
        values: NDArray[np.floating],
        states: dict[str, NDArray[np.floating]],
        pushed: NDArray[np.floating],
    ) -> None:
        """See `Update.apply`."""
        stored_D = states["widths"][:, 0]
        widths_D = np.where(stored_D == 0, WIDTH_INITIAL, stored_D)
        self.step(values[:, 0], widths_D, pushed[:, 0], pushed[:, 1])
        stored_D[...] = widths_D
        values[:, 1] = pushed[:, 0]

    def step(
        self,
        weights_D: NDArray[np.floating],
        widths_D: NDArray[np.floating],
        gradients_D: NDArray[np.floating],
        bounds_D: NDArray[np.floating],
    ) -> None:
        """Move weights by a soft-threshold step within their widths, and set the next widths; both in place.

        Args:
            weights_D: weights of the pushed keys.
            widths_D: how far each may move; `WIDTH_INITIAL` before the first step.
            gradients_D: sum of all workers' gradients.
            bounds_D: sum of all workers' bounds.
        """
        changes_D = soft_threshold_changes(weights_D, gradients_D, bounds_D / self.rate + _BOUND_MIN, self.l1)
        before_D = weights_D.copy()
        weights_D += np.clip(changes_D, -widths_D, widths_D)
        widths_D[...] = next_widths(weights_D - before_D)  # the same bits as on workers
