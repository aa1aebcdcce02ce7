"""Forms groups of the workers that are ready first, so that no set of workers stays among itself.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
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
        self._recent: deque[tuple[int, ...]] = deque()  # the last groups, at most window - 1
        self._held_since_s: float | None = None
        self.timeouts = 0
        # Derived from the calls, and not part of the state:
        self._formed = 0  # groups
        self._connected_from: int | None = None  # the groups from this number on connect all
        self._part_of: dict[int, int] | None = None  # see `_find_parts`; None where it has to look
        self._held_part: int | None = None  # all workers that are ready are in this part, but new ones
        self._new: list[int] = []  # workers that were added since

    def add(self, worker: int, now_s: float) -> None:
        """See `GroupMaker.add`."""
        super().add(worker, now_s)
        if self._held_part is not None:
            self._new.append(worker)

    def discard(self, worker: int) -> None:
        """See `GroupMaker.discard`."""
        super().discard(worker)
        self._held_part = None

    def pop_group(self, expected: frozenset[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """See `GroupMaker.pop_group`; None where workers have to wait."""
        if self._has_new_arguments(expected, can_meet):
            self._connected_from = self._part_of = self._held_part = None
        size = min(self._size, len(expected))
        if len(self._ready_s) < size or size == 0:
            return None
        part_of = self._find_parts(expected)
        if self._is_held(part_of, now_s):
            return None
        self._held_part = None
        chosen = self._choose(size, part_of, can_meet)
        if len(chosen) < size:
            return None
        first = part_of.get(chosen[0])
        if first is not None and all(part_of.get(worker) == first for worker in chosen):
            if self._held_since_s is None:
                self._held_since_s = now_s
            if now_s - self._held_since_s <= self._hold_s:
                self._held_part, self._new = first, []
                return None
            self.timeouts += 1
        return self._form(chosen)

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """See `GroupMaker.pop_first`: with others that it can meet, whatever their number."""
        return self._form(self._choose(self._size, {}, can_meet))

    def take(self, workers: Iterable[int]) -> tuple[int, ...]:
        """See `GroupMaker.take`."""
        self._held_part = None
        return super().take(workers)

    def _form(self, workers: Iterable[int]) -> tuple[int, ...]:
        """Remove workers, note them as the last group, and return them, ascending."""
        group = self.take(workers)
        self._held_since_s = self._part_of = None
        self._formed += 1
        if self._window > 1:
            self._recent.append(group)
            while len(self._recent) > self._window - 1:
                self._recent.popleft()
        return group

    def _is_held(self, part_of: Mapping[int, int], now_s: float) -> bool:
        """Whether a group was held, and new workers change nothing."""
        if self._held_part is None or self._held_since_s is None or now_s - self._held_since_s > self._hold_s:
            return False
        is_held = all(part_of.get(worker) == self._held_part for worker in self._new)
        self._new.clear()
        return is_held

    def _choose(self, size: int, part_of: Mapping[int, int], can_meet: CanMeet) -> list[int]:
        """Choose from the queue: its head, then one of each other part, then the others in order."""
        chosen: list[int] = []
        parts: set[int | None] = set()
        for others_only in (True, False) if part_of else (False,):
            for worker in self._ready_s:
                if len(chosen) == size:
                    return chosen
                part = part_of.get(worker)
                if worker in chosen or (others_only and part is not None and part in parts):
                    continue
                if can_meet(tuple(chosen), worker):
                    chosen.append(worker)
                    parts.add(part)
        return chosen

    def _find_parts(self, expected: frozenset[int]) -> Mapping[int, int]:
        """Return by expected worker the part that the last groups have connected it with.

        Empty where they connect all, or while there are fewer groups than a window minus the next one.
        """
        missing = self._formed - len(self._recent)
        is_connected = self._connected_from is not None and self._connected_from >= missing
        if is_connected or not self._window or len(self._recent) < self._window - 1:
            return {}
        if self._part_of is None:
            self._part_of = self._connect(expected)
        return self._part_of

    def _connect(self, expected: frozenset[int]) -> dict[int, int]:
        """Connect the expected workers by the last groups, the latest first, until all are connected."""
        part_of = {worker: worker for worker in expected}

        def find(worker: int) -> int:
            while (above := part_of[worker]) != worker:
                part_of[worker] = worker = part_of[above]
            return worker

        parts = len(expected)
        for number, group in zip(range(self._formed, 0, -1), reversed(self._recent), strict=False):
            if parts == 1:
                break
            roots = {find(worker) for worker in group if worker in part_of}
            if len(roots) > 1:
                parts -= len(roots) - 1
                part_of |= dict.fromkeys(roots, min(roots))
            if parts == 1:
                self._connected_from = number - 1
        return {worker: find(worker) for worker in expected} if parts > 1 else {}

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
        self._restore_ready(state["ready_s"])
        self._recent = deque(tuple(group) for group in state["recent"])
        self._formed = len(self._recent)
        self._held_since_s, self.timeouts = state["held_since_s"], state["timeouts"]
