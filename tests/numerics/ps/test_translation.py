"""Optimizers of torch on a server's table, step by step, in float64; and their states both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offbeat.numerics.ps.entries import Entries, PushMeta
from offbeat.numerics.ps.tables import ArrayTable
from offbeat.numerics.ps.translation import export_states, import_states, settings_of_group, update_for_group

SHAPE = (7, 5)
NUMBERS, STEPS = 35, 36

KINDS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.02}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.02}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.02}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.02, "decoupled_weight_decay": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.1, dtype=torch.float64)}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.02}),
]


class Both:
    """One parameter with torch's optimizer, and on a table."""

    def __init__(self, kind, options):
        self.rng = np.random.default_rng(0)
        self.parameter = torch.nn.Parameter(torch.tensor(self.rng.normal(size=SHAPE)))
        self.optimizer = kind([self.parameter], **options)
        self.table = ArrayTable(NUMBERS, 9, update_for_group(self.group, kind), dtype=np.float64)
        self.put({})

    @property
    def group(self):
        return self.optimizer.param_groups[0]

    def put(self, states):
        rows = self.parameter.detach().numpy().ravel().copy()
        self.table.apply(0, NUMBERS, Entries(0, rows, None, PushMeta(states=states)))

    def read(self):
        kept = self.table.read(0, NUMBERS, None, states=True)
        return kept.values, kept.meta.states

    def step(self):
        self.parameter.grad = torch.tensor(self.rng.normal(size=SHAPE))
        settings = PushMeta(settings=settings_of_group(self.group))
        content = Entries(0, self.parameter.grad.numpy().ravel().copy(), None, settings)
        self.table.check(content, 0, NUMBERS)
        self.table.apply(0, NUMBERS, content)
        self.optimizer.step()

    def agree(self):
        values, states = self.read()
        mine = self.parameter.detach().numpy().ravel()
        np.testing.assert_allclose(values, mine, rtol=1e-12, atol=1e-14)
        theirs = export_states(self.optimizer, self.parameter)
        assert theirs.keys() == states.keys()
        for name, rows in theirs.items():
            np.testing.assert_allclose(states[name], rows, rtol=1e-12, atol=1e-14)


def named(one):
    return one.__name__ if isinstance(one, type) else ", ".join(map(str, one))


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=named)
def test_a_server_takes_the_steps_that_torch_takes_with_a_schedule(kind, options):
    both = Both(kind, options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(both.optimizer, T_0=10, eta_min=0.01)
    for step in range(STEPS):
        both.step()
        both.agree()
        if step % 10 == 9 and both.group["weight_decay"]:
            both.group["weight_decay"] *= 1.5
        schedule.step()


@pytest.mark.parametrize(("kind", "options"), [one for one in KINDS if "momentum" in one[1]], ids=named)
def test_momentum_may_change_from_step_to_step(kind, options):
    both = Both(kind, options)
    for momentum in (0.5, 0.9, 0.99):
        both.group["momentum"] = momentum
        both.step()
        both.agree()


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=named)
def test_states_are_exported_and_imported_in_the_middle_of_training(kind, options):
    """From the table into a new optimizer, and from that one into an empty table."""
    both = Both(kind, options)
    for _ in range(STEPS // 2):
        both.step()
    values, states = both.read()
    with torch.no_grad():
        both.parameter.copy_(torch.tensor(values).reshape(SHAPE))
    former, both.optimizer = both.optimizer, kind([both.parameter], **options)
    import_states(both.optimizer, both.parameter, {"values": values} | states)
    expected = former.state_dict()["state"].get(0, {})
    found = both.optimizer.state_dict()["state"].get(0, {})
    assert found.keys() == expected.keys()
    for name, kept in found.items():
        reference = expected[name]
        if kept is None:
            assert reference is None
            continue
        assert (kept.dtype, kept.shape, kept.device) == (reference.dtype, reference.shape, reference.device)
        assert not kept.requires_grad
        if (kind, name) != (torch.optim.Adagrad, "step"):
            torch.testing.assert_close(kept, reference, rtol=1e-12, atol=1e-14)
    for _ in range(5):
        both.step()
        both.agree()
    both.table.remove_block(0, NUMBERS)
    both.put(export_states(both.optimizer, both.parameter))
    both.agree()
    for _ in range(5):
        both.step()
        both.agree()


def test_an_optimizer_restored_from_its_state_dict_continues():
    """Through `state_dict`, as a checkpoint does."""
    both = Both(torch.optim.Adam, {"lr": 0.1})
    for _ in range(3):
        both.step()
    saved = both.optimizer.state_dict()
    both.optimizer = torch.optim.Adam([both.parameter], lr=0.1)
    both.optimizer.load_state_dict(saved)
    both.put(export_states(both.optimizer, both.parameter))
    both.step()
    both.agree()


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=named)
def test_before_the_first_step_states_are_zero(kind, options):
    parameter = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float32))
    optimizer = kind([parameter], **options)
    states = export_states(optimizer, parameter)
    assert states.keys() == set(update_for_group(optimizer.param_groups[0], kind).states)
    for rows in states.values():
        assert (rows.dtype, rows.tolist()) == (np.float32, [0] * 6)


def test_a_parameter_counts_in_its_own_group():
    one, another = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [one]}, {"params": [another], "momentum": 0.5, "lr": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert export_states(optimizer, one) == {}
    assert list(export_states(optimizer, another)) == ["momentum"]
    assert settings_of_group(optimizer.param_groups[1]) == {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.0}


def test_settings_are_plain_numbers():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.25), betas=(0.5, 0.75))
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    settings = settings_of_group(optimizer.param_groups[0])
    assert settings["betas"] == (0.5, 0.75)
    assert {type(value) for value in settings.values()} == {float, tuple}
    assert settings.keys() == {"lr", "betas", "eps", "weight_decay"}


class Derived(torch.optim.SGD):
    """It may do anything."""


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, "SGD with dampening=0.5"),
        (torch.optim.SGD, {"lr": 0.1, "maximize": True}, "SGD with maximize=True"),
        (torch.optim.SGD, {"lr": 0.1, "differentiable": True}, "SGD with differentiable=True"),
        (torch.optim.Adam, {"amsgrad": True}, "Adam with amsgrad=True"),
        (torch.optim.AdamW, {"amsgrad": True}, "AdamW with amsgrad=True"),
        (torch.optim.Adagrad, {"lr_decay": 0.5}, "Adagrad with lr_decay=0.5"),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}, "initial_accumulator_value=0.5"),
        (torch.optim.RMSprop, {}, "RMSprop"),
        (Derived, {"lr": 0.1}, "Derived"),
    ],
)
def test_unsupported_options_and_optimizers_are_refused_by_name(kind, options, words):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([parameter], **options)
    calls = (
        lambda: update_for_group(optimizer.param_groups[0], kind),
        lambda: export_states(optimizer, parameter),
        lambda: import_states(optimizer, parameter, {}),
    )
    for call in calls:
        with pytest.raises(
            ValueError, match=rf"^expected one of SGD, Adagrad, Adam, AdamW .*{words}$"
        ) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"mean": np.ones(2), "squares": np.ones(2)}, "2 rows of steps, got none"),
        ({"mean": np.ones(3), "squares": np.ones(2), "steps": np.ones(2)}, r"2 rows of mean, got \(3,\)"),
        (
            {"mean": np.ones(2), "squares": np.ones(2), "steps": np.arange(2)},
            "the same number of steps for all numbers of a parameter",
        ),
    ],
)
def test_states_that_torch_cannot_keep_are_refused_and_nothing_changes(rows, words):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    with pytest.raises(ValueError, match=f"expected {words}"):
        import_states(optimizer, parameter, rows)
    assert not optimizer.state


def test_a_tensor_that_is_not_the_optimizers_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(
        ValueError, match=r"expected a parameter of the optimizer, got a tensor of shape \(3,\)"
    ):
        export_states(optimizer, torch.ones(3))
