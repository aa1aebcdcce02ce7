"""Reachability between workers, as reported by workers and the coordinator; a component of policies.

It knows nothing of groups, and never decides that a worker is dead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from offbeat.events import PeerReachable, PeerUnreachable


class Reachability:
    """The outages in force: reported, not withdrawn, and not of a worker that is gone.

    Attributes:
        silent_workers: the workers from which the coordinator itself receives nothing.
    """

    def __init__(self) -> None:
        # Reporter (None: the coordinator) and peer: since when, and the cause.
        self._reports: dict[tuple[int | None, int], tuple[float, str]] = {}
        self.silent_workers: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._reports)

    def on_report(self, event: PeerUnreachable | PeerReachable) -> None:
        """Record or withdraw an outage; a repeated report changes nothing."""
        pair = (event.worker, event.peer)
        if isinstance(event, PeerUnreachable):
            self._reports.setdefault(pair, (event.now_s, event.cause))
        else:
            self._reports.pop(pair, None)
        if event.worker is None:
            self.silent_workers = {peer for worker, peer in self._reports if worker is None}

    def forget(self, worker: int) -> None:
        """Drop all reports by a worker and about it, because it is gone."""
        self._reports = {pair: report for pair, report in self._reports.items() if worker not in pair}
        self.silent_workers.discard(worker)

    def restart_timers(self, worker: int, now_s: float) -> None:
        """Restart the timers of a worker's outages."""
        for (reporter, peer), (_, cause) in list(self._reports.items()):
            if reporter is not None and worker in (reporter, peer):
                self._reports[reporter, peer] = (now_s, cause)

    def oldest_outage(self) -> tuple[float, int, int, str] | None:
        """Return the oldest outage between two workers neither of which is silent towards the coordinator.

        Returns:
            Since when in seconds, the reporter, the peer, and the cause; None if there is none.
        """
        found = [
            (since_s, worker, peer, cause)
            for (worker, peer), (since_s, cause) in self._reports.items()
            if worker is not None and worker not in self.silent_workers and peer not in self.silent_workers
        ]
        return min(found, default=None)

    def exclusions(self, members: Iterable[int], outside: Iterable[int]) -> dict[int, str]:
        """Return the workers to exclude so that all the rest can reach each other, each with the reason.

        First every worker that is silent towards the coordinator. Then, one after the other, the member that
        most of the remaining members cannot reach (of two such, the one with the higher id). Then those of
        `outside` that `outside_exclusions` returns.

        Args:
            members: workers that are preferred to `outside`.
            outside: workers that take part too if they can reach all members.
        """
        out: dict[int, str] = {}
        kept = set(members)
        for worker in sorted(kept & self.silent_workers):
            kept.discard(worker)
            out[worker] = self._reason(None, worker)
        reporters_of = self._reporters_of(kept)
        while reporters_of:
            worker = max(reporters_of, key=lambda peer: (len(reporters_of[peer]), peer))
            out[worker] = self._reason(min(reporters_of[worker]), worker)
            kept.discard(worker)
            reporters_of = self._reporters_of(kept)
        return out | self.outside_exclusions(kept, outside)

    def outside_exclusions(self, members: Iterable[int], outside: Iterable[int]) -> dict[int, str]:
        """Return those of `outside` that cannot reach all members, each with the reason.

        They are checked in the order of their ids; each that can counts as a member for those after it.
        """
        out: dict[int, str] = {}
        kept, pairs = set(members), self._pairs()
        for worker in sorted(outside):
            reason = self._obstacle(worker, kept, pairs[worker])
            if reason is None:
                kept.add(worker)
            else:
                out[worker] = reason
        return out

    def _reporters_of(self, workers: set[int]) -> dict[int, set[int]]:
        """Return, for each worker that others of these report as unreachable, all of its reporters."""
        found: dict[int, set[int]] = defaultdict(set)
        for worker, peer in self._reports:
            if worker in workers and peer in workers:
                assert worker is not None
                found[peer].add(worker)
        return found

    def _pairs(self) -> dict[int, list[tuple[int, int]]]:
        """Return, by worker, the reports by it and about it, without the coordinator's."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for worker, peer in self._reports:
            if worker is not None:
                found[worker].append((worker, peer))
                found[peer].append((worker, peer))
        return found

    def _obstacle(self, worker: int, kept: set[int], pairs: list[tuple[int, int]]) -> str | None:
        if worker in self.silent_workers:
            return self._reason(None, worker)
        outages = [pair for pair in pairs if kept.intersection(pair)]
        return self._reason(*min(outages)) if outages else None

    def _reason(self, reporter: int | None, peer: int) -> str:
        reporter_name = "the coordinator" if reporter is None else f"worker {reporter}"
        return f"{reporter_name} cannot reach worker {peer}: {self._reports[reporter, peer][1]}"

    def state_dict(self) -> list[list[Any]]:
        """Return the whole state as plain data."""
        return [[*pair, *report] for pair, report in self._reports.items()]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Restore a `state_dict`."""
        self._reports = {(worker, peer): (since_s, cause) for worker, peer, since_s, cause in state}
        self.silent_workers = {peer for worker, peer in self._reports if worker is None}
