"""The actor in which a job's coordinator runs, as a process that ends with it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import ray

from offbeat.errors import OffbeatError
from offbeat.ray.workers import file_in_memory
from offbeat.runtime.control.environment import JOB_VARIABLE, TOKEN_FILE_VARIABLE
from offbeat.runtime.control.service import ADDRESS_FILE
from offbeat.runtime.processes import child
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.transport.addresses import read_host_and_port

RESTARTED: Final = {"max_restarts": -1, "max_task_retries": -1}  # Ray's options of an actor
_START_S: Final = 60.0  # for the coordinator to start, and for its folder to become free
_POLL_S: Final = 0.05
_log = logging.getLogger("offbeat")


class ProcessActor:
    """Runs a command of offbeat as a process.

    The process ends with the actor. The actor ends, and Ray restarts it, when the process ends before the job
    does, of which its exit code 0 is the sign.

    Args:
        name: of the process, for errors.
        arguments: of the command.
    """

    def __init__(self, name: str, *arguments: str) -> None:
        self._name, self._arguments = name, arguments
        self._has_finished = False
        self._process = self._start()
        start_thread("offbeat-process", self._end_with_process, self._end)

    def has_finished(self) -> bool:
        """Return whether all workers of the job have finished."""
        return self._has_finished

    def stop(self) -> None:
        """End the process of a job that is over."""
        self._has_finished = True
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process; return it as soon as it may be used."""
        return self._start_process()

    def _start_process(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the process, with these further arguments of the command.

        The kernel ends it with this thread, which is the main thread of Ray's worker.
        """
        command = child.tied_command(child.module_command("offbeat", *self._arguments, *arguments))
        return child.start_child(command, self._name)

    def _end_with_process(self) -> None:
        code = self._process.wait()
        if code and not self._has_finished:
            self._end(OffbeatError(f"{self._name} has ended with exit code {code}"))
        self._has_finished = True

    def _end(self, error: BaseException) -> None:
        """End this actor, so that Ray starts it again."""
        _log.error("%s: its actor is started again", error)
        os._exit(1)


class CoordinatorActor(ProcessActor):
    """Runs `offbeat coordinator`.

    Args:
        folder: of the job's state, in the run's storage; a folder of this node is used where there is none.
        name: of the job.
        secret: of the job's processes.

    Raises:
        OffbeatError: the coordinator did not start.
    """

    def __init__(self, folder: str | None, name: str, secret: str) -> None:
        is_visible = folder is not None and os.path.isdir(os.path.dirname(folder))
        self._folder = Path(folder or "") if is_visible else Path(tempfile.gettempdir(), f"offbeat-{name}")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        os.environ |= {JOB_VARIABLE: name, TOKEN_FILE_VARIABLE: file_in_memory(secret)}
        super().__init__("the coordinator", "coordinator", "--state", str(self._folder))

    def address(self) -> str:
        """Return HOST:PORT at which the coordinator listens."""
        return (self._folder / ADDRESS_FILE).read_text().strip()

    def stop(self) -> None:
        """End the coordinator of a job that is over, and remove its folder."""
        super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the coordinator and wait until it listens; wait for a folder that another one still uses.

        On the node of the coordinator before, it listens at the same address, which is all that processes
        know that do not see the folder. After half of the time, it does so at another port: any process may
        have got the one before.
        """
        host, file = ray.util.get_node_ip_address(), self._folder / ADDRESS_FILE
        before, port = _inode(file), _port_before(file, host)
        start_s = time.monotonic()
        process = self._start_process("--bind", f"{host}:{port}")
        while _inode(file) == before:
            waited_s = time.monotonic() - start_s
            if waited_s >= _START_S:
                process.kill()
                raise OffbeatError(f"the coordinator did not start within {_START_S:g} s: see its output")
            if process.poll() is not None:
                port = port if waited_s < _START_S / 2 else 0
                process = self._start_process("--bind", f"{host}:{port}")
            time.sleep(_POLL_S)
        return process


def _inode(file: Path) -> int | None:
    """Return what identifies the content of a file that is replaced and never changed; None without one."""
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return None


def _port_before(file: Path, host: str) -> int:
    """Return the port in a coordinator's file if that names this host, else 0, for any port."""
    with suppress(OSError):  # there is none yet
        host_before, port = read_host_and_port(str(file))
        return port if host_before == host else 0
    return 0
