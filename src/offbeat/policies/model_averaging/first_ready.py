"""Forms groups of the workers that are ready first, so that no set of workers stays among itself.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from offbeat.policies.model_averaging.group_maker import CanMeet, ReadyWorkers
from offbeat.policies.model_averaging.step_times import StepTimes
from offbeat.policies.model_averaging.weights import GroupWeights, ema_weights, equal_weights

_STEPS_MEASURED: Final = 5
_LEAST_WINDOWS: Final = 4  # with 2, groups of workers of one pace, or with single slow steps, wait more often
_WINDOW_TURNS: Final = 1.5  # steps of the slowest worker in a window


class FirstReadyGroups(ReadyWorkers):
    """A queue of workers that are ready, of which groups of `size` workers are taken, the first ones first.

    See `GroupMaker`.

    Workers of equal pace tend to meet each other again and again, and models of workers that never meet, not
    even through others, drift apart. Therefore each window of consecutive groups connects all workers that
    train: a group that would leave them unconnected takes the first ready worker from each unconnected part,
    and waits for one if there is none, but for no longer than `hold_timeout_s`. At the start, after a worker
    has come, or when the window shrinks, several groups may pass before all are connected. Stragglers need
    no such connection, since their paces differ, and no group waits for one.

    By default the window of N workers in groups of P has max(4 ceil((N-1) / (P-1)), ceil(1.5 (N-1) f / P))
    groups: four times the least that connects all, or as many as the others form in 1.5 steps of the slowest
    worker. f is the ratio of paces: the median time of the last few steps, of the slowest worker to the
    fastest one.

    With dynamic weights a model counts by its clock, the steps that are in it: those that its worker has made
    since its last averaging, and as many as were in the newest model of that averaging.

    Source: Miao et al. 2021, "Heterogeneity-aware distributed machine learning training via partial reduce"
    (P-Reduce), section 4. Deviations: the rule for windows is rebuilt from the paper's idea, and its default
    follows the paces.

    Args:
        size: workers in a group, at least 2.
        window: consecutive groups that connect all workers, at least 1; 0 for no such rule, None for the
            default.
        hold_timeout_s: how long a group waits for a worker of an unconnected part, in seconds.
        weights: "constant", or "dynamic" as `ema_weights`.

    Attributes:
        timeouts: groups that left workers unconnected after that wait.
    """

    def __init__(
        self, size: int, window: int | None, hold_timeout_s: float, weights: GroupWeights = "constant"
    ) -> None:
        super().__init__()
        self._size, self._fixed_window, self._hold_s = size, window, hold_timeout_s
        self._weights = weights
        self._clocks: dict[int, int] = {}
        self._lags: dict[int, int] = {}  # by member of an averaging, what its clock lacked to the highest
        self._step_times = StepTimes(_STEPS_MEASURED)
        self._recent: deque[tuple[int, ...]] = deque()  # the last groups, fewer than `_window_max`
        self._window_max = 1  # the largest window so far
        self._held_since_s: float | None = None
        self.timeouts = 0
        # Derived from the calls, and not part of the state:
        self._window: int | None = None  # None where it has to be computed
        self._formed = 0  # groups
        self._connected_from: int | None = None  # the groups from this number on connect all
        self._part_of: dict[int, int] | None = None  # see `_find_parts`; None where it has to look
        self._held_parts: set[int] | None = None  # workers that are ready are in these parts, but new ones
        self._new: list[int] = []  # workers that were added since

    def add(self, worker: int, now_s: float) -> None:
        """See `GroupMaker.add`."""
        super().add(worker, now_s)
        if self._held_parts is not None:
            self._new.append(worker)

    def observe_step(self, worker: int, now_s: float, *, samples: int, step_s: float) -> None:
        """See `GroupMaker.observe_step`."""
        self._clocks[worker] = self._clocks.get(worker, 0) + 1
        self._step_times.observe(worker, step_s)

    def end_averaging(self, worker: int, *, has_mean: bool) -> None:
        """See `GroupMaker.end_averaging`; after a mean of all, or at first, a worker has the newest model."""
        lag = self._lags.pop(worker, None)
        if not has_mean:
            return
        if lag is None:
            self._clocks[worker] = max(self._clocks.values(), default=0)
        else:
            self._clocks[worker] = self._clocks.get(worker, 0) + lag

    def discard(self, worker: int) -> None:
        """See `GroupMaker.discard`."""
        super().discard(worker)
        self._clocks.pop(worker, None)
        self._lags.pop(worker, None)
        self._step_times.forget(worker)
        self._held_parts = None

    def weights(self, group: tuple[int, ...]) -> tuple[float, ...]:
        """See `GroupMaker.weights`."""
        clocks = [self._clocks.get(worker, 0) for worker in group]
        self._lags |= {worker: max(clocks) - clock for worker, clock in zip(group, clocks, strict=True)}
        return ema_weights(clocks) if self._weights == "dynamic" else equal_weights(len(group))

    def pop_group(self, expected: frozenset[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """See `GroupMaker.pop_group`; None where workers have to wait."""
        if self._has_new_arguments(expected, can_meet):
            self._window = self._connected_from = self._part_of = self._held_parts = None
        absent = sum(worker in expected and worker not in self._ready_s for worker in self._stragglers)
        size = min(self._size, len(expected) - absent)
        if len(self._ready_s) < size or size == 0:
            return None
        part_of = self._find_parts(expected)
        if self._is_held(part_of, now_s):
            return None
        self._held_parts = None
        chosen = self._choose(size, part_of, can_meet)
        if len(chosen) < size:
            return None
        touched = {part_of[worker] for worker in chosen if worker in part_of}
        can_touch = size - sum(worker in self._stragglers for worker in chosen)
        if part_of and len(touched) < min(can_touch, len(set(part_of.values()))):
            if self._held_since_s is None:
                self._held_since_s = now_s
            if now_s - self._held_since_s <= self._hold_s:
                self._held_parts, self._new = touched, []
                return None
            self.timeouts += 1
        return self._form(chosen)

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """See `GroupMaker.pop_first`: with others that it can meet, whatever their number."""
        return self._form(self._choose(self._size, {}, can_meet))

    def take(self, workers: Iterable[int]) -> tuple[int, ...]:
        """See `GroupMaker.take`."""
        self._held_parts = None
        return super().take(workers)

    def _form(self, workers: Iterable[int]) -> tuple[int, ...]:
        """Remove workers, note them as the last group, and return them, ascending."""
        group = self.take(workers)
        self._held_since_s = self._part_of = self._window = None
        self._formed += 1
        self._recent.append(group)
        while len(self._recent) >= self._window_max:
            self._recent.popleft()
        return group

    def _is_held(self, part_of: Mapping[int, int], now_s: float) -> bool:
        """Whether a group was held, and new workers change nothing."""
        if self._held_parts is None or self._held_since_s is None:
            return False
        if now_s - self._held_since_s > self._hold_s:
            return False
        is_held = all(part_of.get(worker) in self._held_parts for worker in self._new)
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
        """Return by expected worker the part that the groups of a window but its last have connected it with.

        Empty where they connect all, or while there are fewer groups than that.
        """
        if self._window is None:
            self._window = self._new_window(len(expected - self._stragglers) - 1)
            self._window_max = max(self._window_max, self._window)
        before = self._window - 1
        if before < 0 or len(self._recent) < before:
            return {}
        if self._connected_from is not None and self._connected_from >= self._formed - before:
            return {}
        if self._part_of is None:
            self._part_of = self._connect(expected - self._stragglers, before)
        return self._part_of

    def _new_window(self, others: int) -> int:
        if self._fixed_window is not None:
            return self._fixed_window
        fastest_s = self._step_times.fastest_s
        slowest_s = self._step_times.slowest_s(besides=self._stragglers)
        slowdown = slowest_s / fastest_s if fastest_s and slowest_s else 1.0
        least = math.ceil(others / (self._size - 1))
        return max(_LEAST_WINDOWS * least, math.ceil(_WINDOW_TURNS * others * slowdown / self._size))

    def _connect(self, expected: frozenset[int], groups: int) -> dict[int, int]:
        """Connect the expected workers by so many groups, the latest first, until all are connected."""
        part_of = {worker: worker for worker in expected}

        def find(worker: int) -> int:
            while (above := part_of[worker]) != worker:
                part_of[worker] = worker = part_of[above]
            return worker

        parts = len(expected)
        last = range(self._formed, self._formed - groups, -1)
        for number, group in zip(last, reversed(self._recent), strict=False):
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
        """See `GroupMaker.state_dict`."""
        return {
            "ready_s": [list(entry) for entry in self._ready_s.items()],
            "clocks": [list(entry) for entry in self._clocks.items()],
            "lags": [list(entry) for entry in self._lags.items()],
            "step_times": self._step_times.state_dict(),
            "recent": [list(group) for group in self._recent],
            "window_max": self._window_max,
            "held_since_s": self._held_since_s,
            "timeouts": self.timeouts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `GroupMaker.load_state_dict`."""
        self._restore_ready(state["ready_s"])
        self._clocks, self._lags = dict(state["clocks"]), dict(state["lags"])
        self._step_times.load_state_dict(state["step_times"])
        self._recent = deque(tuple(group) for group in state["recent"])
        self._formed = len(self._recent)
        self._window_max = state["window_max"]
        self._held_since_s, self.timeouts = state["held_since_s"], state["timeouts"]
