"""One training of a benchmark: workers that compute, or wait for as long as that takes, and their run log.

The data are shaped like CIFAR-10 and have nothing to learn in them: nobody may read an accuracy from it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.timed import ModelTimes, TimedModel, time_layers
from benchmarks.workers import answer, run_workers, settings_of
from offbeat.cli.job import single_threaded
from offbeat.models import build_model
from offbeat.policies.stragglers.injection import parse_slow_rule
from offbeat.runtime.control import environment
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

SHAPE, CLASSES = (3, 32, 32), 10
Compute = Literal["timed", "real"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, and how; every worker takes the same number of steps an epoch.

    Attributes:
        model: a key of `offbeat.models.MODELS`.
        times: of the model, which then waits; None computes.
        batch_size: samples a worker and step.
        steps: in an epoch.
        strategy: as on the command line.
        slow: rules as `--slow` spells them.
    """

    model: str
    times: ModelTimes | None
    workers: int
    batch_size: int
    epochs: int
    steps: int
    strategy: str
    slow: tuple[str, ...] = ()
    seed: int = 0

    @property
    def samples(self) -> int:
        """In an epoch, of all workers together."""
        return self.steps * self.workers * self.batch_size


def run(run: Run, log: Path | None = None) -> float:
    """Run it; return the seconds from when everybody was there until everybody had finished.

    Raises:
        OffbeatError: a worker failed; says which.
    """
    told = run_workers(
        "benchmarks.runs", msgspec.to_builtins(run), run.workers, env=surroundings(run.slow, run.seed, log)
    )
    return float(told["run_s"])


def surroundings(slow: tuple[str, ...], seed: int, log: Path | None) -> Mapping[str, str]:
    """Return what `offbeat.join` reads from the environment of a worker, besides its rank."""
    env = {environment.SLOW_VARIABLE: ";".join(slow), environment.SEED_VARIABLE: str(seed)}
    return env if log is None else {**env, environment.RUN_LOG_VARIABLE: str(log)}


def slowed(workers: int, stragglers: int, factor: float) -> tuple[str, ...]:
    """Return the rules that slow the last workers: the first one, which tells the time, gets slow last.

    Raises:
        ValueError: no worker gets slower by this factor.
    """
    if not factor > 1:
        raise ValueError(f"a slow worker must take more than 1 times as long, got {factor:g}")
    rules = tuple(f"{workers - 1 - place}:{factor:g}" for place in range(stragglers))
    for rule in rules:
        parse_slow_rule(rule)
    return rules


def measured(model: str, batch_size: int, seed: int) -> ModelTimes:
    """Measure a built-in model alone, on this machine as it is now.

    Raises:
        ValueError: there is no such model.
    """
    inputs, labels = _batch(batch_size, seed)
    return time_layers(build_model(model, sample_shape=SHAPE, classes=CLASSES, seed=seed), inputs, labels)


def network(model: str, times: ModelTimes | None, seed: int) -> torch.nn.Module:
    """Build a model that computes, or waits for the `times` that it is given."""
    built = build_model(model, sample_shape=SHAPE, classes=CLASSES, seed=seed)
    return built if times is None else TimedModel(built, times, classes=CLASSES, seed=seed)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Take one step on a batch."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the first paper's optimizer, fused: for what it computes, workers still fight for cores.

    Its learning rate is low, since gradients that are drawn always point the same way.
    """
    return torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-5, fused=True
    )


def optimizer_s(model: str, seed: int, steps: int = 5) -> float:
    """Measure how long the optimizer takes alone on one thread, in seconds: the median of some steps."""
    built = network(model, None, seed)
    for parameter in built.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = optimizer_of(built)
    took_s = []
    with single_threaded():
        for _ in range(1 + steps):  # the first one makes the optimizer's state
            began_s = time.perf_counter()
            optimizer.step()
            took_s.append(time.perf_counter() - began_s)
    return median(took_s[1:])


def batch(batch_size: int, seed: int, timed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one batch; a model that only waits gets samples of one number."""
    return (torch.zeros(batch_size, 1), torch.zeros(batch_size).long()) if timed else _batch(batch_size, seed)


def _batch(batch_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, *SHAPE, generator=generator)
    return x, torch.randint(0, CLASSES, (batch_size,), generator=generator)


def main() -> None:
    """One worker: trains; rank 0 answers."""
    settings = msgspec.convert(settings_of(sys.argv), Run)
    torch.set_num_threads(1)
    model = network(settings.model, settings.times, settings.seed)
    optimizer = optimizer_of(model)
    # The session counts samples and steps of an epoch on numbers that stand for them.
    numbers = TensorDataset(torch.arange(settings.samples))
    with join(model, optimizer, parse_strategy(settings.strategy)) as session:
        x, y = batch(settings.batch_size, settings.seed * 1000 + session.worker, settings.times is not None)
        began_s = time.perf_counter()
        for epoch in session.epochs(settings.epochs):
            for _ in session.batches(numbers, settings.batch_size):
                step(model, optimizer, x, y)
            if session.worker == 0:
                print(f"epoch {epoch + 1} of {settings.epochs}", flush=True)
    if session.worker == 0:
        result: dict[str, Any] = {"run_s": time.perf_counter() - began_s}
        answer(result)


if __name__ == "__main__":
    main()
