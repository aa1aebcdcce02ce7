"""Assigns the samples of every epoch to the workers that can use them: each exactly once.

This module knows positions only: the order of an epoch is a permutation that the workers draw from
(seed, epoch). It sends nothing either; the policy that owns a scheduler sends what it assigns, and reports
to it what the workers do.

**Theory of operation: the life of a block.** `begin_epoch` opens an epoch: its positions form the epoch's
*pool*. `assign` cuts a *block* from the pool (a batch's worth of positions) and assigns it to a member. From
there on a block is in one of these states:

- *untaken*: assigned, and not yet handed to the worker's training loop;
- *taken*: handed to the loop (`mark_started`), its gradient not yet contributed;
- *contributed*: its gradient is part of an open round (`contribute`);
- *used*: the round is completed (`complete_round`). This is final. An epoch with every position used is
  finished.

A *late* block takes a detour: `assign_late` assigns it to a worker outside the group, and `adopt` passes it
to a member that has received its gradient. An adopted block is contributed like a block of the member's own.

Ways back:

- to the pool: untaken blocks of a worker that leaves the group (`set_members`), all blocks of a worker that
  is revoked or lost, and what a lost worker contributed to a round that is abandoned;
- to *taken*: what a living worker contributed to a round that is abandoned (`abandon_round`), or to a round
  in which it takes no part after all (`withdraw`).

Ways to *used* without a round: the worker gives its blocks up (`discard_blocks`), its loop has ended
(`retire`), or the rest of the epoch is not wanted (`cut_epoch`, and `drop_last` when the epoch is opened).

Order of assignment. A worker's *level* is the number of hands that it has had; a hand is one block for each
member at the lowest level. `assign` repeats three actions: `_update_levels` updates which workers can be
served and which have nothing left of their epoch; `_next_hand` chooses the next workers and the sizes of
their blocks; `_serve` cuts them from the oldest epoch with a pool. A worker that enters late gets the level
of the others, less the blocks that they still hold.

Invariants: each position of an open epoch is in exactly one place (pool, one worker, one open round, used);
block ids are never reused; only members have a level; an operation that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offbeat.errors import ProtocolError
from offbeat.events import Block


class BlockAssignment(NamedTuple):
    """What one worker is assigned.

    Attributes:
        blocks: to be used after those that it has, in this order.
        is_epoch_over: after them nothing is left for it in its epoch (its iterator ends).
    """

    worker: int
    blocks: tuple[Block, ...]
    is_epoch_over: bool


@dataclass(slots=True)
class _Epoch:
    samples: int
    batch_size: int
    opened_by: int
    unused: int  # positions that no completed round has used
    pooled: int  # positions in the pool
    pool: list[tuple[int, int]]  # their ranges, the first last, disjoint and not touching
    is_cut: bool = False  # what comes back is not assigned again
    used_before: tuple[tuple[int, int], ...] = ()  # when it was opened
    drop_last: bool = False  # all blocks hold `batch_size` positions

    def pop_ranges(self, count: int) -> tuple[tuple[int, int], ...]:
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


@dataclass(slots=True)
class _WorkerBlocks:
    epoch: int | None = None  # the last that it began
    hold: bool = False
    over: bool = False  # the end of its epoch was announced to it
    ahead: int = 0  # untaken blocks that it has at most
    level: int | None = None  # hands that it has had; None while it can be assigned nothing
    untaken: dict[int, Block] = field(default_factory=dict)
    taken: dict[int, Block] = field(default_factory=dict)
    adopted: dict[int, Block] = field(default_factory=dict)  # another worker computed their gradients

    def blocks(self) -> list[Block]:
        return [*self.taken.values(), *self.untaken.values(), *self.adopted.values()]

    def pop(self, block_id: int) -> Block:
        if block_id in self.taken:
            return self.taken.pop(block_id)
        return (self.untaken if block_id in self.untaken else self.adopted).pop(block_id)

    def drop(self) -> None:
        self.taken, self.untaken, self.adopted = {}, {}, {}


class BlockScheduler:
    """Assigns blocks so that each position of an epoch is used once, whichever workers are slow, die or join.

    A position is always in one place: in its epoch's pool, with one worker (untaken, then taken), in one open
    round, or used. Only `complete_round` uses; `set_members`, `revoke`, `remove_worker` and `abandon_round`
    give back. Positions that came back are assigned first.

    Members are served in hands: one block for each member that has had the fewest. A member without blocks is
    served first, because other workers may wait for it. Blocks hold `batch_size` positions until two
    hands or less are left; these are cut into equal parts (sizes differ by one at most), so that members that
    take equally many end the epoch in the same round, after as few rounds as possible, and no part is much
    less than half a batch unless the epoch is. With `drop_last` nothing is cut: the last positions, which do
    not fill a block, are dropped when the epoch is opened, and count as used. A joining worker gets as many
    blocks as the other members have. With fewer than two positions per member, or fewer blocks than members,
    some members get none; they go on to the next epoch, and a round may mix the two epochs.

    Source: self-scheduling with chunks of a fixed size. Compared with C. D. Polychronopoulos and D. J. Kuck,
    "Guided self-scheduling: a practical scheduling scheme for parallel supercomputers", IEEE Transactions on
    Computers C-36(12), 1987, which assigns 1/P of what is left to each worker that asks, so that P workers
    that start at different times end together. Deviation: members of a round keep step already, and the batch
    size is given, so blocks do not shrink with what is left; only the last two hands are cut, into equal
    parts. What is assigned at once is bounded by `ahead`, so that little has to be taken back.

    Args:
        ahead: untaken blocks that a member has at most, if it does not ask for more, at least 1. Two, so that
            one can be loaded while another is computed and the next is under way. With fewer than a round
            takes, the first member in a round is served before the others, and members may end an epoch in
            different rounds.
        epochs_open_max: how many epochs may be unfinished at once, at least 1; with 1, no worker begins an
            epoch before the last one is finished.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, ahead: int = 2, epochs_open_max: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"expected at least 1 block ahead, got {ahead}")
        if epochs_open_max < 1:
            raise ValueError(f"expected at least 1 open epoch, got {epochs_open_max}")
        self._ahead = ahead
        self._epochs_open_max = epochs_open_max
        self._first: int | None = None  # the first epoch that a worker began
        self._next = 0  # the epoch to be opened next
        self._epochs: dict[int, _Epoch] = {}  # unfinished ones, ascending
        self._finished_early: dict[int, int] = {}  # epochs finished before an older one: their samples
        self._workers: dict[int, _WorkerBlocks] = {}
        self._members: set[int] = set()
        self._rounds: dict[int, dict[int, tuple[Block, ...]]] = {}  # open: what each worker contributed
        self._last_completed = -1
        self._lent: set[int] = set()  # workers outside the group that have a block
        self._next_id = 0
        self._last_served: int | None = None
        self._lowest = 0  # no level is lower
        # Indexes that save a scan of all workers. Workers to be checked before the next assignment:
        self._all_changed = False  # all, because a pool was emptied or filled or an epoch finished
        self._changed: set[int] = set()
        # Of the workers that have a level, by level: their count, and those that have room for a block.
        self._workers_at_level: dict[int, int] = {}
        self._with_room: dict[int, set[int]] = {}
        self._starving: set[int] = set()  # workers without an untaken block

    # Queries ---------------------------------------------------------------------------------------------

    def __contains__(self, worker: int) -> bool:
        """Whether the worker is or was a member or has begun an epoch, and is not lost."""
        return worker in self._workers

    def is_finished(self, epoch: int) -> bool:
        """Whether every position of the epoch is used."""
        return self._first is not None and self._first <= epoch < self._next and epoch not in self._epochs

    def used_count(self, epoch: int) -> int:
        """Return how many positions of an open epoch completed rounds have used."""
        state = self._epochs[epoch]
        return state.samples - state.unused

    @property
    def next_epoch(self) -> int:
        """The first epoch that no worker has begun."""
        return self._next

    def used_ranges(
        self, round_: int, excluding: Sequence[tuple[Block, int]] = ()
    ) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return the positions that rounds before this one have used, as ascending ranges by epoch.

        The epochs are the oldest one that these rounds have not used up or given up, and all that have begun
        after it. No later round may be completed.

        Args:
            round_: the first that does not count.
            excluding: further blocks that do not count, each with the number of positions in its epoch.
        """
        blocks = [block for worker in self._workers.values() for block in worker.blocks()]
        for other, contributions in self._rounds.items():
            if other >= round_:
                blocks += [block for blocks_of_worker in contributions.values() for block in blocks_of_worker]
        blocks += [block for block, _ in excluding]
        sizes = {block.epoch: samples for block, samples in excluding}
        usual = max(sizes.values(), default=0)  # for a finished epoch of unknown size
        used: dict[int, tuple[tuple[int, int], ...]] = {}
        for number in range(min([next(iter(self._epochs), self._next), *sizes]), self._next):
            epoch = self._epochs.get(number)
            free = [part for block in blocks if block.epoch == number for part in block.ranges]
            if epoch is None:
                samples = self._finished_early.get(number, sizes.get(number, usual))
            else:
                free, samples = [] if epoch.is_cut else [*epoch.pool, *free], epoch.samples
            if free or used:
                used[number] = tuple(_gaps(sorted(free), samples))
        return used

    def contribution(self, worker: int, round_: int) -> tuple[Block, ...]:
        """Return what a worker has contributed to an open round."""
        return self._rounds[round_][worker]

    def open_rounds(self) -> tuple[int, ...]:
        """Return the rounds that have contributions and are neither completed nor abandoned, ascending."""
        return tuple(sorted(self._rounds))

    def open_epochs(self) -> tuple[int, ...]:
        """Return the open epochs, ascending."""
        return tuple(self._epochs)

    def assigned_ids(self, worker: int) -> tuple[int, ...]:
        """Return the ids of the blocks that a worker has and has not contributed, in the order of use."""
        record = self._blocks_of_worker(worker)
        return (*record.taken, *record.untaken)

    def adopted_ids(self, worker: int) -> tuple[int, ...]:
        """Return the ids of the blocks that a worker has adopted, in that order."""
        return tuple(self._blocks_of_worker(worker).adopted)

    def started_count(self, worker: int) -> int:
        """Return how many blocks of a worker are known to be taken; 0 for an unknown worker."""
        return len(self._workers[worker].taken) if worker in self._workers else 0

    def last_half_assigned_epoch(self) -> int:
        """Return the last open epoch of which at least half has been assigned; -1 if there is none."""
        return max(
            (number for number, state in self._epochs.items() if 2 * state.pooled <= state.samples),
            default=-1,
        )

    def is_drained(self) -> bool:
        """Whether the pool of the oldest unfinished epoch is empty."""
        oldest = next(iter(self._epochs.values()), None)
        return oldest is not None and not oldest.pooled

    def holders(self, epoch: int) -> tuple[int, ...]:
        """Return the workers that have blocks of the epoch, contributed ones excluded; O(workers)."""
        return tuple(
            worker
            for worker, record in sorted(self._workers.items())
            if any(block.epoch == epoch for block in record.blocks())
        )

    # Operations ------------------------------------------------------------------------------------------

    def begin_epoch(
        self,
        worker: int,
        epoch: int,
        samples: int,
        batch_size: int,
        holds_until_used: bool = False,
        ahead: int = 0,
        *,
        ends_previous_early: bool = False,
        used_ranges: Sequence[tuple[int, int]] = (),
        drop_last: bool = False,
    ) -> None:
        """Move a worker to an epoch; the first worker in an epoch opens it.

        What the worker has of earlier epochs stays with it. A repeated call changes only `holds_until_used`
        and `ahead`.

        Args:
            worker: the worker's id.
            epoch: the first may be any; then each in order. A late worker may begin a finished one.
            samples: positions in the epoch, at least 1.
            batch_size: positions in a block at most, at least 1; an odd number in blocks of 2 makes one of 3,
                so that none holds a single position.
            holds_until_used: announce the end of the epoch to the worker only when every position is used.
                For the last epoch: otherwise no worker would be left for the blocks of one that dies at the
                very end.
            ahead: untaken blocks that the worker can use at once, if more than the scheduler's `ahead`.
            ends_previous_early: the worker has not waited for the end of the epoch before.
            used_ranges: ranges of positions, ascending, that an earlier job has used; not assigned again.
            drop_last: all blocks hold `batch_size` positions; the last, which do not fill one, are dropped.

        Raises:
            ProtocolError: other values than those with which the epoch was opened, impossible ranges, an
                epoch out of order, or a new one `epochs_open_max` after one that is not finished, unless
                `ends_previous_early`.
        """
        self._check_begin(worker, epoch, samples, batch_size, ends_previous_early, drop_last)
        self._check_used(worker, epoch, samples, tuple(used_ranges))
        if self._first is None:
            self._first = self._next = epoch
        if epoch == self._next:
            self._next += 1
            gaps = _gaps(used_ranges, samples)
            unused = sum(stop - start for start, stop in gaps)
            opened = _Epoch(
                samples, batch_size, worker, unused, unused, gaps[::-1], used_before=tuple(used_ranges)
            )
            if drop_last:
                opened.drop_last = True
                opened.keep_first(unused - unused % batch_size)
            self._epochs[epoch] = opened
            self._finish_if_used(epoch, opened)
        record = self._workers.setdefault(worker, _WorkerBlocks())
        if record.epoch != epoch:
            record.epoch, record.over = epoch, False
        record.hold, record.ahead = holds_until_used, ahead
        self._note_room(worker, record)
        self._changed.add(worker)

    def set_members(self, members: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Set the workers that are assigned blocks.

        A worker that is no longer a member keeps what it has taken, until `revoke`, and what it contributed.

        Returns:
            The ids of the untaken blocks that went back into the pool, by worker.
        """
        members = set(members)
        returned = {}
        for worker in sorted(self._members - members):
            record = self._workers[worker]
            self._leave(worker, record)
            if record.untaken:
                returned[worker] = list(record.untaken.values())
                record.untaken = {}
        for worker in members - self._members:
            self._workers.setdefault(worker, _WorkerBlocks())
        self._changed |= self._members ^ members
        self._members = members
        self._put([block for blocks in returned.values() for block in blocks])
        return {worker: tuple(block.id for block in blocks) for worker, blocks in returned.items()}

    def assign(self) -> list[BlockAssignment]:
        """Assign what can be assigned now; blocks and ends of epochs are returned once, ascending by worker.

        A worker's epoch is over when nothing of it or of an earlier one is left in a pool. For a worker with
        `holds_until_used`, for one that is no member, and where the next epoch would be too far from the
        oldest unfinished one, it is over only when all of these are finished. The worker is served again when
        it begins another epoch.
        """
        dealt: dict[int, list[Block]] = {}
        over: set[int] = set()
        while True:
            self._update_levels(over)
            workers, sizes = self._next_hand()
            if not workers:
                break
            self._serve(workers, sizes, dealt)
        for worker in over:
            dealt.setdefault(worker, [])
        return [BlockAssignment(worker, tuple(dealt[worker]), worker in over) for worker in sorted(dealt)]

    def assign_late(self, worker: int) -> Block | None:
        """Assign one block to a worker that is no member and has none.

        None if only the last two hands are left of its epoch and earlier ones: members finish these sooner.

        Raises:
            ProtocolError: a member, or one that has a block.
        """
        record = self._blocks_of_worker(worker)
        if worker in self._members:
            raise ProtocolError(f"expected to lend to a worker outside the group, got member {worker}")
        if record.untaken or record.taken:
            raise ProtocolError(
                f"expected worker {worker} to have no block, it has {len(record.untaken | record.taken)}"
            )
        number = self._source()
        if number is None or record.epoch is None or record.over or number > record.epoch:
            return None
        epoch = self._epochs[number]
        if epoch.pooled - epoch.batch_size < 2 * len(self._members) * epoch.batch_size:
            return None
        block = self._cut(number, epoch, epoch.batch_size)
        record.untaken[block.id] = block
        self._lent.add(worker)
        return block

    def adopt(self, worker: int, block_id: int, late_worker: int) -> bool:
        """Pass a late block to the member that has received its gradient; return whether the gradient counts.

        If so, the member contributes the block like its own. It does not count if the late worker does not
        have the block any more, or if the member's loop has nothing left to do.

        Raises:
            ProtocolError: one of the two workers is unknown.
        """
        member, outsider = self._blocks_of_worker(worker), self._blocks_of_worker(late_worker)
        if block_id not in outsider.untaken or member.epoch is None or (member.over and member.hold):
            return False
        member.adopted[block_id] = outsider.untaken.pop(block_id)
        self._clear_lent(late_worker)
        return True

    def mark_started(self, worker: int, block_id: int) -> bool:
        """Mark a worker's blocks as taken up to this one; return whether the worker (still) has it.

        Blocks are taken in the order in which they were assigned. A block may be contributed without this.

        Raises:
            ProtocolError: a block that was not assigned yet.
        """
        record = self._blocks_of_worker(worker)
        if block_id in record.taken:
            return True
        if block_id not in record.untaken:
            self._check_dealt(worker, [block_id])
            return False
        for earlier in list(record.untaken):
            record.taken[earlier] = record.untaken.pop(earlier)
            if earlier == block_id:
                break
        self._note_room(worker, record)
        return True

    def mark_all_started(self, worker: int) -> None:
        """Mark all blocks of a worker as taken.

        Raises:
            ProtocolError: an unknown worker.
        """
        for block_id in list(self._blocks_of_worker(worker).untaken):
            self.mark_started(worker, block_id)

    def contribute(self, worker: int, round_: int, block_ids: Sequence[int]) -> bool:
        """Add the gradient of a worker's blocks to a round; return whether it counts.

        It does not if the worker does not have one of the blocks any more; then nothing changes, and the
        worker has to compute again what it still has. A contribution without blocks is valid.

        Raises:
            ProtocolError: a completed round, a second contribution to the round, a block twice or one that
                was not assigned yet.
        """
        record = self._blocks_of_worker(worker)
        if round_ <= self._last_completed:
            raise ProtocolError(
                f"expected a round after {self._last_completed}, which is completed, "
                f"got a contribution of worker {worker} to round {round_}"
            )
        if worker in self._rounds.get(round_, ()):
            raise ProtocolError(f"worker {worker} has contributed to round {round_} already")
        if len(block_ids) > 1 and len(set(block_ids)) < len(block_ids):
            raise ProtocolError(f"expected each block once, got {list(block_ids)} of worker {worker}")
        for block_id in block_ids:
            if (
                block_id not in record.taken
                and block_id not in record.untaken
                and block_id not in record.adopted
            ):
                self._check_dealt(worker, block_ids)
                return False
        blocks = [record.pop(block_id) for block_id in block_ids]
        self._rounds.setdefault(round_, {})[worker] = tuple(blocks)
        self._note_room(worker, record)
        return True

    def withdraw(self, worker: int, round_: int) -> None:
        """Remove a worker's contribution from a round; the worker has the blocks again, as taken."""
        for block in self._rounds.get(round_, {}).pop(worker, ()):
            self._blocks_of_worker(worker).taken[block.id] = block

    def complete_round(self, round_: int) -> None:
        """Count the contributions to a round as used: its mean is applied.

        Raises:
            ProtocolError: the round is completed already, or an earlier one is still open.
        """
        self._check_round(round_)
        if self._rounds and min(self._rounds) < round_:
            raise ProtocolError(
                f"round {min(self._rounds)} is neither completed nor abandoned, got round {round_}"
            )
        self._last_completed = round_
        for blocks in self._rounds.pop(round_, {}).values():
            self._use(blocks)

    def discard_blocks(self, worker: int) -> None:
        """Count the blocks that a worker has as used, because it will not compute with them.

        Raises:
            ProtocolError: an unknown worker.
        """
        record = self._blocks_of_worker(worker)
        self._use(record.blocks())
        record.drop()
        self._clear_lent(worker)
        self._note_room(worker, record)

    def retire(self, worker: int) -> None:
        """Assign nothing more to a worker whose loop has ended, and count what it has as used.

        Raises:
            ProtocolError: an unknown worker.
        """
        self.discard_blocks(worker)
        self._blocks_of_worker(worker).epoch = None
        self._changed.add(worker)

    def cut_epoch(self, epoch: int) -> None:
        """Count the rest of an epoch as used: what is in its pool, and what comes back later."""
        state = self._epochs.get(epoch)
        if state is None:
            return
        state.is_cut = True
        self._discard(epoch, state)

    def abandon_round(self, round_: int) -> dict[int, tuple[int, ...]]:
        """Undo the contributions to a round that was not finished.

        Its number may be used for the repetition or skipped. What lost workers contributed goes back to the
        pool.

        Returns:
            The ids that each living contributor has again, as taken: it can contribute them as they are.

        Raises:
            ProtocolError: the round is completed.
        """
        self._check_round(round_)
        returned = {}
        orphaned: list[Block] = []
        for worker, blocks in sorted(self._rounds.pop(round_, {}).items()):
            record = self._workers.get(worker)
            if record is None:
                orphaned += blocks
                continue
            record.taken |= {block.id: block for block in blocks}
            returned[worker] = tuple(block.id for block in blocks)
        self._put(orphaned)
        return returned

    def revoke(self, worker: int) -> tuple[int, ...]:
        """Return all blocks of a worker to the pool, taken ones too; contributed later, they do not count.

        What it contributed to an open round stays there. A member is assigned new blocks.

        Returns:
            The ids of these blocks.

        Raises:
            ProtocolError: an unknown worker.
        """
        record = self._blocks_of_worker(worker)
        blocks = record.blocks()
        record.drop()
        self._clear_lent(worker)
        self._leave(worker, record)  # it enters again, with as many blocks as the other members
        self._changed.add(worker)
        self._put(blocks)
        return tuple(block.id for block in blocks)

    def remove_worker(self, worker: int) -> None:
        """Remove a worker permanently: its blocks return to the pool; its contributions stay in their rounds.

        Raises:
            ProtocolError: an unknown worker.
        """
        self.revoke(worker)
        del self._workers[worker]
        self._members.discard(worker)
        self._changed.discard(worker)

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "first": self._first,
            "next": self._next,
            "finished_early": [list(record) for record in self._finished_early.items()],
            "epochs": [
                {
                    "epoch": number,
                    "samples": record.samples,
                    "batch_size": record.batch_size,
                    "opened_by": record.opened_by,
                    "unused": record.unused,
                    "pool": list(map(list, record.pool)),
                    "is_cut": record.is_cut,
                    "used_before": list(map(list, record.used_before)),
                    "drop_last": record.drop_last,
                }
                for number, record in self._epochs.items()
            ],
            "workers": [
                {
                    "worker": worker,
                    "epoch": record.epoch,
                    "hold": record.hold,
                    "over": record.over,
                    "ahead": record.ahead,
                    "level": record.level,
                    "untaken": blocks_to_plain(record.untaken.values()),
                    "taken": blocks_to_plain(record.taken.values()),
                    "adopted": blocks_to_plain(record.adopted.values()),
                }
                for worker, record in sorted(self._workers.items())
            ],
            "members": sorted(self._members),
            "rounds": [
                [
                    round_,
                    [[worker, blocks_to_plain(blocks)] for worker, blocks in sorted(contributions.items())],
                ]
                for round_, contributions in sorted(self._rounds.items())
            ],
            "last_completed": self._last_completed,
            "lent": sorted(self._lent),
            "next_id": self._next_id,
            "last_served": self._last_served,
            "lowest": self._lowest,
            "all_changed": self._all_changed,
            "changed": sorted(self._changed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a scheduler with the same arguments."""
        self._first, self._next = state["first"], state["next"]
        self._finished_early = dict(state["finished_early"])
        self._epochs = {}
        for record in state["epochs"]:
            ranges = [(start, stop) for start, stop in record["pool"]]
            pooled = sum(stop - start for start, stop in ranges)
            self._epochs[record["epoch"]] = _Epoch(
                record["samples"],
                record["batch_size"],
                record["opened_by"],
                record["unused"],
                pooled,
                ranges,
                record["is_cut"],
                tuple((start, stop) for start, stop in record["used_before"]),
                record["drop_last"],
            )
        self._rounds = {
            round_: {worker: tuple(blocks_from_plain(blocks).values()) for worker, blocks in contributions}
            for round_, contributions in state["rounds"]
        }
        self._members, self._lent = set(state["members"]), set(state["lent"])
        self._last_completed, self._next_id = state["last_completed"], state["next_id"]
        self._last_served = state["last_served"]
        self._all_changed, self._changed = state["all_changed"], set(state["changed"])
        self._workers, self._workers_at_level, self._with_room, self._starving = {}, {}, {}, set()
        for record in state["workers"]:
            worker = _WorkerBlocks(record["epoch"], record["hold"], record["over"], record["ahead"])
            worker.untaken, worker.taken = (
                blocks_from_plain(record["untaken"]),
                blocks_from_plain(record["taken"]),
            )
            worker.adopted = blocks_from_plain(record["adopted"])
            self._workers[record["worker"]] = worker
            if record["level"] is not None:
                self._enter(record["worker"], worker, record["level"])
        self._lowest = state["lowest"]

    # Workers that can be assigned blocks -----------------------------------------------------------------

    def _update_levels(self, over: set[int]) -> None:
        """Update which workers can be assigned blocks; add to `over` the workers whose epoch is over."""
        if not self._all_changed and not self._changed:
            return
        changed = sorted(self._workers if self._all_changed else self._changed)
        source = self._source()
        self._all_changed = False
        self._changed = set()
        entering = []
        for worker in changed:
            record = self._workers[worker]
            if record.epoch is None or record.over:
                able = False
            elif source is None or source > record.epoch:
                able = False
                record.over = self._is_epoch_over(worker, record, record.epoch)
                if record.over:
                    over.add(worker)
            else:
                able = worker in self._members
            if able and record.level is None:
                entering.append(worker)
            elif not able:
                self._leave(worker, record)
        if entering:
            base = self._entry_level()
            for worker in entering:
                record = self._workers[worker]
                self._enter(worker, record, base + len(record.untaken) + len(record.taken))

    def _source(self) -> int | None:
        """Return the epoch from which blocks are cut: the oldest with a pool."""
        for number, epoch in self._epochs.items():
            if epoch.pooled:
                return number
        return None

    def _is_epoch_over(self, worker: int, record: _WorkerBlocks, epoch: int) -> bool:
        """Whether the end of the epoch may be announced to a worker for which nothing is left."""
        oldest = next(iter(self._epochs), self._next)
        if oldest > epoch:
            return True
        return worker in self._members and not record.hold and epoch + 1 < oldest + self._epochs_open_max

    def _entry_level(self) -> int:
        """Return the level at which a worker without blocks gets as many as the other workers have."""
        if not self._workers_at_level:
            return self._lowest
        reference = self._workers.get(self._last_served) if self._last_served is not None else None
        if reference is None or reference.level is None:
            first = min(worker for worker, record in self._workers.items() if record.level is not None)
            reference = self._workers[first]
        assert reference.level is not None
        return reference.level - len(reference.untaken) - len(reference.taken)

    def _enter(self, worker: int, record: _WorkerBlocks, level: int) -> None:
        self._lowest = min(self._lowest, level) if self._workers_at_level else level
        record.level = level
        if level not in self._workers_at_level:
            self._workers_at_level[level], self._with_room[level] = 0, set()
        self._workers_at_level[level] += 1
        self._note_room(worker, record)

    def _leave(self, worker: int, record: _WorkerBlocks) -> None:
        level = record.level
        if level is None:
            return
        record.level = None
        self._starving.discard(worker)
        if self._workers_at_level[level] == 1:
            del self._workers_at_level[level], self._with_room[level]
        else:
            self._workers_at_level[level] -= 1
            self._with_room[level].discard(worker)

    def _note_room(self, worker: int, record: _WorkerBlocks) -> None:
        if record.level is None:
            return
        if len(record.untaken) < max(self._ahead, record.ahead):
            self._with_room[record.level].add(worker)
        if not record.untaken:
            self._starving.add(worker)

    # Assignment ------------------------------------------------------------------------------------------

    def _next_hand(self) -> tuple[list[int], list[int]]:
        """Return the workers to serve next, and the sizes of their blocks.

        The workers are those at the lowest level, else those without an untaken block. A size is a batch, or
        an equal part of what is left if that suffices for this hand and the next at most, but not a single
        position: layers that normalise over a batch need more than one sample.
        """
        number = self._source()
        if number is None or not self._workers_at_level:
            return [], []
        epoch = self._epochs[number]
        while self._lowest not in self._workers_at_level:
            self._lowest += 1
        # Members that cannot be served now (they have not begun yet) will need as many as the others had.
        absent = len(self._members) - sum(self._workers_at_level.values())
        hands_missed = self._lowest - min(self._lowest, self._entry_level()) if absent else 0
        lowest = self._workers_at_level[self._lowest]
        this_hand = lowest + absent * (hands_missed + 1)
        next_hand = this_hand + lowest + self._workers_at_level.get(self._lowest + 1, 0) + absent
        turn, extra = self._with_room[self._lowest], 0
        if not turn or epoch.pooled <= absent * hands_missed * epoch.batch_size:
            turn, extra = self._starving, len(self._starving)
        workers = sorted(turn)
        if epoch.drop_last:
            return workers, [epoch.batch_size] * min(epoch.pooled // epoch.batch_size, len(workers))
        for parts in (extra + this_hand, extra + next_hand):
            if epoch.pooled <= parts * epoch.batch_size:
                parts = min(parts, max(1, epoch.pooled // min(2, epoch.batch_size)))
                least, larger = divmod(epoch.pooled, parts)
                return workers, [least + (part < larger) for part in range(min(parts, len(workers)))]
        return workers, [epoch.batch_size] * len(workers)

    def _serve(self, workers: list[int], sizes: list[int], dealt: dict[int, list[Block]]) -> None:
        """Assign one block to each of the first workers, as many as there are sizes."""
        number = self._source()
        assert number is not None
        epoch = self._epochs[number]
        by_level: dict[int, list[int]] = {}
        for worker, size in zip(workers, sizes, strict=False):
            record = self._workers[worker]
            assert record.level is not None
            block = self._cut(number, epoch, size)
            record.untaken[block.id] = block
            if worker in dealt:
                dealt[worker].append(block)
            else:
                dealt[worker] = [block]
            if record.level in by_level:
                by_level[record.level].append(worker)
            else:
                by_level[record.level] = [worker]
            self._last_served = worker
        for level, served in by_level.items():
            self._raise_level(level, served)

    def _raise_level(self, level: int, served: list[int]) -> None:
        """Raise the level of these workers by one hand; they have an untaken block now."""
        above = self._with_room.setdefault(level + 1, set())
        for worker in served:
            record = self._workers[worker]
            record.level = level + 1
            if len(record.untaken) < max(self._ahead, record.ahead):
                above.add(worker)
        self._workers_at_level[level + 1] = self._workers_at_level.get(level + 1, 0) + len(served)
        self._starving.difference_update(served)
        if self._workers_at_level[level] == len(served):
            del self._workers_at_level[level], self._with_room[level]
        else:
            self._workers_at_level[level] -= len(served)
            self._with_room[level].difference_update(served)

    def _cut(self, number: int, epoch: _Epoch, size: int) -> Block:
        block = Block(self._next_id, number, epoch.pop_ranges(size))
        self._next_id += 1
        if not epoch.pooled:
            self._all_changed = True
        return block

    def _put(self, blocks: list[Block]) -> None:
        """Return blocks to the pool."""
        for number in {block.epoch for block in blocks}:
            epoch = self._epochs[number]
            if not epoch.pooled:
                self._all_changed = True
            epoch.add_ranges(part for block in blocks if block.epoch == number for part in block.ranges)
            if epoch.is_cut:
                self._discard(number, epoch)

    def _use(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            epoch = self._epochs[block.epoch]
            epoch.unused -= block.samples
            self._finish_if_used(block.epoch, epoch)

    def _discard(self, number: int, epoch: _Epoch) -> None:
        epoch.unused -= epoch.pooled
        epoch.pooled, epoch.pool = 0, []
        self._all_changed = True
        self._finish_if_used(number, epoch)

    def _finish_if_used(self, number: int, epoch: _Epoch) -> None:
        if not epoch.unused:
            del self._epochs[number]
            oldest = next(iter(self._epochs), self._next)
            self._finished_early[number] = epoch.samples
            self._finished_early = {
                finished: samples for finished, samples in self._finished_early.items() if finished > oldest
            }
            self._all_changed = True

    # Checks ----------------------------------------------------------------------------------------------

    def _check_begin(
        self, worker: int, epoch: int, samples: int, batch_size: int, early: bool, drop_last: bool
    ) -> None:
        batches = describe_batches(batch_size, drop_last)
        description = f"worker {worker} begins epoch {epoch} with {samples} samples in batches of {batches}"
        if samples < 1 or batch_size < 1:
            raise ProtocolError(f"expected at least 1 sample in batches of at least 1, {description}")
        record = self._workers.get(worker)
        if record is not None and record.epoch is not None and epoch < record.epoch:
            raise ProtocolError(f"expected an epoch from {record.epoch}, its current one, {description}")
        if epoch < 0 or (self._first is not None and not self._first <= epoch <= self._next):
            first, last = (0, "any") if self._first is None else (self._first, str(self._next))
            raise ProtocolError(f"expected an epoch from {first} to {last}, {description}")
        opened = self._epochs.get(epoch)
        if opened is not None and (samples, batch_size, drop_last) != (
            opened.samples,
            opened.batch_size,
            opened.drop_last,
        ):
            batches = describe_batches(opened.batch_size, opened.drop_last)
            raise ProtocolError(
                f"worker {opened.opened_by} began it with {opened.samples} samples in batches of {batches}, "
                f"but {description}: give every worker the same data set, batch size and drop_last"
            )
        oldest = next(iter(self._epochs), epoch)
        if epoch >= max(oldest + self._epochs_open_max, self._next) and not early:
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

    def _check_dealt(self, worker: int, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if not 0 <= block_id < self._next_id:
                raise ProtocolError(
                    f"expected a block that has been assigned, from 0 to {self._next_id - 1}, "
                    f"got block {block_id} of worker {worker}"
                )

    def _check_round(self, round_: int) -> None:
        if round_ <= self._last_completed:
            raise ProtocolError(
                f"expected a round after {self._last_completed}, which is completed, got round {round_}"
            )

    def _clear_lent(self, worker: int) -> None:
        if worker in self._lent:
            self._lent.discard(worker)
            self._all_changed = True  # another worker may have waited for the block

    def _blocks_of_worker(self, worker: int) -> _WorkerBlocks:
        record = self._workers.get(worker)
        if record is None:
            raise ProtocolError(f"worker {worker} has begun no epoch, or is gone")
        return record


def describe_batches(batch_size: int, drop_last: bool) -> str:
    """Describe the batches of an epoch, for a message."""
    return f"{batch_size}, the rest dropped" if drop_last else str(batch_size)


def _gaps(ranges: Iterable[tuple[int, int]], samples: int) -> list[tuple[int, int]]:
    """Return the gaps that ascending ranges leave in positions 0 to `samples` - 1."""
    found, last = [], 0
    for start, stop in (*ranges, (samples, samples)):
        if last < start:
            found.append((last, start))
        last = stop
    return found


def blocks_to_plain(blocks: Iterable[Block]) -> list[list[Any]]:
    """Return blocks as plain data."""
    return [[block.id, block.epoch, [list(part) for part in block.ranges]] for block in blocks]


def blocks_from_plain(plain: list[list[Any]]) -> dict[int, Block]:
    """Return the blocks, by id, from the plain data of `blocks_to_plain`."""
    return {
        number: Block(number, epoch, tuple((start, stop) for start, stop in ranges))
        for number, epoch, ranges in plain
    }
