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
from benchmarks.expected import (
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


@dataclass(frozen=True, kw_only=True)
class HybridPlan:
    """Settings of the benchmark.

    Attributes:
        model: a key of `offbeat.models.MODELS`.
        sides: keys of `SIDES`, or strategies.
        cases: each is run with all sides.
        timed_batches: batch sizes; workers wait as long as one core takes for such a batch.
        real_batches: batch sizes that all workers compute, on this machine's cores.
        steps: measured steps per side and case.
        workers: hosts, one worker on each.
        rate_bit_per_s: of each host's line, each way.
        batch_size: for which the layer times of `cases` are measured.
    """

    model: str = "alexnet"
    sides: tuple[str, ...] = tuple(SIDES)
    cases: tuple[ComputeCase, ...] = ()
    timed_batches: tuple[int, ...] = ()
    real_batches: tuple[int, ...] = ()
    steps: int = 5
    workers: int = 4
    rate_bit_per_s: int = 1_000_000_000
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for side in self.sides:
            if side not in SIDES:
                parse_strategy(side)
        if self.steps < 1 or self.workers < 2 or not (self.cases or self.timed_batches or self.real_batches):
            raise ValueError("expected at least 1 step, 2 workers and 1 case")
        if min([self.batch_size, *self.timed_batches, *self.real_batches]) < 1:
            raise ValueError("expected batches of at least 1 sample")
        if self.real_batches and (self.cases or self.timed_batches):
            raise ValueError("expected real batches in a run without cases and timed batches, got both")


def run(plan: HybridPlan, *, command: str) -> Result:
    """Measure all cases and sides, in temporary network namespaces; needs root."""
    optimizer_s = runs.optimizer_s(plan.model, plan.seed)
    cases = [*_prepare(plan, optimizer_s)]
    rows = []
    with hosts(plan.workers, rate_bit_per_s=plan.rate_bit_per_s, early_s=_EARLY_S) as created:
        for case in cases:
            settings = {
                "model": plan.model,
                "times": None if case.times is None else case.times.to_plain(),
                "batch_size": case.batch_size,
                "sides": list(plan.sides),
                "steps": plan.steps,
                "seed": plan.seed,
                "address": created[0].address,
                "interface": created[0].interface,
                "port": find_free_port(),
            }
            results = run_workers(
                "benchmarks.hybrid",
                settings,
                plan.workers,
                prefix=[host.prefix for host in created],
                master_addr=created[0].address,
            )
            rows += [_row(plan, case, side, results[side]) for side in plan.sides]
        congestion_control, burst_bytes = created[0].congestion_control, created[0].burst_bytes
    return Result(
        name="hybrid",
        command=command,
        kind="real" if plan.real_batches else "timed",
        seed=plan.seed,
        figures=figures(plan.model, rows),
        rows=rows,
        machine=machine(
            congestion_control=congestion_control,
            line_mbit_per_s=plan.rate_bit_per_s / 1e6,
            line_burst_bytes=burst_bytes,
            workers=plan.workers,
            batch_size_of_times=plan.batch_size,
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


def _prepare(plan: HybridPlan, optimizer_s: float) -> Iterator[_PreparedCase]:
    """Yield all cases of a plan."""
    built = runs.network(plan.model, None, plan.seed)
    workers, rate = plan.workers, plan.rate_bit_per_s
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

    if plan.cases:
        alone = runs.measure_layers(plan.model, plan.batch_size, plan.seed)
        for case in plan.cases:
            yield timed(case.name, times_for(alone, case, whole_s, optimizer_s))
    for size in plan.timed_batches:
        yield timed(f"timed{size}", runs.measure_layers(plan.model, size, plan.seed))
    for size in plan.real_batches:
        yield _PreparedCase(name=f"real{size}", times=None, batch_size=size, expected={}, works=[])


def _row(plan: HybridPlan, case: _PreparedCase, side: str, results: Mapping[str, Any]) -> dict[str, Any]:
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
        row["predicted_s"] = predicted_s(side, case.works, plan.workers, plan.rate_bit_per_s)
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
