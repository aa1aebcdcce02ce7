"""What slow workers cost in lockstep and with `partial`, none to all of them slow.

Source: the first paper, figure 1: ResNet-18 on CIFAR-10 with 0 to 4 stragglers of 4 workers, slowed 5 times
by sleeping, in lockstep. Deviations: fewer steps; `partial` beside it; samples shaped like CIFAR-10 with
nothing in them to learn; computing is waited for rather than done (`timed`), in layer times that were
measured here and are shortened by one factor; `real` computes, on small batches.

A *slowdown* is how many times as long a step takes, over the whole run: its start, every detection, and the
wait for the last worker at the end are in it. A group that leaves a worker out takes its steps with fewer
samples; the slowdown of a sample says what that comes to. Where every step is like every other (in lockstep,
or when all are slow and so nobody is slower than the others) a run is shorter.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from benchmarks import runs
from benchmarks.exclusions import Change, Step, read_changes, read_steps
from benchmarks.runs import Compute, Run
from benchmarks.workers import answer, run_workers, settings_of
from offbeat.cli.result import Result, machine
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy
from offbeat.wire.record import read_log

SIDES = ("bsp", "partial")
AUTO = "partial:k=auto"
_ALIKE_STEPS = 40
_PAIR_BLOCKS, _PAIR_STEPS = 16, 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a strategy with so many slow workers.

    Attributes:
        is_alike: every step is like every other.
    """

    strategy: str
    stragglers: int
    is_alike: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a run came to.

    Attributes:
        steps: of the group.
        samples: that it used.
        detect_steps: the steps that the group had taken when it was first without a slow worker, None where
            it never was.
    """

    case: Case
    run_s: float
    steps: int
    samples: int
    detect_steps: int | None

    @property
    def step_s(self) -> float:
        """A step, over the whole run."""
        return self.run_s / self.steps

    @property
    def sample_s(self) -> float:
        """A sample, over the whole run."""
        return self.run_s / self.samples


def cases(workers: int, stragglers_max: int) -> Iterator[Case]:
    """Yield all runs, in their order."""
    for stragglers in range(stragglers_max + 1):
        for strategy in SIDES:
            is_alike = strategy == "bsp" or stragglers == workers
            yield Case(strategy=strategy, stragglers=stragglers, is_alike=is_alike)
    if stragglers_max:
        yield Case(strategy=AUTO, stragglers=1, is_alike=True)


def row(case: Case, run_s: float, changes: list[Change], steps: list[Step], workers: int) -> Row:
    """Return what a run came to."""
    slow = {workers - 1 - place for place in range(case.stragglers)}
    without = [change.step for change in changes if slow - change.members]
    return Row(
        case=case,
        run_s=run_s,
        steps=len(steps),
        samples=sum(step.samples for step in steps),
        detect_steps=without[0] if without and case.stragglers < workers else None,
    )


def figures(rows: list[Row], compute: Compute) -> dict[str, float]:
    """Return slowdowns against the same strategy with nobody slow, and how soon one straggler was found."""
    end = "" if compute == "timed" else "_real"
    none = {row.case.strategy: row for row in rows if not row.case.stragglers}
    found: dict[str, float] = {}
    for row in rows:
        strategy, stragglers = row.case.strategy, row.case.stragglers
        if stragglers and strategy in none:
            found[f"slowdown_{strategy}_{stragglers}{end}"] = row.step_s / none[strategy].step_s
    for row in rows:
        strategy, stragglers = row.case.strategy, row.case.stragglers
        if stragglers and strategy == "partial":
            found[f"slowdown_a_sample_partial_{stragglers}{end}"] = row.sample_s / none[strategy].sample_s
            if stragglers == 1 and row.detect_steps is not None:
                found[f"detect_steps{end}"] = row.detect_steps
    return found


def run(
    *,
    command: str,
    compute: Compute = "timed",
    model: str = "resnet18",
    workers: int = 4,
    stragglers: int | None = None,
    factor: float = 5.0,
    epochs: int = 10,
    steps: int | None = None,
    batch_size: int | None = None,
    step_ms: float = 100.0,
    seed: int = 0,
) -> Result:
    """Measures all cases one after the other, then both strategies in turn with nobody slow.

    Args:
        command: the command line, for the result.
        compute: `timed` waits for measured times, `real` computes.
        model: a key of `offbeat.models.MODELS`.
        workers: worker processes on this machine, at least 2.
        stragglers: up to how many are slow; by default all.
        factor: how many times as long a slow worker takes, above 1.
        epochs: of the cases in which steps differ.
        steps: in an epoch; by default 120 timed, 20 real.
        batch_size: samples a worker and step; by default 32 timed, 4 real.
        step_ms: to what forward and backward pass together are scaled where they are timed.
        seed: of weights, samples and drawn gradients.

    Raises:
        ValueError: an argument out of range.
    """
    if stragglers is not None and not 0 <= stragglers <= workers:
        raise ValueError(f"expected 0 to {workers} stragglers of {workers} workers, got {stragglers}")
    runs.slowed(workers, 1, factor)
    batch_size = batch_size or (32 if compute == "timed" else 4)
    steps = steps or (120 if compute == "timed" else 20)
    alone = runs.measured(model, batch_size, seed)
    times = alone.scaled(step_ms / 1000 / alone.step_s) if compute == "timed" else None
    base = Run(
        model=model,
        times=times,
        workers=workers,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        strategy="bsp",
        seed=seed,
    )
    stragglers = workers if stragglers is None else stragglers
    rows = [_measure(base, case, factor) for case in cases(workers, stragglers)]
    pair = run_workers("benchmarks.straggler", msgspec.to_builtins(base), workers)
    ratio = median(pair["partial"]) / median(pair["bsp"])
    end = "" if compute == "timed" else "_real"
    in_turn = [
        {"strategy": f"{strategy} in turn", "stragglers": 0, "steps": len(step_s)}
        | {"run_s": sum(step_s), "step_ms": 1000 * median(step_s)}
        for strategy, step_s in pair.items()
    ]
    return Result(
        name="straggler",
        command=command,
        kind=compute,
        seed=seed,
        figures={**figures(rows, compute), f"partial_to_bsp_ratio_none_slow{end}": ratio},
        rows=[*(_plain(row) for row in rows), *in_turn],
        machine=machine(
            model=model,
            batch_size=batch_size,
            alone_step_ms=1000 * alone.step_s,
            timed_step_ms=None if times is None else 1000 * times.step_s,
        ),
    )


def _measure(base: Run, case: Case, factor: float) -> Row:
    settings = replace(base, strategy=case.strategy, slow=runs.slowed(base.workers, case.stragglers, factor))
    if case.is_alike:
        settings = replace(settings, epochs=1, steps=min(_ALIKE_STEPS, base.steps * base.epochs))
    print(f"{case.strategy}, {case.stragglers} of {base.workers} slow", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        run_s = runs.run(settings, log)
        entries = read_log(log).entries
    changes = read_changes(entries)
    return row(case, run_s, changes, read_steps(entries, changes), base.workers)


def _plain(row: Row) -> dict[str, Any]:
    return {
        "strategy": row.case.strategy,
        "stragglers": row.case.stragglers,
        "steps": row.steps,
        "samples": row.samples,
        "run_s": row.run_s,
        "step_ms": 1000 * row.step_s,
        "detect_steps": row.detect_steps,
    }


# Both strategies in turn ------------------------------------------------------------------------------------


def main() -> None:
    """One worker: takes blocks of steps under each strategy in turn; rank 0 answers with its step times."""
    settings = msgspec.convert(settings_of(sys.argv), Run)
    torch.set_num_threads(1)
    steppers: dict[str, Callable[[], None]] = {}
    with ExitStack() as stack:
        for strategy in SIDES:
            model = runs.network(settings.model, settings.times, settings.seed)
            optimizer = runs.optimizer_of(model)
            session = stack.enter_context(join(model, optimizer, parse_strategy(strategy)))
            timed = settings.times is not None
            x, y = runs.batch(settings.batch_size, settings.seed * 1000 + session.worker, timed)
            steppers[strategy] = _stepper(model, optimizer, x, y)
        step_s: dict[str, list[float]] = {strategy: [] for strategy in SIDES}
        for block in range(_PAIR_BLOCKS + 1):  # the first one warms up
            for strategy in SIDES[:: 1 if block % 2 else -1]:
                for place in range(_PAIR_STEPS):
                    began_s = time.perf_counter()
                    steppers[strategy]()
                    if block and place:  # the first step of a block waits for who ended the one before late
                        step_s[strategy].append(time.perf_counter() - began_s)
    if session.worker == 0:
        answer(step_s)


def _stepper(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], None]:
    return lambda: runs.step(model, optimizer, x, y)


if __name__ == "__main__":
    main()
