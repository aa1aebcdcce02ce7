"""Messages between the nodes of a parameter server: in order and exactly once, whatever connections break.

Messages to the same node are sent in batches, which also carry acknowledgements. Large arrays are
sent separately, from memory to memory, and a message is delivered when all of its arrays have arrived. When
a connection breaks, everything that may have been lost is sent again.

Everything here runs in the I/O thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from offbeat.errors import ProtocolError
from offbeat.policies.ps.ordered_channel import Packet, ReliableChannel
from offbeat.runtime.ps.packing import Array, Packed, Packer, Unpacker
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.runtime.transport.framing import MAX_MESSAGE_BYTES
from offbeat.runtime.transport.inbox import OnData, OnShared
from offbeat.runtime.transport.sessions import PROCESSING_SLICE_S
from offbeat.runtime.transport.staging import MIN_STAGED_BYTES, SlabSender

_BATCH_BYTES: Final = MAX_MESSAGE_BYTES // 2  # of messages in a batch
_LONG_BATCH_BYTES_MAX: Final = 2**31
_NONE: Final = msgspec.Raw(msgspec.msgpack.encode([]))
_UNACKED_BATCHES_MAX: Final = 64  # send a standalone ACK after this many unacknowledged batches
_UNACKED_BYTES_MAX: Final = 8 * 1024 * 1024
# Send replies at once after so many bytes of arrays: receiving them took as long as the replies need, and the
# peer may be waiting for these.
_PROMPT_REPLY_BYTES: Final = 512 * 1024
# Of arrays announced and not yet written: a batch overtakes the arrays of those before it, and a receiver
# allocates memory for all that is announced, instead of reusing the same memory, which is in its cache.
_ANNOUNCED_BYTES_MAX: Final = 8 * 1024 * 1024
_NEVER_S: Final = float("inf")  # links lose data only with a connection,
_NOW_S: Final = 0.0  # so no resend depends on time


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Batch(msgspec.Struct, array_like=True):
    """A control message between two nodes: a batch of messages with an acknowledgement.

    Attributes:
        connection: counts the broken connections between the two nodes, as far as the sender knows.
        received: how many of the receiver's batches have arrived in order.
        number: of this batch among the sender's; -1 without messages.
        tag: of the first array that is sent separately; those of the others follow.
        long_bytes: the length of the messages if they are sent separately too, as the first array; else 0.
        messages: as `Packer` packs them.
    """

    connection: _Count
    received: _Count
    number: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
    tag: _Count
    long_bytes: _Count
    messages: msgspec.Raw


_decoder: Final = msgspec.msgpack.Decoder(_Batch)


@dataclass(slots=True, eq=False)
class _IncomingBatch:
    """A received batch, parts of which may be missing."""

    number: int
    messages: list[Any]
    missing_bytes: int = 0
    size_bytes: int = 0  # of its separate arrays


@dataclass(slots=True, eq=False)
class _PeerState:
    """The state kept for one peer."""

    channel: ReliableChannel = field(
        default_factory=lambda: ReliableChannel(resend_s=_NEVER_S, resend_max_s=_NEVER_S)
    )
    outgoing: deque[Any] = field(default_factory=deque)  # messages that are in no batch yet
    announced: dict[int, int] = field(default_factory=dict)  # bytes of arrays to be written, by tag
    announced_bytes: int = 0
    incoming: deque[_IncomingBatch] = field(default_factory=deque)
    due: deque[Any] = field(default_factory=deque)  # messages to be delivered
    is_deferred: bool = False
    connection: int = 0
    unacked: int = 0
    unacked_bytes: int = 0


PlaceArray = Callable[[str, Any, Array], Array | None]
ShareArray = Callable[[str, Any, Array, Array], bool]


class Messenger:
    """The messages between a node and its peers.

    Args:
        endpoint: the node's links.
        kinds: of the messages that are accepted.
        on_message: (node, message), in the order in which that node sent them; may raise ProtocolError.
        place: (node, message, array): replaces an array of the message that is to be received by one of the
            same shape and type, and returns that; None to leave it.
        gather: called right before queued messages are written; may send more.
        share: (node, message, array, shared): replaces the array to be received by one in the sender's
            memory, which may be read until the message has been delivered; returns whether it does, otherwise
            the data are copied.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        kinds: Collection[type],
        on_message: Callable[[str, Any], None],
        place: PlaceArray,
        gather: Callable[[], None],
        share: ShareArray,
    ) -> None:
        self._endpoint, self._on_message = endpoint, on_message
        self._place, self._gather, self._share = place, gather, share
        self._packer, self._unpacker = Packer(), Unpacker(kinds)
        self._encoder = msgspec.msgpack.Encoder()
        self._peers: dict[str, _PeerState] = {}
        self._to_write: list[str] = []
        self._is_about_to_write = False
        self._staging = SlabSender(endpoint)
        self._tag = 0
        self._delivery_limit_s = PROCESSING_SLICE_S

    def send(self, to: str, message: Any) -> None:
        """Queue a message; it is sent in a batch when the I/O thread has nothing else to do."""
        state = self._peer_state(to)
        if not state.outgoing:
            self._write_soon(to)
        state.outgoing.append(message)

    def write_soon(self) -> None:
        """Gather and write as soon as no received data are waiting."""
        if not self._is_about_to_write:
            self._is_about_to_write = True
            self._endpoint.call_when_idle(self._write_all)

    def on_message(self, peer: str, payload: bytes) -> None:
        """Process a control message of a peer other than the coordinator.

        Raises:
            ProtocolError: no node of this version sends such a message.
        """
        try:
            batch = _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError(
                f"expected a message batch from a node of a parameter server: {error}"
            ) from None
        state = self._peer_state(peer)
        state.channel.acknowledge(batch.received, _NOW_S)
        if batch.connection > state.connection:
            state.connection = batch.connection
            state.incoming.clear()
            self._write(peer, state, state.channel.on_reconnected(_NOW_S))
        if batch.number < 0:
            return
        if batch.long_bytes:
            self._expect_messages(peer, state, batch)
            return
        messages, arrays = self._unpacker.unpack(batch.messages)
        incoming = _IncomingBatch(batch.number, messages)
        state.incoming.append(incoming)
        if arrays:
            if len(arrays) == 1 and (placed := self._place(peer, messages[-1], arrays[0])) is not None:
                arrays = [placed]
            self._expect_arrays(peer, state, incoming, arrays, batch.tag)
        else:
            self._deliver(peer, state)

    def on_lost(self, peer: str) -> None:
        """Forget incomplete batches of a broken connection; they will be received again."""
        self._staging.on_peer_lost(peer)
        state = self._peers.get(peer)
        if state is not None:
            state.incoming.clear()
            state.announced.clear()
            state.announced_bytes = 0

    def on_reconnected(self, peer: str) -> None:
        """Send again, on a new connection, all batches that may have been lost; the peer does the same."""
        state = self._peer_state(peer)
        state.connection += 1
        self._write(peer, state, state.channel.on_reconnected(_NOW_S))

    def on_peer_gone(self, peer: str) -> None:
        """Drop everything that is kept for a peer that is gone."""
        self._peers.pop(peer, None)
        self._staging.on_peer_lost(peer)

    # Sending ---------------------------------------------------------------------------------------------

    def _peer_state(self, peer: str) -> _PeerState:
        state = self._peers.get(peer)
        if state is None:
            state = self._peers[peer] = _PeerState()
        return state

    def _write_soon(self, peer: str) -> None:
        self._to_write.append(peer)
        self.write_soon()

    def _write_all(self) -> None:
        self._gather()
        self._is_about_to_write = False
        peers, self._to_write = self._to_write, []
        for peer in peers:
            state = self._peers.get(peer)
            if state is None:
                continue
            if state.outgoing and state.announced_bytes < _ANNOUNCED_BYTES_MAX:
                for lot in self._packer.pack(_drained(state.outgoing)):
                    self._write(peer, state, state.channel.send([lot], _NOW_S))
                    if state.announced_bytes >= _ANNOUNCED_BYTES_MAX:
                        break
            elif state.unacked:
                self._write(peer, state, [])

    def _write(self, peer: str, state: _PeerState, packets: list[Packet]) -> None:
        """Send batches; without any, a standalone acknowledgement."""
        state.unacked = state.unacked_bytes = 0
        if not packets:
            batch = _Batch(state.connection, state.channel.received_count, -1, 0, 0, _NONE)
            self._endpoint.send(peer, self._encoder.encode(batch))
        for packet in packets:
            packed: Packed = packet.message
            arrays: list[Array | bytes] = list(packed.attachments)
            batch = _Batch(state.connection, packet.ack, packet.number, self._tag, 0, packed.messages)
            long_bytes = len(memoryview(packed.messages))
            if long_bytes > _BATCH_BYTES:
                batch.long_bytes, batch.messages = long_bytes, _NONE
                arrays.insert(0, bytes(packed.messages))
            self._tag += len(arrays)
            self._endpoint.send(peer, self._encoder.encode(batch))
            for tag, array in enumerate(arrays, batch.tag):
                self._put(peer, state, tag, memoryview(array).cast("B"))  # type: ignore[arg-type]

    def _put(self, peer: str, state: _PeerState, tag: int, data: memoryview) -> None:
        state.announced[tag] = len(data)
        state.announced_bytes += len(data)
        done = partial(self._on_written, peer, state, tag)
        is_shared = len(data) >= MIN_STAGED_BYTES and self._endpoint.shares_memory(peer)
        if is_shared and not self._endpoint.is_exported(data):
            self._staging.send_tensor(peer, tag, data, done)
        else:
            self._endpoint.send_tensor(peer, tag, data, on_done=done, uses_long_frames=True)

    def _on_written(self, peer: str, state: _PeerState, tag: int) -> None:
        """Count an array that has been written."""
        state.announced_bytes -= state.announced.pop(tag, 0)
        if state.outgoing and state.announced_bytes < _ANNOUNCED_BYTES_MAX:
            self._write_soon(peer)

    # Receiving -------------------------------------------------------------------------------------------

    def _expect_messages(self, peer: str, state: _PeerState, batch: _Batch) -> None:
        """Receive messages that are too long for a control message."""
        if not 0 < batch.long_bytes <= _LONG_BATCH_BYTES_MAX:
            raise ProtocolError(
                f"expected messages of 1 to {_LONG_BATCH_BYTES_MAX} bytes, got {batch.long_bytes}"
            )
        incoming = _IncomingBatch(batch.number, [], batch.long_bytes, batch.long_bytes)
        messages = np.empty(batch.long_bytes, np.uint8).data  # uses no memory before it is written

        def on_data(_: int, length: int) -> None:
            incoming.missing_bytes -= length
            if not incoming.missing_bytes:
                incoming.messages, arrays = self._unpacker.unpack(messages)
                self._expect_arrays(peer, state, incoming, arrays, batch.tag + 1)
                self._deliver(peer, state)

        state.incoming.append(incoming)
        self._expect(peer, batch.tag, messages, on_data)

    def _expect_arrays(
        self, peer: str, state: _PeerState, incoming: _IncomingBatch, arrays: list[Array], tag: int
    ) -> None:
        def on_data(_: int, length: int) -> None:
            incoming.missing_bytes -= length
            if not incoming.missing_bytes:
                self._deliver(peer, state)

        for array in arrays:
            incoming.missing_bytes += array.nbytes
            incoming.size_bytes += array.nbytes
        shared = partial(self._on_shared, peer, state, incoming, arrays[0]) if len(arrays) == 1 else None
        for array_tag, array in enumerate(arrays, tag):
            self._expect(peer, array_tag, memoryview(array), on_data, shared)  # type: ignore[arg-type]

    def _on_shared(
        self,
        peer: str,
        state: _PeerState,
        incoming: _IncomingBatch,
        array: Array,
        offset: int,
        source: memoryview,
    ) -> None:
        """Receive the only array of a batch, or a part of it, from the sender's memory, readable for now."""
        incoming.missing_bytes -= len(source)
        is_first = bool(state.incoming) and state.incoming[0] is incoming
        is_next = is_first and not state.due and len(source) == array.nbytes  # so it is delivered right here
        if is_next:
            view = np.frombuffer(source, array.dtype).reshape(array.shape)
            view.flags.writeable = False
        if not (is_next and self._share(peer, incoming.messages[-1], array, view)):
            memoryview(array).cast("B")[offset : offset + len(source)] = source  # type: ignore[arg-type]
        if not incoming.missing_bytes:
            self._deliver(peer, state, at_once=is_next)

    def _expect(
        self, peer: str, tag: int, into: memoryview, on_data: OnData, shared: OnShared | None = None
    ) -> None:
        try:
            self._endpoint.post_receive(peer, tag, into, on_data, shared)
        except ValueError as error:  # the tag was chosen by the peer
            raise ProtocolError(str(error)) from None

    def _deliver(self, peer: str, state: _PeerState, *, at_once: bool = False) -> None:
        """Deliver complete batches in order; a message that is rejected does not stop those after it.

        If that takes long, the rest is deferred until the replies to the first messages have been written, so
        that the peer has work meanwhile; but not if `at_once`.
        """
        while state.incoming and not state.incoming[0].missing_bytes:
            incoming = state.incoming.popleft()
            for messages in state.channel.accept(incoming.number, incoming.messages):
                state.due.extend(messages)
            state.unacked += 1
            state.unacked_bytes += incoming.size_bytes
        rejection: ProtocolError | None = None
        limit_s = monotonic() + self._delivery_limit_s
        while state.due and self._peers.get(peer) is state:
            try:
                self._on_message(peer, state.due.popleft())
            except ProtocolError as error:
                rejection = rejection or error
            if state.due and not at_once and monotonic() >= limit_s:
                self._defer(peer, state)
                break
        if state.unacked >= _UNACKED_BATCHES_MAX or state.unacked_bytes >= _UNACKED_BYTES_MAX:
            self._write_soon(peer)
        if state.unacked_bytes >= _PROMPT_REPLY_BYTES and state.outgoing:
            self._write_all()
        if rejection is not None:
            raise rejection

    def _defer(self, peer: str, state: _PeerState) -> None:
        """Write what is queued, then deliver the rest."""
        self._write_all()
        if not state.is_deferred:
            state.is_deferred = True
            self._endpoint.call_soon(self._resume, peer, state)

    def _resume(self, peer: str, state: _PeerState) -> None:
        state.is_deferred = False
        try:
            self._deliver(peer, state)
        except ProtocolError as error:
            self._endpoint.fail_peer(peer, error)


def _drained(messages: deque[Any]) -> Iterator[Any]:
    """Yield messages, removing each from the queue first."""
    while messages:
        yield messages.popleft()
