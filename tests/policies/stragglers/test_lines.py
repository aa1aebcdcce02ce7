"""Lines of a group: which member is classed, and that none is whose line is not slow."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.events import Ready
from offbeat.policies.stragglers.lines import RETRY_FIRST_S, LineMonitor

LIMIT, COMPUTE_S, FAST_S = 3, 0.05, 0.005


def ready(worker, round_, line_s=(), *, now_s=0.0, compute_s=COMPUTE_S):
    return Ready(
        now_s=now_s,
        worker=worker,
        generation=1,
        epoch=0,
        step=round_,
        round=round_,
        compute_s=compute_s,
        samples=4,
        blocks=(),
        line_s=line_s,
    )


class Ring:
    """A ring of members whose lines, and connections, take so long.

    Attributes:
        lines_s: of members whose lines are slow; whatever is sent or received over them takes as long.
        connections_s: of slow connections between two neighbours.
    """

    def __init__(self, members, lines_s=None, connections_s=None, *, limit=LIMIT):
        self.members = tuple(members)
        self.monitor = LineMonitor(k=2.0, limit=limit)
        self.monitor.set_members(self.members)
        self.lines_s, self.connections_s = lines_s or {}, connections_s or {}
        self.round = 0
        self.changes = []

    def time_s(self, sender, receiver):
        pair = tuple(sorted((sender, receiver)))
        return max(
            FAST_S,
            self.lines_s.get(sender, 0.0),
            self.lines_s.get(receiver, 0.0),
            self.connections_s.get(pair, 0.0),
        )

    def readies(self, **more):
        """The Readys of the next round, each with the time to the receiver of the exchange before it."""
        following = dict(pairwise([*self.members, self.members[0]]))
        found = [
            ready(one, self.round, ((following[one], self.time_s(one, following[one])),), **more)
            for one in self.members
        ]
        self.round += 1
        return found

    def run(self, rounds, **more):
        for _ in range(rounds):
            for event in self.readies(**more):
                self.changes += self.monitor.observe_member(event)
        return self.monitor.stragglers


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("slow", [0, 2])
def test_a_member_with_a_slow_line_is_classed_and_the_reason_names_its_line(count, slow):
    ring = Ring(range(count), {slow: 1.5})
    assert ring.run(LIMIT - 1) == frozenset()
    assert ring.run(1) == {slow}
    (change,) = ring.changes
    assert (change.worker, change.is_straggler) == (slow, True)
    assert "its line is slow: data were on the way for 1.5 s, elsewhere for 0.005 s" in change.reason


def test_one_slow_connection_between_two_members_that_have_fast_ones_is_no_members():
    assert Ring(range(4), connections_s={(2, 3): 1.5}).run(3 * LIMIT) == frozenset()


def test_of_two_members_neither_is_classed():
    assert Ring(range(2), {0: 1.5}).run(3 * LIMIT) == frozenset()


def test_a_slow_connection_between_two_hosts_is_no_members():
    between_hosts = {(1, 2): 1.5, (0, 3): 1.5}
    assert Ring(range(4), connections_s=between_hosts).run(3 * LIMIT) == frozenset()


def test_slow_lines_of_all_members_are_none_s():
    assert Ring(range(4), dict.fromkeys(range(4), 1.5)).run(3 * LIMIT) == frozenset()


def test_a_line_that_costs_less_than_computing_is_not_slow():
    assert Ring(range(4), {2: COMPUTE_S}).run(3 * LIMIT) == frozenset()


@given(st.integers(3, 9), st.data())
def test_only_members_whose_lines_are_slow_are_ever_classed(count, data):
    slow = data.draw(st.sets(st.integers(0, count - 1)))
    ring = Ring(range(count), dict.fromkeys(slow, 1.5))
    found = ring.run(LIMIT)
    assert found <= slow
    if len(slow) == 1:
        assert found == slow


def test_single_slow_rounds_class_nobody():
    ring = Ring(range(4))
    for _ in range(3 * LIMIT):
        ring.lines_s = {2: 1.5}
        ring.run(1)
        ring.lines_s = {}
        ring.run(3)
    assert ring.monitor.stragglers == frozenset()


def test_readys_that_come_after_others_of_the_next_round_count():
    ring = Ring(range(4), {2: 1.5})
    late = []
    for _ in range(LIMIT + 2):
        events = ring.readies()
        for event in [*(event for event in events if event.worker != 2), *late]:
            ring.changes += ring.monitor.observe_member(event)
        late = [event for event in events if event.worker == 2]
    assert ring.monitor.stragglers == {2}


def test_a_worker_outside_the_group_is_tried_again_and_then_stays_out_for_longer():
    ring = Ring(range(4), {2: 1.5})
    assert ring.run(LIMIT) == {2}
    assert ring.monitor.observe(ready(2, 9, now_s=RETRY_FIRST_S - 1)) == []
    (change,) = ring.monitor.observe(ready(2, 9, now_s=RETRY_FIRST_S))
    assert (change.worker, change.is_straggler) == (2, False)
    ring.monitor.set_members(range(4))
    assert ring.run(1, now_s=100.0) == {2}  # the first slow round suffices
    assert ring.monitor.observe(ready(2, 9, now_s=100.0 + RETRY_FIRST_S)) == []
    assert len(ring.monitor.observe(ready(2, 9, now_s=100.0 + 2 * RETRY_FIRST_S))) == 1


def test_a_monitor_with_the_state_of_another_goes_on_as_that_one():
    ring = Ring(range(4), {2: 1.5})
    ring.run(1)
    other = LineMonitor(k=2.0, limit=LIMIT)
    other.load_state_dict(ring.monitor.state_dict())
    assert other.state_dict() == ring.monitor.state_dict()
    ring.monitor = other
    assert ring.run(2) == {2}
    assert other.longest_s == 1.5
    other.remove(2)
    assert other.stragglers == frozenset()
