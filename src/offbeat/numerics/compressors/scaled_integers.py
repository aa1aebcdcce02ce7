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
    scales: torch.Tensor,
    integers: torch.Tensor,
    *,
    position: int,
    pack: Callable[[torch.Tensor], torch.Tensor],
    unpack: Callable[[torch.Tensor], torch.Tensor],
) -> Requests:
    """Sum integers times scales over the members, and what is not compressed; write the residual.

    Args:
        layout: of the vector.
        vector, out, residual, position: see `Compressor.sum`.
        scales: of the compressed tensors, of the vector's dtype.
        integers: of all compressed tensors, one after another, int8.
        pack: returns integers as bytes, uint8.
        unpack: its inverse; may return integers more than were packed.
    """
    scale_bytes = scales.view(torch.uint8)
    sent = torch.cat([scale_bytes, pack(integers)])
    received = yield AllGather(sent, is_last=not layout.has_uncompressed)
    out.zero_()
    residual.copy_(vector)
    rounded = torch.empty_like(vector)
    for member, row in enumerate(received):
        their_scales = row[: len(scale_bytes)].clone().view(scales.dtype).tolist()
        their_integers = unpack(row[len(scale_bytes) :])
        start = 0
        for span, scale in zip(layout.compressed, their_scales, strict=True):
            theirs = span.of(rounded).copy_(their_integers[start : start + span.elements]).mul_(scale)
            start += span.elements
            span.of(out).add_(theirs)
            if member == position:
                span.of(residual).sub_(theirs)
    yield from layout.sum_uncompressed(vector, out, residual)


def gathering_pays(layout: Layout, members: int, *, sent_bits: int, element_bytes: int) -> bool:
    """Whether to gather elements of so many bits from all members has fewer bytes than a sum in a ring.

    A member sends them (members - 1) times; in a ring it sends the vector 2 (members - 1) / members times.
    """
    return bool(layout.compressed) and members * sent_bits < 2 * 8 * element_bytes
