"""The worker's side of block assignment: the blocks that it has, and those whose gradient it owes.

The runtime's session and the simulator's workers both use this object. It knows positions only: it loads
no sample and never waits.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from offbeat.events import AssignBlocks, Block


class BlockQueue:
    """Queue of the blocks that one worker was assigned and has not contributed.

    Attributes:
        epoch: the worker's current epoch.
        is_awaited: other members have begun a round that needs this worker, and it has nothing to contribute.
        samples_used: samples of the epoch that finished rounds had used, as of the last AssignBlocks.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.is_awaited = False
        self.samples_used = 0
        self._queue: deque[Block] = deque()
        self._loading = 0  # blocks being loaded, from the head of the queue
        self._started: list[int] = []
        self._late: list[int] = []  # blocks whose gradient another worker has computed
        self._last_ended_epoch = -1
        self._ignores_assignments = False  # assignments sent before the coordinator knew of an early exit

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch; blocks of the epoch before stay in the queue."""
        self.epoch, self.samples_used, self.is_awaited = epoch, 0, False

    def on_assigned(self, assignment: AssignBlocks) -> None:
        """Apply an AssignBlocks."""
        if assignment.replaces_queue:
            self._queue.clear()
            self._loading = 0
            self._ignores_assignments = False
        if self._ignores_assignments:
            return
        self._queue.extend(assignment.blocks)
        self.is_awaited |= assignment.is_awaited
        if assignment.is_last:
            self._last_ended_epoch = max(self._last_ended_epoch, assignment.epoch)
        if assignment.epoch == self.epoch:
            self.samples_used = assignment.consumed

    def discard(self) -> None:
        """Discard all blocks, and assignments up to the next with `replaces_queue`: the epoch ended early."""
        self._ignores_assignments = True
        self._queue.clear()
        self._started.clear()
        self._late.clear()
        self._loading = 0

    @property
    def ignores_assignments(self) -> bool:
        """Whether assignments are ignored, because the loop has left the epoch that they are of."""
        return self._ignores_assignments

    def __len__(self) -> int:
        """Count of blocks that have not been started."""
        return len(self._queue)

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing is left of the epoch for this worker."""
        return self._last_ended_epoch >= self.epoch and not self._queue

    @property
    def started(self) -> tuple[int, ...]:
        """Ids of the blocks started since the last contribution."""
        return tuple(self._started)

    def next_to_load(self) -> Block | None:
        """Return the next block that is not being loaded yet, and mark it as being loaded."""
        block = next(islice(self._queue, self._loading, None), None)
        self._loading += block is not None
        return block

    def start(self, block_id: int) -> bool:
        """Start block `block_id` if it still heads the queue; False if it was withdrawn meanwhile."""
        if not self._queue or self._queue[0].id != block_id:
            return False
        self._queue.popleft()
        self._loading -= 1
        self._started.append(block_id)
        self.is_awaited = False
        return True

    def adopt(self, block_id: int) -> None:
        """Add a block whose gradient another worker computed and this one has received."""
        self._late.append(block_id)

    def pop_contribution(self, is_counted: bool) -> tuple[int, ...]:
        """Return and clear the ids of the blocks started since the last call; none without `is_counted`."""
        started = (*self._started, *self._late) if is_counted else ()
        self._started.clear()
        self._late.clear()
        return started
