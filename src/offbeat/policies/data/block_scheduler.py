"""Assigns the samples of every epoch to the workers that can use them: each exactly once.

This module knows positions only: the order of an epoch is a permutation that the workers draw from
(seed, epoch). It sends nothing either; the policy that owns a scheduler sends what it assigns, and reports
to it what the workers do.

**Theory of operation: the life of a block.** `begin_epoch` opens an epoch: its positions form the epoch's
*pool*. `assign` cuts a *block* from the pool (a batch's worth of positions) and assigns it to a member. From
there on a block is in one of these states:

- *queued*: assigned, and not yet handed to the worker's training loop;
- *started*: handed to the loop (`mark_started`), its gradient not yet contributed;
- *contributed*: its gradient is part of an open round (`contribute`);
- *used*: the round is completed (`complete_round`). This is final. An epoch with every position used is
  finished.

A *late* block takes a detour: `assign_late` assigns it to a worker outside the group, and `adopt` passes it
to a member that has received its gradient. An adopted block is contributed like a block of the member's own.

Ways back:

- to the pool: queued blocks of a worker that leaves the group (`set_members`), all blocks of a worker that
  is revoked or lost or whose loop has ended (`retire`: no model contains them, so a checkpoint that is saved
  afterwards must not count them), and what a lost worker contributed to a round that is abandoned;
- to *started*: what a living worker contributed to a round that is abandoned (`abandon_round`), or to a round
  in which it takes no part after all (`withdraw`).

Ways to *used* without a round: the worker's step is in none (`use`), the worker gives its blocks up
(`discard_blocks`), or the rest of the epoch is not wanted (`cut_epoch`, and `drop_last` when the epoch is
opened).

Parts. `OpenEpochs` has the pools and what is used, `OpenRounds` what is contributed, and `ServingOrder`
chooses the next workers and the sizes of their blocks; the scheduler knows which worker has which block.
`assign` repeats two actions: `_update_levels` updates which workers can be served and which have nothing left
of their epoch; `_serve_next` cuts blocks for the next ones from the oldest epoch with a pool.

Invariants: each position of an open epoch is in exactly one place (pool, one worker, one open round, used);
block ids are never reused; only members are in the order; an operation that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offbeat.errors import ProtocolError
from offbeat.events import Block
from offbeat.policies.data.open_epochs import OpenEpochs, blocks_from_plain, blocks_to_plain
from offbeat.policies.data.open_rounds import OpenRounds
from offbeat.policies.data.serving_order import ServingOrder


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
class _WorkerBlocks:
    epoch: int | None = None  # the last that it began
    hold: bool = False
    over: bool = False  # the end of its epoch was announced to it
    ahead: int = 0  # queued blocks that it has at most
    queued: dict[int, Block] = field(default_factory=dict)
    started: dict[int, Block] = field(default_factory=dict)
    adopted: dict[int, Block] = field(default_factory=dict)  # another worker computed their gradients

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.started or block_id in self.queued or block_id in self.adopted

    def blocks(self) -> list[Block]:
        return [*self.started.values(), *self.queued.values(), *self.adopted.values()]

    def pop(self, block_id: int) -> Block:
        if block_id in self.started:
            return self.started.pop(block_id)
        return (self.queued if block_id in self.queued else self.adopted).pop(block_id)

    def start_until(self, block_id: int) -> None:
        """Mark the queued blocks up to this one as started."""
        for earlier in list(self.queued):
            self.started[earlier] = self.queued.pop(earlier)
            if earlier == block_id:
                break

    def drop(self) -> None:
        self.started, self.queued, self.adopted = {}, {}, {}

    def to_plain(self, worker: int) -> dict[str, Any]:
        return {
            "worker": worker,
            "epoch": self.epoch,
            "hold": self.hold,
            "over": self.over,
            "ahead": self.ahead,
            "queued": blocks_to_plain(self.queued.values()),
            "started": blocks_to_plain(self.started.values()),
            "adopted": blocks_to_plain(self.adopted.values()),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> _WorkerBlocks:
        blocks = (blocks_from_plain(plain[kind]) for kind in ("queued", "started", "adopted"))
        return cls(plain["epoch"], plain["hold"], plain["over"], plain["ahead"], *blocks)


class BlockScheduler:
    """Assigns blocks so that each position of an epoch is used once, whichever workers are slow, die or join.

    A position is always in one place: in its epoch's pool, with one worker (queued, then started), in an open
    round, or used. Only `complete_round` and `use` use; `set_members`, `revoke`, `remove_worker` and
    `abandon_round` give back. Positions that came back are assigned first. An operation on an unknown worker
    raises a ProtocolError.

    Blocks are assigned in servings (`offbeat.policies.data.serving_order`). They hold `batch_size` positions
    until two servings or less are left, which are cut into equal parts. With `drop_last` nothing is cut: the
    last positions, which do not fill a block, are dropped when the epoch is opened, and count as used. A
    joining worker gets as many blocks as the other members have, with `equal_counts`. With fewer than two
    positions per member, or fewer blocks than members, some members get none; they go on to the next epoch,
    and a round may mix the two epochs.

    Size: each way of a block in the theory of operation is an operation of its own, on the same tables.

    Args:
        ahead: queued blocks that a member has at most, if it does not ask for more, at least 1. Two, so that
            one can be loaded while another is computed and the next is under way. With fewer than a round
            takes, the first member in a round is served before the others, and members may end an epoch in
            different rounds.
        epochs_open_max: how many epochs may be unfinished at once, at least 1; with 1, no worker begins an
            epoch before the last one is finished.
        equal_counts: members use equally many blocks, as in rounds; else each is served when it has room.

    Attributes:
        epochs: the open epochs, for queries.
        rounds: the open rounds, for queries.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, ahead: int = 2, epochs_open_max: int = 2, *, equal_counts: bool = True) -> None:
        if ahead < 1:
            raise ValueError(f"expected at least 1 block ahead, got {ahead}")
        if epochs_open_max < 1:
            raise ValueError(f"expected at least 1 open epoch, got {epochs_open_max}")
        self._ahead = ahead
        self.epochs = OpenEpochs(epochs_open_max)
        self.rounds = OpenRounds()
        self._order = ServingOrder(equal_counts=equal_counts)  # of the members that can be assigned blocks
        self._workers: dict[int, _WorkerBlocks] = {}
        self._members: set[int] = set()
        self._late_workers: set[int] = set()  # workers outside the group that have a block
        self._changed: set[int] = set()  # workers to be checked before the next assignment

    # Queries ---------------------------------------------------------------------------------------------

    def __contains__(self, worker: int) -> bool:
        """Whether the worker is or was a member or has begun an epoch, and is not lost."""
        return worker in self._workers

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
        blocks += self.rounds.blocks_from(round_)
        blocks += [block for block, _ in excluding]
        return self.epochs.used_ranges(blocks, {block.epoch: samples for block, samples in excluding})

    def assigned_ids(self, worker: int) -> tuple[int, ...]:
        """Return the ids of the blocks that a worker has and has not contributed, in the order of use."""
        record = self._blocks_of_worker(worker)
        return (*record.started, *record.queued)

    def adopted_ids(self, worker: int) -> tuple[int, ...]:
        """Return the ids of the blocks that a worker has adopted, in that order."""
        return tuple(self._blocks_of_worker(worker).adopted)

    def started_count(self, worker: int) -> int:
        """Return how many blocks of a worker are known to be started; 0 for an unknown worker."""
        return len(self._workers[worker].started) if worker in self._workers else 0

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
            ahead: queued blocks that the worker can use at once, if more than the scheduler's `ahead`.
            ends_previous_early: the worker has not waited for the end of the epoch before.
            used_ranges: ranges of positions, ascending, that an earlier job has used; not assigned again.
            drop_last: all blocks hold `batch_size` positions; the last, which do not fill one, are dropped.

        Raises:
            ProtocolError: other values than those with which the epoch was opened, impossible ranges, an
                epoch out of order, or a new one `epochs_open_max` after one that is not finished, unless
                `ends_previous_early`.
        """
        self.epochs.begin(
            worker,
            epoch,
            samples,
            batch_size,
            current=self._workers[worker].epoch if worker in self._workers else None,
            ends_previous_early=ends_previous_early,
            used_ranges=tuple(used_ranges),
            drop_last=drop_last,
        )
        record = self._workers.setdefault(worker, _WorkerBlocks())
        if record.epoch != epoch:
            record.epoch, record.over = epoch, False
        record.hold, record.ahead = holds_until_used, ahead
        self._note_room(worker, record)
        self._changed.add(worker)

    def set_members(self, members: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Set the workers that are assigned blocks.

        A worker that is no longer a member keeps the blocks that it started, until `revoke`, and contributed.

        Returns:
            The ids of the queued blocks that went back into the pool, by worker.
        """
        members = set(members)
        returned = {}
        for worker in sorted(self._members - members):
            record = self._workers[worker]
            self._order.leave(worker)
            if record.queued:
                returned[worker] = list(record.queued.values())
                record.queued = {}
        for worker in members - self._members:
            self._workers.setdefault(worker, _WorkerBlocks())
        self._changed |= self._members ^ members
        self._members = members
        self.epochs.put([block for blocks in returned.values() for block in blocks])
        return {worker: tuple(block.id for block in blocks) for worker, blocks in returned.items()}

    def assign(self) -> list[BlockAssignment]:
        """Assign what can be assigned now; blocks and ends of epochs are returned once, ascending by worker.

        A worker's epoch is over when nothing of it or of an earlier one is left in a pool. For a worker with
        `holds_until_used`, for one that is no member, and where the next epoch would be too far from the
        oldest unfinished one, it is over only when all of these are finished. The worker is served again when
        it begins another epoch.
        """
        blocks: dict[int, list[Block]] = {}
        over: set[int] = set()
        self._update_levels(over)
        while self._serve_next(blocks):
            self._update_levels(over)
        for worker in over:
            blocks.setdefault(worker, [])
        return [BlockAssignment(worker, tuple(blocks[worker]), worker in over) for worker in sorted(blocks)]

    def assign_late(self, worker: int) -> Block | None:
        """Assign one block to a worker that is no member and has none.

        None if only two servings are left of its epoch and earlier ones: members finish these sooner.

        Raises:
            ProtocolError: a member, or one that has a block.
        """
        record = self._blocks_of_worker(worker)
        if worker in self._members:
            raise ProtocolError(f"expected a worker outside the group for a late block, got member {worker}")
        if record.queued or record.started:
            raise ProtocolError(
                f"expected worker {worker} to have no block, it has {self._held_count(worker)}"
            )
        number = self.epochs.source
        if number is None or record.epoch is None or record.over or number > record.epoch:
            return None
        epoch = self.epochs[number]
        if epoch.pooled - epoch.batch_size < 2 * len(self._members) * epoch.batch_size:
            return None
        block = self.epochs.cut_block(number, epoch.batch_size)
        record.queued[block.id] = block
        self._late_workers.add(worker)
        return block

    def adopt(self, worker: int, block_id: int, late_worker: int) -> bool:
        """Pass a late block to the member that has received its gradient; return whether the gradient counts.

        If so, the member contributes the block like its own. It does not count if the late worker does not
        have the block any more, or if the member's loop has nothing left to do.
        """
        member, outsider = self._blocks_of_worker(worker), self._blocks_of_worker(late_worker)
        if block_id not in outsider.queued or member.epoch is None or (member.over and member.hold):
            return False
        member.adopted[block_id] = outsider.queued.pop(block_id)
        self._clear_late_worker(late_worker)
        return True

    def mark_started(self, worker: int, block_id: int) -> bool:
        """Mark a worker's blocks as started up to this one; return whether the worker (still) has it.

        Blocks are started in the order in which they were assigned. A block may be contributed without this.

        Raises:
            ProtocolError: a block that was not assigned yet.
        """
        record = self._blocks_of_worker(worker)
        if block_id in record.started:
            return True
        if block_id not in record.queued:
            self.epochs.check_assigned(worker, [block_id])
            return False
        record.start_until(block_id)
        self._note_room(worker, record)
        return True

    def mark_all_started(self, worker: int) -> None:
        """Mark all blocks of a worker as started."""
        for block_id in list(self._blocks_of_worker(worker).queued):
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
        self.rounds.check_contribution(worker, round_)
        blocks = self._pop_blocks(worker, record, block_ids)
        if blocks is None:
            return False
        self.rounds.add(worker, round_, blocks)
        return True

    def use(self, worker: int, block_ids: Sequence[int]) -> tuple[Block, ...] | None:
        """Count blocks of a worker as used, where its step is in no round; return them.

        None if the worker does not have one of the blocks any more; then nothing changes.

        Raises:
            ProtocolError: a block twice or one that was not assigned yet.
        """
        blocks = self._pop_blocks(worker, self._blocks_of_worker(worker), block_ids)
        if blocks is not None:
            self.epochs.use(blocks)
        return blocks

    def _pop_blocks(
        self, worker: int, record: _WorkerBlocks, block_ids: Sequence[int]
    ) -> tuple[Block, ...] | None:
        """Remove blocks from a worker; None, and no change, if it does not have one of them any more."""
        if len(block_ids) > 1 and len(set(block_ids)) < len(block_ids):
            raise ProtocolError(f"expected each block once, got {list(block_ids)} of worker {worker}")
        for block_id in block_ids:
            if block_id not in record:
                self.epochs.check_assigned(worker, block_ids)
                return None
        blocks = tuple([record.pop(block_id) for block_id in block_ids])
        self._note_room(worker, record)
        return blocks

    def withdraw(self, worker: int, round_: int) -> None:
        """Remove a worker's contribution from a round; the worker has the blocks again, as started."""
        for block in self.rounds.withdraw(worker, round_):
            self._blocks_of_worker(worker).started[block.id] = block

    def complete_round(self, round_: int) -> None:
        """Count the contributions to a round as used: its mean is applied.

        Raises:
            ProtocolError: the round is completed already, or an earlier one is still open.
        """
        self.epochs.use(self.rounds.complete(round_))

    def discard_blocks(self, worker: int) -> None:
        """Count the blocks that a worker has as used, because it will not compute with them."""
        record = self._blocks_of_worker(worker)
        self.epochs.use(record.blocks())
        record.drop()
        self._clear_late_worker(worker)
        self._note_room(worker, record)

    def retire(self, worker: int) -> None:
        """Return all blocks of a worker whose loop has ended to the pool, and assign nothing more to it."""
        self.revoke(worker)
        self._blocks_of_worker(worker).epoch = None

    def cut_epoch(self, epoch: int) -> None:
        """Count the rest of an epoch as used: what is in its pool, and what comes back later."""
        self.epochs.cut_off(epoch)

    def abandon_round(self, round_: int) -> dict[int, tuple[int, ...]]:
        """Undo the contributions to a round that was not finished.

        Its number may be used for the repetition or skipped. What lost workers contributed goes back to the
        pool.

        Returns:
            The ids that each living contributor has again, as started: it can contribute them as they are.

        Raises:
            ProtocolError: the round is completed.
        """
        returned = {}
        orphaned: list[Block] = []
        for worker, blocks in self.rounds.abandon(round_):
            record = self._workers.get(worker)
            if record is None:
                orphaned += blocks
                continue
            record.started |= {block.id: block for block in blocks}
            returned[worker] = tuple(block.id for block in blocks)
        self.epochs.put(orphaned)
        return returned

    def revoke(self, worker: int) -> tuple[int, ...]:
        """Return all blocks of a worker to the pool, started ones too; contributed later, they do not count.

        What it contributed to an open round stays there. A member is assigned new blocks.

        Returns:
            The ids of these blocks.
        """
        record = self._blocks_of_worker(worker)
        blocks = record.blocks()
        record.drop()
        self._clear_late_worker(worker)
        self._order.leave(worker)  # it enters again, with as many blocks as the other members
        self._changed.add(worker)
        self.epochs.put(blocks)
        return tuple(block.id for block in blocks)

    def remove_worker(self, worker: int) -> None:
        """Remove a worker permanently: its blocks return to the pool, its contributions stay."""
        self.revoke(worker)
        del self._workers[worker]
        self._members.discard(worker)
        self._changed.discard(worker)

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "epochs": self.epochs.state_dict(),
            "rounds": self.rounds.state_dict(),
            "order": self._order.state_dict(),
            "workers": [record.to_plain(worker) for worker, record in sorted(self._workers.items())],
            "members": sorted(self._members),
            "late_workers": sorted(self._late_workers),
            "changed": sorted(self._changed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a scheduler with the same arguments."""
        self.epochs.load_state_dict(state["epochs"])
        self.rounds.load_state_dict(state["rounds"])
        self._order.load_state_dict(state["order"])
        self._workers = {plain["worker"]: _WorkerBlocks.from_plain(plain) for plain in state["workers"]}
        self._members, self._late_workers = set(state["members"]), set(state["late_workers"])
        self._changed = set(state["changed"])
        for worker, record in self._workers.items():
            self._note_room(worker, record)

    # Workers that can be assigned blocks -----------------------------------------------------------------

    def _update_levels(self, over: set[int]) -> None:
        """Update which workers can be assigned blocks; add to `over` the workers whose epoch is over."""
        if not self.epochs.has_changed and not self._changed:
            return
        changed = sorted(self._workers if self.epochs.has_changed else self._changed)
        source = self.epochs.source
        self.epochs.has_changed = False
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
            if able and worker not in self._order:
                entering.append(worker)
            elif not able:
                self._order.leave(worker)
        if entering:
            base = self._order.entry_level(self._held_count)
            for worker in entering:
                self._order.enter(worker, base + self._held_count(worker))
                self._note_room(worker, self._workers[worker])

    def _is_epoch_over(self, worker: int, record: _WorkerBlocks, epoch: int) -> bool:
        """Whether the end of the epoch may be announced to a worker for which nothing is left."""
        if self.epochs.oldest > epoch:
            return True
        return worker in self._members and not record.hold and self.epochs.may_follow(epoch)

    def _serve_next(self, assigned: dict[int, list[Block]]) -> bool:
        """Assign the next serving, a block for each worker in it; return whether there was one to serve."""
        number, count = self.epochs.source, len(self._order)
        if number is None or not count or self._order.is_served:
            return False
        absent = len(self._members) - count  # they have not begun yet
        workers, sizes = self._order.next_serving(self.epochs[number], absent, self._held_count)
        if not workers:
            return False
        has_room: dict[int, bool] = {}
        for worker, size in zip(workers, sizes, strict=False):
            record = self._workers[worker]
            block = self.epochs.cut_block(number, size)
            record.queued[block.id] = block
            if worker in assigned:
                assigned[worker].append(block)
            else:
                assigned[worker] = [block]
            has_room[worker] = len(record.queued) < max(self._ahead, record.ahead)
        self._order.on_served(has_room)
        return True

    def _held_count(self, worker: int) -> int:
        record = self._workers[worker]
        return len(record.queued) + len(record.started)

    def _note_room(self, worker: int, record: _WorkerBlocks) -> None:
        self._order.note_room(worker, len(record.queued), max(self._ahead, record.ahead))

    def _clear_late_worker(self, worker: int) -> None:
        if worker in self._late_workers:
            self._late_workers.discard(worker)
            self._changed.update(self._workers)  # another one may have waited for the block

    def _blocks_of_worker(self, worker: int) -> _WorkerBlocks:
        record = self._workers.get(worker)
        if record is None:
            raise ProtocolError(f"worker {worker} has begun no epoch, or is gone")
        return record
