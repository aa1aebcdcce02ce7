"""Frames: the header, and a pure, incremental parser of received bytes.

A frame is a header of 32 bytes and a payload. Control messages and handshakes are whole in one frame; a
tensor message is cut into DATA frames that carry its number (`tag`) and the place of their bytes (`offset` of
`total`), or between nodes that share memory into SHARED frames, which refer to the bytes instead of carrying
them. The reader names the buffers to receive into next, so that the payload of a tensor message lands in its
destination without a copy and the next header is received in the same system call.

This module never touches a socket, a thread or a clock, never unpickles, and never allocates more than one
frame's bounded payload because of a size in a header.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from offbeat.errors import ProtocolError

MAGIC = b"ob"
VERSION = 7
HEADER = struct.Struct("!2sBBIQQQ")  # magic, version, kind, payload length, tag, offset, total
HEADER_BYTES = HEADER.size
SHARED_PAYLOAD = struct.Struct("!QQQ")  # region, offset in it, length: the payload of a SHARED frame
SHARED_PAYLOAD_BYTES = SHARED_PAYLOAD.size
MAX_MESSAGE_BYTES = 1 << 20
MAX_DATA_BYTES = 1 << 20  # in a DATA frame
MAX_SHARED_BYTES = 1 << 22  # covered by a SHARED frame
MAX_HANDSHAKE_BYTES = 4096
READ_AHEAD_BYTES = 128 * 1024
# While more than this is missing of a payload, only the next header is received with it: any other bytes
# would have to be copied from the read-ahead buffer to their destination.
BULK_BYTES = 32 * 1024


class FrameKind(IntEnum):
    """The kinds of frames."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSE = 5
    MESSAGE = 6
    DATA = 7
    HEARTBEAT = 8
    BYE = 9
    REGION = 10  # region `tag` of `total` bytes is exported from now on; its descriptor comes with this frame
    SHARED = 11  # as DATA, but the bytes lie in a region
    SHARED_ACK = 12  # `total` SHARED frames more have been read, in the order in which they were sent
    WITHDRAW = 13  # region `tag` is not exported any more
    ACK = 14  # `total` frames have been received in this session
    SKIP = 15  # in place of a frame whose message was forgotten before it could be sent again


_HANDSHAKE = frozenset(
    {FrameKind.HELLO, FrameKind.CHALLENGE, FrameKind.PROOF, FrameKind.WELCOME, FrameKind.REFUSE}
)
_LIMITS = {int(kind): MAX_HANDSHAKE_BYTES for kind in _HANDSHAKE} | {
    int(FrameKind.MESSAGE): MAX_MESSAGE_BYTES,
    int(FrameKind.DATA): MAX_DATA_BYTES,
    int(FrameKind.HEARTBEAT): 0,
    int(FrameKind.BYE): 0,
    int(FrameKind.REGION): 0,
    int(FrameKind.SHARED): SHARED_PAYLOAD_BYTES,
    int(FrameKind.SHARED_ACK): 0,
    int(FrameKind.WITHDRAW): 0,
    int(FrameKind.ACK): 0,
    int(FrameKind.SKIP): 0,
}
# Frames that a session counts, and sends again after its connection broke. SHARED_ACK and the like are not
# among them: connections on which memory is shared are not resumed.
NUMBERED = frozenset({int(FrameKind.MESSAGE), int(FrameKind.DATA), int(FrameKind.BYE), int(FrameKind.SKIP)})
_TLS_RECORDS = (b"\x16\x03", b"\x15\x03")  # begin a handshake, an alert
_DATA, _SHARED = int(FrameKind.DATA), int(FrameKind.SHARED)
_WITH_TAG = frozenset({FrameKind.REGION, FrameKind.WITHDRAW})
_WITH_TOTAL = frozenset({FrameKind.REGION, FrameKind.SHARED_ACK, FrameKind.ACK})


class Frame(NamedTuple):
    """One complete frame; `payload` is None where a DATA frame's bytes are already in their destination."""

    kind: int
    tag: int
    offset: int
    length: int
    total: int
    payload: bytes | bytearray | None


Destination = Callable[[int, int, int, int], memoryview | None]
"""(tag, offset, length, total) -> where the `length` bytes belong; None if no receive is posted yet."""


def encode_frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    """Return a whole frame of a kind whose header has no further fields."""
    return HEADER.pack(MAGIC, VERSION, kind, len(payload), 0, 0, 0) + payload


def shared_slice(frame: Frame) -> tuple[int, int, int]:
    """Return the region, the offset in it and the length of a SHARED frame's bytes.

    Raises:
        ProtocolError: the bytes would not lie within the message.
    """
    assert frame.payload is not None
    region, offset, length = SHARED_PAYLOAD.unpack(frame.payload)
    if length > MAX_SHARED_BYTES:
        raise ProtocolError(f"expected a SHARED frame of at most {MAX_SHARED_BYTES} bytes, got {length}")
    if not length or frame.offset + length > frame.total:
        raise ProtocolError(
            f"expected bytes within a message of {frame.total}, got {length} bytes from offset {frame.offset}"
        )
    return region, offset, length


class FrameReader:
    """Turns received bytes into frames, in order, or raises ProtocolError.

    Receive into `buffers()`, report with `on_received(n)` how many bytes were received, then call
    `next_frame()` until it is None. The destination of a frame is looked up when its header is read, after
    the frame before it was returned, so an effect of processing one frame applies to the next one. After a
    ProtocolError the reader is not usable.

    Args:
        destination: where the payload of a DATA frame belongs; may raise ProtocolError. None allows handshake
            frames only, until `end_handshake` allows only the other kinds.
        read_ahead_bytes: size of the buffer through which small frames are received many at a time.
    """

    def __init__(self, destination: Destination | None, *, read_ahead_bytes: int = READ_AHEAD_BYTES) -> None:
        if read_ahead_bytes < HEADER_BYTES:
            raise ValueError(f"read_ahead_bytes must hold a header ({HEADER_BYTES}), got {read_ahead_bytes}")
        handshaking = destination is None
        self._destination = destination or _no_destination
        self._handshaking = handshaking
        self._ahead_bytes = read_ahead_bytes
        self._resize(min(read_ahead_bytes, MAX_HANDSHAKE_BYTES) if handshaking else read_ahead_bytes)
        self._start = 0  # received and not yet parsed: ahead[start:end]
        self._end = 0
        # The frame whose payload is received directly into its destination; nothing is read ahead then.
        self._current: Frame | None = None
        self._rest = memoryview(b"")

    @property
    def is_partial(self) -> bool:
        """Whether a frame has been received in part."""
        return self._current is not None or self._end > self._start

    @property
    def partial_data_frame(self) -> Frame | None:
        """The tensor frame that has been received in part into its destination, if there is one."""
        current = self._current
        return current if current is not None and current.payload is None else None

    @property
    def missing_bytes(self) -> int:
        """How many bytes of the current payload are still to be received."""
        return len(self._rest)

    def end_handshake(self, destination: Destination) -> None:
        """End the handshake: from the next frame on, allow only frames that are no handshake."""
        kept = bytes(self._ahead[self._start : self._end])
        self._destination = destination
        self._handshaking = False
        self._resize(self._ahead_bytes)
        self._ahead[: len(kept)] = kept
        self._start, self._end = 0, len(kept)

    def buffers(self) -> list[memoryview]:
        """Return the buffers to receive the next bytes into, in order; none of them is empty."""
        if self._current is not None:
            return [self._rest, self._ahead_header if len(self._rest) > BULK_BYTES else self._ahead]
        return [self._ahead[self._end :] if self._end else self._ahead]

    def on_received(self, n: int) -> None:
        """Account for `n` bytes that were received into `buffers()`."""
        missing = len(self._rest)
        if n < missing:
            self._rest = self._rest[n:]
        elif missing:
            self._rest = self._rest[missing:]
            self._end = n - missing
        else:
            self._end += n

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None where more bytes must be received first.

        Raises:
            ProtocolError: the bytes violate the protocol; the text says what was expected.
        """
        if self._current is not None:
            return None if len(self._rest) else self._finish()
        available = self._end - self._start - HEADER_BYTES
        if available < 0:
            self._compact()
            return None
        kind, length, tag, offset, total = self._header()
        into = self._destination(tag, offset, length, total) if kind == _DATA else None
        begin = self._start + HEADER_BYTES
        if available < length:
            self._receive_directly(Frame(kind, tag, offset, length, total, None), into, begin)
            return None
        end = begin + length
        self._start = end
        if into is not None:
            into[:] = self._ahead[begin:end]
            return Frame(kind, tag, offset, length, total, None)
        return Frame(kind, tag, offset, length, total, bytes(self._ahead[begin:end]))

    def discard_tags(self, first: int, last: int) -> None:
        """Stop writing into the destination of the message being received if first <= tag < last.

        `next_frame` still returns its frame, with a meaningless payload.
        """
        current = self._current
        if current is not None and current.payload is None and first <= current.tag < last:
            discarded = bytearray(current.length)
            self._current = current._replace(payload=discarded)
            self._rest = memoryview(discarded)[current.length - len(self._rest) :]

    def _resize(self, size: int) -> None:
        self._ahead = memoryview(bytearray(size))
        self._ahead_header = self._ahead[:HEADER_BYTES]

    def _header(self) -> tuple[int, int, int, int, int]:
        """Parse and check the header at the start of the read-ahead bytes."""
        magic, version, kind, length, tag, offset, total = HEADER.unpack_from(self._ahead, self._start)
        if magic in _TLS_RECORDS:
            raise ProtocolError(
                "expected a frame, got a TLS record: the other node uses TLS, and this one does not"
            )
        if magic != MAGIC:
            raise ProtocolError(f"expected a frame that starts with {MAGIC!r}, got {magic!r}")
        if version != VERSION:
            raise ProtocolError(f"expected protocol version {VERSION}, got version {version}")
        limit = _LIMITS.get(kind)
        if limit is None:
            raise ProtocolError(f"expected a frame kind from 1 to {len(_LIMITS)}, got {kind}")
        if (kind in _HANDSHAKE) != self._handshaking:
            wanted = "a handshake frame" if self._handshaking else "a frame that is no handshake"
            raise ProtocolError(f"expected {wanted}, got {FrameKind(kind).name}")
        if length > limit:
            raise ProtocolError(
                f"expected at most {limit} bytes in a {FrameKind(kind).name} frame, got {length}"
            )
        if kind == _DATA:
            if offset + length > total:
                raise ProtocolError(
                    f"expected bytes within a message of {total}, got {length} bytes from offset {offset}"
                )
            if not length and total:
                raise ProtocolError(f"expected at least one byte of a message of {total}, got none")
        elif kind == _SHARED:
            if length != SHARED_PAYLOAD_BYTES:
                raise ProtocolError(f"expected {SHARED_PAYLOAD_BYTES} bytes in a SHARED frame, got {length}")
        elif offset or bool(tag) != (kind in _WITH_TAG) or bool(total) != (kind in _WITH_TOTAL):
            raise ProtocolError(
                f"expected {_fields(kind)} in a {FrameKind(kind).name} frame, got {tag}, {offset}, {total}"
            )
        return kind, length, tag, offset, total

    def _receive_directly(self, frame: Frame, into: memoryview | None, begin: int) -> None:
        """Let the rest of a payload be received into its destination, or into new memory without one.

        This receives nothing: it moves the bytes that were read ahead, from index `begin`, to the start of
        the destination, and `buffers()` then names the rest of it.
        """
        if into is None:
            payload = bytearray(frame.length)
            frame = frame._replace(payload=payload)
            into = memoryview(payload)
        present = self._end - begin
        into[:present] = self._ahead[begin : self._end]
        self._current = frame
        self._rest = into[present:]
        self._start = self._end = 0

    def _finish(self) -> Frame:
        frame = self._current
        assert frame is not None
        self._current = None
        self._rest = memoryview(b"")
        if frame.kind != _DATA and frame.payload is not None:
            return frame._replace(payload=bytes(frame.payload))
        return frame

    def _compact(self) -> None:
        """Move an incomplete header to the front of the buffer, to make room for its rest."""
        if self._start:
            kept = self._end - self._start
            if kept:
                self._ahead[:kept] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, kept


def _fields(kind: int) -> str:
    fields = {"tag": kind in _WITH_TAG, "offset": False, "total": kind in _WITH_TOTAL}
    without = " or ".join(name for name, is_used in fields.items() if not is_used)
    return " and ".join([*("a " + name for name, is_used in fields.items() if is_used), f"no {without}"])


def _no_destination(tag: int, offset: int, length: int, total: int) -> memoryview | None:
    return None
