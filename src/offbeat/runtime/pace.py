"""Threads that evaluate beside the training rest where they hold it up."""

from __future__ import annotations

import threading
import time


class Pacer:
    """Sees once whether evaluating is too slow beside the training, and if so lets it rest.

    Evaluating that is slow there contends with the training, which is then as slow. What has been evaluated
    is not lost: the threads go on from where they are once the training waits for them.

    Args:
        look_after_s: when that is seen, from the first call on.
        calls_per_s_min: of torch's functions, by all threads together; fewer are too slow.
        rest_s: how long threads rest at most, once.

    Attributes:
        is_slow: it was too slow.
    """

    def __init__(self, *, look_after_s: float, calls_per_s_min: float, rest_s: float) -> None:
        self._look_after_s, self._calls_per_s_min = look_after_s, calls_per_s_min
        self._rest_s = rest_s
        self._lock = threading.Lock()
        self._calls = 0
        self._began_s: float | None = None
        self._is_free = threading.Event()
        self.is_slow = False

    def called(self) -> None:
        """A thread that evaluates is about to call a function of torch; may rest before."""
        if self._is_free.is_set():
            return
        with self._lock:
            now_s = time.perf_counter()
            self._began_s = now_s if self._began_s is None else self._began_s
            self._calls += 1
            spent_s = now_s - self._began_s
            if not self.is_slow and spent_s >= self._look_after_s:
                self.is_slow = self._calls < self._calls_per_s_min * spent_s
                if not self.is_slow:
                    self._is_free.set()
        if self.is_slow:
            self._is_free.wait(self._rest_s)
            self.go()

    def go(self) -> None:
        """Nobody rests any more, for the training waits."""
        self._is_free.set()
