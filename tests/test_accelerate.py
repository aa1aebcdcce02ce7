"""`offbeat.accelerate.prepare`: a loop of one's own with Accelerate, among workers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

import offbeat.accelerate  # noqa: E402
from offbeat.errors import OffbeatError  # noqa: E402
from offbeat.strategies import SSP, AllReduce, Hybrid, LocalSGD, PartialAllReduce  # noqa: E402
from support.processes import run, values  # noqa: E402

SAMPLES, BATCH, RATE = 40, 4, 0.1


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (SAMPLES,), generator=generator))


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def train(rank, emit, strategy, every, precision):
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=every, mixed_precision=precision
    )
    bare, optimizer = make(rank)
    loader = DataLoader(data(), BATCH, shuffle=True)
    model, optimizer, loader, session = offbeat.accelerate.prepare(
        accelerator, bare, optimizer, loader, strategy=strategy
    )
    taken, kinds = [], set()
    with session:
        for _ in range(2):
            for inputs, labels in loader:
                taken.append((inputs.tolist(), labels.tolist()))
                with accelerator.accumulate(model):
                    outputs = model(inputs)
                    kinds.add(str(outputs.dtype))
                    accelerator.backward(nn.functional.cross_entropy(outputs, labels))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        steps = session.step
        rounds = session._synchronizer.round
    assert accelerator.unwrap_model(model) is bare
    return weights(bare), taken, steps, kinds, rounds, accelerator.num_processes


def train_alone(taken_by_workers, every):
    model, optimizer = make(0)
    batches = list(zip(*taken_by_workers, strict=True))
    in_epoch = len(batches) // 2
    for epoch in (batches[:in_epoch], batches[in_epoch:]):
        for first in range(0, in_epoch, every):
            for parts in epoch[first : first + every]:
                inputs = torch.tensor([one for part, _ in parts for one in part])
                labels = torch.tensor([one for _, part in parts for one in part])
                (nn.functional.cross_entropy(model(inputs), labels) / every).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return torch.tensor(weights(model))


@pytest.mark.parametrize("every", [1, 3])
def test_lockstep_is_the_training_of_one_process_with_the_global_batches(every):
    ended = values(run(train, 2, AllReduce(), every, "no"))
    alone = train_alone([one[1] for one in ended], every)
    for after, _, steps, _, rounds, processes in ended:
        torch.testing.assert_close(torch.tensor(after), alone, rtol=1e-4, atol=1e-6)
        assert steps == rounds == 2 * -(-SAMPLES // 2 // BATCH // every)
        assert processes == 2


STRATEGIES = [
    Hybrid(),
    PartialAllReduce(limit=10**6, shards="equal"),
    SSP(s=2, shards="equal"),
    LocalSGD(every=2, shards="equal"),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)
def test_each_strategy_trains_in_mixed_precision_with_accumulation(strategy):
    ended = values(run(train, 2, strategy, 3, "bf16"))
    batches = SAMPLES // 2 // BATCH
    assert [(one[2], len(one[1])) for one in ended] == [(2 * -(-batches // 3), 2 * batches)] * 2
    assert ended[0][0] == ended[1][0]
    assert ended[0][0] != weights(make(0)[0])
    assert ended[0][3] == {"torch.float32"}  # outputs, which Accelerate converts


def test_samples_are_assigned_on_demand_without_accumulation():
    ended = values(run(train, 2, PartialAllReduce(), 1, "no"))
    assert sum(len(labels) for one in ended for _, labels in one[1]) >= 2 * SAMPLES


def train_on_demand(rank, emit):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = make(rank)
    *_, loader, session = offbeat.accelerate.prepare(
        accelerator, model, optimizer, DataLoader(data(), BATCH), strategy=PartialAllReduce()
    )
    with session:
        next(iter(loader))


def test_accumulation_where_samples_are_assigned_on_demand_is_refused():
    assert any('give the strategy shards="equal"' in (one.error or "") for one in run(train_on_demand, 2))


def train_in_their_ddp(rank, emit):
    accelerator = accelerate.Accelerator(cpu=True)
    bare, optimizer = make(rank)
    _, _, _, session = offbeat.accelerate.prepare(
        accelerator, bare, optimizer, DataLoader(data(), BATCH), strategy=AllReduce()
    )
    with session:
        DistributedDataParallel(bare)(torch.randn(4, 8)).sum().backward()


def test_a_model_in_another_wrapper_is_refused():
    for ended in run(train_in_their_ddp, 2):
        assert ended.was_ended_by("OffbeatError")
        assert "would average its gradients once more" in ended.error


def test_what_is_prepared_already_is_refused():
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = make(0)
    loader = DataLoader(data(), BATCH)
    with pytest.raises(OffbeatError, match="expected a torch Optimizer, got AcceleratedOptimizer"):
        offbeat.accelerate.prepare(accelerator, model, accelerator.prepare(optimizer), loader)
    with pytest.raises(OffbeatError, match="expected a torch DataLoader, got DataLoaderShard"):
        offbeat.accelerate.prepare(accelerator, model, optimizer, accelerator.prepare(loader))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OffbeatError, match="expected the bare model, got it within Distrib"):
            offbeat.accelerate.prepare(accelerator, DistributedDataParallel(model), optimizer, loader)
    finally:
        dist.destroy_process_group()
