"""Coarse-grained sparse communication: the same chunks of all workers' gradients are summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.numerics.compressors.interface import Requests, Sum
from offbeat.numerics.compressors.layout import sum_whole
from offbeat.numerics.compressors.momentum import MomentumCompressor, MomentumCorrecting


@dataclass(frozen=True, kw_only=True)
class CSC(MomentumCorrecting):
    """Sums a fraction of the chunks of a vector: those whose elements have the largest sum of magnitudes.

    All members sum the same chunks, so bytes do not grow with the members. Which ones, the magnitudes that
    the round before left unsent decide, which were summed with that round's chunks; a group's first round
    sums them beforehand, in an exchange of its own. Of equal chunks the first is taken. The number of chunks
    is rounded up, so a vector of few chunks is sent whole. The momentum of what is sent is kept: with it, a
    network for CIFAR-10 loses 2 points of accuracy, and 6 without (benchmarks/README.md).

    Source: Sun et al. 2019, "Optimizing network performance for distributed DNN training on GPU clusters:
    ImageNet/AlexNet training in 1.5 minutes" (coarse-grained sparse communication, of which abstract and
    public accounts were available). Deviations: see `MomentumCorrecting` and `MomentumCorrection`.

    Args:
        ratio, warmup, clip: see `MomentumCorrecting`.
        chunk_elements: elements of a chunk; the last one of a vector may have fewer.
    """

    chunk_elements: int = 32768

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> CSCCompressor:
        """See `CompressionMethod.compressor`."""
        return CSCCompressor(shapes, self)


class CSCCompressor(MomentumCompressor):
    """Sums the chosen chunks, followed by the magnitudes of the others.

    Args:
        shapes: of the tensors that a vector holds.
        method: says how many chunks are sent.
    """

    def __init__(self, shapes: Sequence[torch.Size], method: CSC) -> None:
        self._tensors, self._method = len(shapes), method
        elements, size = sum(shape.numel() for shape in shapes), method.chunk_elements
        self._chunks = [slice(start, min(start + size, elements)) for start in range(0, elements, size)]

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
        """See `Compressor.sum`; the state is the group's number of rounds, and its residuals' magnitudes."""
        rounds, summed = (0, None) if state is None else state
        count = self._count(rounds)
        if count == len(self._chunks):
            yield from sum_whole(vector, out, residual)
            return rounds + 1, self._magnitudes(out)
        if summed is None:
            summed = yield Sum(self._magnitudes(vector))
        order = summed.argsort(descending=True, stable=True)
        chosen = [self._chunks[index] for index in order[:count].tolist()]
        residual.copy_(vector)
        for chunk in chosen:
            residual[chunk] = 0
        sent = torch.cat([*(vector[chunk] for chunk in chosen), self._magnitudes(residual)])
        answer = yield Sum(sent, is_last=True)
        out.zero_()
        pieces = answer.split([*(chunk.stop - chunk.start for chunk in chosen), len(self._chunks)])
        for chunk, piece in zip(chosen, pieces[:-1], strict=True):
            out[chunk] = piece
        if not pieces[-1].isfinite().all():
            out.fill_(torch.nan)  # though what is not finite was not sent: nobody shall take the step
            return rounds + 1, None
        return rounds + 1, pieces[-1].clone()

    def masks_momentum(self, state: Any, *, members: int) -> Sequence[bool]:
        """See `MomentumCompressor.masks_momentum`: none."""
        return [False] * self._tensors

    def _count(self, rounds: int) -> int:
        return math.ceil(self._method.ratio_in(rounds) * len(self._chunks))

    def _magnitudes(self, vector: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.linalg.vector_norm(vector[chunk], ord=1) for chunk in self._chunks])
