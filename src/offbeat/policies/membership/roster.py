"""Who takes part in a job: workers that are here, have the state, have finished, or are gone.

A component of policies. It knows nothing of groups, and decides nothing.
"""

from __future__ import annotations

from typing import Any

from offbeat.errors import ProtocolError
from offbeat.events import Event, Joined


class Roster:
    """The workers of a job that are not gone.

    A worker joins, receives the state of the others unless it is the first one, trains, and has finished once
    its training loop has ended.

    Attributes:
        world: number of workers at the start.
        has_started: as many workers as that have joined.
        present: all workers that are not gone.
        without_state: workers that have not received the state yet.
        finished: workers whose loop has ended.
        training: workers that have the state and whose loop has not ended; the same object until they change.
        leader: the worker with the lowest id of those that have the state; None if none has it.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.has_started = False
        self.without_state: frozenset[int] = frozenset()
        self.finished: frozenset[int] = frozenset()
        self._peers: dict[int, str] = {}
        self._gone: set[int] = set()
        self._update()

    def __contains__(self, worker: int) -> bool:
        return worker in self._peers

    def _update(self) -> None:
        """Derive what is needed at every event from what changes rarely."""
        self.present = frozenset(self._peers)
        with_state = self.present - self.without_state
        self.training = with_state - self.finished
        self.leader = min(with_state, default=None)

    def peer_of(self, worker: int) -> str:
        """Return the link name of a worker."""
        return self._peers[worker]

    def add(self, event: Joined) -> bool:
        """Add a worker, without the state unless it is worker 0 of the start; return whether it is new."""
        if event.worker in self._peers or event.worker in self._gone:
            return False  # the assembly policy answers it
        self._peers[event.worker] = event.peer
        if self.has_started or event.worker:
            self.without_state |= {event.worker}
        self.has_started |= len(self._peers) == self.world
        self._update()
        return True

    def require(self, event: Event, worker: int) -> None:
        """Check that a worker trains.

        Raises:
            ProtocolError: it is not here, lacks the state, or has finished.
        """
        if worker not in self.training:
            raise ProtocolError(
                f"expected {type(event).__name__} of a worker that trains, got it from worker {worker}"
            )

    def on_state_received(self, worker: int) -> None:
        """Note that a worker has received the state; one that had it stays as it is."""
        if worker in self.without_state:
            self.without_state -= {worker}
            self._update()

    def finish(self, worker: int) -> None:
        """Note that a worker's loop has ended."""
        self.finished |= {worker}
        self._update()

    def remove(self, worker: int) -> bool:
        """Remove a worker that is gone; return whether it was here."""
        if self._peers.pop(worker, None) is None:
            return False
        self._gone.add(worker)
        self.finished -= {worker}
        self.without_state -= {worker}
        self._update()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return {
            "has_started": self.has_started,
            "without_state": sorted(self.without_state),
            "finished": sorted(self.finished),
            "peers": [list(entry) for entry in self._peers.items()],
            "gone": sorted(self._gone),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a roster of the same world."""
        self.has_started = state["has_started"]
        self.without_state, self.finished = frozenset(state["without_state"]), frozenset(state["finished"])
        self._peers, self._gone = dict(state["peers"]), set(state["gone"])
        self._update()
