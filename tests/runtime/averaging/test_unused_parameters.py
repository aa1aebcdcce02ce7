"""Which parameters get no gradient is found in the graph; a wrong prediction is not made twice."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.runtime.averaging.unused_parameters import UnusedParameters

LAYERS = 6


def layers():
    return nn.ModuleList(nn.Linear(2, 2) for _ in range(LAYERS))


def forward(model, used):
    x = torch.ones(1, 2)
    for layer in used:
        x = torch.tanh(model[layer](x))
    return x


def unused_after_backward(model, loss):
    """The numbers of the parameters that a backward pass leaves without a gradient."""
    model.zero_grad()
    loss.backward()
    return {number for number, one in enumerate(model.parameters()) if one.grad is None}


def needed(model):
    """Predictions for a model of which a pass has left a parameter without a gradient."""
    unused = UnusedParameters([*model.parameters()])
    unused.end_pass({0})
    return unused


@given(st.lists(st.lists(st.integers(0, LAYERS - 1), min_size=1), min_size=1, max_size=5))
def test_predicted_are_exactly_the_parameters_that_a_pass_leaves_without_a_gradient(passes):
    model = layers()
    unused = needed(model)
    for used in passes:
        output = forward(model, used)
        unused.add_output({"output": [output, None]})
        predicted = set(unused.predict())
        found = unused_after_backward(model, output.sum())
        assert predicted == found
        unused.end_pass(set(range(2 * LAYERS)) - found)


def test_nothing_is_predicted_before_a_pass_has_left_a_parameter_without_a_gradient():
    model = layers()
    unused = UnusedParameters([*model.parameters()])
    unused.add_output(forward(model, [0]))
    assert not unused.predict()
    unused.end_pass(set(range(2 * LAYERS)))
    unused.add_output(forward(model, [0]))
    assert not unused.predict()


def test_of_several_outputs_none_is_known_to_get_no_gradient():
    model = layers()
    unused = needed(model)
    for layer in range(2):
        unused.add_output(forward(model, [layer]))
    assert unused.predict() == set(range(4, 2 * LAYERS))


def test_outputs_count_until_a_pass_has_ended_and_without_one_nothing_is_predicted():
    model = layers()
    unused = needed(model)
    unused.add_output(forward(model, [0]))
    assert unused.predict()
    unused.end_pass({0, 1})
    assert not unused.predict()
    with torch.no_grad():
        unused.add_output(forward(model, [0]))
    assert not unused.predict()


def test_a_parameter_that_gets_a_gradient_despite_a_prediction_is_predicted_no_more():
    model = layers()
    unused = needed(model)
    for expected in (set(range(2, 2 * LAYERS)), set(range(4, 2 * LAYERS))):
        output = forward(model, [0])
        unused.add_output(output)
        assert unused.predict() == expected
        outside_the_output = sum(one.sum() for one in model[1].parameters())
        loss = output.sum() + outside_the_output
        with_gradient = set(range(2 * LAYERS)) - unused_after_backward(model, loss)
        assert with_gradient == {0, 1, 2, 3}
        unused.end_pass(with_gradient)
