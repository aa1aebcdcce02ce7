"""Messages between nodes of a parameter server over real connections: in order and once each."""

from __future__ import annotations

import gc
import random
import resource
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import pytest

from offbeat.errors import LinkError, ProtocolError
from offbeat.numerics.ps.entries import Entries
from offbeat.policies.ps.messages import (
    HandoffOperations,
    Operation,
    PullResult,
    PushAck,
    PushStamp,
    ReplicateAck,
)
from offbeat.runtime.ps.messenger import Messenger
from offbeat.runtime.ps.packing import TO_CLIENT, TO_SERVER
from offbeat.runtime.transport.framing import MAX_MESSAGE_BYTES
from offbeat.runtime.transport.shared_memory import HAS_SHARED_MEMORY
from support import endpoints
from support.endpoints import DEADLINE_S, KIB, MIB, Node
from support.ps_messages import claim as array_claim
from support.ps_messages import packed, plain, pulled
from support.run_logs import wait_until

node = endpoints.node  # the fixture
KINDS = (*TO_SERVER, *TO_CLIENT)
RESTARTS = 12


class Writer:
    """A node that sends messages to others and records received messages in order.

    With `redials` it reconnects when a connection breaks and resends messages that may be lost; otherwise
    its peers do.
    """

    def __init__(self, make: Callable[..., Node], name: str, *, redials: bool = True, **options: Any) -> None:
        self.received_messages: dict[str, list[Any]] = defaultdict(list)
        self.losses: list[LinkError] = []
        self._changed = threading.Condition()
        self._redials = redials
        self._places: dict[str, tuple[str, ...]] = {}
        self.node = make(
            name,
            on_message=self._on_message,
            on_lost=self._lost,
            on_left=lambda peer: self.messenger.on_peer_gone(peer),
            host="127.0.0.1",
            **{"unix": False, **options},
        )
        self.name, self.links = name, self.node.links
        self.messenger = Messenger(
            self.links,
            KINDS,
            self._note,
            place=lambda node, message, array: None,
            gather=lambda: None,
            share=lambda node, message, array, shared: False,
        )

    def knows(self, peer: str, *addresses: str) -> None:
        self._places[peer] = addresses
        self.links.add_peer(peer, addresses)

    def write(self, to: str, *messages: Any) -> None:
        """Sends all messages in one turn."""
        self.links.call_soon(lambda: [self.messenger.send(to, message) for message in messages])

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, DEADLINE_S), f"{self.name} timed out waiting for {what}"

    def wait_for(self, peer: str, count: int) -> list[Any]:
        self.wait(lambda: len(self.received_messages[peer]) >= count, f"{count} messages of {peer}")
        return self.received_messages[peer]

    def lost(self, peer: str, count: int = 1) -> LinkError:
        """The next loss of a peer."""
        self.wait(lambda: sum(one.peer == peer for one in self.losses) >= count, f"loss {count} of {peer}")
        return [one for one in self.losses if one.peer == peer][count - 1]

    def kept(self, peer: str) -> int:
        """The number of unacknowledged batches for a peer."""
        return self.node.in_thread(lambda: len(self.messenger._peers[peer].channel._sent))

    def _on_message(self, peer: str, payload: bytes) -> None:
        self.messenger.on_message(peer, payload)

    def _note(self, peer: str, message: Any) -> None:
        if message == REFUSED:
            raise ProtocolError("expected anything but that")
        with self._changed:
            self.received_messages[peer].append(message)
            self._changed.notify_all()

    def _lost(self, error: LinkError) -> None:
        with self._changed:
            self.losses.append(error)
            self._changed.notify_all()
        self.messenger.on_lost(error.peer)
        if self._redials and error.peer in self._places:
            self.links.add_peer(error.peer, self._places[error.peer])
            self.messenger.on_reconnected(error.peer)


class Proxy:
    """A proxy between two nodes: it cuts each connection after a given number of bytes, later ones never.

    Args:
        to: the address of the node behind the proxy.
        cuts: for each connection: bytes, and the end or ends that see the cut at once.
    """

    def __init__(self, to: str, cuts: list[tuple[int, str]]) -> None:
        host, _, port = to.removeprefix("tcp://").rpartition(":")
        self._to, self._cuts = (host, int(port)), iter(cuts)
        self.is_spent = False  # all cuts are done: the current connection is not cut
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(self._to)
                self._sockets += [near, far]
                limit_bytes, sees = next(self._cuts, (None, ""))
                self.is_spent = limit_bytes is None
                Pipe(near, far, limit_bytes, sees)

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Pipe:
    """One connection through a proxy."""

    def __init__(self, near: socket.socket, far: socket.socket, limit_bytes: int | None, sees: str) -> None:
        self._near, self._far, self._sees = near, far, sees
        self._left_bytes, self._lock = limit_bytes, threading.Lock()
        for source, to in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=(source, to), daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(64 * KIB):
                with self._lock:
                    if self._left_bytes is not None:
                        data = data[: self._left_bytes]
                        self._left_bytes -= len(data)
                    is_over = self._left_bytes == 0
                to.sendall(data)
                if is_over:
                    self._cut()
                    return
        for sock in (source, to):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        for sock, is_seen in ((self._near, self._sees != "far"), (self._far, self._sees != "near")):
            if is_seen:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy():
    made: list[Proxy] = []

    def make(to: str, cuts: list[tuple[int, str]]) -> Proxy:
        made.append(Proxy(to, cuts))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def pair(node: Callable[..., Node]) -> tuple[Writer, Writer]:
    """Two nodes that can reach each other."""
    a, b = Writer(node, "server-0"), Writer(node, "server-1")
    a.knows("server-1", *b.links.addresses)
    b.knows("server-0", *a.links.addresses)
    return a, b


# Messages


REFUSED = ReplicateAck(view=0, master=0, serial=-1)


def small(number: int) -> PushAck:
    return PushAck(request=number, first=0, last=1)


def large(number: int, size_bytes: int) -> PullResult:
    rows = np.random.default_rng(number).random(size_bytes // 8)
    return PullResult(request=number, namespace="w", first=0, last=1, content=Entries(0, rows))


def long(number: int, size_bytes: int) -> HandoffOperations:
    """Many operations, some of them with rows that travel as attachments."""
    operations = []
    for time in range(size_bytes // (8 * KIB)):
        rows = np.full(KIB if time % 20 else 5 * KIB, time, np.float64)
        marks = (PushStamp(client=1, time=time, previous_times=()),)
        content = Entries(0, rows)
        operations.append(Operation(namespace="w", first=0, last=len(rows), stamps=marks, content=content))
    return HandoffOperations(view=number, chain=(0, 1), operations=tuple(operations))


def number_of(message: Any) -> int:
    return message.view if isinstance(message, HandoffOperations) else message.request


def mixture(chance: random.Random, count: int) -> list[Any]:
    kinds: list[Callable[[int], Any]] = [
        *[small] * 12,
        lambda number: large(number, chance.choice((0, 800, 20 * KIB, 300 * KIB))),
        lambda number: large(number, 2 * MIB),
        lambda number: long(number, chance.choice((100 * KIB, 700 * KIB, 1500 * KIB))),
    ]
    return [chance.choice(kinds)(number) for number in range(count)]


def same(received_messages: list[Any], sent: list[Any]) -> None:
    assert [number_of(message) for message in received_messages] == [number_of(message) for message in sent]
    assert plain(received_messages) == plain(sent)


def in_bursts(chance: random.Random, messages: list[Any]) -> list[list[Any]]:
    bursts = []
    while messages:
        count = chance.choice((1, 2, 5, 20))
        bursts.append(messages[:count])
        messages = messages[count:]
    return bursts


def test_a_message_of_many_operations_does_not_fit_into_a_batch():
    """Otherwise the tests below would send no long messages."""
    assert len(packed(long(1, 700 * KIB))[0]) > MAX_MESSAGE_BYTES // 2


# Without broken connections


def test_messages_of_all_lengths_arrive_in_order_and_once_in_both_directions(pair):
    a, b = pair
    chance = random.Random(1)
    there, back = mixture(chance, 150), mixture(chance, 150)
    bursts = [in_bursts(chance, messages) for messages in (there, back)]
    while any(bursts):
        for writer, to, mine in ((a, "server-1", bursts[0]), (b, "server-0", bursts[1])):
            if mine:
                writer.write(to, *mine.pop(0))
    same(b.wait_for("server-0", len(there)), there)
    same(a.wait_for("server-1", len(back)), back)


def test_messages_to_several_nodes_do_not_mix(node):
    writers = [Writer(node, f"server-{number}") for number in range(3)]
    for one in writers:
        for other in writers:
            if one is not other:
                one.knows(other.name, *other.links.addresses)
    sent = {}
    for place, one in enumerate(writers):
        for other in writers:
            if one is not other:
                sent[one.name, other.name] = mixture(random.Random(place), 30)
                one.write(other.name, *sent[one.name, other.name])
    for (one, other), messages in sent.items():
        receiver = next(writer for writer in writers if writer.name == other)
        same(receiver.wait_for(one, len(messages)), messages)


def test_messages_of_one_turn_are_sent_together(pair):
    a, b = pair
    a.write("server-1", small(0))
    b.wait_for("server-0", 1)
    before = b.links.frames_received
    a.write("server-1", *[small(number) for number in range(1, 1001)])
    b.wait_for("server-0", 1001)
    assert b.links.frames_received - before < 20


class Reader(Writer):
    """Reads arrays at once, in the sender's memory if `may_show` allows; records each number and sum."""

    def __init__(self, make: Callable[..., Node], name: str, may_show: Callable[[Any], bool]) -> None:
        super().__init__(make, name, unix=True)
        self.messenger._share = self._shown
        self._may_show = may_show
        self.shown: list[int] = []

    def _shown(self, peer: str, message: Any, array: Any, shown: Any) -> bool:
        assert message.content.values is array
        assert (shown.shape, shown.dtype) == (array.shape, array.dtype)
        assert not shown.flags.writeable
        if self._may_show(message):
            message.content = Entries(0, shown)
            self.shown.append(message.request)
            return True
        return False

    def _note(self, peer: str, message: Any) -> None:
        super()._note(peer, (message.request, float(message.content.values.sum())))


@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="memory is not shared on this system")
def test_a_receiver_on_the_same_host_may_read_arrays_in_the_senders_memory(node):
    """For arrays up to 4 MiB; longer ones are staged part by part."""
    sizes = [300 * KIB, MIB, 3 * MIB, 4 * MIB, 4 * MIB + 8, 9 * MIB, 100 * KIB, 8]
    a = Writer(node, "server-0", unix=True)
    b = Reader(node, "server-1", lambda message: message.request % 4 != 3)
    a.knows("server-1", *b.links.addresses)
    a.write("server-1", large(0, 8))
    b.wait_for("server-0", 1)  # the nodes know that they are on the same host
    messages = [large(number, sizes[number % len(sizes)]) for number in range(1, 60)]
    for burst in in_bursts(random.Random(0), list(messages)):
        a.write("server-1", *burst)
    received_messages = b.wait_for("server-0", 60)[1:]
    assert received_messages == [(one.request, float(one.content.values.sum())) for one in messages]
    may = [one.request for one in messages if one.request % 4 != 3 and one.content.values.nbytes <= 4 * MIB]
    large_enough = [number for number in may if sizes[number % len(sizes)] >= 300 * KIB]
    assert b.shown == large_enough


@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="memory is not shared on this system")
def test_arrays_in_shared_memory_are_sent_without_staging(node):
    a, b = Writer(node, "server-0", unix=True), Writer(node, "server-1", unix=True)
    a.knows("server-1", *b.links.addresses)
    a.write("server-1", large(0, 8))
    b.wait_for("server-0", 1)  # the nodes know that they are on the same host
    rows = np.frombuffer(a.links.allocate(9 * MIB), np.float64)
    rows[:] = np.arange(len(rows))
    own = PullResult(request=1, namespace="w", first=0, last=1, content=Entries(0, rows))
    a.write("server-1", own, large(2, 8))
    received_messages = b.wait_for("server-0", 3)[1:]
    assert np.array_equal(received_messages[0].content.values, rows)
    assert a.node.in_thread(
        lambda: (len(a.messenger._staging._free_slabs), a.messenger._staging._slabs_in_use)
    ) == (
        0,
        {},
    )


def test_a_small_message_waits_for_a_large_one_before_it(pair):
    a, b = pair
    messages = [large(0, 8 * MIB), small(1), long(2, 700 * KIB), small(3)]
    for message in messages:
        a.write("server-1", message)
    same(b.wait_for("server-0", 4), messages)


def test_announcements_of_unsent_arrays_are_bounded(pair):
    a, b = pair
    a.write("server-1", small(0))
    b.wait_for("server-0", 1)
    may_go_on = threading.Event()
    b.links.call_soon(lambda: may_go_on.wait(DEADLINE_S))  # b does not read
    messages = [large(number, 4 * MIB) for number in range(40)]
    a.write("server-1", *messages)
    wait_until(lambda: a.kept("server-1") > 1, "a batch of these")
    announced = a.kept("server-1")
    may_go_on.set()
    same(b.wait_for("server-0", 41)[1:], messages)
    assert announced < 12  # 8 MiB, the buffers of a connection, and the first small message


class Slow(Writer):
    """Spends a millisecond on each message and answers the first; ends after that answer has arrived."""

    def __init__(self, make: Callable[..., Node], name: str, asks: Writer) -> None:
        super().__init__(make, name)
        self._asks = asks

    def _note(self, peer: str, message: Any) -> None:
        until_s = monotonic() + 1e-3
        while monotonic() < until_s:
            pass
        if message == small(0):
            self.messenger.send(peer, small(1000))
        elif message == small(9):
            self._asks.wait_for(self.name, 1)
        super()._note(peer, message)


def test_answers_to_early_messages_are_sent_before_later_messages_are_delivered(node):
    a = Writer(node, "server-0")
    b = Slow(node, "server-1", asks=a)
    a.knows("server-1", *b.links.addresses)
    messages = [small(number) for number in range(10)]
    a.write("server-1", *messages)
    same(b.wait_for("server-0", 10), messages)
    same(a.received_messages["server-1"], [small(1000)])


def test_a_message_rejected_in_a_later_turn_loses_its_sender_and_no_other_message(node):
    b = Slow(node, "server-1", asks=Writer(node, "server-0"))
    evil: Node = node("client-666")
    evil.links.add_peer("server-1", b.links.addresses)
    evil.links.send("server-1", batch(body(small(1), small(2), REFUSED, small(3), REFUSED)))
    evil.links.send("server-1", batch(body(small(4)), number=1))
    assert "client-666 broke the protocol: expected anything but that" in str(b.lost("client-666"))
    assert evil.loss().peer == "server-1"
    same(b.wait_for("client-666", 3)[:3], [small(number) for number in range(1, 4)])


def test_received_messages_are_acknowledged_without_traffic_in_return(pair):
    a, b = pair
    a.write("server-1", *[small(number) for number in range(1000)])
    b.wait_for("server-0", 1000)
    wait_until(lambda: a.kept("server-1") < 64, "an acknowledgement")
    for number in range(1000, 1040):
        a.write("server-1", large(number, MIB))
    b.wait_for("server-0", 1040)
    wait_until(lambda: a.kept("server-1") < 10, "an acknowledgement")


def test_received_long_messages_are_acknowledged_soon(pair):
    a, b = pair
    for number in range(20):
        a.write("server-1", long(number, 1500 * KIB))
    b.wait_for("server-0", 20)
    wait_until(lambda: a.kept("server-1") < 10, "an acknowledgement")


def test_the_state_of_a_closed_peer_is_dropped(pair):
    a, b = pair
    a.write("server-1", small(0))
    b.wait_for("server-0", 1)
    b.links.close()
    wait_until(lambda: a.node.in_thread(lambda: "server-1" not in a.messenger._peers), "its end")


def test_messages_for_a_lost_peer_are_dropped(node):
    a = Writer(node, "server-0", redials=False)
    message = large(0, MIB)
    kept = weakref.ref(message.content.values)
    a.write("server-1", message, small(1))
    del message
    a.node.in_thread(lambda: a.messenger.on_peer_gone("server-1"))
    a.links.close()
    gc.collect()
    assert kept() is None


# With broken connections


CUTS = {"both": ("both",), "either": ("near", "far"), "any": ("both", "near", "far")}


def some_cuts(chance: random.Random, seen_by: str) -> list[tuple[int, str]]:
    """Some in the handshake, some in a batch, some in the middle of large arrays."""
    sizes = (100, 700, 3000, 50_000, 400_000, 2_000_000)
    return [
        (chance.randrange(chance.choice(sizes)) + 1, chance.choice(CUTS[seen_by])) for _ in range(RESTARTS)
    ]


QUICK = {
    "heartbeat_s": 0.05,
    "silent_s": 0.2,
    "connect_s": 1.0,
}  # a node that does not see the end of a connection waits


def exchange_despite_cuts(a: Writer, b: Writer, proxies: list[Proxy], chance: random.Random) -> None:
    """Both nodes send until no connection is cut any more; sometimes a node fails its session."""
    sent: dict[Writer, list[Any]] = {a: [], b: []}
    peer = {a: b, b: a}
    while not (a.losses and b.losses and any(proxy.is_spent for proxy in proxies)):
        for one, other in peer.items():
            messages = [
                {0: lambda n: large(n, 300 * KIB), 1: lambda n: long(n, 700 * KIB)}.get(
                    chance.randrange(12), small
                )(len(sent[one]) + place)
                for place in range(chance.choice((1, 3, 10)))
            ]
            sent[one] += messages
            one.write(other.name, *messages)
            if not chance.randrange(6):
                one.links.call_soon(one.links.fail_peer, other.name, ProtocolError("expected something else"))
        for one, other in peer.items():
            some = len(sent[one]) - 40
            if some > 0:
                other.wait_for(one.name, some)
    for one, other in peer.items():
        same(other.wait_for(one.name, len(sent[one])), sent[one])


def delay_delivery(writers: list[Writer], stretch_s: float | None) -> None:
    """With a stretch of 0 each message is delivered in its own turn; a connection may break between them."""
    for one in writers:
        if stretch_s is not None:
            one.messenger._delivery_limit_s = stretch_s


@pytest.mark.parametrize("stretch_s", [None, 0.0])
@pytest.mark.parametrize("seen_by", CUTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_between_client_and_server_every_message_arrives_once_and_in_order_despite_cuts(
    seed, seen_by, stretch_s, proxy, node
):
    """Only the client reconnects, because it does not listen."""
    chance = random.Random(seed)
    client = Writer(node, "client-5", listeners=[], **QUICK)
    server = Writer(node, "server-0", redials=False, **QUICK)
    delay_delivery([client, server], stretch_s)
    between = proxy(server.links.addresses[0], some_cuts(chance, seen_by))
    client.knows("server-0", between.address)
    exchange_despite_cuts(client, server, [between], chance)
    assert all(one.peer == "client-5" for one in server.losses)


@pytest.mark.long(after=4)
@pytest.mark.parametrize("stretch_s", [None, 0.0])
@pytest.mark.parametrize("seen_by", CUTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_between_two_servers_every_message_arrives_once_and_in_order_despite_cuts(
    seed, seen_by, stretch_s, proxy, node
):
    """Both reconnect, often at the same time."""
    chance = random.Random(seed)
    a, b = (Writer(node, f"server-{number}", **QUICK) for number in (0, 1))
    delay_delivery([a, b], stretch_s)
    proxies = []
    for one, other in ((a, b), (b, a)):
        proxies.append(proxy(other.links.addresses[0], some_cuts(chance, seen_by)[: RESTARTS // 2]))
        one.knows(other.name, proxies[-1].address)
    exchange_despite_cuts(a, b, proxies, chance)


# Protocol errors


def batch(
    messages: bytes = b"\x90",
    *,
    connection: Any = 0,
    received: Any = 0,
    number: Any = 0,
    tag: Any = 0,
    long_bytes: Any = 0,
) -> bytes:
    return msgspec.msgpack.encode([connection, received, number, tag, long_bytes, msgspec.Raw(messages)])


def body(*messages: Any) -> bytes:
    return packed(*messages)[0]


def claim(*sizes_bytes: int) -> bytes:
    """A message with attached arrays that are never sent."""
    arrays = [np.zeros(size_bytes // 8) for size_bytes in sizes_bytes]
    return body(PullResult(request=1, namespace="w", first=0, last=1, content=arrays))


BAD: dict[str, list[bytes]] = {
    "nothing": [b""],
    "garbage": [b"\xc1 garbage"],
    "another type": [msgspec.msgpack.encode({"connection": 0})],
    "too few fields": [msgspec.msgpack.encode([0, 0, 0])],
    "a text as a number": [batch(number="1")],
    "messages that are none": [batch(msgspec.msgpack.encode([1]))],
    "messages that are no list": [batch(msgspec.msgpack.encode("garbage"))],
    "messages that end early": [batch(body(small(1))[:-1])],
    "something behind the messages": [batch(body(small(1)) + b"\x90")],
    "a negative connection": [batch(connection=-1)],
    "a negative count": [batch(received=-1)],
    "a negative number": [batch(body(small(1)), number=-2)],
    "a negative tag": [batch(claim(64 * KIB), tag=-1)],
    "a negative length": [batch(long_bytes=-1)],
    "a number that is none": [batch(body(small(1)), number=2**64 - 1)],
    "more than was sent": [batch(received=10**6)],
    "less, then more than was sent": [batch(received=0), batch(received=3)],
    "a message that is too long": [batch(long_bytes=2**40)],
    "a tag twice": [batch(claim(64 * KIB), tag=7), batch(claim(64 * KIB), number=1, tag=7)],
    "a tag twice in a batch": [
        batch(claim(64 * KIB), tag=7),
        batch(claim(128 * KIB, 64 * KIB), number=1, tag=6),
    ],
    "a tag of a long message twice": [batch(long_bytes=10, tag=7), batch(long_bytes=10, number=1, tag=7)],
    "an array that no message may have": [batch(pulled(array_claim(2**50, is_attached=True)))],
}


@pytest.mark.parametrize("bad", BAD)
def test_a_node_that_breaks_the_protocol_is_lost_by_name_and_no_other_node(bad: str, pair, node) -> None:
    a, b = pair
    evil: Node = node("client-666")
    a.write("server-1", small(0))
    for again in (1, 2):
        evil.links.add_peer("server-1", b.links.addresses)
        for payload in BAD[bad]:
            evil.links.send("server-1", payload)
        error = b.lost("client-666", again)
        assert "client-666 broke the protocol" in str(error)
        assert evil.loss().peer == "server-1"
        a.write("server-1", small(again))
    same(b.wait_for("server-0", 3), [small(number) for number in range(3)])
    assert not b.received_messages["client-666"]
    assert not a.losses
    assert [one.peer for one in b.losses] == ["client-666"] * 2


def test_a_batch_that_only_acknowledges_holds_no_message(pair, node) -> None:
    _, b = pair
    evil: Node = node("client-666")
    evil.links.add_peer("server-1", b.links.addresses)
    evil.links.send("server-1", batch(body(small(0)), number=-1))
    evil.links.send("server-1", batch(body(small(1))))
    same(b.wait_for("client-666", 1), [small(1)])
    assert not b.losses


def test_random_bytes_lose_only_their_sender(pair, node) -> None:
    a, b = pair
    evil: Node = node("client-666")
    chance = random.Random(1)
    copied = ReplicateAck(view=1, master=0, serial=3)
    good = batch(body(small(1), copied, large(1, 160), large(2, 20 * KIB)))
    for number in range(200):
        evil.links.add_peer("server-1", b.links.addresses)
        broken = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        evil.links.send("server-1", bytes(broken))
        evil.links.send("server-1", b"")  # the kept session state does not hide this error
        b.lost("client-666", number + 1)
        assert evil.loss().peer == "server-1"
        a.write("server-1", small(number))
    same(b.wait_for("server-0", 200), [small(number) for number in range(200)])
    assert not a.losses
    assert len(b.losses) == 200


def test_a_message_rejected_by_the_receiver_loses_its_sender_and_no_other_message(pair, node) -> None:
    _, b = pair
    evil: Node = node("client-666")
    evil.links.add_peer("server-1", b.links.addresses)
    evil.links.send("server-1", batch(body(small(0), REFUSED, small(1))))
    assert "client-666 broke the protocol: expected anything but that" in str(b.lost("client-666"))
    assert evil.loss().peer == "server-1"
    evil.links.add_peer("server-1", b.links.addresses)
    evil.links.send("server-1", batch(body(small(0), REFUSED, small(1)), connection=1))
    evil.links.send("server-1", batch(body(small(2)), number=1, connection=1))
    same(b.wait_for("client-666", 3), [small(number) for number in range(3)])
    assert len(b.losses) == 1


def test_no_memory_is_allocated_for_a_long_message_before_it_arrives(pair, node) -> None:
    a, b = pair
    evil: Node = node("client-666")
    evil.links.add_peer("server-1", b.links.addresses)
    before_kib = peak_kib()
    for tag in range(4):
        evil.links.send("server-1", batch(long_bytes=2**31, number=tag, tag=tag))
    a.write("server-1", small(0))
    evil.links.send("server-1", b"")
    b.lost("client-666")
    b.wait_for("server-0", 1)
    assert peak_kib() - before_kib < 2**20


def peak_kib() -> int:
    """The peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
