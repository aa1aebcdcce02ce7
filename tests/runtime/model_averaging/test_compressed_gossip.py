"""Compressed gossip of real processes: models are those of the formulas, and their mean stays."""

from __future__ import annotations

import json

import numpy as np
import pytest

from offbeat.events import AverageModels
from offbeat.strategies import Choco, parse_strategy
from support.averaged_training import check_run, replayed, train
from support.processes import run, values
from support.run_logs import entries_of

WORKERS = 4
IN_STEP = {"shards": "equal", "overlap": False, "global_every": None}


def gossips(rank, emit, strategy, folder, rate):
    return train(rank, emit, strategy, folder, rate=rate)


def rounds_of(folder):
    """Averagings of snapshots of several workers."""
    averagings = [one for one in entries_of(folder / "log") if isinstance(one, AverageModels)]
    return [one for one in averagings if len(one.group) > 1 and not one.includes_buffers]


def test_all_rounds_but_the_first_continue_and_the_mean_of_all_models_stays(tmp_path):
    strategy = Choco(compress="topk:0.2", gamma=0.3, **IN_STEP)
    env = {"OFFBEAT_RUN_LOG": str(tmp_path / "log")}
    results = values(run(gossips, WORKERS, strategy, tmp_path, 0.0, env=env))
    models = replayed(tmp_path / "log", tmp_path, strategy)
    first = np.array([json.loads((tmp_path / f"start-{worker}").read_text()) for worker in range(WORKERS)])
    for worker, final, _ in results:
        np.testing.assert_allclose(final, models[worker], rtol=0, atol=1e-12)
        np.testing.assert_allclose(final, first.mean(0), rtol=0, atol=1e-12)
    continued = [one.continues for one in rounds_of(tmp_path)]
    assert len(continued) > 5
    assert continued == [False] + [True] * (len(continued) - 1)


@pytest.mark.parametrize("compress", [None, "sign", "qsgd:16", "randomk:0.3"])
def test_with_each_method_models_are_those_of_the_formulas(tmp_path, compress):
    strategy = Choco(compress=compress, gamma=0.1)
    env = {"OFFBEAT_RUN_LOG": str(tmp_path / "log")}
    results = values(run(gossips, WORKERS, strategy, tmp_path, 0.05, env=env))
    check_run(tmp_path / "log", tmp_path, results, strategy)
    assert any(one.continues for one in rounds_of(tmp_path))


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
