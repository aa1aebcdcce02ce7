"""The fourth paper's tables: validating beside training, and one after the other.

A small convolutional network learns MNIST, on one core as with one accelerator, and is validated after every
epoch. What is compared is how samples are loaded and when validation runs (`SIDES`), for sets that load in
different ways (`benchmarks.inputs.LOADS`) and with as many threads on both sides. Every training is a
process of its own.

The bound is what overlapping can save at most: of E epochs with t for training and v for validation, all
validations but the last one may hide: (E - 1) / E of v / (t + v).
"""

from __future__ import annotations

import math
import resource
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.inputs import LOADS, inputs_of
from benchmarks.loaders import LOADERS, Samples
from benchmarks.timed import ModelTimes, TimedModel, time_layers
from benchmarks.workers import answer, run_workers, settings_of
from offbeat.cli.job import single_threaded
from offbeat.cli.result import Kind, Result, machine
from offbeat.data import DEFAULT_DIR, Splits, load_data_set
from offbeat.models import build_model
from offbeat.runtime.control.environment import available_cores
from offbeat.runtime.validation.validator import Backend, Validator

COPY_THREADS: Final = (6, 12, 24, 48)
"""Of the paper's measurement of what copying costs."""
WAITING: Final = ("files",)
_CLASSES: Final = 10
_DATA: Final = ("mnist", "digits")
_LOOK_S: Final = 0.25
_LOOKS_MAX: Final = 240  # of a run that are kept


@dataclass(frozen=True, kw_only=True)
class Side:
    """How samples are loaded, and when validation runs.

    Attributes:
        loader: of training, a key of LOADERS; of validation, too, where that is in line.
        backend: of the validator.
    """

    loader: str
    backend: Backend


SIDES: Final[Mapping[str, Side]] = {
    "auto": Side(loader="numpy", backend="auto"),
    "numpy": Side(loader="numpy", backend="inline"),
    "overlap": Side(loader="numpy", backend="thread"),
    "overlap_process": Side(loader="numpy", backend="process"),
    "auto_prefetch": Side(loader="prefetch", backend="auto"),
    "prefetch": Side(loader="prefetch", backend="inline"),
    "overlap_prefetch": Side(loader="prefetch", backend="thread"),
    "dataloader": Side(loader="dataloader", backend="inline"),
}
"""One after the other with three pipelines, beside one another with two, and whatever pays.

What is compared runs one shortly after the other: the machine may be faster later on.
"""
_SERIAL_OF: Final = {
    "overlap": "numpy",
    "overlap_prefetch": "prefetch",
    "overlap_process": "numpy",
    "auto": "numpy",
    "auto_prefetch": "prefetch",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        load: a key of LOADS.
        side: a key of SIDES.
        data: grey images, "mnist" or "digits".
        threads: that validate, or load where that is in parallel.
        samples, held_out: how many of them train and validate, at most all.
        size_bytes: of what trains of "repeated".
        times: of the model, which then waits; None computes.
    """

    load: str
    side: str
    data: str
    threads: int
    epochs: int
    batch_size: int
    samples: int
    held_out: int
    size_bytes: int
    times: dict[str, Any] | None
    data_dir: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Took:
    """What one training took.

    Attributes:
        run_s: all of it.
        train_s, validate_s: of it, in the training's thread.
        copy_s: of `validate_s`, for snapshots.
        cpu_s: of all cores, its processes included.
        uses: part of the cores that were used, in one stretch of `stretch_s` seconds after the other.
        accuracy: on what was held out, after the last epoch.
        backend, reason: of the validator, in the end.
    """

    run_s: float
    train_s: float
    validate_s: float
    copy_s: float
    cpu_s: float
    uses: tuple[float, ...]
    stretch_s: float
    accuracy: float
    backend: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared.

    Attributes:
        data: grey images, "mnist" or "digits".
        runs: of each side, one after the other by side; figures are medians over them.
        size_bytes: of what trains of "repeated"; what validates is repeated as often.
        step_s: what forward and backward pass are scaled to, waited for; None computes them.
    """

    loads: tuple[str, ...]
    sides: tuple[str, ...]
    threads: tuple[int, ...]
    epochs: int
    batch_size: int
    samples: int
    held_out: int
    size_bytes: int
    step_s: float | None
    runs: int = 1
    data: str = "mnist"
    data_dir: str = str(DEFAULT_DIR)
    seed: int = 0

    def __post_init__(self) -> None:
        for kind, given, known in (
            ("load", self.loads, LOADS),
            ("side", self.sides, SIDES),
            ("data set", (self.data,), _DATA),
        ):
            for name in given:
                if name not in known:
                    raise ValueError(f"unknown {kind} {name!r}: expected one of {', '.join(known)}")
        for name in ("epochs", "batch_size", "samples", "held_out", "runs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def run(plan: Plan, *, command: str) -> Result:
    """Run the benchmark.

    Raises:
        OffbeatError: a training failed, or the data are not there.
    """
    times = None if plan.step_s is None else _times(plan)
    rows: list[dict[str, Any]] = []
    looks: list[dict[str, Any]] = []
    for name, threads, number in product(plan.loads, plan.threads, range(plan.runs)):
        for side in plan.sides:
            took = _trained(plan, name, side, threads, times)
            rows.append(_row(name, side, threads, number, took, plan))
            looks += _looks(name, side, threads, took) if not number else []
            print(f"{name}, {threads} threads, {side}: {took.run_s:.2f} s", file=sys.stderr, flush=True)
    for threads in (count for count in COPY_THREADS if "overlap" in plan.sides and count not in plan.threads):
        took = _trained(plan, plan.loads[0], "overlap", threads, times)
        rows.append(_row(plan.loads[0], "overlap", threads, 0, took, plan))
    kind: Kind = "real" if times is None else "timed"
    return Result(
        name="validate",
        command=command,
        kind=kind,
        seed=plan.seed,
        figures=figures(rows, plan.epochs),
        rows=rows + looks,
        machine=machine(),
    )


def _times(plan: Plan) -> dict[str, Any]:
    """Measure the network's layers, and scale them."""
    assert plan.step_s is not None
    generator = torch.Generator().manual_seed(plan.seed)
    shape = load_data_set(plan.data, plan.data_dir).sample_shape
    inputs = torch.randn(plan.batch_size, *shape, generator=generator)
    labels = torch.randint(_CLASSES, (plan.batch_size,), generator=generator)
    times = time_layers(_network(shape, plan.seed), inputs, labels)
    return times.scaled(plan.step_s / times.step_s).to_plain()


def _trained(plan: Plan, name: str, side: str, threads: int, times: dict[str, Any] | None) -> Took:
    settings = Run(
        load=name,
        side=side,
        data=plan.data,
        threads=threads,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        samples=plan.samples,
        held_out=plan.held_out,
        size_bytes=plan.size_bytes,
        times=times,
        data_dir=plan.data_dir,
        seed=plan.seed,
    )
    told = run_workers("benchmarks.validate", msgspec.to_builtins(settings), 1)
    return msgspec.convert(told, Took)


def _row(name: str, side: str, threads: int, number: int, took: Took, plan: Plan) -> dict[str, Any]:
    return {
        "load": name,
        "threads": threads,
        "side": side,
        "run": number,
        "run_s": took.run_s,
        "train_s": took.train_s / plan.epochs,
        "validate_s": took.validate_s / plan.epochs,
        "copy_s": took.copy_s / plan.epochs,
        "cpu_share": took.cpu_s / (took.run_s * available_cores()),
        "accuracy": took.accuracy if plan.step_s is None else None,
        "backend": took.backend,
        "reason": took.reason,
    }


def _looks(name: str, side: str, threads: int, took: Took) -> list[dict[str, Any]]:
    """Return rows of how much of the cores was used when."""
    return [
        {"load": name, "threads": threads, "side": side, "at_s": number * took.stretch_s, "used_share": use}
        for number, use in enumerate(took.uses, 1)
    ]


def figures(rows: Sequence[Mapping[str, Any]], epochs: int) -> dict[str, float]:
    """Return what overlapping saves, also of what it could, what copies cost, and how `auto` compares.

    Sides are compared by run; figures are medians over runs.
    """
    savings: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    autos: dict[str, list[float]] = defaultdict(list)
    copies: dict[int, list[float]] = defaultdict(list)
    of = {(row["load"], row["threads"], row["run"], row["side"]): row for row in rows}
    for (name, threads, number, side), row in of.items():
        if side == "overlap" and name == rows[0]["load"]:
            copies[threads].append(row["copy_s"] / (row["run_s"] / epochs))
        serial = of.get((name, threads, number, _SERIAL_OF.get(side, "")))
        if serial is None:
            continue
        saving = 1 - row["run_s"] / serial["run_s"]
        case = f"{name}_{threads}_{side}"
        if side.startswith("auto"):
            autos[case].append(1 - saving)
            continue
        savings[case].append(saving)
        if name in WAITING:
            both_s = serial["train_s"] + serial["validate_s"]
            bound = (epochs - 1) / epochs * serial["validate_s"] / both_s
            shares[case].append(saving / bound)
    found = {
        **{f"saving_{case}": median(some) for case, some in savings.items()},
        **{f"share_of_bound_{case}": median(some) for case, some in shares.items()},
        **{f"auto_ratio_to_serial_{case}": median(some) for case, some in autos.items()},
        **{f"copy_share_{threads}": median(copies[threads]) for threads in COPY_THREADS if threads in copies},
    }
    if shares:
        found["saving_where_waiting"] = min(found[f"saving_{case}"] for case in shares)
        found["share_of_bound"] = min(found[f"share_of_bound_{case}"] for case in shares)
    if autos:
        found["auto_ratio_to_serial_worst"] = max(found[f"auto_ratio_to_serial_{case}"] for case in autos)
    return found


# One training -------------------------------------------------------------------------------------------


def _network(shape: tuple[int, ...], seed: int) -> nn.Module:
    return build_model("cnn2", sample_shape=shape, classes=_CLASSES, seed=seed)


class _Looks:
    """Looks again and again at how much of the cores this process uses."""

    def __init__(self) -> None:
        self.uses: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="offbeat looks", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_LOOK_S)
            now_s, now_cpu_s = time.perf_counter(), time.process_time()
            self.uses.append((now_cpu_s - cpu_s) / ((now_s - wall_s) * available_cores()))
            wall_s, cpu_s = now_s, now_cpu_s

    def end(self) -> tuple[tuple[float, ...], float]:
        """Return what was seen: means over stretches, `_LOOKS_MAX` of them at most, and how long they are."""
        self._is_over.set()
        self._thread.join()
        size = math.ceil(len(self.uses) / _LOOKS_MAX)
        stretches = (self.uses[first : first + size] for first in range(0, len(self.uses), size))
        return tuple(map(fmean, stretches)), size * _LOOK_S


class _Judge:
    """Evaluates: the part of the samples whose highest logit is their label's, and the mean loss."""

    def __init__(self, run: Run) -> None:
        side = SIDES[run.side]
        self._loads = LOADERS[side.loader if side.backend == "inline" else "numpy"]
        self._batch_size, self._threads = run.batch_size, run.threads

    def __call__(self, model: nn.Module, part: Samples) -> dict[str, float]:
        """Return loss and right answers."""
        loss, right = 0.0, 0
        for inputs, labels in self._loads(part, range(len(part)), self._batch_size, self._threads):
            logits = model(inputs)
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            right += int((logits.argmax(1) == labels).sum())
        return {"loss": loss / len(part), "right": right}


def _sets(run: Run, splits: Splits, folder: Path) -> tuple[Samples, Samples]:
    """Make the training and the validation samples, from images as bytes."""
    made: list[Samples] = []
    for part, count in ((splits.train, run.samples), (splits.test, run.held_out)):
        scaled, labels = (tensor[:count] for tensor in part.tensors)
        bytes_ = (scaled[:, 0] - scaled.min()) / (scaled.max() - scaled.min()) * 255
        made.append(
            inputs_of(
                run.load,
                bytes_.round().to(torch.uint8).numpy(),
                labels.numpy(),
                folder=folder / str(len(made)),
                size_bytes=run.size_bytes * count // run.samples,
            )
        )
    return made[0], made[1]


def _orders(samples: int, run: Run) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(run.seed)
    for _ in range(run.epochs):
        yield torch.randperm(samples, generator=generator).tolist()


def train(run: Run, folder: Path) -> Took:
    """Train as one worker, on one thread of torch."""
    splits, side = load_data_set(run.data, run.data_dir), SIDES[run.side]
    model = _network(splits.sample_shape, run.seed)
    if run.times is not None:
        model = TimedModel(model, ModelTimes.from_plain(run.times), classes=_CLASSES, seed=run.seed)
    samples, held_out = _sets(run, splits, folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loads = LOADERS[side.loader]
    train_s = validate_s = 0.0
    with single_threaded():
        looks, cpu_s, began_s = _Looks(), _cpu_s(), time.perf_counter()
        with Validator(model, _Judge(run), held_out, workers=run.threads, backend=side.backend) as validator:
            for order in _orders(len(samples), run):
                epoch_s = time.perf_counter()
                for inputs, labels in loads(samples, order, run.batch_size, run.threads):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                trained_s = time.perf_counter()
                validator.validate()
                train_s += trained_s - epoch_s
                validate_s += time.perf_counter() - trained_s
        run_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - cpu_s
        uses, stretch_s = looks.end()
    last = validator.history[run.epochs - 1]
    assert last is not None
    return Took(
        run_s=run_s,
        train_s=train_s,
        validate_s=validate_s,
        copy_s=validator.copy_s,
        cpu_s=cpu_s,
        uses=uses,
        stretch_s=stretch_s,
        accuracy=last["right"] / len(held_out),
        backend=validator.backend,
        reason=validator.reason,
    )


def _cpu_s() -> float:
    """Processor time of this process and of those that it has ended, in seconds."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main(arguments: Sequence[str]) -> None:
    """Train with the settings that the one argument holds."""
    run = msgspec.convert(settings_of(arguments), Run)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        answer(msgspec.to_builtins(train(run, Path(folder))))


if __name__ == "__main__":
    main(sys.argv)
