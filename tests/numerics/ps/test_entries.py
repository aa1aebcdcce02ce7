"""Values of some keys, against plain dictionaries; and the one check of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.numerics.ps.entries import (
    KEY_STOP_MAX,
    Entries,
    PushMeta,
    concatenate_entries,
    find_problem,
    sum_entries,
)

# Neighbours at both ends of the range of keys, where floats would confuse them.
KEYS = st.one_of(st.integers(0, 30), st.integers(KEY_STOP_MAX - 30, KEY_STOP_MAX - 1))


@st.composite
def entries(draw):
    if draw(st.booleans()):
        first = draw(KEYS)
        count = draw(st.integers(0, min(20, KEY_STOP_MAX - first)))
        return Entries(first, np.arange(count, dtype=np.float32))
    keys = np.array(sorted(draw(st.sets(KEYS, max_size=20))), np.int64)
    return Entries(0, np.arange(len(keys), dtype=np.float32), keys)


@st.composite
def entries_within(draw, count):
    """Values of all keys below `count`, or of some."""
    numbers = np.random.default_rng(draw(st.integers(0, 99)))
    if draw(st.booleans()):
        return Entries(0, numbers.integers(100, size=count).astype(np.float32))
    keys = np.array(sorted(draw(st.sets(st.integers(0, count - 1)))), np.int64)
    return Entries(0, numbers.integers(100, size=len(keys)).astype(np.float32), keys)


def as_dict(content):
    return dict(zip(content.key_array().tolist(), content.values.tolist(), strict=True))


@given(entries(), st.one_of(KEYS, st.just(KEY_STOP_MAX)), st.one_of(KEYS, st.just(KEY_STOP_MAX)))
def test_a_cut_holds_the_entries_of_a_range_and_copies_nothing(content, first, last):
    part = content.key_range(first, last)
    assert as_dict(part) == {key: value for key, value in as_dict(content).items() if first <= key < last}
    assert len(part) == len(part.values)
    assert not len(part) or np.shares_memory(part.values, content.values)


@given(entries(), st.one_of(KEYS, st.just(KEY_STOP_MAX)), st.one_of(KEYS, st.just(KEY_STOP_MAX)))
def test_every_part_has_the_metadata_of_the_whole(content, first, last):
    content.meta = PushMeta(weight=2.5, states={"mean": content.values + 1})
    part = content.key_range(first, last)
    assert part.meta.weight == 2.5
    assert part.is_replacement
    assert np.array_equal(part.meta.states["mean"], part.values + 1)
    assert not Entries(0, content.values).key_range(first, last).is_replacement


def test_the_largest_keys_are_distinguished():
    """As floats they would all be 2**63."""
    content = Entries(0, np.arange(3.0), np.arange(KEY_STOP_MAX - 3, KEY_STOP_MAX, dtype=np.int64))
    assert content.key_range(KEY_STOP_MAX - 2, KEY_STOP_MAX).values.tolist() == [1, 2]
    assert content.key_range(0, KEY_STOP_MAX - 1).values.tolist() == [0, 1]
    assert len(content.key_range(KEY_STOP_MAX, KEY_STOP_MAX)) == 0


@given(entries(), st.lists(st.one_of(KEYS, st.just(KEY_STOP_MAX)), max_size=3))
def test_cut_parts_make_the_whole(content, middles):
    ends = [0, *sorted(middles), KEY_STOP_MAX]
    whole = concatenate_entries([content.key_range(first, last) for first, last in pairwise(ends)])
    assert as_dict(whole) == as_dict(content)
    assert (whole.keys is None) == (content.keys is None)


def test_parts_of_two_kinds_are_refused():
    with pytest.raises(ValueError, match="keys in all of them or in none"):
        concatenate_entries([Entries(0, np.ones(1)), Entries(1, np.ones(1), np.array([1]))])
    with pytest.raises(ValueError, match="at least one part"):
        concatenate_entries([])


@given(entries())
def test_a_row_for_each_key_within_the_range_is_accepted(content):
    keys = content.key_array()
    if content.keys is None:
        assert find_problem(content, content.first, content.first + len(content)) == ""
    elif len(keys):
        assert find_problem(content, int(keys[0]), int(keys[-1]) + 1) == ""
        assert "expected keys from" in find_problem(content, int(keys[0]) + 1, KEY_STOP_MAX)
        assert "expected keys from" in find_problem(content, 0, int(keys[-1]))
    else:
        assert find_problem(content, 3, 4) == ""


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (Entries(0, np.ones(9)), "expected values of 10 keys, got 9"),
        (Entries(1, np.ones(10)), "expected rows from key 0 on, got them from 1 on"),
        (Entries(0, np.ones(1), np.array([3, 4])), "expected values of 2 keys, got 1"),
        (
            Entries(0, np.ones(3), np.array([2, 4, 4])),
            "expected ascending keys, each once, got 4 before 4",
        ),
        (Entries(0, np.ones(1), np.array([10])), "expected keys from 0 to below 10, got 10 to 10"),
        (
            Entries(0, np.ones(1), np.array([3], np.int32)),
            "expected keys as one row of int64, got int32 of shape (1,)",
        ),
        (
            Entries(0, np.ones(1), np.array([[3]])),
            "expected keys as one row of int64, got int64 of shape (1, 1)",
        ),
    ],
)
def test_a_problem_names_the_expected_and_the_found_values(content, problem):
    assert find_problem(content, 0, 10) == problem


@given(st.lists(entries_within(40), min_size=1, max_size=4), st.integers(0, 39), st.integers(1, 40))
def test_a_sum_adds_the_values_of_its_parts_by_key(parts, first, count):
    last = min(40, first + count)
    total = sum_entries(parts, first, last)
    cuts = [as_dict(part.key_range(first, last)) for part in parts]
    expected = {key: sum(one.get(key, 0) for one in cuts) for one in cuts for key in one}
    if any(part.keys is None for part in parts):
        expected = dict.fromkeys(range(first, last), 0) | expected
    assert as_dict(total) == expected


def test_a_sum_without_parts_is_refused():
    with pytest.raises(ValueError, match="at least one part"):
        sum_entries([], 0, 1)
