"""What a coordinator has heard and answered, in memory that outlives its process.

Two files without a name, of which one is in force:

    serial (8 bytes), length of the snapshot (8 bytes), snapshot, then records: length (4 bytes), record

A record is whole or not there. A new snapshot is written to the other file, whose serial is written last and
puts it in force: so a process may be killed between any two bytes, and the journal stays small however long a
job runs. The files belong to the kernel, not to the process that writes: nothing is synced, for it is the end
of a process that has to be survived, not of its host.

This module never knows what a snapshot or a record says.
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
        self._files = (_nameless(), _nameless())
        self._buffer = bytearray()
        self._active = 0
        os.pwrite(self._files[0], _HEAD.pack(1, 0), 0)
        self._serial, self._end = 1, _HEAD.size
        self._records = 0

    @property
    def records(self) -> int:
        """How many records were added since the last snapshot."""
        return self._records

    @property
    def size_bytes(self) -> tuple[int, ...]:
        """How long the files are; something else whenever something was written, by whichever process."""
        return tuple(os.fstat(file).st_size for file in self._files)

    def read(self) -> tuple[bytes, list[bytes]]:
        """Return the last snapshot, b"" before the first, and the records since; goes on behind them."""
        heads = [_HEAD.unpack(os.pread(file, _HEAD.size, 0) or bytes(_HEAD.size)) for file in self._files]
        self._active = max((0, 1), key=lambda which: heads[which])
        self._serial, length = heads[self._active]
        file = self._files[self._active]
        data = memoryview(_whole(file))
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

    def add(self, record: bytes) -> None:
        """Add a record; it outlives this process from the next `flush` on."""
        self._buffer += _LENGTH.pack(len(record))
        self._buffer += record
        self._records += 1
        if len(self._buffer) > _BUFFER_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Hand every record to the operating system."""
        while self._buffer:
            written = os.pwrite(self._files[self._active], self._buffer, self._end)
            self._end += written
            del self._buffer[:written]

    def renew(self, snapshot: bytes) -> None:
        """Put a snapshot in place of everything so far."""
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


def _nameless() -> int:
    """A file that no folder shows, and that is gone with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("offbeat-journal")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _whole(file: int) -> bytes:
    data = bytearray()
    while piece := os.pread(file, 1 << 20, len(data)):
        data += piece
    return bytes(data)
