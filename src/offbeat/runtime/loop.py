"""One thread that waits for sockets, timers and calls from other threads, and runs what is due.

Everything it runs, it runs one after the other, so what belongs to the loop needs no lock. An exception that
is not caught ends the loop; it is never swallowed.

This module never knows what the sockets carry.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from socket import socket, socketpair
from typing import Any

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

_CALLS_S = 0.05
_IDLE_TURNS_MAX = 8

Watcher = Callable[[int], None]


class Loop:
    """The thread and what it waits for. Only `call`, `inside`, `start` and `join` are for other threads.

    Args:
        name: of the thread.
        each_turn: run once a turn, after what was due; returns whether it has more to do at once.
        on_end: run in the thread when the loop has ended, with the exception that ended it or None; what it
            raises leaves the thread.
    """

    def __init__(
        self, name: str, *, each_turn: Callable[[], bool], on_end: Callable[[BaseException | None], None]
    ) -> None:
        self._each_turn = each_turn
        self._on_end = on_end
        self._selector = selectors.DefaultSelector()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._idle: list[Callable[[], None]] = []
        self._idle_turns = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._waiting = False
        self._stopped = False
        self._wake_read, self._wake_write = socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, READ, self._drain)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def inside(self) -> bool:
        """Whether the caller is the loop's thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function in the loop's thread soon, after what was called before; from any thread."""
        self._calls.append((function, args))
        if self._waiting:  # set before the loop looks at its calls for the last time, so none is missed
            self._waiting = False
            with suppress(OSError):  # it is full of wake-ups already, or the loop is gone
                self._wake_write.send(b"\0")

    def later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run a function after `delay_s`."""
        heappush(self._timers, (time.monotonic() + delay_s, next(self._order), function))

    def when_idle(self, function: Callable[[], None]) -> None:
        """Run a function when no socket is ready, or some turns later; to be called in the loop's thread.

        For what is better done for many events at once.
        """
        self._idle.append(function)

    def watch(self, sock: socket, events: int, watcher: Watcher) -> None:
        """Run `watcher(events)` whenever the socket is ready for any of `events`."""
        self._selector.register(sock, events, watcher)

    def rewatch(self, sock: socket, events: int, watcher: Watcher) -> None:
        """Change what a watched socket is watched for."""
        self._selector.modify(sock, events, watcher)

    def unwatch(self, sock: socket) -> None:
        """Watch a socket no more; nothing happens if it is not watched."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def stop(self) -> None:
        """End the loop after this turn."""
        self._stopped = True

    def abandon(self) -> None:
        """Close the loop's own descriptors where no thread runs it: before `start`, or in a forked child."""
        self._close()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            more = False
            while not self._stopped:
                more = self._turn(more)
        except BaseException as error:
            failure = error
        try:
            self._on_end(failure)
        finally:
            self._close()

    def _close(self) -> None:
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _turn(self, more: bool) -> bool:
        calls, timers = self._calls, self._timers
        self._waiting = True
        timeout_s: float | None = None
        if more or calls or self._idle:
            timeout_s = 0
        elif timers:
            timeout_s = max(0.0, timers[0][0] - time.monotonic())
        ready = self._selector.select(timeout_s)
        self._waiting = False
        for key, events in ready:
            key.data(events)
        if calls:
            limit_s = time.monotonic() + _CALLS_S
            for _ in range(len(calls)):
                function, args = calls.popleft()
                function(*args)
                if time.monotonic() > limit_s:
                    break  # sockets and timers come in between, however much is asked for at once
        if timers:
            now_s = time.monotonic()
            while timers and timers[0][0] <= now_s:
                heappop(timers)[2]()
        if self._idle:
            self._idle_turns += 1
            if not ready or self._idle_turns == _IDLE_TURNS_MAX:
                self._idle_turns = 0
                idle, self._idle = self._idle, []
                for function in idle:
                    function()
        return self._each_turn()

    def _drain(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)
