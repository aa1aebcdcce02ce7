"""What dealing samples to groups and to single workers have in common.

Nothing here knows which blocks a step has used, nor how an epoch is cut into blocks (see
`offbeat.policies.work`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from offbeat.errors import ProtocolError
from offbeat.events import Block, Deal, Saving, Used, Wants
from offbeat.policies.data.block_scheduler import WorkScheduler


class Dealer:
    """Tells a scheduler in which epoch each worker is, and each worker what it has and what is used."""

    _why_awaited: ClassVar[str]  # why others wait for a worker that is told to do without

    def __init__(self) -> None:
        self._scheduler = WorkScheduler()
        self._in: dict[int, tuple[int, int]] = {}  # the epoch in which each worker is, and its samples
        self._anew: set[int] = set()  # who is to be told that it has nothing
        self._saving: dict[int, int] = {}  # whose state is taken down, and how many rounds or clocks it holds

    def saving(self, event: Saving) -> None:
        """A worker's state is taken down.

        Raises:
            ProtocolError: the worker has never wanted samples.
        """
        if event.worker not in self._in:
            raise ProtocolError(f"expected worker {event.worker} to have begun an epoch before it saves")
        self._saving[event.worker] = event.round

    def _begin(self, event: Wants) -> bool:
        """A worker is in an epoch; return whether it has nothing to compute with, nor anything on its way."""
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
        reasons += ["what it had is not its own any more"] * (worker in self._anew)
        reasons += ["its turn"] * bool(blocks) + [f"nothing is left of epoch {epoch}"] * over
        return Deal(
            worker=worker,
            epoch=epoch,
            anew=worker in self._anew,
            blocks=blocks,
            over=over,
            is_awaited=is_awaited,
            used=self._scheduler.used(epoch) if is_open else samples,
            reason="; ".join(reasons) or "so far is the epoch",
        )

    def _used(
        self,
        worker: int,
        round_: int,
        used: Mapping[int, tuple[tuple[int, int], ...]],
        *,
        is_current: bool = True,
    ) -> Used:
        """Tell a worker that saves which ranges its state holds, of each epoch that is not used up."""
        return Used(
            worker=worker,
            round=round_,
            epoch=min(used, default=self._scheduler.next_epoch),
            used=tuple(used.items()),
            is_current=is_current,
            reason="asked" if is_current else "others have gone on without it",
        )
