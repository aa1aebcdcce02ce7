"""Momentum correction with DGC and CSC: several members in one process, in float64."""

import math

import pytest
import torch

from offbeat.models import build_model
from offbeat.numerics.collectives.buckets import plan_buckets
from offbeat.numerics.compressors.csc import CSC
from offbeat.numerics.compressors.dgc import DGC
from offbeat.numerics.compressors.interface import AllGather
from offbeat.numerics.compressors.momentum import MomentumSettings
from offbeat.numerics.compressors.registry import parse_compression
from support.compression import sum_compressed
from support.momentum_group import MomentumGroup

SHAPES = [torch.Size(shape) for shape in ((20, 30), (20,), (8, 4, 3, 3), (3, 2), ())]
SIZES = [shape.numel() for shape in SHAPES]
LENGTH, MEMBERS, ROUNDS = sum(SIZES), 3, 12
PLAIN = MomentumSettings(0.9)
SETTINGS = [
    PLAIN,
    MomentumSettings(0.9, True),
    MomentumSettings(0.7, False, 0.1),
    MomentumSettings(0.7, True, 0.1),
]
CHUNK = 50  # elements
SPARSE = [DGC(ratio=0.02), CSC(ratio=0.1, chunk_elements=CHUNK)]


def vectors(seed, members=MEMBERS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(LENGTH, generator=generator, dtype=torch.float64) for _ in range(members)]


def group_of(method, settings=PLAIN, *, weights=(1 / MEMBERS,) * MEMBERS, **options):
    return MomentumGroup(method, SHAPES, settings, weights=weights, **options)


def momentum_sgd(settings, gradients_of_round, lr):
    """The parameters after each round, with torch's optimizer and the mean gradient."""
    parameter = torch.nn.Parameter(torch.ones(LENGTH, dtype=torch.float64))
    momentum, nesterov, weight_decay = settings
    optimizer = torch.optim.SGD(
        [parameter], lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
    )
    for gradients in gradients_of_round:
        parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()
        yield parameter.detach()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("method", [DGC(ratio=1), CSC(ratio=1), DGC(ratio=1 / MEMBERS), CSC(ratio=0.001)])
def test_where_all_is_sent_each_step_is_that_of_momentum_sgd(method, settings):
    """A share of 1/N is sent whole, and so is the only chunk of a vector."""
    group, parameters = group_of(method, settings), torch.ones(LENGTH, dtype=torch.float64)
    rounds = [vectors(seed) for seed in range(ROUNDS)]
    for gradients, expected in zip(rounds, momentum_sgd(settings, rounds, lr=0.1), strict=True):
        parameters = parameters - 0.1 * group.round(gradients, parameters)
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)
        assert not any(residual.any() for residual in group.residuals)


def official_dgc(gradients_of_round, ratio, settings, clip):
    """Deep gradient compression as its authors' code computes it, with an exact threshold.

    The weight decay is added to the gradient after it was clipped.
    """
    m, nesterov, _ = settings
    count = {entry: math.ceil(ratio * size) for entry, size in enumerate(SIZES) if len(SHAPES[entry]) > 1}
    u, v = (
        [[torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(MEMBERS)] for _ in "uv"
    )
    for gradients in gradients_of_round:
        mean = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        for member, gradient in enumerate(gradients):
            for entry, g in enumerate(gradient.split(SIZES)):
                limit = math.inf if clip is None else clip / math.sqrt(MEMBERS)
                g = g * min(1, limit / float(g.norm()))
                mine_u = m * (u[member][entry] + g) if nesterov else m * u[member][entry] + g
                mine_v = v[member][entry] + mine_u + g if nesterov else v[member][entry] + mine_u
                if entry in count:
                    chosen = mine_v.abs().topk(count[entry]).indices
                    mean[entry][chosen] += mine_v[chosen] / MEMBERS
                    mine_u[chosen] = mine_v[chosen] = 0
                else:
                    mean[entry] += mine_v / MEMBERS
                    mine_v = torch.zeros_like(mine_v)
                u[member][entry], v[member][entry] = mine_u, mine_v
        yield torch.cat(mean)


@pytest.mark.parametrize("clip", [None, 3.0])
@pytest.mark.parametrize("settings", SETTINGS[:2])
def test_dgc_follows_its_authors_formulas(settings, clip):
    rounds = [vectors(seed) for seed in range(ROUNDS)]
    group, parameters = (
        group_of(DGC(ratio=0.02), settings, clip=clip),
        torch.zeros(LENGTH, dtype=torch.float64),
    )
    for gradients, expected in zip(rounds, official_dgc(rounds, 0.02, settings, clip), strict=True):
        torch.testing.assert_close(group.round(gradients, parameters), expected, rtol=0, atol=1e-12)


def reference_csc(gradients_of_round, ratio):
    """CSC with plain momentum: what was left of the round before says which chunks are sent."""
    chunks = torch.arange(LENGTH) // CHUNK
    number = int(chunks[-1]) + 1
    u, v = (torch.zeros(MEMBERS, LENGTH, dtype=torch.float64) for _ in "uv")
    norms = None
    for gradients in gradients_of_round:
        u = 0.9 * u + torch.stack(gradients)
        v = v + u
        if norms is None:
            norms = torch.zeros(number, dtype=torch.float64).index_add_(0, chunks, v.abs().sum(0))
        largest = sorted(range(number), key=lambda k: (-norms[k], k))[: math.ceil(ratio * number)]
        is_sent = torch.isin(chunks, torch.tensor(largest))
        yield torch.where(is_sent, v.mean(0), 0.0), set(largest)
        v = v.masked_fill(is_sent, 0)
        norms = torch.zeros(number, dtype=torch.float64).index_add_(0, chunks, v.abs().sum(0))


def test_csc_follows_its_formulas():
    rounds = [vectors(seed) for seed in range(6 * ROUNDS)]
    group, parameters = group_of(SPARSE[1]), torch.zeros(LENGTH, dtype=torch.float64)
    sent = set()
    for gradients, (expected, chunks) in zip(rounds, reference_csc(rounds, 0.1), strict=True):
        torch.testing.assert_close(group.round(gradients, parameters), expected, rtol=0, atol=1e-12)
        sent |= chunks
    assert len(sent) == math.ceil(LENGTH / CHUNK)


@pytest.mark.parametrize("method", SPARSE)
def test_without_masking_all_updates_are_what_was_sent_and_what_is_left(method):
    group, parameters = group_of(method, masks=False), torch.zeros(LENGTH, dtype=torch.float64)
    sent, updates, momenta = 0.0, 0.0, torch.zeros(MEMBERS, LENGTH, dtype=torch.float64)
    for seed in range(ROUNDS):
        gradients = vectors(seed)
        sent = sent + MEMBERS * group.round(gradients, parameters)
        momenta = 0.9 * momenta + torch.stack(gradients)
        updates = updates + momenta.sum(0)
        torch.testing.assert_close(torch.stack(group.momenta()), momenta, rtol=0, atol=1e-12)
    torch.testing.assert_close(sent + sum(group.residuals), updates, rtol=2e-13, atol=2e-13 * ROUNDS)


def test_dgc_drops_the_momentum_of_what_is_chosen_and_sent_and_no_other():
    group, masked = group_of(SPARSE[0], masks=False), group_of(SPARSE[0])
    group.round(vectors(1), torch.zeros(LENGTH, dtype=torch.float64))
    masked.round(vectors(1), torch.zeros(LENGTH, dtype=torch.float64))
    for kept, mine, residual in zip(group.momenta(), masked.momenta(), masked.residuals, strict=True):
        chosen = residual == 0
        for part, shape in zip(chosen.split(SIZES), SHAPES, strict=True):
            if len(shape) < 2:
                part.fill_(False)  # sent whole
        assert chosen.any()
        assert torch.equal(mine, kept.masked_fill(chosen, 0))


@pytest.mark.parametrize("seed", range(3))
def test_members_count_by_weight(seed):
    """As one member, whose gradient is the weighted mean, where all is sent."""
    weights = (0.5, 0.125, 0.25)
    group = group_of(DGC(ratio=1), weights=weights)
    alone = group_of(DGC(ratio=1), weights=(1.0,))
    parameters = torch.zeros(LENGTH, dtype=torch.float64)
    for number in range(ROUNDS):
        gradients = vectors(100 * seed + number)
        mean = sum(w * g for w, g in zip(weights, gradients, strict=True)) / sum(weights)
        torch.testing.assert_close(
            group.round(gradients, parameters), alone.round([mean], parameters), rtol=0, atol=1e-12
        )


def test_dgc_sends_more_during_its_warmup():
    method = DGC(ratio=0.001, warmup=4)
    assert method.ratio_in(0) == pytest.approx(0.001 ** (1 / 5))
    assert [method.ratio_in(number) for number in (4, 5, 100)] == [0.001] * 3
    group, parameters = group_of(method), torch.zeros(LENGTH, dtype=torch.float64)
    whole = sum(size for size, shape in zip(SIZES, SHAPES, strict=True) if len(shape) < 2)
    for number in range(7):
        group.round(vectors(number), parameters)
        ratio = 0.001 ** (min(number + 1, 5) / 5)
        if ratio * MEMBERS >= 1:
            assert group.sent_bytes == 8 * LENGTH
            continue
        counts = [math.ceil(ratio * s) for s, shape in zip(SIZES, SHAPES, strict=True) if len(shape) > 1]
        assert group.sent_bytes == (8 + 4) * sum(counts) + 8 * whole


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
def test_csc_sends_as_many_chunks_and_their_magnitudes(ratio):
    group, parameters = (
        group_of(CSC(ratio=ratio, chunk_elements=CHUNK)),
        torch.zeros(LENGTH, dtype=torch.float64),
    )
    chunks = math.ceil(LENGTH / CHUNK)
    last = LENGTH - (chunks - 1) * CHUNK
    for number in range(ROUNDS):
        group.round(vectors(number), parameters)
        extra = chunks if number == 0 else 0
        full = math.ceil(ratio * chunks) * CHUNK + chunks + extra
        assert group.sent_bytes in (8 * full, 8 * (full - CHUNK + last))


def test_csc_takes_the_first_of_equal_chunks():
    group = group_of(SPARSE[1])
    mean = group.round([torch.ones(LENGTH, dtype=torch.float64)] * MEMBERS, torch.zeros(LENGTH).double())
    assert mean.nonzero().flatten().tolist() == list(
        range(math.ceil(0.1 * math.ceil(LENGTH / CHUNK)) * CHUNK)
    )


@pytest.mark.parametrize("where", [0, LENGTH - 1])
@pytest.mark.parametrize("method", SPARSE)
def test_a_small_persistent_gradient_is_sent_in_the_end(method, where):
    group, parameters = group_of(method), torch.zeros(LENGTH, dtype=torch.float64)
    sent = 0.0
    for number in range(400):
        gradients = vectors(number)
        for gradient in gradients:
            gradient[where // CHUNK * CHUNK :][:CHUNK] = 0
            gradient[where] = 0.5
        sent += float(group.round(gradients, parameters)[where])
    assert sent > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", [*SPARSE, DGC(ratio=1)])
def test_a_gradient_that_is_not_finite_leaves_neither_residual_nor_momentum(method, bad):
    group, parameters = group_of(method), torch.zeros(LENGTH, dtype=torch.float64)
    for number in range(40):
        gradients = vectors(number)
        if number == 3:
            gradients[1][3], gradients[1][605] = bad, bad
        mean = group.round(gradients, parameters)
        assert mean.isfinite().all() or number == 3 or isinstance(method, CSC)
        assert all(one.isfinite().all() for one in [*group.residuals, *group.momenta()])
    assert mean.isfinite().all()


def test_dgc_of_resnet18_sends_250_times_fewer_bytes_than_a_ring_of_4_and_125_of_8():
    """Of tensors with at least two dimensions; with the others, which are sent whole, 206 and 113 times."""
    shapes = resnet18_shapes()
    elements = sum(shape.numel() for shape in shapes)
    compressor = DGC(ratio=0.001).compressor(shapes, seed=0)
    for members, of_matrices, of_all in ((4, 250, 206), (8, 125, 113)):
        sums, gathers = requested_bytes(compressor, torch.zeros(elements), members)
        vectors_bytes = sum(4 * shape.numel() for shape in shapes if len(shape) < 2)
        assert sums == vectors_bytes
        ring, others = 2 * (members - 1) / members, members - 1
        assert ring * (4 * elements - vectors_bytes) / (others * gathers) == pytest.approx(
            of_matrices, rel=0.01
        )
        assert ring * 4 * elements / (others * gathers + ring * sums) == pytest.approx(of_all, rel=0.01)


def test_csc_of_resnet18_in_buckets_of_25_mib_sends_9_times_fewer_bytes():
    """Each bucket's number of chunks is rounded up."""
    shapes = resnet18_shapes()
    sizes = [shape.numel() for shape in shapes]
    sent = 0
    for bucket in plan_buckets(sizes, [torch.float32] * len(sizes), bucket_bytes=25 * 2**20):
        compressor = CSC(ratio=0.1).compressor([shapes[entry] for entry in bucket.entries], seed=0)
        sums, gathers = requested_bytes(compressor, torch.ones(bucket.elements), 4)
        assert not gathers
        sent += sums
    assert 4 * sum(sizes) / sent == pytest.approx(9.2, abs=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_csc_hides_no_element_that_is_not_finite(value):
    """The second member's is in a chunk that is not sent; afterwards sums are finite again."""
    compressor = CSC(ratio=0.25, chunk_elements=4).compressor([torch.Size([4, 4])], seed=0)
    large = torch.zeros(16, dtype=torch.float64)
    large[:4] = 100.0
    _, ended, _ = sum_compressed(compressor, [large, large])
    wrong = large.clone()
    wrong[13] = value
    outs, ended, _ = sum_compressed(compressor, [large, wrong], [one.state for one in ended])
    assert all(out.isnan().all() for out in outs)
    outs, ended, _ = sum_compressed(compressor, [large, large], [one.state for one in ended])
    assert all(torch.equal(out, 2 * large) for out in outs)


def resnet18_shapes():
    model = build_model("resnet18", sample_shape=(3, 32, 32), classes=10, seed=0)
    return [parameter.shape for parameter in model.parameters()][::-1]


def requested_bytes(compressor, vector, members):
    """Of one member's requests, by kind: sums and gathers."""
    call = compressor.sum(vector, vector.clone(), vector.clone(), None, members=members, position=0)
    found, answer = {True: 0, False: 0}, None
    while True:
        try:
            request = call.send(answer)
        except StopIteration:
            return found[False], found[True]
        is_gather = isinstance(request, AllGather)
        found[is_gather] += request.values.nbytes
        answer = request.values.repeat(members, 1) if is_gather else request.values


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("dgc:0.001", DGC(ratio=0.001)),
        ("dgc:0.001:warmup=500:clip=0.5", DGC(ratio=0.001, warmup=500, clip=0.5)),
        ("csc:0.1:clip=2", CSC(ratio=0.1, clip=2.0)),
    ],
)
def test_methods_are_parsed(text, method):
    assert parse_compression(text) == method


@pytest.mark.parametrize(
    "text",
    ["dgc", "dgc:", "dgc:0", "csc:1.1", "dgc:0.1:warm=1", "dgc:0.1:warmup=-1", "dgc:0.1:clip=0", "csc:0.1:",
     "csc:0.1:clip=1:clip=1", "dgc:0.1:warmup=0.5", "dgc:0.1:clip=nan"],
)  # fmt: skip
def test_an_option_out_of_range_is_refused(text):
    with pytest.raises(ValueError, match="expected compress to be bf16") as raised:
        parse_compression(text)
    assert repr(text) in str(raised.value)
