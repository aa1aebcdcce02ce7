"""Flat values on their way between the device of a worker's model and the host, where requests have them.

Theory of operation
-------------------

The host queues a step on an accelerator, and waits for it once: where gradients are pushed.

1. Gradients are packed on the device, group by group. `to_host` copies them out into pinned memory, on the
   stream for copies out, and waits for the last of these copies. The push is made from this memory, which is
   used again when the push, and whatever else refers to it, is over.
2. Pulled values are written to pinned memory, which `to_device` copies in on the stream for copies in. The
   current stream waits for the copy, not the host. Before values are written there again, the host waits for
   the end of the last copy, which the device has reached long before unless the host is far ahead of it.
3. What never leaves the device is computed there: a worker's own changes, and their sums.

The push waits, and does not begin in another thread when the copy has ended, because a step is over when its
gradient exists: the coordinator counts it then, the times of a process's pushes ascend in the order in which
its threads take them, and a pull that follows a push contains it.

On the CPU both are the memory that is there already. This module requests nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.runtime.devices.interface import Accelerator, Device
from offbeat.runtime.transport.buffer_pool import Buffer, BufferPool


@dataclass
class _PulledMemory:
    """Pinned memory for pulled values, and the event of the last copy to the device; None before it."""

    flat: torch.Tensor
    copied_in: Any = None


class ValueStaging:
    """Copies flat values between the device of a worker's model and the host; for the worker's thread.

    Args:
        device: holds the model.
    """

    def __init__(self, device: Device) -> None:
        self._device = cast(Accelerator, device) if device.has_streams else None
        self._buffers = BufferPool(self._allocate_pinned, bytes_min=1, bytes_max=math.inf)
        self._pulled: dict[int, _PulledMemory] = {}  # by group

    def to_host(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return values on the host; blocks until the device has computed and copied them.

        On the CPU they are the given ones.

        Raises:
            OffbeatError: the device did not compute them in time.
        """
        device = self._device
        if device is None or not flats:
            return [*flats]
        streams = [device.current_stream()]
        hosted = [self._pinned_like(flat) for flat in flats]
        copies = [device.copy_out(flat, kept, streams) for flat, kept in zip(flats, hosted, strict=True)]
        device.synchronize_event(copies[-1])  # copies out end in order
        return hosted

    def to_device(self, number: int, values: NDArray[Any]) -> torch.Tensor:
        """Return a group's pulled values on the device, where the current stream waits for them.

        On an accelerator it is new memory, on the CPU that of `values`.

        Args:
            number: the group's.
            values: (K,), always of the same size for a group.

        Raises:
            OffbeatError: the device did not copy the group's last values in time.
        """
        device, given = self._device, torch.from_numpy(values)
        if device is None:
            return given
        if number not in self._pulled:
            self._pulled[number] = _PulledMemory(device.pinned_zeros(len(given), given.dtype))
        pulled = self._pulled[number]
        if pulled.copied_in is not None:
            device.synchronize_event(pulled.copied_in)
        pulled.flat.copy_(given)
        flat = device.empty(len(given), given.dtype)
        pulled.copied_in = device.copy_in(pulled.flat, flat, [device.record_event()])
        device.make_stream_wait(pulled.copied_in)
        return flat

    def _allocate_pinned(self, size_bytes: int) -> Buffer:
        assert self._device is not None
        buffer: Buffer = self._device.pinned_zeros(size_bytes, torch.uint8).numpy()
        return buffer

    def _pinned_like(self, flat: torch.Tensor) -> torch.Tensor:
        memory = self._buffers.allocate_array((flat.nbytes,), np.dtype(np.uint8))
        return torch.from_numpy(memory).view(flat.dtype)
