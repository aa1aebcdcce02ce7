"""Averages gradients layer by layer, overlapped with the backward pass and the next forward pass.

A layer's gradients are sent as soon as the backward pass has computed them. Their mean is waited for when the
next forward pass reaches the layer, and the step is then applied to this layer alone (`DeferredStep`). A read
of a gradient before that waits for all of them (`PendingGradient`). This module never decides on membership,
nor which layers share a bucket, nor by which all-reduce it is averaged.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import OffbeatError
from offbeat.numerics.collectives.plans import AlgorithmPolicy
from offbeat.numerics.compressors.interface import CompressionMethod, keeps_residual
from offbeat.runtime.averaging.group_binding import GroupBinding
from offbeat.runtime.averaging.interface import AveragerContext
from offbeat.runtime.averaging.local_state import by_name, by_number
from offbeat.runtime.hybrid.bucket_planner import BucketPlanner
from offbeat.runtime.hybrid.layer_layout import SendOrder, check_layers, plan_by_type
from offbeat.runtime.hybrid.layer_rounds import GradientRound, LayerRounds
from offbeat.runtime.hybrid.pending_gradient import PendingGradient, PendingGradients
from offbeat.runtime.hybrid.step_deferral import StepDeferral
from offbeat.runtime.training.backward import (
    BackwardPass,
    GradientObservers,
    check_can_average,
    find_used_parameter,
    on_output_gradient,
)
from offbeat.runtime.training.checks import ParameterFormCheck
from offbeat.runtime.training.hooks import (
    HookFreeScripting,
    SessionForwardHook,
    SessionHook,
    only_in_this_process,
)
from offbeat.runtime.training.pass_timer import PassTimer
from offbeat.runtime.training.saved_gradients import SavedGradients

Overlap: TypeAlias = Literal["none", "backward", "forward"]

_WATCHED_ROUNDS = 2  # the first one is a warm-up


class LayerAverager:
    """Keeps the gradients of `model` equal on all members of a group that does not change.

    Every backward pass is one round. Two rounds are measured; then the first member plans which gradients
    share a bucket, by which algorithm and in which order of priority, and sends the plan to all members.

    Source: the layer-overlapping hybrid all-reduce paper, sections 3.1 and 3.2. Deviations: gradients are
    sent in the order in which they are needed, not in which they are computed (`order`); the first module
    that uses a parameter waits for it, whichever module owns it; buffers are copied from the first member, as
    in DistributedDataParallel. Lazy all-reduce keeps all gradients as views of one pool
    and sends it in slices; here the slices are buckets, equally fixed. A gradient would be added into a view,
    which moves more bytes than copying it into its bucket; one of 128 KB or more is not even copied.

    Size: hooks of modules and gradients, and a fifth of it the interface, in a line or two for each call;
    rounds, plans and deferred steps are in parts that it owns.

    Args:
        model: parameters that require no gradient now are ignored.
        optimizers: step its parameters; see `StepDeferral`.
        binding: the binding to the group, which has more than one member.
        context: the session.
        workers: the number of workers.
        policy, fuse_bytes: see `offbeat.numerics.collectives.plans.plan_fused_buckets`.
        order: `priority`: buckets that the forward pass needs first overtake others; `fifo`: first come,
            first served.
        overlap: `forward`: a mean is waited for when it is needed; `backward`: all means before the optimizer
            steps; `none`: as `backward`, and nothing is sent before the backward pass is over.
        timeout_s: the longest duration of an exchange, in seconds.
        compression: of gradients; None for none. Layers are planned by their uncompressed bytes all the same.

    Attributes:
        is_preempted: see `Averager.is_preempted`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        binding: GroupBinding,
        context: AveragerContext,
        *,
        workers: int,
        policy: AlgorithmPolicy,
        fuse_bytes: int | None,
        order: SendOrder,
        overlap: Overlap,
        timeout_s: float,
        compression: CompressionMethod | None = None,
    ) -> None:
        self._model, self._optimizers, self._context = model, optimizers, context
        self._workers, self._overlap = workers, overlap
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._forms = ParameterFormCheck(model)
        self._rounds = LayerRounds(
            model,
            self._parameters,
            binding,
            context,
            order=order,
            timeout_s=timeout_s,
            compression=compression,
        )
        self._keeps_residuals = keeps_residual(compression)
        check_layers(model)
        self._hook_handles: list[RemovableHandle | HookFreeScripting] = []
        self._is_planned = False
        self._batch_weight, self._unsent_weight = 1.0, 0.0
        self._skips_exchange = False
        self._rounds_finished = 0  # rounds
        self._rounds_since_step = self._steps_taken = 0
        self._round: GradientRound | None = None  # under way, or the last one
        self._deferral = StepDeferral(optimizers, self._rounds)
        self.is_preempted = False
        self._pending_gradients = PendingGradients(self._parameters)
        self._saved_gradients = SavedGradients()
        self._backward = BackwardPass(self._end_pass)
        self._observers: GradientObservers  # from `attach` on
        self._leaves_gradients = False  # until the pass ends, as hooks of the program may read param.grad
        self._passes = PassTimer(context.timer, context.device, context.on_computed)
        self._planner = BucketPlanner(
            model,
            self._parameters,
            context.device,
            workers=workers,
            policy=policy,
            fuse_bytes=fuse_bytes,
            message_cost=self._rounds.measure_message_cost(workers),
        )
        self._rounds.apply_plan(plan_by_type(self._parameters))

    # The plan ------------------------------------------------------------------------------------------

    def _adopt_shared_plan(self) -> None:
        """Replace the initial plan by that of the first member."""
        plan = self._rounds.broadcast_plan(self._planner.make_plan)
        self._planner.uses.detach()
        self._rounds.apply_plan(plan)
        self._is_planned = True
        if self._overlap == "forward" and len(self._optimizers) == 1:
            self._hook_modules()

    # Hooks ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register the hooks on the model."""
        for entry, parameter in enumerate(self._parameters):
            self._hook_handles.append(
                parameter.register_hook(SessionHook(partial(self._before_accumulate, entry)))
            )
            after_accumulate = SessionHook(partial(self._after_accumulate, entry))
            self._hook_handles.append(parameter.register_post_accumulate_grad_hook(after_accumulate))
        drain = SessionHook(self._drain_hook)
        stateful: list[Any] = [*self._model.modules(), *self._optimizers]
        for one in stateful:
            self._hook_handles.append(one.register_state_dict_pre_hook(drain))
            self._hook_handles.append(one.register_load_state_dict_pre_hook(drain))
        before = SessionForwardHook(self._before_forward, self._on_traced)
        self._hook_handles.append(self._model.register_forward_pre_hook(before))
        after = SessionForwardHook(self._after_forward)
        self._hook_handles.append(self._model.register_forward_hook(after, always_call=True))
        self._planner.uses.attach()
        self._hook_handles.append(HookFreeScripting(self._model, self.apply_deferred_step))
        self._observers = GradientObservers(self._model, self._parameters)
        _drains[self._model] = only_in_this_process(self.apply_deferred_step)
        self._model.train = MethodType(train, self._model)  # type: ignore[method-assign]

    def _drain_hook(self, *_: Any) -> None:
        self.apply_deferred_step()

    def detach(self) -> None:
        """Remove all hooks from the model."""
        self._deferral.stop()
        self._planner.uses.detach()
        if _drains.pop(self._model, None) is not None:
            del self._model.train
        self._pending_gradients.drop()
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles.clear()

    def _hook_modules(self) -> None:
        """Make each module wait for its own tensors and the parameters that it is the first to use."""
        needs = self._rounds.layout.buckets_needed(
            self._model, self._parameters, self._planner.uses.first_modules
        )
        for module, indices in needs.items():
            hook = SessionForwardHook(partial(self._before_module, indices), self._on_traced)
            self._hook_handles.append(module.register_forward_pre_hook(hook))
        self._deferral.start()

    # The backward pass ---------------------------------------------------------------------------------

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

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._rounds.raise_if_failed()
        self._forms.check()
        if torch.is_grad_enabled():
            self._context.device.check_not_capturing()
            self._deferral.begin_forward()
            self._context.timer.switch("compute")
            self._passes.begin_pass()
        else:
            self.apply_deferred_step()

    def _on_traced(self) -> None:
        """Raise an error if a tool records the forward pass while a step is deferred."""
        if self.has_deferred_step:
            raise OffbeatError(
                "the model is traced or exported while the last step is deferred, so its parameters are "
                "outdated: call session.refresh() before that"
            )

    def _before_module(self, indices: Sequence[int], *_: Any) -> None:
        """Apply the deferred step to the buckets that a module needs, before its forward pass."""
        if self._context.tracer is not None:
            now_s = time.perf_counter()
            for index in [one for one in indices if one < self._rounds.layout.gradient_buckets]:
                name = self._rounds.names[self._rounds.buckets[index].entries[0]]
                self._context.tracer.add_span("the forward pass comes to", name, now_s, now_s)
        with self._passes.paused():
            self._deferral.wait_and_apply(indices)

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """End the forward pass; one that raised has no output."""
        on_output_gradient(output, self._backward_begins)
        passed = {id(self._parameters[entry]): entry for entry in self._deferral.end_forward()}
        if passed:
            used = find_used_parameter(output, [self._parameters[entry] for entry in passed.values()])
            if used is not None:
                raise self._early_use_error(passed[id(used)])

    def _backward_begins(self, _: torch.Tensor) -> None:
        self._begin_pass()

    def _begin_pass(self) -> None:
        """Begin a backward pass unless one is under way; nested ones belong to it."""
        self._forget_failed_pass()
        if self._backward.is_under_way:
            return
        self._backward.begin()
        if not self._skips_exchange:
            self._begin_round(self._unsent_weight + self._batch_weight)

    def _begin_round(self, weight: float) -> None:
        """Begin the next round; complete the previous one if no step with it is deferred."""
        if not self._deferral.has_step_of(self._round):
            self._complete_means(self._round)
        self._round = GradientRound(self._rounds, weight / self._workers, self._steps_taken)

    def _forget_failed_pass(self) -> None:
        """Reset after a backward pass that raised, and so never ends."""
        if not self._backward.has_failed:
            return
        self._backward.cancel()
        if self._round is not None and not self._round.is_sent:
            if self._round.has_begun:
                raise OffbeatError(
                    "a backward pass failed after some of its gradients had been sent, which the other "
                    "members expect: leave the session, or use the strategy bsp, which sends them again"
                )
            self._round = None

    def _before_accumulate(self, entry: int, _: torch.Tensor) -> None:
        """Before a gradient is accumulated, waits for a pending one that it is added to."""
        self._begin_pass()
        self._pending_gradients.resolve(entry)

    def _after_accumulate(self, entry: int, parameter: torch.Tensor) -> None:
        if self._context.timer.part != "compute":
            self._context.timer.switch("compute")
        self._rounds.raise_if_failed()
        check_can_average(parameter.grad)
        self._begin_pass()
        if self._backward.add_gradient():
            self._forms.check()
            self._leaves_gradients = self._observers.exist
        index, _ = self._rounds.layout.location_of[entry]
        step = self._deferral.step
        if step is not None and not step.was_waited_for(index):
            raise self._early_use_error(entry)
        if not self._leaves_gradients:
            self._saved_gradients.put_back([parameter])
        if self._skips_exchange:
            return
        assert self._round is not None
        if self._leaves_gradients or parameter.grad is None:  # a hook may have removed it
            self._round.count_gradient(entry)
            return
        if not self._is_planned:
            self._planner.on_gradient(entry)
        if self._context.tracer is not None:
            now_s = time.perf_counter()
            self._context.tracer.add_span("the backward pass has", self._rounds.names[entry], now_s, now_s)
        self._context.timer.switch("communicate")
        self._pack_early(entry)
        self._context.timer.switch("compute")

    def _early_use_error(self, entry: int) -> OffbeatError:
        return OffbeatError(
            f"{self._rounds.names[entry]} was used before the last step was applied to it, because the "
            "forward pass reached it in another way than in the first steps: use overlap=backward"
        )

    def _pack_early(self, entry: int) -> None:
        """Pack a gradient during the backward pass, and launch the bucket that this completes."""
        assert self._round is not None
        bucket_index = self._round.add_gradient(entry)
        self._parameters[entry].grad = None  # its memory can hold the next layer's gradient
        if bucket_index is not None and self._is_planned and self._overlap != "none":
            self._round.launch(bucket_index)
            self._rounds.advance_ended()

    def _end_pass(self) -> None:
        if not self._is_planned:
            self._planner.on_pass_ended()
        self._passes.end_pass()
        self._saved_gradients.put_back()
        if self._skips_exchange:
            self._unsent_weight += self._batch_weight
            self._context.timer.switch("other")
        else:
            self._send_round()

    # The exchange --------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self._rounds_finished

    @property
    def has_no_pending_gradient(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""
        return not self._unsent_weight and not self._rounds_since_step

    def _exchange_now(self) -> None:
        """Average gradients that were accumulated or set by hand; every member has to call it."""
        self._forms.check()
        self._pending_gradients.resolve_all()
        weight = self._unsent_weight
        if not weight and self._pending_gradients.has_new_gradients:
            weight = self._batch_weight
        self._begin_round(weight)
        self._send_round()
        self._complete_means(self._round)

    def _send_round(self) -> None:
        """Send the remaining buckets after the backward pass, and make the gradients pending."""
        round_, timer = self._round, self._context.timer
        assert round_ is not None
        compute_s = self._passes.compute_s
        self.apply_deferred_step()  # where no forward pass applied it
        timer.switch("communicate")
        round_.send_rest(compute_s)
        self._rounds_finished += 1
        self._rounds_since_step += 1
        if not self._is_planned:
            self._rounds.gradients_per_pass = [max(1, fired) for fired in round_.gradient_counts]
            if self._rounds_finished < _WATCHED_ROUNDS:
                self._planner.uses.reset()
        self._unsent_weight = 0.0
        self._set_pending_gradients(round_)
        self._rounds.swap_buffers(prepare_next=self._is_planned)
        self._passes.end_round()
        timer.switch("other")

    def _set_pending_gradients(self, round_: GradientRound) -> None:
        """Set the gradients to pending ones, before the means have arrived."""
        wait = partial(self._complete_means, round_)
        for entry, is_used in enumerate(round_.wait_for_used()):
            if not is_used:
                self._pending_gradients.set(entry, None)
            elif round_.weight != 0.0:  # else no member has a new gradient, and that of the last step stays
                self._pending_gradients.set(entry, PendingGradient.create(round_.mean(entry), wait))

    def _complete_means(self, round_: GradientRound | None) -> None:
        """Wait for all means of a round, one of which the program reads.

        A deferred step with them is applied first, as the program may also write them.
        """
        if round_ is None or round_.was_read or not round_.is_sent:
            return
        if self._deferral.has_step_of(round_):
            self.apply_deferred_step()
        part = self._context.timer.part
        for index in range(self._rounds.layout.gradient_buckets):
            round_.wait(index)
            round_.finalize(index)
        self._context.timer.switch(part)
        round_.was_read = True

    # The step ------------------------------------------------------------------------------------------

    def before_step(self, *, has_closure: bool) -> None:
        """Prepare an optimizer's step: defers it where possible, otherwise waits for all means.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
        """
        self._forget_failed_pass()
        if has_closure:
            return
        self.apply_deferred_step()  # there may be another step before the next pass
        if self._unsent_weight or not self._rounds_since_step:
            self._exchange_now()
        round_ = self._round
        if round_ is not None and round_.is_sent and self._can_defer(round_):
            self._deferral.defer(round_)
            self._pending_gradients.set_aside(self._deferral.is_held)
        else:
            self._pending_gradients.resolve_all()

    def _can_defer(self, round_: GradientRound) -> bool:
        """Whether the step can be deferred: the program has read no gradient and replaced none."""
        return (
            self._deferral.is_possible
            and not round_.was_read
            and self._rounds_since_step == 1
            and self._pending_gradients.are_untouched()
        )

    def after_step(self) -> None:
        """End a step."""
        self._rounds_since_step = 0
        if self._deferral.has_step_of(self._round):
            self._pending_gradients.put_back()
        else:
            self._complete_means(self._round)
            self._context.writes.mark()
        self._round = None
        first, self._steps_taken = self._rounds.preemption_step, self._steps_taken + 1
        # Trailers of this step's rounds may not have arrived; those of the step before have, on all members.
        self.is_preempted = first is not None and first < self._steps_taken - 1
        if not self._is_planned and self._rounds_finished >= _WATCHED_ROUNDS:
            self._adopt_shared_plan()

    @property
    def has_deferred_step(self) -> bool:
        """See `Averager.has_deferred_step`; parameters that the step is still to be applied to must not
        change.
        """
        return self._deferral.step is not None

    def apply_deferred_step(self) -> None:
        """Apply the rest of the deferred step.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
            OffbeatError: a parameter has changed its shape, dtype or device since join.
        """
        if self.has_deferred_step:
            self._forms.check()
            part = self._context.timer.part
            self._deferral.apply_all()
            self._context.writes.mark()
            self._context.timer.switch(part)

    def state_dict(self) -> dict[str, Any]:
        """See `Averager.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Averager.load_state_dict`."""

    def local_state_dict(self) -> dict[str, Any]:
        """See `Averager.local_state_dict`: the residuals of compressed gradients."""
        residuals = by_name(self._rounds.residuals, self._rounds.names)
        return {"residuals": residuals} if residuals else {}

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """See `Averager.load_local_state_dict`; without error feedback residuals are dropped."""
        if not self._keeps_residuals:
            return
        residuals = by_number(state.get("residuals", {}), self._rounds.names, self._parameters)
        self._rounds.residuals.clear()
        self._rounds.residuals.update(residuals)

    def flush(self) -> None:
        """Apply the last step at the end of the loop, and make pending gradients plain tensors.

        Raises:
            WorkerError: a member was lost, which has not been raised here before.
        """
        if not self._rounds.has_failed:
            self.apply_deferred_step()
            self._pending_gradients.resolve_all()


_drains: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()


def train(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replace `module.train`, and so `eval`, in a session: apply a deferred step first.

    Copies and scripts find a method by its name, hence `train`; in a copy, only the original is called.
    """
    drain = _drains.get(module)
    if drain is not None:
        drain()
    return type(module).train(module, mode)
