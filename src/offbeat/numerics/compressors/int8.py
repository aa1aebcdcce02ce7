"""Sums of blocks of 8-bit integers, each block with a scale: a quarter of the bytes of float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.numerics.compressors.interface import AllGather, AllToAll, Requests
from offbeat.numerics.compressors.layout import WritesResidual

_BLOCK_MAX = 256  # elements; scales in float32 then add 1/64 to the bytes
_LEVELS = 127  # integers are from -127 to 127


@dataclass(frozen=True)
class Int8(WritesResidual):
    """Rounds each block of at most 256 elements to integers from -127 to 127 times its own scale.

    Each member owns a part of the vector: it receives the integers of all members for its part (all-to-all),
    adds them up as floating-point numbers, rounds the sum in the same way, and sends it to all (all-gather).
    With N members, a member sends 2 (N-1)/N times the vector, as in a ring, but no partial sum is rounded.

    The residual is what this member's rounding leaves out of its vector and, in the part that it owns, also
    what the rounding of the sum leaves out. Residuals are kept per unit of a member's weight: the second of
    these changes by a factor where the owner's next weight is another, and is lost where its weight is 0.

    A block with an element that is not finite has a scale that is not finite, so in the sum all elements of
    this block are infinite or NaN. A block with a scale below the smallest normal number is sent as zeros.

    Source: feedback of both roundings is that of H. Tang et al. 2019, "DoubleSqueeze: parallel stochastic
    gradient descent with double-pass error-compensated compression", algorithm 1. Deviations: the server is
    distributed over the members, and its error is a part of the owner's residual.
    """

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> Int8:
        """See `CompressionMethod.compressor`: the same for all layouts, as a block may have any elements."""
        return self

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
        part_elements = -(-len(vector) // members)
        blocks = -(-part_elements // _BLOCK_MAX)
        own = vector.new_empty(members, blocks, -(-part_elements // blocks))
        own.view(-1)[: len(vector)] = vector
        own.view(-1)[len(vector) :] = 0
        work = torch.empty_like(own)
        sent = _quantize(own, work)
        received = yield AllToAll(sent.view(-1))
        own -= _dequantize(sent, work)
        part_sum = _dequantize(received, work).sum(0)
        answer = yield AllGather(_quantize(part_sum[None], work[:1]).view(-1), is_last=True)
        total = _dequantize(answer, work)
        out.copy_(total.view(-1)[: len(out)])
        own[position] += part_sum - total[position]
        residual.copy_(own.view(-1)[: len(residual)])


def _quantize(parts: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    """Round parts of a vector.

    Args:
        parts: (parts, blocks of a part, elements of a block).
        work: memory of the same shape and dtype.

    Returns:
        int8, (parts, bytes): the blocks' scales, and then all integers.
    """
    scales = torch.maximum(parts.amax(-1, keepdim=True), -parts.amin(-1, keepdim=True)) / _LEVELS
    factors = scales.reciprocal().masked_fill_(scales < torch.finfo(scales.dtype).tiny, 0)
    scale_bytes = scales.flatten(1).view(torch.int8)
    head = scale_bytes.shape[1]
    quantized = scale_bytes.new_empty(len(parts), head + parts[0].numel())
    quantized[:, :head] = scale_bytes
    quantized[:, head:] = torch.mul(parts, factors, out=work).round_().flatten(1)
    return quantized


def _dequantize(quantized: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Write and return the parts that `_quantize` has rounded."""
    head = into.shape[1] * into.element_size()
    scales = quantized[:, :head].clone(memory_format=torch.contiguous_format).view(into.dtype)
    into.flatten(1).copy_(quantized[:, head:])
    return into.mul_(scales[..., None])
