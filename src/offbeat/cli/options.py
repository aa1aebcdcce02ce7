"""Options that several commands have: each option, its default and its help stand once.

A command takes a dataclass whose fields are its options, and `expand_options` shows them to typer. Importing
this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from offbeat.cli.job import Job

SLOW_HELP = (
    "WORKER:FACTOR: slow down the computation of worker WORKER by FACTOR. 'random' as FACTOR draws one every "
    "epoch; @0.0-0.5 after it limits the slowness to a part of every epoch, @burst=20/100 to the first 20 of "
    "every 100 steps, @p=0.05 to steps drawn with probability 0.05."
)
_STRATEGY_FORM = "as name or name:key=value,key=value."
_REPEAT_HELP = "Repeat every sample N times in its batch, to emulate an N times costlier model"

Model = Annotated[str, typer.Option(help="Model: mlp, cnn2, alexnet, resnet18, resnet50 or bert_small.")]
Data = Annotated[str, typer.Option(help="Data set: digits (needs no download), mnist or cifar10.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the data set's files; by default ~/.cache/offbeat.")
]
Download = Annotated[bool, typer.Option("--download", help="Download the data set if it is missing.")]
BatchSize = Annotated[int, typer.Option(help="Samples per worker and step.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result to FILE as JSON.")
]


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has, for each parameter whose type is a dataclass, one option per field of it."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in signature(function).parameters.items():
        if not is_dataclass(hints[name]):
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            continue
        groups[name] = hints[name]
        of_fields = get_type_hints(hints[name], include_extras=True)
        parameters += [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=of_fields[field.name],
            )
            for field in fields(hints[name])
        ]

    def command(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        function(**given)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    vars(command)["__signature__"] = Signature(parameters)
    return command


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """A built-in training; the commands say how many strategies and cases of slowness there are."""

    model: Model = "mlp"
    data: Data = "digits"
    workers: Annotated[int, typer.Option(help="Number of worker processes to start on this machine.")] = 4
    strategy: str | list[str] | None = None
    epochs: int = 0
    batch_size: BatchSize = 32
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.1
    momentum: Annotated[float, typer.Option(help="Momentum of SGD, or the first beta of Adam.")] = 0.9
    optimizer: Annotated[str, typer.Option(help="Optimizer: sgd, adagrad, adam or adamw.")] = "sgd"
    servers: Annotated[int, typer.Option(help="Number of servers, for strategies on a parameter server.")] = 1
    threads_per_worker: Annotated[
        int, typer.Option(help="Worker threads in each process, for strategies on a parameter server.")
    ] = 1
    seed: Annotated[
        int, typer.Option(help="Seed of the weights, the order of samples and random slowness.")
    ] = 0
    slow: list[str] | None = None
    repeat: int | None = None
    data_dir: DataDir = None
    download: Download = False
    json: Json = None

    def job(
        self,
        strategy: str,
        slow: Sequence[str],
        repeat: int,
        *,
        trace_step: int | None = None,
        evaluates_each_epoch: bool = True,
    ) -> Job:
        """Return one training with these options.

        Raises:
            ValueError: an option is out of range, or the folder of the data does not exist.
        """
        from offbeat.cli.job import Job
        from offbeat.cli.training_worker import TrainingSettings
        from offbeat.data import resolve_data_dir

        folder = resolve_data_dir(self.data_dir)
        if self.data_dir is not None and not self.download and not Path(folder).is_dir():
            raise ValueError(
                f"the data folder {self.data_dir} does not exist: name an existing one or add --download"
            )
        settings = TrainingSettings(
            model=self.model,
            data=self.data,
            strategy=strategy,
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            momentum=self.momentum,
            seed=self.seed,
            repeat=repeat,
            optimizer=self.optimizer,
            threads=self.threads_per_worker,
            data_dir=folder,
            evaluates_each_epoch=evaluates_each_epoch,
        )
        return Job(
            settings=settings,
            workers=self.workers,
            slow=tuple(slow),
            servers=self.servers,
            trace_step=trace_step,
        )


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainingOptions):
    """The options of `offbeat train`."""

    strategy: Annotated[str, typer.Option(help=f"Synchronisation strategy, {_STRATEGY_FORM}")] = "bsp"
    epochs: Annotated[int, typer.Option(help="Number of passes over the training data.")] = 5
    slow: Annotated[list[str] | None, typer.Option(help=f"{SLOW_HELP} May be repeated.")] = None
    repeat: Annotated[int, typer.Option(help=f"{_REPEAT_HELP}.")] = 1
    trace: Annotated[
        int | None, typer.Option(min=0, help="Trace this step and the next one, for 'offbeat trace'.")
    ] = None
    run_dir: Annotated[
        Path | None, typer.Option(help="New folder for the run log; by default runs/TIME-STRATEGY.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(TrainingOptions):
    """The options of `offbeat compare`."""

    strategy: Annotated[
        list[str] | None, typer.Option(help=f"A strategy, {_STRATEGY_FORM} May be repeated.")
    ] = None
    epochs: Annotated[int, typer.Option(help="Epochs per case, at least 2: the first is a warm-up.")] = 6
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One case per option: 'none', or rules joined by +; by default none and 1:5. {SLOW_HELP}"
        ),
    ] = None
    repeat: Annotated[
        int | None,
        typer.Option(
            help=f"{_REPEAT_HELP}; by default as many times as a step needs to compute for 20 ms on one idle "
            "core."
        ),
    ] = None
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the run logs, one subfolder per case; by default runs/TIME-compare."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `offbeat run`; those with an environment variable have torchrun's names."""

    nproc_per_node: Annotated[
        str,
        typer.Option(
            envvar="PET_NPROC_PER_NODE",
            help="Workers on each host, the same number on all; auto, gpu or cpu to count devices.",
        ),
    ] = "1"
    nnodes: Annotated[str, typer.Option(envvar="PET_NNODES", help="Number of hosts.")] = "1"
    node_rank: Annotated[
        int, typer.Option(envvar="PET_NODE_RANK", help="This host's number, from 0 to nnodes - 1.")
    ] = 0
    master_addr: Annotated[
        str | None,
        typer.Option(
            envvar="PET_MASTER_ADDR",
            help="Address of node 0, whose launcher has the job's store; needed with several hosts.",
        ),
    ] = None
    master_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            envvar="PET_MASTER_PORT",
            help="Port of that store; by default 29500 with several hosts, else a free one.",
        ),
    ] = None
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Start no script: let the workers look at their hosts and at the connections between them, "
            "as offbeat doctor does for one host.",
        ),
    ] = False
    standalone: Annotated[
        bool, typer.Option("--standalone", help="One host and a free port, which is the default.")
    ] = False
    module: Annotated[
        bool, typer.Option("--module", "-m", help="The script is a module, as for python -m.")
    ] = False
    no_python: Annotated[
        bool, typer.Option("--no-python", help="The script is a program, not to be started by Python.")
    ] = False
    shutdown_timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds that workers get to end after SIGTERM or Ctrl-C, before SIGKILL."),
    ] = 30.0
    replace: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often a worker of this host that is killed or fails may be started again. It joins the "
            "running job with a new id and the state of a peer, if the strategy survives deaths.",
        ),
    ] = 0
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Encrypt the job's TCP connections with certificates made for it, on one host only; needs "
            "the program openssl.",
        ),
    ] = False
    slow: Annotated[list[str] | None, typer.Option(help=f"{SLOW_HELP} May be repeated.")] = None
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the run log, log.jsonl, on node 0; by default no log is written."),
    ] = None
    log_bytes_max: Annotated[
        int | None,
        typer.Option(
            help="Maximum size of the run log in bytes, at least 1048576: the log is then written in parts, "
            "and the oldest are removed. By default there is no limit."
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sample order in session.batches and of random slowness.")
    ] = None
    servers: Annotated[
        int | None,
        typer.Option(help="Number of servers, for strategies on a parameter server; by default 1."),
    ] = None
