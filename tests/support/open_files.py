"""Files: how many this process has open, and blocks in which it can open few more or none."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_files(free: int, *, hard: bool = False) -> Iterator[int]:
    """In here this process can open `free` more files, unless it closes some; gives its limit.

    Args:
        free: how many; the last descriptors below the limit.
        hard: nor may it raise its limit again, here and afterwards.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1 + free
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit if hard else most))
    opened = _opened()
    kept = len(opened) - free
    for descriptor in opened[kept:]:
        os.close(descriptor)
    try:
        yield limit
    finally:
        for descriptor in opened[:kept]:
            os.close(descriptor)
        if not hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def _opened() -> list[int]:
    opened: list[int] = []
    try:
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return opened
