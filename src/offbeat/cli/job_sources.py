"""Where `offbeat top` gets the state of a job: from its run log, or from its coordinator over HTTP."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import Final, Protocol

from offbeat.cli.entry import file_errors
from offbeat.errors import OffbeatError, ProtocolError
from offbeat.runtime.transport.addresses import split_host_and_port
from offbeat.wire.codec import decode_json
from offbeat.wire.job_status import JobStatus
from offbeat.wire.job_view import JobView
from offbeat.wire.log_tail import LogTail

LOG_NAME: Final = "log.jsonl"
JOB_PATH: Final = "/job"
REQUEST_S: Final = 2.0
UNANSWERED_S: Final = 10.0  # a coordinator that was killed is back within seconds
_ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
_RECEIVE_BYTES: Final = 256 * 1024


class JobSource(Protocol):
    """Returns the state of a job again and again.

    Attributes:
        is_behind: there is more to read at once.
        is_over: the job has ended, or its coordinator has gone: the state is the last one.
        trouble: why the state is an old one, "" if it is not.
    """

    is_behind: bool
    is_over: bool
    trouble: str

    def status(self) -> JobStatus:
        """Return the state.

        Raises:
            OffbeatError, ValueError: there is none.
        """


def open_source(run: str) -> JobSource:
    """Return the source of a run's folder, its log, one part of its log, or HOST:PORT.

    Raises:
        OffbeatError: it is none of these.
    """
    path = Path(run)
    if path.is_dir():
        path /= LOG_NAME
        if not path.exists():
            raise OffbeatError(f"the folder {run} holds no run log, {LOG_NAME}")
    if path.exists():
        return LogSource(path)
    try:
        host, port = split_host_and_port(run.removeprefix("http://").rstrip("/"))
    except ValueError:
        raise OffbeatError(
            f"expected a run's folder, a run log, or HOST:PORT of a running job, got {run!r}: there is no "
            "such file"
        ) from None
    return HttpSource(host, port)


class LogSource:
    """Reads a run log as it grows."""

    def __init__(self, path: Path) -> None:
        self.is_behind, self.is_over = True, False
        self.trouble = ""
        self._tail, self._restarts = LogTail(path), 0
        self._view = JobView()

    def status(self) -> JobStatus:
        """Return the state after the next 4 MiB of the log, or less if there are less; see `JobSource`."""
        with file_errors("read", self._tail.path):
            lines = self._tail.read_lines()
        if self._tail.restarts != self._restarts:
            self._view, self._restarts = JobView(), self._tail.restarts
        for line in lines:
            try:
                self._view.add(decode_json(line))
            except ProtocolError as error:
                raise OffbeatError(f"{self._tail.path}: {error}") from None
        self.is_behind = bool(lines)
        if not self._tail.has_begun:
            raise OffbeatError(f"{self._tail.path} is empty: expected a run log")
        status = self._view.status()
        self.is_over = status.is_over and not self.is_behind
        return status


class HttpSource:
    """Asks a coordinator that serves the state of its job (OFFBEAT_METRICS).

    A coordinator ends with its job, mostly before it has been asked again: one that has answered and then
    gives no answer for `UNANSWERED_S` is taken to have ended.
    """

    def __init__(self, host: str, port: int) -> None:
        self.is_behind, self.is_over = False, False
        self.trouble = ""
        self._address = host, port
        self._last: JobStatus | None = None
        self._answered_s = time.monotonic()

    def status(self) -> JobStatus:
        """Return the state, the last one while the coordinator does not answer; see `JobSource`."""
        host, port = self._address
        try:
            self._last = JobStatus.from_json(_get(host, port, JOB_PATH))
            self.trouble, self._answered_s = "", time.monotonic()
            self.is_over = self._last.is_over
        except (OSError, ValueError) as error:
            silent_s = time.monotonic() - self._answered_s
            cause = (isinstance(error, OSError) and error.strerror) or str(error)
            self.trouble = f"{host}:{port} has not answered for {silent_s:.0f} s: {cause}"
            if self._last is None:
                raise OffbeatError(
                    f"{host}:{port} does not answer as a job does: {cause}; does the job run, and its "
                    f"coordinator with OFFBEAT_METRICS={port}?"
                ) from None
            self.is_over = silent_s > UNANSWERED_S
        return self._last


def _get(host: str, port: int, path: str) -> bytes:
    """Return the body of an HTTP answer.

    Raises:
        OSError: it has not come within `REQUEST_S`.
        ValueError: it is none, or not successful.
    """
    limit_s = time.monotonic() + REQUEST_S
    data = bytearray()
    with socket.create_connection((host, port), timeout=REQUEST_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
        while len(data) < _ANSWER_BYTES_MAX:
            left_s = limit_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no whole answer within {REQUEST_S:g} s")
            connection.settimeout(left_s)
            received = connection.recv(_RECEIVE_BYTES)
            if not received:
                break
            data += received
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.\d (\d{3}) ?([^\r\n]*)", head)
    if found is None:
        raise ValueError("expected an answer in HTTP")
    if found[1] != b"200":
        raise ValueError(f"it answers {path} with {found[0].decode(errors='replace')}")
    return body
