"""Tests on a GPU; only `make test-gpu` runs these.

They run apart: a process that has queried for a GPU can fork none that uses it.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.strategies import ASP, DPAR, DTSSP, SSP, AllReduce, Downpour, PartialAllReduce, ServerBSP
from support.processes import run, values

pytestmark = pytest.mark.skipif(os.environ.get("OFFBEAT_TEST_GPU") != "1", reason="run by `make test-gpu`")

CLASSES = 4


def a_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )
    return model.double().cuda()


def samples(count):
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))


def evaluate(model, part):
    device = next(model.parameters()).device
    loss = right = 0
    for inputs, labels in DataLoader(part, batch_size=7):
        logits = model(inputs.to(device))
        loss += float(F.cross_entropy(logits, labels.to(device), reduction="sum"))
        right += int((logits.argmax(1) == labels.to(device)).sum())
    return {"loss": loss / len(part), "right": right}


def train(model, optimizer, epochs, at_the_end=lambda: None):
    torch.manual_seed(1)
    for _ in range(epochs):
        model.train()
        for inputs, labels in DataLoader(samples(64), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.cuda()), labels.cuda()).backward()
            optimizer.step()
        at_the_end()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_line(epochs):
    """The metrics of each epoch and the weights at the end, without offbeat."""
    model = a_model()
    history = {}

    def judge():
        model.eval()
        devices = [torch.cuda.current_device()]
        with torch.no_grad(), torch.random.fork_rng(devices):
            history[len(history)] = evaluate(model, samples(50))

    return history, train(model, sgd(model), epochs, judge)


def on_one_gpu(rank, emit, work, *args):
    torch.cuda.set_device(0)
    return work(*args)


def validated(backend, workers):
    model = a_model()
    with offbeat.Validator(model, evaluate, samples(50), backend=backend, workers=workers) as validator:
        weights = train(model, sgd(model), 6, validator.validate)
        validator.finish()
    return dict(validator.history), weights, validator.backend


@pytest.mark.parametrize(("backend", "workers"), [("stream", 1), ("stream", 3), ("inline", 1), ("auto", 1)])
def test_overlapped_validation_gives_the_metrics_of_inline_validation_and_changes_no_weights(
    backend, workers
):
    (seen,) = values(run(on_one_gpu, 1, validated, backend, workers))
    (expected,) = values(run(on_one_gpu, 1, in_line, 6))
    history, weights, used = seen
    assert used == backend or backend == "auto"
    assert list(history) == list(expected[0])
    for epoch, metrics in history.items():
        assert metrics["right"] == expected[0][epoch]["right"]
        assert metrics["loss"] == pytest.approx(expected[0][epoch]["loss"], rel=1e-12)
    assert weights == expected[1]


def joined(strategy):
    model = a_model()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, strategy):
        return train(model, optimizer, 2)


def alone():
    model = a_model()
    return train(model, sgd(model), 2)


def test_a_single_worker_trains_as_without_offbeat():
    (seen,) = values(run(on_one_gpu, 1, joined, AllReduce()))
    (expected,) = values(run(on_one_gpu, 1, alone))
    assert seen == expected


@pytest.mark.parametrize("strategy", [PartialAllReduce(), DPAR(threshold_ms=5.0)])
def test_a_strategy_that_cannot_train_on_a_gpu_names_the_device(strategy):
    for one in run(on_one_gpu, 2, joined, strategy):
        assert one.error_type in ("OffbeatError", "WorkerError")
        assert "the model lies on cuda:0" in one.error


def of_two_on(device, strategy):
    """The weights after five steps; the workers have unequal batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double().to(device)
    optimizer = sgd(model)
    inputs, labels = samples(64 + int(os.environ["RANK"]))[:]
    with offbeat.join(model, optimizer, strategy):
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_workers_that_share_a_gpu_train_on_servers_as_on_the_cpu():
    seen = values(run(on_one_gpu, 2, of_two_on, "cuda", ServerBSP()))
    expected = values(run(on_one_gpu, 2, of_two_on, "cpu", ServerBSP()))
    assert seen[0] == seen[1]
    assert seen[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("strategy", [SSP(), DTSSP(), ASP(), Downpour()])
def test_workers_that_share_a_gpu_train_on_servers_at_their_own_pace(strategy):
    for weights in values(run(on_one_gpu, 2, of_two_on, "cuda", strategy)):
        assert all(map(math.isfinite, weights))


def saved_and_loaded(path):
    model = a_model()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        train(model, optimizer, 1)
        torch.save(session.state_dict(), path)
        expected = train(model, optimizer, 1)
    model = a_model()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        session.load_state_dict(torch.load(path, weights_only=True))
        return expected, train(model, optimizer, 1)


def test_training_continues_from_a_checkpoint(tmp_path):
    ((expected, seen),) = values(run(on_one_gpu, 1, saved_and_loaded, tmp_path / "checkpoint.pt"))
    assert seen == expected


def test_a_validator_on_a_stream_requires_a_model_on_a_gpu():
    with pytest.raises(OffbeatError, match="expected a model on a GPU"):
        offbeat.Validator(a_model_on_the_cpu(), evaluate, samples(8), backend="stream")


def a_model_on_the_cpu():
    return nn.Linear(6, CLASSES)
