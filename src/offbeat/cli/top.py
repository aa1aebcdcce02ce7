"""`offbeat top`: the state of a job in the terminal, from its run log or from its coordinator.

The view is text derived from a `JobStatus`; what a figure means is there.
"""

from __future__ import annotations

import os
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer
from rich.text import Text

from offbeat.cli import output
from offbeat.cli.output import NO_VALUE, TextTable
from offbeat.runtime.processes.waiting import wait_until_readable

if TYPE_CHECKING:
    from offbeat.cli.job_sources import JobSource
    from offbeat.wire.job_status import JobStatus, JobWorker

View: TypeAlias = list[TextTable | Text]

_PERIOD_S: Final = 1.0
_QUIT: Final = b"qQ"
_STYLES: Final = {"fine": "green", "starting": "dim"}  # of the sentence
_WORKING: Final = ("training", "waiting", "joined", "finished")
_REASONS_MAX: Final = 6
_LINES_AROUND: Final = 16  # of the view, around the rows of the table
_ROWS_MIN: Final = 4
_HEADS: Final = ("worker", "state", "step", "compute", "to\nmedian", "waits", "score", "line", "host")
_DROPPED_FIRST: Final = ("host", "line", "score", "waits", "compute")


def top(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's folder, its log, or HOST:PORT where the job's coordinator serves its figures "
            "(OFFBEAT_METRICS).",
            metavar="RUN",
            show_default=False,
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the present state and exit.")] = False,
) -> None:
    """Show every worker of a job: its state, step, compute time, waiting, and what is wrong.

    A run log is followed as it grows. The display ends with the job, or with q; where standard output is no
    terminal, the state is printed once.

    compute: median of the last 16 rounds. to median: that over the median of all workers. waits: the
    share of its time in which a worker waits for slower ones. score: the fastest worker's compute time over
    its own. line: how long data are on the way on a worker's best connection.
    """
    from offbeat.cli.job_sources import open_source

    source = open_source(run)
    if once or not sys.stdout.isatty():
        status = source.status()
        while source.is_behind:
            status = source.status()
        last = status
    else:
        last = _show(source)
    output.print_output(*make_view(last, columns=output.terminal_columns(), trouble=source.trouble))


def make_view(
    status: JobStatus, *, columns: int | None, rows_max: int | None = None, trouble: str = ""
) -> View:
    """Return the lines and the table that show a job.

    Args:
        status: the job's state.
        columns: width of the terminal; a table that does not fit loses its less important columns.
        rows_max: how many workers are shown, those first that do not train or are slow; None for all.
        trouble: why the state is an old one.
    """
    shown = _choose(status.workers, rows_max)
    table = TextTable(
        headers=_HEADS,
        rows=[_row(worker) for worker in shown],
        text_columns=frozenset({1, len(_HEADS) - 1}),
    )
    found = status.diagnosis
    view: View = [
        Text(_summary(status), style="bold"),
        Text(found.sentence, style=_STYLES.get(found.kind, "red")),
        output.drop_columns(table, _DROPPED_FIRST, columns),
    ]
    if len(shown) < len(status.workers):
        view.append(Text(f"and {len(status.workers) - len(shown)} more workers", style="dim"))
    reasons = [worker for worker in shown if worker.why and worker.state not in _WORKING]
    view += [Text(_reason(worker), style="dim") for worker in reasons[:_REASONS_MAX]]
    if trouble:
        view.append(Text(trouble, style="red"))
    return view


def _summary(status: JobStatus) -> str:
    counts: dict[str, int] = {}
    for worker in status.workers:
        counts[worker.state] = counts.get(worker.state, 0) + 1
    items = [
        f"{status.strategy.partition('(')[0] or 'job'}: step {status.step:,}, epoch {status.epoch + 1}",
        f"{len(status.workers)} workers: {', '.join(f'{count} {state}' for state, count in counts.items())}",
    ]
    if status.step_s is not None:
        items.insert(1, f"{_duration(status.step_s)} a step")
    if status.samples_per_s is not None:
        items.insert(2, f"{status.samples_per_s:,.0f} samples/s")
    return "; ".join(items)


def _choose(workers: Sequence[JobWorker], rows_max: int | None) -> Sequence[JobWorker]:
    if rows_max is None or len(workers) <= rows_max:
        return workers
    notable = sorted(workers, key=lambda one: (one.state in _WORKING, -(one.compute_ratio or 0.0)))
    return sorted(notable[:rows_max], key=lambda one: one.worker)


def _row(worker: JobWorker) -> tuple[str, ...]:
    return (
        str(worker.worker),
        worker.state,
        f"{worker.step:,}",
        _shown(worker.compute_s, _duration),
        _shown(worker.compute_ratio, lambda ratio: f"{ratio:.2f}"),
        _shown(worker.wait_share, lambda share: f"{share:.0%}"),
        _shown(worker.score, lambda score: f"{score:.2f}"),
        _shown(worker.line_s, _duration),
        worker.host or NO_VALUE,
    )


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return NO_VALUE if value is None else form(value)


def _duration(time_s: float) -> str:
    return f"{time_s:.3g} s" if time_s >= 1 else f"{1000 * time_s:.3g} ms"


def _reason(worker: JobWorker) -> str:
    since = "" if worker.state_step is None else f" since step {worker.state_step:,}"
    return f"worker {worker.worker} is {worker.state}{since}: {worker.why}"


# Live display --------------------------------------------------------------------------------------------


def _show(source: JobSource) -> JobStatus:
    """Show the job until it ends or a key ends the display; return its last state."""
    status = source.status()
    with _keys() as is_quit, output.Display() as display:
        while True:
            rows_max = max(_ROWS_MIN, display.lines - _LINES_AROUND)
            view = make_view(status, columns=display.columns, rows_max=rows_max, trouble=source.trouble)
            display.show(*view)
            if source.is_over or is_quit(0.0 if source.is_behind else _PERIOD_S):
                return status
            status = source.status()


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Context that has keys read at once; yields a wait that returns whether a key has ended the display."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield lambda wait_s: wait_until_readable(descriptor, wait_s) and os.read(descriptor, 1) in _QUIT
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleep(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False
