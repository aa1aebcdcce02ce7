"""Starts child processes; the one place that decides how they are started and what they inherit.

Theory of operation. A program of offbeat's own (the coordinator, a server, a process that evaluates, a worker
of `offbeat train`) is started by this Python interpreter and imports what this process would import:

- The interpreter gets the options of this one (`-E`, `-s`, `-S`, `-X utf8`, …) and `-P`, so that the working
  directory is not searched merely because the process is started in it.
- It gets this process's `sys.path`, so that it finds a package that only `sys.path.insert` has made
  importable. The standard library comes first: this process may have imported it before its path began with a
  folder that has a `queue.py`.
- Its environment is this process's without PYTHONWARNINGS and PYTHONINSPECT, which are meant for the user's
  program: a warning must not end a coordinator, which has no interactive user. A process that evaluates runs
  the user's program, and gets both.
- Of descriptors it gets standard input, output and error, and those passed by number. Where this process has
  no standard error, the child's is the null device: otherwise it would be the first file it opens.

A user's own command is started as it is (`tied_command`): `offbeat run` runs a script as `python script.py`
does.

This module never waits for a child and never reads its output.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any, Final

from offbeat.errors import OffbeatError, describe_os_error

_NOT_INHERITED: Final = ("PYTHONWARNINGS", "PYTHONINSPECT")
_PR_SET_PDEATHSIG: Final = 1
_TIED_CODE: Final = f"""\
import ctypes, os, signal, sys
if ctypes.CDLL(None, use_errno=True).prctl({_PR_SET_PDEATHSIG}, int(signal.SIGKILL)) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) failed: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec would pass that on
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"cannot start {{sys.argv[2]}}: {{error.strerror}}", file=sys.stderr)
    os._exit(127)
"""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of offbeat, as `python -m` would, with this process's path.

    Raises:
        OffbeatError: the interpreter's path is not known.
    """
    code = f"module = {module!r}; import runpy\n{_path_code()}"
    code += "runpy.run_module(module, run_name='__main__', alter_sys=True)"
    return [*_interpreter(), "-c", code, *arguments]


def evaluation_command(code: str, *arguments: str) -> list[str]:
    """Return the command for Python code that runs the user's; it gets this process's options for warnings.

    Raises:
        OffbeatError: the interpreter's path is not known.
    """
    return [*_interpreter(warns=True), "-c", _path_code() + code, *arguments]


def tied_command(command: Sequence[str]) -> list[str]:
    """Return `command` changed so that the kernel kills it as soon as the thread that started it is gone.

    For a process that must not outlive its parent. Start it from a thread that runs as long as the process
    should. Processes that it starts itself are not covered.

    Raises:
        OffbeatError: the interpreter's path is not known.
    """
    return [*_interpreter(), "-S", "-c", _TIED_CODE, str(os.getpid()), *command]


def start_child(command: Sequence[str], name: str, *, is_detached: bool = False) -> subprocess.Popen[bytes]:
    """Start a command made by `module_command`, with pipes to its standard input and from its output.

    Args:
        command: to run; perhaps `tied_command`.
        name: of the child, for errors.
        is_detached: it leads a session of its own, and gets no signals of this process's terminal.

    Raises:
        OffbeatError: it cannot be started; the text gives the cause and what to do.
    """
    return _popen(
        command,
        name,
        {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=_inherited(2, sys.__stderr__),
        start_new_session=is_detached,
    )


def start_evaluation(
    command: Sequence[str], name: str, descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a command made by `evaluation_command`; its output goes where this process's output goes.

    Args:
        command: to run.
        name: of the child, for errors.
        descriptors: that it inherits under the same numbers.

    Raises:
        OffbeatError: it cannot be started; the text gives the cause and what to do.
    """
    return _popen(
        command,
        name,
        os.environ,
        stdin=subprocess.DEVNULL,
        stdout=_inherited(1, sys.__stdout__),
        stderr=_inherited(2, sys.__stderr__),
        pass_fds=descriptors,
    )


def start_tied(command: Sequence[str], name: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a user's command `tied_command` to this thread, in a session of its own, with pipes from its
    output.

    Args:
        command: to run.
        name: of the child, for errors.
        env: its whole environment.

    Raises:
        OffbeatError: it cannot be started; the text gives the cause and what to do.
    """
    return _popen(
        tied_command(command),
        name,
        env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


def _popen(
    command: Sequence[str], name: str, env: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env=env, **options)
    except OSError as error:
        raise OffbeatError(f"{name} did not start: {describe_os_error(error)}") from error


def _interpreter(*, warns: bool = False) -> list[str]:
    """Return the command of this interpreter, with its own options and without the working directory.

    Args:
        warns: include the options for warnings.
    """
    if not sys.executable:
        raise OffbeatError(
            "expected sys.executable to be the path of the Python interpreter, got none: set it first"
        )
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, "-P", *(one for one in options if warns or not one.startswith("-W"))]


def _path_code() -> str:
    """Return code, in ASCII, that puts this process's path before the child's, the standard library first."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    standard |= {os.path.join(folder, "lib-dynload") for folder in standard}
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    path = ascii(sorted(entries, key=lambda entry: entry not in standard))
    return f"import sys; path = {path}\nsys.path[:] = path + [one for one in sys.path if one not in path]\n"


def _inherited(descriptor: int, stream: object) -> int | None:
    """Return the `Popen` argument that lets a child inherit a standard stream, or gives it the null device.

    Where this process has no such stream, its descriptor's number may belong to any file opened since.
    """
    try:
        is_there = stream is not None and os.get_inheritable(descriptor)
    except OSError:
        is_there = False
    return None if is_there else subprocess.DEVNULL
