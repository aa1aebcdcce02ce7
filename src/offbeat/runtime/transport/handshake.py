"""Handshake: the first frames of a connection, as two pure state machines.

    dialler                                   acceptor
    HELLO job, me, you, nonce,
          addresses, position          ──►
                                       ◄──    CHALLENGE nonce
    PROOF hmac("dialler", transcript)  ──►
                                       ◄──    WELCOME position, hmac("acceptor", transcript)

At any time the acceptor may answer REFUSE with one line of text instead. Each side proves that it knows the
job's token by an HMAC-SHA256 over its role and the fields that both have sent; the dialler proves it first.
The token itself is never sent. Later frames are not encrypted: that is TLS's work.

Both sides send their position in the session that this connection begins or resumes (`Position`).

This module never touches a socket or a clock, and never accepts a connection before both proofs hold.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from offbeat.errors import ProtocolError
from offbeat.runtime.transport.framing import Frame, Kind, encode
from offbeat.wire.known import make_known

NONCE_BYTES = 32
MAX_NAME_CHARACTERS = 256
MAX_LINE_CHARACTERS = 500


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of one node in its session with another.

    Attributes:
        session: its own id of the session.
        peer_session: the other node's id of it, if known; "" before the first WELCOME.
        received: how many frames of the other node it has received in this session.
    """

    session: str = ""
    peer_session: str = ""
    received: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class _Hello(msgspec.Struct, forbid_unknown_fields=True):
    job: str
    me: str
    you: str
    nonce: bytes
    addresses: tuple[str, ...]
    position: Position


class _Challenge(msgspec.Struct, forbid_unknown_fields=True):
    nonce: bytes


class _Proof(msgspec.Struct, forbid_unknown_fields=True):
    proof: bytes


class _Welcome(msgspec.Struct, forbid_unknown_fields=True):
    proof: bytes
    position: Position


class _Refuse(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    line: str
    has_no_files: bool = False


make_known(_Hello, _Challenge, _Proof, _Welcome, _Refuse)

_T = TypeVar("_T", bound=msgspec.Struct)


class RefusedError(ProtocolError):
    """The acceptor answered REFUSE; the text is its line.

    Attributes:
        has_no_files: it refuses only because it can open no more files.
    """

    def __init__(self, line: str, *, has_no_files: bool = False) -> None:
        super().__init__(line)
        self.has_no_files = has_no_files


def check_name(name: str) -> str:
    """Return `name` if it is a valid name of a node.

    Raises:
        ValueError: it is empty, too long or not printable.
    """
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise ValueError(
            f"expected a printable name of 1 to {MAX_NAME_CHARACTERS} characters, got {name[:300]!r}"
        )
    return name


def new_session() -> str:
    """Return a random id for a new session."""
    return secrets.token_hex(8)


def refuse(line: str, *, has_no_files: bool = False) -> bytes:
    """Return the frame that refuses a connection with one line; see `RefusedError`."""
    return _frame(Kind.REFUSE, _Refuse(_one_line(line), has_no_files))


class Dialler:
    """The side that opened the connection.

    Args:
        addresses: where this node listens, for the acceptor to dial if the connection breaks.
        position: of this node in the session.

    Attributes:
        welcome: the acceptor's position, once it has proved that it knows the token; None before.
    """

    def __init__(
        self,
        *,
        job: str,
        token: str,
        me: str,
        you: str,
        addresses: Sequence[str] = (),
        position: Position | None = None,
    ) -> None:
        self.welcome: Position | None = None
        self._token = token
        self.position = Position(new_session()) if position is None else position
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._hello = _Hello(job, me, you, nonce, tuple(addresses), self.position)
        self._nonce: bytes | None = None

    def hello(self) -> bytes:
        """Return the first frame to send."""
        return _frame(Kind.HELLO, self._hello)

    def receive(self, frame: Frame) -> bytes:
        """Process a frame and return the bytes to answer with, which may be empty.

        Raises:
            RefusedError: the acceptor refuses the connection, with its line.
            ProtocolError: the acceptor violates the protocol or does not know the token.
        """
        if frame.kind == Kind.REFUSE:
            refused = _decode(frame, _Refuse)
            raise RefusedError(_one_line(refused.line), has_no_files=refused.has_no_files)
        if self._nonce is None:
            self._nonce = _checked_nonce(_expect(frame, Kind.CHALLENGE, _Challenge).nonce)
            return _frame(Kind.PROOF, _Proof(_proof(self._token, "dialler", self._hello, self._nonce)))
        answer = _expect(frame, Kind.WELCOME, _Welcome)
        proof = _proof(self._token, "acceptor", self._hello, self._nonce, answer.position)
        if self.welcome is not None or not hmac.compare_digest(answer.proof, proof):
            raise ProtocolError("it does not prove that it knows the job's token")
        self.welcome = answer.position
        return b""


class Acceptor:
    """The side that was dialled.

    Attributes:
        peer: the name of the dialler once it has proved that it knows the token, None before.
        is_of_this_job: the dialler has sent HELLO, for this job and this node.
    """

    def __init__(self, *, job: str, token: str, me: str) -> None:
        self.peer: str | None = None
        self.is_of_this_job = False
        self._job, self._token, self._me = job, token, me
        self._hello: _Hello | None = None
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def receive(self, frame: Frame) -> bytes:
        """Process a frame and return the bytes to answer with, which may be empty.

        Raises:
            ProtocolError: the connection is to be refused; the text is the line for REFUSE.
        """
        if self._hello is None:
            self._hello = self._checked(_expect(frame, Kind.HELLO, _Hello))
            self.is_of_this_job = True
            return _frame(Kind.CHALLENGE, _Challenge(self._nonce))
        if self.peer is not None:
            raise ProtocolError(f"expected no frame before WELCOME, got {Kind(frame.kind).name}")
        answer = _expect(frame, Kind.PROOF, _Proof)
        if not hmac.compare_digest(answer.proof, _proof(self._token, "dialler", self._hello, self._nonce)):
            raise ProtocolError(f"{self._hello.me} does not prove that it knows the token of job {self._job}")
        self.peer = self._hello.me
        return b""

    @property
    def position(self) -> Position:
        """The dialler's position in the session, from its HELLO."""
        assert self._hello is not None
        return self._hello.position

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the dialler listens, from its HELLO."""
        assert self._hello is not None
        return self._hello.addresses

    def welcome(self, position: Position) -> bytes:
        """Return the frame that accepts the dialler; only after it has proved that it knows the token."""
        if self.peer is None or self._hello is None:
            raise ProtocolError("expected a proof before WELCOME")
        proof = _proof(self._token, "acceptor", self._hello, self._nonce, position)
        return _frame(Kind.WELCOME, _Welcome(proof, position))

    def _checked(self, hello: _Hello) -> _Hello:
        try:
            check_name(hello.me)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        _checked_nonce(hello.nonce)
        if hello.job != self._job:
            raise ProtocolError(f"this is job {self._job}, not job {_one_line(hello.job)}")
        if hello.you != self._me:
            raise ProtocolError(f"this is {self._me}, not {_one_line(hello.you)}")
        if hello.me == self._me:
            raise ProtocolError(f"this is {self._me} itself, a second node needs a name of its own")
        return hello


def _frame(kind: Kind, payload: msgspec.Struct) -> bytes:
    return encode(kind, msgspec.msgpack.encode(payload))


def _expect(frame: Frame, kind: Kind, type_: type[_T]) -> _T:
    if frame.kind != kind:
        raise ProtocolError(f"expected {kind.name}, got {Kind(frame.kind).name}")
    return _decode(frame, type_)


def _decode(frame: Frame, type_: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(frame.payload or b"", type=type_)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"a {Kind(frame.kind).name} frame that does not decode: {error}") from error


def _checked_nonce(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"expected a nonce of {NONCE_BYTES} bytes, got {len(nonce)}")
    return nonce


def _proof(token: str, role: str, hello: _Hello, nonce: bytes, position: Position | None = None) -> bytes:
    transcript = msgspec.msgpack.encode((role, hello, nonce, position))
    return hmac.digest(token.encode(), transcript, "sha256")


def _one_line(text: str) -> str:
    """Shorten text from the network and replace its control characters, for messages."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_LINE_CHARACTERS])
