"""An optimizer's step, taken with some of its parameters at a time.

This module never decides when, and knows nothing of where gradients come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as of_all_optimizers

from offbeat.errors import OffbeatError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_OWN_HOOKS = 1  # the session's, before and after each step

Settings = list[dict[str, Any]]
"""By group of an optimizer, its hyperparameters."""


class PartialSteps:
    """Steps of an optimizer that were called for at one time and are taken part by part later.

    Args:
        optimizer: steps its parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._steps_alone = _steps_alone(optimizer)

    @property
    def are_possible(self) -> bool:
        """Whether the optimizer steps each parameter alone, and nobody else looks on before or after."""
        own = vars(self._optimizer).get("step")  # a learning rate scheduler's changes nothing
        return (
            self._steps_alone
            and (own is None or getattr(own, "__wrapped__", None) is type(self._optimizer).step)
            and not of_all_optimizers._global_optimizer_pre_hooks
            and not of_all_optimizers._global_optimizer_post_hooks
            and len(self._optimizer._optimizer_step_pre_hooks) == _OWN_HOOKS
            and len(self._optimizer._optimizer_step_post_hooks) == _OWN_HOOKS
        )

    def settings(self) -> Settings:
        """Return the hyperparameters as they are now."""
        return [
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def take(
        self, chosen: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], settings: Settings
    ) -> None:
        """Take the step with some parameters; their gradients are what they were before, afterwards.

        Args:
            chosen: those.
            gradients: with which to step them.
            settings: of the time at which the step was called for.

        Raises:
            OffbeatError: the optimizer has other groups of parameters than it had then.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(settings):
            raise OffbeatError(
                f"the optimizer had {len(settings)} groups of parameters at its last step and has "
                f"{len(groups)} now: leave the session and join again"
            )
        ids = {id(parameter) for parameter in chosen}
        before = [parameter.grad for parameter in chosen]
        now = [dict(group) for group in groups]
        try:
            for parameter, gradient in zip(chosen, gradients, strict=True):
                parameter.grad = gradient
            for group, then in zip(groups, settings, strict=True):
                group.update(then)
                group["params"] = [one for one in group["params"] if id(one) in ids]
            kind: Any = type(self._optimizer)
            with plainly(in_inference_mode=self._is_kept_in_inference_mode(chosen)):
                kind.step.__wrapped__(self._optimizer)  # without the hooks, which have been called
        finally:
            for group, after in zip(groups, now, strict=True):
                group.clear()
                group.update(after)
            for parameter, own in zip(chosen, before, strict=True):
                parameter.grad = own

    def _is_kept_in_inference_mode(self, chosen: Sequence[torch.Tensor]) -> bool:
        """Whether the program has stepped these in inference mode, in which alone the state can change."""
        states = [self._optimizer.state.get(one, {}) for one in chosen]
        return any(
            isinstance(kept, torch.Tensor) and kept.is_inference()
            for state in states
            for kept in state.values()
        )


@contextmanager
def plainly(*, in_inference_mode: bool = False) -> Iterator[None]:
    """Whatever the program does at the moment, numbers are changed as they are between its steps."""
    with torch.inference_mode(in_inference_mode), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def out_of_inference_mode(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that does what `function` does, `plainly` where the program is in inference mode."""

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with plainly():
            return function(*args, **kwargs)

    return called


def _steps_alone(optimizer: Optimizer) -> bool:
    """Whether an optimizer steps each parameter by its own gradient alone, as those of torch do."""
    kind = type(optimizer)
    return f"{kind.__module__}.".startswith("torch.optim.") and hasattr(kind.step, "__wrapped__")
