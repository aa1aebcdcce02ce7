"""`offbeat simulate`: a strategy, or a parameter server, on a simulated cluster; fault campaigns.

It reads arguments, maps a strategy to its policies, runs the simulator and prints.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.cli import entry, output
from offbeat.cli.options import Json, expand_options

if TYPE_CHECKING:
    from offbeat.policies import Policy
    from offbeat.policies.staleness.caches import PsOptions
    from offbeat.simulator.core.times import ComputeTimes
    from offbeat.simulator.staleness.cluster import SimulatedPsCluster
    from offbeat.simulator.training.cluster import SimulatedCluster
    from offbeat.simulator.training.setting import SimulationSetting
    from offbeat.strategies.model_averaging import AveragesModels
    from offbeat.wire.log_file import RunRecord

Findings = tuple[dict[str, float], list[dict[str, Any]]]
"""Figures and rows of a result."""

_SEED_MAX = 2**63 - 1


class SimulationKind(StrEnum):
    """The system to simulate."""

    TRAINING = "training"
    PS = "ps"


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of `offbeat simulate`."""

    what: Annotated[
        SimulationKind,
        typer.Argument(help="Workers in training, or ps: clients and servers of a parameter server."),
    ] = SimulationKind.TRAINING
    workers: Annotated[int, typer.Option(help="Number of workers at the start.")] = 4
    steps: Annotated[int, typer.Option(help="Optimizer steps of each worker.")] = 1000
    steps_per_epoch: Annotated[int, typer.Option(help="Steps in an epoch.")] = 100
    strategy: Annotated[
        str, typer.Option(help="Synchronization strategy: name or name:key=value,key=value.")
    ] = "partial"
    compute: Annotated[
        str,
        typer.Option(
            help="Model of compute time: constant, jittered, bursty, drifting or heavy, each also with "
            ":key=value,key=value (jittered:mean_s=0.1,deviation=0.05), or log=FILE for the times of a "
            "run log."
        ),
    ] = "jittered"
    slow: Annotated[
        list[str] | None,
        typer.Option(help="WORKER:FACTOR, as for train; may be given more than once."),
    ] = None
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="die:1@2.5 (worker 1 after 2.5 s), hang:1@2.5+30, late:1@2.5+0.2, cut:1@2.5+3 (from the "
            "coordinator), cut:1-2@2.5+3 (from worker 2), cut:1-s@2.5+3 (from all servers), "
            "cut:1>2@2.5+3 (messages from 1 to 2 are lost; c is the coordinator), split:1,2@2.5+3 (these "
            "workers from all other nodes), reset:1-2@2.5 (their connection breaks; reset:1@2.5 for the "
            "one to the coordinator), join:9@2.5, leave:1@2.5, restart@2.5+0.5 (the coordinator); may be "
            "given more than once."
        ),
    ] = None
    size_mb: Annotated[float, typer.Option(help="Size of a worker's gradients, in MB.")] = 4.0
    latency_ms: Annotated[float, typer.Option(help="Latency of every message, in ms.")] = 0.1
    rate_mbit: Annotated[float, typer.Option(help="Bandwidth of a worker's link, in Mbit/s.")] = 1000.0
    seed: Annotated[int, typer.Option(help="Random seed; that of the first run with --seeds.")] = 0
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Instead, run this many random clusters with random faults, one per seed: with partial, "
            "bsp, a strategy on parameter servers, or servers alone (ps, which needs this option)."
        ),
    ] = None
    json: Json = None

    def setting(self) -> SimulationSetting:
        """Return the simulated cluster of one run.

        Raises:
            ValueError: an option is out of range, or is malformed.
        """
        from offbeat.policies.stragglers import injection
        from offbeat.simulator.core import faults
        from offbeat.simulator.core.network import NetworkCosts
        from offbeat.simulator.training.setting import SimulationSetting

        return SimulationSetting(
            world=self.workers,
            steps=self.steps,
            steps_per_epoch=self.steps_per_epoch,
            times=_times(self.compute),
            slow=tuple(injection.parse_slow_rule(rule) for rule in self.slow or ()),
            faults=tuple(faults.parse_fault(text) for text in self.fault or ()),
            network=NetworkCosts(latency_s=self.latency_ms / 1000, bytes_per_s=self.rate_mbit * 1e6 / 8),
            size_bytes=int(self.size_mb * 1e6),
            seed=self.seed,
        )


@expand_options
def simulate(options: SimulateOptions) -> None:
    """Run a strategy's policies under a virtual clock, with slow, dying and partitioned workers.

    The policies are the ones that the coordinator uses in a real run. A violated invariant ends the run
    with exit code 1, and the message names the command that repeats it.
    """
    from offbeat.cli.result import Result, check_writable

    if not 0 <= options.seed <= _SEED_MAX:
        raise ValueError(f"the seed must be from 0 to {_SEED_MAX}, got {options.seed}")
    check_writable(options.json)
    figures, rows = _simulate(options)
    result = Result(
        name="simulate",
        command=entry.command_line("offbeat"),
        kind="simulated",
        seed=options.seed,
        figures=figures,
        rows=rows,
    )
    result.print()
    result.write(options.json)


def _simulate(options: SimulateOptions) -> Findings:
    strategy, workers, seeds = options.strategy, options.workers, options.seeds
    is_ps = options.what is SimulationKind.PS
    use = _server_use(strategy)
    if seeds is not None:
        if seeds < 1:
            raise ValueError(f"expected at least 1 run, got --seeds {seeds}")
        if use is not None:
            train: Callable[[int], dict[str, int]] = partial(_run_seed_on_servers, strategy, *use)
        elif _averaging(strategy) is not None:
            train = _run_seed_of_models
        else:
            train = partial(_run_seed, is_lockstep=_is_lockstep(_policies(strategy, workers)()))
        return _campaign(_run_ps_trial if is_ps else train, options.seed, seeds), []
    if is_ps:
        raise ValueError("expected --seeds N: how many trials of the parameter server to run")
    setting = options.setting()
    if (averaging := _averaging(strategy)) is not None:
        return _run_averaging(setting, _policies(strategy, workers), averaging, strategy)
    if use is None:
        return _run_training(setting, _policies(strategy, workers), strategy)
    return _run_on_servers(setting, _policies(strategy, workers), strategy, *use)


def read_logs(path: Path) -> dict[Path, RunRecord]:
    """Return the parts of a run's log, by their files: those in the folder of a run, or one file.

    Raises:
        OffbeatError: a file cannot be read, or is no run log.
    """
    from offbeat.wire import log_file

    with entry.file_errors("read"):
        return log_file.read_logs(path / "log.jsonl") if path.is_dir() else {path: log_file.read_log(path)}


def _policies(strategy: str, world: int) -> Callable[[], list[Policy]]:
    """Return a function that builds the coordinator's policies under a strategy."""
    from offbeat.runtime.control.environment import Environment
    from offbeat.strategies import parse_strategy
    from offbeat.wire.replay import build_policy

    specs = parse_strategy(strategy).policies(world, Environment.start_s, Environment.servers)
    return lambda: [build_policy(spec.path, dict(spec.arguments)) for spec in specs]


def _server_use(strategy: str) -> tuple[PsOptions, dict[str, Any]] | None:
    """How a strategy uses a parameter server, and the arguments of its `BoundedStaleness`; else None."""
    from offbeat.strategies import parse_strategy
    from offbeat.strategies.staleness import ServerStrategy

    parsed = parse_strategy(strategy)
    return (parsed.ps_options(), parsed.staleness_arguments()) if isinstance(parsed, ServerStrategy) else None


def _averaging(strategy: str) -> AveragesModels | None:
    """Return the strategy if its workers own their models."""
    from offbeat.strategies import parse_strategy
    from offbeat.strategies.model_averaging import AveragesModels

    parsed = parse_strategy(strategy)
    return parsed if isinstance(parsed, AveragesModels) else None


def _times(compute: str) -> ComputeTimes:
    from offbeat.simulator.core import times

    if not compute.startswith("log="):
        return times.parse_times(compute)
    logs = read_logs(Path(compute.removeprefix("log=")))
    return times.recorded_times([entry for log in logs.values() for entry in log.entries])


def _run_training(
    setting: SimulationSetting, build: Callable[[], Sequence[Policy]], strategy: str
) -> Findings:
    from offbeat.simulator.training.cluster import SimulatedCluster

    cluster = SimulatedCluster(setting, build)
    begin_s = time.process_time()
    _run_with_progress(cluster, strategy, setting.steps)
    figures = {
        "simulated_s": cluster.progress_s,
        "steps": float(max(simulated.membership.step for simulated in cluster.workers.values())),
        "groups_count": float(len(cluster.groups)),
        "cpu_s": time.process_time() - begin_s,
    }
    rows = [
        {
            "time_s": at_s,
            "generation": group.generation,
            "step": group.step,
            "members": len(group.members),
            "joining": len(group.joining),
            "reason": group.reason[:200],
        }
        for at_s, group in cluster.groups
    ]
    if cluster.stopped is not None:
        rows.append({"time_s": cluster.engine.now_s, "reason": f"stopped: {cluster.stopped.reason[:200]}"})
    return figures, rows


def _run_averaging(
    setting: SimulationSetting, build: Callable[[], Sequence[Policy]], strategy: AveragesModels, what: str
) -> Findings:
    """Simulate workers that own their models; samples are assigned as they are needed."""
    from offbeat.simulator.model_averaging.cluster import SimulatedModelCluster

    steps = setting.steps
    cluster = SimulatedModelCluster(_with_assigned_samples(setting), build, **strategy.worker_arguments())
    begin_s = time.process_time()
    _run_with_progress(cluster, what, steps)
    taken = {worker: simulated.steps_taken for worker, simulated in sorted(cluster.workers.items())}
    figures = {
        "simulated_s": cluster.progress_s,
        "steps_count": float(sum(taken.values())),
        "averagings_count": float(len(cluster.averagings)),
        "mean_group_workers": sum(map(len, cluster.averagings)) / len(cluster.averagings),
        "cpu_s": time.process_time() - begin_s,
    }
    rows: list[dict[str, Any]] = [{"worker": worker, "steps": count} for worker, count in taken.items()]
    if cluster.stopped is not None:
        rows.append({"reason": f"stopped: {cluster.stopped.reason[:200]}"})
    return figures, rows


def _run_on_servers(
    setting: SimulationSetting,
    build: Callable[[], Sequence[Policy]],
    strategy: str,
    terms: PsOptions,
    arguments: dict[str, Any],
) -> Findings:
    """Simulate workers on servers without faults of the servers, which `offbeat simulate ps` simulates."""
    from offbeat.policies.ps.manager import PsManager
    from offbeat.simulator.staleness.cluster import SimulatedPsCluster, ps_setting

    steps = setting.steps
    if terms.assigns_samples:
        setting = _with_assigned_samples(setting)

    def worker_policies() -> list[Policy]:
        return [policy for policy in build() if not isinstance(policy, PsManager)]

    cluster = SimulatedPsCluster(setting, worker_policies, ps_setting(terms, arguments))
    begin_s = time.process_time()
    _run_with_progress(cluster, strategy, steps)
    rows = [_worker_row(cluster, worker) for worker in sorted(cluster.threads)]
    reads = sum(row["pulls"] + row["cached"] for row in rows)
    figures = {
        "simulated_s": cluster.progress_s,
        "steps_count": float(sum(row["steps"] for row in rows)),
        "wait_share": sum(row["wait_s"] for row in rows) / (len(rows) * cluster.progress_s),
        "pulls_count": float(sum(row["pulls"] for row in rows)),
        "cached_share": sum(row["cached"] for row in rows) / reads,
        "versions_count": float(cluster.servers.version),
        "cpu_s": time.process_time() - begin_s,
    }
    return figures, rows


def _with_assigned_samples(setting: SimulationSetting) -> SimulationSetting:
    """Return a setting with the same work, assigned to workers as they request it: a sample is a batch."""
    from offbeat.simulator.training.sample_loop import SampleSetting

    steps = setting.steps or 1
    epochs = max(1, round(steps / setting.steps_per_epoch))
    samples = SampleSetting(epoch_samples=setting.world * steps // epochs, batch_size=1, epochs=epochs)
    return replace(setting, steps=None, samples=samples)


def _worker_row(cluster: SimulatedPsCluster, worker: int) -> dict[str, Any]:
    """Return how a worker spent its time, and the staleness and the sources of what it read."""
    thread = cluster.threads[worker]
    staleness = thread.reads_by_staleness
    total = sum(age * count for age, count in staleness.items())
    return {
        "worker": worker,
        "steps": thread.steps_finished,
        "compute_s": thread.spent_s["computing"],
        "wait_s": thread.spent_s["waiting"],
        "pull_s": thread.spent_s["pulling"],
        "push_s": thread.spent_s["pushing"],
        "pulls": thread.pulls,
        "cached": thread.reads_by_source["thread"] + thread.reads_by_source["process"],
        "staleness_mean": total / staleness.total() if staleness else None,
        "staleness_max": max(staleness, default=None),
    }


def _run_with_progress(cluster: SimulatedCluster, what: str, steps: int | None) -> None:
    """Run a cluster to its end, and show its progress."""
    with output.make_progress() as progress:
        task = progress.add_task(f"{what}, {cluster.setting.world} workers", total=steps)

        def show(_: Any = None) -> None:
            progress.update(task, completed=cluster.step)
            now_s = cluster.engine.now_s
            cluster.engine.schedule(now_s + max(1.0, now_s / 20), show)

        cluster.engine.schedule(1.0, show)
        _run(cluster)


def _run(cluster: SimulatedCluster) -> None:
    from offbeat.simulator.training.cluster import ViolationError

    try:
        cluster.run()
    except ViolationError as error:
        _fail(f"{error}; again: {entry.command_line('offbeat')}")


def _is_lockstep(policies: Sequence[Policy]) -> bool:
    from offbeat.policies.membership.lockstep import Lockstep

    return any(isinstance(policy, Lockstep) for policy in policies)


def _run_seed(seed: int, *, is_lockstep: bool) -> dict[str, int]:
    from offbeat.simulator.training import campaign

    cluster = campaign.run_lockstep(seed) if is_lockstep else campaign.run_case(seed)
    steps = max(worker.membership.step for worker in cluster.workers.values())
    return {"faults_count": len(cluster.setting.faults), "steps": steps}


def _run_seed_of_models(seed: int) -> dict[str, int]:
    from offbeat.simulator.model_averaging import campaign

    cluster = campaign.run_case(seed)
    return {"faults_count": len(cluster.setting.faults), "steps": cluster.step}


def _run_seed_on_servers(
    strategy: str, terms: PsOptions, arguments: dict[str, Any], seed: int
) -> dict[str, int]:
    from offbeat.simulator.staleness import campaign as staleness

    this = staleness.draw_case(seed, terms, arguments)
    again = shlex.join(["offbeat", "simulate", "--strategy", strategy, "--seeds", "1", "--seed", str(seed)])
    cluster = staleness.run_case(this, again)
    steps = sum(thread.steps_finished for thread in cluster.threads.values())
    return {"faults_count": len(this.setting.faults), "steps": steps}


def _run_ps_trial(seed: int) -> dict[str, int]:
    from offbeat.simulator.ps.cluster import PsSimulation
    from offbeat.simulator.ps.trial import draw_trial

    serving = PsSimulation(draw_trial(seed))
    serving.run()
    return {
        "faults_count": serving.trial.faults,
        "requests_count": serving.requests,
        "views_count": len(serving.published_views),
    }


def _campaign(run: Callable[[int], dict[str, int]], seed: int, count: int) -> dict[str, float]:
    from offbeat.simulator.training.cluster import ViolationError

    begin_s = time.process_time()
    totals: Counter[str] = Counter()
    with output.make_progress() as progress:
        task = progress.add_task(f"{count} runs from seed {seed}", total=count)
        for run_seed in range(seed, seed + count):
            try:
                totals.update(run(run_seed))
            except ViolationError as error:
                _fail(str(error))
            progress.advance(task)
    return {
        "runs_count": float(count),
        **{name: float(sum_) for name, sum_ in totals.items()},
        "violations_count": 0.0,
        "cpu_s": time.process_time() - begin_s,
    }


def _fail(text: str) -> None:
    print(f"offbeat: {text}", file=sys.stderr)
    raise typer.Exit(1)
