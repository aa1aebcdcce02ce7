"""The loop that waits for sockets: when it runs what is better done for many events at once."""

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
    """A loop, and what the functions that it ran have said, in order."""

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
        """Runs until `end` is called; what was said by then."""
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


def test_what_is_for_idle_turns_runs_though_nothing_else_ever_happens(run) -> None:
    one = run()
    one.loop.call(lambda: one.loop.call_when_idle(one.end))
    assert one.wait() == []


def test_what_is_for_idle_turns_runs_in_order_and_once(run) -> None:
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


def test_what_is_for_idle_turns_runs_behind_calls_and_sockets_of_this_turn(run, ready) -> None:
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


def test_what_is_for_idle_turns_waits_for_sockets_that_are_ready_for_now(run, ready) -> None:
    """As many events as there are go together."""
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


def test_what_is_for_idle_turns_runs_again_and_again_though_a_socket_is_always_ready(run, ready) -> None:
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
    said = "".join("i" if word == "idle" else "s" for word in one.wait()).split("i")
    assert 1 <= max(map(len, said[:10])) < EVENTS
    assert min(map(len, said[1:10])) > 1  # nor does it run in every turn


def test_what_is_for_idle_turns_and_asks_for_more_of_it_does_not_keep_others_waiting(run, ready) -> None:
    one, count = run(), [0]

    def idle() -> None:
        count[0] += 1
        one.loop.call_when_idle(idle)
        if count[0] == 1:
            one.loop.watch(ready, EPOLL_READ, lambda _: one.end())

    one.loop.call(lambda: one.loop.call_when_idle(idle))
    one.wait()
    assert count[0] >= 1


def test_however_many_calls_there_are_timers_come_in_between(run) -> None:
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


# Other threads take its turns -----------------------------------------------------------------------------


def asleep(event: threading.Event) -> tuple[Callable[[float], bool], Callable[[], bool]]:
    """How to wait for something without taking turns, and whether it is over."""
    return event.wait, event.is_set


def test_who_waits_runs_what_is_due(run) -> None:
    one, over, insiders = run(), threading.Event(), []

    def call() -> None:
        insiders.append((threading.get_ident(), one.loop.is_loop_thread))
        one.loop.call_when_idle(over.set)

    one.loop.start()
    for _ in range(100):
        over.clear()
        one.loop.call(call)
        assert one.loop.run_until(*asleep(over), DEADLINE_S)
        assert not one.loop.is_loop_thread
    # A call may be run by the thread, before the waiter has come; one at least is run by the waiter.
    assert (threading.get_ident(), True) in insiders
    assert all(inside for _, inside in insiders)


def test_who_waits_sees_sockets_and_timers(run, ready) -> None:
    one, over = run(), threading.Event()

    def read(_: int) -> None:
        ready.recv(1)
        one.loop.call_later(0.01, over.set)

    one.loop.start()
    one.loop.call(one.loop.watch, ready, EPOLL_READ, read)
    assert one.loop.run_until(*asleep(over), DEADLINE_S)


def test_when_who_waited_has_gone_the_thread_is_back(run) -> None:
    one, over, later = run(), threading.Event(), threading.Event()
    one.loop.start()
    one.loop.call(over.set)
    assert one.loop.run_until(*asleep(over), DEADLINE_S)
    one.loop.call(later.set)
    assert later.wait(DEADLINE_S)


def test_a_second_one_who_waits_is_not_left_alone_when_the_first_one_has_gone(run) -> None:
    one, first, second = run(), threading.Event(), threading.Event()
    here = threading.Event()
    found: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def wait_for_second() -> None:
        here.set()
        found.put(one.loop.run_until(*asleep(second), DEADLINE_S))

    def call() -> None:  # in the turn of whoever waits for the first
        threading.Thread(target=wait_for_second, daemon=True).start()
        assert here.wait(DEADLINE_S)
        one.loop.call_later(0.05, second.set)
        first.set()

    one.loop.start()
    one.loop.call(call)
    assert one.loop.run_until(*asleep(first), DEADLINE_S)
    assert found.get(timeout=DEADLINE_S)


def test_a_wait_without_a_result_ends(run) -> None:
    one, never = run(), threading.Event()
    one.loop.start()
    assert not one.loop.run_until(*asleep(never), 0.05)
    assert not one.loop.run_until(*asleep(never), 0.0)


def test_a_wait_ends_though_the_thread_is_stuck(run) -> None:
    one, stuck, end, never = run(), threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        end.wait(DEADLINE_S)

    one.loop.start()
    one.loop.call(hang)
    assert stuck.wait(DEADLINE_S)
    assert not one.loop.run_until(*asleep(never), 0.05)
    end.set()
    over = threading.Event()
    one.loop.call(over.set)
    assert one.loop.run_until(*asleep(over), DEADLINE_S)


def test_from_within_nobody_takes_turns(run) -> None:
    one, never = run(), threading.Event()
    found: list[bool] = []

    def call() -> None:
        found.append(one.loop.run_until(*asleep(never), 0.01))
        one.end()

    one.loop.call(call)
    one.wait()
    assert found == [False]


def test_what_fails_in_the_turn_of_who_waits_ends_the_loop() -> None:
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
        loop.call(fail)  # the waiter has not come yet

    waiter = threading.get_ident()
    loop.call(fail)
    assert loop.run_until(
        was_called.wait, over.is_set, DEADLINE_S
    )  # as a request that fails when its links do
    error = errors.get(timeout=DEADLINE_S)
    assert isinstance(error, KeyError)
    assert loop.join(DEADLINE_S)
    assert not loop.run_until(*asleep(over), 0.01)


def test_an_interrupt_of_who_waits_breaks_nothing_off(run) -> None:
    """Else what the loop does would be left half-done."""
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
            one.loop.run_until(*asleep(never), DEADLINE_S)
        assert whole == ["step"] * 1000 * count
        assert signal.getsignal(signal.SIGINT) is before
    one.loop.call(over.set)
    assert one.loop.run_until(*asleep(over), DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGALRM])
def test_a_wait_for_nothing_can_be_interrupted(run, number) -> None:
    one, never = run(), threading.Event()

    def end(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(number, end)
    one.loop.start()
    one.loop.call_later(0.02, lambda: os.kill(os.getpid(), number))
    try:
        with pytest.raises(InterruptedError):
            one.loop.run_until(*asleep(never), DEADLINE_S)
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)


def test_of_two_signals_in_one_turn_both_are_handled(run) -> None:
    one, never, heard = run(), threading.Event(), []

    def call() -> None:
        if threading.get_ident() != threading.main_thread().ident:
            one.loop.call(call)
            return
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
    one.loop.start()
    one.loop.call(call)
    try:
        with pytest.raises(KeyboardInterrupt):
            one.loop.run_until(*asleep(never), DEADLINE_S)
        assert heard == ["SIGTERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_whose_handler_raises_nothing_does_not_end_a_wait(run) -> None:
    one, over, came = run(), threading.Event(), []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("signal"))
    one.loop.start()

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        one.loop.call_later(0.05, over.set)

    try:
        one.loop.call(one.loop.call_later, 0.02, kill)
        assert one.loop.run_until(*asleep(over), DEADLINE_S)
        assert came == ["signal"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_whoever_takes_turns_they_are_one_after_the_other(run) -> None:
    """Four threads wait again and again, and change places at any time."""
    one, inside, at_once = run(), [0], [0]
    interval_s = sys.getswitchinterval()
    errors: queue.SimpleQueue[str] = queue.SimpleQueue()

    def call(over: threading.Event) -> None:
        inside[0] += 1
        at_once[0] = max(at_once[0], inside[0])
        for _ in range(20):
            pass
        inside[0] -= 1
        over.set()

    def wait() -> None:
        for _ in range(300):
            over = threading.Event()
            one.loop.call(call, over)
            if not one.loop.run_until(*asleep(over), DEADLINE_S):
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
    assert at_once == [1]
