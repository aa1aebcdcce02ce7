"""What overlapping every layer's all-reduce with both passes is worth, beside DDP.

Namespaces shaped to one rate stand for hosts, with one worker in each. Computing is waited for (`timed`), in
layer times that were measured alone and are scaled so that a step computes for a given share of what its
gradients need on the line, a given part of it in the forward pass. The optimizer's step is made, and counts
as computing, as long as it takes alone. Layer times are those of a batch that one core takes about as long
for: how they are distributed depends on it (with 2 samples AlexNet's first fully connected layer takes a
third of the step, and its gradients, which are most of all, come too late to be hidden; with 32 a tenth).
PyTorch's DistributedDataParallel over gloo, with its default buckets, runs in the same run. Lines of
1 Gbit/s take segments of 64 KB (see `benchmarks.namespaces`): with 16 KB they carry a little less than TCP
can, and a good part of the processor time, which four hosts share here, is the shapers'.

`ratio_to_floor` compares with all computing and the first layer's gradients, or all gradients, whichever is
more; `least_s` is a closer bound, from all layers (`offbeat.numerics.collectives.timeline.least_step_s`).
`share_of_possible_saving` is what was saved over DDP, divided by what an ideal DDP leaves to be saved
(`offbeat.numerics.collectives.timeline.possible_saving`): fC/(fC+S) where communication takes at least as
long as computing, less where it does not.

Source: the layer-overlapping hybrid all-reduce paper, section 4. Deviations: it computes, on one batch size a
row; here the ratio of computing to communication is given, since all that can be won depends on that.
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
    Case,
    least_s,
    predicted_s,
    times_for,
    transfer_s,
    works_of,
)
from benchmarks.gloo import GlooSide
from benchmarks.namespaces import hosts
from benchmarks.timed import ModelTimes
from benchmarks.workers import answer, run_workers, settings_of
from offbeat.cli.result import Result, machine
from offbeat.numerics.collectives.forecast import LayerWork
from offbeat.numerics.collectives.timeline import possible_saving
from offbeat.runtime.control.environment import read_environment
from offbeat.runtime.launch import find_free_port
from offbeat.runtime.session import join
from offbeat.strategies import Hybrid, parse_strategy

_WARM_UP_STEPS = 4
_DEADLINE_S = 120.0
_EARLY_S = 800e-6  # that messages may be after a pause, of steps of seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        model: a key of `offbeat.models.MODELS`.
        sides: keys of `SIDES`, or strategies.
        cases: each with all sides.
        timed_batches: sizes of batches that are waited for as long as one core has taken.
        real_batches: sizes of batches that are computed, by all workers on this machine's cores.
        steps: that count, a side and case.
        workers: hosts, one worker on each.
        rate_bit_per_s: of each host's line, each way.
        batch_size: for which the cases' layer times are measured.
    """

    model: str = "alexnet"
    sides: tuple[str, ...] = tuple(SIDES)
    cases: tuple[Case, ...] = ()
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
            raise ValueError(
                "expected batches that are really computed in a run of their own, got others too"
            )


def run(plan: Plan, *, command: str) -> Result:
    """Measures all cases and sides, in namespaces that it makes and removes; needs root."""
    optimizer_s = runs.optimizer_s(plan.model, plan.seed)
    cases = [*_computing(plan, optimizer_s)]
    rows = []
    with hosts(plan.workers, rate_bit_per_s=plan.rate_bit_per_s, early_s=_EARLY_S) as made:
        for case in cases:
            settings = {
                "model": plan.model,
                "times": None if case.times is None else case.times.to_plain(),
                "batch_size": case.batch_size,
                "sides": list(plan.sides),
                "steps": plan.steps,
                "seed": plan.seed,
                "address": made[0].address,
                "interface": made[0].interface,
                "port": find_free_port(),
            }
            told = run_workers(
                "benchmarks.hybrid",
                settings,
                plan.workers,
                prefix=[host.prefix for host in made],
                master_addr=made[0].address,
            )
            rows += [_row(plan, case, side, told[side]) for side in plan.sides]
        congestion_control, burst_bytes = made[0].congestion_control, made[0].burst_bytes
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
class _Computing:
    """A case worked out.

    Attributes:
        name: as figures spell it.
        times: of layers; None where they compute.
        batch_size: of what computes.
        known: what is known of a step, for all sides; nothing where it computes, since cores are shared.
        works: what its layers compute and send, where that is known.
    """

    name: str
    times: ModelTimes | None
    batch_size: int
    known: Mapping[str, float]
    works: Sequence[LayerWork]


def _computing(plan: Plan, optimizer_s: float) -> Iterator[_Computing]:
    """Yield all cases of a plan."""
    built = runs.network(plan.model, None, plan.seed)
    workers, rate = plan.workers, plan.rate_bit_per_s
    whole_s = transfer_s(sum(p.nbytes for p in built.parameters()), workers, rate)

    def timed(name: str, times: ModelTimes) -> _Computing:
        works = works_of(times, built, optimizer_s)
        compute_s = times.step_s + optimizer_s
        known = {
            "compute_s": compute_s,
            "forward_share": (times.forward_s + optimizer_s) / compute_s,
            "transfer_s": whole_s,
            "floor_s": max(compute_s + transfer_s(works[1].size_bytes, workers, rate), whole_s),
            "least_s": least_s(works, workers, rate),
        }
        return _Computing(name=name, times=times, batch_size=1, known=known, works=works)

    if plan.cases:
        alone = runs.measured(plan.model, plan.batch_size, plan.seed)
        for case in plan.cases:
            yield timed(case.name, times_for(alone, case, whole_s, optimizer_s))
    for size in plan.timed_batches:
        yield timed(f"timed{size}", runs.measured(plan.model, size, plan.seed))
    for size in plan.real_batches:
        yield _Computing(name=f"real{size}", times=None, batch_size=size, known={}, works=[])


def _row(plan: Plan, case: _Computing, side: str, told: Mapping[str, Any]) -> dict[str, Any]:
    step_s = median(told["step_s"])
    row = {
        "case": case.name,
        "side": side,
        "step_s": step_s,
        "step_min_s": min(told["step_s"]),
        "step_max_s": max(told["step_s"]),
        "cpu_s": told["cpu_s"],
        **case.known,
    }
    if case.known:
        row["exposed_comm_share"] = max(0.0, step_s - case.known["compute_s"]) / step_s
        row["ratio_to_floor"] = step_s / case.known["floor_s"]
        row["ratio_to_least"] = step_s / case.known["least_s"]
    if case.works and (side == DDP or isinstance(parse_strategy(SIDES.get(side, side)), Hybrid)):
        row["predicted_s"] = predicted_s(side, case.works, plan.workers, plan.rate_bit_per_s)
    return row


def figures(model: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each side's step beside DDP's, the floor's and what can be saved at all."""
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
    """Return how measured steps compare with predicted ones, but for DDP's, which is only likened to ours."""
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
    """One worker: all sides one after the other; rank 0 answers with the seconds of their steps."""
    settings = settings_of(sys.argv)
    torch.set_num_threads(1)
    environment = read_environment()
    times = None if settings["times"] is None else ModelTimes.from_plain(settings["times"])
    x, y = runs.batch(settings["batch_size"], 1000 * settings["seed"] + environment.rank, times is not None)
    told = {}
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
                told[side] = _steps(wrapped, optimizer, x, y, settings["steps"])
                dist.barrier()
                del wrapped
        else:
            with join(model, optimizer, parse_strategy(SIDES.get(side, side))):
                told[side] = _steps(model, optimizer, x, y, settings["steps"])
        del model, optimizer
        gc.collect()  # what a session held is in cycles, and much
        if environment.rank == 0:
            print(f"{side}: {median(told[side]['step_s']):.3f} s a step", flush=True)
    if environment.rank == 0:
        answer(told)


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, steps: int
) -> dict[str, Any]:
    """Seconds between the beginnings of forward passes, once everything is in its place; processor time."""
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
