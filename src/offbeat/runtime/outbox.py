"""What goes to one peer next: the queue of outgoing messages, cut into frames in order of urgency.

Control messages go before all tensor bytes; tensor messages go by (priority, order of arrival), a lower
number first. A frame that the kernel has begun to take is finished; everything behind it can still be
overtaken.

This module never touches a socket and never copies tensor bytes, but for the rest of a begun frame that is
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from offbeat.runtime.framing import HEADER, HEADER_BYTES, MAGIC, VERSION, Kind

FRAME_STEP_BYTES = 64 * 1024
MAX_FRAMES_AT_ONCE = 64

Key = tuple[int, int, int]
"""(0 for control or 1 for tensor bytes, priority, order of arrival)."""


class Outgoing:
    """One message on its way out: `data` is what is sent of it, from `offset` of `total` bytes on."""

    __slots__ = ("data", "done", "key", "kind", "offset", "sent", "tag", "total")

    def __init__(
        self,
        kind: Kind,
        key: Key,
        data: memoryview,
        *,
        tag: int = 0,
        offset: int = 0,
        total: int = 0,
        done: Callable[[], None] | None = None,
    ) -> None:
        self.kind = int(kind)
        self.key = key
        self.data = data
        self.tag = tag
        self.offset = offset
        self.total = total
        self.done = done
        self.sent = 0  # bytes of data in frames that the kernel has taken or begun to take


class Outbox:
    """The messages to one peer.

    `gather()` the next buffers to send, tell `taken(n)` how many of their bytes the kernel took, and get the
    messages that are wholly out.

    Attributes:
        frame_bytes: payload of one frame at most; a multiple of 64 KiB.
    """

    def __init__(self, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self._heap: list[tuple[Key, Outgoing]] = []
        self._gathered: list[tuple[Outgoing, int]] = []
        self._begun: list[memoryview] = []  # what is left of the frame that the kernel has begun to take
        self._begun_of: Outgoing | None = None
        headers = memoryview(bytearray(HEADER_BYTES * MAX_FRAMES_AT_ONCE))
        self._headers = [
            headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(MAX_FRAMES_AT_ONCE)
        ]

    def __bool__(self) -> bool:
        return bool(self._heap) or self._begun_of is not None

    @property
    def begun(self) -> bool:
        """Whether the kernel has taken a part of a frame."""
        return self._begun_of is not None

    @property
    def key(self) -> Key | None:
        """How urgent the most urgent thing here is; None where there is nothing."""
        head = self._heap[0][0] if self._heap else None
        if self._begun_of is None:
            return head
        return self._begun_of.key if head is None else min(head, self._begun_of.key)

    def add(self, item: Outgoing) -> None:
        """Queue a message."""
        heappush(self._heap, (item.key, item))

    def gather(self) -> tuple[list[memoryview], int]:
        """Return the buffers to send next, about one frame's worth, and their bytes in all."""
        views = list(self._begun)
        size = sum(map(len, views))
        gathered = self._gathered
        gathered.clear()
        heap, frame_bytes = self._heap, self.frame_bytes
        while heap and size < frame_bytes and len(gathered) < MAX_FRAMES_AT_ONCE:
            item = heappop(heap)[1]
            sent = item.sent
            length = len(item.data) - sent
            control = item.kind != Kind.DATA
            if length > frame_bytes and not control:
                length = frame_bytes
            header = self._headers[len(gathered)]
            HEADER.pack_into(
                header,
                0,
                MAGIC,
                VERSION,
                item.kind,
                length,
                item.tag,
                0 if control else item.offset + sent,
                item.total,
            )
            views.append(header)
            if length:
                views.append(item.data[sent : sent + length])
            gathered.append((item, length))
            size += HEADER_BYTES + length
        return views, size

    def taken(self, n: int) -> list[Outgoing]:
        """Take note that the kernel took `n` bytes of what was gathered; return what is wholly out."""
        finished: list[Outgoing] = []
        begun_of = self._begun_of
        if begun_of is not None:
            n = self._take_begun(n)
            if self._begun_of is None and begun_of.sent == len(begun_of.data):
                finished.append(begun_of)
        for i, (item, length) in enumerate(self._gathered):
            size = HEADER_BYTES + length
            if n > 0:
                item.sent += length
                if n < size:
                    self._begun = [memoryview(bytes(self._headers[i]))]
                    if length:  # an empty view could never be taken, and the frame never be done
                        self._begun.append(item.data[item.sent - length : item.sent])
                    self._begun_of = item
                    self._take_begun(n)
                elif item.sent == len(item.data):
                    finished.append(item)
                n -= size
                if item.sent == len(item.data):
                    continue
            heappush(self._heap, (item.key, item))
        self._gathered.clear()
        return finished

    def drop(self, first: int, last: int) -> None:
        """Forget tensor messages with first <= tag < last; their bytes are not read any more."""
        kept = [entry for entry in self._heap if not _within(entry[1], first, last)]
        if len(kept) < len(self._heap):
            self._heap = kept
            heapify(self._heap)
        begun = self._begun_of
        if begun is not None and _within(begun, first, last):
            self._begun = [memoryview(bytes(view)) for view in self._begun]
            begun.data = memoryview(b"")
            begun.sent = 0
            begun.done = None

    def clear(self, *, keep_control: bool = False) -> None:
        """Drop everything, or everything but control messages and the rest of a begun frame."""
        if keep_control:
            self._heap = [entry for entry in self._heap if entry[1].kind != Kind.DATA]
            heapify(self._heap)
        else:
            self._heap.clear()
            self._begun = []
            self._begun_of = None

    def _take_begun(self, n: int) -> int:
        """Take `n` bytes off the begun frame; return how many are left over."""
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


def _within(item: Outgoing, first: int, last: int) -> bool:
    return item.kind == Kind.DATA and first <= item.tag < last
