"""Tensor messages received from one peer: posted receives, and data that arrives before its receive.

Bytes of a posted message go directly into the buffer posted for it; each byte may arrive once. Early data is
kept as it arrived until its receive is posted or the message is forgotten.

This module never touches a socket and never allocates memory for a message because of a size in a header.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from offbeat.errors import ProtocolError
from offbeat.runtime.transport.framing import Frame

MAX_EARLY_BYTES = 256 * 1024 * 1024
EARLY_FRAME_COST_BYTES = 512  # memory for an early frame in addition to its payload, roughly
MAX_FORGOTTEN_RANGES = 65536

OnData = Callable[[int, int], None]
OnShared = Callable[[int, memoryview], None]


class IntervalSet:
    """A set of integers, stored as ranges [first, last) that neither touch nor overlap."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __len__(self) -> int:
        return len(self._firsts)

    def overlaps(self, first: int, last: int) -> bool:
        """Whether the set contains any number of [first, last)."""
        i = bisect_right(self._lasts, first)
        return i < len(self._firsts) and self._firsts[i] < last

    def add(self, first: int, last: int) -> None:
        """Add [first, last)."""
        if first >= last:
            return
        i = bisect_left(self._lasts, first)
        j = bisect_right(self._firsts, last)
        if i < j:
            first = min(first, self._firsts[i])
            last = max(last, self._lasts[j - 1])
        self._firsts[i:j] = [first]
        self._lasts[i:j] = [last]

    def remove(self, first: int, last: int) -> None:
        """Remove [first, last), which lies within one range."""
        i = bisect_right(self._firsts, first) - 1
        begin, end = self._firsts[i], self._lasts[i]
        kept = [run for run in ((begin, first), (last, end)) if run[0] < run[1]]
        self._firsts[i : i + 1] = [run[0] for run in kept]
        self._lasts[i : i + 1] = [run[1] for run in kept]

    def drop_lowest(self) -> None:
        """Remove the range of the lowest numbers."""
        del self._firsts[0], self._lasts[0]


class _Posting:
    __slots__ = ("into", "missing", "on_data", "on_shared", "received")

    def __init__(self, into: memoryview, on_data: OnData, on_shared: OnShared | None) -> None:
        self.into = into
        self.on_data = on_data
        self.on_shared = on_shared
        self.missing = len(into)
        self.received = IntervalSet()

    def place(self, tag: int, offset: int, length: int, total: int) -> memoryview:
        """Return where the bytes go, and mark them as received."""
        if total != len(self.into):
            raise ProtocolError(
                f"expected message {tag:#x} to have {len(self.into)} bytes, got {total}: call backward and "
                "step equally often on every worker"
            )
        end = offset + length
        if self.received.overlaps(offset, end):
            raise ProtocolError(f"bytes {offset} to {end} of message {tag:#x} overlap bytes already received")
        self.received.add(offset, end)
        return self.into[offset:end]


class _Early:
    __slots__ = ("frames", "missing", "total")

    def __init__(self, total: int) -> None:
        self.total = self.missing = total
        self.frames: list[tuple[int, bytes | bytearray]] = []


class Inbox:
    """The tensor messages from one peer.

    Args:
        forgotten: tags whose data is dropped silently; shared by all peers of a node.

    Attributes:
        early_bytes: memory for data whose receive is not posted yet.
    """

    def __init__(self, forgotten: IntervalSet) -> None:
        self.early_bytes = 0
        self._forgotten = forgotten
        self._posted: dict[int, _Posting] = {}
        self._early: dict[int, _Early] = {}

    def post(self, tag: int, into: memoryview, on_data: OnData, on_shared: OnShared | None = None) -> None:
        """Receive the bytes of message `tag` into `into`; data that arrived early is delivered at once.

        Raises:
            ValueError: the tag is posted already.
            ProtocolError: early data does not fit.
        """
        if self._forgotten.overlaps(tag, tag + 1):
            return
        if tag in self._posted:
            raise ValueError(
                f"expected one receive for message {tag:#x}, got a second; never use a tag twice"
            )
        posting = _Posting(into, on_data, on_shared)
        self._posted[tag] = posting
        early = self._remove_early(tag)
        if early is None:
            return
        for offset, payload in early.frames:
            if self._posted.get(tag) is not posting:
                return  # a callback has forgotten it
            posting.place(tag, offset, len(payload), early.total)[:] = payload
            self._deliver(tag, posting, offset, len(payload))

    def destination(self, tag: int, offset: int, length: int, total: int) -> memoryview | None:
        """Return where a frame's bytes belong, or None if the message is not posted."""
        posting = self._posted.get(tag)
        return None if posting is None else posting.place(tag, offset, length, total)

    def undo_destination(self, frame: Frame) -> None:
        """Undo `destination` for a frame received in part, which the peer will send again as a whole."""
        posting = self._posted.get(frame.tag)
        if posting is not None:
            posting.received.remove(frame.offset, frame.offset + frame.length)

    def on_data_frame(self, frame: Frame) -> bool:
        """Process a complete DATA frame: deliver it to its posted receive, or keep it until there is one.

        Returns:
            Whether the message is complete, or forgotten. Its frames may come in any order.
        """
        tag, payload = frame.tag, frame.payload
        posting = self._posted.get(tag)
        if posting is not None:
            if payload is not None:  # it was posted while the frame was received
                posting.place(tag, frame.offset, frame.length, frame.total)[:] = payload
            self._deliver(tag, posting, frame.offset, frame.length)
            return not posting.missing
        if payload is None or self._forgotten.overlaps(tag, tag + 1):
            return True
        return not self._keep(tag, frame.offset, payload, frame.total).missing

    def on_shared_frame(self, tag: int, offset: int, total: int, source: memoryview) -> None:
        """Process bytes that lie in the sender's memory, which must not be read after the return."""
        posting = self._posted.get(tag)
        if posting is None:
            if not self._forgotten.overlaps(tag, tag + 1):
                self._keep(tag, offset, bytes(source), total)
            return
        into = posting.place(tag, offset, len(source), total)
        if posting.on_shared is None:
            into[:] = source
            self._deliver(tag, posting, offset, len(source))
        else:
            self._count_down(tag, posting, len(source))
            posting.on_shared(offset, source)

    def drop(self, first: int, last: int) -> None:
        """Drop posted receives and early data with first <= tag < last."""
        for tag in [tag for tag in self._posted if first <= tag < last]:
            del self._posted[tag]
        for tag in [tag for tag in self._early if first <= tag < last]:
            self._remove_early(tag)

    def clear(self) -> None:
        """Drop everything."""
        self._posted.clear()
        self._early.clear()
        self.early_bytes = 0

    def _keep(self, tag: int, offset: int, payload: bytes | bytearray, total: int) -> _Early:
        early = self._early.get(tag)
        if early is None:
            early = self._early[tag] = _Early(total)
        if early.total != total:
            raise ProtocolError(f"expected message {tag:#x} to have {early.total} bytes, got {total}")
        early.frames.append((offset, payload))
        early.missing -= len(payload)
        self.early_bytes += len(payload) + EARLY_FRAME_COST_BYTES
        return early

    def _deliver(self, tag: int, posting: _Posting, offset: int, length: int) -> None:
        self._count_down(tag, posting, length)
        posting.on_data(offset, length)

    def _count_down(self, tag: int, posting: _Posting, length: int) -> None:
        posting.missing -= length
        if not posting.missing:
            del self._posted[tag]

    def _remove_early(self, tag: int) -> _Early | None:
        early = self._early.pop(tag, None)
        if early is not None:
            self.early_bytes -= sum(len(payload) + EARLY_FRAME_COST_BYTES for _, payload in early.frames)
        return early
