"""The run log of a coordinator: the job outlives it, and it has a bound if one is given.

Theory of operation. `LogWriter` writes one file and raises what the operating system says. `RunLog` stands
between it and the coordinator and keeps three promises.

A log never ends a job. The first error (a full disk, a quota, a device that fails, a folder that is gone)
ends the log: one line on standard error names the file, the cause and how far the log goes, and `on_end` is
called, so that a successor of this coordinator does not try again. From then on every method does nothing.
What was written ends with a whole event wherever it can be truncated. Only the opening raises: a log that
cannot be begun is a mistake in the configuration, and its user wants to know at once.

A log with a bound is written in parts. The newest part has the log's own name; a part that has a sixteenth of
the bound is renamed to its number, and the oldest parts are removed, so that parts and the event under way
stay within the bound. Each part begins with the state of the policies and can be replayed alone. Since that
state is also what the journal begins anew with, both are done together, by the coordinator: then everything
that a successor replays from its journal belongs into the newest part.

A successor goes on where the journal says (`place`): number of the part, length, events. A new part is
complete under another name before the old one is renamed, and the journal is told afterwards. So if the
coordinator is killed between any two steps, the part that the journal means has either still its own name or
already its number, and in the second case gets its name back.

This module never decides when the journal begins anew, and never reads an event.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from offbeat.events import Action, Event
from offbeat.wire.record import EVENTS_BEFORE, LogWriter, finished_parts, part_path, states_header

LOG_BYTES_LEAST: Final = 1024 * 1024
_PARTS: Final = 16  # the newest, the event under way and up to 14 finished ones


class LogPlace(NamedTuple):
    """How far a log has been written.

    Attributes:
        part: the number of the newest part, from 1.
        events_before: how many events the parts before that one had.
        size_bytes: how long the newest part is.
        events: how many events it has.
    """

    part: int
    events_before: int
    size_bytes: int
    events: int


class RunLog:
    """Writes what a coordinator is told and answers, for as long as that is possible; for one thread.

    Args:
        path: the file; a log that is there already is replaced, with all its parts. None for no log.
        header: see `LogWriter`.
        bytes_max: what all parts together may take, at least `LOG_BYTES_LEAST`; None for one file without a
            bound. Held as long as no event takes a sixteenth of it with its actions.
        on_end: called when the log could not be written any more.

    Raises:
        OSError: the file cannot be written; its text names the file.
        ValueError: the bound is too small, or is to be that of a pipe or device.
    """

    def __init__(
        self,
        path: str | None,
        header: dict[str, Any],
        *,
        bytes_max: int | None = None,
        on_end: Callable[[], None],
    ) -> None:
        if bytes_max is not None:
            check_bytes_max(bytes_max)
        self._header, self._bytes_max, self._on_end = header, bytes_max, on_end
        self._part = 1
        self._events_before = 0  # in the parts before this one
        self._writer: LogWriter | None = None
        if path is not None:
            # The parts of a log behind a link lie where the log does.
            self._path = Path(path if bytes_max is None else os.path.realpath(path))
            self._writer = self._begin(path)

    def _begin(self, path: str) -> LogWriter:
        try:
            writer = LogWriter(self._path, self._header)
            for old in finished_parts(self._path).values():
                old.unlink()
        except OSError as error:
            if error.filename is None:  # of a write
                error.filename = path
            raise
        if self._bytes_max is not None and not writer.is_regular_file:
            raise ValueError(f"expected a regular file for a run log with a bound, got {path}")
        return writer

    # Writing ---------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the next event reaches the file together with all that waits."""
        return self._writer is not None and self._writer.is_full

    def write(self, event: Event, actions: Sequence[Action]) -> None:
        """Add an event and the answers to it."""

        def add(writer: LogWriter) -> None:
            writer.event(event)
            writer.actions(actions)

        self._attempt(add)

    def flush(self) -> None:
        """Hand every line to the operating system."""
        self._attempt(LogWriter.flush)

    def close(self) -> None:
        """Write what waits and close the file."""
        self._attempt(LogWriter.close)
        self._writer = None

    # Parts -----------------------------------------------------------------------------------------------

    @property
    def is_part_over(self) -> bool:
        """Whether `begin_part` is due."""
        if self._writer is None or self._bytes_max is None:
            return False
        return self._size_bytes(self._writer) >= self._bytes_max // _PARTS

    def begin_part(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on in a new part.

        Args:
            states: the `state_dict` of each policy, after the last event that was written.
        """
        self._attempt(lambda writer: self._begin_part(writer, states))

    def _begin_part(self, writer: LogWriter, states: Sequence[dict[str, Any]]) -> None:
        assert self._bytes_max is not None
        writer.flush()
        events = self._events_before + writer.events
        about = {"part": self._part + 1, EVENTS_BEFORE: events, **states_header(states)}
        self._remove_oldest(self._bytes_max - self._bytes_max // _PARTS * 2 - writer.size_bytes)
        beside, finished = self._next_path(), part_path(self._path, self._part)
        try:
            new = LogWriter(beside, {**self._header, **about})
            self._check_size(new.size_bytes)
            if finished.exists():
                raise FileExistsError(errno.EEXIST, f"{finished} is there already")
            os.replace(self._path, finished)
            os.replace(beside, self._path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise
        self._writer, self._part, self._events_before = new, self._part + 1, events
        writer.close()

    def _check_size(self, header_bytes: int) -> None:
        """A part is to hold more than the state that it begins with."""
        assert self._bytes_max is not None
        part_bytes = self._bytes_max // _PARTS
        if header_bytes > part_bytes // 2:
            raise OSError(
                errno.EFBIG,
                f"the state of the policies, {header_bytes} bytes, does not fit into half of a part of "
                f"{part_bytes} bytes: the log needs a bound of {2 * _PARTS * header_bytes} bytes",
            )

    def _remove_oldest(self, finished_bytes_max: int) -> None:
        """Remove the oldest finished parts, until the others take so much at most."""
        sizes = {path: path.stat().st_size for path in finished_parts(self._path).values()}
        left_bytes = sum(sizes.values())
        for path, size_bytes in sizes.items():
            if left_bytes <= finished_bytes_max:
                return
            os.truncate(path, 0)  # else its space is used for as long as anybody has it open
            path.unlink()
            left_bytes -= size_bytes

    def _next_path(self) -> Path:
        return self._path.with_name(f"{self._path.name}.next")

    # A successor -----------------------------------------------------------------------------------------

    @property
    def place(self) -> LogPlace | None:
        """Where a successor has to go on, if all is flushed; None where there is no log any more."""
        if self._writer is None:
            return None
        return LogPlace(
            part=self._part,
            events_before=self._events_before,
            size_bytes=self._writer.size_bytes,
            events=self._writer.events,
        )

    def go_on(self, place: LogPlace | None) -> None:
        """Go on at an earlier coordinator's place; what it wrote behind that is dropped."""
        if place is None:
            self._writer = None
            return
        self._part, self._events_before = place.part, place.events_before

        def cut(writer: LogWriter) -> None:
            writer.events = place.events
            if self._bytes_max is not None:
                self._take_name_back()
                writer.reopen(self._path)
            writer.cut(place.size_bytes, place.events)

        self._attempt(cut, "at least ")  # where it cannot be cut, it has more

    def _take_name_back(self) -> None:
        """Undo a beginning of a part of which the journal was not told."""
        if self._part in finished_parts(self._path):
            os.replace(part_path(self._path, self._part), self._path)
        self._next_path().unlink(missing_ok=True)

    # The end ---------------------------------------------------------------------------------------------

    def _attempt(self, act: Callable[[LogWriter], None], least: str = "") -> None:
        if self._writer is None:
            return
        try:
            act(self._writer)
        except OSError as error:
            writer, self._writer = self._writer, None
            writer.abandon()
            events = self._events_before + writer.events
            _say(
                f"the run log {self._path} cannot be written any more ({error.strerror or error}): "
                f"it goes {least}to event {events}, and the job goes on without a log"
            )
            self._on_end()

    def _size_bytes(self, writer: LogWriter) -> int:
        return writer.size_bytes + writer.waiting_bytes


def check_bytes_max(bytes_max: int) -> None:
    """Raise a ValueError for a bound with which no log is written."""
    if bytes_max < LOG_BYTES_LEAST:
        raise ValueError(
            f"expected a bound of at least {LOG_BYTES_LEAST} bytes for the run log, got {bytes_max}"
        )


def _say(line: str) -> None:
    with suppress(OSError):  # standard error may go to the same disk
        print(f"offbeat: {line}", file=sys.stderr, flush=True)
