"""Which module uses a parameter first, and when: observed during a step or two."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from offbeat.runtime.devices.interface import Device
from offbeat.runtime.training.hooks import SessionForwardHook


class _ParameterWatcher(TorchFunctionMode):
    """Calls back for every parameter that is passed to a torch function."""

    def __init__(self, index_of: dict[int, int], on_use: Callable[[int], None]) -> None:
        super().__init__()
        self._index_of, self._on_use = index_of, on_use

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and (index := self._index_of.get(id(leaf))) is not None:
                self._on_use(index)
        return function(*args, **(kwargs or {}))


def seconds_between(device: Device, begin: Any, end: Any) -> float:
    """Return the time between two marks of a device; infinite where one is None, or not reached yet."""
    if begin is None or end is None:
        return math.inf
    elapsed_s = device.elapsed_s(begin, end)
    return math.inf if elapsed_s is None else elapsed_s


class FirstUseTracker:
    """Observes forward passes for the first use of each parameter.

    A parameter need not belong to the module that uses it: heads share the weights of embeddings. Its first
    use is in the innermost module running when it is first passed to a torch function, or in the module that
    owns it, if that runs first: functions of other libraries are not observed.

    Args:
        model: the model to observe.
        parameters: the parameters of interest.
        device: holds the model; its marks of time are recorded.

    Attributes:
        first_modules: by parameter, the module whose forward pass has to wait for it; the whole model where
            no use was observed.
        use_order: indices of the parameters in the order of their first use, those without one first.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], device: Device) -> None:
        self._model, self._device = model, device
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._watcher: _ParameterWatcher | None = None
        self._running: list[tuple[nn.Module, Any]] = []  # with the mark of its beginning
        self._handles: list[RemovableHandle] = []
        self._count = len(parameters)
        self.reset()

    def reset(self) -> None:
        """Discard all observations."""
        self.first_modules: list[nn.Module] = [self._model] * self._count
        self._used_order: list[int] = []
        self._begin: Any = None  # the mark of the beginning of the first module
        self._begin_of: list[Any] = [None] * self._count  # by parameter, of the module that uses it first

    @property
    def use_order(self) -> list[int]:
        """Indices of the parameters in the order of their first use, those without one first."""
        used = set(self._used_order)
        return [index for index in range(self._count) if index not in used] + self._used_order

    def seconds_to_first_use(self) -> list[float]:
        """Return by parameter when its first module began, in seconds since the first module of all did.

        It is 0 where no use was observed, and infinite before the device has reached the marks.
        """
        return [seconds_between(self._device, self._begin, begin or self._begin) for begin in self._begin_of]

    def attach(self) -> None:
        """Register the hooks that observe."""
        for module in self._model.modules():
            self._handles.append(
                module.register_forward_pre_hook(SessionForwardHook(partial(self._enter, module)))
            )
            self._handles.append(
                module.register_forward_hook(SessionForwardHook(self._leave), always_call=True)
            )

    def detach(self) -> None:
        """Remove the hooks; the last observations stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        now = self._device.record_time()
        if self._watcher is None and torch.is_grad_enabled():
            self._begin = now if self._begin is None else self._begin
            self._watcher = _ParameterWatcher(self._index_of, self._record_use)
            self._watcher.__enter__()  # type: ignore[no-untyped-call]
        if self._watcher is not None:
            self._running.append((module, now))
            for parameter in module._parameters.values():
                if (index := self._index_of.get(id(parameter))) is not None:
                    self._record_use(index)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        while self._running and self._running.pop()[0] is not module:
            pass  # modules that an exception has left
        if not self._running:
            self._stop()

    def _stop(self) -> None:
        self._running.clear()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _record_use(self, index: int) -> None:
        if index not in self._used_order and self._running:
            self._used_order.append(index)
            self.first_modules[index], self._begin_of[index] = self._running[-1]
