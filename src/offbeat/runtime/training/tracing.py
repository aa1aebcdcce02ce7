"""Traces two steps of a worker, for `offbeat trace`; the result can be viewed in Perfetto.

The trace is written when the two steps are over, and never read here. If it cannot be written, training
continues without it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

TRACED_STEPS = 2


class TraceSpan(msgspec.Struct, frozen=True, array_like=True):
    """An activity, or an instant if it begins when it ends.

    Attributes:
        track: the row in which it is shown: `loop`, or what is transferred.
        begin_s, end_s: in seconds since 1970.
    """

    track: str
    name: str
    begin_s: float
    end_s: float


class WorkerTrace(msgspec.Struct, frozen=True):
    """The trace of one worker.

    Attributes:
        first_step: of the `TRACED_STEPS` traced steps.
        bytes_sent: times, in seconds since 1970, and how many bytes the worker had sent by then.
    """

    worker: int
    first_step: int
    spans: list[TraceSpan]
    bytes_sent: list[tuple[float, int]]


class Tracer:
    """Collects spans while the steps last; any thread may add some.

    Args:
        folder: where the worker's file goes.
        worker: its id.
        first_step: the first step to trace.
    """

    def __init__(self, folder: str, worker: int, first_step: int) -> None:
        self._folder, self._worker, self._first_step = Path(folder), worker, first_step
        self._offset_s = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._spans: list[TraceSpan] = []
        self._bytes_sent: list[tuple[float, int]] = []
        self.is_on = False

    def on_step_start(self, step: int) -> bool:
        """Start or end the trace at the begin of a step; return whether it has started."""
        was_on = self.is_on
        if step >= self._first_step + TRACED_STEPS:
            self.close()
        elif step == self._first_step:
            self.is_on = True
        return self.is_on and not was_on

    def close(self) -> None:
        """Write the trace of steps that the loop has not ended."""
        if self.is_on:
            self.is_on = False
            self._write()

    def add_span(self, track: str, name: str, begin_s: float, end_s: float) -> None:
        """Record an activity; its begin and end are times of the performance counter."""
        if self.is_on:
            with self._lock:
                self._spans.append(TraceSpan(track, name, begin_s + self._offset_s, end_s + self._offset_s))

    def record_bytes_sent(self, bytes_sent: int) -> None:
        """Record how many bytes have been sent so far."""
        if self.is_on:
            with self._lock:
                self._bytes_sent.append((time.perf_counter() + self._offset_s, bytes_sent))

    def _write(self) -> None:
        with self._lock:
            traced = WorkerTrace(self._worker, self._first_step, self._spans, self._bytes_sent)
            self._spans, self._bytes_sent = [], []
        path = self._folder / f"worker-{self._worker}.json"
        temporary = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(traced))
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            with suppress(OSError):  # standard error may go to the same disk
                print(
                    f"offbeat: the trace {path} cannot be written ({error.strerror or error}); "
                    "training continues without it",
                    file=sys.stderr,
                    flush=True,
                )
