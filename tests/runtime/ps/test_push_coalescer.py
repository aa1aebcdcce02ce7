"""Small pushes of neighbouring keys are merged into one push."""

from __future__ import annotations

import numpy as np
import pytest

from offbeat.numerics.ps.entries import Entries
from offbeat.runtime.ps.future import Future
from offbeat.runtime.ps.push_coalescer import SMALL_BYTES_MAX, PushCoalescer


def push(first: int, *numbers: float) -> Entries:
    return Entries(first, np.array(numbers, np.float32))


def future(name: str, content: Entries) -> Future:
    span = name, content.first, content.first + len(content)
    return Future("a push", lambda *_: "", lambda wait, _, timeout_s: wait(timeout_s), span)


def coalesced(*pushes: tuple[str, Entries]) -> tuple[PushCoalescer, list[Future], list[bool]]:
    coalescer, futures = PushCoalescer(), [future(*one) for one in pushes]
    were_added = [coalescer.try_add(one, waiter) for (_, one), waiter in zip(pushes, futures, strict=True)]
    return coalescer, futures, were_added


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)], ids=str)
def test_adjacent_pushes_are_merged_in_the_order_of_their_keys(order):
    parts = [push(10, 1, 2), push(12, 3), push(13, 4, 5, 6)]
    coalescer, futures, were_added = coalesced(*(("w", parts[number]) for number in order))
    assert all(were_added)
    name, content, last, waiting = coalescer.pop_merged()
    assert (name, content.first, last) == ("w", 10, 16)
    assert waiting == [futures[order.index(place)] for place in range(3)]
    assert content.values.tolist() == [1, 2, 3, 4, 5, 6]
    assert not len(coalescer)


@pytest.mark.parametrize(
    "other",
    [("w", push(13, 1)), ("w", push(10, 1)), ("w", push(11, 1)), ("w", push(8, 1)), ("v", push(12, 1))],
    ids=["a gap", "the same keys", "some of them", "a gap before", "another namespace"],
)
def test_pushes_that_are_not_adjacent_are_not_merged(other):
    coalescer, futures, were_added = coalesced(("w", push(10, 1, 2)), other)
    assert were_added == [True, False]
    assert coalescer.pop_merged()[-1] == futures[:1]


def test_a_single_push_is_returned_without_a_copy():
    content = push(3, 1)
    coalescer, _, _ = coalesced(("w", content))
    assert coalescer.pop_merged()[1] is content


def test_some_pushes_may_be_popped_and_others_merged_with_the_rest():
    pushes = [push(first, first) for first in range(10, 15)]
    coalescer, futures, _ = coalesced(*(("w", one) for one in pushes))
    _, content, last, waiting = coalescer.pop_merged(2)
    assert (content.first, content.values.tolist(), last, waiting) == (10, [10, 11], 12, futures[:2])
    assert len(coalescer) == 3
    assert not coalescer.try_add(push(10, 11), future("w", push(10, 11)))
    assert coalescer.try_add(push(15, 15), future("w", push(15, 15)))
    _, content, last, waiting = coalescer.pop_merged()
    assert (content.first, content.values.tolist(), last) == (12, [12, 13, 14, 15], 16)
    assert waiting[:3] == futures[2:]
    assert not len(coalescer)


def test_a_merged_push_is_bounded_in_size():
    rows = np.zeros(SMALL_BYTES_MAX // 4, np.float32)
    pushes = [("w", Entries(number * len(rows), rows)) for number in range(17)]
    coalescer, _, were_added = coalesced(*pushes)
    assert were_added == [True] * 16 + [False]
    coalescer.pop_merged(1)
    assert coalescer.try_add(pushes[-1][1], future(*pushes[-1]))  # below the limit again


@pytest.mark.parametrize("is_first", [True, False])
def test_a_large_push_is_not_merged(is_first):
    large, small = Entries(0, np.zeros(SMALL_BYTES_MAX // 4 + 1, np.float32)), push(0, 1)
    parts = [large, small] if is_first else [small, large]
    parts[1].first = len(parts[0])
    coalescer, futures, were_added = coalesced(*(("w", part) for part in parts))
    assert were_added == [True, False]
    name, content, last, waiting = coalescer.pop_merged()
    assert (name, content, last, waiting) == ("w", parts[0], len(parts[0]), futures[:1])
    assert coalescer.try_add(parts[1], futures[1])
