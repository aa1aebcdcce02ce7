"""`python -m benchmarks quality`: how well rules find stragglers, in simulated times over many seeds.

The library's classifier and rules used elsewhere see the same times. Nothing is trained and no worker waits:
the rules' decisions have no effect on the times.

A worker is truly slow while its times are multiplied by so much that excluding it pays; when all workers'
are, none is. A *false alarm* is a worker and epoch in which the worker was never truly slow and was called
slow. An *episode* is a sequence of iterations in which one worker is slow; it is *missed* if the worker is
not called slow within it, else its delay is the number of its iterations until then. *Covered* is the share
of slow iterations after which the worker was called slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.commands import QualityOptions
from offbeat.cli.result import Result, percentile
from offbeat.policies.stragglers.classifier import StragglerClassifier
from offbeat.policies.stragglers.throughput_gate import break_even_factor

# Shapes: i iterations of all epochs, e epochs, w workers.
Times: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
Rule: TypeAlias = Callable[[Times], Flags]

WORKERS, EPOCHS, ITERATIONS = 8, 3, 200
_MEAN_OF = 10
_FAST_S = 0.1


# Rules used elsewhere ------------------------------------------------------------------------------------


def above_fastest(times_iw: Times, factor: float) -> Flags:
    """Call a worker slow that takes more than `factor` times as long as the fastest, in that iteration."""
    return np.asarray(times_iw > factor * times_iw.min(axis=1, keepdims=True))


def above_median(times_iw: Times, factor: float, in_a_row: int = 1) -> Flags:
    """Call a worker slow that takes more than `factor` times the median, `in_a_row` iterations in a row."""
    above_iw = times_iw > factor * np.median(times_iw, axis=1, keepdims=True)
    flags_iw = above_iw.copy()
    for back in range(1, in_a_row):
        flags_iw[back:] &= above_iw[:-back]
        flags_iw[:back] = False
    return flags_iw


def smoothed(times_iw: Times, iterations: int = _MEAN_OF) -> Times:
    """Return every worker's mean over its last `iterations`, fewer at the beginning."""
    sums_iw = np.cumsum(times_iw, axis=0)
    sums_iw[iterations:] = sums_iw[iterations:] - sums_iw[:-iterations]
    counts_i = np.minimum(np.arange(len(times_iw)) + 1, iterations)
    return np.asarray(sums_iw / counts_i[:, None])


def classified(times_iw: Times, **arguments: Any) -> Flags:
    """Return the decisions of a `StragglerClassifier` with these arguments, iteration by iteration."""
    classifier = StragglerClassifier(**arguments)
    workers = range(times_iw.shape[1])
    for worker in workers:
        classifier.add(worker)
    flags_iw = np.zeros(times_iw.shape, dtype=bool)
    for at, row_s in enumerate(times_iw.tolist()):
        epoch, iteration = divmod(at, ITERATIONS)
        for worker in sorted(workers, key=classifier.stragglers.__contains__):
            classifier.observe(worker, epoch=epoch, iteration=iteration, compute_s=row_s[worker])
        flags_iw[at, list(classifier.stragglers)] = True
    return flags_iw


RULES: dict[str, Rule] = {
    "fixed": classified,
    "gate": lambda times_iw: classified(times_iw, gate="throughput"),
    "auto": lambda times_iw: classified(times_iw, k="auto", iterations_per_epoch=ITERATIONS),
    "auto_gate": lambda times_iw: classified(
        times_iw, k="auto", iterations_per_epoch=ITERATIONS, gate="throughput"
    ),
    "1.33 x fastest": lambda times_iw: above_fastest(times_iw, 1.33),
    "1.15 x median": lambda times_iw: above_median(times_iw, 1.15),
    "1.5 x median, 3 times": lambda times_iw: above_median(times_iw, 1.5, in_a_row=3),
    "2 x median": lambda times_iw: above_median(times_iw, 2.0),
    "1.33 x fastest, means of 10": lambda times_iw: above_fastest(smoothed(times_iw), 1.33),
    "1.15 x median, means of 10": lambda times_iw: above_median(smoothed(times_iw), 1.15),
    "1.5 x median, 3 times, means of 10": lambda times_iw: above_median(smoothed(times_iw), 1.5, in_a_row=3),
    "2 x median, means of 10": lambda times_iw: above_median(smoothed(times_iw), 2.0),
}
LIBRARY_RULES = ("fixed", "gate", "auto", "auto_gate")

# Scenarios -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SimulatedTimes:
    """Simulated times, and which workers were truly slow."""

    times_iw: Times
    slow_iw: Flags


def calm(generator: np.random.Generator, shape: tuple[int, int]) -> Times:
    """Lognormal jitter of 5 %."""
    return _FAST_S * generator.lognormal(0.0, 0.05, shape)


def restless(generator: np.random.Generator, shape: tuple[int, int]) -> Times:
    """Lognormal jitter of 20 %, and 2 % of the iterations take three times as long."""
    hiccups = np.where(generator.random(shape) < 0.02, 3.0, 1.0)
    return _FAST_S * generator.lognormal(0.0, 0.2, shape) * hiccups


def _factors(scenario: str, generator: np.random.Generator) -> tuple[Times, Flags]:
    """Return the factors of all times, and which workers are truly slow."""
    iterations = EPOCHS * ITERATIONS
    factors_iw = np.ones((iterations, WORKERS))
    victim = int(generator.integers(WORKERS))
    # The onset is in the first epoch, which includes the profile, or in the second.
    onset = int(generator.integers(2 * ITERATIONS))
    at_i = np.arange(iterations)
    match scenario.split(":"):
        case ["none"]:
            pass
        case ["constant", factor]:
            factors_iw[onset:, victim] = float(factor)
        case ["from the start", factor]:
            factors_iw[:, victim] = float(factor)
        case ["bursty", factor]:  # 20 iterations of every 100, after the onset
            factors_iw[(at_i >= onset) & ((at_i - onset) % 100 < 20), victim] = float(factor)
        case ["drifting", factor]:  # rises over as many iterations as an epoch has
            rise_i = np.clip((at_i - onset) / ITERATIONS, 0.0, 1.0)
            factors_iw[:, victim] = 1.0 + (float(factor) - 1.0) * rise_i
        case ["global", factor]:
            factors_iw[onset:] = float(factor)
            return factors_iw, np.zeros_like(factors_iw, dtype=bool)
        case _:
            raise ValueError(f"there is no scenario {scenario!r}")
    return factors_iw, factors_iw > break_even_factor(WORKERS, 0.05)


SCENARIOS = (
    *("none", "global:3"),
    *("constant:5", "constant:3", "constant:2.2", "constant:1.5", "constant:1.3"),
    *("from the start:5", "from the start:1.5", "bursty:5", "drifting:3"),
)
NOISES = {"calm": calm, "restless": restless}


def simulate(scenario: str, noise: str, seed: int) -> SimulatedTimes:
    """Simulate one run; equal arguments give equal times."""
    generator = np.random.default_rng([seed, SCENARIOS.index(scenario), list(NOISES).index(noise)])
    factors_iw, slow_iw = _factors(scenario, generator)
    return SimulatedTimes(times_iw=NOISES[noise](generator, factors_iw.shape) * factors_iw, slow_iw=slow_iw)


# Scores --------------------------------------------------------------------------------------------------


@dataclass
class RuleScore:
    """Sums over runs of one rule in one scenario."""

    normal: int = 0
    alarmed: int = 0
    slow: int = 0
    covered: int = 0
    missed: int = 0
    delays: list[int] | None = None

    def add(self, slow_iw: Flags, flags_iw: Flags) -> None:
        """Add one run: which workers were truly slow, and which were called slow."""
        per_epoch = (-1, min(ITERATIONS, len(slow_iw)), slow_iw.shape[1])
        normal_ew = ~slow_iw.reshape(per_epoch).any(axis=1)
        self.normal += int(normal_ew.sum())
        self.alarmed += int((flags_iw.reshape(per_epoch).any(axis=1) & normal_ew).sum())
        self.slow += int(slow_iw.sum())
        self.covered += int((slow_iw & flags_iw).sum())
        self.delays = self.delays or []
        for worker in np.flatnonzero(slow_iw.any(axis=0)):
            edges = np.flatnonzero(np.diff(slow_iw[:, worker].astype(int), prepend=0, append=0))
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                found = np.flatnonzero(flags_iw[start:end, worker])
                if len(found):
                    self.delays.append(int(found[0]) + 1)
                else:
                    self.missed += 1

    def row(self) -> dict[str, Any]:
        """Return the scores as plain numbers; None where there is nothing to score."""
        delays = self.delays or []
        episodes = self.missed + len(delays)
        return {
            "false_alarm_share": self.alarmed / self.normal if self.normal else None,
            "missed_share": self.missed / episodes if episodes else None,
            "delay_steps_p50": percentile(delays, 50) if delays else None,
            "delay_steps_p99": percentile(delays, 99) if delays else None,
            "covered_share": self.covered / self.slow if self.slow else None,
        }


def run(options: QualityOptions, *, command: str) -> Result:
    """Simulate every scenario with every noise, 8 workers and 3 epochs of 200 steps, and apply all rules."""
    seed = options.seed
    rows = []
    for noise in NOISES:
        for scenario in SCENARIOS:
            scores = {rule: RuleScore() for rule in RULES}
            for at in range(seed, seed + options.runs):
                case = simulate(scenario, noise, at)
                for rule, score in scores.items():
                    score.add(case.slow_iw, RULES[rule](case.times_iw))
            rows += [
                {"noise": noise, "scenario": scenario, "rule": rule, **score.row()}
                for rule, score in scores.items()
            ]
    return Result(
        name="quality", command=command, kind="simulated", seed=seed, figures=_figures(rows), rows=rows
    )


def _figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the main results: false alarms without stragglers, delays and misses at factors 3 and 1.3."""
    figures: dict[str, float] = {}
    for rule in LIBRARY_RULES:
        rows_of_rule = {(row["noise"], row["scenario"]): row for row in rows if row["rule"] == rule}
        for noise in NOISES:
            alarms = [rows_of_rule[noise, scenario]["false_alarm_share"] for scenario in ("none", "global:3")]
            figures[f"false_alarm_share_{noise}_{rule}"] = sum(alarms) / len(alarms)
            for scenario, name in (("constant:3", "3x"), ("constant:1.3", "1_3x")):
                row = rows_of_rule[noise, scenario]
                figures[f"missed_share_{name}_{noise}_{rule}"] = row["missed_share"]
                if row["delay_steps_p50"] is not None:
                    figures[f"delay_steps_p50_{name}_{noise}_{rule}"] = row["delay_steps_p50"]
    return figures
