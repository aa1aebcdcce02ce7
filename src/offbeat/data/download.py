"""Downloads that can be trusted and taken up again; this module knows no data set and never parses one.

A file arrives in `NAME.part` beside its place and is renamed into it when its size and checksum are right, so
what bears the final name is whole. What was received stays in the .part when a download fails: the next one
asks for the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from offbeat.errors import DataError

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes received so far and the bytes expected."""

_CHUNK_BYTES = 1 << 18
_LOCK_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file on the network and what it must be.

    Attributes:
        url: http or https.
        md5: checksum, hexadecimal, as its publisher states it.
        size_bytes: exact size.
    """

    url: str
    md5: str
    size_bytes: int


class _InterruptedError(Exception):
    """The connection ended early; another attempt may do better."""


def fetch(
    remote: Remote,
    target: Path,
    *,
    progress: Progress | None = None,
    timeout_s: float = 30.0,
    attempts: int = 5,
    pause_s: float = 1.0,
) -> None:
    """Download a file unless it is there; afterwards it is there, whole, or an error says why not.

    A wrong checksum after resuming is blamed on the old part: it is thrown away and the file fetched once
    more from the beginning. Where several processes may fetch the same file, hold `locked`.

    Args:
        remote: what to fetch.
        target: where to put it; folders are made.
        progress: called as bytes arrive.
        timeout_s: the longest silence of the server that is waited out, connecting included; a server that
            keeps sending, however slowly, is not given up.
        attempts: connections at most, at least 1; only what breaks off or is a server's own trouble (5xx,
            408, 429) is tried again, not a connection that cannot be made.
        pause_s: the pause before the second connection; it grows by as much each time.

    Raises:
        DataError: no connection, an HTTP error, too many interruptions, a size or checksum other than
            expected, a full disk or a folder that cannot be written to.
        ValueError: `attempts` below 1.
    """
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, got {attempts}")
    part = target.with_name(target.name + ".part")
    if target.exists():
        return
    with _disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        resumed = part.exists()
        while True:
            _complete(remote, part, progress, timeout_s=timeout_s, attempts=attempts, pause_s=pause_s)
            found = _md5(part)
            if found == remote.md5:
                os.replace(part, target)
                return
            part.unlink()
            if not resumed:
                raise DataError(
                    f"{remote.url}: expected the md5 checksum {remote.md5}, received {found}; what the "
                    "server sent is not the file and was thrown away: try again later, or put the file at "
                    f"{target}"
                )
            resumed = False


def _complete(
    remote: Remote,
    part: Path,
    progress: Progress | None,
    *,
    timeout_s: float,
    attempts: int,
    pause_s: float,
) -> None:
    """Bring the part to its full size over as many connections as allowed."""
    for attempt in range(attempts):
        have_bytes = part.stat().st_size if part.exists() else 0
        if have_bytes == remote.size_bytes:
            return
        if have_bytes > remote.size_bytes:
            part.unlink()
            have_bytes = 0
        if attempt:
            time.sleep(pause_s * attempt)
        try:
            _receive(remote, part, have_bytes, progress, timeout_s)
            return
        except _InterruptedError as error:
            reason = error
    have_bytes = part.stat().st_size if part.exists() else 0
    raise DataError(
        f"{remote.url}: given up after {attempts} attempts with {have_bytes:,} of {remote.size_bytes:,} "
        f"bytes ({reason}); run again to go on from there"
    ) from reason


def _receive(
    remote: Remote, part: Path, have_bytes: int, progress: Progress | None, timeout_s: float
) -> None:
    """Append what one connection yields, or start over where the server does not send the rest alone."""
    with _open(remote.url, have_bytes, part, timeout_s) as response:
        if response.status != 206:
            have_bytes = 0
        elif _range_start(response) != have_bytes:
            part.unlink()
            raise _InterruptedError(f"the server sent the range {response.headers.get('Content-Range')!r}")
        offered_bytes = None if response.length is None else have_bytes + response.length
        if offered_bytes not in (None, remote.size_bytes):
            raise DataError(
                f"{remote.url}: expected {remote.size_bytes:,} bytes, the server offers {offered_bytes:,}: "
                "this is not the file; check that the network lets this address through"
            )
        with part.open("ab" if have_bytes else "wb") as file:
            while chunk := _read_chunk(response, remote.size_bytes + 1 - have_bytes):
                file.write(chunk)
                have_bytes += len(chunk)
                if have_bytes > remote.size_bytes:
                    break
                if progress is not None:
                    progress(part.name.removesuffix(".part"), have_bytes, remote.size_bytes)
    if have_bytes > remote.size_bytes:
        part.unlink()
        raise DataError(
            f"{remote.url}: expected {remote.size_bytes:,} bytes, the server sent more; try again later"
        )
    if have_bytes < remote.size_bytes:
        raise _InterruptedError("the connection ended early")


def _open(url: str, have_bytes: int, part: Path, timeout_s: float) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "offbeat"})
    if have_bytes:
        request.add_header("Range", f"bytes={have_bytes}-")
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the server's file is shorter than the part: one of them is wrong
            part.unlink(missing_ok=True)
        if error.code in (408, 416, 429) or error.code >= 500:
            raise _InterruptedError(f"the server answered {error.code} {error.reason}") from error
        raise DataError(f"{url}: the server answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DataError(f"{url}: no connection ({error.reason}); check the network and run again") from error
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(str(error) or type(error).__name__) from error


def _range_start(response: http.client.HTTPResponse) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _read_chunk(response: http.client.HTTPResponse, limit_bytes: int) -> bytes:
    try:
        return response.read1(min(_CHUNK_BYTES, limit_bytes))
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(str(error) or type(error).__name__) from error


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """What the network did wrong has its own errors; an OSError that is left is the disk's."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror or error})") from error


@contextlib.contextmanager
def locked(folder: Path, *, wait_s: float = 3600.0) -> Iterator[None]:
    """Keep other processes that do the same out of a folder, so that one downloads and the rest find it done.

    The lock is the kernel's: it goes when its holder does, however it ends. The empty file `.download.lock`
    that carries it stays.

    Args:
        folder: the folder; made if missing.
        wait_s: the longest wait for another process.

    Yields:
        Nothing, with the lock held.

    Raises:
        DataError: the wait was too long, or the folder cannot be written to.
    """
    deadline_s = time.monotonic() + wait_s
    with contextlib.ExitStack() as stack:
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".download.lock").open("ab"))
            while not _try_lock(file):
                if time.monotonic() > deadline_s:
                    raise DataError(
                        f"{folder}: expected to wait at most {wait_s:.0f} s for another process's "
                        "download into it; end that process"
                    )
                time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unpack(archive: Path, folder: Path, *, members: Collection[str], size_bytes: int) -> None:
    """Take named plain files out of a gzipped tar; nothing else in it is written, wherever it points.

    The bytes are copied out of the archive under names that the caller chose, so neither the paths nor the
    modes nor the links in it matter. A file that is already there is left alone; a new one appears whole.

    Args:
        archive: the .tar.gz file.
        folder: where the files go, under the last part of their names; made if missing.
        members: the paths in the archive, all of which must be there.
        size_bytes: the size that each must have.

    Raises:
        DataError: the archive is damaged, a member is missing, not a plain file or of another size, or the
            disk is full.
    """
    missing = set(members)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.name not in missing:
                    continue
                source = tar.extractfile(member) if member.isreg() and member.size == size_bytes else None
                if source is None:
                    raise DataError(
                        f"{archive}: expected {member.name} to be a plain file of {size_bytes:,} bytes, "
                        f"found type {member.type!r} of {member.size:,}"
                    )
                missing.remove(member.name)
                target = folder / PurePosixPath(member.name).name
                if not target.exists():
                    part = target.with_name(target.name + ".part")
                    with source, part.open("wb") as file:
                        shutil.copyfileobj(source, file)
                    os.replace(part, target)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive}: damaged ({error}); delete it and run with --download again") from error
    except OSError as error:
        raise DataError(f"{archive}: cannot be unpacked to {folder} ({error.strerror or error})") from error
    if missing:
        raise DataError(f"{archive}: expected {', '.join(sorted(missing))} in it, found no such file")
