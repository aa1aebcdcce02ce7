"""How many bytes of requests may be under way at once, and the requests that wait until there is room.

A server keeps what was pushed until all replicas have it, and what was pulled until the client has received
it. A client that does not wait for its requests makes them keep less than a limit all the same: a request is
*admitted* when there is room for it, else it is *held* in the client. Nothing here sends or waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

REQUEST_BYTES: Final = 512  # what a request costs a server besides its numbers, roughly


class Window:
    """Bytes of requests that are not answered, up to a limit.

    Each request is of an *account*. A request is admitted when that makes no more than `bytes_max` bytes, or
    when no other request of its account is under way: so a larger one goes alone, and requests of one account
    never wait for those of others to be answered. Those of one account are admitted in their order.

    `admit` and `has_room` may be called by any thread, everything else by one.

    Args:
        bytes_max: of all requests that are under way, as far as none goes alone in its account.

    Attributes:
        bytes_max: as given.
        unacked_bytes: of all requests that are under way.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max, self.unacked_bytes = bytes_max, 0
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}  # of requests under way, by account
        self._held: dict[str, deque[tuple[int, Any]]] = {}  # bytes and requests, by account

    @property
    def holds(self) -> bool:
        """Whether any request is held."""
        return bool(self._held)

    def has_room(self, account: str, size_bytes: int) -> bool:
        """Whether a request would be admitted now."""
        return account not in self._held and self._fits(account, size_bytes)

    def admit(self, account: str, size_bytes: int) -> bool:
        """Admit a request if there is room for it and none of its account is held; return whether it was."""
        with self._lock:
            if account in self._held or not self._fits(account, size_bytes):
                return False
            self._add(account, size_bytes)
            return True

    def hold(self, account: str, size_bytes: int, request: Any) -> None:
        """Keep a request until there is room for it, behind those of its account that are held already."""
        with self._lock:
            self._held.setdefault(account, deque()).append((size_bytes, request))

    def drop(self, account: str, request: Any) -> bool:
        """Keep a request no longer; return whether it was held."""
        with self._lock:
            held = self._held.get(account, deque())
            entry = next((one for one in held if one[1] is request), None)
            if entry is None:
                return False
            held.remove(entry)
            if not held:
                del self._held[account]
            return True

    def release(self, account: str, size_bytes: int, count: int = 1) -> None:
        """Some requests that were admitted have been answered, or will not be."""
        with self._lock:
            self.unacked_bytes -= size_bytes
            self._counts[account] -= count
            if not self._counts[account]:
                del self._counts[account]

    def admit_held(self) -> Iterator[Any]:
        """Yield those that are held for which there is room now; each is admitted when it is yielded."""
        for account in list(self._held):
            while (request := self._next(account)) is not None:
                yield request

    def _next(self, account: str) -> Any | None:
        with self._lock:
            held = self._held.get(account)
            if not held or not self._fits(account, held[0][0]):
                return None
            size_bytes, request = held.popleft()
            if not held:
                del self._held[account]
            self._add(account, size_bytes)
            return request

    def _fits(self, account: str, size_bytes: int) -> bool:
        return self.unacked_bytes + size_bytes <= self.bytes_max or account not in self._counts

    def _add(self, account: str, size_bytes: int) -> None:
        self.unacked_bytes += size_bytes
        self._counts[account] = self._counts.get(account, 0) + 1
