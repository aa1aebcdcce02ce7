"""A DistributedDataParallel that exchanges nothing, in a session; and one that does, which is refused."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.strategies import AllReduce, Hybrid, PartialAllReduce
from support.group_training import digest, make
from support.processes import run, values

STRATEGIES = [AllReduce(), PartialAllReduce(limit=10**6, shards="equal"), Hybrid()]


def train(rank, emit, strategy, wrap, join_wrapper):
    """A loop that steps every other batch, as code for DistributedDataParallel has it."""
    model, optimizer = make(rank)
    called = wrap(model)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,)))
    with offbeat.join(called if join_wrapper else model, optimizer, strategy) as session:
        no_sync = getattr(called, "no_sync", session.no_sync)
        for _ in session.epochs(2):
            for place, (x, y) in enumerate(session.batches(data, 4)):
                is_step = place % 2
                with nullcontext() if is_step else no_sync():
                    nn.functional.cross_entropy(called(x), y).backward()
                if is_step:
                    optimizer.step()
                    optimizer.zero_grad()
        steps = session.step
    return digest(model, optimizer), steps


def leave_bare(model):
    return model


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("join_wrapper", [False, True])
def test_a_training_in_the_wrapper_is_that_of_the_bare_model(strategy, join_wrapper):
    bare = values(run(train, 2, strategy, leave_bare, False))
    wrapped = values(run(train, 2, strategy, offbeat.ddp, join_wrapper))
    assert {*wrapped} == {*bare}
    assert len({*bare}) == 1


def test_the_wrapper_is_one_that_programs_know(tmp_path):
    model = nn.Linear(2, 2)
    wrapped = offbeat.ddp(model)
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.module is model
    assert [*wrapped.state_dict()] == ["module.weight", "module.bias"]
    copied = copy.deepcopy(wrapped)
    assert copied.module is not model
    assert torch.equal(copied.module.weight, model.weight)
    torch.save(wrapped, tmp_path / "wrapped")
    loaded = torch.load(tmp_path / "wrapped", weights_only=False)
    assert isinstance(loaded, DistributedDataParallel)
    assert torch.equal(loaded.module.weight, model.weight)
    with wrapped.no_sync():  # without a session
        wrapped(torch.ones(1, 2)).sum().backward()
    with pytest.raises(OffbeatError, match="with parameters that require a gradient, got none"):
        offbeat.ddp(nn.ReLU())


def train_in_other_ddp(rank, emit):
    dist.init_process_group("gloo")
    model, optimizer = make(rank)
    wrapped = DistributedDataParallel(model)
    with offbeat.join(model, optimizer, AllReduce()):
        with torch.no_grad():
            wrapped(torch.randn(4, 8))
        wrapped(torch.randn(4, 8)).sum().backward()


def test_a_wrapper_that_averages_gradients_too_is_refused():
    for ended in run(train_in_other_ddp, 2):
        assert ended.was_ended_by("OffbeatError")
        assert "would average its gradients once more" in ended.error
