"""`python -m benchmarks validate-gpu`: the fourth paper's figures 6 to 13, the use of processors over time.

The same training on an accelerator, validated after every epoch in line (`serial`) and in threads with
streams of their own while the next epoch trains (`overlapped`); meanwhile the use of the cores and of the
accelerator is sampled. Samples are loaded one by one, as in the paper's NumPy pipeline: from MNIST in memory,
and from MNIST repeated to a given size. On the CPU (`--device cpu`) threads without streams validate, and
only the use of the cores is sampled.

Deviation: the paper does not describe its network; here it is `cnn2`. Its set of 1 GB is smaller here by
default.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.commands import ValidateGpuOptions
from benchmarks.inputs import LOADS
from benchmarks.validate import TrainingTimes, ValidateRun, ValidateSide, measure
from benchmarks.workers import print_progress
from offbeat.cli.result import Result, machine
from offbeat.data import resolve_data_dir
from offbeat.errors import OffbeatError
from offbeat.runtime.control.environment import available_cores
from offbeat.runtime.validation.backend import Backend

SIDES = ("serial", "overlapped")


def run(options: ValidateGpuOptions, *, command: str) -> Result:
    """Train each case serially and overlapped, alternately.

    Raises:
        OffbeatError: there is no accelerator, or its use cannot be read; or the data are missing.
        ValueError: an option is out of range.
    """
    device = _device_of(options)
    loads = options.load or ["memory", "repeated"]
    for load in loads:
        if load not in LOADS:
            raise ValueError(f"unknown load {load!r}: expected one of {', '.join(LOADS)}")
    rows: list[dict[str, Any]] = []
    use_rows: list[dict[str, Any]] = []
    for load, threads, number in product(loads, options.threads or [1, 6], range(options.runs)):
        for side in SIDES:
            times = measure(_settings(options, device, load, threads, side))
            place = {"load": load, "threads": threads, "side": side}
            rows.append({**place, "run": number, **_uses_of(times, options.epochs)})
            use_rows += [{**place, **row} for row in _uses_over_time(times)] if not number else []
            print_progress(f"{load}, {threads} threads, {side}: {rows[-1]['epoch_s']:.2f} s an epoch")
    return Result(
        name="validate-gpu",
        command=command,
        kind="real",
        seed=options.seed,
        figures=figures(rows),
        rows=rows + use_rows,
        machine=machine(),
    )


def _device_of(options: ValidateGpuOptions) -> str:
    if options.device is not None:
        return str(torch.device(options.device))
    if not torch.accelerator.is_available():
        raise OffbeatError(
            "torch finds no accelerator here: run this benchmark on a machine that has one, or with --device "
            "cpu, which samples only the use of the cores"
        )
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return f"{kind.type}:0"


def _settings(options: ValidateGpuOptions, device: str, load: str, threads: int, side: str) -> ValidateRun:
    overlapped: Backend = "thread" if device == "cpu" else "stream"
    return ValidateRun(
        load=load,
        side=ValidateSide(loader="numpy", backend="inline" if side == "serial" else overlapped),
        data=options.data,
        threads=threads,
        epochs=options.epochs,
        batch_size=options.batch_size,
        samples=options.samples,
        held_out=options.held_out,
        size_bytes=int(options.gigabytes * 1e9),
        times=None,
        data_dir=resolve_data_dir(options.data_dir),
        device=device,
        seed=options.seed,
    )


def _uses_of(times: TrainingTimes, epochs: int) -> dict[str, float]:
    """Return the time of an epoch, and the mean uses during all of them."""
    uses = {
        "epoch_s": times.run_s / epochs,
        "cpu_use_percent": 100 * times.cpu_s / (times.run_s * available_cores()),
    }
    if times.device_uses:
        uses["gpu_use_percent"] = 100 * fmean(times.device_uses)
    return uses


def _uses_over_time(times: TrainingTimes) -> list[dict[str, float]]:
    rows = [
        {"at_s": number * times.stretch_s, "cpu_use_percent": 100 * use}
        for number, use in enumerate(times.uses, 1)
    ]
    for row, use in zip(rows, times.device_uses, strict=False):  # there are none on the CPU
        row["gpu_use_percent"] = 100 * use
    return rows


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return medians over runs of the time of an epoch and of the uses, and the saving, by case."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        case = f"{row['side']}_{row['load']}_{row['threads']}"
        for name in ("epoch_s", "cpu_use_percent", "gpu_use_percent"):
            if name in row:
                found[f"{name}_{case}"].append(row[name])
    medians = {name: median(values) for name, values in found.items()}
    for load, threads in dict.fromkeys((row["load"], row["threads"]) for row in rows):
        serial_s, overlapped_s = (medians[f"epoch_s_{side}_{load}_{threads}"] for side in SIDES)
        medians[f"saving_{load}_{threads}"] = 1 - overlapped_s / serial_s
    return medians
