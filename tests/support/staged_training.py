"""A loop of random steps, the same on every device: for averagers whose gradients are staged."""

import random

import pytest
import torch
from torch import nn

from offbeat.events import AssignLateBlock, Block
from offbeat.runtime.averaging.gradient_averager import GradientAverager
from offbeat.runtime.data import late_gradients
from offbeat.runtime.hybrid.layer_averager import LayerAverager
from support.failing_backward import Fails
from support.simulated_group import LR, SimulatedGroup

STEPS = 10


class Model(nn.Module):
    """Has a parameter used twice, one of another layout, one used now and then, and two buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(4, 6), nn.Linear(6, 6)
        self.other = nn.Parameter(torch.randn(5, 6).t())
        self.seldom = nn.Parameter(torch.randn(6))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x, with_seldom, fails):
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
            self.count.add_(1)
        x = self.twice(torch.tanh(self.twice(Fails.apply(x) if fails else x)))
        return (x + self.seldom if with_seldom else x) @ self.other


class Training:
    """A loop of random steps, which are the same on every device.

    Args:
        seed: of the steps, and of what happens to the group.
        device: a `LateDevice`, or the host.
        make_averager: gets this object.
    """

    def __init__(self, seed, device, make_averager):
        self._random = random.Random(f"steps {seed}")
        torch.manual_seed(seed)
        self.model = Model()
        self._inputs = torch.randn(STEPS, 3, 4)
        self._late = device if device.has_streams else None
        if self._late is not None:
            for tensor in [*self.model.state_dict().values(), self._inputs]:
                device.adopt(tensor)
            self._side = None
            self.model.first.bias.register_hook(self._enter_side_stream)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.5)
        self._averages_in_groups = make_averager.averages_in_groups
        self.group = SimulatedGroup(
            seed, device, self.model, self.optimizer, changes=self._averages_in_groups
        )
        self.averager = make_averager(self)
        self.group.averager = self.averager
        self.averager.attach()

    def _enter_side_stream(self, _):
        """Lets a gradient be accumulated on another stream, as those of another branch may be."""
        if self._side is None:
            self._side = self._late.on_side_stream()
            self._side.__enter__()

    def _leave_side_stream(self):
        if self._late is not None and self._side is not None:
            self._side.__exit__(None, None, None)
            self._late.join_side_stream()
            self._side = None

    def run(self):
        """The state at the end."""
        for x in self._inputs:
            self._step(x)
            self.group.membership.step += 1
        self.averager.flush()
        self.averager.detach()
        return [*self.model.state_dict().values()]

    def _step(self, x):
        may = self._random.random
        if may() < 0.8:
            self.optimizer.zero_grad(set_to_none=may() < 0.8)
        if may() < 0.2:
            with self.averager.no_sync():
                self._backward(x, with_seldom=False)
        if self._averages_in_groups:
            self._change_step(x)
        if may() < 0.15:  # gradients set by hand
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
        else:
            self._backward(x, with_seldom=may() < 0.5)
        self.averager.before_step(has_closure=False)
        self.optimizer.step()
        self.averager.after_step()
        self.averager.set_batch_weight(1.0)

    def _change_step(self, x):
        """What only averaging at the end of the backward pass allows."""
        may = self._random.random
        if may() < 0.1:
            self.averager.set_batch_weight(0.0)
        if may() < 0.15:
            with pytest.raises(ZeroDivisionError):
                self._backward(x, with_seldom=True, fails=True)
        if may() < 0.2:
            late_gradient = received_gradient(self.averager._parameters, self.group.device)
            self.group.late_gradients.active.append(late_gradient)

    def _backward(self, x, *, with_seldom, fails=False):
        loss = torch.sin(self.model(x, with_seldom, fails)).mean()
        try:
            loss.backward()
        finally:
            self._leave_side_stream()


def received_gradient(parameters, device):
    """A late gradient that a link has received."""
    message = late_gradients._TensorMessage(2 + len(parameters), parameters, device)
    message.numbers_N.copy_(torch.tensor([0.0, 0.5] + [1.0] * len(parameters)))
    for view in message._views:
        view.fill_(0.5)
    block = Block(id=0, epoch=0, ranges=((0, 1),))
    assigned = AssignLateBlock(worker=1, assignment=0, proxy=0, block=block, reason="")
    received = late_gradients._LateGradient(assigned, message, len(parameters))
    received.open()
    return received


def gradient_averager(bucket_bytes):
    def make(training):
        group = training.group
        return GradientAverager(
            training.model, group, group, workers=2, bucket_bytes=bucket_bytes, timeout_s=10.0
        )

    make.averages_in_groups = True
    return make


def layer_averager(overlap):
    def make(training):
        group = training.group
        return LayerAverager(
            training.model,
            [training.optimizer],
            group,
            group,
            workers=2,
            policy="ring",
            fuse_bytes=None,
            order="priority",
            overlap=overlap,
            timeout_s=10.0,
        )

    make.averages_in_groups = False
    return make
