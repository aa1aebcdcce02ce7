"""Processes that read what they are to be from standard input and answer in one line: how they are started.

The coordinator is started by whoever begins a job or a parameter server, a server on whatever machine it is
to be.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import msgspec

from offbeat.errors import OffbeatError, explain
from offbeat.runtime.processes import child

if TYPE_CHECKING:
    from offbeat.runtime.control.coordinator import Configuration
    from offbeat.runtime.ps.server import ServerConfiguration

_COORDINATOR_S = 20.0
_SERVER_S = 60.0  # it has to be taken in by the manager first
_ENDS_S = 5.0  # for a process that has closed its output already
_Given = TypeVar("_Given", bound=msgspec.Struct)
_detached: list[subprocess.Popen[bytes]] = []  # started here; who ended is reaped at the next start


def new_secrets() -> tuple[str, str]:
    """Return a job's id and a token that nobody guesses."""
    return secrets.token_hex(8), secrets.token_hex(32)


def start_coordinator(configuration: Configuration) -> tuple[str, ...]:
    """Start the coordinator as a process of its own, which outlives its starter, and return its addresses.

    Raises:
        OffbeatError: it did not start.
    """
    name = "the coordinator"
    process = _detach("offbeat.runtime.control.coordinator", name)

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL)  # its child too

    return tuple(_answer(process, configuration, name, _COORDINATOR_S, kill)["addresses"])


def start_server(configuration: ServerConfiguration, *, outlives: bool = False) -> subprocess.Popen[bytes]:
    """Start a server as a process of its own.

    Args:
        configuration: what it is to be.
        outlives: it ends with its job; otherwise, with the thread that starts it.

    Raises:
        OffbeatError: it did not start.
    """
    module = "offbeat.runtime.ps.server"
    name = "a server" if configuration.server is None else f"server {configuration.server}"
    process = _detach(module, name) if outlives else child.start(child.tied(child.program(module)), name)
    _answer(process, configuration, name, _SERVER_S, process.kill)
    return process


def _detach(module: str, name: str) -> subprocess.Popen[bytes]:
    """Start a module as a process that outlives this one."""
    _detached[:] = [one for one in _detached if one.poll() is None]
    process = child.start(child.program(module), name, is_detached=True)
    _detached.append(process)
    return process


def given(source: TextIO, kind: type[_Given]) -> _Given:
    """Return what this process is told to be; see `_answer`.

    Raises:
        ValueError: it is told nothing, or something else.
    """
    return msgspec.convert(json.loads(source.readline()), kind)


def say(answer: TextIO, said: dict[str, Any]) -> None:
    """Answer whoever has started this process."""
    answer.write(json.dumps(said) + "\n")
    answer.flush()


def failure(error: Exception) -> dict[str, str]:
    """Return the answer of a process that cannot be what it was told to be."""
    return {"error": explain(error) if isinstance(error, OSError) else str(error)}


def _answer(
    process: subprocess.Popen[bytes],
    configuration: msgspec.Struct,
    name: str,
    limit_s: float,
    kill: Callable[[], None],
) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as stdout:
        with suppress(BrokenPipeError):  # it has ended, which its output shows
            # In ASCII: the halves of surrogate pairs with which Python writes a file's name that is no UTF-8
            # arrive as they are.
            process.stdin.write(json.dumps(msgspec.to_builtins(configuration)).encode() + b"\n")
            process.stdin.close()
        answer: dict[str, Any] = {"error": f"it has not answered for {limit_s:g} s"}
        if select.select([stdout], [], [], limit_s)[0]:
            line = stdout.readline()
            answer = json.loads(line) if line else {"error": _how_it_ended(process)}
    if "error" in answer:
        with suppress(ProcessLookupError):
            kill()
        process.wait()
        raise OffbeatError(f"{name} did not start: {answer['error']}")
    return answer


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_ENDS_S)
    except subprocess.TimeoutExpired:
        return "it closed its output without a word"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"it {how} before it answered: see what it wrote to standard error"
