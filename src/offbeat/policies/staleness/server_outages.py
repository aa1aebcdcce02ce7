"""Outages between workers and parameter servers, as reported; a component of policies on a parameter server.

It refuses no one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, Final

UNREACHABLE_S: Final = 15.0  # longer than the manager needs to exclude one of two servers that are apart


class ServerOutages:
    """Finds the worker that misses most servers, each for more than `UNREACHABLE_S`.

    A server that more than half of the processes miss counts against no worker.
    """

    def __init__(self) -> None:
        self._missed_since_s: dict[tuple[int, int], float] = {}  # by worker and server

    def on_unreachable(self, worker: int, server: int, now_s: float) -> None:
        """Record an outage; a repeated report changes nothing."""
        self._missed_since_s.setdefault((worker, server), now_s)

    def on_reachable(self, worker: int, server: int) -> None:
        """Withdraw an outage."""
        self._missed_since_s.pop((worker, server), None)

    def forget(self, worker: int) -> None:
        """Drop the outages of a worker that is gone."""
        self._missed_since_s = {
            pair: since_s for pair, since_s in self._missed_since_s.items() if pair[0] != worker
        }

    def restart_timers(self, now_s: float) -> None:
        """Let all outages begin now."""
        self._missed_since_s = dict.fromkeys(self._missed_since_s, now_s)

    def least_connected(
        self, now_s: float, workers: Collection[int], processes: int
    ) -> tuple[int, list[int]] | None:
        """Return which of these workers misses most servers, else the last one, with the servers.

        Args:
            now_s: the time.
            workers: workers that others need.
            processes: how many there are; one reports for all its workers.
        """
        missing = Counter(server for _, server in self._missed_since_s)
        unreachable: dict[int, list[int]] = {}
        for (worker, server), since_s in sorted(self._missed_since_s.items()):
            is_held_against = 2 * missing[server] <= processes
            if worker in workers and is_held_against and now_s - since_s > UNREACHABLE_S:
                unreachable.setdefault(worker, []).append(server)
        if not unreachable:
            return None
        worker = max(unreachable, key=lambda entry: (len(unreachable[entry]), entry))
        return worker, unreachable[worker]

    def state_dict(self) -> list[list[Any]]:
        """Return the whole state as plain data."""
        return [[*pair, since_s] for pair, since_s in self._missed_since_s.items()]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Restore a `state_dict`."""
        self._missed_since_s = {(worker, server): since_s for worker, server, since_s in state}
