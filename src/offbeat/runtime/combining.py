"""Small pushes of neighbouring keys made one: what one costs is mostly not its numbers."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from offbeat.numerics.entries import Entries
from offbeat.numerics.tables import Empty
from offbeat.runtime.future import Future

COMBINED_BYTES_MAX: Final = 4 * 1024 * 1024  # of numbers: what a server takes up in one go anyway


class Combiner:
    """Pushes that wait to go out as one, each of which borders on those before it.

    Args:
        empty: (shape, dtype): memory for what is made one, as `np.empty` gives it.
    """

    def __init__(self, empty: Empty = np.empty) -> None:
        self._empty = empty
        self._name = ""
        self._contents: deque[Entries] = deque()  # ascending
        self._futures: list[Future] = []
        self._first = self._last = self._bytes = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._futures)

    def take(self, name: str, content: Entries, future: Future) -> bool:
        """Take a push of neighbouring keys, if it goes with those that are here; return whether it does.

        If it does not, they have to go out before it.
        """
        first, last = content.first, content.first + len(content)
        if not self._futures:
            self._name, self._first, self._last, self._bytes = name, first, last, 0
            self._contents.append(content)
        elif name != self._name or self._bytes + content.values.nbytes > COMBINED_BYTES_MAX:
            return False
        elif first == self._last:
            self._last = last
            self._contents.append(content)
        elif last == self._first:
            self._first = first
            self._contents.appendleft(content)
        else:
            return False
        self._bytes += content.values.nbytes
        self._futures.append(future)
        return True

    def give(self) -> tuple[str, Entries, int, list[Future]]:
        """Return all of them as one push: namespace, content, its last key + 1, and who waits for it."""
        contents, self._contents = self._contents, deque()
        futures, self._futures = self._futures, []
        whole = contents[0]
        if len(contents) > 1:
            parts = [one.values for one in contents]
            into = self._empty((self._last - self._first, *parts[0].shape[1:]), parts[0].dtype)
            whole = Entries(self._first, np.concatenate(parts, out=into))
        return self._name, whole, self._last, futures
