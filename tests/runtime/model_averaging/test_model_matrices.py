"""Averaged models against another source: products of matrices and training in numpy, in float64."""

from __future__ import annotations

import json
from functools import reduce

import numpy as np
import pytest

from offbeat.strategies import ADPSGD, Choco, DiLoCo, LocalSGD, Prague, PReduce
from offbeat.wire.log_file import read_log
from support.averaged_training import BATCH, SAMPLES, check_run, dataset, network, train
from support.equal_batches import batches_in_step
from support.model_replay import matrices_of
from support.processes import run, values


def name_of(one):
    return f"{one.name}, {'overlap' if one.overlap else 'no overlap'}" if hasattr(one, "name") else str(one)


FAMILY = [
    PReduce(P=2),
    ADPSGD(),
    Prague(size=2),
    PReduce(P=3, overlap=False),
    ADPSGD(topology="complete", overlap=False),
    Prague(mode="random", size=2, overlap=False),
]


def env_of(folder):
    return {"OFFBEAT_RUN_LOG": str(folder / "log")}


def trains(rank, emit, strategy, folder, rate):
    return train(rank, emit, strategy, folder, rate=rate, spreads=not isinstance(strategy, DiLoCo))


@pytest.mark.long(after=5)
@pytest.mark.parametrize(
    "strategy",
    [
        *FAMILY,
        LocalSGD(every=3),
        LocalSGD(every=2, overlap=False),
        DiLoCo(every=3),
        DiLoCo(every=2, quorum=1, grace=0.0, by_pace=False, overlap=False),
        Choco(compress="topk:0.3", gamma=0.4),
        Choco(compress="topk:0.3", gamma=0.4, every=2, topology="complete", overlap=False),
        Choco(compress=None, gamma=1.0, topology="exponential"),
    ],
    ids=name_of,
)
def test_the_logs_matrices_and_the_workers_updates_reproduce_every_model(tmp_path, strategy):
    results = values(run(trains, 4, strategy, tmp_path, 0.05, env=env_of(tmp_path)))
    check_run(tmp_path / "log", tmp_path, results, strategy)


@pytest.mark.long(after=3)
@pytest.mark.parametrize("strategy", FAMILY, ids=name_of)
def test_at_rate_0_the_models_are_the_product_of_the_logs_matrices_with_the_first_ones(tmp_path, strategy):
    results = values(run(trains, 4, strategy, tmp_path, 0.0, env=env_of(tmp_path)))
    first = np.array([json.loads((tmp_path / f"start-{worker}").read_text()) for worker in range(4)])
    matrices = matrices_of(read_log(tmp_path / "log").entries, 4)
    product = reduce(lambda product, matrix: matrix @ product, matrices, np.eye(4))
    expected = product @ first
    for worker, final, _ in results:
        np.testing.assert_allclose(final, expected[worker], rtol=0, atol=1e-12)
        np.testing.assert_allclose(final, first.mean(0), rtol=0, atol=1e-12)


class NumpyWorker:
    """Momentum SGD of the network of `averaged_training`, whose gradients are computed by hand."""

    def __init__(self):
        self.parameters = [one.detach().numpy().copy() for one in network().parameters()]
        self._momenta = [np.zeros_like(one) for one in self.parameters]

    def step(self, inputs, labels):
        first, first_bias, second, second_bias = self.parameters
        hidden = np.tanh(inputs @ first.T + first_bias)
        logits = hidden @ second.T + second_bias
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        error = (shares - np.eye(3)[labels]) / len(labels)
        hidden_error = error @ second * (1 - hidden**2)
        gradients = [hidden_error.T @ inputs, hidden_error.sum(0), error.T @ hidden, error.sum(0)]
        self._momenta = [0.9 * old + new for old, new in zip(self._momenta, gradients, strict=True)]
        self.parameters = [old - 0.05 * new for old, new in zip(self.parameters, self._momenta, strict=True)]


def trains_in_step(rank, emit, strategy, folder):
    return train(rank, emit, strategy, folder, spreads=False)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        (ADPSGD(shards="equal", overlap=False), 2),
        (PReduce(P=3, shards="equal", overlap=False), 3),
        (PReduce(P=2, shards="equal", overlap=False), 2),
        (Prague(size=3, mode="static", shards="equal", overlap=False), 3),
    ],
    ids=name_of,
)
def test_workers_in_step_in_a_group_of_all_average_their_models_after_each_step(tmp_path, strategy, workers):
    results = values(run(trains_in_step, workers, strategy, tmp_path, env=env_of(tmp_path)))
    alone = [NumpyWorker() for _ in range(workers)]
    inputs, labels = [tensor.numpy() for tensor in dataset().tensors]
    for epoch in range(2):
        for batches in batches_in_step(SAMPLES, workers, BATCH, epoch):
            for worker, batch in zip(alone, batches, strict=True):
                worker.step(inputs[batch], labels[batch])
            means = [np.mean(each, axis=0) for each in zip(*(one.parameters for one in alone), strict=True)]
            for worker in alone:
                worker.parameters = [one.copy() for one in means]
    expected = np.concatenate([one.flatten() for one in alone[0].parameters])
    for _, final, _ in results:
        np.testing.assert_allclose(final, expected, rtol=0, atol=1e-12)
