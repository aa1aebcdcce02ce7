"""QSGD: each element rounded at random to a few levels of its tensor's norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offbeat.numerics.compressors.interface import Requests
from offbeat.numerics.compressors.layout import Layout, Span, WritesResidual, sum_whole
from offbeat.numerics.compressors.scaled_integers import (
    decode_scaled,
    gathering_pays,
    join_scales,
    sum_scaled,
)

_LEVELS_MAX = 127  # with its sign, a level is one byte


@dataclass(frozen=True)
class QSGD:
    """Sends of each tensor of at least two dimensions the norm and one byte for each element.

    With x a tensor of d elements, s the levels, u uniform from 0 to 1 and tau = 1 + min(d/s^2, sqrt(d)/s),
    sign(x) ||x|| floor(s |x| / ||x|| + u) / (s tau) is sent, and the rest of x is the residual. All members
    get the levels of all others: with 8 or more, a sum of all elements in float32 has no more bytes, and is
    taken. Biases are not compressed.

    Source: Alistarh et al. 2017, "QSGD: communication-efficient SGD via gradient quantization and encoding",
    section 3.1, and Koloskova, Stich, Jaggi 2019, "Decentralized stochastic optimization and gossip
    algorithms with compressed communication" (division by tau, which makes it a contraction). Deviation:
    levels are not coded further.

    Args:
        levels: s, from 1 to 127.

    Raises:
        ValueError: the levels are out of range.
    """

    levels: int

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= _LEVELS_MAX:
            raise ValueError(f"expected 1 to {_LEVELS_MAX} levels, got {self.levels}")

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> QSGDCompressor:
        """See `CompressionMethod.compressor`."""
        return QSGDCompressor(shapes, self.levels, seed)

    def encoder(self, shapes: Sequence[torch.Size], seed: int) -> QSGDCompressor:
        """See `EncodingMethod.encoder`."""
        return QSGDCompressor(shapes, self.levels, seed)


class QSGDCompressor(WritesResidual):
    """Gathers the levels of all members, and sums what is sent uncompressed; an `Encoder`, too.

    Args:
        shapes: of the tensors that a vector holds.
        levels: s.
        seed: of random numbers; each member draws its own.
    """

    def __init__(self, shapes: Sequence[torch.Size], levels: int, seed: int) -> None:
        self._layout, self._levels, self._seed = Layout(shapes), levels, seed

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
        layout = self._layout
        if gathering_pays(layout, members, sent_bits=8, element_bytes=vector.element_size()):
            generator = np.random.default_rng([self._seed, position, rounds])
            message = self._message(vector, generator)
            yield from sum_scaled(
                layout, vector, out, residual, message, position=position, unpack=_to_integers
            )
        else:
            yield from sum_whole(vector, out, residual)
        return rounds + 1

    def encode(self, vector: torch.Tensor, number: int) -> torch.Tensor:
        """See `Encoder.encode`: norms and levels, uint8."""
        message = self._message(vector, np.random.default_rng([self._seed, number]))
        return self._layout.append_uncompressed(message, vector)

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """See `Encoder.decode`."""
        decode_scaled(self._layout, self._layout.split_uncompressed(code, out), out, _to_integers)

    def omega(self) -> float:
        """See `Encoder.omega`: 1 / tau of the largest tensor."""
        return min([1.0, *(1 / self._tau(span) for span in self._layout.compressed)])

    def _message(self, vector: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
        scales, levels = vector.new_empty(len(self._layout.compressed)), [vector[:0].to(torch.int8)]
        for index, span in enumerate(self._layout.compressed):
            norm = torch.linalg.vector_norm(span.of(vector))
            scales[index] = norm / (self._levels * self._tau(span))
            levels.append(self._round(span.of(vector), norm, generator))
        return join_scales(scales, torch.cat(levels).view(torch.uint8))

    def _tau(self, span: Span) -> float:
        return 1 + min(span.elements / self._levels**2, math.sqrt(span.elements) / self._levels)

    def _round(
        self, values: torch.Tensor, norm: torch.Tensor, generator: np.random.Generator
    ) -> torch.Tensor:
        """Return the levels of a tensor's elements with their signs, int8; zeros where the norm is 0."""
        draws = generator.random(len(values), dtype=values.numpy().dtype)
        scaled = values.abs().div_(norm if norm else 1.0).mul_(self._levels)
        scaled.add_(torch.from_numpy(draws)).floor_().clamp_(max=self._levels)
        return scaled.copysign_(values).to(torch.int8)


def _to_integers(packed: torch.Tensor) -> torch.Tensor:
    return packed.view(torch.int8)
