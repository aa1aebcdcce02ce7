"""One worker's addend of an all-reduce, part of which may lie outside the send buffer.

In a ring, most of a worker's contribution is never sent, but added to received data. So large gradients need
not be copied into the send buffer: they stay where they are, and are scaled when they are added.

This module sends nothing and knows no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ExternalElements:
    """Elements of a contribution that lie outside the send buffer.

    Attributes:
        start: the index of the first one.
        values: 1-D; must not change until the exchange is over.
        factor: the contribution is `factor` times these values.
    """

    start: int
    values: torch.Tensor
    factor: float


class Contribution:
    """The elements of `flat`, except those in `parts` that are not materialized yet.

    Scaling before the sum and within it round differently, so each element must be used in one form only:
    elements that are sent are first written to `flat`, and then also added from there.

    Args:
        flat: 1-D, the send buffer.
        parts: its elements that lie elsewhere, without overlap.
    """

    def __init__(self, flat: torch.Tensor, parts: Sequence[ExternalElements] = ()) -> None:
        self.flat = flat
        self._parts = sorted(parts, key=lambda part: part.start)

    @property
    def is_materialized(self) -> bool:
        """Whether all elements lie in `flat`."""
        return not self._parts

    def materialize(self, start: int = 0, stop: int | None = None) -> None:
        """Write elements `start` to `stop` to `flat`; by default all, and `parts` are dropped."""
        last = len(self.flat) if stop is None else stop
        for first, end, part in self._runs(start, last):
            if part is not None:
                torch.mul(_values_of(part, first, end), part.factor, out=self.flat[first:end])
        if not start and last == len(self.flat):
            self._parts = []

    def add(self, received: torch.Tensor, start: int, stop: int, *, out: torch.Tensor) -> None:
        """Write `received` plus elements `start` to `stop` to `out`, which may be `received`."""
        for first, end, part in self._runs(start, stop):
            span = slice(first - start, end - start)
            if part is None:
                torch.add(received[span], self.flat[first:end], out=out[span])
            else:
                torch.add(received[span], _values_of(part, first, end), alpha=part.factor, out=out[span])

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, ExternalElements | None]]:
        """Yield elements `start` to `stop` as runs that lie in one part, or in `flat` (None)."""
        for part in self._parts:
            first, end = max(start, part.start), min(stop, part.start + len(part.values))
            if first < end:
                if start < first:
                    yield start, first, None
                yield first, end, part
                start = end
        if start < stop:
            yield start, stop, None


def _values_of(part: ExternalElements, first: int, end: int) -> torch.Tensor:
    return part.values[first - part.start : end - part.start]
