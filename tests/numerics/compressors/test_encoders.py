"""Encoders: what codes stand for, their length, the contraction, and vectors that are hard to encode."""

import math

import numpy as np
import pytest
import torch

from offbeat.numerics.compressors.qsgd import QSGD
from offbeat.numerics.compressors.registry import parse_encoding
from support.compression import hard, sum_compressed

SHAPES = [torch.Size(shape) for shape in ((20, 30), (20,), (8, 4, 3, 3), (3, 2), ())]
LENGTH = sum(shape.numel() for shape in SHAPES)
METHODS = [None, "topk:0.01", "topk:0.1", "topk:1", "sign", "qsgd:1", "qsgd:16", "qsgd:127", "randomk:0.1"]
KINDS = ["normal", "zero", "spike", "constant", "huge range", "denormal", "one of each tensor"]
DTYPES = [torch.float64, torch.float32]


def vector_of(kind, dtype=torch.float64):
    if kind != "one of each tensor":
        return hard(kind, LENGTH, dtype=dtype)
    vector = torch.zeros(LENGTH, dtype=dtype)
    vector[[7, 610, 700, LENGTH - 3]] = torch.tensor([1.0, 2.0, -3.0, 4.0], dtype=dtype)
    return vector


def whole_tensors():
    start = 0
    for shape in SHAPES:
        if len(shape) < 2:
            yield slice(start, start + shape.numel())
        start += shape.numel()


def decoded(encoder, code, like):
    out = torch.full_like(like, torch.nan)
    encoder.decode(code, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_a_code_has_one_length_and_stands_for_the_same_bits_at_every_receiver(name, kind, dtype):
    vector = vector_of(kind, dtype)
    before = vector.clone()
    sender, receiver = (parse_encoding(name).encoder(SHAPES, seed) for seed in (3, 4))
    code = sender.encode(vector, 5)
    assert code.ndim == 1
    assert code.dtype == sender.encode(vector_of("normal", dtype), 0).dtype
    assert len(code) == len(sender.encode(vector_of("normal", dtype), 0))
    assert torch.equal(code, sender.encode(vector, 5))
    assert torch.equal(vector, before)
    out = decoded(sender, code, vector)
    assert torch.equal(out, decoded(receiver, code.clone(), vector))
    assert out.isfinite().all()
    for whole in whole_tensors():
        assert torch.equal(out[whole], vector[whole])
    assert kind != "zero" or not out.any()
    assert name not in (None, "topk:1") or torch.equal(out, vector)


@pytest.mark.parametrize(
    ("name", "code_bytes"),
    [
        (None, 4 * LENGTH),
        ("topk:0.1", 8 * (60 + 29 + 1) + 4 * 21),
        ("sign", 3 * 4 + math.ceil((600 + 288 + 6) / 8) + 4 * 21),
        ("qsgd:16", 3 * 4 + 600 + 288 + 6 + 4 * 21),
        ("randomk:0.1", 16 + 4 * (60 + 29 + 1) + 4 * 21),
    ],
)
def test_bytes_of_a_code_in_float32(name, code_bytes):
    code = parse_encoding(name).encoder(SHAPES, seed=0).encode(vector_of("normal", torch.float32), 0)
    assert code.nbytes == code_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["topk:0.1", "sign", "randomk:0.1"])
def test_a_code_stands_for_what_a_sum_has_of_a_member(name, dtype):
    """Of two members, the other one's zeros add nothing."""
    vector = vector_of("normal", dtype)
    encoder = parse_encoding(name).encoder(SHAPES, seed=3)
    outs, _, _ = sum_compressed(encoder, [vector, torch.zeros_like(vector)], [0, 0])
    assert torch.equal(decoded(encoder, encoder.encode(vector, 0), vector), outs[0])


def test_qsgd_follows_its_formula_with_draws_of_seed_and_number():
    vector = vector_of("normal")
    encoder = QSGD(4).encoder(SHAPES, seed=7)
    out, start, generator = (
        decoded(encoder, encoder.encode(vector, 2), vector),
        0,
        np.random.default_rng([7, 2]),
    )
    for shape in SHAPES:
        x = vector[start : start + shape.numel()].numpy()
        if len(shape) > 1:
            d, norm, u = len(x), np.linalg.norm(x), generator.random(len(x))
            tau = 1 + min(d / 16, math.sqrt(d) / 4)
            x = np.sign(x) * norm * np.floor(4 * np.abs(x) / norm + u) / 4 / tau
        np.testing.assert_allclose(out[start : start + shape.numel()].numpy(), x, rtol=1e-13, atol=1e-14)
        start += shape.numel()


@pytest.mark.parametrize("name", ["qsgd:1", "randomk:0.1"])
def test_seeds_and_numbers_draw_differently(name):
    vector = vector_of("normal")
    first, other = (parse_encoding(name).encoder(SHAPES, seed) for seed in (1, 2))
    outs = [
        decoded(encoder, encoder.encode(vector, number), vector)
        for encoder, number in [(first, 0), (first, 1), (other, 0)]
    ]
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_what_a_code_lacks_is_at_most_a_fraction_of_the_vector(name, kind, dtype):
    """E||Q(x) - x||^2 <= (1 - omega) ||x||^2, on average over 300 rounds where it is random.

    Elements below the smallest normal number may be lost.
    """
    vector = vector_of(kind, dtype)
    encoder = parse_encoding(name).encoder(SHAPES, seed=5)
    assert 0 < encoder.omega() <= 1
    is_random = name is not None and name.partition(":")[0] in ("qsgd", "randomk")
    errors = [
        float((decoded(encoder, encoder.encode(vector, number), vector).double() - vector).norm() ** 2)
        for number in range(300 if is_random else 1)
    ]
    allowed = (1 - encoder.omega()) * float(vector.double().norm() ** 2)
    spread = 4 * np.std(errors) / math.sqrt(len(errors))
    rounding = LENGTH * torch.finfo(dtype).eps * float(vector.double().norm() ** 2)
    below_normal = LENGTH * torch.finfo(dtype).tiny ** 2
    assert np.mean(errors) <= allowed + spread + rounding + below_normal


def test_omega_of_each_method():
    shapes = [torch.Size((40, 50)), torch.Size((10,))]
    for name, omega in [
        (None, 1.0),
        ("topk:0.01", 0.01),
        ("topk:0.0101", 21 / 2000),
        ("randomk:0.1", 0.1),
        ("sign", 1 / 2000),
        ("qsgd:16", 1 / 3.795085),
    ]:
        assert parse_encoding(name).encoder(shapes, seed=0).omega() == pytest.approx(omega, rel=1e-6)
    for name in METHODS:
        assert parse_encoding(name).encoder([torch.Size((10,))], seed=0).omega() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_biases_only_and_no_tensors_at_all_are_encoded_without_loss(name, dtype):
    for shapes in ([torch.Size((20,)), torch.Size((10,))], []):
        vector = vector_of("normal", dtype)[: 30 if shapes else 0]
        encoder = parse_encoding(name).encoder(shapes, seed=0)
        assert torch.equal(decoded(encoder, encoder.encode(vector, 0), vector), vector)


@pytest.mark.parametrize("name", ["bf16", "int8", "powersgd:2", "dgc:0.01", "csc:0.1", "chunks:0.1"])
def test_methods_that_only_compress_sums_have_no_encoder(name):
    with pytest.raises(ValueError, match=rf"expected compress to be sign, .* topk:RATIO.* got '{name}'"):
        parse_encoding(name)


def test_an_encoding_that_is_no_method_is_an_error():
    with pytest.raises(ValueError, match="got 'topk:2'"):
        parse_encoding("topk:2")
