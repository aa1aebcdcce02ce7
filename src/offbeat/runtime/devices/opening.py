"""Finds the implementation for a device."""

from __future__ import annotations

import torch

from offbeat.runtime.devices.accelerator import TorchAccelerator
from offbeat.runtime.devices.event_callbacks import StartThread
from offbeat.runtime.devices.host import Host
from offbeat.runtime.devices.interface import Device


def open_device(device: torch.device, start_thread: StartThread, timeout_s: float) -> Device:
    """Return the device that holds a model; the arguments are those of `TorchAccelerator`.

    Raises:
        OffbeatError: it is neither the CPU nor an accelerator with streams.
    """
    if device.type == "cpu":
        return Host()
    return TorchAccelerator(device, start_thread, timeout_s)
