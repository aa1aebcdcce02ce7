"""What a worker does when, in two of its steps: for `offbeat trace`, to be looked at in Perfetto.

Written when the two steps are over, and never read here. Training goes on without a trace that cannot be
written.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

STEPS = 2


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that lasted, or happened if it began when it ended.

    Attributes:
        track: what it is shown beside: `loop`, or what travels.
        begin_s, end_s: in seconds since 1970.
    """

    track: str
    name: str
    begin_s: float
    end_s: float


class Traced(msgspec.Struct, frozen=True):
    """What one worker did.

    Attributes:
        first_step: of `STEPS` that were looked at.
        bytes_sent: times, in seconds since 1970, and how much the worker had sent by then.
    """

    worker: int
    first_step: int
    spans: list[Span]
    bytes_sent: list[tuple[float, int]]


class Tracer:
    """Collects spans while the steps last; any thread may add some.

    Args:
        folder: where the worker's file goes.
        worker: its id.
        first_step: of those that are looked at.
    """

    def __init__(self, folder: str, worker: int, first_step: int) -> None:
        self._folder, self._worker, self._first_step = Path(folder), worker, first_step
        self._offset_s = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._bytes_sent: list[tuple[float, int]] = []
        self.is_on = False

    def step(self, step: int) -> None:
        """Hears that a step begins."""
        if step >= self._first_step + STEPS:
            self.close()
        elif step == self._first_step:
            self.is_on = True

    def close(self) -> None:
        """Writes what there is of steps that the loop has not ended."""
        if self.is_on:
            self.is_on = False
            self._write()

    def add(self, track: str, name: str, begin_s: float, end_s: float) -> None:
        """Takes note of something that lasted from one moment to another, by the performance counter."""
        if self.is_on:
            with self._lock:
                self._spans.append(Span(track, name, begin_s + self._offset_s, end_s + self._offset_s))

    def count(self, bytes_sent: int) -> None:
        """Takes note of how much has been sent so far."""
        if self.is_on:
            with self._lock:
                self._bytes_sent.append((time.perf_counter() + self._offset_s, bytes_sent))

    def _write(self) -> None:
        with self._lock:
            traced = Traced(self._worker, self._first_step, self._spans, self._bytes_sent)
            self._spans, self._bytes_sent = [], []
        path = self._folder / f"worker-{self._worker}.json"
        beside = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(msgspec.json.encode(traced))
            os.replace(beside, path)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            with suppress(OSError):  # standard error may go to the same disk
                print(
                    f"offbeat: the trace {path} cannot be written ({error.strerror or error}); "
                    "training goes on without it",
                    file=sys.stderr,
                    flush=True,
                )
