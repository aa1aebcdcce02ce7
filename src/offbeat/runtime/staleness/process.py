"""What the worker threads of one process share in a job on a parameter server.

The first thread that comes opens it, the last one that leaves closes it. Nothing here trains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.errors import WorkerError
from offbeat.numerics.ps.updates import Assign
from offbeat.runtime.control.rendezvous import Meeting
from offbeat.runtime.control.starting import start_server
from offbeat.runtime.ps.client import PS
from offbeat.runtime.ps.namespace import Namespace
from offbeat.runtime.ps.node import Cluster
from offbeat.runtime.ps.server import ServerConfiguration
from offbeat.runtime.staleness.shared_model import ServedModel
from offbeat.runtime.training.interface import Loop
from offbeat.runtime.training.state_copy import Place

_PLACE: Final = ("round", "epoch", "seed", "samples", "batch_size")  # whole numbers
_LOOK_S: Final = 0.05
_WORD_BYTES: Final = 8  # of what servers keep of anything but parameters: float64, whatever its bits mean
_processes: dict[str, Process] = {}  # by job
_opening = threading.Lock()


class Process:
    """A process of a job on a parameter server; `Process.of` makes it or finds it.

    Args:
        loop: of one of its workers.
        meeting: where the job meets.
        deadline_s: how long the first worker may take to put its parameters on the servers, in seconds.

    Attributes:
        threads: its workers.
        ps: its client, whose number is its first worker's.
        model: what its threads push and pull.
    """

    def __init__(self, loop: Loop, meeting: Meeting, deadline_s: float) -> None:
        self.threads = loop.threads
        self._deadline_s = deadline_s
        self.model: ServedModel
        self._job, self._inside = meeting.job, 0
        self._lock = threading.Lock()
        self._has_model = self._is_beginning = False
        first = self.threads[0]
        cluster = Cluster(job=meeting.job, token=meeting.token, manager=meeting.coordinator)
        if not loop.is_newcomer:
            processes = loop.world // len(self.threads)
            for server in range(first // len(self.threads), loop.servers, processes):
                configuration = ServerConfiguration(cluster=cluster, host=meeting.host, server=server)
                start_server(configuration, outlives=True)
        self.ps = PS(cluster, host=meeting.host, number=first)
        self._namespace = cache(partial(self.ps.namespace, update=Assign(), dtype="float64"))  # opens it once

    @classmethod
    def of(
        cls, loop: Loop, meeting: Meeting, deadline_s: float, open_model: Callable[[Process], ServedModel]
    ) -> Process:
        """Return this process's part in a job, opened by whoever comes first.

        Raises:
            OffbeatError: a server did not start, or the parameter server cannot be reached.
        """
        with _opening:
            found = _processes.get(meeting.job)
            if found is None:
                found = _processes[meeting.job] = cls(loop, meeting, deadline_s)
            found._inside += 1
        try:
            with found._lock:
                if not found._has_model:
                    found.model = open_model(found)
                    found._has_model = True
        except BaseException:
            found.leave()
            raise
        return found

    def begin(
        self,
        initial: Sequence[Mapping[str, NDArray[Any]]] | None,
        loop: Loop,
        unserved: Sequence[torch.Tensor],
    ) -> int:
        """Let the process take part, and a thread begin with it; return the first clock.

        Args:
            initial: of the first worker, what the servers are to begin with: see `ServedModel.begin`.
            loop: of the thread.
            unserved: of the thread's model, what no gradient changes: buffers and frozen parameters.
        """
        with self._lock:
            is_first = not self._is_beginning and (initial is not None or self.threads[0] != 0)
            self._is_beginning |= is_first
        if initial is not None and (state := self._unserved(unserved)) is not None:
            state.push(_bits(unserved)).result()
        if not is_first:
            return self.model.wait_until_begun(loop.check)
        if initial is None:
            self._wait_for_place(loop)
        clock = self.model.begin(initial, loop.check, is_newcomer=loop.is_newcomer)
        if initial is not None:
            self.tell_place(loop)
        return clock

    def tell_place(self, loop: Loop) -> None:
        """Say to those who come later how far the job is."""
        place = loop.place(0)
        numbers = [float(getattr(place, name)) for name in _PLACE]
        self._place().push([1.0, float(place.drop_last), *numbers])

    def take_place(self, loop: Loop) -> None:
        """Let a newcomer begin where the job is."""
        drop_last, *numbers = self._wait_for_place(loop)
        whole = dict(zip(_PLACE, map(int, numbers), strict=True))
        loop.take_place(Place(**whole, drop_last=bool(drop_last)))

    def _wait_for_place(self, loop: Loop) -> list[float]:
        """Wait until the first worker has put its parameters on the servers; return where the job is."""
        limit_s = time.monotonic() + self._deadline_s
        while True:
            is_told, *numbers = self.model.wait_for(self._place().pull(), "the first parameters", loop.check)
            if is_told:
                return list(numbers)
            if time.monotonic() > limit_s:
                raise WorkerError(
                    f"waited {self._deadline_s:g} s for the parameters of worker 0 in vain", worker=0
                )
            loop.check()
            time.sleep(_LOOK_S)

    @torch.no_grad()
    def take_unserved(self, unserved: Sequence[torch.Tensor]) -> None:
        """Make what no gradient changes of a model what it was of the first worker's when that began."""
        if (state := self._unserved(unserved)) is not None:
            left = torch.from_numpy(np.array(state.pull().result())).view(torch.uint8)
            for tensor in unserved:
                bits, left = left[: tensor.nbytes], left[tensor.nbytes :]
                tensor.copy_(bits.clone().view(tensor.dtype).view(tensor.shape))

    def _place(self) -> Namespace:
        """Whether the place in the training was told, and the place, in numbers that hold whole ones."""
        return self._namespace("place", 2 + len(_PLACE))

    def _unserved(self, unserved: Sequence[torch.Tensor]) -> Namespace | None:
        """Likewise, where the bits of these are; None where there are none."""
        size_bytes = sum(tensor.nbytes for tensor in unserved)
        return self._namespace("unserved", -(-size_bytes // _WORD_BYTES)) if size_bytes else None

    def leave(self) -> None:
        """Leave it; the last thread closes it."""
        with _opening:
            self._inside -= 1
            if self._inside:
                return
            _processes.pop(self._job, None)
        self.ps.close()


def _bits(tensors: Sequence[torch.Tensor]) -> NDArray[np.float64]:
    """Return the bits of some tensors, one after the other, as words that servers keep as they are."""
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    rest = torch.zeros(-sum(map(len, flat)) % _WORD_BYTES, dtype=torch.uint8, device="cpu")
    return torch.cat([*flat, rest]).numpy().view(np.float64)
