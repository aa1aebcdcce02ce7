"""Timed compute: measured layer times, and a model that waits for them instead of computing.

Workers on one small machine compete for its cores, and excluding one makes the others faster. A worker with a
`TimedModel` needs a core only for what the benchmark measures: exchanging and applying gradients. So two
cores can stand for many machines. The model learns nothing: no accuracy may be read from such a run.

`Stretch` is for benchmarks that need real gradients: they are computed, and the step then waits until it has
lasted for a given time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.cli.job import single_threaded

_GRADIENT_STD = 1e-3  # parameters stay finite, and far from denormal numbers, where arithmetic is slow


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Compute times of one layer, a module that has parameters of its own.

    Attributes:
        name: as in `named_modules`.
        forward_s: from the start of its forward pass to the start of the next layer's (the code between two
            layers counts for the earlier one), or to the end of the loss for the last layer.
        backward_s: from when the gradients of the next layer are ready (for the last layer, from the start of
            the backward pass) until all its own are.
    """

    name: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """Compute times of a model's layers on one core of an otherwise idle machine.

    Attributes:
        layers: in the order of the forward pass.
        lead_s: from the start of the forward pass to the first layer.
    """

    layers: tuple[LayerTimes, ...]
    lead_s: float = 0.0

    def __post_init__(self) -> None:
        times_s = [self.lead_s, *(t for layer in self.layers for t in (layer.forward_s, layer.backward_s))]
        if not self.layers or not all(math.isfinite(time_s) and time_s >= 0 for time_s in times_s):
            raise ValueError("expected the times of at least one layer, finite and at least 0 s")

    @property
    def forward_s(self) -> float:
        """Time of the whole forward pass, loss included."""
        return self.lead_s + sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        """Time of the whole backward pass."""
        return sum(layer.backward_s for layer in self.layers)

    @property
    def step_s(self) -> float:
        """Time of both passes."""
        return self.forward_s + self.backward_s

    def lasting(self, step_s: float) -> ModelTimes:
        """Return the times, scaled so that both passes together take `step_s`."""
        return self.scaled(step_s / self.step_s)

    def scaled(self, factor: float, backward: float | None = None) -> ModelTimes:
        """Return the times multiplied by `factor`, as of a slower or faster machine.

        Args:
            factor: of the forward pass and, without `backward`, of the backward pass.
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
        """Return plain data for `from_plain`, to send the times to workers."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> ModelTimes:
        """Return the times from the plain data of `to_plain`."""
        return msgspec.convert(plain, ModelTimes)


def time_layers(model: nn.Module, inputs: Tensor, labels: Tensor, *, runs: int = 5) -> ModelTimes:
    """Measure each layer's forward and backward pass on one thread, as the median of several runs.

    A first, additional run warms up. Afterwards the model has no gradients, and its buffers have changed.

    Args:
        model: as for `TimedModel`; each forward pass must call every layer once.
        inputs: samples (B, ...).
        labels: int64 (B,).
        runs: at least 1.

    Raises:
        ValueError: a layer is not called once, or has no gradient; the message names it.
    """
    layers = dict(_layers(model))
    with single_threaded():
        measured = [_measure(model, layers, inputs, labels) for _ in range(runs + 1)][1:]
    return ModelTimes(
        lead_s=median(run.lead_s for run in measured),
        layers=tuple(
            LayerTimes(
                name=layer_runs[0].name,
                forward_s=median(layer.forward_s for layer in layer_runs),
                backward_s=median(layer.backward_s for layer in layer_runs),
            )
            for layer_runs in zip(*(run.layers for run in measured), strict=True)
        ),
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have trainable parameters of their own, with their names."""
    for name, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            if not name:
                raise ValueError(
                    f"{type(model).__name__} holds parameters itself: put it into a Sequential, "
                    "so that it is a layer of a model"
                )
            yield name, module


def _measure(model: nn.Module, layers: dict[str, nn.Module], inputs: Tensor, labels: Tensor) -> ModelTimes:
    """Run one step; record when each layer's forward pass starts and when its last gradient is ready."""
    began_s: dict[str, float] = {}
    ready_s: dict[str, float] = {}

    def stamp_forward(name: str) -> Callable[..., None]:
        def stamp(*_: Any) -> None:
            if name in began_s:
                raise ValueError(f"layer {name} is called twice in a forward pass: it cannot be timed")
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
        forward_end_s = time.perf_counter()
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    for name in layers:
        if name not in began_s or name not in ready_s:
            raise ValueError(f"layer {name} is not called, or gets no gradient: it cannot be timed")
    return _between_stamps(start_s, forward_end_s, began_s, ready_s)


def _between_stamps(
    start_s: float, forward_end_s: float, began_s: dict[str, float], ready_s: dict[str, float]
) -> ModelTimes:
    """Split a step into layer times at the recorded instants, such that they sum to the step."""
    order = sorted(began_s, key=began_s.__getitem__)
    ends_s = [*(began_s[name] for name in order[1:]), forward_end_s]
    backward_s: dict[str, float] = {}
    reached_s = forward_end_s
    for name in reversed(order):  # a branch may be ready early; its time then counts for another layer
        backward_s[name] = max(0.0, ready_s[name] - reached_s)
        reached_s = max(reached_s, ready_s[name])
    return ModelTimes(
        lead_s=began_s[order[0]] - start_s,
        layers=tuple(
            LayerTimes(name=name, forward_s=end_s - began_s[name], backward_s=backward_s[name])
            for name, end_s in zip(order, ends_s, strict=True)
        ),
    )


# Waiting instead of computing ---------------------------------------------------------------------------


class Waiter:
    """Waits for given durations; each wait is shortened by the excess of the earlier ones.

    A sleep ends a little late, later on a busy machine. The sum of many waits is still right.

    Args:
        clock: returns monotonic seconds.
        sleep: waits for a number of seconds, or somewhat longer.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._behind_s = 0.0

    def wait(self, duration_s: float) -> None:
        """Wait for `duration_s`, less the excess of earlier waits."""
        began_s = self._clock()
        until_s = began_s + duration_s - self._behind_s
        if until_s > began_s:
            self._sleep(until_s - began_s)
        self._behind_s = max(0.0, self._clock() - until_s)

    def reset(self) -> None:
        """Reset the excess of earlier waits."""
        self._behind_s = 0.0


class TimedModel(nn.Module):
    """A model that waits for the compute times of another one.

    It has the parameters and buffers of `model`, with the same names in the same order. The forward pass
    waits in every layer and returns logits of zeros. The backward pass, an ordinary autograd pass, waits in
    every layer and then returns that layer's gradients, so hooks on modules and parameters run at the times
    and in the order of the original. The time of hooks is not part of a layer's time. Waiting needs no core.

    Gradients are drawn once at random, or given by `set_gradients`; every backward pass returns the same
    memory. Buffers do not change.

    Args:
        model: the original, which is not kept. Its parameters must be in its modules, not in itself.
        times: of this model, possibly `scaled` to a faster or slower machine.
        classes: K, columns of the logits.
        seed: of the gradients.
        waiter: used for all waits.

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
            raise ValueError(
                f"expected the times of this model; layer {differing!r} is in only one of the two"
            )
        self._classes = classes
        self._lead_s = times.lead_s
        self._waiter = waiter or Waiter()
        generator = torch.Generator().manual_seed(seed)
        push_times = {layer.name: layer for layer in times.layers}
        for name, child in model.named_children():
            self.add_module(name, _timed_copy(name, child, push_times, self._waiter, generator))
        for name, buffer in model.named_buffers(recurse=False):
            _register(self, name, buffer, model)
        self.set_order([layer.name for layer in times.layers])

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Return these gradients, by the names of parameters, in all later backward passes."""
        for name, module in self.named_modules():
            if isinstance(module, TimedLayer):
                module.set_gradients(
                    gradients[f"{name}.{own}"]
                    for own, parameter in module.named_parameters(recurse=False)
                    if parameter.requires_grad
                )

    def set_order(self, names: Sequence[str]) -> None:
        """Pass through these layers, in this order, in all later forward passes: others are left out."""
        modules = dict(self.named_modules())
        self._in_order = [modules[name] for name in names]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K), all zero, for samples (B, ...)."""
        self._waiter.reset()
        self._waiter.wait(self._lead_s)
        logits = inputs.new_zeros(len(inputs), self._classes, dtype=torch.float32)
        for layer in self._in_order:
            logits = layer(logits)
        return logits


class TimedLayer(nn.Module):
    """One layer of a `TimedModel`: returns its input."""

    def __init__(self, times: LayerTimes, waiter: Waiter) -> None:
        super().__init__()
        self.times, self._waiter = times, waiter
        self._gradients = _SharedGradients()

    def draw(self, generator: torch.Generator) -> None:
        """Draw gradients for the registered parameters."""
        self.set_gradients(
            torch.empty_like(parameter, requires_grad=False).normal_(0.0, _GRADIENT_STD, generator=generator)
            for parameter in self._trained()
        )

    def set_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Return these gradients of the parameters that have one, in their order."""
        self._gradients = _SharedGradients(gradients)

    def forward(self, inputs: Tensor) -> Tensor:
        """Wait for the layer's forward time."""
        self._waiter.wait(self.times.forward_s)
        outputs: Tensor = _Wait.apply(inputs, self, *self._trained())  # type: ignore[no-untyped-call]
        return outputs

    def backward(self) -> list[Tensor]:
        """Wait for the layer's backward time; return its gradients.

        They are new views in each pass: autograd keeps these without a copy, which it does not where a tensor
        has other references.
        """
        self._waiter.wait(self.times.backward_s)
        return [gradient.view_as(gradient) for gradient in self._gradients]

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters(recurse=False) if parameter.requires_grad]


class _SharedGradients(list[Tensor]):
    """Gradients that are only read: copies of a model share them, as copies of a real model have none.

    A pickled copy is empty: a model in another process only evaluates.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedGradients:
        return self

    def __reduce__(self) -> tuple[type[_SharedGradients], tuple[()]]:
        return _SharedGradients, ()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: TimedLayer, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, *ctx.layer.backward()


def _timed_copy(
    name: str, module: nn.Module, times: dict[str, LayerTimes], waiter: Waiter, generator: torch.Generator
) -> nn.Module:
    """Return a module with the same submodule and parameter names, which computes nothing."""
    copy = TimedLayer(times[name], waiter) if name in times else nn.Module()
    for own, parameter in module.named_parameters(recurse=False):
        copy.register_parameter(own, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
    for own, buffer in module.named_buffers(recurse=False):
        _register(copy, own, buffer, module)
    if isinstance(copy, TimedLayer):
        copy.draw(generator)
    for own, child in module.named_children():
        copy.add_module(own, _timed_copy(f"{name}.{own}", child, times, waiter, generator))
    return copy


def _register(copy: nn.Module, name: str, buffer: Tensor, module: nn.Module) -> None:
    is_saved = name not in module._non_persistent_buffers_set
    copy.register_buffer(name, buffer.detach().clone(), persistent=is_saved)


# Computing, then waiting for the rest -------------------------------------------------------------------


class Stretch:
    """Stretches each step of a model that computes to at least `step_s`.

    The forward pass lasts at least a third of it, and both passes together all of it. So workers that share
    cores behave as if each had its own machine, as long as all of them together compute within that time;
    `late_steps` counts the steps where they did not. The backward pass waits before it computes, so that
    gradients are ready at its end: nothing that sends them has more time for that than on a slower machine.
    Create it before `offbeat.join`, whose hooks must see the wait as computing.

    Args:
        model: whose steps are stretched.
        step_s: forward and backward pass together, in seconds.
        sleep: waits for a number of seconds.

    Attributes:
        factor: how many times as long the next step takes, where no session injects slowness.
        steps: finished backward passes.
        late_steps: steps that took more than 1.1 times as long as they should.
    """

    def __init__(self, model: nn.Module, step_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        if not (math.isfinite(step_s) and step_s > 0):
            raise ValueError(f"a step must be stretched to more than 0 s, got {step_s}")
        self._step_s, self._sleep = step_s, sleep
        self._began_s = self._gradients_began_s = 0.0
        self._backward_s = math.inf  # the least time that a backward pass has computed
        self.factor = 1.0
        self.steps = self.late_steps = 0
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end_forward)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._began_s = time.perf_counter()

    def _end_forward(self, model: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            self._wait_until(self._step_s / 3)
            output.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        # Callbacks run in the order in which they were queued: this one before those of a later join.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._wait_until(self.factor * self._step_s - (self._backward_s if self.steps else 0.0))
        self._gradients_began_s = time.perf_counter()

    def _end(self) -> None:
        self._backward_s = min(self._backward_s, time.perf_counter() - self._gradients_began_s)
        self._wait_until(self.factor * self._step_s)
        self.steps += 1
        self.late_steps += time.perf_counter() - self._began_s > 1.1 * self.factor * self._step_s

    def _wait_until(self, offset_s: float) -> None:
        left_s = self._began_s + offset_s - time.perf_counter()
        if left_s > 0:
            self._sleep(left_s)
