"""Settings that the launcher put into the environment, read here and nowhere else; the number of cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from offbeat.errors import OffbeatError

SLOW_VARIABLE = "OFFBEAT_SLOW"
RUN_LOG_VARIABLE = "OFFBEAT_RUN_LOG"
RUN_LOG_BYTES_MAX_VARIABLE = "OFFBEAT_RUN_LOG_BYTES_MAX"
SEED_VARIABLE = "OFFBEAT_SEED"
NEWCOMER_VARIABLE = "OFFBEAT_NEWCOMER"
JOB_VARIABLE = "OFFBEAT_JOB"
START_S_VARIABLE = "OFFBEAT_START_S"
SERVERS_VARIABLE = "OFFBEAT_SERVERS"
TRACE_VARIABLE = "OFFBEAT_TRACE"
_RUN_ID = "TORCHELASTIC_RUN_ID"
_NO_RUN_ID = "none"  # torchrun's id of every job without a --rdzv-id


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A worker's place in the job and the launcher's settings.

    Attributes:
        rank: 0 <= rank < world; of a newcomer, its id, or -1 where that is still to be drawn.
        world: workers in all; a newcomer gets the number from the job.
        is_newcomer: this process joins a running job.
        master_addr: the host of the job's TCPStore.
        master_port: its port, 0 in a world of one.
        agent_hosts_store: the launcher hosts the TCPStore, not rank 0.
        threads: the ids of the workers of this process; several where it has several worker threads.
        servers: how many the parameter server begins with, where the strategy has one; the first processes
            start one each, or several where there are more servers than processes.
        attempt: how often the launcher has restarted the workers.
        job_name: distinguishes the job from others at the same address; None where it has no name.
        slowdowns: slowdowns to inject, in the syntax of `--slow`.
        run_log: where the run log goes, None for no log.
        run_log_bytes_max: limit on all its parts together; None for one file without a limit.
        seed: the seed of the data order.
        trace: the folder to write this worker's trace to, and the first step to trace; None for no trace.
        start_s: how long the job's start may take, in seconds: the last worker may arrive so long after the
            first.
    """

    rank: int = 0
    world: int = 1
    is_newcomer: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    agent_hosts_store: bool = False
    threads: tuple[int, ...] = (0,)
    servers: int = 1
    attempt: int = 0
    job_name: str | None = None
    slowdowns: tuple[str, ...] = ()
    run_log: str | None = None
    run_log_bytes_max: int | None = None
    seed: int = 0
    trace: tuple[str, int] | None = None
    start_s: float = 30.0


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Read the variables set by torchrun, Ray Train, Slurm's torch launchers or Kubeflow.

    With neither RANK nor WORLD_SIZE set it is a world of one. With OFFBEAT_NEWCOMER=1 it is a worker that
    joins the job whose store is at MASTER_ADDR and MASTER_PORT, whatever RANK may be; only a RANK that is
    not below WORLD_SIZE is a newcomer's own, drawn by its launcher. The job's name is OFFBEAT_JOB, or
    else the id that torchrun gives every run (`--rdzv-id`).

    Raises:
        OffbeatError: a variable is missing or malformed.
    """
    rank, world = _int(environ, "RANK", 0), _int(environ, "WORLD_SIZE", 1)
    if ("RANK" in environ) != ("WORLD_SIZE" in environ):
        there, missing = ("RANK", "WORLD_SIZE") if "RANK" in environ else ("WORLD_SIZE", "RANK")
        raise OffbeatError(
            f"{there} is set and {missing} is not: set both, "
            "or start the script with torchrun or 'offbeat run'"
        )
    is_newcomer = _is_newcomer(environ)
    if world < 1 or not (0 <= rank < world or is_newcomer):
        raise OffbeatError(f"expected 0 <= RANK < WORLD_SIZE, got RANK={rank} and WORLD_SIZE={world}")
    if world > 1 or is_newcomer:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                why, what = f"WORLD_SIZE is {world}", "rank 0's address"
                if is_newcomer:
                    why, what = f"{NEWCOMER_VARIABLE} is set", "its value in the job"
                raise OffbeatError(
                    f"{name} is not set although {why}: "
                    f"start the script with torchrun or 'offbeat run', or set it to {what}"
                )
    port = _int(environ, "MASTER_PORT", 0) if world > 1 or is_newcomer else 0
    if not 0 <= port < 65536:
        raise OffbeatError(f"MASTER_PORT must be a port from 1 to 65535, got {port}")
    rank = -1 if is_newcomer and not ("RANK" in environ and rank >= world) else rank
    return Environment(
        rank=rank,
        world=world,
        threads=(rank,),
        is_newcomer=is_newcomer,
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=port,
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        servers=_servers(environ),
        attempt=_int(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        job_name=_job_name(environ),
        slowdowns=tuple(text for text in environ.get(SLOW_VARIABLE, "").split(";") if text),
        run_log=environ.get(RUN_LOG_VARIABLE) or None,
        run_log_bytes_max=_int(environ, RUN_LOG_BYTES_MAX_VARIABLE, 0)
        if environ.get(RUN_LOG_BYTES_MAX_VARIABLE)
        else None,
        seed=_int(environ, SEED_VARIABLE, 0),
        trace=_trace(environ),
        start_s=_seconds(environ, START_S_VARIABLE, Environment.start_s),
    )


def environment_of_thread(environment: Environment, thread: int, threads: int) -> Environment:
    """Return the environment of one of a process's worker threads.

    Args:
        environment: the process's.
        thread: 0 <= thread < threads.
        threads: how many worker threads every process has, at least 1.

    Raises:
        OffbeatError: `thread` is out of range, or a newcomer has several.
    """
    if not 0 <= thread < threads:
        raise OffbeatError(f"expected a thread from 0 to {threads - 1}, got {thread} of {threads}")
    if threads == 1:
        return environment
    if environment.is_newcomer:
        raise OffbeatError(f"expected a newcomer to have one worker thread, got {threads}")
    first = environment.rank * threads
    return replace(
        environment,
        rank=first + thread,
        world=environment.world * threads,
        threads=tuple(range(first, first + threads)),
    )


def _is_newcomer(environ: Mapping[str, str]) -> bool:
    text = environ.get(NEWCOMER_VARIABLE, "0")
    if text not in ("", "0", "1"):
        raise OffbeatError(f"{NEWCOMER_VARIABLE} must be 1 or unset, got {text!r}")
    return text == "1"


def _job_name(environ: Mapping[str, str]) -> str | None:
    run_id = environ.get(_RUN_ID)
    return environ.get(JOB_VARIABLE) or (None if run_id == _NO_RUN_ID else run_id) or None


def _trace(environ: Mapping[str, str]) -> tuple[str, int] | None:
    text = environ.get(TRACE_VARIABLE)
    if not text:
        return None
    folder, colon, step = text.rpartition(":")
    if not (folder and colon and step.isdecimal()):
        raise OffbeatError(
            f"{TRACE_VARIABLE} must be FOLDER:STEP, with the first step to trace, got {text!r}"
        )
    return folder, int(step)


def _servers(environ: Mapping[str, str]) -> int:
    servers = _int(environ, SERVERS_VARIABLE, 1)
    if servers < 1:
        raise OffbeatError(f"expected {SERVERS_VARIABLE} of at least 1, got {servers}")
    return servers


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise OffbeatError(f"{name} must be a number of seconds above 0, got {text!r}")
    return seconds


def _int(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise OffbeatError(f"{name} must be a whole number, got {text!r}") from None


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
