"""A worker's parameters and their optimizers' state in the form in which servers keep them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.numerics.ps.tensors import TensorTable
from offbeat.numerics.ps.translation import export_states, import_states, update_for_group
from offbeat.runtime.devices.host import Host
from offbeat.runtime.devices.interface import Device
from offbeat.runtime.training.checks import check_no_overlap
from offbeat.runtime.training.trained import TrainingState
from offbeat.torch_compat import copy_tensors

Array = NDArray[Any]


class ServedParameters:
    """A worker's trained parameters as flat vectors, one for each group of its optimizers.

    Args:
        trained: the model and its optimizers.

    Attributes:
        optimizers: by group, this worker's optimizer.
        groups: by group, its parameters by name, in the order of the vector.
        offsets: by group, where each parameter is in the vector.
        updates: by group, the servers' optimizer.
        device: holds them; the CPU unless it is set.

    Raises:
        OffbeatError: an optimizer that servers cannot replace, or parameters that they cannot keep.
    """

    def __init__(self, trained: TrainingState) -> None:
        self._trained = trained
        self.device: Device = Host()
        self.optimizers = trained.optimizer_of_group
        try:
            self.updates = [
                update_for_group(group, type(optimizer))
                for group, optimizer in zip(trained.groups, self.optimizers, strict=True)
            ]
            self.groups = [
                {name: entry for name, entry in trained.parameters_of(group).items() if entry.requires_grad}
                for group in trained.groups
            ]
            self.offsets = [TensorTable.from_tensors(group.items()) for group in self.groups]
        except ValueError as error:
            raise OffbeatError(str(error)) from error
        self._check_disjoint()

    def _check_disjoint(self) -> None:
        """Reject parameters in several groups, or overlapping in memory: servers step each number once."""
        names = [self._trained.name_of(entry) for group in self._trained.groups for entry in group["params"]]
        if len({*names}) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise OffbeatError(
                f"{duplicate} is in several of the optimizers, or in one of them several times: servers keep "
                "each parameter once, with one of them"
            )
        check_no_overlap({name: entry for group in self.groups for name, entry in group.items()})

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield all parameters."""
        return (parameter for group in self.groups for parameter in group.values())

    # On the model's device, for which the host does not wait -----------------------------------------------

    def empty(self, number: int) -> torch.Tensor:
        """Return a new vector for a group, with any content."""
        offsets = self.offsets[number]
        return self.device.empty(offsets.keys, getattr(torch, offsets.dtype))

    def pack(self, number: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return tensors of the shapes of a group's parameters, by name, as a new vector."""
        return self.offsets[number].pack(tensors, self.empty(number))

    def copy_values(self) -> list[torch.Tensor]:
        """Return a copy of the parameters, of each group."""
        return [self.pack(number, group) for number, group in enumerate(self.groups)]

    def changes_since(self, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what has been added to the parameters since `copy_values`, of each group."""
        return [now.sub_(old) for now, old in zip(self.copy_values(), before, strict=True)]

    def load_values(self, number: int, values: torch.Tensor) -> None:
        """Set the parameters of a group."""
        parts = self.offsets[number].views(values)
        copy_tensors([entry.detach() for entry in self.groups[number].values()], [*parts.values()])

    # Arrays of the host ------------------------------------------------------------------------------------

    def states(self) -> Iterator[Mapping[str, Array]]:
        """Yield "values" and the optimizer's state by name, of each group."""
        for optimizer, group, offsets in zip(self.optimizers, self.groups, self.offsets, strict=True):
            states: dict[str, Array] = {"values": offsets.gather(group).copy()}
            kept = [export_states(optimizer, parameter) for parameter in group.values()]
            for name in kept[0] if kept else ():
                states[name] = np.concatenate([entry[name].reshape(-1) for entry in kept])
            yield states

    def load_states(self, kept: Sequence[dict[str, Array]]) -> None:
        """Set parameters and optimizer state to those of each group, as `states` yields them."""
        for number, (optimizer, states) in enumerate(zip(self.optimizers, kept, strict=True)):
            values = torch.from_numpy(states.pop("values"))
            self.load_values(number, values.to(self._trained.device))
            for name, parameter in self.groups[number].items():
                first, last = self.offsets[number].key_range_of(name)
                rows = {state: values[first:last] for state, values in states.items()}
                import_states(optimizer, parameter, rows)

    def tensors_not_served(self) -> Sequence[torch.Tensor]:
        """Return the tensors that the servers do not keep: buffers, and parameters frozen at join."""
        served = {id(entry) for entry in self}
        model = self._trained.model
        return [*model.buffers(), *(entry for entry in model.parameters() if id(entry) not in served)]
