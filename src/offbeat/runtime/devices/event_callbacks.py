"""Calls back once events of an accelerator have happened, and finds an accelerator that hangs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from offbeat.errors import OffbeatError
from offbeat.runtime.processes.waiting import SignalSafeEvent

StartThread = Callable[[str, Callable[[], object]], threading.Thread]
"""(name, work) -> a thread in which an exception fails the job."""


class Event(Protocol):
    """Something that a device does at a later time."""

    def synchronize(self) -> None:
        """Block until it has happened."""


class EventCallbacks:
    """Calls back once events have happened, in the order of the calls, in a thread of its own.

    That thread blocks in the events, where it costs nothing and no wait has a limit. So a second thread
    fails the job if one of the calls is due for longer than the limit: its error names the device, and the
    coordinator passes it on to the other workers.

    Args:
        device: whose events these are.
        start_thread: starts the two threads, when the first events are to be waited for.
        timeout_s: for how long a call may be due, in seconds.
        use_device: returns the context in which a thread uses the device.

    Attributes:
        has_hung: a call was due for longer.
    """

    def __init__(
        self,
        device: torch.device,
        start_thread: StartThread,
        timeout_s: float,
        use_device: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._device, self._start_thread, self._timeout_s = device, start_thread, timeout_s
        self._use_device = use_device
        self.has_hung = False
        self._due: deque[tuple[float, list[Event], Callable[[], object]] | None] = deque()  # oldest first
        self._is_due = threading.Semaphore(0)
        self._is_closed = SignalSafeEvent()
        self._has_started = False

    def call_after(self, events: Iterable[Event], callback: Callable[[], object]) -> None:
        """See `Accelerator.call_after`."""
        self._due.append((time.monotonic(), [*events], callback))
        if not self._has_started:
            self._has_started = True
            self._start_thread("offbeat-device", self._call_back)
            self._start_thread("offbeat-device-watch", self._watch)
        self._is_due.release()

    def close(self) -> None:
        """End the threads; calls that are due may not be made any more."""
        self._is_closed.set()
        self._due.append(None)
        self._is_due.release()

    def _call_back(self) -> None:
        with self._use_device():
            while True:
                self._is_due.acquire()
                due = self._due[0]
                if due is None:
                    return
                _, events, callback = due
                for event in events:
                    event.synchronize()  # without the interpreter's lock
                callback()
                self._due.popleft()
                del due, events, callback  # and what they keep

    def _watch(self) -> None:
        """Wait until the oldest call is due for too long.

        Raises:
            OffbeatError: it is.
        """
        while not self._is_closed.wait(self._remaining_s()):
            if self._remaining_s() <= 0.0:
                self.has_hung = True
                raise hang_error(self._device, self._timeout_s)

    def _remaining_s(self) -> float:
        """Return the time in which no call can have been due for too long."""
        try:
            oldest = self._due[0]
        except IndexError:
            oldest = None
        now_s = time.monotonic()
        due_s = now_s if oldest is None else oldest[0]
        return max(0.0, due_s + self._timeout_s - now_s)


def hang_error(device: torch.device, timeout_s: float) -> OffbeatError:
    """Return the error of a device that has not done in time what was queued on it."""
    return OffbeatError(
        f"{device} has not done what was queued on it within {timeout_s:g} s: it hangs, or computes for "
        "longer (then set a longer timeout)"
    )
