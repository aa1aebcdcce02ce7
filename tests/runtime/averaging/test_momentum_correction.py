"""Momentum correction in real jobs: the steps that all take, and what becomes of SGD's own momentum."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import OffbeatError
from offbeat.numerics.collectives.buckets import Bucket
from offbeat.numerics.compressors.dgc import DGC
from offbeat.numerics.compressors.momentum import MomentumCorrection, MomentumSettings
from offbeat.numerics.compressors.registry import parse_compression
from offbeat.runtime.averaging.bucket_set import BucketSet
from offbeat.runtime.averaging.compressed_buckets import CompressedBucket
from offbeat.runtime.averaging.sgd_momentum import SGDMomentum
from offbeat.runtime.training.trained import TrainingState
from offbeat.strategies import AllReduce, PartialAllReduce
from offbeat.strategies.registry import parse_strategy
from support.compression import OneMember, OtherSendsZeros
from support.jobs import job
from support.momentum_group import MomentumGroup
from support.processes import run, start, values

WORKERS, STEPS, LR = 3, 8, 0.1
ROWS, FEW_ROWS = 250, 2
STEADY = PartialAllReduce(limit=10**6, shards="equal")
NESTEROV = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}


class Layers(nn.Module):
    """Its gradients are given: two matrices, of which the first has several chunks, and a bias."""

    def __init__(self, rows=ROWS):
        super().__init__()
        self.first = nn.Parameter(torch.ones(rows, 400, dtype=torch.float64))
        self.second = nn.Parameter(torch.ones(16, 24, dtype=torch.float64))
        self.bias = nn.Parameter(torch.ones(20, dtype=torch.float64))

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True))


def gradients_of(rank, step, rows=ROWS):
    generator = torch.Generator().manual_seed(100 * rank + step)
    shapes = [parameter.shape for parameter in Layers(rows).parameters()]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors][::-1])


def step_of(model, optimizer, gradients):
    optimizer.zero_grad()
    model(gradients).backward()
    optimizer.step()


def loop(rank, emit, strategy, options, killed_at=None):
    """The parameters after each step; worker 2 ends itself before one."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, **options)
    found = []
    with offbeat.join(model, optimizer, strategy):
        for step in range(STEPS):
            if rank == 2 and killed_at == step:
                os.kill(os.getpid(), signal.SIGKILL)
            step_of(model, optimizer, gradients_of(rank, step))
            assert {name: optimizer.param_groups[0][name] for name in options} == options
            found.append(flat(model.parameters()).numpy())
    return found


def expected_parameters(method, options, members_of_step, rows=ROWS):
    """What one process computes for all; each worker's momentum and residual stay from step to step."""
    method, settings = parse_compression(method), MomentumSettings(**options)
    shapes = [parameter.shape for parameter in Layers(rows).parameters()][::-1]  # as they lie in a bucket
    group = MomentumGroup(method, shapes, settings, weights=[1 / WORKERS] * WORKERS, clip=method.clip)
    parameters = flat(Layers(rows).parameters())
    for step, members in enumerate(members_of_step):
        gradients = [flat(gradients_of(member, step, rows)) for member in members]
        parameters = parameters - LR * group.round(gradients, parameters, members)
        yield parameters


def check(found, expected):
    for mine, parameters in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), parameters, rtol=0, atol=1e-12)


def agree(found):
    for one in found[1:]:
        assert all(map(torch.equal, map(torch.from_numpy, one), map(torch.from_numpy, found[0])))


@pytest.mark.parametrize(
    ("strategy", "method", "options"),
    [
        (AllReduce(), "dgc:0.02", {"momentum": 0.9}),
        (AllReduce(), "dgc:0.02:warmup=2:clip=3", NESTEROV),
        (AllReduce(), "csc:0.3", {"momentum": 0.9}),
        (AllReduce(), "csc:0.3:warmup=2:clip=3", NESTEROV),
        (STEADY, "dgc:0.02", NESTEROV),
        (STEADY, "csc:0.3", NESTEROV),
    ],
)
def test_all_workers_take_the_steps_that_the_formulas_give(strategy, method, options):
    found = values(run(loop, WORKERS, replace(strategy, compress=method), options))
    agree(found)
    check(found[0], expected_parameters(method, options, [range(WORKERS)] * STEPS))


@pytest.mark.parametrize("method", ["dgc:0.02", "csc:0.3"])
def test_a_round_that_is_repeated_without_a_lost_worker_begins_with_the_same_momentum(method):
    with start(loop, WORKERS, replace(STEADY, compress=method), NESTEROV, 3) as running:
        *survivors, lost = running.ends()
    assert lost.exitcode == -signal.SIGKILL
    found = values(survivors)
    agree(found)
    members_of_step = [range(3)] * 3 + [range(2)] * (STEPS - 3)
    check(found[0], expected_parameters(method, NESTEROV, members_of_step))


def resumed_loop(rank, emit, strategy, options):
    """The parameters after each step; the first worker has a momentum buffer, and rates and momentum change.

    One parameter's gradient is the first worker's alone, and that of another one no worker's in some steps.
    """
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, **options)
    if rank == 0:
        step_of(model, optimizer, gradients_of(5, 0))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS)
    found = []
    with offbeat.join(model, optimizer, strategy):
        for step in range(STEPS):
            optimizer.zero_grad()
            gradients = gradients_of(rank, step)
            loss = (model.first * gradients[0]).sum()
            if rank == 0:
                loss = loss + (model.second * gradients[1]).sum()
            if step % 3:
                loss = loss + (model.bias * gradients[2]).sum()
            loss.backward()
            optimizer.step()
            scheduler.step()
            found.append(flat(model.parameters()).numpy())
    assert optimizer.param_groups[0]["momentum"] > 0
    assert not any(optimizer.state.values())
    return found


def momentum_sgd(options):
    """The same with torch's optimizer in one process."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, **options)
    step_of(model, optimizer, gradients_of(5, 0))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS)
    for step in range(STEPS):
        of_workers = [gradients_of(rank, step) for rank in range(2)]
        first, _, bias = (torch.stack(pair).mean(0) for pair in zip(*of_workers, strict=True))
        model.first.grad, model.second.grad = first, of_workers[0][1] / 2
        model.bias.grad = bias if step % 3 else None
        optimizer.step()
        scheduler.step()
        yield flat(model.parameters())


@pytest.mark.parametrize("options", [{"momentum": 0.9}, NESTEROV], ids=["plain", "nesterov, weight decay"])
@pytest.mark.parametrize("method", ["dgc:1", "csc:1", "dgc:0.5"])
def test_where_all_is_sent_training_goes_on_as_with_momentum_sgd(method, options):
    """With a momentum buffer from before, a scheduler of rates and momentum, and missing gradients."""
    found = values(run(resumed_loop, 2, AllReduce(compress=method), options))
    agree(found)
    check(found[0], momentum_sgd(options))


def loop_until_three_steps_of_three(rank, emit, strategy):
    """The members and the parameters of each step, by number; a newcomer has those from where it joins."""
    model = Layers(FEW_ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, **NESTEROV)
    found, steps_of_three = {}, 0
    with offbeat.join(model, optimizer, strategy) as session:
        while steps_of_three < 3:
            step = session.step
            optimizer.zero_grad()
            model(gradients_of(session.worker, step, FEW_ROWS)).backward()
            members = session.members
            optimizer.step()
            found[step] = members, flat(model.parameters()).numpy()
            steps_of_three += len(members) == 3
            if step == 2:
                emit("here")
    return found


def test_momentum_stays_when_a_group_grows_and_a_newcomer_begins_without():
    strategy = PartialAllReduce(limit=10**6, compress="dgc:0.02")
    with job(loop_until_three_steps_of_three, 2, strategy) as running:
        running.receive(0)
        running.add(loop_until_three_steps_of_three, strategy)
        found, other, newcomers = values(running.ends())
    assert found.keys() == other.keys()
    agree([[one[step][1] for step in newcomers] for one in (found, other, newcomers)])
    assert len(newcomers) == 3
    members_of_step = [members for members, _ in found.values()]
    expected = expected_parameters("dgc:0.02", NESTEROV, members_of_step, FEW_ROWS)
    check([parameters for _, parameters in found.values()], expected)


class OneParameter:
    """A bucket with the gradient of one matrix, of which a tenth is sent."""

    def __init__(self, options=NESTEROV):
        self.settings, self.residuals, self.correction = MomentumSettings(**options), {}, MomentumCorrection()
        plan = Bucket(dtype=torch.float64, entries=(0,), offsets=(0,), elements=600)
        self.bucket = CompressedBucket(
            plan,
            [torch.Size((20, 30))],
            1,
            lambda elements, dtype: torch.zeros(elements, dtype=dtype),
            method=DGC(ratio=0.1),
            seed=0,
            residuals=self.residuals,
            momentum=self.correction,
        )

    def exchange(self, seed, exchange=None, weight=1.0):
        view = self.bucket.packing_view(0)
        gradient = torch.randn(20, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        residual = self.residuals.get(0)
        zeros = torch.zeros(20, 30, dtype=torch.float64)
        self.correction.write(
            0, gradient, zeros, self.settings, view, scale=weight, residual=residual, members=2
        )
        self.bucket.all_reduce(exchange or OtherSendsZeros(), exchange_id=1, index=0).wait(1.0)

    def commit(self, *, own_weight=1.0, used=1.0):
        self.bucket.commit(own_weight=own_weight, weight=1.0, used=[used])
        self.bucket.end_round()

    def memory(self):
        return self.correction._momenta[0].clone(), self.residuals[0].clone()


@pytest.mark.parametrize("options", [{"momentum": 0.9}, NESTEROV], ids=["plain", "nesterov"])
def test_momentum_changes_only_when_the_means_are_used(options):
    once, repeated = OneParameter(options), OneParameter(options)
    for seed in range(4):
        once.exchange(seed)
        once.commit()
        for _ in range(2):
            repeated.exchange(seed)
        repeated.commit()
        assert all(map(torch.equal, once.memory(), repeated.memory()))


def test_momentum_stays_where_the_worker_has_no_weight_or_the_gradient_is_not_used():
    one = OneParameter()
    one.exchange(0)
    one.commit()
    before = one.memory()
    for own_weight, used in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        one.exchange(1, weight=own_weight)
        one.commit(own_weight=own_weight, used=used)
        assert all(map(torch.equal, one.memory(), before))


def test_the_last_member_of_a_group_sends_all_and_keeps_its_momentum():
    one = OneParameter({"momentum": 0.9})
    one.exchange(0)
    one.commit()
    momentum, residual = one.memory()
    one.exchange(1, OneMember())
    gradient = torch.randn(20, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).flatten()
    torch.testing.assert_close(one.bucket.output.flat, gradient + 0.9 * momentum + residual)
    one.commit()
    after, residual = one.memory()
    torch.testing.assert_close(after, gradient + 0.9 * momentum)
    assert not residual.any()


def small(**options):
    model = nn.Linear(3, 4)
    return TrainingState(model, [torch.optim.SGD(model.parameters(), lr=0.1, **options)])


def test_a_worker_that_receives_a_state_drops_its_momentum():
    trained = small(momentum=0.9)
    momentum = SGDMomentum(trained, DGC(ratio=0.1))
    parameters = list(trained.model.parameters())
    buckets = BucketSet(trained.model, parameters, None, list, workers=2, bucket_bytes=1, momentum=momentum)
    momentum.correction.take_over(0, torch.ones(4, 3), torch.float32)
    buckets.discard_gradients()
    assert not momentum.correction._momenta


def test_the_optimizer_has_its_options_but_while_it_steps():
    trained = small(momentum=0.9, weight_decay=0.1)
    (optimizer,), (group,) = trained.optimizers, trained.groups
    seen = []
    momentum = SGDMomentum(trained, DGC(ratio=0.1))
    momentum.attach()
    optimizer.register_step_pre_hook(lambda *_: seen.append((group["momentum"], group["weight_decay"])))
    for _ in range(2):
        momentum.withhold()
        optimizer.step()
        assert (group["momentum"], group["weight_decay"]) == (0.9, 0.1)
    assert seen == [(0.0, 0.0)] * 2
    momentum.withhold()
    momentum.withhold()  # a step has raised an exception
    momentum.detach()
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.1)
    optimizer.step()
    assert seen[-1] == (0.9, 0.1)


def accumulate(rank, emit, synchronizes):
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    with offbeat.join(model, optimizer, AllReduce(compress="dgc:1")) as session:
        if synchronizes:
            model(gradients_of(rank, 0)).backward()
        else:
            with session.no_sync():
                model(gradients_of(rank, 0)).backward()
        model(gradients_of(rank, 1)).backward()
        optimizer.step()
    return flat(model.parameters()).numpy()


def test_gradients_are_accumulated_without_an_exchange_and_a_second_one_is_refused():
    found = values(run(accumulate, 2, False))
    mean = sum(flat(gradients_of(rank, step)) for rank in range(2) for step in range(2)) / 2
    check(found, [1 - LR * mean] * 2)
    for one in run(accumulate, 2, True):
        assert one.was_ended_by("OffbeatError"), one
        assert "session.no_sync()" in one.error


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 30, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("model", "optimizer", "got"),
    [
        (nn.Linear(3, 4), lambda p: torch.optim.Adam(p), "got Adam"),
        (nn.Linear(3, 4), lambda p: torch.optim.SGD(p), "got SGD with momentum=0"),
        (
            nn.Linear(3, 4),
            lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1),
            "SGD with dampening=0.1",
        ),
        (nn.Linear(3, 4), lambda p: torch.optim.SGD(p, momentum=0.9, maximize=True), "with maximize=True"),
        (Complex(), lambda p: torch.optim.SGD(p, momentum=0.9), "SGD with complex parameters"),
    ],
)
@pytest.mark.parametrize("method", ["dgc:0.01", "csc:0.1"])
def test_another_optimizer_is_refused(method, model, optimizer, got):
    trained = TrainingState(model, [optimizer(model.parameters())])
    with pytest.raises(OffbeatError, match=f"{got}: use compress=topk:RATIO"):
        AllReduce(compress=method).make_synchronizer(SimpleNamespace(world=2), trained)


def test_the_command_line_takes_a_method_with_options():
    strategy = parse_strategy("bsp:compress=dgc:0.001:warmup=5,timeout_s=7")
    assert strategy == AllReduce(compress="dgc:0.001:warmup=5", timeout_s=7.0)


def test_late_gradients_are_refused():
    with pytest.raises(ValueError, match="late=join needs compression without momentum correction"):
        PartialAllReduce(late="join", compress="dgc:0.01")
