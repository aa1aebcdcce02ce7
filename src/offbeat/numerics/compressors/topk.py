"""Top-k: of each tensor the elements of the largest magnitude; the others are added to the next gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offbeat.numerics.compressors.interface import AllGather, Requests
from offbeat.numerics.compressors.layout import Layout, Span, WritesResidual, check_ratio, sum_whole

_SAMPLED_FROM = 1 << 16  # elements from which on a threshold is estimated
_SAMPLE_STRIDE = 100
_MARGIN = 1.5  # more candidates than needed, so that an estimate is seldom too high


@dataclass(frozen=True)
class TopK:
    """Sends a fraction of the elements of each tensor of at least two dimensions, with their indices.

    Members send different elements, so all are gathered: bytes grow with the members. Where the fraction is
    not below 1 / members, a sum of all elements has no more bytes, and is taken. Biases are not compressed.

    Source: Lin et al. 2018, "Deep gradient compression", section 3 (selection by a threshold from a sample of
    1 %), without its momentum correction. Deviation: of the candidates above the threshold exactly the
    largest are taken, and where these are too few the largest of all; so the sample only saves time.

    Args:
        ratio: fraction of the elements that are sent, more than 0 and at most 1.

    Raises:
        ValueError: the ratio is out of range.
    """

    ratio: float

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> TopKCompressor:
        """See `CompressionMethod.compressor`."""
        return TopKCompressor(shapes, self.ratio)


class TopKCompressor(WritesResidual):
    """Gathers the chosen elements of all members, and sums what is sent uncompressed.

    Args:
        shapes: of the tensors that a vector holds.
        ratio: fraction of the elements that are sent.
    """

    def __init__(self, shapes: Sequence[torch.Size], ratio: float) -> None:
        self._ratio, self._layout = ratio, Layout(shapes)

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
        if self._ratio * members >= 1 or not self._layout.compressed:
            return (yield from sum_whole(vector, out, residual))
        indices = torch.cat([self._choose(vector, span) for span in self._layout.compressed])
        values = vector[indices]
        sent = torch.cat([values.view(torch.int32), indices.to(torch.int32)])
        received = yield AllGather(sent, is_last=not self._layout.has_uncompressed)
        out.zero_()
        for row in received:
            others_indices = row[-len(indices) :].long()
            out.index_add_(0, others_indices, row[: -len(indices)].clone().view(vector.dtype))
        residual.copy_(vector)
        residual[indices] = 0
        yield from self._layout.sum_uncompressed(vector, out, residual)

    def _choose(self, vector: torch.Tensor, span: Span) -> torch.Tensor:
        """Return the indices of the largest magnitudes in a tensor, of which NaN is the largest."""
        start, count = span.start, math.ceil(self._ratio * span.elements)
        magnitudes = span.of(vector).abs()
        if span.elements < _SAMPLED_FROM:
            return start + magnitudes.topk(count, sorted=False).indices
        sample = magnitudes[::_SAMPLE_STRIDE]
        wanted = min(len(sample), math.ceil(_MARGIN * count / _SAMPLE_STRIDE))
        threshold = sample.topk(wanted, sorted=False).values.min()
        # NumPy finds few elements among many several times as fast as torch's `nonzero`.
        candidates = torch.from_numpy(np.flatnonzero(~(magnitudes.numpy() < float(threshold))))
        if len(candidates) < count:
            return start + magnitudes.topk(count, sorted=False).indices
        return start + candidates[magnitudes[candidates].topk(count, sorted=False).indices]
