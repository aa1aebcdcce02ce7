"""Shared memory between nodes on one host, so that tensor bytes between them need not go through the kernel.

Theory of operation
-------------------

Owner: `RegionAllocator` allocates a `Region` of anonymous memory (`memfd_create`, Linux): it has no name and
no file, and is gone with the last process that maps it. Its size is sealed, so that no reader can be made to
reach beyond its end. The program holds views of the memory, the region only a weak reference to it; when the
last view is gone, the memory is unmapped, its descriptor closed and `on_released` called.

Protocol, over a Unix socket, since only that carries descriptors:

1. The owner sends REGION once per region and connection, with the region's descriptor. The reader (an
   `ImportedRegions`, one per connection) checks seals, size and page size with the kernel, maps the region
   for reading, and closes the descriptor.
2. Instead of bytes, the owner sends SHARED: region, offset and length. The reader copies or processes the
   bytes before it handles the next frame.
3. The reader acknowledges with SHARED_ACK how many SHARED frames it has read, in order. Until then the owner
   must not write these bytes; `Region.unacked_frames` counts such frames. How many bytes may be announced and
   not acknowledged is limited (`unacked_bytes` of `Endpoint`).
4. When a region's memory has no views left, the owner sends WITHDRAW and the reader unmaps it.

Failures: connections with shared memory are not resumed. If a reader is lost, its unacknowledged frames keep
`Region.unacked_frames` above zero permanently, since its process may run on and read late; that memory must
not be written again. If memory or descriptors are short, `allocate` returns None and the bytes are sent as
usual; the last 32 descriptors below the limit are left to connections. A reader never believes a size that
the kernel does not confirm: reading beyond the end of memory raises a deadly signal.

This module never sends or receives, and never writes to a peer's memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
import threading
import weakref
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import count
from mmap import MAP_SHARED, PAGESIZE, PROT_READ, PROT_WRITE
from typing import Any

from offbeat.errors import ProtocolError
from offbeat.runtime.transport.descriptors import descriptor_limit
from offbeat.runtime.transport.framing import MAX_SHARED_BYTES

HAS_SHARED_MEMORY = sys.platform == "linux"
MAX_REGIONS = 256  # that a node has, and that a peer may export at a time
_RESERVED_DESCRIPTORS = 32  # descriptors that regions leave to connections, without which nothing works
# Announced bytes cannot be overtaken; but with a low limit nodes wait for each other: all-reduces of 44 MiB
# between 4 workers on 2 cores took 73, 56, 53 and 54 ms with 1, 2, 4 and 16 MiB. With a high one, bytes have
# left the caches before they are read: 375 pushes of 16 MB a second with 4 MiB, 219 and 230 with 8 and 16.
UNACKED_BYTES = 4 * 1024 * 1024
# For a node that works as long before the transfer as its peer does afterwards, a server that answers: pulls
# of 16 MB reached 352, 398 and 390 a second with 4, 8 and 16 MiB, and push-pulls of 1 MB 3,198, 3,117 and
# 2,652.
MAX_UNACKED_BYTES = 8 * 1024 * 1024
MIN_SHARED_BYTES = 16 * 1024  # shorter messages are sent as they are: one frame, no acknowledgement
ANCILLARY_BYTES = (
    socket.CMSG_SPACE(array("i").itemsize) if HAS_SHARED_MEMORY else 0
)  # room for one descriptor

if HAS_SHARED_MEMORY:
    import fcntl
    from mmap import MAP_POPULATE

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Region:
    """Memory that this node can export. Does not keep the memory alive: the holders of views do.

    Args:
        number: identifies the region to peers; never used twice by a node.
        descriptor: with which a peer maps the memory; open as long as that exists.
        memory: the whole of it.

    Attributes:
        start: the memory's address.
        unacked_frames: pieces that were announced to peers and not acknowledged as read. Those of a lost peer
            count permanently: its process may run on and read late.
    """

    __slots__ = ("_memory", "descriptor", "number", "size", "start", "unacked_frames")

    def __init__(self, number: int, descriptor: int, memory: Any) -> None:
        self.number, self.descriptor = number, descriptor
        self.size, self.start = len(memory), ctypes.addressof(memory)
        self.unacked_frames = 0
        self._memory = weakref.ref(memory)

    @property
    def is_alive(self) -> bool:
        """Whether a view of the memory exists."""
        return self._memory() is not None


class RegionAllocator:
    """The regions of one node; any thread may allocate and look up.

    Args:
        on_released: called with a region in the thread that drops its last view; must arrange that `remove`
            is called, outside of that call.

    Attributes:
        has_local_peers: a peer on this host is known, which could read the memory; never reset.
    """

    def __init__(self, on_released: Callable[[Region], object]) -> None:
        self.has_local_peers = False
        self._released = on_released
        self._numbers = count(1)
        self._lock = threading.Lock()
        # The addresses, in order, and the regions. Never changed, only replaced, so they can be read without
        # the lock. Dead regions stay until they are removed; their addresses may already be in use again.
        self._sorted: tuple[list[int], list[Region]] = [], []

    def allocate(self, size: int) -> memoryview | None:
        """Return zeroed memory in a region of its own, or None where that is not available."""
        if not HAS_SHARED_MEMORY or size < MIN_SHARED_BYTES or len(self._sorted[0]) >= MAX_REGIONS:
            return None
        try:
            descriptor, memory = allocate_memory(size)
        except OSError:
            return None
        if descriptor >= descriptor_limit() - _RESERVED_DESCRIPTORS:
            os.close(descriptor)
            return None
        region = Region(next(self._numbers), descriptor, memory)
        # Finalizers are kept until they run, and so is what they hold: by way of the endpoint, a session.
        weakref.finalize(memory, _release, region, weakref.ref(self)).atexit = False
        with self._lock:
            self._sort([*self._sorted[1], region])
        return memoryview(memory).cast("B")

    def find(self, view: memoryview) -> tuple[Region, int] | None:
        """Return the region that contains a view of bytes, and its offset there; None if there is none."""
        starts, regions = self._sorted
        if not starts or view.readonly or not len(view):
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        i = bisect_right(starts, address)
        if not i:
            return None
        region = regions[i - 1]
        offset = address - region.start
        if offset + len(view) > region.size or not region.is_alive:
            return None
        return region, offset

    def remove(self, region: Region) -> None:
        """Remove a region whose memory is gone."""
        with self._lock:
            self._sort([other for other in self._sorted[1] if other is not region])

    def _sort(self, regions: list[Region]) -> None:
        regions.sort(key=lambda region: (region.start, region.number))  # the newest last at an address
        self._sorted = [region.start for region in regions], regions


class ImportedRegions:
    """The regions that a peer has exported over one connection; read-only.

    A descriptor arrives with the bytes of the frame that names its region, or before the last of them.

    Attributes:
        unacked_reads: pieces that have been read and not acknowledged to the peer.
    """

    def __init__(self) -> None:
        self.unacked_reads = 0
        self._read_bytes = 0  # since the last `check_descriptors`
        self._regions: dict[int, Any] = {}
        self._descriptors: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._regions)

    def on_descriptors(self, ancillary: list[tuple[int, int, bytes]], *, truncated: bool) -> None:
        """Accept the descriptors that arrived with some bytes.

        Raises:
            ProtocolError: they are more than one frame can need.
            OSError: this process can open no more files, not even the one that arrived.
        """
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(payload) - len(payload) % array("i").itemsize
                self._descriptors.extend(array("i", payload[:whole]))
        if truncated and not self._descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if truncated or len(self._descriptors) > 1:
            raise ProtocolError("expected one descriptor a region, got more")

    def check_descriptors(self, *, partial: bool) -> None:
        """Check that no descriptor is left over after all complete frames were processed.

        If a frame is still `partial`, the descriptor may be that one's.

        Raises:
            ProtocolError: one arrived with another kind of frame.
        """
        if self._descriptors and not partial:
            raise ProtocolError("expected descriptors only with REGION frames, got one without")
        self._read_bytes = 0

    def map(self, number: int, size: int) -> None:
        """Map a region whose descriptor has arrived.

        Raises:
            ProtocolError: there is no descriptor, or not of the announced size, or too many are mapped.
        """
        if not self._descriptors:
            raise ProtocolError(f"expected the descriptor of region {number}, got none")
        descriptor = self._descriptors.popleft()
        try:
            if number in self._regions:
                raise ProtocolError(f"expected the number of a new region, got {number} again")
            if len(self._regions) >= MAX_REGIONS:
                raise ProtocolError(f"expected at most {MAX_REGIONS} regions, got one more")
            self._regions[number] = map_memory(
                _checked_descriptor(descriptor, size), size, PROT_READ, MAP_SHARED
            )
        except OSError as error:
            raise ProtocolError(f"cannot map region {number} of {size} bytes: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def view(self, number: int, offset: int, length: int) -> memoryview:
        """Return `length` bytes of a region. They belong to the peer: never write to them.

        Raises:
            ProtocolError: there is no such region, or they do not lie within it.
        """
        region = self._regions.get(number)
        if region is None:
            raise ProtocolError(f"expected a region that was announced, got {number}")
        if offset + length > len(region):
            raise ProtocolError(
                f"expected bytes within a region of {len(region)}, got {length} bytes from offset {offset}"
            )
        self._read_bytes += length
        if self._read_bytes >= MAX_UNACKED_BYTES + MAX_SHARED_BYTES:
            raise ProtocolError(f"expected at most {MAX_UNACKED_BYTES} announced bytes at a time, got more")
        self.unacked_reads += 1
        return memoryview(region).cast("B")[offset : offset + length]

    def on_acked(self) -> None:
        """Reset `unacked_reads`: all pieces read so far are acknowledged."""
        self.unacked_reads = 0

    def unmap(self, number: int) -> None:
        """Unmap a region, as soon as no view of it is left.

        Raises:
            ProtocolError: there is no such region.
        """
        if self._regions.pop(number, None) is None:
            raise ProtocolError(f"expected a region that was announced, got {number}")

    def close(self) -> None:
        """Unmap all regions and close all descriptors."""
        self._regions.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())


def allocate_memory(size: int) -> tuple[int, Any]:
    """Return the descriptor of new shared memory, and the memory.

    Raises:
        OSError: there is not enough memory, or none that can be shared.
    """
    descriptor = os.memfd_create("offbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)  # a shortage is an error now, not a deadly signal later
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, map_memory(descriptor, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE)
    except BaseException:
        os.close(descriptor)
        raise


def _release(region: Region, regions: weakref.ref[RegionAllocator]) -> None:
    os.close(region.descriptor)
    known = regions()
    if known is not None:
        known._released(region)


def _checked_descriptor(descriptor: int, size: int) -> int:
    """Return a descriptor if its memory can never be less than `size`: reading beyond is a deadly signal."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("expected the descriptor of shared memory, got another kind") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("expected memory that cannot shrink, got some that can")
    found = os.fstat(descriptor).st_size
    if found != size:
        raise ProtocolError(f"expected a region of {size} bytes, got one of {found}")
    if os.fstatvfs(descriptor).f_bsize != PAGESIZE:
        raise ProtocolError("expected memory in pages of the usual size, got huge pages, which may run out")
    return descriptor


def map_memory(descriptor: int, size: int, protection: int, flags: int) -> Any:
    """Map memory and return it as a buffer; it is unmapped when the buffer and its views are gone.

    The standard library's mmap keeps a descriptor for each mapping, of which there may be many; and it marks
    memory that must not be written as read-only, of which torch warns.
    """
    address = _libc.mmap(None, size, protection, flags, descriptor, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory
