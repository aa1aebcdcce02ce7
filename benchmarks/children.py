"""Processes of a benchmark that are spoken to while they run: lines of JSON on standard input and output."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.runtime.processes import child

HEAR_S = 60.0  # for which one side waits for the other at most


class Lines:
    """One side of a conversation.

    Args:
        source, target: file descriptors, to read from and to write to.
        other: who is at the other end, for errors.
    """

    def __init__(self, source: int, target: int, other: str) -> None:
        self._source, self._target, self._other = source, target, other
        self._buffer = bytearray()

    @classmethod
    def to_parent(cls) -> Lines:
        """Speak to the process that started this one."""
        return cls(sys.stdin.fileno(), sys.stdout.fileno(), "the benchmark")

    def tell(self, said: Any) -> None:
        """Say something, as plain data."""
        data = memoryview(json.dumps(said).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._target, data) :]
        except BrokenPipeError:
            raise OffbeatError(f"{self._other} ended") from None

    def has_come(self, timeout_s: float = 0.0) -> bool:
        """Whether the other side has said something, or says it within `timeout_s`.

        Raises:
            OffbeatError: it has ended.
        """
        limit_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not select.select([self._source], [], [], max(0.0, limit_s - time.monotonic()))[0]:
                return False
            data = os.read(self._source, 2**16)
            if not data:
                raise OffbeatError(f"{self._other} ended")
            self._buffer += data
        return True

    def hear(self, timeout_s: float = HEAR_S) -> Any:
        """Wait for what the other side says.

        Raises:
            OffbeatError: it has ended, or says nothing.
        """
        if not self.has_come(timeout_s):
            raise OffbeatError(f"{self._other} has said nothing for {timeout_s:g} s")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        return json.loads(line)


class Child:
    """`python -m module` as a process that ends with the thread that started it.

    Args:
        module: what it runs.
        name: for errors.
        prefix: what to put before the command (see `bench.namespaces.Host`).

    Attributes:
        lines: what is said to it and by it.
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


def ask_all(children: Iterable[Child], said: Any) -> list[Any]:
    """Say something to several, and wait for the answer of each."""
    asked = list(children)
    for one in asked:
        one.lines.tell(said)
    return [one.lines.hear() for one in asked]
