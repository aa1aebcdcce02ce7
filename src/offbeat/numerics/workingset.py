"""A worker's part of a vector of parameters: the keys that its examples need, and linear algebra on them.

A vector has a number, or a row of them, for every key; what a working set does not list is zero. Nothing here
knows where values come from or who gets them.

Source: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, section 3.1
("(key,value) vectors").

Shapes: N rows, K keys of a working set, Z values of examples that are not zero.
"""

# ruff: noqa: N803, N806 - shapes stand in names in capitals

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from offbeat.numerics.ps.entries import LAST_MAX, Entries, Keys, Rows, places_of, problem_of
from offbeat.numerics.sparse import SignedColumns, SparseRows, sums_at


@dataclass(frozen=True, slots=True, eq=False)
class WorkingSet:
    """A vector that is zero but for some keys.

    All but `assign` leave it as it is and return a new one.

    Attributes:
        keys: int64 (K,), ascending, each once.
        values: float32 or float64, one row a key, (K,) or (K, width).

    Raises:
        ValueError: keys or values that are not so.
    """

    keys: Keys
    values: Rows

    def __post_init__(self) -> None:
        if self.values.dtype not in (np.float32, np.float64) or self.values.ndim not in (1, 2):
            raise ValueError(f"expected rows of float32 or float64, got {_told(self.values)}")
        if problem := problem_of(Entries(0, self.values, self.keys), 0, LAST_MAX):
            raise ValueError(problem)

    @classmethod
    def zeros(cls, keys: Keys, *, width: int = 0, dtype: DTypeLike = np.float32) -> WorkingSet:
        """Return a vector of zeros that has room for these keys.

        Args:
            keys: ascending, each once.
            width: numbers in a row; 0 for a number a key, not a row of one.
            dtype: float32 or float64.
        """
        return cls(keys, np.zeros((len(keys), width) if width else len(keys), dtype))

    @classmethod
    def of(cls, content: Entries) -> WorkingSet:
        """Return what was pulled as a vector of its own, copied."""
        return cls(content.listed(), content.values.copy())

    def __len__(self) -> int:
        """How many keys it lists."""
        return len(self.keys)

    def entries(self) -> Entries:
        """Return it as something to push, not copied: `assign` nothing until that is done."""
        return Entries(int(self.keys[0]) if len(self) else 0, self.values, self.keys)

    def at(self, keys: NDArray[np.int64]) -> Rows:
        """Return the values of some keys, in any order, zero where it lists none, as an array of its own."""
        rows = np.zeros((len(keys), *self.values.shape[1:]), self.values.dtype)
        places, is_there = self._found(keys)
        rows[is_there] = self.values[places]
        return rows

    def assign(self, content: Entries) -> None:
        """Take over values that were pulled, in place; keys that it does not list are left out.

        Raises:
            ValueError: other rows than it has, or keys that do not ascend.
        """
        self._check_like(content.values)
        if content.keys is None:
            mine = places_of(self.keys, content.first, content.first + len(content))
            self.values[mine] = content.values[self.keys[mine] - content.first]
        elif problem := problem_of(content, 0, LAST_MAX):
            raise ValueError(problem)
        else:
            places, is_there = self._found(content.keys)
            self.values[places] = content.values[is_there]

    def cut(self, first: int, last: int) -> WorkingSet:
        """Return its keys `first` to `last` - 1; values are not copied, to assign to one is to the other."""
        places = places_of(self.keys, first, last)
        return WorkingSet(self.keys[places], self.values[places])

    def united(self, keys: Keys) -> WorkingSet:
        """Return it with these keys listed too, which are zero where it did not list them."""
        together = np.union1d(self.keys, keys)
        return WorkingSet(together, self.at(together))

    def astype(self, dtype: DTypeLike) -> WorkingSet:
        """Return it in float32 or float64."""
        return WorkingSet(self.keys, self.values.astype(dtype))

    def scale(self, factor: float) -> WorkingSet:
        """Return each value times a number."""
        return WorkingSet(self.keys, self.values * float(factor))

    def add(self, other: WorkingSet) -> WorkingSet:
        """Return the sum of both, of the keys of either.

        Raises:
            ValueError: rows that are not alike.
        """
        return self.axpy(1, other)

    def axpy(self, factor: float, other: WorkingSet) -> WorkingSet:
        """Return this plus a number times the other, of the keys of either.

        Raises:
            ValueError: rows that are not alike.
        """
        self._check_like(other.values)
        if np.array_equal(self.keys, other.keys):
            return WorkingSet(self.keys, self.values + float(factor) * other.values)
        total = self.united(other.keys)
        total.values[total.keys.searchsorted(other.keys)] += float(factor) * other.values
        return total

    def dot(self, other: WorkingSet) -> float:
        """Return the sum of products of all numbers with those at the same place of the other, in float64.

        Raises:
            ValueError: rows that are not alike.
        """
        self._check_like(other.values)
        theirs = other.values if np.array_equal(self.keys, other.keys) else other.at(self.keys)
        return float(np.vdot(self.values.astype(np.float64), theirs.astype(np.float64)))

    def norm(self) -> float:
        """Return the Euclidean length, the root of its dot product with itself."""
        return float(np.linalg.norm(self.values.astype(np.float64)))

    def _found(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return where those of some keys are that it lists, and which of them it does list."""
        if not len(self):
            return np.zeros(0, np.int64), np.zeros(len(keys), np.bool_)
        places = np.minimum(self.keys.searchsorted(keys), len(self) - 1)
        is_there = self.keys[places] == keys
        return places[is_there], is_there

    def _check_like(self, rows: Rows) -> None:
        if (rows.dtype, rows.shape[1:]) != (self.values.dtype, self.values.shape[1:]):
            raise ValueError(
                f"expected rows of {self.values.dtype} and shape {self.values.shape[1:]} as here, got "
                f"{rows.dtype} and {rows.shape[1:]}; use astype for another dtype"
            )


def times(examples: SparseRows | SignedColumns, weights: WorkingSet) -> NDArray[np.float64]:
    """Return X w: for each row, the sum of its values times the weights of their keys, float64 (N,).

    Of `SignedColumns`, whose values have the labels in them, these are the margins.

    Args:
        examples: the rows, X.
        weights: a number a key, w.

    Raises:
        ValueError: weights that are rows of numbers.
    """
    if weights.values.ndim != 1:
        raise ValueError(f"expected one weight a key, got {_told(weights.values)}; multiply by each column")
    weights_of = weights.at(examples.keys).astype(np.float64)
    if isinstance(examples, SignedColumns):
        return examples.times(weights_of)
    return sums_at(examples.row_numbers(), examples.values * weights_of, len(examples))


def times_transposed(examples: SparseRows | SignedColumns, terms_N: NDArray[np.float64]) -> WorkingSet:
    """Return X^T v: for each key that occurs, the sum of its values times the numbers of their rows, float64.

    Args:
        examples: the rows, X.
        terms_N: a number a row, v.

    Raises:
        ValueError: not one number a row.
    """
    height = examples.height if isinstance(examples, SignedColumns) else len(examples)
    if terms_N.shape != (height,):
        raise ValueError(f"expected one number for each of {height} rows, got {_told(terms_N)}")
    if isinstance(examples, SignedColumns):
        return WorkingSet(examples.keys, examples.sums(examples.values * terms_N[examples.rows]))
    keys, place_of_Z = np.unique(examples.keys, return_inverse=True)
    terms_Z = examples.values * terms_N[examples.row_numbers()]
    return WorkingSet(keys, sums_at(place_of_Z, terms_Z, len(keys)))


def _told(array: Rows) -> str:
    return f"{array.dtype} of shape {array.shape}"
