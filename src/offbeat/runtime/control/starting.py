"""Starts coordinators and servers: each reads its configuration from standard input and answers in one line.

A coordinator is started by the process that begins a job or a parameter server, a server by a process on the
machine where it is to run.
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

from offbeat.errors import OffbeatError, describe_os_error
from offbeat.runtime.processes import child

if TYPE_CHECKING:
    from offbeat.runtime.control.coordinator import CoordinatorConfiguration
    from offbeat.runtime.ps.server import ServerConfiguration

_COORDINATOR_S = 20.0
_SERVER_S = 60.0  # the manager has to accept it first
_EXIT_S = 5.0  # for a process that has closed its output already
_Configuration = TypeVar("_Configuration", bound=msgspec.Struct)
_detached: list[subprocess.Popen[bytes]] = []  # started here; those that ended are reaped at the next start


def new_job_id_and_token() -> tuple[str, str]:
    """Return a random job id and a secret token."""
    return secrets.token_hex(8), secrets.token_hex(32)


def start_coordinator(configuration: CoordinatorConfiguration) -> tuple[str, ...]:
    """Start a coordinator as a process that outlives this one, and return its addresses.

    Raises:
        OffbeatError: it did not start.
    """
    name = "the coordinator"
    process = _detach("offbeat.runtime.control.coordinator", name)

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL)  # its child too

    return tuple(_wait_for_answer(process, configuration, name, _COORDINATOR_S, kill)["addresses"])


def start_server(configuration: ServerConfiguration, *, is_detached: bool = False) -> subprocess.Popen[bytes]:
    """Start a server as a process of its own.

    Args:
        configuration: of the server.
        is_detached: it ends with its job; otherwise, with the thread that starts it.

    Raises:
        OffbeatError: it did not start.
    """
    module = "offbeat.runtime.ps.server"
    name = "a server" if configuration.server is None else f"server {configuration.server}"
    process = (
        _detach(module, name)
        if is_detached
        else child.start_child(child.tied_command(child.module_command(module)), name)
    )
    _wait_for_answer(process, configuration, name, _SERVER_S, process.kill)
    return process


def _detach(module: str, name: str) -> subprocess.Popen[bytes]:
    """Start a module as a process that outlives this one."""
    _detached[:] = [one for one in _detached if one.poll() is None]
    process = child.start_child(child.module_command(module), name, is_detached=True)
    _detached.append(process)
    return process


def read_configuration(source: TextIO, kind: type[_Configuration]) -> _Configuration:
    """Return this process's configuration, read from standard input; see `_wait_for_answer`.

    Raises:
        ValueError: no configuration is there, or a malformed one.
    """
    return msgspec.convert(json.loads(source.readline()), kind)


def write_answer(stream: TextIO, answer: dict[str, Any]) -> None:
    """Answer the process that started this one."""
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


def failure_answer(error: Exception) -> dict[str, str]:
    """Return the answer of a process that cannot start."""
    return {"error": describe_os_error(error) if isinstance(error, OSError) else str(error)}


def _wait_for_answer(
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
            # In ASCII: the halves of surrogate pairs with which Python writes a file's name that is not UTF-8
            # arrive unchanged.
            process.stdin.write(json.dumps(msgspec.to_builtins(configuration)).encode() + b"\n")
            process.stdin.close()
        answer: dict[str, Any] = {"error": f"timed out after {limit_s:g} s waiting for its answer"}
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
        code = process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        return "it closed its output without an answer"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"it {how} before it answered: see what it wrote to standard error"
