"""The gradient of a worker's step: from backward passes to what is pushed."""

from __future__ import annotations

import torch

from offbeat.numerics.ps.translation import settings_of_group
from offbeat.runtime.staleness.served_parameters import ServedParameters
from offbeat.runtime.staleness.shared_model import GroupGradient, WorkerGradient
from offbeat.runtime.training.saved_gradients import SavedGradients
from offbeat.runtime.training.trained import TrainingState


class StepGradient:
    """Collects the gradients of one step, group by group, and weights them with its batches.

    Args:
        trained: the model and its optimizers.
        parameters: the trained parameters.
        keeps_gradients: the optimizers of this worker step with the gradients, too; otherwise they get none.
    """

    def __init__(
        self, trained: TrainingState, parameters: ServedParameters, *, keeps_gradients: bool
    ) -> None:
        self._trained, self._parameters, self._keeps_gradients = trained, parameters, keeps_gradients
        # By group that this step has stepped so far: gradients, and the ranges where there are none.
        self._collected: dict[int, tuple[torch.Tensor, frozenset[tuple[int, int]]]] = {}
        self._has_gradient = False  # one of these is from a backward pass, not filled with zeros
        self._batch_weight = 1.0  # of the last batch
        self._batch_weights: list[float] = []  # of each forward pass since the last step
        self._saved_gradients = SavedGradients()

    def set_batch_weight(self, batches: float) -> None:
        """See `Synchronizer.set_batch_weight`."""
        self._saved_gradients.put_back()
        self._saved_gradients.forget()
        self._batch_weight = batches
        if not batches:
            self._saved_gradients.save(self._parameters)

    def count_batch(self) -> None:
        """Count the batch of a forward pass."""
        if self._batch_weight:
            self._batch_weights.append(self._batch_weight)

    def collect(self, number: int) -> None:
        """Pack the gradients of a group that its optimizer is about to step, on their device."""
        group, offsets = self._parameters.groups[number], self._parameters.offsets[number]
        self._saved_gradients.put_back(group.values())
        self._saved_gradients.forget(group.values())
        absent = frozenset(offsets.key_range_of(name) for name, entry in group.items() if entry.grad is None)
        gradients = {
            name: torch.zeros_like(entry) if entry.grad is None else entry.grad
            for name, entry in group.items()
        }
        self._collected[number] = self._parameters.pack(number, gradients), absent
        self._has_gradient |= len(absent) < len(group)
        if not self._keeps_gradients:
            for parameter in group.values():
                parameter.grad = None

    def pop(self) -> WorkerGradient:
        """Return and drop the gradients times the mean batch weight; None for groups not stepped.

        They are still on their device, for which the host has not waited.
        """
        weight = sum(self._batch_weights) / len(self._batch_weights) if self._batch_weights else 0.0
        counts = weight if self._has_gradient else 0.0
        groups: list[GroupGradient | None] = []
        for number, group in enumerate(self._trained.groups):
            if number not in self._collected:
                groups.append(None)
                continue
            values, absent = self._collected[number]
            if weight != 1.0:
                values.mul_(weight)
            groups.append(GroupGradient(counts, values, absent, settings_of_group(group)))
        self.drop()
        return WorkerGradient(groups)

    def drop(self) -> None:
        """Drop what was collected and counted."""
        self._batch_weights.clear()
        self._collected.clear()
        self._has_gradient = False
