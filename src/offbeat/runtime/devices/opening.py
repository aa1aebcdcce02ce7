"""Finds the implementation for a device, and the accelerator that this process uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from offbeat.runtime.devices.accelerator import StartThread, TorchAccelerator
from offbeat.runtime.devices.host import Host
from offbeat.runtime.devices.interface import Accelerator, Device


def open_device(device: torch.device, start_thread: StartThread, timeout_s: float) -> Device:
    """Return the device that holds a model; the arguments are those of `TorchAccelerator`.

    Raises:
        OffbeatError: it is neither the CPU nor an accelerator with streams.
    """
    if device.type == "cpu":
        return Host()
    return TorchAccelerator(device, start_thread, timeout_s)


def open_accelerators(
    devices: Iterable[torch.device], start_thread: StartThread, timeout_s: float
) -> list[Accelerator]:
    """Return the accelerators among devices, each once; the other arguments are those of `TorchAccelerator`.

    Raises:
        OffbeatError: one is neither the CPU nor an accelerator with streams.
    """
    return [
        TorchAccelerator(device, start_thread, timeout_s)
        for device in dict.fromkeys(devices)
        if device.type != "cpu"
    ]


def find_used_accelerator() -> Any:
    """Return torch's module of this machine's accelerator if this process uses it already, else None.

    Also None for an accelerator whose module does not return the states of its generators (MPS). Nothing is
    opened: a process that has asked for a device can fork none that uses it.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module: Any = torch.get_device_module(accelerator)
    return module if hasattr(module, "get_rng_state_all") and module.is_initialized() else None
