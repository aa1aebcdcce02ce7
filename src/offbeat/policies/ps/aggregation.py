"""The pushes of namespaces that aggregate, on one server, until all participants have pushed.

Nothing here knows what values are, who holds them or how messages travel.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.policies.ps.messages import Push


@dataclass(slots=True, eq=False)
class Request:
    """A part of a client's push that waits for operations to reach all holders.

    Attributes:
        refusal: why some of it was not applied; empty as long as all was.
    """

    push: Push
    waits_for: int = 0
    refusal: str = ""


class Sum(NamedTuple):
    """What all participants have pushed at a time for keys `first` to `last` - 1.

    Attributes:
        requests: by client, ascending: its push, and that push again where it came again.
    """

    time: int
    first: int
    last: int
    requests: tuple[tuple[Request, ...], ...]


@dataclass(slots=True, eq=False)
class _Cell:
    """Keys `first` to `last` - 1, for all of which the same pushes wait.

    Attributes:
        rounds: by time, then by client.
    """

    first: int
    last: int
    rounds: dict[int, dict[int, tuple[Request, ...]]]

    def part(self, first: int, last: int) -> _Cell:
        return _Cell(first, last, {time: dict(came) for time, came in self.rounds.items()})


class Aggregation:
    """Puts together the pushes that clients make at the same time, whatever the order in which they come.

    The pushes of time t on a range are one sum when every participant has pushed there at t, or, having left
    t out, later; who begins after t takes no part in it. Sums of a range come in the order of their times.
    Several times may wait at once, and clients may cut ranges as they like: what each piece waits for is
    kept. What is not in a sum is in nobody's values, so a view may begin anew with what waits.

    Source: the parameter server of OSDI'14, sections 4.1 (vector clocks) and 4.3 (replication after
    aggregation). Deviations: docs/decisions/0008.
    """

    def __init__(self) -> None:
        self._begins: Mapping[str, Mapping[int, int]] = {}
        self._ordered: dict[str, list[int]] = {}  # the same times, ascending
        self._cells: dict[str, list[_Cell]] = {}  # ascending, apart; nothing waits for the keys between them

    def follow(self, begins: Mapping[str, Mapping[int, int]]) -> list[Push]:
        """Go by who takes part now; forget what waits, and return it, each client's in order.

        Args:
            begins: by namespace and client, the first time in which it takes part.
        """
        waiting = {
            request
            for cells in self._cells.values()
            for cell in cells
            for came in cell.rounds.values()
            for requests in came.values()
            for request in requests
        }
        self._cells.clear()
        self._begins = begins
        self._ordered = {namespace: sorted(times.values()) for namespace, times in begins.items()}
        pushes = [request.push for request in waiting]
        return sorted(pushes, key=lambda push: (push.time, push.client, push.namespace, push.first))

    def add(self, request: Request, first: int, last: int) -> list[Sum]:
        """Take keys `first` to `last` - 1 of a push; return the sums that are complete, in order.

        A push of who takes no part is forgotten: that client is gone, and nobody waits for it.
        """
        push = request.push
        begins = self._begins.get(push.namespace, {})
        if push.client not in begins:
            return []
        cells = self._cells.setdefault(push.namespace, [])
        begin, end = _cut(cells, first, last)
        found: list[Sum] = []
        for cell in cells[begin:end]:
            came = cell.rounds.setdefault(push.time, {})
            came[push.client] = (*came.get(push.client, ()), request)
            for time in sorted(cell.rounds):
                if not self._is_complete(push.namespace, cell, time):
                    break
                requests = tuple(of for _, of in sorted(cell.rounds.pop(time).items()))
                found.append(Sum(time, cell.first, cell.last, requests))
        if found:
            cells[begin:end] = [cell for cell in cells[begin:end] if cell.rounds]
        return _joined(found)

    def _is_complete(self, namespace: str, cell: _Cell, time: int) -> bool:
        came = cell.rounds[time]
        if len(came) == bisect_right(self._ordered[namespace], time):
            return True
        later = [came_later for at, came_later in cell.rounds.items() if at > time]
        return bool(later) and all(
            begin > time or client in came or any(client in came_later for came_later in later)
            for client, begin in self._begins[namespace].items()
        )


def _cut(cells: list[_Cell], first: int, last: int) -> tuple[int, int]:
    """Cut and add cells so that some of them are keys `first` to `last` - 1; return their places."""
    for key in (first, last):
        place = bisect_right(cells, key, key=lambda cell: cell.last)
        if place < len(cells) and cells[place].first < key:
            cell = cells[place]
            cells[place : place + 1] = [cell.part(cell.first, key), cell.part(key, cell.last)]
    begin = bisect_left(cells, first, key=lambda cell: cell.first)
    end = bisect_left(cells, last, key=lambda cell: cell.first)
    within, at = [], first
    for cell in cells[begin:end]:
        if at < cell.first:
            within.append(_Cell(at, cell.first, {}))
        within.append(cell)
        at = cell.last
    if at < last:
        within.append(_Cell(at, last, {}))
    cells[begin:end] = within
    return begin, begin + len(within)


def _joined(sums: list[Sum]) -> list[Sum]:
    """Return as one what is of the same pushes; in the order of times."""
    joined: list[Sum] = []
    for one in sorted(sums, key=lambda one: (one.time, one.first)):
        before = joined[-1] if joined else None
        if before and (before.time, before.last, before.requests) == (one.time, one.first, one.requests):
            joined[-1] = before._replace(last=one.last)
        else:
            joined.append(one)
    return joined
