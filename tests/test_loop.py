"""The loop that waits for sockets: when it runs what is better done for many events at once."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offbeat.runtime.loop import READ, Loop

DEADLINE_S = 20.0
EVENTS = 1000


class Run:
    """A loop, and what the functions that it ran have said, in order."""

    def __init__(self, each_turn: Callable[[], bool] = lambda: False) -> None:
        self.said: list[str] = []
        self.errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._is_over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.loop = Loop("a loop", each_turn=each_turn, on_end=self.errors.put)

    def say(self, word: str) -> Callable[..., None]:
        return lambda *_: self.said.append(word)

    def end(self) -> None:
        self._is_over.put(None)

    def wait(self) -> list[str]:
        """Runs until `end` is called; what was said by then."""
        self.loop.start()
        self._is_over.get(timeout=DEADLINE_S)
        return self.said

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
    one.loop.call(lambda: one.loop.when_idle(one.end))
    assert one.wait() == []


def test_what_is_for_idle_turns_runs_in_order_and_once(run) -> None:
    one = run()

    def begin() -> None:
        for number in range(10):
            one.loop.when_idle(one.say(str(number)))
        one.loop.when_idle(one.end)

    one.loop.call(begin)
    assert one.wait() == [*"0123456789"]
    again: queue.SimpleQueue[None] = queue.SimpleQueue()
    one.loop.call(lambda: one.loop.when_idle(lambda: again.put(None)))
    again.get(timeout=DEADLINE_S)
    assert one.said == [*"0123456789"]


def test_what_is_for_idle_turns_runs_behind_calls_and_sockets_of_this_turn(run, ready) -> None:
    one = run()

    def read(_: int) -> None:
        ready.recv(1)
        one.loop.when_idle(one.say("idle, of the socket"))
        one.say("socket")()

    def called() -> None:
        one.loop.when_idle(one.say("idle, of the call"))
        one.loop.when_idle(one.end)
        one.say("call")()

    one.loop.watch(ready, READ, read)
    one.loop.call(called)
    one.loop.call(one.say("another call"))
    assert one.wait() == ["socket", "call", "another call", "idle, of the socket", "idle, of the call"]


def test_what_is_for_idle_turns_waits_for_sockets_that_are_ready_for_now(run, ready) -> None:
    """As many events as there are go together."""
    one, left = run(), [5]

    def read(_: int) -> None:
        one.say("socket")()
        if left[0] == 5:
            one.loop.when_idle(one.say("idle"))
            one.loop.when_idle(one.end)
        left[0] -= 1
        if not left[0]:
            ready.recv(1)

    one.loop.watch(ready, READ, read)
    assert one.wait() == [*["socket"] * 5, "idle"]


def test_what_is_for_idle_turns_runs_again_and_again_though_a_socket_is_always_ready(run, ready) -> None:
    one, count = run(), [0]

    def idle() -> None:
        one.said.append("idle")
        count[0] += 1
        if count[0] < 10:
            one.loop.when_idle(idle)
        else:
            one.end()

    one.loop.watch(ready, READ, one.say("socket"))
    one.loop.call(lambda: one.loop.when_idle(idle))
    said = "".join("i" if word == "idle" else "s" for word in one.wait()).split("i")
    assert 1 <= max(map(len, said[:10])) < EVENTS
    assert min(map(len, said[1:10])) > 1  # nor does it run in every turn


def test_what_is_for_idle_turns_and_asks_for_more_of_it_does_not_keep_others_waiting(run, ready) -> None:
    one, count = run(), [0]

    def idle() -> None:
        count[0] += 1
        one.loop.when_idle(idle)
        if count[0] == 1:
            one.loop.watch(ready, READ, lambda _: one.end())

    one.loop.call(lambda: one.loop.when_idle(idle))
    one.wait()
    assert count[0] >= 1


def test_however_many_calls_there_are_timers_come_in_between(run) -> None:
    one = run()

    def take_time() -> None:
        until_s = time.monotonic() + 0.03
        while time.monotonic() < until_s:
            pass
        one.said.append("call")

    def begin() -> None:
        for _ in range(20):
            one.loop.call(take_time)
        one.loop.call(one.end)
        one.loop.later(0.0, one.say("timer"))

    one.loop.call(begin)
    assert "timer" in one.wait()[:10]
