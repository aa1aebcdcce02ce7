"""Waits: for a descriptor, and conditions and flags that an exception from a signal handler leaves usable.

Python runs signal handlers in the main thread, between any two calls, and they may raise, for instance
KeyboardInterrupt. `threading.Condition` acquires its lock in a method written in Python; if a handler raises
in there, after the call that acquires the lock, the lock stays held forever, and every thread that needs it
blocks. Here the `with` statement itself acquires the lock, and no handler runs between that and its block.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Final, TypeVar

_T = TypeVar("_T")
_RLock: Final[Any] = type(threading.RLock())


def wait_until_readable(descriptor: int | IO[bytes], timeout_s: float) -> bool:
    """Wait until a descriptor has something to read, or its end; return whether it has.

    Any descriptor: `select.select` takes none above 1023, and a process may have more files open.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000.0))


class SignalSafeCondition(_RLock):  # type: ignore[misc]
    """A reentrant lock and a condition, as `threading.Condition`."""

    def __init__(self) -> None:
        self._sleepers: deque[threading.Lock] = deque()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Release the lock until notified, and acquire it again; return whether it was notified in time."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        saved, is_woken = None, False
        try:
            saved = self._release_save()
            is_woken = sleeper.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
        finally:  # also if a handler has raised
            if saved is not None:
                self._acquire_restore(saved)
            elif not self._is_owned():
                self.acquire()
            if not is_woken:
                with suppress(ValueError):  # it was notified in between
                    self._sleepers.remove(sleeper)
        return is_woken

    def wait_for(self, condition: Callable[[], _T], timeout_s: float | None = None) -> _T:
        """Wait until the condition returns a true value; return its last value."""
        limit_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (found := condition()):
            left_s = None if limit_s is None else limit_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def notify_all(self) -> None:
        """Wake all waiting threads; to be called with the lock held."""
        while self._sleepers:
            self._sleepers.popleft().release()


class SignalSafeEvent:
    """An event that is set once, as `threading.Event`."""

    def __init__(self) -> None:
        self._changed = SignalSafeCondition()
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag and wake all waiting threads."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the flag is set; return whether it is."""
        if self._is_set:
            return True
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout_s)
