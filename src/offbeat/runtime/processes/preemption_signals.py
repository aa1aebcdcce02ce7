"""Signals that say that this process will soon be taken away: SIGTERM and SIGUSR1.

Schedulers of clusters send them some seconds or minutes before they kill. Nothing here ends anything or tells
anybody: it takes note.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)

Handler = Callable[[int, FrameType | None], Any]


class PreemptionSignals:
    """Takes note of preemption signals of this process, from `install` to `restore`.

    The handlers that the program had run as well, after that. The default, which ends the process, does not.
    A handler that Python does not know, since a C library has installed it, is left alone.

    Attributes:
        name: of the first signal that has come, None before that.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._pid = os.getpid()
        self._before: dict[int, Handler | int] = {}
        self._is_restored = False

    def install(self) -> None:
        """Begins to take note; in other threads than the main one, where no handler runs, this does nothing.

        Again is harmless.
        """
        if self._before or self._is_restored or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before is not None:
                self._before[number] = before
                signal.signal(number, self._take)

    def restore(self) -> None:
        """Puts the program's handlers back, unless it has installed others meanwhile."""
        self._is_restored = True
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:
                signal.signal(number, before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        is_for_me = (
            os.getpid() == self._pid and not self._is_restored
        )  # else a fork's, or kept by the program
        if is_for_me and self.name is None:
            self.name = signal.Signals(number).name
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and not is_for_me:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
