"""`offbeat run`: starts a script on this host's workers, and says how they ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

from offbeat.cli import entry, output

if TYPE_CHECKING:
    from offbeat.cli.options import RunOptions
    from offbeat.runtime.launch import LaunchedWorkers
    from offbeat.runtime.launching.nodes import Node

_INSTEAD: Final = {
    "--max-restarts": "to start single workers again use --replace; to start all of them again, torchrun",
    "--rdzv-backend": "name the host of node 0 with --master-addr and --master-port",
    "--rdzv-endpoint": "name the host of node 0 with --master-addr and --master-port",
    "--rdzv-id": "name the job with OFFBEAT_JOB",
}
_SIGNAL_CODE: Final = 128  # plus the signal's number: the exit code after a signal, as a shell has it


def run(options: RunOptions, arguments: Sequence[str]) -> int:
    """Start a script on this host's workers, and wait for them; return the exit code.

    Args:
        options: of the command.
        arguments: the script and its own arguments.

    Raises:
        ValueError: an invalid option.
        OffbeatError: the launcher of node 0 was not reached, or the workers cannot be started.
    """
    from offbeat.runtime.launch import launch
    from offbeat.runtime.launching.outcomes import has_job_succeeded, outcome_summary
    from offbeat.runtime.processes import child

    if options.check:
        if arguments:
            raise ValueError(f"--check looks at the job and starts no script, got {arguments[0]}")
    else:
        _check_arguments(arguments)
    if options.tls and options.nnodes != "1":
        raise ValueError(
            f"--tls is for jobs on one host, got --nnodes {options.nnodes}: make certificates with openssl "
            "and set OFFBEAT_TLS_CA, OFFBEAT_TLS_CERT and OFFBEAT_TLS_KEY on every host"
        )
    node = _open_node(options)
    if options.replace and node.world < 2:
        raise ValueError(
            "--replace needs at least 2 workers (--nproc-per-node): a replacement copies the state of a peer"
        )
    env = _settings(options)
    command = list(arguments)
    if options.check:
        if node.world < 2:
            raise ValueError("--check needs at least 2 workers (--nproc-per-node); for one, `offbeat doctor`")
        command = child.module_command("offbeat.cli.job_check")
        env |= {"COLUMNS": str(output.terminal_columns() or "")}
    elif not options.no_python:
        command = [sys.executable, "-u", *(["-m"] if options.module else []), *command]
    errors: list[output.OutputError] = []

    def show(rank: int, line: str) -> None:
        try:
            print(line if options.check else f"[{rank}] {line}", flush=True)
        except output.OutputError as error:  # a full disk ends the display, not the workers
            entry.print_error(f"the workers' output is no longer shown: {error.reason}", entry.FAILED)
            errors.append(error)

    with (
        _encryption(options) as certificates,
        launch(
            command,
            node.workers,
            env=env | certificates,
            on_output=show,
            grace_s=None,  # the others go on, or end with their own error
            term_s=options.shutdown_timeout,
            node=node,
            replacements=options.replace,
        ) as running,
        _forwarded_signals(running) as received,
    ):
        outcomes = running.wait()
    if received:
        good = sum(outcome.returncode == 0 for outcome in outcomes)
        name = signal.Signals(received[0]).name
        return entry.print_error(
            f"ended by {name}; {good} of {node.workers} workers ended well", _SIGNAL_CODE + received[0]
        )
    if not has_job_succeeded(outcomes):
        return entry.print_error(outcome_summary(outcomes), entry.FAILED)
    print(f"offbeat: {outcome_summary(outcomes)}", file=sys.stderr)
    return entry.FAILED if errors else 0


def _check_arguments(arguments: Sequence[str]) -> None:
    if not arguments:
        raise ValueError("expected a script to launch, as in: offbeat run --nproc-per-node 4 script.py")
    option = arguments[0].partition("=")[0]
    if option.startswith("-"):
        instead = _INSTEAD.get(
            option.replace("_", "-"), "see offbeat run --help; if it is one of torchrun's, use torchrun"
        )
        raise ValueError(f"offbeat run has no option {option}: {instead}")


def _open_node(options: RunOptions) -> Node:
    """Return this host's place in the job."""
    from torch.distributed.run import determine_local_world_size

    from offbeat.runtime.control.environment import NEWCOMER_VARIABLE, read_environment
    from offbeat.runtime.launching.nodes import open_node

    if not options.nnodes.isdecimal():
        raise ValueError(
            f"--nnodes must be the number of hosts, got {options.nnodes!r}: more workers may join a running "
            "job with OFFBEAT_NEWCOMER=1"
        )
    of_workers = ("RANK", "WORLD_SIZE", NEWCOMER_VARIABLE, "TORCHELASTIC_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(of_workers)}
    return open_node(
        read_environment(environ),
        rank=options.node_rank,
        count=int(options.nnodes),
        workers=determine_local_world_size(options.nproc_per_node),
        master_addr=options.master_addr,
        master_port=options.master_port,
    )


def _settings(options: RunOptions) -> dict[str, str]:
    """Return the variables with which the options reach the workers.

    Raises:
        ValueError: an invalid option.
    """
    from offbeat.cli import job
    from offbeat.cli.training_worker import SEED_MAX
    from offbeat.policies.stragglers.injection import parse_slow_rule
    from offbeat.runtime.control import environment
    from offbeat.runtime.control.run_log import check_log_bytes_max

    env: dict[str, str] = {}
    for rule in options.slow or ():
        parse_slow_rule(rule)
    if options.slow:
        env[environment.SLOW_VARIABLE] = ";".join(options.slow)
    if options.servers is not None:
        if options.servers < 1:
            raise ValueError(f"expected at least 1 server, got {options.servers}")
        env[environment.SERVERS_VARIABLE] = str(options.servers)
    if options.seed is not None:
        if not 0 <= options.seed <= SEED_MAX:
            raise ValueError(f"the seed must be from 0 to {SEED_MAX}, got {options.seed}")
        env[environment.SEED_VARIABLE] = str(options.seed)
    if options.log_bytes_max is not None:
        if options.run_dir is None:
            raise ValueError("--log-bytes-max limits the run log: name its folder with --run-dir")
        check_log_bytes_max(options.log_bytes_max)
        env[environment.RUN_LOG_BYTES_MAX_VARIABLE] = str(options.log_bytes_max)
    if options.run_dir is not None:
        if os.environ.get(environment.COORDINATOR_VARIABLE):
            raise ValueError(
                f"with {environment.COORDINATOR_VARIABLE} the coordinator writes the run log: start it with "
                f"{environment.RUN_LOG_VARIABLE}, and leave --run-dir out"
            )
        if options.node_rank == 0:  # rank 0 starts the coordinator, which writes the log
            env[environment.RUN_LOG_VARIABLE] = str(job.open_run_dir(options.run_dir) / job.LOG_NAME)
    return env


@contextmanager
def _encryption(options: RunOptions) -> Iterator[dict[str, str]]:
    """Make certificates, with --tls; yield the variables by which the workers find them."""
    from offbeat.runtime.control.environment import TLS_VARIABLES
    from offbeat.runtime.processes.job_certificates import job_certificates

    if not options.tls:
        yield {}
        return
    with job_certificates() as paths:
        yield dict(zip(TLS_VARIABLES, paths, strict=True))


@contextmanager
def _forwarded_signals(running: LaunchedWorkers) -> Iterator[list[int]]:
    """Pass signals on to the workers; yields those received that end the job, in order."""
    received: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        received.append(number)
        running.end(f"the launcher received {signal.Signals(number).name}")

    def pass_on(number: int, _: FrameType | None) -> None:
        for rank in running.running_ranks():
            running.kill(rank, number)

    handlers = {signal.SIGTERM: end, signal.SIGINT: end, signal.SIGUSR1: pass_on}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
