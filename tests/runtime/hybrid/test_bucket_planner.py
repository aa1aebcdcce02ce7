"""Plans of buckets from times that were measured on the device."""

from functools import partial

import torch
from torch import nn

from offbeat.numerics.collectives.costs import LinkModel
from offbeat.runtime.devices.host import Host
from offbeat.runtime.hybrid.bucket_planner import BucketPlanner
from support.late_device import LateDevice

LAYERS = 6
SLOW_LINE = LinkModel(alpha_s=1.0, beta_s=0.0)  # a ring of 4 takes 6 s


def planned_algorithms(device, finish):
    """The algorithms of the layers' all-reduces after a pass, in the order in which they are used."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(LAYERS)))
    parameters, x = [*model.parameters()], torch.ones(2, 3)
    if device.has_streams:
        for tensor in [*parameters, x]:
            device.adopt(tensor)
    planner = BucketPlanner(
        model, parameters, device, workers=4, policy="cost_model", fuse_bytes=0, message_cost=SLOW_LINE
    )
    planner.uses.attach()
    for entry, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, entry=entry: planner.on_gradient(entry))
    model(x).sum().backward()
    planner.on_pass_ended()
    finish()
    return [algorithm for _, algorithm in planner.make_plan().buckets]


def test_a_gradient_has_as_much_time_as_the_device_takes_until_it_is_needed():
    """The late device counts each operation as a second; queueing all of them takes far less."""
    assert "ring" not in planned_algorithms(Host(), lambda: None)
    device = LateDevice(seed=0)
    with device:
        first, *_, last = planned_algorithms(device, device.synchronize)
    assert first != "ring"  # its gradient is the last, and needed first
    assert last == "ring"


def test_what_the_device_has_not_reached_has_all_the_time():
    device = LateDevice(seed=0)
    device.run_one = partial(bool)  # nothing is done
    with device:
        algorithms = planned_algorithms(device, lambda: None)
    assert algorithms == ["ring"] * LAYERS
