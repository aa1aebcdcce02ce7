"""One command per benchmark: each prints its tables and can write the result as JSON."""

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
    help="Run a benchmark by name.",
)

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result here as JSON.")]
Workers = Annotated[int, typer.Option(min=2, help="Number of workers.")]
Model = Annotated[str, typer.Option(help="mlp, cnn2, alexnet, resnet18, resnet50 or bert_small.")]
RateMbit = Annotated[int, typer.Option(min=1, help="Rate of each host's line, in Mbit/s.")]
Seed = Annotated[int, typer.Option(help="Seed of weights and data.")]
Epochs = Annotated[int, typer.Option(min=1, help="Epochs of each run.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples per worker and step.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the data; by default ~/.cache/offbeat.")]
StepMs = Annotated[
    float, typer.Option(min=1.0, help="Timed: forward plus backward time of a step after scaling, in ms.")
]


@bench.command()
def overhead(
    workers: Workers = 4,
    batch_size: Annotated[int, typer.Option(min=2, help="CIFAR-10-shaped samples per worker and step.")] = 32,
    scale: Annotated[float, typer.Option(min=0.01, help="Factor on the number of measured blocks.")] = 1.0,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Step time of bsp against PyTorch's DDP on gloo, in alternating blocks, with cnn2 and resnet18."""
    from benchmarks.overhead import run

    _report(
        json,
        lambda command: run(command=command, workers=workers, batch_size=batch_size, scale=scale, seed=seed),
    )


@bench.command()
def allreduce(
    workers: Workers = 4,
    rate_mbit: RateMbit = 1000,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of all-reduces per side and size.")] = 15,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """All-reduce over links against gloo, between hosts with lines of known rate; needs root."""
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
        typer.Option(help="Compute time as a multiple of the transfer time; repeatable."),
    ] = None,
    forward_share: Annotated[
        list[float] | None, typer.Option(help="Share of the compute time in the forward pass; repeatable.")
    ] = None,
    timed_batch: Annotated[
        list[int] | None,
        typer.Option(help="Instead: wait as long as a batch of this size takes one core; repeatable."),
    ] = None,
    real_batch: Annotated[
        list[int] | None,
        typer.Option(help="Instead: compute a batch of this size; repeatable."),
    ] = None,
    model: Model = "alexnet",
    workers: Workers = 4,
    rate_mbit: RateMbit = 1000,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps per side and case.")] = 5,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Layer-wise all-reduce overlapped with both passes, against DDP, on lines of known rate; needs root."""
    from benchmarks.expected import SIDES, ComputeCase
    from benchmarks.hybrid import HybridPlan, run

    is_scaled = compute or forward_share or not (timed_batch or real_batch)
    _report(
        json,
        lambda command: run(
            HybridPlan(
                model=model,
                sides=tuple(side or SIDES),
                cases=tuple(
                    ComputeCase(ratio=ratio, forward_share=share)
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
        list[int] | None, typer.Option(min=1, help="Rate of each host's line, in Mbit/s; repeatable.")
    ] = None,
    workers: Annotated[list[int] | None, typer.Option(min=2, help="Number of workers; repeatable.")] = None,
    side: Annotated[
        list[str] | None,
        typer.Option(help="ddp, sync_ring, fifo_ring, paper, table4 or cost_model; repeatable."),
    ] = None,
    compute: Annotated[float, typer.Option(help="Compute time as a multiple of the transfer time.")] = 1.0,
    forward_share: Annotated[float, typer.Option(help="Share of the compute time in the forward pass.")] = 1
    / 3,
    model: Model = "alexnet",
    steps: Annotated[int, typer.Option(min=1, help="Timed: measured steps per side and point.")] = 5,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Fastest way of averaging layers, by line rate and number of workers."""
    from benchmarks.expected import SIDES, ComputeCase
    from benchmarks.hybrid_sweep import SweepPlan, run

    _report(
        json,
        lambda command: run(
            SweepPlan(
                model=model,
                kind="timed" if timed else "simulated",
                rates_mbit=tuple(rate_mbit or (100, 1000, 10_000)),
                workers=tuple(workers or (2, 4, 8)),
                sides=tuple(side or SIDES),
                case=ComputeCase(ratio=compute, forward_share=forward_share),
                steps=steps,
                seed=seed,
            ),
            command=command,
        ),
    )


@bench.command()
def log(
    workers: Workers = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of steps with and without a run log.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Steps per block.")] = 10,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Cost of reporting every step to the coordinator and writing the run log."""
    from benchmarks.log import run

    _report(
        json, lambda command: run(command=command, workers=workers, blocks=blocks, steps=steps, seed=seed)
    )


@bench.command()
def quality(
    runs: Annotated[int, typer.Option(min=1, help="Simulated runs of each scenario.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
    json: Json = None,
) -> None:
    """Quality of straggler detection, against rules used elsewhere; simulated."""
    from benchmarks.quality import run

    _report(json, lambda command: run(command=command, runs=runs, seed=seed))


@bench.command()
def simulator(
    workers: Annotated[int, typer.Option(min=1, help="Number of simulated workers.")] = 10_000,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each simulated worker.")] = 1000,
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of real jobs to compare with their simulation.")
    ] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulation.")] = 0,
    json: Json = None,
) -> None:
    """Speed of the simulator with many workers, and its agreement with real jobs of 4 workers."""
    from benchmarks.simulator import run

    _report(json, lambda command: run(command=command, workers=workers, steps=steps, jobs=jobs, seed=seed))


@bench.command()
def straggler(
    compute: Annotated[
        str, typer.Option(help="'timed' waits for measured layer times, 'real' computes.")
    ] = "timed",
    model: Model = "resnet18",
    workers: Workers = 4,
    stragglers: Annotated[
        int | None, typer.Option(min=0, help="Largest number of slow workers; by default all.")
    ] = None,
    factor: Annotated[float, typer.Option(help="Slowdown factor of a slow worker.")] = 5.0,
    epochs: Epochs = 10,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps per epoch; by default 120 timed, 20 real.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per worker and step; by default 32 timed, 4 real.")
    ] = None,
    step_ms: StepMs = 100.0,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Slowdown with none to all workers slow, in lockstep and with partial: the first paper's figure 1."""
    from benchmarks.straggler import run

    _report(
        json,
        lambda command: run(
            command=command,
            compute=_parse_compute(compute),
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
    strategy: Annotated[str, typer.Option(help="Strategy whose detector is measured.")] = "partial",
    model: Model = "resnet18",
    workers: Workers = 4,
    epochs: Epochs = 10,
    steps: Annotated[
        int, typer.Option(min=2, help="Steps per epoch with batches of 32; half as many with 64.")
    ] = 80,
    step_ms: StepMs = 100.0,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Delay until a slow worker is excluded and readmitted: the first paper's section 5; timed."""
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
    strategy: Annotated[str, typer.Option(help="Strategy of the job.")] = "partial",
    workers: Workers = 8,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Duration of the job with faults, in minutes.")
    ] = 5.0,
    every_s: Annotated[float, typer.Option(min=1.0, help="Mean time between two faults, in s.")] = 30.0,
    stop_s: Annotated[
        float, typer.Option(min=0.1, help="How long a stopped worker stays stopped, in s.")
    ] = 10.0,
    step_ms: StepMs = 100.0,
    batch_size: BatchSize = 32,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Throughput and lost samples while workers are killed, stopped and replaced at random."""
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
    data_dir: DataDir = None,
    model: Model = "mlp",
    workers: Workers = 4,
    factor: Annotated[float, typer.Option(help="Slowdown factor of the slow worker.")] = 5.0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the lockstep run.")] = 3,
    batch_size: BatchSize = 32,
    lr: Annotated[float, typer.Option(help="Learning rate of SGD with momentum 0.9.")] = 0.01,
    step_ms: Annotated[
        float,
        typer.Option(min=1.0, help="Length of a step, in ms; more than all workers' compute time together."),
    ] = 20.0,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, starting at 0.")] = 3,
    download: Annotated[bool, typer.Option("--download", help="Download the data if missing.")] = False,
    json: Json = None,
) -> None:
    """Test accuracy over time with one slow worker, in lockstep and with it excluded; real gradients."""
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
        str, typer.Option(help="Any of 4KB,64KB,1MB,16MB,64MB and, in keys, 1k,100k,1M; by default all.")
    ] = "",
    seconds: Annotated[float, typer.Option(help="Measuring time per case, in s.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the pushed keys.")] = 0,
    json: Json = None,
) -> None:
    """Parameter server throughput and latency: push, pull and both, dense and sparse, by size; needs root."""
    from benchmarks.ps import run

    chosen = [size.strip() for size in sizes.split(",") if size.strip()]
    _report(json, lambda command: run(command=command, sizes=chosen, seconds=seconds, seed=seed))


@bench.command()
def failover(
    kills: Annotated[int, typer.Option(min=1, help="Total number of servers to kill.")] = 20,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that push.")] = 4,
    mb: Annotated[
        int, typer.Option(min=1, help="Size of the idle namespace that the servers hold, in MB.")
    ] = 64,
    seed: Annotated[int, typer.Option(help="Seed of victims and times.")] = 0,
    json: Json = None,
) -> None:
    """Failover time and exactly-once pushes while servers are killed under load."""
    from benchmarks.failover import run

    _report(json, lambda command: run(command=command, kills=kills, workers=workers, size_mb=mb, seed=seed))


@bench.command(name="sparse-lr")
def sparse_lr(
    path: Annotated[
        Path | None, typer.Option("--file", help="Rows in LIBSVM's text format; by default generated.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of generated rows.")] = 10_000,
    features: Annotated[int, typer.Option(min=1, help="Number of features of the generated rows.")] = 100_000,
    tau: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Bounds of the delay; runs with fewer filters use the first."),
    ] = None,
    workers: Workers = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of features.")] = 32,
    l1: Annotated[float, typer.Option(help="Weight of the L1 penalty.")] = 4.0,
    rate: Annotated[float, typer.Option(help="Learning rate (eta).")] = 0.5,
    epsilon: Annotated[
        float, typer.Option(help="Stop when the objective improves by less than this.")
    ] = 1e-7,
    passes: Annotated[int, typer.Option(min=1, help="Maximum number of passes.")] = 300,
    gap: Annotated[
        float, typer.Option(help="Relative distance to the best objective that counts as reached.")
    ] = 1e-4,
    slow: Annotated[
        list[str] | None, typer.Option(help="Slowness rules, in tasks; by default 1:10@burst=8/64.")
    ] = None,
    task_ms: Annotated[float, typer.Option(min=0.0, help="Minimum time of a task, in ms.")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of rows, order and slowness.")] = 0,
    json: Json = None,
) -> None:
    """Sparse logistic regression on a parameter server, by delay bound and by filters; timed."""
    from benchmarks.sparse_lr import SparseLrSettings, run

    setting = SparseLrSettings(
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
        str,
        typer.Option(help="'timed' waits for measured times and reports times, 'real' reports accuracies."),
    ] = "timed",
    strategy: Annotated[
        list[str] | None, typer.Option(help="Any of bsp, ssp3, ssp10, dtssp, asp; by default all.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Any of bursts, bursts_dynamic, lasting_equal, lasting_dynamic; by default all."),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Worker threads per process, by default 1 and 2; only the first setting uses all."
        ),
    ] = None,
    model: Model = "cnn2",
    data: Annotated[str, typer.Option(help="digits, mnist or cifar10.")] = "cifar10",
    data_dir: DataDir = None,
    workers: Annotated[int, typer.Option(min=2, help="Number of processes.")] = 4,
    batch_size: BatchSize = 128,
    factor: Annotated[float, typer.Option(help="Slowdown factor of a step in a burst.")] = 5.0,
    burst: Annotated[int, typer.Option(min=1, help="Steps of a burst.")] = 12,
    calm: Annotated[int, typer.Option(min=0, help="Steps between two bursts.")] = 0,
    steps: Annotated[
        int,
        typer.Option(
            min=2, help="Timed: steps of a worker in the setting 'bursts'; half as many in the others."
        ),
    ] = 96,
    step_ms: Annotated[
        float,
        typer.Option(min=1.0, help="Timed: forward plus backward time, multiplied by the threads, in ms."),
    ] = 120.0,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam in real trainings.")] = 1e-3,
    momentum: Annotated[float, typer.Option(help="First beta of Adam.")] = 0.9,
    epochs: Annotated[int, typer.Option(min=1, help="Real: epochs of each run.")] = 2,
    seeds: Annotated[int, typer.Option(min=1, help="Real: number of seeds.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="First seed of weights and data.")] = 0,
    json: Json = None,
) -> None:
    """BSP, SSP, DTSSP and ASP on a parameter server with slow workers: the second paper's tables 1 and 2."""
    from benchmarks.staleness import SETTINGS, STRATEGIES, StalenessPlan, run
    from offbeat.data import resolve_data_dir

    plan = StalenessPlan(
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
    kind = _parse_compute(compute)
    _report(json, lambda command: run(plan, command=command, compute=kind))


@bench.command()
def validate(
    load: Annotated[
        list[str] | None,
        typer.Option(help="Any of memory, files, decode, repeated; by default the first three."),
    ] = None,
    side: Annotated[
        list[str] | None,
        typer.Option(
            help="Any of auto, numpy, overlap, overlap_process, auto_prefetch, prefetch, overlap_prefetch, "
            "dataloader."
        ),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Threads that validate or load, by default 1 and 6; repeatable."),
    ] = None,
    compute: Annotated[
        str,
        typer.Option(help="'real' computes on one core, 'timed' waits for --step-ms, as for an accelerator."),
    ] = "real",
    step_ms: StepMs = 5.0,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each side; figures are medians over them.")] = 1,
    epochs: Epochs = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Training samples, from the set.")] = 12_000,
    held_out: Annotated[int, typer.Option(min=1, help="Validation samples, from the set.")] = 4_000,
    data: Annotated[str, typer.Option(help="mnist or digits.")] = "mnist",
    gigabytes: Annotated[
        float, typer.Option(min=0.01, help="Training data of the load 'repeated', in 10^9 bytes.")
    ] = 1.0,
    data_dir: DataDir = None,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Overlapped against in-line validation, with three input pipelines: MNIST."""
    from benchmarks.inputs import LOADS
    from benchmarks.validate import SIDES, ValidatePlan, run
    from offbeat.data import resolve_data_dir

    plan = ValidatePlan(
        loads=tuple(load or [name for name in LOADS if name != "repeated"]),
        sides=tuple(side or SIDES),
        threads=tuple(threads or (1, 6)),
        epochs=epochs,
        batch_size=batch_size,
        samples=samples,
        held_out=held_out,
        size_bytes=int(gigabytes * 1e9),
        step_s=None if _parse_compute(compute) == "real" else step_ms / 1e3,
        runs=runs,
        data=data,
        data_dir=resolve_data_dir(data_dir),
        seed=seed,
    )
    _report(json, lambda command: run(plan, command=command))


def _parse_compute(text: str) -> Compute:
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
