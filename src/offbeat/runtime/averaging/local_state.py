"""What a checkpoint holds of one worker's gradients: by the parameters' names, here by their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offbeat.errors import OffbeatError
from offbeat.runtime.averaging.buckets import summed_dtype


def by_name(values: Mapping[int, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return values by the names of their parameters."""
    return {names[number]: value for number, value in values.items()}


def by_number(
    values: Mapping[str, torch.Tensor], names: Sequence[str], parameters: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return copies of values by their parameters' numbers, 1-D, in the dtypes in which gradients are summed.

    Raises:
        OffbeatError: a value is not that of a parameter, or has another number of elements.
    """
    number_of = {name: number for number, name in enumerate(names)}
    for name, value in values.items():
        expected = parameters[number_of[name]].numel() if name in number_of else "no such parameter"
        if value.numel() != expected:
            raise OffbeatError(
                f"expected the state of a worker with this model, got {value.numel()} elements for {name!r} "
                f"({expected} here): load the state that a worker of the same job has saved"
            )
    numbered = {number_of[name]: value for name, value in values.items()}
    return {
        number: value.flatten().to(summed_dtype(parameters[number]), copy=True)
        for number, value in numbered.items()
    }
