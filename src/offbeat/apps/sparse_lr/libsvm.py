"""Reading and writing sparse examples in LIBSVM's text format.

A line is a label followed by `key:value` for each non-zero feature, in ascending order of keys. Nothing here
makes anything dense, renumbers keys or uses the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from offbeat.apps.sparse_lr.sparse import SparseRows, concatenate_rows
from offbeat.errors import DataError

_ROWS_AT_ONCE = 1 << 14
_KEY_MAX = 2**63 - 1
_NUMBER = rb"[-+.0-9eE]+"
_ROW = re.compile(rb"%s(?:\s+[0-9]+:%s)*" % (_NUMBER, _NUMBER))


def read_libsvm(path: Path, *, first: int = 0, stop: int | None = None) -> SparseRows:
    """Read rows `first` to `stop` - 1 of a file, or to its end if `stop` is None or beyond the end.

    Source: C.-C. Chang and C.-J. Lin, "LIBSVM: a library for support vector machines", ACM TIST 2(3), 2011,
    and the README of its package. Deviations: a key may be 0 and as large as int64 allows; `#` begins a
    comment, which ends with its line, as in T. Joachims' SVMlight; blank lines are skipped; a row may have no
    features; `qid:` is an error. Rows before `first` are not validated.

    Args:
        path: the file, plain text.
        first: index of the first row, from 0.
        stop: index after the last row.

    Returns:
        The rows, with labels as they stand in the file.

    Raises:
        DataError: the file cannot be read; a label or a value is not a finite number; a key is not from 0 to
            2^63 - 1 or not above the previous one. The text names file, line and word.
        ValueError: not 0 <= first <= stop.
    """
    if first < 0 or (stop is not None and stop < first):
        raise ValueError(f"expected rows 0 <= first <= stop, got {first} to {stop}")
    blocks = [_rows(path, [], [])]
    try:
        with path.open("rb") as file:
            lines = (
                (number, text)
                for number, line in enumerate(file, 1)
                if (text := line.partition(b"#")[0].strip())
            )
            selected = islice(lines, first, stop)
            while block := list(islice(selected, _ROWS_AT_ONCE)):
                numbers, texts = zip(*block, strict=True)
                blocks.append(_rows(path, numbers, texts))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); expected a file in LIBSVM's text format"
        ) from error
    return concatenate_rows(blocks)


def write_libsvm(path: Path, rows: SparseRows) -> None:
    """Write rows so that `read_libsvm` restores the same bits; an existing file is replaced.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="ascii") as file:
            file.writelines(_lines(rows))
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error


def _lines(rows: SparseRows) -> Iterator[str]:
    labels, starts, keys = rows.labels.tolist(), rows.starts.tolist(), rows.keys.tolist()
    values = rows.values.tolist()
    for row, label in enumerate(labels):
        indices = range(starts[row], starts[row + 1])
        words = [_format_number(label), *(f"{keys[i]}:{_format_number(values[i])}" for i in indices)]
        yield " ".join(words) + "\n"


def _format_number(value: float) -> str:
    return repr(value).removesuffix(".0")


def _rows(path: Path, numbers: Sequence[int], texts: Sequence[bytes]) -> SparseRows:
    """Parse all lines at once; if that fails, find the first bad line and raise its error."""
    words = [text.replace(b":", b" ").split() for text in texts]
    try:
        rows = SparseRows(
            labels=np.array([float(row[0]) for row in words], np.float64),
            starts=np.cumsum([0, *(len(row) // 2 for row in words)], dtype=np.int64),
            keys=np.array([int(key) for row in words for key in row[1::2]], np.int64),
            values=np.array([float(value) for row in words for value in row[2::2]], np.float64),
        )
        is_valid = _is_valid(rows) and all(map(_ROW.fullmatch, texts))
    except (ValueError, OverflowError):
        is_valid = False
    if not is_valid:
        errors = (_line_error(path, number, text) for number, text in zip(numbers, texts, strict=True))
        raise next(error for error in errors if error)
    return rows


def _is_valid(rows: SparseRows) -> bool:
    ascends = np.diff(rows.keys) > 0
    row_starts = rows.starts[1:-1]
    ascends[row_starts[(row_starts > 0) & (row_starts < len(rows.keys))] - 1] = True
    return bool(ascends.all() and np.isfinite(rows.labels).all() and np.isfinite(rows.values).all())


def _line_error(path: Path, number: int, text: bytes) -> DataError | None:
    """Return the error of one line, None if the line is valid."""
    label, *features = text.split()
    previous = -1
    found, expected = label, None if _is_number(label) else "a finite number as label"
    for word in features:
        if expected:
            break
        found, (key, colon, value) = word, word.partition(b":")
        if not colon or not re.fullmatch(rb"[0-9]+", key):
            expected = "key:value with a key of digits"
        elif len(key) > len(str(_KEY_MAX)) or int(key) > _KEY_MAX:
            expected = f"a key of at most {_KEY_MAX}"
        elif int(key) <= previous:
            expected = f"a key above {previous}, the previous one"
        elif not _is_number(value):
            expected = "a finite number after the colon"
        else:
            previous = int(key)
    if not expected:
        return None
    shown = found[:40].decode("ascii", "backslashreplace")
    return DataError(f"{path}, line {number}: expected {expected}, found {shown!r}")


def _is_number(word: bytes) -> bool:
    try:
        return re.fullmatch(_NUMBER, word) is not None and bool(np.isfinite(float(word)))
    except ValueError:
        return False
