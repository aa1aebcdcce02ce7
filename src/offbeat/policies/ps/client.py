"""A client of a parameter server as a state machine without I/O: messages in, messages out.

Nothing here knows what values are or how messages travel.

Theory of operation: pushes, pulls, and resending exactly once
--------------------------------------------------------------

Parts. A program makes requests (`push`, `pull`), each of a range of keys of one namespace and with a number.
A request stays in `_pending`, in the order of creation, until every key of its range is answered; `missing`
lists the ranges that are not. Each call returns messages to send (`SendMessage`) and completions
(`RequestDone`, `RequestFailed`).

Sending. A range is split into spans with the same holders (`HashRing.spans`), these into pieces (`pieces`),
and each piece goes to its master with the epoch of the client's view. Without a view, or while the namespace
is not in it, requests wait. Spans without a holder are skipped until a view names one.

Times. A push receives its time when it is first sent, not when it is made: the next one of the namespace, or
the one that the program chose. From then on it keeps it. The push also carries, piece by piece, the times of
the client's previous pushes to its keys (`previous_times`), from a range vector clock. In a namespace that
aggregates, a push first needs participation (`JoinAggregation`, answered by a view) and waits while the
namespace is paused; the client answers a pause with `PauseReached`, the latest time that it has sent.

Exactly once. A new view of the same epoch changes nothing here. In a new epoch everything that is missing is
split and sent again, in order and with the same times, before anything newer. A server whose clock is at a
push's time or later acknowledges it without applying it, so a push is applied once however often it is sent;
a server to which the previous push is missing notices that from `previous_times`. Replies may come twice:
only ranges that are still missing are used, and replies to unknown numbers are ignored.

Stale. A server that is not the master of a part, or has a newer epoch, replies `WrongMaster`. The client does
nothing then: the view of that epoch makes it send again.

Invariants. Pushes of a namespace are sent in ascending time. A push is done only when all holders of all its
keys have it. A request ends once, with `RequestDone` or `RequestFailed`.

Failures. `Rejected` for one part fails the whole request, though other parts may have been applied. Where the
view lists lost keys, requests that include them fail; so does the next new request if none failed for the
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, NamedTuple

from offbeat.errors import LostKeysError, OffbeatError, ProtocolError
from offbeat.events import LostArc
from offbeat.policies.ps.hash_ring import KeySpan, NamespaceSpec, block_point
from offbeat.policies.ps.messages import (
    ClientMessage,
    InspectPull,
    InspectResult,
    JoinAggregation,
    LeaveAggregation,
    PauseReached,
    Payload,
    PlacementView,
    Pull,
    PullResult,
    Push,
    PushAck,
    Rejected,
    WrongMaster,
)
from offbeat.policies.ps.range_clock import ClockRange, RangeVectorClock
from offbeat.policies.ps.server_node import MANAGER, SendMessage

_SPANS_MAX: Final = 4096
_RANGES_MAX: Final = 8  # of lost keys named in an error


class RequestDone(NamedTuple):
    """A request is done: a push on all holders.

    Attributes:
        parts: for a pull, or a push that wants values: the contents received, each with its first key and the
            key after its last, ascending.
        times: for a pull that wants them: of this client's pushes contained in the values, ascending.
    """

    request: int
    parts: tuple[tuple[int, int, Payload], ...]
    times: tuple[ClockRange, ...] = ()


class RequestFailed(NamedTuple):
    """A request has failed: a server has refused a part of it; other parts may have been applied.

    Attributes:
        error: an error with more information than `reason`, if there is one.
    """

    request: int
    reason: str
    error: OffbeatError | None = None


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A request that is not done.

    Attributes:
        first, last: of all its keys.
        missing: ranges of keys that have not been answered, ascending.
        time, after: of a push that has been sent; None of a pull.
        chosen_time: the time that the program chose for a push, None for the next one.
        inspect_flags: of an `InspectPull`: whether states, and whether times; None for other requests.
        wants_values: of a push.
        times: received so far.
    """

    number: int
    namespace: str
    content: Payload
    first: int
    last: int
    missing: list[tuple[int, int]]
    is_push: bool
    time: int | None = None
    after: tuple[ClockRange, ...] = ()
    parts: list[tuple[int, int, Payload]] = field(default_factory=list)
    chosen_time: int | None = None
    inspect_flags: tuple[bool, bool] | None = None
    wants_values: bool = False
    times: tuple[ClockRange, ...] = ()


class PsClient:
    """One client: its pushes of a range are applied in the order in which it makes them, each exactly once.

    In a namespace that aggregates, the pushes of all participants at one time are one operation, and none of
    them is done before all are. Every participant pushes the same ranges at the same times, or skips a time
    and pushes later; a push is done when all participants have pushed. A push made before this client takes
    part, or during a pause, is sent afterwards.

    A client's times are 1, 2, ... in each namespace, or chosen by the program: each later than all before it.

    Where data of a namespace are lost, every request for lost keys fails, until the namespace restarts from
    zero there; if none was pending at the loss, the next request fails for it whatever its keys.

    Args:
        client: its id, which no other has or had.
        cut: returns the part of a content for keys `first` to `last` - 1.
        pieces: returns the ranges in which keys `first` to `last` - 1 of a request travel, from its namespace
            and content; by default one.
    """

    def __init__(
        self,
        client: int,
        cut: Callable[[Payload, int, int], Payload],
        pieces: Callable[[str, Payload, int, int], Iterable[tuple[int, int]]] | None = None,
    ) -> None:
        self.client = client
        self._cut = cut
        self._pieces = pieces or (lambda _, __, first, last: ((first, last),))
        self._number = 0
        self._pending: dict[int, _PendingRequest] = {}  # in the order of creation
        self._times: dict[str, int] = {}  # the latest that was sent
        self._chosen_times: dict[str, int] = {}  # the latest that was chosen
        self._clocks: dict[str, RangeVectorClock] = {}
        self._view: PlacementView | None = None
        self._join_sent: set[str] = set()
        self._left: set[str] = set()
        self._reported_losses: dict[str, int] = {}  # by namespace: the latest loss that a request failed for
        self._spans: dict[tuple[str, int, int], list[KeySpan]] = {}  # of this epoch, cached
        self._output: list[SendMessage | RequestDone | RequestFailed] = []

    def push(
        self,
        namespace: str,
        content: Payload,
        first: int,
        last: int,
        time: int | None = None,
        *,
        wants_values: bool = False,
    ) -> tuple[int, list[SendMessage | RequestDone | RequestFailed]]:
        """Push what `content` has for keys `first` to `last` - 1; return the request's number and the output.

        Args:
            time: of the push; by default one later than the last one's. The push fails if this client takes
                part in the namespace only from a later time on.
            wants_values: also pull all keys of the range, with this push applied.

        Raises:
            ProtocolError: this client has left the namespace.
            ValueError: there was a push of that time, or of a later one.
        """
        self._check_not_left(namespace)
        request = self._new(namespace, content, first, last, is_push=True)
        request.wants_values = wants_values
        if time is not None:
            latest = max(self._times.get(namespace, 0), self._chosen_times.get(namespace, 0))
            if time <= latest:
                raise ValueError(f"expected a time of {namespace} later than {latest}, got {time}")
            request.chosen_time = self._chosen_times[namespace] = time
        return self._start(request)

    def pull(
        self,
        namespace: str,
        first: int,
        last: int,
        keys: Payload | None = None,
        *,
        states: bool = False,
        times: bool = False,
    ) -> tuple[int, list[SendMessage | RequestDone | RequestFailed]]:
        """Pull the values of keys `first` to `last` - 1, or of those of them that `keys` lists.

        Args:
            states: also the states that the update keeps for them.
            times: also the times of this client's own pushes contained in them.
        """
        request = self._new(namespace, keys, first, last, is_push=False)
        if states or times:
            request.inspect_flags = states, times
        return self._start(request)

    def join_aggregation(self, namespace: str) -> list[SendMessage | RequestDone | RequestFailed]:
        """Take part in a namespace that aggregates, from a time that a view gives.

        Clients that begin together join before the first of them pushes; otherwise the first push does it. A
        client that comes later, where ranges differ from time to time, learns its first time from
        `first_time`.

        Raises:
            ProtocolError: this client has left the namespace.
        """
        self._check_not_left(namespace)
        self._send_join(namespace)
        return self._drain_output()

    def leave_aggregation(self, namespace: str) -> list[SendMessage | RequestDone | RequestFailed]:
        """Stop taking part in a namespace that aggregates, so that its sums do not wait for this client.

        Raises:
            ProtocolError: a push to it is not done.
        """
        if any(request.is_push and request.namespace == namespace for request in self._pending.values()):
            raise ProtocolError(f"expected all pushes to {namespace} to be done before leaving it")
        self._left.add(namespace)
        self._output.append(SendMessage(MANAGER, LeaveAggregation(client=self.client, namespace=namespace)))
        return self._drain_output()

    def first_time(self, namespace: str) -> int | None:
        """Return the time of this client's first push in a namespace that aggregates, None while unknown."""
        return None if self._view is None else self._view.participants.get(namespace, {}).get(self.client)

    def _new(
        self, namespace: str, content: Payload, first: int, last: int, *, is_push: bool
    ) -> _PendingRequest:
        self._number += 1
        return _PendingRequest(self._number, namespace, content, first, last, [(first, last)], is_push)

    def _start(self, request: _PendingRequest) -> tuple[int, list[SendMessage | RequestDone | RequestFailed]]:
        self._pending[request.number] = request
        if not self._fail_for_loss(request, is_new=True):
            self._send(request)
        return request.number, self._drain_output()

    def unanswered_servers(self, namespace: str, first: int, last: int) -> list[int]:
        """Return the servers that have not answered for keys `first` to `last` - 1, ascending."""
        view = self._view
        if view is None or namespace not in view.spaces:
            return []
        missing = [
            part
            for request in list(self._pending.values())
            if request.namespace == namespace
            for part in _intersect(request.missing, first, last)
        ]
        spans = [span for part in missing for span in view.ring.spans(view.spaces[namespace], *part)]
        return sorted({span.holders[0] for span in spans if span.holders})

    def on_message(self, message: ClientMessage) -> list[SendMessage | RequestDone | RequestFailed]:
        """Process a server's reply.

        Raises:
            ProtocolError: it does not fit that request.
        """
        request = self._pending.get(message.request)
        if request is not None:
            match message:
                case PushAck():
                    if request.wants_values or not request.is_push:
                        raise ProtocolError(f"expected values in answer to {request.number}, got none")
                    self._mark_answered(request, message.first, message.last)
                case PullResult():
                    self._add_values(request, message)
                    self._mark_answered(request, message.first, message.last)
                case Rejected():
                    del self._pending[request.number]
                    self._output.append(RequestFailed(request.number, message.reason))
                case WrongMaster():
                    pass  # the view of that epoch makes it be sent again, if it has not yet
        return self._drain_output()

    def on_view(self, view: PlacementView) -> list[SendMessage | RequestDone | RequestFailed]:
        """Adopt a new view; in a new epoch, send again what has not been answered, in order."""
        if self._view is None or view.epoch > self._view.epoch:
            self._view = view
            self._spans.clear()
            for namespace, pause in view.paused.items():
                if self.client in view.participants.get(namespace, {}):
                    self._report_pause(namespace, pause)
            for request in list(self._pending.values()):  # one may fail
                if not self._fail_for_loss(request, is_new=False):
                    self._send(request)
        return self._drain_output()

    def _fail_for_loss(self, request: _PendingRequest, *, is_new: bool) -> bool:
        """Fail a request for lost keys, or the first new one after a loss; return whether it failed."""
        view = self._view
        if view is None or not view.lost:
            return False
        space = view.spaces.get(request.namespace)
        arcs = [arc for arc in view.lost if arc.namespace == request.namespace]
        if space is None or not arcs:
            return False
        reported = self._reported_losses.get(space.name, 0)
        new_arcs = [arc for arc in arcs if is_new and arc.loss > reported]
        for span, relevant in (((0, space.keys), new_arcs), ((request.first, request.last), arcs)):
            ranges, found = _lost_ranges(space, relevant, *span)
            if ranges:
                self._reported_losses[space.name] = max(reported, *(arc.loss for arc in arcs))
                del self._pending[request.number]
                error = _lost_keys_error(space.name, ranges, sorted({arc.server for arc in found}))
                self._output.append(RequestFailed(request.number, str(error), error))
                return True
        return False

    def _send_join(self, namespace: str) -> None:
        if namespace not in self._join_sent:
            self._join_sent.add(namespace)
            self._output.append(
                SendMessage(MANAGER, JoinAggregation(client=self.client, namespace=namespace))
            )

    def _check_not_left(self, namespace: str) -> None:
        if namespace in self._left:
            raise ProtocolError(f"expected a namespace that this client has not left, got {namespace}")

    def _report_pause(self, namespace: str, pause: int) -> None:
        time = self._times.get(namespace, 0)
        reached = PauseReached(client=self.client, namespace=namespace, pause=pause, time=time)
        self._output.append(SendMessage(MANAGER, reached))

    def _add_values(self, request: _PendingRequest, pulled: PullResult) -> None:
        """Store the parts of an answer that were missing: nearly always all of it."""
        for first, last in _intersect(request.missing, pulled.first, pulled.last):
            is_whole = first == pulled.first and last == pulled.last
            content = pulled.content if is_whole else self._cut(pulled.content, first, last)
            request.parts.append((first, last, content))
            if isinstance(pulled, InspectResult):
                request.times += _clip(pulled.times, first, last)

    def _mark_answered(self, request: _PendingRequest, first: int, last: int) -> None:
        if request.missing == [(first, last)]:
            request.missing = []
        else:
            request.missing = _subtract(request.missing, first, last)
        if not request.missing:
            del self._pending[request.number]
            parts = tuple(sorted(request.parts, key=itemgetter(0)))
            self._output.append(
                RequestDone(request.number, parts, _merged(request.times) if request.times else ())
            )

    def _send(self, request: _PendingRequest) -> None:
        view = self._view
        if view is None or request.namespace not in view.spaces:
            return
        if request.is_push and request.time is None and not self._assign_time(request, view):
            return
        for begin, end in request.missing:
            for first, last, holders in self._spans_of(view, request.namespace, begin, end):
                if not holders:  # no server is left; it is sent to the next one
                    continue
                for piece in self._pieces(request.namespace, request.content, first, last):
                    part = self._message_for(request, view.epoch, *piece)
                    self._output.append(SendMessage(f"server-{holders[0]}", part))

    def _spans_of(self, view: PlacementView, namespace: str, first: int, last: int) -> list[KeySpan]:
        """Return the spans of these keys by holders, cached, as the same ranges recur."""
        spans = self._spans.get((namespace, first, last))
        if spans is None:
            if len(self._spans) == _SPANS_MAX:
                self._spans.clear()
            spans = list(view.ring.spans(view.spaces[namespace], first, last))
            self._spans[namespace, first, last] = spans
        return spans

    def _assign_time(self, request: _PendingRequest, view: PlacementView) -> bool:
        """Assign a push its time, if it may have one now; return whether it may be sent."""
        namespace, begins = request.namespace, 1
        if view.spaces[namespace].aggregates:
            if self.client not in view.participants.get(namespace, {}):
                self._send_join(namespace)
                return False
            if namespace in view.paused:
                return False
            begins = view.participants[namespace][self.client]
        earliest = max(self._times.get(namespace, 0) + 1, begins)
        time = earliest if request.chosen_time is None else request.chosen_time
        if time < earliest:
            reason = f"expected time {earliest} or a later one of {namespace}, got {time}"
            del self._pending[request.number]
            self._output.append(RequestFailed(request.number, reason))
            return False
        self._times[namespace] = time
        clock = self._clocks.get(namespace)
        if clock is None:
            clock = self._clocks[namespace] = RangeVectorClock()
        request.time, request.after = (
            time,
            tuple(clock.advance(self.client, request.first, request.last, time)),
        )
        return True

    def _message_for(self, request: _PendingRequest, epoch: int, first: int, last: int) -> Push | Pull:
        content, after = request.content, request.after
        if (first, last) != (request.first, request.last):
            content = None if content is None else self._cut(content, first, last)
            after = _clip(after, first, last)
        if request.inspect_flags is not None:
            with_states, with_times = request.inspect_flags
            return InspectPull(
                client=self.client,
                request=request.number,
                epoch=epoch,
                namespace=request.namespace,
                first=first,
                last=last,
                keys=content,
                returns_states=with_states,
                returns_times=with_times,
            )
        if request.time is None:
            return Pull(
                client=self.client,
                request=request.number,
                epoch=epoch,
                namespace=request.namespace,
                first=first,
                last=last,
                keys=content,
            )
        return Push(
            client=self.client,
            request=request.number,
            epoch=epoch,
            namespace=request.namespace,
            first=first,
            last=last,
            time=request.time,
            previous_times=after,
            content=content,
            returns_values=request.wants_values,
        )

    def _drain_output(self) -> list[SendMessage | RequestDone | RequestFailed]:
        output, self._output = self._output, []
        return output


def _lost_ranges(
    space: NamespaceSpec, arcs: list[LostArc], first: int, last: int
) -> tuple[list[tuple[int, int]], list[LostArc]]:
    """Return which of these keys are lost, as at most _RANGES_MAX ranges, and in which arcs."""
    ranges: list[tuple[int, int]] = []
    found: list[LostArc] = []
    if not arcs:
        return ranges, found
    for block in space.blocks_of_range(first, last):
        point = block_point(space.name, block)
        arc = next((arc for arc in arcs if arc.start <= point < arc.stop), None)
        if arc is None:
            continue
        begin, end = space.block_range(block)
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = ranges[-1][0], end
        elif len(ranges) == _RANGES_MAX:
            break
        else:
            ranges.append((begin, end))
        found.append(arc)
    return ranges, found


def _lost_keys_error(namespace: str, ranges: list[tuple[int, int]], servers: list[int]) -> LostKeysError:
    """Return the error of a request for lost keys.

    Args:
        namespace: the namespace of the keys.
        ranges: the lost keys as (first, one past the last), at most `_RANGES_MAX` of them.
        servers: those that had them last.
    """
    named = " and ".join(f"server {server}" for server in servers)
    keys = ", ".join(f"{first} to {last - 1}" for first, last in ranges)
    more = ", and perhaps more" if len(ranges) == _RANGES_MAX else ""
    text = (
        f"the values of keys {keys}{more} of {namespace} are lost: all servers that had them are gone, "
        f'{named} last; open the namespace with on_loss="reset" to restart them from zero'
    )
    return LostKeysError(text, namespace=namespace, ranges=tuple(ranges), servers=tuple(servers))


def _subtract(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    cut = [part for begin, end in ranges for part in ((begin, min(end, first)), (max(begin, last), end))]
    return [part for part in cut if part[0] < part[1]]


def _intersect(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    if ranges == [(first, last)]:  # nearly always
        return ranges
    cut = [(max(begin, first), min(end, last)) for begin, end in ranges]
    return [part for part in cut if part[0] < part[1]]


def _clip(pieces: Iterable[ClockRange], first: int, last: int) -> tuple[ClockRange, ...]:
    return tuple(
        ClockRange(max(first, piece.start), min(last, piece.stop), piece.time)
        for piece in pieces
        if piece.start < last and first < piece.stop
    )


def _merged(pieces: tuple[ClockRange, ...]) -> tuple[ClockRange, ...]:
    """Merge adjacent pieces of the same time; ascending."""
    merged: list[ClockRange] = []
    for piece in sorted(pieces):
        if merged and (merged[-1].stop, merged[-1].time) == (piece.start, piece.time):
            merged[-1] = merged[-1]._replace(stop=piece.stop)
        else:
            merged.append(piece)
    return tuple(merged)
