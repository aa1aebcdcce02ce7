"""State of each peer and each connection of a node, and how a socket is prepared.

This module decides nothing and sends nothing; received bytes go where the link's reader and `Borrowed` say.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass, field

from offbeat.runtime.transport.addresses import Address
from offbeat.runtime.transport.framing import FrameReader
from offbeat.runtime.transport.handshake import Acceptor, Dialler, Position, new_session
from offbeat.runtime.transport.inbox import Inbox
from offbeat.runtime.transport.outbox import Key, Outbox
from offbeat.runtime.transport.shared_memory import ANCILLARY_BYTES, HAS_SHARED, Borrowed

TCP_FRAME_BYTES = 64 * 1024
LOCAL_FRAME_BYTES = 1024 * 1024
UNIX_BUFFER_BYTES = 1024 * 1024
# Bytes that the kernel holds unsent cannot be overtaken. Limiting the whole send buffer instead (SO_SNDBUF)
# limits the bytes in flight too: 64 KB gave 640 of 956 Mbit/s on a line busy both ways, where ACKs queue too.
TCP_UNSENT_BYTES = 128 * 1024
# In the middle of a long frame there is nothing to process, so the kernel need not wake this node before so
# much was received: AlexNet at 1 Gbit/s makes 2.4 times fewer receives, each a turn of the loop.
TCP_WAKE_BYTES = 128 * 1024
LOCAL_UNSENT_BYTES = 2 * 1024 * 1024

# As integers: combining members of an enumeration takes as long as a small receive.
_CONTROL_TRUNCATED, _CLOSE_ON_EXEC = int(socket.MSG_CTRUNC), int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


@dataclass(eq=False, slots=True)
class Link:
    """One connection; `sock` is None once it is closed."""

    sock: socket.socket | None
    where: str  # the other end, for error messages
    host: str = ""  # of the other end, where it was accepted over TCP
    reader: FrameReader = field(default_factory=lambda: FrameReader(None))
    greeting: Dialler | Acceptor | None = None  # until the handshake is done
    borrowed: Borrowed | None = None  # the peer's memory; without it, descriptors that arrive are closed
    full: bool = False  # the kernel accepts no more for now
    paused: bool = False  # nothing is read: too much arrived that nothing expects
    watched: int = 0
    wake_bytes: int = 1  # the socket is reported as readable when so many bytes were received
    heard: bool = True  # something was received since the last tick
    spoke: bool = True  # something was sent since the last tick


@dataclass(eq=False, slots=True)
class Dial:
    """A dial in progress: the peer's addresses are tried in turn, round after round, until the deadline."""

    deadline_s: float  # infinite for an open session, which ends when the peer has been silent too long
    left: list[Address] = field(default_factory=list)
    link: Link | None = None
    spoken: bool = False  # the peer may have received our HELLO
    hopeless: bool = False  # an address gave an answer that will not change
    whys: dict[str, str] = field(default_factory=dict)
    starved_s: float | None = None  # since when this node can open no descriptor


@dataclass(eq=False, slots=True)
class Session:
    """An ordered exchange of frames between two nodes, over one connection after the other.

    Attributes:
        own: this node's id of it.
        theirs: the other node's id; "" until there has been a connection.
        is_resumable: frames lost with a broken connection are sent again on the next one. Not so where the
            first connection was a Unix socket, which the kernel breaks only if a process ends.
        received: numbered frames received so far.
        owed_frames, owed_bytes: those of them that are not acknowledged.
    """

    own: str = field(default_factory=new_session)
    theirs: str = ""
    is_resumable: bool = False
    received: int = 0
    owed_frames: int = 0
    owed_bytes: int = 0

    @property
    def is_open(self) -> bool:
        """Whether there has been a connection."""
        return bool(self.theirs)

    @property
    def position(self) -> Position:
        """This node's position in the session."""
        return Position(self.own, self.theirs, self.received)


@dataclass(eq=False, slots=True)
class Peer:
    """One other node, by name."""

    name: str
    inbox: Inbox
    outbox: Outbox
    addresses: tuple[Address, ...] = ()
    lasting: bool = False  # it listens there for as long as it lives
    silent_s: float | None = None  # after which this peer is lost, in place of the endpoint's limit
    session: Session = field(default_factory=Session)
    silent_ticks: int = 0  # ticks without received bytes, over all connections
    is_unreachable: bool = False  # silent for so long that `on_unreachable` was called
    cause: str = ""  # why the last connection broke; "" while there is one
    link: Link | None = None
    dial: Dial | None = None
    parked: list[Link] = field(default_factory=list)  # authenticated, waiting for WELCOME
    gone: bool = False  # lost, or left in order: messages to it are dropped
    turn: Key | None = None  # of its valid entry in the send heap


def tune(link: Link, outbox: Outbox) -> None:
    """Set the frame size and unsent bytes for the kind of connection: on one host memory is the limit."""
    assert link.sock is not None
    outbox.frame_bytes = TCP_FRAME_BYTES
    with suppress(OSError):  # the peer may be gone already, which is noticed soon enough
        if link.sock.family == socket.AF_UNIX:
            outbox.frame_bytes = LOCAL_FRAME_BYTES
        elif link.sock.getpeername()[0] == link.sock.getsockname()[0]:
            outbox.frame_bytes = LOCAL_FRAME_BYTES
            link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, LOCAL_UNSENT_BYTES)


def share(link: Link) -> None:
    """Allow shared memory on a connection, if its kind carries descriptors."""
    if HAS_SHARED and link.sock is not None and link.sock.family == socket.AF_UNIX and link.borrowed is None:
        link.borrowed = Borrowed()


def receive(link: Link) -> int:
    """Receive available bytes; return how many, 0 at the end of the stream.

    Raises:
        OSError: no byte is available, or none can come any more.
        ProtocolError: more descriptors arrived than one frame can need.
    """
    assert link.sock is not None
    buffers, borrowed = link.reader.buffers(), link.borrowed
    if borrowed is not None:
        n, ancillary, flags, _ = link.sock.recvmsg_into(buffers, ANCILLARY_BYTES, _CLOSE_ON_EXEC)
        if ancillary or flags & _CONTROL_TRUNCATED:
            borrowed.came(ancillary, truncated=bool(flags & _CONTROL_TRUNCATED))
        return n
    if len(buffers) == 1:
        return link.sock.recv_into(buffers[0])
    return link.sock.recvmsg_into(buffers)[0]


def wake_late(link: Link) -> None:
    """Wake late in the middle of a long frame, and at the first byte of its end."""
    wake_bytes = TCP_WAKE_BYTES if link.reader.missing >= TCP_WAKE_BYTES else 1
    if wake_bytes != link.wake_bytes:
        wake_at(link, wake_bytes)


def wake_at(link: Link, wake_bytes: int) -> None:
    """Set how many bytes must be received before the socket is reported as readable."""
    if link.sock is not None and link.sock.family != socket.AF_UNIX:
        link.wake_bytes = wake_bytes
        with suppress(OSError):  # the peer may be gone already, which is noticed soon enough
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)


def prepare(sock: socket.socket) -> socket.socket:
    """Prepare an accepted or dialled socket for the loop. The one place where TLS would wrap it."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, TCP_UNSENT_BYTES)
    return sock
