"""A training that is validated after each epoch by evaluators in threads of their own, on a late device."""

from __future__ import annotations

import copy
import random
from collections import deque
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from offbeat.policies.validation.schedule import TakeSnapshot, split_even
from offbeat.runtime.devices.host import Host
from offbeat.runtime.validation.evaluators import (
    ThreadEvaluator,
    evaluate_or_error,
    make_parts,
)
from offbeat.runtime.validation.validated_training import ValidatedTraining
from support.late_device import LateDevice
from support.turns import Turns

EPOCHS, STEPS, BATCH, HELD_OUT = 4, 3, 4, 10
RESULTS = "the training does not wait for the results of the evaluators that read the snapshot"
"""A synchronization that `validate_late` can leave out, as those of `late_device`."""


class Model(nn.Module):
    """Has parameters, buffers, a parameter of another layout, and a tensor that is neither."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Parameter(torch.randn(3, 6).t())
        self.register_buffer("mean", torch.zeros(6))
        self.scale = torch.ones(6)

    def forward(self, x):
        x = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return torch.tanh((x - self.mean) * self.scale) @ self.last


class Training:
    """A loop of steps, the same on every device; now and then on another stream.

    Args:
        seed: of the model, the data and the streams.
        device: a `LateDevice`, or the host.
    """

    def __init__(self, seed, device):
        self._random, self.steps = random.Random(f"streams {seed}"), 0
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = Model()
        self._inputs = torch.randn(EPOCHS, STEPS, BATCH, 4, generator=generator)
        self._labels = torch.randint(3, (EPOCHS, STEPS, BATCH), generator=generator)
        self._late = device if device.has_streams else None
        if self._late is not None:
            tensors = [*self.model.state_dict().values(), self.model.scale, self._inputs, self._labels]
            for tensor in tensors:
                device.adopt(tensor)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.5)

    def run(self, at_the_end_of):
        """Calls `at_the_end_of(epoch)` after each epoch; returns the state at the end."""
        for epoch in range(EPOCHS):
            is_aside = self._random.random() < 0.3
            if is_aside and self._late is not None:
                with self._late.on_side_stream():
                    self._train(epoch)
                    at_the_end_of(epoch)
                self._late.join_side_stream()
            else:
                self._train(epoch)
                at_the_end_of(epoch)
        return [*self.model.state_dict().values(), self.model.scale]

    def _train(self, epoch):
        self.model.train()
        for x, y in zip(self._inputs[epoch], self._labels[epoch], strict=True):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.model.scale.mul_(1.25)
            self.steps += 1


def evaluate_on(device):
    def evaluate(model, part):
        loss = right = 0.0
        for start in range(0, len(part), 3):
            x, y = part[start : start + 3]
            logits = model(x.to(device.torch_device))
            y = y.to(device.torch_device)
            loss = loss + F.cross_entropy(logits, y, reduction="sum")
            right = right + (logits.argmax(1) == y).sum()
        metrics = {"loss": float(loss), "right": int(right)}
        model(x.to(device.torch_device))  # read by nobody: the metrics do not wait for it
        return metrics

    return evaluate


def held_out(seed):
    generator = torch.Generator().manual_seed(seed + 1000)
    return TensorDataset(
        torch.randn(HELD_OUT, 4, generator=generator), torch.randint(3, (HELD_OUT,), generator=generator)
    )


def take_of(epoch, workers):
    return TakeSnapshot(epoch=epoch, parts=split_even(HELD_OUT, workers))


def train_alone(seed):
    """The state at the end of the training on the host without any validation."""
    return Training(seed, Host()).run(lambda _: None)


def validate_in_line(seed, workers):
    """The metrics of all parts, and the state at the end: on the host, from a deep copy of the model."""
    training, metrics = Training(seed, Host()), {}
    evaluate, data = evaluate_on(Host()), held_out(seed)

    def validate(epoch):
        model = copy.deepcopy(training.model).eval()
        for number, positions in enumerate(take_of(epoch, workers).parts):
            with torch.no_grad():
                part = TensorDataset(*data[positions.start : positions.stop])
                metrics[epoch, number] = evaluate(model, part)

    state = training.run(validate)
    return metrics, state


def validate_late(seed, workers, without=None):
    """The same by evaluators with streams and threads of their own, while the training goes on.

    Some epochs are cancelled at a random time; their parts have no metrics or the right ones.

    Returns:
        The metrics or errors, the state at the end, the cancelled epochs, how often the training has waited
        for the device, and in how many evaluations it has taken a step meanwhile.
    """
    turns, chance = Turns(seed), random.Random(f"validations {seed}")
    device = LateDevice(seed, without, turns.maybe_switch)
    with device:
        training = Training(seed, device)
        state = ValidatedTraining(training.model, [], goes_back=False, accelerators=[device])
        evaluate, data = evaluate_on(device), held_out(seed)
        queue, is_over = deque(), False
        results, done, pending, cancelled = {}, {}, deque(), set()
        overlapped = []
        most = chance.choice([1, 2])

        def work(name):
            evaluator = ThreadEvaluator(evaluate, data, [device], has_stream=True)
            with device, device.acting_as(name, {}):
                while True:
                    turns.wait_until(lambda: queue or is_over)
                    if not queue:
                        return
                    part, clock = queue.popleft()
                    device.wait_for_host(clock)
                    steps = training.steps
                    results[part.epoch, part.number] = evaluate_or_error(evaluator, part)
                    done[part.epoch, part.number] = device.clock()
                    overlapped.append(training.steps > steps)

        def collect():
            """Waits for the oldest epoch, and lets the memory of its snapshot be used again."""
            epoch, moment = pending.popleft()
            if chance.random() < 0.2:
                cancelled.add(epoch)
                moment.cancelled.set()
            for number in range(workers):
                turns.wait_until(lambda: (epoch, number) in done)  # noqa: B023
                if without != RESULTS:
                    device.wait_for_host(done[epoch, number])
            state.reuse(moment.snapshot)

        def validate(epoch):
            if len(pending) == most:
                collect()
            moment = state.capture(shared=False)
            queue.extend(
                (part, device.clock())
                for part in make_parts(take_of(epoch, workers), moment.snapshot, moment.cancelled)
            )
            pending.append((epoch, moment))

        for number in range(workers):
            turns.start(lambda number=number: work(f"evaluator {number}"))
        final = training.run(validate)
        while pending:
            collect()
        is_over = True
        turns.end()
        waits = device.synchronizations
        device.synchronize()
    return SimpleNamespace(
        results=results, state=final, cancelled=cancelled, waits=waits, overlapped=sum(overlapped)
    )
