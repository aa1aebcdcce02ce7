"""Late blocks of workers outside the group: which block is assigned, to which proxy, and if it counts."""

from __future__ import annotations

import json

import pytest

from offbeat.events import (
    AssignBlocks,
    AssignLateBlock,
    ContributionReport,
    LateGradientArrived,
    Ready,
    ResolveLateBlock,
    SamplesRequested,
)
from offbeat.policies.data.group_assigner import GroupBlockAssigner

SAMPLES, BATCH = 80, 4


class Job:
    """Members 0 and 1; worker 9 is outside, in the same epoch, and knows it."""

    def __init__(self, staleness: int = 5) -> None:
        self.assigner = GroupBlockAssigner(staleness)
        self.assigner.change_group((0, 1), (), 0)
        self.pending_actions = [action for worker in (0, 1, 9) for action in self.requests(worker)]

    def requests(
        self, worker: int, epoch: int = 0, *, is_last: bool = True, skips: bool = False, round: int = 0
    ) -> list:
        self.assigner.on_samples_requested(
            SamplesRequested(
                now_s=0.0,
                worker=worker,
                epoch=epoch,
                samples=SAMPLES,
                batch_size=BATCH,
                is_last=is_last,
                abandons_previous=skips,
                blocks_max=0,
                started_blocks=(),
                round=round,
                consumed_ranges=(),
            )
        )
        return self.assigner.pop_actions()

    def ready(self, worker: int, round_: int, blocks: tuple[int, ...]) -> list:
        self.assigner.on_ready(
            Ready(
                now_s=0.0,
                worker=worker,
                generation=0,
                epoch=0,
                step=round_,
                round=round_,
                compute_s=0.1,
                samples=4,
                blocks=blocks,
            )
        )
        return self.assigner.pop_actions()

    def arrives(self, proxy: int, number: int, *, of: int = 0, by: int = 3) -> list:
        """The gradient of parameters of step `of` has arrived when step `by` has been begun."""
        self.assigner.on_late_gradient(
            LateGradientArrived(now_s=0.0, worker=proxy, late_worker=9, assignment=number, step=of), by
        )
        return self.assigner.pop_actions()

    def use_up(self) -> list:
        """The members use all their blocks, and ask for more when they have none."""
        queues = {worker: [b.id for b in blocks_of(self.pending_actions, worker)] for worker in (0, 1)}
        pending_actions: list = []
        for round_ in range(SAMPLES):
            for worker, queue in queues.items():
                new = (
                    self.ready(worker, round_, (queue.pop(0),))
                    if queue
                    else self.requests(worker, round=round_)
                )
                pending_actions += new
                for other in queues:
                    queues[other] += [block.id for block in blocks_of(new, other)]
            if any(isinstance(action, AssignBlocks) and action.is_last for action in pending_actions):
                break
        return pending_actions


def blocks_of(actions: list, worker: int) -> list:
    return [b for a in actions if isinstance(a, AssignBlocks) and a.worker == worker for b in a.blocks]


def of(kind: type, actions: list) -> list:
    return [action for action in actions if isinstance(action, kind)]


def only(kind: type, actions: list):
    (action,) = of(kind, actions)
    return action


def used(job: Job) -> int:
    return job.assigner._scheduler.epochs.used_count(0)


def test_a_worker_outside_is_assigned_a_late_block_that_no_other_worker_has():
    job = Job()
    late = only(AssignLateBlock, job.pending_actions)
    assert (late.worker, late.assignment, late.proxy) == (9, 0, 0)
    of_members = [b.ranges for worker in (0, 1) for b in blocks_of(job.pending_actions, worker)]
    assert late.block.ranges not in of_members


def test_no_late_block_is_assigned_where_late_gradients_are_dropped():
    assigner = GroupBlockAssigner()
    assigner.change_group((0, 1), (), 0)
    assigner.on_idle(9)
    job = Job.__new__(Job)
    job.assigner = assigner
    assert not of(AssignLateBlock, [action for worker in (0, 1, 9) for action in job.requests(worker)])


def test_a_late_gradient_that_arrived_is_the_proxy_s_and_is_used_in_its_round():
    job = Job()
    block = only(AssignLateBlock, job.pending_actions).block
    pending_actions = job.arrives(0, 0)
    assert only(ResolveLateBlock, pending_actions) == ResolveLateBlock(
        worker=0,
        late_worker=9,
        assignment=0,
        is_contributed=True,
        reason="its parameters are 4 of at most 5 steps old",
    )
    assert only(AssignLateBlock, pending_actions).assignment == 1  # and the next one at once
    own = [blocks_of(job.pending_actions, worker)[0].id for worker in (0, 1)]
    job.ready(0, 0, (own[0], block.id))
    job.ready(1, 0, (own[1],))
    assert used(job) == 0
    for worker in (0, 1):
        job.ready(worker, 1, ())
    assert used(job) == 3 * BATCH


@pytest.mark.parametrize(("by", "counts"), [(4, True), (5, False)])
def test_parameters_may_be_so_old_and_no_older(by, counts):
    """The next round is that of step `by` + 1."""
    job = Job(staleness=5)
    assert only(ResolveLateBlock, job.arrives(0, 0, of=0, by=by)).is_contributed == counts


def test_a_late_block_that_does_not_count_is_assigned_again():
    job = Job()
    late = only(AssignLateBlock, job.pending_actions)
    again = only(AssignLateBlock, job.arrives(0, 0, of=0, by=99))
    assert (again.assignment, again.block.ranges) == (1, late.block.ranges)


def test_a_late_block_that_was_resolved_before_is_not_resolved_again():
    job = Job()
    job.arrives(0, 0)
    assert not job.arrives(0, 0)
    assert not job.arrives(1, 1)  # another worker is its proxy


def test_when_a_late_worker_is_lost_others_get_its_block_and_its_gradient_does_not_count():
    job = Job()
    job.assigner.on_gone(9, has_reported_all=True)
    assert not only(ResolveLateBlock, job.assigner.pop_actions()).is_contributed
    assert not job.arrives(0, 0)
    assert used_up(job)


def test_when_the_proxy_dies_another_is_named():
    job = Job()
    late = only(AssignLateBlock, job.pending_actions)
    job.assigner.on_gone(0, has_reported_all=True)
    again = only(AssignLateBlock, job.assigner.pop_actions())
    assert again.proxy == 1
    assert again.block.id != late.block.id
    assert not job.arrives(0, 0)


def test_unused_samples_of_a_lost_proxy_return_to_the_pool():
    job = Job()
    job.arrives(0, 0)
    before = job.assigner._scheduler.epochs[0].pooled
    job.assigner.on_gone(0, has_reported_all=True)
    assert job.assigner._scheduler.epochs[0].pooled >= before + BATCH


def test_a_round_that_is_repeated_has_the_late_block_again():
    job = Job()
    block = only(AssignLateBlock, job.pending_actions).block
    job.arrives(0, 0)
    own = blocks_of(job.pending_actions, 0)[0].id
    job.ready(0, 0, (own, block.id))
    job.assigner.on_gone(1, has_reported_all=True)
    job.assigner.repeat_round((0,), 0, 0)
    rounds = job.assigner._scheduler.rounds
    assert rounds.blocks_from(0) == list(rounds.contribution(0, 0))
    assert block in rounds.contribution(0, 0)


def test_a_worker_that_joins_the_group_has_no_late_block_any_more():
    job = Job()
    job.assigner.change_group((0, 1, 9), (9,), 3)
    pending_actions = job.assigner.pop_actions()
    assert not only(ResolveLateBlock, pending_actions).is_contributed
    assert next(
        blocks_assigned
        for blocks_assigned in of(AssignBlocks, pending_actions)
        if blocks_assigned.worker == 9
    ).replaces_queue
    assert not job.arrives(0, 0)


def test_a_worker_that_leaves_the_epoch_early_has_no_late_block_any_more():
    job = Job()
    pending_actions = job.requests(9, 1, skips=True)
    assert not only(ResolveLateBlock, pending_actions).is_contributed


def test_a_late_block_is_resolved_when_other_members_wait_for_it():
    job = Job()
    pending_actions = job.use_up()
    assert only(ResolveLateBlock, pending_actions).reason == "other members wait for the block"
    assert not job.arrives(0, 0)
    assert used_up(job, pending_actions)


def used_up(job: Job, pending_actions: list | None = None) -> bool:
    pending_actions = job.use_up() if pending_actions is None else pending_actions
    return any(blocks_assigned.is_last for blocks_assigned in of(AssignBlocks, pending_actions))


def test_a_restored_assigner_continues_identically():
    one = Job()
    other = Job()
    other.assigner = GroupBlockAssigner(5)
    other.assigner.load_state_dict(json.loads(json.dumps(one.assigner.state_dict())))
    assert one.arrives(0, 0) == other.arrives(0, 0)
    assert one.use_up() == other.use_up()


def test_a_worker_outside_gets_a_late_block_only_once_it_is_known_what_it_has_contributed():
    """It may still have blocks: it skipped round 1, which nobody has said yet, and was then excluded."""
    job = Job()
    own = {worker: blocks_of(job.pending_actions, worker)[0].id for worker in (0, 1)}
    job.ready(0, 0, (own[0],))
    job.ready(1, 0, (own[1],))
    job.ready(0, 1, ())
    job.assigner.repeat_round((0,), 2, 2)
    job.assigner.pop_actions()
    assert not of(AssignLateBlock, job.requests(1, round=2))
    job.assigner.on_contribution_report(
        ContributionReport(now_s=0.0, worker=0, lost_worker=1, first_round=0, end_round=2, contributions=())
    )
    assert [deal.worker for deal in of(AssignBlocks, job.assigner.pop_actions()) if deal.replaces_queue] == [
        1
    ]
    assert only(AssignLateBlock, job.requests(1, round=2)).worker == 1
