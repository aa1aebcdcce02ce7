"""`python -m benchmarks memory`: memory of workers under `bsp` and under PyTorch's DDP on gloo.

Each side has workers of its own, which train the same model for a few steps with plain SGD. Memory is the
proportional set size, in which memory that processes share is divided among them: with all imports, before
the model is made, and at the end of a step, with its gradients.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

from benchmarks.commands import MemoryOptions
from benchmarks.workers import print_progress, read_settings, run_workers, send_result
from offbeat.cli.result import Result
from offbeat.runtime.session import join
from offbeat.strategies import AllReduce

SIDES = ("ddp", "bsp")
_WIDTH = 1000  # a layer has a million parameters
_STEPS = 4


def run(options: MemoryOptions, *, command: str) -> Result:
    """Measure both sides, one after the other."""
    rows = []
    for side in SIDES:
        print_progress(f"memory of {options.workers} workers, {side}")
        settings = {"side": side, "layers": options.million_parameters}
        before_mb, mb = run_workers("benchmarks.memory", settings, options.workers)
        rows.append({"side": side, "workers": options.workers, "before_mb": before_mb, "mb": mb})
    ddp, bsp = (row["mb"] for row in rows)
    figures = {
        "pss_ratio_to_ddp": bsp / ddp,
        **{f"pss_mb_{row['side']}": row["mb"] for row in rows},
    }
    return Result(name="memory", command=command, kind="real", seed=None, figures=figures, rows=rows)


def main() -> None:
    """Train as one worker; rank 0 sends the memory of a worker before and with gradients, in MB."""
    settings = read_settings(sys.argv)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    before_mb = _mean_of_workers(_proportional_set_mb())
    layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(settings["layers"])]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    is_ddp = settings["side"] == "ddp"
    trained = torch.nn.parallel.DistributedDataParallel(model) if is_ddp else model
    with nullcontext() if is_ddp else join(model, optimizer, AllReduce()):
        for _ in range(_STEPS):
            optimizer.zero_grad()
            trained(torch.ones(1, _WIDTH)).sum().backward()
            optimizer.step()
        mb = _mean_of_workers(_proportional_set_mb())
    if dist.get_rank() == 0:
        send_result([before_mb, mb])
    dist.destroy_process_group()


def _proportional_set_mb() -> float:
    """Return this process's memory, with its part of what processes share; all of them read at once."""
    dist.barrier()
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        found = next(line for line in file if line.startswith("Pss:"))
    dist.barrier()
    return int(found.split()[1]) * 1024 / 1e6


def _mean_of_workers(number: float) -> float:
    total = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


if __name__ == "__main__":
    main()
