"""Sparse logistic regression: derivatives and bounds, the batch optimum and its proof, steps with delays."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.apps.sparse_lr.logistic import (
    BlockPush,
    BlockWorker,
    PassSchedule,
    curvature_bounds,
    descent_rate,
    error_probability,
    gradient,
    kkt_margin_after,
    loss,
    optimality,
    sum_pushes,
    violations,
)
from offbeat.apps.sparse_lr.powerlaw import power_law_blocks
from offbeat.apps.sparse_lr.proximal_newton import distance_from_optimum, hessian, solve
from offbeat.apps.sparse_lr.sparse import SignedColumns, SparseRows, concatenate_rows
from offbeat.errors import OffbeatError
from offbeat.numerics.ps.block_proximal import (
    WIDTH_INITIAL,
    WIDTH_MAX,
    BlockProximal,
    next_widths,
    soft_threshold_changes,
)
from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.filters import KKT
from offbeat.numerics.ps.spaces import build_table, encode_namespace


def rows_of(dense: np.ndarray, labels: np.ndarray) -> SparseRows:
    """The rows of a matrix; keys are 3, 10, 17, ... so that none is a place by chance."""
    at_row, at_column = np.nonzero(dense)
    return SparseRows(
        labels=labels,
        starts=np.searchsorted(at_row, np.arange(len(dense) + 1)),
        keys=3 + 7 * at_column,
        values=dense[at_row, at_column],
    )


def problem(seed: int, rows: int = 40, columns: int = 8) -> tuple[np.ndarray, SignedColumns, np.ndarray]:
    """A matrix whose rows have their labels' signs, the same by columns, and weights."""
    rng = np.random.default_rng(seed)
    dense = rng.normal(size=(rows, columns)) * (rng.random((rows, columns)) < 0.5)
    dense[0] = 1.0  # no column is empty
    labels = np.where(rng.random(rows) < 0.5, 1.0, -1.0)
    return dense * labels[:, None], SignedColumns.from_rows(rows_of(dense, labels)), rng.normal(size=columns)


# Derivatives and bounds ---------------------------------------------------------------------------------


def test_loss_and_gradient_are_the_dense_formulas():
    signed, columns, weights = problem(0)
    margins = columns.multiply(weights)
    np.testing.assert_allclose(margins, signed @ weights, rtol=1e-13)
    assert loss(margins) == pytest.approx(np.log(1 + np.exp(-signed @ weights)).sum(), rel=1e-13)
    expected = -signed.T @ (1 / (1 + np.exp(signed @ weights)))
    np.testing.assert_allclose(gradient(columns, margins), expected, rtol=1e-12)


def test_the_gradient_equals_finite_differences_of_the_loss():
    signed, columns, weights = problem(1)
    step = 1e-6
    for place, slope in enumerate(gradient(columns, columns.multiply(weights))):
        nudge = step * np.eye(len(weights))[place]
        difference = loss(signed @ (weights + nudge)) - loss(signed @ (weights - nudge))
        assert slope == pytest.approx(difference / (2 * step), rel=1e-6, abs=1e-8)


def test_losses_and_gradients_of_huge_margins_are_finite_and_right():
    margins = np.array([-1e4, -800.0, 0.0, 800.0, 1e4])
    assert loss(margins) == pytest.approx(10_800 + np.log(2), rel=1e-12)
    np.testing.assert_allclose(error_probability(margins), [1, 1, 0.5, 0, 0], atol=1e-300)


def test_bounds_are_the_dense_formula():
    signed, columns, weights = problem(2)
    widths = np.linspace(0, 2, len(weights))
    p = 1 / (1 + np.exp(signed @ weights))
    growth = np.exp(np.abs(signed) * widths)
    expected = (np.minimum((p * (1 - p))[:, None] * growth, 0.25) * signed**2).sum(0)
    found = curvature_bounds(columns, columns.multiply(weights), widths)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.floats(0.01, 10),
    width=st.floats(0, 5),
    share=st.floats(-1, 1),
    place=st.integers(0, 7),
)
def test_bounds_bound_the_loss_of_each_weight_that_moves_within_its_width(seed, scale, width, share, place):
    signed, columns, weights = problem(seed)
    weights *= scale
    margins = columns.multiply(weights)
    bound = curvature_bounds(columns, margins, np.full(len(weights), width))[place]
    slope, change = gradient(columns, margins)[place], share * width
    moved = loss(margins + change * signed[:, place])
    assert moved <= loss(margins) + slope * change + bound * change**2 / 2 + 1e-9 * moved


def test_a_block_equals_the_whole_in_its_columns():
    _, columns, weights = problem(3)
    margins = columns.multiply(weights)
    places = columns.column_slice(10, 32)
    block = columns.slice_columns(places)
    assert block.keys.tolist() == [10, 17, 24, 31]
    np.testing.assert_array_equal(gradient(block, margins), gradient(columns, margins)[places])
    choice = np.array([True, False, False, True])
    assert block.select(choice).keys.tolist() == [10, 31]
    np.testing.assert_array_equal(
        gradient(block.select(choice), margins), gradient(columns, margins)[places][choice]
    )
    assert len(gradient(columns.slice_columns(columns.column_slice(11, 17)), margins)) == 0


# The penalty --------------------------------------------------------------------------------------------


def one(value: float) -> np.ndarray:
    return np.array([value])


def test_soft_threshold_of_the_golden_example():
    """w = .5, g = .2, U = 2, l1 = 1: g + l1 = 1.2 > U w = 1 and g - l1 = -.8 < 1, so d = -.5, w = 0."""
    assert soft_threshold_changes(one(0.5), one(0.2), one(2.0), 1.0).tolist() == [-0.5]


numbers = st.floats(-10, 10)


@given(w=numbers, g=numbers, bound=st.floats(0.01, 10), l1=st.floats(0, 10), other=numbers)
def test_no_other_change_is_better_than_that_of_the_soft_threshold(w, g, bound, l1, other):
    def model(change: float) -> float:
        return g * change + bound * change**2 / 2 + l1 * abs(w + change)

    (change,) = soft_threshold_changes(one(w), one(g), one(bound), l1)
    assert model(change) <= model(other) + 1e-9
    assert model(change) <= model(change + other / 1e4) + 1e-9


@given(w=numbers, g=numbers, bound=st.floats(0.01, 10), l1=st.floats(0, 10))
def test_the_soft_threshold_is_the_prox_of_a_gradient_step(w, g, bound, l1):
    """With weight l1 / U of w - g / U."""
    centre = w - g / bound
    prox = np.sign(centre) * max(abs(centre) - l1 / bound, 0)
    assert w + soft_threshold_changes(one(w), one(g), one(bound), l1)[0] == pytest.approx(prox, abs=1e-9)


def test_violations_are_those_of_the_kkt_conditions():
    weights = np.array([0.0, 0.0, 0.0, 2.0, -2.0, -2.0])
    gradients = np.array([0.9, 1.5, -1.5, -1.0, 1.0, 0.25])
    np.testing.assert_allclose(violations(weights, gradients, 1.0), [0, 0.5, 0.5, 0, 0, 0.75])


# The optimum and its proof ------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.02, 0.9))
def test_the_optimum_satisfies_kkt_and_no_nearby_point_is_better(seed, share):
    signed, columns, other = problem(seed)
    l1 = share * np.abs(gradient(columns, np.zeros(columns.height))).max()
    found = solve(columns, l1)
    assert found.optimality.gap <= 1e-9 * found.optimality.objective
    slopes = -signed.T @ (1 / (1 + np.exp(signed @ found.weights)))
    is_zero = found.weights == 0
    assert (np.abs(slopes[is_zero]) <= l1 * (1 + 1e-6)).all()
    np.testing.assert_allclose(slopes[~is_zero], -l1 * np.sign(found.weights[~is_zero]), rtol=1e-4)
    for size in (1e-3, 1.0):
        assert optimality(columns, found.weights + size * other, l1).objective > found.optimality.objective


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0, 3), share=st.floats(0.02, 2))
def test_the_gap_is_never_less_than_the_distance_to_the_optimum(seed, scale, share):
    _, columns, weights = problem(seed)
    l1 = share * np.abs(gradient(columns, np.zeros(columns.height))).max()
    here, best = optimality(columns, scale * weights, l1), solve(columns, l1, relative_gap=1e-12).optimality
    assert here.gap >= (here.objective - best.objective) * (1 - 1e-9) - 1e-9


@pytest.mark.parametrize("chunk_numbers", [1, 8, 100, 1 << 22])
def test_the_hessian_is_the_dense_formula_in_pieces_of_any_size(chunk_numbers):
    signed, columns, weights = problem(9)
    p = 1 / (1 + np.exp(signed @ weights))
    expected = signed.T @ ((p * (1 - p))[:, None] * signed)
    found = hessian(columns, columns.multiply(weights), chunk_numbers=chunk_numbers)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_a_penalty_that_no_gradient_exceeds_leaves_all_weights_at_zero():
    _, columns, _ = problem(4)
    steepest = np.abs(gradient(columns, np.zeros(columns.height))).max()
    found = solve(columns, steepest)
    assert found.passes == 0
    assert not found.weights.any()
    assert found.optimality.objective == pytest.approx(columns.height * np.log(2))
    assert np.count_nonzero(solve(columns, steepest * 0.999).weights) == 1


def test_the_optimum_of_columns_that_are_the_same_is_found():
    """It is not the only one, and the Hessian is singular."""
    signed, columns, _ = problem(5)
    twice = np.concatenate([signed, signed], axis=1)
    found = solve(SignedColumns.from_rows(rows_of(twice, np.ones(len(twice)))), 1.0)
    assert found.optimality.objective == pytest.approx(solve(columns, 1.0).optimality.objective, rel=2e-9)


def test_the_optimum_is_found_where_whole_newton_steps_lead_away_from_it():
    """Without halving them, the gap is the whole objective after 100 of these steps."""
    signed = np.array(
        [
            [-0.01, 0.7, -0.8],
            [30, 3, -0.2],
            [1, -3, 0.2],
            [0.004, 0.3, 0.06],
            [0.06, 0.002, 0.4],
            [-7, 0.9, -9],
            [-0.007, -0.001, -1],
            [0.04, -0.3, 0.008],
        ]
    )
    found = solve(SignedColumns.from_rows(rows_of(signed, np.ones(8))), 0.1)
    assert found.optimality.gap <= 1e-9 * found.optimality.objective


def test_a_gap_below_rounding_is_not_claimed():
    _, columns, _ = problem(6)
    with pytest.raises(OffbeatError, match="expected a relative gap of 1e-30 after 100 Newton steps, found"):
        solve(columns, 1.0, relative_gap=1e-30)


# Delayed block proximal gradient ------------------------------------------------------------------------


def test_a_server_adds_pushes_by_key():
    pushes = [
        BlockPush(keys=np.array([2, 5, 9]), gradients=np.array([1.0, 2, 3]), bounds=np.array([1.0, 1, 1])),
        BlockPush(keys=np.array([5, 7]), gradients=np.array([10.0, 20]), bounds=np.array([2.0, 3])),
    ]
    found = sum_pushes(pushes)
    assert found.keys.tolist() == [2, 5, 7, 9]
    assert found.gradients.tolist() == [1, 12, 20, 3]
    assert found.bounds.tolist() == [1, 3, 3, 1]


def test_a_step_stays_within_its_width_and_sets_the_next():
    """d = clip(d, -Delta, Delta); Delta = min(Delta_max, 2 |d| + 0.1)."""
    weights, widths = np.array([0.0, 1.0, 0.0, 0.0]), np.array([1.0, 1.0, 4.0, 1.0])
    BlockProximal(l1=1.0, rate=0.5).step(
        weights, widths, np.array([-3.0, 0.0, -50.0, 0.5]), np.array([2.0, 1.0, 1.0, 1.0])
    )
    np.testing.assert_allclose(weights, [0.5, 0.5, 4.0, 0.0], rtol=1e-9)
    np.testing.assert_allclose(widths, [1.1, 1.1, WIDTH_MAX, 0.1], rtol=1e-9)
    np.testing.assert_array_equal(next_widths(np.array([-0.2])), [0.5])


def test_a_block_may_be_cut_anywhere():
    rng = np.random.default_rng(7)
    update = BlockProximal(l1=0.3, rate=0.9)
    whole, widths = rng.normal(size=50), np.full(50, WIDTH_INITIAL)
    parts, widths_of_parts = whole.copy(), widths.copy()
    gradients, bounds = rng.normal(size=50), rng.random(50)
    update.step(whole, widths, gradients, bounds)
    for part in (slice(0, 17), slice(17, 50)):
        update.step(parts[part], widths_of_parts[part], gradients[part], bounds[part])
    assert whole.tobytes() == parts.tobytes()
    assert widths.tobytes() == widths_of_parts.tobytes()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0, 3), l1=st.floats(0.01, 10))
def test_with_the_rate_that_descends_no_step_of_at_most_that_share_of_its_widths_climbs(seed, scale, l1):
    _, columns, weights = problem(seed)
    weights *= scale
    rate = descent_rate(columns)
    assert rate == 1 / 8  # the first row has all
    margins = columns.multiply(weights)
    slopes, widths = gradient(columns, margins), np.full(8, WIDTH_MAX)
    moved = weights.copy()
    BlockProximal(l1=l1, rate=rate).step(
        moved, rate * widths, slopes, curvature_bounds(columns, margins, widths)
    )
    before, after = (optimality(columns, at, l1).objective for at in (weights, moved))
    assert after <= before * (1 + 1e-12)


def test_with_a_rate_of_1_correlated_columns_never_settle():
    """Why there must be a rate: eight equal columns each move the whole way."""
    columns = SignedColumns.from_rows(rows_of(np.ones((40, 8)), np.repeat([1.0, -1.0], [30, 10])))
    ends = {}
    for rate in (1.0, descent_rate(columns)):
        worker, update = BlockWorker(columns, 1.0), BlockProximal(l1=1.0, rate=rate)
        weights, widths = np.zeros(8), np.full(8, WIDTH_INITIAL)
        for _ in range(50):
            push = worker.compute_push(0, 1000)
            update.step(weights, widths, push.gradients, push.bounds)
            worker.apply_pull(push.keys, weights, push.gradients)
        ends[rate] = optimality(columns, weights, 1.0)
    assert ends[1 / 8].gap < 1e-9 * ends[1 / 8].objective
    assert ends[1.0].objective > 1.01 * ends[1 / 8].objective


def test_the_slack_is_ten_times_the_largest_violation_a_row():
    assert kkt_margin_after(0.5, rows=100) == 0.05


def test_margins_that_pulls_move_are_those_of_the_weights():
    _, columns, weights = problem(8)
    worker = BlockWorker(columns, 1.0)
    rng = random.Random(8)
    for _ in range(30):
        keys = np.array(sorted(rng.sample([1, *columns.keys.tolist(), 1000], 4)))
        worker.apply_pull(keys, np.array([rng.gauss(0, 1) for _ in keys]), np.zeros(4))
    worker.apply_pull(np.append(columns.keys, 1000), np.append(weights, 5.0), np.zeros(len(weights) + 1))
    assert worker.loss == loss(worker.margins_N)
    np.testing.assert_array_equal(worker.weights_D, weights)
    np.testing.assert_allclose(worker.margins_N, columns.multiply(weights), atol=1e-12)


def test_a_worker_pushes_active_keys_with_its_widths():
    _, columns, weights = problem(10)
    worker = BlockWorker(columns, 1.0)
    worker.apply_pull(columns.keys, weights, np.array([0.5, -0.95, 3.0, *np.zeros(5)]))
    whole = worker.compute_push(0, 1000)
    assert whole.keys.tolist() == columns.keys.tolist()
    np.testing.assert_array_equal(whole.rows, np.stack([whole.gradients, whole.bounds], 1))
    some = worker.compute_push(0, 1000, lambda keys: keys != columns.keys[1])
    assert some.keys.tolist() == columns.keys[[0, *range(2, 8)]].tolist()
    np.testing.assert_array_equal(some.rows, whole.rows[[0, *range(2, 8)]])


def test_a_worker_records_the_largest_violation_of_its_pulls():
    _, columns, _ = problem(10)
    worker = BlockWorker(columns, 1.0)
    for gradients in ([0.5, -0.95, 3.0], [0.0, 1.5, 0.0]):
        worker.apply_pull(columns.keys[:3], np.zeros(3), np.array(gradients))
        assert worker.violation == 2.0


# The update, on servers ---------------------------------------------------------------------------------


def one_step(w, width, g, u, l1, rate):
    """The formulas of the paper's appendix and its code, one key at a time."""
    bound = u / rate + 1e-10
    if g + l1 <= bound * w:
        change = -(g + l1) / bound
    elif g - l1 >= bound * w:
        change = -(g - l1) / bound
    else:
        change = -w
    after = w + min(width, max(-width, change))
    return after, min(5.0, 2 * abs(after - w) + 0.1)


@pytest.mark.parametrize("block_keys", [1, 7, 40])
def test_a_namespace_takes_the_steps_of_the_formulas(block_keys):
    """Rows (gradient, bound) in, rows (weight, gradient) out; in blocks of any size."""
    update, rng = BlockProximal(l1=0.7, rate=0.9), np.random.default_rng(11)
    table = build_table(encode_namespace(update, width=2, dtype="float64"), 40, block_keys, {})
    weights, widths, gradients = np.zeros(40), np.ones(40), np.zeros(40)
    for _ in range(20):
        keys = np.flatnonzero(rng.random(40) < 0.6)
        pushed = np.stack([rng.normal(size=len(keys)), rng.random(len(keys)) * 2], 1)
        table.apply(0, 40, Entries(0, pushed, keys))
        for key, (g, u) in zip(keys, pushed, strict=True):
            weights[key], widths[key] = one_step(weights[key], widths[key], g, u, 0.7, 0.9)
            gradients[key] = g
    found = table.read(0, 40, None).values
    np.testing.assert_array_equal(found, np.stack([weights, gradients], 1))
    assert np.count_nonzero(weights) not in (0, 40)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_replicas_that_have_the_namespace_in_other_blocks_hold_the_same_bits(dtype):
    update, rng = BlockProximal(l1=0.7, rate=0.9), np.random.default_rng(12)
    about = encode_namespace(update, width=2, dtype=dtype)
    tables = [build_table(about, 40, block_keys, {}) for block_keys in (40, 9)]
    for first in (0, 5, 0, 20, 3):
        pushed = Entries(first, np.abs(rng.normal(size=(20, 2))).astype(dtype))
        tables[0].apply(first, first + 20, pushed)
        for at in range(first, first + 20, 4):
            tables[1].apply(at, at + 4, pushed.key_range(at, at + 4))
    found = [table.read(0, 40, None).values for table in tables]
    assert found[0].dtype == dtype
    assert found[0].any()
    assert found[0].tobytes() == found[1].tobytes()


def test_a_worker_has_the_widths_that_the_servers_have():
    """It computes them from the weights that it pulls; only rows (weight, gradient) travel."""
    _, columns, _ = problem(13)
    worker, update = BlockWorker(columns, 0.5), BlockProximal(l1=0.5, rate=0.3)
    values, states = np.zeros((8, 2)), {"widths": np.zeros((8, 2))}
    for _ in range(10):
        push = worker.compute_push(0, 1000)
        update.apply(values, states, push.rows)
        worker.apply_pull(push.keys, *values.T)
        np.testing.assert_array_equal(worker._widths_D, states["widths"][:, 0])
    assert len(set(worker._widths_D)) > 2


# Passes -------------------------------------------------------------------------------------------------


def test_all_keys_are_checked_again_when_the_objective_settles_and_a_second_check_ends():
    passes = PassSchedule(100, 4, 50, 0.01)
    steps = [(100, 5), (90, 2), (89.5, 1), (80, 1), (79.9, 1), (79.8, 1)]
    slacks, ended = [passes.kkt_margin], []
    for (objective, violation), _ in zip(steps, passes, strict=False):
        passes.end_pass(objective, violation)
        slacks.append(passes.kkt_margin)
        ended.append(passes.is_over)
    assert slacks == [math.inf, 1.0, 0.4, math.inf, 0.2, math.inf, math.inf]
    assert ended == [False] * 5 + [True]
    assert list(passes) == []
    assert passes.passes_ended == 6


def test_a_pass_has_every_key_once_in_an_order_that_all_workers_draw():
    orders = [list(itertools.islice(PassSchedule(10, 4, 1, 0.1, seed=3), 5)) for _ in range(2)]
    assert orders[0] == orders[1]
    assert sorted(orders[0][0]) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert len(set(map(tuple, orders[0]))) > 1


def test_without_the_filter_all_keys_are_always_checked_and_passes_are_bounded():
    passes = PassSchedule(10, 3, 50, 0.01, filtered=False, passes_max=3)
    for number, _ in enumerate(passes):
        passes.end_pass(100 / 2**number, 5)
        assert passes.kkt_margin == math.inf
    assert passes.passes_ended == 3


class Job:
    """Workers and a server in one process, task after task: workers see results up to tau tasks late.

    A task is one block. A worker applies finished tasks in order, and at least all tasks before the last tau;
    at the end of a pass all of them.
    """

    def __init__(self, parts, l1, *, blocks, tau, seed, rate=None, filtered=True):
        self.rng = random.Random(seed)
        self.workers = [BlockWorker(SignedColumns.from_rows(part), l1) for part in parts]
        self.filters = [KKT(l1) for _ in parts]
        self.whole = SignedColumns.from_rows(concatenate_rows(parts))
        self.keys, self.l1, self.tau = self.whole.keys, l1, tau
        self.values, self.states = np.zeros((len(self.keys), 2)), {"widths": np.zeros((len(self.keys), 2))}
        keys = int(self.keys[-1]) + 1
        self.passes = PassSchedule(keys, blocks, self.whole.height, 1e-12, filtered=filtered, seed=seed)
        self.update = BlockProximal(l1=l1, rate=rate or descent_rate(self.whole))
        self.computed = 0

    @property
    def weights(self):
        return self.values[:, 0]

    def objective(self):
        return optimality(self.whole, self.weights, self.l1).objective

    def run_a_pass(self, blocks):
        finished, seen = [], [0] * len(self.workers)
        for first, stop in blocks:
            for rank in range(len(self.workers)):
                self.apply_finished(finished, seen, rank, self.tau)
            both = zip(self.workers, self.filters, strict=True)
            total = sum_pushes([worker.compute_push(first, stop, kkt.is_active) for worker, kkt in both])
            self.computed += len(total.keys)
            places = np.searchsorted(self.keys, total.keys)
            values, states = self.values[places], {"widths": self.states["widths"][places]}
            self.update.apply(values, states, total.rows)
            self.values[places], self.states["widths"][places] = values, states["widths"]
            finished.append((total.keys, *values.T))
        for rank in range(len(self.workers)):
            self.apply_finished(finished, seen, rank, 0)
        active = [kkt.is_active(self.keys).tolist() for kkt in self.filters]
        assert all(one == active[0] for one in active)

    def apply_finished(self, finished, seen, rank, tau):
        until = len(finished) - self.rng.randint(0, min(tau, len(finished) - seen[rank]))
        for step in finished[seen[rank] : until]:
            self.workers[rank].apply_pull(*step)
            self.filters[rank].update_skipped(*step)
        seen[rank] = until

    def run(self, passes):
        for blocks in itertools.islice(self.passes, passes):
            for worker, kkt in zip(self.workers, self.filters, strict=True):
                kkt.set_margin(self.passes.kkt_margin)
                worker.violation = 0.0
            self.run_a_pass(blocks)
            objective = sum(worker.loss for worker in self.workers) + self.l1 * np.abs(self.weights).sum()
            self.passes.end_pass(objective, max(worker.violation for worker in self.workers))


def generated(rows=240, features=60, seed=5, workers=3):
    blocks = list(power_law_blocks(rows, features, seed, draws=8, exponent=0.5, rows_per_block=rows // 12))
    return [concatenate_rows(blocks[rank::workers]) for rank in range(workers)]


@pytest.fixture(scope="module")
def parts():
    """Three workers' rows of a problem whose optimum has 22 of 60 weights."""
    return generated()


@pytest.fixture(scope="module")
def best(parts):
    return solve(SignedColumns.from_rows(concatenate_rows(parts)), 2.0, relative_gap=1e-12)


@pytest.mark.parametrize("tau", [0, 2, 6])
@pytest.mark.parametrize("filtered", [False, True])
def test_delayed_steps_reach_the_optimum_and_its_support(parts, best, tau, filtered):
    """The same optimum and support with and without delay and KKT filter, and the end satisfies KKT."""
    assert 0 < np.count_nonzero(best.weights) < len(best.weights)
    job = Job(parts, 2.0, blocks=12, tau=tau, seed=tau, rate=0.9, filtered=filtered)
    job.run(200)
    assert job.passes.is_over
    assert distance_from_optimum(job.whole, job.weights, 2.0) == (pytest.approx(0, abs=1e-9), 0)
    assert optimality(job.whole, job.weights, 2.0).violation < 1e-4
    unfiltered = job.passes.passes_ended * len(job.keys)
    assert job.computed < 0.7 * unfiltered if filtered else job.computed == unfiltered
    for worker in job.workers:
        at = np.searchsorted(job.keys, worker.columns.keys)
        np.testing.assert_array_equal(worker.weights_D, job.weights[at])
        np.testing.assert_allclose(worker.margins_N, worker.columns.multiply(worker.weights_D), atol=1e-10)
        np.testing.assert_array_equal(worker._widths_D, job.states["widths"][at, 0])


def test_without_delay_and_with_the_rate_that_descends_no_pass_climbs(parts):
    job = Job(parts, 2.0, blocks=12, tau=0, seed=0, filtered=False)
    objectives = [job.objective()]
    for _ in range(10):
        job.run(1)
        objectives.append(job.objective())
    assert all(after < before for before, after in itertools.pairwise(objectives))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BlockProximal(l1=0, rate=1), "l1 above 0, got 0"),
        (lambda: BlockProximal(l1=1, rate=float("nan")), "rate above 0, got nan"),
        (
            lambda: PassSchedule(10, 0, 5, 0.1),
            "at least one key, block, row and pass, .* got 10, 0, 5, 10000 and 0.1",
        ),
        (lambda: PassSchedule(10, 1, 5, 0), "an epsilon above 0, got 10, 1, 5, 10000 and 0"),
        (
            lambda: encode_namespace(BlockProximal(l1=1, rate=1), width=0, dtype="float64"),
            "rows of 2 numbers for BlockProximal, got 0",
        ),
        (lambda: sum_pushes([]), "at least one push, got none"),
        (lambda: solve(problem(0)[1], 0), "l1 and a relative gap above 0, got 0 and 1e-09"),
        (lambda: solve(problem(0)[1], 1, relative_gap=0), "above 0, got 1 and 0"),
        (
            lambda: SignedColumns.from_rows(rows_of(np.eye(2), np.array([1.0, 0.0]))),
            r"-1 and \+1, got 0 in row 1",
        ),
    ],
)
def test_impossible_arguments_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
