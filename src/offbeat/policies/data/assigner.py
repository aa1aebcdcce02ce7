"""Base of the assignment of samples to groups and to single workers.

The subclasses decide which blocks a step has used; `offbeat.policies.work` cuts an epoch into blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from offbeat.errors import ProtocolError
from offbeat.events import Block, Deal, Saving, Used, Wants
from offbeat.policies.data.block_scheduler import WorkScheduler


class Dealer:
    """Reports each worker's epoch to a block scheduler; builds the actions that assign and report samples."""

    _why_awaited: ClassVar[str]  # why a worker has to continue without samples

    def __init__(self) -> None:
        self._scheduler = WorkScheduler()
        self._in: dict[int, tuple[int, int]] = {}  # each worker's epoch, and the samples of that epoch
        self._anew: set[int] = set()  # workers whose next Deal clears the blocks that they have
        self._saving: dict[int, int] = {}  # workers that save a checkpoint: rounds or clocks that it holds

    def saving(self, event: Saving) -> None:
        """Note that a worker saves a checkpoint and needs to know which samples it holds.

        Raises:
            ProtocolError: the worker has never requested samples.
        """
        if event.worker not in self._in:
            raise ProtocolError(
                f"expected worker {event.worker} to have begun an epoch before it saves a checkpoint"
            )
        self._saving[event.worker] = event.round

    def _begin(self, event: Wants) -> bool:
        """Move a worker to an epoch; return whether it has no untaken blocks."""
        worker, scheduler = event.worker, self._scheduler
        if event.skips and worker in self._in:
            scheduler.forgone(worker)
            scheduler.cut(self._in[worker][0])
            self._anew.add(worker)
        scheduler.begin(
            worker,
            event.epoch,
            event.samples,
            event.batch_size,
            hold=event.is_last,
            ahead=event.ahead,
            early=event.skips,
            used=event.used,
            drop_last=event.drop_last,
        )
        self._in[worker] = (event.epoch, event.samples)
        for block_id in event.taken:
            scheduler.taken(worker, block_id)
        return len(scheduler.held(worker)) == scheduler.taken_count(worker)

    def _deal(self, worker: int, blocks: tuple[Block, ...], over: bool, *, is_awaited: bool) -> Deal:
        epoch, samples = self._in[worker]
        is_open = epoch in self._scheduler.unfinished()
        reasons = [f"there is nothing for it, and {self._why_awaited}"] * is_awaited
        reasons += ["its earlier blocks are not its own any more"] * (worker in self._anew)
        reasons += ["its turn"] * bool(blocks) + [f"nothing is left of epoch {epoch}"] * over
        return Deal(
            worker=worker,
            epoch=epoch,
            anew=worker in self._anew,
            blocks=blocks,
            over=over,
            is_awaited=is_awaited,
            used=self._scheduler.used(epoch) if is_open else samples,
            reason="; ".join(reasons) or "progress of the epoch so far",
        )

    def _used(
        self,
        worker: int,
        round_: int,
        used: Mapping[int, tuple[tuple[int, int], ...]],
        *,
        is_current: bool = True,
    ) -> Used:
        """Build the answer to a checkpoint query: the ranges used in each epoch that is not used up."""
        return Used(
            worker=worker,
            round=round_,
            epoch=min(used, default=self._scheduler.next_epoch),
            used=tuple(used.items()),
            is_current=is_current,
            reason="requested" if is_current else "other members have continued without it",
        )
