"""Sparse examples in LIBSVM's text format, from files and to them.

A line is a label and then `key:value` for every feature that is not zero, keys ascending. Nothing here makes
anything dense, renumbers keys or goes to the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from offbeat.errors import DataError
from offbeat.numerics.sparse import SparseRows, joined

_ROWS_AT_ONCE = 1 << 14
_KEY_MAX = 2**63 - 1
_NUMBER = rb"[-+.0-9eE]+"
_ROW = re.compile(rb"%s(?:\s+[0-9]+:%s)*" % (_NUMBER, _NUMBER))


def read_libsvm(path: Path, *, first: int = 0, stop: int | None = None) -> SparseRows:
    """Read rows `first` to `stop` - 1 of a file, to its end where `stop` is None; fewer if it has fewer.

    Source: C.-C. Chang and C.-J. Lin, "LIBSVM: a library for support vector machines", ACM TIST 2(3), 2011,
    and the README of its package. Deviations: a key may be 0 and as large as int64 allows; `#` begins a
    comment, which ends with its line, as in T. Joachims' SVMlight; blank lines are no rows; a row without
    features is one; `qid:` is refused. Of rows before `first` nothing is checked.

    Args:
        path: the file, plain text.
        first: the number of the first row, from 0.
        stop: the number after the last row.

    Returns:
        The rows, with labels as they are in the file.

    Raises:
        DataError: the file cannot be read; a label or a value is not a finite number, a key is not 0 to
            2^63 - 1 or not above the one before it. The text names file, line and word.
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
            wanted = islice(lines, first, stop)
            while block := list(islice(wanted, _ROWS_AT_ONCE)):
                numbers, texts = zip(*block, strict=True)
                blocks.append(_rows(path, numbers, texts))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); expected a file in LIBSVM's text format"
        ) from error
    return joined(blocks)


def write_libsvm(path: Path, rows: SparseRows) -> None:
    """Write rows so that reading gives the same bits; a file that is there is replaced.

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
        places = range(starts[row], starts[row + 1])
        words = [_shown(label), *(f"{keys[place]}:{_shown(values[place])}" for place in places)]
        yield " ".join(words) + "\n"


def _shown(value: float) -> str:
    return repr(value).removesuffix(".0")


def _rows(path: Path, numbers: Sequence[int], texts: Sequence[bytes]) -> SparseRows:
    """All rows of some lines, at once; only if that fails, one after another until the one at fault."""
    words = [text.replace(b":", b" ").split() for text in texts]
    try:
        rows = SparseRows(
            labels=np.array([float(row[0]) for row in words], np.float64),
            starts=np.cumsum([0, *(len(row) // 2 for row in words)], dtype=np.int64),
            keys=np.array([int(key) for row in words for key in row[1::2]], np.int64),
            values=np.array([float(value) for row in words for value in row[2::2]], np.float64),
        )
        is_sound = _is_sound(rows) and all(map(_ROW.fullmatch, texts))
    except (ValueError, OverflowError):
        is_sound = False
    if not is_sound:
        faults = (_fault(path, number, text) for number, text in zip(numbers, texts, strict=True))
        raise next(fault for fault in faults if fault)
    return rows


def _is_sound(rows: SparseRows) -> bool:
    ascends = np.diff(rows.keys) > 0
    begins = rows.starts[1:-1]
    ascends[begins[(begins > 0) & (begins < len(rows.keys))] - 1] = True
    return bool(ascends.all() and np.isfinite(rows.labels).all() and np.isfinite(rows.values).all())


def _fault(path: Path, number: int, text: bytes) -> DataError | None:
    """What is wrong with one line, None if nothing is."""
    label, *features = text.split()
    before = -1
    found, expected = label, None if _is_number(label) else "a finite number as label"
    for word in features:
        if expected:
            break
        found, (key, colon, value) = word, word.partition(b":")
        if not colon or not re.fullmatch(rb"[0-9]+", key):
            expected = "key:value with a key of digits"
        elif len(key) > len(str(_KEY_MAX)) or int(key) > _KEY_MAX:
            expected = f"a key of at most {_KEY_MAX}"
        elif int(key) <= before:
            expected = f"a key above {before}, the one before it"
        elif not _is_number(value):
            expected = "a finite number after the colon"
        else:
            before = int(key)
    if not expected:
        return None
    shown = found[:40].decode("ascii", "backslashreplace")
    return DataError(f"{path}, line {number}: expected {expected}, found {shown!r}")


def _is_number(word: bytes) -> bool:
    try:
        return re.fullmatch(_NUMBER, word) is not None and bool(np.isfinite(float(word)))
    except ValueError:
        return False
