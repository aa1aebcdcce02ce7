"""Which thread runs an event loop: its own one, or another that would only wait for a result of it.

On an idle core it costs some 25 microseconds to wake a thread, twice per exchange of messages. So a thread
that waits may run the loop itself meanwhile, a takeover. The loop's own thread sleeps during takeovers, and a
little longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

_TAKEOVER_GAP_S = 2e-3  # how long the loop's own thread sleeps on after a takeover: another may follow


class LoopOwnership:
    """Lets one thread at a time run a loop, and always one while any thread waits for it.

    The loop's own thread calls `begin`, `yield_to_takeovers` after an iteration where one is requested, and
    `end`. Any other thread holds `takeover_lock` from before `take_over` until after `end_takeover`.

    Args:
        wake: ends the wait of the loop's current iteration.

    Attributes:
        runner_ident: the thread that runs the loop now.
        takeover_lock: held by the thread that takes over.
        takeover_requested: a thread waits to take over.
        is_stopped: the loop is to end, which its own thread does; set by the thread that runs it.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._run_lock = threading.Lock()  # held by the thread that runs the loop
        self.takeover_lock = threading.Lock()
        self.runner_ident: int | None = None
        self._released_s = 0.0  # when the last takeover ended
        self._waiting_threads: set[int] = set()  # threads that wait while another one has taken over
        self.takeover_requested = self._thread_sleeps = self.is_stopped = False
        self._wake_lock = threading.Lock()  # released to wake the loop's own thread
        self._wake_lock.acquire()

    def begin(self) -> None:
        """Run the loop in its own thread from now on."""
        self._run_lock.acquire()
        self.runner_ident = threading.get_ident()

    def yield_to_takeovers(self) -> None:
        """Let other threads run the loop, until none has for a while."""
        own = self.runner_ident
        self._run_lock.release()
        self._sleep_during_takeovers()
        self._run_lock.acquire()
        self.runner_ident = own

    def end(self) -> None:
        """Run the loop no more: it has ended."""
        self._run_lock.release()

    def wait_during_takeover(self, wait: Callable[[float], bool], timeout_s: float) -> bool:
        """Wait in a thread that cannot take over, while others run the loop; return what `wait` returns."""
        self._waiting_threads.add(threading.get_ident())
        try:
            return wait(timeout_s)
        finally:
            self._waiting_threads.discard(threading.get_ident())

    def take_over(self, timeout_s: float) -> bool:
        """Take the loop over from its thread, after the current iteration; return whether that succeeded."""
        if not self._run_lock.acquire(blocking=False):
            self.takeover_requested = True
            self._wake()
            is_acquired = self._run_lock.acquire(timeout=timeout_s)
            self.takeover_requested = False
            if not is_acquired:
                return False
        self.runner_ident = threading.get_ident()
        return True

    def end_takeover(self) -> None:
        """End a takeover, and wake the loop's own thread if it has to run the loop now."""
        self._released_s = time.monotonic()
        self.runner_ident = None
        self._run_lock.release()
        if self._thread_sleeps or self._waiting_threads or self.is_stopped:
            self._thread_sleeps = False
            with suppress(RuntimeError):  # woken before, and not running yet
                self._wake_lock.release()

    def _sleep_during_takeovers(self) -> None:
        """Sleep until no thread has taken over for a while, or this one is woken."""
        while self.takeover_requested or not (self._waiting_threads or self.is_stopped):
            released_s = self._released_s
            self._wake_lock.acquire(timeout=_TAKEOVER_GAP_S)
            if self.takeover_requested or self._released_s != released_s:
                continue  # a takeover is about to begin, or one has ended and another may follow
            if not self._run_lock.locked():
                break
            self._thread_sleeps = True
            if self._run_lock.locked():  # else the takeover may have ended without waking this thread
                self._wake_lock.acquire()
