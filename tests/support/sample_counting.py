"""A training that counts how often each sample is used, and checks of the counts."""

import os
import signal

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.runtime.data.equal_shards import epoch_order
from offbeat.strategies import PartialAllReduce
from support.group_training import compute
from support.processes import values

SAMPLES, BATCH = 101, 4
STRATEGY = PartialAllReduce(limit=3, n_profile=2)
CALM = PartialAllReduce(limit=10**6)  # no worker is left out as slow


class Counter(nn.Module):
    """Counts how often each sample was used."""

    def __init__(self):
        super().__init__()
        self.uses_N = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, numbers):
        return self.uses_N[numbers].mean()


def once_each(model):
    """All samples of a round weigh the same, however many they are: makes each count for one."""
    grad = model.uses_N.grad
    if grad is not None and grad.any():
        grad.div_(grad.abs()[grad != 0].min()).round_()


def take(model, optimizer):
    optimizer.step()
    optimizer.zero_grad()


def count(
    rank,
    emit,
    strategy=STRATEGY,
    epochs=4,
    before_step=None,
    compute_s=0.005,
    dataset=None,
    options=None,
    state=None,
):
    """Returns how often each sample was used, as this replica has it, and the steps; goes on from a state."""
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dataset = dataset or TensorDataset(torch.arange(SAMPLES))
    with offbeat.join(model, optimizer, strategy) as session:
        if state is not None:
            session.load_state_dict(torch.load(state))
        for _ in session.epochs(epochs):
            for (numbers,) in session.batches(dataset, BATCH, **(options or {})):
                if before_step is not None:
                    before_step(session)
                optimizer.zero_grad()
                compute(compute_s)
                (-model(numbers)).backward()
                once_each(model)
                optimizer.step()
        steps = session.step
    return model.uses_N.detach().tolist(), steps


def once(ended, epochs=4):
    for uses, _ in values(ended):
        assert uses == [float(epochs)] * SAMPLES


def once_but_for_the_rest(ended, kept, epochs=4):
    """Each epoch leaves out what is at the end of its order, behind the first `kept` samples."""
    expected = torch.zeros(SAMPLES)
    for epoch in range(epochs):
        expected[epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=True)[:kept]] += 1
    for uses, _ in values(ended):
        assert uses == expected.tolist()


class SignalAtStep:
    """Sends this process a signal when a step comes, once."""

    def __init__(self, emit, step, number=signal.SIGKILL):
        self._emit, self._step, self._number = emit, step, number

    def __call__(self, session):
        if session.step == self._step:
            self._step = -1
            self._emit("now")
            os.kill(os.getpid(), self._number)


def accumulates(rank, emit, victim=None):
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dataset = TensorDataset(torch.arange(SAMPLES))
    before_step = SignalAtStep(emit, 3)
    with offbeat.join(model, optimizer, STRATEGY) as session:
        for _ in session.epochs(3):
            for place, (numbers,) in enumerate(session.batches(dataset, BATCH)):
                if rank == victim:
                    before_step(session)
                compute(0.002)
                if place % 3 < 2:
                    with session.no_sync():
                        (-model(numbers)).backward()
                else:
                    (-model(numbers)).backward()
                    take(model, optimizer)
            if place % 3 < 2:
                take(model, optimizer)
    return model.uses_N.detach().tolist(), session.step
