"""A worker's own copy of the parameters: read from the process cache or the servers, and stepped locally."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offbeat.events import StepPermit
from offbeat.policies.staleness.caches import PsOptions
from offbeat.runtime.ps.future import Future
from offbeat.runtime.staleness.served_parameters import ServedParameters
from offbeat.runtime.staleness.shared_model import PulledParameters, SharedModel
from offbeat.runtime.staleness.staging import ValueStaging
from offbeat.runtime.training.timing import PartTimer


class ThreadCache:
    """A worker's parameters are as fresh as its permit requires, and hold each of its own updates once.

    Args:
        worker: its id in the directory of `model`.
        parameters: the worker's.
        staging: brings pulled values to their device, where the worker's own updates stay.
        model: what the threads of the process share.
        options: how the parameter server is used.
        timer: the worker's.
        check: raises if the job has failed.

    Attributes:
        read_version: the version that the last read has had at least.
    """

    def __init__(
        self,
        worker: int,
        parameters: ServedParameters,
        staging: ValueStaging,
        model: SharedModel,
        options: PsOptions,
        timer: PartTimer,
        check: Callable[[], None],
    ) -> None:
        self._worker, self._parameters, self._model, self._options = worker, parameters, model, options
        self._staging = staging
        self._timer, self._check = timer, check
        self._local_updates: list[
            Sequence[torch.Tensor]
        ] = []  # what each update in this thread's log has added
        self._values_before: Sequence[torch.Tensor] | None = None  # the local step under way
        self._fetch: Future | None = None
        self.read_version = 0

    # The worker's own updates ----------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Begin a local step, unless one has begun."""
        if self._values_before is None:
            self._values_before = self._parameters.copy_values()

    def end_update(self) -> Sequence[torch.Tensor]:
        """Return what the local step has added, of each group; nothing if none has begun."""
        before, self._values_before = self._values_before, None
        return () if before is None else self._parameters.changes_since(before)

    def log_update(self, time: int, added: Sequence[torch.Tensor]) -> None:
        """Record what the steps have added whose gradients are in the push of a time."""
        self._model.directory.log_update(self._worker, time)
        self._local_updates.append(added)

    # Reading ---------------------------------------------------------------------------------------------

    def read(self, permit: StepPermit, steps: int) -> None:
        """Make the parameters fresh enough for a permit, after this number of steps.

        Raises:
            WorkerError: it took too long; the message names the servers.
        """
        version = permit.version_min
        if self._options.fetch_every is not None:
            self.read_version = version
            self._timer.switch("pull")
            self._install_fetched(steps, self._options.fetch_every)
            return
        directory, is_bounded = self._model.directory, self._options.is_bounded
        match directory.read_source(self._worker, version) if is_bounded else "server":
            case "thread":
                self._timer.switch("thread_cache")
            case "process":
                self._timer.switch("process_cache")
                self._install(self._model.process_cache)
            case "server":
                self._timer.switch("pull")
                complete = permit.complete_version if is_bounded else 0
                self._install(self._model.pull(version, self._check, complete=complete, fresh=not is_bounded))
        self.read_version = max(version, directory.version(self._worker))

    def invalidate(self) -> None:
        """Read again at the next step, since the parameters were replaced by the servers' state."""
        self._model.directory.invalidate(self._worker)
        self._fetch = None  # it may lack later pushes of this worker, which are not replayed any more

    def _install_fetched(self, steps: int, fetch_every: int) -> None:
        """Install a background fetch if it has arrived; start another when it is time."""
        if self._model.directory.version(self._worker) < 0:
            self._install(self._model.pull(0, self._check, fresh=True))
        elif self._fetch is not None and self._fetch.is_done:
            self._install(self._fetch.result(0.0))
            self._fetch = None
        if self._fetch is None and steps % (fetch_every or 1) == 0:
            self._fetch = self._model.start_fetch()

    @torch.no_grad()
    def _install(self, row: PulledParameters) -> None:
        """Copy a row, and apply this thread's own updates that are not in it, once."""
        directory, worker = self._model.directory, self._worker
        for index, values in enumerate(row.values):
            flat = self._staging.to_device(index, values)
            if self._local_updates:
                flat = self._parameters.empty(index).copy_(flat)  # on the CPU other threads read it, too
                for piece in row.applied_times[index]:
                    key_range = slice(piece.start, piece.stop)
                    for changes in self._local_updates[directory.count_included(worker, piece.time) :]:
                        flat[key_range].add_(changes[index][key_range])
            self._parameters.load_values(index, flat)
        time = min((piece.time for some in row.applied_times for piece in some), default=0)
        del self._local_updates[: directory.on_thread_copied(worker, row.version, time)]
