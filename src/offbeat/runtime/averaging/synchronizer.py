"""Training in groups that average gradients: binds the averager and the grouping to a session.

Nothing here decides who is in a group.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from offbeat.errors import OffbeatError, WorkerError
from offbeat.events import LeftOut, Ready
from offbeat.runtime.averaging.group_binding import Grouping, RegroupedError
from offbeat.runtime.averaging.interface import WORD_S, Averager, Host
from offbeat.runtime.collectives.interface import Exchange
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.runtime.collectives.torch_exchange import TorchExchange
from offbeat.runtime.control.client import Member
from offbeat.runtime.control.rendezvous import Meeting
from offbeat.runtime.data.late_gradients import LateGradients
from offbeat.runtime.training.hyperparameters import Group, places_of_numbers, read_numbers, write_numbers
from offbeat.runtime.training.interface import Loop
from offbeat.runtime.training.state_copy import StateCopier, check_can_travel
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.tracing import Tracer
from offbeat.runtime.training.trained import Trained
from offbeat.runtime.training.writes import Writes

Averaging: TypeAlias = Callable[[Grouping | None, Host], Averager]
"""(with whom, for whom) -> what averages the gradients; with None, in a world of one."""


class GroupSynchronizer:
    """A worker among those that average their gradients; see `Synchronizer`.

    Args:
        loop: the worker's session.
        trained: what is trained.
        averaging: makes what averages the gradients.
        deadline_s: how long a worker may keep the others waiting, in seconds.
        survives: the others go on when a worker is lost.
        is_dealt: samples are dealt as they are needed.

    Attributes:
        grouping: with whom gradients are averaged; None in a world of one.
        averager: what averages them.
        writes: what the program writes between the steps.
    """

    def __init__(
        self,
        loop: Loop,
        trained: Trained,
        *,
        averaging: Averaging,
        deadline_s: float,
        survives: bool,
        is_dealt: bool,
    ) -> None:
        self._loop, self._trained = loop, trained
        self._averaging, self._deadline_s = averaging, deadline_s
        self._survives, self._is_dealt = survives, is_dealt
        self._member: Member | None = None
        self._meeting: Meeting | None = None
        self._nccl: dist.ProcessGroup | None = None
        self._is_placed = self._can_hand_over = False
        self._blocks_per_round = 0
        self.grouping: Grouping | None = None
        self.averager: Averager
        self.writes = Writes(trained)

    @property
    def timer(self) -> PartTimer:
        """See `averager.Host`."""
        return self._loop.timer

    @property
    def tracer(self) -> Tracer | None:
        """See `averager.Host`."""
        return self._loop.tracer

    @property
    def is_signalled(self) -> bool:
        """See `averager.Host`."""
        return self._loop.is_signalled

    def check(self) -> None:
        """See `averager.Host`."""
        self._loop.check()

    def computed(self, compute_s: float) -> None:
        """See `averager.Host`."""
        self._loop.computed(compute_s)

    @property
    def deals(self) -> bool:
        """See `Synchronizer.deals`."""
        return self.grouping is not None and self._is_dealt

    @property
    def step(self) -> int | None:
        """See `Synchronizer.step`."""
        return None if self.grouping is None else self.grouping.follower.step

    @property
    def round(self) -> int:
        """See `Synchronizer.round`."""
        return self.averager.round

    @property
    def members(self) -> tuple[int, ...]:
        """See `Synchronizer.members`."""
        group = None if self.grouping is None else self.grouping.follower.group
        return (self._loop.worker,) if group is None else group.members

    @property
    def leads(self) -> bool:
        """The first of the members that held the parameters when the group was named leads.

        After every step there is exactly one.
        """
        if self.grouping is None or self.grouping.follower.group is None:
            return True
        return self.is_current and self.grouping.follower.donor == self._loop.worker

    @property
    def is_current(self) -> bool:
        """See `Synchronizer.is_current`."""
        return self.grouping is None or self.grouping.follower.is_member

    @property
    def is_common(self) -> bool:
        """See `Synchronizer.is_common`."""
        return True

    @property
    def is_preempted(self) -> bool:
        """See `Synchronizer.is_preempted`."""
        return self.averager.is_preempted

    @property
    def late(self) -> LateGradients | None:
        """See `Synchronizer.late`."""
        return None if self.grouping is None else self.grouping.late

    @property
    def blocks_per_round(self) -> int:
        """See `Synchronizer.blocks_per_round`."""
        return self._blocks_per_round

    @property
    def traffic(self) -> Mapping[str, float]:
        """See `Synchronizer.traffic`."""
        return {}

    @property
    def is_clear(self) -> bool:
        """See `Synchronizer.is_clear`."""
        return self.averager.is_clear

    # Coming and going ----------------------------------------------------------------------------------

    def enter(self, member: Member | None, meeting: Meeting | None) -> None:
        """See `Synchronizer.enter`."""
        self._member, self._meeting = member, meeting
        # Before those that a scheduler has added are taken:
        self._shared_numbers = places_of_numbers(self._trained.groups)
        if self._loop.world > 1 and member is not None:
            self._join_group(member)
        self.averager = self._averaging(self.grouping, self)
        self._meeting = None

    def _join_group(self, member: Member) -> None:
        self.grouping = Grouping(member, self._open_exchange, self._copy_state, self._deadline_s)
        if self._loop.is_newcomer:
            self.grouping.seat_of_newcomer()
            self.grouping.has_taken = False
            self._is_placed = True
            return
        with suppress(RegroupedError):
            seat = self.grouping.first_seat(self._loop.world)
            if seat is not None:
                self._copy_state(seat.exchange, seat.position, 0, 0)
                return
        with member.lock:
            reason = member.follower.reason
        raise WorkerError(
            f"worker {self._loop.worker} has nobody to have the same state with before the first step: "
            f"{reason}; nothing was trained yet: start the job again"
        )

    def _open_exchange(self, workers: Sequence[int]) -> Exchange:
        assert self._member is not None
        worker, world = self._loop.worker, self._loop.world
        device = self._trained.device
        if device.type == "cpu":
            names = [self._member.name_of(one) for one in workers]
            return LinkExchange(self._member.endpoint, names, workers.index(worker))
        if device.type != "cuda" or not dist.is_nccl_available():
            raise OffbeatError(
                f"the model lies on {device}; tensors travel from the CPU, or from CUDA with NCCL, "
                "which is not here"
            )
        if self._survives:
            raise OffbeatError(
                f"the model lies on {device}, where groups cannot change yet: use the strategy bsp, "
                "or train on the CPU"
            )
        assert self._meeting is not None
        torch.cuda.set_device(device)
        if dist.is_initialized():
            self._nccl = dist.new_group(backend="nccl")
        else:
            deadline = datetime.timedelta(seconds=self._deadline_s)
            dist.init_process_group(
                "nccl", store=self._meeting.store, rank=worker, world_size=world, timeout=deadline
            )
            self._nccl = dist.group.WORLD
        assert self._nccl is not None
        return TorchExchange(self._nccl)

    def _copy_state(self, exchange: Exchange, position: int, exchange_id: int, round_: int) -> int:
        copier = StateCopier(
            exchange,
            self._trained,
            position=position,
            deadline_s=self._deadline_s,
            exchange_id=exchange_id,
        )
        place = copier.copy(self._loop.place(round_))
        if position:  # else this may be another thread, and nothing has changed
            self.writes.note()
        if self._loop.is_newcomer and not self._is_placed:
            self._loop.take_place(place)
        return place.round

    def attach(self) -> None:
        """See `Synchronizer.attach`."""
        self.writes.note()
        self.averager.attach()

    def detach(self) -> None:
        """See `Synchronizer.detach`."""
        if hasattr(self, "averager"):
            self.averager.detach()
        if self._nccl is not None:  # made here, whether it is the world's or not
            dist.destroy_process_group(self._nccl)

    def flush(self) -> None:
        """See `Synchronizer.flush`."""
        self.averager.flush()

    def finish(self) -> None:
        """See `Synchronizer.finish`."""

    def settle(self) -> None:
        """See `Synchronizer.settle`.

        Raises:
            WorkerError: this worker hung while the others finished, and has not got what they have.
        """
        assert self.grouping is not None
        self.grouping.settle_at_the_end()
        if not self.grouping.follower.is_member:
            worker, step = self._loop.worker, self.grouping.follower.step
            raise WorkerError(
                f"worker {worker} did not answer while the others finished: its model is that of step "
                f"{step} and not of the end, which the others have",
                worker=worker,
                step=step,
            )

    def abandon(self, error: Exception) -> None:
        """See `Synchronizer.abandon`."""
        if self.grouping is not None:
            assert isinstance(error, WorkerError)
            self.grouping.abandon(error)

    # The loop ------------------------------------------------------------------------------------------

    def weigh(self, batches: float) -> None:
        """See `Synchronizer.weigh`."""
        self.averager.weigh(batches)

    def batch_of_round(self, batch: int, left_out: int) -> int:
        """See `Synchronizer.batch_of_round`: the coordinator knows, where all take part in every round."""
        member = self._member
        if member is None or self.grouping is None or self._survives:
            return batch
        round_, member.round_named = self.averager.round, None
        self._loop.tell(
            LeftOut(
                now_s=0.0,
                worker=self._loop.worker,
                epoch=self._loop.epoch,
                step=self._loop.step,
                round=round_,
                batch=batch,
                count=left_out,
            )
        )
        what = f"round {round_} to be named, since it left {left_out} batches out"
        member.wait_for(lambda: member.round_named is not None, self._deadline_s + WORD_S, what)
        named = member.round_named
        assert named is not None
        return named.batch

    def quiet(self) -> AbstractContextManager[None]:
        """See `Synchronizer.quiet`."""
        return self.averager.quiet() if self.grouping is not None else nullcontext()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """See `Synchronizer.before_step`."""
        if not self.averager.puts_off:
            self.writes.collect(optimizer)
        self.averager.before_step(has_closure=has_closure)

    def after_step(self) -> None:
        """See `Synchronizer.after_step`."""
        if self.grouping is not None:
            if self._survives and not self._can_hand_over:
                check_can_travel(self._trained)  # now that it holds what it will hold
                self._can_hand_over = True
            self.grouping.finish_step()
        self.averager.after_step()

    def resume(self, step: int) -> None:
        """See `Synchronizer.resume`."""
        self.averager.drain()
        if self.grouping is not None:
            self.grouping.follower.step = step

    def refresh(self) -> None:
        """See `Synchronizer.refresh`."""
        self.averager.drain()

    def give_up_the_rest(self) -> None:
        """See `Synchronizer.give_up_the_rest`."""
        if self.grouping is not None:
            self.grouping.late.throw_away()

    def ready(self, compute_s: float) -> tuple[int, int]:
        """Tells the coordinator that this worker's gradients are on their way; see `averager.Host`."""
        blocks: tuple[int, ...] = ()
        own = 0
        if self.deals and self._member is not None:
            with self._member.lock:
                own = len(self._member.hand.taken)
                blocks = self._member.hand.contribute(self._member.follower.is_member)
            own = min(own, len(blocks))
            self._blocks_per_round = max(self._blocks_per_round, own)
        self._loop.tell(
            Ready(
                now_s=0.0,
                worker=self._loop.worker,
                generation=0 if self.grouping is None else self.grouping.follower.generation,
                epoch=self._loop.epoch,
                step=self._loop.step,
                round=self.averager.round,
                compute_s=compute_s,
                samples=self._loop.samples,
                blocks=blocks,
                batch=self._loop.batch,
            )
        )
        return own, len(blocks) - own

    def hyperparameters(self) -> list[float]:
        """The learning rates and the like; see `averager.Host`.

        Schedulers are each worker's own, and one that was left out is behind with them.
        """
        return read_numbers(self._trained.groups, self._shared_numbers)

    def take_hyperparameters(self, values: list[float], groups: Sequence[Group] | None = None) -> None:
        """Uses the first member's learning rates and the like; see `averager.Host`."""
        write_numbers(self._trained.groups if groups is None else groups, self._shared_numbers, values)
