"""What the runtime requires of the device that holds a model.

Theory of operation
-------------------

A program only queues work on an accelerator; the device does it later, in the order of the *stream* that it
was queued on. Links know nothing of streams: they send and receive memory of the host. Between the two stand
copies on streams of their own:

1. Gradients are packed on the stream that computed them. `copy_out` makes the stream for copies out wait for
   that one, and copies the packed gradients into *pinned* memory of the host: the kernel never moves its
   pages, so the device reads and writes it without the help of a processor. The same memory is what the links
   send from.
2. `call_after` calls back once the copy has ended. Only then may a link send the memory.
3. When a link has received the sums, `copy_in` copies them to the device, on the stream for copies in.
4. `make_stream_wait` makes the current stream wait for that copy. The host does not wait.

Memory of the host that a copy reads or writes must not be written, nor what it writes be read, until
the copy has ended. Whoever reuses memory passes the event of the last copy to `call_after`.

This module computes and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

CallWhenReady: TypeAlias = Callable[[Callable[[], object]], object]
"""Calls its argument, in some thread, once something has happened."""


class Device(Protocol):
    """A device that holds a model.

    Attributes:
        torch_device: torch's name of it.
        has_streams: it is an `Accelerator`: it queues work, and has memory of its own.
    """

    torch_device: torch.device
    has_streams: bool

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new 1-D tensor of the device with any content."""

    def pinned_zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new 1-D tensor of zeros in pinned memory of the host."""

    def pin(self, memory: memoryview) -> bool:
        """Pin memory of the host as long as the view exists; return whether that is possible."""

    def check_not_capturing(self) -> None:
        """Check that the program captures no graph: what it queues now runs once.

        Raises:
            OffbeatError: it does.
        """

    def synchronize(self) -> None:
        """Block until the device has done all work that any thread has queued.

        Raises:
            OffbeatError: it has not within the job's timeout.
        """

    def close(self) -> None:
        """Release what the device holds; callbacks that are due may not be called any more."""

    def record_time(self) -> Any:
        """Return a mark of the time at which the device reaches this point of the current stream."""

    def elapsed_s(self, begin: Any, end: Any) -> float | None:
        """Return the seconds between two marks of `record_time`; None before the device reaches them."""


class Accelerator(Device, Protocol):
    """A device whose work is queued on streams, and that has memory of its own."""

    def current_stream(self) -> Hashable:
        """Return the stream on which this thread queues work."""

    def new_stream(self) -> Hashable:
        """Return another stream."""

    def on_stream(self, stream: Hashable) -> AbstractContextManager[object]:
        """Context in which this thread queues work on a stream, and makes new tensors on this device."""

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Hashable]) -> Any:
        """Copy a tensor of the device to pinned memory of the host, after all that is queued on some streams.

        Both are kept until the copy has ended.

        Returns:
            The event of the copy's end.
        """

    def copy_in(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Any]) -> Any:
        """Copy pinned memory of the host to a tensor of the device, after some events.

        Returns:
            The event of the copy's end.
        """

    def record_event(self) -> Any:
        """Return the event that what this thread has queued on its current stream has been done."""

    def make_stream_wait(self, event: Any) -> None:
        """Make this thread's current stream wait for an event; the host does not wait."""

    def keep_for_stream(self, tensor: torch.Tensor) -> None:
        """Leave a tensor's memory to no other tensor before this thread's current stream has used it.

        Needed on streams other than the one on which it was allocated.
        """

    def call_after(self, events: Iterable[Any], callback: Callable[[], object]) -> None:
        """Call `callback` once the events have happened, in another thread, in the order of these calls.

        The job fails, with an error that names the device, if they have not within the job's timeout.
        """

    def synchronize_event(self, event: Any) -> None:
        """Block until an event has happened.

        Raises:
            OffbeatError: it has not within the job's timeout.
        """
