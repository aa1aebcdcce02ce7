"""`python -m benchmarks simulator`: speed of the simulator with many workers, and its accuracy with few.

The speed is the processor time of one run of `partial` with many workers. For the accuracy, real workers
train a tiny model, wait for the compute time of a step, and are slowed by injection; the compute times in the
run log are then simulated under the same policies, and both runs are compared.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.commands import SimulatorOptions
from benchmarks.workers import read_settings, run_workers, send_result
from offbeat.cli.result import Result
from offbeat.events import Action, Event, Group
from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.membership.partial_groups import PartialGroups
from offbeat.runtime.session import join
from offbeat.simulator.core.times import JitteredTimes
from offbeat.simulator.training import setting_from_log
from offbeat.simulator.training.cluster import SimulatedCluster
from offbeat.simulator.training.setting import SimulationSetting
from offbeat.strategies import PartialAllReduce
from offbeat.wire.log_file import RunRecord, read_log
from offbeat.wire.replay import build_policies

# Slow for six steps: four until the worker is excluded, two outside; it returns during a step of the group.
SLOW = "1:2.25@burst=6/1000"
_STRATEGY = PartialAllReduce(k=1.5, n_profile=2, limit=3, shards="equal")  # simulated workers have no samples
_BATCH_SIZE = 2
_JOB_STEPS, _COMPUTE_S = 60, 0.05  # of each worker of a real job; of a step without slowness


def run(options: SimulatorOptions, *, command: str) -> Result:
    """Simulate many workers once, and simulate real jobs of 4 workers, each after it has run."""
    workers, steps, seed = options.workers, options.steps, options.seed
    cpu_s, calls = simulate_many(workers, steps, seed)
    rows = []
    for _ in range(options.jobs):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log.jsonl"
            settings = {"log": str(log), "steps": _JOB_STEPS, "compute_s": _COMPUTE_S}
            run_workers("benchmarks.simulator", settings, 4)
            rows.append(compare(read_log(log), seed))
    ratios = [row["simulated_s"] / row["real_s"] for row in rows]
    figures = {
        f"cpu_s_{workers}x{steps}": cpu_s,
        "calls_count_a_round": calls,
        "simulated_to_real_ratio_p50": median(ratios),
        "simulated_to_real_ratio_min": min(ratios),
        "simulated_to_real_ratio_max": max(ratios),
        "same_members_share": _share(row["has_same_members"] for row in rows),
        "same_members_and_steps_share": _share(row["steps_apart_max"] == 0 for row in rows),
    }
    return Result(name="simulator", command=command, kind="timed", seed=seed, figures=figures, rows=rows)


def simulate_many(workers: int, steps: int, seed: int) -> tuple[float, float]:
    """Simulate `partial`; return the processor time in seconds, and the engine's calls per round."""
    setting = SimulationSetting(world=workers, steps=steps, times=JitteredTimes(), seed=seed)
    cluster = SimulatedCluster(
        setting, lambda: [Assembly(workers, accepts_late_joiners=True), PartialGroups(workers)]
    )
    began_s = time.process_time()
    cluster.run()
    return time.process_time() - began_s, cluster.engine.calls_made / steps


def compare(log: RunRecord, seed: int = 0) -> dict[str, Any]:
    """Simulate the job of a run log; return how well the two runs agree."""
    setting = setting_from_log.setting_from_log(log.entries, seed=seed)
    cluster = SimulatedCluster(setting, lambda: build_policies(log.header), keeps_log=True)
    cluster.run()
    simulated: list[Event | Action] = []
    for event, actions in cluster.log:
        simulated += [event, *actions]
    real_groups, groups = (_groups(entries) for entries in (log.entries, simulated))
    is_alike = [one[1:] for one in real_groups] == [one[1:] for one in groups]
    apart = [abs(one[0] - other[0]) for one, other in zip(real_groups, groups, strict=False)]
    return {
        "real_s": setting_from_log.job_duration_s(log.entries),
        "simulated_s": setting_from_log.job_duration_s(simulated),
        "has_same_members": is_alike,
        "steps_apart_max": max(apart) if is_alike else None,
        "real_groups": _shown(real_groups),
        "simulated_groups": _shown(groups),
    }


def train(log: str, steps: int, compute_s: float) -> int:
    """Train as one worker of a real job, with a log for `compare`; return the worker's id."""
    os.environ |= {"OFFBEAT_SLOW": SLOW, "OFFBEAT_RUN_LOG": log}
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with join(model, optimizer, _STRATEGY) as session:
        samples = session.world * _BATCH_SIZE * steps
        data = TensorDataset(torch.zeros(samples, 8), torch.zeros(samples, 4))
        for _ in session.epochs(1):
            for x, y in session.batches(data, _BATCH_SIZE):
                optimizer.zero_grad()
                out = model(x)
                time.sleep(compute_s)
                nn.functional.mse_loss(out, y).backward()
                optimizer.step()
    return session.worker


def _groups(entries: Sequence[Event | Action]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    decided = setting_from_log.decisions_from_log(entries)
    return [(one.step, one.members, one.joining) for one in decided if isinstance(one, Group)]


def _shown(groups: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> str:
    return ", ".join(f"{' '.join(map(str, members))} from step {step}" for step, members, _ in groups)


def _share(holds: Any) -> float:
    held = [bool(one) for one in holds]
    return sum(held) / len(held)


def main() -> None:
    """Run one worker of a real job."""
    if train(**read_settings(sys.argv)) == 0:
        send_result("done")  # the results are in the log


if __name__ == "__main__":
    main()
