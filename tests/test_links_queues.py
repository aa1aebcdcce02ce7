"""The pure parts of the links: what goes out next, and sets of whole numbers as ranges."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.runtime.framing import HEADER_BYTES, FrameReader, Kind
from offbeat.runtime.inbox import Ranges
from offbeat.runtime.outbox import Outbox, Outgoing

FRAME_BYTES = 1000


def send(outbox: Outbox, n: int) -> tuple[bytes, list[Outgoing]]:
    """Let the kernel take at most `n` bytes; return them and the messages that are wholly out."""
    views, size = outbox.gather()
    taken = b"".join(views)[:n]
    assert size == sum(map(len, views))
    return taken, outbox.taken(len(taken))


def test_an_empty_frame_that_is_taken_in_two_parts_is_done() -> None:
    outbox = Outbox(FRAME_BYTES)
    beat = Outgoing(Kind.BEAT, (0, 0, 0), memoryview(b""))
    outbox.add(beat)
    assert send(outbox, 5)[1] == []
    assert send(outbox, HEADER_BYTES - 5)[1] == [beat]
    assert not outbox


@settings(max_examples=200, deadline=None)
@given(
    messages=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 5000)), min_size=1, max_size=10),
    portions=st.lists(st.integers(0, 2500), min_size=1, max_size=5),
)
def test_whatever_the_kernel_takes_at_a_time_every_message_goes_out_once_and_whole(
    messages: list[tuple[int, int]], portions: list[int]
) -> None:
    outbox = Outbox(FRAME_BYTES)
    for tag, (priority, size) in enumerate(messages):
        data = memoryview(bytes([tag]) * size)
        outbox.add(Outgoing(Kind.DATA, (1, priority, tag), data, tag=tag, total=size))
    stream, finished = b"", []
    turn = 0
    while outbox:
        assert turn < 1000
        taken, out = send(outbox, [*portions, 2500][turn % (len(portions) + 1)])
        stream += taken
        finished += out
        turn += 1
    assert sorted(item.tag for item in finished) == list(range(len(messages)))
    came = dict.fromkeys(range(len(messages)), b"")
    order = []
    reader = FrameReader(lambda *_: None, read_ahead_bytes=max(len(stream), HEADER_BYTES))
    reader.buffers()[0][: len(stream)] = stream
    reader.received(len(stream))
    while (frame := reader.next_frame()) is not None:
        assert frame.offset == len(came[frame.tag])
        assert frame.payload is not None
        came[frame.tag] += frame.payload
        order.append((messages[frame.tag][0], frame.tag))
    assert came == {tag: bytes([tag]) * size for tag, (_, size) in enumerate(messages)}
    assert order == sorted(order)


def test_a_begun_frame_is_finished_and_what_is_urgent_comes_right_after_it() -> None:
    outbox = Outbox(FRAME_BYTES)
    outbox.add(Outgoing(Kind.DATA, (1, 0, 0), memoryview(bytes(5000)), tag=1, total=5000))
    first, _ = send(outbox, 500)
    urgent = Outgoing(Kind.MESSAGE, (0, 0, 1), memoryview(b"urgent"))
    outbox.add(urgent)
    assert outbox.key == urgent.key
    second, finished = send(outbox, FRAME_BYTES)
    assert len(first) == 500
    assert second[FRAME_BYTES + HEADER_BYTES - 500 :][HEADER_BYTES : HEADER_BYTES + 6] == b"urgent"
    assert finished == [urgent]


def test_the_rest_of_a_begun_frame_that_is_dropped_is_not_read_from_its_buffer_any_more() -> None:
    data = bytearray(b"x" * 5000)
    outbox = Outbox(FRAME_BYTES)
    done: list[bool] = []
    item = Outgoing(Kind.DATA, (1, 0, 0), memoryview(data), tag=1, total=5000, done=lambda: done.append(True))
    outbox.add(item)
    begun, _ = send(outbox, 100)
    outbox.drop(1, 2)
    data[:] = b"y" * 5000
    rest, finished = send(outbox, 10_000)
    assert (begun + rest)[HEADER_BYTES:] == b"x" * FRAME_BYTES
    assert not outbox
    assert all(one.done is None for one in finished)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=20),
    st.integers(0, 40),
    st.integers(1, 9),
)
def test_ranges_are_a_set_of_whole_numbers(added: list[tuple[int, int]], first: int, length: int) -> None:
    ranges, model = Ranges(), set()
    for start, size in added:
        ranges.add(start, start + size)
        model |= set(range(start, start + size))
    assert ranges.overlaps(first, first + length) == bool(model & set(range(first, first + length)))
    assert len(ranges) == sum(number - 1 not in model for number in model)
