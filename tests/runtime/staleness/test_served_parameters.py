"""Promises of `offbeat.runtime.staleness.served_parameters`."""

import numpy as np
import torch
from torch import nn

from offbeat.runtime.staleness.served_parameters import ServedParameters
from offbeat.runtime.training.trained import TrainingState


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[2].bias.requires_grad_(False)
    groups = [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return TrainingState(model, [optimizer])


def test_loaded_states_are_those_of_the_other_worker():
    source, target = ServedParameters(trained(0)), ServedParameters(trained(1))
    target.load_states([dict(states) for states in source.states()])
    for ours, theirs in zip(target.states(), source.states(), strict=True):
        assert ours.keys() == theirs.keys() > {"values"}
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_changes_are_what_was_added_to_each_parameter():
    parameters = ServedParameters(trained(0))
    before = parameters.copy_values()
    with torch.no_grad():
        for number, one in enumerate(parameters):
            one += number
    changes = parameters.changes_since(before)
    expected = [[0] * 6 + [1] * 2, [2] * 2 + [3] * 2 + [4] * 2]  # by group: elements of each parameter
    assert [some.round(decimals=4).tolist() for some in changes] == expected


def test_buffers_and_frozen_parameters_are_not_served():
    state = trained(0)
    found = ServedParameters(state).tensors_not_served()
    assert [id(one) for one in found] == [id(one) for one in [*state.model.buffers(), state.model[2].bias]]
