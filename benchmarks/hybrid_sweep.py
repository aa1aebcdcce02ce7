"""Fastest way of averaging layers, by line rate and number of workers.

At every point a step's compute time is its gradients' transfer time, or another multiple of it. `simulated`
predicts each step (`offbeat.numerics.collectives.forecast`), also for more workers than fit on one machine;
there, groups of `GROUP` with the hierarchical schedule are another side. `timed` measures (see
`benchmarks.hybrid`), and includes the predictions.

Source: specification 3.9 and 3.5 (GradientFlow's hierarchical all-reduce, which needs fewer steps than a ring
of all). All lines are alike here: the gain of a group whose members are close to each other is not included.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from benchmarks import hybrid, runs
from benchmarks.expected import (
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
from offbeat.cli.result import Result, machine
from offbeat.numerics.collectives.forecast import forecast_step

GROUP = 16
HIERARCHICAL = "hierarchical"
_NEARLY = 1.01  # times the best still counts as a win


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Settings of the benchmark.

    Attributes:
        model: a key of `offbeat.models.MODELS`.
        kind: `timed` or `simulated`.
        rates_mbit: of the lines.
        workers: numbers of workers.
        sides: keys of `benchmarks.expected.SIDES`.
        case: compute time of a step.
        steps: measured steps per side and point, with `timed`.
        batch_size: for which layer times are measured.
    """

    model: str = "alexnet"
    kind: Literal["timed", "simulated"] = "simulated"
    rates_mbit: tuple[int, ...] = (100, 1000, 10_000)
    workers: tuple[int, ...] = (2, 4, 8)
    sides: tuple[str, ...] = tuple(SIDES)
    case: ComputeCase = ComputeCase(ratio=1.0, forward_share=1 / 3)  # noqa: RUF009  # it is frozen
    steps: int = 5
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for side in self.sides:
            if side not in SIDES:
                raise ValueError(f"expected sides of {', '.join(SIDES)}, got {side!r}")
        if not self.rates_mbit or not self.workers or min(self.rates_mbit) < 1 or min(self.workers) < 2:
            raise ValueError("expected rates of at least 1 Mbit/s and at least 2 workers")

    def points(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of rate and number of workers."""
        yield from product(self.rates_mbit, self.workers)


def run(plan: SweepPlan, *, command: str) -> Result:
    """Predict or measure all points; measuring needs root."""
    rows = [*(_measured(plan, command) if plan.kind == "timed" else _simulated(plan))]
    for rate, workers in plan.points():
        at_point = [row for row in rows if (row["rate_mbit"], row["workers"]) == (rate, workers)]
        best_s = min(row["step_s"] for row in at_point)
        for row in at_point:
            row["ratio_to_best"] = row["step_s"] / best_s
    return Result(
        name="hybrid-sweep",
        command=command,
        kind=plan.kind,
        seed=plan.seed,
        figures=figures(rows),
        rows=rows,
        machine=machine(
            model=plan.model,
            batch_size_of_times=plan.batch_size,
            compute_to_transfer=plan.case.ratio,
            forward_share=plan.case.forward_share,
            latency_us=1e6 * LATENCY_S,
        ),
    )


def _measured(plan: SweepPlan, command: str) -> Iterator[dict[str, Any]]:
    for rate, workers in plan.points():
        print(f"{rate} Mbit/s, {workers} workers", file=sys.stderr, flush=True)
        found = hybrid.run(
            hybrid.HybridPlan(
                model=plan.model,
                sides=plan.sides,
                cases=(plan.case,),
                steps=plan.steps,
                workers=workers,
                rate_bit_per_s=rate * 1_000_000,
                batch_size=plan.batch_size,
                seed=plan.seed,
            ),
            command=command,
        )
        yield from ({"rate_mbit": rate, "workers": workers, **row} for row in found.rows)


def _simulated(plan: SweepPlan) -> Iterator[dict[str, Any]]:
    built = runs.network(plan.model, None, plan.seed)
    alone = runs.measure_layers(plan.model, plan.batch_size, plan.seed)
    whole = sum(parameter.nbytes for parameter in built.parameters())
    for rate_mbit, workers in plan.points():
        rate = rate_mbit * 1_000_000
        works = works_of(times_for(alone, plan.case, transfer_s(whole, workers, rate), 0.0), built, 0.0)
        took_s = {side: predicted_s(side, works, workers, rate) for side in plan.sides}
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
