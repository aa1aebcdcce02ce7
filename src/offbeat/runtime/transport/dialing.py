"""Opens connections: listening, dialling, the handshake, and which of two simultaneous dials survives.

To dial is to open a connection to a peer, handshake included.

Simultaneous dials: when two nodes dial each other at once, the connection that the smaller name dialled
survives. The smaller one leaves the other's dial without WELCOME while its own may still succeed; the larger
one drops its own when it welcomes the smaller's. No data flows before WELCOME, so none is lost.

Resumption: a session outlives its connections. Its next connection is dialled like the first one, by either
side, and HELLO and WELCOME carry the number of frames received so far. A node drops its old connection before
it sends that number, so the number holds: the dialler when the new connection is there, the acceptor when it
welcomes. A HELLO of the process at the other end of the current connection means that this process has
dropped that connection. Where the peer does not know the session any more, the old one is over and a new one
begins.

Unknown clients never hold up the node: half-open connections are small and have a deadline, and few of them
may be open before they have sent a HELLO for this job. If one more arrives, the oldest of them is closed, one
from a host of no known peer first. So silent connections cannot shut out a peer.

A shortage of file descriptors is always reported as such: one descriptor is kept in reserve, with which a
connection can be accepted and refused with that reason; and a dial that gets none fails with it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic

from offbeat.errors import LinkFailure, ProtocolError, describe_os_error
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.transport.addresses import Address, SocketAddress, parse_address
from offbeat.runtime.transport.connections import (
    Connection,
    Dial,
    LinkSession,
    RemoteNode,
    configure_socket,
    enable_shared_memory,
    receive_available,
)
from offbeat.runtime.transport.descriptors import is_out_of_descriptors
from offbeat.runtime.transport.handshake import (
    AcceptorHandshake,
    DiallerHandshake,
    RefusedError,
    SessionPosition,
    encode_refusal,
)
from offbeat.runtime.transport.io_loop import EPOLL_READ, EPOLL_WRITE, IoLoop

MAX_HALF_OPEN = 64
RETRY_S = 0.1
# An address that does not answer is dialled again after so long: the kernel retries ever more rarely, and
# would leave a link idle that works again between two of its attempts.
CONNECT_ATTEMPT_S = 1.0
HANDSHAKE_ATTEMPT_S = 4.0
REFUSAL_REPORT_INTERVAL_S = 1.0  # between two reports of refused connections
NO_DESCRIPTORS_PAUSE_S = 1.0
NO_DESCRIPTOR_LIMIT_S = 3.0  # for which a dial may get no descriptor before it fails: the shortage may pass
CONNECTION_REFUSED_TEXT = os.strerror(errno.ECONNREFUSED).lower()


class ConnectionOpener:
    """Opens connections for an endpoint; all of its code runs in the loop's thread.

    Args:
        get_addresses: returns where this node listens.
        get_peer: returns the peer of a name.
        on_opened: (peer, link, received): a connection is ready for the peer, which has none, and which has
            received so many frames of the session; the connection's reader may hold unread bytes.
        on_detached: the peer's connection is dropped for another one of the same session.
        on_replaced: the peer does not know the session any more.
        on_failed: (peer, text, failure): the peer cannot be reached; the text gives the cause.
        on_refused: a connection was refused; the text gives its address and the cause.
    """

    def __init__(
        self,
        loop: IoLoop,
        name: str,
        *,
        job: str,
        token: str,
        connect_s: float,
        get_addresses: Callable[[], tuple[str, ...]],
        get_peer: Callable[[str], RemoteNode],
        on_opened: Callable[[RemoteNode, Connection, int], None],
        on_detached: Callable[[RemoteNode], None],
        on_replaced: Callable[[RemoteNode], None],
        on_failed: Callable[[RemoteNode, str, LinkFailure], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._name, self._job, self._token = name, job, token
        self._connect_s = connect_s
        self._addresses = get_addresses
        self._peer = get_peer
        self._opened, self._detached, self._replaced = on_opened, on_detached, on_replaced
        self._failed = on_failed
        self._refused = on_refused
        self._reported_s = float("-inf")  # when `on_refused` was last called
        self._unreported = 0  # connections refused since
        self._listeners: list[socket.socket] = []
        self._half_open: dict[Connection, None] = {}  # accepted, not authenticated yet; the oldest first
        self._known_hosts: set[str] = set()
        self.sockets: set[socket.socket] = set()  # every socket of the node, for a forked child to close
        self._spare: socket.socket | None = None  # closed to accept a connection that is to be refused
        self._reserve_spare()

    def listen(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket."""
        sock.setblocking(False)
        self.sockets.add(sock)
        self._listeners.append(sock)
        self._loop.watch(sock, EPOLL_READ, partial(self._accept, sock))

    def dial(self, peer: RemoteNode) -> None:
        """Start to dial a peer, unless a dial is in progress; an open session is dialled until it is lost."""
        if peer.dial is not None:
            return
        if peer.session.is_open:
            dial = peer.dial = Dial(inf)
        else:
            limit_s = max(self._connect_s, peer.silent_s or 0.0)
            dial = peer.dial = Dial(monotonic() + limit_s)
            self._loop.call_later(limit_s, partial(self._on_deadline, peer, dial))
        if peer.addresses:
            self._start_round(peer, dial)

    def stop_dialling(self, peer: RemoteNode) -> None:
        """End the dial of a peer, which has a connection."""
        if peer.dial is not None:
            self._end_dial(peer, peer.dial)

    def on_addresses_known(self, peer: RemoteNode) -> None:
        """Use addresses of a peer that became known: start the dial that waits for them, if there is one."""
        self._learn_hosts(peer)
        dial = peer.dial
        if dial is not None and dial.link is None and not dial.untried_addresses:
            self._start_round(peer, dial)

    def welcome_parked(self, peer: RemoteNode) -> bool:
        """Welcome a connection that waits for the peer's current one to end; return whether there was one."""
        while peer.link is None and peer.parked:
            self._welcome(peer, peer.parked.pop(0))
        return peer.link is not None

    def stop_listening(self) -> None:
        """Stop listening and close half-open connections, but not the dials in progress."""
        self._release_spare()
        for sock in self._listeners:
            self._loop.unwatch(sock)
            self.sockets.discard(sock)
            sock.close()
        self._listeners.clear()
        for link in list(self._half_open):
            self.close(link)

    def drop_pending(self, peer: RemoteNode) -> None:
        """Drop the dial and the waiting connections of a peer, without a message to it."""
        self.stop_dialling(peer)
        for link in peer.parked:
            self.close(link)
        peer.parked.clear()

    def close(self, link: Connection) -> None:
        """Close a connection."""
        self._half_open.pop(link, None)
        sock, link.sock = link.sock, None
        if sock is not None:
            self._loop.unwatch(sock)
            self.sockets.discard(sock)
            sock.close()
        if link.imported is not None:
            link.imported.close()

    # Dialling

    def _start_round(self, peer: RemoteNode, dial: Dial) -> None:
        """Try every address of the peer once."""
        if peer.dial is dial and dial.link is None:
            dial.untried_addresses = list(peer.addresses)
            dial.is_hopeless = all(address.unusable_reason() for address in dial.untried_addresses)
            self._try_next(peer, dial)

    def _try_next(self, peer: RemoteNode, dial: Dial) -> None:
        """Try the next address of the round; after the last one, start another round a little later."""
        while dial.untried_addresses:
            address = dial.untried_addresses.pop(0)
            why = address.unusable_reason()
            if why is None:
                if address.needs_lookup:
                    look_up = partial(self._look_up, peer, dial, address)
                    name = f"{self._name} looks up {address.host}"
                    start_thread(name, look_up, partial(self._loop.call, _raise))
                    return
                why = self._connect(peer, dial, address)
                if why is None:
                    return
            dial.failure_reasons[address.text] = why
        if (
            dial.no_descriptor_since_s is not None
            and monotonic() - dial.no_descriptor_since_s > NO_DESCRIPTOR_LIMIT_S
        ):
            reason = next(iter(dial.failure_reasons.values()))
            text = f"{self._name} cannot open a connection to {peer.name}: {reason}"
            self._fail(peer, dial, text, "no files")
        elif dial.is_hopeless:
            self._fail(peer, dial, self._cannot_reach(peer, dial), "unreachable")
        elif (peer.has_fixed_addresses or peer.session.is_open) and all(
            dial.failure_reasons.get(address.text) == CONNECTION_REFUSED_TEXT
            for address in peer.addresses
            if address.unusable_reason() is None
        ):
            self._fail(peer, dial, f"nothing listens any more at {_listed(peer)}", "ended")
        else:
            self._loop.call_later(RETRY_S, partial(self._start_round, peer, dial))

    def _look_up(self, peer: RemoteNode, dial: Dial, address: Address) -> None:
        """Look up a host's name, which blocks, in a thread of its own."""
        try:
            found: tuple[socket.AddressFamily, SocketAddress] | str = address.resolve()
        except OSError as error:
            found = _reason(error)
        self._loop.call(self._on_resolved, peer, dial, address, found)

    def _on_resolved(
        self,
        peer: RemoteNode,
        dial: Dial,
        address: Address,
        found: tuple[socket.AddressFamily, SocketAddress] | str,
    ) -> None:
        if peer.dial is not dial:
            return
        why = found if isinstance(found, str) else self._connect(peer, dial, address, found)
        if why is not None:
            dial.failure_reasons[address.text] = why
            self._try_next(peer, dial)

    def _connect(
        self,
        peer: RemoteNode,
        dial: Dial,
        address: Address,
        found: tuple[socket.AddressFamily, SocketAddress] | None = None,
    ) -> str | None:
        """Start to connect; return why that is impossible, or None."""
        try:
            family, where = found or address.resolve()
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if is_out_of_descriptors(error):
                dial.no_descriptor_since_s = dial.no_descriptor_since_s or monotonic()
            return _reason(error)
        dial.no_descriptor_since_s = None
        self.sockets.add(sock)  # at once: another thread may fork while this one connects
        try:
            code = configure_socket(sock).connect_ex(where)
        except OSError as error:
            code = error.errno or errno.EINVAL
        if code not in (0, errno.EINPROGRESS):
            self.sockets.discard(sock)
            sock.close()
            return os.strerror(code).lower()
        link = dial.link = Connection(sock, address.text)
        dial.is_hello_sent = False
        self._loop.watch(sock, EPOLL_WRITE, partial(self._on_connected, peer, dial, link))
        self._limit_attempt(peer, dial, link, CONNECT_ATTEMPT_S, "no answer")
        return None

    def _limit_attempt(
        self, peer: RemoteNode, dial: Dial, link: Connection, limit_s: float, why: str
    ) -> None:
        """Limit an attempt in time, so that time is left for the peer's further addresses."""
        share_s = (dial.deadline_s - monotonic()) / (len(dial.untried_addresses) + 1)
        if dial.untried_addresses or limit_s < share_s:
            spoken = dial.is_hello_sent

            def give_up() -> None:
                if dial.is_hello_sent == spoken:
                    self._attempt_failed(peer, dial, link, why)

            self._loop.call_later(max(0.0, min(limit_s, share_s)), give_up)

    def _on_connected(self, peer: RemoteNode, dial: Dial, link: Connection, _: int) -> None:
        if link.sock is None or dial.is_hello_sent or peer.dial is not dial:
            return
        code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._attempt_failed(peer, dial, link, os.strerror(code).lower())
            return
        if peer.link is not None:
            self._detached(peer)
        if not peer.session.is_resumable:
            enable_shared_memory(link)  # shared memory may be announced right behind the WELCOME
        link.handshake = DiallerHandshake(
            job=self._job,
            token=self._token,
            node=self._name,
            peer=peer.name,
            addresses=self._addresses(),
            position=peer.session.position,
        )
        self._loop.modify_watch(link.sock, EPOLL_READ, partial(self._on_acceptor_frame, peer, dial, link))
        dial.is_hello_sent = True
        self._limit_attempt(peer, dial, link, HANDSHAKE_ATTEMPT_S, "no answer to the handshake")
        self._send(link, link.handshake.hello())

    def _on_acceptor_frame(self, peer: RemoteNode, dial: Dial, link: Connection, _: int) -> None:
        """Process the acceptor's handshake frames."""
        greeting = link.handshake
        if link.sock is None or not isinstance(greeting, DiallerHandshake):
            return
        try:
            why = self._receive(link)
            if why is not None:
                self._attempt_failed(peer, dial, link, why)
                return
            while greeting.peer_position is None and (frame := link.reader.next_frame()) is not None:
                self._send(link, greeting.on_frame(frame))
        except RefusedError as error:
            text = f"{peer.name} at {link.remote} refused the connection: {error}"
            self._fail(peer, dial, text, "peer has no files" if error.is_out_of_descriptors else "refused")
        except ProtocolError as error:
            dial.is_hopeless = True
            self._attempt_failed(peer, dial, link, str(error))
        else:
            if greeting.peer_position is not None:
                self._on_welcome(peer, link, greeting.position.session, greeting.peer_position)

    def _on_welcome(self, peer: RemoteNode, link: Connection, session: str, theirs: SessionPosition) -> None:
        """Use a connection whose acceptor resumed our session or, if it does not know it, began a new one."""
        peer.dial = None
        if peer.session.is_open and theirs.session != peer.session.peer_id:
            self._replaced(peer)
            self.stop_dialling(peer)  # the report of the loss may have started a dial
            peer.session = LinkSession(own_id=session)
        self._open(peer, link, theirs.session, theirs.received)

    def _attempt_failed(self, peer: RemoteNode, dial: Dial, link: Connection, why: str) -> None:
        """Try the next address, unless a connection that the peer dialled waits to be welcomed."""
        if peer.dial is not dial or dial.link is not link:
            return
        dial.failure_reasons[link.remote] = why
        dial.link = None
        dial.is_hello_sent = False
        self.close(link)
        if peer.link is not None or not self.welcome_parked(peer):  # a silent connection is being replaced
            self._try_next(peer, dial)

    def _on_deadline(self, peer: RemoteNode, dial: Dial) -> None:
        if peer.dial is not dial:
            return
        if dial.link is not None:
            dial.failure_reasons[dial.link.remote] = (
                "no answer to the handshake" if dial.is_hello_sent else "no answer"
            )
        self._fail(peer, dial, self._cannot_reach(peer, dial), "unreachable")

    def _cannot_reach(self, peer: RemoteNode, dial: Dial) -> str:
        if not peer.addresses:
            return (
                f"cannot reach {peer.name} within {self._connect_s:g} s: its address is not known, and "
                "it did not connect"
            )
        tried = "; ".join(
            f"at {address.text} within {self._connect_s:g} s: "
            f"{dial.failure_reasons.get(address.text, 'not tried')}"
            for address in peer.addresses
        )
        return f"cannot reach {peer.name} {tried}"

    def _fail(self, peer: RemoteNode, dial: Dial, text: str, failure: LinkFailure) -> None:
        if peer.dial is dial:
            self._end_dial(peer, dial)
            if peer.link is not None or not self.welcome_parked(peer):
                self._failed(peer, text, failure)

    def _end_dial(self, peer: RemoteNode, dial: Dial) -> None:
        peer.dial = None
        if dial.link is not None:
            self.close(dial.link)

    # Accepting

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
                self._refused(f"cannot accept connections for {NO_DESCRIPTORS_PAUSE_S:g} s: {_reason(error)}")
            return
        client = f"{where[0]}:{where[1]}" if isinstance(where, tuple) else "a Unix socket of this host"
        link = Connection(sock, client)
        self.sockets.add(sock)
        link.remote_host = where[0] if isinstance(where, tuple) else ""
        link.handshake = AcceptorHandshake(job=self._job, token=self._token, node=self._name)
        self._make_room()
        self._half_open[link] = None
        configure_socket(sock)
        self._loop.watch(sock, EPOLL_READ, partial(self._on_dialler_frame, link))
        self._loop.call_later(self._connect_s, partial(self._on_handshake_deadline, link))

    def _refuse_with_spare(self, listener: socket.socket, error: OSError) -> None:
        """Accept one connection with the spare descriptor, only to refuse it with the reason."""
        self._release_spare()
        with suppress(OSError):  # the client is gone, or another thread took the descriptor
            sock, _ = listener.accept()
            with sock:
                sock.setblocking(False)
                sock.send(encode_refusal(_reason(error), is_out_of_descriptors=True))
        self._report(f"refused a connection: {_reason(error)}")
        self._reserve_spare()

    def _reserve_spare(self) -> None:
        """Reserve a descriptor with which to refuse a connection; a socket, like all that `sockets` has."""
        if self._spare is not None:
            return
        with suppress(OSError):
            self._spare = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.sockets.add(self._spare)

    def _release_spare(self) -> None:
        if self._spare is not None:
            self.sockets.discard(self._spare)
            self._spare.close()
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

    def _learn_hosts(self, peer: RemoteNode) -> None:
        self._known_hosts.update(address.host for address in peer.addresses if address.host)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._reserve_spare()
            self._loop.watch(listener, EPOLL_READ, partial(self._accept, listener))

    def _on_handshake_deadline(self, link: Connection) -> None:
        if link in self._half_open:  # the client may be slow and try again: so no REFUSE is sent
            line = f"it did not authenticate within {self._connect_s:g} s"
            self._report(f"closed a connection from {link.remote}: {line}")
            self.close(link)

    def _on_dialler_frame(self, link: Connection, _: int) -> None:
        """Process the dialler's handshake frames."""
        greeting = link.handshake
        if link.sock is None or not isinstance(greeting, AcceptorHandshake):
            return
        try:
            if self._receive(link) is not None:
                if greeting.peer is None and link.reader.is_partial:
                    raise ProtocolError("it ended in the middle of a frame")
                self.close(link)  # the dialler has dropped it, or has a better connection by now
                return
            while link.sock is not None and (frame := link.reader.next_frame()) is not None:
                self._send(link, greeting.on_frame(frame))
        except ProtocolError as error:
            self._refuse(link, str(error))
            return
        if greeting.peer is not None and link in self._half_open:
            self._half_open.pop(link, None)
            self._on_authenticated(self._peer(greeting.peer), link, greeting)

    def _on_authenticated(self, peer: RemoteNode, link: Connection, greeting: AcceptorHandshake) -> None:
        """Welcome an authenticated peer, or park it while another connection has precedence."""
        dial = peer.dial
        goes_first = self._name < peer.name and dial is not None and dial.is_hello_sent
        is_same = peer.session.is_resumable and greeting.position.session == peer.session.peer_id
        if peer.link is not None and is_same and not goes_first:
            self._detached(peer)
        if not peer.addresses:
            with suppress(ValueError):  # a malformed address cannot be dialled
                peer.addresses = tuple(map(parse_address, greeting.addresses))
                self._learn_hosts(peer)
        if peer.link is None and not goes_first:
            self._welcome(peer, link)
        else:
            peer.parked = [other for other in peer.parked if other.sock is not None]
            peer.parked.append(link)
            self._loop.call_later(self._connect_s / 2, partial(self._on_parked_deadline, peer, link))

    def _on_parked_deadline(self, peer: RemoteNode, link: Connection) -> None:
        if link in peer.parked:
            peer.parked.remove(link)
            if link.sock is not None:
                self._refuse(link, f"{self._name} already has a connection to {peer.name}")

    def _welcome(self, peer: RemoteNode, link: Connection) -> None:
        greeting = link.handshake
        if link.sock is None or not isinstance(greeting, AcceptorHandshake):
            return
        theirs, session = greeting.position, peer.session
        is_same = theirs.session == session.peer_id and theirs.peer_session in ("", session.own_id)
        if session.is_open and not is_same:
            self._replaced(peer)
        self.stop_dialling(peer)
        self._send(link, greeting.welcome(peer.session.position))
        self._open(peer, link, theirs.session, theirs.received if is_same else 0)

    def _refuse(self, link: Connection, line: str) -> None:
        self._send(link, encode_refusal(line))
        self.close(link)
        self._report(f"refused a connection from {link.remote}: {line}")

    def _report(self, line: str) -> None:
        """Report a refused connection, at most once a second."""
        now_s = monotonic()
        if now_s - self._reported_s < REFUSAL_REPORT_INTERVAL_S:
            self._unreported += 1
            return
        more = f" ({self._unreported} more before it)" if self._unreported else ""
        self._reported_s, self._unreported = now_s, 0
        self._refused(line + more)

    # Both

    def _open(self, peer: RemoteNode, link: Connection, theirs: str, received: int) -> None:
        assert link.sock is not None
        link.handshake = None
        session = peer.session
        if not session.is_open:
            session.peer_id = theirs
            session.is_resumable = link.sock.family != socket.AF_UNIX
        self._opened(peer, link, received)

    def _send(self, link: Connection, frame: bytes) -> None:
        """Send a handshake frame. The socket's buffer holds all of them; if it does not, the connection is
        broken and the next receive reports it."""
        if frame and link.sock is not None:
            with suppress(OSError):
                if link.sock.send(frame) < len(frame):
                    link.sock.shutdown(socket.SHUT_RDWR)

    def _receive(self, link: Connection) -> str | None:
        """Receive available bytes; return why no more can come, or None."""
        try:
            n = receive_available(link)
        except BlockingIOError:
            return None
        except OSError as error:
            return _reason(error)
        link.reader.on_received(n)
        return None if n else "the connection was closed during the handshake"


def _listed(peer: RemoteNode) -> str:
    return " and ".join(address.text for address in peer.addresses)


def _raise(error: BaseException) -> None:
    """Raise the failure of a look-up thread in the I/O thread, which ends the endpoint."""
    raise error


def _reason(error: OSError) -> str:
    if is_out_of_descriptors(error):
        return describe_os_error(error)
    return (error.strerror or str(error)).lower()
