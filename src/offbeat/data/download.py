"""Verified, resumable downloads; this module knows no data set and parses no file.

A file is received as `NAME.part` next to its target and renamed when its size and checksum are right, so that
a file with the final name is complete. If a download fails, its .part file stays, and the next attempt
requests the rest.
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

DownloadProgress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes received so far and the bytes expected."""

_CHUNK_BYTES = 1 << 18
_LOCK_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file on the network and its expected size and checksum.

    Attributes:
        url: http or https.
        md5: checksum, hexadecimal, as its publisher states it.
        size_bytes: exact size.
    """

    url: str
    md5: str
    size_bytes: int


class _InterruptedError(Exception):
    """The connection ended early; another attempt may succeed."""


def download_file(
    remote: RemoteFile,
    target: Path,
    *,
    progress: DownloadProgress | None = None,
    timeout_s: float = 30.0,
    attempts: int = 5,
    pause_s: float = 1.0,
) -> None:
    """Download a file unless `target` exists; afterwards it is there and complete, or an error is raised.

    A `target` that exists is not checked. A download is checked by size and MD5. After a wrong checksum of a
    resumed download the old part is deleted and the file downloaded once more from the beginning, with as
    many attempts again. Where several processes may download the same file, hold `lock_folder`.

    Args:
        remote: the file to download.
        target: where to store it; folders are created.
        progress: called as bytes arrive.
        timeout_s: longest time without a byte from the server, connecting included, in seconds; there is no
            limit on a server that keeps sending, however slowly.
        attempts: largest number of connections of one download, at least 1; only an interrupted transfer or a
            server error (5xx, 408, 429) is retried, not a connection that cannot be made.
        pause_s: pause before the second connection, in seconds; each later pause is longer by as much.

    Raises:
        DataError: no connection, an HTTP error, too many interruptions, an unexpected size or checksum, a
            full disk or a folder that is not writable.
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
                    f"{remote.url}: expected the md5 checksum {remote.md5}, received {found}; the "
                    "server sent another file, which was deleted: try again later, or put the file at "
                    f"{target}"
                )
            resumed = False


def _complete(
    remote: RemoteFile,
    part: Path,
    progress: DownloadProgress | None,
    *,
    timeout_s: float,
    attempts: int,
    pause_s: float,
) -> None:
    """Complete the part over at most `attempts` connections."""
    for attempt in range(attempts):
        received_bytes = part.stat().st_size if part.exists() else 0
        if received_bytes == remote.size_bytes:
            return
        if received_bytes > remote.size_bytes:
            part.unlink()
            received_bytes = 0
        if attempt:
            time.sleep(pause_s * attempt)
        try:
            _receive(remote, part, received_bytes, progress, timeout_s)
            return
        except _InterruptedError as error:
            reason = error
    received_bytes = part.stat().st_size if part.exists() else 0
    raise DataError(
        f"{remote.url}: given up after {attempts} attempts with {received_bytes:,} of {remote.size_bytes:,} "
        f"bytes ({reason}); run again to resume"
    ) from reason


def _receive(
    remote: RemoteFile, part: Path, received_bytes: int, progress: DownloadProgress | None, timeout_s: float
) -> None:
    """Append what one connection yields, or start over if the server does not send only the rest."""
    with _open(remote.url, received_bytes, part, timeout_s) as response:
        if response.status != 206:
            received_bytes = 0
        elif _range_start(response) != received_bytes:
            part.unlink()
            raise _InterruptedError(f"the server sent the range {response.headers.get('Content-Range')!r}")
        offered_bytes = None if response.length is None else received_bytes + response.length
        if offered_bytes not in (None, remote.size_bytes):
            raise DataError(
                f"{remote.url}: expected {remote.size_bytes:,} bytes, the server offers {offered_bytes:,}: "
                "this is not the file; check that the network lets this address through"
            )
        with part.open("ab" if received_bytes else "wb") as file:
            while chunk := _read_chunk(response, remote.size_bytes + 1 - received_bytes):
                file.write(chunk)
                received_bytes += len(chunk)
                if received_bytes > remote.size_bytes:
                    break
                if progress is not None:
                    progress(part.name.removesuffix(".part"), received_bytes, remote.size_bytes)
    if received_bytes > remote.size_bytes:
        part.unlink()
        raise DataError(
            f"{remote.url}: expected {remote.size_bytes:,} bytes, the server sent more; try again later"
        )
    if received_bytes < remote.size_bytes:
        raise _InterruptedError("the connection ended early")


def _open(url: str, received_bytes: int, part: Path, timeout_s: float) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "offbeat"})
    if received_bytes:
        request.add_header("Range", f"bytes={received_bytes}-")
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
    """Raise a DataError for any other OSError, which is the disk's: network errors are handled before."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror or error})") from error


@contextlib.contextmanager
def lock_folder(folder: Path, *, wait_s: float = 3600.0) -> Iterator[None]:
    """Lock a folder against other processes that lock it, so that one downloads and the rest find the files.

    The lock is the kernel's and is released when its holder ends, however it ends. The empty lock file
    `.download.lock` stays.

    Args:
        folder: the folder; created if missing.
        wait_s: longest wait for another process, in seconds.

    Yields:
        Nothing, with the lock held.

    Raises:
        DataError: the wait timed out, or the folder is not writable.
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


def extract_members(archive: Path, folder: Path, *, members: Collection[str], size_bytes: int) -> None:
    """Extract named plain files from a gzipped tar; no other member is written, whatever its path.

    The bytes are copied under names that the caller chose, so that paths, modes and links in the archive have
    no effect. A file that already exists is left alone; a new one appears complete.

    Args:
        archive: the .tar.gz file.
        folder: where to put the files, under the last part of their names; created if missing.
        members: paths in the archive, all of which must exist.
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
