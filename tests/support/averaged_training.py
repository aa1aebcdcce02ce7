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
from offbeat.runtime.model_averaging.synchronizer import ModelAveragingSynchronizer
from offbeat.strategies.model_averaging import ADPSGD, Choco, DiLoCo, LocalSGD, Prague, PReduce
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.model_replay import ModelReplay, uses_of

SAMPLES, BATCH, EPOCHS = 90, 5, 2
Averaging = PReduce | ADPSGD | Prague | LocalSGD | DiLoCo | Choco


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


def _note_contributions(folder: Path) -> None:
    """Write before each exchange in the background how many steps the model had made that is sent."""
    open_exchanges = ModelAveragingSynchronizer._open_exchanges

    def open_and_note(self: ModelAveragingSynchronizer, groups: Sequence[Sequence[int]]) -> Any:
        averaging, background = self._protocol.averaging, self._snapshots
        if averaging is not None and background is not None and background.is_of_snapshots(averaging):
            with (folder / f"contributions-{self._loop.worker}").open("a") as file:
                print(json.dumps([averaging.exchange_id, background.snapshot_steps]), file=file)
        return open_exchanges(self, groups)

    ModelAveragingSynchronizer._open_exchanges = open_and_note  # type: ignore[method-assign]


def _update(optimizer: torch.optim.SGD, parameter: nn.Parameter) -> torch.Tensor:
    """What the next step adds to a parameter."""
    group, momentum = optimizer.param_groups[0], optimizer.state[parameter].get("momentum_buffer")
    assert parameter.grad is not None
    direction = parameter.grad if momentum is None else group["momentum"] * momentum + parameter.grad
    return -group["lr"] * direction


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
    _note_contributions(folder)
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
        with (
            (folder / f"updates-{worker}").open("w") as updates,
            (folder / f"models-{worker}").open("w") as models,
        ):
            for _ in session.epochs(epochs):
                for inputs, labels in session.batches(dataset(samples), BATCH):
                    before_step(session, steps)
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(inputs), labels).backward()
                    print(json.dumps(vector([_update(optimizer, one) for one in parameters])), file=updates)
                    updates.flush()
                    optimizer.step()
                    print(json.dumps(vector(parameters)), file=models, flush=True)
                    steps, used = steps + 1, used + len(labels)
            after_loop()
    return worker, vector(parameters), used


def check_models(
    log: Path, folder: Path, strategy: Averaging, results: Sequence[tuple[int, list[float], int]]
) -> None:
    """Checks the workers' models after each step and at the end: those of the log and of their updates."""
    starts = {worker: vectors[0] for worker, vectors in _written(folder, "start").items()}
    steps_of_lost = {
        (exchange_id, worker): steps
        for worker, lines in _written(folder, "contributions").items()
        for exchange_id, steps in np.array(lines).tolist()
    }
    updates = _written(folder, "updates")
    entries = read_log(log).entries
    shapes = [parameter.shape for parameter in network().parameters()]
    replay = ModelReplay(entries, starts, updates, steps_of_lost, strategy, shapes)
    for worker, final, _ in results:
        np.testing.assert_allclose(final, replay.models[worker], rtol=0, atol=1e-12)
    survivors = {worker for worker, _, _ in results}
    for worker, models in _written(folder, "models").items():
        reported = [step for step in range(len(models)) if (worker, step) in replay.after_step]
        assert reported == [*range(len(reported))]
        if worker in survivors:
            assert len(reported) == len(models)
        else:  # the reports of its last steps, and of an averaging after those, may have been lost with it
            reported = reported[:-1]
        for step, model in enumerate(models[: len(reported)]):
            expected = replay.after_step[worker, step]
            distance = min(np.abs(model - one).max() for one in expected)
            assert distance < 1e-12, f"worker {worker} differs by {distance:g} after step {step}"


def _written(folder: Path, name: str) -> dict[int, list[Any]]:
    """What each worker has written to its file of a name."""
    return {
        int(path.name.split("-")[1]): [np.array(json.loads(line)) for line in path.read_text().splitlines()]
        for path in folder.glob(f"{name}-*")
    }


def check_run(
    log: Path,
    folder: Path,
    results: Sequence[tuple[int, list[float], int]],
    strategy: Averaging,
    *,
    epochs: int = EPOCHS,
    samples: int = SAMPLES,
) -> None:
    """Checks that a run has one model at the end, that of its matrices, and used each sample once."""
    record = read_log(log)
    difference = replay(record)
    assert difference is None, str(difference)
    check_models(log, folder, strategy, results)
    for _, final, _ in results:
        assert final == results[0][1]
    uses = uses_of(record.entries)
    for worker, _, used in results:
        assert used == len(uses.get(worker, ()))
    expected = [(epoch, position) for epoch in range(epochs) for position in range(samples)]
    assert sorted(use for by_worker in uses.values() for use in by_worker) == expected
