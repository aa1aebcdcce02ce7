"""The encoder of vectors that are sent as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Identity:
    """Encodes a vector as itself, without any loss."""

    def encoder(self, shapes: Sequence[torch.Size], seed: int) -> Identity:
        """See `EncodingMethod.encoder`: the same for all layouts."""
        return self

    def encode(self, vector: torch.Tensor, number: int) -> torch.Tensor:
        """See `Encoder.encode`: a copy of the vector."""
        return vector.clone()

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """See `Encoder.decode`."""
        out.copy_(code)

    def omega(self) -> float:
        """See `Encoder.omega`: 1, as nothing is lost."""
        return 1.0
