"""Labelled sparse examples: by rows, as they are read, and by columns, as they are used.

The keys of features may be any non-negative int64, like the keys of parameters on servers; no array here is
as long as the largest key. Nothing here reads files or knows what is learned from the examples.

Shapes: N rows, D keys, Z non-zero values.
"""

# ruff: noqa: N803, N806 - shape suffixes in names are capitals

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.numerics.ps.entries import key_slice


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseRows:
    """Labelled rows in compressed form: row i has `keys[starts[i]:starts[i + 1]]` and the same of `values`.

    Attributes:
        labels: one per row, float64 (N,).
        starts: start of each row, and the end of the last one, int64 (N + 1,), from 0 to Z.
        keys: keys of the features, int64 (Z,), ascending in each row.
        values: values of the features, float64 (Z,).

    Raises:
        ValueError: the lengths are inconsistent.
    """

    labels: NDArray[np.float64]
    starts: NDArray[np.int64]
    keys: NDArray[np.int64]
    values: NDArray[np.float64]

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.labels) + 1:
            raise ValueError(
                f"expected one start per row and the end, {len(self.labels) + 1}, got {len(self.starts)}"
            )
        ends = (0, len(self.values), len(self.values))
        if (found := (int(self.starts[0]), int(self.starts[-1]), len(self.keys))) != ends:
            raise ValueError(f"expected the first start, the end and the number of keys {ends}, got {found}")

    def __len__(self) -> int:
        return len(self.labels)

    def row_numbers(self) -> NDArray[np.int64]:
        """Return the index of the row of each value, int64 (Z,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def row_range(self, first: int, stop: int) -> SparseRows:
        """Return rows `first` to `stop` - 1, such as a worker's shard; keys and values are not copied.

        Raises:
            ValueError: not 0 <= first <= stop <= the number of rows.
        """
        if not 0 <= first <= stop <= len(self):
            raise ValueError(f"expected rows within 0 to {len(self)}, got {first} to {stop}")
        begin, end = self.starts[first], self.starts[stop]
        return SparseRows(
            labels=self.labels[first:stop],
            starts=self.starts[first : stop + 1] - begin,
            keys=self.keys[begin:end],
            values=self.values[begin:end],
        )

    def shard(self, rank: int, workers: int) -> SparseRows:
        """Return the rows of worker `rank` of `workers`; all workers have equally many, or one more."""
        return self.row_range(rank * len(self) // workers, (rank + 1) * len(self) // workers)


def concatenate_rows(parts: Sequence[SparseRows]) -> SparseRows:
    """Return the rows of all parts, in order.

    Raises:
        ValueError: there are no parts.
    """
    if not parts:
        raise ValueError("expected at least one part, got none")
    counts = np.concatenate([np.diff(part.starts) for part in parts])
    return SparseRows(
        labels=np.concatenate([part.labels for part in parts]),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        keys=np.concatenate([part.keys for part in parts]),
        values=np.concatenate([part.values for part in parts]),
    )


def sum_by_index(places: NDArray[np.int64], terms: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the sum of the terms of each position 0 to `count` - 1, added in order; 0 if it has none."""
    # Without any terms bincount returns integers, although its type annotation says floats.
    return np.bincount(places, terms, count).astype(np.float64, copy=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class SignedColumns:
    """Examples by columns, each value multiplied by the label of its row: all that a margin loss needs.

    Column j is `rows[starts[j]:starts[j + 1]]` and the same of `values`.

    Attributes:
        keys: keys of the columns, int64 (D,), ascending.
        starts: start of each column, and the end of the last one, int64 (D + 1,).
        rows: row indices, int64 (Z,).
        values: label times value, float64 (Z,).
        height: N, the number of rows.
    """

    keys: NDArray[np.int64]
    starts: NDArray[np.int64]
    rows: NDArray[np.int64]
    values: NDArray[np.float64]
    height: int

    @classmethod
    def from_rows(cls, rows: SparseRows) -> SignedColumns:
        """Return the columns of all keys that occur in some rows.

        Raises:
            ValueError: a label is neither -1 nor +1.
        """
        invalid = np.flatnonzero(np.abs(rows.labels) != 1)
        if len(invalid):
            first = invalid[0]
            raise ValueError(f"expected labels -1 and +1, got {rows.labels[first]:g} in row {first}")
        keys, counts = np.unique(rows.keys, return_counts=True)
        row_of_Z = rows.row_numbers()
        order = np.argsort(rows.keys, kind="stable")
        return cls(
            keys=keys,
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
            rows=row_of_Z[order],
            values=(rows.values * rows.labels[row_of_Z])[order],
            height=len(rows),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def column_slice(self, first_key: int, stop_key: int) -> slice:
        """Return the slice of `keys` with the keys `first_key` to `stop_key` - 1, which are contiguous."""
        return key_slice(self.keys, first_key, stop_key)

    def slice_columns(self, places: slice) -> SignedColumns:
        """Return contiguous columns, not copied.

        Args:
            places: slice within 0 to D, as `places` returns it.
        """
        begin, end = self.starts[places.start], self.starts[places.stop]
        return SignedColumns(
            keys=self.keys[places],
            starts=self.starts[places.start : places.stop + 1] - begin,
            rows=self.rows[begin:end],
            values=self.values[begin:end],
            height=self.height,
        )

    def select(self, choice_D: NDArray[np.bool_]) -> SignedColumns:
        """Return the columns for which `choice_D` is true; without a copy if those are all."""
        if choice_D.all():
            return self
        counts = np.diff(self.starts)
        choice_Z = np.repeat(choice_D, counts)
        return SignedColumns(
            keys=self.keys[choice_D],
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[choice_D])]),
            rows=self.rows[choice_Z],
            values=self.values[choice_Z],
            height=self.height,
        )

    def multiply(self, vector_D: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of the columns times `vector_D`, (N,); columns with factor 0 cost nothing."""
        nonzero = self.select(vector_D != 0)
        factors = np.repeat(vector_D[vector_D != 0], np.diff(nonzero.starts))
        return sum_by_index(nonzero.rows, nonzero.values * factors, self.height)

    def column_sums(self, terms_Z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of each column's terms, (D,); 0 for a column without any."""
        return sum_by_index(self.column_numbers(), terms_Z, len(self))

    def column_numbers(self) -> NDArray[np.int64]:
        """Return the index of the column of each value, int64 (Z,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))
