"""Sums of tensors that are rounded to small integers times a scale, which all members gather.

Members' scales differ, so their integers cannot be summed: each member gets those of all others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offbeat.numerics.compressors.interface import AllGather, Requests
from offbeat.numerics.compressors.layout import Layout


def sum_scaled(
    layout: Layout,
    vector: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor,
    message: torch.Tensor,
    *,
    position: int,
    unpack: Callable[[torch.Tensor], torch.Tensor],
) -> Requests:
    """Sum integers times scales over the members, and what is not compressed; write the residual.

    Args:
        layout: of the vector.
        vector, out, residual, position: see `Compressor.sum`.
        message: this member's, of `join_scales`.
        unpack: see `decode_scaled`.
    """
    received = yield AllGather(message, is_last=not layout.has_uncompressed)
    out.zero_()
    residual.copy_(vector)
    rounded = torch.empty_like(vector)
    for member, row in enumerate(received):
        decode_scaled(layout, row, rounded, unpack)
        for span in layout.compressed:
            span.of(out).add_(span.of(rounded))
            if member == position:
                span.of(residual).sub_(span.of(rounded))
    yield from layout.sum_uncompressed(vector, out, residual)


def join_scales(scales: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the message of a vector, uint8.

    Args:
        scales: of the compressed tensors, of the vector's dtype.
        packed: the integers of all compressed tensors, one after another, as bytes.
    """
    return torch.cat([scales.view(torch.uint8), packed])


def decode_scaled(
    layout: Layout, message: torch.Tensor, out: torch.Tensor, unpack: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Write integers times scales to the compressed tensors of a vector.

    Args:
        layout: of the vector.
        message: of `join_scales`.
        out: the vector.
        unpack: returns the integers that bytes hold, int8; may return more of them.
    """
    scale_bytes = len(layout.compressed) * out.element_size()
    scales = message[:scale_bytes].clone().view(out.dtype).tolist()
    integers = unpack(message[scale_bytes:])
    start = 0
    for span, scale in zip(layout.compressed, scales, strict=True):
        span.of(out).copy_(integers[start : start + span.elements]).mul_(scale)
        start += span.elements


def gathering_pays(layout: Layout, members: int, *, sent_bits: int, element_bytes: int) -> bool:
    """Whether to gather elements of so many bits from all members has fewer bytes than a sum in a ring.

    A member sends them (members - 1) times; in a ring it sends the vector 2 (members - 1) / members times.
    """
    return bool(layout.compressed) and members * sent_bits < 2 * 8 * element_bytes
