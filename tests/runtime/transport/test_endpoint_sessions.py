"""Promises of `Endpoint` when connections break and lines are cut: the session continues."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from offbeat.runtime.transport.framing import HEADER, MAGIC, VERSION, FrameKind
from offbeat.runtime.transport.handshake import SessionPosition
from support import endpoints
from support.endpoints import DEADLINE_S, KIB, MIB, Arrival, DialledStranger, FarEnd, Node, Stranger, contents
from support.tcp_proxy import Line, random_resets

HEARTBEAT_S = 3600.0  # no heartbeat comes in a test

node = endpoints.node  # the fixture


@pytest.fixture
def through() -> Iterator[Callable[..., Line]]:
    """Connects one node to another over a line that tests can cut."""
    with ExitStack() as stack:

        def make(one: Node, other: Node, reset_after: Callable[[], int | None] = lambda: None) -> Line:
            line = Line(other.tcp(), reset_after)
            stack.callback(line.close)
            one.links.add_peer(other.links.name, [line.address])
            return line

        yield make


@pytest.mark.parametrize("seed", range(12))
def test_every_message_and_byte_arrives_once_and_in_order_despite_broken_connections(
    node: Callable[..., Node], through: Callable[..., Line], seed: int
) -> None:
    chance = random.Random(seed)
    reset_after = random_resets(chance, [10, 300, 2000, 70_000, 400_000])
    a, b = node("a", unix=False), node("b", unix=False)
    lines = [through(a, b, reset_after), through(b, a, reset_after)]
    arrivals = []
    done = []
    for me, other in ((a, b), (b, a)):
        for number in range(200):
            me.links.send(other.links.name, b"%d" % number + bytes(chance.choice([0, 0, 0, 5000])))
        for tag in range(12):
            size = chance.choice([1, 5000, 300_000, MIB])
            is_early = chance.random() < 0.5
            if not is_early:
                arrivals.append((Arrival(other, me.links.name, tag, size), tag))
            done.append(threading.Event())
            me.links.send_tensor(other.links.name, tag, memoryview(contents(size, tag)), on_done=done[-1].set)
            if is_early:
                arrivals.append((Arrival(other, me.links.name, tag, size), tag))
    for me in (a, b):
        numbers = [int(me.message()[1].rstrip(b"\0")) for _ in range(200)]
        assert numbers == list(range(200))
    for arrival, tag in arrivals:
        assert arrival.whole() == contents(len(arrival.buffer), tag)
        assert sum(length for _, length in arrival.pieces) == len(arrival.buffer)
    assert all(one.wait(DEADLINE_S) for one in done)
    for me in (a, b):
        assert me.messages.empty()
        assert me.lost.empty()
    assert sum(line.connections for line in lines) > 1


def acknowledge(far_end: FarEnd, frames: int) -> None:
    far_end.sock.sendall(HEADER.pack(MAGIC, VERSION, FrameKind.ACK, 0, 0, 0, frames))


def payload(far_end: FarEnd) -> bytes | bytearray | None:
    return far_end.numbered().payload


@pytest.mark.parametrize("is_early", [False, True], ids=["posted", "early"])
def test_a_message_is_acknowledged_when_it_is_complete_whatever_the_order_of_its_parts(
    node: Callable[..., Node], is_early: bool
) -> None:
    a, b = (node(name, unix=False, heartbeat_s=HEARTBEAT_S, silent_s=3 * HEARTBEAT_S) for name in "ab")
    a.links.add_peer("b", b.links.addresses)
    b.links.add_peer("a", a.links.addresses)
    data = contents(3 * KIB, 1)
    arrivals = [] if is_early else [Arrival(b, "a", 1, len(data))]
    done = [threading.Event() for _ in range(3)]
    for part in (2, 0, 1):
        at = part * KIB
        a.links.send_tensor(
            "b",
            1,
            memoryview(data)[at : at + KIB],
            offset=at,
            total=len(data),
            on_done=done[part].set,
        )
    assert all(one.wait(DEADLINE_S) for one in done)
    if is_early:
        arrivals.append(Arrival(b, "a", 1, len(data)))
    assert arrivals[0].whole() == data


def test_a_handshake_that_its_dialler_has_given_up_is_ignored_when_the_rest_of_it_arrives(
    node: Callable[..., Node],
) -> None:
    """A network that loses packets delivers them late: after the dialler's next attempt, and in its name."""
    a = node("a", unix=False)
    given_up = Stranger("b", a, position=SessionPosition("a session", "", 0, 1))
    proof = given_up.challenge()
    b = Stranger("b", a, position=SessionPosition("a session", "", 0, 2)).greet()
    a.links.send("b", b"first")
    assert payload(b) == b"first"
    acknowledge(b, 1)
    given_up.sock.sendall(proof)
    with pytest.raises(EOFError):
        given_up.frame()
    a.links.send("b", b"second")
    assert payload(b) == b"second"
    assert a.lost.empty()


@pytest.fixture
def unresponsive() -> Iterator[str]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_late_handshake_of_an_earlier_session_does_not_end_the_session_in_use(
    node: Callable[..., Node], unresponsive: str, is_broken: bool
) -> None:
    """The peer has given up its first session with its first connection; the second one may be broken."""
    b = node("b", unix=False)
    b.links.add_peer("a", [unresponsive])
    given_up = Stranger("a", b, position=SessionPosition("first session", "", 0, 1, "a process"))
    proof = given_up.challenge()
    a = Stranger("a", b, position=SessionPosition("second session", "", 0, 2, "a process")).greet()
    b.links.send("a", b"first")
    assert payload(a) == b"first"
    acknowledge(a, 1)
    if is_broken:
        a.sock.close()
    given_up.sock.sendall(proof)
    with pytest.raises(EOFError):
        given_up.frame()
    if is_broken:
        own = a.greeting.peer_position.session
        a = Stranger("a", b, position=SessionPosition("second session", own, 1, 3, "a process")).greet()
    b.links.send("a", b"second")
    assert payload(a) == b"second"
    assert b.lost.empty()


def test_a_process_that_was_started_again_begins_a_session_although_it_counts_from_1(
    node: Callable[..., Node], unresponsive: str
) -> None:
    b = node("b", unix=False)
    b.links.add_peer("a", [unresponsive])
    a = Stranger("a", b, position=SessionPosition("first session", "", 0, 7, "a process")).greet()
    b.links.send("a", b"first")
    assert payload(a) == b"first"
    a.sock.close()
    a = Stranger("a", b, position=SessionPosition("second session", "", 0, 1, "another process")).greet()
    assert str(b.loss()).endswith("a has begun a new session")
    b.links.send("a", b"second")
    assert payload(a) == b"second"


def test_a_peers_dial_that_waited_is_not_used_after_a_connection_that_the_peer_has_opened_since(
    node: Callable[..., Node],
) -> None:
    """The peer has dropped its dial, and the network delivers that late."""
    a = node("a", unix=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a.links.add_peer("b", [f"tcp://127.0.0.1:{listener.getsockname()[1]}"])
        a.links.send("b", b"first")
        dialled = DialledStranger("b", listener)
        waiting = Stranger("b", a, position=SessionPosition("a session", "", 0, 1))
        waiting.sock.sendall(waiting.challenge())
        for _ in range(2):  # an iteration that began before the proof came, and one that reads it
            a.in_thread(lambda: None)
        dialled.welcome(SessionPosition("a session", dialled.peer_position.session, 0, 2))
        assert payload(dialled) == b"first"
        acknowledge(dialled, 1)
        dialled.sock.close()
        again = DialledStranger("b", listener)
        assert again.peer_position.peer_session == "a session"
        again.welcome(SessionPosition("a session", again.peer_position.session, 1, 3))
        a.links.send("b", b"second")
        assert payload(again) == b"second"
        with pytest.raises(EOFError):
            waiting.frame()
    assert a.lost.empty()


def test_on_done_waits_until_the_peer_has_the_bytes(node: Callable[..., Node]) -> None:
    a = node("a", unix=False)
    b = Stranger("b", a).greet()
    done = threading.Event()
    a.links.send_tensor("b", 1, memoryview(b"x"), on_done=done.set)
    a.links.send("b", b"behind")
    kinds = {b.frame().kind, b.frame().kind}
    assert kinds == {FrameKind.MESSAGE, FrameKind.DATA}
    assert a.links.flush(DEADLINE_S)
    assert not done.is_set()
    acknowledge(b, 2)
    assert done.wait(DEADLINE_S)


def test_an_acknowledgement_of_unsent_frames_is_a_protocol_error(node: Callable[..., Node]) -> None:
    a = node("a", unix=False)
    b = Stranger("b", a).greet()
    acknowledge(b, 1)
    assert str(a.loss()) == ("b broke the protocol: expected from 0 to 0 frames to be acknowledged, got 1")


def test_a_cancelled_message_is_not_resent_when_the_connection_breaks(
    node: Callable[..., Node], through: Callable[..., Line]
) -> None:
    a, b = node("a", unix=False), node("b", unix=False)
    line = through(a, b)
    through(b, a)
    a.links.send("b", b"hello")
    b.message()
    with b.busy():
        a.links.send_tensor("b", 1, memoryview(contents(64 * KIB)))
        a.links.send("b", b"behind it")
        assert a.links.flush(DEADLINE_S)
        a.links.cancel(1, 2)
        line.reset()
    assert b.message() == ("a", b"behind it")
    a.links.send_tensor("b", 2, memoryview(b"next"))
    assert Arrival(b, "a", 2, 4).whole() == b"next"
    assert a.lost.empty()
    assert b.lost.empty()


def test_a_silent_connection_is_replaced_and_its_messages_are_resent(
    node: Callable[..., Node], through: Callable[..., Line]
) -> None:
    a, b = node("a", unix=False, silent_s=1000.0), node("b", unix=False, silent_s=1000.0)
    line = through(a, b)
    through(b, a)
    a.links.send("b", b"hello")
    b.message()
    line.cut(new_ones_too=False)
    arrival = Arrival(b, "a", 1, MIB)
    a.links.send_tensor("b", 1, memoryview(contents(MIB)))
    a.links.send("b", b"all the same")
    assert b.message() == ("a", b"all the same")
    assert arrival.whole() == contents(MIB)
    assert a.lost.empty()


def test_a_silent_connection_is_replaced_although_the_first_attempt_is_not_answered(
    node: Callable[..., Node], through: Callable[..., Line]
) -> None:
    a = node("a", listeners=[], silent_s=1000.0)  # so that b cannot dial a
    b = node("b", unix=False, silent_s=1000.0)
    line = through(a, b)
    a.links.send("b", b"hello")
    b.message()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, ExitStack() as stack:
        where = silent.getsockname()
        for _ in range(3):  # the queue is full: further connections are not answered
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(where)
        a.links.add_peer("b", [f"tcp://127.0.0.1:{where[1]}", line.address])
        line.cut(new_ones_too=False)
        a.links.send("b", b"all the same")
        assert b.message() == ("a", b"all the same")
    assert a.lost.empty()
    assert b.lost.empty()


def test_a_silent_worker_is_reported_as_unreachable_and_then_as_reachable(
    node: Callable[..., Node], through: Callable[..., Line]
) -> None:
    reports: list[tuple[str, ...]] = []
    is_reachable, is_unreachable = threading.Event(), threading.Event()

    def note(event: threading.Event, *what: str) -> None:
        reports.append(what)
        event.set()

    a = node(
        "a",
        unix=False,
        silent_s=1000.0,
        on_unreachable=lambda *what: note(is_unreachable, *what),
        on_reachable=lambda *what: note(is_reachable, *what),
    )
    b = node("b", unix=False, silent_s=1000.0)
    lines = [through(a, b), through(b, a)]
    a.links.send("b", b"hello")
    b.message()
    for line in lines:
        line.cut(new_ones_too=True)
    assert is_unreachable.wait(DEADLINE_S)
    for line in lines:
        line.mend()
    assert is_reachable.wait(DEADLINE_S)
    assert reports == [("b", "nothing was received from it for 1.25 s"), ("b",)]
    b.links.send("a", b"still here")
    assert a.message() == ("b", b"still here")


def test_a_peer_that_is_silent_on_all_connections_is_lost(
    node: Callable[..., Node], through: Callable[..., Line]
) -> None:
    a, b = node("a", unix=False, silent_s=3.0), node("b", unix=False, silent_s=1000.0)
    lines = [through(a, b), through(b, a)]
    a.links.send("b", b"hello")
    b.message()
    for line in lines:
        line.cut(new_ones_too=True)
    for line in lines:
        line.reset()  # a dials again at once and connects, but gets no answer
    loss = a.loss()
    assert loss.peer == "b"
    assert str(loss).endswith("b has been silent for 3 s")
    for line in lines:
        line.mend()
    a.links.add_peer("b", [lines[0].address])
    a.links.send("b", b"once more")
    assert b.message() == ("a", b"once more")
    assert str(b.loss()).endswith("a has begun a new session")


def test_a_peer_may_have_its_own_silence_limit(
    node: Callable[..., Node], through: Callable[..., Line]
) -> None:
    a, b, c = (node(name, unix=False, silent_s=1000.0) for name in "abc")
    for other in (b, c):
        line = through(a, other)
        a.links.add_peer(other.links.name, [line.address], silent_s=3.0 if other is b else None)
        through(other, a).cut(new_ones_too=True)
        a.links.send(other.links.name, b"hello")
        other.message()
        line.cut(new_ones_too=True)
    assert a.loss().peer == "b"
    assert a.lost.empty()


VICTIM = """
import sys, threading
from offbeat.runtime.transport.endpoint import Endpoint
links = Endpoint("victim", job="job", token="secret", on_message=print, on_lost=print, unix=False)
links.add_peer("survivor", sys.argv[1:])
links.send("survivor", b"hello")
sys.stdin.readline()
"""


def test_a_peer_whose_process_ends_while_its_connection_is_broken_is_lost_at_once(
    node: Callable[..., Node],
) -> None:
    survivor = node("survivor", unix=False, silent_s=1000.0, connect_s=1000.0)
    line = Line(survivor.tcp())
    process = subprocess.Popen([sys.executable, "-c", VICTIM, line.address], stdin=subprocess.PIPE)
    try:
        assert survivor.message() == ("victim", b"hello")
        os.kill(process.pid, signal.SIGSTOP)
        line.reset()
        os.kill(process.pid, signal.SIGKILL)
        assert "nothing listens any more at tcp://127.0.0.1:" in str(survivor.loss())
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
        line.close()


def test_a_process_that_replaces_another_begins_a_new_session(node: Callable[..., Node]) -> None:
    first = node("b", unix=False)
    port = first.tcp()[1]
    a = node("a", unix=False)
    a.links.add_peer("b", first.links.addresses)
    a.links.send("b", b"hello")
    assert first.message() == ("a", b"hello")
    first.links.send("a", b"hello to you")
    assert a.message() == ("b", b"hello to you")
    line = Line(("127.0.0.1", port))
    a.links.add_peer("b", [line.address])
    first.links.call_soon(lambda: 1 / 0)  # the node ends without a goodbye
    assert isinstance(first.errors.get(timeout=DEADLINE_S), ZeroDivisionError)
    second = node("b", unix=False, port=port)
    assert str(a.loss()).endswith("b has begun a new session")
    second.links.add_peer("a", a.links.addresses)
    second.links.send("a", b"I am new")
    assert a.message() == ("b", b"I am new")
    a.links.send("b", b"welcome")
    assert second.message() == ("a", b"welcome")
    assert a.lost.empty()
    assert second.lost.empty()
    line.close()


class Listener:
    """Node "a", with the reports about its peer and the peer's messages, in order."""

    def __init__(self, node: Callable[..., Node], **options: Any) -> None:
        self.calls: list[str] = []
        self.is_unreachable, self.has_message = threading.Event(), threading.Event()
        self.node = node(
            "a",
            silent_s=1000.0,
            on_unreachable=lambda *_: self.is_unreachable.set(),
            on_reachable=lambda peer: self.calls.append("reachable"),
            on_message=lambda peer, message: self._note(message.decode()),
            **options,
        )

    def _note(self, message: str) -> None:
        self.calls.append(message)
        self.has_message.set()

    def wait_for_message(self) -> None:
        assert self.has_message.wait(DEADLINE_S)
        self.has_message.clear()


def test_a_peer_is_reported_reachable_before_its_messages_are_delivered(
    node: Callable[..., Node], through: Callable[..., Line]
) -> None:
    a = Listener(node, unix=False)
    b = node("b", unix=False, silent_s=1000.0)
    lines = [through(a.node, b), through(b, a.node)]
    b.links.send("a", b"hello")
    a.wait_for_message()
    for line in lines:
        line.cut(new_ones_too=True)
    b.links.send("a", b"meanwhile")
    assert a.is_unreachable.wait(DEADLINE_S)
    for line in lines:
        line.mend()
    a.wait_for_message()
    assert a.calls == ["hello", "reachable", "meanwhile"]


def test_a_peer_that_was_blocked_is_reported_reachable_before_its_messages(
    node: Callable[..., Node],
) -> None:
    """The connection stays open meanwhile: over a Unix socket no node dials again."""
    a = Listener(node)
    b = node("b", silent_s=1000.0)
    b.links.add_peer("a", a.node.links.addresses)
    b.links.send("a", b"hello")
    a.wait_for_message()
    with b.busy():
        assert a.is_unreachable.wait(DEADLINE_S)
        b.links.send("a", b"meanwhile")
    a.wait_for_message()
    assert a.calls == ["hello", "reachable", "meanwhile"]
