"""Transport of one node: one session per peer, one I/O thread, one send order across all peers.

Control messages and tensor bytes are addressed to peers by name. A connection is opened on first use, by
whichever side needs it.

Theory of operation
-------------------

Parts: an `Endpoint` owns an `IoLoop` (thread, epoll, timers), a `ConnectionOpener` (listening, dialling,
handshake) and one `RemoteNode` per peer (inbox, outbox, session, current `Connection`). All state belongs to
the I/O thread. Public methods queue their work for it; called from that thread (from inside a callback) they
do it at once, which costs no lock and no system call.

Send scheduler: every message has a key (0 for control or 1 for tensor bytes, priority, order of arrival); the
lowest goes first. A peer's `Outbox` sorts its messages by key and cuts them into frames. `_schedule` enters
the peer in the node's heap under its most urgent key, unless its socket is full. `_pump`, called in
each iteration of the loop, pops the most urgent peer, writes about one frame, and schedules the peer again.
So a message overtakes all bytes that the kernel has not accepted, whichever peer they are for. One heap entry
per peer is valid, the one whose key is its `scheduled_key`; others are skipped. A frame that the kernel
accepted in part is finished first; a peer whose socket is full is not scheduled until it is writable.

Receiving: `FrameReader` names the buffers to receive into, so that the bytes of an expected tensor message
land in their destination without a copy. `_process_frames` handles all complete frames, and sends in between
if that takes long. Bytes that nothing expects yet are kept up to a limit, then reading from the peer pauses.

Sessions outlive TCP connections: a pause of the network is not a death.

- A connection that breaks is opened again at once, and the session goes on without loss or repetition
  (see `offbeat.runtime.transport.dialing` and `Outbox`).
- A connection on which nothing was received for REDIAL_S is replaced: the kernel retransmits ever more
  rarely, and would notice late that the network works again.
- A peer from which nothing was received for `unreachable_s` is reported as unreachable. That changes nothing
  here.
- A peer is lost if all its addresses refuse connections, since then its process has ended; if another
  process, or one that has dropped the session, answers at its address; if it breaks the protocol; or if
  nothing was received from it for `silent_s`, counted in ticks of this node over all connections.
- A Unix socket joins two processes on one host and no network can break it: where one breaks, the peer at
  its other end is lost.

Shared memory: between nodes on one host, bytes in memory of `Endpoint.allocate` are not sent. A REGION frame
passes the region's descriptor, SHARED frames say where the bytes lie, and SHARED_ACK acknowledges that they
have been read.

This module never imports torch or numpy, never copies tensor bytes that are expected when they arrive, never
unpickles, and never waits for a peer without a deadline.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from itertools import count
from time import monotonic
from typing import Any

from offbeat.errors import LinkError, LinkFailure, OffbeatError, ProtocolError, describe_os_error
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.transport import addresses as places
from offbeat.runtime.transport.connections import (
    TCP_FRAME_BYTES,
    Connection,
    LinkSession,
    RemoteNode,
    delay_wakeups,
    enable_shared_memory,
    receive_available,
    set_frame_size,
    set_wakeup_bytes,
)
from offbeat.runtime.transport.descriptors import is_out_of_descriptors
from offbeat.runtime.transport.dialing import ConnectionOpener
from offbeat.runtime.transport.framing import MAX_MESSAGE_BYTES, NUMBERED, Frame, FrameKind, shared_slice
from offbeat.runtime.transport.handshake import check_node_name
from offbeat.runtime.transport.inbox import (
    MAX_EARLY_BYTES,
    MAX_FORGOTTEN_RANGES,
    Inbox,
    IntervalSet,
    OnData,
    OnShared,
)
from offbeat.runtime.transport.io_loop import EPOLL_READ, EPOLL_WRITE, IoLoop
from offbeat.runtime.transport.outbox import Outbox, QueuedMessage, SendKey
from offbeat.runtime.transport.shared_memory import (
    MAX_UNACKED_BYTES,
    MIN_SHARED_BYTES,
    UNACKED_BYTES,
    Region,
    RegionAllocator,
)

ALL_TAGS = 1 << 64
WRITES_PER_TURN = 16  # then sockets are polled again
PROCESSING_SLICE_S = 300e-6  # of processing received frames, after which what they caused is sent
REDIAL_S = 2.0
UNREACHABLE_S = 1.25
# Received frames are acknowledged after so many bytes or frames, and at the end of every tensor message, for
# which a sender may wait; the rest with the next tick.
ACK_BYTES = 4 * 1024 * 1024
ACK_FRAMES = 64
IO_THREAD_TIMEOUT_S = 10.0  # how long a caller waits for an I/O thread that is busy

_DATA, _MESSAGE, _BEAT, _BYE = (
    int(FrameKind.DATA),
    int(FrameKind.MESSAGE),
    int(FrameKind.HEARTBEAT),
    int(FrameKind.BYE),
)
_REGION, _SHARED, _TAKEN, _WITHDRAW = (
    int(kind) for kind in (FrameKind.REGION, FrameKind.SHARED, FrameKind.SHARED_ACK, FrameKind.WITHDRAW)
)
_ACK, _SKIP = int(FrameKind.ACK), int(FrameKind.SKIP)
_EMPTY = memoryview(bytearray())
_log = logging.getLogger("offbeat.links")


class Endpoint:
    """All connections of one node.

    Callbacks run in the I/O thread, one at a time, with no lock held. They may call every method but `flush`,
    and must not block. A ProtocolError raised by a callback means that the peer sent something impossible:
    the peer is lost. Any other exception ends the endpoint: it is passed to `on_error`, or else leaves the
    thread, and every later call raises LinkError.

    Args:
        name: by which the peers know this node; unique in the job.
        job: its id; only nodes of one job connect to each other.
        token: the job's shared secret; it is never sent.
        on_message: (peer, payload) of a control message.
        on_lost: a peer died, was refused, fell silent or cannot be reached; not called for an orderly leave.
        on_unreachable: (peer, cause): nothing was received from a peer for `unreachable_s`, on a connection
            or while one was being opened.
        on_reachable: something was received again from a peer that was reported as unreachable.
        on_left: a peer has closed its session in order; it sends nothing more. What it sent before is still
            delivered.
        on_refused: one line about a connection that was refused; by default it is logged as a warning.
        on_error: an exception that ended the I/O thread.
        host: the address to listen on with TCP, and to advertise; None for no TCP.
        port: to listen on; 0 for any free one.
        unix: also listen on a Unix socket, for peers on this host (Linux).
        listeners: sockets that listen already, with their addresses, in place of `host`, `port` and `unix`.
        heartbeat_s: at least one frame is sent in every such interval, a heartbeat if there is nothing else.
        silent_s: a peer from which nothing was received for so long is lost.
        unreachable_s: a peer from which nothing was received for so long is reported as unreachable.
        connect_s: how long reaching a peer for the first time may take, retries and handshake included.
        busy_polls: see `IoLoop`.
        unacked_bytes: how many bytes of shared memory may be announced to a peer before it has read them, at
            most 8 MiB.

    Attributes:
        addresses: where this node can be reached, best first; not valid after `close`.
        bytes_sent, bytes_received: over all connections since the start, headers included; bytes read from
            shared memory are not counted.
        frames_received: control messages and pieces of tensors since the start.

    Raises:
        ValueError: an argument is out of range.
        OffbeatError: it is impossible to listen there, or to open a descriptor; the text gives the cause.
    """

    def __init__(
        self,
        name: str,
        *,
        job: str,
        token: str,
        on_message: Callable[[str, bytes], None],
        on_lost: Callable[[LinkError], None],
        on_left: Callable[[str], None] | None = None,
        on_unreachable: Callable[[str, str], None] = lambda peer, cause: None,
        on_reachable: Callable[[str], None] = lambda peer: None,
        on_refused: Callable[[str], None] = _log.warning,
        on_error: Callable[[BaseException], None] | None = None,
        host: str | None = "127.0.0.1",
        port: int = 0,
        unix: bool = True,
        listeners: Sequence[tuple[socket.socket, str]] | None = None,
        heartbeat_s: float = 0.25,
        silent_s: float = 10.0,
        unreachable_s: float = UNREACHABLE_S,
        connect_s: float = 10.0,
        busy_polls: bool = False,
        unacked_bytes: int = UNACKED_BYTES,
    ) -> None:
        if not token:
            raise ValueError("expected a non-empty token, got an empty string")
        if not 0 < 2 * heartbeat_s < silent_s:
            raise ValueError(
                "expected heartbeat_s > 0 and silent_s > 2 heartbeat_s, "
                f"got {heartbeat_s:g} s and {silent_s:g} s"
            )
        if connect_s <= 0:
            raise ValueError(f"expected connect_s > 0, got {connect_s:g} s")
        if not 0 < unacked_bytes <= MAX_UNACKED_BYTES:
            raise ValueError(f"expected unacked_bytes from 1 to {MAX_UNACKED_BYTES}, got {unacked_bytes}")
        self.name = check_node_name(name)
        self.bytes_sent = self.bytes_received = self.frames_received = 0
        self._on_message, self._on_lost, self._on_left, self._on_error = (
            on_message,
            on_lost,
            on_left,
            on_error,
        )
        self._on_unreachable, self._on_reachable = on_unreachable, on_reachable
        self._beat_s, self._silent_s, self._unread_bytes = heartbeat_s, silent_s, unacked_bytes
        self._unreachable_s = unreachable_s
        self._peers: dict[str, RemoteNode] = {}
        self._forgotten = IntervalSet()
        self._sequence = count()
        self._send_heap: list[tuple[SendKey, int, RemoteNode]] = []
        self._flush_flags: list[SignalSafeEvent] = []
        self._closing = False
        self._failure: BaseException | None = None
        with _named_errors(name):
            self._loop = IoLoop(
                f"links of {name}", on_iteration=self._pump, on_end=self._on_loop_end, busy_polls=busy_polls
            )
        self._regions = RegionAllocator(partial(self._loop.call, self._on_region_released))
        self._has_neighbours = False
        self._opening = ConnectionOpener(
            self._loop,
            name,
            job=check_node_name(job),
            token=token,
            connect_s=connect_s,
            get_addresses=lambda: self.addresses,
            get_peer=self._peer,
            on_opened=self._on_open,
            on_detached=self._detach,
            on_replaced=self._on_replaced,
            on_failed=self._on_failed,
            on_refused=on_refused,
        )
        self.addresses = self._listen(host, port, unix, listeners)
        self._loop.call_later(heartbeat_s, self._tick)
        self._loop.start()
        _close_in_children(self)

    def add_peer(
        self,
        peer: str,
        addresses: Sequence[str],
        *,
        has_fixed_addresses: bool = False,
        silent_s: float | None = None,
    ) -> None:
        """Set a peer's addresses, best first; a peer that was lost may be connected to again.

        Args:
            peer: its name.
            addresses: where it listens.
            has_fixed_addresses: it listens there for as long as it runs, so that it is lost at once where
                all its addresses refuse a connection; else it may still begin to listen within `connect_s`.
            silent_s: this peer is lost after so many seconds without a byte from it, and reaching it for the
                first time may take as long; None for the endpoint's `silent_s`.

        Raises:
            ValueError: an address or the name is malformed.
        """
        parsed = tuple(places.parse_address(address) for address in addresses)
        if any(address.socket_name and not address.unusable_reason() for address in parsed):
            self._has_neighbours = True
        self._run_in_loop(self._add_peer, self._checked_peer(peer), parsed, has_fixed_addresses, silent_s)

    def connect(self, peer: str) -> None:
        """Connect to a peer that was lost and has been introduced again.

        `on_reachable` is called when something is received from it.
        """
        self._run_in_loop(self._connect, self._checked_peer(peer))

    def allocate(self, size_bytes: int) -> memoryview:
        """Return zeroed memory that peers on this host can read in place.

        It exists as long as a view of it. Where no peer is known to be on this host, or no shared memory can
        be had, it is ordinary memory.
        """
        shared = self._regions.allocate(size_bytes) if self._has_neighbours else None
        return memoryview(bytearray(size_bytes)) if shared is None else shared

    def shares_memory(self, peer: str) -> bool:
        """Whether a peer reads memory of `allocate` in place; to be called in the I/O thread."""
        known = self._peers.get(peer)
        return known is not None and known.link is not None and known.link.imported is not None

    def is_exported(self, memory: memoryview) -> bool:
        """Whether this is memory of `allocate` that peers on this host can read in place."""
        return self._regions.find(_as_bytes(memory)) is not None

    def has_readers(self, memory: memoryview) -> bool:
        """Whether a peer may still read this memory, or what is allocated together with it.

        It may as long as a `send_tensor` of it is not done, even if that was cancelled since; and without a
        limit if the peer was lost before. Such memory must not be written again: use other memory in its
        place.
        """
        found = self._regions.find(_as_bytes(memory))
        return found is not None and found[0].unacked_frames > 0

    def send(self, peer: str, message: bytes) -> None:
        """Queue a control message; it goes before all tensor bytes, after the control messages before it.

        A message to a peer that was lost or left is dropped. A peer whose address is not known yet has
        `connect_s` to be introduced or to connect.

        Raises:
            ValueError: the message is longer than 1 MiB.
            LinkError: the endpoint has failed.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"expected a message of at most {MAX_MESSAGE_BYTES} bytes, got {len(message)}")
        key = (0, 0, next(self._sequence))
        self._run_in_loop(
            self._enqueue, self._checked_peer(peer), QueuedMessage(_MESSAGE, key, memoryview(message))
        )

    def send_tensor(
        self,
        peer: str,
        tag: int,
        data: memoryview,
        *,
        offset: int = 0,
        total: int | None = None,
        priority: int = 0,
        on_done: Callable[[], None] | None = None,
        uses_long_frames: bool = False,
    ) -> None:
        """Queue bytes [offset, offset + len(data)) of tensor message `tag`, which has `total` bytes in all.

        Nothing is copied: the bytes must not change until `on_done` is called, in the I/O thread, when the
        kernel has accepted them; or until they are dropped because the peer is lost or leaves, or by `cancel`
        or `close`, after which `on_done` is not called. A peer on this host reads memory of `allocate` in
        place: then `on_done` means that it has read it, and dropped bytes must not change as long as they are
        being read (`has_readers`).

        Args:
            peer: the receiver.
            tag: identifies the message; never used again between two nodes.
            data: C-contiguous.
            offset: where the bytes belong in the message.
            total: length of the message in bytes; by default it ends with `data`.
            priority: a lower number goes first, whichever peer it is for.
            on_done: called when the bytes may be changed.
            uses_long_frames: announce up to 4 MiB at once, instead of 1, to a peer that reads the bytes in
                place.

        Raises:
            ValueError: the bytes do not lie within the message, or are not contiguous.
            LinkError: the endpoint has failed.
        """
        view = _as_bytes(data)
        end = offset + len(view)
        if total is None:
            total = end
        if not (0 <= tag < ALL_TAGS and offset >= 0 and end <= total < 1 << 64):
            raise ValueError(
                f"expected bytes within a message and a tag of 64 bits, got bytes {offset} to {end} "
                f"of {total} and tag {tag:#x}"
            )
        lent = self._regions.find(view) if len(view) >= MIN_SHARED_BYTES else None
        key = (1, priority, next(self._sequence))
        item = QueuedMessage(
            _DATA,
            key,
            view,
            tag=tag,
            offset=offset,
            total=total,
            on_done=on_done,
            exported=lent,
            uses_long_frames=uses_long_frames,
        )
        if total and not len(view):
            if on_done is not None:
                self._run_in_loop(on_done)
            return
        self._run_in_loop(self._enqueue, self._checked_peer(peer), item)

    def post_receive(
        self, peer: str, tag: int, into: memoryview, on_data: OnData, on_shared: OnShared | None = None
    ) -> None:
        """Receive the bytes of message `tag` from `peer` directly into `into`, which is as long as the
        message.

        `on_data(offset, length)` is called for each piece, in order of arrival; every byte arrives once. Data
        that arrived early is delivered at once. Early data is kept up to 256 MiB a peer; beyond that nothing
        is read from that peer, control messages included, until something is expected or forgotten.

        With `on_shared(offset, source)`, that is called in place of `on_data` for bytes that lie in the
        memory of a peer on this host. It has to copy what it needs of them into `into` before it returns;
        `source` must not be written, nor read later.

        Raises:
            ValueError: `into` is read-only or not contiguous.
            LinkError: the endpoint has failed.
        """
        view = _as_bytes(into)
        if view.readonly and len(view):
            raise ValueError("expected a writable buffer to receive into, got a read-only one")
        self._run_in_loop(self._expect, self._checked_peer(peer), tag, view, on_data, on_shared)

    def cancel(self, first: int, last: int) -> None:
        """Cancel every message with first <= tag < last, of all peers, permanently.

        Queued messages, posted receives and early data are dropped, and so is what arrives later. After the
        return their buffers are neither read nor written, except memory that a peer on this host reads
        (`has_readers`), and their callbacks are not called (the call waits for one that is running: do not
        hold a lock that it acquires). Tags are remembered as ranges, so cancel adjacent runs where possible:
        of more than 65536 separate ranges the lowest is no longer remembered.

        Raises:
            LinkError: the I/O thread was busy with a callback for 10 s.
        """
        if self._loop.is_loop_thread or not self._loop.is_alive:
            self._cancel(first, last)
            return
        finished = SignalSafeEvent()
        self._run_in_loop(self._cancel, first, last)
        self._run_in_loop(finished.set)
        deadline_s = monotonic() + IO_THREAD_TIMEOUT_S
        while not finished.wait(0.1) and self._loop.is_alive:
            if monotonic() > deadline_s:
                raise LinkError(
                    self.name,
                    f"{self.name}: a callback has blocked the I/O thread for {IO_THREAD_TIMEOUT_S:g} s",
                )

    def fail_peer(self, peer: str, error: ProtocolError) -> None:
        """Drop a peer that broke the protocol, as if a callback had raised `error`; in the I/O thread."""
        accused = self._peer(peer)
        if accused.link is not None:
            self._lose_for_protocol_error(accused, error)

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function in the I/O thread soon, after the calls that were queued before."""
        self._loop.call(function, *args)

    def call_when_idle(self, function: Callable[[], None]) -> None:
        """Run a function when no socket is ready, or some iterations later; call it in the I/O thread."""
        self._loop.call_when_idle(function)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run a function in the I/O thread after `delay_s`."""
        self._loop.call(self._loop.call_later, delay_s, function)

    @property
    def is_io_thread(self) -> bool:
        """Whether the caller runs the I/O thread's work, as callbacks do."""
        return self._loop.is_loop_thread

    def run_until(self, wait: Callable[[float], bool], is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Run the I/O thread's work until `is_over`, in place of waiting for it; see `IoLoop.run_until`.

        Meanwhile callbacks run in the calling thread.
        """
        return self._loop.run_until(wait, is_over, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the kernel has accepted everything that was queued; return whether it did in time."""
        if self._loop.is_loop_thread:
            raise RuntimeError("flush waits for the I/O thread and cannot be called from within it")
        sent = SignalSafeEvent()
        self._loop.call(self._flush_flags.append, sent)
        return self._loop.is_alive and sent.wait(timeout_s) and self._failure is None

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the queued control messages, announce the close to every peer and stop; drop tensor bytes.

        May be called more than once; from within a callback it returns at once and closes soon after.
        """
        self._loop.call(self._close, timeout_s)
        if not self._loop.is_loop_thread:
            self._loop.join(timeout_s + 1.0)

    # Calls into the I/O thread

    def _run_in_loop(self, function: Callable[..., object], *args: Any) -> None:
        if self._loop.is_loop_thread:
            function(*args)
            return
        if self._failure is not None:
            raise LinkError(
                self.name, f"the links of {self.name} have failed: {self._failure!r}"
            ) from self._failure
        self._loop.call(function, *args)

    def _checked_peer(self, peer: str) -> str:
        if peer == self.name:
            raise ValueError(f"expected the name of another node, got this node's own, {peer}")
        return check_node_name(peer) if peer not in self._peers else peer

    def _peer(self, name: str) -> RemoteNode:
        peer = self._peers.get(name)
        if peer is None:
            outbox = Outbox(TCP_FRAME_BYTES, self._unread_bytes)
            peer = self._peers[name] = RemoteNode(name, Inbox(self._forgotten), outbox)
        return peer

    def _connect(self, name: str) -> None:
        peer = self._peer(name)
        if not self._closing:
            peer.is_unreachable = True
            if peer.link is None:
                self._opening.dial(peer)

    def _add_peer(
        self, name: str, addresses: tuple[places.Address, ...], lasting: bool, silent_s: float | None
    ) -> None:
        peer = self._peer(name)
        peer.addresses, peer.has_fixed_addresses, peer.silent_s = addresses, lasting, silent_s
        peer.is_gone = False
        self._opening.on_addresses_known(peer)

    def _enqueue(self, name: str, item: QueuedMessage) -> None:
        """Queue a message, in the links' thread; dial the peer where needed. Drop it if none takes it."""
        peer = self._peer(name)
        if (
            peer.is_gone
            or self._closing
            or self._forgotten.overlaps(item.tag, item.tag + (item.kind == _DATA))
        ):
            return
        peer.outbox.add(item)
        if peer.link is not None:
            self._share_if_possible(peer, peer.link, item)
            self._schedule(peer)
        else:
            self._opening.dial(peer)

    def _expect(
        self, name: str, tag: int, into: memoryview, on_data: OnData, on_shared: OnShared | None
    ) -> None:
        peer = self._peer(name)
        if self._closing:
            return
        try:
            peer.inbox.post(tag, into, on_data, on_shared)
        except ProtocolError as error:
            self._lose_for_protocol_error(peer, error)
        else:
            self._resume_reading(peer)

    def _cancel(self, first: int, last: int) -> None:
        self._forgotten.add(first, last)
        if len(self._forgotten) > MAX_FORGOTTEN_RANGES:
            self._forgotten.drop_lowest()
        for peer in self._peers.values():
            peer.inbox.drop(first, last)
            peer.outbox.drop(first, last)
            if peer.link is not None:
                peer.link.reader.discard_tags(first, last)
                self._resume_reading(peer)

    # Sending

    def _schedule(self, peer: RemoteNode) -> None:
        """Enter the peer in the send heap under its most urgent key, unless its socket is full."""
        link, key = peer.link, peer.outbox.next_key
        if (
            link is not None
            and not link.is_full
            and key is not None
            and (peer.scheduled_key is None or key < peer.scheduled_key)
        ):
            peer.scheduled_key = key
            heappush(self._send_heap, (key, next(self._sequence), peer))

    def _pump(self) -> bool:
        """Send the most urgent frames of the node; return whether more could be sent at once."""
        send_heap = self._send_heap
        writes = 0
        while send_heap:
            if writes == WRITES_PER_TURN:
                return True
            key, _, peer = heappop(send_heap)
            if peer.scheduled_key is key:  # else a more urgent message came later, and that entry was used
                peer.scheduled_key = None
                if peer.link is not None and not peer.link.is_full:
                    writes += 1
                    self._write(peer, peer.link)
        if self._flush_flags and not any(peer.outbox for peer in self._peers.values()):
            for sent in self._flush_flags:
                sent.set()
            self._flush_flags.clear()
        if self._closing and not any(peer.link or peer.dial for peer in self._peers.values()):
            self._loop.stop()
        return False

    def _write(self, peer: RemoteNode, link: Connection) -> None:
        outbox = peer.outbox
        views, size = outbox.gather()
        if not size:
            return
        assert link.sock is not None
        try:
            if outbox.descriptor is None:
                n = link.sock.sendmsg(views)
            else:
                n = socket.send_fds(link.sock, views, [outbox.descriptor])
        except BlockingIOError:
            n = 0
        except OSError as error:
            outbox.on_written(0)
            self._write_failed(peer, link, error)
            return
        finished = outbox.on_written(n)
        self.bytes_sent += n
        link.has_sent = True
        if n < size:
            link.is_full = True
            self._watch(peer, link)
        elif outbox.next_key is None:  # nothing is left, or the rest waits until the peer has read
            self._watch(peer, link)
        else:
            self._schedule(peer)
        self._call_done(finished)

    def _write_failed(self, peer: RemoteNode, link: Connection, error: OSError) -> None:
        """Nothing more can be sent; what the peer sent before, a BYE perhaps, is still processed."""
        link.is_full = True
        self._process_frames(peer, link)  # this write may be part of processing it
        while peer.link is link and not link.is_paused:
            received = self.bytes_received
            self._read(peer, link)
            if received == self.bytes_received:
                break
        if peer.link is link:
            self._on_broken(peer, f"{peer.name} {_explain_broken(error)}")

    def _watch(self, peer: RemoteNode, link: Connection) -> None:
        """Watch the socket for the events that the link needs."""
        if link.sock is None:
            return
        wanted = (0 if link.is_paused else EPOLL_READ) | (EPOLL_WRITE if link.is_full else 0)
        if wanted == link.watched_events:
            return
        watcher = partial(self._on_ready, peer, link)
        if not wanted:
            self._loop.unwatch(link.sock)
        elif not link.watched_events:
            self._loop.watch(link.sock, wanted, watcher)
        else:
            self._loop.modify_watch(link.sock, wanted, watcher)
        link.watched_events = wanted

    # Sharing memory

    def _share_if_possible(self, peer: RemoteNode, link: Connection, item: QueuedMessage) -> None:
        """Send a queued message by reference to shared memory, if the peer can read it in place."""
        if item.exported is None or link.imported is None:
            return
        known, (region, _) = peer.outbox.announced_regions, item.exported
        if region.number not in known:
            known.add(region.number)
            key = (0, 0, next(self._sequence))
            peer.outbox.add(
                QueuedMessage(
                    _REGION, key, item.data[:0], tag=region.number, total=region.size, exported=item.exported
                )
            )
        item.kind = _SHARED

    def _on_region_released(self, region: Region) -> None:
        """Withdraw a region whose memory has no views left."""
        self._regions.remove(region)
        for peer in self._peers.values():
            if region.number in peer.outbox.announced_regions:
                peer.outbox.announced_regions.remove(region.number)
                key = (0, 0, next(self._sequence))
                peer.outbox.add(QueuedMessage(_WITHDRAW, key, _EMPTY, tag=region.number))
                self._schedule(peer)

    # Receiving

    def _on_open(self, peer: RemoteNode, link: Connection, received: int) -> None:
        """Use a new connection to the peer, which has received so many frames of the session."""
        assert link.sock is not None
        peer.link = link
        peer.is_gone = False
        peer.cause = ""
        link.reader.end_handshake(peer.inbox.destination)
        set_frame_size(link, peer.outbox)
        peer.outbox.keeps_unacked = peer.session.is_resumable
        if not peer.session.is_resumable:
            enable_shared_memory(link)
        self._has_neighbours |= link.imported is not None
        for item in peer.outbox.items():
            self._share_if_possible(peer, link, item)
        self._loop.unwatch(link.sock)
        self._watch(peer, link)
        if self._closing:
            self._send_bye(peer)
        try:
            finished = peer.outbox.resume(received)
        except ProtocolError as error:
            self._lose_for_protocol_error(peer, error)
            return
        self._call_done(finished)
        self._schedule(peer)
        if peer.is_unreachable:
            self._report_reachable(peer)
        self._process_frames(peer, link)

    def _report_reachable(self, peer: RemoteNode) -> None:
        """Report a peer as reachable again, before what was received from it is processed."""
        peer.is_unreachable = False
        self._on_reachable(peer.name)

    def _call_done(self, items: list[QueuedMessage]) -> None:
        """Call back for messages that were delivered, or accepted by the kernel where nothing can be lost."""
        for item in items:
            if item.on_done is not None:
                item.on_done()

    def _on_ready(self, peer: RemoteNode, link: Connection, events: int) -> None:
        if events & EPOLL_WRITE and link.is_full:
            link.is_full = False
            if peer.outbox.next_key is not None:  # it stays watched until nothing is left to send
                self._schedule(peer)
            else:  # the queued bytes were forgotten, or wait until the peer has read
                self._watch(peer, link)
        if events & EPOLL_READ and peer.link is link:
            self._read(peer, link)

    def _read(self, peer: RemoteNode, link: Connection) -> None:
        try:
            n = receive_available(link)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._lose_for_protocol_error(peer, error)
            return
        except OSError as error:
            if is_out_of_descriptors(error):
                text = f"{self.name} cannot accept memory shared by {peer.name}: {describe_os_error(error)}"
                self._lose(peer, text, "no files")
            else:
                self._on_broken(peer, f"{peer.name} {_explain_broken(error)}")
            return
        if not n:
            self._on_broken(peer, f"{peer.name} closed the connection")
            return
        self.bytes_received += n
        link.has_received = True
        if peer.is_unreachable:
            self._report_reachable(peer)
        link.reader.on_received(n)
        self._process_frames(peer, link)
        delay_wakeups(link)

    def _process_frames(self, peer: RemoteNode, link: Connection) -> None:
        """Process every complete frame.

        Where that takes long, what the first ones caused is sent in between, so that the peer can work, too.
        Messages that waited for the peer to read are sent as soon as it has.
        """
        inbox, next_frame, session = peer.inbox, link.reader.next_frame, peer.session
        limit_s = monotonic() + PROCESSING_SLICE_S
        try:
            while peer.link is link and (frame := next_frame()) is not None:
                self.frames_received += 1
                if frame.kind in NUMBERED:
                    self._count_frame(peer, session, frame)
                self._on_frame(peer, link, frame)
                if frame.kind == _TAKEN or monotonic() > limit_s:
                    self._acknowledge_reads(peer, link)
                    self._pump()
                    limit_s = monotonic() + PROCESSING_SLICE_S
            if peer.link is link and link.imported is not None:
                link.imported.check_descriptors(partial=link.reader.is_partial)
                self._acknowledge_reads(peer, link)
        except ProtocolError as error:
            self._lose_for_protocol_error(peer, error)
        if inbox.early_bytes > MAX_EARLY_BYTES and not link.is_paused:
            link.is_paused = True
            self._watch(peer, link)

    def _count_frame(self, peer: RemoteNode, session: LinkSession, frame: Frame) -> None:
        """Count a numbered frame, and acknowledge it where a sender may wait for that."""
        session.received_frames += 1
        if session.is_resumable:
            session.ack_due_frames += 1
            session.ack_due_bytes += frame.length
            ends = frame.kind == _DATA and frame.offset + frame.length == frame.total
            if ends or session.ack_due_bytes >= ACK_BYTES or session.ack_due_frames >= ACK_FRAMES:
                self._acknowledge(peer)

    def _acknowledge(self, peer: RemoteNode) -> None:
        session = peer.session
        session.ack_due_frames = session.ack_due_bytes = 0
        peer.outbox.schedule_ack(session.received_frames)
        self._schedule(peer)

    def _acknowledge_reads(self, peer: RemoteNode, link: Connection) -> None:
        """Acknowledge the pieces of the peer's memory that have been read."""
        borrowed = link.imported
        if borrowed is not None and borrowed.unacked_reads and peer.link is link:
            key = (0, 0, next(self._sequence))
            peer.outbox.add(QueuedMessage(_TAKEN, key, _EMPTY, total=borrowed.unacked_reads))
            borrowed.on_acked()
            self._schedule(peer)

    def _on_frame(self, peer: RemoteNode, link: Connection, frame: Frame) -> None:
        kind = frame.kind
        if kind == _BYE:
            self._on_bye(peer)
        elif self._closing:
            pass
        elif kind == _DATA:
            peer.inbox.on_data_frame(frame)
        elif kind == _MESSAGE:
            assert isinstance(frame.payload, bytes)
            self._on_message(peer.name, frame.payload)
        elif kind == _ACK:
            self._call_done(peer.outbox.on_ack(frame.total))
        elif kind == _TAKEN:
            self._call_done(peer.outbox.on_shared_ack(frame.total))
            self._schedule(peer)
        elif kind not in (_BEAT, _SKIP):
            self._on_shared_frame(peer, link, frame)

    def _on_shared_frame(self, peer: RemoteNode, link: Connection, frame: Frame) -> None:
        borrowed = link.imported
        if borrowed is None:
            raise ProtocolError(f"expected no {FrameKind(frame.kind).name} frame from another host")
        if frame.kind == _SHARED:
            source = borrowed.view(*shared_slice(frame))
            peer.inbox.on_shared_frame(frame.tag, frame.offset, frame.total, source)
        elif frame.kind == _REGION:
            borrowed.map(frame.tag, frame.total)
        elif frame.kind == _WITHDRAW:
            borrowed.unmap(frame.tag)

    def _resume_reading(self, peer: RemoteNode) -> None:
        link = peer.link
        if link is not None and link.is_paused and peer.inbox.early_bytes <= MAX_EARLY_BYTES:
            link.is_paused = False
            self._watch(peer, link)

    # Heartbeats, loss and leave

    def _tick(self) -> None:
        """Send heartbeats, and check for how long each peer has been silent.

        Silence is counted in ticks, not read from a clock: a pause of this node itself counts as one tick.
        """
        if self._closing:
            return
        self._loop.call_later(self._beat_s, self._tick)
        for peer in list(self._peers.values()):
            if self._check_silence(peer) and peer.link is not None:
                self._keep_alive(peer, peer.link)

    def _check_silence(self, peer: RemoteNode) -> bool:
        """Count a peer's silent ticks and act on them; return whether the peer is still held."""
        link = peer.link
        if link is not None and (link.has_received or link.is_paused):
            link.has_received = False
            peer.silent_ticks = 0
            self._opening.stop_dialling(peer)  # which was begun to replace this connection
            return True
        if link is None and peer.dial is None:
            return False
        peer.silent_ticks += 1
        if link is not None and link.wake_bytes > 1:
            set_wakeup_bytes(link, 1)  # on a slow line fewer bytes than that are a sign of life too
        silent_s, limit_s = peer.silent_ticks * self._beat_s, peer.silent_s or self._silent_s
        since = f"{peer.cause}, and " if peer.cause else ""
        if peer.session.is_open and silent_s >= limit_s:
            self._lose(peer, f"{since}{peer.name} has been silent for {limit_s:g} s")
            return False
        if silent_s >= self._unreachable_s and not peer.is_unreachable:
            peer.is_unreachable = True
            self._on_unreachable(peer.name, f"{since}nothing was received from it for {silent_s:g} s")
        if link is not None and silent_s >= REDIAL_S and peer.session.is_resumable and peer.addresses:
            self._opening.dial(peer)
        return True

    def _keep_alive(self, peer: RemoteNode, link: Connection) -> None:
        """Send an ACK or a heartbeat if nothing else was sent since the last tick."""
        if peer.session.ack_due_frames:
            self._acknowledge(peer)
        elif not link.has_sent and peer.outbox.next_key is None:
            peer.outbox.add(QueuedMessage(_BEAT, (0, 0, next(self._sequence)), _EMPTY))
            self._schedule(peer)
        link.has_sent = False

    def _lose_for_protocol_error(self, peer: RemoteNode, error: ProtocolError) -> None:
        """Drop a peer that broke the protocol."""
        self._lose(peer, f"{peer.name} broke the protocol: {error}", "protocol")

    def _on_broken(self, peer: RemoteNode, cause: str) -> None:
        """Handle a broken connection: dial again if the session can be resumed, else drop the peer."""
        if self._closing or not (peer.session.is_resumable and peer.addresses):
            self._lose(peer, cause)
            return
        self._detach(peer)
        peer.cause = cause
        if not self._opening.welcome_parked(peer):
            self._opening.dial(peer)

    def _detach(self, peer: RemoteNode) -> None:
        """Close the connection and keep the session: frames received in part are sent again by the peer."""
        link, peer.link = peer.link, None
        assert link is not None
        if link.reader.partial_data_frame is not None:
            peer.inbox.undo_destination(link.reader.partial_data_frame)
        self._opening.close(link)
        peer.outbox.rewind()
        peer.session.ack_due_frames = peer.session.ack_due_bytes = 0

    def _on_replaced(self, peer: RemoteNode) -> None:
        """Drop a peer whose process does not know the session any more."""
        since = f"{peer.cause}, and " if peer.cause else ""
        self._lose(peer, f"{since}{peer.name} has begun a new session", "replaced")

    def _on_failed(self, peer: RemoteNode, text: str, failure: LinkFailure) -> None:
        """Drop a peer that cannot be reached, or whose process has ended."""
        since = f"{peer.cause}, and " if peer.cause else ""
        self._lose(peer, since + text, failure)

    def _lose(self, peer: RemoteNode, text: str, failure: LinkFailure = "broken") -> None:
        """Drop a peer that failed, and report the loss."""
        self._reset(peer)
        peer.inbox.clear()
        if not self._closing:
            self._on_lost(LinkError(peer.name, text, failure=failure))
        self._opening.welcome_parked(peer)

    def _on_bye(self, peer: RemoteNode) -> None:
        """Process a BYE: what the peer sent before may still be expected, so its inbox is kept."""
        self._reset(peer)
        if not self._closing and self._on_left is not None:
            self._on_left(peer.name)
        self._opening.welcome_parked(peer)

    def _reset(self, peer: RemoteNode) -> None:
        link, peer.link = peer.link, None
        if link is not None:
            self._opening.close(link)
        self._opening.stop_dialling(peer)
        peer.is_gone = True
        peer.is_unreachable = False
        peer.silent_ticks = 0
        peer.cause = ""
        peer.session = LinkSession()
        peer.outbox.clear()

    def _close(self, timeout_s: float) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.call_later(timeout_s, self._loop.stop)
        self._opening.stop_listening()
        for peer in self._peers.values():
            peer.inbox.clear()
            peer.outbox.clear(keep_control=True)
            if peer.link is not None:
                peer.link.reader.discard_tags(0, ALL_TAGS)
                self._resume_reading(peer)
                self._send_bye(peer)
            elif not (peer.dial is not None and peer.outbox):
                self._opening.drop_pending(peer)

    def _send_bye(self, peer: RemoteNode) -> None:
        """Send BYE, the last frame of a session.

        The peer closes the connection when it has read it, so no byte that is still in flight is reset.
        """
        peer.outbox.add(QueuedMessage(_BYE, (0, 1, next(self._sequence)), _EMPTY))
        self._schedule(peer)

    def _on_loop_end(self, error: BaseException | None) -> None:
        """Release everything as the I/O thread ends."""
        self._failure = error
        self._closing = True
        for sock in self._opening.sockets:
            sock.close()
        for peer in self._peers.values():
            for link in (peer.link, peer.dial.link if peer.dial is not None else None):
                if link is not None and link.imported is not None:
                    link.imported.close()
        for sent in self._flush_flags:
            sent.set()
        if error is not None:
            if self._on_error is None:
                raise error
            self._on_error(error)

    def _listen(
        self,
        host: str | None,
        port: int,
        unix: bool,
        listeners: Sequence[tuple[socket.socket, str]] | None,
    ) -> tuple[str, ...]:
        try:
            with _named_errors(self.name):
                found = places.listen(host, port, unix=unix) if listeners is None else listeners
        except BaseException:
            self._opening.stop_listening()
            self._loop.close_unstarted()
            raise
        for sock, _ in found:
            self._opening.listen(sock)
        return tuple(address for _, address in found)

    def close_after_fork(self) -> None:
        """Close this process's copies of all sockets; for a forked child, which has no I/O thread.

        Otherwise the peers would not notice the parent's death as long as the child runs.
        """
        self._failure = RuntimeError("this is a forked process; its parent owns the connections")
        for sock in self._opening.sockets:
            sock.close()
        self._loop.close_unstarted()


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Raise an error of the operating system as an OffbeatError that names the node."""
    try:
        yield
    except OSError as error:
        raise OffbeatError(f"{name} cannot open its connections: {describe_os_error(error)}") from error


def _close_in_children(endpoint: Endpoint) -> None:
    """Make processes forked from this one (a DataLoader's workers) close their copies of the sockets."""
    if not _fork_hooked:
        _fork_hooked.append(True)
        os.register_at_fork(after_in_child=_abandon_all)
    _endpoints.add(endpoint)


_fork_hooked: list[bool] = []


def _abandon_all() -> None:
    for endpoint in list(_endpoints):
        endpoint.close_after_fork()
    _endpoints.clear()


def _as_bytes(data: memoryview) -> memoryview:
    """Return a buffer as a flat view of its bytes."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("expected C-contiguous bytes, got a buffer with gaps")
    if not view.nbytes:
        return _EMPTY
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _explain_broken(error: OSError) -> str:
    match error:
        case ConnectionResetError():
            return "reset the connection"
        case BrokenPipeError():
            return "closed the connection"
        case _:
            return f"cannot be reached any more: {(error.strerror or str(error)).lower()}"
