"""Fastest way of averaging layers, by line rate and number of workers.

At every point a step's compute time is its gradients' transfer time, or another multiple of it. `simulated`
predicts each step (`offbeat.numerics.collectives.forecast`), also for more workers than fit on one machine;
there, groups of `GROUP` with the hierarchical schedule are another side. `timed` measures (see
`benchmarks.hybrid`), and includes the predictions.

Source: specification 3.9 and 3.5 (GradientFlow's hierarchical all-reduce, which needs fewer steps than a ring
of all). All lines are alike here: the gain of a group whose members are close to each other is not included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

from benchmarks import hybrid, runs
from benchmarks.commands import HybridOptions, HybridSweepOptions
from benchmarks.expected import (
    BATCH_SIZE,
    COST_MODEL,
    LATENCY_S,
    SIDES,
    ComputeCase,
    line_of,
    predicted_s,
    times_for,
    transfer_s,
    works_of,
)
from benchmarks.workers import print_progress
from offbeat.cli.result import Result, machine
from offbeat.numerics.collectives.forecast import forecast_step

GROUP = 16
HIERARCHICAL = "hierarchical"
_NEARLY = 1.01  # times the best still counts as a win

Points: TypeAlias = Sequence[tuple[int, int]]
"""Pairs of a rate in Mbit/s and a number of workers."""


def run(options: HybridSweepOptions, *, command: str) -> Result:
    """Predict or measure all points; measuring needs root.

    Raises:
        ValueError: an option is out of range.
    """
    sides = options.side or [*SIDES]
    for side in sides:
        if side not in SIDES:
            raise ValueError(f"expected sides of {', '.join(SIDES)}, got {side!r}")
    case = ComputeCase(ratio=options.compute, forward_share=options.forward_share)
    points = [*product(options.rate_mbit or (100, 1000, 10_000), options.workers or (2, 4, 8))]
    if options.timed:
        rows = [*_measured(options, points, command)]
    else:
        rows = [*_simulated(options, points, case, sides)]
    for rate, workers in points:
        at_point = [row for row in rows if (row["rate_mbit"], row["workers"]) == (rate, workers)]
        best_s = min(row["step_s"] for row in at_point)
        for row in at_point:
            row["ratio_to_best"] = row["step_s"] / best_s
    return Result(
        name="hybrid-sweep",
        command=command,
        kind="timed" if options.timed else "simulated",
        seed=options.seed,
        figures=figures(rows),
        rows=rows,
        machine=machine(
            model=options.model,
            batch_size_of_times=BATCH_SIZE,
            compute_to_transfer=case.ratio,
            forward_share=case.forward_share,
            latency_us=1e6 * LATENCY_S,
        ),
    )


def _measured(options: HybridSweepOptions, points: Points, command: str) -> Iterator[dict[str, Any]]:
    for rate, workers in points:
        print_progress(f"{rate} Mbit/s, {workers} workers")
        found = hybrid.run(
            HybridOptions(
                model=options.model,
                side=options.side or [*SIDES],
                compute=[options.compute],
                forward_share=[options.forward_share],
                steps=options.steps,
                workers=workers,
                rate_mbit=rate,
                seed=options.seed,
            ),
            command=command,
        )
        yield from ({"rate_mbit": rate, "workers": workers, **row} for row in found.rows)


def _simulated(
    options: HybridSweepOptions, points: Points, case: ComputeCase, sides: Sequence[str]
) -> Iterator[dict[str, Any]]:
    built = runs.network(options.model, None, options.seed)
    alone = runs.measure_layers(options.model, BATCH_SIZE, options.seed)
    whole = sum(parameter.nbytes for parameter in built.parameters())
    for rate_mbit, workers in points:
        rate = rate_mbit * 1_000_000
        works = works_of(times_for(alone, case, transfer_s(whole, workers, rate), 0.0), built, 0.0)
        took_s = {side: predicted_s(side, works, workers, rate) for side in sides}
        if workers > GROUP:
            line = line_of(rate)
            took_s[HIERARCHICAL] = forecast_step(
                works, workers, line, algorithm=f"hierarchical:{GROUP}"
            ).step_s
        for side, step_s in took_s.items():
            yield {"rate_mbit": rate_mbit, "workers": workers, "side": side, "step_s": step_s}


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return at how many points each side is within 1 % of the best, and the cost model's worst ratio."""
    wins = Counter(row["side"] for row in rows if row["ratio_to_best"] <= _NEARLY)
    found: dict[str, float] = {
        f"wins_count_{side}": wins[side] for side in dict.fromkeys(row["side"] for row in rows)
    }
    ratios = [row["ratio_to_best"] for row in rows if row["side"] == COST_MODEL]
    if ratios:
        found["cost_model_to_best_ratio_max"] = max(ratios)
    return {**found, **hybrid.prediction_figures(rows)}
