"""The actor in which a job's coordinator runs."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

import ray

from offbeat.errors import OffbeatError
from offbeat.ray.workers import file_in_memory
from offbeat.runtime.control.environment import JOB_VARIABLE, TOKEN_FILE_VARIABLE
from offbeat.runtime.control.service import ADDRESS_FILE
from offbeat.runtime.processes import child
from offbeat.runtime.processes.threads import start_thread

_START_S: Final = 60.0  # for the coordinator to start, and for its folder to become free
_POLL_S: Final = 0.05
_log = logging.getLogger("offbeat")


class CoordinatorActor:
    """Runs `offbeat coordinator` as a process that ends with this actor.

    The actor ends, and Ray restarts it, when the process ends before the job does.

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
        self._has_finished = False
        self._process = self._start()
        start_thread("offbeat-coordinator", self._end_with_process, self._end)

    def address(self) -> str:
        """Return HOST:PORT at which the coordinator listens."""
        return (self._folder / ADDRESS_FILE).read_text().strip()

    def has_finished(self) -> bool:
        """Return whether all workers of the job have finished."""
        return self._has_finished

    def stop(self) -> None:
        """End the coordinator of a job that is over, and remove its folder."""
        self._has_finished = True
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process and wait until it listens; wait for a folder that another one still uses.

        The kernel ends the process with this thread, which is the main thread of Ray's worker.
        """
        host = ray.util.get_node_ip_address()
        where = self._folder / ADDRESS_FILE
        where.unlink(missing_ok=True)  # of the coordinator before
        command = child.tied_command(
            child.module_command(
                "offbeat", "coordinator", "--bind", f"{host}:0", "--state", str(self._folder)
            )
        )
        limit_s = time.monotonic() + _START_S
        process = child.start_child(command, "the coordinator")
        while not where.exists():
            if time.monotonic() >= limit_s:
                process.kill()
                raise OffbeatError(f"the coordinator did not start within {_START_S:g} s: see its output")
            if process.poll() is not None:
                process = child.start_child(command, "the coordinator")
            time.sleep(_POLL_S)
        return process

    def _end_with_process(self) -> None:
        if self._process.wait() == 0 or self._has_finished:
            self._has_finished = True
        else:
            self._end(OffbeatError("the coordinator has ended"))

    def _end(self, error: BaseException) -> None:
        """End this actor, so that Ray starts it again."""
        _log.error("%s: its actor is started again", error)
        os._exit(1)
