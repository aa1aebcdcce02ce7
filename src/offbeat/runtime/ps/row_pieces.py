"""The pieces in which neighbouring rows travel between a client and the servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from offbeat.numerics.ps.entries import Entries, Keys

# Neighbouring rows travel in pieces. Pulled rows are copied twice, and the smaller a piece, the more of it is
# still in a cache the second time; pushes have a higher cost per piece. Over shared memory, with pieces of
# 4 and 2 MiB: 72 and 85 pulls of 64 MB a second, 126 and 112 pushes.
_PUSHED_BYTES: Final = 4 * 1024 * 1024
_PULLED_BYTES: Final = 2 * 1024 * 1024


class RowPieces:
    """Splits neighbouring rows into pieces of some MiB: a server processes one while the next is received."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[int, int]] = {}  # by namespace: keys per piece, pushed and pulled

    def set_row_bytes(self, name: str, row_bytes: int) -> None:
        """Enable splitting for a namespace, whose rows have so many bytes each."""
        self._keys[name] = max(1, _PUSHED_BYTES // row_bytes), max(1, _PULLED_BYTES // row_bytes)

    def split(
        self, name: str, content: Entries | Keys | None, first: int, last: int
    ) -> Iterable[tuple[int, int]]:
        """Split keys `first` to `last` - 1 unless keys are listed.

        Args:
            content: what is pushed, or the listed keys of a pull; None for a pull of all.
        """
        steps = self._keys.get(name)
        step = last if steps is None else steps[content is None]
        if (
            last - first <= step
            or isinstance(content, np.ndarray)
            or getattr(content, "keys", None) is not None
        ):
            return ((first, last),)
        return [(begin, min(begin + step, last)) for begin in range(first, last, step)]
