"""Which samples steps have used: each at most once.

Nothing here knows which worker was assigned them.
"""

from __future__ import annotations

from bisect import bisect_right

from offbeat.events import Block


class SampleUses:
    """The used positions of each epoch, as ranges, so that their size does not grow with the samples."""

    def __init__(self) -> None:
        self._bounds: dict[int, list[int]] = {}  # by epoch: start, stop, start, stop, …, strictly ascending

    @property
    def count(self) -> int:
        """The number of used samples, in all epochs."""
        return sum(sum(bounds[1::2]) - sum(bounds[::2]) for bounds in self._bounds.values())

    def add(self, block: Block) -> int | None:
        """Add the positions of a block; return the first that had been used before, None if none had."""
        bounds = self._bounds.setdefault(block.epoch, [])
        for start, stop in block.ranges:
            place = bisect_right(bounds, start)
            if place % 2:
                return start
            if place < len(bounds) and bounds[place] < stop:
                return bounds[place]
            touches_before = place > 0 and bounds[place - 1] == start
            touches_after = place < len(bounds) and bounds[place] == stop
            kept = [] if touches_before else [start]
            if not touches_after:
                kept.append(stop)
            bounds[place - touches_before : place + touches_after] = kept
        return None
