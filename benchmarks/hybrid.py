"""Benefit of overlapping every layer's all-reduce with both passes, against DDP.

Namespaces shaped to one rate stand for hosts, with one worker in each. Workers wait instead of computing
(`timed`). Layer times are measured alone and scaled: a step's compute time is a given multiple of its
gradients' transfer time, with a given share in the forward pass. The optimizer's step is executed, and counts
as compute time as long as it takes alone. Layer times are those of a batch with about that compute time on
one core, because their distribution depends on the batch (with 2 samples AlexNet's first fully connected
layer takes a third of the step, and its gradients, the largest part of all, come too late to be hidden; with
32 samples a tenth). PyTorch's DistributedDataParallel over gloo, with its default buckets, runs in the same
run. Lines of 1 Gbit/s have segments of 64 KB (see `benchmarks.namespaces`): with 16 KB they carry a little
less than TCP can, and the shapers use a good part of the processor time, which four hosts share here.

`ratio_to_floor` compares with all computing and the first layer's gradients, or with all gradients, whichever
is more; `least_s` is a closer bound, from all layers (`offbeat.numerics.collectives.timeline.least_step_s`).
`share_of_possible_saving` is the saving over DDP divided by what an ideal DDP leaves to be saved
(`offbeat.numerics.collectives.timeline.possible_saving`): fC/(fC+S) where communication takes at least as
long as computing, less otherwise.

Source: the layer-overlapping hybrid all-reduce paper, section 4. Deviations: the paper computes, with one
batch size per row; here the ratio of computing to communication is given, since it determines the gain.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import runs
from benchmarks.commands import HybridOptions
from benchmarks.expected import (
    BATCH_SIZE,
    COST_MODEL,
    DDP,
    SIDES,
    ComputeCase,
    least_s,
    predicted_s,
    times_for,
    transfer_s,
    works_of,
)
from benchmarks.gloo import GlooSide
from benchmarks.namespaces import hosts
from benchmarks.timed import ModelTimes
from benchmarks.workers import read_settings, run_workers, send_result
from offbeat.cli.result import Result, machine
from offbeat.numerics.collectives.forecast import LayerWork
from offbeat.numerics.collectives.timeline import possible_saving
from offbeat.runtime.control.environment import read_environment
from offbeat.runtime.launch import find_free_port
from offbeat.runtime.session import join
from offbeat.strategies import Hybrid, parse_strategy

_WARM_UP_STEPS = 4
_DEADLINE_S = 120.0
_EARLY_S = 800e-6  # how early messages may be after a pause; steps take seconds


def run(options: HybridOptions, *, command: str) -> Result:
    """Measure all cases and sides, in temporary network namespaces; needs root.

    Raises:
        ValueError: an option is out of range, or options contradict each other.
    """
    sides, rate_bit_per_s = options.side or [*SIDES], options.rate_mbit * 1_000_000
    compute_cases = _compute_cases(options)
    for side in sides:
        if side not in SIDES:
            parse_strategy(side)
    optimizer_s = runs.optimizer_s(options.model, options.seed)
    cases = [*_prepare(options, compute_cases, optimizer_s)]
    rows = []
    with hosts(options.workers, rate_bit_per_s=rate_bit_per_s, early_s=_EARLY_S) as created:
        for case in cases:
            settings = {
                "model": options.model,
                "times": None if case.times is None else case.times.to_plain(),
                "batch_size": case.batch_size,
                "sides": sides,
                "steps": options.steps,
                "seed": options.seed,
                "address": created[0].address,
                "interface": created[0].interface,
                "port": find_free_port(),
            }
            results = run_workers(
                "benchmarks.hybrid",
                settings,
                options.workers,
                prefix=[host.prefix for host in created],
                master_addr=created[0].address,
            )
            rows += [_row(options, case, side, results[side]) for side in sides]
        congestion_control, burst_bytes = created[0].congestion_control, created[0].burst_bytes
    return Result(
        name="hybrid",
        command=command,
        kind="real" if options.real_batch else "timed",
        seed=options.seed,
        figures=figures(options.model, rows),
        rows=rows,
        machine=machine(
            congestion_control=congestion_control,
            line_mbit_per_s=options.rate_mbit,
            line_burst_bytes=burst_bytes,
            workers=options.workers,
            batch_size_of_times=BATCH_SIZE,
            optimizer_s=optimizer_s,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _PreparedCase:
    """A case with its compute times and expected values.

    Attributes:
        name: as in figures.
        times: of layers; None where workers compute.
        batch_size: of what is computed.
        expected: known properties of a step, for all sides; empty where workers compute, since they share
            cores.
        works: compute times and message sizes of the layers, where known.
    """

    name: str
    times: ModelTimes | None
    batch_size: int
    expected: Mapping[str, float]
    works: Sequence[LayerWork]


def _compute_cases(options: HybridOptions) -> list[ComputeCase]:
    """Return the cases for which layer times are scaled, each of which is run with all sides."""
    timed, real = options.timed_batch or [], options.real_batch or []
    is_scaled = options.compute or options.forward_share or not (timed or real)
    if real and (is_scaled or timed):
        raise ValueError("expected real batches in a run without cases and timed batches, got both")
    if min([1, *timed, *real]) < 1:
        raise ValueError("expected batches of at least 1 sample")
    return [
        ComputeCase(ratio=ratio, forward_share=share)
        for share in options.forward_share or [1 / 3, 1 / 2]
        for ratio in options.compute or [0.25, 0.5, 0.75, 1.0, 1.5]
        if is_scaled
    ]


def _prepare(
    options: HybridOptions, cases: Sequence[ComputeCase], optimizer_s: float
) -> Iterator[_PreparedCase]:
    """Yield all cases."""
    built = runs.network(options.model, None, options.seed)
    workers, rate = options.workers, options.rate_mbit * 1_000_000
    whole_s = transfer_s(sum(p.nbytes for p in built.parameters()), workers, rate)

    def timed(name: str, times: ModelTimes) -> _PreparedCase:
        works = works_of(times, built, optimizer_s)
        compute_s = times.step_s + optimizer_s
        expected = {
            "compute_s": compute_s,
            "forward_share": (times.forward_s + optimizer_s) / compute_s,
            "transfer_s": whole_s,
            "floor_s": max(compute_s + transfer_s(works[1].size_bytes, workers, rate), whole_s),
            "least_s": least_s(works, workers, rate),
        }
        return _PreparedCase(name=name, times=times, batch_size=1, expected=expected, works=works)

    if cases:
        alone = runs.measure_layers(options.model, BATCH_SIZE, options.seed)
        for case in cases:
            yield timed(case.name, times_for(alone, case, whole_s, optimizer_s))
    for size in options.timed_batch or ():
        yield timed(f"timed{size}", runs.measure_layers(options.model, size, options.seed))
    for size in options.real_batch or ():
        yield _PreparedCase(name=f"real{size}", times=None, batch_size=size, expected={}, works=[])


def _row(
    options: HybridOptions, case: _PreparedCase, side: str, results: Mapping[str, Any]
) -> dict[str, Any]:
    step_s = median(results["step_s"])
    row = {
        "case": case.name,
        "side": side,
        "step_s": step_s,
        "step_min_s": min(results["step_s"]),
        "step_max_s": max(results["step_s"]),
        "cpu_s": results["cpu_s"],
        **case.expected,
    }
    if case.expected:
        row["exposed_comm_share"] = max(0.0, step_s - case.expected["compute_s"]) / step_s
        row["ratio_to_floor"] = step_s / case.expected["floor_s"]
        row["ratio_to_least"] = step_s / case.expected["least_s"]
    if case.works and (side == DDP or isinstance(parse_strategy(SIDES.get(side, side)), Hybrid)):
        row["predicted_s"] = predicted_s(side, case.works, options.workers, options.rate_mbit * 1_000_000)
    return row


def figures(model: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each side's step time relative to DDP's, to the floor and to the possible saving."""
    found: dict[str, float] = {}
    ddp = {row["case"]: row["step_s"] for row in rows if row["side"] == DDP}
    ratios = []
    for row in rows:
        case, side = row["case"], row["side"]
        is_timed = "compute_s" in row
        if is_timed:
            found[f"exposed_comm_share_{model}_{case}_{side}"] = row["exposed_comm_share"]
        if side == DDP or case not in ddp:
            continue
        ratio = row["step_s"] / ddp[case]
        found[f"time_ratio_to_ddp_{model}_{case}_{side}"] = ratio
        if side == COST_MODEL:
            ratios.append(ratio)
        possible = is_timed and possible_saving(
            compute_s=row["compute_s"], forward_share=row["forward_share"], transfer_s=row["transfer_s"]
        )
        if possible:
            found[f"share_of_possible_saving_{model}_{case}_{side}"] = (1 - ratio) / possible
    floors = [row["ratio_to_floor"] for row in rows if row["side"] == COST_MODEL and "ratio_to_floor" in row]
    if ratios:
        found["time_ratio_to_ddp_best"] = min(ratios)
        found["time_ratio_to_ddp_worst"] = max(ratios)
    if floors:
        found[f"ratio_to_floor_{model}_cost_model"] = max(floors)
    return {**found, **prediction_figures(rows)}


def prediction_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return ratios of measured to predicted step times, without DDP's, which is only approximated."""
    ratios = [
        row["step_s"] / row["predicted_s"] for row in rows if "predicted_s" in row and row["side"] != DDP
    ]
    if not ratios:
        return {}
    return {
        "measured_to_predicted_ratio_p50": median(ratios),
        "measured_to_predicted_ratio_min": min(ratios),
        "measured_to_predicted_ratio_max": max(ratios),
    }


def main() -> None:
    """Run all sides one after the other, as one worker; rank 0 sends its step times in seconds."""
    settings = read_settings(sys.argv)
    torch.set_num_threads(1)
    environment = read_environment()
    times = None if settings["times"] is None else ModelTimes.from_plain(settings["times"])
    x, y = runs.batch(settings["batch_size"], 1000 * settings["seed"] + environment.rank, times is not None)
    results = {}
    for side in settings["sides"]:
        model = runs.network(settings["model"], times, settings["seed"])
        optimizer = runs.optimizer_of(model)
        if side == DDP:
            with GlooSide(
                environment.rank,
                environment.world,
                settings["address"],
                settings["port"],
                interface=settings["interface"],
                limit_s=_DEADLINE_S,
            ):
                wrapped = DistributedDataParallel(model)
                results[side] = _steps(wrapped, optimizer, x, y, settings["steps"])
                dist.barrier()
                del wrapped
        else:
            with join(model, optimizer, parse_strategy(SIDES.get(side, side))):
                results[side] = _steps(model, optimizer, x, y, settings["steps"])
        del model, optimizer
        gc.collect()  # a closed session's memory is large, and in reference cycles
        if environment.rank == 0:
            print(f"{side}: {median(results[side]['step_s']):.3f} s a step", flush=True)
    if environment.rank == 0:
        send_result(results)


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, steps: int
) -> dict[str, Any]:
    """Return the times between starts of forward passes after the warm-up, and processor time per step."""
    began_s: list[float] = []
    for step in range(_WARM_UP_STEPS + steps + 1):
        if step == _WARM_UP_STEPS:
            cpu_s = time.process_time()
        began_s.append(time.perf_counter())
        runs.step(model, optimizer, x, y)
    cpu_s = (time.process_time() - cpu_s) / (steps + 1)
    all_s = [after - before for before, after in pairwise(began_s)]
    return {"step_s": all_s[_WARM_UP_STEPS:], "cpu_s": cpu_s}


if __name__ == "__main__":
    main()
