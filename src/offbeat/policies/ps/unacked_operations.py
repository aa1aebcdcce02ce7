"""The operations of one server that are not known to have reached all their holders.

Nothing here sends: the server that owns them does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from offbeat.policies.ps.aggregation import PushRequest
from offbeat.policies.ps.clocked_store import ClockedStore
from offbeat.policies.ps.messages import Operation, Push
from offbeat.policies.ps.placement import Placement


@dataclass(slots=True, eq=False)
class UnackedOperation:
    """An operation that is not known to have reached all holders after this one.

    Attributes:
        came_from: the holder before this one, None on the master.
        requests: that wait for it, on the master.
    """

    operation: Operation
    came_from: int | None
    requests: list[PushRequest] = field(default_factory=list)


class UnackedOperations:
    """Keeps every operation that was applied here until all its holders are known to have it, in order.

    Operations of this view are in flight down their chains, known by master and serial. Those of earlier
    views, of which another server is the master, are carried until that master has replayed them. Those that
    came within blocks of this view are the next view's business only.

    Args:
        server: this server's id.
        store: returns parts of operations.
    """

    def __init__(self, server: int, store: ClockedStore) -> None:
        self._server, self._store = server, store
        self._serial = 0  # of this view
        self._in_flight: dict[tuple[int, int], UnackedOperation] = {}  # by master and serial, as applied
        self._carried: list[Operation] = []
        self._fetched: list[Operation] = []

    def add(self, master: int, serial: int, operation: Operation, came_from: int) -> None:
        """Keep an operation that a holder sent down the chain."""
        self._in_flight[master, serial] = UnackedOperation(operation, came_from)

    def add_own(self, operation: Operation, requests: list[PushRequest]) -> int:
        """Keep an operation of which this server is the master; return its serial."""
        self._serial += 1
        self._in_flight[self._server, self._serial] = UnackedOperation(operation, None, requests)
        return self._serial

    def pop(self, master: int, serial: int) -> UnackedOperation:
        """Remove and return an operation that all holders after this one have."""
        return self._in_flight.pop((master, serial))

    def of_push(self, push: Push) -> Iterator[UnackedOperation]:
        """Yield the operations in flight that contain parts of the same push."""
        return (one for one in self._in_flight.values() if _contains(one.operation, push))

    def on_keys(self, namespace: str, first: int, last: int) -> Iterator[Operation]:
        """Yield the parts of all operations, in order, for keys `first` to `last` - 1 of a namespace."""
        in_flight = [one.operation for one in self._in_flight.values()]
        for operation in [*self._carried, *self._fetched, *in_flight]:
            begin, end = max(operation.first, first), min(operation.last, last)
            if operation.namespace == namespace and begin < end:
                yield self._store.part(operation, begin, end)

    def add_fetched(self, operations: Iterable[Operation]) -> None:
        """Keep the operations that a received block contains and that its source had not acknowledged."""
        self._fetched += operations

    def carry(self, operation: Operation) -> None:
        """Keep an operation of an earlier view for its master."""
        self._carried.append(operation)

    def carried_by_chain(self, placement: Placement) -> dict[tuple[int, ...], list[Operation]]:
        """Return the carried operations by the chain of their first block."""
        by_chain: dict[tuple[int, ...], list[Operation]] = {}
        for operation in self._carried:
            by_chain.setdefault(placement.chain_of(operation), []).append(operation)
        return by_chain

    def on_replayed(self, chain: tuple[int, ...], placement: Placement) -> None:
        """Forget the carried operations of a chain: its master has replayed them."""
        self._carried = [one for one in self._carried if placement.chain_of(one) != chain]

    def take_all(self, placement: Placement) -> list[tuple[Operation, list[PushRequest]]]:
        """Remove all operations for a new view; return them in order, with the requests that wait for them.

        Of operations on keys whose data are lost with this view, only the other parts remain, without
        requests: a client fails a request for lost keys as a whole and resends no part of it, so the holders
        finish the rest.
        """
        older = [(one, list[PushRequest]()) for one in [*self._carried, *self._fetched]]
        found = [*older, *((one.operation, one.requests) for one in self._in_flight.values())]
        self._carried, self._fetched, self._in_flight, self._serial = [], [], {}, 0
        if placement.view.lost_arcs_dropped:
            return [(part, []) for one, _ in found for part in self._not_lost(one, placement)]
        return found

    def _not_lost(self, operation: Operation, placement: Placement) -> list[Operation]:
        blocks = list(placement.blocks(operation.namespace, operation.first, operation.last))
        kept = [block for block in blocks if not placement.is_lost(block)]
        if len(kept) == len(blocks):
            return [operation]
        return [self._store.part_in_block(operation, block) for block in kept]


def _contains(operation: Operation, push: Push) -> bool:
    return (
        operation.namespace == push.namespace
        and operation.first < push.last
        and push.first < operation.last
        and any((mark.client, mark.time) == (push.client, push.time) for mark in operation.stamps)
    )
