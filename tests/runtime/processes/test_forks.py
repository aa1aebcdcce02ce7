"""Processes that are forked from a worker, a launcher or a client do not affect their parent's resources."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import OffbeatError
from offbeat.runtime.launch import launch
from offbeat.strategies import AllReduce, Hybrid, PartialAllReduce, ServerBSP
from support.processes import run, values

STRATEGIES = {
    "bsp": AllReduce(),
    "partial": PartialAllReduce(limit=10**6, shards="equal"),
    "hybrid": Hybrid(),
    "ps-bsp": ServerBSP(shards="equal"),
}
WORKERS, STEPS, FORKED_AT = 2, 6, 3
LIMIT_S = 30  # after that, a child that hangs is killed


def forked(does):
    """Calls a function in a forked process; returns the exit status, 0 unless the function raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a fork with threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(LIMIT_S)
            does()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(WORKERS, 4, 5, generator=generator, dtype=torch.float64)


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def forks(rank, emit, strategy):
    model, optimizer = make()
    statuses = []

    def uses_the_model():
        model.eval()
        with torch.no_grad():
            model(batches(0)[0])
        model.train()
        step(model, optimizer, batches(0)[0])

    def leaves():
        session.__exit__(None, None, None)

    def fails():
        session.__exit__(KeyError, KeyError("mine"), None)

    def asks():
        with pytest.raises(OffbeatError, match=f"was forked from worker {rank}, which alone takes part"):
            session.raise_if_failed()
        with pytest.raises(OffbeatError, match="was forked from"):
            next(session.batches(batches(0)[0], 2))

    with offbeat.join(model, optimizer, STRATEGIES[strategy]) as session:
        for number in range(STEPS):
            if number == FORKED_AT:
                session.refresh()
                statuses = [forked(one) for one in (uses_the_model, leaves, fails, asks)]
            step(model, optimizer, batches(number)[rank])
    return statuses, [one.tolist() for one in model.parameters()]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forked_process_can_use_the_model_and_does_not_affect_the_job(strategy):
    model, optimizer = make()
    for number in range(STEPS):
        step(model, optimizer, batches(number).reshape(-1, 5))
    for statuses, parameters in values(run(forks, WORKERS, strategy)):
        assert statuses == [0, 0, 0, 0]
        for found, expected in zip(parameters, model.parameters(), strict=True):
            assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-10)


def test_workers_outlive_a_forked_process_of_their_launcher():
    with launch([sys.executable, "-c", "import signal; signal.pause()"], 1) as workers:
        assert forked(workers.close) == 0
        workers.kill(0, signal.SIGUSR1)
        (outcome,) = workers.wait()
    assert outcome.returncode == -signal.SIGUSR1


def test_servers_outlive_a_forked_process_of_their_client():
    with offbeat.PS.local(servers=1) as ps:
        space = ps.namespace("space", 3)
        space.push([1.0, 2.0, 3.0]).result()
        assert forked(ps.close) == 0
        assert list(space.pull().result()) == [1.0, 2.0, 3.0]


def count(model, part):
    return {"count": float(len(part))}


@pytest.mark.long
def test_an_evaluation_process_outlives_a_forked_process():
    model = nn.Linear(2, 1)
    with offbeat.Validator(model, count, torch.zeros(4, 2), backend="process") as validator:
        validator.validate(0).result()
        ((_, end),) = validator._backend._pools
        assert forked(end) == 0
        assert validator.validate(1).result()["count"] == 4
