"""The block scheduler: each position is used exactly once while workers are slow, die, leave or join."""

import json
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offbeat.errors import ProtocolError
from offbeat.events import Block
from offbeat.policies.data.block_scheduler import BlockAssignment, BlockScheduler


def positions(*blocks: Block) -> list[int]:
    return [position for block in blocks for start, stop in block.ranges for position in range(start, stop)]


def running(members: int = 2, samples: int = 100, batch_size: int = 4, hold: bool = False, **arguments):
    """A scheduler with members 0, 1, … in epoch 0, nothing assigned yet."""
    scheduler = BlockScheduler(**arguments)
    scheduler.set_members(range(members))
    for worker in range(members):
        scheduler.begin_epoch(worker, 0, samples, batch_size, hold)
    return scheduler


def sizes(assigned: list[BlockAssignment]) -> dict[int, list[int]]:
    return {worker: [block.samples for block in blocks] for worker, blocks, _ in assigned}


def ids(assigned: list[BlockAssignment]) -> dict[int, list[int]]:
    return {worker: [block.id for block in blocks] for worker, blocks, _ in assigned}


def most(batch_size: int) -> int:
    """Positions in a block at most."""
    return 3 if batch_size == 2 else batch_size


def pool(scheduler: BlockScheduler, epoch: int = 0) -> list[int]:
    """Positions that are assigned to no worker."""
    for one in scheduler.state_dict()["epochs"]["open"]:
        if one["epoch"] == epoch:
            return sorted(position for start, stop in one["pool"] for position in range(start, stop))
    return []


def copy(scheduler: BlockScheduler, **arguments) -> BlockScheduler:
    other = BlockScheduler(**arguments)
    other.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    return other


def contents(scheduler: BlockScheduler) -> dict[str, object]:
    """All attributes of a scheduler, and of its parts."""
    return {name: getattr(value, "__dict__", value) for name, value in vars(scheduler).items()}


# Assignment ---------------------------------------------------------------------------------------------


def test_blocks_are_assigned_one_to_each_member_at_a_time_up_to_ahead():
    scheduler = running(members=2, samples=100, batch_size=4, ahead=2)
    assert scheduler.assign() == [
        BlockAssignment(0, (Block(0, 0, ((0, 4),)), Block(2, 0, ((8, 12),))), is_epoch_over=False),
        BlockAssignment(1, (Block(1, 0, ((4, 8),)), Block(3, 0, ((12, 16),))), is_epoch_over=False),
    ]
    assert scheduler.assign() == []
    assert scheduler.mark_started(0, 0)
    assert ids(scheduler.assign()) == {0: [4]}


def test_a_member_that_asks_often_gets_its_next_block_only_when_the_others_have_had_theirs():
    scheduler = running(ahead=2)
    scheduler.assign()
    scheduler.mark_started(0, 0)
    assert ids(scheduler.assign()) == {0: [4]}
    scheduler.mark_started(0, 2)
    assert ids(scheduler.assign()) == {}
    scheduler.mark_started(1, 1)
    assert ids(scheduler.assign()) == {0: [6], 1: [5]}


def test_a_member_without_blocks_is_served_out_of_turn_because_others_may_wait_for_it():
    scheduler = running(ahead=1)
    assert ids(scheduler.assign()) == {0: [0], 1: [1]}
    for expected in range(2, 10):
        scheduler.mark_started(0, expected - 1 if expected > 2 else 0)
        assert ids(scheduler.assign()) == {0: [expected]}


def test_a_worker_that_is_no_member_is_assigned_nothing():
    scheduler = running(members=1)
    scheduler.begin_epoch(7, 0, 100, 4)
    assert set(ids(scheduler.assign())) == {0}


def test_a_member_that_has_not_begun_an_epoch_is_assigned_nothing():
    scheduler = BlockScheduler()
    scheduler.set_members([0, 1])
    scheduler.begin_epoch(1, 0, 100, 4)
    assert set(ids(scheduler.assign())) == {1}


def test_a_member_served_out_of_turn_at_the_end_leaves_the_others_an_equal_part():
    scheduler = running(members=2, samples=18, batch_size=4, ahead=1)
    assert sizes(scheduler.assign()) == {0: [4], 1: [4]}
    scheduler.mark_started(0, 0)
    assert sizes(scheduler.assign()) == {0: [3]}
    scheduler.mark_started(0, 2)
    assert sizes(scheduler.assign()) == {0: [4]}
    assert len(pool(scheduler)) == 3


def test_starting_a_block_also_starts_the_blocks_before_it():
    scheduler = running(ahead=3)
    scheduler.assign()
    assert scheduler.mark_started(0, 2)
    assert scheduler.mark_started(0, 0)
    assert scheduler.set_members([1]) == {0: (4,)}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (17, [[3, 2], [2, 2], [2, 2], [2, 2]]),  # two assignments, not 4 a member and 1 for one of them
        (32, [[4, 4]] * 4),
        (31, [[4, 4]] * 3 + [[4, 3]]),
        (16, [[4]] * 4),
        (15, [[4], [4], [4], [3]]),
        (8, [[2]] * 4),
        (7, [[3], [2], [2], []]),  # no single positions
        (5, [[3], [2], [], []]),
        (3, [[3], [], [], []]),
        (1, [[1], [], [], []]),
    ],
)
def test_the_last_two_assignments_are_cut_into_equal_parts(samples, expected):
    assigned = sizes(running(members=4, samples=samples, batch_size=4).assign())
    assert [assigned[worker] for worker in range(4)] == expected


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (35, [[4, 4]] * 4),
        (31, [[4, 4], [4, 4], [4, 4], [4]]),
        (11, [[4], [4], [], []]),
        (4, [[4], [], [], []]),
        (3, [[], [], [], []]),
    ],
)
def test_with_drop_last_blocks_are_full_and_the_remainder_is_left_out(samples, expected):
    scheduler = BlockScheduler()
    scheduler.set_members(range(4))
    for worker in range(4):
        scheduler.begin_epoch(worker, 0, samples, 4, drop_last=True)
    assigned = scheduler.assign()
    assert [sizes(assigned).get(worker, []) for worker in range(4)] == expected
    blocks = [block for _, blocks, _ in assigned for block in blocks]
    assert sorted([*positions(*blocks), *pool(scheduler)]) == list(range(samples - samples % 4))
    assert scheduler.epochs.is_finished(0) == (samples < 4)


def test_an_epoch_with_drop_last_resumes_from_a_state_and_drops_no_more():
    first = BlockScheduler()
    first.set_members([0])
    first.begin_epoch(0, 0, 27, 4, drop_last=True)
    first.assign()
    assert first.contribute(0, 0, [0])
    first.complete_round(0)
    used = first.used_ranges(1)[0]
    assert used == ((0, 4), (24, 27))

    second = BlockScheduler(ahead=9)
    second.set_members([0, 1])
    for worker in (0, 1):
        second.begin_epoch(worker, 0, 27, 4, used_ranges=used, drop_last=True)
    assigned = [block for _, blocks, _ in second.assign() for block in blocks]
    assert {block.samples for block in assigned} == {4}
    assert sorted(positions(*assigned)) == list(range(4, 24))


def test_an_epoch_that_resumes_with_another_batch_size_drops_the_remainder_of_that_size():
    scheduler = BlockScheduler(ahead=9)
    scheduler.set_members([0])
    scheduler.begin_epoch(0, 0, 27, 6, used_ranges=((0, 4), (10, 12)), drop_last=True)
    ((_, blocks, _),) = scheduler.assign()
    assert [block.samples for block in blocks] == [6, 6, 6]
    assert positions(*blocks) == [*range(4, 10), *range(12, 24)]


def test_a_different_drop_last_of_another_worker_is_refused_by_name():
    scheduler = BlockScheduler()
    scheduler.begin_epoch(0, 0, 10, 4)
    words = (
        "worker 0 began epoch 0 with 10 samples .* of 4, but worker 1 .* 4, the rest dropped: .* drop_last"
    )
    with pytest.raises(ProtocolError, match=words):
        scheduler.begin_epoch(1, 0, 10, 4, drop_last=True)


def test_before_the_last_two_assignments_blocks_hold_a_batch():
    scheduler = running(members=2, samples=17, batch_size=4, ahead=3)
    assert sizes(scheduler.assign()) == {0: [4, 3, 2], 1: [4, 2, 2]}


def test_the_first_worker_of_a_small_epoch_leaves_the_others_their_part():
    scheduler = BlockScheduler()
    scheduler.set_members(range(4))
    for worker in range(4):
        scheduler.begin_epoch(worker, 0, 8, 4)
        assert sizes(scheduler.assign())[worker] == [2]


@settings(deadline=None, max_examples=60)
@given(
    members=st.integers(1, 6),
    samples=st.integers(1, 120),
    batch_size=st.integers(1, 9),
    ahead=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_members_that_take_equally_many_end_the_epoch_in_the_same_round_after_the_fewest_rounds(
    members, samples, batch_size, ahead, order
):
    """In any order of the messages, and whether all messages precede an assignment or not."""
    scheduler = running(members, samples, batch_size, hold=True, ahead=ahead)
    queues: dict[int, list[Block]] = {worker: [] for worker in range(members)}
    rounds: list[list[int]] = []
    used: list[int] = []

    def assign_all():
        for worker, blocks, _ in scheduler.assign():
            queues[worker] += blocks
            assert len(queues[worker]) <= ahead

    assign_all()
    while not scheduler.epochs.is_finished(0):
        rounds.append([])
        for worker in order.sample(range(members), members):
            if not queues[worker]:
                assign_all()
            if queues[worker]:
                block = queues[worker].pop(0)
                assert scheduler.contribute(worker, len(rounds), [block.id])
                rounds[-1].append(block.samples)
                used += positions(block)
            if order.random() < 0.5:
                assign_all()
        scheduler.complete_round(len(rounds))
    assert sorted(used) == list(range(samples))
    blocks = (
        max(1, samples // 2) if batch_size == 2 else -(-samples // batch_size)
    )  # none of a single position
    assert len(rounds) == -(-blocks // members)
    counts = [len(parts) for parts in rounds]
    assert counts[:-1] == [members] * (len(rounds) - 1)
    last_rounds = min(2, len(rounds))
    left = samples - (len(rounds) - last_rounds) * members * batch_size
    assert counts[-1] == members or left < 2 * members * last_rounds
    assert all(max(parts) <= most(batch_size) and max(parts) - min(parts) <= 1 for parts in rounds)
    assert batch_size == 1 or samples == 1 or min(map(min, rounds)) >= 2
    assert [len(set(parts)) for parts in rounds[:-2]] == [1] * len(rounds[:-2])


@settings(deadline=None, max_examples=60)
@given(
    members=st.integers(1, 6),
    samples=st.integers(1, 120),
    blocks_a_round=st.integers(1, 5),
    more_ahead=st.integers(0, 2),
    order=st.randoms(use_true_random=False),
)
def test_members_that_accumulate_equally_many_blocks_a_round_differ_by_one_at_most(
    members, samples, blocks_a_round, more_ahead, order
):
    scheduler = running(members, samples, 4, hold=True, ahead=blocks_a_round + more_ahead)
    queues: dict[int, list[Block]] = {worker: [] for worker in range(members)}
    counts: Counter[int] = Counter(dict.fromkeys(range(members), 0))
    used: list[int] = []
    round_ = 0
    while not scheduler.epochs.is_finished(0):
        mine: dict[int, list[Block]] = {worker: [] for worker in range(members)}
        # All compute at once, in any order: each takes what it has until it has enough or nothing is left.
        while True:
            for worker, blocks, _ in scheduler.assign():
                queues[worker] += blocks
            able = [worker for worker in queues if queues[worker] and len(mine[worker]) < blocks_a_round]
            if not able:
                break
            worker = order.choice(able)
            mine[worker].append(queues[worker].pop(0))
            scheduler.mark_started(worker, mine[worker][-1].id)
        for worker, blocks in mine.items():
            assert scheduler.contribute(worker, round_, [block.id for block in blocks])
            counts[worker] += len(blocks)
            used += positions(*blocks)
        scheduler.complete_round(round_)
        assert max(counts.values()) - min(counts.values()) <= 1
        round_ += 1
    assert sorted(used) == list(range(samples))
    assert len(set(counts.values())) == 1 or samples < 2 * members * max(counts.values())
    assert max(counts.values()) == -(-samples // (members * 4))


# Joining and leaving ------------------------------------------------------------------------------------


def test_unstarted_blocks_of_a_removed_member_return_to_the_pool_and_are_assigned_first():
    scheduler = running(members=2, samples=100, batch_size=4, ahead=2)
    scheduler.assign()
    scheduler.mark_started(0, 0)
    assert scheduler.set_members([1]) == {0: (2,)}
    assert pool(scheduler) == [8, 9, 10, 11, *range(16, 100)]
    scheduler.mark_started(1, 1)
    assert scheduler.assign() == [BlockAssignment(1, (Block(4, 0, ((8, 12),)),), is_epoch_over=False)]
    assert not scheduler.mark_started(0, 2)
    assert scheduler.contribute(0, 0, [0])  # a block that it had started is still its own
    assert not scheduler.contribute(0, 1, [2])


def test_a_joining_member_gets_as_many_as_the_others_have():
    scheduler = running(members=2, samples=1000, ahead=3)
    scheduler.assign()
    for worker in (0, 1):
        scheduler.contribute(worker, 0, [worker])
    scheduler.complete_round(0)
    scheduler.assign()
    scheduler.set_members([0, 1, 2])
    scheduler.begin_epoch(2, 0, 1000, 4)
    assert [len(blocks) for _, blocks, _ in scheduler.assign()] == [3]


def test_a_joining_member_ends_the_epoch_in_the_same_round_as_the_others():
    scheduler = running(members=2, samples=60, batch_size=4, hold=True)
    queues: dict[int, list[Block]] = {0: [], 1: [], 2: []}
    counts = []
    for round_ in range(20):
        if round_ == 3:
            scheduler.set_members([0, 1, 2])
            scheduler.begin_epoch(2, 0, 60, 4, holds_until_used=True)
        for worker, blocks, _ in scheduler.assign():
            queues[worker] += blocks
        offered = [worker for worker in queues if queues[worker]]
        for worker in offered:
            assert scheduler.contribute(worker, round_, [queues[worker].pop(0).id])
        scheduler.complete_round(round_)
        counts.append(len(offered))
    assert counts == [2] * 3 + [3] * 3 + [0] * 14
    assert scheduler.epochs.is_finished(0)


def test_returned_blocks_are_cut_equally_across_their_gaps():
    scheduler = running(members=3, samples=24, batch_size=4, hold=True, ahead=2)
    scheduler.assign()
    assert pool(scheduler) == []
    scheduler.remove_worker(0)
    assert pool(scheduler) == [0, 1, 2, 3, 12, 13, 14, 15]
    for worker, first in ((1, 1), (2, 2)):
        scheduler.contribute(worker, 0, [first])
        scheduler.contribute(worker, 1, [first + 3])
    scheduler.remove_worker(1)
    scheduler.abandon_round(0)
    scheduler.abandon_round(1)
    assert pool(scheduler) == [*range(8), *range(12, 20)]
    scheduler.begin_epoch(3, 0, 24, 4, holds_until_used=True)
    scheduler.begin_epoch(4, 0, 24, 4, holds_until_used=True)
    scheduler.set_members([3, 4])
    assigned = {worker: blocks for worker, blocks, _ in scheduler.assign()}
    assert [block.ranges for block in assigned[3]] == [((0, 4),), ((12, 16),)]


def test_a_block_may_lie_across_a_gap():
    scheduler = running(members=2, samples=16, batch_size=4, hold=True, ahead=2)
    scheduler.assign()
    scheduler.remove_worker(0)
    scheduler.set_members([1, 2, 3, 4])
    for worker in (2, 3, 4):
        scheduler.begin_epoch(worker, 0, 16, 4, holds_until_used=True)
    # 0 to 3 and 8 to 11 were returned; worker 1 has two blocks, the three others share
    assigned = scheduler.assign()
    assert [blocks[0].ranges for _, blocks, _ in assigned] == [((0, 3),), ((3, 4), (8, 10)), ((10, 12),)]
    assert [len(blocks) for _, blocks, _ in assigned] == [1, 1, 1]


# Rounds -------------------------------------------------------------------------------------------------


def test_an_epoch_is_finished_when_every_position_is_used_by_a_completed_round():
    scheduler = running(members=2, samples=8)
    scheduler.assign()
    scheduler.contribute(0, 0, [0])
    scheduler.complete_round(0)
    assert not scheduler.epochs.is_finished(0)
    scheduler.contribute(1, 1, [1])
    assert not scheduler.epochs.is_finished(0)
    assert scheduler.epochs.numbers() == (0,)
    scheduler.complete_round(1)
    assert scheduler.epochs.is_finished(0)
    assert not scheduler.epochs.is_finished(1)
    assert scheduler.epochs.numbers() == ()


def test_a_worker_may_contribute_several_blocks_or_none():
    scheduler = running(members=2, samples=1000, ahead=2)
    scheduler.assign()
    scheduler.mark_started(0, 2)
    scheduler.assign()
    assert scheduler.contribute(0, 0, [0, 2, 4])
    assert scheduler.contribute(1, 0, [])
    scheduler.complete_round(0)
    assert scheduler.state_dict()["epochs"]["open"][0]["unused"] == 1000 - 12


def test_after_an_abandoned_round_survivors_repeat_their_blocks_and_those_of_the_lost_return():
    scheduler = running(members=3, samples=100, batch_size=4, ahead=1)
    scheduler.assign()
    for worker in range(3):
        scheduler.contribute(worker, 5, [worker])
    scheduler.remove_worker(1)
    assert pool(scheduler) == list(range(12, 100))  # the round may still complete
    assert scheduler.abandon_round(5) == {0: (0,), 2: (2,)}
    assert pool(scheduler) == [4, 5, 6, 7, *range(12, 100)]
    assert scheduler.contribute(0, 5, [0])
    assert scheduler.contribute(2, 5, [2])
    scheduler.complete_round(5)
    assert scheduler.state_dict()["epochs"]["open"][0]["unused"] == 100 - 8


def test_the_contribution_of_a_lost_worker_to_a_round_that_completes_is_used():
    scheduler = running(members=2, samples=8)
    scheduler.assign()
    for worker in range(2):
        scheduler.contribute(worker, 0, [worker])
    scheduler.remove_worker(1)
    scheduler.complete_round(0)
    assert scheduler.epochs.is_finished(0)


def test_the_blocks_of_a_worker_lost_after_its_abandoned_round_return_to_the_pool():
    scheduler = running(members=2, samples=8)
    scheduler.assign()
    scheduler.contribute(1, 0, [1])
    scheduler.abandon_round(0)
    scheduler.remove_worker(1)
    assert pool(scheduler) == [4, 5, 6, 7]


def test_a_straggler_may_contribute_a_kept_block_to_a_later_round():
    scheduler = running(members=2, samples=100)
    scheduler.assign()
    scheduler.mark_started(1, 1)
    scheduler.set_members([0])
    assert scheduler.holders(0) == (0, 1)
    scheduler.contribute(0, 0, [0])
    scheduler.complete_round(0)
    assert scheduler.contribute(1, 3, [1])
    scheduler.complete_round(3)
    assert scheduler.holders(0) == (0,)
    assert scheduler.state_dict()["epochs"]["open"][0]["unused"] == 100 - 8


def test_a_revoked_block_does_not_count_even_if_its_samples_are_assigned_to_the_same_worker_again():
    scheduler = running(members=1, samples=8, batch_size=4, hold=True)
    scheduler.assign()
    scheduler.mark_started(0, 0)
    assert scheduler.revoke(0) == (0, 1)
    assert pool(scheduler) == list(range(8))
    (again,) = scheduler.assign()
    assert [(block.id, block.ranges) for block in again.blocks] == [(2, ((0, 4),)), (3, ((4, 8),))]
    assert not scheduler.contribute(0, 0, [0])
    assert not scheduler.mark_started(0, 1)
    assert not scheduler.contribute(0, 0, [2, 1])  # as a whole or not at all
    assert scheduler.contribute(0, 0, [2, 3])
    scheduler.complete_round(0)
    assert scheduler.epochs.is_finished(0)


def test_a_member_that_was_revoked_gets_as_many_as_the_others_have():
    scheduler = running(members=3, samples=1000, ahead=2)
    scheduler.assign()
    scheduler.revoke(1)
    assert [(worker, len(blocks)) for worker, blocks, _ in scheduler.assign()] == [(1, 2)]


def test_a_late_block_is_assigned_outside_the_group_unless_it_is_of_the_last_two_assignments():
    scheduler = running(members=2, samples=28, batch_size=4, ahead=1)
    scheduler.begin_epoch(9, 0, 28, 4)
    assert set(ids(scheduler.assign())) == {0, 1}
    assert scheduler.assign_late(9) == Block(2, 0, ((8, 12),))
    assert scheduler.contribute(9, 0, [2])
    assert pool(scheduler) == list(range(12, 28))
    assert scheduler.assign_late(9) is None
    scheduler.abandon_round(0)
    with pytest.raises(ProtocolError, match="expected worker 9 to have no block, it has 1"):
        scheduler.assign_late(9)
    with pytest.raises(ProtocolError, match="for a late block, got member 1"):
        scheduler.assign_late(1)


def test_no_late_block_is_assigned_of_a_later_epoch_nor_to_a_worker_whose_epoch_is_over():
    scheduler = running(members=2, samples=8, batch_size=4)
    scheduler.begin_epoch(9, 0, 8, 4)
    assert overs(scheduler.assign()) == [0, 1]
    scheduler.begin_epoch(1, 1, 100, 4)
    assert scheduler.assign_late(9) is None
    scheduler.remove_worker(1)
    scheduler.set_members([])
    assert pool(scheduler) == list(range(8))
    scheduler.contribute(0, 0, [])
    assert scheduler.revoke(0) == ()
    assert scheduler.assign_late(0) is None
    assert scheduler.assign_late(9) == Block(2, 0, ((0, 4),))


# Epochs -------------------------------------------------------------------------------------------------


def overs(assigned: list[BlockAssignment]) -> list[int]:
    return [worker for worker, _, over in assigned if over]


def test_a_member_receives_the_end_of_its_epoch_with_its_last_blocks_and_may_begin_the_next():
    scheduler = running(members=2, samples=8)
    assert overs(scheduler.assign()) == [0, 1]
    assert scheduler.assign() == []
    scheduler.contribute(0, 0, [0])
    scheduler.begin_epoch(0, 1, 100, 4)
    (assigned,) = scheduler.assign()
    assert {block.epoch for block in assigned.blocks} == {1}
    assert not assigned.is_epoch_over
    assert scheduler.epochs.numbers() == (0, 1)


def test_returned_blocks_are_assigned_to_a_member_that_is_in_a_later_epoch():
    scheduler = running(members=2, samples=8)
    scheduler.assign()
    scheduler.remove_worker(1)
    assert scheduler.assign() == []  # worker 0 was informed that epoch 0 is over for it
    scheduler.begin_epoch(0, 1, 100, 4)
    (assigned,) = scheduler.assign()
    assert assigned.blocks[0] == Block(2, 0, ((4, 8),))


def test_no_worker_is_assigned_blocks_of_an_epoch_that_it_has_not_begun():
    scheduler = running(members=3, samples=8, batch_size=4)
    assert overs(scheduler.assign()) == [0, 1, 2]
    scheduler.begin_epoch(0, 1, 100, 4)
    scheduler.set_members([0, 1, 2, 3])
    scheduler.begin_epoch(3, 0, 8, 4)
    assigned = {one.worker: one for one in scheduler.assign()}
    assert assigned[3] == BlockAssignment(3, (), is_epoch_over=True)
    assert assigned[0].blocks


def test_held_workers_are_informed_that_the_epoch_is_over_when_every_position_is_used():
    scheduler = running(members=2, samples=8, hold=True)
    assert overs(scheduler.assign()) == []
    scheduler.contribute(0, 0, [0])
    scheduler.complete_round(0)
    assert scheduler.assign() == []
    scheduler.remove_worker(1)
    scheduler = copy(scheduler)
    assert sizes(scheduler.assign()) == {0: [4]}
    scheduler.contribute(0, 1, [2])
    assert scheduler.assign() == []
    scheduler.complete_round(1)
    assert scheduler.assign() == [BlockAssignment(0, (), is_epoch_over=True)]


def test_a_worker_that_is_no_member_is_informed_when_its_epoch_is_finished():
    scheduler = running(members=1, samples=4)
    scheduler.begin_epoch(5, 0, 4, 4)
    assert overs(scheduler.assign()) == [0]
    scheduler.contribute(0, 0, [0])
    scheduler.complete_round(0)
    assert overs(scheduler.assign()) == [5]


def test_no_worker_may_begin_an_epoch_too_far_from_the_oldest_unfinished_one():
    scheduler = running(members=2, samples=1, batch_size=4, epochs_open_max=2)
    assert scheduler.assign() == [
        BlockAssignment(0, (Block(0, 0, ((0, 1),)),), True),
        BlockAssignment(1, (), True),
    ]
    scheduler.begin_epoch(1, 1, 1, 4)
    assert scheduler.assign() == [BlockAssignment(1, (Block(1, 1, ((0, 1),)),), False)]
    with pytest.raises(ProtocolError, match="expected epoch 0 to be finished first, worker 1 begins epoch 2"):
        scheduler.begin_epoch(1, 2, 1, 4)
    scheduler.contribute(0, 0, [0])
    scheduler.contribute(1, 0, [1])
    scheduler.complete_round(0)
    assert overs(scheduler.assign()) == [1]
    scheduler.begin_epoch(1, 2, 1, 4)


def test_with_one_open_epoch_every_worker_waits_for_its_end():
    scheduler = running(members=2, samples=8, epochs_open_max=1)
    assert overs(scheduler.assign()) == []
    for worker in range(2):
        scheduler.contribute(worker, 0, [worker])
    scheduler.complete_round(0)
    assert overs(scheduler.assign()) == [0, 1]


def test_the_first_epoch_may_be_any_and_a_latecomer_may_begin_a_finished_one():
    scheduler = BlockScheduler()
    scheduler.set_members([0])
    scheduler.begin_epoch(0, 7, 4, 4)
    scheduler.assign()
    scheduler.contribute(0, 0, [0])
    scheduler.complete_round(0)
    scheduler.begin_epoch(1, 7, 4, 4)
    assert scheduler.assign() == [BlockAssignment(1, (), is_epoch_over=True)]
    assert [scheduler.epochs.is_finished(epoch) for epoch in (6, 7, 8)] == [False, True, False]


# Continuing in another job ------------------------------------------------------------------------------


def test_used_ranges_are_those_of_earlier_rounds_regardless_of_assigned_blocks():
    scheduler = running(members=2, samples=40, batch_size=4)
    scheduler.assign()  # blocks 0 and 2 to the first, 1 and 3 to the second
    assert scheduler.used_ranges(0) == {0: ()}
    scheduler.contribute(0, 0, [0])
    scheduler.contribute(1, 0, [1])
    scheduler.mark_started(0, 2)
    assert scheduler.used_ranges(0) == {0: ()}
    assert scheduler.used_ranges(1) == {0: ((0, 8),)}
    scheduler.complete_round(0)
    scheduler.contribute(1, 1, [3])
    assert scheduler.used_ranges(1) == {0: ((0, 8),)}
    assert scheduler.used_ranges(2) == {0: ((0, 8), (12, 16))}


def test_an_epoch_that_is_used_up_or_cut_is_not_continued():
    scheduler = running(members=1, samples=4, batch_size=4)
    scheduler.assign()
    scheduler.contribute(0, 0, [0])
    assert scheduler.used_ranges(0) == {0: ()}
    assert scheduler.used_ranges(1) == {}
    assert scheduler.epochs.next == 1
    scheduler.begin_epoch(0, 1, 40, 4)
    scheduler.assign()
    scheduler.cut_epoch(1)
    assert scheduler.used_ranges(1) == {}


def test_an_epoch_that_is_used_up_before_an_older_one_is_used_in_the_state():
    scheduler = running(members=2, samples=8, batch_size=4)
    scheduler.assign()
    scheduler.contribute(0, 0, [0])
    scheduler.mark_started(1, 1)
    scheduler.begin_epoch(0, 1, 4, 4)
    round_ = 1
    while (assigned := scheduler.assign()) and assigned[0].blocks:
        scheduler.contribute(0, round_, [block.id for block in assigned[0].blocks])
        round_ += 1
    for round_ in scheduler.rounds.numbers():
        scheduler.complete_round(round_)
    assert scheduler.epochs.is_finished(1)
    assert copy(scheduler).used_ranges(round_ + 1) == {0: ((0, 4),), 1: ((0, 4),)}
    another = BlockScheduler()
    another.set_members([0])
    another.begin_epoch(0, 0, 8, 4, used_ranges=[(0, 4)])
    assert [len(blocks) for _, blocks, _ in another.assign()] == [1]
    another.begin_epoch(0, 1, 4, 4, used_ranges=[(0, 4)])
    assert another.epochs.is_finished(1)


def test_another_job_continues_an_epoch_from_its_used_ranges():
    scheduler = running(members=2, samples=40, batch_size=4)
    scheduler.assign()
    scheduler.contribute(1, 0, [1])
    ((epoch, used),) = scheduler.used_ranges(1).items()
    another = BlockScheduler()
    another.set_members([0, 1, 2])
    for worker in range(3):
        another.begin_epoch(worker, epoch, 40, 4, used_ranges=used)
    assert pool(another) == [*range(4), *range(8, 40)]
    blocks = [block for _, blocks, _ in another.assign() for block in blocks]
    assert blocks[0].ranges == ((0, 4),)
    for round_, block in enumerate(blocks):
        assert another.contribute(round_ % 3, round_, [block.id]) in (True, False)
    assert copy(another).state_dict() == another.state_dict()


def test_the_same_state_is_loaded_everywhere():
    scheduler = BlockScheduler()
    scheduler.set_members([0, 1])
    scheduler.begin_epoch(0, 3, 40, 4, used_ranges=[(0, 4)])
    scheduler.begin_epoch(1, 3, 40, 4)  # a newcomer has loaded nothing
    with pytest.raises(ProtocolError, match="worker 1 continue from different states of epoch 3"):
        scheduler.begin_epoch(1, 3, 40, 4, used_ranges=[(0, 8)])


@pytest.mark.parametrize("used", [[(0, 41)], [(4, 8), (0, 2)], [(-1, 3)], [(3, 3)]])
def test_positions_that_cannot_have_been_used_are_refused(used):
    scheduler = BlockScheduler()
    with pytest.raises(ProtocolError, match="ranges of used positions, of 40 positions in all"):
        scheduler.begin_epoch(0, 0, 40, 4, used_ranges=used)
    assert 0 not in scheduler


# Loops that end early -----------------------------------------------------------------------------------


def test_discarded_blocks_count_as_used_and_their_worker_is_assigned_blocks_again():
    scheduler = running(members=2, samples=100)
    scheduler.assign()
    scheduler.mark_started(0, 0)
    scheduler.discard_blocks(0)
    assert scheduler.epochs.used_count(0) == 8
    assert scheduler.assigned_ids(0) == ()
    assert set(ids(scheduler.assign())) == {0}


def test_a_retired_worker_is_assigned_nothing_and_its_blocks_go_to_the_others():
    scheduler = running(members=2, samples=100)
    blocks = {worker: blocks for worker, blocks, _ in scheduler.assign()}
    scheduler.retire(1)
    assert scheduler.used_ranges(0) == {0: ()}
    scheduler.contribute(0, 0, [0, 2])
    scheduler.complete_round(0)
    ((worker, again, _),) = scheduler.assign()
    assert worker == 0
    assert [block.ranges for block in again] == [block.ranges for block in blocks[1]]


def test_no_block_of_a_cut_epoch_is_assigned_even_when_it_is_returned():
    scheduler = running(members=2, samples=100)
    scheduler.assign()
    scheduler.cut_epoch(0)
    assert pool(scheduler) == []
    assert scheduler.epochs.used_count(0) == 100 - 16
    scheduler.contribute(0, 0, [0, 2])
    scheduler.complete_round(0)
    scheduler.remove_worker(1)
    assert scheduler.epochs.is_finished(0)
    scheduler.cut_epoch(0)  # again is harmless
    assert copy(scheduler).assign() == scheduler.assign()


def test_a_worker_that_left_its_epoch_early_may_begin_one_far_from_the_oldest_unfinished_one():
    scheduler = running(members=2, samples=100)
    scheduler.assign()
    scheduler.begin_epoch(0, 1, 100, 4, ends_previous_early=True)
    scheduler.begin_epoch(0, 2, 100, 4, ends_previous_early=True)
    scheduler.begin_epoch(0, 2, 100, 4)  # repeats it
    scheduler.begin_epoch(1, 2, 100, 4)  # a follower opens nothing
    with pytest.raises(ProtocolError, match="expected epoch 0 to be finished first"):
        scheduler.begin_epoch(0, 3, 100, 4)


def test_a_withdrawn_contribution_is_a_started_block_of_its_worker_again():
    scheduler = running(members=2, samples=100)
    scheduler.assign()
    scheduler.contribute(1, 0, [1])
    scheduler.withdraw(1, 0)
    scheduler.withdraw(1, 0)  # nothing of it is left
    assert scheduler.started_count(1) == 1
    scheduler.complete_round(0)
    assert scheduler.epochs.used_count(0) == 0
    assert scheduler.contribute(1, 1, [1])


def test_a_worker_that_has_started_all_its_blocks_keeps_them_when_it_is_excluded():
    scheduler = running(members=2, samples=100)
    scheduler.assign()
    assert scheduler.assigned_ids(1) == (1, 3)
    scheduler.mark_all_started(1)
    assert scheduler.started_count(1) == 2
    assert scheduler.set_members([0]) == {}
    assert scheduler.assigned_ids(1) == (1, 3)


def test_a_worker_that_begins_with_a_larger_ahead_is_assigned_more_blocks():
    scheduler = running(members=2, samples=1000, ahead=2)
    scheduler.begin_epoch(1, 0, 1000, 4, ahead=5)
    assert [len(blocks) for _, blocks, _ in scheduler.assign()] == [2, 3]  # in turn
    for block_id in scheduler.assigned_ids(0):
        scheduler.mark_started(0, block_id)
    assert sum(len(blocks) for worker, blocks, _ in scheduler.assign() if worker == 1) == 2
    assert len(scheduler.assigned_ids(1)) == 5


def test_held_workers_wait_also_with_started_blocks():
    """A block of another worker may return when no worker is left to use it."""
    scheduler = running(members=2, samples=8, hold=True)
    scheduler.assign()
    scheduler.mark_started(0, 0)
    scheduler.begin_epoch(0, 0, 8, 4, holds_until_used=True)  # it asks for more
    assert overs(scheduler.assign()) == []


# Refusing -----------------------------------------------------------------------------------------------


def scheduler_in_mid_round() -> BlockScheduler:
    """Round 0 completed, round 1 open; 0 and 1 are members, 2 is outside."""
    scheduler = running(members=3, samples=100)
    scheduler.assign()
    scheduler.set_members([0, 1])
    for worker in range(2):
        scheduler.contribute(worker, 0, [worker])
    scheduler.complete_round(0)
    scheduler.contribute(0, 1, [3])
    scheduler.assign()
    return scheduler


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (
            "begin_epoch",
            (0, 0, 101, 4),
            "worker 0 began epoch 0 with 100 samples in batches of 4, .* 101 samples",
        ),
        (
            "begin_epoch",
            (1, 0, 100, 5),
            "worker 1 begins epoch 0 with 100 samples in batches of 5: give every",
        ),
        ("begin_epoch", (0, 2, 100, 4), "expected an epoch from 0 to 1, worker 0 begins epoch 2"),
        ("begin_epoch", (3, -1, 100, 4), "expected an epoch from 0 to 1"),
        ("begin_epoch", (0, 1, 0, 4), "expected at least 1 sample"),
        ("begin_epoch", (0, 1, 100, 0), "batches of at least 1"),
        ("mark_started", (9, 0), "worker 9 has begun no epoch, or is gone"),
        (
            "mark_started",
            (0, 99),
            "expected a block that has been assigned, from 0 to .*, got block 99 of worker 0",
        ),
        ("contribute", (0, 0, [3]), "expected a round after 0, which is completed"),
        ("contribute", (0, 1, []), "worker 0 has contributed to round 1 already"),
        ("contribute", (1, 1, [4, 4]), r"expected each block once, got \[4, 4\] of worker 1"),
        ("contribute", (1, 1, [4, 99]), "got block 99 of worker 1"),
        ("contribute", (1, 1, [-1]), "got block -1 of worker 1"),
        ("contribute", (9, 1, []), "worker 9 has begun no epoch"),
        ("complete_round", (0,), "expected a round after 0, which is completed, got round 0"),
        ("complete_round", (2,), "round 1 is neither completed nor abandoned, got round 2"),
        ("abandon_round", (0,), "expected a round after 0, which is completed"),
        ("revoke", (9,), "worker 9 has begun no epoch"),
        ("remove_worker", (9,), "worker 9 has begun no epoch"),
        ("assign_late", (9,), "worker 9 has begun no epoch"),
        ("assign_late", (0,), "got member 0"),
    ],
)
def test_an_impossible_call_is_refused_and_changes_nothing(call, arguments, message):
    scheduler = scheduler_in_mid_round()
    before = scheduler.state_dict()
    with pytest.raises(ProtocolError, match=message):
        getattr(scheduler, call)(*arguments)
    assert scheduler.state_dict() == before
    assert contents(scheduler) == contents(copy(scheduler))


def test_an_epoch_before_the_current_one_of_a_worker_is_refused():
    scheduler = running(members=1, samples=4)
    scheduler.assign()
    scheduler.begin_epoch(0, 1, 4, 4)
    with pytest.raises(
        ProtocolError, match="expected an epoch from 1, its current one, worker 0 begins epoch 0"
    ):
        scheduler.begin_epoch(0, 0, 4, 4)


@pytest.mark.parametrize("arguments", [{"ahead": 0}, {"epochs_open_max": 0}])
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match=r"expected at least 1 .*, got 0"):
        BlockScheduler(**arguments)


def test_the_state_does_not_grow_with_the_number_of_rounds():
    scheduler = running(members=2, samples=4000, batch_size=1)
    queues: dict[int, list[Block]] = {0: [], 1: []}
    for round_ in range(1500):
        for worker, blocks, _ in scheduler.assign():
            queues[worker] += blocks
        for worker in range(2):
            scheduler.contribute(worker, round_, [queues[worker].pop(0).id])
        scheduler.complete_round(round_)
    assert len(json.dumps(scheduler.state_dict())) < 800
    assert len(vars(scheduler)["_order"]._count_at) <= 2


# Random histories ---------------------------------------------------------------------------------------


class Cluster(RuleBasedStateMachine):
    """Workers that do what a worker can do at any time, a group that changes, rounds that fail.

    Every call goes to a scheduler and to copies of it made from its state at some time; they must agree.
    """

    EPOCHS = 3

    @initialize(
        workers=st.integers(1, 4),
        samples=st.lists(st.integers(1, 40), min_size=3, max_size=3),
        batch_size=st.integers(1, 6),
        ahead=st.integers(1, 3),
        epochs_open_max=st.integers(1, 3),
        drop_last=st.booleans(),
    )
    def start(self, workers, samples, batch_size, ahead, epochs_open_max, drop_last):
        self.arguments = {"ahead": ahead, "epochs_open_max": epochs_open_max}
        self.schedulers = [BlockScheduler(**self.arguments)]
        if drop_last:  # a session refuses an epoch of which nothing is left
            samples = [max(one, batch_size) for one in samples]
        self.samples, self.batch_size, self.drop_last = samples, batch_size, drop_last
        self.opened: set[int] = set()
        self.blocks: dict[int, Block] = {}
        self.queues: dict[int, list[int]] = {}  # living workers: queued blocks, as the worker sees it
        self.working: dict[int, list[int]] = {}  # taken
        self.stale: dict[int, list[int]] = {}  # taken from it
        self.epoch: dict[int, int] = {}
        self.over: set[int] = set()
        self.members: set[int] = set()
        self.round = 0
        self.offered: dict[int, list[int]] = {}  # in the open round
        self.used: Counter[tuple[int, int]] = Counter()
        self.next_worker = 0
        self.is_cut: set[int] = set()
        for _ in range(workers):
            self.join(0)

    def ask(self, call, *arguments, **named):
        answers = [getattr(scheduler, call)(*arguments, **named) for scheduler in self.schedulers]
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    def begin(self, worker, epoch):
        samples, is_last = self.samples[epoch], epoch == self.EPOCHS - 1
        self.ask("begin_epoch", worker, epoch, samples, self.batch_size, is_last, drop_last=self.drop_last)
        if self.drop_last and epoch not in self.opened:  # the rest counts as used
            rest = range(samples - samples % self.batch_size, samples)
            self.used.update((epoch, position) for position in rest)
        self.opened.add(epoch)
        self.epoch[worker] = epoch
        self.over.discard(worker)

    def join(self, epoch):
        worker = self.next_worker
        self.next_worker += 1
        self.queues[worker], self.working[worker], self.stale[worker] = [], [], []
        self.begin(worker, epoch)
        self.regroup(self.members | {worker})

    def regroup(self, members):
        for worker, taken_back in self.ask("set_members", sorted(members)).items():
            assert worker in self.members - members
            assert list(taken_back) == self.queues[worker]
            self.stale[worker] += taken_back
            self.queues[worker] = []
        assert all(not self.queues[worker] for worker in self.members - members if worker in self.queues)
        self.members = members

    def living(self, data, among=None):
        return data.draw(st.sampled_from(sorted(self.queues if among is None else among)))

    @rule()
    def assign_all(self):
        for worker, blocks, over in self.ask("assign"):
            assert worker in self.members or not blocks
            assert worker not in self.over
            for block in blocks:
                self.give(worker, block)
            assert len(self.queues[worker]) <= self.arguments["ahead"]
            if over:
                self.over.add(worker)

    def give(self, worker, block):
        assert block.id not in self.blocks
        assert 1 <= block.samples <= most(self.batch_size)
        assert block.samples == self.batch_size or not self.drop_last
        assert block.epoch <= self.epoch[worker]
        self.blocks[block.id] = block
        self.queues[worker].append(block.id)

    @rule(data=st.data())
    def assign_late_block(self, data):
        free = [
            worker
            for worker in self.queues
            if worker not in self.members and not self.queues[worker] and not self.working[worker]
        ]
        if free:
            worker = self.living(data, free)
            block = self.ask("assign_late", worker)
            if block:
                self.give(worker, block)

    @rule(data=st.data())
    def take(self, data):
        worker = self.living(data)
        if self.queues[worker]:
            self.working[worker].append(self.queues[worker].pop(0))
            assert self.ask("mark_started", worker, self.working[worker][-1])

    @rule(data=st.data(), count=st.integers(0, 3))
    def contribute(self, data, count):
        worker = self.living(data)
        if worker in self.offered:
            return
        blocks = (self.working[worker] + self.queues[worker])[:count]
        assert self.ask("contribute", worker, self.round, blocks)
        self.queues[worker] = [block for block in self.queues[worker] if block not in blocks]
        self.working[worker] = [block for block in self.working[worker] if block not in blocks]
        self.offered[worker] = blocks

    @rule(data=st.data())
    def contribute_what_was_taken_back(self, data):
        worker = self.living(data)
        if self.stale[worker] and worker not in self.offered:
            mine = self.working[worker][:1]
            assert not self.ask("contribute", worker, self.round, [*mine, self.stale[worker].pop()])

    @rule()
    def complete(self):
        self.ask("complete_round", self.round)
        for blocks in self.offered.values():
            for block in blocks:
                self.use(block)
        self.offered = {}
        self.round += 1

    def use(self, block):
        for position in positions(self.blocks[block]):
            self.used[self.blocks[block].epoch, position] += 1

    @rule(data=st.data())
    def withdraw(self, data):
        worker = self.living(data)
        self.ask("withdraw", worker, self.round)
        self.working[worker] += self.offered.pop(worker, [])

    @rule(data=st.data())
    def take_all(self, data):
        worker = self.living(data)
        self.ask("mark_all_started", worker)
        self.working[worker] += self.queues[worker]
        self.queues[worker] = []

    @rule(data=st.data())
    def forgo(self, data):
        worker = self.living(data)
        self.ask("discard_blocks", worker)
        self.use_unused(worker)

    def use_unused(self, worker):
        for number in self.working[worker] + self.queues[worker]:
            self.use(number)
        self.working[worker], self.queues[worker] = [], []

    @precondition(lambda self: len(self.epoch) > 1)
    @rule(data=st.data())
    def retire(self, data):
        """Its loop is over, so the worker also leaves: these workers begin epochs in any order."""
        worker = self.living(data)
        self.ask("retire", worker)
        self.working[worker], self.queues[worker] = [], []
        self.assign_all()
        assert not self.queues[worker]
        self.leave(worker)

    @rule(data=st.data())
    def cut(self, data):
        epoch = data.draw(st.sampled_from(sorted(set(self.epoch.values()))))
        self.ask("cut_epoch", epoch)
        self.is_cut.add(epoch)
        self.use_pooled()

    def use_pooled(self):
        """Use the pooled positions of an epoch that was cut."""
        held = [number for owned in (*self.queues.values(), *self.working.values()) for number in owned]
        held += [number for blocks in self.offered.values() for number in blocks]
        for epoch in self.is_cut:
            theirs = {
                position
                for number in held
                if self.blocks[number].epoch == epoch
                for position in positions(self.blocks[number])
            }
            for position in set(range(self.samples[epoch])) - theirs:
                self.used[epoch, position] = 1

    @rule(skip=st.booleans())
    def abandon(self, skip):
        living = {worker: tuple(blocks) for worker, blocks in self.offered.items() if worker in self.queues}
        assert self.ask("abandon_round", self.round) == living
        for worker, blocks in living.items():
            self.working[worker] += blocks
        self.offered = {}
        self.round += skip

    @rule(data=st.data())
    def go_on_to_the_next_epoch(self, data):
        able = [worker for worker in self.over if self.epoch[worker] + 1 < self.EPOCHS]
        if able:
            worker = self.living(data, able)
            self.begin(worker, self.epoch[worker] + 1)

    @precondition(lambda self: len(self.queues) < 6)
    @rule(data=st.data())
    def come(self, data):
        open_ones = self.schedulers[0].epochs.numbers() or (max(self.epoch.values(), default=0),)
        self.join(data.draw(st.sampled_from(open_ones)))

    @precondition(lambda self: len(self.queues) > 1)
    @rule(data=st.data())
    def die(self, data):
        self.leave(self.living(data))

    def leave(self, worker):
        self.ask("remove_worker", worker)
        for of_workers in (self.queues, self.working, self.stale, self.epoch):
            del of_workers[worker]
        self.over.discard(worker)
        self.members.discard(worker)
        if not self.queues:
            self.join(0)

    @rule(data=st.data())
    def change_the_group(self, data):
        self.regroup(set(data.draw(st.lists(st.sampled_from(sorted(self.queues)), min_size=1))))

    @rule(data=st.data())
    def revoke(self, data):
        self.take_all_back(self.living(data))

    def take_all_back(self, worker):
        taken_back = self.ask("revoke", worker)
        assert sorted(taken_back) == sorted(self.working[worker] + self.queues[worker])
        self.stale[worker] += taken_back
        self.queues[worker], self.working[worker] = [], []

    @rule()
    def restore(self):
        restored = copy(self.schedulers[0], **self.arguments)
        assert contents(restored) == contents(self.schedulers[0])
        self.schedulers = [self.schedulers[0], restored]

    @invariant()
    def every_position_is_in_one_place(self):
        if not hasattr(self, "schedulers"):
            return
        self.use_pooled()
        state = self.schedulers[0].state_dict()
        held = [block for blocks in (*self.queues.values(), *self.working.values()) for block in blocks]
        held += [block for blocks in self.offered.values() for block in blocks]
        places = Counter(self.used)
        for block in held:
            for position in positions(self.blocks[block]):
                places[self.blocks[block].epoch, position] += 1
        for one in state["epochs"]["open"]:
            number, unused, ranges = one["epoch"], one["unused"], one["pool"]
            assert unused == self.samples[number] - sum(one[0] == number for one in self.used)
            assert all(
                start < stop and below < start for (start, stop), (_, below) in pairwise([*ranges, (-1, -1)])
            )
            for start, stop in ranges:
                for position in range(start, stop):
                    places[number, position] += 1
        begun = state["epochs"]["next"]
        assert places == Counter(
            {(epoch, position): 1 for epoch in range(begun) for position in range(self.samples[epoch])}
        )
        for epoch in range(begun):
            whole = sum(one[0] == epoch for one in self.used) == self.samples[epoch]
            assert self.schedulers[0].epochs.is_finished(epoch) == whole

    def teardown(self):
        """As long as a member is left, work continues and every epoch finishes."""
        if not hasattr(self, "schedulers"):
            return
        if not self.members:
            self.regroup({min(self.queues)})
        last = self.EPOCHS - 1
        for _ in range(sum(self.samples) + 20):
            self.complete()
            for worker in sorted(self.over):
                if self.epoch[worker] < last:
                    self.begin(worker, self.epoch[worker] + 1)
            self.assign_all()
            all_over = self.members <= self.over and all(self.epoch[worker] == last for worker in self.over)
            if all_over and not self.schedulers[0].epochs.numbers():
                break
            busy = [worker for worker in self.members if self.queues[worker] or self.working[worker]]
            for worker in busy:
                self.contribute_one(worker)
            if not busy:
                for worker in sorted(set(self.queues) - self.members):
                    self.take_all_back(worker)
        self.every_position_is_in_one_place()
        assert all(self.schedulers[0].epochs.is_finished(epoch) for epoch in range(self.EPOCHS))
        assert self.members <= self.over
        assert all(self.epoch[worker] == last for worker in self.over)

    def contribute_one(self, worker):
        blocks = self.working[worker] or self.queues[worker][:1]
        assert self.ask("contribute", worker, self.round, blocks)
        self.offered[worker] = list(blocks)
        self.queues[worker] = [block for block in self.queues[worker] if block not in blocks]
        self.working[worker] = []


TestCluster = Cluster.TestCase
TestCluster.settings = settings(deadline=None, max_examples=150, stateful_step_count=50)


# A member that takes part in a job from its beginning to its end, with chance from a seed ----------------


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32))
def test_a_job_in_lockstep_with_deaths_and_joins_uses_every_position_once_in_few_rounds(seed):
    """Rounds beyond the fewest possible: at most three for each change of the group."""
    chance = random.Random(seed)
    samples, batch_size = chance.randint(1, 400), chance.randint(1, 8)
    scheduler = BlockScheduler(ahead=chance.randint(1, 3))
    queues: dict[int, list[Block]] = {}
    used: Counter[int] = Counter()
    newest, changes, needed, rounds = 0, 0, 0.0, 0

    def join():
        nonlocal newest
        queues[newest] = []
        scheduler.begin_epoch(newest, 0, samples, batch_size, holds_until_used=True)
        newest += 1
        scheduler.set_members(queues)

    for _ in range(chance.randint(1, 6)):
        join()
    while not scheduler.epochs.is_finished(0):
        for worker, blocks, _ in scheduler.assign():
            queues[worker] += blocks
        offered = {worker: queue.pop(0) for worker, queue in queues.items() if queue}
        for worker, block in offered.items():
            assert scheduler.contribute(worker, rounds, [block.id])
        if chance.random() < 0.05 and len(queues) > 1:
            changes += 1
            dead = chance.choice(sorted(queues))
            scheduler.remove_worker(dead)
            del queues[dead]
            for worker in scheduler.abandon_round(rounds):
                queues[worker].insert(0, offered[worker])
        else:
            scheduler.complete_round(rounds)
            for block in offered.values():
                used.update(positions(block))
            needed += len(queues) * batch_size
        if chance.random() < 0.05 and len(queues) < 8:
            changes += 1
            join()
        rounds += 1
    assert used == Counter(range(samples))
    assert needed - samples <= (1 + 3 * changes) * 8 * batch_size
