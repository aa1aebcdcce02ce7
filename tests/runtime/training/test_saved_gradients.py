"""Promises of `offbeat.runtime.training.saved_gradients`."""

import torch

from offbeat.runtime.training.saved_gradients import SavedGradients


def parameters():
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]


def gradients(some):
    return [None if one.grad is None else one.grad.tolist() for one in some]


def test_passes_after_which_gradients_are_put_back_have_no_effect():
    a, b = parameters()
    a.sum().backward()
    saved = SavedGradients()
    saved.save([a, b])
    for _ in range(3):  # a pass adds in place to what was put back before
        (2 * a + 3 * b).sum().backward()
        saved.put_back()
        assert gradients([a, b]) == [[1.0, 1.0], None]


def test_only_gradients_of_named_parameters_are_put_back_and_forgotten():
    a, b = parameters()
    saved = SavedGradients()
    saved.save([a, b])
    (a + b).sum().backward()
    saved.put_back([b])
    assert gradients([a, b]) == [[1.0, 1.0], None]
    saved.forget([a])
    b.sum().backward()
    saved.put_back()
    assert gradients([a, b]) == [[1.0, 1.0], None]
    saved.forget()
    b.sum().backward()
    saved.put_back()
    assert gradients([a, b]) == [[1.0, 1.0], [1.0, 1.0]]


def test_outdated_gradients_count_as_none():
    a, b = parameters()
    a.sum().backward()
    saved = SavedGradients()
    saved.save([a, b], are_outdated=True)
    saved.put_back()
    assert gradients([a, b]) == [None, None]
