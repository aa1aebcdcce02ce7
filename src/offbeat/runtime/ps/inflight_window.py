"""Limits the bytes of requests in flight, and queues the requests that have to wait for room.

A server keeps pushed data until all replicas have it, and pulled data until the client has received it. The
window bounds this memory also for a client that does not wait for its requests: a request is *admitted* when
there is room for it, otherwise it is *held* in the client. This module neither sends nor waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

REQUEST_BYTES: Final = 512  # approximate memory of a request on a server, without its data


class RequestWindow:
    """A limit of the bytes of unanswered requests.

    Each request belongs to an *account*. A request is admitted if the total stays within `bytes_max` bytes,
    or if no other request of its account is in flight. So a larger request goes alone, and an account never
    waits for the answers of another one. Requests of one account are admitted in order.

    `admit` and `has_room` are thread-safe, all other methods are for one thread.

    Args:
        bytes_max: the limit for all requests in flight, except for one that is alone in its account.

    Attributes:
        bytes_max: as given.
        unacked_bytes: the bytes of all requests in flight.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max, self.unacked_bytes = bytes_max, 0
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}  # requests in flight, by account
        self._held: dict[str, deque[tuple[int, Any]]] = {}  # bytes and requests, by account

    @property
    def has_held(self) -> bool:
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
        """Queue a request until there is room for it, behind held requests of its account."""
        with self._lock:
            self._held.setdefault(account, deque()).append((size_bytes, request))

    def drop(self, account: str, request: Any) -> bool:
        """Remove a held request; return whether it was held."""
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
        """Free the room of admitted requests that were answered, or will not be."""
        with self._lock:
            self.unacked_bytes -= size_bytes
            self._counts[account] -= count
            if not self._counts[account]:
                del self._counts[account]

    def admit_held(self) -> Iterator[Any]:
        """Yield held requests that there is room for now; each is admitted when it is yielded."""
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
