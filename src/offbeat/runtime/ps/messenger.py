"""Messages between the nodes of a parameter server: in order and once each, whatever connections break.

Messages go out together with others for the same node, and with word of what has come. Large arrays travel
beside them, from memory to memory, and a message is handed on when all of its arrays have come. When a
connection breaks, what may have been lost is sent again.

Everything here runs in the links' thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from offbeat.errors import ProtocolError
from offbeat.policies.ps.ordered_channel import Channel, Packet
from offbeat.runtime.ps.packing import Array, Packed, Packer, Unpacker
from offbeat.runtime.transport.endpoint import STRETCH_S, Endpoint
from offbeat.runtime.transport.framing import MAX_MESSAGE_BYTES
from offbeat.runtime.transport.inbox import OnData, OnShared
from offbeat.runtime.transport.staging import MIN_STAGED_BYTES, Staging

_LETTER_BYTES: Final = MAX_MESSAGE_BYTES // 2  # of messages in a letter
_LONG_BYTES_MAX: Final = 2**31
_NONE: Final = msgspec.Raw(msgspec.msgpack.encode([]))
_UNTOLD_MAX: Final = 64  # letters that came, after which the sender is told in a letter of its own
_UNTOLD_BYTES_MAX: Final = 8 * 1024 * 1024
# That came beside letters, after which answers go out at once: it took as long as they do on their way, and
# the other node may wait for them to go on.
_LATE_BYTES: Final = 512 * 1024
# Beside letters that went out: a letter overtakes what travels beside those before it, and a receiver that is
# told of much ahead takes memory for all of it, instead of the same again and again, which is in its cache.
_BESIDE_BYTES_MAX: Final = 8 * 1024 * 1024
_NEVER_S: Final = float("inf")  # links lose nothing but with a connection,
_NOW_S: Final = 0.0  # so it does not matter when anything was sent


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Letter(msgspec.Struct, array_like=True):
    """A control message between two nodes.

    Attributes:
        connection: counts the connections between the two that broke, as far as the sender knows.
        received: how many letters of the receiver's have come.
        number: of this letter among the sender's; -1 where there are no messages in it.
        tag: of the first array that travels beside; the others follow.
        long_bytes: the length of the messages, where these travel beside, too, as the first; else 0.
        messages: as `Packer` packs them.
    """

    connection: _Count
    received: _Count
    number: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
    tag: _Count
    long_bytes: _Count
    messages: msgspec.Raw


_decoder: Final = msgspec.msgpack.Decoder(_Letter)


@dataclass(slots=True, eq=False)
class _Coming:
    """A letter, of which something may be missing."""

    number: int
    messages: list[Any]
    missing_bytes: int = 0
    size_bytes: int = 0  # of what travels beside


@dataclass(slots=True, eq=False)
class _Correspondent:
    """What is known of another node."""

    channel: Channel = field(default_factory=lambda: Channel(resend_s=_NEVER_S, resend_max_s=_NEVER_S))
    outgoing: deque[Any] = field(default_factory=deque)  # messages that are in no letter yet
    beside: dict[int, int] = field(default_factory=dict)  # bytes by tag, of what is still to go out
    beside_bytes: int = 0
    coming: deque[_Coming] = field(default_factory=deque)
    due: deque[Any] = field(default_factory=deque)  # messages that have come and are to be handed on
    is_put_off: bool = False
    connection: int = 0
    untold: int = 0
    untold_bytes: int = 0


Place = Callable[[str, Any, Array], Array | None]


def nowhere(node: str, message: Any, array: Array) -> Array | None:
    """Leave an array where it is."""
    return None


Show = Callable[[str, Any, Array, Array], bool]


def never(node: str, message: Any, array: Array, shown: Array) -> bool:
    """Let everything be copied."""
    return False


class Post:
    """What a node and the others say to each other.

    Args:
        endpoint: the node's links.
        kinds: of the messages that may come.
        on_message: (node, message), in the order in which that node sent them; may raise ProtocolError.
        place: (node, message, array): puts another array like this one, which is to come beside the message,
            in its place there, and returns it; None to leave it.
        gather: called right before what was sent is written; may send more.
        show: (node, message, array, shown): takes an array that lies in the sender's memory, and may be read
            there until the message has been handed on, in the place of the one that was to come; returns
            whether it does, else it is copied.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        kinds: Collection[type],
        on_message: Callable[[str, Any], None],
        place: Place = nowhere,
        gather: Callable[[], None] = lambda: None,
        show: Show = never,
    ) -> None:
        self._endpoint, self._on_message = endpoint, on_message
        self._place, self._gather, self._show = place, gather, show
        self._packer, self._unpacker = Packer(), Unpacker(kinds)
        self._encoder = msgspec.msgpack.Encoder()
        self._known: dict[str, _Correspondent] = {}
        self._to_write: list[str] = []
        self._is_about_to_write = False
        self._staging = Staging(endpoint)
        self._tag = 0
        self._stretch_s = STRETCH_S

    def send(self, to: str, message: Any) -> None:
        """Send a message, with others of this turn."""
        one = self._of(to)
        if not one.outgoing:
            self._write_soon(to)
        one.outgoing.append(message)

    def write_soon(self) -> None:
        """Gather and write when nothing more has come for now."""
        if not self._is_about_to_write:
            self._is_about_to_write = True
            self._endpoint.when_idle(self._write_all)

    def hear(self, peer: str, payload: bytes) -> None:
        """Take a control message that is not the coordinator's.

        Raises:
            ProtocolError: no node of this version says that.
        """
        try:
            letter = _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"expected a letter of a parameter server's node: {error}") from None
        one = self._of(peer)
        one.channel.acknowledge(letter.received, _NOW_S)
        if letter.connection > one.connection:
            one.connection = letter.connection
            one.coming.clear()
            self._write(peer, one, one.channel.again(_NOW_S))
        if letter.number < 0:
            return
        if letter.long_bytes:
            self._expect_messages(peer, one, letter)
            return
        messages, beside = self._unpacker.unpack(letter.messages)
        coming = _Coming(letter.number, messages)
        one.coming.append(coming)
        if beside:
            if len(beside) == 1 and (other := self._place(peer, messages[-1], beside[0])) is not None:
                beside = [other]
            self._expect_arrays(peer, one, coming, beside, letter.tag)
        else:
            self._hand_on(peer, one)

    def lost(self, peer: str) -> None:
        """A connection broke; what was under way on it will come again."""
        self._staging.lost(peer)
        one = self._known.get(peer)
        if one is not None:
            one.coming.clear()
            one.beside.clear()
            one.beside_bytes = 0

    def again(self, peer: str) -> None:
        """Send again, on a new connection, what may have been lost; the other node does likewise."""
        one = self._of(peer)
        one.connection += 1
        self._write(peer, one, one.channel.again(_NOW_S))

    def forget(self, peer: str) -> None:
        """This node is gone: nothing is kept for it any more."""
        self._known.pop(peer, None)
        self._staging.lost(peer)

    # Out -------------------------------------------------------------------------------------------------

    def _of(self, peer: str) -> _Correspondent:
        one = self._known.get(peer)
        if one is None:
            one = self._known[peer] = _Correspondent()
        return one

    def _write_soon(self, peer: str) -> None:
        self._to_write.append(peer)
        self.write_soon()

    def _write_all(self) -> None:
        self._gather()
        self._is_about_to_write = False
        peers, self._to_write = self._to_write, []
        for peer in peers:
            one = self._known.get(peer)
            if one is None:
                continue
            if one.outgoing and one.beside_bytes < _BESIDE_BYTES_MAX:
                for lot in self._packer.pack(_taken(one.outgoing)):
                    self._write(peer, one, one.channel.send([lot], _NOW_S))
                    if one.beside_bytes >= _BESIDE_BYTES_MAX:
                        break
            elif one.untold:
                self._write(peer, one, [])

    def _write(self, peer: str, one: _Correspondent, packets: list[Packet]) -> None:
        """Send letters; without any, only word of what has come."""
        one.untold = one.untold_bytes = 0
        if not packets:
            letter = _Letter(one.connection, one.channel.received, -1, 0, 0, _NONE)
            self._endpoint.send(peer, self._encoder.encode(letter))
        for packet in packets:
            packed: Packed = packet.message
            beside: list[Array | bytes] = list(packed.beside)
            letter = _Letter(one.connection, packet.received, packet.number, self._tag, 0, packed.messages)
            long_bytes = len(memoryview(packed.messages))
            if long_bytes > _LETTER_BYTES:
                letter.long_bytes, letter.messages = long_bytes, _NONE
                beside.insert(0, bytes(packed.messages))
            self._tag += len(beside)
            self._endpoint.send(peer, self._encoder.encode(letter))
            for tag, array in enumerate(beside, letter.tag):
                self._put(peer, one, tag, memoryview(array).cast("B"))  # type: ignore[arg-type]

    def _put(self, peer: str, one: _Correspondent, tag: int, data: memoryview) -> None:
        one.beside[tag] = len(data)
        one.beside_bytes += len(data)
        done = partial(self._went, peer, one, tag)
        is_shared = len(data) >= MIN_STAGED_BYTES and self._endpoint.shares_memory(peer)
        if is_shared and not self._endpoint.is_lent(data):
            self._staging.put(peer, tag, data, done)
        else:
            self._endpoint.put(peer, tag, data, done=done, whole=True)

    def _went(self, peer: str, one: _Correspondent, tag: int) -> None:
        """Something has gone out that travels beside a letter."""
        one.beside_bytes -= one.beside.pop(tag, 0)
        if one.outgoing and one.beside_bytes < _BESIDE_BYTES_MAX:
            self._write_soon(peer)

    # In --------------------------------------------------------------------------------------------------

    def _expect_messages(self, peer: str, one: _Correspondent, letter: _Letter) -> None:
        """Wait for messages that are too long for a letter."""
        if not 0 < letter.long_bytes <= _LONG_BYTES_MAX:
            raise ProtocolError(f"expected messages of 1 to {_LONG_BYTES_MAX} bytes, got {letter.long_bytes}")
        coming = _Coming(letter.number, [], letter.long_bytes, letter.long_bytes)
        messages = np.empty(letter.long_bytes, np.uint8).data  # takes no memory before it comes

        def came(_: int, length: int) -> None:
            coming.missing_bytes -= length
            if not coming.missing_bytes:
                coming.messages, beside = self._unpacker.unpack(messages)
                self._expect_arrays(peer, one, coming, beside, letter.tag + 1)
                self._hand_on(peer, one)

        one.coming.append(coming)
        self._expect(peer, letter.tag, messages, came)

    def _expect_arrays(
        self, peer: str, one: _Correspondent, coming: _Coming, beside: list[Array], tag: int
    ) -> None:
        def came(_: int, length: int) -> None:
            coming.missing_bytes -= length
            if not coming.missing_bytes:
                self._hand_on(peer, one)

        for array in beside:
            coming.missing_bytes += array.nbytes
            coming.size_bytes += array.nbytes
        shown = partial(self._shown, peer, one, coming, beside[0]) if len(beside) == 1 else None
        for place, array in enumerate(beside, tag):
            self._expect(peer, place, memoryview(array), came, shown)  # type: ignore[arg-type]

    def _shown(
        self, peer: str, one: _Correspondent, coming: _Coming, array: Array, offset: int, source: memoryview
    ) -> None:
        """The one array beside a letter, or some of it, lies in the sender's memory, and is there for now."""
        coming.missing_bytes -= len(source)
        is_first = bool(one.coming) and one.coming[0] is coming
        is_next = is_first and not one.due and len(source) == array.nbytes  # so it is handed on right here
        if is_next:
            view = np.frombuffer(source, array.dtype).reshape(array.shape)
            view.flags.writeable = False
        if not (is_next and self._show(peer, coming.messages[-1], array, view)):
            memoryview(array).cast("B")[offset : offset + len(source)] = source  # type: ignore[arg-type]
        if not coming.missing_bytes:
            self._hand_on(peer, one, at_once=is_next)

    def _expect(
        self, peer: str, tag: int, into: memoryview, came: OnData, shown: OnShared | None = None
    ) -> None:
        try:
            self._endpoint.expect(peer, tag, into, came, shown)
        except ValueError as error:  # of its peers' tags a node knows only what they say
            raise ProtocolError(str(error)) from None

    def _hand_on(self, peer: str, one: _Correspondent, *, at_once: bool = False) -> None:
        """Hand on what has come, in order; one message that is refused is not the fault of the others.

        Where that takes long, the rest is put off until what came of the first messages has gone out, so that
        the other node has work meanwhile; but not if all are to be handed on at once.
        """
        while one.coming and not one.coming[0].missing_bytes:
            coming = one.coming.popleft()
            for messages in one.channel.take(coming.number, coming.messages):
                one.due.extend(messages)
            one.untold += 1
            one.untold_bytes += coming.size_bytes
        refused: ProtocolError | None = None
        limit_s = monotonic() + self._stretch_s
        while one.due and self._known.get(peer) is one:
            try:
                self._on_message(peer, one.due.popleft())
            except ProtocolError as error:
                refused = refused or error
            if one.due and not at_once and monotonic() >= limit_s:
                self._put_off(peer, one)
                break
        if one.untold >= _UNTOLD_MAX or one.untold_bytes >= _UNTOLD_BYTES_MAX:
            self._write_soon(peer)
        if one.untold_bytes >= _LATE_BYTES and one.outgoing:
            self._write_all()
        if refused is not None:
            raise refused

    def _put_off(self, peer: str, one: _Correspondent) -> None:
        """Let go out what there is, and then hand on the rest."""
        self._write_all()
        if not one.is_put_off:
            one.is_put_off = True
            self._endpoint.call(self._go_on, peer, one)

    def _go_on(self, peer: str, one: _Correspondent) -> None:
        one.is_put_off = False
        try:
            self._hand_on(peer, one)
        except ProtocolError as error:
            self._endpoint.accuse(peer, error)


def _taken(messages: deque[Any]) -> Iterator[Any]:
    """Yield messages, each no longer kept when it is."""
    while messages:
        yield messages.popleft()
