"""`python -m benchmarks coordinator`: what one core of coordinator carries, and how long a start takes.

A real coordinator, with its journal and a run log, serves workers that only speak its protocol
(`benchmarks.protocol_workers`): they report steps as fast as it processes them. What counts is its processor
time, its supervisor's included, divided by the steps of all workers: wall time would depend on how fast the
workers are, which share the machine. An event is reported for each step, that the gradients are ready (on a
parameter server, that the step is finished), and one with the times of ten steps of 0.1 s; where samples are
assigned, the coordinator answers with a block, on a parameter server with a permit. OFFBEAT_METRICS=0 in the
environment measures the same while the coordinator shows the job.

The start takes from the start of the coordinator's process until every worker knows all others and may begin
its first step. To compare with DDP, real workers are started by torchrun on this machine, by turns for `bsp`
and for DDP on gloo: from the start of torchrun until the last worker may begin its first step, and the same
without the imports (`benchmarks.starting`), medians of three starts.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.children import Child
from benchmarks.commands import CoordinatorOptions
from benchmarks.sampling import coordinator_pids, total_cpu_s
from benchmarks.starting import SIDES, measure_start
from benchmarks.workers import print_progress
from offbeat.cli.result import Result
from offbeat.errors import OffbeatError
from offbeat.runtime.control.configuration import CoordinatorConfiguration
from offbeat.runtime.control.environment import read_environment
from offbeat.runtime.control.journal import JournalContent, parse_journal
from offbeat.runtime.control.starting import new_job_id_and_token, start_coordinator
from offbeat.runtime.training import job_connection
from offbeat.strategies import parse_strategy

STRATEGIES: Final = ("bsp", "partial", "ssp")
WORKERS: Final = (4, 16, 64, 256, 1024)
REAL_WORKERS: Final = (4, 8, 16, 32)
_STARTS: Final = 3  # of each side, by turns
_START_S = 120.0
_SILENT_S = 300.0
_WARMUP_STEPS = 3
_STEPS_MIN = 10


def run(options: CoordinatorOptions, *, command: str) -> Result:
    """Measure every strategy with every number of workers, and then the start of real workers.

    Raises:
        ValueError: an unknown strategy.
        OffbeatError: the coordinator, a worker or the program that takes its part has failed.
    """
    strategies = options.strategy or STRATEGIES
    for strategy in strategies:
        parse_strategy(strategy)
    rows = []
    for strategy in strategies:
        for workers in options.workers or WORKERS:
            print_progress(f"{strategy}, {workers} workers")
            rows.append(_measure(strategy, workers, options.steps))
    figures: dict[str, float] = {}
    for row in rows:
        case = f"{row['strategy'].replace(':', '_').replace('=', '')}_{row['workers']}"
        for name in _FIGURES:
            figures[f"{name}_{case}"] = row[name]
    for row in rows:
        if row["strategy"] == strategies[0]:
            figures[f"start_s_{row['workers']}"] = row["start_s"]
    for workers in _real_workers(options):
        print_progress(f"start of {workers} real workers")
        starts = [(side, measure_start(side, workers)) for _ in range(_STARTS) for side in SIDES]
        for side in SIDES:
            of_side = [start for other, start in starts if other == side]
            figures[f"{side}_start_s_{workers}"] = median(start.start_s for start in of_side)
            figures[f"{side}_join_s_{workers}"] = median(start.join_s for start in of_side)
        bsp_s, ddp_s = (figures[f"{side}_start_s_{workers}"] for side in SIDES)
        figures[f"start_ratio_to_ddp_{workers}"] = bsp_s / ddp_s
    return Result(name="coordinator", command=command, kind="timed", seed=None, figures=figures, rows=rows)


_FIGURES: Final = (
    "coordinator_us_a_worker_step",
    "log_bytes_a_worker_step",
    "journal_bytes_a_worker_step",
    "snapshot_bytes",
    "memory_mb",
)


def _real_workers(options: CoordinatorOptions) -> Sequence[int]:
    return [workers for workers in options.real or REAL_WORKERS if workers]


def _measure(strategy: str, workers: int, worker_steps: int) -> dict[str, Any]:
    """Start a job, let its workers take steps, and end it; return the measurements of this case."""
    steps = max(_STEPS_MIN, -(-worker_steps // workers))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        configuration = _configuration(strategy, workers, log)
        began_s = time.monotonic()
        addresses = start_coordinator(configuration)
        with Child("benchmarks.protocol_workers", name="the workers") as child:
            settings = {
                "job": configuration.job,
                "token": configuration.token,
                "addresses": addresses,
                "strategy": strategy,
                "workers": workers,
            }
            started = _request(child, settings)
            pids = coordinator_pids()  # it serves in a child process, forked after it has answered
            start_cpu_s = total_cpu_s(pids)
            _request(child, _WARMUP_STEPS)
            before, cpu_s, log_bytes = _request(child, 1), total_cpu_s(pids), log.stat().st_size
            after = _request(child, steps)
            cpu_s, log_bytes = total_cpu_s(pids) - cpu_s, log.stat().st_size - log_bytes
            journal, memory_mb = _read_journal(pids[-1]), _memory_mb(pids[-1])
            _request(child, 0)
        done = steps * workers
        events = after["events"] - before["events"]
        wall_s = after["done_s"] - before["done_s"]
        record_bytes_mean = sum(map(len, journal.records)) / max(1, len(journal.records))
        return {
            "strategy": strategy,
            "workers": workers,
            "steps": steps,
            "coordinator_us_a_worker_step": cpu_s / done * 1e6,
            "worker_steps_per_s_of_core": done / cpu_s if cpu_s else 0.0,
            "cpu_share": cpu_s / wall_s,
            "events_a_worker_step": events / done,
            "actions_a_worker_step": (after["actions"] - before["actions"]) / done,
            "log_bytes_a_worker_step": log_bytes / done,
            "journal_bytes_a_worker_step": record_bytes_mean * events / done,
            "snapshot_bytes": len(journal.snapshot),
            "memory_mb": memory_mb,
            "start_s": started["done_s"] - began_s,
            "start_cpu_s": start_cpu_s,
        }


def _configuration(strategy: str, workers: int, log: Path) -> CoordinatorConfiguration:
    """Return what the first worker of a job passes to its coordinator."""
    job, token = new_job_id_and_token()
    policies = parse_strategy(strategy).policies(workers, _START_S, 1)
    return CoordinatorConfiguration(
        job=job,
        token=token,
        host="127.0.0.1",
        policies=(*policies, job_connection._VALIDATION, job_connection._PREEMPTION),
        log_path=str(log),
        log_header={"world": workers, "strategy": strategy},
        monitoring=read_environment().monitoring,
        silent_s=_SILENT_S,
    )


def _request(child: Child, message: Any) -> dict[str, Any]:
    child.lines.send(message)
    answer: dict[str, Any] = child.lines.receive(timeout_s=600.0)
    if "error" in answer:
        raise OffbeatError(answer["error"])
    return answer


def _read_journal(pid: int) -> JournalContent:
    """Read the valid file of the journal of a coordinator's process, which goes on meanwhile."""
    files = [
        Path(entry.path).read_bytes()
        for entry in os.scandir(f"/proc/{pid}/fd")
        if os.readlink(entry.path).startswith("/memfd:offbeat-journal")
    ]
    return max((parse_journal(data) for data in files if data), key=lambda content: content.serial)


def _memory_mb(pid: int) -> float:
    """Return the largest resident size of a process so far, in MB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024 / 1e6
