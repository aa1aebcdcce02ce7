"""Cost of slow workers, from none to all of them, in lockstep and with `partial`.

Source: the first paper, figure 1: ResNet-18 on CIFAR-10 with 0 to 4 stragglers of 4 workers, slowed 5 times
by sleeping, in lockstep. Deviations: fewer steps; `partial` as well; samples shaped like CIFAR-10 with
nothing in them to learn; `timed` waits instead of computing, for layer times that were measured on this
machine and are shortened by one factor; `real` computes, on small batches.

A *slowdown* is the ratio of step times, over the whole run: it includes the start, every detection, and the
wait for the last worker at the end. A group with an excluded worker uses fewer samples per step; the slowdown
per sample accounts for that. Runs whose steps are all alike (in lockstep, or when all workers are slow and so
none is slower than the others) are shorter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import msgspec
import torch

from benchmarks import runs
from benchmarks.commands import StragglerOptions
from benchmarks.exclusions import GroupChange, GroupStep, read_changes, read_steps
from benchmarks.runs import Compute, TrainingRun
from benchmarks.workers import print_progress, read_settings, run_workers, send_result
from offbeat.cli.result import Result, machine
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

SIDES = ("bsp", "partial")
AUTO = "partial:k=auto"
_ALIKE_STEPS = 40
_PAIR_BLOCKS, _PAIR_STEPS = 16, 10


@dataclass(frozen=True, kw_only=True)
class StragglerCase:
    """One run: a strategy and a number of slow workers.

    Attributes:
        is_alike: all steps of the run are alike.
    """

    strategy: str
    stragglers: int
    is_alike: bool


@dataclass(frozen=True, kw_only=True)
class StragglerRow:
    """Measurements of a run.

    Attributes:
        steps: of the group.
        samples: used by the group.
        detect_steps: steps of the group before a slow worker was first excluded, None if none ever was.
    """

    case: StragglerCase
    run_s: float
    steps: int
    samples: int
    detect_steps: int | None

    @property
    def step_s(self) -> float:
        """Mean time of a step, over the whole run."""
        return self.run_s / self.steps

    @property
    def sample_s(self) -> float:
        """Mean time of a sample, over the whole run."""
        return self.run_s / self.samples


def cases(workers: int, stragglers_max: int) -> Iterator[StragglerCase]:
    """Yield all runs in their order."""
    for stragglers in range(stragglers_max + 1):
        for strategy in SIDES:
            is_alike = strategy == "bsp" or stragglers == workers
            yield StragglerCase(strategy=strategy, stragglers=stragglers, is_alike=is_alike)
    if stragglers_max:
        yield StragglerCase(strategy=AUTO, stragglers=1, is_alike=True)


def row(
    case: StragglerCase, run_s: float, changes: list[GroupChange], steps: list[GroupStep], workers: int
) -> StragglerRow:
    """Return the measurements of a run."""
    slow = {workers - 1 - index for index in range(case.stragglers)}
    without = [change.step for change in changes if slow - change.members]
    return StragglerRow(
        case=case,
        run_s=run_s,
        steps=len(steps),
        samples=sum(step.samples for step in steps),
        detect_steps=without[0] if without and case.stragglers < workers else None,
    )


def figures(rows: list[StragglerRow], compute: Compute) -> dict[str, float]:
    """Return slowdowns against the same strategy without slow workers, and the delay of the detection."""
    suffix = "" if compute == "timed" else "_real"
    baselines = {row.case.strategy: row for row in rows if not row.case.stragglers}
    found: dict[str, float] = {}
    for row in rows:
        strategy, stragglers = row.case.strategy, row.case.stragglers
        if stragglers and strategy in baselines:
            found[f"slowdown_{strategy}_{stragglers}{suffix}"] = row.step_s / baselines[strategy].step_s
    for row in rows:
        strategy, stragglers = row.case.strategy, row.case.stragglers
        if stragglers and strategy == "partial":
            found[f"slowdown_a_sample_partial_{stragglers}{suffix}"] = (
                row.sample_s / baselines[strategy].sample_s
            )
            if stragglers == 1 and row.detect_steps is not None:
                found[f"detect_steps{suffix}"] = row.detect_steps
    return found


def run(options: StragglerOptions, *, command: str) -> Result:
    """Measure all cases one after the other, then both strategies in alternation without slow workers.

    Raises:
        ValueError: an option out of range.
    """
    model, workers, stragglers, seed = options.model, options.workers, options.stragglers, options.seed
    if stragglers is not None and not 0 <= stragglers <= workers:
        raise ValueError(f"expected 0 to {workers} stragglers of {workers} workers, got {stragglers}")
    runs.slow_rules(workers, 1, options.factor)
    compute: Compute = "timed" if options.compute == "timed" else "real"
    batch_size = options.batch_size or (32 if compute == "timed" else 4)
    steps = options.steps or (120 if compute == "timed" else 20)
    alone = runs.measure_layers(model, batch_size, seed)
    times = alone.lasting(options.step_ms / 1000) if compute == "timed" else None
    base = TrainingRun(
        model=model,
        times=times,
        workers=workers,
        batch_size=batch_size,
        epochs=options.epochs,
        steps=steps,
        strategy="bsp",
        seed=seed,
    )
    stragglers = workers if stragglers is None else stragglers
    rows = [_measure(base, case, options.factor) for case in cases(workers, stragglers)]
    pair = run_workers("benchmarks.straggler", msgspec.to_builtins(base), workers)
    ratio = median(pair["partial"]) / median(pair["bsp"])
    suffix = "" if compute == "timed" else "_real"
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
        figures={**figures(rows, compute), f"partial_to_bsp_ratio_none_slow{suffix}": ratio},
        rows=[*(_to_row(row) for row in rows), *in_turn],
        machine=machine(
            model=model,
            batch_size=batch_size,
            alone_step_ms=1000 * alone.step_s,
            timed_step_ms=None if times is None else 1000 * times.step_s,
        ),
    )


def _measure(base: TrainingRun, case: StragglerCase, factor: float) -> StragglerRow:
    settings = replace(
        base, strategy=case.strategy, slow=runs.slow_rules(base.workers, case.stragglers, factor)
    )
    if case.is_alike:
        settings = replace(settings, epochs=1, steps=min(_ALIKE_STEPS, base.steps * base.epochs))
    print_progress(f"{case.strategy}, {case.stragglers} of {base.workers} slow")
    run_s, entries = runs.run(settings)
    changes = read_changes(entries)
    return row(case, run_s, changes, read_steps(entries, changes), base.workers)


def _to_row(row: StragglerRow) -> dict[str, Any]:
    return {
        "strategy": row.case.strategy,
        "stragglers": row.case.stragglers,
        "steps": row.steps,
        "samples": row.samples,
        "run_s": row.run_s,
        "step_ms": 1000 * row.step_s,
        "detect_steps": row.detect_steps,
    }


# Both strategies in alternation -----------------------------------------------------------------------------


def main() -> None:
    """Run blocks of steps under each strategy in alternation, as one worker; rank 0 sends its step times."""
    settings = msgspec.convert(read_settings(sys.argv), TrainingRun)
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
                for index in range(_PAIR_STEPS):
                    began_s = time.perf_counter()
                    steppers[strategy]()
                    if block and index:  # a block's first step waits for workers late from the block before
                        step_s[strategy].append(time.perf_counter() - began_s)
    if session.worker == 0:
        send_result(step_s)


def _stepper(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], None]:
    return lambda: runs.step(model, optimizer, x, y)


if __name__ == "__main__":
    main()
