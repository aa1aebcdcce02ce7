"""The pure parts of the endpoint: the next bytes to send, and sets of integers as ranges."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.runtime.transport.framing import (
    HEADER_BYTES,
    MAX_DATA_BYTES,
    FrameKind,
    FrameReader,
    shared_slice,
)
from offbeat.runtime.transport.inbox import IntervalSet
from offbeat.runtime.transport.outbox import Outbox, QueuedMessage
from offbeat.runtime.transport.shared_memory import UNACKED_BYTES, Region, RegionAllocator

FRAME_BYTES = 1000


def send(outbox: Outbox, n: int) -> tuple[bytes, list[QueuedMessage]]:
    """Let the kernel accept at most `n` bytes; return them and the messages that are sent completely."""
    views, size = outbox.gather()
    accepted = b"".join(views)[:n]
    assert size == sum(map(len, views))
    return accepted, outbox.on_written(len(accepted))


def test_an_empty_frame_that_is_written_in_two_parts_completes() -> None:
    outbox = Outbox(FRAME_BYTES)
    beat = QueuedMessage(FrameKind.HEARTBEAT, (0, 0, 0), memoryview(b""))
    outbox.add(beat)
    assert send(outbox, 5)[1] == []
    assert send(outbox, HEADER_BYTES - 5)[1] == [beat]
    assert not outbox


@settings(max_examples=200, deadline=None)
@given(
    messages=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 5000)), min_size=1, max_size=10),
    portions=st.lists(st.integers(0, 2500), min_size=1, max_size=5),
)
def test_every_message_is_sent_once_and_whole_for_any_sizes_of_writes(
    messages: list[tuple[int, int]], portions: list[int]
) -> None:
    outbox = Outbox(FRAME_BYTES)
    for tag, (priority, size) in enumerate(messages):
        data = memoryview(bytes([tag]) * size)
        outbox.add(QueuedMessage(FrameKind.DATA, (1, priority, tag), data, tag=tag, total=size))
    stream, finished = b"", []
    turn = 0
    while outbox:
        assert turn < 1000
        accepted, out = send(outbox, [*portions, 2500][turn % (len(portions) + 1)])
        stream += accepted
        finished += out
        turn += 1
    assert sorted(item.tag for item in finished) == list(range(len(messages)))
    received = dict.fromkeys(range(len(messages)), b"")
    order = []
    reader = FrameReader(lambda *_: None, read_ahead_bytes=max(len(stream), HEADER_BYTES))
    reader.buffers()[0][: len(stream)] = stream
    reader.on_received(len(stream))
    while (frame := reader.next_frame()) is not None:
        assert frame.offset == len(received[frame.tag])
        assert frame.payload is not None
        received[frame.tag] += frame.payload
        order.append((messages[frame.tag][0], frame.tag))
    assert received == {tag: bytes([tag]) * size for tag, (_, size) in enumerate(messages)}
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("total", "frame"), [(1 << 17, 64 << 10), (1 << 20, 256 << 10), (1 << 30, 512 << 10)]
)
def test_a_frame_is_no_more_than_a_quarter_of_its_message_or_64_kib(total: int, frame: int) -> None:
    outbox = Outbox(64 << 10)
    data = memoryview(bytes(1 << 20))
    outbox.add(QueuedMessage(FrameKind.DATA, (1, 0, 0), data, tag=1, total=total))
    sent, _ = send(outbox, 1 << 20)
    assert len(sent) == HEADER_BYTES + frame


def test_an_urgent_message_is_sent_right_after_a_begun_frame() -> None:
    outbox = Outbox(FRAME_BYTES)
    outbox.add(QueuedMessage(FrameKind.DATA, (1, 0, 0), memoryview(bytes(5000)), tag=1, total=5000))
    first, _ = send(outbox, 500)
    urgent = QueuedMessage(FrameKind.MESSAGE, (0, 0, 1), memoryview(b"urgent"))
    outbox.add(urgent)
    assert outbox.next_key == urgent.key
    second, finished = send(outbox, FRAME_BYTES)
    assert len(first) == 500
    assert second[FRAME_BYTES + HEADER_BYTES - 500 :][HEADER_BYTES : HEADER_BYTES + 6] == b"urgent"
    assert finished == [urgent]


def test_the_rest_of_a_dropped_begun_frame_is_not_read_from_its_buffer() -> None:
    data = bytearray(b"x" * 5000)
    outbox = Outbox(FRAME_BYTES)
    done: list[bool] = []
    item = QueuedMessage(
        FrameKind.DATA, (1, 0, 0), memoryview(data), tag=1, total=5000, on_done=lambda: done.append(True)
    )
    outbox.add(item)
    begun, _ = send(outbox, 100)
    outbox.drop(1, 2)
    data[:] = b"y" * 5000
    rest, finished = send(outbox, 10_000)
    assert (begun + rest)[HEADER_BYTES:] == b"x" * FRAME_BYTES
    assert not outbox
    assert all(one.on_done is None for one in finished)


@settings(max_examples=200, deadline=None)
@given(
    messages=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 5), st.booleans()), min_size=1, max_size=12
    ),
    portions=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    answers=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    cancelled=st.integers(0, 12),
)
def test_exported_messages_are_announced_once_and_complete_when_read(
    messages: list[tuple[int, int, bool]], portions: list[int], answers: list[int], cancelled: int
) -> None:
    """Messages of whole MiB in shared memory and small ordinary ones; one may be cancelled meanwhile."""
    regions = RegionAllocator(lambda region: None)
    memory = regions.allocate(5 * MAX_DATA_BYTES)
    assert memory is not None
    exported_regions = regions.find(memory)
    assert exported_regions is not None
    outbox = Outbox(MAX_DATA_BYTES)
    for tag, (priority, mebibytes, is_exported) in enumerate(messages):
        size = mebibytes * MAX_DATA_BYTES if is_exported else mebibytes
        kind = FrameKind.SHARED if is_exported else FrameKind.DATA
        done = lambda tag=tag: ended.append(tag)  # noqa: E731
        key = (1, priority, tag)
        outbox.add(
            QueuedMessage(
                kind, key, memory[:size], tag=tag, total=size, on_done=done, exported=exported_regions
            )
        )
    reader = FrameReader(lambda *_: None)
    stream = bytearray()
    ended: list[int] = []
    received = dict.fromkeys(range(len(messages)), 0)
    unread: list[int] = []
    for turn in range(2000):
        if not outbox and not unread:
            break
        accepted, finished = send(outbox, [*portions, 100][turn % (len(portions) + 1)])
        stream += accepted
        while stream:
            buffer = reader.buffers()[0]
            n = min(len(buffer), len(stream))
            buffer[:n] = stream[:n]
            del stream[:n]
            reader.on_received(n)
            while (frame := reader.next_frame()) is not None:
                assert frame.offset == received[frame.tag]
                length = frame.length
                if frame.kind == FrameKind.SHARED:
                    number, place, length = shared_slice(frame)
                    assert (number, place) == (exported_regions[0].number, frame.offset)
                    unread.append(length)
                received[frame.tag] += length
        assert sum(unread) < UNACKED_BYTES + MAX_DATA_BYTES
        n = min(len(unread), [*answers, 1][turn % (len(answers) + 1)])
        del unread[:n]
        for item in finished + outbox.on_shared_ack(n):
            if item.on_done is not None:
                item.on_done()
        if turn == 5:
            outbox.drop(cancelled, cancelled + 1)
    assert not outbox
    assert exported_regions[0].unacked_frames == 0
    assert sorted(ended) == sorted(set(ended))
    assert set(range(len(messages))) - set(ended) <= {cancelled}
    with pytest.raises(ProtocolError, match="at most 0 SHARED frames to be read, got 1"):
        outbox.on_shared_ack(1)


def test_a_descriptor_is_sent_with_the_first_byte_of_its_frame() -> None:
    outbox = Outbox(FRAME_BYTES)
    region = Region(7, 99, (shared_bytes := (ctypes.c_char * 10)()))
    outbox.add(QueuedMessage(FrameKind.DATA, (1, 0, 0), memoryview(bytes(500)), tag=1, total=500))
    send(outbox, 100)
    outbox.add(
        QueuedMessage(FrameKind.REGION, (0, 0, 1), memoryview(b""), tag=7, total=10, exported=(region, 0))
    )
    assert len(outbox.gather()[0]) == 1  # only the rest of the begun frame
    assert outbox.descriptor is None
    outbox.on_written(HEADER_BYTES + 400)
    views, size = outbox.gather()
    assert (len(views), size, outbox.descriptor) == (1, HEADER_BYTES, 99)
    outbox.on_written(0)
    assert send(outbox, 5)[1] == []
    assert outbox.gather()[1] == HEADER_BYTES - 5
    assert outbox.descriptor is None  # the descriptor has been sent
    assert region.size == len(shared_bytes)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=20),
    st.integers(0, 40),
    st.integers(1, 9),
)
def test_an_interval_set_is_a_set_of_integers(added: list[tuple[int, int]], first: int, length: int) -> None:
    ranges, model = IntervalSet(), set()
    for start, size in added:
        ranges.add(start, start + size)
        model |= set(range(start, start + size))
    assert ranges.overlaps(first, first + length) == bool(model & set(range(first, first + length)))
    assert len(ranges) == sum(number - 1 not in model for number in model)
