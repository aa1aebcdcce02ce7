"""Rounds that close without their late members: who may skip which round, and after which grace."""

from __future__ import annotations

import json
from typing import Any

import pytest

from offbeat.events import Ready, SkipRound
from offbeat.policies.membership.current_group import CurrentGroup
from offbeat.policies.membership.round_quorum import RoundQuorum
from offbeat.policies.membership.worker_table import WorkerStatus, WorkerTable


class Job:
    """A group of which each member was last Ready for a round."""

    def __init__(self, last_rounds: list[int], **arguments: Any) -> None:
        self.workers, self.group = WorkerTable(), CurrentGroup()
        self.workers.statuses = {
            worker: WorkerStatus(round=round_) for worker, round_ in enumerate(last_rounds)
        }
        self.group.change(tuple(range(len(last_rounds))), reason="all are here")
        self.quorum = RoundQuorum(self.workers, self.group, **arguments)

    def skips(self) -> dict[int, tuple[int, float]]:
        """The round and the grace of each member that is asked to skip."""
        rounds = [status.round for status in self.workers.statuses.values()]
        actions = self.quorum.late_members(max(rounds), rounds.count(max(rounds)))
        assert all(skip.generation == self.group.generation for skip in actions)
        return {skip.worker: (skip.round, skip.grace_s) for skip in actions}

    def computed(self, worker: int, compute_s: float) -> None:
        self.quorum.on_ready(
            Ready(
                now_s=0.0,
                worker=worker,
                generation=0,
                epoch=0,
                step=0,
                round=0,
                compute_s=compute_s,
                samples=0,
                blocks=(),
            )
        )


@pytest.mark.parametrize(
    ("size", "ready", "is_met"),
    [
        ("n-1", 3, True),
        ("n-1", 2, False),
        ("n-2", 2, True),
        ("n-2", 1, False),
        ("n-9", 1, True),
        (2, 2, True),
        ("2", 1, False),
    ],
)
def test_a_round_has_its_quorum_with_so_many_of_four_members(size, ready, is_met):
    job = Job([5] * ready + [4] * (4 - ready), size=size, grace_s=1.0)
    assert set(job.skips()) == (set(range(ready, 4)) if is_met else set())


def test_a_group_smaller_than_the_quorum_waits_for_all_its_members():
    assert Job([5, 5, 4], size=4, grace_s=1.0).skips() == {}
    assert Job([5, 5, 5], size="n-1", grace_s=1.0).skips() == {}


def test_a_late_member_has_the_grace_and_one_that_has_skipped_the_round_before_has_none():
    assert Job([5, 5, 4, 3], size="n-2", grace_s=0.5).skips() == {2: (5, 0.5), 3: (5, 0.0)}


def test_the_grace_is_by_default_a_quarter_of_the_median_compute_time_of_the_members():
    job = Job([5, 5, 5, 4], size="n-1")
    for worker, compute_s in enumerate((0.4, 0.8, 4.0, 0.6)):
        job.computed(worker, compute_s)
    job.computed(9, 100.0)  # no member
    assert job.skips() == {3: (5, pytest.approx(0.175))}


def test_each_late_member_is_asked_once_in_a_round_and_again_in_a_new_group():
    job = Job([5, 5, 5, 4], size="n-1", grace_s=0.1)
    assert set(job.skips()) == {3}
    assert job.skips() == {}
    job.group.change((0, 1, 2, 3), generation=1, reason="a round is repeated")
    assert set(job.skips()) == {3}
    for worker in range(3):
        job.workers.statuses[worker].round = 6
    assert job.skips() == {3: (6, 0.0)}


def test_a_member_skips_no_round_after_which_its_gradients_would_be_too_old():
    """What was computed after round 4 is 4 steps old in the step of round 8, which applies it."""
    assert set(Job([7, 7, 4], size="n-1", grace_s=0.1, staleness_steps_max=4).skips()) == {2}
    assert Job([8, 8, 4], size="n-1", grace_s=0.1, staleness_steps_max=4).skips() == {}


def test_while_one_late_member_has_to_be_waited_for_no_other_skips():
    assert Job([8, 8, 7, 4], size="n-2", grace_s=0.1, staleness_steps_max=4).skips() == {}


def test_nobody_skips_the_first_round_or_while_the_group_changes_or_when_a_member_has_finished():
    assert Job([0, 0, -1], size="n-1", grace_s=0.1).skips() == {}
    changing = Job([5, 5, 4], size="n-1", grace_s=0.1)
    changing.group.change(
        (0, 1, 2), joining=(1,), before=(0, 2), generation=1, step=6, reason="worker 1 joins"
    )
    assert changing.skips() == {}
    ending = Job([5, 5, 4], size="n-1", grace_s=0.1)
    ending.group.on_ended(0, 6)
    assert ending.skips() == {}


def test_a_restored_quorum_asks_nobody_twice_and_knows_the_compute_times():
    job = Job([5, 5, 5, 4], size="n-1")
    job.computed(0, 0.4)
    first = job.skips()
    again = Job([5, 5, 5, 4], size="n-1")
    again.quorum.load_state_dict(json.loads(json.dumps(job.quorum.state_dict())))
    assert first == {3: (5, pytest.approx(0.1))}
    assert again.skips() == {}
    again.group.change((0, 1, 2, 3), generation=1, reason="a round is repeated")
    assert again.skips() == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "at least 1 worker, got 0"),
        ({"size": "n"}, "such as 6"),
        ({"size": "n-0"}, "such as 6"),
        ({"size": "0"}, "at least 1 worker, got 0"),
        ({"size": 2, "grace_s": -1.0}, "a grace of at least 0 s, got -1.0"),
        ({"size": 2, "staleness_steps_max": 1}, "at least 2 steps, got 1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Job([0, 0], **arguments)


def test_the_reason_names_the_round_and_how_many_are_ready():
    job = Job([5, 5, 5, 4], size="n-1", grace_s=0.1)
    (skip,) = job.quorum.late_members(5, 3)
    assert isinstance(skip, SkipRound)
    assert skip.reason == "3 of 4 members are ready for round 5"
