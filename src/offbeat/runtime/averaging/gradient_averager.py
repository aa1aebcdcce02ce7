"""Averages gradients during the backward pass: hooks fill buckets, and full buckets are exchanged.

When `backward()` returns, every `param.grad` holds the mean over the group's workers, so that clipping,
unscaling or accumulation see what a single process with the large batch would see. This worker's own
contribution stays unchanged until an exchange has succeeded. This module never decides on membership, and
never touches the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offbeat.errors import OffbeatError
from offbeat.numerics.compressors.interface import CompressionMethod
from offbeat.runtime.averaging.averaged_gradients import AveragedGradients
from offbeat.runtime.averaging.bucket_set import BucketSet
from offbeat.runtime.averaging.compression_trial import CompressionTrial
from offbeat.runtime.averaging.group_binding import GroupBinding, GroupChangedError
from offbeat.runtime.averaging.interface import AveragerContext
from offbeat.runtime.averaging.sgd_momentum import SGDMomentum
from offbeat.runtime.averaging.skipped_rounds import SkippedRounds
from offbeat.runtime.averaging.trailer import RoundSums
from offbeat.runtime.averaging.unused_parameters import UnusedParameters
from offbeat.runtime.training.backward import (
    BackwardPass,
    GradientObservers,
    check_can_average,
    on_output_gradient,
)
from offbeat.runtime.training.checks import ParameterFormCheck
from offbeat.runtime.training.hooks import HookFreeScripting, SessionForwardHook, SessionHook
from offbeat.runtime.training.interface import COORDINATOR_MARGIN_S
from offbeat.runtime.training.pass_timer import PassTimer
from offbeat.runtime.training.saved_gradients import SavedGradients
from offbeat.runtime.training.writes import check_all_wrote

_log = logging.getLogger("offbeat")

_COMPRESSORS: Final = "compressors"  # in a checkpoint


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
    supported (`UnusedParameters`); buffers are sent with the gradients instead of before the forward pass.

    Args:
        model: the model; parameters that require no gradient now are ignored.
        binding: the binding to the group; None in a world of one, which exchanges nothing.
        context: the session.
        workers: the number of members at the job's start.
        bucket_bytes: the largest size of a bucket of several parameters, in bytes.
        timeout_s: the longest duration of an exchange, in seconds.
        skipped: takes part in rounds that this worker is too late for; None where it may not be late. With
            it, no bucket is sent before the backward pass has ended: a round has all gradients or none.
        compression: of gradients; None for none.
        trial: finds the compression instead, where the group does not change; None without one.
        momentum: of a compression with momentum correction.

    Attributes:
        rounds_since_step: rounds since the last optimizer step.
        is_outside: this worker was in no group in the last round.
        is_preempted: see `Averager.is_preempted`; outside every group, whether this worker knows of a signal.

    Size: hooks, passes and rounds change the same state; a pass may fail, or a round begin again, anywhere.
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
        skipped: SkippedRounds | None = None,
        compression: CompressionMethod | None = None,
        trial: CompressionTrial | None = None,
        momentum: SGDMomentum | None = None,
    ) -> None:
        self._model, self._trial, self._momentum = model, trial, momentum
        self._skipped = skipped
        self._binding = binding
        self._context = context
        self._timeout_s = timeout_s
        self._parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        self._forms = ParameterFormCheck(model)
        self._buckets = BucketSet(
            model,
            self._parameters,
            binding,
            context.hyperparameters,
            workers=workers,
            bucket_bytes=bucket_bytes,
            compression=compression,
            momentum=momentum,
        )
        if binding is not None:
            binding.late_gradients.set_tensors(self._parameters, self._buckets.buffers.tensors)
        self._hook_handles: list[RemovableHandle | HookFreeScripting] = []
        self._backward = BackwardPass(self._backward_ended)
        self._unused = UnusedParameters(self._parameters)
        self._observers: GradientObservers  # from `attach` on
        self._leaves_gradients = False  # until the pass ends, as hooks of the program may read param.grad
        self._skips_exchange = False
        self._unsent_weight = 0.0
        self._passes = PassTimer(context.timer, context.device, context.on_computed)
        self._round_end_s = context.timer.switch("other")
        self._round_s = 0.0  # how long the last round took, from the end of the one before
        self._averaged = AveragedGradients(self._parameters)
        self._batch_weight = 1.0
        self._contributed_blocks = (0, 0)  # blocks behind the round's gradients: own, other workers' for it
        self._saved_gradients = SavedGradients()
        self._written: list[str] = []  # by the program, since the last round
        self._generation = -1  # of the group that finished the last round
        self._round = 0
        self.rounds_since_step = 0
        self.is_outside = self.is_preempted = False

    def attach(self) -> None:
        """Register the hooks on the model."""
        for entry, parameter in enumerate(self._parameters):
            hook = SessionHook(partial(self._gradient_ready, entry))
            self._hook_handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._hook_handles.append(
            self._model.register_forward_pre_hook(SessionForwardHook(self._before_forward))
        )
        self._hook_handles.append(self._model.register_forward_hook(SessionForwardHook(self._after_forward)))
        self._hook_handles.append(HookFreeScripting(self._model))
        self._observers = GradientObservers(self._model, self._parameters)
        if self._momentum is not None:
            self._momentum.attach()
        if self._skipped is not None:
            self._skipped.start()

    def detach(self) -> None:
        """Remove all hooks from the model."""
        if self._skipped is not None:
            self._skipped.stop()
        if self._momentum is not None:
            self._momentum.detach()
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
        """Set the weight of the next backward passes, 1 for a whole batch; with 0 they have no effect."""
        self._batch_weight = batches
        self._saved_gradients.forget()
        if not batches:
            self._saved_gradients.save(self._parameters, are_outdated=self.has_no_pending_gradient)

    # The backward pass ---------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._context.raise_if_failed()
        if model.training and torch.is_grad_enabled():
            self._context.device.check_not_capturing()
            self._context.timer.switch("compute")
            self._passes.begin_pass()

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        on_output_gradient(output, self._backward_begins)
        self._unused.add_output(output)

    def _backward_begins(self, _: torch.Tensor) -> None:
        self._forget_failed_pass()
        if not self._backward.is_innermost:
            self._backward.begin()

    def _forget_failed_pass(self) -> None:
        """Reset after a backward pass that raised, and so never ends; its buckets are sent again."""
        if not self._backward.has_failed:
            return
        self._backward.cancel()
        self._buckets.forget_pass()
        self._unused.forget_pass()

    def _bind_group(self, *, wait: bool) -> bool:
        """Bind the round under way to a group; return whether there is one."""
        assert self._binding is not None
        if self._buckets.group is None:
            group = self._binding.acquire(wait=wait, may_replace_state=not self.rounds_since_step)
            if group is not None:
                self._buckets.bind(group)
        return self._buckets.group is not None

    def _gradient_ready(self, entry: int, parameter: torch.Tensor) -> None:
        if self._context.timer.part != "compute":
            self._context.timer.switch("compute")
        self._context.raise_if_failed()
        check_can_average(parameter.grad)
        self._forget_failed_pass()
        if not self._backward.is_under_way:
            self._backward.begin()
        if self._backward.add_gradient():
            self._context.device.check_not_capturing()
            self._forms.check()
            self._leaves_gradients = self._observers.exist
        if self._leaves_gradients or parameter.grad is None:  # a hook may have removed it
            return
        self._saved_gradients.put_back([parameter])
        if self._skips_exchange or self._binding is None or self._skipped is not None:
            return
        if not self._bind_group(wait=False):
            return
        # An excluded worker packs nothing, so packing does not count as computing: times stay comparable.
        self._context.timer.switch("communicate")
        self._pack_early(entry)
        self._context.timer.switch("compute")

    def _pack_early(self, entry: int) -> None:
        """Pack a gradient during the backward pass, and launch the buckets that this completes."""
        self._accept_late_gradients()
        weight = self._unsent_weight + self._batch_weight
        if not self._buckets.ready_entries:
            self._buckets.begin_pass(self._unused.predict(), weight)
        self._buckets.add_gradient(entry, weight)

    def _backward_ended(self) -> None:
        self._saved_gradients.put_back()
        self._unsent_weight += self._batch_weight
        self._passes.end_pass()
        if self._buckets.ready_entries:
            self._unused.end_pass(self._buckets.ready_entries)
        else:
            self._unused.forget_pass()
        if self._skips_exchange:
            self._context.timer.switch("other")
        else:
            self.exchange()

    # The exchange --------------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Average the gradients computed since the last round; every member has to call it.

        Gradients that were set by hand count as one batch. A member without new gradients contributes with
        weight zero. If no member has new ones, the means of the last round stay, except those that a member
        has removed, which are removed on all.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
            OffbeatError: with momentum correction, there was no step since the last round.
        """
        if self._momentum is not None and self.rounds_since_step:
            raise OffbeatError(
                "with momentum correction each backward() needs an optimizer step: accumulate gradients in "
                "session.no_sync(); with a GradScaler, which skips steps, use compress=topk:RATIO"
            )
        self._forget_failed_pass()
        self._forms.check()
        self._written = self._context.writes.pop()
        if not self._unsent_weight and self._averaged.has_new_gradients:
            self._unsent_weight = self._batch_weight
        began_s = self._context.timer.switch("communicate")
        compute_s = self._passes.compute_s
        offset_s = began_s - self._round_end_s
        offsets_s: Sequence[float] = ()
        if self._binding is None:
            self._context.announce_gradients(compute_s)
        else:
            self._catch_up()
            self._accept_late_gradients()
            sums = self._exchange_until_success(offset_s, compute_s)
            self.is_outside = sums is None
            if sums is not None:
                self._apply_means(sums)
                offsets_s = sums.offsets_s
                self._continue_trial(sums)
            else:
                self._binding.late_gradients.send_gradient(self._unsent_weight)
        if self._buckets.group is None:
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
        if self._skipped is not None:
            self._skipped.allow(self._obstacle_to_skipping(has_closure))
        if self._momentum is not None:
            self._momentum.withhold()

    def _obstacle_to_skipping(self, has_closure: bool) -> str:
        """Return why the step that begins is more than the optimizer's step with the means of one round."""
        if self.is_outside:
            return ""
        if has_closure or self.rounds_since_step != 1:
            return "a step has several backward passes; use session.no_sync() to accumulate gradients"
        if self._written:
            return f"the program changes {self._written[0]} between two steps"
        if not self._averaged.are_those_of_last_round:
            return "the program changes gradients between backward() and step(), as clipping does"
        return ""

    def after_step(self) -> None:
        """See `Averager.after_step`."""
        self._context.writes.mark()
        self.rounds_since_step = 0

    @property
    def has_deferred_step(self) -> bool:
        """See `Averager.has_deferred_step`."""
        return False

    def apply_deferred_step(self) -> None:
        """See `Averager.apply_deferred_step`: the steps of skipped rounds are."""
        self._catch_up()

    def flush(self) -> None:
        """See `Averager.flush`: the steps of skipped rounds are left."""
        self._catch_up()

    def state_dict(self) -> dict[str, Any]:
        """See `Averager.state_dict`: the compressors' states."""
        return {_COMPRESSORS: states} if (states := self._buckets.compressor_states()) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Averager.load_state_dict`."""
        self._buckets.load_compressor_states(state.get(_COMPRESSORS, []))

    def local_state_dict(self) -> dict[str, Any]:
        """See `Averager.local_state_dict`: residuals of compressed gradients, and their momentum."""
        return {**self._buckets.local_state()}

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """See `Averager.load_local_state_dict`."""
        self._buckets.load_local_state(state)

    def _catch_up(self) -> None:
        if self._skipped is None:
            return
        caught_up = self._skipped.catch_up()
        self.is_preempted |= caught_up.is_preempted
        if caught_up.rounds:
            self._averaged.drop_means()  # the other members hold those of a later round

    def drop_gradients(self) -> None:
        """Discard this worker's gradients."""
        self._clear_late_gradients()
        for parameter in self._parameters:
            parameter.grad = None

    def _accept_late_gradients(self) -> None:
        """Add gradients that other workers computed for this one, in the first round of a step."""
        if self._binding is not None and self._buckets.scale is None and not self.rounds_since_step:
            self._binding.late_gradients.activate_accepted()

    def _clear_late_gradients(self) -> None:
        if self._binding is not None:
            self._binding.late_gradients.clear_active()

    def _exchange_until_success(self, offset_s: float, compute_s: float) -> RoundSums | None:
        """Exchange until a round succeeds; return its sums, or None where this worker is in no group."""
        assert self._binding is not None
        is_announced = False
        while True:
            if self._buckets.group is None and not is_announced:
                self._contributed_blocks = self._context.announce_gradients(compute_s)
                is_announced = True
            is_bound = self._bind_group(wait=True)
            if self._binding.was_state_replaced:
                self._discard_replaced()
            if not is_bound:
                return None
            try:
                sums = self._exchange_buckets(offset_s, None if is_announced else compute_s)
                is_announced = True
                while sums.stale:
                    self._buckets.relaunch()
                    sums = self._exchange_buckets(offset_s, None)
                if self._binding.finish_round(sums.contributions):
                    return sums
            except GroupChangedError:
                is_announced = True
            self._buckets.abandon()

    def _discard_replaced(self) -> None:
        """Discard gradients of replaced parameters; this worker contributes with weight zero."""
        assert self._binding is not None
        self._binding.was_state_replaced = False
        self.drop_gradients()
        self._buckets.discard_gradients()
        self._contributed_blocks = (0, 0)

    def _exchange_buckets(self, offset_s: float, compute_s: float | None) -> RoundSums:
        """Launch the remaining buckets, wait for all of them and return the trailer's sums."""
        self._buckets.fill_trailer(
            weight=self._unsent_weight,
            writes=len(self._written),
            is_preempted=self._context.has_preemption_signal,
            round_s=self._round_s,
            offset_s=offset_s,
        )
        self._buckets.launch_all_but_last()
        if compute_s is not None:  # before another member can finish the round
            self._contributed_blocks = self._context.announce_gradients(compute_s)
        self._buckets.launch_last(self._contributed_blocks)
        return self._buckets.wait(self._timeout_s + COORDINATOR_MARGIN_S)

    @torch.no_grad()
    def _apply_means(self, sums: RoundSums) -> None:
        """Set the gradients to the means, and the buffers to the first member's."""
        group = self._buckets.group
        assert group is not None
        if group.generation == self._generation:  # else a new member has got the writes with the state
            check_all_wrote(self._written, sums.writes, group.size)
        self._generation = group.generation
        self.is_preempted |= sums.preempted > 0
        if group.position:
            self._context.apply_hyperparameters(sums.hyperparameters)
        self._averaged.begin_round()
        self._buckets.unpack(sums, self._averaged.set_mean)
        for parameter, is_used in zip(self._parameters, sums.used, strict=True):
            if not is_used:
                parameter.grad = None

    def _continue_trial(self, sums: RoundSums) -> None:
        """Change the compression if the trial has come to the next one, or to its end."""
        group, trial = self._buckets.group, self._trial
        if group is None or trial is None or trial.chosen is not None:
            return
        if trial.end_round(sums.round_s / group.size):
            self._buckets.change_compression(trial.method)
        if trial.chosen is not None and not group.position:
            _log.info(str(trial))

    def _end_round(self, offset_s: float, offsets_s: Sequence[float]) -> None:
        timer = self._context.timer
        began_s, self._round_end_s = self._round_end_s, timer.switch("other")
        self._round_s = self._round_end_s - began_s
        if offsets_s:
            timer.move("communicate", "wait", max(offsets_s) - offset_s)
        self._passes.end_round()
        self._unsent_weight = 0.0
        self._clear_late_gradients()
        self.rounds_since_step += 1
        self._buckets.end_round()
        if self._skipped is not None:
            self._skipped.keep_buffers()
        self._round += 1

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self._round if self._binding is None else self._binding.membership.round

    @property
    def has_no_pending_gradient(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""
        return not self._unsent_weight and not self.rounds_since_step

    @property
    def is_exchange_due(self) -> bool:
        """Whether gradients were computed, or a step is about to be taken, without a round for it."""
        return self._unsent_weight > 0 or self.rounds_since_step == 0
