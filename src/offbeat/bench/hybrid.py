"""`offbeat bench hybrid`: what overlapping every layer's all-reduce with both passes is worth, beside DDP.

Namespaces shaped to one rate stand for hosts, with one worker in each. Computing is waited for (`timed`), in
layer times that were measured alone and are scaled so that a step computes for a given share of what its
gradients need on the line, a given part of it in the forward pass. The optimizer's step is made, and counts
as computing, as long as it takes alone. Layer times are those of a batch that one core takes about as long
for: how they are distributed depends on it (with 2 samples AlexNet's first fully connected layer takes a
third of the step, and its gradients, which are most of all, come too late to be hidden; with 32 a tenth).
PyTorch's DistributedDataParallel over gloo, with its default buckets, runs in the same run.

`ratio_to_floor` compares with all computing and the first layer's gradients, or all gradients, whichever is
more; `least_s` is a closer bound, from all layers (`offbeat.numerics.timeline.least_step_s`).
`share_of_possible_saving` is what was saved over DDP, divided by what an ideal DDP leaves to be saved
(`offbeat.numerics.timeline.possible_saving`): fC/(fC+S) where communication takes at least as long as
computing, less where it does not.

Source: the layer-overlapping hybrid all-reduce paper, section 4. Deviations: it computes, on one batch size a
row; here the ratio of computing to communication is given, since all that can be won depends on that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offbeat.bench import runs
from offbeat.bench.gloo import GlooSide, bound_s
from offbeat.bench.namespaces import hosts
from offbeat.bench.result import Result, machine
from offbeat.bench.timed import ModelTimes
from offbeat.bench.workers import answer, run_workers, settings_of
from offbeat.numerics.timeline import Layer, Message, least_step_s, possible_saving
from offbeat.runtime.environment import read_environment
from offbeat.runtime.launch import free_port
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

DDP = "ddp"
SIDES: Mapping[str, str] = {
    DDP: "",
    "sync_ring": "hybrid:policy=ring,overlap=none",
    "fifo_ring": "hybrid:policy=ring,order=fifo",
    "paper": "hybrid:policy=conv_butterfly_fc_ring,order=fifo,fuse_bytes=0",
    "table4": "hybrid:policy=table4,order=fifo,fuse_bytes=0",
    "cost_model": "hybrid",
}
"""Name -> strategy; `ddp` is PyTorch's own."""

TCP_SHARE = 0.956
"""Of a line's rate, what TCP carries."""

_WARM_UP_STEPS = 4
_DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """How long a step computes.

    Attributes:
        ratio: of the time that the gradients need on the line.
        forward_share: of it, in the forward pass.
    """

    ratio: float
    forward_share: float

    @property
    def name(self) -> str:
        """As figures spell it, both in percent."""
        return f"c{100 * self.ratio:.0f}_f{100 * self.forward_share:.0f}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        model: a key of `offbeat.models.MODELS`.
        sides: keys of `SIDES`.
        cases: each with all sides.
        steps: that count, a side and case.
        workers: hosts, one worker on each.
        rate_bit_per_s: of each host's line, each way.
        batch_size: for which layer times are measured.
    """

    model: str = "alexnet"
    sides: tuple[str, ...] = tuple(SIDES)
    cases: tuple[Case, ...] = ()
    steps: int = 5
    workers: int = 4
    rate_bit_per_s: int = 1_000_000_000
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for side in self.sides:
            if side not in SIDES:
                parse_strategy(side)
        if self.steps < 1 or self.workers < 2 or not self.cases:
            raise ValueError("expected at least 1 step, 2 workers and 1 case")
        for case in self.cases:
            if not (case.ratio > 0 and 0 < case.forward_share < 1):
                raise ValueError(f"expected a ratio above 0 and a share between 0 and 1, got {case}")


def times_for(alone: ModelTimes, case: Case, transfer_s: float, optimizer_s: float) -> ModelTimes:
    """Return layer times that sum to a case's, in the proportions of those that were measured.

    Args:
        alone: those.
        case: how long a step computes.
        transfer_s: what its gradients need on the line.
        optimizer_s: what the optimizer takes of it, out of the forward pass's part.

    Raises:
        ValueError: the optimizer takes all of that part.
    """
    compute_s = case.ratio * transfer_s
    forward_s = case.forward_share * compute_s - optimizer_s
    if forward_s <= 0:
        raise ValueError(
            f"expected a forward pass longer than the optimizer's {optimizer_s:.2f} s, "
            f"got {case.forward_share * compute_s:.2f} s for both"
        )
    forward = forward_s / alone.forward_s
    backward = (1 - case.forward_share) * compute_s / alone.backward_s
    return ModelTimes(
        lead_s=alone.lead_s * forward,
        layers=tuple(
            replace(layer, forward_s=layer.forward_s * forward, backward_s=layer.backward_s * backward)
            for layer in alone.layers
        ),
    )


def least_s(
    times: ModelTimes, sizes: Mapping[str, int], workers: int, rate_bit_per_s: int, optimizer_s: float
) -> float:
    """Return the least time of a step in which no gradient waits longer than it must.

    Args:
        times: of all layers.
        sizes: bytes of each layer's gradients, by its name.
        workers: who average them.
        rate_bit_per_s: of each one's line.
        optimizer_s: of a step; each layer takes its part.
    """
    whole = sum(sizes.values())
    layers = [Layer(name="lead", forward_s=times.lead_s, backward_s=0.0)]
    messages = []
    for number, layer in enumerate(times.layers, start=1):
        size = sizes[layer.name]
        messages.append(Message(layer=number, steps_s=(transfer_s(size, workers, rate_bit_per_s),)))
        forward_s = layer.forward_s + optimizer_s * size / whole
        layers.append(Layer(name=layer.name, forward_s=forward_s, backward_s=layer.backward_s))
    return least_step_s(layers, messages)


def transfer_s(size_bytes: int, workers: int, rate_bit_per_s: int) -> float:
    """Return how long TCP needs at least for an all-reduce on lines of this rate, in seconds."""
    return bound_s(size_bytes, workers, rate_bit_per_s * TCP_SHARE)


def run(plan: Plan, *, command: str) -> Result:
    """Measures all cases and sides, in namespaces that it makes and removes; needs root."""
    alone = runs.measured(plan.model, plan.batch_size, plan.seed)
    optimizer_s = runs.optimizer_s(plan.model, plan.seed)
    built = runs.network(plan.model, None, plan.seed)
    sizes = {
        layer.name: sum(p.nbytes for p in built.get_submodule(layer.name).parameters(recurse=False))
        for layer in alone.layers
    }
    whole_s = transfer_s(sum(sizes.values()), plan.workers, plan.rate_bit_per_s)
    first_s = transfer_s(sizes[alone.layers[0].name], plan.workers, plan.rate_bit_per_s)
    times_of = {case: times_for(alone, case, whole_s, optimizer_s) for case in plan.cases}
    rows = []
    with hosts(plan.workers, rate_bit_per_s=plan.rate_bit_per_s) as made:
        for case in plan.cases:
            settings = {
                "model": plan.model,
                "times": times_of[case].to_plain(),
                "sides": list(plan.sides),
                "steps": plan.steps,
                "seed": plan.seed,
                "address": made[0].address,
                "interface": made[0].interface,
                "port": free_port(),
            }
            told = run_workers(
                "offbeat.bench.hybrid",
                settings,
                plan.workers,
                prefix=[host.prefix for host in made],
                master_addr=made[0].address,
            )
            least = least_s(times_of[case], sizes, plan.workers, plan.rate_bit_per_s, optimizer_s)
            for side in plan.sides:
                row = _row(case, side, whole_s, first_s, told[side])
                rows.append({**row, "least_s": least, "ratio_to_least": row["step_s"] / least})
        congestion_control = made[0].congestion_control
    return Result(
        name="hybrid",
        command=command,
        kind="timed",
        seed=plan.seed,
        figures=figures(plan.model, rows),
        rows=rows,
        machine=machine(
            congestion_control=congestion_control,
            line_mbit_per_s=plan.rate_bit_per_s / 1e6,
            workers=plan.workers,
            batch_size_of_times=plan.batch_size,
            optimizer_s=optimizer_s,
        ),
    )


def _row(case: Case, side: str, whole_s: float, first_s: float, told: Mapping[str, Any]) -> dict[str, Any]:
    compute_s, steps_s = case.ratio * whole_s, told["step_s"]
    step_s = median(steps_s)
    return {
        "case": case.name,
        "side": side,
        "compute_s": compute_s,
        "forward_share": case.forward_share,
        "transfer_s": whole_s,
        "step_s": step_s,
        "step_min_s": min(steps_s),
        "step_max_s": max(steps_s),
        "cpu_s": told["cpu_s"],
        "exposed_comm_share": max(0.0, step_s - compute_s) / step_s,
        "ratio_to_floor": step_s / max(compute_s + first_s, whole_s),
    }


def figures(model: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each side's step beside DDP's, the floor's and what can be saved at all."""
    found: dict[str, float] = {}
    ddp = {row["case"]: row["step_s"] for row in rows if row["side"] == DDP}
    best = []
    for row in rows:
        case, side = row["case"], row["side"]
        found[f"exposed_comm_share_{model}_{case}_{side}"] = row["exposed_comm_share"]
        if side == DDP or case not in ddp:
            continue
        ratio = row["step_s"] / ddp[case]
        found[f"time_ratio_to_ddp_{model}_{case}_{side}"] = ratio
        possible = possible_saving(
            compute_s=row["compute_s"], forward_share=row["forward_share"], transfer_s=row["transfer_s"]
        )
        if possible:
            found[f"share_of_possible_saving_{model}_{case}_{side}"] = (1 - ratio) / possible
        if side == "cost_model":
            best.append((ratio, row["ratio_to_floor"]))
    if best:
        found["time_ratio_to_ddp_best"] = min(ratio for ratio, _ in best)
        found["time_ratio_to_ddp_worst"] = max(ratio for ratio, _ in best)
        found[f"ratio_to_floor_{model}_cost_model"] = max(floor for _, floor in best)
    return found


def main() -> None:
    """One worker: all sides one after the other; rank 0 answers with the seconds of their steps."""
    settings = settings_of(sys.argv)
    torch.set_num_threads(1)
    environment = read_environment()
    times = ModelTimes.from_plain(settings["times"])
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
                told[side] = _steps(wrapped, optimizer, settings["steps"])
                dist.barrier()
                del wrapped
        else:
            with join(model, optimizer, parse_strategy(SIDES.get(side, side))):
                told[side] = _steps(model, optimizer, settings["steps"])
        if environment.rank == 0:
            print(f"{side}: {median(told[side]['step_s']):.3f} s a step", flush=True)
    if environment.rank == 0:
        answer(told)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Any]:
    """Seconds between the beginnings of forward passes, once everything is in its place; processor time."""
    x, y = runs.batch(1, 0, timed=True)
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
