"""Code that runs during a training, or in its thread, without an effect on the training."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from offbeat.runtime.validation.isolation import GlobalRandomState, IsolatedRandomness, isolated_evaluation

DRAWS = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3),
    "randint": lambda: torch.randint(10**9, (3,)),
    "randperm": lambda: torch.randperm(50),
    "normal": lambda: torch.normal(0.0, torch.ones(3)),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 20),
    "poisson": lambda: torch.poisson(torch.full((50,), 5.0)),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "normal_": lambda: torch.empty(3).normal_(),
    "random_": lambda: torch.empty(3, dtype=torch.int64).random_(),
    "bernoulli_": lambda: torch.empty(50).bernoulli_(0.5),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "a loader": lambda: torch.stack(
        [x for (x,) in DataLoader(TensorDataset(torch.arange(50)), shuffle=True)]
    ),
    "a sampler": lambda: torch.tensor(list(RandomSampler(range(50)))),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_torch_draws_from_a_generator_of_its_own(draw):
    before = GlobalRandomState()
    with IsolatedRandomness(1):
        one = draw()
    with IsolatedRandomness(1):
        again = draw()
    with IsolatedRandomness(2):
        other = draw()
    assert before.changed_generators() == []
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_an_explicit_generator_is_used():
    generator = torch.Generator().manual_seed(5)
    with IsolatedRandomness(1):
        drawn = torch.rand(3, generator=generator)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: nn.functional.dropout(torch.ones(9)), "torch's global generator"),
        (lambda: nn.Linear(3, 3), "torch's global generator"),
        (random.random, "Python's random module"),
        (np.random.rand, "numpy.random"),
        (np.random.randn, "numpy.random"),
    ],
)
def test_draws_from_global_generators_are_found_and_undone(draw, name):
    before = GlobalRandomState()
    with isolated_evaluation() as moved, IsolatedRandomness(1):
        draw()
    assert moved == [name]
    assert before.changed_generators() == []
    draw()
    assert before.changed_generators() == [name]


def test_settings_are_restored_also_after_an_error():
    threads = torch.get_num_threads()
    before = GlobalRandomState()

    def fail():
        torch.set_num_threads(threads + 1)
        torch.manual_seed(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), isolated_evaluation():
        fail()
    assert torch.get_num_threads() == threads
    assert before.changed_generators() == []
