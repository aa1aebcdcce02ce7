"""The outer optimizer of local steps: it steps from the models' mean after many steps of each worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """SGD with Nesterov momentum on the *anchor*, the common model from which workers make their steps.

    Its gradient, the *pseudo-gradient*, is the anchor less the mean of the workers' models. With a rate of 1
    and no momentum, the new anchor is the mean. With `momentum_every` n above 1 (*delayed Nesterov*) the
    momentum is updated and applied in every n-th step only, by the mean of n gradients, and each gradient
    counts a n-th: for rounds that hold a n-th of the workers.

    Source: Douillard et al. 2023, "DiLoCo: distributed low-communication training of language models"; Liu et
    al. 2024, "Asynchronous local-SGD training for language modeling", algorithm 3 with c = 0.

    Args:
        rate: learning rate, above 0.
        momentum: from 0 up to below 1.
        momentum_every: steps from one update of the momentum to the next, at least 1.

    Raises:
        ValueError: an argument is out of range.
    """

    rate: float = 0.7
    momentum: float = 0.9
    momentum_every: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"expected an outer learning rate above 0, got {self.rate}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"expected an outer momentum from 0 up to below 1, got {self.momentum}")
        if self.momentum_every < 1:
            raise ValueError(f"expected momentum_every to be at least 1 step, got {self.momentum_every}")

    @property
    def buffers(self) -> int:
        """Vectors that it keeps in addition to the anchor, all zero at first."""
        return 1 if self.momentum_every == 1 else 2

    def step(self, anchor: Any, gradient: Any, buffers: tuple[Any, ...], number: int) -> tuple[Any, ...]:
        """Return the new anchor, and then the new buffers; the arguments are unchanged.

        Args:
            anchor: numbers in any shape, a torch or numpy array; as are the others.
            gradient: the pseudo-gradient.
            buffers: see `buffers`.
            number: steps before this one.
        """
        velocity, *sums = buffers
        gathered = sum(sums, gradient)
        change = gradient / self.momentum_every
        if (number + 1) % self.momentum_every == 0:
            velocity = self.momentum * velocity + gathered / self.momentum_every
            change = change + self.momentum * velocity
            gathered = 0.0 * gathered
        return anchor - self.rate * change, velocity, *([gathered] if sums else [])
