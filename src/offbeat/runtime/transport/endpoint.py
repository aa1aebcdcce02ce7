"""Transport of one node: one session per peer, one I/O thread, one send order across all peers.

Control messages and tensor bytes are addressed to peers by name. A connection is opened on first use, by
whichever side needs it.

Theory of operation
-------------------

Threads: an `Endpoint` is the callers' side. Its public methods check their arguments and queue the work for
the I/O thread; called from that thread (from inside a callback) they do it at once, which costs no lock and
no system call. Everything else belongs to the I/O thread.

Parts: `PeerSessions` owns the `IoLoop` (thread, epoll, timers), a `ConnectionOpener` (dialling, and with its
`ConnectionAcceptor` listening), a `SendScheduler` (what goes next, of all peers), a `SilenceDetector`
(heartbeats, silence) and one `RemoteNode` per peer (inbox, outbox, session, current `Connection`).

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
from itertools import count
from time import monotonic
from typing import Any

from offbeat.errors import LinkError, OffbeatError, ProtocolError, describe_os_error
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.transport import addresses as places
from offbeat.runtime.transport.framing import MAX_MESSAGE_BYTES, FrameKind
from offbeat.runtime.transport.handshake import check_node_name
from offbeat.runtime.transport.inbox import OnData, OnShared
from offbeat.runtime.transport.outbox import QueuedMessage
from offbeat.runtime.transport.sessions import ALL_TAGS, PeerSessions
from offbeat.runtime.transport.shared_memory import MAX_UNACKED_BYTES, MIN_SHARED_BYTES, UNACKED_BYTES
from offbeat.runtime.transport.silence_detector import Timeouts
from offbeat.runtime.transport.tls import TlsCredentials

UNREACHABLE_S = 1.25
IO_THREAD_TIMEOUT_S = 10.0  # how long a caller waits for an I/O thread that is busy

_DATA, _MESSAGE = int(FrameKind.DATA), int(FrameKind.MESSAGE)
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
        tls: encrypts TCP connections, and refuses peers without a certificate; None for plain ones.

    Attributes:
        addresses: where this node can be reached, best first; not valid after `close`.

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
        tls: TlsCredentials | None = None,
    ) -> None:
        if not token:
            raise ValueError("expected a non-empty token, got an empty string")
        timeouts = Timeouts(heartbeat_s, silent_s, unreachable_s, connect_s)
        if not 0 < unacked_bytes <= MAX_UNACKED_BYTES:
            raise ValueError(f"expected unacked_bytes from 1 to {MAX_UNACKED_BYTES}, got {unacked_bytes}")
        self.name = check_node_name(name)
        self._on_error = on_error
        self._sequence = count()
        self._failure: BaseException | None = None
        with _named_errors(name):
            self._sessions = PeerSessions(
                name,
                job=check_node_name(job),
                token=token,
                timeouts=timeouts,
                unacked_bytes=unacked_bytes,
                busy_polls=busy_polls,
                sequence=self._sequence,
                get_addresses=lambda: self.addresses,
                on_message=on_message,
                on_lost=on_lost,
                on_left=on_left,
                on_unreachable=on_unreachable,
                on_reachable=on_reachable,
                on_refused=on_refused,
                on_end=self._on_loop_end,
                tls=tls,
            )
        self._loop, self._regions = self._sessions.loop, self._sessions.regions
        self.addresses = self._listen(host, port, unix, listeners)
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
            self._regions.has_local_peers = True
        self._run_in_loop(
            self._sessions.add_peer, self._checked_peer(peer), parsed, has_fixed_addresses, silent_s
        )

    def connect(self, peer: str) -> None:
        """Connect to a peer that was lost and has been introduced again.

        `on_reachable` is called when something is received from it.
        """
        self._run_in_loop(self._sessions.connect, self._checked_peer(peer))

    def allocate(self, size_bytes: int) -> memoryview:
        """Return zeroed memory that peers on this host can read in place.

        It exists as long as a view of it. Where `allocate_shared` returns None, it is ordinary memory.
        """
        shared = self.allocate_shared(size_bytes)
        return memoryview(bytearray(size_bytes)) if shared is None else shared

    def allocate_shared(self, size_bytes: int) -> memoryview | None:
        """Return zeroed memory that peers on this host can read in place, as long as a view of it exists.

        None where no peer is known to be on this host, or no shared memory can be had.
        """
        return self._regions.allocate(size_bytes) if self._regions.has_local_peers else None

    def shares_memory(self, peer: str) -> bool:
        """Whether a peer reads memory of `allocate` in place; to be called in the I/O thread."""
        known = self._sessions.peers.get(peer)
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
            self._sessions.enqueue,
            self._checked_peer(peer),
            QueuedMessage(_MESSAGE, key, memoryview(message)),
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
        exported = self._regions.find(view) if len(view) >= MIN_SHARED_BYTES else None
        key = (1, priority, next(self._sequence))
        item = QueuedMessage(
            _DATA,
            key,
            view,
            tag=tag,
            offset=offset,
            total=total,
            on_done=on_done,
            exported=exported,
            uses_long_frames=uses_long_frames,
        )
        if total and not len(view):
            if on_done is not None:
                self._run_in_loop(on_done)
            return
        self._run_in_loop(self._sessions.enqueue, self._checked_peer(peer), item)

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
        self._run_in_loop(
            self._sessions.post_receive, self._checked_peer(peer), tag, view, on_data, on_shared
        )

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
            self._sessions.cancel(first, last)
            return
        finished = SignalSafeEvent()
        self._run_in_loop(self._sessions.cancel, first, last)
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
        self._sessions.fail_peer(peer, error)

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
        self._loop.call(self._sessions.flush, sent)
        return self._loop.is_alive and sent.wait(timeout_s) and self._failure is None

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the queued control messages, announce the close to every peer and stop; drop tensor bytes.

        May be called more than once; from within a callback it returns at once and closes soon after.
        """
        self._loop.call(self._sessions.close, timeout_s)
        if not self._loop.is_loop_thread:
            self._loop.join(timeout_s + 1.0)

    @property
    def bytes_sent(self) -> int:
        """Over all connections since the start, headers included, as they are before encryption."""
        return self._sessions.scheduler.bytes_sent

    @property
    def bytes_received(self) -> int:
        """As `bytes_sent`; bytes read from shared memory are not counted."""
        return self._sessions.bytes_received

    @property
    def frames_received(self) -> int:
        """Control messages and pieces of tensors since the start."""
        return self._sessions.frames_received

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
        return check_node_name(peer) if peer not in self._sessions.peers else peer

    def _on_loop_end(self, error: BaseException | None) -> None:
        self._failure = error
        self._sessions.release()
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
            self._sessions.acceptor.stop_listening()
            self._loop.close_unstarted()
            raise
        for sock, _ in found:
            self._sessions.acceptor.listen(sock)
        return tuple(address for _, address in found)

    def close_after_fork(self) -> None:
        """Close this process's copies of all sockets; for a forked child, which has no I/O thread.

        Otherwise the peers would not notice the parent's death as long as the child runs.
        """
        self._failure = RuntimeError("this is a forked process; its parent owns the connections")
        self._sessions.sockets.close_all()
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
