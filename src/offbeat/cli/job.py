"""One built-in training as a whole: checked before anything starts, run by local workers, read from its log.

The run log is the only way in which workers tell this side how they do. Nothing here prints.
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
from offbeat.cli.trace_file import FOLDER as TRACE_FOLDER
from offbeat.cli.training_worker import Settings, loss_of
from offbeat.data import Progress, Splits, load
from offbeat.errors import OffbeatError, WorkerError
from offbeat.models import build
from offbeat.policies.stragglers.injection import Slowness, SlowRule, parse
from offbeat.runtime.control import environment
from offbeat.runtime.data.equal_shards import EqualShards
from offbeat.runtime.launch import launch, summary
from offbeat.runtime.processes import child
from offbeat.wire.record import finished_parts, from_plain

LOG_NAME: Final = "log.jsonl"
OUTPUT_NAME: Final = "output.txt"
_POLL_S: Final = 0.2
_LOG_ENDS_S: Final = 15.0
STEP_S: Final = 0.02
_REPEAT_MAX: Final = 2**16
_TIMINGS: Final = 30  # another process on the core makes some of them slower, but hardly all
_WANTED: Final = tuple(f'{{"type":"{name}"'.encode() for name in ("StepTimed", "Evaluated", "Left"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, with how many workers, and how they are slowed.

    Args:
        settings: of every worker.
        workers: local processes, at least 1.
        slow: rules as `--slow` spells them, all in force.
        servers: of the parameter server, where the strategy has one, at least 1.
        trace: the first step that workers trace, for `offbeat.tracefile`; None for no trace.

    Raises:
        ValueError: a bad count, or a rule that is not understood or about a worker that there is not.
    """

    settings: Settings
    workers: int
    slow: tuple[str, ...] = ()
    servers: int = 1
    trace: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"expected at least 1 worker, got {self.workers}")
        if self.servers < 1:
            raise ValueError(f"expected at least 1 server, got {self.servers}")
        Slowness(self.rules, workers=self.workers, seed=self.settings.seed)

    @property
    def rules(self) -> tuple[SlowRule, ...]:
        """The slowness as it was understood."""
        return tuple(parse(text) for text in self.slow)

    @property
    def world(self) -> int:
        """How many workers there are in all: a thread of a process is one."""
        return self.workers * self.settings.threads

    def steps_per_epoch(self, samples: int) -> int:
        """Return how many steps each worker takes in an epoch.

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


def load_data(settings: Settings, *, download: bool = False, progress: Progress | None = None) -> Splits:
    """Load the data once, and see that the model takes them, so that no worker has to fail over it.

    Raises:
        OffbeatError: the data are not there.
        ValueError: the model does not take them.
    """
    splits = load(settings.data, settings.data_dir, download=download, progress=progress)
    build(settings.model, sample_shape=splits.sample_shape, classes=splits.classes, seed=settings.seed)
    return splits


def repeat_for(settings: Settings, splits: Splits, step_s: float = STEP_S) -> int:
    """Return how often a sample must stand in its batch for a step to compute for `step_s` on one idle core.

    A model that takes longer as it is needs none: 1. The answer has one digit and depends on the machine.
    """
    model = build(
        settings.model, sample_shape=splits.sample_shape, classes=splits.classes, seed=settings.seed
    )
    inputs, labels = splits.train[: settings.batch_size]
    with one_thread():
        repeat = 1
        while True:
            took_s = min(_step_s(model, inputs, labels, repeat) for _ in range(3))
            if took_s >= step_s or repeat >= _REPEAT_MAX:
                took_s = min(took_s, *(_step_s(model, inputs, labels, repeat) for _ in range(_TIMINGS)))
                return max(1, round(float(f"{repeat * step_s / took_s:.1g}")))
            repeat *= 2


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, as each worker of several on one machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def open_run_dir(path: Path) -> Path:
    """Make the folder of a run; return it as an absolute path.

    Raises:
        OffbeatError: it cannot be written, or holds a run log already, which is never overwritten.
    """
    try:
        folder = path.expanduser().absolute()
    except RuntimeError as error:
        raise OffbeatError(
            f"{path}: there is no such home folder; name another folder with --run-dir"
        ) from error
    if (folder / LOG_NAME).exists() or finished_parts(folder / LOG_NAME):
        raise OffbeatError(f"{path} holds the log of another run: name another folder with --run-dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OUTPUT_NAME).open("w").close()
    except OSError as error:
        raise OffbeatError(f"cannot write to the run folder {path}: {error.strerror or error}") from error
    return folder


def run(
    job: Job,
    run_dir: Path,
    on_progress: Callable[[TimeSheet], None] = lambda sheet: None,
    on_note: Callable[[str], None] | None = None,
) -> TimeSheet:
    """Run a training to its end, whether its log and what the workers say can be written down or not.

    Args:
        job: what to run.
        run_dir: from `open_run_dir`; gets the run log, and what the workers print.
        on_progress: called a few times a second with what is known so far.
        on_note: called at the end with a sentence for each file that could not be written to its end. Without
            it the whole log is needed.

    Returns:
        Where the time went, all epochs of all workers; as far as the log goes, see `TimeSheet.left`.

    Raises:
        WorkerError: a worker failed; names it.
        OffbeatError: the log does not hold the whole run, and there is no `on_note`.
    """
    log = LogReader(run_dir / LOG_NAME)
    sheet = TimeSheet()
    command = child.program("offbeat.cli.training_worker", msgspec.json.encode(job.settings).decode())
    env = {
        environment.SLOW: ";".join(job.slow),
        environment.RUN_LOG: str(run_dir / LOG_NAME),
        environment.RUN_LOG_BYTES_MAX: "",  # all of it is read here
        environment.SEED: str(job.settings.seed),
        environment.SERVERS: str(job.servers),
        environment.TRACE: "" if job.trace is None else f"{run_dir / TRACE_FOLDER}:{job.trace}",
    }
    with Output(run_dir / OUTPUT_NAME) as output:
        with launch(command, job.workers, env=env, on_output=output.add) as workers:
            while workers.running():
                log.read_into(sheet)
                on_progress(sheet)
                time.sleep(_POLL_S)
            outcomes = workers.wait()
    if output.error is not None and on_note is not None:
        on_note(f"not all that the workers said is in {output.path}: {output.error.strerror}")
    if not all(outcome.is_good for outcome in outcomes):
        first = min(outcomes, key=lambda o: (o.is_good, o.ended_because is not None, o.ended_s))
        where = os.path.relpath(run_dir / OUTPUT_NAME)
        raise WorkerError(f"{summary(outcomes)} (all that the workers said: {where})", worker=first.rank)
    if missing := log.read_to_the_end(sheet, job.world):
        note = (
            f"{log.path} does not go to the end of the run: expected every worker to leave in it, worker "
            f"{missing[0]} is missing; is the disk full, or was the coordinator ended?"
        )
        if on_note is None:
            raise OffbeatError(note)
        on_note(note)
    on_progress(sheet)
    return sheet


class Output:
    """Writes down what workers say; what comes after the first error is left out, for they go on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._file = path.open("wb", buffering=0)  # no buffer: what failed is not written again

    def add(self, rank: int, line: str) -> None:
        """Add a line of one worker."""
        if self.error is not None:
            return
        waiting = memoryview(f"[worker {rank}] {line}\n".encode(errors="replace"))
        try:
            while waiting:
                waiting = waiting[self._file.write(waiting) :]
        except OSError as error:
            self.error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error


class LogReader:
    """Reads what was added to a run log since the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read_into(self, sheet: TimeSheet) -> None:
        """Hand the sheet every new, complete line that it has a use for."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # not begun yet
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if line.startswith(_WANTED):
                sheet.add(from_plain(msgspec.json.decode(line)))

    def read_to_the_end(self, sheet: TimeSheet, workers: int, limit_s: float = _LOG_ENDS_S) -> list[int]:
        """Read until every worker has left: the coordinator outlives them by a moment, and writes it then.

        Returns:
            The workers of which that is not in the log after `limit_s` seconds: the disk may be full, or the
            coordinator was ended.
        """
        until_s = time.monotonic() + limit_s
        self.read_into(sheet)
        while (missing := sorted(set(range(workers)) - sheet.left)) and time.monotonic() < until_s:
            time.sleep(_POLL_S / 10)
            self.read_into(sheet)
        return missing


def _step_s(model: nn.Module, inputs: Tensor, labels: Tensor, repeat: int) -> float:
    began_s = time.perf_counter()
    loss_of(model, inputs, labels, repeat).backward()
    return time.perf_counter() - began_s
