"""Accepts connections and authenticates their clients, without being held up by any of them.

Unknown clients never hold up the node: half-open connections are small and have a deadline, and few of them
may be open before they have sent a HELLO for this job. If one more arrives, the oldest of them is closed, one
from a host of no known peer first. So silent connections cannot shut out a peer.

A shortage of file descriptors is always reported as such: one descriptor is kept in reserve, with which a
connection can be accepted and refused with that reason.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from time import monotonic

from offbeat.errors import ProtocolError
from offbeat.runtime.transport.addresses import Address
from offbeat.runtime.transport.connections import (
    Connection,
    OpenSockets,
    configure_socket,
    explain_socket_error,
    receive_handshake,
    send_handshake,
)
from offbeat.runtime.transport.descriptors import is_out_of_descriptors
from offbeat.runtime.transport.handshake import AcceptorHandshake, encode_refusal
from offbeat.runtime.transport.io_loop import EPOLL_READ, IoLoop
from offbeat.runtime.transport.tls import PlainPeerError, TlsCredentials, TlsSocket

MAX_HALF_OPEN = 64
REFUSAL_REPORT_INTERVAL_S = 1.0  # between two reports of refused connections
NO_DESCRIPTORS_PAUSE_S = 1.0


class ConnectionAcceptor:
    """Accepts connections on listening sockets and passes on those whose client has authenticated itself.

    All of its code runs in the loop's thread.

    Args:
        connect_s: how long a client may take to authenticate itself.
        tls: encrypts TCP connections; None for plain ones.
        on_authenticated: (peer's name, link, handshake): the peer waits for WELCOME.
        on_refused: a connection was refused; the text gives its address and the cause.
    """

    def __init__(
        self,
        loop: IoLoop,
        sockets: OpenSockets,
        name: str,
        *,
        job: str,
        token: str,
        connect_s: float,
        on_authenticated: Callable[[str, Connection, AcceptorHandshake], None],
        on_refused: Callable[[str], None],
        tls: TlsCredentials | None,
    ) -> None:
        self._tls = tls
        self._loop, self._sockets = loop, sockets
        self._name, self._job, self._token = name, job, token
        self._connect_s = connect_s
        self._on_authenticated, self._refused = on_authenticated, on_refused
        self._reported_s = float("-inf")  # when `on_refused` was last called
        self._unreported = 0  # connections refused since
        self._listeners: list[socket.socket] = []
        self._half_open: dict[Connection, None] = {}  # accepted, not authenticated yet; the oldest first
        self._known_hosts: set[str] = set()
        self._spare: socket.socket | None = None  # closed to accept a connection that is to be refused
        self._reserve_spare()

    def listen(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket."""
        sock.setblocking(False)
        self._sockets.add(sock)
        self._listeners.append(sock)
        self._loop.watch(sock, EPOLL_READ, partial(self._accept, sock))

    def learn_hosts(self, addresses: Iterable[Address]) -> None:
        """Prefer clients from these hosts, where peers are known to be."""
        self._known_hosts.update(address.host for address in addresses if address.host)

    def refuse(self, link: Connection, line: str) -> None:
        """Close an accepted connection, with a REFUSE frame that gives the reason."""
        send_handshake(link, encode_refusal(line))
        self.close(link)
        self._report(f"refused a connection from {link.remote}: {line}")

    def stop_listening(self) -> None:
        """Stop listening and close half-open connections."""
        self._release_spare()
        for sock in self._listeners:
            self._sockets.close(sock)
        self._listeners.clear()
        for link in list(self._half_open):
            self.close(link)

    def close(self, link: Connection) -> None:
        """Close a connection that is half open."""
        self._half_open.pop(link, None)
        self._sockets.close_link(link)

    def _accept(self, listener: socket.socket, _: int) -> None:
        try:
            sock, where = listener.accept()
        except OSError as error:
            if is_out_of_descriptors(error) and self._spare is not None:
                self._refuse_with_spare(listener, error)
            elif is_out_of_descriptors(error) or error.errno in (errno.ENOBUFS, errno.ENOMEM):
                # It stays ready, and would keep the loop busy until there are descriptors again.
                self._loop.unwatch(listener)
                self._loop.call_later(NO_DESCRIPTORS_PAUSE_S, partial(self._accept_again, listener))
                why = explain_socket_error(error)
                self._refused(f"cannot accept connections for {NO_DESCRIPTORS_PAUSE_S:g} s: {why}")
            return
        client = f"{where[0]}:{where[1]}" if isinstance(where, tuple) else "a Unix socket of this host"
        link = Connection(sock, client)
        self._sockets.add(sock)
        link.remote_host = where[0] if isinstance(where, tuple) else ""
        certificate = b""
        configure_socket(sock)
        if self._tls is not None and sock.family != socket.AF_UNIX:
            certificate = self._tls.certificate_digest
            try:
                self._sockets.encrypt(link, self._tls, accepts=True)
            except OSError:
                return  # the client is gone
        assert link.sock is not None
        link.handshake = AcceptorHandshake(
            job=self._job, token=self._token, node=self._name, certificate=certificate
        )
        self._make_room()
        self._half_open[link] = None
        self._loop.watch(link.sock, EPOLL_READ, partial(self._on_client_ready, link))
        self._loop.call_later(self._connect_s, partial(self._on_handshake_deadline, link))

    def _refuse_with_spare(self, listener: socket.socket, error: OSError) -> None:
        """Accept one connection with the spare descriptor, only to refuse it with the reason."""
        self._release_spare()
        with suppress(OSError):  # the client is gone, or another thread took the descriptor
            sock, _ = listener.accept()
            with sock:
                sock.setblocking(False)
                if self._tls is None or sock.family == socket.AF_UNIX:  # else no frame would be understood
                    sock.send(encode_refusal(explain_socket_error(error), is_out_of_descriptors=True))
        self._report(f"refused a connection: {explain_socket_error(error)}")
        self._reserve_spare()

    def _reserve_spare(self) -> None:
        """Reserve a descriptor with which to refuse a connection; a socket, like all in `OpenSockets`."""
        if self._spare is not None:
            return
        with suppress(OSError):
            self._spare = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._sockets.add(self._spare)

    def _release_spare(self) -> None:
        if self._spare is not None:
            self._sockets.close(self._spare)
            self._spare = None

    def _make_room(self) -> None:
        """Close the oldest connection without a HELLO for this job, if there are too many."""
        silent = [
            link
            for link in self._half_open
            if isinstance(link.handshake, AcceptorHandshake) and not link.handshake.has_valid_hello
        ]
        if len(silent) >= MAX_HALF_OPEN:
            strangers = [link for link in silent if link.remote_host not in self._known_hosts]
            oldest = (strangers or silent)[0]
            self._report(
                f"closed a connection from {oldest.remote}: it has not identified itself, and neither have "
                f"{MAX_HALF_OPEN} others, the most allowed"
            )
            self.close(oldest)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._reserve_spare()
            self._loop.watch(listener, EPOLL_READ, partial(self._accept, listener))

    def _on_handshake_deadline(self, link: Connection) -> None:
        if link in self._half_open:  # the client may be slow and try again: so no REFUSE is sent
            line = f"it did not authenticate within {self._connect_s:g} s"
            self._report(f"closed a connection from {link.remote}: {line}")
            self.close(link)

    def _on_client_ready(self, link: Connection, _: int) -> None:
        """Continue the handshakes with a client: first that of TLS, if any."""
        if not isinstance(link.sock, TlsSocket) or link.sock.is_secure:
            self._on_dialler_frame(link)
            return
        try:
            awaited = link.sock.continue_handshake()
        except ProtocolError as error:
            if isinstance(error, PlainPeerError):
                with suppress(OSError):
                    link.sock.send_plain(encode_refusal("this node uses TLS, and the other one does not"))
            self._report(f"refused a connection from {link.remote}: {error}")
            self.close(link)
        except OSError:
            self.close(link)  # the client is gone
        else:
            watcher = partial(self._on_client_ready, link)
            self._loop.modify_watch(link.sock, awaited or EPOLL_READ, watcher)

    def _on_dialler_frame(self, link: Connection) -> None:
        """Process the dialler's handshake frames."""
        greeting = link.handshake
        if link.sock is None or not isinstance(greeting, AcceptorHandshake):
            return
        try:
            if receive_handshake(link) is not None:
                if greeting.peer is None and link.reader.is_partial:
                    raise ProtocolError("it ended in the middle of a frame")
                self.close(link)  # the dialler has dropped it, or has a better connection by now
                return
            while link.sock is not None and (frame := link.reader.next_frame()) is not None:
                send_handshake(link, greeting.on_frame(frame))
        except ProtocolError as error:
            self.refuse(link, str(error))
            return
        if greeting.peer is not None and link in self._half_open:
            self._half_open.pop(link, None)
            self._on_authenticated(greeting.peer, link, greeting)
        elif link.has_decrypted:
            self._loop.call(self._on_dialler_frame, link)

    def _report(self, line: str) -> None:
        """Report a refused connection, at most once a second."""
        now_s = monotonic()
        if now_s - self._reported_s < REFUSAL_REPORT_INTERVAL_S:
            self._unreported += 1
            return
        more = f" ({self._unreported} more before it)" if self._unreported else ""
        self._reported_s, self._unreported = now_s, 0
        self._refused(line + more)
