"""Groups around slow, lost and new workers: each rule of `PartialGroups` with its actions."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    EndEpoch,
    Finished,
    Group,
    Halt,
    Halted,
    JobComplete,
    Joined,
    Left,
    Lost,
    PeerList,
    PeerReachable,
    PeerUnreachable,
    Ready,
    RejectPeer,
    SamplesRequested,
    SkipRound,
    Tick,
)
from offbeat.policies import dispatch_event
from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.membership.partial_groups import PartialGroups
from offbeat.policies.stragglers.lines import RETRY_FIRST_S


class Job:
    """A policy and the events that workers in good order would send it."""

    def __init__(self, world: int, **arguments: Any) -> None:
        arguments = {
            "halt_timeout_s": 1.0,
            "patience_min_s": 1.0,
            "join_timeout_s": 5.0,
            "timeout_s": 9.0,
            **arguments,
        }
        self.policy = PartialGroups(world, **arguments)
        self.now_s = 0.0
        self.begun = [action for worker in range(world) for action in self.join(worker)]

    def join(self, worker: int) -> list[Action]:
        return self.policy.handle(
            Joined(
                now_s=self.now_s,
                worker=worker,
                world=1,
                peer=f"worker-{worker}",
                location="",
                addresses=(),
                model_signature=(),
                strategy="",
            )
        )

    def ready(
        self,
        worker: int,
        round: int,
        *,
        generation: int = 0,
        compute_s: float = 0.1,
        step: int | None = None,
        line_s: tuple[tuple[int, float], ...] = (),
    ) -> list[Action]:
        return self.policy.handle(
            Ready(
                now_s=self.now_s,
                worker=worker,
                generation=generation,
                epoch=0,
                step=round if step is None else step,
                round=round,
                compute_s=compute_s,
                samples=0,
                blocks=(),
                line_s=line_s,
            )
        )

    def answer(
        self,
        worker: int,
        generation: int,
        *,
        step: int,
        begun: bool = False,
        round: int | None = None,
        state: bool = True,
        exchange_id: int = 0,
    ) -> list[Action]:
        return self.policy.handle(
            Halted(
                now_s=self.now_s,
                worker=worker,
                generation=generation,
                has_state=state,
                step=step,
                has_begun_exchange=begun,
                round=step if round is None else round,
                exchange_id=exchange_id,
            )
        )

    def lose(self, worker: int) -> list[Action]:
        return self.policy.handle(Lost(now_s=self.now_s, worker=worker, cause="it was killed"))

    def tick(self, now_s: float) -> list[Action]:
        self.now_s = now_s
        return self.policy.handle(Tick(now_s=now_s))


def only(actions: list[Action], kind: type[Any]) -> Any:
    (action,) = actions
    assert isinstance(action, kind)
    return action


def settle(job: Job, generation: int, members: tuple[int, ...], *, step: int, begun: bool = False) -> Group:
    """All members answer; the Group follows the last answer."""
    actions: list[Action] = []
    for worker in members:
        assert actions == []
        actions = job.answer(worker, generation, step=step, begun=begun, exchange_id=step)
    return only(actions, Group)


def test_the_first_group_holds_all_workers():
    group = only(Job(3).begun, Group)
    assert (group.generation, group.step, group.members, group.joining) == (0, 0, (0, 1, 2), ())
    assert sum(group.weights) == pytest.approx(1)


def test_while_all_keep_up_a_ready_is_not_answered():
    job = Job(3)
    assert [job.ready(worker, round) for round in range(30) for worker in range(3)] == [[]] * 90


def test_a_straggler_is_halted_and_excluded_from_the_first_step_that_no_worker_has_begun():
    job = Job(4, detector={"n_profile": 1, "limit": 3})
    actions = [
        action
        for round in range(3)
        for worker in range(4)
        for action in job.ready(worker, round, compute_s=0.5 if worker == 2 else 0.1)
    ]
    halt = only(actions, Halt)
    assert (halt.generation, halt.abandon) == (1, False)
    assert "worker 2" in halt.reason
    for worker, begun in ((0, True), (1, False), (2, False)):
        assert job.answer(worker, 1, step=2, begun=begun) == []
    group = only(job.answer(3, 1, step=2, exchange_id=3), Group)
    assert (group.step, group.members, group.joining) == (3, (0, 1, 3), ())
    assert group.exchange_id > 3


def test_a_straggler_that_has_recovered_joins_with_the_state_of_another():
    job = Job(3, detector={"n_profile": 1, "limit": 2})
    for round in range(2):
        for worker in (0, 1, 2):
            job.ready(worker, round, compute_s=0.5 if worker == 2 else 0.1)
    settle(job, 1, (0, 1, 2), step=1)
    job.ready(0, 2, generation=1)
    assert job.ready(2, 1, generation=1) == []  # worker 1 may still be in the group before
    halt = only(job.ready(1, 2, generation=1), Halt)
    assert not halt.abandon
    group = settle(job, 2, (0, 1), step=2)
    assert (group.members, group.joining) == ((0, 1, 2), (2,))


def test_a_joiner_s_ready_under_its_old_generation_is_no_arrival():
    job = Job(2)
    job.join(2)
    settle(job, 1, (0, 1), step=0)
    job.join(3)
    assert [job.ready(0, 0, generation=1), job.ready(1, 0, generation=1)] == [[], []]  # they may wait for it
    assert job.ready(2, 0, generation=0) == []
    assert only(job.ready(2, 0, generation=1), Halt).generation == 2


def test_a_newcomer_is_taken_with_the_next_change():
    job = Job(2)
    assert "worker 2 is new" in only(job.join(2), Halt).reason
    group = settle(job, 1, (0, 1), step=4, begun=True)
    assert (group.step, group.members, group.joining) == (5, (0, 1, 2), (2,))


def test_after_a_loss_the_exchange_under_way_is_abandoned_and_repeated():
    job = Job(3)
    assert only(job.lose(1), Halt).abandon
    job.answer(0, 1, step=4, begun=True, exchange_id=5)
    group = only(job.answer(2, 1, step=4, begun=True, exchange_id=5), Group)
    assert (group.step, group.members, group.joining) == (4, (0, 2), ())
    assert group.exchange_id > 5


def test_a_worker_that_is_ahead_by_a_round_continues_alone_and_the_others_rejoin():
    job = Job(4)
    job.lose(3)
    job.answer(0, 1, step=5, round=5)
    job.answer(1, 1, step=4, begun=True, round=4)
    group, halt = job.answer(2, 1, step=4, begun=True, round=4)
    assert isinstance(group, Group)
    assert (group.members, group.step) == ((0,), 5)
    assert isinstance(halt, Halt)
    assert not halt.abandon
    again = only(job.answer(0, 2, step=5), Group)
    assert (again.members, again.joining) == ((0, 1, 2), (1, 2))


def test_several_deaths_at_once_leave_the_rest():
    job = Job(5)
    job.lose(1)
    for worker in (0, 2, 4):
        assert job.answer(worker, 1, step=2, begun=True) == []
    assert only(job.lose(3), Group).members == (0, 2, 4)


def test_a_worker_that_does_not_answer_a_halt_is_excluded_and_returns_later():
    job = Job(3)
    job.join(3)
    job.answer(0, 1, step=2)
    job.answer(1, 1, step=2)
    assert job.tick(0.9) == []
    assert only(job.tick(1.1), Halt).abandon
    job.answer(0, 2, step=2)
    group, halt = job.answer(1, 2, step=2)
    assert isinstance(group, Group)
    assert group.members == (0, 1)
    assert isinstance(halt, Halt)  # for the newcomer
    assert set(settle(job, 3, (0, 1), step=2).joining) == {3}
    for worker in (0, 1, 3):
        job.ready(worker, 3, generation=3)
    assert "worker 2" in only(job.ready(2, 2, generation=0), Halt).reason


def test_a_worker_that_hangs_in_an_exchange_of_ready_workers_is_queried_and_excluded():
    job = Job(3)
    for worker in range(3):
        job.ready(worker, 0)
    assert job.tick(2.0) == []
    halt = only(job.tick(2.1), Halt)
    assert not halt.abandon
    assert "nothing was received for 2.1 s" in halt.reason
    job.answer(0, 1, step=0, begun=True)
    job.answer(1, 1, step=0, begun=True)
    assert only(job.tick(3.2), Halt).abandon  # worker 2 has not answered
    job.answer(0, 2, step=0, begun=True)
    assert only(job.answer(1, 2, step=0, begun=True), Group).members == (0, 1)


def test_a_worker_that_owes_a_step_to_the_former_group_still_counts_during_a_liveness_query():
    job = Job(3, detector={"n_profile": 1, "limit": 2})
    for round_ in range(2):
        for worker in range(3):
            job.ready(worker, round_, compute_s=0.5 if worker == 2 else 0.1)
    settle(job, 1, (0, 1, 2), step=2)  # worker 2 is left out from step 2 on, and has yet to do step 1
    assert not only(job.tick(3.0), Halt).abandon
    settle(job, 2, (0, 1, 2), step=2)
    assert only(job.lose(2), Halt).abandon  # the others wait for it in that step


def test_no_worker_is_queried_before_twice_the_usual_silence():
    job = Job(2, timeout_s=900.0)
    for round_ in range(4):  # 0.5 s are computed, and 6 s exchanged
        job.now_s = 6.5 * round_
        job.ready(0, round_)
        job.now_s += 0.5
        job.ready(1, round_)
    assert job.tick(job.now_s + 11.9) == []
    assert only(job.tick(job.now_s + 0.2), Halt)


def test_a_worker_that_only_takes_long_is_queried_less_and_less_often():
    job = Job(2, timeout_s=900.0)
    asked_s = []
    for tenth in range(1, 630):
        if job.tick(tenth / 10):
            asked_s.append(tenth / 10)
            settle(job, len(asked_s), (0, 1), step=0)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise([0.0, *asked_s])]
    assert gaps_s[:5] == pytest.approx([2.1, 4.1, 8.1, 16.1, 32.1], abs=0.2)
    job.ready(0, 0, generation=len(asked_s))
    job.ready(1, 0, generation=len(asked_s))
    assert job.tick(job.now_s + 1.9) == []
    assert only(job.tick(job.now_s + 0.2), Halt)


def test_a_worker_that_keeps_the_others_waiting_is_excluded_until_it_is_ready_again():
    job = Job(3, patience_min_s=5.0)
    for worker in (0, 1):
        job.ready(worker, 0)
    assert job.tick(8.9) == []  # no threshold is known yet: timeout_s
    halt = only(job.tick(9.1), Halt)
    assert halt.abandon
    assert "worker 2" in halt.reason
    group = None
    for worker in (0, 1, 2):  # it answers, and is left out nevertheless
        for action in job.answer(worker, 1, step=0, begun=worker < 2):
            group = action
    assert isinstance(group, Group)
    assert group.members == (0, 1)
    assert only(job.ready(2, 0, generation=1), Halt).generation == 2


def test_a_late_worker_that_does_not_answer_a_halt_is_excluded():
    job = Job(3)
    for worker in (0, 1):
        job.ready(worker, 0)
    assert only(job.tick(9.1), Halt).abandon
    assert job.answer(0, 1, step=0, begun=True) == []
    assert only(job.answer(1, 1, step=0, begun=True), Group).members == (0, 1)


def test_a_worker_that_leaves_while_it_joins_is_not_waited_for():
    job = Job(2)
    job.join(2)
    settle(job, 1, (0, 1), step=0)
    assert only(job.policy.handle(Left(now_s=0.0, worker=2, step=0)), Halt).abandon


def test_a_late_worker_is_not_waited_for_again_even_if_it_is_ahead():
    job = Job(2)
    job.ready(0, 0)
    job.tick(9.1)
    group = only(job.answer(0, 1, step=0, begun=True), Group)
    assert group.members == (0,)
    assert job.answer(1, 1, step=1) == []
    assert not only(job.ready(1, 1, generation=1), Halt).abandon  # it takes the state of the other


def test_a_repeated_ready_is_not_classified_again():
    """A worker repeats its Ready to a restarted coordinator."""
    job = Job(4, detector={"n_profile": 1, "limit": 3})
    for worker in range(4):
        job.ready(worker, 0)
    assert [job.ready(2, 1, compute_s=0.5) for _ in range(9)] == [[]] * 9


def test_patience_is_half_as_long_as_others_wait_until_a_straggler_is_classed():
    job = Job(3, detector={"n_profile": 1, "limit": 10})
    for worker in range(3):
        job.ready(worker, 0, compute_s=0.4)  # threshold 0.8 s: others wait 0.4 s, ten times
    for worker in (0, 1):
        job.ready(worker, 1)
    assert job.tick(1.9) == []
    assert only(job.tick(2.1), Halt).abandon


def test_the_worker_with_the_only_state_is_waited_for_though_it_hangs():
    job = Job(1)
    job.join(1)
    assert job.tick(1.1) == []  # all members are silent: the coordinator may be the one that is cut off
    assert only(job.tick(2.1), Halt).abandon
    assert job.tick(9.0) == []
    group, halt = job.answer(0, 2, step=3)
    assert group.members == (0,)
    assert isinstance(halt, Halt)


@pytest.mark.parametrize("first", [0, 2])
def test_members_that_take_steps_after_different_numbers_of_rounds_stop(first):
    job = Job(3)
    assert job.ready(first, 4, step=1) == []
    assert job.ready(1, 4, step=1) == []
    stop = only(job.ready(2 - first, 4, step=2), AbortJob)
    assert f"worker {2 - first} is in step 2 and others are not, all in round 4" in stop.reason
    assert "session.no_sync()" in stop.reason
    assert job.ready(1, 5, step=1) == []


def test_rounds_that_were_open_when_the_group_changed_have_a_step_too():
    job = Job(3)
    for worker in range(3):
        job.ready(worker, 0)
    job.lose(2)
    job.answer(0, 1, step=0, begun=True)
    only(job.answer(1, 1, step=0, begun=True), Group)
    assert job.ready(0, 1, generation=1, step=1) == []
    assert isinstance(job.ready(1, 1, generation=1, step=0)[-1], AbortJob)


def test_without_a_worker_that_has_the_state_the_job_stops():
    job = Job(1)
    job.join(1)
    *_, stop = job.lose(0)
    assert isinstance(stop, AbortJob)
    assert "no worker holds the training state" in stop.reason
    assert job.policy.handle(Tick(now_s=0.1)) == []


def test_exchange_ids_grow_also_when_no_worker_has_followed_the_last_group():
    """A worker that has died since may have used them."""
    job = Job(3)
    job.join(3)
    first = settle(job, 1, (0, 1, 2), step=0)
    job.lose(1)
    job.answer(0, 2, step=0, exchange_id=0)
    job.answer(2, 2, step=0, exchange_id=0)
    actions = job.answer(3, 2, step=0, state=False, exchange_id=0)
    assert isinstance(actions[0], Group)
    assert actions[0].exchange_id > first.exchange_id


def test_a_worker_that_left_in_order_is_not_waited_for_and_its_step_is_kept():
    job = Job(3)
    job.policy.handle(Left(now_s=0.0, worker=1, step=5))
    job.answer(0, 1, step=5)
    group = only(job.answer(2, 1, step=4, begun=True), Group)
    assert (group.step, group.members) == (5, (0, 2))


def test_a_begun_step_that_needs_a_worker_that_has_left_is_abandoned():
    job = Job(3)
    job.policy.handle(Left(now_s=0.0, worker=1, step=5))
    job.answer(0, 1, step=5, begun=True)
    assert only(job.answer(2, 1, step=5), Halt).abandon


def test_when_all_have_finished_the_job_is_complete():
    job = Job(2)
    assert only(job.policy.handle(Finished(now_s=0.0, worker=0, epoch=0, step=9)), EndEpoch).epoch == 0
    assert only(job.policy.handle(Finished(now_s=0.0, worker=1, epoch=0, step=9)), JobComplete)
    assert job.ready(0, 9) == []


def finish(job: Job, worker: int) -> list[Action]:
    return job.policy.handle(Finished(now_s=0.0, worker=worker, epoch=0, step=9))


def test_a_newcomer_near_the_end_delays_no_worker_and_gets_the_final_state():
    """A worker that has finished sends no state before all are done."""
    job = Job(2)
    finish(job, 0)
    assert job.join(2) == []
    assert only(finish(job, 1), Halt).abandon is False
    assert job.answer(0, 1, step=9) == []
    group, complete = job.answer(1, 1, step=9)
    assert isinstance(group, Group)
    assert (group.members, group.joining) == ((0, 1, 2), (2,))
    assert group.weights == (1 / 3, 1 / 3, 1 / 3)  # the newcomer is a member at once
    assert isinstance(complete, JobComplete)


def test_a_worker_that_joins_after_the_end_is_refused():
    job = Job(2)
    finish(job, 0)
    finish(job, 1)
    refuse = only(job.join(2), RejectPeer)
    assert refuse.peer == "worker-2"
    assert refuse.reason.endswith("cannot take part: it came when all others were done")


@pytest.mark.parametrize("model", [("one",), ("another",)])
def test_a_newcomer_that_the_assembly_refuses_does_not_reach_the_group(model):
    policies = [Assembly(2, accepts_late_joiners=True), PartialGroups(2)]
    actions: list[Action] = []
    for worker in range(3):
        event = Joined(
            now_s=0.0,
            worker=worker,
            world=2,
            peer=f"worker-{worker}",
            location="",
            addresses=(),
            model_signature=model if worker == 2 else ("one",),
            strategy="",
        )
        actions = dispatch_event(policies, event)
    assert [type(action) for action in actions] == ([PeerList, Halt] if model == ("one",) else [RejectPeer])


def test_only_messages_of_workers_that_have_joined_count():
    with pytest.raises(ProtocolError, match="job that has started"):
        Job(2).ready(7, 0)


@pytest.mark.parametrize(
    "arguments", [{"monitor": "x"}, {"halt_timeout_s": 0}, {"patience_min_s": -1}, {"detector": {"k": 1.0}}]
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError):
        PartialGroups(2, **arguments)
    with pytest.raises(ValueError):
        PartialGroups(0)


def test_a_finished_worker_in_the_next_group_is_not_waited_for():
    """A group may change after some have finished; a step that needs them is abandoned nevertheless."""
    job = Job(4)
    for worker in (0, 1, 2):
        job.ready(worker, 0)
    assert only(job.tick(9.1), Halt).abandon  # worker 3 is late
    assert settle(job, 1, (0, 1, 2), step=0, begun=True).members == (0, 1, 2)
    for worker in (1, 2):
        job.policy.handle(Finished(now_s=9.1, worker=worker, epoch=0, step=9))
    assert not only(job.ready(3, 0, generation=1), Halt).abandon
    settled = [
        action for worker in (0, 1, 2) for action in job.answer(worker, 2, step=9, round=9, exchange_id=9)
    ]
    assert only(settled, Group).members == (0, 1, 2, 3)
    actions = job.ready(0, 9, generation=2)
    assert only([action for action in actions if isinstance(action, Halt)], Halt).abandon


def test_a_worker_in_a_step_that_others_do_not_take_continues_without_them():
    """Its Ready for the step arrives before the Finished of the other."""
    job = Job(2)
    job.ready(0, 0)
    job.ready(1, 0)
    job.ready(1, 1)
    _, halt = job.policy.handle(Finished(now_s=0.0, worker=0, epoch=0, step=1))
    assert isinstance(halt, Halt)
    assert halt.abandon
    job.answer(0, 1, step=1)
    assert only(job.answer(1, 1, step=1, begun=True), Group).members == (1,)


def finish_at(job: Job, worker: int, step: int) -> list[Action]:
    return job.policy.handle(Finished(now_s=job.now_s, worker=worker, epoch=0, step=step))


def cut_out(job: Job) -> None:
    """Worker 2 is lost; 0 has finished the round with it, 1 has not, and is outside the group (0,)."""
    job.lose(2)
    job.answer(0, 1, step=5)
    group, halt = job.answer(1, 1, step=4, begun=True)
    assert isinstance(group, Group)
    assert isinstance(halt, Halt)
    assert group.members == (0,)


def test_a_worker_cut_out_of_an_exchange_trains_on_with_the_state_of_a_member_that_has_finished():
    job = Job(3)
    cut_out(job)
    finish_at(job, 0, 5)
    assert only(job.answer(0, 2, step=5), Group).members == (0,)
    assert not only(job.ready(1, 4, generation=2), Halt).abandon
    group = only(job.answer(0, 3, step=5), Group)
    assert (group.members, group.joining, group.weights, group.step) == ((0, 1), (1,), (0.0, 1.0), 5)
    halt = only(job.ready(1, 5, generation=3), Halt)  # with the state, in a step that 0 does not take
    assert halt.abandon
    assert only(settled(job, 4, {0: 5, 1: 5}), Group).members == (1,)
    assert not only(finish_at(job, 1, 8), Halt).abandon
    last, complete = job.answer(1, 5, step=8)
    assert isinstance(last, Group)
    assert (last.members, last.joining, last.weights) == ((0, 1), (0,), (0.5, 0.5))
    assert isinstance(complete, JobComplete)


def settled(job: Job, generation: int, steps: dict[int, int]) -> list[Action]:
    return [action for worker, step in steps.items() for action in job.answer(worker, generation, step=step)]


def left_behind() -> Job:
    """Worker 1 is excluded as a straggler after step 2; workers 0 and 2 finish after step 5."""
    job = Job(3, detector={"n_profile": 1, "limit": 2})
    for round in range(2):
        for worker in (0, 1, 2):
            job.ready(worker, round, compute_s=0.5 if worker == 1 else 0.1)
    assert settle(job, 1, (0, 1, 2), step=1, begun=True).members == (0, 2)
    for worker in (0, 2):
        job.ready(worker, 2, generation=1)
    job.ready(1, 1, generation=1, compute_s=0.5)
    for worker in (0, 2):
        finish_at(job, worker, 5)
    return job


def test_a_straggler_outside_that_trains_on_joins_members_that_have_finished():
    job = left_behind()
    assert not only(job.ready(1, 2, generation=1, compute_s=0.5), Halt).abandon
    (group,) = settled(job, 2, {0: 5, 2: 5})
    assert isinstance(group, Group)
    assert (group.members, group.joining, group.weights) == ((0, 1, 2), (1,), (0.0, 1.0, 0.0))


def test_a_worker_outside_that_ends_after_the_members_costs_no_change_but_the_last():
    job = left_behind()
    assert job.join(3) == []
    assert not only(finish_at(job, 1, 2), Halt).abandon
    group, complete = settled(job, 2, {0: 5, 2: 5})
    assert isinstance(group, Group)
    assert group.joining == (1, 3)
    assert isinstance(complete, JobComplete)


def test_a_worker_outside_that_is_silent_is_given_up_some_time_after_the_last_member_has_finished():
    job = left_behind()
    job.now_s = 4.0
    finish_at(job, 2, 5)
    assert job.tick(8.9) == []
    assert only(job.tick(9.1), JobComplete)


def test_the_only_worker_that_trains_is_not_excluded_as_a_straggler():
    job = Job(2, detector={"n_profile": 1, "limit": 2})
    for round in range(2):
        actions = job.ready(0, round)
        if round:
            finish_at(job, 0, 2)
        actions += job.ready(1, round, compute_s=0.5)
    assert actions == []
    assert only(job.ready(1, 2, compute_s=0.5), Halt).abandon
    assert only(settled(job, 1, {0: 2, 1: 2}), Group).members == (1,)


def test_a_worker_whose_donor_finishes_while_it_joins_joins_again():
    job = Job(3)
    cut_out(job)
    assert only(job.answer(0, 2, step=5), Group).joining == (1,)
    _, halt = finish_at(job, 0, 5)
    assert halt.abandon
    job.answer(0, 3, step=5)
    group, again = job.answer(1, 3, step=4, state=False)
    assert (group.members, again.abandon) == ((0,), False)
    group = only(job.answer(0, 4, step=5), Group)
    assert (group.joining, group.weights) == ((1,), (0.0, 1.0))
    assert job.join(3) == []  # worker 1 needs no step of worker 0, and is not cut out again


def test_an_epoch_that_a_finished_worker_left_early_has_not_ended():
    job = Job(2)
    for worker in (0, 1):
        request = SamplesRequested(
            now_s=0.0,
            worker=worker,
            epoch=0,
            samples=40,
            batch_size=4,
            is_last=False,
            abandons_previous=False,
            blocks_max=0,
            started_blocks=(),
            round=0,
            consumed_ranges=(),
        )
        job.policy.handle(request)
    assert not [action for action in finish_at(job, 0, 0) if isinstance(action, EndEpoch)]


# Outages ------------------------------------------------------------------------------------------------


def begun(world: int, **arguments: Any) -> Job:
    """A job whose workers have all been Ready once."""
    job = Job(world, **arguments)
    for worker in range(world):
        job.ready(worker, 0)
    return job


def unreachable(job: Job, worker: int | None, peer: int) -> list[Action]:
    return job.policy.handle(PeerUnreachable(now_s=job.now_s, worker=worker, peer=peer, cause="it is silent"))


def reachable(job: Job, worker: int | None, peer: int) -> list[Action]:
    return job.policy.handle(PeerReachable(now_s=job.now_s, worker=worker, peer=peer))


def test_one_of_two_members_that_cannot_reach_each_other_is_excluded_after_a_quarter_second():
    job = begun(3)
    job.now_s = 1.0
    assert unreachable(job, 1, 2) == unreachable(job, 2, 1) == []
    assert job.tick(1.2) == []
    halt = only(job.tick(1.25), Halt)
    assert halt.abandon
    assert halt.reason == "worker 1 cannot reach worker 2: it is silent"
    assert job.answer(0, 1, step=3, begun=True) == []
    group = only(job.answer(1, 1, step=3, begun=True), Group)
    assert (group.members, group.step, group.reason) == ((0, 1), 3, halt.reason)


def test_no_worker_is_excluded_before_all_have_begun():
    """A worker that has not may lack the state with which all begin."""
    job = Job(2)
    job.ready(0, 0)
    job.now_s = 1.0
    unreachable(job, 0, 1)
    assert job.tick(2.0) == []
    job.ready(1, 0)
    assert only(job.tick(2.3), Halt).abandon


def left_out(world: int) -> Job:
    """A job whose last two workers cannot reach each other, so that the last one is left out."""
    job = begun(world)
    job.now_s = 1.0
    unreachable(job, world - 2, world - 1)
    unreachable(job, world - 1, world - 2)
    job.tick(1.25)
    job.answer(world - 1, 1, step=3, begun=True)
    settle(job, 1, tuple(range(world - 1)), step=3, begun=True)
    return job


def test_an_excluded_worker_returns_when_no_outage_is_reported_any_more():
    job = left_out(3)
    assert reachable(job, 1, 2) == []
    halt = only(reachable(job, 2, 1), Halt)
    assert (halt.abandon, halt.reason) == (False, "worker 2 can reach all members again")
    group = settle(job, 2, (0, 1), step=5)
    assert (group.members, group.joining) == ((0, 1, 2), (2,))


def test_an_excluded_worker_returns_when_its_unreachable_peer_is_lost():
    job = left_out(3)
    halt = only(job.lose(1), Halt)
    assert halt.abandon
    group, halt = job.answer(0, 2, step=5)
    assert group.members == (0,)
    assert isinstance(halt, Halt)
    assert only(job.answer(0, 3, step=5), Group).joining == (2,)


def test_an_excluded_worker_returns_when_its_unreachable_peer_is_excluded():
    job = left_out(4)
    assert unreachable(job, 0, 2) == unreachable(job, 2, 0) == []
    only(job.tick(1.6), Halt)
    for worker in (2, 0):
        assert job.answer(worker, 2, step=4, begun=True) == []
    group, halt = job.answer(1, 2, step=4, begun=True)
    assert group.members == (0, 1)
    assert halt.reason == "worker 3 can reach all members again"
    assert settle(job, 3, (0, 1), step=5).members == (0, 1, 3)
    assert reachable(job, 0, 2) == reachable(job, 2, 0) == []  # it still cannot reach 3


def test_a_restored_connection_keeps_a_member_that_was_to_be_excluded():
    job = begun(3)
    job.now_s = 1.0
    unreachable(job, 1, 2)
    assert reachable(job, 1, 2) == []
    assert job.tick(1.3) == []


def test_members_that_are_silent_to_the_coordinator_are_excluded_and_not_waited_for():
    job = begun(4)
    job.now_s = 1.0
    for worker in (2, 3):
        assert unreachable(job, None, worker) == []
    halt = only(job.tick(1.3), Halt)
    assert "the coordinator cannot reach worker 2: it is silent" in halt.reason
    assert settle(job, 1, (0, 1), step=3, begun=True).members == (0, 1)
    assert reachable(job, None, 2) == []
    assert isinstance(job.answer(2, 1, step=3, begun=True)[0], Halt)  # it knows of its exclusion


def test_while_most_members_are_silent_nothing_is_decided():
    job = begun(3)
    for worker in range(3):
        job.ready(worker, 0)
    job.ready(0, 1)
    job.now_s = 1.0
    for worker in (1, 2):
        assert unreachable(job, None, worker) == []
    assert [job.tick(now_s) for now_s in (1.3, 5.0, 20.0, 100.0)] == [[], [], [], []]
    assert [job.lose(0), job.tick(101.0)] == [[], []]
    assert only(reachable(job, None, 1), Halt).abandon  # half of the remaining members


def test_no_worker_is_late_while_most_members_are_silent():
    job = begun(3)
    for worker in range(3):
        job.ready(worker, 0)
    job.ready(0, 1)
    job.now_s = 1.0
    for worker in (1, 2):
        unreachable(job, None, worker)
    job.tick(9.0)
    assert reachable(job, None, 1) == reachable(job, None, 2) == []
    assert [job.tick(9.5), job.ready(1, 1), job.ready(2, 1), job.tick(10.5)] == [[]] * 4


def test_reports_that_arrive_one_by_one_let_no_minority_decide():
    """Two of five are excluded, then a third one is silent: that is most of the five."""
    job = begun(5)
    job.now_s = 1.0
    for worker in (3, 4):
        unreachable(job, None, worker)
    only(job.tick(1.3), Halt)
    assert settle(job, 1, (0, 1, 2), step=3, begun=True).members == (0, 1, 2)
    assert unreachable(job, None, 2) == []
    assert [job.tick(now_s) for now_s in (1.8, 5.0, 20.0)] == [[], [], []]


def test_lateness_of_most_members_counts_only_once_their_silence_would_be_known():
    job = begun(3, detector={"n_profile": 1, "limit": 1})
    for round_ in (0, 1):
        for worker in range(3):
            job.ready(worker, round_)
    job.ready(0, 2)
    assert [job.tick(1.1), job.tick(1.9)] == [[], []]
    assert only(job.tick(2.1), Halt).abandon


def test_outages_are_part_of_the_state():
    job = begun(5)
    job.now_s = 1.0
    for worker in (2, 3, 4):
        unreachable(job, None, worker)
    unreachable(job, 0, 1)
    state = json.loads(json.dumps(job.policy.state_dict()))
    job.policy = PartialGroups(5, halt_timeout_s=1.0, patience_min_s=1.0, join_timeout_s=5.0, timeout_s=9.0)
    job.policy.load_state_dict(state)
    assert job.policy.state_dict() == state
    assert job.tick(5.0) == []
    reachable(job, None, 4)
    reasons = only(job.tick(5.1), Halt).reason
    assert "worker 0 cannot reach worker 1" in reasons
    assert "the coordinator cannot reach worker 2" in reasons


def test_a_member_with_a_slow_line_is_left_out_and_tried_again_later():
    job = Job(4, detector={"limit": 2})
    times_s = {0: 0.01, 1: 2.0, 2: 2.0, 3: 0.01}  # of each member to the next one: the line of 2 is slow
    actions: list[Action] = []
    for round_ in range(2):
        for worker, time_s in times_s.items():
            actions += job.ready(worker, round_, line_s=(((worker + 1) % 4, time_s),))
    (halt,) = [action for action in actions if isinstance(action, Halt)]
    assert not halt.abandon
    assert "worker 2: its line is slow" in halt.reason
    actions = [action for worker in range(4) for action in job.answer(worker, halt.generation, step=2)]
    (group,) = [action for action in actions if isinstance(action, Group)]
    assert group.members == (0, 1, 3)
    for worker in (0, 1, 3):
        job.ready(worker, 2, generation=group.generation)
    job.now_s = RETRY_FIRST_S + 1
    (halt,) = job.ready(2, 2, generation=group.generation)
    assert isinstance(halt, Halt)
    assert "tried again" in halt.reason


def job_with_quorum(world: int = 3, **arguments: Any) -> Job:
    """All have been ready for round 0, and all but the last for round 1, which lets the last one skip it."""
    job = Job(world, quorum={"size": "n-1", "grace_s": 0.1}, **arguments)
    for worker in range(world):
        assert job.ready(worker, 0) == []
    for worker in range(world - 2):
        assert job.ready(worker, 1) == []
    skip = only(job.ready(world - 2, 1), SkipRound)
    assert (skip.worker, skip.generation, skip.round, skip.grace_s) == (world - 1, 0, 1, 0.1)
    return job


def test_rounds_close_without_a_late_member_which_stays_in_the_group():
    job = job_with_quorum()
    for round_ in range(2, 5):
        assert job.ready(0, round_) == []
        assert only(job.ready(1, round_), SkipRound).grace_s == 0.0
    assert job.ready(2, 5) == []
    assert only(job.ready(0, 5), SkipRound).worker == 1
    assert job.ready(1, 5) == []


def test_without_a_quorum_a_round_waits_for_all_members():
    job = Job(3)
    for worker in range(3):
        job.ready(worker, 0)
    assert job.ready(0, 1) + job.ready(1, 1) == []


def test_a_member_that_skips_rounds_is_late_only_once_others_have_to_wait_for_it():
    job = job_with_quorum(detector={"n_profile": 1})
    for round_ in range(2, 8):
        job.now_s += 0.6  # together more than the patience
        job.ready(0, round_)
        job.ready(1, round_)
        assert job.tick(job.now_s + 0.1) == []
    job.now_s += 0.6
    assert job.ready(0, 8) == []
    assert job.ready(1, 8) == []  # its gradients would be too old
    assert job.tick(job.now_s + 0.9) == []
    assert only(job.tick(job.now_s + 0.2), Halt).abandon


def test_nobody_skips_while_a_change_is_under_way_and_who_is_late_is_asked_again_in_the_new_group():
    job = Job(4, quorum={"size": "n-2", "grace_s": 0.1})
    for worker in range(4):
        job.ready(worker, 0)
    assert job.ready(1, 1) == []
    assert only(job.lose(0), Halt).abandon
    assert job.ready(2, 1) == []
    actions = [action for worker in (1, 2, 3) for action in job.answer(worker, 1, step=1, begun=worker != 3)]
    group, skip = actions
    assert isinstance(group, Group)
    assert isinstance(skip, SkipRound)
    assert group.members == (1, 2, 3)
    assert (skip.worker, skip.generation, skip.round) == (3, 1, 1)


def test_a_restored_policy_asks_a_late_member_once():
    job = job_with_quorum()
    again = PartialGroups(3, quorum={"size": "n-1", "grace_s": 0.1})
    again.load_state_dict(json.loads(json.dumps(job.policy.state_dict())))
    assert again.handle(Tick(now_s=job.now_s)) == []
