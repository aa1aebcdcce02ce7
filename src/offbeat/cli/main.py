"""The command line: parses arguments, calls public functions and prints; it makes no other decision.

Bad input ends with one line on standard error and exit code 2 before anything is started. A run that fails,
or a result that cannot be written, ends with one line and exit code 1, Ctrl-C with 130. Progress goes to
standard error, results to standard output, both through `offbeat.cli.output`. torch is imported only when a
command needs it, so that `--help` and a mistyped option are answered at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID
from rich.text import Text

import offbeat
from offbeat.cli import entry, output, simulation, top
from offbeat.cli.entry import file_errors
from offbeat.cli.options import CompareOptions, RunOptions, TrainOptions, expand_options

if TYPE_CHECKING:
    from offbeat.cli.job import Job
    from offbeat.cli.timesheet import TimeSheet
    from offbeat.cli.training_worker import TrainingSettings
    from offbeat.data import Splits
    from offbeat.runtime.control.environment import Environment
    from offbeat.runtime.ps.server import ServerConfiguration


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train PyTorch models on many workers without keeping to the beat of the slowest one.",
)


def _print_version(is_wanted: bool) -> None:
    """Print the version and end the command, before anything else is read."""
    if is_wanted:
        print(f"offbeat {offbeat.__version__}")
        raise typer.Exit()


@app.callback()
def with_version(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version),
    ] = False,
) -> None:
    """Options that hold without a command."""


@app.command()
@expand_options
def train(options: TrainOptions) -> None:
    """Train a built-in model on a built-in data set under one strategy.

    Prints a line for every epoch as it ends, and at the end a table of where each worker's time went. Rank 0
    measures the test accuracy after every epoch, while the other workers wait. The run log is
    RUN_DIR/log.jsonl (see `offbeat replay`).
    """
    from offbeat.cli import job, tables, timesheet
    from offbeat.cli.result import Result, check_writable

    training = options.job(options.strategy, options.slow or (), options.repeat, trace_step=options.trace)
    check_writable(options.json)
    splits = _load(training.settings, options.download)
    steps = training.steps_per_epoch(len(splits.train)) * options.epochs
    folder = job.open_run_dir(options.run_dir or _new_run_folder(options.strategy))
    notes: list[str] = []
    with output.make_progress() as progress:
        shown = _EpochLines(progress, training.world)
        label = f"{options.model} on {options.data}, {options.strategy}"
        sheet = _run(training, folder, progress, label, steps, shown, notes.append)
    for note in notes:
        print(f"offbeat: {note}", file=sys.stderr)
    figures = timesheet.figures(sheet)
    output.print_output(
        tables.time_parts_table(sheet), tables.results_table(figures, _relative(folder / job.LOG_NAME))
    )
    rows = timesheet.entries_as_dicts(sheet)
    command = entry.command_line("offbeat")
    result = Result(name="train", command=command, kind="real", seed=options.seed, figures=figures, rows=rows)
    result.write(options.json)


@app.command()
@expand_options
def compare(options: CompareOptions) -> None:
    """Train under every strategy and every slowness in turn, and compare the times.

    Times are means over the epochs after the first. Waiting is the share of their time that the workers
    without an injected slowness spend waiting for others.
    """
    from offbeat.cli import comparison, job, tables
    from offbeat.cli.result import Result, check_writable

    cases = comparison.comparison_cases(
        options.strategy or ["bsp", "partial"], options.slow or ["none", "1:5"]
    )
    if options.epochs < 2:
        raise ValueError(
            f"epochs must be at least 2 to compare, since the first one is a warm-up; got {options.epochs}"
        )

    def jobs_with(repeat: int) -> list[Job]:
        return [options.job(case.strategy, case.slow, repeat, evaluates_each_epoch=False) for case in cases]

    repeat = options.repeat
    jobs = jobs_with(1 if repeat is None else repeat)
    check_writable(options.json)
    splits = _load(jobs[0].settings, options.download)
    steps = jobs[0].steps_per_epoch(len(splits.train)) * options.epochs
    root = options.run_dir or _new_run_folder("compare")
    folders = [job.open_run_dir(root / case.label) for case in cases]
    if repeat is None:
        repeat = job.calibrate_repeat(jobs[0].settings, splits)
        jobs = jobs_with(repeat)
    del splits
    rows = []
    with output.make_progress() as progress:
        for case, training, folder in zip(cases, jobs, folders, strict=True):
            label = f"{case.strategy}, {comparison.describe_slowness(case.slow)}"
            sheet = _run(training, folder, progress, label, steps)
            rows.append(comparison.comparison_row(case, options.workers, sheet, options.threads_per_worker))
    stand_in = f", every sample {repeat} times in its batch" if repeat > 1 else ""
    title = (
        f"{options.model} on {options.data}, {options.workers} workers, batches of {options.batch_size}"
        f"{stand_in}"
    )
    result = Result(
        name="compare",
        command=entry.command_line("offbeat"),
        kind="real",
        seed=options.seed,
        figures=comparison.figures(rows),
        rows=comparison.rows_as_dicts(rows),
    )
    notes = [Text(note, style="dim") for note in tables.comparison_notes(rows, result.machine["cores"])]
    output.print_output(tables.comparison_table(rows, title), *notes, *comparison.summary_sentences(rows))
    result.write(options.json)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # torchrun's options have both forms
    },
)
@expand_options
def run(context: typer.Context, options: RunOptions) -> None:
    """Start a script on this host's workers, which go on when one of them dies if their strategy does.

    Usage: offbeat run OPTIONS script.py SCRIPT_OPTIONS

    Options have torchrun's names. On several hosts run this once on each, with the same --nnodes,
    --nproc-per-node and --master-addr, and a --node-rank of its own. Unlike torchrun it ends no worker
    because another one has failed: under a strategy that survives deaths the others go on, under another one
    they end with their own error. Each line of output begins with the rank of the worker that wrote it.
    SIGTERM and Ctrl-C are passed to the workers as SIGTERM; a second one kills them.

    The exit code is 0 if the workers that were left ended well, though others were killed by a signal.
    """
    from offbeat.cli import launcher

    raise typer.Exit(launcher.run(options, context.args))


@app.command()
def doctor() -> None:
    """Look at this machine before a training: what would stop it or slow it down, and what to do.

    In a worker of a job (RANK and WORLD_SIZE are set, as by torchrun) it looks at the job too, as
    offbeat run --check does: start it on every worker.

    The exit code is 1 if there is a problem that stops every training.
    """
    from offbeat.cli import doctor as checks
    from offbeat.cli import tables

    if os.environ.get("WORLD_SIZE", "1") != "1":
        from offbeat.cli import job_check

        raise typer.Exit(job_check.main())
    findings = [*checks.check_machine()]
    output.print_output(*tables.findings_lines(findings))
    raise typer.Exit(checks.exit_code(findings))


@app.command()
def serve(
    cluster: Annotated[
        Path | None,
        typer.Argument(
            help="The cluster file; without one, the server joins the training job at OFFBEAT_COORDINATOR.",
            metavar="[FILE]",
            show_default=False,
        ),
    ] = None,
    new: Annotated[
        int | None,
        typer.Option(
            metavar="SERVERS",
            help="Create a cluster of SERVERS initial servers, write its file, and run the first of them.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address of this host that the other hosts can reach; by default the one that is used to "
            "reach the manager, or 127.0.0.1 for a new cluster."
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=0, help="Replicas of each key in a new cluster, as far as there are servers.")
    ] = 2,
    function: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Register an update function of your own; all servers need the same ones. May be repeated.",
        ),
    ] = None,
) -> None:
    """Run one server of a parameter server until Ctrl-C, then hand its data over to the other servers.

    On the first host: offbeat serve --new 2 ps.json --host 10.0.0.1. Copy ps.json to the other hosts and run
    there: offbeat serve ps.json. The file grants access: keep it private. Programs connect with
    offbeat.PS("ps.json").

    Without a file the server belongs to the training job whose coordinator is at OFFBEAT_COORDINATOR: it
    waits until the job has begun, for at most OFFBEAT_START_S seconds, and ends with it. OFFBEAT_JOB,
    OFFBEAT_TOKEN_FILE and OFFBEAT_ATTEMPT are read as in a worker; the workers need
    OFFBEAT_SERVERS_APART=N, the number of servers with which the job starts. A server that is stopped before
    the end of the job ends with exit code 143, so that an orchestrator starts another one.

    A server that cannot hand its data over within 60 s ends with exit code 2.
    """
    from offbeat.runtime.ps.node import ClusterFile
    from offbeat.runtime.ps.server import ServerConfiguration, ServerProcess
    from offbeat.runtime.ps.server import serve as serve_until_stopped

    if cluster is None:
        if new is not None or function:
            raise ValueError("--new and --function need FILE, the cluster file")
        configuration = _configuration_in_job(host)
    else:
        if new is not None:
            from offbeat.runtime.ps.cluster import start_manager

            if new < 1:
                raise ValueError(f"expected at least 1 server to begin with, got {new}")
            found = start_manager(new, host=host or "127.0.0.1", replicas=replicas)
            found.write(cluster)
        else:
            with file_errors("read", cluster):
                found = ClusterFile.read(cluster)
        configuration = ServerConfiguration(
            cluster=found, host=host or found.own_host(), functions=tuple(function or ())
        )
    server = ServerProcess(configuration)
    name = repr(configuration.cluster.job) if cluster is None else cluster
    serve_until_stopped(
        server, lambda: print(f"server {server.server} of {name}", file=sys.stderr, flush=True)
    )
    if cluster is None and server.has_left_early:  # so that an orchestrator starts another one
        raise typer.Exit(128 + signal.SIGTERM)


def _configuration_in_job(host: str | None) -> ServerConfiguration:
    """Return the configuration of a server in the training job at OFFBEAT_COORDINATOR."""
    from offbeat.runtime.ps.job_server import request_configuration

    environment = _environment_apart()
    if environment.coordinator is None:
        raise ValueError(
            "expected FILE, a cluster file, or OFFBEAT_COORDINATOR=HOST:PORT, where the coordinator of a "
            "training job listens"
        )
    return request_configuration(environment, host)


def _environment_apart() -> Environment:
    """Read the environment of a process that belongs to a job and is no worker."""
    from offbeat.runtime.control.environment import read_environment

    place = ("RANK", "WORLD_SIZE")
    return read_environment({name: value for name, value in os.environ.items() if name not in place})


@app.command()
def coordinator(
    bind: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address to listen on; 0.0.0.0 or [::] as HOST for all addresses of this host, and port 0 "
            "for any free one.",
            show_default=False,
        ),
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the job's state, on a disk that outlives this process. A coordinator that is "
            "started again with this folder, here or on another host, continues the job.",
        ),
    ] = None,
) -> None:
    """Run the coordinator of one job apart from its workers, until all workers have finished.

    Workers find it by OFFBEAT_COORDINATOR=HOST:PORT, or by OFFBEAT_COORDINATOR=file:///DIR/address at
    whatever address it is, and then need no MASTER_ADDR: none of them, and none of their hosts, is needed by
    the others any more. OFFBEAT_JOB (the job's name), OFFBEAT_TOKEN_FILE (a file with the job's secret),
    OFFBEAT_RUN_LOG, OFFBEAT_RUN_LOG_BYTES_MAX, OFFBEAT_METRICS, OFFBEAT_TENSORBOARD and OFFBEAT_SPANS are
    read here as in a worker.
    """
    from offbeat.runtime.control.service import run_service

    raise typer.Exit(run_service(bind, _environment_apart(), state=state))


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="A run's folder.", metavar="RUN", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file; by default RUN/trace.json.")
    ] = None,
) -> None:
    """Merge the traces of a run's workers into one file for ui.perfetto.dev.

    The file shows for every worker the phases of the training loop, when each layer was needed and when its
    gradients were ready, the start and end of every transfer, and the amount sent. 'offbeat train --trace
    STEP' records a trace; other scripts record one with OFFBEAT_TRACE=FOLDER:STEP in the environment, where
    FOLDER is RUN/trace.
    """
    import msgspec

    from offbeat.cli import trace_file

    traces = trace_file.read_traces(run / trace_file.TRACE_FOLDER)
    path = out or run / "trace.json"
    with file_errors("write", path):
        path.write_bytes(msgspec.json.encode(trace_file.to_chrome_trace(traces)))
    steps = f"steps {traces[0].first_step} and {traces[0].first_step + 1}"
    print(f"{path}: {steps} of {len(traces)} workers; open it in https://ui.perfetto.dev")


@app.command()
def replay(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run's folder, its log, or one part of its log.", metavar="RUN", show_default=False
        ),
    ],
) -> None:
    """Replay a run log: fresh policies must return the actions that the log holds.

    Exits with 0 if all actions are identical, else prints the first difference and exits with 1. For a
    folder, all parts of the log that exist are replayed, each from the policy state that it begins with.
    """
    from offbeat.events import Action
    from offbeat.wire import replay
    from offbeat.wire.averagings import count_averagings

    logs = simulation.read_logs(run)
    for path, log in logs.items():
        difference = replay.replay(log)
        if difference is not None:
            print(difference if len(logs) == 1 else f"{path}: {difference}")
            raise typer.Exit(entry.FAILED)
    entries = [entry for log in logs.values() for entry in log.entries]
    actions = sum(isinstance(entry, Action) for entry in entries)
    print(f"identical: {len(entries) - actions} events, {actions} actions")
    averagings = count_averagings(entries)
    if averagings.total:
        print(
            f"averagings of models: {averagings.total}, of which {averagings.incomplete} moved the mean of "
            "all models, because some members received theirs and others did not"
        )
    before = next(iter(logs.values())).events_before
    if before:
        print(f"the log starts after {before} earlier events, and was replayed from the state at that time")
    if any(log.is_truncated for log in logs.values()):
        print(
            "the log ends in the middle of a line, which was skipped: the run was killed while writing it, "
            "or could not write any more"
        )


@app.command()
def log_schema() -> None:
    """Print the JSON Schema of a run log's lines (draft 2020-12), for programs that read run logs."""
    import msgspec

    from offbeat.wire import log_file

    print(msgspec.json.format(msgspec.json.encode(log_file.log_schema())).decode())


app.command()(simulation.simulate)
app.command()(top.top)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: without the program's name; by default those of the process.
    """
    return entry.run_app(app, "offbeat", arguments)


def _relative(path: Path) -> str:
    """Return the path relative to the current folder, unless it lies outside of it."""
    near = os.path.relpath(path)
    return str(path) if near.startswith("..") else near


def _new_run_folder(what: str) -> Path:
    """Return a folder for a run: in `runs`, or where that is not writable in the temporary folder."""
    plain = "".join(character if character.isalnum() else "-" for character in what)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{plain}"
    runs = Path("runs")
    above = runs if runs.exists() else runs.parent
    if os.access(above, os.W_OK | os.X_OK):
        return runs / name
    folder = Path(tempfile.mkdtemp(prefix=f"offbeat-{name}-"))
    print(f"offbeat: cannot write to {above.absolute()}; the run log goes to {folder}", file=sys.stderr)
    return folder


def _load(settings: TrainingSettings, download: bool) -> Splits:
    from offbeat.cli import job

    with contextlib.ExitStack() as stack:
        bars: list[Progress] = []
        tasks: dict[str, TaskID] = {}

        def show(name: str, received_bytes: int, size_bytes: int) -> None:
            if not bars:
                bars.append(stack.enter_context(output.make_progress()))
            if name not in tasks:
                tasks[name] = bars[0].add_task(f"downloading {name}", total=size_bytes)
            bars[0].update(tasks[name], completed=received_bytes)

        return job.load_data(settings, download=download, progress=show)


def _run(
    training: Job,
    folder: Path,
    progress: Progress,
    label: str,
    steps: int,
    show: Callable[[TimeSheet], None] = lambda sheet: None,
    on_note: Callable[[str], None] | None = None,
) -> TimeSheet:
    """Run a training with a progress bar that shows the steps of the fastest worker."""
    from offbeat.cli import job

    task = progress.add_task(f"{label}: starting {training.workers} workers", total=steps)

    def update(sheet: TimeSheet) -> None:
        done = max(sheet.steps_finished.values(), default=0)
        progress.update(task, completed=done, description=label if done else None)
        show(sheet)

    return job.run_job(training, folder, update, on_note)


class _EpochLines:
    """Prints a line for every epoch that all workers have finished."""

    def __init__(self, progress: Progress, workers: int) -> None:
        self._console = progress.console
        self._workers = workers
        self._printed = 0

    def __call__(self, sheet: TimeSheet) -> None:
        from offbeat.cli import tables

        for epoch in range(self._printed, sheet.epochs_finished(self._workers)):
            line = tables.epoch_line(epoch, sheet.epoch(epoch))
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._printed = epoch + 1
