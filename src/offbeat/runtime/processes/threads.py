"""Starts every thread of the library: what one of them raises always has a receiver.

A thread that dies of an exception dies alone: Python prints a traceback, and what others wait for never
comes. So no thread is started without the one who is to be told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_thread(
    name: str, run: Callable[[], object], on_failure: Callable[[BaseException], object]
) -> threading.Thread:
    """Starts a daemon thread and returns it.

    Args:
        name: of the thread, as debuggers and error messages show it.
        run: what it does.
        on_failure: called in the thread with what `run` has raised; makes whoever waits for the thread fail.
    """

    def run_or_report() -> None:
        try:
            run()
        except BaseException as error:
            on_failure(error)

    thread = threading.Thread(target=run_or_report, name=name, daemon=True)
    thread.start()
    return thread
