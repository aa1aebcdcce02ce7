"""Send queue of one peer: messages sorted by urgency, cut into frames, kept until they are acknowledged.

Theory of operation
-------------------

Order: control messages go before all tensor bytes; tensor messages go by (priority, order of arrival), a
lower number first. A frame that the kernel has accepted in part is finished; everything behind it can still
be overtaken. So frames are short, except those of a message that is so long that a longer frame delays an
urgent one by a small part of the message's own time.

One write has three steps. `gather` returns buffers of about one frame, in this order: the rest of a begun
frame, an acknowledgement that is due, frames to be sent again or else new ones. The endpoint passes them to
the kernel in one call. `on_written(n)` then accounts for the `n` bytes accepted: it marks what went out,
keeps the rest of a frame that went out in part (`_begun`), and puts messages that are not wholly out back in
the heap.

Acknowledgement: for a session that outlives its connections (`keeps_unacked`), each numbered frame stays in
`_kept` until the peer has acknowledged it: the header and a view of the bytes, never a copy. Frames are
numbered by their order alone: `_kept_from` is the number of the first one kept, `_out` counts those sent on
this connection. After `rewind` (the connection broke) and `resume` (the next one says what the peer has
received) the remaining frames go out again, in the same order, before anything else. So such a message is
done when its last frame is acknowledged; without `keeps_unacked`, when the kernel has accepted it.

Shared memory: of a message whose bytes lie in exported memory, only their place is sent. Announced bytes
cannot be overtaken, so those not yet read (`_unread`) are limited; the message is done when the peer has read
its last piece.

`drop` forgets tensor messages: a begun frame goes on from a copy, a kept one becomes a SKIP, so that the
numbering holds. Announced pieces cannot be withdrawn.

This module never touches a socket and never copies tensor bytes, except the rest of a begun frame that is
forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from offbeat.errors import ProtocolError
from offbeat.runtime.transport.framing import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_DATA_BYTES,
    MAX_SHARED_BYTES,
    NUMBERED,
    SHARED_PAYLOAD,
    SHARED_PAYLOAD_BYTES,
    VERSION,
    FrameKind,
)
from offbeat.runtime.transport.shared_memory import UNACKED_BYTES, Region

FRAME_STEP_BYTES = 64 * 1024
MAX_FRAMES_AT_ONCE = 64
# A long message may have longer frames, of at most 1 / LONG_MESSAGE_FRAMES_MIN of its length: a frame delays
# an urgent message by at most that part of the time that the long one needs.
LONG_MESSAGE_FRAMES_MIN = 4
LONG_FRAME_BYTES = 512 * 1024
SHARED_FRAME_BYTES = HEADER_BYTES + SHARED_PAYLOAD_BYTES

_DATA, _SHARED, _REGION = int(FrameKind.DATA), int(FrameKind.SHARED), int(FrameKind.REGION)
_ACK, _SKIP = int(FrameKind.ACK), int(FrameKind.SKIP)
_SKIP_HEADER = HEADER.pack(MAGIC, VERSION, _SKIP, 0, 0, 0, 0)
_EMPTY = memoryview(b"")
_FIRST_KEY: tuple[int, int, int] = (0, -1, 0)  # key of frames that are sent again, and of acknowledgements
_TENSORS = frozenset({_DATA, _SHARED})

SendKey = tuple[int, int, int]
"""(0 for control or 1 for tensor bytes, priority, order of arrival)."""


class QueuedMessage:
    """A queued message: `data` is the part of it to send, from `offset` of `total` bytes on.

    Attributes:
        kind: of its frames. SHARED ones say where in the region `exported` the data lies; a REGION frame
            announces that region, and `data` is an empty view that keeps its memory.
        uses_long_frames: SHARED frames are as few as possible.
    """

    __slots__ = (
        "data",
        "exported",
        "key",
        "kind",
        "offset",
        "on_done",
        "sent_bytes",
        "tag",
        "total",
        "uses_long_frames",
    )

    def __init__(
        self,
        kind: int,
        key: SendKey,
        data: memoryview,
        *,
        tag: int = 0,
        offset: int = 0,
        total: int = 0,
        on_done: Callable[[], None] | None = None,
        exported: tuple[Region, int] | None = None,
        uses_long_frames: bool = False,
    ) -> None:
        self.uses_long_frames = uses_long_frames
        self.exported = exported
        self.kind = kind
        self.key = key
        self.data = data
        self.tag = tag
        self.offset = offset
        self.total = total
        self.on_done = on_done
        self.sent_bytes = 0  # bytes of data in frames that the kernel has accepted, wholly or in part


class _Frame(NamedTuple):
    """A numbered frame that the peer has not acknowledged."""

    header: bytes
    data: memoryview
    item: QueuedMessage
    is_last: bool  # of its message


class Outbox:
    """The messages to one peer.

    `gather()` the next buffers to send, report with `on_written(n)` how many of their bytes the kernel
    accepted, and get the messages that are done: wholly sent or, where frames are kept until they are
    acknowledged, the ones that `on_ack(n)` returns. Messages in shared memory are done when the peer has read
    them.

    Args:
        frame_bytes: see below.
        unacked_bytes: no more shared bytes are announced while so many are announced and not read.

    Attributes:
        frame_bytes: payload of one frame at most, except of long messages; a multiple of 64 KiB.
        keeps_unacked: whether numbered frames are kept until the peer has acknowledged them.
        announced_regions: numbers of the regions that were announced to the peer.
        descriptor: to be sent along with the gathered buffers, if not None.
    """

    def __init__(self, frame_bytes: int, unacked_bytes: int = UNACKED_BYTES) -> None:
        self.frame_bytes = frame_bytes
        self._unread_bytes_max = unacked_bytes
        self._heap: list[tuple[SendKey, QueuedMessage]] = []
        self.keeps_unacked = False
        self._kept: deque[_Frame] = deque()  # not acknowledged, in order
        self._kept_from = 0  # the number of the first of them
        self._out = 0  # how many of them were sent on this connection
        self._ack: int | None = None  # frames of the peer to acknowledge
        self._ack_header = memoryview(bytearray(HEADER_BYTES))
        self._ack_item = QueuedMessage(_ACK, _FIRST_KEY, _EMPTY)
        self.announced_regions: set[int] = set()
        self.descriptor: int | None = None
        self._unread: deque[tuple[QueuedMessage, int, bool]] = (
            deque()
        )  # message, bytes, whether they are its last
        self._unread_bytes = 0
        # What was gathered: whether an acknowledgement, the frames to be sent again, and the new ones as
        # (message, bytes of it, bytes of the frame).
        self._gathered_ack = False
        self._gathered_kept: list[_Frame] = []
        self._gathered: list[tuple[QueuedMessage, int, int]] = []
        self._begun: list[memoryview] = []  # the rest of a frame that the kernel accepted in part
        self._begun_of: QueuedMessage | None = None
        self._headers = [memoryview(bytearray(SHARED_FRAME_BYTES)) for _ in range(MAX_FRAMES_AT_ONCE)]

    def __bool__(self) -> bool:
        return bool(self._heap) or self._begun_of is not None or self._out < len(self._kept)

    @property
    def is_frame_begun(self) -> bool:
        """Whether the kernel has accepted a part of a frame."""
        return self._begun_of is not None

    @property
    def next_key(self) -> SendKey | None:
        """The lowest key of what is queued; None where nothing may be sent now."""
        if self._ack is not None or self._out < len(self._kept):
            return _FIRST_KEY
        head = self._heap[0][0] if self._heap and not self._waits_for_reads(self._heap[0][1]) else None
        if self._begun_of is None:
            return head
        return self._begun_of.key if head is None else min(head, self._begun_of.key)

    def add(self, item: QueuedMessage) -> None:
        """Queue a message."""
        heappush(self._heap, (item.key, item))

    def items(self) -> list[QueuedMessage]:
        """Return every queued message, in no particular order."""
        return [item for _, item in self._heap]

    def gather(self) -> tuple[list[memoryview], int]:
        """Return the buffers to send next, about one frame's worth, and their bytes in all."""
        views = list(self._begun)
        size = sum(map(len, views))
        gathered = self._gathered
        gathered.clear()
        self.descriptor = None
        if self._ack is not None:
            HEADER.pack_into(self._ack_header, 0, MAGIC, VERSION, _ACK, 0, 0, 0, self._ack)
            views.append(self._ack_header)
            size += HEADER_BYTES
            self._gathered_ack = True
        if self._out < len(self._kept):
            return views, size + self._gather_kept(views)
        heap, frame_bytes = self._heap, self.frame_bytes
        unread_bytes = self._unread_bytes
        while heap and size < frame_bytes and len(gathered) < MAX_FRAMES_AT_ONCE:
            item = heap[0][1]
            if item.kind == _SHARED and unread_bytes >= self._unread_bytes_max:
                break
            if item.kind == _REGION:
                if views:
                    break  # a descriptor must go with the first bytes of a write: its own frame's
                assert item.exported is not None
                self.descriptor = item.exported[0].descriptor
            heappop(heap)
            header = self._headers[len(gathered)]
            length = self._pack(item, header)
            if item.kind == _SHARED:
                views.append(header)
                size_now = SHARED_FRAME_BYTES
                unread_bytes += length
            else:
                views.append(header[:HEADER_BYTES])
                if length:
                    views.append(item.data[item.sent_bytes : item.sent_bytes + length])
                size_now = HEADER_BYTES + length
            gathered.append((item, length, size_now))
            size += size_now
            if self.descriptor is not None:
                break
        return views, size

    def on_written(self, n: int) -> list[QueuedMessage]:
        """Account for `n` gathered bytes that the kernel accepted; return the messages that are done."""
        finished: list[QueuedMessage] = []
        begun_of = self._begun_of
        if begun_of is not None:
            n = self._consume_begun(n)
            if self._begun_of is None and self._is_done_when_out(begun_of):
                finished.append(begun_of)
        if self._gathered_ack:
            n = self._consume_ack(n)
        if self._gathered_kept:
            n = self._consume_kept(n)
        for i, (item, length, size) in enumerate(self._gathered):
            if n > 0:
                data = item.data[item.sent_bytes : item.sent_bytes + length]
                item.sent_bytes += length
                is_out = item.sent_bytes == len(item.data)
                if item.kind == _SHARED:
                    self._announce(item, length, is_out)
                elif self.keeps_unacked and item.kind in NUMBERED:
                    self._kept.append(_Frame(bytes(self._headers[i][:HEADER_BYTES]), data, item, is_out))
                    self._out += 1
                if n < size:
                    header = memoryview(bytes(self._headers[i]))
                    self._keep_rest(
                        item, [header] if item.kind == _SHARED else [header[:HEADER_BYTES], data], n
                    )
                elif is_out and self._is_done_when_out(item):
                    finished.append(item)
                n -= size
                if is_out:
                    continue
            heappush(self._heap, (item.key, item))
        self._gathered.clear()
        return finished

    def schedule_ack(self, received: int) -> None:
        """Acknowledge, with the next write, that so many frames of the peer were received."""
        self._ack = received

    def on_ack(self, received: int) -> list[QueuedMessage]:
        """Process an acknowledgement of `received` frames in all; return the messages that are done.

        Raises:
            ProtocolError: so many were never sent.
        """
        sent = self._kept_from + self._out
        if not self._kept_from <= received <= sent:
            raise ProtocolError(
                f"expected from {self._kept_from} to {sent} frames to be acknowledged, got {received}"
            )
        finished: list[QueuedMessage] = []
        for _ in range(received - self._kept_from):
            frame = self._kept.popleft()
            if frame.is_last and frame.item.on_done is not None:
                finished.append(frame.item)
        self._out -= received - self._kept_from
        self._kept_from = received
        return finished

    def rewind(self) -> None:
        """Prepare for the next connection: every frame that is not acknowledged is sent again on it."""
        self._out = 0
        self._begun = []
        self._begun_of = None
        self._ack = None

    def resume(self, received: int) -> list[QueuedMessage]:
        """Continue on a new connection after the `received` frames the peer has; returns as `on_ack`."""
        self._out = len(self._kept)  # the peer may have received all of them
        finished = self.on_ack(received)
        self._out = 0
        return finished

    def on_shared_ack(self, n: int) -> list[QueuedMessage]:
        """Process a report that the peer has read `n` more SHARED frames; return the messages that are done.

        Raises:
            ProtocolError: fewer than `n` are announced and not read.
        """
        if n > len(self._unread):
            raise ProtocolError(f"expected at most {len(self._unread)} SHARED frames to be read, got {n}")
        finished: list[QueuedMessage] = []
        for _ in range(n):
            item, length, is_last = self._unread.popleft()
            assert item.exported is not None
            item.exported[0].unacked_frames -= 1
            self._unread_bytes -= length
            if is_last:
                finished.append(item)
        return finished

    def _pack(self, item: QueuedMessage, header: memoryview) -> int:
        """Write the header of an item's next frame; return how many of its bytes the frame covers."""
        kind, sent = item.kind, item.sent_bytes
        length = len(item.data) - sent
        if kind == _SHARED:
            assert item.exported is not None
            length = min(length, MAX_SHARED_BYTES if item.uses_long_frames else MAX_DATA_BYTES)
            region, offset = item.exported
            HEADER.pack_into(
                header,
                0,
                MAGIC,
                VERSION,
                kind,
                SHARED_PAYLOAD_BYTES,
                item.tag,
                item.offset + sent,
                item.total,
            )
            SHARED_PAYLOAD.pack_into(header, HEADER_BYTES, region.number, offset + sent, length)
            return length
        if kind == _DATA:
            share = (
                min(item.total // LONG_MESSAGE_FRAMES_MIN, LONG_FRAME_BYTES)
                // FRAME_STEP_BYTES
                * FRAME_STEP_BYTES
            )
            length = min(length, max(self.frame_bytes, share))
        offset = item.offset + sent if kind == _DATA else 0
        HEADER.pack_into(header, 0, MAGIC, VERSION, kind, length, item.tag, offset, item.total)
        return length

    def _announce(self, item: QueuedMessage, length: int, is_last: bool) -> None:
        """Record that `length` bytes were announced to the peer, which will read them."""
        assert item.exported is not None
        item.exported[0].unacked_frames += 1
        self._unread.append((item, length, is_last))
        self._unread_bytes += length

    def _gather_kept(self, views: list[memoryview]) -> int:
        """Add frames to be sent again, about one frame's worth; return their bytes."""
        size = 0
        for frame in islice(self._kept, self._out, self._out + MAX_FRAMES_AT_ONCE):
            self._gathered_kept.append(frame)
            views.append(memoryview(frame.header))
            if frame.data:
                views.append(frame.data)
            size += HEADER_BYTES + len(frame.data)
            if size >= self.frame_bytes:
                break
        return size

    def _consume_ack(self, n: int) -> int:
        """Account for the acknowledgement in the accepted bytes; return how many are left over."""
        self._gathered_ack = False
        if n > 0:
            self._ack = None
            if n < HEADER_BYTES:
                self._keep_rest(self._ack_item, [memoryview(bytes(self._ack_header))], n)
        return n - HEADER_BYTES

    def _consume_kept(self, n: int) -> int:
        """Account for frames that were sent again; return how many accepted bytes are left over."""
        for frame in self._gathered_kept:
            if n <= 0:
                break
            size = HEADER_BYTES + len(frame.data)
            self._out += 1
            if n < size:
                self._keep_rest(frame.item, [memoryview(frame.header), frame.data], n)
            n -= size
        self._gathered_kept.clear()
        return n

    def _keep_rest(self, item: QueuedMessage, frame: list[memoryview], n: int) -> None:
        """Keep the rest of a frame of which the kernel has accepted the first `n` bytes."""
        # An empty view would never be consumed, and the frame never be done.
        self._begun = [view for view in frame if len(view)]
        self._begun_of = item
        self._consume_begun(n)

    def _is_done_when_out(self, item: QueuedMessage) -> bool:
        """Whether a message is done when its frame is wholly out."""
        if item.kind == _SHARED or item.sent_bytes < len(item.data):
            return False
        return not (self.keeps_unacked and item.kind in NUMBERED)

    def drop(self, first: int, last: int) -> None:
        """Forget tensor messages with first <= tag < last; their bytes are not read here any more.

        A peer still reads pieces that were announced to it: that cannot be taken back.
        """
        kept = [entry for entry in self._heap if not _within(entry[1], first, last)]
        if len(kept) < len(self._heap):
            self._heap = kept
            heapify(self._heap)
        for item, _, _ in self._unread:
            if _within(item, first, last):
                item.on_done = None
        begun = self._begun_of
        if begun is not None and _within(begun, first, last):
            self._begun = [memoryview(bytes(view)) for view in self._begun]
            begun.data = memoryview(b"")
            begun.sent_bytes = 0
            begun.on_done = None
        for place, frame in enumerate(self._kept):
            if _within(frame.item, first, last):
                frame.item.on_done = None
                self._kept[place] = _Frame(_SKIP_HEADER, _EMPTY, frame.item, False)

    def clear(self, *, keep_control: bool = False) -> None:
        """Drop everything, or everything but control messages and the rest of a begun frame."""
        if keep_control:
            self._heap = [entry for entry in self._heap if entry[1].kind not in _TENSORS]
            heapify(self._heap)
        else:
            self._heap.clear()
            self._begun = []
            self._begun_of = None
            self._unread.clear()
            self._unread_bytes = 0
            self._kept.clear()
            self._kept_from = self._out = 0
            self._ack = None
            self.announced_regions.clear()

    def _waits_for_reads(self, item: QueuedMessage) -> bool:
        return item.kind == _SHARED and self._unread_bytes >= self._unread_bytes_max

    def _consume_begun(self, n: int) -> int:
        """Account for `n` accepted bytes of the begun frame; return how many are left over."""
        while n > 0 and self._begun:
            view = self._begun[0]
            if n < len(view):
                self._begun[0] = view[n:]
                return 0
            n -= len(view)
            del self._begun[0]
        if not self._begun:
            self._begun_of = None
        return n


def _within(item: QueuedMessage, first: int, last: int) -> bool:
    return item.kind in _TENSORS and first <= item.tag < last
