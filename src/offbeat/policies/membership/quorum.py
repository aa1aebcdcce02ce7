"""The size of a quorum, as users give it: a number of workers, or all but some."""

from __future__ import annotations

import re

_ALL_BUT = re.compile(r"n-([1-9][0-9]*)")


def check_quorum(size: int | str) -> None:
    """Check the size of a quorum: a number of workers, or "n-1", "n-2", … of n workers.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(size, str) and not (_ALL_BUT.fullmatch(size) or size.isdecimal()):
        raise ValueError(f'expected a quorum such as 6, "n-1" or "n-2", got {size!r}')
    if not _ALL_BUT.fullmatch(str(size)) and int(size) < 1:
        raise ValueError(f"expected a quorum of at least 1 worker, got {size}")


def workers_needed(size: int | str, workers: int) -> int:
    """Return the number of workers that a quorum of this size needs, of so many: from 1 to all."""
    all_but = _ALL_BUT.fullmatch(str(size))
    needed = workers - int(all_but[1]) if all_but else int(size)
    return max(1, min(needed, workers))
