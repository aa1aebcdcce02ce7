"""`python -m benchmarks gpu`: steps of workers that share an accelerator, against PyTorch's DDP on gloo.

NCCL connects no two workers of one GPU, so gloo is what DDP has there, as on hosts without NCCL. Both train
the same model from the same seed in alternating blocks of one run; a third side computes without any
exchange. Where each worker has a GPU of its own, `bsp` may use NCCL. With `--rate-mbit`, steps are measured
between network namespaces with lines of that rate, which stand for hosts; their workers share the GPU, and
figures are named by the rate.

`staging_share` is the time of a worker's copies between device and host, when all workers copy at once and do
nothing else, as a share of its step: the most that staging can cost, as copies overlap with the backward
pass. `host_memory_ratio` is the largest memory of the host that a worker has had for exchanges at a time,
pinned where the model is on an accelerator, in multiples of its gradients.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks import runs
from benchmarks.commands import GpuOptions
from benchmarks.namespaces import Host, hosts
from benchmarks.workers import print_progress, read_settings, run_workers, send_result
from offbeat.cli.result import Result, machine
from offbeat.errors import OffbeatError
from offbeat.runtime.averaging.synchronizer import GroupSynchronizer
from offbeat.runtime.control.environment import SLOW_VARIABLE
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

STRATEGIES = ("bsp", "partial:shards=equal", "hybrid")
SLOWDOWN = 4
_STEPS, _SLOW_STEPS, _COPIES = 10, 60, 20


def run(options: GpuOptions, *, command: str, device: str = "") -> Result:
    """Measure each strategy beside DDP; on one host also `partial` beside `bsp` with one slow worker.

    Args:
        options: of the command.
        command: for the result.
        device: type of the device; torch's accelerator if empty.

    Raises:
        OffbeatError: there is no accelerator, or this machine cannot make hosts with lines.
    """
    if not device:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise OffbeatError(
                "torch finds no accelerator here: run this benchmark on a machine that has one"
            )
        device = accelerator.type
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for rate_mbit in options.rate_mbit or ():
        with hosts(options.workers, rate_bit_per_s=rate_mbit * 1_000_000) as made:
            found, more = _compare(options, device, made, f"_{rate_mbit}mbit")
        figures |= found
        rows += more
    if not options.rate_mbit:
        figures, rows = _compare(options, device, None, "")
        bsp_s, partial_s = (
            _run_workers(options, device, strategy, None, blocks=0)["step_s"]["ours"][0]
            for strategy in STRATEGIES[:2]
        )
        figures["ratio_partial_to_bsp_one_slow"] = partial_s / bsp_s
        figures["step_ms_partial_one_slow"] = partial_s * 1e3
    return Result(
        name="gpu",
        command=command,
        kind="real",
        seed=options.seed,
        figures=figures,
        rows=rows,
        machine=machine(device=device),
    )


def _compare(
    options: GpuOptions, device: str, made: Sequence[Host] | None, suffix: str
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return figures, whose names end with `suffix`, and rows of all strategies.

    Args:
        made: a host for each worker; None to let all be on this one.
    """
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        name = strategy.partition(":")[0]
        found = _run_workers(options, device, strategy, made, blocks=options.blocks)
        step_s = {side: median(found["step_s"][side]) for side in found["step_s"]}
        figures[f"ratio_to_ddp_gloo_{name}{suffix}"] = step_s["ours"] / step_s["ddp"]
        figures[f"step_ms_{name}{suffix}"] = step_s["ours"] * 1e3
        figures[f"staging_share_{name}{suffix}"] = found["staging_s"] / step_s["ours"]
        figures[f"host_memory_ratio_{name}{suffix}"] = found["host_memory_ratio"]
        figures.setdefault(f"step_ms_ddp_gloo{suffix}", step_s["ddp"] * 1e3)
        figures.setdefault(f"step_ms_compute{suffix}", step_s["compute"] * 1e3)
        figures.setdefault(f"staging_ms{suffix}", found["staging_s"] * 1e3)
        rate_mbit = None if made is None else (made[0].rate_bit_per_s or 0) / 1e6
        rows += [
            {"rate_mbit": rate_mbit, "strategy": name, "side": side, "step_ms": value * 1e3}
            for side, values in found["step_s"].items()
            for value in values
        ]
    return figures, rows


def _run_workers(
    options: GpuOptions, device: str, strategy: str, made: Sequence[Host] | None, *, blocks: int
) -> Any:
    """Return the result of rank 0; without blocks, the last worker is slow and nothing is compared."""
    lines = "" if made is None else f", lines of {(made[0].rate_bit_per_s or 0) / 1e6:g} Mbit/s"
    print_progress(f"{strategy}{lines}{'' if blocks else ', one worker slow'}")
    settings = {
        "device": device,
        "blocks": blocks,
        "strategy": strategy,
        "model": options.model,
        "batch_size": options.batch_size,
        "seed": options.seed,
    }
    env = {} if blocks else {SLOW_VARIABLE: f"{options.workers - 1}:{SLOWDOWN}"}
    if made is None:
        return run_workers("benchmarks.gpu", settings, options.workers, env=env)
    return run_workers(
        "benchmarks.gpu",
        settings,
        options.workers,
        env={**env, "GLOO_SOCKET_IFNAME": made[0].interface},
        prefix=[host.prefix for host in made],
        master_addr=made[0].address,
    )


def main() -> None:
    """Train as one worker; rank 0 sends the mean times of a step by side and block."""
    settings = read_settings(sys.argv)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    device = torch.device(settings["device"])
    if device.type != "cpu":
        device = torch.device(device.type, rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    x, y = (
        one.to(device)
        for one in runs.batch(settings["batch_size"], settings["seed"] * 1000 + rank, timed=False)
    )

    def stepping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    models = [runs.network(settings["model"], None, settings["seed"]).to(device) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    with join(models[0], optimizers[0], parse_strategy(settings["strategy"])) as session:
        sides = {"ours": stepping(models[0], optimizers[0])}
        if settings["blocks"]:
            ddp = nn.parallel.DistributedDataParallel(models[1])
            sides["ddp"] = stepping(ddp, optimizers[1])
            sides["compute"] = stepping(models[2], optimizers[2])
            step_s = _measure(sides, settings["blocks"], session.refresh, device)
        else:
            for _ in range(_SLOW_STEPS):  # finds the slow worker
                sides["ours"]()
            step_s = {"ours": [_mean_step_s(sides["ours"], _SLOW_STEPS, lambda: None, device)]}
        synchronizer = session._synchronizer
        assert isinstance(synchronizer, GroupSynchronizer)
        assert synchronizer.binding is not None
        host_bytes = synchronizer.binding.memory.peak_bytes
    gradient_bytes = sum(one.nbytes for one in models[0].parameters())
    staging_s = _staging_s(sum(one.numel() for one in models[0].parameters()), device)
    if rank == 0:
        ratio = host_bytes / gradient_bytes
        send_result({"step_s": step_s, "staging_s": staging_s, "host_memory_ratio": ratio})
    dist.barrier()
    dist.destroy_process_group()


def _measure(
    sides: dict[str, Callable[[], None]], blocks: int, finish: Callable[[], None], device: torch.device
) -> dict[str, list[float]]:
    """Return by side the mean seconds of a step in each block; the first block of each side warms up.

    Args:
        sides: each does a step.
        blocks: measured blocks of each side.
        finish: completes the last step of `ours`, part of which may be deferred.
        device: of the models.
    """
    step_s: dict[str, list[float]] = {side: [] for side in sides}
    for block in range(blocks + 1):
        for side in list(sides)[:: 1 if block % 2 else -1]:
            dist.barrier()
            mean_s = _mean_step_s(sides[side], _STEPS, finish, device)
            if block:
                step_s[side].append(mean_s)
    return step_s


def _mean_step_s(
    step: Callable[[], None], steps: int, finish: Callable[[], None], device: torch.device
) -> float:
    _synchronize(device)
    began_s = time.perf_counter()
    for _ in range(steps):
        step()
    finish()
    _synchronize(device)
    return (time.perf_counter() - began_s) / steps


def _staging_s(elements: int, device: torch.device) -> float:
    """Return the seconds to copy gradients of that many elements to pinned memory and back."""
    on_device = torch.zeros(elements, device=device)
    on_host = torch.zeros(elements, pin_memory=device.type != "cpu")
    _synchronize(device)
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(_COPIES):
        on_host.copy_(on_device, non_blocking=True)
        on_device.copy_(on_host, non_blocking=True)
    _synchronize(device)
    return (time.perf_counter() - began_s) / _COPIES


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    main()
