"""Whole simulated systems of bounded staleness: invariants for any seed, equalities and gains."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from offbeat.cli.main import main
from offbeat.policies import Policy
from offbeat.policies.data.worker_assigner import SoloBlockAssigner
from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.staleness.adaptive_bound import LprController
from offbeat.policies.staleness.bounded_staleness import BoundedStaleness
from offbeat.policies.staleness.caches import CacheDirectory
from offbeat.policies.staleness.clock_gate import ConsistencyGate
from offbeat.policies.stragglers.injection import parse_slow_rule as rule
from offbeat.simulator.core.times import BurstyTimes, ComputeTimes, JitteredTimes
from offbeat.simulator.staleness import campaign
from offbeat.simulator.staleness.cluster import SimulatedPsCluster, make_directory, ps_setting
from offbeat.simulator.training.cluster import ViolationError
from offbeat.simulator.training.sample_loop import SampleSetting
from offbeat.simulator.training.setting import SimulationSetting
from offbeat.strategies import parse_strategy

SEEDS = 40
STRATEGIES = [
    *("ps-bsp", "ps-bsp:shards=equal", "ssp:s=0", "ssp:s=1", "ssp:s=3,shards=equal", "asp"),
    *("ssp:s=2,apply=eager", "ssp:s=2,thread_cache=per_clock", "downpour:n_push=3,n_fetch=2"),
    *("downpour:warm_start=7", "downpour:warm_start=7,shards=equal"),
    *("dtssp", "dtssp:s=0,s_min=0,s_max=4,limit=1", "dtssp:s=1,s_min=1,detector=on,limit=1,shards=equal"),
]


def case_of(seed: int, strategy: str) -> campaign.StalenessFaultCase:
    parsed: Any = parse_strategy(strategy)
    return campaign.draw_case(seed, parsed.ps_options(), parsed.staleness_arguments())


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_fault_breaks_the_invariants(strategy):
    """Specification 2.4 (i) to (viii), 2.5 and G4: see `SimulatedPsCluster` and `Servers`."""
    for seed in range(SEEDS):
        campaign.run_case(case_of(seed, strategy), f"{strategy}, seed {seed}")


def test_a_seed_is_one_case_and_one_run():
    assert case_of(5, "ssp") == case_of(5, "ssp")
    assert case_of(5, "ssp") != case_of(6, "ssp")
    one, another = (campaign.run_case(case_of(5, "ssp"), "") for _ in range(2))
    assert one.clocks_by_worker == another.clocks_by_worker
    assert one.engine.calls_made == another.engine.calls_made


def test_every_kind_of_fault_is_drawn():
    settings = [case_of(seed, "ssp").setting for seed in range(100)]
    kinds = {type(fault).__name__ for setting in settings for fault in setting.faults}
    assert kinds == {
        *(
            "WorkerDeath",
            "WorkerHang",
            "Delay",
            "LinkCut",
            "Partition",
            "ConnectionReset",
            "WorkerArrival",
            "WorkerDeparture",
            "CoordinatorRestart",
        )
    }


# Broken on purpose --------------------------------------------------------------------------------------


class OpensTooEarly(ConsistencyGate):
    """One clock beyond the bound."""

    def _may_start(self, clock, least):
        return super()._may_start(clock - 1, least)

    def _required(self, clock):
        return max(0, clock - self._s), self._s


class Leaps(LprController):
    """Takes two steps at once."""

    def _change(self, lpr):
        return super()._change(lpr) | super()._change(lpr)


class Forgets(SoloBlockAssigner):
    """Does not see that a block was used."""

    def on_step(self, worker, clock, blocks):
        if blocks != (3,):
            super().on_step(worker, clock, blocks)


class ReplaysTwice(CacheDirectory):
    """Replays the last update that is in a row as well."""

    def count_included(self, thread, time):
        return max(0, super().count_included(thread, time) - 1)


class ReplaysNothing(CacheDirectory):
    """Takes a row as it is."""

    def on_thread_copied(self, thread, version, time):
        return super().on_thread_copied(thread, version, 2**62)


class ServesOldThreads(CacheDirectory):
    """Reads a thread's copy a clock too long."""

    def read_source(self, thread, version):
        return "thread" if self.version(thread) == version - 1 >= 0 else super().read_source(thread, version)


class ServesOldRows(CacheDirectory):
    """Takes the row of the process for newer than it is."""

    def on_pulled(self, version):
        super().on_pulled(version + 1)


class PushesTooEarly(CacheDirectory):
    """Pushes a clock as soon as one thread has passed it."""

    def _complete(self):
        end = max((self._threads[thread].clock for thread in self._active), default=self._end)
        clocks = range(self._next, max(self._next, end))
        self._next = clocks.stop
        return clocks


class PullsTooEarly(CacheDirectory):
    """Does not see that the sum that it pulls waits for its own threads."""

    def has_pushed(self, version):
        return True


class PushesNoEmptyClocks(CacheDirectory):
    """Pushes nothing at clocks without updates."""

    def _complete(self):
        return range(0) if self._end <= self._next else super()._complete()


class SkipsWarmStart(BoundedStaleness):
    """Has no warm start."""

    def _choose_warm_worker(self):
        return None


def with_policy(broken: type) -> Callable[[campaign.StalenessFaultCase], list[Policy]]:
    """Policies of which the one that bounds staleness breaks the rules."""

    def build(this: campaign.StalenessFaultCase) -> list[Policy]:
        policies = this.build_policies()
        policies[1].__class__ = broken
        return policies

    return build


def with_part(part: str, broken: type) -> Callable[[campaign.StalenessFaultCase], list[Policy]]:
    """Policies of which a part breaks the rules."""

    def build(this: campaign.StalenessFaultCase) -> list[Policy]:
        policies = this.build_policies()
        getattr(policies[1], part).__class__ = broken
        return policies

    return build


def find(
    strategy: str,
    build: Any = campaign.StalenessFaultCase.build_policies,
    directory: Any = make_directory,
    first_seed: int = 0,
) -> None:
    for seed in range(first_seed, first_seed + 4 * SEEDS):
        campaign.run_case(case_of(seed, strategy), f"seed {seed}", build, directory)


@pytest.mark.parametrize(
    ("part", "broken", "strategy", "message"),
    [
        ("_gate", OpensTooEarly, "ssp:s=1,shards=equal", "may start at clock .* the slowest is at"),
        ("_controller", Leaps, "dtssp:limit=1", "the bound changes from"),
        ("_assigner", Forgets, "asp", "was used 2 times"),
    ],
)
def test_a_policy_that_breaks_the_rules_is_found(part, broken, strategy, message):
    with pytest.raises(ViolationError, match=message):
        find(strategy, build=with_part(part, broken))


def test_a_warm_start_with_several_workers_is_found():
    with pytest.raises(ViolationError, match="while another takes its first steps alone"):
        find("downpour:warm_start=7,shards=equal", build=with_policy(SkipsWarmStart))


@pytest.mark.parametrize(
    ("broken", "message", "first_seed"),
    [
        (ReplaysTwice, "replays its steps", 0),
        (ReplaysNothing, "replays its steps|of its own", 0),
        (ServesOldThreads, "reads values that lack steps", 0),
        (ServesOldRows, "reads values that lack steps", 0),
        (PushesTooEarly, "comes to a server|in the sum of clock|which is over", 0),
        (PullsTooEarly, "reads values that lack steps", 0),
        (PushesNoEmptyClocks, "where clock|the job does not end|no worker has finished", 200),
    ],
)
def test_a_directory_that_breaks_the_rules_is_found(broken, message, first_seed):
    def directory(threads, options):
        return broken(threads, is_versioned=options.is_versioned, clears_threads=options.clears_thread_cache)

    with pytest.raises(ViolationError, match=message):
        find("ssp:s=2", directory=directory, first_seed=first_seed)


class IgnoresServerOutages(BoundedStaleness):
    """Ignores reports of unreachable servers."""

    def _on_server_reachability(self, event):
        pass


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ssp:s=2", "dtssp", "ps-bsp"])
def test_waiting_for_a_worker_that_does_not_reach_the_servers_is_found(strategy):
    with pytest.raises(ViolationError, match=r"no worker has finished a step since.*cut:\d+-s@"):
        find(strategy, build=with_policy(IgnoresServerOutages))


def test_missing_local_steps_under_a_bound_that_rises_are_found():
    """Then a read lacks the worker's own last step; only a bound that is always 0 makes that harmless."""
    strategy: Any = parse_strategy("dtssp:s=0,s_min=0,limit=1")
    assert strategy.ps_options().applies_local_steps
    assert not any(parse_strategy(name).ps_options().applies_local_steps for name in ("ps-bsp", "ssp:s=0"))

    def find_it() -> None:
        for seed in range(SEEDS):
            options = replace(strategy.ps_options(), applies_local_steps=False)
            campaign.run_case(
                campaign.draw_case(seed, options, strategy.staleness_arguments()), f"seed {seed}"
            )

    with pytest.raises(ViolationError, match="of its own"):
        find_it()


# Equalities ---------------------------------------------------------------------------------------------


def run(
    strategy: str,
    times: ComputeTimes,
    *slow: str,
    world: int = 8,
    steps: int = 300,
    halves_after: float = 1e9,
) -> SimulatedPsCluster:
    """A cluster without faults."""
    parsed: Any = parse_strategy(strategy)
    options, arguments = parsed.ps_options(), parsed.staleness_arguments()
    samples = (
        SampleSetting(epoch_samples=world * 100, batch_size=1, epochs=steps // 100)
        if options.assigns_samples
        else None
    )
    setting = SimulationSetting(
        world=world,
        steps=None if options.assigns_samples else steps,
        samples=samples,
        times=times,
        slow=tuple(map(rule, slow)),
        size_bytes=100_000,
    )

    def build() -> list[Policy]:
        return [
            Assembly(world, accepts_late_joiners=options.assigns_samples),
            BoundedStaleness(world, **arguments),
        ]

    served = ps_setting(options, arguments, halves_after=halves_after)
    cluster = SimulatedPsCluster(setting, build, served, keeps_log=True)
    cluster.run()
    assert cluster.is_job_complete
    return cluster


@pytest.mark.long(after=1)
@pytest.mark.parametrize("shards", ["equal", "dynamic"])
@pytest.mark.parametrize(
    ("strategy", "other"), [("ssp:s=0", "ps-bsp:replicas=2"), (f"dtssp:limit={math.inf}", "ssp:s=3")]
)
def test_at_its_strict_setting_a_strategy_is_another_one(strategy, other, shards):
    """Specification 9.2: SSP with s = 0 is BSP, and DTSSP with an infinite limit is SSP."""
    one, another = (run(f"{name},shards={shards}", JitteredTimes(), "3:3") for name in (strategy, other))
    assert one.log == another.log


def test_without_a_bound_no_worker_waits():
    """Specification 2.4 (v)."""
    cluster = run("asp:shards=equal", JitteredTimes(), "3:5", world=4)
    assert max(one.spent_s["waiting"] for one in cluster.threads.values()) < 0.01


@pytest.mark.parametrize("s", [1, 3, 10])
def test_the_slowest_pulls_every_s_plus_1_clocks_and_a_worker_at_the_gate_at_every_one(s):
    """Specification 2.4 (viii)."""
    cluster = run(f"ssp:s={s},shards=equal", JitteredTimes(), "3:5", world=4)
    pulls = {worker: one.pulls for worker, one in cluster.threads.items()}
    assert pulls[3] == math.ceil(300 / (s + 1))
    assert min(pulls[worker] for worker in range(3)) > 280 - 2 * s
    assert cluster.threads[3].spent_s["waiting"] < 0.01


@pytest.mark.long
def test_the_bound_of_dtssp_goes_through_its_whole_range_where_losses_only_vary():
    """Specification 2.5: noise of 3 % visits all of 3 to 10."""
    cluster = run("dtssp:shards=equal", JitteredTimes(), "3:5", world=4, steps=1500)
    ages = {age for one in cluster.threads.values() for age in one.reads_by_staleness}
    assert {3, 4, 5} <= ages <= set(range(11))


# Gains --------------------------------------------------------------------------------------------------


def took_s(times: ComputeTimes, *slow: str, shards: str) -> dict[str, float]:
    """Total times by strategy, as shares of that of BSP."""
    names = ["ps-bsp:replicas=2", "ssp:s=3", "dtssp:s=3", "ssp:s=10", "asp:replicas=2"]
    all_s = {
        name.partition(",")[0]: run(f"{name},shards={shards}", times, *slow, steps=600).progress_s
        for name in names
    }
    return {name: time_s / all_s["ps-bsp:replicas=2"] for name, time_s in all_s.items()}


@pytest.mark.long
def test_with_equal_shards_and_lasting_differences_no_bound_gains_anything():
    """Specification 2.5: totals of SSP(3), SSP(10), DTSSP and ASP are identical, as the slowest decides."""
    shares = took_s(JitteredTimes(), "3:5", "1:2", shards="equal")
    assert all(0.97 < share < 1.03 for share in shares.values())


@pytest.mark.long
def test_with_assigned_samples_and_lasting_differences_every_bound_gains():
    shares = took_s(JitteredTimes(), "3:5", "1:2", shards="dynamic")
    assert all(share < 0.35 for name, share in shares.items() if not name.startswith("ps-bsp"))


@pytest.mark.long
def test_with_bursts_a_larger_bound_gains_more_and_dtssp_is_between():
    """Specification 2.5: bursts of 5 times: SSP(3) < DTSSP < SSP(10) < ASP in what they gain over BSP."""
    shares = took_s(BurstyTimes(), shards="equal")
    order = ["ps-bsp:replicas=2", "ssp:s=3", "dtssp:s=3", "ssp:s=10", "asp:replicas=2"]
    assert all(shares[one] > shares[another] + 0.005 for one, another in itertools.pairwise(order))
    assert shares["ssp:s=10"] < 0.85


# The command line ---------------------------------------------------------------------------------------


def test_simulate_reports_time_waiting_staleness_and_pulls_of_every_worker(tmp_path):
    path = tmp_path / "result.json"
    arguments = ["simulate", "--strategy", "ssp:s=3", "--slow", "3:5", "--steps", "100", "--json", str(path)]
    assert main(arguments) == 0
    result = json.loads(path.read_text())
    assert result["figures"]["steps_count"] == sum(row["steps"] for row in result["rows"]) == 400
    assert result["figures"]["pulls_count"] == sum(row["pulls"] for row in result["rows"])
    assert all(row["pulls"] + row["cached"] == row["steps"] for row in result["rows"])
    assert max(row["staleness_max"] for row in result["rows"]) == 3
    assert result["rows"][3]["steps"] < 50


def test_simulate_runs_a_campaign_under_a_strategy(capsys):
    assert main(["simulate", "--strategy", "dtssp", "--seeds", "5", "--seed", "3"]) == 0
    assert "violations_count" in capsys.readouterr().out
