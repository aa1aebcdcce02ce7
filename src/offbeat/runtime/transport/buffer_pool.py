"""Memory for arrays, taken again when nobody has the array any more: it is in place, and in the cache.

Fresh memory costs more than what is written into it: the system clears each page as it is touched.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.numerics.ps.memory import page_aligned

Buffer = NDArray[np.uint8]

_MIN_BYTES: Final = 128 * 1024  # smaller ones the allocator takes again by itself
_BYTES_MAX: Final = 256 * 1024 * 1024


def _references(buffers: list[Buffer]) -> list[int]:
    """Return how many references there are to each of these, those that are made here to count them, too."""
    return [sys.getrefcount(buffer) for buffer in buffers]


(_UNUSED,) = _references([np.empty(1, np.uint8)])  # to a buffer of which there is no array


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
        for place in self._unused(buffers):
            if size <= buffers[place].nbytes:
                return buffers[place][:size].view(dtype).reshape(shape)
        if size <= _BYTES_MAX:
            self._make_room(size)
        buffer = self._allocate(size)
        if self._bytes + size <= _BYTES_MAX:
            buffers.append(buffer)
            self._bytes += size
        return buffer.view(dtype).reshape(shape)

    def _unused(self, buffers: list[Buffer]) -> Iterator[int]:
        """Yield the places of those that nobody has or reads."""
        for place, references in enumerate(_references(buffers)):
            if references == _UNUSED and not self._is_read(buffers[place]):
                yield place

    def _make_room(self, size: int) -> None:
        """Let go of what nobody has where so much more would be too much: others are asked for now."""
        for buffers in self._buffers.values():
            for place in reversed([*self._unused(buffers)]):
                if self._bytes + size <= _BYTES_MAX:
                    return
                self._bytes -= buffers.pop(place).nbytes
