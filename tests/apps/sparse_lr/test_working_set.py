"""Linear algebra on working sets, against plain dictionaries and dense matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.apps.sparse_lr.sparse import SignedColumns, SparseRows
from offbeat.apps.sparse_lr.working_set import WorkingSet, multiply, multiply_transposed
from offbeat.numerics.ps.entries import KEY_STOP_MAX, Entries
from offbeat.numerics.ps.tables import ArrayTable
from offbeat.numerics.ps.updates import SGD

# Few enough for two sets to have some in common, and of every size that a key can have.
ALL_KEYS = [0, 1, 2, 3, 7, 2**40, 2**53 + 1, 2**53 + 2, KEY_STOP_MAX - 2, KEY_STOP_MAX - 1]
KEYS = st.sampled_from(ALL_KEYS)
RANGES = st.tuples(KEYS, st.one_of(KEYS, st.just(KEY_STOP_MAX)))
# Sums and products of a few of these are exact.
NUMBERS = st.integers(-8, 8).map(lambda eighths: eighths / 8)
FACTORS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0])


@st.composite
def working_sets(draw, width=None, dtype=None):
    width = draw(st.sampled_from([0, 2])) if width is None else width
    dtype = draw(st.sampled_from([np.float32, np.float64])) if dtype is None else dtype
    keys = sorted(draw(st.sets(KEYS)))
    row = st.lists(NUMBERS, min_size=width, max_size=width) if width else NUMBERS
    values = [draw(row) for _ in keys]
    shape = (len(keys), width) if width else (len(keys),)
    return WorkingSet(np.array(keys, np.int64), np.array(values, dtype).reshape(shape))


@st.composite
def pairs(draw):
    width, dtype = draw(st.sampled_from([0, 2])), draw(st.sampled_from([np.float32, np.float64]))
    return draw(working_sets(width, dtype)), draw(working_sets(width, dtype))


def as_dict(vector):
    """Each key's row as a list; a number as a list of one."""
    rows = vector.values.reshape(len(vector), -1) if len(vector) else []
    return {key: row.tolist() for key, row in zip(vector.keys.tolist(), rows, strict=True)}


def width_of(vector):
    return vector.values.shape[1] if vector.values.ndim == 2 else 1


# Vectors ------------------------------------------------------------------------------------------------


@given(pairs(), FACTORS)
def test_sums_have_the_keys_of_either_set_and_missing_values_are_zero(pair, factor):
    one, other = pair
    a, b, zero = as_dict(one), as_dict(other), [0.0] * width_of(one)
    before = as_dict(one), as_dict(other)
    for result, times_b in ((one.axpy(factor, other), factor), (one.add(other), 1)):
        assert as_dict(result) == {
            key: [x + times_b * y for x, y in zip(a.get(key, zero), b.get(key, zero), strict=True)]
            for key in sorted({*a, *b})
        }
        assert result.values.dtype == one.values.dtype
        assert not np.shares_memory(result.values, one.values)
    assert (as_dict(one), as_dict(other)) == before


@given(pairs())
def test_products_and_lengths_are_those_of_the_numbers(pair):
    one, other = pair
    a, b, zero = as_dict(one), as_dict(other), [0.0] * width_of(one)
    expected = sum(x * y for key in a for x, y in zip(a[key], b.get(key, zero), strict=True))
    assert one.dot(other) == other.dot(one) == expected
    assert one.norm() == pytest.approx(math.sqrt(sum(x * x for row in a.values() for x in row)))


def test_products_of_float32_are_summed_in_float64():
    """2**24 + 1 has no float32."""
    keys = np.arange(3)
    vector = WorkingSet(keys, np.array([2**24, 1, 1e30], np.float32))
    ones = WorkingSet(keys[:2], np.ones(2, np.float32))
    assert vector.dot(ones) == 2**24 + 1
    assert vector.norm() == pytest.approx(1e30)


@given(working_sets(), FACTORS, st.booleans())
def test_a_scaled_set_has_each_value_times_the_factor(vector, factor, is_numpys):
    result = vector.scale(np.float64(factor) if is_numpys else factor)
    assert as_dict(result) == {key: [factor * x for x in row] for key, row in as_dict(vector).items()}
    assert result.values.dtype == vector.values.dtype
    assert not np.shares_memory(result.values, vector.values)


@given(working_sets(), RANGES)
def test_a_cut_has_the_keys_of_a_range_and_shares_their_values(vector, ends):
    first, last = ends
    part = vector.key_range(first, last)
    assert as_dict(part) == {key: row for key, row in as_dict(vector).items() if first <= key < last}
    part.assign(Entries(0, part.values + 1, part.keys))
    assert {key: as_dict(vector)[key] for key in part.keys.tolist()} == as_dict(part)


@given(working_sets(), st.sets(KEYS))
def test_a_united_set_lists_more_and_is_the_same_vector(vector, more):
    result = vector.with_keys(np.array(sorted(more), np.int64))
    zero = [0.0] * width_of(vector)
    assert as_dict(result) == {key: as_dict(vector).get(key, zero) for key in {*as_dict(vector), *more}}
    assert result.dot(vector) == vector.dot(vector)


@given(working_sets(), st.lists(KEYS))
def test_values_of_any_keys_are_returned_in_any_order(vector, keys):
    result = vector.values_at(np.array(keys, np.int64)).reshape(len(keys), width_of(vector)).tolist()
    assert result == [as_dict(vector).get(key, [0.0] * width_of(vector)) for key in keys]


@given(pairs())
def test_pulled_values_are_assigned_to_the_listed_keys(pair):
    vector, pulled = pair
    before, result = as_dict(vector), as_dict(pulled)
    vector.assign(Entries(0, pulled.values, pulled.keys))
    assert as_dict(vector) == {key: result.get(key, row) for key, row in before.items()}


@given(working_sets(width=0, dtype=np.float32), st.sampled_from([0, 2, 2**40 - 3, KEY_STOP_MAX - 9]))
def test_a_range_that_was_pulled_whole_is_assigned_too(vector, first):
    before, values = as_dict(vector), np.arange(10, 19, dtype=np.float32)
    vector.assign(Entries(first, values))
    assert as_dict(vector) == {
        key: [float(values[key - first])] if first <= key < first + 9 else row for key, row in before.items()
    }


@given(working_sets())
def test_a_pushed_set_round_trips(vector):
    content = vector.entries()
    assert np.shares_memory(content.values, vector.values) or not len(vector)
    again = WorkingSet.from_entries(content)
    assert as_dict(again) == as_dict(vector)
    assert not np.shares_memory(again.values, vector.values)


def test_neighbours_that_were_pulled_are_a_set_of_their_own():
    values = np.ones((2, 3), np.float32)
    vector = WorkingSet.from_entries(Entries(5, values))
    assert vector.keys.tolist() == [5, 6]
    values[...] = 0
    assert vector.values.all()


def test_a_new_set_is_of_zeros():
    keys = np.array([3, 5])
    assert as_dict(WorkingSet.zeros(keys)) == {3: [0], 5: [0]}
    assert WorkingSet.zeros(keys).values.dtype == np.float32
    wide = WorkingSet.zeros(keys, width=2, dtype=np.float64)
    assert wide.values.shape == (2, 2)
    assert wide.astype(np.float32).values.dtype == np.float32


# Examples -----------------------------------------------------------------------------------------------


@st.composite
def examples(draw):
    """Rows, and the same with their labels as a dense matrix whose columns are `ALL_KEYS`."""
    rows = draw(st.lists(st.dictionaries(KEYS, NUMBERS), max_size=5))
    labels = [draw(st.sampled_from([-1.0, 1.0])) for _ in rows]
    dense = np.array([[row.get(key, 0) for key in ALL_KEYS] for row in rows])
    found = [(key, row[key]) for row in rows for key in sorted(row)]
    sparse = SparseRows(
        labels=np.array(labels),
        starts=np.cumsum([0, *map(len, rows)]),
        keys=np.array([key for key, _ in found], np.int64),
        values=np.array([value for _, value in found], np.float64),
    )
    return sparse, dense.reshape(len(rows), len(ALL_KEYS)), np.array(labels)


@given(examples(), st.data())
def test_rows_times_weights_are_those_of_the_dense_matrix(drawn, data):
    sparse, dense, labels = drawn
    weights = data.draw(working_sets(width=0))
    expected = dense @ weights.values_at(np.array(ALL_KEYS)).astype(np.float64)
    assert multiply(sparse, weights).tolist() == expected.tolist()
    assert multiply(SignedColumns.from_rows(sparse), weights).tolist() == (labels * expected).tolist()
    assert multiply(sparse, weights).dtype == np.float64


@given(examples(), st.data())
def test_rows_transposed_times_numbers_are_those_of_the_dense_matrix(drawn, data):
    sparse, dense, labels = drawn
    terms = np.array([data.draw(NUMBERS) for _ in labels])
    columns = SignedColumns.from_rows(sparse)
    for result, expected in (
        (multiply_transposed(sparse, terms), dense.T @ terms),
        (multiply_transposed(columns, terms), dense.T @ (labels * terms)),
    ):
        assert result.keys.tolist() == np.unique(sparse.keys).tolist()
        assert result.values_at(np.array(ALL_KEYS)).tolist() == expected.tolist()


@given(examples(), st.data())
def test_both_products_are_transposes_of_each_other(drawn, data):
    """v . (X w) = (X^T v) . w."""
    sparse, _, labels = drawn
    terms = np.array([data.draw(NUMBERS) for _ in labels])
    weights = data.draw(working_sets(width=0, dtype=np.float64))
    assert float(terms @ multiply(sparse, weights)) == multiply_transposed(sparse, terms).dot(weights)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_of_a_worker_and_a_table_are_those_of_the_dense_matrix(dtype):
    """Least squares: only keys that occur are pulled, computed and pushed."""
    numbers = np.random.default_rng(0)
    keys = np.array(ALL_KEYS[:-2])
    dense, targets = numbers.normal(size=(20, len(keys))), numbers.normal(size=20)
    rows = SparseRows(
        labels=targets,
        starts=np.arange(21) * len(keys),
        keys=np.tile(keys, 20),
        values=dense.ravel(),
    )
    table = ArrayTable(2**62, 2**61, SGD(0.01), dtype=dtype)
    expected = np.zeros(len(keys))
    for _ in range(30):
        weights = WorkingSet.from_entries(table.read(0, 2**62, keys))
        gradient = multiply_transposed(rows, multiply(rows, weights) - targets).astype(dtype)
        table.check(gradient.entries(), 0, 2**62)
        table.apply(0, 2**62, gradient.entries())
        expected -= 0.01 * dense.T @ (dense @ expected - targets)
    weights.assign(table.read(0, 2**62, keys))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(weights.values, expected, rtol=1e-4 if dtype == np.float32 else 1e-12)


# Refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        ([1, 2], np.ones(2, np.float16), r"rows of float32 or float64, got float16 of shape \(2,\)"),
        ([1, 2], np.ones(2, np.int64), "rows of float32 or float64, got int64"),
        ([1, 2], np.ones((2, 1, 1)), r"got float64 of shape \(2, 1, 1\)"),
        ([1, 2], np.ones(3), "values of 2 keys, got 3"),
        ([2, 1], np.ones(2), "ascending keys, each once, got 2 before 1"),
        ([1, 1], np.ones(2), "ascending keys, each once, got 1 before 1"),
        ([-1, 1], np.ones(2), "keys from 0 to below 9223372036854775808, got -1 to 1"),
        ([1.0, 2.0], np.ones(2), "keys as one row of int64, got float64"),
    ],
)
def test_impossible_sets_are_refused(keys, values, words):
    with pytest.raises(ValueError, match=words):
        WorkingSet(np.array(keys), values)


@pytest.mark.parametrize(
    "rows", [np.ones(2), np.ones((2, 2), np.float32)], ids=["another dtype", "another width"]
)
def test_incompatible_sets_are_refused(rows):
    one, other = WorkingSet.zeros(np.array([1, 2])), WorkingSet(np.array([1, 2]), rows)
    words = r"rows of float32 and shape \(\) as here, got .*; use astype for another dtype"
    for refused in (
        one.add,
        one.dot,
        lambda other: one.axpy(2, other),
        lambda other: one.assign(other.entries()),
    ):
        with pytest.raises(ValueError, match=words):
            refused(other)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Entries(0, np.ones(2, np.float32), np.array([2, 1])), "ascending keys, each once, got 2 before 1"),
        (Entries(0, np.ones(1, np.float32), np.array([1, 2])), "values of 2 keys, got 1"),
    ],
)
def test_impossible_pulls_are_refused(content, words):
    vector = WorkingSet.zeros(np.array([1, 2]))
    with pytest.raises(ValueError, match=words):
        vector.assign(content)
    assert not vector.values.any()


def test_incompatible_products_are_refused():
    rows = SparseRows(
        labels=np.ones(2), starts=np.array([0, 1, 1]), keys=np.array([4]), values=np.array([2.0])
    )
    for one in (rows, SignedColumns.from_rows(rows)):
        with pytest.raises(
            ValueError, match=r"one weight per key, got float32 of shape \(1, 3\); multiply by"
        ):
            multiply(one, WorkingSet.zeros(np.array([4]), width=3))
        for terms in (np.ones(1), np.ones(3), np.ones((2, 1))):
            with pytest.raises(ValueError, match="one number for each of 2 rows, got float64 of shape"):
                multiply_transposed(one, terms)
