"""Loans to workers outside the group, by hand: who is lent what, for whom, and what of it counts."""

from __future__ import annotations

import json

import pytest

from offbeat.events import (
    AssignBlocks,
    AssignLateBlock,
    LateGradientArrived,
    Ready,
    ResolveLateBlock,
    SamplesRequested,
)
from offbeat.policies.data.group_assigner import GroupBlockAssigner

SAMPLES, BATCH = 80, 4


class Job:
    """Members 0 and 1; worker 9 stands outside, in the same epoch, and knows it."""

    def __init__(self, staleness: int = 5) -> None:
        self.dealing = GroupBlockAssigner(staleness)
        self.dealing.change_group((0, 1), (), 0)
        self.said = [action for worker in (0, 1, 9) for action in self.wants(worker)]

    def wants(
        self, worker: int, epoch: int = 0, *, is_last: bool = True, skips: bool = False, round: int = 0
    ) -> list:
        self.dealing.on_samples_requested(
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
        return self.dealing.pop_actions()

    def ready(self, worker: int, round_: int, blocks: tuple[int, ...]) -> list:
        self.dealing.on_ready(
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
        return self.dealing.pop_actions()

    def brought(self, patron: int, number: int, *, of: int = 0, by: int = 3) -> list:
        """The gradient of parameters of step `of` is there when step `by` has been begun."""
        self.dealing.on_late_gradient(
            LateGradientArrived(now_s=0.0, worker=patron, late_worker=9, assignment=number, step=of), by
        )
        return self.dealing.pop_actions()

    def use_up(self) -> list:
        """The members use all that they get, and ask when they have nothing."""
        hands = {worker: [b.id for b in blocks_of(self.said, worker)] for worker in (0, 1)}
        said: list = []
        for round_ in range(SAMPLES):
            for worker, hand in hands.items():
                new = self.ready(worker, round_, (hand.pop(0),)) if hand else self.wants(worker, round=round_)
                said += new
                for other in hands:
                    hands[other] += [block.id for block in blocks_of(new, other)]
            if any(isinstance(action, AssignBlocks) and action.is_last for action in said):
                break
        return said


def blocks_of(actions: list, worker: int) -> list:
    return [b for a in actions if isinstance(a, AssignBlocks) and a.worker == worker for b in a.blocks]


def of(kind: type, actions: list) -> list:
    return [action for action in actions if isinstance(action, kind)]


def only(kind: type, actions: list):
    (action,) = of(kind, actions)
    return action


def used(job: Job) -> int:
    return job.dealing._scheduler.used_count(0)


def test_one_outside_is_lent_a_block_that_nobody_else_has_for_a_member():
    job = Job()
    lend = only(AssignLateBlock, job.said)
    assert (lend.worker, lend.assignment, lend.proxy) == (9, 0, 0)
    dealt = [b.ranges for worker in (0, 1) for b in blocks_of(job.said, worker)]
    assert lend.block.ranges not in dealt


def test_nothing_is_lent_where_late_gradients_are_dropped():
    dealing = GroupBlockAssigner()
    dealing.change_group((0, 1), (), 0)
    dealing.on_idle(9)
    job = Job.__new__(Job)
    job.dealing = dealing
    assert not of(AssignLateBlock, [action for worker in (0, 1, 9) for action in job.wants(worker)])


def test_what_was_brought_is_the_patron_s_and_is_used_in_its_round():
    job = Job()
    block = only(AssignLateBlock, job.said).block
    said = job.brought(0, 0)
    assert only(ResolveLateBlock, said) == ResolveLateBlock(
        worker=0,
        late_worker=9,
        assignment=0,
        is_contributed=True,
        reason="its parameters are 4 of at most 5 steps old",
    )
    assert only(AssignLateBlock, said).assignment == 1  # and the next one at once
    own = [blocks_of(job.said, worker)[0].id for worker in (0, 1)]
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
    assert only(ResolveLateBlock, job.brought(0, 0, of=0, by=by)).is_contributed == counts


def test_what_does_not_count_is_lent_again():
    job = Job()
    lend = only(AssignLateBlock, job.said)
    again = only(AssignLateBlock, job.brought(0, 0, of=0, by=99))
    assert (again.assignment, again.block.ranges) == (1, lend.block.ranges)


def test_a_loan_that_was_settled_before_is_not_settled_again():
    job = Job()
    job.brought(0, 0)
    assert not job.brought(0, 0)
    assert not job.brought(1, 1)  # its patron is another


def test_when_the_late_one_dies_others_get_the_block_and_what_it_brings_does_not_count():
    job = Job()
    job.dealing.on_gone(9, has_reported_all=True)
    assert not only(ResolveLateBlock, job.dealing.pop_actions()).is_contributed
    assert not job.brought(0, 0)
    assert used_up(job)


def test_when_the_patron_dies_another_is_named():
    job = Job()
    lend = only(AssignLateBlock, job.said)
    job.dealing.on_gone(0, has_reported_all=True)
    again = only(AssignLateBlock, job.dealing.pop_actions())
    assert again.proxy == 1
    assert again.block.id != lend.block.id
    assert not job.brought(0, 0)


def test_what_a_dead_patron_had_not_used_comes_back():
    job = Job()
    job.brought(0, 0)
    before = job.dealing._scheduler._epochs[0].pooled
    job.dealing.on_gone(0, has_reported_all=True)
    assert job.dealing._scheduler._epochs[0].pooled >= before + BATCH


def test_a_round_that_is_repeated_has_the_late_block_again():
    job = Job()
    block = only(AssignLateBlock, job.said).block
    job.brought(0, 0)
    own = blocks_of(job.said, 0)[0].id
    job.ready(0, 0, (own, block.id))
    job.dealing.on_gone(1, has_reported_all=True)
    job.dealing.repeat_round((0,), 0, 0)
    assert job.dealing._scheduler._rounds[0].keys() == {0}
    assert block in job.dealing._scheduler._rounds[0][0]


def test_who_joins_the_group_has_no_loan_any_more():
    job = Job()
    job.dealing.change_group((0, 1, 9), (9,), 3)
    said = job.dealing.pop_actions()
    assert not only(ResolveLateBlock, said).is_contributed
    assert next(deal for deal in of(AssignBlocks, said) if deal.worker == 9).replaces_queue
    assert not job.brought(0, 0)


def test_who_leaves_the_epoch_early_has_no_loan_any_more():
    job = Job()
    said = job.wants(9, 1, skips=True)
    assert not only(ResolveLateBlock, said).is_contributed


def test_when_the_others_wait_for_it_the_block_is_called_in():
    job = Job()
    said = job.use_up()
    assert only(ResolveLateBlock, said).reason == "other members wait for the block"
    assert not job.brought(0, 0)
    assert used_up(job, said)


def used_up(job: Job, said: list | None = None) -> bool:
    said = job.use_up() if said is None else said
    return any(deal.is_last for deal in of(AssignBlocks, said))


def test_it_goes_on_alike_from_its_state():
    one = Job()
    other = Job()
    other.dealing = GroupBlockAssigner(5)
    other.dealing.load_state_dict(json.loads(json.dumps(one.dealing.state_dict())))
    assert one.brought(0, 0) == other.brought(0, 0)
    assert one.use_up() == other.use_up()
