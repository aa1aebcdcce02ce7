"""Whether the host of a coordinator is cut off from all workers and servers, as far as it can know.

The object here is pure: no socket, no clock.
"""

from __future__ import annotations


class CutOffDetector:
    """Tells a host that is cut off from one whose workers have died.

    It counts as cut off while all workers and servers are silent and no other process reaches it, but for a
    limited time.

    Args:
        limit_s: for so many seconds at most.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._silent_since_s: float | None = None  # since when all workers and servers are silent
        self._is_reached = False  # a process has reached this host since then

    def on_reached(self) -> None:
        """Note that a process that does not take part yet has reached this host."""
        self._is_reached = True

    def on_tick(self, now_s: float, *, are_all_silent: bool) -> bool:
        """Return whether this host counts as cut off now.

        Args:
            now_s: the time, which never decreases.
            are_all_silent: nothing is received from any worker or server.
        """
        if not are_all_silent:
            self._silent_since_s, self._is_reached = None, False
            return False
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        return not self._is_reached and now_s - self._silent_since_s < self._limit_s
