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
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from offbeat.errors import OffbeatError
from offbeat.runtime.launch import tied

if TYPE_CHECKING:
    from offbeat.runtime.coordinator import Configuration
    from offbeat.runtime.server import ServerConfiguration

_COORDINATOR_S = 20.0
_SERVER_S = 60.0  # it has to be taken in by the manager first
_detached: list[subprocess.Popen[bytes]] = []  # started here; who ended is reaped at the next start


def new_secrets() -> tuple[str, str]:
    """Return a job's id and a token that nobody guesses."""
    return secrets.token_hex(8), secrets.token_hex(32)


def start_coordinator(configuration: Configuration) -> tuple[str, ...]:
    """Start the coordinator as a process of its own, which outlives its starter, and return its addresses.

    Raises:
        OffbeatError: it did not start.
    """
    process = _detach("offbeat.runtime.coordinator")

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL)  # its child too

    return tuple(_answer(process, configuration, "the coordinator", _COORDINATOR_S, kill)["addresses"])


def start_server(configuration: ServerConfiguration, *, outlives: bool = False) -> subprocess.Popen[bytes]:
    """Start a server as a process of its own.

    Args:
        configuration: what it is to be.
        outlives: it ends with its job; otherwise, with the thread that starts it.

    Raises:
        OffbeatError: it did not start.
    """
    module = "offbeat.runtime.server"
    process = _detach(module) if outlives else _tie(module)
    name = "a server" if configuration.server is None else f"server {configuration.server}"
    _answer(process, configuration, name, _SERVER_S, process.kill)
    return process


def _tie(module: str) -> subprocess.Popen[bytes]:
    """Start a module as a process that ends with this thread."""
    command = tied([sys.executable, "-m", module])
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _detach(module: str) -> subprocess.Popen[bytes]:
    """Start a module as a process that outlives this one."""
    _detached[:] = [one for one in _detached if one.poll() is None]
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    _detached.append(process)
    return process


def say(answer: TextIO, said: dict[str, Any]) -> None:
    """Answer whoever has started this process."""
    answer.write(json.dumps(said) + "\n")
    answer.flush()


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
        process.stdin.write(msgspec.json.encode(configuration) + b"\n")
        process.stdin.close()
        answer: dict[str, Any] = {"error": f"it has not answered for {limit_s:g} s"}
        if select.select([stdout], [], [], limit_s)[0]:
            line = stdout.readline()
            answer = json.loads(line) if line else {"error": "it ended without a word"}
    if "error" in answer:
        with suppress(ProcessLookupError):
            kill()
        process.wait()
        raise OffbeatError(f"{name} did not start: {answer['error']}")
    return answer
