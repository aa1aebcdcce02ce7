"""Assembly of the rows of a pull as they arrive: large parts are received in place, without a copy."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from offbeat.numerics.ps.entries import Entries, Keys, Rows, concatenate_entries, key_slice
from offbeat.policies.ps.range_clock import ClockRange
from offbeat.runtime.transport.buffer_pool import BufferPool

RowsByState: TypeAlias = dict[str, Rows]  # "values", and the states that the update keeps

_LAND_BYTES_MIN: Final = 64 * 1024


class PullBuffer:
    """The result of one pull while it arrives; used in the I/O thread only.

    Args:
        first, last: the range of the pull, keys `first` to `last` - 1.
        keys: those that it lists; None for all.
        shape: of a row.
        dtype: of its numbers.
        buffers: memory for rows.
        states: the pull also requests the states that the update keeps.
        times: the pull also requests the times of this client's pushes.
    """

    def __init__(
        self,
        first: int,
        last: int,
        keys: Keys | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        buffers: BufferPool,
        *,
        states: bool = False,
        times: bool = False,
    ) -> None:
        self._wants_states, self._wants_times = states, times
        self._buffers = buffers
        self._first, self._last, self._keys = first, last, keys
        self._shape, self._dtype = shape, dtype
        self._rows: Rows | None = None
        self._ranges_in_place: list[tuple[int, int]] = []  # ranges that are, or were, received in place
        self._landing: set[tuple[int, int]] = set()  # of these, ranges that have not arrived completely

    @property
    def is_whole_range(self) -> bool:
        """Whether the pull is for all keys of a range, and for rows only."""
        return self._keys is None and not (self._wants_states or self._wants_times)

    def rows_of(self, rows: Rows, first: int, last: int) -> Rows:
        """Return the rows of keys `first` to `last` - 1, out of all rows."""
        return rows[self._slice_of(first, last)]

    def for_range(self, first: int, last: int) -> PullBuffer:
        """Return a `PullBuffer` with rows of the same kind, for all keys `first` to `last` - 1."""
        return PullBuffer(first, last, None, self._shape, self._dtype, self._buffers)

    def place_for(self, first: int, last: int, coming: Rows) -> Rows | None:
        """Return the memory into which a server's rows are to be received; None for memory of their own.

        Memory is given once only, as two arrivals could not be distinguished: an answer that arrives again,
        even from the same server, may contain other pushes, and the first one may be used before all of the
        second has arrived.
        """
        where = self._slice_of(first, last)
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
        if any(first < end and begin < last for begin, end in self._ranges_in_place):
            return None
        self._ranges_in_place.append((first, last))
        self._landing.add((first, last))
        return self._all_rows()[where]

    def on_received(self, first: int, last: int, values: Rows) -> None:
        """Rows have arrived, in place or elsewhere."""
        if self._is_in_place(values):
            self._landing.discard((first, last))

    def result(
        self, parts: tuple[tuple[int, int, Entries], ...], times: tuple[ClockRange, ...]
    ) -> Rows | RowsByState | tuple[Rows | RowsByState, tuple[ClockRange, ...]]:
        """Return the result: rows, or rows by state; with their times if these were requested.

        Args:
            parts: (first, last, entries) for keys `first` to `last` - 1, ascending; together all keys of the
                pull.
            times: the times of this client's pushes.
        """
        rows = self._states(parts) if self._wants_states else self.rows(parts)
        return (rows, times) if self._wants_times else rows

    def _states(self, parts: tuple[tuple[int, int, Entries], ...]) -> RowsByState:
        contents = [content for _, _, content in parts]
        states_of_parts = [one.meta.states or {} for one in contents if one.meta is not None]
        return {"values": concatenate_entries(contents).values} | {
            name: np.concatenate([states[name] for states in states_of_parts]) for name in states_of_parts[0]
        }

    def rows(self, parts: tuple[tuple[int, int, Entries], ...]) -> Rows:
        """Return all rows.

        If another server has answered for a range that is still being received in place, the rows are copied,
        so that what arrives later does not change them.

        Args:
            parts: see `result`.
        """
        if self._rows is None:
            if len(parts) == 1 and parts[0][2].values.flags.writeable:
                return parts[0][2].values
            return concatenate_entries([part for _, _, part in parts]).values
        for first, last, content in parts:
            if not self._is_in_place(content.values):
                self._rows[self._slice_of(first, last)] = content.values
        return self._rows.copy() if self._landing else self._rows

    def _is_in_place(self, values: Rows) -> bool:
        return self._rows is not None and values.base is (
            self._rows if self._rows.base is None else self._rows.base
        )

    def _all_rows(self) -> Rows:
        if self._rows is None:
            count = self._last - self._first if self._keys is None else len(self._keys)
            self._rows = self._buffers.allocate_array((count, *self._shape), self._dtype)
        return self._rows

    def _slice_of(self, first: int, last: int) -> slice:
        if self._keys is None:
            return slice(first - self._first, last - self._first)
        return key_slice(self._keys, first, last)
