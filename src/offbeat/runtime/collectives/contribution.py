"""What one worker gives to a sum, wherever it lies.

Most of what a worker gives to a ring is never sent: it is added to what comes. So large gradients need not be
copied into the memory that is sent from; they stay where they are, and are scaled when they are added.

This module never sends anything and knows no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Elements of a contribution that lie elsewhere.

    Attributes:
        start: the place of the first one.
        values: 1-D; not to be changed until the exchange is over.
        factor: the contribution is `factor` times these values.
    """

    start: int
    values: torch.Tensor
    factor: float


class Contribution:
    """The elements of `flat`, but for those that lie in `parts` and are not settled yet.

    An element must be used in one form only, for scaling before the sum and within it round differently: all
    that is sent is to be settled first, and then added from there too.

    Args:
        flat: 1-D.
        parts: of it, none overlapping another.
    """

    def __init__(self, flat: torch.Tensor, parts: Sequence[Part] = ()) -> None:
        self.flat = flat
        self._parts = sorted(parts, key=lambda part: part.start)

    @property
    def is_settled(self) -> bool:
        """Whether all of it lies in `flat`."""
        return not self._parts

    def settle(self, start: int = 0, stop: int | None = None) -> None:
        """Write elements `start` to `stop` to their places in `flat`; all of them for good by default."""
        last = len(self.flat) if stop is None else stop
        for first, end, part in self._runs(start, last):
            if part is not None:
                torch.mul(_of(part, first, end), part.factor, out=self.flat[first:end])
        if not start and last == len(self.flat):
            self._parts = []

    def add(self, theirs: torch.Tensor, start: int, stop: int, *, out: torch.Tensor) -> None:
        """Write `theirs` plus elements `start` to `stop` to `out`, which may be `theirs`."""
        for first, end, part in self._runs(start, stop):
            here = slice(first - start, end - start)
            if part is None:
                torch.add(theirs[here], self.flat[first:end], out=out[here])
            else:
                torch.add(theirs[here], _of(part, first, end), alpha=part.factor, out=out[here])

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, Part | None]]:
        """Elements `start` to `stop` in runs that lie in one part, or in none."""
        for part in self._parts:
            first, end = max(start, part.start), min(stop, part.start + len(part.values))
            if first < end:
                if start < first:
                    yield start, first, None
                yield first, end, part
                start = end
        if start < stop:
            yield start, stop, None


def _of(part: Part, first: int, end: int) -> torch.Tensor:
    return part.values[first - part.start : end - part.start]
