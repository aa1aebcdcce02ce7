"""TLS 1.3 of a node's TCP connections: credentials from PEM files, and a socket that encrypts.

Theory of operation
-------------------

Both ends of a connection show a certificate of one certificate authority (CA). Names in certificates mean
nothing here: which node of which job it is, each end proves by the handshake inside of the encrypted
connection, whose proofs cover the acceptor's certificate (`offbeat.runtime.transport.handshake`). Session
tickets are off, since no connection resumes another one's keys.

`TlsSocket` stands between the send scheduler, which may change its mind about what goes next until the kernel
has accepted it, and TLS, which must not: a record that the kernel did not accept has to be offered again,
unchanged, before anything else. So `send_views` copies up to `WRITE_BYTES`, reports them as accepted, and
keeps them in `unsent` until they are wholly out; until then it accepts nothing more.

TLS decrypts whole records, and a record may hold more than there was room for. epoll does not know of such
bytes: after a read, and before waiting for a socket, `pending()` has to be looked at.

Unix sockets and shared memory join processes on one host, and are never encrypted.

This module never blocks, and never accepts an end without a certificate of the CA.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from offbeat.errors import OffbeatError, ProtocolError, describe_os_error
from offbeat.runtime.transport.io_loop import EPOLL_READ, EPOLL_WRITE

MAX_RECORD_BYTES = 16 * 1024  # of payload (RFC 8446, section 5.1)
# Copied, encrypted and then not overtaken any more; as many as the kernel may hold unsent of a connection.
WRITE_BYTES = 128 * 1024

_NO_TLS_REASONS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
_CERTIFICATE_BEGIN, _CERTIFICATE_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


class PlainPeerError(ProtocolError):
    """The other end does not use TLS."""


class TlsSocket(ssl.SSLSocket):
    """A connected, non-blocking socket that encrypts; made by `TlsCredentials.encrypt`.

    Attributes:
        is_secure: the TLS handshake is done: the other end has a certificate of the CA.
        unsent: bytes that `send_views` has accepted and the kernel has not.
    """

    is_secure = False
    unsent = b""

    def continue_handshake(self) -> int:
        """Continue the TLS handshake; return the event to wait for, 0 once it is done.

        Raises:
            ProtocolError: one end refuses the other; the text gives the reason.
            PlainPeerError: that is why; what it understands can be sent with `send_plain`.
            OSError: the connection is broken.
        """
        try:
            self.do_handshake()
        except ssl.SSLWantReadError:
            return EPOLL_READ
        except ssl.SSLWantWriteError:
            return EPOLL_WRITE
        except ssl.SSLEOFError:
            raise ConnectionResetError("the connection was closed during the TLS handshake") from None
        except ssl.SSLError as error:
            kind = PlainPeerError if error.reason in _NO_TLS_REASONS else ProtocolError
            raise kind(explain_tls_error(error)) from error
        self.is_secure = True
        return 0

    def send_plain(self, data: bytes) -> None:
        """Send a few bytes as they are, to an end that does not use TLS.

        Raises:
            OSError: they cannot be sent.
        """
        socket.socket.send(self, data)

    def send_views(self, views: Sequence[memoryview]) -> int:
        """Accept up to `WRITE_BYTES` bytes; return how many. Nothing of the views is needed afterwards.

        Raises:
            BlockingIOError: the kernel has not yet accepted what was accepted before.
            OSError: nothing more can be sent.
        """
        if self.unsent:
            self.send_unsent()
        room, parts = WRITE_BYTES, []
        for view in views:
            parts.append(view[:room])
            room -= len(parts[-1])
            if not room:
                break
        self.unsent = b"".join(parts)
        with suppress(OSError):  # the bytes are accepted: a failure is that of the next call
            self.send_unsent()
        return WRITE_BYTES - room

    def send_unsent(self) -> None:
        """Send the rest of what was accepted.

        Raises:
            BlockingIOError: the kernel accepts no more for now.
            OSError: nothing more can be sent.
        """
        while self.unsent:
            try:
                self.unsent = self.unsent[self.send(self.unsent) :]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        """Receive into the buffers, in order; return how many bytes, 0 at the end of the stream.

        Decrypted bytes may be left over where the buffers are full: see `pending`.

        Raises:
            BlockingIOError: no byte is available.
            OSError: none can come any more.
        """
        received = 0
        for buffer in buffers:
            while len(buffer):
                try:
                    n = self.recv_into(buffer)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if received:
                        return received
                    raise BlockingIOError from None
                except OSError:
                    if received:  # the next call fails too, or finds the end of the stream
                        return received
                    raise
                received += n
                buffer = buffer[n:]
                if n < MAX_RECORD_BYTES and not self.pending() and len(buffer):
                    return received  # a short record is mostly the last one of a write
        return received

    def peer_certificate_digest(self) -> bytes:
        """Return the SHA-256 digest of the other end's certificate (DER), once the handshake is done."""
        return hashlib.sha256(self.getpeercert(binary_form=True) or b"").digest()


@dataclass(frozen=True)
class TlsCredentials:
    """What a node needs to encrypt its TCP connections.

    Attributes:
        certificate_digest: the SHA-256 digest of its own certificate (DER).
    """

    _acceptor: ssl.SSLContext
    _dialler: ssl.SSLContext
    certificate_digest: bytes

    def encrypt(self, sock: socket.socket, *, accepts: bool) -> TlsSocket:
        """Return a socket that encrypts, in place of a connected one, which is detached.

        Raises:
            OSError: the connection is broken.
        """
        context = self._acceptor if accepts else self._dialler
        return cast(TlsSocket, context.wrap_socket(sock, server_side=accepts, do_handshake_on_connect=False))


def load_credentials(ca: str, certificate: str, key: str) -> TlsCredentials:
    """Load a node's credentials.

    Args:
        ca: path of the CA's certificate, or of several.
        certificate: path of the node's certificate, followed by those between it and the CA's, if any.
        key: path of its private key, without a passphrase.

    All files are PEM.

    Raises:
        OffbeatError: a file cannot be read, or does not hold what it should; the text names the file.
    """
    for path in (ca, certificate, key):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise OffbeatError(f"cannot read {path}, for TLS: {describe_os_error(error)}") from error
    own = _read_certificate(certificate)
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslsocket_class = TlsSocket
        try:
            context.load_verify_locations(cafile=ca)
        except ssl.SSLError as error:
            raise OffbeatError(f"expected the CA's certificate, as PEM, in {ca}: {_reason(error)}") from error
        _load_own(context, certificate, key)
        contexts.append(context)
    contexts[0].num_tickets = 0
    return TlsCredentials(contexts[0], contexts[1], hashlib.sha256(own).digest())


def explain_tls_error(error: ssl.SSLError) -> str:
    """Return why TLS failed, as a sentence about the other end."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    reason = str(error.reason or error)
    _, is_alert, alert = reason.partition("_ALERT_")
    if is_alert:
        return f"it does not accept this node's certificate or TLS (its alert: {_plain(alert)})"
    if reason in _NO_TLS_REASONS:
        return "it does not use TLS, and this node does"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has no certificate"
    return f"TLS failed: {_plain(reason)}"


def _read_certificate(path: str) -> bytes:
    """Return the first certificate of a file as DER."""
    text = Path(path).read_text(encoding="ascii", errors="replace")
    begin, end = text.find(_CERTIFICATE_BEGIN), text.find(_CERTIFICATE_END)
    try:
        if begin < 0 or end < begin:
            raise ValueError("it has none")
        der = ssl.PEM_cert_to_DER_cert(text[begin : end + len(_CERTIFICATE_END)])
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=der)
    except (ValueError, ssl.SSLError) as error:
        raise OffbeatError(f"expected this node's certificate, as PEM, in {path}: {_reason(error)}") from None
    return der


def _load_own(context: ssl.SSLContext, certificate: str, key: str) -> None:
    def refuse_passphrase() -> str:
        raise ValueError("it is encrypted; expected a key without a passphrase")

    try:
        context.load_cert_chain(certificate, key, password=refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise OffbeatError(f"the private key in {key} is not that of {certificate}") from error
        raise OffbeatError(
            f"expected the private key of {certificate}, as PEM, in {key}: {_reason(error)}"
        ) from error
    except ValueError as error:
        raise OffbeatError(f"cannot use the private key in {key}: {error}") from error


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return _plain(reason) if reason else str(error)


def _plain(reason: str) -> str:
    return reason.lower().replace("_", " ")
