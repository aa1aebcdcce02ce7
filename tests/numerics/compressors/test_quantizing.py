"""Compressors that round, or choose at random: formulas, contractions, vectors that are hard to compress."""

import math

import numpy as np
import pytest
import torch

from offbeat.numerics.compressors.int8 import Int8
from offbeat.numerics.compressors.qsgd import QSGD
from offbeat.numerics.compressors.randomk import RandomK
from offbeat.numerics.compressors.registry import parse_compression
from offbeat.numerics.compressors.sign import Sign
from support.compression import hard, sum_compressed

SHAPES = [torch.Size(shape) for shape in ((20, 30), (20,), (8, 4, 3, 3), (3, 2), ())]
LENGTH = sum(shape.numel() for shape in SHAPES)
METHODS = ["int8", "sign", "qsgd:1", "qsgd:16", "qsgd:127", "randomk:0.1", "randomk:1"]
KINDS = ["normal", "zero", "spike", "constant", "huge range", "denormal", "alternating"]


def spans(shapes=SHAPES):
    start = 0
    for shape in shapes:
        yield slice(start, start + shape.numel()), len(shape) > 1
        start += shape.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_of_any_vector_the_sum_and_the_residuals_are_the_vectors_and_a_repeated_call_is_equal(
    name, kind, dtype
):
    compressor = parse_compression(name).compressor(SHAPES, seed=3)
    own = [hard(kind, LENGTH, seed, dtype) for seed in range(3)]
    outs, ended, _ = sum_compressed(compressor, own)
    again, ended_again, _ = sum_compressed(compressor, own)
    for out, other, one, repeated in zip(outs, again, ended, ended_again, strict=True):
        assert torch.equal(out, outs[0])
        assert torch.equal(out, other)
        assert torch.equal(one.residual, repeated.residual)
        assert one.state == ended[0].state == repeated.state
    largest = max(vector.abs().max() for vector in own)
    error = (sum(one.residual for one in ended) + outs[0] - sum(own)).abs().max()
    assert error <= 20 * torch.finfo(dtype).eps * largest
    assert kind != "zero" or not outs[0].any()


# int8 -----------------------------------------------------------------------------------------------------


def rounded_by_blocks(vector, blocks):
    """Each block rounded to whole multiples of its largest magnitude / 127."""
    rounded = []
    for block in np.split(vector, blocks):
        scale = np.abs(block).max() / 127
        rounded.append(np.rint(block / scale) * scale if scale else block * 0)
    return np.concatenate(rounded)


@pytest.mark.parametrize("kind", ["normal", "zero", "spike", "constant", "huge range", "alternating"])
@pytest.mark.parametrize("members", [2, 3, 5])
@pytest.mark.parametrize(
    ("length", "block"), [(1, 1), (7, None), (256 * 15, None), (256 * 30 + 1, None), (10_000, None)]
)
def test_int8_rounds_each_members_blocks_and_then_the_blocks_of_the_sum(length, block, members, kind):
    own = [hard(kind, length, seed) for seed in range(members)]
    part = math.ceil(length / members)
    blocks = math.ceil(part / 256)
    elements = math.ceil(part / blocks)
    padded = [np.pad(vector.numpy(), (0, members * blocks * elements - length)) for vector in own]
    total = sum(rounded_by_blocks(vector, members * blocks) for vector in padded)
    expected = rounded_by_blocks(total, members * blocks)[:length]
    outs, _, sent = sum_compressed(Int8(), own)
    largest = max(vector.abs().max() for vector in own)
    np.testing.assert_allclose(outs[0].numpy(), expected, rtol=0, atol=1e-14 * members * largest)
    part_bytes = blocks * (8 + elements)
    assert sent == members * part_bytes + part_bytes


def test_int8_sends_a_quarter_of_the_bytes_of_a_ring_in_float32():
    members, length = 4, 1_000_000
    own = [hard("normal", length, seed, torch.float32) for seed in range(members)]
    _, _, sent = sum_compressed(Int8(), own)  # to all members, and an own part
    part_bytes = sent / (members + 1)
    bytes_of_ring = 2 * (members - 1) / members * 4 * length
    assert 3.93 < bytes_of_ring / (2 * (members - 1) * part_bytes) < 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_int8_makes_a_block_with_an_element_that_is_not_finite_not_finite_and_no_other(bad):
    own = [hard("normal", 256 * 12, seed, torch.float32) for seed in range(3)]
    own[1][256 * 5 + 17] = bad
    outs, ended, _ = sum_compressed(Int8(), own)
    for out in outs:
        finite = out.isfinite().view(12, 256)
        assert not finite[5].any()
        assert finite[torch.arange(12) != 5].all()
    assert all(one.residual.isfinite().all() for one in ended)


def test_int8_makes_a_sum_that_overflows_not_finite():
    own = [torch.full((600,), 2e38), torch.full((600,), 2e38)]
    outs, ended, _ = sum_compressed(Int8(), own)
    assert not any(out.isfinite().any() for out in outs)
    assert not any(one.residual.any() for one in ended)


def test_int8_sends_a_block_with_a_scale_below_the_smallest_normal_number_as_zeros():
    tiny = torch.finfo(torch.float32).tiny
    own = [torch.full((600,), 127 * factor * tiny) for factor in (0.5, 1.5)]
    outs, ended, _ = sum_compressed(Int8(), own)
    torch.testing.assert_close(outs[0], own[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(ended[0].residual + ended[1].residual, own[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("members", [2, 3])
def test_with_residuals_int8_sends_elements_far_below_their_blocks_largest_one(members):
    """One that is 1/1000 of the largest is rounded to 0 by each member; sums of two are, by the owner."""
    own = [torch.full((64,), 1e-3, dtype=torch.float64) for _ in range(members)]
    for vector in own:
        vector[::32] = 1.0
    residuals, total, rounds = [torch.zeros(64, dtype=torch.float64)] * members, 0, 400
    for _ in range(rounds):
        outs, ended, _ = sum_compressed(Int8(), [v + r for v, r in zip(own, residuals, strict=True)])
        residuals, total = [one.residual for one in ended], total + outs[0]
    torch.testing.assert_close(total / rounds, sum(own), rtol=0, atol=2 * members / 127 / rounds)


# sign -----------------------------------------------------------------------------------------------------


def test_sign_sends_each_tensors_mean_magnitude_with_signs():
    own = [hard("normal", LENGTH, seed) for seed in range(3)]
    outs, ended, sent = sum_compressed(Sign().compressor(SHAPES, seed=0), own)
    expected, residuals = np.zeros(LENGTH), [np.zeros(LENGTH) for _ in own]
    for span, is_matrix in spans():
        for vector, residual in zip(own, residuals, strict=True):
            x = vector.numpy()[span]
            q = np.abs(x).sum() / len(x) * np.sign(x) if is_matrix else x
            expected[span] += q
            residual[span] = x - q
    np.testing.assert_allclose(outs[0].numpy(), expected, rtol=0, atol=1e-14)
    for one, residual in zip(ended, residuals, strict=True):
        np.testing.assert_allclose(one.residual.numpy(), residual, rtol=0, atol=1e-14)
    assert sent == 3 * 8 + math.ceil((600 + 288 + 6) / 8) + 21 * 8


def test_the_sign_of_zero_is_one():
    vector = torch.tensor([0.0, -0.0, 3.0, -3.0])
    (out, *_), _, _ = sum_compressed(Sign().compressor([torch.Size((2, 2))], seed=0), [vector])
    assert out.tolist() == [1.5, 1.5, 1.5, -1.5]


# qsgd -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "zero", "spike", "constant", "huge range"])
@pytest.mark.parametrize("levels", [1, 4, 127])
def test_qsgd_rounds_at_random_to_levels_of_each_tensors_norm(levels, kind):
    own = [hard(kind, LENGTH, seed) for seed in range(3)]
    expected = np.zeros(LENGTH)
    for member, vector in enumerate(own):
        generator = np.random.default_rng([7, member, 2])
        for span, is_matrix in spans():
            x = vector.numpy()[span]
            if not is_matrix:
                expected[span] += x
            elif x.any():
                d, norm, u = len(x), np.linalg.norm(x), generator.random(len(x))
                tau = 1 + min(d / levels**2, math.sqrt(d) / levels)
                expected[span] += np.sign(x) * norm * np.floor(levels * np.abs(x) / norm + u) / levels / tau
    compressor = QSGD(levels).compressor(SHAPES, seed=7)
    outs, ended, sent = sum_compressed(compressor, own, [2] * 3)
    np.testing.assert_allclose(outs[0].numpy(), expected, rtol=1e-13, atol=1e-14)
    assert [one.state for one in ended] == [3] * 3
    assert sent == 3 * 8 + 600 + 288 + 6 + 21 * 8


def test_qsgd_times_tau_is_the_vector_on_average():
    vector, levels, rounds = hard("normal", 600), 4, 4000
    compressor = QSGD(levels).compressor([torch.Size((20, 30))], seed=1)
    tau, total = 1 + min(600 / levels**2, math.sqrt(600) / levels), 0
    for number in range(rounds):
        total = total + sum_compressed(compressor, [vector], [number])[0][0]
    step = vector.norm() / levels  # of which an element's rounding is at most one, 1/2 on average
    assert (tau * total / rounds - vector).abs().max() < 4 * step * 0.5 / math.sqrt(rounds)


def test_members_and_rounds_of_qsgd_draw_differently():
    vector = hard("normal", 600)
    compressor = QSGD(4).compressor([torch.Size((20, 30))], seed=1)
    _, (first, second), _ = sum_compressed(compressor, [vector, vector], [0, 0])
    _, (later, _), _ = sum_compressed(compressor, [vector, vector], [1, 1])
    assert not torch.equal(first.residual, second.residual)
    assert not torch.equal(first.residual, later.residual)


def test_a_level_above_the_highest_is_never_sent():
    """The element of a tensor with one is its norm, so its level is 127; with this draw 127 + u is 128."""
    round_number = 328_421
    draw = np.random.default_rng([0, 0, round_number]).random(1, dtype=np.float32)
    assert np.float32(127) + draw == 128
    compressor = QSGD(127).compressor([torch.Size((1, 1))], seed=0)
    outs, _, _ = sum_compressed(compressor, [torch.ones(1), torch.zeros(1)], [round_number] * 2)
    torch.testing.assert_close(outs[0], torch.ones(1) / (1 + 1 / 127**2))


# randomk --------------------------------------------------------------------------------------------------


def test_randomk_sums_the_same_elements_of_all_members_and_others_in_each_round():
    own, ratio = [hard("normal", LENGTH, seed) for seed in range(3)], 0.1
    compressor = RandomK(ratio).compressor(SHAPES, seed=0)
    states, chosen = None, []
    for number in range(200):
        outs, ended, sent = sum_compressed(compressor, own, states)
        states = [one.state for one in ended]
        assert states == [number + 1] * 3
        assert sent == 8 * (60 + 29 + 1 + 21)
        chosen.append(outs[0] != 0)
        torch.testing.assert_close(outs[0], torch.where(chosen[-1], sum(own), 0.0), rtol=0, atol=1e-14)
        for one, vector in zip(ended, own, strict=True):
            assert torch.equal(one.residual, torch.where(chosen[-1], 0.0, vector))
        for (span, is_matrix), count in zip(spans(), (60, 20, 29, 1, 1), strict=True):
            assert chosen[-1][span].sum() == count
            assert is_matrix or chosen[-1][span].all()
    often = torch.stack(chosen).double().mean(0)
    assert often.min() > 0
    assert abs(often[:600].mean() - ratio) < 1e-12
    assert often[:600].max() < 0.3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_randomk_sends_no_finite_element_of_a_vector_that_is_not_finite(bad):
    own = [hard("normal", LENGTH, seed) for seed in range(3)]
    compressor = RandomK(0.01).compressor(SHAPES, seed=0)
    chosen = sum_compressed(compressor, own)[0][0] != 0
    own[1][int((~chosen).nonzero()[0])] = bad
    outs, ended, _ = sum_compressed(compressor, own)
    for out in outs:
        assert not out[:600][chosen[:600]].isfinite().any()
    assert all(one.residual.isfinite().all() for one in ended)


# All ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "zero", "spike", "constant", "huge range", "alternating"])
@pytest.mark.parametrize(
    "name", ["topk:0.05", "randomk:0.05", "qsgd:1", "qsgd:16", "qsgd:127", "sign", "int8"]
)
def test_what_is_sent_is_a_contraction(name, kind):
    """E||Q(x) - x||^2 <= (1 - omega) ||x||^2, on average over 400 rounds where it is random."""
    elements, rounds = 900, 400
    vector = hard(kind, elements)
    compressor = parse_compression(name).compressor([torch.Size((30, 30))], seed=5)
    method, _, option = name.partition(":")
    match method:
        case "topk" | "randomk":
            omega = float(option)
        case "qsgd":
            omega = 1 / (1 + min(elements / int(option) ** 2, math.sqrt(elements) / int(option)))
        case "sign":
            omega = float(vector.abs().sum() ** 2 / (elements * vector.norm() ** 2)) if vector.any() else 1.0
            assert omega >= 1 / elements or kind == "zero" or kind == "spike"
        case _:
            omega = 1 - 256 / 254**2  # each of a block's elements is rounded by half a step at most
    is_random = method in ("randomk", "qsgd")
    errors = [
        float((sum_compressed(compressor, [vector], [number])[0][0] - vector).norm() ** 2)
        for number in range(rounds if is_random else 1)
    ]
    spread = 4 * np.std(errors) / math.sqrt(len(errors))
    assert np.mean(errors) <= (1 - omega + 1e-12) * float(vector.norm() ** 2) + spread


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["sign", "qsgd:16"])
def test_no_element_of_a_tensor_that_is_not_finite_is_finite(name, bad):
    own = [hard("normal", LENGTH, seed, torch.float32) for seed in range(3)]
    own[1][3] = bad
    outs, ended, _ = sum_compressed(parse_compression(name).compressor(SHAPES, seed=0), own)
    for out in outs:
        assert not out[:600].isfinite().any()
        assert out[600:].isfinite().all()
    assert not ended[1].residual.any()
    assert all(one.residual.isfinite().all() for one in ended)


@pytest.mark.parametrize(("name", "members"), [("qsgd:16", 8), ("sign", 64)])
def test_with_many_members_a_sum_of_all_elements_has_no_more_bytes(name, members):
    compressor = parse_compression(name).compressor(SHAPES, seed=0)
    for count in (members - 1, members):
        own = [hard("normal", LENGTH, seed, torch.float32) for seed in range(count)]
        outs, ended, sent = sum_compressed(compressor, own)
        is_whole = count == members
        assert torch.equal(outs[0], torch.stack(own).sum(0)) == is_whole
        assert (sent == 4 * LENGTH) == is_whole
        assert any(one.residual.any() for one in ended) != is_whole


@pytest.mark.parametrize("name", ["sign", "qsgd:16", "randomk:0.1"])
def test_a_vector_of_biases_only_is_sent_whole(name):
    own = [hard("normal", 30, seed) for seed in range(3)]
    compressor = parse_compression(name).compressor([torch.Size((20,)), torch.Size((10,))], seed=0)
    outs, ended, sent = sum_compressed(compressor, own)
    assert torch.equal(outs[0], torch.stack(own).sum(0))
    assert not any(one.residual.any() for one in ended)
    assert sent == 8 * 30
