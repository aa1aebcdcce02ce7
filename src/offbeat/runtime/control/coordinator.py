"""The coordinator: one small process that passes events of all workers to policies and sends their actions.

It holds no tensor and never imports torch. All decisions are the policies'; all events and actions are
recorded. Run as `python -m offbeat.runtime.control.coordinator`: it reads its configuration, one JSON object,
from standard input, answers with its addresses on standard output and then serves until the job is over.
`offbeat.runtime.control.service` runs it as a service that no worker has started.

An event is written to a journal before any action that follows from it is sent, so that a coordinator that
is killed can be restarted (see `offbeat.runtime.processes.supervisor`) and continue in the same state. Its
clock continues from the last event in the journal, so a policy never notices how long no coordinator ran, nor
that the next one runs on another host.
"""

from __future__ import annotations

import gc
import math
import queue
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    NamedTuple,
    TextIO,
    TypeAlias,
    cast,
    get_args,
    get_type_hints,
)

import msgspec

from offbeat.errors import LinkError, OffbeatError, ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    AnnounceWorkerLost,
    ClusterView,
    Event,
    Failed,
    Joined,
    Left,
    Lost,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeResumed,
    NodeSilent,
    PeerList,
    PeerReachable,
    PeerUnreachable,
    RejectPeer,
    Tick,
    ValueGiven,
)
from offbeat.policies import dispatch_event
from offbeat.runtime.control.channel import SequenceAck, decode_sequence_ack, encode_sequence_ack
from offbeat.runtime.control.configuration import (
    COORDINATOR,
    PARAMETER_SERVER_PATH,
    CoordinatorConfiguration,
)
from offbeat.runtime.control.environment import load_tls
from offbeat.runtime.control.journal import Journal
from offbeat.runtime.control.peer_table import PeerRecord, PeerTable
from offbeat.runtime.control.run_log import LogPosition, RunLog
from offbeat.runtime.control.starting import failure_answer, read_configuration, write_answer
from offbeat.runtime.control.unacked import UnackedActions
from offbeat.runtime.monitoring.opening import check_extras, listen_for_http, open_publisher
from offbeat.runtime.processes.supervisor import supervise
from offbeat.runtime.transport import addresses as places
from offbeat.runtime.transport.endpoint import UNREACHABLE_S, Endpoint
from offbeat.wire.codec import (
    ActionMessage,
    PlainEntry,
    decode_events,
    encode_action,
    encode_actions,
    encode_record,
    from_plain,
    join_actions,
    split_actions,
    to_plain,
)
from offbeat.wire.replay import build_policy

if TYPE_CHECKING:
    from offbeat.runtime.monitoring.publisher import Publisher

_ITEMS_PER_SEND = 64  # of what was received together; then the actions so far are sent
# Up to so many peers, a snapshot replaces the journal every `journal_events_max` events; with more, the state
# is larger and replaces it more rarely, in proportion.
_PEERS_FEW = 256
RECONNECT_S = 15.0  # reaching a worker may take 10 s, and it then has to receive what it has missed
_NAMED_MAX = 16  # workers
_TEXT_MAX = 10_000  # characters; actions quote texts, and must fit into a control message
_JOINS: Final = (Joined, NodeJoined)
_OBSERVED: Final = frozenset({Tick, Lost, NodeLost, NodeSilent, NodeResumed})  # by the coordinator only
_REACHABILITY: Final = frozenset({PeerUnreachable, PeerReachable})
_ENDS: Final = (Lost, Failed, NodeLost)
_TEXT_FIELDS: Final = {  # by kind of event, the fields that hold texts, which people read
    kind: [name for name, hint in get_type_hints(kind).items() if hint in (str, tuple[str, ...])]
    for kind in get_args(Event)
} | {ValueGiven: ["call"]}
_LOG_ENDED = b"the run log has ended"  # a record of the journal: a successor does not reopen the log


class _Received(NamedTuple):
    peer: str
    payload: bytes


class _SilenceChange(NamedTuple):
    """A peer has fallen silent; or, with an empty cause, sends again."""

    peer: str
    cause: str


_Item: TypeAlias = _Received | _SilenceChange | BaseException


class Coordinator:
    """Passes received events to the policies and sends the actions that they return.

    It listens from construction on, and serves later: possibly in a child of the process that made it, and
    in another child if that one is killed. Each begins by replaying the journal.

    Args:
        configuration: see `CoordinatorConfiguration`.
        listeners: sockets that listen already, with their addresses; None to listen on the configuration's
            host.
        journal: of an earlier coordinator, or empty; None for a new one.

    Attributes:
        addresses: where workers reach it, best first.
        journal: the state that a successor needs.

    Raises:
        ValueError: the configuration is invalid.
        OffbeatError: a package that the configuration needs is not installed.
        OSError: it cannot listen on the host, or cannot begin the log.

    Size: an event is received, decided on, recorded in journal and log, and answered, in this order and
    before the next one; all of it reads and writes what is known of the peers.
    """

    def __init__(
        self,
        configuration: CoordinatorConfiguration,
        *,
        listeners: list[tuple[socket.socket, str]] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._configuration = configuration
        self._policies = [build_policy(spec.path, spec.arguments) for spec in configuration.policies]
        self._inbox: queue.SimpleQueue[list[_Item]] = queue.SimpleQueue()
        self._received: list[_Item] = []  # the links' thread passes them on together, which saves switches
        self._peers = PeerTable()
        self._rejected: set[str] = set()  # refused before they joined
        self._connections: dict[str, int] = {}  # by peer, the connection of its last SequenceAck
        self._unsent: list[tuple[str, bytes]] = []  # peers and messages, in order
        self._reconnecting: dict[str, float] = {}  # present peers, and until when they must reconnect
        self._expected_workers = 0  # workers; the largest world that a worker has announced
        self._has_started = False
        self._clock_offset_s = 0.0
        self._opened_s = self._last_tick_s = self._last_turn_s = time.monotonic()
        self._excused_at_s = -math.inf  # when peers last could not be received for a cause on this host
        self._endpoint: Endpoint | None = None
        self._tls = load_tls()
        self.journal = Journal() if journal is None else journal
        check_extras(configuration.monitoring)
        self._http = listen_for_http(configuration.monitoring)
        self._publisher: Publisher | None = None
        self._log = self._open_log()
        self._log_start = self._log.position
        self._listeners = places.listen(configuration.host) if listeners is None else listeners
        self.addresses = tuple(address for _, address in self._listeners)

    def serve(self) -> None:
        """Serve until all workers have gone, or, before the start, none is waited for any more.

        An exception of the coordinator ends the job: it is sent to every worker and then raised.

        Raises:
            OffbeatError: the journal of an earlier coordinator of this job cannot be replayed.
        """
        configuration = self._configuration
        self._publisher = open_publisher(configuration.monitoring, self._http)
        self._restore()
        if self._publisher is not None:
            self._publisher.start()
        self._endpoint = Endpoint(
            COORDINATOR,
            job=configuration.job,
            token=configuration.token,
            on_message=lambda peer, payload: self._on_received(_Received(peer, payload)),
            on_lost=self._on_received,
            on_left=lambda peer: self._on_received(
                LinkError(peer, "it closed the connection before it left the job")
            ),
            on_unreachable=lambda peer, cause: self._on_received(_SilenceChange(peer, cause)),
            on_reachable=lambda peer: self._on_received(_SilenceChange(peer, "")),
            on_error=self._on_links_failed,
            listeners=self._listeners,
            silent_s=configuration.silent_s,
            tls=self._tls,
        )
        try:
            for peer in sorted(self._peers.present):
                self._reconnect(peer)
            self._send_queued()
            self._last_turn_s = self._last_tick_s = time.monotonic()
            while self._peers.present or not self._is_over():
                self._serve_turn()
            self._flush()  # before the links close: closing implies that all events are recorded
        except Exception as error:
            text = f"the coordinator failed: {type(error).__name__}: {error}"[:_TEXT_MAX]
            self._dispatch([AbortJob(worker=None, step=None, reason=text)])
            self._send_queued()
            raise
        finally:
            self._endpoint.close()
            self._log.close()
            if self._publisher is not None:
                self._publisher.close()

    def _is_over(self) -> bool:
        have_all_joined = 0 < self._expected_workers <= len(self._peers)
        return (
            self._has_started
            or have_all_joined
            or time.monotonic() - self._opened_s > self._configuration.linger_s
        )

    # Receiving events ------------------------------------------------------------------------------------

    def _on_received(self, item: _Item) -> None:
        """Keep an item until no socket is ready, or for some turns of the links' loop; in its thread."""
        self._received.append(item)
        if self._endpoint is None:  # its thread runs already, but it is not assigned yet
            self._pass_on()
        elif len(self._received) == 1:
            self._endpoint.call_when_idle(self._pass_on)

    def _on_links_failed(self, error: BaseException) -> None:
        """Pass on what ended the links' thread, after what was received before; in their thread."""
        self._received.append(error)
        self._pass_on()

    def _pass_on(self) -> None:
        received, self._received = self._received, []
        self._inbox.put(received)

    def _serve_turn(self) -> None:
        """Process what was received together, or else a tick, and send the actions that follow."""
        items = self._wait_for_items()
        self._check_for_stall()
        if not items:
            for event, peer in self._tick():
                self._handle(event, peer)
        for number, item in enumerate(items, 1):
            self._process(item)
            if not number % _ITEMS_PER_SEND:
                self._send_queued()
                self._check_for_stall()  # long work is none
        self._send_queued()

    def _wait_for_items(self) -> list[_Item]:
        """Wait for items; return none once a tick is due, which it is also while messages never stop."""
        wait_s = self._last_tick_s + self._configuration.tick_s - time.monotonic()
        if wait_s <= 0:
            return []
        try:
            return self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return []

    def _process(self, item: _Item) -> None:
        match item:
            case _Received():
                self._process_message(item.peer, item.payload)
            case _SilenceChange() if item.peer in self._peers.present:
                if self._peers[item.peer].is_silent == (not item.cause):
                    self._handle(self._silence_event(item.peer, item.cause), item.peer)
            case LinkError() if item.peer in self._peers.present:
                if self._may_reconnect(item):
                    self._reconnect(item.peer)
                else:
                    self._handle(self._lost_event(item.peer, str(item)), item.peer)
            case BaseException() if not isinstance(item, LinkError):
                raise item

    def _process_message(self, peer: str, payload: bytes) -> None:
        if peer in self._rejected:
            return
        if peer in self._reconnecting:  # what it could not send before may be much
            self._reconnecting[peer] = time.monotonic() + RECONNECT_S
        try:
            ack = decode_sequence_ack(payload)
            if ack is not None:
                self._on_sequence_ack(peer, ack)
            elif not self._answer_request(peer, payload):
                for event, struct in decode_events(payload, self._now_s()):
                    if self._accept(event, peer):
                        self._handle(event, peer, struct)
        except ProtocolError as error:
            self._reject(peer, str(error))

    def _tick(self) -> Iterator[tuple[Event, str]]:
        """Yield the loss of peers that did not reconnect in time, and a Tick once none is reconnecting."""
        now_s = time.monotonic()
        if now_s - self._last_tick_s < self._configuration.tick_s:
            return
        self._last_tick_s = now_s
        self._flush()
        for peer in [peer for peer, until_s in self._reconnecting.items() if now_s > until_s]:
            yield self._lost_event(peer, f"it did not reconnect within {RECONNECT_S:g} s"), peer
        if not self._reconnecting and self._policies:
            yield Tick(now_s=self._now_s()), ""

    def _now_s(self) -> float:
        """Return the time of the job's clock, which stands still while no coordinator runs."""
        return time.monotonic() + self._clock_offset_s

    def _answer_request(self, peer: str, payload: bytes) -> bool:
        """Answer a message that is a request and no event; return whether it was one."""
        return False

    def _may_reconnect(self, error: LinkError) -> bool:
        """Whether a peer whose connection is lost is given time to reconnect, which it is once.

        It is if the silence of peers is excused; and a peer that replaces its connection is alive.
        """
        is_excused = time.monotonic() - self._excused_at_s < self._configuration.silent_s
        return (is_excused or error.failure == "replaced") and error.peer not in self._reconnecting

    def _check_for_stall(self) -> None:
        """Detect that this process was stalled, which excuses the silence of peers."""
        now_s = time.monotonic()
        gap_s, self._last_turn_s = now_s - self._last_turn_s, now_s
        if gap_s > 4 * self._configuration.tick_s:
            self._last_tick_s = now_s
        if gap_s > self._configuration.silent_s / 2:
            self._excused_at_s = now_s

    def _accept(self, event: Event, peer: str) -> bool:
        """Accept an event of a peer; reject the peer if the event violates the protocol."""
        known = self._peers.get(peer)
        if peer in self._rejected or (known is not None and known.is_refused):
            return False
        wrong = self._violation(event, peer)
        if wrong is not None:
            self._reject(peer, wrong)
        return wrong is None

    def _violation(self, event: Event, peer: str) -> str | None:
        kind = type(event).__name__
        if _is_observed(event):
            return f"a worker or node must not send {kind}, which only the coordinator observes"
        known = self._peers.get(peer)
        sender = _sender(event)
        if (known is None) != isinstance(event, _JOINS):
            expected = "Joined or NodeJoined, once, as its first event"
            return f"expected {expected}, got {kind} from {peer}"
        if isinstance(event, NodeJoined) and event.node != peer:
            return f"{peer} must not join as {event.node}"
        if known is not None and known.sender != sender:
            return (
                f"{peer} joined as {_display_name(known.sender)} and must not send events of "
                f"{_display_name(sender)}"
            )
        longest = _longest_text(event)
        if longest > _TEXT_MAX:
            return f"expected texts of at most {_TEXT_MAX} characters, got {longest} in {kind} from {peer}"
        return None

    def _lost_event(self, peer: str, cause: str) -> Lost | NodeLost:
        cause, sender = cause[:_TEXT_MAX], self._peers[peer].sender
        if isinstance(sender, str):
            return NodeLost(now_s=self._now_s(), node=sender, cause=cause)
        return Lost(now_s=self._now_s(), worker=sender, cause=f"{cause} (noticed by the coordinator)")

    def _silence_event(self, peer: str, cause: str) -> Event:
        """Return the event for the policies about a peer that has fallen silent or sends again."""
        now_s, cause, sender = self._now_s(), cause[:_TEXT_MAX], self._peers[peer].sender
        if isinstance(sender, str):
            if cause:
                return NodeSilent(now_s=now_s, node=sender, silent_s=UNREACHABLE_S)
            return NodeResumed(now_s=now_s, node=sender)
        if cause:
            return PeerUnreachable(now_s=now_s, worker=None, peer=sender, cause=cause)
        return PeerReachable(now_s=now_s, worker=None, peer=sender)

    def _reject(self, peer: str, reason: str) -> None:
        """Refuse a peer that broke the protocol; one that takes part in the job counts as lost."""
        reason = reason[:_TEXT_MAX]
        if peer in self._peers.present:
            self._handle(self._lost_event(peer, f"it broke the protocol: {reason}"), peer)
        elif peer not in self._peers:
            self._rejected.add(peer)
            self._queue(peer, encode_actions([RejectPeer(peer=peer, reason=reason)]))
        elif not self._peers[peer].is_refused:
            self._dispatch([RejectPeer(peer=peer, reason=reason)])

    # Processing events -----------------------------------------------------------------------------------

    def _handle(self, event: Event, peer: str, struct: msgspec.Struct | None = None) -> None:
        """Decide on an event, record it with the actions, and queue these.

        Nothing is recorded before all of it is known to be possible: a successor repeats what the journal
        has, and would fail as this coordinator did.

        Args:
            event: what has happened.
            peer: the peer that it concerns; "" where there is none.
            struct: the same event, where it was received (see `DecodedEvent`).

        Raises:
            ValueError: an action is too long to be sent.
        """
        if isinstance(event, Joined):
            event, struct = replace(event, peer=peer), None
        actions = self._decide(event, peer)
        plain = to_plain(event) if struct is None else struct
        plain_actions = [*map(to_plain, actions)]
        encoded = [*map(encode_action, plain_actions)]
        outgoing = self._outgoing(event, peer, actions)
        encoded_news = [encode_action(to_plain(action)) for action in outgoing[len(actions) :]]
        self.journal.append(encode_record(peer, plain, _answers(encoded)))
        self._record(event, actions, plain, plain_actions)
        if outgoing:
            self._dispatch(outgoing, encoded + encoded_news)
        if (
            self.journal.records_since_snapshot * _PEERS_FEW
            >= self._configuration.journal_events_max * max(_PEERS_FEW, len(self._peers))
            or self._log.is_part_due
        ):
            self._compact()

    def _decide(self, event: Event, peer: str) -> list[Action]:
        self._track(event, peer)
        actions = dispatch_event(self._policies, event)
        if not self._has_started:
            # Servers may form their ring before all workers of a job have joined.
            has_workers = any(policy.path != PARAMETER_SERVER_PATH for policy in self._configuration.policies)
            start = PeerList if has_workers else ClusterView
            self._has_started = any(isinstance(action, start) for action in actions)
        return actions

    def _track(self, event: Event, peer: str) -> None:
        match event:
            case Joined():
                self._add_peer(peer, PeerRecord(event.worker, event.addresses))
                self._expected_workers = max(self._expected_workers, event.world)
            case NodeJoined():
                self._add_peer(peer, PeerRecord(event.node, event.addresses))
            case Left() | Failed() | Lost() | NodeLeft() | NodeLost():
                self._mark_gone(peer)
            case PeerUnreachable(worker=None) | NodeSilent():
                self._peers[peer].is_silent = True
            case PeerReachable(worker=None) | NodeResumed():
                self._peers[peer].is_silent = False
        if not _is_observed(event):
            self._peers[peer].recorded += 1

    def _add_peer(self, peer: str, record: PeerRecord) -> None:
        self._peers.add(peer, record)
        self._introduce(peer)

    def _mark_gone(self, peer: str) -> None:
        self._peers.mark_gone(peer)
        self._reconnecting.pop(peer, None)

    # Sending actions -------------------------------------------------------------------------------------

    def _outgoing(self, event: Event, peer: str, actions: list[Action]) -> list[Action]:
        """Return the actions to send after an event: those decided, and the news of a lost worker or node.

        A lost worker receives a RejectPeer, the remaining workers an AnnounceWorkerLost unless the job stops.
        """
        if not isinstance(event, _ENDS):
            return actions
        out = list(actions)
        if isinstance(event, Lost | NodeLost) and not self._peers[peer].is_refused:
            lost = _display_name(self._peers[peer].sender)
            out.append(RejectPeer(peer=peer, reason=f"{lost} was lost: {event.cause}"))
        if isinstance(event, Lost | Failed) and not any(isinstance(action, AbortJob) for action in actions):
            out.append(self._worker_lost(event))
        return out

    def _worker_lost(self, event: Lost | Failed) -> AnnounceWorkerLost:
        cause = (
            event.cause if isinstance(event, Lost) else f"it failed after {event.step} steps: {event.error}"
        )
        senders = (self._peers[peer].sender for peer in self._peers.present)
        others = sorted(sender for sender in senders if isinstance(sender, int))
        reason = f"worker {event.worker} was lost: {cause}; training continues with {_list_workers(others)}"
        return AnnounceWorkerLost(worker=event.worker, reason=reason)

    def _dispatch(self, actions: Sequence[Action], encoded: Sequence[bytes] = ()) -> None:
        """Send each peer the actions that are for it.

        Args:
            actions: in the order in which each peer receives them.
            encoded: the first of them, as they stand in a message; the rest is encoded here.
        """
        for action in actions:
            # Not isinstance, which takes several times as long for a class with an abstract base.
            if type(action) is RejectPeer and action.peer in self._peers:
                self._mark_gone(action.peer)
                self._peers[action.peer].is_refused = True
        encoded = [*encoded, *(encode_action(to_plain(action)) for action in actions[len(encoded) :])]
        numbers: dict[str, list[int]] = {}  # by peer, the indexes of its actions
        for number, action in enumerate(actions):
            for peer in self._peers.recipients(action):
                numbers.setdefault(peer, []).append(number)
        messages: dict[tuple[int, ...], list[ActionMessage]] = {}  # by these indexes: often the same for many
        for peer in sorted(numbers):
            mine = tuple(numbers[peer])
            if mine not in messages:
                messages[mine] = split_actions([encoded[number] for number in mine])
            self._peers[peer].actions.add(messages[mine])
            for message in messages[mine]:
                self._queue(peer, message.payload)

    def _queue(self, peer: str, payload: bytes) -> None:
        """Queue a message for `_send_queued`; queue nothing during a replay."""
        if self._endpoint is not None:
            self._unsent.append((peer, payload))

    def _send_queued(self) -> None:
        """Send the queued messages, after what they follow from is in the journal and in the log.

        The links' thread is woken once for all of them.
        """
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._flush()
            assert self._endpoint is not None
            self._endpoint.call_soon(self._send_all, unsent)

    def _send_all(self, messages: Sequence[tuple[str, bytes]]) -> None:
        for peer, payload in messages:
            self._send(peer, payload)

    def _send(self, peer: str, payload: bytes) -> None:
        assert self._endpoint is not None
        self._endpoint.send(peer, payload)

    # Reconnecting ----------------------------------------------------------------------------------------

    def _reconnect(self, peer: str) -> None:
        """Dial a peer that may be alive and is not connected; the links report it if that fails."""
        assert self._endpoint is not None
        self._reconnecting[peer] = time.monotonic() + RECONNECT_S
        self._introduce(peer)
        worker = self._peers[peer]
        self._queue(peer, encode_sequence_ack(SequenceAck(0, worker.recorded, worker.actions.sent)))

    def _introduce(self, peer: str) -> None:
        """Let the links connect to a peer that has joined; a policy, not the links, judges a silent node."""
        member = self._peers[peer]
        if self._endpoint is not None:
            silent_s = math.inf if isinstance(member.sender, str) else self._configuration.silent_s
            with suppress(ValueError):  # invalid addresses: the peer has to connect by itself
                self._endpoint.add_peer(peer, member.addresses, has_fixed_addresses=True, silent_s=silent_s)

    def _on_sequence_ack(self, peer: str, ack: SequenceAck) -> None:
        """Acknowledge recorded events of a peer; on a new connection also sends the actions that it missed.

        Raises:
            ProtocolError: the peer acknowledges actions that were not sent, or fewer than before.
        """
        worker = self._peers.get(peer)
        if worker is None and ack.received:
            raise ProtocolError(
                f"the coordinator does not know {peer}: the job was begun again, or the coordinator was "
                "started again without its state"
            )
        recorded, actions = (worker.recorded, worker.actions) if worker is not None else (0, UnackedActions())
        actions.on_acked(ack.received)
        before = self._connections.get(peer, 0)
        if ack.connection < before:
            return
        self._connections[peer] = ack.connection
        self._queue(peer, encode_sequence_ack(SequenceAck(ack.connection, recorded, actions.sent)))
        if ack.connection > before:
            for payload in actions:
                self._queue(peer, payload)
        elif self._reconnecting.pop(peer, None) is not None:
            self._last_tick_s = time.monotonic()
            self._inbox.put([_SilenceChange(peer, "")])  # an earlier coordinator may have reported it silent

    def _restore(self) -> None:
        """Replay the journal of an earlier coordinator of this job that was killed, if there was one."""
        snapshot, records = self.journal.read()
        last_s = -math.inf
        if snapshot or records:
            last_s = self._load(snapshot, has_log_ended=_LOG_ENDED in records)
        for record in records:
            if record == _LOG_ENDED:
                continue
            peer, plain, answers = msgspec.msgpack.decode(record, type=tuple[str, dict[str, Any], bytes])
            if self._replay_request(plain):
                continue
            event = cast(Event, from_plain(plain))
            last_s = event.now_s
            actions = self._decide(event, peer)
            plain_actions = [*map(to_plain, actions)]
            encoded = [*map(encode_action, plain_actions)]
            if _answers(encoded) != answers:  # bytes: a NaN is not equal to itself
                before = msgspec.msgpack.decode(answers) if answers else []
                raise OffbeatError(
                    f"the restarted coordinator does not repeat its decisions: for {event} it had returned "
                    f"{before}, and returns {plain_actions} now: start it with the version of offbeat that "
                    "wrote the journal"
                )
            self._record(event, actions, plain, plain_actions)
            self._dispatch(self._outgoing(event, peer, actions), encoded)
        if last_s > -math.inf:
            self._clock_offset_s = last_s - time.monotonic()
        self._flush()

    def _replay_request(self, plain: dict[str, Any]) -> bool:
        """Repeat what a request in the journal has changed; return whether the record is one."""
        return False

    def _compact(self) -> None:
        """Replace the journal by a snapshot of the state, and begin a new part of the log if one is due."""
        self._flush()
        gc.disable()  # the state has no cycles: collections would only go through all of it while it is built
        try:
            if self._log.is_part_due:
                self._log.begin_part([policy.state_dict() for policy in self._policies])
            self.journal.replace_by_snapshot(msgspec.msgpack.encode(self._state()))
        finally:
            gc.enable()

    def _state(self) -> dict[str, Any]:
        """Return the state that a snapshot holds, as plain data."""
        return {
            **self._peers.to_plain(),
            "expected": self._expected_workers,
            "has_started": self._has_started,
            "policies": [policy.state_dict() for policy in self._policies],
            "log": self._log.position,
            "now_s": self._now_s(),
        }

    def _load(self, snapshot: bytes, *, has_log_ended: bool) -> float:
        """Restore a snapshot, and the run log at that time; return the time of the job's clock then."""
        if not snapshot:
            self._log.resume(None if has_log_ended else self._log_start)
            return -math.inf
        state = msgspec.msgpack.decode(snapshot)
        self._load_state(state)
        log = state["log"]
        self._log.resume(None if has_log_ended or log is None else LogPosition(*log))
        now_s: float = state["now_s"]
        return now_s

    def _load_state(self, state: dict[str, Any]) -> None:
        """Restore what `_state` returned, except for the run log and the clock."""
        self._peers.load_plain(state)
        self._expected_workers, self._has_started = state["expected"], state["has_started"]
        for policy, state_dict in zip(self._policies, state["policies"], strict=True):
            policy.load_state_dict(state_dict)

    # The run log -----------------------------------------------------------------------------------------

    def _open_log(self, *, is_continued: bool = False) -> RunLog:
        configuration = self._configuration
        header = {
            "job": configuration.job,
            "policies": [msgspec.to_builtins(spec) for spec in configuration.policies],
            **configuration.log_header,
        }
        return RunLog(
            configuration.log_path,
            header,
            bytes_max=configuration.log_bytes_max,
            on_end=self._end_log,
            is_continued=is_continued,
        )

    def _end_log(self) -> None:
        self.journal.append(_LOG_ENDED)
        self.journal.flush()

    def _record(
        self, event: Event, actions: list[Action], plain: PlainEntry, plain_actions: Sequence[dict[str, Any]]
    ) -> None:
        """Add an event and its actions to the log, which must not get ahead of the journal."""
        if self._log.is_buffer_full:
            self.journal.flush()
        self._log.write_event(plain, plain_actions)
        if self._publisher is not None:
            self._publisher.put(event, actions)

    def _flush(self) -> None:
        self.journal.flush()
        self._log.flush()


def _answers(encoded: Sequence[bytes]) -> bytes:
    """Return the actions that answer an event, as the journal holds them."""
    return join_actions(encoded) if encoded else b""


def _is_observed(event: Event) -> bool:
    """Whether only the coordinator observes such an event, so that no peer may send it."""
    kind = type(event)
    return kind in _OBSERVED or (kind in _REACHABILITY and event.worker is None)  # type: ignore[union-attr]


def _sender(event: Event) -> int | str:
    """Return the worker or the node that has sent an event."""
    sender = event.worker if hasattr(event, "worker") else event.node  # type: ignore[union-attr]
    assert sender is not None  # only events that the coordinator observes have none
    return sender


def _display_name(sender: int | str) -> str:
    return sender if isinstance(sender, str) else f"worker {sender}"


def _list_workers(ids: list[int]) -> str:
    if len(ids) > _NAMED_MAX:
        return f"{len(ids)} workers"
    if len(ids) < 2:
        return f"worker {ids[0]}" if ids else "no worker"
    return f"workers {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


def _longest_text(event: Event) -> int:
    """Return the length of the longest text in an event; reasons may quote them."""
    longest = 0
    for name in _TEXT_FIELDS[type(event)]:
        value = getattr(event, name)
        longest = max(longest, *map(len, value if isinstance(value, tuple) else (value,)), 0)
    return longest


def main(source: TextIO = sys.stdin, answer: TextIO = sys.stdout) -> int:
    """Read the configuration, answers with addresses or an error, and serves, restarted if killed."""
    try:
        coordinator = Coordinator(read_configuration(source, CoordinatorConfiguration))
    except (OffbeatError, ValueError, OSError) as error:
        write_answer(answer, failure_answer(error))
        return 1
    write_answer(answer, {"addresses": coordinator.addresses})
    answer.close()
    return supervise(coordinator.serve, lambda: coordinator.journal.file_sizes_bytes, name="the coordinator")


if __name__ == "__main__":
    sys.exit(main())
