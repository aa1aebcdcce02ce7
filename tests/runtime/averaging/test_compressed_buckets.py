"""Compressed gradients in real jobs: what all get, which residuals stay, and what a lost worker changes."""

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import OffbeatError
from offbeat.numerics.collectives.buckets import Bucket
from offbeat.numerics.compressors import powersgd
from offbeat.numerics.compressors.momentum import MomentumCorrecting
from offbeat.numerics.compressors.registry import parse_compression
from offbeat.runtime.averaging.bucket_set import BucketSet
from offbeat.runtime.averaging.buckets import write_scaled
from offbeat.runtime.averaging.compressed_buckets import CompressedBucket
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.strategies import AllReduce, Hybrid, PartialAllReduce
from support.compression import OneMember, OtherSendsZeros, sum_compressed
from support.group_training import STRATEGY, agree, make, train
from support.jobs import job
from support.processes import run, start, values
from support.run_logs import groups_of

WORKERS, STEPS = 3, 6
WITH_RESIDUALS = ["powersgd:2", "topk:0.02", "int8", "sign", "qsgd:16", "randomk:0.1"]
STEADY = PartialAllReduce(limit=10**6, shards="equal")


class Matrices(nn.Module):
    """Its gradients are given: two matrices, a bias; the first worker's buffer is sent to the others."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(20, 30, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(16, 24, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(20, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))  # has a bucket of its own, the first

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True))


SHAPES = [parameter.shape for parameter in Matrices().parameters()][::-1]  # as they lie in a bucket


def gradients_of(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in Matrices().parameters()]


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors][::-1])


def loop(rank, emit, strategy, killed_at=None):
    """The gradients after each backward pass; worker 2 ends itself in the round of a step."""
    model = Matrices()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with offbeat.join(model, optimizer, strategy):
        for step in range(STEPS):
            if rank == 0:
                model.seen.fill_(step)
            if rank == 2 and killed_at == (step, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 2 and killed_at == (step, "between two sums"):
                powersgd.PowerSGDCompressor._as_matrices = die_at_the_second_sum()
            optimizer.zero_grad()
            model(gradients_of(rank, step)).backward()
            assert model.seen.tolist() == [step] * 3
            found.append(flat([parameter.grad for parameter in model.parameters()]).tolist())
            optimizer.step()
    return found


def die_at_the_second_sum():
    as_matrices, calls = powersgd.PowerSGDCompressor._as_matrices, []

    def counted(self, vector):
        calls.append(vector)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return as_matrices(self, vector)

    return counted


def expected_means(method, workers_of_step, only=None):
    """What a compressor gives, called in one process; each worker's residual stays from step to step.

    Of all gradients as one vector, or of only one of them, which is in a bucket of that number.
    """
    shapes = SHAPES if only is None else [SHAPES[only]]
    compressor = parse_compression(method).compressor(shapes, seed=1 if only is None else only)

    def vector_of(worker, step):
        gradients = gradients_of(worker, step)
        return flat(gradients) if only is None else gradients[::-1][only].flatten()

    residuals, states = [torch.zeros((), dtype=torch.float64)] * WORKERS, None
    for step, workers in enumerate(workers_of_step):
        if step and workers != workers_of_step[step - 1]:
            states = None
        own = [vector_of(worker, step) / WORKERS + residuals[worker] for worker in workers]
        outs, ended, _ = sum_compressed(compressor, own, states)
        for worker, one in zip(workers, ended, strict=True):
            residuals[worker] = one.residual
        states = [one.state for one in ended]
        yield outs[0] * WORKERS / len(workers)


def check(found, expected, tolerance=1e-12):
    for mine, mean in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), mean, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("method", "tolerance"),
    [("bf16", 0.05), ("fp16", 0.005), *((method, 1e-12) for method in WITH_RESIDUALS)],
)
@pytest.mark.parametrize("strategy", [AllReduce(), STEADY], ids=lambda one: one.name)
def test_all_workers_get_the_mean_that_the_compressor_gives(strategy, method, tolerance):
    found = values(run(loop, WORKERS, replace(strategy, compress=method)))
    assert found[0] == found[1] == found[2]
    check(found[0], expected_means(method, [range(WORKERS)] * STEPS), tolerance)


def notes_exchanges(rank, emit, strategy):
    """How often each exchange id and index was used."""
    new_run, used = LinkExchange._new_run, Counter()

    def noted(self, into, operation, exchange_id, index):
        used[exchange_id, index] += 1
        return new_run(self, into, operation, exchange_id, index)

    LinkExchange._new_run = noted
    loop(rank, emit, strategy)
    return list(used.values())


@pytest.mark.parametrize("bucket_bytes", [1, 7_000, 20_000])
@pytest.mark.parametrize("method", ["powersgd:2", "topk:0.02", "int8"])
def test_no_two_exchanges_of_a_round_have_the_same_index(method, bucket_bytes):
    """The bucket of integers is the last but one, the second of three, or the first."""
    for counts in values(run(notes_exchanges, 2, AllReduce(compress=method, bucket_bytes=bucket_bytes))):
        assert set(counts) == {1}


@pytest.mark.parametrize("method", WITH_RESIDUALS)
def test_buckets_that_are_exchanged_at_the_same_time_get_their_own_sums(method):
    """Each gradient has a bucket of its own."""
    found = values(run(loop, WORKERS, AllReduce(compress=method, bucket_bytes=1)))
    assert found[0] == found[1] == found[2]
    pieces = [expected_means(method, [range(WORKERS)] * STEPS, only=entry) for entry in range(len(SHAPES))]
    check(found[0], (torch.cat(one) for one in zip(*pieces, strict=True)))


@pytest.mark.parametrize(
    ("method", "where"),
    [
        *(("powersgd:1", "before"), ("powersgd:1", "between two sums")),
        *(("int8", "before"), ("qsgd:16", "before"), ("randomk:0.1", "before")),
    ],
)
def test_a_round_that_is_repeated_without_a_lost_worker_begins_with_the_same_residuals(method, where):
    strategy = replace(STEADY, compress=method)
    with start(loop, WORKERS, strategy, (3, where)) as running:
        *survivors, lost = running.ends()
    assert lost.exitcode == -signal.SIGKILL
    first, second = values(survivors)
    assert first == second
    workers_of_step = [range(3)] * 3 + [range(2)] * (STEPS - 3)
    check(first, expected_means(method, workers_of_step))


def loop_until_three_steps_of_three(rank, emit, strategy):
    """The members and the gradients of each step, by number; a newcomer has those from where it joins."""
    model = Matrices()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, steps_of_three = {}, 0
    with offbeat.join(model, optimizer, strategy) as session:
        while steps_of_three < 3:
            step = session.step
            optimizer.zero_grad()
            model(gradients_of(session.worker, step)).backward()
            members = session.members
            found[step] = members, flat([p.grad for p in model.parameters()]).tolist()
            optimizer.step()
            steps_of_three += len(members) == 3
            if step == 2:
                emit("here")
    return found


def test_residuals_stay_the_same_gradients_when_a_group_grows():
    """With more members the trailer is longer, the buckets are others, and contributions are smaller."""
    strategy = PartialAllReduce(limit=10**6, compress="topk:0.02")
    with job(loop_until_three_steps_of_three, 2, strategy) as running:
        running.receive(0)
        running.add(loop_until_three_steps_of_three, strategy)
        found, other, newcomers = values(running.ends())
    assert found == other
    assert newcomers == {step: found[step] for step in newcomers}
    assert len(newcomers) == 3
    assert sum(len(members) == 2 for members, _ in found.values()) > 3
    members_of_step = [members for members, _ in found.values()]
    check([mean for _, mean in found.values()], expected_means("topk:0.02", members_of_step))


def notes_what_it_drops(rank, emit, folder, strategy):
    discard = BucketSet.discard_gradients

    def noted(self):
        before = len(self._residuals)
        discard(self)
        (folder / f"dropped by {rank}").write_text(f"{before} -> {len(self._residuals)}")

    BucketSet.discard_gradients = noted
    return train(rank, emit, strategy, 20)


def test_a_straggler_that_returns_has_the_others_bits_and_none_of_its_residuals(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20@burst=8/100000", "OFFBEAT_RUN_LOG": str(log)}
    strategy = replace(STRATEGY, compress="powersgd:1")
    agree(values(run(notes_what_it_drops, 3, tmp_path, strategy, env=env)))
    assert any(1 in group.joining for group in groups_of(log))
    parameters = len(list(make(0)[0].parameters()))
    assert (tmp_path / "dropped by 1").read_text() == f"{parameters} -> 0"


class EndsForTwo(OtherSendsZeros):
    """Two threads wait for each exchange, and go on when both do."""

    def all_reduce(self, flat, into, **_):
        into.copy_(flat)
        return SimpleNamespace(wait=threading.Barrier(2).wait, ended_s=0.0)


def top_tenth(residuals):
    return bucket_of("topk:0.1", residuals)


def bucket_of(method, residuals):
    plan = Bucket(dtype=torch.float64, entries=(0,), offsets=(0,), elements=600)

    def zeros(elements, dtype):
        return torch.zeros(elements, dtype=dtype)

    return CompressedBucket(
        plan,
        [torch.Size((20, 30))],
        1,
        zeros,
        method=parse_compression(method),
        seed=0,
        residuals=residuals,
    )


def exchange_in(bucket, exchange, values):
    bucket.contribution.flat.copy_(values)
    bucket.all_reduce(exchange, exchange_id=1, index=0).wait(1.0)


def test_a_residual_changes_only_when_the_means_are_used():
    residuals = {}
    bucket = top_tenth(residuals)
    for number in range(1, 4):
        before = {entry: residual.clone() for entry, residual in residuals.items()}
        for _ in range(2):  # the round is repeated
            exchange_in(bucket, OtherSendsZeros(), torch.arange(600.0) * number)
            assert residuals.keys() == before.keys()
            assert all(torch.equal(residuals[entry], before[entry]) for entry in before)
        bucket.commit(own_weight=0.5, weight=1.0, used=[1.0])
        assert torch.equal(residuals[0] * 0.5 + bucket.output.flat, bucket.contribution.flat)
        bucket.end_round()


def test_of_two_threads_that_wait_for_a_sum_one_computes_it():
    residuals = {}
    bucket = bucket_of("powersgd:1", residuals)
    bucket.contribution.flat.copy_(torch.arange(600.0))
    pending = bucket.all_reduce(EndsForTwo(), exchange_id=1, index=0)
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(pending.wait, [60.0, 60.0])] == [None, None]
    bucket.commit(own_weight=1.0, weight=1.0, used=[1.0])
    assert bucket.output.flat.any()
    torch.testing.assert_close(residuals[0] + bucket.output.flat, bucket.contribution.flat)


def test_exchanges_but_the_last_are_begun_before_the_sum_is_waited_for():
    bucket = bucket_of("powersgd:1", {})
    bucket.contribution.flat.copy_(torch.arange(600.0))
    assert not bucket.can_advance
    bucket.all_reduce(OtherSendsZeros(), exchange_id=1, index=0)
    assert bucket.can_advance
    assert not bucket.advance(1.0), "the second of two exchanges is under way"
    assert not bucket.can_advance
    assert not bucket.output.flat.any()
    assert not bucket.advance(1.0)
    assert not bucket.output.flat.any(), "what follows the last exchange is left to who waits"


def test_a_residual_stays_where_the_worker_has_no_weight_or_the_gradient_is_not_used():
    residuals = {}
    bucket = top_tenth(residuals)
    exchange_in(bucket, OtherSendsZeros(), torch.arange(600.0))
    bucket.commit(own_weight=1.0, weight=1.0, used=[1.0])
    before = residuals[0].clone()
    for own_weight, used in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        for _ in range(2):
            exchange_in(bucket, OtherSendsZeros(), torch.ones(600))
            bucket.commit(own_weight=own_weight, weight=1.0, used=[used])
            assert torch.equal(residuals[0], before)


def test_the_last_member_of_a_group_compresses_nothing():
    residuals = {}
    bucket = top_tenth(residuals)
    for _ in range(2):
        exchange_in(bucket, OtherSendsZeros(), torch.arange(600.0))
        bucket.commit(own_weight=1.0, weight=1.0, used=[1.0])
    assert residuals[0].any()
    exchange_in(bucket, OneMember(), torch.arange(600.0))
    assert torch.equal(bucket.output.flat, torch.arange(600.0, dtype=torch.float64))
    bucket.commit(own_weight=1.0, weight=1.0, used=[1.0])
    assert not residuals[0].any()


def test_with_weight_0_neither_a_gradient_nor_a_residual_is_contributed():
    for gradient in (None, torch.full((3,), torch.nan)):
        into = torch.ones(3)
        write_scaled(gradient, 0.0, into, torch.ones(3))
        assert not into.any()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 30, dtype=torch.complex64))


def complex_gradient(rank, emit):
    model = Complex()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, AllReduce(compress="powersgd:1")):
        model.weight.grad = torch.full((20, 30), rank + 1 / 3 + 2j * rank)
        optimizer.step()
    return model.weight.grad.tolist()


def train_in_parts(rank, emit, strategy, folder, ends):
    """The gradients of a run in several parts: each begins with the states that the one before has saved."""
    found, common, own = [], f"{folder}/common", f"{folder}/{rank}"
    momentum = 0.9 if isinstance(parse_compression(strategy.compress), MomentumCorrecting) else 0.0
    for part, end in enumerate(ends):
        model = Matrices()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        with offbeat.join(model, optimizer, strategy) as session:
            if part:
                session.load_state_dict(torch.load(common))
                session.load_local_state_dict(torch.load(own))
            while session.step < end:
                optimizer.zero_grad()
                model(gradients_of(rank, session.step)).backward()
                found.append(flat([parameter.grad for parameter in model.parameters()]).tolist())
                optimizer.step()
            if rank == 0:
                torch.save(session.state_dict(), common)
            torch.save(session.local_state_dict(), own)
    return found, flat(list(model.parameters())).tolist()


@pytest.mark.parametrize(
    "strategy",
    [
        *(
            AllReduce(compress=method, bucket_bytes=4000)
            for method in ("powersgd:2", "topk:0.02", "dgc:0.02:warmup=4", "csc:0.5", "qsgd:4", "randomk:0.1")
        ),
        Hybrid(compress="topk:0.02", fuse_bytes=0, policy="ring"),
    ],
    ids=lambda one: f"{one.name}:{one.compress}",
)
def test_a_run_with_residuals_resumes_bit_for_bit(strategy, tmp_path):
    whole, parts = (
        values(run(train_in_parts, WORKERS, strategy, str(tmp_path), ends))
        for ends in [(STEPS,), (2, 3, STEPS)]
    )
    assert parts == whole


def load_residuals(rank, emit, strategy):
    """The mean gradient of an element in steps without gradients, after residuals of 1 were loaded."""
    model = Matrices()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with offbeat.join(model, optimizer, strategy) as session:
        state = session.local_state_dict()
        state["synchronizer"] = {"residuals": {"first": torch.ones(600, dtype=torch.float64)}}
        session.load_local_state_dict(state)
        for _ in range(4):
            optimizer.zero_grad()
            model([torch.zeros_like(parameter) for parameter in model.parameters()]).backward()
            found.append(float(model.first.grad[3, 7]))
            optimizer.step()
        assert session.local_state_dict()["synchronizer"] == {}
    return found


@pytest.mark.parametrize(
    ("strategy", "means"),
    [
        (AllReduce(), [1.0, 0.0, 0.0, 0.0]),
        (AllReduce(compress="bf16"), [1.0, 0.0, 0.0, 0.0]),
        (Hybrid(), [0.0, 0.0, 0.0, 0.0]),
        (Hybrid(compress="bf16"), [0.0, 0.0, 0.0, 0.0]),
    ],
    ids=lambda one: f"{one.name}:{one.compress}" if hasattr(one, "name") else "",
)
def test_residuals_of_another_strategy_are_sent_once_or_dropped(strategy, means):
    assert values(run(load_residuals, 2, strategy)) == [means] * 2


def test_residuals_of_another_step_or_model_are_refused():
    model = Matrices()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, AllReduce(compress="topk:0.02")) as session:
        state = session.local_state_dict()
        with pytest.raises(OffbeatError, match="worker 0's state of step 0, got that of step 7"):
            session.load_local_state_dict({**state, "step": 7})
        with pytest.raises(OffbeatError, match="for 'other' \\(no such parameter here\\)"):
            session.load_local_state_dict({**state, "synchronizer": {"residuals": {"other": torch.ones(3)}}})
        with pytest.raises(OffbeatError, match="3 elements for 'bias' \\(20 here\\)"):
            session.load_local_state_dict({**state, "synchronizer": {"residuals": {"bias": torch.ones(3)}}})


def test_complex_gradients_are_sent_whole():
    found, other = values(run(complex_gradient, 2))
    assert found == other
    torch.testing.assert_close(torch.tensor(found), torch.full((20, 30), 0.5 + 1 / 3 + 1j))


def test_a_quorum_needs_whole_gradients():
    with pytest.raises(ValueError, match="leave quorum or compress out"):
        PartialAllReduce(quorum="n-1", compress="bf16")


def test_a_model_on_an_accelerator_is_refused():
    trained = SimpleNamespace(device=torch.device("cuda:1"))
    with pytest.raises(OffbeatError, match="a model on the CPU with compress=bf16, got one on cuda:1"):
        AllReduce(compress="bf16").make_synchronizer(None, trained)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="expected compress to be bf16, fp16, int8, sign, powersgd:RANK"):
        AllReduce(compress="zip")
