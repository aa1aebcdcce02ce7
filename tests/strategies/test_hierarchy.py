"""Gradients that are summed hierarchically, with real workers: equal means, and a ring after a loss.

The workers are on one host, where no hierarchy is chosen: the synchronizer of these tests takes it anyway.
"""

import os
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import offbeat
from offbeat.numerics.collectives.schedules import ALGORITHMS, AUTO
from offbeat.runtime.averaging.synchronizer import GroupSynchronizer
from offbeat.strategies import AllReduce, PartialAllReduce
from support.processes import run, values

WORKERS, STEPS, STEPS_OF_ALL = 4, 6, 3
HIERARCHY = "torus:2"


class Hierarchical(GroupSynchronizer):
    """Sums hierarchically, however fast that is."""

    def _choose_exchange(self, client, binding, handle):
        binding.replace_exchange(handle.exchange, HIERARCHY)


@dataclass(frozen=True, kw_only=True)
class HierarchicalAllReduce(AllReduce):
    def make_synchronizer(self, loop, trained):
        made = super().make_synchronizer(loop, trained)
        made.__class__ = Hierarchical
        return made


@dataclass(frozen=True, kw_only=True)
class HierarchicalPartial(PartialAllReduce):
    def make_synchronizer(self, loop, trained):
        made = super().make_synchronizer(loop, trained)
        made.__class__ = Hierarchical
        return made


def trained(rank, emit, strategy, dying=None):
    """The weights, and by step the algorithm; worker r has the gradient r + 1 in all elements.

    All exchanges over a group are by its algorithm.
    """
    model = nn.Linear(70, 30, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    algorithms = []
    with offbeat.join(model, optimizer, strategy) as session:
        for step in range(STEPS):
            if rank == dying and step == STEPS_OF_ALL:
                os._exit(1)
            optimizer.zero_grad()
            ((rank + 1) * model.weight.sum()).backward()
            handle = session._synchronizer.binding.handle  # of the means that are there
            algorithms.append(handle.algorithm)
            used = {done for done, _ in handle.exchange._plans if done in (HIERARCHY, *ALGORITHMS)}
            assert used == ({HIERARCHY} if handle.algorithm == HIERARCHY else {"ring"})
            optimizer.step()
    return sorted({*model.weight.flatten().tolist()}), algorithms


@pytest.mark.parametrize(
    "strategy", [HierarchicalAllReduce(), HierarchicalPartial(shards="equal")], ids=["bsp", "partial"]
)
def test_all_workers_get_the_mean_by_a_hierarchy(strategy):
    mean = (1 + 2 + 3 + 4) / 4
    for weights, algorithms in values(run(trained, WORKERS, strategy)):
        assert weights == [-STEPS * mean]
        assert algorithms == [HIERARCHY] * STEPS


def test_after_the_loss_of_a_worker_the_others_get_their_mean_by_a_ring():
    *others, lost = run(trained, WORKERS, HierarchicalPartial(shards="equal"), WORKERS - 1)
    assert lost.exitcode == 1
    seen = values(others)
    algorithms = seen[0][1]
    of_all = algorithms.count(HIERARCHY)  # the last round of all is repeated if the loss interrupts it
    assert 0 < of_all <= STEPS_OF_ALL
    assert algorithms == [HIERARCHY] * of_all + [AUTO] * (STEPS - of_all)
    weight = -(of_all * (1 + 2 + 3 + 4) / 4 + (STEPS - of_all) * (1 + 2 + 3) / 3)
    assert seen == [([weight], algorithms)] * (WORKERS - 1)
