"""Time of a step where gradients come in different orders: `python -m benchmarks order`.

Each worker is on a host of its own (`benchmarks.namespaces`) and waits instead of computing
(`benchmarks.timed`). Three models, with about 100 MB of gradients each: `resnet50`, of which all workers use
all layers in the same order; `left_out`, of whose layers each worker leaves those of the other workers out;
`shuffled`, whose layers each worker uses in an order of its own. Three ways: `bsp`; `static`, which is `bsp`
with buckets in the order of the plan and no prediction of unused parameters; and PyTorch's DDP with
`find_unused_parameters`. Blocks of steps of all ways alternate in the same processes.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import runs
from benchmarks.commands import OrderOptions
from benchmarks.gloo import GlooSide
from benchmarks.namespaces import hosts
from benchmarks.timed import LayerTimes, ModelTimes, TimedModel
from benchmarks.workers import print_progress, read_settings, run_workers, send_result
from offbeat.cli.result import Result, machine
from offbeat.runtime.averaging.unused_parameters import UnusedParameters
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.runtime.control.environment import read_environment
from offbeat.runtime.launch import find_free_port
from offbeat.runtime.session import join
from offbeat.strategies import AllReduce

MODELS: Final = ("resnet50", "left_out", "shuffled")
WAYS: Final = ("bsp", "static", "ddp")
_COMMON_LAYERS, _OWN_LAYERS, _WIDTH = 16, 2, 1024
_WARM_UP_STEPS = 3
_DEADLINE_S = 600.0
_EARLY_S = 800e-6  # how early messages may be after a pause; steps take at least a hundred times as long


class OrderRun(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the workers for one model.

    Attributes:
        times: of ResNet-50's layers.
        step_s: both passes together.
        blocks: of each way.
        steps: of a worker in a block, after the warm-up.
        address: of the first worker's host.
        interface: of each host.
        port: of the process group.
    """

    model: str
    times: ModelTimes
    step_s: float
    blocks: int
    steps: int
    seed: int
    address: str
    interface: str
    port: int


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the step times, and the ratios of `bsp` to the other ways."""
    step_s = {(row["model"], row["way"]): row["step_s"] for row in rows}
    found = {f"step_s_{way}_{model}": time_s for (model, way), time_s in step_s.items()}
    for (model, way), time_s in step_s.items():
        if way != "bsp":
            found[f"bsp_to_{way}_ratio_{model}"] = step_s[model, "bsp"] / time_s
    return found


def run(options: OrderOptions, *, command: str) -> Result:
    """Measure all ways with all models; needs root.

    Raises:
        OffbeatError: no root, or a worker failed.
    """
    alone = runs.measure_layers("resnet50", options.batch_size, options.seed)
    rows = []
    with hosts(options.workers, rate_bit_per_s=options.rate_mbit * 1_000_000, early_s=_EARLY_S) as created:
        for model in MODELS:
            print_progress(model)
            settings = OrderRun(
                model=model,
                times=alone.lasting(options.step_ms / 1000),
                step_s=options.step_ms / 1000,
                blocks=options.blocks,
                steps=options.steps,
                seed=options.seed,
                address=created[0].address,
                interface=created[0].interface,
                port=find_free_port(),
            )
            found = run_workers(
                "benchmarks.order",
                msgspec.to_builtins(settings),
                options.workers,
                prefix=[host.prefix for host in created],
                master_addr=created[0].address,
                timeout_s=_DEADLINE_S * options.blocks,
            )
            rows += [
                {"model": model, "way": way, "step_s": median(times_s), "min_s": min(times_s)}
                for way, times_s in found.items()
            ]
    return Result(
        name="order",
        command=command,
        kind="timed",
        seed=options.seed,
        figures=figures(rows),
        rows=rows,
        machine=machine(
            workers=options.workers,
            batch_size=options.batch_size,
            line_mbit_per_s=options.rate_mbit,
            step_ms=options.step_ms,
        ),
    )


def main() -> None:
    """Run blocks of all ways in alternation, as one worker; rank 0 sends its steps' times."""
    settings = msgspec.convert(read_settings(sys.argv), OrderRun)
    torch.set_num_threads(1)
    environment = read_environment()
    times_s: dict[str, list[float]] = {way: [] for way in WAYS}
    with GlooSide(
        environment.rank,
        environment.world,
        settings.address,
        settings.port,
        interface=settings.interface,
        limit_s=_DEADLINE_S,
    ):
        for block in range(settings.blocks):
            for way in WAYS[:: -1 if block % 2 else 1]:
                model = build(settings, environment.rank, environment.world)
                block_s = _measure_block(settings, way, model)
                times_s[way] += block_s
                gc.collect()  # a closed session's memory is large, and in reference cycles
                if environment.rank == 0:
                    print(f"{settings.model}, {way}: {median(block_s):.3f} s a step", flush=True)
        if environment.rank == 0:
            send_result(times_s)


def build(settings: OrderRun, rank: int, workers: int) -> TimedModel:
    """Return a worker's model: the same on all of them, but for the layers that it uses, and their order."""
    if settings.model == "resnet50":
        model = runs.network("resnet50", settings.times, settings.seed)
        assert isinstance(model, TimedModel)
        return model
    names = [str(number) for number in range(_COMMON_LAYERS + _OWN_LAYERS * workers)]
    used = names
    if settings.model == "left_out":
        first = _COMMON_LAYERS + _OWN_LAYERS * rank
        used = names[:_COMMON_LAYERS] + names[first : first + _OWN_LAYERS]
    each_s = settings.step_s / len(used)
    times = ModelTimes(
        layers=tuple(LayerTimes(name=one, forward_s=each_s / 3, backward_s=each_s * 2 / 3) for one in names)
    )
    layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in names))
    model = TimedModel(layers, times, classes=runs.CLASSES, seed=settings.seed)
    if settings.model == "shuffled":
        random.Random(f"{settings.seed} {rank}").shuffle(used)
    model.set_order(used)
    return model


def _measure_block(settings: OrderRun, way: str, model: TimedModel) -> list[float]:
    """Return the times between the ends of steps."""
    optimizer = runs.optimizer_of(model)
    batch = runs.batch(1, settings.seed, timed=True)
    if way == "ddp":
        leaves_out = settings.model == "left_out"
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=leaves_out
        )
        return _steps(lambda: runs.step(wrapped, optimizer, *batch), settings)
    is_static = way == "static"
    with (
        patch.object(LinkExchange, "keeps_order", True) if is_static else nullcontext(),
        patch.object(UnusedParameters, "predict", return_value=()) if is_static else nullcontext(),
        join(model, optimizer, AllReduce()),
    ):
        return _steps(lambda: runs.step(model, optimizer, *batch), settings)


def _steps(step: Callable[[], None], settings: OrderRun) -> list[float]:
    ends_s = []
    for _ in range(_WARM_UP_STEPS + settings.steps):
        step()
        ends_s.append(time.perf_counter())
    return [after - before for before, after in pairwise(ends_s[_WARM_UP_STEPS - 1 :])]


if __name__ == "__main__":
    main()
