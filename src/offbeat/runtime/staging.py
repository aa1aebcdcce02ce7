"""Shared memory through which large arrays go to nodes on this host, a slab at a time.

What a program pushes lies in memory of its own, which no other process can read. Copying it into memory that
they can costs less than handing it to the kernel and back.

Everything here runs in the links' thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final

from offbeat.runtime.links import Endpoint

MIN_STAGED_BYTES: Final = 256 * 1024
_SLAB_BYTES: Final = 1024 * 1024
_SLABS_MAX: Final = 16


@dataclass(slots=True, eq=False)
class _Job:
    """An array on its way: `sent` bytes of it are in slabs, or were."""

    peer: str
    tag: int
    data: memoryview
    sent: int = 0


class Staging:
    """The slabs of one node.

    Args:
        endpoint: the node's links.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._free: list[memoryview] = []
        self._lent: dict[int, str] = {}  # to whom, by slab
        self._slabs: dict[int, memoryview] = {}
        self._jobs: deque[_Job] = deque()

    def put(self, peer: str, tag: int, data: memoryview) -> None:
        """Send an array's bytes to a node that shares memory with this one; see `Endpoint.put`."""
        self._jobs.append(_Job(peer, tag, data))
        self._go_on()

    def lost(self, peer: str) -> None:
        """A connection broke. Its node may still read what it was told of, so these slabs are let go."""
        self._jobs = deque(job for job in self._jobs if job.peer != peer)
        for slab in [slab for slab, to in self._lent.items() if to == peer]:
            del self._lent[slab], self._slabs[slab]
        self._go_on()

    def _go_on(self) -> None:
        while self._jobs:
            slab = self._slab()
            if slab is None:
                return
            job = self._jobs[0]
            size = min(len(slab), len(job.data) - job.sent)
            piece = slab[:size]
            piece[:] = job.data[job.sent : job.sent + size]
            self._lent[id(slab)], self._slabs[id(slab)] = job.peer, slab
            self._endpoint.put(
                job.peer,
                job.tag,
                piece,
                offset=job.sent,
                total=len(job.data),
                done=partial(self._back, id(slab)),
            )
            job.sent += size
            if job.sent == len(job.data):
                self._jobs.popleft()

    def _slab(self) -> memoryview | None:
        if self._free:
            return self._free.pop()
        if len(self._lent) == _SLABS_MAX:
            return None
        return self._endpoint.allocate(_SLAB_BYTES)

    def _back(self, slab: int) -> None:
        if slab in self._lent:
            del self._lent[slab]
            self._free.append(self._slabs.pop(slab))
            self._go_on()
