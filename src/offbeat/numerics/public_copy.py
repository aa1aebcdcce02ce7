"""What a worker knows in compressed gossip, and its corrections; see `offbeat.numerics.gossip`."""

from __future__ import annotations

import torch


class PublicCopy:
    """A worker's public copy xhat_i, and the weighted sum s_i of its neighbours' and its own.

    All workers begin with the same values. In each round one calls `difference`, then `add_own` with what the
    own code stands for and `add_neighbour` with each of the neighbours', in any order, and then `correction`.

    Args:
        start: 1-D, the same on all workers: zeros, or the model they begin with; copied.

    Attributes:
        copy: xhat_i.
        sum: s_i.
    """

    def __init__(self, start: torch.Tensor) -> None:
        self.copy, self.sum = start.clone(), start.clone()

    def difference(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write x_i - xhat_i, which is to be encoded, and return it.

        Args:
            values: x_i.
            out: receives the difference.
        """
        return torch.sub(values, self.copy, out=out)

    def add_own(self, decoded: torch.Tensor, weight: float) -> None:
        """Add what the own code stands for to the copy, and its part to the sum.

        Args:
            decoded: q_i, with the same bits as at the neighbours.
            weight: w_ii.
        """
        self.copy.add_(decoded)
        self.sum.add_(decoded, alpha=weight)

    def add_neighbour(self, decoded: torch.Tensor, weight: float) -> None:
        """Add what a neighbour's code stands for to the sum.

        Args:
            decoded: q_j.
            weight: w_ij.
        """
        self.sum.add_(decoded, alpha=weight)

    def correction(self, gamma: float, out: torch.Tensor) -> torch.Tensor:
        """Write gamma (s_i - xhat_i), which is to be added to x_i, and return it.

        Args:
            gamma: consensus step.
            out: receives the correction.
        """
        return torch.sub(self.sum, self.copy, out=out).mul_(gamma)
