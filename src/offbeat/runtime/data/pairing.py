"""Which batch of an epoch a worker's next round is for, where programs may skip batches.

A batch that one worker has taken and skipped may be used by other workers, which then wait for that worker's
contribution to a round. Before its next backward pass the worker learns for which batch the round is. If it
has skipped that batch, the current batch stands in: its weight is 0 in this round, and it is yielded again.

This module never queries the coordinator itself, and never looks into a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

QueryRoundBatch: TypeAlias = Callable[[int, int], int]
"""(batch, number skipped before it) -> the batch of the epoch that the next round is for."""


class RoundPairing:
    """A worker's batches of an epoch, counted from 1, and those that it has skipped.

    Args:
        query_round_batch: returns the batch that the next round is for; see `Synchronizer.agree_on_batch`.

    Attributes:
        batches_taken: number of batches of the epoch that were taken, those in a loaded state included.
        is_batch_used: a backward pass or a step has used the current batch.
    """

    def __init__(self, query_round_batch: QueryRoundBatch) -> None:
        self._name_round = query_round_batch
        self.begin_epoch(0)

    def begin_epoch(self, taken: int) -> None:
        """Begin an epoch, or continue in one of which `taken` batches were taken."""
        self.batches_taken = self._current = (
            taken  # the latter: one more than the last batch, at the epoch's end
        )
        self._skipped = 0  # skipped before `_current`, since the last round
        self._stands_in = False  # the current batch, for the first of those skipped
        self.is_batch_used = True

    @property
    def batch(self) -> int:
        """The batch of the epoch that training has reached."""
        return self._current - self._skipped if self._stands_in else self.batches_taken

    def iterate(self, batches: Iterator[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
        """Yield batches with their numbers of samples; a batch that stood in for another is yielded again."""
        current: tuple[Any, int] | None = None
        used: tuple[Any, int] | None = None
        is_repeated = False
        while True:
            if not is_repeated:
                current = next(batches, None)
            if current is None:
                break
            self.batches_taken += 1
            self._current = self.batches_taken
            self.is_batch_used = False
            try:
                yield current
            finally:  # also if the loop breaks off, for it may start again in this epoch
                is_repeated = self._finish_batch()
                self.batches_taken -= is_repeated
            if self.is_batch_used:
                used = current
        self._current = self.batches_taken + 1
        while used is not None and self.try_stand_in():
            self.is_batch_used = False
            yield used[0], 0
            if not self.is_batch_used:
                break
            self._finish_batch()

    def try_stand_in(self) -> bool:
        """Let the current batch stand in for a skipped one if the next round is for that; return whether."""
        if not self._skipped or self._stands_in:
            return False
        self._skipped = self._current - self._name_round(self._current, self._skipped)
        self._stands_in = self._skipped > 0
        return self._stands_in

    def _finish_batch(self) -> bool:
        """Record what became of the current batch; return whether it is to be yielded again."""
        has_stood_in, self._stands_in = self._stands_in and self.is_batch_used, False
        if has_stood_in:
            self._skipped -= 1
        else:
            self._skipped = 0 if self.is_batch_used else self._skipped + 1
        return has_stood_in
