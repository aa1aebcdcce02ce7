"""The throughput gate: excludes workers only where it pays, and then the best choice."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.policies.stragglers.throughput_gate import ThroughputGate, break_even_factor

TIME_S = st.sampled_from([0.5, 1.0, 1.1, 1.3, 1.4, 2.0, 5.0])
LAST_S = st.dictionaries(st.integers(0, 9), st.lists(TIME_S, max_size=4), min_size=1)
STEADY_S = st.dictionaries(st.integers(0, 9), TIME_S.map(lambda time_s: [time_s]), min_size=1)


@given(LAST_S, st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.sampled_from([0.0, 0.05, 0.5]))
def test_predicted_throughput_never_falls_and_rises_by_more_than_the_margin(last_s, out, suspects, margin):
    gate = ThroughputGate(margin)
    before = gate.batches_per_s(last_s, out)
    chosen = gate.workers_to_exclude(last_s, excluded=out, candidates=suspects)
    assert chosen <= suspects - out
    if chosen:
        assert gate.batches_per_s(last_s, out | chosen) > (1 + margin) * before


@given(STEADY_S, st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9), max_size=6))
def test_of_steady_times_no_other_choice_is_better(last_s, out, suspects):
    gate = ThroughputGate(0.0)
    chosen = gate.workers_to_exclude(last_s, excluded=out, candidates=suspects)
    best = gate.batches_per_s(last_s, out | chosen)
    for size in range(len(suspects) + 1):
        for others in combinations(sorted(suspects), size):
            assert gate.batches_per_s(last_s, out | set(others)) <= best


@given(LAST_S)
def test_one_worker_always_remains(last_s):
    measured = {worker for worker, last_s in last_s.items() if last_s}
    assert (
        not measured
        or ThroughputGate(0.0).workers_to_exclude(last_s, excluded=[], candidates=measured) < measured
    )


@pytest.mark.parametrize(("workers", "factor"), [(2, 2.0), (4, 4 / 3), (8, 8 / 7), (16, 16 / 15)])
def test_one_of_w_is_left_out_beyond_w_over_w_less_1(workers, factor):
    """1.33 times for 4 workers, 1.07 times for 16."""
    assert break_even_factor(workers) == pytest.approx(factor)
    gate = ThroughputGate(0.0)
    for times, expected in ((1.001, {0}), (0.999, frozenset())):
        last_s = {worker: [0.1 if worker else 0.1 * factor * times] for worker in range(workers)}
        assert gate.workers_to_exclude(last_s, excluded=[], candidates=range(workers)) == expected


def test_an_exclusion_must_gain_more_than_the_margin():
    last_s = {0: [0.14], 1: [0.1], 2: [0.1], 3: [0.1]}  # 1.4 times: a gain of exactly 5 %
    assert ThroughputGate(0.049).workers_to_exclude(last_s, excluded=[], candidates=[0]) == {0}
    assert ThroughputGate(0.051).workers_to_exclude(last_s, excluded=[], candidates=[0]) == frozenset()


def test_a_worker_that_is_no_candidate_stays_however_slow():
    assert (
        ThroughputGate().workers_to_exclude({0: [9.0], 1: [1.0], 2: [1.0]}, excluded=[], candidates=[1])
        == frozenset()
    )


def test_throughput_is_that_of_the_slowest_of_each_iteration():
    gate = ThroughputGate()
    last_s = {0: [0.1, 0.3], 1: [0.2, 0.1], 2: [0.4], 3: []}
    assert gate.batches_per_s(last_s, []) == pytest.approx(3 / ((0.4 + 0.2) / 2))
    assert gate.batches_per_s(last_s, [2]) == pytest.approx(2 / ((0.3 + 0.2) / 2))
    assert gate.batches_per_s(last_s, [0, 1, 2]) == 0.0


def test_workers_that_are_slow_in_turn_are_not_worth_excluding():
    """Each of four takes three times as long in a quarter of the iterations."""
    last_s = {worker: [0.3 if at % 4 == worker else 0.1 for at in range(20)] for worker in range(4)}
    assert ThroughputGate().workers_to_exclude(last_s, excluded=[], candidates=range(4)) == frozenset()


def test_one_worker_never_breaks_even():
    assert break_even_factor(1) == float("inf")


@pytest.mark.parametrize("margin", [-0.1, float("nan"), float("inf")])
def test_a_bad_margin_is_refused(margin):
    with pytest.raises(ValueError, match="expected a finite margin"):
        ThroughputGate(margin)
