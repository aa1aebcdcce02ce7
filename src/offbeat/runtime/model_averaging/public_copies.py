"""Compressed gossip: neighbours exchange compressed differences of their models, and move towards each other.

Theory of operation. Of each worker's model there is a *public copy*, which its neighbours know as well as the
worker itself. In a round it sends them a compressed difference, of its snapshot from its public copy; it adds
the same, as they decode it, to that copy. So a copy follows its model, and what is not sent in a round is in
the differences of the next ones. A worker keeps its own public copy and the weighted sum of its neighbours'
and its own, and then moves its model by the consensus step times what the sum differs from its own copy. With
weights that are symmetric this leaves the mean of all models as it is, whatever is lost in compression.

Public copies are of one group: in the first round of another, or after a round that some have not ended,
workers send their whole snapshots, which become the public copies (see `AverageModels.continues`).

A round in which this worker or a neighbour sends numbers that are not finite leaves this worker's model as it
is, and does not count as ended, so that whole snapshots follow: no public copy keeps such numbers.

Threads. The loop encodes a snapshot when it takes it, and decodes; the links' thread sends. Nothing here
decides which workers are in a round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch

from offbeat.events import AverageModels
from offbeat.numerics.compressors.interface import EncodingMethod
from offbeat.numerics.gossip import AdaptiveStep, consensus_step, mixing_weights
from offbeat.numerics.public_copy import PublicCopy
from offbeat.policies.model_averaging.neighbour_pairs import Topology
from offbeat.runtime.collectives.interface import Exchange, PendingExchange
from offbeat.runtime.model_averaging.flat_tensors import WHOLE, FlatTensors

Gamma: TypeAlias = float | Literal["adaptive", "theory"]
"""A consensus step; "adaptive": see `AdaptiveStep`; "theory": the one that is proven to converge."""

OpenExchanges = Callable[[Sequence[Sequence[int]]], Sequence[Exchange]]
"""Opens an exchange over each of several groups of workers."""

_log = logging.getLogger("offbeat")


class _Neighbour(NamedTuple):
    """A neighbour in a round.

    Attributes:
        worker: its id.
        weight: of its public copy.
        codes: what it sends, for each vector.
    """

    worker: int
    weight: float
    codes: list[torch.Tensor]


class PublicCopies:
    """A worker's public copies, one for each vector of its parameters, on the host.

    Source: Koloskova, Stich and Jaggi 2019, "Decentralized stochastic optimization and gossip algorithms with
    compressed communication", algorithm 2; Koloskova, Lin, Stich and Jaggi 2020, "Decentralized deep learning
    with arbitrary communication compression", algorithm 1, for a sum in place of a copy of each neighbour.

    Args:
        parameters: the worker's.
        worker: its id.
        topology: which workers of a group are neighbours.
        method: of compression.
        gamma: the consensus step, see `Gamma`.
        open_exchanges: opens exchanges; they fail at once if the averaging is cancelled.
    """

    def __init__(
        self,
        parameters: FlatTensors,
        worker: int,
        topology: Topology,
        method: EncodingMethod,
        gamma: Gamma,
        open_exchanges: OpenExchanges,
    ) -> None:
        self._parameters, self._worker, self._topology = parameters, worker, topology
        self._gamma, self._open_exchanges = gamma, open_exchanges
        self._has_warned = False  # of numbers that are not finite
        self._encoders = [
            method.encoder(shapes, seed=worker * len(parameters.outputs) + number)
            for number, shapes in enumerate(parameters.shapes(WHOLE))
        ]
        self._copies: list[PublicCopy] = []  # for each vector; none before a round of whole snapshots
        self._codes: list[torch.Tensor] = []  # of the last snapshot
        self._adaptive_step = AdaptiveStep()
        self._rounds = 0  # that this worker has ended
        self._own_weight = 1.0
        self._neighbours: list[_Neighbour] = []  # in the round under way

    @torch.no_grad()
    def encode(self) -> None:
        """Encode what the snapshot differs from the public copy, for a round that continues."""
        if not self._copies:  # whole snapshots follow
            return
        vectors = zip(self._encoders, self._copies, self._parameters.snapshots, strict=True)
        self._codes = [
            encoder.encode(copy.difference(snapshot, torch.empty_like(snapshot)), self._rounds)
            for encoder, copy, snapshot in vectors
        ]

    def begin(self, averaging: AverageModels) -> list[PendingExchange]:
        """Start to exchange with the neighbours of a group; thread-safe."""
        group = averaging.group
        place = group.index(self._worker)
        weights = mixing_weights(self._topology, len(group), place)
        self._own_weight = weights.pop(place)
        others = [group[other] for other in weights]
        exchanges = self._open_exchanges([sorted((self._worker, other)) for other in others])
        sent = self._sent(averaging)
        self._neighbours, pending = [], []
        for other, exchange, weight in zip(others, exchanges, weights.values(), strict=True):
            received = [torch.empty_like(code) for code in sent]
            own, its = exchange.position, 1 - exchange.position
            for number, (code, into) in enumerate(zip(sent, received, strict=True)):
                for root, flat in ((own, code), (its, into)):
                    index = 2 * number + root
                    pending.append(
                        exchange.broadcast(flat, root=root, exchange_id=averaging.exchange_id, index=index)
                    )
            self._neighbours.append(_Neighbour(other, weight, received))
        return pending

    def _sent(self, averaging: AverageModels) -> list[torch.Tensor]:
        """Return what this worker sends: codes, or whole snapshots where the round does not continue."""
        return self._codes if averaging.continues else self._parameters.snapshots

    @torch.no_grad()
    def apply(self, averaging: AverageModels) -> bool:
        """Renew the public copies by what the neighbours have sent, and move the parameters.

        Returns:
            Whether the round has ended: False, with the parameters as they were, where numbers are not
            finite.
        """
        self._parameters.replace_read_memory()
        snapshots, outputs = self._parameters.snapshots, self._parameters.outputs
        if not averaging.continues:
            self._copies = [PublicCopy(torch.zeros_like(snapshot)) for snapshot in snapshots]
        sent = self._sent(averaging)
        measures, difference, lost = averaging.continues and self._gamma == "adaptive", 0.0, 0.0
        for number, copy in enumerate(self._copies):
            snapshot, decoded = snapshots[number], torch.empty_like(snapshots[number])
            self._decode(averaging, number, sent[number], decoded)
            if measures:
                difference += _square(copy.difference(snapshot, outputs[number]))
            copy.add_own(decoded, self._own_weight)
            if measures:
                lost += _square(copy.difference(snapshot, outputs[number]))
            for neighbour in self._neighbours:
                self._decode(averaging, number, neighbour.codes[number], decoded)
                copy.add_neighbour(decoded, neighbour.weight)
        gamma = self._step(averaging, difference, lost)
        for copy, output in zip(self._copies, outputs, strict=True):
            copy.correction(gamma, output)
        neighbours, self._neighbours = self._neighbours, []
        if not all(_is_finite(output) for output in outputs):
            self._warn_of_numbers(averaging, neighbours)
            self._copies = []
            return False
        self._rounds += 1
        self._parameters.add_outputs()
        return True

    def _warn_of_numbers(self, averaging: AverageModels, neighbours: Sequence[_Neighbour]) -> None:
        """Log once who has sent numbers that are not finite."""
        if self._has_warned:
            return
        self._has_warned = True
        codes = {self._worker: self._sent(averaging)} | {one.worker: one.codes for one in neighbours}
        senders = []
        for worker, vectors in sorted(codes.items()):
            for number, code in enumerate(vectors):
                decoded = torch.empty_like(self._parameters.outputs[number])
                self._decode(averaging, number, code, decoded)
                if not _is_finite(decoded):
                    senders.append(f"worker {worker}")
                    break
        _log.warning(
            "compressed gossip: a round had no effect, because %s sent numbers that are not finite; until "
            "all models are finite, rounds of whole models follow",
            " and ".join(senders) or "a sum of models",
        )

    def _step(self, averaging: AverageModels, difference: float, lost: float) -> float:
        """Return the consensus step of a round; see `AdaptiveStep.update`."""
        if self._gamma == "adaptive":
            return self._adaptive_step.update(difference, lost) if averaging.continues else 1.0
        if self._gamma == "theory":
            omega = min(encoder.omega() for encoder in self._encoders)
            return consensus_step(self._topology, len(averaging.group), omega)
        return self._gamma

    def _decode(
        self, averaging: AverageModels, number: int, code: torch.Tensor, decoded: torch.Tensor
    ) -> None:
        """Write what a worker has sent of a vector; in a round that does not continue that is a snapshot."""
        if averaging.continues:
            self._encoders[number].decode(code, decoded)
        else:
            decoded.copy_(code)


def _square(vector: torch.Tensor) -> float:
    """Return the squared norm of a vector."""
    return float(torch.dot(vector, vector))


def _is_finite(vector: torch.Tensor) -> bool:
    """Whether all numbers of a vector, which has elements, are finite."""
    return all(math.isfinite(limit) for limit in vector.aminmax())
