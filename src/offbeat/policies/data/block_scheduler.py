"""Deals the samples of every epoch to whoever can use them: each exactly once.

Nothing here knows which sample stands at a position: the order of an epoch is a permutation that workers
draw themselves from (seed, epoch). Nothing is told to anybody either; whoever owns a scheduler sends what it
deals and tells it what it hears.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offbeat.errors import ProtocolError
from offbeat.events import Block


class Dealt(NamedTuple):
    """What one worker is to be told.

    Attributes:
        blocks: to be used after those that it has, in this order.
        over: after them there is nothing for it in its epoch any more (its iterator ends).
    """

    worker: int
    blocks: tuple[Block, ...]
    over: bool


@dataclass(slots=True)
class _Epoch:
    samples: int
    batch_size: int
    opened_by: int
    unused: int  # positions that no completed round has used
    pooled: int  # positions that nobody has
    pool: list[tuple[int, int]]  # their ranges, the first last, disjoint and not touching
    is_cut: bool = False  # what comes back is not dealt again
    used_before: tuple[tuple[int, int], ...] = ()  # when it was opened
    drop_last: bool = False  # all blocks hold `batch_size` positions

    def take(self, count: int) -> tuple[tuple[int, int], ...]:
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

    def keep(self, count: int) -> None:
        """Keep the first of what nobody has used; for an epoch of which nothing has been dealt."""
        self.pool = list(self.take(count)[::-1]) if count else []
        self.unused = self.pooled = count

    def put(self, ranges: Iterable[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.pool, *ranges]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self.pool = merged[::-1]
        self.pooled = sum(stop - start for start, stop in merged)


@dataclass(slots=True)
class _Worker:
    epoch: int | None = None  # the last that it began
    hold: bool = False
    over: bool = False  # it was told that its epoch has nothing left for it
    ahead: int = 0  # untaken blocks that it has at most
    level: int | None = None  # how many hands it has had; None while nothing can be dealt to it
    untaken: dict[int, Block] = field(default_factory=dict)
    taken: dict[int, Block] = field(default_factory=dict)
    adopted: dict[int, Block] = field(default_factory=dict)  # another has computed their gradients for it

    def blocks(self) -> list[Block]:
        return [*self.taken.values(), *self.untaken.values(), *self.adopted.values()]

    def pop(self, block_id: int) -> Block:
        if block_id in self.taken:
            return self.taken.pop(block_id)
        return (self.untaken if block_id in self.untaken else self.adopted).pop(block_id)

    def drop(self) -> None:
        self.taken, self.untaken, self.adopted = {}, {}, {}


class WorkScheduler:
    """Deals blocks so that each position of an epoch is used exactly once, whatever is slow, dies or joins.

    A position is always in one place: in its epoch's pool, with one worker (untaken, then taken), in one
    open round, or used. Only `completed` uses; `set_members`, `revoke`, `lost` and `abandoned` give back.
    Positions that came back are dealt first.

    Members are dealt to in hands, one block to each of those that have had the fewest; who has none left is
    served out of turn, because others may wait for it. Blocks hold `batch_size` positions until two hands or
    less are left; these are cut into equal parts (sizes differ by one at most), so that members who take
    equally many end the epoch in the same round, after as few rounds as there can be, and no part is much
    less than half a batch unless the epoch is. With `drop_last` nothing is cut: the last positions, which do
    not fill a block, are left out when the epoch is opened, and count as used. Who joins gets as many as the
    others have. With fewer than two positions a member, or fewer blocks than members, some get none; those go
    on to the next epoch, and a round may mix the two.

    Source: self-scheduling with chunks of a fixed size. Compared with C. D. Polychronopoulos and D. J. Kuck,
    "Guided self-scheduling: a practical scheduling scheme for parallel supercomputers", IEEE Transactions on
    Computers C-36(12), 1987, which deals 1/P of what is left to each that asks, so that P workers who come at
    different times end together. Deviation: members of a round keep step already, and a batch has the size
    that it has, so blocks do not shrink with what is left; only the last two hands are cut, into equal parts.
    What is dealt at once is bounded by `ahead`, so that little has to be taken back.

    Args:
        ahead: untaken blocks that a member has at most, if it does not ask for more, at least 1. Two, so that
            one is there to be loaded while another is computed and the next is under way. With fewer than a
            round takes, who is first in a round is served out of turn, and members may end an epoch in
            different rounds.
        epochs_open_max: how many epochs may be unfinished at once, at least 1; with 1, nobody begins an
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
        self._first: int | None = None  # the first epoch that anybody began
        self._next = 0  # the epoch to be opened next
        self._epochs: dict[int, _Epoch] = {}  # unfinished ones, ascending
        self._finished_early: dict[int, int] = {}  # samples of those that finished before an older one
        self._workers: dict[int, _Worker] = {}
        self._members: set[int] = set()
        self._rounds: dict[int, dict[int, tuple[Block, ...]]] = {}  # open: what each worker contributed
        self._last_completed = -1
        self._lent: set[int] = set()  # who is no member and has a block
        self._next_id = 0
        self._last_served: int | None = None
        self._lowest = 0  # no level is lower
        # What follows only saves looking through all workers. To be looked at before the next deal:
        self._stale = False  # everybody, because a pool was emptied or filled or an epoch finished
        self._changed: set[int] = set()
        # Of the workers that have a level, by level: how many, and who has room for a block.
        self._count: dict[int, int] = {}
        self._ready: dict[int, set[int]] = {}
        self._starving: set[int] = set()  # who has no untaken block

    # Asking ----------------------------------------------------------------------------------------------

    def __contains__(self, worker: int) -> bool:
        """Whether the worker is or was a member or has begun an epoch, and is not lost."""
        return worker in self._workers

    def finished(self, epoch: int) -> bool:
        """Whether every position of the epoch is used."""
        return self._first is not None and self._first <= epoch < self._next and epoch not in self._epochs

    def used(self, epoch: int) -> int:
        """Return how many positions of an open epoch completed rounds have used."""
        one = self._epochs[epoch]
        return one.samples - one.unused

    @property
    def next_epoch(self) -> int:
        """The first that nobody has begun."""
        return self._next

    def used_before(
        self, round_: int, besides: Sequence[tuple[Block, int]] = ()
    ) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return the ranges of positions that rounds before this one have used, of the first epoch that they
        have not used up or given up, and of all that have begun after it, ascending. No later round may be
        completed.

        Args:
            round_: the first that does not count.
            besides: blocks that do not count either, and how many positions their epochs have.
        """
        blocks = [block for worker in self._workers.values() for block in worker.blocks()]
        for other, contributions in self._rounds.items():
            if other >= round_:
                blocks += [block for some in contributions.values() for block in some]
        blocks += [block for block, _ in besides]
        sizes = {block.epoch: samples for block, samples in besides}
        usual = max(sizes.values(), default=0)  # of an epoch that is finished, of which nothing else is known
        used: dict[int, tuple[tuple[int, int], ...]] = {}
        for number in range(min([next(iter(self._epochs), self._next), *sizes]), self._next):
            epoch = self._epochs.get(number)
            free = [part for block in blocks if block.epoch == number for part in block.ranges]
            if epoch is None:
                samples = self._finished_early.get(number, sizes.get(number, usual))
            else:
                free, samples = [] if epoch.is_cut else [*epoch.pool, *free], epoch.samples
            if free or used:
                used[number] = tuple(_between(sorted(free), samples))
        return used

    def contribution(self, worker: int, round_: int) -> tuple[Block, ...]:
        """Return what a worker has contributed to an open round."""
        return self._rounds[round_][worker]

    def open_rounds(self) -> tuple[int, ...]:
        """Return the rounds that have contributions and are neither completed nor abandoned, ascending."""
        return tuple(sorted(self._rounds))

    def unfinished(self) -> tuple[int, ...]:
        """Return the open epochs, ascending."""
        return tuple(self._epochs)

    def held(self, worker: int) -> tuple[int, ...]:
        """Return the ids of the blocks that a worker has and has not contributed, in the order of use."""
        one = self._known(worker)
        return (*one.taken, *one.untaken)

    def adopted(self, worker: int) -> tuple[int, ...]:
        """Return the ids of the blocks that others have computed for a worker, in the order of adoption."""
        return tuple(self._known(worker).adopted)

    def taken_count(self, worker: int) -> int:
        """Return how many of these are known to be taken; 0 where nothing is known of the worker."""
        return len(self._workers[worker].taken) if worker in self._workers else 0

    def half_dealt(self) -> int:
        """The last open epoch of which at least half has been dealt; -1 where there is none."""
        return max(
            (number for number, one in self._epochs.items() if 2 * one.pooled <= one.samples), default=-1
        )

    def is_drained(self) -> bool:
        """Whether nobody can be dealt anything of the oldest unfinished epoch."""
        oldest = next(iter(self._epochs.values()), None)
        return oldest is not None and not oldest.pooled

    def holders(self, epoch: int) -> tuple[int, ...]:
        """Who has blocks of the epoch, those contributed to open rounds left out; takes time O(workers)."""
        return tuple(
            worker
            for worker, one in sorted(self._workers.items())
            if any(block.epoch == epoch for block in one.blocks())
        )

    # Telling ---------------------------------------------------------------------------------------------

    def begin(
        self,
        worker: int,
        epoch: int,
        samples: int,
        batch_size: int,
        hold: bool = False,
        ahead: int = 0,
        *,
        early: bool = False,
        used: Sequence[tuple[int, int]] = (),
        drop_last: bool = False,
    ) -> None:
        """Say that a worker is in an epoch from now on; the first to be in it opens it.

        What the worker has of earlier epochs stays with it. The same again changes only `hold` and `ahead`.

        Args:
            epoch: the first may be any; then each in turn. Who comes late may begin a finished one.
            samples: positions in the epoch, at least 1.
            batch_size: positions in a block at most, at least 1; an odd number in blocks of 2 makes one of 3,
                so that none holds a single position.
            hold: tell the worker that its epoch is over only when every position is used. For the last
                epoch: else the blocks of who dies at the very end would find nobody.
            ahead: untaken blocks that the worker can use at once, if they are more than all others'.
            early: it has not waited to be told that the epoch before is over.
            used: ranges of positions, ascending, that an earlier job has used; not dealt again.
            drop_last: all blocks hold `batch_size` positions; the last, which do not fill one, are left out.

        Raises:
            ProtocolError: other values than who opened the epoch has, ranges that cannot be, an epoch out of
                turn, or one that nobody has begun `epochs_open_max` after one that is not finished, unless
                `early`.
        """
        self._check_begin(worker, epoch, samples, batch_size, early, drop_last)
        self._check_used(worker, epoch, samples, tuple(used))
        if self._first is None:
            self._first = self._next = epoch
        if epoch == self._next:
            self._next += 1
            left = _between(used, samples)
            unused = sum(stop - start for start, stop in left)
            opened = _Epoch(samples, batch_size, worker, unused, unused, left[::-1], used_before=tuple(used))
            if drop_last:
                opened.drop_last = True
                opened.keep(unused - unused % batch_size)
            self._epochs[epoch] = opened
            self._see_whether_finished(epoch, opened)
        one = self._workers.setdefault(worker, _Worker())
        if one.epoch != epoch:
            one.epoch, one.over = epoch, False
        one.hold, one.ahead = hold, ahead
        self._made_room(worker, one)
        self._changed.add(worker)

    def set_members(self, members: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Say who is dealt to from now on.

        Who is no member any more keeps what it has taken, until `revoke`, and what it contributed.

        Returns:
            The ids of the untaken blocks that went back into the pool, by worker.
        """
        members = set(members)
        back = {}
        for worker in sorted(self._members - members):
            one = self._workers[worker]
            self._leave(worker, one)
            if one.untaken:
                back[worker] = list(one.untaken.values())
                one.untaken = {}
        for worker in members - self._members:
            self._workers.setdefault(worker, _Worker())
        self._changed |= self._members ^ members
        self._members = members
        self._put([block for blocks in back.values() for block in blocks])
        return {worker: tuple(block.id for block in blocks) for worker, blocks in back.items()}

    def deal(self) -> list[Dealt]:
        """Deal what can be dealt now; each block and each `over` is told once, ascending by worker.

        A worker is over in its epoch when nothing of it or of an earlier one is left to be dealt; while it is
        held, while it is no member, and where the next epoch would be too far from the oldest unfinished one,
        only when all of them are finished. It is dealt to again when it begins another epoch.
        """
        dealt: dict[int, list[Block]] = {}
        over: set[int] = set()
        while True:
            self._look(over)
            workers, sizes = self._turn()
            if not workers:
                break
            self._serve(workers, sizes, dealt)
        for worker in over:
            dealt.setdefault(worker, [])
        return [Dealt(worker, tuple(dealt[worker]), worker in over) for worker in sorted(dealt)]

    def lend(self, worker: int) -> Block | None:
        """Deal one block to a worker that is no member and has none.

        None where there is nothing in its epoch or an earlier one but the last two hands: members finish
        these sooner.

        Raises:
            ProtocolError: a member, or one that has a block.
        """
        one = self._known(worker)
        if worker in self._members:
            raise ProtocolError(f"expected to lend to a worker outside the group, got member {worker}")
        if one.untaken or one.taken:
            raise ProtocolError(
                f"expected worker {worker} to have no block, it has {len(one.untaken | one.taken)}"
            )
        number = self._source()
        if number is None or one.epoch is None or one.over or number > one.epoch:
            return None
        epoch = self._epochs[number]
        if epoch.pooled - epoch.batch_size < 2 * len(self._members) * epoch.batch_size:
            return None
        block = self._cut(number, epoch, epoch.batch_size)
        one.untaken[block.id] = block
        self._lent.add(worker)
        return block

    def adopt(self, worker: int, block_id: int, late: int) -> bool:
        """Say that a member has the gradient that another was lent a block for; whether that counts.

        Then the block is the member's, who contributes it as it does its own. It does not count when the
        block is not that other's any more, or the member's loop has nothing before it.

        Raises:
            ProtocolError: nothing is known of one of them.
        """
        one, other = self._known(worker), self._known(late)
        if block_id not in other.untaken or one.epoch is None or (one.over and one.hold):
            return False
        one.adopted[block_id] = other.untaken.pop(block_id)
        self._returned(late)
        return True

    def taken(self, worker: int, block_id: int) -> bool:
        """Say that a worker has taken its blocks up to this one; whether it (still) is its own.

        Blocks are taken in the order in which they were dealt. A contributed block need not be told here.

        Raises:
            ProtocolError: a block that was not dealt yet.
        """
        one = self._known(worker)
        if block_id in one.taken:
            return True
        if block_id not in one.untaken:
            self._check_dealt(worker, [block_id])
            return False
        for earlier in list(one.untaken):
            one.taken[earlier] = one.untaken.pop(earlier)
            if earlier == block_id:
                break
        self._made_room(worker, one)
        return True

    def taken_all(self, worker: int) -> None:
        """Say that a worker has taken all its blocks.

        Raises:
            ProtocolError: nothing is known of the worker.
        """
        for block_id in list(self._known(worker).untaken):
            self.taken(worker, block_id)

    def contributed(self, worker: int, round_: int, block_ids: Sequence[int]) -> bool:
        """Say that a worker contributes the gradient of these blocks to a round; whether it counts.

        It does not when any of the blocks is not the worker's any more; then nothing changes, and what it
        still has it has to compute anew. No blocks at all are a contribution too.

        Raises:
            ProtocolError: a completed round, a second contribution to the round, a block twice or one that
                was not dealt yet.
        """
        one = self._known(worker)
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
            if block_id not in one.taken and block_id not in one.untaken and block_id not in one.adopted:
                self._check_dealt(worker, block_ids)
                return False
        blocks = [one.pop(block_id) for block_id in block_ids]
        self._rounds.setdefault(round_, {})[worker] = tuple(blocks)
        self._made_room(worker, one)
        return True

    def withdrawn(self, worker: int, round_: int) -> None:
        """Say that a worker takes no part in a round to which it has contributed: it has the blocks again."""
        for block in self._rounds.get(round_, {}).pop(worker, ()):
            self._known(worker).taken[block.id] = block

    def completed(self, round_: int) -> None:
        """Say that the mean of a round is applied: what was contributed to it is used.

        Raises:
            ProtocolError: it is completed already, or an earlier round is still open.
        """
        self._check_round(round_)
        if self._rounds and min(self._rounds) < round_:
            raise ProtocolError(
                f"round {min(self._rounds)} is neither completed nor abandoned, got round {round_}"
            )
        self._last_completed = round_
        for blocks in self._rounds.pop(round_, {}).values():
            self._use(blocks)

    def forgone(self, worker: int) -> None:
        """Say that a worker computes nothing with the blocks that it has: they count as used.

        Raises:
            ProtocolError: nothing is known of the worker.
        """
        one = self._known(worker)
        self._use(one.blocks())
        one.drop()
        self._returned(worker)
        self._made_room(worker, one)

    def retired(self, worker: int) -> None:
        """Say that a worker's loop is over: it is dealt nothing, and what it has counts as used.

        Raises:
            ProtocolError: nothing is known of the worker.
        """
        self.forgone(worker)
        self._known(worker).epoch = None
        self._changed.add(worker)

    def cut(self, epoch: int) -> None:
        """Say that nobody wants the rest of an epoch: what is in its pool, or comes back, counts as used."""
        one = self._epochs.get(epoch)
        if one is None:
            return
        one.is_cut = True
        self._discard(epoch, one)

    def abandoned(self, round_: int) -> dict[int, tuple[int, ...]]:
        """Say that a round did not come to its end: nothing that was contributed to it is used.

        Its number may be used for the repetition or left out. What lost workers contributed goes back.

        Returns:
            The ids that each living contributor has again, as taken: it can contribute them as they are.

        Raises:
            ProtocolError: it is completed.
        """
        self._check_round(round_)
        again = {}
        gone: list[Block] = []
        for worker, blocks in sorted(self._rounds.pop(round_, {}).items()):
            one = self._workers.get(worker)
            if one is None:
                gone += blocks
                continue
            one.taken |= {block.id: block for block in blocks}
            again[worker] = tuple(block.id for block in blocks)
        self._put(gone)
        return again

    def revoke(self, worker: int) -> tuple[int, ...]:
        """Take back all blocks of a worker, taken ones too; contributed later, they do not count.

        What it contributed to an open round stays there. A member is dealt to anew.

        Returns:
            The ids of what was taken back.

        Raises:
            ProtocolError: nothing is known of the worker.
        """
        one = self._known(worker)
        blocks = one.blocks()
        one.drop()
        self._returned(worker)
        self._leave(worker, one)  # and enter anew, with as many as the others
        self._changed.add(worker)
        self._put(blocks)
        return tuple(block.id for block in blocks)

    def lost(self, worker: int) -> None:
        """Say that a worker is gone for good: its blocks go back; what it contributed stays in its round.

        Raises:
            ProtocolError: nothing is known of the worker.
        """
        self.revoke(worker)
        del self._workers[worker]
        self._members.discard(worker)
        self._changed.discard(worker)

    # Remembering -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "first": self._first,
            "next": self._next,
            "finished_early": [list(one) for one in self._finished_early.items()],
            "epochs": [
                {
                    "epoch": number,
                    "samples": one.samples,
                    "batch_size": one.batch_size,
                    "opened_by": one.opened_by,
                    "unused": one.unused,
                    "pool": list(map(list, one.pool)),
                    "is_cut": one.is_cut,
                    "used_before": list(map(list, one.used_before)),
                    "drop_last": one.drop_last,
                }
                for number, one in self._epochs.items()
            ],
            "workers": [
                {
                    "worker": worker,
                    "epoch": one.epoch,
                    "hold": one.hold,
                    "over": one.over,
                    "ahead": one.ahead,
                    "level": one.level,
                    "untaken": plain_of(one.untaken.values()),
                    "taken": plain_of(one.taken.values()),
                    "adopted": plain_of(one.adopted.values()),
                }
                for worker, one in sorted(self._workers.items())
            ],
            "members": sorted(self._members),
            "rounds": [
                [round_, [[worker, plain_of(blocks)] for worker, blocks in sorted(contributions.items())]]
                for round_, contributions in sorted(self._rounds.items())
            ],
            "last_completed": self._last_completed,
            "lent": sorted(self._lent),
            "next_id": self._next_id,
            "last_served": self._last_served,
            "lowest": self._lowest,
            "stale": self._stale,
            "changed": sorted(self._changed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a scheduler with the same arguments."""
        self._first, self._next = state["first"], state["next"]
        self._finished_early = dict(state["finished_early"])
        self._epochs = {}
        for one in state["epochs"]:
            ranges = [(start, stop) for start, stop in one["pool"]]
            pooled = sum(stop - start for start, stop in ranges)
            self._epochs[one["epoch"]] = _Epoch(
                one["samples"],
                one["batch_size"],
                one["opened_by"],
                one["unused"],
                pooled,
                ranges,
                one["is_cut"],
                tuple((start, stop) for start, stop in one["used_before"]),
                one["drop_last"],
            )
        self._rounds = {
            round_: {worker: tuple(blocks_of(blocks).values()) for worker, blocks in contributions}
            for round_, contributions in state["rounds"]
        }
        self._members, self._lent = set(state["members"]), set(state["lent"])
        self._last_completed, self._next_id = state["last_completed"], state["next_id"]
        self._last_served = state["last_served"]
        self._stale, self._changed = state["stale"], set(state["changed"])
        self._workers, self._count, self._ready, self._starving = {}, {}, {}, set()
        for one in state["workers"]:
            worker = _Worker(one["epoch"], one["hold"], one["over"], one["ahead"])
            worker.untaken, worker.taken = blocks_of(one["untaken"]), blocks_of(one["taken"])
            worker.adopted = blocks_of(one["adopted"])
            self._workers[one["worker"]] = worker
            if one["level"] is not None:
                self._enter(one["worker"], worker, one["level"])
        self._lowest = state["lowest"]

    # Who can be dealt to ---------------------------------------------------------------------------------

    def _look(self, over: set[int]) -> None:
        """See who can be dealt to after what has changed, and add to `over` whose epoch is over."""
        if not self._stale and not self._changed:
            return
        changed = sorted(self._workers if self._stale else self._changed)
        source = self._source()
        self._stale = False
        self._changed = set()
        entering = []
        for worker in changed:
            one = self._workers[worker]
            if one.epoch is None or one.over:
                able = False
            elif source is None or source > one.epoch:
                able = False
                one.over = self._ends(worker, one, one.epoch)
                if one.over:
                    over.add(worker)
            else:
                able = worker in self._members
            if able and one.level is None:
                entering.append(worker)
            elif not able:
                self._leave(worker, one)
        if entering:
            base = self._rounds_of_the_others()
            for worker in entering:
                one = self._workers[worker]
                self._enter(worker, one, base + len(one.untaken) + len(one.taken))

    def _source(self) -> int | None:
        """The epoch of which is dealt, the oldest that has anything in its pool."""
        for number, epoch in self._epochs.items():
            if epoch.pooled:
                return number
        return None

    def _ends(self, worker: int, one: _Worker, epoch: int) -> bool:
        """Whether a worker for which nothing is left may be told so."""
        oldest = next(iter(self._epochs), self._next)
        if oldest > epoch:
            return True
        return worker in self._members and not one.hold and epoch + 1 < oldest + self._epochs_open_max

    def _rounds_of_the_others(self) -> int:
        """The level of one that has no block: who enters there gets as many as the others have."""
        if not self._count:
            return self._lowest
        reference = self._workers.get(self._last_served) if self._last_served is not None else None
        if reference is None or reference.level is None:
            first = min(worker for worker, one in self._workers.items() if one.level is not None)
            reference = self._workers[first]
        assert reference.level is not None
        return reference.level - len(reference.untaken) - len(reference.taken)

    def _enter(self, worker: int, one: _Worker, level: int) -> None:
        self._lowest = min(self._lowest, level) if self._count else level
        one.level = level
        if level not in self._count:
            self._count[level], self._ready[level] = 0, set()
        self._count[level] += 1
        self._made_room(worker, one)

    def _leave(self, worker: int, one: _Worker) -> None:
        level = one.level
        if level is None:
            return
        one.level = None
        self._starving.discard(worker)
        if self._count[level] == 1:
            del self._count[level], self._ready[level]
        else:
            self._count[level] -= 1
            self._ready[level].discard(worker)

    def _made_room(self, worker: int, one: _Worker) -> None:
        if one.level is None:
            return
        if len(one.untaken) < max(self._ahead, one.ahead):
            self._ready[one.level].add(worker)
        if not one.untaken:
            self._starving.add(worker)

    # Dealing ---------------------------------------------------------------------------------------------

    def _turn(self) -> tuple[list[int], list[int]]:
        """Who is to be dealt a block each, of which size: those with the fewest so far, else the starving.

        A size is a batch, or an equal part of what is left if that is for this hand and the next at most, but
        not a single position: layers that normalise over a batch need more than one sample.
        """
        number = self._source()
        if number is None or not self._count:
            return [], []
        epoch = self._epochs[number]
        while self._lowest not in self._count:
            self._lowest += 1
        # Members that cannot be dealt to now (they have not begun yet) will want as many as the others had.
        absent = len(self._members) - sum(self._count.values())
        hands_missed = self._lowest - min(self._lowest, self._rounds_of_the_others()) if absent else 0
        lowest = self._count[self._lowest]
        this_hand = lowest + absent * (hands_missed + 1)
        next_hand = this_hand + lowest + self._count.get(self._lowest + 1, 0) + absent
        turn, extra = self._ready[self._lowest], 0
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
        """Deal one block to each of the first workers, as many as there are sizes."""
        number = self._source()
        assert number is not None
        epoch = self._epochs[number]
        by_level: dict[int, list[int]] = {}
        for worker, size in zip(workers, sizes, strict=False):
            one = self._workers[worker]
            assert one.level is not None
            block = self._cut(number, epoch, size)
            one.untaken[block.id] = block
            if worker in dealt:
                dealt[worker].append(block)
            else:
                dealt[worker] = [block]
            if one.level in by_level:
                by_level[one.level].append(worker)
            else:
                by_level[one.level] = [worker]
            self._last_served = worker
        for level, served in by_level.items():
            self._climb(level, served)

    def _climb(self, level: int, served: list[int]) -> None:
        """Each of these has had one hand more, and is not starving."""
        above = self._ready.setdefault(level + 1, set())
        for worker in served:
            one = self._workers[worker]
            one.level = level + 1
            if len(one.untaken) < max(self._ahead, one.ahead):
                above.add(worker)
        self._count[level + 1] = self._count.get(level + 1, 0) + len(served)
        self._starving.difference_update(served)
        if self._count[level] == len(served):
            del self._count[level], self._ready[level]
        else:
            self._count[level] -= len(served)
            self._ready[level].difference_update(served)

    def _cut(self, number: int, epoch: _Epoch, size: int) -> Block:
        block = Block(self._next_id, number, epoch.take(size))
        self._next_id += 1
        if not epoch.pooled:
            self._stale = True
        return block

    def _put(self, blocks: list[Block]) -> None:
        """Back into the pool."""
        for number in {block.epoch for block in blocks}:
            epoch = self._epochs[number]
            if not epoch.pooled:
                self._stale = True
            epoch.put(part for block in blocks if block.epoch == number for part in block.ranges)
            if epoch.is_cut:
                self._discard(number, epoch)

    def _use(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            epoch = self._epochs[block.epoch]
            epoch.unused -= block.samples
            self._see_whether_finished(block.epoch, epoch)

    def _discard(self, number: int, epoch: _Epoch) -> None:
        epoch.unused -= epoch.pooled
        epoch.pooled, epoch.pool = 0, []
        self._stale = True
        self._see_whether_finished(number, epoch)

    def _see_whether_finished(self, number: int, epoch: _Epoch) -> None:
        if not epoch.unused:
            del self._epochs[number]
            oldest = next(iter(self._epochs), self._next)
            self._finished_early[number] = epoch.samples
            self._finished_early = {one: n for one, n in self._finished_early.items() if one > oldest}
            self._stale = True

    # Refusing --------------------------------------------------------------------------------------------

    def _check_begin(
        self, worker: int, epoch: int, samples: int, batch_size: int, early: bool, drop_last: bool
    ) -> None:
        size = batches_in_words(batch_size, drop_last)
        said = f"worker {worker} begins epoch {epoch} with {samples} samples in batches of {size}"
        if samples < 1 or batch_size < 1:
            raise ProtocolError(f"expected at least 1 sample in batches of at least 1, {said}")
        one = self._workers.get(worker)
        if one is not None and one.epoch is not None and epoch < one.epoch:
            raise ProtocolError(f"expected an epoch after {one.epoch}, where it is, {said}")
        if epoch < 0 or (self._first is not None and not self._first <= epoch <= self._next):
            first, last = (0, "any") if self._first is None else (self._first, str(self._next))
            raise ProtocolError(f"expected an epoch from {first} to {last}, {said}")
        opened = self._epochs.get(epoch)
        if opened is not None and (samples, batch_size, drop_last) != (
            opened.samples,
            opened.batch_size,
            opened.drop_last,
        ):
            size = batches_in_words(opened.batch_size, opened.drop_last)
            raise ProtocolError(
                f"worker {opened.opened_by} began it with {opened.samples} samples in batches of {size}, "
                f"{said}: give every worker the same data set, batch size and drop_last"
            )
        oldest = next(iter(self._epochs), epoch)
        if epoch >= max(oldest + self._epochs_open_max, self._next) and not early:
            raise ProtocolError(
                f"expected epoch {oldest} to be finished first, {said}: use each epoch to its end"
            )

    def _check_used(self, worker: int, epoch: int, samples: int, used: tuple[tuple[int, int], ...]) -> None:
        opened = self._epochs.get(epoch)
        if opened is not None and used and used != opened.used_before:
            raise ProtocolError(
                f"worker {opened.opened_by} and worker {worker} go on from different states of epoch "
                f"{epoch}: load the same one on every worker"
            )
        bounds = [0, *(bound for part in used for bound in part), samples]
        if bounds != sorted(bounds) or any(start == stop for start, stop in used):
            raise ProtocolError(
                f"expected ranges of {samples} positions, ascending, that are used, got {used} "
                f"of worker {worker}"
            )

    def _check_dealt(self, worker: int, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if not 0 <= block_id < self._next_id:
                raise ProtocolError(
                    f"expected a block that has been dealt, from 0 to {self._next_id - 1}, "
                    f"got block {block_id} of worker {worker}"
                )

    def _check_round(self, round_: int) -> None:
        if round_ <= self._last_completed:
            raise ProtocolError(
                f"expected a round after {self._last_completed}, which is completed, got round {round_}"
            )

    def _returned(self, worker: int) -> None:
        if worker in self._lent:
            self._lent.discard(worker)
            self._stale = True  # somebody may have waited for it in vain

    def _known(self, worker: int) -> _Worker:
        one = self._workers.get(worker)
        if one is None:
            raise ProtocolError(f"worker {worker} has begun no epoch, or is gone")
        return one


def batches_in_words(batch_size: int, drop_last: bool) -> str:
    """Say which batches an epoch is cut into."""
    return f"{batch_size}, the rest dropped" if drop_last else str(batch_size)


def _between(ranges: Iterable[tuple[int, int]], samples: int) -> list[tuple[int, int]]:
    """What ascending ranges leave of positions 0 to `samples` - 1."""
    found, last = [], 0
    for start, stop in (*ranges, (samples, samples)):
        if last < start:
            found.append((last, start))
        last = stop
    return found


def plain_of(blocks: Iterable[Block]) -> list[list[Any]]:
    """Return blocks as plain data."""
    return [[block.id, block.epoch, [list(part) for part in block.ranges]] for block in blocks]


def blocks_of(plain: list[list[Any]]) -> dict[int, Block]:
    """Return the blocks, by id, that `plain_of` made this of."""
    return {
        number: Block(number, epoch, tuple((start, stop) for start, stop in ranges))
        for number, epoch, ranges in plain
    }
