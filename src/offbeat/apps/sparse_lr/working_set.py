"""A worker's working set: the part of a parameter vector that its examples need, and linear algebra on it.

A vector has one number, or a row of numbers, for each key; keys that a working set does not list are zero.
Nothing here knows where values come from or where they go.

Source: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, section 3.1
("(key,value) vectors").

Shapes: N rows, K keys of a working set, Z non-zero values of examples.
"""

# ruff: noqa: N803, N806 - shape suffixes in names are capitals

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from offbeat.apps.sparse_lr.sparse import SignedColumns, SparseRows, sum_by_index
from offbeat.numerics.ps.entries import KEY_STOP_MAX, Entries, Keys, Rows, find_problem, key_slice


@dataclass(frozen=True, slots=True, eq=False)
class WorkingSet:
    """A vector that is zero except at some keys.

    All methods but `assign` leave it unchanged and return a new one.

    Attributes:
        keys: int64 (K,), ascending, each once.
        values: float32 or float64, one row per key, (K,) or (K, width).

    Raises:
        ValueError: keys or values of another form.
    """

    keys: Keys
    values: Rows

    def __post_init__(self) -> None:
        if self.values.dtype not in (np.float32, np.float64) or self.values.ndim not in (1, 2):
            raise ValueError(f"expected rows of float32 or float64, got {_described(self.values)}")
        if problem := find_problem(Entries(0, self.values, self.keys), 0, KEY_STOP_MAX):
            raise ValueError(problem)

    @classmethod
    def zeros(cls, keys: Keys, *, width: int = 0, dtype: DTypeLike = np.float32) -> WorkingSet:
        """Return a vector of zeros with these keys.

        Args:
            keys: ascending, each once.
            width: numbers in a row; 0 for a single number per key.
            dtype: float32 or float64.
        """
        return cls(keys, np.zeros((len(keys), width) if width else len(keys), dtype))

    @classmethod
    def from_entries(cls, content: Entries) -> WorkingSet:
        """Return a copy of pulled entries as a vector."""
        return cls(content.key_array(), content.values.copy())

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.keys)

    def entries(self) -> Entries:
        """Return it as entries to push, not copied: do not `assign` until the push is done."""
        return Entries(int(self.keys[0]) if len(self) else 0, self.values, self.keys)

    def values_at(self, keys: NDArray[np.int64]) -> Rows:
        """Return a copy of the values of any keys, in the given order, zero for keys that are not listed."""
        rows = np.zeros((len(keys), *self.values.shape[1:]), self.values.dtype)
        positions, is_listed = self._find(keys)
        rows[is_listed] = self.values[positions]
        return rows

    def assign(self, content: Entries) -> None:
        """Overwrite values with pulled ones, in place; keys that it does not list are ignored.

        Raises:
            ValueError: rows of another type or width, or keys that do not ascend.
        """
        self._check_like(content.values)
        if content.keys is None:
            in_range = key_slice(self.keys, content.first, content.first + len(content))
            self.values[in_range] = content.values[self.keys[in_range] - content.first]
        elif problem := find_problem(content, 0, KEY_STOP_MAX):
            raise ValueError(problem)
        else:
            positions, is_listed = self._find(content.keys)
            self.values[positions] = content.values[is_listed]

    def key_range(self, first: int, last: int) -> WorkingSet:
        """Return the keys `first` to `last` - 1; the values are shared with it, also when assigned to."""
        positions = key_slice(self.keys, first, last)
        return WorkingSet(self.keys[positions], self.values[positions])

    def with_keys(self, keys: Keys) -> WorkingSet:
        """Return a vector that also lists these keys, as zero where this one does not list them."""
        union = np.union1d(self.keys, keys)
        return WorkingSet(union, self.values_at(union))

    def astype(self, dtype: DTypeLike) -> WorkingSet:
        """Return it as float32 or float64."""
        return WorkingSet(self.keys, self.values.astype(dtype))

    def scale(self, factor: float) -> WorkingSet:
        """Return all values multiplied by a number."""
        return WorkingSet(self.keys, self.values * float(factor))

    def add(self, other: WorkingSet) -> WorkingSet:
        """Return the sum of two vectors, with the keys of both.

        Raises:
            ValueError: rows of different type or width.
        """
        return self.axpy(1, other)

    def axpy(self, factor: float, other: WorkingSet) -> WorkingSet:
        """Return self + factor * other, with the keys of both.

        Raises:
            ValueError: rows of different type or width.
        """
        self._check_like(other.values)
        if np.array_equal(self.keys, other.keys):
            return WorkingSet(self.keys, self.values + float(factor) * other.values)
        total = self.with_keys(other.keys)
        total.values[total.keys.searchsorted(other.keys)] += float(factor) * other.values
        return total

    def dot(self, other: WorkingSet) -> float:
        """Return the dot product of two vectors, over all keys and numbers of a row, in float64.

        Raises:
            ValueError: rows of different type or width.
        """
        self._check_like(other.values)
        theirs = other.values if np.array_equal(self.keys, other.keys) else other.values_at(self.keys)
        return float(np.vdot(self.values.astype(np.float64), theirs.astype(np.float64)))

    def norm(self) -> float:
        """Return the Euclidean norm."""
        return float(np.linalg.norm(self.values.astype(np.float64)))

    def _find(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the positions of the given keys that it lists, and a mask of which it lists."""
        if not len(self):
            return np.zeros(0, np.int64), np.zeros(len(keys), np.bool_)
        positions = np.minimum(self.keys.searchsorted(keys), len(self) - 1)
        is_listed = self.keys[positions] == keys
        return positions[is_listed], is_listed

    def _check_like(self, rows: Rows) -> None:
        if (rows.dtype, rows.shape[1:]) != (self.values.dtype, self.values.shape[1:]):
            raise ValueError(
                f"expected rows of {self.values.dtype} and shape {self.values.shape[1:]} as here, got "
                f"{rows.dtype} and {rows.shape[1:]}; use astype for another dtype"
            )


def multiply(examples: SparseRows | SignedColumns, weights: WorkingSet) -> NDArray[np.float64]:
    """Return X w: for each row, the sum of its values times the weights of their keys, float64 (N,).

    For `SignedColumns`, whose values include the labels, these are the margins.

    Args:
        examples: the rows, X.
        weights: one number per key, w.

    Raises:
        ValueError: weights that are rows of numbers.
    """
    if weights.values.ndim != 1:
        raise ValueError(
            f"expected one weight per key, got {_described(weights.values)}; multiply by each column"
        )
    weights_of = weights.values_at(examples.keys).astype(np.float64)
    if isinstance(examples, SignedColumns):
        return examples.multiply(weights_of)
    return sum_by_index(examples.row_numbers(), examples.values * weights_of, len(examples))


def multiply_transposed(examples: SparseRows | SignedColumns, terms_N: NDArray[np.float64]) -> WorkingSet:
    """Return X^T v: for each key that occurs, the sum of its values times the numbers of their rows, float64.

    Args:
        examples: the rows, X.
        terms_N: one number per row, v.

    Raises:
        ValueError: not one number per row.
    """
    height = examples.height if isinstance(examples, SignedColumns) else len(examples)
    if terms_N.shape != (height,):
        raise ValueError(f"expected one number for each of {height} rows, got {_described(terms_N)}")
    if isinstance(examples, SignedColumns):
        return WorkingSet(examples.keys, examples.column_sums(examples.values * terms_N[examples.rows]))
    keys, place_of_Z = np.unique(examples.keys, return_inverse=True)
    terms_Z = examples.values * terms_N[examples.row_numbers()]
    return WorkingSet(keys, sum_by_index(place_of_Z, terms_Z, len(keys)))


def _described(array: Rows) -> str:
    return f"{array.dtype} of shape {array.shape}"
