"""A model and the optimizers that step its parameters, which are identified by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import OffbeatError
from offbeat.runtime.training.hyperparameters import ParameterGroup


class SeveralModels(nn.ModuleList):
    """Models that are trained together and called one by one, such as those of a GAN.

    A hook on its forward pass is one on each of theirs.
    """

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> RemovableHandle:
        """See `nn.Module.register_forward_pre_hook`."""
        return _Handles([model.register_forward_pre_hook(hook, **options) for model in self])

    def register_forward_hook(self, hook: Any, **options: Any) -> RemovableHandle:
        """See `nn.Module.register_forward_hook`."""
        return _Handles([model.register_forward_hook(hook, **options) for model in self])


class _Handles(RemovableHandle):
    """Removes the hooks of several handles."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """See `RemovableHandle.remove`."""
        for handle in self._handles:
            handle.remove()


class TrainingState:
    """A model and the optimizers that step it.

    Attributes:
        model: the same architecture on every worker; `SeveralModels` where there are several.
        optimizers: at least one; the same on every worker, in the same order.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers = model, tuple(optimizers)

    @property
    def groups(self) -> list[ParameterGroup]:
        """The parameter groups of all the optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def optimizer_of_group(self) -> list[Optimizer]:
        """The optimizer of each of the `groups`."""
        return [optimizer for optimizer in self.optimizers for _ in optimizer.param_groups]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def _names(self) -> dict[int, str]:
        """By the id of a parameter, its first name, in the model's order."""
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return a parameter's name in the model; None if it is not the model's."""
        return self._names.get(id(parameter))

    def parameters_of(self, group: ParameterGroup) -> dict[str, torch.Tensor]:
        """Return the parameters of a group by name, in the model's order, whatever order the group has."""
        held = {id(parameter): parameter for parameter in group["params"]}
        return {name: held[number] for number, name in self._names.items() if number in held}

    def names_without_optimizer(self) -> list[str]:
        """Return the names of the parameters that require a gradient and are in no group."""
        held = {id(parameter) for group in self.groups for parameter in group["params"]}
        return [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in held
        ]

    # Checkpoints ---------------------------------------------------------------------------------------

    def optimizer_states(self) -> list[dict[str, Any]]:
        """Return each optimizer's `state_dict()`, with parameters' names in place of their numbers."""
        return [self._named_state(optimizer) for optimizer in self.optimizers]

    def load_optimizer_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what `optimizer_states` returned; parameters are matched by name.

        Raises:
            OffbeatError: the number of optimizers or the parameters in their groups differ.
        """
        if len(states) != len(self.optimizers):
            raise OffbeatError(
                f"the state has {len(states)} optimizers and {len(self.optimizers)} were given to join: "
                "join with the optimizers of the saved state"
            )
        numbered = [
            self._numbered_state(optimizer, state)
            for optimizer, state in zip(self.optimizers, states, strict=True)
        ]
        for optimizer, state in zip(self.optimizers, numbered, strict=True):
            optimizer.load_state_dict(state)

    def _named_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        names = self._names_in_order(optimizer)
        return {
            **state,
            "state": {
                names[key] if isinstance(key, int) else key: row for key, row in state["state"].items()
            },
            "param_groups": [
                {**group, "params": [names[number] for number in group["params"]]}
                for group in state["param_groups"]
            ],
        }

    def _numbered_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        numbers = {name: number for number, name in enumerate(self._names_in_order(optimizer))}
        saved_names = [sorted(group["params"]) for group in state["param_groups"]]
        current_names = [sorted(self.parameters_of(group)) for group in optimizer.param_groups]
        if saved_names != current_names:
            raise OffbeatError(
                f"the saved state of {type(optimizer).__name__} has other parameters in its groups: "
                f"{_first_difference(saved_names, current_names)}; make the groups as they were when it was "
                "saved"
            )
        groups = []
        for saved, group in zip(state["param_groups"], optimizer.state_dict()["param_groups"], strict=True):
            current = {name: group[name] for name in ("params", "param_names") if name in group}
            groups.append({**saved, **current})
        rows = {numbers.get(key, key): row for key, row in state["state"].items()}
        return {**state, "state": rows, "param_groups": groups}

    def _names_in_order(self, optimizer: Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters in the order of its numbering."""
        return [self._names[id(one)] for group in optimizer.param_groups for one in group["params"]]


def _first_difference(saved_names: Sequence[Sequence[str]], current_names: Sequence[Sequence[str]]) -> str:
    """Describe the first group and parameter in which two lists of groups differ."""
    if len(saved_names) != len(current_names):
        return f"it has {len(saved_names)} groups, the optimizer has {len(current_names)}"
    number, (before, now) = next(
        (number, pair)
        for number, pair in enumerate(zip(saved_names, current_names, strict=True))
        if pair[0] != pair[1]
    )
    name = min({*before} ^ {*now})
    return f"in group {number}, {name} is {'missing' if name in before else 'new'}"
