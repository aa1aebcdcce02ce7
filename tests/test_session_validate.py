"""`session.validate`: the workers of a job share the validation of each epoch out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import offbeat
from cluster import run
from offbeat.events import EvaluatePart, LendSnapshot, SnapshotTaken, Validated
from offbeat.record import read_log, replay
from offbeat.strategies import DPAR, SSP, AllReduce, Hybrid, PartialAllReduce, ServerBSP
from runlogs import entries_of

STEADY = PartialAllReduce(limit=10**6)  # nobody is left out for being slow


class Samples(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, position):
        drawn = torch.Generator().manual_seed(position)
        return torch.rand(6, generator=drawn), position % 3


TRAINING, VALIDATION = Samples(64), Samples(50)


def evaluate(model, part):
    samples = [part[position] for position in range(len(part))]
    labels = torch.tensor([label for _, label in samples])
    logits = model(torch.stack([inputs for inputs, _ in samples]))
    return {"loss": F.cross_entropy(logits, labels), "right": int((logits.argmax(1) == labels).sum())}


def a_model(kind="plain"):
    torch.manual_seed(3)
    between = {"plain": [], "norm": [nn.BatchNorm1d(8)], "dropout": [nn.Dropout(0.5)]}[kind]
    return nn.Sequential(nn.Linear(6, 8), *between, nn.ReLU(), nn.Linear(8, 3))


def train_epoch(model, optimizer, session):
    for inputs, labels in session.batches(TRAINING, batch_size=8):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def state_of(model):
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


class Trained:
    """What a worker's validations came to, and its model's states at the ends of epochs."""

    def __init__(self, session, model, ends):
        validator = session.validator
        self.history, self.stopped, self.ends = validator.history, validator.stopped, ends
        self.last = state_of(model)
        self.best = None
        if validator.has_best:
            self.best = {name: value.numpy() for name, value in validator.best_state_dict().items()}


def train(rank, say, strategy, epochs=3, kind="plain", judge=evaluate, **options):
    torch.set_num_threads(1)
    model, ends = a_model(kind), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "patience" in options:
        options["monitor"] = offbeat.Monitor("loss", patience=options.pop("patience"))
    with offbeat.join(model, optimizer, strategy) as session:
        for epoch in session.epochs(epochs):
            train_epoch(model, optimizer, session)
            session.validate(judge, VALIDATION, **options)
            ends[epoch] = state_of(model)
    return Trained(session, model, ends)


def values(ended):
    errors = [one.trace for one in ended if one.error]
    assert not errors, errors[0]
    return [one.value for one in ended]


@torch.no_grad()
def evaluated(state, kind):
    model = a_model(kind)
    model.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()})
    metrics = evaluate(model.eval(), VALIDATION)
    return {"loss": pytest.approx(float(metrics["loss"]), abs=1e-6), "right": metrics["right"]}


STRATEGIES = {
    "bsp": AllReduce(),
    "hybrid": Hybrid(),
    "partial": STEADY,
    "dpar": DPAR(threshold_ms=1000.0),
    "ssp": SSP(s=2),
}


@pytest.mark.parametrize("kind", ["plain", "norm"])
@pytest.mark.parametrize("strategy", ["bsp", "hybrid", "partial", "dpar", "ssp", "server-bsp"])
def test_all_hear_the_metrics_of_one_snapshot_to_which_each_has_contributed(strategy, kind, tmp_path):
    log = tmp_path / "log"
    chosen = STRATEGIES.get(strategy) or ServerBSP()
    ended = values(run(train, 3, chosen, 3, kind, env={"OFFBEAT_RUN_LOG": str(log)}))
    histories = [one.history for one in ended]
    assert list(histories[0]) == [0, 1, 2]
    assert histories[1:] == histories[:1] * 2
    over = {one.epoch: one for one in entries_of(log, Validated)}
    for epoch, metrics in histories[0].items():
        assert metrics == evaluated(ended[over[epoch].owner].ends[epoch], kind)
        taken = {one.worker: one.digest for one in entries_of(log, SnapshotTaken) if one.epoch == epoch}
        same = [worker for worker in taken if taken[worker] == over[epoch].digest]
        for worker in same:
            assert metrics == evaluated(ended[worker].ends[epoch], kind)
        parts = [one for one in entries_of(log, EvaluatePart) if one.epoch == epoch]
        lent = {one.borrower for one in entries_of(log, LendSnapshot) if one.epoch == epoch}
        assert {one.worker for one in parts} <= {*same, *lent}
        assert not lent & {*same}
    replay(read_log(log))
