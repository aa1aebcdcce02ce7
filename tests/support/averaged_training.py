"""A training of workers that average their models, in float64, which can be replayed from its run log.

Each worker writes what it adds to its model in each step into a file, before it does: so the file of a worker
that is killed is complete, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.strategies.model_averaging import ADPSGD, Prague, PReduce
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.model_replay import ModelReplay, uses_of

SAMPLES, BATCH, EPOCHS = 90, 5, 2
Averaging = PReduce | ADPSGD | Prague


def dataset(samples: int = SAMPLES) -> TensorDataset:
    chance = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(samples, 6, dtype=torch.float64, generator=chance),
        torch.randint(3, (samples,), generator=chance),
    )


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def vector(tensors: Sequence[torch.Tensor]) -> list[float]:
    """All elements of tensors, in one list."""
    return torch.cat([one.detach().flatten() for one in tensors]).tolist()


def train(
    rank: int,
    emit: Callable[[Any], None],
    strategy: Averaging,
    folder: Path,
    *,
    rate: float = 0.05,
    epochs: int = EPOCHS,
    samples: int = SAMPLES,
    spreads: bool = True,
    before_step: Callable[[Any, int], None] = lambda session, steps: None,
    after_loop: Callable[[], None] = lambda: None,
) -> tuple[int, list[float], int]:
    """Returns the worker's id, its final model, and how many samples it has used.

    Args:
        spreads: each worker begins with a model of its own, not with the one that it has received.
        before_step: called with the session and the steps so far.
        after_loop: called before the session ends.
    """
    model, used, steps = network(), 0, 0
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    with offbeat.join(model, optimizer, strategy) as session:
        worker = session.worker
        if spreads:
            with torch.no_grad():
                for parameter in parameters:
                    generator = torch.Generator().manual_seed(worker)
                    parameter.add_(torch.randn(parameter.shape, generator=generator))
            (folder / f"start-{worker}").write_text(json.dumps(vector(parameters)))
        with (folder / f"updates-{worker}").open("w") as updates:
            momentum = np.zeros(sum(one.numel() for one in parameters))
            for _ in session.epochs(epochs):
                for inputs, labels in session.batches(dataset(samples), BATCH):
                    before_step(session, steps)
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(inputs), labels).backward()
                    gradient = np.array(vector([one.grad for one in parameters if one.grad is not None]))
                    momentum = 0.9 * momentum + gradient
                    print(json.dumps((-rate * momentum).tolist()), file=updates, flush=True)
                    optimizer.step()
                    steps, used = steps + 1, used + len(labels)
            after_loop()
    return worker, vector(parameters), used


def replayed(log: Path, folder: Path, strategy: Averaging) -> dict[int, Any]:
    """The final models of all workers, from the run log and what they have written."""
    starts = {
        int(path.name.split("-")[1]): np.array(json.loads(path.read_text()))
        for path in folder.glob("start-*")
    }
    updates = {
        int(path.name.split("-")[1]): [np.array(json.loads(line)) for line in path.read_text().splitlines()]
        for path in folder.glob("updates-*")
    }
    return ModelReplay(read_log(log).entries, starts, updates, overlap=strategy.overlap).models


def _written(folder: Path, name: str) -> dict[int, list[Any]]:
    """What each worker has written to its file of a name."""
    return {
        int(path.name.split("-")[1]): [np.array(json.loads(line)) for line in path.read_text().splitlines()]
        for path in folder.glob(f"{name}-*")
    }


def check_run(
    log: Path,
    folder: Path,
    strategy: Averaging,
    results: Sequence[tuple[int, list[float], int]],
    *,
    epochs: int = EPOCHS,
    samples: int = SAMPLES,
) -> None:
    """Checks that a run has one model at the end, that of its matrices, and used each sample once."""
    record = read_log(log)
    difference = replay(record)
    assert difference is None, str(difference)
    models = replayed(log, folder, strategy)
    for worker, final, _ in results:
        assert final == results[0][1]
        np.testing.assert_allclose(final, models[worker], rtol=0, atol=1e-12)
    uses = uses_of(record.entries)
    for worker, _, used in results:
        assert used == len(uses.get(worker, ()))
    expected = [(epoch, position) for epoch in range(epochs) for position in range(samples)]
    assert sorted(use for by_worker in uses.values() for use in by_worker) == expected
