"""The order in which a node sends to its peers, over pairs of sockets without a loop."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import count

import pytest

from offbeat.runtime.transport.connections import TCP_FRAME_BYTES, UNIX_BUFFER_BYTES, Connection, RemoteNode
from offbeat.runtime.transport.framing import HEADER_BYTES, Frame, FrameKind, FrameReader
from offbeat.runtime.transport.inbox import Inbox, IntervalSet
from offbeat.runtime.transport.outbox import Outbox, QueuedMessage
from offbeat.runtime.transport.send_scheduler import WRITES_PER_TURN, SendScheduler


class Sender:
    """A scheduler whose peers share one socket, so that the order of all frames can be read from it."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        self.near.setblocking(False)
        self.far.setblocking(False)
        self.watched: list[str] = []
        self.failed: list[OSError] = []
        self.sequence = count()
        self.scheduler = SendScheduler(
            self.sequence,
            lambda peer, link: self.watched.append(peer.name),
            lambda peer, link, error: self.failed.append(error),
        )
        self.reader = FrameReader(None)

    def peer(self, name: str) -> RemoteNode:
        peer = RemoteNode(name, Inbox(IntervalSet()), Outbox(TCP_FRAME_BYTES))
        peer.link = Connection(self.near, name)
        return peer

    def queue(self, peer: RemoteNode, tag: int, *, priority: int, size: int = 1) -> None:
        data = memoryview(bytes(size))
        key = (1, priority, next(self.sequence))
        peer.outbox.add(QueuedMessage(int(FrameKind.DATA), key, data, tag=tag, total=size))
        self.scheduler.schedule(peer)

    def frames(self) -> Iterator[Frame]:
        self.reader.end_handshake(lambda *_: None)
        while True:
            while (frame := self.reader.next_frame()) is not None:
                yield frame
            try:
                self.reader.on_received(self.far.recv_into(self.reader.buffers()[0]))
            except BlockingIOError:
                return


@pytest.fixture
def sender() -> Iterator[Sender]:
    one = Sender()
    yield one
    one.near.close()
    one.far.close()


def test_the_most_urgent_message_of_all_peers_goes_first(sender: Sender) -> None:
    a, b = sender.peer("a"), sender.peer("b")
    for peer, tag, priority in ((a, 1, 4), (b, 2, 3), (a, 3, 2), (b, 4, 1)):
        sender.queue(peer, tag, priority=priority, size=TCP_FRAME_BYTES)
    assert not sender.scheduler.pump()
    assert [frame.tag for frame in sender.frames()] == [4, 3, 2, 1]
    assert sender.scheduler.bytes_sent == 4 * (TCP_FRAME_BYTES + HEADER_BYTES)


def test_sockets_are_polled_again_after_some_writes_and_on_idle_is_called_once_none_is_left(
    sender: Sender,
) -> None:
    idle: list[bool] = []
    sender.scheduler.on_idle = lambda: idle.append(True)
    for number in range(WRITES_PER_TURN + 1):
        sender.queue(sender.peer(f"p{number}"), number, priority=0)
    assert sender.scheduler.pump()
    assert not idle
    assert not sender.scheduler.pump()
    assert idle
    assert len(list(sender.frames())) == WRITES_PER_TURN + 1


def test_a_full_socket_is_watched_and_sends_nothing_until_it_accepts_more(sender: Sender) -> None:
    a = sender.peer("a")
    sender.queue(a, 1, priority=0, size=16 * 1024 * 1024)
    while not sender.watched:
        sender.scheduler.pump()
    assert a.link is not None
    assert a.link.is_full
    before = sender.scheduler.bytes_sent
    sender.queue(a, 2, priority=-1)
    assert not sender.scheduler.pump()
    assert sender.scheduler.bytes_sent == before


def test_an_error_of_the_socket_is_reported_and_its_bytes_do_not_count(sender: Sender) -> None:
    sender.near.shutdown(socket.SHUT_WR)
    sender.queue(sender.peer("a"), 1, priority=0)
    sender.scheduler.pump()
    assert [type(error) for error in sender.failed] == [BrokenPipeError]
    assert sender.scheduler.bytes_sent == 0
