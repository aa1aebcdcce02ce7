"""Collectives by `torch.distributed`: NCCL on GPUs, with every rank of the process group present.

Torch chooses the algorithm and keeps the order of the calls. This module never decides on membership.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from offbeat.errors import WorkerError
from offbeat.runtime.collectives.contribution import Contribution, ExternalElements
from offbeat.runtime.collectives.interface import PendingExchange
from offbeat.runtime.devices.interface import CallWhenReady
from offbeat.runtime.processes.waiting import SignalSafeEvent

_POLL_S = 0.001
_REASON_TIMEOUT_S = 2.0  # torch's error may precede the coordinator's, which names the worker


class TorchExchange:
    """Collectives by `torch.distributed`: NCCL on GPUs, with every rank of the process group present.

    Args:
        group: a process group of exactly the members.
        device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._is_nccl = dist.get_backend(group).startswith("nccl")  # nccl2 and nccl-legacy too
        self.device = device
        self._error: WorkerError | None = None
        self._abandoned = SignalSafeEvent()

    def all_reduce(
        self,
        flat: torch.Tensor,
        into: torch.Tensor,
        *,
        exchange_id: int,
        index: int = 0,
        algorithm: str = "ring",
        priority: int = 0,
        external: Sequence[ExternalElements] = (),
        after: CallWhenReady | None = None,
    ) -> PendingExchange:
        """See `Exchange.all_reduce`; the process group keeps the order of the calls."""
        Contribution(flat, external).materialize()
        into.copy_(flat)
        return self._run(partial(dist.all_reduce, into, group=self._group, async_op=True))

    def prepare(
        self,
        into: torch.Tensor,
        *,
        exchange_id: int,
        index: int = 0,
        algorithm: str = "ring",
        after: CallWhenReady | None = None,
    ) -> None:
        """See `Exchange.prepare`: nothing to do with torch."""

    def broadcast(
        self, flat: torch.Tensor, *, root: int, exchange_id: int, index: int = 0
    ) -> PendingExchange:
        """See `Exchange.broadcast`."""
        source = dist.get_global_rank(self._group, root)
        return self._run(partial(dist.broadcast, flat, source, group=self._group, async_op=True))

    def report_progress(self, on_progress: Callable[[bool], None]) -> None:
        """See `Exchange.report_progress`: nothing is reported."""

    def pop_line_times(self) -> dict[int, float]:
        """See `Exchange.pop_line_times`: nothing is measured."""
        return {}

    def abandon(self, error: WorkerError) -> None:
        """See `Exchange.abandon`; kernels that wait for a lost rank are aborted with their group."""
        self._error = self._error or error
        self._abandoned.set()
        if self._is_nccl:
            self._group.abort()

    def _run(self, start: Callable[[], Any]) -> PendingExchange:
        if self._error is not None:
            return _TorchPending(self, None, self._error)
        try:
            return _TorchPending(self, start(), None)
        except RuntimeError as error:
            return _TorchPending(self, None, self.explain(error))

    @property
    def error(self) -> WorkerError | None:
        """The error that exchanges fail with, None while they may run."""
        return self._error

    @property
    def is_nccl(self) -> bool:
        """Whether results are ordered by a GPU stream, so that the host need not wait."""
        return self._is_nccl

    def explain(self, error: RuntimeError) -> WorkerError:
        """Return the error of `abandon`, waiting for it briefly, or else one with torch's message."""
        self._abandoned.wait(_REASON_TIMEOUT_S)
        message = (str(error).splitlines() or [type(error).__name__])[0]
        return self._error or WorkerError(f"a torch.distributed exchange failed: {message}")


class _TorchPending:
    """A work handle; with NCCL the current stream waits for it and the host does not."""

    ended_s: float | None = None

    def __init__(self, exchange: TorchExchange, work: Any, error: WorkerError | None) -> None:
        self._exchange = exchange
        self._work = work
        self._error = error

    def wait(self, timeout_s: float) -> None:
        """See `PendingExchange.wait`; with NCCL only the current stream waits, without a time limit."""
        if self._error is not None:
            raise self._error
        try:
            if self._exchange.is_nccl:
                self._work.wait()
            else:
                self._poll(timeout_s)
        except RuntimeError as error:
            self._error = self._exchange.explain(error)
            raise self._error from error
        if self._exchange.error is not None:
            raise self._exchange.error

    def _poll(self, timeout_s: float) -> None:
        limit_s = time.monotonic() + timeout_s
        while not self._work.is_completed() and self._exchange.error is None:
            if time.monotonic() > limit_s:
                raise WorkerError(f"a torch.distributed exchange was not finished within {timeout_s:g} s")
            time.sleep(_POLL_S)
        if self._exchange.error is None:
            self._work.wait()
