"""Collectives by `torch.distributed`: NCCL on GPUs, with every rank of the process group present.

Torch chooses the algorithm and keeps the order of the calls. This module never decides on membership.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from offbeat.errors import WorkerError
from offbeat.numerics.collectives.schedules import AUTO
from offbeat.runtime.collectives.contribution import Contribution, ExternalElements
from offbeat.runtime.collectives.interface import PendingExchange, check_equal_parts
from offbeat.runtime.devices.interface import Accelerator, CallWhenReady, Device
from offbeat.runtime.processes.threads import run_with_deadline, start_thread
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.torch_compat import abort_process_groups

_POLL_S = 1e-4
_REASON_TIMEOUT_S = 2.0  # torch's error may precede the coordinator's, which names the worker
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_log = logging.getLogger("offbeat")


class TorchExchange:
    """Collectives by `torch.distributed`: NCCL on GPUs, with every rank of the process group present.

    Once it is abandoned, all process groups of this process are aborted: kernels of one that wait for a lost
    rank would else hold up the others, and each thread that waits for the device. That may hang itself. So it
    is done in a thread of its own: pending exchanges fail at once, and `close` waits for a limited time.

    Args:
        group: a process group of exactly the members.
        device: of the tensors.

    Attributes:
        size, position: see `Exchange`.
    """

    keeps_order = True

    def __init__(self, group: dist.ProcessGroup, device: Device) -> None:
        self._group: dist.ProcessGroup | None = group  # None once it is being aborted
        self.size, self.position = group.size(), group.rank()
        self._model_device = device
        self.device = device.torch_device
        self._error: WorkerError | None = None
        self._is_closed = False  # the process group is ended by `close`, and not aborted any more
        self._lock = threading.Lock()
        self._abandoned, self._aborted = SignalSafeEvent(), SignalSafeEvent()

    def all_reduce(
        self,
        flat: torch.Tensor,
        into: torch.Tensor,
        *,
        exchange_id: int,
        index: int = 0,
        algorithm: str = AUTO,
        priority: int = 0,
        external: Sequence[ExternalElements] = (),
        after: CallWhenReady | None = None,
    ) -> PendingExchange:
        """See `Exchange.all_reduce`; the process group keeps the order of the calls."""
        Contribution(flat, external).materialize()
        into.copy_(flat)
        return self._run(lambda group: dist.all_reduce(into, group=group, async_op=True))

    def prepare(
        self,
        into: torch.Tensor,
        *,
        exchange_id: int,
        index: int = 0,
        algorithm: str = AUTO,
        after: CallWhenReady | None = None,
    ) -> None:
        """See `Exchange.prepare`: nothing to do with torch."""

    def broadcast(
        self, flat: torch.Tensor, *, root: int, exchange_id: int, index: int = 0
    ) -> PendingExchange:
        """See `Exchange.broadcast`."""
        return self._run(
            lambda group: dist.broadcast(flat, dist.get_global_rank(group, root), group=group, async_op=True)
        )

    def all_gather(self, flat: torch.Tensor, *, exchange_id: int, index: int = 0) -> PendingExchange:
        """See `Exchange.all_gather`."""
        check_equal_parts(flat, self.size)
        parts = [*flat.chunk(self.size)]

        def all_gather(group: dist.ProcessGroup) -> Any:
            return dist.all_gather(parts, parts[self.position].clone(), group=group, async_op=True)

        return self._run(all_gather)

    def all_to_all(
        self, flat: torch.Tensor, into: torch.Tensor, *, exchange_id: int, index: int = 0
    ) -> PendingExchange:
        """See `Exchange.all_to_all`."""
        check_equal_parts(flat, self.size)
        return self._run(lambda group: dist.all_to_all_single(into, flat, group=group, async_op=True))

    def report_progress(self, on_progress: Callable[[bool], None]) -> None:
        """See `Exchange.report_progress`: nothing is reported."""

    def pop_line_times(self) -> dict[int, float]:
        """See `Exchange.pop_line_times`: nothing is measured."""
        return {}

    def abandon(self, error: WorkerError) -> None:
        """See `Exchange.abandon`; begins to abort all process groups."""
        with self._lock:
            if self._error is not None or self._is_closed:
                return
            self._error = error
        self._abandoned.set()
        start_thread("offbeat-abort", self._abort, on_failure=self._on_abort_failed)

    def _abort(self) -> None:
        self._group = None  # so that this thread frees the last reference, which may block, too
        abort_process_groups()
        self._aborted.set()

    def _on_abort_failed(self, error: BaseException) -> None:
        _log.warning(f"torch.distributed could not abort its process groups: {error}")
        self._aborted.set()

    def close(self, timeout_s: float) -> None:
        """End the process group, or wait until it is aborted, for at most `timeout_s` seconds."""
        with self._lock:
            self._is_closed, is_used = True, self._error is None
        end = partial(dist.destroy_process_group, self._group) if is_used else self._aborted.wait
        try:
            run_with_deadline(end, time.monotonic() + timeout_s)
        except TimeoutError:
            _log.warning(
                f"torch.distributed has not ended its process groups within {timeout_s:g} s: they are left "
                f"as they are, and what this process has queued on {self.device} may never end"
            )

    def _run(self, start: Callable[[dist.ProcessGroup], Any]) -> PendingExchange:
        group = self._group
        if self._error is not None or group is None:
            return _TorchPending(self, None, self._error)
        if self._model_device.has_streams:  # a device that hangs before the exchange is found
            device = cast(Accelerator, self._model_device)
            device.call_after([device.record_event()], _do_nothing)
        try:
            return _TorchPending(self, start(group), None)
        except (RuntimeError, ValueError) as error:  # ValueError where it was aborted meanwhile
            return _TorchPending(self, None, self.explain(error))

    @property
    def error(self) -> WorkerError | None:
        """The error that exchanges fail with, None while they may run."""
        return self._error

    def explain(self, error: Exception) -> WorkerError:
        """Return the error of `abandon`, waiting for it briefly, or else one with torch's message."""
        self._abandoned.wait(_REASON_TIMEOUT_S)
        message = (str(error).splitlines() or [type(error).__name__])[0]
        return self._error or WorkerError(f"a torch.distributed exchange failed: {message}")


class _TorchPending:
    """A work handle; once it has ended, the current stream waits for it too."""

    ended_s: float | None = None

    def __init__(self, exchange: TorchExchange, work: Any, error: WorkerError | None) -> None:
        self._exchange = exchange
        self._work = work
        self._error = error

    def wait(self, timeout_s: float) -> None:
        """See `PendingExchange.wait`; polls, as torch's own wait has no limit on a GPU."""
        if self._error is not None:
            raise self._error
        limit_s = time.monotonic() + timeout_s
        try:
            while not self._work.is_completed() and self._exchange.error is None:
                if time.monotonic() > limit_s:
                    raise WorkerError(f"a torch.distributed exchange was not finished within {timeout_s:g} s")
                time.sleep(_POLL_S)
            if self._exchange.error is None:
                self._work.wait()
        except RuntimeError as error:
            self._error = self._exchange.explain(error)
            raise self._error from error
        if self._exchange.error is not None:
            raise self._exchange.error


def open_nccl(store: Store, worker: int, world: int, device: Device, timeout_s: float) -> TorchExchange:
    """Return an exchange by NCCL over all workers, each of which has a CUDA device of its own.

    Every worker has to call it. Where the program has a process group of all workers, its NCCL is used.

    Args:
        store: the job's.
        worker: this worker, which is its rank.
        world: the number of workers.
        device: this worker's.
        timeout_s: how long the connections may take, and then an exchange, in seconds.

    Raises:
        WorkerError: the workers did not connect in time.
    """
    options: dict[str, Any] = {
        "timeout": datetime.timedelta(seconds=timeout_s),
        "device_id": device.torch_device,  # connects at once, and not in the first exchange
    }

    def connect() -> dist.ProcessGroup:
        torch.cuda.set_device(device.torch_device)
        if dist.is_initialized():
            return cast(dist.ProcessGroup, dist.new_group(backend="nccl", **options))
        dist.init_process_group("nccl", store=store, rank=worker, world_size=world, **options)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    torch.cuda.set_device(device.torch_device)
    try:
        with _errors_left_to_the_caller():
            return TorchExchange(run_with_deadline(connect, time.monotonic() + timeout_s), device)
    except TimeoutError:
        raise WorkerError(
            f"worker {worker} could not connect to the {world - 1} others by NCCL within {timeout_s:g} s: "
            "look for workers that are stuck, and for a network that NCCL cannot use (NCCL_DEBUG=INFO)"
        ) from None


@contextmanager
def _errors_left_to_the_caller() -> Iterator[None]:
    """Keep process groups that are made meanwhile from ending the process when NCCL fails."""
    before = os.environ.get(_ERROR_HANDLING)
    os.environ.setdefault(_ERROR_HANDLING, "0")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_ERROR_HANDLING, None)


def _do_nothing() -> None:
    return
