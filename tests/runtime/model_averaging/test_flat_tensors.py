"""What workers contribute to a mean of models, and what they get from it, on every device."""

from types import SimpleNamespace

import pytest
import torch

from offbeat.runtime.devices.host import Host
from offbeat.runtime.model_averaging.flat_tensors import FlatTensors
from support.late_device import LateDevice


def tensors():
    return [
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16),
        torch.tensor([5, 6]),
    ]


def memory(device):
    return SimpleNamespace(zeros=device.pinned_zeros, may_be_read=lambda flat: False, device=device)


def average_alone(device, own):
    """Replaces the tensors by their mean with nothing, with weight 0.5; returns what was contributed."""
    flat = FlatTensors(lambda: own, memory(device))
    flat.pack(0.5, is_first=True)
    contributed = [one.clone() for one in flat.contributions]
    for output, contribution in zip(flat.outputs, flat.contributions, strict=True):
        output.copy_(contribution)
    flat.unpack()
    return contributed


@pytest.mark.parametrize("seed", range(5))
def test_tensors_of_a_device_are_averaged_as_those_of_the_cpu(seed):
    device, expected = LateDevice(seed), tensors()
    own = [device.adopt(one) for one in tensors()]
    with device:
        contributed = average_alone(device, own)
        device.synchronize()
    assert contributed[0].tolist() == [0.5, 1.0]
    assert [one.tolist() for one in own] == [[0.5, 1.0], [[1.5, 2.0]], [5, 6]]
    for one, other in zip(contributed, average_alone(Host(), expected), strict=True):
        assert torch.equal(one, other)
    assert all(map(torch.equal, own, expected))
