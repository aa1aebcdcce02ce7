"""Workers of one job are killed and stopped at random, others take their places.

What is trained counts: one number a sample, moved by one whenever the sample is used, so that every replica
says in the end how often each sample was used, by whomever. Steps wait as long as they are to take, so that
two cores stand for a machine a worker.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import TensorDataset

from offbeat.cli.result import Result
from offbeat.errors import OffbeatError
from offbeat.events import Joined, Lost, Ready
from offbeat.runtime.control import environment
from offbeat.runtime.processes import child
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy
from offbeat.wire.record import read_log

_ENDS_S = 120.0  # as long may the job take to end once the last fault is over


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every worker runs.

    Attributes:
        step_ms: how long a step computes.
        samples: in an epoch.
    """

    strategy: str
    step_ms: float
    batch_size: int
    samples: int
    epochs: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault that was made.

    Attributes:
        kind: "kill" or "stop".
        worker: its id.
        at_s, until_s: on the monotonic clock of this machine; a kill has no end.
    """

    kind: str
    worker: int
    at_s: float
    until_s: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one run of the job showed.

    Attributes:
        uses: how often each sample was used, as each worker that was there in the end has it.
        began_s, ended_s: from when everybody was there until the last step.
        alive_s: seconds of living, running workers in that time, summed over workers.
        recover_s: of each strike, how long until a round that began after it was over.
    """

    uses: list[list[float]]
    began_s: float
    ended_s: float
    alive_s: float
    strikes: list[Strike]
    recover_s: list[float]


def run(
    *,
    command: str,
    strategy: str = "partial",
    workers: int = 8,
    duration_s: float = 300.0,
    every_s: float = 30.0,
    stop_s: float = 10.0,
    step_ms: float = 100.0,
    batch_size: int = 32,
    seed: int = 0,
) -> Result:
    """Run the job without faults for a fifth of the time, then with them.

    Args:
        duration_s: about how long the job with faults runs.
        every_s: the mean time between two faults; each is from half to one and a half of it after the last.
        stop_s: how long a stopped worker stands still.

    Raises:
        OffbeatError: a job failed, or did not end.
    """
    step_samples = workers * batch_size
    steps_an_epoch = max(1, round(10.0 / (step_ms / 1000)))
    epoch_s = steps_an_epoch * step_ms / 1000

    def trial(length_s: float, chance: random.Random | None) -> Trial:
        settings = Settings(
            strategy=strategy,
            step_ms=step_ms,
            batch_size=batch_size,
            samples=steps_an_epoch * step_samples,
            epochs=max(2, round(length_s / epoch_s)),
            seed=seed,
        )
        with tempfile.TemporaryDirectory() as folder:
            job = _Job(settings, workers, Path(folder))
            with job:
                job.run(chance, every_s=every_s, stop_s=stop_s)
            return job.trial()

    calm = trial(duration_s / 5, None)
    wild = trial(duration_s, random.Random(f"chaos {seed}"))
    rates = {name: _used(one) / one.alive_s for name, one in {"calm": calm, "wild": wild}.items()}
    epochs = max(2, round(duration_s / epoch_s))
    wrong = [(max(0.0, epochs - uses), max(0.0, uses - epochs)) for uses in wild.uses[0]]
    return Result(
        name="chaos",
        command=command,
        kind="timed",
        seed=seed,
        figures={
            "throughput_kept": rates["wild"] / rates["calm"],
            "samples_lost": sum(lost for lost, _ in wrong),
            "samples_doubled": sum(doubled for _, doubled in wrong),
            "recover_s_p50": median(wild.recover_s),
            "recover_s_max": max(wild.recover_s),
            "strikes_count": len(wild.strikes),
        },
        rows=[
            {
                "kind": strike.kind,
                "worker": strike.worker,
                "after_s": strike.at_s - wild.began_s,
                "recover_s": recover_s,
            }
            for strike, recover_s in zip(wild.strikes, wild.recover_s, strict=True)
        ]
        + [
            {
                "kind": f"{name} run",
                "worker": None,
                "after_s": one.ended_s - one.began_s,
                "samples_per_s": _used(one) / (one.ended_s - one.began_s),
                "samples_per_s_and_live_worker": rates[name],
            }
            for name, one in {"calm": calm, "wild": wild}.items()
        ],
    )


def _used(trial: Trial) -> float:
    if any(uses != trial.uses[0] for uses in trial.uses):
        raise OffbeatError("the workers' replicas differ in the end: see the run log")
    return sum(trial.uses[0])


@dataclass
class _Process:
    worker: int
    process: subprocess.Popen[bytes]
    answer: Path
    is_stopped: bool = False
    is_killed: bool = False


@dataclass
class _Job:
    """One job and its processes; this process hosts the store, so that rank 0 may die like the others."""

    settings: Settings
    workers: int
    folder: Path
    strikes: list[Strike] = field(default_factory=list)

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

    def _start(self, place: Mapping[str, str]) -> None:
        worker = len(self._processes)
        answer = self.folder / f"{worker}.json"
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            environment.RUN_LOG_VARIABLE: str(self.folder / "log.jsonl"),
            environment.SEED_VARIABLE: str(self.settings.seed),
            **place,
        }
        arguments = [json.dumps(vars(self.settings)), str(answer)]
        process = subprocess.Popen(
            child.tied_command(child.module_command("benchmarks.chaos", *arguments)), env=env
        )
        self._processes.append(_Process(worker, process, answer))

    def run(self, chance: random.Random | None, *, every_s: float, stop_s: float) -> None:
        """Strike until the job has ended."""
        epoch_s = (
            self.settings.samples / self.settings.batch_size / self.workers * self.settings.step_ms / 1e3
        )
        limit_s = time.monotonic() + 3 * self.settings.epochs * epoch_s + _ENDS_S
        next_s = math.inf  # until the job has begun
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
            if chance is not None and next_s == math.inf and self._epoch() >= 0:
                next_s = now_s + every_s * chance.uniform(0.5, 1.5)
            # Who is killed or stopped at the very end is not replaced, or not waited for.
            if chance is not None and now_s >= next_s and self._epoch() < self.settings.epochs - 2:
                next_s = now_s + every_s * chance.uniform(0.5, 1.5)
                struck = self._strike(chance, stop_s)
                resume += [(now_s + stop_s, struck)] if struck.is_stopped else []
            time.sleep(0.02)
        for one in self._processes:
            if not one.is_killed and one.process.returncode:
                raise OffbeatError(f"worker {one.worker} ended with {one.process.returncode}")

    def _epoch(self) -> int:
        """How far the job is, -1 before it has begun."""
        log = self.folder / "log.jsonl"
        if not log.exists():
            return -1
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2**16))
            found = re.findall(rb'"type":"Ready".*?"epoch":(\d+)', file.read())
        return int(found[-1]) if found else -1

    def _strike(self, chance: random.Random, stop_s: float) -> _Process:
        victims = [one for one in self._processes if one.process.poll() is None and not one.is_stopped]
        victim = chance.choice(victims)
        now_s = time.monotonic()
        if chance.random() < 0.5:
            victim.is_killed = True
            self.strikes.append(Strike(kind="kill", worker=victim.worker, at_s=now_s, until_s=now_s))
            self._signal(victim, signal.SIGKILL)
            place = {"RANK": str(len(self._processes)), "WORLD_SIZE": str(self.workers)}
            self._start({environment.NEWCOMER_VARIABLE: "1", **place})
        else:
            victim.is_stopped = True
            self.strikes.append(Strike(kind="stop", worker=victim.worker, at_s=now_s, until_s=now_s + stop_s))
            self._signal(victim, signal.SIGSTOP)
        return victim

    def _signal(self, one: _Process, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(one.process.pid, number)

    def trial(self) -> Trial:
        """What the answers and the log say."""
        uses = [json.loads(one.answer.read_text()) for one in self._processes if one.answer.exists()]
        entries = list(read_log(self.folder / "log.jsonl").entries)
        readies = [(entry.now_s, entry.round) for entry in entries if isinstance(entry, Ready)]
        began_s, ended_s = readies[0][0], readies[-1][0]
        joined_s = {entry.worker: entry.now_s for entry in entries if isinstance(entry, Joined)}
        lost_s = {entry.worker: entry.now_s for entry in entries if isinstance(entry, Lost)}
        alive_s = 0.0
        for worker, from_s in joined_s.items():
            alive_s += _within(from_s, lost_s.get(worker, ended_s), began_s, ended_s)
        strikes = [strike for strike in self.strikes if strike.at_s < ended_s]
        alive_s -= sum(_within(strike.at_s, strike.until_s, began_s, ended_s) for strike in strikes)
        return Trial(
            uses=uses,
            began_s=began_s,
            ended_s=ended_s,
            alive_s=alive_s,
            strikes=strikes,
            recover_s=[_recovered_s(strike.at_s, readies) for strike in strikes],
        )


def _within(from_s: float, until_s: float, began_s: float, ended_s: float) -> float:
    return max(0.0, min(until_s, ended_s) - max(from_s, began_s))


def _recovered_s(at_s: float, readies: Sequence[tuple[float, int]]) -> float:
    """How long until somebody was Ready for a round that follows one begun after the fault."""
    furthest = max((round_ for now_s, round_ in readies if now_s <= at_s), default=-1)
    return next((now_s - at_s for now_s, round_ in readies if now_s > at_s and round_ >= furthest + 2), 0.0)


class Counts(nn.Module):
    """How often each sample was used."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.uses_N = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, numbers_B: Tensor) -> Tensor:  # noqa: N803
        """Return a loss whose gradient says which samples are in the batch."""
        return -self.uses_N[numbers_B].mean()


def count_once(model: Counts) -> None:
    """All samples of a round weigh the same in the mean, however many they are: make each count for one."""
    grad = model.uses_N.grad
    if grad is not None and grad.any():
        grad.div_(grad.abs()[grad != 0].min()).round_()


def main(arguments: Sequence[str]) -> int:
    """One worker."""
    settings, answer = Settings(**json.loads(arguments[0])), Path(arguments[1])
    torch.set_num_threads(1)
    model = Counts(settings.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.arange(settings.samples))
    with join(model, optimizer, parse_strategy(settings.strategy)) as session:
        for _ in session.epochs(settings.epochs):
            for numbers_B in _batches(session.batches(data, settings.batch_size)):  # noqa: N806
                optimizer.zero_grad()
                loss = model(numbers_B)
                time.sleep(settings.step_ms / 1000)
                loss.backward()
                count_once(model)
                optimizer.step()
    answer.write_text(json.dumps(model.uses_N.tolist()))
    return 0


def _batches(batches: Iterator[Any]) -> Iterator[Tensor]:
    for (numbers,) in batches:
        yield numbers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
