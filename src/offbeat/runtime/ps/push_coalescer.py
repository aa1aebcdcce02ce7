"""Small pushes of neighbouring keys made one: what one costs is mostly not its numbers.

A large one goes alone. It waits here, too, for a pull right behind it may go out as one with it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.tables import Empty
from offbeat.runtime.ps.future import Future

COMBINED_BYTES_MAX: Final = 4 * 1024 * 1024  # of numbers: what a server takes up in one go anyway
SMALL_BYTES_MAX: Final = COMBINED_BYTES_MAX // 16  # of a push that may go out as one with others


class Combiner:
    """Pushes that wait to go out as one, each of which borders on those before it.

    Args:
        empty: (shape, dtype): memory for what is made one, as `np.empty` gives it.
    """

    def __init__(self, empty: Empty = np.empty) -> None:
        self._empty = empty
        self._name = ""
        self._pushes: deque[tuple[Entries, Future]] = deque()  # by their keys, ascending
        self._first = self._last = self._bytes = 0
        self._is_large = False  # the one that is here

    def __len__(self) -> int:
        """How many there are."""
        return len(self._pushes)

    def take(self, content: Entries, future: Future) -> bool:
        """Take a push of neighbouring keys, if it goes with those that are here; return whether it does.

        If it does not, they have to go out before it.
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

    def give(self, count: int | None = None) -> tuple[str, Entries, int, list[Future]]:
        """Return the first of them, by keys, as one push: namespace, content, last key + 1, who waits for it.

        Args:
            count: how many, of those that are here; by default all.
        """
        pushes = self._pushes
        taken = [pushes.popleft() for _ in range(len(pushes) if count is None else count)]
        whole = taken[0][0]
        last = taken[-1][0].first + len(taken[-1][0])
        if len(taken) > 1:
            parts = [content.values for content, _ in taken]
            into = self._empty((last - self._first, *parts[0].shape[1:]), parts[0].dtype)
            whole = Entries(self._first, np.concatenate(parts, out=into))
        self._first = last
        self._bytes -= whole.values.nbytes
        return self._name, whole, last, [future for _, future in taken]
