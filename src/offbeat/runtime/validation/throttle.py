"""Pauses evaluating threads that delay the training, or one another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from offbeat.policies.validation.throttle import EvaluatorTurn, MinimumRate, Throttle
from offbeat.runtime.processes.waiting import SignalSafeCondition

_STUCK_S: Final = 10.0


class ThreadThrottle:
    """Lets evaluating threads go on as `Throttle` decides; the other threads pause before a call of torch.

    Nothing evaluated is lost: a paused thread continues where it stopped. If the running threads make no call
    of torch for long, they may be waiting for something that a paused thread holds; then that thread goes on.

    Args:
        threads: number of threads that evaluate, at least 1.
        minimum_rate: their minimum rate; None for none.
    """

    def __init__(self, threads: int, minimum_rate: MinimumRate | None) -> None:
        self._rest_max_s = _STUCK_S if minimum_rate is None else minimum_rate.rest_s
        self._throttle = Throttle(threads, minimum_rate)
        self._changed = SignalSafeCondition()

    @property
    def is_slow(self) -> bool:
        """Whether the threads were too slow during training."""
        return self._throttle.is_slow

    @contextmanager
    def evaluating_part(self) -> Iterator[Callable[[], None]]:
        """Context in which a thread evaluates a part; entered once the thread may go on.

        Yields:
            A function to call before every call of torch, in which the thread may pause.
        """
        with self._changed:
            turn = self._throttle.begin_part(time.perf_counter())
        try:
            self._wait_for_turn(turn)
            yield lambda: self._on_call(turn)
        finally:
            with self._changed:
                self._throttle.end_part(turn, time.perf_counter())
                self._changed.notify_all()

    @contextmanager
    def training_waits(self) -> Iterator[None]:
        """Context in which the training, or another thread, waits for the evaluation."""
        self._add_waiting(1)
        try:
            yield
        finally:
            self._add_waiting(-1)

    def lift_limit(self) -> None:
        """Let all threads go on from now on."""
        with self._changed:
            self._throttle.lift_limit(time.perf_counter())
            self._changed.notify_all()

    def _add_waiting(self, more: int) -> None:
        with self._changed:
            self._throttle.add_waiting(more, time.perf_counter())
            self._changed.notify_all()

    def _on_call(self, turn: EvaluatorTurn) -> None:
        turn.calls += 1
        now_s = time.perf_counter()
        if now_s >= self._throttle.next_check_s:
            with self._changed:
                self._throttle.check_rate(now_s)
                self._changed.notify_all()
        if not turn.may_run:
            self._wait_for_turn(turn)

    def _wait_for_turn(self, turn: EvaluatorTurn) -> None:
        with self._changed:
            while not turn.may_run:
                calls = self._throttle.calls
                timeout_s = self._rest_max_s if self._throttle.is_slow else _STUCK_S
                may_go_on = self._changed.wait_for(lambda: turn.may_run, timeout_s)
                if not may_go_on and calls == self._throttle.calls:
                    self._throttle.force(turn)
