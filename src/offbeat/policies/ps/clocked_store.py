"""The values of one server, each with the times of the pushes that it contains.

Nothing here knows which servers hold what, or how messages travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.policies.ps.messages import Operation, Payload
from offbeat.policies.ps.placement import BlockId
from offbeat.policies.ps.range_clock import ClockRange, RangeVectorClock


class ServerTable(Protocol):
    """The values of one namespace on one server; keys that were never pushed are zero."""

    @property
    def reads_pushes_once(self) -> bool:
        """Whether it reads pushed content only while applying it, and never afterwards."""

    def check(self, content: Payload, first: int, last: int) -> None:
        """Check that content can be pushed to keys `first` to `last` - 1.

        Raises:
            ValueError: it cannot.
        """

    def dry_run(self, first: int, last: int, content: Payload) -> None:
        """Check that `apply` accepts this in the current state; nothing changes.

        Raises:
            ValueError: it does not.
        """

    def apply(self, first: int, last: int, content: Payload) -> None:
        """Apply what was pushed for keys `first` to `last` - 1."""

    def read(self, first: int, last: int, keys: Payload | None, states: bool = False) -> Payload:
        """Return the values of keys `first` to `last` - 1, or of those of them that `keys` lists.

        Args:
            states: also return the state that is kept for each value.

        Raises:
            ValueError: `keys` lists other keys.
        """

    def key_range(self, content: Payload, first: int, last: int) -> Payload:
        """Return the part of `content` for keys `first` to `last` - 1."""

    def combine(self, contents: Sequence[Payload], first: int, last: int) -> Payload:
        """Combine, for example sum, what `contents` have for keys `first` to `last` - 1.

        The result may depend on their order and on the current values, so it is applied before anything else.
        """

    def export_block(self, first: int, last: int) -> Payload:
        """Return a copy of everything that is kept for keys `first` to `last` - 1."""

    def import_block(self, first: int, last: int, content: Payload) -> None:
        """Replace everything kept for keys `first` to `last` - 1 by another table's `export_block`."""

    def remove_block(self, first: int, last: int) -> None:
        """Delete keys `first` to `last` - 1."""


class TableStore(Protocol):
    """All values of one server."""

    def table(self, space: NamespaceSpec) -> ServerTable:
        """Return a namespace's table, created if needed."""


class ClockedStore:
    """Applies each push at most once per key, in the client's order, whatever operations bring it.

    Args:
        store: the values.

    Attributes:
        spaces: the namespaces, by name; assigned by the owner.
        sequence_gaps: operations that came although a preceding one was missing: an acknowledged operation is
            lost, or the preceding one was refused.
    """

    def __init__(self, store: TableStore) -> None:
        self.spaces: Mapping[str, NamespaceSpec] = {}
        self.sequence_gaps = 0
        self._store = store
        self._clocks: dict[str, RangeVectorClock] = {}

    def table(self, space: NamespaceSpec) -> ServerTable:
        """Return the values of a namespace."""
        return self._store.table(space)

    def clock(self, namespace: str) -> RangeVectorClock:
        """Return the times of the pushes that the values of a namespace contain."""
        clock = self._clocks.get(namespace)
        if clock is None:
            clock = self._clocks[namespace] = RangeVectorClock()
        return clock

    def apply(self, operation: Operation) -> None:
        """Apply an operation where it is new."""
        clock = self.clock(operation.namespace)
        table = self._store.table(self.spaces[operation.namespace])
        if len(operation.stamps) == 1:
            one, first, last = operation.stamps[0], operation.first, operation.last
            known = clock.pieces(one.client, first, last)
            if len(known) == 1 and known[0].time < one.time and len(one.previous_times) == 1:  # nearly always
                self.sequence_gaps += one.previous_times[0].time > known[0].time
                table.apply(first, last, operation.content)
                clock.advance(one.client, first, last, one.time)
                return
        self.sequence_gaps += _has_gap(clock, operation)
        for first, last in self.fresh_ranges(operation):
            table.apply(first, last, table.key_range(operation.content, first, last))
            for mark in operation.stamps:
                clock.set_time(mark.client, first, last, mark.time)

    def fresh_ranges(self, operation: Operation) -> list[tuple[int, int]]:
        """Return the ranges where none of an operation's pushes has been applied; elsewhere all have been."""
        clock, one = self.clock(operation.namespace), operation.stamps[0]
        parts = clock.earlier_ranges(one.client, operation.first, operation.last, one.time)
        for mark in operation.stamps[1:]:
            parts = [part for at in parts for part in clock.earlier_ranges(mark.client, *at, mark.time)]
        return parts

    def part(self, operation: Operation, first: int, last: int) -> Operation:
        """Return the part of an operation for keys `first` to `last` - 1, all of which are in it."""
        if (first, last) == (operation.first, operation.last):
            return operation
        table = self._store.table(self.spaces[operation.namespace])
        return replace(
            operation, first=first, last=last, content=table.key_range(operation.content, first, last)
        )

    def part_in_block(self, operation: Operation, block: BlockId) -> Operation:
        """Return the part of an operation for the keys of one of its blocks."""
        first, last = self.spaces[block[0]].block_range(block[1])
        return self.part(operation, max(first, operation.first), min(last, operation.last))

    def blocks(self) -> Iterator[BlockId]:
        """Yield the blocks with any clock entry: keys without values have times too."""
        for namespace, clock in sorted(self._clocks.items()):
            space = self.spaces[namespace]
            blocks = {block for first, last in clock.ranges() for block in space.blocks_of_range(first, last)}
            yield from ((namespace, block) for block in sorted(blocks))

    def export_block(self, block: BlockId) -> tuple[Payload, dict[int, list[ClockRange]]]:
        """Return copies of the values and the times of a block."""
        space = self.spaces[block[0]]
        first, last = space.block_range(block[1])
        return self._store.table(space).export_block(first, last), self.clock(space.name).extract(first, last)

    def import_block(self, block: BlockId, content: Payload, clocks: dict[int, list[ClockRange]]) -> None:
        """Replace a block by another store's `export_block`."""
        space = self.spaces[block[0]]
        first, last = space.block_range(block[1])
        self._store.table(space).import_block(first, last, content)
        clock = self.clock(space.name)
        clock.drop(first, last)
        clock.merge(clocks)

    def remove_block(self, block: BlockId) -> None:
        """Delete the values and the times of a block."""
        space = self.spaces[block[0]]
        first, last = space.block_range(block[1])
        self._store.table(space).remove_block(first, last)
        self.clock(space.name).drop(first, last)


def _has_gap(clock: RangeVectorClock, operation: Operation) -> bool:
    """Whether a push that precedes one of the operation's pushes has not been applied."""
    for mark in operation.stamps:
        for piece in mark.previous_times:
            first, last = max(operation.first, piece.start), min(operation.last, piece.stop)
            if first < last and clock.earlier_ranges(mark.client, first, last, piece.time):
                return True
    return False
