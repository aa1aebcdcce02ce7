"""Signs: one bit for each element, and the mean magnitude of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offbeat.numerics.compressors.interface import Requests
from offbeat.numerics.compressors.layout import Layout, WritesResidual, sum_whole
from offbeat.numerics.compressors.scaled_integers import gathering_pays, sum_scaled


@dataclass(frozen=True)
class Sign:
    """Sends of each tensor of at least two dimensions the signs and the mean magnitude.

    With x a tensor of d elements, (||x||_1 / d) sign(x) is sent, and the rest of x is the residual. All
    members get the signs of all others: with 64 or more, a sum of all elements in float32 has no more bytes,
    and is taken. Biases are not compressed.

    Source: Karimireddy et al. 2019, "Error feedback fixes SignSGD and other gradient compression schemes",
    algorithm 1. Deviations: each tensor by itself; the sign of 0 is 1, as there are only two.
    """

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> SignCompressor:
        """See `CompressionMethod.compressor`."""
        return SignCompressor(shapes)


class SignCompressor(WritesResidual):
    """Gathers the signs of all members, and sums what is sent uncompressed.

    Args:
        shapes: of the tensors that a vector holds.
    """

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self._layout = Layout(shapes)

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
        """See `Compressor.sum`; there is no state."""
        layout = self._layout
        if not gathering_pays(layout, members, sent_bits=1, element_bytes=vector.element_size()):
            return (yield from sum_whole(vector, out, residual))
        means = [torch.linalg.vector_norm(span.of(vector), 1) / span.elements for span in layout.compressed]
        signs = torch.cat([span.of(vector) >= 0 for span in layout.compressed])
        yield from sum_scaled(
            layout,
            vector,
            out,
            residual,
            torch.stack(means),
            signs,
            position=position,
            pack=_pack_bits,
            unpack=_unpack_signs,
        )


def _pack_bits(bits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.packbits(bits.numpy()))


def _unpack_signs(packed: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(packed.numpy())).view(torch.int8).mul_(2).sub_(1)
