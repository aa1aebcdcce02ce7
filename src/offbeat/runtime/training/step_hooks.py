"""Hooks on a model and its optimizers that divide a training loop into steps.

This module never looks into a gradient: the synchronizer has hooks of its own for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import OffbeatError
from offbeat.runtime.training.checks import ParameterSetCheck
from offbeat.runtime.training.ddp import check_not_in_other_ddp
from offbeat.runtime.training.hooks import SessionForwardHook, SessionHook
from offbeat.runtime.training.interface import Synchronizer
from offbeat.runtime.training.partial_step import out_of_inference_mode
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.trained import SeveralModels, TrainingState
from offbeat.torch_compat import active_ddp, backward_pass_id


class StepHooks:
    """Calls `on_step_end` once per step, in which every optimizer steps at most once.

    A step ends when every optimizer has stepped. Where only some have, it ends before one of them steps
    again, before the next forward pass in training mode of the only model, or with `end_step`.

    Args:
        trained: the model and optimizers.
        synchronizer: prepares each optimizer's step; its hooks are attached and run after these.
        timer: switched to "apply" while an optimizer steps.
        raise_if_failed: called before each optimizer's step.
        before_forward: called before a forward pass that records gradients.
        on_step_end: called when a step has ended.
    """

    def __init__(
        self,
        trained: TrainingState,
        synchronizer: Synchronizer,
        timer: PartTimer,
        *,
        raise_if_failed: Callable[[], None],
        before_forward: Callable[[], None],
        on_step_end: Callable[[], None],
    ) -> None:
        self._trained, self._synchronizer, self._timer = trained, synchronizer, timer
        self._raise_if_failed, self._on_forward = raise_if_failed, before_forward
        self._on_step_end = on_step_end
        self._stepped: set[Optimizer] = set()  # since the last step ended
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Register these hooks and the synchronizer's, after the initial state has been received."""
        self._parameters = ParameterSetCheck(self._trained)
        hook = SessionForwardHook(self._before_forward)  # before the synchronizer's hooks, which begin a step
        self._handles.append(self._trained.model.register_forward_pre_hook(hook))
        self._synchronizer.attach()
        for optimizer in self._trained.optimizers:
            self._handles += [
                optimizer.register_step_pre_hook(SessionHook(self._before_step)),
                optimizer.register_step_post_hook(SessionHook(self._after_step)),
            ]

    def remove(self) -> None:
        """Remove these hooks; the synchronizer removes its own."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def end_step(self) -> None:
        """End the current step, if an optimizer has stepped."""
        if self._stepped:
            self._stepped.clear()
            self._on_step_end()

    @out_of_inference_mode
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._raise_if_failed()
        self._parameters.check()
        if backward_pass_id() != -1:
            raise OffbeatError(
                "expected optimizer.step() after the backward pass, got it within one, before gradients are "
                "averaged: call it when backward() has returned"
            )
        if optimizer in self._stepped:
            self.end_step()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._synchronizer.before_step(optimizer, has_closure=closure is not None)
        self._timer.switch("apply")

    @out_of_inference_mode
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._timer.switch("other")
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self._trained.optimizers):
            self.end_step()

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        check_not_in_other_ddp(active_ddp())
        if model.training and not isinstance(self._trained.model, SeveralModels):
            self.end_step()
        self._on_forward()
