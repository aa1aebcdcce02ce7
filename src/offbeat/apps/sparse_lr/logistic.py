"""Logistic regression with an L1 penalty, and the steps of its delayed block proximal gradient method.

    minimise over w:  sum_i log(1 + exp(-m_i)) + l1 |w|_1,   m_i = y_i x_i . w   (the margins)

Examples are `SignedColumns`, whose values include the labels. A worker computes gradients and curvature
bounds of its rows; a server sums the pushes of all workers and takes a step. Nothing here knows which worker
waits for which, or how parameters are transferred.

Source: M. Li, D. G. Andersen, A. Smola and K. Yu, "Communication efficient distributed machine learning with
the parameter server", NIPS 2014, sections 4 and 5, and its authors' code (dmlc/parameter_server) for bounds,
the trust region and the stopping rule. Deviations: margins are stored as sums, not as exp(m_i), which would
overflow; servers do not mark coordinates to skip with NaN: workers find them in what they pull
(`filters.KKT`).

Shapes: N rows, D keys (of a block, where there are blocks), Z non-zero values.
"""

# ruff: noqa: N803, N806 - shape suffixes in names are capitals

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.apps.sparse_lr.sparse import SignedColumns, sum_by_index
from offbeat.numerics.ps.block_proximal import WIDTH_INITIAL, next_widths

Active: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.bool_]]  # (D,) in and out

_ROUNDING = float(np.finfo(np.float64).eps)


def loss(margins_N: NDArray[np.float64]) -> float:
    """Return the sum of log(1 + exp(-m)), without overflow."""
    return float(np.logaddexp(0, -margins_N).sum())


def error_probability(margins_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that each label is wrong, 1 / (1 + exp(m)), (N,): minus the loss's slope."""
    return np.exp(-np.logaddexp(0, margins_N))


def gradient(columns: SignedColumns, margins_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the derivative of the loss with respect to each column's weight, (D,), without the penalty."""
    return -columns.column_sums(columns.values * _per_value(columns, margins_N, error_probability))


def curvature_bounds(
    columns: SignedColumns, margins_N: NDArray[np.float64], widths_D: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return an upper bound of the loss's second derivative in each weight, if only that weight moves.

    sum_i min(p_i (1 - p_i) exp(|x_ij| width_j), 1/4) x_ij^2, with p_i from `error_probability`.

    Args:
        columns: columns of the weights that may move.
        margins_N: current margins.
        widths_D: how far each weight may move for the bound to hold, at least 0 and finite.

    Returns:
        The bounds, (D,).
    """
    sizes_Z = np.abs(columns.values)
    logs_Z = _per_value(columns, margins_N, _log_slope) + sizes_Z * widths_D[columns.column_numbers()]
    return columns.column_sums(np.exp(np.minimum(logs_Z, np.log(0.25))) * sizes_Z * sizes_Z)


def _log_slope(margins_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of p (1 - p), also where p (1 - p) would underflow to 0."""
    return -np.logaddexp(0, margins_N) - np.logaddexp(0, -margins_N)


def _per_value(
    columns: SignedColumns,
    margins_N: NDArray[np.float64],
    function: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Apply a function to the margin of each value's row, (Z,), per value or per row, whichever are fewer."""
    if len(columns.rows) < columns.height:
        return function(margins_N[columns.rows])
    return function(margins_N)[columns.rows]


# Quality of weights -------------------------------------------------------------------------------------


def violations(
    weights_D: NDArray[np.float64], gradients_D: NDArray[np.float64], l1: float
) -> NDArray[np.float64]:
    """Return each weight's violation of the Karush-Kuhn-Tucker conditions, (D,); all 0 only at an optimum.

    For w = 0 it is max(|g| - l1, 0), for other weights |g + l1 sign(w)|.
    """
    return np.where(
        weights_D == 0,
        np.maximum(np.abs(gradients_D) - l1, 0),
        np.abs(gradients_D + l1 * np.sign(weights_D)),
    )


@dataclass(frozen=True, kw_only=True)
class Optimality:
    """Quality of some weights.

    Attributes:
        objective: loss plus penalty.
        gap: upper bound of the difference between the objective and its minimum; at least the rounding of one
            operation, although sums of many rows may be rounded more.
        violation: the largest of `violations`.
    """

    objective: float
    gap: float
    violation: float


def optimality(columns: SignedColumns, weights_D: NDArray[np.float64], l1: float) -> Optimality:
    """Return the objective at some weights, with a certified bound of its distance from the optimum.

    Source: K. Koh, S.-J. Kim and S. Boyd, "An interior-point method for large-scale l1-regularized logistic
    regression", JMLR 8, 2007, section 2: the vector of `error_probability`, scaled down until no gradient is
    above l1, is a feasible point of the dual problem, whose value is a lower bound of every objective.
    Deviation: there is no intercept.

    Args:
        columns: all examples.
        weights_D: one per column.
        l1: weight of the penalty, above 0.

    Returns:
        Objective, duality gap and largest violation.
    """
    margins_N = columns.multiply(weights_D)
    gradients_D = gradient(columns, margins_N)
    objective = loss(margins_N) + l1 * float(np.abs(weights_D).sum())
    steepest = float(np.abs(gradients_D).max(initial=0))
    scale = min(1.0, l1 / steepest) if steepest else 1.0
    dual_N = scale * error_probability(margins_N)
    return Optimality(
        objective=objective,
        gap=max(_ROUNDING * objective, objective - float(_entropies(dual_N).sum())),
        violation=float(violations(weights_D, gradients_D, l1).max(initial=0)),
    )


def _entropies(probabilities_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the entropy of each probability in nats, 0 for 0 and 1."""
    clipped = np.clip(probabilities_N, 1e-300, 1 - 1e-16)
    return -probabilities_N * np.log(clipped) - (1 - probabilities_N) * np.log1p(-clipped)


# Steps --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPush:
    """A worker's push of a block: two numbers for each of its active keys.

    Attributes:
        keys: ascending, int64 (D,).
        gradients: gradients of the worker's rows, (D,).
        bounds: bounds of their second derivatives, (D,).
    """

    keys: NDArray[np.int64]
    gradients: NDArray[np.float64]
    bounds: NDArray[np.float64]

    @property
    def rows(self) -> NDArray[np.float64]:
        """Gradient and bound of each key, (D, 2): `BlockProximal.apply` takes the sum of these."""
        return np.stack([self.gradients, self.bounds], 1)


def sum_pushes(pushes: Iterable[BlockPush]) -> BlockPush:
    """Return the sums of several pushes by key; the same pushes in the same order give the same bits.

    Raises:
        ValueError: there are no pushes.
    """
    pushes = list(pushes)
    if not pushes:
        raise ValueError("expected at least one push, got none")
    keys, index_of = np.unique(np.concatenate([push.keys for push in pushes]), return_inverse=True)
    gradients = np.concatenate([push.gradients for push in pushes])
    bounds = np.concatenate([push.bounds for push in pushes])
    return BlockPush(
        keys=keys,
        gradients=sum_by_index(index_of, gradients, len(keys)),
        bounds=sum_by_index(index_of, bounds, len(keys)),
    )


def kkt_margin_after(violation_max: float, rows: int) -> float:
    """Return the KKT filter's margin for the next pass: ten times this pass's largest violation, per row.

    Source: dmlc/parameter_server.

    Args:
        violation_max: largest of `violations` in the pass that ends.
        rows: number of rows of all workers.
    """
    return 10 * violation_max / rows


class PassSchedule:
    """Passes through all blocks: their order, and what follows a pass; the same on all workers.

    If the objective has changed by at most `epsilon` of itself, all keys are active in the next pass; if it
    changes by no more in that pass, it was the last one. Iterating yields the blocks of each pass in random
    order, as first key and the key after the last; `end_pass` must be called after each pass.

    Source: dmlc/parameter_server.

    Args:
        keys: number of keys of all blocks, 0 to `keys` - 1.
        blocks: largest number of contiguous blocks; all but the last have one size.
        rows: number of rows of all workers.
        epsilon: relative change of the objective below which it has converged, above 0.
        passes_max: largest number of passes.
        filtered: whether keys may be skipped at all.
        seed: seed of the order.

    Attributes:
        passes_ended: number of passes that have ended.
        kkt_margin: margin of the KKT filter in the next pass; infinite if all keys are to be active.
        is_over: there is no next pass.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        keys: int,
        blocks: int,
        rows: int,
        epsilon: float,
        *,
        passes_max: int = 10_000,
        filtered: bool = True,
        seed: int = 0,
    ) -> None:
        if min(keys, blocks, rows, passes_max) < 1 or not epsilon > 0:
            raise ValueError(
                "expected at least one key, block, row and pass, and an epsilon above 0, got "
                f"{keys}, {blocks}, {rows}, {passes_max} and {epsilon}"
            )
        size = -(-keys // blocks)
        self._blocks = list(itertools.pairwise([*range(0, keys, size), keys]))
        self._rows, self._epsilon, self._passes_max = rows, epsilon, passes_max
        self._filtered, self._random = filtered, random.Random(seed)
        self._objective = math.inf
        self._is_final_pass = False
        self.passes_ended, self.kkt_margin, self.is_over = 0, math.inf, False

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        while not self.is_over:
            yield self._random.sample(self._blocks, len(self._blocks))

    def end_pass(self, objective: float, violation_max: float) -> None:
        """Record the end of a pass, with its objective and the largest violation among the active keys."""
        is_converged = abs(self._objective - objective) <= self._epsilon * abs(objective)
        self.passes_ended += 1
        self.is_over = (is_converged and self._is_final_pass) or self.passes_ended == self._passes_max
        self._objective, self._is_final_pass = objective, is_converged
        is_filtered = self._filtered and not is_converged
        self.kkt_margin = kkt_margin_after(violation_max, self._rows) if is_filtered else math.inf


def descent_rate(block: SignedColumns) -> float:
    """Return a rate with which a step on up-to-date gradients does not increase the objective.

    It is 1 / k, with k the largest number of values in a row. A row's loss is convex, and so at most the mean
    of its losses as if each of its k weights moved alone, k times as far. Hence the rate is valid if no
    change is above the rate times its width. With several workers the smallest of their rates is valid. With
    delays it is a rule of thumb, for all columns that move before the others see it.

    Args:
        block: the columns that move together.
    """
    return 1.0 / max(1, int(np.bincount(block.rows).max(initial=1)))


class BlockWorker:
    """A worker's rows, and its copy of the weights; every operation costs as much as its block has values.

    A pull also adds one number to each row's margin.

    Args:
        columns: columns of its rows.
        l1: weight of the penalty.

    Attributes:
        columns: columns of its rows.
        weights_D: one per column; 0 until pulled.
        margins_N: margins of its rows at these weights; updated by each pull, never recomputed.
        violation: largest of `violations` since it was last set to 0, as at the start of a pass.
    """

    def __init__(self, columns: SignedColumns, l1: float) -> None:
        self.columns = columns
        self.weights_D = np.zeros(len(columns))
        self.margins_N = np.zeros(columns.height)
        self.violation = 0.0
        self._widths_D = np.full(len(columns), WIDTH_INITIAL)
        self._l1 = l1

    @property
    def loss(self) -> float:
        """The sum of the losses of its rows."""
        return loss(self.margins_N)

    def compute_push(self, first_key: int, stop_key: int, active: Active | None = None) -> BlockPush:
        """Return gradients and bounds of a block's keys, at the worker's copy of the weights.

        Args:
            first_key: first key of the block.
            stop_key: key after the block.
            active: returns a mask of the given keys that are active; by default all are.
        """
        positions = self.columns.column_slice(first_key, stop_key)
        block, widths_D = self.columns.slice_columns(positions), self._widths_D[positions]
        if active is not None:
            active_D = active(block.keys)
            block, widths_D = block.select(active_D), widths_D[active_D]
        return BlockPush(
            keys=block.keys,
            gradients=gradient(block, self.margins_N),
            bounds=curvature_bounds(block, self.margins_N, widths_D),
        )

    def apply_pull(
        self, keys_D: NDArray[np.int64], weights_D: NDArray[np.float64], gradients_D: NDArray[np.float64]
    ) -> None:
        """Set the weights that a step has changed; no step may be left out, or the widths would differ.

        Args:
            keys_D: keys that the step moved, ascending; keys without values in this worker's rows are
                ignored.
            weights_D: one per key.
            gradients_D: sums of all workers' gradients that the step used.
        """
        if not len(keys_D):
            return
        positions = self.columns.column_slice(int(keys_D[0]), int(keys_D[-1]) + 1)
        block = self.columns.slice_columns(positions)
        _, own, pulled = np.intersect1d(block.keys, keys_D, assume_unique=True, return_indices=True)
        weights_D, gradients_D = weights_D[pulled], gradients_D[pulled]
        before_D = self.weights_D[positions][own]
        changes_D = np.zeros(len(block))
        changes_D[own] = weights_D - before_D
        self.margins_N += block.multiply(changes_D)
        self.weights_D[positions][own] = weights_D
        self._widths_D[positions][own] = next_widths(changes_D[own])
        largest = violations(before_D, gradients_D, self._l1).max(initial=0.0)
        self.violation = max(self.violation, float(largest))
