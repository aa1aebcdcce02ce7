"""Averages gradients layer by layer, behind the backward pass and the next forward pass.

A layer's gradients leave as soon as the backward pass has them. Nobody waits for their mean before the next
forward pass comes to the layer; by then they are applied, to this layer alone (`DeferredStep`). Whoever looks
at a gradient before that waits for all of them (`Promise`). This module never decides who takes part, nor
which layers travel together by which all-reduce.
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
from offbeat.numerics.collectives.plans import Policy
from offbeat.runtime.averaging.group_binding import Grouping
from offbeat.runtime.averaging.interface import Host
from offbeat.runtime.hybrid.deferred_step import DeferredStep, StepsAhead
from offbeat.runtime.hybrid.first_use import Uses
from offbeat.runtime.hybrid.layer_layout import Order, Plan, check_layers, plan_by_layer, plan_by_type
from offbeat.runtime.hybrid.layer_rounds import LayerRounds, Round
from offbeat.runtime.hybrid.pending_gradient import Promise
from offbeat.runtime.training.backward import BackwardPass, Onlookers, check_can_average, leads_to, watch
from offbeat.runtime.training.checks import Forms
from offbeat.runtime.training.hooks import ForwardHook, Hook, Scripting, of_this_process
from offbeat.runtime.training.partial_step import PartialSteps

Overlap: TypeAlias = Literal["none", "backward", "forward"]

_WATCHED_ROUNDS = 2  # the first one warms up


class LayerAverager:
    """Keeps the gradients of `model` equal on all members of a group that does not change.

    Every backward pass is one round. Two rounds are watched; then the first member plans which gradients
    travel together, by which algorithm and how urgently, and tells the others.

    Source: the layer-overlapping hybrid all-reduce paper, sections 3.1 and 3.2. Deviations: gradients go in
    the order in which they are needed, not in that in which they appear (`order`); a parameter is waited for
    by the module that is the first to use it, whosever it is; buffers follow the first member's, as in
    DistributedDataParallel. Lazy all-reduce (specification 3.7) keeps all gradients as views of one pool and
    sends it in slices; here slices are parcels, as fixed as those. Into a view a gradient would be added,
    which moves more bytes than copying it into its parcel does; one of 128 KB or more is not even copied.

    Args:
        model: parameters that require no gradient now are left alone.
        optimizers: step its parameters. The steps of several are not put off, since one may come before the
            others' gradients are computed.
        grouping: with whom to exchange; more than one member.
        host: the session.
        workers: how many there are.
        policy, fuse_bytes: see `offbeat.numerics.plans.plan`.
        order: `priority`: what the forward pass needs first overtakes the rest; `fifo`: first come.
        overlap: `forward`: nothing is waited for before it is needed; `backward`: everything before the
            optimizer steps; `none`: and nothing leaves before the backward pass is over.
        deadline_s: how long an exchange may take at most, in seconds.

    Attributes:
        line: what a message costs, as measured at the start.
        is_preempted: see `Averager.is_preempted`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        grouping: Grouping,
        host: Host,
        *,
        workers: int,
        policy: Policy,
        fuse_bytes: int | None,
        order: Order,
        overlap: Overlap,
        deadline_s: float,
    ) -> None:
        self._model, self._optimizers, self._host = model, optimizers, host
        self._workers = workers
        self._policy, self._fuse_bytes, self._order, self._overlap = policy, fuse_bytes, order, overlap
        self._puts_steps_off = overlap == "forward" and len(optimizers) == 1
        self._steps = PartialSteps(optimizers[0])
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._forms = Forms(model)
        self._rounds = LayerRounds(model, self._parameters, grouping, host, deadline_s=deadline_s)
        check_layers(model)
        self._uses = Uses(model, self._parameters, time.perf_counter)
        self._handles: list[RemovableHandle | Scripting] = []
        self._is_planned = False
        self._batch_weight, self._fresh_weight = 1.0, 0.0
        self._quiet = False
        self._finished = 0  # rounds
        self._rounds_since_step = self._steps_taken = 0
        self._round: Round | None = None  # under way, or the last one
        self._deferred: DeferredStep | None = None  # until it has been taken with every parameter
        self._ahead: StepsAhead | None = None  # from the plan on, where steps are put off
        self._is_in_forward = self.is_preempted = False
        count = len(self._parameters)
        self._promised: list[Promise | None] = [None] * count
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        held = {id(one) for group in groups for one in group["params"]}
        self._held = [id(parameter) in held for parameter in self._parameters]
        # Of the pass under way, and of the one before:
        self._came_s, self._ended_s = [0.0] * count, 0.0
        self._pass = BackwardPass(self._end_pass)
        self._has_accumulated = False
        self._onlookers: Onlookers  # from `attach` on
        self._stay = False  # the gradients of the pass under way, for somebody may look at them
        self._compute_mark_s = self._pass_mark_s = host.timer.total_s("compute")
        self.line = self._rounds.measured_line(workers)
        self._rounds.adopt(plan_by_type(self._parameters), order)

    # The plan ------------------------------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        """Decides for all, from what this worker has seen."""
        return plan_by_layer(
            self._parameters,
            self._uses.order,
            self._uses.modules,
            [
                self._ended_s - came_s + began_s
                for came_s, began_s in zip(self._came_s, self._uses.began_s, strict=True)
            ],
            workers=self._workers,
            line=self.line,
            policy=self._policy,
            fuse_bytes=self._fuse_bytes,
        )

    def _share_plan(self) -> None:
        """Takes the first member's plan in place of the first one."""
        plan = self._rounds.plan_of_the_first(self._make_plan)
        self._uses.detach()
        self._rounds.adopt(plan, self._order)
        self._is_planned = True
        if self._puts_steps_off:
            self._hook_modules()

    # Hooks ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Puts the hooks on the model."""
        for entry, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_hook(Hook(partial(self._gradient_comes, entry))))
            came = Hook(partial(self._gradient_came, entry))
            self._handles.append(parameter.register_post_accumulate_grad_hook(came))
        drain = Hook(self._drain_first)
        stateful: list[Any] = [*self._model.modules(), *self._optimizers]
        for one in stateful:
            self._handles.append(one.register_state_dict_pre_hook(drain))
            self._handles.append(one.register_load_state_dict_pre_hook(drain))
        before = ForwardHook(self._before_forward, self._before_showing)
        self._handles.append(self._model.register_forward_pre_hook(before))
        after = ForwardHook(self._after_forward)
        self._handles.append(self._model.register_forward_hook(after, always_call=True))
        self._uses.attach()
        self._handles.append(Scripting(self._model, self.drain))
        self._onlookers = Onlookers(self._model, self._parameters)
        _drains[self._model] = of_this_process(self.drain)
        self._model.train = MethodType(train, self._model)  # type: ignore[method-assign]

    def _drain_first(self, *_: Any) -> None:
        self.drain()

    def detach(self) -> None:
        """Takes every hook off the model again."""
        if self._deferred is not None:
            self._deferred.end_ahead()
        if self._ahead is not None:
            self._ahead.stop()
        self._uses.detach()
        if _drains.pop(self._model, None) is not None:
            del self._model.train
        for parameter, promised in zip(self._parameters, self._promised, strict=True):
            if promised is not None and parameter.grad is promised:  # the job has failed
                parameter.grad = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_modules(self) -> None:
        """Lets each module wait for what it owns and for the parameters that it is the first to use."""
        needs = self._rounds.layout.needs(self._model, self._parameters, self._uses.modules)
        for module, indices in needs.items():
            hook = ForwardHook(partial(self._before_module, indices), self._before_showing)
            self._handles.append(module.register_forward_pre_hook(hook))
        self._ahead = StepsAhead(self._rounds.grouping.start_thread)

    # The backward pass ---------------------------------------------------------------------------------

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the exchange comes with the next one outside."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def weigh(self, batches: float) -> None:
        """Says what the next backward passes count, relative to a whole batch."""
        self._batch_weight = batches

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._rounds.check()
        self._forms.check()
        if torch.is_grad_enabled():
            self._is_in_forward = True
            self._host.timer.switch("compute")
        else:
            self.drain()

    def _before_showing(self) -> None:
        """A tool records what a forward pass does, in which nothing may be changed."""
        if self._deferred is not None:
            raise OffbeatError(
                "the model is traced or exported while the last step is put off, so that its parameters are "
                "old ones: call session.refresh() before that"
            )

    def _before_module(self, indices: Sequence[int], *_: Any) -> None:
        """A module's forward pass begins: what it needs of the last step is done now."""
        if self._host.tracer is not None:
            now_s = time.perf_counter()
            for index in [one for one in indices if one < self._rounds.layout.parcels]:
                name = self._rounds.names[self._rounds.slots[index].entries[0]]
                self._host.tracer.add("the forward pass comes to", name, now_s, now_s)
        step = self._deferred
        if step is not None:
            part = self._host.timer.part
            for index in indices:
                step.reach(index)
            self._host.timer.switch(part)
            # Outside a forward pass the program may change settings and parameters.
            if self._is_in_forward and step.round.weight and not step.is_ahead:
                assert self._ahead is not None
                self._ahead.begin(step)

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """The forward pass is over; where it has raised there is no output."""
        self._is_in_forward = False
        watch(output, self._backward_begins)
        if self._deferred is not None and self._deferred.is_ahead:
            passed = {id(self._parameters[entry]): entry for entry in self._deferred.end_ahead()}
            if passed:
                used = leads_to(output, [self._parameters[entry] for entry in passed.values()])
                if used is not None:
                    raise self._used_too_early(passed[id(used)])

    def _backward_begins(self, _: torch.Tensor) -> None:
        self._begin_pass()

    def _begin_pass(self) -> None:
        """A backward pass has begun, if it has not before; those inside it belong to it."""
        self._forget_failed_pass()
        if self._pass.is_under_way:
            return
        self._pass.begin()
        if not self._quiet:
            self._begin_round(self._fresh_weight + self._batch_weight)

    def _begin_round(self, weight: float) -> None:
        """Begins the next round; the one before is there, if no step was put off with it."""
        if not self._is_put_off(self._round):
            self._look(self._round)
        self._round = Round(self._rounds, weight / self._workers, self._steps_taken)

    def _forget_failed_pass(self) -> None:
        """A backward pass that raised never ends."""
        if not self._pass.has_failed:
            return
        self._pass.forget()
        self._has_accumulated = False
        if self._round is not None and not self._round.is_sent:
            if self._round.has_begun:
                raise OffbeatError(
                    "a backward pass failed when some of its gradients were on their way, which the others "
                    "count on: leave the session, or use the strategy bsp, which takes them back"
                )
            self._round = None

    def _gradient_comes(self, entry: int, _: torch.Tensor) -> None:
        """Before a gradient is accumulated: not into one that is still on its way."""
        self._begin_pass()
        self._keep_promise(entry)

    def _gradient_came(self, entry: int, parameter: torch.Tensor) -> None:
        if self._host.timer.part != "compute":
            self._host.timer.switch("compute")
        self._rounds.check()
        check_can_average(parameter.grad)
        self._begin_pass()
        if not self._has_accumulated:
            self._forms.check()
            self._has_accumulated, self._stay = True, self._onlookers.are_there
        index, _ = self._rounds.layout.place_of[entry]
        if self._deferred is not None and not self._deferred.is_reached(index):
            raise self._used_too_early(entry)
        if self._quiet:
            return
        assert self._round is not None
        if self._stay or parameter.grad is None:  # somebody's hook may have taken it
            self._round.leave(entry)
            return
        now_s = self._came_s[entry] = time.perf_counter()
        if self._host.tracer is not None:
            self._host.tracer.add("the backward pass has", self._rounds.names[entry], now_s, now_s)
        self._host.timer.switch("communicate")
        self._pack_early(entry)
        self._host.timer.switch("compute")

    def _used_too_early(self, entry: int) -> OffbeatError:
        return OffbeatError(
            f"{self._rounds.names[entry]} was used before the last step had reached it, because the "
            "forward pass came to it in another way than in the first steps: use overlap=backward"
        )

    def _pack_early(self, entry: int) -> None:
        """Packs a gradient while the backward pass goes on, and sends what is complete with it."""
        assert self._round is not None
        parcel = self._round.take(entry)
        self._parameters[entry].grad = None  # its memory serves the next layer's gradient
        if parcel is not None and self._is_planned and self._overlap != "none":
            self._round.launch(parcel)

    def _end_pass(self) -> None:
        if not self._has_accumulated:  # torch.autograd.grad, which leaves `param.grad` alone
            return
        self._has_accumulated = False
        self._ended_s = time.perf_counter()
        timer = self._host.timer
        timer.switch("compute")
        self._host.computed(timer.total_s("compute") - self._pass_mark_s)
        timer.switch("compute")
        self._pass_mark_s = timer.total_s("compute")
        if self._quiet:
            self._fresh_weight += self._batch_weight
            timer.switch("other")
        else:
            self._send_round()

    # The exchange --------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds finished."""
        return self._finished

    @property
    def is_clear(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""
        return not self._fresh_weight and not self._rounds_since_step

    def _exchange_now(self) -> None:
        """Averages what was accumulated or set by hand; every member has to call it."""
        self._forms.check()
        weight = self._fresh_weight
        if not weight and any(parameter.grad is not None for parameter in self._parameters):
            weight = self._batch_weight
        self._begin_round(weight)
        for entry in range(len(self._parameters)):
            self._keep_promise(entry)
        self._send_round()
        self._look(self._round)

    def _send_round(self) -> None:
        """The backward pass is over: sends what it has not sent, and promises the means."""
        round_, timer = self._round, self._host.timer
        assert round_ is not None
        compute_s = timer.total_s("compute") - self._compute_mark_s
        self.drain()  # where no forward pass has come
        timer.switch("communicate")
        round_.send_rest(compute_s)
        self._finished += 1
        self._rounds_since_step += 1
        if not self._is_planned:
            self._rounds.fires = [max(1, fired) for fired in round_.fired]
            if self._finished < _WATCHED_ROUNDS:
                self._uses.forget()
        self._fresh_weight = 0.0
        self._promise(round_)
        self._rounds.turn_banks(are_prepared=self._is_planned)
        self._compute_mark_s = timer.total_s("compute")
        timer.switch("other")

    def _promise(self, round_: Round) -> None:
        """Makes the means the gradients before they are there."""
        used = round_.learn_used()
        for entry, parameter in enumerate(self._parameters):
            self._promised[entry] = parameter.grad = None
            if used[entry]:
                keep = partial(self._look, round_)
                self._promised[entry] = parameter.grad = Promise.of(round_.mean(entry), keep)

    def _look(self, round_: Round | None) -> None:
        """Somebody looks at a gradient of a round: all of them are to be there.

        Where a step with them was put off it is taken first, for who looks may write.
        """
        if round_ is None or round_.was_looked_at or not round_.is_sent:
            return
        if self._is_put_off(round_):
            self.drain()
        part = self._host.timer.part
        for index in range(self._rounds.layout.parcels):
            round_.wait(index)
            round_.settle(index)
        self._host.timer.switch(part)
        round_.was_looked_at = True

    def _keep_promise(self, entry: int) -> None:
        """Makes a gradient that was promised a plain one."""
        promised, self._promised[entry] = self._promised[entry], None
        parameter = self._parameters[entry]
        if promised is not None and parameter.grad is promised:
            parameter.grad = promised.kept()

    # The step ------------------------------------------------------------------------------------------

    def before_step(self, *, has_closure: bool) -> None:
        """The optimizer is about to step: with nothing yet, if that can be put off, or with all means.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
        """
        self._forget_failed_pass()
        if has_closure:
            return
        self.drain()  # there may be another step before the next pass
        if self._fresh_weight or not self._rounds_since_step:
            self._exchange_now()
        round_ = self._round
        if round_ is not None and round_.is_sent and self._can_wait(round_):
            self._deferred = DeferredStep(self._steps, self._rounds, round_, self._held)
            for parameter, is_held in zip(self._parameters, self._held, strict=True):
                if is_held:
                    parameter.grad = None
        else:
            for entry in range(len(self._parameters)):
                self._keep_promise(entry)

    def _can_wait(self, round_: Round) -> bool:
        """Whether the step may be taken layer by layer: nobody has looked at a gradient or replaced one."""
        return (
            self._is_planned
            and self._puts_steps_off
            and not round_.was_looked_at
            and self._steps.are_possible
            and self._rounds_since_step == 1
            and all(
                parameter.grad is promised
                for parameter, promised in zip(self._parameters, self._promised, strict=True)
            )
        )

    def _is_put_off(self, round_: Round | None) -> bool:
        """Whether the step with a round is yet to be taken with some parameters."""
        return self._deferred is not None and self._deferred.round is round_

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self._rounds_since_step = 0
        if self._is_put_off(self._round):
            for parameter, promised, is_held in zip(
                self._parameters, self._promised, self._held, strict=True
            ):
                if is_held:
                    parameter.grad = promised
        else:
            self._look(self._round)
            self._host.writes.note()
        self._round = None
        first, self._steps_taken = self._rounds.signalled_step, self._steps_taken + 1
        # What a step's own rounds say may not be here yet, what those of the step before say is everywhere.
        self.is_preempted = first is not None and first < self._steps_taken - 1
        if not self._is_planned and self._finished >= _WATCHED_ROUNDS:
            self._share_plan()

    @property
    def puts_off(self) -> bool:
        """See `Averager.puts_off`; a parameter that it is yet to be taken with must not be changed."""
        return self._deferred is not None

    def drain(self) -> None:
        """Takes what is left of the last step.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
            OffbeatError: a parameter has changed its form since join.
        """
        if self._deferred is not None:
            self._forms.check()
            part = self._host.timer.part
            self._deferred.reach_all()
            self._deferred = None
            self._host.writes.note()
            self._host.timer.switch(part)

    def flush(self) -> None:
        """The loop is over: takes the last step, and makes promises gradients.

        Raises:
            WorkerError: a member was lost, and this worker has not heard so yet.
        """
        if not self._rounds.has_failed:
            self.drain()
            for entry in range(len(self._parameters)):
                self._keep_promise(entry)


_drains: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()


def train(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stands in for `module.train`, and so for `eval`, while it is in a session; in copies it does no more.

    A model that is set to evaluate is about to be looked at.
    """
    drain = _drains.get(module)
    if drain is not None:
        drain()
    return type(module).train(module, mode)
