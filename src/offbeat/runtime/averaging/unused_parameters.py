"""Which parameters a backward pass leaves without a gradient, found in the autograd graph before it begins.

This module changes no gradient and sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from offbeat.runtime.training.backward import parameters_in_graph


class UnusedParameters:
    """Predicts which parameters get no gradient in a pass: buckets need not wait for these until its end.

    A prediction may be wrong, as the graph of an output does not show all: a loss may use a parameter
    itself, and a reentrant checkpoint hides what is in it. A parameter that gets a gradient despite a
    prediction is in no later one.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2.3 (`find_unused_parameters`). Deviations: graphs
    are searched without an option, from the first pass on that leaves a parameter without a gradient; and a
    wrong prediction costs a second exchange, where DDP raises an error.

    Args:
        parameters: the predicted ones, by number.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._unpredictable: set[int] = set()
        self._is_needed = False  # a pass has left a parameter without a gradient
        self._used: set[int] = set()  # in the outputs since the last pass
        self._predicted: set[int] = set()

    def add_output(self, output: Any) -> None:
        """Search the graph of an output of the model; passes may follow from several."""
        if self._is_needed:
            self._used.update(
                number
                for parameter in parameters_in_graph(output)
                if (number := self._numbers.get(parameter)) is not None
            )

    def predict(self) -> Collection[int]:
        """Return the parameters that get no gradient in the pass that begins; none without a graph."""
        if self._used:
            self._predicted = set(self._numbers.values()) - self._used - self._unpredictable
        return self._predicted

    def end_pass(self, with_gradient: Collection[int]) -> None:
        """Learn from the pass that has ended.

        Args:
            with_gradient: the parameters that have got a gradient.
        """
        self._is_needed |= len(with_gradient) < len(self._numbers)
        self._unpredictable |= self._predicted.intersection(with_gradient)
        self.forget_pass()

    def forget_pass(self) -> None:
        """Forget outputs and prediction of a pass."""
        self._used, self._predicted = set(), set()
