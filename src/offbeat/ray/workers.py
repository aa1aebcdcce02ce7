"""What happens in the workers, in functions that Ray runs there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import ray
import ray.train
from ray.exceptions import RayError
from ray.train.v2._internal.execution.context import get_train_context

from offbeat.errors import OffbeatError
from offbeat.runtime.control.environment import (
    ATTEMPT_VARIABLE,
    COORDINATOR_VARIABLE,
    JOB_VARIABLE,
    SERVERS_APART_VARIABLE,
    TOKEN_FILE_VARIABLE,
)
from offbeat.runtime.session import LaunchedLoop, launched_loop
from offbeat.runtime.training.interface import Strategy

ANSWER_S: Final = 30.0  # for an actor to answer, which may be restarting
_log = logging.getLogger("offbeat")


@dataclass(frozen=True)
class Job:
    """What a worker needs to take part in a job.

    Attributes:
        name: drawn at random.
        secret: of the job's processes.
        address: HOST:PORT of the coordinator.
        address_file: the file with the address, also after the coordinator has moved; None where there is no
            storage in the file system.
        coordinator: its actor.
        reports: the actor of a ReportLedger; None where no worker is replaced alone.
        servers: number of the job's parameter servers, 0 where its strategy has none.
        is_replacement: the worker replaces one that was lost.
    """

    name: str
    secret: str
    address: str
    address_file: str | None
    coordinator: Any
    reports: Any
    servers: int = 0
    is_replacement: bool = False


@dataclass
class _Worker:
    """This process as a worker.

    Attributes:
        job: in which it takes part.
        loop: the user's, while it runs.
        report: epoch and number in the epoch of the last call of `ray.train.report`.
    """

    job: Job
    loop: LaunchedLoop | None = None
    report: tuple[int, int] = (-1, 0)

    def name_checkpoint(self, context: Any, name: str | None = None) -> str:
        """Return the name of the folder for the checkpoint of a report, the same in all workers.

        Args:
            context: Ray's internal one of this worker.
            name: the one that the caller of `ray.train.report` has given.

        Raises:
            RayTaskError: not all workers make this report; Ray skips it, with a warning.
        """
        session = self.loop.session if self.loop is not None else None
        epoch = 0 if session is None else session.epoch
        self.report = (epoch, self.report[1] + 1 if self.report[0] == epoch else 0)
        context.next_collective_seq()  # which Ray takes back if the report is skipped
        ray.get(self.job.reports.check.remote(context.get_world_rank(), self.report))
        return name or f"checkpoint_{self.job.name}_{epoch:06d}_{self.report[1]:03d}"


_worker: _Worker | None = None


def enter_job(job: Job) -> None:
    """Set what `offbeat.join` reads, in a worker."""
    global _worker
    _worker = _Worker(job)
    context = ray.train.get_context()
    os.environ |= variables_of(job) | {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
    }
    if job.servers:
        os.environ[SERVERS_APART_VARIABLE] = str(job.servers)
    if job.reports is not None:
        inner = get_train_context()
        inner._sync_checkpoint_dir_name_across_ranks = partial(_worker.name_checkpoint, inner)


def variables_of(job: Job) -> dict[str, str]:
    """Return the variables by which a process on this node finds a job."""
    is_visible = job.address_file is not None and os.path.isfile(job.address_file)
    return {
        COORDINATOR_VARIABLE: Path(job.address_file or "").as_uri() if is_visible else job.address,
        JOB_VARIABLE: job.name,
        TOKEN_FILE_VARIABLE: file_in_memory(job.secret),
        ATTEMPT_VARIABLE: "0",  # each start of the whole group is another job
    }


@contextmanager
def in_job(strategy: Strategy) -> Iterator[None]:
    """Surround the user's loop: give `join` the strategy, and end a replacement that comes too late."""
    with launched_loop(strategy) as loop:
        if _worker is not None:  # there is none in Ray's local mode
            _worker.loop = loop
        try:
            yield
        except OffbeatError as error:
            if _worker is None or not _worker.job.is_replacement or not _has_finished(_worker.job):
                raise
            _log.warning("this worker is not needed any more, since the others have finished (%s)", error)


def _has_finished(job: Job) -> bool:
    """Whether all workers of the job have finished."""
    with suppress(RayError):
        finished: bool = ray.get(job.coordinator.has_finished.remote(), timeout=ANSWER_S)
        return finished
    return False


def file_in_memory(text: str) -> str:
    """Return the path of a file that only this user can read, and that ends with this process."""
    file = os.memfd_create("offbeat-secret")
    os.write(file, text.encode())
    return f"/proc/{os.getpid()}/fd/{file}"


def run_name_and_storage() -> tuple[str, str | None]:
    """Return the name of a worker's run, and its storage's folder; None where that is in no file system."""
    context = ray.train.get_context()
    storage = context.get_storage()
    is_local = storage.storage_filesystem.type_name == "local"
    return context.get_experiment_name(), storage.experiment_fs_path if is_local else None
