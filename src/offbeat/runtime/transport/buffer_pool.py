"""Pooled memory for arrays, reused once no array refers to it, when it is still mapped and in the cache.

Fresh memory costs more than the writes to it: the system clears each page on first access.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.numerics.ps.memory import allocate_page_aligned

Buffer = NDArray[np.uint8]

_MIN_BYTES: Final = 128 * 1024  # the allocator reuses smaller ones by itself
_POOL_BYTES_MAX: Final = 256 * 1024 * 1024


def _reference_counts(buffers: list[Buffer]) -> list[int]:
    """Return each buffer's reference count, which includes the references made here."""
    return [sys.getrefcount(buffer) for buffer in buffers]


(_UNUSED_COUNT,) = _reference_counts([np.empty(1, np.uint8)])  # the count of a buffer without an array


class BufferPool:
    """One owner's pool of buffers; for one thread.

    Args:
        allocate: returns the given number of bytes of memory, with any content.
        is_read: whether another process may still read a buffer without an array.
        bytes_min: arrays below this size have memory of their own, that of numpy.
        bytes_max: the size of the pool; what does not fit is freed once no array refers to it.
    """

    def __init__(
        self,
        allocate: Callable[[int], Buffer] = allocate_page_aligned,
        is_read: Callable[[Buffer], bool] = lambda buffer: False,
        *,
        bytes_min: int = _MIN_BYTES,
        bytes_max: float = _POOL_BYTES_MAX,
    ) -> None:
        self._allocate, self._is_read = allocate, is_read
        self._bytes_min, self._bytes_max = bytes_min, bytes_max
        self._buffers: dict[int, list[Buffer]] = {}  # by the bit length of their size
        self._pooled_bytes = 0

    def allocate_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialised array."""
        size = math.prod(shape) * dtype.itemsize
        if size < self._bytes_min:
            return np.empty(shape, dtype)
        buffers = self._buffers.setdefault(size.bit_length(), [])
        for index in self._unused(buffers):
            if size <= buffers[index].nbytes:
                return buffers[index][:size].view(dtype).reshape(shape)
        if size <= self._bytes_max:
            self._make_room(size)
        buffer = self._allocate(size)
        if self._pooled_bytes + size <= self._bytes_max:
            buffers.append(buffer)
            self._pooled_bytes += size
        return buffer.view(dtype).reshape(shape)

    def _unused(self, buffers: list[Buffer]) -> Iterator[int]:
        """Yield the indices of buffers that have no array and no reader."""
        for index, count in enumerate(_reference_counts(buffers)):
            if count == _UNUSED_COUNT and not self._is_read(buffers[index]):
                yield index

    def _make_room(self, size: int) -> None:
        """Free unused buffers, of any size, until `size` more bytes fit into the pool."""
        for buffers in self._buffers.values():
            for index in reversed([*self._unused(buffers)]):
                if self._pooled_bytes + size <= self._bytes_max:
                    return
                self._pooled_bytes -= buffers.pop(index).nbytes
