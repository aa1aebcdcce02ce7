"""Pseudo-gradients that are summed by a compressor, with error feedback.

Theory of operation. The *pseudo-gradient* of a worker is the anchor less its snapshot. In a round the members
sum theirs, each times the worker's weight, by a compressor; the sum is the same on all, bit for bit. What the
sum lacks of this worker's part is its *residual*. Times `decay`, it is added to what the worker contributes
to its next round of the same parameters. It includes the weight of the round that it comes from: the mean
there would have held so much of it, whatever the weights of the next round are. It changes only when a sum is
applied, so that an averaging that is cancelled leaves it as it was.

No model and no anchor holds what is in a residual: a worker that applies a sum moves its model from its
snapshot to the new anchor, and what it did not send leaves the model with that. Therefore, without decay, the
anchor less the outer rate times all residuals moves by the mean of all that workers learn. Hence

- the mean of all models after an epoch, which holds what they have learnt in the round under way, voids no
  residual;
- a worker that is behind keeps its residual, as the anchor that it receives does not hold it either; it
  contributes nothing to that round, and the residual waits without decay;
- a worker must not keep a share of its own model (`mixing`): this would hold a part of the residual;
- residuals of the last round, and those of a lost worker, are lost.

A compressor's state is the same on all workers that have made the last step of the same parameters; in a
round with a member that is behind, and in the first one after a mean of all models, all begin without one.

Source: Sarfi et al. 2025, "Communication efficient LLM pre-training with SparseLoCo", algorithm 1.
Deviations: weights by samples; any compressor, where the paper's sends 2 bits of the largest of each 4,096.

This module decides nothing about rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offbeat.errors import OffbeatError
from offbeat.events import AverageModels
from offbeat.numerics.collectives.schedules import AUTO
from offbeat.numerics.compressors.interface import CompressionMethod, Compressor
from offbeat.runtime.collectives.compressed_sum import EXCHANGES_MAX, CompressedSum
from offbeat.runtime.collectives.interface import Exchange
from offbeat.runtime.model_averaging.flat_tensors import FlatTensors, Fragment


class PseudoGradients:
    """A worker's compressed pseudo-gradients and their residuals, on the host.

    Args:
        method: makes the compressors.
        decay: factor of a residual from round to round, from 0 to 1.
        parameters: the worker's.
        names: of the parameters that have elements, in their order.
    """

    def __init__(
        self, method: CompressionMethod, decay: float, parameters: FlatTensors, names: Sequence[str]
    ) -> None:
        self._method, self._decay = method, decay
        self._parameters, self._names = parameters, names
        self._residuals: list[torch.Tensor] = []  # for each vector of the parameters; none before a round
        self._compressors: dict[int, list[Compressor]] = {}  # by fragment, for each vector
        self._states: dict[int, list[Any]] = {}  # by fragment, of the compressors
        self._next_residuals: list[torch.Tensor] = []  # of the round under way, of its fragment
        self._sums: list[CompressedSum] = []

    @torch.no_grad()
    def begin(
        self,
        exchange: Exchange,
        averaging: AverageModels,
        worker: int,
        fragment: Fragment,
        anchors: Sequence[torch.Tensor],
    ) -> list[CompressedSum]:
        """Start to sum the pseudo-gradients of a fragment into the parameters' `outputs`.

        Args:
            exchange: over `averaging.group`; indices from 0 are used, `EXCHANGES_MAX` for each vector.
            averaging: with an outer step.
            worker: this one.
            fragment: of all vectors, what is summed.
            anchors: for each vector.
        """
        parameters, step = self._parameters, averaging.outer_step
        assert step is not None
        parameters.replace_read_memory()
        if not self._residuals:
            self._residuals = [torch.zeros_like(flat) for flat in parameters.outputs]
        if step.behind:
            self._states.pop(fragment.number, None)
        compressors = self._compressors_of(fragment)
        states = self._states.get(fragment.number) or [None] * len(compressors)
        self._next_residuals, self._sums = [], []
        for number, compressor in enumerate(compressors):
            own = fragment.of(parameters.contributions[number])
            if worker in step.behind:
                own.zero_()
            else:
                snapshot = fragment.of(parameters.snapshots[number])
                torch.sub(fragment.of(anchors[number]), snapshot, out=own)
                own.mul_(averaging.weight_of(worker))
                own.add_(fragment.of(self._residuals[number]), alpha=self._decay)
            residual = own.new_zeros(len(own) if compressor.keeps_residual else 0)
            total = fragment.of(parameters.outputs[number])
            one = CompressedSum(exchange, averaging.exchange_id, number * EXCHANGES_MAX, AUTO, 0)
            if exchange.size == 1 or not len(own):
                total.copy_(own)
            else:
                requests = compressor.sum(
                    own, total, residual, states[number], members=exchange.size, position=exchange.position
                )
                one.begin(requests)
            self._next_residuals.append(residual)
            self._sums.append(one)
        return self._sums

    @torch.no_grad()
    def commit(self, averaging: AverageModels, worker: int, fragment: Fragment) -> None:
        """Keep what the sums, which have ended and are applied, lack of this worker's pseudo-gradient."""
        step, parameters = averaging.outer_step, self._parameters
        assert step is not None
        self._states[fragment.number] = [one.state for one in self._sums]
        for number, compressor in enumerate(self._compressors_of(fragment)):
            residual = self._next_residuals[number]
            if worker in step.behind or not len(residual):
                continue
            if len(averaging.group) > 1:
                own = fragment.of(parameters.contributions[number])
                total = fragment.of(parameters.outputs[number])
                compressor.finish_residual(own, total, residual, share=averaging.weight_of(worker))
            fragment.of(self._residuals[number]).copy_(residual)

    def _compressors_of(self, fragment: Fragment) -> list[Compressor]:
        if fragment.number not in self._compressors:
            self._compressors[fragment.number] = [
                self._method.compressor(shapes, seed=number)
                for number, shapes in enumerate(self._parameters.shapes(fragment))
            ]
        return self._compressors[fragment.number]

    def forget_states(self) -> None:
        """Begin the next rounds without the compressors' states, on all workers."""
        self._states.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the compressors' states, the same on all workers that have made the same rounds."""
        return {"compression": str(self._method), "states": {**self._states}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; one of another compression is left."""
        is_same = state.get("compression") == str(self._method)
        self._states = {**state["states"]} if is_same else {}

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the residuals by the parameters' names, in memory that later rounds change."""
        if not self._residuals:
            return {}
        return dict(zip(self._names, self._parameters.split(self._residuals), strict=True))

    @torch.no_grad()
    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with these residuals.

        Raises:
            OffbeatError: they are of other parameters.
        """
        if [*residuals] != [*self._names]:
            raise OffbeatError(
                f"expected residuals of the parameters {', '.join(self._names)}, got those of "
                f"{', '.join(residuals)}: load the state that a worker of the same job has saved"
            )
        self._residuals = [torch.zeros_like(flat) for flat in self._parameters.outputs]
        for part, residual in zip(self._parameters.split(self._residuals), residuals.values(), strict=True):
            part.copy_(residual)
