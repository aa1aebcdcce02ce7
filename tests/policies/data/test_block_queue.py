"""A worker's side of dealing: what it has, what it owes, and when an epoch is over for it."""

from __future__ import annotations

from typing import Any

from offbeat.events import AssignBlocks, Block
from offbeat.policies.data.block_queue import BlockQueue


def block(number: int, epoch: int = 0) -> Block:
    return Block(number, epoch, ((4 * number, 4 * number + 4),))


def deal(*numbers: int, epoch: int = 0, **more: Any) -> AssignBlocks:
    said = {"replaces_queue": False, "is_last": False, "is_awaited": False, "consumed": 0, **more}
    return AssignBlocks(worker=0, epoch=epoch, blocks=tuple(map(block, numbers)), reason="", **said)


def begun(*numbers: int) -> BlockQueue:
    hand = BlockQueue()
    hand.begin_epoch(0)
    hand.on_assigned(deal(*numbers))
    return hand


def test_blocks_are_taken_in_the_order_in_which_they_were_dealt_and_owed_until_contributed():
    hand = begun(3, 5)
    assert (len(hand), hand.started) == (2, ())
    assert not hand.start(5)
    assert hand.start(3)
    assert hand.start(5)
    assert (len(hand), hand.started) == (0, (3, 5))
    assert hand.pop_contribution(is_counted=True) == (3, 5)
    assert hand.started == hand.pop_contribution(is_counted=True) == ()


def test_what_does_not_count_is_not_named_and_not_owed_either():
    hand = begun(3)
    hand.start(3)
    assert hand.pop_contribution(is_counted=False) == ()
    assert hand.pop_contribution(is_counted=True) == ()


def test_blocks_are_loaded_ahead_once_each_and_taken_from_the_first():
    hand = begun(1, 2)
    assert [hand.next_to_load(), hand.next_to_load(), hand.next_to_load()] == [block(1), block(2), None]
    assert hand.start(1)
    hand.on_assigned(deal(3))
    assert [hand.next_to_load(), hand.next_to_load()] == [block(3), None]


def test_what_is_dealt_anew_takes_the_place_of_what_it_had_and_of_what_is_being_loaded():
    hand = begun(1, 2)
    assert hand.next_to_load() == block(1)
    hand.on_assigned(deal(7, replaces_queue=True))
    assert not hand.start(1)
    assert hand.next_to_load() == block(7)
    assert hand.start(7)


def test_an_epoch_is_over_when_it_was_said_and_nothing_is_left():
    hand = begun(1)
    hand.on_assigned(deal(is_last=True))
    assert not hand.is_exhausted
    hand.start(1)
    assert hand.is_exhausted
    hand.begin_epoch(1)
    assert not hand.is_exhausted
    hand.on_assigned(deal(is_last=True))  # of the epoch before
    assert not hand.is_exhausted


def test_it_is_awaited_until_it_takes_something_or_goes_on_to_another_epoch():
    hand = begun(1)
    hand.on_assigned(deal(is_awaited=True))
    hand.on_assigned(deal())
    assert hand.is_awaited
    hand.start(1)
    assert not hand.is_awaited
    hand.on_assigned(deal(is_awaited=True))
    hand.begin_epoch(1)
    assert not hand.is_awaited


def test_how_far_the_epoch_is_is_that_of_its_own():
    hand = begun()
    hand.on_assigned(deal(consumed=8))
    assert hand.samples_used == 8
    hand.begin_epoch(1)
    assert hand.samples_used == 0
    hand.on_assigned(deal(consumed=12))
    assert hand.samples_used == 0
    hand.on_assigned(deal(epoch=1, consumed=4))
    assert hand.samples_used == 4


def test_after_a_loop_that_broke_off_nothing_is_heard_but_what_is_dealt_anew():
    """What was dealt before the coordinator knew of it is nobody's."""
    hand = begun(1, 2)
    hand.start(1)
    hand.discard()
    assert (len(hand), hand.started) == (0, ())
    hand.begin_epoch(1)
    hand.on_assigned(deal(3, is_awaited=True))
    hand.on_assigned(deal(epoch=1, is_last=True))
    assert (len(hand), hand.is_awaited, hand.is_exhausted) == (0, False, False)
    hand.on_assigned(deal(4, epoch=1, replaces_queue=True))
    hand.on_assigned(deal(5, epoch=1))
    assert [hand.next_to_load(), hand.next_to_load()] == [block(4), block(5)]
