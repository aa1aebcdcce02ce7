"""Bytes and time of a step with compressed gradients, beside the hooks of PyTorch's DDP: `compression`.

Each worker is on a host of its own (`benchmarks.namespaces`), also on free lines, so that the bytes of all
are counted at the host's interface. Workers wait instead of computing (`benchmarks.timed`). The gradients of
the backward pass are real: each worker has computed those of a batch of its own, which all of its steps
return (`offbeat` and DDP, as `benchmarks.ddp_hooks` wraps it, leave them as they are). Compressing, packing,
the exchange and the optimizer's step are executed. Blocks of steps of all methods alternate in the same
processes, so that variations of the machine's speed affect all; each begins with a new model and warms up.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks import compression_accuracy, runs
from benchmarks.commands import CompressionOptions
from benchmarks.ddp_hooks import AUTO, DENSE, METHODS, check_method, hook_like, is_ddp, wrap
from benchmarks.gloo import GlooSide
from benchmarks.namespaces import FREE, Host, bytes_sent, hosts, parse_rate
from benchmarks.timed import ModelTimes, TimedModel
from benchmarks.workers import print_progress, read_settings, run_workers, send_result
from offbeat.cli.result import Result, figure_part, machine
from offbeat.runtime.averaging.compression_trial import ROUNDS
from offbeat.runtime.control.environment import read_environment
from offbeat.runtime.launch import find_free_port
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

RATES: Final = ("100", "1000", "10000", FREE)
_WARM_UP_STEPS = 4
_DEADLINE_S = 600.0
_EARLY_S = 800e-6  # how early messages may be after a pause; steps take at least a hundred times as long


class CompressionRun(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the workers on lines of one rate.

    Attributes:
        times: for which the model waits.
        batch_size: of the batch whose gradients all steps have.
        blocks: of each method.
        steps: of a worker in a block, after the warm-up.
        address: of the first worker's host.
        interface: of each host.
        port: of the process group.
    """

    methods: tuple[str, ...]
    model: str
    times: ModelTimes
    batch_size: int
    blocks: int
    steps: int
    seed: int
    address: str
    interface: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a worker measured in one block.

    Attributes:
        step_s: times between the ends of steps.
        bytes_per_step: sent by this worker's host, headers included.
        cpu_s: processor time of a step.
    """

    step_s: list[float]
    bytes_per_step: float
    cpu_s: float


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return bytes relative to dense gradients', step times, and strategies' ratios to DDP's hooks.

    Bytes are means over the lines. What a method would be compared with, and did not run, has no figure. The
    automatic choice is compared with the fastest strategy on each line, and with dense gradients.
    """
    found: dict[str, float] = {}
    best_s: dict[str, float] = {}
    sent: dict[str, list[float]] = {}
    for row in rows:
        sent.setdefault(row["method"], []).append(row["bytes_per_step"])
    for method, bytes_per_step in sent.items():
        if method != DENSE and DENSE in sent:
            name = f"bytes_ratio_dense_to_{figure_part(method)}_{rows[0]['workers']}w"
            found[name] = fmean(sent[DENSE]) / fmean(bytes_per_step)
    step_s = {(row["method"], row["line"]): row["step_s"] for row in rows}
    for (method, line), time_s in step_s.items():
        name = f"{figure_part(method)}_{line}"
        found[f"step_s_{name}"] = time_s
        hook = (hook_like(method), line)
        if not is_ddp(method) and hook in step_s:
            found[f"step_ratio_to_torch_hook_{name}"] = time_s / step_s[hook]
        if not is_ddp(method) and method != AUTO:
            best_s[line] = min(time_s, best_s.get(line, time_s))
    for name, compared_s in (
        ("best", best_s),
        ("dense", {line: time_s for (method, line), time_s in step_s.items() if method == DENSE}),
    ):
        ratios = [step_s[AUTO, line] / compared_s[line] for line in compared_s if (AUTO, line) in step_s]
        if ratios:
            found[f"auto_to_{name}_ratio_max"] = max(ratios)
    return found


def run(options: CompressionOptions, *, command: str) -> Result:
    """Measure all methods on lines of each rate, which needs root; with `accuracy` train with them instead.

    Raises:
        OffbeatError: no root, the data are missing, or a worker failed.
        ValueError: an option out of range, such as an unknown method or model.
    """
    methods = tuple(dict.fromkeys(options.method or METHODS))
    for method in methods:
        check_method(method)
    if options.accuracy:
        return compression_accuracy.run(options, methods, command=command)
    rates = [parse_rate(text) for text in dict.fromkeys(options.rate_mbit or RATES)]
    alone = runs.measure_layers(options.model, options.batch_size, options.seed)
    times = alone.lasting(options.step_ms / 1000)
    rows: list[dict[str, Any]] = []
    for rate in rates:
        line = FREE if rate is None else f"{rate}mbit"
        rate_bit_per_s = None if rate is None else rate * 1_000_000
        with hosts(options.workers, rate_bit_per_s=rate_bit_per_s, early_s=_EARLY_S) as created:
            print_progress(f"lines: {line}")
            found = _measure_all(options, methods, times, created)
            rows += [_row(options.workers, line, method, found[method]) for method in methods]
            congestion_control = created[0].congestion_control
    return Result(
        name="compression",
        command=command,
        kind="timed",
        seed=options.seed,
        figures=figures(rows),
        rows=rows,
        machine=machine(
            model=options.model,
            workers=options.workers,
            batch_size=options.batch_size,
            step_ms=options.step_ms,
            optimizer_s=runs.optimizer_s(options.model, options.seed),
            congestion_control=congestion_control,
        ),
    )


def _measure_all(
    options: CompressionOptions, methods: tuple[str, ...], times: ModelTimes, created: Sequence[Host]
) -> dict[str, list[Measured]]:
    """Return by method what each worker measured in each block."""
    settings = CompressionRun(
        methods=methods,
        model=options.model,
        times=times,
        batch_size=options.batch_size,
        blocks=options.blocks,
        steps=options.steps,
        seed=options.seed,
        address=created[0].address,
        interface=created[0].interface,
        port=find_free_port(),
    )
    found = run_workers(
        "benchmarks.compression",
        msgspec.to_builtins(settings),
        len(created),
        prefix=[host.prefix for host in created],
        master_addr=created[0].address,
        timeout_s=_DEADLINE_S * len(methods) * options.blocks,
    )
    return msgspec.convert(found, dict[str, list[Measured]])


def _row(workers: int, line: str, method: str, measured: Sequence[Measured]) -> dict[str, Any]:
    step_s = [time_s for one in measured for time_s in one.step_s]
    return {
        "line": line,
        "method": method,
        "workers": workers,
        "bytes_per_step": fmean(one.bytes_per_step for one in measured),
        "step_s": median(step_s),
        "step_min_s": min(step_s),
        "step_max_s": max(step_s),
        "cpu_s": fmean(one.cpu_s for one in measured),
    }


def main() -> None:
    """Run blocks of all methods in alternation, as one worker; rank 0 sends what all have measured."""
    settings = msgspec.convert(read_settings(sys.argv), CompressionRun)
    torch.set_num_threads(1)
    environment = read_environment()
    gradients = real_gradients(settings.model, settings.batch_size, settings.seed, environment.rank)
    results: dict[str, list[Measured]] = {method: [] for method in settings.methods}
    with GlooSide(
        environment.rank,
        environment.world,
        settings.address,
        settings.port,
        interface=settings.interface,
        limit_s=_DEADLINE_S,
    ):
        for block in range(settings.blocks):
            for method in settings.methods[:: -1 if block % 2 else 1]:
                measured: list[Any] = [None] * environment.world
                dist.all_gather_object(measured, _measure_block(settings, method, gradients))
                results[method] += measured
                gc.collect()  # a closed session's memory is large, and in reference cycles
                if environment.rank == 0:
                    print(f"{method}: {median(measured[0].step_s):.3f} s a step", flush=True)
        if environment.rank == 0:
            send_result(msgspec.to_builtins(results))


def real_gradients(model: str, batch_size: int, seed: int, rank: int) -> dict[str, torch.Tensor]:
    """Compute a worker's gradients of one batch of its own, by the names of parameters."""
    built = runs.network(model, None, seed)
    x, y = runs.batch(batch_size, 1000 * seed + rank, timed=False)
    F.cross_entropy(built(x), y).backward()
    return {name: one.grad for name, one in built.named_parameters() if one.grad is not None}


def _measure_block(settings: CompressionRun, method: str, gradients: Mapping[str, torch.Tensor]) -> Measured:
    model = runs.network(settings.model, settings.times, settings.seed)
    assert isinstance(model, TimedModel)
    model.set_gradients(gradients)
    optimizer = runs.optimizer_of(model)
    warm_up_steps = _WARM_UP_STEPS + (ROUNDS if method == AUTO else 0)
    steps = warm_up_steps + settings.steps
    if is_ddp(method):
        return _steps(wrap(model, method), optimizer, range(steps), warm_up_steps, settings)
    with join(model, optimizer, parse_strategy(method)) as session:
        numbers = TensorDataset(torch.arange(steps * dist.get_world_size()))
        turns = (batch for _ in session.epochs(1) for batch in session.batches(numbers, 1))
        return _steps(model, optimizer, turns, warm_up_steps, settings)


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    turns: Iterable[object],
    warm_up_steps: int,
    settings: CompressionRun,
) -> Measured:
    """Make a step for each turn; the first ones warm up."""
    x, y = runs.batch(1, settings.seed, timed=True)
    ends_s, sent, cpu_s = [], [], []
    for _ in turns:
        runs.step(model, optimizer, x, y)
        ends_s.append(time.perf_counter())
        sent.append(bytes_sent(settings.interface))
        cpu_s.append(time.process_time())
    first = warm_up_steps - 1
    steps = len(ends_s) - warm_up_steps
    return Measured(
        step_s=[after - before for before, after in pairwise(ends_s[first:])],
        bytes_per_step=(sent[-1] - sent[first]) / steps,
        cpu_s=(cpu_s[-1] - cpu_s[first]) / steps,
    )


if __name__ == "__main__":
    main()
