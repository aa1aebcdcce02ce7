"""Hyperparameters of optimizers as plain values: numbers, refused values, and tensors that are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offbeat.errors import OffbeatError
from offbeat.runtime.training.hyperparameters import (
    apply_settings,
    find_numbers,
    plain_settings,
    read_numbers,
    write_numbers,
)


def group(**settings):
    return {"params": [torch.zeros(2)], **settings}


def test_scalar_tensors_and_numpy_scalars_become_numbers():
    settings = plain_settings(group(lr=torch.tensor(0.5), eps=np.float32(0.25), steps=np.int64(3)))
    assert settings == {"eps": 0.25, "lr": 0.5, "steps": 3}
    assert [type(settings[name]) for name in ("eps", "lr", "steps")] == [float, float, int]


def test_parameters_and_their_names_are_not_hyperparameters():
    assert plain_settings(group(param_names=["weight"], lr=1.0)) == {"lr": 1.0}


@pytest.mark.parametrize(
    "value", [torch.zeros(2), torch.tensor(1j), {"a": 1}, print, (1.0, object()), np.zeros(3), 1j]
)
def test_a_hyperparameter_that_is_not_a_plain_value_is_refused_by_name(value):
    with pytest.raises(OffbeatError, match="hyperparameter 'betas' is a"):
        plain_settings(group(betas=value))


def test_numbers_are_found_in_tuples_and_tensors_and_switches_are_skipped():
    groups = [group(lr=torch.tensor(0.5), betas=(0.9, torch.tensor(0.25)), fused=True, mode="a", eps=None)]
    places = find_numbers(groups)
    assert [(place.name, place.element) for place in places] == [("betas", 0), ("betas", 1), ("lr", None)]
    assert read_numbers(groups, places) == [0.9, 0.25, 0.5]


def test_writing_keeps_tensor_objects_and_unchanged_values():
    rate, beta, betas = torch.tensor(0.5), torch.tensor(0.25), (0.9, 0.99)
    groups = [group(lr=rate, betas=betas, others=[0.5, beta], momentum=0)]
    places = find_numbers(groups)
    write_numbers(groups, places, read_numbers(groups, places))
    assert groups[0]["betas"] is betas
    assert type(groups[0]["momentum"]) is int
    changed = [value / 2 for value in read_numbers(groups, places)]
    write_numbers(groups, places, changed)
    assert read_numbers(groups, places) == changed
    assert groups[0]["lr"] is rate
    assert groups[0]["others"][1] is beta
    assert groups[0]["betas"] == (0.45, 0.495)
    assert type(groups[0]["betas"]) is tuple


def test_applied_settings_have_the_other_workers_values_in_the_local_types():
    theirs = group(
        lr=torch.tensor(0.1), betas=(0.5, torch.tensor(0.75)), foreach=None, initial_lr=0.3, mode="b"
    )
    rate, beta = torch.tensor(0.7), torch.tensor(0.1)
    own = group(lr=rate, betas=(0.9, beta), foreach=True, mode="a")
    apply_settings(own, plain_settings(theirs))
    assert plain_settings(own) == plain_settings(theirs)
    assert own["lr"] is rate
    assert own["betas"][1] is beta
    assert type(own["betas"]) is tuple
    assert own["foreach"] is None
