"""Pauses evaluating threads that delay the training, or one another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from offbeat.policies.validation.throttle import Pace, Pacing, Turn
from offbeat.runtime.processes.waiting import Condition

_STUCK_S: Final = 10.0


class Pacer:
    """Lets evaluating threads go on as `Pacing` decides; the other threads pause before a call of torch.

    Nothing evaluated is lost: a paused thread continues where it stopped. If the running threads make no call
    of torch for long, they may be waiting for something that a paused thread holds; then that thread goes on.

    Args:
        threads: number of threads that evaluate, at least 1.
        pace: their minimum rate; None for none.
    """

    def __init__(self, threads: int, pace: Pace | None) -> None:
        self._rest_max_s = _STUCK_S if pace is None else pace.rest_s
        self._pacing = Pacing(threads, pace)
        self._changed = Condition()

    @property
    def is_slow(self) -> bool:
        """Whether the threads were too slow during training."""
        return self._pacing.is_slow

    @contextmanager
    def evaluating(self) -> Iterator[Callable[[], None]]:
        """Context in which a thread evaluates a part; entered once the thread may go on.

        Yields:
            A function to call before every call of torch, in which the thread may pause.
        """
        with self._changed:
            turn = self._pacing.begin(time.perf_counter())
        try:
            self._wait_for_turn(turn)
            yield lambda: self._on_call(turn)
        finally:
            with self._changed:
                self._pacing.end(turn, time.perf_counter())
                self._changed.notify_all()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Context in which the training, or another thread, waits for the evaluation."""
        self._add_waiting(1)
        try:
            yield
        finally:
            self._add_waiting(-1)

    def open(self) -> None:
        """Let all threads go on from now on."""
        with self._changed:
            self._pacing.open(time.perf_counter())
            self._changed.notify_all()

    def _add_waiting(self, more: int) -> None:
        with self._changed:
            self._pacing.waiting(more, time.perf_counter())
            self._changed.notify_all()

    def _on_call(self, turn: Turn) -> None:
        turn.calls += 1
        now_s = time.perf_counter()
        if now_s >= self._pacing.look_s:
            with self._changed:
                self._pacing.look(now_s)
                self._changed.notify_all()
        if not turn.is_let:
            self._wait_for_turn(turn)

    def _wait_for_turn(self, turn: Turn) -> None:
        with self._changed:
            while not turn.is_let:
                calls = self._pacing.calls
                timeout_s = self._rest_max_s if self._pacing.is_slow else _STUCK_S
                may_go_on = self._changed.wait_for(lambda: turn.is_let, timeout_s)
                if not may_go_on and calls == self._pacing.calls:
                    self._pacing.free(turn)
