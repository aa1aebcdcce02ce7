"""How gradients are packed into flat buckets; plans only, nothing is copied or sent here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A run of entries that travel together.

    Attributes:
        entries: indices of the entries, in order.
        offsets: where each entry begins, in elements.
        elements: elements in all.
    """

    dtype: torch.dtype
    entries: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int


def plan_buckets(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype], *, bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Packs entries, in their order, into buckets of one dtype and at most `bucket_bytes` each.

    The plan depends on nothing but its arguments, so that every worker with the same model has the same
    buckets in the same order whatever order its gradients appear in. An entry larger than `bucket_bytes`
    has a bucket of its own.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2.3 (gradient bucketing; the 25 MiB default).

    Args:
        sizes: elements of each entry.
        dtypes: dtype of each entry.
        bucket_bytes: the largest bucket of several entries, in bytes.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be at least 1 byte, got {bucket_bytes}")
    buckets: list[Bucket] = []
    entries: list[int] = []
    offsets: list[int] = []
    filled = 0
    for index, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        if entries and (dtype != dtypes[entries[0]] or (filled + size) * dtype.itemsize > bucket_bytes):
            buckets.append(_bucket(dtypes, entries, offsets, filled))
            entries, offsets, filled = [], [], 0
        entries.append(index)
        offsets.append(filled)
        filled += size
    if entries:
        buckets.append(_bucket(dtypes, entries, offsets, filled))
    return tuple(buckets)


def _bucket(
    dtypes: Sequence[torch.dtype], entries: Sequence[int], offsets: Sequence[int], elements: int
) -> Bucket:
    return Bucket(dtype=dtypes[entries[0]], entries=tuple(entries), offsets=tuple(offsets), elements=elements)
