"""A training on a parameter server whose workers wait instead of computing; results come from its run log.

A step waits for as long as forward and backward pass take one worker alone (see `benchmarks.timed`).
Gradients are random, but as large as the model's. They are sent to the server, whose Adam executes its steps;
parameters are sent back, and the Adam of every worker thread steps on its copy. So on a small machine workers
share the cores only for the work of the parameter server, and a step must be long enough for that to be
little.

Strategies that depend on the loss receive recorded losses of a real training with as many workers: each step
reports that of the batch at the same position there. Nothing else is learnt.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean

import msgspec
import torch
from torch.utils.data import TensorDataset

from benchmarks import runs
from benchmarks.timed import ModelTimes
from benchmarks.workers import read_settings, run_logged, send_result
from offbeat.events import Action, Evaluated, Event, StepFinished, StepPermit, StepsTimed
from offbeat.runtime.session import Session, join
from offbeat.strategies import parse_strategy
from offbeat.wire.job_view import TIME_PARTS


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """Settings of a training.

    Attributes:
        model: a key of `offbeat.models.MODELS`.
        times: of its layers.
        workers: number of processes.
        threads: per process, each of them a worker.
        steps: per worker and epoch, with equal shards.
        losses: of the batches of a real training, in the order of its clocks; one for each step.
        strategy: as on the command line.
        slow: slowness rules in the format of `--slow`.
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
        """Total number of workers."""
        return self.workers * self.threads


@dataclass(frozen=True, kw_only=True)
class ServedResult:
    """Measurements of a run.

    Attributes:
        run_s: from when all workers could begin until the end of the last step.
        parts_s: by process, the time of all its threads in each part, without their first step, which
            includes the server's start.
        traffic: by process, see `Session.traffic`.
        staleness: number of steps, by how many clocks they were ahead of the parameters they used.
        bound_mean: mean over the steps of how far they could be ahead of the slowest; None without a bound.
    """

    run_s: float
    parts_s: dict[int, dict[str, float]]
    traffic: dict[int, dict[str, float]]
    staleness: dict[int, int]
    bound_mean: float | None

    @property
    def barrier_share(self) -> float:
        """Share of all threads' time in which they waited at the gate, 0 to 1."""
        waited_s = sum(parts["wait"] for parts in self.parts_s.values())
        return waited_s / sum(sum(parts.values()) for parts in self.parts_s.values())

    def total(self, name: str) -> float:
        """Return one counter of `Session.traffic`, summed over processes."""
        return sum(traffic[name] for traffic in self.traffic.values())


def run(served: ServedRun) -> ServedResult:
    """Run the training.

    Raises:
        OffbeatError: a worker failed; the message names it.
    """
    _, entries = run_logged("benchmarks.served", served, served.workers, slow=served.slow, seed=served.seed)
    return result_from_log(entries, served.threads)


def result_from_log(entries: Sequence[Event | Action], threads: int) -> ServedResult:
    """Return the measurements from a run log."""
    began_s = max(one.now_s for one in entries if isinstance(one, StepFinished) and one.clock is None)
    ended_s = max(one.now_s for one in entries if isinstance(one, StepFinished))
    bounds = [one.staleness_bound for one in entries if isinstance(one, StepPermit) and one.may_start]
    parts_s: dict[int, dict[str, float]] = {}
    traffic: dict[int, dict[str, float]] = {}
    for one in entries:
        if isinstance(one, StepsTimed):
            sums = parts_s.setdefault(one.worker // threads, dict.fromkeys(TIME_PARTS, 0.0))
            for part in TIME_PARTS:
                sums[part] += sum(getattr(times, f"{part}_s") for times in one.steps if times.step)
        elif isinstance(one, Evaluated):
            traffic[one.worker // threads] = one.metrics  # cumulative: the last one is the total
    is_bounded = bool(bounds) and None not in bounds
    return ServedResult(
        run_s=ended_s - began_s,
        parts_s=parts_s,
        traffic=traffic,
        staleness=dict(Counter(staleness_of(entries))),
        bound_mean=mean(bound for bound in bounds if bound is not None) if is_bounded else None,
    )


def losses_of(entries: Sequence[Event | Action], batch_size: int) -> tuple[float, ...]:
    """Return the losses of all full batches in a run log, ordered by clock and worker."""
    losses = [
        (one.clock, one.worker, one.loss)
        for one in entries
        if isinstance(one, StepFinished)
        and one.clock is not None
        and one.loss is not None
        and one.samples == batch_size
    ]
    return tuple(loss for _, _, loss in sorted(losses))


def staleness_of(entries: Sequence[Event | Action]) -> list[int]:
    """Return how many clocks each step was ahead of the parameters it was computed with.

    Empty without a bound, because parameters then have no versions.
    """
    if any(isinstance(one, StepPermit) and one.staleness_bound is None for one in entries):
        return []
    steps = [one for one in entries if isinstance(one, StepFinished)]
    return [max(0, one.clock - one.parameter_version) for one in steps if one.clock is not None]


# The workers ------------------------------------------------------------------------------------------------


def main() -> None:
    """Train with all worker threads of one process; rank 0 sends that it is done."""
    served = msgspec.convert(read_settings(sys.argv), ServedRun)
    torch.set_num_threads(1)
    with ThreadPoolExecutor(served.threads) as pool:
        leaders = [one.result() for one in [pool.submit(_train, served, t) for t in range(served.threads)]]
    if any(leaders):
        send_result({})


def _train(served: ServedRun, thread: int) -> bool:
    """Train as one worker; return whether it is worker 0."""
    model = runs.network(served.model, served.times, served.seed)
    # The random gradients are the same in every step, so the learning rate is low.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    strategy = parse_strategy(served.strategy)
    # Stand-in samples: the first number of a batch is its position in the epoch.
    numbers = TensorDataset(torch.arange(served.steps * served.world * served.batch_size))
    x, y = runs.batch(served.batch_size, served.seed, timed=True)
    with join(model, optimizer, strategy, thread=thread, threads=served.threads) as session:
        for epoch in session.epochs(served.epochs):
            for (indices,) in session.batches(numbers, served.batch_size, shuffle=False):
                index = _batch_index(served, session, epoch, int(indices[0]), strategy.shards == "dynamic")
                session.observe(served.losses[index])
                runs.step(model, optimizer, x, y)
            if session.worker == 0:
                print(f"epoch {epoch + 1} of {served.epochs}", flush=True)
        session.report(**session.traffic)
        return session.worker == 0


def _batch_index(served: ServedRun, session: Session, epoch: int, first: int, is_dynamic: bool) -> int:
    """Return the number of batches before this one, by clock and worker."""
    if not is_dynamic:
        return session.step * served.world + session.worker
    return epoch * served.steps * served.world + first // served.batch_size


if __name__ == "__main__":
    main()
