"""The control path between a worker and the coordinator: nothing that is said on it is lost or heard twice.

Each end counts what it says and what it hears. A worker keeps its events until the coordinator has written
them down. When the connection breaks, because the coordinator was killed and starts again, they connect anew:

    worker                                       coordinator
    Tally(connection 2, heard 3, said 10)  ──►
                                           ◄──   Tally(connection 2, heard 8, said 5)
                                           ◄──   actions 4 and 5
    events 9 and 10                        ──►
    Tally(connection 2, heard 5, said 10)  ──►   and with that the worker is back

A Tally names the connection that it was said on, so what is still queued from an earlier one is told apart
and ignored. Now and then, and before it leaves, a worker says a Tally to be answered by one.

This module never decides what is said, and never opens a connection: it asks the links to.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from offbeat.errors import LinkError, LinkFailure, ProtocolError
from offbeat.events import Action, Event
from offbeat.runtime.processes.waiting import Condition
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.wire.record import decode_actions, encode

TALLY_EVERY: Final = 256  # events or actions: about as many are kept, at either end
# Why no coordinator is to be found any more and what to do, by the way in which dialling it has failed.
_ADVICE: Final[dict[LinkFailure, str]] = {
    "ended": "its process has ended, because the job is over or because it failed: see what rank 0 wrote",
    "unreachable": "its process may be alive: see that its host is up and that no firewall is on the way",
    "refused": "another process listens where the coordinator did, so this job is over: start it again",
    "peer has no files": "raise it where rank 0 starts, which starts the coordinator",
    "no files": "raise it where this worker starts",
}
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Tally(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a node is with another one.

    Attributes:
        connection: counts the worker's connections to the coordinator, from 0.
        heard: how many of the other's events or actions this node has; the coordinator, in its journal.
        said: how many events or actions this node has said, or has to say, in all.
    """

    connection: _Count
    heard: _Count
    said: _Count


_decoder: Final = msgspec.msgpack.Decoder(Tally)
_FIRST_BYTE: Final = msgspec.msgpack.encode(Tally(0, 0, 0))[0]


def encode_tally(tally: Tally) -> bytes:
    """Return a control message that holds this tally."""
    return msgspec.msgpack.encode(tally)


def decode_tally(data: bytes) -> Tally | None:
    """Return the tally that a control message holds; None if it holds something else.

    Raises:
        ProtocolError: it is none, but begins like one.
    """
    if not data or data[0] != _FIRST_BYTE:
        return None
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"expected a tally: {error}") from None


@dataclass(frozen=True, slots=True)
class _Message:
    first: int  # how many events were said before it
    events: tuple[Event, ...]
    payload: bytes

    @property
    def last(self) -> int:
        return self.first + len(self.events)


class ControlLine:
    """A worker's line to the coordinator, over as many connections as that takes.

    Args:
        endpoint: this worker's links.
        peer: the coordinator's name.
        addresses: where the coordinator listens, also after it was killed and started again.
        on_gone: called once, in the links' thread, when there is no coordinator any more, with the cause.
    """

    def __init__(
        self, endpoint: Endpoint, peer: str, addresses: Sequence[str], *, on_gone: Callable[[str], None]
    ) -> None:
        self._endpoint, self._peer, self._addresses = endpoint, peer, tuple(addresses)
        self._on_gone = on_gone
        self._changed = Condition()  # guards what follows
        self._unsent: deque[_Message] = deque()
        self._unrecorded: deque[_Message] = deque()  # sent on this connection, not known to be written down
        self._said = self._recorded = 0
        self._is_gone = False
        # From here on the links' thread's own.
        self._heard = self._tallied_heard = self._tallied_said = 0
        self._connection = 0
        self._is_open = True  # the coordinator knows where we are
        self._owed: int | None = None  # with how many actions heard the worker is back
        self._asks = False  # a tally is to be sent behind the events
        self._why_lost = ""
        endpoint.introduce(peer, self._addresses, lasting=True)

    @property
    def is_open(self) -> bool:
        """Whether, as far as is known, the coordinator hears this worker now."""
        return self._is_open

    def tell(self, *events: Event) -> None:
        """Sends events to the coordinator, now or when it is back; never blocks. Any thread may call it."""
        payload, count = encode(events), len(events)
        with self._changed:
            message = _Message(self._said, events, payload)
            self._said += count
            self._unsent.append(message)  # at once, for a handler of a signal may raise in between calls
        self._endpoint.call(self._send)  # in the order in which they were said, whichever thread said them

    def settle(self, timeout_s: float) -> None:
        """Waits until all that was said is written down, unless nobody is there or that takes too long."""
        until_s = time.monotonic() + timeout_s
        self._endpoint.call(self._ask)
        with self._changed:
            while not (self._is_gone or self._recorded == self._said):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    # In the links' thread --------------------------------------------------------------------------------

    def hear(self, payload: bytes) -> list[Action]:
        """Takes a message of the coordinator; returns the actions in it that were not heard before.

        Raises:
            ProtocolError: that is no message of a coordinator.
        """
        tally = decode_tally(payload)
        if tally is not None:
            if tally.connection == self._connection:
                self._take(tally)
            return []
        if not self._is_open:
            return []  # from before the coordinator knew where we are; it says it again
        actions = decode_actions(payload)
        self._heard += len(actions)
        if self._heard - self._tallied_heard >= TALLY_EVERY:
            self._ask()
        self._report_back()
        return actions

    def lost(self, error: LinkError) -> None:
        """The connection is gone: connects anew, as long as there is somebody to connect to."""
        if self._is_gone:
            return
        if not error.was_open:
            cause = f"{self._why_lost}, and {error}" if self._why_lost else str(error)
            self._end(f"{cause}; {_ADVICE[error.failure]}")
            return
        self._why_lost = str(error)
        self._is_open = False
        self._owed = None
        self._connection += 1
        with self._changed:
            self._unsent.extendleft(reversed(self._unrecorded))
            self._unrecorded.clear()
        self._endpoint.introduce(self._peer, self._addresses, lasting=True)
        self._say_tally()

    def left(self) -> None:
        """The coordinator has said goodbye, and no other comes in its place."""
        if not self._is_gone:
            self._end("it ended before the job did; see what it wrote where rank 0 runs")

    def abandon(self) -> None:
        """Nothing more can be said: the links have failed. Any thread may call it."""
        with self._changed:
            self._is_gone = True
            self._changed.notify_all()

    def _end(self, cause: str) -> None:
        self.abandon()
        self._on_gone(cause)

    def _take(self, tally: Tally) -> None:
        with self._changed:
            if not self._recorded <= tally.heard <= self._said:
                raise ProtocolError(
                    f"expected between {self._recorded} and {self._said} events to be recorded, "
                    f"got {tally.heard}"
                )
            self._recorded = tally.heard
            for queue in (self._unrecorded, self._unsent):
                while queue and queue[0].last <= tally.heard:
                    queue.popleft()
            if not self._is_open and self._unsent and self._unsent[0].first < tally.heard:
                begun = self._unsent.popleft()
                rest = begun.events[tally.heard - begun.first :]
                self._unsent.appendleft(_Message(tally.heard, rest, encode(rest)))
            self._changed.notify_all()
        if not self._is_open:
            self._is_open = True
            self._why_lost = ""
            self._owed = tally.said
            self._report_back()
            self._endpoint.call(self._send)

    def _report_back(self) -> None:
        """Says, once what was missed is heard, and behind the answers to it, that this worker is back."""
        if self._owed is not None and self._heard >= self._owed:
            self._owed = None
            self._ask()

    def _ask(self) -> None:
        self._asks = True
        self._endpoint.call(self._send)

    def _send(self) -> None:
        if not self._is_open:
            return
        while True:
            with self._changed:
                if not self._unsent:
                    break
                message = self._unsent.popleft()
                self._unrecorded.append(message)
            self._endpoint.send(self._peer, message.payload)
        if self._asks or self._said - self._tallied_said >= TALLY_EVERY:
            self._asks = False
            self._say_tally()

    def _say_tally(self) -> None:
        self._tallied_heard, self._tallied_said = self._heard, self._said
        tally = Tally(self._connection, self._heard, self._said)
        self._endpoint.send(self._peer, encode_tally(tally))
