"""Which workers cannot reach which, as they and the coordinator report it; a part that policies own.

Nothing here knows what a group is for, and nothing here decides that a worker is dead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from offbeat.events import PeerReachable, PeerUnreachable


class Reachability:
    """The reports that stand: made, and neither taken back nor of a worker that is gone.

    Attributes:
        unheard: the workers from which the coordinator itself receives nothing.
    """

    def __init__(self) -> None:
        # Who reports (None: the coordinator) and whom: since when, and the cause.
        self._reports: dict[tuple[int | None, int], tuple[float, str]] = {}
        self.unheard: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._reports)

    def on_report(self, event: PeerUnreachable | PeerReachable) -> None:
        """Take note of a report; one that is repeated changes nothing."""
        pair = (event.worker, event.peer)
        if isinstance(event, PeerUnreachable):
            self._reports.setdefault(pair, (event.now_s, event.cause))
        else:
            self._reports.pop(pair, None)
        if event.worker is None:
            self.unheard = {peer for worker, peer in self._reports if worker is None}

    def forget(self, worker: int) -> None:
        """The worker is gone: what it reported, and what was reported of it, counts no more."""
        self._reports = {pair: what for pair, what in self._reports.items() if worker not in pair}
        self.unheard.discard(worker)

    def restart(self, worker: int, now_s: float) -> None:
        """Count the worker's outages as beginning now."""
        for (reporter, peer), (_, cause) in list(self._reports.items()):
            if reporter is not None and worker in (reporter, peer):
                self._reports[reporter, peer] = (now_s, cause)

    def oldest(self) -> tuple[float, int, int, str] | None:
        """Return the report that has stood longest between two workers that the coordinator both hears.

        Returns:
            since when, who reports, whom, and the cause; None where there is none.
        """
        found = [
            (since_s, worker, peer, cause)
            for (worker, peer), (since_s, cause) in self._reports.items()
            if worker is not None and worker not in self.unheard and peer not in self.unheard
        ]
        return min(found, default=None)

    def left_out(self, members: Iterable[int], others: Iterable[int]) -> dict[int, str]:
        """Return the workers without which all the rest can reach each other, each with the reason.

        First every worker that the coordinator does not hear. Then, one after the other, the member from
        which most of the members that are left receive nothing, the later one of two such. Then those of
        the others that `kept_out` names.

        Args:
            members: workers whose place the others take only if they can reach them.
            others: workers that take part as well if they can.
        """
        out: dict[int, str] = {}
        kept = set(members)
        for worker in sorted(kept & self.unheard):
            kept.discard(worker)
            out[worker] = self._said(None, worker)
        silent_for = self._silent_for(kept)
        while silent_for:
            worker = max(silent_for, key=lambda one: (len(silent_for[one]), one))
            out[worker] = self._said(min(silent_for[worker]), worker)
            kept.discard(worker)
            silent_for = self._silent_for(kept)
        return out | self.kept_out(kept, others)

    def kept_out(self, members: Iterable[int], others: Iterable[int]) -> dict[int, str]:
        """Return those of the others that cannot reach all members, each with the reason.

        In the order of their ids; each that can counts as a member for the ones after it.
        """
        out: dict[int, str] = {}
        kept, pairs = set(members), self._pairs()
        for worker in sorted(others):
            reason = self._why_not(worker, kept, pairs[worker])
            if reason is None:
                kept.add(worker)
            else:
                out[worker] = reason
        return out

    def _silent_for(self, workers: set[int]) -> dict[int, set[int]]:
        """Return, for each of these from which another one receives nothing, all those others."""
        found: dict[int, set[int]] = defaultdict(set)
        for worker, peer in self._reports:
            if worker in workers and peer in workers:
                assert worker is not None
                found[peer].add(worker)
        return found

    def _pairs(self) -> dict[int, list[tuple[int, int]]]:
        """Return, by worker, its reports and those of it; the coordinator's own left out."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for worker, peer in self._reports:
            if worker is not None:
                found[worker].append((worker, peer))
                found[peer].append((worker, peer))
        return found

    def _why_not(self, worker: int, kept: set[int], pairs: list[tuple[int, int]]) -> str | None:
        if worker in self.unheard:
            return self._said(None, worker)
        apart = [pair for pair in pairs if kept.intersection(pair)]
        return self._said(*min(apart)) if apart else None

    def _said(self, reporter: int | None, peer: int) -> str:
        who = "the coordinator" if reporter is None else f"worker {reporter}"
        return f"{who} cannot reach worker {peer}: {self._reports[reporter, peer][1]}"

    def state_dict(self) -> list[list[Any]]:
        """Return all of it, as plain data."""
        return [[*pair, *what] for pair, what in self._reports.items()]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Go on from a `state_dict`."""
        self._reports = {(worker, peer): (since_s, cause) for worker, peer, since_s, cause in state}
        self.unheard = {peer for worker, peer in self._reports if worker is None}
