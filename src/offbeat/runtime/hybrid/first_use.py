"""Which module is the first to use a parameter, and when: watched for a step or two, then known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from offbeat.runtime.training.hooks import ForwardHook


class _Watcher(TorchFunctionMode):
    """Tells of every parameter that is given to a function of torch."""

    def __init__(self, entry_of: dict[int, int], used: Callable[[int], None]) -> None:
        super().__init__()
        self._entry_of, self._used = entry_of, used

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and (entry := self._entry_of.get(id(leaf))) is not None:
                self._used(entry)
        return function(*args, **(kwargs or {}))


class Uses:
    """Watches forward passes for the first use of each parameter.

    A parameter need not belong to the module that uses it: heads share the weights of embeddings. What counts
    is the innermost module under way when it is first given to a function of torch, or the module that owns
    it, if that comes first: functions of other libraries are not seen.

    Args:
        model: what is watched.
        parameters: of interest.
        clock: returns seconds.

    Attributes:
        modules: by parameter, the module whose forward pass has to wait for it; the whole model where no use
            was seen.
        order: parameters in the order of their first use, those without one first.
        began_s: by parameter, when that module's forward pass began, in seconds since the first one's.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], clock: Callable[[], float]
    ) -> None:
        self._model, self._clock = model, clock
        self._entry_of = {id(parameter): entry for entry, parameter in enumerate(parameters)}
        self._watcher: _Watcher | None = None
        self._under_way: list[tuple[nn.Module, float]] = []
        self._handles: list[RemovableHandle] = []
        self._count = len(parameters)
        self.forget()

    def forget(self) -> None:
        """Sees all uses from here on anew."""
        self.modules: list[nn.Module] = [self._model] * self._count
        self.began_s = [0.0] * self._count
        self._seen: list[int] = []
        self._begin_s: float | None = None

    @property
    def order(self) -> list[int]:
        """Parameters in the order of their first use, those without one first."""
        seen = set(self._seen)
        return [entry for entry in range(self._count) if entry not in seen] + self._seen

    def attach(self) -> None:
        """Begins to watch."""
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(ForwardHook(partial(self._enter, module))))
            self._handles.append(module.register_forward_hook(ForwardHook(self._leave), always_call=True))

    def detach(self) -> None:
        """Watches no longer; what was seen last stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        now_s = self._clock()
        if self._watcher is None and torch.is_grad_enabled():
            self._begin_s = now_s if self._begin_s is None else self._begin_s
            self._watcher = _Watcher(self._entry_of, self._use)
            self._watcher.__enter__()  # type: ignore[no-untyped-call]
        if self._watcher is not None:
            self._under_way.append((module, now_s))
            for parameter in module._parameters.values():
                if (entry := self._entry_of.get(id(parameter))) is not None:
                    self._use(entry)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        while self._under_way and self._under_way.pop()[0] is not module:
            pass  # what an exception has left behind
        if not self._under_way:
            self._stop()

    def _stop(self) -> None:
        self._under_way.clear()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _use(self, entry: int) -> None:
        if entry not in self._seen and self._under_way:
            assert self._begin_s is not None
            module, began_s = self._under_way[-1]
            self._seen.append(entry)
            self.modules[entry], self.began_s[entry] = module, began_s - self._begin_s
