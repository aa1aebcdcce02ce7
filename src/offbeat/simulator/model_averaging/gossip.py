"""Compressed gossip in virtual time: a model of `offbeat.runtime.model_averaging.public_copies`.

Of a difference the half of the elements with the largest magnitudes is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from offbeat.events import AverageModels
from offbeat.numerics.gossip import mixing_weights
from offbeat.policies.model_averaging.neighbour_pairs import Topology

CONSENSUS_STEP: Final = 0.3


class SimulatedCopies:
    """A worker's public copy, and the weighted sum of its neighbours' and its own.

    Args:
        worker: its id.
        topology: which workers of a group are neighbours.

    Attributes:
        round_id: the exchange id of the round that they are of; None before the first.
        copy, weighted_sum: shape (parameters,) each.
    """

    def __init__(self, worker: int, topology: Topology) -> None:
        self._worker, self._topology = worker, topology
        self.round_id: int | None = None
        self.copy: Any = 0.0
        self.weighted_sum: Any = 0.0

    def weights(self, averaging: AverageModels) -> dict[int, float]:
        """Return the weights of the worker and its neighbours in a round, by worker."""
        group = averaging.group
        weights = mixing_weights(self._topology, len(group), group.index(self._worker))
        return {group[place]: weight for place, weight in weights.items()}

    def code(self, averaging: AverageModels, snapshot: Any) -> Any:
        """Return what the worker sends: its snapshot, or in a round that continues a part of a difference."""
        return _largest_half(snapshot - self.copy) if averaging.continues else snapshot

    def renew(self, averaging: AverageModels, codes: Mapping[int, Any]) -> Any:
        """Renew them by the codes of a round, by worker; return what is added to the worker's model."""
        if not averaging.continues:
            self.copy = self.weighted_sum = 0.0
        weights = self.weights(averaging)
        self.copy = self.copy + codes[self._worker]
        self.weighted_sum = self.weighted_sum + sum([codes[one] * weight for one, weight in weights.items()])
        self.round_id = averaging.exchange_id
        return CONSENSUS_STEP * (self.weighted_sum - self.copy)


def _largest_half(difference: Any) -> Any:
    kept = np.argsort(-np.abs(difference), kind="stable")[: -(-len(difference) // 2)]
    code = np.zeros_like(difference)
    code[kept] = difference[kept]
    return code
