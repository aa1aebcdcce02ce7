"""Hooks that a session puts on somebody's model, and what others see of them.

Tools look at a model in many ways: they copy it, compile it, trace it, export it. None of them is to meet the
session's hooks: what they make of the model is what they make of it without a session.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C import (
    _get_dispatch_mode,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._C._functorch import maybe_current_level
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_PREPARE = "__prepare_scriptable__"  # torch.jit.script compiles what a module of this attribute returns


def do_nothing(*_: Any) -> None:
    """Do nothing, whatever is given."""
    return


def of_this_process(call: Callable[..., None]) -> Callable[..., None]:
    """Return a function that does what `call` does, but in processes forked from this one nothing."""
    if call is do_nothing:
        return call
    own = os.getpid()

    def called(*arguments: Any) -> None:
        if os.getpid() == own:
            call(*arguments)

    return called


class Hook:
    """A session's hook on a model; copies, pickles and forks of the model get one that does nothing.

    It is not compiled with the model: torch.compile calls it as it is, between two graphs.

    Args:
        call: what the session wants done.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = of_this_process(call)

    def __call__(self, *arguments: Any) -> None:
        """Do what the session wants done."""
        if torch.compiler.is_compiling():
            _call_as_it_is(self._call, arguments)
        else:
            self._call(*arguments)

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., None]]]:
        """Leave the session behind."""
        return type(self), (do_nothing,)


class ForwardHook(Hook):
    """A session's hook on a forward pass; does nothing in one that only shows a tool what the model does.

    Args:
        call: what the session wants done in all others.
        shown: called in place of it in such a pass.
    """

    def __init__(self, call: Callable[..., None], shown: Callable[[], None] = do_nothing) -> None:
        super().__init__(call)
        self._shown = shown  # traced, as far as it goes

    def __call__(self, *arguments: Any) -> None:
        """Do what the session wants done."""
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                self._shown()
            else:
                _call_as_it_is(self._call_apart, arguments)
        elif (
            _get_tracing_state() is None and not _len_torch_dispatch_stack() and maybe_current_level() is None
        ):
            self._call(*arguments)
        else:
            self._call_apart(*arguments)

    def _call_apart(self, *arguments: Any) -> None:
        """Do it where something is made of what a forward pass does, but not of what a session does."""
        if _get_tracing_state() is not None or _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None:
            self._shown()
            return
        with temporarily_clear_interpreter_stack():  # of torch.func's transformations
            self._call(*arguments)


@_disable_dynamo  # unlike torch.compiler.disable it imports the compiler only where somebody compiles
def _call_as_it_is(call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    call(*arguments)


class Scripting:
    """Lets torch.jit.script compile a model, its parts and copies of both as if no session had hooks on them.

    Args:
        model: as joined.
        before: called before that, on the model itself.
    """

    def __init__(self, model: nn.Module, before: Callable[[], None] = do_nothing) -> None:
        self._modules = [one for one in model.modules() if not isinstance(one, torch.jit.ScriptModule)]
        for module in self._modules:
            module.__dict__[_PREPARE] = _Unhooked(module, of_this_process(before))

    def remove(self) -> None:
        """Leave the model as it was."""
        for module in self._modules:
            module.__dict__.pop(_PREPARE, None)


class _Unhooked:
    """A module without a session's hooks, made when it is asked for."""

    def __init__(self, module: nn.Module, before: Callable[[], None]) -> None:
        self._module, self._before = module, before

    def __call__(self) -> nn.Module:
        self._before()
        plain = object.__new__(type(self._module))
        plain.__dict__ = {key: value for key, value in vars(self._module).items() if key != _PREPARE}
        plain._modules = dict(self._module._modules)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            hooks = vars(plain)[name]
            others = {key: hook for key, hook in hooks.items() if not isinstance(hook, Hook)}
            vars(plain)[name] = type(hooks)(others)
        own = getattr(plain, _PREPARE, None)
        return plain if own is None else own()

    def __reduce__(self) -> tuple[type[_Unhooked], tuple[nn.Module, Callable[..., None]]]:
        """Leave the session behind."""
        return _Unhooked, (self._module, do_nothing)
