"""Large arrays begin at a page boundary and live as long as views of them."""

from __future__ import annotations

import numpy as np
import pytest

from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.memory import allocate_page_aligned
from offbeat.numerics.ps.tables import ArrayTable
from offbeat.numerics.ps.updates import Sum
from offbeat.runtime.transport.buffer_pool import BufferPool


def begins_with_a_page(array: np.ndarray) -> bool:
    return array.ctypes.data % 4096 == 0


@pytest.mark.parametrize("size", [1, 4095, 4096, 1_000_000])
def test_allocated_memory_has_its_length_and_begins_at_a_page(size):
    several = [allocate_page_aligned(size, np.zeros) for _ in range(5)]
    for number, one in enumerate(several):
        assert begins_with_a_page(one)
        assert (one.nbytes, one.any()) == (size, False)
        one[:] = number + 1
    assert [set(one.tolist()) for one in several] == [{1}, {2}, {3}, {4}, {5}]


def test_memory_lives_as_long_as_a_view_of_it():
    views = [allocate_page_aligned(1_000_000)[100:200].view(np.float32) for _ in range(20)]
    for number, view in enumerate(views):
        view[:] = number
    assert [view.tolist() for view in views] == [[number] * 25 for number in range(20)]
    memory = allocate_page_aligned(4096)
    assert memory[1:].base is memory  # so that a count of its references includes its views


def test_buffers_begin_at_a_page_and_are_reused_only_without_references():
    buffers = BufferPool()
    first, second = (buffers.allocate_array((250_000,), np.dtype(np.float32)) for _ in range(2))
    assert begins_with_a_page(first)
    assert not np.shares_memory(first, second)
    part, where = first[100:], first.ctypes.data
    del first
    assert buffers.allocate_array((250_000,), np.dtype(np.float32)).ctypes.data != where
    del part
    assert buffers.allocate_array((250_000,), np.dtype(np.float32)).ctypes.data == where


@pytest.mark.parametrize("width", [0, 3])
def test_large_blocks_of_a_table_begin_at_a_page(width):
    shape = (width,) if width else ()
    table = ArrayTable(60_000, 20_000, Sum(), width=width)
    rows = np.arange(60_000 * max(width, 1), dtype=np.float32).reshape(60_000, *shape)
    for _ in range(2):
        table.apply(0, 60_000, Entries(0, rows))
    assert all(begins_with_a_page(one.arrays["values"]) for one in table._runs.values())
    assert np.array_equal(table.read(0, 60_000, None).values, 2 * rows)
