"""Workers that join a job while it runs, with real processes: they get the state from a peer and take part.

The model counts how often each sample was used (see `test_data_once.py`); replicas must hold the same bits,
and each sample must come once an epoch, whoever is killed and whoever joins.
"""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from cluster import values
from jobs import DEADLINE_S, job
from offbeat.events import Group, Joined, Lost, Ready, Refuse
from offbeat.record import read_log, replay
from offbeat.runtime import session as sessions
from offbeat.strategies import AllReduce, PartialAllReduce
from test_data_once import BATCH, SAMPLES, STRATEGY, Counter, once_each
from test_groups import groups_of, spin

EPOCHS = 30


class Trained:
    """What a worker holds at the end, and what it went through.

    Attributes:
        uses: how often each sample was used, as this replica has it.
        momenta: the optimizer's state.
        epochs: in which the worker was.
        rates: learning rates that its steps were taken with, by step.
    """

    def __init__(self, model, optimizer, session, epochs, rates):
        self.uses = model.uses_N.detach().tolist()
        self.buffer = model.buffer.tolist()
        self.momenta = [row["step"].item() for row in optimizer.state.values()]
        self.worker, self.world, self.step = session.worker, session.world, session.step
        self.epochs, self.rates = epochs, rates


class Counting(Counter):
    """A counter with a buffer, which follows the first member's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(3))

    def forward(self, numbers):
        self.buffer += 1
        return super().forward(numbers)


class Adding(torch.optim.Optimizer):
    """Subtracts gradients whatever the learning rate, and counts its steps in a state of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                row = self.state[parameter]
                row["step"] = row.get("step", torch.zeros(1)) + 1
                if parameter.grad is not None:
                    parameter -= parameter.grad


def train(rank, say, strategy=STRATEGY, epochs=EPOCHS, misdeed=None, compute_s=0.01):
    """A loop as its user would write it; the same for those who come at the start and later."""
    model = Counting()
    optimizer = Adding(model.parameters())
    dataset = TensorDataset(torch.arange(SAMPLES))
    seen, rates = [], {}
    with offbeat.join(model, optimizer, strategy) as session:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        for epoch in session.epochs(epochs):
            seen.append(epoch)
            for (numbers,) in session.batches(dataset, BATCH):
                if misdeed is not None:
                    misdeed(session)
                optimizer.zero_grad()
                spin(compute_s)
                (-model(numbers)).backward()
                once_each(model)
                rates[session.step] = optimizer.param_groups[0]["lr"]
                optimizer.step()
            scheduler.step()
    return Trained(model, optimizer, session, seen, rates)


def trained_once(ended, epochs=EPOCHS):
    """Checks that all hold the same, each sample once an epoch; returns what they hold."""
    results = values(ended)
    for one in results:
        assert one.uses == [float(epochs)] * SAMPLES
        assert one.buffer == results[0].buffer
        assert one.momenta == results[0].momenta
        assert one.step == results[0].step
    return results


class Misdeed:
    """Tells that a step has come, and then perhaps does something to this process, once."""

    def __init__(self, say, step, number=signal.SIGKILL):
        self._say, self._step, self._number = say, step, number

    def __call__(self, session):
        if session.step >= self._step >= 0:
            self._step = -1
            self._say("now")
            if self._number is not None:
                os.kill(os.getpid(), self._number)


def says_when(rank, say, step=10):
    """Rank 0 says when the training is under way."""
    return train(rank, say, misdeed=Misdeed(say, step, None) if rank == 0 else None)


def entries_of(log):
    return read_log(log).entries


def wait_for(log, what, condition):
    """Waits until the run log has an entry for which the condition holds; returns the first."""
    limit_s = time.monotonic() + DEADLINE_S
    while True:
        found = [entry for entry in entries_of(log) if condition(entry)] if log.exists() else []
        if found:
            return found[0]
        assert time.monotonic() < limit_s, f"the run log never showed {what}"


def joined_within_two_rounds(log, worker):
    """Checks, from the run log, that a newcomer takes part soon; returns the group that took it in."""
    entries = entries_of(log)
    came = next(i for i, one in enumerate(entries) if isinstance(one, Joined) and one.worker == worker)
    under_way = max(one.step for one in entries[:came] if isinstance(one, Ready))
    group = next(one for one in entries[came:] if isinstance(one, Group) and worker in one.joining)
    assert group.step <= under_way + 2
    first = next(one for one in entries[came:] if isinstance(one, Ready) and one.worker == worker)
    assert first.step == group.step
    return group


def test_a_newcomer_takes_part_within_two_rounds_and_holds_what_the_others_hold(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(says_when, 3, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.said(0)
        running.add(train)
        ended = running.ends()
    *_, newcomer = trained_once(ended)
    assert (newcomer.worker, newcomer.world) == (3, 3)
    joined_within_two_rounds(log, 3)
    assert replay(read_log(log)) is None
