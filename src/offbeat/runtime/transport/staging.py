"""Copies large arrays to nodes on this host through shared memory, a slab at a time.

An array that a program pushes lies in private memory, which no other process can read. Copying it into shared
memory costs less than passing it through the kernel.

Everything here runs in the endpoint's I/O thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.runtime.transport.framing import MAX_SHARED_BYTES

MIN_STAGED_BYTES: Final = 256 * 1024
_SLAB_BYTES: Final = MAX_SHARED_BYTES
_SLABS_MAX: Final = 8


@dataclass(slots=True, eq=False)
class _Job:
    """An array in transfer: `sent` bytes of it were copied to slabs, of which `read` bytes have been read."""

    peer: str
    tag: int
    data: memoryview
    done: Callable[[], None]
    sent: int = 0
    read: int = 0


class SlabSender:
    """Sends arrays through slabs: blocks of shared memory, reused once the peer has read them.

    Args:
        endpoint: sends the slabs, and allocates their memory.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._free_slabs: list[memoryview] = []
        self._slabs_in_use: dict[
            int, tuple[_Job, memoryview]
        ] = {}  # slabs being read, and for which job, by number
        self._numbers = count()
        self._jobs: deque[_Job] = deque()

    def send_tensor(self, peer: str, tag: int, data: memoryview, on_done: Callable[[], None]) -> None:
        """Send an array's bytes to a node that shares memory with this one; see `Endpoint.send_tensor`."""
        self._jobs.append(_Job(peer, tag, data, on_done))
        self._fill_slabs()

    def on_peer_lost(self, peer: str) -> None:
        """Forget a peer whose connection broke. It may still read its slabs, so they are not used again."""
        self._jobs = deque(job for job in self._jobs if job.peer != peer)
        for number in [number for number, (job, _) in self._slabs_in_use.items() if job.peer == peer]:
            del self._slabs_in_use[number]
        self._fill_slabs()

    def _fill_slabs(self) -> None:
        while self._jobs:
            slab = self._acquire_slab()
            if slab is None:
                return
            job = self._jobs[0]
            size = min(len(slab), len(job.data) - job.sent)
            piece = slab[:size]
            piece[:] = job.data[job.sent : job.sent + size]
            number = next(self._numbers)
            self._slabs_in_use[number] = job, slab
            self._endpoint.send_tensor(
                job.peer,
                job.tag,
                piece,
                offset=job.sent,
                total=len(job.data),
                on_done=partial(self._on_read, number, size),
                uses_long_frames=True,
            )
            job.sent += size
            if job.sent == len(job.data):
                self._jobs.popleft()

    def _acquire_slab(self) -> memoryview | None:
        if self._free_slabs:
            return self._free_slabs.pop()
        if len(self._slabs_in_use) == _SLABS_MAX:
            return None
        return self._endpoint.allocate(_SLAB_BYTES)

    def _on_read(self, number: int, size: int) -> None:
        in_use = self._slabs_in_use.pop(number, None)
        if in_use is None:  # its connection broke
            return
        job, slab = in_use
        self._free_slabs.append(slab)
        job.read += size
        if job.read == len(job.data):
            job.done()
        self._fill_slabs()
