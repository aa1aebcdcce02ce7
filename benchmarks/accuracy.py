"""Test accuracy against time with one slow worker, in lockstep and around it.

Gradients are really computed. Each worker's step is stretched (see `benchmarks.timed.Stretch`): it lasts
for longer than all workers together need the cores for, so that each behaves as if on a machine of its own,
and leaving one out gives the others nothing that several machines would not. How often that was not enough is
in the rows.

The first worker copies its parameters every so many steps; the copies are measured after the training, and
the clock stands still while they are taken. The *time to an accuracy* is when the line through these
measurements first reaches it, in lockstep as well. How far an accuracy is *below* lockstep's is said for as
many samples as lockstep used in all.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from torch.nn import functional as F

from benchmarks.exclusions import read_changes, read_steps
from benchmarks.runs import slowed, surroundings
from benchmarks.timed import Stretch
from benchmarks.workers import answer, run_workers, settings_of
from offbeat.cli.result import Result, machine
from offbeat.cli.training_worker import accuracy
from offbeat.data import DEFAULT_DIR, Splits, load_data_set
from offbeat.models import build_model
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy
from offbeat.wire.record import read_log

LOCKSTEP = "bsp"
SIDES = {"drop": "partial", "join": "partial:late=join"}
"""What is held against lockstep: the end of its figures' names, and its strategy."""
_SPARE_EPOCHS = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every worker is told.

    Attributes:
        every: how many steps lie between two copies.
        step_s: how long a worker's step lasts.
    """

    data: str
    data_dir: str
    model: str
    strategy: str
    batch_size: int
    epochs: int
    lr: float
    seed: int
    every: int
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement.

    Attributes:
        time_s: of training before it.
        samples: that the group had used.
        accuracy: on the test samples, 0 to 1.
    """

    time_s: float
    samples: int
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training.

    Attributes:
        late_share: part of the first worker's steps that took longer than they are stretched to.
    """

    strategy: str
    seed: int
    points: tuple[Point, ...]
    late_share: float


def time_to(points: Sequence[Point], target: float) -> float | None:
    """Return when the accuracy first reaches the target, in a line through the points; None if never."""
    before = Point(time_s=0.0, samples=0, accuracy=0.0)
    for point in points:
        if point.accuracy >= target:
            part = (target - before.accuracy) / (point.accuracy - before.accuracy) if before.accuracy else 1.0
            return before.time_s + part * (point.time_s - before.time_s)
        before = point
    return None


def accuracy_after(points: Sequence[Point], samples: int) -> float:
    """Return the accuracy after so many samples, in a line through the points; the last one's after more."""
    before = points[0]
    for point in points:
        if point.samples >= samples:
            between = point.samples - before.samples
            part = (samples - before.samples) / between if between else 0.0
            return before.accuracy + part * (point.accuracy - before.accuracy)
        before = point
    return before.accuracy


def figures(curves: Sequence[Curve]) -> dict[str, float]:
    """Return means over the seeds; a time is left out where any seed did not reach the accuracy."""
    lockstep = {curve.seed: curve for curve in curves if curve.strategy == LOCKSTEP}
    found = {f"final_accuracy_{LOCKSTEP}": mean(curve.points[-1].accuracy for curve in lockstep.values())}
    for name, strategy in SIDES.items():
        ratios: list[float | None] = []
        losses: list[float] = []
        for curve in curves:
            if curve.strategy != strategy:
                continue
            last = lockstep[curve.seed].points[-1]
            own_s = time_to(lockstep[curve.seed].points, last.accuracy)
            took_s = time_to(curve.points, last.accuracy)
            ratios.append(None if took_s is None or not own_s else took_s / own_s)
            losses.append(last.accuracy - accuracy_after(curve.points, last.samples))
        reached = [ratio for ratio in ratios if ratio is not None]
        if len(reached) == len(ratios) and reached:
            found[f"time_ratio_to_bsp_accuracy_{name}"] = mean(reached)
        if losses:
            found[f"below_bsp_percent_{name}"] = 100 * mean(losses)
            found[f"below_bsp_percent_max_{name}"] = 100 * max(losses)
    return found


def run(
    *,
    command: str,
    data: str = "mnist",
    data_dir: str = str(DEFAULT_DIR),
    model: str = "mlp",
    workers: int = 4,
    factor: float = 5.0,
    epochs: int = 3,
    batch_size: int = 32,
    lr: float = 0.01,
    step_ms: float = 20.0,
    copies: int = 8,
    seeds: int = 3,
    download: bool = False,
) -> Result:
    """Trains with every strategy and seed; the last worker is slow.

    Args:
        command: the command line, for the result.
        data: a key of `offbeat.data.DATA_SETS`.
        data_dir: where its files are.
        model: a key of `offbeat.models.MODELS`.
        workers: worker processes on this machine, at least 2.
        factor: how many times as long the slow worker takes, above 1.
        epochs: of lockstep; the others get more, as their groups use fewer samples a step.
        batch_size: samples a worker and step.
        lr: of SGD with momentum 0.9.
        step_ms: how long a step of a worker that is not slow computes and waits.
        copies: measurements an epoch.
        seeds: how many, from 0 on.
        download: fetch the data if they are not there.

    Raises:
        OffbeatError: the data are not there.
        ValueError: an argument out of range.
    """
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"the learning rate must be above 0, got {lr:g}")
    slow = slowed(workers, 1, factor)
    splits = load_data_set(data, data_dir, download=download)
    _built(model, splits, 0)
    per_epoch = max(1, len(splits.train) // (workers * batch_size))
    more = -(-epochs * workers // (workers - 1)) + _SPARE_EPOCHS
    curves = []
    for seed in range(seeds):
        for strategy in (LOCKSTEP, *SIDES.values()):
            settings = Settings(
                data=data,
                data_dir=data_dir,
                model=model,
                strategy=strategy,
                batch_size=batch_size,
                epochs=epochs if strategy == LOCKSTEP else more,
                lr=lr,
                seed=seed,
                every=max(1, per_epoch // copies),
                step_s=step_ms / 1000,
            )
            print(f"{strategy}, seed {seed}", file=sys.stderr, flush=True)
            curves.append(_train(settings, workers, slow))
    return Result(
        name="accuracy",
        command=command,
        kind="real",
        seed=0,
        figures=figures(curves),
        rows=[
            {"strategy": curve.strategy, "seed": curve.seed, "late_share": curve.late_share}
            | {"time_s": point.time_s, "samples": point.samples, "accuracy": point.accuracy}
            for curve in curves
            for point in curve.points
        ],
        machine=machine(model=model, data=data, batch_size=batch_size, stretched_step_ms=step_ms),
    )


def _built(model: str, splits: Splits, seed: int) -> torch.nn.Module:
    return build_model(model, sample_shape=splits.sample_shape, classes=splits.classes, seed=seed)


def _train(settings: Settings, workers: int, slow: tuple[str, ...]) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        told = run_workers(
            "benchmarks.accuracy",
            msgspec.to_builtins(settings),
            workers,
            env=surroundings(slow, settings.seed, log),
        )
        entries = read_log(log).entries
    used = [0]
    for step in read_steps(entries, read_changes(entries)):
        used.append(used[-1] + step.samples)
    points = tuple(
        Point(time_s=one["time_s"], samples=used[one["step"]], accuracy=one["accuracy"])
        for one in told["copies"]
    )
    return Curve(strategy=settings.strategy, seed=settings.seed, points=points, late_share=told["late_share"])


def main() -> None:
    """One worker: trains; rank 0 measures its copies afterwards, and answers."""
    settings = msgspec.convert(settings_of(sys.argv), Settings)
    torch.set_num_threads(1)
    splits = load_data_set(settings.data, settings.data_dir)
    model = _built(settings.model, splits, settings.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    stretch = Stretch(model, settings.step_s)
    copies: list[tuple[int, float, dict[str, torch.Tensor]]] = []
    with join(model, optimizer, parse_strategy(settings.strategy)) as session:
        torch.manual_seed(settings.seed + session.worker)
        began_s = time.perf_counter()
        for epoch in session.epochs(settings.epochs):
            model.train()
            for inputs, labels in session.batches(splits.train, settings.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                if session.worker == 0 and session.step % settings.every == 0:
                    now_s = time.perf_counter()
                    copy = {name: value.clone() for name, value in model.state_dict().items()}
                    copies.append((session.step, now_s - began_s, copy))
                    began_s += time.perf_counter() - now_s
            if session.worker == 0:
                print(f"epoch {epoch + 1} of {settings.epochs}", flush=True)
    if session.worker == 0:
        answer(
            {
                "copies": _measured(model, copies, splits),
                "late_share": stretch.late_steps / max(1, stretch.steps),
            }
        )


def _measured(
    model: torch.nn.Module, copies: Sequence[tuple[int, float, dict[str, torch.Tensor]]], splits: Splits
) -> list[dict[str, Any]]:
    measured = []
    for step, time_s, copy in copies:
        model.load_state_dict(copy)
        measured.append({"step": step, "time_s": time_s, "accuracy": accuracy(model, splits.test)})
    return measured


if __name__ == "__main__":
    main()
