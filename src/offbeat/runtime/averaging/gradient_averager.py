"""Averages gradients during the backward pass: hooks fill buckets, buckets are exchanged as they fill.

When `backward()` returns, every `param.grad` holds the mean over the group's workers, so that whatever a
training loop does with gradients afterwards (clipping, unscaling, accumulation) sees what a single process
with the large batch would see. This worker's own part stays untouched until an exchange has succeeded. This
module never decides who takes part, and never touches the optimizer.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offbeat.numerics.collectives.buckets import plan_buckets
from offbeat.runtime.averaging.buckets import BufferList, Slot
from offbeat.runtime.averaging.group_binding import Grouping, RegroupedError, Seat
from offbeat.runtime.averaging.interface import LANES, WORD_S, Host, gathered, spread
from offbeat.runtime.training.backward import BackwardPass, Onlookers, check_can_average, watch
from offbeat.runtime.training.checks import Forms
from offbeat.runtime.training.hooks import ForwardHook, Hook, Scripting, do_nothing
from offbeat.runtime.training.writes import check_all_wrote

# Numbers that begin an epilogue: the weight, who is stale, what programs have written, who is preempted.
_FLAGS = 4


class GradientAverager:
    """Keeps the gradients and buffers of `model` equal on all members of a group.

    Every backward pass ends in one *round*: the mean of the members' gradients, weighted by samples where
    the session dealt them. Buffers follow the first member's, as in DistributedDataParallel. The last
    bucket ends in an epilogue of a few numbers (weights, how much programs have written, whether a worker is
    preempted, which parameters have a gradient, how long each worker took and how many dealt blocks it used,
    the first member's hyperparameters), so that none of it costs a message of its own. A round that is
    abandoned because the group has changed is repeated in the new group with the same gradients; a worker
    that no group counts on keeps its gradients to itself, and `drop` throws them away.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2 (bucketing, overlap). Deviations: buckets
    follow the reversed order of registration and are not rebuilt; parameters without a gradient are always
    allowed for; buffers travel with the gradients instead of before the forward pass.

    Args:
        model: the model; parameters that require no gradient now are left alone.
        grouping: with whom to exchange; None in a world of one, where nothing travels.
        host: the session.
        workers: how many members the job has at the start.
        bucket_bytes: the largest bucket of several parameters.
        deadline_s: how long an exchange may take at most, in seconds.

    Attributes:
        rounds_since_step: rounds since the last optimizer step.
        is_outside: the last round was nobody's but this worker's.
        is_preempted: see `Averager.is_preempted`; outside, this worker knows of a signal.
    """

    def __init__(
        self,
        model: nn.Module,
        grouping: Grouping | None,
        host: Host,
        *,
        workers: int,
        bucket_bytes: int,
        deadline_s: float,
    ) -> None:
        self._model = model
        self._grouping = grouping
        self._host = host
        self._workers = self._places = workers
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._seat: Seat | None = None  # for the round under way, None until it is clear
        self._exchange_id: int | None = None  # of the pass under way
        self._share: float | None = None  # by what gradients of the round under way are multiplied
        self._parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        self._forms = Forms(model)
        self._buffers = BufferList(model)
        self._make_slots()
        self._late = None if grouping is None else grouping.late
        if self._late is not None:
            self._late.bind(self._parameters, self._buffers)
        self._handles: list[RemovableHandle | Scripting] = []
        self._ready_entries: set[int] = set()
        self._launched = 0
        self._stale = False
        self._backward = BackwardPass(self._backward_ended)
        self._accumulated = False  # the backward pass under way has reached a parameter
        self._onlookers: Onlookers  # from `attach` on
        self._stay = False  # the gradients of the pass under way, for somebody may look at them
        self._quiet = False
        self._fresh_weight = 0.0
        self._compute_mark_s = self._pass_mark_s = host.timer.total_s("compute")
        self._round_end_s = host.timer.switch("other")
        # The gradients of the last round, by identity and version: others were set by hand.
        self._handed_out: list[tuple[Callable[[], torch.Tensor | None], int]] = [
            (do_nothing, 0) for _ in self._parameters
        ]
        self._batch_weight = 1.0
        self._contribution = (0, 0)  # dealt blocks behind the gradients of the round: own, and others' for it
        self._kept: list[torch.Tensor | None] | None = None  # gradients from before a pass of weight zero
        self._written: list[str] = []  # by the program, since the last round
        self._generation = -1  # of the group that has finished the last round
        self._round = 0
        self.rounds_since_step = 0
        self.is_outside = self.is_preempted = False

    def _make_slots(self) -> None:
        self._slots = [] if self._grouping is None else self._planned_slots()
        self._place_of = {
            entry: (index, place)
            for index, slot in enumerate(self._slots)
            for place, entry in enumerate(slot.entries)
        }
        # Buckets from here on are launched only when the backward pass is over: those that hold more than
        # gradients, and once a gradient was found to come twice in one pass, all from its bucket on.
        self._launch_limit = sum(len(slot.entries) == slot.parameters for slot in self._slots)

    def _remake_slots(self, places: int) -> None:
        """Makes the buckets anew, with what has been packed already."""
        slots, place_of = self._slots, self._place_of
        before_places, self._places = self._places, places
        self._make_slots()
        if self._share is not None:
            self._share *= before_places / places
        for entry in self._ready_entries:
            (before, place_before), (index, place) = place_of[entry], self._place_of[entry]
            torch.mul(
                slots[before].own.views[place_before],
                before_places / places,
                out=self._slots[index].own.views[place],
            )
            self._slots[index].missing -= 1

    def _places_for(self, size: int) -> int:
        """For how many members the epilogue has a place: the same for all, whatever groups they have seen."""
        return self._workers if size <= self._workers else 1 << (size - 1).bit_length()

    @property
    def _header(self) -> int:
        """How long the part of the epilogue is that has a place for each member in each of its lists."""
        return _FLAGS + 3 * self._places

    def _planned_slots(self) -> list[Slot]:
        shared = LANES * len(self._host.hyperparameters())
        epilogue = torch.Size([self._header + len(self._parameters) + shared])
        tensors = self._parameters + self._buffers.tensors()
        shapes = [t.shape for t in tensors] + [epilogue]
        precise = any(t.dtype == torch.float64 for t in self._parameters)
        dtypes = [t.dtype for t in tensors] + [torch.float64 if precise else torch.float32]
        sizes = [shape.numel() for shape in shapes]
        plan = plan_buckets(sizes, dtypes, bucket_bytes=self._bucket_bytes)
        assert self._grouping is not None
        zeros = partial(self._grouping.memory.zeros, device=self._parameters[0].device)
        return [Slot(bucket, shapes, len(self._parameters), zeros) for bucket in plan]

    def attach(self) -> None:
        """Puts the hooks on the model."""
        for entry, parameter in enumerate(self._parameters):
            hook = Hook(partial(self._gradient_ready, entry))
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._handles.append(self._model.register_forward_pre_hook(ForwardHook(self._before_forward)))
        self._handles.append(self._model.register_forward_hook(ForwardHook(self._after_forward)))
        self._handles.append(Scripting(self._model))
        self._onlookers = Onlookers(self._model, self._parameters)

    def detach(self) -> None:
        """Takes every hook off the model again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the exchange comes with the next one outside."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def weigh(self, batches: float) -> None:
        """Says what the next backward passes count, relative to a whole batch; with 0 they leave no trace."""
        self._batch_weight = batches
        self._kept = None
        if not batches:
            accumulates = self._fresh_weight > 0 or self.rounds_since_step > 0
            self._kept = [
                p.grad.clone() if accumulates and p.grad is not None else None for p in self._parameters
            ]

    # The backward pass ---------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._host.check()
        if model.training and torch.is_grad_enabled():
            self._host.timer.switch("compute")

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        watch(output, self._backward_begins)

    def _backward_begins(self, _: torch.Tensor) -> None:
        self._forget_failed_pass()
        if not self._backward.is_innermost:
            self._backward.begin()

    def _forget_failed_pass(self) -> None:
        """A backward pass that raised never ends: what it sent already is sent again."""
        if not self._backward.has_failed:
            return
        self._backward.forget()
        self._accumulated = False
        self._ready_entries.clear()
        self._share = None
        self._stale = self._launched > 0
        for slot in self._slots:
            slot.missing = slot.parameters

    def _sit(self, *, wait: bool) -> bool:
        """Takes a seat for the round under way, if there is one."""
        assert self._grouping is not None
        if self._seat is None:
            self._seat = self._grouping.seat(wait=wait, may_take=not self.rounds_since_step)
            if self._seat is not None and self._places != (places := self._places_for(self._seat.size)):
                self._remake_slots(places)
        return self._seat is not None

    def _gradient_ready(self, entry: int, parameter: torch.Tensor) -> None:
        if self._host.timer.part != "compute":
            self._host.timer.switch("compute")
        self._host.check()
        check_can_average(parameter.grad)
        self._forget_failed_pass()
        if not self._backward.is_under_way:
            self._backward.begin()
        if not self._accumulated:
            self._forms.check()
            self._accumulated, self._stay = True, self._onlookers.are_there
        if self._stay or parameter.grad is None:  # somebody's hook may have taken it
            return
        if self._kept is not None:
            parameter.grad = self._kept[entry]
        if self._quiet or self._grouping is None or not self._sit(wait=False):
            return
        # Who is left out packs nothing: so that what is judged is the same, packing is not computing.
        self._host.timer.switch("communicate")
        self._pack_early(entry, parameter)
        self._host.timer.switch("compute")

    def _pack_early(self, entry: int, parameter: torch.Tensor) -> None:
        """Packs a gradient while the backward pass goes on, and sends what is complete with it."""
        self._take_in()
        index, _ = self._place_of[entry]
        is_first = entry not in self._ready_entries
        with torch.no_grad():
            self._pack_gradient(entry, parameter, add=not is_first)
        parameter.grad = None  # its memory serves the next layer's gradient
        if not is_first:
            if index < self._launched:
                self._stale = True
            self._launch_limit = min(self._launch_limit, index)
            return
        self._ready_entries.add(entry)
        self._slots[index].missing -= 1
        while self._launched < self._launch_limit and not self._slots[self._launched].missing:
            self._launch_next()

    def _backward_ended(self) -> None:
        if not self._accumulated:  # torch.autograd.grad, which leaves `param.grad` alone
            return
        self._accumulated = False
        if self._stay and self._kept is not None:
            for parameter, kept in zip(self._parameters, self._kept, strict=True):
                parameter.grad = kept
        self._fresh_weight += self._batch_weight
        timer = self._host.timer
        timer.switch("compute")
        self._host.computed(timer.total_s("compute") - self._pass_mark_s)
        timer.switch("compute")
        self._pass_mark_s = timer.total_s("compute")
        if self._quiet:
            timer.switch("other")
        else:
            self.exchange()

    # The exchange --------------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Averages what has been computed since the last round; every member has to call it.

        Gradients that were set by hand count as one batch. A member without new gradients takes part with
        weight zero.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
        """
        self._forget_failed_pass()
        self._forms.check()
        self._written = self._host.writes.take()
        if not self._fresh_weight and self._were_set_by_hand():
            self._fresh_weight = self._batch_weight
        began_s = self._host.timer.switch("communicate")
        compute_s = self._host.timer.total_s("compute") - self._compute_mark_s
        offset_s = began_s - self._round_end_s
        offsets_s: list[float] = []
        if self._grouping is None:
            self._host.ready(compute_s)
        else:
            self._take_in()
            epilogue = self._exchange_until_done(offset_s, compute_s)
            self.is_outside = self._seat is None
            if self._seat is not None:
                self._take_over(epilogue)
                offsets_s = epilogue[_FLAGS : _FLAGS + self._seat.size]
            else:
                self._grouping.late.bring(self._fresh_weight)
        if self._seat is None:
            self.is_preempted |= self._host.is_signalled
        self._end_round(offset_s, offsets_s)

    def before_step(self, *, has_closure: bool) -> None:
        """See `Averager.before_step`.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
        """
        if self.exchange_is_due and not has_closure:
            self.exchange()
        if self.is_outside:
            self.drop()

    def after_step(self) -> None:
        """See `Averager.after_step`."""
        self._host.writes.note()
        self.rounds_since_step = 0

    @property
    def puts_off(self) -> bool:
        """See `Averager.puts_off`."""
        return False

    def drain(self) -> None:
        """See `Averager.drain`: nothing is put off."""

    def flush(self) -> None:
        """See `Averager.flush`: nothing is."""

    def drop(self) -> None:
        """Throws this worker's gradients away."""
        if self._late is not None:
            self._late.forget_guests()
        for parameter in self._parameters:
            parameter.grad = None

    def _take_in(self) -> None:
        """Lets this round count what others have computed for this worker, where it is a step's first."""
        if self._late is not None and self._share is None and not self.rounds_since_step:
            self._late.take_in()

    def _exchange_until_done(self, offset_s: float, compute_s: float) -> list[float]:
        """Passes until one counts; returns its epilogue, or nothing where no group counts on this worker."""
        assert self._grouping is not None
        is_told = False
        while True:
            if self._seat is None and not is_told:
                self._contribution = self._host.ready(compute_s)
                is_told = True
            if not self._sit(wait=True):
                return []
            if self._grouping.has_taken:
                self._forget_own_part()
            try:
                epilogue = self._pass(offset_s, None if is_told else compute_s)
                is_told = True
                while epilogue[1]:
                    self._launched, self._stale = 0, False
                    epilogue = self._pass(offset_s, None)
                if self._grouping.finish_round(self._contributions(epilogue)):
                    return epilogue
            except RegroupedError:
                is_told = True
            self._seat = self._exchange_id = None
            self._launched = 0
            for slot in self._slots:
                slot.leave_to_readers(self._grouping.memory.is_read)

    def _contributions(self, epilogue: list[float]) -> list[tuple[int, int]]:
        """How many dealt blocks each member's gradients were of: its own, and others' for it."""
        assert self._seat is not None
        first = _FLAGS + self._places
        own, late = epilogue[first : first + self._places], epilogue[first + self._places : self._header]
        return [(int(own[place]), int(late[place])) for place in range(self._seat.size)]

    def _forget_own_part(self) -> None:
        """Takes part with weight zero: the gradients are those of parameters that have been replaced."""
        assert self._grouping is not None
        self._grouping.has_taken = False
        self._ready_entries.clear()
        self.drop()
        self._share, self._contribution = 0.0, (0, 0)

    def _share_of(self, batches: float) -> float:
        """This worker's weight in the mean, as the epilogue's type holds it.

        Dividing before the sum keeps half precision from overflowing on the way. The divisor is not the
        group's size: who has packed before the group changed would weigh otherwise than who has not.
        """
        if self._share is None:
            assert self._seat is not None
            exact = batches * self._seat.weight / self._places
            self._share = float(torch.tensor(exact, dtype=self._slots[-1].own.flat.dtype, device="cpu"))
        return self._share

    def _were_set_by_hand(self) -> bool:
        return any(
            gradient is not None and (handed() is not gradient or version != gradient._version)
            for gradient, (handed, version) in zip(
                (parameter.grad for parameter in self._parameters), self._handed_out, strict=True
            )
        )

    def _pass(self, offset_s: float, compute_s: float | None) -> list[float]:
        """Sends what was not sent yet, waits for everything and returns the summed epilogue."""
        assert self._grouping is not None
        self._fill_epilogue(offset_s)
        while self._launched < len(self._slots) - 1:
            self._launch_next()
        if compute_s is not None:  # before the others can finish the round
            self._contribution = self._host.ready(compute_s)
        self._name_contribution()
        self._launch_next()
        self._exchange_id = None
        limit_s = time.monotonic() + self._deadline_s + WORD_S
        for slot in self._slots:
            assert slot.pending is not None
            slot.pending.wait(max(0.0, limit_s - time.monotonic()))
        return self._slots[-1].bank.views[-1].tolist()

    def _fill_epilogue(self, offset_s: float) -> None:
        assert self._seat is not None
        epilogue = self._slots[-1].own.views[-1]
        values = [0.0] * epilogue.numel()
        guests = [] if self._late is None else self._late.guests
        values[0] = self._share_of(self._fresh_weight) + sum(one.weight for one in guests) / self._places
        values[1] = float(self._stale)
        values[2] = len(self._written)
        values[3] = float(self._host.is_signalled)
        values[_FLAGS + self._seat.position] = offset_s
        first = self._header
        for entry, parameter in enumerate(self._parameters):
            is_there = entry in self._ready_entries or parameter.grad is not None
            values[first + entry] = float(is_there or any(one.has[entry] for one in guests))
        if self._seat.position == 0:
            lanes = spread(self._host.hyperparameters())
            values[first + len(self._parameters) :] = lanes
        epilogue.copy_(torch.tensor(values, dtype=epilogue.dtype, device="cpu"))

    def _name_contribution(self) -> None:
        assert self._seat is not None
        epilogue = self._slots[-1].own.views[-1]
        place = _FLAGS + self._seat.position
        for count in self._contribution:
            place += self._places
            if count:  # else it is 0 there already
                epilogue[place] = count

    def _launch_next(self) -> None:
        assert self._seat is not None
        assert self._grouping is not None
        slot = self._slots[self._launched]
        with torch.no_grad():
            self._pack(slot)
        if self._exchange_id is None:
            self._exchange_id = self._grouping.next_exchange_id()
        slot.pending = self._seat.exchange.all_reduce(
            slot.own.flat, slot.bank.flat, exchange_id=self._exchange_id, index=self._launched
        )
        self._launched += 1

    def _pack(self, slot: Slot) -> None:
        """Completes this worker's part: gradients that no hook has packed, buffers if it is the first."""
        assert self._seat is not None
        buffers = self._buffers.tensors() if len(slot.entries) > slot.parameters else []
        for entry, view in zip(slot.entries, slot.own.views, strict=True):
            if entry < len(self._parameters):
                if entry not in self._ready_entries:
                    self._pack_gradient(entry, self._parameters[entry])
            elif entry < len(self._parameters) + len(buffers):
                if self._seat.position == 0:
                    view.copy_(buffers[entry - len(self._parameters)])
                else:
                    view.zero_()

    def _pack_gradient(self, entry: int, parameter: torch.Tensor, *, add: bool = False) -> None:
        """Writes or adds a gradient's share of the mean."""
        index, place = self._place_of[entry]
        view = self._slots[index].own.views[place]
        share = self._share_of(self._fresh_weight + self._batch_weight)
        if add and parameter.grad is not None and share:
            view.add_(parameter.grad, alpha=share)
        elif parameter.grad is None or not share:
            view.zero_()
        else:
            torch.mul(parameter.grad, share, out=view)
        if not add and self._late is not None:
            for guest in self._late.guests:
                if guest.has[entry]:
                    view.add_(guest.gradients[entry], alpha=guest.weight / self._places)

    @torch.no_grad()
    def _take_over(self, epilogue: list[float]) -> None:
        """Makes the means the gradients, and the first member's buffers the buffers."""
        assert self._seat is not None
        mean_weight = epilogue[0]
        if self._seat.generation == self._generation:  # else who has joined has what was written already
            check_all_wrote(self._written, epilogue[2], self._seat.size)
        self._generation = self._seat.generation
        self.is_preempted |= epilogue[3] > 0
        used = epilogue[self._header :]
        lanes = used[len(self._parameters) :]
        if self._seat.position:
            self._host.take_hyperparameters(gathered(lanes))
        buffers = self._buffers.tensors()
        for slot in self._slots:
            if mean_weight not in (0.0, 1.0) and slot.gradient_elements:
                slot.bank.flat[: slot.gradient_elements].div_(mean_weight)
            for entry, view in zip(slot.entries, slot.bank.views, strict=True):
                if entry < len(self._parameters):
                    if used[entry] and mean_weight:
                        self._set_gradient(entry, view)
                elif entry < len(self._parameters) + len(buffers) and self._seat.position:
                    # Like the layers that write them, this does not count as a change to autograd.
                    buffers[entry - len(self._parameters)].data.copy_(view)
            if mean_weight:
                slot.hand_out()
        if not mean_weight and self._kept is not None:  # nobody had a sample
            for entry, parameter in enumerate(self._parameters):
                parameter.grad = self._kept[entry]

    def _set_gradient(self, entry: int, mean: torch.Tensor) -> None:
        parameter = self._parameters[entry]
        if parameter.stride() == mean.stride():
            parameter.grad = mean
        else:
            parameter.grad = torch.empty_like(parameter).copy_(mean)
        self._handed_out[entry] = (weakref.ref(parameter.grad), parameter.grad._version)

    def _end_round(self, offset_s: float, offsets_s: list[float]) -> None:
        timer = self._host.timer
        self._round_end_s = timer.switch("other")
        if offsets_s:
            timer.move("communicate", "wait", max(offsets_s) - offset_s)
        self._compute_mark_s = timer.total_s("compute")
        self._fresh_weight = 0.0
        self._launched, self._stale = 0, False
        self._ready_entries.clear()
        if self._late is not None:
            self._late.forget_guests()
        for slot in self._slots:
            slot.missing = slot.parameters
        self.rounds_since_step += 1
        self._prepare_round()
        self._seat = self._share = None
        self._round += 1

    @property
    def round(self) -> int:
        """Rounds finished."""
        return self._round if self._grouping is None else self._grouping.follower.round

    def _prepare_round(self) -> None:
        """Lets the others begin the next round before this worker does."""
        if self._seat is None or self._grouping is None or not self._grouping.stays:
            return
        for index, slot in enumerate(self._slots):
            self._seat.exchange.prepare(
                slot.bank.flat, exchange_id=self._grouping.follower.exchange_id, index=index
            )

    @property
    def is_clear(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""
        return not self._fresh_weight and not self.rounds_since_step

    @property
    def exchange_is_due(self) -> bool:
        """Gradients were computed, or a step is about to be taken, and no round has covered it yet."""
        return self._fresh_weight > 0 or self.rounds_since_step == 0
