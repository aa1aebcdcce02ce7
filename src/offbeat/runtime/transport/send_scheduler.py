"""One send order across all peers of a node: the most urgent frame goes first, whichever peer it is for.

Theory of operation
-------------------

Every message has a key (0 for control or 1 for tensor bytes, priority, order of arrival); the lowest goes
first. A peer's `Outbox` sorts its messages by key and cuts them into frames. `schedule` enters the peer in
the node's heap under its most urgent key, unless its socket is full. `pump`, called in each iteration of the
loop, pops the most urgent peer, writes about one frame, and schedules the peer again. So a message overtakes
all bytes that the kernel has not accepted, whichever peer they are for. One heap entry per peer is valid, the
one whose key is its `scheduled_key`; others are skipped. A frame that the kernel accepted in part is finished
first; a peer whose socket is full is not scheduled until it is writable.

This module never receives and never closes a connection.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from offbeat.runtime.transport.connections import Connection, RemoteNode, send_views
from offbeat.runtime.transport.framing import FrameKind
from offbeat.runtime.transport.outbox import QueuedMessage, SendKey
from offbeat.runtime.transport.shared_memory import Region
from offbeat.runtime.transport.tls import TlsSocket

WRITES_PER_TURN = 16  # then sockets are polled again

_BEAT, _BYE, _TAKEN = int(FrameKind.HEARTBEAT), int(FrameKind.BYE), int(FrameKind.SHARED_ACK)
_REGION, _SHARED, _WITHDRAW = int(FrameKind.REGION), int(FrameKind.SHARED), int(FrameKind.WITHDRAW)
_EMPTY = memoryview(b"")


class SendScheduler:
    """Sends the queued frames of all peers, the most urgent one first; in the I/O thread.

    Args:
        sequence: the order of arrival of the node's messages, a part of their keys.
        watch: (peer, link): the socket is full now, or nothing is left to send.
        on_write_failed: (peer, link, error): the socket accepts nothing more.

    Attributes:
        bytes_sent: over all connections since the start, headers included, as they are before encryption.
        on_idle: called whenever no socket accepts more or nothing is queued; None if nothing waits for that.
    """

    def __init__(
        self,
        sequence: Iterator[int],
        watch: Callable[[RemoteNode, Connection], None],
        on_write_failed: Callable[[RemoteNode, Connection, OSError], None],
    ) -> None:
        self.bytes_sent = 0
        self.on_idle: Callable[[], None] | None = None
        self._sequence, self._watch, self._write_failed = sequence, watch, on_write_failed
        self._heap: list[tuple[SendKey, int, RemoteNode]] = []

    def schedule(self, peer: RemoteNode) -> None:
        """Enter the peer in the send heap under its most urgent key, unless its socket is full."""
        link, key = peer.link, peer.outbox.next_key
        if (
            link is not None
            and not link.is_full
            and key is not None
            and (peer.scheduled_key is None or key < peer.scheduled_key)
        ):
            peer.scheduled_key = key
            heappush(self._heap, (key, next(self._sequence), peer))

    def pump(self) -> bool:
        """Send the most urgent frames of the node; return whether more could be sent at once."""
        heap = self._heap
        writes = 0
        while heap:
            if writes == WRITES_PER_TURN:
                return True
            key, _, peer = heappop(heap)
            if peer.scheduled_key is key:  # else a more urgent message came later, and that entry was used
                peer.scheduled_key = None
                if peer.link is not None and not peer.link.is_full:
                    writes += 1
                    self._write(peer, peer.link)
        if self.on_idle is not None:
            self.on_idle()
        return False

    def on_writable(self, peer: RemoteNode, link: Connection) -> None:
        """Go on with a connection whose socket was full."""
        try:
            if isinstance(link.sock, TlsSocket):
                link.sock.send_unsent()
        except BlockingIOError:
            return
        except OSError as error:
            self._write_failed(peer, link, error)
            return
        link.is_full = False
        if peer.outbox.next_key is not None:  # it stays watched until nothing is left to send
            self.schedule(peer)
        else:  # the queued bytes were forgotten, or wait until the peer has read
            self._watch(peer, link)

    def share_if_possible(self, peer: RemoteNode, link: Connection, item: QueuedMessage) -> None:
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

    def withdraw(self, peer: RemoteNode, region: Region) -> None:
        """Withdraw a region whose memory has no views left, if it was announced to the peer."""
        if region.number in peer.outbox.announced_regions:
            peer.outbox.announced_regions.remove(region.number)
            key = (0, 0, next(self._sequence))
            peer.outbox.add(QueuedMessage(_WITHDRAW, key, _EMPTY, tag=region.number))
            self.schedule(peer)

    def acknowledge(self, peer: RemoteNode) -> None:
        """Acknowledge the numbered frames that were received from the peer."""
        session = peer.session
        session.ack_due_frames = session.ack_due_bytes = 0
        peer.outbox.schedule_ack(session.received_frames)
        self.schedule(peer)

    def acknowledge_reads(self, peer: RemoteNode, link: Connection) -> None:
        """Acknowledge the pieces of the peer's memory that have been read."""
        imported = link.imported
        if imported is not None and imported.unacked_reads and peer.link is link:
            key = (0, 0, next(self._sequence))
            peer.outbox.add(QueuedMessage(_TAKEN, key, _EMPTY, total=imported.unacked_reads))
            imported.on_acked()
            self.schedule(peer)

    def send_heartbeat(self, peer: RemoteNode) -> None:
        """Send a frame that only shows that this node works."""
        peer.outbox.add(QueuedMessage(_BEAT, (0, 0, next(self._sequence)), _EMPTY))
        self.schedule(peer)

    def send_bye(self, peer: RemoteNode) -> None:
        """Send BYE, the last frame of a session.

        The peer closes the connection when it has read it, so no byte that is still in flight is reset.
        """
        peer.outbox.add(QueuedMessage(_BYE, (0, 1, next(self._sequence)), _EMPTY))
        self.schedule(peer)

    def _write(self, peer: RemoteNode, link: Connection) -> None:
        outbox = peer.outbox
        views, size = outbox.gather()
        if not size:
            return
        assert link.sock is not None
        try:
            if outbox.descriptor is None:
                n = send_views(link, views)
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
        if n < size or link.has_unsent:
            link.is_full = True
            self._watch(peer, link)
        elif outbox.next_key is None:  # nothing is left, or the rest waits until the peer has read
            self._watch(peer, link)
        else:
            self.schedule(peer)
        call_done(finished)


def call_done(items: list[QueuedMessage]) -> None:
    """Call `on_done` of messages that were acknowledged, or that the kernel accepted and cannot lose."""
    for item in items:
        if item.on_done is not None:
            item.on_done()
