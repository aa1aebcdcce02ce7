"""Gradients as they were before a backward pass of weight 0, which has no effect once they are put back."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class SavedGradients:
    """Makes a backward pass of weight 0 have no effect: gradients become again what they were before it."""

    def __init__(self) -> None:
        self._gradients: dict[torch.Tensor, torch.Tensor | None] = {}  # by parameter

    def save(self, parameters: Iterable[torch.Tensor], *, are_outdated: bool = False) -> None:
        """Save copies of the gradients of these parameters, and forget all others.

        Args:
            are_outdated: the gradients are those of the last step, and count as none.
        """
        self._gradients = {
            one: None if are_outdated or one.grad is None else one.grad.clone() for one in parameters
        }

    def put_back(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Set the gradients of these parameters that are saved, by default of all; they stay saved.

        Gets copies, to which another backward pass may add.
        """
        if self._gradients:
            for parameter in self._gradients if parameters is None else parameters:
                if parameter in self._gradients:
                    saved = self._gradients[parameter]
                    parameter.grad = None if saved is None else saved.clone()

    def forget(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Forget the gradients of these parameters, by default of all."""
        if parameters is None:
            self._gradients = {}
        else:
            for parameter in parameters:
                self._gradients.pop(parameter, None)
