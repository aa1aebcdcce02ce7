"""Which evaluating threads proceed: as many as raise the rate, and none where they delay training."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.policies.validation.throttle import MinimumRate, ThreadSearch, Throttle

CALLS = 100


def climbed(threads_max, calls_per_s):
    """The numbers of threads that are tried, where `n` make `calls_per_s(n)`; the last one is kept."""
    search, tried = ThreadSearch(threads_max), [1]
    while not search.is_settled:
        search.add(int(CALLS * calls_per_s(search.threads)), CALLS)
        tried += [search.threads] if search.threads != tried[-1] else []
    return tried


def test_threads_that_only_wait_proceed_all_together():
    assert climbed(6, lambda n: 10.0 * n) == [1, 2, 4, 6]
    assert climbed(8, lambda n: 10.0 * n) == [1, 2, 4, 8]
    assert climbed(1, lambda n: 10.0) == [1]


def test_threads_beyond_the_useful_number_do_not_proceed():
    assert climbed(6, lambda n: 10.0) == [1, 2, 1]
    assert climbed(6, lambda n: 10.0 * min(n, 2)) == [1, 2, 4, 2]
    assert climbed(6, lambda n: 10.0 * min(n, 4)) == [1, 2, 4, 6, 4]


@pytest.mark.parametrize(("share", "kept"), [(1.49, 1), (1.51, 2)])
def test_two_threads_must_gain_half_of_the_possible(share, kept):
    assert climbed(2, lambda n: 1000.0 * (share if n == 2 else 1.0))[-1] == kept


@given(st.integers(1, 40), st.lists(st.floats(0.1, 1e5), min_size=40, max_size=40))
def test_any_measurements_end_with_a_number_of_threads_that_was_tried(threads_max, rates):
    tried = climbed(threads_max, lambda n: rates[n - 1])
    assert all(1 <= n <= threads_max for n in tried)
    assert all(after == min(2 * before, threads_max) for before, after in pairwise(tried[:-1]))
    assert tried[-1] in {*tried[:-1], threads_max, 1}


def test_few_calls_or_little_time_decide_nothing():
    search = ThreadSearch(4)
    search.add(19, 1000.0)
    assert search.threads == 1
    search.add(1, 0.0)
    assert search.threads == 2
    search.add(10**6, 0.49)
    assert search.threads == 2
    search.add(1, 0.02)
    assert search.threads == 4


class World:
    """Threads that evaluate: the `n` that may proceed make `rate(n)` calls a second in all."""

    def __init__(self, threads, pace=None):
        self.throttle, self.turns, self.now_s = Throttle(threads, pace), [], 100.0

    def begin(self, count=1):
        for _ in range(count):
            self.turns.append(self.throttle.begin_part(self.now_s))

    def end(self, number):
        self.throttle.end_part(self.turns.pop(number), self.now_s)

    def wait(self, more):
        self.throttle.add_waiting(more, self.now_s)

    def run(self, spent_s, rate, silent=None):
        """Time passes."""
        for _ in range(round(spent_s * 10)):
            allowed = [turn for turn in self.turns if turn.may_run]
            for turn in (turn for turn in allowed if turn is not silent):
                turn.calls += round(rate(len(allowed)) / 10 / len(allowed))
            self.now_s += 0.1
            if self.now_s >= self.throttle.next_check_s:
                self.throttle.check_rate(self.now_s)

    @property
    def allowed(self):
        return [turn.may_run for turn in self.turns]


def waits(n):
    return 1000.0 * n


def serialized(n):
    return 1000.0


def test_one_thread_proceeds_at_first_then_more_and_all_if_they_only_wait():
    world = World(4)
    world.begin(4)
    assert world.allowed == [True, False, False, False]
    world.run(1.0, waits)
    assert world.allowed == [True, True, False, False]
    world.run(10.0, waits)
    assert world.allowed == [True] * 4


def test_one_serialized_thread_proceeds_in_the_end_and_the_next_one_takes_its_place():
    world = World(4)
    world.begin(4)
    world.run(10.0, serialized)
    assert world.allowed == [True, False, False, False]
    world.end(0)
    world.begin()
    assert world.allowed == [True, False, False, False]
    assert world.throttle.next_check_s == float("inf"), "no check is left"


def test_time_with_fewer_evaluating_threads_than_allowed_decides_nothing():
    """Two may proceed; the second one has not begun, or has not made its first call."""
    world = World(2)
    world.begin()
    world.run(1.0, waits)
    assert not world.throttle._during_training.is_settled
    world.run(10.0, serialized)
    assert not world.throttle._during_training.is_settled
    world.begin()
    world.run(5.0, serialized, silent=world.turns[1])  # it may proceed, but has made no call
    assert not world.throttle._during_training.is_settled
    world.run(5.0, waits)
    assert world.throttle._during_training.is_settled
    assert world.allowed == [True, True]


def test_the_best_number_while_training_waits_is_found_separately():
    world = World(2)
    world.begin(2)
    world.run(10.0, serialized)
    assert world.allowed == [True, False]
    world.wait(1)
    world.run(10.0, waits)
    assert world.allowed == [True, True]
    world.wait(-1)
    assert world.allowed == [True, False]
    world.wait(1)
    assert world.allowed == [True, True]


def test_several_may_wait_at_once():
    world = World(1, MinimumRate(check_after_s=1.0, calls_per_s_min=2000.0, rest_s=60.0))
    world.begin()
    world.run(2.0, serialized)
    assert world.throttle.is_slow
    world.wait(1)
    world.wait(1)
    world.wait(-1)
    assert world.allowed == [True]
    world.wait(-1)
    assert world.allowed == [False]


@pytest.mark.parametrize(("calls_per_s_min", "is_slow"), [(999.0, False), (1100.0, True)])
def test_no_thread_evaluates_during_training_where_one_alone_is_too_slow(calls_per_s_min, is_slow):
    world = World(2, MinimumRate(check_after_s=1.0, calls_per_s_min=calls_per_s_min, rest_s=60.0))
    world.begin(2)
    world.run(0.9, serialized)
    assert not world.throttle.is_slow
    assert any(world.allowed)
    world.run(0.3, serialized)
    assert world.throttle.is_slow == is_slow
    assert any(world.allowed) != is_slow
    world.run(10.0, lambda n: 0.0)
    assert world.throttle.is_slow == is_slow, "the rate is checked once"


def test_parts_that_are_over_count_too():
    world = World(1, MinimumRate(check_after_s=2.0, calls_per_s_min=600.0, rest_s=60.0))
    for _ in range(3):
        world.begin()
        world.run(0.8, serialized)
        world.end(0)
    assert world.throttle.calls == 2400
    assert world.throttle.next_check_s == float("inf"), "the rate was checked"
    assert not world.throttle.is_slow


def test_a_thread_that_was_freed_continues_with_the_others_until_its_turn_ends():
    world = World(3)
    world.begin(3)
    world.throttle.force(world.turns[2])
    assert world.allowed == [True, False, True]
    world.begin()
    assert world.allowed == [True, False, True, False]
    world.end(2)
    assert world.allowed == [True, False, False]


def test_all_threads_proceed_once_the_limit_is_lifted():
    world = World(3, MinimumRate(check_after_s=1.0, calls_per_s_min=1e9, rest_s=60.0))
    world.begin(3)
    world.run(2.0, serialized)
    assert world.throttle.is_slow
    world.throttle.lift_limit(world.now_s)
    world.begin()
    assert world.allowed == [True] * 4
