"""Sessions of one node with its peers: what is received, kept alive, resumed and lost, in the I/O thread.

Theory of operation
-------------------

Receiving: `FrameReader` names the buffers to receive into, so that the bytes of an expected tensor message
land in their destination without a copy. `_process_frames` handles all complete frames, and sends in between
if that takes long. Bytes that nothing expects yet are kept up to a limit, then reading from the peer pauses.

Sessions outlive TCP connections: a pause of the network is not a death.

- A connection that breaks is opened again at once, and the session goes on without loss or repetition
  (see `offbeat.runtime.transport.dialing` and `Outbox`).
- A peer is lost if all its addresses refuse connections, since then its process has ended; if another
  process, or one that has dropped the session, answers at its address; if it breaks the protocol; or if
  nothing was received from it for `silent_s` (see `SilenceDetector`).
- A broken TLS connection is a broken connection like any other: nothing that came was not authentic.
- A Unix socket joins two processes on one host and no network can break it: where one breaks, the peer at
  its other end is lost.

This module never blocks, and never acquires a lock that another thread holds for long.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic

from offbeat.errors import LinkError, LinkFailure, ProtocolError, describe_os_error
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.transport.addresses import Address
from offbeat.runtime.transport.connections import (
    TCP_FRAME_BYTES,
    Connection,
    LinkSession,
    OpenSockets,
    RemoteNode,
    delay_wakeups,
    enable_shared_memory,
    receive_available,
    set_frame_size,
)
from offbeat.runtime.transport.descriptors import is_out_of_descriptors
from offbeat.runtime.transport.dialing import ConnectionOpener
from offbeat.runtime.transport.framing import NUMBERED, Frame, FrameKind, shared_slice
from offbeat.runtime.transport.inbox import (
    MAX_EARLY_BYTES,
    MAX_FORGOTTEN_RANGES,
    Inbox,
    IntervalSet,
    OnData,
    OnShared,
)
from offbeat.runtime.transport.io_loop import EPOLL_READ, EPOLL_WRITE, IoLoop
from offbeat.runtime.transport.outbox import Outbox, QueuedMessage
from offbeat.runtime.transport.send_scheduler import SendScheduler, call_done
from offbeat.runtime.transport.shared_memory import Region, RegionAllocator
from offbeat.runtime.transport.silence_detector import SilenceDetector, Timeouts
from offbeat.runtime.transport.tls import TlsCredentials, explain_tls_error

ALL_TAGS = 1 << 64
PROCESSING_SLICE_S = 300e-6  # of processing received frames, after which what they caused is sent
# Received frames are acknowledged after so many bytes or frames, and at the end of every tensor message, for
# which a sender may wait; the rest with the next tick.
ACK_BYTES = 4 * 1024 * 1024
ACK_FRAMES = 64

_DATA, _MESSAGE, _BEAT, _BYE = (
    int(kind) for kind in (FrameKind.DATA, FrameKind.MESSAGE, FrameKind.HEARTBEAT, FrameKind.BYE)
)
_REGION, _SHARED, _TAKEN, _WITHDRAW = (
    int(kind) for kind in (FrameKind.REGION, FrameKind.SHARED, FrameKind.SHARED_ACK, FrameKind.WITHDRAW)
)
_ACK, _SKIP = int(FrameKind.ACK), int(FrameKind.SKIP)


class PeerSessions:
    """One session per peer, which delivers every frame once and in order over connections that come and go.

    All of its code runs in the I/O thread. The callbacks are those of `Endpoint`.

    Args:
        get_addresses: returns where this node listens.
        unacked_bytes: see `Endpoint`.
        sequence: the order of arrival of the node's messages.
        on_end: see `IoLoop`.
        tls: encrypts TCP connections; None for plain ones.

    Attributes:
        loop: runs all of it; not started yet.
        sockets: all that are open.
        acceptor: accepts connections.
        scheduler: sends what is queued for the peers.
        regions: memory that peers on this host can read; any thread may allocate and look up.
        peers: by name; other threads may only test whether it holds a name.
        bytes_received: over all connections since the start, headers included.
        frames_received: control messages and pieces of tensors since the start.
    """

    def __init__(
        self,
        name: str,
        *,
        job: str,
        token: str,
        timeouts: Timeouts,
        unacked_bytes: int,
        busy_polls: bool,
        sequence: Iterator[int],
        get_addresses: Callable[[], tuple[str, ...]],
        on_message: Callable[[str, bytes], None],
        on_lost: Callable[[LinkError], None],
        on_left: Callable[[str], None] | None,
        on_unreachable: Callable[[str, str], None],
        on_reachable: Callable[[str], None],
        on_refused: Callable[[str], None],
        on_end: Callable[[BaseException | None], None],
        tls: TlsCredentials | None,
    ) -> None:
        self._name, self._unacked_bytes = name, unacked_bytes
        self._on_message, self._on_lost, self._on_left = on_message, on_lost, on_left
        self._on_reachable = on_reachable
        self.bytes_received = self.frames_received = 0
        self.peers: dict[str, RemoteNode] = {}
        self._forgotten = IntervalSet()
        self._flush_flags: list[SignalSafeEvent] = []
        self._closing = False
        self.scheduler = SendScheduler(sequence, self._watch, self._on_write_failed)
        self.loop = IoLoop(
            f"links of {name}", on_iteration=self.scheduler.pump, on_end=on_end, busy_polls=busy_polls
        )
        self.regions = RegionAllocator(partial(self.loop.call, self._on_region_released))
        self.sockets = OpenSockets(self.loop)
        self._opener = ConnectionOpener(
            self.loop,
            self.sockets,
            name,
            job=job,
            token=token,
            connect_s=timeouts.connect_s,
            get_addresses=get_addresses,
            get_peer=self.peer,
            on_opened=self._on_open,
            on_detached=self._detach,
            on_replaced=self._on_replaced,
            on_failed=self._on_failed,
            on_refused=on_refused,
            tls=tls,
        )
        self.acceptor = self._opener.acceptor
        self._detector = SilenceDetector(
            timeouts,
            self.peers,
            self.loop,
            self.scheduler,
            self._opener,
            on_silent=self._lose,
            on_unreachable=on_unreachable,
        )

    def peer(self, name: str) -> RemoteNode:
        """Return the peer of a name, which is new if it has none yet."""
        peer = self.peers.get(name)
        if peer is None:
            outbox = Outbox(TCP_FRAME_BYTES, self._unacked_bytes)
            peer = self.peers[name] = RemoteNode(name, Inbox(self._forgotten), outbox)
        return peer

    def connect(self, name: str) -> None:
        """Dial a peer that has no connection; `on_reachable` is called when something is received from it."""
        peer = self.peer(name)
        if not self._closing:
            peer.is_unreachable = True
            if peer.link is None:
                self._opener.dial(peer)

    def add_peer(
        self, name: str, addresses: tuple[Address, ...], lasting: bool, silent_s: float | None
    ) -> None:
        """Set where a peer listens, and for how long it may be silent; dial it if a dial waits for that."""
        peer = self.peer(name)
        peer.addresses, peer.has_fixed_addresses, peer.silent_s = addresses, lasting, silent_s
        peer.is_gone = False
        self._opener.on_addresses_known(peer)

    def enqueue(self, name: str, item: QueuedMessage) -> None:
        """Queue a message; dial the peer where needed. Drop it if none takes it."""
        peer = self.peer(name)
        if (
            peer.is_gone
            or self._closing
            or self._forgotten.overlaps(item.tag, item.tag + (item.kind == _DATA))
        ):
            return
        peer.outbox.add(item)
        if peer.link is not None:
            self.scheduler.share_if_possible(peer, peer.link, item)
            self.scheduler.schedule(peer)
        else:
            self._opener.dial(peer)

    def post_receive(
        self, name: str, tag: int, into: memoryview, on_data: OnData, on_shared: OnShared | None
    ) -> None:
        """Receive a tensor message into a buffer; see `Inbox.post`."""
        peer = self.peer(name)
        if self._closing:
            return
        try:
            peer.inbox.post(tag, into, on_data, on_shared)
        except ProtocolError as error:
            self._lose_for_protocol_error(peer, error)
        else:
            self._resume_reading(peer)

    def cancel(self, first: int, last: int) -> None:
        """Drop every message with first <= tag < last, of all peers, permanently."""
        self._forgotten.add(first, last)
        if len(self._forgotten) > MAX_FORGOTTEN_RANGES:
            self._forgotten.drop_lowest()
        for peer in self.peers.values():
            peer.inbox.drop(first, last)
            peer.outbox.drop(first, last)
            if peer.link is not None:
                peer.link.reader.discard_tags(first, last)
                self._resume_reading(peer)

    def fail_peer(self, name: str, error: ProtocolError) -> None:
        """Drop a peer that broke the protocol, as if a callback had raised `error`."""
        peer = self.peer(name)
        if peer.link is not None:
            self._lose_for_protocol_error(peer, error)

    def flush(self, sent: SignalSafeEvent) -> None:
        """Set an event when the kernel has accepted everything that is queued."""
        self._flush_flags.append(sent)
        self.scheduler.on_idle = self._on_idle

    def close(self, timeout_s: float) -> None:
        """Send the queued control messages, then BYE to every peer; stop the loop when they have read it."""
        if self._closing:
            return
        self._closing = True
        self._detector.stop()
        self.scheduler.on_idle = self._on_idle
        self.loop.call_later(timeout_s, self.loop.stop)
        self.acceptor.stop_listening()
        for peer in self.peers.values():
            peer.inbox.clear()
            peer.outbox.clear(keep_control=True)
            if peer.link is not None:
                peer.link.reader.discard_tags(0, ALL_TAGS)
                self._resume_reading(peer)
                self.scheduler.send_bye(peer)
            elif not (peer.dial is not None and peer.outbox):
                self._opener.drop_pending(peer)

    def release(self) -> None:
        """Release everything as the I/O thread ends."""
        self._closing = True
        self.sockets.close_all()
        for peer in self.peers.values():
            for link in (peer.link, peer.dial.link if peer.dial is not None else None):
                if link is not None and link.imported is not None:
                    link.imported.close()
        for sent in self._flush_flags:
            sent.set()

    def _on_idle(self) -> None:
        """Nothing more can be sent for now: report what was flushed, and stop once all peers have left."""
        if self._flush_flags and not any(peer.has_unsent for peer in self.peers.values()):
            for sent in self._flush_flags:
                sent.set()
            self._flush_flags.clear()
        if not self._closing:
            self.scheduler.on_idle = self._on_idle if self._flush_flags else None
        elif not any(peer.link or peer.dial for peer in self.peers.values()):
            self.loop.stop()

    def _on_write_failed(self, peer: RemoteNode, link: Connection, error: OSError) -> None:
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
            self.loop.unwatch(link.sock)
        elif not link.watched_events:
            self.loop.watch(link.sock, wanted, watcher)
        else:
            self.loop.modify_watch(link.sock, wanted, watcher)
        link.watched_events = wanted

    def _on_region_released(self, region: Region) -> None:
        """Withdraw a region whose memory has no views left."""
        self.regions.remove(region)
        for peer in self.peers.values():
            self.scheduler.withdraw(peer, region)

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
        self.regions.has_local_peers |= link.imported is not None
        for item in peer.outbox.items():
            self.scheduler.share_if_possible(peer, link, item)
        self.loop.unwatch(link.sock)
        self._watch(peer, link)
        if self._closing:
            self.scheduler.send_bye(peer)
        try:
            finished = peer.outbox.resume(received)
        except ProtocolError as error:
            self._lose_for_protocol_error(peer, error)
            return
        call_done(finished)
        self.scheduler.schedule(peer)
        if peer.is_unreachable:
            self._report_reachable(peer)
        self._process_frames(peer, link)
        self._read_decrypted(peer, link)

    def _report_reachable(self, peer: RemoteNode) -> None:
        """Report a peer as reachable again, before what was received from it is processed."""
        peer.is_unreachable = False
        self._on_reachable(peer.name)

    def _on_ready(self, peer: RemoteNode, link: Connection, events: int) -> None:
        if events & EPOLL_WRITE and link.is_full:
            self.scheduler.on_writable(peer, link)
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
                text = f"{self._name} cannot accept memory shared by {peer.name}: {describe_os_error(error)}"
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
        self._read_decrypted(peer, link)

    def _read_decrypted(self, peer: RemoteNode, link: Connection) -> None:
        """Read soon what is decrypted already: epoll does not report it."""
        if link.has_decrypted and not link.is_paused:
            self.loop.call(self._on_ready, peer, link, EPOLL_READ)

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
                    self.scheduler.acknowledge_reads(peer, link)
                    self.scheduler.pump()
                    limit_s = monotonic() + PROCESSING_SLICE_S
            if peer.link is link and link.imported is not None:
                link.imported.check_descriptors(partial=link.reader.is_partial)
                self.scheduler.acknowledge_reads(peer, link)
        except ProtocolError as error:
            self._lose_for_protocol_error(peer, error)
        if inbox.early_bytes > MAX_EARLY_BYTES and not link.is_paused:
            link.is_paused = True
            self._watch(peer, link)

    def _count_frame(self, peer: RemoteNode, session: LinkSession, frame: Frame) -> None:
        """Count a numbered frame, and acknowledge it where the sender keeps much until then."""
        session.received_frames += 1
        if session.is_resumable:
            session.ack_due_frames += 1
            session.ack_due_bytes += frame.length
            if session.ack_due_bytes >= ACK_BYTES or session.ack_due_frames >= ACK_FRAMES:
                self.scheduler.acknowledge(peer)

    def _on_frame(self, peer: RemoteNode, link: Connection, frame: Frame) -> None:
        kind = frame.kind
        if kind == _BYE:
            self._on_bye(peer)
        elif self._closing:
            pass
        elif kind == _DATA:
            is_complete = peer.inbox.on_data_frame(frame)
            if is_complete and peer.link is link and peer.session.ack_due_frames:
                self.scheduler.acknowledge(peer)  # the sender may wait for that
        elif kind == _MESSAGE:
            assert isinstance(frame.payload, bytes)
            self._on_message(peer.name, frame.payload)
        elif kind == _ACK:
            call_done(peer.outbox.on_ack(frame.total))
        elif kind == _TAKEN:
            call_done(peer.outbox.on_shared_ack(frame.total))
            self.scheduler.schedule(peer)
        elif kind not in (_BEAT, _SKIP):
            self._on_shared_frame(peer, link, frame)

    def _on_shared_frame(self, peer: RemoteNode, link: Connection, frame: Frame) -> None:
        imported = link.imported
        if imported is None:
            raise ProtocolError(f"expected no {FrameKind(frame.kind).name} frame from another host")
        if frame.kind == _SHARED:
            source = imported.view(*shared_slice(frame))
            peer.inbox.on_shared_frame(frame.tag, frame.offset, frame.total, source)
        elif frame.kind == _REGION:
            imported.map(frame.tag, frame.total)
        elif frame.kind == _WITHDRAW:
            imported.unmap(frame.tag)

    def _resume_reading(self, peer: RemoteNode) -> None:
        link = peer.link
        if link is not None and link.is_paused and peer.inbox.early_bytes <= MAX_EARLY_BYTES:
            link.is_paused = False
            self._watch(peer, link)
            self._read_decrypted(peer, link)

    # Loss and leave

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
        if not self._opener.welcome_parked(peer):
            self._opener.dial(peer)

    def _detach(self, peer: RemoteNode) -> None:
        """Close the connection and keep the session: frames received in part are sent again by the peer."""
        link, peer.link = peer.link, None
        assert link is not None
        if link.reader.partial_data_frame is not None:
            peer.inbox.undo_destination(link.reader.partial_data_frame)
        self.sockets.close_link(link)
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
        self._opener.welcome_parked(peer)

    def _on_bye(self, peer: RemoteNode) -> None:
        """Process a BYE: what the peer sent before may still be expected, so its inbox is kept."""
        self._reset(peer)
        if not self._closing and self._on_left is not None:
            self._on_left(peer.name)
        self._opener.welcome_parked(peer)

    def _reset(self, peer: RemoteNode) -> None:
        link, peer.link = peer.link, None
        if link is not None:
            self.sockets.close_link(link)
        self._opener.stop_dialling(peer)
        peer.is_gone = True
        peer.is_unreachable = False
        peer.silent_ticks = 0
        peer.cause = ""
        peer.session = LinkSession()
        peer.outbox.clear()


def _explain_broken(error: OSError) -> str:
    match error:
        case ConnectionResetError():
            return "reset the connection"
        case BrokenPipeError() | ssl.SSLEOFError():
            return "closed the connection"
        case ssl.SSLError():
            return f"cannot be reached any more: {explain_tls_error(error)}"
        case _:
            return f"cannot be reached any more: {(error.strerror or str(error)).lower()}"
