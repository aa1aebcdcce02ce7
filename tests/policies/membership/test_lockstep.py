"""Lockstep: one Group, and at most one AbortJob, in whatever order messages arrive."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    AssignRoundBatch,
    Evaluated,
    Failed,
    Finished,
    Group,
    JobComplete,
    Left,
    Lost,
    PeerReachable,
    PeerUnreachable,
    StepsTimed,
    Tick,
)
from offbeat.policies.membership.lockstep import Lockstep
from support.round_events import joined, left_out, ready, times_of_step


def named(worker: int, round_: int, batch: int, first: int) -> AssignRoundBatch:
    reason = f"worker {first} takes part in the round with this batch"
    return AssignRoundBatch(worker=worker, round=round_, batch=batch, reason=reason)


def left(worker: int, step: int) -> Left:
    return Left(now_s=2.0, worker=worker, step=step)


def finished(worker: int, step: int) -> Finished:
    return Finished(now_s=2.0, worker=worker, epoch=0, step=step)


def lost(worker: int) -> Lost:
    return Lost(now_s=2.0, worker=worker, cause="the connection was closed")


def timed(worker: int, step: int) -> StepsTimed:
    return StepsTimed(now_s=1.0, worker=worker, steps=(times_of_step(step),))


def answers(policy: Lockstep, *events) -> list:
    return [action for event in events for action in policy.handle(event)]


def running(world: int = 2, **arguments) -> Lockstep:
    policy = Lockstep(world, **arguments)
    answers(policy, *(joined(worker, world) for worker in range(world)))
    return policy


@given(st.permutations(range(4)))
def test_the_join_that_completes_the_world_forms_the_one_group(order):
    policy = Lockstep(4)
    assert answers(policy, *(joined(worker, 4) for worker in order[:3])) == []
    (group,) = policy.handle(joined(order[3], 4))
    assert group == Group(
        generation=0,
        step=0,
        exchange_id=0,
        members=(0, 1, 2, 3),
        joining=(),
        weights=(0.25,) * 4,
        reason=group.reason,
    )
    assert "all 4 workers are here" in group.reason


@given(st.integers(1, 300))
def test_weights_sum_to_one(world):
    (group,) = answers(Lockstep(world), *(joined(worker, world) for worker in range(world)))
    assert sum(group.weights) == pytest.approx(1.0, abs=1e-12)
    assert len(group.weights) == len(group.members) == world


def test_repeated_or_foreign_ids_do_not_complete_the_world():
    policy = Lockstep(2)
    assert answers(policy, joined(0), joined(0), joined(2), joined(7)) == []
    assert len(policy.handle(joined(1))) == 1
    assert answers(policy, joined(0), joined(1), joined(2)) == []


@pytest.mark.parametrize("arguments", [(0,), (-1,), (1, 0)])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="expected a"):
        Lockstep(*arguments)


@st.composite
def healthy_runs(draw, uneven=False, world=None, stays=False):
    """A world, and every worker's events in its own order, merged in any order.

    With `stays`, workers report Finished and stay for the others; then they may leave or be lost.
    """
    world = draw(st.integers(1, 5)) if world is None else world
    rounds = [draw(st.integers(0, 6))] * world
    if uneven:
        rounds = [draw(st.integers(0, 6)) for _ in range(world)]
    queues = [
        [ready(worker, round_) for round_ in range(rounds[worker])]
        + ([finished(worker, rounds[worker])] if stays else [])
        + [lost(worker) if stays and draw(st.booleans()) else left(worker, rounds[worker])]
        for worker in range(world)
    ]
    chooser = random.Random(draw(st.integers()))
    order = [worker for worker, queue in enumerate(queues) for _ in queue]
    chooser.shuffle(order)
    return world, rounds, [queues[worker].pop(0) for worker in order]


@given(healthy_runs())
def test_a_healthy_job_is_never_stopped_in_whatever_order_messages_arrive(run):
    world, _, events = run
    policy = running(world)
    assert answers(policy, *events) == []
    # After they left, their connections close, which has no effect.
    assert answers(policy, *(lost(worker) for worker in range(world))) == []
    assert policy.state_dict()["open_rounds"] == []


@given(healthy_runs(stays=True))
def test_workers_that_stay_for_the_others_get_one_job_complete_when_all_have_finished(run):
    world, _, events = run
    policy = running(world)
    last = max(place for place, event in enumerate(events) if isinstance(event, Finished))
    assert answers(policy, *events[:last]) == []
    assert answers(policy, *events[last:]) == [JobComplete(reason="all workers have finished")]


@given(healthy_runs(uneven=True, stays=True))
def test_a_worker_that_stays_is_informed_that_others_continue(run):
    world, rounds, events = run
    handled = answers(running(world), *events)
    if len(set(rounds)) == 1:
        assert [type(one) for one in handled] == [JobComplete]
        return
    (stop,) = handled
    assert "has finished after" in stop.reason


def test_a_worker_that_leaves_while_others_stay_has_finished_too():
    policy = running(3)
    assert answers(policy, finished(0, 0), finished(1, 0)) == []
    assert answers(policy, left(2, 0)) == [JobComplete(reason="all workers have finished")]


@given(healthy_runs(uneven=True))
def test_workers_with_different_numbers_of_rounds_are_stopped_once_with_a_reason(run):
    world, rounds, events = run
    stops = answers(running(world), *events)
    if len(set(rounds)) == 1:
        assert stops == []
        return
    (stop,) = stops
    assert (stop.worker, stop.step) == (None, None)
    assert "has finished after" in stop.reason
    assert "give every worker the same number of batches" in stop.reason


def test_the_message_of_uneven_batches():
    policy = running()
    answers(policy, *(ready(worker, round_) for round_ in range(10) for worker in (0, 1)))
    assert answers(policy, left(0, 10), ready(1, 10)) == [
        AbortJob(
            worker=None,
            step=None,
            reason="worker 0 has finished after 10 steps; worker 1 begins step 11: "
            "give every worker the same number of batches",
        )
    ]
    # The same when the message of the worker that continues arrives first.
    policy = running()
    answers(policy, ready(0, 0), ready(1, 0), ready(1, 1))
    (stop,) = policy.handle(left(0, 1))
    assert stop.reason.startswith("worker 0 has finished after 1 step; worker 1 begins step 2: give")


def test_a_worker_may_leave_before_every_worker_has_reported_its_last_round():
    assert answers(running(), ready(0, 0), left(0, 1), ready(1, 0), left(1, 1), lost(1), lost(0)) == []


def test_two_workers_in_different_steps_in_one_round_are_stopped():
    policy = running(3)
    answers(policy, *(ready(worker, 0) for worker in range(3)), ready(2, 1, step=1))
    (stop,) = policy.handle(ready(0, 1, step=3))
    assert stop == AbortJob(
        worker=None,
        step=None,
        reason="worker 2 is in step 1 but worker 0 in step 3, both in round 1: "
        "call backward and step equally often on every worker",
    )


@pytest.mark.parametrize("first_is_ahead", [False, True])
def test_a_worker_that_skipped_a_batch_is_named_in_the_round_of_the_skip(first_is_ahead):
    policy = running(3)
    answers(policy, *(ready(worker, 0, batch=1) for worker in range(3)))
    handled = [ready(0, 1, batch=2), ready(2, 1, batch=3)]
    (stop,) = answers(policy, *(reversed(handled) if first_is_ahead else handled), ready(1, 1, batch=2))
    assert stop.reason.startswith(
        "worker 2 has gone on to batch 3 of epoch 0 while worker 0 is at batch 2 of epoch 0, both in round "
        "1: worker 2 has skipped a batch. Iterate over session.batches"
    )


def test_without_batches_of_the_session_a_skipped_batch_is_detected_in_the_next_epoch():
    policy = running()
    (stop,) = answers(policy, ready(0, 0), ready(1, 0, epoch=1))
    assert stop.reason.startswith("worker 1 has gone on to epoch 1 while worker 0 is at epoch 0, both in")


@pytest.mark.parametrize("asks_first", [False, True])
def test_a_worker_that_skipped_batches_receives_the_batch_of_the_ready_worker(asks_first):
    policy = running()
    handled = [ready(0, 0, batch=2), left_out(1, 0, batch=4, count=3)]
    assert answers(policy, *(reversed(handled) if asks_first else handled)) == [named(1, 0, 2, first=0)]
    assert answers(policy, ready(1, 0, batch=2), ready(0, 1, batch=3), ready(1, 1, batch=3)) == []


def test_a_round_is_for_the_first_batch_that_not_all_workers_have_skipped():
    policy = running(3)
    asking = [left_out(worker, 0, batch=batch, count=batch - 1) for worker, batch in enumerate((5, 3, 4))]
    assert answers(policy, *asking) == [named(worker, 0, 3, first=1) for worker in (0, 1, 2)]
    # Worker 1 skips that one, too: the two others decide whether it is the round's.
    assert answers(policy, left_out(1, 0, batch=4, count=3)) == []
    assert answers(policy, ready(2, 0, batch=3)) == [named(1, 0, 3, first=2)]


def test_all_workers_that_ask_again_are_answered_again():
    policy = running()
    assert len(answers(policy, left_out(0, 0, batch=2), left_out(1, 0, batch=2))) == 2
    asking = [left_out(worker, 0, batch=3, count=2) for worker in (1, 0)]
    assert answers(policy, *asking) == [named(worker, 0, 3, first=1) for worker in (1, 0)]


@pytest.mark.parametrize("other", [{"epoch": 1, "batch": 2}, {"batch": 5}])
def test_a_worker_that_asks_for_a_batch_that_it_has_not_skipped_is_named(other):
    (stop,) = answers(running(), ready(0, 0, batch=2), left_out(1, 0, **other))
    assert "while worker 0 is at batch 2 of epoch 0, both in round 0: worker 1 has skipped" in stop.reason


def test_a_worker_that_asks_waits_until_the_deadline_and_not_for_a_finished_worker():
    policy = running(timeout_s=5.0)
    answers(policy, left_out(1, 0, batch=2))
    assert policy.handle(Tick(now_s=5.9)) == []
    answers(policy, unreachable(None, 0, 5.9))
    assert policy.handle(Tick(now_s=6.1)) == []
    policy.handle(PeerReachable(now_s=6.1, worker=None, peer=0))
    assert policy.handle(Tick(now_s=11.0)) == []
    (stop,) = policy.handle(Tick(now_s=11.2))
    assert stop.reason.startswith("worker 0 did not finish computing step 1 within 5 s after worker 1 had")
    (stop,) = answers(running(), finished(0, 0), left_out(1, 0, batch=2))
    assert stop.reason.startswith("worker 0 has finished after 0 steps; worker 1 begins step 1")


@pytest.mark.parametrize(
    ("before", "step", "words"),
    [
        ([], None, "worker 1 was lost before its first step was computed: the connection was closed"),
        # It waits for worker 0, so it is still in the step of its round.
        ([ready(1, 0)], 0, "worker 1 was lost after 0 steps: the connection was closed"),
        ([ready(0, 0), ready(1, 0), ready(1, 1)], 1, "worker 1 was lost after 1 step: the"),
        # All gradients of the round are on their way; the exchange may not be over.
        ([ready(0, 0), ready(1, 0)], 0, "worker 1 was lost after 0 steps: the"),
        ([ready(0, 0), ready(1, 0), timed(1, 0)], 1, "worker 1 was lost after 1 step: the"),
        ([ready(0, 0), ready(1, 0), timed(1, 0), timed(0, 0), ready(0, 1)], 1, "worker 1 was lost after 1 s"),
        # Worker 0 would not be in round 2 without worker 1's part in round 1.
        (
            [ready(1, 0), ready(1, 1), ready(0, 0), ready(0, 1), ready(0, 2)],
            2,
            "worker 1 was lost after 2 steps",
        ),
    ],
)
def test_a_lost_worker_is_named_with_its_step_and_the_cause(before, step, words):
    policy = running()
    assert answers(policy, *before) == []
    (stop,) = policy.handle(lost(1))
    assert (stop.worker, stop.step) == (1, step)
    assert words in stop.reason


def test_the_step_is_known_from_others_that_are_further():
    # Of three workers, the messages of 2 are late: but 0 in round 1 proves that round 0 was complete.
    policy = running(3)
    assert answers(policy, ready(1, 0), ready(0, 0), ready(0, 1)) == []
    assert policy.handle(lost(1))[0].step == 1


def test_a_failed_worker_is_named_with_the_step_and_error_that_it_reports():
    policy = running()
    assert policy.handle(Failed(now_s=1.0, worker=0, step=7, error="ValueError: bad batch")) == [
        AbortJob(worker=0, step=7, reason="worker 0 failed after 7 steps: ValueError: bad batch")
    ]


def test_the_failure_of_a_finished_worker_ends_the_workers_that_may_wait_for_it():
    policy = running()
    answers(policy, finished(0, 0), finished(1, 0))
    (stop,) = policy.handle(Failed(now_s=1.0, worker=0, step=0, error="ValueError: no metric"))
    assert stop.reason == "worker 0 failed after 0 steps: ValueError: no metric"


def test_departures_before_the_group_is_formed_cause_no_action():
    policy = Lockstep(2)
    failed = Failed(now_s=0.0, worker=0, step=0, error="x")
    assert answers(policy, joined(0), lost(0), failed, left(0, 0)) == []


@pytest.mark.parametrize(
    ("before", "event", "words"),
    [
        ([], ready(0, 1), "expected Ready for round 0, got Ready for round 1 of worker 0"),
        ([ready(0, 0)], ready(0, 0), "expected Ready for round 1, got Ready for round 0 of worker 0"),
        ([], ready(2, 0), "expected a worker from 0 to 1, got Ready for round 0 of worker 2"),
        ([left(0, 0)], ready(0, 0), "expected nothing more from worker 0, which has finished"),
        ([finished(0, 0)], ready(0, 0), "expected nothing more from worker 0, which has finished"),
        ([], lost(2), "expected a worker from 0 to 1, got Lost of worker 2"),
        ([], left(5, 0), "expected a worker from 0 to 1, got Left of worker 5"),
    ],
)
def test_an_impossible_message_is_a_protocol_error_that_changes_nothing(before, event, words):
    policy = running()
    answers(policy, *before)
    state = policy.state_dict()
    with pytest.raises(ProtocolError, match=words):
        policy.handle(event)
    assert policy.state_dict() == state


def test_ready_before_all_workers_have_joined_is_a_protocol_error():
    policy = Lockstep(2)
    policy.handle(joined(0))
    with pytest.raises(
        ProtocolError, match="expected 2 workers to join first, got Ready for round 0 of worker 0"
    ):
        policy.handle(ready(0, 0))


@pytest.mark.parametrize("rounds_ahead_max", [1, 2, 5])
def test_a_worker_that_runs_without_exchanging_is_found(rounds_ahead_max):
    policy = running(rounds_ahead_max=rounds_ahead_max)
    answers(policy, ready(0, 0), ready(1, 0))
    assert answers(policy, *(ready(0, 1 + ahead) for ahead in range(rounds_ahead_max))) == []
    with pytest.raises(ProtocolError, match=r"got Ready for .* while worker 1 was Ready for 1 rounds"):
        policy.handle(ready(0, 1 + rounds_ahead_max))
    # Once the other has caught up by one, it is no error any more.
    assert answers(policy, ready(1, 1), ready(0, 1 + rounds_ahead_max)) == []


def test_workers_that_have_trained_on_without_a_coordinator_may_reach_it_again_one_after_the_other():
    policy = running()
    rounds = 60_000  # 300 s of 5 ms each
    for worker in (0, 1):
        assert answers(policy, *(ready(worker, round_) for round_ in range(rounds))) == []
    assert len(json.dumps(policy.state_dict())) < 300


def test_the_state_does_not_grow_with_the_number_of_rounds():
    policy = running()
    answers(policy, *(ready(worker, round_) for round_ in range(5000) for worker in (0, 1)))
    assert len(json.dumps(policy.state_dict())) < 300


def unreachable(worker, peer, now_s):
    return PeerUnreachable(now_s=now_s, worker=worker, peer=peer, cause="it is silent")


def test_an_outage_that_passes_changes_nothing():
    policy = running()
    answers(policy, unreachable(0, 1, 1.0), unreachable(None, 1, 1.0))
    assert policy.handle(Tick(now_s=100.0)) == []
    policy.handle(PeerReachable(now_s=100.0, worker=None, peer=1))
    assert policy.handle(Tick(now_s=109.0)) == []
    policy.handle(PeerReachable(now_s=109.5, worker=0, peer=1))
    assert policy.handle(Tick(now_s=1000.0)) == []


def test_two_workers_that_reach_only_the_coordinator_stop_the_job_with_a_hint():
    policy = running(unreachable_timeout_s=3.0)
    policy.handle(unreachable(0, 1, 1.0))
    assert policy.handle(Tick(now_s=3.9)) == []
    (stop,) = policy.handle(Tick(now_s=4.1))
    assert stop.reason == (
        "worker 0 has not been able to reach worker 1 for 3 s (it is silent), and both reach the "
        "coordinator: look for a firewall or a missing route between their hosts"
    )


def test_a_worker_that_is_silent_to_the_coordinator_is_not_late():
    policy = running(timeout_s=5.0)
    answers(policy, ready(0, 0), unreachable(None, 1, 1.0))
    assert policy.handle(Tick(now_s=9.0)) == []
    policy.handle(PeerReachable(now_s=9.0, worker=None, peer=1))
    assert policy.handle(Tick(now_s=13.9)) == []
    (stop,) = policy.handle(Tick(now_s=14.1))
    assert "worker 1 did not finish computing step 1 within 5 s" in stop.reason


@pytest.mark.parametrize("unreachable_timeout_s", [0.0, -1.0, math.inf, math.nan])
def test_a_silence_out_of_range_is_refused(unreachable_timeout_s):
    with pytest.raises(ValueError, match="expected a finite unreachable_timeout_s of more than 0 s"):
        Lockstep(2, unreachable_timeout_s=unreachable_timeout_s)


def any_event(world: int = 3):
    """Events that mostly make sense, and some that do not."""
    workers, small = st.integers(0, world), st.integers(0, 4)
    now = st.just(1.0)
    return st.one_of(
        st.builds(joined, workers, st.just(world)),
        *[st.builds(ready, workers, small, st.none() | small)] * 4,
        st.builds(left_out, workers, small, batch=small, count=small),
        st.builds(left, workers, small),
        st.builds(lost, workers),
        st.builds(Failed, now_s=now, worker=workers, step=small, error=st.just("x")),
        st.builds(Tick, now_s=now),
        st.builds(
            PeerUnreachable, now_s=now, worker=st.none() | workers, peer=workers, cause=st.just("silent")
        ),
        st.builds(PeerReachable, now_s=now, worker=st.none() | workers, peer=workers),
        st.builds(Evaluated, now_s=now, worker=workers, epoch=small, metrics=st.just({})),
        st.builds(timed, workers, small),
        st.builds(StepsTimed, now_s=now, worker=workers, steps=st.just(())),
    )


@st.composite
def histories(draw):
    """A job of three, mostly as it should be, with any other events mixed in."""
    whole = [joined(worker, 3) for worker in range(3)]
    if draw(st.booleans()):
        _, _, events = draw(healthy_runs(uneven=draw(st.booleans()), world=3))
    else:
        events = draw(st.lists(any_event(), max_size=40))
    for event in draw(st.lists(any_event(), max_size=3)):
        events.insert(draw(st.integers(0, len(events))), event)
    return draw(st.sampled_from([whole, whole, whole, []])) + events


@given(histories())
def test_any_event_is_handled_or_refused_and_the_job_stops_at_most_once(events):
    policy = Lockstep(3)
    actions = []
    for event in events:
        state = policy.state_dict()
        try:
            actions += policy.handle(event)
        except ProtocolError:
            assert policy.state_dict() == state
    assert all(action.reason for action in actions)
    kinds = [type(action) for action in actions if not isinstance(action, AssignRoundBatch)]
    assert kinds in ([], [Group], [Group, AbortJob])


def known(policy):
    return {**vars(policy), "_reachability": policy.state_dict()["reachability"]}


@given(histories(), st.integers(0, 43))
def test_a_policy_restored_in_the_middle_continues_identically(events, cut):
    def ask(policy, event):
        try:
            return policy.handle(event)
        except ProtocolError as error:
            return str(error)

    policy, restored = Lockstep(3), Lockstep(3)
    for event in events[:cut]:
        ask(policy, event)
    restored.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert known(restored) == known(policy)
    for event in events[cut:]:
        assert ask(restored, event) == ask(policy, event)
    assert known(restored) == known(policy)
