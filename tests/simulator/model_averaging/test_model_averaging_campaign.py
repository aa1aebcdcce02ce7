"""Simulated jobs that average models, and policies, broken on purpose, that the campaign finds."""

from dataclasses import replace

import numpy as np
import pytest

from offbeat.events import AverageModels, ModelsAveraged, Ready
from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.model_averaging.local_rounds import LocalRounds
from offbeat.policies.model_averaging.local_steps import LocalSteps
from offbeat.policies.model_averaging.neighbour_gossip import NeighbourGossip
from offbeat.policies.model_averaging.pair_averaging import PairAveraging
from offbeat.policies.model_averaging.partial_reduce import PartialReduce
from offbeat.policies.model_averaging.prague import PragueAveraging
from offbeat.policies.stragglers.injection import parse_slow_rule
from offbeat.simulator.core.faults import WorkerArrival, WorkerDeath, WorkerHang
from offbeat.simulator.core.times import JitteredTimes
from offbeat.simulator.model_averaging.campaign import draw_case, draw_gossip_case, run_case
from offbeat.simulator.model_averaging.cluster import SimulatedModelCluster
from offbeat.simulator.model_averaging.worker import AveragingWorker
from offbeat.simulator.training.cluster import ViolationError
from offbeat.simulator.training.sample_loop import SampleSetting
from offbeat.simulator.training.setting import SimulationSetting

SEEDS = range(160)
GOSSIP_SEEDS = range(60)


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


def test_the_seeds_hold_weights_shares_and_hosts():
    cases = [draw_case(seed) for seed in SEEDS]
    mixed = [one for one in cases if one.policy is PartialReduce and one.arguments["weights"] == "dynamic"]
    assert sum(one.arguments["apply"] == "own_share" for one in mixed) > 5
    divided = [one for one in cases if one.policy is PragueAveraging and one.setting.hosts > 1]
    assert {one.arguments["mode"] for one in divided} == {"smart", "static", "random"}
    assert len(divided) > 10


def test_the_seeds_hold_fixed_delays():
    delays = [draw_case(seed).arguments.get("delay") for seed in SEEDS]
    assert sum(delay is not None for delay in delays) > 5
    assert {1, 15} <= {*delays}


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
    def _begin_averaging(self, group, joining, reason, **options):
        busy = sorted(self._exchange_of.keys() - set(group))[:1]
        if options.get("weights"):
            options["weights"] = (1 / len([*group, *busy]),) * len([*group, *busy])
        return super()._begin_averaging([*group, *busy], joining, reason, **options)


class EndsEarly(PartialReduce):
    def _complete(self):
        self._equal = {*self._roster.present}
        return super()._complete()


class KeepsItsShareAtTheEnd(PartialReduce):
    def _begin_averaging(self, group, joining, reason, **options):
        averaging = super()._begin_averaging(group, joining, reason, **options)
        return replace(averaging, keeps_own_share=True)


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
        (KeepsItsShareAtTheEnd, "leaves its members with different models, and was to make them equal"),
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
        step = LocalRounds.outer_step(self._groups, group)
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


@pytest.mark.long(after=5)
@pytest.mark.parametrize("seed", GOSSIP_SEEDS)
def test_workers_that_gossip_know_each_others_copies_whatever_fails(seed):
    cluster = run_case(seed, draw=draw_gossip_case)
    assert cluster.is_job_complete or cluster.stopped or not cluster.running_workers()


class CountsOnAllCopies(NeighbourGossip):
    """Takes workers that gossip for those of the last round, with all that it has yielded."""

    def _has_copies(self, group):
        return len(group) > 1 and any(worker in self._last_rounds for worker in group)


@pytest.mark.long(after=2)
def test_the_campaign_finds_rounds_that_continue_without_the_copies():
    def build(case):
        world = case.setting.world
        return [Assembly(world, accepts_late_joiners=True), CountsOnAllCopies(world, **case.arguments)]

    def run_all():
        for seed in GOSSIP_SEEDS:
            run_case(seed, build, draw=draw_gossip_case)

    with pytest.raises(ViolationError, match=r"continues different rounds|has other copies"):
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


# Weights and shares ---------------------------------------------------------------------------------------


def own_share_of(averaging, worker, contributions):
    """As the paper's program says it: 1/P of the own model, and the rest of the others by their weights."""
    weights = dict(zip(averaging.members, averaging.weights, strict=True))
    others = sum(weights[one] * model for one, model in contributions.items() if one != worker)
    part = 1 / len(contributions)
    return part * contributions[worker] + (1 - part) * others / (1 - weights[worker])


class ChecksItsModel(AveragingWorker):
    """Compares what it adds to its model with the definition, from the contributions of all members."""

    def _add_difference(self, exchange):
        averaging, before, snapshot = exchange.averaging, self.model.parameters, self.snapshot
        super()._add_difference(exchange)
        if averaging.keeps_own_share and len(averaging.group) > 1:
            contributions = self.cluster.contributions[averaging.exchange_id]
            expected = before + own_share_of(averaging, self.worker, contributions) - snapshot
            np.testing.assert_allclose(self.model.parameters, expected, rtol=1e-10, atol=1e-12)
            self.cluster.checked += len({*averaging.weights}) > 1


class ClusterThatChecks(cluster_of(ChecksItsModel)):
    """Notes what the members of an averaging contribute; `checked` counts models of unequal weights."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.contributions, self.checked = {}, 0

    def enter_averaging(self, worker, averaging):
        if worker.model is not None:
            noted = self.contributions.setdefault(averaging.exchange_id, {})
            noted[worker.worker] = worker.contribution
        super().enter_averaging(worker, averaging)


@pytest.mark.parametrize("overlap", [False, True])
def test_members_that_keep_their_own_share_end_with_the_models_of_the_definition(overlap):
    samples = SampleSetting(epoch_samples=600, batch_size=2, epochs=1, batches_per_round=1)
    slow = (parse_slow_rule("1:3"),)
    setting = SimulationSetting(world=5, samples=samples, slow=slow, times=JitteredTimes())
    arguments = {"size": 3, "weights": "dynamic", "apply": "own_share", "overlap": overlap}
    arguments["global_every"] = None
    policies = [Assembly(5), PartialReduce(5, **arguments)]
    cluster = ClusterThatChecks(setting, lambda: policies, overlap=overlap, has_epoch_means=False)
    cluster.run()
    assert cluster.is_job_complete
    assert cluster.checked > 30


def test_with_all_workers_in_a_group_and_constant_weights_models_stay_equal():
    """It is averaging of models in step: after each round all have the mean of what one step each gives."""
    samples = SampleSetting(epoch_samples=240, batch_size=2, epochs=1, batches_per_round=1)
    setting = SimulationSetting(world=4, samples=samples, times=JitteredTimes())
    policies = [Assembly(4), PartialReduce(4, size=4, global_every=None)]
    cluster = SimulatedModelCluster(setting, lambda: policies, overlap=False, has_epoch_means=False)
    cluster.run()
    problem = cluster.problem
    states = [problem.initial_state()] * 4
    for number in range(30):
        gradients = [problem.gradient(state, worker, number) for worker, state in enumerate(states)]
        states = [problem.step(state, own) for state, own in zip(states, gradients, strict=True)]
        model = np.mean([state.parameters for state in states], axis=0)
        states = [state._replace(parameters=model) for state in states]
    assert cluster.averagings[1:] == [(0, 1, 2, 3)] * 31
    for worker in range(4):
        np.testing.assert_allclose(cluster._workers[worker].model.parameters, model, rtol=1e-10)


class ClusterThatNotes(SimulatedModelCluster):
    """Keeps all events and the averagings that are rounds."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.events, self.rounds = [], set()

    def handle_event(self, event):
        self.events.append(event)
        return super().handle_event(event)

    def _check_action(self, action):
        if isinstance(action, AverageModels) and action.outer_step is not None:
            self.rounds.add(action.exchange_id)
        super()._check_action(action)


def test_with_a_delay_each_worker_takes_each_mean_so_many_steps_after_its_snapshot():
    """Without faults, though worker 1 is slow, and lines are."""
    samples = SampleSetting(epoch_samples=960, batch_size=2, epochs=1, batches_per_round=1)
    slow = (parse_slow_rule("1:3"),)
    setting = SimulationSetting(world=4, samples=samples, slow=slow, times=JitteredTimes())
    arguments = {"every": 8, "fragments": 2, "delay": 3, "by_pace": False, "quorum": 4, "overlap": True}
    policies = [Assembly(4), LocalSteps(4, global_every=None, **arguments)]
    cluster = ClusterThatNotes(
        setting, lambda: policies, overlap=True, has_epoch_means=False, fragments=2, delay=3
    )
    cluster.run()
    steps, taken = dict.fromkeys(range(4), 0), {worker: [] for worker in range(4)}
    for event in cluster.events:
        if isinstance(event, Ready):
            steps[event.worker] = event.step + 1
        elif isinstance(event, ModelsAveraged) and event.exchange_id in cluster.rounds:
            taken[event.worker].append((event.model_steps, steps[event.worker]))
    common = min(len(one) for one in taken.values()) - 1  # the last ones end early, with the loops
    assert common > 15
    for pairs in taken.values():
        assert pairs[:common] == [(4 * number + 1, 4 * number + 4) for number in range(common)]


def test_workers_that_join_from_two_hosts_average_in_turn_between_them_and_within():
    """Workers 0 and 2 are on one host, 1 and 3 on the other."""
    samples = SampleSetting(epoch_samples=160, batch_size=2, epochs=1, batches_per_round=1)
    setting = SimulationSetting(world=4, hosts=2, samples=samples, times=JitteredTimes())
    policies = [Assembly(4), PragueAveraging(4, mode="static", global_every=None)]
    cluster = SimulatedModelCluster(setting, lambda: policies, overlap=False, has_epoch_means=False)
    cluster.run()
    groups = cluster.averagings[1:10]
    assert {*groups[:3]} == {(0, 1), (2,), (3,)}
    assert {*groups[3:5]} == {(0, 2), (1, 3)}
    assert {*groups[5:8]} == {(2, 3), (0,), (1,)}
