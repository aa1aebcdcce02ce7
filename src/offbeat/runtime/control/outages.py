"""Log lines about peers that a worker cannot reach, which explain why training stands still."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

_log = logging.getLogger("offbeat")
_GATHER_S: Final = 0.25  # peers cut off by one outage fall silent within this time
_NAMED_MAX: Final = 8


class OutageLog:
    """Writes one line for all peers that become unreachable together, and one when they can be reached again.

    Args:
        node: the node that writes, such as "worker 2".
        call_later: calls a function after so many seconds, in the thread in which the other methods are
            called.
    """

    def __init__(self, node: str, call_later: Callable[[float, Callable[[], None]], None]) -> None:
        self._node, self._later = node, call_later
        self._unreachable: dict[str, str] = {}  # cause by peer
        self._written: set[str] = set()  # peers reported as unreachable
        self._is_due = False

    def on_unreachable(self, peer: str, cause: str) -> None:
        """Record that a peer, such as "the coordinator", cannot be reached."""
        self._unreachable.setdefault(peer, cause)
        self._schedule()

    def on_reachable(self, peer: str) -> None:
        """Record that a peer can be reached again."""
        if self._unreachable.pop(peer, None) is not None:
            self._schedule()

    def on_gone(self, peer: str) -> None:
        """Write nothing more about a peer that is gone."""
        self._unreachable.pop(peer, None)
        self._written.discard(peer)

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._later(_GATHER_S, self._write)

    def _write(self) -> None:
        self._is_due = False
        new = [peer for peer in self._unreachable if peer not in self._written]
        back = self._written - self._unreachable.keys()
        if new:
            cause = self._unreachable[new[0]]
            _log.warning(f"{self._node} cannot reach {_listed(new)}: {cause}; it keeps trying")
        if back:
            _log.warning(f"{self._node} can reach {_listed(sorted(back))} again")
        self._written = set(self._unreachable)


def _listed(peers: Iterable[str]) -> str:
    names = list(peers)
    if len(names) > _NAMED_MAX:
        return f"{', '.join(names[:_NAMED_MAX])} and {len(names) - _NAMED_MAX} more"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
