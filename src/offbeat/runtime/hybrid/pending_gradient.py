"""Gradients that are still on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only


class Promise(torch.Tensor):
    """A gradient whose mean is still to come; whoever looks at it, or computes with it, waits for it.

    So what needs all gradients before the optimizer steps (clipping, a gradient scaler, a print) finds the
    means there, and who does not look never waits.
    """

    _keep: Callable[[], None]

    @classmethod
    def of(cls, mean: torch.Tensor, keep: Callable[[], None]) -> Self:
        """Promise what will be in the memory of `mean` once `keep` has returned.

        Args:
            keep: waits; called at every look.
        """
        promise = mean.as_subclass(cls)
        promise._keep = keep
        return promise

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait, and then do what is to be done with plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(cls, cls.kept, (args, kwargs or {}))
            return function(*args, **kwargs)

    def kept(self) -> torch.Tensor:
        """Wait, and return the gradient as a plain tensor."""
        self._keep()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)
