"""A training in a group that changes: its loop, and the check that all members hold the same bits."""

import hashlib
import itertools
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.strategies import PartialAllReduce

SAMPLES, BATCH, EPOCHS = 96, 4, 6
STRATEGY = PartialAllReduce(limit=3, n_profile=2)


def digest(model, optimizer):
    """The bits of everything that has to be the same on all members."""
    tensors = list(model.state_dict().values())
    tensors += [
        value
        for row in optimizer.state_dict()["state"].values()
        for value in row.values()
        if isinstance(value, torch.Tensor)
    ]
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def make(rank, width=32):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(rank, emit, strategy=STRATEGY, epochs=EPOCHS, before_step=None, compute_s=0.01, width=32):
    """A loop as its user would write it, in which a step takes `compute_s` at least.

    Returns what the members' state was after each step, and this worker's in the end.
    """
    model, optimizer = make(rank, width)
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    states = {}
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(epochs):
            for x, y in session.batches(dataset, BATCH):
                before = session.step
                if before_step is not None:
                    before_step(session)
                optimizer.zero_grad()
                compute(compute_s)
                nn.functional.cross_entropy(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if session.step > before:
                    states[session.step] = digest(model, optimizer)
            scheduler.step()
    return states, digest(model, optimizer)


def compute(duration_s):
    """Takes as long as a computation would, and leaves the machine to others: no worker slows another.

    What is injected as slowness is a multiple of that.
    """
    time.sleep(duration_s)


def agree(results):
    """Checks that all hold the same bits after every step that they share, and in the end."""
    for (states, _), (others, _) in itertools.combinations(results, 2):
        shared = states.keys() & others.keys()
        assert all(states[step] == others[step] for step in shared)
    assert len({final for _, final in results}) == 1
