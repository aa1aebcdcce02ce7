"""Virtual time: a calendar of function calls, executed in the order of their times.

Calls of equal times run in the order in which they were requested. The calendar does not know what it calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, TypeAlias

_Entry: TypeAlias = tuple[float, int, Callable[[Any], None], Any]
_SORTED_AT_ONCE = 64  # up to this many entries are sorted as a whole


class Engine:
    """Calls functions at virtual times, in the order of the times.

    Most calls lie further ahead than those that are due next. They are only collected, and sorted when their
    time comes near: with 10,000 workers that is several times cheaper than a heap of all of them.

    Args:
        begin_s: the virtual time at the beginning.

    Attributes:
        now_s: the virtual time. A called function may advance it itself, up to `next_call_s`.
        calls_made: calls executed so far.
    """

    def __init__(self, begin_s: float = 0.0) -> None:
        self.now_s = begin_s
        self.calls_made = 0
        self._soon: list[_Entry] = []  # a heap: entries that were requested before the horizon
        self._sorted: list[_Entry] = []  # latest first, all before the horizon
        self._far: list[_Entry] = []  # unordered, none before the horizon
        self._horizon_s = 0.0
        self._number = 0
        self._until_s = 0.0
        self._is_stopped = False

    def schedule(self, time_s: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Schedule `call(argument)` at `time_s`, or now if that has passed."""
        self._number += 1
        if time_s < self._horizon_s:
            if time_s < self.now_s:
                time_s = self.now_s
            heappush(self._soon, (time_s, self._number, call, argument))
        else:
            self._far.append((time_s, self._number, call, argument))

    @property
    def next_call_s(self) -> float:
        """The time before which no call is due and the run does not end, as scheduled so far."""
        if not self._soon and not self._sorted and self._far:
            self._sort()
        free_s = self._until_s
        if self._soon:
            free_s = min(free_s, self._soon[0][0])
        if self._sorted:
            free_s = min(free_s, self._sorted[-1][0])
        return self.now_s if self._is_stopped else free_s

    def stop(self) -> None:
        """End `run` after the current call."""
        self._is_stopped = True

    def run(self, until_s: float = math.inf) -> None:
        """Execute all calls up to `until_s`, including those scheduled meanwhile, or until `stop`."""
        self._is_stopped = False
        self._until_s = until_s
        while not self._is_stopped:
            soon, ordered = self._soon, self._sorted
            if soon and (not ordered or soon[0] < ordered[-1]):
                entry = heappop(soon)
            elif ordered:
                entry = ordered.pop()
            elif self._far:
                self._sort()
                continue
            else:
                return
            if entry[0] > until_s:
                heappush(soon, entry)
                self.now_s = until_s
                return
            self.now_s = entry[0]
            self.calls_made += 1
            entry[2](entry[3])

    def pending_calls(self) -> Iterator[tuple[float, Callable[[Any], None], Any]]:
        """Yield the calls that are still due, in order: time, function and argument."""
        for time_s, _, call, argument in sorted(self._soon + self._sorted + self._far, key=_order):
            yield time_s, call, argument

    def _sort(self) -> None:
        """Sort the next entries; the latest eighth stays in `_far`, so that the horizon stays near."""
        far = self._far
        far.sort(reverse=True)
        keep = len(far) // 8 if len(far) > _SORTED_AT_ONCE else 0
        self._far, self._sorted = far[:keep], far[keep:]
        self._horizon_s = math.nextafter(self._sorted[0][0], math.inf)
        if self._far:  # entries of one time are sorted together or not at all
            while self._far and self._far[-1][0] < self._horizon_s:
                self._sorted.insert(0, self._far.pop())


def _order(entry: _Entry) -> tuple[float, int]:
    return entry[0], entry[1]
