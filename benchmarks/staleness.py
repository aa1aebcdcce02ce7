"""Benefit of a fixed and of a dynamic bound on staleness, on a parameter server.

Source: the second paper, tables 1 and 2 and figures 9 and 10: a network of two convolutions and two fully
connected layers on CIFAR-10, batches of 128, Adam, 4 machines with threads that each are a worker, 1 server;
BSP, SSP and DTSSP. Deviations: also SSP(10), the largest bound that DTSSP may reach, and ASP; far fewer
steps; slowness is injected, since the paper does not say how unequal its machines were. Slowness comes in
*bursts*, which hit one process after the other, never two at once; or it is *lasting*: one process is half
as fast as the rest, another a third. With equal shards, as in the paper, every worker has as many steps, so
in the end all wait for lasting slowness; with dynamic shards, samples are assigned on demand.

`timed` measures times. Workers wait instead of computing (see `benchmarks.served`), for `step_ms` times the
threads of a process, since so many more workers share this machine's cores for the remaining work: messages
as large as the model to and from the server, and steps of Adam. All times include the server.
`besides_computing_ms` is its part where no worker is slow; `server_step_ms` is one step of its optimizer
alone. The losses, on which DTSSP's bound depends, are those of a real training with ps-bsp and as many
workers, which runs first: of its first steps, because there is no time for more.

`real` measures accuracy. Gradients are computed, and no time may be read from it: workers share the cores,
and as many strategies as there are cores train at once. The learning rate falls from epoch to epoch. With
ps-bsp no worker is slowed, since that would change no bit of the result.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from benchmarks import runs, served
from benchmarks.commands import StalenessOptions
from benchmarks.served import ServedResult, ServedRun
from benchmarks.workers import print_progress
from offbeat.cli import job, timesheet
from offbeat.cli.result import Result, machine
from offbeat.cli.training_worker import TrainingSettings
from offbeat.data import resolve_data_dir
from offbeat.errors import OffbeatError
from offbeat.numerics.ps.updates import Adam
from offbeat.policies.stragglers.injection import parse_slow_rule
from offbeat.runtime.control.environment import available_cores
from offbeat.wire.job_view import TIME_PARTS
from offbeat.wire.log_file import read_log

STRATEGIES: Final[Mapping[str, str]] = {
    "bsp": "ps-bsp:shards=",
    "ssp3": "ssp:s=3,shards=",
    "ssp10": "ssp:s=10,shards=",
    "dtssp": "dtssp:shards=",
    "asp": "asp:shards=",
}
"""By the name in figures: the compared strategies, without the way of sharing samples."""
SETTINGS: Final[Mapping[str, tuple[str, Literal["equal", "dynamic"]]]] = {
    "bursts": ("bursts", "equal"),
    "bursts_dynamic": ("bursts", "dynamic"),
    "lasting_equal": ("lasting", "equal"),
    "lasting_dynamic": ("lasting", "dynamic"),
}
"""By the name in figures: the slowness, and the way of sharing samples."""
PARTS: Final = tuple(part for part in TIME_PARTS if part != "communicate")
"""The paper's nine parts in our names (see the glossary), and the rest."""
_NO_SLOWNESS: Final = "none"
_NO_SLOWNESS_STEPS: Final = 24
_SERVER_STEPS: Final = 10

OnProgress: TypeAlias = Callable[[timesheet.TimeSheet], None]


@dataclass(frozen=True, kw_only=True)
class StalenessRow:
    """Measurements of one run.

    Attributes:
        strategy: a key of `STRATEGIES`.
        setting: a key of `SETTINGS`, or "none" for no slow worker.
        threads: per process.
        steps: of each worker, where all have the same number.
    """

    strategy: str
    setting: str
    threads: int
    steps: int
    found: ServedResult


def bursts(workers: int, factor: float, steps: int, burst: int, calm: int) -> tuple[str, ...]:
    """Return rules that slow one process after the other for `burst` steps, with `calm` steps in between.

    Args:
        workers: number of processes.
        factor: slowdown of a step in a burst.
        steps: per epoch.
        burst, calm: in steps of one worker.
    """
    begins = range(0, steps, burst + calm)
    return tuple(
        f"{turn % workers}:{factor:g}@{begin / steps!r}-{min(steps, begin + burst) / steps!r}"
        for turn, begin in enumerate(begins)
    )


def lasting(workers: int) -> tuple[str, ...]:
    """Return rules that slow the last process 3 times and the one before it 2 times."""
    return (f"{workers - 2}:2", f"{workers - 1}:3")


def figures(rows: Sequence[StalenessRow], step_ms: float) -> dict[str, float]:
    """Return ratios of times to ps-bsp and to SSP, and shares of time at the gate.

    Figures of the first number of threads have no suffix; the others end in the total number of workers.

    Args:
        rows: of one or several numbers of threads.
        step_ms: compute time of a step with one thread per process.
    """
    found: dict[str, float] = {}
    by_case = {(row.setting, row.threads, row.strategy): row for row in rows}
    first = rows[0].threads if rows else 1
    for (setting, threads, strategy), row in by_case.items():
        world = len(row.found.parts_s) * threads
        suffix = "" if threads == first else f"_{world}_workers"
        if setting == _NO_SLOWNESS:
            extra_ms = 1000 * row.found.run_s / row.steps - step_ms * threads
            found[f"besides_computing_ms{suffix}"] = extra_ms
            continue
        others = ("bsp", "ssp3", "ssp10") if strategy == "dtssp" else ("bsp",)
        for other in others:
            baseline = by_case.get((setting, threads, other))
            if baseline is not None and other != strategy:
                ratio = row.found.run_s / baseline.found.run_s
                found[f"time_ratio_{strategy}_to_{other}_{setting}{suffix}"] = ratio
        found[f"barrier_share_{strategy}_{setting}{suffix}"] = row.found.barrier_share
        bsp = by_case.get((setting, threads, "bsp"))
        if bsp is not None and strategy != "bsp":
            ratio = row.found.total("pulled_bytes") / bsp.found.total("pulled_bytes")
            found[f"pulled_ratio_{strategy}_to_bsp_{setting}{suffix}"] = ratio
    return found


def accuracy_figures(accuracies: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return means over the seeds, and how far they are below those of ps-bsp."""
    found = {f"accuracy_{strategy}": mean(seeds) for strategy, seeds in accuracies.items()}
    for strategy, seeds in accuracies.items():
        if strategy != "bsp" and "bsp" in accuracies:
            below = [100 * (bsp - own) for bsp, own in zip(accuracies["bsp"], seeds, strict=True)]
            found[f"below_bsp_percent_{strategy}"] = mean(below)
    return found


class StalenessPlan(StalenessOptions):
    """The runs that the benchmark's options ask for.

    Raises:
        ValueError: an option is out of range.
    """

    @property
    def strategies(self) -> Sequence[str]:
        """Keys of `STRATEGIES`."""
        return self.strategy or [*STRATEGIES]

    @property
    def settings(self) -> Sequence[str]:
        """Keys of `SETTINGS`; with more threads than at first only the first one is used."""
        return self.setting or [*SETTINGS]

    @property
    def thread_counts(self) -> Sequence[int]:
        """One or several numbers of worker threads per process."""
        return self.threads or [1, 2]

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, chosen, known in (
            ("strategy", self.strategies, STRATEGIES),
            ("setting", self.settings, SETTINGS),
        ):
            for one in chosen:
                if one not in known:
                    raise ValueError(f"unknown {what} {one!r}: expected some of {', '.join(known)}")
        self.training("ps-bsp", self.thread_counts[0], self.epochs, self.seed)
        for rule in bursts(self.workers, self.factor, self.steps, self.burst, self.calm):
            parse_slow_rule(rule)

    def cases(self) -> Iterator[tuple[int, str, str]]:
        """Yield threads, setting and strategy of all timed runs in their order."""
        for threads in self.thread_counts:
            yield threads, _NO_SLOWNESS, "bsp"
            for setting in self.settings if threads == self.thread_counts[0] else self.settings[:1]:
                for strategy in self.strategies:
                    yield threads, setting, strategy

    def full_strategy(self, strategy: str, setting: str) -> str:
        """Return a strategy as on the command line."""
        return STRATEGIES[strategy] + SETTINGS.get(setting, ("", "equal"))[1]

    def slow(self, setting: str, steps: int) -> tuple[str, ...]:
        """Return the slowness rules of a setting, for epochs of `steps` steps."""
        match SETTINGS.get(setting):
            case None:
                return ()
            case "bursts", _:
                return bursts(self.workers, self.factor, steps, self.burst, self.calm)
            case _:
                return lasting(self.workers)

    def steps_in(self, setting: str) -> int:
        """Return the steps of each worker, where all have the same number."""
        if setting == _NO_SLOWNESS:
            return min(_NO_SLOWNESS_STEPS, self.steps)
        return self.steps if setting == "bursts" else self.steps // 2

    def training(
        self, strategy: str, threads: int, epochs: int, seed: int, *, decays: bool = False
    ) -> TrainingSettings:
        """Return the settings of a real training."""
        return TrainingSettings(
            model=self.model,
            data=self.data,
            data_dir=resolve_data_dir(self.data_dir),
            strategy=strategy,
            epochs=epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            decays_lr=decays,
            momentum=self.momentum,
            optimizer="adam",
            threads=threads,
            seed=seed,
            evaluates_each_epoch=False,
        )


def run(options: StalenessOptions, *, command: str) -> Result:
    """Run all cases one after the other: `timed` measures times, `real` accuracies.

    Raises:
        OffbeatError: the data are missing, or a worker failed.
        ValueError: an option is out of range, or there are fewer samples than one batch per worker.
    """
    plan = StalenessPlan(**vars(options))
    return _measure_times(plan, command) if plan.compute == "timed" else _measure_accuracies(plan, command)


# Times ------------------------------------------------------------------------------------------------------


def _measure_times(plan: StalenessPlan, command: str) -> Result:
    losses = {threads: _losses(plan, threads) for threads in plan.thread_counts}
    alone = runs.measure_layers(plan.model, plan.batch_size, plan.seed)
    rows = []
    for threads, setting, strategy in plan.cases():
        print_progress(f"{strategy}, {setting}, {plan.workers} x {threads} workers")
        steps = plan.steps_in(setting)
        found = served.run(
            ServedRun(
                model=plan.model,
                times=alone.scaled(plan.step_ms * threads / 1000 / alone.step_s),
                workers=plan.workers,
                threads=threads,
                batch_size=plan.batch_size,
                epochs=1,
                steps=steps,
                losses=losses[threads],
                strategy=plan.full_strategy(strategy, setting),
                slow=plan.slow(setting, steps),
                seed=plan.seed,
            )
        )
        rows.append(
            StalenessRow(strategy=strategy, setting=setting, threads=threads, steps=steps, found=found)
        )
    return Result(
        name="staleness",
        command=command,
        kind="timed",
        seed=plan.seed,
        figures={**figures(rows, plan.step_ms), "server_step_ms": _server_step_ms(plan)},
        rows=[plain_row for row in rows for plain_row in _to_rows(row)],
        machine=machine(
            model=plan.model,
            batch_size=plan.batch_size,
            alone_step_ms=1000 * alone.step_s,
            timed_step_ms_a_thread=plan.step_ms,
            lr=plan.lr,
            losses=f"of the first steps of ps-bsp with as many workers on {plan.data}",
        ),
    )


def _losses(plan: StalenessPlan, threads: int) -> tuple[float, ...]:
    """Train for real until every step of a timed run has a loss; return the losses in their order."""
    world = plan.workers * threads
    samples = len(job.load_data(plan.training("ps-bsp:shards=equal", threads, 1, plan.seed)).train)
    batches = world * (samples // world // plan.batch_size)  # full ones, per epoch
    if not batches:
        raise ValueError(
            f"expected a batch of {plan.batch_size} for each of {world} workers, {plan.data} has {samples} "
            "samples"
        )
    epochs = -(-plan.steps * world // batches)
    print_progress(f"losses of ps-bsp, {plan.workers} x {threads} workers, {epochs} epochs")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = job.open_run_dir(Path(folder))
        settings = plan.training("ps-bsp:shards=equal", threads, epochs, plan.seed)
        job.run_job(job.Job(settings=settings, workers=plan.workers), run_dir)
        return served.losses_of(read_log(run_dir / job.LOG_NAME).entries, plan.batch_size)


def _server_step_ms(plan: StalenessPlan) -> float:
    """Return the time of the server's optimizer for a step of the whole model, on one core, in ms."""
    size = sum(parameter.numel() for parameter in runs.network(plan.model, None, plan.seed).parameters())
    values, pushed = np.zeros((size, 1), np.float32), np.ones((size, 1), np.float32)
    adam = Adam(lr=1e-3)
    states = {name: np.zeros_like(values) for name in adam.states}
    took_s = []
    for _ in range(_SERVER_STEPS):
        began_s = time.perf_counter()
        adam.apply(values, states, pushed)
        took_s.append(time.perf_counter() - began_s)
    return 1000 * min(took_s)


def _to_rows(row: StalenessRow) -> Iterator[dict[str, Any]]:
    """Yield one row per process; times are means over its threads."""
    found = row.found
    staleness = [found.staleness.get(clocks, 0) for clocks in range(max(found.staleness, default=-1) + 1)]
    for process, parts_s in sorted(found.parts_s.items()):
        traffic = found.traffic[process]
        yield {
            "strategy": row.strategy,
            "setting": row.setting,
            "workers": len(found.parts_s) * row.threads,
            "process": process,
            "run_s": found.run_s,
            **{f"{part}_s": parts_s[part] / row.threads for part in PARTS},
            "pulls_count": int(traffic["pulls_count"]),
            "pulled_mb": traffic["pulled_bytes"] / 1e6,
            "staleness_of_all": "/".join(map(str, staleness)),
            "bound_mean": found.bound_mean,
        }


# Accuracies -------------------------------------------------------------------------------------------------


def _measure_accuracies(plan: StalenessPlan, command: str) -> Result:
    accuracies: dict[str, list[float]] = {strategy: [] for strategy in plan.strategies}
    rows: list[dict[str, Any]] = []
    for seed in range(plan.seed, plan.seed + plan.seeds):
        print_progress(f"{', '.join(plan.strategies)}, seed {seed}")
        trainings = [partial(_train, plan, strategy, seed) for strategy in plan.strategies]
        for strategy, row in zip(plan.strategies, _run_concurrently(trainings), strict=True):
            accuracies[strategy].append(row["accuracy"])
            rows.append({"strategy": strategy, "seed": seed, **row})
    return Result(
        name="staleness",
        command=command,
        kind="real",
        seed=plan.seed,
        figures=accuracy_figures(accuracies),
        rows=rows,
        machine=machine(
            model=plan.model,
            data=plan.data,
            batch_size=plan.batch_size,
            lr=plan.lr,
            momentum=plan.momentum,
            epochs=plan.epochs,
        ),
    )


def _run_concurrently(trainings: Sequence[Callable[[OnProgress], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Run the trainings, as many at once as there are cores; a failure of one, or here, ends all."""
    is_stopped = threading.Event()

    def check_not_stopped(sheet: timesheet.TimeSheet) -> None:
        if is_stopped.is_set():
            raise OffbeatError("another training has ended early")

    with ThreadPoolExecutor(available_cores()) as pool:
        running = [pool.submit(training, check_not_stopped) for training in trainings]
        try:
            for one in as_completed(running):
                one.result()
        except BaseException:
            is_stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [one.result() for one in running]


def _train(plan: StalenessPlan, strategy: str, seed: int, on_progress: OnProgress) -> dict[str, Any]:
    """Train in bursts, with equal shards."""
    threads = plan.thread_counts[0]
    settings = plan.training(plan.full_strategy(strategy, "bursts"), threads, plan.epochs, seed, decays=True)
    one = job.Job(settings=settings, workers=plan.workers)
    steps = one.steps_per_epoch(len(job.load_data(settings).train))
    slow = () if strategy == "bsp" else plan.slow("bursts", steps)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = job.open_run_dir(Path(folder))
        sheet = job.run_job(job.Job(settings=settings, workers=plan.workers, slow=slow), run_dir, on_progress)
        staleness = served.staleness_of(read_log(run_dir / job.LOG_NAME).entries)
    found = timesheet.figures(sheet)
    return {
        "workers": one.world,
        "accuracy": found["accuracy"],
        "loss": found["loss"],
        "steps": steps * plan.epochs,
        "staleness_mean": mean(staleness) if staleness else None,
        "staleness_max": max(staleness, default=None),
    }
