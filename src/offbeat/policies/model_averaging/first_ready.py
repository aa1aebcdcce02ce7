"""Forms groups of the workers that are ready first, so that no set of workers stays among itself.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offbeat.policies.model_averaging.group_maker import CanMeet, ReadyWorkers


class FirstReadyGroups(ReadyWorkers):
    """A queue of workers that are ready, of which groups of `size` workers are taken, the first ones first.

    See `GroupMaker`.

    Workers of equal pace tend to meet each other again and again, and models of workers that never meet, not
    even through others, drift apart. Therefore each window of `window` consecutive groups connects all
    workers that train: a group that would leave them unconnected takes the first ready worker from each
    unconnected part, and waits for one if there is none, but for no longer than `hold_timeout_s`.

    Source: Miao et al. 2021, "Heterogeneity-aware distributed machine learning training via partial reduce"
    (P-Reduce), section 4. Deviation: the rule for windows is rebuilt from the paper's idea.

    Args:
        size: workers in a group, at least 2.
        window: consecutive groups that connect all workers, at least 1; 0 for no such rule.
        hold_timeout_s: how long a group waits for a worker of an unconnected part, in seconds.

    Attributes:
        timeouts: groups that left workers unconnected after that wait.
    """

    def __init__(self, size: int, window: int, hold_timeout_s: float) -> None:
        super().__init__()
        self._size, self._window, self._hold_s = size, window, hold_timeout_s
        self._recent: list[tuple[int, ...]] = []  # the last groups, at most window - 1
        self._held_since_s: float | None = None
        self.timeouts = 0

    def pop_group(self, expected: set[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """See `GroupMaker.pop_group`; None where workers have to wait."""
        size = min(self._size, len(expected))
        parts = self._unconnected_parts(expected)
        chosen = self._choose(size, parts, can_meet)
        if len(chosen) < size or size == 0:
            return None
        if len(parts) > 1 and any(part.issuperset(chosen) for part in parts):
            if self._held_since_s is None:
                self._held_since_s = now_s
            if now_s - self._held_since_s <= self._hold_s:
                return None
            self.timeouts += 1
        return self._form(chosen)

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """See `GroupMaker.pop_first`: with others that it can meet, whatever their number."""
        return self._form(self._choose(self._size, [], can_meet))

    def _form(self, workers: Iterable[int]) -> tuple[int, ...]:
        """Remove workers, note them as the last group, and return them, ascending."""
        group = self.take(workers)
        self._held_since_s = None
        if self._window > 1:
            self._recent = [*self._recent, group][1 - self._window :]
        return group

    def _choose(self, size: int, parts: list[set[int]], can_meet: CanMeet) -> list[int]:
        """Choose from the queue: its head, then one of each other part, then the others in order."""
        chosen: list[int] = []

        def add(candidates: Iterable[int]) -> None:
            for worker in candidates:
                if len(chosen) < size and worker not in chosen and can_meet(tuple(chosen), worker):
                    chosen.append(worker)

        add(list(self._ready_s)[:1])
        if len(parts) > 1:
            for worker in self._ready_s:
                if not any(worker in part and part.intersection(chosen) for part in parts):
                    add([worker])
        add(self._ready_s)
        return chosen

    def _unconnected_parts(self, expected: set[int]) -> list[set[int]]:
        """Return the expected workers, in parts that the last groups have connected.

        Empty while there are fewer groups than a window minus the next one.
        """
        if not self._window or len(self._recent) < self._window - 1:
            return []
        parts = [{worker} for worker in sorted(expected)]
        for group in self._recent:
            joined = [part for part in parts if part.intersection(group)]
            if len(joined) > 1:
                parts = [part for part in parts if part not in joined] + [set[int]().union(*joined)]
        return parts

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return {
            "ready_s": [list(entry) for entry in self._ready_s.items()],
            "recent": [list(group) for group in self._recent],
            "held_since_s": self._held_since_s,
            "timeouts": self.timeouts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of an object with the same arguments."""
        self._ready_s = dict(state["ready_s"])
        self._recent = [tuple(group) for group in state["recent"]]
        self._held_since_s, self.timeouts = state["held_since_s"], state["timeouts"]
