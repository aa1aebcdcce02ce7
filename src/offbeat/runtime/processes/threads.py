"""Starts every thread of the library, so that an exception in a thread always reaches a callback.

An uncaught exception ends only its thread: Python prints a traceback, and a thread that waits for a result of
it waits on. So no thread is started without an `on_failure`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


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
