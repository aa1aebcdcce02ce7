"""Real worker processes for tests, forked from a server that has imported torch already: they start fast.

`run(function, workers)` calls `function(rank, *args)` in that many processes with the environment that a
launcher would set, and returns what each returned or raised. `start` gives the running processes instead, to
be killed or stopped.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from offbeat.runtime.launch import find_free_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed", "torch._dynamo", "pytest", "hypothesis", "offbeat.strategies", "offbeat.models"]
)


def unlaunched_environ(**variables: str) -> dict[str, str]:
    """This process's environment without what a launcher has set, and with these variables."""
    own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    launcher = ("OFFBEAT_", "SLURM_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return {name: value for name, value in kept.items() if not name.startswith(launcher)} | variables


@functools.cache
def _warm_up() -> None:
    """Waits until the server has imported everything; a job's own limits leave no time for that."""
    first = _context.Process(target=int)
    first.start()
    first.join()


@dataclass(frozen=True)
class Ended:
    """How a worker ended: with a value, with an exception (as type name and text), or killed (neither)."""

    rank: int
    exitcode: int | None
    value: Any = None
    error_type: str | None = None
    error: str | None = None
    trace: str | None = None
    ended_s: float | None = None

    def was_ended_by(self, error_type: str) -> bool:
        """Whether it raised this error, or was told first that another worker had raised it.

        Where every worker finds the same fault, the first that raises ends the job for those that have not
        come so far: they raise a `WorkerError` with its text.
        """
        told = self.error_type == "WorkerError" and f" steps: {error_type}: " in (self.error or "")
        return self.error_type == error_type or told


class Cluster:
    """Running workers; leaving the `with` block ends those that are left."""

    def __init__(
        self, function: Callable[..., Any], workers: int, args: tuple[Any, ...], env: Mapping[str, str]
    ) -> None:
        self.processes = []
        self._pipes: list[Connection] = []
        _warm_up()
        self._env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), **env}
        for rank in range(workers):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
            self._start(function, rank, args, {**place, **self._env})

    def add(self, function: Callable[..., Any], args: tuple[Any, ...], env: Mapping[str, str]) -> int:
        """Starts a process that joins the job while it runs, as a user would; returns its number here."""
        number = len(self.processes)
        self._start(function, number, args, {**self._env, "OFFBEAT_NEWCOMER": "1", **env})
        return number

    def _start(
        self, function: Callable[..., Any], rank: int, args: tuple[Any, ...], variables: dict[str, str]
    ) -> None:
        receiving, sending = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_work, args=(function, rank, args, variables, sending), daemon=False
        )
        process.start()
        sending.close()
        self.processes.append(process)
        self._pipes.append(receiving)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def receive(self, rank: int, timeout_s: float = 60) -> Any:
        """The next value that the worker has sent with `emit`."""
        assert self._pipes[rank].poll(timeout_s), f"worker {rank} sent nothing within {timeout_s} s"
        kind, content = self._pipes[rank].recv()
        assert kind == "message", f"worker {rank} ended with {content}"
        return content

    def ends(self, timeout_s: float = 60) -> list[Ended]:
        """Waits for all workers and returns how they ended, in order of rank."""
        limit_s = time.monotonic() + timeout_s
        return [self._end(rank, limit_s) for rank in range(len(self.processes))]

    def end(self, rank: int, timeout_s: float = 60) -> Ended:
        """Waits for one worker and returns how it ended."""
        return self._end(rank, time.monotonic() + timeout_s)

    def _end(self, rank: int, limit_s: float) -> Ended:
        while True:
            left_s = limit_s - time.monotonic()
            if left_s <= 0 or not self._pipes[rank].poll(left_s):
                raise AssertionError(f"worker {rank} did not end in time; {self._ended()}")
            try:
                kind, content = self._pipes[rank].recv()
            except EOFError:
                kind, content = "ended", {}
            if kind == "ended":
                self.processes[rank].join(max(1.0, left_s))
                return Ended(rank=rank, exitcode=self.processes[rank].exitcode, **content)

    def _ended(self) -> str:
        """What is known of those who have ended and were not asked for yet."""
        ended = []
        for rank, pipe in enumerate(self._pipes):
            with suppress(EOFError, OSError):
                while pipe.poll():
                    kind, content = pipe.recv()
                    if kind == "ended":
                        ended.append(f"worker {rank}: {content.get('trace', 'returned')}")
        return "\n".join(ended) or "nor has any that was to be waited for after it"


def start(
    function: Callable[..., Any], workers: int, *args: Any, env: Mapping[str, str] | None = None
) -> Cluster:
    """Starts `function(rank, emit, *args)` in `workers` processes; `emit` sends a value to
    `Cluster.receive`.
    """
    return Cluster(function, workers, args, env or {})


def run(
    function: Callable[..., Any],
    workers: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 90,
) -> list[Ended]:
    """Runs `function(rank, emit, *args)` in `workers` processes to the end."""
    with start(function, workers, *args, env=env) as cluster:
        return cluster.ends(timeout_s)


def values(ended: list[Ended]) -> list[Any]:
    """What the workers returned; an exception in one fails the test with its traceback."""
    for one in ended:
        assert one.exitcode == 0, f"worker {one.rank} ended with {one.exitcode}"
        assert one.error is None, f"worker {one.rank}: {one.trace}"
    return [one.value for one in ended]


def _work(
    function: Callable[..., Any],
    rank: int,
    args: tuple[Any, ...],
    variables: dict[str, str],
    pipe: Connection,
) -> None:
    import torch

    torch.set_num_threads(1)
    # As in a program of its own; else a DataLoader here would boot a server that imports everything again.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(variables)
    content: dict[str, Any] = {}
    try:
        content["value"] = function(rank, lambda value: pipe.send(("message", value)), *args)
    except BaseException as error:
        content |= {"error_type": type(error).__name__, "error": str(error), "trace": traceback.format_exc()}
    content["ended_s"] = time.monotonic()
    pipe.send(("ended", content))
    pipe.close()
