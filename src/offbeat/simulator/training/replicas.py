"""What a simulated worker trains: real gradients of a small problem, or only the history of a state.

Nothing here knows of groups or time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from offbeat.events import Block

State = Any
Gradient = Any


class TrainingProblem(Protocol):
    """Parameters and gradients as the simulator needs them; states are never changed in place."""

    def initial_state(self) -> State:
        """Return the state before the first step."""

    def gradient(self, state: State, worker: int, iteration: int, blocks: tuple[Block, ...] = ()) -> Gradient:
        """Return a worker's gradient in its `iteration`-th computation, for the blocks assigned to it."""

    def gradients(self, state: State, workers: Sequence[int], iterations: Iterable[int]) -> list[Gradient]:
        """Return the gradients of many workers, for each in its `iterations`-th computation."""

    def mean(self, gradients: Sequence[Gradient], weights: Sequence[float], exchange_id: int) -> Gradient:
        """Return the weighted mean; weights may sum to less than 1, and to 0 if only joiners are left."""

    def step(self, state: State, mean: Gradient) -> State:
        """Return the state after an optimizer step."""

    def states_equal(self, one: State, other: State) -> bool:
        """Whether two states are the same, bit for bit."""


class HistoryProblem:
    """States that only identify the exchanges that made them: states of equal histories are equal."""

    def initial_state(self) -> int:
        """See `TrainingProblem.initial_state`."""
        return 0

    def gradient(self, state: int, worker: int, iteration: int, blocks: tuple[Block, ...] = ()) -> int:
        """See `TrainingProblem.gradient`."""
        return 0

    def gradients(self, state: int, workers: Sequence[int], iterations: Iterable[int]) -> list[int]:
        """See `TrainingProblem.gradients`."""
        return [0] * len(workers)

    def mean(self, gradients: Sequence[int], weights: Sequence[float], exchange_id: int) -> int:
        """See `TrainingProblem.mean`."""
        return exchange_id

    def step(self, state: int, mean: int) -> int:
        """See `TrainingProblem.step`."""
        return hash((state, mean))

    def states_equal(self, one: int, other: int) -> bool:
        """See `TrainingProblem.states_equal`."""
        return one == other


class MomentumState(NamedTuple):
    """Parameters and velocity of SGD with momentum: float64, shape (parameters,) each."""

    parameters: Any
    velocity: Any


class MomentumProblem(ABC):
    """A problem that is trained by SGD with momentum 0.9; subclasses have the gradient.

    Args:
        initial: the parameters before the first step, float64, shape (parameters,).
        lr: the learning rate.
    """

    def __init__(self, initial: Any, lr: float) -> None:
        self._initial, self._lr = initial, lr

    def initial_state(self) -> MomentumState:
        """See `TrainingProblem.initial_state`."""
        return MomentumState(self._initial, np.zeros_like(self._initial))

    @abstractmethod
    def gradient(
        self, state: MomentumState, worker: int, iteration: int, blocks: tuple[Block, ...] = ()
    ) -> Any:
        """See `TrainingProblem.gradient`."""

    def gradients(self, state: MomentumState, workers: Sequence[int], iterations: Iterable[int]) -> list[Any]:
        """See `TrainingProblem.gradients`."""
        return [self.gradient(state, *pair) for pair in zip(workers, iterations, strict=True)]

    def mean(self, gradients: Sequence[Any], weights: Sequence[float], exchange_id: int) -> Any:
        """See `TrainingProblem.mean`."""
        total = sum(weights) or 1.0
        return np.sum([g * (w / total) for g, w in zip(gradients, weights, strict=True)], axis=0)

    def step(self, state: MomentumState, mean: Any) -> MomentumState:
        """See `TrainingProblem.step`."""
        velocity = 0.9 * state.velocity + mean
        return MomentumState(state.parameters - self._lr * velocity, velocity)

    def states_equal(self, one: MomentumState, other: MomentumState) -> bool:
        """See `TrainingProblem.states_equal`."""
        return bool(
            np.array_equal(one.parameters, other.parameters) and np.array_equal(one.velocity, other.velocity)
        )


class QuadraticProblem(MomentumProblem):
    """The distance to a point, with noise in the gradients: the cheapest problem with a solution.

    Args:
        seed: seed of the point and the noise.
        lr: learning rate.
    """

    def __init__(self, seed: int, lr: float = 0.02) -> None:
        super().__init__(np.zeros(4), lr)
        chance = np.random.default_rng(seed)
        self.solution = chance.normal(size=4)
        self._noise = 0.1 * chance.normal(size=(1021, 4)) + self.solution

    def gradient(
        self, state: MomentumState, worker: int, iteration: int, blocks: tuple[Block, ...] = ()
    ) -> Any:
        """See `TrainingProblem.gradient`."""
        return state.parameters - self._noise[(worker * 397 + iteration) % 1021]


class LeastSquaresProblem(MomentumProblem):
    """Linear least squares in float64 with momentum; all workers draw batches from the same samples.

    Args:
        seed: seed of samples and batches.
        parameters: number of parameters.
        lr: learning rate of SGD with momentum 0.9.
    """

    def __init__(self, seed: int, parameters: int = 8, lr: float = 0.02) -> None:
        super().__init__(np.zeros(parameters), lr)
        chance = np.random.default_rng(seed)
        self._x = chance.normal(size=(256, parameters))
        self.solution = chance.normal(size=parameters)
        self._y = self._x @ self.solution
        self._seed = seed

    def gradient(
        self, state: MomentumState, worker: int, iteration: int, blocks: tuple[Block, ...] = ()
    ) -> Any:
        """See `TrainingProblem.gradient`."""
        batch = np.random.default_rng([self._seed, worker, iteration]).integers(0, 256, 16)
        x = self._x[batch]
        return x.T @ (x @ state.parameters - self._y[batch]) / 16


@dataclass(frozen=True, eq=False)
class _TrackedGradient:
    gradient: Any
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class _TrackedState:
    state: Any
    blocks: tuple[Block, ...] = ()  # blocks whose gradients were in the last mean
    before: _TrackedState | None = None


class SampleTrackingProblem:
    """A wrapped problem whose states also record which assigned blocks were in the means that made them.

    Args:
        problem: the wrapped problem; its gradients do not depend on the blocks.
    """

    def __init__(self, problem: TrainingProblem) -> None:
        self.problem = problem

    def sample_uses(self, state: _TrackedState) -> Counter[tuple[int, int]]:
        """Return how often each (epoch, position) was in a mean that made the state."""
        counter: Counter[tuple[int, int]] = Counter()
        ancestor: _TrackedState | None = state
        while ancestor is not None:
            for block in ancestor.blocks:
                for start, stop in block.ranges:
                    counter.update((block.epoch, position) for position in range(start, stop))
            ancestor = ancestor.before
        return counter

    def initial_state(self) -> _TrackedState:
        """See `TrainingProblem.initial_state`."""
        return _TrackedState(self.problem.initial_state())

    def gradient(
        self, state: _TrackedState, worker: int, iteration: int, blocks: tuple[Block, ...] = ()
    ) -> _TrackedGradient:
        """See `TrainingProblem.gradient`."""
        return _TrackedGradient(self.problem.gradient(state.state, worker, iteration), blocks)

    def gradients(
        self, state: _TrackedState, workers: Sequence[int], iterations: Iterable[int]
    ) -> list[_TrackedGradient]:
        """See `TrainingProblem.gradients`."""
        return [
            _TrackedGradient(gradient, ())
            for gradient in self.problem.gradients(state.state, workers, iterations)
        ]

    def mean(
        self, gradients: Sequence[_TrackedGradient], weights: Sequence[float], exchange_id: int
    ) -> _TrackedGradient:
        """See `TrainingProblem.mean`; gradients without weight are not recorded."""
        mean = self.problem.mean([gradient.gradient for gradient in gradients], weights, exchange_id)
        counted = [gradient for gradient, weight in zip(gradients, weights, strict=True) if weight]
        return _TrackedGradient(mean, tuple(block for gradient in counted for block in gradient.blocks))

    def step(self, state: _TrackedState, mean: _TrackedGradient) -> _TrackedState:
        """See `TrainingProblem.step`."""
        return _TrackedState(self.problem.step(state.state, mean.gradient), mean.blocks, state)

    def states_equal(self, one: _TrackedState, other: _TrackedState) -> bool:
        """See `TrainingProblem.states_equal`."""
        return self.problem.states_equal(one.state, other.state)
