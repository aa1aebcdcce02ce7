"""Signals that come while the main thread does what must not be broken off half-way.

Python runs a program's signal handlers in its main thread, between any two steps of it, and they may raise:
KeyboardInterrupt, for one.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

_NUMBERS: Final = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)))
# The functions without the wrappers that look handlers up among constants, which take ten times as long.
_signals: Final[Any] = sys.modules.get("_signal", signal)


class Held:
    """A block in which handlers of signals that usually end something are not run, but right after it.

    In other threads than the main one, where no handler runs, nothing is held.

    Args:
        on_signal: called when one has come; must not raise.

    Attributes:
        has_come: whether one has.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    @property
    def has_come(self) -> bool:
        """Whether a signal has come."""
        return bool(self._came)

    def __enter__(self) -> Held:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _NUMBERS:
                    handler = _signals.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        _signals.signal(number, self._take)
            except BaseException:  # raised by a handler that was still to be replaced
                self._restore()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self._deliver()

    def _deliver(self) -> None:
        """Run the handlers of what has come, in order, also behind one that raises."""
        if self._came:
            number, frame = self._came.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._deliver()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            _signals.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
        self._on_signal()
