"""Compressed gossip of real processes: models are those of the formulas, and their mean stays."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import offbeat
from offbeat.errors import OffbeatError
from offbeat.events import AverageModels
from offbeat.strategies import Choco, parse_strategy
from support.averaged_training import check_models, train
from support.processes import run, values
from support.run_logs import entries_of

WORKERS = 4


def gossips(rank, emit, strategy, folder, rate):
    return train(rank, emit, strategy, folder, rate=rate)


def run_in_step(folder, strategy, rate):
    """Runs workers in step, whose models are those of the formulas; the first models and the last ones."""
    strategy = replace(strategy, shards="equal", overlap=False, global_every=None)
    env = {"OFFBEAT_RUN_LOG": str(folder / "log")}
    results = values(run(gossips, WORKERS, strategy, folder, rate, env=env))
    check_models(folder / "log", folder, strategy, results)
    averagings = entries_of(folder / "log", AverageModels)
    continued = [one.continues for one in averagings if len(one.group) > 1 and not one.includes_buffers]
    assert len(continued) > 5
    assert continued == [False] + [True] * (len(continued) - 1)
    first = [json.loads((folder / f"start-{worker}").read_text()) for worker in range(WORKERS)]
    return np.array(first), np.array([final for _, final, _ in results])


def test_the_mean_of_all_models_stays_as_it_is(tmp_path):
    first, last = run_in_step(tmp_path, Choco(compress="topk:0.2", gamma=0.3), 0.0)
    np.testing.assert_allclose(last, np.tile(first.mean(0), (WORKERS, 1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("compress", [None, "sign", "qsgd:16", "randomk:0.3"])
def test_with_each_method_models_are_those_of_the_formulas(tmp_path, compress):
    run_in_step(tmp_path, Choco(compress=compress, gamma=0.1), 0.05)


@pytest.mark.parametrize("gamma", ["adaptive", "theory"])
def test_with_each_consensus_step_models_are_those_of_the_formulas(tmp_path, gamma):
    run_in_step(tmp_path, Choco(compress="topk:0.2", gamma=gamma), 0.05)


NOT_FINITE, REPAIRED, STEPS = 4, 7, 12


def loses_numbers_for_some_steps(rank, emit, compress):
    """Worker 1's model, in float32, has one number that is not finite, for some steps.

    Returns the worker, by step whether its model is finite, and its last model.
    """
    torch.manual_seed(3)
    model = torch.nn.Linear(40, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    strategy = Choco(compress=compress, gamma=0.3, shards="equal", overlap=False, global_every=None)
    is_finite = []
    with offbeat.join(model, optimizer, strategy) as session:
        generator = torch.Generator().manual_seed(session.worker)
        with torch.no_grad():
            model.weight.add_(torch.randn(model.weight.shape, generator=generator))
        for step in range(STEPS):
            if session.worker == 1 and step == NOT_FINITE:
                good = model.weight.detach().clone()
                model.weight.data[2, 7] = torch.nan
            if session.worker == 1 and step == REPAIRED:
                model.weight.data.copy_(good)
            optimizer.zero_grad()
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
            is_finite.append(bool(torch.isfinite(model.weight).all()))
    return session.worker, is_finite, model.weight.detach().flatten().tolist()


@pytest.mark.parametrize("compress", [None, "topk:0.1", "sign", "qsgd:16"])
def test_numbers_that_are_not_finite_reach_no_other_worker_and_no_public_copy(tmp_path, compress):
    env = {"OFFBEAT_RUN_LOG": str(tmp_path / "log")}
    results = values(run(loses_numbers_for_some_steps, WORKERS, compress, env=env))
    broken = [NOT_FINITE <= step < REPAIRED for step in range(STEPS)]
    for worker, is_finite, _ in results:
        assert is_finite == [not (worker == 1 and one) for one in broken]
    lasts = np.array([last for _, _, last in results])
    np.testing.assert_array_equal(lasts, np.tile(lasts[0], (WORKERS, 1)))  # after the mean of all
    rounds = [one for one in entries_of(tmp_path / "log", AverageModels) if len(one.group) > 1]
    continued = [one.continues for one in rounds if not one.includes_buffers]
    assert continued == [False] + [True] * 4 + [False] * 3 + [True] * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("choco:compress=powersgd:2", "other methods only compress sums"),
        ("choco:topology=star", "star"),
        ("choco:gamma=0", "gamma"),
        ("choco:gamma=1.5", "gamma"),
        ("choco:every=0", "at least 1 step"),
    ],
)
def test_options_out_of_range_are_refused(text, expected):
    with pytest.raises(ValueError, match=expected):
        parse_strategy(text)


def test_on_the_command_line_null_sends_whole_models():
    assert parse_strategy("choco:compress=null,gamma=0.5") == Choco(compress=None, gamma=0.5)
    assert parse_strategy("choco:gamma=theory") == Choco(gamma="theory")


def test_a_model_on_an_accelerator_is_refused():
    trained = SimpleNamespace(device=torch.device("cuda:1"))
    with pytest.raises(OffbeatError, match="a model on the CPU under choco, got one on cuda:1"):
        Choco(compress=None).make_synchronizer(None, trained)
