"""Event loop in one thread: waits for sockets, timers and calls from other threads, and runs what is due.

Callbacks run one after the other, so the loop's own data need no lock. An exception that is not caught ends
the loop; it is never swallowed.

A thread that would only wait for a result of the loop may run the loop itself while it waits (see
`LoopOwnership`).

This module never looks at what the sockets carry.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from socket import socket, socketpair
from typing import Any

from offbeat.runtime.processes.interrupts import DeferredSignals
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.transport.loop_ownership import LoopOwnership

EPOLL_READ = 0x001  # epoll's own bits
EPOLL_WRITE = 0x004

_CALLS_BUDGET_S = 0.05
_CALLS_PER_CHECK = 8
_IDLE_ITERATIONS_MAX = 8
_EVENTS_MAX = 64  # per iteration; further ones come first in the next
# How long to poll before sleeping, where that has paid lately: the time in which a peer answers a small
# request.
_SPIN_S = 300e-6

SocketCallback = Callable[[int], None]


class IoLoop:
    """The event loop and its thread.

    Other threads may call only `call`, `run_until`, `is_loop_thread`, `start` and `join`.

    Args:
        name: of the thread.
        busy_polls: poll for a while before sleeping, where that pays: for a process that does nothing but
            what the loop runs.
        on_iteration: called once per iteration, after all that was due; returns whether it has more to do at
            once.
        on_end: called in the thread when the loop has ended, with the exception that ended it or None;
            exceptions of its own propagate out of the thread.
    """

    def __init__(
        self,
        name: str,
        *,
        on_iteration: Callable[[], bool],
        on_end: Callable[[BaseException | None], None],
        busy_polls: bool = False,
    ) -> None:
        self._spins = busy_polls
        self._each_turn = on_iteration
        self._on_end = on_end
        self._epoll = select.epoll()
        self._watchers: dict[int, SocketCallback] = {}  # by descriptor
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._idle: list[Callable[[], None]] = []
        self._idle_iterations = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._is_polling = False
        self._failure: BaseException | None = None
        self._has_more = False  # the next iteration must not wait
        self._polling_pays = True
        self._wake_read, self._wake_write = socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        # Reference cycles begin here: before, they would keep the descriptors of a failed start open.
        self._ownership = LoopOwnership(self._wake)
        self.watch(self._wake_read, EPOLL_READ, self._drain_wakeups)
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = start_thread(self._name, self._run, _reraise)

    @property
    def is_loop_thread(self) -> bool:
        """Whether the caller is the thread that runs the loop now."""
        return threading.get_ident() == self._ownership.runner_ident

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; return whether it has."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_alive

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function in the loop soon, after earlier calls; from any thread.

        An idle loop runs it at once, or within 2 ms if a takeover has just ended.
        """
        self._calls.append((function, args))
        if self._is_polling:  # set before the loop checks its calls for the last time, so none is missed
            self._is_polling = False
            # No signal handler runs between these two: Python runs them after calls and at function entry.
            try:
                self._wake_write.send(b"\0")
            except OSError:  # as in `_wake`
                return

    def run_until(self, wait: Callable[[float], bool], is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Run the loop in this thread until a condition holds; return whether it does.

        If another thread has taken over already, this one only waits.

        Args:
            wait: waits up to the given number of seconds for the condition; returns whether it holds.
            is_done: the condition, checked after each iteration.
            timeout_s: for how long, in seconds.
        """
        limit_s = time.monotonic() + timeout_s
        ownership = self._ownership
        if self.is_loop_thread or not ownership.takeover_lock.acquire(blocking=False):
            return ownership.wait_during_takeover(wait, timeout_s)
        try:
            with DeferredSignals(self._wake) as held:
                if ownership.take_over(timeout_s):
                    try:
                        while not (is_done() or ownership.is_stopped or held.has_signal):
                            left_s = limit_s - time.monotonic()
                            if left_s <= 0:
                                return False
                            self._has_more = self._iterate(self._has_more, left_s, spins=True)
                    except BaseException as error:  # as in the loop's own thread
                        self._failure, ownership.is_stopped = error, True
                    finally:
                        ownership.end_takeover()
        finally:
            ownership.takeover_lock.release()
        return is_done() or wait(max(0.0, limit_s - time.monotonic()))

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run a function after `delay_s` seconds."""
        heappush(self._timers, (time.monotonic() + delay_s, next(self._order), function))

    def call_when_idle(self, function: Callable[[], None]) -> None:
        """Run a function when no socket is ready, or some iterations later; call it in the loop's thread.

        For work that is better done for many events at once.
        """
        self._idle.append(function)

    def watch(self, sock: socket, events: int, watcher: SocketCallback) -> None:
        """Run `watcher(events)` whenever the socket is ready for any of `events`."""
        self._epoll.register(sock, events)
        self._watchers[sock.fileno()] = watcher

    def modify_watch(self, sock: socket, events: int, watcher: SocketCallback) -> None:
        """Change the events and the callback of a watched socket."""
        self._epoll.modify(sock, events)
        self._watchers[sock.fileno()] = watcher

    def unwatch(self, sock: socket) -> None:
        """Stop watching a socket; does nothing if it is not watched."""
        if self._watchers.pop(sock.fileno(), None) is not None:
            with suppress(OSError):
                self._epoll.unregister(sock)

    def stop(self) -> None:
        """End the loop after this iteration."""
        self._ownership.is_stopped = True

    def close_unstarted(self) -> None:
        """Close the loop's own descriptors where no thread runs it: before `start`, or in a forked child."""
        self._close()

    # Running

    def _run(self) -> None:
        ownership = self._ownership
        ownership.begin()
        try:
            while not ownership.is_stopped:
                self._has_more = self._iterate(self._has_more, spins=self._spins)
                if ownership.takeover_requested:
                    ownership.yield_to_takeovers()
        except BaseException as error:
            self._failure, ownership.is_stopped = error, True
        try:
            self._on_end(self._failure)
        finally:
            self._close()
            ownership.end()

    def _wake(self) -> None:
        with suppress(OSError):  # the socket is full of wake-ups, or the loop is closed
            self._wake_write.send(b"\0")

    def _close(self) -> None:
        self._epoll.close()
        self._wake_read.close()
        self._wake_write.close()

    def _iterate(self, more: bool, timeout_s: float | None = None, *, spins: bool) -> bool:
        """Wait up to `timeout_s` and run what is due; return whether there is more to do at once."""
        calls, timers = self._calls, self._timers
        if more or calls or self._idle:
            timeout_s = 0
        elif timers:
            due_s = max(0.0, timers[0][0] - time.monotonic())
            timeout_s = due_s if timeout_s is None else min(timeout_s, due_s)
        ready = self._wait_for_ready(timeout_s, spins)
        for watcher, events in ready:
            watcher(events)
        if calls:
            limit_s = time.monotonic() + _CALLS_BUDGET_S
            for number in range(len(calls)):
                function, args = calls.popleft()
                function(*args)
                if not number % _CALLS_PER_CHECK and time.monotonic() > limit_s:
                    break  # let sockets and timers run between calls, however many there are
        if timers:
            now_s = time.monotonic()
            while timers and timers[0][0] <= now_s:
                heappop(timers)[2]()
        if self._idle:
            self._idle_iterations += 1
            if not ready or self._idle_iterations == _IDLE_ITERATIONS_MAX:
                self._idle_iterations = 0
                idle, self._idle = self._idle, []
                for function in idle:
                    function()
        return self._each_turn()

    def _wait_for_ready(self, timeout_s: float | None, spins: bool) -> list[tuple[SocketCallback, int]]:
        """Wait for sockets, a call or `timeout_s`; return the callbacks that are due, with their events."""
        poll, calls = self._poll, self._calls
        if timeout_s == 0:
            return poll(0)
        if spins and self._polling_pays:
            limit_s = time.monotonic() + _SPIN_S
            while time.monotonic() < limit_s:
                ready = poll(0)
                if ready or calls:
                    return ready
                os.sched_yield()
            self._polling_pays = False
        self._is_polling = True
        if calls:
            timeout_s = 0
        asleep_s = time.monotonic()
        ready = poll(timeout_s)
        self._is_polling = False
        self._polling_pays |= time.monotonic() - asleep_s < _SPIN_S
        return ready

    def _poll(self, timeout_s: float | None) -> list[tuple[SocketCallback, int]]:
        """Poll sockets; errors and hang-ups are reported as readable and as writable."""
        watchers = self._watchers
        return [
            (watchers[fd], (event & ~EPOLL_READ and EPOLL_WRITE) | (event & ~EPOLL_WRITE and EPOLL_READ))
            for fd, event in self._epoll.poll(timeout_s, _EVENTS_MAX)
            if fd in watchers
        ]

    def _drain_wakeups(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)


def _reraise(error: BaseException) -> None:
    """Raise what `on_end` has raised again: the interpreter reports it."""
    raise error
