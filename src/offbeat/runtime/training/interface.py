"""What a session asks of whatever keeps its model in step with the others', and what that may ask of it.

Nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch.optim import Optimizer

from offbeat.events import Event
from offbeat.runtime.control.client import Member
from offbeat.runtime.control.rendezvous import Meeting
from offbeat.runtime.data.late_gradients import LateGradients
from offbeat.runtime.training.state_copy import Place
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.tracing import Tracer


class Loop(Protocol):
    """A worker's training loop, as its session sees it.

    Attributes:
        worker: this worker's id.
        world: how many workers the job started with.
        epoch: the epoch under way, from 0.
        is_newcomer: it came when the job was running.
        threads: the workers of this process, this one among them.
        servers: how many the parameter server begins with.
        timer: splits the worker's wall time into parts.
        samples: taken from the session since the last optimizer step.
        tracer: takes note of what happens when, in some steps; None in all others' place.
    """

    worker: int
    world: int
    epoch: int
    is_newcomer: bool
    threads: tuple[int, ...]
    servers: int
    timer: PartTimer
    samples: int
    tracer: Tracer | None

    @property
    def is_signalled(self) -> bool:
        """Whether this worker knows of a preemption signal, its own or another's."""

    @property
    def step(self) -> int:
        """Optimizer steps finished."""

    @property
    def batch(self) -> int:
        """Batches of the epoch taken from the session so far."""

    def check(self) -> None:
        """Raises if the job has failed."""

    def computed(self, compute_s: float) -> None:
        """Hears how long a forward and backward pass computed; may delay its end (injected slowness)."""

    def tell(self, event: Event) -> None:
        """Tells the coordinator."""

    def take_loss(self) -> float | None:
        """The mean loss that the program has said since the last call, None where it said nothing."""

    def place(self, round_: int) -> Place:
        """Where in the training the state belongs that this worker has."""

    def take_place(self, place: Place) -> None:
        """Goes on where another worker's state belongs."""


class Synchronizer(Protocol):
    """Keeps one worker's model in step with the others'."""

    @property
    def deals(self) -> bool:
        """Whether samples are dealt as they are needed."""

    @property
    def step(self) -> int | None:
        """Optimizer steps finished, by the group; None where this worker's own count is what counts."""

    @property
    def round(self) -> int:
        """What the model holds: see `Saving.round`."""

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that this one trains with now; it is not always among them."""

    @property
    def leads(self) -> bool:
        """Whether this worker is the one to evaluate, print and save for all."""

    @property
    def is_current(self) -> bool:
        """Whether this worker holds the parameters that the others have."""

    @property
    def is_common(self) -> bool:
        """Whether all that are current have the same parameters after a step; else each has its own copy."""

    @property
    def is_preempted(self) -> bool:
        """Whether the workers have agreed, by the end of the last step, that one of them is preempted."""

    @property
    def late(self) -> LateGradients | None:
        """What is computed by workers outside for members; None where nobody is ever outside."""

    @property
    def blocks_per_round(self) -> int:
        """How many dealt blocks a round has had so far, at most; 0 where that is not known."""

    @property
    def traffic(self) -> Mapping[str, float]:
        """See `Session.traffic`."""

    @property
    def is_clear(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""

    def enter(self, member: Member | None, meeting: Meeting | None) -> None:
        """Takes part in the job, which has started; in a world of one there may be none.

        Raises:
            WorkerError: the job failed.
        """

    def attach(self) -> None:
        """Puts hooks on the model."""

    def detach(self) -> None:
        """Takes them off and lets go of everything."""

    def weigh(self, batches: float) -> None:
        """Says what the next backward passes count, relative to a whole batch; with 0 they leave no trace."""

    def batch_of_round(self, batch: int, left_out: int) -> int:
        """Returns for which batch of the epoch the next round is: for `batch`, or one left out before it.

        Args:
            batch: that this worker computes next, counted from 1.
            left_out: how many before it this worker has left out since its last round.

        Raises:
            WorkerError: the job failed.
        """

    def quiet(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate."""

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """An optimizer is about to step; `has_closure`: which computes its gradients by itself.

        Raises:
            WorkerError: the job failed.
        """

    def after_step(self) -> None:
        """A step is over: an optimizer, or several, have stepped since the last call.

        Raises:
            WorkerError: the job failed.
        """

    def resume(self, step: int) -> None:
        """A state was loaded that had taken so many steps.

        Raises:
            OffbeatError: training has begun already.
        """

    def refresh(self) -> None:
        """Makes model and optimizer what is to be saved.

        Raises:
            WorkerError: the job failed.
        """

    def give_up_the_rest(self) -> None:
        """The loop has left its epoch early."""

    def flush(self) -> None:
        """The loop is over: gives what it still has to give and nobody else has to do with.

        Raises:
            WorkerError: the job failed.
        """

    def finish(self) -> None:
        """The loop is over, and the coordinator knows: gives what it still has to give.

        Raises:
            WorkerError: the job failed.
        """

    def settle(self) -> None:
        """Everybody has finished: takes the final state where it is not there yet.

        Raises:
            WorkerError: it cannot be had.
        """

    def abandon(self, error: Exception) -> None:
        """Ends all waiting with `error`; any thread may call it."""
