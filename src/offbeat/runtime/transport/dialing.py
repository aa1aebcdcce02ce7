"""Opens connections: listening, dialling, the handshake, and which of two simultaneous dials survives.

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

from offbeat.errors import LinkFailure, ProtocolError, explain
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.transport.addresses import Address, SocketAddress, parse
from offbeat.runtime.transport.connections import Dial, Link, Peer, Session, prepare, receive, share
from offbeat.runtime.transport.descriptors import is_none_left
from offbeat.runtime.transport.handshake import Acceptor, Dialler, Position, RefusedError, refuse
from offbeat.runtime.transport.io_loop import READ, WRITE, Loop

MAX_HALF_OPEN = 64
RETRY_S = 0.1
# An address that does not answer is dialled again after so long: the kernel retries ever more rarely, and
# would leave a line idle that works again between two of its attempts.
CONNECT_ATTEMPT_S = 1.0
HANDSHAKE_ATTEMPT_S = 4.0
REFUSALS_PAUSE_S = 1.0  # between two reports of refused connections
NO_DESCRIPTORS_PAUSE_S = 1.0
STARVED_S = 3.0  # for which a dial may get no descriptor before it fails: the shortage may pass
REFUSED = os.strerror(errno.ECONNREFUSED).lower()


class Opening:
    """Opens connections for an endpoint; all of its code runs in the loop's thread.

    Args:
        addresses: returns where this node listens.
        peer: returns the peer of a name.
        opened: (peer, link, received): a connection is ready for the peer, which has none, and which has
            received so many frames of the session; the link's reader may hold unread bytes.
        detached: the peer's connection is dropped for another one of the same session.
        replaced: the peer does not know the session any more.
        failed: (peer, text, failure): the peer cannot be reached; the text gives the cause.
        refused: a connection was refused; the text gives its address and the cause.
    """

    def __init__(
        self,
        loop: Loop,
        name: str,
        *,
        job: str,
        token: str,
        connect_s: float,
        addresses: Callable[[], tuple[str, ...]],
        peer: Callable[[str], Peer],
        opened: Callable[[Peer, Link, int], None],
        detached: Callable[[Peer], None],
        replaced: Callable[[Peer], None],
        failed: Callable[[Peer, str, LinkFailure], None],
        refused: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._name, self._job, self._token = name, job, token
        self._connect_s = connect_s
        self._addresses = addresses
        self._peer = peer
        self._opened, self._detached, self._replaced = opened, detached, replaced
        self._failed = failed
        self._refused = refused
        self._reported_s = float("-inf")  # when `refused` was last called
        self._unreported = 0  # connections refused since
        self._listeners: list[socket.socket] = []
        self._half_open: dict[Link, None] = {}  # accepted, not authenticated yet; the oldest first
        self._known_hosts: set[str] = set()
        self.sockets: set[socket.socket] = set()  # every socket of the node, for a forked child to close
        self._spare: socket.socket | None = None  # closed to accept a connection that is to be refused
        self._reserve_spare()

    def listen(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket."""
        sock.setblocking(False)
        self.sockets.add(sock)
        self._listeners.append(sock)
        self._loop.watch(sock, READ, partial(self._accept, sock))

    def dial(self, peer: Peer) -> None:
        """Start to dial a peer, unless a dial is in progress; an open session is dialled until it is lost."""
        if peer.dial is not None:
            return
        if peer.session.is_open:
            dial = peer.dial = Dial(inf)
        else:
            limit_s = max(self._connect_s, peer.silent_s or 0.0)
            dial = peer.dial = Dial(monotonic() + limit_s)
            self._loop.later(limit_s, partial(self._on_deadline, peer, dial))
        if peer.addresses:
            self._start_round(peer, dial)

    def stop_dialling(self, peer: Peer) -> None:
        """End the dial of a peer, which has a connection."""
        if peer.dial is not None:
            self._end_dial(peer, peer.dial)

    def introduced(self, peer: Peer) -> None:
        """Use addresses of a peer that became known: start the dial that waits for them, if there is one."""
        self._learn_hosts(peer)
        dial = peer.dial
        if dial is not None and dial.link is None and not dial.left:
            self._start_round(peer, dial)

    def freed(self, peer: Peer) -> bool:
        """Welcome a connection that waits for the peer's current one to end; return whether there was one."""
        while peer.link is None and peer.parked:
            self._welcome(peer, peer.parked.pop(0))
        return peer.link is not None

    def shut(self) -> None:
        """Stop listening and close half-open connections, but not the dials in progress."""
        self._release_spare()
        for sock in self._listeners:
            self._loop.unwatch(sock)
            self.sockets.discard(sock)
            sock.close()
        self._listeners.clear()
        for link in list(self._half_open):
            self.close(link)

    def abandon(self, peer: Peer) -> None:
        """Drop the dial and the waiting connections of a peer, without a message to it."""
        self.stop_dialling(peer)
        for link in peer.parked:
            self.close(link)
        peer.parked.clear()

    def close(self, link: Link) -> None:
        """Close a connection."""
        self._half_open.pop(link, None)
        sock, link.sock = link.sock, None
        if sock is not None:
            self._loop.unwatch(sock)
            self.sockets.discard(sock)
            sock.close()
        if link.borrowed is not None:
            link.borrowed.close()

    # Dialling

    def _start_round(self, peer: Peer, dial: Dial) -> None:
        """Try every address of the peer once."""
        if peer.dial is dial and dial.link is None:
            dial.left = list(peer.addresses)
            dial.hopeless = all(address.why_unusable() for address in dial.left)
            self._try_next(peer, dial)

    def _try_next(self, peer: Peer, dial: Dial) -> None:
        """Try the next address of the round; after the last one, start another round a little later."""
        while dial.left:
            address = dial.left.pop(0)
            why = address.why_unusable()
            if why is None:
                if address.needs_lookup:
                    look_up = partial(self._look_up, peer, dial, address)
                    name = f"{self._name} looks up {address.host}"
                    start_thread(name, look_up, partial(self._loop.call, _raise))
                    return
                why = self._connect(peer, dial, address)
                if why is None:
                    return
            dial.whys[address.text] = why
        if dial.starved_s is not None and monotonic() - dial.starved_s > STARVED_S:
            text = f"{self._name} cannot open a connection to {peer.name}: {next(iter(dial.whys.values()))}"
            self._fail(peer, dial, text, "no files")
        elif dial.hopeless:
            self._fail(peer, dial, self._cannot_reach(peer, dial), "unreachable")
        elif (peer.lasting or peer.session.is_open) and all(
            dial.whys.get(address.text) == REFUSED
            for address in peer.addresses
            if address.why_unusable() is None
        ):
            self._fail(peer, dial, f"nothing listens any more at {_listed(peer)}", "ended")
        else:
            self._loop.later(RETRY_S, partial(self._start_round, peer, dial))

    def _look_up(self, peer: Peer, dial: Dial, address: Address) -> None:
        """Look up a host's name, which blocks, in a thread of its own."""
        try:
            found: tuple[socket.AddressFamily, SocketAddress] | str = address.resolve()
        except OSError as error:
            found = _reason(error)
        self._loop.call(self._on_resolved, peer, dial, address, found)

    def _on_resolved(
        self,
        peer: Peer,
        dial: Dial,
        address: Address,
        found: tuple[socket.AddressFamily, SocketAddress] | str,
    ) -> None:
        if peer.dial is not dial:
            return
        why = found if isinstance(found, str) else self._connect(peer, dial, address, found)
        if why is not None:
            dial.whys[address.text] = why
            self._try_next(peer, dial)

    def _connect(
        self,
        peer: Peer,
        dial: Dial,
        address: Address,
        found: tuple[socket.AddressFamily, SocketAddress] | None = None,
    ) -> str | None:
        """Start to connect; return why that is impossible, or None."""
        try:
            family, where = found or address.resolve()
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if is_none_left(error):
                dial.starved_s = dial.starved_s or monotonic()
            return _reason(error)
        dial.starved_s = None
        self.sockets.add(sock)  # at once: another thread may fork while this one connects
        try:
            code = prepare(sock).connect_ex(where)
        except OSError as error:
            code = error.errno or errno.EINVAL
        if code not in (0, errno.EINPROGRESS):
            self.sockets.discard(sock)
            sock.close()
            return os.strerror(code).lower()
        link = dial.link = Link(sock, address.text)
        dial.spoken = False
        self._loop.watch(sock, WRITE, partial(self._on_connected, peer, dial, link))
        self._limit_attempt(peer, dial, link, CONNECT_ATTEMPT_S, "no answer")
        return None

    def _limit_attempt(self, peer: Peer, dial: Dial, link: Link, limit_s: float, why: str) -> None:
        """Limit an attempt in time, so that time is left for the peer's further addresses."""
        share_s = (dial.deadline_s - monotonic()) / (len(dial.left) + 1)
        if dial.left or limit_s < share_s:
            spoken = dial.spoken

            def give_up() -> None:
                if dial.spoken == spoken:
                    self._attempt_failed(peer, dial, link, why)

            self._loop.later(max(0.0, min(limit_s, share_s)), give_up)

    def _on_connected(self, peer: Peer, dial: Dial, link: Link, _: int) -> None:
        if link.sock is None or dial.spoken or peer.dial is not dial:
            return
        code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._attempt_failed(peer, dial, link, os.strerror(code).lower())
            return
        if peer.link is not None:
            self._detached(peer)
        if not peer.session.is_resumable:
            share(link)  # shared memory may be announced right behind the WELCOME
        link.greeting = Dialler(
            job=self._job,
            token=self._token,
            me=self._name,
            you=peer.name,
            addresses=self._addresses(),
            position=peer.session.position,
        )
        self._loop.rewatch(link.sock, READ, partial(self._on_acceptor_frame, peer, dial, link))
        dial.spoken = True
        self._limit_attempt(peer, dial, link, HANDSHAKE_ATTEMPT_S, "no answer to the handshake")
        self._send(link, link.greeting.hello())

    def _on_acceptor_frame(self, peer: Peer, dial: Dial, link: Link, _: int) -> None:
        """Process the acceptor's handshake frames."""
        greeting = link.greeting
        if link.sock is None or not isinstance(greeting, Dialler):
            return
        try:
            why = self._receive(link)
            if why is not None:
                self._attempt_failed(peer, dial, link, why)
                return
            while greeting.welcome is None and (frame := link.reader.next_frame()) is not None:
                self._send(link, greeting.receive(frame))
        except RefusedError as error:
            text = f"{peer.name} at {link.where} refused the connection: {error}"
            self._fail(peer, dial, text, "peer has no files" if error.has_no_files else "refused")
        except ProtocolError as error:
            dial.hopeless = True
            self._attempt_failed(peer, dial, link, str(error))
        else:
            if greeting.welcome is not None:
                self._on_welcome(peer, link, greeting.position.session, greeting.welcome)

    def _on_welcome(self, peer: Peer, link: Link, session: str, theirs: Position) -> None:
        """Use a connection whose acceptor resumed our session or, if it does not know it, began a new one."""
        peer.dial = None
        if peer.session.is_open and theirs.session != peer.session.theirs:
            self._replaced(peer)
            self.stop_dialling(peer)  # the report of the loss may have started a dial
            peer.session = Session(own=session)
        self._open(peer, link, theirs.session, theirs.received)

    def _attempt_failed(self, peer: Peer, dial: Dial, link: Link, why: str) -> None:
        """Try the next address, unless a connection that the peer dialled waits to be welcomed."""
        if peer.dial is not dial or dial.link is not link:
            return
        dial.whys[link.where] = why
        dial.link = None
        dial.spoken = False
        self.close(link)
        if peer.link is not None or not self.freed(peer):  # a silent connection is being replaced
            self._try_next(peer, dial)

    def _on_deadline(self, peer: Peer, dial: Dial) -> None:
        if peer.dial is not dial:
            return
        if dial.link is not None:
            dial.whys[dial.link.where] = "no answer to the handshake" if dial.spoken else "no answer"
        self._fail(peer, dial, self._cannot_reach(peer, dial), "unreachable")

    def _cannot_reach(self, peer: Peer, dial: Dial) -> str:
        if not peer.addresses:
            return (
                f"cannot reach {peer.name} within {self._connect_s:g} s: its address is not known, and "
                "it did not connect"
            )
        tried = "; ".join(
            f"at {address.text} within {self._connect_s:g} s: {dial.whys.get(address.text, 'not tried')}"
            for address in peer.addresses
        )
        return f"cannot reach {peer.name} {tried}"

    def _fail(self, peer: Peer, dial: Dial, text: str, failure: LinkFailure) -> None:
        if peer.dial is dial:
            self._end_dial(peer, dial)
            if peer.link is not None or not self.freed(peer):
                self._failed(peer, text, failure)

    def _end_dial(self, peer: Peer, dial: Dial) -> None:
        peer.dial = None
        if dial.link is not None:
            self.close(dial.link)

    # Accepting

    def _accept(self, listener: socket.socket, _: int) -> None:
        try:
            sock, where = listener.accept()
        except OSError as error:
            if is_none_left(error) and self._spare is not None:
                self._refuse_with_spare(listener, error)
            elif is_none_left(error) or error.errno in (errno.ENOBUFS, errno.ENOMEM):
                # It stays ready, and would keep the loop busy until there are descriptors again.
                self._loop.unwatch(listener)
                self._loop.later(NO_DESCRIPTORS_PAUSE_S, partial(self._accept_again, listener))
                self._refused(f"cannot accept connections for {NO_DESCRIPTORS_PAUSE_S:g} s: {_reason(error)}")
            return
        client = f"{where[0]}:{where[1]}" if isinstance(where, tuple) else "a Unix socket of this host"
        link = Link(sock, client)
        self.sockets.add(sock)
        link.host = where[0] if isinstance(where, tuple) else ""
        link.greeting = Acceptor(job=self._job, token=self._token, me=self._name)
        self._make_room()
        self._half_open[link] = None
        prepare(sock)
        self._loop.watch(sock, READ, partial(self._on_dialler_frame, link))
        self._loop.later(self._connect_s, partial(self._on_handshake_deadline, link))

    def _refuse_with_spare(self, listener: socket.socket, error: OSError) -> None:
        """Accept one connection with the spare descriptor, only to refuse it with the reason."""
        self._release_spare()
        with suppress(OSError):  # the client is gone, or another thread took the descriptor
            sock, _ = listener.accept()
            with sock:
                sock.setblocking(False)
                sock.send(refuse(_reason(error), has_no_files=True))
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
            if isinstance(link.greeting, Acceptor) and not link.greeting.is_of_this_job
        ]
        if len(silent) >= MAX_HALF_OPEN:
            strangers = [link for link in silent if link.host not in self._known_hosts]
            oldest = (strangers or silent)[0]
            self._report(
                f"closed a connection from {oldest.where}: it has not identified itself, and neither have "
                f"{MAX_HALF_OPEN} others, the most allowed"
            )
            self.close(oldest)

    def _learn_hosts(self, peer: Peer) -> None:
        self._known_hosts.update(address.host for address in peer.addresses if address.host)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._reserve_spare()
            self._loop.watch(listener, READ, partial(self._accept, listener))

    def _on_handshake_deadline(self, link: Link) -> None:
        if link in self._half_open:  # the client may be slow and try again: so no REFUSE is sent
            line = f"it did not authenticate within {self._connect_s:g} s"
            self._report(f"closed a connection from {link.where}: {line}")
            self.close(link)

    def _on_dialler_frame(self, link: Link, _: int) -> None:
        """Process the dialler's handshake frames."""
        greeting = link.greeting
        if link.sock is None or not isinstance(greeting, Acceptor):
            return
        try:
            if self._receive(link) is not None:
                if greeting.peer is None and link.reader.partial:
                    raise ProtocolError("it ended in the middle of a frame")
                self.close(link)  # the dialler has dropped it, or has a better connection by now
                return
            while link.sock is not None and (frame := link.reader.next_frame()) is not None:
                self._send(link, greeting.receive(frame))
        except ProtocolError as error:
            self._refuse(link, str(error))
            return
        if greeting.peer is not None and link in self._half_open:
            self._half_open.pop(link, None)
            self._on_authenticated(self._peer(greeting.peer), link, greeting)

    def _on_authenticated(self, peer: Peer, link: Link, greeting: Acceptor) -> None:
        """Welcome an authenticated peer, or park it while another connection has precedence."""
        dial = peer.dial
        goes_first = self._name < peer.name and dial is not None and dial.spoken
        is_same = peer.session.is_resumable and greeting.position.session == peer.session.theirs
        if peer.link is not None and is_same and not goes_first:
            self._detached(peer)
        if not peer.addresses:
            with suppress(ValueError):  # a malformed address cannot be dialled
                peer.addresses = tuple(map(parse, greeting.addresses))
                self._learn_hosts(peer)
        if peer.link is None and not goes_first:
            self._welcome(peer, link)
        else:
            peer.parked = [other for other in peer.parked if other.sock is not None]
            peer.parked.append(link)
            self._loop.later(self._connect_s / 2, partial(self._on_parked_deadline, peer, link))

    def _on_parked_deadline(self, peer: Peer, link: Link) -> None:
        if link in peer.parked:
            peer.parked.remove(link)
            if link.sock is not None:
                self._refuse(link, f"{self._name} already has a connection to {peer.name}")

    def _welcome(self, peer: Peer, link: Link) -> None:
        greeting = link.greeting
        if link.sock is None or not isinstance(greeting, Acceptor):
            return
        theirs, session = greeting.position, peer.session
        is_same = theirs.session == session.theirs and theirs.peer_session in ("", session.own)
        if session.is_open and not is_same:
            self._replaced(peer)
        self.stop_dialling(peer)
        self._send(link, greeting.welcome(peer.session.position))
        self._open(peer, link, theirs.session, theirs.received if is_same else 0)

    def _refuse(self, link: Link, line: str) -> None:
        self._send(link, refuse(line))
        self.close(link)
        self._report(f"refused a connection from {link.where}: {line}")

    def _report(self, line: str) -> None:
        """Report a refused connection, at most once a second."""
        now_s = monotonic()
        if now_s - self._reported_s < REFUSALS_PAUSE_S:
            self._unreported += 1
            return
        more = f" ({self._unreported} more before it)" if self._unreported else ""
        self._reported_s, self._unreported = now_s, 0
        self._refused(line + more)

    # Both

    def _open(self, peer: Peer, link: Link, theirs: str, received: int) -> None:
        assert link.sock is not None
        link.greeting = None
        session = peer.session
        if not session.is_open:
            session.theirs = theirs
            session.is_resumable = link.sock.family != socket.AF_UNIX
        self._opened(peer, link, received)

    def _send(self, link: Link, frame: bytes) -> None:
        """Send a handshake frame. The socket's buffer holds all of them; if it does not, the connection is
        broken and the next receive reports it."""
        if frame and link.sock is not None:
            with suppress(OSError):
                if link.sock.send(frame) < len(frame):
                    link.sock.shutdown(socket.SHUT_RDWR)

    def _receive(self, link: Link) -> str | None:
        """Receive available bytes; return why no more can come, or None."""
        try:
            n = receive(link)
        except BlockingIOError:
            return None
        except OSError as error:
            return _reason(error)
        link.reader.received(n)
        return None if n else "the connection was closed during the handshake"


def _listed(peer: Peer) -> str:
    return " and ".join(address.text for address in peer.addresses)


def _raise(error: BaseException) -> None:
    """Raise the failure of a look-up thread in the I/O thread, which ends the endpoint."""
    raise error


def _reason(error: OSError) -> str:
    if is_none_left(error):
        return explain(error)
    return (error.strerror or str(error)).lower()
