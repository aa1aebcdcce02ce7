"""Fault campaigns: random clusters with random faults, one per seed, and the invariants of each run.

A seed that fails gives a one-line error with the command that repeats it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offbeat.policies import Policy
from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.membership.lockstep import Lockstep
from offbeat.policies.membership.partial_groups import PartialGroups
from offbeat.policies.stragglers.injection import Burst, EpochPart, SlowRule
from offbeat.simulator.core.faults import (
    LOST_MESSAGES,
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
    DriftingTimes,
    HeavyTailedTimes,
    JitteredTimes,
)
from offbeat.simulator.training.cluster import SimulatedCluster, ViolationError
from offbeat.simulator.training.replicas import HistoryProblem, LeastSquaresProblem, TrainingProblem
from offbeat.simulator.training.sample_loop import SampleSetting
from offbeat.simulator.training.setting import SimulationSetting
from offbeat.simulator.training.worker import COMPUTING, SimulatedWorker

_QUIET_S = 9.0  # longer than any wait of the policies below
_STUCK_S = 8.0
_PAIRS_STUCK_S = 4.0  # where the only faults are between pairs of workers
_CHANGE_S = 2.0
_TRAINED_S = 0.4  # after the Ready of a worker, it still trains
_BATCHES_S = 0.05
_KINDS = ["die", "hang", "hang", "late", "cut", "split", "pair", "pair", "reset", "join", "leave", "restart"]


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    """The cluster of one seed.

    Attributes:
        setting: the cluster and its faults.
        arguments: of `PartialGroups`, or of `Lockstep`.
        has_gradients: whether it trains a small problem.
        is_lockstep: whether the policy is `Lockstep`.
    """

    setting: SimulationSetting
    arguments: dict[str, Any]
    has_gradients: bool
    is_lockstep: bool = False

    def build_policies(self) -> list[Policy]:
        """Return new policies."""
        if self.is_lockstep:
            return [Assembly(self.setting.world), Lockstep(self.setting.world, **self.arguments)]
        return [
            Assembly(self.setting.world, accepts_late_joiners=True),
            PartialGroups(self.setting.world, **self.arguments),
        ]

    def __str__(self) -> str:
        faults = " ".join(format_fault(fault) for fault in self.setting.faults) or "no faults"
        samples = "" if self.setting.samples is None else f", {self.setting.samples}"
        return f"{self.setting.world} workers, {faults}{samples}"


def draw_case(seed: int) -> FaultCase:
    """Draw a cluster; deterministic for a seed."""
    chance = random.Random(f"campaign {seed}")
    world = chance.randint(2, 12)
    lost_after_s = chance.choice([3.0, 5.0])
    has_pairs_only = chance.random() < 0.2
    drawn = _pair_faults(chance, world) if has_pairs_only else _faults(chance, world, lost_after_s)
    faults = sorted(drawn, key=lambda fault: fault.at_s)
    ends_s = max((fault.at_s + getattr(fault, "duration_s", 0.0) for fault in faults), default=0.0)
    has_end = chance.random() < 0.4
    samples = _samples(random.Random(f"samples {seed}"), world, has_end=has_end)
    steps_per_epoch = chance.randint(8, 60)
    setting = SimulationSetting(
        world=world,
        steps=chance.randint(20, 120) if has_end else None,
        until_s=ends_s + _QUIET_S + (60.0 if has_end else 0.0),
        steps_per_epoch=steps_per_epoch,
        rounds_per_step=chance.choice([1, 1, 1, 2]),
        times=_times(chance),
        slow=tuple(_slow(chance, world)),
        network=NetworkCosts(
            latency_s=chance.choice([1e-4, 1e-3, 5e-3]), bytes_per_s=chance.choice([1e9, 1e8]), spread=0.5
        ),
        size_bytes=chance.choice([10_000, 1_000_000]),
        apply_s=chance.choice([0.0, 0.002]),
        faults=tuple(faults),
        tick_s=chance.choice([0.1, 0.5]),
        detect_s=chance.choice([0.001, 0.01, 0.1]),
        lost_after_s=lost_after_s,
        stuck_after_s=_PAIRS_STUCK_S if has_pairs_only else _STUCK_S + _undecided_s(faults, lost_after_s),
        seed=seed,
    )
    if samples is not None:
        setting = replace(setting, samples=samples, steps=None, rounds_per_step=1)
    options = random.Random(f"options {seed}")
    arguments: dict[str, Any] = {
        "detector": {
            "n_profile": chance.choice([2, 5]),
            "limit": chance.choice([3, 10]),
            "threshold_s": options.choice([None, None, 2 * _BATCHES_S]),
        },
        "monitor": chance.choice(["continuous", "continuous", "epoch_window"]),
        "halt_timeout_s": 0.5,
        "patience_min_s": 0.5,
        "join_timeout_s": 2.0,
        "timeout_s": 2.0,
        "staleness_steps_max": options.choice([None, None, 1, 4]),
    }
    setting = replace(setting, counts_group_steps=setting.steps is not None and options.random() < 0.5)
    counts_rounds = setting.samples is not None and setting.samples.rounds is not None
    if options.random() < 0.25 and not counts_rounds:  # such a loop ends a step later in a late worker
        arguments["quorum"] = {
            "size": options.choice(["n-1", "n-2", "n-3", 1, 2]),
            "grace_s": options.choice([None, None, 0.0, 0.02]),
            "staleness_steps_max": options.choice([2, 3, 8]),
        }
    return FaultCase(setting=setting, arguments=arguments, has_gradients=chance.random() < 0.25)


def draw_lockstep_case(seed: int) -> FaultCase:
    """Draw a cluster in lockstep; deterministic for a seed."""
    chance = random.Random(f"lockstep {seed}")
    world = chance.randint(2, 8)
    lost_after_s, unreachable_timeout_s = chance.choice([3.0, 5.0]), chance.choice([3.0, 10.0])
    kinds = ["hang", "cut", "split", "pair", "reset", "late", "restart"]
    kinds += ["die"] * (chance.random() < 0.2)
    faults = list(_faults(chance, world, lost_after_s, kinds))
    setting = SimulationSetting(
        world=world,
        steps=chance.randint(10, 100),
        until_s=200.0,
        times=_times(chance),
        slow=tuple(_slow(chance, world)),
        network=NetworkCosts(latency_s=chance.choice([1e-4, 1e-3, 5e-3]), spread=0.5),
        size_bytes=chance.choice([10_000, 1_000_000]),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        tick_s=chance.choice([0.1, 0.5]),
        lost_after_s=lost_after_s,
        stuck_after_s=_STUCK_S + sum(map(_outage_s, faults)),
        seed=seed,
    )
    arguments = {"unreachable_timeout_s": unreachable_timeout_s}
    return FaultCase(
        setting=setting, arguments=arguments, has_gradients=chance.random() < 0.25, is_lockstep=True
    )


def _times(chance: random.Random) -> ComputeTimes:
    kinds: list[Callable[[], ComputeTimes]] = [
        lambda: ConstantTimes(mean_s=_BATCHES_S),
        lambda: JitteredTimes(mean_s=_BATCHES_S, deviation=chance.choice([0.05, 0.3])),
        lambda: BurstyTimes(mean_s=_BATCHES_S, length=10, period=100),
        lambda: DriftingTimes(mean_s=_BATCHES_S),
        lambda: HeavyTailedTimes(mean_s=_BATCHES_S),
    ]
    return chance.choice(kinds)()


def _samples(chance: random.Random, world: int, *, has_end: bool) -> SampleSetting | None:
    if chance.random() < 0.5:
        return None
    batch_size = chance.randint(1, 6)
    return SampleSetting(
        epoch_samples=chance.choice([chance.randint(1, 3 * world), chance.randint(1, 30 * world)])
        * batch_size
        + chance.randrange(batch_size),
        batch_size=batch_size,
        epochs=chance.randint(1, 5) if has_end or chance.random() < 0.5 else None,
        batches_per_round=chance.choice([1, 1, 1, 2, 3]),
        break_after_rounds=chance.choice([None, None, None, None, chance.randint(1, 8)]),
        rounds=chance.randint(5, 60) if has_end and chance.random() < 0.5 else None,
    )


def _slow(chance: random.Random, world: int) -> Iterator[SlowRule]:
    for _ in range(chance.choice([0, 0, 1, 2])):
        when = chance.choice([None, EpochPart(start=0.0, end=0.5), Burst(slow_steps=15, period_steps=40)])
        worker = chance.choice([None, chance.randrange(world)])
        yield SlowRule(worker=worker, factor=chance.choice([1.5, 3.0, 6.0]), applies_in=when)


def _faults(
    chance: random.Random, world: int, lost_after_s: float, kinds: Sequence[str] = _KINDS
) -> Iterator[Fault]:
    alive = set(range(world))
    now_s, newest = 0.05, world
    for _ in range(chance.randint(0, 6)):
        now_s += chance.choice([0.0, 0.01, 0.1, chance.random(), chance.random()])
        worker = chance.choice(sorted(alive))
        length_s = chance.choice([0.05, 0.3, 1.0, 1.4, 4.0]) * (0.8 + 0.4 * chance.random())
        kind = chance.choice(kinds)
        if kind in ("die", "leave") and len(alive) == 1:
            kind = "join"
        match kind:
            case "die":
                dying = chance.sample(sorted(alive), chance.randint(1, min(3, len(alive) - 1)))
                alive -= set(dying)
                yield WorkerDeath(at_s=now_s, workers=tuple(sorted(dying)))
            case "hang":
                if length_s < lost_after_s or len(alive) > 1:
                    alive -= {worker} if length_s >= lost_after_s else set()
                    yield WorkerHang(at_s=now_s, worker=worker, duration_s=length_s)
            case "late":
                yield Delay(at_s=now_s, worker=worker, duration_s=min(length_s, 1.0))
            case "cut":
                if length_s < lost_after_s / 2 or len(alive) > 1:
                    alive -= {worker} if length_s >= lost_after_s / 2 else set()
                    lost = chance.choice(LOST_MESSAGES)
                    yield LinkCut(at_s=now_s, worker=worker, peer=None, duration_s=length_s, lost=lost)
            case "pair" | "reset" if len(alive) > 1:
                yield _pair_fault(chance, now_s, *chance.sample(sorted(alive), 2))
            case "reset":
                yield ConnectionReset(at_s=now_s, worker=worker, peer=None)
            case "split" if len(alive) > 1:
                some = chance.sample(sorted(alive), chance.randint(1, len(alive) - 1))
                alive -= set(some) if length_s >= lost_after_s / 2 else set()
                yield Partition(at_s=now_s, workers=tuple(sorted(some)), duration_s=length_s)
            case "leave":
                alive -= {worker}
                yield WorkerDeparture(at_s=now_s, worker=worker)
            case "restart" if now_s > 0.2:
                yield CoordinatorRestart(at_s=now_s, duration_s=min(length_s, 1.0))
                now_s += 1.1
            case _ if "join" in kinds:
                alive.add(newest)
                yield WorkerArrival(at_s=now_s, worker=newest)
                newest += 1


def _pair_faults(chance: random.Random, world: int) -> Iterator[Fault]:
    """Draw faults between pairs of workers, far enough apart that each has no effect on the next."""
    now_s = 0.5
    for _ in range(chance.randint(1, 3)):
        fault = _pair_fault(chance, now_s, *chance.sample(range(world), 2))
        yield fault
        now_s += getattr(fault, "duration_s", 0.0) + REDIAL_S_MAX + 4.0 + chance.random()


def _pair_fault(chance: random.Random, now_s: float, worker: int, peer: int) -> Fault:
    if chance.random() < 0.3:
        return ConnectionReset(at_s=now_s, worker=worker, peer=peer)
    length_s = chance.choice([0.05, 0.3, 1.0, 1.4, 4.0, 10.0, 20.0]) * (0.8 + 0.4 * chance.random())
    return LinkCut(
        at_s=now_s, worker=worker, peer=peer, duration_s=length_s, lost=chance.choice(LOST_MESSAGES[:2])
    )


def _undecided_s(faults: Iterable[Fault], lost_after_s: float) -> float:
    """Return for how long no decision may be made because most workers are unreachable, in seconds."""
    return sum(
        min(fault.duration_s + REDIAL_S_MAX, lost_after_s)
        for fault in faults
        if isinstance(fault, Partition | WorkerHang) or (isinstance(fault, LinkCut) and fault.peer is None)
    )


def _outage_s(fault: Fault) -> float:
    """Return for how long a fault may separate nodes, in seconds."""
    if isinstance(fault, WorkerHang | LinkCut | Partition):
        return fault.duration_s + min(fault.duration_s, REDIAL_S_MAX)
    return fault.duration_s if isinstance(fault, Delay | CoordinatorRestart) else 0.0


def run_lockstep(seed: int) -> SimulatedCluster:
    """Run the lockstep case of a seed: see `run_case`."""
    return _run(
        draw_lockstep_case(seed), check_lockstep, f"offbeat simulate --strategy bsp --seeds 1 --seed {seed}"
    )


def run_case(
    seed: int, build: Callable[[FaultCase], list[Policy]] = FaultCase.build_policies
) -> SimulatedCluster:
    """Run the case of a seed.

    Raises:
        ViolationError: an invariant was violated; the text ends with the command that repeats the run.
    """
    return _run(draw_case(seed), check_run, f"offbeat simulate --seeds 1 --seed {seed}", build)


def _run(
    this: FaultCase,
    check_end: Callable[[FaultCase, SimulatedCluster], None],
    command: str,
    build: Callable[[FaultCase], list[Policy]] = FaultCase.build_policies,
) -> SimulatedCluster:
    problem: TrainingProblem = (
        LeastSquaresProblem(this.setting.seed) if this.has_gradients else HistoryProblem()
    )
    cluster = SimulatedCluster(this.setting, lambda: build(this), problem=problem)
    try:
        cluster.run()
        check_end(this, cluster)
    except ViolationError as error:
        raise ViolationError(f"{error} ({this}); again: {command}") from None
    return cluster


def check_lockstep(case: FaultCase, cluster: SimulatedCluster) -> None:
    """Check that all workers took all steps together, or that the job did not stop for a transient outage."""
    setting, stopped = case.setting, cluster.stopped
    if stopped is not None:
        outages_s = sum(map(_outage_s, setting.faults))
        dead = {
            worker for fault in setting.faults if isinstance(fault, WorkerDeath) for worker in fault.workers
        }
        if stopped.worker is None and outages_s < case.arguments["unreachable_timeout_s"]:
            cluster.fail_invariant(f"a transient outage stopped the job: {stopped.reason}")
        if stopped.worker is not None and stopped.worker not in dead and outages_s < setting.lost_after_s:
            cluster.fail_invariant(f"a pause was taken for a death: {stopped.reason}")
        return
    for simulated in cluster.workers.values():
        if not simulated.has_left or simulated.membership.step != setting.steps:
            cluster.fail_invariant(
                f"worker {simulated.worker} is {simulated.activity} after {simulated.membership.step} steps"
            )
        if not cluster.problem.states_equal(simulated.state, cluster.workers[0].state):
            cluster.fail_invariant(f"workers 0 and {simulated.worker} ended with different states")


def _waits_for_computing_member(cluster: SimulatedCluster, worker: SimulatedWorker) -> bool:
    """Whether the worker's exchange has a member that still computes."""
    if worker.exchange is None:
        return False
    workers = cluster.workers
    return any(workers[member].activity == COMPUTING for member in worker.exchange.members)


def _check_none_was_left_behind(cluster: SimulatedCluster, members: tuple[int, ...]) -> None:
    """Check that every reachable worker that trained when the job was complete ends with its state."""
    if cluster.complete_s is None:
        return
    excused = set(members)
    for policy in cluster.coordinator.policies:
        excused.update(policy.state_dict().get("workers", {}).get("unreachable", ()))
    for simulated in cluster.workers.values():
        worker = simulated.worker
        has_trained = cluster.complete_s - cluster.ready_s.get(worker, -math.inf) < _TRAINED_S
        if has_trained and simulated.has_left and not (simulated.is_leaving or worker in excused):
            cluster.fail_invariant(f"worker {worker} trained outside {members} when the job was complete")


def check_run(case: FaultCase, cluster: SimulatedCluster) -> None:
    """Check the invariants that hold at the end of a run."""
    now_s = cluster.engine.now_s
    members = cluster.groups[-1][1].members if cluster.groups else ()
    left = [cluster.workers[member] for member in members if cluster.workers[member].has_left]
    left = [simulated for simulated in left if not simulated.is_leaving]
    alive = [simulated for simulated in cluster.workers.values() if simulated.is_alive]
    stragglers = set()
    for policy in cluster.coordinator.policies:
        monitor = policy.state_dict().get("stragglers", {"classifier": {"workers": []}})
        classifier = monitor["classifier"]
        for worker, count, is_slow, *_ in classifier["workers"]:
            if not 0 <= count <= classifier["limit"]:
                cluster.fail_invariant(f"the counter of worker {worker} is out of range: {count}")
            if is_slow:
                stragglers.add(worker)
    if cluster.stopped is not None:
        return  # the cluster has checked that no worker has the state any more
    for simulated in left:
        if not cluster.problem.states_equal(simulated.state, left[0].state):
            cluster.fail_invariant(
                f"workers {left[0].worker} and {simulated.worker} ended with different states"
            )
    _check_none_was_left_behind(cluster, members)
    samples = case.setting.samples
    if case.setting.steps is not None or (samples is not None and samples.epochs is not None):
        if alive and now_s - cluster.progress_s > _STUCK_S / 2:
            doing = ", ".join(f"{simulated.worker} {simulated.activity}" for simulated in alive)
            cluster.fail_invariant(f"the job does not end: {doing}")
        return
    is_changing = now_s - cluster.membership_changed_s < _CHANGE_S
    for simulated in alive:
        if (
            now_s - simulated.active_s > _STUCK_S / 2
            and simulated.activity != COMPUTING
            and not _waits_for_computing_member(cluster, simulated)
        ):
            cluster.fail_invariant(
                f"worker {simulated.worker} has been {simulated.activity} since {simulated.active_s:.3f} s"
            )
        # Since the last change, which excluded it.
        was_active = simulated.active_s > cluster.membership_changed_s
        if was_active and not (is_changing or simulated.worker in stragglers or simulated.worker in members):
            cluster.fail_invariant(
                f"worker {simulated.worker} lives, is not slow, and is not among {members}"
            )
