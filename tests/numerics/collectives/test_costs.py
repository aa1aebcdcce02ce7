"""What all-reduces cost by their schedules, and the line that is fitted to measured ones."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.numerics.collectives.costs import AllReduceCost, LinkModel, all_reduce_cost, fit_link_model
from offbeat.numerics.collectives.schedules import ALGORITHMS


@pytest.mark.parametrize(
    ("algorithm", "workers", "rounds", "volume"),
    [
        ("ring", 1, 0, 0.0),
        ("ring", 2, 2, 1.0),
        ("ring", 4, 6, 1.5),
        ("ring", 5, 8, 1.6),
        ("recursive_doubling", 4, 2, 2.0),
        ("recursive_doubling", 8, 3, 3.0),
        ("rabenseifner", 4, 4, 1.5),
        ("rabenseifner", 8, 6, 1.75),
        ("direct", 4, 2, 1.5),
        ("direct", 17, 2, 2 * 16 / 17),
        # Folding: before two of the three others can continue, and after.
        ("recursive_doubling", 3, 2, 3.0),
        # Halves to the master and back, twice each; between the masters each half, of which one arrives
        # a step sooner.
        ("hierarchical:2", 4, 5, 3.0),
        # Halves to the neighbour and back; between them both quarters, one after the other.
        ("torus:2", 4, 4, 1.5),
    ],
)
def test_rounds_and_volumes_are_those_of_the_formulas(algorithm, workers, rounds, volume):
    found = all_reduce_cost(algorithm, workers)
    assert found.rounds == rounds
    assert found.volume == pytest.approx(volume)


def test_with_four_workers_recursive_doubling_beats_a_ring_below_8_alpha_over_beta():
    line = LinkModel(alpha_s=50e-6, beta_s=8e-9)  # 50 kB on a line of 1 Gbit/s
    for size, is_better in [(49_000, True), (51_000, False)]:
        doubling, ring = (
            all_reduce_cost(name, 4).seconds(size, line) for name in ("recursive_doubling", "ring")
        )
        assert (doubling < ring) == is_better


@given(
    workers=st.integers(2, 9),
    alpha_s=st.floats(1e-6, 1e-2),
    beta_s=st.floats(1e-11, 1e-6),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_a_line_is_recovered_from_its_times(workers, alpha_s, beta_s, algorithm):
    line = LinkModel(alpha_s=alpha_s, beta_s=beta_s)
    one = all_reduce_cost(algorithm, workers)
    # Sizes at which neither is lost in the other's rounding.
    middle = alpha_s / beta_s
    sizes = [max(1, int(middle * factor)) for factor in (1, 10, 100)]
    if len(set(sizes)) > 1:
        found = fit_link_model([(one, size, one.seconds(size, line)) for size in sizes])
        assert found.alpha_s == pytest.approx(alpha_s, rel=1e-3)
        assert found.beta_s == pytest.approx(beta_s, rel=1e-3)


def test_noise_of_a_tenth_moves_both_by_little_more_than_that():
    draw = random.Random(1)
    line, one = LinkModel(alpha_s=2e-4, beta_s=8e-9), all_reduce_cost("ring", 4)
    samples = [
        (one, 1 << power, one.seconds(1 << power, line) * draw.uniform(0.9, 1.1)) for power in range(12, 20)
    ]
    found = fit_link_model(samples)
    assert found.alpha_s == pytest.approx(2e-4, rel=0.15)
    assert found.beta_s == pytest.approx(8e-9, rel=0.15)


def test_a_constant_that_cannot_be_measured_is_0():
    one = all_reduce_cost("ring", 2)
    flat = fit_link_model([(one, size, 1e-3 + 1e-9 / size) for size in (1, 100, 10_000)])
    assert (flat.alpha_s, flat.beta_s) == (pytest.approx(5e-4, rel=1e-3), 0.0)
    steep = fit_link_model([(one, size, size**1.5 * 1e-9) for size in (100, 1000, 10_000)])
    assert steep.alpha_s == 0.0
    assert steep.beta_s > 0


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(AllReduceCost(rounds=2, volume=1.0), 10, 1.0)],
        [(AllReduceCost(rounds=2, volume=1.0), 10, 1.0), (AllReduceCost(rounds=2, volume=1.0), 20, 0.0)],
    ],
)
def test_too_few_samples_are_refused(samples):
    with pytest.raises(ValueError, match="the times of at least two sizes"):
        fit_link_model(samples)


def test_a_line_with_zero_or_negative_times_is_refused():
    for alpha_s, beta_s in [(0.0, 0.0), (-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)]:
        with pytest.raises(ValueError, match="expected a latency and a time per byte"):
            LinkModel(alpha_s=alpha_s, beta_s=beta_s)
