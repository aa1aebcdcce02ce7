"""Rounds in which each layer's gradients travel by themselves: packed, sent, and waited for one by one.

This module never decides when a parcel leaves or is waited for, nor what is in it (`Layout`), and never
touches the optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
from torch import nn

from offbeat.errors import OffbeatError, WorkerError
from offbeat.numerics.collectives.costs import Line, cost, fit_line
from offbeat.runtime.averaging.buckets import BufferList, Slot
from offbeat.runtime.averaging.group_binding import Grouping
from offbeat.runtime.averaging.interface import LANES, WORD_S, Host, gathered, spread
from offbeat.runtime.collectives.contribution import Contribution, Part
from offbeat.runtime.collectives.interface import Pending
from offbeat.runtime.hybrid.layer_layout import Layout, Order, Plan
from offbeat.runtime.training.partial_step import Settings, plainly
from offbeat.runtime.training.writes import check_all_wrote

_PROBE_BYTES = tuple(1 << power for power in range(12, 20))
_PROBES = 3
_KEPT_BYTES = 1 << 17  # a gradient from this size on is sent from where it lies


class LayerRounds:
    """What a worker's rounds have in common: the memory in which they travel, and the way to the others.

    Args:
        model: whose buffers travel too.
        parameters: whose gradients do.
        grouping: with whom to exchange; more than one member.
        host: the session.
        deadline_s: how long an exchange may take at most, in seconds.

    Attributes:
        names: by parameter.
        buffers: the model's.
        exchange: over the members.
        position, size: this worker's place among them, and how many they are.
        layout: where what travels lies; there from the first plan on (`adopt`).
        slots: by bucket of the layout, its memory.
        fires: by parameter, how often its gradient comes in a backward pass; 0 before that is known.
        has_failed: the job has failed, and has said so here.
        patience_s: how long an exchange is waited for, in seconds.
        signalled_step: the first step in whose rounds a member has said that it knows of a preemption signal.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        grouping: Grouping,
        host: Host,
        *,
        deadline_s: float,
    ) -> None:
        self.parameters, self.grouping, self.host = parameters, grouping, host
        self.patience_s = deadline_s + WORD_S
        seat = grouping.seat(wait=True)
        assert seat is not None  # the group has everybody
        self.exchange, self.position, self.size = seat.exchange, seat.position, seat.size
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        self.names = [name_of[id(parameter)] for parameter in parameters]
        self.buffers = BufferList(model)
        self._zeros = partial(grouping.memory.zeros, device=torch.device("cpu"))
        self.layout: Layout
        self.slots: list[Slot] = []
        self.fires = [0] * len(parameters)
        self.has_failed = False
        self.signalled_step: int | None = None

    def adopt(self, plan: Plan, order: Order) -> None:
        """Lays the memory out for a plan; where no round is under way, for all members at once.

        Args:
            order: see `Layout`.
        """
        lanes = LANES * len(self.host.hyperparameters())
        self.layout = Layout(plan, self.parameters, self.buffers.tensors(), lanes=lanes, order=order)
        self.slots = []  # their memory may be taken again
        for bucket in self.layout.buckets:
            self.slots.append(Slot(bucket, self.layout.shapes, len(self.parameters), self._zeros))

    def measured_line(self, workers: int) -> Line:
        """Return what a message costs, by how long rings of several sizes take, each as quickly as it went.

        All members have to call it at once.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
        """
        ring = cost("ring", workers)
        samples = []
        for size in _PROBE_BYTES:
            own, into = (self._zeros(size // 4, torch.float32) for _ in range(2))
            took_s = []
            for _ in range(_PROBES):
                began_s = time.perf_counter()
                self.wait(self.exchange.all_reduce(own, into, exchange_id=self.grouping.next_exchange_id()))
                took_s.append(time.perf_counter() - began_s)
            samples.append((ring, size, min(took_s)))
        return fit_line(samples)

    def plan_of_the_first(self, make: Callable[[], Plan]) -> Plan:
        """Return the plan that the first member makes; all members have to call it at once.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
        """
        content = b"" if self.position else msgspec.msgpack.encode(make())
        length = torch.tensor([len(content)], device="cpu")
        self._broadcast(length)
        flat = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if content:
            flat.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._broadcast(flat)
        return msgspec.msgpack.decode(flat.numpy().tobytes(), type=Plan)

    def _broadcast(self, flat: torch.Tensor) -> None:
        exchange_id = self.grouping.next_exchange_id()
        self.wait(self.exchange.broadcast(flat, root=0, exchange_id=exchange_id))

    def wait(self, pending: Pending) -> None:
        """Waits for an exchange.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
        """
        try:
            pending.wait(self.patience_s)
        except WorkerError:
            self.has_failed = True
            raise

    def check(self) -> None:
        """See `Host.check`.

        Raises:
            WorkerError: the job has failed.
        """
        try:
            self.host.check()
        except WorkerError:
            self.has_failed = True
            raise

    def turn_banks(self, *, are_prepared: bool) -> None:
        """Leaves the last round's memory to its means.

        Args:
            are_prepared: the next round is laid out as this one, and the others may begin it.
        """
        for index, slot in enumerate(self.slots):
            slot.hand_out()
            if are_prepared:
                self.exchange.prepare(
                    slot.bank.flat,
                    exchange_id=self.grouping.follower.exchange_id,
                    index=index,
                    algorithm=self.layout.algorithms[index],
                )


class Round:
    """One backward pass's gradients on their way.

    Args:
        rounds: what it has in common with the others.
        share: by what this worker's gradients are multiplied.
        step: how many steps were taken before it.

    Attributes:
        fired: by parameter, how often its gradient has come.
        is_sent: all of it is on its way.
        weight: the sum of all shares, None before it is known.
        used: by parameter, whether anybody has a gradient; empty before that is known.
        was_looked_at: somebody has looked at one of its means.
        settings: by group of the optimizer, its hyperparameters when it stepped; empty before.
    """

    def __init__(self, rounds: LayerRounds, share: float, step: int) -> None:
        self._rounds, self._share, self._step = rounds, share, step
        slots = rounds.slots
        self._exchange_id: int | None = None  # None before anything is sent
        self._banks = [slot.bank for slot in slots]  # where the means will be
        self._kept: list[dict[int, Part]] = [{} for _ in slots]  # by entry, what is not packed but stays
        self._missing = [len(slot.entries) for slot in slots]  # gradients that have not come
        self._pending: list[Pending | None] = [None] * len(slots)
        self._launched_s = [0.0] * len(slots)
        self._is_there = [False] * len(slots)
        self._is_settled = [False] * len(slots)
        self._written: list[str] = []  # by the program, since the last round
        self._has: list[bool] = []  # by parameter, whether this worker has a gradient
        self._copies: dict[int, torch.Tensor] = {}  # of means that lie in another order than their parameters
        self._is_taken = [False] * len(rounds.parameters)
        self.fired = [0] * len(rounds.parameters)
        self.is_sent = False
        self.weight: float | None = None
        self.used: list[bool] = []
        self.was_looked_at = False
        self.settings: Settings = []

    # The way there -------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether some of it is on its way."""
        return any(pending is not None for pending in self._pending)

    def take(self, entry: int) -> int | None:
        """Packs a parameter's gradient, that has come, or leaves it where it lies and sends it from there.

        Returns:
            Its parcel, if that is complete with it.

        Raises:
            OffbeatError: its parcel has left.
        """
        rounds = self._rounds
        index, _ = rounds.layout.place_of[entry]
        if self._pending[index] is not None:
            raise OffbeatError(
                f"a gradient of {rounds.names[entry]} came after its mean was on its way: it comes more "
                "often in this backward pass than in the first steps; use overlap=none"
            )
        with torch.no_grad():
            if not self._leave_in_place(entry):
                self._pack(entry, add=self._is_taken[entry])
        self.fired[entry] += 1
        self._is_taken[entry] = True
        if self.fired[entry] != rounds.fires[entry]:
            return None
        self._missing[index] -= 1
        return None if self._missing[index] else index

    def leave(self, entry: int) -> None:
        """Leaves a gradient that has come with its parameter until all are sent (`send_rest`)."""
        self.fired[entry] += 1

    def _leave_in_place(self, entry: int) -> bool:
        """Leaves a large gradient that comes once where it lies, if it can be sent from there."""
        rounds = self._rounds
        gradient, (index, place) = rounds.parameters[entry].grad, rounds.layout.place_of[entry]
        assert gradient is not None
        slot, kept = rounds.slots[index], self._kept[index]
        if entry in kept:  # it comes once more than in the first steps
            Contribution(slot.own.flat, [kept.pop(entry)]).settle()
        is_kept = (
            rounds.fires[entry] == 1
            and not self._is_taken[entry]
            and gradient.nbytes >= _KEPT_BYTES
            and gradient.is_contiguous()
            and self._share != 0.0
        )
        if is_kept:
            kept[entry] = Part(slot.offsets[place], gradient.detach().view(-1), self._share)
        return is_kept

    def _pack(self, entry: int, *, add: bool = False) -> None:
        """Writes or adds a gradient's share of the mean.

        Dividing before the sum keeps half precision from overflowing on the way.
        """
        index, place = self._rounds.layout.place_of[entry]
        view, gradient = self._rounds.slots[index].own.views[place], self._rounds.parameters[entry].grad
        if add:
            assert gradient is not None
            view.add_(gradient, alpha=self._share)
        elif gradient is None or not self._share:
            view.zero_()
        else:
            torch.mul(gradient, self._share, out=view)

    def launch(self, index: int) -> None:
        """Sends what a bucket holds."""
        rounds, slot = self._rounds, self._rounds.slots[index]
        if self._exchange_id is None:
            self._exchange_id = rounds.grouping.next_exchange_id()
        self._launched_s[index] = time.perf_counter()
        self._pending[index] = rounds.exchange.all_reduce(
            slot.own.flat,
            slot.bank.flat,
            exchange_id=self._exchange_id,
            index=index,
            algorithm=rounds.layout.algorithms[index],
            priority=rounds.layout.priorities[index],
            parts=[*self._kept[index].values()],
        )
        self._kept[index].clear()

    def send_rest(self, compute_s: float) -> None:
        """Sends what has not been sent, with gradients as they are now, and what goes along; tells the host.

        Args:
            compute_s: how long this worker computed for it, in seconds.
        """
        rounds = self._rounds
        self._written = rounds.host.writes.take()
        self._has = [
            bool(self._share) and (is_taken or parameter.grad is not None)
            for is_taken, parameter in zip(self._is_taken, rounds.parameters, strict=True)
        ]
        with torch.no_grad():
            for index in range(rounds.layout.parcels):
                if self._pending[index] is None:
                    for entry in rounds.slots[index].entries:
                        if not self._is_taken[entry]:
                            self._pack(entry)
                    self.launch(index)
            self._send_along()
        rounds.host.ready(compute_s)
        self.is_sent = True
        rounds.grouping.finish_round([])

    def _send_along(self) -> None:
        """Sends the buffers, if this worker is the first member, and the epilogue."""
        rounds = self._rounds
        buffers, count = rounds.buffers.tensors(), len(rounds.parameters)
        for index in range(rounds.layout.parcels, len(rounds.slots)):
            slot = rounds.slots[index]
            for entry, view in zip(slot.entries, slot.own.views, strict=True):
                if entry == count + len(buffers):
                    lanes = spread(rounds.host.hyperparameters())
                    shared = [0.0] * len(lanes) if rounds.position else lanes
                    flags = [self._share, len(self._written), rounds.host.is_signalled]
                    view.copy_(torch.tensor([*flags, *self._has, *shared], dtype=view.dtype, device="cpu"))
                elif rounds.position:
                    view.zero_()
                else:
                    view.copy_(buffers[entry - count])
            self.launch(index)

    # The way back --------------------------------------------------------------------------------------

    def wait(self, index: int) -> None:
        """Waits until what a bucket holds has come, and before that for what goes along.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
        """
        if self._is_there[index]:
            return
        rounds = self._rounds
        rounds.host.timer.switch("communicate")
        self._wait_along()
        if index < rounds.layout.parcels:
            self._wait(index)
            self._is_there[index] = True

    def comes(self, index: int) -> bool:
        """Wait until what a parcel holds has come; return whether it has. For any thread; nobody is told."""
        pending = self._pending[index]
        assert pending is not None
        try:
            pending.wait(self._rounds.patience_s)
        except WorkerError:
            return False
        return True

    def settle(self, index: int) -> None:
        """Makes means of what a parcel holds, when all of it has come."""
        if self._is_settled[index]:
            return
        assert self.weight is not None
        rounds = self._rounds
        bank, entries = self._banks[index], rounds.slots[index].entries
        with plainly():
            if self.weight not in (0.0, 1.0):
                bank.flat.div_(self.weight)
            for entry, view in zip(entries, bank.views, strict=True):
                if entry in self._copies:
                    self._copies[entry].copy_(view)
        self._is_settled[index] = True

    def learn_used(self) -> list[bool]:
        """Return by parameter whether anybody has a gradient.

        Of those that this worker has no gradient of, only the epilogue tells: then it is waited for.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
        """
        if all(self._has):
            return self._has
        self._wait_along()
        return self.used

    def mean(self, entry: int) -> torch.Tensor:
        """Where a parameter's mean will be, laid out as the parameter is; there once it was waited for."""
        index, place = self._rounds.layout.place_of[entry]
        view, parameter = self._banks[index].views[place], self._rounds.parameters[entry]
        if view.stride() == parameter.stride():
            return view
        if entry not in self._copies:
            self._copies[entry] = torch.empty_like(parameter, requires_grad=False)
        return self._copies[entry]

    def _wait_along(self) -> None:
        for index in range(self._rounds.layout.parcels, len(self._rounds.slots)):
            self._take_along(index)

    def _take_along(self, index: int) -> None:
        """Waits for buffers and epilogue, and makes the first member's buffers the buffers."""
        if self._is_there[index]:
            return
        self._wait(index)
        self._is_there[index] = True
        rounds = self._rounds
        count, buffers = len(rounds.parameters), rounds.buffers.tensors()
        for entry, view in zip(rounds.slots[index].entries, self._banks[index].views, strict=True):
            if entry == count + len(buffers):
                weight, written, signalled, *rest = view.tolist()
                check_all_wrote(self._written, written, rounds.size)
                if signalled and rounds.signalled_step is None:
                    rounds.signalled_step = self._step
                self.weight, self.used = weight, [bool(one) for one in rest[:count]]
                if rounds.position:
                    rounds.host.take_hyperparameters(gathered(rest[count:]), self.settings or None)
            elif rounds.position:
                # Like the layers that write them, this does not count as a change to autograd.
                with plainly():
                    buffers[entry - count].data.copy_(view)

    def _wait(self, index: int) -> None:
        """Waits for a bucket's exchange, and takes note of how long that was on its way."""
        rounds, pending = self._rounds, self._pending[index]
        assert pending is not None
        rounds.wait(pending)
        if rounds.host.tracer is not None and pending.ended_s is not None:
            what = "what goes along"
            if index < rounds.layout.parcels:
                slot = rounds.slots[index]
                size = f"{slot.own.flat.nbytes / 1e6:.2f} MB"
                what = f"{rounds.names[slot.entries[0]]}, {size} by {rounds.layout.algorithms[index]}"
            rounds.host.tracer.add(what, what, self._launched_s[index], pending.ended_s)
