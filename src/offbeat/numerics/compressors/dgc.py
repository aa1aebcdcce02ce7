"""Deep gradient compression: top-k with momentum correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.numerics.compressors.interface import Requests
from offbeat.numerics.compressors.momentum import MomentumCompressor, MomentumCorrecting
from offbeat.numerics.compressors.topk import TopKCompressor


@dataclass(frozen=True, kw_only=True)
class DGC(MomentumCorrecting):
    """Sends a fraction of the elements of each tensor of at least two dimensions, as `TopK` does.

    Source: Lin et al. 2018, "Deep gradient compression", algorithm 4. Deviations: see `MomentumCorrecting`,
    `MomentumCorrection` and `TopK`.
    """

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> DGCCompressor:
        """See `CompressionMethod.compressor`."""
        return DGCCompressor(shapes, self)


class DGCCompressor(MomentumCompressor):
    """Gathers the chosen elements of all members. The state is the number of rounds of the group.

    Args:
        shapes: of the tensors that a vector holds.
        method: says which fraction is sent.
    """

    def __init__(self, shapes: Sequence[torch.Size], method: DGC) -> None:
        self._shapes, self._method = shapes, method

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
        """See `Compressor.sum`."""
        chosen = TopKCompressor(self._shapes, self._ratio(state))
        yield from chosen.sum(vector, out, residual, None, members=members, position=position)
        return (state or 0) + 1

    def masks_momentum(self, state: Any, *, members: int) -> Sequence[bool]:
        """See `MomentumCompressor.masks_momentum`: of matrices, unless all is sent."""
        is_compressed = self._ratio(state) * members < 1
        return [is_compressed and len(shape) > 1 for shape in self._shapes]

    def _ratio(self, state: Any) -> float:
        return self._method.ratio_in(state or 0)
