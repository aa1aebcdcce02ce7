"""Which batch of an epoch a worker's next round is for, where programs may leave batches out.

A batch that was taken and not used on one worker may be used on others, who then wait for that worker's part
in a round. Before its next backward pass the worker learns for which batch the round is. Where that is one
that it has left out, the batch at hand stands in for it: it counts for nothing, and comes again.

This module never asks the coordinator itself, and never looks into a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

NameRound: TypeAlias = Callable[[int, int], int]
"""(batch, left out before it) -> for which batch of the epoch the next round is; see `Synchronizer`."""


class Pairing:
    """A worker's batches of an epoch, counted from 1, and those that it has left out.

    Args:
        name_round: says for which batch the next round is.

    Attributes:
        taken: how many batches of the epoch were taken, or are in the state that was loaded.
        is_used: a backward pass or a step has used the batch at hand.
    """

    def __init__(self, name_round: NameRound) -> None:
        self._name_round = name_round
        self.begin(0)

    def begin(self, taken: int) -> None:
        """Begin an epoch, or go on in one of which so many batches were taken."""
        self.taken = self._following = taken  # the latter: one more than there are, at the epoch's end
        self._left_out = 0  # before that one, since the last round
        self._stands_in = False  # the batch at hand, for the first of those
        self.is_used = True

    @property
    def batch(self) -> int:
        """The batch of the epoch that training has come to."""
        return self._following - self._left_out if self._stands_in else self.taken

    def each(self, batches: Iterator[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
        """Yield batches with the numbers of samples that count, those that have stood in for others again."""
        at_hand: tuple[Any, int] | None = None
        used: tuple[Any, int] | None = None
        comes_again = False
        while True:
            if not comes_again:
                at_hand = next(batches, None)
            if at_hand is None:
                break
            self.taken += 1
            self._following = self.taken
            self.is_used = False
            try:
                yield at_hand
            finally:  # also where the loop breaks off, and perhaps begins again in this epoch
                comes_again = self._settle()
                self.taken -= comes_again
            if self.is_used:
                used = at_hand
        self._following = self.taken + 1
        while used is not None and self.begins_to_stand_in():
            self.is_used = False
            yield used[0], 0
            if not self.is_used:
                break
            self._settle()

    def begins_to_stand_in(self) -> bool:
        """Whether the batch at hand, from now on, takes part in the round of one that was left out."""
        if not self._left_out or self._stands_in:
            return False
        self._left_out = self._following - self._name_round(self._following, self._left_out)
        self._stands_in = self._left_out > 0
        return self._stands_in

    def _settle(self) -> bool:
        """Take note of what became of the batch at hand; return whether it comes again."""
        has_stood_in, self._stands_in = self._stands_in and self.is_used, False
        if has_stood_in:
            self._left_out -= 1
        else:
            self._left_out = 0 if self.is_used else self._left_out + 1
        return has_stood_in
