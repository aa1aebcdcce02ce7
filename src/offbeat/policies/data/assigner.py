"""Base of the assignment of samples to groups and to single workers.

The subclasses decide which blocks a step has used; `offbeat.policies.data.block_scheduler` cuts an epoch into
blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from offbeat.errors import ProtocolError
from offbeat.events import AssignBlocks, Block, CheckpointQuery, ConsumedSamples, SamplesRequested
from offbeat.policies.data.block_scheduler import BlockScheduler


class BlockAssigner:
    """Reports each worker's epoch to a block scheduler; builds the actions that assign and report samples."""

    _awaited_reason: ClassVar[str]  # why a worker has to continue without samples

    def __init__(self, *, equal_counts: bool = True) -> None:
        self._scheduler = BlockScheduler(equal_counts=equal_counts)
        self._epochs_of_workers: dict[
            int, tuple[int, int]
        ] = {}  # each worker's epoch, and the samples of that epoch
        self._reset_workers: set[int] = set()  # workers whose blocks their next AssignBlocks clears
        self._checkpoint_queries: dict[
            int, int
        ] = {}  # workers that save a checkpoint: rounds or clocks that it holds

    def on_checkpoint_query(self, event: CheckpointQuery) -> None:
        """Note that a worker saves a checkpoint and needs to know which samples it holds.

        Raises:
            ProtocolError: the worker has never requested samples.
        """
        if event.worker not in self._epochs_of_workers:
            raise ProtocolError(
                f"expected worker {event.worker} to have begun an epoch before it saves a checkpoint"
            )
        self._checkpoint_queries[event.worker] = event.round

    def _begin_epoch(self, event: SamplesRequested) -> bool:
        """Move a worker to an epoch; return whether it has no queued blocks."""
        worker, scheduler = event.worker, self._scheduler
        if event.abandons_previous and worker in self._epochs_of_workers:
            scheduler.discard_blocks(worker)
            scheduler.cut_epoch(self._epochs_of_workers[worker][0])
            self._reset_workers.add(worker)
        scheduler.begin_epoch(
            worker,
            event.epoch,
            event.samples,
            event.batch_size,
            holds_until_used=event.is_last,
            ahead=event.blocks_max,
            ends_previous_early=event.abandons_previous,
            used_ranges=event.consumed_ranges,
            drop_last=event.drop_last,
        )
        self._epochs_of_workers[worker] = (event.epoch, event.samples)
        for block_id in event.started_blocks:
            scheduler.mark_started(worker, block_id)
        return len(scheduler.assigned_ids(worker)) == scheduler.started_count(worker)

    def _assignment(
        self, worker: int, blocks: tuple[Block, ...], over: bool, *, is_awaited: bool
    ) -> AssignBlocks:
        epoch, samples = self._epochs_of_workers[worker]
        epochs, is_reset = self._scheduler.epochs, worker in self._reset_workers
        reasons = []
        if is_awaited:
            reasons.append(f"no block is left for this worker, and {self._awaited_reason}")
        if is_reset:
            reasons.append("this worker's earlier blocks were reassigned")
        if blocks:
            reasons.append("its turn")
        if over:
            reasons.append(f"nothing is left of epoch {epoch}")
        return AssignBlocks(
            worker=worker,
            epoch=epoch,
            replaces_queue=is_reset,
            blocks=blocks,
            is_last=over,
            is_awaited=is_awaited,
            consumed=epochs.used_count(epoch) if epoch in epochs else samples,
            reason="; ".join(reasons) or "progress of the epoch so far",
        )

    def _consumed_samples(
        self,
        worker: int,
        round_: int,
        used: Mapping[int, tuple[tuple[int, int], ...]],
        *,
        is_current: bool = True,
    ) -> ConsumedSamples:
        """Build the answer to a checkpoint query: the ranges used in each epoch that is not used up."""
        return ConsumedSamples(
            worker=worker,
            round=round_,
            epoch=min(used, default=self._scheduler.epochs.next),
            consumed=tuple(used.items()),
            is_current=is_current,
            reason="requested" if is_current else "other members have continued without it",
        )
