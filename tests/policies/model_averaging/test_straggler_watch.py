"""Promises of the detector of workers that average models: who is a straggler, and what follows from it."""

import json
from dataclasses import replace
from itertools import combinations, cycle, islice

import pytest

from offbeat.policies.model_averaging.first_ready import FirstReadyGroups
from offbeat.policies.model_averaging.group_generator import GROUP_MODES, GroupGenerator
from offbeat.policies.model_averaging.local_rounds import LocalRounds
from offbeat.policies.model_averaging.neighbour_pairs import TOPOLOGIES, NeighbourPairs
from offbeat.policies.model_averaging.pair_averaging import PairAveraging
from offbeat.policies.model_averaging.partial_reduce import PartialReduce
from offbeat.policies.model_averaging.straggler_watch import StragglerWatch
from support.averaging_job import Job
from support.round_events import ready

FAST_S, SLOW_S, STEP_S = 0.05, 0.8, 0.1


def accept_any(group, worker):
    return True


def watch(workers=6, *, is_on=True):
    made = StragglerWatch(is_on=is_on)
    for worker in range(workers):
        made.add(worker)
        made.observe_step(ready(worker, 0), STEP_S)
    return made


def average(made, groups, slow=()):
    """Averagings of these groups, which are slow if one of its members has a slow line."""
    for group in groups:
        made.observe_averaging(group, SLOW_S if set(slow) & set(group) else FAST_S)


def groups_in_turn(workers, size, count):
    return islice(cycle(combinations(range(workers), size)), count)


# Who is a straggler ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "size"), [(4, 2), (6, 2), (8, 3), (4, 3)])
def test_the_worker_with_a_slow_line_is_found_and_none_of_its_partners(workers, size):
    made = watch(workers)
    average(made, groups_in_turn(workers, size, 120), slow={1})
    assert made.stragglers == {1}


def test_two_slow_lines_are_found():
    made = watch(8)
    average(made, groups_in_turn(8, 2, 200), slow={1, 5})
    assert made.stragglers == {1, 5}


def test_two_workers_that_meet_only_each_other_are_classed_until_one_is_cleared():
    made = watch()
    average(made, [(0, 1), (2, 3), (4, 5)] * 10, slow={1})
    assert made.stragglers == {0, 1}
    average(made, [(0, 2), (1, 3)], slow={1})
    assert made.stragglers == {1}
    average(made, [(0, 1)] * 10, slow={1})  # it says nothing of worker 0
    assert made.stragglers == {1}


def test_where_all_averagings_take_longer_than_before_nobody_is_a_straggler():
    made = watch(4)
    average(made, groups_in_turn(4, 2, 12))
    average(made, [(0, 1, 2, 3)] * 20, slow={1})
    assert not made.stragglers


def test_equally_slow_lines_are_no_stragglers():
    made = watch()
    average(made, groups_in_turn(6, 2, 200), slow=set(range(6)))
    assert not made.stragglers


def test_averagings_that_take_no_longer_than_a_step_and_two_fast_ones_are_not_slow():
    made = watch(4)
    for group in groups_in_turn(4, 2, 60):
        made.observe_averaging(group, STEP_S + 2 * FAST_S - 1e-9 if 1 in group else FAST_S)
    assert not made.stragglers


def test_the_first_faster_averaging_clears_a_worker():
    made = watch()
    average(made, groups_in_turn(6, 2, 60), slow={1})
    assert made.stragglers == {1}
    average(made, [(1, 2)])
    assert not made.stragglers
    assert made.pop_reasons([0, 1]) == "; worker 1: an averaging with it takes 0.05 s again"


def test_a_worker_with_slow_steps_is_found():
    made = watch(4)
    for step in range(1, 15):
        for worker in range(4):
            event = replace(ready(worker, step), compute_s=0.5 if worker == 2 else 0.1)
            made.observe_step(event, STEP_S)
    assert made.stragglers == {2}
    assert made.pop_reasons([1, 2]).startswith("; worker 2: compute time above 0.2 s")
    assert made.pop_reasons([1, 2]) == ""  # once


def test_without_the_detector_nobody_is_a_straggler():
    made = watch(is_on=False)
    average(made, groups_in_turn(6, 2, 60), slow={1})
    assert not made.stragglers
    assert made.least_steps(1) == 1


def test_a_worker_that_has_left_is_no_straggler():
    made = watch()
    average(made, groups_in_turn(6, 2, 60), slow={1})
    made.remove(1)
    made.remove(1)
    average(made, [(1, 2)], slow={1})  # an averaging that ends after its loop
    assert not made.stragglers


def test_a_restored_watch_continues_as_the_original():
    original, restored = watch(), StragglerWatch(is_on=True)
    average(original, groups_in_turn(6, 2, 40), slow={1})
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert restored.stragglers == original.stragglers == {1}
    for made in (original, restored):
        average(made, [(1, 3), (2, 4), (1, 5)], slow={2})
        made.observe_step(ready(1, 2), 0.4)
    assert restored.state_dict() == original.state_dict()


# What follows from it -------------------------------------------------------------------------------------


def test_with_a_slow_line_steps_take_four_times_as_long_as_an_averaging():
    made = watch()
    average(made, groups_in_turn(6, 2, 60), slow={1})
    assert made.least_steps(1) == 4 * SLOW_S / STEP_S
    made.observe_step(ready(1, 1), 0.4)
    assert made.least_steps(1) == 4 * SLOW_S / 0.4
    assert made.least_steps(2) == 1


@pytest.mark.parametrize("policy", [PartialReduce, PairAveraging])
def test_a_worker_with_a_slow_line_averages_less_often_and_its_group_says_why(policy):
    """Each worker ends a step every 0.1 s; averagings with worker 1 take 0.8 s."""
    job = Job(6, policy=policy, overlap=True, global_every=None).begin()
    began_s = {}
    for _ in range(200):
        job.now_s += STEP_S
        for worker, protocol in job.workers.items():
            averaging = protocol.averaging
            if averaging is not None:
                took_s = SLOW_S if 1 in averaging.members else FAST_S
                if job.now_s < began_s[averaging.exchange_id] + took_s - 1e-9:
                    job.ready(worker)
                    continue
                job.averaged(worker)
            protocol.count_step()
            began_s |= dict.fromkeys(
                (action.exchange_id for action in job.ready(worker) if hasattr(action, "exchange_id")),
                job.now_s,
            )
    by_worker = {worker: [one for one in job.averagings if worker in one.members] for worker in job.workers}
    late = by_worker[1][-1]
    assert late.steps[late.members.index(1)] >= 4 * SLOW_S / STEP_S
    assert len(by_worker[1]) < min(len(found) for worker, found in by_worker.items() if worker != 1) / 4
    assert any("worker 1: its line is slow: its last 4 averagings" in one.reason for one in job.averagings)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_straggler_asks_and_is_not_asked(topology):
    pairs = NeighbourPairs(topology)
    pairs.set_stragglers(frozenset({2}))
    everybody = frozenset(range(5))
    assert pairs.pop_group(everybody, 0.0, accept_any) is None
    for worker in (1, 2):  # 0, 1, 3, 4 are the ring, on which 1 and 4 are active; 2 is between 1 and 3
        pairs.add(worker, 0.0)
    assert pairs.pop_group(everybody, 0.0, accept_any) == (1, 2)
    pairs.add(2, 1.0)
    pairs.add(4, 1.0)
    assert pairs.pop_group(everybody, 1.0, accept_any) is None  # not next to each other
    pairs.add(3, 2.0)
    assert pairs.pop_group(everybody, 2.0, accept_any) == (2, 3)  # 2 was ready before 4
    pairs.discard(4)
    pairs.add(3, 3.0)
    assert pairs.pop_group(everybody, 3.0, accept_any) is None
    pairs.add(2, 4.0)
    assert pairs.pop_group(everybody, 4.0, accept_any) == (2, 3)


def test_without_its_straggler_the_other_worker_of_two_goes_on_alone():
    for groups in (NeighbourPairs("ring"), FirstReadyGroups(2, None, 60.0), GroupGenerator("smart", 3, 4)):
        groups.set_stragglers(frozenset({1}))
        groups.add(0, 0.0)
        assert groups.pop_group(frozenset({0, 1}), 0.0, accept_any) == (0,)
        groups.add(1, 1.0)
        popped = groups.pop_group(frozenset({0, 1}), 1.0, accept_any)
        groups.add(0, 2.0)
        assert popped or groups.pop_group(frozenset({0, 1}), 2.0, accept_any) == (0, 1)


def test_no_group_is_held_to_connect_a_straggler():
    groups = FirstReadyGroups(2, 2, 10.0)
    groups.set_stragglers(frozenset({3}))
    everybody = frozenset(range(4))
    for turn in range(4):
        for worker in (0, 1, 2):
            if worker not in groups.ready:
                groups.add(worker, float(turn))
        assert groups.pop_group(everybody, float(turn), accept_any) is not None
    assert groups.timeouts == 0


def test_a_window_does_not_grow_with_a_straggler():
    """Of 4 other workers only 0 and 1 are ready: the last group of 4 times the least window of 3 is held."""
    groups = FirstReadyGroups(2, None, 1e9)
    groups.set_stragglers(frozenset({4}))
    everybody = frozenset(range(5))
    for worker in everybody:
        groups.observe_step(worker, 0.0, samples=1, step_s=20.0 if worker == 4 else 1.0)
    formed = 0
    while True:
        for worker in {0, 1} - groups.ready:
            groups.add(worker, 0.0)
        if groups.pop_group(everybody, 0.0, accept_any) is None:
            break
        formed += 1
    assert formed == 4 * 3 - 1


def test_a_group_with_a_straggler_is_held_for_no_part_that_has_no_place_in_it():
    groups = FirstReadyGroups(2, 2, 1e9)
    groups.set_stragglers(frozenset({4}))
    everybody = frozenset(range(5))
    for worker in (0, 1):
        groups.add(worker, 0.0)
    assert groups.pop_group(everybody, 0.0, accept_any) == (0, 1)
    for worker in (4, 0):
        groups.add(worker, 1.0)
    assert groups.pop_group(everybody, 1.0, accept_any) == (0, 4)


@pytest.mark.parametrize("mode", GROUP_MODES)
def test_no_decided_group_waits_for_a_straggler(mode):
    groups = GroupGenerator(mode, 3, None)
    everybody = frozenset(range(6))
    groups.add(0, 0.0)
    assert groups.pop_group(everybody, 0.0, accept_any) is None  # groups are decided
    groups.set_stragglers(frozenset({3}))
    seen = set()
    for turn in range(30):
        for worker in sorted(everybody - {3} - groups.ready):
            groups.add(worker, float(turn))
        while (group := groups.pop_group(everybody, float(turn), accept_any)) is not None:
            assert 3 not in group
            seen.update(group)
    assert seen == everybody - {3}


@pytest.mark.parametrize("mode", GROUP_MODES)
def test_a_straggler_that_is_ready_asks_for_a_group(mode):
    groups = GroupGenerator(mode, 3, None)
    groups.set_stragglers(frozenset({3}))
    everybody = frozenset(range(6))
    groups.add(3, 0.0)
    popped = []
    for turn in range(3):
        for worker in sorted(everybody - {3} - groups.ready):
            groups.add(worker, float(turn))
        while (group := groups.pop_group(everybody, float(turn), accept_any)) is not None:
            popped.append(group)
    assert any(3 in group and len(group) > 1 for group in popped)


@pytest.mark.parametrize("by_pace", [False, True])
def test_a_quorum_gives_stragglers_no_time_unless_their_steps_follow_their_pace(by_pace):
    rounds = LocalRounds(4, 2, 10.0, by_pace=by_pace)
    rounds.set_stragglers(frozenset({2}))
    for worker in (0, 1):
        rounds.observe_step(worker, 1.0, samples=1, step_s=1.0)
        rounds.add(worker, 1.0)
    assert rounds.pop_group(frozenset({0, 1, 2}), 1.0, accept_any) == (None if by_pace else (0, 1))


def test_a_restored_policy_has_the_stragglers():
    job = Job(4, overlap=True, global_every=None).begin()
    for step in range(16):
        for worker in range(4):
            job.ready(worker, step=step, compute_s=0.5 if worker == 2 else 0.1)
            if job.workers[worker].averaging is not None:
                job.averaged(worker)
    restored = PartialReduce(4, shards="equal", overlap=True, global_every=None)
    restored.load_state_dict(json.loads(json.dumps(job.policy.state_dict())))
    assert restored.state_dict()["watch"]["classifier"] == job.policy.state_dict()["watch"]["classifier"]
    event = replace(ready(0, 16), now_s=2.0)
    assert restored.handle(event) == job.policy.handle(event)
