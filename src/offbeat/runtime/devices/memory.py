"""Memory of an accelerator that is copied from or to the host, and that several streams may use.

This module computes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from offbeat.runtime.devices.interface import Accelerator


class DeviceMemory:
    """Memory of the device, which this thread has just allocated on its current stream.

    Args:
        device: where it lies.
        flat: the whole of it, 1-D.
        views: of parts of it.

    Attributes:
        ready: the event from which on streams may use it.
        used_on: the streams that use it.
    """

    def __init__(self, device: Accelerator, flat: torch.Tensor, views: Sequence[torch.Tensor] = ()) -> None:
        self._device, self.flat, self.views = device, flat, views
        self.ready: Any = device.record_event()
        self.used_on: set[Hashable] = {device.current_stream()}

    def copy_in(self, source: torch.Tensor, after: Sequence[Any] = ()) -> Any:
        """Begin to copy memory of the host here, after some events; return the event of the copy's end."""
        self.ready = self._device.copy_in(source, self.flat, [self.ready, *after])
        self.used_on.clear()
        return self.ready

    def copy_out(self, target: torch.Tensor) -> Any:
        """Begin to copy what its streams have written to the host; return the event of the copy's end."""
        return self._device.copy_out(self.flat, target, self.used_on)

    def use(self) -> None:
        """Let this thread's current stream use the memory, once it is ready."""
        stream = self._device.current_stream()
        if stream not in self.used_on:
            self._device.make_stream_wait(self.ready)
            self._device.keep_for_stream(self.flat)
            self.used_on.add(stream)
