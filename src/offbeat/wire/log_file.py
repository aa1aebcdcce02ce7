"""A run log: JSON lines, written by one thread and read as a whole.

The first line is a header with the log's version and the job's policies; then comes every event in the order
in which the policies received it, each followed by the actions that answered it. A log of bounded size is a
series of such files, its parts: `log.000001.jsonl`, `log.000002.jsonl`, …, and `log.jsonl`, which is the
newest. The header of each part but the first holds the state of the policies at its beginning, so that every
part can be replayed without the parts before it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from offbeat.errors import ProtocolError
from offbeat.events import Action, Event
from offbeat.wire.codec import (
    MALFORMED,
    PlainEntry,
    append_json,
    decode_json,
    entry_schema,
    is_event,
    to_plain,
)

LOG_VERSION: Final = 4
_BUFFER_BYTES_MAX: Final = 64 * 1024
_HEADER_BYTES_MAX: Final = 64 * 1024 * 1024  # a file that is no log may be one line of any length
_VERSION_KEY: Final = "offbeat_log"
EVENTS_BEFORE_KEY: Final = "events_before"
_LOG_BEGINS: Final = f'{{"{_VERSION_KEY}":'.encode()


def log_schema() -> dict[str, Any]:
    """Return the JSON Schema of a line of a run log: its header, an event or an action."""
    schema = entry_schema()
    header = {
        "title": "Header",
        "description": "The first line of a run log, or of one part of it.",
        "type": "object",
        "properties": {
            _VERSION_KEY: {"const": LOG_VERSION},
            "policies": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}, "arguments": {"type": "object"}},
                    "required": ["path"],
                },
            },
            EVENTS_BEFORE_KEY: {"type": "integer", "minimum": 0},
        },
        "required": [_VERSION_KEY, "policies"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of an offbeat run log",
        "anyOf": [{"$ref": "#/$defs/Header"}, *schema["anyOf"]],
        "$defs": {"Header": header, **schema["$defs"]},
    }


class LogWriter:
    """Writes a run log, or one part of it; for one thread.

    A line reaches the file when more than 64 KiB are buffered, or at `flush`, which the caller calls on a
    timer: so the caller bounds the loss when a run is killed. The buffer is written only before an event,
    never between an event and its actions.

    Args:
        path: the file; an existing one is replaced.
        header: plain data for the first line, among them "policies": a list of {"path": "module:Class",
            "arguments": {…}} in the order in which they handle events. None to continue the log in the file,
            from where `truncate` then says.

    Attributes:
        events: events that have reached the file, each with its actions.

    Raises:
        OSError: the file cannot be written; also from every method. Nothing can be added then, and the file
            ends with a whole event wherever it can still be truncated.
    """

    def __init__(self, path: str | Path, header: dict[str, Any] | None) -> None:
        self.events = 0
        self._buffer = bytearray()
        self._starts: list[int] = []  # offsets of the events in the buffer
        mode = "r+b" if header is None else "wb"
        if header is not None:
            append_json({_VERSION_KEY: LOG_VERSION, **header}, self._buffer)
        self._file = Path(path).open(mode, buffering=0)  # noqa: SIM115 (open until close)
        self.flush()

    @property
    def is_buffer_full(self) -> bool:
        """Whether the next event flushes the buffer."""
        return len(self._buffer) > _BUFFER_BYTES_MAX

    @property
    def is_regular_file(self) -> bool:
        """Whether this is a file that can be truncated and renamed, and no pipe or device."""
        return stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    @property
    def size_bytes(self) -> int:
        """The size of the file, without the buffer."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def buffered_bytes(self) -> int:
        """The size of the buffer."""
        return len(self._buffer)

    def reopen(self, path: str | Path) -> None:
        """Continue in a file that has a header already; the buffer is dropped."""
        file = Path(path).open("r+b", buffering=0)  # noqa: SIM115 (open until close)
        self._file.close()
        self._file = file

    def truncate(self, size_bytes: int, events: int) -> None:
        """Truncate the file to `size_bytes` and continue there; the buffer is dropped.

        A file that is not regular (a pipe, a device) keeps its content.

        Args:
            size_bytes: an earlier `size_bytes` of this file.
            events: the value of `events` at that time.

        Raises:
            OSError: the file is shorter.
        """
        self._discard_buffer()
        self.events = events
        if self.is_regular_file:
            if self.size_bytes < size_bytes:
                raise OSError(errno.EIO, f"it has only {self.size_bytes} of {size_bytes} bytes")
            self._file.truncate(size_bytes)
            self._file.seek(size_bytes)

    def add_event(self, event: Event) -> None:
        """Add an event that the policies handle."""
        self.add_plain(to_plain(event))

    def add_actions(self, actions: Sequence[Action]) -> None:
        """Add the actions that answer the last event, in their order."""
        for action in actions:
            append_json(to_plain(action), self._buffer)

    def add_plain(self, event: PlainEntry, actions: Sequence[PlainEntry] = ()) -> None:
        """Add an event and the actions that answer it, as plain data."""
        if self.is_buffer_full:
            self.flush()
        start = len(self._buffer)
        append_json(event, self._buffer)
        self._starts.append(start)
        for action in actions:
            append_json(action, self._buffer)

    def flush(self) -> None:
        """Write every buffered line to the operating system."""
        written_bytes = 0
        try:
            while self._buffer:
                written = self._file.write(self._buffer)
                del self._buffer[:written]
                written_bytes += written
        except OSError:
            self._truncate_to_whole_event(written_bytes)
            raise
        self.events += len(self._starts)
        self._starts.clear()

    def close(self) -> None:
        """Flush and close the file; a second call does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def close_unflushed(self) -> None:
        """Close the file without its buffer; for a file that cannot be written."""
        self._discard_buffer()
        with suppress(OSError):
            self._file.close()

    def _truncate_to_whole_event(self, written_bytes: int) -> None:
        """Truncate a partial event after a flush that failed at this offset, and drop the buffer."""
        started = bisect_right(self._starts, written_bytes)
        begin = self._starts[started - 1] if started else 0
        self.events += max(0, started - 1)
        self._discard_buffer()
        with suppress(OSError):
            if self.is_regular_file:
                self._file.truncate(self._file.tell() - written_bytes + begin)

    def _discard_buffer(self) -> None:
        self._buffer.clear()
        self._starts.clear()


def log_part_path(path: Path, number: int) -> Path:
    """Return the path of a log's finished part, numbered from 1."""
    return path.with_name(f"{path.stem}.{number:06d}{path.suffix}")


def finished_log_parts(path: Path) -> dict[int, Path]:
    """Return the existing finished parts of a log by number, oldest first.

    Files with such a name that are no run logs are skipped.
    """
    pattern = re.compile(rf"{re.escape(path.stem)}\.(\d{{6,}}){re.escape(path.suffix)}")
    try:
        names = os.listdir(path.parent)
    except OSError:
        return {}
    found = {int(match[1]): path.parent / match[0] for match in map(pattern.fullmatch, names) if match}
    return {number: part for number, part in sorted(found.items()) if _is_log(part)}


def _is_log(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LOG_BEGINS)) == _LOG_BEGINS
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run log, or one part of it, as read from its file.

    Attributes:
        header: the first line, including the version.
        entries: events, each followed by its actions.
        is_truncated: the file ends in the middle of a line, which was skipped, and the last event may lack
            actions: the run was killed during a write, or could not write any more.
    """

    header: dict[str, Any]
    entries: list[Event | Action]
    is_truncated: bool = False

    @property
    def events_before(self) -> int:
        """Events in the parts before this one; 0 for a whole log."""
        before = self.header.get(EVENTS_BEFORE_KEY, 0)
        return before if isinstance(before, int) else 0


def read_logs(path: str | Path) -> dict[Path, RunRecord]:
    """Read all existing parts of a run log, oldest first; most logs have one.

    Raises:
        FileNotFoundError, ValueError: see `read_log`.
    """
    path = Path(path)
    parts = list(finished_log_parts(path).values())
    if path.exists() or not parts:
        parts.append(path)
    return {part: read_log(part) for part in parts}


def read_log(path: str | Path) -> RunRecord:
    """Read a run log, or one part of it; only its last line may be incomplete.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, no run log, of a newer version, or has an invalid line; the message
            names the file and the line.
    """
    path = Path(path)
    entries: list[Event | Action] = []
    line = b""
    with path.open("rb") as file:
        header = parse_header(path, file.readline(_HEADER_BYTES_MAX))
        for number, line in enumerate(file, start=2):
            try:
                entry = decode_json(line)
            except ProtocolError as error:
                if not line.endswith(b"\n"):
                    return RunRecord(header=header, entries=entries, is_truncated=True)
                raise ValueError(f"{path}, line {number}: {error}") from None
            if not entries and not is_event(entry):
                raise ValueError(f"{path}, line {number}: expected an event before the first action")
            entries.append(entry)
    return RunRecord(header=header, entries=entries, is_truncated=bool(line) and not line.endswith(b"\n"))


def parse_header(path: Path, line: bytes) -> dict[str, Any]:
    """Return the header in a log's first line.

    Args:
        path: of the log, for the error.
        line: with or without its line feed.

    Raises:
        ValueError: see `read_log`.
    """
    expected = f"expected a run log, whose first line is a JSON object with {_VERSION_KEY!r}"
    if not line:
        raise ValueError(f"{path} is empty: {expected}")
    try:
        header = msgspec.json.decode(line, type=dict[str, Any])
    except MALFORMED:
        raise ValueError(f"{path} is not a run log: {expected}") from None
    version = header.get(_VERSION_KEY)
    if type(version) is not int or version < 1:
        raise ValueError(f"{path} is not a run log: {expected}")
    if version != LOG_VERSION:
        raise ValueError(
            f"{path} is a run log of version {version}, expected version {LOG_VERSION}: "
            "read it with the offbeat that wrote it"
        )
    return header
