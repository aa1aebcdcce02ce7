"""File descriptors: whether this process may open as many as a start needs, in words where it may not.

A process that runs out of them in the midst of something fails wherever it happens to be, and its peers see
silence. So a start asks before it opens anything, and says so to those that it can reach.

This module never opens anything that it does not close at once.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from offbeat.errors import OffbeatError, explain

# What is open at once, by kind. A node: the loop's epoll and pair of sockets, two listeners, the spare of
# `Opening`, a line to the coordinator or manager. A start: what looks a host's name up, an import, a dial
# that crosses another one. A child: pipes to both its ends, and the one that says why exec failed.
NODE: Final = 7
START: Final = 4
CHILD: Final = 6
STORE: Final = 2  # a client of torch's TCPStore
HOSTED_STORE: Final = 8  # its server; besides one for each worker
COORDINATOR: Final = 4  # the run log and the standard streams; besides a node and one for each worker
# To how many other workers one is connected at a time, at least: recursive doubling, among 2**16 of them.
PEERS: Final = 16
_NONE_LEFT: Final = (errno.EMFILE, errno.ENFILE)


def check(needed: int) -> None:
    """See that this process may open so many files more.

    Args:
        needed: how many.

    Raises:
        OffbeatError: it may not; says what the limit is and what to do.
    """
    opened: list[int] = []
    try:
        for _ in range(needed):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if not is_none_left(error):
            raise
        raise OffbeatError(
            f"expected {needed} more files and connections to be allowed, got {len(opened)}: {explain(error)}"
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def is_none_left(error: BaseException) -> bool:
    """Return whether an error says that this process, or this machine, can open nothing more.

    Torch's own errors only quote the operating system's.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NONE_LEFT
    text = str(error).lower()
    return any(os.strerror(number).lower() in text for number in _NONE_LEFT)


def limit() -> int:
    """Return how many files this process may have open: its descriptors are smaller than that."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if soft == resource.RLIM_INFINITY else soft


@contextmanager
def as_many_as_allowed() -> Iterator[None]:
    """In here, this process may open as many files as whoever started it could let it, to say a last word."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
