"""`offbeat bench NAME`: one command a benchmark; each prints its tables and can write them as JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from offbeat.bench.result import Result

bench = typer.Typer(no_args_is_help=True, help="Run a benchmark by name.")

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result here as JSON.")]
Workers = Annotated[int, typer.Option(min=2, help="How many workers.")]
Seed = Annotated[int, typer.Option(help="Of weights and data.")]


@bench.command()
def overhead(
    workers: Workers = 4,
    batch_size: Annotated[int, typer.Option(min=2, help="CIFAR-10-shaped samples a worker and step.")] = 32,
    scale: Annotated[float, typer.Option(min=0.01, help="Multiplies how long it measures.")] = 1.0,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """A training step under PyTorch's DDP on gloo and under bsp, in turn, with cnn2 and resnet18."""
    from offbeat.bench.overhead import run

    _report(
        json,
        lambda command: run(command=command, workers=workers, batch_size=batch_size, scale=scale, seed=seed),
    )


@bench.command()
def allreduce(
    workers: Workers = 4,
    rate_mbit: Annotated[int, typer.Option(min=1, help="Each host's line, in Mbit/s.")] = 1000,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of all-reduces a side and size.")] = 15,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """All-reduce over links beside gloo's, between hosts with lines of known rate; needs root."""
    from offbeat.bench.allreduce import run

    rate_bit_per_s = rate_mbit * 1_000_000
    _report(
        json,
        lambda command: run(
            command=command, workers=workers, rate_bit_per_s=rate_bit_per_s, blocks=blocks, seed=seed
        ),
    )


@bench.command()
def log(
    workers: Workers = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of steps each way.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Steps a block.")] = 10,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """What it costs to tell the coordinator about every step and to write it down."""
    from offbeat.bench.log import run

    _report(
        json, lambda command: run(command=command, workers=workers, blocks=blocks, steps=steps, seed=seed)
    )


@bench.command()
def quality(
    runs: Annotated[int, typer.Option(min=1, help="Simulated runs of each scenario.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the first run.")] = 0,
    json: Json = None,
) -> None:
    """How well stragglers are found, beside the rules that others use; simulated."""
    from offbeat.bench.quality import run

    _report(json, lambda command: run(command=command, runs=runs, seed=seed))


@bench.command()
def simulator(
    workers: Annotated[int, typer.Option(min=1, help="How many workers are simulated at once.")] = 10_000,
    steps: Annotated[int, typer.Option(min=2, help="Steps that each of them takes.")] = 1000,
    jobs: Annotated[int, typer.Option(min=1, help="Real jobs that are simulated afterwards.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of all chance in simulation.")] = 0,
    json: Json = None,
) -> None:
    """How quickly many workers are simulated, and how truly the jobs of 4 real ones."""
    from offbeat.bench.simulator import run

    _report(json, lambda command: run(command=command, workers=workers, steps=steps, jobs=jobs, seed=seed))


def _report(json: Path | None, measure: Callable[[str], Result]) -> None:
    from offbeat.bench.result import check_writable

    if json is not None:
        check_writable(json)
    result = measure(shlex.join(["offbeat", *sys.argv[1:]]))
    result.print()
    if json is not None:
        result.write(json)
