"""Workers of a job are killed and stopped at random, and replaced.

The model counts: it has one number per sample, changed by one whenever the sample is used. So at the end
every replica shows how often each sample was used, by any worker; where workers average their models, the run
log shows it. Steps wait for a given time, so that two
cores can stand for one machine per worker.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, all the same
from torch.utils.data import TensorDataset

from benchmarks.commands import ChaosOptions, RayChaosOptions
from offbeat.cli.result import Result
from offbeat.errors import OffbeatError
from offbeat.events import AssignBlocks, Joined, Lost, Ready
from offbeat.runtime.control import environment
from offbeat.runtime.processes import child
from offbeat.runtime.session import Session, join
from offbeat.strategies import parse_strategy
from offbeat.strategies.model_averaging import AveragesModels
from offbeat.wire.log_file import read_log

_ENDS_S = 120.0  # added to the time limit of a job


@dataclass(frozen=True, kw_only=True)
class ChaosSettings:
    """Settings of the job, for every worker.

    Attributes:
        step_ms: compute time of a step.
        samples: per epoch.
    """

    strategy: str
    step_ms: float
    batch_size: int
    samples: int
    epochs: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One injected fault.

    Attributes:
        kind: "kill" or "stop"; what is killed, where that is not only a worker.
        worker: its id; None where no worker is meant.
        at_s, until_s: monotonic time of this machine; equal for a kill.
    """

    kind: str
    worker: int | None
    at_s: float
    until_s: float


@dataclass(frozen=True, kw_only=True)
class ChaosTrial:
    """Measurements of one run of the job.

    Attributes:
        uses: how often each sample was used, by the replica of each worker that finished; or by the run log,
            once, where workers average their models.
        began_s, ended_s: the first and the last Ready event.
        alive_s: seconds in which workers lived and ran in that time, summed over workers.
        recover_s: for each fault, the time until a round that began after it was complete.
    """

    uses: list[list[float]]
    began_s: float
    ended_s: float
    alive_s: float
    faults: list[Fault]
    recover_s: list[float]


def run(options: ChaosOptions, *, command: str) -> Result:
    """Run the job without faults for a fifth of the time, then with faults.

    A fault follows the last one after 0.5 to 1.5 times the mean time between two.

    Raises:
        ValueError: an unknown strategy.
        OffbeatError: a job failed or did not end.
    """

    def trial(settings: ChaosSettings, chance: random.Random | None) -> ChaosTrial:
        with tempfile.TemporaryDirectory() as folder:
            job = _Job(settings, options.workers, Path(folder))
            with job:
                job.run(chance, every_s=options.every_s, stop_s=options.stop_s)
            return job.trial()

    return compare_trials("chaos", options, trial, command=command)


def compare_trials(
    name: str,
    options: ChaosOptions | RayChaosOptions,
    trial: Callable[[ChaosSettings, random.Random | None], ChaosTrial],
    *,
    command: str,
) -> Result:
    """Run a trial without faults for a fifth of the time, then one with faults; return what they differ in.

    Args:
        name: of the benchmark.
        options: of the benchmark.
        trial: runs a job, with faults where it gets random numbers for them.
        command: the command line.

    Raises:
        ValueError: an unknown strategy.
        OffbeatError: the replicas of a job differ, or no fault was injected.
    """
    parse_strategy(options.strategy)
    duration_s, step_ms = 60 * options.minutes, options.step_ms
    steps_an_epoch = max(1, round(10.0 / (step_ms / 1000)))
    epoch_s = steps_an_epoch * step_ms / 1000
    settings = ChaosSettings(
        strategy=options.strategy,
        step_ms=step_ms,
        batch_size=options.batch_size,
        samples=steps_an_epoch * options.workers * options.batch_size,
        epochs=max(2, round(duration_s / epoch_s)),
        seed=options.seed,
    )
    calm = trial(replace(settings, epochs=max(2, round(duration_s / 5 / epoch_s))), None)
    faulty = trial(settings, random.Random(f"chaos {options.seed}"))
    if not faulty.faults:
        raise OffbeatError(
            f"no fault was injected in {options.minutes:g} minutes: expected more --minutes or a smaller "
            "--every-s"
        )
    rates = {name: _used(one) / one.alive_s for name, one in {"calm": calm, "wild": faulty}.items()}
    wrong = [(max(0.0, settings.epochs - uses), max(0.0, uses - settings.epochs)) for uses in faulty.uses[0]]
    return Result(
        name=name,
        command=command,
        kind="timed",
        seed=options.seed,
        figures={
            "throughput_kept": rates["wild"] / rates["calm"],
            "samples_lost": sum(lost for lost, _ in wrong),
            "samples_doubled": sum(doubled for _, doubled in wrong),
            "recover_s_p50": median(faulty.recover_s),
            "recover_s_max": max(faulty.recover_s),
            "strikes_count": len(faulty.faults),
        },
        rows=[
            {
                "kind": fault.kind,
                "worker": fault.worker,
                "after_s": fault.at_s - faulty.began_s,
                "recover_s": recover_s,
            }
            for fault, recover_s in zip(faulty.faults, faulty.recover_s, strict=True)
        ]
        + [
            {
                "kind": f"{name} run",
                "worker": None,
                "after_s": one.ended_s - one.began_s,
                "samples_per_s": _used(one) / (one.ended_s - one.began_s),
                "samples_per_s_and_live_worker": rates[name],
            }
            for name, one in {"calm": calm, "wild": faulty}.items()
        ],
    )


def _used(trial: ChaosTrial) -> float:
    _check_equal(trial.uses)
    return sum(trial.uses[0])


def _check_equal(replicas: Sequence[list[float]]) -> None:
    if any(replica != replicas[0] for replica in replicas):
        raise OffbeatError("the workers' replicas differ in the end: see the run log")


@dataclass
class _Process:
    worker: int
    process: subprocess.Popen[bytes]
    result_path: Path
    is_stopped: bool = False
    is_killed: bool = False


@dataclass
class _Job:
    """One job and its processes; this process hosts the store, so that rank 0 may be killed as well."""

    settings: ChaosSettings
    workers: int
    folder: Path
    faults: list[Fault] = field(default_factory=list)

    def __enter__(self) -> _Job:
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._processes: list[_Process] = []
        for rank in range(self.workers):
            self._start({"RANK": str(rank), "WORLD_SIZE": str(self.workers)})
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._processes:
            one.process.kill()
            one.process.wait()

    def _start(self, rank_env: Mapping[str, str]) -> None:
        worker = len(self._processes)
        result_path = self.folder / f"{worker}.json"
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            environment.RUN_LOG_VARIABLE: str(self.folder / "log.jsonl"),
            environment.SEED_VARIABLE: str(self.settings.seed),
            **rank_env,
        }
        arguments = [json.dumps(vars(self.settings)), str(result_path)]
        process = subprocess.Popen(
            child.tied_command(child.module_command("benchmarks.chaos", *arguments)), env=env
        )
        self._processes.append(_Process(worker, process, result_path))

    def run(self, chance: random.Random | None, *, every_s: float, stop_s: float) -> None:
        """Inject faults until the job has ended."""
        epoch_s = (
            self.settings.samples / self.settings.batch_size / self.workers * self.settings.step_ms / 1e3
        )
        limit_s = time.monotonic() + 3 * self.settings.epochs * epoch_s + _ENDS_S
        log, next_s = self.folder / "log.jsonl", math.inf  # until the job has started
        resume: list[tuple[float, _Process]] = []
        while any(one.process.poll() is None for one in self._processes):
            now_s = time.monotonic()
            if now_s > limit_s:
                raise OffbeatError(f"the job did not end within {limit_s:.0f} s")
            for at_s, one in list(resume):
                if now_s >= at_s:
                    self._signal(one, signal.SIGCONT)
                    one.is_stopped = False
                    resume.remove((at_s, one))
            if chance is not None and next_s == math.inf and current_epoch(log) >= 0:
                next_s = now_s + every_s * chance.uniform(0.5, 1.5)
            # No faults in the last epochs: a replacement could come too late, and a stop outlast the job.
            if chance is not None and now_s >= next_s and current_epoch(log) < self.settings.epochs - 2:
                next_s = now_s + every_s * chance.uniform(0.5, 1.5)
                victim = self._inject_fault(chance, stop_s)
                resume += [(now_s + stop_s, victim)] if victim.is_stopped else []
            time.sleep(0.02)
        for one in self._processes:
            if not one.is_killed and one.process.returncode:
                raise OffbeatError(f"worker {one.worker} ended with {one.process.returncode}")

    def _inject_fault(self, chance: random.Random, stop_s: float) -> _Process:
        victims = [one for one in self._processes if one.process.poll() is None and not one.is_stopped]
        victim = chance.choice(victims)
        now_s = time.monotonic()
        if chance.random() < 0.5:
            victim.is_killed = True
            self.faults.append(Fault(kind="kill", worker=victim.worker, at_s=now_s, until_s=now_s))
            self._signal(victim, signal.SIGKILL)
            rank_env = {"RANK": str(len(self._processes)), "WORLD_SIZE": str(self.workers)}
            self._start({environment.NEWCOMER_VARIABLE: "1", **rank_env})
        else:
            victim.is_stopped = True
            self.faults.append(Fault(kind="stop", worker=victim.worker, at_s=now_s, until_s=now_s + stop_s))
            self._signal(victim, signal.SIGSTOP)
        return victim

    def _signal(self, one: _Process, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(one.process.pid, number)

    def trial(self) -> ChaosTrial:
        """Return the measurements from the workers' results and the run log."""
        log = self.folder / "log.jsonl"
        models = [
            json.loads(one.result_path.read_text()) for one in self._processes if one.result_path.exists()
        ]
        if not isinstance(parse_strategy(self.settings.strategy), AveragesModels):
            return read_trial(log, models, self.faults)
        _check_equal(models)
        return read_trial(log, [read_uses(log, self.settings.samples)], self.faults)


def current_epoch(log: Path) -> int:
    """Return the current epoch of a job, from its run log; -1 before it has started."""
    if not log.exists():
        return -1
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2**16))
        found = re.findall(rb'"type":"Ready".*?"epoch":(\d+)', file.read())
    return int(found[-1]) if found else -1


def read_trial(log: Path, uses: list[list[float]], faults: Sequence[Fault]) -> ChaosTrial:
    """Return the measurements of a job from its run log.

    Args:
        log: the run log.
        uses: see `ChaosTrial`.
        faults: that were injected.

    Raises:
        OffbeatError: a worker was killed, and is not lost.
    """
    entries = list(read_log(log).entries)
    readies = [(entry.now_s, entry.round) for entry in entries if isinstance(entry, Ready)]
    began_s, ended_s = readies[0][0], readies[-1][0]
    joined_s = {entry.worker: entry.now_s for entry in entries if isinstance(entry, Joined)}
    lost_s = {entry.worker: entry.now_s for entry in entries if isinstance(entry, Lost)}
    alive_s = 0.0
    for worker, from_s in joined_s.items():
        alive_s += _overlap_s(from_s, lost_s.get(worker, ended_s), began_s, ended_s)
    faults = [fault for fault in faults if fault.at_s < ended_s]
    for fault in faults:
        is_there = fault.worker is not None and joined_s.get(fault.worker, math.inf) < fault.at_s
        if fault.kind != "stop" and is_there and fault.worker not in lost_s:
            raise OffbeatError(f"worker {fault.worker} was killed, and the run log does not have its loss")
    alive_s -= sum(_overlap_s(fault.at_s, fault.until_s, began_s, ended_s) for fault in faults)
    return ChaosTrial(
        uses=uses,
        began_s=began_s,
        ended_s=ended_s,
        alive_s=alive_s,
        faults=faults,
        recover_s=[_recovered_s(fault.at_s, readies) for fault in faults],
    )


def read_uses(log: Path, samples: int) -> list[float]:
    """Return how often each of `samples` positions of an epoch was used, by a job's run log.

    A mean of models does not show it: there a sample counts for less than one.
    """
    ranges: dict[int, tuple[tuple[int, int], ...]] = {}
    uses = [0.0] * samples
    for entry in read_log(log).entries:
        if isinstance(entry, AssignBlocks):
            ranges.update((block.id, block.ranges) for block in entry.blocks)
        elif isinstance(entry, Ready):
            for block in entry.blocks:
                for start, stop in ranges[block]:
                    for position in range(start, stop):
                        uses[position] += 1
    return uses


def _overlap_s(from_s: float, until_s: float, began_s: float, ended_s: float) -> float:
    return max(0.0, min(until_s, ended_s) - max(from_s, began_s))


def _recovered_s(at_s: float, readies: Sequence[tuple[float, int]]) -> float:
    """Return the time until a worker was Ready for a round after one that began after the fault."""
    furthest = max((round_ for now_s, round_ in readies if now_s <= at_s), default=-1)
    return next((now_s - at_s for now_s, round_ in readies if now_s > at_s and round_ >= furthest + 2), 0.0)


class Counts(nn.Module):
    """A model of one number per sample: how often it was used."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.uses_N = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, numbers_B: Tensor) -> Tensor:  # noqa: N803
        """Return a loss whose gradient marks the samples in the batch."""
        return -self.uses_N[numbers_B].mean()


def count_once(model: Counts) -> None:
    """Scale the gradient so that each sample counts for one: all have the same weight in a round's mean."""
    grad = model.uses_N.grad
    if grad is not None and grad.any():
        grad.div_(grad.abs()[grad != 0].min()).round_()


def train(settings: ChaosSettings, on_join: Callable[[Session], None]) -> list[float]:
    """Train as one worker; return how often each sample was used, by any worker."""
    torch.set_num_threads(1)
    model = Counts(settings.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.arange(settings.samples))
    with join(model, optimizer, parse_strategy(settings.strategy)) as session:
        on_join(session)
        for _ in session.epochs(settings.epochs):
            for numbers_B in _batches(session.batches(data, settings.batch_size)):  # noqa: N806
                optimizer.zero_grad()
                loss = model(numbers_B)
                time.sleep(settings.step_ms / 1000)
                loss.backward()
                count_once(model)
                optimizer.step()
    uses: list[float] = model.uses_N.tolist()
    return uses


def main(arguments: Sequence[str]) -> int:
    """Train as one worker."""
    settings, result_path = ChaosSettings(**json.loads(arguments[0])), Path(arguments[1])
    result_path.write_text(json.dumps(train(settings, lambda session: None)))
    return 0


def _batches(batches: Iterator[Any]) -> Iterator[Tensor]:
    for (numbers,) in batches:
        yield numbers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
