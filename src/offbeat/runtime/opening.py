"""How connections come to be: listening, dialling, the handshake, and which of two simultaneous dials
survives.

When two nodes dial each other at once, the connection that the smaller name dialled survives: the smaller one
lets the other's dial wait, unwelcomed, while its own may still succeed; the larger one drops its own when it
welcomes the smaller's. No data flows before WELCOME, so none is lost.

This module never lets a stranger hold up the node: half-open connections are few, small and have a deadline.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic

from offbeat.errors import ProtocolError
from offbeat.runtime.addresses import Address, SocketAddress
from offbeat.runtime.connections import Dial, Link, Peer, prepare, receive, share
from offbeat.runtime.handshake import Acceptor, Dialler, RefusedError, refuse
from offbeat.runtime.loop import READ, WRITE, Loop

MAX_HALF_OPEN = 64
RETRY_S = 0.1
NO_DESCRIPTORS_PAUSE_S = 1.0
REFUSED = os.strerror(errno.ECONNREFUSED).lower()


class Opening:
    """Opens connections for an endpoint; everything here runs in the loop's thread.

    Args:
        peer: returns the peer of a name.
        opened: a connection is ready for the peer, which has none; unread bytes may be in its reader.
        failed: the peer cannot be reached; the text says why.
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
        peer: Callable[[str], Peer],
        opened: Callable[[Peer, Link], None],
        failed: Callable[[Peer, str], None],
        refused: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._name, self._job, self._token = name, job, token
        self._connect_s = connect_s
        self._peer = peer
        self._opened = opened
        self._failed = failed
        self._refused = refused
        self._listeners: list[socket.socket] = []
        self._half_open: set[Link] = set()  # accepted, and not proved yet
        self.sockets: set[socket.socket] = set()  # every socket of the node, for a forked child to close

    def listen(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket."""
        sock.setblocking(False)
        self.sockets.add(sock)
        self._listeners.append(sock)
        self._loop.watch(sock, READ, partial(self._accept, sock))

    def dial(self, peer: Peer) -> None:
        """Begin to reach a peer, unless that is under way."""
        if peer.dial is not None:
            return
        dial = peer.dial = Dial(monotonic() + self._connect_s)
        self._loop.later(self._connect_s, partial(self._out_of_time, peer, dial))
        if peer.addresses:
            self._round(peer, dial)

    def introduced(self, peer: Peer) -> None:
        """The peer's addresses are known now: go on if that is what a dial waits for."""
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
        for sock in self._listeners:
            self._loop.unwatch(sock)
            self.sockets.discard(sock)
            sock.close()
        self._listeners.clear()
        for link in list(self._half_open):
            self.close(link)

    def abandon(self, peer: Peer) -> None:
        """Give up the dial and the waiting connections of a peer, without a word."""
        if peer.dial is not None:
            self._end_dial(peer, peer.dial)
        for link in peer.parked:
            self.close(link)
        peer.parked.clear()

    def close(self, link: Link) -> None:
        """Close a connection."""
        self._half_open.discard(link)
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
                    threading.Thread(
                        target=look_up, name=f"{self._name} looks up {address.host}", daemon=True
                    ).start()
                    return
                why = self._connect(peer, dial, address)
                if why is None:
                    return
            dial.whys[address.text] = why
        if dial.hopeless:
            self._fail(peer, dial, self._cannot_reach(peer, dial))
        elif peer.lasting and all(
            dial.whys.get(address.text) == REFUSED
            for address in peer.addresses
            if address.why_unusable() is None
        ):
            self._fail(peer, dial, f"nobody listens any more at {_listed(peer)}")
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
            return _why(error)
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
        share(link)  # memory may be lent right behind the WELCOME
        dial.spoken = False
        link.greeting = Dialler(job=self._job, token=self._token, me=self._name, you=peer.name)
        self._loop.watch(sock, WRITE, partial(self._connected, peer, dial, link))
        if dial.left:  # leave time for the addresses that are still to be tried
            share_s = (dial.deadline_s - monotonic()) / (len(dial.left) + 1)
            slow = "no answer"
            self._loop.later(max(0.0, share_s), partial(self._attempt_failed, peer, dial, link, slow))
        return None

    def _connected(self, peer: Peer, dial: Dial, link: Link, _: int) -> None:
        if link.sock is None or not isinstance(link.greeting, Dialler):
            return
        code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._attempt_failed(peer, dial, link, os.strerror(code).lower())
            return
        self._loop.rewatch(link.sock, READ, partial(self._greeted, peer, dial, link))
        dial.spoken = True
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
            while not greeting.welcome and (frame := link.reader.next_frame()) is not None:
                self._say(link, greeting.receive(frame))
        except RefusedError as error:
            self._fail(peer, dial, f"{peer.name} at {link.where} refused the connection: {error}")
        except ProtocolError as error:
            dial.hopeless = True
            self._attempt_failed(peer, dial, link, str(error))
        else:
            if greeting.welcome:
                peer.dial = None
                self._open(peer, link)

    def _attempt_failed(self, peer: Peer, dial: Dial, link: Link, why: str) -> None:
        """Go on to the next address, unless the peer's own dial waits to be let in."""
        if peer.dial is not dial or dial.link is not link:
            return
        dial.whys[link.where] = why
        dial.link = None
        dial.spoken = False
        self.close(link)
        if not self.freed(peer):
            self._next(peer, dial)

    def _out_of_time(self, peer: Peer, dial: Dial) -> None:
        if peer.dial is not dial:
            return
        if dial.link is not None:
            dial.whys[dial.link.where] = "no answer to the handshake" if dial.spoken else "no answer"
        self._fail(peer, dial, self._cannot_reach(peer, dial))

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

    def _fail(self, peer: Peer, dial: Dial, text: str) -> None:
        if peer.dial is dial:
            self._end_dial(peer, dial)
            if not self.freed(peer):
                self._failed(peer, text)

    def _end_dial(self, peer: Peer, dial: Dial) -> None:
        peer.dial = None
        if dial.link is not None:
            self.close(dial.link)

    # Accepting

    def _accept(self, listener: socket.socket, _: int) -> None:
        try:
            sock, where = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # It stays ready, and would keep the loop busy until there are descriptors again.
                self._loop.unwatch(listener)
                self._loop.later(NO_DESCRIPTORS_PAUSE_S, partial(self._accept_again, listener))
                self._refused(f"cannot accept connections for {NO_DESCRIPTORS_PAUSE_S:g} s: {_why(error)}")
            return
        from_ = f"{where[0]}:{where[1]}" if isinstance(where, tuple) else "a Unix socket of this host"
        link = Link(sock, from_)
        self.sockets.add(sock)
        if len(self._half_open) >= MAX_HALF_OPEN:
            self._refuse(
                link, f"{MAX_HALF_OPEN} others have not yet said who they are, which is the most allowed"
            )
            return
        link.greeting = Acceptor(job=self._job, token=self._token, me=self._name)
        self._half_open.add(link)
        prepare(sock)
        self._loop.watch(sock, READ, partial(self._asked, link))
        self._loop.later(self._connect_s, partial(self._unproved, link))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.watch(listener, READ, partial(self._accept, listener))

    def _unproved(self, link: Link) -> None:
        if link in self._half_open:
            self._refuse(link, f"it has not proved who it is within {self._connect_s:g} s")

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
            self._half_open.discard(link)
            self._settle(self._peer(greeting.peer), link)

    def _settle(self, peer: Peer, link: Link) -> None:
        """Somebody has proved who it is: let it in, or let it wait for the connection that goes before."""
        dial = peer.dial
        if peer.link is None and not (self._name < peer.name and dial is not None and dial.spoken):
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
        if peer.dial is not None:
            self._end_dial(peer, peer.dial)
        self._say(link, greeting.welcome())
        self._open(peer, link)

    def _refuse(self, link: Link, line: str) -> None:
        self._say(link, refuse(line))
        self.close(link)
        self._refused(f"refused a connection from {link.where}: {line}")

    # Both

    def _open(self, peer: Peer, link: Link) -> None:
        link.greeting = None
        self._opened(peer, link)

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


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
