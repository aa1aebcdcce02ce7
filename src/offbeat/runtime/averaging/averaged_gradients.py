"""Recognises the means of rounds in `param.grad`, by identity and version."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from offbeat.runtime.training.hooks import do_nothing


class AveragedGradients:
    """The gradients that the last rounds have left in `param.grad`: all others were set by the program.

    Args:
        parameters: the parameters, in the order of their entries.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._means: list[tuple[Callable[[], torch.Tensor | None], int]] = [
            (do_nothing, 0) for _ in parameters
        ]
        self._of_last_round: set[int] = set()  # entries

    def begin_round(self) -> None:
        """Note that the means of another round follow."""
        self._of_last_round.clear()

    def set_mean(self, entry: int, mean: torch.Tensor, version: int | None = None) -> None:
        """Let `mean` be a parameter's gradient, or a copy of it that has the parameter's form.

        Args:
            version: of the mean, before the program could change it; by default the current one.
        """
        parameter = self._parameters[entry]
        parameter.grad = gradient = as_gradient(parameter, mean)
        self._means[entry] = (weakref.ref(gradient), gradient._version if version is None else version)
        self._of_last_round.add(entry)

    def drop_means(self) -> None:
        """Remove all means from the parameters; gradients that the program has set or changed stay."""
        for entry, parameter in enumerate(self._parameters):
            if parameter.grad is not None and self._is_mean(entry, parameter.grad):
                parameter.grad = None

    @property
    def has_new_gradients(self) -> bool:
        """Whether there is a gradient that no round has left there, or that was changed since.

        A mean that the program has removed is not new: most programs remove all of them after each step.
        """
        return any(
            parameter.grad is not None and not self._is_mean(entry, parameter.grad)
            for entry, parameter in enumerate(self._parameters)
        )

    @property
    def are_those_of_last_round(self) -> bool:
        """Whether the gradients are the means of the last round, unchanged, and no others."""
        return all(
            parameter.grad is None or (entry in self._of_last_round and self._is_mean(entry, parameter.grad))
            for entry, parameter in enumerate(self._parameters)
        )

    def _is_mean(self, entry: int, gradient: torch.Tensor) -> bool:
        mean, version = self._means[entry]
        return mean() is gradient and version == gradient._version


def as_gradient(parameter: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return a mean as the gradient of a parameter: a copy only where the memory has another form."""
    if parameter.stride() == mean.stride() and parameter.dtype == mean.dtype:
        return mean
    return torch.empty_like(parameter).copy_(mean)
