"""A worker's side of dealing: what it has, what it owes, and when an epoch is over for it."""

from __future__ import annotations

from typing import Any

from offbeat.events import Block, Deal
from offbeat.policies.data.block_queue import Hand


def block(number: int, epoch: int = 0) -> Block:
    return Block(number, epoch, ((4 * number, 4 * number + 4),))


def deal(*numbers: int, epoch: int = 0, **more: Any) -> Deal:
    said = {"anew": False, "over": False, "is_awaited": False, "used": 0, **more}
    return Deal(worker=0, epoch=epoch, blocks=tuple(map(block, numbers)), reason="", **said)


def begun(*numbers: int) -> Hand:
    hand = Hand()
    hand.begin(0)
    hand.hear(deal(*numbers))
    return hand


def test_blocks_are_taken_in_the_order_in_which_they_were_dealt_and_owed_until_contributed():
    hand = begun(3, 5)
    assert (len(hand), hand.taken) == (2, ())
    assert not hand.take(5)
    assert hand.take(3)
    assert hand.take(5)
    assert (len(hand), hand.taken) == (0, (3, 5))
    assert hand.contribute(counts=True) == (3, 5)
    assert hand.taken == hand.contribute(counts=True) == ()


def test_what_does_not_count_is_not_named_and_not_owed_either():
    hand = begun(3)
    hand.take(3)
    assert hand.contribute(counts=False) == ()
    assert hand.contribute(counts=True) == ()


def test_blocks_are_loaded_ahead_once_each_and_taken_from_the_first():
    hand = begun(1, 2)
    assert [hand.load(), hand.load(), hand.load()] == [block(1), block(2), None]
    assert hand.take(1)
    hand.hear(deal(3))
    assert [hand.load(), hand.load()] == [block(3), None]


def test_what_is_dealt_anew_takes_the_place_of_what_it_had_and_of_what_is_being_loaded():
    hand = begun(1, 2)
    assert hand.load() == block(1)
    hand.hear(deal(7, anew=True))
    assert not hand.take(1)
    assert hand.load() == block(7)
    assert hand.take(7)


def test_an_epoch_is_over_when_it_was_said_and_nothing_is_left():
    hand = begun(1)
    hand.hear(deal(over=True))
    assert not hand.is_over
    hand.take(1)
    assert hand.is_over
    hand.begin(1)
    assert not hand.is_over
    hand.hear(deal(over=True))  # of the epoch before
    assert not hand.is_over


def test_it_is_awaited_until_it_takes_something_or_goes_on_to_another_epoch():
    hand = begun(1)
    hand.hear(deal(is_awaited=True))
    hand.hear(deal())
    assert hand.is_awaited
    hand.take(1)
    assert not hand.is_awaited
    hand.hear(deal(is_awaited=True))
    hand.begin(1)
    assert not hand.is_awaited


def test_how_far_the_epoch_is_is_that_of_its_own():
    hand = begun()
    hand.hear(deal(used=8))
    assert hand.used == 8
    hand.begin(1)
    assert hand.used == 0
    hand.hear(deal(used=12))
    assert hand.used == 0
    hand.hear(deal(epoch=1, used=4))
    assert hand.used == 4


def test_after_a_loop_that_broke_off_nothing_is_heard_but_what_is_dealt_anew():
    """What was dealt before the coordinator knew of it is nobody's."""
    hand = begun(1, 2)
    hand.take(1)
    hand.throw_away()
    assert (len(hand), hand.taken) == (0, ())
    hand.begin(1)
    hand.hear(deal(3, is_awaited=True))
    hand.hear(deal(epoch=1, over=True))
    assert (len(hand), hand.is_awaited, hand.is_over) == (0, False, False)
    hand.hear(deal(4, epoch=1, anew=True))
    hand.hear(deal(5, epoch=1))
    assert [hand.load(), hand.load()] == [block(4), block(5)]
