"""Layers with compressed gradients in real jobs: their means, residuals, and workers that wait for others."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offbeat
from offbeat.errors import OffbeatError
from offbeat.numerics.compressors.registry import parse_compression
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.strategies import AllReduce, Hybrid
from support.compression import sum_compressed
from support.processes import run, values
from support.run_logs import wait_until

WORKERS, STEPS, PLANNED, RATE = 3, 7, 2, 0.5  # the plan by layer holds from step PLANNED on
SHAPES = [(20, 30), (20,), (16, 24)]  # the first layer has a matrix and a bias, the second one a matrix
LAYERS = [[0, 1], [2]]
LIGHT = 4  # the step in which the last worker has no sample


class GivenGradients(nn.Module):
    """A layer whose gradients are given."""

    def __init__(self, entries):
        super().__init__()
        self.own = nn.ParameterList([torch.zeros(SHAPES[entry], dtype=torch.float64) for entry in entries])

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.own, gradients, strict=True))


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no gradient")


class Given(nn.Module):
    """All of its gradients are given; it fails on request before the first one is computed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(GivenGradients(entries) for entries in LAYERS)

    def forward(self, gradients, fails=False):
        total = sum(
            layer([gradients[entry] for entry in entries])
            for layer, entries in zip(self.layers, LAYERS, strict=True)
        )
        return FailsInBackward.apply(total) if fails else total


def gradients_of(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def given(rank, emit, strategy, reads):
    """The means of each step, or where nobody reads them, the parameters after all steps."""
    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found, deferred = [], 0
    with offbeat.join(model, optimizer, strategy) as session:
        averager = session._synchronizer.averager
        for step in range(STEPS):
            averager.set_batch_weight(0.0 if step == LIGHT and rank == WORKERS - 1 else 1.0)
            optimizer.zero_grad()
            with pytest.raises(ArithmeticError):
                model(gradients_of(rank, step), fails=True).backward()
            model(gradients_of(rank, step)).backward()
            if reads:
                found.append([parameter.grad.tolist() for parameter in model.parameters()])
            optimizer.step()
            deferred += averager.has_deferred_step
    assert deferred == (0 if reads else STEPS - PLANNED)
    return found or [parameter.tolist() for parameter in model.parameters()]


def expected_means(method, step_plans):
    """What the compressor gives for the buckets of each step, called in one process without any exchange.

    Args:
        step_plans: by step, by bucket, its parameters.
    """
    residuals = [[torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(WORKERS)]
    states = {}
    for step, plan in enumerate(step_plans):
        weights = [1 / WORKERS] * WORKERS
        if step == LIGHT:
            weights[-1] = 0.0
        means = [None] * len(SHAPES)
        for index, entries in enumerate(plan):
            compressor = parse_compression(method).compressor(
                [torch.Size(SHAPES[entry]) for entry in entries], seed=index
            )
            own = [
                torch.cat(
                    [
                        ((gradients_of(rank, step)[entry] + residuals[rank][entry]) * weight).flatten()
                        for entry in entries
                    ]
                )
                for rank, weight in enumerate(weights)
            ]
            outs, ended, _ = sum_compressed(compressor, own, states.get((*entries,)))
            states = {key: value for key, value in states.items() if key in map(tuple, plan)}
            states[*entries,] = [one.state for one in ended]
            mean = outs[0] / sum(weights)
            for rank, weight in enumerate(weights):
                if weight and compressor.keeps_residual:
                    compressor.finish_residual(
                        own[rank], outs[0], ended[rank].residual, share=weight / sum(weights)
                    )
                    parts = (ended[rank].residual / weight).split([size(entry) for entry in entries])
                    for entry, part in zip(entries, parts, strict=True):
                        residuals[rank][entry] = part.view(SHAPES[entry])
            for entry, part in zip(entries, mean.split([size(entry) for entry in entries]), strict=True):
                means[entry] = part.view(SHAPES[entry])
        yield means


def size(entry):
    return torch.Size(SHAPES[entry]).numel()


STEP_PLANS = [[[2, 1, 0]]] * PLANNED + [LAYERS] * (STEPS - PLANNED)


def close(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one, dtype=torch.float64), other, rtol=0, atol=tolerance)


METHODS = [("powersgd:1", 1e-12), ("topk:0.02", 1e-12), ("bf16", 0.05), ("fp16", 0.005)]


@pytest.mark.long(after=2)
@pytest.mark.parametrize(("method", "tolerance"), METHODS)
def test_gradients_that_the_program_reads_are_the_means_that_the_compressor_gives(method, tolerance):
    """Also after backward passes that fail, and in a step in which one worker has no sample."""
    strategy = Hybrid(policy="table4", fuse_bytes=0, compress=method)
    found = values(run(given, WORKERS, strategy, True))
    assert found[0] == found[1] == found[2]
    for means, expected in zip(found[0], expected_means(method, STEP_PLANS), strict=True):
        close(means, expected, tolerance)


@pytest.mark.long(after=2)
@pytest.mark.parametrize(("method", "tolerance"), METHODS)
def test_deferred_steps_use_the_means_that_the_compressor_gives(method, tolerance):
    strategy = Hybrid(policy="ring", fuse_bytes=0, compress=method)
    found = values(run(given, WORKERS, strategy, False))
    assert found[0] == found[1] == found[2]
    sums = [sum(means) for means in zip(*expected_means(method, STEP_PLANS), strict=True)]
    close(found[0], [one * -RATE for one in sums], tolerance * STEPS)


def notes_exchanges(rank, emit, strategy):
    """How often each exchange id and index was used."""
    new_run, used = LinkExchange._new_run, Counter()

    def noted(self, into, operation, exchange_id, index):
        used[exchange_id, index] += 1
        return new_run(self, into, operation, exchange_id, index)

    LinkExchange._new_run = noted
    given(rank, emit, strategy, False)
    return list(used.values())


@pytest.mark.long
@pytest.mark.parametrize("method", ["powersgd:1", "topk:0.02"])
def test_no_two_exchanges_of_a_round_have_the_same_index(method):
    for counts in values(run(notes_exchanges, WORKERS, Hybrid(fuse_bytes=0, compress=method))):
        assert set(counts) == {1}


class Net(nn.Module):
    """Two layers in an order that the caller chooses; the residuals of their matrices are not zero."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.second = nn.Linear(24, 24)

    def forward(self, x, *, turned=False):
        layers = [self.first, self.second]
        for layer in layers[::-1] if turned else layers:
            x = torch.tanh(layer(x))
        return x


def net():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_of(model, optimizer, rank, step, **options):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 24, generator=generator)
    optimizer.zero_grad()
    F.mse_loss(model(x, **options), x.roll(1, 1)).backward()
    optimizer.step()


def bits(model):
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def as_bsp(rank, emit, method):
    torch.set_num_threads(1)
    found = []
    for strategy in (AllReduce(compress=method), Hybrid(fuse_bytes=0, compress=method)):
        model, optimizer = net()
        with offbeat.join(model, optimizer, strategy):
            for step in range(STEPS):
                step_of(model, optimizer, rank, step)
        found.append(bits(model))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("method", ["bf16", "topk:0.05"])
def test_two_workers_end_with_the_bits_of_bsp(method):
    """A sum of two does not depend on the layout of buckets."""
    first, second = values(run(as_bsp, 2, method))
    assert first == second


def reads_while_the_other_waits(rank, emit, folder):
    """After each step, one worker reads the state, and the other does not go on until it has."""
    torch.set_num_threads(1)
    model, optimizer = net()
    with offbeat.join(model, optimizer, Hybrid(fuse_bytes=0, compress="powersgd:1")) as session:
        for step in range(STEPS):
            step_of(model, optimizer, rank, step)
            if rank == step % 2:
                session.refresh()
                (folder / f"{step}").touch()
            wait_until((folder / f"{step}").exists, f"a worker that had read the state after step {step}")
    return bits(model)


def test_a_worker_gets_its_means_while_the_others_are_outside_of_the_session(tmp_path):
    first, second = values(run(reads_while_the_other_waits, 2, tmp_path))
    assert first == second


def turns(rank, emit):
    torch.set_num_threads(1)
    model, optimizer = net()
    with offbeat.join(model, optimizer, Hybrid(fuse_bytes=0, compress="powersgd:1")):
        for step in range(STEPS):
            step_of(model, optimizer, rank, step, turned=step > PLANNED and step % 2 == rank)
    return bits(model)


@pytest.mark.long
def test_workers_may_come_to_layers_in_different_orders():
    first, second = values(run(turns, 2))
    assert first == second


def in_mixed_precision(rank, emit, strategy):
    """The loop is in autocast all the time; layers are waited for in there."""
    torch.set_num_threads(1)
    model, optimizer = net()
    with offbeat.join(model, optimizer, strategy), torch.autocast("cpu", torch.bfloat16):
        for step in range(STEPS):
            step_of(model, optimizer, rank, step)
    return bits(model)


@pytest.mark.parametrize(
    "strategy",
    [AllReduce(compress="powersgd:1"), Hybrid(fuse_bytes=0, compress="powersgd:1")],
    ids=lambda strategy: strategy.name,
)
def test_factors_are_computed_in_full_precision_where_the_program_is_in_autocast(strategy):
    first, second = values(run(in_mixed_precision, 2, strategy))
    assert first == second


def test_a_model_on_an_accelerator_is_refused():
    trained = SimpleNamespace(device=torch.device("cuda:1"))
    with pytest.raises(OffbeatError, match="a model on the CPU with compress=bf16, got one on cuda:1"):
        Hybrid(compress="bf16").make_synchronizer(None, trained)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="expected compress to be bf16, fp16, int8, sign, powersgd:RANK"):
        Hybrid(compress="zip")


@pytest.mark.parametrize("method", ["dgc:0.01", "csc:0.1"])
def test_momentum_correction_is_refused(method):
    with pytest.raises(ValueError, match="expected compress without momentum correction, got"):
        Hybrid(compress=method)
