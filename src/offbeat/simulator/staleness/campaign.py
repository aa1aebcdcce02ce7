"""Fault campaigns on a parameter server: a random cluster with random faults per seed, under one strategy.

A seed that fails gives a one-line error with the command that repeats it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.policies import Policy
from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.staleness.bounded_staleness import BoundedStaleness
from offbeat.policies.staleness.caches import PsOptions
from offbeat.policies.stragglers.injection import Burst, SlowRule
from offbeat.simulator.core.faults import (
    LOST_MESSAGES,
    SERVERS,
    ConnectionReset,
    CoordinatorRestart,
    Delay,
    Fault,
    LinkCut,
    Partition,
    WorkerArrival,
    WorkerDeath,
    WorkerDeparture,
    WorkerHang,
    format_fault,
)
from offbeat.simulator.core.network import NetworkCosts
from offbeat.simulator.core.network_outages import REDIAL_S_MAX
from offbeat.simulator.core.times import (
    BurstyTimes,
    ComputeTimes,
    ConstantTimes,
    HeavyTailedTimes,
    JitteredTimes,
)
from offbeat.simulator.staleness.cluster import (
    MakeDirectory,
    PsSetting,
    SimulatedPsCluster,
    make_directory,
    ps_setting,
)
from offbeat.simulator.training.cluster import ViolationError
from offbeat.simulator.training.sample_loop import SampleSetting
from offbeat.simulator.training.setting import SimulationSetting

_STUCK_S = 20.0
_UNTIL_S = 1500.0


@dataclass(frozen=True, kw_only=True)
class StalenessFaultCase:
    """The cluster of one seed.

    Attributes:
        setting: the cluster and its faults.
        ps_setting: how the strategy uses the parameter server.
        arguments: of `BoundedStaleness`.
    """

    setting: SimulationSetting
    ps_setting: PsSetting
    arguments: Mapping[str, Any]

    def build_policies(self) -> list[Policy]:
        """Return new policies."""
        world, is_open = self.setting.world, self.arguments["shards"] == "dynamic"
        return [Assembly(world, accepts_late_joiners=is_open), BoundedStaleness(world, **self.arguments)]

    def __str__(self) -> str:
        faults = " ".join(format_fault(fault) for fault in self.setting.faults) or "no faults"
        return f"{self.setting.world} workers, {self.ps_setting.threads} a process, {faults}"


def draw_case(seed: int, options: PsOptions, arguments: Mapping[str, Any]) -> StalenessFaultCase:
    """Draw a cluster; deterministic for a seed.

    Args:
        seed: seed of all random numbers.
        options: the strategy's.
        arguments: of its `BoundedStaleness`, without the world.
    """
    chance = random.Random(f"staleness {seed}")
    threads = chance.choice([1, 1, 2, 3])
    world = threads * chance.randint(1, 4) if threads > 1 else chance.randint(1, 8)
    lost_after_s = chance.choice([3.0, 5.0])
    assigns_samples = arguments["shards"] == "dynamic"
    faults: list[Fault] = []
    if chance.random() < 0.7:
        faults += _faults(chance, world, threads, lost_after_s, is_open=assigns_samples)
    faults += _cuts_from_servers(random.Random(f"apart {seed}"), world, threads, is_alone=not faults)
    batch_size = chance.randint(1, 4)
    samples = SampleSetting(
        epoch_samples=chance.randint(1, 40 * world) * batch_size + chance.randrange(batch_size),
        batch_size=batch_size,
        epochs=chance.randint(1, 3),
        batches_per_round=chance.choice([1, 1, 2]),
    )
    setting = SimulationSetting(
        world=world,
        steps=None if assigns_samples else chance.randint(1, 80),
        samples=samples if assigns_samples else None,
        until_s=_UNTIL_S,
        times=_times(chance),
        slow=tuple(_slow(chance, world)),
        network=NetworkCosts(
            latency_s=chance.choice([1e-4, 1e-3, 2e-2]), bytes_per_s=chance.choice([1e9, 1e8]), spread=1.0
        ),
        size_bytes=chance.choice([10_000, 3_000_000]),
        apply_s=chance.choice([0.0, 0.002]),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        tick_s=chance.choice([0.1, 0.5]),
        detect_s=chance.choice([0.001, 0.1]),
        lost_after_s=lost_after_s,
        stuck_after_s=_STUCK_S,
        seed=seed,
    )
    servers = chance.randint(1, 3)
    halves_after = chance.choice([5.0, 50.0, 1e9])
    return StalenessFaultCase(
        setting=setting,
        ps_setting=ps_setting(
            options, arguments, threads=threads, servers=servers, halves_after=halves_after
        ),
        arguments={**arguments, "timeout_s": chance.choice([1.2, 10.0, 10.0])},
    )


def _times(chance: random.Random) -> ComputeTimes:
    kinds: list[Callable[[], ComputeTimes]] = [
        lambda: ConstantTimes(mean_s=0.05),
        lambda: JitteredTimes(mean_s=0.05, deviation=chance.choice([0.05, 0.5])),
        lambda: BurstyTimes(mean_s=0.05, length=10, period=40),
        lambda: HeavyTailedTimes(mean_s=0.05),
    ]
    return chance.choice(kinds)()


def _slow(chance: random.Random, world: int) -> Iterator[SlowRule]:
    for _ in range(chance.choice([0, 1, 2])):
        when = chance.choice([None, Burst(slow_steps=5, period_steps=20)])
        yield SlowRule(worker=chance.randrange(world), factor=chance.choice([1.5, 6.0]), applies_in=when)


def _faults(
    chance: random.Random, world: int, threads: int, lost_after_s: float, *, is_open: bool
) -> Iterator[Fault]:
    alive, newest, now_s = set(range(world)), world, 0.05
    kinds = ["die", "hang", "hang", "late", "cut", "cut", "split", "reset", "restart"]
    kinds += ["join", "leave"] * is_open
    for _ in range(chance.randint(1, 5)):
        now_s += chance.choice([0.0, 0.01, chance.random(), chance.random()])
        worker = chance.choice(sorted(alive))
        process_workers = {worker}
        if worker < world:
            process_workers = set(range(worker - worker % threads, worker - worker % threads + threads))
        length_s = chance.choice([0.05, 0.3, 1.0, 4.0]) * (0.8 + 0.4 * chance.random())
        is_long = length_s >= lost_after_s / 2  # including the time until the line is used again
        match chance.choice(kinds):
            case "die" if alive - process_workers:
                alive -= process_workers
                yield WorkerDeath(at_s=now_s, workers=(worker,))
            case "hang" if alive - process_workers or not is_long:
                alive -= process_workers if is_long else set()
                yield WorkerHang(at_s=now_s, worker=worker, duration_s=length_s)
            case "late":
                yield Delay(at_s=now_s, worker=worker, duration_s=min(length_s, 1.0))
            case "cut" if alive - process_workers or not is_long:
                alive -= process_workers if is_long else set()
                lost = chance.choice(LOST_MESSAGES)
                yield LinkCut(at_s=now_s, worker=worker, peer=None, duration_s=length_s, lost=lost)
            case "split" if alive - process_workers or not is_long:
                alive -= process_workers if is_long else set()
                yield Partition(at_s=now_s, workers=(worker,), duration_s=length_s)
            case "reset":
                yield ConnectionReset(at_s=now_s, worker=worker, peer=None)
            case "leave" if alive - process_workers:
                alive -= {worker}
                yield WorkerDeparture(at_s=now_s, worker=worker)
            case "join":
                alive.add(newest)
                yield WorkerArrival(at_s=now_s, worker=newest)
                newest += 1
            case "restart" if now_s > 0.2:
                yield CoordinatorRestart(at_s=now_s, duration_s=min(length_s, 1.0))
                now_s += 1.1
            case _:
                pass


def _cuts_from_servers(chance: random.Random, world: int, threads: int, *, is_alone: bool) -> Iterator[Fault]:
    """Yield a cut of a process from the servers, a long one only if it is alone and others can continue."""
    if chance.random() < 0.8:
        return
    worker, at_s = chance.randrange(world), 0.1 + 2.0 * chance.random()
    longest_s = 40.0 if is_alone and world > threads else _STUCK_S - REDIAL_S_MAX - 1.0
    length_s = chance.choice([1.0, longest_s]) * (0.2 + 0.8 * chance.random())
    yield LinkCut(at_s=at_s, worker=worker, peer=SERVERS, duration_s=length_s)


def run_case(
    case: StalenessFaultCase,
    command: str,
    build: Callable[[StalenessFaultCase], list[Policy]] = StalenessFaultCase.build_policies,
    directory_factory: MakeDirectory = make_directory,
) -> SimulatedPsCluster:
    """Run one case.

    Args:
        case: the case.
        command: the command that repeats it.
        build: makes the coordinator's policies.
        directory_factory: makes a process's cache directory.

    Raises:
        ViolationError: an invariant was violated; the text ends with the command that repeats the run.
    """
    cluster = SimulatedPsCluster(
        case.setting, lambda: build(case), case.ps_setting, directory_factory=directory_factory
    )
    try:
        cluster.run()
        alive = [
            f"{thread.worker} {thread.activity}" for thread in cluster.threads.values() if thread.is_alive
        ]
        if alive:
            cluster.fail_invariant(f"the job does not end: {', '.join(alive)}")
    except OffbeatError as error:  # also an event that the policies refuse
        raise ViolationError(f"{error} ({case}); again: {command}") from None
    return cluster
