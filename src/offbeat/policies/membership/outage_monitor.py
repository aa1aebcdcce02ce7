"""Exclusion of workers that cannot reach each other or the coordinator; a component of group policies.

It begins no change of the group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offbeat.events import PeerReachable, PeerUnreachable
from offbeat.policies.membership.current_group import CurrentGroup
from offbeat.policies.membership.reachability import Reachability
from offbeat.policies.membership.worker_table import WorkerTable

_GATHER_S = 0.25  # reports of one outage arrive within this time


class OutageMonitor:
    """Marks workers as unreachable, so that all others can reach each other and the coordinator.

    Reports are gathered for 0.25 s before a member is excluded; a worker outside the group is excluded, and
    an excluded one admitted again, at once. While more than half of the members are silent, the coordinator
    is on the side of the minority, and nothing is decided: until at least half are received again, or the
    silent members are lost.

    Args:
        workers: the workers, of which it sets `unreachable` and `is_silent_since_exclusion`.
        group: the group.

    Attributes:
        is_isolated: most members are silent.
    """

    def __init__(self, workers: WorkerTable, group: CurrentGroup) -> None:
        self._workers, self._group = workers, group
        self._reachability = Reachability()
        self._reported_s: float | None = None  # the first report since exclusions were last decided
        self.is_isolated = False

    def on_report(self, event: PeerUnreachable | PeerReachable) -> bool:
        """Record a report; return False if it crossed the Lost, Failed or Left of one of the two."""
        known = self._workers.statuses
        if event.peer not in known or (event.worker not in known and event.worker is not None):
            return False
        self._reachability.on_report(event)
        if isinstance(event, PeerUnreachable) and self._reported_s is None:
            self._reported_s = event.now_s
        return True

    def forget(self, worker: int) -> None:
        """Drop the reports of a worker that is gone."""
        self._reachability.forget(worker)

    def update(self) -> bool:
        """Update which excluded workers can return, and which outside cannot; return whether any changed."""
        self.is_isolated = self._are_most_silent()
        if self.is_isolated:
            return False
        unreachable = self._workers.unreachable
        if not (self._reachability or unreachable):
            self._reported_s = None
            return False
        members = self._settled_members() - unreachable
        out = self._reachability.outside_exclusions(members, self._workers.statuses.keys() - members)
        return self._workers.set_unreachable(
            {worker for worker in out if worker in unreachable or worker not in self._group.halt_recipients},
            out,
        )

    def is_exclusion_due(self, now_s: float) -> bool:
        """Whether reports have been gathered for long enough to exclude members."""
        if self._reported_s is None or now_s - self._reported_s < _GATHER_S:
            return False
        return bool(self._group.generation) or self._have_all_begun()

    def exclude(self) -> bool:
        """Decide which workers to exclude; return whether any changed."""
        self._reported_s = None
        members = self._settled_members()
        out = self._reachability.exclusions(members, self._workers.statuses.keys() - members)
        for worker in out.keys() & self._group.halt_recipients:
            self._workers.statuses[worker].is_silent_since_exclusion = True
        return self._workers.set_unreachable(set(out), out)

    def readmit(self, workers: Iterable[int], now_s: float) -> None:
        """Admit excluded workers because nobody else holds the state; their outages are judged again."""
        self._workers.unreachable.difference_update(workers)
        self._reported_s = now_s

    def _have_all_begun(self) -> bool:
        """Whether every member of the first group has been Ready; before that it may lack the state."""
        statuses = self._workers.statuses
        known = [statuses[member] for member in self._group.members if member in statuses]
        return all(status.round >= 0 or status.has_finished for status in known)

    def _settled_members(self) -> set[int]:
        """Return the working members; a worker outside joins only if it can reach all of them."""
        up = {
            worker
            for worker, status in self._workers.statuses.items()
            if not (status.is_hung or status.is_late)
        }
        return (up & self._group.halt_recipients) - self._group.joining

    def _are_most_silent(self) -> bool:
        """Whether most of the workers that were members when they were last received are silent."""
        silent, statuses = self._reachability.silent_workers, self._workers.statuses
        if not silent:
            return False
        missed = {
            worker for worker in silent if worker in statuses and statuses[worker].is_silent_since_exclusion
        }
        present = {member for member in self._group.members if member in statuses} | missed
        return 2 * len(present & silent) > len(present)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, without that of workers and group."""
        return {
            "reachability": self._reachability.state_dict(),
            "reported_s": self._reported_s,
            "is_isolated": self.is_isolated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._reachability.load_state_dict(state["reachability"])
        self._reported_s, self.is_isolated = state["reported_s"], state["is_isolated"]
