"""Finding the implementation for a device; what runs on hardware is in test_gpu.py."""

import pytest
import torch

from offbeat.errors import OffbeatError
from offbeat.runtime.devices.host import Host
from offbeat.runtime.devices.opening import open_device


def start_no_thread(name, run):
    raise AssertionError("a device starts its thread when something is to be waited for")


def test_the_cpu_needs_no_thread_and_no_copies():
    device = open_device(torch.device("cpu"), start_no_thread, 1.0)
    assert isinstance(device, Host)
    begin = device.record_time()
    assert device.elapsed_s(begin, device.record_time()) >= 0.0


def test_a_device_without_streams_is_refused_by_name():
    with pytest.raises(OffbeatError, match=r"the model lies on mps:0.*expected the CPU or an accelerator"):
        open_device(torch.device("mps", 0), start_no_thread, 1.0)
