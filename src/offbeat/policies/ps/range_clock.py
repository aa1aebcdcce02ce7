"""Which pushes of which client have been applied to which keys.

Nothing here knows what a push holds or which server holds which keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final, NamedTuple

KEY_END: Final = 2**63  # keys are 0 to KEY_END - 1


class ClockRange(NamedTuple):
    """Keys `start` to `stop` - 1, which have the same time."""

    start: int
    stop: int
    time: int


class RangeVectorClock:
    """A time for every client and key, stored by ranges of keys with equal times.

    The times of a client and key never fall. Before the first `set_time` every key has time 0. A `set_time`
    splits at most two pieces and adds at most two; neighbours with equal times are merged, so that a client
    that pushes whole ranges costs one piece, however many keys they hold.

    Source: the parameter server of OSDI'14, section 4.1 ("vector clocks": O(m k) for m nodes and k ranges).
    Deviation: coalescing.
    """

    def __init__(self) -> None:
        # By client: the first keys of its pieces, ascending from 0, and the time of each piece.
        self._clients: dict[int, tuple[list[int], list[int]]] = {}

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients with a time other than 0 for any key, ascending."""
        return tuple(sorted(self._clients))

    def time_of(self, client: int, key: int) -> int:
        """Return a client's time of a key."""
        starts, times = self._clients.get(client, ([0], [0]))
        return times[bisect_right(starts, key) - 1]

    def pieces(self, client: int, first: int, last: int) -> list[ClockRange]:
        """Return the client's times of keys `first` to `last` - 1 in the fewest pieces, ascending.

        Raises:
            ValueError: the range of keys is not valid.
        """
        _check_range(first, last)
        starts, times = self._clients.get(client, ([0], [0]))
        first_index = bisect_right(starts, first) - 1
        end_index = bisect_left(starts, last)
        if end_index == first_index + 1:
            return [ClockRange(first, last, times[first_index])]
        bounds = [first, *starts[first_index + 1 : end_index], last]
        return [
            ClockRange(start, stop, time)
            for (start, stop), time in zip(pairwise(bounds), times[first_index:end_index], strict=True)
        ]

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of keys for which any client has a time other than 0; they may overlap."""
        return [
            (piece.start, piece.stop)
            for client in self._clients
            for piece in self.pieces(client, 0, KEY_END)
            if piece.time
        ]

    def advance(self, client: int, first: int, last: int, time: int) -> list[ClockRange]:
        """Set the time of keys `first` to `last` - 1; return their previous times, as `pieces` does.

        Raises:
            ValueError: the range of keys is not valid, or a key has a later time already.
        """
        entry = self._clients.get(client)
        if entry is not None:
            starts, times = entry
            index = bisect_right(starts, first) - 1
            if index < len(starts) - 1 and starts[index] == first and starts[index + 1] == last:
                before = times[index]
                is_apart = times[index + 1] != time and (not index or times[index - 1] != time)
                if before <= time and is_apart:
                    # The usual case: a client that pushes the same ranges again and again.
                    times[index] = time
                    return [ClockRange(first, last, before)]
        pieces = self.pieces(client, first, last)
        self.set_time(client, first, last, time)
        return pieces

    def set_time(self, client: int, first: int, last: int, time: int) -> None:
        """Set the time of keys `first` to `last` - 1.

        Raises:
            ValueError: the range of keys is not valid, or a key has a later time already.
        """
        _check_range(first, last)
        before = self.pieces(client, first, last)
        latest = max(piece.time for piece in before)
        if latest > time:
            raise ValueError(
                f"expected times of client {client} to grow, got {time} after {latest} in {first} to {last}"
            )
        self._replace(client, first, last, [ClockRange(first, last, time)])

    def earlier_ranges(self, client: int, first: int, last: int, time: int) -> list[tuple[int, int]]:
        """Return the ranges within `first` to `last` - 1 that have an earlier time, where such a push is new.

        Raises:
            ValueError: the range of keys is not valid.
        """
        pieces = self.pieces(client, first, last)
        if len(pieces) == 1:
            return [(first, last)] if pieces[0].time < time else []
        ranges: list[tuple[int, int]] = []
        for piece in pieces:
            if piece.time < time:
                if ranges and ranges[-1][1] == piece.start:
                    ranges[-1] = (ranges[-1][0], piece.stop)
                else:
                    ranges.append((piece.start, piece.stop))
        return ranges

    def is_complete(self, clients: Iterable[int], first: int, last: int, time: int) -> bool:
        """Return whether all these clients have reached this time on the whole range.

        Raises:
            ValueError: the range of keys is not valid.
        """
        return not any(self.earlier_ranges(client, first, last, time) for client in clients)

    def extract(self, first: int, last: int) -> dict[int, list[ClockRange]]:
        """Return all times other than 0 in a range, for `merge` elsewhere.

        Raises:
            ValueError: the range of keys is not valid.
        """
        cut = {}
        for client in self._clients:
            pieces = [piece for piece in self.pieces(client, first, last) if piece.time]
            if pieces:
                cut[client] = pieces
        return cut

    def merge(self, cut: dict[int, list[ClockRange]]) -> None:
        """Apply the result of `extract`; where a time here is later already, it stays.

        Raises:
            ValueError: a range of keys is not valid.
        """
        for client, pieces in cut.items():
            for first, last, time in pieces:
                for start, stop in self.earlier_ranges(client, first, last, time):
                    self._replace(client, start, stop, [ClockRange(start, stop, time)])

    def drop(self, first: int, last: int) -> None:
        """Set all times in a range back to 0.

        Raises:
            ValueError: the range of keys is not valid.
        """
        _check_range(first, last)
        for client in list(self._clients):
            self._replace(client, first, last, [ClockRange(first, last, 0)])
            if self._clients[client] == ([0], [0]):
                del self._clients[client]

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as plain data."""
        return {"clients": [[client, *map(list, known)] for client, known in self._clients.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._clients = {client: (list(starts), list(times)) for client, starts, times in state["clients"]}

    def _replace(self, client: int, first: int, last: int, pieces: list[ClockRange]) -> None:
        starts, times = self._clients.setdefault(client, ([0], [0]))
        first_index = bisect_right(starts, first) - 1
        end_index = bisect_left(starts, last)
        replacement = (
            [ClockRange(starts[first_index], first, times[first_index])]
            if starts[first_index] < first
            else []
        )
        replacement += pieces
        following = starts[end_index] if end_index < len(starts) else KEY_END
        if last < following:
            replacement.append(ClockRange(last, following, times[end_index - 1]))
        if first_index and times[first_index - 1] == replacement[0].time:  # merge with equal neighbours
            first_index -= 1
            replacement.insert(0, ClockRange(starts[first_index], replacement[0].start, times[first_index]))
        if end_index < len(starts) and times[end_index] == replacement[-1].time:
            replacement.append(ClockRange(following, KEY_END, times[end_index]))
            end_index += 1
        kept = [
            piece
            for index, piece in enumerate(replacement)
            if not index or piece.time != replacement[index - 1].time
        ]
        starts[first_index:end_index] = [piece.start for piece in kept]
        times[first_index:end_index] = [piece.time for piece in kept]


def _check_range(first: int, last: int) -> None:
    if not 0 <= first < last <= KEY_END:
        raise ValueError(f"expected a range of keys within 0 to {KEY_END}, got {first} to {last}")
