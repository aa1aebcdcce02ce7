"""Which threads that evaluate beside the training go on, and which rest: by how much they do in a second.

Nothing here measures, waits or runs in several threads; what is said at once has to be said in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_CALLS_MIN: Final = 20
"""Calls of functions of torch from which on their number in a second says something."""
_WINDOW_S: Final = 0.5
_LOOK_S: Final = 0.05
_GAIN_SHARE: Final = 0.5
"""How much of what more threads could bring they have to bring, to be let go on."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What is asked of threads that evaluate beside the training; fewer calls of torch are too slow.

    Attributes:
        look_after_s: when that is seen, from the first part on.
        calls_per_s_min: by all threads together.
        rest_s: how long they rest at most, if they are too slow.
    """

    look_after_s: float
    calls_per_s_min: float
    rest_s: float


class Climb:
    """How many threads evaluate at once: one, two, four and so on, as long as that brings enough.

    `n` threads are to call at least as many functions of torch in a second as the `m` < `n` before them,
    and half of what `n` - `m` more could add. Where they do not, because they stand in line for the
    interpreter's lock, for cores or for a disk, it goes back to `m` for good.

    Source: none; the overlapped validation paper has a fixed number of threads.

    Args:
        threads_max: at least 1.

    Attributes:
        threads: how many for now.
        is_settled: it stays at that.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._before: tuple[int, float] | None = None  # threads, and their calls a second
        self._calls, self._spent_s = 0, 0.0
        self.threads = 1
        self.is_settled = threads_max == 1

    def add(self, calls: int, spent_s: float) -> None:
        """Hear of calls that as many threads as there are to be for now made in so many seconds."""
        if self.is_settled:
            return
        self._calls += calls
        self._spent_s += spent_s
        if self._calls >= _CALLS_MIN and self._spent_s >= _WINDOW_S:
            self._see(self._calls / self._spent_s)
            self._calls, self._spent_s = 0, 0.0

    def _see(self, calls_per_s: float) -> None:
        if self._before is not None:
            threads, before_per_s = self._before
            if calls_per_s < before_per_s * (1 + _GAIN_SHARE * (self.threads / threads - 1)):
                self.threads, self.is_settled = threads, True
                return
        self._before = self.threads, calls_per_s
        self.is_settled = self.threads == self._threads_max
        self.threads = min(2 * self.threads, self._threads_max)


class Turn:
    """A thread that evaluates a part.

    Attributes:
        calls: of functions of torch so far; its thread counts.
        is_let: it may go on.
    """

    __slots__ = ("calls", "is_freed", "is_let", "let_at")

    def __init__(self) -> None:
        self.calls = self.let_at = 0  # how many it had made when it was last let go on
        self.is_let = self.is_freed = False


class Pacing:
    """Says which threads that evaluate go on: those that began first, as many as make it faster.

    How many that are, it finds out by their calls of functions of torch (`Climb`): beside the training, and
    apart from that while the training waits. Where those beside the training turn out to be slower than
    `pace`, none of them goes on until the training waits: evaluating contends with the training then, which
    is as slow.

    Args:
        threads: that evaluate, at least 1.
        pace: what is asked of them; None if nothing is.

    Attributes:
        is_slow: they were too slow.
        look_s: when to `look` next.
    """

    def __init__(self, threads: int, pace: Pace | None) -> None:
        self._pace = pace
        self._beside, self._waited_for = Climb(threads), Climb(threads)
        self._turns: list[Turn] = []  # in the order in which they began
        self._waiting = 0  # that many wait for those who evaluate
        self._is_open = self._are_at_it = False
        self._ended_calls = 0
        self._began_s: float | None = None
        self._noted_s, self._noted_calls = 0.0, 0
        self.is_slow = False
        self.look_s = 0.0

    @property
    def calls(self) -> int:
        """All that were made so far."""
        return self._ended_calls + sum(turn.calls for turn in self._turns)

    def begin(self, now_s: float) -> Turn:
        """Give a thread its turn, in which it may have to rest at first."""
        self._note(now_s)
        self._began_s = now_s if self._began_s is None else self._began_s
        turn = Turn()
        self._turns.append(turn)
        self._let(now_s)
        return turn

    def end(self, turn: Turn, now_s: float) -> None:
        """A thread has evaluated its part."""
        self._note(now_s)
        self._ended_calls += turn.calls
        self._turns.remove(turn)
        self._let(now_s)

    def waiting(self, more: int, now_s: float) -> None:
        """As many more or fewer wait for those who evaluate, the training among them."""
        self._note(now_s)
        self._waiting += more
        self._let(now_s)

    def free(self, turn: Turn) -> None:
        """Let a thread go on until its turn ends, whatever the others do."""
        turn.is_freed = turn.is_let = True

    def open(self, now_s: float) -> None:
        """Let all go on from now on."""
        self._is_open = True
        self._let(now_s)

    def look(self, now_s: float) -> None:
        """See how much they do, and what follows from it."""
        before = self._climb.threads
        self._note(now_s)
        if self._pace is not None and not self._waiting:
            self._see_whether_slow(self._pace, now_s)
        if self.is_slow or self._climb.threads != before:
            self._let(now_s)

    @property
    def _climb(self) -> Climb:
        return self._waited_for if self._waiting else self._beside

    def _let(self, now_s: float) -> None:
        """Let those go on that may."""
        may = self._climb.threads
        if self._is_open:
            may = len(self._turns)
        elif self.is_slow and not self._waiting:
            may = 0
        for rank, turn in enumerate(self._turns):
            was_let, turn.is_let = turn.is_let, turn.is_freed or rank < may
            if turn.is_let and not was_let:
                turn.let_at = turn.calls
        self._plan(now_s)

    def _see_whether_slow(self, pace: Pace, now_s: float) -> None:
        assert self._began_s is not None
        spent_s = now_s - self._began_s
        if spent_s >= pace.look_after_s:
            self.is_slow = self.calls < pace.calls_per_s_min * spent_s
            self._pace = None

    def _note(self, now_s: float) -> None:
        """Tell what was done since the last time."""
        calls = self.calls
        if self._are_at_it:
            self._climb.add(calls - self._noted_calls, now_s - self._noted_s)
        self._noted_s, self._noted_calls = now_s, calls
        self._plan(now_s)

    def _plan(self, now_s: float) -> None:
        """See whether as many as are to evaluate, each of them since at least one call, and when to look."""
        climb = self._climb
        let = [turn for turn in self._turns if turn.is_let]
        self._are_at_it = len(let) == climb.threads and all(turn.calls > turn.let_at for turn in let)
        is_over = climb.is_settled and (self._pace is None or self._waiting > 0)
        self.look_s = math.inf if is_over else now_s + _LOOK_S
