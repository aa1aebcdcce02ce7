"""Gradients whose mean is still being computed, and which of them the parameters still have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from offbeat.runtime.averaging.averaged_gradients import AveragedGradients
from offbeat.torch_compat import without_subclass_functions


class PendingGradient(torch.Tensor):
    """A gradient whose mean is still being computed; any operation on it waits for the mean.

    So code that needs gradients before the optimizer steps (clipping, a gradient scaler, a print) gets the
    means, and a program without such code never waits.

    Attributes:
        mean_version: the version of the mean when it was first waited for; None before that.
    """

    _wait: Callable[[], None]
    mean_version: int | None = None

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
            mean = self.as_subclass(torch.Tensor)
            if self.mean_version is None:
                self.mean_version = mean._version
            return mean


class PendingGradients:
    """The pending gradients that parameters were given in the last round.

    Only the parameters, and the program, keep them and their memory.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._given: list[weakref.ref[PendingGradient] | None] = [None] * len(parameters)
        self._resolved = AveragedGradients(parameters)
        self._set_aside: list[torch.Tensor | None] = []  # gradients that an optimizer must not see

    def set(self, entry: int, pending: PendingGradient | None) -> None:
        """Set a parameter's gradient; None where no worker has one."""
        self._parameters[entry].grad = pending
        self._given[entry] = None if pending is None else weakref.ref(pending)

    def resolve(self, entry: int) -> None:
        """Replace a pending gradient by a plain tensor; wait for it."""
        if self._is_pending(entry):
            pending = self._parameters[entry].grad
            assert isinstance(pending, PendingGradient)
            self._resolved.set_mean(entry, pending.wait(), pending.mean_version)
        self._given[entry] = None

    def resolve_all(self) -> None:
        """Replace all pending gradients by plain tensors; wait for them."""
        for entry in range(len(self._parameters)):
            self.resolve(entry)

    @property
    def has_new_gradients(self) -> bool:
        """See `AveragedGradients.has_new_gradients`; no gradient may be pending."""
        return self._resolved.has_new_gradients

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

    def _is_pending(self, entry: int) -> bool:
        given, gradient = self._given[entry], self._parameters[entry].grad
        return given is not None and gradient is not None and gradient is given()
