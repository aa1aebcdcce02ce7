"""Promises of partial reduce (P-Reduce): groups of the first that are ready, and one model at the end."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    AssignBlocks,
    CancelAveraging,
    JobComplete,
    Left,
    Lost,
    ModelsAveraged,
    PeerReachable,
    PeerUnreachable,
    Ready,
    RejectPeer,
    SamplesRequested,
    Tick,
)
from offbeat.policies.model_averaging.first_ready import FirstReadyGroups
from offbeat.policies.model_averaging.partial_reduce import PartialReduce
from offbeat.policies.model_averaging.weights import ema_weights
from support.averaging_job import Job, members


def accept_any(group, worker):
    return True


# The start and the end ------------------------------------------------------------------------------------


def test_all_workers_begin_with_the_state_of_worker_0():
    (first,) = Job(4).averagings
    assert first.members == (0, 1, 2, 3)
    assert first.joining == (1, 2, 3)
    assert first.weights == (1.0, 0.0, 0.0, 0.0)


def test_the_state_of_worker_0_is_needed():
    job = Job(3)
    job.lost(0)
    assert job.averaged(1, has_mean=False) == []
    (stopped,) = job.averaged(2, has_mean=False)
    assert isinstance(stopped, AbortJob)
    assert "the initial state" in stopped.reason


def test_a_worker_that_has_received_the_state_replaces_worker_0():
    job = Job(3)
    job.lost(0)
    assert job.averaged(1, has_mean=False) == []
    assert job.averaged(2) == []
    assert members(job.ready(2)) == [(1, 2)]
    assert job.averagings[-1].joining == (1,)
    assert job.averagings[-1].leader == 2


def test_a_worker_that_has_not_received_the_state_receives_it_with_the_next_group():
    job = Job(4)
    job.lost(3)
    job.averaged(0)
    job.averaged(1, has_mean=False)
    job.averaged(2)
    job.averagings.clear()
    assert job.ready(0) == []
    (group,) = members(job.ready(2))
    assert group == (0, 1, 2)
    assert job.averagings[-1].joining == (1,)
    assert job.averagings[-1].weights == (0.5, 0.0, 0.5)


def test_the_first_group_waits_for_workers_that_are_receiving_the_state():
    job = Job(3, size=3)
    job.averaged(0)
    job.averaged(1)
    assert job.ready(0) + job.ready(1) == []
    assert job.averaged(2) == []
    assert members(job.ready(2)) == [(0, 1, 2)]


def test_a_newcomer_receives_the_state_with_the_next_group():
    job = Job(4).begin()
    assert job.join(7, 4) == []
    job.ready(0)
    job.ready(2)
    assert members(job.ready(1)) == [(0, 1, 2, 7)]
    assert job.averagings[-1].joining == (7,)
    job.end_all()
    job.ready(7)
    job.ready(3)
    assert members(job.ready(0)) == [(0, 3, 7)]


def test_a_newcomer_receives_the_state_from_a_worker_that_has_finished():
    job = Job(2).begin()
    job.finished(0)
    job.finished(1)
    job.averaged(0)
    job.join(5, 2)
    job.averaged(1)
    assert job.averagings[-1].members == (0, 5)
    assert job.averagings[-1].joining == (5,)


def test_when_all_have_finished_all_models_and_buffers_are_averaged_once():
    job = Job(3).begin()
    assert job.finished(0) + job.finished(2) == []
    (last,) = job.finished(1)
    assert last.members == (0, 1, 2)
    assert last.includes_buffers
    assert job.averaged(0) + job.averaged(1) == []
    assert [type(action) for action in job.averaged(2)] == [JobComplete]


def test_the_last_averaging_is_repeated_where_a_member_was_lost():
    job = Job(3).begin()
    for worker in range(3):
        job.finished(worker)
    (cancelled,) = job.lost(1)
    assert isinstance(cancelled, CancelAveraging)
    job.averaged(0)
    (again,) = job.averaged(2, has_mean=False)
    assert again.members == (0, 2)
    job.averaged(0)
    assert [type(action) for action in job.averaged(2)] == [JobComplete]


def test_a_single_worker_needs_no_partner():
    job = Job(1).begin()
    assert members(job.ready(0)) == [(0,)]
    job.averaged(0)
    assert [type(action) for action in job.finished(0)] == [JobComplete]


def test_after_the_end_no_worker_may_join():
    job = Job(1).begin()
    job.finished(0)
    (rejected,) = job.join(4, 1)
    assert isinstance(rejected, RejectPeer)
    assert "the job is over" in rejected.reason


# Groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "size"), [(2, 2), (3, 2), (4, 3), (9, 3)])
def test_by_default_a_group_has_three_workers_or_two_of_fewer_than_four(world, size):
    job = Job(world).begin()
    for worker in range(size - 1):
        assert job.ready(worker) == []
    assert members(job.ready(size - 1)) == [tuple(range(size))]
    assert job.averagings[0].weights == (1 / size,) * size


def test_groups_of_different_workers_run_at_the_same_time():
    job = Job(6, size=3, window=0).begin()
    for worker in (4, 1, 5, 0, 3):
        job.ready(worker)
    job.ready(2)
    assert [one.members for one in job.averagings] == [(1, 4, 5), (0, 2, 3)]
    assert job.averagings[0].exchange_id < job.averagings[1].exchange_id


def test_a_slow_worker_is_not_waited_for():
    job = Job(4, size=3, window=0).begin()
    for _ in range(20):
        for worker in (0, 1, 3):
            job.ready(worker)
        job.end_all()
    assert [one.members for one in job.averagings] == [(0, 1, 3)] * 20


def test_with_as_many_workers_in_a_group_as_there_are_all_average_together():
    job = Job(4, size=4).begin()
    for worker in (3, 1, 2):
        assert job.ready(worker) == []
    assert members(job.ready(0)) == [(0, 1, 2, 3)]


def test_the_last_workers_that_train_form_a_smaller_group():
    job = Job(4, size=3).begin()
    job.ready(0)
    job.ready(1)
    job.finished(2)
    assert members(job.finished(3)) == [(0, 1)]
    job.end_all()
    job.finished(1)
    assert members(job.ready(0)) == [(0,)]


def test_a_worker_is_in_one_averaging_at_a_time():
    job = Job(3, size=3).begin()
    job.ready(0)
    with pytest.raises(ProtocolError, match="which waits for an averaging"):
        job.ready(0)
    job.ready(1)
    job.ready(2)
    with pytest.raises(ProtocolError, match="which waits for an averaging"):
        job.ready(1)


def test_with_overlap_a_worker_reports_steps_while_it_is_averaged_and_is_in_no_other_group():
    job = Job(4, size=2, window=0, overlap=True).begin()
    job.ready(0)
    assert members(job.ready(1)) == [(0, 1)]
    assert job.ready(0) + job.ready(0) == []
    job.ready(2)
    assert members(job.ready(3)) == [(2, 3)]
    job.averaged(2)
    job.ready(2)
    assert job.ready(0) == []  # it has not added the difference yet
    job.averaged(0)
    assert members(job.ready(0)) == [(0, 2)]


def test_with_overlap_a_worker_that_has_finished_is_in_no_group_though_it_was_ready():
    job = Job(3, size=2, window=0, overlap=True).begin()
    job.ready(0)
    job.finished(0)
    assert job.ready(1) == []
    assert members(job.ready(2)) == [(1, 2)]


@pytest.mark.parametrize(
    "event", [ModelsAveraged(now_s=0, worker=1, exchange_id=77, model_steps=0, has_mean=True)]
)
def test_an_averaging_ends_once_and_for_its_members(event):
    with pytest.raises(ProtocolError, match="worker 1 is in, got 77"):
        Job(3).begin().emit(event)


# Weights --------------------------------------------------------------------------------------------------


def dynamic_job(world, **options):
    return Job(world, size=2, window=0, weights="dynamic", **options).begin()


def last_weights(job):
    return job.averagings[-1].members, job.averagings[-1].weights


def test_with_dynamic_weights_a_model_counts_by_its_steps_and_has_those_of_the_newest_afterwards():
    job = dynamic_job(3)
    for _ in range(2):
        job.ready(0)
        job.ready(1)
        assert last_weights(job) == ((0, 1), (0.5, 0.5))
        job.end_all()
    job.ready(2)
    job.ready(0)
    assert last_weights(job) == ((0, 2), ema_weights([3, 1]))
    job.end_all()
    job.ready(2)
    job.ready(1)
    assert last_weights(job) == ((1, 2), ema_weights([3, 4]))


def test_a_member_that_has_not_received_the_mean_counts_by_its_own_steps():
    job = dynamic_job(3)
    for _ in range(4):
        job.ready(0)
        job.ready(1)
        job.end_all()
    job.ready(2)
    job.ready(0)
    job.averaged(0)
    job.averaged(2, has_mean=False)
    job.ready(2)
    job.ready(1)
    assert last_weights(job) == ((1, 2), ema_weights([5, 2]))


def test_steps_that_a_worker_makes_while_its_model_is_averaged_count():
    job = Job(3, size=2, window=0, weights="dynamic", overlap=True).begin()
    for worker in range(3):
        job.ready(worker)  # the first one begins a worker's count
    for _ in range(4):
        job.ready(1)
    job.end_all()
    job.ready(1)
    assert last_weights(job) == ((1, 2), ema_weights([5, 0]))


def test_a_newcomer_counts_as_the_newest():
    job = dynamic_job(2)
    for _ in range(3):
        job.ready(0)
        job.ready(1)
        job.end_all()
    job.join(5, 2)
    job.ready(0)
    job.ready(1)
    job.end_all()
    job.ready(5)
    job.ready(0)
    assert last_weights(job) == ((0, 5), (0.5, 0.5))


def test_after_a_mean_of_all_models_they_count_alike():
    groups = FirstReadyGroups(2, 0, 10.0, "dynamic")
    for worker in (0, 0, 0, 1):
        groups.observe_step(worker, 0.0, samples=1, step_s=1.0)
    assert groups.weights((0, 1)) == ema_weights([3, 1])
    for worker in (0, 1):
        groups.end_averaging(worker, has_mean=False)
    for worker in (0, 1):
        groups.end_averaging(worker, has_mean=True)  # of one that was none of these groups
    assert groups.weights((0, 1)) == (0.5, 0.5)


def test_dynamic_weights_do_not_keep_the_sum_of_the_models_and_constant_ones_do():
    def sum_after(weights):
        job = Job(2, size=2, weights=weights, overlap=True).begin()
        job.ready(0)
        job.ready(0)
        job.ready(0)
        job.ready(1)
        (averaging,) = job.averagings
        return 2 * sum(w * x for w, x in zip(averaging.weights, (1.0, 3.0), strict=True))

    assert sum_after("constant") == 4.0
    assert sum_after("dynamic") != pytest.approx(4.0)


def test_members_keep_their_own_share_but_not_with_new_workers_or_in_the_last_averaging():
    job = dynamic_job(2, apply="own_share")
    for newcomer in (None, 7):
        if newcomer is not None:
            job.join(newcomer, 2)
        job.ready(0)
        job.ready(1)
        job.end_all()
    job.finished(7)
    job.finished(0)
    job.finished(1)
    assert [one.keeps_own_share for one in job.averagings] == [True, False, False]
    assert job.averagings[-1].weights == (1 / 3,) * 3
    assert not Job(2).averagings[0].keeps_own_share


def test_unknown_weights_and_applications_are_refused():
    with pytest.raises(ValueError, match="expected weights of constant or dynamic, got 'ema'"):
        PartialReduce(4, weights="ema")
    with pytest.raises(ValueError, match="expected apply of common or own_share, got 'own'"):
        PartialReduce(4, apply="own")


# Windows: no part of the workers stays among itself ---------------------------------------------------------


def groups_of(pace_s, size, window, rounds=200):
    """Workers of constant paces that wait for their groups; returns the groups, each with the window then."""
    groups = FirstReadyGroups(size, window, 1e9)
    next_s, formed = dict(pace_s), []
    while len(formed) < rounds:
        worker = min(next_s.keys() - groups.ready, key=lambda one: (next_s[one], one))
        now_s = next_s[worker]
        groups.observe_step(worker, now_s, samples=1, step_s=pace_s[worker])
        groups.add(worker, now_s)
        while (group := groups.pop_group(set(pace_s), now_s, accept_any)) is not None:
            formed.append((group, groups.state_dict()["window_max"]))
            for member in group:
                next_s[member] = now_s + pace_s[member]
    return formed


def is_connected(groups, workers):
    parts = [{worker} for worker in workers]
    for group in groups:
        joined = [part for part in parts if part & set(group)]
        parts = [part for part in parts if part not in joined] + [set().union(*joined)]
    return len(parts) == 1


def isolated_pairs(window):
    """Two fast and two slow workers, groups of two; returns the share of windows that connect all."""
    formed = [group for group, _ in groups_of({0: 1.0, 1: 1.0, 2: 3.1, 3: 3.1}, 2, window)]
    connected = [is_connected(formed[at : at + 6], range(4)) for at in range(len(formed) - 6)]
    return sum(connected) / len(connected)


def test_workers_of_equal_pace_meet_others_within_a_window():
    assert isolated_pairs(0) < 0.2
    assert isolated_pairs(6) == 1.0


@settings(deadline=None)
@given(
    pace_s=st.lists(st.sampled_from([1.0, 1.1, 1.9, 3.0, 5.0, 7.3]), min_size=2, max_size=8),
    size=st.integers(2, 4),
    window=st.sampled_from([None, 1, 2, 3]),
)
def test_after_the_start_every_window_connects_all_workers(pace_s, size, window):
    """A given window is so many times the least possible one."""
    workers = range(len(pace_s))
    least = math.ceil((len(pace_s) - 1) / (size - 1))
    formed = groups_of(dict(enumerate(pace_s)), size, window and window * least, rounds=300)
    start = 3 * formed[-1][1]
    for end in range(start, len(formed) + 1):
        in_window = [group for group, _ in formed[end - formed[end - 1][1] : end]]
        assert is_connected(in_window, workers)


def groups_without_the_last_worker(steps_s, size=3):
    """How many groups the others form before one waits for the last one, by the last steps of each."""
    groups = FirstReadyGroups(size, None, 1e9)
    for worker, times_s in enumerate(steps_s):
        for step_s in times_s:
            groups.observe_step(worker, 0.0, samples=1, step_s=step_s)
    expected, count = {*range(len(steps_s))}, 0
    while True:
        for worker in sorted(expected - groups.ready)[:-1]:
            groups.add(worker, 0.0)
        while groups.pop_group(expected, 0.0, accept_any):
            count += 1
            assert count < 1000
        if expected - groups.ready == {len(steps_s) - 1}:
            return count


def test_by_default_the_window_has_room_for_a_step_of_the_slowest_worker():
    """4 workers, groups of 3: 4 times the least window is 8, 1.5 (N-1) f / P is 1.5 f; the last is held."""
    assert groups_without_the_last_worker([[1.0], [1.0], [1.0], [1.0]]) == 7
    assert groups_without_the_last_worker([[1.0], [1.0], [1.0], [5.0]]) == 7
    assert groups_without_the_last_worker([[1.0], [1.0], [1.0], [6.0]]) == 8
    assert groups_without_the_last_worker([[1.0], [1.1], [0.5], [6.0]]) == 17
    assert groups_without_the_last_worker([[1.0], [1.0], [1.0], []]) == 7  # its pace is not known


def test_a_single_slow_step_does_not_make_a_worker_slow():
    healthy = [1.0, 1.0, 1.0, 1.0]
    assert groups_without_the_last_worker([healthy, healthy, healthy, [1.0, 9.0, 9.0, 1.0, 1.0]]) == 7
    assert groups_without_the_last_worker([healthy, healthy, healthy, [1.0, 9.0, 9.0, 9.0, 1.0]]) == 13
    was_slow = [9.0] * 5 + [1.0] * 3
    assert groups_without_the_last_worker([healthy, healthy, healthy, was_slow]) == 7


def test_a_group_takes_the_first_of_each_unconnected_part():
    groups = FirstReadyGroups(2, 2, 10.0)
    for worker in (0, 1):
        groups.add(worker, 0.0)
    assert groups.pop_group({0, 1, 2}, 0.0, accept_any) == (0, 1)
    for worker in (1, 0, 2):
        groups.add(worker, 1.0)
    assert groups.pop_group({0, 1, 2}, 1.0, accept_any) == (1, 2)


def test_a_group_is_held_for_a_worker_of_another_part_until_a_timeout():
    groups = FirstReadyGroups(2, 2, 10.0)
    for now_s in (0.0, 1.0):
        for worker in (0, 1):
            groups.add(worker, now_s)
        formed = groups.pop_group({0, 1, 2}, now_s, accept_any)
        assert formed == ((0, 1) if not now_s else None)
    assert groups.pop_group({0, 1, 2}, 11.0, accept_any) is None
    assert groups.timeouts == 0
    assert groups.pop_group({0, 1, 2}, 11.5, accept_any) == (0, 1)
    assert groups.timeouts == 1


def test_no_group_is_held_for_a_worker_that_does_not_train_any_more():
    groups = FirstReadyGroups(2, 2, 10.0)
    for now_s in (0.0, 1.0):
        groups.add(0, now_s)
        groups.add(1, now_s)
        assert groups.pop_group({0, 1, 2} if not now_s else {0, 1}, now_s, accept_any) == (0, 1)


# Failures -------------------------------------------------------------------------------------------------


def test_the_loss_of_a_member_cancels_its_averaging_and_no_other():
    job = Job(6, size=3, window=0).begin()
    for worker in range(6):
        job.ready(worker)
    (cancelled,) = job.lost(4)
    assert cancelled.exchange_id == job.averagings[1].exchange_id
    assert job.workers[3].is_cancelled
    assert not job.workers[0].is_cancelled


def test_the_loss_of_a_member_that_has_the_mean_cancels_the_averaging_of_those_that_have_not():
    """What it had still to send to them is lost with it."""
    job = Job(4, size=3).begin()
    for worker in range(3):
        job.ready(worker)
    job.averaged(1)
    actions = job.lost(1)
    assert [action.members for action in actions if isinstance(action, CancelAveraging)] == [(0, 1, 2)]
    job.averaged(0, has_mean=False)
    job.averaged(2)
    assert job.lost(3) == []


def test_members_that_cannot_reach_each_other_cancel_and_share_no_group_until_they_can():
    job = Job(3, size=2, window=0).begin()
    job.ready(0)
    job.ready(1)
    report = {"now_s": 1.0, "worker": 0, "peer": 1}
    (cancelled,) = job.emit(PeerUnreachable(cause="nothing comes", **report))
    assert "worker 0 cannot reach worker 1: nothing comes" in cancelled.reason
    job.averaged(0, has_mean=False)
    job.averaged(1, has_mean=False)
    assert job.ready(0) + job.ready(1) == []
    assert members(job.ready(2)) == [(0, 2)]
    job.averaged(0)
    job.averaged(2)
    assert job.ready(0) == []
    assert members(job.emit(PeerReachable(**report))) == [(0, 1)]


def test_two_workers_that_cannot_reach_each_other_continue_by_themselves():
    job = Job(2).begin()
    job.emit(PeerUnreachable(now_s=1.0, worker=0, peer=1, cause="nothing comes"))
    assert job.ready(0) == []
    assert members(job.ready(1)) == [(0,)]
    job.averaged(0)
    assert members(job.ready(0)) == [(1,)]


def test_a_silent_worker_is_excluded():
    job = Job(3, size=3).begin()
    job.ready(0)
    job.ready(1)
    assert members(job.emit(PeerUnreachable(now_s=1.0, worker=None, peer=2, cause="silent"))) == [(0, 1)]


def test_a_worker_that_keeps_others_waiting_is_rejected_by_name():
    job = Job(3, size=3, timeout_s=30.0).begin()
    job.ready(0)
    job.ready(1)
    assert job.emit(Tick(now_s=30.0)) == []
    rejected, averaging = job.emit(Tick(now_s=30.5))
    assert rejected.peer == "worker-2"
    assert "others have waited for it for more than 30 s" in rejected.reason
    assert averaging.members == (0, 1)


def test_at_the_end_a_worker_that_another_cannot_reach_is_rejected_after_the_deadline():
    job = Job(3, timeout_s=30.0).begin()
    job.emit(PeerUnreachable(now_s=1.0, worker=0, peer=2, cause="nothing comes"))
    for worker in range(3):
        assert job.finished(worker) == []
    assert job.emit(Tick(now_s=31.0)) == []
    rejected, averaging = job.emit(Tick(now_s=31.5))
    assert rejected.peer == "worker-2"
    assert "worker 0 cannot reach worker 2: nothing comes" in rejected.reason
    assert averaging.members == (0, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_at_the_end_a_worker_that_ends_no_step_is_rejected_after_the_deadline(overlap):
    job = Job(3, timeout_s=30.0, overlap=overlap).begin()
    job.now_s = 1.0
    job.ready(2)
    for worker in (0, 1):
        job.end_all()
        assert not any(isinstance(action, RejectPeer) for action in job.finished(worker))
    job.end_all()
    assert job.emit(Tick(now_s=31.0)) == []
    rejected, *_ = job.emit(Tick(now_s=31.5))
    assert rejected.peer == "worker-2"
    assert "others have waited for it for more than 30 s" in rejected.reason


def test_a_worker_that_was_lost_after_its_end_keeps_nobody_waiting():
    job = Job(3, size=2, timeout_s=30.0).begin()
    job.finished(0)
    job.emit(Lost(now_s=2.0, worker=0, cause=""))
    job.now_s = 60.0
    job.ready(1)
    job.ready(2)
    job.end_all()
    assert job.emit(Tick(now_s=95.0)) == []


def test_a_worker_whose_averaging_was_cancelled_has_the_whole_deadline_for_its_next_step():
    job = Job(3, size=2, timeout_s=30.0).begin()
    job.finished(0)
    job.now_s = 1.0
    job.ready(1)
    job.ready(2)
    job.now_s = 40.0
    job.emit(Lost(now_s=40.0, worker=2, cause=""))
    job.averaged(1, has_mean=False)
    assert job.emit(Tick(now_s=70.0)) == []
    (rejected, *_) = job.emit(Tick(now_s=70.5))
    assert rejected.peer == "worker-1"


def test_a_worker_that_leaves_is_not_waited_for():
    job = Job(3, size=3).begin()
    job.ready(0)
    job.ready(1)
    assert members(job.emit(Left(now_s=0.0, worker=2, step=4))) == [(0, 1)]


# Samples --------------------------------------------------------------------------------------------------


def request(worker, epoch=0, samples=40):
    return SamplesRequested(
        now_s=0.0,
        worker=worker,
        epoch=epoch,
        samples=samples,
        batch_size=10,
        is_last=True,
        abandons_previous=False,
        blocks_max=1,
        started_blocks=(),
        round=0,
        consumed_ranges=(),
    )


def test_the_samples_of_a_lost_worker_are_assigned_to_others():
    job = Job(2, size=2, shards="dynamic").begin()
    queue = []

    def assign(actions):
        queue.extend(
            block
            for action in actions
            if isinstance(action, AssignBlocks) and action.worker == 0
            for block in action.blocks
        )

    assign(job.emit(request(0)))
    assert any(action.blocks for action in job.emit(request(1)) if isinstance(action, AssignBlocks))
    assign(job.lost(1))
    used = []
    while queue:
        block = queue.pop(0)
        used += [position for start, stop in block.ranges for position in range(start, stop)]
        assign(job.emit(ready_of(0, block)))
        assign(job.end_all())
        if not queue:
            assign(job.emit(request(0)))
    assert sorted(used) == list(range(40))


@pytest.mark.parametrize("seed", range(20))
def test_no_group_waits_for_a_worker_that_waits_for_the_last_samples(seed):
    chance = random.Random(seed)
    job = Job(4, size=3, shards="dynamic").begin()
    queues = {worker: [] for worker in job.workers}
    requested, ended, used = set(), set(), 0

    def assign(actions):
        for action in actions:
            if isinstance(action, AssignBlocks):
                queues[action.worker] += action.blocks
                if action.is_last:
                    ended.add(action.worker)

    while len(ended) < 4:
        averaging = {worker for worker, protocol in job.workers.items() if protocol.averaging is not None}
        ready = {worker for worker, _ in job.policy.state_dict()["groups"]["ready_s"]}
        idle = queues.keys() - averaging - ready
        can_move = averaging | {worker for worker in idle if queues[worker]} | (idle - requested - ended)
        assert can_move, "all workers wait"
        worker = chance.choice(sorted(can_move))
        if worker in averaging:
            assign(job.averaged(worker))
            requested.discard(worker)
        elif queues[worker]:
            block = queues[worker].pop(0)
            used += block.samples
            assign(job.emit(ready_of(worker, block)))
        else:
            requested.add(worker)
            assign(job.emit(request(worker)))
    assert used == 40


def ready_of(worker, block):
    return Ready(
        now_s=0.0,
        worker=worker,
        generation=0,
        epoch=0,
        step=0,
        round=0,
        compute_s=0.1,
        samples=block.samples,
        blocks=(block.id,),
    )


# Any order ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    world=st.integers(1, 7),
    size=st.integers(2, 5),
    window=st.integers(0, 9),
    overlap=st.booleans(),
)
def test_with_any_events_groups_are_disjoint_and_the_job_ends(seed, world, size, window, overlap):
    chance = random.Random(seed)
    options = {"size": size, "window": window, "overlap": overlap, "hold_timeout_s": 5.0, "timeout_s": 100.0}
    job = Job(world, **options)
    steps = dict.fromkeys(range(world), chance.randint(0, 12))
    newest = world
    for _ in range(2000):
        if any(isinstance(action, JobComplete | AbortJob) for action in job.actions):
            break
        job.now_s += chance.random()
        busy = {worker for worker, protocol in job.workers.items() if protocol.averaging is not None}
        policy = job.policy.state_dict()
        waiting = busy | {worker for worker, _ in policy["groups"]["ready_s"]}
        unable = set(policy["roster"]["finished"]) | set(policy["roster"]["without_state"])
        free = job.workers.keys() - unable - (set() if overlap else waiting)
        choice = chance.random()
        if choice < 0.03 and len(job.workers) > 1:
            job.lost(chance.choice(sorted(job.workers)))
        elif choice < 0.04:
            job.join(newest, world)
            steps[newest] = chance.randint(0, 6)
            newest += 1
        elif choice < 0.5 and busy:
            worker = chance.choice(sorted(busy))
            cancelled = job.workers[worker].is_cancelled
            job.averaged(worker, has_mean=not cancelled or chance.random() < 0.3)
        elif free:
            worker = chance.choice(sorted(free))
            steps[worker] -= 1
            job.ready(worker) if steps[worker] >= 0 else job.finished(worker)
        else:
            job.emit(Tick(now_s=job.now_s))
        pending = [worker for _, averaging in policy["averagings"] for worker in averaging["pending"]]
        assert len(pending) == len(set(pending))
        again = PartialReduce(world, shards="equal", **options)
        again.load_state_dict(policy)
        assert again.state_dict() == policy
    assert any(isinstance(action, JobComplete | AbortJob) for action in job.actions)
    for one in job.averagings:
        assert math.isclose(sum(one.weights), 1.0)
        assert all(
            weight == 0
            for member, weight in zip(one.members, one.weights, strict=True)
            if member in one.joining
        )
    ids = [one.exchange_id for one in job.averagings]
    assert ids == sorted(set(ids))


# The mean of all models after an epoch ----------------------------------------------------------------------


def test_workers_that_have_used_up_an_epoch_average_once_all_have():
    job = Job(3, size=2).begin()
    job.ready(0)
    job.end_epoch(0)
    job.end_epoch(1)
    assert not job.averagings
    assert members(job.ready(2)) == [(2,)]
    job.end_all()
    assert members(job.end_epoch(2)) == [(0, 1, 2)]
    assert job.averagings[-1].includes_buffers


def test_nobody_waits_for_the_mean_of_an_epoch_with_a_worker_that_has_left_it_early():
    job = Job(3, size=2).begin()
    job.end_epoch(0)
    job.end_epoch(1, is_complete=False)
    assert not job.averagings
    assert members(job.ready(2, epoch=1)) == [(0,)]


def test_the_first_worker_that_trains_after_an_epochs_mean_waits_for_the_others_as_ever():
    job = Job(3, size=3).begin()
    for worker in range(3):
        job.end_epoch(worker)
    job.averaged(0)
    assert members(job.ready(0)) == []
    job.averaged(1)
    job.averaged(2)
    job.ready(1)
    assert members(job.ready(2)) == [(0, 1, 2)]


def test_the_mean_of_an_epoch_awaits_workers_that_receive_the_state_meanwhile():
    job = Job(3)
    job.averaged(0)
    job.ready(0)
    job.averagings.clear()
    job.end_epoch(0)
    assert not job.averagings


def test_the_mean_of_an_epoch_is_repeated_without_a_member_that_is_lost():
    job = Job(3, size=2).begin()
    for worker in range(3):
        job.end_epoch(worker)
    job.lost(2)
    job.averaged(0, has_mean=False)
    assert members(job.averaged(1, has_mean=False)) == [(0, 1)]
    assert job.averagings[-1].includes_buffers


def test_models_that_are_equal_already_are_not_averaged_at_the_end():
    job = Job(2).begin()
    for worker in (0, 1):
        job.end_epoch(worker)
    job.end_all()
    job.finished(0)
    (complete,) = job.finished(1)
    assert isinstance(complete, JobComplete)


def test_a_step_after_the_mean_of_an_epoch_makes_models_differ_even_if_others_have_yet_to_report_it():
    job = Job(2, overlap=True).begin()
    for worker in (0, 1):
        job.end_epoch(worker)
    job.averaged(0)
    job.ready(0)
    job.averaged(1)
    job.finished(0)
    assert members(job.finished(1)) == [(0, 1)]


def test_a_worker_that_others_await_at_the_end_of_an_epoch_is_rejected_after_the_deadline():
    job = Job(2, timeout_s=10.0).begin()
    job.end_epoch(0)
    job.now_s = 10.5
    rejected, averaging = job.emit(Tick(now_s=job.now_s))
    assert isinstance(rejected, RejectPeer)
    assert rejected.peer == "worker-1"
    assert averaging.members == (0,)


def test_a_worker_that_a_newcomer_awaits_is_rejected_after_the_deadline():
    job = Job(2, timeout_s=10.0).begin()
    job.join(2, 2)
    job.now_s = 5.0
    assert members(job.ready(0)) == []
    job.now_s = 12.0
    rejected, averaging = job.emit(Tick(now_s=job.now_s))
    assert (rejected.peer, averaging.members, averaging.joining) == ("worker-1", (0, 2), (2,))


def test_a_member_of_an_epochs_mean_is_not_late_though_it_has_waited_long_for_the_others():
    job = Job(3, timeout_s=10.0, overlap=True).begin()
    job.finished(2)
    job.end_epoch(0)
    job.now_s = 9.0
    job.ready(1)
    job.end_all()
    job.now_s = 12.0
    assert members(job.end_epoch(1)) == [(0, 1)]
    assert job.emit(Tick(now_s=12.5)) == []


def test_a_silent_worker_that_waits_for_an_earlier_epochs_mean_keeps_nobody_waiting():
    job = Job(3).begin()
    job.end_epoch(2, epoch=0)
    job.emit(PeerUnreachable(now_s=0.0, worker=None, peer=2, cause="silent"))
    for worker in (0, 1):
        job.ready(worker, epoch=1)
    job.end_all()
    job.end_epoch(0, epoch=1)
    assert members(job.end_epoch(1, epoch=1)) == [(0, 1)]


def test_a_worker_that_has_left_an_epoch_early_is_in_no_group_before_its_next_step():
    job = Job(3, size=2).begin()
    job.end_epoch(0, is_complete=False)
    job.end_epoch(1, is_complete=False)
    assert members(job.ready(2)) == [(2,)]
    job.end_all()
    job.ready(0, epoch=1)
    assert members(job.ready(2)) == [(0, 2)]


def test_after_a_number_of_steps_a_group_holds_all_workers():
    job = Job(4, size=2, window=0, global_every=2).begin()
    for training in ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1), (0, 1, 2, 3)):
        for worker in training:
            job.ready(worker)
        job.end_all()
    assert members(job.averagings) == [(0, 1), (2, 3), (0, 1), (0, 1, 2, 3), (0, 1), (2, 3)]


def test_a_policy_refuses_means_of_all_models_at_other_times():
    for wrong in ("step", 0, -1, 2.5):
        with pytest.raises(ValueError, match="expected global_every to be epoch, at least 1 step, or None"):
            PartialReduce(2, global_every=wrong)
