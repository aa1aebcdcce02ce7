"""Restarts a child process that is killed by a signal, until it ends by itself.

Theory of operation
-------------------

A coordinator survives being killed in this way, together with `offbeat.runtime.control.journal`:

1. The supervisor process opens what must survive: the listening sockets, the journal's files, the run log.
   It starts no thread, so that it can fork. Every child inherits these descriptors and they stay open as long
   as a child or the supervisor runs.
2. It forks a child, which runs `serve`. The child begins with `Journal.read`: a snapshot of the policies'
   state, if there is one, and the records since. Each record is an event and the actions that answered it.
   The child replays the events through the policies and checks that they give the same actions.
3. The child handles events: it adds a record for each, and flushes the journal before it sends a message
   that follows from it. So a peer never knows of a decision that the journal lacks; records lost with a
   killed child had no effect outside of it. From time to time the child replaces the journal by a snapshot.
4. If the child is killed by a signal, the supervisor forks another one: back to 2. If it exits, also because
   of an error, the supervisor exits with the same code: an error would only come again in another child.
5. The supervisor compares `progress` (for a coordinator the lengths of the journal's files) before and after
   each child, and gives up after DEATHS_MAX deaths in a row without progress.

A child whose supervisor is killed continues, and is not restarted any more.

This module never imports torch, starts no thread, and never inspects what its child does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

DEATHS_MAX: Final = 10  # in a row without progress; a job that is killed on purpose rarely gets more


def supervise(serve: Callable[[], None], progress: Callable[[], object], *, name: str) -> int:
    """Run `serve` in a child process, and in another one whenever that is killed by a signal.

    Returns in the supervisor and, once `serve` has returned, in the child: the caller ends either process
    with the returned code. A child that raises has ended by itself and is not restarted: its error would only
    come again.

    Args:
        serve: the work; finds its state in inherited descriptors.
        progress: returns a value that changes whenever the child makes progress.
        name: of the child, for messages.

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
            _report(f"{cause}; that was {deaths} times without progress, it is not started again")
            return 1
        _report(f"{cause}; it is started again")


def _report(line: str) -> None:
    with suppress(OSError):  # the reader of standard error may have ended
        print(line, file=sys.stderr, flush=True)
