"""The transfer of blocks between servers, in one view: those that this server gains, and those that it sends.

Nothing here decides which server gains what: that is in the placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from offbeat.policies.ps.clocked_store import ClockedStore
from offbeat.policies.ps.messages import Operation, TransferChunk, TransferDone, TransferRequest
from offbeat.policies.ps.placement import BlockId, Placement

_UNACKED_CHUNKS_MAX: Final = 4


class IncomingBlocks:
    """Applies operations to blocks that are here; those on a block that is still to come wait behind it.

    Args:
        store: where blocks and operations go.
        placement: the one in force.

    Attributes:
        pending_sources: servers that have not sent TransferDone in this view.
    """

    def __init__(self, store: ClockedStore, placement: Placement) -> None:
        self.pending_sources: set[int] = set()
        self._store, self._placement = store, placement
        self._present: set[BlockId] = set()  # of the blocks that are gained
        self._waiting: dict[BlockId, list[Operation]] = {}  # operations on blocks that have not come

    def begin_view(self, placement: Placement) -> list[tuple[int, TransferRequest]]:
        """Adopt a placement; return the requests for missing blocks, with their receivers."""
        self._placement = placement
        self._waiting = {
            block: operations
            for block, operations in self._waiting.items()
            if placement.holds(block) and not placement.is_lost(block)
        }
        self._present = {
            block for block in self._present if placement.gains(block) and not placement.is_lost(block)
        }
        self.pending_sources = placement.sources()
        request = TransferRequest(view=placement.view.version, present_blocks=tuple(sorted(self._present)))
        self._apply_waiting()
        return [(source, request) for source in sorted(self.pending_sources)]

    def lacks(self, block: BlockId) -> bool:
        """Whether this server is to receive the content of a block and has not."""
        return (
            bool(self.pending_sources)
            and block not in self._present
            and self._placement.gains(block)
            and self._placement.source(block) in self.pending_sources
        )

    def apply(self, operation: Operation) -> None:
        """Apply the parts of an operation that are new here; keep those on blocks that have not come."""
        if not self._placement.may_gain:
            self._store.apply(operation)
            return
        for block in self._placement.blocks(operation.namespace, operation.first, operation.last):
            part = self._store.part_in_block(operation, block)
            if self.lacks(block):
                self._waiting.setdefault(block, []).append(part)
            else:
                self._store.apply(part)
                if self._placement.gains(block):
                    self._present.add(block)

    def on_chunk(self, chunk: TransferChunk) -> None:
        """Install a block, and apply the operations behind it."""
        block = chunk.namespace, chunk.block
        self._store.import_block(block, chunk.content, chunk.clocks)
        self._present.add(block)
        self._apply_waiting()

    def on_source_done(self, source: int) -> None:
        """Note that a server has sent all of its blocks."""
        self.pending_sources.discard(source)
        self._apply_waiting()

    def _apply_waiting(self) -> None:
        """Apply the operations on blocks that have come, or that no source has."""
        for block in [block for block in self._waiting if not self.lacks(block)]:
            for operation in self._waiting.pop(block):
                self._store.apply(operation)
            if self._placement.gains(block):
                self._present.add(block)


@dataclass(slots=True, eq=False)
class _Fill:
    """The transfer of blocks to one server.

    Attributes:
        pending: blocks that are still to be sent, the next one last.
        unacked: blocks that were sent and not acknowledged.
    """

    pending: list[BlockId]
    unacked: int = 0


class OutgoingBlocks:
    """Sends each server the blocks that it gains from here, a few at a time as it acknowledges them.

    Args:
        store: where the blocks are.
        unacked: returns the operations on keys `first` to `last` - 1 of a namespace that are applied here and
            not known to be everywhere, in order.
        placement: the one in force.
    """

    def __init__(
        self,
        store: ClockedStore,
        unacked: Callable[[str, int, int], Iterable[Operation]],
        placement: Placement,
    ) -> None:
        self._store, self._unacked, self._placement = store, unacked, placement
        self._fills: dict[int, _Fill] = {}  # by the server that is being filled

    def begin_view(self, placement: Placement) -> None:
        """Adopt a placement; servers request again what they lack in it."""
        self._placement = placement
        self._fills.clear()

    def on_request(self, gainer: int, request: TransferRequest) -> list[TransferChunk | TransferDone]:
        """Begin to send a server its blocks; later operations reach it through the chain."""
        present = set(request.present_blocks)
        pending = [
            block
            for block in self._store.blocks()
            if block not in present and self._placement.sends(block, gainer)
        ]
        fill = self._fills[gainer] = _Fill(pending[::-1])
        return self._next_chunks(fill)

    def on_ack(self, gainer: int) -> list[TransferChunk | TransferDone]:
        """Note that a server has installed a block; return what to send next."""
        fill = self._fills[gainer]
        fill.unacked -= 1
        return self._next_chunks(fill)

    def _next_chunks(self, fill: _Fill) -> list[TransferChunk | TransferDone]:
        version = self._placement.view.version
        messages: list[TransferChunk | TransferDone] = []
        while fill.pending and fill.unacked < _UNACKED_CHUNKS_MAX:
            namespace, block = fill.pending.pop()
            fill.unacked += 1
            content, clocks = self._store.export_block((namespace, block))
            first, last = self._store.spaces[namespace].block_range(block)
            chunk = TransferChunk(
                view=version,
                namespace=namespace,
                block=block,
                content=content,
                clocks=clocks,
                pending=tuple(self._unacked(namespace, first, last)),
            )
            messages.append(chunk)
        if not fill.pending and not fill.unacked:
            messages.append(TransferDone(view=version))
        return messages
