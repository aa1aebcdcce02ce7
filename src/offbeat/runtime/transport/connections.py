"""What a node knows about each peer and each connection: plain state, and how a socket is prepared.

This module never decides anything and never sends; what is received goes where its reader and `Borrowed` say.
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
# What the kernel holds unsent cannot be overtaken. Limiting the whole send buffer instead (SO_SNDBUF) limits
# what is in flight too: 64 KB brought 640 of 956 Mbit/s on a line busy both ways, where ACKs queue too.
TCP_UNSENT_BYTES = 128 * 1024
# In the middle of a long frame there is nothing to act on, so the kernel need not wake this node before this
# much has come: AlexNet at 1 Gbit/s makes 2.4 times fewer receives, each a turn of the loop.
TCP_WAKE_BYTES = 128 * 1024
LOCAL_UNSENT_BYTES = 2 * 1024 * 1024

# As numbers: to combine members of an enumeration takes as long as a small receive.
_TRUNCATED, _CLOSE_ON_EXEC = int(socket.MSG_CTRUNC), int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


@dataclass(eq=False, slots=True)
class Link:
    """One connection; `sock` is None once it is closed."""

    sock: socket.socket | None
    where: str  # the other end, for messages to people
    host: str = ""  # of the other end, where it was accepted and is known
    reader: FrameReader = field(default_factory=lambda: FrameReader(None))
    greeting: Dialler | Acceptor | None = None  # until the handshake is done
    borrowed: Borrowed | None = None  # memory of the peer; without it, descriptors that come are closed
    full: bool = False  # the kernel takes no more for now
    paused: bool = False  # too much came that nobody has asked for
    watched: int = 0
    wake_bytes: int = 1  # the kernel says that something has come when this much has
    heard: bool = True  # something came, or went, since the last tick
    spoke: bool = True


@dataclass(eq=False, slots=True)
class Dial:
    """An attempt to reach a peer: one address after the other, again and again, until the deadline."""

    deadline_s: float  # infinite where the peer's silence ends it
    left: list[Address] = field(default_factory=list)
    link: Link | None = None
    spoken: bool = False  # the other side may have seen our HELLO
    hopeless: bool = False  # an address answered in a way that will not change
    whys: dict[str, str] = field(default_factory=dict)
    starved_s: float | None = None  # since when this node can open no connection


@dataclass(eq=False, slots=True)
class Session:
    """What two nodes send each other, over one connection after the other.

    Attributes:
        own: this node's id of it.
        theirs: the other node's; "" until there has been a connection.
        is_resumable: what a broken connection has lost is sent again on the next one. It is not where the
            first connection was a Unix socket: the kernel breaks such a one only if a process ends.
        received: how many numbered frames have come.
        owed_frames, owed_bytes: what of them is not acknowledged.
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
        """Where this node is in the session."""
        return Position(self.own, self.theirs, self.received)


@dataclass(eq=False, slots=True)
class Peer:
    """One other node, by name."""

    name: str
    inbox: Inbox
    outbox: Outbox
    addresses: tuple[Address, ...] = ()
    lasting: bool = False  # it listens there for as long as it lives
    silent_s: float | None = None  # its own limit, where it has one
    session: Session = field(default_factory=Session)
    silent_ticks: int = 0  # in which nothing came, over however many connections
    is_unreachable: bool = False  # nothing has come for so long that `on_unreachable` was called
    cause: str = ""  # why the last connection broke; "" while there is one
    link: Link | None = None
    dial: Dial | None = None
    parked: list[Link] = field(default_factory=list)  # proved who they are and wait for WELCOME
    gone: bool = False  # lost, or left in order: what is sent to it is dropped
    turn: Key | None = None  # under which the send scheduler knows it


def tune(link: Link, outbox: Outbox) -> None:
    """Set how much goes out at once: on one host memory is the limit, and what is urgent is soon through."""
    assert link.sock is not None
    outbox.frame_bytes = TCP_FRAME_BYTES
    with suppress(OSError):  # the peer may be gone already, which is noticed soon enough
        if link.sock.family == socket.AF_UNIX:
            outbox.frame_bytes = LOCAL_FRAME_BYTES
        elif link.sock.getpeername()[0] == link.sock.getsockname()[0]:
            outbox.frame_bytes = LOCAL_FRAME_BYTES
            link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, LOCAL_UNSENT_BYTES)


def share(link: Link) -> None:
    """Let memory be shared over a connection, where its kind carries descriptors."""
    if HAS_SHARED and link.sock is not None and link.sock.family == socket.AF_UNIX and link.borrowed is None:
        link.borrowed = Borrowed()


def receive(link: Link) -> int:
    """Receive what has come; return how many bytes, 0 at the end of the stream.

    Raises:
        OSError: nothing has come, or nothing can come any more.
        ProtocolError: more descriptors came than can be meant.
    """
    assert link.sock is not None
    buffers, borrowed = link.reader.buffers(), link.borrowed
    if borrowed is not None:
        n, ancillary, flags, _ = link.sock.recvmsg_into(buffers, ANCILLARY_BYTES, _CLOSE_ON_EXEC)
        if ancillary or flags & _TRUNCATED:
            borrowed.came(ancillary, truncated=bool(flags & _TRUNCATED))
        return n
    if len(buffers) == 1:
        return link.sock.recv_into(buffers[0])
    return link.sock.recvmsg_into(buffers)[0]


def wake_late(link: Link) -> None:
    """Let the kernel collect the middle of a long frame, and tell at once when some of its end has come."""
    wake_bytes = TCP_WAKE_BYTES if link.reader.missing >= TCP_WAKE_BYTES else 1
    if wake_bytes != link.wake_bytes:
        wake_at(link, wake_bytes)


def wake_at(link: Link, wake_bytes: int) -> None:
    """Set how much must have come before the kernel says so; it says so at once if that much is there."""
    if link.sock is not None and link.sock.family != socket.AF_UNIX:
        link.wake_bytes = wake_bytes
        with suppress(OSError):  # the peer may be gone already, which is noticed soon enough
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)


def prepare(sock: socket.socket) -> socket.socket:
    """Make an accepted or dialled socket ready for the loop. The one place where TLS would wrap it."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, TCP_UNSENT_BYTES)
    return sock
