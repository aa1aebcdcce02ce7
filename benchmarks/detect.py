"""`python -m benchmarks detect`: delay until a slow worker is excluded, and until it is readmitted.

Source: the first paper, section 5: 10 epochs, in the first half of each of which one random worker takes 3
times as long; batches of 32 and 64. Deviations: fewer steps per epoch; workers wait instead of computing
(`timed`), for the same fraction of the measured time with both batch sizes.

The rule determines which worker was slow; the run log contains the members of the group. Steps are the
group's: a worker was *found after* the number of steps in which it was slow and still a member, and *back
after* the number of steps that it missed while it was no longer slow.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import runs
from benchmarks.exclusions import Findings, evaluate_detection, read_changes, read_steps, slow_workers
from benchmarks.runs import TrainingRun
from offbeat.cli.result import Result, machine
from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule
from offbeat.wire.record import read_log

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


def run(
    *,
    command: str,
    strategy: str = "partial",
    model: str = "resnet18",
    workers: int = 4,
    epochs: int = 10,
    steps: int = 80,
    step_ms: float = 100.0,
    seed: int = 0,
) -> Result:
    """Measure both batch sizes.

    Args:
        command: the command line, for the result.
        strategy: whose detector is measured, as on the command line.
        model: a key of `offbeat.models.MODELS`.
        workers: worker processes on this machine, at least 2.
        epochs: at least 1.
        steps: per epoch with batches of 32; half as many with 64.
        step_ms: forward plus backward time of a batch of 32 after scaling.
        seed: of victims, weights and random gradients.

    Raises:
        ValueError: an unknown strategy.
    """
    rows: list[dict[str, Any]] = []
    found: dict[str, float] = {}
    about: dict[str, float] = {}
    scale: float | None = None
    for batch_size in BATCH_SIZES:
        alone = runs.measure_layers(model, batch_size, seed)
        scale = scale or step_ms / 1000 / alone.step_s
        times = alone.scaled(scale)
        about[f"alone_step_ms_b{batch_size}"] = 1000 * alone.step_s
        about[f"timed_step_ms_b{batch_size}"] = 1000 * times.step_s
        print(f"{strategy}, batches of {batch_size}", file=sys.stderr, flush=True)
        findings = _measure(
            TrainingRun(
                model=model,
                times=times,
                workers=workers,
                batch_size=batch_size,
                epochs=epochs,
                steps=max(1, steps * BATCH_SIZES[0] // batch_size),
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
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        runs.run(settings, log)
        entries = read_log(log).entries
    changes = read_changes(entries)
    steps = read_steps(entries, changes)
    rules = [parse_slow_rule(text) for text in settings.slow]
    slowness = InjectedSlowness(rules, workers=settings.workers, seed=settings.seed)
    return evaluate_detection(
        changes, steps, slow_workers(slowness, steps, settings.workers, settings.samples)
    )
