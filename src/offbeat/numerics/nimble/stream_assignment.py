"""Nimble's stream assignment: all the concurrency of a graph, with as few synchronizations as possible.

Theory of operation
-------------------

Nodes are operations, edges their dependencies. An assignment gives each node a *stream*, a queue that runs
its nodes one after the other. Where an edge joins two streams, the second one has to wait for an event of the
first: a *synchronization*.

1. **Minimum equivalent graph** G' = (V, E'): the transitive reduction. An edge that a longer path implies
   needs no synchronization.
2. **Chains.** Each node is matched with at most one of its successors in G', and is the match of at most one:
   a matching of the bipartite graph that has an edge (x_a, y_b) for each edge a -> b of E'. Matched edges
   join nodes to chains. The nodes of a chain depend on one another, so sharing a stream costs no concurrency,
   and its matched edges need no synchronization. All other edges of E' do: |E'| - |M| of them, the fewest
   where M is a maximum matching.
3. **Streams.** Chains that can never run at the same time, because the end of one leads to the beginning of
   the other, share a stream: the fewest streams, by a maximum matching of chains. That saves no
   synchronization: an edge of E' from the end of one chain to the beginning of another would be matched.

What holds of every assignment: two nodes share a stream only if a path leads from one to the other; the
launch order is topological; a node begins after all that it depends on.

Nothing here runs an operation.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from offbeat.numerics.nimble.matching import maximum_matching

Successors = Sequence[Collection[int]]
"""A graph with the nodes 0 to n - 1: for each, the nodes that depend on it."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """An operation in the order in which one thread queues all of them.

    Attributes:
        node: the operation.
        stream: on which it is queued, after those queued there before.
        waits_for: nodes on other streams, queued before, for which the stream waits first.
        is_awaited: other streams wait for this node.
    """

    node: int
    stream: int
    waits_for: tuple[int, ...]
    is_awaited: bool


@dataclass(frozen=True, kw_only=True)
class StreamAssignment:
    """A schedule of a graph's nodes on streams.

    Attributes:
        launches: every node once, in topological order.
        stream_count: number of streams.
        edges: of the minimum equivalent graph: E'.
        matched: edges that join nodes to chains: M.
    """

    launches: tuple[Launch, ...]
    stream_count: int
    edges: frozenset[tuple[int, int]]
    matched: frozenset[tuple[int, int]]

    @property
    def synchronizations(self) -> tuple[tuple[int, int], ...]:
        """The edges at which a stream waits for another: (node that is awaited, node that waits)."""
        return tuple((node, launch.node) for launch in self.launches for node in launch.waits_for)


def assign_streams(successors: Successors) -> StreamAssignment:
    """Return an assignment with maximum concurrency and the fewest synchronizations for it.

    Source: Kwon, Yu, Jeong and Chun 2020, "Nimble: lightweight and parallel GPU task scheduling for deep
    learning", NeurIPS, on automatic multi-stream execution. Deviation: chains that can never run at the same
    time share a stream (see the module); in the paper each chain has its own.

    Args:
        successors: for each node, the nodes that depend on it.

    Raises:
        ValueError: a successor is no node, or the edges form a circle.
    """
    order = topological_order(successors)
    descendants = find_descendants(successors, order)
    reduced = reduce_transitively(successors, order, descendants)
    matches = maximum_matching(reduced, len(order))
    chains = _join([one for one in order if one not in set(matches)], matches)
    leads_to = [
        [to for to, later in enumerate(chains) if descendants[chain[-1]] >> later[0] & 1] for chain in chains
    ]
    next_chains = maximum_matching(leads_to, len(chains))
    first_chains = [chain for chain in range(len(chains)) if chain not in set(next_chains)]
    stream_of = [0] * len(order)
    for stream, joined in enumerate(_join(first_chains, next_chains)):
        for chain in joined:
            for node in chains[chain]:
                stream_of[node] = stream
    return StreamAssignment(
        launches=_launches(order, stream_of, reduced),
        stream_count=len(first_chains),
        edges=frozenset((node, to) for node, following in enumerate(reduced) for to in following),
        matched=frozenset((node, to) for node, to in enumerate(matches) if to is not None),
    )


def assign_one_stream(successors: Successors) -> StreamAssignment:
    """Return the assignment of all nodes to one stream, which needs no synchronization.

    Raises:
        ValueError: see `assign_streams`.
    """
    order = topological_order(successors)
    return StreamAssignment(
        launches=_launches(order, [0] * len(order), [[] for _ in order]),
        stream_count=min(1, len(order)),
        edges=frozenset(),
        matched=frozenset(),
    )


def topological_order(successors: Successors) -> list[int]:
    """Return the nodes in an order that respects all edges: of several possible nodes the lowest is first.

    Raises:
        ValueError: see `assign_streams`.
    """
    waiting = [0] * len(successors)
    for node, following in enumerate(successors):
        for to in set(following):
            if not 0 <= to < len(successors):
                raise ValueError(
                    f"expected successors of node {node} from 0 to {len(successors) - 1}, got {to}"
                )
            waiting[to] += 1
    free = [node for node, count in enumerate(waiting) if not count]
    order: list[int] = []
    while free:
        order.append(node := heapq.heappop(free))
        for to in set(successors[node]):
            waiting[to] -= 1
            if not waiting[to]:
                heapq.heappush(free, to)
    if len(order) < len(successors):
        circle = sorted(set(range(len(successors))) - set(order))
        raise ValueError(f"expected a graph without circles: nodes {circle} depend on one another")
    return order


def find_descendants(successors: Successors, order: Sequence[int]) -> list[int]:
    """Return the nodes that a path leads to from each node, as a set of bits: 1 << node.

    Args:
        order: the nodes in topological order.
    """
    descendants = [0] * len(successors)
    for node in reversed(order):
        for to in successors[node]:
            descendants[node] |= 1 << to | descendants[to]
    return descendants


def reduce_transitively(
    successors: Successors, order: Sequence[int], descendants: Sequence[int]
) -> list[list[int]]:
    """Return the successors in the minimum equivalent graph: those that no longer path leads to.

    Args:
        order: the nodes in topological order.
        descendants: the result of `find_descendants`.
    """
    rank = {node: place for place, node in enumerate(order)}
    reduced: list[list[int]] = []
    for following in successors:
        kept: list[int] = []
        reached = 0  # from the successors before, in topological order: later ones lead to no earlier ones
        for to in sorted(set(following), key=rank.__getitem__):
            if not reached >> to & 1:
                kept.append(to)
            reached |= descendants[to]
        reduced.append(kept)
    return reduced


def _join(firsts: Sequence[int], following: Sequence[int | None]) -> list[list[int]]:
    """Return the chains that begin at `firsts`, each continued by what follows its last element."""
    chains: list[list[int]] = []
    for first in firsts:
        chain, to = [first], following[first]
        while to is not None:
            chain.append(to)
            to = following[to]
        chains.append(chain)
    return chains


def _launches(order: Sequence[int], stream_of: Sequence[int], edges: Successors) -> tuple[Launch, ...]:
    waits_for: list[list[int]] = [[] for _ in order]
    is_awaited = [False] * len(order)
    for node in order:
        for to in edges[node]:
            if stream_of[node] != stream_of[to]:
                waits_for[to].append(node)
                is_awaited[node] = True
    return tuple(
        Launch(
            node=node,
            stream=stream_of[node],
            waits_for=tuple(waits_for[node]),
            is_awaited=is_awaited[node],
        )
        for node in order
    )
