"""Time of a step under strategies that send little, on slow lines: `python -m benchmarks local-steps`.

Each worker is on a host of its own (`benchmarks.namespaces`) and waits for the time of a step instead of
computing; the optimizer's step is executed, and counts as computing as long as it takes alone. Measured is
the mean step of the first worker after the start, without the mean of all models at the end of the training.
"""

from __future__ import annotations

import sys
import time

import msgspec
import torch
from torch.utils.data import TensorDataset

from benchmarks import runs
from benchmarks.commands import LocalStepsOptions
from benchmarks.namespaces import hosts
from benchmarks.timed import ModelTimes
from benchmarks.workers import print_progress, read_settings, run_workers, send_result
from offbeat.cli.result import Result, figure_part, machine
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

_WARM_UP_STEPS = 16  # they hold the start, in which all get the first worker's model
_EARLY_S = 800e-6  # how early messages may be after a pause; rounds take seconds


class LocalStepsRun(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one training, for every worker.

    Attributes:
        steps: of a worker, after the warm-up.
    """

    strategy: str
    model: str
    times: ModelTimes
    workers: int
    steps: int
    seed: int


def run(options: LocalStepsOptions, *, command: str) -> Result:
    """Measure all strategies; needs root.

    Raises:
        OffbeatError: no root, or a worker failed.
        ValueError: an unknown strategy or model.
    """
    strategies = options.strategy or ["localsgd:every=64", "diloco:every=64"]
    for strategy in strategies:
        parse_strategy(strategy)
    alone = runs.measure_layers(options.model, 1, options.seed)
    optimizer_s = runs.optimizer_s(options.model, options.seed)
    compute_s = options.step_ms / 1000 + optimizer_s
    rows = []
    with hosts(options.workers, rate_bit_per_s=options.rate_mbit * 1_000_000, early_s=_EARLY_S) as places:
        for strategy in strategies:
            print_progress(strategy)
            settings = LocalStepsRun(
                strategy=strategy,
                model=options.model,
                times=alone.lasting(options.step_ms / 1000),
                workers=options.workers,
                steps=options.steps,
                seed=options.seed,
            )
            step_s = run_workers(
                "benchmarks.local_steps",
                msgspec.to_builtins(settings),
                options.workers,
                prefix=[place.prefix for place in places],
                master_addr=places[0].address,
            )
            rows.append({"strategy": strategy, "step_s": step_s, "ratio": step_s / compute_s})
    return Result(
        name="local_steps",
        command=command,
        kind="timed",
        seed=options.seed,
        figures={f"time_ratio_to_compute_{figure_part(row['strategy'])}": row["ratio"] for row in rows},
        rows=rows,
        machine=machine(
            model=options.model,
            workers=options.workers,
            line_mbit_per_s=options.rate_mbit,
            step_ms=options.step_ms,
            optimizer_s=optimizer_s,
        ),
    )


def main() -> None:
    """Train as one worker; rank 0 sends its mean step in seconds."""
    settings = msgspec.convert(read_settings(sys.argv), LocalStepsRun)
    torch.set_num_threads(1)
    model = runs.network(settings.model, settings.times, settings.seed)
    optimizer = runs.optimizer_of(model)
    x, y = runs.batch(1, settings.seed, timed=True)
    numbers = TensorDataset(torch.arange((_WARM_UP_STEPS + settings.steps) * settings.workers))
    ends_s = []
    with join(model, optimizer, parse_strategy(settings.strategy)) as session:
        for _ in session.epochs(1):
            for _ in session.batches(numbers, 1):
                runs.step(model, optimizer, x, y)
                ends_s.append(time.perf_counter())
    if session.worker == 0:
        send_result((ends_s[-1] - ends_s[_WARM_UP_STEPS]) / (len(ends_s) - 1 - _WARM_UP_STEPS))


if __name__ == "__main__":
    main()
