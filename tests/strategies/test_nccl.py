"""Which strategies leave the exchange to NCCL where each worker has a GPU of its own, and how.

Gloo takes the place of NCCL, and the CPU that of the GPUs; all else is as there.
"""

import logging
import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.errors import WorkerError
from offbeat.runtime.averaging.synchronizer import GroupSynchronizer
from offbeat.runtime.collectives.torch_exchange import TorchExchange
from offbeat.runtime.devices.host import Host
from offbeat.runtime.training.trained import TrainingState
from offbeat.strategies import DPAR, AllReduce, Hybrid, PartialAllReduce
from support.processes import run, values


@pytest.mark.parametrize(
    ("strategy", "is_allowed"),
    [(AllReduce(), True), (Hybrid(), False), (PartialAllReduce(), False), (DPAR(threshold_ms=5.0), False)],
    ids=["bsp", "hybrid", "partial", "dpar"],
)
def test_only_lockstep_over_whole_gradients_allows_nccl(strategy, is_allowed):
    """The others exchange memory of the host, or in groups that change."""
    model = nn.Linear(2, 2)
    trained = TrainingState(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    synchronizer = strategy.make_synchronizer(SimpleNamespace(worker=0, world=2), trained)
    assert synchronizer._allows_nccl is is_allowed


class OverGloo(GroupSynchronizer):
    """Chooses between gloo, in place of NCCL, and links."""

    def _agree_on_nccl(self):
        return True

    def _open_nccl(self, timeout_s):
        dist.init_process_group(
            "gloo", store=self._rendezvous.store, rank=self._loop.worker, world_size=self._loop.world
        )
        return TorchExchange(dist.group.WORLD, self.device)


class Gloo(OverGloo):
    """Uses gloo, however fast it is."""

    def _choose_exchange(self, client, binding, handle):
        self._nccl = self._open_nccl(0.0)
        binding.replace_exchange(self._nccl, "ring")


@dataclass(frozen=True, kw_only=True)
class With(AllReduce):
    """AllReduce by another synchronizer."""

    synchronizer: type = GroupSynchronizer

    def make_synchronizer(self, loop, trained):
        made = super().make_synchronizer(loop, trained)
        made.__class__ = self.synchronizer
        return made


def trained(rank, emit, strategy, dies=False):
    """The weights after some steps, the exchange, what was logged about it, and whether there is a group."""
    logged = []
    logger = logging.getLogger("offbeat")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: logged.append(record.getMessage()) or True)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    with offbeat.join(model, optimizer, strategy) as session:
        exchange = type(session._synchronizer.binding.acquire(wait=True).exchange).__name__
        for step in range(6):
            if dies and rank == 1 and step == 3:
                os._exit(1)
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    weights = torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()
    logged = [text for text in logged if "gradients travel by" in text]
    return weights, exchange, logged, dist.is_initialized()


def test_a_job_trains_alike_by_the_exchange_that_it_has_measured_to_be_faster():
    (expected, exchange, nothing, _), *_ = values(run(trained, 2, AllReduce()))
    assert exchange == "LinkExchange"
    assert nothing == []
    seen = values(run(trained, 2, With(synchronizer=OverGloo)))
    (logged,), none = seen[0][2], seen[1][2]
    assert none == []
    assert " by NCCL, " in logged
    faster = "TorchExchange" if logged.startswith("gradients travel by NCCL") else "LinkExchange"
    for weights, exchange, _, has_group in seen:
        assert exchange == faster
        assert weights == pytest.approx(expected, rel=1e-12)
        assert not has_group


def test_a_job_trains_by_torchs_exchange_as_by_links():
    (expected, *_), *_ = values(run(trained, 3, AllReduce()))
    for weights, exchange, _, has_group in values(run(trained, 3, With(synchronizer=Gloo))):
        assert exchange == "TorchExchange"
        assert weights == pytest.approx(expected, rel=1e-12)
        assert not has_group


def test_workers_by_torchs_exchange_name_the_one_that_was_lost_and_end():
    ended = run(trained, 3, With(synchronizer=Gloo), True)
    for one in (ended[0], ended[2]):
        assert one.error_type == "WorkerError"
        assert "worker 1 was lost" in one.error
        assert one.exitcode == 0


def close_and_abandon(rank, emit):
    """Whether an abandonment after the end leaves the exchange and the program's group as they are."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    exchange = TorchExchange(dist.new_group(), Host())
    exchange.close(30.0)
    exchange.abandon(WorkerError("the coordinator has ended"))
    return exchange.error is None and dist.is_initialized()


def test_an_exchange_that_was_closed_aborts_nothing():
    assert values(run(close_and_abandon, 1)) == [True]
