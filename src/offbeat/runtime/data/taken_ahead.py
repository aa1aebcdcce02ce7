"""An epoch's batches for programs that take batches before they have used the ones before them.

Frameworks do so: to know which batch is the last, or to count what a step of several batches holds. The
batches that are taken wait in a line, and the program says when it begins with the next of them. This module
knows neither where batches come from nor what becomes of one that has begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias

from offbeat.errors import OffbeatError

SizedBatch: TypeAlias = tuple[Any, int]
"""A batch and its number of samples."""


class TakenAhead:
    """The line of an epoch's batches between the program's taking and its beginning of each.

    Args:
        source: the batches of the epoch.
        begin: yields the batches of an iterator, each when it begins; each ends when the next one begins.
        is_last_used: whether the batch that has begun last, if any, has had a backward pass.

    Attributes:
        has_begun: a batch has begun.
    """

    def __init__(
        self,
        source: Iterator[SizedBatch],
        begin: Callable[[Iterator[SizedBatch]], Generator[Any]],
        is_last_used: Callable[[], bool],
    ) -> None:
        self._source, self._is_last_used = source, is_last_used
        self._line: deque[SizedBatch] = deque()  # taken from the source, not begun
        self._given_count = 0  # of those, the ones that the program has
        self._is_at_end = self.has_begun = False
        self._begun = begin(self._begin_in_turn())

    def _begin_in_turn(self) -> Iterator[SizedBatch]:
        while self._line:
            self._given_count -= 1
            yield self._line.popleft()

    def restart(self) -> None:
        """Give the batches that have not begun to the program again: it has dropped its iterator."""
        self._given_count = 0

    def __iter__(self) -> TakenAhead:
        return self

    def __next__(self) -> Any:
        """Return the next batch."""
        if self._given_count == len(self._line):
            try:
                self._line.append(next(self._source))
            except StopIteration:
                self._is_at_end = True
                raise
        self._given_count += 1
        return self._line[self._given_count - 1][0]

    def begin_batch(self) -> None:
        """Begin with the first batch that the program has taken and not begun.

        Raises:
            OffbeatError: there is none, or the one before had no backward pass.
        """
        self._check_last_used()
        if not self._given_count:
            raise OffbeatError(
                "begin_batch was called before a batch was taken, or after its epoch was dropped: call it "
                "once for each batch, in the order in which they were taken"
            )
        self.has_begun = True
        next(self._begun)

    def end_if_over(self) -> bool:
        """End the epoch if all of its batches have been used; return whether it is over."""
        is_over = self._is_at_end and not self._line
        if is_over:
            self._check_last_used()
            next(self._begun, None)
        return is_over

    def _check_last_used(self) -> None:
        if not self._is_last_used():
            raise OffbeatError(
                "a batch had no backward pass: where batches are taken ahead, others cannot stand in for one "
                "that is skipped; use its loss times 0"
            )

    def close(self) -> None:
        """Drop what is left of the epoch."""
        self._begun.close()
        self._line.clear()
        self._given_count, self._source = 0, iter(())
