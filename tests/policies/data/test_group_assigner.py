"""Assignment to groups that change: each promise of `GroupBlockAssigner` in a small case."""

from __future__ import annotations

import copy
import json
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.events import (
    AssignBlocks,
    Block,
    CheckpointQuery,
    ConsumedSamples,
    ContributionQuery,
    ContributionReport,
    Ready,
    SamplesRequested,
)
from offbeat.policies.data.group_assigner import GroupBlockAssigner

SAMPLES, BATCH = 40, 4


class Job:
    """An assigner and its workers' messages; `has` holds blocks assigned to each and not yet used."""

    def __init__(self, workers: int, samples: int = SAMPLES, *, begin: bool = True) -> None:
        self.assigner = GroupBlockAssigner()
        self.samples = samples
        self.has: dict[int, list[Block]] = {worker: [] for worker in range(workers)}
        self.actions: list[AssignBlocks] = []
        # Contribution of each worker to a round that members finish with it, received or not.
        self.contributes: dict[tuple[int, int], int] = defaultdict(lambda: 1)
        self.asked: list[ContributionQuery] = []
        self.is_silent = False  # no member answers a query
        self.assigner.change_group(range(workers), (), 0)
        if begin:
            for worker in range(workers):
                self.requests(worker)

    def requests(self, worker: int, round_: int = 0, **more: Any) -> list[AssignBlocks]:
        assignment_of: dict[str, Any] = {
            "epoch": 0,
            "samples": self.samples,
            "batch_size": BATCH,
            "is_last": False,
            "abandons_previous": False,
            "blocks_max": 0,
            "started_blocks": (),
            "consumed_ranges": (),
            **more,
        }
        self.assigner.on_samples_requested(
            SamplesRequested(now_s=0.0, worker=worker, round=round_, **assignment_of)
        )
        return self.pop_assignments()

    def ready(
        self, worker: int, round_: int, *, step: int | None = None, count: int = 1
    ) -> list[AssignBlocks]:
        """The worker names its first blocks and holds them no more."""
        ids = tuple(block.id for block in self.has[worker][:count])
        del self.has[worker][:count]
        return self.names(worker, round_, ids, step=step)

    def names(
        self, worker: int, round_: int, ids: tuple[int, ...], *, step: int | None = None
    ) -> list[AssignBlocks]:
        self.assigner.on_ready(
            Ready(
                now_s=0.0,
                worker=worker,
                generation=0,
                epoch=0,
                step=round_ if step is None else step,
                round=round_,
                compute_s=0.1,
                samples=0,
                blocks=ids,
            )
        )
        return self.pop_assignments()

    def pop_assignments(self) -> list[AssignBlocks]:
        assignment_of = self.assigner.pop_actions()
        asked = [action for action in assignment_of if isinstance(action, ContributionQuery)]
        self.asked += asked
        assignments = [action for action in assignment_of if isinstance(action, AssignBlocks)]
        for query in () if self.is_silent else asked:
            self.reports(query)
        if asked and not self.is_silent:
            assignments += self.assigner.pop_actions()
        for assignment in assignments:
            had = self.has.setdefault(assignment.worker, [])
            if assignment.replaces_queue:
                had.clear()
            had += assignment.blocks
        self.actions += assignments
        return assignments

    def reports(self, query: ContributionQuery, *, since: int = 0, until: int = 40) -> None:
        """The queried member answers as one that has finished these rounds."""
        rounds = tuple(
            (round_, self.contributes[query.lost_worker, round_], 0)
            for round_ in range(since, until)
            if round_ > query.after_round and self.contributes[query.lost_worker, round_]
        )
        self.assigner.on_contribution_report(
            ContributionReport(
                now_s=0.0,
                worker=query.worker,
                lost_worker=query.lost_worker,
                first_round=since,
                end_round=until,
                contributions=rounds,
            )
        )

    def round(self, round_: int, workers: tuple[int, ...]) -> None:
        for worker in workers:
            self.ready(worker, round_)

    def run_rounds(self, workers: tuple[int, ...], round_: int) -> None:
        """These workers finish round after round until they are assigned no more blocks."""
        for number in range(round_, round_ + 40):
            for worker in workers:
                self.ready(worker, number)
            for worker in workers:
                if not self.has[worker]:
                    self.requests(worker, number + 1)

    def assigned_positions(self, blocks: list[Block]) -> set[int]:
        """How often each of their positions was assigned."""
        counter = Counter(
            one for assignment in self.actions for block in assignment.blocks for one in positions([block])
        )
        return {counter[one] for one in positions(blocks)}

    @property
    def used(self) -> int:
        """Samples of epoch 0 that count as used."""
        (scheduler,) = [self.assigner.state_dict()["scheduler"]]
        left = sum(one["unused"] for one in scheduler["epochs"]["open"] if one["epoch"] == 0)
        return self.samples - left


def positions(blocks: list[Block]) -> list[int]:
    return sorted(one for block in blocks for start, stop in block.ranges for one in range(start, stop))


def assignment_of(assignments: list[AssignBlocks], worker: int) -> AssignBlocks:
    (assignment,) = [assignment for assignment in assignments if assignment.worker == worker]
    return assignment


# Rounds -------------------------------------------------------------------------------------------------


def test_a_round_is_used_once_every_member_is_known_to_have_finished_it():
    job = Job(3)
    job.round(0, (0, 1, 2))
    assert job.used == 0
    job.round(1, (0, 1))
    assert job.used == 0
    job.ready(2, 1)
    assert job.used == 3 * BATCH
    job.round(2, (0, 1, 2))
    assert job.used == 6 * BATCH


def test_a_request_for_more_samples_reports_the_finished_rounds():
    job = Job(2)
    job.round(0, (0, 1))
    job.ready(0, 1)
    job.requests(1, 1)
    assert job.used == 2 * BATCH


def test_rounds_are_not_remembered_until_a_worker_requests_samples():
    job = Job(2, begin=False)
    before = job.assigner.state_dict()
    for round_ in range(5):
        job.names(0, round_, ())
    assert job.assigner.state_dict() == before
    assert job.pop_assignments() == []


def test_each_worker_receives_its_blocks_and_how_far_the_epoch_is():
    job = Job(2)
    for assignment in job.actions:
        assert (assignment.epoch, assignment.is_last, assignment.replaces_queue, assignment.consumed) == (
            0,
            False,
            False,
            0,
        )
        assert "its turn" in assignment.reason
    assert {assignment.worker for assignment in job.actions if assignment.blocks} == {0, 1}
    job.round(0, (0, 1))
    job.round(1, (0, 1))
    assert job.actions[-1].consumed == 2 * BATCH


def test_blocks_of_another_worker_are_refused():
    job = Job(2)
    with pytest.raises(ProtocolError, match="are not worker 0's any more"):
        job.names(0, 0, (job.has[1][0].id,))


# Waiting ------------------------------------------------------------------------------------------------


def last_epoch(samples: int = 2 * BATCH) -> Job:
    """Two members that hold one block each, the last ones."""
    job = Job(2, samples, begin=False)
    for worker in (0, 1):
        job.requests(worker, is_last=True)
    assert [len(job.has[worker]) for worker in (0, 1)] == [1, 1]
    return job


def test_a_member_without_blocks_is_awaited_once_another_is_ready_for_its_round():
    job = Job(3, 6, begin=False)
    for worker in range(3):
        job.requests(worker, is_last=True)
    assert [len(job.has[worker]) for worker in range(3)] == [1, 1, 1]
    for worker in (0, 1, 2):
        job.ready(worker, 0)
    assert not any(assignment.is_awaited for assignment in job.requests(0, 1, is_last=True))
    assert not any(assignment.is_awaited for assignment in job.actions)
    assert assignment_of(job.names(1, 1, ()), 0).is_awaited
    assert assignment_of(job.requests(0, 1, is_last=True), 0).is_awaited  # it had to take two batches


def test_a_member_that_asks_while_its_samples_are_on_their_way_is_not_awaited():
    """The messages cross: the requested samples have been assigned already."""
    job = Job(2)
    job.round(0, (0, 1))
    assert job.has[0]
    job.requests(0, 1)
    assert not any(assignment.is_awaited for assignment in job.ready(1, 1))


def test_members_that_wait_are_awaited_while_another_worker_joins():
    """A worker that joins takes part in a round without having been Ready for it."""
    job = last_epoch()
    job.round(0, (0, 1))
    job.requests(0, 1, is_last=True)
    job.assigner.change_group((0, 1, 2), (2,), 1)
    assignments = job.pop_assignments()
    assert assignment_of(assignments, 0).is_awaited
    assert assignment_of(job.requests(1, 1, is_last=True), 1).is_awaited


def test_a_member_with_some_batches_of_a_round_is_awaited_when_no_more_are_left():
    """A loop that accumulates; all members may be in the same state."""
    job = last_epoch()
    taken = tuple(block.id for block in job.has[0])
    assignment = assignment_of(job.requests(0, is_last=True, started_blocks=taken), 0)
    assert (assignment.is_awaited, assignment.is_last, assignment.blocks) == (True, False, ())


# Death --------------------------------------------------------------------------------------------------


def test_after_a_loss_survivors_repeat_their_contributions_and_get_the_lost_workers_blocks():
    job = Job(3)
    first = [job.has[worker][0] for worker in range(3)]
    job.round(0, (0, 1, 2))
    rest = list(job.has[2])
    job.assigner.on_gone(2, has_reported_all=False)
    assert job.pop_assignments() == []  # its progress is unknown
    job.assigner.repeat_round((0, 1), 0, 0)
    job.pop_assignments()
    assert job.used == 0
    job.run_rounds((0, 1), 1)
    assert job.used == SAMPLES
    assert (job.assigned_positions(first[:2]), job.assigned_positions([first[2], *rest])) == ({1}, {2})


def test_the_contribution_of_a_lost_worker_to_a_round_that_is_not_repeated_is_used():
    job = Job(2)
    first, *rest = job.has[1]
    job.round(0, (0, 1))
    job.assigner.on_gone(1, has_reported_all=False)
    job.assigner.repeat_round((0,), 1, 1)
    job.pop_assignments()
    assert job.used == 2 * BATCH
    job.run_rounds((0,), 1)
    assert (job.assigned_positions([first]), job.assigned_positions(rest)) == ({1}, {2})


def test_the_contribution_of_a_lost_worker_to_a_round_after_the_repeated_one_is_not_used():
    job = Job(3)
    mine = list(job.has[0])
    job.round(0, (0, 1, 2))
    job.ready(0, 1)  # it alone has finished round 0
    job.assigner.on_gone(0, has_reported_all=False)
    job.assigner.repeat_round((1, 2), 0, 0)
    job.pop_assignments()
    job.run_rounds((1, 2), 1)
    assert job.used == SAMPLES
    assert job.assigned_positions(mine) == {2}


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_unreported_contributions_of_a_lost_worker_to_rounds_that_others_finished_are_used(finished):
    job = Job(2)
    mine = list(job.has[1])
    for round_ in range(finished):
        job.ready(0, round_)
    job.assigner.on_gone(1, has_reported_all=False)
    job.assigner.repeat_round((0,), finished, finished)
    job.pop_assignments()
    assert job.used == finished * 2 * BATCH
    job.run_rounds((0,), finished)
    assert job.used == SAMPLES
    assert job.assigned_positions(mine[:finished]) == ({1} if finished else set())
    assert job.assigned_positions(mine[finished:]) == ({2} if finished < 2 else set())


@pytest.mark.parametrize("contributed", [(0, 0), (2, 0), (0, 1), (1, 1), (0, 2)])
def test_as_many_blocks_of_a_lost_worker_are_used_as_the_survivors_report(contributed):
    job = Job(2)
    mine = list(job.has[1])
    for round_, count in enumerate(contributed):
        job.contributes[1, round_] = count
        job.ready(0, round_)
    job.assigner.on_gone(1, has_reported_all=False)
    job.assigner.repeat_round((0,), 2, 2)
    job.pop_assignments()
    assert [(query.worker, query.lost_worker, query.after_round) for query in job.asked] == [(0, 1, -1)]
    job.run_rounds((0,), 2)
    count = sum(contributed)
    assert job.used == SAMPLES
    assert job.assigned_positions(mine[:count]) == ({1} if count else set())
    assert job.assigned_positions(mine[count:]) == ({2} if count < 2 else set())


def test_no_round_is_completed_and_no_block_reassigned_before_a_member_has_answered():
    job = Job(3)
    mine = list(job.has[2])
    job.is_silent = True
    job.ready(0, 0)
    job.ready(1, 0)
    job.assigner.on_gone(2, has_reported_all=False)
    job.assigner.repeat_round((0, 1), 1, 1)
    job.pop_assignments()
    assert [query.worker for query in job.asked] == [0, 1]
    job.run_rounds((0, 1), 1)
    assert job.used == 0
    assert job.assigned_positions(mine) == {1}
    job.reports(job.asked[0], since=1)  # it has no record of round 0
    assert job.used == 0
    job.reports(job.asked[1])
    assert job.used == SAMPLES - BATCH
    assignment = assignment_of(job.requests(0, 41, epoch=1), 0)
    assert set(positions(assignment.blocks)) <= set(positions(mine[1:]))  # and the other half is for worker 1


def test_when_the_queried_members_are_lost_too_others_are_queried():
    job = Job(3)
    mine = list(job.has[2])
    job.is_silent = True
    job.ready(0, 0)
    job.ready(1, 0)
    for worker in (2, 0):
        job.assigner.on_gone(worker, has_reported_all=False)
    job.assigner.repeat_round((1,), 1, 1)
    job.pop_assignments()
    job.is_silent = False
    job.assigner.repeat_round((1,), 1, 1)
    job.pop_assignments()
    assert {(query.worker, query.lost_worker) for query in job.asked} >= {(1, 2)}
    job.run_rounds((1,), 1)
    assert job.used == SAMPLES
    assert job.assigned_positions(mine[:1]) == {1}


def test_a_worker_given_up_on_that_returns_reports_its_own_contributions():
    job = Job(2)
    mine = list(job.has[1])
    job.is_silent = True
    job.ready(0, 0)
    job.ready(0, 1)
    job.assigner.repeat_round((0,), 2, 2)
    job.pop_assignments()
    job.names(1, 0, (mine[0].id,))
    job.names(1, 1, ())
    job.names(1, 2, ())
    job.reports(job.asked[0])  # too late to count
    job.run_rounds((0,), 2)
    assert job.used == SAMPLES
    assert (job.assigned_positions(mine[:1]), job.assigned_positions(mine[1:])) == ({1}, {2})


def test_an_unreported_contribution_of_a_worker_that_leaves_in_order_does_not_count():
    job = Job(2)
    mine = list(job.has[1])
    job.ready(0, 0)
    job.assigner.on_gone(1, has_reported_all=True)
    job.assigner.repeat_round((0,), 1, 1)
    job.pop_assignments()
    job.run_rounds((0,), 1)
    assert job.assigned_positions(mine) == {2}


def test_a_worker_that_contributed_nothing_to_a_round_has_not_used_its_blocks_of_that_round():
    job = Job(3, 6, begin=False)
    for worker in range(3):
        job.requests(worker, is_last=True)
    job.round(0, (0, 1))
    (block,) = job.has[2]
    job.requests(0, 1, is_last=True)
    assert assignment_of(job.names(1, 1, ()), 0).is_awaited
    job.assigner.on_left_group(2)  # it returns to the pool and is assigned to worker 0
    job.pop_assignments()
    assert positions(job.has[0]) == positions([block])
    job.contributes[0, 1] = 0
    job.assigner.on_gone(0, has_reported_all=False)
    job.assigner.repeat_round((1,), 2, 2)
    job.pop_assignments()
    assert job.assigned_positions([block]) == {3}


# Changes ------------------------------------------------------------------------------------------------


def test_a_contribution_of_a_worker_excluded_before_its_step_is_withdrawn_and_reassigned():
    job = Job(3, 2 * SAMPLES)
    job.round(0, (0, 1, 2))
    mine = list(job.has[2])
    job.ready(2, 1)
    job.assigner.change_group((0, 1), (), 1)
    job.pop_assignments()
    job.round(1, (0, 1))
    assert assignment_of(job.names(2, 1, (), step=1), 2).replaces_queue
    job.run_rounds((0, 1), 2)
    assert job.used == 2 * SAMPLES
    assert job.assigned_positions(mine) == {2}


def test_an_excluded_worker_keeps_its_blocks_until_it_acknowledges_the_change():
    job = Job(2)
    last, *rest = job.has[1]
    job.assigner.change_group((0,), (), 1)
    job.pop_assignments()
    job.ready(0, 0)
    job.ready(0, 1)
    assert (job.assigned_positions([last, *rest]), job.used) == ({1}, 0)
    job.ready(1, 0)  # late: its last step is that before the group's
    assert job.used == 0
    assert assignment_of(
        job.names(1, 1, ()), 1
    ).replaces_queue  # it has computed for a step in which it has no part
    assert job.used == 2 * BATCH
    job.run_rounds((0,), 2)
    assert (job.assigned_positions([last]), job.assigned_positions(rest)) == ({1}, {2})


def test_an_excluded_worker_that_hangs_is_given_up_on_after_a_timeout_and_its_last_round_counts():
    job = Job(2)
    mine = list(job.has[1])
    job.assigner.change_group((0,), (), 1)
    job.ready(0, 0)
    job.assigner.on_tick(50.0, 5.0)
    assert job.used == 0  # no worker is known to be past the change
    job.ready(0, 1)
    job.assigner.on_group_in_force(50.0)
    job.assigner.on_tick(55.0, 5.0)
    assert job.used == 0
    job.assigner.on_tick(55.1, 5.0)
    assert assignment_of(job.pop_assignments(), 1).replaces_queue
    assert job.used == 2 * BATCH
    assert job.names(1, 0, (mine[0].id,)) == []  # its message arrives at last
    assert job.used == 2 * BATCH


def test_a_leaving_worker_s_last_contribution_counts_once_though_it_arrives_late():
    job = Job(2)
    job.assigner.change_group((0,), (), 1)
    job.pop_assignments()
    job.ready(0, 0)
    job.ready(0, 1)
    job.assigner.on_group_in_force(0.0)
    job.ready(1, 0)
    job.assigner.on_left_group(1)
    assert job.used == 2 * BATCH


def test_a_leaving_worker_whose_loop_is_over_is_not_waited_for():
    job = Job(2)
    job.round(0, (0, 1))
    job.assigner.change_group((0,), (), 1)
    job.assigner.on_finished(1)
    theirs = list(job.has[1])
    job.requests(0, 1)
    assert job.used == 2 * BATCH
    job.run_rounds((0,), 1)
    assert job.assigned_positions(theirs) == {2}  # its blocks go to the other


def test_a_checkpoint_saved_after_another_worker_has_ended_holds_nothing_of_that_worker_s_queue():
    job = Job(2)
    job.round(0, (0, 1))
    assert job.has[1]
    job.assigner.on_finished(1)
    job.assigner.on_checkpoint_query(CheckpointQuery(now_s=0.0, worker=0, round=1))
    (answer,) = [action for action in job.assigner.pop_actions() if isinstance(action, ConsumedSamples)]
    ((epoch, ranges),) = answer.consumed
    assert (epoch, sum(stop - start for start, stop in ranges)) == (0, 2 * BATCH)


def test_a_worker_lost_after_its_exclusion_has_finished_its_last_round_and_no_more():
    job = Job(2)
    mine = list(job.has[1])
    job.assigner.change_group((0,), (), 1)
    for round_ in range(2):
        job.ready(0, round_)
    job.assigner.on_group_in_force(0.0)
    job.assigner.on_gone(1, has_reported_all=False)
    job.pop_assignments()
    assert job.used == 2 * BATCH
    job.run_rounds((0,), 2)
    assert (job.assigned_positions(mine[:1]), job.assigned_positions(mine[1:])) == ({1}, {2})


def test_a_worker_excluded_in_a_repetition_loses_its_blocks_at_once():
    job = Job(3)
    job.assigner.repeat_round((0, 1), 0, 0)
    assert assignment_of(job.pop_assignments(), 2).replaces_queue


# Loops that break off or are over -----------------------------------------------------------------------


def test_a_loop_that_breaks_off_cuts_the_epoch_and_is_assigned_new_blocks():
    job = Job(2)
    job.round(0, (0, 1))
    assignment = assignment_of(job.requests(0, 1, epoch=1, abandons_previous=True), 0)
    assert assignment.replaces_queue
    assert {block.epoch for block in assignment.blocks} == {1}
    assert assignment_of(job.requests(1, 1, epoch=1, abandons_previous=True), 1).replaces_queue
    job.round(1, (0, 1))
    job.round(2, (0, 1))
    assert job.used == job.samples  # or discarded


def test_a_loop_may_break_off_again_while_others_hold_an_earlier_epoch():
    job = Job(2)
    for epoch in (1, 2, 3):
        job.requests(0, epoch=epoch, abandons_previous=True)
    assert {block.epoch for block in job.has[0]} == {3}


def test_a_worker_whose_loop_is_over_is_assigned_nothing_and_the_others_continue():
    job = Job(2)
    job.round(0, (0, 1))
    job.assigner.on_finished(1)
    assignments = [*job.pop_assignments(), *job.ready(0, 1), *job.ready(0, 2), *job.ready(0, 3)]
    assert all(assignment.worker == 0 for assignment in assignments)
    assert job.used >= 2 * BATCH


def test_a_worker_outside_is_informed_of_the_progress_of_the_epoch():
    job = Job(3)
    job.assigner.repeat_round((0, 1), 0, 0)
    job.pop_assignments()
    job.assigner.on_ready_outside(2)
    (assignment,) = job.pop_assignments()
    assert (assignment.worker, assignment.blocks, assignment.replaces_queue, assignment.is_last) == (
        2,
        (),
        False,
        False,
    )
    assert "so far" in assignment.reason


# Random histories ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=40))
def test_a_state_at_any_point_gives_the_same_future(script):
    """Also through JSON, and between an event and the actions that it causes."""
    one = Job(4, 30 * BATCH)
    other: GroupBlockAssigner | None = None
    rounds = Counter[int]()
    alive = {0, 1, 2, 3}
    step = 0
    for number, (kind, worker) in enumerate(script):
        calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        if worker not in alive:
            continue
        if kind < 3:
            ids = tuple(block.id for block in one.has[worker][:1])
            round_ = max(rounds[worker], rounds[min(alive)])
            event = Ready(
                now_s=0.0, worker=worker, generation=0, epoch=0, step=round_, round=round_,
                compute_s=0.1, samples=0, blocks=ids,
            )  # fmt: skip
            if len({rounds[other_one] for other_one in alive}) > 1 and rounds[worker] > min(
                rounds[other_one] for other_one in alive
            ):
                continue
            calls = [("on_ready", (event,), {})]
            rounds[worker] += 1
            del one.has[worker][:1]
        elif kind == 3 and len(alive) > 1:
            alive.discard(worker)
            calls = [("on_gone", (worker,), {"has_reported_all": number % 2 == 0})]
            step = min(rounds[other_one] for other_one in alive)
            furthest = max(0, min(rounds[other_one] for other_one in alive) - 1)
            calls.append(("repeat_round", (sorted(alive), furthest, step), {}))
        elif kind == 4:
            calls = [("on_ready_outside", (worker,), {})]
        elif kind == 5:
            calls = [("on_tick", (float(number), 1.0), {})]
        else:
            calls = [("on_group_in_force", (float(number),), {})]
        for name, arguments, named in calls:
            answers = []
            for assigner in (one.assigner, other):
                if assigner is None:
                    continue
                try:
                    answers.append(getattr(assigner, name)(*copy.deepcopy(arguments), **named))
                except ProtocolError as error:
                    answers.append(str(error))
            assert all(answer == answers[0] for answer in answers)
            restored = GroupBlockAssigner()
            restored.load_state_dict(json.loads(json.dumps(one.assigner.state_dict())))
            if other is None or number % 3 == 0:
                other = restored
            assert restored.state_dict() == one.assigner.state_dict() == other.state_dict()
        if other is not None:
            actions = other.pop_actions()
            assert actions == one.pop_assignments()


def test_the_order_of_messages_does_not_change_which_samples_are_used():
    """Messages of one worker arrive in order; those of the others may arrive before or after."""
    uses = []
    for turns in ((0, 1), (1, 0)):
        job = Job(2)
        used: Counter[int] = Counter()
        for round_ in range(SAMPLES // BATCH):
            for worker in turns:
                if job.has[worker]:
                    used.update(positions(job.has[worker][:1]))
                    job.ready(worker, round_)
        uses.append(used)
    assert uses[0] == uses[1] == Counter(range(SAMPLES))


def test_a_checkpoint_during_a_late_member_s_absence_is_current_and_holds_nothing_of_it():
    """Its next Ready says that it lacks in the checkpoint, and that it has finished later rounds."""
    job = Job(3)
    job.round(0, (0, 1, 2))
    job.ready(0, 1)
    job.ready(1, 1)
    held = {block.id for block in job.has[2]}
    job.assigner.on_checkpoint_query(CheckpointQuery(now_s=0.0, worker=0, round=2))
    assert not [action for action in job.assigner.pop_actions() if isinstance(action, ConsumedSamples)]
    for round_ in (2, 3):
        job.ready(0, round_)
        job.ready(1, round_)
    ids = tuple(block.id for block in job.has[2][:1])
    positions = set(range(*job.has[2][0].ranges[0]))
    job.assigner.on_ready(
        Ready(
            now_s=0.0,
            worker=2,
            generation=0,
            epoch=0,
            step=4,
            round=4,
            compute_s=0.1,
            samples=0,
            blocks=ids,
        )
    )
    (answer,) = [action for action in job.assigner.pop_actions() if isinstance(action, ConsumedSamples)]
    assert set(ids) <= held
    assert answer.is_current
    consumed = {
        position for _, ranges in answer.consumed for start, stop in ranges for position in range(start, stop)
    }
    assert len(consumed) == 5 * BATCH  # three blocks in round 0, two in round 1
    assert not consumed & positions


def test_a_checkpoint_waits_no_longer_for_a_late_member_that_asks_for_samples_in_a_later_round():
    """It has contributed to no round that its request comes after."""
    job = Job(2)
    job.round(0, (0, 1))
    job.ready(0, 1)
    job.assigner.on_checkpoint_query(CheckpointQuery(now_s=0.0, worker=0, round=2))
    assert not [action for action in job.assigner.pop_actions() if isinstance(action, ConsumedSamples)]
    job.assigner.on_samples_requested(
        SamplesRequested(
            now_s=0.0,
            worker=1,
            epoch=0,
            samples=SAMPLES,
            batch_size=BATCH,
            is_last=False,
            abandons_previous=False,
            blocks_max=0,
            started_blocks=(),
            round=2,
            consumed_ranges=(),
        )
    )
    (answer,) = [action for action in job.assigner.pop_actions() if isinstance(action, ConsumedSamples)]
    assert answer.is_current
