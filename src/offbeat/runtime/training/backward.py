"""When backward passes begin and end, who looks at gradients meanwhile, and what they must not bring."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.utils._pytree import tree_leaves

from offbeat.errors import OffbeatError
from offbeat.runtime.training.hooks import do_nothing

_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


class BackwardPass:
    """The outermost backward pass under way.

    A reentrant checkpoint runs backward passes inside the backward pass; one of those may be the first to
    reach a parameter. So the end is awaited from the first gradient of a model's output on (`watch`).

    Args:
        ended: called when the pass has ended; not if it raised.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._id: int | None = None
        self._end: Callable[[], object] = do_nothing  # a weak reference: gone with the pass

    @property
    def is_under_way(self) -> bool:
        """Whether a pass has begun and has not ended; it may have failed."""
        return self._id is not None

    @property
    def is_innermost(self) -> bool:
        """Whether the pass that autograd is in now is this one."""
        return self._id == torch._C._current_graph_task_id()

    @property
    def has_failed(self) -> bool:
        """Whether the pass under way has raised, and so never ends."""
        return self._id is not None and self._end() is None

    def begin(self) -> None:
        """Awaits the end of the pass that autograd is in now."""
        self._id = torch._C._current_graph_task_id()
        callback = partial(self._finish, self._id)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._end = weakref.ref(callback)

    def forget(self) -> None:
        """Awaits no end."""
        self._id = None

    def _finish(self, id_: int) -> None:
        if id_ == self._id:
            self._id = None
            self._ended()


class Onlookers:
    """Hooks of the program that may look at gradients while a backward pass goes on.

    What they find in `param.grad`, and what they make of it, is what it is without a session as long as
    gradients stay there until the pass is over. Hooks that get a gradient before it is accumulated do not
    count: they have it from torch.

    Args:
        model: its modules' hooks on the backward pass count, and those of all modules.
        parameters: each has one hook of the session that is called when its gradient is accumulated; others
            count.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        self._of_parameters: list[Sized] = [
            hooks for one in parameters if (hooks := one._post_accumulate_grad_hooks) is not None
        ]
        of_one = [getattr(one, name, {}) for one in model.modules() for name in _BACKWARD_HOOKS]
        self._of_modules = [*of_one, *(getattr(of_all_modules, f"_global{name}") for name in _BACKWARD_HOOKS)]

    @property
    def are_there(self) -> bool:
        """Whether there is one now."""
        return any(self._of_modules) or any(len(hooks) > 1 for hooks in self._of_parameters)


def watch(output: Any, begins: Callable[[torch.Tensor], None]) -> None:
    """Lets the first gradient of each tensor in a model's output be heard of."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(begins)


def leads_to(output: Any, parameters: Collection[torch.Tensor]) -> torch.Tensor | None:
    """Return one of these parameters from which a model's output was computed, or None.

    What a reentrant checkpoint hides is not found.
    """
    wanted = {id(parameter): parameter for parameter in parameters}
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    nodes: list[Any] = [leaf.grad_fn for leaf in leaves]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found = wanted.get(id(getattr(node, "variable", None)))
        if found is not None:
            return found
        nodes.extend(following for following, _ in node.next_functions)
    return None


def check_can_average(gradient: torch.Tensor | None) -> None:
    """Refuses a gradient that cannot be averaged.

    Raises:
        OffbeatError: it is sparse, or has a graph, which the mean would not have.
    """
    if gradient is not None and gradient.requires_grad:
        raise OffbeatError(
            "backward(create_graph=True) leaves gradients with a graph, and the averaged ones have none: "
            "take torch.autograd.grad(..., create_graph=True) for a loss that depends on gradients"
        )
    if gradient is not None and gradient.is_sparse:
        raise OffbeatError(
            "a parameter has a sparse gradient, which cannot be averaged: build its layer with sparse=False"
        )
