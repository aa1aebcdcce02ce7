"""Compute times of workers: models of them, with independent random numbers for each worker.

Nothing here knows what is computed; `offbeat.policies.stragglers.injection` adds injected slowness.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.events import Ready
from offbeat.policies.stragglers.injection import InjectedSlowness

_BLOCK = 256  # times drawn at once


class ComputeTimes(Protocol):
    """A model of compute time."""

    def draw(self, worker: int, chance: np.random.Generator, count: int, first: int) -> NDArray[np.float64]:
        """Return a worker's next `count` compute times in seconds, from its `first`-th on, shape (count,)."""


def _positive(thing: Any, *names: str) -> None:
    for name in names:
        value = getattr(thing, name)
        if not 0 < value < math.inf:
            raise ValueError(f"expected {name} above 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class ConstantTimes:
    """The same time always."""

    mean_s: float = 0.1

    def __post_init__(self) -> None:
        _positive(self, "mean_s")

    def draw(self, worker: int, chance: np.random.Generator, count: int, first: int) -> NDArray[np.float64]:
        """See `ComputeTimes.draw`."""
        return np.full(count, self.mean_s)


@dataclass(frozen=True, kw_only=True)
class JitteredTimes:
    """Log-normal around the mean; `deviation` is the standard deviation as a share of the mean."""

    mean_s: float = 0.1
    deviation: float = 0.05

    def __post_init__(self) -> None:
        _positive(self, "mean_s", "deviation")

    def draw(self, worker: int, chance: np.random.Generator, count: int, first: int) -> NDArray[np.float64]:
        """See `ComputeTimes.draw`."""
        sigma = math.sqrt(math.log1p(self.deviation**2))
        return np.asarray(self.mean_s * chance.lognormal(-sigma * sigma / 2, sigma, count))


@dataclass(frozen=True, kw_only=True)
class BurstyTimes:
    """Jittered, and `factor` times as long in bursts, one every `period` steps on average.

    A burst has `length` steps; overlapping bursts form one longer burst.
    """

    mean_s: float = 0.1
    deviation: float = 0.05
    factor: float = 5.0
    length: int = 20
    period: int = 200

    def __post_init__(self) -> None:
        _positive(self, "mean_s", "deviation", "factor", "length", "period")
        if self.length > self.period:
            raise ValueError(f"expected a length of at most the period, {self.period}, got {self.length}")

    def draw(self, worker: int, chance: np.random.Generator, count: int, first: int) -> NDArray[np.float64]:
        """See `ComputeTimes.draw`."""
        times_s = JitteredTimes(mean_s=self.mean_s, deviation=self.deviation).draw(
            worker, chance, count, first
        )
        is_slow = np.zeros(count, bool)
        for begin in np.flatnonzero(chance.random(count) < 1 / self.period):
            is_slow[begin : begin + self.length] = True
        return np.where(is_slow, times_s * self.factor, times_s)


@dataclass(frozen=True, kw_only=True)
class DriftingTimes:
    """Jittered around a pace that follows a random walk, whose steps have the standard deviation `drift`.

    The walk is mean-reverting: the pace stays within about 7 `drift` of the mean.
    """

    mean_s: float = 0.1
    deviation: float = 0.05
    drift: float = 0.02

    def __post_init__(self) -> None:
        _positive(self, "mean_s", "deviation", "drift")

    def draw(self, worker: int, chance: np.random.Generator, count: int, first: int) -> NDArray[np.float64]:
        """See `ComputeTimes.draw`."""
        times_s = JitteredTimes(mean_s=self.mean_s, deviation=self.deviation).draw(
            worker, chance, count, first
        )
        steps = chance.normal(0.0, self.drift, count)
        pace = np.empty(count)
        at = chance.normal(0.0, 7 * self.drift)
        for index in range(count):
            at = 0.99 * at + steps[index]
            pace[index] = at
        return times_s * np.exp(pace)


@dataclass(frozen=True, kw_only=True)
class HeavyTailedTimes:
    """Pareto above the minimum: P(t > x) = (minimum / x)^`shape`, with mean `mean_s`."""

    mean_s: float = 0.1
    shape: float = 3.0

    def __post_init__(self) -> None:
        _positive(self, "mean_s")
        if not self.shape > 1:
            raise ValueError(f"expected a shape above 1 (else the mean is infinite), got {self.shape}")

    def draw(self, worker: int, chance: np.random.Generator, count: int, first: int) -> NDArray[np.float64]:
        """See `ComputeTimes.draw`."""
        least_s = self.mean_s * (self.shape - 1) / self.shape
        return np.asarray(least_s * (1 + chance.pareto(self.shape, count)))


@dataclass(frozen=True, kw_only=True)
class RecordedTimes:
    """The times of a run log: each worker's own times in their order, repeated cyclically.

    Worker w gets the times of the log's worker at index w modulo their number.
    """

    times_s: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.times_s or not all(self.times_s):
            raise ValueError("expected at least one worker with at least one time in the run log")

    def draw(self, worker: int, chance: np.random.Generator, count: int, first: int) -> NDArray[np.float64]:
        """See `ComputeTimes.draw`."""
        own = self.times_s[worker % len(self.times_s)]
        return np.resize(np.roll(np.asarray(own), -(first % len(own))), count)


def recorded_times(entries: Iterable[Any]) -> RecordedTimes:
    """Extract the compute times of every Ready of a run log.

    Raises:
        ValueError: there are none.
    """
    times_s: dict[int, list[float]] = {}
    for entry in entries:
        if isinstance(entry, Ready):
            times_s.setdefault(entry.worker, []).append(entry.compute_s)
    return RecordedTimes(times_s=tuple(tuple(times_s[worker]) for worker in sorted(times_s)))


TIME_MODELS: Mapping[str, type[Any]] = {
    "constant": ConstantTimes,
    "jittered": JitteredTimes,
    "bursty": BurstyTimes,
    "drifting": DriftingTimes,
    "heavy": HeavyTailedTimes,
}


def parse_times(text: str) -> ComputeTimes:
    """Parse a model: its name, or `name:key=value,key=value`.

    Raises:
        ValueError: the text is no model; the message is one line with what was expected.
    """
    name, colon, rest = text.partition(":")
    kind = TIME_MODELS.get(name)
    if kind is None:
        raise ValueError(f"unknown model of compute time {name!r}: expected one of {', '.join(TIME_MODELS)}")
    types = {field.name: field.type for field in fields(kind)}
    arguments: dict[str, float] = {}
    for part in rest.split(",") if colon else []:
        key, _, value = part.partition("=")
        if key not in types:
            raise ValueError(
                f"model of compute time {text!r}: expected key=value with a key of "
                f"{', '.join(types)}, got {part!r}"
            )
        try:
            arguments[key] = int(value) if types[key] == "int" else float(value)
        except ValueError:
            raise ValueError(f"model of compute time {text!r}: expected a number, got {part!r}") from None
    try:
        model: ComputeTimes = kind(**arguments)
    except ValueError as error:
        raise ValueError(f"model of compute time {text!r}: {error}") from None
    return model


class ComputeTimeSource:
    """One worker's compute times in sequence.

    Args:
        model: the model of the times.
        worker: the worker's id.
        seed: seed of the whole run; each worker has an independent sequence.
        slowness: injected slowness; None where no rule applies to this worker.
    """

    def __init__(
        self, model: ComputeTimes, worker: int, *, seed: int, slowness: InjectedSlowness | None
    ) -> None:
        self._model = model
        self._worker = worker
        self._chance = np.random.default_rng([seed, worker])
        self._slowness = slowness
        self._times_s = np.zeros(0)  # drawn; those from `_at` on are unused
        self._at = 0
        self._drawn = 0

    def next_s(self) -> float:
        """Return the duration of the next gradients without slowness, in seconds."""
        if self._at == len(self._times_s):
            self._draw(1)
        time_s = float(self._times_s[self._at])
        self._at += 1
        return time_s

    def peek_s(self, count: int) -> NDArray[np.float64]:
        """Return the next `count` times without slowness, shape (count,), and do not consume them."""
        if len(self._times_s) - self._at < count:
            self._draw(count)
        return self._times_s[self._at : self._at + count]

    def skip(self, count: int) -> None:
        """Consume `count` times, which `peek_s` has returned."""
        self._at += count

    @property
    def is_never_slowed(self) -> bool:
        """Whether no slowness rule applies to this worker."""
        return self._slowness is None

    def slowdown(self, epoch: int, step_in_epoch: int, steps_per_epoch: int, step: int) -> float:
        """Return the factor by which injected slowness extends a step."""
        if self._slowness is None:
            return 1.0
        return self._slowness.factor(self._worker, epoch, step_in_epoch, steps_per_epoch, step)

    def _draw(self, count: int) -> None:
        """Draw until at least `count` unused times are available."""
        blocks = [self._times_s[self._at :]]
        while sum(map(len, blocks)) < count:
            blocks.append(self._model.draw(self._worker, self._chance, _BLOCK, self._drawn))
            self._drawn += _BLOCK
        self._times_s, self._at = np.concatenate(blocks), 0
