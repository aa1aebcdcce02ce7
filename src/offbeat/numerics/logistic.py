"""Logistic regression with an L1 penalty, and the steps of its delayed block proximal gradient.

    minimise over w:  sum_i log(1 + exp(-m_i)) + l1 |w|_1,   m_i = y_i x_i . w   (the margins)

Examples come as `SignedColumns`, which have the labels in their values. A worker computes gradients and
bounds of its rows; a server adds up what workers pushed and steps. Nothing here knows who waits for whom, or
how parameters travel.

Source: M. Li, D. G. Andersen, A. Smola and K. Yu, "Communication efficient distributed machine learning with
the parameter server", NIPS 2014, sections 4 and 5, and its authors' code (dmlc/parameter_server) for bounds,
the trust region and the end. Deviations: margins are kept as sums, not as exp(m_i), which would overflow;
servers do not mark with NaN who may be skipped: workers see it in what they pull (`filters.KKT`).

Shapes: N rows, D keys (of a block, where there are blocks), Z values that are not zero.
"""

# ruff: noqa: N803, N806 - shapes stand in names in capitals

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.numerics.sparse import SignedColumns, sums_at

Active: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.bool_]]  # (D,) in and out

WIDTH_FIRST = 1.0
WIDTH_MAX = 5.0
_BOUND_MIN = 1e-10
_ROUNDING = float(np.finfo(np.float64).eps)


def loss(margins_N: NDArray[np.float64]) -> float:
    """The sum of log(1 + exp(-m)), without overflow."""
    return float(np.logaddexp(0, -margins_N).sum())


def mistrust(margins_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """How likely the model holds each label to be wrong, 1 / (1 + exp(m)), (N,); the loss falls so fast."""
    return np.exp(-np.logaddexp(0, margins_N))


def gradient(columns: SignedColumns, margins_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """The derivative of the loss in the weight of each column, (D,), without the penalty."""
    return -columns.sums(columns.values * _at_values(columns, margins_N, mistrust))


def curvature_bounds(
    columns: SignedColumns, margins_N: NDArray[np.float64], widths_D: NDArray[np.float64]
) -> NDArray[np.float64]:
    """An upper bound of the loss's second derivative in each weight, if that alone moves and stays near.

    sum_i min(p_i (1 - p_i) exp(|x_ij| width_j), 1/4) x_ij^2, with p_i the mistrust.

    Args:
        columns: of the weights that may move.
        margins_N: where they are now.
        widths_D: how far each may move, at least 0 and finite.

    Returns:
        The bounds, (D,).
    """
    sizes_Z = np.abs(columns.values)
    logs_Z = _at_values(columns, margins_N, _log_slope) + sizes_Z * widths_D[columns.column_numbers()]
    return columns.sums(np.exp(np.minimum(logs_Z, np.log(0.25))) * sizes_Z * sizes_Z)


def _log_slope(margins_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm of p (1 - p), which would be 0 where it is not."""
    return -np.logaddexp(0, margins_N) - np.logaddexp(0, -margins_N)


def _at_values(
    columns: SignedColumns,
    margins_N: NDArray[np.float64],
    function: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """A function of the margin of each value's row, (Z,), once a value or once a row."""
    if len(columns.rows) < columns.height:
        return function(margins_N[columns.rows])
    return function(margins_N)[columns.rows]


# How good weights are -----------------------------------------------------------------------------------


def violations(
    weights_D: NDArray[np.float64], gradients_D: NDArray[np.float64], l1: float
) -> NDArray[np.float64]:
    """How far each weight is from the Karush-Kuhn-Tucker conditions, (D,); all are 0 at an optimum only.

    Of w = 0 it is max(|g| - l1, 0), of others |g + l1 sign(w)|.
    """
    return np.where(
        weights_D == 0,
        np.maximum(np.abs(gradients_D) - l1, 0),
        np.abs(gradients_D + l1 * np.sign(weights_D)),
    )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How good weights are.

    Attributes:
        objective: the loss and the penalty.
        gap: by how much at most the objective is above the smallest that there is; never below the
            rounding of one operation, but sums of many rows may be rounded more.
        violation: the largest of `violations`.
    """

    objective: float
    gap: float
    violation: float


def standing(columns: SignedColumns, weights_D: NDArray[np.float64], l1: float) -> Standing:
    """The objective at some weights, and a proof of how close to the optimum they are.

    Source: K. Koh, S.-J. Kim and S. Boyd, "An interior-point method for large-scale
    l1-regularized logistic regression", JMLR 8, 2007, section 2: the mistrust, scaled down until no gradient
    is above l1, is a feasible point of the dual problem, whose value no objective can be below.
    Deviation: there is no intercept.

    Args:
        columns: all examples.
        weights_D: one a column.
        l1: the weight of the penalty, above 0.

    Returns:
        Objective, duality gap and largest violation.
    """
    margins_N = columns.times(weights_D)
    gradients_D = gradient(columns, margins_N)
    objective = loss(margins_N) + l1 * float(np.abs(weights_D).sum())
    steepest = float(np.abs(gradients_D).max(initial=0))
    scale = min(1.0, l1 / steepest) if steepest else 1.0
    dual_N = scale * mistrust(margins_N)
    return Standing(
        objective=objective,
        gap=max(_ROUNDING * objective, objective - float(_entropies(dual_N).sum())),
        violation=float(violations(weights_D, gradients_D, l1).max(initial=0)),
    )


def _entropies(chances_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """The entropy of each chance in nats, that of 0 and 1 being 0."""
    inner = np.clip(chances_N, 1e-300, 1 - 1e-16)
    return -chances_N * np.log(inner) - (1 - chances_N) * np.log1p(-inner)


# Steps --------------------------------------------------------------------------------------------------


def soft_threshold_changes(
    weights_D: NDArray[np.floating],
    gradients_D: NDArray[np.floating],
    bounds_D: NDArray[np.floating],
    l1: float,
) -> NDArray[np.floating]:
    """What to add to each weight so that g d + U d^2 / 2 + l1 |w + d| is smallest, (D,).

    d = -(g + l1) / U  where g + l1 <= U w,  -(g - l1) / U  where g - l1 >= U w,  else -w

    Args:
        weights_D: w.
        gradients_D: g.
        bounds_D: U, above 0.
        l1: the weight of the penalty, at least 0.
    """
    threshold_D = bounds_D * weights_D
    rises, falls = gradients_D + l1, gradients_D - l1
    return np.where(
        rises <= threshold_D,
        -rises / bounds_D,
        np.where(falls >= threshold_D, -falls / bounds_D, -weights_D),
    )


def next_widths(changes_D: NDArray[np.floating]) -> NDArray[np.floating]:
    """How far weights may move in their next step, after these changes: min(5, 2 |d| + 0.1), (D,).

    Worker and server each compute it for themselves, from the same changes. Source: dmlc/parameter_server.
    """
    widths_D: NDArray[np.floating] = np.minimum(WIDTH_MAX, 2 * np.abs(changes_D) + 0.1)
    return widths_D


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPush:
    """What a worker has to say of a block: for each of its keys that is looked at, two numbers.

    Attributes:
        keys: ascending, int64 (D,).
        gradients: of its rows, (D,).
        bounds: of their second derivatives, (D,).
    """

    keys: NDArray[np.int64]
    gradients: NDArray[np.float64]
    bounds: NDArray[np.float64]

    @property
    def rows(self) -> NDArray[np.float64]:
        """Gradient and bound of each key, (D, 2): what `BlockProximal.apply` takes the sum of."""
        return np.stack([self.gradients, self.bounds], 1)


def aggregated(pushes: Iterable[BlockPush]) -> BlockPush:
    """The sums of what some workers pushed, by key; the same pushes in the same order give the same bits.

    Raises:
        ValueError: no push.
    """
    pushes = list(pushes)
    if not pushes:
        raise ValueError("expected at least one push, got none")
    keys, place_of = np.unique(np.concatenate([push.keys for push in pushes]), return_inverse=True)
    gradients = np.concatenate([push.gradients for push in pushes])
    bounds = np.concatenate([push.bounds for push in pushes])
    return BlockPush(
        keys=keys,
        gradients=sums_at(place_of, gradients, len(keys)),
        bounds=sums_at(place_of, bounds, len(keys)),
    )


@dataclass(frozen=True, kw_only=True)
class BlockProximal:
    """What a server makes of the sum of all workers' pushes; row by row, so that a block may be cut anywhere.

    As an `Update`, for a namespace that aggregates: what is pushed are rows (gradient, bound), what is pulled
    are rows (weight, the sum of gradients of its last step). Zero is where it begins.

    Args:
        l1: the weight of the penalty, above 0.
        rate: eta, above 0. Bounds are of each weight alone, but those of a block move together, and delays
            hide the moves of other blocks; so the more correlated features are, the smaller it must be. The
            paper's theorem asks for about 1 / (L_var + tau L_cov); `rate_that_descends` needs no search.

    Raises:
        ValueError: a number out of range.
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
        """See `Update.states`; the width of each weight is in the first column, 0 before its first step."""
        return ("widths",)

    def apply(
        self,
        values: NDArray[np.floating],
        states: dict[str, NDArray[np.floating]],
        pushed: NDArray[np.floating],
    ) -> None:
        """See `Update.apply`."""
        kept_D = states["widths"][:, 0]
        widths_D = np.where(kept_D == 0, WIDTH_FIRST, kept_D)
        self.step(values[:, 0], widths_D, pushed[:, 0], pushed[:, 1])
        kept_D[...] = widths_D
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
            weights_D: of the keys that were pushed.
            widths_D: how far each may move; `WIDTH_FIRST` before the first step.
            gradients_D: the sum of all workers'.
            bounds_D: likewise.
        """
        changes_D = soft_threshold_changes(weights_D, gradients_D, bounds_D / self.rate + _BOUND_MIN, self.l1)
        before_D = weights_D.copy()
        weights_D += np.clip(changes_D, -widths_D, widths_D)
        widths_D[...] = next_widths(weights_D - before_D)  # as workers see it, to the bit


def slack_after(violation_max: float, rows: int) -> float:
    """The margin of the KKT filter for the next pass: ten times the largest violation of this one, per row.

    Source: dmlc/parameter_server.

    Args:
        violation_max: the largest of `violations` in the pass that ends.
        rows: of all workers.
    """
    return 10 * violation_max / rows


class Passes:
    """Passes through all blocks: in which order, and what comes after one; the same for all workers.

    When the objective has changed by at most `epsilon` of itself, all keys are looked at in the next pass; if
    it changes by no more then, that was the last one. Iterating yields the blocks of each pass in random
    order, as first key and the key after the last; between two passes `ended` has to be told.

    Source: dmlc/parameter_server.

    Args:
        keys: of all blocks: 0 to `keys` - 1.
        blocks: of neighbours, how many at most; all but the last have one size.
        rows: of all workers.
        epsilon: above 0.
        passes_max: so many and no more.
        filtered: whether keys may be skipped at all.
        seed: of the order.

    Attributes:
        number: of passes that have ended.
        slack: the margin of the KKT filter in the next pass; infinite where all keys are to be looked at.
        is_over: there is no next pass.

    Raises:
        ValueError: a number out of range.
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
        self._filtered, self._chance = filtered, random.Random(seed)
        self._objective = math.inf
        self._is_last_chance = False
        self.number, self.slack, self.is_over = 0, math.inf, False

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        while not self.is_over:
            yield self._chance.sample(self._blocks, len(self._blocks))

    def ended(self, objective: float, violation_max: float) -> None:
        """A pass has ended, with this objective, and this largest violation of what was looked at."""
        is_converged = abs(self._objective - objective) <= self._epsilon * abs(objective)
        self.number += 1
        self.is_over = (is_converged and self._is_last_chance) or self.number == self._passes_max
        self._objective, self._is_last_chance = objective, is_converged
        is_filtered = self._filtered and not is_converged
        self.slack = slack_after(violation_max, self._rows) if is_filtered else math.inf


def rate_that_descends(block: SignedColumns) -> float:
    """A rate with which a step does not climb whose gradients are of one time: 1 / the most values of a row.

    A row's loss is convex, and so at most the mean of its losses as if each of its k weights moved alone, k
    times as far. So the promise holds where no change is above the rate times its width. With several workers
    the smallest of their rates counts. With delays it is a rule of thumb, for all columns that move unseen.

    Args:
        block: the columns that move together.
    """
    return 1.0 / max(1, int(np.bincount(block.rows).max(initial=1)))


class BlockWorker:
    """A worker's rows, and the weights as it last heard of them; what it does costs what a block has.

    But a pull also adds one number to each row's margin.

    Args:
        columns: of its rows.
        l1: the weight of the penalty.

    Attributes:
        columns: of its rows.
        weights_D: one a column; 0 until it hears otherwise.
        margins_N: of its rows at these weights; never computed anew, but moved by what each pull changes.
        violation: the largest of `violations` that it has seen since it was set to 0, as for a pass.
    """

    def __init__(self, columns: SignedColumns, l1: float) -> None:
        self.columns = columns
        self.weights_D = np.zeros(len(columns))
        self.margins_N = np.zeros(columns.height)
        self.violation = 0.0
        self._widths_D = np.full(len(columns), WIDTH_FIRST)
        self._l1 = l1

    @property
    def loss(self) -> float:
        """The sum of the losses of its rows."""
        return loss(self.margins_N)

    def push(self, first_key: int, stop_key: int, active: Active | None = None) -> BlockPush:
        """Gradients and bounds of a block's keys, at the weights as it knows them.

        Args:
            first_key: of the block.
            stop_key: after the block.
            active: says which of some keys are to be looked at; by default all.
        """
        places = self.columns.places(first_key, stop_key)
        block, widths_D = self.columns.block(places), self._widths_D[places]
        if active is not None:
            active_D = active(block.keys)
            block, widths_D = block.chosen(active_D), widths_D[active_D]
        return BlockPush(
            keys=block.keys,
            gradients=gradient(block, self.margins_N),
            bounds=curvature_bounds(block, self.margins_N, widths_D),
        )

    def pull(
        self, keys_D: NDArray[np.int64], weights_D: NDArray[np.float64], gradients_D: NDArray[np.float64]
    ) -> None:
        """Take the weights that one step has made; step after step, none left out, so that widths agree.

        Args:
            keys_D: ascending, those that the step moved; those that no row of this worker has do not matter.
            weights_D: one a key.
            gradients_D: the sums of all workers' that the step was made of.
        """
        if not len(keys_D):
            return
        places = self.columns.places(int(keys_D[0]), int(keys_D[-1]) + 1)
        block = self.columns.block(places)
        _, mine, theirs = np.intersect1d(block.keys, keys_D, assume_unique=True, return_indices=True)
        weights_D, gradients_D = weights_D[theirs], gradients_D[theirs]
        before_D = self.weights_D[places][mine]
        changes_D = np.zeros(len(block))
        changes_D[mine] = weights_D - before_D
        self.margins_N += block.times(changes_D)
        self.weights_D[places][mine] = weights_D
        self._widths_D[places][mine] = next_widths(changes_D[mine])
        worst = violations(before_D, gradients_D, self._l1).max(initial=0.0)
        self.violation = max(self.violation, float(worst))
