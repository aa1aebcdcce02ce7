"""Values of some keys: what clients and servers say to each other, and the one check of it.

Nothing here knows what the values mean, where they are kept or how they travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.int64]  # (K,), ascending, each once
Rows: TypeAlias = NDArray[Any]  # (K,) or (K, width)
Settings: TypeAlias = Mapping[str, float | Sequence[float]]  # numbers of an update, by the name of its field

LAST_MAX: Final = 2**63  # the end of a range that ends with the largest key


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What is said besides values, where anything is.

    Attributes:
        weight: of how many pushes the values are the sum already, at least 0; what a mean is divided by.
        settings: numbers of the update that hold for this push, by name; None for those of the namespace.
        states: by name, what an update keeps, rows beside those of the values; None where nothing is said of
            it. A push that has them, be it an empty mapping, is no step of the update: its rows take the
            place of what is there, and zeros do where a name is missing.
    """

    weight: float = 1.0
    settings: Settings | None = None
    states: Mapping[str, Rows] | None = None

    def cut(self, places: slice) -> Terms:
        """Return what is said of some of the rows."""
        if self.states is None:
            return self
        return replace(self, states={name: rows[places] for name, rows in self.states.items()})


PLAIN: Final = Terms()


class Entries:
    """Values of some keys: of all from `first` on, or of those that `keys` lists.

    Attributes:
        first: the key of the first row, where `keys` is None.
        values: one row a key.
        keys: ascending, each once; None where the keys are neighbours.
        terms: what is said besides the values; None, which is `PLAIN`, nearly always.
    """

    __slots__ = ("first", "keys", "terms", "values")  # no dataclass: the wire has a form of its own for it

    def __init__(
        self, first: int, values: Rows, keys: Keys | None = None, terms: Terms | None = None
    ) -> None:
        self.first, self.values, self.keys, self.terms = first, values, keys, terms

    def cut(self, first: int, last: int) -> Entries:
        """Return what is there for keys `first` to `last` - 1, without copying it."""
        if self.keys is None:
            begin = max(first, self.first)
            places = slice(begin - self.first, max(begin, last) - self.first)
            keys = None
        else:
            begin, places = first, places_of(self.keys, first, last)
            keys = self.keys[places]
        terms = None if self.terms is None else self.terms.cut(places)
        return Entries(begin, self.values[places], keys, terms)

    @property
    def replaces(self) -> bool:
        """Whether, pushed, these take the place of what is there."""
        return self.terms is not None and self.terms.states is not None

    def listed(self) -> Keys:
        """Return the keys, also where they are neighbours."""
        if self.keys is not None:
            return self.keys
        return np.arange(self.first, self.first + len(self.values), dtype=np.int64)

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self.values)


def gathered(parts: list[Entries]) -> Entries:
    """Return as one what came in parts, ascending: neighbouring keys where all are, or all are listed.

    Raises:
        ValueError: no parts, or some with keys and some without.
    """
    if not parts or any((one.keys is None) != (parts[0].keys is None) for one in parts):
        raise ValueError("expected at least one part, and keys in all of them or in none")
    values = parts[0].values.copy() if len(parts) == 1 else np.concatenate([one.values for one in parts])
    listed = [one.keys for one in parts if one.keys is not None]
    return Entries(parts[0].first, values, np.concatenate(listed) if listed else None)


def summed(parts: Sequence[Entries], first: int, last: int) -> Entries:
    """Return the values of keys `first` to `last` - 1, added up by key in the order of the parts.

    Where all parts list their keys, those that any of them lists; otherwise all. What the parts say besides
    their values is left out.

    Raises:
        ValueError: no parts.
    """
    if not parts:
        raise ValueError("expected at least one part")
    parts = [one.cut(first, last) for one in parts]
    shape, dtype = parts[0].values.shape[1:], parts[0].values.dtype
    listed = [one.keys for one in parts if one.keys is not None]
    if len(listed) < len(parts):
        total = np.zeros((last - first, *shape), dtype)
        for one in parts:
            begin = one.first - first
            total[slice(begin, begin + len(one)) if one.keys is None else one.keys - first] += one.values
        return Entries(first, total)
    keys = np.unique(np.concatenate(listed))
    total = np.zeros((len(keys), *shape), dtype)
    for one, own in zip(parts, listed, strict=True):
        total[np.searchsorted(keys, own)] += one.values
    return Entries(first, total, keys)


def places_of(keys: Keys, first: int, last: int) -> slice:
    """Return where the keys from `first` to `last` - 1 lie among some that ascend."""
    # By the key before each: 2**63, which is none, would make numpy compare as floats.
    begin, end = keys.searchsorted((first - 1, last - 1), side="right").tolist()
    return slice(begin, end)


def problem_of(content: Entries, first: int, last: int) -> str:
    """Say why something is not a row for each key from `first` to `last` - 1, or for listed ones of them.

    Returns:
        A sentence for an error; empty where nothing is wrong.
    """
    problem = "" if content.keys is None else problem_of_keys(content.keys, first, last)
    return problem or problem_of_rows(content, first, last)


def problem_of_keys(keys: Keys, first: int, last: int) -> str:
    """Say why something cannot be a list of keys from `first` to `last` - 1, as `problem_of` does."""
    if keys.dtype != np.int64 or keys.ndim != 1:
        return f"expected keys as one row of int64, got {keys.dtype} of shape {keys.shape}"
    is_rising = keys[1:] > keys[:-1]
    if not is_rising.all():
        place = int(is_rising.argmin())
        return f"expected ascending keys, each once, got {keys[place]} before {keys[place + 1]}"
    if len(keys) and not first <= int(keys[0]) <= int(keys[-1]) < last:
        return f"expected keys from {first} to below {last}, got {keys[0]} to {keys[-1]}"
    return ""


def problem_of_rows(content: Entries, first: int, last: int) -> str:
    """Say why rows are not one for each key, as `problem_of` does; listed keys are taken as they are."""
    if content.keys is None and content.first != first:
        return f"expected rows from key {first} on, got them from {content.first} on"
    count = last - first if content.keys is None else len(content.keys)
    return "" if len(content) == count else f"expected values of {count} keys, got {len(content)}"
