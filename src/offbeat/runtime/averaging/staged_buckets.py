"""Buckets of a model on an accelerator, exchanged through pinned memory of the host.

Theory of operation
-------------------

Gradients are packed on the device, in memory that exists until the bucket has been copied out. The links send
from memory of the host, which keeps this worker's contribution until the round is over: so a round can be
repeated without another copy. The sums arrive in other memory of the host, and are copied into
new memory of the device, which becomes the gradients. So a round needs on the device, next to the gradients,
the buckets that are being copied out; on the host, the contributions and the sums.

Every use of the host's memory waits for the one before:

- an exchange sends a contribution once it has been copied out, and receives into the sums' memory once the
  sums of the round before have been copied in (`StagedBucket._when_copied`);
- a contribution is copied out again only when no exchange reads it: the round is over, or begins again;
- a contribution that changes after it was copied out is first copied back, in the device's order
  (`StagedBucket.packing_view`).

The last entry of the last bucket, the trailer, lies on the host alone: its numbers are made and read there.
This module decides nothing about rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from offbeat.numerics.collectives.buckets import Bucket
from offbeat.runtime.averaging.buckets import BucketBuffer, GradientBucket, Means, ZerosFactory
from offbeat.runtime.collectives.interface import TensorMemory
from offbeat.runtime.devices.interface import Accelerator, CallWhenReady
from offbeat.runtime.devices.memory import DeviceMemory


class _DeviceEntries:
    """The entries of a bucket that lie on the device: all but the trailer.

    Attributes:
        count: their number.
        elements: their number of elements.
    """

    def __init__(self, bucket: Bucket, shapes: Sequence[torch.Size], device: Accelerator) -> None:
        trailer = len(shapes) - 1
        self._shapes = [shapes[entry] for entry in bucket.entries if entry != trailer]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._dtype, self._device = bucket.dtype, device
        self.count, self.elements = len(self._sizes), sum(self._sizes)

    def allocate(self) -> DeviceMemory:
        """Return new memory of the device for them."""
        flat = torch.empty(self.elements, dtype=self._dtype, device=self._device.torch_device)
        parts = flat.split(self._sizes) if self._sizes else ()
        views = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return DeviceMemory(self._device, flat, views)


class _StagedSums(BucketBuffer):
    """Memory of the host for sums, which are copied to new memory of the device in each round.

    Attributes:
        device_entries: what is copied.
        copied_in: the event of the last copy to the device; None before it.
    """

    def __init__(
        self, bucket: Bucket, shapes: Sequence[torch.Size], zeros: ZerosFactory, device: Accelerator
    ) -> None:
        super().__init__(bucket, shapes, zeros)
        self.device_entries = _DeviceEntries(bucket, shapes, device)
        self.copied_in: Any = None

    def means(self) -> _StagedMeans:
        """See `BucketBuffer.means`."""
        return _StagedMeans(self)


class _StagedMeans(Means):
    """The means of one round on the device; the trailer stays on the host.

    Args:
        sums: the memory of the host.
    """

    def __init__(self, sums: _StagedSums) -> None:
        super().__init__(sums)
        self._staged = sums
        self._memory: DeviceMemory | None = None

    def fetch(self) -> None:
        """See `Means.fetch`: begins to copy them to the device."""
        memory = self._allocated()
        if len(memory.flat):
            self._staged.copied_in = memory.copy_in(self._staged.flat[: len(memory.flat)])

    def views(self) -> Sequence[torch.Tensor]:
        """See `Means.views`; the current stream waits for them where they have been fetched."""
        memory = self._allocated()
        memory.use()
        return [*memory.views, *self._staged.views[len(memory.views) :]]

    def divide(self, elements: int, divisor: float) -> None:
        """See `Means.divide`: on the device."""
        if elements:
            memory = self._allocated()
            memory.use()
            memory.flat[:elements].div_(divisor)

    def _allocated(self) -> DeviceMemory:
        if self._memory is None:
            self._memory = self._staged.device_entries.allocate()
        return self._memory


class StagedBucket(GradientBucket):
    """A bucket of tensors on an accelerator; `contribution` and `output` are memory of the host.

    Args:
        bucket, shapes, parameters: see `GradientBucket`.
        zeros: allocates pinned memory of the host.
        device: holds the model.
    """

    allows_external = False

    def __init__(
        self,
        bucket: Bucket,
        shapes: Sequence[torch.Size],
        parameters: int,
        zeros: ZerosFactory,
        device: Accelerator,
    ) -> None:
        self._device, self._entries = device, _DeviceEntries(bucket, shapes, device)
        super().__init__(bucket, shapes, parameters, zeros)
        self._packed: DeviceMemory | None = None  # None where the host has it
        self._is_copied_out = False  # the host has this round's contribution
        self._copied_out: Any = None  # the event of the last copy out

    def _make_output(self) -> _StagedSums:
        return _StagedSums(*self._buffer_arguments, self._device)

    # Packing and exchanging ------------------------------------------------------------------------------

    def packing_view(self, position: int) -> torch.Tensor:
        """See `GradientBucket.packing_view`: allocates it, or copies back what was copied to the host."""
        if position >= self._entries.count:
            return self.contribution.views[position]
        if self._packed is None:
            self._packed = self._entries.allocate()
            if self._is_copied_out:
                self._packed.copy_in(self._host_part, [self._copied_out])
        self._packed.use()
        return self._packed.views[position]

    @property
    def _host_part(self) -> torch.Tensor:
        """The contribution without the trailer."""
        return self.contribution.flat[: self._entries.elements]

    def _bring_to_host(self) -> None:
        """See `GradientBucket._bring_to_host`; the memory that was packed in is left to others."""
        if self._packed is None:
            return
        if self._entries.elements:
            self._copied_out = self._packed.copy_out(self._host_part)
            self._is_copied_out = True
        self._packed = None

    def _when_copied(self) -> CallWhenReady | None:
        """See `GradientBucket._when_copied`: the last copies out of and into the device have ended."""
        assert isinstance(self.output, _StagedSums)
        events = [event for event in (self._copied_out, self.output.copied_in) if event is not None]
        return partial(self._device.call_after, events) if events else None

    # Reusing the memory ----------------------------------------------------------------------------------

    def end_round(self) -> None:
        """See `GradientBucket.end_round`: what is packed next begins with nothing."""
        super().end_round()
        self._is_copied_out, self._packed = False, None

    def replace_read_buffers(self, is_read: Callable[[torch.Tensor], bool]) -> None:
        """See `GradientBucket.replace_read_buffers`; waits for the copy of what is replaced."""
        if self._is_copied_out and is_read(self.contribution.flat):
            self._device.synchronize_event(self._copied_out)
        super().replace_read_buffers(is_read)


def make_buckets(
    plan: Sequence[Bucket],
    shapes: Sequence[torch.Size],
    parameters: int,
    memory: TensorMemory,
    exchange_device: torch.device,
) -> list[GradientBucket]:
    """Return the buckets of a plan, in memory from which they can be exchanged.

    Args:
        plan, shapes, parameters: see `GradientBucket`.
        memory: allocates memory of the host, and knows the device of the model.
        exchange_device: see `Exchange.device`.
    """
    if exchange_device.type != "cpu":
        zeros = partial(_zeros_on, exchange_device)
        return [GradientBucket(bucket, shapes, parameters, zeros) for bucket in plan]
    if not memory.device.has_streams:
        return [GradientBucket(bucket, shapes, parameters, memory.zeros) for bucket in plan]
    device = cast(Accelerator, memory.device)
    return [StagedBucket(bucket, shapes, parameters, memory.zeros, device) for bucket in plan]


def _zeros_on(device: torch.device, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(elements, dtype=dtype, device=device)
