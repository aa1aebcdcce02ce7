"""The positions of epochs that are not used up: which are left, which are in blocks, which are used.

A part of `offbeat.policies.data.block_scheduler`, which decides which worker gets a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ProtocolError
from offbeat.events import Block


@dataclass(slots=True)
class Epoch:
    """The pool of an open epoch, and how much of the epoch is used.

    Attributes:
        samples: positions in the epoch.
        batch_size: positions in a block at most.
        opened_by: the worker that was the first to begin it.
        unused: positions that no completed round has used.
        pooled: positions in the pool.
        pool: their ranges, the first last, disjoint and not touching.
        is_cut: what comes back is not assigned again.
        used_before: ranges that were used when it was opened.
        drop_last: all blocks hold `batch_size` positions.
    """

    samples: int
    batch_size: int
    opened_by: int
    unused: int
    pooled: int
    pool: list[tuple[int, int]]
    is_cut: bool = False
    used_before: tuple[tuple[int, int], ...] = ()
    drop_last: bool = False

    def pop_ranges(self, count: int) -> tuple[tuple[int, int], ...]:
        """Remove the first `count` positions from the pool, and return their ranges."""
        self.pooled -= count
        start, stop = self.pool[-1]
        if start + count < stop:
            self.pool[-1] = (start + count, stop)
            return ((start, start + count),)
        taken = []
        while count:
            start, stop = self.pool.pop()
            end = min(stop, start + count)
            taken.append((start, end))
            count -= end - start
            if end < stop:
                self.pool.append((end, stop))
        return tuple(taken)

    def keep_first(self, count: int) -> None:
        """Keep the first unused positions; for an epoch of which nothing has been assigned."""
        self.pool = list(self.pop_ranges(count)[::-1]) if count else []
        self.unused = self.pooled = count

    def add_ranges(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Return ranges of positions to the pool, merged with those that they touch."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.pool, *ranges]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self.pool = merged[::-1]
        self.pooled = sum(stop - start for start, stop in merged)


class OpenEpochs:
    """Keeps each position of an epoch in one place: in the epoch's pool, in one block, or used.

    The first epoch may be any, the others follow in order. One is open until every position is used. Blocks
    are cut from the front of a pool, and their ids are never reused.

    Args:
        open_max: how many epochs may be unfinished at once.

    Attributes:
        has_changed: a pool was emptied or filled, or an epoch has finished; for the owner to clear.
    """

    def __init__(self, open_max: int) -> None:
        self._open_max = open_max
        self._first: int | None = None  # the first epoch that a worker began
        self._next = 0  # the epoch to be opened next
        self._epochs: dict[int, Epoch] = {}  # unfinished ones, ascending
        self._finished_early: dict[int, int] = {}  # epochs finished before an older one: their samples
        self._next_id = 0
        self.has_changed = False

    # Queries ---------------------------------------------------------------------------------------------

    def __getitem__(self, number: int) -> Epoch:
        return self._epochs[number]

    def __contains__(self, number: int) -> bool:
        """Whether an epoch is open."""
        return number in self._epochs

    def numbers(self) -> tuple[int, ...]:
        """Return the open epochs, ascending."""
        return tuple(self._epochs)

    @property
    def next(self) -> int:
        """The first epoch that no worker has begun."""
        return self._next

    @property
    def oldest(self) -> int:
        """The oldest open epoch; if there is none, the next one."""
        return next(iter(self._epochs), self._next)

    @property
    def source(self) -> int | None:
        """The epoch from which blocks are cut: the oldest with a pool."""
        for number, epoch in self._epochs.items():
            if epoch.pooled:
                return number
        return None

    def may_follow(self, epoch: int) -> bool:
        """Whether the epoch after this one is near enough to the oldest open one to be begun."""
        return epoch + 1 < self.oldest + self._open_max

    def is_finished(self, epoch: int) -> bool:
        """Whether every position of the epoch is used."""
        return self._first is not None and self._first <= epoch < self._next and epoch not in self._epochs

    def used_count(self, epoch: int) -> int:
        """Return how many positions of an open epoch are used."""
        state = self._epochs[epoch]
        return state.samples - state.unused

    def last_half_assigned(self) -> int:
        """Return the last open epoch of which at least half has been assigned; -1 if there is none."""
        return max(
            (number for number, state in self._epochs.items() if 2 * state.pooled <= state.samples),
            default=-1,
        )

    def is_drained(self) -> bool:
        """Whether the pool of the oldest open epoch is empty."""
        oldest = next(iter(self._epochs.values()), None)
        return oldest is not None and not oldest.pooled

    def used_ranges(
        self, blocks: Sequence[Block], sizes: Mapping[int, int]
    ) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return the positions that are neither in a pool nor in one of these blocks, by epoch, ascending.

        The epochs are the oldest one that would not be finished, and all that have begun after it.

        Args:
            blocks: all that are assigned and not used, and any that are to count as unused.
            sizes: positions in the epochs of blocks that are to count as unused.
        """
        usual = max(sizes.values(), default=0)  # for a finished epoch of unknown size
        used: dict[int, tuple[tuple[int, int], ...]] = {}
        for number in range(min([self.oldest, *sizes]), self._next):
            epoch = self._epochs.get(number)
            free = [part for block in blocks if block.epoch == number for part in block.ranges]
            if epoch is None:
                samples = self._finished_early.get(number, sizes.get(number, usual))
            else:
                free, samples = [] if epoch.is_cut else [*epoch.pool, *free], epoch.samples
            if free or used:
                used[number] = tuple(_gaps(sorted(free), samples))
        return used

    # Operations ------------------------------------------------------------------------------------------

    def begin(
        self,
        worker: int,
        epoch: int,
        samples: int,
        batch_size: int,
        *,
        current: int | None,
        ends_previous_early: bool,
        used_ranges: tuple[tuple[int, int], ...],
        drop_last: bool,
    ) -> None:
        """Check that a worker may begin an epoch, and open it if it is the first to; see `BlockScheduler`.

        Args:
            current: the worker's epoch before; None if it has none.

        Raises:
            ProtocolError: see `BlockScheduler.begin_epoch`; nothing has changed.
        """
        self._check_begin(worker, epoch, samples, batch_size, current, ends_previous_early, drop_last)
        self._check_used(worker, epoch, samples, used_ranges)
        if self._first is None:
            self._first = self._next = epoch
        if epoch == self._next:
            self._next += 1
            gaps = _gaps(used_ranges, samples)
            unused = sum(stop - start for start, stop in gaps)
            opened = Epoch(samples, batch_size, worker, unused, unused, gaps[::-1], used_before=used_ranges)
            if drop_last:
                opened.drop_last = True
                opened.keep_first(unused - unused % batch_size)
            self._epochs[epoch] = opened
            self._finish_if_used(epoch, opened)

    def cut_block(self, number: int, size: int) -> Block:
        """Cut a block of this size from an epoch's pool."""
        epoch = self._epochs[number]
        block = Block(self._next_id, number, epoch.pop_ranges(size))
        self._next_id += 1
        if not epoch.pooled:
            self.has_changed = True
        return block

    def put(self, blocks: Sequence[Block]) -> None:
        """Return blocks to the pool."""
        for number in {block.epoch for block in blocks}:
            epoch = self._epochs[number]
            if not epoch.pooled:
                self.has_changed = True
            epoch.add_ranges(part for block in blocks if block.epoch == number for part in block.ranges)
            if epoch.is_cut:
                self._discard(number, epoch)

    def use(self, blocks: Iterable[Block]) -> None:
        """Count blocks as used."""
        for block in blocks:
            epoch = self._epochs[block.epoch]
            epoch.unused -= block.samples
            self._finish_if_used(block.epoch, epoch)

    def cut_off(self, number: int) -> None:
        """Count the rest of an epoch as used: what is in its pool, and what comes back later."""
        epoch = self._epochs.get(number)
        if epoch is not None:
            epoch.is_cut = True
            self._discard(number, epoch)

    def _discard(self, number: int, epoch: Epoch) -> None:
        epoch.unused -= epoch.pooled
        epoch.pooled, epoch.pool = 0, []
        self.has_changed = True
        self._finish_if_used(number, epoch)

    def _finish_if_used(self, number: int, epoch: Epoch) -> None:
        if not epoch.unused:
            del self._epochs[number]
            self._finished_early[number] = epoch.samples
            self._finished_early = {
                finished: samples
                for finished, samples in self._finished_early.items()
                if finished > self.oldest
            }
            self.has_changed = True

    # Checks ----------------------------------------------------------------------------------------------

    def check_assigned(self, worker: int, block_ids: Sequence[int]) -> None:
        """Check that blocks have been assigned, to whichever worker.

        Raises:
            ProtocolError: one has not.
        """
        for block_id in block_ids:
            if not 0 <= block_id < self._next_id:
                raise ProtocolError(
                    f"expected a block that has been assigned, from 0 to {self._next_id - 1}, "
                    f"got block {block_id} of worker {worker}"
                )

    def _check_begin(
        self,
        worker: int,
        epoch: int,
        samples: int,
        batch_size: int,
        current: int | None,
        early: bool,
        drop_last: bool,
    ) -> None:
        batches = describe_batch_size(batch_size, drop_last)
        description = f"worker {worker} begins epoch {epoch} with {samples} samples in batches of {batches}"
        if samples < 1 or batch_size < 1:
            raise ProtocolError(f"expected at least 1 sample in batches of at least 1, {description}")
        if current is not None and epoch < current:
            raise ProtocolError(f"expected an epoch from {current}, its current one, {description}")
        if epoch < 0 or (self._first is not None and not self._first <= epoch <= self._next):
            first, last = (0, "any") if self._first is None else (self._first, str(self._next))
            raise ProtocolError(f"expected an epoch from {first} to {last}, {description}")
        opened = self._epochs.get(epoch)
        if opened is not None and (samples, batch_size, drop_last) != (
            opened.samples,
            opened.batch_size,
            opened.drop_last,
        ):
            batches = describe_batch_size(opened.batch_size, opened.drop_last)
            raise ProtocolError(
                f"worker {opened.opened_by} began epoch {epoch} with {opened.samples} samples in batches of "
                f"{batches}, but {description}: give every worker the same data set, batch size and drop_last"
            )
        oldest = next(iter(self._epochs), epoch)
        if epoch >= max(oldest + self._open_max, self._next) and not early:
            raise ProtocolError(
                f"expected epoch {oldest} to be finished first, {description}: use each epoch to its end"
            )

    def _check_used(self, worker: int, epoch: int, samples: int, used: tuple[tuple[int, int], ...]) -> None:
        opened = self._epochs.get(epoch)
        if opened is not None and used and used != opened.used_before:
            raise ProtocolError(
                f"worker {opened.opened_by} and worker {worker} continue from different states of epoch "
                f"{epoch}: load the same state on every worker"
            )
        bounds = [0, *(bound for part in used for bound in part), samples]
        if bounds != sorted(bounds) or any(start == stop for start, stop in used):
            raise ProtocolError(
                f"expected ascending ranges of used positions, of {samples} positions in all, got {used} "
                f"from worker {worker}"
            )

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "first": self._first,
            "next": self._next,
            "finished_early": [list(entry) for entry in self._finished_early.items()],
            "open": [
                {
                    "epoch": number,
                    "samples": epoch.samples,
                    "batch_size": epoch.batch_size,
                    "opened_by": epoch.opened_by,
                    "unused": epoch.unused,
                    "pool": list(map(list, epoch.pool)),
                    "is_cut": epoch.is_cut,
                    "used_before": list(map(list, epoch.used_before)),
                    "drop_last": epoch.drop_last,
                }
                for number, epoch in self._epochs.items()
            ],
            "next_id": self._next_id,
            "has_changed": self.has_changed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._first, self._next = state["first"], state["next"]
        self._finished_early = dict(state["finished_early"])
        self._epochs = {}
        for entry in state["open"]:
            pool = [(start, stop) for start, stop in entry["pool"]]
            self._epochs[entry["epoch"]] = Epoch(
                entry["samples"],
                entry["batch_size"],
                entry["opened_by"],
                entry["unused"],
                sum(stop - start for start, stop in pool),
                pool,
                entry["is_cut"],
                tuple((start, stop) for start, stop in entry["used_before"]),
                entry["drop_last"],
            )
        self._next_id, self.has_changed = state["next_id"], state["has_changed"]


def describe_batch_size(batch_size: int, drop_last: bool) -> str:
    """Return the batch size, and whether the rest is dropped, as words that follow "in batches of"."""
    return f"{batch_size}, the rest dropped" if drop_last else str(batch_size)


def blocks_to_plain(blocks: Iterable[Block]) -> list[list[Any]]:
    """Return blocks as plain data."""
    return [[block.id, block.epoch, [list(part) for part in block.ranges]] for block in blocks]


def blocks_from_plain(plain: list[list[Any]]) -> dict[int, Block]:
    """Return the blocks, by id, from the plain data of `blocks_to_plain`."""
    return {
        number: Block(number, epoch, tuple((start, stop) for start, stop in ranges))
        for number, epoch, ranges in plain
    }


def _gaps(ranges: Iterable[tuple[int, int]], samples: int) -> list[tuple[int, int]]:
    """Return the gaps that ascending ranges leave in positions 0 to `samples` - 1."""
    found, last = [], 0
    for start, stop in (*ranges, (samples, samples)):
        if last < start:
            found.append((last, start))
        last = stop
    return found
