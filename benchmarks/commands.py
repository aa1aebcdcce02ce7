"""The command of each benchmark: it prints the tables and can write the result as JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from benchmarks.runs import Compute
    from offbeat.cli.result import Result

bench = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run a benchmark by name. 'list' shows what each measures, how long it takes and what it needs.",
)

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result here as JSON.")]
Workers = Annotated[int, typer.Option(min=2, help="How many workers.")]
Model = Annotated[str, typer.Option(help="mlp, cnn2, alexnet, resnet18, resnet50 or bert_small.")]
RateMbit = Annotated[int, typer.Option(min=1, help="Each host's line, in Mbit/s.")]
Seed = Annotated[int, typer.Option(help="Of weights and data.")]
Epochs = Annotated[int, typer.Option(min=1, help="Epochs of each run.")]
StepMs = Annotated[
    float, typer.Option(min=1.0, help="Timed: to what forward and backward pass together are scaled, in ms.")
]


@bench.command()
def overhead(
    workers: Workers = 4,
    batch_size: Annotated[int, typer.Option(min=2, help="CIFAR-10-shaped samples a worker and step.")] = 32,
    scale: Annotated[float, typer.Option(min=0.01, help="Multiplies how long it measures.")] = 1.0,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """A training step under PyTorch's DDP on gloo and under bsp, in turn, with cnn2 and resnet18."""
    from benchmarks.overhead import run

    _report(
        json,
        lambda command: run(command=command, workers=workers, batch_size=batch_size, scale=scale, seed=seed),
    )


@bench.command()
def allreduce(
    workers: Workers = 4,
    rate_mbit: RateMbit = 1000,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of all-reduces a side and size.")] = 15,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """All-reduce over links beside gloo's, between hosts with lines of known rate; needs root."""
    from benchmarks.allreduce import run

    rate_bit_per_s = rate_mbit * 1_000_000
    _report(
        json,
        lambda command: run(
            command=command, workers=workers, rate_bit_per_s=rate_bit_per_s, blocks=blocks, seed=seed
        ),
    )


@bench.command()
def hybrid(
    side: Annotated[
        list[str] | None,
        typer.Option(help="ddp, sync_ring, fifo_ring, paper, table4, cost_model, or a strategy; repeatable."),
    ] = None,
    compute: Annotated[
        list[float] | None,
        typer.Option(help="Computing, as a multiple of the time on the line; repeatable."),
    ] = None,
    forward_share: Annotated[
        list[float] | None, typer.Option(help="Of computing, in the forward pass; repeatable.")
    ] = None,
    timed_batch: Annotated[
        list[int] | None,
        typer.Option(
            help="Instead: a batch of this size, waited for as long as it takes one core; repeatable."
        ),
    ] = None,
    real_batch: Annotated[
        list[int] | None,
        typer.Option(help="Instead: a batch of this size, really computed; repeatable."),
    ] = None,
    model: Model = "alexnet",
    workers: Workers = 4,
    rate_mbit: RateMbit = 1000,
    steps: Annotated[int, typer.Option(min=1, help="That count, a side and case.")] = 5,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Every layer's all-reduce behind both passes, beside DDP, on lines of known rate; needs root."""
    from benchmarks.expected import SIDES, Case
    from benchmarks.hybrid import Plan, run

    is_scaled = compute or forward_share or not (timed_batch or real_batch)
    _report(
        json,
        lambda command: run(
            Plan(
                model=model,
                sides=tuple(side or SIDES),
                cases=tuple(
                    Case(ratio=ratio, forward_share=share)
                    for share in forward_share or [1 / 3, 1 / 2]
                    for ratio in compute or [0.25, 0.5, 0.75, 1.0, 1.5]
                    if is_scaled
                ),
                timed_batches=tuple(timed_batch or ()),
                real_batches=tuple(real_batch or ()),
                steps=steps,
                workers=workers,
                rate_bit_per_s=rate_mbit * 1_000_000,
                seed=seed,
            ),
            command=command,
        ),
    )


@bench.command("hybrid-sweep")
def hybrid_sweep(
    timed: Annotated[
        bool, typer.Option("--timed", help="Measure steps instead of predicting them; needs root.")
    ] = False,
    rate_mbit: Annotated[
        list[int] | None, typer.Option(min=1, help="Each host's line, in Mbit/s; repeatable.")
    ] = None,
    workers: Annotated[list[int] | None, typer.Option(min=2, help="How many workers; repeatable.")] = None,
    side: Annotated[
        list[str] | None,
        typer.Option(help="ddp, sync_ring, fifo_ring, paper, table4 or cost_model; repeatable."),
    ] = None,
    compute: Annotated[float, typer.Option(help="Computing, as a multiple of the time on the line.")] = 1.0,
    forward_share: Annotated[float, typer.Option(help="Of computing, in the forward pass.")] = 1 / 3,
    model: Model = "alexnet",
    steps: Annotated[int, typer.Option(min=1, help="Timed: that count, a side and point.")] = 5,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Which way of averaging layers wins, by the rate of the lines and how many workers there are."""
    from benchmarks.expected import SIDES, Case
    from benchmarks.hybrid_sweep import Plan, run

    _report(
        json,
        lambda command: run(
            Plan(
                model=model,
                kind="timed" if timed else "simulated",
                rates_mbit=tuple(rate_mbit or (100, 1000, 10_000)),
                workers=tuple(workers or (2, 4, 8)),
                sides=tuple(side or SIDES),
                case=Case(ratio=compute, forward_share=forward_share),
                steps=steps,
                seed=seed,
            ),
            command=command,
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
    from benchmarks.log import run

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
    from benchmarks.quality import run

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
    from benchmarks.simulator import run

    _report(json, lambda command: run(command=command, workers=workers, steps=steps, jobs=jobs, seed=seed))


@bench.command()
def straggler(
    compute: Annotated[
        str, typer.Option(help="'timed' waits for times measured layer by layer, 'real' computes.")
    ] = "timed",
    model: Model = "resnet18",
    workers: Workers = 4,
    stragglers: Annotated[
        int | None, typer.Option(min=0, help="Up to how many are slow; by default all.")
    ] = None,
    factor: Annotated[float, typer.Option(help="How many times as long a slow worker takes.")] = 5.0,
    epochs: Epochs = 10,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps an epoch; by default 120 timed, 20 real.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples a worker and step; by default 32 timed, 4 real.")
    ] = None,
    step_ms: StepMs = 100.0,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """What none to all of the workers being slow costs in lockstep and with partial: the paper's figure 1."""
    from benchmarks.straggler import run

    _report(
        json,
        lambda command: run(
            command=command,
            compute=_compute(compute),
            model=model,
            workers=workers,
            stragglers=stragglers,
            factor=factor,
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            step_ms=step_ms,
            seed=seed,
        ),
    )


@bench.command()
def detect(
    strategy: Annotated[str, typer.Option(help="Whose detector is measured.")] = "partial",
    model: Model = "resnet18",
    workers: Workers = 4,
    epochs: Epochs = 10,
    steps: Annotated[int, typer.Option(min=2, help="Steps an epoch of batches of 32; half for 64.")] = 80,
    step_ms: StepMs = 100.0,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """How soon a worker that gets slow is left out and is back afterwards: the paper's section 5; timed."""
    from benchmarks.detect import run
    from offbeat.strategies import parse_strategy

    parse_strategy(strategy)
    _report(
        json,
        lambda command: run(
            command=command,
            strategy=strategy,
            model=model,
            workers=workers,
            epochs=epochs,
            steps=steps,
            step_ms=step_ms,
            seed=seed,
        ),
    )


@bench.command()
def chaos(
    strategy: Annotated[str, typer.Option(help="How the workers keep together.")] = "partial",
    workers: Workers = 8,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long the job with faults runs.")] = 5.0,
    every_s: Annotated[float, typer.Option(min=1.0, help="Seconds between two faults, on average.")] = 30.0,
    stop_s: Annotated[float, typer.Option(min=0.1, help="How long a stopped worker stands still.")] = 10.0,
    step_ms: StepMs = 100.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a worker and step.")] = 32,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Workers are killed and stopped at random, and replaced: what throughput is left, what is lost."""
    from benchmarks.chaos import run
    from offbeat.strategies import parse_strategy

    parse_strategy(strategy)
    _report(
        json,
        lambda command: run(
            command=command,
            strategy=strategy,
            workers=workers,
            duration_s=60 * minutes,
            every_s=every_s,
            stop_s=stop_s,
            step_ms=step_ms,
            batch_size=batch_size,
            seed=seed,
        ),
    )


@bench.command()
def accuracy(
    data: Annotated[str, typer.Option(help="digits, mnist or cifar10.")] = "mnist",
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the data are; by default ~/.cache/offbeat.")
    ] = None,
    model: Model = "mlp",
    workers: Workers = 4,
    factor: Annotated[float, typer.Option(help="How many times as long the slow worker takes.")] = 5.0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of lockstep.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a worker and step.")] = 32,
    lr: Annotated[float, typer.Option(help="Learning rate of SGD with momentum 0.9.")] = 0.01,
    step_ms: Annotated[
        float, typer.Option(min=1.0, help="How long a worker's step lasts: more than all of them compute.")
    ] = 20.0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch the data if they are not there.")
    ] = False,
    json: Json = None,
) -> None:
    """Test accuracy against time with one slow worker, in lockstep and around it; real gradients."""
    from benchmarks.accuracy import run
    from offbeat.data import resolve_data_dir

    _report(
        json,
        lambda command: run(
            command=command,
            data=data,
            data_dir=resolve_data_dir(data_dir),
            model=model,
            workers=workers,
            factor=factor,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            step_ms=step_ms,
            seeds=seeds,
            download=download,
        ),
    )


@bench.command()
def ps(
    sizes: Annotated[
        str, typer.Option(help="Some of 4KB,64KB,1MB,16MB,64MB and, in keys, 1k,100k,1M; by default all.")
    ] = "",
    seconds: Annotated[float, typer.Option(help="How long each case is measured, in s.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of the keys that are pushed.")] = 0,
    json: Json = None,
) -> None:
    """What a parameter server carries: push, pull and both, dense and sparse, by size; needs root."""
    from benchmarks.ps import run

    chosen = [size.strip() for size in sizes.split(",") if size.strip()]
    _report(json, lambda command: run(command=command, sizes=chosen, seconds=seconds, seed=seed))


@bench.command()
def failover(
    kills: Annotated[int, typer.Option(min=1, help="How many servers are killed in all.")] = 20,
    workers: Annotated[int, typer.Option(min=1, help="How many processes push.")] = 4,
    mb: Annotated[int, typer.Option(min=1, help="What the servers hold besides, in MB.")] = 64,
    seed: Annotated[int, typer.Option(help="Of who is killed, and when.")] = 0,
    json: Json = None,
) -> None:
    """Servers are killed while workers push: how soon others serve, and whether each push counts once."""
    from benchmarks.failover import run

    _report(json, lambda command: run(command=command, kills=kills, workers=workers, size_mb=mb, seed=seed))


@bench.command(name="sparse-lr")
def sparse_lr(
    path: Annotated[
        Path | None, typer.Option("--file", help="Rows in LIBSVM's text format; by default made up.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Made-up rows.")] = 10_000,
    features: Annotated[int, typer.Option(min=1, help="And how many features they have.")] = 100_000,
    tau: Annotated[
        list[int] | None, typer.Option(min=0, help="Bounds of the delay; with fewer filters, the first.")
    ] = None,
    workers: Workers = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Of features.")] = 32,
    l1: Annotated[float, typer.Option(help="The weight of the penalty.")] = 4.0,
    rate: Annotated[float, typer.Option(help="Eta.")] = 0.5,
    epsilon: Annotated[float, typer.Option(help="Change of the objective that is none.")] = 1e-7,
    passes: Annotated[int, typer.Option(min=1, help="At most.")] = 300,
    gap: Annotated[float, typer.Option(help="How close to the best objective counts as found.")] = 1e-4,
    slow: Annotated[
        list[str] | None, typer.Option(help="Who is slow when, by default 1:10@burst=8/64 (of tasks).")
    ] = None,
    task_ms: Annotated[float, typer.Option(min=0.0, help="How long a task takes at least.")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Of rows, order and slowness.")] = 0,
    json: Json = None,
) -> None:
    """Sparse logistic regression on a parameter server, by bound of the delay and by filters; timed."""
    from benchmarks.sparse_lr import Setting, run

    setting = Setting(
        path="" if path is None else str(path),
        rows=rows,
        features=features,
        seed=seed,
        workers=workers,
        blocks=blocks,
        l1=l1,
        rate=rate,
        epsilon=epsilon,
        passes_max=passes,
        slow=tuple(slow or ["1:10@burst=8/64"]),
        task_ms=task_ms,
    )
    taus = tau or [0, 1, 2, 4, 8, 16]
    _report(json, lambda command: run(command=command, setting=setting, taus=taus, gap=gap))


@bench.command()
def staleness(
    compute: Annotated[
        str, typer.Option(help="'timed' waits for measured times and tells times, 'real' tells accuracies.")
    ] = "timed",
    strategy: Annotated[
        list[str] | None, typer.Option(help="Some of bsp, ssp3, ssp10, dtssp, asp; by default all.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Some of bursts, bursts_dynamic, lasting_equal, lasting_dynamic; by default all."),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Worker threads of a process, by default 1 and 2; all settings with the first."
        ),
    ] = None,
    model: Model = "cnn2",
    data: Annotated[str, typer.Option(help="digits, mnist or cifar10.")] = "cifar10",
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the data are; by default ~/.cache/offbeat.")
    ] = None,
    workers: Annotated[int, typer.Option(min=2, help="How many processes.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a worker and step.")] = 128,
    factor: Annotated[float, typer.Option(help="How many times as long a step takes in a burst.")] = 5.0,
    burst: Annotated[int, typer.Option(min=1, help="Steps of a burst.")] = 12,
    calm: Annotated[int, typer.Option(min=0, help="Steps between two bursts.")] = 0,
    steps: Annotated[
        int, typer.Option(min=2, help="Timed: steps of a worker in bursts; half in the other settings.")
    ] = 96,
    step_ms: Annotated[
        float, typer.Option(min=1.0, help="Timed: forward and backward pass, times threads, in ms.")
    ] = 120.0,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam, where something is learnt.")] = 1e-3,
    momentum: Annotated[float, typer.Option(help="The first of Adam's betas.")] = 0.9,
    epochs: Annotated[int, typer.Option(min=1, help="Real: epochs of each run.")] = 2,
    seeds: Annotated[int, typer.Option(min=1, help="Real: how many seeds.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and data; the first one.")] = 0,
    json: Json = None,
) -> None:
    """BSP, SSP, DTSSP and ASP on a parameter server, with slow workers: the second paper's tables 1 and 2."""
    from benchmarks.staleness import SETTINGS, STRATEGIES, Plan, run
    from offbeat.data import resolve_data_dir

    plan = Plan(
        strategies=tuple(strategy or STRATEGIES),
        settings=tuple(setting or SETTINGS),
        threads=tuple(threads or (1, 2)),
        model=model,
        data=data,
        data_dir=resolve_data_dir(data_dir),
        workers=workers,
        batch_size=batch_size,
        factor=factor,
        burst=burst,
        calm=calm,
        steps=steps,
        step_ms=step_ms,
        lr=lr,
        momentum=momentum,
        epochs=epochs,
        seeds=seeds,
        seed=seed,
    )
    how = _compute(compute)
    _report(json, lambda command: run(plan, command=command, compute=how))


@bench.command()
def validate(
    load: Annotated[
        list[str] | None,
        typer.Option(help="Some of memory, files, decode, repeated; by default the first three."),
    ] = None,
    side: Annotated[
        list[str] | None,
        typer.Option(
            help="Some of auto, numpy, overlap, overlap_process, auto_prefetch, prefetch, overlap_prefetch, "
            "dataloader."
        ),
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="That validate or load, by default 1 and 6; repeatable.")
    ] = None,
    compute: Annotated[
        str,
        typer.Option(help="'real' computes on one core, 'timed' waits for --step-ms, as for an accelerator."),
    ] = "real",
    step_ms: StepMs = 5.0,
    runs: Annotated[int, typer.Option(min=1, help="Of each side; figures are medians over them.")] = 1,
    epochs: Epochs = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Of the set, that train.")] = 12_000,
    held_out: Annotated[int, typer.Option(min=1, help="Of the set, that validate.")] = 4_000,
    data: Annotated[str, typer.Option(help="mnist or digits.")] = "mnist",
    gigabytes: Annotated[
        float, typer.Option(min=0.01, help="Of what trains of the load 'repeated', as bytes.")
    ] = 1.0,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the data are; by default ~/.cache/offbeat.")
    ] = None,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Validating beside the next epoch, and after each, with three input pipelines: MNIST."""
    from benchmarks.inputs import LOADS
    from benchmarks.validate import SIDES, Plan, run
    from offbeat.data import resolve_data_dir

    plan = Plan(
        loads=tuple(load or [name for name in LOADS if name != "repeated"]),
        sides=tuple(side or SIDES),
        threads=tuple(threads or (1, 6)),
        epochs=epochs,
        batch_size=batch_size,
        samples=samples,
        held_out=held_out,
        size_bytes=int(gigabytes * 1e9),
        step_s=None if _compute(compute) == "real" else step_ms / 1e3,
        runs=runs,
        data=data,
        data_dir=resolve_data_dir(data_dir),
        seed=seed,
    )
    _report(json, lambda command: run(plan, command=command))


def _compute(text: str) -> Compute:
    match text:
        case "timed" | "real":
            return text
        case _:
            raise ValueError(f"expected --compute timed or real, got {text!r}")


def _report(json: Path | None, measure: Callable[[str], Result]) -> None:
    from offbeat.cli.result import check_writable

    if json is not None:
        check_writable(json)
    result = measure(shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))
    result.print()
    if json is not None:
        result.write(json)
