"""One training run of a benchmark: workers that compute or wait for as long, and their run log.

The data have the shape of CIFAR-10 and nothing to learn in them: no accuracy may be read from these runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import msgspec
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.timed import ModelTimes, TimedModel, time_layers
from benchmarks.workers import read_settings, run_logged, send_result
from offbeat.cli.job import single_threaded
from offbeat.events import Action, Event
from offbeat.models import build_model
from offbeat.policies.stragglers.injection import parse_slow_rule
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

SHAPE, CLASSES = (3, 32, 32), 10
Compute = Literal["timed", "real"]


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Settings of a run; every worker has the same number of steps per epoch.

    Attributes:
        model: a key of `offbeat.models.MODELS`.
        times: layer times for which the model waits; None computes.
        batch_size: samples per worker and step.
        steps: per epoch.
        strategy: as on the command line.
        slow: slowness rules in the format of `--slow`.
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
        """Samples in an epoch, over all workers."""
        return self.steps * self.workers * self.batch_size


def run(run: TrainingRun) -> tuple[float, Sequence[Event | Action]]:
    """Run the training; return its seconds, from when all workers had joined, and its log.

    Raises:
        OffbeatError: a worker failed; the message names it.
    """
    result, entries = run_logged("benchmarks.runs", run, run.workers, slow=run.slow, seed=run.seed)
    return float(result["run_s"]), entries


def slow_rules(workers: int, stragglers: int, factor: float) -> tuple[str, ...]:
    """Return rules that slow the last `stragglers` workers; worker 0, which measures, is slowed last.

    Raises:
        ValueError: the factor is not above 1.
    """
    if not factor > 1:
        raise ValueError(f"the slowdown factor must be above 1, got {factor:g}")
    rules = tuple(f"{workers - 1 - index}:{factor:g}" for index in range(stragglers))
    for rule in rules:
        parse_slow_rule(rule)
    return rules


def measure_layers(model: str, batch_size: int, seed: int) -> ModelTimes:
    """Measure the layer times of a built-in model that runs alone on this machine.

    Raises:
        ValueError: there is no such model.
    """
    inputs, labels = _batch(batch_size, seed)
    return time_layers(build_model(model, sample_shape=SHAPE, classes=CLASSES, seed=seed), inputs, labels)


def network(model: str, times: ModelTimes | None, seed: int) -> torch.nn.Module:
    """Build a model that computes or, with `times`, waits for them."""
    built = build_model(model, sample_shape=SHAPE, classes=CLASSES, seed=seed)
    return built if times is None else TimedModel(built, times, classes=CLASSES, seed=seed)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Run one training step on a batch."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the first paper's optimizer, fused, since its computation still competes for the cores.

    Its learning rate is low, since the random gradients are the same in every step.
    """
    return torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-5, fused=True
    )


def optimizer_s(model: str, seed: int, steps: int = 5) -> float:
    """Measure the optimizer's step alone on one thread, in seconds: the median of `steps` steps."""
    built = network(model, None, seed)
    for parameter in built.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = optimizer_of(built)
    took_s = []
    with single_threaded():
        for _ in range(1 + steps):  # the first one allocates the optimizer's state
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
    """Train as one worker; rank 0 sends the result."""
    settings = msgspec.convert(read_settings(sys.argv), TrainingRun)
    torch.set_num_threads(1)
    model = network(settings.model, settings.times, settings.seed)
    optimizer = optimizer_of(model)
    # Stand-in samples: the session only counts the samples and steps of an epoch.
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
        send_result(result)


if __name__ == "__main__":
    main()
