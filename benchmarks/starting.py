"""The start of real workers by torchrun on one machine: of a job of `bsp`, or of DDP on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat.errors import OffbeatError
from offbeat.runtime.processes import child

SIDES: Final = ("bsp", "ddp")
_LIMIT_S = 300.0
_MODEL = (100, 10)  # inputs and outputs of a linear layer


@dataclass(frozen=True, kw_only=True)
class Start:
    """How long a start took.

    Attributes:
        start_s: from the start of torchrun until the last worker could begin its first step, in seconds.
        join_s: the same from when the last worker had imported torch, the model and the library.
    """

    start_s: float
    join_s: float


def measure_start(side: str, workers: int) -> Start:
    """Start workers by torchrun.

    Args:
        side: one of `SIDES`.
        workers: number of workers, all on this machine.

    Raises:
        OffbeatError: a worker failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"),
            *("--nproc-per-node", str(workers)),
            *child.module_command("benchmarks.starting", side, folder),
        ]
        began_s = time.monotonic()
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        if ended.returncode:
            raise OffbeatError(f"the start of {workers} workers failed: {ended.stderr[-2000:]}")
        times = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    if len(times) != workers:
        raise OffbeatError(f"expected the times of {workers} workers, got {len(times)}")
    ready_s = max(one["ready_s"] for one in times)
    return Start(start_s=ready_s - began_s, join_s=ready_s - max(one["imported_s"] for one in times))


def main() -> None:
    """Join a job as one worker, note when it could begin its first step, and leave."""
    side, folder = sys.argv[1:]
    times = (_start_ddp if side == "ddp" else _start_bsp)()
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(times))


def _start_ddp() -> dict[str, float]:
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model = nn.Linear(*_MODEL)
    imported_s = time.monotonic()
    dist.init_process_group("gloo")
    DistributedDataParallel(model)
    ready_s = time.monotonic()
    dist.destroy_process_group()
    return {"imported_s": imported_s, "ready_s": ready_s}


def _start_bsp() -> dict[str, float]:
    import torch

    from offbeat.runtime.session import join
    from offbeat.strategies import AllReduce

    model = torch.nn.Linear(*_MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    imported_s = time.monotonic()
    with join(model, optimizer, AllReduce()):
        ready_s = time.monotonic()
    return {"imported_s": imported_s, "ready_s": ready_s}


if __name__ == "__main__":
    main()
