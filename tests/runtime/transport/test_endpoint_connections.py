"""Promises of `Endpoint` about connections: opening, refusing, losing and closing them."""

from __future__ import annotations

import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbeat.errors import LinkError, OffbeatError, ProtocolError
from offbeat.runtime.transport.addresses import parse_address, this_host_id
from offbeat.runtime.transport.connections import TCP_WAKE_BYTES
from offbeat.runtime.transport.framing import HEADER, MAGIC, VERSION, FrameKind, FrameReader
from offbeat.runtime.transport.handshake import AcceptorHandshake, RefusedError, SessionPosition
from support import endpoints
from support.endpoints import DEADLINE_S, KIB, MIB, Arrival, Node, Stranger, contents
from support.open_files import few_files
from support.run_logs import wait_until

node, pair = endpoints.node, endpoints.pair  # the fixtures


# One connection per pair


def established(*nodes: Node) -> int:
    """The number of TCP connections that the nodes have accepted, from the kernel's list."""
    ports = {f"{one.tcp()[1]:04X}" for one in nodes}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].rpartition(":")[2] in ports and row[3] == "01" for row in rows)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="counts connections in /proc/net/tcp")
def test_dialling_from_both_sides_at_once_leaves_one_connection_and_loses_no_message(
    node: Callable[..., Node],
) -> None:
    for turn in range(60):
        a, b = node("a", unix=False), node("b", unix=False)
        a.links.add_peer("b", b.links.addresses)
        b.links.add_peer("a", a.links.addresses)
        arrivals = [Arrival(b, "a", 1, 200_000), Arrival(a, "b", 1, 200_000)]
        barrier = threading.Barrier(2)

        def begin(me: Node, to: str, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(DEADLINE_S)
            for i in range(20):
                me.links.send(to, b"%d" % i)
            me.links.send_tensor(to, 1, memoryview(contents(200_000)))

        threads = [threading.Thread(target=begin, args=args) for args in [(a, "b"), (b, "a")]]
        for thread in threads[:: 1 if turn % 2 else -1]:
            thread.start()
        for receiver, arrival in zip((b, a), arrivals, strict=True):
            assert arrival.whole() == contents(200_000)
            assert [receiver.message()[1] for _ in range(20)] == [b"%d" % i for i in range(20)]
        a.links.send("b", b"last")
        assert b.message() == ("a", b"last")
        limit_s = time.monotonic() + DEADLINE_S
        while (count := established(a, b)) != 1 and time.monotonic() < limit_s:
            pass  # the dropped dial may be closing
        assert count == 1
        for one in (a, b):
            one.links.close()
            assert one.messages.empty()
            assert one.lost.empty()
            assert one.refused.empty()


def test_the_larger_names_dial_waits_and_is_accepted_when_the_smaller_names_dial_fails(
    node: Callable[..., Node],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unread:  # the kernel accepts, and no answer is sent
        a = node("a", connect_s=10.0)  # z dials meanwhile, also on a busy machine
        a.links.add_peer("z", [f"tcp://127.0.0.1:{unread.getsockname()[1]}"])
        a.links.send("z", b"found you")
        unread.accept()[0].recv(1)  # a has sent its hello, so that its dial may still succeed
        z = node("z")
        z.links.add_peer("a", a.links.addresses)
        z.links.send("a", b"I am here")
        assert a.message() == ("z", b"I am here")
        assert z.message() == ("a", b"found you")
        assert a.lost.empty()


def test_a_second_node_of_the_same_name_is_refused(node: Callable[..., Node]) -> None:
    a, first = node("a", connect_s=1.0), node("twin")
    first.links.add_peer("a", a.links.addresses)
    first.links.send("a", b"first")
    assert a.message() == ("twin", b"first")
    second = node("twin")
    second.links.add_peer("a", a.links.addresses)
    second.links.send("a", b"second")
    assert "refused the connection: a already has a connection to twin" in str(second.loss())
    assert a.refusal().endswith("a already has a connection to twin")
    a.links.send("twin", b"still you")
    assert first.message() == ("a", b"still you")


# Without descriptors


@pytest.mark.parametrize("unix", [True, False])
def test_a_node_out_of_descriptors_sends_the_cause_to_every_dialler(
    node: Callable[..., Node], unix: bool
) -> None:
    a = node("a")
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(2):  # the reserved descriptor is available again
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= opened, "an end of what was refused")
        with few_files(1):
            stranger = Stranger("b", a, unix=unix)  # uses the only free descriptor
            with pytest.raises(RefusedError, match=r"too many open files: raise `ulimit -n`") as refused:
                stranger.greeting.on_frame(stranger.frame())
            stranger.sock.close()
        assert refused.value.is_out_of_descriptors
    assert "refused a connection: too many open files: raise `ulimit -n`" in a.refusal()
    Stranger("b", a, unix=unix).greet()


def test_a_peer_out_of_descriptors_is_lost_with_that_cause(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    b.links.add_peer("a", a.links.addresses)
    with few_files(1):
        b.links.send("a", b"hello")
        error = b.loss()
    assert error.failure == "peer has no files"
    assert "refused the connection: too many open files: raise `ulimit -n`" in str(error)


def test_a_node_that_cannot_open_a_connection_reports_itself_as_the_cause(pair: tuple[Node, Node]) -> None:
    a, _ = pair
    with few_files(0):
        a.links.send("b", b"hello")
        error = a.loss()
    assert error.failure == "no files"
    assert str(error).startswith("a cannot open a connection to b: too many open files: raise `ulimit -n`")
    a.links.add_peer("b", pair[1].links.addresses)
    a.links.send("b", b"hello")
    assert pair[1].message() == ("a", b"hello")


def test_a_node_that_cannot_start_raises_an_error_and_leaves_no_descriptor(node: Callable[..., Node]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for free in range(6):
        with few_files(free), pytest.raises(OffbeatError, match=r"^a cannot open its connections: too many"):
            node("a")
    assert len(os.listdir("/proc/self/fd")) <= before  # descriptors of earlier tests may be closed meanwhile


def test_an_unreadable_host_id_is_an_error_and_not_replaced() -> None:
    this_host_id.cache_clear()
    with few_files(0), pytest.raises(OSError, match=r"Too many open files"):
        this_host_id()


# Strangers


@pytest.mark.parametrize(
    ("secrets", "you", "text"),
    [
        ({"token": "wrong"}, "a", "b does not prove that it knows the token of job job"),
        ({"job": "other"}, "a", "this is job job, not job other"),
        ({}, "c", "this is a, not c"),
        ({"node": "a"}, "a", "this is a itself, a second node needs a name of its own"),
        ({"node": "line\nbreak"}, "a", "expected a printable name of 1 to 256 characters"),
    ],
)
def test_an_unauthorized_peer_is_refused_with_one_line_on_both_sides(
    node: Callable[..., Node], secrets: dict[str, str], you: str, text: str
) -> None:
    a = node("a")
    stranger = Stranger("b", a, you=you, **secrets)
    with pytest.raises(ProtocolError) as caught:
        stranger.greet()
    assert text in str(caught.value)
    host, port = stranger.sock.getsockname()
    line = a.refusal()
    assert line.startswith(f"refused a connection from {host}:{port}: {text}")
    assert "\n" not in line
    Stranger("b", a).greet()  # the node continues
    assert a.refused.empty()


def test_a_wrong_token_is_reported_to_the_dialling_side_by_name_and_address(
    node: Callable[..., Node],
) -> None:
    a, b = node("a"), node("b", token="wrong")
    b.links.add_peer("a", a.links.addresses)
    b.links.send("a", b"let me in")
    error = b.loss()
    assert error.peer == "a"
    assert str(error) == (
        f"a at {a.links.addresses[0]} refused the connection: "
        "b does not prove that it knows the token of job job"
    )
    assert a.refusal().startswith("refused a connection from a Unix socket of this host: ")
    assert a.refused.empty()
    assert a.messages.empty()


def test_an_acceptor_that_does_not_know_the_token_is_rejected(node: Callable[..., Node]) -> None:
    b = node("b")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        b.links.add_peer("a", [address])
        b.links.send("a", b"a secret")
        sock = listener.accept()[0]
        reader, impostor = FrameReader(None), AcceptorHandshake(job="job", token="guess", node="a")
        answered = 0
        while answered < 2:
            while (frame := reader.next_frame()) is None:
                reader.on_received(sock.recv_into(reader.buffers()[0]))
            if answered:
                impostor.peer = "b"  # accepts any proof
                sock.sendall(impostor.welcome(SessionPosition("anything")))
            else:
                sock.sendall(impostor.on_frame(frame))
            answered += 1
        assert str(b.loss()) == (
            f"cannot reach a at {address} within 10 s: it does not prove that it knows the job's token"
        )
        assert sock.recv(100) == b""


def test_another_protocol_version_is_refused(node: Callable[..., Node]) -> None:
    a = node("a")
    with socket.create_connection(a.tcp(), timeout=DEADLINE_S) as sock:
        sock.sendall(HEADER.pack(MAGIC, VERSION + 1, FrameKind.HELLO, 0, 0, 0, 0))
        text = f"expected protocol version {VERSION}, got version {VERSION + 1}"
        assert text.encode() in sock.recv(1000)
        assert a.refusal().endswith(text)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: worker-0\r\nUser-Agent: curl/8\r\n\r\n",
        contents(100_000, 5),
        b"\0" * 5000,
        HEADER.pack(MAGIC, VERSION, FrameKind.HELLO, 0xFFFFFFFF, 0, 0, 0),
        HEADER.pack(MAGIC, VERSION, FrameKind.HELLO, 20, 0, 0, 0) + b"\xdc\xff\xff" + bytes(17),
        HEADER.pack(MAGIC, VERSION, FrameKind.DATA, 100, 1, 0, 100) + bytes(100),
        HEADER.pack(MAGIC, VERSION, FrameKind.WELCOME, 0, 0, 0, 0),
        b"ob",
    ],
)
def test_garbage_is_refused_once_and_the_node_continues(node: Callable[..., Node], garbage: bytes) -> None:
    a, b = node("a"), node("b")
    with socket.create_connection(a.tcp(), timeout=DEADLINE_S) as sock:
        try:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1000):
                pass
        except OSError:
            pass  # the node has closed the connection already
    assert re.match(r"refused a connection from 127\.0\.0\.1:\d+: .*(expected|ended|decode)", a.refusal())
    b.links.add_peer("a", a.links.addresses)
    b.links.send("a", b"hello")
    assert a.message() == ("b", b"hello")
    assert a.refused.empty()
    assert a.lost.empty()


def test_silent_connections_are_limited_in_number_and_time(node: Callable[..., Node]) -> None:
    a, b = node("a", connect_s=2.0), node("b")
    silent = [socket.create_connection(a.tcp(), timeout=DEADLINE_S) for _ in range(70)]
    assert "it has not identified itself, and neither have 64 others" in a.refusal()
    for sock in silent[:6]:
        assert sock.recv(1) == b""  # the oldest are closed to make room
    b.links.add_peer("a", a.links.addresses[1:])
    b.links.send("a", b"hello")
    assert a.message() == ("b", b"hello")  # an authenticated peer does not wait for the silent connections
    assert re.search(r"it did not authenticate within 2 s", a.refusal())
    for sock in silent:
        assert sock.recv(1) == b""
        sock.close()


def test_refusals_are_reported_once_a_second_with_their_number(node: Callable[..., Node]) -> None:
    a = node("a")
    while not (found := re.search(r"\((\d+) more before it\)", a.refusal() if not a.refused.empty() else "")):
        with socket.create_connection(a.tcp(), timeout=DEADLINE_S) as sock:
            sock.sendall(b"garbage" * 10)
            while sock.recv(1000):
                pass
    assert int(found[1]) > 1


def test_connections_of_known_hosts_are_not_closed_to_make_room(node: Callable[..., Node]) -> None:
    a = node("a")
    a.links.add_peer("b", ["tcp://127.0.0.2:1"])
    known = socket.create_connection(a.tcp(), timeout=DEADLINE_S, source_address=("127.0.0.2", 0))
    strangers = [socket.create_connection(a.tcp(), timeout=DEADLINE_S) for _ in range(200)]
    assert [sock.recv(1) for sock in strangers[: 200 - 63]] == [b""] * (200 - 63)
    b = Stranger("b", a)
    b.sock.close()
    b.sock = known
    b.greet()
    for sock in strangers:
        sock.close()


def test_a_connection_that_closes_at_once_is_not_reported(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    socket.create_connection(a.tcp(), timeout=DEADLINE_S).close()
    b.links.add_peer("a", a.links.addresses)
    b.links.send("a", b"hello")
    assert a.message() == ("b", b"hello")
    assert a.refused.empty()


@pytest.mark.parametrize("seed", range(20))
def test_a_peer_that_sends_garbage_is_lost_by_name(node: Callable[..., Node], seed: int) -> None:
    a = node("a")
    member = Stranger("m", a).greet()
    chance = random.Random(seed)
    member.sock.sendall(
        HEADER.pack(
            b"ob" if seed % 3 else b"no",
            VERSION,
            chance.randrange(20),
            chance.randrange(1 << chance.choice([4, 20, 32])),
            chance.randrange(1 << 64),
            chance.randrange(1 << 64),
            chance.randrange(1 << 20),
        )
        + contents(1000, seed)
    )
    member.sock.shutdown(socket.SHUT_WR)
    error = a.loss()
    assert error.peer == "m"
    assert str(error).startswith(("m broke the protocol: expected ", "m closed the connection"))


# Connecting and losing


def test_a_peer_that_does_not_listen_is_named_with_its_address(node: Callable[..., Node]) -> None:
    a = node("a", connect_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    a.links.add_peer("worker-2", [f"tcp://127.0.0.1:{port}"])
    a.links.send("worker-2", b"hello")
    error = a.loss()
    assert error.peer == "worker-2"
    assert str(error) == f"cannot reach worker-2 at tcp://127.0.0.1:{port} within 0.5 s: connection refused"


def test_a_peer_that_begins_to_listen_in_time_is_reached(node: Callable[..., Node]) -> None:
    a = node("a")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    a.links.add_peer("b", [f"tcp://127.0.0.1:{port}"])
    a.links.send("b", b"hello")
    assert a.in_thread(lambda: True)
    b = node("b", port=port)
    assert b.message() == ("a", b"hello")


def test_a_peer_that_does_not_answer_is_named(node: Callable[..., Node]) -> None:
    a = node("a", connect_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as unread:
        address = f"tcp://127.0.0.1:{unread.getsockname()[1]}"
        a.links.add_peer("b", [address])
        a.links.send("b", b"hello")
        assert str(a.loss()) == f"cannot reach b at {address} within 0.5 s: no answer to the handshake"


def test_an_unresponsive_address_leaves_time_for_the_next_one(node: Callable[..., Node]) -> None:
    a, b = node("a", connect_s=2.0), node("b")
    with socket.create_server(("127.0.0.1", 0)) as unread:
        a.links.add_peer("b", [f"tcp://127.0.0.1:{unread.getsockname()[1]}", *b.links.addresses])
        a.links.send("b", b"hello")
        assert b.message() == ("a", b"hello")


def test_a_peer_with_fixed_addresses_that_listens_no_more_is_lost_at_once(node: Callable[..., Node]) -> None:
    a, b = node("a", connect_s=10 * DEADLINE_S), node("b")
    b.links.close()
    a.links.add_peer("b", b.links.addresses, has_fixed_addresses=True)
    a.links.send("b", b"hello")
    lost = a.loss()
    assert str(lost) == f"nothing listens any more at {' and '.join(b.links.addresses)}"
    assert not lost.was_open


@pytest.mark.long
def test_a_lost_peer_may_be_reached_again_and_receives_no_earlier_message(node: Callable[..., Node]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        first = node("b", listeners=[(listener.dup(), where)])
        a = node("a")
        a.links.add_peer("b", [where], has_fixed_addresses=True)
        a.links.send("b", b"hello")
        assert first.message() == ("a", b"hello")
        first.links.call_soon(lambda: 1 / 0)  # the node dies; the listening socket stays open
        assert isinstance(first.errors.get(timeout=DEADLINE_S), ZeroDivisionError)
        assert a.loss().was_open
        a.links.send("b", b"dropped")
        a.links.add_peer("b", [where], has_fixed_addresses=True)
        a.links.send("b", b"hello again")
        second = node("b", listeners=[(listener.dup(), where)])
        assert second.message() == ("a", b"hello again")
        second.links.send("a", b"and hello to you")
        assert a.message() == ("b", b"and hello to you")


def test_a_peer_without_a_known_address_may_still_connect_in_time(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.links.send("b", b"hello")
    b.links.add_peer("a", a.links.addresses)
    b.links.send("a", b"here I am")
    assert b.message() == ("a", b"hello")


def test_a_peer_without_a_known_address_is_lost_after_the_connect_timeout(node: Callable[..., Node]) -> None:
    a = node("a", connect_s=0.3)
    a.links.send("b", b"hello")
    assert str(a.loss()) == ("cannot reach b within 0.3 s: its address is not known, and it did not connect")


def test_a_host_is_looked_up_by_name_without_blocking(node: Callable[..., Node]) -> None:
    a, b = node("a", connect_s=5.0), node("b", host="127.0.0.1", unix=False)
    port = b.tcp()[1]
    a.links.add_peer("b", [f"tcp://no-such-host.invalid:{port}", f"tcp://localhost:{port}"])
    a.links.send("b", b"hello")
    assert b.message() == ("a", b"hello")


def test_a_unix_socket_of_another_host_is_not_tried(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    unix, tcp = b.links.addresses
    elsewhere = re.sub(r"host=.*", "host=elsewhere", unix)
    a.links.add_peer("b", [elsewhere, tcp])
    a.links.send("b", b"hello")
    assert b.message() == ("a", b"hello")
    a.links.add_peer("c", [elsewhere])
    a.links.send("c", b"hello")
    assert str(a.loss()).endswith("a Unix socket of another host")


VICTIM = """
import sys, os, threading
from offbeat.runtime.transport.endpoint import Endpoint
links = Endpoint("victim", job="job", token="secret", on_message=lambda *_: None, on_lost=lambda e: None,
                 unix=sys.argv[1] == "unix")
links.add_peer("survivor", sys.argv[2].split())
links.send("survivor", b"hello")
if sys.argv[3] == "fork" and os.fork() == 0:
    sys.stdin.readline()  # continues with copies of the parent's descriptors
    os._exit(0)
sys.stdin.readline()
"""


@pytest.fixture
def victim() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(survivor: Node, transport: str = "unix", mode: str = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", VICTIM, transport, " ".join(survivor.links.addresses), mode]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        assert survivor.message() == ("victim", b"hello")
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(DEADLINE_S)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_peer_is_lost_by_name(
    node: Callable[..., Node], victim: Callable[..., subprocess.Popen[bytes]], transport: str, busy: bool
) -> None:
    survivor = node("survivor", unix=transport == "unix")
    process = victim(survivor, transport)
    if busy:
        survivor.links.send_tensor("victim", 1, memoryview(bytes(300 * MIB)))
    process.send_signal(signal.SIGKILL)
    error = survivor.loss()
    assert error.peer == "victim"
    ended = ", and nothing listens any more at " if transport == "tcp" else "$"
    assert re.match(f"victim (closed|reset) the connection{ended}", str(error))
    assert survivor.lost.empty()


def test_a_killed_peer_is_noticed_although_its_forked_child_lives(
    node: Callable[..., Node], victim: Callable[..., subprocess.Popen[bytes]]
) -> None:
    survivor = node("survivor", silent_s=1000.0)
    victim(survivor, "unix", "fork").send_signal(signal.SIGKILL)
    assert str(survivor.loss()) == "victim closed the connection"


def test_a_paused_peer_is_lost_after_its_silence(
    node: Callable[..., Node], victim: Callable[..., subprocess.Popen[bytes]]
) -> None:
    survivor = node("survivor", heartbeat_s=0.1, silent_s=3.0)
    process = victim(survivor)
    process.send_signal(signal.SIGSTOP)
    assert str(survivor.loss()) == "victim has been silent for 3 s"
    process.send_signal(signal.SIGCONT)


def wakes_at(a: Node) -> int:
    """The number of bytes that the kernel collects before it wakes `a` for peer `m`."""
    return a.in_thread(lambda: a.links._sessions.peers["m"].link.wake_bytes)


def begin_a_long_message(a: Node, size: int) -> tuple[Stranger, bytearray, queue.Queue[int]]:
    """A peer of `a` that has begun a frame of `size` bytes, in which the kernel wakes `a` rarely."""
    member = Stranger("m", a).greet()
    into, received_lengths = bytearray(size), queue.Queue[int]()
    a.links.post_receive("m", 1, memoryview(into), lambda _, length: received_lengths.put(length))
    member.sock.sendall(HEADER.pack(MAGIC, VERSION, FrameKind.DATA, size, 1, 0, size))
    wait_until(lambda: wakes_at(a) > 1, "a long frame")
    return member, into, received_lengths


def test_a_slowly_arriving_long_frame_does_not_count_as_silence(node: Callable[..., Node]) -> None:
    a = node("a", heartbeat_s=0.1, silent_s=2.0)
    payload = contents(TCP_WAKE_BYTES + 100 * KIB)
    member, into, received_lengths = begin_a_long_message(a, len(payload))
    for i in range(16):
        member.sock.sendall(payload[i : i + 1])
        with pytest.raises(queue.Empty):
            a.lost.get(timeout=0.25)
    member.sock.sendall(payload[16:])
    assert received_lengths.get(timeout=DEADLINE_S) == len(payload)
    assert into == payload


def test_the_end_of_a_long_frame_is_read_without_waiting_for_further_data(node: Callable[..., Node]) -> None:
    a = node("a", heartbeat_s=400.0, silent_s=1000.0)
    payload = contents(TCP_WAKE_BYTES + 100 * KIB)
    member, into, received_lengths = begin_a_long_message(a, len(payload))
    member.sock.sendall(payload[:TCP_WAKE_BYTES])
    wait_until(lambda: wakes_at(a) == 1, "the end of the frame")
    member.sock.sendall(payload[TCP_WAKE_BYTES:])
    assert received_lengths.get(timeout=DEADLINE_S) == len(payload)
    assert into == payload


def test_a_peer_that_ends_within_a_long_frame_is_lost_at_once(node: Callable[..., Node]) -> None:
    a = node("a", silent_s=1000.0)
    member, _, received_lengths = begin_a_long_message(a, TCP_WAKE_BYTES + 100 * KIB)
    member.sock.sendall(bytes(10))
    member.sock.close()
    assert str(a.loss()) in ("m closed the connection", "m reset the connection")
    assert received_lengths.empty()


def test_heartbeats_keep_idle_connections_alive(node: Callable[..., Node]) -> None:
    a, b = node("a", heartbeat_s=0.05, silent_s=0.6), node("b", heartbeat_s=0.05, silent_s=0.6)
    a.links.add_peer("b", b.links.addresses)
    a.links.send("b", b"hello")
    b.message()
    with pytest.raises(queue.Empty):
        a.lost.get(timeout=2.0)
    assert b.lost.empty()


def test_a_node_whose_io_thread_was_blocked_loses_no_peer(node: Callable[..., Node]) -> None:
    a, b = node("a", heartbeat_s=0.1, silent_s=0.5), node("b", heartbeat_s=0.1, silent_s=100.0)
    a.links.add_peer("b", b.links.addresses)
    a.links.send("b", b"hello")
    b.message()
    held = threading.Event()
    a.links.call_soon(lambda: [held.wait(2.0), None][1])  # the I/O thread is blocked
    a.links.send("b", b"again")
    assert b.message() == ("a", b"again")
    assert a.in_thread(lambda: a.links._sessions.peers["b"].link is not None)
    assert a.lost.empty()


def test_messages_to_a_lost_peer_are_dropped_until_it_is_added_again(
    node: Callable[..., Node],
) -> None:
    a = node("a")
    stranger = Stranger("b", a).greet()
    stranger.sock.close()
    assert a.loss().peer == "b"
    a.links.send("b", b"dropped")
    a.links.send_tensor("b", 1, memoryview(b"dropped"))
    assert a.links.flush(DEADLINE_S)
    assert a.lost.empty()
    b = node("b")
    a.links.add_peer("b", b.links.addresses)
    a.links.send("b", b"hello again")
    assert b.message() == ("a", b"hello again")


def test_early_data_and_posted_receives_of_a_lost_peer_are_dropped(
    node: Callable[..., Node],
) -> None:
    a = node("a")
    stranger = Stranger("b", a).greet()
    a.links.post_receive("b", 2, memoryview(bytearray(1)), print)
    stranger.sock.sendall(HEADER.pack(MAGIC, VERSION, FrameKind.DATA, 1, 1, 0, 1) + b"x")
    stranger.sock.close()
    a.loss()
    b = node("b")
    b.links.add_peer("a", a.links.addresses)
    b.links.send_tensor("a", 1, memoryview(b"y"))
    b.links.send_tensor("a", 2, memoryview(b"z"))
    for tag, byte in ((1, b"y"), (2, b"z")):
        assert Arrival(a, "b", tag, 1).whole() == byte


def test_a_lost_peer_may_connect_again(node: Callable[..., Node]) -> None:
    a = node("a")
    Stranger("b", a).greet().sock.close()
    assert a.loss().peer == "b"
    b = node("b")
    b.links.add_peer("a", a.links.addresses)
    b.links.send("a", b"back")
    assert a.message() == ("b", b"back")
    a.links.send("b", b"welcome back")
    assert b.message() == ("a", b"welcome back")


# Leaving


def test_closing_sends_queued_messages_and_a_goodbye_and_is_not_a_loss(pair: tuple[Node, Node]) -> None:
    a, b = pair
    for i in range(100):
        a.links.send("b", b"%d" % i)
    a.links.close()
    a.links.close()
    assert [b.message()[1] for _ in range(100)] == [b"%d" % i for i in range(100)]
    assert b.left.get(timeout=DEADLINE_S) == "a"
    b.links.send("a", b"dropped")
    assert b.in_thread(lambda: True)
    assert b.lost.empty()
    assert a.lost.empty()
    assert a.left.empty()


def test_data_received_before_a_goodbye_is_still_delivered(pair: tuple[Node, Node]) -> None:
    a, b = pair
    a.links.send_tensor("b", 1, memoryview(contents(MIB)))
    assert a.links.flush(DEADLINE_S)
    a.links.close()
    assert b.left.get(timeout=DEADLINE_S) == "a"
    assert Arrival(b, "a", 1, MIB).whole() == contents(MIB)


def test_messages_of_a_peer_that_left_are_delivered_although_sending_to_it_fails(
    node: Callable[..., Node],
) -> None:
    a = node("a")
    b = Stranger("b", a, unix=True).greet()
    held, release = threading.Event(), threading.Event()

    def put_after_it_has_left() -> None:
        held.set()
        release.wait(DEADLINE_S)
        a.links.send_tensor("b", 1, memoryview(bytes(10)))

    a.links.call_soon(put_after_it_has_left)
    assert held.wait(DEADLINE_S)
    message = HEADER.pack(MAGIC, VERSION, FrameKind.MESSAGE, 100_000, 0, 0, 0) + bytes(100_000)
    b.sock.sendall(message * 2 + HEADER.pack(MAGIC, VERSION, FrameKind.BYE, 0, 0, 0, 0))
    b.sock.close()
    release.set()
    for _ in range(2):
        assert a.message() == ("b", bytes(100_000))
    assert a.left.get(timeout=DEADLINE_S) == "b"
    assert a.lost.empty()


def test_both_sides_may_close_at_once_while_bytes_are_in_flight(node: Callable[..., Node]) -> None:
    for _ in range(20):
        a, b = node("a"), node("b")
        a.links.add_peer("b", b.links.addresses)
        a.links.send("b", b"hello")
        b.message()
        a.links.send_tensor("b", 1, memoryview(bytes(8 * MIB)))
        b.links.send_tensor("a", 1, memoryview(bytes(8 * MIB)))
        threads = [threading.Thread(target=one.links.close) for one in (a, b)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert a.lost.empty()
        assert b.lost.empty()


def test_closing_does_not_wait_for_a_peer_that_does_not_read(node: Callable[..., Node]) -> None:
    a = node("a")
    unread = Stranger("b", a).greet()
    a.links.send_tensor("b", 1, memoryview(bytes(32 * MIB)))
    a.links.send("b", b"hello")
    a.links.close(timeout_s=0.2)
    assert not a.links._loop.is_alive
    assert unread.frame().kind in (FrameKind.MESSAGE, FrameKind.DATA)


def test_close_may_be_called_from_a_callback(node: Callable[..., Node]) -> None:
    b = node("b")
    a = node("a", on_message=lambda *_: a.links.close())
    b.links.add_peer("a", a.links.addresses)
    b.links.send("a", b"close")
    assert b.left.get(timeout=DEADLINE_S) == "a"


def test_the_unix_socket_has_no_file_and_does_not_exist_after_close(node: Callable[..., Node]) -> None:
    a = node("a")
    where = parse_address(a.links.addresses[0]).resolve()[1]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(where)
        assert sock.getpeername()[:1] == b"\0"
    a.links.close()
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(where)


def test_a_forked_child_does_not_affect_the_parents_connections(
    pair: tuple[Node, Node], node: Callable[..., Node]
) -> None:
    a, b = pair
    a.links.send("b", b"before")
    b.message()
    script_pid = os.fork()
    if script_pid == 0:
        code = 1
        try:
            a.links.send("b", b"from the child")
        except LinkError:
            a.links.close()
            code = 0
        os._exit(code)
    assert os.waitpid(script_pid, 0)[1] == 0
    a.links.send("b", b"after")
    assert b.message() == ("a", b"after")
    c = node("c")
    c.links.add_peer("a", a.links.addresses[:1])
    c.links.send("a", b"to the Unix socket")
    assert a.message() == ("c", b"to the Unix socket")
