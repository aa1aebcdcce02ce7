"""Pairs of neighbours on a bipartite graph.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

import random
from typing import Any, Final, Literal, TypeAlias

from offbeat.policies.model_averaging.group_maker import CanMeet, ReadyWorkers

Topology: TypeAlias = Literal["ring", "exponential", "complete"]
TOPOLOGIES: Final = ("ring", "exponential", "complete")


class NeighbourPairs(ReadyWorkers):
    """Pairs of an active worker that is ready and a passive neighbour that is ready too; see `GroupMaker`.

    Workers that are ready or will be stand on a ring in the order of their ids, passive and active in turn.
    Edges join active to passive workers: to those next to it (`ring`), to those 1, 3, 5, 9, ... places away
    in both directions (`exponential`), or to all (`complete`). The active workers take their turn in the
    order in which they were ready, and choose among their neighbours that are ready with equal probability.

    Source: Lian et al. 2018, "Asynchronous decentralized parallel stochastic gradient descent" (AD-PSGD).
    Deviations: there, an active worker draws any neighbour and waits for its lock; here one coordinator forms
    all pairs, so that nobody waits and there is no deadlock, and a slow worker is in a pair each time that it
    has ended a step. The graph is that of the workers that are there.

    Args:
        topology: of the graph.
        seed: of the choices.
    """

    def __init__(self, topology: Topology, seed: int = 0) -> None:
        if topology not in TOPOLOGIES:
            raise ValueError(f"expected a topology of {', '.join(TOPOLOGIES)}, got {topology!r}")
        super().__init__()
        self._topology, self._seed = topology, seed
        self._pairs = 0

    def pop_group(self, expected: set[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """See `GroupMaker.pop_group`: a pair, or a worker alone if no other one is expected."""
        ring = sorted(expected)
        if len(ring) == 1:
            return self.take(ring) if ring[0] in self._ready_s else None
        place_of = {worker: place for place, worker in enumerate(ring)}
        for worker in self._ready_s:
            place = place_of.get(worker)
            if place is None or not place % 2:
                continue
            neighbours = [
                other
                for other in neighbours_of(ring, place, self._topology)
                if other in self._ready_s and can_meet((worker,), other)
            ]
            if neighbours:
                choice = random.Random(f"{self._seed} {self._pairs}")
                self._pairs += 1
                return self.take([worker, choice.choice(neighbours)])
        return None

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """See `GroupMaker.pop_first`: alone, as it has no neighbour that it can meet."""
        return self.take([next(worker for worker in self._ready_s if can_meet((), worker))])

    def state_dict(self) -> dict[str, Any]:
        """See `GroupMaker.state_dict`."""
        return {"ready_s": [list(entry) for entry in self._ready_s.items()], "pairs": self._pairs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `GroupMaker.load_state_dict`."""
        self._ready_s, self._pairs = dict(state["ready_s"]), state["pairs"]


def neighbours_of(ring: list[int], place: int, topology: Topology) -> list[int]:
    """Return the neighbours of the worker at a place, ascending.

    Places with odd numbers are active, those with even ones passive; edges join active to passive ones.
    """
    size = len(ring)
    if topology == "complete":
        hops = set(range(1, size))
    else:
        hops = {1, *(1 + 2**power for power in range(size.bit_length()) if topology == "exponential")}
    places = {(place + sign * hop) % size for hop in hops for sign in (1, -1)}
    return [ring[other] for other in sorted(places) if other % 2 != place % 2]
