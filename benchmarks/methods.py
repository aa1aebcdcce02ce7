"""`python -m benchmarks methods`: simulated time to a training loss under each strategy, relative to bsp.

The coordinator's own policies decide in virtual time, and the simulated workers compute real gradients of a
small network on the digits of scikit-learn. Times are virtual: they show what a method's waiting, its samples
and its stale models cost, and nothing of what a real step costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.commands import MethodsOptions
from benchmarks.workers import print_progress
from offbeat.cli.result import Result, figure_part
from offbeat.data.sets import load_data_set
from offbeat.events import Block
from offbeat.policies import Policy
from offbeat.policies.stragglers.injection import parse_slow_rule
from offbeat.runtime.control.environment import Environment
from offbeat.runtime.training.interface import Strategy
from offbeat.simulator.core.network import Line, NetworkCosts
from offbeat.simulator.core.times import BurstyTimes, ComputeTimes, JitteredTimes
from offbeat.simulator.model_averaging.cluster import SimulatedModelCluster
from offbeat.simulator.model_averaging.worker import AveragingWorker
from offbeat.simulator.training.cluster import SimulatedCluster
from offbeat.simulator.training.replicas import MomentumProblem, MomentumState
from offbeat.simulator.training.sample_loop import SampleSetting
from offbeat.simulator.training.setting import SimulationSetting
from offbeat.strategies import parse_strategy
from offbeat.strategies.model_averaging import AveragesModels
from offbeat.strategies.staleness import ServerStrategy
from offbeat.wire.replay import build_policy

STRATEGIES = ("partial", "preduce", "preduce:overlap=false", "adpsgd", "prague")
RATES = (0.1, 0.2, 0.4)
_BSP = "bsp"
_STEP_S, _JITTER, _LATENCY_S = 0.1, 0.05, 1e-5
_BATCH_SIZE, _HIDDEN = 16, 32
_PARAMETER_BYTES = 4_000_000
_PROBE_S = _STEP_S / 2
_LIMIT_S = 150.0  # of virtual time: 300 steps of a lockstep with a worker that is five times as slow
_DIVERGED = 100.0  # a loss; that of equal probabilities is 2.3
_SHARE = 0.05  # of a step, which an all-reduce of all workers takes


@dataclass(frozen=True, kw_only=True)
class MethodSetting:
    """A cluster in which strategies are compared.

    Attributes:
        workers: their number.
        slow: slowness rules.
        burst_share: each step is 5 times as long with this probability.
        exchange_share: duration of an all-reduce of all workers, as a share of a step's computation.
        slow_line: the line of worker 1 has a rate so many times lower; 1 for equal lines.
    """

    workers: int
    slow: tuple[str, ...] = ()
    burst_share: float = 0.0
    exchange_share: float = _SHARE
    slow_line: float = 1.0

    def times(self) -> ComputeTimes:
        """Return the model of compute time."""
        if not self.burst_share:
            return JitteredTimes(mean_s=_STEP_S, deviation=_JITTER)
        period = round(1 / self.burst_share)
        return BurstyTimes(mean_s=_STEP_S, deviation=_JITTER, factor=5.0, length=1, period=period)

    def network(self) -> NetworkCosts:
        """Return lines; on equal ones an all-reduce of all workers takes its share of a step."""
        moved_bytes = 2 * (self.workers - 1) / self.workers * _PARAMETER_BYTES
        rate = moved_bytes / (self.exchange_share * _STEP_S)
        slow = Line(latency_s=_LATENCY_S, bytes_per_s=rate / self.slow_line)
        return NetworkCosts(
            latency_s=_LATENCY_S, bytes_per_s=rate, lines={} if self.slow_line == 1 else {1: slow}
        )


SETTINGS: Mapping[str, MethodSetting] = {
    "4w_none": MethodSetting(workers=4),
    "4w_one5x": MethodSetting(workers=4, slow=("1:5",)),
    "8w_none": MethodSetting(workers=8),
    "8w_one5x": MethodSetting(workers=8, slow=("1:5",)),
    "8w_one2x": MethodSetting(workers=8, slow=("1:2",)),
    "8w_p05": MethodSetting(workers=8, burst_share=0.05),
    "8w_p01": MethodSetting(workers=8, burst_share=0.01),
    "8w_exchange80": MethodSetting(workers=8, exchange_share=0.8),
    "8w_slow_line": MethodSetting(workers=8, slow_line=200.0),
}
"""By name: workers, then which are slow, or how long an exchange takes, of all or of one."""


def run(options: MethodsOptions, *, command: str) -> Result:
    """Run every strategy in every setting, with each rate and seed; compare the best rates.

    Raises:
        ValueError: an unknown setting, or a strategy that cannot be simulated so.
    """
    names = options.setting or list(SETTINGS)
    for name in names:
        if name not in SETTINGS:
            raise ValueError(f"unknown setting {name!r}: expected one of {', '.join(SETTINGS)}")
    strategies = [_BSP, *(one for one in options.strategy or STRATEGIES if one != _BSP)]
    for text in strategies:
        strategy = parse_strategy(text)
        if isinstance(strategy, ServerStrategy):
            raise ValueError(f"expected a strategy without parameter servers, got {text!r}")
    rows = []
    seeds = range(options.seed, options.seed + options.seeds)
    for name, text in product(names, strategies):
        print_progress(f"{text} in {name}")
        for rate, seed in product(RATES, seeds):
            time_s = time_to_loss(text, SETTINGS[name], rate=rate, seed=seed, loss=options.loss)
            rows.append({"setting": name, "strategy": text, "rate": rate, "seed": seed, "time_s": time_s})
    return Result(
        name="methods",
        command=command,
        kind="simulated",
        seed=options.seed,
        figures=ratios_to_bsp(rows),
        rows=rows,
    )


def ratios_to_bsp(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each strategy's time in each setting, relative to bsp's; each with its best rate.

    A strategy has no figure where it did not reach the loss with any rate and all seeds.
    """
    best_s: dict[tuple[str, str], float] = {}
    for setting, strategy, rate in dict.fromkeys(
        (row["setting"], row["strategy"], row["rate"]) for row in rows
    ):
        times_s = [
            math.inf if row["time_s"] is None else row["time_s"]
            for row in rows
            if (row["setting"], row["strategy"], row["rate"]) == (setting, strategy, rate)
        ]
        key = (setting, strategy)
        best_s[key] = min(best_s.get(key, math.inf), mean(times_s))
    return {
        f"simulated_time_ratio_to_bsp_{figure_part(strategy)}_{setting}": time_s / best_s[setting, _BSP]
        for (setting, strategy), time_s in best_s.items()
        if strategy != _BSP and math.isfinite(time_s) and math.isfinite(best_s[setting, _BSP])
    }


def time_to_loss(text: str, setting: MethodSetting, *, rate: float, seed: int, loss: float) -> float | None:
    """Simulate a strategy until the mean of all workers' models has a training loss.

    Args:
        text: the strategy.
        setting: the cluster.
        rate: learning rate of SGD with momentum 0.9; of one worker's batch, or of the mean of all.
        seed: of the model, the batches and the compute times.
        loss: the training loss.

    Returns:
        The virtual time in seconds, interpolated between two looks; None if it did not get there.
    """
    problem = DigitsProblem(seed, rate)
    cluster = _build(parse_strategy(text), setting, problem, seed)
    looks: list[tuple[float, float]] = []

    def look(_: Any) -> None:
        now_s = cluster.engine.now_s
        found = problem.loss(_mean_parameters(cluster))
        looks.append((now_s, found))
        if found <= loss or not found < _DIVERGED or now_s > _LIMIT_S:
            cluster.cut_short()
        else:
            cluster.engine.schedule(now_s + _PROBE_S, look)

    cluster.engine.schedule(_STEP_S, look)
    cluster.run()
    (before_s, before), (at_s, at) = looks[-2:] if len(looks) > 1 else [looks[0], looks[0]]
    if not at <= loss:
        return None
    share = 1.0 if before <= at else math.log(before / loss) / math.log(before / at)
    return before_s + share * (at_s - before_s)


class DigitsProblem(MomentumProblem):
    """A network of 64, 32 and 10 units on the digits, with ReLU and cross-entropy; batches of 16 are drawn.

    Args:
        seed: of the initial parameters and the batches.
        lr: learning rate.
    """

    def __init__(self, seed: int, lr: float) -> None:
        chance = np.random.default_rng([seed, 1])
        self._x, self._labels = _digits()
        inputs = self._x.shape[1]
        self._cuts = np.cumsum([inputs * _HIDDEN, _HIDDEN, _HIDDEN * 10])
        first = chance.normal(0.0, math.sqrt(2 / inputs), inputs * _HIDDEN)
        second = chance.normal(0.0, math.sqrt(1 / _HIDDEN), _HIDDEN * 10)
        super().__init__(np.concatenate([first, np.zeros(_HIDDEN), second, np.zeros(10)]), lr)
        self._seed = seed

    def gradient(
        self, state: MomentumState, worker: int, iteration: int, blocks: tuple[Block, ...] = ()
    ) -> Any:
        """See `TrainingProblem.gradient`."""
        batch = np.random.default_rng([self._seed, worker, iteration]).integers(0, len(self._x), _BATCH_SIZE)
        x, labels = self._x[batch], self._labels[batch]
        first, first_bias, second, second_bias = self._weights(state.parameters)
        hidden = np.maximum(x @ first + first_bias, 0.0)
        errors = _softmax(hidden @ second + second_bias)
        errors[np.arange(_BATCH_SIZE), labels] -= 1.0
        errors /= _BATCH_SIZE
        before = (errors @ second.T) * (hidden > 0)
        parts = (x.T @ before, before.sum(axis=0), hidden.T @ errors, errors.sum(axis=0))
        return np.concatenate([part.ravel() for part in parts])

    def loss(self, parameters: NDArray[np.float64]) -> float:
        """Return the mean cross-entropy of all training samples."""
        first, first_bias, second, second_bias = self._weights(parameters)
        found = _softmax(np.maximum(self._x @ first + first_bias, 0.0) @ second + second_bias)
        return float(-np.log(found[np.arange(len(found)), self._labels] + 1e-300).mean())

    def _weights(self, parameters: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        first, first_bias, second, second_bias = np.split(parameters, self._cuts)
        return [first.reshape(-1, _HIDDEN), first_bias, second.reshape(_HIDDEN, -1), second_bias]


def _softmax(outputs: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    found /= found.sum(axis=1, keepdims=True)
    return found


@cache
def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the training digits, shape (samples, 64), and their labels."""
    images, labels = load_data_set("digits").train.tensors
    return images.flatten(1).numpy().astype(np.float64), labels.numpy()


def _build(strategy: Strategy, setting: MethodSetting, problem: DigitsProblem, seed: int) -> SimulatedCluster:
    specs = strategy.policies(setting.workers, Environment.start_s, Environment.servers)

    def policies() -> list[Policy]:
        return [build_policy(spec.path, dict(spec.arguments)) for spec in specs]

    # One epoch that does not end: what an epoch's end costs is not the question here.
    is_assigned = isinstance(strategy, AveragesModels)
    samples = SampleSetting(epoch_samples=10**9, batch_size=_BATCH_SIZE, epochs=1) if is_assigned else None
    simulated = SimulationSetting(
        world=setting.workers,
        until_s=2 * _LIMIT_S,
        samples=samples,
        times=setting.times(),
        slow=tuple(map(parse_slow_rule, setting.slow)),
        network=setting.network(),
        size_bytes=_PARAMETER_BYTES,
        seed=seed,
    )
    if isinstance(strategy, AveragesModels):
        return SimulatedModelCluster(
            simulated,
            policies,
            problem=problem,
            **strategy.worker_arguments(),
        )
    return SimulatedCluster(simulated, policies, problem=problem, one_by_one=True)


def _mean_parameters(cluster: SimulatedCluster) -> Any:
    """Return the mean of all workers' models; where a group has one model, that of its furthest member."""
    workers = list(cluster.workers.values())
    own = [one.model.parameters for one in workers if isinstance(one, AveragingWorker) and one.model]
    if own:
        return np.mean(own, axis=0)
    return max(workers, key=lambda one: one.membership.round).state.parameters
