"""What a session takes, it gives back when it is over: model, buckets and links are garbage then."""

import gc
import weakref

import pytest
import torch
from torch import nn

import offbeat
from offbeat.strategies import SSP, AllReduce, Hybrid, PartialAllReduce
from support.processes import run, values

STRATEGIES = {
    "bsp": AllReduce,
    "partial": PartialAllReduce,
    "hybrid": Hybrid,
    "ssp": SSP,
}


def trained(strategy):
    """A session with a model that is large enough for memory to be shared; what is left of it."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, STRATEGIES[strategy]()) as session:
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 64) * (1 + step + session.worker)).square().mean().backward()
            optimizer.step()
    return [weakref.ref(one) for one in (model, next(model.parameters()), session)]


def leaves_nothing(rank, emit, strategy):
    left = trained(strategy)
    gc.collect()
    return [one() is None for one in left]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_session_held_is_garbage_when_it_is_over(strategy):
    for gone in values(run(leaves_nothing, 2, strategy)):
        assert gone == [True, True, True]
