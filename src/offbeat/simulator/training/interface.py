"""What the parts of a simulated run need of it.

This module implements nothing; `SimulatedCluster` provides it.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple, NoReturn, Protocol

from offbeat.events import Event
from offbeat.simulator.core.engine import Engine
from offbeat.simulator.core.network import NetworkCosts
from offbeat.simulator.training.replicas import TrainingProblem
from offbeat.simulator.training.setting import SimulationSetting


class StateTransfer(NamedTuple):
    """The state that a donor sends to joiners."""

    generation: int
    state: Any
    round: int
    epoch: int


class Simulation(Protocol):
    """What workers, exchanges and the vectorized group require of a simulated run.

    Attributes:
        engine: the calendar; another one while a vectorized group is dissolved.
        chance: all chance of the run, except for compute times.
        network: cost of messages.
        problem: the training problem.
        setting: parameters of the run.
        is_lockstep: a worker leaves after its last step without waiting for the end of the job.
        is_exactly_once: events and actions are delivered exactly once and in order.
        progress_s: when a worker last finished a step.
        hung_at_s: when each worker last began to hang.
        received_early: workers whose last Ready the coordinator has already received, while a vectorized
            group is dissolved.
    """

    engine: Engine
    chance: random.Random
    network: NetworkCosts
    problem: TrainingProblem

    setting: SimulationSetting
    is_lockstep: bool
    is_exactly_once: bool

    progress_s: float
    hung_at_s: dict[int, float]
    received_early: frozenset[int]

    @property
    def clock_lag_s(self) -> float:
        """How far the coordinator's clock lags behind the engine's."""

    @property
    def is_undisturbed(self) -> bool:
        """Whether nothing prevents a vectorized group."""

    def arrival_s(self, worker: int) -> float:
        """Return when an event that a worker sends now arrives, on the coordinator's clock."""

    def send_event(self, worker: int, event: Event) -> None:
        """Send an event of a worker to the coordinator."""

    def send_ready(
        self,
        worker: int,
        generation: int,
        epoch: int,
        step: int,
        round: int,
        compute_s: float,
        samples: int = 0,
        blocks: tuple[int, ...] = (),
    ) -> None:
        """Send a Ready of a worker to the coordinator."""

    def schedule_arrival(self, worker: int, event: Event, at_s: float) -> None:
        """Schedule the arrival of an event at the coordinator."""

    def handle_event(self, event: Event) -> bool:
        """Pass an event to the policies and send their actions; return whether there were any."""

    def exchange(self, worker: int) -> None:
        """Enter a worker into its next exchange."""

    def blockers(self, members: tuple[int, ...]) -> list[object]:
        """Return what blocks an exchange among these members."""

    def close_exchange(self, exchange_id: int) -> None:
        """Forget an exchange that has ended for all of its members."""

    def send_state(self, donor: int, joiner: int, place: int, transfer: StateTransfer) -> None:
        """Send a donor's state to the joiner at index `place`."""

    def on_new_sessions(self) -> None:
        """Note that a worker has new sessions."""

    def stop_if_empty(self) -> None:
        """Note that a worker has ended; the run ends after the last one."""

    def fail_invariant(self, what: str) -> NoReturn:
        """End the run with an error."""
