"""The command line: parses arguments, calls public functions and prints; it makes no other decision.

Bad input ends with one line on standard error and exit code 2 before anything is started. A run that fails,
or a result that cannot be written, ends with one line and exit code 1, Ctrl-C with 130. Progress goes to
standard error, results to standard output, both through `offbeat.cli.output`. torch is imported only when a
command needs it, so that `--help` and a mistyped option are answered at once.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, TaskID
from rich.text import Text

import offbeat
from offbeat.cli import entry, output, simulation
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.cli.job import Job
    from offbeat.cli.timesheet import TimeSheet
    from offbeat.cli.training_worker import TrainingSettings
    from offbeat.data import Splits
    from offbeat.policies import Policy
    from offbeat.policies.staleness.caches import PsOptions


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train PyTorch models on many workers without keeping to the beat of the slowest one.",
)

_SLOW = (
    "WORKER:FACTOR: slow down the computation of worker WORKER by FACTOR. 'random' as FACTOR draws one every "
    "epoch; @0.0-0.5 after it limits the slowness to a part of every epoch, @burst=20/100 to the first 20 of "
    "every 100 steps."
)
Model = Annotated[str, typer.Option(help="Model: mlp, cnn2, alexnet, resnet18, resnet50 or bert_small.")]
Data = Annotated[str, typer.Option(help="Data set: digits (needs no download), mnist or cifar10.")]
Workers = Annotated[int, typer.Option(help="Number of worker processes to start on this machine.")]
Epochs = Annotated[int, typer.Option(help="Number of passes over the training data.")]
BatchSize = Annotated[int, typer.Option(help="Samples per worker and step.")]
LearningRate = Annotated[float, typer.Option(help="Learning rate.")]
Momentum = Annotated[float, typer.Option(help="Momentum of SGD, or the first beta of Adam.")]
Optimizer = Annotated[str, typer.Option(help="Optimizer: sgd, adagrad, adam or adamw.")]
Servers = Annotated[int, typer.Option(help="Number of servers, for strategies on a parameter server.")]
Threads = Annotated[
    int, typer.Option(help="Worker threads in each process, for strategies on a parameter server.")
]
Seed = Annotated[int, typer.Option(help="Seed of the weights, the order of samples and random slowness.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the data set's files; by default ~/.cache/offbeat.")
]
Download = Annotated[bool, typer.Option("--download", help="Download the data set if it is missing.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result to FILE as JSON.")
]


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
def train(
    model: Model = "mlp",
    data: Data = "digits",
    workers: Workers = 4,
    strategy: Annotated[
        str, typer.Option(help="Synchronisation strategy, as name or name:key=value,key=value.")
    ] = "bsp",
    epochs: Epochs = 5,
    batch_size: BatchSize = 32,
    lr: LearningRate = 0.1,
    momentum: Momentum = 0.9,
    optimizer: Optimizer = "sgd",
    servers: Servers = 1,
    threads_per_worker: Threads = 1,
    seed: Seed = 0,
    slow: Annotated[list[str] | None, typer.Option(help=f"{_SLOW} May be repeated.")] = None,
    repeat: Annotated[
        int,
        typer.Option(help="Repeat every sample N times in its batch, to emulate an N times costlier model."),
    ] = 1,
    data_dir: DataDir = None,
    download: Download = False,
    json: Json = None,
    trace: Annotated[
        int | None, typer.Option(min=0, help="Trace this step and the next one, for 'offbeat trace'.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="New folder for the run log; by default runs/TIME-STRATEGY."),
    ] = None,
) -> None:
    """Train a built-in model on a built-in data set under one strategy.

    Prints a line for every epoch as it ends, and at the end a table of where each worker's time went. Rank 0
    measures the test accuracy after every epoch, while the other workers wait. The run log is
    RUN_DIR/log.jsonl (see `offbeat replay`).
    """
    from offbeat.cli import job, tables, timesheet
    from offbeat.cli.result import Result, check_writable
    from offbeat.cli.training_worker import TrainingSettings

    settings = TrainingSettings(
        model=model,
        data=data,
        strategy=strategy,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        momentum=momentum,
        seed=seed,
        repeat=repeat,
        optimizer=optimizer,
        threads=threads_per_worker,
        data_dir=_data_dir(data_dir, download),
    )
    training = job.Job(
        settings=settings, workers=workers, slow=tuple(slow or ()), servers=servers, trace_step=trace
    )
    if json is not None:
        check_writable(json)
    splits = _load(settings, download)
    steps = training.steps_per_epoch(len(splits.train))
    folder = job.open_run_dir(run_dir or _new_run_folder(strategy))
    notes: list[str] = []
    with output.make_progress() as progress:
        shown = _EpochLines(progress, training.world)
        label = f"{model} on {data}, {strategy}"
        sheet = _run(training, folder, progress, label, steps * epochs, shown, notes.append)
    for note in notes:
        print(f"offbeat: {note}", file=sys.stderr)
    figures = timesheet.figures(sheet)
    output.print_output(
        tables.time_parts_table(sheet), tables.results_table(figures, _relative(folder / job.LOG_NAME))
    )
    if json is not None:
        rows = timesheet.entries_as_dicts(sheet)
        result = Result(name="train", command=_command(), kind="real", seed=seed, figures=figures, rows=rows)
        result.write(json)


@app.command()
def compare(
    model: Model = "mlp",
    data: Data = "digits",
    workers: Workers = 4,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="A strategy, as name or name:key=value,key=value. May be repeated."),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One case per option: 'none', or rules joined by +; by default none and 1:5. {_SLOW}"
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Epochs per case, at least 2: the first is a warm-up.")] = 6,
    batch_size: BatchSize = 32,
    lr: LearningRate = 0.1,
    momentum: Momentum = 0.9,
    optimizer: Optimizer = "sgd",
    servers: Servers = 1,
    threads_per_worker: Threads = 1,
    seed: Seed = 0,
    repeat: Annotated[
        int | None,
        typer.Option(
            help="Repeat every sample N times in its batch, to emulate an N times costlier model; by default "
            "as many times as a step needs to compute for 20 ms on one idle core."
        ),
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    json: Json = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the run logs, one subfolder per case; by default runs/TIME-compare."),
    ] = None,
) -> None:
    """Train under every strategy and every slowness in turn, and compare the times.

    Times are means over the epochs after the first. Waiting is the share of their time that the workers
    without an injected slowness spend waiting for others.
    """
    from offbeat.cli import comparison, job, tables
    from offbeat.cli.result import Result, check_writable
    from offbeat.cli.training_worker import TrainingSettings

    cases = comparison.comparison_cases(strategy or ["bsp", "partial"], slow or ["none", "1:5"])
    if epochs < 2:
        raise ValueError(
            f"epochs must be at least 2 to compare, since the first one is a warm-up; got {epochs}"
        )

    def job_of(case: comparison.ComparisonCase, repeat: int) -> job.Job:
        settings = TrainingSettings(
            model=model,
            data=data,
            strategy=case.strategy,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            momentum=momentum,
            seed=seed,
            repeat=repeat,
            optimizer=optimizer,
            threads=threads_per_worker,
            data_dir=_data_dir(data_dir, download),
            evaluates_each_epoch=False,
        )
        return job.Job(settings=settings, workers=workers, slow=case.slow, servers=servers)

    jobs = [job_of(case, 1 if repeat is None else repeat) for case in cases]
    if json is not None:
        check_writable(json)
    splits = _load(jobs[0].settings, download)
    steps = jobs[0].steps_per_epoch(len(splits.train))
    root = run_dir or _new_run_folder("compare")
    folders = [job.open_run_dir(root / case.label) for case in cases]
    if repeat is None:
        repeat = job.calibrate_repeat(jobs[0].settings, splits)
        jobs = [job_of(case, repeat) for case in cases]
    del splits
    rows = []
    with output.make_progress() as progress:
        for case, training, folder in zip(cases, jobs, folders, strict=True):
            label = f"{case.strategy}, {comparison.describe_slowness(case.slow)}"
            sheet = _run(training, folder, progress, label, steps * epochs)
            rows.append(comparison.comparison_row(case, workers, sheet, threads_per_worker))
    stand_in = f", every sample {repeat} times in its batch" if repeat > 1 else ""
    title = f"{model} on {data}, {workers} workers, batches of {batch_size}{stand_in}"
    result = Result(
        name="compare",
        command=_command(),
        kind="real",
        seed=seed,
        figures=comparison.figures(rows),
        rows=comparison.rows_as_dicts(rows),
    )
    notes = [Text(note, style="dim") for note in tables.comparison_notes(rows, result.machine["cores"])]
    output.print_output(tables.comparison_table(rows, title), *notes, *comparison.summary_sentences(rows))
    if json is not None:
        result.write(json)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
)
def run(
    context: typer.Context,
    slow: Annotated[list[str] | None, typer.Option(help=f"{_SLOW} May be repeated.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for the run log, log.jsonl; by default no log is written.")
    ] = None,
    log_bytes_max: Annotated[
        int | None,
        typer.Option(
            help="Maximum size of the run log in bytes, at least 1048576: the log is then written in parts, "
            "and the oldest are removed. By default there is no limit."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sample order in session.batches and of random slowness.")
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(help="Number of servers, for strategies on a parameter server; by default 1."),
    ] = None,
    replace: Annotated[
        int,
        typer.Option(
            help="Start at most this many workers in place of ones that are killed or fail. Each gets a new "
            "id and copies the state from a peer (strategies partial and dpar)."
        ),
    ] = 0,
) -> None:
    """Launch a training script with torchrun, with slowness, a run log or a seed.

    Usage: offbeat run OPTIONS TORCHRUN_OPTIONS script.py SCRIPT_OPTIONS

    All arguments after the options below are passed to torchrun unchanged (see `torchrun --help`), so these
    options come first. torchrun ends all workers when one fails; --replace therefore starts them itself, on
    this machine only, and accepts only torchrun's --nproc-per-node, --module and --no-python. Each line of
    output then begins with the rank of the worker that wrote it.
    """
    from offbeat.cli import job
    from offbeat.cli.training_worker import SEED_MAX
    from offbeat.policies.stragglers.injection import parse_slow_rule
    from offbeat.runtime.control import environment
    from offbeat.runtime.control.run_log import check_log_bytes_max

    if not context.args:
        raise ValueError("expected a script to launch, as in: offbeat run --nproc-per-node 4 script.py")
    for rule in slow or ():
        parse_slow_rule(rule)
    if replace < 0:
        raise ValueError(f"expected at least 0 workers to replace others, got {replace}")
    if seed is not None and not 0 <= seed <= SEED_MAX:
        raise ValueError(f"the seed must be from 0 to {SEED_MAX}, got {seed}")
    if slow:
        os.environ[environment.SLOW_VARIABLE] = ";".join(slow)
    if servers is not None:
        if servers < 1:
            raise ValueError(f"expected at least 1 server, got {servers}")
        os.environ[environment.SERVERS_VARIABLE] = str(servers)
    if seed is not None:
        os.environ[environment.SEED_VARIABLE] = str(seed)
    if log_bytes_max is not None:
        if run_dir is None:
            raise ValueError("--log-bytes-max limits the run log: name its folder with --run-dir")
        check_log_bytes_max(log_bytes_max)
        os.environ[environment.RUN_LOG_BYTES_MAX_VARIABLE] = str(log_bytes_max)
    if run_dir is not None:
        os.environ[environment.RUN_LOG_VARIABLE] = str(job.open_run_dir(run_dir) / job.LOG_NAME)
    raise typer.Exit(_launch_locally(context.args, replace) if replace else _torchrun(context.args))


@app.command()
def serve(
    cluster: Annotated[Path, typer.Argument(help="The cluster file.", metavar="FILE", show_default=False)],
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
    copies: Annotated[
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
    """
    from offbeat.runtime.ps.node import ClusterFile
    from offbeat.runtime.ps.server import ServerConfiguration, ServerProcess
    from offbeat.runtime.ps.server import serve as serve_until_stopped

    if new is not None:
        from offbeat.runtime.ps.cluster import start_manager

        if new < 1:
            raise ValueError(f"expected at least 1 server to begin with, got {new}")
        found = start_manager(new, host=host or "127.0.0.1", copies=copies)
        found.write(cluster)
    else:
        try:
            found = ClusterFile.read(cluster)
        except OSError as error:
            raise OffbeatError(f"cannot read {cluster}: {error.strerror or error}") from error
    configuration = ServerConfiguration(
        cluster=found, host=host or found.own_host(), functions=tuple(function or ())
    )
    server = ServerProcess(configuration)
    serve_until_stopped(
        server, lambda: print(f"server {server.server} of {cluster}", file=sys.stderr, flush=True)
    )


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
    try:
        path.write_bytes(msgspec.json.encode(trace_file.to_chrome_trace(traces)))
    except OSError as error:
        raise OffbeatError(f"cannot write {path}: {error.strerror or error}") from error
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
    from offbeat.wire import record

    try:
        logs = record.read_logs(run / "log.jsonl") if run.is_dir() else {run: record.read_log(run)}
    except OSError as error:
        raise OffbeatError(f"cannot read {error.filename}: {error.strerror or error}") from error
    for path, log in logs.items():
        difference = record.replay(log)
        if difference is not None:
            print(difference if len(logs) == 1 else f"{path}: {difference}")
            raise typer.Exit(entry.FAILED)
    entries = [entry for log in logs.values() for entry in log.entries]
    actions = sum(isinstance(entry, Action) for entry in entries)
    print(f"identical: {len(entries) - actions} events, {actions} actions")
    before = next(iter(logs.values())).events_before
    if before:
        print(f"the log starts after {before} earlier events, and was replayed from the state at that time")
    if any(log.is_truncated for log in logs.values()):
        print(
            "the log ends in the middle of a line, which was skipped: the run was killed while writing it, "
            "or could not write any more"
        )


def _policies(strategy: str, world: int) -> Callable[[], list[Policy]]:
    """Return a function that builds the coordinator's policies under a strategy."""
    from offbeat.runtime.control.environment import Environment
    from offbeat.strategies import parse_strategy
    from offbeat.wire.record import build_policy

    specs = parse_strategy(strategy).policies(world, Environment.start_s, Environment.servers)
    return lambda: [build_policy(spec.path, dict(spec.arguments)) for spec in specs]


def _server_arguments(strategy: str) -> tuple[PsOptions, dict[str, Any]] | None:
    """How a strategy uses a parameter server, and the arguments of its `BoundedStaleness`; else None."""
    from offbeat.strategies import parse_strategy
    from offbeat.strategies.staleness import ServerStrategy

    parsed = parse_strategy(strategy)
    return (parsed.ps_options(), parsed.staleness_arguments()) if isinstance(parsed, ServerStrategy) else None


simulation.register(app, _policies, _server_arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: without the program's name; by default those of the process.
    """
    return entry.run_app(app, "offbeat", arguments)


def _command() -> str:
    return shlex.join(["offbeat", *sys.argv[1:]])


def _relative(path: Path) -> str:
    """The path relative to the current folder, unless it lies outside of it."""
    near = os.path.relpath(path)
    return str(path) if near.startswith("..") else near


def _data_dir(given: Path | None, download: bool) -> str:
    from offbeat.data import resolve_data_dir

    folder = resolve_data_dir(given)
    if given is not None and not download and not Path(folder).is_dir():
        raise ValueError(f"the data folder {given} does not exist: name an existing one or add --download")
    return folder


def _new_run_folder(what: str) -> Path:
    """A folder for a run, in `runs`, or in the system's temporary folder where that is not writable."""
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


def _launch_locally(arguments: list[str], replacements: int) -> int:
    """Start local workers without torchrun, and replacements for those that die; return the exit code."""
    from torch.distributed.run import determine_local_world_size, parse_args

    from offbeat.runtime.launch import launch, outcome_summary

    given, defaults = vars(parse_args(arguments)), vars(parse_args(["script"]))
    supported = {
        "nproc_per_node",
        "standalone",
        "module",
        "no_python",
        "training_script",
        "training_script_args",
    }
    unsupported = [name for name in defaults if given[name] != defaults[name] and name not in supported]
    if unsupported:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unsupported)
        raise ValueError(
            f"{names} cannot be used with --replace, which starts all workers itself, on this machine"
        )
    workers = determine_local_world_size(given["nproc_per_node"])
    if workers < 2:
        raise ValueError(
            "--replace needs at least 2 workers (--nproc-per-node): a replacement copies the state of a peer"
        )
    command = [given["training_script"], *given["training_script_args"]]
    if not given["no_python"]:
        command = [sys.executable, "-u", *(["-m"] if given["module"] else []), *command]

    errors: list[output.OutputError] = []

    def show(rank: int, line: str) -> None:
        try:
            print(f"[{rank}] {line}", flush=True)
        except output.OutputError as error:  # a full disk ends the display, not the workers
            entry.print_error(f"the workers' output is no longer shown: {error.reason}", entry.FAILED)
            errors.append(error)

    with launch(command, workers, on_output=show, grace_s=None, replacements=replacements) as running:
        outcomes = running.wait()
    if all(outcome.has_succeeded or outcome.replaced_by is not None for outcome in outcomes):
        print(f"offbeat: {outcome_summary(outcomes)}", file=sys.stderr)
        return entry.FAILED if errors else 0
    return entry.print_error(outcome_summary(outcomes), entry.FAILED)


def _torchrun(arguments: list[str]) -> int:
    """Run torchrun in this process and return its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was killed by {failure.signal_name()}" if code < 0 else f"failed with exit code {code}"
        return entry.print_error(f"rank {rank} {how}; its output is above", entry.FAILED)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
