"""Threads of which one runs at a time: a seed says which, so that a run can be repeated."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

LIMIT_S = 60.0
_SWITCH_SHARE = 0.2


class Turns:
    """Passes the turn between the thread that makes this object and those that it starts.

    Args:
        seed: of the choices.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"turns {seed}")
        self._wakes = {threading.get_ident(): threading.Semaphore(0)}
        self._first = threading.get_ident()
        self._error: BaseException | None = None

    def start(self, run: Callable[[], object]) -> None:
        """Starts a thread, which runs when it gets its turn; the first thread raises its error."""
        wake = threading.Semaphore(0)

        def work() -> None:
            assert wake.acquire(timeout=LIMIT_S), "a thread never got its turn"
            try:
                run()
            except BaseException as error:
                self._error = self._error or error
            del self._wakes[threading.get_ident()]
            self._choose().release()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert thread.ident is not None
        self._wakes[thread.ident] = wake

    def maybe_switch(self) -> None:
        """Lets another thread run now and then."""
        if self._random.random() < _SWITCH_SHARE:
            self._switch()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Lets others run until a condition holds."""
        while not condition():
            assert len(self._wakes) > 1, "all other threads have ended, and this one still waits"
            self._switch()

    def end(self) -> None:
        """Waits until all threads have ended."""
        self.wait_until(lambda: len(self._wakes) == 1)

    def _switch(self) -> None:
        mine, chosen = self._wakes[threading.get_ident()], self._choose()
        if chosen is not mine:
            chosen.release()
            assert mine.acquire(timeout=LIMIT_S), "this thread got no turn again"
        if self._error is not None and threading.get_ident() == self._first:
            raise self._error

    def _choose(self) -> threading.Semaphore:
        """The next thread: the first one if there is an error to raise."""
        return self._wakes[self._first] if self._error else self._random.choice([*self._wakes.values()])
