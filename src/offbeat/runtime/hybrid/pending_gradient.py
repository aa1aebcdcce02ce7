"""Gradients whose mean is still being computed, and which of them the parameters still have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from offbeat.torch_compat import without_subclass_functions


class PendingGradient(torch.Tensor):
    """A gradient whose mean is still being computed; any operation on it waits for the mean.

    So code that needs gradients before the optimizer steps (clipping, a gradient scaler, a print) gets the
    means, and a program without such code never waits.
    """

    _wait: Callable[[], None]

    @classmethod
    def create(cls, mean: torch.Tensor, wait: Callable[[], None]) -> Self:
        """Return a pending gradient whose value is in the memory of `mean` once `wait` has returned.

        Args:
            wait: waits for the mean; called by every operation.
        """
        pending = mean.as_subclass(cls)
        pending._wait = wait
        return pending

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait, and call the function with plain tensors."""
        with without_subclass_functions():
            args, kwargs = tree_map_only(cls, cls.wait, (args, kwargs or {}))
            return function(*args, **kwargs)

    def wait(self) -> torch.Tensor:
        """Wait, and return the gradient as a plain tensor."""
        self._wait()
        with without_subclass_functions():
            return self.as_subclass(torch.Tensor)


class PendingGradients:
    """The pending gradients that parameters were given in the last round.

    Only the parameters, and the program, keep them and their memory.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._given: list[weakref.ref[PendingGradient] | None] = [None] * len(parameters)
        self._resolved: list[weakref.ref[torch.Tensor] | None] = [None] * len(parameters)
        self._versions: list[int | None] = [None] * len(parameters)  # of the means; None before they arrive
        self._set_aside: list[torch.Tensor | None] = []  # gradients that an optimizer must not see

    def set(self, entry: int, pending: PendingGradient | None) -> None:
        """Set a parameter's gradient; None where no worker has one."""
        self._parameters[entry].grad = pending
        self._given[entry] = None if pending is None else weakref.ref(pending)
        self._resolved[entry] = self._versions[entry] = None

    def resolve(self, entry: int) -> None:
        """Replace a pending gradient by a plain tensor; wait for it."""
        if self._is_pending(entry):
            pending = self._parameters[entry].grad
            assert isinstance(pending, PendingGradient)
            self._parameters[entry].grad = mean = pending.wait()
            self._resolved[entry] = weakref.ref(mean)
        self._given[entry] = None

    def note_means(self) -> None:
        """Note that the means have arrived: from now on only the program changes them."""
        for entry, given in enumerate(self._given):
            if given is not None and (pending := given()) is not None:
                with without_subclass_functions():
                    self._versions[entry] = pending._version

    @property
    def has_others(self) -> bool:
        """Whether there is a gradient that no round has left there, or that was changed since."""
        return any(
            parameter.grad is not None and not self._is_mean(entry, parameter.grad)
            for entry, parameter in enumerate(self._parameters)
        )

    def drop(self) -> None:
        """Remove all that are still pending: the job has failed."""
        for entry, parameter in enumerate(self._parameters):
            if self._is_pending(entry):
                parameter.grad = None

    def are_untouched(self) -> bool:
        """Whether every parameter still has the gradient that it was given, or none."""
        return all(
            self._parameters[entry].grad is None if given is None else self._is_pending(entry)
            for entry, given in enumerate(self._given)
        )

    def set_aside(self, is_held: Sequence[bool]) -> None:
        """Remove the gradients of some parameters until `put_back`."""
        held = [*zip(self._parameters, is_held, strict=True)]
        self._set_aside = [parameter.grad if one_is_held else None for parameter, one_is_held in held]
        for parameter, one_is_held in held:
            if one_is_held:
                parameter.grad = None

    def put_back(self) -> None:
        """Set the gradients that were set aside."""
        for parameter, gradient in zip(self._parameters, self._set_aside, strict=True):
            if gradient is not None:
                parameter.grad = gradient
        self._set_aside = []

    def _is_mean(self, entry: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient is the unchanged mean that the parameter was given, resolved or not."""
        resolved, version = self._resolved[entry], self._versions[entry]
        if not self._is_pending(entry) and (resolved is None or resolved() is not gradient):
            return False
        with without_subclass_functions():
            return version is None or version == gradient._version

    def _is_pending(self, entry: int) -> bool:
        given, gradient = self._given[entry], self._parameters[entry].grad
        return given is not None and gradient is not None and gradient is given()
