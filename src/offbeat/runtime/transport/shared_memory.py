"""Memory that nodes on one host share, so that tensor bytes between them need not go through the kernel.

A node lends a `Region` by passing its descriptor over the Unix socket that it shares with a peer, and from
then on says where bytes lie instead of sending them. The peer maps it, reads, and says that it has read. A
region is anonymous memory (`memfd_create`, Linux): it has no name and no file, and is gone with the last
process that maps it. Its size is sealed, so that no reader can be made to reach beyond its end.

This module never sends or receives, never writes to a peer's memory, and never believes a size that the
kernel does not confirm.
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
from offbeat.runtime.transport.descriptors import limit
from offbeat.runtime.transport.framing import MAX_SHARED_BYTES

HAS_SHARED = sys.platform == "linux"
MAX_REGIONS = 256  # that a node has, and that a peer may have lent at a time
_LEFT_FREE = 32  # descriptors that regions leave to connections, without which nothing goes
# What a peer was told of cannot be overtaken; but with less, nodes wait for each other: all-reduces of 44 MiB
# between 4 workers on 2 cores took 73, 56, 53 and 54 ms with 1, 2, 4 and 16 MiB. With more, what is written
# is in no cache any more when it is read: 375 pushes of 16 MB a second with 4 MiB, 219 and 230 with 8 and 16.
UNREAD_BYTES = 4 * 1024 * 1024
# By who works as long before as its peer does afterwards, a server that answers: of pulls of 16 MB 352, 398
# and 390 a second were made with 4, 8 and 16 MiB, and of push-pulls of 1 MB 3,198, 3,117 and 2,652.
MAX_UNREAD_BYTES = 8 * 1024 * 1024
MIN_SHARED_BYTES = 16 * 1024  # less is sent as it is: one frame, which needs no answer
ANCILLARY_BYTES = socket.CMSG_SPACE(array("i").itemsize) if HAS_SHARED else 0  # room for one descriptor

if HAS_SHARED:
    import fcntl
    from mmap import MAP_POPULATE

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Region:
    """Memory of this node that it can lend, without holding it: that is for those who have views of it.

    Args:
        number: names the region to peers; never used twice by a node.
        descriptor: with which a peer maps the memory; open as long as that lives.
        memory: the whole of it.

    Attributes:
        start: the memory's address.
        unread: pieces that peers were told of and have not said that they have read. Those of a lost peer
            count for ever: it may live, and read late.
    """

    __slots__ = ("_memory", "descriptor", "number", "size", "start", "unread")

    def __init__(self, number: int, descriptor: int, memory: Any) -> None:
        self.number, self.descriptor = number, descriptor
        self.size, self.start = len(memory), ctypes.addressof(memory)
        self.unread = 0
        self._memory = weakref.ref(memory)

    @property
    def lives(self) -> bool:
        """Whether somebody holds the memory still."""
        return self._memory() is not None


class Regions:
    """The regions of one node; what it allocates, any thread may ask for and about.

    Args:
        released: told of a region in whatever thread lets go of it; must see to it that `remove` is called,
            outside of that call.
    """

    def __init__(self, released: Callable[[Region], object]) -> None:
        self._released = released
        self._numbers = count(1)
        self._lock = threading.Lock()
        # The addresses, in order, and the regions. Never changed, only replaced, so they can be read without
        # the lock; the dead are here until they are removed, when their addresses may be others' already.
        self._sorted: tuple[list[int], list[Region]] = [], []

    def allocate(self, size: int) -> memoryview | None:
        """Return zeroed memory in a region of its own, or None where that is not to be had."""
        if not HAS_SHARED or size < MIN_SHARED_BYTES or len(self._sorted[0]) >= MAX_REGIONS:
            return None
        try:
            descriptor, memory = allocated(size)
        except OSError:
            return None
        if descriptor >= limit() - _LEFT_FREE:
            os.close(descriptor)
            return None
        region = Region(next(self._numbers), descriptor, memory)
        # Finalizers are kept until they run, and so is what they hold: by the links, a whole session.
        weakref.finalize(memory, _release, region, weakref.ref(self)).atexit = False
        with self._lock:
            self._sort([*self._sorted[1], region])
        return memoryview(memory).cast("B")

    def find(self, view: memoryview) -> tuple[Region, int] | None:
        """Return the region in which a view of bytes lies, and where in it; None if in none."""
        starts, regions = self._sorted
        if not starts or view.readonly or not len(view):
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        i = bisect_right(starts, address)
        if not i:
            return None
        region = regions[i - 1]
        place = address - region.start
        if place + len(view) > region.size or not region.lives:
            return None
        return region, place

    def remove(self, region: Region) -> None:
        """Take note that a region is no more."""
        with self._lock:
            self._sort([other for other in self._sorted[1] if other is not region])

    def _sort(self, regions: list[Region]) -> None:
        regions.sort(key=lambda region: (region.start, region.number))  # the youngest last at an address
        self._sorted = [region.start for region in regions], regions


class Borrowed:
    """What a peer has lent over one connection; only for reading.

    A descriptor comes with the bytes of the frame that names its region, or before the last of them.

    Attributes:
        read: how many pieces the peer has not been told of yet that they were read.
    """

    def __init__(self) -> None:
        self.read = 0
        self._read_bytes = 0  # of what came at a time
        self._regions: dict[int, Any] = {}
        self._descriptors: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._regions)

    def came(self, ancillary: list[tuple[int, int, bytes]], *, truncated: bool) -> None:
        """Take the descriptors that came with some bytes.

        Raises:
            ProtocolError: they are more than one frame can need.
            OSError: this process can open no more files, not even the one that came.
        """
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(payload) - len(payload) % array("i").itemsize
                self._descriptors.extend(array("i", payload[:whole]))
        if truncated and not self._descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if truncated or len(self._descriptors) > 1:
            raise ProtocolError("expected one descriptor a region, got more")

    def check(self, *, partial: bool) -> None:
        """All that had come has been acted on: see that no descriptor is left over.

        With a frame still `partial`, it may be that one's.

        Raises:
            ProtocolError: one came with another kind of frame.
        """
        if self._descriptors and not partial:
            raise ProtocolError("expected descriptors only with REGION frames, got one without")
        self._read_bytes = 0

    def map(self, number: int, size: int) -> None:
        """Map a region whose descriptor has come.

        Raises:
            ProtocolError: there is none, or it is not what was said, or too many are mapped.
        """
        if not self._descriptors:
            raise ProtocolError(f"expected the descriptor of region {number}, got none")
        descriptor = self._descriptors.popleft()
        try:
            if number in self._regions:
                raise ProtocolError(f"expected a new region, got {number} again")
            if len(self._regions) >= MAX_REGIONS:
                raise ProtocolError(f"expected at most {MAX_REGIONS} regions, got one more")
            self._regions[number] = mapped(_checked(descriptor, size), size, PROT_READ, MAP_SHARED)
        except OSError as error:
            raise ProtocolError(f"cannot map region {number} of {size} bytes: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def piece(self, number: int, place: int, length: int) -> memoryview:
        """Return `length` bytes of a region. They are the peer's: never to be written.

        Raises:
            ProtocolError: there is no such region, or they do not lie within it.
        """
        region = self._regions.get(number)
        if region is None:
            raise ProtocolError(f"expected a region that was lent, got {number}")
        if place + length > len(region):
            raise ProtocolError(
                f"expected bytes within a region of {len(region)}, got {length} bytes from place {place}"
            )
        self._read_bytes += length
        if self._read_bytes >= MAX_UNREAD_BYTES + MAX_SHARED_BYTES:
            raise ProtocolError(f"expected to be told of {MAX_UNREAD_BYTES} bytes at a time, got more")
        self.read += 1
        return memoryview(region).cast("B")[place : place + length]

    def answered(self) -> None:
        """The peer is told that what it has told of was read."""
        self.read = 0

    def withdraw(self, number: int) -> None:
        """Unmap a region, as soon as nobody reads it.

        Raises:
            ProtocolError: there is no such region.
        """
        if self._regions.pop(number, None) is None:
            raise ProtocolError(f"expected a region that was lent, got {number}")

    def close(self) -> None:
        """Give everything back."""
        self._regions.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())


def allocated(size: int) -> tuple[int, Any]:
    """Return new memory and its descriptor.

    Raises:
        OSError: there is not so much, or none that can be shared.
    """
    descriptor = os.memfd_create("offbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)  # what is lacking is an error now, and no deadly signal later
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, mapped(descriptor, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE)
    except BaseException:
        os.close(descriptor)
        raise


def _release(region: Region, regions: weakref.ref[Regions]) -> None:
    os.close(region.descriptor)
    known = regions()
    if known is not None:
        known._released(region)


def _checked(descriptor: int, size: int) -> int:
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
        raise ProtocolError("expected memory in pages that are always to be had, got huge ones")
    return descriptor


def mapped(descriptor: int, size: int, protection: int, flags: int) -> Any:
    """Map memory and return it as a buffer; when nobody holds that any more, it is unmapped.

    The standard library's mmap keeps a descriptor for each mapping, of which there may be many; and it shows
    what must not be written as read-only to torch, which warns of that.
    """
    address = _libc.mmap(None, size, protection, flags, descriptor, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory
