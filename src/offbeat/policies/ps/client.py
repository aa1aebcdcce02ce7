"""A client of a parameter server, as a machine without I/O: who gets what of a request, and when it is done.

Nothing here knows what values are or how messages travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, NamedTuple

from offbeat.errors import LostKeysError, OffbeatError, ProtocolError
from offbeat.events import LostArc
from offbeat.policies.ps.hash_ring import Space, Span, block_point
from offbeat.policies.ps.messages import (
    Content,
    Enlist,
    Inspect,
    Inspected,
    Pull,
    Pulled,
    Push,
    Pushed,
    Reached,
    Refused,
    Stale,
    ToClient,
    View,
    Withdraw,
)
from offbeat.policies.ps.range_clock import Piece, RangeVectorClock
from offbeat.policies.ps.server_node import MANAGER, Send

_SPANS_MAX: Final = 4096
_RANGES_MAX: Final = 8  # of lost keys that an error names


class Done(NamedTuple):
    """A request is done: everywhere, if it was a push.

    Attributes:
        parts: of a pull, or a push that wants values: what came, by first key and key behind the last,
            ascending.
        times: of a pull that wants them: of this client's pushes that are in what came, ascending.
    """

    number: int
    parts: tuple[tuple[int, int, Content], ...]
    times: tuple[Piece, ...] = ()


class Failed(NamedTuple):
    """A request cannot be done: some server has refused its part of it; others may have done theirs.

    Attributes:
        error: what there is to say about it, where that is more than the reason.
    """

    number: int
    reason: str
    error: OffbeatError | None = None


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is not done.

    Attributes:
        first, last: of all its keys.
        missing: ranges of keys that have not been answered, ascending.
        time, after: of a push that has been sent; None of a pull.
        chosen: the time that a push is to have, None for the next one.
        wants: of a pull: whether states, and whether times; None for neither.
        wants_values: of a push.
        times: that have come.
    """

    number: int
    namespace: str
    content: Content
    first: int
    last: int
    missing: list[tuple[int, int]]
    is_push: bool
    time: int | None = None
    after: tuple[Piece, ...] = ()
    parts: list[tuple[int, int, Content]] = field(default_factory=list)
    chosen: int | None = None
    wants: tuple[bool, bool] | None = None
    wants_values: bool = False
    times: tuple[Piece, ...] = ()


class Client:
    """One client: its pushes of a range are applied in the order in which it makes them, each once.

    In a namespace that aggregates, what all participants push at a time is one operation, and none of it is
    done before all of it is. Every participant pushes the same ranges at the same times, or leaves them out
    and pushes there later; a push is done when all have pushed. What is pushed before this client takes part,
    or while another is about to begin, is sent afterwards.

    A client's times are 1, 2, ... in each namespace, or as it chooses them: each later than all before it.

    Where data of a namespace are lost, every request that has lost keys fails, until the namespace goes on
    from zero there; if none was under way then, the next request fails for it whatever its keys.

    Args:
        client: its id, which no other has or had.
        cut: returns what a content has for keys `first` to `last` - 1.
        pieces: returns in which ranges keys `first` to `last` - 1 of a request travel, by its namespace and
            content; by default in one.
    """

    def __init__(
        self,
        client: int,
        cut: Callable[[Content, int, int], Content],
        pieces: Callable[[str, Content, int, int], Iterable[tuple[int, int]]] | None = None,
    ) -> None:
        self.client = client
        self._cut = cut
        self._pieces = pieces or (lambda _, __, first, last: ((first, last),))
        self._number = 0
        self._asked: dict[int, _Asked] = {}  # in the order in which they were made
        self._times: dict[str, int] = {}  # the latest that was sent
        self._chosen: dict[str, int] = {}  # the latest that was chosen
        self._clocks: dict[str, RangeVectorClock] = {}
        self._view: View | None = None
        self._enlisted: set[str] = set()
        self._withdrawn: set[str] = set()
        self._losses: dict[str, int] = {}  # by namespace: the latest loss that a request failed for
        self._spans: dict[tuple[str, int, int], list[Span]] = {}  # of this epoch, as far as it was asked for
        self._out: list[Send | Done | Failed] = []

    def push(
        self,
        namespace: str,
        content: Content,
        first: int,
        last: int,
        time: int | None = None,
        *,
        wants_values: bool = False,
    ) -> tuple[int, list[Send | Done | Failed]]:
        """Push what `content` has for keys `first` to `last` - 1; return the request's number.

        Args:
            time: that the push is to have; by default one later than the last one's. It fails if this client
                takes part in the namespace later only.
            wants_values: pull all keys of the range, with this push in them, as well.

        Raises:
            ProtocolError: this client has withdrawn from the namespace.
            ValueError: there was a push of that time, or of a later one.
        """
        self._check_stays(namespace)
        asked = self._new(namespace, content, first, last, is_push=True)
        asked.wants_values = wants_values
        if time is not None:
            latest = max(self._times.get(namespace, 0), self._chosen.get(namespace, 0))
            if time <= latest:
                raise ValueError(f"expected a time of {namespace} later than {latest}, got {time}")
            asked.chosen = self._chosen[namespace] = time
        return self._ask(asked)

    def pull(
        self,
        namespace: str,
        first: int,
        last: int,
        keys: Content | None = None,
        *,
        states: bool = False,
        times: bool = False,
    ) -> tuple[int, list[Send | Done | Failed]]:
        """Pull the values of keys `first` to `last` - 1, or of those of them that `keys` lists.

        Args:
            states: with what the update keeps besides them.
            times: with the times of this client's own pushes that are in them.
        """
        asked = self._new(namespace, keys, first, last, is_push=False)
        if states or times:
            asked.wants = states, times
        return self._ask(asked)

    def enlist(self, namespace: str) -> list[Send | Done | Failed]:
        """Take part in a namespace that aggregates, from a time on that a view says.

        Clients that begin together enlist before the first of them pushes; the first push does it at last.
        Who comes later, where ranges differ from time to time, sees from `begins` which one is its first.

        Raises:
            ProtocolError: this client has withdrawn from the namespace.
        """
        self._check_stays(namespace)
        self._enlist(namespace)
        return self._said()

    def withdraw(self, namespace: str) -> list[Send | Done | Failed]:
        """Take no part any more in a namespace that aggregates: others wait for whoever does.

        Raises:
            ProtocolError: a push to it is not done.
        """
        if any(asked.is_push and asked.namespace == namespace for asked in self._asked.values()):
            raise ProtocolError(f"expected all pushes to {namespace} to be done before withdrawing from it")
        self._withdrawn.add(namespace)
        self._out.append(Send(MANAGER, Withdraw(client=self.client, namespace=namespace)))
        return self._said()

    def begins(self, namespace: str) -> int | None:
        """Return the time of this client's first push in a namespace that aggregates, None while unknown."""
        return None if self._view is None else self._view.participants.get(namespace, {}).get(self.client)

    def _new(self, namespace: str, content: Content, first: int, last: int, *, is_push: bool) -> _Asked:
        self._number += 1
        return _Asked(self._number, namespace, content, first, last, [(first, last)], is_push)

    def _ask(self, asked: _Asked) -> tuple[int, list[Send | Done | Failed]]:
        self._asked[asked.number] = asked
        if not self._fail_for_loss(asked, is_new=True):
            self._send(asked)
        return asked.number, self._said()

    def waits_for(self, namespace: str, first: int, last: int) -> list[int]:
        """Return the servers that have not answered for keys `first` to `last` - 1, ascending."""
        view = self._view
        if view is None or namespace not in view.spaces:
            return []
        missing = [
            part
            for asked in list(self._asked.values())
            if asked.namespace == namespace
            for part in _within(asked.missing, first, last)
        ]
        spans = [span for part in missing for span in view.ring.spans(view.spaces[namespace], *part)]
        return sorted({span.holders[0] for span in spans if span.holders})

    def hear(self, message: ToClient) -> list[Send | Done | Failed]:
        """Take a server's answer.

        Raises:
            ProtocolError: it is no answer to that request.
        """
        asked = self._asked.get(message.number)
        if asked is not None:
            match message:
                case Pushed():
                    if asked.wants_values or not asked.is_push:
                        raise ProtocolError(f"expected values in answer to {asked.number}, got none")
                    self._answered(asked, message.first, message.last)
                case Pulled():
                    self._take(asked, message)
                    self._answered(asked, message.first, message.last)
                case Refused():
                    del self._asked[asked.number]
                    self._out.append(Failed(asked.number, message.reason))
                case Stale():
                    pass  # it is sent again with the view of that epoch, if it was not already
        return self._said()

    def see(self, view: View) -> list[Send | Done | Failed]:
        """Go by a new view; in a new epoch, send again what has not been answered, in order."""
        if self._view is None or view.epoch > self._view.epoch:
            self._view = view
            self._spans.clear()
            for namespace, pause in view.paused.items():
                if self.client in view.participants.get(namespace, {}):
                    self._pause(namespace, pause)
            for asked in list(self._asked.values()):  # one may fail
                if not self._fail_for_loss(asked, is_new=False):
                    self._send(asked)
        return self._said()

    def _fail_for_loss(self, asked: _Asked, *, is_new: bool) -> bool:
        """Let a request fail if keys of it are lost, or it is the first one after a loss; return whether."""
        view = self._view
        if view is None or not view.lost:
            return False
        space = view.spaces.get(asked.namespace)
        arcs = [arc for arc in view.lost if arc.namespace == asked.namespace]
        if space is None or not arcs:
            return False
        told = self._losses.get(space.name, 0)
        fresh = [arc for arc in arcs if is_new and arc.number > told]
        for span, of in (((0, space.keys), fresh), ((asked.first, asked.last), arcs)):
            ranges, found = _lost_ranges(space, of, *span)
            if ranges:
                self._losses[space.name] = max(told, *(arc.number for arc in arcs))
                del self._asked[asked.number]
                error = _lost_keys(space.name, ranges, sorted({arc.server for arc in found}))
                self._out.append(Failed(asked.number, str(error), error))
                return True
        return False

    def _enlist(self, namespace: str) -> None:
        if namespace not in self._enlisted:
            self._enlisted.add(namespace)
            self._out.append(Send(MANAGER, Enlist(client=self.client, namespace=namespace)))

    def _check_stays(self, namespace: str) -> None:
        if namespace in self._withdrawn:
            raise ProtocolError(
                f"expected nothing more for {namespace}, from which this client has withdrawn"
            )

    def _pause(self, namespace: str, pause: int) -> None:
        time = self._times.get(namespace, 0)
        reached = Reached(client=self.client, namespace=namespace, pause=pause, time=time)
        self._out.append(Send(MANAGER, reached))

    def _take(self, asked: _Asked, pulled: Pulled) -> None:
        """Take of an answer what has not come before: nearly always all of it."""
        for first, last in _within(asked.missing, pulled.first, pulled.last):
            is_whole = first == pulled.first and last == pulled.last
            content = pulled.content if is_whole else self._cut(pulled.content, first, last)
            asked.parts.append((first, last, content))
            if isinstance(pulled, Inspected):
                asked.times += _of_range(pulled.times, first, last)

    def _answered(self, asked: _Asked, first: int, last: int) -> None:
        if asked.missing == [(first, last)]:
            asked.missing = []
        else:
            asked.missing = _without(asked.missing, first, last)
        if not asked.missing:
            del self._asked[asked.number]
            parts = tuple(sorted(asked.parts, key=itemgetter(0)))
            self._out.append(Done(asked.number, parts, _joined(asked.times) if asked.times else ()))

    def _send(self, asked: _Asked) -> None:
        view = self._view
        if view is None or asked.namespace not in view.spaces:
            return
        if asked.is_push and asked.time is None and not self._stamp(asked, view):
            return
        for begin, end in asked.missing:
            for first, last, holders in self._spans_of(view, asked.namespace, begin, end):
                if not holders:  # nobody is left; it is sent to whoever comes
                    continue
                for piece in self._pieces(asked.namespace, asked.content, first, last):
                    part = self._part(asked, view.epoch, *piece)
                    self._out.append(Send(f"server-{holders[0]}", part))

    def _spans_of(self, view: View, namespace: str, first: int, last: int) -> list[Span]:
        """Who holds which of these keys; the same ranges are asked for again and again."""
        spans = self._spans.get((namespace, first, last))
        if spans is None:
            if len(self._spans) == _SPANS_MAX:
                self._spans.clear()
            spans = list(view.ring.spans(view.spaces[namespace], first, last))
            self._spans[namespace, first, last] = spans
        return spans

    def _stamp(self, asked: _Asked, view: View) -> bool:
        """Give a push its time, if it may have one now."""
        namespace, begins = asked.namespace, 1
        if view.spaces[namespace].aggregates:
            if self.client not in view.participants.get(namespace, {}):
                self._enlist(namespace)
                return False
            if namespace in view.paused:
                return False
            begins = view.participants[namespace][self.client]
        earliest = max(self._times.get(namespace, 0) + 1, begins)
        time = earliest if asked.chosen is None else asked.chosen
        if time < earliest:
            reason = f"expected time {earliest} or a later one of {namespace}, got {time}"
            del self._asked[asked.number]
            self._out.append(Failed(asked.number, reason))
            return False
        self._times[namespace] = time
        clock = self._clocks.get(namespace)
        if clock is None:
            clock = self._clocks[namespace] = RangeVectorClock()
        asked.time, asked.after = time, tuple(clock.advance(self.client, asked.first, asked.last, time))
        return True

    def _part(self, asked: _Asked, epoch: int, first: int, last: int) -> Push | Pull:
        content, after = asked.content, asked.after
        if (first, last) != (asked.first, asked.last):
            content = None if content is None else self._cut(content, first, last)
            after = _of_range(after, first, last)
        if asked.wants is not None:
            with_states, with_times = asked.wants
            return Inspect(
                client=self.client,
                number=asked.number,
                epoch=epoch,
                namespace=asked.namespace,
                first=first,
                last=last,
                keys=content,
                with_states=with_states,
                with_times=with_times,
            )
        if asked.time is None:
            return Pull(
                client=self.client,
                number=asked.number,
                epoch=epoch,
                namespace=asked.namespace,
                first=first,
                last=last,
                keys=content,
            )
        return Push(
            client=self.client,
            number=asked.number,
            epoch=epoch,
            namespace=asked.namespace,
            first=first,
            last=last,
            time=asked.time,
            after=after,
            content=content,
            wants_values=asked.wants_values,
        )

    def _said(self) -> list[Send | Done | Failed]:
        said, self._out = self._out, []
        return said


def _lost_ranges(
    space: Space, arcs: list[LostArc], first: int, last: int
) -> tuple[list[tuple[int, int]], list[LostArc]]:
    """Return which of these keys are lost, as ranges, but not more than can be named, and where."""
    ranges: list[tuple[int, int]] = []
    found: list[LostArc] = []
    if not arcs:
        return ranges, found
    for block in space.blocks(first, last):
        point = block_point(space.name, block)
        arc = next((arc for arc in arcs if arc.first <= point < arc.last), None)
        if arc is None:
            continue
        begin, end = space.range_of(block)
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = ranges[-1][0], end
        elif len(ranges) == _RANGES_MAX:
            break
        else:
            ranges.append((begin, end))
        found.append(arc)
    return ranges, found


def _lost_keys(namespace: str, ranges: list[tuple[int, int]], servers: list[int]) -> LostKeysError:
    named = " and ".join(f"server {server}" for server in servers)
    keys = ", ".join(f"{first} to {last - 1}" for first, last in ranges)
    more = ", and perhaps more" if len(ranges) == _RANGES_MAX else ""
    text = (
        f"the values of keys {keys}{more} of {namespace} are lost: all servers that had them are gone, "
        f'{named} last; open the namespace with on_loss="reset" to go on from zero there'
    )
    return LostKeysError(text, namespace=namespace, ranges=tuple(ranges), servers=tuple(servers))


def _without(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    cut = [part for begin, end in ranges for part in ((begin, min(end, first)), (max(begin, last), end))]
    return [part for part in cut if part[0] < part[1]]


def _within(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    if ranges == [(first, last)]:  # nearly always
        return ranges
    cut = [(max(begin, first), min(end, last)) for begin, end in ranges]
    return [part for part in cut if part[0] < part[1]]


def _of_range(pieces: Iterable[Piece], first: int, last: int) -> tuple[Piece, ...]:
    return tuple(
        Piece(max(first, piece.first), min(last, piece.last), piece.time)
        for piece in pieces
        if piece.first < last and first < piece.last
    )


def _joined(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return what came in any order as few pieces as there can be, ascending."""
    joined: list[Piece] = []
    for piece in sorted(pieces):
        if joined and (joined[-1].last, joined[-1].time) == (piece.first, piece.time):
            joined[-1] = joined[-1]._replace(last=piece.last)
        else:
            joined.append(piece)
    return tuple(joined)
