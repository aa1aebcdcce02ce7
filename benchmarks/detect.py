"""`python -m benchmarks detect`: delay until a slow worker is excluded, and until it is readmitted.

Source: the first paper, section 5: 10 epochs, in the first half of each of which one random worker takes 3
times as long; batches of 32 and 64. Deviations: fewer steps per epoch; workers wait instead of computing
(`timed`), for the same fraction of the measured time with both batch sizes.

The rule determines which worker was slow; the run log contains the members of the group. Steps are the
group's: a worker was *found after* the number of steps in which it was slow and still a member, and *back
after* the number of steps that it missed while it was no longer slow.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from benchmarks import runs
from benchmarks.commands import DetectOptions
from benchmarks.exclusions import Findings, evaluate_detection, read_changes, read_steps, slow_workers
from benchmarks.runs import TrainingRun
from benchmarks.workers import print_progress
from offbeat.cli.result import Result, machine
from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule
from offbeat.strategies import parse_strategy

BATCH_SIZES = (32, 64)
RULE = "random:3@0.0-0.5"


def figures(findings: Findings, batch_size: int) -> dict[str, float]:
    """Return one run's figures; means are over detected workers, and over readmitted ones."""
    found: dict[str, float] = {}
    if findings.detect_steps:
        found[f"detect_steps_mean_b{batch_size}"] = mean(findings.detect_steps)
    if findings.recover_steps:
        found[f"recover_steps_mean_b{batch_size}"] = mean(findings.recover_steps)
    return found | {
        f"false_alarms_b{batch_size}": findings.false_alarms,
        f"missed_b{batch_size}": findings.missed,
        f"early_recoveries_b{batch_size}": findings.early_recoveries,
        f"recoveries_b{batch_size}": len(findings.recover_steps),
    }


def plain_rows(findings: Findings, batch_size: int) -> list[dict[str, Any]]:
    """Return the episodes as flat objects."""
    return [
        {
            "batch_size": batch_size,
            "epoch": episode.epoch,
            "worker": episode.worker,
            "slow_from_step": episode.begins,
            "slow_to_step": episode.ends,
            "detect_steps": None if episode.excluded_at is None else episode.excluded_at - episode.begins,
            "detect_s": episode.detect_s,
            "recover_steps": None if episode.returned_at is None else episode.returned_at - episode.ends,
            "recover_s": episode.recover_s,
        }
        for episode in findings.episodes
    ]


def run(options: DetectOptions, *, command: str) -> Result:
    """Measure both batch sizes.

    Raises:
        ValueError: an unknown strategy or model.
    """
    model, strategy, seed = options.model, options.strategy, options.seed
    parse_strategy(strategy)
    rows: list[dict[str, Any]] = []
    found: dict[str, float] = {}
    about: dict[str, float] = {}
    scale: float | None = None
    for batch_size in BATCH_SIZES:
        alone = runs.measure_layers(model, batch_size, seed)
        scale = scale or options.step_ms / 1000 / alone.step_s
        times = alone.scaled(scale)
        about[f"alone_step_ms_b{batch_size}"] = 1000 * alone.step_s
        about[f"timed_step_ms_b{batch_size}"] = 1000 * times.step_s
        print_progress(f"{strategy}, batches of {batch_size}")
        findings = _measure(
            TrainingRun(
                model=model,
                times=times,
                workers=options.workers,
                batch_size=batch_size,
                epochs=options.epochs,
                steps=max(1, options.steps * BATCH_SIZES[0] // batch_size),
                strategy=strategy,
                slow=(RULE,),
                seed=seed,
            )
        )
        found |= figures(findings, batch_size)
        rows += plain_rows(findings, batch_size)
    return Result(
        name="detect",
        command=command,
        kind="timed",
        seed=seed,
        figures=found,
        rows=rows,
        machine=machine(model=model, strategy=strategy, **about),
    )


def _measure(settings: TrainingRun) -> Findings:
    _, entries = runs.run(settings)
    changes = read_changes(entries)
    steps = read_steps(entries, changes)
    rules = [parse_slow_rule(text) for text in settings.slow]
    slowness = InjectedSlowness(rules, workers=settings.workers, seed=settings.seed)
    return evaluate_detection(
        changes, steps, slow_workers(slowness, steps, settings.workers, settings.samples)
    )
