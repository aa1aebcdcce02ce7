"""Averages gradients layer by layer, behind the backward pass and the next forward pass.

A layer's gradients leave as soon as the backward pass has them. Nobody waits for their mean before the next
forward pass comes to the layer; then they are applied, to this layer alone. Whoever looks at a gradient
before that waits for all of them (`Promise`). This module never decides who takes part, nor which layers
travel together by which all-reduce.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import OffbeatError, WorkerError
from offbeat.numerics.buckets import bucket_of, plan_buckets
from offbeat.numerics.costs import Line, cost, fit_line
from offbeat.numerics.plans import Layer, Policy, kind_of, plan
from offbeat.runtime.averager import LANES, WORD_S, Host, gathered, spread
from offbeat.runtime.backward import BackwardPass, check_dense, watch
from offbeat.runtime.contribution import Contribution, Part
from offbeat.runtime.exchange import Pending
from offbeat.runtime.grouping import Grouping
from offbeat.runtime.hooks import Hook
from offbeat.runtime.partial_step import PartialSteps, Settings, plainly
from offbeat.runtime.promises import Promise
from offbeat.runtime.slots import BufferList, Slot
from offbeat.runtime.uses import Uses

Overlap: TypeAlias = Literal["none", "backward", "forward"]
Order: TypeAlias = Literal["priority", "fifo"]

_WATCHED_ROUNDS = 2  # the first one warms up
_PROBE_BYTES = tuple(1 << power for power in range(12, 20))
_PROBES = 3
_KEPT_BYTES = 1 << 17  # a gradient from this size on is sent from where it lies
_ALONG = "direct"
_ALONG_BYTES = 25 << 20


class _Plan(msgspec.Struct, array_like=True):
    """What all workers have to know of a plan: by parcel, its parameters and its algorithm."""

    parcels: list[tuple[list[int], str]]


class _Round:
    """One backward pass's gradients on their way.

    Attributes:
        exchange_id: by which all members know it; None before anything is sent.
        banks: by slot, where the means will be.
        kept: by slot and entry, gradients that are not packed but stay where they are.
        pending: by slot, the exchange; None before it has begun.
        launched_s: by slot, when that was.
        is_there: by slot, whether its means are there.
        weight: the sum of all shares, None before it is known.
        used: by parameter, whether anybody has a gradient.
        copies: by parameter, memory like its own for a mean that lies in another order.
        settings: by group of the optimizer, its hyperparameters when it stepped.
        versions: by parameter, how often it had been changed when the optimizer stepped.
        is_applied: by slot, whether that step has been taken with it.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.exchange_id: int | None = None
        self.banks = [slot.bank for slot in slots]
        self.kept: list[dict[int, Part]] = [{} for _ in slots]
        self.pending: list[Pending | None] = [None] * len(slots)
        self.launched_s = [0.0] * len(slots)
        self.is_there = [False] * len(slots)
        self.weight: float | None = None
        self.used: list[bool] = []
        self.copies: dict[int, torch.Tensor] = {}
        self.settings: Settings = []
        self.versions: list[int] = []
        self.is_applied = [False] * len(slots)
        self.is_sent = False  # all of it is on its way
        self.was_looked_at = False


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
        optimizer: steps its parameters.
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
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
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
        self._model, self._optimizer, self._grouping, self._host = model, optimizer, grouping, host
        self._workers, self._deadline_s = workers, deadline_s
        self._policy, self._fuse_bytes, self._order, self._overlap = policy, fuse_bytes, order, overlap
        self._steps = PartialSteps(optimizer)
        seat = grouping.seat(wait=True)
        assert seat is not None  # the group has everybody
        self._exchange, self._position = seat.exchange, seat.position
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        _check_layers(model)
        self._entry_of = {id(parameter): entry for entry, parameter in enumerate(self._parameters)}
        self._buffers = BufferList(model)
        self._uses = Uses(model, self._parameters, time.perf_counter)
        self._handles: list[RemovableHandle] = []
        self._is_planned = False
        self._batch_weight, self._fresh_weight = 1.0, 0.0
        self._share = 0.0  # by what gradients of the round under way are multiplied
        self._quiet = False
        self._rounds = 0
        self._rounds_since_step = 0
        self._round: _Round | None = None  # under way, or the last one
        self._stepped: _Round | None = None  # with which a step is taken layer by layer, until all have
        count = len(self._parameters)
        self._promised: list[Promise | None] = [None] * count
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._held = [id(parameter) in held for parameter in self._parameters]
        self._has_failed = False  # and said so
        # Of the pass under way, and of the one before:
        self._fired, self._fires = [0] * count, [0] * count  # how often each gradient has come
        self._came_s, self._ended_s = [0.0] * count, 0.0
        self._pass = BackwardPass(self._end_pass)
        self._has_accumulated = False
        self._compute_mark_s = self._pass_mark_s = host.timer.total_s("compute")
        self.line = self._measured_line()
        self._adopt(_Plan([([*reversed(group)], "ring") for group in self._by_type(range(count))]))

    # The plan ------------------------------------------------------------------------------------------

    def _by_type(self, entries: Iterable[int]) -> list[list[int]]:
        groups: dict[torch.dtype, list[int]] = {}
        for entry in entries:
            groups.setdefault(self._parameters[entry].dtype, []).append(entry)
        return [*groups.values()]

    def _measured_line(self) -> Line:
        """How long rings of several sizes take, each as quickly as it went."""
        ring = cost("ring", self._workers)
        samples = []
        for size in _PROBE_BYTES:
            own, into = (self._zeros(size // 4, torch.float32) for _ in range(2))
            took_s = []
            for _ in range(_PROBES):
                began_s = time.perf_counter()
                self._wait(
                    self._exchange.all_reduce(own, into, exchange_id=self._grouping.next_exchange_id())
                )
                took_s.append(time.perf_counter() - began_s)
            samples.append((ring, size, min(took_s)))
        return fit_line(samples)

    def _make_plan(self) -> _Plan:
        """Decides for all, from what this worker has seen."""
        layers: dict[tuple[nn.Module, torch.dtype], list[int]] = {}
        for entry in self._uses.order:
            layers.setdefault((self._uses.modules[entry], self._parameters[entry].dtype), []).append(entry)
        described = [
            Layer(
                kind=kind_of([self._parameters[entry].dim() for entry in entries]),
                size_bytes=sum(self._parameters[entry].nbytes for entry in entries),
                group=str(dtype),
                slack_s=min(
                    self._ended_s - self._came_s[entry] + self._uses.began_s[entry] for entry in entries
                ),
            )
            for (_, dtype), entries in layers.items()
        ]
        members = [*layers.values()]
        parcels = plan(described, self._workers, self.line, policy=self._policy, fuse_bytes=self._fuse_bytes)
        return _Plan(
            [([entry for layer in one.layers for entry in members[layer]], one.algorithm) for one in parcels]
        )

    def _share_plan(self) -> None:
        """Takes the first member's plan in place of the first one."""
        content = msgspec.msgpack.encode(self._make_plan()) if not self._position else b""
        length = torch.tensor([len(content)])
        self._broadcast(length)
        flat = torch.zeros(int(length), dtype=torch.uint8)
        if content:
            flat.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._broadcast(flat)
        self._uses.detach()
        self._adopt(msgspec.msgpack.decode(flat.numpy().tobytes(), type=_Plan))
        self._is_planned = True
        if self._overlap == "forward":
            self._hook_modules()

    def _broadcast(self, flat: torch.Tensor) -> None:
        exchange_id = self._grouping.next_exchange_id()
        self._wait(self._exchange.broadcast(flat, root=0, exchange_id=exchange_id))

    def _adopt(self, made: _Plan) -> None:
        """Lays the memory out for a plan: its parcels in the order of need, then what goes along.

        That is the buffers by type, with an epilogue: by how much what was summed has to be divided, which
        parameters anybody has a gradient of, and the first member's hyperparameters.
        """
        tensors = [*self._parameters, *self._buffers.tensors()]
        is_precise = any(parameter.dtype == torch.float64 for parameter in self._parameters)
        dtypes = [one.dtype for one in tensors] + [torch.float64 if is_precise else torch.float32]
        epilogue = 1 + len(self._parameters) + LANES * len(self._host.hyperparameters())
        shapes = [one.shape for one in tensors] + [torch.Size([epilogue])]
        count = len(self._parameters)
        sizes = [shape.numel() for shape in shapes]
        along = [
            [count + entry for entry in one.entries]
            for one in plan_buckets(sizes[count:], dtypes[count:], bucket_bytes=_ALONG_BYTES)
        ]
        self._slots = []
        for entries in [*(entries for entries, _ in made.parcels), *along]:
            bucket = bucket_of(entries, sizes, dtypes[entries[0]])
            self._slots.append(Slot(bucket, shapes, count, self._zeros))
        self._parcels = len(made.parcels)
        self._algorithms = [algorithm for _, algorithm in made.parcels]
        self._algorithms += [_ALONG] * len(along)
        self._priorities = [0] * len(self._slots)
        if self._order == "priority":
            self._priorities[: self._parcels] = range(1, self._parcels + 1)
        self._place_of = {
            entry: (index, place)
            for index, slot in enumerate(self._slots)
            for place, entry in enumerate(slot.entries)
        }
        self._missing = [len(entries) for entries, _ in made.parcels]

    def _zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self._grouping.memory.zeros(elements, dtype, device=torch.device("cpu"))

    # Hooks ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Puts the hooks on the model."""
        for entry, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_hook(Hook(partial(self._gradient_comes, entry))))
            came = Hook(partial(self._gradient_came, entry))
            self._handles.append(parameter.register_post_accumulate_grad_hook(came))
        drain = Hook(self._drain_first)
        stateful: list[Any] = [*self._model.modules(), self._optimizer]
        for one in stateful:
            self._handles.append(one.register_state_dict_pre_hook(drain))
            self._handles.append(one.register_load_state_dict_pre_hook(drain))
        self._handles.append(self._model.register_forward_pre_hook(Hook(self._before_forward)))
        self._handles.append(self._model.register_forward_hook(Hook(self._after_forward)))
        self._uses.attach()
        _drains[self._model] = self.drain
        self._model.train = MethodType(train, self._model)  # type: ignore[method-assign]

    def _drain_first(self, *_: Any) -> None:
        self.drain()

    def detach(self) -> None:
        """Takes every hook off the model again."""
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
        needs: dict[nn.Module, set[int]] = {}
        for module in self._model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in self._entry_of:
                    needs.setdefault(module, set()).add(self._place_of[self._entry_of[id(parameter)]][0])
            if any(buffer is not None for buffer in module._buffers.values()):
                needs.setdefault(module, set()).add(self._parcels)
        for entry, module in enumerate(self._uses.modules):
            needs.setdefault(module, set()).add(self._place_of[entry][0])
        for module, indices in needs.items():
            hook = Hook(partial(self._before_module, sorted(indices)))
            self._handles.append(module.register_forward_pre_hook(hook))

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
        self._check()
        if torch.is_grad_enabled():
            self._host.timer.switch("compute")
        else:
            self.drain()

    def _before_module(self, indices: Sequence[int], *_: Any) -> None:
        """A module's forward pass begins: what it needs of the last step is done now."""
        if self._host.tracer is not None:
            now_s = time.perf_counter()
            for index in [one for one in indices if one < self._parcels]:
                name = self._name(self._slots[index].entries[0])
                self._host.tracer.add("the forward pass comes to", name, now_s, now_s)
        if self._stepped is not None:
            part = self._host.timer.part
            for index in indices:
                self._apply(self._stepped, index)
            self._host.timer.switch(part)

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        watch(output, self._backward_begins)

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
        if self._round is not None and self._round is not self._stepped:
            self._look(self._round)
        self._fired = [0] * len(self._parameters)
        self._missing = [len(slot.entries) for slot in self._slots[: self._parcels]]
        self._share = weight / self._workers
        self._round = _Round(self._slots)

    def _forget_failed_pass(self) -> None:
        """A backward pass that raised never ends."""
        if not self._pass.has_failed:
            return
        self._pass.forget()
        self._has_accumulated = False
        if self._round is not None and not self._round.is_sent:
            if any(self._round.pending):
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
        self._check()
        check_dense(parameter.grad)
        self._begin_pass()
        self._has_accumulated = True
        if self._stepped is not None and not self._stepped.is_applied[self._place_of[entry][0]]:
            raise OffbeatError(
                f"{self._name(entry)} was used before the last step had reached it, because the forward pass "
                "came to it in another way than in the first steps: use overlap=backward"
            )
        if self._quiet:
            return
        now_s = self._came_s[entry] = time.perf_counter()
        if self._host.tracer is not None:
            self._host.tracer.add("the backward pass has", self._name(entry), now_s, now_s)
        self._host.timer.switch("communicate")
        self._pack_early(entry)
        self._host.timer.switch("compute")

    def _pack_early(self, entry: int) -> None:
        """Packs a gradient while the backward pass goes on, and sends what is complete with it."""
        assert self._round is not None
        index, _ = self._place_of[entry]
        if self._round.pending[index] is not None:
            raise OffbeatError(
                f"a gradient of {self._name(entry)} came after its mean was on its way: it comes more often "
                "in this backward pass than in the first steps; use overlap=none"
            )
        with torch.no_grad():
            if not self._leave_in_place(entry):
                self._pack(entry, add=self._fired[entry] > 0)
        self._parameters[entry].grad = None  # its memory serves the next layer's gradient
        self._fired[entry] += 1
        if self._fired[entry] == self._fires[entry]:
            self._missing[index] -= 1
            if not self._missing[index] and self._is_planned and self._overlap != "none":
                self._launch(self._round, index)

    def _leave_in_place(self, entry: int) -> bool:
        """Leaves a large gradient that comes once where it lies, if it can be sent from there."""
        assert self._round is not None
        gradient, (index, place) = self._parameters[entry].grad, self._place_of[entry]
        assert gradient is not None
        kept = self._round.kept[index]
        if entry in kept:  # it comes once more than in the first steps
            own = self._slots[index].own.flat
            Contribution(own, [kept.pop(entry)]).settle()
        is_kept = (
            self._fires[entry] == 1
            and not self._fired[entry]
            and gradient.nbytes >= _KEPT_BYTES
            and gradient.is_contiguous()
            and self._share != 0.0
        )
        if is_kept:
            start = self._slots[index].offsets[place]
            kept[entry] = Part(start, gradient.detach().view(-1), self._share)
        return is_kept

    def _pack(self, entry: int, *, add: bool = False) -> None:
        """Writes or adds a gradient's share of the mean.

        Dividing before the sum keeps half precision from overflowing on the way.
        """
        index, place = self._place_of[entry]
        view, gradient = self._slots[index].own.views[place], self._parameters[entry].grad
        if add:
            assert gradient is not None
            view.add_(gradient, alpha=self._share)
        elif gradient is None or not self._share:
            view.zero_()
        else:
            torch.mul(gradient, self._share, out=view)

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
        return self._rounds

    @property
    def is_clear(self) -> bool:
        """Whether no gradient has been computed since the last optimizer step."""
        return not self._fresh_weight and not self._rounds_since_step

    def _exchange_now(self) -> None:
        """Averages what was accumulated or set by hand; every member has to call it."""
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
        has = [
            bool(self._share) and (bool(fired) or parameter.grad is not None)
            for fired, parameter in zip(self._fired, self._parameters, strict=True)
        ]
        with torch.no_grad():
            for index in range(self._parcels):
                if round_.pending[index] is None:
                    self._complete(index)
                    self._launch(round_, index)
            self._send_along(round_, has)
        self._host.ready(compute_s)
        round_.is_sent = True
        self._grouping.finish_round([])
        self._rounds += 1
        self._rounds_since_step += 1
        if not self._is_planned:
            self._fires = [max(1, fired) for fired in self._fired]
            if self._rounds < _WATCHED_ROUNDS:
                self._uses.forget()
        self._fresh_weight = 0.0
        self._promise(round_, has)
        self._turn_banks()
        self._compute_mark_s = timer.total_s("compute")
        timer.switch("other")

    def _complete(self, index: int) -> None:
        """Packs what no hook has packed."""
        for entry in self._slots[index].entries:
            if not self._fired[entry]:
                self._pack(entry)

    def _send_along(self, round_: _Round, has: list[bool]) -> None:
        buffers = self._buffers.tensors()
        count = len(self._parameters)
        for index in range(self._parcels, len(self._slots)):
            slot = self._slots[index]
            for entry, view in zip(slot.entries, slot.own.views, strict=True):
                if entry == count + len(buffers):
                    lanes = spread(self._host.hyperparameters())
                    shared = [0.0] * len(lanes) if self._position else lanes
                    view.copy_(torch.tensor([self._share, *has, *shared], dtype=view.dtype))
                elif self._position:
                    view.zero_()
                else:
                    view.copy_(buffers[entry - count])
            self._launch(round_, index)

    def _launch(self, round_: _Round, index: int) -> None:
        slot = self._slots[index]
        if round_.exchange_id is None:
            round_.exchange_id = self._grouping.next_exchange_id()
        round_.launched_s[index] = time.perf_counter()
        round_.pending[index] = self._exchange.all_reduce(
            slot.own.flat,
            slot.bank.flat,
            exchange_id=round_.exchange_id,
            index=index,
            algorithm=self._algorithms[index],
            priority=self._priorities[index],
            parts=[*round_.kept[index].values()],
        )
        round_.kept[index].clear()

    def _promise(self, round_: _Round, has: list[bool]) -> None:
        """Makes the means the gradients before they are there.

        Which parameters the others have a gradient of that this worker has not, only the epilogue tells.
        """
        if not all(has):
            for index in range(self._parcels, len(self._slots)):
                self._await_along(round_, index)
            has = round_.used
        for entry, parameter in enumerate(self._parameters):
            self._promised[entry] = parameter.grad = None
            if has[entry]:
                keep = partial(self._look, round_)
                self._promised[entry] = parameter.grad = Promise.of(self._mean(round_, entry), keep)

    def _turn_banks(self) -> None:
        """Leaves this round's memory to its means, and lets the others begin the next round."""
        for index, slot in enumerate(self._slots):
            slot.hand_out()
            if self._is_planned:
                self._exchange.prepare(
                    slot.bank.flat,
                    exchange_id=self._grouping.follower.exchange_id,
                    index=index,
                    algorithm=self._algorithms[index],
                )

    # The means -----------------------------------------------------------------------------------------

    def _wait(self, pending: Pending) -> None:
        try:
            pending.wait(self._deadline_s + WORD_S)
        except WorkerError:
            self._has_failed = True
            raise

    def _check(self) -> None:
        try:
            self._host.check()
        except WorkerError:
            self._has_failed = True
            raise

    def _await(self, round_: _Round, index: int) -> None:
        """Waits until the means of a slot are there."""
        if round_.is_there[index]:
            return
        self._host.timer.switch("communicate")
        for along in range(self._parcels, len(self._slots)):
            self._await_along(round_, along)
        if index >= self._parcels:
            return
        pending = round_.pending[index]
        assert pending is not None
        assert round_.weight is not None
        self._wait(pending)
        self._trace(round_, index, pending)
        bank, entries = round_.banks[index], self._slots[index].entries
        with plainly():
            if round_.weight not in (0.0, 1.0):
                bank.flat.div_(round_.weight)
            for entry, view in zip(entries, bank.views, strict=True):
                if entry in round_.copies:
                    round_.copies[entry].copy_(view)
        round_.is_there[index] = True

    def _trace(self, round_: _Round, index: int, pending: Pending) -> None:
        """Takes note of how long a slot was on its way."""
        if self._host.tracer is not None and pending.ended_s is not None:
            what = "what goes along"
            if index < self._parcels:
                slot = self._slots[index]
                size = f"{slot.own.flat.nbytes / 1e6:.2f} MB"
                what = f"{self._name(slot.entries[0])}, {size} by {self._algorithms[index]}"
            self._host.tracer.add(what, what, round_.launched_s[index], pending.ended_s)

    def _await_along(self, round_: _Round, index: int) -> None:
        """Waits for buffers and epilogue, and makes the first member's buffers the buffers."""
        if round_.is_there[index]:
            return
        pending = round_.pending[index]
        assert pending is not None
        self._wait(pending)
        self._trace(round_, index, pending)
        round_.is_there[index] = True
        count, buffers = len(self._parameters), self._buffers.tensors()
        for entry, view in zip(self._slots[index].entries, round_.banks[index].views, strict=True):
            if entry == count + len(buffers):
                weight, *rest = view.tolist()
                round_.weight, round_.used = weight, [bool(one) for one in rest[:count]]
                if self._position:
                    self._host.take_hyperparameters(gathered(rest[count:]), round_.settings or None)
            elif self._position:
                # Like the layers that write them, this does not count as a change to autograd.
                with plainly():
                    buffers[entry - count].data.copy_(view)

    def _look(self, round_: _Round | None) -> None:
        """Somebody looks at a gradient of a round: all of them are to be there.

        Where a step with them was put off it is taken first, for who looks may write.
        """
        if round_ is None or round_.was_looked_at or not round_.is_sent:
            return
        if round_ is self._stepped:
            self.drain()
        part = self._host.timer.part
        for index in range(self._parcels):
            self._await(round_, index)
        self._host.timer.switch(part)
        round_.was_looked_at = True

    def _mean(self, round_: _Round, entry: int) -> torch.Tensor:
        """Where a parameter's mean will be, laid out as the parameter is."""
        index, place = self._place_of[entry]
        view, parameter = round_.banks[index].views[place], self._parameters[entry]
        if view.stride() == parameter.stride():
            return view
        if entry not in round_.copies:
            round_.copies[entry] = torch.empty_like(parameter, requires_grad=False)
        return round_.copies[entry]

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
            self._stepped = round_
            round_.settings = self._steps.settings()
            round_.versions = [parameter._version for parameter in self._parameters]
            for parameter, is_held in zip(self._parameters, self._held, strict=True):
                if is_held:
                    parameter.grad = None
        else:
            for entry in range(len(self._parameters)):
                self._keep_promise(entry)

    def _can_wait(self, round_: _Round) -> bool:
        """Whether the step may be taken layer by layer: nobody has looked at a gradient or replaced one."""
        return (
            self._is_planned
            and self._overlap == "forward"
            and not round_.was_looked_at
            and self._steps.are_possible
            and self._rounds_since_step == 1
            and all(
                parameter.grad is promised
                for parameter, promised in zip(self._parameters, self._promised, strict=True)
            )
        )

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self._rounds_since_step = 0
        if self._round is not None and self._round is self._stepped:
            for parameter, promised, is_held in zip(
                self._parameters, self._promised, self._held, strict=True
            ):
                if is_held:
                    parameter.grad = promised
        else:
            self._look(self._round)
        self._round = None
        if not self._is_planned and self._rounds >= _WATCHED_ROUNDS:
            self._share_plan()

    def drain(self) -> None:
        """Takes what is left of the last step.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
        """
        if self._stepped is not None:
            part = self._host.timer.part
            for index in range(self._parcels):
                self._apply(self._stepped, index)
            self._stepped = None
            self._host.timer.switch(part)

    def flush(self) -> None:
        """The loop is over: takes the last step, and makes promises gradients.

        Raises:
            WorkerError: a member was lost, and this worker has not heard so yet.
        """
        if not self._has_failed:
            self.drain()
            for entry in range(len(self._parameters)):
                self._keep_promise(entry)

    def _apply(self, round_: _Round, index: int) -> None:
        """Takes the step with the parameters of one parcel."""
        if round_.is_applied[index]:
            return
        self._await(round_, index)
        round_.is_applied[index] = True
        if index >= self._parcels or not round_.weight:
            return
        self._host.timer.switch("apply")
        entries = [entry for entry in self._slots[index].entries if round_.used[entry] and self._held[entry]]
        for entry in entries:
            if self._parameters[entry]._version != round_.versions[entry]:
                raise OffbeatError(
                    f"{self._name(entry)} was changed between optimizer.step() and its next use, when the "
                    "step had not reached it yet: call session.refresh() before you change parameters"
                )
        self._steps.take(
            [self._parameters[entry] for entry in entries],
            [self._mean(round_, entry) for entry in entries],
            round_.settings,
        )

    def _name(self, entry: int) -> str:
        parameter = self._parameters[entry]
        return next(name for name, one in self._model.named_parameters() if one is parameter)


_drains: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()


def train(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stands in for `module.train`, and so for `eval`, while it is in a session; in copies it does no more.

    A model that is set to evaluate is about to be looked at.
    """
    drain = _drains.get(module)
    if drain is not None:
        drain()
    return type(module).train(module, mode)


def _check_layers(model: nn.Module) -> None:
    """Refuses a model whose layers cannot be waited for one by one."""
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            what = f"the part {name!r} of the model" if name else "the model"
            raise OffbeatError(
                f"{what} is compiled, and its layers cannot be waited for one by one: "
                "join the module that was compiled, or use bsp"
            )
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise OffbeatError(
            f"the model lies on {device}, where layers cannot be averaged one by one yet: "
            "use bsp, or train on the CPU"
        )
