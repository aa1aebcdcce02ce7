"""Random clusters with random faults: the invariants hold for any seed."""

from __future__ import annotations

import json

import pytest

from offbeat.cli.main import main
from offbeat.events import Halt, PeerUnreachable
from offbeat.policies import Policy
from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.membership.partial_groups import PartialGroups
from offbeat.simulator.core.faults import ConnectionReset, LinkCut
from offbeat.simulator.training import campaign
from offbeat.simulator.training.cluster import ViolationError

SEEDS = 240  # each takes longer than before, for cuts last up to 20 s


@pytest.mark.long(after=1)
@pytest.mark.parametrize("begin", range(0, SEEDS, 20))
def test_no_fault_breaks_the_invariants(begin):
    """No deadlock, one idea of every exchange, equal replicas, no id twice: see `Cluster` and `check`."""
    for seed in range(begin, begin + 20):
        campaign.run_case(seed)


@pytest.mark.long
def test_in_lockstep_no_fault_breaks_the_invariants():
    """All take all steps together, or a fault that is no passing outage stops the job."""
    stopped = [campaign.run_lockstep(seed).stopped for seed in range(150)]
    reasons = [stop.reason for stop in stopped if stop is not None]
    assert 20 < len(reasons) < 75
    assert any("look for a firewall" in reason for reason in reasons)


def test_two_workers_that_cannot_reach_each_other_do_not_stop_the_others():
    """They pause for 2 s and a change; a longer pause is a violation (see `Setting.stuck_after_s`)."""
    cases = [campaign.draw_case(seed) for seed in range(SEEDS)]
    pairs = [
        case
        for case in cases
        if case.setting.faults
        and all(
            isinstance(fault, LinkCut | ConnectionReset) and fault.peer is not None
            for fault in case.setting.faults
        )
        and case.setting.stuck_after_s == 4.0
    ]
    assert len(pairs) > SEEDS / 8


def test_a_policy_that_ignores_unreachable_peers_is_found():
    class Ignorant(PartialGroups):
        def handle(self, event):
            return [] if isinstance(event, PeerUnreachable) else super().handle(event)

    def build(case: campaign.FaultCase) -> list[Policy]:
        return [
            Assembly(case.setting.world, accepts_late_joiners=True),
            Ignorant(case.setting.world, **case.arguments),
        ]

    def run_them_all() -> None:
        for seed in range(SEEDS):
            campaign.run_case(seed, build)

    with pytest.raises(ViolationError, match="no worker has finished a step"):
        run_them_all()


def test_a_policy_that_lets_a_minority_decide_is_found():
    class Rash(PartialGroups):
        def __init__(self, world, **arguments):
            super().__init__(world, **arguments)
            self._outages._are_most_silent = lambda: False  # type: ignore[method-assign]

    def build(case: campaign.FaultCase) -> list[Policy]:
        return [
            Assembly(case.setting.world, accepts_late_joiners=True),
            Rash(case.setting.world, **case.arguments),
        ]

    def run_them_all() -> None:
        for seed in range(SEEDS):
            campaign.run_case(seed, build)

    with pytest.raises(ViolationError, match="alone, and most others are unreachable"):
        run_them_all()


def test_a_policy_that_forgets_workers_outside_when_all_members_have_finished_is_found():
    class Forgetful(PartialGroups):
        def _ready_outside(self, event, status):
            if self._changer.has_working_member():
                super()._ready_outside(event, status)

    def build(case: campaign.FaultCase) -> list[Policy]:
        return [
            Assembly(case.setting.world, accepts_late_joiners=True),
            Forgetful(case.setting.world, **case.arguments),
        ]

    def run_them_all() -> None:
        for seed in range(SEEDS):
            campaign.run_case(seed, build)

    with pytest.raises(ViolationError, match=r"worker \d+ trained outside .* when the job was complete"):
        run_them_all()


def test_a_seed_is_one_case_and_one_run():
    assert campaign.draw_case(5) == campaign.draw_case(5)
    assert campaign.draw_case(5) != campaign.draw_case(6)
    assert campaign.run_case(5).groups == campaign.run_case(5).groups


def test_every_kind_of_fault_is_drawn():
    kinds = {
        type(fault).__name__ for seed in range(SEEDS) for fault in campaign.draw_case(seed).setting.faults
    }
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
    cuts = [
        fault
        for seed in range(SEEDS)
        for fault in campaign.draw_case(seed).setting.faults
        if isinstance(fault, LinkCut)
    ]
    assert {cut.lost for cut in cuts} == {"both", "worker", "peer"}
    assert max(cut.duration_s for cut in cuts if cut.peer is not None) > 20


def test_loops_end_at_a_step_of_the_group_in_many_cases():
    settings = [campaign.draw_case(seed).setting for seed in range(SEEDS)]
    assert sum(one.counts_group_steps for one in settings) > SEEDS / 20
    assert sum(one.samples is not None and one.samples.rounds is not None for one in settings) > SEEDS / 20


def test_samples_are_assigned_in_many_cases():
    drawn = [campaign.draw_case(seed).setting.samples for seed in range(SEEDS)]
    assigned = [one for one in drawn if one is not None]
    assert SEEDS / 3 < len(assigned) < SEEDS * 2 / 3
    assert {one.batches_per_round for one in assigned} == {1, 2, 3}
    assert (
        {one.epochs is None for one in assigned}
        == {one.break_after_rounds is None for one in assigned}
        == {True, False}
    )


@pytest.mark.long
def test_a_policy_that_loses_count_of_samples_is_found():
    """It counts the blocks of a dead worker as used, as if all of them had been in a mean."""

    class Careless(PartialGroups):
        def __init__(self, world, **arguments):
            super().__init__(world, **arguments)
            self._assigner._forget = self._assigner.on_finished  # type: ignore[method-assign]

    def build(case: campaign.FaultCase) -> list[Policy]:
        return [
            Assembly(case.setting.world, accepts_late_joiners=True),
            Careless(case.setting.world, **case.arguments),
        ]

    def run_them_all() -> None:
        for seed in range(SEEDS):
            campaign.run_case(seed, build)

    with pytest.raises(ViolationError, match=r"samples.*again: offbeat simulate --seeds 1 --seed \d+$"):
        run_them_all()


def test_a_broken_policy_is_found_and_the_message_has_the_command_to_repeat_it():
    class Hasty(PartialGroups):
        """Never gives up an exchange."""

        def handle(self, event):
            actions = super().handle(event)
            return [
                Halt(generation=one.generation, abandon=False, reason=one.reason)
                if isinstance(one, Halt)
                else one
                for one in actions
            ]

    def build(case: campaign.FaultCase) -> list[Policy]:
        return [
            Assembly(case.setting.world, accepts_late_joiners=True),
            Hasty(case.setting.world, **case.arguments),
        ]

    def run_them_all() -> None:
        for seed in range(SEEDS):
            campaign.run_case(seed, build)

    with pytest.raises(ViolationError, match=r"again: offbeat simulate --seeds 1 --seed \d+$"):
        run_them_all()


def test_the_command_runs_a_campaign(capsys, tmp_path):
    path = tmp_path / "result.json"
    assert main(["simulate", "--seeds", "3", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert (figures["runs_count"], figures["violations_count"]) == (3, 0)


def test_the_command_simulates_strategies_as_they_are_spelled(capsys, tmp_path):
    path = tmp_path / "result.json"
    options = [
        "--slow",
        "1:5",
        "--steps",
        "60",
        "--compute",
        "constant",
        "--size-mb",
        "0",
        "--json",
        str(path),
    ]
    spent = {}
    for strategy in ("bsp", "partial:limit=5"):
        assert main(["simulate", "--strategy", strategy, *options]) == 0
        spent[strategy] = json.loads(path.read_text())["figures"]["simulated_s"]
    assert spent["bsp"] == pytest.approx(30.0, rel=0.01)
    assert spent["partial:limit=5"] < 12


@pytest.mark.parametrize(
    "options",
    [
        ["--fault", "die:9@1"],
        ["--fault", "foo"],
        ["--compute", "x"],
        ["--workers", "0"],
        ["--strategy", "zz"],
        ["--seeds", "0"],
        ["--slow", "9:3"],
        ["--compute", "log=nowhere"],
        ["--seed", "-1"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(options, capsys):
    assert main(["simulate", *options]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
