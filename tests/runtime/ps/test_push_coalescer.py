"""Small pushes of neighbouring keys go out as one."""

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


def taken(*pushes: tuple[str, Entries]) -> tuple[PushCoalescer, list[Future], list[bool]]:
    combiner, futures = PushCoalescer(), [future(*one) for one in pushes]
    were_taken = [combiner.try_add(one, who) for (_, one), who in zip(pushes, futures, strict=True)]
    return combiner, futures, were_taken


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)], ids=str)
def test_neighbours_are_one_push_in_the_order_of_their_keys(order):
    parts = [push(10, 1, 2), push(12, 3), push(13, 4, 5, 6)]
    combiner, futures, were_taken = taken(*(("w", parts[number]) for number in order))
    assert all(were_taken)
    name, content, last, waiting = combiner.pop_merged()
    assert (name, content.first, last) == ("w", 10, 16)
    assert waiting == [futures[order.index(place)] for place in range(3)]
    assert content.values.tolist() == [1, 2, 3, 4, 5, 6]
    assert not len(combiner)


@pytest.mark.parametrize(
    "other",
    [("w", push(13, 1)), ("w", push(10, 1)), ("w", push(11, 1)), ("w", push(8, 1)), ("v", push(12, 1))],
    ids=["a gap", "the same keys", "some of them", "a gap before", "another namespace"],
)
def test_others_are_not(other):
    combiner, futures, were_taken = taken(("w", push(10, 1, 2)), other)
    assert were_taken == [True, False]
    assert combiner.pop_merged()[-1] == futures[:1]


def test_one_alone_goes_as_it_is():
    content = push(3, 1)
    combiner, _, _ = taken(("w", content))
    assert combiner.pop_merged()[1] is content


def test_some_may_go_and_others_join_the_rest():
    pushes = [push(first, first) for first in range(10, 15)]
    combiner, futures, _ = taken(*(("w", one) for one in pushes))
    _, content, last, waiting = combiner.pop_merged(2)
    assert (content.first, content.values.tolist(), last, waiting) == (10, [10, 11], 12, futures[:2])
    assert len(combiner) == 3
    assert not combiner.try_add(push(10, 11), future("w", push(10, 11)))
    assert combiner.try_add(push(15, 15), future("w", push(15, 15)))
    _, content, last, waiting = combiner.pop_merged()
    assert (content.first, content.values.tolist(), last) == (12, [12, 13, 14, 15], 16)
    assert waiting[:3] == futures[2:]
    assert not len(combiner)


def test_no_more_than_so_much_is_made_one():
    rows = np.zeros(SMALL_BYTES_MAX // 4, np.float32)
    pushes = [("w", Entries(number * len(rows), rows)) for number in range(17)]
    combiner, _, were_taken = taken(*pushes)
    assert were_taken == [True] * 16 + [False]
    combiner.pop_merged(1)
    assert combiner.try_add(pushes[-1][1], future(*pushes[-1]))  # there is room again


@pytest.mark.parametrize("is_first", [True, False])
def test_a_large_one_waits_alone(is_first):
    large, small = Entries(0, np.zeros(SMALL_BYTES_MAX // 4 + 1, np.float32)), push(0, 1)
    parts = [large, small] if is_first else [small, large]
    parts[1].first = len(parts[0])
    combiner, futures, were_taken = taken(*(("w", part) for part in parts))
    assert were_taken == [True, False]
    name, content, last, waiting = combiner.pop_merged()
    assert (name, content, last, waiting) == ("w", parts[0], len(parts[0]), futures[:1])
    assert combiner.try_add(parts[1], futures[1])
