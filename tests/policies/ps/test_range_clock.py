"""`RangeVectorClock` against a time for every single key, and what it costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.policies.ps.range_clock import KEY_END, ClockRange, RangeVectorClock

SOME = 40  # keys that the model has one by one; keys behind them have the time of the last
CLIENTS = 3
ranges = st.tuples(st.integers(0, SOME - 1), st.integers(1, SOME)).map(lambda r: (r[0], min(SOME, sum(r))))
clients = st.integers(0, CLIENTS - 1)


class Model:
    """A time for every key."""

    def __init__(self):
        self.times = [[0] * SOME for _ in range(CLIENTS)]

    def set(self, client, first, last, time):
        self.times[client][first:last] = [time] * (last - first)


def same(clock, model):
    assert [[clock.time_of(client, key) for key in range(SOME)] for client in range(CLIENTS)] == model.times
    for client in range(CLIENTS):
        pieces = clock.pieces(client, 0, SOME)
        assert [p.start for p in pieces] == [0, *(p.stop for p in pieces[:-1])]
        assert pieces[-1].stop == SOME
        assert all(a.time != b.time for a, b in itertools.pairwise(pieces))


@given(st.lists(st.tuples(clients, ranges), max_size=30))
def test_a_range_clock_equals_a_clock_for_every_key(sets):
    clock, model = RangeVectorClock(), Model()
    for time, (client, (first, last)) in enumerate(sets, start=1):
        before = len(clock.pieces(client, 0, KEY_END))
        clock.set_time(client, first, last, time)
        model.set(client, first, last, time)
        assert len(clock.pieces(client, 0, KEY_END)) <= before + 2
    same(clock, model)


@given(st.lists(st.tuples(clients, ranges), max_size=15), clients, ranges, st.integers(1, 20))
def test_a_push_is_fresh_where_the_time_is_earlier(sets, client, where, time):
    clock, model = RangeVectorClock(), Model()
    for now, (pusher, (first, last)) in enumerate(sets, start=1):
        clock.set_time(pusher, first, last, now)
        model.set(pusher, first, last, now)
    fresh = clock.earlier_ranges(client, *where, time)
    keys = [key for first, last in fresh for key in range(first, last)]
    assert keys == [key for key in range(*where) if model.times[client][key] < time]
    assert all(a[1] < b[0] for a, b in itertools.pairwise(fresh))
    assert clock.is_complete(range(CLIENTS), *where, time) == all(
        model.times[pusher][key] >= time for pusher in range(CLIENTS) for key in range(*where)
    )


@given(st.lists(st.tuples(clients, ranges), max_size=15), ranges, st.booleans())
def test_extracted_times_hold_elsewhere_and_dropped_times_nowhere(sets, where, is_newer_there):
    clock, model, other = RangeVectorClock(), Model(), RangeVectorClock()
    for now, (client, (first, last)) in enumerate(sets, start=1):
        clock.set_time(client, first, last, now)
        model.set(client, first, last, now)
    if is_newer_there:
        other.set_time(0, 0, SOME, 7)
    other.merge(clock.extract(*where))
    merged = Model()
    for client in range(CLIENTS):
        merged.times[client] = [
            max(
                model.times[client][key] if where[0] <= key < where[1] else 0,
                7 * (is_newer_there and not client),
            )
            for key in range(SOME)
        ]
    same(other, merged)
    clock.drop(*where)
    for client in range(CLIENTS):
        model.set(client, *where, 0)
    same(clock, model)
    assert clock.clients == tuple(client for client in range(CLIENTS) if any(model.times[client]))


def test_whole_ranges_cost_one_piece_however_often_they_are_pushed():
    clock = RangeVectorClock()
    for time in range(1, 100):
        clock.set_time(5, 1000, 2000, time)
        clock.set_time(5, 2000, 2500, time)
    assert clock.pieces(5, 0, KEY_END) == [
        ClockRange(0, 1000, 0),
        ClockRange(1000, 2500, 99),
        ClockRange(2500, KEY_END, 0),
    ]


def test_the_last_key_has_a_time_too():
    clock = RangeVectorClock()
    clock.set_time(0, KEY_END - 1, KEY_END, 3)
    assert (clock.time_of(0, KEY_END - 1), clock.time_of(0, KEY_END - 2)) == (3, 0)


@given(st.lists(st.tuples(clients, ranges), max_size=15))
def test_a_restored_clock_is_equal_and_independent(sets):
    clock, other = RangeVectorClock(), RangeVectorClock()
    for now, (client, (first, last)) in enumerate(sets, start=1):
        clock.set_time(client, first, last, now)
    other.load_state_dict(clock.state_dict())
    assert other.state_dict() == clock.state_dict()
    other.set_time(0, 0, SOME, 100)
    assert clock.time_of(0, 0) != 100


@pytest.mark.parametrize("where", [(-1, 4), (4, 4), (5, 4), (0, KEY_END + 1)])
def test_an_impossible_range_is_refused(where):
    clock = RangeVectorClock()
    for call in (
        lambda: clock.set_time(0, *where, 1),
        lambda: clock.pieces(0, *where),
        lambda: clock.earlier_ranges(0, *where, 1),
        lambda: clock.extract(*where) if clock.set_time(0, 0, 9, 1) is None else None,
        lambda: clock.drop(*where),
    ):
        with pytest.raises(ValueError, match=r"expected a range of keys within 0 to"):
            call()


def test_time_does_not_run_backwards():
    clock = RangeVectorClock()
    clock.set_time(1, 10, 20, 5)
    with pytest.raises(ValueError, match=r"expected times of client 1 to grow, got 4 after 5 in 15 to 30"):
        clock.set_time(1, 15, 30, 4)
    assert clock.pieces(1, 0, 40) == [ClockRange(0, 10, 0), ClockRange(10, 20, 5), ClockRange(20, 40, 0)]
