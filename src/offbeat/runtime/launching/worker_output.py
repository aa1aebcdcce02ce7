"""Output of workers: read from their pipes without blocking, delivered line by line in a separate thread."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import IO

from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import SignalSafeCondition

_LINE_END = re.compile(rb"\r?\n|\r(?!\Z)")  # a progress bar ends its lines with a carriage return
_TAIL_LINES = 40
_LINE_BYTES_MAX = 16_384  # a longer line is split, so that a tail is bounded in bytes, too
_READ_BYTES = 65_536  # what a pipe holds by default
_DRAIN_READS = 16  # up to 1 MiB, the largest pipe of an unprivileged process
_QUEUED_LINES_MAX = 10_000  # for an `on_output` that is slower than the workers
_BATCH_LINES = 100
_FINISH_S = 10.0


class OutputLines:
    """The lines of one pipe: delivered, and kept as a bounded tail; reading never blocks."""

    def __init__(self, rank: int, stream: IO[bytes], delivery: OutputThread | None) -> None:
        self.stream = stream
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._rank = rank
        self._delivery = delivery
        self._incomplete = b""  # the line that has not ended yet
        os.set_blocking(stream.fileno(), False)

    def read(self) -> int | None:
        """Read what is available; return its size in bytes, 0 at the end of the pipe, None if nothing is."""
        try:
            data = os.read(self.stream.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None
        *lines, self._incomplete = _LINE_END.split(self._incomplete + data)
        for line in lines:
            self._emit(line)
        if len(self._incomplete) > _LINE_BYTES_MAX:
            self._emit(self._incomplete)
            self._incomplete = b""
        if not data:
            self.flush()
        return len(data)

    def drain(self) -> None:
        """Read all that is in the pipe, once the worker has ended, and emit the incomplete line as it is."""
        for _ in range(_DRAIN_READS):  # processes that the worker left may go on writing
            if self.stream.closed or not self.read():
                break
        self.flush()

    def flush(self) -> None:
        """Emit the incomplete line as it is."""
        if self._incomplete:
            self._emit(self._incomplete)
            self._incomplete = b""

    def _emit(self, line: bytes) -> None:
        for at in range(0, max(len(line), 1), _LINE_BYTES_MAX):
            text = line[at : at + _LINE_BYTES_MAX].decode(errors="replace").rstrip("\r")
            self.tail.append(text)
            if self._delivery is not None:
                self._delivery.put(self._rank, text)


class OutputThread:
    """Calls `on_output` in a separate thread, so that a slow one never delays the reading of pipes."""

    def __init__(self, on_output: Callable[[int, str], None], on_error: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._on_output = on_output
        self._on_error = on_error
        self._lines: deque[tuple[int, str]] = deque()
        self._dropped: Counter[int] = Counter()
        self._is_finishing = False
        self._changed = SignalSafeCondition()
        self._thread = start_thread("offbeat-output", self._run, self._fail)

    def put(self, rank: int, line: str) -> None:
        """Queue a line; drops the oldest if too many are queued."""
        with self._changed:
            if self.error is not None:
                return
            if len(self._lines) >= _QUEUED_LINES_MAX:
                self._dropped[self._lines.popleft()[0]] += 1
            self._lines.append((rank, line))
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until all lines are delivered, at most 10 s for an `on_output` that hangs."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_FINISH_S)

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            for rank, line in batch:
                self._on_output(rank, line)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = error  # raised again by Workers.wait
            self._lines.clear()
        self._on_error()

    def _next_batch(self) -> list[tuple[int, str]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._dropped or self._is_finishing)
            if not self._lines and not self._dropped:
                return None
            notes = [(rank, f"({n} lines dropped)") for rank, n in sorted(self._dropped.items())]
            self._dropped.clear()
            lines = [self._lines.popleft() for _ in range(min(len(self._lines), _BATCH_LINES))]
            return notes + lines
