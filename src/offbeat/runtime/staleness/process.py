"""State that the worker threads of one process share in a job on a parameter server.

The first thread opens it, the last one closes it. Nothing here trains.
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
from offbeat.runtime.control.rendezvous import RendezvousInfo
from offbeat.runtime.ps.client import PS
from offbeat.runtime.ps.cluster import start_server
from offbeat.runtime.ps.namespace import Namespace
from offbeat.runtime.ps.node import ClusterFile
from offbeat.runtime.ps.server import ServerConfiguration
from offbeat.runtime.staleness.shared_model import SharedModel
from offbeat.runtime.training.interface import TrainingLoop
from offbeat.runtime.training.state_copy import TrainingPosition

_POSITION_FIELDS: Final = ("round", "epoch", "seed", "samples", "batch_size")  # whole numbers
_POLL_S: Final = 0.05
_WORD_BYTES: Final = 8  # all but parameters is stored on servers as float64 words, whatever the bits mean
_processes: dict[str, ServedProcess] = {}  # by job
_processes_lock = threading.Lock()


class ServedProcess:
    """One process of a job on a parameter server; `ServedProcess.open_or_get` opens or finds it.

    Args:
        loop: the training loop of one of its workers.
        rendezvous: the rendezvous of the job.
        timeout_s: how long the first worker may take to store its parameters on the servers, in seconds.

    Attributes:
        threads: ids of its workers.
        ps: its client of the parameter server, numbered by its first worker.
        model: the parameters that its threads push and pull.
    """

    def __init__(self, loop: TrainingLoop, rendezvous: RendezvousInfo, timeout_s: float) -> None:
        self.threads = loop.local_workers
        self._timeout_s = timeout_s
        self.model: SharedModel
        self._job, self._thread_count = rendezvous.job, 0
        self._lock = threading.Lock()
        self._has_model = self._has_begun = False
        first = self.threads[0]
        cluster = ClusterFile(
            job=rendezvous.job,
            token=rendezvous.token,
            manager=rendezvous.coordinator,
            is_service=rendezvous.is_service,
        )
        if not loop.is_newcomer:
            processes = loop.world // len(self.threads)
            for server in range(first // len(self.threads), loop.servers, processes):
                configuration = ServerConfiguration(cluster=cluster, host=rendezvous.host, server=server)
                start_server(configuration, is_detached=True)
        self.ps = PS(cluster, host=rendezvous.host, client_id=first)
        self._namespace = cache(
            partial(self.ps.namespace, update=Assign(), dtype="float64")
        )  # opens each once

    @classmethod
    def open_or_get(
        cls,
        loop: TrainingLoop,
        rendezvous: RendezvousInfo,
        timeout_s: float,
        open_model: Callable[[ServedProcess], SharedModel],
    ) -> ServedProcess:
        """Return this process's state in a job; the first thread opens it.

        Raises:
            OffbeatError: a server did not start, or the parameter server cannot be reached.
        """
        with _processes_lock:
            found = _processes.get(rendezvous.job)
            if found is None:
                found = _processes[rendezvous.job] = cls(loop, rendezvous, timeout_s)
            found._thread_count += 1
        try:
            with found._lock:
                if not found._has_model:
                    found.model = open_model(found)
                    found._has_model = True
        except BaseException:
            found.release()
            raise
        return found

    def begin_thread(
        self,
        initial: Sequence[Mapping[str, NDArray[Any]]] | None,
        loop: TrainingLoop,
        unserved: Sequence[torch.Tensor],
    ) -> int:
        """Start the process, and one of its threads; return the first clock.

        Args:
            initial: on the first worker, the initial values for the servers: see `SharedModel.begin`.
            loop: the thread's training loop.
            unserved: tensors of the thread's model that no gradient changes: buffers and frozen parameters.
        """
        with self._lock:
            is_first = not self._has_begun and (initial is not None or self.threads[0] != 0)
            self._has_begun |= is_first
        if initial is not None and (state := self._unserved_namespace(unserved)) is not None:
            state.push(_bits(unserved)).result()
        if not is_first:
            return self.model.wait_until_begun(loop.raise_if_failed)
        if initial is None:
            self._wait_for_place(loop)
        clock = self.model.begin(initial, loop.raise_if_failed, is_newcomer=loop.is_newcomer)
        if initial is not None:
            self.publish_position(loop)
        return clock

    def publish_position(self, loop: TrainingLoop) -> None:
        """Publish epoch, seed and sampling settings on the servers, in each epoch, for newcomers."""
        place = loop.position(0)
        numbers = [float(getattr(place, name)) for name in _POSITION_FIELDS]
        self._position_namespace().push([1.0, float(place.drop_last), *numbers])

    def restore_position(self, loop: TrainingLoop) -> None:
        """Let a newcomer start at the position of the training."""
        drop_last, *numbers = self._wait_for_place(loop)
        whole = dict(zip(_POSITION_FIELDS, map(int, numbers), strict=True))
        loop.restore_position(TrainingPosition(**whole, drop_last=bool(drop_last)))

    def _wait_for_place(self, loop: TrainingLoop) -> list[float]:
        """Wait until the first worker has stored its parameters; return the position of the training."""
        limit_s = time.monotonic() + self._timeout_s
        while True:
            is_published, *numbers = self.model.wait_for(
                self._position_namespace().pull(), "the first parameters", loop.raise_if_failed
            )
            if is_published:
                return list(numbers)
            if time.monotonic() > limit_s:
                raise WorkerError(
                    f"timed out after {self._timeout_s:g} s waiting for the parameters of worker 0", worker=0
                )
            loop.raise_if_failed()
            time.sleep(_POLL_S)

    @torch.no_grad()
    def fetch_unserved(self, unserved: Sequence[torch.Tensor]) -> None:
        """Copy the first worker's initial values of the tensors that no gradient changes."""
        if (state := self._unserved_namespace(unserved)) is not None:
            left = torch.from_numpy(np.array(state.pull().result())).view(torch.uint8)
            for tensor in unserved:
                bits, left = left[: tensor.nbytes], left[tensor.nbytes :]
                tensor.copy_(bits.clone().view(tensor.dtype).view(tensor.shape))

    def _position_namespace(self) -> Namespace:
        """Return the namespace of the position: a published flag, `drop_last`, `_POSITION_FIELDS`."""
        return self._namespace("position", 2 + len(_POSITION_FIELDS))

    def _unserved_namespace(self, unserved: Sequence[torch.Tensor]) -> Namespace | None:
        """Return the namespace of the bits of these tensors; None if there are none."""
        size_bytes = sum(tensor.nbytes for tensor in unserved)
        return self._namespace("unserved", -(-size_bytes // _WORD_BYTES)) if size_bytes else None

    def release(self) -> None:
        """End one thread's use; the last thread closes the client."""
        with _processes_lock:
            self._thread_count -= 1
            if self._thread_count:
                return
            _processes.pop(self._job, None)
        self.ps.close()


def _bits(tensors: Sequence[torch.Tensor]) -> NDArray[np.float64]:
    """Return the concatenated bits of some tensors as float64 words, which servers store unchanged."""
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    rest = torch.zeros(-sum(map(len, flat)) % _WORD_BYTES, dtype=torch.uint8, device="cpu")
    return torch.cat([*flat, rest]).numpy().view(np.float64)
