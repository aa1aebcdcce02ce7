"""Jobs to break: real workers and their coordinator, and the proof that nothing of them is left.

A job's processes are told from all others by a mark in their environment, its files by a temporary folder of
its own.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offbeat.runtime.control.rendezvous import open_store
from offbeat.runtime.processes.waiting import wait_until_readable
from support.processes import Cluster, Ended, find_free_port, start
from support.run_logs import wait_until

MARK = "OFFBEAT_TEST_JOB"
DEADLINE_S = 60.0
LEFTOVERS_S = 40.0  # a coordinator that has not started the job may wait 30 s for those who are missing


class Job:
    """A running job.

    Attributes:
        cluster: its workers.
        mark: the value of MARK in the environment of its processes.
        folder: where its processes put temporary files.
    """

    def __init__(self, cluster: Cluster, mark: str, folder: Path) -> None:
        self.cluster, self.mark, self.folder = cluster, mark, folder

    def add(self, function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None) -> int:
        """Starts a process that joins the job while it runs; returns its number among those of the job."""
        return self.cluster.add(_in_folder, (function, args), env or {})

    def receive(self, *ranks: int) -> list[Any]:
        """The next thing that each of these workers said."""
        return [self.cluster.receive(rank, DEADLINE_S) for rank in ranks]

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal to a worker; returns when, by the clock that all processes share."""
        pid = self.cluster.processes[rank].pid
        assert pid is not None
        now_s = time.monotonic()
        os.kill(pid, number)
        return now_s

    def died(self, rank: int) -> float:
        """Waits until a worker is dead; returns when that was seen."""
        sentinel = self.cluster.processes[rank].sentinel
        assert multiprocessing.connection.wait([sentinel], DEADLINE_S), f"worker {rank} lives on"
        return time.monotonic()

    def end(self, rank: int) -> Ended:
        """Waits for one worker and returns how it ended."""
        return self.cluster._end(rank, time.monotonic() + DEADLINE_S)

    def ends(self) -> list[Ended]:
        return self.cluster.ends(DEADLINE_S)

    def coordinator(self) -> int:
        """The process id of the coordinator; where it has just been killed, of the next one."""
        return coordinator(self.mark)[0]

    def supervisor(self) -> int:
        """The process id of what starts the coordinator again; it has to live."""
        return coordinator(self.mark)[1]

    def kill_coordinator(self) -> None:
        """Kills the coordinator together with what would start it again."""
        child, supervisor = coordinator(self.mark)
        os.kill(supervisor, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)


@contextmanager
def job(
    function: Callable[..., Any],
    workers: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    clean: bool = True,
    hosts_store: bool = False,
) -> Iterator[Job]:
    """Runs `function(rank, say, *args)` in `workers` processes; afterwards nothing of the job may be left.

    Args:
        clean: whether its temporary files must be gone as well.
        hosts_store: this process has the job's store, as torchrun and `offbeat run` do, not rank 0.
    """
    mark = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="ob"))
    variables = {MARK: mark, "TMPDIR": str(folder), **(env or {})}
    store = None
    if hosts_store:
        port = find_free_port()
        store = open_store("127.0.0.1", port, is_host=True)
        variables |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        with start(_in_folder, workers, function, args, env=variables) as cluster:
            yield Job(cluster, mark, folder)
        gone(mark)
        if clean:
            assert not list(folder.iterdir()), f"left behind: {list(folder.iterdir())}"
    finally:
        del store
        shutil.rmtree(folder, ignore_errors=True)


def _in_folder(rank: int, emit: Callable[[Any], None], function: Callable[..., Any], args: Any) -> Any:
    tempfile.tempdir = None  # the process that this one was forked from may have looked it up already
    return function(rank, emit, *args)


def marked(mark: str) -> list[int]:
    """The processes that were started with this mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def coordinator(mark: str) -> tuple[int, int]:
    """The process ids of the coordinator that now serves the job with this mark, and of its supervisor."""
    pairs: list[tuple[int, int]] = []

    def is_there() -> bool:
        found = [pid for pid in marked(mark) if "offbeat.runtime.control.coordinator" in command(pid)]
        pairs.extend((pid, parent(pid)) for pid in found if parent(pid) in found)
        return bool(pairs)

    wait_until(is_there, "a coordinator")
    return pairs[0]


def parent(pid: int) -> int:
    """The process id of a process's parent, 0 where it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def gone(mark: str) -> None:
    """Waits for the end of all processes with this mark."""
    limit_s = time.monotonic() + LEFTOVERS_S
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                ended = wait_until_readable(fd, limit_s - time.monotonic())
                assert ended, f"still running: {command(pid)}"
            finally:
                os.close(fd)
