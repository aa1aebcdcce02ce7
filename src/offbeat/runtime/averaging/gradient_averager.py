"""Averages gradients during the backward pass: hooks fill buckets, and full buckets are exchanged.

When `backward()` returns, every `param.grad` holds the mean over the group's workers, so that clipping,
unscaling or accumulation see what a single process with the large batch would see. This worker's own
contribution stays unchanged until an exchange has succeeded. This module never decides on membership, and
never touches the optimizer.
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
from offbeat.runtime.averaging.buckets import GradientBucket, ModelBuffers
from offbeat.runtime.averaging.group_binding import GroupBinding, GroupChangedError, GroupHandle
from offbeat.runtime.averaging.interface import (
    FLOAT32_PER_FLOAT64,
    AveragerContext,
    join_float64,
    split_float64,
)
from offbeat.runtime.training.backward import (
    BackwardPass,
    GradientObservers,
    check_can_average,
    on_output_gradient,
)
from offbeat.runtime.training.checks import ParameterFormCheck
from offbeat.runtime.training.hooks import HookFreeScripting, SessionForwardHook, SessionHook, do_nothing
from offbeat.runtime.training.interface import COORDINATOR_MARGIN_S
from offbeat.runtime.training.writes import check_all_wrote

# Sums at the start of a trailer: weights, members with a stale bucket, program writes, preempted members.
_FLAGS = 4


class GradientAverager:
    """Keeps the gradients and buffers of `model` equal on all members of a group.

    Every backward pass ends in one *round*: the mean of the members' gradients, weighted by samples where the
    session assigned them. Buffers are copied from the first member, as in DistributedDataParallel. The last
    bucket ends in a trailer (weights, amount of program writes, preemption flags, which parameters have a
    gradient, each worker's time and number of assigned blocks, the first member's hyperparameters), so that
    none of it costs a message of its own. A round that is abandoned because the group has changed is repeated
    in the new group with the same gradients. A worker outside every group exchanges nothing, and
    `drop_gradients` discards its gradients.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2 (bucketing, overlap). Deviations: buckets
    follow the reversed order of registration and are not rebuilt; parameters without a gradient are always
    supported; buffers are sent with the gradients instead of before the forward pass.

    Args:
        model: the model; parameters that require no gradient now are ignored.
        binding: the binding to the group; None in a world of one, which exchanges nothing.
        context: the session.
        workers: the number of members at the job's start.
        bucket_bytes: the largest size of a bucket of several parameters, in bytes.
        timeout_s: the longest duration of an exchange, in seconds.

    Attributes:
        rounds_since_step: rounds since the last optimizer step.
        is_outside: this worker was in no group in the last round.
        is_preempted: see `Averager.is_preempted`; outside every group, whether this worker knows of a signal.
    """

    def __init__(
        self,
        model: nn.Module,
        binding: GroupBinding | None,
        context: AveragerContext,
        *,
        workers: int,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._binding = binding
        self._context = context
        self._workers = self._capacity = workers
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._group: GroupHandle | None = None  # for the round under way, None before it is bound
        self._exchange_id: int | None = None  # of the pass under way
        self._scale: float | None = None  # factor of the gradients of the round under way
        self._parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        self._forms = ParameterFormCheck(model)
        self._buffers = ModelBuffers(model)
        self._make_buckets()
        self._late = None if binding is None else binding.late_gradients
        if self._late is not None:
            self._late.set_tensors(self._parameters, self._buffers.tensors)
        self._hook_handles: list[RemovableHandle | HookFreeScripting] = []
        self._ready_entries: set[int] = set()
        self._launched = 0
        self._has_stale_bucket = False
        self._backward = BackwardPass(self._backward_ended)
        self._has_accumulated = False  # in the backward pass under way
        self._observers: GradientObservers  # from `attach` on
        self._leaves_gradients = False  # until the pass ends, as hooks of the program may read param.grad
        self._skips_exchange = False
        self._unsent_weight = 0.0
        self._compute_mark_s = self._pass_mark_s = context.timer.total_s("compute")
        self._round_end_s = context.timer.switch("other")
        # The means of the last round, by identity and version: other gradients were set by hand.
        self._averaged: list[tuple[Callable[[], torch.Tensor | None], int]] = [
            (do_nothing, 0) for _ in self._parameters
        ]
        self._batch_weight = 1.0
        self._contributed_blocks = (0, 0)  # blocks behind the round's gradients: own, other workers' for it
        self._saved_gradients: list[torch.Tensor | None] | None = None  # from before a pass of weight 0
        self._written: list[str] = []  # by the program, since the last round
        self._generation = -1  # of the group that finished the last round
        self._round = 0
        self.rounds_since_step = 0
        self.is_outside = self.is_preempted = False

    def _make_buckets(self) -> None:
        self._buckets = [] if self._binding is None else self._planned_buckets()
        self._location_of = {
            entry: (index, position)
            for index, bucket in enumerate(self._buckets)
            for position, entry in enumerate(bucket.entries)
        }
        # Buckets from here on are launched only after the backward pass: those that hold more than gradients
        # and, once a gradient has come twice in one pass, all from its bucket on.
        self._launch_limit = sum(len(bucket.entries) == bucket.gradient_count for bucket in self._buckets)

    def _resize_trailer(self, capacity: int) -> None:
        """Makes buckets for another group size, and copies the packed gradients into them."""
        old_buckets, old_location_of = self._buckets, self._location_of
        old_capacity, self._capacity = self._capacity, capacity
        self._make_buckets()
        if self._scale is not None:
            self._scale *= old_capacity / capacity
        for entry in self._ready_entries:
            (old_index, old_position), (index, position) = old_location_of[entry], self._location_of[entry]
            torch.mul(
                old_buckets[old_index].contribution.views[old_position],
                old_capacity / capacity,
                out=self._buckets[index].contribution.views[position],
            )
            self._buckets[index].missing_count -= 1

    def _capacity_for(self, size: int) -> int:
        """Members that the trailer has room for: equal on all members, whatever groups they were in."""
        return self._workers if size <= self._workers else 1 << (size - 1).bit_length()

    @property
    def _header_length(self) -> int:
        """Length of the trailer's first part: the flags, and three lists with one number per member."""
        return _FLAGS + 3 * self._capacity

    def _planned_buckets(self) -> list[GradientBucket]:
        shared = FLOAT32_PER_FLOAT64 * len(self._context.hyperparameters())
        trailer = torch.Size([self._header_length + len(self._parameters) + shared])
        tensors = self._parameters + self._buffers.tensors()
        shapes = [t.shape for t in tensors] + [trailer]
        precise = any(t.dtype == torch.float64 for t in self._parameters)
        dtypes = [t.dtype for t in tensors] + [torch.float64 if precise else torch.float32]
        sizes = [shape.numel() for shape in shapes]
        plan = plan_buckets(sizes, dtypes, bucket_bytes=self._bucket_bytes)
        assert self._binding is not None
        zeros = partial(self._binding.memory.zeros, device=self._parameters[0].device)
        return [GradientBucket(bucket, shapes, len(self._parameters), zeros) for bucket in plan]

    def attach(self) -> None:
        """Registers the hooks on the model."""
        for entry, parameter in enumerate(self._parameters):
            hook = SessionHook(partial(self._gradient_ready, entry))
            self._hook_handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._hook_handles.append(
            self._model.register_forward_pre_hook(SessionForwardHook(self._before_forward))
        )
        self._hook_handles.append(self._model.register_forward_hook(SessionForwardHook(self._after_forward)))
        self._hook_handles.append(HookFreeScripting(self._model))
        self._observers = GradientObservers(self._model, self._parameters)

    def detach(self) -> None:
        """Removes all hooks from the model."""
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate without an exchange, which follows the next one outside."""
        before, self._skips_exchange = self._skips_exchange, True
        try:
            yield
        finally:
            self._skips_exchange = before

    def set_batch_weight(self, batches: float) -> None:
        """Sets the weight of the next backward passes, 1 for a whole batch; with 0 they have no effect."""
        self._batch_weight = batches
        self._saved_gradients = None
        if not batches:
            accumulates = self._unsent_weight > 0 or self.rounds_since_step > 0
            self._saved_gradients = [
                p.grad.clone() if accumulates and p.grad is not None else None for p in self._parameters
            ]

    # The backward pass ---------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._context.raise_if_failed()
        if model.training and torch.is_grad_enabled():
            self._context.timer.switch("compute")

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        on_output_gradient(output, self._backward_begins)

    def _backward_begins(self, _: torch.Tensor) -> None:
        self._forget_failed_pass()
        if not self._backward.is_innermost:
            self._backward.begin()

    def _forget_failed_pass(self) -> None:
        """Resets after a backward pass that raised, and so never ends; its buckets are sent again."""
        if not self._backward.has_failed:
            return
        self._backward.cancel()
        self._has_accumulated = False
        self._ready_entries.clear()
        self._scale = None
        self._has_stale_bucket = self._launched > 0
        for bucket in self._buckets:
            bucket.missing_count = bucket.gradient_count

    def _bind_group(self, *, wait: bool) -> bool:
        """Binds the round under way to a group; returns whether there is one."""
        assert self._binding is not None
        if self._group is None:
            self._group = self._binding.acquire(wait=wait, may_replace_state=not self.rounds_since_step)
            if self._group is not None and self._capacity != (
                capacity := self._capacity_for(self._group.size)
            ):
                self._resize_trailer(capacity)
        return self._group is not None

    def _gradient_ready(self, entry: int, parameter: torch.Tensor) -> None:
        if self._context.timer.part != "compute":
            self._context.timer.switch("compute")
        self._context.raise_if_failed()
        check_can_average(parameter.grad)
        self._forget_failed_pass()
        if not self._backward.is_under_way:
            self._backward.begin()
        if not self._has_accumulated:
            self._forms.check()
            self._has_accumulated, self._leaves_gradients = True, self._observers.exist
        if self._leaves_gradients or parameter.grad is None:  # a hook may have removed it
            return
        if self._saved_gradients is not None:
            parameter.grad = self._saved_gradients[entry]
        if self._skips_exchange or self._binding is None or not self._bind_group(wait=False):
            return
        # An excluded worker packs nothing, so packing does not count as computing: times stay comparable.
        self._context.timer.switch("communicate")
        self._pack_early(entry, parameter)
        self._context.timer.switch("compute")

    def _pack_early(self, entry: int, parameter: torch.Tensor) -> None:
        """Packs a gradient during the backward pass, and launches the buckets that this completes."""
        self._accept_late_gradients()
        index, _ = self._location_of[entry]
        is_first = entry not in self._ready_entries
        with torch.no_grad():
            self._pack_gradient(entry, parameter, add=not is_first)
        parameter.grad = None  # its memory can hold the next layer's gradient
        if not is_first:
            if index < self._launched:
                self._has_stale_bucket = True
            self._launch_limit = min(self._launch_limit, index)
            return
        self._ready_entries.add(entry)
        self._buckets[index].missing_count -= 1
        while self._launched < self._launch_limit and not self._buckets[self._launched].missing_count:
            self._launch_next()

    def _backward_ended(self) -> None:
        if not self._has_accumulated:  # torch.autograd.grad, which does not set `param.grad`
            return
        self._has_accumulated = False
        if self._leaves_gradients and self._saved_gradients is not None:
            for parameter, kept in zip(self._parameters, self._saved_gradients, strict=True):
                parameter.grad = kept
        self._unsent_weight += self._batch_weight
        timer = self._context.timer
        timer.switch("compute")
        self._context.on_computed(timer.total_s("compute") - self._pass_mark_s)
        timer.switch("compute")
        self._pass_mark_s = timer.total_s("compute")
        if self._skips_exchange:
            timer.switch("other")
        else:
            self.exchange()

    # The exchange --------------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Averages the gradients computed since the last round; every member has to call it.

        Gradients that were set by hand count as one batch. A member without new gradients contributes with
        weight zero.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
        """
        self._forget_failed_pass()
        self._forms.check()
        self._written = self._context.writes.pop()
        if not self._unsent_weight and self._has_manual_gradients():
            self._unsent_weight = self._batch_weight
        began_s = self._context.timer.switch("communicate")
        compute_s = self._context.timer.total_s("compute") - self._compute_mark_s
        offset_s = began_s - self._round_end_s
        offsets_s: list[float] = []
        if self._binding is None:
            self._context.announce_gradients(compute_s)
        else:
            self._accept_late_gradients()
            trailer = self._exchange_until_success(offset_s, compute_s)
            self.is_outside = self._group is None
            if self._group is not None:
                self._apply_means(trailer)
                offsets_s = trailer[_FLAGS : _FLAGS + self._group.size]
            else:
                self._binding.late_gradients.send_gradient(self._unsent_weight)
        if self._group is None:
            self.is_preempted |= self._context.has_preemption_signal
        self._end_round(offset_s, offsets_s)

    def before_step(self, *, has_closure: bool) -> None:
        """See `Averager.before_step`.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
        """
        if self.is_exchange_due and not has_closure:
            self.exchange()
        if self.is_outside:
            self.drop_gradients()

    def after_step(self) -> None:
        """See `Averager.after_step`."""
        self._context.writes.mark()
        self.rounds_since_step = 0

    @property
    def has_deferred_step(self) -> bool:
        """See `Averager.has_deferred_step`."""
        return False

    def apply_deferred_step(self) -> None:
        """See `Averager.apply_deferred_step`: nothing is deferred."""

    def flush(self) -> None:
        """See `Averager.flush`: nothing is deferred."""

    def drop_gradients(self) -> None:
        """Discards this worker's gradients."""
        if self._late is not None:
            self._late.clear_active()
        for parameter in self._parameters:
            parameter.grad = None

    def _accept_late_gradients(self) -> None:
        """Adds gradients that other workers computed for this one, in the first round of a step."""
        if self._late is not None and self._scale is None and not self.rounds_since_step:
            self._late.activate_accepted()

    def _exchange_until_success(self, offset_s: float, compute_s: float) -> list[float]:
        """Exchanges until a round succeeds; returns its trailer, empty where this worker is in no group."""
        assert self._binding is not None
        is_announced = False
        while True:
            if self._group is None and not is_announced:
                self._contributed_blocks = self._context.announce_gradients(compute_s)
                is_announced = True
            if not self._bind_group(wait=True):
                return []
            if self._binding.was_state_replaced:
                self._discard_replaced()
            try:
                trailer = self._exchange_buckets(offset_s, None if is_announced else compute_s)
                is_announced = True
                while trailer[1]:
                    self._launched, self._has_stale_bucket = 0, False
                    trailer = self._exchange_buckets(offset_s, None)
                if self._binding.finish_round(self._contributions(trailer)):
                    return trailer
            except GroupChangedError:
                is_announced = True
            self._group = self._exchange_id = None
            self._launched = 0
            for bucket in self._buckets:
                bucket.replace_read_buffers(self._binding.memory.may_be_read)

    def _contributions(self, trailer: list[float]) -> list[tuple[int, int]]:
        """Numbers of blocks behind each member's gradients: its own, and other workers' for it."""
        assert self._group is not None
        first = _FLAGS + self._capacity
        own, late = (
            trailer[first : first + self._capacity],
            trailer[first + self._capacity : self._header_length],
        )
        return [(int(own[position]), int(late[position])) for position in range(self._group.size)]

    def _discard_replaced(self) -> None:
        """Discards gradients of replaced parameters; this worker contributes with weight zero."""
        assert self._binding is not None
        self._binding.was_state_replaced = False
        self._ready_entries.clear()
        self.drop_gradients()
        self._scale, self._contributed_blocks = 0.0, (0, 0)

    def _scale_for(self, batches: float) -> float:
        """This worker's weight in the mean, rounded to the trailer's dtype.

        Dividing before the sum avoids overflow in half precision. The divisor is not the group's size: then
        members that packed before and after a change of the group would be weighted differently.
        """
        if self._scale is None:
            assert self._group is not None
            exact = batches * self._group.weight / self._capacity
            self._scale = float(
                torch.tensor(exact, dtype=self._buckets[-1].contribution.flat.dtype, device="cpu")
            )
        return self._scale

    def _has_manual_gradients(self) -> bool:
        return any(
            gradient is not None and (averaged() is not gradient or version != gradient._version)
            for gradient, (averaged, version) in zip(
                (parameter.grad for parameter in self._parameters), self._averaged, strict=True
            )
        )

    def _exchange_buckets(self, offset_s: float, compute_s: float | None) -> list[float]:
        """Launches the remaining buckets, waits for all of them and returns the summed trailer."""
        assert self._binding is not None
        self._fill_trailer(offset_s)
        while self._launched < len(self._buckets) - 1:
            self._launch_next()
        if compute_s is not None:  # before another member can finish the round
            self._contributed_blocks = self._context.announce_gradients(compute_s)
        self._write_contributed_blocks()
        self._launch_next()
        self._exchange_id = None
        limit_s = time.monotonic() + self._timeout_s + COORDINATOR_MARGIN_S
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait(max(0.0, limit_s - time.monotonic()))
        return self._buckets[-1].output.views[-1].tolist()

    def _fill_trailer(self, offset_s: float) -> None:
        assert self._group is not None
        trailer = self._buckets[-1].contribution.views[-1]
        values = [0.0] * trailer.numel()
        late_gradients = [] if self._late is None else self._late.active
        values[0] = (
            self._scale_for(self._unsent_weight) + sum(one.weight for one in late_gradients) / self._capacity
        )
        values[1] = float(self._has_stale_bucket)
        values[2] = len(self._written)
        values[3] = float(self._context.has_preemption_signal)
        values[_FLAGS + self._group.position] = offset_s
        first = self._header_length
        for entry, parameter in enumerate(self._parameters):
            is_there = entry in self._ready_entries or parameter.grad is not None
            values[first + entry] = float(is_there or any(one.has[entry] for one in late_gradients))
        if self._group.position == 0:
            components = split_float64(self._context.hyperparameters())
            values[first + len(self._parameters) :] = components
        trailer.copy_(torch.tensor(values, dtype=trailer.dtype, device="cpu"))

    def _write_contributed_blocks(self) -> None:
        assert self._group is not None
        trailer = self._buckets[-1].contribution.views[-1]
        position = _FLAGS + self._group.position
        for count in self._contributed_blocks:
            position += self._capacity
            if count:  # else it is 0 already
                trailer[position] = count

    def _launch_next(self) -> None:
        assert self._group is not None
        assert self._binding is not None
        bucket = self._buckets[self._launched]
        with torch.no_grad():
            self._pack(bucket)
        if self._exchange_id is None:
            self._exchange_id = self._binding.next_exchange_id()
        bucket.pending = self._group.exchange.all_reduce(
            bucket.contribution.flat, bucket.output.flat, exchange_id=self._exchange_id, index=self._launched
        )
        self._launched += 1

    def _pack(self, bucket: GradientBucket) -> None:
        """Packs what no hook has: gradients, and on the first member buffers."""
        assert self._group is not None
        buffers = self._buffers.tensors() if len(bucket.entries) > bucket.gradient_count else []
        for entry, view in zip(bucket.entries, bucket.contribution.views, strict=True):
            if entry < len(self._parameters):
                if entry not in self._ready_entries:
                    self._pack_gradient(entry, self._parameters[entry])
            elif entry < len(self._parameters) + len(buffers):
                if self._group.position == 0:
                    view.copy_(buffers[entry - len(self._parameters)])
                else:
                    view.zero_()

    def _pack_gradient(self, entry: int, parameter: torch.Tensor, *, add: bool = False) -> None:
        """Writes or adds a scaled gradient to its bucket."""
        index, position = self._location_of[entry]
        view = self._buckets[index].contribution.views[position]
        scale = self._scale_for(self._unsent_weight + self._batch_weight)
        if add and parameter.grad is not None and scale:
            view.add_(parameter.grad, alpha=scale)
        elif parameter.grad is None or not scale:
            view.zero_()
        else:
            torch.mul(parameter.grad, scale, out=view)
        if not add and self._late is not None:
            for guest in self._late.active:
                if guest.has[entry]:
                    view.add_(guest.gradients[entry], alpha=guest.weight / self._capacity)

    @torch.no_grad()
    def _apply_means(self, trailer: list[float]) -> None:
        """Sets the gradients to the means, and the buffers to the first member's."""
        assert self._group is not None
        mean_weight = trailer[0]
        if self._group.generation == self._generation:  # else a new member has got the writes with the state
            check_all_wrote(self._written, trailer[2], self._group.size)
        self._generation = self._group.generation
        self.is_preempted |= trailer[3] > 0
        used = trailer[self._header_length :]
        components = used[len(self._parameters) :]
        if self._group.position:
            self._context.apply_hyperparameters(join_float64(components))
        buffers = self._buffers.tensors()
        for bucket in self._buckets:
            if mean_weight not in (0.0, 1.0) and bucket.gradient_elements:
                bucket.output.flat[: bucket.gradient_elements].div_(mean_weight)
            for entry, view in zip(bucket.entries, bucket.output.views, strict=True):
                if entry < len(self._parameters):
                    if used[entry] and mean_weight:
                        self._set_gradient(entry, view)
                elif entry < len(self._parameters) + len(buffers) and self._group.position:
                    # Through .data: as with the layers' own writes, autograd does not count this as a change.
                    buffers[entry - len(self._parameters)].data.copy_(view)
            if mean_weight:
                bucket.swap_output()
        if not mean_weight and self._saved_gradients is not None:  # no member had a sample
            for entry, parameter in enumerate(self._parameters):
                parameter.grad = self._saved_gradients[entry]

    def _set_gradient(self, entry: int, mean: torch.Tensor) -> None:
        parameter = self._parameters[entry]
        if parameter.stride() == mean.stride():
            parameter.grad = mean
        else:
            parameter.grad = torch.empty_like(parameter).copy_(mean)
        self._averaged[entry] = (weakref.ref(parameter.grad), parameter.grad._version)

    def _end_round(self, offset_s: float, offsets_s: list[float]) -> None:
        timer = self._context.timer
        self._round_end_s = timer.switch("other")
        if offsets_s:
            timer.move("communicate", "wait", max(offsets_s) - offset_s)
        self._compute_mark_s = timer.total_s("compute")
        self._unsent_weight = 0.0
        self._launched, self._has_stale_bucket = 0, False
        self._ready_entries.clear()
        if self._late is not None:
            self._late.clear_active()
        for bucket in self._buckets:
            bucket.missing_count = bucket.gradient_count
        self.rounds_since_step += 1
        self._prepare_round()
        self._group = self._scale = None
        self._round += 1

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self._round if self._binding is None else self._binding.membership.round

    def _prepare_round(self) -> None:
        """Prepares memory, so that other members can begin the next round before this worker does."""
        if self._group is None or self._binding is None or not self._binding.is_stable:
            return
        for index, bucket in enumerate(self._buckets):
            self._group.exchange.prepare(
                bucket.output.flat, exchange_id=self._binding.membership.exchange_id, index=index
            )

    @property
    def has_no_pending_gradient(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""
        return not self._unsent_weight and not self.rounds_since_step

    @property
    def is_exchange_due(self) -> bool:
        """Whether gradients were computed, or a step is about to be taken, without a round for it."""
        return self._unsent_weight > 0 or self.rounds_since_step == 0
