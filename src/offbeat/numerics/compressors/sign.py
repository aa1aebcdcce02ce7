"""Signs: one bit for each element, and the mean magnitude of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offbeat.numerics.compressors.interface import Requests
from offbeat.numerics.compressors.layout import Layout, WritesResidual, sum_whole
from offbeat.numerics.compressors.scaled_integers import (
    decode_scaled,
    gathering_pays,
    join_scales,
    sum_scaled,
)


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

    def encoder(self, shapes: Sequence[torch.Size], seed: int) -> SignCompressor:
        """See `EncodingMethod.encoder`."""
        return SignCompressor(shapes)


class SignCompressor(WritesResidual):
    """Gathers the signs of all members, and sums what is sent uncompressed; an `Encoder`, too.

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
        message = self._message(vector)
        yield from sum_scaled(layout, vector, out, residual, message, position=position, unpack=_unpack_signs)

    def encode(self, vector: torch.Tensor, number: int) -> torch.Tensor:
        """See `Encoder.encode`: mean magnitudes and signs, uint8."""
        return self._layout.append_uncompressed(self._message(vector), vector)

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """See `Encoder.decode`."""
        decode_scaled(self._layout, self._layout.split_uncompressed(code, out), out, _unpack_signs)

    def omega(self) -> float:
        """See `Encoder.omega`: 1 / d, as of a tensor with a single element that is not 0."""
        return min([1.0, *(1 / span.elements for span in self._layout.compressed)])

    def _message(self, vector: torch.Tensor) -> torch.Tensor:
        means, signs = vector.new_empty(len(self._layout.compressed)), [vector[:0] >= 0]
        for index, span in enumerate(self._layout.compressed):
            means[index] = torch.linalg.vector_norm(span.of(vector), 1) / span.elements
            signs.append(span.of(vector) >= 0)
        return join_scales(means, torch.from_numpy(np.packbits(torch.cat(signs).numpy())))


def _unpack_signs(packed: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(packed.numpy())).view(torch.int8).mul_(2).sub_(1)
