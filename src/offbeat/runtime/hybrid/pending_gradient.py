"""Gradients whose mean is still being computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
