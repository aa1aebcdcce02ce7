"""Starts a process again that is killed, until it ends by itself.

What has to survive (listening sockets, open files) is opened before, and inherited by every child: so it is
there for as long as one of them or the supervisor lives. A child whose supervisor is killed just goes on.

This module never imports torch, starts no thread, and never looks at what its child does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

DEATHS_MAX: Final = 10  # in a row without any progress; a job that is killed on purpose rarely gets more


def supervise(serve: Callable[[], None], progress: Callable[[], object], *, name: str) -> int:
    """Runs `serve` in a child process, and in another one whenever that is killed by a signal.

    Returns in the supervisor and, once `serve` has returned, in the child: the caller ends either process
    with what this returns. A child that raises has ended by itself, and is not started again: an error of its
    own would only come again.

    Args:
        serve: what is to be done; finds its state in what it inherits.
        progress: something that is different whenever the child has got any further.
        name: for messages to people.

    Returns:
        The exit code for this process.
    """
    deaths = 0
    while True:
        before = progress()
        child = os.fork()
        if not child:
            serve()
            return 0
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0:
            return code
        deaths = 1 if progress() != before else deaths + 1
        cause = f"{name} (process {child}) was ended by a signal: {signal.strsignal(-code)}"
        if deaths == DEATHS_MAX:
            _say(f"{cause}; that was {deaths} times without getting any further, it is not started again")
            return 1
        _say(f"{cause}; it is started again")


def _say(line: str) -> None:
    with suppress(OSError):  # whoever read that may have ended
        print(line, file=sys.stderr, flush=True)
