"""Weights of models by their clocks, and what members keep of their own."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offbeat.events import AverageModels
from offbeat.policies.model_averaging.weights import ema_weights, equal_weights, mean_share


def averaging(weights, *, keeps_own_share=True):
    return AverageModels(
        exchange_id=8,
        members=tuple(range(len(weights))),
        joining=(),
        weights=tuple(weights),
        steps=(1,) * len(weights),
        includes_buffers=False,
        outer_step=None,
        leader=0,
        reason="",
        keeps_own_share=keeps_own_share,
    )


def mixing_matrix(averaging):
    """By member, the weights of all models in its model afterwards."""
    rows = []
    for worker in averaging.members:
        share = mean_share(averaging, worker)
        rows.append([share * weight for weight in averaging.weights])
        rows[-1][worker] += 1 - share
    return rows


@pytest.mark.parametrize(
    ("clocks", "weights"),
    [
        ([7, 7, 5], [0.350554, 0.350554, 0.298893]),
        ([9, 6, 6], [0.788020, 0.105990, 0.105990]),
        ([3, 8], [0.126023, 0.873977]),
        ([4, 4, 4, 3], [0.175439, 0.175439, 0.175439, 0.473684]),
        ([5, 5, 5], [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_the_weights_of_partial_reduce(clocks, weights):
    """Golden values: those of the authors' program, to six decimals."""
    assert ema_weights(clocks) == pytest.approx(weights, abs=5e-7)


def test_a_lower_alpha_leaves_less_to_old_models():
    assert ema_weights([7, 7, 5], alpha=0.5) == pytest.approx([3 / 7, 3 / 7, 1 / 7])


@given(st.lists(st.integers(0, 400), min_size=1, max_size=8), st.floats(0.05, 0.98))
@example([0, 10**6], 0.9)
def test_weights_sum_to_1_and_an_older_age_has_no_more_mass(clocks, alpha):
    weights = ema_weights(clocks, alpha)
    assert min(weights) >= 0
    assert sum(weights) == pytest.approx(1.0, abs=1e-12)
    mass = {}
    for clock, weight in zip(clocks, weights, strict=True):
        mass[clock] = mass.get(clock, 0.0) + weight
    assert all(older <= newer + 1e-12 for older, newer in pairwise(mass[clock] for clock in sorted(mass)))


@given(st.integers(0, 1000), st.integers(1, 9))
def test_equal_clocks_have_equal_weights(clock, count):
    assert ema_weights([clock] * count) == pytest.approx(equal_weights(count))


def test_a_member_that_keeps_its_own_share_takes_the_others_by_their_weights():
    """The golden matrix: 1/3 on the diagonal, and 2/3 for the others."""
    matrix = mixing_matrix(averaging(ema_weights([7, 7, 5])))
    third = 1 / 3
    expected = [[third, 0.359848, 0.306818], [0.359848, third, 0.306818], [third, third, third]]
    for row, expected_row in zip(matrix, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=5e-7)


def test_without_its_own_share_a_members_model_becomes_the_mean():
    assert mixing_matrix(averaging([0.25, 0.75], keeps_own_share=False)) == [[0.25, 0.75]] * 2


@pytest.mark.parametrize("count", range(1, 9))
def test_with_equal_weights_its_own_share_makes_no_difference(count):
    for row in mixing_matrix(averaging(equal_weights(count))):
        assert row == pytest.approx(equal_weights(count))


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=6))
@example([1, 100_000])
def test_what_a_member_adds_is_bounded_and_its_model_stays_between_the_others(clocks):
    one = averaging(ema_weights(clocks))
    assert max(mean_share(one, worker) for worker in one.members) <= 1000
    for row in mixing_matrix(one):
        assert min(row) >= -1e-12
        assert sum(row) == pytest.approx(1.0)
