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

from offbeat.errors import WorkerError

_NUMBERS: Final = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)))
# The functions without the wrappers that look handlers up among constants, which take ten times as long.
_signals: Final[Any] = sys.modules.get("_signal", signal)
# What a thread is at that has code of these modules on its stack, of the innermost that is named here.
_MIDST: Final = {
    "torch.nn.modules.module": "in a forward pass",
    "torch.autograd": "in a backward pass",
    "torch._tensor": "in a backward pass",
    "torch.optim.optimizer": "in the optimizer's step",
    "offbeat.runtime.": "in the session",
}


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
        try:
            self._restore()
        finally:
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
        left = list(self._handlers.items())
        raised: BaseException | None = None
        while left:
            try:
                while left:
                    _signals.signal(*left[-1])
                    left.pop()
            except BaseException as error:  # of a handler that is back already
                raised = error
        if raised is not None:
            raise raised

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
        self._on_signal()


def check_between_steps(what: str, worker: int, step: int) -> None:
    """Refuses a call of the session that comes in the midst of a step, as a signal handler's or a hook's may.

    What has been interrupted is on the stack below the caller's frame: a forward or backward pass, an
    optimizer's step, or this library, which may hold a lock, wait for others, or have done half of something.

    Args:
        what: is called.
        worker, step: where.

    Raises:
        WorkerError: names what has been interrupted. Of a handler that does not catch it, the worker ends.
    """
    frame = sys._getframe(1).f_back  # whoever calls the session
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        doing = next((one for name, one in _MIDST.items() if module.startswith(name)), None)
        if doing is not None:
            raise WorkerError(
                f"{what} was called on worker {worker} in the midst of step {step + 1}, which is {doing} "
                "now: call it between steps; to save when a signal comes, use session.preempted",
                worker=worker,
                step=step,
            )
        frame = frame.f_back
