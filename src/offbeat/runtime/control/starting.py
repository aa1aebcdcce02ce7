"""Starts modules as processes that read their configuration from standard input and answer in one line.

A coordinator is started by the process that begins a job or a parameter server.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, TypeVar

import msgspec

from offbeat.errors import OffbeatError, describe_os_error
from offbeat.runtime.control.configuration import CoordinatorConfiguration
from offbeat.runtime.processes import child
from offbeat.runtime.processes.waiting import wait_until_readable

_COORDINATOR_S = 20.0
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
    module, name = "offbeat.runtime.control.coordinator", "the coordinator"
    process = _start_detached(module, name)

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL)  # its child too

    return tuple(_wait_for_answer(process, configuration, name, _COORDINATOR_S, kill)["addresses"])


def start_program(
    module: str, configuration: msgspec.Struct, name: str, timeout_s: float, *, is_detached: bool
) -> subprocess.Popen[bytes]:
    """Start a module as a process, and wait for its answer.

    Args:
        module: what to run, as `python -m` does; it reads its configuration with `read_configuration`.
        configuration: of the process.
        name: of the process, for errors.
        timeout_s: how long its answer may take, in seconds.
        is_detached: it outlives this process; otherwise, it ends with the thread that starts it.

    Raises:
        OffbeatError: it did not start.
    """
    if is_detached:
        process = _start_detached(module, name)
    else:
        process = child.start_child(child.tied_command(child.module_command(module)), name)
    _wait_for_answer(process, configuration, name, timeout_s, process.kill)
    return process


def _start_detached(module: str, name: str) -> subprocess.Popen[bytes]:
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
        if wait_until_readable(stdout, limit_s):
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
