"""The run log of a coordinator: its failure never ends the job, and its size may be limited.

Theory of operation. `LogWriter` writes one file and raises the errors of the operating system. `RunLog` lies
between it and the coordinator and guarantees three things.

A log never ends a job. The first error (a full disk, a quota, a device that fails, a folder that is gone)
ends the log: one line on standard error names the file, the cause and the last event in the log, and `on_end`
is called, so that a successor of this coordinator does not reopen it. From then on every method does nothing.
The file ends with a whole event, provided that it can be truncated. Only opening raises: a log that cannot be
begun is a mistake in the configuration, which its user should see at once.

A log with a size limit is written in parts. The newest part has the log's own name; a part that has reached
a sixteenth of the limit is renamed to its number, and the oldest parts are removed, so that all parts and the
event being written stay within the limit. Each part begins with the state of the policies and can be
replayed alone. The journal, too, is replaced by that state; the coordinator does both together, so that all
events that a successor replays from its journal belong to the newest part.

A successor continues at the `LogPosition` in the journal: number of the part, length, events. A new part
is complete under a temporary name before the old one is renamed, and the journal is updated afterwards. So
if the coordinator is killed between any two steps, the part that the journal names has either still the log's
name or its number already; in the second case it is renamed back.

This module never decides when the journal is replaced, and never reads an event.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from offbeat.wire.codec import PlainEntry
from offbeat.wire.log_file import EVENTS_BEFORE_KEY, LogWriter, finished_log_parts, log_part_path
from offbeat.wire.replay import states_header

LOG_BYTES_MIN: Final = 1024 * 1024
_PARTS: Final = 16  # the newest, the event being written and up to 14 finished ones


class LogPosition(NamedTuple):
    """The position up to which a log has been written.

    Attributes:
        part: the number of the newest part, from 1.
        events_before: number of events in the parts before that one.
        size_bytes: length of the newest part.
        events: number of events in the newest part.
    """

    part: int
    events_before: int
    size_bytes: int
    events: int


class RunLog:
    """Writes the events and actions of a coordinator, as long as that is possible; not thread-safe.

    Args:
        path: the file; an existing log is replaced, with all its parts. None for no log.
        header: see `LogWriter`.
        bytes_max: size limit in bytes of all parts together, at least `LOG_BYTES_MIN`; None for one file
            without a limit. Kept as long as no event with its actions takes a sixteenth of it.
        on_end: called when the log cannot be written any more.
        is_continued: the file has a log already, which `resume` continues; if it does not exist, there is no
            log any more.

    Raises:
        OSError: the file cannot be written; the message names the file.
        ValueError: the limit is too small, or is set for a pipe or device.
    """

    def __init__(
        self,
        path: str | None,
        header: dict[str, Any],
        *,
        bytes_max: int | None = None,
        on_end: Callable[[], None],
        is_continued: bool = False,
    ) -> None:
        if bytes_max is not None:
            check_log_bytes_max(bytes_max)
        self._header, self._bytes_max, self._on_end = header, bytes_max, on_end
        self._part = 1
        self._events_before = 0  # in the parts before this one
        self._writer: LogWriter | None = None
        if path is not None:
            # The parts of a log behind a link lie where the log does.
            self._path = Path(path if bytes_max is None else os.path.realpath(path))
            self._writer = self._find() if is_continued else self._create(path)

    def _find(self) -> LogWriter | None:
        try:
            return LogWriter(self._path, None)
        except OSError as error:
            _print_error(
                f"the run log {self._path} cannot be continued ({error.strerror or error}): "
                "the job continues without a log"
            )
            return None

    def _create(self, path: str) -> LogWriter:
        try:
            writer = LogWriter(self._path, self._header)
            for old in finished_log_parts(self._path).values():
                old.unlink()
        except OSError as error:
            if error.filename is None:  # an error of a write
                error.filename = path
            raise
        if self._bytes_max is not None and not writer.is_regular_file:
            raise ValueError(f"expected a regular file for a run log with a size limit, got {path}")
        return writer

    # Writing ---------------------------------------------------------------------------------------------

    @property
    def is_buffer_full(self) -> bool:
        """Whether the next event causes all buffered lines to be written to the file."""
        return self._writer is not None and self._writer.is_buffer_full

    def write_event(self, event: PlainEntry, actions: Sequence[PlainEntry]) -> None:
        """Add an event and the actions that the policies returned for it, as plain data."""
        self._attempt(lambda writer: writer.add_plain(event, actions))

    def flush(self) -> None:
        """Pass every line to the operating system."""
        self._attempt(LogWriter.flush)

    def close(self) -> None:
        """Write buffered lines and close the file."""
        self._attempt(LogWriter.close)
        self._writer = None

    # Parts -----------------------------------------------------------------------------------------------

    @property
    def is_part_due(self) -> bool:
        """Whether the file has its share of the size limit, so that `begin_part` is due."""
        if self._writer is None or self._bytes_max is None:
            return False
        return self._total_bytes(self._writer) >= self._bytes_max // _PARTS

    def begin_part(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue in a new part.

        Args:
            states: the `state_dict` of each policy, after the last event that was written.
        """
        self._attempt(lambda writer: self._begin_part(writer, states))

    def _begin_part(self, writer: LogWriter, states: Sequence[dict[str, Any]]) -> None:
        assert self._bytes_max is not None
        writer.flush()
        events = self._events_before + writer.events
        about = {"part": self._part + 1, EVENTS_BEFORE_KEY: events, **states_header(states)}
        self._remove_oldest(self._bytes_max - self._bytes_max // _PARTS * 2 - writer.size_bytes)
        temporary, finished = self._next_path(), log_part_path(self._path, self._part)
        try:
            new = LogWriter(temporary, {**self._header, **about})
            self._check_size(new.size_bytes)
            if finished.exists():
                raise FileExistsError(errno.EEXIST, f"{finished} is there already")
            os.replace(self._path, finished)
            os.replace(temporary, self._path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._writer, self._part, self._events_before = new, self._part + 1, events
        writer.close()

    def _check_size(self, header_bytes: int) -> None:
        """Check that a part can hold more than the state that it begins with."""
        assert self._bytes_max is not None
        part_bytes = self._bytes_max // _PARTS
        if header_bytes > part_bytes // 2:
            raise OSError(
                errno.EFBIG,
                f"the state of the policies, {header_bytes} bytes, does not fit into half of a part of "
                f"{part_bytes} bytes: set a log size limit of {2 * _PARTS * header_bytes} bytes",
            )

    def _remove_oldest(self, finished_bytes_max: int) -> None:
        """Remove the oldest finished parts, until the rest takes at most `finished_bytes_max`."""
        sizes = {path: path.stat().st_size for path in finished_log_parts(self._path).values()}
        left_bytes = sum(sizes.values())
        for path, size_bytes in sizes.items():
            if left_bytes <= finished_bytes_max:
                return
            os.truncate(path, 0)  # else its space stays in use while a reader has it open
            path.unlink()
            left_bytes -= size_bytes

    def _next_path(self) -> Path:
        return self._path.with_name(f"{self._path.name}.next")

    # A successor -----------------------------------------------------------------------------------------

    @property
    def position(self) -> LogPosition | None:
        """Where a successor has to continue, if all is flushed; None once the log has ended."""
        if self._writer is None:
            return None
        return LogPosition(
            part=self._part,
            events_before=self._events_before,
            size_bytes=self._writer.size_bytes,
            events=self._writer.events,
        )

    def resume(self, position: LogPosition | None) -> None:
        """Continue at an earlier coordinator's position; what follows it in the file is dropped."""
        if position is None:
            self._writer = None
            return
        self._part, self._events_before = position.part, position.events_before

        def cut(writer: LogWriter) -> None:
            writer.events = position.events
            if self._bytes_max is not None:
                self._rename_back()
                writer.reopen(self._path)
            writer.truncate(position.size_bytes, position.events)

        self._attempt(cut, "at least ")  # if it cannot be cut, it has more

    def _rename_back(self) -> None:
        """Undo the beginning of a part that is not in the journal."""
        if self._part in finished_log_parts(self._path):
            os.replace(log_part_path(self._path, self._part), self._path)
        self._next_path().unlink(missing_ok=True)

    # The end ---------------------------------------------------------------------------------------------

    def _attempt(self, act: Callable[[LogWriter], None], qualifier: str = "") -> None:
        if self._writer is None:
            return
        try:
            act(self._writer)
        except OSError as error:
            writer, self._writer = self._writer, None
            writer.close_unflushed()
            events = self._events_before + writer.events
            _print_error(
                f"the run log {self._path} cannot be written any more ({error.strerror or error}): "
                f"it is complete {qualifier}up to event {events}, and the job continues without a log"
            )
            self._on_end()

    def _total_bytes(self, writer: LogWriter) -> int:
        return writer.size_bytes + writer.buffered_bytes


def check_log_bytes_max(bytes_max: int) -> None:
    """Raise a ValueError for a size limit that is too small."""
    if bytes_max < LOG_BYTES_MIN:
        raise ValueError(
            f"expected a size limit of at least {LOG_BYTES_MIN} bytes for the run log, got {bytes_max}"
        )


def _print_error(line: str) -> None:
    with suppress(OSError):  # standard error may go to the same disk
        print(f"offbeat: {line}", file=sys.stderr, flush=True)
