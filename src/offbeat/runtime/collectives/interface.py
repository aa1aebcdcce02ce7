"""Interface of the collectives over a group's members, and the memory that suits them.

There are two implementations: `LinkExchange` runs schedules over links, `TorchExchange` calls
`torch.distributed`. Both work in the background: a call returns a `PendingExchange` at once. This module
imports neither, computes and sends nothing, and never decides on membership.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from offbeat.errors import WorkerError
from offbeat.numerics.collectives.schedules import AUTO
from offbeat.runtime.collectives.contribution import ExternalElements
from offbeat.runtime.devices.interface import CallWhenReady, Device
from offbeat.runtime.transport.endpoint import Endpoint


class PendingExchange(Protocol):
    """One exchange under way.

    Attributes:
        ended_s: its end, on the performance counter; None before that, or where it is not recorded.
    """

    ended_s: float | None

    def wait(self, timeout_s: float) -> None:
        """Block until the result is in the output tensor and the memory may be written again.

        Args:
            timeout_s: the longest wait from now on, in seconds.

        Raises:
            WorkerError: the exchange was abandoned, or did not finish within `timeout_s` seconds.
        """


class Exchange(Protocol):
    """Collectives over a fixed group; all members make the same calls with the same ids.

    Attributes:
        device: of the tensors that it takes.
        size: the number of members.
        position: this worker's index among them.
        keeps_order: all members have to make the calls of one exchange id in the same order.
    """

    device: torch.device
    size: int
    position: int
    keeps_order: bool

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
        """Sum the 1-D tensor `flat` over the members, into a tensor of the same shape and dtype.

        `flat` is only read, except where `external` replaces its elements, so that the call can be repeated
        with the same values if it fails.

        Args:
            exchange_id: never used twice, 0 <= exchange_id < 2**32; larger is later.
            index: distinguishes the tensors of one exchange id, less than 2**20.
            algorithm: one of `offbeat.numerics.collectives.schedules.ALGORITHMS`, `hierarchical:G` or
                `torus:G` for groups of G members, or `AUTO` for what `algorithm_for` returns; the same on all
                members. `TorchExchange` ignores it: torch chooses its own.
            priority: exchanges with a lower number overtake those under way. `TorchExchange` keeps the order
                of the calls.
            external: replaces elements of `flat` by values that lie elsewhere. Those that have to be sent are
                first copied into `flat`.
            after: calls back once `flat` may be read and `into` written, which is now if None.
                `TorchExchange` takes none: streams order its calls.

        Raises:
            ValueError: a member may still read `into` (`TensorMemory.may_be_read`), or the algorithm is
                unknown.
        """

    def prepare(
        self,
        into: torch.Tensor,
        *,
        exchange_id: int,
        index: int = 0,
        algorithm: str = AUTO,
        after: CallWhenReady | None = None,
    ) -> None:
        """Announce an `all_reduce` into this tensor with this id, index and algorithm.

        Data from faster members is then received into the tensor; otherwise it is buffered and copied later.

        Args:
            exchange_id, index, algorithm: of the `all_reduce`.
            after: calls back once `into` may be written, which is now if None.
        """

    def broadcast(
        self, flat: torch.Tensor, *, root: int, exchange_id: int, index: int = 0
    ) -> PendingExchange:
        """Copy the 1-D tensor `flat` of the member at position `root` to all other members, in place."""

    def all_gather(self, flat: torch.Tensor, *, exchange_id: int, index: int = 0) -> PendingExchange:
        """Copy each member's part of the 1-D tensor `flat` to all other members, in place.

        Args:
            flat: as many equal parts as there are members, in their order; this member's is filled.
            exchange_id, index: see `all_reduce`.

        Raises:
            ValueError: the members cannot have equal parts, or a member may still read `flat`.
        """

    def all_to_all(
        self, flat: torch.Tensor, into: torch.Tensor, *, exchange_id: int, index: int = 0
    ) -> PendingExchange:
        """Send each member its part of the 1-D tensor `flat`, which is only read.

        Args:
            flat: as many equal parts as there are members, for each of them, in their order.
            into: receives as many parts, for this member, in the order of their senders; of the same shape
                and dtype.
            exchange_id, index: see `all_reduce`.

        Raises:
            ValueError: the members cannot have equal parts, or a member may still read `into`.
        """

    def report_progress(self, on_progress: Callable[[bool], None]) -> None:
        """Call `on_progress` every 0.2 s while an exchange takes longer than that.

        It is called in the I/O thread, with whether data have passed this worker's links since the call
        before. `TorchExchange` never calls it.
        """

    def pop_line_times(self) -> dict[int, float]:
        """Return how long data took to its receivers, by their positions, since the last call.

        Of each message sent in an exchange, the time in seconds from the queueing of its last bytes until the
        receiver has them; the longest. `TorchExchange` measures nothing.
        """

    def abandon(self, error: WorkerError) -> None:
        """Fail all pending and later exchanges with `error`; thread-safe."""


class TensorMemory:
    """Allocates tensors on the host, in memory that exchanges send from fastest, and the device copies.

    Args:
        endpoint: this worker's links, with every other worker on this host introduced.
        device: holds the model.

    Attributes:
        peak_bytes: the most memory that its tensors have had at a time.
    """

    def __init__(self, endpoint: Endpoint, device: Device) -> None:
        self._endpoint, self.device = endpoint, device
        self._allocated_bytes = self.peak_bytes = 0
        self._freed_bytes: deque[int] = deque()  # since the last allocation; by any thread

    def zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new 1-D tensor of zeros, if possible in memory that workers on this host can read."""
        size_bytes = elements * dtype.itemsize
        shared = self._endpoint.allocate_shared(size_bytes)
        if shared is None or not self.device.pin(shared):
            flat = self.device.pinned_zeros(elements, dtype)
        else:
            flat = torch.frombuffer(shared, dtype=dtype)
        weakref.finalize(flat, self._freed_bytes.append, size_bytes).atexit = False
        self._allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return flat

    @property
    def allocated_bytes(self) -> int:
        """The memory that its tensors have now."""
        while self._freed_bytes:
            self._allocated_bytes -= self._freed_bytes.popleft()
        return self._allocated_bytes

    def may_be_read(self, flat: torch.Tensor) -> bool:
        """Whether another worker may still read this tensor, because an exchange was abandoned.

        If so, it must not be written any more: allocate another one.
        """
        return flat.device.type == "cpu" and self._endpoint.has_readers(memory_of(flat))


def memory_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous 1-D tensor on the CPU as a writable view."""
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw)


def check_equal_parts(flat: torch.Tensor, members: int) -> None:
    """Check that the members can have equal parts of a tensor.

    Raises:
        ValueError: they cannot.
    """
    if flat.numel() % members:
        raise ValueError(f"expected equal parts for {members} members, got {flat.numel()} elements in all")
