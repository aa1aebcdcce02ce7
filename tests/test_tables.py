"""What a server keeps of a namespace, against one array of everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.numerics import tables
from offbeat.numerics.entries import Entries
from offbeat.numerics.tables import ArrayTable
from offbeat.numerics.updates import SGD, Adam, Assign, Sum

KEYS = 60


def some_entries(data, *, width=0):
    shape = (width,) if width else ()
    first = data.draw(st.integers(0, KEYS - 1))
    last = data.draw(st.integers(first + 1, KEYS))
    numbers = np.random.default_rng(data.draw(st.integers(0, 1000)))
    if data.draw(st.booleans()):
        return first, last, Entries(first, numbers.normal(size=(last - first, *shape)).astype(np.float32))
    listed = sorted(data.draw(st.sets(st.integers(first, last - 1), max_size=20)))
    keys = np.array(listed, np.int64)
    return first, last, Entries(first, numbers.normal(size=(len(keys), *shape)).astype(np.float32), keys)


def of_all(content):
    return np.arange(content.first, content.first + len(content)) if content.keys is None else content.keys


@pytest.mark.parametrize("dense_keys_max", [1000, 3])
@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("update", [Sum(), SGD(0.1, 0.9, nesterov=True), Adam(0.01)], ids=repr)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_blocks_are_as_one_array_of_all_keys(update, width, dense_keys_max, data):
    shape = (width,) if width else ()
    whole = {name: np.zeros((KEYS, *shape), np.float32) for name in ("values", *update.states)}
    before, tables.DENSE_KEYS_MAX = tables.DENSE_KEYS_MAX, dense_keys_max
    try:
        table = ArrayTable(KEYS, data.draw(st.integers(4, KEYS)), update, width=width)
        for _ in range(4):
            first, last, content = some_entries(data, width=width)
            table.check(content, first, last)
            table.apply(first, last, content)
            keys = of_all(content)
            rows = {name: array[keys] for name, array in whole.items()}
            update.apply(rows["values"], {name: rows[name] for name in update.states}, content.values)
            for name, array in whole.items():
                array[keys] = rows[name]
        first, last, wanted = some_entries(data, width=width)
        read = table.read(first, last, wanted.keys)
        assert np.array_equal(read.values, whole["values"][of_all(read)])
    finally:
        tables.DENSE_KEYS_MAX = before


@pytest.mark.parametrize("keys", [KEYS, 2**40])
def test_a_block_that_is_copied_goes_on_as_the_original_would(keys):
    one, another = (ArrayTable(keys, keys // 3, Adam(0.1)) for _ in range(2))
    pushed = Entries(0, np.ones(3, np.float32), np.array([1, 5, keys // 3 - 1], np.int64))
    one.apply(0, keys // 3, pushed)
    another.apply(0, keys // 3, Entries(0, np.full(1, 7, np.float32), np.array([2], np.int64)))
    another.copy_in(0, keys // 3, one.copy_out(0, keys // 3))
    for table in (one, another):
        table.apply(0, keys // 3, pushed)
    assert np.array_equal(one.read(0, 2**62, pushed.keys).values, another.read(0, 2**62, pushed.keys).values)
    assert another.read(0, 2**62, np.array([2], np.int64)).values == 0
    assert another.read(0, 2**62, pushed.keys).values.all()


def test_a_copy_does_not_change_with_the_original():
    table = ArrayTable(10, 10, Sum())
    table.apply(0, 10, Entries(0, np.ones(10, np.float32)))
    copied = table.copy_out(0, 10)
    table.apply(0, 10, Entries(0, np.ones(10, np.float32)))
    assert copied["values"].tolist() == [1.0] * 10


def test_what_is_dropped_is_zero_again_and_takes_no_memory():
    table = ArrayTable(20, 10, Sum())
    table.apply(0, 20, Entries(0, np.ones(20, np.float32)))
    assert table.size_bytes == 20 * 4
    table.drop(0, 10)
    assert table.size_bytes == 10 * 4
    assert table.read(0, 20, None).values.tolist() == [0.0] * 10 + [1.0] * 10
    assert table.copy_out(0, 10) is None
    table.copy_in(10, 20, None)
    assert not table.read(0, 20, None).values.any()


def test_a_key_of_billions_takes_as_much_as_is_pushed():
    table = ArrayTable(2**62, 2**61, Assign())
    keys = np.array([3, 2**60, 2**61 + 5], np.int64)
    table.apply(0, 2**62, Entries(0, np.array([1, 2, 3], np.float32), keys))
    assert table.size_bytes == 3 * 4
    assert table.read(0, 2**62, np.array([3, 4, 2**60, 2**61 + 5], np.int64)).values.tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Entries(0, np.ones(10)), "expected rows of float32"),
        (Entries(0, np.ones((10, 2), np.float32)), r"shape \(\), got float32 and \(2,\)"),
        (Entries(0, np.ones(9, np.float32)), "values of 10 keys, got 9"),
        (Entries(1, np.ones(10, np.float32)), "rows from key 0 on, got them from 1 on"),
        (Entries(0, np.ones(2, np.float32), np.array([3, 3])), "ascending keys, each once, got 3 before 3"),
        (Entries(0, np.ones(2, np.float32), np.array([3, 10])), "keys from 0 to below 10, got 3 to 10"),
        (Entries(0, np.ones(1, np.float32), np.array([3, 4])), "values of 2 keys, got 1"),
    ],
)
def test_what_cannot_be_pushed_is_refused(content, words):
    with pytest.raises(ValueError, match=words):
        ArrayTable(20, 10, Sum()).check(content, 0, 10)


class FailsBelowZero:
    """An update of a user's own, which changes rows before it fails."""

    states = ("count",)

    def apply(self, values, states, pushed):
        states["count"] += 1
        values += pushed
        if (values < 0).any():
            raise ArithmeticError("below zero")


@pytest.mark.parametrize("keys", [20, 2**40])
def test_what_an_update_fails_on_is_found_before_anything_changes(keys):
    table = ArrayTable(keys, keys // 2, FailsBelowZero(), may_fail=True)
    far = keys // 2 + 1
    for content in (
        Entries(3, np.ones(4, np.float32)),
        Entries(0, np.ones(2, np.float32), np.array([4, far])),
    ):
        table.rehearse(0, keys, content)
        table.apply(0, keys, content)
    listed = np.array([3, 4, 5, far])
    before = table.copy_out(0, keys // 2), table.read(0, keys, listed).values.tolist()
    assert before[1] == [1, 2, 1, 1]
    for rows in ([-1.0, -3.0], [-2.0, 0.0]):
        bad = Entries(0, np.array(rows, np.float32), np.array([3, far]))
        with pytest.raises(ValueError, match=r"cannot take what was pushed: .*below zero"):
            table.rehearse(0, keys, bad)
    assert table.read(0, keys, listed).values.tolist() == before[1]
    after = table.copy_out(0, keys // 2)
    assert all(np.array_equal(after[name], array) for name, array in before[0].items())
    table.rehearse(0, keys, Entries(0, np.array([-1.0], np.float32), np.array([far])))


@pytest.mark.parametrize(("keys", "width"), [(2**62, 0), (2**29 + 1, 0), (1, 2**62), (2**20, 2**9 + 1)])
def test_no_memory_is_taken_for_more_values_than_a_message_may_have(keys, width):
    table = ArrayTable(keys, keys, Sum(), width=width)
    with pytest.raises(ValueError, match=f"values of at most {2**31} bytes"):
        table.read(0, keys, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keys": 5, "block_keys": 6}, "blocks of 1 to 5 keys, got 6"),
        ({"keys": 5, "block_keys": 0}, "blocks of 1 to 5 keys, got 0"),
        ({"keys": 5, "block_keys": 5, "width": -1}, "at least 0 numbers"),
        ({"keys": 5, "block_keys": 5, "dtype": np.int32}, "float32 or float64, got int32"),
    ],
)
def test_a_table_that_cannot_be_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        ArrayTable(update=Sum(), **arguments)
