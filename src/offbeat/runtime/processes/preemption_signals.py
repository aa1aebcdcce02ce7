"""Signals that announce the preemption of this process: SIGTERM and SIGUSR1.

Cluster schedulers send them some seconds or minutes before they kill the process. Nothing here ends the
process or sends a message: it records the signal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)

SignalHandler = Callable[[int, FrameType | None], Any]


class PreemptionSignals:
    """Records preemption signals of this process, from `install` to `restore`.

    The program's own handlers run afterwards; the default action, which ends the process, does not. A
    handler unknown to Python, since a C library has installed it, is left in place.

    Attributes:
        signal_name: name of the first signal that has arrived, None before that.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._pid = os.getpid()
        self._before: dict[int, SignalHandler | int] = {}
        self._is_restored = self._is_taken = False

    def install(self) -> None:
        """Install the handlers; do nothing outside the main thread, where no handler runs.

        Repeated calls have no effect.
        """
        if self._before or self._is_restored or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before is not None:
                self._before[number] = before
                signal.signal(number, self._on_signal)

    def take(self) -> str | None:
        """Return `signal_name` once, to be reported, and None after that."""
        name = None if self._is_taken else self.signal_name
        self._is_taken |= name is not None
        return name

    def restore(self) -> None:
        """Restore the program's handlers, except where it has installed others since."""
        self._is_restored = True
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_recorded = (
            os.getpid() == self._pid and not self._is_restored
        )  # else in a forked process, or called by a handler of the program
        if is_recorded and self.signal_name is None:
            self.signal_name = signal.Signals(number).name
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and not is_recorded:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
