"""Runs the workers of a benchmark: a module's `main` in every worker, one answer from rank 0."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.runtime.launch import launch, outcome_summary
from offbeat.runtime.processes import child

_ANSWER = "OFFBEAT_BENCH_ANSWER"


def run_workers(
    module: str,
    settings: Mapping[str, Any],
    workers: int,
    *,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[Sequence[str]] | None = None,
    master_addr: str = "127.0.0.1",
    deadline_s: float = 1800.0,
) -> Any:
    """Runs `module SETTINGS` in every worker and returns what rank 0 answered.

    Args:
        module: has a `main` that calls `settings_of` and, in rank 0, `answer`.
        settings: plain data for every worker.
        workers: how many.
        env: variables besides.
        prefix: see `launch`.
        master_addr: see `launch`.
        deadline_s: after which the workers are ended, in seconds.

    Raises:
        OffbeatError: a worker failed, or rank 0 did not answer; says which.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        variables = {_ANSWER: str(path), "TORCH_CPP_LOG_LEVEL": "ERROR", **(env or {})}
        command = child.module_command(module, json.dumps(dict(settings)))
        with launch(
            command,
            workers,
            env=variables,
            prefix=prefix,
            master_addr=master_addr,
            deadline_s=deadline_s,
            on_output=_show_progress,
        ) as running:
            outcomes = running.wait()
        if not all(outcome.has_succeeded for outcome in outcomes):
            raise OffbeatError(outcome_summary(outcomes))
        if not path.exists():
            raise OffbeatError("rank 0 ended without an answer")
        return json.loads(path.read_text())


def settings_of(arguments: Sequence[str]) -> dict[str, Any]:
    """In a worker: the settings that `run_workers` was given."""
    settings: dict[str, Any] = json.loads(arguments[1])
    return settings


def answer(result: Any) -> None:
    """In rank 0: hands the result to `run_workers`."""
    Path(os.environ[_ANSWER]).write_text(json.dumps(result))


def _show_progress(rank: int, line: str) -> None:
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
