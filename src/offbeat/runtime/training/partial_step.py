"""Applies an optimizer's step to some of its parameters at a time.

This module never decides when, and does not know where gradients come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

from offbeat.errors import OffbeatError
from offbeat.torch_compat import has_global_step_hooks

_P = ParamSpec("_P")
_T = TypeVar("_T")
_OWN_HOOKS = 1  # the session's, before and after each step

OptimizerSettings = list[dict[str, Any]]
"""By parameter group, the optimizer's hyperparameters."""


class PartialOptimizer:
    """Applies an optimizer's steps in parts, later than `optimizer.step()` was called.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._steps_independently = _steps_independently(optimizer)

    @property
    def is_possible(self) -> bool:
        """Whether the optimizer steps each parameter independently and only the session has step hooks."""
        own = vars(self._optimizer).get("step")  # a learning rate scheduler's wrapper is harmless
        return (
            self._steps_independently
            and (own is None or getattr(own, "__wrapped__", None) is type(self._optimizer).step)
            and not has_global_step_hooks()
            and len(self._optimizer._optimizer_step_pre_hooks) == _OWN_HOOKS
            and len(self._optimizer._optimizer_step_post_hooks) == _OWN_HOOKS
        )

    def settings(self) -> OptimizerSettings:
        """Return a copy of the current hyperparameters."""
        return [
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def apply(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        settings: OptimizerSettings,
    ) -> None:
        """Apply the step to some parameters; their `grad` is restored afterwards.

        Args:
            parameters: the parameters.
            gradients: their gradients for the step.
            settings: the hyperparameters at the time of `optimizer.step()`.

        Raises:
            OffbeatError: the number of parameter groups has changed since then.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(settings):
            raise OffbeatError(
                f"the optimizer had {len(settings)} parameter groups at its last step and has "
                f"{len(groups)} now: leave the session and join again"
            )
        ids = {id(parameter) for parameter in parameters}
        old_gradients = [parameter.grad for parameter in parameters]
        current = [dict(group) for group in groups]
        try:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for group, saved in zip(groups, settings, strict=True):
                group.update(saved)
                group["params"] = [one for one in group["params"] if id(one) in ids]
            kind: Any = type(self._optimizer)
            with optimizer_step_mode(in_inference_mode=self._is_kept_in_inference_mode(parameters)):
                kind.step.__wrapped__(self._optimizer)  # without the step hooks, which have been called
        finally:
            for group, after in zip(groups, current, strict=True):
                group.clear()
                group.update(after)
            for parameter, own in zip(parameters, old_gradients, strict=True):
                parameter.grad = own

    def _is_kept_in_inference_mode(self, chosen: Sequence[torch.Tensor]) -> bool:
        """Whether these were stepped in inference mode, so that their state can change only in it."""
        states = [self._optimizer.state.get(one, {}) for one in chosen]
        return any(
            isinstance(kept, torch.Tensor) and kept.is_inference()
            for state in states
            for kept in state.values()
        )


@contextmanager
def optimizer_step_mode(*, in_inference_mode: bool = False) -> Iterator[None]:
    """Set the autograd modes of an optimizer step, whichever modes the program is in."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(in_inference_mode))
        modes.enter_context(torch.no_grad())
        for device_type in _autocast_devices():
            modes.enter_context(torch.autocast(device_type, enabled=False))
        yield


@cache
def _autocast_devices() -> tuple[str, ...]:
    """Return the types of the devices that this process can use."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def out_of_inference_mode(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a wrapper of `function` that runs it under `optimizer_step_mode` if the program is in inference
    mode.
    """

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with optimizer_step_mode():
            return function(*args, **kwargs)

    return wrapper


def _steps_independently(optimizer: Optimizer) -> bool:
    """Whether an optimizer steps each parameter by its own gradient alone, as torch's optimizers do."""
    kind = type(optimizer)
    return f"{kind.__module__}.".startswith("torch.optim.") and hasattr(kind.step, "__wrapped__")
