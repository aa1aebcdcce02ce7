"""`python -m benchmarks overhead`: step time of `bsp` against PyTorch's DDP on gloo, in alternating blocks.

The same workers train the same model from the same seed on the same data in both ways, in alternating blocks
of one run, so that variations of the machine's speed affect both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import runs
from benchmarks.commands import OverheadOptions
from benchmarks.workers import read_settings, run_workers, send_result
from offbeat.cli.result import Result
from offbeat.runtime.session import join
from offbeat.strategies import AllReduce

PLAN = {"cnn2": (30, 20), "resnet18": (16, 2)}  # blocks per side, steps per block
Sides = dict[str, Callable[[], None]]


def run(options: OverheadOptions, *, command: str, models: Sequence[str] = ("cnn2", "resnet18")) -> Result:
    """Measure the models, keys of `PLAN`, one after the other."""
    rows, figures = [], {}
    for model in models:
        blocks, steps = PLAN[model]
        settings = {
            "model": model,
            "blocks": max(3, round(blocks * options.scale)),
            "steps": steps,
            "batch_size": options.batch_size,
            "seed": options.seed,
        }
        times_s = run_workers("benchmarks.overhead", settings, options.workers)
        ratios = [
            median(ours) / median(ddp) for ours, ddp in zip(times_s["bsp"], times_s["ddp"], strict=True)
        ]
        flat = {side: [t for block in blocks_s for t in block] for side, blocks_s in times_s.items()}
        figures[f"step_ratio_p50_{model}"] = median(flat["bsp"]) / median(flat["ddp"])
        for side, all_s in flat.items():
            rows.append(
                {
                    "model": model,
                    "side": side,
                    "workers": options.workers,
                    "batch_size": options.batch_size,
                    "steps": len(all_s),
                    "step_s_p50": median(all_s),
                    "step_s_mean": sum(all_s) / len(all_s),
                    "block_ratio_p50": median(ratios) if side == "bsp" else None,
                    "block_ratio_min": min(ratios) if side == "bsp" else None,
                    "block_ratio_max": max(ratios) if side == "bsp" else None,
                }
            )
    return Result(
        name="overhead", command=command, kind="real", seed=options.seed, figures=figures, rows=rows
    )


def main() -> None:
    """Train both ways in alternation, as one worker; rank 0 sends the step times of each block."""
    settings = read_settings(sys.argv)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    x, y = runs.batch(settings["batch_size"], settings["seed"] * 1000 + rank, timed=False)
    models = [runs.network(settings["model"], None, settings["seed"]) for _ in range(2)]
    wrapped = torch.nn.parallel.DistributedDataParallel(models[0])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    with join(models[1], optimizers[1], AllReduce()):
        sides: Sides = {
            "ddp": lambda: _step(wrapped, optimizers[0], x, y),
            "bsp": lambda: _step(models[1], optimizers[1], x, y),
        }
        times_s = _measure(sides, settings["blocks"], settings["steps"], settings["model"])
    if rank == 0:
        send_result(times_s)
    dist.destroy_process_group()


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()  # frees this side's gradients during the other side's block


def _measure(sides: Sides, blocks: int, steps: int, model: str) -> dict[str, list[list[float]]]:
    """Return the seconds of each step; each side's first block warms up, and the order alternates."""
    times_s: dict[str, list[list[float]]] = {side: [] for side in sides}
    for block in range(blocks + 1):
        for side in list(sides)[:: 1 if block % 2 else -1]:
            dist.barrier()
            block_s = []
            for _ in range(steps):
                began_s = time.perf_counter()
                sides[side]()
                block_s.append(time.perf_counter() - began_s)
            if block:
                times_s[side].append(block_s)
        if block % 5 == 0 and dist.get_rank() == 0:
            print(f"{model}: block {block} of {blocks}", flush=True)
    return times_s


if __name__ == "__main__":
    main()
