"""How much of the time somebody holds the interpreter's lock, measured from a thread that wants it, too."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_LOOK_S: Final = 0.01
_HELD: Final = 0.5
"""Of the switch interval: who waits longer for the lock has met somebody who computes with it."""


class LockWatch:
    """Wakes up again and again; where that takes long, another thread held the lock.

    A thread that computes in Python gives the lock away only when the switch interval is over (5 ms, see
    `sys.setswitchinterval`). One that waits, or computes outside of Python, has given it away before.

    Args:
        clock: returns seconds that never go back.
        sleep: waits for so many seconds without the lock, and then takes it.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self.looks = self.held = 0
        self.is_over = threading.Event()

    def look(self) -> None:
        """Look until it is over."""
        late_s = _HELD * sys.getswitchinterval()
        while not self.is_over.is_set():
            began_s = self._clock()
            self._sleep(_LOOK_S)
            self.looks += 1
            self.held += self._clock() - began_s - _LOOK_S > late_s

    @property
    def share(self) -> float:
        """The part of the looks that found the lock held, 0 to 1; 1 where there was no time to look."""
        return self.held / self.looks if self.looks else 1.0


@contextmanager
def watched() -> Iterator[LockWatch]:
    """Watches the lock while the block runs."""
    watch = LockWatch()
    thread = threading.Thread(target=watch.look, name="offbeat watches the lock", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.is_over.set()
        thread.join()
