"""The optimum of logistic regression with an L1 penalty, on one machine and with a proof.

Nothing here is distributed, and it holds a dense matrix of the weights that are not zero, squared.

Shapes: N rows, D keys, S keys of the working set, R rows of a piece.
"""

# ruff: noqa: N803, N806 - shapes stand in names in capitals

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.numerics.logistic import Standing, gradient, loss, mistrust, standing
from offbeat.numerics.sparse import SignedColumns

_PASSES_MAX = 100
_SWEEPS_MAX = 1000
_ARMIJO = 1e-4
_HALVINGS_MAX = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class Optimum:
    """Weights that are proved to be as good as any.

    Attributes:
        weights: one a column, float64 (D,); exactly 0 where the penalty keeps them there.
        standing: how good they are.
        passes: how many Newton steps it took.
    """

    weights: NDArray[np.float64]
    standing: Standing
    passes: int


def solve(columns: SignedColumns, l1: float, *, relative_gap: float = 1e-9) -> Optimum:
    """Minimise the loss and the penalty until the duality gap is at most `relative_gap` of the objective.

    Source: G.-X. Yuan, C.-H. Ho and C.-J. Lin, "An improved GLMNET for L1-regularized logistic regression",
    JMLR 13, 2012, algorithm 2. Deviations: the Hessian is held, dense, for the weights that are not 0 or may
    not stay it; the quadratic model is minimised to the end; the gap decides when to stop.

    Args:
        columns: all examples.
        l1: the weight of the penalty, above 0.
        relative_gap: above 0; rounding is reached at about 1e-14.

    Returns:
        The optimum.

    Raises:
        ValueError: a number out of range.
        OffbeatError: the gap is not reached in 100 Newton steps.
    """
    if not l1 > 0 or not relative_gap > 0:
        raise ValueError(f"expected l1 and a relative gap above 0, got {l1} and {relative_gap}")
    weights_D = np.zeros(len(columns))
    for passes in range(_PASSES_MAX):
        reached = standing(columns, weights_D, l1)
        if reached.gap <= relative_gap * reached.objective:
            return Optimum(weights=weights_D, standing=reached, passes=passes)
        margins_N = columns.times(weights_D)
        gradients_D = gradient(columns, margins_N)
        working_D = (weights_D != 0) | (np.abs(gradients_D) > l1)
        working = columns.chosen(working_D)
        changes_S = _model_minimum(
            hessian(working, margins_N), gradients_D[working_D], weights_D[working_D], l1
        )
        weights_D[working_D] += changes_S * _step_length(
            working, margins_N, weights_D[working_D], gradients_D[working_D], changes_S, l1
        )
    raise OffbeatError(
        f"expected a relative gap of {relative_gap:g} after {_PASSES_MAX} Newton steps, found "
        f"{reached.gap / reached.objective:g}; ask for a larger one"
    )


def compare(
    columns: SignedColumns, weights_D: NDArray[np.float64], l1: float, *, relative_gap: float = 1e-10
) -> tuple[float, int]:
    """Say how far some weights are from the optimum.

    Args:
        columns: all examples.
        weights_D: one a column.
        l1: the weight of the penalty, above 0.
        relative_gap: of the optimum itself, as for `solve`.

    Returns:
        By which share of it their objective is above the optimum's, and how many weights are zero in one of
        both only.

    Raises:
        OffbeatError: as `solve`.
    """
    best = solve(columns, l1, relative_gap=relative_gap)
    objective = standing(columns, weights_D, l1).objective
    gap = objective / best.standing.objective - 1
    return gap, int(np.count_nonzero((weights_D == 0) != (best.weights == 0)))


def hessian(
    columns: SignedColumns, margins_N: NDArray[np.float64], *, numbers_at_once: int = 1 << 22
) -> NDArray[np.float64]:
    """The second derivatives of the loss in the weights of some columns.

    Args:
        columns: of these weights.
        margins_N: where they are.
        numbers_at_once: how many of all rows and columns are made dense together, about; 4 Mi are 32 MiB.

    Returns:
        Dense, (S, S).
    """
    wrong_N = mistrust(margins_N)
    roots_N = np.sqrt(wrong_N * mistrust(-margins_N))
    column_of_Z = columns.column_numbers()
    hessian_SS = np.zeros((len(columns), len(columns)))
    height = max(1, numbers_at_once // max(1, len(columns)))
    for first in range(0, columns.height, height):
        is_in_Z = (columns.rows >= first) & (columns.rows < first + height)
        dense_RS = np.zeros((min(height, columns.height - first), len(columns)))
        rows = columns.rows[is_in_Z]
        dense_RS[rows - first, column_of_Z[is_in_Z]] = columns.values[is_in_Z] * roots_N[rows]
        hessian_SS += dense_RS.T @ dense_RS
    return hessian_SS


def _model_minimum(
    hessian_SS: NDArray[np.float64],
    gradients_S: NDArray[np.float64],
    weights_S: NDArray[np.float64],
    l1: float,
) -> NDArray[np.float64]:
    """Changes d that minimise g d + d H d / 2 + l1 |w + d|, (S,).

    Coordinate descent finds which weights are zero and the signs of the others; as it is slow where columns
    nearly depend on each other, a step to the minimum for these signs follows each sweep.
    """
    bounds_S = np.diag(hessian_SS) + 1e-12
    now_S = weights_S.copy()
    for _ in range(_SWEEPS_MAX):
        slopes_S = gradients_S + hessian_SS @ (now_S - weights_S)
        before_S = now_S.copy()
        for place, bound in enumerate(bounds_S.tolist()):
            before = now_S[place]
            centre = before - slopes_S[place] / bound
            after = np.sign(centre) * max(abs(centre) - l1 / bound, 0.0)
            if after != before:
                now_S[place] = after
                slopes_S += hessian_SS[place] * (after - before)
        if np.abs((now_S - before_S) * bounds_S).max(initial=0) <= 1e-12 * l1:
            break
        _go_to_minimum_for_signs(hessian_SS, slopes_S, now_S, l1)
    return now_S - weights_S


def _go_to_minimum_for_signs(
    hessian_SS: NDArray[np.float64], slopes_S: NDArray[np.float64], now_S: NDArray[np.float64], l1: float
) -> None:
    """Move weights that are not zero, in place, to the model's minimum or to where the first becomes zero."""
    free = np.flatnonzero(now_S)
    now_F, hessian_FF = now_S[free], hessian_SS[np.ix_(free, free)]
    ridge_FF = np.diag(1e-12 * np.diag(hessian_FF) + 1e-12)
    changes_F = np.linalg.solve(hessian_FF + ridge_FF, -(slopes_S[free] + l1 * np.sign(now_F)))
    crosses_F = np.flatnonzero(now_F * (now_F + changes_F) < 0)
    lengths = -now_F[crosses_F] / changes_F[crosses_F]
    now_S[free] += min(1.0, lengths.min(initial=1.0)) * changes_F
    if len(lengths):
        now_S[free[crosses_F[lengths.argmin()]]] = 0.0


def _step_length(
    columns: SignedColumns,
    margins_N: NDArray[np.float64],
    weights_S: NDArray[np.float64],
    gradients_S: NDArray[np.float64],
    changes_S: NDArray[np.float64],
    l1: float,
) -> float:
    """The largest of 1, 1/2, 1/4, ... with which the objective falls enough, but for rounding."""
    moved_N = columns.times(changes_S)
    penalty = l1 * float(np.abs(weights_S).sum())
    before = loss(margins_N) + penalty
    fall = float(gradients_S @ changes_S) + l1 * float(np.abs(weights_S + changes_S).sum()) - penalty
    length = 1.0
    for _ in range(_HALVINGS_MAX):
        after = loss(margins_N + length * moved_N) + l1 * float(np.abs(weights_S + length * changes_S).sum())
        if after <= before + _ARMIJO * length * fall + 1e-14 * abs(before):
            break
        length /= 2
    return length
