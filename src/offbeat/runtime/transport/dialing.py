"""How connections come to be: listening, dialling, the handshake, and which of two simultaneous dials
survives.

When two nodes dial each other at once, the connection that the smaller name dialled survives: the smaller one
lets the other's dial wait, unwelcomed, while its own may still succeed; the larger one drops its own when it
welcomes the smaller's. No data flows before WELCOME, so none is lost.

A session outlives its connections. Its next connection is dialled like the first one, by either side, and
says in HELLO and WELCOME how many frames have come so far. A node gives its old connection up before it says
that, so the number holds: the dialler when the new connection is there, the acceptor when it welcomes. A
HELLO of the process at the other end of the current connection means that this process has given that one up.
Where the peer does not know the session any more, the old one is over and a new one begins.

This module never lets a stranger hold up the node: half-open connections are small and have a deadline, and
of those that have not said which job they belong to there are few. Where one more comes, the oldest of them
is closed, one from another host than those of known peers first. So silent strangers take nobody's place.

It never leaves a peer to guess that this process can open no more files: one descriptor is kept with which a
connection is accepted to be refused in words, and a dial for which there is none fails in words of its own.
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
# An address that does not answer is dialled again after so long: the kernel's own attempts become rare, and
# a line that is mended between two of them would stand idle.
CONNECT_ATTEMPT_S = 1.0
HANDSHAKE_ATTEMPT_S = 4.0
REFUSALS_PAUSE_S = 1.0  # between two lines about refused connections
NO_DESCRIPTORS_PAUSE_S = 1.0
STARVED_S = 3.0  # for which a node that dials may be unable to open anything: what is short may pass
REFUSED = os.strerror(errno.ECONNREFUSED).lower()


class Opening:
    """Opens connections for an endpoint; everything here runs in the loop's thread.

    Args:
        addresses: returns where this node listens.
        peer: returns the peer of a name.
        opened: a connection is ready for the peer, which has none, and which has received so many frames of
            the session; unread bytes may be in its reader.
        detached: the peer's connection is given up for another one of the same session.
        replaced: the peer does not know the session any more.
        failed: the peer cannot be reached; the text says why, the failure of what kind that is.
        refused: a connection was refused; the text says whose and why.
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
        self._refused_s = float("-inf")  # when that was last called
        self._unreported = 0  # connections that were refused since
        self._listeners: list[socket.socket] = []
        self._half_open: dict[Link, None] = {}  # accepted, and not proved yet; the oldest first
        self._known_hosts: set[str] = set()
        self.sockets: set[socket.socket] = set()  # every socket of the node, for a forked child to close
        self._spare: socket.socket | None = None  # kept for a connection that is to be refused
        self._keep_spare()

    def listen(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket."""
        sock.setblocking(False)
        self.sockets.add(sock)
        self._listeners.append(sock)
        self._loop.watch(sock, READ, partial(self._accept, sock))

    def dial(self, peer: Peer) -> None:
        """Begin to reach a peer, unless that is under way; an open session is dialled until it is lost."""
        if peer.dial is not None:
            return
        if peer.session.is_open:
            dial = peer.dial = Dial(inf)
        else:
            limit_s = max(self._connect_s, peer.silent_s or 0.0)
            dial = peer.dial = Dial(monotonic() + limit_s)
            self._loop.later(limit_s, partial(self._out_of_time, peer, dial))
        if peer.addresses:
            self._round(peer, dial)

    def stop_dialling(self, peer: Peer) -> None:
        """End the dial of a peer that has a connection after all."""
        if peer.dial is not None:
            self._end_dial(peer, peer.dial)

    def introduced(self, peer: Peer) -> None:
        """The peer's addresses are known now: go on if that is what a dial waits for."""
        self._know(peer)
        dial = peer.dial
        if dial is not None and dial.link is None and not dial.left:
            self._round(peer, dial)

    def freed(self, peer: Peer) -> bool:
        """Let in who waits for the peer's connection to end; return whether there was one."""
        while peer.link is None and peer.parked:
            self._welcome(peer, peer.parked.pop(0))
        return peer.link is not None

    def shut(self) -> None:
        """Stop listening and close what is half-open, but not the dials under way."""
        self._give_up_spare()
        for sock in self._listeners:
            self._loop.unwatch(sock)
            self.sockets.discard(sock)
            sock.close()
        self._listeners.clear()
        for link in list(self._half_open):
            self.close(link)

    def abandon(self, peer: Peer) -> None:
        """Give up the dial and the waiting connections of a peer, without a word."""
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

    def _round(self, peer: Peer, dial: Dial) -> None:
        """Try every address of the peer once."""
        if peer.dial is dial and dial.link is None:
            dial.left = list(peer.addresses)
            dial.hopeless = all(address.why_unusable() for address in dial.left)
            self._next(peer, dial)

    def _next(self, peer: Peer, dial: Dial) -> None:
        """Try the next address of the round; after the last, begin anew a little later."""
        while dial.left:
            address = dial.left.pop(0)
            why = address.why_unusable()
            if why is None:
                if address.needs_lookup:
                    look_up = partial(self._look_up, peer, dial, address)
                    name = f"{self._name} looks up {address.host}"
                    start_thread(name, look_up, partial(self._loop.call, _fail_with))
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
            self._fail(peer, dial, f"nobody listens any more at {_listed(peer)}", "ended")
        else:
            self._loop.later(RETRY_S, partial(self._round, peer, dial))

    def _look_up(self, peer: Peer, dial: Dial, address: Address) -> None:
        """Look up a host's name in a thread of its own, for it blocks."""
        try:
            found: tuple[socket.AddressFamily, SocketAddress] | str = address.resolve()
        except OSError as error:
            found = _why(error)
        self._loop.call(self._looked_up, peer, dial, address, found)

    def _looked_up(
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
            self._next(peer, dial)

    def _connect(
        self,
        peer: Peer,
        dial: Dial,
        address: Address,
        found: tuple[socket.AddressFamily, SocketAddress] | None = None,
    ) -> str | None:
        """Begin to connect; return why that is impossible, or None."""
        try:
            family, where = found or address.resolve()
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if is_none_left(error):
                dial.starved_s = dial.starved_s or monotonic()
            return _why(error)
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
        self._loop.watch(sock, WRITE, partial(self._connected, peer, dial, link))
        self._limit(peer, dial, link, CONNECT_ATTEMPT_S, "no answer")
        return None

    def _limit(self, peer: Peer, dial: Dial, link: Link, limit_s: float, why: str) -> None:
        """Go on to the next address if this one does not answer in time, and leave time for the others."""
        share_s = (dial.deadline_s - monotonic()) / (len(dial.left) + 1)
        if dial.left or limit_s < share_s:
            spoken = dial.spoken

            def give_up() -> None:
                if dial.spoken == spoken:
                    self._attempt_failed(peer, dial, link, why)

            self._loop.later(max(0.0, min(limit_s, share_s)), give_up)

    def _connected(self, peer: Peer, dial: Dial, link: Link, _: int) -> None:
        if link.sock is None or dial.spoken or peer.dial is not dial:
            return
        code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._attempt_failed(peer, dial, link, os.strerror(code).lower())
            return
        if peer.link is not None:
            self._detached(peer)
        if not peer.session.is_resumable:
            share(link)  # memory may be lent right behind the WELCOME
        link.greeting = Dialler(
            job=self._job,
            token=self._token,
            me=self._name,
            you=peer.name,
            addresses=self._addresses(),
            position=peer.session.position,
        )
        self._loop.rewatch(link.sock, READ, partial(self._greeted, peer, dial, link))
        dial.spoken = True
        self._limit(peer, dial, link, HANDSHAKE_ATTEMPT_S, "no answer to the handshake")
        self._say(link, link.greeting.hello())

    def _greeted(self, peer: Peer, dial: Dial, link: Link, _: int) -> None:
        """Take the other side's answers to our dial."""
        greeting = link.greeting
        if link.sock is None or not isinstance(greeting, Dialler):
            return
        try:
            why = self._receive(link)
            if why is not None:
                self._attempt_failed(peer, dial, link, why)
                return
            while greeting.welcome is None and (frame := link.reader.next_frame()) is not None:
                self._say(link, greeting.receive(frame))
        except RefusedError as error:
            text = f"{peer.name} at {link.where} refused the connection: {error}"
            self._fail(peer, dial, text, "peer has no files" if error.has_no_files else "refused")
        except ProtocolError as error:
            dial.hopeless = True
            self._attempt_failed(peer, dial, link, str(error))
        else:
            if greeting.welcome is not None:
                self._welcomed(peer, link, greeting.position.session, greeting.welcome)

    def _welcomed(self, peer: Peer, link: Link, session: str, theirs: Position) -> None:
        """The other side goes on with the session that we have named or, if it lacks it, begins a new one."""
        peer.dial = None
        if peer.session.is_open and theirs.session != peer.session.theirs:
            self._replaced(peer)
            self.stop_dialling(peer)  # what was said of the loss may have begun a dial
            peer.session = Session(own=session)
        self._open(peer, link, theirs.session, theirs.received)

    def _attempt_failed(self, peer: Peer, dial: Dial, link: Link, why: str) -> None:
        """Go on to the next address, unless the peer's own dial waits to be let in."""
        if peer.dial is not dial or dial.link is not link:
            return
        dial.whys[link.where] = why
        dial.link = None
        dial.spoken = False
        self.close(link)
        if peer.link is not None or not self.freed(peer):  # a connection that is silent is being replaced
            self._next(peer, dial)

    def _out_of_time(self, peer: Peer, dial: Dial) -> None:
        if peer.dial is not dial:
            return
        if dial.link is not None:
            dial.whys[dial.link.where] = "no answer to the handshake" if dial.spoken else "no answer"
        self._fail(peer, dial, self._cannot_reach(peer, dial), "unreachable")

    def _cannot_reach(self, peer: Peer, dial: Dial) -> str:
        if not peer.addresses:
            return (
                f"cannot reach {peer.name} within {self._connect_s:g} s: nobody has said where it is, and "
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
                self._turn_away(listener, error)
            elif is_none_left(error) or error.errno in (errno.ENOBUFS, errno.ENOMEM):
                # It stays ready, and would keep the loop busy until there are descriptors again.
                self._loop.unwatch(listener)
                self._loop.later(NO_DESCRIPTORS_PAUSE_S, partial(self._accept_again, listener))
                self._refused(f"cannot accept connections for {NO_DESCRIPTORS_PAUSE_S:g} s: {_why(error)}")
            return
        from_ = f"{where[0]}:{where[1]}" if isinstance(where, tuple) else "a Unix socket of this host"
        link = Link(sock, from_)
        self.sockets.add(sock)
        link.host = where[0] if isinstance(where, tuple) else ""
        link.greeting = Acceptor(job=self._job, token=self._token, me=self._name)
        self._make_room()
        self._half_open[link] = None
        prepare(sock)
        self._loop.watch(sock, READ, partial(self._asked, link))
        self._loop.later(self._connect_s, partial(self._unproved, link))

    def _turn_away(self, listener: socket.socket, error: OSError) -> None:
        """Refuse a connection, in words, for which only the descriptor is left that is kept for this."""
        self._give_up_spare()
        with suppress(OSError):  # it has gone, or another thread has the descriptor
            sock, _ = listener.accept()
            with sock:
                sock.setblocking(False)
                sock.send(refuse(_why(error), has_no_files=True))
        self._report(f"refused a connection: {_why(error)}")
        self._keep_spare()

    def _keep_spare(self) -> None:
        """Have a descriptor with which to refuse a connection; it is a socket, as all that is kept is."""
        if self._spare is not None:
            return
        with suppress(OSError):
            self._spare = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.sockets.add(self._spare)

    def _give_up_spare(self) -> None:
        if self._spare is not None:
            self.sockets.discard(self._spare)
            self._spare.close()
            self._spare = None

    def _make_room(self) -> None:
        """Close the oldest half-open connection of a stranger, if there are too many."""
        silent = [
            link
            for link in self._half_open
            if isinstance(link.greeting, Acceptor) and not link.greeting.is_of_this_job
        ]
        if len(silent) >= MAX_HALF_OPEN:
            strangers = [link for link in silent if link.host not in self._known_hosts]
            oldest = (strangers or silent)[0]
            self._report(
                f"closed a connection from {oldest.where}: {MAX_HALF_OPEN} others have not yet said who they "
                "are either, which is the most allowed"
            )
            self.close(oldest)

    def _know(self, peer: Peer) -> None:
        self._known_hosts.update(address.host for address in peer.addresses if address.host)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._keep_spare()
            self._loop.watch(listener, READ, partial(self._accept, listener))

    def _unproved(self, link: Link) -> None:
        if link in self._half_open:  # it may be held up, and try again: so it is not told that it is refused
            line = f"it has not proved who it is within {self._connect_s:g} s"
            self._report(f"closed a connection from {link.where}: {line}")
            self.close(link)

    def _asked(self, link: Link, _: int) -> None:
        """Take what somebody says who dialled us."""
        greeting = link.greeting
        if link.sock is None or not isinstance(greeting, Acceptor):
            return
        try:
            if self._receive(link) is not None:
                if greeting.peer is None and link.reader.partial:
                    raise ProtocolError("it ended in the middle of a frame")
                self.close(link)  # changed its mind, or has a better connection by now
                return
            while link.sock is not None and (frame := link.reader.next_frame()) is not None:
                self._say(link, greeting.receive(frame))
        except ProtocolError as error:
            self._refuse(link, str(error))
            return
        if greeting.peer is not None and link in self._half_open:
            self._half_open.pop(link, None)
            self._settle(self._peer(greeting.peer), link, greeting)

    def _settle(self, peer: Peer, link: Link, greeting: Acceptor) -> None:
        """Somebody has proved who it is: let it in, or let it wait for the connection that goes before."""
        dial = peer.dial
        goes_first = self._name < peer.name and dial is not None and dial.spoken
        is_same = peer.session.is_resumable and greeting.position.session == peer.session.theirs
        if peer.link is not None and is_same and not goes_first:
            self._detached(peer)
        if not peer.addresses:
            with suppress(ValueError):  # of an address that makes no sense nothing can be dialled
                peer.addresses = tuple(map(parse, greeting.addresses))
                self._know(peer)
        if peer.link is None and not goes_first:
            self._welcome(peer, link)
        else:
            peer.parked = [other for other in peer.parked if other.sock is not None]
            peer.parked.append(link)
            self._loop.later(self._connect_s / 2, partial(self._waited, peer, link))

    def _waited(self, peer: Peer, link: Link) -> None:
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
        self._say(link, greeting.welcome(peer.session.position))
        self._open(peer, link, theirs.session, theirs.received if is_same else 0)

    def _refuse(self, link: Link, line: str) -> None:
        self._say(link, refuse(line))
        self.close(link)
        self._report(f"refused a connection from {link.where}: {line}")

    def _report(self, line: str) -> None:
        """Say that a connection was refused, at most once a second."""
        now_s = monotonic()
        if now_s - self._refused_s < REFUSALS_PAUSE_S:
            self._unreported += 1
            return
        more = f" ({self._unreported} more before it)" if self._unreported else ""
        self._refused_s, self._unreported = now_s, 0
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

    def _say(self, link: Link, frame: bytes) -> None:
        """Send a handshake frame. The socket's buffer holds them all; if it cannot, the connection is broken
        and the next receive says so."""
        if frame and link.sock is not None:
            with suppress(OSError):
                if link.sock.send(frame) < len(frame):
                    link.sock.shutdown(socket.SHUT_RDWR)

    def _receive(self, link: Link) -> str | None:
        """Receive what has come; return why nothing more will come, or None."""
        try:
            n = receive(link)
        except BlockingIOError:
            return None
        except OSError as error:
            return _why(error)
        link.reader.received(n)
        return None if n else "the connection was closed during the handshake"


def _listed(peer: Peer) -> str:
    return " and ".join(address.text for address in peer.addresses)


def _fail_with(error: BaseException) -> None:
    """Ends the links, in their thread, with what a look-up has died of."""
    raise error


def _why(error: OSError) -> str:
    if is_none_left(error):
        return explain(error)
    return (error.strerror or str(error)).lower()
