"""Promises of the outer optimizer: Nesterov momentum as in torch, delayed momentum, and plain averaging."""

import numpy as np
import pytest
import torch

from offbeat.numerics.outer_optimizer import OuterOptimizer


def test_its_steps_are_those_of_torchs_nesterov_momentum():
    chance = torch.Generator().manual_seed(3)
    anchor = torch.randn(6, generator=chance, dtype=torch.float64)
    parameter = torch.nn.Parameter(anchor.clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    optimizer, buffers = OuterOptimizer(), (torch.zeros_like(anchor),)
    for number in range(5):
        gradient = parameter.grad = torch.randn(6, generator=chance, dtype=torch.float64)
        reference.step()
        anchor, *buffers = optimizer.step(anchor, gradient, tuple(buffers), number)
        torch.testing.assert_close(anchor, parameter.detach(), rtol=0, atol=1e-14)


def test_with_a_rate_of_1_and_no_momentum_the_mean_becomes_the_anchor():
    anchor, _ = OuterOptimizer(rate=1.0, momentum=0.0).step(
        np.array([3.0, -1.0]), np.array([0.5, -1.25]), (np.zeros(2),), 0
    )
    assert anchor.tolist() == [2.5, 0.25]


def test_delayed_momentum_is_updated_and_applied_in_every_nth_step_only():
    """By hand, for n = 2, rate 1, momentum 0.5, gradients 4, 2, 4, 2."""
    optimizer = OuterOptimizer(rate=1.0, momentum=0.5, momentum_every=2)
    anchor, buffers = np.array([0.0]), (np.zeros(1), np.zeros(1))
    seen = []
    for number, gradient in enumerate((4.0, 2.0, 4.0, 2.0)):
        anchor, *buffers = optimizer.step(anchor, np.array([gradient]), tuple(buffers), number)
        seen.append((anchor[0], *(flat[0] for flat in buffers)))
    assert seen == [
        (-2.0, 0.0, 4.0),
        (-4.5, 3.0, 0.0),  # momentum (4 + 2) / 2; moves by 2 / 2 + 0.5 * 3
        (-6.5, 3.0, 4.0),
        (-9.75, 4.5, 0.0),  # momentum 0.5 * 3 + 3; moves by 2 / 2 + 0.5 * 4.5
    ]


def test_it_changes_no_argument():
    anchor, gradient, buffer = np.ones(2), np.zeros(2), np.ones(2)
    OuterOptimizer().step(anchor, gradient, (buffer,), 0)
    assert anchor.tolist() == buffer.tolist() == [1.0, 1.0]
    assert gradient.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0.0}, "expected an outer learning rate above 0, got 0.0"),
        ({"rate": float("nan")}, "expected an outer learning rate above 0"),
        ({"momentum": 1.0}, "expected an outer momentum from 0 up to below 1, got 1.0"),
        ({"momentum_every": 0}, "expected momentum_every to be at least 1 step, got 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        OuterOptimizer(**arguments)
