"""A worker's block queue: which blocks it holds, which it must contribute, and when its epoch is over."""

from __future__ import annotations

from typing import Any

from offbeat.events import AssignBlocks, Block
from offbeat.policies.data.block_queue import BlockQueue


def block(number: int, epoch: int = 0) -> Block:
    return Block(number, epoch, ((4 * number, 4 * number + 4),))


def assign_blocks(*numbers: int, epoch: int = 0, **more: Any) -> AssignBlocks:
    fields = {"replaces_queue": False, "is_last": False, "is_awaited": False, "consumed": 0, **more}
    return AssignBlocks(worker=0, epoch=epoch, blocks=tuple(map(block, numbers)), reason="", **fields)


def begun(*numbers: int) -> BlockQueue:
    queue = BlockQueue()
    queue.begin_epoch(0)
    queue.on_assigned(assign_blocks(*numbers))
    return queue


def test_blocks_are_consumed_in_the_order_of_assignment_and_kept_until_contributed():
    queue = begun(3, 5)
    assert (len(queue), queue.started) == (2, ())
    assert not queue.start(5)
    assert queue.start(3)
    assert queue.start(5)
    assert (len(queue), queue.started) == (0, (3, 5))
    assert queue.pop_contribution(is_counted=True) == (3, 5)
    assert queue.started == queue.pop_contribution(is_counted=True) == ()


def test_a_block_that_is_not_counted_is_never_contributed():
    queue = begun(3)
    queue.start(3)
    assert queue.pop_contribution(is_counted=False) == ()
    assert queue.pop_contribution(is_counted=True) == ()


def test_blocks_are_loaded_ahead_once_each_and_in_order():
    queue = begun(1, 2)
    assert [queue.next_to_load(), queue.next_to_load(), queue.next_to_load()] == [block(1), block(2), None]
    assert queue.start(1)
    queue.on_assigned(assign_blocks(3))
    assert [queue.next_to_load(), queue.next_to_load()] == [block(3), None]


def test_a_new_assignment_replaces_the_queue_and_what_is_being_loaded():
    queue = begun(1, 2)
    assert queue.next_to_load() == block(1)
    queue.on_assigned(assign_blocks(7, replaces_queue=True))
    assert not queue.start(1)
    assert queue.next_to_load() == block(7)
    assert queue.start(7)


def test_an_epoch_is_exhausted_after_the_last_assignment_when_no_block_is_left():
    queue = begun(1)
    queue.on_assigned(assign_blocks(is_last=True))
    assert not queue.is_exhausted
    queue.start(1)
    assert queue.is_exhausted
    queue.begin_epoch(1)
    assert not queue.is_exhausted
    queue.on_assigned(assign_blocks(is_last=True))  # of the epoch before
    assert not queue.is_exhausted


def test_a_worker_is_awaited_until_it_starts_a_block_or_begins_another_epoch():
    queue = begun(1)
    queue.on_assigned(assign_blocks(is_awaited=True))
    queue.on_assigned(assign_blocks())
    assert queue.is_awaited
    queue.start(1)
    assert not queue.is_awaited
    queue.on_assigned(assign_blocks(is_awaited=True))
    queue.begin_epoch(1)
    assert not queue.is_awaited


def test_the_number_of_used_samples_is_that_of_the_current_epoch():
    queue = begun()
    queue.on_assigned(assign_blocks(consumed=8))
    assert queue.samples_used == 8
    queue.begin_epoch(1)
    assert queue.samples_used == 0
    queue.on_assigned(assign_blocks(consumed=12))
    assert queue.samples_used == 0
    queue.on_assigned(assign_blocks(epoch=1, consumed=4))
    assert queue.samples_used == 4


def test_after_a_loop_that_broke_off_only_new_assignments_count():
    """Blocks that were assigned before the coordinator knew of it are dropped."""
    queue = begun(1, 2)
    queue.start(1)
    queue.discard()
    assert (len(queue), queue.started) == (0, ())
    queue.begin_epoch(1)
    queue.on_assigned(assign_blocks(3, is_awaited=True))
    queue.on_assigned(assign_blocks(epoch=1, is_last=True))
    assert (len(queue), queue.is_awaited, queue.is_exhausted) == (0, False, False)
    queue.on_assigned(assign_blocks(4, epoch=1, replaces_queue=True))
    queue.on_assigned(assign_blocks(5, epoch=1))
    assert [queue.next_to_load(), queue.next_to_load()] == [block(4), block(5)]
