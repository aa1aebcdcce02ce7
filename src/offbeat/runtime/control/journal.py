"""Journal of a coordinator's events and answers, in memory that outlives its process.

Two anonymous files, of which one is valid:

    serial (8 bytes), length of the snapshot (8 bytes), snapshot, then records: length (4 bytes), record

A record is complete or ignored. A new snapshot is written to the other file; its serial, the higher one, is
written last and makes it valid. So a process may be killed between any two bytes, and the journal stays small
however long a job runs. The files belong to the kernel, not to the process that writes: nothing is synced,
because the journal has to survive the end of a process, not of its host.
`offbeat.runtime.processes.supervisor` has the whole procedure.

This module never interprets a snapshot or a record.
"""

from __future__ import annotations

import os
import struct
import tempfile
from typing import Final

_HEAD: Final = struct.Struct("<QQ")
_LENGTH: Final = struct.Struct("<I")
_BUFFER_BYTES_MAX: Final = 16 * 1024


class Journal:
    """A snapshot, and the records since; for one thread of one process at a time.

    Raises:
        OSError: there is no memory for it; also from every method.
    """

    def __init__(self) -> None:
        self._files = (_anonymous_file(), _anonymous_file())
        self._buffer = bytearray()
        self._active = 0
        os.pwrite(self._files[0], _HEAD.pack(1, 0), 0)
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
        heads = [_HEAD.unpack(os.pread(file, _HEAD.size, 0) or bytes(_HEAD.size)) for file in self._files]
        self._active = max((0, 1), key=lambda which: heads[which])
        self._serial, length = heads[self._active]
        file = self._files[self._active]
        data = memoryview(_read_all(file))
        snapshot = bytes(data[_HEAD.size : _HEAD.size + length])
        records: list[bytes] = []
        place = _HEAD.size + length
        while place + _LENGTH.size <= len(data):
            begin = place + _LENGTH.size
            (length,) = _LENGTH.unpack_from(data, place)
            if begin + length > len(data):
                break  # its writer was killed
            records.append(bytes(data[begin : begin + length]))
            place = begin + length
        self._buffer.clear()
        self._end, self._records = place, len(records)
        os.ftruncate(file, place)
        return snapshot, records

    def append(self, record: bytes) -> None:
        """Add a record; it outlives this process from the next `flush` on."""
        self._buffer += _LENGTH.pack(len(record))
        self._buffer += record
        self._records += 1
        if len(self._buffer) > _BUFFER_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write every record to the file."""
        while self._buffer:
            written = os.pwrite(self._files[self._active], self._buffer, self._end)
            self._end += written
            del self._buffer[:written]

    def replace_by_snapshot(self, snapshot: bytes) -> None:
        """Replace the whole journal by a snapshot."""
        old, new = self._files[self._active], self._files[1 - self._active]
        os.ftruncate(new, 0)
        place = _HEAD.size
        view = memoryview(snapshot)
        while view:
            written = os.pwrite(new, view, place)
            place += written
            view = view[written:]
        os.pwrite(new, _HEAD.pack(self._serial + 1, len(snapshot)), 0)
        self._buffer.clear()
        self._active, self._serial = 1 - self._active, self._serial + 1
        self._end, self._records = place, 0
        os.ftruncate(old, 0)


def _anonymous_file() -> int:
    """Return a file without a name, which is gone when the last process closes it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("offbeat-journal")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _read_all(file: int) -> bytes:
    data = bytearray()
    while piece := os.pread(file, 1 << 20, len(data)):
        data += piece
    return bytes(data)
