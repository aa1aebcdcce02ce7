"""Who may speak: the first frames of a connection, as two pure state machines.

    dialler                                   acceptor
    HELLO job, me, you, nonce          ──►
                                       ◄──    CHALLENGE nonce
    PROOF hmac("dialler", transcript)  ──►
                                       ◄──    WELCOME hmac("acceptor", transcript)

At any time the acceptor may answer REFUSE and one line instead. Both sides prove that they know the job's
token by an HMAC-SHA256 over their role, the job, both names and both nonces; who dials proves it first. The
token itself never travels. What follows is not encrypted: that is TLS's work.

This module never touches a socket or a clock, and never lets a connection through before both proofs hold.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TypeVar

import msgspec

from offbeat.errors import ProtocolError
from offbeat.known import make_known
from offbeat.runtime.framing import Frame, Kind, encode

NONCE_BYTES = 32
MAX_NAME_CHARACTERS = 256
MAX_LINE_CHARACTERS = 500


class _Hello(msgspec.Struct, forbid_unknown_fields=True):
    job: str
    me: str
    you: str
    nonce: bytes


class _Challenge(msgspec.Struct, forbid_unknown_fields=True):
    nonce: bytes


class _Proof(msgspec.Struct, forbid_unknown_fields=True):
    proof: bytes


class _Refuse(msgspec.Struct, forbid_unknown_fields=True):
    line: str


make_known(_Hello, _Challenge, _Proof, _Refuse)

_T = TypeVar("_T", bound=msgspec.Struct)


class RefusedError(ProtocolError):
    """The other side has answered REFUSE; the text is its line."""


def check_name(name: str) -> str:
    """Return `name` if it can be the name of a node.

    Raises:
        ValueError: it is empty, too long or not printable.
    """
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise ValueError(
            f"expected a printable name of 1 to {MAX_NAME_CHARACTERS} characters, got {name[:300]!r}"
        )
    return name


def refuse(line: str) -> bytes:
    """Return the frame that refuses a connection with one line."""
    return _frame(Kind.REFUSE, _Refuse(_one_line(line)))


class Dialler:
    """The side that opened the connection.

    Attributes:
        welcome: the other side has proved itself and lets us in.
    """

    def __init__(self, *, job: str, token: str, me: str, you: str) -> None:
        self.welcome = False
        self._token = token
        self._hello = _Hello(job, me, you, secrets.token_bytes(NONCE_BYTES))
        self._nonce: bytes | None = None

    def hello(self) -> bytes:
        """Return the first frame to send."""
        return _frame(Kind.HELLO, self._hello)

    def receive(self, frame: Frame) -> bytes:
        """Take a frame and return what to send in answer, which may be nothing.

        Raises:
            RefusedError: the other side refuses, with its line.
            ProtocolError: the other side breaks the protocol or does not know the token.
        """
        if frame.kind == Kind.REFUSE:
            raise RefusedError(_one_line(_decode(frame, _Refuse).line))
        if self._nonce is None:
            self._nonce = _checked_nonce(_expect(frame, Kind.CHALLENGE, _Challenge).nonce)
            return _frame(Kind.PROOF, _Proof(_proof(self._token, "dialler", self._hello, self._nonce)))
        answer = _expect(frame, Kind.WELCOME, _Proof)
        if self.welcome or not hmac.compare_digest(
            answer.proof, _proof(self._token, "acceptor", self._hello, self._nonce)
        ):
            raise ProtocolError("it does not prove that it knows the job's token")
        self.welcome = True
        return b""


class Acceptor:
    """The side that was dialled.

    Attributes:
        peer: the name of the other side once it has proved itself, None before.
    """

    def __init__(self, *, job: str, token: str, me: str) -> None:
        self.peer: str | None = None
        self._job, self._token, self._me = job, token, me
        self._hello: _Hello | None = None
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def receive(self, frame: Frame) -> bytes:
        """Take a frame and return what to send in answer, which may be nothing.

        Raises:
            ProtocolError: the connection is to be refused; the text is the line that says why.
        """
        if self._hello is None:
            self._hello = self._checked(_expect(frame, Kind.HELLO, _Hello))
            return _frame(Kind.CHALLENGE, _Challenge(self._nonce))
        if self.peer is not None:
            raise ProtocolError(f"expected nothing before WELCOME, got {Kind(frame.kind).name}")
        answer = _expect(frame, Kind.PROOF, _Proof)
        if not hmac.compare_digest(answer.proof, _proof(self._token, "dialler", self._hello, self._nonce)):
            raise ProtocolError(f"{self._hello.me} does not prove that it knows the token of job {self._job}")
        self.peer = self._hello.me
        return b""

    def welcome(self) -> bytes:
        """Return the frame that lets the other side in; only after it has proved itself."""
        if self.peer is None or self._hello is None:
            raise ProtocolError("expected a proof before WELCOME")
        return _frame(Kind.WELCOME, _Proof(_proof(self._token, "acceptor", self._hello, self._nonce)))

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


def _proof(token: str, role: str, hello: _Hello, nonce: bytes) -> bytes:
    transcript = msgspec.msgpack.encode((role, hello.job, hello.me, hello.you, hello.nonce, nonce))
    return hmac.digest(token.encode(), transcript, "sha256")


def _one_line(text: str) -> str:
    """Make text from the network fit to be shown."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_LINE_CHARACTERS])
