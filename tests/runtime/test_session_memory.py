"""A session releases its memory when it ends: model, buckets and links are garbage then."""

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
    """Trains a model large enough for shared memory; returns weak references to the session and the model."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, STRATEGIES[strategy]()) as session:
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 64) * (1 + step + session.worker)).square().mean().backward()
            optimizer.step()
    return [weakref.ref(one) for one in (model, next(model.parameters()), session)]


def leaves_nothing(rank, emit, strategy):
    references = trained(strategy)
    gc.collect()
    return [one() is None for one in references]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_session_and_its_model_are_garbage_when_it_ends(strategy):
    for are_collected in values(run(leaves_nothing, 2, strategy)):
        assert are_collected == [True, True, True]
