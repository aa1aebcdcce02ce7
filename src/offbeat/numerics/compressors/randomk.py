"""Random-k: of each tensor some elements, drawn again in each round, the same on all members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offbeat.numerics.compressors.interface import Requests, Sum
from offbeat.numerics.compressors.layout import (
    Layout,
    WritesResidual,
    check_ratio,
    elements_sent,
    least_fraction_sent,
)

_DRAWN_BYTES = 16  # of a code: seed and number of the round


@dataclass(frozen=True)
class RandomK:
    """Sums a fraction of the elements of each tensor of at least two dimensions.

    All members draw the same elements, so these are summed without indices; the others are the residual.
    Biases are not compressed. Where an element of a vector is not finite, none of those that are sent is.

    Each new group draws the same sequence again: a group has to last for several times 1 / ratio rounds, or
    else some elements are seldom sent.

    Source: Stich, Cordonnier, Jaggi 2018, "Sparsified SGD with memory", section 2 and algorithm 1. Deviation:
    the fraction is of each tensor.

    Args:
        ratio: fraction of the elements that are sent, more than 0 and at most 1.

    Raises:
        ValueError: the ratio is out of range.
    """

    ratio: float

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> RandomKCompressor:
        """See `CompressionMethod.compressor`."""
        return RandomKCompressor(shapes, self.ratio, seed)

    def encoder(self, shapes: Sequence[torch.Size], seed: int) -> RandomKCompressor:
        """See `EncodingMethod.encoder`."""
        return RandomKCompressor(shapes, self.ratio, seed)


class RandomKCompressor(WritesResidual):
    """Requests one sum, of the chosen elements and of what is sent uncompressed; an `Encoder`, too.

    Args:
        shapes: of the tensors that a vector holds.
        ratio: fraction of the elements that are sent.
        seed: of the choice.
    """

    def __init__(self, shapes: Sequence[torch.Size], ratio: float, seed: int) -> None:
        self._layout, self._ratio, self._seed = Layout(shapes), ratio, seed

    def sum(
        self,
        vector: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor,
        state: Any,
        *,
        members: int,
        position: int,
    ) -> Requests:
        """See `Compressor.sum`; the state is the number of rounds before."""
        rounds = state or 0
        indices = self._choose(self._seed, rounds)
        low, high = vector.aminmax()
        chosen = vector[indices] + (0 * low + 0 * high)  # NaN where an element of the vector is not finite
        summed = yield Sum(torch.cat([chosen, self._layout.uncompressed(vector)]), is_last=True)
        out.zero_()
        out[indices] = summed[: len(indices)]
        residual.copy_(vector)
        residual[indices] = 0
        self._layout.write_uncompressed(summed[len(indices) :], out, residual)
        return rounds + 1

    def encode(self, vector: torch.Tensor, number: int) -> torch.Tensor:
        """See `Encoder.encode`: the seed and the number, from which the indices follow, and values; uint8."""
        drawn = torch.tensor([self._seed, number]).view(torch.uint8)
        values = vector[self._choose(self._seed, number)].view(torch.uint8)
        return self._layout.append_uncompressed(torch.cat([drawn, values]), vector)

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """See `Encoder.decode`."""
        out.zero_()
        drawn, values = self._layout.split_uncompressed(code, out).tensor_split([_DRAWN_BYTES])
        indices = self._choose(*drawn.clone().view(torch.int64).tolist())
        out.index_copy_(0, indices, values.clone().view(out.dtype))

    def omega(self) -> float:
        """See `Encoder.omega`: the least fraction of a tensor's elements that is sent."""
        return least_fraction_sent(self._layout, self._ratio)

    def _choose(self, seed: int, number: int) -> torch.Tensor:
        """Return the indices of a round."""
        generator = np.random.default_rng([seed, number])
        chosen = [np.zeros(0, np.int64)]
        for span in self._layout.compressed:
            count = elements_sent(span, self._ratio)
            chosen.append(span.start + generator.choice(span.elements, count, replace=False, shuffle=False))
        return torch.from_numpy(np.concatenate(chosen))
