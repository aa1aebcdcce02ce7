"""A client of a parameter server, as a machine without I/O: who gets what of a request, and when it is done.

Nothing here knows what values are or how messages travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from offbeat.errors import ProtocolError
from offbeat.policies.clocks import Piece, RangeVectorClock
from offbeat.policies.parcels import (
    Content,
    Enlist,
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
from offbeat.policies.placement import Span
from offbeat.policies.server import MANAGER, Send

_SPANS_MAX: Final = 4096


class Done(NamedTuple):
    """A request is done: everywhere, if it was a push.

    Attributes:
        parts: of a pull: what came, by first key and key behind the last, ascending.
    """

    number: int
    parts: tuple[tuple[int, int, Content], ...]


class Failed(NamedTuple):
    """A request cannot be done: some server has refused its part of it; others may have done theirs."""

    number: int
    reason: str


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is not done.

    Attributes:
        first, last: of all its keys.
        missing: ranges of keys that have not been answered, ascending.
        time, after: of a push that has been sent; None of a pull.
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


class Client:
    """One client: its pushes of a range are applied in the order in which it makes them, each once.

    In a namespace that aggregates, what all participants push at a time is one operation, and none of it is
    done before all of it is. Every participant pushes the same ranges at the same times, or leaves them out
    and pushes there later; a push is done when all have pushed. What is pushed before this client takes part,
    or while another is about to begin, is sent afterwards.

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
        self._times: dict[str, int] = {}
        self._clocks: dict[str, RangeVectorClock] = {}
        self._view: View | None = None
        self._enlisted: set[str] = set()
        self._withdrawn: set[str] = set()
        self._spans: dict[tuple[str, int, int], list[Span]] = {}  # of this epoch, as far as it was asked for
        self._out: list[Send | Done | Failed] = []

    def push(
        self, namespace: str, content: Content, first: int, last: int
    ) -> tuple[int, list[Send | Done | Failed]]:
        """Push what `content` has for keys `first` to `last` - 1; return the request's number.

        Raises:
            ProtocolError: this client has withdrawn from the namespace.
        """
        self._check_stays(namespace)
        return self._ask(namespace, content, first, last, is_push=True)

    def pull(
        self, namespace: str, first: int, last: int, keys: Content | None = None
    ) -> tuple[int, list[Send | Done | Failed]]:
        """Pull the values of keys `first` to `last` - 1, or of those of them that `keys` lists."""
        return self._ask(namespace, keys, first, last, is_push=False)

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

    def _ask(
        self, namespace: str, content: Content, first: int, last: int, *, is_push: bool
    ) -> tuple[int, list[Send | Done | Failed]]:
        self._number += 1
        asked = _Asked(self._number, namespace, content, first, last, [(first, last)], is_push)
        self._asked[self._number] = asked
        self._send(asked)
        return self._number, self._said()

    def hear(self, message: ToClient) -> list[Send | Done | Failed]:
        """Take a server's answer."""
        asked = self._asked.get(message.number)
        if asked is not None:
            match message:
                case Pushed():
                    self._answered(asked, message.first, message.last)
                case Pulled():
                    for first, last in _within(asked.missing, message.first, message.last):
                        asked.parts.append((first, last, self._cut(message.content, first, last)))
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
            for asked in self._asked.values():
                self._send(asked)
        return self._said()

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

    def _answered(self, asked: _Asked, first: int, last: int) -> None:
        if asked.missing == [(first, last)]:
            asked.missing = []
        else:
            asked.missing = _without(asked.missing, first, last)
        if not asked.missing:
            del self._asked[asked.number]
            self._out.append(Done(asked.number, tuple(sorted(asked.parts, key=lambda part: part[0]))))

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
        time = self._times[namespace] = max(self._times.get(namespace, 0) + 1, begins)
        clock = self._clocks.get(namespace)
        if clock is None:
            clock = self._clocks[namespace] = RangeVectorClock()
        asked.time, asked.after = time, tuple(clock.advance(self.client, asked.first, asked.last, time))
        return True

    def _part(self, asked: _Asked, epoch: int, first: int, last: int) -> Push | Pull:
        content, after = asked.content, asked.after
        if (first, last) != (asked.first, asked.last):
            content = None if content is None else self._cut(content, first, last)
            after = tuple(
                Piece(max(first, piece.first), min(last, piece.last), piece.time)
                for piece in after
                if piece.first < last and first < piece.last
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
        )

    def _said(self) -> list[Send | Done | Failed]:
        said, self._out = self._out, []
        return said


def _without(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    cut = [part for begin, end in ranges for part in ((begin, min(end, first)), (max(begin, last), end))]
    return [part for part in cut if part[0] < part[1]]


def _within(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    cut = [(max(begin, first), min(end, last)) for begin, end in ranges]
    return [part for part in cut if part[0] < part[1]]
