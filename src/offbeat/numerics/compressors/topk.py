"""Top-k: of each tensor the elements of the largest magnitude; the others are added to the next gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offbeat.numerics.compressors.interface import AllGather, Requests
from offbeat.numerics.compressors.layout import (
    Layout,
    Span,
    WritesResidual,
    check_ratio,
    elements_sent,
    least_fraction_sent,
    sum_whole,
)

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

    def encoder(self, shapes: Sequence[torch.Size], seed: int) -> TopKCompressor:
        """See `EncodingMethod.encoder`."""
        return TopKCompressor(shapes, self.ratio)


class TopKCompressor(WritesResidual):
    """Gathers the chosen elements of all members, and sums what is sent uncompressed; an `Encoder`, too.

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
        indices, message = self._message(vector)
        received = yield AllGather(message, is_last=not self._layout.has_uncompressed)
        out.zero_()
        for row in received:
            out.index_add_(0, *self._read(row, vector.dtype))
        residual.copy_(vector)
        residual[indices] = 0
        yield from self._layout.sum_uncompressed(vector, out, residual)

    def encode(self, vector: torch.Tensor, number: int) -> torch.Tensor:
        """See `Encoder.encode`: values and indices, int32."""
        return self._layout.append_uncompressed(self._message(vector)[1], vector)

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """See `Encoder.decode`."""
        out.zero_()
        message = self._layout.split_uncompressed(code, out)
        out.index_copy_(0, *self._read(message, out.dtype))

    def omega(self) -> float:
        """See `Encoder.omega`: the least fraction of a tensor's elements that is sent."""
        return least_fraction_sent(self._layout, self._ratio)

    def _message(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices that are sent, and the message: values and indices, int32."""
        chosen = [self._choose(vector, span) for span in self._layout.compressed]
        indices = torch.cat([torch.zeros(0, dtype=torch.int64), *chosen])
        return indices, torch.cat([vector[indices].view(torch.int32), indices.to(torch.int32)])

    def _read(self, message: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices and the values of a message."""
        count = sum(elements_sent(span, self._ratio) for span in self._layout.compressed)
        values, indices = message.split([len(message) - count, count])
        return indices.long(), values.clone().view(dtype)

    def _choose(self, vector: torch.Tensor, span: Span) -> torch.Tensor:
        """Return the indices of the largest magnitudes in a tensor, of which NaN is the largest."""
        start, count = span.start, elements_sent(span, self._ratio)
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
