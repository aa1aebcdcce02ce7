"""The synchronizer that averages gradients over a group: connects averager and group binding to a session.

This module never decides on membership.
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
"""(group binding, None in a world of one; session's interface) -> the averager."""


class GroupSynchronizer:
    """Averages gradients over a group of workers; see `Synchronizer`.

    Args:
        loop: the worker's session.
        trained: model and optimizers.
        averaging: makes the averager.
        deadline_s: how long a worker may delay the other members, in seconds.
        survives: the job continues when a worker is lost.
        is_dealt: samples are assigned as they are needed.

    Attributes:
        grouping: the binding to the group; None in a world of one.
        averager: averages the gradients.
        writes: tracks the program's writes between the steps.
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
        self._make_averager, self._deadline_s = averaging, deadline_s
        self._survives, self._is_dealt = survives, is_dealt
        self._member: Member | None = None
        self._meeting: Meeting | None = None
        self._nccl: dist.ProcessGroup | None = None
        self._has_position = self._is_state_checked = False
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
        """Whether this worker is the first member that had the parameters when the group was formed.

        After every step this is true on exactly one worker.
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

    # Joining and leaving -------------------------------------------------------------------------------

    def enter(self, member: Member | None, meeting: Meeting | None) -> None:
        """See `Synchronizer.enter`."""
        self._member, self._meeting = member, meeting
        # Before numbers that a scheduler has added are read:
        self._shared_numbers = places_of_numbers(self._trained.groups)
        if self._loop.world > 1 and member is not None:
            self._join_group(member)
        self.averager = self._make_averager(self.grouping, self)
        self._meeting = None

    def _join_group(self, member: Member) -> None:
        self.grouping = Grouping(member, self._open_exchange, self._copy_state, self._deadline_s)
        if self._loop.is_newcomer:
            self.grouping.seat_of_newcomer()
            self.grouping.has_taken = False
            self._has_position = True
            return
        with suppress(RegroupedError):
            handle = self.grouping.first_seat(self._loop.world)
            if handle is not None:
                self._copy_state(handle.exchange, handle.position, 0, 0)
                return
        with member.lock:
            reason = member.follower.reason
        raise WorkerError(
            f"worker {self._loop.worker} could not receive the initial state before the first step: "
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
                f"the model lies on {device}; expected the CPU, or CUDA with NCCL, "
                "which is not available here"
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
        if position:  # at 0 nothing has changed, and this may be another thread
            self.writes.note()
        if self._loop.is_newcomer and not self._has_position:
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
        if self._nccl is not None:  # created here, also where it is the world's
            dist.destroy_process_group(self._nccl)

    def flush(self) -> None:
        """See `Synchronizer.flush`."""
        self.averager.flush()

    def finish(self) -> None:
        """See `Synchronizer.finish`."""

    def settle(self) -> None:
        """See `Synchronizer.settle`.

        Raises:
            WorkerError: this worker hung while the other members finished, and lacks the final state.
        """
        assert self.grouping is not None
        self.grouping.settle_at_the_end()
        if not self.grouping.follower.is_member:
            worker, step = self._loop.worker, self.grouping.follower.step
            raise WorkerError(
                f"worker {worker} did not answer while the other workers finished: its model is that of step "
                f"{step}, not the final one",
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
        """See `Synchronizer.batch_of_round`: asks the coordinator where all are in every round."""
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
        what = f"the batch of round {round_}, after it left out {left_out} batches"
        member.wait_for(lambda: member.round_named is not None, self._deadline_s + WORD_S, what)
        answer = member.round_named
        assert answer is not None
        return answer.batch

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
            if self._survives and not self._is_state_checked:
                check_can_travel(self._trained)  # after the first step the optimizers' state is complete
                self._is_state_checked = True
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
        """Announces this worker's gradients to the coordinator; see `averager.Host`."""
        blocks: tuple[int, ...] = ()
        own_blocks = 0
        if self.deals and self._member is not None:
            with self._member.lock:
                own_blocks = len(self._member.hand.taken)
                blocks = self._member.hand.contribute(self._member.follower.is_member)
            own_blocks = min(own_blocks, len(blocks))
            self._blocks_per_round = max(self._blocks_per_round, own_blocks)
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
        return own_blocks, len(blocks) - own_blocks

    def hyperparameters(self) -> list[float]:
        """The numbers in the optimizers' parameter groups, such as learning rates; see `averager.Host`.

        Each worker has its own schedulers, and those of an excluded worker lag behind.
        """
        return read_numbers(self._trained.groups, self._shared_numbers)

    def take_hyperparameters(self, values: list[float], groups: Sequence[Group] | None = None) -> None:
        """Applies the first member's hyperparameters; see `averager.Host`."""
        write_numbers(self._trained.groups if groups is None else groups, self._shared_numbers, values)
