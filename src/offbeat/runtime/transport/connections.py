"""State of each peer and each connection of a node, and how a socket is prepared.

This module decides nothing; received bytes go where a connection's `FrameReader` and
`ImportedRegions` say.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from offbeat.errors import ProtocolError, describe_os_error
from offbeat.runtime.transport.addresses import Address
from offbeat.runtime.transport.descriptors import is_out_of_descriptors
from offbeat.runtime.transport.framing import FrameReader
from offbeat.runtime.transport.handshake import (
    AcceptorHandshake,
    DiallerHandshake,
    SessionPosition,
    new_id,
)
from offbeat.runtime.transport.inbox import Inbox
from offbeat.runtime.transport.io_loop import IoLoop
from offbeat.runtime.transport.outbox import Outbox, SendKey
from offbeat.runtime.transport.shared_memory import ANCILLARY_BYTES, HAS_SHARED_MEMORY, ImportedRegions
from offbeat.runtime.transport.tls import MAX_RECORD_BYTES, TlsCredentials, TlsSocket, explain_tls_error

TCP_FRAME_BYTES = 64 * 1024
LOCAL_FRAME_BYTES = 1024 * 1024
UNIX_BUFFER_BYTES = 1024 * 1024
# Bytes that the kernel holds unsent cannot be overtaken. Limiting the whole send buffer instead (SO_SNDBUF)
# limits the bytes in flight too: 64 KB gave 640 of 956 Mbit/s on a link busy both ways, where ACKs queue too.
TCP_UNSENT_BYTES = 128 * 1024
# In the middle of a long frame there is nothing to process, so the kernel need not wake this node before so
# much was received: AlexNet at 1 Gbit/s makes 2.4 times fewer receives, each an iteration of the loop.
TCP_WAKE_BYTES = 128 * 1024
LOCAL_UNSENT_BYTES = 2 * 1024 * 1024

# As integers: combining members of an enumeration takes as long as a small receive.
_CONTROL_TRUNCATED, _CLOSE_ON_EXEC = int(socket.MSG_CTRUNC), int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


@dataclass(eq=False, slots=True)
class Connection:
    """One connection; `sock` is None once it is closed."""

    sock: socket.socket | None
    remote: str  # the other end, for error messages
    remote_host: str = ""  # of the other end, where it was accepted over TCP
    reader: FrameReader = field(default_factory=lambda: FrameReader(None))
    handshake: DiallerHandshake | AcceptorHandshake | None = None  # until the handshake is done
    imported: ImportedRegions | None = (
        None  # the peer's memory; without it, descriptors that arrive are closed
    )
    is_full: bool = False  # the kernel accepts no more for now
    is_paused: bool = False  # nothing is read: too much arrived that nothing expects
    watched_events: int = 0
    wake_bytes: int = 1  # the socket is reported as readable when so many bytes were received
    has_received: bool = True  # something was received since the last tick
    has_sent: bool = True  # something was sent since the last tick

    @property
    def has_unsent(self) -> bool:
        """Whether bytes were accepted for sending that the kernel has not accepted; TLS only."""
        return isinstance(self.sock, TlsSocket) and bool(self.sock.unsent)

    @property
    def has_decrypted(self) -> bool:
        """Whether bytes are left that are decrypted already, which epoll does not report; TLS only."""
        return isinstance(self.sock, TlsSocket) and self.sock.pending() > 0


@dataclass(eq=False, slots=True)
class Dial:
    """A dial in progress: it tries the peer's addresses one by one, again and again, until the deadline."""

    deadline_s: float  # infinite for an open session, which ends when the peer has been silent too long
    untried_addresses: list[Address] = field(default_factory=list)
    link: Connection | None = None
    attempt_limits: int = 0  # time limits set so far; only the last one is in force
    is_hello_sent: bool = False  # the peer may have received our HELLO
    is_hopeless: bool = False  # an address gave an answer that will not change
    failure_reasons: dict[str, str] = field(default_factory=dict)
    no_descriptor_since_s: float | None = None  # since when this node can open no descriptor


@dataclass(eq=False, slots=True)
class LinkSession:
    """An ordered exchange of frames between two nodes, over one connection after the other.

    Attributes:
        own_id: this node's id of it.
        peer_id: the other node's id; "" until there has been a connection.
        is_resumable: frames lost with a broken connection are sent again on the next one. Not so where the
            first connection was a Unix socket, which the kernel breaks only if a process ends.
        received_frames: numbered frames received so far.
        ack_due_frames, ack_due_bytes: those of them that are not acknowledged.
    """

    own_id: str = field(default_factory=new_id)
    peer_id: str = ""
    is_resumable: bool = False
    received_frames: int = 0
    ack_due_frames: int = 0
    ack_due_bytes: int = 0

    @property
    def is_open(self) -> bool:
        """Whether there has been a connection."""
        return bool(self.peer_id)


@dataclass(eq=False, slots=True)
class RemoteNode:
    """One other node, by name."""

    name: str
    inbox: Inbox
    outbox: Outbox
    addresses: tuple[Address, ...] = ()
    has_fixed_addresses: bool = False  # it listens there for as long as it runs
    silent_s: float | None = None  # after which this peer is lost, in place of the endpoint's limit
    session: LinkSession = field(default_factory=LinkSession)
    position: SessionPosition | None = None  # its own, with which the last connection began
    silent_ticks: int = 0  # ticks without received bytes, over all connections
    is_unreachable: bool = False  # silent for so long that `on_unreachable` was called
    cause: str = ""  # why the last connection broke; "" while there is one
    link: Connection | None = None
    dial: Dial | None = None
    parked: list[Connection] = field(default_factory=list)  # authenticated, waiting for WELCOME
    is_gone: bool = False  # lost, or left in order: messages to it are dropped
    scheduled_key: SendKey | None = None  # of its valid entry in the send heap

    def has_dropped(self, position: SessionPosition) -> bool:
        """Whether the peer has dropped the connection on which a position came: it has sent a later one."""
        last = self.position
        return last is not None and position.process == last.process and position.number < last.number

    @property
    def has_unsent(self) -> bool:
        """Whether anything is queued, or accepted for sending, that the kernel has not accepted."""
        return bool(self.outbox) or (self.link is not None and self.link.has_unsent)


class OpenSockets:
    """Every open socket of a node, watched or not, so that a forked child can close its copies of all."""

    def __init__(self, loop: IoLoop) -> None:
        self._loop = loop
        self._sockets: set[socket.socket] = set()

    def add(self, sock: socket.socket) -> None:
        """Add a socket, at once after it was opened: another thread may fork."""
        self._sockets.add(sock)

    def encrypt(self, link: Connection, tls: TlsCredentials, *, accepts: bool) -> None:
        """Replace a connection's socket by one that encrypts.

        Raises:
            OSError: the connection is broken, and closed.
        """
        assert link.sock is not None
        sock, link.sock = link.sock, None
        self._sockets.discard(sock)
        link.sock = tls.encrypt(sock, accepts=accepts)
        self._sockets.add(link.sock)

    def close(self, sock: socket.socket) -> None:
        """Stop watching a socket, and close it."""
        self._loop.unwatch(sock)
        self._sockets.discard(sock)
        sock.close()

    def close_link(self, link: Connection) -> None:
        """Close a connection, if it is not closed yet."""
        sock, link.sock = link.sock, None
        if sock is not None:
            self.close(sock)
        if link.imported is not None:
            link.imported.close()

    def close_all(self) -> None:
        """Close all sockets where no loop watches them any more: after its end, or in a forked child."""
        for sock in self._sockets:
            sock.close()


def set_frame_size(link: Connection, outbox: Outbox) -> None:
    """Set the frame size and unsent bytes for the kind of connection: on one host memory is the limit."""
    assert link.sock is not None
    outbox.frame_bytes = TCP_FRAME_BYTES
    with suppress(OSError):  # the peer may be gone already, which is noticed soon enough
        if link.sock.family == socket.AF_UNIX:
            outbox.frame_bytes = LOCAL_FRAME_BYTES
        elif link.sock.getpeername()[0] == link.sock.getsockname()[0]:
            outbox.frame_bytes = LOCAL_FRAME_BYTES
            link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, LOCAL_UNSENT_BYTES)


def enable_shared_memory(link: Connection) -> None:
    """Allow shared memory on a connection, if its kind carries descriptors."""
    if (
        HAS_SHARED_MEMORY
        and link.sock is not None
        and link.sock.family == socket.AF_UNIX
        and link.imported is None
    ):
        link.imported = ImportedRegions()


def receive_available(link: Connection) -> int:
    """Receive available bytes; return how many, 0 at the end of the stream.

    Raises:
        OSError: no byte is available, or none can come any more.
        ProtocolError: more descriptors arrived than one frame can need.
    """
    assert link.sock is not None
    buffers, imported = link.reader.buffers(), link.imported
    if isinstance(link.sock, TlsSocket):
        return link.sock.receive_into(buffers)
    if imported is not None:
        n, ancillary, flags, _ = link.sock.recvmsg_into(buffers, ANCILLARY_BYTES, _CLOSE_ON_EXEC)
        if ancillary or flags & _CONTROL_TRUNCATED:
            imported.on_descriptors(ancillary, truncated=bool(flags & _CONTROL_TRUNCATED))
        return n
    if len(buffers) == 1:
        return link.sock.recv_into(buffers[0])
    return link.sock.recvmsg_into(buffers)[0]


def send_views(link: Connection, views: Sequence[memoryview]) -> int:
    """Send what is accepted of some buffers; return how many bytes.

    Raises:
        BlockingIOError: nothing is accepted for now.
        OSError: nothing more can be sent.
    """
    assert link.sock is not None
    return link.sock.send_views(views) if isinstance(link.sock, TlsSocket) else link.sock.sendmsg(views)


def delay_wakeups(link: Connection) -> None:
    """Wake late in the middle of a long frame, and at the first byte of its end.

    TLS may hold a record in part, whose bytes the kernel does not count any more.
    """
    held_bytes = MAX_RECORD_BYTES if isinstance(link.sock, TlsSocket) else 0
    wake_bytes = TCP_WAKE_BYTES if link.reader.missing_bytes >= TCP_WAKE_BYTES + held_bytes else 1
    if wake_bytes != link.wake_bytes:
        set_wakeup_bytes(link, wake_bytes)


def set_wakeup_bytes(link: Connection, wake_bytes: int) -> None:
    """Set how many bytes must be received before the socket is reported as readable."""
    if link.sock is not None and link.sock.family != socket.AF_UNIX:
        link.wake_bytes = wake_bytes
        with suppress(OSError):  # the peer may be gone already, which is noticed soon enough
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)


def configure_socket(sock: socket.socket) -> socket.socket:
    """Prepare an accepted or connected socket for the loop."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, TCP_UNSENT_BYTES)
    return sock


def send_handshake(link: Connection, frame: bytes) -> None:
    """Send a handshake frame. The socket's buffer holds all of them; if it does not, the connection is
    broken and the next receive reports it."""
    if frame and link.sock is not None:
        with suppress(OSError):
            if send_views(link, [memoryview(frame)]) < len(frame) or link.has_unsent:
                link.sock.shutdown(socket.SHUT_RDWR)


def receive_handshake(link: Connection) -> str | None:
    """Receive available bytes of a handshake; return why no more can come, or None.

    Raises:
        ProtocolError: the other end has refused this one while TLS was set up.
    """
    try:
        n = receive_available(link)
    except BlockingIOError:
        return None
    except ssl.SSLError as error:
        raise ProtocolError(explain_tls_error(error)) from error
    except OSError as error:
        return explain_socket_error(error)
    link.reader.on_received(n)
    return None if n else "the connection was closed during the handshake"


def explain_socket_error(error: OSError) -> str:
    """Return why a socket failed, for error messages."""
    if is_out_of_descriptors(error):
        return describe_os_error(error)
    return (error.strerror or str(error)).lower()
