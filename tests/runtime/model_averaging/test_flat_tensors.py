"""What workers contribute to a mean of models, and what they get from it, on every device."""

import pytest
import torch

from offbeat.runtime.devices.host import Host
from offbeat.runtime.model_averaging.flat_tensors import FlatTensors
from support.late_device import LateDevice
from support.simulated_group import SimulatedExchange, SimulatedLinks


def tensors():
    return [
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16),
        torch.tensor([5, 6]),
    ]


class Alone(SimulatedLinks):
    """The links of a worker that averages with nobody."""

    def before_wait(self):
        pass

    def contribution_of_others(self, index, flat):
        return None


def average_alone(device, own):
    """Replaces the tensors by their mean with nothing, with weight 0.5; returns what was contributed."""
    links = Alone(device)
    flat = FlatTensors(lambda: own, links)
    flat.pack(0.5, is_first=True)
    for pending in flat.all_reduce(SimulatedExchange(links), exchange_id=1, first_index=0):
        pending.wait(10.0)
    contributed = [one.clone() for one in flat.contributions]
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


def add_difference(device, own):
    """Averages a snapshot with nothing, with weight 0.25, while the tensors change."""
    links = Alone(device)
    flat = FlatTensors(lambda: own, links)
    flat.take_snapshot()
    for one in own:
        one.add_(8)
    for pending in flat.all_reduce_snapshot(SimulatedExchange(links), exchange_id=1, weight=0.25):
        pending.wait(10.0)
    flat.add_difference(flat.snapshots)


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_less_the_snapshot_is_added_to_what_the_tensors_are_by_then(seed):
    device, expected = LateDevice(seed), tensors()[:2]
    own = [device.adopt(one) for one in tensors()[:2]]
    with device:
        add_difference(device, own)
        device.synchronize()
    add_difference(Host(), expected)
    assert [one.tolist() for one in own] == [[8 + 0.25, 8 + 0.5], [[8 + 0.75, 8 + 1.0]]]
    assert all(map(torch.equal, own, expected))
