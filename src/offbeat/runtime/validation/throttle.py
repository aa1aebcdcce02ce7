"""Threads that evaluate beside the training rest where they hold it up, or each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from offbeat.policies.validation.throttle import Pace, Pacing, Turn
from offbeat.runtime.processes.waiting import Condition

_STUCK_S: Final = 10.0


class Pacer:
    """Lets threads that evaluate go on as `Pacing` says; the others rest, before a call of torch.

    What has been evaluated is not lost: who rests goes on from where it is. Where those that may go on call
    nothing for long, they may be waiting for what one that rests holds, and then that one goes on.

    Args:
        threads: that evaluate, at least 1.
        pace: what is asked of them; None if nothing is.
    """

    def __init__(self, threads: int, pace: Pace | None) -> None:
        self._slow_s = _STUCK_S if pace is None else pace.rest_s
        self._pacing = Pacing(threads, pace)
        self._changed = Condition()

    @property
    def is_slow(self) -> bool:
        """Whether they were too slow beside the training."""
        return self._pacing.is_slow

    @contextmanager
    def evaluating(self) -> Iterator[Callable[[], None]]:
        """A thread evaluates a part, once it may.

        Yields:
            What it calls before every call of torch, and where it may rest.
        """
        with self._changed:
            turn = self._pacing.begin(time.perf_counter())
        try:
            self._rest(turn)
            yield lambda: self._called(turn)
        finally:
            with self._changed:
                self._pacing.end(turn, time.perf_counter())
                self._changed.notify_all()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """The training, or somebody else, waits for those who evaluate."""
        self._wait(1)
        try:
            yield
        finally:
            self._wait(-1)

    def open(self) -> None:
        """Nobody rests any more."""
        with self._changed:
            self._pacing.open(time.perf_counter())
            self._changed.notify_all()

    def _wait(self, more: int) -> None:
        with self._changed:
            self._pacing.waiting(more, time.perf_counter())
            self._changed.notify_all()

    def _called(self, turn: Turn) -> None:
        turn.calls += 1
        now_s = time.perf_counter()
        if now_s >= self._pacing.look_s:
            with self._changed:
                self._pacing.look(now_s)
                self._changed.notify_all()
        if not turn.is_let:
            self._rest(turn)

    def _rest(self, turn: Turn) -> None:
        with self._changed:
            while not turn.is_let:
                calls = self._pacing.calls
                limit_s = self._slow_s if self._pacing.is_slow else _STUCK_S
                is_let = self._changed.wait_for(lambda: turn.is_let, limit_s)
                if not is_let and calls == self._pacing.calls:
                    self._pacing.free(turn)
