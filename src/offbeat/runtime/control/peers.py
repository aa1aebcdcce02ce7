"""The other workers of a job, as one worker's links know them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from offbeat.errors import LinkError
from offbeat.events import Event, Peer, PeerReachable, PeerUnreachable
from offbeat.runtime.control.configuration import COORDINATOR
from offbeat.runtime.control.outages import OutageLog
from offbeat.runtime.transport.addresses import parse_address
from offbeat.runtime.transport.endpoint import Endpoint

# Two workers that receive nothing from each other leave it to the coordinator, which is connected to both, to
# end the job. After this many times `silent_s` they end it themselves.
_PEER_SILENCE_FACTOR: Final = 3.0
_RECONNECT_S: Final = 1.0


class WorkerPeers:
    """Knows which worker is at which link, and reports to the coordinator which ones cannot be reached.

    Every worker that has not left the job can be connected to. Of each that is unreachable the coordinator
    receives one PeerUnreachable, and one PeerReachable when that is over; the log has the outages of the
    coordinator too. All methods but `link_name` and `host_of` are called in the I/O thread.

    Args:
        endpoint: this worker's links.
        worker: this worker's id.
        send_event: sends an event to the coordinator.
        steps_finished: returns the number of optimizer steps that this worker has finished.
        silent_s: a node that has sent nothing for this many seconds is lost.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        worker: int,
        send_event: Callable[[Event], None],
        steps_finished: Callable[[], int],
        *,
        silent_s: float,
    ) -> None:
        self._endpoint, self._worker = endpoint, worker
        self._send_event, self._step = send_event, steps_finished
        self._silent_s = silent_s
        self._worker_of_peer: dict[str, int] = {}
        self._name_of_worker: dict[int, str] = {}
        self._address_of_worker: dict[int, str] = {}  # the best one
        self._addresses: dict[str, tuple[str, ...]] = {}  # of the workers that have not left
        self._reported_unreachable: set[str] = set()  # peers reported to the coordinator
        self._is_stopped = False
        self._outages = OutageLog(f"worker {worker}", endpoint.call_later)

    def link_name(self, worker: int) -> str:
        """Return the link name of a worker that has joined; any thread may call it."""
        return self._name_of_worker[worker]

    def host_of(self, worker: int) -> str:
        """Return the host of a worker that has joined, by its best address; any thread may call it."""
        address = parse_address(self._address_of_worker[worker])
        return address.host_id or address.host

    def worker_of(self, peer: str) -> int | None:
        """Return the worker at a link; None if no worker has joined with that name."""
        return self._worker_of_peer.get(peer)

    def add(self, peers: tuple[Peer, ...]) -> None:
        """Add workers that have joined."""
        for peer in peers:
            if peer.name in self._worker_of_peer:
                continue
            self._worker_of_peer[peer.name] = peer.worker
            self._address_of_worker[peer.worker] = peer.addresses[0]
            self._name_of_worker[peer.worker] = peer.name
            if peer.name != self._endpoint.name:
                self._addresses[peer.name] = peer.addresses
                self._introduce(peer.name)

    def forget_worker(self, worker: int) -> None:
        """Forget a worker that the coordinator has excluded; see `forget`."""
        self.forget(self._name_of_worker.get(worker, ""))

    def forget(self, peer: str) -> None:
        """Forget a worker that has left the job: no connection to it is opened again."""
        self._addresses.pop(peer, None)
        self._reported_unreachable.discard(peer)
        self._outages.on_gone(self._display_name(peer))

    def on_unreachable(self, peer: str, cause: str) -> None:
        """Log that a peer is unreachable; report it to the coordinator if the peer is a worker."""
        cause = f"{cause}, in step {self._step()}"
        if not self._is_stopped and (peer == COORDINATOR or peer in self._addresses):
            self._outages.on_unreachable(self._display_name(peer), cause)
        if peer in self._addresses and peer not in self._reported_unreachable:
            self._reported_unreachable.add(peer)
            self._send_event(
                PeerUnreachable(now_s=0.0, worker=self._worker, peer=self._worker_of_peer[peer], cause=cause)
            )

    def on_reachable(self, peer: str) -> None:
        """Log that a peer can be reached again; report it to the coordinator if it knows of the outage."""
        self._outages.on_reachable(self._display_name(peer))
        if peer in self._reported_unreachable:
            self._reported_unreachable.remove(peer)
            self._send_event(PeerReachable(now_s=0.0, worker=self._worker, peer=self._worker_of_peer[peer]))

    def on_lost(self, error: LinkError) -> None:
        """Report a lost connection to a worker, and dial it every second until it leaves the job."""
        if error.peer in self._addresses:
            self.on_unreachable(error.peer, str(error))
            self._endpoint.call_later(_RECONNECT_S, partial(self._reconnect, error.peer))

    def stop(self) -> None:
        """Reconnect no more and log no further outages: this worker leaves the job."""
        self._is_stopped = True

    def _introduce(self, peer: str) -> None:
        """Let the links connect to another worker; the coordinator is the first to declare it lost."""
        silent_s = _PEER_SILENCE_FACTOR * self._silent_s
        self._endpoint.add_peer(peer, self._addresses[peer], has_fixed_addresses=True, silent_s=silent_s)

    def _reconnect(self, peer: str) -> None:
        """Dial a worker again, unless it has left the job."""
        if peer in self._addresses and not self._is_stopped:
            self._introduce(peer)
            self._endpoint.connect(peer)

    def _display_name(self, peer: str) -> str:
        return f"worker {self._worker_of_peer[peer]}" if peer in self._worker_of_peer else "the coordinator"
