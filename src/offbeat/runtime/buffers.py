"""Memory for arrays, taken again when nobody has the array any more: it is in place, and in the cache.

Fresh memory costs more than what is written into it: the system clears each page as it is touched.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.numerics.memory import page_aligned

Buffer = NDArray[np.uint8]

_MIN_BYTES: Final = 128 * 1024  # smaller ones the allocator takes again by itself
_BYTES_MAX: Final = 256 * 1024 * 1024
_UNUSED: Final = (
    3  # references to a buffer of which there is no array: the list's, the loop's, and the call's
)


class Buffers:
    """The buffers of one owner, 256 MiB of them at most; of one thread.

    Args:
        allocate: returns so many bytes of memory, whatever is in them.
        is_read: whether somebody may still read a buffer of which there is no array any more.
    """

    def __init__(
        self,
        allocate: Callable[[int], Buffer] = page_aligned,
        is_read: Callable[[Buffer], bool] = lambda buffer: False,
    ) -> None:
        self._allocate, self._is_read = allocate, is_read
        self._buffers: dict[int, list[Buffer]] = {}  # by the bits of their length
        self._bytes = 0

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array whose values are anything."""
        size = math.prod(shape) * dtype.itemsize
        if size < _MIN_BYTES:
            return np.empty(shape, dtype)
        buffers = self._buffers.setdefault(size.bit_length(), [])
        for buffer in buffers:
            is_unused = size <= buffer.nbytes and sys.getrefcount(buffer) == _UNUSED
            if is_unused and not self._is_read(buffer):
                return buffer[:size].view(dtype).reshape(shape)
        buffer = self._allocate(size)
        if self._bytes + size <= _BYTES_MAX:
            buffers.append(buffer)
            self._bytes += size
        return buffer.view(dtype).reshape(shape)
