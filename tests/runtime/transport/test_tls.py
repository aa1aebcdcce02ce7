"""Promises of encrypted connections: which peers are refused, and why; that nothing is lost; what is sent."""

from __future__ import annotations

import os
import random
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from offbeat.errors import OffbeatError
from offbeat.runtime.transport.framing import HEADER, MAGIC, VERSION, FrameKind, encode_frame
from offbeat.runtime.transport.tls import MAX_RECORD_BYTES, TlsCredentials, load_credentials
from support.certificates import Authority, Issued
from support.endpoints import DEADLINE_S, KIB, MIB, Arrival, Node, Stranger, contents, node
from support.run_logs import wait_until
from support.tcp_proxy import Line, random_resets

__all__ = ["node"]

MakeNode = Callable[..., Node]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="module")
def credentials(authority: Authority) -> TlsCredentials:
    return authority.issue("node").load()


@pytest.fixture
def make(node: MakeNode, credentials: TlsCredentials) -> MakeNode:
    """Make nodes that encrypt; the connections of a test are its own processes', over TCP."""
    return lambda name, **options: node(name, **({"unix": False, "tls": credentials} | options))


def introduce(one: Node, other: Node) -> None:
    one.links.add_peer(other.links.name, other.links.addresses)
    other.links.add_peer(one.links.name, one.links.addresses)


# What is carried -------------------------------------------------------------------------------------------


def test_large_tensors_and_many_messages_in_both_directions_at_once_arrive_exactly(make: MakeNode) -> None:
    a, b = make("a"), make("b")
    introduce(a, b)
    sizes = [8 * MIB, 3 * MIB + 7, 1, 16 * 1024, 16 * 1024 - 32]
    arrivals, done = [], []
    for me, other in ((a, b), (b, a)):
        for tag, size in enumerate(sizes):
            arrivals.append((Arrival(other, me.links.name, tag, size), tag))
        for tag, size in enumerate(sizes):
            done.append(threading.Event())
            me.links.send_tensor(other.links.name, tag, memoryview(contents(size, tag)), on_done=done[-1].set)
            for number in range(200):
                me.links.send(other.links.name, b"%d" % (tag * 200 + number))
    for me in (a, b):
        assert [int(me.message()[1]) for _ in range(200 * len(sizes))] == list(range(200 * len(sizes)))
    for arrival, tag in arrivals:
        assert arrival.whole() == contents(len(arrival.buffer), tag)
    assert all(one.wait(DEADLINE_S) for one in done)
    assert a.lost.empty()
    assert b.lost.empty()


def test_bytes_that_are_decrypted_already_are_read_although_nothing_more_comes(
    make: MakeNode, credentials: TlsCredentials
) -> None:
    a = make("a")
    b = Stranger("b", a, tls=credentials).greet()
    size = 40 * KIB  # while more than 32 KiB are missing, a node makes no room for what follows
    arrival = Arrival(a, "b", 1, size)
    frame = _data(1, contents(size))
    b.sock.sendall(frame[:1000])
    reader = a.in_thread(lambda: a.links._sessions.peers["b"].link.reader)
    wait_until(lambda: a.in_thread(lambda: reader.missing_bytes > 0), "a part of the frame")
    messages = b"".join(_message(b"%d" % number) for number in range(20))
    last = frame[1000:] + messages  # in the last record are the frame's end and all messages
    assert len(last) <= 3 * MAX_RECORD_BYTES < len(frame[1000:]) + MAX_RECORD_BYTES
    with a.busy():
        b.sock.sendall(last)
    assert arrival.whole() == contents(size)
    for number in range(20):
        assert a.message() == ("b", b"%d" % number)


def test_reading_that_was_paused_continues_with_what_is_decrypted_already(make: MakeNode) -> None:
    a, b = make("a"), make("b")
    introduce(a, b)
    size = 4 * MIB
    count = 256 * MIB // size + 2  # more than a node keeps without a receive
    data = contents(size)
    for tag in range(count):
        a.links.send_tensor("b", tag, memoryview(data))
    a.links.send("b", b"before")
    assert b.message() == ("a", b"before")
    link = b.in_thread(lambda: b.links._sessions.peers["a"].link)
    wait_until(lambda: link.is_paused, "a pause of reading")
    arrivals = [Arrival(b, "a", tag, size) for tag in range(count)]
    assert all(arrival.whole() == data for arrival in arrivals)


def test_no_byte_of_a_message_is_on_the_wire(make: MakeNode) -> None:
    a, b = make("a"), make("b")
    line = Line(b.tcp(), keeps=True)
    try:
        a.links.add_peer("b", [line.address])
        secret = b"a rather secret message" * 10
        arrival = Arrival(b, "a", 1, 256 * 1024)
        a.links.send("b", secret)
        a.links.send_tensor("b", 1, memoryview(secret * 2000)[: 256 * 1024])
        assert b.message() == ("a", secret)
        arrival.whole()
        assert len(line.carried) > 256 * 1024
        assert b"secret message" not in line.carried
        assert b"HELLO" not in line.carried
        assert b"worker" not in line.carried
    finally:
        line.close()


def test_processes_on_one_host_use_a_unix_socket_without_tls(node: MakeNode, authority: Authority) -> None:
    a, b = (node(name, tls=authority.issue(f"local-{name}").load()) for name in "ab")
    introduce(a, b)
    a.links.send("b", b"hello")
    assert b.message() == ("a", b"hello")
    link = b.in_thread(lambda: b.links._sessions.peers["a"].link)
    assert link.sock.family == socket.AF_UNIX
    assert not isinstance(link.sock, ssl.SSLSocket)
    assert link.imported is not None


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_or_repeated_over_broken_connections(make: MakeNode, seed: int) -> None:
    chance = random.Random(seed)
    reset_after = random_resets(chance, [10, 1500, 2500, 70_000, 400_000])
    a, b = make("a"), make("b")
    lines = [Line(b.tcp(), reset_after), Line(a.tcp(), reset_after)]
    try:
        a.links.add_peer("b", [lines[0].address])
        b.links.add_peer("a", [lines[1].address])
        arrivals = []
        for me, other in ((a, b), (b, a)):
            for number in range(200):
                me.links.send(other.links.name, b"%d" % number + bytes(chance.choice([0, 0, 0, 5000])))
            for tag in range(12):
                size = chance.choice([1, 5000, 300_000, MIB])
                arrivals.append((Arrival(other, me.links.name, tag, size), tag))
                me.links.send_tensor(other.links.name, tag, memoryview(contents(size, tag)))
        for me in (a, b):
            assert [int(me.message()[1].rstrip(b"\0")) for _ in range(200)] == list(range(200))
        for arrival, tag in arrivals:
            assert arrival.whole() == contents(len(arrival.buffer), tag)
        assert a.lost.empty()
        assert b.lost.empty()
        assert sum(line.connections for line in lines) > 1
    finally:
        for line in lines:
            line.close()


def _message(payload: bytes) -> bytes:
    return encode_frame(FrameKind.MESSAGE, payload)


def _data(tag: int, payload: bytes) -> bytes:
    return HEADER.pack(MAGIC, VERSION, FrameKind.DATA, len(payload), tag, 0, len(payload)) + payload


# Who is refused --------------------------------------------------------------------------------------------


def refused_on_both_sides(acceptor: Node, dialler: Node) -> tuple[str, str]:
    """Let a node dial another that refuses it; return what each of them reports."""
    dialler.links.add_peer("acceptor", acceptor.links.addresses)
    dialler.links.send("acceptor", b"hello")
    loss = dialler.loss()
    assert loss.peer == "acceptor"
    assert acceptor.links.addresses[0] in str(loss)
    report = acceptor.refusal()
    assert report.startswith("refused a connection from 127.0.0.1:")
    assert acceptor.messages.empty()
    return report, str(loss)


def test_a_node_without_tls_is_refused_with_the_reason(make: MakeNode) -> None:
    report, loss = refused_on_both_sides(make("acceptor"), make("dialler", tls=None))
    assert "it does not use TLS, and this node does" in report
    assert loss.endswith(" refused the connection: this node uses TLS, and the other one does not")


def test_a_node_with_tls_refuses_one_without(make: MakeNode) -> None:
    report, loss = refused_on_both_sides(make("acceptor", tls=None), make("dialler"))
    assert "the other node uses TLS, and this one does not" in report
    assert "it does not use TLS, and this node does" in loss


def test_a_client_without_a_certificate_is_refused(make: MakeNode) -> None:
    a = make("a")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(a.tcp(), timeout=DEADLINE_S) as sock, context.wrap_socket(sock) as client:
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            client.recv(1)
    assert a.refusal().endswith(": it has no certificate")


def test_a_certificate_of_another_authority_is_refused_by_the_acceptor(
    make: MakeNode, authority: Authority, other_authority: Authority
) -> None:
    forged = other_authority.issue("forged", trusts=authority).load()
    report, loss = refused_on_both_sides(make("acceptor"), make("dialler", tls=forged))
    assert "its certificate is not accepted: unable to get local issuer certificate" in report
    assert "it does not accept this node's certificate or TLS (its alert: unknown ca)" in loss


def test_a_certificate_of_another_authority_is_refused_by_the_dialler(
    make: MakeNode, authority: Authority, other_authority: Authority
) -> None:
    forged = other_authority.issue("forged-acceptor", trusts=authority).load()
    report, loss = refused_on_both_sides(make("acceptor", tls=forged), make("dialler"))
    assert "it does not accept this node's certificate or TLS (its alert: unknown ca)" in report
    assert "its certificate is not accepted: unable to get local issuer certificate" in loss


def test_an_expired_certificate_is_refused(make: MakeNode, authority: Authority) -> None:
    expired = authority.issue("expired", days=-1).load()
    report, loss = refused_on_both_sides(make("acceptor"), make("dialler", tls=expired))
    assert "its certificate is not accepted: certificate has expired" in report
    assert "it does not accept this node's certificate or TLS (its alert: certificate expired)" in loss


def test_a_certificate_of_the_same_authority_does_not_replace_the_token(
    make: MakeNode, authority: Authority
) -> None:
    other_job = authority.issue("other-job").load()
    report, loss = refused_on_both_sides(make("acceptor"), make("dialler", tls=other_job, token="another"))
    assert "dialler does not prove that it knows the token of job job" in report
    assert "does not prove that it knows the token" in loss


def test_a_man_in_the_middle_with_a_certificate_of_the_same_authority_is_refused(
    make: MakeNode, authority: Authority
) -> None:
    acceptor, dialler = make("acceptor"), make("dialler")
    with ManInTheMiddle(acceptor.tcp(), authority.issue("middle").load()) as middle:
        dialler.links.add_peer("acceptor", [middle.address])
        dialler.links.send("acceptor", b"hello")
        assert "does not prove that it knows the token" in str(dialler.loss())
        assert "dialler does not prove that it knows the token of job job" in acceptor.refusal()
        assert middle.forwarded > 0
    assert acceptor.messages.empty()


def test_a_man_in_the_middle_who_has_the_acceptors_key_is_not_found_out(
    make: MakeNode, credentials: TlsCredentials
) -> None:
    """The counterpart of the test before: what is refused there is the certificate, and nothing else."""
    acceptor, dialler = make("acceptor"), make("dialler")
    with ManInTheMiddle(acceptor.tcp(), credentials) as middle:
        dialler.links.add_peer("acceptor", [middle.address])
        dialler.links.send("acceptor", b"hello")
        assert acceptor.message() == ("dialler", b"hello")


class ManInTheMiddle:
    """Ends the TLS of each connection with its own certificate, and forwards what it decrypts."""

    def __init__(self, to: tuple[str, int], credentials: TlsCredentials) -> None:
        self._to, self._credentials = to, credentials
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.forwarded = 0  # bytes
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> ManInTheMiddle:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._open):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _accept(self) -> None:
        try:
            while True:
                near = self._secure(self._listener.accept()[0], accepts=True)
                far = self._secure(socket.create_connection(self._to), accepts=False)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=partial(self._forward, source, target), daemon=True).start()
        except OSError:
            return

    def _secure(self, sock: socket.socket, *, accepts: bool) -> ssl.SSLSocket:
        secure = self._credentials.encrypt(sock, accepts=accepts)
        secure.settimeout(DEADLINE_S)
        secure.do_handshake()
        self._open.append(secure)
        return secure

    def _forward(self, source: ssl.SSLSocket, target: ssl.SSLSocket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
                self.forwarded += len(data)
        except OSError:
            pass
        for sock in (source, target):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def test_a_client_that_does_not_finish_the_tls_handshake_holds_up_nobody_and_is_closed(
    make: MakeNode,
) -> None:
    a, b = make("a", connect_s=1.0), make("b")
    silent = [socket.create_connection(a.tcp(), timeout=DEADLINE_S) for _ in range(3)]
    silent[0].sendall(b"\x16\x03\x01\x02\x00")  # the begin of a record
    introduce(a, b)
    b.links.send("a", b"hello")
    assert a.message() == ("b", b"hello")
    assert "it did not authenticate within 1 s" in a.refusal()
    for sock in silent:
        assert sock.recv(1) == b""
        sock.close()


def test_an_acceptor_that_does_not_answer_the_tls_handshake_is_named(make: MakeNode) -> None:
    a = make("a", connect_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        a.links.add_peer("b", [address])
        a.links.send("b", b"hello")
        assert str(a.loss()) == f"cannot reach b at {address} within 1 s: no answer to the handshake"


# Files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["ca", "certificate", "key"])
@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"\xff\xfe"])
def test_a_file_that_is_missing_or_no_pem_is_named(
    tmp_path: Path, authority: Authority, broken: str, content: bytes | None
) -> None:
    issued = authority.issue("named")
    path = tmp_path / "broken.pem"
    if content is not None:
        path.write_bytes(content)
    files = {"ca": issued.ca, "certificate": issued.certificate, "key": issued.key, broken: str(path)}
    with pytest.raises(OffbeatError, match=str(path)):
        load_credentials(**files)


def test_a_key_of_another_certificate_is_named(authority: Authority) -> None:
    one, other = authority.issue("one"), authority.issue("two")
    with pytest.raises(
        OffbeatError, match=f"the private key in {other.key} is not that of {one.certificate}"
    ):
        Issued(one.ca, one.certificate, other.key).load()


def test_an_encrypted_key_is_refused_without_asking_for_its_passphrase(
    tmp_path: Path, authority: Authority
) -> None:
    issued, key = authority.issue("locked"), tmp_path / "locked.key"
    command = f"openssl ec -aes256 -passout pass:x -in {issued.key} -out {key} 2>/dev/null"
    assert os.system(command) == 0
    with pytest.raises(OffbeatError, match=f"{key}: it is encrypted"):
        Issued(issued.ca, issued.certificate, str(key)).load()
