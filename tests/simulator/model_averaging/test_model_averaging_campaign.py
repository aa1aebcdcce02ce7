"""Simulated jobs that average models, and policies, broken on purpose, that the campaign finds."""

from dataclasses import replace

import pytest

from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.model_averaging.local_steps import LocalSteps
from offbeat.policies.model_averaging.pair_averaging import PairAveraging
from offbeat.policies.model_averaging.partial_reduce import PartialReduce
from offbeat.policies.model_averaging.prague import PragueAveraging
from offbeat.policies.model_averaging.quorum_rounds import QuorumRounds
from offbeat.simulator.core.faults import WorkerArrival, WorkerDeath, WorkerHang
from offbeat.simulator.model_averaging.campaign import draw_case, run_case
from offbeat.simulator.model_averaging.cluster import SimulatedModelCluster
from offbeat.simulator.model_averaging.worker import AveragingWorker
from offbeat.simulator.training.cluster import ViolationError

SEEDS = range(150)


@pytest.mark.long(after=15)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_with_faults_ends_with_one_model_and_each_sample_used_once(seed):
    cluster = run_case(seed)
    assert cluster.averagings
    assert cluster.is_job_complete or cluster.stopped or not cluster.running_workers()


def test_the_seeds_hold_the_faults_that_matter():
    faults = [fault for seed in SEEDS for fault in draw_case(seed).setting.faults]
    for kind in (WorkerDeath, WorkerHang, WorkerArrival):
        assert sum(isinstance(fault, kind) for fault in faults) > 10
    for policy in (PartialReduce, PairAveraging, PragueAveraging, LocalSteps):
        for overlap in (False, True):
            cases = [draw_case(seed) for seed in SEEDS]
            assert sum(one.policy is policy and one.arguments["overlap"] is overlap for one in cases) > 10


def build_with(kind):
    """Policies of a case, of which partial reduce is replaced."""

    def build(case):
        if case.policy is not PartialReduce:
            return case.build_policies()
        world = case.setting.world
        return [Assembly(world, accepts_late_joiners=True), kind(world, **case.arguments)]

    return build


class NeverCancels(PartialReduce):
    def _cancel(self, exchange_id, reason):
        return []


class WaitsForResting(PartialReduce):
    _resting = frozenset()


class ForgetsBusy(PartialReduce):
    def _begin_averaging(self, group, joining, reason, *, is_final=False):
        busy = sorted(self._exchange_of.keys() - set(group))[:1]
        return super()._begin_averaging([*group, *busy], joining, reason, is_final=is_final)


class EndsEarly(PartialReduce):
    def _complete(self):
        self._has_final_model = True
        return super()._complete()


class ForgetsSamples(PartialReduce):
    def _remove(self, worker):
        assigner, self._assigner = self._assigner, None
        try:
            return super()._remove(worker)
        finally:
            self._assigner = assigner


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (NeverCancels, "no worker has finished a step|the job does not end"),
        (WaitsForResting, "no worker has finished a step|the job does not end"),
        (ForgetsBusy, "has members that are in another one"),
        (EndsEarly, "ended with different models"),
        (ForgetsSamples, "no worker has finished a step|the job does not end|samples were used"),
    ],
)
def test_the_campaign_finds_a_broken_policy(broken, found):
    def run_all():
        for seed in SEEDS:
            run_case(seed, build_with(broken))

    with pytest.raises(ViolationError, match=found):
        run_all()


class ReportsTheEndTooSoon(AveragingWorker):
    """Reports the end of an averaging when the mean is there, and adds the difference later."""

    def on_average(self, averaging):
        trains_on = self._trains_on
        super().on_average(averaging)
        if trains_on and self.has_difference:
            self._report_end(has_mean=True)

    def _report_end(self, *, has_mean):
        if self.averaging_protocol.averaging is not None:
            super()._report_end(has_mean=has_mean)


def cluster_of(worker_class):
    class Cluster(SimulatedModelCluster):
        def _make(self, worker, stopwatch, is_new):
            return worker_class(self, worker, stopwatch, is_new=is_new)

    return Cluster


class ForgetsWhoIsBehind(LocalSteps):
    """Takes all members for equally far, so that those that have missed an outer step keep old anchors."""

    def __init__(self, world, **arguments):
        super().__init__(world, **arguments)
        self._groups.outer_step = self.outer_step_of_all

    def outer_step_of_all(self, group):
        step = QuorumRounds.outer_step(self._groups, group)
        return step and replace(step, behind=())


@pytest.mark.long(after=2)
def test_the_campaign_finds_an_outer_step_of_members_with_different_anchors():
    def build(case):
        world = case.setting.world
        return [Assembly(world, accepts_late_joiners=True), ForgetsWhoIsBehind(world, **case.arguments)]

    def run_all():
        for seed in range(400):
            if draw_case(seed).policy is LocalSteps:
                run_case(seed, build)

    with pytest.raises(ViolationError, match="has another anchor than others"):
        run_all()


class AveragesAtOnce(PartialReduce):
    """Takes a worker for ready as soon as it has reported the end of an averaging."""

    def _handle_averaged(self, event):
        super()._handle_averaged(event)
        if event.worker in self._roster.training and event.worker not in self._groups.ready:
            self._groups.add(event.worker, event.now_s)


@pytest.mark.long(after=2)
def test_the_campaign_finds_an_averaging_before_the_last_difference_is_added():
    """With overlap: a snapshot that is averaged twice draws its model to the mean twice."""

    def run_all():
        for seed in SEEDS:
            if draw_case(seed).arguments["overlap"]:
                run_case(seed, build_with(AveragesAtOnce), cluster_of(ReportsTheEndTooSoon))

    with pytest.raises(ViolationError, match="before it has added the last difference"):
        run_all()
