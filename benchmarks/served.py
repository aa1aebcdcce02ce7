"""A training on a parameter server whose workers wait instead of computing, read from its run log.

A step waits for as long as forward and backward pass take one worker alone (see `benchmarks.timed`).
Gradients are drawn, but as large as the model's, and they go to the server, whose Adam really makes steps;
parameters really come back, and every worker thread's own Adam steps on its copy. So what is shared on a
small machine is only what the parameter server costs, and a step must be long enough for that to be little.

Strategies that go by the loss are told losses that were recorded of a real training of as many workers: each
step says that of the batch which stands at the same place there. Nothing else is learnt.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec
import torch
from torch.utils.data import TensorDataset

from benchmarks import runs
from benchmarks.timed import ModelTimes
from benchmarks.workers import answer, run_workers, settings_of
from offbeat.cli.timesheet import TIME_PARTS
from offbeat.events import Action, Evaluated, Event, StepFinished, StepPermit, StepTimed
from offbeat.runtime.session import Session, join
from offbeat.strategies import parse_strategy
from offbeat.wire.record import read_log


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is trained, and how.

    Attributes:
        model: a key of `offbeat.models.MODELS`.
        times: of it.
        workers: processes.
        threads: of each, every one a worker.
        steps: of each worker in an epoch, where samples are shared out equally.
        losses: of the batches of a real training, in the order of its clocks; as many as steps are taken.
        strategy: as on the command line.
        slow: rules as `--slow` spells them.
    """

    model: str
    times: ModelTimes
    workers: int
    threads: int
    batch_size: int
    epochs: int
    steps: int
    losses: tuple[float, ...]
    strategy: str
    slow: tuple[str, ...] = ()
    seed: int = 0

    @property
    def world(self) -> int:
        """How many workers there are in all."""
        return self.workers * self.threads


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run came to.

    Attributes:
        run_s: from when everybody could begin until the last step was done.
        parts_s: by process, of all its threads together: where their time went, by part; without their first
            step, which begins with the server.
        traffic: by process, see `Session.traffic`.
        staleness: how many steps were so many clocks ahead of the parameters that they were computed with.
        bound_mean: of the steps, how far they might be ahead of the slowest; None without a bound.
    """

    run_s: float
    parts_s: dict[int, dict[str, float]]
    traffic: dict[int, dict[str, float]]
    staleness: dict[int, int]
    bound_mean: float | None

    @property
    def barrier_share(self) -> float:
        """Part of all threads' time that they waited at the gate, 0 to 1."""
        waited_s = sum(parts["wait"] for parts in self.parts_s.values())
        return waited_s / sum(sum(parts.values()) for parts in self.parts_s.values())

    def total(self, name: str) -> float:
        """One number of `Session.traffic`, of all processes."""
        return sum(traffic[name] for traffic in self.traffic.values())


def run(served: Served) -> Found:
    """Run it.

    Raises:
        OffbeatError: a worker failed; says which.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        run_workers(
            "benchmarks.served",
            msgspec.to_builtins(served),
            served.workers,
            env=runs.surroundings(served.slow, served.seed, log),
        )
        return read(read_log(log).entries, served.threads)


def read(entries: Sequence[Event | Action], threads: int) -> Found:
    """Return what the log of a run says."""
    began_s = max(one.now_s for one in entries if isinstance(one, StepFinished) and one.clock is None)
    ended_s = max(one.now_s for one in entries if isinstance(one, StepFinished))
    bounds = [one.staleness_bound for one in entries if isinstance(one, StepPermit) and one.may_start]
    parts_s: dict[int, dict[str, float]] = {}
    traffic: dict[int, dict[str, float]] = {}
    for one in entries:
        if isinstance(one, StepTimed) and one.step:
            sums = parts_s.setdefault(one.worker // threads, dict.fromkeys(TIME_PARTS, 0.0))
            for part in TIME_PARTS:
                sums[part] += getattr(one, f"{part}_s")
        elif isinstance(one, Evaluated):
            traffic[one.worker // threads] = one.metrics  # the last one counts
    is_bounded = bool(bounds) and None not in bounds
    return Found(
        run_s=ended_s - began_s,
        parts_s=parts_s,
        traffic=traffic,
        staleness=dict(Counter(staleness_of(entries))),
        bound_mean=mean(bound for bound in bounds if bound is not None) if is_bounded else None,
    )


def losses_of(entries: Sequence[Event | Action], batch_size: int) -> tuple[float, ...]:
    """Return the losses of all whole batches that a run log tells of, by clock and worker."""
    told = [
        (one.clock, one.worker, one.loss)
        for one in entries
        if isinstance(one, StepFinished)
        and one.clock is not None
        and one.loss is not None
        and one.samples == batch_size
    ]
    return tuple(loss for _, _, loss in sorted(told))


def staleness_of(entries: Sequence[Event | Action]) -> list[int]:
    """Return how many clocks each step was ahead of the parameters that it was computed with.

    Empty without a bound, for then parameters have no versions.
    """
    if any(isinstance(one, StepPermit) and one.staleness_bound is None for one in entries):
        return []
    steps = [one for one in entries if isinstance(one, StepFinished)]
    return [max(0, one.clock - one.parameter_version) for one in steps if one.clock is not None]


# The workers ------------------------------------------------------------------------------------------------


def main() -> None:
    """One process: its worker threads train; rank 0 answers that it is done."""
    served = msgspec.convert(settings_of(sys.argv), Served)
    torch.set_num_threads(1)
    with ThreadPoolExecutor(served.threads) as pool:
        leaders = [one.result() for one in [pool.submit(_train, served, t) for t in range(served.threads)]]
    if any(leaders):
        answer({})


def _train(served: Served, thread: int) -> bool:
    """Train as one worker; returns whether it is the first."""
    model = runs.network(served.model, served.times, served.seed)
    # Gradients that are drawn point one way, so the rate is low.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    strategy = parse_strategy(served.strategy)
    # The session deals numbers that stand for samples: a batch's first one says where it stands.
    numbers = TensorDataset(torch.arange(served.steps * served.world * served.batch_size))
    x, y = runs.batch(served.batch_size, served.seed, timed=True)
    with join(model, optimizer, strategy, thread=thread, threads=served.threads) as session:
        for epoch in session.epochs(served.epochs):
            for (taken,) in session.batches(numbers, served.batch_size, shuffle=False):
                place = _place(served, session, epoch, int(taken[0]), strategy.shards == "dynamic")
                session.observe(served.losses[place])
                runs.step(model, optimizer, x, y)
            if session.worker == 0:
                print(f"epoch {epoch + 1} of {served.epochs}", flush=True)
        session.report(**session.traffic)
        return session.worker == 0


def _place(served: Served, session: Session, epoch: int, first: int, is_dealt: bool) -> int:
    """Return how many batches come before this one, by clock and worker."""
    if not is_dealt:
        return session.step * served.world + session.worker
    return epoch * served.steps * served.world + first // served.batch_size


if __name__ == "__main__":
    main()
