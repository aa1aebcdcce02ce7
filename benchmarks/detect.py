"""`python -m benchmarks detect`: how soon a worker that gets slow is left out, and how soon it is back.

Source: the first paper, section 5: 10 epochs, in the first half of each of which one worker, drawn anew,
takes 3 times as long; batches of 32 and 64. Deviations: fewer steps an epoch, and computing is waited for
rather than done (`timed`), at the same share of its measured time for both batch sizes.

Who was slow is computed from the rule, and who took part is read from the run log. Steps are the group's: a
worker was *found after* as many as it still took part in, and *back after* as many as it missed although it
was not slow any more.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import runs
from benchmarks.exclusions import Findings, judge, read_changes, read_steps, slow_in
from benchmarks.runs import Run
from offbeat.cli.result import Result, machine
from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule
from offbeat.wire.record import read_log

BATCH_SIZES = (32, 64)
RULE = "random:3@0.0-0.5"


def figures(findings: Findings, batch_size: int) -> dict[str, float]:
    """Return what one run came to; means over those that were found, and those that came back."""
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
            "detect_steps": None if episode.left_out is None else episode.left_out - episode.begins,
            "detect_s": episode.detect_s,
            "recover_steps": None if episode.back is None else episode.back - episode.ends,
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
    """Measures both batch sizes.

    Args:
        command: the command line, for the result.
        strategy: whose detector is measured, as on the command line.
        model: a key of `offbeat.models.MODELS`.
        workers: worker processes on this machine, at least 2.
        epochs: at least 1.
        steps: in an epoch of batches of 32; half as many for 64.
        step_ms: to what forward and backward pass of a batch of 32 together are scaled.
        seed: of victims, weights and drawn gradients.

    Raises:
        ValueError: the strategy is not understood.
    """
    rows: list[dict[str, Any]] = []
    found: dict[str, float] = {}
    about: dict[str, float] = {}
    scale: float | None = None
    for batch_size in BATCH_SIZES:
        alone = runs.measured(model, batch_size, seed)
        scale = scale or step_ms / 1000 / alone.step_s
        times = alone.scaled(scale)
        about[f"alone_step_ms_b{batch_size}"] = 1000 * alone.step_s
        about[f"timed_step_ms_b{batch_size}"] = 1000 * times.step_s
        print(f"{strategy}, batches of {batch_size}", file=sys.stderr, flush=True)
        findings = _measure(
            Run(
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


def _measure(settings: Run) -> Findings:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        runs.run(settings, log)
        entries = read_log(log).entries
    changes = read_changes(entries)
    steps = read_steps(entries, changes)
    rules = [parse_slow_rule(text) for text in settings.slow]
    slowness = InjectedSlowness(rules, workers=settings.workers, seed=settings.seed)
    return judge(changes, steps, slow_in(slowness, steps, settings.workers, settings.samples))
