"""Journal of a coordinator's events and answers, which outlives its process, and on disk its host.

Two files, of which one is valid:

    serial (8 bytes), length of the snapshot (8 bytes), snapshot, then records: length, CRC-32 (4 bytes each),
    record

A record is complete or ignored. A new snapshot is written to the other file; its serial, the higher one, is
written last and makes it valid. So a process may be killed between any two bytes, and the journal stays small
however long a job runs.

Without a folder the files are anonymous: they belong to the kernel, not to the process that writes, and
nothing is synced, because the journal has to survive the end of a process, not of its host. In a folder,
every flush waits until the disk has the data, and a snapshot is on the disk before it becomes valid; one
coordinator at a time may use the folder, which a lock ensures.
`offbeat.runtime.processes.supervisor` has the whole procedure.

This module never interprets a snapshot or a record.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Final, NamedTuple

from offbeat.errors import OffbeatError

_HEAD: Final = struct.Struct("<QQ")
_RECORD: Final = struct.Struct("<II")
_BUFFER_BYTES_MAX: Final = 16 * 1024


class JournalContent(NamedTuple):
    """What a file of a journal holds.

    Attributes:
        serial: the file with the higher one is valid.
        snapshot: b"" before the first.
        records: those since the snapshot.
        end: length in bytes of all this; what follows was not written completely.
    """

    serial: int
    snapshot: bytes
    records: list[bytes]
    end: int


def parse_journal(data: bytes) -> JournalContent:
    """Return the content of a journal's file, which has a whole head."""
    serial, length = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    snapshot, records = data[_HEAD.size : end], []
    while end + _RECORD.size <= len(data):
        begin = end + _RECORD.size
        length, checksum = _RECORD.unpack_from(data, end)
        record = data[begin : begin + length]
        if len(record) < length or zlib.crc32(record) != checksum:
            break  # its writer was killed, or the host lost power
        records.append(record)
        end = begin + length
    return JournalContent(serial, snapshot, records, end)


class Journal:
    """A snapshot, and the records since; for one thread of one process at a time.

    Args:
        folder: holds the files, and is made if it does not exist; what an earlier journal left there is
            continued. None for files that end with the last process that has this journal.

    Raises:
        OSError: there is no memory or no disk space for it; also from every method.
        OffbeatError: another process uses the folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._is_synced = folder is not None
        self._files = (_anonymous_file(), _anonymous_file()) if folder is None else _open_files(folder)
        self._buffer = bytearray()
        self._active = 0
        if not any(self.file_sizes_bytes):
            os.pwrite(self._files[0], _HEAD.pack(1, 0), 0)
            self._sync(self._files[0])
        self._serial, self._end = 1, _HEAD.size
        self._records = 0

    @property
    def records_since_snapshot(self) -> int:
        """How many records were added since the last snapshot."""
        return self._records

    @property
    def file_sizes_bytes(self) -> tuple[int, ...]:
        """The lengths of the files; they change whenever any process writes to the journal."""
        return tuple(os.fstat(file).st_size for file in self._files)

    def read(self) -> tuple[bytes, list[bytes]]:
        """Return the last snapshot, b"" before the first, and the records since; `append` continues after."""
        heads = [_read_head(file) for file in self._files]
        self._active = max((0, 1), key=lambda which: heads[which])
        self._serial, _ = heads[self._active]
        file = self._files[self._active]
        content = parse_journal(_read_all(file))
        self._buffer.clear()
        self._end, self._records = content.end, len(content.records)
        os.ftruncate(file, content.end)
        return content.snapshot, content.records

    def append(self, record: bytes) -> None:
        """Add a record; it outlives this process from the next `flush` on."""
        self._buffer += _RECORD.pack(len(record), zlib.crc32(record))
        self._buffer += record
        self._records += 1
        if len(self._buffer) > _BUFFER_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write every record to the file."""
        if not self._buffer:
            return
        file = self._files[self._active]
        while self._buffer:
            written = os.pwrite(file, self._buffer, self._end)
            self._end += written
            del self._buffer[:written]
        self._sync(file)

    def replace_by_snapshot(self, snapshot: bytes) -> None:
        """Replace the whole journal by a snapshot."""
        old, new = self._files[self._active], self._files[1 - self._active]
        os.ftruncate(new, 0)
        end = _HEAD.size
        view = memoryview(snapshot)
        while view:
            written = os.pwrite(new, view, end)
            end += written
            view = view[written:]
        self._sync(new)
        os.pwrite(new, _HEAD.pack(self._serial + 1, len(snapshot)), 0)
        self._sync(new)
        self._buffer.clear()
        self._active, self._serial = 1 - self._active, self._serial + 1
        self._end, self._records = end, 0
        os.ftruncate(old, 0)

    def _sync(self, file: int) -> None:
        if self._is_synced:
            os.fdatasync(file)


def _open_files(folder: Path) -> tuple[int, int]:
    """Open the journal's files in a folder, locked as long as a process has them open."""
    folder.mkdir(parents=True, exist_ok=True)
    first, second = (
        os.open(folder / f"journal.{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for number in range(2)
    )
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(first)
        os.close(second)
        raise OffbeatError(
            f"expected a folder that no other coordinator uses, got {folder}: end that coordinator, or give "
            "this one another folder"
        ) from None
    directory = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)  # the names of new files
    finally:
        os.close(directory)
    return first, second


def _anonymous_file() -> int:
    """Return a file without a name, which is gone when the last process closes it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("offbeat-journal")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _read_head(file: int) -> tuple[int, int]:
    """Return the serial and the length of the snapshot; zeros for a file without a whole head."""
    head = os.pread(file, _HEAD.size, 0)
    serial, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
    return serial, length


def _read_all(file: int) -> bytes:
    data = bytearray()
    while piece := os.pread(file, 1 << 20, len(data)):
        data += piece
    return bytes(data)
