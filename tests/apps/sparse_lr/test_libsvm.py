"""Sparse examples: LIBSVM's text from and to files, parts of rows, generated rows; a9a if present."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.apps.sparse_lr.libsvm import read_libsvm, write_libsvm
from offbeat.apps.sparse_lr.powerlaw import FEATURES_MAX, power_law_blocks
from offbeat.apps.sparse_lr.proximal_newton import solve
from offbeat.apps.sparse_lr.sparse import SignedColumns, SparseRows, concatenate_rows
from offbeat.data import DEFAULT_DIR, DataError


def read(folder: Path, text: bytes, **rows: int) -> SparseRows:
    path = folder / "examples"
    path.write_bytes(text)
    return read_libsvm(path, **rows)


def same(one: SparseRows, other: SparseRows) -> bool:
    fields = ("labels", "starts", "keys", "values")
    return all(
        getattr(one, name).dtype == getattr(other, name).dtype
        and getattr(one, name).tobytes() == getattr(other, name).tobytes()
        for name in fields
    )


def test_rows_labels_keys_and_values_are_those_of_the_text(tmp_path):
    text = b"# a comment\n+1 3:1 11:-.5 # another\n\n   \n-1\r\n2.5\t0:1e3 9223372036854775807:+2 \n-1 7:0.25"
    rows = read(tmp_path, text)
    assert rows.labels.tolist() == [1, -1, 2.5, -1]
    assert rows.starts.tolist() == [0, 2, 2, 4, 5]
    assert rows.keys.tolist() == [3, 11, 0, 2**63 - 1, 7]
    assert rows.values.tolist() == [1, -0.5, 1000, 2, 0.25]
    assert (rows.labels.dtype, rows.starts.dtype) == (np.float64, np.int64)
    assert (rows.keys.dtype, rows.values.dtype) == (np.int64, np.float64)


@pytest.mark.parametrize("text", [b"", b"\n\n", b"# nothing\n"])
def test_a_file_without_rows_has_none(tmp_path, text):
    rows = read(tmp_path, text)
    assert (len(rows), rows.starts.tolist(), len(rows.keys)) == (0, [0], 0)


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ("one 1:1", "a finite number as label", "one"),
        ("3:1 4:1", "a finite number as label", "3:1"),
        ("nan 1:1", "a finite number as label", "nan"),
        ("1e999 1:1", "a finite number as label", "1e999"),
        ("1 3 4:1", "key:value with a key of digits", "3"),
        ("1 3 4:5:6", "key:value with a key of digits", "3"),
        ("1 3: 4", "a finite number after the colon", "3:"),
        ("1 3:4:5", "a finite number after the colon", "3:4:5"),
        ("1 qid:3 4:1", "key:value with a key of digits", "qid:3"),
        ("1 -3:1", "key:value with a key of digits", "-3:1"),
        ("1 1_0:1", "key:value with a key of digits", "1_0:1"),
        ("1 3:1_0", "a finite number after the colon", "3:1_0"),
        ("1 3:inf", "a finite number after the colon", "3:inf"),
        ("1 3:1e999", "a finite number after the colon", "3:1e999"),
        ("1 3:e", "a finite number after the colon", "3:e"),
        ("1 5:1 5:1", "a key above 5, the previous one", "5:1"),
        ("1 7:1 8:1 2:1 9:x", "a key above 8, the previous one", "2:1"),
        ("1 9223372036854775808:1", "a key of at most 9223372036854775807", "9223372036854775808:1"),
        (f"1 {'9' * 5000}:1", "a key of at most 9223372036854775807", "9" * 40),
        ("1 3:\xff", "a finite number after the colon", "3:\\\\xff"),
    ],
)
def test_a_malformed_field_is_reported_with_file_line_expected_and_found_text(
    tmp_path, line, expected, found
):
    """The lines before it are good, also one that begins with a smaller key than the last one's."""
    for others in ("", "1 also:wrong\n"):
        with pytest.raises(DataError) as caught:
            read(tmp_path, f"\n1 4:1 5:1\n-1 1:1\n{line}\n{others}".encode("latin-1"))
        assert str(caught.value) == f"{tmp_path}/examples, line 4: expected {expected}, found '{found}'"


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir], ids=["nothing", "a folder"])
def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path, make):
    path = tmp_path / "missing" / "examples"
    make(tmp_path / "missing")
    with pytest.raises(DataError, match=f"{path.parent}: cannot be read .*LIBSVM's text format"):
        read_libsvm(path.parent)
    with pytest.raises(DataError, match=f"{tmp_path}: cannot be written"):
        write_libsvm(tmp_path, power_law_rows(1))


finite = st.floats(allow_nan=False, allow_infinity=False)
features = st.dictionaries(st.integers(0, 2**63 - 1), finite, max_size=4)


@settings(max_examples=50, deadline=None)
@given(examples=st.lists(st.tuples(finite, features), max_size=6))
def test_written_rows_are_read_bit_for_bit(tmp_path_factory, examples):
    rows = SparseRows(
        labels=np.array([label for label, _ in examples], np.float64),
        starts=np.cumsum([0, *(len(row) for _, row in examples)], dtype=np.int64),
        keys=np.array([key for _, row in examples for key in sorted(row)], np.int64),
        values=np.array([row[key] for _, row in examples for key in sorted(row)], np.float64),
    )
    path = tmp_path_factory.mktemp("rows") / "examples"
    write_libsvm(path, rows)
    assert same(read_libsvm(path), rows)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), count=st.integers(0, 12))
def test_a_part_of_the_rows_is_read_as_in_the_whole(tmp_path_factory, data, count):
    """Rows are counted, not lines; beyond the end there are none."""
    path = tmp_path_factory.mktemp("rows") / "examples"
    path.write_text("".join(f"# {i}\n\n{i} {i}:1 {2 * i + 1}:{i}\n" for i in range(count)))
    first = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(first, count))
    whole = read_libsvm(path)
    assert len(whole) == count
    part = read_libsvm(path, first=first, stop=stop)
    assert same(part, whole.row_range(first, stop))
    assert part.labels.tolist() == list(range(first, stop))
    assert same(read_libsvm(path, first=first, stop=count + 5), whole.row_range(first, count))
    assert same(concatenate_rows([whole.row_range(0, first), part, whole.row_range(stop, count)]), whole)


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (2, 1), (0, 41)])
def test_impossible_ranges_of_rows_are_refused(tmp_path, first, stop):
    with pytest.raises(ValueError, match=f"rows within 0 to 40, got {first} to {stop}"):
        power_law_rows(40).row_range(first, stop)
    if stop < 41:
        with pytest.raises(ValueError, match=f"got {first} to {stop}"):
            read_libsvm(tmp_path / "missing", first=first, stop=stop)


def test_lengths_that_do_not_match_are_refused():
    rows = power_law_rows(3)
    with pytest.raises(ValueError, match="one start per row and the end, 3, got 4"):
        SparseRows(labels=rows.labels[:2], starts=rows.starts, keys=rows.keys, values=rows.values)
    with pytest.raises(ValueError, match="the first start, the end and the number of keys"):
        SparseRows(labels=rows.labels, starts=rows.starts, keys=rows.keys[1:], values=rows.values)
    with pytest.raises(ValueError, match="at least one part"):
        concatenate_rows([])


# Columns ------------------------------------------------------------------------------------------------


def test_columns_hold_each_value_times_its_label():
    rows = SparseRows(
        labels=np.array([1.0, -1.0, -1.0]),
        starts=np.array([0, 2, 2, 4]),
        keys=np.array([5, 2**62, 1, 5]),
        values=np.array([1.0, 2.0, 3.0, 4.0]),
    )
    columns = SignedColumns.from_rows(rows)
    assert (len(columns), columns.height) == (3, 3)
    assert columns.keys.tolist() == [1, 5, 2**62]
    assert columns.starts.tolist() == [0, 1, 3, 4]
    assert columns.rows.tolist() == [2, 0, 2, 0]
    assert columns.values.tolist() == [-3, 1, -4, 2]
    assert columns.multiply(np.array([1.0, 10.0, 100.0])).tolist() == [210, 0, -43]
    assert columns.column_sums(columns.values).tolist() == [-3, -3, 2]
    assert columns.column_slice(2, 2**62) == slice(1, 2)
    assert columns.column_slice(5, 2**62 + 1) == columns.column_slice(2, 2**63) == slice(1, 3)


def test_the_rows_of_each_column_ascend():
    """So sums over a column are taken in one order."""
    columns = SignedColumns.from_rows(power_law_rows(500, features=20))
    for place in range(len(columns)):
        assert (np.diff(columns.slice_columns(slice(place, place + 1)).rows) > 0).all()


# Made-up rows -------------------------------------------------------------------------------------------


def power_law_rows(rows: int, **arguments: object) -> SparseRows:
    blocks = list(power_law_blocks(rows, **{"features": 1000, "seed": 3, **arguments}))  # type: ignore[arg-type]
    return concatenate_rows(blocks)


def test_each_block_is_the_same_in_every_partition():
    whole = list(power_law_blocks(1050, 10**9, 3, rows_per_block=100))
    assert [len(block) for block in whole] == [100] * 10 + [50]
    for part in range(3):
        mine = list(power_law_blocks(1050, 10**9, 3, rows_per_block=100, part=part, parts=3))
        assert len(mine) == len(whole[part::3])
        assert all(same(one, other) for one, other in zip(mine, whole[part::3], strict=True))
    assert not same(whole[0], whole[1])
    assert not same(whole[0], next(power_law_blocks(1050, 10**9, 4, rows_per_block=100)))


def test_rows_are_valid_and_no_array_is_as_long_as_the_number_of_features():
    """2^31 features of 8 bytes would be 16 GiB."""
    rows = power_law_rows(500, features=FEATURES_MAX, draws=20)
    assert set(rows.labels) == {-1.0, 1.0}
    assert set(rows.values) == {1.0}
    assert 0 <= rows.keys.min() <= rows.keys.max() < FEATURES_MAX
    for row in range(len(rows)):
        part = rows.row_range(row, row + 1)
        assert 1 <= len(part.keys) <= 20
        assert (np.diff(part.keys) > 0).all()


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_frequencies_follow_the_power_law(exponent):
    """With one draw a row, the k-th of 1,000 features has the integral from k to k + 1 of x^-exponent."""
    rows = power_law_rows(100_000, exponent=exponent, draws=1)
    found = np.sort(np.bincount(rows.keys, minlength=1000))[::-1]
    edges = np.arange(1, 1002, dtype=float)
    below = np.log(edges) if exponent == 1 else (edges ** (1 - exponent) - 1) / (1 - exponent)
    expected = 100_000 * np.diff(below) / below[-1]
    for ranks in (slice(0, 1), slice(1, 10), slice(10, 100), slice(100, 1000)):
        assert found[ranks].sum() == pytest.approx(expected[ranks].sum(), rel=0.1)


def test_frequent_features_are_spread_over_the_keys():
    rows = power_law_rows(20_000, draws=1)
    frequent = np.sort(np.argsort(np.bincount(rows.keys, minlength=1000))[-20:])
    assert np.diff(frequent).max() < 150


def test_labels_follow_a_model_that_can_be_learnt():
    train, test = list(power_law_blocks(4000, 50, 3, exponent=0.5, rows_per_block=2000))
    columns = SignedColumns.from_rows(train)
    found = solve(columns, 5.0)
    weights = np.zeros(50)
    weights[columns.keys] = found.weights
    scores = np.add.reduceat(weights[test.keys], test.starts[:-1])
    majority = max((test.labels > 0).mean(), (test.labels < 0).mean())
    assert (np.sign(scores) == test.labels).mean() > majority + 0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"features": 0}, "1 to 2147483648 features, got 0"),
        ({"features": FEATURES_MAX + 1}, "1 to 2147483648 features"),
        ({"exponent": 0}, "an exponent above 0, got 0"),
        ({"draws": 0}, "got 10, 3, 0 and 4096"),
        ({"seed": -1}, "got 10, -1, 20 and 4096"),
        ({"part": 2, "parts": 2}, "a part of 0 to 1, got 2"),
    ],
)
def test_impossible_generated_rows_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        power_law_rows(10, **arguments)


# The real set -------------------------------------------------------------------------------------------


def test_a9a():
    """Adult: every value is 1, a row has at most 14 of 123 features, about a quarter of the labels are +1."""
    path = DEFAULT_DIR.expanduser() / "a9a"
    if not path.exists():
        pytest.skip(f"a9a is not in {path.parent}; it is at https://www.csie.ntu.edu.tw/~cjlin/libsvmtools")
    rows = read_libsvm(path)
    text = path.read_bytes()
    assert len(rows) == text.count(b"\n") > 32_000
    assert len(rows.keys) == text.count(b":")
    assert set(rows.values) == {1.0}
    assert 1 == rows.keys.min() <= rows.keys.max() <= 123
    assert np.diff(rows.starts).max() == 14
    assert (rows.labels == 1).sum() == text.count(b"+1 ") == 7841
    assert (rows.labels == -1).sum() == len(rows) - 7841
    part = read_libsvm(path, first=20_000, stop=20_010)
    assert same(part, rows.row_range(20_000, 20_010))
