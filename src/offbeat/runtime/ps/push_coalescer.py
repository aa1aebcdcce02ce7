"""Coalescing small pushes of adjacent keys into one: their cost is mostly per message, not per byte.

A large push is sent alone. It is kept here too, as a pull that follows it directly may be merged with it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.tables import Allocate
from offbeat.runtime.ps.future import Future

COMBINED_BYTES_MAX: Final = 4 * 1024 * 1024  # of numbers: as much as a server processes at a time anyway
SMALL_BYTES_MAX: Final = COMBINED_BYTES_MAX // 16  # of a push that may be merged with others


class PushCoalescer:
    """Pushes waiting to be sent as one, each adjacent to those before it.

    Args:
        empty: (shape, dtype): returns memory for the merged push, as `np.empty` does.
    """

    def __init__(self, empty: Allocate = np.empty) -> None:
        self._empty = empty
        self._name = ""
        self._pushes: deque[tuple[Entries, Future]] = deque()  # by their keys, ascending
        self._first = self._last = self._bytes = 0
        self._is_large = False  # a single large push is waiting

    def __len__(self) -> int:
        """How many pushes are waiting."""
        return len(self._pushes)

    def try_add(self, content: Entries, future: Future) -> bool:
        """Add a push of adjacent keys if it can be merged with those waiting; return whether it was added.

        If it was not, those waiting have to be sent before it.
        """
        assert future.span is not None
        name, first, last = future.span
        size_bytes = content.values.nbytes
        is_large = size_bytes > SMALL_BYTES_MAX
        whole_bytes = self._bytes + size_bytes
        if not self._pushes:
            self._name, self._first, self._last, self._bytes = name, first, last, 0
            self._pushes.append((content, future))
            self._is_large = is_large
        elif name != self._name or is_large or self._is_large or whole_bytes > COMBINED_BYTES_MAX:
            return False
        elif first == self._last:
            self._last = last
            self._pushes.append((content, future))
        elif last == self._first:
            self._first = first
            self._pushes.appendleft((content, future))
        else:
            return False
        self._bytes += size_bytes
        return True

    def pop_merged(self, count: int | None = None) -> tuple[str, Entries, int, list[Future]]:
        """Remove the first pushes, by keys; return namespace, merged content, last key + 1, futures.

        Args:
            count: how many of those waiting; by default all.
        """
        pushes = self._pushes
        taken = [pushes.popleft() for _ in range(len(pushes) if count is None else count)]
        combined = taken[0][0]
        last = taken[-1][0].first + len(taken[-1][0])
        if len(taken) > 1:
            parts = [content.values for content, _ in taken]
            merged = self._empty((last - self._first, *parts[0].shape[1:]), parts[0].dtype)
            combined = Entries(self._first, np.concatenate(parts, out=merged))
        self._first = last
        self._bytes -= combined.values.nbytes
        return self._name, combined, last, [future for _, future in taken]
