"""Frames are decoded as sent; any other bytes are a ProtocolError, without a large allocation."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.runtime.transport.framing import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_DATA_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SHARED_BYTES,
    SHARED_PAYLOAD,
    SHARED_PAYLOAD_BYTES,
    VERSION,
    Frame,
    FrameKind,
    FrameReader,
    encode_frame,
    shared_slice,
)


def data(tag: int, offset: int, payload: bytes, total: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, FrameKind.DATA, len(payload), tag, offset, total) + payload


def header(**fields: int | bytes) -> bytes:
    """A header of a correct DATA frame, with some fields replaced."""
    good: dict[str, int | bytes] = {
        "magic": MAGIC,
        "version": VERSION,
        "kind": FrameKind.DATA,
        "length": 10,
        "tag": 1,
        "offset": 0,
        "total": 10,
    }
    return HEADER.pack(*(good | fields).values())


class Receiver:
    """The owner of a reader: posted buffers by tag, and the received frames with their bytes."""

    def __init__(self, posted: dict[int, int] | None = None, *, read_ahead_bytes: int = 4096) -> None:
        self.posted = {tag: bytearray(size) for tag, size in (posted or {}).items()}
        self.reader = FrameReader(self.destination, read_ahead_bytes=read_ahead_bytes)
        self.frames: list[tuple[int, int, int, int, bytes]] = []

    def destination(self, tag: int, offset: int, length: int, total: int) -> memoryview | None:
        into = self.posted.get(tag)
        if into is None:
            return None
        if len(into) != total:
            raise ProtocolError(f"expected {len(into)} bytes, got {total}")
        return memoryview(into)[offset : offset + length]

    def feed(self, stream: bytes, sizes: list[int] | None = None) -> None:
        """Receive a stream in portions of at most the given sizes, again and again."""
        position = turn = 0
        while position < len(stream):
            size = sizes[turn % len(sizes)] if sizes else len(stream)
            turn += 1
            buffers = self.reader.buffers()
            assert all(len(buffer) for buffer in buffers)
            n = 0
            for buffer in buffers:
                part = stream[position + n : position + min(size, n + len(buffer))]
                buffer[: len(part)] = part
                n += len(part)
            position += n
            self.reader.on_received(n)
            while (frame := self.reader.next_frame()) is not None:
                self.frames.append((frame.kind, frame.tag, frame.offset, frame.total, self.bytes_of(frame)))

    def bytes_of(self, frame: Frame) -> bytes:
        if frame.payload is not None:
            assert len(frame.payload) == frame.length
            return bytes(frame.payload)
        return bytes(self.posted[frame.tag][frame.offset : frame.offset + frame.length])


@st.composite
def frames(draw: st.DrawFn) -> tuple[int, int, int, int, bytes]:
    kind = draw(st.sampled_from([FrameKind.DATA, *(kind for kind in FrameKind if kind >= FrameKind.MESSAGE)]))
    if kind in (FrameKind.HEARTBEAT, FrameKind.BYE, FrameKind.SKIP):
        return kind, 0, 0, 0, b""
    if kind in (FrameKind.REGION, FrameKind.SHARED_ACK, FrameKind.WITHDRAW, FrameKind.ACK):
        tag = 0 if kind in (FrameKind.SHARED_ACK, FrameKind.ACK) else draw(st.integers(1, 1 << 63))
        return kind, tag, 0, 0 if kind == FrameKind.WITHDRAW else draw(st.integers(1, 1 << 63)), b""
    if kind == FrameKind.SHARED:
        return kind, draw(st.integers(0, 7)), 64, 80_000, draw(st.binary(min_size=24, max_size=24))
    size = draw(st.sampled_from([0, 1, 31, 32, 33, 100, 4000, 4064, 4065, 5000, 40_000, 70_000]))
    payload = bytes([draw(st.integers(0, 255))]) * size
    if kind == FrameKind.MESSAGE:
        return kind, 0, 0, 0, payload
    if not size:
        return kind, draw(st.integers(0, 7)), 0, 0, b""
    return kind, draw(st.integers(0, 7)), draw(st.sampled_from([0, 1, 64])), 80_000, payload


def packed(frame: tuple[int, int, int, int, bytes]) -> bytes:
    kind, tag, offset, total, payload = frame
    return HEADER.pack(MAGIC, VERSION, kind, len(payload), tag, offset, total) + payload


SPLITS = st.lists(st.sampled_from([1, 2, 31, 32, 33, 64, 1000, 4096, 100_000]), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(frames(), max_size=12), SPLITS, st.sets(st.integers(0, 7)))
def test_any_split_of_a_stream_gives_the_same_frames(
    sent: list[tuple[int, int, int, int, bytes]], sizes: list[int], posted: set[int]
) -> None:
    if min(sizes) < 31:
        sizes = [*sizes, 100_000]  # otherwise a long stream takes too much time
    receiver = Receiver(dict.fromkeys(posted, 80_000))
    sent = [
        frame for frame in sent if frame[3] or frame[1] not in posted
    ]  # an empty message has an empty buffer
    receiver.feed(b"".join(map(packed, sent)), sizes)
    assert receiver.frames == sent
    assert not receiver.reader.is_partial


@pytest.mark.parametrize("size", [1, 100, 5000, 300_000, MAX_DATA_BYTES])
def test_posted_bytes_are_received_in_place_without_a_payload(size: int) -> None:
    reader = FrameReader(lambda tag, offset, length, total: into[offset : offset + length])
    into = memoryview(bytearray(size))
    stream = data(5, 0, b"x" * size, size)
    position = 0
    while position < len(stream):
        (buffer, *_) = reader.buffers()
        n = min(len(buffer), len(stream) - position)
        buffer[:n] = stream[position : position + n]
        position += n
        reader.on_received(n)
        frame = reader.next_frame()
    assert frame == Frame(FrameKind.DATA, 5, 0, size, size, None)
    assert into == b"x" * size


def test_the_next_header_is_received_with_the_rest_of_a_payload() -> None:
    receiver = Receiver({1: 100_000})
    receiver.feed(data(1, 0, bytes(100_000), 100_000)[: 1000 + HEADER_BYTES])
    rest, ahead = receiver.reader.buffers()
    assert len(rest) == 99_000
    assert len(ahead) == HEADER_BYTES


def test_many_small_frames_are_received_in_one_call() -> None:
    receiver = Receiver()
    stream = encode_frame(FrameKind.MESSAGE, b"hello") * 20
    (buffer,) = receiver.reader.buffers()
    buffer[: len(stream)] = stream
    receiver.reader.on_received(len(stream))
    assert sum(receiver.reader.next_frame() is not None for _ in range(30)) == 20


def test_a_receive_posted_after_one_frame_applies_to_the_next() -> None:
    posted: dict[int, bytearray] = {}
    reader = FrameReader(lambda tag, *_: memoryview(posted[tag]) if tag in posted else None)
    stream = encode_frame(FrameKind.MESSAGE, b"expect 9") + data(9, 0, b"nine", 4)
    reader.buffers()[0][: len(stream)] = stream
    reader.on_received(len(stream))
    assert reader.next_frame() is not None
    posted[9] = bytearray(4)
    frame = reader.next_frame()
    assert frame is not None
    assert frame.payload is None
    assert posted[9] == b"nine"


def test_a_discarded_message_is_not_written_further() -> None:
    receiver = Receiver({1: 50_000})
    stream = data(1, 0, b"x" * 50_000, 50_000)
    receiver.feed(stream[:10_000])
    receiver.reader.discard_tags(0, 2)
    receiver.feed(stream[10_000:] + encode_frame(FrameKind.HEARTBEAT))
    assert [frame[0] for frame in receiver.frames] == [FrameKind.DATA, FrameKind.HEARTBEAT]
    assert receiver.posted[1].count(b"x") == 10_000 - HEADER_BYTES


def test_discarding_other_tags_changes_nothing() -> None:
    receiver = Receiver({5: 50_000})
    stream = data(5, 0, b"x" * 50_000, 50_000)
    receiver.feed(stream[:10_000])
    receiver.reader.discard_tags(0, 5)
    receiver.reader.discard_tags(6, 100)
    receiver.feed(stream[10_000:])
    assert receiver.posted[5] == b"x" * 50_000


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (header(magic=b"GE"), "starts with b'ob', got b'GE'"),
        (header(version=9), f"version {VERSION}, got version 9"),
        (header(kind=0), "frame kind from 1 to 15, got 0"),
        (header(kind=16), "frame kind from 1 to 15, got 16"),
        (
            header(length=MAX_DATA_BYTES + 1, total=1 << 40),
            "at most 1048576 bytes in a DATA frame, got 1048577",
        ),
        (header(length=(1 << 32) - 1, total=(1 << 64) - 1), "at most 1048576 bytes in a DATA frame"),
        (header(offset=1), "within a message of 10, got 10 bytes from offset 1"),
        (header(offset=(1 << 64) - 1), "within a message of 10"),
        (header(length=0), "at least one byte of a message of 10"),
        (header(total=11), "expected 10 bytes, got 11"),
        (header(kind=FrameKind.MESSAGE), "no tag or offset or total in a MESSAGE frame"),
        (
            header(kind=FrameKind.MESSAGE, length=MAX_MESSAGE_BYTES + 1),
            "at most 1048576 bytes in a MESSAGE frame",
        ),
        (header(kind=FrameKind.HEARTBEAT, tag=0, total=0), "at most 0 bytes in a HEARTBEAT frame, got 10"),
        (header(kind=FrameKind.BYE, length=0, tag=1, total=0), "no tag or offset or total in a BYE frame"),
        (header(kind=FrameKind.SHARED), "expected 24 bytes in a SHARED frame, got 10"),
        (header(kind=FrameKind.REGION), "at most 0 bytes in a REGION frame, got 10"),
        (
            header(kind=FrameKind.REGION, length=0, offset=1),
            "a tag and a total and no offset in a REGION frame",
        ),
        (
            header(kind=FrameKind.REGION, length=0, total=0),
            "a tag and a total and no offset in a REGION frame",
        ),
        (header(kind=FrameKind.WITHDRAW, length=0), "a tag and no offset or total in a WITHDRAW frame"),
        (header(kind=FrameKind.SHARED_ACK, length=0), "a total and no tag or offset in a SHARED_ACK frame"),
        (
            header(kind=FrameKind.SHARED_ACK, length=0, tag=0, total=0),
            "a total and no tag or offset in a SHARED_ACK frame",
        ),
        (header(kind=FrameKind.ACK, length=0), "a total and no tag or offset in a ACK frame"),
        (header(kind=FrameKind.SKIP, length=0, tag=1, total=0), "no tag or offset or total in a SKIP frame"),
        (header(kind=FrameKind.HELLO), "a frame that is no handshake, got HELLO"),
    ],
)
def test_a_hostile_header_is_refused_with_the_expected_and_the_received_value(bad: bytes, text: str) -> None:
    receiver = Receiver({1: 10})
    with pytest.raises(ProtocolError) as caught:
        receiver.feed(bad)
    assert text in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(
    *[st.integers(0, 1 << 64)] * 4, st.binary(min_size=SHARED_PAYLOAD_BYTES, max_size=SHARED_PAYLOAD_BYTES)
)
def test_a_shared_frame_lies_within_its_message_or_is_a_protocol_error(
    offset: int, total: int, near: int, far: int, noise: bytes
) -> None:
    for payload in (
        noise,
        SHARED_PAYLOAD.pack(1, 0, near % MAX_SHARED_BYTES),
        SHARED_PAYLOAD.pack(1, 0, far % (1 << 64)),
    ):
        frame = Frame(FrameKind.SHARED, 1, offset, SHARED_PAYLOAD_BYTES, total, payload)
        with suppress(ProtocolError):
            _, _, length = shared_slice(frame)
            assert 0 < length <= min(MAX_SHARED_BYTES, total - offset)


@pytest.mark.parametrize(
    "kind",
    [
        FrameKind.MESSAGE,
        FrameKind.DATA,
        FrameKind.HEARTBEAT,
        FrameKind.BYE,
        FrameKind.REGION,
        FrameKind.SHARED,
        FrameKind.SHARED_ACK,
        FrameKind.WITHDRAW,
    ],
)
def test_before_the_handshake_other_frames_are_a_protocol_error(kind: FrameKind) -> None:
    reader = FrameReader(None)
    bad = HEADER.pack(MAGIC, VERSION, kind, 0, 0, 0, 0)
    reader.buffers()[0][: len(bad)] = bad
    reader.on_received(len(bad))
    with pytest.raises(ProtocolError, match="expected a handshake frame"):
        reader.next_frame()


def test_frames_received_with_the_handshake_are_not_lost() -> None:
    reader = FrameReader(None)
    stream = (
        encode_frame(FrameKind.WELCOME, b"x")
        + encode_frame(FrameKind.MESSAGE, b"first")
        + encode_frame(FrameKind.MESSAGE, b"second")
    )
    reader.buffers()[0][: len(stream) - 3] = stream[:-3]
    reader.on_received(len(stream) - 3)
    assert reader.next_frame() is not None
    reader.end_handshake(lambda *_: None)
    first = reader.next_frame()
    assert first is not None
    assert first.payload == b"first"
    assert reader.next_frame() is None
    reader.buffers()[0][:3] = stream[-3:]
    reader.on_received(3)
    second = reader.next_frame()
    assert second is not None
    assert second.payload == b"second"


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=300), SPLITS)
def test_random_bytes_are_a_protocol_error(stream: bytes, sizes: list[int]) -> None:
    if stream.startswith(MAGIC):
        stream = b"xx" + stream
    with pytest.raises(ProtocolError):
        Receiver().feed(stream, sizes)


@settings(max_examples=300, deadline=None)
@given(st.lists(frames(), min_size=1, max_size=4), st.data())
def test_a_flipped_bit_gives_frames_or_a_protocol_error_and_never_anything_else(
    sent: list[tuple[int, int, int, int, bytes]], more: st.DataObject
) -> None:
    stream = bytearray(b"".join(map(packed, sent)))
    position = more.draw(st.integers(0, len(stream) * 8 - 1))
    stream[position // 8] ^= 1 << position % 8
    receiver = Receiver()
    try:
        receiver.feed(bytes(stream))
    except ProtocolError:
        pass
    else:
        # The length of the last frame may have grown, so that a part of it is missing; no byte is invented.
        assert sum(len(frame[4]) + HEADER_BYTES for frame in receiver.frames) <= len(stream)


@settings(max_examples=100, deadline=None)
@given(st.lists(frames(), min_size=1, max_size=6), st.data())
def test_a_truncated_stream_gives_a_prefix_of_its_frames(
    sent: list[tuple[int, int, int, int, bytes]], more: st.DataObject
) -> None:
    stream = b"".join(map(packed, sent))
    cut = more.draw(st.integers(0, len(stream) - 1))
    receiver = Receiver()
    receiver.feed(stream[:cut])
    assert receiver.frames == sent[: len(receiver.frames)]
    assert len(receiver.frames) < len(sent)
    whole = sum(len(packed(frame)) for frame in receiver.frames)
    assert receiver.reader.is_partial == (cut > whole)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.integers(0, 255),
    length=st.integers(0, (1 << 32) - 1),
    tag=st.integers(0, (1 << 64) - 1),
    offset=st.integers(0, (1 << 64) - 1),
    total=st.integers(0, (1 << 64) - 1),
)
def test_no_header_makes_the_reader_allocate_more_than_one_frame(
    kind: int, length: int, tag: int, offset: int, total: int
) -> None:
    receiver = Receiver()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with suppress(ProtocolError):
            receiver.feed(header(kind=kind, length=length, tag=tag, offset=offset, total=total))
        after = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert after - before < MAX_DATA_BYTES + 64 * 1024


def test_a_reader_needs_room_for_a_header() -> None:
    with pytest.raises(ValueError, match="must hold a header"):
        FrameReader(None, read_ahead_bytes=HEADER_BYTES - 1)
