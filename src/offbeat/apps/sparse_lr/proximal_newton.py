"""The optimum of L1-regularised logistic regression on one machine, with a certificate.

Nothing here is distributed; it holds a dense square matrix over the non-zero weights.

Shapes: N rows, D keys, S keys of the working set, R rows of a chunk.
"""

# ruff: noqa: N803, N806 - shape suffixes in names are capitals

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.apps.sparse_lr.logistic import Optimality, error_probability, gradient, loss, optimality
from offbeat.apps.sparse_lr.sparse import SignedColumns
from offbeat.errors import OffbeatError

_PASSES_MAX = 100
_SWEEPS_MAX = 1000
_ARMIJO = 1e-4
_HALVINGS_MAX = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class Optimum:
    """Weights that are optimal up to a certified duality gap.

    Attributes:
        weights: one per column, float64 (D,); exactly 0 where the penalty keeps them at 0.
        optimality: their objective and duality gap.
        passes: number of Newton steps.
    """

    weights: NDArray[np.float64]
    optimality: Optimality
    passes: int


def solve(columns: SignedColumns, l1: float, *, relative_gap: float = 1e-9) -> Optimum:
    """Minimise the loss plus the penalty until the duality gap is at most `relative_gap` of the objective.

    Source: G.-X. Yuan, C.-H. Ho and C.-J. Lin, "An improved GLMNET for L1-regularized logistic regression",
    JMLR 13, 2012, algorithm 2. Deviations: the Hessian is stored, dense, for the weights that are not 0 or
    may not stay 0; the quadratic model is minimised completely; the duality gap decides when to stop.

    Args:
        columns: all examples.
        l1: weight of the penalty, above 0.
        relative_gap: above 0; about 1e-14 is the limit of rounding.

    Returns:
        The optimum.

    Raises:
        ValueError: a number is out of range.
        OffbeatError: the gap is not reached in 100 Newton steps.
    """
    if not l1 > 0 or not relative_gap > 0:
        raise ValueError(f"expected l1 and a relative gap above 0, got {l1} and {relative_gap}")
    weights_D = np.zeros(len(columns))
    for passes in range(_PASSES_MAX):
        reached = optimality(columns, weights_D, l1)
        if reached.gap <= relative_gap * reached.objective:
            return Optimum(weights=weights_D, optimality=reached, passes=passes)
        margins_N = columns.multiply(weights_D)
        gradients_D = gradient(columns, margins_N)
        working_D = (weights_D != 0) | (np.abs(gradients_D) > l1)
        working = columns.select(working_D)
        changes_S = _model_minimum(
            hessian(working, margins_N), gradients_D[working_D], weights_D[working_D], l1
        )
        weights_D[working_D] += changes_S * _step_length(
            working, margins_N, weights_D[working_D], gradients_D[working_D], changes_S, l1
        )
    raise OffbeatError(
        f"expected a relative gap of {relative_gap:g} after {_PASSES_MAX} Newton steps, found "
        f"{reached.gap / reached.objective:g}; allow a larger one"
    )


def distance_from_optimum(
    columns: SignedColumns, weights_D: NDArray[np.float64], l1: float, *, relative_gap: float = 1e-10
) -> tuple[float, int]:
    """Return how far some weights are from the optimum.

    Args:
        columns: all examples.
        weights_D: one per column.
        l1: weight of the penalty, above 0.
        relative_gap: of the optimum itself, as for `solve`.

    Returns:
        The relative excess of their objective over the optimum's, and how many weights are zero in only one
        of the two.

    Raises:
        OffbeatError: as for `solve`.
    """
    best = solve(columns, l1, relative_gap=relative_gap)
    objective = optimality(columns, weights_D, l1).objective
    gap = objective / best.optimality.objective - 1
    return gap, int(np.count_nonzero((weights_D == 0) != (best.weights == 0)))


def hessian(
    columns: SignedColumns, margins_N: NDArray[np.float64], *, chunk_numbers: int = 1 << 22
) -> NDArray[np.float64]:
    """Return the second derivatives of the loss with respect to the weights of some columns.

    Args:
        columns: columns of these weights.
        margins_N: margins at which to differentiate.
        chunk_numbers: approximate size of the dense chunks, in numbers; 4 Mi are 32 MiB.

    Returns:
        Dense, (S, S).
    """
    error_N = error_probability(margins_N)
    roots_N = np.sqrt(error_N * error_probability(-margins_N))
    column_of_Z = columns.column_numbers()
    hessian_SS = np.zeros((len(columns), len(columns)))
    height = max(1, chunk_numbers // max(1, len(columns)))
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
    """Return changes d that minimise g d + d H d / 2 + l1 |w + d|, (S,).

    Coordinate descent finds the zero weights and the signs of the others. It is slow if columns are nearly
    dependent; therefore each sweep is followed by a step to the minimum for these signs.
    """
    bounds_S = np.diag(hessian_SS) + 1e-12
    current_S = weights_S.copy()
    for _ in range(_SWEEPS_MAX):
        slopes_S = gradients_S + hessian_SS @ (current_S - weights_S)
        before_S = current_S.copy()
        for index, bound in enumerate(bounds_S.tolist()):
            before = current_S[index]
            centre = before - slopes_S[index] / bound
            after = np.sign(centre) * max(abs(centre) - l1 / bound, 0.0)
            if after != before:
                current_S[index] = after
                slopes_S += hessian_SS[index] * (after - before)
        if np.abs((current_S - before_S) * bounds_S).max(initial=0) <= 1e-12 * l1:
            break
        _step_to_minimum_for_signs(hessian_SS, slopes_S, current_S, l1)
    return current_S - weights_S


def _step_to_minimum_for_signs(
    hessian_SS: NDArray[np.float64], slopes_S: NDArray[np.float64], current_S: NDArray[np.float64], l1: float
) -> None:
    """Move non-zero weights, in place, to the model's minimum or to where the first of them becomes zero."""
    free = np.flatnonzero(current_S)
    current_F, hessian_FF = current_S[free], hessian_SS[np.ix_(free, free)]
    ridge_FF = np.diag(1e-12 * np.diag(hessian_FF) + 1e-12)
    changes_F = np.linalg.solve(hessian_FF + ridge_FF, -(slopes_S[free] + l1 * np.sign(current_F)))
    crosses_F = np.flatnonzero(current_F * (current_F + changes_F) < 0)
    lengths = -current_F[crosses_F] / changes_F[crosses_F]
    current_S[free] += min(1.0, lengths.min(initial=1.0)) * changes_F
    if len(lengths):
        current_S[free[crosses_F[lengths.argmin()]]] = 0.0


def _step_length(
    columns: SignedColumns,
    margins_N: NDArray[np.float64],
    weights_S: NDArray[np.float64],
    gradients_S: NDArray[np.float64],
    changes_S: NDArray[np.float64],
    l1: float,
) -> float:
    """Return the largest of 1, 1/2, 1/4, ... that decreases the objective enough, up to rounding."""
    moved_N = columns.multiply(changes_S)
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
