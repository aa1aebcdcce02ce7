"""Detects where backward passes begin and end, hooks that observe gradients, and unsupported gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from offbeat.errors import OffbeatError
from offbeat.runtime.training.hooks import do_nothing
from offbeat.torch_compat import (
    backward_hooks,
    backward_pass_id,
    call_at_end_of_backward,
    global_backward_hooks,
)


class BackwardPass:
    """The outermost backward pass under way.

    A reentrant checkpoint runs backward passes inside the backward pass, and one of these may be the first to
    reach a parameter. So the end is observed from the first gradient of a model's output on
    (`on_output_gradient`).

    Args:
        on_end: called when the pass has ended; not called if it raised, nor if it has set no `param.grad`
            (`torch.autograd.grad` does not).
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._task_id: int | None = None
        self._has_gradient = False
        self._callback: Callable[[], object] = do_nothing  # a weak reference: dead once the pass is

    @property
    def is_under_way(self) -> bool:
        """Whether a pass has begun and has not ended; it may have failed."""
        return self._task_id is not None

    @property
    def is_innermost(self) -> bool:
        """Whether autograd runs this pass now, not one inside it."""
        return self._task_id == backward_pass_id()

    @property
    def has_failed(self) -> bool:
        """Whether the pass under way has raised, and so never ends."""
        return self._task_id is not None and self._callback() is None

    def begin(self) -> None:
        """Request a call of `on_end` at the end of the pass that autograd runs now."""
        self._task_id = backward_pass_id()
        callback = partial(self._finish, self._task_id)
        call_at_end_of_backward(callback)
        self._callback = weakref.ref(callback)

    def add_gradient(self) -> bool:
        """Record that the pass has set a `param.grad`; return whether it is the first."""
        had_gradient, self._has_gradient = self._has_gradient, True
        return not had_gradient

    def cancel(self) -> None:
        """Cancel the call of `on_end`."""
        self._task_id, self._has_gradient = None, False

    def _finish(self, task_id: int) -> None:
        if task_id == self._task_id:
            has_gradient = self._has_gradient
            self._task_id, self._has_gradient = None, False
            if has_gradient:
                self._on_end()


class GradientObservers:
    """Hooks of the program that may read or change gradients during a backward pass.

    They work as without a session if gradients stay in `param.grad` until the pass is over. Hooks that get a
    gradient before it is accumulated do not count: torch passes it to them.

    Args:
        model: backward hooks of its modules count, and global ones.
        parameters: each has one post-accumulate hook of the session; further ones count.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        self._parameter_hooks: list[Sized] = [
            hooks for one in parameters if (hooks := one._post_accumulate_grad_hooks) is not None
        ]
        model_hooks = [hooks for one in model.modules() for hooks in backward_hooks(one)]
        self._module_hooks = [*model_hooks, *global_backward_hooks()]

    @property
    def exist(self) -> bool:
        """Whether there is such a hook now."""
        return any(self._module_hooks) or any(len(hooks) > 1 for hooks in self._parameter_hooks)


def on_output_gradient(output: Any, callback: Callable[[torch.Tensor], None]) -> None:
    """Call `callback` with the gradient of each tensor in a model's output, when it is computed."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(callback)


def find_used_parameter(output: Any, parameters: Collection[torch.Tensor]) -> torch.Tensor | None:
    """Return one of these parameters that the model's output depends on, or None.

    Parameters that are used only inside a reentrant checkpoint are not found.
    """
    wanted = set(parameters)
    return next((found for found in parameters_in_graph(output) if found in wanted), None)


def parameters_in_graph(output: Any) -> Iterator[torch.Tensor]:
    """Yield the leaves of the autograd graph of a model's output that get a gradient.

    Those that are used only inside a reentrant checkpoint are not found.
    """
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    nodes: list[Any] = [leaf.grad_fn for leaf in leaves]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        nodes.extend(next_node for next_node, _ in node.next_functions)


def check_can_average(gradient: torch.Tensor | None) -> None:
    """Raise an error for a gradient that cannot be averaged.

    Raises:
        OffbeatError: it is sparse, or has an autograd graph, which the mean would not have.
    """
    if gradient is not None and gradient.requires_grad:
        raise OffbeatError(
            "backward(create_graph=True) leaves gradients with a graph, and the averaged ones have none: "
            "use torch.autograd.grad(..., create_graph=True) for a loss that depends on gradients"
        )
    if gradient is not None and gradient.is_sparse:
        raise OffbeatError(
            "a parameter has a sparse gradient, which cannot be averaged: build its layer with sparse=False"
        )
