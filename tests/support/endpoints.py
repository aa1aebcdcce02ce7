"""Nodes to test links with: an endpoint that notes what its callbacks say, and a stranger spoken by hand."""

from __future__ import annotations

import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import pytest

from offbeat.errors import LinkError
from offbeat.runtime.transport.addresses import parse_address
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.runtime.transport.framing import NUMBERED, Frame, FrameReader
from offbeat.runtime.transport.handshake import AcceptorHandshake, DiallerHandshake, SessionPosition
from offbeat.runtime.transport.sessions import PROCESSING_SLICE_S
from offbeat.runtime.transport.tls import TlsCredentials

DEADLINE_S = 20.0
KIB = 1024
MIB = 1024 * KIB


class Node:
    """An endpoint and everything that its callbacks have said."""

    def __init__(self, name: str, **options: Any) -> None:
        self.messages: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[LinkError] = queue.SimpleQueue()
        self.left: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        defaults = {
            "job": "job",
            "token": "secret",
            "on_message": lambda peer, message: self.messages.put((peer, message)),
            "on_lost": self.lost.put,
            "on_left": self.left.put,
            "on_refused": self.refused.put,
            "on_error": self.errors.put,
        }
        self.links = Endpoint(name, **(defaults | options))

    def message(self) -> tuple[str, bytes]:
        return self.messages.get(timeout=DEADLINE_S)

    def loss(self) -> LinkError:
        return self.lost.get(timeout=DEADLINE_S)

    def refusal(self) -> str:
        return self.refused.get(timeout=DEADLINE_S)

    def in_thread(self, function: Callable[[], Any]) -> Any:
        """Run a function in the I/O thread and return what it returns."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.links.call_soon(lambda: answer.put(function()))
        return answer.get(timeout=DEADLINE_S)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the I/O thread from what comes in the block, so that it finds all of it at once."""
        has_begun, is_over = threading.Event(), threading.Event()
        self.links.call_soon(has_begun.set)
        self.links.call_soon(is_over.wait, DEADLINE_S)
        try:
            assert has_begun.wait(DEADLINE_S)
            yield
        finally:
            is_over.set()

    def tcp(self) -> tuple[str, int]:
        host, _, port = self.links.addresses[-1].removeprefix("tcp://").rpartition(":")
        return host, int(port)


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(name: str, **options: Any) -> Node:
        nodes.append(Node(name, **options))
        return nodes[-1]

    yield make
    for one in nodes:
        one.links.close()
    for one in nodes:
        assert one.errors.empty(), one.errors.get()


@pytest.fixture
def pair(node: Callable[..., Node]) -> tuple[Node, Node]:
    a, b = node("a"), node("b")
    a.links.add_peer("b", b.links.addresses)
    b.links.add_peer("a", a.links.addresses)
    return a, b


class Arrival:
    """A posted receive, its buffer and the pieces that came."""

    def __init__(self, at: Node, peer: str, tag: int, size: int) -> None:
        self.buffer = bytearray(size)
        self.pieces: list[tuple[int, int]] = []
        self._size = size
        self._came = 0
        self._whole = threading.Event()
        at.links.post_receive(peer, tag, memoryview(self.buffer), self._on_data)

    def _on_data(self, offset: int, length: int) -> None:
        self.pieces.append((offset, length))
        self._came += length
        if self._came == self._size:
            self._whole.set()

    def whole(self) -> bytes:
        assert self._whole.wait(DEADLINE_S)
        return bytes(self.buffer)

    @property
    def is_whole(self) -> bool:
        return self._whole.is_set()


class FarEnd:
    """The other end of a connection to a node, spoken by hand, read only when asked to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FrameReader(None)

    def frame_at_once(self) -> Frame:
        """The next frame, which has come already.

        Raises:
            BlockingIOError: it has not.
        """
        self.sock.setblocking(False)
        try:
            return self.frame()
        finally:
            self.sock.settimeout(DEADLINE_S)

    def frame(self) -> Frame:
        while (frame := self.reader.next_frame()) is None:
            n = self.sock.recv_into(self.reader.buffers()[0])
            if not n:
                raise EOFError
            self.reader.on_received(n)
        return frame

    def numbered(self) -> Frame:
        """The next frame that the session counts."""
        while (frame := self.frame()).kind not in NUMBERED:
            pass
        return frame


class Stranger(FarEnd):
    """A far end that dials the node.

    Args:
        position: in the session with the node; by default the beginning of a new one.
        secrets: claims of the handshake that are to be others than true ones.
    """

    def __init__(
        self,
        name: str,
        to: Node,
        *,
        you: str | None = None,
        unix: bool = False,
        tls: TlsCredentials | None = None,
        position: SessionPosition | None = None,
        **secrets: str,
    ) -> None:
        certificate = b""
        if unix:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(DEADLINE_S)
            sock.connect(parse_address(to.links.addresses[0]).resolve()[1])
        else:
            sock = socket.create_connection(to.tcp(), timeout=DEADLINE_S)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
            if tls is not None:
                sock = secure = tls.encrypt(sock, accepts=False)
                secure.do_handshake()
                certificate = secure.peer_certificate_digest()
        super().__init__(sock)
        claims = {"job": "job", "token": "secret", "node": name, "peer": you or to.links.name} | secrets
        self.greeting = DiallerHandshake(**claims, position=position, certificate=certificate)

    def greet(self) -> Stranger:
        self.sock.sendall(self.challenge())
        while self.greeting.peer_position is None:
            self.sock.sendall(self.greeting.on_frame(self.frame()))
        self.reader.end_handshake(lambda *_: None)
        return self

    def challenge(self) -> bytes:
        """Send HELLO and receive the CHALLENGE; return the PROOF, which is not sent."""
        self.sock.sendall(self.greeting.hello())
        return self.greeting.on_frame(self.frame())


class DialledStranger(FarEnd):
    """A far end that the node dials, after it has received HELLO and before it sends WELCOME.

    Args:
        listener: where the node dials.
    """

    def __init__(self, name: str, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.settimeout(DEADLINE_S)
        super().__init__(sock)
        self._greeting = AcceptorHandshake(job="job", token="secret", node=name)
        self.sock.sendall(self._greeting.on_frame(self.frame()))

    @property
    def peer_position(self) -> SessionPosition:
        """The node's position, which its HELLO carried."""
        return self._greeting.position

    def welcome(self, position: SessionPosition) -> None:
        """Accept the connection, at this position in the session."""
        self._greeting.on_frame(self.frame())
        self.sock.sendall(self._greeting.welcome(position))
        self.reader.end_handshake(lambda *_: None)


def take_long() -> None:
    """Work for longer than what came of a frame waits until the next ones have been acted on."""
    until_s = monotonic() + 2 * PROCESSING_SLICE_S
    while monotonic() < until_s:
        pass


def contents(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)
