"""Memory for arrays, taken again when nobody has the array any more: it is in place, and in the cache.

Fresh memory costs more than what is written into it: the system clears each page as it is touched.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_MIN_BYTES: Final = 128 * 1024  # smaller ones the allocator takes again by itself
_BYTES_MAX: Final = 256 * 1024 * 1024
_UNUSED: Final = (
    3  # references to a buffer of which there is no array: the list's, the loop's, and the call's
)


class Buffers:
    """The buffers of one owner, 256 MiB of them at most; of one thread."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[NDArray[np.uint8]]] = {}  # by the bits of their length
        self._bytes = 0

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array whose values are anything."""
        size = math.prod(shape) * dtype.itemsize
        if size < _MIN_BYTES:
            return np.empty(shape, dtype)
        buffers = self._buffers.setdefault(size.bit_length(), [])
        for buffer in buffers:
            if size <= buffer.nbytes and sys.getrefcount(buffer) == _UNUSED:
                return buffer[:size].view(dtype).reshape(shape)
        buffer = np.empty(size, np.uint8)
        if self._bytes + size <= _BYTES_MAX:
            buffers.append(buffer)
            self._bytes += size
        return buffer.view(dtype).reshape(shape)
