"""Which servers hold the blocks of a view, which of them gain blocks, and from where.

Nothing here knows values or how messages travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from offbeat.policies.ps.hash_ring import RING_SIZE, KeySpan, block_point, spans_of
from offbeat.policies.ps.messages import Operation, PlacementView

BlockId = tuple[str, int]  # a namespace, and the number of a block in it
_ROUTES_MAX: Final = 4096


class Placement:
    """A view as one server reads it: the chain of every block, and which servers are being filled from where.

    Args:
        view: the view; it does not change.
        server: the server's id.

    Attributes:
        view: as given.
        server: as given.
        may_gain: whether this server may be one of those that gain blocks.
    """

    def __init__(self, view: PlacementView, server: int) -> None:
        self.view, self.server = view, server
        self.may_gain = server in view.filling or view.target is not None
        self._chains: dict[int, tuple[int, ...]] = {}  # cache, by point
        self._routes: dict[tuple[str, int, int], list[KeySpan]] = {}  # cache, by range of keys

    def blocks(self, namespace: str, first: int, last: int) -> Iterator[BlockId]:
        """Return the blocks that contain any of keys `first` to `last` - 1."""
        return ((namespace, block) for block in self.view.spaces[namespace].blocks_of_range(first, last))

    def chain(self, block: BlockId) -> tuple[int, ...]:
        """Return the servers that have the operations on a block: master, replicas, then the next ring's."""
        return self._chain_at(block_point(*block))

    def chain_of(self, operation: Operation) -> tuple[int, ...]:
        """Return the chain of an operation's first block."""
        return self.chain(next(self.blocks(operation.namespace, operation.first, operation.last)))

    def chains(self) -> set[tuple[int, ...]]:
        """Return all chains."""
        return {self._chain_at(point) for point in self._stretch_points()} - {()}

    def route(self, namespace: str, first: int, last: int) -> list[KeySpan]:
        """Return the chains of a range of keys, cached, as the same ranges recur."""
        route = self._routes.get((namespace, first, last))
        if route is None:
            if len(self._routes) == _ROUTES_MAX:
                self._routes.clear()
            space = self.view.spaces[namespace]
            route = list(spans_of(space, first, last, self._chain_at))
            self._routes[namespace, first, last] = route
        return route

    def holds(self, block: BlockId) -> bool:
        """Whether this server is in a block's chain."""
        return self.server in self.chain(block)

    def gains(self, block: BlockId) -> bool:
        """Whether this server is being filled with a block."""
        return self.may_gain and self.server in self._gainers_at(block_point(*block))

    def sends(self, block: BlockId, gainer: int) -> bool:
        """Whether this server has to send a block to another one that gains it."""
        point = block_point(*block)
        return gainer in self._gainers_at(point) and self._source_at(point) == self.server

    def source(self, block: BlockId) -> int | None:
        """Return the last server of a block's chain that has all of it; None if none has."""
        return self._source_at(block_point(*block))

    def sources(self) -> set[int]:
        """Return the servers from which this one gains blocks."""
        points = [point for point in self._stretch_points() if self.server in self._gainers_at(point)]
        return {source for point in points if (source := self._source_at(point)) is not None}

    def is_lost(self, block: BlockId) -> bool:
        """Whether the data of a block are lost with this view, so that all holders start from nothing."""
        point = block_point(*block)
        return any(arc.first <= point < arc.last for arc in self.view.lost_arcs_dropped)

    def _chain_at(self, point: int) -> tuple[int, ...]:
        chain = self._chains.get(point)
        if chain is None:
            chain = self.view.ring.holders_at(point)
            if self.view.target is not None:
                chain += tuple(one for one in self.view.target.holders_at(point) if one not in chain)
            self._chains[point] = chain
        return chain

    def _gainers_at(self, point: int) -> tuple[int, ...]:
        """Return the servers of the chain that are being filled."""
        view = self.view
        holders = view.ring.holders_at(point)
        return tuple(
            one
            for one in self._chain_at(point)
            if one not in holders or any(arc.first <= point < arc.last for arc in view.filling.get(one, ()))
        )

    def _source_at(self, point: int) -> int | None:
        gainers = self._gainers_at(point)
        return next((one for one in reversed(self._chain_at(point)) if one not in gainers), None)

    def _stretch_points(self) -> list[int]:
        """One point of every stretch of the ring that has one chain and one set of gainers."""
        bounds = {0, *self.view.ring.stretch_starts}
        if self.view.target is not None:
            bounds.update(self.view.target.stretch_starts)
        for arcs in self.view.filling.values():
            for arc in arcs:
                bounds.update((arc.first, arc.last))
        return sorted(bounds - {RING_SIZE})
