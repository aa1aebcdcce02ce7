"""Test accuracy over time with one slow worker, in lockstep and with the slow worker excluded.

Gradients are computed. Each worker's step is stretched (see `benchmarks.timed.Stretch`) to longer than all
workers together need the cores for. So each behaves as if it had its own machine, and excluding one does not
speed up the rest more than it would on several machines. The rows contain the share of steps for which the
stretched time was too short.

The first worker copies its parameters at fixed intervals of steps; the copies are evaluated after the
training, and the time of copying is not counted. The *time to an accuracy* is when the line through these
points first reaches it, also in lockstep. An accuracy is compared with lockstep's (*below*) after as many
samples as lockstep used in all.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import msgspec
import torch
from torch.nn import functional as F

from benchmarks.commands import AccuracyOptions
from benchmarks.exclusions import read_changes, read_steps
from benchmarks.runs import slow_rules
from benchmarks.timed import Stretch
from benchmarks.workers import print_progress, read_settings, run_logged, send_result
from offbeat.cli.result import Result, machine
from offbeat.cli.training_worker import accuracy
from offbeat.data import Splits, load_data_set, resolve_data_dir
from offbeat.models import build_model
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

LOCKSTEP = "bsp"
SIDES = {"drop": "partial", "join": "partial:late=join"}
"""What is compared with lockstep: suffix of the figures' names, and strategy."""
_SPARE_EPOCHS = 1
_COPIES = 8  # points per epoch


@dataclass(frozen=True, kw_only=True)
class AccuracySettings:
    """Settings of one training, for every worker.

    Attributes:
        copy_every: steps between two copies.
        step_s: length of a worker's step.
    """

    data: str
    data_dir: str
    model: str
    strategy: str
    batch_size: int
    epochs: int
    lr: float
    seed: int
    copy_every: int
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a curve.

    Attributes:
        time_s: of training so far.
        samples: used by the group so far.
        accuracy: on the test samples, 0 to 1.
    """

    time_s: float
    samples: int
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training.

    Attributes:
        late_share: share of the first worker's steps that took longer than the stretched time.
    """

    strategy: str
    seed: int
    points: tuple[Point, ...]
    late_share: float


def time_to(points: Sequence[Point], target: float) -> float | None:
    """Return when the line through the points first reaches the target accuracy, None if never."""
    before = Point(time_s=0.0, samples=0, accuracy=0.0)
    for point in points:
        if point.accuracy >= target:
            part = (target - before.accuracy) / (point.accuracy - before.accuracy) if before.accuracy else 1.0
            return before.time_s + part * (point.time_s - before.time_s)
        before = point
    return None


def accuracy_after(points: Sequence[Point], samples: int) -> float:
    """Return the accuracy after `samples` in the line through the points, at most the last point's."""
    before = points[0]
    for point in points:
        if point.samples >= samples:
            between = point.samples - before.samples
            part = (samples - before.samples) / between if between else 0.0
            return before.accuracy + part * (point.accuracy - before.accuracy)
        before = point
    return before.accuracy


def figures(curves: Sequence[Curve]) -> dict[str, float]:
    """Return means over the seeds; a time is omitted where a seed did not reach the accuracy."""
    lockstep = {curve.seed: curve for curve in curves if curve.strategy == LOCKSTEP}
    found = {f"final_accuracy_{LOCKSTEP}": mean(curve.points[-1].accuracy for curve in lockstep.values())}
    for name, strategy in SIDES.items():
        ratios: list[float | None] = []
        losses: list[float] = []
        for curve in curves:
            if curve.strategy != strategy:
                continue
            last = lockstep[curve.seed].points[-1]
            lockstep_s = time_to(lockstep[curve.seed].points, last.accuracy)
            time_s = time_to(curve.points, last.accuracy)
            ratios.append(None if time_s is None or not lockstep_s else time_s / lockstep_s)
            losses.append(last.accuracy - accuracy_after(curve.points, last.samples))
        reached = [ratio for ratio in ratios if ratio is not None]
        if len(reached) == len(ratios) and reached:
            found[f"time_ratio_to_bsp_accuracy_{name}"] = mean(reached)
        if losses:
            found[f"below_bsp_percent_{name}"] = 100 * mean(losses)
            found[f"below_bsp_percent_max_{name}"] = 100 * max(losses)
    return found


def run(options: AccuracyOptions, *, command: str) -> Result:
    """Train with every strategy and seed; the last worker is slow.

    Strategies other than lockstep have more epochs, as their groups use fewer samples per step.

    Raises:
        OffbeatError: the data are missing.
        ValueError: an option out of range.
    """
    workers, batch_size, epochs, lr = options.workers, options.batch_size, options.epochs, options.lr
    data_dir = resolve_data_dir(options.data_dir)
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"the learning rate must be above 0, got {lr:g}")
    slow = slow_rules(workers, 1, options.factor)
    splits = load_data_set(options.data, data_dir, download=options.download)
    _build_model(options.model, splits, 0)
    per_epoch = max(1, len(splits.train) // (workers * batch_size))
    longer_epochs = -(-epochs * workers // (workers - 1)) + _SPARE_EPOCHS
    curves = []
    for seed in range(options.seeds):
        for strategy in (LOCKSTEP, *SIDES.values()):
            settings = AccuracySettings(
                data=options.data,
                data_dir=data_dir,
                model=options.model,
                strategy=strategy,
                batch_size=batch_size,
                epochs=epochs if strategy == LOCKSTEP else longer_epochs,
                lr=lr,
                seed=seed,
                copy_every=max(1, per_epoch // _COPIES),
                step_s=options.step_ms / 1000,
            )
            print_progress(f"{strategy}, seed {seed}")
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
        machine=machine(
            model=options.model,
            data=options.data,
            batch_size=batch_size,
            stretched_step_ms=options.step_ms,
        ),
    )


def _build_model(model: str, splits: Splits, seed: int) -> torch.nn.Module:
    return build_model(model, sample_shape=splits.sample_shape, classes=splits.classes, seed=seed)


def _train(settings: AccuracySettings, workers: int, slow: tuple[str, ...]) -> Curve:
    result, entries = run_logged("benchmarks.accuracy", settings, workers, slow=slow, seed=settings.seed)
    used = [0]
    for step in read_steps(entries, read_changes(entries)):
        used.append(used[-1] + step.samples)
    points = tuple(
        Point(time_s=copy["time_s"], samples=used[copy["step"]], accuracy=copy["accuracy"])
        for copy in result["copies"]
    )
    return Curve(
        strategy=settings.strategy, seed=settings.seed, points=points, late_share=result["late_share"]
    )


def main() -> None:
    """Train as one worker; rank 0 then evaluates its copies and sends the result."""
    settings = msgspec.convert(read_settings(sys.argv), AccuracySettings)
    torch.set_num_threads(1)
    splits = load_data_set(settings.data, settings.data_dir)
    model = _build_model(settings.model, splits, settings.seed)
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
                if session.worker == 0 and session.step % settings.copy_every == 0:
                    now_s = time.perf_counter()
                    copy = {name: value.clone() for name, value in model.state_dict().items()}
                    copies.append((session.step, now_s - began_s, copy))
                    began_s += time.perf_counter() - now_s
            if session.worker == 0:
                print(f"epoch {epoch + 1} of {settings.epochs}", flush=True)
    if session.worker == 0:
        send_result(
            {
                "copies": _evaluate_copies(model, copies, splits),
                "late_share": stretch.late_steps / max(1, stretch.steps),
            }
        )


def _evaluate_copies(
    model: torch.nn.Module, copies: Sequence[tuple[int, float, dict[str, torch.Tensor]]], splits: Splits
) -> list[dict[str, Any]]:
    points = []
    for step, time_s, copy in copies:
        model.load_state_dict(copy)
        points.append({"step": step, "time_s": time_s, "accuracy": accuracy(model, splits.test)})
    return points


if __name__ == "__main__":
    main()
