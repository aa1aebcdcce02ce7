"""A worker's side of dealing: the blocks that it has, and those of which it owes the gradient.

The runtime's session and the simulator's workers both ask this object. Nothing here knows what stands at a
position, loads a sample, or waits.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from offbeat.events import Block, Deal


class Hand:
    """What one worker was dealt and has not contributed.

    Attributes:
        epoch: the worker's.
        is_awaited: the others have begun a round that needs this worker, and it has nothing to give.
        used: how many samples of the epoch finished rounds had used when that was last heard.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.is_awaited = False
        self.used = 0
        self._queue: deque[Block] = deque()
        self._loading = 0  # of the queue, from its head
        self._taken: list[int] = []
        self._late: list[int] = []  # of which another has computed the gradient for it
        self._over = -1
        self._is_deaf = False  # what is dealt was sent before the coordinator knew that the loop broke off

    def begin(self, epoch: int) -> None:
        """Goes on to an epoch; what is left of the one before stays."""
        self.epoch, self.used, self.is_awaited = epoch, 0, False

    def hear(self, deal: Deal) -> None:
        """Takes a Deal up."""
        if deal.anew:
            self._queue.clear()
            self._loading = 0
            self._is_deaf = False
        if self._is_deaf:
            return
        self._queue.extend(deal.blocks)
        self.is_awaited |= deal.is_awaited
        if deal.over:
            self._over = max(self._over, deal.epoch)
        if deal.epoch == self.epoch:
            self.used = deal.used

    def throw_away(self) -> None:
        """Forgets what it has, and what it is dealt until it asks anew: the loop left its epoch early."""
        self._is_deaf = True
        self._queue.clear()
        self._taken.clear()
        self._late.clear()
        self._loading = 0

    @property
    def is_deaf(self) -> bool:
        """Whether what it is dealt is not for it: its loop has left the epoch that it is dealt of."""
        return self._is_deaf

    def __len__(self) -> int:
        """How many blocks have not been taken."""
        return len(self._queue)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left in the epoch, for this worker."""
        return self._over >= self.epoch and not self._queue

    @property
    def taken(self) -> tuple[int, ...]:
        """Ids of the blocks taken since the last contribution."""
        return tuple(self._taken)

    def load(self) -> Block | None:
        """The next block that is not being loaded yet; it is from now on."""
        block = next(islice(self._queue, self._loading, None), None)
        self._loading += block is not None
        return block

    def take(self, block_id: int) -> bool:
        """Takes the block that was loaded first; False where it is not this worker's any more."""
        if not self._queue or self._queue[0].id != block_id:
            return False
        self._queue.popleft()
        self._loading -= 1
        self._taken.append(block_id)
        self.is_awaited = False
        return True

    def take_over(self, block_id: int) -> None:
        """Takes a block of which it has the gradient that another computed."""
        self._late.append(block_id)

    def contribute(self, counts: bool) -> tuple[int, ...]:
        """Ids of what was taken since the last call, if it counts; it is not owed any more."""
        taken = (*self._taken, *self._late) if counts else ()
        self._taken.clear()
        self._late.clear()
        return taken
