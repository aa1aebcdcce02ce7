"""A program's writes to parameters and optimizer state during training take effect or are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat
from offbeat.runtime.training.trained import TrainingState
from offbeat.runtime.training.writes import WriteDetector
from offbeat.strategies import SSP, AllReduce, Hybrid, PartialAllReduce, ServerBSP
from support.processes import run, values

WORKERS, STEPS, BATCH, CHANGED_AT = 2, 6, 4, 3
STRATEGIES = {"ps-bsp": ServerBSP(shards="equal"), "ssp": SSP(s=0, shards="equal")}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def make():
    torch.manual_seed(0)
    model = Net().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


@torch.no_grad()
def scale(model, optimizer):
    model.a.weight.mul_(0.5)


def replace(model, optimizer):
    model.a.weight.data = model.a.weight.data * 0.5


def clear(model, optimizer):
    optimizer.state.clear()


def load(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def freeze(model, optimizer):
    model.a.requires_grad_(False)


WRITES = {
    "scale": (scale, "a.weight"),
    "replace": (replace, "a.weight"),
    "clear": (clear, "the optimizer's state of a.weight"),
    "load": (load, "the optimizer's state of a.weight"),
}


def stepped():
    model, optimizer = make()
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_found_until_it_is_marked(name):
    model, optimizer = stepped()
    writes = WriteDetector(TrainingState(model, [optimizer]))
    assert writes.written_since_mark() == []
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    assert writes.written_since_mark() == []
    write, what = WRITES[name]
    write(model, optimizer)
    assert writes.written_since_mark()[0] == what
    writes.mark()
    assert writes.written_since_mark() == []


def test_writes_can_be_queried_for_one_of_several_optimizers():
    model = Net()
    one, another = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.a, model.b))
    writes = WriteDetector(TrainingState(model, [one, another]))
    with torch.no_grad():
        model.b.bias.zero_()
    assert writes.written_since_mark(one) == []
    assert writes.written_since_mark(another) == writes.written_since_mark() == ["b.bias"]


def inputs():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, WORKERS, BATCH, 5, generator=generator, dtype=torch.float64)


def trains(rank, emit, strategy, change, when):
    model, optimizer = make()
    with offbeat.join(model, optimizer, STRATEGIES[strategy]) as session:
        for step, x in enumerate(inputs()):
            optimizer.zero_grad()
            if step == CHANGED_AT and when == "before the forward pass":
                session.refresh()
                change(model, optimizer)
            loss = model(x[rank]).square().mean()
            loss.backward()
            if step == CHANGED_AT and when == "before the step":
                change(model, optimizer)
            optimizer.step()
        if when == "at the end":
            change(model, optimizer)
    return [one.tolist() for one in model.parameters()]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("when", ["before the forward pass", "before the step", "at the end"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_servers_a_write_that_would_be_lost_is_refused_by_name(strategy, when):
    for one in run(trains, WORKERS, strategy, scale, when):
        assert one.was_ended_by("OffbeatError"), one
        assert "the program has changed a.weight (1 such changes)" in one.error


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", WRITES)
def test_on_servers_every_kind_of_write_is_refused_by_name(name):
    write, what = WRITES[name]
    for one in run(trains, WORKERS, "ps-bsp", write, "before the forward pass"):
        assert one.was_ended_by("OffbeatError"), one
        assert f"the program has changed {what} (" in one.error


def alone(change):
    model, optimizer = make()
    for step, x in enumerate(inputs()):
        optimizer.zero_grad()
        if step == CHANGED_AT:
            change(model, optimizer)
        model(x.reshape(-1, 5)).square().mean().backward()
        optimizer.step()
    return [one.tolist() for one in model.parameters()]


def test_on_servers_parameters_frozen_in_the_middle_of_training_stay_unchanged():
    first, second = values(run(trains, WORKERS, "ps-bsp", freeze, "before the forward pass"))
    assert first == second
    for found, expected in zip(first, alone(freeze), strict=True):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-6)


def freezes_alone(rank, emit):
    model, optimizer = make()
    with offbeat.join(model, optimizer, ServerBSP(shards="equal")):
        for x in inputs():
            optimizer.zero_grad()
            model.a.requires_grad_(rank == 0)
            model(x[rank]).square().mean().backward()
            optimizer.step()
    return [one.tolist() for one in model.parameters()]


def test_a_gradient_of_only_one_of_two_workers_counts_half():
    first, second = values(run(freezes_alone, WORKERS))
    assert first == second
    model, optimizer = make()
    for x in inputs():
        optimizer.zero_grad()
        (model(x[0]).square().mean() / 2).backward()
        model.a.requires_grad_(False)
        (model(x[1]).square().mean() / 2).backward()
        model.a.requires_grad_(True)
        optimizer.step()
    for found, expected in zip(first, model.parameters(), strict=True):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-10)


def test_training_begins_with_values_written_before_the_first_step():
    model, optimizer = make()
    with offbeat.join(model, optimizer, SSP()):
        scale(model, optimizer)
        with torch.no_grad():
            expected = model.a.weight.clone()
        model(inputs()[0, 0]).square().mean()
        assert torch.equal(model.a.weight, expected)


# In groups -----------------------------------------------------------------------------------------------

GROUPS = {"bsp": AllReduce(), "partial": PartialAllReduce(limit=10**6, shards="equal"), "hybrid": Hybrid()}


def writes_in_a_group(rank, emit, strategy, write, when, writers):
    model, optimizer = make()
    with offbeat.join(model, optimizer, GROUPS[strategy]) as session:
        for step, x in enumerate([*inputs(), *inputs()]):
            is_time = step == 2 * CHANGED_AT and rank in writers
            optimizer.zero_grad()
            if is_time and when == "before the forward pass":
                session.refresh()
                write(model, optimizer)
            model(x[rank]).square().mean().backward()
            if is_time and when == "before the step":
                write(model, optimizer)
            optimizer.step()
    return [one.tolist() for one in model.parameters()]


@pytest.mark.long(after=2)
@pytest.mark.parametrize("when", ["before the forward pass", "before the step"])
@pytest.mark.parametrize(("name", "changes"), [("scale", 1), ("load", 4)])
@pytest.mark.parametrize("strategy", GROUPS)
def test_in_a_group_a_write_on_only_one_worker_is_refused_by_name(strategy, name, changes, when):
    write, what = WRITES[name]
    ended = run(writes_in_a_group, WORKERS, strategy, write, when, (1,))
    assert ended[1].error_type == "OffbeatError", ended[1]
    text = f"changed {what} ({changes} such changes) between two steps, and not on every worker"
    assert text in ended[1].error
    if not GROUPS[strategy].survives_worker_loss:
        assert "worker 1 failed after" in ended[0].error


@pytest.mark.long(after=4)
@pytest.mark.parametrize("when", ["before the forward pass", "before the step"])
@pytest.mark.parametrize("name", ["scale", "replace", "load"])
@pytest.mark.parametrize("strategy", GROUPS)
def test_in_a_group_a_write_on_all_workers_takes_effect(strategy, name, when):
    write, _ = WRITES[name]
    first, second = values(run(writes_in_a_group, WORKERS, strategy, write, when, (0, 1)))
    assert first == second
    model, optimizer = make()
    for step, x in enumerate([*inputs(), *inputs()]):
        optimizer.zero_grad()
        if step == 2 * CHANGED_AT and when == "before the forward pass":
            write(model, optimizer)
        model(x.reshape(-1, 5)).square().mean().backward()
        if step == 2 * CHANGED_AT and when == "before the step":
            write(model, optimizer)
        optimizer.step()
    for found, expected in zip(first, model.parameters(), strict=True):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-10)
