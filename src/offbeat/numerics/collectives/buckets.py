"""Plans for packing gradients into flat buckets; nothing is copied or sent here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

_LAST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A run of entries that are sent together.

    Attributes:
        dtype: dtype of all its entries.
        entries: indices of the entries, in order.
        offsets: start of each entry, in elements.
        elements: total number of elements.
    """

    dtype: torch.dtype
    entries: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int


def plan_buckets(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype], *, bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Pack entries into buckets of one dtype and at most `bucket_bytes` each, in their order within a dtype.

    The plan depends only on its arguments, so that all workers with the same model have the same buckets in
    the same order, in whatever order their gradients become ready. Buckets are ordered by their last entries,
    the order in which they fill if entries become ready in order. The last bucket of a dtype holds at most
    1 MiB and each one before it twice as much, up to `bucket_bytes`, since no computation is left to hide the
    transfer of the bucket that fills last. An entry larger than its bucket's limit has a bucket of its own.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2.3 (gradient bucketing; the 25 MiB default).
    Deviation: there, all buckets but the first have the same size; growing sizes from the end shorten the
    exchange that follows the backward pass.

    Args:
        sizes: elements of each entry.
        dtypes: dtype of each entry.
        bucket_bytes: largest size of a bucket of several entries, in bytes.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be at least 1 byte, got {bucket_bytes}")
    packed: list[list[int]] = []
    open_by_dtype: dict[torch.dtype, tuple[list[int], int, int]] = {}
    for entry, (size, dtype) in reversed([*enumerate(zip(sizes, dtypes, strict=True))]):
        entries, filled, limit = open_by_dtype.get(dtype, ([], 0, _LAST_BUCKET_BYTES // 2))
        if not entries or (filled + size) * dtype.itemsize > min(limit, bucket_bytes):
            entries, filled, limit = [], 0, limit * 2
            packed.append(entries)
        entries.append(entry)
        open_by_dtype[dtype] = entries, filled + size, limit
    packed.sort(key=lambda entries: entries[0])
    return tuple(make_bucket(entries[::-1], sizes, dtypes[entries[0]]) for entries in packed)


def make_bucket(entries: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Bucket:
    """Return the bucket of the given entries, in the given order.

    Args:
        entries: indices of entries.
        sizes: elements of every existing entry.
        dtype: dtype of the entries in the bucket.
    """
    ends = list(accumulate((sizes[entry] for entry in entries), initial=0))
    return Bucket(dtype=dtype, entries=tuple(entries), offsets=tuple(ends[:-1]), elements=ends[-1])
