"""The order in which workers are assigned blocks, and how large the blocks at the end of an epoch are.

A part of `offbeat.policies.data.block_scheduler`, which cuts the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from offbeat.policies.data.open_epochs import Epoch


class ServingOrder:
    """Chooses the next workers to serve, so that members that use equally many blocks end an epoch together.

    A *serving* is one block for each worker that has had the fewest; a worker's *level* is the number of
    servings that it has had. A worker that enters late gets the level of the others, less the blocks that
    they hold. A worker without blocks is served first, because other workers may wait for it. Blocks hold a
    batch until two servings or less are left; these are cut into equal parts (sizes differ by one at most),
    so that the epoch ends after as few rounds as possible, and no part is much less than half a batch unless
    the epoch is. With `drop_last` nothing is cut.

    Workers that do not use equally many blocks (`equal_counts` false) have one level: each is served whenever
    it has room. When two servings or less are left, it is served only when it has no queued block, so that
    the last blocks are not queued behind a slow worker's. These are equal parts, as few as suffice.

    Source: self-scheduling with chunks of a fixed size. Compared with C. D. Polychronopoulos and D. J. Kuck,
    "Guided self-scheduling: a practical scheduling scheme for parallel supercomputers", IEEE Transactions on
    Computers C-36(12), 1987, which assigns 1/P of what is left to each worker that asks, so that P workers
    that start at different times end together. Deviation: members of a round keep step already, and the batch
    size is given, so blocks do not shrink with what is left; only the last two servings are cut, into equal
    parts. What is assigned at once is bounded by the owner, so that little has to be taken back.

    Args:
        equal_counts: the workers use equally many blocks, because they take part in the same rounds.
    """

    def __init__(self, *, equal_counts: bool) -> None:
        self._equal_counts = equal_counts
        self._levels: dict[int, int] = {}  # of the workers that can be assigned blocks
        self._lowest = 0  # no level is lower
        self._last_served: int | None = None
        # Indexes that save a scan of all workers: by level, their count, and those with room for a block.
        self._count_at: dict[int, int] = {}
        self._with_room: dict[int, set[int]] = {}
        self._starving: set[int] = set()  # workers without a queued block

    def __contains__(self, worker: int) -> bool:
        return worker in self._levels

    def __len__(self) -> int:
        return len(self._levels)

    def entry_level(self, held_count: Callable[[int], int]) -> int:
        """Return the level at which a worker without blocks gets as many as the other workers have.

        That is the level of the worker served last, or else of the first one, less the blocks that it holds.

        Args:
            held_count: returns how many blocks a worker has.
        """
        if not self._levels or not self._equal_counts:
            return self._lowest
        worker = self._last_served
        if worker is None or worker not in self._levels:
            worker = min(self._levels)
        return self._levels[worker] - held_count(worker)

    def enter(self, worker: int, level: int) -> None:
        """Add a worker at this level, or at the only one."""
        level = level if self._equal_counts else self._lowest
        self._lowest = min(self._lowest, level) if self._levels else level
        self._levels[worker] = level
        if level not in self._count_at:
            self._count_at[level], self._with_room[level] = 0, set()
        self._count_at[level] += 1

    def leave(self, worker: int) -> None:
        """Remove a worker, if it is there."""
        level = self._levels.pop(worker, None)
        if level is None:
            return
        self._starving.discard(worker)
        if self._count_at[level] == 1:
            del self._count_at[level], self._with_room[level]
        else:
            self._count_at[level] -= 1
            self._with_room[level].discard(worker)

    def note_room(self, worker: int, queued: int, ahead: int) -> None:
        """Note that a worker has fewer queued blocks than before, of `ahead` at most."""
        level = self._levels.get(worker)
        if level is None:
            return
        if queued < ahead:
            self._with_room[level].add(worker)
        if not queued:
            self._starving.add(worker)

    @property
    def is_served(self) -> bool:
        """Whether `next_serving` has no worker to serve, whatever is left of an epoch."""
        return not self._starving and self._lowest in self._count_at and not self._with_room[self._lowest]

    def next_serving(
        self, epoch: Epoch, absent: int, held_count: Callable[[int], int]
    ) -> tuple[list[int], list[int]]:
        """Return the workers to serve next, and the sizes of their blocks, from this epoch's pool.

        The workers are those at the lowest level, else those without a queued block; without `equal_counts`
        all that have room, and of the last two servings those without a queued block. A size is a batch, or
        an equal part of what is left if that suffices for this serving and the next at most, but not a single
        position: layers that normalise over a batch need more than one sample.

        Args:
            epoch: the epoch from which the blocks are cut.
            absent: members that cannot be served now; they will need as many blocks as the others had.
            held_count: returns how many blocks a worker has.
        """
        while self._lowest not in self._count_at:
            self._lowest += 1
        servings_missed = self._lowest - min(self._lowest, self.entry_level(held_count)) if absent else 0
        lowest = self._count_at[self._lowest]
        this_serving = lowest + absent * (servings_missed + 1)
        next_serving = this_serving + lowest + self._count_at.get(self._lowest + 1, 0) + absent
        turn, extra = self._with_room[self._lowest], 0
        if not turn or epoch.pooled <= absent * servings_missed * epoch.batch_size:
            turn, extra = self._starving, len(self._starving)
        parts_counts = [extra + this_serving, extra + next_serving]
        if not self._equal_counts and epoch.pooled <= next_serving * epoch.batch_size:
            turn, parts_counts = self._starving, [-(-epoch.pooled // epoch.batch_size)]
        workers = sorted(turn)
        if epoch.drop_last:
            return workers, [epoch.batch_size] * min(epoch.pooled // epoch.batch_size, len(workers))
        for parts in parts_counts:
            if epoch.pooled <= parts * epoch.batch_size:
                parts = min(parts, max(1, epoch.pooled // min(2, epoch.batch_size)))
                least, larger = divmod(epoch.pooled, parts)
                return workers, [least + (part < larger) for part in range(min(parts, len(workers)))]
        return workers, [epoch.batch_size] * len(workers)

    def on_served(self, has_room: Mapping[int, bool]) -> None:
        """Note that workers were served one block each, and whether they have room for another.

        The worker that was served last comes last.
        """
        self._starving.difference_update(has_room)
        if not self._equal_counts:
            full = [worker for worker in has_room if not has_room[worker]]
            self._with_room[self._lowest].difference_update(full)
            return
        by_level: dict[int, list[int]] = {}
        for worker in has_room:
            level = self._levels[worker]
            if level in by_level:
                by_level[level].append(worker)
            else:
                by_level[level] = [worker]
            self._last_served = worker
        for level, served in by_level.items():
            self._raise_level(level, served, has_room)

    def _raise_level(self, level: int, served: list[int], has_room: Mapping[int, bool]) -> None:
        above = self._with_room.setdefault(level + 1, set())
        for worker in served:
            self._levels[worker] = level + 1
            if has_room[worker]:
                above.add(worker)
        self._count_at[level + 1] = self._count_at.get(level + 1, 0) + len(served)
        if self._count_at[level] == len(served):
            del self._count_at[level], self._with_room[level]
        else:
            self._count_at[level] -= len(served)
            self._with_room[level].difference_update(served)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, without what `note_room` can restore."""
        return {
            "levels": sorted(map(list, self._levels.items())),
            "lowest": self._lowest,
            "last_served": self._last_served,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; the owner calls `note_room` for each worker then."""
        self._levels, self._count_at, self._with_room, self._starving = {}, {}, {}, set()
        for worker, level in state["levels"]:
            self.enter(worker, level)
        self._lowest, self._last_served = state["lowest"], state["last_served"]
