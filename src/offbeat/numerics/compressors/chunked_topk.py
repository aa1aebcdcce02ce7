"""Chunked top-k: of each chunk of a tensor the largest elements, in 2 bits each, with places of 12 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from offbeat.numerics.compressors.interface import AllGather, Requests
from offbeat.numerics.compressors.layout import Layout, WritesResidual, check_ratio, sum_whole

_CHUNK = 1 << 12  # elements, so that a place in a chunk has 12 bits
_BITS = 14  # of an element that is sent
_BITS_OF_SUM = 64  # times (N - 1) / N, of an element that is summed by a ring, in float32


@dataclass(frozen=True)
class ChunkedTopK:
    """Sends a fraction of the elements of each chunk of 4,096, rounded to one of two magnitudes and a sign.

    As under `TopK`, members send different elements, so all are gathered; biases are not compressed. The two
    magnitudes are those of a tensor: the means of the chosen ones above and below their mean.

    Source: Sarfi et al. 2025, "Communication efficient LLM pre-training with SparseLoCo", section 3 (chunks,
    12-bit places, 2-bit values). Deviations: the paper gives its quantizer no formula; what is left of a
    tensor behind its last whole chunk is a chunk, too.

    Args:
        ratio: fraction of the elements that are sent, more than 0 and at most 1.

    Raises:
        ValueError: the ratio is out of range.
    """

    ratio: float

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> ChunkedTopKCompressor:
        """See `CompressionMethod.compressor`."""
        return ChunkedTopKCompressor(shapes, self.ratio)


class ChunkedTopKCompressor(WritesResidual):
    """Gathers the chosen elements of all members, and sums what is sent uncompressed.

    Args:
        shapes: of the tensors that a vector holds.
        ratio: fraction of the elements that are sent.
    """

    def __init__(self, shapes: Sequence[torch.Size], ratio: float) -> None:
        self._ratio, self._layout = ratio, Layout(shapes)
        self._chunks: list[tuple[int, int, int]] = []  # start in the vector, elements of a chunk, chunks
        self._counts: list[int] = []  # elements sent of each tensor that is compressed
        for span in self._layout.compressed:
            chunks, rest = divmod(span.elements, _CHUNK)
            of_tensor = [(span.start, _CHUNK, chunks), (span.stop - rest, rest, 1)]
            of_tensor = [one for one in of_tensor if one[1] * one[2]]
            self._chunks += of_tensor
            self._counts.append(sum(count * self._count(size) for _, size, count in of_tensor))

    def _count(self, elements: int) -> int:
        """Return how many elements of a chunk are sent."""
        return math.ceil(self._ratio * elements)

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
        if self._ratio * members * _BITS >= _BITS_OF_SUM or not self._chunks:
            return (yield from sum_whole(vector, out, residual))
        received = yield AllGather(self._encode(vector), is_last=not self._layout.has_uncompressed)
        out.zero_()
        residual.copy_(vector)
        for member, row in enumerate(received):
            places, values = self._decode(row, vector.dtype)
            out.index_add_(0, places, values)
            if member == position:
                residual.index_add_(0, places, values, alpha=-1)
        yield from self._layout.sum_uncompressed(vector, out, residual)

    def _encode(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the message, int32: two magnitudes a tensor, 12-bit places, signs and which magnitude."""
        places, values = [], []
        for start, size, chunks in self._chunks:
            rows = vector[start : start + size * chunks].view(chunks, size)
            chosen = rows.abs().topk(self._count(size), sorted=False).indices
            places.append(chosen.flatten())
            values.append(rows.gather(1, chosen).flatten())
        magnitudes, codes = [], []
        for of_tensor in torch.cat(values).split(self._counts):
            sizes = of_tensor.abs()
            is_large = sizes > sizes.mean()
            large = sizes[is_large].mean() if is_large.any() else sizes.mean()
            magnitudes += [sizes[is_large.logical_not()].mean(), large]
            codes.append(2 * (of_tensor < 0).to(torch.uint8) + is_large.to(torch.uint8))
        packed = torch.cat([_pack_places(torch.cat(places)), _pack_codes(torch.cat(codes))])
        message = torch.cat([torch.stack(magnitudes).view(torch.uint8), packed])
        return torch.nn.functional.pad(message, (0, -len(message) % 4)).view(torch.int32)

    def _decode(self, message: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places in the vector and the values of a message."""
        count = sum(self._counts)
        quads = -(-count // 4)
        levels, places, codes = message.view(torch.uint8)[
            : 2 * len(self._counts) * dtype.itemsize + 7 * quads
        ].split([2 * len(self._counts) * dtype.itemsize, 6 * quads, quads])
        magnitudes = levels.clone().view(dtype).view(-1, 2)
        code = (codes[:, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten()[:count].long()
        values = magnitudes[self._tensors, code & 1] * (1 - (code & 2))
        return self._starts + _unpack_places(places)[:count], values

    @cached_property
    def _tensors(self) -> torch.Tensor:
        """By element that is sent, the number of its tensor."""
        return torch.arange(len(self._counts)).repeat_interleave(torch.tensor(self._counts))

    @cached_property
    def _starts(self) -> torch.Tensor:
        """By element that is sent, the start of its chunk in the vector."""
        return torch.cat(
            [
                (start + size * torch.arange(chunks)).repeat_interleave(self._count(size))
                for start, size, chunks in self._chunks
            ]
        )


def _pack_places(places: torch.Tensor) -> torch.Tensor:
    """Return numbers below 4,096 as bytes: two in three, and zeros up to a multiple of four numbers."""
    first, second = torch.nn.functional.pad(places, (0, -len(places) % 4)).view(-1, 2).unbind(1)
    columns = [first & 255, (first >> 8) | ((second & 15) << 4), second >> 4]
    return torch.stack(columns, 1).to(torch.uint8).flatten()


def _unpack_places(packed: torch.Tensor) -> torch.Tensor:
    low, middle, high = packed.view(-1, 3).long().unbind(1)
    return torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], 1).flatten()


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return numbers below 4 as bytes, four in each."""
    columns = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    return columns[:, 0] | columns[:, 1] << 2 | columns[:, 2] << 4 | columns[:, 3] << 6
