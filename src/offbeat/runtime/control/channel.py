"""Control channel between a worker and the coordinator: exactly-once delivery across reconnects.

Each end counts the messages that it sends and receives. A worker keeps its events until the coordinator has
written them to its journal. When the connection breaks, because the coordinator was killed and is restarted,
the two resynchronize by exchanging their counts, each in a `SequenceAck`:

    worker                                                coordinator
    SequenceAck: connection 2, received 3, sent 10  ──►
                                                    ◄──   SequenceAck: connection 2, received 8, sent 5
                                                    ◄──   actions 4 and 5
    events 9 and 10                                 ──►
    SequenceAck: connection 2, received 5, sent 10  ──►   the worker counts as connected again

A SequenceAck names its connection, so that one still queued from an earlier connection is recognized and
ignored. Every `SEQUENCE_ACK_INTERVAL` messages, and before it leaves, a worker sends a SequenceAck, which the
coordinator answers with its own.

This module never decides what is sent, and never opens a connection: the endpoint does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from offbeat.errors import LinkError, LinkFailure, ProtocolError
from offbeat.events import Action, Event, RejectPeer
from offbeat.runtime.processes.waiting import SignalSafeCondition
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.wire.codec import decode_actions, encode_events

SEQUENCE_ACK_INTERVAL: Final = (
    256  # events or actions; about as many are kept for retransmission at either end
)
OUTAGE_S: Final = 300.0  # in which a person or an orchestrator starts a coordinator again
_REDIAL_S: Final = 0.5  # after its address has refused a connection
# Why the coordinator cannot be reached and what to do, by how connecting to it failed.
_ADVICE: Final[dict[LinkFailure, str]] = {
    "ended": "its process has ended, because the job is over or because it failed: see the output of rank 0, "
    "or of 'offbeat coordinator'",
    "unreachable": "its process may be alive: check that its host is up and that no firewall blocks it",
    "refused": "another process listens on the coordinator's address, so this job is over: start it again",
    "peer has no files": "raise it where rank 0 is started, which starts the coordinator",
    "no files": "raise it where this worker is started",
}
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SequenceAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one end of a control channel has received and sent.

    Attributes:
        connection: number of the worker's connection to the coordinator, from 0.
        received: count of events or actions received from the other end; the coordinator counts those in its
            journal.
        sent: count of events or actions sent, those still queued included.
    """

    connection: _Count
    received: _Count
    sent: _Count


_decoder: Final = msgspec.msgpack.Decoder(SequenceAck)
_FIRST_BYTE: Final = msgspec.msgpack.encode(SequenceAck(0, 0, 0))[0]


def encode_sequence_ack(ack: SequenceAck) -> bytes:
    """Return the control message that holds this SequenceAck."""
    return msgspec.msgpack.encode(ack)


def decode_sequence_ack(data: bytes) -> SequenceAck | None:
    """Return the SequenceAck in a control message; None if the message holds something else.

    Raises:
        ProtocolError: the message begins like a SequenceAck and cannot be decoded as one.
    """
    if not data or data[0] != _FIRST_BYTE:
        return None
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"expected a sequence acknowledgement: {error}") from None


@dataclass(frozen=True, slots=True)
class _EventBatch:
    first: int  # index of its first event among all events sent
    events: tuple[Event, ...]
    payload: bytes

    @property
    def last(self) -> int:
        return self.first + len(self.events)


class ControlChannel:
    """The worker's end of the control channel, over successive connections.

    Args:
        endpoint: this worker's links.
        peer: the coordinator's name.
        addresses: where the coordinator listens, also after a restart.
        is_service: the coordinator belongs to no worker: it may be started again, and counts as gone only
            after `OUTAGE_S`; any other one, as soon as its address refuses a connection.
        on_coordinator_gone: called once with the cause, in the I/O thread, when the coordinator is gone
            and will not return.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peer: str,
        addresses: Sequence[str],
        *,
        is_service: bool = False,
        on_coordinator_gone: Callable[[str], None],
    ) -> None:
        self._outage_s = OUTAGE_S if is_service else 0.0
        self._outage_began_s: float | None = None  # no coordinator has listened since
        self._endpoint, self._peer, self._addresses = endpoint, peer, tuple(addresses)
        self._on_gone = on_coordinator_gone
        self._changed = SignalSafeCondition()  # guards what follows
        self._unsent: deque[_EventBatch] = deque()
        self._unacked: deque[_EventBatch] = deque()  # sent on this connection, not acknowledged
        self._sent = self._acked = 0
        self._is_gone = self._has_ended = False
        # The links' thread alone uses what follows.
        self._received = self._reported_received = self._reported_sent = 0
        self._connection = 0
        self._is_open = True  # the coordinator has answered on this connection
        self._caught_up_at: int | None = (
            None  # count of received actions at which resynchronization is complete
        )
        self._ack_requested = False  # send a SequenceAck after the queued events
        self._loss_cause = ""
        endpoint.add_peer(peer, self._addresses, has_fixed_addresses=True)

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator is connected, as far as this worker knows."""
        return self._is_open

    def send(self, *events: Event, is_last: bool = False) -> None:
        """Send events to the coordinator, now or after a reconnect; never blocks. Any thread may call it.

        Args:
            events: dropped if another thread has sent the last ones.
            is_last: no event follows these: the sender is about to leave the job.
        """
        payload, count = encode_events(events), len(events)
        with self._changed:
            if self._has_ended:
                return
            self._has_ended = is_last
            message = _EventBatch(self._sent, events, payload)
            self._sent += count
            self._unsent.append(message)  # same call: a signal handler may raise between calls
        self._endpoint.call_soon(self._send_queued)  # in queue order, whichever thread called

    def wait_until_acked(self, timeout_s: float) -> None:
        """Wait until the coordinator has recorded all events sent, is gone, or `timeout_s` has passed."""
        until_s = time.monotonic() + timeout_s
        self._endpoint.call_soon(self._request_ack)
        with self._changed:
            while not (self._is_gone or self._acked == self._sent):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    # In the I/O thread --------------------------------------------------------------------------------

    def receive(self, payload: bytes) -> list[Action]:
        """Process a message from the coordinator; return its actions, each exactly once.

        Raises:
            ProtocolError: the message is not one that a coordinator sends.
        """
        ack = decode_sequence_ack(payload)
        if ack is not None:
            if ack.connection == self._connection:
                self._on_sequence_ack(ack)
            return []
        actions = decode_actions(payload)
        if not self._is_open:  # of an earlier connection; a coordinator that knows this worker sends it again
            return [action for action in actions if isinstance(action, RejectPeer)]
        self._received += len(actions)
        if self._received - self._reported_received >= SEQUENCE_ACK_INTERVAL:
            self._request_ack()
        self._confirm_resync()
        return actions

    def on_connection_lost(self, error: LinkError) -> None:
        """Reconnect after a lost connection; give up if the coordinator could not be reached."""
        if self._is_gone:
            return
        if not error.was_open and not self._may_be_started_again():
            cause = f"{self._loss_cause}, and {error}" if self._loss_cause else str(error)
            self._give_up(f"{cause}; {_ADVICE[error.failure]}")
            return
        if error.was_open or self._is_open:
            self._loss_cause = str(error)
            self._is_open = False
            self._caught_up_at = None
            self._connection += 1
            with self._changed:
                self._unsent.extendleft(reversed(self._unacked))
                self._unacked.clear()
        if error.was_open:
            self._dial()
        else:
            self._endpoint.call_later(_REDIAL_S, self._dial)

    def _may_be_started_again(self) -> bool:
        """Whether to wait longer for a coordinator that is not there."""
        now_s = time.monotonic()
        if self._outage_began_s is None:
            self._outage_began_s = now_s
        return now_s - self._outage_began_s < self._outage_s

    def _dial(self) -> None:
        self._endpoint.add_peer(self._peer, self._addresses, has_fixed_addresses=True)
        self._send_ack()

    def on_peer_closed(self) -> None:
        """Note that the coordinator has closed its end in order: it will not be restarted."""
        if not self._is_gone:
            self._give_up("it ended before the job did; see the output of rank 0")

    def fail(self) -> None:
        """Stop waiting for acknowledgements: the links have failed. Any thread may call it."""
        with self._changed:
            self._is_gone = True
            self._changed.notify_all()

    def _give_up(self, cause: str) -> None:
        self.fail()
        self._on_gone(cause)

    def _on_sequence_ack(self, ack: SequenceAck) -> None:
        with self._changed:
            if not self._acked <= ack.received <= self._sent:
                raise ProtocolError(
                    f"expected an acknowledgement of between {self._acked} and {self._sent} events, "
                    f"got {ack.received}"
                )
            self._acked = ack.received
            for queue in (self._unacked, self._unsent):
                while queue and queue[0].last <= ack.received:
                    queue.popleft()
            if not self._is_open and self._unsent and self._unsent[0].first < ack.received:
                partial = self._unsent.popleft()
                rest = partial.events[ack.received - partial.first :]
                self._unsent.appendleft(_EventBatch(ack.received, rest, encode_events(rest)))
            self._changed.notify_all()
        if not self._is_open:
            self._is_open = True
            self._loss_cause, self._outage_began_s = "", None
            self._caught_up_at = ack.sent
            self._confirm_resync()
            self._endpoint.call_soon(self._send_queued)

    def _confirm_resync(self) -> None:
        """Send a SequenceAck, after the replies to missed actions, once all of these have been received."""
        if self._caught_up_at is not None and self._received >= self._caught_up_at:
            self._caught_up_at = None
            self._request_ack()

    def _request_ack(self) -> None:
        self._ack_requested = True
        self._endpoint.call_soon(self._send_queued)

    def _send_queued(self) -> None:
        if not self._is_open:
            return
        while True:
            with self._changed:
                if not self._unsent:
                    break
                message = self._unsent.popleft()
                self._unacked.append(message)
            self._endpoint.send(self._peer, message.payload)
        if self._ack_requested or self._sent - self._reported_sent >= SEQUENCE_ACK_INTERVAL:
            self._ack_requested = False
            self._send_ack()

    def _send_ack(self) -> None:
        self._reported_received, self._reported_sent = self._received, self._sent
        ack = SequenceAck(self._connection, self._received, self._sent)
        self._endpoint.send(self._peer, encode_sequence_ack(ack))
