"""Which pushes of which client have been applied to which keys.

Nothing here knows what a push holds or where keys live.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final, NamedTuple

KEYS: Final = 2**63  # keys are 0 to KEYS - 1


class Piece(NamedTuple):
    """Keys `first` to `last` - 1, which all have the same time."""

    first: int
    last: int
    time: int


class RangeVectorClock:
    """A time for every client and key, kept by ranges of keys that have the same one.

    A client's times of a key only grow. Before its first `set` every key has time 0. A `set` splits at most
    two pieces and adds two at most; neighbours with equal times become one again, so that a client which
    pushes whole ranges costs one piece however many keys they hold.

    Source: the parameter server of OSDI'14, section 4.1 ("vector clocks": O(m k) for m nodes and k ranges).
    Deviation: coalescing.
    """

    def __init__(self) -> None:
        # client: where pieces begin, ascending, the first at 0; and the time of each.
        self._clients: dict[int, tuple[list[int], list[int]]] = {}

    @property
    def clients(self) -> tuple[int, ...]:
        """Who has a time other than 0 anywhere."""
        return tuple(sorted(self._clients))

    def at(self, client: int, key: int) -> int:
        """Return a client's time of a key."""
        starts, times = self._clients.get(client, ([0], [0]))
        return times[bisect_right(starts, key) - 1]

    def pieces(self, client: int, first: int, last: int) -> list[Piece]:
        """Return the client's times of keys `first` to `last` - 1, as few pieces as there can be, ascending.

        Raises:
            ValueError: no such range of keys.
        """
        _check(first, last)
        starts, times = self._clients.get(client, ([0], [0]))
        begin = bisect_right(starts, first) - 1
        end = bisect_left(starts, last)
        if end == begin + 1:
            return [Piece(first, last, times[begin])]
        bounds = [first, *starts[begin + 1 : end], last]
        return [Piece(a, b, time) for (a, b), time in zip(pairwise(bounds), times[begin:end], strict=True)]

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of keys of which somebody has a time other than 0; they may overlap."""
        return [
            (piece.first, piece.last)
            for client in self._clients
            for piece in self.pieces(client, 0, KEYS)
            if piece.time
        ]

    def advance(self, client: int, first: int, last: int, time: int) -> list[Piece]:
        """Give keys `first` to `last` - 1 this time; return the times that they had, as `pieces` does.

        Raises:
            ValueError: no such range of keys, or the time of one of them is later already.
        """
        found = self._clients.get(client)
        if found is not None:
            starts, times = found
            place = bisect_right(starts, first) - 1
            if place < len(starts) - 1 and starts[place] == first and starts[place + 1] == last:
                before = times[place]
                is_apart = times[place + 1] != time and (not place or times[place - 1] != time)
                if before <= time and is_apart:
                    times[place] = (
                        time  # the usual case: a client that pushes the same ranges again and again
                    )
                    return [Piece(first, last, before)]
        pieces = self.pieces(client, first, last)
        self.set(client, first, last, time)
        return pieces

    def set(self, client: int, first: int, last: int, time: int) -> None:
        """Give keys `first` to `last` - 1 this time.

        Raises:
            ValueError: no such range of keys, or the time of one of them is later already.
        """
        _check(first, last)
        before = self.pieces(client, first, last)
        latest = max(piece.time for piece in before)
        if latest > time:
            raise ValueError(
                f"expected times of client {client} to grow, got {time} after {latest} in {first} to {last}"
            )
        self._replace(client, first, last, [Piece(first, last, time)])

    def fresh(self, client: int, first: int, last: int, time: int) -> list[tuple[int, int]]:
        """Return the ranges, within `first` to `last` - 1, on which the time is earlier: a push is new there.

        Raises:
            ValueError: no such range of keys.
        """
        pieces = self.pieces(client, first, last)
        if len(pieces) == 1:
            return [(first, last)] if pieces[0].time < time else []
        found: list[tuple[int, int]] = []
        for piece in pieces:
            if piece.time < time:
                if found and found[-1][1] == piece.first:
                    found[-1] = (found[-1][0], piece.last)
                else:
                    found.append((piece.first, piece.last))
        return found

    def is_complete(self, clients: Iterable[int], first: int, last: int, time: int) -> bool:
        """Return whether these clients have reached this time on the whole range.

        Raises:
            ValueError: no such range of keys.
        """
        return not any(self.fresh(client, first, last, time) for client in clients)

    def cut_out(self, first: int, last: int) -> dict[int, list[Piece]]:
        """Return all times other than 0 of a range, to be adopted elsewhere.

        Raises:
            ValueError: no such range of keys.
        """
        cut = {}
        for client in self._clients:
            pieces = [piece for piece in self.pieces(client, first, last) if piece.time]
            if pieces:
                cut[client] = pieces
        return cut

    def adopt(self, cut: dict[int, list[Piece]]) -> None:
        """Take over what `cut_out` gave; where a time here is later already, it stays.

        Raises:
            ValueError: no such range of keys.
        """
        for client, pieces in cut.items():
            for first, last, time in pieces:
                for a, b in self.fresh(client, first, last, time):
                    self._replace(client, a, b, [Piece(a, b, time)])

    def drop(self, first: int, last: int) -> None:
        """Forget all times of a range.

        Raises:
            ValueError: no such range of keys.
        """
        _check(first, last)
        for client in list(self._clients):
            self._replace(client, first, last, [Piece(first, last, 0)])
            if self._clients[client] == ([0], [0]):
                del self._clients[client]

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as plain data."""
        return {"clients": [[client, *map(list, known)] for client, known in self._clients.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._clients = {client: (list(starts), list(times)) for client, starts, times in state["clients"]}

    def _replace(self, client: int, first: int, last: int, pieces: list[Piece]) -> None:
        starts, times = self._clients.setdefault(client, ([0], [0]))
        begin = bisect_right(starts, first) - 1
        end = bisect_left(starts, last)
        new = [Piece(starts[begin], first, times[begin])] if starts[begin] < first else []
        new += pieces
        following = starts[end] if end < len(starts) else KEYS
        if last < following:
            new.append(Piece(last, following, times[end - 1]))
        if begin and times[begin - 1] == new[0].time:  # it is one piece with those beside it
            begin -= 1
            new.insert(0, Piece(starts[begin], new[0].first, times[begin]))
        if end < len(starts) and times[end] == new[-1].time:
            new.append(Piece(following, KEYS, times[end]))
            end += 1
        kept = [piece for place, piece in enumerate(new) if not place or piece.time != new[place - 1].time]
        starts[begin:end] = [piece.first for piece in kept]
        times[begin:end] = [piece.time for piece in kept]


def _check(first: int, last: int) -> None:
    if not 0 <= first < last <= KEYS:
        raise ValueError(f"expected a range of keys within 0 to {KEYS}, got {first} to {last}")
