"""Reads a run log while it grows, part after part."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path
from typing import Final

from offbeat.wire.log_file import finished_log_parts, parse_header

_READ_BYTES: Final = 4 * 1024 * 1024  # some 15,000 entries


class LogTail:
    """Returns the lines of a run log, and those that are appended to it from read to read.

    It begins with the oldest part that exists. When the log continues in a new part, the rest of the old one
    comes first; parts that were removed before they were read are left out. A coordinator that was restarted
    may truncate the log, but then writes the same lines again, which are not read twice. Where another job
    has replaced the log, or the log's last part was taken back, reading starts over.

    Args:
        path: of the newest part, which need not exist yet.

    Attributes:
        restarts: how often reading has started over; what was read before is void then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self._file: FileIO | None = None
        self._part = 0  # the number of the part that is open
        self._header = b""  # of that part, as far as it is known
        self._partial = b""

    @property
    def has_begun(self) -> bool:
        """Whether a header was read."""
        return bool(self._header)

    def read_lines(self) -> list[bytes]:
        """Return the next whole lines, without headers, of about 4 MiB; none if there are none now.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is no run log.
        """
        is_replaced = self._is_replaced()  # before the read, which then has all of the old file
        lines = self._read()
        return self._read_next_part() if is_replaced and not lines else lines

    def _read(self) -> list[bytes]:
        while self._file is not None and (data := self._file.read(_READ_BYTES)):
            *lines, self._partial = (self._partial + data).split(b"\n")
            if lines and not self._header:
                self._header = lines.pop(0)
                part = parse_header(self.path, self._header).get("part", 1)
                if part <= self._part:
                    self.restarts += 1
                    self._part = 0
                    return self._read_next_part()
                self._part = part
            if lines:
                return lines
        return []

    def _is_replaced(self) -> bool:
        """Whether the log has another file, or the file another log."""
        if self._file is None:
            return True
        try:
            newest = self.path.stat()
        except FileNotFoundError:
            return True
        if not os.path.samestat(newest, os.fstat(self._file.fileno())):
            return True
        return not self._header.startswith(os.pread(self._file.fileno(), len(self._header), 0))

    def _read_next_part(self) -> list[bytes]:
        parts = finished_log_parts(self.path)
        following = [number for number in parts if number > self._part]
        path = parts[min(following)] if following else self.path
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            return []
        if self._file is not None:
            self._file.close()
        self._file, self._header, self._partial = file, b"", b""
        return self._read()
