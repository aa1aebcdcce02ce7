"""Updates on servers, against torch's optimizers and the papers' formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offbeat.numerics.ps.updates import FTRL, SGD, Adagrad, Adam, Assign, SoftThreshold, Sum, with_settings

KEYS, STEPS = 50, 30

PAIRS = [
    (SGD(0.1), torch.optim.SGD, {"lr": 0.1}),
    (SGD(0.1, weight_decay=0.01), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    (SGD(0.1, momentum=0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    (Adagrad(0.1, weight_decay=0.01), torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.01}),
    (Adam(0.1), torch.optim.Adam, {"lr": 0.1}),
    (
        Adam(0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
        torch.optim.Adam,
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
    ),
    (
        Adam(0.1, weight_decay=0.1, decoupled=True),
        torch.optim.AdamW,
        {"lr": 0.1, "weight_decay": 0.1},
    ),
]


def states_of(update, values):
    return {name: np.zeros_like(values) for name in update.states}


@pytest.mark.parametrize(("update", "kind", "arguments"), PAIRS, ids=lambda one: str(one)[:40])
def test_an_update_takes_the_steps_of_torchs_optimizer(update, kind, arguments):
    rng = np.random.default_rng(0)
    values = rng.normal(size=KEYS)
    parameter = torch.nn.Parameter(torch.tensor(values))
    optimizer = kind([parameter], **arguments)
    states = states_of(update, values)
    for _ in range(STEPS):
        gradients = rng.normal(size=KEYS)
        before = gradients.copy()
        update.apply(values, states, gradients)
        assert (gradients == before).all()
        parameter.grad = torch.tensor(gradients)
        optimizer.step()
    np.testing.assert_allclose(values, parameter.detach().numpy(), rtol=1e-12, atol=1e-12)


UPDATES = [one for one, *_ in PAIRS] + [FTRL(0.1, l1=0.1, l2=0.1), SoftThreshold(0.1, 0.3), Sum(), Assign()]


@pytest.mark.parametrize("update", UPDATES, ids=lambda one: str(one)[:40])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_range_may_be_cut_anywhere(update, dtype):
    """Replicas and masters, before and after a range was divided, hold the same bits."""
    rng = np.random.default_rng(1)
    whole = rng.normal(size=KEYS).astype(dtype)
    parts = whole.copy()
    states, states_of_parts = states_of(update, whole), states_of(update, parts)
    for step in range(STEPS):
        pushed = rng.normal(size=KEYS).astype(dtype)
        update.apply(whole, states, pushed)
        cut = step * KEYS // STEPS
        for part in (slice(0, cut), slice(cut, KEYS)):
            update.apply(
                parts[part], {name: rows[part] for name, rows in states_of_parts.items()}, pushed[part]
            )
    assert whole.dtype == dtype
    assert whole.tobytes() == parts.tobytes()
    assert all(states[name].tobytes() == states_of_parts[name].tobytes() for name in states)


@pytest.mark.parametrize("update", UPDATES, ids=lambda one: str(one)[:40])
@pytest.mark.parametrize("shape", [(KEYS,), (KEYS, 3)], ids=str)
def test_a_key_gets_the_same_bits_with_any_other_keys_in_its_push(update, shape):
    """Also where some have been pushed more often than others."""
    rng = np.random.default_rng(5)
    together = rng.normal(size=shape).astype(np.float32)
    alone = together.copy()
    states, states_alone = states_of(update, together), states_of(update, alone)
    for step in range(STEPS):
        keys = np.arange(KEYS) if step % 3 == 0 else np.flatnonzero(rng.random(KEYS) < 0.5)
        pushed = rng.normal(size=(len(keys), *shape[1:])).astype(np.float32)
        rows, kept = together[keys], {name: one[keys] for name, one in states.items()}
        update.apply(rows, kept, pushed)
        together[keys] = rows
        for name, one in kept.items():
            states[name][keys] = one
        for place, key in enumerate(keys):
            one_key = slice(key, key + 1)
            own = {name: one[one_key] for name, one in states_alone.items()}
            update.apply(alone[one_key], own, pushed[place : place + 1])
    assert together.tobytes() == alone.tobytes()
    assert all(states[name].tobytes() == states_alone[name].tobytes() for name in states)


def test_rows_of_several_values_are_like_single_ones():
    rng = np.random.default_rng(2)
    for update in UPDATES:
        flat = rng.normal(size=KEYS)
        rows = flat.reshape(-1, 5).copy()
        pushed = rng.normal(size=KEYS)
        states, states_of_rows = states_of(update, flat), states_of(update, rows)
        for _ in range(3):
            update.apply(flat, states, pushed)
            update.apply(rows, states_of_rows, pushed.reshape(-1, 5))
        assert (rows.ravel() == flat).all()


def test_ftrl_is_the_closed_form_of_its_minimisation():
    """w minimises the linearised losses, the proximal terms and both penalties, coordinate by coordinate."""
    update = FTRL(alpha=0.3, beta=0.7, l1=0.5, l2=0.2)
    rng = np.random.default_rng(3)
    values = np.zeros(20)
    states = states_of(update, values)
    linear, curvature, centre = np.zeros(20), np.full(20, 0.7 / 0.3), np.zeros(20)
    squares = np.zeros(20)
    for _ in range(STEPS):
        pushed = rng.normal(size=20)
        sigma = (np.sqrt(squares + pushed**2) - np.sqrt(squares)) / 0.3
        linear, centre, curvature = linear + pushed, centre + sigma * values, curvature + sigma
        squares += pushed**2
        update.apply(values, states, pushed)
    slope = linear - centre + (curvature + 0.2) * values
    zero = values == 0
    assert zero.any()
    assert not zero.all()
    assert (np.abs(slope[zero]) <= 0.5 + 1e-9).all()
    np.testing.assert_allclose(slope[~zero] + 0.5 * np.sign(values[~zero]), 0, atol=1e-9)


def test_soft_thresholding_sets_small_values_to_zero():
    values = np.array([0.5, -0.5, 0.02, 0.0])
    SoftThreshold(lr=0.1, l1=0.3).apply(values, {}, np.array([1.0, -1.0, 0.0, 4.0]))
    np.testing.assert_allclose(values, [0.37, -0.37, 0.0, -0.37])


def test_a_sum_adds_and_an_assignment_replaces():
    values = np.array([1.0, 2.0])
    Sum().apply(values, {}, np.array([3.0, 4.0]))
    assert values.tolist() == [4.0, 6.0]
    Assign().apply(values, {}, np.array([7.0, 8.0]))
    assert values.tolist() == [7.0, 8.0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(-1), "lr of at least 0, got -1"),
        (lambda: SGD(1, nesterov=True), "momentum above 0 with nesterov"),
        (lambda: Adagrad(1, eps=-1), "eps of at least 0, got -1"),
        (lambda: Adam(1, betas=(0.9, 1.0)), r"betas from 0 to below 1, got \(0.9, 1.0\)"),
        (lambda: FTRL(0), "alpha above 0, got 0"),
        (lambda: FTRL(1, l1=float("nan")), "l1 of at least 0, got nan"),
        (lambda: SoftThreshold(1, -0.1), "l1 of at least 0, got -0.1"),
    ],
)
def test_an_impossible_update_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("update", "settings", "expected"),
    [
        (SGD(1), {"lr": 2}, SGD(2.0)),
        (SGD(1, momentum=0.5), {"lr": 2.0, "momentum": 0.25}, SGD(2.0, 0.25)),
        (Adam(1), {"betas": [0.5, 0.25], "eps": 1}, Adam(1, (0.5, 0.25), 1.0)),
        (FTRL(1), {"alpha": 2, "l1": 0.5}, FTRL(2.0, l1=0.5)),
        (Sum(), {}, Sum()),
    ],
)
def test_settings_replace_an_updates_numbers(update, settings, expected):
    assert with_settings(update, settings) == expected


@pytest.mark.parametrize(
    ("update", "settings", "words"),
    [
        (SGD(1), {"rate": 2}, "settings of SGD among lr, momentum, weight_decay, got rate"),
        (
            SGD(1, momentum=0.5),
            {"nesterov": True},
            "settings of SGD among lr, momentum, weight_decay, got nesterov",
        ),
        (Assign(), {"lr": 2}, "settings of Assign among none, got lr"),
        (SGD(1), {"lr": "2"}, "a number as lr, got '2'"),
        (SGD(1), {"lr": True}, "a number as lr, got True"),
        (SGD(1), {"lr": [2.0]}, r"a number as lr, got \[2.0\]"),
        (SGD(1), {"lr": -2.0}, "lr of at least 0, got -2"),
        (SGD(1), {"lr": float("nan")}, "lr of at least 0, got nan"),
        (
            SGD(1),
            {"momentum": 0.5},
            r"settings with which SGD keeps \[\], got .* it would keep \['momentum'\]",
        ),
        (Adam(1), {"betas": 0.5}, "2 numbers as betas, got 0.5"),
        (Adam(1), {"betas": [0.5]}, "2 numbers as betas"),
        (Adam(1), {"betas": [0.5, None]}, "2 numbers as betas"),
        (Adam(1), {"betas": [0.5, 1.0]}, "two betas from 0 to below 1"),
    ],
)
def test_settings_that_an_update_does_not_take_are_refused(update, settings, words):
    with pytest.raises(ValueError, match=f"expected {words}"):
        with_settings(update, settings)
