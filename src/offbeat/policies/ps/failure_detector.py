"""Failure detector of the parameter server: finds lost nodes whose processes are not known to be closed.

It does not know what a server holds, and does not act on what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

SILENCE_TIMEOUT_S: Final = 10.0  # the same as for workers


class NodeLoss(NamedTuple):
    """A lost node, and the cause as one clause."""

    node: str
    cause: str


class FailureDetector:
    """Declares silent nodes lost, by the clock of the coordinator's events.

    - A node from which the coordinator has received nothing for `silence_timeout_s` is lost.
    - Of two servers that the coordinator receives from and that have not reached each other for
      `silence_timeout_s`, one is lost: the one that cannot reach more servers, else the one with the higher
      id.
    - No server is lost by these rules while it holds the last copy of something; of two that cannot reach
      each other, the other one is lost then, if it has no last copy either. The first one stays in the
      view, and requests for its data wait for it.
    - While more than half of the servers are silent, the coordinator assumes that it is isolated itself, and
      no node is lost. Silences count from the end of that time.

    A closed process is not detected here: the process that notices the close reports it.

    Args:
        silence_timeout_s: time after which a silent node is lost, in seconds.

    Raises:
        ValueError: `silence_timeout_s` is not positive.
    """

    def __init__(self, silence_timeout_s: float = SILENCE_TIMEOUT_S) -> None:
        if not silence_timeout_s > 0:
            raise ValueError(f"expected silence_timeout_s of more than 0 s, got {silence_timeout_s}")
        self._silent_s = silence_timeout_s
        self._silent: dict[str, float] = {}  # node: since when
        self._outages: dict[tuple[str, str], tuple[float, str]] = {}  # reporter and server: since when, cause
        self._counts_from_s = float("-inf")

    def on_silent(self, node: str, since_s: float) -> None:
        """Record that the coordinator has received nothing from a node since `since_s`."""
        self._silent[node] = since_s

    def on_recovered(self, node: str, now_s: float) -> None:
        """Record that a node is received again; restart its outages, which may last a moment longer."""
        if self._silent.pop(node, None) is not None:
            for pair, (_, cause) in self._outages.items():
                if node in pair:
                    self._outages[pair] = now_s, cause

    def on_server_unreachable(self, reporter: str, server: str, now_s: float, cause: str) -> None:
        """Record that a server receives nothing from another one."""
        self._outages.setdefault((reporter, server), (now_s, cause))

    def on_server_reachable(self, reporter: str, server: str) -> None:
        """Record that a server receives from another one again."""
        self._outages.pop((reporter, server), None)

    def forget(self, node: str) -> None:
        """Drop all records of a node, because it is gone."""
        self._silent.pop(node, None)
        self._outages = {pair: found for pair, found in self._outages.items() if node not in pair}

    def is_silent(self, node: str) -> bool:
        """Whether a node is silent towards the coordinator."""
        return node in self._silent

    def is_coordinator_isolated(self, servers: Collection[str]) -> bool:
        """Whether the coordinator is isolated: more than half of the servers are silent."""
        return 2 * sum(server in self._silent for server in servers) > len(servers)

    def next_loss(
        self, now_s: float, servers: Collection[str], is_replicated: Callable[[str], bool]
    ) -> NodeLoss | None:
        """Return a node that is lost now, or None; `forget` it before the next call.

        Args:
            now_s: the current time, in seconds.
            servers: ids of all servers.
            is_replicated: whether another server that is not silent has a copy of all that a server holds.
        """
        if self.is_coordinator_isolated(servers):
            self._counts_from_s = now_s
            return None
        return self._next_silent(now_s, servers, is_replicated) or self._next_apart(
            now_s, servers, is_replicated
        )

    def retained_servers(self, now_s: float, servers: Collection[str]) -> dict[str, str]:
        """Return the servers that are past the timeout and not lost, each with the reason."""
        found: dict[str, str] = {}
        why = (
            "more than half of the servers are silent, so none is declared lost"
            if self.is_coordinator_isolated(servers)
            else "it has the last copy of something"
        )
        for server in sorted(servers, key=_id):
            since_s = self._silent.get(server)
            if since_s is not None and now_s - since_s >= self._silent_s:
                found[server] = f"{server} is silent, and requests wait for it: {why}"
        for pair in self._overdue_pairs(now_s, servers):
            one, other = sorted(pair, key=_id)
            both = f"{one} and {other} do not reach each other, and both stay"
            found.setdefault(one, f"{both}: each has the last copy of something")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "silent": dict(self._silent),
            "outages": [[*pair, since_s, cause] for pair, (since_s, cause) in self._outages.items()],
            "counts_from_s": None if self._counts_from_s == float("-inf") else self._counts_from_s,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a detector with the same arguments."""
        self._silent = dict(state["silent"])
        self._outages = {(one, other): (since_s, cause) for one, other, since_s, cause in state["outages"]}
        counts_from_s = state["counts_from_s"]
        self._counts_from_s = float("-inf") if counts_from_s is None else counts_from_s

    def _next_silent(
        self, now_s: float, servers: Collection[str], is_replicated: Callable[[str], bool]
    ) -> NodeLoss | None:
        for node, since_s in self._silent.items():
            if self._is_overdue(now_s, since_s) and (node not in servers or is_replicated(node)):
                return NodeLoss(node, f"nothing was received from it for {now_s - since_s:.1f} s")
        return None

    def _next_apart(
        self, now_s: float, servers: Collection[str], is_replicated: Callable[[str], bool]
    ) -> NodeLoss | None:
        pairs = self._overdue_pairs(now_s, servers)
        counts = self._counts(servers)
        for pair in sorted(pairs, key=lambda pair: max(counts[server] for server in pair), reverse=True):
            server, other = sorted(pair, key=lambda server: (counts[server], _id(server)))
            for lost, stays in ((other, server), (server, other)):
                if is_replicated(lost):
                    since_s, cause = pairs[pair]
                    how_long = f"have not reached each other for {now_s - since_s:.1f} s"
                    which = (
                        f"{lost} cannot reach {counts[lost]} of the servers and "
                        f"{stays} cannot reach {counts[stays]}"
                    )
                    return NodeLoss(lost, f"{lost} and {stays} {how_long}, and {which}: {cause}")
        return None

    def _is_overdue(self, now_s: float, since_s: float) -> bool:
        return now_s - max(since_s, self._counts_from_s) >= self._silent_s

    def _pairs(self, servers: Collection[str]) -> dict[frozenset[str], tuple[float, str]]:
        """Return pairs of servers that cannot reach each other: the time and cause of the earlier report."""
        found: dict[frozenset[str], tuple[float, str]] = {}
        for pair, why in self._outages.items():
            if all(one in servers and one not in self._silent for one in pair):
                key = frozenset(pair)
                found[key] = min(why, found.get(key, why))
        return found

    def _overdue_pairs(
        self, now_s: float, servers: Collection[str]
    ) -> dict[frozenset[str], tuple[float, str]]:
        return {pair: why for pair, why in self._pairs(servers).items() if self._is_overdue(now_s, why[0])}

    def _counts(self, servers: Collection[str]) -> dict[str, int]:
        """Return, for each server, how many others it cannot reach."""
        pairs = self._pairs(servers)
        return {server: sum(server in pair for pair in pairs) for server in servers}


def _id(server: str) -> int:
    return int(server.rpartition("-")[2])
