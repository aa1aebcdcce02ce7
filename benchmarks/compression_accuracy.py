"""Test accuracy with compressed gradients: `python -m benchmarks compression --accuracy`.

All methods begin with the same weights and take as many steps of SGD with momentum 0.9 on as many samples,
with a learning rate that falls linearly, epoch by epoch. The accuracy is that of the first worker's model in
the end. Gradients are computed. Workers are not stretched, and share the cores: no time may be read from such
a run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import runs
from benchmarks.commands import CompressionOptions
from benchmarks.ddp_hooks import DENSE, is_ddp, wrap
from benchmarks.gloo import GlooSide
from benchmarks.peers import MOMENTUM, equal_shards
from benchmarks.workers import print_progress, read_settings, run_workers, send_result
from offbeat.cli.result import Result, figure_part, machine
from offbeat.cli.training_worker import accuracy
from offbeat.data import load_data_set, resolve_data_dir
from offbeat.models import build_model
from offbeat.runtime.control.environment import SEED_VARIABLE
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

_DEADLINE_S = 600.0


class TrainingRun(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one training, for every worker.

    Attributes:
        data: path of the training samples and labels, then those of the test, as a list for `torch.load`.
        sample_shape, classes: see `build_model`.
        steps: of a worker in an epoch.
        lr: in the first epoch.
    """

    method: str
    model: str
    data: str
    sample_shape: tuple[int, ...]
    classes: int
    epochs: int
    steps: int
    batch_size: int
    lr: float
    seed: int


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over the seeds: accuracies, and how many points they are below dense gradients'."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row["accuracy"])
    means = {method: fmean(values) for method, values in found.items()}
    return {f"accuracy_{figure_part(method)}": value for method, value in means.items()} | {
        f"accuracy_below_dense_percent_{figure_part(method)}": 100 * (means[DENSE] - value)
        for method, value in means.items()
        if method != DENSE and DENSE in means
    }


def run(options: CompressionOptions, methods: Sequence[str], *, command: str) -> Result:
    """Train with every method and seed.

    Raises:
        OffbeatError: the data are missing, or a worker failed.
        ValueError: fewer samples than one step of all workers needs.
    """
    splits = load_data_set(options.data, resolve_data_dir(options.data_dir), download=False)
    samples = min(options.samples, len(splits.train))
    steps = samples // (options.workers * options.batch_size)
    if steps < 1:
        raise ValueError(f"expected at least {options.workers * options.batch_size} samples for one step")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "data.pt")
        used = steps * options.workers * options.batch_size
        torch.save([*(one[:used].clone() for one in splits.train.tensors), *splits.test.tensors], data)
        for seed in range(options.seed, options.seed + options.seeds):
            for method in methods:
                settings = TrainingRun(
                    method=method,
                    model=options.model,
                    data=data,
                    sample_shape=splits.sample_shape,
                    classes=splits.classes,
                    epochs=options.epochs,
                    steps=steps,
                    batch_size=options.batch_size,
                    lr=options.lr,
                    seed=seed,
                )
                found = run_workers(
                    "benchmarks.compression_accuracy",
                    msgspec.to_builtins(settings),
                    options.workers,
                    env={SEED_VARIABLE: str(seed)},
                )
                print_progress(f"{method}, seed {seed}: accuracy {found:.4f}")
                rows.append({"method": method, "seed": seed, "accuracy": found})
    return Result(
        name="compression",
        command=command,
        kind="real",
        seed=options.seed,
        figures=figures(rows),
        rows=rows,
        machine=machine(
            model=options.model,
            data=options.data,
            workers=options.workers,
            batch_size=options.batch_size,
            training_samples=used,
            epochs=options.epochs,
            lr=options.lr,
        ),
    )


def main() -> None:
    """Train as one worker; rank 0 sends the accuracy of its model."""
    settings = msgspec.convert(read_settings(sys.argv), TrainingRun)
    torch.set_num_threads(1)
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    samples, labels, *test = torch.load(settings.data, weights_only=True)
    model = build_model(
        settings.model, sample_shape=settings.sample_shape, classes=settings.classes, seed=settings.seed
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=MOMENTUM)
    torch.manual_seed(settings.seed + rank)
    if is_ddp(settings.method):
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        shards = equal_shards((samples, labels), rank, workers, settings.batch_size, settings.seed)
        with GlooSide(rank, workers, address, port, limit_s=_DEADLINE_S):
            wrapped = wrap(model, settings.method)
            for epoch in range(settings.epochs):
                _train_epoch(settings, wrapped, optimizer, epoch, islice(shards, settings.steps))
            dist.barrier()
    else:
        with join(model, optimizer, parse_strategy(settings.method)) as session:
            for epoch in session.epochs(settings.epochs):
                batches = session.batches(TensorDataset(samples, labels), settings.batch_size)
                _train_epoch(settings, model, optimizer, epoch, batches)
    if rank == 0:
        with torch.no_grad():
            send_result(accuracy(model, TensorDataset(*test)))
    if is_ddp(settings.method):
        sys.stdout.flush()
        os._exit(0)  # torch's process group may wait in its destructor for a thread that waits for this one


def _train_epoch(
    settings: TrainingRun,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    batches: Iterable[Sequence[Tensor]],
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = settings.lr * (1 - epoch / settings.epochs)
    for inputs, labels in batches:
        runs.step(model, optimizer, inputs, labels)


if __name__ == "__main__":
    main()
