"""Tracing: results are the module's in any order that respects the dependencies; what is refused."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from offbeat.errors import OffbeatError
from offbeat.numerics.nimble.stream_assignment import assign_one_stream, assign_streams
from offbeat.runtime.nimble.program import ProgramRun, same_values, trace
from support.branching_models import MODELS, Written, a_model, rows
from support.random_graphs import predecessors

ORDERS = 60


def a_random_order(successors, seed):
    """A topological order that runs each operation as late or as early as chance has it."""
    chance = random.Random(seed)
    waiting = [len(earlier) for earlier in predecessors(successors)]
    free = [number for number, count in enumerate(waiting) if not count]
    order = []
    while free:
        order.append(free.pop(chance.randrange(len(free)) if seed % 2 else -1))
        for to in successors[order[-1]]:
            waiting[to] -= 1
            if not waiting[to]:
                free.append(to)
    return order


@torch.no_grad()
def outputs_in_order(program, order, inputs):
    run = ProgramRun(program, [()] * len(order), inputs)
    for number in order:
        run.call(number)
    return run.outputs()


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert same_values(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("name", MODELS)
def test_in_any_order_that_respects_the_dependencies_the_results_are_the_modules(name):
    model, inputs = a_model(name)
    program = trace(model, inputs())
    for seed in range(ORDERS):
        order = a_random_order(program.successors, seed)
        with torch.no_grad():
            expected = tree_leaves(model(*inputs(seed)))
        assert_same(outputs_in_order(program, order, inputs(seed)), expected)


def test_without_the_order_of_writes_some_order_gives_other_results():
    """That the test above can fail: without the edges that no value travels on, it would."""
    model, inputs = a_model("written")
    program = trace(model, inputs())
    values_only = [
        {to for to in following if program.operators[node] in program.operators[to].all_input_nodes}
        for node, following in enumerate(program.successors)
    ]
    assert values_only != [*program.successors]
    with torch.no_grad():
        expected = tree_leaves(model(*inputs()))
    different = 0
    for seed in range(ORDERS):
        found = outputs_in_order(program, a_random_order(values_only, seed), inputs())
        different += not all(map(torch.equal, found, expected))
    assert different


def test_an_operator_that_returns_its_argument_shares_its_memory():
    """`dropout` in evaluation mode, which does not declare it: later writes change both."""
    program = trace(Written().eval(), rows())
    names = [node.name for node in program.operators]
    reading = names.index("exp"), names.index("exp_1")
    writing = names.index("relu_")
    assert writing in program.successors[reading[0]]
    assert reading[1] in program.successors[writing]


@pytest.mark.parametrize("name", MODELS)
def test_a_value_is_dropped_after_its_last_use_unless_another_stream_uses_it(name):
    model, inputs = a_model(name)
    program = trace(model, inputs())
    for assignment in (assign_streams(program.successors), assign_one_stream(program.successors)):
        releases = program.find_releases(assignment)
        place = {launch.node: place for place, launch in enumerate(assignment.launches)}
        stream = {launch.node: launch.stream for launch in assignment.launches}
        number_of = {node: number for number, node in enumerate(program.operators)}
        dropped = {node: number for number, nodes in enumerate(releases) for node in nodes}
        for node, number in number_of.items():
            uses = {number, *(number_of[user] for user in node.users if user in number_of)}
            is_kept = node in program.results or len({stream[use] for use in uses}) > 1
            assert (node not in dropped) == is_kept
            if not is_kept:
                assert dropped[node] == max(uses, key=place.__getitem__)


def test_on_one_stream_nothing_but_the_outputs_is_alive_at_the_end():
    model, inputs = a_model("branches")
    program = trace(model, inputs())
    assignment = assign_one_stream(program.successors)
    run = ProgramRun(program, program.find_releases(assignment), inputs())
    made = []
    with torch.no_grad():
        for launch in assignment.launches:
            run.call(launch.node)
            value = run._values.get(program.operators[launch.node])
            made += [weakref.ref(one) for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
            del value
    outputs = run.outputs()
    assert [one() for one in made if one() is not None] == outputs


class Decides(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


class ReadsValues(nn.Module):
    def forward(self, x):
        return x * int(x[0, 0].item() + 5)


class MultipliesByValue(nn.Module):
    def forward(self, x):
        return x * x[0, 0].item()


class SelectsByValue(nn.Module):
    def forward(self, x):
        return x[x > 0].sum()


class Draws(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Tracks(nn.Module):
    """Normalizes as in training mode, by a function that does not declare what it writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.variance, training=True)


class WritesItsInput(nn.Module):
    def forward(self, x):
        return x.relu_() + 1


class WritesItsParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x):
        return x * self.weight.mul_(0.9)


REFUSED = {
    Decides: "decides by values of tensors",
    ReadsValues: "decides by values of tensors",
    MultipliesByValue: "depends on values of tensors",
    SelectsByValue: "depends on values of tensors",
    Draws: "draws random numbers",
    Counts: "writes to b_calls",
    Tracks: "changes b_mean, a buffer of the module",
    WritesItsInput: "writes to x",
    WritesItsParameter: "writes to p_weight",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_is_no_fixed_list_of_operators_is_refused_in_words_and_leaves_no_trace(kind):
    model, inputs = kind().eval(), rows()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with pytest.raises(OffbeatError, match=REFUSED[kind]):
        trace(model, inputs)
    assert torch.equal(inputs[0], rows()[0])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_values_are_the_same_with_not_a_number_but_not_in_another_dtype():
    some = torch.tensor([1.0, float("nan")])
    assert same_values(some, some.clone())
    assert not same_values(some, torch.tensor([2.0, float("nan")]))
    assert not same_values(some, some.double())
