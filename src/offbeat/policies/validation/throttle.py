"""Which of the threads that evaluate during training go on, and which rest, by their rate of torch calls.

Nothing here measures, waits or is thread-safe; calls must be serialised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_CALLS_MIN: Final = 20
"""Calls of torch functions below which their rate is not significant."""
_WINDOW_S: Final = 0.5
_CHECK_INTERVAL_S: Final = 0.05
_GAIN_SHARE: Final = 0.5
"""The share of the possible gain that additional threads must bring to go on."""


@dataclass(frozen=True, kw_only=True)
class MinimumRate:
    """The minimum rate of torch calls of threads that evaluate during training.

    Attributes:
        check_after_s: when the rate is checked, from the first part on.
        calls_per_s_min: of all threads together.
        rest_s: how long the threads rest at most if they are slower.
    """

    check_after_s: float
    calls_per_s_min: float
    rest_s: float


class ThreadSearch:
    """Searches how many threads evaluate at once: 1, 2, 4 and so on, while the gain is large enough.

    `n` threads must call at least as many functions of torch per second as the `m` < `n` before them, plus
    half of what `n` - `m` more could add. If they do not, because they contend for the interpreter's lock,
    for cores or for a disk, the search returns to `m` threads and stays there.

    Source: none; the overlapped validation paper has a fixed number of threads.

    Args:
        threads_max: at least 1.

    Attributes:
        threads: the current number.
        is_settled: the number is final.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._before: tuple[int, float] | None = None  # threads, and their calls per second
        self._calls, self._spent_s = 0, 0.0
        self.threads = 1
        self.is_settled = threads_max == 1

    def add(self, calls: int, spent_s: float) -> None:
        """Add a measurement: calls that the current number of threads made in so many seconds."""
        if self.is_settled:
            return
        self._calls += calls
        self._spent_s += spent_s
        if self._calls >= _CALLS_MIN and self._spent_s >= _WINDOW_S:
            self._compare(self._calls / self._spent_s)
            self._calls, self._spent_s = 0, 0.0

    def _compare(self, calls_per_s: float) -> None:
        if self._before is not None:
            threads, before_per_s = self._before
            if calls_per_s < before_per_s * (1 + _GAIN_SHARE * (self.threads / threads - 1)):
                self.threads, self.is_settled = threads, True
                return
        self._before = self.threads, calls_per_s
        self.is_settled = self.threads == self._threads_max
        self.threads = min(2 * self.threads, self._threads_max)


class EvaluatorTurn:
    """A thread that evaluates a part.

    Attributes:
        calls: functions of torch called so far; the thread itself counts.
        may_run: it may go on.
    """

    __slots__ = ("calls", "calls_at_start", "is_forced", "may_run")

    def __init__(self) -> None:
        self.calls = self.calls_at_start = 0  # its calls when it was last allowed to go on
        self.may_run = self.is_forced = False


class Throttle:
    """Decides which evaluating threads go on: the oldest ones, as many as make the evaluation faster.

    The number is searched by the rate of calls of torch functions (`ThreadSearch`), separately for the time
    during training and for the time when training waits. If the threads during training are slower than
    `pace`, all of them rest until training waits: evaluating then contends with training, which is slowed
    just as much.

    Args:
        threads: number of threads that evaluate, at least 1.
        minimum_rate: their minimum rate; None for none.

    Attributes:
        is_slow: they were too slow.
        next_check_s: when to call `check_rate` next.
    """

    def __init__(self, threads: int, minimum_rate: MinimumRate | None) -> None:
        self._pace = minimum_rate
        self._during_training, self._while_waiting = ThreadSearch(threads), ThreadSearch(threads)
        self._turns: list[EvaluatorTurn] = []  # oldest first
        self._waiting_for = 0  # number of threads that wait for the evaluation
        self._is_unlimited = self._is_measuring = False
        self._ended_calls = 0
        self._began_s: float | None = None
        self._recorded_s, self._recorded_calls = 0.0, 0
        self.is_slow = False
        self.next_check_s = 0.0

    @property
    def calls(self) -> int:
        """All calls made so far."""
        return self._ended_calls + sum(turn.calls for turn in self._turns)

    def begin_part(self, now_s: float) -> EvaluatorTurn:
        """Register a thread that begins a part; it may have to rest at first."""
        self._record(now_s)
        self._began_s = now_s if self._began_s is None else self._began_s
        turn = EvaluatorTurn()
        self._turns.append(turn)
        self._allow(now_s)
        return turn

    def end_part(self, turn: EvaluatorTurn, now_s: float) -> None:
        """Remove a thread that has evaluated its part."""
        self._record(now_s)
        self._ended_calls += turn.calls
        self._turns.remove(turn)
        self._allow(now_s)

    def add_waiting(self, more: int, now_s: float) -> None:
        """Change the number of threads (training among them) that wait for the evaluation by `more`."""
        self._record(now_s)
        self._waiting_for += more
        self._allow(now_s)

    def force(self, turn: EvaluatorTurn) -> None:
        """Let a thread go on to the end of its part, whatever the other threads do."""
        turn.is_forced = turn.may_run = True

    def lift_limit(self, now_s: float) -> None:
        """Let all threads go on from now on."""
        self._is_unlimited = True
        self._allow(now_s)

    def check_rate(self, now_s: float) -> None:
        """Measure the rate of calls, and adjust the number of threads."""
        before = self._search.threads
        self._record(now_s)
        if self._pace is not None and not self._waiting_for:
            self._check_rate(self._pace, now_s)
        if self.is_slow or self._search.threads != before:
            self._allow(now_s)

    @property
    def _search(self) -> ThreadSearch:
        return self._while_waiting if self._waiting_for else self._during_training

    def _allow(self, now_s: float) -> None:
        """Let the allowed threads go on."""
        allowed = self._search.threads
        if self._is_unlimited:
            allowed = len(self._turns)
        elif self.is_slow and not self._waiting_for:
            allowed = 0
        for rank, turn in enumerate(self._turns):
            was_let, turn.may_run = turn.may_run, turn.is_forced or rank < allowed
            if turn.may_run and not was_let:
                turn.calls_at_start = turn.calls
        self._schedule(now_s)

    def _check_rate(self, pace: MinimumRate, now_s: float) -> None:
        assert self._began_s is not None
        spent_s = now_s - self._began_s
        if spent_s >= pace.check_after_s:
            self.is_slow = self.calls < pace.calls_per_s_min * spent_s
            self._pace = None

    def _record(self, now_s: float) -> None:
        """Add what was done since the last time."""
        calls = self.calls
        if self._is_measuring:
            self._search.add(calls - self._recorded_calls, now_s - self._recorded_s)
        self._recorded_s, self._recorded_calls = now_s, calls
        self._schedule(now_s)

    def _schedule(self, now_s: float) -> None:
        """Decide whether to measure now (all allowed threads have made a call), and when to look."""
        search = self._search
        running = [turn for turn in self._turns if turn.may_run]
        self._is_measuring = len(running) == search.threads and all(
            turn.calls > turn.calls_at_start for turn in running
        )
        is_over = search.is_settled and (self._pace is None or self._waiting_for > 0)
        self.next_check_s = math.inf if is_over else now_s + _CHECK_INTERVAL_S
