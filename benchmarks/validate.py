"""The fourth paper's tables: validation overlapped with training, against validation in line.

A small convolutional network learns MNIST, on one core as with one accelerator, and is validated after every
epoch. The sides differ in how samples are loaded and when validation runs (`SIDES`); each pair uses the same
number of threads, and sets that load in different ways (`benchmarks.inputs.LOADS`). Every training is a
process of its own.

The bound is the largest saving by overlap: of E epochs with t for training and v for validation, all
validations but the last one can be hidden: (E - 1) / E of v / (t + v).
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.commands import ValidateOptions
from benchmarks.inputs import LOADS, inputs_of
from benchmarks.loaders import LOADERS, Samples
from benchmarks.timed import ModelTimes, TimedModel, time_layers
from benchmarks.use_over_time import UseSampler, device_use_reader
from benchmarks.workers import print_progress, read_settings, run_workers, send_result
from offbeat.cli.job import single_threaded
from offbeat.cli.result import Kind, Result, machine
from offbeat.data import Splits, load_data_set, resolve_data_dir
from offbeat.models import build_model
from offbeat.runtime.control.environment import available_cores
from offbeat.runtime.validation.backend import Backend
from offbeat.runtime.validation.validator import Validator

COPY_THREADS: Final = (6, 12, 24, 48)
"""Numbers of threads in the paper's measurement of the cost of copying."""
WAITING: Final = ("files",)
_CLASSES: Final = 10
_DATA: Final = ("mnist", "digits")


@dataclass(frozen=True, kw_only=True)
class ValidateSide:
    """A way of loading samples, and when validation runs.

    Attributes:
        loader: of training, a key of LOADERS; with validation in line, of that as well.
        backend: of the validator.
    """

    loader: str
    backend: Backend


SIDES: Final[Mapping[str, ValidateSide]] = {
    "auto": ValidateSide(loader="numpy", backend="auto"),
    "numpy": ValidateSide(loader="numpy", backend="inline"),
    "overlap": ValidateSide(loader="numpy", backend="thread"),
    "overlap_process": ValidateSide(loader="numpy", backend="process"),
    "auto_prefetch": ValidateSide(loader="prefetch", backend="auto"),
    "prefetch": ValidateSide(loader="prefetch", backend="inline"),
    "overlap_prefetch": ValidateSide(loader="prefetch", backend="thread"),
    "dataloader": ValidateSide(loader="dataloader", backend="inline"),
}
"""In line with three pipelines, overlapped with two, and chosen automatically.

Compared sides are neighbours, since the machine's speed may change over time.
"""
_SERIAL_OF: Final = {
    "overlap": "numpy",
    "overlap_prefetch": "prefetch",
    "overlap_process": "numpy",
    "auto": "numpy",
    "auto_prefetch": "prefetch",
}


@dataclass(frozen=True, kw_only=True)
class ValidateRun:
    """Settings of one training.

    Attributes:
        load: a key of LOADS.
        side: how samples are loaded, and when validation runs.
        data: grey images, "mnist" or "digits".
        threads: that validate, or that load in a parallel loader.
        samples, held_out: numbers of training and validation samples, at most all.
        size_bytes: of the training data of "repeated".
        times: layer times for which the model waits; None computes.
        device: of the model.
    """

    load: str
    side: ValidateSide
    data: str
    threads: int
    epochs: int
    batch_size: int
    samples: int
    held_out: int
    size_bytes: int
    times: dict[str, Any] | None
    data_dir: str
    device: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class TrainingTimes:
    """Measurements of one training.

    Attributes:
        run_s: total time.
        train_s, validate_s: shares of it in the training's thread.
        copy_s: share of `validate_s` for snapshots.
        cpu_s: processor time over all cores, child processes included.
        uses: used share of the cores in successive intervals of `stretch_s` seconds.
        device_uses: the same of the accelerator, by all processes; empty on the CPU.
        accuracy: on the validation samples, after the last epoch.
        backend, reason: of the validator at the end.
    """

    run_s: float
    train_s: float
    validate_s: float
    copy_s: float
    cpu_s: float
    uses: tuple[float, ...]
    device_uses: tuple[float, ...]
    stretch_s: float
    accuracy: float
    backend: str
    reason: str


class ValidatePlan(ValidateOptions):
    """The trainings that the benchmark's options ask for.

    Raises:
        ValueError: an option is out of range.
    """

    @property
    def loads(self) -> Sequence[str]:
        """Keys of LOADS."""
        return self.load or [name for name in LOADS if name != "repeated"]

    @property
    def sides(self) -> Sequence[str]:
        """Keys of SIDES."""
        return self.side or [*SIDES]

    @property
    def thread_counts(self) -> Sequence[int]:
        """Numbers of threads that validate, or that load in a parallel loader."""
        return self.threads or [1, 6]

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, given, known in (
            ("load", self.loads, LOADS),
            ("side", self.sides, SIDES),
            ("data set", (self.data,), _DATA),
        ):
            for name in given:
                if name not in known:
                    raise ValueError(f"unknown {kind} {name!r}: expected one of {', '.join(known)}")


def run(options: ValidateOptions, *, command: str) -> Result:
    """Run the benchmark.

    Raises:
        OffbeatError: a training failed, or the data are missing.
        ValueError: an option is out of range.
    """
    plan = ValidatePlan(**vars(options))
    times = _times(plan) if plan.compute == "timed" else None
    rows: list[dict[str, Any]] = []
    core_use: list[dict[str, Any]] = []
    for name, threads, number in product(plan.loads, plan.thread_counts, range(plan.runs)):
        for side in plan.sides:
            times_taken = _measure(plan, name, side, threads, times)
            rows.append(_row(name, side, threads, number, times_taken, plan))
            core_use += _core_use_rows(name, side, threads, times_taken) if not number else []
            print_progress(f"{name}, {threads} threads, {side}: {times_taken.run_s:.2f} s")
    for threads in (
        count for count in COPY_THREADS if "overlap" in plan.sides and count not in plan.thread_counts
    ):
        times_taken = _measure(plan, plan.loads[0], "overlap", threads, times)
        rows.append(_row(plan.loads[0], "overlap", threads, 0, times_taken, plan))
    kind: Kind = "real" if times is None else "timed"
    return Result(
        name="validate",
        command=command,
        kind=kind,
        seed=plan.seed,
        figures=figures(rows, plan.epochs),
        rows=rows + core_use,
        machine=machine(),
    )


def _times(plan: ValidatePlan) -> dict[str, Any]:
    """Measure and scale the network's layer times."""
    generator = torch.Generator().manual_seed(plan.seed)
    shape = load_data_set(plan.data, resolve_data_dir(plan.data_dir)).sample_shape
    inputs = torch.randn(plan.batch_size, *shape, generator=generator)
    labels = torch.randint(_CLASSES, (plan.batch_size,), generator=generator)
    times = time_layers(_network(shape, plan.seed), inputs, labels)
    return times.scaled(plan.step_ms / 1e3 / times.step_s).to_plain()


def _measure(
    plan: ValidatePlan, name: str, side: str, threads: int, times: dict[str, Any] | None
) -> TrainingTimes:
    settings = ValidateRun(
        load=name,
        side=SIDES[side],
        data=plan.data,
        threads=threads,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        samples=plan.samples,
        held_out=plan.held_out,
        size_bytes=int(plan.gigabytes * 1e9),
        times=times,
        data_dir=resolve_data_dir(plan.data_dir),
        device="cpu",
        seed=plan.seed,
    )
    return measure(settings)


def measure(settings: ValidateRun) -> TrainingTimes:
    """Train in a process of its own.

    Raises:
        OffbeatError: it failed.
    """
    result = run_workers("benchmarks.validate", msgspec.to_builtins(settings), 1)
    return msgspec.convert(result, TrainingTimes)


def _row(
    name: str, side: str, threads: int, number: int, times_taken: TrainingTimes, plan: ValidatePlan
) -> dict[str, Any]:
    return {
        "load": name,
        "threads": threads,
        "side": side,
        "run": number,
        "run_s": times_taken.run_s,
        "train_s": times_taken.train_s / plan.epochs,
        "validate_s": times_taken.validate_s / plan.epochs,
        "copy_s": times_taken.copy_s / plan.epochs,
        "cpu_share": times_taken.cpu_s / (times_taken.run_s * available_cores()),
        "accuracy": times_taken.accuracy if plan.compute == "real" else None,
        "backend": times_taken.backend,
        "reason": times_taken.reason,
    }


def _core_use_rows(name: str, side: str, threads: int, times_taken: TrainingTimes) -> list[dict[str, Any]]:
    """Return rows of the used share of the cores over time."""
    return [
        {
            "load": name,
            "threads": threads,
            "side": side,
            "at_s": number * times_taken.stretch_s,
            "used_share": use,
        }
        for number, use in enumerate(times_taken.uses, 1)
    ]


def figures(rows: Sequence[Mapping[str, Any]], epochs: int) -> dict[str, float]:
    """Return savings by overlap, also as a share of the bound, the cost of copies, and the ratio of `auto`.

    Sides are compared run by run; figures are medians over runs.
    """
    savings: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    autos: dict[str, list[float]] = defaultdict(list)
    copies: dict[int, list[float]] = defaultdict(list)
    by_case = {(row["load"], row["threads"], row["run"], row["side"]): row for row in rows}
    for (name, threads, number, side), row in by_case.items():
        if side == "overlap" and name == rows[0]["load"]:
            copies[threads].append(row["copy_s"] / (row["run_s"] / epochs))
        serial = by_case.get((name, threads, number, _SERIAL_OF.get(side, "")))
        if serial is None:
            continue
        saving = 1 - row["run_s"] / serial["run_s"]
        case = f"{name}_{threads}_{side}"
        if side.startswith("auto"):
            autos[case].append(1 - saving)
            continue
        savings[case].append(saving)
        if name in WAITING:
            epoch_s = serial["train_s"] + serial["validate_s"]
            bound = (epochs - 1) / epochs * serial["validate_s"] / epoch_s
            shares[case].append(saving / bound)
    found = {
        **{f"saving_{case}": median(values) for case, values in savings.items()},
        **{f"share_of_bound_{case}": median(values) for case, values in shares.items()},
        **{f"auto_ratio_to_serial_{case}": median(values) for case, values in autos.items()},
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


class _Evaluator:
    """Evaluates: the number of samples whose highest logit is their label's, and the mean loss."""

    def __init__(self, run: ValidateRun) -> None:
        self._loads = LOADERS[run.side.loader if run.side.backend == "inline" else "numpy"]
        self._batch_size, self._threads, self._device = run.batch_size, run.threads, run.device

    def __call__(self, model: nn.Module, part: Samples) -> dict[str, float]:
        """Return the mean loss and the number of right answers."""
        loss, right = 0.0, 0
        for inputs, labels in self._loads(part, range(len(part)), self._batch_size, self._threads):
            inputs, labels = inputs.to(self._device), labels.to(self._device)
            logits = model(inputs)
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            right += int((logits.argmax(1) == labels).sum())
        return {"loss": loss / len(part), "right": right}


def _sets(run: ValidateRun, splits: Splits, folder: Path) -> tuple[Samples, Samples]:
    """Make the training and the validation samples from images as bytes."""
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


def _orders(samples: int, run: ValidateRun) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(run.seed)
    for _ in range(run.epochs):
        yield torch.randperm(samples, generator=generator).tolist()


def train(run: ValidateRun, folder: Path) -> TrainingTimes:
    """Train as one worker, on one thread of torch."""
    splits, side = load_data_set(run.data, run.data_dir), run.side
    model = _network(splits.sample_shape, run.seed)
    if run.times is not None:
        model = TimedModel(model, ModelTimes.from_plain(run.times), classes=_CLASSES, seed=run.seed)
    model.to(run.device)
    samples, held_out = _sets(run, splits, folder)
    read_device = None if run.device == "cpu" else device_use_reader(torch.device(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loads = LOADERS[side.loader]
    train_s = validate_s = 0.0
    with single_threaded():
        sampler, cpu_s, began_s = UseSampler(read_device), _cpu_s(), time.perf_counter()
        with Validator(
            model, _Evaluator(run), held_out, workers=run.threads, backend=side.backend
        ) as validator:
            for order in _orders(len(samples), run):
                epoch_s = time.perf_counter()
                for inputs, labels in loads(samples, order, run.batch_size, run.threads):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs.to(run.device)), labels.to(run.device)).backward()
                    optimizer.step()
                trained_s = time.perf_counter()
                validator.validate()
                train_s += trained_s - epoch_s
                validate_s += time.perf_counter() - trained_s
        run_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - cpu_s
        use = sampler.end()
    last = validator.history[run.epochs - 1]
    assert last is not None
    return TrainingTimes(
        run_s=run_s,
        train_s=train_s,
        validate_s=validate_s,
        copy_s=validator.copy_s,
        cpu_s=cpu_s,
        uses=use.cores,
        device_uses=use.device,
        stretch_s=use.interval_s,
        accuracy=last["right"] / len(held_out),
        backend=validator.backend,
        reason=validator.reason,
    )


def _cpu_s() -> float:
    """Return the processor time of this process and its ended children, in seconds."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main(arguments: Sequence[str]) -> None:
    """Train with the settings in the one argument."""
    run = msgspec.convert(read_settings(arguments), ValidateRun)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        send_result(msgspec.to_builtins(train(run, Path(folder))))


if __name__ == "__main__":
    main(sys.argv)
