"""Buffers of pulls: parts are received in place, and late parts do not change an answer."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from offbeat.numerics.ps.entries import Entries, PushMeta
from offbeat.numerics.ps.memory import allocate_page_aligned
from offbeat.policies.ps.range_clock import ClockRange
from offbeat.runtime.ps.pull_buffer import PullBuffer
from offbeat.runtime.transport.buffer_pool import BufferPool

FLOATS = np.dtype(np.float32)
PART = 50_000  # keys of a part, enough to be received in place


def answer(last: int = 4 * PART, keys: np.ndarray | None = None, width: tuple[int, ...] = ()) -> PullBuffer:
    return PullBuffer(0, last, keys, width, FLOATS, BufferPool())


def coming(count: int, *width: int, dtype: type = np.float32) -> np.ndarray:
    return np.empty((count, *width), dtype)


def land(one: PullBuffer, first: int, last: int, value: float) -> Entries:
    """Receives a whole part in its place."""
    place = one.place_for(first, last, coming(last - first))
    assert place is not None
    place[...] = value
    one.on_received(first, last, place)
    return Entries(first, place)


def parts(*found: Entries) -> tuple[tuple[int, int, Entries], ...]:
    return tuple((one.first, one.first + len(one), one) for one in found)


def test_parts_are_received_in_the_returned_rows():
    one = answer(2 * PART)
    first, second = land(one, 0, PART, 1), land(one, PART, 2 * PART, 2)
    rows = one.rows(parts(first, second))
    assert np.shares_memory(rows, first.values)
    assert np.shares_memory(rows, second.values)
    assert (rows == np.repeat([1, 2], PART)).all()
    assert rows.dtype == FLOATS


def test_a_part_received_elsewhere_is_copied_to_its_place():
    one = answer(2 * PART)
    here, elsewhere = land(one, 0, PART, 1), Entries(PART, np.full(PART, 3, FLOATS))
    one.on_received(PART, 2 * PART, elsewhere.values)
    assert (one.rows(parts(here, elsewhere)) == np.repeat([1, 3], PART)).all()


def test_rows_of_listed_keys_are_received_in_their_order():
    keys = np.arange(0, 8 * PART, 4)
    one = answer(8 * PART, keys, (2,))
    place = one.place_for(4 * PART, 8 * PART, coming(PART, 2))
    assert place is not None
    place[...] = 5
    one.on_received(4 * PART, 8 * PART, place)
    before = Entries(0, np.zeros((PART, 2), FLOATS), keys[:PART])
    rows = one.rows(
        ((0, 4 * PART, before), (4 * PART, 8 * PART, Entries(4 * PART, place, keys[PART:]))),
    )
    assert rows.shape == (2 * PART, 2)
    assert (rows[PART:] == 5).all()
    assert not rows[:PART].any()


def test_each_place_is_assigned_once():
    one = answer()
    assert one.place_for(0, 2 * PART, coming(2 * PART)) is not None
    assert one.place_for(0, 2 * PART, coming(2 * PART)) is None
    assert one.place_for(PART, 3 * PART, coming(2 * PART)) is None
    assert one.place_for(2 * PART, 3 * PART, coming(PART)) is not None


def test_a_repeated_part_does_not_change_the_returned_rows():
    """A server may be asked twice, and the second answer may contain more pushes."""
    one = answer(PART)
    place = one.place_for(0, PART, coming(PART))
    assert place is not None
    again = one.place_for(0, PART, coming(PART))  # announced before the first part is complete
    place[...] = 1
    one.on_received(0, PART, place)
    rows = one.rows(parts(Entries(0, place)))
    if again is not None:
        again[...] = 2
    assert (rows == 1).all()


def test_a_part_still_being_received_does_not_change_the_answer():
    one = answer(PART)
    late = one.place_for(0, PART, coming(PART))
    assert late is not None
    late[...] = 7
    other = Entries(0, np.full(PART, 1, FLOATS))
    one.on_received(0, PART, other.values)
    rows = one.rows(parts(other))
    late[...] = 8
    assert (rows == 1).all()


@pytest.mark.parametrize(
    ("first", "last", "rows"),
    [
        (0, PART, coming(PART - 1)),
        (0, PART, coming(PART, 2)),
        (0, PART, coming(PART, dtype=np.float64)),
        (3 * PART, 5 * PART, coming(2 * PART)),
        (-PART, 0, coming(PART)),
        (0, 10, coming(10)),
    ],
    ids=["too few", "too wide", "other numbers", "too far", "before", "small"],
)
def test_a_part_that_does_not_fit_gets_no_place(first: int, last: int, rows: np.ndarray):
    assert answer().place_for(first, last, rows) is None


def test_small_parts_are_joined():
    one = answer(4)
    found = [Entries(0, np.ones(2, FLOATS)), Entries(2, np.zeros(2, FLOATS))]
    for part in found:
        one.on_received(part.first, part.first + 2, part.values)
    assert one.rows(parts(*found)).tolist() == [1, 1, 0, 0]


def test_memory_is_reused_when_its_array_has_no_references():
    buffers = BufferPool()
    array = buffers.allocate_array((100, 1000), FLOATS)
    place = array.__array_interface__["data"][0]
    view = array[3:]
    del array
    assert buffers.allocate_array((100, 1000), FLOATS).__array_interface__["data"][0] != place
    del view
    assert buffers.allocate_array((50_000, 2), FLOATS).__array_interface__["data"][0] == place


def test_buffers_of_unused_sizes_are_freed_for_other_sizes():
    made = []
    buffers = BufferPool(lambda size: made.append(size) or allocate_page_aligned(size))
    small = [
        buffers.allocate_array((8 * 1024 * 1024,), FLOATS) for _ in range(8)
    ]  # 256 MiB, the maximum that is kept
    del small[2:]
    large = []
    for _ in range(3):
        large.clear()
        large += [buffers.allocate_array((16 * 1024 * 1024,), FLOATS) for _ in range(2)]
    assert made == [2**25] * 8 + [2**26] * 2
    assert not any(np.shares_memory(one, other) for one, other in combinations([*small, *large], 2))
    small.clear()
    large.clear()
    huge = buffers.allocate_array(
        (2**26 + 1,), FLOATS
    )  # more than the maximum: no other buffer is freed for it
    assert huge.nbytes == made[-1]
    buffers.allocate_array((16 * 1024 * 1024,), FLOATS)
    assert len(made) == 11


def test_a_pool_keeps_the_sizes_that_its_owner_says():
    made = []
    buffers = BufferPool(
        lambda size: made.append(size) or np.empty(size, np.uint8), bytes_min=8, bytes_max=400
    )
    for count in (1, 100, 100, 1000, 1000):  # 4 bytes are numpy's, 400 are kept, 4000 are too many
        buffers.allocate_array((count,), FLOATS)
    assert made == [400, 4000, 4000]


def test_memory_with_a_reader_is_not_reused():
    made, is_read = [], True
    buffers = BufferPool(lambda size: made.append(size) or np.empty(size, np.uint8), lambda buffer: is_read)
    for _ in range(3):
        buffers.allocate_array((PART,), FLOATS)
    assert made == [4 * PART] * 3
    is_read = False
    buffers.allocate_array((PART,), FLOATS)
    assert len(made) == 3


def test_states_give_rows_by_name_and_times_give_a_pair():
    def part(first, value):
        rows = np.full(2, value, FLOATS)
        return Entries(first, rows, None, PushMeta(states={"mean": rows * 2}))

    found, pieces = parts(part(0, 1), part(2, 5)), (ClockRange(0, 2, 7),)
    for times in (False, True):
        result = PullBuffer(0, 4, None, (), FLOATS, BufferPool(), states=True, times=times).result(
            found, pieces
        )
        states, clock_ranges = result if times else (result, pieces)
        assert clock_ranges == pieces
        assert {name: rows.tolist() for name, rows in states.items()} == {
            "values": [1, 1, 5, 5],
            "mean": [2, 2, 10, 10],
        }
    rows, clock_ranges = PullBuffer(0, 4, None, (), FLOATS, BufferPool(), times=True).result(found, pieces)
    assert (rows.tolist(), clock_ranges) == ([1, 1, 5, 5], pieces)


def test_parts_with_states_get_no_place():
    one = PullBuffer(0, PART, None, (), FLOATS, BufferPool(), states=True)
    assert one.place_for(0, PART, coming(PART)) is None
