"""Timed compute: how long each layer of a model computes alone, and a model that waits for as long instead.

Workers on one small machine fight for its cores, and leaving one out makes the others faster. A worker with a
`TimedModel` needs a core only for what the benchmark is about: exchanging gradients and applying them. So two
cores can stand for many machines. Nothing is learnt by it, so nobody may read an accuracy from it.

`Stretch` is for benchmarks that must learn: gradients are computed, and a step then waits until it has
taken as long as it is to take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.cli.job import single_threaded

_DRAWN_STD = 1e-3  # so small that parameters stay finite, and far from where arithmetic gets slow


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """What one layer takes; a layer is a module with parameters of its own.

    Attributes:
        name: as in `named_modules`.
        forward_s: from the beginning of its forward pass to that of the next layer, so that what lies between
            layers is in the one before; of the last one to the end of the loss.
        backward_s: from the gradients of the layer after it (from the beginning of the backward pass, for the
            last one) until all its own are there.
    """

    name: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """How long the layers of a model compute on one core of a machine that does nothing else.

    Attributes:
        layers: in the order of the forward pass.
        lead_s: from the beginning of the forward pass to the first layer.
    """

    layers: tuple[LayerTimes, ...]
    lead_s: float = 0.0

    def __post_init__(self) -> None:
        times_s = [self.lead_s, *(t for layer in self.layers for t in (layer.forward_s, layer.backward_s))]
        if not self.layers or not all(math.isfinite(time_s) and time_s >= 0 for time_s in times_s):
            raise ValueError("expected the times of at least one layer, finite and at least 0 s")

    @property
    def forward_s(self) -> float:
        """Of the whole forward pass, loss included."""
        return self.lead_s + sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        """Of the whole backward pass."""
        return sum(layer.backward_s for layer in self.layers)

    @property
    def step_s(self) -> float:
        """Of both passes."""
        return self.forward_s + self.backward_s

    def scaled(self, factor: float, backward: float | None = None) -> ModelTimes:
        """Return the times of a machine on which everything takes `factor` times as long.

        Args:
            factor: of the forward pass, and of the backward pass where there is none for that.
            backward: of the backward pass.
        """
        backward = factor if backward is None else backward
        return ModelTimes(
            lead_s=self.lead_s * factor,
            layers=tuple(
                replace(layer, forward_s=layer.forward_s * factor, backward_s=layer.backward_s * backward)
                for layer in self.layers
            ),
        )

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for `from_plain`, to hand the times to workers."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> ModelTimes:
        """Return the times that `to_plain` was called on."""
        return msgspec.convert(plain, ModelTimes)


def time_layers(model: nn.Module, inputs: Tensor, labels: Tensor, *, runs: int = 5) -> ModelTimes:
    """Measure each layer's forward and backward pass on one thread, as the median of several runs.

    The first run only warms up. The model's gradients are gone afterwards, its buffers have moved.

    Args:
        model: as `TimedModel` takes it; in each forward pass every layer is called once.
        inputs: samples (B, ...).
        labels: int64 (B,).
        runs: at least 1.

    Raises:
        ValueError: a layer is not called once, or has no gradient; says which.
    """
    layers = dict(_layers(model))
    with single_threaded():
        measured = [_measure(model, layers, inputs, labels) for _ in range(runs + 1)][1:]
    return ModelTimes(
        lead_s=median(one.lead_s for one in measured),
        layers=tuple(
            LayerTimes(
                name=same[0].name,
                forward_s=median(layer.forward_s for layer in same),
                backward_s=median(layer.backward_s for layer in same),
            )
            for same in zip(*(one.layers for one in measured), strict=True)
        ),
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with parameters of their own that are trained."""
    for name, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            if not name:
                raise ValueError(
                    f"{type(model).__name__} holds parameters itself: put it into a Sequential, "
                    "so that it is a layer of a model"
                )
            yield name, module


def _measure(model: nn.Module, layers: dict[str, nn.Module], inputs: Tensor, labels: Tensor) -> ModelTimes:
    """Stamp one step: where each layer's forward pass begins, and where its last gradient is there."""
    began_s: dict[str, float] = {}
    ready_s: dict[str, float] = {}

    def stamp_forward(name: str) -> Callable[..., None]:
        def stamp(*_: Any) -> None:
            if name in began_s:
                raise ValueError(f"layer {name} is called twice in a forward pass: its times cannot be told")
            began_s[name] = time.perf_counter()

        return stamp

    def stamp_backward(name: str) -> Callable[[Tensor], None]:
        def stamp(_: Tensor) -> None:
            ready_s[name] = time.perf_counter()

        return stamp

    handles = []
    for name, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(stamp_forward(name)))
        handles += [
            parameter.register_post_accumulate_grad_hook(stamp_backward(name))
            for parameter in layer.parameters(recurse=False)
            if parameter.requires_grad
        ]
    try:
        start_s = time.perf_counter()
        loss = F.cross_entropy(model(inputs), labels)
        turn_s = time.perf_counter()
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    for name in layers:
        if name not in began_s or name not in ready_s:
            raise ValueError(f"layer {name} is not called, or gets no gradient: its times cannot be told")
    return _between_stamps(start_s, turn_s, began_s, ready_s)


def _between_stamps(
    start_s: float, turn_s: float, began_s: dict[str, float], ready_s: dict[str, float]
) -> ModelTimes:
    """Cut a step at its stamps, so that the parts sum to it."""
    order = sorted(began_s, key=began_s.__getitem__)
    ends_s = [*(began_s[name] for name in order[1:]), turn_s]
    backward_s: dict[str, float] = {}
    reached_s = turn_s
    for name in reversed(order):  # a branch may be ready before its turn; what it took is in another one then
        backward_s[name] = max(0.0, ready_s[name] - reached_s)
        reached_s = max(reached_s, ready_s[name])
    return ModelTimes(
        lead_s=began_s[order[0]] - start_s,
        layers=tuple(
            LayerTimes(name=name, forward_s=end_s - began_s[name], backward_s=backward_s[name])
            for name, end_s in zip(order, ends_s, strict=True)
        ),
    )


# Waiting instead ----------------------------------------------------------------------------------------


class Waiter:
    """Waits, such that what one wait takes too long the next ones make up for.

    A sleep ends a little late, and later on a busy machine. Over many waits the sum is right all the same.

    Args:
        clock: returns seconds that never go back.
        sleep: waits for so many seconds, or somewhat longer.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._behind_s = 0.0

    def wait(self, duration_s: float) -> None:
        """Wait for `duration_s` from now on, less what earlier waits have taken too long."""
        began_s = self._clock()
        until_s = began_s + duration_s - self._behind_s
        if until_s > began_s:
            self._sleep(until_s - began_s)
        self._behind_s = max(0.0, self._clock() - until_s)

    def forget(self) -> None:
        """Let the next wait make up for nothing."""
        self._behind_s = 0.0


class TimedModel(nn.Module):
    """A model that waits where another one computes.

    It has the parameters and buffers of `model` under the same names and in the same order. Its forward pass
    waits in every layer, and gives logits of zeros; its backward pass, an ordinary one, waits in every layer
    and then hands out its gradients, so that hooks on modules and parameters run when and in the order in
    which they would otherwise. What hooks do is not part of a layer's time. Waiting needs no core.

    Gradients are drawn once and lie in memory that is handed out again in every backward pass. Buffers stay
    as they are.

    Args:
        model: what it stands for; is not kept. It must not hold parameters itself, only in its modules.
        times: of this model, `scaled` where it stands for a faster or slower machine.
        classes: K, columns of the logits.
        seed: of the gradients.
        waiter: what waits.

    Raises:
        ValueError: the times are another model's.
    """

    def __init__(
        self,
        model: nn.Module,
        times: ModelTimes,
        *,
        classes: int,
        seed: int,
        waiter: Waiter | None = None,
    ) -> None:
        super().__init__()
        expected, got = {name for name, _ in _layers(model)}, {layer.name for layer in times.layers}
        if expected != got:
            differing = sorted(expected ^ got)[0]
            raise ValueError(f"expected the times of this model, got some that differ in layer {differing!r}")
        self._classes = classes
        self._lead_s = times.lead_s
        self._waiter = waiter or Waiter()
        generator = torch.Generator().manual_seed(seed)
        of_layer = {layer.name: layer for layer in times.layers}
        for name, child in model.named_children():
            self.add_module(name, _twin(name, child, of_layer, self._waiter, generator))
        for name, buffer in model.named_buffers(recurse=False):
            _register(self, name, buffer, model)
        modules = dict(self.named_modules())
        self._in_order = [modules[layer.name] for layer in times.layers]

    def forward(self, inputs: Tensor) -> Tensor:
        """Samples (B, ...) to logits (B, K), all zero."""
        self._waiter.forget()
        self._waiter.wait(self._lead_s)
        logits = inputs.new_zeros(len(inputs), self._classes, dtype=torch.float32)
        for layer in self._in_order:
            logits = layer(logits)
        return logits


class TimedLayer(nn.Module):
    """One layer of a `TimedModel`: hands on what it gets."""

    def __init__(self, times: LayerTimes, waiter: Waiter) -> None:
        super().__init__()
        self.times, self._waiter = times, waiter
        self._drawn = _Drawn()

    def draw(self, generator: torch.Generator) -> None:
        """Draw the gradients of the parameters that were registered."""
        self._drawn = _Drawn(
            torch.empty_like(parameter, requires_grad=False).normal_(0.0, _DRAWN_STD, generator=generator)
            for parameter in self._trained()
        )

    def forward(self, passed: Tensor) -> Tensor:
        """Wait for the layer's forward time."""
        self._waiter.wait(self.times.forward_s)
        handed_on: Tensor = _Wait.apply(passed, self, *self._trained())  # type: ignore[no-untyped-call]
        return handed_on

    def backward(self) -> list[Tensor]:
        """Wait for the layer's backward time; return its gradients.

        They are new views each time, which autograd takes as they are; it would copy what others hold, too.
        """
        self._waiter.wait(self.times.backward_s)
        return [drawn.view_as(drawn) for drawn in self._drawn]

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters(recurse=False) if parameter.requires_grad]


class _Drawn(list[Tensor]):
    """Gradients that nobody writes to: copies of a model have them in common, as a real model has none.

    Whoever gets a copy in another process evaluates it, and gets none.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _Drawn:
        return self

    def __reduce__(self) -> tuple[type[_Drawn], tuple[()]]:
        return _Drawn, ()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passed: Tensor, layer: TimedLayer, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, *ctx.layer.backward()


def _twin(
    name: str, module: nn.Module, times: dict[str, LayerTimes], waiter: Waiter, generator: torch.Generator
) -> nn.Module:
    """Return a module with the same names in it, which computes nothing."""
    twin = TimedLayer(times[name], waiter) if name in times else nn.Module()
    for own, parameter in module.named_parameters(recurse=False):
        twin.register_parameter(own, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
    for own, buffer in module.named_buffers(recurse=False):
        _register(twin, own, buffer, module)
    if isinstance(twin, TimedLayer):
        twin.draw(generator)
    for own, child in module.named_children():
        twin.add_module(own, _twin(f"{name}.{own}", child, times, waiter, generator))
    return twin


def _register(twin: nn.Module, name: str, buffer: Tensor, module: nn.Module) -> None:
    is_saved = name not in module._non_persistent_buffers_set
    twin.register_buffer(name, buffer.detach().clone(), persistent=is_saved)


# Computing, and waiting for the rest --------------------------------------------------------------------


class Stretch:
    """Makes each step of a model that really computes last for `step_s`, wherever it computes in less.

    The forward pass ends after a third of it at the earliest, and the backward pass at its end. So workers
    that share cores behave as if each had a machine of its own, as long as all of them together compute
    within that time; `late_steps` counts the steps in which they did not. Put it on before `offbeat.join`,
    whose hooks must see the wait as computing.

    Args:
        model: whose steps.
        step_s: forward and backward pass together, in seconds.
        waits: waits for so many seconds.

    Attributes:
        steps: backward passes that have ended.
        late_steps: those that took more than `step_s` by more than a tenth.
    """

    def __init__(self, model: nn.Module, step_s: float, waits: Callable[[float], None] = time.sleep) -> None:
        if not (math.isfinite(step_s) and step_s > 0):
            raise ValueError(f"a step must be stretched to more than 0 s, got {step_s}")
        self._step_s, self._waits = step_s, waits
        self._began_s = 0.0
        self.steps = self.late_steps = 0
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._turn)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._began_s = time.perf_counter()

    def _turn(self, model: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            self._wait_until(self._step_s / 3)
            output.register_hook(self._backward_begins)

    def _backward_begins(self, _: Tensor) -> None:
        # Callbacks run in the order in which they were queued: before those of who has joined later.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._wait_until(self._step_s)
        self.steps += 1
        self.late_steps += time.perf_counter() - self._began_s > 1.1 * self._step_s

    def _wait_until(self, offset_s: float) -> None:
        left_s = self._began_s + offset_s - time.perf_counter()
        if left_s > 0:
            self._waits(left_s)
