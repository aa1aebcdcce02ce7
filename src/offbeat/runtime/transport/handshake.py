"""Handshake: the first frames of a connection, as two pure state machines.

    dialler                                   acceptor
    HELLO job, me, you, nonce,
          addresses, position          ──►
                                       ◄──    CHALLENGE nonce
    PROOF hmac("dialler", transcript)  ──►
                                       ◄──    WELCOME position, hmac("acceptor", transcript)

At any time the acceptor may answer REFUSE with one line of text instead. Each side proves that it knows the
job's token by an HMAC-SHA256 over its role and the fields that both have sent; the dialler proves it first.
The token itself is never sent. To encrypt the connection is the work of `offbeat.runtime.transport.tls`.

On an encrypted connection the proofs also cover the acceptor's certificate: as the acceptor has it, and as
the dialler has received it. So a man in the middle who shows another certificate, even one of the same
authority, cannot forward proofs.

Both sides send their position in the session that this connection begins or resumes (`SessionPosition`).

This module never touches a socket or a clock, and never accepts a connection before both proofs hold.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from offbeat.errors import ProtocolError
from offbeat.runtime.transport.framing import Frame, FrameKind, encode_frame
from offbeat.wire.known import prime_msgspec_types

NONCE_BYTES = 32
MAX_NAME_CHARACTERS = 256
MAX_LINE_CHARACTERS = 500


class SessionPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of one node in its session with another.

    Attributes:
        session: its own id of the session.
        peer_session: the other node's id of it, if known; "" before the first WELCOME.
        received: how many frames of the other node it has received in this session.
        number: counts the positions that its process has sent, in all sessions, from 1; 0 if it counts none.
        process: id of its process; a process that is started again has another one.
    """

    session: str = ""
    peer_session: str = ""
    received: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    number: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    process: str = ""


class _Hello(msgspec.Struct, forbid_unknown_fields=True):
    job: str
    me: str
    you: str
    nonce: bytes
    addresses: tuple[str, ...]
    position: SessionPosition


class _Challenge(msgspec.Struct, forbid_unknown_fields=True):
    nonce: bytes


class _Proof(msgspec.Struct, forbid_unknown_fields=True):
    proof: bytes


class _Welcome(msgspec.Struct, forbid_unknown_fields=True):
    proof: bytes
    position: SessionPosition


class _Refuse(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    line: str
    has_no_files: bool = False


prime_msgspec_types(_Hello, _Challenge, _Proof, _Welcome, _Refuse)

_T = TypeVar("_T", bound=msgspec.Struct)


class RefusedError(ProtocolError):
    """The acceptor answered REFUSE; the text is its line.

    Attributes:
        is_out_of_descriptors: it refuses only because it can open no more files.
    """

    def __init__(self, line: str, *, has_no_files: bool = False) -> None:
        super().__init__(line)
        self.is_out_of_descriptors = has_no_files


def check_node_name(name: str) -> str:
    """Return `name` if it is a valid name of a node.

    Raises:
        ValueError: it is empty, too long or not printable.
    """
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise ValueError(
            f"expected a printable name of 1 to {MAX_NAME_CHARACTERS} characters, got {name[:300]!r}"
        )
    return name


def new_id() -> str:
    """Return a random id for a process or a new session."""
    return secrets.token_hex(8)


def encode_refusal(line: str, *, is_out_of_descriptors: bool = False) -> bytes:
    """Return the frame that refuses a connection with one line; see `RefusedError`."""
    return _frame(FrameKind.REFUSE, _Refuse(_one_line(line), is_out_of_descriptors))


class DiallerHandshake:
    """The side that opened the connection.

    Args:
        addresses: where this node listens, for the acceptor to connect to if the connection breaks.
        position: of this node in the session.
        certificate: digest of the acceptor's certificate; empty where the connection is not encrypted.

    Attributes:
        peer_position: the acceptor's position, once it has proved that it knows the token; None before.
    """

    def __init__(
        self,
        *,
        job: str,
        token: str,
        node: str,
        peer: str,
        addresses: Sequence[str] = (),
        position: SessionPosition | None = None,
        certificate: bytes = b"",
    ) -> None:
        self.peer_position: SessionPosition | None = None
        self._token, self._certificate = token, certificate
        self.position = SessionPosition(new_id()) if position is None else position
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._hello = _Hello(job, node, peer, nonce, tuple(addresses), self.position)
        self._nonce: bytes | None = None

    def hello(self) -> bytes:
        """Return the first frame to send."""
        return _frame(FrameKind.HELLO, self._hello)

    def on_frame(self, frame: Frame) -> bytes:
        """Process a frame and return the bytes to answer with, which may be empty.

        Raises:
            RefusedError: the acceptor refuses the connection, with its line.
            ProtocolError: the acceptor violates the protocol or does not know the token.
        """
        if frame.kind == FrameKind.REFUSE:
            refused = _decode(frame, _Refuse)
            raise RefusedError(_one_line(refused.line), has_no_files=refused.has_no_files)
        if self._nonce is None:
            self._nonce = _checked_nonce(_expect(frame, FrameKind.CHALLENGE, _Challenge).nonce)
            proof = _proof(self._token, self._certificate, "dialler", self._hello, self._nonce)
            return _frame(FrameKind.PROOF, _Proof(proof))
        answer = _expect(frame, FrameKind.WELCOME, _Welcome)
        proof = _proof(self._token, self._certificate, "acceptor", self._hello, self._nonce, answer.position)
        if self.peer_position is not None or not hmac.compare_digest(answer.proof, proof):
            raise ProtocolError("it does not prove that it knows the job's token")
        self.peer_position = answer.position
        return b""


class AcceptorHandshake:
    """The side that accepted the connection.

    Args:
        certificate: digest of this node's certificate; empty where the connection is not encrypted.

    Attributes:
        peer: the name of the dialler once it has proved that it knows the token, None before.
        has_valid_hello: the dialler has sent HELLO, for this job and this node.
    """

    def __init__(self, *, job: str, token: str, node: str, certificate: bytes = b"") -> None:
        self.peer: str | None = None
        self.has_valid_hello = False
        self._job, self._token, self._me = job, token, node
        self._certificate = certificate
        self._hello: _Hello | None = None
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def on_frame(self, frame: Frame) -> bytes:
        """Process a frame and return the bytes to answer with, which may be empty.

        Raises:
            ProtocolError: the connection is to be refused; the text is the line for REFUSE.
        """
        if self._hello is None:
            self._hello = self._checked(_expect(frame, FrameKind.HELLO, _Hello))
            self.has_valid_hello = True
            return _frame(FrameKind.CHALLENGE, _Challenge(self._nonce))
        if self.peer is not None:
            raise ProtocolError(f"expected no frame before WELCOME, got {FrameKind(frame.kind).name}")
        answer = _expect(frame, FrameKind.PROOF, _Proof)
        proof = _proof(self._token, self._certificate, "dialler", self._hello, self._nonce)
        if not hmac.compare_digest(answer.proof, proof):
            raise ProtocolError(f"{self._hello.me} does not prove that it knows the token of job {self._job}")
        self.peer = self._hello.me
        return b""

    @property
    def position(self) -> SessionPosition:
        """The dialler's position in the session, from its HELLO."""
        assert self._hello is not None
        return self._hello.position

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the dialler listens, from its HELLO."""
        assert self._hello is not None
        return self._hello.addresses

    def welcome(self, position: SessionPosition) -> bytes:
        """Return the frame that accepts the dialler; only after it has proved that it knows the token."""
        if self.peer is None or self._hello is None:
            raise ProtocolError("expected a proof before WELCOME")
        proof = _proof(self._token, self._certificate, "acceptor", self._hello, self._nonce, position)
        return _frame(FrameKind.WELCOME, _Welcome(proof, position))

    def _checked(self, hello: _Hello) -> _Hello:
        try:
            check_node_name(hello.me)
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


def _frame(kind: FrameKind, payload: msgspec.Struct) -> bytes:
    return encode_frame(kind, msgspec.msgpack.encode(payload))


def _expect(frame: Frame, kind: FrameKind, type_: type[_T]) -> _T:
    if frame.kind != kind:
        raise ProtocolError(f"expected {kind.name}, got {FrameKind(frame.kind).name}")
    return _decode(frame, type_)


def _decode(frame: Frame, type_: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(frame.payload or b"", type=type_)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"a {FrameKind(frame.kind).name} frame that does not decode: {error}") from error


def _checked_nonce(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"expected a nonce of {NONCE_BYTES} bytes, got {len(nonce)}")
    return nonce


def _proof(
    token: str,
    certificate: bytes,
    role: str,
    hello: _Hello,
    nonce: bytes,
    position: SessionPosition | None = None,
) -> bytes:
    transcript = msgspec.msgpack.encode((role, hello, nonce, position, certificate))
    return hmac.digest(token.encode(), transcript, "sha256")


def _one_line(text: str) -> str:
    """Shorten text from the network and replace its control characters, for messages."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_LINE_CHARACTERS])
