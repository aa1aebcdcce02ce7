"""`offbeat simulate`: a strategy, or a parameter server, on a simulated cluster; fault campaigns.

It reads arguments, runs the simulator and prints; the command line maps a strategy to its policies.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.cli import output
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.policies import Policy
    from offbeat.policies.staleness.caches import PsOptions
    from offbeat.simulator.core.times import ComputeTimes
    from offbeat.simulator.staleness.cluster import SimulatedPsCluster
    from offbeat.simulator.training.cluster import SimulatedCluster, SimulationSetting

PolicyFactory = Callable[[str, int], Callable[[], Sequence["Policy"]]]
PsLookup = Callable[[str], "tuple[PsOptions, dict[str, Any]] | None"]

_SEED_MAX = 2**63 - 1


class SimulationKind(StrEnum):
    """The system to simulate."""

    TRAINING = "training"
    PS = "ps"


def register(app: typer.Typer, build: PolicyFactory, ps_use: PsLookup) -> None:
    """Add the command `simulate`.

    Args:
        app: the application to which it is added.
        build: returns, for a strategy as text and a world, a builder of the coordinator's policies.
        ps_use: returns, for a strategy as text, how it uses a parameter server and the arguments of its
            `BoundedStaleness`; None for a strategy without one.
    """

    @app.command()
    def simulate(
        what: Annotated[
            SimulationKind,
            typer.Argument(help="Workers in training, or ps: clients and servers of a parameter server."),
        ] = SimulationKind.TRAINING,
        workers: Annotated[int, typer.Option(help="Number of workers at the start.")] = 4,
        steps: Annotated[int, typer.Option(help="Optimizer steps of each worker.")] = 1000,
        steps_per_epoch: Annotated[int, typer.Option(help="Steps in an epoch.")] = 100,
        strategy: Annotated[
            str, typer.Option(help="Synchronization strategy: name or name:key=value,key=value.")
        ] = "partial",
        compute: Annotated[
            str,
            typer.Option(
                help="Model of compute time: constant, jittered, bursty, drifting or heavy, each also with "
                ":key=value,key=value (jittered:mean_s=0.1,deviation=0.05), or log=FILE for the times of a "
                "run log."
            ),
        ] = "jittered",
        slow: Annotated[
            list[str] | None,
            typer.Option(help="WORKER:FACTOR, as for train; may be given more than once."),
        ] = None,
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
        ] = None,
        size_mb: Annotated[float, typer.Option(help="Size of a worker's gradients, in MB.")] = 4.0,
        latency_ms: Annotated[float, typer.Option(help="Latency of every message, in ms.")] = 0.1,
        rate_mbit: Annotated[float, typer.Option(help="Bandwidth of a worker's link, in Mbit/s.")] = 1000.0,
        seed: Annotated[int, typer.Option(help="Random seed; that of the first run with --seeds.")] = 0,
        seeds: Annotated[
            int | None,
            typer.Option(
                help="Instead, run this many random clusters with random faults, one per seed: with partial, "
                "bsp, a strategy on parameter servers, or servers alone (ps, which needs this option)."
            ),
        ] = None,
        json: Annotated[
            Path | None, typer.Option("--json", metavar="FILE", help="Write the result here as JSON.")
        ] = None,
    ) -> None:
        """Run a strategy's policies under a virtual clock, with slow, dying and partitioned workers.

        The policies are the ones that the coordinator uses in a real run. A violated invariant ends the run
        with exit code 1, and the message names the command that repeats it.
        """
        from offbeat.cli.result import check_writable

        if not 0 <= seed <= _SEED_MAX:
            raise ValueError(f"the seed must be from 0 to {_SEED_MAX}, got {seed}")
        if json is not None:
            check_writable(json)
        rows: list[dict[str, Any]] = []
        if seeds is not None:
            if seeds < 1:
                raise ValueError(f"expected at least 1 run, got --seeds {seeds}")
            use = ps_use(strategy)
            if use is not None:
                train = partial(_run_seed_on_servers, strategy, *use)
            else:
                train = partial(_run_seed, is_lockstep=_is_lockstep(build(strategy, workers)()))
            figures = _campaign(_run_ps_trial if what is SimulationKind.PS else train, seed, seeds)
        elif what is SimulationKind.PS:
            raise ValueError("expected --seeds N: how many trials of the parameter server to run")
        else:
            setting = _setting(
                workers, steps, steps_per_epoch, compute, slow or [], fault or [],
                size_mb, latency_ms, rate_mbit, seed,
            )  # fmt: skip
            use = ps_use(strategy)
            if use is None:
                figures, rows = _run_training(setting, build(strategy, workers), strategy)
            else:
                figures, rows = _run_on_servers(setting, build(strategy, workers), strategy, *use)
        _report(figures, rows, seed, json)


def _setting(
    workers: int,
    steps: int,
    steps_per_epoch: int,
    compute: str,
    slow: Sequence[str],
    fault: Sequence[str],
    size_mb: float,
    latency_ms: float,
    rate_mbit: float,
    seed: int,
) -> SimulationSetting:
    from offbeat.policies.stragglers import injection
    from offbeat.simulator.core import faults
    from offbeat.simulator.core.network import NetworkCosts
    from offbeat.simulator.training.cluster import SimulationSetting

    return SimulationSetting(
        world=workers,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        times=_times(compute),
        slow=tuple(injection.parse_slow_rule(rule) for rule in slow),
        faults=tuple(faults.parse_fault(text) for text in fault),
        network=NetworkCosts(latency_s=latency_ms / 1000, bytes_per_s=rate_mbit * 1e6 / 8),
        size_bytes=int(size_mb * 1e6),
        seed=seed,
    )


def _times(compute: str) -> ComputeTimes:
    from offbeat.simulator.core import times
    from offbeat.wire import record

    if not compute.startswith("log="):
        return times.parse_times(compute)
    path = Path(compute.removeprefix("log="))
    try:
        logs = record.read_logs(path / "log.jsonl") if path.is_dir() else {path: record.read_log(path)}
        return times.recorded_times([entry for log in logs.values() for entry in log.entries])
    except OSError as error:
        raise OffbeatError(f"cannot read {path}: {error.strerror or error}") from error


def _run_training(
    setting: SimulationSetting, build: Callable[[], Sequence[Policy]], strategy: str
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    from offbeat.simulator.training.cluster import SimulatedCluster

    cluster = SimulatedCluster(setting, build)
    begin_s = time.process_time()
    _run_with_progress(cluster, strategy, setting.steps)
    figures = {
        "simulated_s": cluster.progress_s,
        "steps": float(max(simulated.follower.step for simulated in cluster.workers.values())),
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


def _run_on_servers(
    setting: SimulationSetting,
    build: Callable[[], Sequence[Policy]],
    strategy: str,
    terms: PsOptions,
    arguments: dict[str, Any],
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Simulate workers on servers without faults of the servers, which `offbeat simulate ps` simulates."""
    from offbeat.policies.ps.manager import PsManager
    from offbeat.simulator.staleness.cluster import SimulatedPsCluster, ps_setting

    steps = setting.steps
    if terms.assigns_samples:
        setting = _with_dealt_samples(setting)

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


def _with_dealt_samples(setting: SimulationSetting) -> SimulationSetting:
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
        _fail(f"{error}; again: {shlex.join(['offbeat', *sys.argv[1:]])}")


def _is_lockstep(policies: Sequence[Policy]) -> bool:
    from offbeat.policies.membership.lockstep import Lockstep

    return any(isinstance(policy, Lockstep) for policy in policies)


def _run_seed(seed: int, *, is_lockstep: bool) -> dict[str, int]:
    from offbeat.simulator.training import campaign

    cluster = campaign.run_lockstep(seed) if is_lockstep else campaign.run_case(seed)
    steps = max(worker.follower.step for worker in cluster.workers.values())
    return {"faults_count": len(cluster.setting.faults), "steps": steps}


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
    from offbeat.simulator.ps.cluster import PsSimulation, draw_trial

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


def _report(figures: dict[str, float], rows: list[dict[str, Any]], seed: int, json: Path | None) -> None:
    from offbeat.cli.result import Result

    command = shlex.join(["offbeat", *sys.argv[1:]])
    result = Result(name="simulate", command=command, kind="simulated", seed=seed, figures=figures, rows=rows)
    result.print()
    if json is not None:
        result.write(json)
