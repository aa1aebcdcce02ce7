"""Chunked top-k: what is chosen and rounded, its bytes, and what residuals hold."""

import math

import pytest
import torch

from offbeat.numerics.compressors.chunked_topk import ChunkedTopK
from offbeat.numerics.compressors.registry import parse_compression
from support.compression import sum_compressed

SHAPES = [torch.Size(shape) for shape in ((100, 90), (20,), (64, 64), (3, 2), ())]  # 2 chunks and 808, ...
LENGTH = sum(shape.numel() for shape in SHAPES)
RATIO = 0.01


def vectors(members=3, dtype=torch.float64, seed=0):
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(LENGTH, generator=chance, dtype=dtype) for _ in range(members)]


def rounded(vector):
    """What a member sends of a vector: by hand, chunk by chunk."""
    sent, start = torch.zeros_like(vector), 0
    for shape in SHAPES:
        tensor, out = (one[start : start + shape.numel()] for one in (vector, sent))
        start += shape.numel()
        if len(shape) < 2:
            out.copy_(tensor)
            continue
        places = []
        for first in range(0, len(tensor), 4096):
            chunk = tensor[first : first + 4096]
            places += (first + chunk.abs().argsort(descending=True)[: math.ceil(RATIO * len(chunk))]).tolist()
        sizes = tensor[places].abs()
        for place, size in zip(places, sizes, strict=True):
            is_large = sizes > sizes.mean()
            alike = sizes[is_large if size > sizes.mean() else ~is_large]
            out[place] = alike.mean() * tensor[place].sign()
    return sent


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_of_each_chunk_the_largest_are_sent_as_one_of_two_magnitudes_of_their_tensor(dtype):
    own = vectors(dtype=dtype)
    outs, ended, _ = sum_compressed(ChunkedTopK(RATIO).compressor(SHAPES, seed=1), own)
    assert all(torch.equal(out, outs[0]) for out in outs)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    sent = [rounded(vector) for vector in own]
    torch.testing.assert_close(outs[0], sum(sent), rtol=0, atol=tolerance)
    for one, vector, of_vector in zip(ended, own, sent, strict=True):
        torch.testing.assert_close(one.residual, vector - of_vector, rtol=0, atol=tolerance)


def test_each_element_takes_14_bits():
    shapes = [torch.Size((1024, 1024))]
    own = [torch.randn(1 << 20, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    _, _, sent_bytes = sum_compressed(ChunkedTopK(0.0156).compressor(shapes, seed=1), own)
    elements = 256 * math.ceil(0.0156 * 4096)
    assert sent_bytes == 14 * elements / 8 + 2 * 4
    assert 140 < 4 * (1 << 20) / sent_bytes < 147  # against float32, as the paper counts


def test_with_residuals_the_sums_of_many_rounds_approach_those_of_the_vectors():
    compressor, own = ChunkedTopK(RATIO).compressor(SHAPES, seed=1), vectors(2)
    residuals, total = [0.0, 0.0], torch.zeros(LENGTH, dtype=torch.float64)
    for _ in range(400):
        outs, ended, _ = sum_compressed(
            compressor, [vector + residual for vector, residual in zip(own, residuals, strict=True)]
        )
        residuals = [one.residual for one in ended]
        total += outs[0]
    assert (total / 400 - sum(own)).norm() < 0.2 * sum(own).norm()


def test_zeros_are_sent_as_zeros():
    outs, ended, _ = sum_compressed(
        ChunkedTopK(RATIO).compressor(SHAPES, seed=1), [torch.zeros(LENGTH) for _ in range(3)]
    )
    assert not outs[0].any()
    assert not ended[0].residual.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_sent_and_leave_no_residual(bad):
    own = vectors()
    own[1][5000] = bad
    outs, ended, _ = sum_compressed(ChunkedTopK(RATIO).compressor(SHAPES, seed=1), own)
    assert not outs[0][5000].isfinite()
    assert outs[0][9000:].isfinite().all()  # other tensors
    assert not ended[1].residual.any()
    assert ended[0].residual.any()


def test_where_a_sum_has_no_more_bytes_it_is_taken():
    own = vectors(8)
    outs, _, sent_bytes = sum_compressed(ChunkedTopK(0.6).compressor(SHAPES, seed=1), own)
    assert sent_bytes == own[0].nbytes
    torch.testing.assert_close(outs[0], sum(own), rtol=0, atol=1e-12)


def test_it_is_named_chunks_and_its_ratio_is_checked():
    assert parse_compression("chunks:0.0156") == ChunkedTopK(0.0156)
    with pytest.raises(ValueError, match="expected a ratio of more than 0 and at most 1, got 0"):
        parse_compression("chunks:0")
