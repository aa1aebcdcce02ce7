"""The forward pass of snapshots by a schedule made ahead of time, where that is measured to be faster.

Theory of operation
-------------------

A schedule reads a model's values where they were when it was made, while each snapshot has memory of its own.
So the schedule has a model of its own, into which a snapshot's values are copied before its part is
evaluated.

1. An evaluating thread counts the calls of the model by the shapes of their inputs. `evaluate` receives the
   snapshot's own model, an `nn.Module` like any other; only its `forward` is replaced meanwhile.
2. When enough calls had the same shapes, the training thread makes the schedule, at the end of an epoch.
   Nothing else runs then: tracing changes torch's modules for all threads, and while a graph is captured no
   thread may draw random numbers on the device, as training does.
3. From then on, calls of these shapes are served by the schedule, if it was faster than the model itself.
   Other calls, such as that of the last, smaller batch, and those under autocast or with gradients, are the
   model's.
4. What is not a value, such as a number in an attribute, is part of the schedule. When it differs in a later
   snapshot, the schedule is dropped for good.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from offbeat.errors import OffbeatError
from offbeat.runtime.nimble.compiling import CompiledModule, Signature, compile_module, signature_of
from offbeat.runtime.validation.isolation import TorchCallHook
from offbeat.runtime.validation.snapshot import Snapshot
from offbeat.torch_compat import is_observed_by_tool

Compile: TypeAlias = Callable[[nn.Module, Sequence[Tensor]], CompiledModule]

_CALLS_MIN: Final = 100
"""Calls of the same shapes before a schedule is made, which takes as long as some hundred calls."""
_SHAPES_MAX: Final = 4
"""Different shapes that are counted: an example is kept for each."""


class ScheduledForward:
    """Serves calls of the models of one evaluator by a schedule.

    Args:
        compile_model: makes the schedule, and decides whether it is used.
        calls_min: calls of the same shapes before the schedule is made.

    Attributes:
        is_due: the schedule can be made now.
        reason: why calls are served by the schedule or the model.
        served: calls that the schedule has served.
    """

    def __init__(self, compile_model: Compile = compile_module, calls_min: int = _CALLS_MIN) -> None:
        self._compile, self._calls_min = compile_model, calls_min
        self._lock = threading.Lock()  # held while a part is evaluated, and while the schedule is made
        self._calls: Counter[Signature] = Counter()
        self._examples: dict[Signature, list[Tensor]] = {}
        self._torch_calls: dict[Signature, int] = {}  # functions of torch that a call of the model calls
        self._compiled: CompiledModule | None = None
        self._structure: str | None = None  # of the compiled model
        self._is_counting = True
        self.is_due = False
        self.reason = "no shape of a batch has been seen often enough"
        self.served = 0

    @contextmanager
    def serving(
        self, model: nn.Module, snapshot: Snapshot, watch: TorchCallHook, calls: Callable[[], int]
    ) -> Iterator[None]:
        """Serve the calls of a snapshot's model inside.

        Args:
            model: a result of `snapshot.model()`.
            snapshot: that is evaluated.
            watch: to be called for each function of torch; may raise.
            calls: returns how often it has been called.
        """
        with self._lock:
            if "forward" in vars(model):
                yield
                return
            compiled = self._compiled_for(snapshot)
            model.forward = partial(self._forward, model.forward, compiled, watch, calls)
            try:
                yield
            finally:
                del model.forward  # which refers to the model

    def _compiled_for(self, snapshot: Snapshot) -> CompiledModule | None:
        """Return the schedule with the values of a snapshot, if there is one for its model."""
        if self._compiled is None:
            return None
        if snapshot.structure_digest() != self._structure:
            self._stop("an attribute of the model changes from epoch to epoch")
            return None
        snapshot.restore_to(self._compiled.module)
        return self._compiled

    def _forward(
        self,
        forward: Callable[..., Any],
        compiled: CompiledModule | None,
        watch: TorchCallHook,
        calls: Callable[[], int],
        *inputs: Any,
        **options: Any,
    ) -> Any:
        """Serve a call of the model, whose own forward pass is `forward`."""
        signature = () if options or not _is_plain_call(inputs) else signature_of(inputs)
        if compiled is not None and signature == compiled.signature:
            for _ in range(self._torch_calls[signature]):  # the rate of calls is what a throttle compares
                watch()
            self.served += 1
            return compiled(*inputs)
        calls_before = calls()
        outputs = forward(*inputs, **options)
        if self._is_counting and signature:
            self._count(signature, inputs, calls() - calls_before)
        return outputs

    def _count(self, signature: Signature, inputs: Sequence[Tensor], torch_calls: int) -> None:
        if signature not in self._examples:
            if len(self._examples) == _SHAPES_MAX:
                return
            self._examples[signature] = [tensor.clone() for tensor in inputs]
        self._calls[signature] += 1
        self._torch_calls[signature] = torch_calls
        self.is_due = self.is_due or self._calls[signature] >= self._calls_min

    @contextmanager
    def idle(self, timeout_s: float) -> Iterator[bool]:
        """Context in which no part is evaluated.

        Yields:
            Whether that is so; False if one is still being evaluated after `timeout_s` seconds.
        """
        is_idle = self._lock.acquire(timeout=timeout_s)
        try:
            yield is_idle
        finally:
            if is_idle:
                self._lock.release()

    def compile(self, snapshot: Snapshot) -> None:
        """Make the schedule for the shapes seen most often; in the training thread, while all are `idle`."""
        try:
            self._structure = snapshot.structure_digest()
            if self._structure is None:
                self._stop(
                    "the model cannot be pickled, so that a change of its attributes would go unnoticed"
                )
                return
            ((signature, _),) = self._calls.most_common(1)
            model = copy.deepcopy(snapshot.model())
            compiled = self._compile(model, self._examples[signature])
        except (OffbeatError, ValueError, RuntimeError) as error:  # such as too little memory
            self._stop(str(error))
        else:
            self._stop(compiled.reason)
            self._compiled = compiled if compiled.is_on else None

    def _stop(self, reason: str) -> None:
        """Count no more calls, and drop the schedule if there is one."""
        self._is_counting = self.is_due = False
        self._examples.clear()
        self.reason = reason
        self.close()
        self._compiled = None

    def close(self) -> None:
        """Release the schedule's memory and threads; a part under way goes on without it."""
        if (compiled := self._compiled) is not None:
            compiled.close()


def _is_plain_call(inputs: Sequence[Any]) -> bool:
    """Whether a call computes what the schedule computes, seen by no tool: without gradients and autocast."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_observed_by_tool():
        return False
    return all(type(one) is Tensor and not torch.is_autocast_enabled(one.device.type) for one in inputs)
