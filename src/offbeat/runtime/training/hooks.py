"""Hooks that a session registers on a model, hidden from tools that process the model.

Tools copy, compile, trace and export models. The session's hooks do not affect them: their results are the
same as without a session.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offbeat.torch_compat import (
    is_observed_by_tool,
    is_traced_by_jit,
    is_traced_by_proxies,
    uncompiled,
    without_transformations,
)

_PREPARE_SCRIPTABLE = "__prepare_scriptable__"  # torch.jit.script compiles what this method returns


def do_nothing(*_: Any) -> None:
    """Do nothing with any arguments."""
    return


def only_in_this_process(call: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls `call`, but does nothing in processes forked from this one."""
    if call is do_nothing:
        return call
    own = os.getpid()

    def guarded(*arguments: Any) -> None:
        if os.getpid() == own:
            call(*arguments)

    return guarded


class SessionHook:
    """A session's hook on a model; copies, pickles and forks of the model get one that does nothing.

    It is not compiled with the model: torch.compile calls it uncompiled, between two graphs.

    Args:
        call: the session's callback.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = only_in_this_process(call)

    def __call__(self, *arguments: Any) -> None:
        """Call the session's callback, uncompiled."""
        if torch.compiler.is_compiling():
            _call_uncompiled(self._call, arguments)
        else:
            self._call(*arguments)

    def __reduce__(self) -> tuple[type[SessionHook], tuple[Callable[..., None]]]:
        """Pickle without the session."""
        return type(self), (do_nothing,)


class SessionForwardHook(SessionHook):
    """A session's hook on a forward pass; does nothing while a tool traces or exports the model.

    Args:
        call: the session's callback.
        on_traced: called instead in such a pass.
    """

    def __init__(self, call: Callable[..., None], on_traced: Callable[[], None] = do_nothing) -> None:
        super().__init__(call)
        self._traced = on_traced  # is traced itself, where it runs operations

    def __call__(self, *arguments: Any) -> None:
        """Call the session's callback, or `on_traced` while a tool traces or exports the model."""
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                self._traced()
            else:
                _call_uncompiled(self._call_hidden, arguments)
        elif is_observed_by_tool():
            self._call_hidden(*arguments)
        else:
            self._call(*arguments)

    def _call_hidden(self, *arguments: Any) -> None:
        """Call while a tool processes the forward pass, hidden from that tool."""
        if is_traced_by_jit() or is_traced_by_proxies():
            self._traced()
            return
        with without_transformations():
            self._call(*arguments)


@uncompiled
def _call_uncompiled(call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    call(*arguments)


class HookFreeScripting:
    """Lets torch.jit.script compile a model, its submodules and copies of these without a session's hooks.

    Args:
        model: the model of the session.
        before: called before the compilation; copies of the model do not call it.
    """

    def __init__(self, model: nn.Module, before: Callable[[], None] = do_nothing) -> None:
        self._modules = [one for one in model.modules() if not isinstance(one, torch.jit.ScriptModule)]
        for module in self._modules:
            module.__dict__[_PREPARE_SCRIPTABLE] = _Unhooked(module, only_in_this_process(before))

    def remove(self) -> None:
        """Restore the model."""
        for module in self._modules:
            module.__dict__.pop(_PREPARE_SCRIPTABLE, None)


class _Unhooked:
    """Makes a copy of a module without a session's hooks, when torch.jit.script calls it."""

    def __init__(self, module: nn.Module, before: Callable[[], None]) -> None:
        self._module, self._before = module, before

    def __call__(self) -> nn.Module:
        self._before()
        plain = object.__new__(type(self._module))
        plain.__dict__ = {
            key: value for key, value in vars(self._module).items() if key != _PREPARE_SCRIPTABLE
        }
        plain._modules = dict(self._module._modules)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            hooks = vars(plain)[name]
            other_hooks = {key: hook for key, hook in hooks.items() if not isinstance(hook, SessionHook)}
            vars(plain)[name] = type(hooks)(other_hooks)
        own = getattr(plain, _PREPARE_SCRIPTABLE, None)
        return plain if own is None else own()

    def __reduce__(self) -> tuple[type[_Unhooked], tuple[nn.Module, Callable[..., None]]]:
        """Pickle without the session."""
        return _Unhooked, (self._module, do_nothing)
