"""Promises of `offbeat.runtime.training.timing`."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.runtime.training.timing import TIMER_PARTS, PartTimer


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


SWITCHES = st.lists(st.tuples(st.sampled_from(TIMER_PARTS), st.integers(0, 1000)), max_size=30)


@given(SWITCHES)
def test_the_parts_sum_to_the_wall_time(switches):
    clock = Clock()
    timer = PartTimer(clock)
    for part, duration in switches:
        clock.now_s += duration / 64
        timer.switch(part)
    wall_s, parts_s = timer.lap()
    assert wall_s == sum(duration for _, duration in switches) / 64
    assert sum(parts_s.values()) == wall_s
    assert tuple(parts_s) == TIMER_PARTS


@given(SWITCHES, st.integers(-50, 2000))
def test_moving_time_between_parts_keeps_the_sum_and_moves_at_most_the_measured_time(switches, amount):
    clock = Clock()
    timer = PartTimer(clock)
    for part, duration in switches:
        clock.now_s += duration / 64
        timer.switch(part)
    before = timer.total_s("communicate")
    timer.move("communicate", "wait", amount / 64)
    wall_s, parts_s = timer.lap()
    assert sum(parts_s.values()) == wall_s
    assert 0 <= parts_s["communicate"] <= before
    assert parts_s["communicate"] == before - max(0.0, min(amount / 64, before))


def test_each_interval_counts_for_the_running_part():
    clock = Clock()
    timer = PartTimer(clock)
    timer.switch("compute")
    clock.now_s += 3.0
    timer.switch("wait")
    clock.now_s += 4.0
    timer.switch("other")
    wall_s, parts_s = timer.lap()
    assert wall_s == 7.0
    assert (parts_s["compute"], parts_s["wait"]) == (3.0, 4.0)


def test_a_lap_starts_from_zero_and_totals_continue():
    clock = Clock()
    timer = PartTimer(clock)
    timer.switch("compute")
    clock.now_s += 3.0
    timer.lap()
    clock.now_s += 2.0
    wall_s, parts_s = timer.lap()
    assert (wall_s, parts_s["compute"], timer.total_s("compute")) == (2.0, 2.0, 5.0)


def test_time_of_an_earlier_lap_cannot_be_moved():
    clock = Clock()
    timer = PartTimer(clock)
    timer.switch("communicate")
    clock.now_s += 3.0
    timer.lap()
    clock.now_s += 1.0
    timer.switch("other")
    timer.move("communicate", "wait", 10.0)
    _, parts_s = timer.lap()
    assert (parts_s["communicate"], parts_s["wait"]) == (0.0, 1.0)
