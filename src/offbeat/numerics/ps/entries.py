"""Values by key, as clients and servers exchange them, and their validation.

Nothing here knows what the values mean, where they are stored or how they are transferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.int64]  # (K,), ascending, each once
Rows: TypeAlias = NDArray[Any]  # (K,) or (K, width)
UpdateSettings: TypeAlias = Mapping[str, float | Sequence[float]]  # numbers of an update, by field name

KEY_STOP_MAX: Final = 2**63  # the end of a range that ends with the largest key


@dataclass(frozen=True, slots=True, eq=False)
class PushMeta:
    """Optional metadata of a push.

    Attributes:
        weight: number of pushes that the values are the sum of, at least 0; a mean is divided by it.
        settings: numbers of the update for this push only, by name; None for those of the namespace.
        states: state of the update by name, with one row per row of the values; None if there is none. A push
            with states, even an empty mapping, is not a step of the update: its rows replace values and
            states, and states that are missing become zero.
    """

    weight: float = 1.0
    settings: UpdateSettings | None = None
    states: Mapping[str, Rows] | None = None

    def row_slice(self, places: slice) -> PushMeta:
        """Return the metadata of some of the rows."""
        if self.states is None:
            return self
        return replace(self, states={name: rows[places] for name, rows in self.states.items()})


DEFAULT_PUSH_META: Final = PushMeta()


class Entries:
    """Values by key: of contiguous keys from `first` on, or of those that `keys` lists.

    Attributes:
        first: key of the first row, if `keys` is None.
        values: one row per key.
        keys: ascending, each once; None if the keys are contiguous.
        meta: metadata; usually None, which means `DEFAULT_PUSH_META`.
    """

    __slots__ = ("first", "keys", "meta", "values")  # not a dataclass: it has its own wire format

    def __init__(
        self, first: int, values: Rows, keys: Keys | None = None, meta: PushMeta | None = None
    ) -> None:
        self.first, self.values, self.keys, self.meta = first, values, keys, meta

    def key_range(self, first: int, last: int) -> Entries:
        """Return the entries of keys `first` to `last` - 1, not copied."""
        if self.keys is None:
            begin = max(first, self.first)
            places = slice(begin - self.first, max(begin, last) - self.first)
            keys = None
        else:
            begin, places = first, key_slice(self.keys, first, last)
            keys = self.keys[places]
        meta = None if self.meta is None else self.meta.row_slice(places)
        return Entries(begin, self.values[places], keys, meta)

    @property
    def is_replacement(self) -> bool:
        """Whether pushing these entries replaces values and states."""
        return self.meta is not None and self.meta.states is not None

    def key_array(self) -> Keys:
        """Return all keys as an array, also if they are contiguous."""
        if self.keys is not None:
            return self.keys
        return np.arange(self.first, self.first + len(self.values), dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.values)


def concatenate_entries(parts: list[Entries]) -> Entries:
    """Concatenate entries that arrived in ascending parts: all with contiguous keys, or all with listed ones.

    Raises:
        ValueError: there are no parts, or some list keys and some do not.
    """
    if not parts or any((one.keys is None) != (parts[0].keys is None) for one in parts):
        raise ValueError("expected at least one part, and keys in all of them or in none")
    values = parts[0].values.copy() if len(parts) == 1 else np.concatenate([one.values for one in parts])
    listed = [one.keys for one in parts if one.keys is not None]
    return Entries(parts[0].first, values, np.concatenate(listed) if listed else None)


def sum_entries(parts: Sequence[Entries], first: int, last: int) -> Entries:
    """Return the values of keys `first` to `last` - 1, summed by key in the order of the parts.

    If all parts list their keys, the result lists those of any part; otherwise it has all keys of the range.
    The metadata of the parts is ignored.

    Raises:
        ValueError: there are no parts.
    """
    if not parts:
        raise ValueError("expected at least one part")
    parts = [one.key_range(first, last) for one in parts]
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


def key_slice(keys: Keys, first: int, last: int) -> slice:
    """Return the slice of ascending `keys` with the keys `first` to `last` - 1."""
    # Searches for first - 1 and last - 1: 2**63 is not an int64 and would make numpy compare floats.
    begin, end = keys.searchsorted((first - 1, last - 1), side="right").tolist()
    return slice(begin, end)


def find_problem(content: Entries, first: int, last: int) -> str:
    """Return why entries are not one row for each key from `first` to `last` - 1, or for listed ones of them.

    Returns:
        A sentence for an error; empty if the entries are valid.
    """
    problem = "" if content.keys is None else find_keys_problem(content.keys, first, last)
    return problem or find_rows_problem(content, first, last)


def find_keys_problem(keys: Keys, first: int, last: int) -> str:
    """Return why an array is not a valid list of keys from `first` to `last` - 1; empty if it is."""
    if keys.dtype != np.int64 or keys.ndim != 1:
        return f"expected keys as one row of int64, got {keys.dtype} of shape {keys.shape}"
    is_rising = keys[1:] > keys[:-1]
    if not is_rising.all():
        index = int(is_rising.argmin())
        return f"expected ascending keys, each once, got {keys[index]} before {keys[index + 1]}"
    if len(keys) and not first <= int(keys[0]) <= int(keys[-1]) < last:
        return f"expected keys from {first} to below {last}, got {keys[0]} to {keys[-1]}"
    return ""


def find_rows_problem(content: Entries, first: int, last: int) -> str:
    """Return why there is not one row for each key, empty if there is; listed keys are not validated."""
    if content.keys is None and content.first != first:
        return f"expected rows from key {first} on, got them from {content.first} on"
    count = last - first if content.keys is None else len(content.keys)
    return "" if len(content) == count else f"expected values of {count} keys, got {len(content)}"
