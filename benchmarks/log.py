"""`python -m benchmarks log`: cost of reporting every step to the coordinator and writing the run log.

Two sessions train the same model in the same workers in alternating blocks, one with a run log and one
without. On a machine whose cores are all busy, the cost of recording is its processor time. So this is
measured: the coordinator's with the log, and the workers' for reporting.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks import runs
from benchmarks.commands import LogOptions
from benchmarks.sampling import coordinator_pids, total_cpu_s
from benchmarks.workers import read_settings, run_workers, send_result
from offbeat.cli.result import Result
from offbeat.events import Ready, StepTimes
from offbeat.runtime.session import Session, join
from offbeat.strategies import AllReduce

BATCH_SIZE = 32
_TOLD = 300


def run(options: LogOptions, *, command: str) -> Result:
    """Measure with and without a run log, with `cnn2`."""
    workers, blocks, steps, seed = options.workers, options.blocks, options.steps, options.seed
    with tempfile.TemporaryDirectory() as folder:
        settings = {"blocks": blocks, "steps": steps, "seed": seed, "log": str(Path(folder) / "log.jsonl")}
        found = run_workers("benchmarks.log", settings, workers)
        log_bytes = (Path(folder) / "log.jsonl").stat().st_size
    recorded, plain = (median(found["step_s"][way]) for way in ("recorded", "plain"))
    report_s = found["report_cpu_s"]
    coordinator_s = found["coordinator_cpu_s"]
    share = (workers * report_s + coordinator_s) / (workers * found["step_cpu_s"])
    figures = {
        "recording_share_of_step": share,
        "step_ratio_p50": recorded / plain,
        "coordinator_cpu_us_a_step": coordinator_s * 1e6,
        "worker_cpu_us_a_step": report_s * 1e6,
        "log_bytes_a_step": log_bytes / ((blocks + 1) * steps),
    }
    rows = [
        {
            "way": way,
            "steps": blocks * steps,
            "step_s_p50": median(times_s),
            "step_s_min": min(times_s),
            "step_s_max": max(times_s),
        }
        for way, times_s in found["step_s"].items()
    ]
    return Result(name="log", command=command, kind="real", seed=seed, figures=figures, rows=rows)


def main() -> None:
    """Train with and without a log in alternation, as one worker; rank 0 sends the result."""
    settings = read_settings(sys.argv)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    x, y = runs.batch(BATCH_SIZE, settings["seed"] * 1000 + dist.get_rank(), timed=False)
    models = [runs.network("cnn2", None, settings["seed"]) for _ in ("recorded", "plain")]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    with (
        join(models[0], optimizers[0], AllReduce(), run_log=settings["log"]) as session,
        join(models[1], optimizers[1], AllReduce()),
    ):
        coordinators = coordinator_pids()
        step_s: dict[str, list[float]] = {"recorded": [], "plain": []}
        coordinator_cpu_s = cpu_s = 0.0
        for block in range(settings["blocks"] + 1):
            for way in (0, 1) if block % 2 else (1, 0):
                dist.barrier()
                before_s = total_cpu_s(coordinators)
                began_cpu_s = time.process_time()
                for _ in range(settings["steps"]):
                    began_s = time.perf_counter()
                    runs.step(models[way], optimizers[way], x, y)
                    if block:
                        step_s["plain" if way else "recorded"].append(time.perf_counter() - began_s)
                if block and not way:
                    cpu_s += time.process_time() - began_cpu_s
                    coordinator_cpu_s += total_cpu_s(coordinators) - before_s
        steps = settings["blocks"] * settings["steps"]
        report_cpu_s = _report_cpu_s(session)  # in all workers: in lockstep all must have the same rounds
        if session.worker == 0:
            result = {
                "step_s": step_s,
                "step_cpu_s": cpu_s / steps,
                "coordinator_cpu_s": coordinator_cpu_s / steps,
                "report_cpu_s": report_cpu_s,
            }
            send_result(result)
        dist.barrier()
    dist.destroy_process_group()


def _report_cpu_s(session: Session) -> float:
    """Return the processor time of reporting one step to the coordinator, the links' thread included."""
    job = session._job
    assert job.coordinator is not None
    times = StepTimes(
        step=session.step,
        batch_s=0.0,
        compute_s=0.0,
        apply_s=0.0,
        communicate_s=0.0,
        wait_s=0.0,
        other_s=0.0,
        wall_s=0.0,
        samples=0,
    )
    began_s = time.process_time()
    for number in range(_TOLD):
        round_ = session._synchronizer.round + number
        job.queue_times(times)
        job.send_event(
            Ready(
                now_s=0.0,
                worker=session.worker,
                generation=0,
                epoch=0,
                step=session.step,
                round=round_,
                compute_s=0.0,
                samples=0,
                blocks=(),
            )
        )
        job.coordinator.endpoint.flush(1.0)
    return (time.process_time() - began_s) / _TOLD


if __name__ == "__main__":
    main()
