"""Heartbeats to the peers of a node, and what follows from a peer's silence.

- A connection on which nothing was received for REDIAL_S is replaced: the kernel retransmits ever more
  rarely, and would notice late that the network works again.
- A peer from which nothing was received for `unreachable_s` is reported as unreachable. That changes nothing
  here.
- A peer from which nothing was received for `silent_s` is lost.

Silence is counted in ticks of this node, over all connections, and not read from a clock: a pause of this
node itself counts as one tick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from offbeat.runtime.transport.connections import Connection, RemoteNode, set_wakeup_bytes
from offbeat.runtime.transport.dialing import ConnectionOpener
from offbeat.runtime.transport.io_loop import IoLoop
from offbeat.runtime.transport.send_scheduler import SendScheduler

REDIAL_S = 2.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Durations after which a node acts on silence, in seconds; see `Endpoint`.

    Raises:
        ValueError: one is out of range.
    """

    heartbeat_s: float
    silent_s: float
    unreachable_s: float
    connect_s: float

    def __post_init__(self) -> None:
        if not 0 < 2 * self.heartbeat_s < self.silent_s:
            raise ValueError(
                "expected heartbeat_s > 0 and silent_s > 2 heartbeat_s, "
                f"got {self.heartbeat_s:g} s and {self.silent_s:g} s"
            )
        if self.connect_s <= 0:
            raise ValueError(f"expected connect_s > 0, got {self.connect_s:g} s")


class SilenceDetector:
    """Sends at least one frame per heartbeat interval to every peer, and reports each peer that is silent.

    All of its code runs in the I/O thread.

    Args:
        peers: by name; other methods of the node add to it.
        loop: calls the detector in every interval, from its start on.
        on_silent: (peer, text): nothing was received from a peer for so long that it is lost.
        on_unreachable: (peer's name, cause): as in `Endpoint`.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        peers: Mapping[str, RemoteNode],
        loop: IoLoop,
        scheduler: SendScheduler,
        opener: ConnectionOpener,
        *,
        on_silent: Callable[[RemoteNode, str], None],
        on_unreachable: Callable[[str, str], None],
    ) -> None:
        self._timeouts, self._peers = timeouts, peers
        self._loop, self._scheduler, self._opener = loop, scheduler, opener
        self._on_silent, self._on_unreachable = on_silent, on_unreachable
        self._is_stopped = False
        loop.call_later(timeouts.heartbeat_s, self._tick)

    def stop(self) -> None:
        """Send no more heartbeats, and report nothing more."""
        self._is_stopped = True

    def _tick(self) -> None:
        """Send heartbeats, and check for how long each peer has been silent."""
        if self._is_stopped:
            return
        self._loop.call_later(self._timeouts.heartbeat_s, self._tick)
        for peer in list(self._peers.values()):
            if self._check_silence(peer) and peer.link is not None:
                self._keep_alive(peer, peer.link)

    def _check_silence(self, peer: RemoteNode) -> bool:
        """Count a peer's silent ticks and act on them; return whether the peer is still held."""
        link = peer.link
        if link is not None and (link.has_received or link.is_paused):
            link.has_received = False
            peer.silent_ticks = 0
            self._opener.stop_dialling(peer)  # which was begun to replace this connection
            return True
        if link is None and peer.dial is None:
            return False
        peer.silent_ticks += 1
        if link is not None and link.wake_bytes > 1:
            set_wakeup_bytes(link, 1)  # on a slow line fewer bytes than that are a sign of life too
        silent_s = peer.silent_ticks * self._timeouts.heartbeat_s
        limit_s = peer.silent_s or self._timeouts.silent_s
        since = f"{peer.cause}, and " if peer.cause else ""
        if peer.session.is_open and silent_s >= limit_s:
            self._on_silent(peer, f"{since}{peer.name} has been silent for {limit_s:g} s")
            return False
        if silent_s >= self._timeouts.unreachable_s and not peer.is_unreachable:
            peer.is_unreachable = True
            self._on_unreachable(peer.name, f"{since}nothing was received from it for {silent_s:g} s")
        if link is not None and silent_s >= REDIAL_S and peer.session.is_resumable and peer.addresses:
            self._opener.dial(peer)
        return True

    def _keep_alive(self, peer: RemoteNode, link: Connection) -> None:
        """Send an ACK or a heartbeat if nothing else was sent since the last tick."""
        if peer.session.ack_due_frames:
            self._scheduler.acknowledge(peer)
        elif not link.has_sent and peer.outbox.next_key is None:
            self._scheduler.send_heartbeat(peer)
        link.has_sent = False
