"""Defers signal handlers while the main thread runs code that must not be interrupted half-way.

Python runs a program's signal handlers in its main thread, between any two of its steps, and they may raise:
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
# What a thread is doing whose stack has code of these modules; the innermost frame named here decides.
_ACTIVITIES: Final = {
    "torch.nn.modules.module": "in a forward pass",
    "torch.autograd": "in a backward pass",
    "torch._tensor": "in a backward pass",
    "torch.optim.optimizer": "in the optimizer's step",
    "offbeat.runtime.": "in the session",
}


class DeferredSignals:
    """Context manager that defers the handlers of signals that usually end a program to the end of its block.

    In threads other than the main one, where no handler runs, nothing is deferred.

    Args:
        on_signal: called when a signal arrives; must not raise.

    Attributes:
        has_signal: whether a signal has arrived.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._deferred: list[tuple[int, FrameType | None]] = []

    @property
    def has_signal(self) -> bool:
        """Whether a signal has arrived."""
        return bool(self._deferred)

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _NUMBERS:
                    handler = _signals.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        _signals.signal(number, self._defer)
            except BaseException:  # raised by a handler that was not replaced yet
                self._restore()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            self._deliver()

    def _deliver(self) -> None:
        """Run the handlers of all deferred signals, in order, even if one of them raises."""
        if self._deferred:
            number, frame = self._deferred.pop(0)
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
            except BaseException as error:  # raised by a handler that is restored already
                raised = error
        if raised is not None:
            raise raised

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._deferred.append((number, frame))
        self._on_signal()


def check_between_steps(what: str, worker: int, step: int) -> None:
    """Refuse a call of the session in the middle of a step, as from a signal handler or a hook.

    The stack below the caller's frame shows what was interrupted: a forward or backward pass, an optimizer's
    step, or this library, which may hold a lock, wait for peers, or have left state half-changed.

    Args:
        what: the call.
        worker, step: where.

    Raises:
        WorkerError: names what was interrupted. If a handler does not catch it, the worker ends.
    """
    frame = sys._getframe(1).f_back  # the caller of the session
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        doing = next((one for name, one in _ACTIVITIES.items() if module.startswith(name)), None)
        if doing is not None:
            raise WorkerError(
                f"{what} was called on worker {worker} in the middle of step {step + 1}, which is {doing} "
                "now: call it between steps; to save when a signal comes, use session.preempted",
                worker=worker,
                step=step,
            )
        frame = frame.f_back
