"""The loop that waits for sockets: calls, timers, idle calls, and waits of other threads."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offbeat.runtime.transport.io_loop import EPOLL_READ, IoLoop

DEADLINE_S = 20.0
EVENTS = 1000


class Run:
    """A loop, and the words noted by the functions that it ran, in order."""

    def __init__(self, each_turn: Callable[[], bool] = lambda: False) -> None:
        self.words: list[str] = []
        self.errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._is_over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.loop = IoLoop("a loop", on_iteration=each_turn, on_end=self.errors.put)

    def note(self, word: str) -> Callable[..., None]:
        return lambda *_: self.words.append(word)

    def end(self) -> None:
        self._is_over.put(None)

    def wait(self) -> list[str]:
        """Runs until `end` is called; returns the words noted by then."""
        self.loop.start()
        self._is_over.get(timeout=DEADLINE_S)
        return self.words

    def close(self) -> None:
        self.loop.call(self.loop.stop)
        if not self.loop.join(DEADLINE_S):
            raise AssertionError("the loop did not end")
        assert self.errors.get(timeout=DEADLINE_S) is None


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*args: Any) -> Run:
        made.append(Run(*args))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def ready() -> Iterator[socket.socket]:
    """A socket that always has something to read, unless it is read."""
    near, far = socket.socketpair()
    far.send(b"x")
    yield near
    near.close(), far.close()


def test_an_idle_call_runs_without_other_events(run) -> None:
    one = run()
    one.loop.call(lambda: one.loop.call_when_idle(one.end))
    assert one.wait() == []


def test_idle_calls_run_in_order_and_once(run) -> None:
    one = run()

    def begin() -> None:
        for number in range(10):
            one.loop.call_when_idle(one.note(str(number)))
        one.loop.call_when_idle(one.end)

    one.loop.call(begin)
    assert one.wait() == [*"0123456789"]
    again: queue.SimpleQueue[None] = queue.SimpleQueue()
    one.loop.call(lambda: one.loop.call_when_idle(lambda: again.put(None)))
    again.get(timeout=DEADLINE_S)
    assert one.words == [*"0123456789"]


def test_idle_calls_run_after_the_calls_and_sockets_of_the_turn(run, ready) -> None:
    one = run()

    def read(_: int) -> None:
        ready.recv(1)
        one.loop.call_when_idle(one.note("idle, of the socket"))
        one.note("socket")()

    def called() -> None:
        one.loop.call_when_idle(one.note("idle, of the call"))
        one.loop.call_when_idle(one.end)
        one.note("call")()

    one.loop.watch(ready, EPOLL_READ, read)
    one.loop.call(called)
    one.loop.call(one.note("another call"))
    assert one.wait() == ["socket", "call", "another call", "idle, of the socket", "idle, of the call"]


def test_idle_calls_wait_for_ready_sockets(run, ready) -> None:
    """Idle calls run once for many events."""
    one, left = run(), [5]

    def read(_: int) -> None:
        one.note("socket")()
        if left[0] == 5:
            one.loop.call_when_idle(one.note("idle"))
            one.loop.call_when_idle(one.end)
        left[0] -= 1
        if not left[0]:
            ready.recv(1)

    one.loop.watch(ready, EPOLL_READ, read)
    assert one.wait() == [*["socket"] * 5, "idle"]


def test_idle_calls_run_repeatedly_although_a_socket_is_always_ready(run, ready) -> None:
    one, count = run(), [0]

    def idle() -> None:
        one.words.append("idle")
        count[0] += 1
        if count[0] < 10:
            one.loop.call_when_idle(idle)
        else:
            one.end()

    one.loop.watch(ready, EPOLL_READ, one.note("socket"))
    one.loop.call(lambda: one.loop.call_when_idle(idle))
    words = "".join("i" if word == "idle" else "s" for word in one.wait()).split("i")
    assert 1 <= max(map(len, words[:10])) < EVENTS
    assert min(map(len, words[1:10])) > 1  # the idle call does not run in every turn either


def test_an_idle_call_that_schedules_itself_does_not_block_sockets(run, ready) -> None:
    one, count = run(), [0]

    def idle() -> None:
        count[0] += 1
        one.loop.call_when_idle(idle)
        if count[0] == 1:
            one.loop.watch(ready, EPOLL_READ, lambda _: one.end())

    one.loop.call(lambda: one.loop.call_when_idle(idle))
    one.wait()


def test_timers_run_between_many_calls(run) -> None:
    one = run()

    def take_time() -> None:
        until_s = time.monotonic() + 0.03
        while time.monotonic() < until_s:
            pass
        one.words.append("call")

    def begin() -> None:
        for _ in range(20):
            one.loop.call(take_time)
        one.loop.call(one.end)
        one.loop.call_later(0.0, one.note("timer"))

    one.loop.call(begin)
    assert "timer" in one.wait()[:10]


# Turns by other threads -----------------------------------------------------------------------------------


def wait_and_check(event: threading.Event) -> tuple[Callable[[float], bool], Callable[[], bool]]:
    """A function that waits for an event without running the loop, and one that returns whether it is set."""
    return event.wait, event.is_set


def test_a_waiting_thread_runs_due_calls(run) -> None:
    one, over, insiders = run(), threading.Event(), []

    def call() -> None:
        insiders.append((threading.get_ident(), one.loop.is_loop_thread))
        one.loop.call_when_idle(over.set)

    one.loop.start()
    for _ in range(100):
        over.clear()
        one.loop.call(call)
        assert one.loop.run_until(*wait_and_check(over), DEADLINE_S)
        assert not one.loop.is_loop_thread
    # A call may be run by the loop's thread before the waiter waits; at least one is run by the waiter.
    assert (threading.get_ident(), True) in insiders
    assert all(inside for _, inside in insiders)


def test_a_waiting_thread_handles_sockets_and_timers(run, ready) -> None:
    one, over = run(), threading.Event()

    def read(_: int) -> None:
        ready.recv(1)
        one.loop.call_later(0.01, over.set)

    one.loop.start()
    one.loop.call(one.loop.watch, ready, EPOLL_READ, read)
    assert one.loop.run_until(*wait_and_check(over), DEADLINE_S)


def test_the_loops_thread_resumes_when_a_waiting_thread_returns(run) -> None:
    one, over, later = run(), threading.Event(), threading.Event()
    one.loop.start()
    one.loop.call(over.set)
    assert one.loop.run_until(*wait_and_check(over), DEADLINE_S)
    one.loop.call(later.set)
    assert later.wait(DEADLINE_S)


def test_a_second_waiting_thread_is_served_when_the_first_returns(run) -> None:
    one, first, second = run(), threading.Event(), threading.Event()
    here = threading.Event()
    found: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def wait_for_second() -> None:
        here.set()
        found.put(one.loop.run_until(*wait_and_check(second), DEADLINE_S))

    def call() -> None:  # in the turn of the thread that waits for `first`
        threading.Thread(target=wait_for_second, daemon=True).start()
        assert here.wait(DEADLINE_S)
        one.loop.call_later(0.05, second.set)
        first.set()

    one.loop.start()
    one.loop.call(call)
    assert one.loop.run_until(*wait_and_check(first), DEADLINE_S)
    assert found.get(timeout=DEADLINE_S)


def test_a_wait_without_a_result_ends(run) -> None:
    one, never = run(), threading.Event()
    one.loop.start()
    assert not one.loop.run_until(*wait_and_check(never), 0.05)
    assert not one.loop.run_until(*wait_and_check(never), 0.0)


def test_a_wait_times_out_although_the_loops_thread_is_blocked(run) -> None:
    one, stuck, end, never = run(), threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        end.wait(DEADLINE_S)

    one.loop.start()
    one.loop.call(hang)
    assert stuck.wait(DEADLINE_S)
    assert not one.loop.run_until(*wait_and_check(never), 0.05)
    end.set()
    over = threading.Event()
    one.loop.call(over.set)
    assert one.loop.run_until(*wait_and_check(over), DEADLINE_S)


def test_a_wait_within_a_call_of_the_loop_runs_no_turns(run) -> None:
    one, never = run(), threading.Event()
    found: list[bool] = []

    def call() -> None:
        found.append(one.loop.run_until(*wait_and_check(never), 0.01))
        one.end()

    one.loop.call(call)
    one.wait()
    assert found == [False]


def test_an_error_in_the_turn_of_a_waiting_thread_ends_the_loop() -> None:
    errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    was_called = threading.Event()

    def end(error: BaseException | None) -> None:
        errors.put(error)
        was_called.set()

    loop = IoLoop("a loop", on_iteration=lambda: False, on_end=end)
    loop.start()
    over = threading.Event()

    def fail() -> None:
        if threading.get_ident() == waiter:
            raise KeyError("in a turn")
        loop.call(fail)  # the waiter does not wait yet

    waiter = threading.get_ident()
    loop.call(fail)
    assert loop.run_until(
        was_called.wait, over.is_set, DEADLINE_S
    )  # as a request that fails with its endpoint
    error = errors.get(timeout=DEADLINE_S)
    assert isinstance(error, KeyError)
    assert loop.join(DEADLINE_S)
    assert not loop.run_until(*wait_and_check(over), 0.01)


def test_an_interrupt_of_a_waiting_thread_lets_running_calls_finish(run) -> None:
    """Otherwise a call of the loop would be left incomplete."""
    one, over, never = run(), threading.Event(), threading.Event()
    whole: list[str] = []

    def call() -> None:
        if threading.get_ident() != threading.main_thread().ident:
            one.loop.call(call)
            return
        signal.raise_signal(signal.SIGINT)
        for _ in range(1000):  # many steps in which a handler could be run
            whole.append("step")

    before = signal.getsignal(signal.SIGINT)
    one.loop.start()
    for count in range(1, 20):
        one.loop.call(call)
        with pytest.raises(KeyboardInterrupt):
            one.loop.run_until(*wait_and_check(never), DEADLINE_S)
        assert whole == ["step"] * 1000 * count
        assert signal.getsignal(signal.SIGINT) is before
    one.loop.call(over.set)
    assert one.loop.run_until(*wait_and_check(over), DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGALRM])
def test_a_wait_without_events_can_be_interrupted(run, number) -> None:
    one, never = run(), threading.Event()

    def end(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(number, end)
    one.loop.start()
    one.loop.call_later(0.02, lambda: os.kill(os.getpid(), number))
    try:
        with pytest.raises(InterruptedError):
            one.loop.run_until(*wait_and_check(never), DEADLINE_S)
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)


def test_both_of_two_signals_in_one_turn_are_handled(run) -> None:
    one, never, handled = run(), threading.Event(), []

    def call() -> None:
        if threading.get_ident() != threading.main_thread().ident:
            one.loop.call(call)
            return
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: handled.append("SIGTERM"))
    one.loop.start()
    one.loop.call(call)
    try:
        with pytest.raises(KeyboardInterrupt):
            one.loop.run_until(*wait_and_check(never), DEADLINE_S)
        assert handled == ["SIGTERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_whose_handler_raises_nothing_does_not_end_a_wait(run) -> None:
    one, over, handled = run(), threading.Event(), []
    before = signal.signal(signal.SIGTERM, lambda *_: handled.append("signal"))
    one.loop.start()

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        one.loop.call_later(0.05, over.set)

    try:
        one.loop.call(one.loop.call_later, 0.02, kill)
        assert one.loop.run_until(*wait_and_check(over), DEADLINE_S)
        assert handled == ["signal"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_turns_of_several_waiting_threads_never_overlap(run) -> None:
    """Four threads wait repeatedly, and are switched at any time."""
    one, inside, most_at_once = run(), [0], [0]
    interval_s = sys.getswitchinterval()
    errors: queue.SimpleQueue[str] = queue.SimpleQueue()

    def call(over: threading.Event) -> None:
        inside[0] += 1
        most_at_once[0] = max(most_at_once[0], inside[0])
        for _ in range(20):
            pass
        inside[0] -= 1
        over.set()

    def wait() -> None:
        for _ in range(300):
            over = threading.Event()
            one.loop.call(call, over)
            if not one.loop.run_until(*wait_and_check(over), DEADLINE_S):
                errors.put("a call was not run")
                return
        errors.put("")

    sys.setswitchinterval(1e-6)
    try:
        one.loop.start()
        threads = [threading.Thread(target=wait, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert [errors.get(timeout=DEADLINE_S) for _ in threads] == [""] * 4
    finally:
        sys.setswitchinterval(interval_s)
    assert most_at_once == [1]
