"""The outer optimizer of a worker that makes local steps: the anchor and the momentum, on the host.

Theory of operation. The *anchor* is the model from which all workers make their steps; every worker keeps it,
and the outer optimizer's buffers, and steps them by itself from the models' mean. Since the mean is the same
on all members of an averaging, bit for bit, so are their anchors. A worker then moves its model by what its
snapshot differs from the new anchor, and trains on.

A member that is *behind* has missed such a step. It receives anchor and buffers from the first member that
has not, in the same averaging, to which it contributes nothing. It moves its model by what its own anchor
differs from the new one, so that all that it has learnt since then is kept, for the next averaging.

The mean of all models, after an epoch, becomes the anchor, too: what workers have learnt is in it.

Instead of the mean of the snapshots, workers may sum compressed pseudo-gradients (see `PseudoGradients`).

A checkpoint holds anchor and buffers, by the parameters' names, the number of rounds stepped, and the states
of compressors. What its worker has learnt in the round under way is its model less its anchor.

Nothing here decides who is behind, and nothing is sent but by the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offbeat.errors import OffbeatError
from offbeat.events import AverageModels, OuterStep
from offbeat.numerics.outer_optimizer import OuterOptimizer
from offbeat.runtime.collectives.compressed_sum import EXCHANGES_MAX
from offbeat.runtime.collectives.interface import Exchange, PendingExchange, TensorMemory
from offbeat.runtime.model_averaging.flat_tensors import FlatTensors, Fragment
from offbeat.runtime.model_averaging.pseudo_gradients import PseudoGradients


class OuterState:
    """Anchor and buffers of a worker's parameters.

    Args:
        optimizer: the same on all workers.
        fragments: parts of the parameters, each stepped by itself.
        parameters: the worker's.
        names: of the parameters that have elements, in their order.
        memory: allocates vectors that exchanges send from.
        pseudo_gradients: what is summed in a round; None for the snapshots, whose mean is taken.

    Attributes:
        rounds: rounds up to the last one whose step this worker has made, or that it continues after.
    """

    def __init__(
        self,
        optimizer: OuterOptimizer,
        fragments: int,
        parameters: FlatTensors,
        names: Sequence[str],
        memory: TensorMemory,
        pseudo_gradients: PseudoGradients | None = None,
    ) -> None:
        self._pseudo_gradients = pseudo_gradients
        self._optimizer, self._fragments = optimizer, fragments
        self._parameters, self._names, self._memory = parameters, names, memory
        self.rounds = 0
        self._state: list[list[torch.Tensor]] = []  # for each vector of the parameters, anchor and buffers
        self._received: list[torch.Tensor] | None = None  # while this worker is behind

    def fragment_of(self, step: OuterStep) -> Fragment:
        """Return the part of the parameters that is stepped."""
        return Fragment(step.fragment, self._fragments)

    def begin(self) -> None:
        """Take the parameters as they are for the anchor, unless that is done."""
        if not self._state:
            self._allocate()
            self._parameters.copy_into([anchor for anchor, *_ in self._state])

    def _allocate(self) -> None:
        vectors = [self._parameters.zeros() for _ in range(1 + self._optimizer.buffers)]
        self._state = [list(flats) for flats in zip(*vectors, strict=True)]

    @property
    def is_compressed(self) -> bool:
        """Whether `sum_pseudo_gradients` takes the place of a sum of snapshots."""
        return self._pseudo_gradients is not None

    def sum_pseudo_gradients(
        self, exchange: Exchange, averaging: AverageModels, worker: int
    ) -> list[PendingExchange]:
        """Start to sum the members' pseudo-gradients, and to copy the state to members that are behind.

        Args:
            exchange, worker: see `send_to_members_behind`.
        """
        assert self._pseudo_gradients is not None
        assert averaging.outer_step is not None
        fragment, anchors = self.fragment_of(averaging.outer_step), [anchor for anchor, *_ in self._state]
        sums = self._pseudo_gradients.begin(exchange, averaging, worker, fragment, anchors)
        first_index = len(sums) * EXCHANGES_MAX
        return [*sums, *self.send_to_members_behind(exchange, averaging, worker, first_index)]

    def send_to_members_behind(
        self, exchange: Exchange, averaging: AverageModels, worker: int, first_index: int
    ) -> list[PendingExchange]:
        """Start to copy the state from the first member that is not behind to all others, if any is.

        Args:
            exchange: over `averaging.group`.
            worker: this one, of the group.
            first_index: of the first vector in the exchange; the others follow.
        """
        step = averaging.outer_step
        assert step is not None
        self._received = None
        if not step.behind:
            return []
        fragment = self.fragment_of(step)
        parts = [fragment.of(flat) for flats in self._state for flat in flats]
        if worker in step.behind:
            parts = self._received = [self._memory.zeros(len(part), part.dtype) for part in parts]
        root = next(place for place, member in enumerate(averaging.group) if member not in step.behind)
        return [
            exchange.broadcast(part, root=root, exchange_id=averaging.exchange_id, index=first_index + number)
            for number, part in enumerate(parts)
            if len(part)
        ]

    @torch.no_grad()
    def step(
        self, averaging: AverageModels, worker: int, outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Step the anchor; replace the models' mean, or the pseudo-gradients' sum, in `outputs` by it.

        Args:
            averaging: with an outer step.
            worker: this one.
            outputs: what the exchange has yielded, one for each vector of the parameters.

        Returns:
            Anchors from before, if this worker is behind: its model moves by what they differ from `outputs`.
        """
        step = averaging.outer_step
        assert step is not None
        fragment, before = self.fragment_of(step), None
        if self._pseudo_gradients is not None:
            self._pseudo_gradients.commit(averaging, worker, fragment)
        self._replace_read_memory()
        if self._received is not None:
            before = [anchor.clone() for anchor, *_ in self._state]
            received = iter(self._received)
            for flats in self._state:
                for flat in flats:
                    fragment.of(flat).copy_(next(received))
            self._received = None
        for flats, output in zip(self._state, outputs, strict=True):
            anchor, *buffers = (fragment.of(flat) for flat in flats)
            output_part = fragment.of(output)
            gradient = output_part if self.is_compressed else anchor - output_part
            new = self._optimizer.step(anchor, gradient, tuple(buffers), step.number)
            for flat, values in zip((anchor, *buffers), new, strict=True):
                flat.copy_(values)
            output_part.copy_(anchor)
        self.rounds = step.number * self._fragments + step.fragment + 1
        return before

    @torch.no_grad()
    def take_anchor(self, means: Sequence[torch.Tensor]) -> None:
        """Take the mean of all models for the anchor, as after an epoch."""
        if not self._state:  # the worker has made no step yet
            self._allocate()
        if self._pseudo_gradients is not None:
            self._pseudo_gradients.forget_states()
        self._replace_read_memory()
        for (anchor, *_), mean in zip(self._state, means, strict=True):
            anchor.copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the host's memory that later steps change; empty before the first step."""
        if not self._state:
            return {}
        anchor, *buffers = (
            dict(zip(self._names, self._parameters.split(flats), strict=True))
            for flats in zip(*self._state, strict=True)
        )
        state = {"rounds": self.rounds, "anchor": anchor, "buffers": buffers}
        if self._pseudo_gradients is not None:
            state["compressors"] = {"fragments": self._fragments, **self._pseudo_gradients.state_dict()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; a buffer that it lacks, with another `momentum_every`, begins at zero.

        Compressors begin without a state if the saved ones are of another compression or of other fragments.

        Raises:
            OffbeatError: it is of other parameters.
        """
        if [*state["anchor"]] != [*self._names]:
            raise OffbeatError(
                f"expected the outer optimizer's state of the parameters {', '.join(self._names)}, got that "
                f"of {', '.join(state['anchor'])}: freeze the parameters that were frozen when it was saved"
            )
        self._allocate()
        saved = [state["anchor"], *state["buffers"]]
        for flats, values in zip(zip(*self._state, strict=True), saved, strict=False):
            for part, value in zip(self._parameters.split(flats), values.values(), strict=True):
                part.copy_(value)
        self.rounds = state["rounds"]
        if self._pseudo_gradients is not None:
            compressors = state.get("compressors", {})
            is_same = compressors.get("fragments") == self._fragments
            self._pseudo_gradients.load_state_dict(compressors if is_same else {})

    def local_state_dict(self) -> dict[str, Any]:
        """Return what is this worker's alone: its residuals, if it has any."""
        residuals = {} if self._pseudo_gradients is None else self._pseudo_gradients.residuals()
        return {"rounds": self.rounds, "pseudo_gradient_residuals": residuals} if residuals else {}

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `local_state_dict`; see `PseudoGradients.load_residuals`.

        Raises:
            OffbeatError: it is of other parameters, or not of the anchor's round.
        """
        if self._pseudo_gradients is not None and "pseudo_gradient_residuals" in state:
            if state["rounds"] != self.rounds:
                raise OffbeatError(
                    f"expected a worker's state of round {self.rounds}, got that of round {state['rounds']}: "
                    "save both states at the end of an epoch, and load the session's state first"
                )
            self._pseudo_gradients.load_residuals(state["pseudo_gradient_residuals"])

    def _replace_read_memory(self) -> None:
        """Replace memory that another worker may still read, because an exchange was abandoned."""
        for flats in self._state:
            for index, flat in enumerate(flats):
                if self._memory.may_be_read(flat):
                    flats[index] = self._memory.zeros(flat.numel(), flat.dtype).copy_(flat)
