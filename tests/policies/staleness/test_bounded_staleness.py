"""Bounded staleness as a policy: each promise in a small case, and whole jobs in any order of messages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    AssignBlocks,
    CheckpointQuery,
    CloseServers,
    ConsumedSamples,
    Event,
    Failed,
    Finished,
    JobComplete,
    Joined,
    Left,
    Lost,
    PeerReachable,
    PeerUnreachable,
    Preempted,
    Ready,
    RejectPeer,
    SamplesRequested,
    ServerReachable,
    ServerUnreachable,
    StepFinished,
    StepPermit,
    Tick,
)
from offbeat.policies.staleness.bounded_staleness import BoundedStaleness

SAMPLES, BATCH = 40, 4


def joined(worker: int) -> Joined:
    return Joined(
        now_s=0.0,
        worker=worker,
        world=2,
        peer=f"peer-{worker}",
        location=f"host, process {worker}",
        addresses=(),
        model_signature=(),
        strategy="ssp",
    )


def clocked(worker: int, clock: int | None, **more: Any) -> StepFinished:
    answered = {
        "now_s": 0.0,
        "parameter_version": 0 if clock is None else clock,
        "epoch": 0,
        "step": 0,
        "compute_s": 0.1,
    }
    answered |= {"samples": BATCH, "loss": None, "blocks": ()}
    return StepFinished(worker=worker, clock=clock, **{**answered, **more})


def requests(worker: int, epoch: int = 0, **more: Any) -> SamplesRequested:
    answered = {
        "samples": SAMPLES,
        "batch_size": BATCH,
        "is_last": False,
        "abandons_previous": False,
        "blocks_max": 0,
        "started_blocks": (),
    }
    return SamplesRequested(
        **{
            "now_s": 0.0,
            "worker": worker,
            "epoch": epoch,
            **answered,
            "round": 0,
            "consumed_ranges": (),
            **more,
        }
    )


def answers(policy: BoundedStaleness, *events: Event) -> list[Action]:
    return [action for event in events for action in policy.handle(event)]


def started(world: int = 2, **arguments: Any) -> BoundedStaleness:
    """All workers have begun; with equal shards they may take their first step."""
    policy = BoundedStaleness(world, **{"shards": "equal", **arguments})
    answers(policy, *map(joined, range(world)), *(clocked(worker, None) for worker in range(world)))
    return policy


def permits(actions: list[Action]) -> dict[int, tuple[int, bool]]:
    return {one.worker: (one.clock, one.may_start) for one in actions if isinstance(one, StepPermit)}


def walk(policy: BoundedStaleness, worker: int, clocks: range) -> list[Action]:
    return answers(policy, *(clocked(worker, clock) for clock in clocks))


def preempted(actions: list[Action]) -> dict[int, bool]:
    return {one.worker: one.is_preempted for one in actions if isinstance(one, StepPermit)}


def test_a_preempted_worker_stops_all_at_the_latest_clock_under_way() -> None:
    policy = started(s=3)
    walk(policy, 0, range(2))  # worker 0 is at clock 2, worker 1 at clock 0
    assert policy.handle(Preempted(now_s=1.0, worker=1, step=0, signal="SIGTERM")) == []
    state = json.loads(json.dumps(policy.state_dict()))
    policy = BoundedStaleness(2, shards="equal", s=3)
    policy.load_state_dict(state)
    assert preempted(walk(policy, 1, range(2))) == {1: False}
    assert preempted(answers(policy, clocked(0, 2))) == {0: True}
    policy.handle(Preempted(now_s=2.0, worker=0, step=3, signal="SIGTERM"))  # a second signal changes nothing
    assert preempted(answers(policy, clocked(1, 2))) == {1: True}


def test_without_a_bound_each_stops_after_the_step_under_way() -> None:
    policy = started(s=None)
    walk(policy, 0, range(2))
    policy.handle(Preempted(now_s=1.0, worker=1, step=0, signal="SIGTERM"))
    assert preempted(answers(policy, clocked(1, 0))) == {1: True}


def remembered(policy: BoundedStaleness, world: int, **arguments: Any) -> BoundedStaleness:
    """Another policy that continues from its state."""
    other = BoundedStaleness(world, **arguments)
    other.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    return other


def apart(**arguments: Any) -> BoundedStaleness:
    """The paper's example: worker 0 waits at 7, worker 1 is at 3, the bound is 3."""
    policy = started(2, **arguments)
    losses = iter([1.0, 1.0, 1.0, 1.0])
    for clock in range(3):
        loss = next(losses)
        answers(policy, clocked(1, clock, loss=loss), clocked(0, clock, loss=loss))
    assert permits(walk(policy, 0, range(3, 7))) == {0: (7, False)}
    return policy


def test_without_the_first_workers_parameters_the_job_stops():
    for departure, cause in (
        (Lost(now_s=1.0, worker=0, cause="killed"), "killed"),
        (Failed(now_s=1.0, worker=0, step=0, error="it broke"), "it failed after 0 steps: it broke"),
        (Left(now_s=1.0, worker=0, step=0), "it has left"),
    ):
        policy = BoundedStaleness(2)
        (stop,) = answers(policy, joined(0), joined(1), clocked(1, None), departure)[-1:]
        assert isinstance(stop, AbortJob)
        assert stop.worker == 0
        assert stop.reason.endswith(f"do not have its initial parameters: {cause}")
        (closing,) = policy.handle(Left(now_s=2.0, worker=1, step=0))
        assert isinstance(closing, CloseServers)
    policy = BoundedStaleness(2, timeout_s=5.0)
    actions = answers(policy, joined(0), joined(1), clocked(1, None), Tick(now_s=1.0), Tick(now_s=7.0))
    assert isinstance(actions[-1], AbortJob)


# Small cases --------------------------------------------------------------------------------------------


def test_the_papers_example_7_waits_for_3_and_starts_when_the_bound_has_become_4():
    """Version 3 to 4: first its loss counts and s becomes 4, then 7 may start, 3 before the slowest."""
    policy = apart(dynamic={})
    (worker_0, worker_1) = policy.handle(clocked(1, 3, loss=0.5))
    assert (worker_0.worker, worker_0.clock, worker_0.may_start) == (0, 7, True)
    assert (worker_0.version_min, worker_0.staleness_bound) == (3, 4)
    assert worker_0.reason == (
        "it is 3 ahead of the slowest; the bound is 4; the loss fell by 50 % at version 3"
    )
    assert (worker_1.worker, worker_1.clock, worker_1.may_start, worker_1.staleness_bound) == (1, 4, True, 4)


def test_a_bound_that_shrinks_releases_no_worker_that_only_the_old_bound_would_have():
    policy = apart(s=3, dynamic={"s_min": 1})
    assert permits(policy.handle(clocked(1, 3, loss=2.0))) == {1: (4, True)}
    assert permits(walk(policy, 1, range(4, 5))) == {0: (7, True), 1: (5, True)}


def test_a_step_without_a_loss_leaves_the_bound():
    policy = apart(dynamic={})
    (worker_0, _) = policy.handle(clocked(1, 3))
    assert (worker_0.staleness_bound, worker_0.version_min) == (3, 4)


def test_a_waiting_worker_receives_its_clock_and_the_reason_at_once():
    policy = started(2, s=1)
    (first,) = policy.handle(clocked(0, 0))
    (second,) = policy.handle(clocked(0, 1))
    assert (first.clock, first.may_start, first.version_min) == (1, True, 0)
    assert (second.clock, second.may_start, second.version_min, second.staleness_bound) == (2, False, 1, 1)
    assert second.reason == "it is 2 ahead of the slowest, and the bound is 1"


def test_no_worker_starts_before_all_have_begun_or_are_lost():
    policy = BoundedStaleness(3, shards="equal")
    answers(policy, *map(joined, range(3)))
    assert permits(policy.handle(clocked(0, None))) == {0: (0, False)}
    assert permits(policy.handle(clocked(2, None))) == {2: (0, False)}
    lost = Lost(now_s=0.0, worker=1, cause="cut")
    assert permits(policy.handle(lost)) == {0: (0, True), 2: (0, True)}


def test_a_newcomer_begins_at_a_clock_at_which_it_can_push():
    policy = apart()
    assert policy.handle(joined(2)) == []
    assert permits(policy.handle(clocked(2, None, parameter_version=5))) == {2: (5, True)}
    policy.handle(joined(3))
    assert permits(policy.handle(clocked(3, None))) == {3: (3, True)}


def test_without_a_bound_no_worker_waits_and_any_version_is_accepted():
    policy = started(2, s=None)
    for clock in range(50):
        (permit,) = policy.handle(clocked(0, clock, parameter_version=0))
        assert (permit.clock, permit.may_start, permit.version_min, permit.staleness_bound) == (
            clock + 1,
            True,
            0,
            None,
        )
        assert "there is no bound" in permit.reason


def test_in_a_warm_start_the_first_worker_is_alone_and_then_all_start_at_once():
    policy = started(3, s=None, warm_start=4)
    assert permits(policy.handle(clocked(0, 0, parameter_version=0))) == {0: (1, True)}
    for clock in (1, 2):
        policy = remembered(policy, 3, s=None, warm_start=4, shards="equal")
        answered = policy.handle(clocked(0, clock, parameter_version=0))
        assert permits(answered) == {0: (clock + 1, True), 1: (clock + 1, False), 2: (clock + 1, False)}
        assert answered[1].reason == f"worker 0 takes {3 - clock} more steps alone"
    assert permits(policy.handle(clocked(0, 3, parameter_version=0))) == {
        0: (4, True),
        1: (4, True),
        2: (4, True),
    }
    assert permits(policy.handle(clocked(2, 4, parameter_version=0))) == {2: (5, True)}


@pytest.mark.parametrize("how", [Lost, Finished])
def test_a_warm_start_continues_with_the_next_worker(how):
    policy = started(3, s=None, warm_start=4)
    policy.handle(clocked(0, 0, parameter_version=0))
    more = {"cause": "cut"} if how is Lost else {"epoch": 0, "step": 0}
    assert permits(policy.handle(how(now_s=0.0, worker=0, **more))) == {1: (2, True), 2: (2, False)}
    assert permits(walk(policy, 1, range(2, 5))) == {1: (5, True), 2: (5, True)}


def test_a_worker_alone_in_a_warm_start_that_takes_no_step_is_removed():
    policy = started(2, s=None, warm_start=4, timeout_s=5.0)
    assert (
        answers(
            policy, Tick(now_s=0.0), clocked(0, 0, parameter_version=0), Tick(now_s=4.0), Tick(now_s=8.0)
        )[2:]
        == []
    )
    refused, *answered = policy.handle(Tick(now_s=9.1))
    assert isinstance(refused, RejectPeer)
    assert refused.peer == "peer-0"
    assert permits(answered) == {1: (2, True)}


def test_a_worker_that_pauses_in_a_warm_start_is_not_removed_when_another_has_finished():
    policy = started(3, s=None, warm_start=100, timeout_s=5.0)
    answers(policy, clocked(0, 0, parameter_version=0), Finished(now_s=0.0, worker=0, epoch=0, step=1))
    for second in range(12):
        answered = answers(policy, Tick(now_s=float(second)), clocked(1, 2 + second, parameter_version=0))
        assert not any(isinstance(one, RejectPeer) for one in answered)


def test_a_warm_start_is_over_when_the_others_have_all_samples_that_are_left():
    policy, answered = assigning(2, 4 * BATCH, s=None, warm_start=100)
    clock, held = 0, blocks(answered, 0)
    while held:
        step = clocked(0, clock, parameter_version=0, blocks=(held.pop(0),))
        answered = answers(policy, step, requests(0, samples=4 * BATCH, is_last=True))
        clock, held = clock + 1, held + blocks(answered, 0)
        assert permits(answered).get(1, (clock, False)) == (clock, not held)
    assert clock > 1


@pytest.mark.parametrize(
    "end",
    [
        Lost(now_s=0.0, worker=1, cause="cut"),
        Failed(now_s=0.0, worker=1, step=3, error="ValueError"),
        Left(now_s=0.0, worker=1, step=3),
        Finished(now_s=0.0, worker=1, epoch=0, step=3),
    ],
)
def test_the_job_continues_without_a_worker_that_ends(end):
    assert permits(apart().handle(end)) == {0: (7, True)}


def test_a_newcomer_that_could_begin_only_after_the_job_was_complete_is_rejected():
    policy = started(1)
    policy.handle(joined(1))
    assert answers(policy, Finished(now_s=0.0, worker=0, epoch=0, step=1)) == [
        JobComplete(reason="all workers have finished")
    ]
    (refused,) = policy.handle(clocked(1, None))
    assert isinstance(refused, RejectPeer)
    assert (refused.peer, "came when all others were done" in refused.reason) == (joined(1).peer, True)
    assert answers(policy, Left(now_s=0.0, worker=0, step=1)) == [CloseServers(reason="all workers are gone")]


def test_the_job_is_complete_when_all_remaining_workers_have_finished():
    policy = started(3)
    assert answers(policy, Finished(now_s=0.0, worker=0, epoch=0, step=1)) == []
    policy.handle(joined(3))  # and has not begun
    assert answers(policy, Left(now_s=0.0, worker=1, step=0)) == []
    (complete,) = policy.handle(Lost(now_s=0.0, worker=2, cause="cut"))
    assert complete == JobComplete(reason="all workers have finished")
    assert policy.handle(Left(now_s=0.0, worker=0, step=1)) == []
    (refused,) = policy.handle(joined(4))
    assert isinstance(refused, RejectPeer)
    assert "came when all others were done" in refused.reason


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (Lost(now_s=0.0, worker=1, cause="cut"), "cut"),
        (Failed(now_s=0.0, worker=1, step=2, error="it broke"), "it failed after 2 steps: it broke"),
    ],
)
def test_when_no_worker_is_left_to_complete_it_the_job_fails(end, cause):
    policy = started(2)
    assert answers(policy, Lost(now_s=0.0, worker=0, cause="cut")) == []
    assert answers(policy, end) == [
        AbortJob(worker=None, step=None, reason=f"worker 1 was lost: {cause}; no worker is left")
    ]


def test_when_the_last_worker_leaves_in_order_the_servers_are_closed():
    policy = started(2)
    assert answers(policy, Lost(now_s=0.0, worker=0, cause="cut")) == []
    assert answers(policy, Left(now_s=0.0, worker=1, step=0)) == [CloseServers(reason="all workers are gone")]


def test_the_servers_stay_until_the_last_worker_of_a_complete_job_has_left():
    policy = started(2)
    *_, completes = answers(
        policy, *(Finished(now_s=0.0, worker=worker, epoch=0, step=1) for worker in (0, 1))
    )
    assert isinstance(completes, JobComplete)
    assert answers(policy, Left(now_s=0.0, worker=1, step=1)) == []
    assert answers(policy, Lost(now_s=0.0, worker=0, cause="cut")) == [
        CloseServers(reason="all workers are gone")
    ]


def test_a_worker_that_keeps_others_waiting_for_too_long_is_removed_and_they_continue():
    policy = apart(timeout_s=5.0)
    assert answers(policy, Tick(now_s=10.0), Tick(now_s=15.0)) == []
    policy = remembered(policy, 2, shards="equal", timeout_s=5.0)
    refused, permit = policy.handle(Tick(now_s=15.1))
    assert refused == RejectPeer(
        peer="peer-1", reason="worker 1 is out: other workers have waited for it for more than 5 s"
    )
    assert (permit.worker, permit.clock, permit.may_start) == (0, 7, True)


def test_a_worker_that_is_silent_to_the_coordinator_is_not_late():
    policy = apart(timeout_s=5.0)
    answers(policy, Tick(now_s=10.0))
    silent = PeerUnreachable(now_s=11.0, worker=None, peer=1, cause="it is silent")
    assert answers(policy, silent, Tick(now_s=16.0)) == []
    policy = remembered(policy, 2, shards="equal", timeout_s=5.0)
    assert answers(policy, Tick(now_s=100.0), PeerReachable(now_s=100.0, worker=None, peer=1)) == []
    assert answers(policy, Tick(now_s=101.0), Tick(now_s=106.0)) == []
    assert isinstance(policy.handle(Tick(now_s=106.1))[0], RejectPeer)


def missed(worker: int, server: int, now_s: float) -> ServerUnreachable:
    return ServerUnreachable(now_s=now_s, node=f"client-{worker}", server=server, cause="nothing comes")


def reached(worker: int, server: int, now_s: float) -> ServerReachable:
    return ServerReachable(now_s=now_s, node=f"client-{worker}", server=server)


def held_up(workers: int) -> BoundedStaleness:
    """Worker 0 waits at the gate for all others."""
    policy = started(workers, s=0)
    walk(policy, 0, range(1))
    assert answers(policy, Tick(now_s=0.0)) == []
    return policy


def test_a_worker_that_keeps_others_waiting_and_does_not_reach_a_server_is_removed():
    policy = held_up(3)
    answers(policy, clocked(1, 0))
    assert answers(policy, missed(2, 4, 1.0), Tick(now_s=16.0)) == []
    policy = remembered(policy, 3, shards="equal", s=0)
    refused, *permits_of = policy.handle(Tick(now_s=16.1))
    assert refused == RejectPeer(
        peer="peer-2",
        reason="worker 2 is out: it has not reached server-4 for more than 15 s, and others need what it "
        "pushes",
    )
    assert [(permit.worker, permit.may_start) for permit in permits_of] == [(0, True), (1, True)]


def test_reaching_a_server_again_restarts_the_deadline_of_its_outage():
    policy = held_up(3)
    assert answers(policy, missed(2, 4, 1.0), missed(2, 4, 9.0), reached(2, 4, 14.0)) == []
    assert answers(policy, missed(2, 4, 15.0), missed(2, 4, 20.0), Tick(now_s=25.0), Tick(now_s=30.0)) == []
    assert isinstance(policy.handle(Tick(now_s=30.1))[0], RejectPeer)


def test_with_a_bound_missing_pushes_count_before_other_workers_wait_at_the_gate():
    policy = started(3, s=3)
    assert isinstance(answers(policy, missed(2, 4, 1.0), Tick(now_s=16.1))[0], RejectPeer)


def test_a_silent_worker_is_not_excluded_for_an_earlier_outage():
    policy = held_up(3)
    silent = PeerUnreachable(now_s=2.0, worker=None, peer=2, cause="it is silent")
    assert answers(policy, missed(2, 4, 1.0), silent, Tick(now_s=100.0)) == []


def test_a_worker_that_keeps_no_other_waiting_may_miss_a_server_without_a_limit():
    policy = started(3, s=None)
    assert answers(policy, missed(2, 4, 1.0), *(Tick(now_s=10.0 * time) for time in range(10))) == []


def test_a_server_that_most_workers_cannot_reach_excludes_none_of_them():
    policy = held_up(3)
    assert answers(policy, missed(1, 4, 1.0), missed(2, 4, 1.0), Tick(now_s=100.0)) == []  # two of three


def test_the_only_process_may_miss_a_server_without_a_limit_with_any_number_of_workers():
    policy = BoundedStaleness(3, s=0, shards="equal")
    answers(policy, *(replace(joined(worker), location="one process") for worker in range(3)))
    answers(policy, *(clocked(worker, None) for worker in range(3)))
    assert answers(policy, missed(0, 4, 1.0), Tick(now_s=100.0)) == []


def test_the_worker_that_misses_most_servers_is_removed_first_and_the_others_get_time():
    policy = held_up(8)
    assert answers(policy, missed(1, 4, 1.0), missed(1, 5, 1.0), missed(2, 4, 1.0), missed(3, 5, 1.0)) == []
    (refused,) = answers(policy, Tick(now_s=20.0))
    assert refused.peer == "peer-1"
    assert answers(policy, Tick(now_s=35.0)) == []
    (refused,) = answers(policy, Tick(now_s=35.1))
    assert refused.peer == "peer-3"


def test_every_step_begins_the_deadline_again():
    policy = started(2, s=0, timeout_s=5.0)
    walk(policy, 0, range(1))
    answers(policy, Tick(now_s=0.0), Tick(now_s=4.0))
    answers(policy, clocked(1, 0), clocked(0, 1))
    assert answers(policy, Tick(now_s=8.0), Tick(now_s=13.0)) == []
    assert answers(policy, Tick(now_s=13.1))


def test_no_worker_is_removed_that_no_other_waits_for():
    policy = started(2, s=3, timeout_s=5.0)
    assert answers(policy, *(Tick(now_s=10.0 * time) for time in range(10))) == []


def test_a_worker_that_never_begins_or_never_ends_is_removed_too():
    policy = BoundedStaleness(2, shards="equal", timeout_s=5.0)
    answers(policy, joined(0), joined(1), clocked(0, None), Tick(now_s=0.0))
    refused, permit = policy.handle(Tick(now_s=6.0))
    assert (refused.peer, permit.worker, permit.may_start) == ("peer-1", 0, True)
    policy = started(2, timeout_s=5.0)
    answers(policy, Finished(now_s=0.0, worker=0, epoch=0, step=0), Tick(now_s=0.0))
    refused, complete = policy.handle(Tick(now_s=6.0))
    assert (refused.peer, complete) == ("peer-1", JobComplete(reason="all workers have finished"))


def test_a_waiting_worker_is_not_removed_in_place_of_the_one_that_delays_all():
    policy = started(3, s=0, timeout_s=5.0)
    answers(policy, Finished(now_s=0.0, worker=2, epoch=0, step=0), clocked(0, 0), Tick(now_s=0.0))
    refused, permit = policy.handle(Tick(now_s=6.0))
    assert (refused.peer, permit.worker) == ("peer-1", 0)
    policy, answered = assigning(3, 2 * BATCH, s=0, timeout_s=5.0)
    answers(policy, clocked(0, 0, blocks=tuple(blocks(answered, 0))))
    answers(
        policy, requests(0, samples=2 * BATCH, is_last=True), requests(2, samples=2 * BATCH, is_last=True)
    )
    answers(policy, Finished(now_s=0.0, worker=2, epoch=0, step=0), Tick(now_s=0.0))
    refused = [one.peer for one in policy.handle(Tick(now_s=6.0)) if isinstance(one, RejectPeer)]
    assert refused == ["peer-1"]


def test_no_job_is_complete_before_all_have_begun():
    policy = BoundedStaleness(2, shards="equal")
    answers(policy, joined(0), joined(1), clocked(0, None))
    assert answers(policy, Finished(now_s=0.0, worker=0, epoch=0, step=0)) == []
    assert permits(policy.handle(clocked(1, None))) == {1: (1, True)}


DETECTOR = {"limit": 1, "threshold_s": 1.0}


def test_iterations_are_counted_from_the_beginning_of_each_epoch():
    policy = started(2, dynamic={}, detector={**DETECTOR, "skip_first_iters": 1})
    for clock in range(3):  # one iteration an epoch, which is not judged
        answers(policy, clocked(1, clock, epoch=clock, compute_s=2.0), clocked(0, clock, epoch=clock))
    assert permits(walk(policy, 0, range(3, 7))) == {0: (7, False)}


def test_a_straggler_without_a_normal_worker_to_compare_with_is_no_longer_one():
    policy = started(2, dynamic={}, detector=DETECTOR)
    answers(policy, clocked(1, 0, compute_s=2.0), clocked(0, 0), Lost(now_s=0.0, worker=0, cause="cut"))
    answers(policy, joined(2), clocked(2, None))
    assert permits(walk(policy, 2, range(1, 5))) == {2: (5, False)}


def test_a_straggler_is_left_behind_by_more_than_the_bound_until_it_recovers():
    policy = started(3, s=3, dynamic={"s_max": 6}, detector={"n_profile": 1, "limit": 2, "threshold_s": 1.0})
    for clock in range(2):
        answers(policy, *(clocked(worker, clock, compute_s=0.1 + 2 * (worker == 2)) for worker in range(3)))
    for clock in range(2, 6):
        answered = answers(policy, clocked(0, clock), clocked(1, clock))
    assert permits(answered) == {0: (6, True), 1: (6, True)}
    assert [(one.version_min, one.staleness_bound) for one in answered] == [(2, 6), (2, 6)]
    assert "for a straggler" in answered[0].reason
    for clock in range(2, 5):
        policy.handle(clocked(2, clock, compute_s=0.1))
    for clock in range(6, 9):
        answered = answers(policy, clocked(0, clock), clocked(1, clock))
    assert permits(answered) == {0: (9, False), 1: (9, False)}


# Samples ------------------------------------------------------------------------------------------------


def assigning(
    world: int = 2, samples: int = SAMPLES, **arguments: Any
) -> tuple[BoundedStaleness, list[Action]]:
    policy = started(world, shards="dynamic", **arguments)
    return policy, answers(policy, *(requests(one, samples=samples, is_last=True) for one in range(world)))


def blocks(actions: list[Action], worker: int) -> list[int]:
    assignments = [one for one in actions if isinstance(one, AssignBlocks) and one.worker == worker]
    return [block.id for assignment in assignments for block in assignment.blocks]


def with_the_rest_at_worker_1(**arguments: Any) -> tuple[BoundedStaleness, list[int], list[int]]:
    """Worker 0 has one block, and worker 1 two, of which it has started one; return their ids too."""
    policy, answered = assigning(2, 3 * BATCH, **arguments)
    first, second = blocks(answered, 0), blocks(answered, 1)
    more = requests(1, samples=3 * BATCH, is_last=True, started_blocks=tuple(second))
    second += blocks(policy.handle(more), 1)
    assert (len(first), len(second)) == (1, 2)
    return policy, first, second


def test_a_worker_that_waits_for_the_last_samples_delays_no_other_and_its_clock_advances():
    policy, first, second = with_the_rest_at_worker_1(s=0)
    answered = answers(policy, clocked(0, 0, blocks=tuple(first)))
    assert permits(answered) == {0: (1, False)}
    assert [one.reason for one in answered if isinstance(one, StepPermit)] == ["it has no samples"]
    answered = answers(policy, clocked(1, 0, blocks=(second[0],)))
    assert permits(answered) == {1: (1, True)}
    answered = answers(policy, clocked(1, 1, blocks=(second[1],)))
    assert permits(answered) == {0: (2, False), 1: (2, False)}
    assert [assignment.is_last for assignment in answered if isinstance(assignment, AssignBlocks)] == [
        True,
        True,
    ]


def test_a_worker_that_gets_a_lost_workers_samples_returns_at_an_incomplete_clock():
    policy, answered = assigning(3, 3 * BATCH, s=0)
    answers(policy, *(clocked(worker, 0, blocks=tuple(blocks(answered, worker))) for worker in (0, 1)))
    answered = policy.handle(Lost(now_s=0.0, worker=2, cause="cut"))
    returning = [worker for worker in (0, 1) if blocks(answered, worker)]
    assert returning
    assert [permits(answered)[worker] for worker in returning] == [(1, True)] * len(returning)


def test_a_worker_that_has_begun_a_step_and_gets_no_more_samples_is_awaited():
    policy, first, _ = with_the_rest_at_worker_1()
    more = requests(0, samples=3 * BATCH, is_last=True, started_blocks=tuple(first))
    (assignment,) = policy.handle(more)
    assert (assignment.worker, assignment.is_awaited, assignment.blocks) == (0, True, ())
    assert answers(policy, requests(1, samples=3 * BATCH, is_last=True)) == []


def test_a_worker_that_asks_for_more_while_blocks_are_under_way_to_it_is_not_awaited():
    policy, answered = assigning(2)
    taken = blocks(answered, 0)[0]
    assert not any(
        assignment.is_awaited
        for assignment in policy.handle(requests(0, is_last=True, started_blocks=(taken,)))
    )


def test_a_worker_at_the_gate_is_not_removed_for_one_that_waits_for_samples():
    policy, answered = assigning(3, 6 * BATCH, s=0, timeout_s=5.0)
    answers(
        policy,
        clocked(0, 0, blocks=tuple(blocks(answered, 0))),
        clocked(1, 0, blocks=(blocks(answered, 1)[0],)),
    )
    answers(policy, requests(0, samples=6 * BATCH, is_last=True), Tick(now_s=0.0))
    refused = [one.peer for one in policy.handle(Tick(now_s=6.0)) if isinstance(one, RejectPeer)]
    assert refused == ["peer-2"]


def test_a_finished_worker_is_assigned_nothing_and_nothing_is_reserved_for_it():
    policy = started(3, shards="dynamic")
    policy.handle(Finished(now_s=0.0, worker=2, epoch=0, step=0))
    answered = answers(policy, *(requests(worker, samples=2 * BATCH) for worker in (0, 1)))
    sizes = [block.samples for one in answered if isinstance(one, AssignBlocks) for block in one.blocks]
    assert sizes == [BATCH, BATCH]


def test_a_worker_that_never_requests_samples_runs_without_them():
    policy = started(2, shards="dynamic", s=0)
    assert permits(policy.handle(clocked(0, 0))) == {0: (1, False)}
    assert permits(policy.handle(clocked(1, 0))) == {0: (1, True), 1: (1, True)}


def test_a_worker_that_leaves_an_epoch_early_discards_the_rest_for_all():
    policy, _ = assigning(2)
    answered = policy.handle(requests(0, 1, abandons_previous=True))
    (assignment,) = [one for one in answered if isinstance(one, AssignBlocks) and one.worker == 0]
    assert assignment.replaces_queue
    assert {block.epoch for block in assignment.blocks} == {1}


def test_a_worker_that_saves_is_informed_of_the_used_positions():
    policy, answered = assigning(2)
    used = blocks(answered, 0)[:1]
    answers(policy, clocked(0, 0, blocks=tuple(used)))
    (answer,) = policy.handle(CheckpointQuery(now_s=0.0, worker=1, round=7))
    assert isinstance(answer, ConsumedSamples)
    assert (answer.worker, answer.round, answer.epoch, answer.is_current) == (1, 7, 0, True)
    assert answer.consumed == ((0, ((0, BATCH),)),)


def test_a_worker_that_saves_after_another_has_ended_is_informed_of_nothing_that_the_other_only_had_queued():
    policy, answered = assigning(2)
    used = blocks(answered, 0)[:1]
    answers(policy, clocked(0, 0, blocks=tuple(used)), Finished(now_s=0.0, worker=1, epoch=0, step=0))
    answer = policy.handle(CheckpointQuery(now_s=0.0, worker=0, round=1))[-1]
    assert isinstance(answer, ConsumedSamples)
    assert answer.consumed == ((0, ((0, BATCH),)),)


def test_a_worker_that_saves_is_informed_of_the_samples_used_at_the_clocks_of_its_state():
    policy, answered = assigning(3, 20 * BATCH, s=3)
    mine, ahead = blocks(answered, 0), blocks(answered, 1)
    answers(policy, clocked(1, 0, blocks=tuple(ahead[:1])), clocked(0, 0, blocks=tuple(mine[:1])))
    answered = answers(
        policy,
        clocked(2, 0, blocks=tuple(blocks(answered, 2))),
        clocked(1, 1, parameter_version=0, blocks=(ahead[1],)),
    )
    policy = remembered(policy, 3, s=3)
    (answer,) = policy.handle(CheckpointQuery(now_s=0.0, worker=0, round=1))
    whole = policy.handle(CheckpointQuery(now_s=0.0, worker=0, round=2))[0]
    assert sum(last - first for first, last in answer.consumed[0][1]) == 4 * BATCH
    assert sum(last - first for first, last in whole.consumed[0][1]) == 5 * BATCH


def test_a_worker_that_holds_the_last_samples_for_too_long_is_removed_and_others_get_them():
    policy, first, _ = with_the_rest_at_worker_1(timeout_s=5.0)
    answers(policy, clocked(0, 0, blocks=tuple(first)), requests(0, samples=3 * BATCH, is_last=True))
    policy = remembered(policy, 2, timeout_s=5.0)
    assert answers(policy, Tick(now_s=0.0)) == []
    answered = policy.handle(Tick(now_s=5.1))
    assert isinstance(answered[0], RejectPeer)
    assert answered[0].peer == "peer-1"
    assert len(blocks(answered, 0)) >= 1
    assert permits(answered) == {0: (1, True)}


# Impossible messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (clocked(5, 0), "takes part in a running job, got StepFinished of worker 5"),
        (clocked(0, None), "expected a clock from a worker that has begun"),
        (clocked(0, 6), "no step at clock 6 of worker 0, which may not start"),
        (clocked(0, 7), "no step at clock 7 of worker 0, which may not start"),
        (clocked(1, 4), "no step at clock 4 of worker 1, which may start at 3"),
        (clocked(1, 3, blocks=(0,)), "expected no blocks"),
        (requests(0), "nothing about samples"),
        (CheckpointQuery(now_s=0.0, worker=0, round=1), "nothing about samples"),
        (Lost(now_s=0.0, worker=8, cause="cut"), "expected a worker that has joined, got Lost of worker 8"),
        (
            Ready(
                now_s=0.0,
                worker=0,
                generation=0,
                epoch=0,
                step=0,
                round=0,
                compute_s=0.1,
                samples=0,
                blocks=(),
            ),
            "nothing about groups",
        ),
    ],
)
def test_an_impossible_message_is_refused(event, text):
    with pytest.raises(ProtocolError, match=text):
        apart().handle(event)


def test_a_step_with_parameters_that_are_too_old_is_refused():
    policy = apart()
    policy.handle(clocked(1, 3))
    with pytest.raises(ProtocolError, match="at least version 4 of the parameters, got 3"):
        policy.handle(clocked(0, 7, parameter_version=3))


def test_blocks_of_another_worker_are_refused():
    policy, answered = assigning(2)
    with pytest.raises(ProtocolError, match="are not worker 0's any more"):
        policy.handle(clocked(0, 0, blocks=tuple(blocks(answered, 1))))


def test_messages_of_a_finished_worker_are_refused():
    policy = started(2)
    policy.handle(Finished(now_s=0.0, worker=0, epoch=0, step=0))
    for event in (clocked(0, 0), Finished(now_s=0.0, worker=0, epoch=0, step=0)):
        with pytest.raises(ProtocolError, match="takes part in a running job"):
            policy.handle(event)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world": 0}, "at least 1 worker, got 0"),
        ({"world": 1, "timeout_s": 0.0}, "finite timeout of more than 0 s, got 0.0"),
        ({"world": 1, "timeout_s": float("inf")}, "finite timeout of more than 0 s, got inf"),
        ({"world": 1, "shards": "none"}, "dynamic or equal, got 'none'"),
        ({"world": 1, "s": None, "dynamic": {}}, "give s or leave out dynamic"),
        ({"world": 1, "detector": {}}, "expected dynamic along with detector"),
        ({"world": 1, "s": 99, "dynamic": {}}, "s=99, s_max=10"),
        ({"world": 1, "counts": "none"}, "own or common"),
        ({"world": 1, "warm_start": -1}, "warm start of at least 0 steps, got -1"),
    ],
)
def test_bad_arguments_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        BoundedStaleness(**arguments)
