"""One command per benchmark: each prints its tables and can write the result as JSON.

The fields of a dataclass are the options of a command, which `run` of the benchmark's module gets. Importing
this module does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from offbeat.cli import entry, output
from offbeat.cli.options import Data, DataDir, Download, Json, Model, expand_options

if TYPE_CHECKING:
    from offbeat.cli.result import Result

Options = TypeVar("Options")

bench = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run a benchmark by name.",
)

Workers = Annotated[int, typer.Option(min=2, help="Number of workers.")]
RateMbit = Annotated[int, typer.Option(min=1, help="Rate of each host's line, in Mbit/s.")]
Seed = Annotated[int, typer.Option(help="Seed of weights and data.")]
Epochs = Annotated[int, typer.Option(min=1, help="Epochs of each run.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples per worker and step.")]
StepMs = Annotated[
    float, typer.Option(min=1.0, help="Timed: forward plus backward time of a step after scaling, in ms.")
]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A row of `list`.

    Attributes:
        name: of the command.
        minutes: approximate duration with the default options on two cores.
        needs: what the machine must have beside the installed library.
        summary: what is measured.
    """

    name: str
    minutes: float
    needs: str
    summary: str


benchmarks: list[Benchmark] = []


def _benchmark(module: str, *, minutes: float, needs: str = "") -> Callable[[type[Options]], type[Options]]:
    """Make a dataclass the options of a command, which is documented by its docstring.

    Args:
        module: of the benchmark: its `run` gets the options and the command line, and returns the result,
            or an iterator of results, each with all that was measured so far.
        minutes: see `Benchmark`.
        needs: see `Benchmark`.
    """
    name = module.replace("_", "-")

    def add_command(kind: type[Options]) -> type[Options]:
        def command(options: Any, json: Json = None) -> None:
            from offbeat.cli.result import Result, check_writable

            check_writable(json)
            run = import_module(f"benchmarks.{module}").run
            start_s = time.monotonic()
            found = run(options, command=entry.command_line("python -m benchmarks"))
            keep_results([found] if isinstance(found, Result) else found, json, start_s)

        command.__annotations__["options"] = kind
        bench.command(name, help=kind.__doc__)(expand_options(command))
        benchmarks.append(Benchmark(name=name, minutes=minutes, needs=needs, summary=kind.__doc__ or ""))
        return kind

    return add_command


def keep_results(results: Iterable[Result], json: Path | None, start_s: float) -> None:
    """Write each result to a file, which it replaces; print the last one, also if what yields them fails.

    Args:
        results: of one benchmark, each with all that was measured so far.
        json: the file; None for none.
        start_s: when the benchmark started, by the monotonic clock.

    Raises:
        OffbeatError: the file cannot be written.
    """
    last = None
    try:
        for result in results:
            last = replace(result, duration_s=round(time.monotonic() - start_s, 1))
            last.write(json)
    finally:
        if last is not None:
            last.print()


@bench.command("list")
def list_benchmarks() -> None:
    """List the benchmarks: what each measures, how long it takes on two cores, and what it needs."""
    rows = [(row.name, f"{row.minutes:g}", row.needs, row.summary.rstrip(".")) for row in benchmarks]
    headers = ("name", "minutes", "needs", "measures")
    output.print_output(output.TextTable(headers=headers, rows=rows, text_columns=frozenset({0, 2, 3})))


def _check_compute(compute: str) -> None:
    if compute not in ("timed", "real"):
        raise ValueError(f"expected --compute timed or real, got {compute!r}")


@_benchmark("overhead", minutes=9)
@dataclass(frozen=True, kw_only=True)
class OverheadOptions:
    """Step time of bsp against PyTorch's DDP on gloo, in alternating blocks, with cnn2 and resnet18."""

    workers: Workers = 4
    batch_size: Annotated[int, typer.Option(min=2, help="CIFAR-10-shaped samples per worker and step.")] = 32
    scale: Annotated[float, typer.Option(min=0.01, help="Factor on the number of measured blocks.")] = 1.0
    seed: Seed = 0


@_benchmark("memory", minutes=1)
@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Memory of workers under bsp and under PyTorch's DDP on gloo, with a large model."""

    workers: Workers = 4
    million_parameters: Annotated[int, typer.Option(min=1, help="Parameters of the model, in millions.")] = 60


@_benchmark("gpu", minutes=2, needs="a GPU; root for lines")
@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Step time of workers that share a GPU against PyTorch's DDP on gloo, and with a slow worker."""

    workers: Workers = 2
    model: Annotated[str, typer.Option(help="One of the library's models.")] = "resnet18"
    batch_size: Annotated[int, typer.Option(min=2, help="CIFAR-10-shaped samples per worker and step.")] = 128
    blocks: Annotated[int, typer.Option(min=1, help="Measured blocks of 10 steps per side.")] = 8
    rate_mbit: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Instead between hosts with lines of this rate, in Mbit/s; repeatable."),
    ] = None
    seed: Seed = 0


@_benchmark("nimble", minutes=2)
@dataclass(frozen=True, kw_only=True)
class NimbleOptions:
    """Forward passes of networks with branches: on several streams against one and the module itself."""

    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Images in a batch, by default 1 and 32; repeatable.")
    ] = None
    cells: Annotated[int, typer.Option(min=1, help="Cells of each network.")] = 9
    seed: Seed = 0


@_benchmark("allreduce", minutes=10, needs="root, but for --one-host")
@dataclass(frozen=True, kw_only=True)
class AllreduceOptions:
    """All-reduce over links against gloo, between hosts with lines of known rate or on one host."""

    workers: Workers = 4
    one_host: Annotated[
        bool, typer.Option("--one-host", help="All workers on this host, beside Open MPI if it is installed.")
    ] = False
    rate_mbit: RateMbit = 1000
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of all-reduces per side and size.")] = 15
    seed: Seed = 0


@_benchmark("tls", minutes=1, needs="root")
@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Throughput and processor time of an encrypted link beside a plain one, on loopback and on a line."""

    rate_mbit: RateMbit = 1000
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of transfers per side and place.")] = 5


@_benchmark("hybrid", minutes=40, needs="root")
@dataclass(frozen=True, kw_only=True)
class HybridOptions:
    """Layer-wise all-reduce overlapped with both passes, against DDP, on lines of known rate."""

    side: Annotated[
        list[str] | None,
        typer.Option(help="ddp, sync_ring, fifo_ring, paper, table4, cost_model, or a strategy; repeatable."),
    ] = None
    compute: Annotated[
        list[float] | None,
        typer.Option(help="Compute time as a multiple of the transfer time; repeatable."),
    ] = None
    forward_share: Annotated[
        list[float] | None, typer.Option(help="Share of the compute time in the forward pass; repeatable.")
    ] = None
    timed_batch: Annotated[
        list[int] | None,
        typer.Option(help="Instead: wait as long as a batch of this size takes one core; repeatable."),
    ] = None
    real_batch: Annotated[
        list[int] | None,
        typer.Option(help="Instead: compute a batch of this size; repeatable."),
    ] = None
    model: Model = "alexnet"
    workers: Workers = 4
    rate_mbit: RateMbit = 1000
    steps: Annotated[int, typer.Option(min=1, help="Measured steps per side and case.")] = 5
    seed: Seed = 0


@_benchmark("hybrid_sweep", minutes=1)
@dataclass(frozen=True, kw_only=True)
class HybridSweepOptions:
    """Fastest way of averaging layers, by line rate and number of workers."""

    timed: Annotated[
        bool, typer.Option("--timed", help="Measure steps instead of predicting them; needs root.")
    ] = False
    rate_mbit: Annotated[
        list[int] | None, typer.Option(min=1, help="Rate of each host's line, in Mbit/s; repeatable.")
    ] = None
    workers: Annotated[list[int] | None, typer.Option(min=2, help="Number of workers; repeatable.")] = None
    side: Annotated[
        list[str] | None,
        typer.Option(help="ddp, sync_ring, fifo_ring, paper, table4 or cost_model; repeatable."),
    ] = None
    compute: Annotated[float, typer.Option(help="Compute time as a multiple of the transfer time.")] = 1.0
    forward_share: Annotated[float, typer.Option(help="Share of the compute time in the forward pass.")] = (
        1 / 3
    )
    model: Model = "alexnet"
    steps: Annotated[int, typer.Option(min=1, help="Timed: measured steps per side and point.")] = 5
    seed: Seed = 0


@_benchmark("log", minutes=4)
@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Cost of reporting every step to the coordinator and writing the run log."""

    workers: Workers = 4
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of steps with and without a run log.")] = 20
    steps: Annotated[int, typer.Option(min=1, help="Steps per block.")] = 10
    seed: Seed = 0


@_benchmark("coordinator", minutes=13)
@dataclass(frozen=True, kw_only=True)
class CoordinatorOptions:
    """Processor time, log and journal of the coordinator for a step of a worker; start-up, next to DDP's."""

    strategy: Annotated[
        list[str] | None, typer.Option(help="By default bsp, partial and ssp; repeatable.")
    ] = None
    workers: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Workers that only report, by default 4, 16, 64, 256, 1024; repeatable."),
    ] = None
    steps: Annotated[int, typer.Option(min=1, help="Steps in a case, of all its workers together.")] = 40_000
    real: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="Real workers that start, by default 4, 8, 16, 32; 0 starts none; repeatable."
        ),
    ] = None


@_benchmark("quality", minutes=8)
@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """Quality of straggler detection, against rules used elsewhere; simulated."""

    runs: Annotated[int, typer.Option(min=1, help="Simulated runs of each scenario.")] = 100
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0


@_benchmark("simulator", minutes=4)
@dataclass(frozen=True, kw_only=True)
class SimulatorOptions:
    """Speed of the simulator with many workers, and its agreement with real jobs of 4 workers."""

    workers: Annotated[int, typer.Option(min=1, help="Number of simulated workers.")] = 10_000
    steps: Annotated[int, typer.Option(min=2, help="Steps of each simulated worker.")] = 1000
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of real jobs to compare with their simulation.")
    ] = 5
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulation.")] = 0


@_benchmark("methods", minutes=8)
@dataclass(frozen=True, kw_only=True)
class MethodsOptions:
    """Time to a training loss of each strategy, relative to bsp, in nine settings; simulated."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="By default partial, preduce, preduce:overlap=false, adpsgd and prague; bsp is always "
            "there; repeatable."
        ),
    ] = None
    setting: Annotated[
        list[str] | None, typer.Option(help="A setting by its name, by default all; repeatable.")
    ] = None
    loss: Annotated[float, typer.Option(min=0.0, help="Training loss to reach.")] = 0.1
    seeds: Annotated[int, typer.Option(min=1, help="Runs with each learning rate.")] = 3
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0


@_benchmark("straggler", minutes=29)
@dataclass(frozen=True, kw_only=True)
class StragglerOptions:
    """Slowdown with none to all workers slow, in lockstep and with partial: the first paper's figure 1."""

    compute: Annotated[str, typer.Option(help="'timed' waits for measured layer times, 'real' computes.")] = (
        "timed"
    )
    model: Model = "resnet18"
    workers: Workers = 4
    stragglers: Annotated[
        int | None, typer.Option(min=0, help="Largest number of slow workers; by default all.")
    ] = None
    factor: Annotated[float, typer.Option(help="Slowdown factor of a slow worker.")] = 5.0
    epochs: Epochs = 10
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps per epoch; by default 120 timed, 20 real.")
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per worker and step; by default 32 timed, 4 real.")
    ] = None
    step_ms: StepMs = 100.0
    seed: Seed = 0

    def __post_init__(self) -> None:
        _check_compute(self.compute)


@_benchmark("detect", minutes=6)
@dataclass(frozen=True, kw_only=True)
class DetectOptions:
    """Delay until a slow worker is excluded and readmitted: the first paper's section 5; timed."""

    strategy: Annotated[str, typer.Option(help="Strategy whose detector is measured.")] = "partial"
    model: Model = "resnet18"
    workers: Workers = 4
    epochs: Epochs = 10
    steps: Annotated[
        int, typer.Option(min=2, help="Steps per epoch with batches of 32; half as many with 64.")
    ] = 80
    step_ms: StepMs = 100.0
    seed: Seed = 0


@_benchmark("chaos", minutes=6)
@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """Throughput and lost samples while workers are killed, stopped and replaced at random."""

    strategy: Annotated[str, typer.Option(help="Strategy of the job.")] = "partial"
    workers: Workers = 8
    minutes: Annotated[float, typer.Option(min=0.1, help="Duration of the job with faults, in minutes.")] = (
        5.0
    )
    every_s: Annotated[float, typer.Option(min=1.0, help="Mean time between two faults, in s.")] = 30.0
    stop_s: Annotated[float, typer.Option(min=0.1, help="How long a stopped worker stays stopped, in s.")] = (
        10.0
    )
    step_ms: StepMs = 100.0
    batch_size: BatchSize = 32
    seed: Seed = 0


@_benchmark("ray_chaos", minutes=6, needs="Ray")
@dataclass(frozen=True, kw_only=True)
class RayChaosOptions:
    """Throughput and lost samples under Ray while the coordinator, workers and nodes are killed in turn."""

    strategy: Annotated[str, typer.Option(help="Strategy of the job.")] = "partial"
    workers: Annotated[int, typer.Option(min=2, help="Number of workers, each on a node of its own.")] = 3
    minutes: Annotated[float, typer.Option(min=0.1, help="Duration of the job with faults, in minutes.")] = (
        3.0
    )
    every_s: Annotated[float, typer.Option(min=1.0, help="Mean time between two faults, in s.")] = 25.0
    step_ms: StepMs = 100.0
    batch_size: BatchSize = 32
    seed: Seed = 0


@_benchmark("slow_line", minutes=5, needs="root")
@dataclass(frozen=True, kw_only=True)
class SlowLineOptions:
    """Pace of a job, or averagings of its models, before and after the line of a worker becomes slow."""

    strategy: Annotated[str, typer.Option(help="Strategy of the job.")] = "partial"
    workers: Annotated[int, typer.Option(min=3, help="Number of workers.")] = 4
    slow: Annotated[int, typer.Option(min=0, help="The worker whose line becomes slow.")] = 2
    rate_mbit: Annotated[float, typer.Option(min=1.0, help="Rate of that line then, in Mbit/s.")] = 2.0
    kilobytes: Annotated[int, typer.Option(min=1, help="Size of the gradients.")] = 520
    steps: Annotated[int, typer.Option(min=20, help="Steps before the line becomes slow.")] = 100
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Duration after the worker is left out, or the line slow.")
    ] = 3.0
    step_ms: StepMs = 50.0


@_benchmark("accuracy", minutes=16, needs="MNIST")
@dataclass(frozen=True, kw_only=True)
class AccuracyOptions:
    """Test accuracy over time with one slow worker, in lockstep and with it excluded; real gradients."""

    data: Data = "mnist"
    data_dir: DataDir = None
    model: Model = "mlp"
    workers: Workers = 4
    factor: Annotated[float, typer.Option(help="Slowdown factor of the slow worker.")] = 5.0
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the lockstep run.")] = 3
    batch_size: BatchSize = 32
    lr: Annotated[float, typer.Option(help="Learning rate of SGD with momentum 0.9.")] = 0.01
    step_ms: Annotated[
        float,
        typer.Option(min=1.0, help="Length of a step, in ms; more than all workers' compute time together."),
    ] = 20.0
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, starting at 0.")] = 3
    download: Download = False


@_benchmark("race", minutes=400, needs="root, MNIST; the network for peers")
@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """Time to lockstep's accuracy of strategies and of other libraries, by slowness and by line."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(help="By default preduce, adpsgd, prague and partial, beside bsp; repeatable."),
    ] = None
    peers: Annotated[bool, typer.Option(help="Whether other libraries take part.")] = True
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Any of ddp, post_local_sgd, decent_ring, decent_one_peer, torchft_localsgd, "
            "torchft_diloco, hivemind; by default all; repeatable."
        ),
    ] = None
    workers: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Number of workers, by default 4 and 8; repeatable."),
    ] = None
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="Any of none, one5x, one2x (the last worker), p05 (each step 5 times as long with "
            "probability 0.05); by default all; repeatable."
        ),
    ] = None
    line: Annotated[
        list[str] | None,
        typer.Option(
            help="Rate of each host's line in Mbit/s, or 'free'; by default free and 1000; repeatable."
        ),
    ] = None
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, starting at 0.")] = 3
    data: Data = "mnist"
    data_dir: DataDir = None
    model: Model = "mlp"
    samples: Annotated[int, typer.Option(min=1, help="Training samples of an epoch, from the set.")] = 12_800
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the lockstep run.")] = 4
    batch_size: BatchSize = 32
    lr: Annotated[float, typer.Option(help="Learning rate of SGD with momentum 0.9.")] = 0.01
    every: Annotated[
        int, typer.Option(min=1, help="Steps between two averagings of peers that take local steps.")
    ] = 16
    step_ms: Annotated[
        float,
        typer.Option(min=1.0, help="Length of a step, in ms; more than all workers' compute time together."),
    ] = 25.0
    points: Annotated[
        int, typer.Option(min=1, help="Points of lockstep's curve; at each, all test samples are evaluated.")
    ] = 60
    download: Download = False


@_benchmark("diloco_anchors", minutes=1, needs="the network, for torchft")
@dataclass(frozen=True, kw_only=True)
class DilocoAnchorsOptions:
    """Difference of the common models of diloco from those of torchft's DiLoCo, on the same batches."""

    workers: Workers = 4
    rounds: Annotated[int, typer.Option(min=1, help="Outer steps.")] = 25
    every: Annotated[int, typer.Option(min=1, help="Steps of a worker in each round.")] = 16
    batch_size: BatchSize = 16
    lr: Annotated[float, typer.Option(help="Learning rate of the inner SGD with momentum 0.9.")] = 0.01
    seed: Seed = 0


@_benchmark("language", minutes=10, needs="tinyshakespeare.txt")
@dataclass(frozen=True, kw_only=True)
class LanguageOptions:
    """Loss of a small GPT on tinyshakespeare after as many tokens, of strategies beside bsp."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="By default diloco:every=16 and diloco:every=16,outer_momentum=0.5, beside bsp; repeatable."
        ),
    ] = None
    workers: Workers = 4
    epochs: Epochs = 3
    batch_size: BatchSize = 16
    tokens: Annotated[int, typer.Option(min=1, help="Characters of a window.")] = 64
    width: Annotated[int, typer.Option(min=4, help="Size of a token in the model, a multiple of 4.")] = 64
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 2
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 3e-3
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, starting at 0.")] = 1
    data_dir: DataDir = None


@_benchmark("local_steps", minutes=3, needs="root")
@dataclass(frozen=True, kw_only=True)
class LocalStepsOptions:
    """Time of a step relative to computing where workers average their models on slow lines; timed."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(help="By default localsgd:every=64 and diloco:every=64; repeatable."),
    ] = None
    model: Model = "resnet18"
    workers: Workers = 4
    rate_mbit: RateMbit = 100
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each worker.")] = 256
    step_ms: StepMs = 100.0
    seed: Seed = 0


@_benchmark("compression", minutes=25, needs="root; CIFAR-10 for accuracy")
@dataclass(frozen=True, kw_only=True)
class CompressionOptions:
    """Bytes and time of a step with compressed gradients, or accuracy, beside the hooks of PyTorch's DDP."""

    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A strategy, ddp, ddp:fp16 or ddp:powersgd:RANK; by default bsp with and without "
            "compress=bf16, fp16, powersgd:2 and auto, and the three of DDP; repeatable."
        ),
    ] = None
    model: Model = "resnet18"
    workers: Workers = 4
    rate_mbit: Annotated[
        list[str] | None,
        typer.Option(
            help="Rate of each host's line in Mbit/s, or 'free'; by default 100, 1000, 10000 and free; "
            "repeatable."
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(min=2, help="Samples per worker and step.")] = 32
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of each method on each line.")] = 3
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a block.")] = 6
    step_ms: StepMs = 100.0
    seed: Seed = 0
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="Train instead, and compare test accuracies; without lines.")
    ] = False
    data: Data = "cifar10"
    data_dir: DataDir = None
    samples: Annotated[int, typer.Option(min=1, help="Accuracy: training samples, from the set.")] = 10_000
    epochs: Annotated[int, typer.Option(min=1, help="Accuracy: epochs of each training.")] = 10
    lr: Annotated[float, typer.Option(min=0.0, help="Accuracy: learning rate of the first epoch.")] = 0.02
    seeds: Annotated[int, typer.Option(min=1, help="Accuracy: number of seeds, from --seed on.")] = 3


@_benchmark("order", minutes=8, needs="root")
@dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """Step time where workers' gradients come in different orders, or not at all, beside PyTorch's DDP."""

    workers: Workers = 4
    rate_mbit: RateMbit = 1000
    batch_size: Annotated[int, typer.Option(min=2, help="Samples of the measured layer times.")] = 8
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of each way with each model.")] = 2
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a block.")] = 5
    step_ms: StepMs = 1200.0
    seed: Seed = 0


@_benchmark("ps", minutes=3, needs="root")
@dataclass(frozen=True, kw_only=True)
class PsOptions:
    """Parameter server throughput and latency: push, pull and both, dense and sparse, by size."""

    sizes: Annotated[
        str, typer.Option(help="Any of 4KB,64KB,1MB,16MB,64MB and, in keys, 1k,100k,1M; by default all.")
    ] = ""
    seconds: Annotated[float, typer.Option(help="Measuring time per case, in s.")] = 0.5
    seed: Annotated[int, typer.Option(min=0, help="Seed of the pushed keys.")] = 0


@_benchmark("failover", minutes=2)
@dataclass(frozen=True, kw_only=True)
class FailoverOptions:
    """Failover time and exactly-once pushes while servers are killed under load."""

    kills: Annotated[int, typer.Option(min=1, help="Total number of servers to kill.")] = 20
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that push.")] = 4
    mb: Annotated[
        int, typer.Option(min=1, help="Size of the idle namespace that the servers hold, in MB.")
    ] = 64
    seed: Annotated[int, typer.Option(help="Seed of victims and times.")] = 0


@_benchmark("sparse_lr", minutes=8)
@dataclass(frozen=True, kw_only=True)
class SparseLrOptions:
    """Sparse logistic regression on a parameter server, by delay bound and by filters; timed."""

    path: Annotated[
        Path | None, typer.Option("--file", help="Rows in LIBSVM's text format; by default generated.")
    ] = None
    rows: Annotated[int, typer.Option(min=1, help="Number of generated rows.")] = 10_000
    features: Annotated[int, typer.Option(min=1, help="Number of features of the generated rows.")] = 100_000
    tau: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Bounds of the delay; runs with fewer filters use the first."),
    ] = None
    workers: Workers = 4
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of features.")] = 32
    l1: Annotated[float, typer.Option(help="Weight of the L1 penalty.")] = 4.0
    rate: Annotated[float, typer.Option(help="Learning rate (eta).")] = 0.5
    epsilon: Annotated[float, typer.Option(help="Stop when the objective improves by less than this.")] = 1e-7
    passes: Annotated[int, typer.Option(min=1, help="Maximum number of passes.")] = 300
    gap: Annotated[
        float, typer.Option(help="Relative distance to the best objective that counts as reached.")
    ] = 1e-4
    slow: Annotated[
        list[str] | None, typer.Option(help="Slowness rules, in tasks; by default 1:10@burst=8/64.")
    ] = None
    task_ms: Annotated[float, typer.Option(min=0.0, help="Minimum time of a task, in ms.")] = 5.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of rows, order and slowness.")] = 0


@_benchmark("staleness", minutes=20, needs="CIFAR-10")
@dataclass(frozen=True, kw_only=True)
class StalenessOptions:
    """BSP, SSP, DTSSP and ASP on a parameter server with slow workers: the second paper's tables 1 and 2."""

    compute: Annotated[
        str,
        typer.Option(help="'timed' waits for measured times and reports times, 'real' reports accuracies."),
    ] = "timed"
    strategy: Annotated[
        list[str] | None, typer.Option(help="Any of bsp, ssp3, ssp10, dtssp, asp; by default all.")
    ] = None
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Any of bursts, bursts_dynamic, lasting_equal, lasting_dynamic; by default all."),
    ] = None
    threads: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Worker threads per process, by default 1 and 2; only the first setting uses all."
        ),
    ] = None
    model: Model = "cnn2"
    data: Data = "cifar10"
    data_dir: DataDir = None
    workers: Annotated[int, typer.Option(min=2, help="Number of processes.")] = 4
    batch_size: BatchSize = 128
    factor: Annotated[float, typer.Option(help="Slowdown factor of a step in a burst.")] = 5.0
    burst: Annotated[int, typer.Option(min=1, help="Steps of a burst.")] = 12
    calm: Annotated[int, typer.Option(min=0, help="Steps between two bursts.")] = 0
    steps: Annotated[
        int,
        typer.Option(
            min=2, help="Timed: steps of a worker in the setting 'bursts'; half as many in the others."
        ),
    ] = 96
    step_ms: Annotated[
        float,
        typer.Option(min=1.0, help="Timed: forward plus backward time, multiplied by the threads, in ms."),
    ] = 120.0
    lr: Annotated[float, typer.Option(help="Learning rate of Adam in real trainings.")] = 1e-3
    momentum: Annotated[float, typer.Option(help="First beta of Adam.")] = 0.9
    epochs: Annotated[int, typer.Option(min=1, help="Real: epochs of each run.")] = 2
    seeds: Annotated[int, typer.Option(min=1, help="Real: number of seeds.")] = 1
    seed: Annotated[int, typer.Option(min=0, help="First seed of weights and data.")] = 0

    def __post_init__(self) -> None:
        _check_compute(self.compute)


@_benchmark("validate", minutes=60, needs="MNIST")
@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """Overlapped against in-line validation, with three input pipelines: MNIST."""

    load: Annotated[
        list[str] | None,
        typer.Option(help="Any of memory, files, decode, repeated; by default the first three."),
    ] = None
    side: Annotated[
        list[str] | None,
        typer.Option(
            help="Any of auto, numpy, overlap, overlap_process, auto_prefetch, prefetch, overlap_prefetch, "
            "dataloader."
        ),
    ] = None
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Threads that validate or load, by default 1 and 6; repeatable."),
    ] = None
    compute: Annotated[
        str,
        typer.Option(help="'real' computes on one core, 'timed' waits for --step-ms, as for an accelerator."),
    ] = "real"
    step_ms: StepMs = 5.0
    runs: Annotated[int, typer.Option(min=1, help="Runs of each side; figures are medians over them.")] = 1
    epochs: Epochs = 10
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 64
    samples: Annotated[int, typer.Option(min=1, help="Training samples, from the set.")] = 12_000
    held_out: Annotated[int, typer.Option(min=1, help="Validation samples, from the set.")] = 4_000
    data: Annotated[str, typer.Option(help="mnist or digits.")] = "mnist"
    gigabytes: Annotated[
        float, typer.Option(min=0.01, help="Training data of the load 'repeated', in 10^9 bytes.")
    ] = 1.0
    data_dir: DataDir = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        _check_compute(self.compute)


@_benchmark("validate_gpu", minutes=5, needs="a GPU")
@dataclass(frozen=True, kw_only=True)
class ValidateGpuOptions:
    """Use of the cores and of the GPU over time with serial and with overlapped validation: MNIST."""

    load: Annotated[
        list[str] | None,
        typer.Option(help="Any of memory, files, decode, repeated; by default memory and repeated."),
    ] = None
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads that validate, by default 1 and 6; repeatable.")
    ] = None
    runs: Annotated[int, typer.Option(min=1, help="Runs of each side; figures are medians over them.")] = 1
    epochs: Epochs = 5
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 64
    samples: Annotated[int, typer.Option(min=1, help="Training samples, from the set.")] = 12_000
    held_out: Annotated[int, typer.Option(min=1, help="Validation samples, from the set.")] = 4_000
    data: Annotated[str, typer.Option(help="mnist or digits.")] = "mnist"
    gigabytes: Annotated[
        float, typer.Option(min=0.001, help="Training data of the load 'repeated', in 10^9 bytes.")
    ] = 0.1
    device: Annotated[
        str | None,
        typer.Option(help="Of the model; by default the accelerator. On cpu only the cores are sampled."),
    ] = None
    data_dir: DataDir = None
    seed: Seed = 0
