"""The gate of bounded staleness: when a worker may start, by the paper's text and in random histories."""

from __future__ import annotations

import heapq
import json
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.policies.staleness.clock_gate import ClockCounting, ConsistencyGate, OpenedStep


def running(
    workers: int, s: int | None, counts: ClockCounting = "own", s_max: int | None = None
) -> ConsistencyGate:
    """Workers that have all started their first step."""
    gate = ConsistencyGate(s, counts, s_max)
    for worker in range(workers):
        gate.enter(worker)
    assert [one.worker for one in gate.open_steps()] == list(range(workers))
    return gate


def take(gate: ConsistencyGate, worker: int, steps: int = 1) -> list[OpenedStep]:
    """The worker takes steps, as many as it may; returns the steps that the last of them opened."""
    opened: list[OpenedStep] = []
    for _ in range(steps):
        gate.advance(worker)
        opened = gate.open_steps()
    return opened


def apart(fast: int = 7, slow: int = 3, s: int = 3) -> ConsistencyGate:
    """The paper's example: two workers, the fast one waits at 7 and the slow one is at 3."""
    gate = running(2, s)
    while gate.clock(1) < slow:
        take(gate, 1)
        take(gate, 0)
    while gate.clock(0) < fast:
        take(gate, 0)
    return gate


# Small cases --------------------------------------------------------------------------------------------


def test_the_papers_example_7_waits_for_3_under_a_bound_of_3_and_starts_under_4():
    gate = apart()
    assert (gate.clock(0), gate.clock(1), gate.version) == (7, 3, 3)
    assert gate.waiting == {0}
    assert gate.blocking_workers() == [1]
    gate.set_bound(4)
    assert gate.open_steps() == [OpenedStep(0, 7, 3, 4)]
    assert gate.blocking_workers() == []


def test_a_waiting_worker_starts_when_the_slow_one_has_finished_its_step():
    gate = apart()
    assert take(gate, 1) == [OpenedStep(0, 7, 4, 3), OpenedStep(1, 4, 1, 3)]
    assert gate.version == 4


@pytest.mark.parametrize("counts", ["own", "common"])
def test_with_bound_0_no_worker_starts_a_clock_before_all_have_finished_the_one_before(counts):
    gate = running(3, 0, counts)
    for clock in range(1, 4):
        assert take(gate, 2) == []
        assert take(gate, 0) == []
        assert take(gate, 1) == [OpenedStep(worker, clock, clock, 0) for worker in range(3)]


def test_without_a_bound_no_worker_waits():
    gate = running(2, None)
    for clock in range(1, 100):
        assert take(gate, 0) == [OpenedStep(0, clock, 0, None)]
    assert gate.blocking_workers() == []


def test_the_required_version_of_a_step_is_at_most_s_clocks_old():
    gate = running(2, 2)
    assert [take(gate, 0)[0].version for _ in range(2)] == [0, 0]
    assert take(gate, 0) == []
    take(gate, 1)
    assert gate.required_version(0) == 1
    assert gate.required_version(1) == 0


def test_a_smaller_bound_calls_no_started_worker_back():
    gate = running(2, 3)
    take(gate, 0, 3)
    gate.set_bound(1)
    assert gate.required_version(0) == 0
    assert take(gate, 0) == []
    assert take(gate, 1) == [OpenedStep(1, 1, 0, 1)]
    assert [one.worker for one in take(gate, 1)] == [1]
    assert [one.worker for one in take(gate, 1)] == [0, 1]


def test_a_worker_that_leaves_delays_no_other():
    gate = apart()
    gate.leave(1)
    assert gate.open_steps() == [OpenedStep(0, 7, 4, 3)]
    assert gate.version == 7
    gate.leave(0)
    assert 0 not in gate
    assert gate.version == 8


def test_a_newcomer_begins_at_an_incomplete_clock_at_which_it_can_push():
    gate = apart()
    assert gate.enter(2) == 3
    assert gate.enter(3, 9) == 9
    assert gate.open_steps() == [OpenedStep(2, 3, 0, 3)]
    gate = apart()
    gate.leave(0)
    gate.leave(1)
    assert gate.enter(4, 2) == 8
    assert gate.enter(5, 99) == 99
    assert gate.version == 8


def test_a_newcomer_alone_makes_all_clocks_before_its_own_complete():
    gate = ConsistencyGate(3)
    assert gate.enter(0, 50) == gate.version == 50
    assert gate.open_steps() == [OpenedStep(0, 50, 47, 3)]


def test_a_resting_worker_delays_no_other_and_its_clock_advances():
    gate = apart()
    assert gate.rest(1) == 4
    assert gate.open_steps() == [OpenedStep(0, 7, 4, 3)]
    assert gate.advance_resting() == [1]
    assert gate.clock(1) == gate.version == 7
    take(gate, 0, 2)
    assert gate.advance_resting() == [1]
    assert not gate.is_running(1)
    assert gate.enter(1) == 9
    assert gate.open_steps() == [OpenedStep(1, 9, 6, 3)]


def test_when_no_worker_runs_all_continue_at_the_latest_clock():
    gate = apart(fast=6)
    gate.rest(0)
    assert gate.version == 3
    gate.rest(1)
    assert gate.version == 7
    assert gate.advance_resting() == [1]
    assert [gate.enter(worker) for worker in (0, 1)] == [7, 7]


def test_a_straggler_holds_others_back_only_beyond_s_max():
    gate = running(3, 1, s_max=3)
    take(gate, 0)
    take(gate, 1)
    assert take(gate, 0) == []
    gate.set_stragglers(frozenset({2}))
    assert gate.open_steps() == [OpenedStep(0, 2, 0, 3)]
    assert take(gate, 0) == []
    assert gate.blocking_workers() == [1]
    assert [one.worker for one in take(gate, 1)] == [0, 1]
    take(gate, 1)
    assert take(gate, 0) == []
    assert gate.blocking_workers() == [2]
    assert gate.version == 0
    assert [one.worker for one in take(gate, 2)] == [0, 2]
    gate.set_stragglers(frozenset())
    assert gate.required_version(0) == 1


def test_where_only_stragglers_run_they_wait_for_one_another():
    gate = running(3, 1, s_max=5)
    gate.set_stragglers(frozenset({1, 2}))
    gate.leave(0)
    take(gate, 1)
    assert take(gate, 1) == []
    assert gate.blocking_workers() == [2]


def test_stragglers_that_waited_for_one_another_do_not_once_another_worker_runs():
    gate = running(2, 0, s_max=2)
    gate.set_stragglers(frozenset({0, 1}))
    assert take(gate, 0) == []
    assert gate.enter(2, 1) == 1
    assert gate.open_steps() == [OpenedStep(0, 1, 0, 2), OpenedStep(2, 1, 0, 2)]


def test_common_clocks_are_as_many_steps_as_workers_run_by_any_of_them():
    gate = running(3, 3, "common")
    assert [take(gate, 0)[0].clock for _ in range(7)] == [1, 1, 1, 2, 2, 2, 3]
    assert [take(gate, 1)[0].clock for _ in range(2)] == [3, 3]
    assert take(gate, 1) == []  # the clocks are ahead of worker 2 by 4
    assert gate.clock(1) == 4
    assert [one.worker for one in take(gate, 2)] == [1, 2]
    assert [gate.clock(worker) for worker in range(3)] == [3, 4, 4]
    assert gate.version == 3


def test_clocks_of_slow_workers_are_skipped_and_those_of_fast_ones_repeat():
    gate = running(2, None, "common")
    assert [take(gate, 0)[0].clock for _ in range(4)] == [1, 1, 2, 2]
    assert [one.clock for one in take(gate, 1)] == [3]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((-1,), "at least 0 clocks, got -1"),
        ((3, "both"), "own or common, got 'both'"),
        ((3, "own", 2), "s_max of at least s, 3, got 2"),
        ((None, "own", 2), "s_max of at least s, None, got 2"),
    ],
)
def test_bad_arguments_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        ConsistencyGate(*arguments)


def test_impossible_calls_are_refused():
    gate = apart()
    for wrong in (gate.advance, gate.rest, gate.leave, gate.required_version, gate.clock):
        with pytest.raises(ProtocolError, match="expected a worker that runs, got worker 9"):
            wrong(9)
    with pytest.raises(ProtocolError, match="does not run, got worker 0"):
        gate.enter(0)
    with pytest.raises(ProtocolError, match="worker 0 to wait at clock 7 until it may start"):
        gate.advance(0)
    with pytest.raises(ProtocolError, match="s_max"):
        gate.set_stragglers(frozenset({1}))
    with pytest.raises(ValueError, match="from 0"):
        gate.set_bound(-1)


# Random histories ---------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["own", "common"]),
    st.one_of(st.none(), st.integers(0, 4)),
    st.booleans(),
)
def test_the_invariants_hold_in_any_history(seed, counts, s, has_stragglers):
    """Spec 2.4 (i), (ii), (v), (vii), under deaths, newcomers, rests, changes of the bound and stragglers."""
    chance = random.Random(seed)
    s_max = None if s is None or not has_stragglers else s + 3
    gate = ConsistencyGate(s, counts, s_max)
    table: dict[int, str] = {}  # runs, waits or rests
    next_worker = before = 0
    for _ in range(60):
        move = chance.choice(["enter", "leave", "rest", "wake", "bound", "stragglers", *["advance"] * 9])
        running = sorted(worker for worker, state in table.items() if state == "runs")
        resting = sorted(worker for worker, state in table.items() if state == "rests")
        if move == "enter" and len(table) < 6:
            least = chance.choice([0, 0, gate.version + 2])
            assert gate.enter(next_worker, least) >= max(least, gate.version)
            table[next_worker] = "waits"
            next_worker += 1
        elif move == "leave" and table and chance.random() < 0.5:
            gone = chance.choice(sorted(table))
            gate.leave(gone)
            del table[gone]
        elif move == "rest" and running:
            worker = chance.choice(running)
            assert gate.clock(worker) < gate.rest(worker)
            table[worker] = "rests"
        elif move == "wake" and resting:
            worker = chance.choice(resting)
            clock = gate.clock(worker)
            assert gate.enter(worker) >= clock
            table[worker] = "waits"
        elif move == "bound" and s is not None:
            gate.set_bound(chance.randint(0, s if s_max is None else s_max))
        elif move == "stragglers" and s_max is not None:
            gate.set_stragglers(frozenset(chance.sample(sorted(table), len(table) // 2)))
        elif move == "advance" and running:
            worker = chance.choice(running)
            clock = gate.clock(worker)
            after = gate.advance(worker)
            assert after == clock + 1 if counts == "own" else after >= clock
            table[worker] = "waits"
        state = json.loads(json.dumps(gate.state_dict()))
        gate = ConsistencyGate(s, counts, s_max)
        gate.load_state_dict(state)
        assert gate.state_dict() == state
        for one in gate.open_steps():
            assert table[one.worker] == "waits"
            table[one.worker] = "runs"
            bound = gate.s if s_max is None else s_max
            assert gate.s is None or one.clock - gate.version <= bound  # (i)
            assert one.bound is None or max(0, one.clock - one.bound) <= one.version  # (ii)
            assert one.version <= gate.version  # which is complete: no read waits for a later push
        gate.advance_resting()
        assert all(gate.clock(worker) >= gate.version for worker in table)
        assert gate.version >= before
        before = gate.version
        assert gate.waiting == {worker for worker, state in table.items() if state == "waits"}
        up = [worker for worker, state in table.items() if state != "rests"]
        assert not up or gate.version == min(gate.clock(worker) for worker in up)
        if s is None:
            assert not gate.waiting  # (v)
        if gate.waiting:
            holding = gate.blocking_workers()
            assert holding
            assert all(table[worker] == "runs" for worker in holding)  # (vii)


def waited(periods: list[int], s: int | None, counts: ClockCounting, clocks: int = 200) -> list[Fraction]:
    """The share of its time that each worker waits when its steps always take so long."""
    gate = running(len(periods), s, counts)
    waits_since = [0] * len(periods)
    waits = [0] * len(periods)
    busy = [(period, worker) for worker, period in enumerate(periods)]
    heapq.heapify(busy)
    now = 0
    while gate.version < clocks:
        now, worker = heapq.heappop(busy)
        gate.advance(worker)
        waits_since[worker] = now
        for one in gate.open_steps():
            waits[one.worker] += now - waits_since[one.worker]
            heapq.heappush(busy, (now + periods[one.worker], one.worker))
    return [Fraction(wait, now) for wait in waits]


def test_with_own_clocks_no_bound_helps_against_lasting_differences():
    """The setting of the papers, with an equal share for each: all end when the slowest does."""
    bulk, bounded = (waited([6, 6, 3, 2], s, "own") for s in (0, 3))
    assert bulk == pytest.approx([0, 0, 1 / 2, 2 / 3], abs=0.01)
    assert bounded == pytest.approx(bulk, abs=0.02)


def test_with_common_clocks_the_wait_at_the_gate_vanishes():
    bulk = waited([6, 6, 3, 2], 0, "common")
    assert bulk == pytest.approx([0, 0, 1 / 2, 2 / 3], abs=0.01)
    assert max(waited([6, 6, 3, 2], 3, "common")) < 0.02
