"""The pushes of namespaces that aggregate, collected on one server until all participants have pushed.

Nothing here knows what values are, which servers hold them or how messages travel.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.policies.ps.messages import Push


@dataclass(slots=True, eq=False)
class PushRequest:
    """A part of a client's push that waits for operations to reach all holders.

    Attributes:
        rejection: why some of it was not applied; empty if all was.
    """

    push: Push
    pending_count: int = 0
    rejection: str = ""


class CompleteSum(NamedTuple):
    """The pushes of all participants at one time for keys `first` to `last` - 1.

    Attributes:
        requests: one item per client, ascending: its push, and duplicates of it.
    """

    time: int
    first: int
    last: int
    requests: tuple[tuple[PushRequest, ...], ...]


@dataclass(slots=True, eq=False)
class _Cell:
    """Keys `first` to `last` - 1, for all of which the same pushes wait.

    Attributes:
        rounds: by time, then by client.
    """

    first: int
    last: int
    rounds: dict[int, dict[int, tuple[PushRequest, ...]]]

    def part(self, first: int, last: int) -> _Cell:
        return _Cell(first, last, {time: dict(pushed) for time, pushed in self.rounds.items()})


class Aggregation:
    """Combines the pushes that clients make at the same time, in whatever order they arrive.

    The pushes of time t on a range become one sum when every participant has pushed there at t, or, having
    skipped t, later; a participant that begins after t has no part in it. Sums of a range are formed in the
    order of their times. Several times may be incomplete at once, and clients may split ranges in different
    ways: what each piece waits for is kept separately. Pushes that are in no sum are in no values either, so
    a view may start over with those that wait.

    Source: the parameter server of OSDI'14, sections 4.1 (vector clocks) and 4.3 (replication after
    aggregation). Deviations: docs/decisions/0008.
    """

    def __init__(self) -> None:
        self._begins: Mapping[str, Mapping[int, int]] = {}
        self._ordered: dict[str, list[int]] = {}  # the same times, ascending
        self._cells: dict[str, list[_Cell]] = {}  # ascending, disjoint; no push waits for keys between them

    def set_participants(self, begins: Mapping[str, Mapping[int, int]]) -> list[Push]:
        """Adopt the current participants; remove and return the pushes that wait, each client's in order.

        Args:
            begins: by namespace and client, the first time in which it takes part.
        """
        waiting = {
            request
            for cells in self._cells.values()
            for cell in cells
            for pushed in cell.rounds.values()
            for requests in pushed.values()
            for request in requests
        }
        self._cells.clear()
        self._begins = begins
        self._ordered = {namespace: sorted(times.values()) for namespace, times in begins.items()}
        pushes = [request.push for request in waiting]
        return sorted(pushes, key=lambda push: (push.time, push.client, push.namespace, push.first))

    def add(self, request: PushRequest, first: int, last: int) -> list[CompleteSum]:
        """Add keys `first` to `last` - 1 of a push; return the sums that are complete, in order.

        A push of a client that does not take part is dropped: the client is gone, and no sum waits for it.
        """
        push = request.push
        begins = self._begins.get(push.namespace, {})
        if push.client not in begins:
            return []
        cells = self._cells.setdefault(push.namespace, [])
        begin, end = _split_cells(cells, first, last)
        sums: list[CompleteSum] = []
        for cell in cells[begin:end]:
            pushed = cell.rounds.setdefault(push.time, {})
            pushed[push.client] = (*pushed.get(push.client, ()), request)
            for time in sorted(cell.rounds):
                if not self._is_complete(push.namespace, cell, time):
                    break
                requests = tuple(by_client for _, by_client in sorted(cell.rounds.pop(time).items()))
                sums.append(CompleteSum(time, cell.first, cell.last, requests))
        if sums:
            cells[begin:end] = [cell for cell in cells[begin:end] if cell.rounds]
        return _merged(sums)

    def _is_complete(self, namespace: str, cell: _Cell, time: int) -> bool:
        pushed = cell.rounds[time]
        if len(pushed) == bisect_right(self._ordered[namespace], time):
            return True
        later = [pushed_later for at, pushed_later in cell.rounds.items() if at > time]
        return bool(later) and all(
            begin > time or client in pushed or any(client in pushed_later for pushed_later in later)
            for client, begin in self._begins[namespace].items()
        )


def _split_cells(cells: list[_Cell], first: int, last: int) -> tuple[int, int]:
    """Split and add cells so that some of them cover exactly `first` to `last` - 1; return their slice."""
    for key in (first, last):
        place = bisect_right(cells, key, key=lambda cell: cell.last)
        if place < len(cells) and cells[place].first < key:
            cell = cells[place]
            cells[place : place + 1] = [cell.part(cell.first, key), cell.part(key, cell.last)]
    begin = bisect_left(cells, first, key=lambda cell: cell.first)
    end = bisect_left(cells, last, key=lambda cell: cell.first)
    covering, position = [], first
    for cell in cells[begin:end]:
        if position < cell.first:
            covering.append(_Cell(position, cell.first, {}))
        covering.append(cell)
        position = cell.last
    if position < last:
        covering.append(_Cell(position, last, {}))
    cells[begin:end] = covering
    return begin, begin + len(covering)


def _merged(sums: list[CompleteSum]) -> list[CompleteSum]:
    """Merge sums of the same pushes on adjacent ranges; in the order of times."""
    merged: list[CompleteSum] = []
    for part in sorted(sums, key=lambda part: (part.time, part.first)):
        previous = merged[-1] if merged else None
        if previous and (previous.time, previous.last, previous.requests) == (
            part.time,
            part.first,
            part.requests,
        ):
            merged[-1] = previous._replace(last=part.last)
        else:
            merged.append(part)
    return merged
