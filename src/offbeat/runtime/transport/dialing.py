"""Opens connections: dialling, the handshake, and which of two simultaneous dials survives.

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

Late handshakes: a network that loses packets delivers some after their sender has given up that connection,
and reports the end of a connection after what was sent on the next one. So a process numbers its positions in
all sessions, and sends one only after it has dropped every other connection to that peer. A position with a
lower number than the one with which the last connection began is of a dropped connection, perhaps of an
earlier session: its number of received frames may be too low by now, so that connection is closed. Numbers of
different processes are not compared: a process that is started again begins at 1.

A dial that gets no descriptor fails with that reason.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from math import inf
from time import monotonic

from offbeat.errors import LinkFailure, ProtocolError
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.transport.accepting import ConnectionAcceptor
from offbeat.runtime.transport.addresses import Address, SocketAddress, parse_address
from offbeat.runtime.transport.connections import (
    Connection,
    Dial,
    LinkSession,
    OpenSockets,
    RemoteNode,
    configure_socket,
    enable_shared_memory,
    explain_socket_error,
    receive_handshake,
    send_handshake,
)
from offbeat.runtime.transport.descriptors import is_out_of_descriptors
from offbeat.runtime.transport.handshake import (
    AcceptorHandshake,
    DiallerHandshake,
    RefusedError,
    SessionPosition,
    new_id,
)
from offbeat.runtime.transport.io_loop import EPOLL_READ, EPOLL_WRITE, IoLoop
from offbeat.runtime.transport.tls import TlsCredentials, TlsSocket

RETRY_S = 0.1
# An address that does not answer is dialled again after so long: the kernel retries ever more rarely, and
# would leave a link idle that works again between two of its attempts.
CONNECT_ATTEMPT_S = 1.0
HANDSHAKE_ATTEMPT_S = 4.0
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
        tls: encrypts TCP connections; None for plain ones.

    Attributes:
        acceptor: accepts the connections that peers dial.
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
        get_addresses: Callable[[], tuple[str, ...]],
        get_peer: Callable[[str], RemoteNode],
        on_opened: Callable[[RemoteNode, Connection, int], None],
        on_detached: Callable[[RemoteNode], None],
        on_replaced: Callable[[RemoteNode], None],
        on_failed: Callable[[RemoteNode, str, LinkFailure], None],
        on_refused: Callable[[str], None],
        tls: TlsCredentials | None,
    ) -> None:
        self._tls = tls
        self._loop = loop
        self._name, self._job, self._token = name, job, token
        self._process, self._position_numbers = new_id(), count(1)
        self._connect_s = connect_s
        self._addresses = get_addresses
        self._peer = get_peer
        self._opened, self._detached, self._replaced = on_opened, on_detached, on_replaced
        self._failed = on_failed
        self._sockets = sockets
        self.acceptor = ConnectionAcceptor(
            loop,
            sockets,
            name,
            job=job,
            token=token,
            connect_s=connect_s,
            on_authenticated=self._on_authenticated,
            on_refused=on_refused,
            tls=tls,
        )

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
        self.acceptor.learn_hosts(peer.addresses)
        dial = peer.dial
        if dial is not None and dial.link is None and not dial.untried_addresses:
            self._start_round(peer, dial)

    def welcome_parked(self, peer: RemoteNode) -> bool:
        """Welcome a connection that waits for the peer's current one to end; return whether there was one."""
        while peer.link is None and peer.parked:
            self._welcome(peer, peer.parked.pop(0))
        return peer.link is not None

    def drop_pending(self, peer: RemoteNode) -> None:
        """Drop the dial and the waiting connections of a peer, without a message to it."""
        self.stop_dialling(peer)
        for link in peer.parked:
            self._sockets.close_link(link)
        peer.parked.clear()

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
                    name = f"{self._name} looks up {address.text}"
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
        """Look up a host's name or read a file, which blocks, in a thread of its own."""
        try:
            found: tuple[socket.AddressFamily, SocketAddress] | str = address.resolve()
        except OSError as error:
            found = explain_socket_error(error)
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
            return explain_socket_error(error)
        dial.no_descriptor_since_s = None
        self._sockets.add(sock)  # at once: another thread may fork while this one connects
        try:
            code = configure_socket(sock).connect_ex(where)
        except OSError as error:
            code = error.errno or errno.EINVAL
        if code not in (0, errno.EINPROGRESS):
            self._sockets.close(sock)
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
        dial.attempt_limits += 1
        if dial.untried_addresses or limit_s < share_s:
            number = dial.attempt_limits

            def give_up() -> None:
                if dial.attempt_limits == number:
                    self._attempt_failed(peer, dial, link, why)

            self._loop.call_later(max(0.0, min(limit_s, share_s)), give_up)

    def _on_connected(self, peer: RemoteNode, dial: Dial, link: Connection, _: int) -> None:
        if link.sock is None or dial.is_hello_sent or peer.dial is not dial:
            return
        code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._attempt_failed(peer, dial, link, os.strerror(code).lower())
        elif self._tls is None or link.sock.family == socket.AF_UNIX:
            self._greet(peer, dial, link)
        else:
            self._limit_attempt(peer, dial, link, HANDSHAKE_ATTEMPT_S, "no answer to the TLS handshake")
            try:
                self._sockets.encrypt(link, self._tls, accepts=False)
            except OSError as error:
                self._attempt_failed(peer, dial, link, explain_socket_error(error))
            else:
                self._continue_tls(peer, dial, link)

    def _continue_tls(self, peer: RemoteNode, dial: Dial, link: Connection, _: int = 0) -> None:
        """Continue the TLS handshake; send HELLO once it is done."""
        if not isinstance(link.sock, TlsSocket) or link.sock.is_secure or peer.dial is not dial:
            return
        try:
            awaited = link.sock.continue_handshake()
        except ProtocolError as error:
            dial.is_hopeless = True
            self._attempt_failed(peer, dial, link, str(error))
        except OSError as error:
            self._attempt_failed(peer, dial, link, explain_socket_error(error))
        else:
            if awaited:
                self._loop.modify_watch(link.sock, awaited, partial(self._continue_tls, peer, dial, link))
            else:
                self._greet(peer, dial, link, link.sock.peer_certificate_digest())

    def _greet(self, peer: RemoteNode, dial: Dial, link: Connection, certificate: bytes = b"") -> None:
        """Send HELLO to the acceptor, which has this certificate."""
        assert link.sock is not None
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
            position=self._next_position(peer),
            certificate=certificate,
        )
        self._loop.modify_watch(link.sock, EPOLL_READ, partial(self._on_acceptor_frame, peer, dial, link))
        dial.is_hello_sent = True
        self._limit_attempt(peer, dial, link, HANDSHAKE_ATTEMPT_S, "no answer to the handshake")
        send_handshake(link, link.handshake.hello())

    def _on_acceptor_frame(self, peer: RemoteNode, dial: Dial, link: Connection, _: int) -> None:
        """Process the acceptor's handshake frames."""
        greeting = link.handshake
        if link.sock is None or not isinstance(greeting, DiallerHandshake):
            return
        try:
            why = receive_handshake(link)
            if why is not None:
                self._attempt_failed(peer, dial, link, why)
                return
            while greeting.peer_position is None and (frame := link.reader.next_frame()) is not None:
                send_handshake(link, greeting.on_frame(frame))
        except RefusedError as error:
            text = f"{peer.name} at {link.remote} refused the connection: {error}"
            self._fail(peer, dial, text, "peer has no files" if error.is_out_of_descriptors else "refused")
        except ProtocolError as error:
            dial.is_hopeless = True
            self._attempt_failed(peer, dial, link, str(error))
        else:
            if greeting.peer_position is not None:
                self._on_welcome(peer, link, greeting.position, greeting.peer_position)
            elif link.has_decrypted:
                self._loop.call(self._on_acceptor_frame, peer, dial, link, EPOLL_READ)

    def _on_welcome(
        self, peer: RemoteNode, link: Connection, ours: SessionPosition, theirs: SessionPosition
    ) -> None:
        """Use a connection whose acceptor resumed our session or, if it does not know it, began a new one."""
        peer.dial = None
        if peer.session.is_open and theirs.session != peer.session.peer_id:
            self._replaced(peer)
            self.stop_dialling(peer)  # the report of the loss may have started a dial
            peer.session = LinkSession(own_id=ours.session)
        self._open(peer, link, theirs, theirs.received)

    def _attempt_failed(self, peer: RemoteNode, dial: Dial, link: Connection, why: str) -> None:
        """Try the next address, unless a connection that the peer dialled waits to be welcomed."""
        if peer.dial is not dial or dial.link is not link:
            return
        dial.failure_reasons[link.remote] = why
        dial.link = None
        dial.is_hello_sent = False
        self._sockets.close_link(link)
        if peer.link is not None or not self.welcome_parked(peer):  # a silent connection is being replaced
            self._try_next(peer, dial)

    def _on_deadline(self, peer: RemoteNode, dial: Dial) -> None:
        if peer.dial is not dial:
            return
        if dial.link is not None:
            has_connected = dial.is_hello_sent or isinstance(dial.link.sock, TlsSocket)
            dial.failure_reasons[dial.link.remote] = (
                "no answer to the handshake" if has_connected else "no answer"
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
            self._sockets.close_link(dial.link)

    def _next_position(self, peer: RemoteNode) -> SessionPosition:
        """Return this node's position, to be sent at once, on its only connection to the peer."""
        session, number = peer.session, next(self._position_numbers)
        return SessionPosition(
            session.own_id, session.peer_id, session.received_frames, number, self._process
        )

    # Accepting

    def _on_authenticated(self, name: str, link: Connection, greeting: AcceptorHandshake) -> None:
        """Welcome an authenticated peer, or park it while another connection has precedence."""
        peer = self._peer(name)
        if peer.has_dropped(greeting.position):
            self._sockets.close_link(link)
            return
        dial = peer.dial
        goes_first = self._name < peer.name and dial is not None and dial.is_hello_sent
        is_same = peer.session.is_resumable and greeting.position.session == peer.session.peer_id
        if peer.link is not None and is_same and not goes_first:
            self._detached(peer)
        if not peer.addresses:
            with suppress(ValueError):  # a malformed address cannot be dialled
                peer.addresses = tuple(map(parse_address, greeting.addresses))
                self.acceptor.learn_hosts(peer.addresses)
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
                self.acceptor.refuse(link, f"{self._name} already has a connection to {peer.name}")

    def _welcome(self, peer: RemoteNode, link: Connection) -> None:
        greeting = link.handshake
        if link.sock is None or not isinstance(greeting, AcceptorHandshake):
            return
        theirs, session = greeting.position, peer.session
        is_same = theirs.session == session.peer_id and theirs.peer_session in ("", session.own_id)
        if session.is_open and not is_same:
            self._replaced(peer)
        self.stop_dialling(peer)
        send_handshake(link, greeting.welcome(self._next_position(peer)))
        self._open(peer, link, theirs, theirs.received if is_same else 0)

    def _open(self, peer: RemoteNode, link: Connection, theirs: SessionPosition, received: int) -> None:
        assert link.sock is not None
        link.handshake = None
        session = peer.session
        if not session.is_open:
            session.peer_id = theirs.session
            session.is_resumable = link.sock.family != socket.AF_UNIX
        peer.position = theirs
        self._close_outdated(peer)
        self._opened(peer, link, received)

    def _close_outdated(self, peer: RemoteNode) -> None:
        """Close the connections that wait for WELCOME and that the peer has dropped."""
        waiting, peer.parked = peer.parked, []
        for link in waiting:
            greeting = link.handshake
            if isinstance(greeting, AcceptorHandshake) and peer.has_dropped(greeting.position):
                self._sockets.close_link(link)
            else:
                peer.parked.append(link)


def _listed(peer: RemoteNode) -> str:
    return " and ".join(address.text for address in peer.addresses)


def _raise(error: BaseException) -> None:
    """Raise the failure of a look-up thread in the I/O thread, which ends the endpoint."""
    raise error
