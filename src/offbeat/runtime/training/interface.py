"""Interfaces between a session, its strategy, and the synchronizer that the strategy makes.

This module has no implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from torch.optim import Optimizer

from offbeat.events import Event
from offbeat.policies import WorkerProtocol
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.control.configuration import PolicySpec
from offbeat.runtime.control.rendezvous import RendezvousInfo
from offbeat.runtime.data.late_gradients import LateGradients
from offbeat.runtime.training.state_copy import TrainingPosition
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.tracing import Tracer
from offbeat.runtime.training.trained import TrainingState

COORDINATOR_MARGIN_S = 5.0
"""Added to a worker's deadline, so that the coordinator's error, which names the late worker, comes first."""


class Strategy(Protocol):
    """How the workers of a job synchronize; the constructor arguments are the whole configuration."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def timeout_s(self) -> float:
        """How long a worker may keep other workers waiting, in seconds."""

    @property
    def survives_worker_loss(self) -> bool:
        """Whether training continues when a worker is lost."""

    @property
    def readmits_workers(self) -> bool:
        """Whether a worker that falls silent may return, since no worker waits for it; else it is lost."""

    @property
    def shards(self) -> Literal["dynamic", "equal"]:
        """Whether samples are assigned on demand ("dynamic") or split equally in advance ("equal")."""

    @property
    def always_needs_coordinator(self) -> bool:
        """Whether a job of one worker needs a coordinator, too."""

    @property
    def trains_several_models(self) -> bool:
        """Whether a session may have several models, which the program calls one by one."""

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """Return the policies that the coordinator runs, in order.

        Args:
            world: number of workers with which the job starts.
            start_s: how long after the first worker the last one may join, in seconds.
            servers: number of server processes of the parameter server, where the strategy has one.
        """

    def make_worker_protocol(self, worker: int) -> WorkerProtocol:
        """Make the object that applies the policies' actions in a worker, and answers them."""

    def make_synchronizer(self, loop: TrainingLoop, trained: TrainingState) -> Synchronizer:
        """Make the object that keeps this worker's model in step with those of other workers."""


class TrainingLoop(Protocol):
    """What a synchronizer requires of the session, which runs a worker's training loop.

    Attributes:
        worker: this worker's id.
        world: the number of workers at the job's start.
        is_newcomer: this worker joined a running job.
        local_workers: the ids of the workers in this process, including this one.
        servers: the number of servers that the workers start.
        timer: splits the worker's wall time into parts.
        tracer: records a timeline in some steps; None in all other steps.
    """

    worker: int
    world: int
    is_newcomer: bool
    local_workers: tuple[int, ...]
    servers: int
    timer: PartTimer
    tracer: Tracer | None

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""

    @property
    def samples(self) -> int:
        """The number of samples taken from the session since the last optimizer step."""

    @property
    def has_preemption_signal(self) -> bool:
        """Whether this worker knows of a preemption signal, its own or another worker's."""

    @property
    def step(self) -> int:
        """Number of finished optimizer steps."""

    @property
    def batch(self) -> int:
        """Number of batches of the epoch taken from the session so far."""

    def raise_if_failed(self) -> None:
        """Raise an error if the job has failed."""

    def on_computed(self, wait_for_compute_s: Callable[[], float]) -> None:
        """Report the end of a forward and backward pass; may block to inject slowness.

        Args:
            wait_for_compute_s: returns the compute time of the pass, in seconds; on an accelerator it blocks
                until the device has computed it, so that slowness begins where the pass ends.
        """

    def send_event(self, event: Event) -> None:
        """Send an event to the coordinator."""

    def pop_mean_loss(self) -> float | None:
        """Return the mean of the losses that the program reported since the last call, or None."""

    def position(self, round_: int) -> TrainingPosition:
        """Return the training position of this worker's state."""

    def restore_position(self, position: TrainingPosition) -> None:
        """Continue at the training position of another worker's state."""


class Synchronizer(Protocol):
    """Synchronizes one worker's model with those of the other workers."""

    @property
    def assigns_samples(self) -> bool:
        """Whether samples are assigned as they are needed."""

    @property
    def step(self) -> int | None:
        """Number of optimizer steps that the group has finished; None where each worker counts its own."""

    @property
    def round(self) -> int:
        """The number of rounds in the model: see `CheckpointQuery.round`."""

    @property
    def members(self) -> tuple[int, ...]:
        """The workers in the current group, which may not include this one."""

    @property
    def is_leader(self) -> bool:
        """Whether this worker evaluates, prints and saves for all workers."""

    @property
    def has_current_state(self) -> bool:
        """Whether this worker has the current parameters of the group."""

    @property
    def replicas_identical(self) -> bool:
        """Whether all current workers have the same parameters after a step, not each its own copy."""

    @property
    def is_preempted(self) -> bool:
        """Whether the workers have agreed, by the end of the last step, that one of them is preempted."""

    @property
    def late_gradients(self) -> LateGradients | None:
        """The late gradients of workers outside the group; None where all workers are in it."""

    @property
    def blocks_per_round(self) -> int:
        """The largest number of assigned blocks of a round so far; 0 where that is not known."""

    @property
    def traffic(self) -> Mapping[str, float]:
        """See `Session.traffic`."""

    @property
    def has_no_pending_gradient(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""

    def join_job(self, client: CoordinatorClient | None, rendezvous: RendezvousInfo | None) -> None:
        """Join the started job; in a world of one, `member` and `rendezvous` may be None.

        Raises:
            WorkerError: the job failed.
        """

    def attach(self) -> None:
        """Register hooks on the model."""

    def detach(self) -> None:
        """Remove the hooks and release all resources."""

    def set_batch_weight(self, batches: float) -> None:
        """Set the weight of the next backward passes, 1 for a whole batch; with 0 they have no effect."""

    def agree_on_batch(self, batch: int, skipped: int) -> int:
        """Return the batch of the epoch that the next round is for: `batch`, or one skipped before it.

        Args:
            batch: the batch that this worker computes next, counted from 1.
            skipped: the number of batches before it that this worker has skipped since its last round.

        Raises:
            WorkerError: the job failed.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate without an exchange."""

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Prepare an optimizer's step; with `has_closure`, a closure computes its gradients.

        Raises:
            WorkerError: the job failed.
        """

    def after_step(self) -> None:
        """End a step, in which one or several optimizers have stepped.

        Raises:
            WorkerError: the job failed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this object beyond model and optimizers; often nothing."""

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue from a checkpoint, whose model and optimizers are loaded already.

        Args:
            state: a `state_dict`, possibly of another strategy's synchronizer.
            step: finished optimizer steps.

        Raises:
            OffbeatError: training has begun already, or `state` is of another model.
        """

    def local_state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this worker alone; often nothing."""

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `local_state_dict`, possibly of another strategy's synchronizer.

        Raises:
            OffbeatError: it is of another model.
        """

    def complete_state(self) -> None:
        """Complete model and optimizer, so that they can be saved.

        Raises:
            WorkerError: the job failed.
        """

    def on_epoch_left_early(self) -> None:
        """Drop work for the rest of the epoch, which the loop has left early."""

    def end_epoch(self) -> None:
        """Complete an epoch whose batches this worker has used up.

        Raises:
            WorkerError: the job failed.
        """

    def flush(self) -> None:
        """Complete this worker's outstanding work at the end of the loop, which needs no other worker.

        Raises:
            WorkerError: the job failed.
        """

    def finish(self) -> None:
        """Complete all outstanding work, after the coordinator was notified of the loop's end.

        Raises:
            WorkerError: the job failed.
        """

    def receive_final_state(self) -> None:
        """Receive the final state where it is missing, after all workers have finished.

        Raises:
            WorkerError: it is not available.
        """

    def abandon(self, error: Exception) -> None:
        """Fail all waiting calls with `error`; thread-safe."""
