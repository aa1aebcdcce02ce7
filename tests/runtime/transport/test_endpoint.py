"""Promises of `Endpoint` about messages, over real sockets and threads."""

from __future__ import annotations

import hashlib
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import groupby, pairwise

import pytest

from offbeat.errors import LinkError, ProtocolError
from offbeat.runtime.transport.framing import HEADER, HEADER_BYTES, MAGIC, VERSION, FrameKind, encode_frame
from offbeat.runtime.transport.io_loop import EPOLL_READ
from support import endpoints
from support.endpoints import DEADLINE_S, KIB, MIB, Arrival, Node, Stranger, contents, take_long

node, pair = endpoints.node, endpoints.pair  # the fixtures


# Control messages


def test_a_message_arrives_with_the_name_of_its_sender_and_is_answered_on_the_same_connection(
    node: Callable[..., Node],
) -> None:
    a, b = node("a"), node("b")
    a.links.add_peer("b", b.links.addresses)
    a.links.send("b", b"hello")
    assert b.message() == ("a", b"hello")
    b.links.send("a", b"")  # b has no address of a
    assert a.message() == ("b", b"")


def test_messages_keep_their_order(pair: tuple[Node, Node]) -> None:
    a, b = pair
    for i in range(5000):
        a.links.send("b", b"%d" % i)
    assert [b.message()[1] for _ in range(5000)] == [b"%d" % i for i in range(5000)]


def test_a_message_of_a_mebibyte_arrives_and_a_longer_one_is_refused_at_once(pair: tuple[Node, Node]) -> None:
    a, b = pair
    a.links.send("b", contents(MIB))
    assert b.message()[1] == contents(MIB)
    with pytest.raises(ValueError, match="at most 1048576 bytes, got 1048577"):
        a.links.send("b", bytes(MIB + 1))


# Tensor messages


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("size", [0, 1, 4096, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 512 * KIB, 5 * MIB + 7])
def test_bytes_arrive_exactly_in_pieces_that_begin_at_multiples_of_64_kib(
    node: Callable[..., Node], transport: str, size: int
) -> None:
    a, b = node("a"), node("b", unix=transport == "unix")
    a.links.add_peer("b", b.links.addresses)
    arrival = Arrival(b, "a", 7, size)
    a.links.send_tensor("b", 7, memoryview(contents(size)))
    assert arrival.whole() == contents(size)
    assert sum(length for _, length in arrival.pieces) == size
    assert all(offset % (64 * KIB) == 0 for offset, _ in arrival.pieces)


def test_a_buffer_of_any_format_and_shape_is_sent_as_its_bytes(pair: tuple[Node, Node]) -> None:
    a, b = pair
    shaped = memoryview(bytearray(contents(96))).cast("f", shape=[4, 6])
    arrival = Arrival(b, "a", 1, 96)
    a.links.send_tensor("b", 1, shaped)
    assert arrival.whole() == contents(96)


def test_a_message_may_be_put_in_pieces_and_in_any_order(pair: tuple[Node, Node]) -> None:
    a, b = pair
    whole = memoryview(contents(MIB))
    arrival = Arrival(b, "a", 1, MIB)
    cuts = [0, 1, 1000, 200_000, 200_001, 700_000, MIB]
    ranges = list(pairwise(cuts))
    random.Random(1).shuffle(ranges)
    for first, last in ranges:
        a.links.send_tensor("b", 1, whole[first:last], offset=first, total=MIB)
    assert arrival.whole() == whole


def test_data_that_arrives_before_its_receive_is_posted_is_delivered_at_once(pair: tuple[Node, Node]) -> None:
    a, b = pair
    for tag, size in enumerate([0, 10, 100_000, MIB]):
        a.links.send_tensor("b", tag, memoryview(contents(size)))
    a.links.send("b", b"behind")  # overtakes some of the tensor messages
    assert a.links.flush(DEADLINE_S)
    assert b.message() == ("a", b"behind")
    for tag, size in enumerate([0, 10, 100_000, MIB]):
        assert Arrival(b, "a", tag, size).whole() == contents(size)


def test_a_message_that_arrives_half_early_is_delivered_whole(pair: tuple[Node, Node]) -> None:
    a, b = pair
    whole = memoryview(contents(MIB))
    a.links.send_tensor("b", 1, whole[: MIB // 2], total=MIB)
    assert a.links.flush(DEADLINE_S)
    a.links.send("b", b"half")
    b.message()
    arrival = Arrival(b, "a", 1, MIB)
    a.links.send_tensor("b", 1, whole[MIB // 2 :], offset=MIB // 2)
    assert arrival.whole() == whole


def test_many_messages_in_both_directions_arrive_exactly(pair: tuple[Node, Node]) -> None:
    chance = random.Random(3)
    sizes = [chance.choice([1, 100, 5000, 70_000, 300_000, 2 * MIB]) for _ in range(150)]
    arrivals: list[tuple[int, Arrival]] = []
    for sender, receiver in (pair, pair[::-1]):
        for tag, size in enumerate(sizes):
            if tag % 3:
                arrivals.append((tag, Arrival(receiver, sender.links.name, tag, size)))
            sender.links.send_tensor(
                receiver.links.name, tag, memoryview(contents(size, tag)), priority=chance.randrange(-2, 3)
            )
            if not tag % 3:
                arrivals.append((tag, Arrival(receiver, sender.links.name, tag, size)))
    for tag, arrival in arrivals:
        assert hashlib.sha256(arrival.whole()).digest() == hashlib.sha256(contents(sizes[tag], tag)).digest()


def test_on_data_may_forward_data_around_a_ring(node: Callable[..., Node]) -> None:
    names = ["w0", "w1", "w2", "w3"]
    nodes = {name: node(name) for name in names}
    size = 3 * MIB + 5
    buffers = {name: bytearray(size) for name in names}
    is_home = threading.Event()
    received_bytes = 0

    def forward(me: str, to: str, offset: int, length: int) -> None:
        piece = memoryview(buffers[me])[offset : offset + length]
        nodes[me].links.send_tensor(to, 1, piece, offset=offset, total=size)

    def at_home(offset: int, length: int) -> None:
        nonlocal received_bytes
        received_bytes += length
        if received_bytes == size:
            is_home.set()

    for i, name in enumerate(names):
        left, right = names[i - 1], names[(i + 1) % 4]
        nodes[name].links.add_peer(right, nodes[right].links.addresses)
        on_data = partial(forward, name, right) if i else at_home
        nodes[name].links.post_receive(left, 1, memoryview(buffers[name]), on_data)
    nodes["w0"].links.send_tensor("w1", 1, memoryview(contents(size)))
    assert is_home.wait(DEADLINE_S)
    assert buffers["w0"] == contents(size)


def test_on_done_is_called_once_in_the_io_thread_and_the_buffer_may_change_then(
    pair: tuple[Node, Node],
) -> None:
    a, b = pair
    arrival = Arrival(b, "a", 1, 4 * MIB)
    data = bytearray(contents(4 * MIB))
    callers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def done() -> None:
        data[:] = bytes(4 * MIB)
        callers.put(threading.current_thread().name)

    a.links.send_tensor("b", 1, memoryview(data), on_done=done)
    assert arrival.whole() == contents(4 * MIB)
    assert callers.get(timeout=DEADLINE_S) == "links of a"
    assert callers.empty()


def test_an_empty_piece_completes_without_being_sent(pair: tuple[Node, Node]) -> None:
    a, b = pair
    done = threading.Event()
    a.links.send_tensor("b", 1, memoryview(b""), offset=3, total=10, on_done=done.set)
    assert done.wait(DEADLINE_S)
    arrival = Arrival(b, "a", 1, 10)
    a.links.send_tensor("b", 1, memoryview(contents(10)))
    assert arrival.whole() == contents(10)


def test_bytes_that_arrive_twice_are_a_protocol_error(pair: tuple[Node, Node]) -> None:
    a, b = pair
    Arrival(b, "a", 1, 100)
    a.links.send_tensor("b", 1, memoryview(bytes(60)), total=100)
    a.links.send_tensor("b", 1, memoryview(bytes(60)), offset=40, total=100)
    error = b.loss()
    assert error.peer == "a"
    assert "a broke the protocol: bytes 40 to 100 of message 0x1 overlap bytes already received" in str(error)


@pytest.mark.parametrize("early", [False, True])
def test_a_message_of_an_unexpected_size_is_a_protocol_error(pair: tuple[Node, Node], early: bool) -> None:
    a, b = pair
    if early:
        a.links.send_tensor("b", 1, memoryview(bytes(60)))
        assert a.links.flush(DEADLINE_S)
        a.links.send("b", b"sent")
        b.message()
    Arrival(b, "a", 1, 100)
    a.links.send_tensor("b", 1, memoryview(bytes(60)))
    assert "expected message 0x1 to have 100 bytes, got 60" in str(b.loss())


def test_too_much_early_data_pauses_reading_until_it_is_expected(pair: tuple[Node, Node]) -> None:
    a, b = pair
    data = memoryview(contents(MIB))
    for tag in range(300):
        a.links.send_tensor("b", tag, data)
    a.links.send("b", b"hello")
    b.message()
    assert not a.links.flush(1.0)  # the data beyond the limit does not fit in the kernel
    assert b.links.bytes_received <= 257 * MIB
    for tag in range(300):
        assert Arrival(b, "a", tag, MIB).whole() == data
    assert a.links.flush(DEADLINE_S)


# Cancelling


def test_cancelled_messages_are_neither_delivered_nor_kept(pair: tuple[Node, Node]) -> None:
    a, b = pair
    a.links.send_tensor("b", 1 << 32, memoryview(contents(100)))  # arrives early
    assert a.links.flush(DEADLINE_S)
    a.links.send("b", b"early")
    b.message()
    posted = Arrival(b, "a", (1 << 32) + 1, 100)
    b.links.cancel(1 << 32, 2 << 32)
    a.links.send_tensor("b", (1 << 32) + 1, memoryview(contents(100)))  # arrives late
    a.links.send_tensor("b", 2 << 32, memoryview(contents(100)))
    again = Arrival(b, "a", 1 << 32, 100)
    assert Arrival(b, "a", 2 << 32, 100).whole() == contents(100)
    assert not posted.pieces
    assert not again.pieces
    assert posted.buffer == bytes(100)
    assert b.in_thread(lambda: b.links._sessions.peers["a"].inbox.early_bytes) == 0


def test_after_cancel_a_buffer_is_not_written_although_its_message_is_still_arriving(
    node: Callable[..., Node],
) -> None:
    b = node("b")
    a = Stranger("a", b).greet()
    arrival = Arrival(b, "a", 1, 600 * KIB)
    begun = threading.Event()
    b.links.post_receive("a", 2, memoryview(bytearray(10)), lambda *_: begun.set())
    a.sock.sendall(HEADER.pack(MAGIC, VERSION, FrameKind.DATA, 10, 2, 0, 10) + bytes(10))
    a.sock.sendall(HEADER.pack(MAGIC, VERSION, FrameKind.DATA, 600 * KIB, 1, 0, 600 * KIB) + b"x" * 300 * KIB)
    assert begun.wait(DEADLINE_S)
    b.links.cancel(1, 2)
    arrival.buffer[:] = bytes(600 * KIB)
    hello = b"hello"
    a.sock.sendall(b"x" * 300 * KIB + HEADER.pack(MAGIC, VERSION, FrameKind.MESSAGE, 5, 0, 0, 0) + hello)
    assert b.message() == ("a", hello)
    assert arrival.buffer == bytes(600 * KIB)
    assert not arrival.pieces


def test_after_cancel_queued_bytes_are_not_read_and_the_stream_stays_valid(
    node: Callable[..., Node],
) -> None:
    a = node("a")
    b = Stranger("b", a).greet()
    data = bytearray(b"x" * 8 * MIB)
    done: list[bool] = []
    a.links.send_tensor("b", 1, memoryview(data), on_done=lambda: done.append(True))
    a.links.cancel(1, 2)
    data[:] = b"y" * 8 * MIB
    a.links.send("b", b"behind")
    received_bytes = 0
    while (frame := b.frame()).kind == FrameKind.DATA:
        assert frame.payload is not None
        assert b"y" not in frame.payload
        received_bytes += frame.length
    assert frame.payload == b"behind"
    assert received_bytes < 8 * MIB
    assert not done


def test_a_tensor_sent_after_its_tag_was_cancelled_is_not_sent(node: Callable[..., Node]) -> None:
    a = node("a")
    b = Stranger("b", a).greet()
    a.links.cancel(5, 10)
    for tag in (9, 5, 10, 4):
        a.links.send_tensor("b", tag, memoryview(b"x"))
    assert [b.frame().tag, b.frame().tag] == [10, 4]


def test_a_socket_with_nothing_left_to_send_does_not_keep_the_thread_busy(node: Callable[..., Node]) -> None:
    a = node("a")
    b = Stranger("b", a).greet()
    peer = a.links._sessions.peers["b"]

    def be_full() -> None:
        assert peer.link is not None
        peer.link.is_full = True  # as after a put whose rest was cancelled, between two frames
        a.links._sessions._watch(peer, peer.link)

    a.in_thread(be_full)
    a.links.send("b", b"hello")
    assert b.frame().payload == b"hello"
    a.in_thread(be_full)
    for _ in range(3):  # turns of the loop, which then notices that the socket is writable
        watched = a.in_thread(lambda: peer.link is not None and peer.link.watched_events)
    assert watched == EPOLL_READ


def test_cancel_may_be_called_from_a_callback(pair: tuple[Node, Node]) -> None:
    a, b = pair
    pieces: list[int] = []

    def on_data(offset: int, length: int) -> None:
        pieces.append(offset)
        b.links.cancel(1, 2)

    b.links.post_receive("a", 1, memoryview(bytearray(4 * MIB)), on_data)
    a.links.send_tensor("b", 1, memoryview(bytes(4 * MIB)))
    a.links.send_tensor("b", 2, memoryview(bytes(10)))
    assert Arrival(b, "a", 2, 10).whole() == bytes(10)
    assert pieces == [0]


# During long callbacks


def test_an_answer_is_sent_before_the_next_message_is_delivered(node: Callable[..., Node]) -> None:
    answers: queue.SimpleQueue[bytes | bytearray | None] = queue.SimpleQueue()

    def on_message(peer: str, message: bytes) -> None:
        if message != b"first":
            answers.put(b.frame_at_once().payload)
        a.links.send("b", b"to " + message)
        take_long()

    a = node("a", on_message=on_message)
    b = Stranger("b", a, unix=True).greet()
    with a.busy():
        b.sock.sendall(
            b"".join(encode_frame(FrameKind.MESSAGE, text) for text in (b"first", b"second", b"third"))
        )
    assert [answers.get(timeout=DEADLINE_S) for _ in range(2)] == [b"to first", b"to second"]
    assert b.frame().payload == b"to third"


def test_messages_of_a_node_that_has_left_are_still_delivered(
    node: Callable[..., Node],
) -> None:
    received = []

    def on_message(peer: str, message: bytes) -> None:
        received.append(message)
        a.links.send("b", b"to " + message)
        take_long()

    a = node("a", on_message=on_message)
    b = Stranger("b", a, unix=True).greet()
    sent = [b"first", b"second", b"third"]
    with a.busy():
        b.sock.sendall(
            b"".join(encode_frame(FrameKind.MESSAGE, text) for text in sent) + encode_frame(FrameKind.BYE)
        )
        b.sock.close()
    assert a.left.get(timeout=DEADLINE_S) == "b"
    assert received == sent
    assert a.lost.empty()


# Priorities


@pytest.mark.parametrize("urgent", ["message", "put"])
def test_an_urgent_frame_is_sent_right_after_the_bytes_that_the_kernel_has_accepted(
    node: Callable[..., Node], urgent: str
) -> None:
    a = node("a")
    b = Stranger("b", a).greet()
    for tag in range(3):
        a.links.send_tensor("b", tag, memoryview(bytes(16 * MIB)), priority=5)

    def overtake() -> int:
        if urgent == "message":
            a.links.send("b", b"urgent")
        else:
            a.links.send_tensor("b", 9, memoryview(b"urgent"), priority=4)
        return a.links.bytes_sent

    accepted_bytes = a.in_thread(overtake)
    assert accepted_bytes < 48 * MIB
    position = 0
    while (frame := b.frame()).payload != b"urgent":
        assert position < accepted_bytes or position == 0
        position += HEADER_BYTES + frame.length
    assert position >= accepted_bytes


def test_tensors_are_sent_by_priority_and_in_order_within_one_priority(node: Callable[..., Node]) -> None:
    a = node("a")
    b = Stranger("b", a).greet()

    def puts() -> None:
        for tag, priority in enumerate([0, 7, -3, 0, 7]):
            a.links.send_tensor("b", tag, memoryview(bytes(150 * KIB)), priority=priority)

    a.in_thread(puts)
    order: list[int] = []
    size = 0
    while size < 5 * 150 * KIB:
        frame = b.frame()
        order.append(frame.tag)
        size += frame.length
    assert [tag for tag, _ in groupby(order)] == [2, 0, 3, 1, 4]


def test_a_peer_that_does_not_read_does_not_delay_other_peers(node: Callable[..., Node]) -> None:
    a, c = node("a"), node("c")
    a.links.add_peer("c", c.links.addresses)
    silent = Stranger("b", a).greet()
    a.links.send_tensor("b", 1, memoryview(bytes(32 * MIB)), priority=-9)
    arrival = Arrival(c, "a", 1, 8 * MIB)
    a.links.send_tensor("c", 1, memoryview(contents(8 * MIB)), priority=9)
    assert arrival.whole() == contents(8 * MIB)
    assert not a.links.flush(0.1)
    assert silent.frame().tag == 1


# Errors of the caller


@pytest.mark.parametrize("where", ["on_message", "on_data", "done", "call"])
def test_an_exception_in_a_callback_ends_the_endpoint_and_is_reported(where: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("my own mistake")

    options = {"on_message": fail} if where == "on_message" else {}
    a, b = Node("a", **options), Node("b")
    b.links.add_peer("a", a.links.addresses)
    b.links.send("a", b"hello")
    if where == "on_data":
        a.links.post_receive("b", 1, memoryview(bytearray(10)), fail)
        b.links.send_tensor("a", 1, memoryview(bytes(10)))
    elif where == "done":
        a.links.send_tensor("b", 1, memoryview(bytes(10)), on_done=fail)
    elif where == "call":
        a.message()
        a.links.call_soon(fail)
    error = a.errors.get(timeout=DEADLINE_S)
    assert str(error) == "my own mistake"
    assert b.loss().peer == "a"
    with pytest.raises(LinkError, match="the links of a have failed") as caught:
        a.links.send("b", b"too late")
    assert caught.value.__cause__ is error
    assert not a.links.flush(1.0)
    a.links.close()
    b.links.close()


def test_without_on_error_an_exception_is_raised_in_the_thread() -> None:
    caught: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    before, threading.excepthook = threading.excepthook, lambda args: caught.put(args.exc_value)
    try:
        a = Node("a", on_error=None)
        a.links.call_soon(lambda: 1 // 0)
        assert isinstance(caught.get(timeout=DEADLINE_S), ZeroDivisionError)
        a.links.close()
    finally:
        threading.excepthook = before


def test_a_protocol_error_from_on_message_loses_that_peer_only(node: Callable[..., Node]) -> None:
    def on_message(peer: str, message: bytes) -> None:
        if message == b"nonsense":
            raise ProtocolError("expected sense, got nonsense")
        good.put(peer)

    good: queue.SimpleQueue[str] = queue.SimpleQueue()
    a, b, c = node("a", on_message=on_message), node("b"), node("c")
    for one in (b, c):
        one.links.add_peer("a", a.links.addresses)
    b.links.send("a", b"nonsense")
    error = a.loss()
    assert str(error) == "b broke the protocol: expected sense, got nonsense"
    c.links.send("a", b"sense")
    assert good.get(timeout=DEADLINE_S) == "c"


def test_bad_arguments_are_refused_by_the_call(pair: tuple[Node, Node]) -> None:
    links = pair[0].links
    nothing = lambda *_: None  # noqa: E731
    with pytest.raises(ValueError, match="this node's own, a"):
        links.send("a", b"")
    with pytest.raises(ValueError, match="printable name"):
        links.send("", b"")
    with pytest.raises(ValueError, match="bytes 5 to 15 of 10"):
        links.send_tensor("b", 1, memoryview(bytes(10)), offset=5, total=10)
    with pytest.raises(ValueError, match="tag 0x1"):
        links.send_tensor("b", 1 << 64, memoryview(bytes(10)))
    with pytest.raises(ValueError, match="C-contiguous"):
        links.send_tensor("b", 1, memoryview(bytes(10))[::2])
    with pytest.raises(ValueError, match="writable"):
        links.post_receive("b", 1, memoryview(bytes(10)), nothing)
    with pytest.raises(ValueError, match="tcp://host:port"):
        links.add_peer("b", ["worker-2:4000"])
    with pytest.raises(ValueError, match=r"other nodes reach this one, got '0\.0\.0\.0'"):
        Node("c", host="0.0.0.0")
    with pytest.raises(ValueError, match="silent_s > 2 heartbeat_s"):
        Node("c", heartbeat_s=1.0, silent_s=1.5)
    with pytest.raises(ValueError, match="token"):
        Node("c", token="")
    with pytest.raises(ValueError, match="connect_s > 0"):
        Node("c", connect_s=0)


def test_byte_and_frame_counters_match(pair: tuple[Node, Node]) -> None:
    a, b = pair
    Arrival(b, "a", 1, 2 * MIB)
    a.links.send("b", b"hello")
    a.links.send_tensor("b", 1, memoryview(bytes(2 * MIB)))
    assert a.links.flush(DEADLINE_S)
    a.links.send("b", b"last")
    b.message()
    b.message()
    assert a.in_thread(lambda: a.links.bytes_sent) == b.links.bytes_received >= 2 * MIB + 9 + 4 * HEADER_BYTES
    assert b.links.frames_received >= 4


def test_an_endpoint_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, offbeat.runtime.transport.endpoint\n"
        "assert not {'torch', 'numpy', 'pickle'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)
