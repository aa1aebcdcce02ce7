"""Starts every thread of the library, so that an exception in a thread always reaches a callback.

An uncaught exception ends only its thread: Python prints a traceback, and a thread that waits for a result of
it waits on. So no thread is started without an `on_failure`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

_T = TypeVar("_T")


def start_thread(
    name: str, run: Callable[[], object], on_failure: Callable[[BaseException], object]
) -> threading.Thread:
    """Start a daemon thread and return it.

    Args:
        name: of the thread, for debuggers and error messages.
        run: the work.
        on_failure: called in the thread with the exception of `run`; must make every waiter for the thread
            fail.
    """

    def run_or_report() -> None:
        try:
            run()
        except BaseException as error:
            on_failure(error)

    thread = threading.Thread(target=run_or_report, name=name, daemon=True)
    thread.start()
    return thread


def run_with_deadline(function: Callable[[], _T], limit_s: float) -> _T:
    """Run a call that ignores Ctrl-C and may exceed its own timeout, in a thread that may be abandoned.

    A TCPStore that connects to a foreign server that sends nothing waits without a limit (torch 2.13); one
    that finds no server, twice its timeout. The thread is left running then.

    Raises:
        TimeoutError: the call had not returned at `limit_s` of the monotonic clock.
    """
    results: queue.SimpleQueue[tuple[_T, None] | tuple[None, BaseException]] = queue.SimpleQueue()
    start_thread(
        "offbeat-call",
        lambda: results.put((function(), None)),
        on_failure=lambda error: results.put((None, error)),
    )
    try:
        result, error = results.get(timeout=max(0.0, limit_s - time.monotonic()))
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast(_T, result)
