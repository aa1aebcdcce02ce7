"""Which strategies leave the exchange to NCCL where each worker has a GPU of its own."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from offbeat.runtime.training.trained import TrainingState
from offbeat.strategies import DPAR, AllReduce, Hybrid, PartialAllReduce


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
