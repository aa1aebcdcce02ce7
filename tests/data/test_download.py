"""Downloads against a real HTTP server on 127.0.0.1 with the faults of real servers and networks."""

from __future__ import annotations

import hashlib
import io
import socket
import struct
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data import DataError, load_data_set
from offbeat.data.download import RemoteFile, download_file, extract_members, lock_folder

CONTENT = bytes((i * i) % 251 for i in range(600_000))


@dataclass(frozen=True, kw_only=True)
class Reply:
    """How the server answers one request."""

    status: int = 200
    content: bytes = CONTENT
    honours_range: bool = True
    range_shift: int = 0
    cut_after: int | None = None
    reset: bool = False
    states_length: bool = True
    chunked: bool = False
    stalls: bool = False
    location: str | None = None


class Server(ThreadingHTTPServer):
    """Answers each request with the next reply, then repeats the last; `ranges` keeps requested ranges."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[Reply] = [Reply()]
        self.ranges: list[str | None] = []
        self.over = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"

    def play(self, *replies: Reply) -> None:
        self.replies, self.ranges = list(replies), []

    def next_reply(self, requested: str | None) -> Reply:
        with self.lock:
            self.ranges.append(requested)
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        reply = self.server.next_reply(self.headers["Range"])
        self.protocol_version = "HTTP/1.1" if reply.chunked else "HTTP/1.0"
        self.close_connection = True
        body, status, start = reply.content, reply.status, 0
        if status == 200 and reply.honours_range and self.headers["Range"]:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) + reply.range_shift
            status = 206 if start < len(body) else 416
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        body = b"" if status == 416 else body[start:]
        if reply.location:
            self.send_header("Location", reply.location)
        if reply.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif reply.states_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        sent = body if reply.cut_after is None else body[: reply.cut_after]
        if reply.chunked:
            sent = b"".join(
                b"%x\r\n%s\r\n" % (len(part), part) for part in (sent[:1000], sent[1000:]) if part
            )
            sent += b"0\r\n\r\n" if reply.cut_after is None else b"ff\r\n"
        try:
            self.wfile.write(sent)
            if reply.stalls:
                self.server.over.wait()
            if reply.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
        except OSError:
            pass  # the client gave up first, as several tests have it do

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def server(shared_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("no_proxy", "*")
    shared_server.play(Reply())
    return shared_server


def remote(server: Server, content: bytes = CONTENT) -> RemoteFile:
    md5 = hashlib.md5(content).hexdigest()
    return RemoteFile(url=server.url, md5=md5, size_bytes=len(content))


def part_of(target: Path) -> Path:
    return target.with_name(target.name + ".part")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "file.bin"


# A healthy server.


@pytest.mark.parametrize(
    "reply",
    [Reply(), Reply(states_length=False), Reply(chunked=True), Reply(honours_range=False)],
    ids=["plain", "no length", "chunked", "no ranges"],
)
def test_a_file_arrives_whole_and_leaves_no_part(server: Server, target: Path, reply: Reply) -> None:
    server.play(reply)
    download_file(remote(server), target, pause_s=0)
    assert target.read_bytes() == CONTENT
    assert not part_of(target).exists()
    assert server.ranges == [None]


def test_an_existing_file_is_not_requested(server: Server, target: Path) -> None:
    target.parent.mkdir()
    target.write_bytes(b"mine")
    download_file(remote(server), target)
    assert target.read_bytes() == b"mine"
    assert server.ranges == []


def test_a_redirect_is_followed_with_its_range(server: Server, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT[:5])
    server.play(Reply(status=302, content=b"", location=server.url), Reply())
    download_file(remote(server), target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=5-", "bytes=5-"]


def test_progress_grows_to_the_size(server: Server, target: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    download_file(remote(server), target, progress=lambda *at: seen.append(at))
    received = [bytes_ for _, bytes_, _ in seen]
    assert received == sorted(set(received))
    assert received[-1] == len(CONTENT)
    assert {(name, total) for name, _, total in seen} == {("file.bin", len(CONTENT))}


# Resumed downloads.


def test_only_the_rest_of_a_part_is_requested(server: Server, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT[:1234])
    download_file(remote(server), target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=1234-"]


def test_a_server_that_ignores_range_starts_over(server: Server, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(b"x" * 1234)
    server.play(Reply(honours_range=False))
    download_file(remote(server), target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=1234-"]


def test_a_complete_part_needs_no_connection(server: Server, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT)
    download_file(remote(server), target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == []


@pytest.mark.parametrize("stale", [b"x" * 500, b"x" * len(CONTENT), b"x" * (len(CONTENT) + 1)])
def test_a_stale_part_is_discarded(server: Server, target: Path, stale: bytes) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(stale)
    download_file(remote(server), target)
    assert target.read_bytes() == CONTENT
    assert server.ranges[-1] is None
    assert len(server.ranges) == (2 if len(stale) < len(CONTENT) else 1)


@pytest.mark.parametrize(
    "cut",
    [
        Reply(cut_after=300_000),
        Reply(cut_after=300_000, states_length=False),
        Reply(cut_after=300_000, chunked=True),
        Reply(cut_after=300_000, reset=True),
        Reply(cut_after=300_000, stalls=True),
        Reply(cut_after=0, stalls=True),
        Reply(status=500, content=b"oops"),
        Reply(status=503, content=b"busy"),
        Reply(status=429, content=b"slowly"),
    ],
    ids=["cut", "cut, no length", "cut chunk", "reset", "stall", "silent", "500", "503", "429"],
)
def test_an_interrupted_download_is_resumed(server: Server, target: Path, cut: Reply) -> None:
    server.play(cut, Reply())
    download_file(remote(server), target, pause_s=0, timeout_s=1.0 if cut.stalls else 30.0)
    assert target.read_bytes() == CONTENT
    assert len(server.ranges) == 2
    if not cut.reset:  # a reset may also take back what was received
        assert server.ranges[1] == ("bytes=300000-" if cut.cut_after else None)


def test_attempts_are_bounded_and_the_part_stays(server: Server, target: Path) -> None:
    server.play(Reply(cut_after=100_000))
    with pytest.raises(
        DataError, match=r"given up after 3 attempts with 300,000 of 600,000 bytes .*run again"
    ):
        download_file(remote(server), target, attempts=3, pause_s=0)
    assert server.ranges == [None, "bytes=100000-", "bytes=200000-"]
    assert not target.exists()
    server.play(Reply())
    download_file(remote(server), target)
    assert server.ranges == ["bytes=300000-"]
    assert target.read_bytes() == CONTENT


def test_a_wrong_range_is_not_appended(server: Server, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT[:1000])
    server.play(Reply(range_shift=-7), Reply())
    download_file(remote(server), target, pause_s=0)
    assert target.read_bytes() == CONTENT


def test_a_range_beyond_the_servers_file_starts_over(server: Server, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT[:-1])
    server.play(Reply(content=b"tiny"), Reply())
    download_file(remote(server), target, pause_s=0)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [f"bytes={len(CONTENT) - 1}-", None]


replies = st.builds(
    Reply,
    status=st.sampled_from([200, 200, 200, 503]),
    honours_range=st.booleans(),
    range_shift=st.sampled_from([0, 0, 0, -1]),
    cut_after=st.none() | st.integers(0, 5000),
    reset=st.booleans(),
    states_length=st.booleans(),
    chunked=st.booleans(),
    content=st.just(CONTENT[:5000])
    | st.just(CONTENT[1:5001])
    | st.just(CONTENT[:4000])
    | st.just(CONTENT[:6000]),
)


@settings(max_examples=150, deadline=None)
@given(part=st.none() | st.integers(0, 6000), stale=st.booleans(), script=st.lists(replies, max_size=4))
def test_after_any_replies_the_file_is_whole_or_absent(
    shared_server: Server, part: int | None, stale: bool, script: list[Reply]
) -> None:
    """The promise of `fetch`: afterwards the file exists, whole, or an error names the cause.

    A good server then completes the download.
    """
    content = CONTENT[:5000]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "*")
        target = Path(folder) / "file.bin"
        if part is not None:
            part_of(target).write_bytes((b"x" * 6000 if stale else CONTENT)[:part])
        shared_server.play(*script, Reply(status=404))
        text = None
        try:
            download_file(remote(shared_server, content), target, attempts=3, pause_s=0)
        except DataError as error:
            text = str(error)
        assert text is None or ("\n" not in text and shared_server.url in text)
        assert target.exists() == (text is None)
        assert text is not None or target.read_bytes() == content
        assert len(shared_server.ranges) <= 6
        shared_server.play(Reply(content=content))
        download_file(remote(shared_server, content), target, attempts=2, pause_s=0)
        assert target.read_bytes() == content
        assert not part_of(target).exists()


# Errors: one line with the fault, the place and the remedy.


def test_wrong_bytes_never_get_the_name(server: Server, target: Path) -> None:
    wrong = b"y" + CONTENT[1:]
    server.play(Reply(content=wrong))
    with pytest.raises(DataError) as caught:
        download_file(remote(server), target, pause_s=0)
    assert hashlib.md5(wrong).hexdigest() in str(caught.value)
    assert hashlib.md5(CONTENT).hexdigest() in str(caught.value)
    assert len(server.ranges) == 1
    assert not target.exists()
    assert not part_of(target).exists()


@pytest.mark.parametrize("states_length", [True, False])
def test_a_longer_file_is_refused(server: Server, target: Path, states_length: bool) -> None:
    server.play(Reply(content=CONTENT + b"z", states_length=states_length))
    with pytest.raises(DataError, match=r"expected 600,000 bytes, the server (offers 600,001|sent more)"):
        download_file(remote(server), target, pause_s=0)
    assert not target.exists()


def test_a_login_page_is_refused_at_once(server: Server, target: Path) -> None:
    server.play(Reply(content=b"<html>please log in</html>"))
    with pytest.raises(DataError, match="expected 600,000 bytes, the server offers 26: this is not the file"):
        download_file(remote(server), target, pause_s=0)
    assert len(server.ranges) == 1


def test_a_range_error_without_a_range_is_retried(server: Server, target: Path) -> None:
    server.play(Reply(status=416), Reply())
    download_file(remote(server), target, pause_s=0)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("status", [403, 404, 410])
def test_an_http_error_is_reported_at_once(server: Server, target: Path, status: int) -> None:
    server.play(Reply(status=status))
    with pytest.raises(DataError, match=f"{server.url}: the server answered {status} "):
        download_file(remote(server), target)
    assert len(server.ranges) == 1


def test_lasting_server_errors_are_reported(server: Server, target: Path) -> None:
    server.play(Reply(status=502))
    with pytest.raises(DataError, match=r"given up after 2 attempts .*502 Bad Gateway"):
        download_file(remote(server), target, attempts=2, pause_s=0)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return int(closed.getsockname()[1])


def test_a_refused_connection_is_reported(server: Server, target: Path) -> None:
    unreachable = replace(remote(server), url=f"http://127.0.0.1:{closed_port()}/file.bin")
    with pytest.raises(DataError, match=r"no connection .*check the network"):
        download_file(unreachable, target)


def test_a_server_without_http_is_reported(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                peer, _address = listener.accept()
                with peer:
                    peer.recv(65536)
                    peer.sendall(b"SSH-2.0-OpenSSH_9\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/file.bin"
        with pytest.raises(DataError, match=r"given up after 2 attempts .*SSH"):
            download_file(RemoteFile(url=url, md5="", size_bytes=1), target, attempts=2, pause_s=0)
        thread.join()


def test_a_full_disk_is_reported(server: Server, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot be written .*No space left"):
        download_file(remote(server), target, pause_s=0)
    assert not target.exists()


def test_a_folder_that_cannot_be_made_is_reported(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be written"):
        download_file(remote(server), tmp_path / "file" / "below.bin")


def test_attempts_below_one_are_refused(server: Server, target: Path) -> None:
    with pytest.raises(ValueError, match="attempts must be at least 1, got 0"):
        download_file(remote(server), target, attempts=0)


# Several processes.


def test_only_one_holds_the_lock_and_the_wait_has_an_end(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with lock_folder(folder):
        with pytest.raises(DataError, match="wait at most 0 s for another process"):
            with lock_folder(folder, wait_s=0):
                pass
    with lock_folder(folder, wait_s=0):
        pass


def test_the_lock_is_released_when_its_holder_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), lock_folder(tmp_path):
        raise KeyboardInterrupt
    with lock_folder(tmp_path, wait_s=0):
        pass


def test_an_error_under_the_lock_is_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^mine$"), lock_folder(tmp_path):
        raise OSError("mine")


def test_a_lock_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="file: cannot be written"), lock_folder(tmp_path / "file"):
        pass


# Archives.

MEMBERS = ["bin/a.bin", "bin/b.bin"]


def add(tar: tarfile.TarFile, name: str, content: bytes = b"12345", **attributes: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content) if attributes.get("type", tarfile.REGTYPE) == tarfile.REGTYPE else 0
    for key, value in attributes.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "set.tar.gz"


def test_only_the_requested_members_are_written(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        add(tar, "../evil.bin")
        add(tar, "elsewhere/a.bin", b"wrong")
        add(tar, str(tmp_path / "evil.bin"))
        add(tar, "bin/readme.html")
        add(tar, "link", type=tarfile.SYMTYPE, linkname="/")
        add(tar, "bin/a.bin", mode=0o4777, uid=0)
        add(tar, "bin/b.bin")
    extract_members(archive, tmp_path / "out" / "set", members=MEMBERS, size_bytes=5)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["out/set/a.bin", "out/set/b.bin", "set.tar.gz"]
    assert (tmp_path / "out" / "set" / "a.bin").read_bytes() == b"12345"
    assert (tmp_path / "out" / "set" / "a.bin").stat().st_mode & 0o7111 == 0


def test_an_existing_file_is_left_alone(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        add(tar, "bin/a.bin")
        add(tar, "bin/b.bin")
    (tmp_path / "a.bin").write_bytes(b"mine")
    extract_members(archive, tmp_path, members=MEMBERS, size_bytes=5)
    assert (tmp_path / "a.bin").read_bytes() == b"mine"
    assert (tmp_path / "b.bin").read_bytes() == b"12345"


@pytest.mark.parametrize(
    "attributes",
    [
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "size": 5},
        {"type": tarfile.LNKTYPE, "linkname": "bin/b.bin"},
        {"type": tarfile.DIRTYPE},
        {"type": tarfile.FIFOTYPE},
        {"content": b"123456"},
        {"content": b""},
    ],
    ids=["symlink", "symlink with a size", "hard link", "folder", "pipe", "longer", "empty"],
)
def test_a_member_that_is_no_plain_file_of_the_right_size_is_refused(
    archive: Path, tmp_path: Path, attributes: dict[str, object]
) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        add(tar, "bin/b.bin")
        add(tar, "bin/a.bin", **attributes)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"expected bin/a.bin to be a plain file of 5 bytes, found"):
        extract_members(archive, tmp_path / "out", members=MEMBERS, size_bytes=5)
    assert not (tmp_path / "out" / "a.bin").exists()


def test_a_missing_member(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        add(tar, "bin/a.bin")
    with pytest.raises(DataError, match=r"expected bin/b.bin in it"):
        extract_members(archive, tmp_path, members=MEMBERS, size_bytes=5)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_archive(data: st.DataObject) -> None:
    """Cut or altered anywhere, an archive gives the right files or a DataError."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        add(tar, "bin/a.bin")
        add(tar, "bin/b.bin")
    content = bytearray(buffer.getvalue())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "set.tar.gz"
        archive.write_bytes(content)
        text = str(archive)
        try:
            extract_members(archive, Path(folder), members=MEMBERS, size_bytes=5)
        except DataError as error:
            text = str(error)
        assert str(archive) in text


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"no gzip at all"])
def test_no_archive(archive: Path, tmp_path: Path, content: bytes) -> None:
    archive.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        extract_members(archive, tmp_path, members=MEMBERS, size_bytes=5)


def test_a_full_disk_when_unpacking(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        add(tar, "bin/a.bin")
        add(tar, "bin/b.bin")
    (tmp_path / "a.bin.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot be unpacked .*No space left"):
        extract_members(archive, tmp_path, members=MEMBERS, size_bytes=5)
    assert not (tmp_path / "a.bin").exists()


# load_data_set.


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_load_uses_the_network_only_on_request(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only proxy does not exist, so an attempt is an error of its own."""
    for variable in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, f"http://127.0.0.1:{closed_port()}")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(DataError, match=r"looked for .*run with --download"):
        load_data_set(name, tmp_path)
    with pytest.raises(DataError, match="no connection"):
        load_data_set(name, tmp_path, download=True)
