"""Child processes of a benchmark, with JSON messages, one per line, over standard input and output."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.runtime.processes import child
from offbeat.runtime.processes.waiting import wait_until_readable

RECEIVE_S = 60.0  # default time to wait for a message


class Lines:
    """One end of a channel of JSON messages.

    Args:
        source, target: file descriptors to read from and to write to.
        peer: name of the other end, for errors.
    """

    def __init__(self, source: int, target: int, peer: str) -> None:
        self._source, self._target, self._peer = source, target, peer
        self._buffer = bytearray()

    @classmethod
    def to_parent(cls) -> Lines:
        """Open the channel to the parent process."""
        return cls(sys.stdin.fileno(), sys.stdout.fileno(), "the benchmark")

    def send(self, message: Any) -> None:
        """Send a message of plain data."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._target, data) :]
        except BrokenPipeError:
            raise OffbeatError(f"{self._peer} ended") from None

    def has_message(self, timeout_s: float = 0.0) -> bool:
        """Return whether a message is ready, after waiting up to `timeout_s` for one.

        Raises:
            OffbeatError: the other end has closed.
        """
        limit_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not wait_until_readable(self._source, limit_s - time.monotonic()):
                return False
            data = os.read(self._source, 2**16)
            if not data:
                raise OffbeatError(f"{self._peer} ended")
            self._buffer += data
        return True

    def receive(self, timeout_s: float = RECEIVE_S) -> Any:
        """Receive one message.

        Raises:
            OffbeatError: the other end has closed, or sent nothing within `timeout_s`.
        """
        if not self.has_message(timeout_s):
            raise OffbeatError(f"{self._peer}: timed out after {timeout_s:g} s waiting for a message")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        return json.loads(line)


class Child:
    """A process that runs `python -m module` and ends with the thread that started it.

    Args:
        module: the module to run.
        name: for errors.
        prefix: put before the command (see `benchmarks.namespaces.Host`).

    Attributes:
        lines: the channel to it.
    """

    def __init__(self, module: str, *, name: str, prefix: Sequence[str] = ()) -> None:
        self._process = child.start_child(child.tied_command([*prefix, *child.module_command(module)]), name)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.lines = Lines(self._process.stdout.fileno(), self._process.stdin.fileno(), name)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def request_all(children: Iterable[Child], message: Any) -> list[Any]:
    """Send a message to several children; return the reply of each."""
    receivers = list(children)
    for receiver in receivers:
        receiver.lines.send(message)
    return [receiver.lines.receive() for receiver in receivers]
