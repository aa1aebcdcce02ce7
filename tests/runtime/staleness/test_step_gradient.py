"""Promises of `offbeat.runtime.staleness.step_gradient`."""

import pytest
import torch
from torch import nn

from offbeat.runtime.staleness.served_parameters import ServedParameters
from offbeat.runtime.staleness.step_gradient import StepGradient
from offbeat.runtime.training.trained import TrainingState


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(2)) for _ in range(2))


def step_gradient(keeps_gradients=True):
    model = Pair()
    optimizers = [torch.optim.SGD([one], lr=0.5) for one in (model.a, model.b)]
    trained = TrainingState(model, optimizers)
    return model, StepGradient(trained, ServedParameters(trained), keeps_gradients=keeps_gradients)


def backward(gradient, weight, loss):
    gradient.set_batch_weight(weight)
    gradient.count_batch()
    loss.backward()


def test_gradients_count_with_the_mean_weight_of_the_batches_that_count():
    model, gradient = step_gradient()
    for weight in (1.0, 0.0, 0.5):
        backward(gradient, weight, (4 * model.a).sum())
    gradient.collect(0)
    first, second = gradient.pop().groups
    assert (first.weight, first.values.tolist(), first.absent) == (0.75, [6.0, 6.0], frozenset())
    assert first.settings["lr"] == 0.5
    assert second is None  # not stepped


def test_a_group_whose_gradients_are_all_of_weight_0_has_none():
    model, gradient = step_gradient()
    backward(gradient, 0.0, model.a.sum())
    gradient.collect(0)
    assert model.a.grad is None
    first, _ = gradient.pop().groups
    assert (first.weight, first.values.tolist(), first.absent) == (0.0, [0.0, 0.0], {(0, 2)})


@pytest.mark.parametrize("keeps_gradients", [True, False])
def test_only_an_optimizer_that_steps_here_is_left_the_gradients(keeps_gradients):
    model, gradient = step_gradient(keeps_gradients)
    backward(gradient, 1.0, model.a.sum())
    gradient.collect(0)
    assert (model.a.grad is not None) == keeps_gradients
    gradient.drop()
    assert gradient.pop().groups == [None, None]
