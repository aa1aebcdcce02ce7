"""The links of one node: one session per peer, one thread, one order of urgency for all that goes out.

Control messages and the bytes of tensors go to peers by name. A connection is opened on first use, by
whichever side needs it. What is urgent overtakes what is in flight: messages are cut into frames, and the
most urgent frame of the whole node goes next to whoever can take it. A peer that dies, falls silent or breaks
the protocol is reported by name.

A session outlives its TCP connections: a pause of the network is not a death. One rule says what is:

- A connection that breaks is dialled again at once, and the session goes on without loss or repetition
  (see `offbeat.runtime.opening` and `Outbox`).
- A connection on which nothing has come for REDIAL_S is replaced: the kernel sends again ever more rarely,
  and would find a mended line late.
- A peer of which nothing has come for `unreachable_s` is reported as unreachable. That changes nothing here.
- A peer is lost if all its addresses refuse connections, since then its process has ended; if another
  process, or one that has given the session up, answers in its place; or if nothing has come from it for
  `silent_s`, counted in ticks of this node over all connections.

A Unix socket joins two processes on one host and no network can break it: where one breaks, its other end is
lost.

All state belongs to the I/O thread; the public methods hand their work over, or do it at once when they are
called from that thread (from inside a callback), which costs no lock and no system call.

Between nodes on one host, bytes in memory of `Endpoint.allocate` are not sent: the peer is told where they
lie.

This module never imports torch or numpy, never copies tensor bytes that come on time, never unpickles, and
never waits for a peer without a deadline.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from itertools import count
from time import monotonic
from typing import Any

from offbeat.errors import LinkError, LinkFailure, OffbeatError, ProtocolError, explain
from offbeat.runtime.processes.waiting import Flag
from offbeat.runtime.transport import addresses as places
from offbeat.runtime.transport.connections import (
    TCP_FRAME_BYTES,
    Link,
    Peer,
    Session,
    receive,
    share,
    tune,
    wake_at,
    wake_late,
)
from offbeat.runtime.transport.descriptors import is_none_left
from offbeat.runtime.transport.dialing import Opening
from offbeat.runtime.transport.framing import MAX_MESSAGE_BYTES, NUMBERED, Frame, Kind, place_of
from offbeat.runtime.transport.handshake import check_name
from offbeat.runtime.transport.inbox import (
    MAX_EARLY_BYTES,
    MAX_FORGOTTEN_RANGES,
    Inbox,
    OnData,
    OnShared,
    Ranges,
)
from offbeat.runtime.transport.io_loop import READ, WRITE, Loop
from offbeat.runtime.transport.outbox import Key, Outbox, Outgoing
from offbeat.runtime.transport.shared_memory import (
    MAX_UNREAD_BYTES,
    MIN_SHARED_BYTES,
    UNREAD_BYTES,
    Region,
    Regions,
)

ALL_TAGS = 1 << 64
WRITES_A_TURN = 16  # then what has come is looked at again
STRETCH_S = 300e-6  # for which what has come is acted on before what comes of it is sent
REDIAL_S = 2.0
UNREACHABLE_S = 1.25
# What has come is acknowledged after so much of it, and at the end of every tensor message, for which a
# sender may wait; the rest with the next tick.
ACK_BYTES = 4 * 1024 * 1024
ACK_FRAMES = 64
HAND_OVER_S = 10.0  # how long the I/O thread may be busy before a caller that waits for it gives up

_DATA, _MESSAGE, _BEAT, _BYE = int(Kind.DATA), int(Kind.MESSAGE), int(Kind.BEAT), int(Kind.BYE)
_REGION, _SHARED, _TAKEN, _WITHDRAW = (
    int(kind) for kind in (Kind.REGION, Kind.SHARED, Kind.TAKEN, Kind.WITHDRAW)
)
_ACK, _SKIP = int(Kind.ACK), int(Kind.SKIP)
_NOTHING = memoryview(bytearray())
_log = logging.getLogger("offbeat.links")


class Endpoint:
    """All links of one node.

    Callbacks run in the I/O thread, one at a time, with no lock held. They may call every method but `flush`,
    and must not block. A ProtocolError that one raises means that the peer sent something impossible: the
    peer is lost. Any other exception ends the links: it goes to `on_error`, or else leaves the thread, and
    every later call raises LinkError.

    Args:
        name: by which the peers know this node; unique in the job.
        job: its id; only nodes of one job talk to each other.
        token: the job's shared secret; it never travels.
        on_message: (peer, payload) of a control message.
        on_lost: a peer died, was refused, fell silent or cannot be reached; not called for an orderly leave.
        on_unreachable: (peer, cause): nothing has come from a peer for `unreachable_s`, on a connection or
            while it was dialled.
        on_reachable: something has come again from a peer of which that was said.
        on_left: a peer has said goodbye; nothing more will come from it. What came before is still delivered.
        on_refused: one line about a connection that was refused; by default it is logged as a warning.
        on_error: an exception that ended the I/O thread.
        host: the address to listen on with TCP, and to tell others; None for no TCP.
        port: to listen on; 0 for any free one.
        unix: also listen on a Unix socket, for peers on this host (Linux).
        listeners: sockets that listen already, with their addresses, in place of `host`, `port` and `unix`.
        beat_s: how often something is sent at least.
        silent_s: a peer from whom nothing came for so long is lost.
        unreachable_s: a peer from whom nothing came for so long is said to be unreachable.
        connect_s: how long reaching a peer for the first time may take, retries and handshake included.
        spins: see `Loop`.
        unread_bytes: how much of memory of `allocate` a peer may be told of that it has not read, at most
            8 MiB.

    Attributes:
        addresses: where this node can be reached, best first; None of it holds after `close`.
        bytes_sent, bytes_received: over all connections since the start, headers included; what peers read of
            each other's memory is not.
        frames_received: control messages and pieces of tensors since the start.

    Raises:
        ValueError: an argument makes no sense.
        OffbeatError: it is impossible to listen there, or to open anything; says why.
    """

    def __init__(
        self,
        name: str,
        *,
        job: str,
        token: str,
        on_message: Callable[[str, bytes], None],
        on_lost: Callable[[LinkError], None],
        on_left: Callable[[str], None] | None = None,
        on_unreachable: Callable[[str, str], None] = lambda peer, cause: None,
        on_reachable: Callable[[str], None] = lambda peer: None,
        on_refused: Callable[[str], None] = _log.warning,
        on_error: Callable[[BaseException], None] | None = None,
        host: str | None = "127.0.0.1",
        port: int = 0,
        unix: bool = True,
        listeners: Sequence[tuple[socket.socket, str]] | None = None,
        beat_s: float = 0.25,
        silent_s: float = 10.0,
        unreachable_s: float = UNREACHABLE_S,
        connect_s: float = 10.0,
        spins: bool = False,
        unread_bytes: int = UNREAD_BYTES,
    ) -> None:
        if not token:
            raise ValueError("expected a token, got an empty one")
        if not 0 < 2 * beat_s < silent_s:
            raise ValueError(
                f"expected beat_s > 0 and silent_s > 2 beat_s, got {beat_s:g} s and {silent_s:g} s"
            )
        if connect_s <= 0:
            raise ValueError(f"expected connect_s > 0, got {connect_s:g} s")
        if not 0 < unread_bytes <= MAX_UNREAD_BYTES:
            raise ValueError(f"expected 1 to {MAX_UNREAD_BYTES} unread bytes, got {unread_bytes}")
        self.name = check_name(name)
        self.bytes_sent = self.bytes_received = self.frames_received = 0
        self._on_message, self._on_lost, self._on_left, self._on_error = (
            on_message,
            on_lost,
            on_left,
            on_error,
        )
        self._on_unreachable, self._on_reachable = on_unreachable, on_reachable
        self._beat_s, self._silent_s, self._unread_bytes = beat_s, silent_s, unread_bytes
        self._unreachable_s = unreachable_s
        self._peers: dict[str, Peer] = {}
        self._forgotten = Ranges()
        self._order = count()
        self._turns: list[tuple[Key, int, Peer]] = []
        self._flushing: list[Flag] = []
        self._closing = False
        self._failure: BaseException | None = None
        with _as_told(name):
            self._loop = Loop(f"links of {name}", each_turn=self._pump, on_end=self._ended, spins=spins)
        self._regions = Regions(partial(self._loop.call, self._released))
        self._has_neighbours = False
        self._opening = Opening(
            self._loop,
            name,
            job=check_name(job),
            token=token,
            connect_s=connect_s,
            addresses=lambda: self.addresses,
            peer=self._peer,
            opened=self._opened,
            detached=self._detach,
            replaced=self._replaced,
            failed=self._failed,
            refused=on_refused,
        )
        self.addresses = self._listen(host, port, unix, listeners)
        self._loop.later(beat_s, self._tick)
        self._loop.start()
        _keep_from_children(self)

    def introduce(
        self,
        peer: str,
        addresses: Sequence[str],
        *,
        lasting: bool = False,
        silent_s: float | None = None,
    ) -> None:
        """Say where a peer is, best address first; one that was lost may be dialled anew.

        Args:
            peer: its name.
            addresses: where it listens.
            lasting: it listens there for as long as it lives, so where all its addresses refuse a connection
                it is lost at once; else it may still begin to listen within `connect_s`.
            silent_s: for this peer, in place of the endpoint's; to reach it for the first time may take as
                long.

        Raises:
            ValueError: an address or the name makes no sense.
        """
        parsed = tuple(places.parse(address) for address in addresses)
        if any(address.name and not address.why_unusable() for address in parsed):
            self._has_neighbours = True
        self._hand_over(self._introduce, self._checked(peer), parsed, lasting, silent_s)

    def reach(self, peer: str) -> None:
        """Connect to a peer that was lost and has been introduced again.

        `on_reachable` is called when something comes from it.
        """
        self._hand_over(self._reach, self._checked(peer))

    def allocate(self, size_bytes: int) -> memoryview:
        """Return zeroed memory whose bytes peers on this host can read where they lie.

        It lives as long as a view of it. Where there is nobody to share with, or nothing to share, it is
        ordinary memory.
        """
        shared = self._regions.allocate(size_bytes) if self._has_neighbours else None
        return memoryview(bytearray(size_bytes)) if shared is None else shared

    def shares_memory(self, peer: str) -> bool:
        """Whether a peer reads what is in memory of `allocate` itself; to be asked in the I/O thread."""
        known = self._peers.get(peer)
        return known is not None and known.link is not None and known.link.borrowed is not None

    def is_lent(self, memory: memoryview) -> bool:
        """Whether this is memory of `allocate` that peers on this host can read where it lies."""
        return self._regions.find(_as_bytes(memory)) is not None

    def is_read(self, memory: memoryview) -> bool:
        """Whether a peer may still read this memory, or what is allocated together with it.

        It may as long as a `put` of it is not done, whatever was forgotten since; and for ever if the peer
        was lost before. Such memory must not be written again: take other memory in its place.
        """
        found = self._regions.find(_as_bytes(memory))
        return found is not None and found[0].unread > 0

    def send(self, peer: str, message: bytes) -> None:
        """Queue a control message; it goes before all tensor bytes, after the control messages before it.

        What is sent to a peer that was lost or left is dropped. A peer whose address is not known yet has
        `connect_s` to be introduced or to connect.

        Raises:
            ValueError: the message is longer than 1 MiB.
            LinkError: the links have failed.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"expected a message of at most {MAX_MESSAGE_BYTES} bytes, got {len(message)}")
        key = (0, 0, next(self._order))
        self._hand_over(self._enqueue, self._checked(peer), Outgoing(_MESSAGE, key, memoryview(message)))

    def put(
        self,
        peer: str,
        tag: int,
        data: memoryview,
        *,
        offset: int = 0,
        total: int | None = None,
        priority: int = 0,
        done: Callable[[], None] | None = None,
        whole: bool = False,
    ) -> None:
        """Queue bytes [offset, offset + len(data)) of tensor message `tag`, which has `total` bytes in all.

        Nothing is copied: the bytes must not change until `done` is called, in the I/O thread, when the
        kernel has taken them; or until they are dropped because the peer is lost or leaves, or by `forget` or
        `close`, after which `done` is not called. The peer reads what is in memory of `allocate` itself, if
        it is on this host: then `done` means that it has, and dropped bytes must not change as long as they
        are being read (`is_read`).

        Args:
            peer: the receiver.
            tag: names the message; never used again between two nodes.
            data: C-contiguous.
            offset: where the bytes belong in the message.
            total: length of the message in bytes; by default it ends with `data`.
            priority: a lower number goes first, whichever peer it is for.
            done: the bytes may be changed.
            whole: a peer that reads them where they lie is told of up to 4 MiB at once, instead of 1.

        Raises:
            ValueError: the bytes do not lie within the message, or are not contiguous.
            LinkError: the links have failed.
        """
        view = _as_bytes(data)
        end = offset + len(view)
        if total is None:
            total = end
        if not (0 <= tag < ALL_TAGS and offset >= 0 and end <= total < 1 << 64):
            raise ValueError(
                f"expected bytes within a message and a tag of 64 bits, got bytes {offset} to {end} "
                f"of {total} and tag {tag:#x}"
            )
        lent = self._regions.find(view) if len(view) >= MIN_SHARED_BYTES else None
        key = (1, priority, next(self._order))
        item = Outgoing(
            _DATA, key, view, tag=tag, offset=offset, total=total, done=done, lent=lent, whole=whole
        )
        if total and not len(view):
            if done is not None:
                self._hand_over(done)
            return
        self._hand_over(self._enqueue, self._checked(peer), item)

    def expect(
        self, peer: str, tag: int, into: memoryview, on_data: OnData, on_shared: OnShared | None = None
    ) -> None:
        """Let the bytes of message `tag` from `peer` go straight into `into`, which is as long as the
        message.

        `on_data(offset, length)` is called for each piece, in order of arrival; every byte comes once. What
        came early is delivered at once. Early data is kept up to 256 MiB a peer; beyond that nothing is read
        from that peer, control messages included, until something is expected or forgotten.

        With `on_shared(offset, source)`, that is called in place of `on_data` for bytes that lie in the
        memory of a peer on this host. It has to put into `into` what it wants of them before it returns;
        `source` must not be written, nor read later.

        Raises:
            ValueError: `into` is read-only or not contiguous.
            LinkError: the links have failed.
        """
        view = _as_bytes(into)
        if view.readonly and len(view):
            raise ValueError("expected a writable buffer to receive into, got a read-only one")
        self._hand_over(self._expect, self._checked(peer), tag, view, on_data, on_shared)

    def forget(self, first: int, last: int) -> None:
        """Cancel every message with first <= tag < last, of all peers, for good.

        Queued puts, posted receives and early data are dropped, and so is what comes later. When this
        returns, their buffers are neither read nor written any more, but for memory that a peer on this host
        reads (`is_read`), and their callbacks are not called any more (one that is running is waited for: do
        not hold a lock that it takes). Tags are remembered as
        ranges, so forget runs that touch, as far as possible: of more than 65536 separate ranges the lowest
        is no longer remembered.

        Raises:
            LinkError: the I/O thread was busy with a callback for 10 s.
        """
        if self._loop.inside or not self._loop.alive:
            self._forget(first, last)
            return
        finished = Flag()
        self._hand_over(self._forget, first, last)
        self._hand_over(finished.set)
        deadline_s = monotonic() + HAND_OVER_S
        while not finished.wait(0.1) and self._loop.alive:
            if monotonic() > deadline_s:
                raise LinkError(
                    self.name, f"a callback has kept the links of {self.name} busy for {HAND_OVER_S:g} s"
                )

    def accuse(self, peer: str, error: ProtocolError) -> None:
        """Lose a peer for what it has sent, as where a callback raises the error; in the I/O thread."""
        accused = self._peer(peer)
        if accused.link is not None:
            self._lose_for(accused, error)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function in the I/O thread soon, after what was asked for before."""
        self._loop.call(function, *args)

    def when_idle(self, function: Callable[[], None]) -> None:
        """Run a function when nothing more has come for now, or soon; to be called in the I/O thread."""
        self._loop.when_idle(function)

    def later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run a function in the I/O thread after `delay_s`."""
        self._loop.call(self._loop.later, delay_s, function)

    @property
    def inside(self) -> bool:
        """Whether the caller does the I/O thread's work, as callbacks do."""
        return self._loop.inside

    def run_until(self, wait: Callable[[float], bool], is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Do the I/O thread's work until something is over, in place of waiting for it; see `Loop.run_until`.

        Callbacks run in the calling thread meanwhile.
        """
        return self._loop.run_until(wait, is_over, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the kernel has taken everything that was queued; return whether it has in time."""
        if self._loop.inside:
            raise RuntimeError("flush waits for the I/O thread and cannot be called from within it")
        sent = Flag()
        self._loop.call(self._flushing.append, sent)
        return self._loop.alive and sent.wait(timeout_s) and self._failure is None

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what control messages are queued, say goodbye to every peer and stop; drop tensor bytes.

        May be called more than once; from within a callback it returns at once and closes soon after.
        """
        self._loop.call(self._close, timeout_s)
        if not self._loop.inside:
            self._loop.join(timeout_s + 1.0)

    # Handing over

    def _hand_over(self, function: Callable[..., object], *args: Any) -> None:
        if self._loop.inside:
            function(*args)
            return
        if self._failure is not None:
            raise LinkError(
                self.name, f"the links of {self.name} have failed: {self._failure!r}"
            ) from self._failure
        self._loop.call(function, *args)

    def _checked(self, peer: str) -> str:
        if peer == self.name:
            raise ValueError(f"expected the name of another node, got this node's own, {peer}")
        return check_name(peer) if peer not in self._peers else peer

    def _peer(self, name: str) -> Peer:
        peer = self._peers.get(name)
        if peer is None:
            outbox = Outbox(TCP_FRAME_BYTES, self._unread_bytes)
            peer = self._peers[name] = Peer(name, Inbox(self._forgotten), outbox)
        return peer

    def _reach(self, name: str) -> None:
        peer = self._peer(name)
        if not self._closing:
            peer.is_unreachable = True
            if peer.link is None:
                self._opening.dial(peer)

    def _introduce(
        self, name: str, addresses: tuple[places.Address, ...], lasting: bool, silent_s: float | None
    ) -> None:
        peer = self._peer(name)
        peer.addresses, peer.lasting, peer.silent_s = addresses, lasting, silent_s
        peer.gone = False
        self._opening.introduced(peer)

    def _enqueue(self, name: str, item: Outgoing) -> None:
        peer = self._peer(name)
        if peer.gone or self._closing or self._forgotten.overlaps(item.tag, item.tag + (item.kind == _DATA)):
            return
        peer.outbox.add(item)
        if peer.link is not None:
            self._lend(peer, peer.link, item)
            self._schedule(peer)
        else:
            self._opening.dial(peer)

    def _expect(
        self, name: str, tag: int, into: memoryview, on_data: OnData, on_shared: OnShared | None
    ) -> None:
        peer = self._peer(name)
        if self._closing:
            return
        try:
            peer.inbox.post(tag, into, on_data, on_shared)
        except ProtocolError as error:
            self._lose_for(peer, error)
        else:
            self._resume(peer)

    def _forget(self, first: int, last: int) -> None:
        self._forgotten.add(first, last)
        if len(self._forgotten) > MAX_FORGOTTEN_RANGES:
            self._forgotten.drop_lowest()
        for peer in self._peers.values():
            peer.inbox.drop(first, last)
            peer.outbox.drop(first, last)
            if peer.link is not None:
                peer.link.reader.divert(first, last)
                self._resume(peer)

    # Sending

    def _schedule(self, peer: Peer) -> None:
        """Let the peer take its turn when its most urgent frame is due, unless its socket is full."""
        link, key = peer.link, peer.outbox.key
        if link is not None and not link.full and key is not None and (peer.turn is None or key < peer.turn):
            peer.turn = key
            heappush(self._turns, (key, next(self._order), peer))

    def _pump(self) -> bool:
        """Send the most urgent frames of the node; return whether more could be sent at once."""
        turns = self._turns
        writes = 0
        while turns:
            if writes == WRITES_A_TURN:
                return True
            key, _, peer = heappop(turns)
            if peer.turn is key:  # else something more urgent came meanwhile, and that turn was taken
                peer.turn = None
                if peer.link is not None and not peer.link.full:
                    writes += 1
                    self._write(peer, peer.link)
        if self._flushing and not any(peer.outbox for peer in self._peers.values()):
            for sent in self._flushing:
                sent.set()
            self._flushing.clear()
        if self._closing and not any(peer.link or peer.dial for peer in self._peers.values()):
            self._loop.stop()
        return False

    def _write(self, peer: Peer, link: Link) -> None:
        outbox = peer.outbox
        views, size = outbox.gather()
        if not size:
            return
        assert link.sock is not None
        try:
            if outbox.descriptor is None:
                n = link.sock.sendmsg(views)
            else:
                n = socket.send_fds(link.sock, views, [outbox.descriptor])
        except BlockingIOError:
            n = 0
        except OSError as error:
            outbox.taken(0)
            self._write_failed(peer, link, error)
            return
        finished = outbox.taken(n)
        self.bytes_sent += n
        link.spoke = True
        if n < size:
            link.full = True
            self._watch(peer, link)
        elif outbox.key is None:  # nothing is left, or what is waits until the peer has read
            self._watch(peer, link)
        else:
            self._schedule(peer)
        self._finish(finished)

    def _write_failed(self, peer: Peer, link: Link, error: OSError) -> None:
        """Nothing can be sent any more; what the peer said before, a goodbye perhaps, still counts."""
        link.full = True
        self._dispatch(peer, link)  # which may be what is under way
        while peer.link is link and not link.paused:
            received = self.bytes_received
            self._read(peer, link)
            if received == self.bytes_received:
                break
        if peer.link is link:
            self._broke(peer, f"{peer.name} {_cause(error)}")

    def _watch(self, peer: Peer, link: Link) -> None:
        """Be told when the socket is ready for what is wanted of it."""
        if link.sock is None:
            return
        wanted = (0 if link.paused else READ) | (WRITE if link.full else 0)
        if wanted == link.watched:
            return
        watcher = partial(self._ready, peer, link)
        if not wanted:
            self._loop.unwatch(link.sock)
        elif not link.watched:
            self._loop.watch(link.sock, wanted, watcher)
        else:
            self._loop.rewatch(link.sock, wanted, watcher)
        link.watched = wanted

    # Sharing memory

    def _lend(self, peer: Peer, link: Link, item: Outgoing) -> None:
        """Let the peer read a queued message where it lies, if it can."""
        if item.lent is None or link.borrowed is None:
            return
        known, (region, _) = peer.outbox.known, item.lent
        if region.number not in known:
            known.add(region.number)
            key = (0, 0, next(self._order))
            peer.outbox.add(
                Outgoing(_REGION, key, item.data[:0], tag=region.number, total=region.size, lent=item.lent)
            )
        item.kind = _SHARED

    def _released(self, region: Region) -> None:
        """Nobody holds a region's memory any more."""
        self._regions.remove(region)
        for peer in self._peers.values():
            if region.number in peer.outbox.known:
                peer.outbox.known.remove(region.number)
                key = (0, 0, next(self._order))
                peer.outbox.add(Outgoing(_WITHDRAW, key, _NOTHING, tag=region.number))
                self._schedule(peer)

    # Receiving

    def _opened(self, peer: Peer, link: Link, received: int) -> None:
        """A connection to the peer is ready, which has received so many frames of the session."""
        assert link.sock is not None
        peer.link = link
        peer.gone = False
        peer.cause = ""
        link.reader.establish(peer.inbox.destination)
        tune(link, peer.outbox)
        peer.outbox.keeps = peer.session.is_resumable
        if not peer.session.is_resumable:
            share(link)
        self._has_neighbours |= link.borrowed is not None
        for item in peer.outbox.items():
            self._lend(peer, link, item)
        self._loop.unwatch(link.sock)
        self._watch(peer, link)
        if self._closing:
            self._say_goodbye(peer)
        try:
            finished = peer.outbox.resume(received)
        except ProtocolError as error:
            self._lose_for(peer, error)
            return
        self._finish(finished)
        self._schedule(peer)
        if peer.is_unreachable:
            self._receive_again(peer)
        self._dispatch(peer, link)

    def _receive_again(self, peer: Peer) -> None:
        """Something comes from a peer that was reported as unreachable: that is reported first."""
        peer.is_unreachable = False
        self._on_reachable(peer.name)

    def _finish(self, items: list[Outgoing]) -> None:
        """These messages have come, or have been handed to the kernel where nothing can be lost any more."""
        for item in items:
            if item.done is not None:
                item.done()

    def _ready(self, peer: Peer, link: Link, events: int) -> None:
        if events & WRITE and link.full:
            link.full = False
            if peer.outbox.key is not None:  # it stays watched, until there is nothing left to send
                self._schedule(peer)
            else:  # what was to be sent is forgotten, or waits until the peer has read
                self._watch(peer, link)
        if events & READ and peer.link is link:
            self._read(peer, link)

    def _read(self, peer: Peer, link: Link) -> None:
        try:
            n = receive(link)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._lose_for(peer, error)
            return
        except OSError as error:
            if is_none_left(error):
                text = f"{self.name} cannot take memory that {peer.name} shares: {explain(error)}"
                self._lose(peer, text, "no files")
            else:
                self._broke(peer, f"{peer.name} {_cause(error)}")
            return
        if not n:
            self._broke(peer, f"{peer.name} closed the connection")
            return
        self.bytes_received += n
        link.heard = True
        if peer.is_unreachable:
            self._receive_again(peer)
        link.reader.received(n)
        self._dispatch(peer, link)
        wake_late(link)

    def _dispatch(self, peer: Peer, link: Link) -> None:
        """Act on every frame that is complete.

        Where that takes long, what comes of the first ones is sent meanwhile, so that the peer has work, too.
        What waited until the peer has read is sent as soon as it has.
        """
        inbox, next_frame, session = peer.inbox, link.reader.next_frame, peer.session
        limit_s = monotonic() + STRETCH_S
        try:
            while peer.link is link and (frame := next_frame()) is not None:
                self.frames_received += 1
                if frame.kind in NUMBERED:
                    self._count(peer, session, frame)
                self._act(peer, link, frame)
                if frame.kind == _TAKEN or monotonic() > limit_s:
                    self._say_what_was_read(peer, link)
                    self._pump()
                    limit_s = monotonic() + STRETCH_S
            if peer.link is link and link.borrowed is not None:
                link.borrowed.check(partial=link.reader.partial)
                self._say_what_was_read(peer, link)
        except ProtocolError as error:
            self._lose_for(peer, error)
        if inbox.early_bytes > MAX_EARLY_BYTES and not link.paused:
            link.paused = True
            self._watch(peer, link)

    def _count(self, peer: Peer, session: Session, frame: Frame) -> None:
        """Take note that a numbered frame has come, and acknowledge it where somebody may wait for that."""
        session.received += 1
        if session.is_resumable:
            session.owed_frames += 1
            session.owed_bytes += frame.length
            ends = frame.kind == _DATA and frame.offset + frame.length == frame.total
            if ends or session.owed_bytes >= ACK_BYTES or session.owed_frames >= ACK_FRAMES:
                self._acknowledge(peer)

    def _acknowledge(self, peer: Peer) -> None:
        session = peer.session
        session.owed_frames = session.owed_bytes = 0
        peer.outbox.owe(session.received)
        self._schedule(peer)

    def _say_what_was_read(self, peer: Peer, link: Link) -> None:
        """Tell the peer what has been read of its memory."""
        borrowed = link.borrowed
        if borrowed is not None and borrowed.read and peer.link is link:
            key = (0, 0, next(self._order))
            peer.outbox.add(Outgoing(_TAKEN, key, _NOTHING, total=borrowed.read))
            borrowed.answered()
            self._schedule(peer)

    def _act(self, peer: Peer, link: Link, frame: Frame) -> None:
        kind = frame.kind
        if kind == _BYE:
            self._leave(peer)
        elif self._closing:
            pass
        elif kind == _DATA:
            peer.inbox.arrived(frame)
        elif kind == _MESSAGE:
            assert isinstance(frame.payload, bytes)
            self._on_message(peer.name, frame.payload)
        elif kind == _ACK:
            self._finish(peer.outbox.acknowledge(frame.total))
        elif kind == _TAKEN:
            self._finish(peer.outbox.read(frame.total))
            self._schedule(peer)
        elif kind not in (_BEAT, _SKIP):
            self._act_on_shared(peer, link, frame)

    def _act_on_shared(self, peer: Peer, link: Link, frame: Frame) -> None:
        borrowed = link.borrowed
        if borrowed is None:
            raise ProtocolError(f"expected no {Kind(frame.kind).name} frame from another host")
        if frame.kind == _SHARED:
            source = borrowed.piece(*place_of(frame))
            peer.inbox.shared(frame.tag, frame.offset, frame.total, source)
        elif frame.kind == _REGION:
            borrowed.map(frame.tag, frame.total)
        elif frame.kind == _WITHDRAW:
            borrowed.withdraw(frame.tag)

    def _resume(self, peer: Peer) -> None:
        link = peer.link
        if link is not None and link.paused and peer.inbox.early_bytes <= MAX_EARLY_BYTES:
            link.paused = False
            self._watch(peer, link)

    # Staying and leaving

    def _tick(self) -> None:
        """Show peers that this node lives, and see which of them do not.

        Silence is counted in ticks, not read from a clock: if this node itself was held up, that is one tick.
        """
        if self._closing:
            return
        self._loop.later(self._beat_s, self._tick)
        for peer in list(self._peers.values()):
            if self._see_whether_heard(peer) and peer.link is not None:
                self._show_life(peer, peer.link)

    def _see_whether_heard(self, peer: Peer) -> bool:
        """Count for how long nothing has come from a peer, and act on that; return whether it is there."""
        link = peer.link
        if link is not None and (link.heard or link.paused):
            link.heard = False
            peer.silent_ticks = 0
            self._opening.stop_dialling(peer)  # which was begun in place of this connection
            return True
        if link is None and peer.dial is None:
            return False
        peer.silent_ticks += 1
        if link is not None and link.wake_bytes > 1:
            wake_at(link, 1)  # on a slow line less than that is life too
        silent_s, limit_s = peer.silent_ticks * self._beat_s, peer.silent_s or self._silent_s
        since = f"{peer.cause}, and " if peer.cause else ""
        if peer.session.is_open and silent_s >= limit_s:
            self._lose(peer, f"{since}{peer.name} has been silent for {limit_s:g} s")
            return False
        if silent_s >= self._unreachable_s and not peer.is_unreachable:
            peer.is_unreachable = True
            self._on_unreachable(peer.name, f"{since}nothing has come from it for {silent_s:g} s")
        if link is not None and silent_s >= REDIAL_S and peer.session.is_resumable and peer.addresses:
            self._opening.dial(peer)
        return True

    def _show_life(self, peer: Peer, link: Link) -> None:
        """Send something, if nothing else goes out."""
        if peer.session.owed_frames:
            self._acknowledge(peer)
        elif not link.spoke and peer.outbox.key is None:
            peer.outbox.add(Outgoing(_BEAT, (0, 0, next(self._order)), _NOTHING))
            self._schedule(peer)
        link.spoke = False

    def _lose_for(self, peer: Peer, error: ProtocolError) -> None:
        """The peer has said what nobody says."""
        self._lose(peer, f"{peer.name} broke the protocol: {error}", "protocol")

    def _broke(self, peer: Peer, cause: str) -> None:
        """The connection is gone: the session goes on on another one if the peer's process lives."""
        if self._closing or not (peer.session.is_resumable and peer.addresses):
            self._lose(peer, cause)
            return
        self._detach(peer)
        peer.cause = cause
        if not self._opening.freed(peer):
            self._opening.dial(peer)

    def _detach(self, peer: Peer) -> None:
        """Give up the connection, and nothing else: what has not come whole on it will come again."""
        link, peer.link = peer.link, None
        assert link is not None
        if link.reader.begun is not None:
            peer.inbox.take_back(link.reader.begun)
        self._opening.close(link)
        peer.outbox.rewind()
        peer.session.owed_frames = peer.session.owed_bytes = 0

    def _replaced(self, peer: Peer) -> None:
        """Whoever answers under the peer's name does not know the session."""
        since = f"{peer.cause}, and " if peer.cause else ""
        self._lose(peer, f"{since}{peer.name} has begun a new session", "replaced")

    def _failed(self, peer: Peer, text: str, failure: LinkFailure) -> None:
        """The peer cannot be reached, or its process has ended."""
        since = f"{peer.cause}, and " if peer.cause else ""
        self._lose(peer, since + text, failure)

    def _lose(self, peer: Peer, text: str, failure: LinkFailure = "broken") -> None:
        """The peer is gone without a goodbye, or cannot be reached."""
        self._part(peer)
        peer.inbox.clear()
        if not self._closing:
            self._on_lost(LinkError(peer.name, text, failure=failure))
        self._opening.freed(peer)

    def _leave(self, peer: Peer) -> None:
        """The peer has said goodbye; what it said before may still be expected."""
        self._part(peer)
        if not self._closing and self._on_left is not None:
            self._on_left(peer.name)
        self._opening.freed(peer)

    def _part(self, peer: Peer) -> None:
        link, peer.link = peer.link, None
        if link is not None:
            self._opening.close(link)
        self._opening.stop_dialling(peer)
        peer.gone = True
        peer.is_unreachable = False
        peer.silent_ticks = 0
        peer.cause = ""
        peer.session = Session()
        peer.outbox.clear()

    def _close(self, timeout_s: float) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.later(timeout_s, self._loop.stop)
        self._opening.shut()
        for peer in self._peers.values():
            peer.inbox.clear()
            peer.outbox.clear(keep_control=True)
            if peer.link is not None:
                peer.link.reader.divert(0, ALL_TAGS)
                self._resume(peer)
                self._say_goodbye(peer)
            elif not (peer.dial is not None and peer.outbox):
                self._opening.abandon(peer)

    def _say_goodbye(self, peer: Peer) -> None:
        """Say that nothing more will come.

        The peer closes the connection when it has read that, so nothing that is still under way is reset.
        """
        peer.outbox.add(Outgoing(_BYE, (0, 1, next(self._order)), _NOTHING))
        self._schedule(peer)

    def _ended(self, error: BaseException | None) -> None:
        """The I/O thread ends."""
        self._failure = error
        self._closing = True
        for sock in self._opening.sockets:
            sock.close()
        for peer in self._peers.values():
            for link in (peer.link, peer.dial.link if peer.dial is not None else None):
                if link is not None and link.borrowed is not None:
                    link.borrowed.close()
        for sent in self._flushing:
            sent.set()
        if error is not None:
            if self._on_error is None:
                raise error
            self._on_error(error)

    def _listen(
        self,
        host: str | None,
        port: int,
        unix: bool,
        listeners: Sequence[tuple[socket.socket, str]] | None,
    ) -> tuple[str, ...]:
        try:
            with _as_told(self.name):
                found = places.listen(host, port, unix=unix) if listeners is None else listeners
        except BaseException:
            self._opening.shut()
            self._loop.abandon()
            raise
        for sock, _ in found:
            self._opening.listen(sock)
        return tuple(address for _, address in found)

    def abandon(self) -> None:
        """Close this process's copies of all sockets; for a forked child, which has no I/O thread.

        Else the peers would not notice the parent's death as long as the child lives.
        """
        self._failure = RuntimeError("this is a forked process, whose parent has the links")
        for sock in self._opening.sockets:
            sock.close()
        self._loop.abandon()


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


@contextmanager
def _as_told(name: str) -> Iterator[None]:
    """Say of a node what the operating system refuses it."""
    try:
        yield
    except OSError as error:
        raise OffbeatError(f"{name} cannot open its connections: {explain(error)}") from error


def _keep_from_children(endpoint: Endpoint) -> None:
    """Let processes forked from this one (a DataLoader's workers) close their copies of the sockets."""
    if not _endpoints_hooked:
        _endpoints_hooked.append(True)
        os.register_at_fork(after_in_child=_abandon_all)
    _endpoints.add(endpoint)


_endpoints_hooked: list[bool] = []


def _abandon_all() -> None:
    for endpoint in list(_endpoints):
        endpoint.abandon()
    _endpoints.clear()


def _as_bytes(data: memoryview) -> memoryview:
    """Return a buffer as a flat view of its bytes."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("expected C-contiguous bytes, got a buffer with gaps")
    if not view.nbytes:
        return _NOTHING
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _cause(error: OSError) -> str:
    match error:
        case ConnectionResetError():
            return "reset the connection"
        case BrokenPipeError():
            return "closed the connection"
        case _:
            return f"cannot be reached any more: {(error.strerror or str(error)).lower()}"
