"""The rows of a pull, put together as they come: large parts land in their place, with no copy between."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from offbeat.numerics.ps.entries import Entries, Keys, Rows, gathered, places_of
from offbeat.policies.ps.range_clock import Piece
from offbeat.runtime.transport.buffer_pool import Buffers

States: TypeAlias = dict[str, Rows]  # "values", and what the update keeps besides them

_LAND_BYTES_MIN: Final = 64 * 1024


class Answer:
    """What becomes of one pull; all of it in the links' thread.

    Args:
        first, last: of all its keys.
        keys: those that it lists; None for all.
        shape: of a row.
        dtype: of its numbers.
        buffers: memory for rows.
        states: it wants what the update keeps, too.
        times: it wants the times of this client's pushes, too.
    """

    def __init__(
        self,
        first: int,
        last: int,
        keys: Keys | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        buffers: Buffers,
        *,
        states: bool = False,
        times: bool = False,
    ) -> None:
        self._wants_states, self._wants_times = states, times
        self._buffers = buffers
        self._first, self._last, self._keys = first, last, keys
        self._shape, self._dtype = shape, dtype
        self._rows: Rows | None = None
        self._placed: list[tuple[int, int]] = []  # what comes, or has come, to its place
        self._landing: set[tuple[int, int]] = set()  # of these, what has not all come

    @property
    def is_plain(self) -> bool:
        """Whether it is of all keys of a range, and wants nothing but rows."""
        return self._keys is None and not (self._wants_states or self._wants_times)

    def part(self, rows: Rows, first: int, last: int) -> Rows:
        """Return those of all rows that are of keys `first` to `last` - 1."""
        return rows[self._where(first, last)]

    def like(self, first: int, last: int) -> Answer:
        """Return another of such rows, of all keys `first` to `last` - 1."""
        return Answer(first, last, None, self._shape, self._dtype, self._buffers)

    def place(self, first: int, last: int, coming: Rows) -> Rows | None:
        """Return where rows that a server sends belong; None where they have to come elsewhere.

        A place is given once only, for nobody could tell apart what comes to it: an answer that comes again,
        from the same server too, may hold other pushes, and the first one may be taken before all of it has.
        """
        where = self._where(first, last)
        shape = (where.stop - where.start, *self._shape)
        if (
            self._wants_states
            or coming.nbytes < _LAND_BYTES_MIN
            or coming.shape != shape
            or coming.dtype != self._dtype
        ):
            return None
        if not self._first <= first < last <= self._last:
            return None
        if any(first < end and begin < last for begin, end in self._placed):
            return None
        self._placed.append((first, last))
        self._landing.add((first, last))
        return self._whole()[where]

    def came(self, first: int, last: int, values: Rows) -> None:
        """Rows have come, wherever they were put."""
        if self._is_here(values):
            self._landing.discard((first, last))

    def result(
        self, parts: tuple[tuple[int, int, Entries], ...], times: tuple[Piece, ...]
    ) -> Rows | States | tuple[Rows | States, tuple[Piece, ...]]:
        """Return what was wanted, of parts that ascend: rows, by name if with states, and times."""
        rows = self._states(parts) if self._wants_states else self.rows(parts)
        return (rows, times) if self._wants_times else rows

    def _states(self, parts: tuple[tuple[int, int, Entries], ...]) -> States:
        contents = [content for _, _, content in parts]
        told = [one.terms.states or {} for one in contents if one.terms is not None]
        return {"values": gathered(contents).values} | {
            name: np.concatenate([states[name] for states in told]) for name in told[0]
        }

    def rows(self, parts: tuple[tuple[int, int, Entries], ...]) -> Rows:
        """Return all rows, of parts that ascend.

        What is still landing, though another server has answered since, goes where nobody looks any more.
        """
        if self._rows is None:
            if len(parts) == 1 and parts[0][2].values.flags.writeable:
                return parts[0][2].values
            return gathered([part for _, _, part in parts]).values
        for first, last, content in parts:
            if not self._is_here(content.values):
                self._rows[self._where(first, last)] = content.values
        return self._rows.copy() if self._landing else self._rows

    def _is_here(self, values: Rows) -> bool:
        return self._rows is not None and values.base is (
            self._rows if self._rows.base is None else self._rows.base
        )

    def _whole(self) -> Rows:
        if self._rows is None:
            count = self._last - self._first if self._keys is None else len(self._keys)
            self._rows = self._buffers.array((count, *self._shape), self._dtype)
        return self._rows

    def _where(self, first: int, last: int) -> slice:
        if self._keys is None:
            return slice(first - self._first, last - self._first)
        return places_of(self._keys, first, last)
