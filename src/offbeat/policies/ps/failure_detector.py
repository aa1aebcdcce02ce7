"""Which nodes of a parameter server are lost although their processes are not known to be closed.

Nothing here knows what a server holds, or acts on what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

SILENT_S: Final = 10.0  # as long as a worker may be silent


class Verdict(NamedTuple):
    """A node is lost, and why, as one clause."""

    node: str
    cause: str


class FailureDetector:
    """Judges silences by one clock, that of the coordinator's events, and by one rule.

    - A node from which the coordinator has received nothing for `silent_s` is lost.
    - Of two servers that the coordinator hears and that have not reached each other for `silent_s`, one is
      lost: the one that is apart from more servers, else the later id.
    - No server is lost by these rules while it has the last copy of something; of two that are apart, the
      other one is lost then, if it may be. It *stands*: requests for what it has wait for it.
    - While the coordinator hears nothing of more than half of the servers, it takes itself for the one that
      is cut off, and nobody is lost. Silences count from the end of that time then.

    A closed process is not judged here: whoever sees it closed says so.

    Args:
        silent_s: seconds.

    Raises:
        ValueError: they are not positive.
    """

    def __init__(self, silent_s: float = SILENT_S) -> None:
        if not silent_s > 0:
            raise ValueError(f"expected silent_s of more than 0 s, got {silent_s}")
        self._silent_s = silent_s
        self._silent: dict[str, float] = {}  # nodes: since when
        self._apart: dict[tuple[str, str], tuple[float, str]] = {}  # reporter and server: since when, and why
        self._counts_from_s = float("-inf")

    def on_silent(self, node: str, since_s: float) -> None:
        """The coordinator has received nothing from a node since then."""
        self._silent[node] = since_s

    def on_heard(self, node: str, now_s: float) -> None:
        """The coordinator receives something again, and others may need a moment more for that."""
        if self._silent.pop(node, None) is not None:
            for pair, (_, cause) in self._apart.items():
                if node in pair:
                    self._apart[pair] = now_s, cause

    def on_missed(self, reporter: str, server: str, now_s: float, cause: str) -> None:
        """A server receives nothing from another one."""
        self._apart.setdefault((reporter, server), (now_s, cause))

    def on_reached(self, reporter: str, server: str) -> None:
        """A server receives something again from another one."""
        self._apart.pop((reporter, server), None)

    def forget(self, node: str) -> None:
        """A node is gone."""
        self._silent.pop(node, None)
        self._apart = {pair: found for pair, found in self._apart.items() if node not in pair}

    def is_silent(self, node: str) -> bool:
        """Whether the coordinator has received nothing from a node for a while."""
        return node in self._silent

    def is_cut_off(self, servers: Collection[str]) -> bool:
        """Whether the coordinator hears nothing of more than half of the servers."""
        return 2 * sum(server in self._silent for server in servers) > len(servers)

    def next_lost(
        self, now_s: float, servers: Collection[str], may_lose: Callable[[str], bool]
    ) -> Verdict | None:
        """Return a node that is lost now, which is to be forgotten before the next one is asked for.

        Args:
            now_s: seconds.
            servers: all that are there.
            may_lose: whether all that a server has is with another one, too, that is not silent.
        """
        if self.is_cut_off(servers):
            self._counts_from_s = now_s
            return None
        return self._next_silent(now_s, servers, may_lose) or self._next_apart(now_s, servers, may_lose)

    def standing(self, now_s: float, servers: Collection[str]) -> dict[str, str]:
        """Return the servers that have been silent, or apart, for too long, and why they stand."""
        found: dict[str, str] = {}
        why = (
            "more than half of the servers are not heard, so nobody is taken for lost"
            if self.is_cut_off(servers)
            else "it has the last copy of something"
        )
        for server in sorted(servers, key=_id):
            since_s = self._silent.get(server)
            if since_s is not None and now_s - since_s >= self._silent_s:
                found[server] = f"{server} is not heard, and is waited for: {why}"
        for pair in self._overdue_pairs(now_s, servers):
            one, other = sorted(pair, key=_id)
            both = f"{one} and {other} do not reach each other, and both stay"
            found.setdefault(one, f"{both}: each has the last copy of something")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "silent": dict(self._silent),
            "apart": [[*pair, since_s, cause] for pair, (since_s, cause) in self._apart.items()],
            "counts_from_s": None if self._counts_from_s == float("-inf") else self._counts_from_s,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a detector with the same arguments."""
        self._silent = dict(state["silent"])
        self._apart = {(one, other): (since_s, cause) for one, other, since_s, cause in state["apart"]}
        counts_from_s = state["counts_from_s"]
        self._counts_from_s = float("-inf") if counts_from_s is None else counts_from_s

    def _next_silent(
        self, now_s: float, servers: Collection[str], may_lose: Callable[[str], bool]
    ) -> Verdict | None:
        for node, since_s in self._silent.items():
            if self._is_overdue(now_s, since_s) and (node not in servers or may_lose(node)):
                return Verdict(node, f"nothing was heard of it for {now_s - since_s:.1f} s")
        return None

    def _next_apart(
        self, now_s: float, servers: Collection[str], may_lose: Callable[[str], bool]
    ) -> Verdict | None:
        pairs = self._overdue_pairs(now_s, servers)
        apart_from = self._counts(servers)
        for pair in sorted(pairs, key=lambda pair: max(apart_from[one] for one in pair), reverse=True):
            one, other = sorted(pair, key=lambda one: (apart_from[one], _id(one)))
            for lost, stays in ((other, one), (one, other)):
                if may_lose(lost):
                    since_s, cause = pairs[pair]
                    how_long = f"have not reached each other for {now_s - since_s:.1f} s"
                    which = f"{lost} is apart from {apart_from[lost]} and {stays} from {apart_from[stays]}"
                    return Verdict(lost, f"{lost} and {stays} {how_long}, and {which}: {cause}")
        return None

    def _is_overdue(self, now_s: float, since_s: float) -> bool:
        return now_s - max(since_s, self._counts_from_s) >= self._silent_s

    def _pairs(self, servers: Collection[str]) -> dict[frozenset[str], tuple[float, str]]:
        """Two servers that are heard and apart: since when, and why, by the earlier of their reports."""
        found: dict[frozenset[str], tuple[float, str]] = {}
        for pair, why in self._apart.items():
            if all(one in servers and one not in self._silent for one in pair):
                key = frozenset(pair)
                found[key] = min(why, found.get(key, why))
        return found

    def _overdue_pairs(
        self, now_s: float, servers: Collection[str]
    ) -> dict[frozenset[str], tuple[float, str]]:
        return {pair: why for pair, why in self._pairs(servers).items() if self._is_overdue(now_s, why[0])}

    def _counts(self, servers: Collection[str]) -> dict[str, int]:
        """From how many others each server is apart."""
        pairs = self._pairs(servers)
        return {server: sum(server in pair for pair in pairs) for server in servers}


def _id(server: str) -> int:
    return int(server.rpartition("-")[2])
