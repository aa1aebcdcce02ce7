"""An accelerator that torch knows, such as a CUDA, ROCm or XPU device: streams, events and pinned memory."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch

from offbeat.errors import OffbeatError
from offbeat.runtime.devices.event_callbacks import EventCallbacks, StartThread, hang_error
from offbeat.runtime.processes.threads import run_with_deadline

_POLL_S = 0.0001  # a step on a parameter server waits for up to so much longer than it has to
_NEEDED = ("Stream", "Event", "stream", "current_stream", "synchronize")


class TorchAccelerator:
    """See `Accelerator`.

    Args:
        device: the device, with its index.
        start_thread: starts the threads that wait for events.
        timeout_s: how long the device may take for what is queued on it, in seconds.

    Raises:
        OffbeatError: torch has no streams for devices of this type.
    """

    has_streams = True

    def __init__(self, device: torch.device, start_thread: StartThread, timeout_s: float) -> None:
        self.torch_device = device
        self._timeout_s = timeout_s
        self._module: Any = torch.get_device_module(device)
        missing = [name for name in _NEEDED if not hasattr(self._module, name)]
        if missing:
            raise OffbeatError(
                f"the model lies on {device}, for which torch.{device.type} has no {missing[0]}: expected "
                "the CPU or an accelerator with streams (CUDA, ROCm, XPU)"
            )
        self._copies_out, self._copies_in = self.new_stream(), self.new_stream()
        # Blocking events let the waiting thread sleep: others (torch.Event too) keep a core busy.
        self._event_options = {"blocking": True} if device.type == "cuda" else {}
        use_device = partial(self._module.device, device)  # else a new thread would open the first one
        self._callbacks = EventCallbacks(device, start_thread, timeout_s, use_device)

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Device.empty`."""
        return torch.empty(elements, dtype=dtype, device=self.torch_device)

    # Memory of the host ----------------------------------------------------------------------------------

    def pinned_zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Device.pinned_zeros`."""
        return torch.zeros(elements, dtype=dtype, device="cpu", pin_memory=elements > 0)

    def pin(self, memory: memoryview) -> bool:
        """See `Device.pin`: CUDA and ROCm can pin memory that exists already."""
        if self.torch_device.type != "cuda":
            return False
        runtime = self._module.cudart()
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with self._module.device(self.torch_device):
            if int(runtime.cudaHostRegister(address, len(memory), 0)):
                with suppress(RuntimeError):  # takes the error, which would else be raised by a kernel
                    torch.zeros(1, device=self.torch_device)
                return False
        # Of an object's finalizers, the newest runs first: that which unmaps the memory follows.
        weakref.finalize(memory.obj, self._unpin, address).atexit = False
        return True

    def _unpin(self, address: int) -> None:
        if self._callbacks.has_hung:  # it would wait for the device; at the end of the process this is void
            return
        with self._module.device(self.torch_device):  # else this thread would open the first device
            self._module.cudart().cudaHostUnregister(address)

    # Copies ----------------------------------------------------------------------------------------------

    def current_stream(self) -> Any:
        """See `Accelerator.current_stream`."""
        return self._module.current_stream(self.torch_device)

    def new_stream(self) -> Any:
        """See `Accelerator.new_stream`."""
        return self._module.Stream(device=self.torch_device)

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        """See `Accelerator.on_stream`."""
        context: AbstractContextManager[object] = self._module.stream(stream)
        return context

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Hashable]) -> Any:
        """See `Accelerator.copy_out`."""
        for stream in after:
            self._copies_out.wait_stream(stream)
        return self._copy(source, target, self._copies_out)

    def copy_in(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Any]) -> Any:
        """See `Accelerator.copy_in`."""
        for event in after:
            self._copies_in.wait_event(event)
        return self._copy(source, target, self._copies_in)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> Any:
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
        event = self._new_event(stream)
        self.call_after([event], partial(_keep, source, target))
        return event

    def record_event(self) -> Any:
        """See `Accelerator.record_event`."""
        return self._new_event(self.current_stream())

    def _new_event(self, stream: Any) -> Any:
        event = self._module.Event(**self._event_options)
        event.record(stream)
        return event

    # Waiting ---------------------------------------------------------------------------------------------

    def make_stream_wait(self, event: Any) -> None:
        """See `Accelerator.make_stream_wait`."""
        self.current_stream().wait_event(event)

    def keep_for_stream(self, tensor: torch.Tensor) -> None:
        """See `Accelerator.keep_for_stream`."""
        tensor.record_stream(self.current_stream())

    def call_after(self, events: Iterable[Any], callback: Callable[[], object]) -> None:
        """See `Accelerator.call_after`."""
        self._callbacks.call_after(events, callback)

    def synchronize_event(self, event: Any) -> None:
        """See `Accelerator.synchronize_event`."""
        limit_s = time.monotonic() + self._timeout_s
        while not event.query():
            if time.monotonic() > limit_s:
                raise hang_error(self.torch_device, self._timeout_s)
            time.sleep(_POLL_S)

    def check_not_capturing(self) -> None:
        """See `Device.check_not_capturing`."""
        if self.torch_device.type == "cuda" and self._module.is_current_stream_capturing():
            raise OffbeatError(
                "the model's forward or backward pass is captured in a CUDA graph, whose repetitions would "
                "exchange no gradients: do not capture what runs the joined model"
            )

    def synchronize(self) -> None:
        """See `Device.synchronize`.

        Raises:
            OffbeatError: it has not done all in time.
        """
        try:
            run_with_deadline(
                partial(self._module.synchronize, self.torch_device), time.monotonic() + self._timeout_s
            )
        except TimeoutError:
            raise hang_error(self.torch_device, self._timeout_s) from None

    def close(self) -> None:
        """See `Device.close`."""
        self._callbacks.close()

    # Time ------------------------------------------------------------------------------------------------

    def record_time(self) -> Any:
        """See `Device.record_time`."""
        event = self._module.Event(enable_timing=True)
        event.record(self.current_stream())
        return event

    def elapsed_s(self, begin: Any, end: Any) -> float | None:
        """See `Device.elapsed_s`."""
        if not (begin.query() and end.query()):
            return None
        return float(begin.elapsed_time(end)) / 1000.0


def _keep(*_: torch.Tensor) -> None:
    """Keep tensors as long as this call is due."""
