"""AD-PSGD: pairs of neighbours average their models while all train on."""

from __future__ import annotations

from typing import Literal

from offbeat.policies.model_averaging.averaging import GlobalEvery, ModelAveraging
from offbeat.policies.model_averaging.neighbour_pairs import NeighbourPairs, Topology


class PairAveraging(ModelAveraging):
    """Lets pairs of neighbours on a graph average their models, again and again.

    Each averaging preserves the sum of the models.

    Source: see `NeighbourPairs`.

    Args:
        world: number of workers at the start; their ids are 0 to `world` - 1.
        topology, seed: see `NeighbourPairs`.
        shards, overlap, global_every, detector, timeout_s: see `ModelAveraging`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        world: int,
        *,
        topology: Topology = "ring",
        seed: int = 0,
        shards: Literal["dynamic", "equal"] = "dynamic",
        overlap: bool = False,
        global_every: GlobalEvery = "epoch",
        detector: Literal["on", "off"] = "on",
        timeout_s: float = 600.0,
    ) -> None:
        groups = NeighbourPairs(topology, seed)
        super().__init__(
            world,
            groups,
            shards=shards,
            overlap=overlap,
            global_every=global_every,
            detector=detector,
            timeout_s=timeout_s,
        )
