"""A training that newcomers join, and a gate at which its workers wait for them."""

import fcntl
import os

import torch
from torch.utils.data import TensorDataset

import offbeat
from offbeat.events import Joined
from offbeat.strategies import PartialAllReduce
from support.group_training import compute
from support.run_logs import wait_for_entry
from support.sample_counting import BATCH, SAMPLES, Counter, once_each

EPOCHS = 10
STEADY = PartialAllReduce(limit=10**6)  # no worker is left out as slow
GATE, GATE_STEP = "OFFBEAT_TEST_GATE", 40


class Gate:
    """Where all workers of a job stand still in the middle of their training until a test lets them go on.

    Attributes:
        env: for the job's processes.
        log: the job's run log.

    Args:
        folder: of the log.
        name: of a variable of the job's processes, and of a file in `folder`.
    """

    def __init__(self, folder, name=GATE):
        self.log = folder / "log.jsonl"
        self.env = {name: str(folder / name), "OFFBEAT_RUN_LOG": str(self.log)}
        self._lock = os.open(folder / name, os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open()
        os.close(self._lock)

    def open(self):
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def open_for(self, *workers):
        """Waits until these workers have asked to take part."""
        for worker in workers:
            wait_for_newcomer(self.log, worker)
        self.open()


def pass_gate(name=GATE):
    if name in os.environ:
        with open(os.environ[name]) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)


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


def train(rank, emit, strategy=STEADY, epochs=EPOCHS, before_step=None, compute_s=0.01):
    """A loop as its user would write it; the same for those who come at the start and later."""
    model = Counting()
    optimizer = Adding(model.parameters())
    dataset = TensorDataset(torch.arange(SAMPLES))
    seen, rates, has_passed = [], {}, False
    with offbeat.join(model, optimizer, strategy) as session:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        for epoch in session.epochs(epochs):
            seen.append(epoch)
            for (numbers,) in session.batches(dataset, BATCH):
                if before_step is not None:
                    before_step(session)
                if session.step >= GATE_STEP and not has_passed:
                    has_passed = True
                    pass_gate()
                optimizer.zero_grad()
                compute(compute_s)
                (-model(numbers)).backward()
                once_each(model)
                rates[session.step] = optimizer.param_groups[0]["lr"]
                optimizer.step()
            scheduler.step()
    return Trained(model, optimizer, session, seen, rates)


def wait_for_newcomer(log, worker):
    wait_for_entry(log, f"worker {worker}", lambda one: isinstance(one, Joined) and one.worker == worker)
