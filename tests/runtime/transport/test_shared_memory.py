"""Memory shared between nodes on one host: bytes not sent, permission to write, and hostile peers."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.runtime.transport import shared_memory
from offbeat.runtime.transport.addresses import listen_unix
from offbeat.runtime.transport.framing import (
    HEADER,
    MAGIC,
    MAX_DATA_BYTES,
    SHARED_PAYLOAD,
    VERSION,
    Frame,
    FrameKind,
    FrameReader,
    shared_slice,
)
from offbeat.runtime.transport.handshake import AcceptorHandshake, SessionPosition
from offbeat.runtime.transport.shared_memory import (
    MAX_REGIONS,
    MIN_SHARED_BYTES,
    ImportedRegions,
    RegionAllocator,
)
from support import endpoints
from support.endpoints import DEADLINE_S, KIB, MIB, Arrival, Node, Stranger, contents, take_long
from support.open_files import few_files

node, pair = endpoints.node, endpoints.pair  # the fixtures

pytestmark = pytest.mark.skipif(not shared_memory.HAS_SHARED_MEMORY, reason="memory is shared on Linux only")

F_SEALED = shared_memory._SEALS
ANNOUNCED_MAX = 4  # frames of 1 MiB that are not read


def filled(at: Node, size: int, seed: int = 0) -> memoryview:
    """Filled memory that peers can read."""
    memory = at.links.allocate(size)
    memory[:] = contents(size, seed)
    assert at.links._regions.find(memory)
    return memory


def exchange_messages(a: Node, b: Node) -> None:
    """Both nodes have received all earlier messages when this returns."""
    for one, other in (a, b), (b, a):
        one.links.send(other.links.name, b"heard?")
        other.message()


def frame(kind: FrameKind, *, tag: int = 0, offset: int = 0, total: int = 0, payload: bytes = b"") -> bytes:
    return HEADER.pack(MAGIC, VERSION, kind, len(payload), tag, offset, total) + payload


def announcement(
    tag: int, length: int, *, region: int = 1, place: int = 0, offset: int = 0, total: int | None = None
) -> bytes:
    payload = SHARED_PAYLOAD.pack(region, place, length)
    return frame(FrameKind.SHARED, tag=tag, offset=offset, total=total or length, payload=payload)


def memfd(size: int, seals: int = F_SEALED) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        shared_memory.fcntl.fcntl(descriptor, shared_memory.fcntl.F_ADD_SEALS, seals)
    return descriptor


def write_only(descriptor: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
    finally:
        os.close(descriptor)


def a_file(size: int) -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return os.dup(file.fileno())


@contextmanager
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    if len(os.listdir("/proc/self/fd")) > before:
        gc.collect()  # slow late in a run of many tests
    assert len(os.listdir("/proc/self/fd")) <= before  # descriptors of earlier tests may be closed meanwhile


# Without descriptors


def test_memory_is_shared_only_if_enough_descriptors_are_left_for_connections() -> None:
    regions = RegionAllocator(lambda region: None)
    with no_descriptor_is_left():
        with few_files(shared_memory._RESERVED_DESCRIPTORS):
            assert regions.allocate(MIB) is None
        with few_files(shared_memory._RESERVED_DESCRIPTORS + 1):
            assert regions.allocate(MIB) is not None


def test_a_node_that_cannot_accept_a_peers_memory_names_itself_as_the_cause(
    node: Callable[..., Node],
) -> None:
    a, b = node("a"), node("b")
    a.links.add_peer("b", b.links.addresses)
    a.links.send("b", b"hello")
    assert b.message() == ("a", b"hello")
    memory = a.links.allocate(MIB)
    with few_files(0):
        a.links.send_tensor("b", 1, memory)
        error = b.loss()
    assert error.failure == "no files"
    assert str(error).startswith("b cannot accept memory shared by a: too many open files: raise `ulimit -n`")


# Reads in place


@pytest.mark.parametrize("size", [MIN_SHARED_BYTES, MAX_DATA_BYTES, 9 * MIB + 7])
def test_bytes_in_shared_memory_arrive_exactly_and_are_not_sent(pair: tuple[Node, Node], size: int) -> None:
    a, b = pair
    memory = filled(a, size)
    arrival = Arrival(b, "a", 7, size)
    a.links.send_tensor("b", 7, memory)
    assert arrival.whole() == contents(size)
    assert a.in_thread(lambda: a.links.bytes_sent) < 2 * KIB


def test_parts_of_a_region_may_be_sent_in_any_order(pair: tuple[Node, Node]) -> None:
    a, b = pair
    memory = filled(a, MIB)
    arrival = Arrival(b, "a", 1, 700 * KIB)
    for first, last in (300, 700), (0, 1), (1, 300):
        piece = memory[(100 + first) * KIB : (100 + last) * KIB]
        a.links.send_tensor("b", 1, piece, offset=first * KIB, total=700 * KIB)
    assert arrival.whole() == contents(MIB)[100 * KIB : 800 * KIB]


def test_on_shared_receives_the_senders_memory_instead_of_a_copy(pair: tuple[Node, Node]) -> None:
    a, b = pair
    memory = filled(a, 3 * MIB)
    into = memoryview(bytearray(3 * MIB))
    arrived = threading.Event()
    pieces: list[tuple[int, bytes]] = []

    def on_shared(offset: int, source: memoryview) -> None:
        pieces.append((offset, bytes(source)))
        if sum(len(piece) for _, piece in pieces) == 3 * MIB:
            arrived.set()

    b.links.post_receive("a", 1, into, lambda *_: pieces.append((-1, b"")), on_shared)
    a.links.send_tensor("b", 1, memory)
    assert arrived.wait(DEADLINE_S)
    assert pieces == [(i * MIB, contents(3 * MIB)[i * MIB : (i + 1) * MIB]) for i in range(3)]
    assert into == bytes(3 * MIB)
    assert not b.in_thread(lambda: b.links._sessions.peers["a"].inbox._posted)  # the message is complete


@pytest.mark.parametrize("a_on_unix", [True, False])
def test_a_peer_reached_over_tcp_is_sent_the_bytes(node: Callable[..., Node], a_on_unix: bool) -> None:
    a, b, c = node("a"), node("b", unix=False), node("c")
    for other in (b, c) if a_on_unix else (b,):
        a.links.add_peer(other.links.name, other.links.addresses)
    memory = a.links.allocate(MIB)
    memory[:] = contents(MIB)
    arrival = Arrival(b, "a", 1, MIB)
    a.links.send_tensor("b", 1, memory)
    assert arrival.whole() == contents(MIB)
    assert a.in_thread(lambda: a.links.bytes_sent) > MIB


def test_bytes_announced_before_their_receive_is_posted_are_delivered_at_once(
    pair: tuple[Node, Node],
) -> None:
    a, b = pair
    done = threading.Event()
    memory = filled(a, 2 * MIB)
    a.links.send_tensor("b", 1, memory, on_done=done.set)
    assert done.wait(DEADLINE_S)
    memory[:] = bytes(2 * MIB)  # done: the memory may be written
    assert Arrival(b, "a", 1, 2 * MIB).whole() == contents(2 * MIB)


def test_a_region_is_exported_once_per_connection_and_unmapped_without_references(
    pair: tuple[Node, Node],
) -> None:
    a, b = pair
    exchange_messages(a, b)
    gc.collect()  # garbage of other tests
    with no_descriptor_is_left():
        memory = filled(a, MIB)
        for tag in range(3):
            arrival = Arrival(b, "a", tag, MIB)
            a.links.send_tensor("b", tag, memory)
            assert arrival.whole() == contents(MIB)
        imported_regions = b.in_thread(lambda: b.links._sessions.peers["a"].link.imported)
        assert len(imported_regions) == 1
        exchange_messages(a, b)
        del memory
        exchange_messages(a, b)
        assert len(imported_regions) == 0
        assert a.links._regions._sorted == ([], [])


def test_after_a_loss_regions_are_exported_again(node: Callable[..., Node]) -> None:
    a = node("a")
    first = node("b")
    a.links.add_peer("b", first.links.addresses)
    memory = filled(a, MIB)
    done = threading.Event()
    a.links.send_tensor("b", 1, memory, on_done=done.set)
    assert done.wait(DEADLINE_S)
    first.links.close()
    assert a.left.get(timeout=DEADLINE_S) == "b"
    second = node("b")
    a.links.add_peer("b", second.links.addresses)
    arrival = Arrival(second, "a", 2, MIB)
    a.links.send_tensor("b", 2, memory)
    assert arrival.whole() == contents(MIB)


def test_memory_beyond_the_limit_of_regions_is_not_shared(pair: tuple[Node, Node]) -> None:
    a, b = pair
    kept = [a.links.allocate(MIN_SHARED_BYTES) for _ in range(MAX_REGIONS + 1)]
    assert all(a.links._regions.find(memory) for memory in kept[:-1])
    assert not a.links._regions.find(kept[-1])
    arrivals = [Arrival(b, "a", tag, MIN_SHARED_BYTES) for tag in range(len(kept))]
    for tag, memory in enumerate(kept):
        memory[:] = contents(MIN_SHARED_BYTES, tag)
        a.links.send_tensor("b", tag, memory)
    for tag, arrival in enumerate(arrivals):
        assert arrival.whole() == contents(MIN_SHARED_BYTES, tag)


def test_shared_memory_is_found_by_its_address_during_its_lifetime() -> None:
    released: list[shared_memory.Region] = []
    regions = RegionAllocator(released.append)
    memory = regions.allocate(MIB)
    assert memory is not None
    region, place = regions.find(memory[1000:5000])
    assert (region.size, place) == (MIB, 1000)
    assert regions.find(memoryview(bytearray(MIB))) is None
    assert regions.find(memoryview(bytes(10))) is None
    assert regions.find(memory[:0]) is None
    with pytest.raises(PermissionError):
        os.ftruncate(region.descriptor, 0)
    del memory
    assert released == [region]
    with pytest.raises(OSError) as caught:
        os.fstat(region.descriptor)
    assert caught.value.errno == errno.EBADF
    # Until the region is removed, its address may be reused by other memory, which must not be found.
    with mmap.mmap(-1, MIB) as others:
        region.start = shared_memory.ctypes.addressof(shared_memory.ctypes.c_char.from_buffer(others))
        regions._sort([region])
        assert regions.find(memoryview(others)) is None
        gc.collect()
    regions.remove(region)
    assert regions._sorted == ([], [])


def test_a_region_exported_right_after_the_welcome_is_mapped(node: Callable[..., Node]) -> None:
    """The dialler may receive both at once, while it still waits for the handshake to end."""
    b = node("b")
    listener, address = listen_unix()
    with listener:
        b.links.add_peer("a", [address])
        arrival = Arrival(b, "a", 1, MIB)
        b.links.send("a", b"hello")
        sock, _ = listener.accept()
    with sock:
        sock.settimeout(DEADLINE_S)
        acceptor, reader = AcceptorHandshake(job="job", token="secret", node="a"), FrameReader(None)
        while acceptor.peer is None:
            reader.on_received(sock.recv_into(reader.buffers()[0]))
            while (arrived := reader.next_frame()) is not None:
                sock.sendall(acceptor.on_frame(arrived))
        descriptor = memfd(MIB)
        socket.send_fds(
            sock,
            [acceptor.welcome(SessionPosition("anything")) + REGION + announcement(1, MIB)],
            [descriptor],
        )
        os.close(descriptor)
        assert arrival.whole() == bytes(MIB)


# Permission to write


def test_on_done_is_called_when_the_peer_has_read(node: Callable[..., Node]) -> None:
    a = node("a")
    b = Stranger("b", a, unix=True).greet()
    a.links._regions.has_local_peers = True
    memory = filled(a, 2 * MIB)
    done = threading.Event()
    a.links.send_tensor("b", 1, memory, on_done=done.set)
    assert [b.frame().kind for _ in range(3)] == [FrameKind.REGION, FrameKind.SHARED, FrameKind.SHARED]
    b.sock.sendall(frame(FrameKind.SHARED_ACK, total=1) + frame(FrameKind.MESSAGE, payload=b"one"))
    a.message()
    assert not done.is_set()
    assert a.links.has_readers(memory)
    b.sock.sendall(frame(FrameKind.SHARED_ACK, total=1) + frame(FrameKind.MESSAGE, payload=b"two"))
    a.message()
    assert done.is_set()
    assert not a.links.has_readers(memory)


def test_announced_memory_has_readers_until_the_peer_acknowledges_even_if_cancelled(
    node: Callable[..., Node],
) -> None:
    a = node("a")
    b = Stranger("b", a, unix=True).greet()
    a.links._regions.has_local_peers = True
    memory = filled(a, 2 * ANNOUNCED_MAX * MIB)
    done = threading.Event()
    a.links.send_tensor("b", 1, memory[: 2 * MIB], on_done=done.set)
    a.links.send_tensor("b", 2, memory, on_done=done.set)
    assert b.frame().kind == FrameKind.REGION
    first = [shared_slice(b.frame()) for _ in range(ANNOUNCED_MAX)]
    assert [length for _, _, length in first] == [MIB] * ANNOUNCED_MAX
    a.links.cancel(1, 3)
    assert a.links.has_readers(memory)
    assert a.links.has_readers(memory[5:6])
    assert not a.links.has_readers(memoryview(bytearray(10)))
    b.sock.sendall(
        frame(FrameKind.SHARED_ACK, total=ANNOUNCED_MAX) + frame(FrameKind.MESSAGE, payload=b"read")
    )
    a.message()
    assert not a.links.has_readers(memory)
    assert not done.is_set()
    a.links.send("b", b"behind")
    assert b.frame().payload == b"behind"  # the rest was not announced


def test_memory_announced_to_a_lost_peer_still_has_readers(node: Callable[..., Node]) -> None:
    a = node("a")
    b = Stranger("b", a, unix=True).greet()
    a.links._regions.has_local_peers = True
    memory = filled(a, MIB)
    a.links.send_tensor("b", 1, memory)
    assert [b.frame().kind, b.frame().kind] == [FrameKind.REGION, FrameKind.SHARED]
    b.sock.close()
    assert a.loss().peer == "b"
    assert a.links.has_readers(memory)


def test_the_memory_of_a_killed_peer_can_still_be_read(node: Callable[..., Node]) -> None:
    b = node("b")
    arrived: list[bytes] = []
    over = threading.Event()

    def on_shared(offset: int, source: memoryview) -> None:
        child.communicate()  # the child ends with its standard input
        assert child.returncode == -signal.SIGKILL
        arrived.append(bytes(source))
        over.set()

    b.links.post_receive("a", 1, memoryview(bytearray(MIB)), lambda *_: None, on_shared)
    code = (
        "import sys, os, signal, threading\n"
        "from offbeat.runtime.transport.endpoint import Endpoint\n"
        "a = Endpoint('a', job='job', token='secret', on_message=print, on_lost=print)\n"
        "a.add_peer('b', sys.argv[1:])\n"
        "memory = a.allocate(1 << 20)\n"
        "memory[:] = b'x' * (1 << 20)\n"
        "a.send_tensor('b', 1, memory)\n"
        "sys.stdin.read()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, *b.links.addresses]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert over.wait(DEADLINE_S)
    assert arrived == [b"x" * MIB]
    assert b.loss().peer == "a"


# Priorities


def test_an_urgent_message_overtakes_all_unannounced_bytes(node: Callable[..., Node]) -> None:
    a = node("a")
    b = Stranger("b", a, unix=True).greet()
    a.links._regions.has_local_peers = True
    memory, urgent = filled(a, 2 * ANNOUNCED_MAX * MIB), filled(a, MIB)
    a.links.send_tensor("b", 1, memory, priority=5)
    kinds = [b.frame().kind for _ in range(1 + ANNOUNCED_MAX)]
    assert kinds == [FrameKind.REGION, *[FrameKind.SHARED] * ANNOUNCED_MAX]
    a.links.send("b", b"urgent")
    assert b.frame().payload == b"urgent"
    a.links.send_tensor("b", 2, urgent, priority=4)
    assert b.frame().kind == FrameKind.REGION  # nothing more until b acknowledges
    b.sock.sendall(frame(FrameKind.SHARED_ACK, total=2))
    assert [b.frame().tag, b.frame().tag] == [2, 1]


def test_waiting_announcements_are_sent_before_the_next_message_is_delivered(
    node: Callable[..., Node],
) -> None:
    seen: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    a = node("a", on_message=lambda *_: seen.put(b.frame_at_once()))
    b = Stranger("b", a, unix=True).greet()
    a.links._regions.has_local_peers = True
    a.links.send_tensor("b", 1, filled(a, 2 * ANNOUNCED_MAX * MIB))
    assert [b.frame().kind for _ in range(1 + ANNOUNCED_MAX)] == [
        FrameKind.REGION,
        *[FrameKind.SHARED] * ANNOUNCED_MAX,
    ]
    with a.busy():
        b.sock.sendall(frame(FrameKind.SHARED_ACK, total=1) + frame(FrameKind.MESSAGE, payload=b"and now?"))
    assert seen.get(timeout=DEADLINE_S).kind == FrameKind.SHARED


def test_each_announcement_is_acknowledged_before_the_next_is_read(node: Callable[..., Node]) -> None:
    seen: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    b = node("b")
    a = Stranger("a", b, unix=True).greet()

    def on_shared(tag: int) -> None:
        if tag:
            seen.put(a.frame_at_once())
        take_long()

    for tag in range(3):
        b.links.post_receive(
            "a", tag, memoryview(bytearray(10)), lambda *_: None, lambda *_, tag=tag: on_shared(tag)
        )
    with b.busy():
        send_stream(a, REGION, [memfd(MIB)])
        send_stream(a, b"".join(announcement(tag, 10) for tag in range(3)), [])
    answers = [seen.get(timeout=DEADLINE_S), seen.get(timeout=DEADLINE_S), a.frame()]
    assert [(one.kind, one.total) for one in answers] == [(FrameKind.SHARED_ACK, 1)] * 3


def test_unacked_bytes_raises_the_limit_of_unread_announcements(node: Callable[..., Node]) -> None:
    a = node("a", unacked_bytes=8 * MIB)
    b = Stranger("b", a, unix=True).greet()
    a.links._regions.has_local_peers = True
    a.links.send_tensor("b", 1, filled(a, 12 * MIB))
    assert [b.frame().kind for _ in range(9)] == [FrameKind.REGION, *[FrameKind.SHARED] * 8]
    a.links.send("b", b"urgent")
    assert b.frame().payload == b"urgent"
    with pytest.raises(ValueError, match="expected unacked_bytes from 1 to 8388608, got 8388609"):
        node("c", unacked_bytes=8 * MIB + 1)


def test_a_peer_that_acknowledges_nothing_still_receives_heartbeats(node: Callable[..., Node]) -> None:
    a = node("a", heartbeat_s=0.05)
    b = Stranger("b", a, unix=True).greet()
    a.links._regions.has_local_peers = True
    a.links.send_tensor("b", 1, filled(a, 2 * ANNOUNCED_MAX * MIB))
    seen = Counter()
    # The announcement precedes all other frames:
    while sum(seen.values()) - seen[FrameKind.HEARTBEAT] < 1 + ANNOUNCED_MAX:
        seen[b.frame().kind] += 1
    assert seen[FrameKind.REGION] == 1
    assert [b.frame().kind for _ in range(2)] == [FrameKind.HEARTBEAT, FrameKind.HEARTBEAT]


# Hostile peers


def send_stream(stranger: Stranger, stream: bytes, descriptors: list[int]) -> None:
    """Send bytes and descriptors, and close the descriptors."""
    if descriptors:
        socket.send_fds(stranger.sock, [stream], descriptors)
    else:
        stranger.sock.sendall(stream)
    for descriptor in descriptors:
        os.close(descriptor)


REGION = frame(FrameKind.REGION, tag=1, total=MIB)

HOSTILE: dict[str, tuple[Callable[[], list[tuple[bytes, list[int]]]], str]] = {
    "no descriptor": (lambda: [(REGION, [])], "expected the descriptor of region 1, got none"),
    "no memory": (
        lambda: [(REGION, [os.open("/dev/null", os.O_RDONLY)])],
        "expected the descriptor of shared memory",
    ),
    "a file": (
        lambda: [(REGION, [a_file(MIB)])],
        "shared memory|cannot shrink",
    ),
    "not sealed": (lambda: [(REGION, [memfd(MIB, 0)])], "expected memory that cannot shrink"),
    "smaller": (lambda: [(REGION, [memfd(MIB - 1)])], "expected a region of 1048576 bytes, got one of"),
    "larger": (lambda: [(REGION, [memfd(MIB + 1)])], "expected a region of 1048576 bytes, got one of"),
    "claimed to be huge": (
        lambda: [(frame(FrameKind.REGION, tag=1, total=(1 << 64) - 1), [memfd(MIB)])],
        "expected a region of 18446744073709551615 bytes",
    ),
    "huge": (
        lambda: [(frame(FrameKind.REGION, tag=1, total=1 << 62), [memfd(1 << 62)])],
        "cannot map region 1 of 4611686018427387904 bytes",
    ),
    "not readable": (
        lambda: [(REGION, [write_only(memfd(MIB))])],
        "cannot map region 1",
    ),
    "twice": (
        lambda: [(REGION, [memfd(MIB)]), (REGION, [memfd(MIB)])],
        "expected the number of a new region, got 1 again",
    ),
    "two at once": (lambda: [(REGION, [memfd(MIB), memfd(MIB)])], "expected one descriptor a region"),
    "many at once": (
        lambda: [(REGION, [memfd(MIB) for _ in range(200)])],
        "expected one descriptor a region",
    ),
    "with a message": (
        lambda: [(frame(FrameKind.MESSAGE, payload=b"hello"), [memfd(MIB)])],
        "expected descriptors only with REGION frames",
    ),
    "with tensor bytes": (
        lambda: [(frame(FrameKind.DATA, tag=1, total=2, payload=b"xy"), [memfd(MIB)])],
        "expected descriptors only with REGION frames",
    ),
    "with half a message": (
        lambda: [(frame(FrameKind.HEARTBEAT)[:5], [memfd(MIB)]), (frame(FrameKind.HEARTBEAT)[5:], [])],
        "expected descriptors only with REGION frames",
    ),
    "too many regions": (
        lambda: [
            (frame(FrameKind.REGION, tag=i + 1, total=4096), [memfd(4096)]) for i in range(MAX_REGIONS + 1)
        ],
        f"expected at most {MAX_REGIONS} regions",
    ),
    "unknown": (lambda: [(announcement(1, 10), [])], "expected a region that was announced, got 1"),
    "withdrawn": (
        lambda: [(REGION, [memfd(MIB)]), (frame(FrameKind.WITHDRAW, tag=1) + announcement(1, 10), [])],
        "expected a region that was announced, got 1",
    ),
    "withdrawn, but never exported": (
        lambda: [(frame(FrameKind.WITHDRAW, tag=1), [])],
        "expected a region that was announced, got 1",
    ),
    "beyond the end": (
        lambda: [(REGION, [memfd(MIB)]), (announcement(1, 10, place=MIB - 9), [])],
        "expected bytes within a region of 1048576",
    ),
    "far beyond the end": (
        lambda: [(REGION, [memfd(MIB)]), (announcement(1, 10, place=(1 << 64) - 5), [])],
        "expected bytes within a region of 1048576",
    ),
    "beyond the message": (
        lambda: [(REGION, [memfd(MIB)]), (announcement(1, 10, offset=1, total=10), [])],
        "expected bytes within a message of 10",
    ),
    "too much in a frame": (
        lambda: [
            (frame(FrameKind.REGION, tag=1, total=8 * MIB), [memfd(8 * MIB)]),
            (announcement(1, 4 * MIB + 1), []),
        ],
        "of at most 4194304 bytes",
    ),
    "too much at a time": (
        lambda: [
            (REGION, [memfd(MIB)]),
            (b"".join(announcement(100 + tag, MIB) for tag in range(13)), []),
        ],
        "expected at most 8388608 announced bytes at a time",
    ),
    "nothing": (
        lambda: [(REGION, [memfd(MIB)]), (announcement(1, 0, total=10), [])],
        "expected bytes within a message of 10, got 0",
    ),
    "an acknowledgement without an announcement": (
        lambda: [(frame(FrameKind.SHARED_ACK, total=1), [])],
        "expected at most 0 SHARED frames to be read, got 1",
    ),
    "bytes twice": (
        lambda: [
            (REGION, [memfd(MIB)]),
            (announcement(9, 60, total=100) + announcement(9, 60, offset=40, total=100), []),
        ],
        "overlap bytes already received",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_peer_is_lost_and_leaves_no_descriptor(node: Callable[..., Node], case: str) -> None:
    script, pattern = HOSTILE[case]
    b = node("b")
    Arrival(b, "a", 9, 100)
    with no_descriptor_is_left():
        a = Stranger("a", b, unix=True).greet()
        with suppress(BrokenPipeError, ConnectionResetError):  # b may close the connection before all is sent
            for stream, descriptors in script():
                send_stream(a, stream, descriptors)
        error = b.loss()
        a.sock.close()
    assert error.peer == "a"
    assert re.search(pattern, str(error)), error


def test_over_tcp_nothing_can_be_exported(node: Callable[..., Node]) -> None:
    b = node("b")
    a = Stranger("a", b).greet()
    a.sock.sendall(announcement(1, 10))
    assert "expected no SHARED frame from another host" in str(b.loss())


def test_descriptors_of_strangers_are_closed(node: Callable[..., Node]) -> None:
    b = node("b")
    with no_descriptor_is_left():
        a = Stranger("a", b, unix=True)
        send_stream(a, a.greeting.hello(), [memfd(MIB), memfd(MIB)])
        a.greeting.on_frame(a.frame())
        a.sock.close()
        b.in_thread(lambda: None)
        for half_open in list(b.links._sessions.acceptor._half_open):
            b.in_thread(lambda half_open=half_open: b.links._sessions.acceptor.close(half_open))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_frames_and_descriptors_are_pieces_of_memory_or_a_protocol_error(
    more: st.DataObject,
) -> None:
    """As in the endpoint: descriptors arrive with some bytes, and every complete frame is handled."""
    small = st.one_of(st.integers(0, 3), st.sampled_from([4095, 4096, 4097, 1 << 62, (1 << 64) - 1]))
    with no_descriptor_is_left():
        reader, imported_regions = FrameReader(lambda *_: None), ImportedRegions()
        with suppress(ProtocolError):
            for _ in range(more.draw(st.integers(1, 12))):
                kind = more.draw(
                    st.sampled_from(
                        [FrameKind.REGION, FrameKind.SHARED, FrameKind.SHARED, FrameKind.WITHDRAW]
                    )
                )
                payload = (
                    SHARED_PAYLOAD.pack(*(more.draw(small) for _ in range(3)))
                    if kind == FrameKind.SHARED
                    else b""
                )
                tag, total = more.draw(small), more.draw(small)
                stream = frame(kind, tag=tag, total=total, payload=payload)
                wanted = more.draw(st.sampled_from([int(kind == FrameKind.REGION), 0, 1, 2]))
                sizes = [more.draw(st.sampled_from([4096, 4096, 0, 4095])) for _ in range(wanted)]
                fds = [memfd(size, more.draw(st.sampled_from([F_SEALED, F_SEALED, 0]))) for size in sizes]
                imported_regions.on_descriptors(
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds).tobytes())], truncated=False
                )
                reader.buffers()[0][: len(stream)] = stream
                reader.on_received(len(stream))
                arrived = reader.next_frame()
                assert arrived is not None
                handle_frame(imported_regions, arrived)
                imported_regions.check_descriptors(partial=reader.is_partial)
        imported_regions.close()


def handle_frame(imported_regions: ImportedRegions, arrived: Frame) -> None:
    if arrived.kind == FrameKind.REGION:
        imported_regions.map(arrived.tag, arrived.total)
    elif arrived.kind == FrameKind.WITHDRAW:
        imported_regions.unmap(arrived.tag)
    else:
        _, _, length = shared_slice(arrived)
        assert bytes(imported_regions.view(*shared_slice(arrived))) == bytes(length)
