"""Promises of `offbeat.numerics.collectives.buckets`."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.numerics.collectives.buckets import plan_buckets

DTYPES = [torch.float32, torch.float64, torch.int64, torch.float16]
ENTRIES = st.lists(st.tuples(st.integers(0, 50), st.sampled_from(DTYPES)), max_size=40)


@given(ENTRIES, st.integers(1, 200))
def test_every_entry_is_in_exactly_one_bucket_of_its_dtype_without_gaps(entries, bucket_bytes):
    sizes, dtypes = [size for size, _ in entries], [dtype for _, dtype in entries]
    plan = plan_buckets(sizes, dtypes, bucket_bytes=bucket_bytes)
    assert sorted(entry for bucket in plan for entry in bucket.entries) == list(range(len(entries)))
    for bucket in plan:
        assert list(bucket.entries) == sorted(bucket.entries)
        assert all(dtypes[entry] == bucket.dtype for entry in bucket.entries)
        filled = 0
        for entry, offset in zip(bucket.entries, bucket.offsets, strict=True):
            assert offset == filled
            filled += sizes[entry]
        assert bucket.elements == filled


@given(ENTRIES, st.integers(1, 200))
def test_buckets_are_in_the_order_in_which_they_fill(entries, bucket_bytes):
    sizes, dtypes = [size for size, _ in entries], [dtype for _, dtype in entries]
    last = [bucket.entries[-1] for bucket in plan_buckets(sizes, dtypes, bucket_bytes=bucket_bytes)]
    assert last == sorted(last)


@given(ENTRIES, st.integers(1, 200))
def test_only_a_single_larger_entry_passes_the_limit_and_buckets_are_as_full_as_it_allows(entries, limit):
    sizes, dtypes = [size for size, _ in entries], [dtype for _, dtype in entries]
    plan = plan_buckets(sizes, dtypes, bucket_bytes=limit)
    for bucket in plan:
        assert len(bucket.entries) == 1 or bucket.elements * bucket.dtype.itemsize <= limit
    for dtype in DTYPES:
        of_dtype = [bucket for bucket in plan if bucket.dtype == dtype]
        for bucket, after in pairwise(of_dtype):
            assert (after.elements + sizes[bucket.entries[-1]]) * dtype.itemsize > limit


def test_buckets_double_from_the_end_so_that_little_is_left_to_exchange_after_the_backward_pass():
    mebibyte = (1 << 20) // 4
    plan = plan_buckets([mebibyte // 2] * 40, [torch.float32] * 40, bucket_bytes=6 << 20)
    assert [bucket.elements / mebibyte for bucket in plan] == [1, 6, 6, 4, 2, 1]


def test_alternating_dtypes_make_two_buckets():
    dtypes = [torch.float32, torch.int64] * 50
    assert [bucket.entries for bucket in plan_buckets([3] * 100, dtypes, bucket_bytes=10**6)] == [
        tuple(range(0, 100, 2)),
        tuple(range(1, 100, 2)),
    ]


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_holds_at_least_a_byte(bucket_bytes):
    with pytest.raises(ValueError, match="at least 1 byte"):
        plan_buckets([1], [torch.float32], bucket_bytes=bucket_bytes)
