"""Automatic thresholds and limits: the bound, the choice under it, and simulated times."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.policies.stragglers.calibration import (
    LIMIT_MAX,
    choose_threshold,
    drop_slow_workers,
    excursion_probability,
    false_alarm_bound,
    pace_margin_factor,
    profile_iterations,
    smallest_limit,
)
from offbeat.policies.stragglers.classifier import StragglerClassifier


@pytest.mark.parametrize(
    ("p", "limit", "expected"), [(0.2, 10, 2.861e-6), (0.3, 10, 2.788e-4), (0.1, 5, 1.355e-4)]
)
def test_excursions_have_the_known_probabilities(p, limit, expected):
    assert excursion_probability(p, limit) == pytest.approx(expected, rel=5e-4)


@given(st.floats(1e-6, 0.999999), st.integers(2, 60))
def test_excursions_follow_the_first_step_equation(p, limit):
    """From 1: down to 0, or up to 2, whence the limit is reached directly or by way of 1."""
    to_limit = excursion_probability(p, limit)
    below = excursion_probability(p, limit - 1)  # from 2 to the limit before 1 is the same walk, one shorter
    assert to_limit == pytest.approx(p * (below + (1 - below) * to_limit), rel=1e-6, abs=1e-12)


def test_an_even_chance_reaches_the_limit_once_in_limit_times():
    assert excursion_probability(0.5, 8) == pytest.approx(1 / 8)


def test_a_further_time_exceeds_the_rth_of_m_with_probability_r_of_m_plus_1():
    """With one judgement and limit 1 the bound is the mean of p: 0.3 of a percent are cut off above 1/2."""
    for samples, rank in ((20, 1), (20, 3), (512, 1), (512, 40)):
        bound = false_alarm_bound(samples=samples, rank=rank, limit=1, judged=1)
        assert bound == pytest.approx(rank / (samples + 1), rel=3e-3)


@given(st.integers(5, 200), st.integers(1, 5), st.integers(1, 20), st.integers(1, 500))
@settings(deadline=None)
def test_the_bound_falls_with_the_limit_and_rises_with_rank_and_iterations(samples, rank, limit, judged):
    def bound(**changed) -> float:
        return false_alarm_bound(
            **({"samples": samples, "rank": rank, "limit": limit, "judged": judged} | changed)
        )

    assert bound(limit=limit + 1) <= bound() * (1 + 1e-4)  # the integral is a sum of 400 terms
    assert bound(judged=judged + 1) >= bound() * (1 - 1e-4)
    if rank < samples:
        assert bound(rank=rank + 1) >= bound() * (1 - 1e-4)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("samples", "rank", "limit"), [(20, 1, 3), (20, 3, 4), (60, 1, 2)])
def test_the_bound_holds_and_is_at_most_twice_the_exact_probability(samples, rank, limit):
    """200,000 classes of uniform times, so p is the threshold's distance from 1; exact chain, J = 100."""
    judged = 100
    generator = np.random.default_rng(0)
    p = 1 - np.sort(generator.random((200_000, samples)), axis=1)[:, -rank]
    at = np.zeros((len(p), limit))
    at[:, 0] = 1.0
    alarmed = np.zeros(len(p))
    for _ in range(judged):
        up = at * p[:, None]
        down = at - up
        alarmed += up[:, -1]
        at = np.zeros_like(at)
        at[:, 1:] += up[:, :-1]
        at[:, :-1] += down[:, 1:]
        at[:, 0] += down[:, 0]
    bound = false_alarm_bound(samples=samples, rank=rank, limit=limit, judged=judged)
    assert alarmed.mean() <= bound <= 2 * alarmed.mean()


@given(st.integers(12, 512), st.integers(1, 4), st.sampled_from([1e-3, 0.05]))
@settings(deadline=None, max_examples=40)
def test_the_smallest_limit_keeps_the_bound_and_one_less_does_not(samples, rank, bound):
    limit = smallest_limit(samples=samples, rank=rank, judged=200, bound=bound)
    if limit is None:
        assert false_alarm_bound(samples=samples, rank=rank, limit=LIMIT_MAX, judged=200) > bound
        return
    assert false_alarm_bound(samples=samples, rank=rank, limit=limit, judged=200) <= bound
    assert limit == 1 or false_alarm_bound(samples=samples, rank=rank, limit=limit - 1, judged=200) > bound


def test_more_workers_need_a_shorter_profile():
    lengths = [profile_iterations(workers=workers, judged=390, bound=1e-3) for workers in (3, 7, 15)]
    assert lengths == sorted(lengths, reverse=True)
    assert profile_iterations(workers=10_000, judged=390, bound=1e-3) == 3


@given(st.integers(), st.sampled_from([1e-3, 0.05]), st.floats(1.05, 2.5))
@settings(deadline=None, max_examples=40)
def test_a_choice_keeps_the_bound_for_as_many_of_the_times_as_are_above_it(seed, bound, k_min):
    chance = random.Random(seed)
    ratios = [1 + chance.expovariate(3) for _ in range(chance.randrange(1, 200))]
    choice = choose_threshold(ratios, judged=100, bound=bound, k_min=k_min, k_max=2.0)
    if choice is None:
        assert smallest_limit(samples=len(ratios), rank=1, judged=100, bound=bound) is None
        return
    assert choice.k >= k_min
    rank = max(1, sum(ratio >= choice.k for ratio in ratios))
    assert false_alarm_bound(samples=len(ratios), rank=rank, limit=choice.limit, judged=100) <= bound
    if choice.k > max(2.0, k_min):  # then no threshold of 2 would have kept it
        above = sum(ratio > 2.0 for ratio in ratios)
        assert smallest_limit(samples=len(ratios), rank=above + 1, judged=100, bound=bound) is None


def test_clearly_slow_workers_are_no_measure_for_the_others():
    calm = [[1.0, 1.05, 1.1], [1.02, 1.0, 1.08], [1.0, 1.0, 1.2]]

    def kept(*more: list[float], k_min: float = 1.4) -> int:
        return len(drop_slow_workers([*calm, *more], k_min=k_min, k_max=2.0)) // 3

    assert kept() == kept([1.5, 1.6, 1.5]) == kept([2.1, 2.5, 9.0], [1.5, 1.6, 1.5]) == 3
    assert kept([1.3, 1.3, 1.3]) == kept([1.5, 1.1, 1.6]) == 4  # too little to be worth it; not in all of it
    assert kept([1.5, 3.0, 1.5], [3.0, 1.1, 1.0]) == 5  # another one was as slow at times
    assert kept(*[[1.5, 1.5, 1.5]] * 4) == 7  # most of them are: then they are the measure
    assert kept(*[[2.5, 2.5, 2.5]] * 4) == 3  # but not beyond twice the pace


def test_similar_workers_are_hardly_ever_clearly_slow():
    """1 in C(9, 3) = 84 runs for each of 3 workers and 3 iterations, here of uniform times."""
    chance = random.Random(0)
    runs = 20_000
    dropped = sum(
        len(drop_slow_workers([[chance.random() for _ in range(3)] for _ in range(3)], k_min=0.0, k_max=1.0))
        < 9
        for _ in range(runs)
    )
    assert dropped / runs == pytest.approx(3 / 84, rel=0.15)


def test_too_few_times_give_no_threshold():
    assert choose_threshold([1.0] * 5, judged=100, bound=1e-3, k_min=1.4, k_max=2.0) is None
    assert choose_threshold([], judged=100, bound=1e-3, k_min=1.4, k_max=2.0) is None


def test_a_pace_has_a_margin_of_three_standard_errors():
    assert pace_margin_factor([0.1, 0.2, 0.3]) == pytest.approx(1 + 3 * 0.1 / 3**0.5 / 0.2)
    assert pace_margin_factor([0.1]) == 1.0


# Simulation ---------------------------------------------------------------------------------------------

DISTRIBUTIONS = {
    "normal": lambda chance: max(0.01, chance.gauss(1.0, 0.05)),
    "lognormal": lambda chance: chance.lognormvariate(0.0, 0.2),
    "wide": lambda chance: chance.lognormvariate(0.0, 0.4),
    "hiccups": lambda chance: chance.gauss(1.0, 0.03) * (6.0 if chance.random() < 0.04 else 1.0),
    "exponential": lambda chance: 1.0 + chance.expovariate(4.0),
}


@pytest.mark.long(after=2)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_false_alarms_stay_below_the_bound_in_first_and_later_epochs(name):
    """5 % allowed, so that few runs suffice: 150 runs of 4 workers and 3 epochs of 60 iterations."""
    bound, runs, workers, iterations = 0.05, 150, 4, 60
    alarms = {0: 0, 1: 0, 2: 0}
    for seed in range(runs):
        chance = random.Random(seed)
        made = StragglerClassifier(
            k="auto", false_alarm=bound, iterations_per_epoch=iterations, max_straggler_fraction=1.0
        )
        for worker in range(workers):
            made.add(worker)
        for epoch in alarms:
            classed = {
                verdict.worker
                for iteration in range(iterations)
                for worker in range(workers)
                for verdict in made.observe(
                    worker, epoch=epoch, iteration=iteration, compute_s=DISTRIBUTIONS[name](chance)
                )
                if verdict.is_straggler
            }
            alarms[epoch] += len(classed)
    for epoch, count in alarms.items():
        assert count / (runs * workers) <= bound, f"epoch {epoch}"
