"""File descriptors: checks that this process may open as many as a start needs.

A process that runs out of them later fails at an arbitrary place, and its peers only see silence. So a start
checks first, while it can still report the shortage to its peers.

This module opens nothing that it does not close at once.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from offbeat.errors import OffbeatError, describe_os_error

# Descriptors open at once, by kind. A node: the loop's epoll and pair of sockets, two listeners, the spare of
# `ConnectionAcceptor`, a connection to the coordinator or manager. A start: the lookup of a host's name, an
# import, a dial that crosses another one. A child: pipes to both its ends, and the one that reports a failed
# exec.
NODE_DESCRIPTORS: Final = 7
START_DESCRIPTORS: Final = 4
CHILD_DESCRIPTORS: Final = 6
STORE_DESCRIPTORS: Final = 2  # a client of torch's TCPStore
HOSTED_STORE_DESCRIPTORS: Final = 8  # its server; in addition, one for each worker
COORDINATOR_DESCRIPTORS: Final = (
    4  # the run log and the standard streams; in addition, a node and one for each worker
)
# Connections to other workers at a time, at least: recursive doubling, among 2**16 of them.
PEER_DESCRIPTORS: Final = 16
_NONE_LEFT: Final = (errno.EMFILE, errno.ENFILE)


def require_descriptors(needed: int) -> None:
    """Check that this process may open `needed` more files.

    Args:
        needed: how many.

    Raises:
        OffbeatError: it may not; the text gives the limit and what to do.
    """
    opened: list[int] = []
    try:
        for _ in range(needed):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if not is_out_of_descriptors(error):
            raise
        raise OffbeatError(
            f"expected {needed} more files and connections to be allowed, got {len(opened)}: "
            f"{describe_os_error(error)}"
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def is_out_of_descriptors(error: BaseException) -> bool:
    """Return whether an error means that this process, or this machine, can open no more files.

    Torch's own errors only quote the operating system's text.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NONE_LEFT
    text = str(error).lower()
    return any(os.strerror(number).lower() in text for number in _NONE_LEFT)


def descriptor_limit() -> int:
    """Return how many files this process may have open; its descriptors are below that number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if soft == resource.RLIM_INFINITY else soft


@contextmanager
def raised_descriptor_limit() -> Iterator[None]:
    """Raise the soft limit on open files to the hard limit within the context."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
