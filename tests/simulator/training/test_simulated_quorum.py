"""Rounds with a quorum, in simulated time: what they save and cost, and errors that are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from offbeat.policies import Policy
from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.membership.lockstep import Lockstep
from offbeat.policies.membership.partial_groups import PartialGroups
from offbeat.policies.stragglers.injection import SlowRule
from offbeat.simulator.core.network import NetworkCosts
from offbeat.simulator.core.times import BurstyTimes, ComputeTimes, ComputeTimeSource, JitteredTimes
from offbeat.simulator.training import campaign
from offbeat.simulator.training.cluster import SimulatedCluster, ViolationError
from offbeat.simulator.training.replicas import LeastSquaresProblem
from offbeat.simulator.training.sample_loop import SampleSetting
from offbeat.simulator.training.setting import SimulationSetting
from offbeat.simulator.training.worker import SimulatedWorker

WORLD, BATCH = 8, 4
EVENLY_FAST = JitteredTimes(deviation=0.05)
ONE_STEP_IN_20_IS_5X = BurstyTimes(deviation=0.05, factor=5.0, length=1, period=20)
SEEDS = range(60)


def simulate(quorum: dict[str, Any] | None, steps: int, **setting: Any) -> SimulatedCluster:
    """A run in which as many samples are used as lockstep uses in so many steps."""
    samples = SampleSetting(epoch_samples=WORLD * steps * BATCH, batch_size=BATCH, epochs=1)
    return finished(SimulationSetting(**{**COMMON, **setting, "samples": samples}), quorum)


def finished(setting: SimulationSetting, quorum: dict[str, Any] | None) -> SimulatedCluster:
    def policies() -> list[Policy]:
        if setting.samples is None:
            return [Assembly(WORLD), Lockstep(WORLD)]
        return [Assembly(WORLD, accepts_late_joiners=True), PartialGroups(WORLD, quorum=quorum)]

    cluster = SimulatedCluster(setting, policies, problem=LeastSquaresProblem(0))
    cluster.run()
    assert cluster.stopped is None
    return cluster


# An exchange takes a twentieth of a step.
COMMON: dict[str, Any] = {
    "world": WORLD,
    "tick_s": 0.1,
    "size_bytes": 205_000,
    "network": NetworkCosts(latency_s=1e-4, bytes_per_s=125e6),
}


def ratio_to_lockstep(quorum: dict[str, Any] | None, steps: int, times: ComputeTimes, **more: Any) -> float:
    lockstep = finished(SimulationSetting(**{**COMMON, **more, "times": times, "steps": steps}), None)
    partial = simulate(quorum, steps, times=times, **more)
    assert partial.complete_s is not None
    return partial.complete_s / lockstep.progress_s


@pytest.mark.parametrize(
    ("quorum", "most"), [(None, 1.01), ({"size": "n-1"}, 0.72), ({"size": "n-2"}, 0.61)], ids=str
)
def test_steps_that_are_slow_now_and_then_cost_less_with_a_quorum(quorum, most):
    ratio = ratio_to_lockstep(quorum, 300, ONE_STEP_IN_20_IS_5X)
    assert most - 0.1 < ratio < most


@pytest.mark.parametrize(("quorum", "most"), [(None, 0.39), ({"size": "n-1"}, 0.28)], ids=str)
def test_a_straggler_costs_less_before_it_is_detected_with_a_quorum(quorum, most):
    slow = (SlowRule(worker=3, factor=5.0),)
    ratio = ratio_to_lockstep(quorum, 80, EVENLY_FAST, slow=slow)
    assert most - 0.1 < ratio < most


@pytest.mark.parametrize("deviation", [0.05, 0.1])
def test_where_nobody_is_slow_a_quorum_costs_nothing(deviation):
    ratio = ratio_to_lockstep({"size": "n-1"}, 300, JitteredTimes(deviation=deviation))
    assert 0.98 < ratio < 1.02


def test_all_replicas_end_alike_though_each_worker_has_skipped_rounds():
    cluster = simulate({"size": "n-2"}, 100, times=ONE_STEP_IN_20_IS_5X)
    workers = cluster.workers.values()
    assert all(worker.gradients_computed < worker.membership.round for worker in workers)
    first = cluster.workers[0].state
    assert all(cluster.problem.states_equal(worker.state, first) for worker in workers)


def run_quorums(kind: type[SimulatedWorker] = SimulatedWorker, seeds: Iterable[int] = SEEDS) -> None:
    """Run the campaign's cases with a quorum of all but three, whose workers are of this kind."""

    class Cluster(SimulatedCluster):
        def _make(self, worker: int, stopwatch: ComputeTimeSource, is_new: bool) -> SimulatedWorker:
            return kind(self, worker, stopwatch, is_new=is_new)

    for seed in seeds:
        drawn = campaign.draw_case(seed)
        quorum = {"size": "n-3", "grace_s": 0.02}
        case = replace(drawn, arguments={**drawn.arguments, "quorum": quorum})
        cluster = Cluster(case.setting, case.build_policies, problem=LeastSquaresProblem(seed))
        cluster.run()
        campaign.check_run(case, cluster)


def test_many_of_the_campaign_s_cases_have_a_quorum():
    cases = [campaign.draw_case(seed) for seed in range(200)]
    assert 25 < sum("quorum" in case.arguments for case in cases) < 75


def test_no_fault_breaks_the_invariants_with_a_quorum():
    run_quorums()


def test_a_worker_that_applies_missed_rounds_out_of_order_is_found():
    """Its state is another one than that of the others."""

    class Disordered(SimulatedWorker):
        def _catch_up(self) -> None:
            self._missed.reverse()
            super()._catch_up()

    with pytest.raises(ViolationError, match="have different states"):
        run_quorums(Disordered)


def test_a_worker_that_contributes_to_a_round_that_it_skips_is_found():
    """Blocks are then in several rounds."""

    class Insistent(SimulatedWorker):
        @property
        def exchanged_weight(self) -> float:
            return self.weight

    with pytest.raises(ViolationError, match=r"[2-9] times"):
        run_quorums(Insistent)


def test_a_worker_that_contributes_to_the_round_whose_skip_was_abandoned_is_found():
    """Others may have finished it, without these blocks."""

    class Hasty(SimulatedWorker):
        def _may_contribute(self, resume: Callable[[], None]) -> bool:
            self.membership._has_abandoned_skip = False
            return super()._may_contribute(resume)

    seeds = range(1190, 1201)
    run_quorums(seeds=seeds)
    with pytest.raises(ViolationError):
        run_quorums(Hasty, seeds)
