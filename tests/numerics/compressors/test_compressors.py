"""Compressors without any exchange: several members' calls in one process, and the sums between them."""

import math

import numpy as np
import pytest
import torch

from offbeat.numerics.compressors.cast import Cast
from offbeat.numerics.compressors.powersgd import PowerSGD
from offbeat.numerics.compressors.registry import parse_compression
from offbeat.numerics.compressors.topk import TopK
from support.compression import sum_compressed

SHAPES = [torch.Size(shape) for shape in ((20, 30), (20,), (8, 4, 3, 3), (3, 2), ())]
LENGTH = sum(shape.numel() for shape in SHAPES)
MEMBERS = 3


def vectors(seed=0, members=MEMBERS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(LENGTH, generator=generator, dtype=dtype) for _ in range(members)]


def exact(members_vectors):
    return torch.stack(members_vectors).sum(0)


METHODS = ["bf16", "fp16", "powersgd:1", "powersgd:2", "powersgd:100", "topk:0.01", "topk:0.3", "topk:1"]


@pytest.mark.parametrize("name", METHODS)
def test_all_members_get_the_same_sum_and_state_and_their_vectors_are_unchanged(name):
    compressor = parse_compression(name).compressor(SHAPES, seed=1)
    own = vectors()
    before = [vector.clone() for vector in own]
    outs, ended, _ = sum_compressed(compressor, own)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert all(map(torch.equal, own, before))
    for one in ended:
        assert (one.state is None) == (ended[0].state is None)
        for mine, other in zip(one.state or [], ended[0].state or [], strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("name", METHODS)
def test_the_sum_and_all_residuals_are_the_sum_of_the_vectors(name):
    compressor = parse_compression(name).compressor(SHAPES, seed=1)
    outs, ended, _ = sum_compressed(compressor, vectors())
    residuals = [one.residual for one in ended if one.residual is not None]
    tolerance = {"bf16": 3 * 2**-8 * 4, "fp16": 3 * 2**-11 * 4}.get(name, 2e-13)
    torch.testing.assert_close(sum([outs[0], *residuals]), exact(vectors()), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["powersgd:1", "topk:0.01"])
def test_what_is_sent_whole_leaves_no_residual(name):
    _, ended, _ = sum_compressed(parse_compression(name).compressor(SHAPES, seed=1), vectors())
    start = 0
    for shape in SHAPES:
        if len(shape) < 2:
            assert not any(one.residual[start : start + shape.numel()].any() for one in ended)
        start += shape.numel()
    assert all(one.residual.any() for one in ended)


@pytest.mark.parametrize("name", METHODS)
def test_zero_vectors_give_zero_and_a_finite_state(name):
    compressor = parse_compression(name).compressor(SHAPES, seed=1)
    zeros = [torch.zeros(LENGTH, dtype=torch.float64)] * MEMBERS
    outs, ended, _ = sum_compressed(compressor, zeros)
    assert not outs[0].any()
    outs, _, _ = sum_compressed(compressor, vectors(), [one.state for one in ended])
    assert outs[0].isfinite().all()


def test_casts_round_to_their_dtype():
    (out, *_), _, sent = sum_compressed(Cast(torch.bfloat16).compressor(SHAPES, seed=0), vectors(members=1))
    assert torch.equal(out, vectors(members=1)[0].to(torch.bfloat16).double())
    assert sent == 2 * LENGTH


def test_a_full_rank_is_exact_and_what_does_not_pay_is_sent_unchanged():
    compressor = PowerSGD(4).compressor(SHAPES, seed=0)
    low = [torch.zeros(LENGTH, dtype=torch.float64) for _ in range(MEMBERS)]
    generator = torch.Generator().manual_seed(5)
    for vector in low:  # together at most of rank 3
        left, right = torch.randn(20, 1, generator=generator), torch.randn(1, 30, generator=generator)
        vector[:600] = (left.double() @ right.double()).flatten()
        vector[600:] = torch.randn(LENGTH - 600, generator=generator).double()
    outs, _, sent = sum_compressed(compressor, low)
    torch.testing.assert_close(outs[0], exact(low), rtol=0, atol=1e-12)
    assert sent == 8 * ((20 + 30) * 4 + LENGTH - 600)


def test_powersgd_sends_as_few_elements_as_its_paper_says_for_resnet18():
    """Table 3 of the paper for CIFAR-10: 243, 136 and 72 times fewer."""
    from offbeat.models import build_model

    model = build_model("resnet18", sample_shape=(3, 32, 32), classes=10, seed=0)
    shapes = [parameter.shape for parameter in model.parameters()]
    elements = sum(shape.numel() for shape in shapes)
    ratios = []
    for rank in (1, 2, 4):
        compressor = PowerSGD(rank).compressor(shapes, seed=0)
        vector = torch.zeros(elements)
        _, _, sent = sum_compressed(compressor, [vector])
        ratios.append(round(vector.nbytes / sent))
    assert ratios == [243, 136, 72]


def test_powersgd_follows_its_paper_step_by_step():
    """Algorithms 1 and 2 with warm start in float64, for one matrix; with Gram-Schmidt."""
    rank, rows, columns = 2, 20, 30
    shapes = [torch.Size((rows, columns))]
    compressor = PowerSGD(rank).compressor(shapes, seed=7)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(columns, rank, generator=generator, dtype=torch.float64).numpy()
    rng = np.random.default_rng(3)
    errors = [np.zeros((rows, columns)) for _ in range(MEMBERS)]
    residuals, states = [torch.zeros(rows * columns, dtype=torch.float64)] * MEMBERS, [None] * MEMBERS
    for _ in range(6):
        gradients = [rng.normal(size=(rows, columns)) for _ in range(MEMBERS)]
        deltas = [g + e for g, e in zip(gradients, errors, strict=True)]
        p = gram_schmidt(np.mean([delta @ q for delta in deltas], 0))
        q = np.mean([delta.T @ p for delta in deltas], 0)
        errors = [delta - p @ q.T for delta in deltas]
        own = [torch.from_numpy(g).flatten() / MEMBERS + r for g, r in zip(gradients, residuals, strict=True)]
        outs, ended, _ = sum_compressed(compressor, own, states)
        states, residuals = [one.state for one in ended], [one.residual for one in ended]
        np.testing.assert_allclose(outs[0].view(rows, columns).numpy(), p @ q.T, rtol=0, atol=1e-10)
        for residual, error in zip(residuals, errors, strict=True):
            np.testing.assert_allclose(
                MEMBERS * residual.view(rows, columns).numpy(), error, rtol=0, atol=1e-10
            )


def gram_schmidt(matrix):
    columns = []
    for column in matrix.T:
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, 1)


@pytest.mark.parametrize("method", [PowerSGD(1), TopK(0.02)])
def test_with_residuals_the_sums_of_many_rounds_approach_those_of_the_vectors(method):
    compressor = method.compressor(SHAPES, seed=0)
    own, rounds = vectors(seed=2), 200
    total, states, residuals = 0, None, [0.0] * MEMBERS
    for _ in range(rounds):
        outs, ended, _ = sum_compressed(
            compressor, [v + r for v, r in zip(own, residuals, strict=True)], states
        )
        states, residuals = [one.state for one in ended], [one.residual for one in ended]
        total = total + outs[0]
    error = (total / rounds - exact(own)).norm() / exact(own).norm()
    assert error < 0.2
    outs, _, _ = sum_compressed(compressor, own)
    assert (outs[0] - exact(own)).norm() / exact(own).norm() > 0.5  # one round without residuals


def test_of_each_tensor_the_largest_numbers_of_each_member_are_sent():
    own = vectors()
    outs, ended, sent = sum_compressed(TopK(0.05).compressor(SHAPES, seed=0), own)
    expected, start, chosen = torch.zeros(LENGTH, dtype=torch.float64), 0, 0
    for shape in SHAPES:
        stop = start + shape.numel()
        count = math.ceil(0.05 * (stop - start)) if len(shape) > 1 else stop - start
        for vector in own:
            places = start + vector[start:stop].abs().topk(count).indices
            expected[places] += vector[places]
        chosen, start = chosen + (count if len(shape) > 1 else 0), stop
    torch.testing.assert_close(outs[0], expected, rtol=0, atol=1e-12)
    whole = sum(shape.numel() for shape in SHAPES if len(shape) < 2)
    assert sent == chosen * (8 + 4) + whole * 8
    for vector, one in zip(own, ended, strict=True):
        assert torch.equal(one.residual[one.residual != 0], vector[one.residual != 0])


@pytest.mark.parametrize("spread", ["normal", "few large ones", "large where sampled", "equal", "ascending"])
def test_in_a_large_tensor_as_many_are_sent_and_nearly_the_largest(spread):
    """Where a sample estimates the threshold."""
    elements, count = 200_000, 200
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(elements, generator=generator)
    if spread == "few large ones":
        vector[torch.randperm(elements, generator=generator)[:10]] *= 1e6
    elif spread == "large where sampled":  # so the threshold is too high
        vector[::10_000] *= 1e6
    elif spread == "equal":
        vector = torch.ones(elements)
    elif spread == "ascending":
        vector = torch.arange(elements).float()
    compressor = TopK(count / elements).compressor([torch.Size((500, 400))], seed=0)
    (out, *_), _, sent = sum_compressed(compressor, [vector, torch.zeros(elements)])
    assert sent == count * 8
    assert len(out.nonzero()) == count
    largest = vector.abs().topk(count).values
    assert out.abs().sum() >= 0.95 * largest.sum()


def test_a_share_that_is_not_less_than_one_of_the_members_is_summed_whole():
    outs, ended, sent = sum_compressed(TopK(1 / MEMBERS).compressor(SHAPES, seed=0), vectors())
    assert torch.equal(outs[0], exact(vectors()))
    assert sent == 8 * LENGTH
    assert not ended[0].residual.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("elements", [1_000, 200_000])
def test_the_numbers_that_are_not_finite_are_sent_first(bad, elements):
    own = [torch.randn(elements, generator=torch.Generator().manual_seed(seed)) for seed in range(MEMBERS)]
    own[1][3] = bad
    compressor = TopK(0.01).compressor([torch.Size((10, elements // 10))], seed=0)
    outs, ended, _ = sum_compressed(compressor, own)
    assert not outs[0][3].isfinite()
    assert all(one.residual.isfinite().all() for one in ended)
    own[1][:] = bad
    _, ended, _ = sum_compressed(compressor, own)
    assert not ended[1].residual.any()


def test_a_vector_that_is_not_finite_leaves_no_residual_and_no_state():
    compressor = PowerSGD(2).compressor(SHAPES, seed=0)
    own = vectors()
    own[1][3] = math.inf
    outs, ended, _ = sum_compressed(compressor, own)
    assert not outs[0].isfinite().all()
    assert [one.state for one in ended] == [None] * MEMBERS
    assert not any(one.residual.any() for one in ended)


@pytest.mark.parametrize(
    "text",
    ["", "bf15", "powersgd", "powersgd:", "powersgd:x", "powersgd:0", "bf16:2", "topk", "topk:0", "topk:2"],
)
def test_an_unknown_method_is_refused(text):
    with pytest.raises(ValueError, match="expected compress to be bf16, fp16, powersgd:RANK") as raised:
        parse_compression(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "why"), [("powersgd:0", "rank of at least 1, got 0"), ("topk:2", "got 2.0")]
)
def test_an_option_out_of_range_is_named(text, why):
    with pytest.raises(ValueError, match=why):
        parse_compression(text)
