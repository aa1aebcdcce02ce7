"""One thread that waits for sockets, timers and calls from other threads, and runs what is due.

Everything it runs, it runs one after the other, so what belongs to the loop needs no lock. An exception that
is not caught ends the loop; it is never swallowed.

A thread that would only wait for what the loop brings may take the loop's turns itself meanwhile: on an idle
core it costs some 25 microseconds to wake a thread, and that is twice each time it has something to say. The
loop's own thread stays away as long as that goes on, and a little longer.

This module never knows what the sockets carry.
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

from offbeat.runtime.processes.interrupts import Held
from offbeat.runtime.processes.threads import start_thread

READ = 0x001  # epoll's own bits
WRITE = 0x004

_CALLS_S = 0.05
_CALLS_AT_ONCE = 8
_IDLE_TURNS_MAX = 8
_EVENTS_MAX = 64  # a turn; who is left over comes first in the next one
# For which it looks again and again before it sleeps, where that has paid lately: as long as a peer takes
# to answer a small request.
_SPIN_S = 300e-6
_AWAY_S = 2e-3  # after a visit, for which the loop's own thread stays away: another one may follow

Watcher = Callable[[int], None]


class Loop:
    """The thread and what it waits for.

    Only `call`, `run_until`, `inside`, `start` and `join` are for other threads.

    Args:
        name: of the thread.
        spins: look again and again for a while before sleeping, where that pays: for a process that does
            nothing but what the loop runs.
        each_turn: run once a turn, after what was due; returns whether it has more to do at once.
        on_end: run in the thread when the loop has ended, with the exception that ended it or None; what it
            raises leaves the thread.
    """

    def __init__(
        self,
        name: str,
        *,
        each_turn: Callable[[], bool],
        on_end: Callable[[BaseException | None], None],
        spins: bool = False,
    ) -> None:
        self._spins = spins
        self._each_turn = each_turn
        self._on_end = on_end
        self._epoll = select.epoll()
        self._watchers: dict[int, Watcher] = {}  # by descriptor
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._idle: list[Callable[[], None]] = []
        self._idle_turns = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._waiting = False
        self._stopped = False
        self._failure: BaseException | None = None
        self._more = False  # to be done at once
        self._spinning_pays = True
        self._runs = threading.Lock()  # whoever takes turns holds it
        self._visits = threading.Lock()  # whoever takes them in place of the thread
        self._runner: int | None = None
        self._left_s = 0.0  # when the last visit was over
        self._outside: set[int] = set()  # threads that wait for what a visitor brings
        self._is_expected = self._sleeps = False
        self._recall = threading.Lock()  # released to call the thread back
        self._recall.acquire()
        self._wake_read, self._wake_write = socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self.watch(self._wake_read, READ, self._drain)
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = start_thread(self._name, self._run, _leave_the_thread)

    @property
    def inside(self) -> bool:
        """Whether the caller is the thread that takes the loop's turns."""
        return threading.get_ident() == self._runner

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; return whether it has."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.alive

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function in the loop's thread soon, after what was called before; from any thread.

        Soon is 2 ms at most where a visit has just ended, and at once else, if the thread has nothing to do.
        """
        self._calls.append((function, args))
        if self._waiting:  # set before the loop looks at its calls for the last time, so none is missed
            self._waiting = False
            # No signal handler runs between these two: Python runs them behind calls and as functions begin.
            try:
                self._wake_write.send(b"\0")
            except OSError:  # as in `_wake`
                return

    def run_until(self, wait: Callable[[float], bool], is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Take the loop's turns until something is over; return whether it is.

        Where another thread does so, this one waits.

        Args:
            wait: waits for so many seconds until it is over, and returns whether it is.
            is_over: asked after each turn.
            timeout_s: for how long, in seconds.
        """
        limit_s = time.monotonic() + timeout_s
        if self.inside or not self._visits.acquire(blocking=False):
            self._outside.add(threading.get_ident())
            try:
                return wait(timeout_s)
            finally:
                self._outside.discard(threading.get_ident())
        try:
            with Held(self._wake) as held:
                if self._enter(timeout_s):
                    try:
                        while not (is_over() or self._stopped or held.has_come):
                            left_s = limit_s - time.monotonic()
                            if left_s <= 0:
                                return False
                            self._more = self._turn(self._more, left_s, spins=True)
                    except BaseException as error:  # as in the thread, whose place this is
                        self._failure, self._stopped = error, True
                    finally:
                        self._leave()
        finally:
            self._visits.release()
        return is_over() or wait(max(0.0, limit_s - time.monotonic()))

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
        self._epoll.register(sock, events)
        self._watchers[sock.fileno()] = watcher

    def rewatch(self, sock: socket, events: int, watcher: Watcher) -> None:
        """Change what a watched socket is watched for."""
        self._epoll.modify(sock, events)
        self._watchers[sock.fileno()] = watcher

    def unwatch(self, sock: socket) -> None:
        """Watch a socket no more; nothing happens if it is not watched."""
        if self._watchers.pop(sock.fileno(), None) is not None:
            with suppress(OSError):
                self._epoll.unregister(sock)

    def stop(self) -> None:
        """End the loop after this turn."""
        self._stopped = True

    def abandon(self) -> None:
        """Close the loop's own descriptors where no thread runs it: before `start`, or in a forked child."""
        self._close()

    # Whose turn it is -------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._runs.acquire()
        own = self._runner = threading.get_ident()
        try:
            while not self._stopped:
                self._more = self._turn(self._more, spins=self._spins)
                if self._is_expected:
                    self._runs.release()
                    self._stay_away()
                    self._runs.acquire()
                    self._runner = own
        except BaseException as error:
            self._failure, self._stopped = error, True
        try:
            self._on_end(self._failure)
        finally:
            self._close()
            self._runs.release()

    def _enter(self, timeout_s: float) -> bool:
        """Take the turns from the thread, which is in the midst of one at most; return whether that is so."""
        if not self._runs.acquire(blocking=False):
            self._is_expected = True
            self._wake()
            is_mine = self._runs.acquire(timeout=timeout_s)
            self._is_expected = False
            if not is_mine:
                return False
        self._runner = threading.get_ident()
        return True

    def _leave(self) -> None:
        """Give the turns back."""
        self._left_s = time.monotonic()
        self._runner = None
        self._runs.release()
        if self._sleeps or self._outside or self._stopped:
            self._sleeps = False
            with suppress(RuntimeError):  # it was called back before, and has not come yet
                self._recall.release()

    def _stay_away(self) -> None:
        """Wait until nobody has taken turns for a while, or the thread is called back."""
        while self._is_expected or not (self._outside or self._stopped):
            left_s = self._left_s
            self._recall.acquire(timeout=_AWAY_S)
            if self._is_expected or self._left_s != left_s:
                continue  # a visit is about to begin, or there was one, and may soon be another
            if not self._runs.locked():
                break
            self._sleeps = True
            if self._runs.locked():  # else the visit may have ended before it saw that
                self._recall.acquire()

    def _wake(self) -> None:
        with suppress(OSError):  # it is full of wake-ups already, or the loop is gone
            self._wake_write.send(b"\0")

    def _close(self) -> None:
        self._epoll.close()
        self._wake_read.close()
        self._wake_write.close()

    def _turn(self, more: bool, timeout_s: float | None = None, *, spins: bool) -> bool:
        """Wait, for `timeout_s` at most, and run what is due; return whether there is more to do at once."""
        calls, timers = self._calls, self._timers
        if more or calls or self._idle:
            timeout_s = 0
        elif timers:
            due_s = max(0.0, timers[0][0] - time.monotonic())
            timeout_s = due_s if timeout_s is None else min(timeout_s, due_s)
        ready = self._ready(timeout_s, spins)
        for watcher, events in ready:
            watcher(events)
        if calls:
            limit_s = time.monotonic() + _CALLS_S
            for number in range(len(calls)):
                function, args = calls.popleft()
                function(*args)
                if not number % _CALLS_AT_ONCE and time.monotonic() > limit_s:
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

    def _ready(self, timeout_s: float | None, spins: bool) -> list[tuple[Watcher, int]]:
        """Wait for sockets, a call or `timeout_s`; return who watches for what has happened."""
        look, calls = self._look, self._calls
        if timeout_s == 0:
            return look(0)
        if spins and self._spinning_pays:
            limit_s = time.monotonic() + _SPIN_S
            while time.monotonic() < limit_s:
                ready = look(0)
                if ready or calls:
                    return ready
                os.sched_yield()
            self._spinning_pays = False
        self._waiting = True
        if calls:
            timeout_s = 0
        asleep_s = time.monotonic()
        ready = look(timeout_s)
        self._waiting = False
        self._spinning_pays |= time.monotonic() - asleep_s < _SPIN_S
        return ready

    def _look(self, timeout_s: float | None) -> list[tuple[Watcher, int]]:
        """Wait for sockets; an end, for which nobody watches, is both to be read and to be written."""
        watchers = self._watchers
        return [
            (watchers[fd], (event & ~READ and WRITE) | (event & ~WRITE and READ))
            for fd, event in self._epoll.poll(timeout_s, _EVENTS_MAX)
            if fd in watchers
        ]

    def _drain(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)


def _leave_the_thread(error: BaseException) -> None:
    """What `on_end` has raised is nobody's but the interpreter's, which shows it."""
    raise error
