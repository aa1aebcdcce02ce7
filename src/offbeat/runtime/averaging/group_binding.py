"""A worker's seat in groups that change: binds what is decided to exchanges and to the copying of state.

What a worker may do when is the `Follower`'s to say; this module waits, opens exchanges, and moves state to
those who join.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from offbeat.errors import LinkError, WorkerError
from offbeat.events import Group
from offbeat.policies.membership.group_membership import Follower, Turn
from offbeat.runtime.collectives.interface import Exchange, TensorMemory
from offbeat.runtime.control.client import Member
from offbeat.runtime.data.late_gradients import LateGradients
from offbeat.runtime.training.state_copy import StateCopier


class RegroupedError(WorkerError):
    """An exchange was abandoned because the group has changed; it is repeated in the next one."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One worker's part in one group.

    Attributes:
        exchange: over the group's members.
        position: this worker's place among them.
        size: how many they are.
        weight: this worker's weight in the mean, relative to the others'.
        generation: of the group.
    """

    exchange: Exchange
    position: int
    size: int
    weight: float
    generation: int


class Grouping:
    """Where this worker sits, from group to group.

    Args:
        member: the control side.
        open_exchange: makes the exchange of a list of workers.
        copy_state: copies the state of an exchange's first member to its others, blocking; gets the exchange,
            this worker's position in it, the first of `StateCopier.IDS` exchange ids and, at position 0, how
            many exchanges are finished, which it returns to the others.
        deadline_s: how long to wait for a group at most, in seconds.

    Attributes:
        memory: where tensors lie best that are exchanged, in whatever group.
        has_taken: this worker's state has been replaced since that was last set to False.
        late: what is computed by workers outside for members.
    """

    def __init__(
        self,
        member: Member,
        open_exchange: Callable[[Sequence[int]], Exchange],
        copy_state: Callable[[Exchange, int, int, int], int],
        deadline_s: float,
    ) -> None:
        self._member = member
        self._follower: Follower = member.follower
        self._open_exchange = open_exchange
        self._copy_state = copy_state
        self._deadline_s = deadline_s
        self._seat: Seat | None = None
        self._seat_generation = -1
        self._exchange_id = 0  # the first that was not used in this seat
        self._handing_over: Exchange | None = None
        self._giving: threading.Thread | None = None
        self.memory = TensorMemory(member.endpoint)
        self.has_taken = False
        self.late = LateGradients(member)
        member.on_abandon = self._abandon

    def start_thread(self, name: str, run: Callable[[], object]) -> threading.Thread:
        """See `Member.start_thread`."""
        return self._member.start_thread(name, run)

    @property
    def follower(self) -> Follower:
        """What may be done when; to be read, and counted on by `finish_round` and `finish_step` here."""
        return self._follower

    def seat(self, *, wait: bool, may_take: bool = False) -> Seat | None:
        """This worker's seat for the next exchange; None where no group counts on it.

        Args:
            wait: wait for the next group and, if `may_take`, for the state to take; without, what would have
                to be waited for is None too.
            may_take: the worker stands where its state may be replaced.

        Raises:
            WorkerError: the job failed, or no group was named in time.
        """
        while True:
            with self._member.lock:
                turn, group = self._follower.turn(), self._follower.group
            if turn is Turn.WAIT and wait:
                self._member.wait_for(
                    lambda: self._follower.turn() is not Turn.WAIT, self._deadline_s, "the next group"
                )
            elif turn is Turn.TAKE and wait and may_take:
                self._take()
            elif turn is Turn.GO:
                assert group is not None
                return self._settle(group)
            else:
                return None

    def first_seat(self, world: int) -> Seat | None:
        """The seat of a worker that was there from the start; None where one of the `world` has gone already.

        Raises:
            WorkerError: the job failed, or no group was named in time.
        """
        seat = self.seat(wait=True)
        with self._member.lock:
            group = self._follower.group
        has_everybody = group is not None and group.members[:world] == tuple(range(world))
        return seat if has_everybody else None

    def seat_of_newcomer(self) -> Seat:
        """The first seat of a worker that has no state yet, once it has taken one.

        Raises:
            WorkerError: the job failed or ended, or no group named this worker in time.
        """

        def is_inside() -> bool:
            return self._follower.turn() in (Turn.TAKE, Turn.GO)

        while True:
            self._member.wait_for(
                lambda: is_inside() or self._member.is_dismissed, self._deadline_s, "a group that takes it in"
            )
            with self._member.lock:
                if not is_inside():
                    worker = self._follower.worker
                    raise WorkerError(f"worker {worker} came too late: the job has ended without it")
            seat = self.seat(wait=True, may_take=True)
            if seat is not None:
                return seat

    def next_exchange_id(self) -> int:
        """An exchange id that all members use for the same exchange.

        Where the group has changed since this seat was taken, its exchanges are abandoned: then it is an id
        that nobody uses, and the new group's are not touched.
        """
        with self._member.lock:
            if self._is_up_to_date():
                self._follower.exchange_id += 1
                self._exchange_id = self._follower.exchange_id
            else:
                self._exchange_id += 1
            return self._exchange_id - 1

    @property
    def stays(self) -> bool:
        """Whether the next exchange is, as far as is known, in the same group."""
        with self._member.lock:
            return self._is_up_to_date() and not self._follower.will_change

    def finish_round(self, contributions: Sequence[tuple[int, int]]) -> bool:
        """Counts an exchange as finished; False if it was abandoned, and then it has to be repeated.

        Args:
            contributions: see `Follower.finish_round`.
        """
        with self._member.lock:
            return self._is_up_to_date() and self._follower.finish_round(contributions)

    def finish_step(self) -> None:
        """Counts an optimizer step, and hands the state to those who join from here on."""
        with self._member.lock:
            self._follower.finish_step()
        self.late.finish_step()
        with self._member.lock:
            group = self._follower.group
            if not self._follower.is_member or self._is_up_to_date():
                return
        assert group is not None
        self._settle(group)

    def settle_at_the_end(self) -> None:
        """Gives or takes the final state, as the last group says, and is done when that is."""
        self.seat(wait=True, may_take=True)
        if self._giving is not None:
            self._giving.join(self._deadline_s)

    def abandon(self, error: WorkerError) -> None:
        """Ends every exchange with `error`. Any thread may call it."""
        for exchange in (self._seat.exchange if self._seat else None, self._handing_over):
            if exchange is not None:
                exchange.abandon(error)

    # Within --------------------------------------------------------------------------------------------

    def _is_up_to_date(self) -> bool:
        """Whether the seat is one in the group in force."""
        return self._seat_generation == self._follower.generation

    def _settle(self, group: Group) -> Seat:
        """The seat in a group that was in force a moment ago, opened if it is new."""
        if group.generation != self._seat_generation:
            self._leave_seat()
            joiners: tuple[int, ...] = ()
            with self._member.lock:
                if self._follower.group is group:
                    self._follower.exchange_id += StateCopier.IDS
                    joiners = self._follower.joiners
            if joiners:
                self._hand_over(group)
            self._sit_down(group)
        assert self._seat is not None
        return self._seat

    def _sit_down(self, group: Group) -> None:
        position = group.members.index(self._follower.worker)
        size = len(group.members)
        exchange = self._open_exchange(group.members)
        weight = group.weights[position] * size
        self._seat = Seat(
            exchange=exchange, position=position, size=size, weight=weight, generation=group.generation
        )
        self._seat_generation = group.generation
        self._end_with_the_job(exchange)
        self._end_if_overtaken(exchange, group)

    def _leave_seat(self) -> None:
        if self._seat is not None:
            self._seat.exchange.abandon(_regrouped())
            self._seat = None

    def _hand_over(self, group: Group) -> None:
        """Sends the state in the background; it does not change before those who join have it."""
        exchange = self._open_exchange([self._follower.worker, *group.joining])
        self._handing_over = exchange
        self._end_with_the_job(exchange)
        self._end_if_overtaken(exchange, group)
        round_ = self._follower.round

        def give() -> None:
            with suppress(WorkerError, LinkError):  # the next group says who is left
                self._copy_state(exchange, 0, group.exchange_id, round_)

        self._giving = self.start_thread("offbeat-state", give)

    def _take(self) -> None:
        """Takes the donor's state; returns also where the group has changed meanwhile."""
        with self._member.lock:
            group = self._follower.group
            assert group is not None
            donor = self._follower.donor
        exchange = self._open_exchange([donor, *group.joining])
        self._handing_over = exchange
        self._end_with_the_job(exchange)
        self._end_if_overtaken(exchange, group)
        position = 1 + group.joining.index(self._follower.worker)
        with suppress(RegroupedError):
            round_ = self._copy_state(exchange, position, group.exchange_id, 0)
            with self._member.lock:
                if self._follower.group is group:
                    self._follower.take(round=round_)
                    self.has_taken = True
        self._handing_over = None

    def _end_with_the_job(self, exchange: Exchange) -> None:
        """Ends a new exchange at once where the job failed before it could be seen here."""
        if self._member.failure is not None:
            exchange.abandon(self._member.failure)

    def _end_if_overtaken(self, exchange: Exchange, group: Group) -> None:
        """Ends a new exchange at once where its group was given up before it could be seen here."""
        with self._member.lock:
            has_changed = self._follower.is_void or self._follower.group is not group
        if has_changed:
            exchange.abandon(_regrouped())

    def _abandon(self) -> None:
        """Hears, in the links' thread, that exchanges under way cannot be finished."""
        self.abandon(_regrouped())


def _regrouped() -> RegroupedError:
    return RegroupedError("the exchange was abandoned: the group has changed")
