"""Passes the entries of the run log on to whatever shows the running job; never holds up the coordinator.

Theory of operation. The coordinator puts every event, with the actions that answer it, into a queue of
bounded length, and never waits: an event that finds it full is dropped and counted. One thread empties the
queue ten times a second. It adds the entries to the `JobView`, which alone derives the job's state from them,
and then passes view and entries to each sink. A sink that raises is switched off, with one line on standard
error that names it; the others and the training go on. An HTTP request reads the view under the lock.

Python runs one thread at a time, so this one gives way to the coordinator after every `_CHUNK` events.

A coordinator that was started again replays its journal before `start`: what it replays changes the view, and
reaches no sink a second time.

This module never decides anything about the training and never sends a message.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, Protocol

from offbeat.errors import OffbeatError
from offbeat.events import Action, Event
from offbeat.runtime.processes.threads import start_thread
from offbeat.wire.job_status import JobStatus
from offbeat.wire.job_view import JobView

EVENTS_MAX: Final = 10_000  # some seconds of what a coordinator can handle
_PERIOD_S: Final = 0.1
_CHUNK: Final = 32  # events of some 5 µs each
_CLOSE_S: Final = 2.0


class Entry(NamedTuple):
    """An event and the actions that answer it, in order."""

    event: Event
    actions: Sequence[Action]


class Sink(Protocol):
    """Shows the running job somewhere; used by one thread."""

    def update(self, view: JobView, entries: Sequence[Entry]) -> None:
        """Show the state of the job, and what has happened since the last call."""

    def close(self) -> None:
        """Write what is buffered; no update follows."""


class Publisher:
    """Keeps the view of a job up to date, and passes it to sinks, in a thread.

    Args:
        sinks: by name, what makes each sink; called in the thread.
        events_max: how many events the queue holds.

    Attributes:
        dropped: number of events that found the queue full, which the view lacks.
    """

    def __init__(self, sinks: Mapping[str, Callable[[], Sink]], *, events_max: int = EVENTS_MAX) -> None:
        self.dropped = 0
        self._makers, self._sinks = sinks, dict[str, Sink]()
        self._events_max = events_max
        self._queue: deque[Entry | None] = deque()  # None: another job begins
        self._view, self._lock = JobView(), threading.Lock()
        self._failure: BaseException | None = None
        self._is_started = False
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, event: Event, actions: Sequence[Action]) -> None:
        """Add an event and the actions that answer it; never waits. For one thread."""
        if not self._is_started:
            with self._lock:
                self._add(Entry(event, actions))
        elif len(self._queue) < self._events_max:
            self._queue.append(Entry(event, actions))
        else:
            self.dropped += 1

    def begin_job(self) -> None:
        """Begin with the view of another job."""
        if self._is_started:
            self._queue.append(None)
        else:
            self._view = JobView()

    def status(self) -> JobStatus:
        """Return the state of the job; for any thread.

        Raises:
            OffbeatError: the view has failed.
        """
        if self._failure is not None:
            raise OffbeatError(f"the state of the job is not known: {self._failure!r}")
        with self._lock:
            return self._view.status()

    def start(self) -> None:
        """Start the thread; what was put before has only changed the view."""
        self._is_started = True
        start_thread("offbeat-publisher", self._run, self._on_failure)

    def close(self) -> None:
        """Pass on what is queued and close the sinks; a sink that takes longer than two seconds is left."""
        self._end.put(None)
        with suppress(queue.Empty):
            self._ended.get(timeout=_CLOSE_S)

    # In the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        for name, make in self._makers.items():
            with self._switching_off(name):
                self._sinks[name] = make()
        is_open = True
        while is_open:
            with suppress(queue.Empty):
                self._end.get(timeout=_PERIOD_S)
                is_open = False
            entries = self._empty_queue()
            for name, sink in list(self._sinks.items()):
                with self._switching_off(name):
                    sink.update(self._view, entries)
        for name, sink in list(self._sinks.items()):
            with self._switching_off(name):
                sink.close()
        self._ended.put(None)

    def _empty_queue(self) -> list[Entry]:
        """Add what is queued to the view, and return it."""
        entries: list[Entry] = []
        while self._queue:
            chunk = [self._queue.popleft() for _ in range(min(_CHUNK, len(self._queue)))]
            with self._lock:
                for entry in chunk:
                    self._add(entry)
            if self._sinks:
                entries.extend(entry for entry in chunk if entry is not None)
            time.sleep(0)  # give way
        return entries

    def _add(self, entry: Entry | None) -> None:
        if entry is None:
            self._view = JobView()
            return
        self._view.add(entry.event)
        for action in entry.actions:
            self._view.add(action)

    @contextmanager
    def _switching_off(self, name: str) -> Iterator[None]:
        """Remove a sink that raises."""
        try:
            yield
        except Exception as error:
            self._sinks.pop(name, None)
            print_line(f"{name} shows this job no longer: {type(error).__name__}: {error}")

    def _on_failure(self, error: BaseException) -> None:
        self._failure = error
        print_line(f"this job is not shown any longer: {type(error).__name__}: {error}")


def print_line(line: str) -> None:
    """Print a line for people; it may get lost."""
    with suppress(OSError):  # the reader of standard error may have ended
        print(f"offbeat: {line}", file=sys.stderr, flush=True)
