"""A built-in training: validated before anything starts, run by local workers, read from its run log.

The run log is the only channel from the workers to this process. Nothing here prints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import msgspec
import torch
from torch import Tensor, nn

from offbeat.cli.timesheet import TimeSheet
from offbeat.cli.trace_file import TRACE_FOLDER as TRACE_FOLDER
from offbeat.cli.training_worker import TrainingSettings, batch_loss
from offbeat.data import DownloadProgress, Splits, load_data_set
from offbeat.errors import OffbeatError, WorkerError
from offbeat.models import build_model
from offbeat.policies.stragglers.injection import InjectedSlowness, SlowRule, parse_slow_rule
from offbeat.runtime.control import environment
from offbeat.runtime.data.equal_shards import EqualShards
from offbeat.runtime.launch import launch
from offbeat.runtime.launching.outcomes import outcome_summary
from offbeat.runtime.processes import child
from offbeat.wire.codec import from_plain
from offbeat.wire.log_file import finished_log_parts
from offbeat.wire.log_tail import LogTail

LOG_NAME: Final = "log.jsonl"
OUTPUT_NAME: Final = "output.txt"
_POLL_S: Final = 0.2
_LOG_END_TIMEOUT_S: Final = 15.0
TARGET_STEP_S: Final = 0.02
_REPEAT_MAX: Final = 2**16
_TIMINGS: Final = 30  # another process on the core slows down some of them, but rarely all
_RELEVANT: Final = tuple(f'{{"type":"{name}"'.encode() for name in ("StepsTimed", "Evaluated", "Left"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, on how many workers, and how they are slowed down.

    Args:
        settings: settings of every worker.
        workers: number of local processes, at least 1.
        slow: slowness rules as on the command line (`--slow`), all of which apply.
        servers: number of servers, at least 1; used by strategies on a parameter server.
        trace_step: first step that the workers trace, for `offbeat.cli.trace_file`; None for no trace.

    Raises:
        ValueError: a count is too small, or a rule is malformed or names a worker that does not exist.
    """

    settings: TrainingSettings
    workers: int
    slow: tuple[str, ...] = ()
    servers: int = 1
    trace_step: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"expected at least 1 worker, got {self.workers}")
        if self.servers < 1:
            raise ValueError(f"expected at least 1 server, got {self.servers}")
        InjectedSlowness(self.slowness_rules, workers=self.workers, seed=self.settings.seed)

    @property
    def slowness_rules(self) -> tuple[SlowRule, ...]:
        """The parsed slowness rules."""
        return tuple(parse_slow_rule(text) for text in self.slow)

    @property
    def world(self) -> int:
        """Number of workers, each thread of a process counted as one."""
        return self.workers * self.settings.threads

    def steps_per_epoch(self, samples: int) -> int:
        """Return the number of steps of each worker in an epoch.

        Raises:
            ValueError: fewer samples than workers.
        """
        return EqualShards(
            samples=samples,
            workers=self.world,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            epoch=0,
            shuffle=False,
        ).steps


def load_data(
    settings: TrainingSettings, *, download: bool = False, progress: DownloadProgress | None = None
) -> Splits:
    """Load the data once and check that the model accepts them, before any worker is started.

    Raises:
        OffbeatError: the data are missing.
        ValueError: the model does not accept them.
    """
    splits = load_data_set(settings.data, settings.data_dir, download=download, progress=progress)
    build_model(settings.model, sample_shape=splits.sample_shape, classes=splits.classes, seed=settings.seed)
    return splits


def calibrate_repeat(settings: TrainingSettings, splits: Splits, step_s: float = TARGET_STEP_S) -> int:
    """Return how often to repeat each sample in its batch for a step of `step_s` seconds on one idle core.

    It is 1 for a model whose step takes longer anyway. The result is rounded to one digit and depends on the
    machine.
    """
    model = build_model(
        settings.model, sample_shape=splits.sample_shape, classes=splits.classes, seed=settings.seed
    )
    inputs, labels = splits.train[: settings.batch_size]
    with single_threaded():
        repeat = 1
        while True:
            took_s = min(_step_s(model, inputs, labels, repeat) for _ in range(3))
            if took_s >= step_s or repeat >= _REPEAT_MAX:
                took_s = min(took_s, *(_step_s(model, inputs, labels, repeat) for _ in range(_TIMINGS)))
                return max(1, round(float(f"{repeat * step_s / took_s:.1g}")))
            repeat *= 2


@contextmanager
def single_threaded() -> Iterator[None]:
    """Limit torch to one thread, as when several workers share a machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def open_run_dir(path: Path) -> Path:
    """Create the folder of a run and return its absolute path.

    Raises:
        OffbeatError: it is not writable, or already holds a run log, which is never overwritten.
    """
    try:
        folder = path.expanduser().absolute()
    except RuntimeError as error:
        raise OffbeatError(
            f"{path}: this home folder does not exist; name another folder with --run-dir"
        ) from error
    if (folder / LOG_NAME).exists() or finished_log_parts(folder / LOG_NAME):
        raise OffbeatError(f"{path} holds the log of another run: name another folder with --run-dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OUTPUT_NAME).open("w").close()
    except OSError as error:
        raise OffbeatError(f"cannot write to the run folder {path}: {error.strerror or error}") from error
    return folder


def run_job(
    job: Job,
    run_dir: Path,
    on_progress: Callable[[TimeSheet], None] = lambda sheet: None,
    on_note: Callable[[str], None] | None = None,
) -> TimeSheet:
    """Run a training to its end, even if its log or the workers' output cannot be written.

    Args:
        job: what to run.
        run_dir: from `open_run_dir`; receives the run log and the workers' output.
        on_progress: called a few times per second with the times known so far.
        on_note: called at the end with one sentence for each file that is incomplete. Without it, an
            incomplete log is an error.

    Returns:
        Times of all epochs of all workers, as far as the log goes; see `TimeSheet.workers_left`.

    Raises:
        WorkerError: a worker failed; names it.
        OffbeatError: the log is incomplete, and there is no `on_note`.
    """
    log = RunLogReader(run_dir / LOG_NAME)
    sheet = TimeSheet()
    command = child.module_command("offbeat.cli.training_worker", msgspec.json.encode(job.settings).decode())
    env = {
        environment.SLOW_VARIABLE: ";".join(job.slow),
        environment.RUN_LOG_VARIABLE: str(run_dir / LOG_NAME),
        environment.RUN_LOG_BYTES_MAX_VARIABLE: "",  # no limit: the complete log is read here
        environment.SEED_VARIABLE: str(job.settings.seed),
        environment.SERVERS_VARIABLE: str(job.servers),
        environment.TRACE_VARIABLE: ""
        if job.trace_step is None
        else f"{run_dir / TRACE_FOLDER}:{job.trace_step}",
    }
    with WorkerOutputFile(run_dir / OUTPUT_NAME) as output:
        with launch(command, job.workers, env=env, on_output=output.write_line) as workers:
            while workers.running_ranks():
                log.read_new_lines(sheet)
                on_progress(sheet)
                time.sleep(_POLL_S)
            outcomes = workers.wait()
    if output.error is not None and on_note is not None:
        on_note(f"{output.path} does not hold all output of the workers: {output.error.strerror}")
    if not all(outcome.has_succeeded for outcome in outcomes):
        first = min(outcomes, key=lambda o: (o.has_succeeded, o.end_reason is not None, o.ended_s))
        where = os.path.relpath(run_dir / OUTPUT_NAME)
        raise WorkerError(
            f"{outcome_summary(outcomes)} (full output of the workers: {where})", worker=first.rank
        )
    if missing := log.read_until_all_left(sheet, job.world):
        note = (
            f"{log.path} is incomplete: expected all workers to leave by its end, worker {missing[0]} is "
            "missing; is the disk full, or was the coordinator killed?"
        )
        if on_note is None:
            raise OffbeatError(note)
        on_note(note)
    on_progress(sheet)
    return sheet


class WorkerOutputFile:
    """Writes the workers' output to a file; drops the rest after an error, so that the workers can go on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._file = path.open("wb", buffering=0)  # unbuffered: a failed write is not repeated on close

    def write_line(self, rank: int, line: str) -> None:
        """Write a line of one worker."""
        if self.error is not None:
            return
        unwritten = memoryview(f"[worker {rank}] {line}\n".encode(errors="replace"))
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            self.error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error


class RunLogReader:
    """Reads the lines that were appended to a run log since the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = LogTail(path)

    def read_new_lines(self, sheet: TimeSheet) -> None:
        """Add the new, complete lines of the relevant types to the sheet."""
        while lines := self._tail.read_lines():
            for line in lines:
                if line.startswith(_RELEVANT):
                    sheet.add(from_plain(msgspec.json.decode(line)))

    def read_until_all_left(
        self, sheet: TimeSheet, workers: int, limit_s: float = _LOG_END_TIMEOUT_S
    ) -> list[int]:
        """Read until all workers have left, which the coordinator logs shortly after they end.

        Returns:
            The workers that have not left in the log after `limit_s` seconds: the disk may be full, or the
            coordinator was killed.
        """
        deadline_s = time.monotonic() + limit_s
        self.read_new_lines(sheet)
        while (missing := sorted(set(range(workers)) - sheet.workers_left)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S / 10)
            self.read_new_lines(sheet)
        return missing


def _step_s(model: nn.Module, inputs: Tensor, labels: Tensor, repeat: int) -> float:
    began_s = time.perf_counter()
    batch_loss(model, inputs, labels, repeat).backward()
    return time.perf_counter() - began_s
