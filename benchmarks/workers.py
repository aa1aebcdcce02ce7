"""Runs the workers of a benchmark: a module's `main` in every worker, and one result from rank 0."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import OffbeatError
from offbeat.events import Action, Event
from offbeat.runtime.control import environment
from offbeat.runtime.launch import launch
from offbeat.runtime.launching.outcomes import outcome_summary
from offbeat.runtime.processes import child
from offbeat.wire.log_file import read_log

_RESULT_PATH = "OFFBEAT_BENCH_ANSWER"


def run_workers(
    module: str,
    settings: Mapping[str, Any],
    workers: int,
    *,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[Sequence[str]] | None = None,
    master_addr: str = "127.0.0.1",
    timeout_s: float = 1800.0,
    interpreter: Path | None = None,
) -> Any:
    """Run `module SETTINGS` in every worker; return the result of rank 0.

    Args:
        module: its `main` calls `read_settings` and, in rank 0, `send_result`.
        settings: plain data for every worker.
        workers: number of workers.
        env: additional environment variables.
        prefix: see `launch`.
        master_addr: see `launch`.
        timeout_s: the workers are killed after this time, in seconds.
        interpreter: of another environment that can import the module; None for this process's.

    Raises:
        OffbeatError: a worker failed, which the message names, or rank 0 gave no result.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        variables = {_RESULT_PATH: str(path), "TORCH_CPP_LOG_LEVEL": "ERROR", **(env or {})}
        text = json.dumps(dict(settings))
        command = child.module_command(module, text)
        if interpreter is not None:
            command = [str(interpreter), "-m", module, text]
        with launch(
            command,
            workers,
            env=variables,
            prefix=prefix,
            master_addr=master_addr,
            timeout_s=timeout_s,
            on_output=_show_progress,
        ) as running:
            outcomes = running.wait()
        if not all(outcome.has_succeeded for outcome in outcomes):
            raise OffbeatError(outcome_summary(outcomes))
        if not path.exists():
            raise OffbeatError("rank 0 exited without a result")
        return json.loads(path.read_text())


def run_logged(
    module: str, settings: Any, workers: int, *, slow: Sequence[str], seed: int
) -> tuple[Any, Sequence[Event | Action]]:
    """Run workers with a run log; return the result of rank 0 and the entries of the log.

    Args:
        module, workers: see `run_workers`.
        settings: an object that msgspec can convert to plain data.
        slow: slowness rules in the format of `--slow`.
        seed: of the order of samples and of random slowness.

    Raises:
        OffbeatError: see `run_workers`.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        env = {
            environment.SLOW_VARIABLE: ";".join(slow),
            environment.SEED_VARIABLE: str(seed),
            environment.RUN_LOG_VARIABLE: str(log),
        }
        result = run_workers(module, msgspec.to_builtins(settings), workers, env=env)
        return result, read_log(log).entries


def read_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """Return, in a worker, the settings that `run_workers` was given."""
    settings: dict[str, Any] = json.loads(arguments[1])
    return settings


def send_result(result: Any) -> None:
    """Send the result from rank 0 to `run_workers`."""
    Path(os.environ[_RESULT_PATH]).write_text(json.dumps(result))


def print_progress(what: str) -> None:
    """Print a line to standard error at once."""
    print(what, file=sys.stderr, flush=True)


def _show_progress(rank: int, line: str) -> None:
    if rank == 0:
        print_progress(line)
