"""Settings that the launcher put into the environment, read here and nowhere else; the number of cores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from offbeat.errors import OffbeatError, describe_os_error
from offbeat.runtime.monitoring.settings import MonitoringSettings
from offbeat.runtime.transport.addresses import parse_address, split_host_and_port
from offbeat.runtime.transport.tls import TlsCredentials, load_credentials

SLOW_VARIABLE = "OFFBEAT_SLOW"
RUN_LOG_VARIABLE = "OFFBEAT_RUN_LOG"
RUN_LOG_BYTES_MAX_VARIABLE = "OFFBEAT_RUN_LOG_BYTES_MAX"
SEED_VARIABLE = "OFFBEAT_SEED"
NEWCOMER_VARIABLE = "OFFBEAT_NEWCOMER"
COORDINATOR_VARIABLE = "OFFBEAT_COORDINATOR"
TOKEN_FILE_VARIABLE = "OFFBEAT_TOKEN_FILE"
TLS_VARIABLES = ("OFFBEAT_TLS_CA", "OFFBEAT_TLS_CERT", "OFFBEAT_TLS_KEY")
ATTEMPT_VARIABLE = "OFFBEAT_ATTEMPT"
JOB_VARIABLE = "OFFBEAT_JOB"
START_S_VARIABLE = "OFFBEAT_START_S"
SERVERS_VARIABLE = "OFFBEAT_SERVERS"
SERVERS_APART_VARIABLE = "OFFBEAT_SERVERS_APART"
TRACE_VARIABLE = "OFFBEAT_TRACE"
METRICS_VARIABLE = "OFFBEAT_METRICS"
TENSORBOARD_VARIABLE = "OFFBEAT_TENSORBOARD"
SPANS_VARIABLE = "OFFBEAT_SPANS"
_RUN_ID = "TORCHELASTIC_RUN_ID"
_ATTEMPTS = (ATTEMPT_VARIABLE, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # the first that is set
DEFAULT_JOB = "job"  # the name of a job without one, where no worker starts the coordinator
_OPEN_TOKEN = "offbeat"  # of a job without a secret
_NO_RUN_ID = "none"  # torchrun's id of every job without a --rdzv-id


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A worker's place in the job and the launcher's settings.

    Attributes:
        rank: 0 <= rank < world; of a newcomer, its id, or -1 where that is still to be drawn.
        world: workers in all; a newcomer gets the number from the job.
        is_newcomer: this process joins a running job.
        may_return: a process whose rank has been used in the running job joins it as a newcomer.
        coordinator: HOST:PORT of a coordinator that no worker starts, or file:///PATH of a file with that;
            None where rank 0 starts one.
        token_file: the file with the job's secret; None where rank 0 draws one, or where there is none.
        master_addr: the host of the job's TCPStore.
        master_port: its port, 0 in a world of one.
        agent_hosts_store: the launcher hosts the TCPStore, not rank 0.
        ends_together: the launcher ends all workers of this host when one of them dies, as torchrun's agent.
        threads: the ids of the workers of this process; several where it has several worker threads.
        servers: how many the parameter server begins with, where the strategy has one.
        starts_servers: the first processes start one server each, or several where there are more servers
            than processes; otherwise servers are started apart, by 'offbeat serve'.
        attempt: how often the launcher has started the whole job again.
        job_name: distinguishes the job from others at the same address; None where it has no name.
        slowdowns: slowdowns to inject, in the syntax of `--slow`.
        run_log: where the run log goes, None for no log.
        run_log_bytes_max: limit on all its parts together; None for one file without a limit.
        monitoring: where the coordinator shows the running job.
        seed: the seed of the data order.
        trace: the folder to write this worker's trace to, and the first step to trace; None for no trace.
        start_s: how long the job's start may take, in seconds: the last worker may arrive so long after the
            first.
    """

    rank: int = 0
    world: int = 1
    is_newcomer: bool = False
    may_return: bool = True
    coordinator: str | None = None
    token_file: str | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    agent_hosts_store: bool = False
    ends_together: bool = False
    threads: tuple[int, ...] = (0,)
    servers: int = 1
    starts_servers: bool = True
    attempt: int = 0
    job_name: str | None = None
    slowdowns: tuple[str, ...] = ()
    run_log: str | None = None
    run_log_bytes_max: int | None = None
    monitoring: MonitoringSettings = field(default_factory=MonitoringSettings)
    seed: int = 0
    trace: tuple[str, int] | None = None
    start_s: float = 30.0


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Read the variables set by torchrun, Ray Train, Slurm's torch launchers or Kubeflow.

    With neither RANK nor WORLD_SIZE set it is a world of one. The coordinator is at OFFBEAT_COORDINATOR, if
    that is set; otherwise rank 0 starts it, and workers find it in the store at MASTER_ADDR and MASTER_PORT.
    With OFFBEAT_NEWCOMER=1 it is a worker that joins the running job, whatever RANK may be; only
    a RANK that is not below WORLD_SIZE is a newcomer's own, drawn by its launcher. By default ("auto") a
    worker is a newcomer if its RANK was used in the running job before; with 0 it is refused then. The job's
    name is OFFBEAT_JOB, or else the id that torchrun gives every run (`--rdzv-id`).

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
    coordinator = environ.get(COORDINATOR_VARIABLE) or None
    if coordinator is not None:
        coordinator_address(coordinator)
    needs_store = coordinator is None and (world > 1 or is_newcomer)
    if needs_store:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                why, what = f"WORLD_SIZE is {world}", "rank 0's address"
                if is_newcomer:
                    why, what = f"{NEWCOMER_VARIABLE} is set", "its value in the job"
                raise OffbeatError(
                    f"{name} is not set although {why}: "
                    f"start the script with torchrun or 'offbeat run', or set it to {what}"
                )
    port = _int(environ, "MASTER_PORT", 0) if needs_store else 0
    if not 0 <= port < 65536:
        raise OffbeatError(f"MASTER_PORT must be a port from 1 to 65535, got {port}")
    rank = -1 if is_newcomer and not ("RANK" in environ and rank >= world) else rank
    return Environment(
        rank=rank,
        world=world,
        threads=(rank,),
        is_newcomer=is_newcomer,
        may_return=environ.get(NEWCOMER_VARIABLE) != "0",
        coordinator=coordinator,
        token_file=environ.get(TOKEN_FILE_VARIABLE) or None,
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=port,
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        ends_together=_RUN_ID in environ and _int(environ, "LOCAL_WORLD_SIZE", 1) > 1,
        servers=_servers(environ, coordinator),
        starts_servers=not environ.get(SERVERS_APART_VARIABLE),
        attempt=next((_count(environ, name) for name in _ATTEMPTS if environ.get(name)), 0),
        job_name=_job_name(environ),
        slowdowns=tuple(text for text in environ.get(SLOW_VARIABLE, "").split(";") if text),
        run_log=environ.get(RUN_LOG_VARIABLE) or None,
        run_log_bytes_max=_int(environ, RUN_LOG_BYTES_MAX_VARIABLE, 0)
        if environ.get(RUN_LOG_BYTES_MAX_VARIABLE)
        else None,
        monitoring=MonitoringSettings(
            http=_http_address(environ),
            tensorboard=environ.get(TENSORBOARD_VARIABLE) or None,
            spans_every=_spans_every(environ),
        ),
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
    text = environ.get(NEWCOMER_VARIABLE, "auto")
    if text not in ("", "auto", "0", "1"):
        raise OffbeatError(f"{NEWCOMER_VARIABLE} must be auto, 0 or 1, got {text!r}")
    return text == "1"


def coordinator_address(text: str) -> str:
    """Return the coordinator's address, for the transport, from OFFBEAT_COORDINATOR.

    Raises:
        OffbeatError: it is neither HOST:PORT nor file:///PATH.
    """
    address = text if text.startswith("file:") else f"tcp://{text}"
    try:
        parse_address(address)
    except ValueError:
        raise OffbeatError(
            f"{COORDINATOR_VARIABLE} must be HOST:PORT with a port from 1 to 65535, or file:///PATH of a "
            f"file with that, got {text!r}"
        ) from None
    return address


def parse_bind(text: str) -> tuple[str, int]:
    """Return host and port of the address that a coordinator listens on.

    Raises:
        OffbeatError: it is not HOST:PORT.
    """
    try:
        return split_host_and_port(text)
    except ValueError:
        raise OffbeatError(f"--bind must be HOST:PORT with a port from 0 to 65535, got {text!r}") from None


def read_token(path: str | None) -> str:
    """Return the job's secret, from the content of a file; without a file, that of a job without one.

    Raises:
        OffbeatError: the file cannot be read, or is empty.
    """
    if path is None:
        return _OPEN_TOKEN
    try:
        content = Path(path).read_bytes().strip()
    except OSError as error:
        raise OffbeatError(
            f"cannot read the job's secret from {path} ({TOKEN_FILE_VARIABLE}): {describe_os_error(error)}"
        ) from error
    if not content:
        raise OffbeatError(
            f"expected the job's secret in {path} ({TOKEN_FILE_VARIABLE}), found an empty file: write random "
            "bytes to it, the same for all processes of the job"
        )
    return hashlib.sha256(content).hexdigest()


def load_tls(environ: Mapping[str, str] = os.environ) -> TlsCredentials | None:
    """Load what this process needs to encrypt its TCP connections; None where they are plain.

    Raises:
        OffbeatError: not all of the variables are set, or a file does not hold what it should.
    """
    paths = [environ.get(name) or None for name in TLS_VARIABLES]
    ca, certificate, key = paths
    if ca and certificate and key:
        return load_credentials(ca, certificate, key)
    if any(paths):
        missing = " and ".join(name for name, path in zip(TLS_VARIABLES, paths, strict=True) if not path)
        raise OffbeatError(
            f"{missing} {'is' if paths.count(None) == 1 else 'are'} not set: for TLS, set all of "
            f"{', '.join(TLS_VARIABLES)}"
        )
    return None


def _count(environ: Mapping[str, str], name: str) -> int:
    count = _int(environ, name, 0)
    if count < 0:
        raise OffbeatError(f"{name} must not be negative, got {count}")
    return count


def _job_name(environ: Mapping[str, str]) -> str | None:
    run_id = environ.get(_RUN_ID)
    return environ.get(JOB_VARIABLE) or (None if run_id == _NO_RUN_ID else run_id) or None


def _http_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    text = environ.get(METRICS_VARIABLE)
    if not text:
        return None
    try:
        return split_host_and_port(text if ":" in text else f"127.0.0.1:{text}")
    except ValueError:
        raise OffbeatError(
            f"{METRICS_VARIABLE} must be [HOST:]PORT with a port from 0 to 65535, got {text!r}"
        ) from None


def _spans_every(environ: Mapping[str, str]) -> int | None:
    if not environ.get(SPANS_VARIABLE):
        return None
    steps = _int(environ, SPANS_VARIABLE, 1)
    if steps < 1:
        raise OffbeatError(f"expected {SPANS_VARIABLE} of at least 1 (spans of every step), got {steps}")
    return steps


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


def _servers(environ: Mapping[str, str], coordinator: str | None) -> int:
    is_apart = bool(environ.get(SERVERS_APART_VARIABLE))
    if is_apart and environ.get(SERVERS_VARIABLE):
        raise OffbeatError(
            f"expected one of {SERVERS_VARIABLE} (servers that workers start) and {SERVERS_APART_VARIABLE} "
            "(servers that 'offbeat serve' starts), got both"
        )
    if is_apart and coordinator is None:
        raise OffbeatError(
            f"{SERVERS_APART_VARIABLE} needs {COORDINATOR_VARIABLE}, where servers find the job"
        )
    name = SERVERS_APART_VARIABLE if is_apart else SERVERS_VARIABLE
    servers = _int(environ, name, 1)
    if servers < 1:
        raise OffbeatError(f"expected {name} of at least 1, got {servers}")
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
