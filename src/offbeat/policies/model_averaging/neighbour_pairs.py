"""Pairs of neighbours on a bipartite graph.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

import random
from bisect import bisect
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
    A straggler has no place on the ring, so that no worker asks it. It is active, and its neighbours are the
    two workers between which its id would be.

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
        # Derived from the calls, and not part of the state:
        self._ring: list[int] = []
        self._place_of: dict[int, int] = {}
        self._neighbours_of: dict[int, list[int]] = {}  # by worker, as far as they were needed
        self._stragglers_next_to: dict[int, list[int]] = {}  # by worker on the ring
        self._new: list[int] = []  # workers for which no partner has been looked for yet

    def add(self, worker: int, now_s: float) -> None:
        """See `GroupMaker.add`."""
        super().add(worker, now_s)
        self._new.append(worker)

    def pop_group(self, expected: frozenset[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """See `GroupMaker.pop_group`: a pair, or a worker alone if no other one is expected."""
        if self._has_new_arguments(expected, can_meet):
            self._build_graph(expected)
            self._new = list(self._ready_s)
        for worker in self._in_order(self._active_workers()):
            neighbours = [
                other
                for other in self._neighbours(worker)
                if other in self._ready_s and can_meet((worker,), other)
            ]
            if neighbours:
                choice = random.Random(f"{self._seed} {self._pairs}")
                self._pairs += 1
                return self.take([worker, choice.choice(neighbours)])
        self._new.clear()
        ring = self._ring
        return self.take(ring) if len(ring) == 1 and ring[0] in self._ready_s else None

    def _build_graph(self, expected: frozenset[int]) -> None:
        self._ring = ring = sorted(expected - self._stragglers or expected)
        self._place_of = {worker: place for place, worker in enumerate(ring)}
        self._neighbours_of, self._stragglers_next_to = {}, {}
        for straggler in sorted(expected - self._place_of.keys()):
            place = bisect(ring, straggler)
            neighbours = self._neighbours_of[straggler] = sorted({ring[place - 1], ring[place % len(ring)]})
            for worker in neighbours:
                self._stragglers_next_to.setdefault(worker, []).append(straggler)

    def _active_workers(self) -> set[int]:
        """Return the active workers that may have a partner now: new ones, and neighbours of new ones."""
        found: set[int] = set()
        for worker in self._new:
            if worker not in self._ready_s:
                continue
            place = self._place_of.get(worker)
            if place is not None and place % 2 == 0:
                found.update(self._neighbours(worker))
            elif place is not None or worker in self._neighbours_of:
                found.add(worker)
            found.update(self._stragglers_next_to.get(worker, ()))
        return found

    def _neighbours(self, worker: int) -> list[int]:
        if worker not in self._neighbours_of:
            place = self._place_of[worker]
            self._neighbours_of[worker] = neighbours_of(self._ring, place, self._topology)
        return self._neighbours_of[worker]

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """See `GroupMaker.pop_first`: alone, as it has no neighbour that it can meet."""
        return self.take([next(worker for worker in self._ready_s if can_meet((), worker))])

    def state_dict(self) -> dict[str, Any]:
        """See `GroupMaker.state_dict`."""
        return {"ready_s": [list(entry) for entry in self._ready_s.items()], "pairs": self._pairs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `GroupMaker.load_state_dict`."""
        self._restore_ready(state["ready_s"])
        self._pairs = state["pairs"]


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
