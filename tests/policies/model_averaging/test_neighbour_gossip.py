"""Promises of gossip in rounds of all workers: which rounds continue the copies of the last one."""

import pytest

from offbeat.events import Tick
from offbeat.policies.model_averaging.neighbour_gossip import NeighbourGossip
from support.averaging_job import Job


class Rounds(Job):
    """A job that has begun; each round is of the workers that are ready."""

    def __init__(self, world, **options):
        super().__init__(world, policy=NeighbourGossip, **options)
        self.begin()

    def round(self, *workers):
        """A step of each of these workers; the group of the round that follows, and whether it continues."""
        for worker in workers:
            self.ready(worker)
        last = self.averagings[-1]
        return last.group, last.continues


def test_a_round_of_the_same_workers_continues_the_one_that_all_have_ended():
    job = Rounds(3)
    assert job.round(0, 1, 2) == ((0, 1, 2), False)
    job.end_all()
    assert job.round(2, 1, 0) == ((0, 1, 2), True)
    job.end_all()
    assert job.round(1, 2, 0) == ((0, 1, 2), True)


def test_no_round_begins_before_the_last_worker_is_ready():
    job = Rounds(3)
    job.ready(0)
    job.ready(2)
    job.now_s = 500.0
    job.emit(Tick(now_s=job.now_s))
    assert not job.averagings
    assert job.round(1) == ((0, 1, 2), False)


def test_a_round_that_one_worker_has_given_up_is_not_continued():
    job = Rounds(3)
    job.round(0, 1, 2)
    for worker in (0, 1, 2):
        job.averaged(worker, has_mean=worker != 1)
    assert job.round(0, 1, 2) == ((0, 1, 2), False)
    job.end_all()
    assert job.round(0, 1, 2) == ((0, 1, 2), True)


def test_a_round_without_a_lost_worker_begins_anew():
    job = Rounds(3)
    job.round(0, 1, 2)
    job.end_all()
    job.lost(1)
    assert job.round(0, 2) == ((0, 2), False)
    job.end_all()
    assert job.round(0, 2) == ((0, 2), True)


def test_a_round_with_a_newcomer_begins_anew():
    job = Rounds(2)
    job.round(0, 1)
    job.end_all()
    job.join(2, 2)
    assert job.round(0) == ((0,), False)  # in which the newcomer receives the state
    assert job.averagings[-1].joining == (2,)
    job.end_all()
    assert job.round(0, 1, 2) == ((0, 1, 2), False)
    job.end_all()
    assert job.round(0, 1, 2) == ((0, 1, 2), True)


def test_the_mean_after_an_epoch_voids_the_copies():
    job = Rounds(2)
    job.round(0, 1)
    job.end_all()
    for worker in (0, 1):
        job.end_epoch(worker)
    assert job.averagings[-1].includes_buffers
    assert not job.averagings[-1].continues
    job.end_all()
    assert job.round(0, 1) == ((0, 1), False)


def test_while_one_has_used_up_the_epoch_the_others_go_on_alone():
    job = Rounds(3)
    job.end_epoch(2)
    assert job.round(0) == ((0,), False)
    assert job.round(1) == ((1,), False)
    job.end_all()
    assert job.round(1) == ((1,), False)


def test_what_a_worker_knows_of_others_survives_a_restart_of_the_coordinator():
    job = Rounds(2)
    job.round(0, 1)
    job.end_all()
    state = job.policy.state_dict()
    job.policy = NeighbourGossip(2, shards="equal")
    job.policy.load_state_dict(state)
    assert job.round(0, 1) == ((0, 1), True)


def test_with_steps_by_pace_a_slow_worker_makes_fewer_steps_in_a_round():
    job = Rounds(2, every=4, overlap=True)
    for number in range(40):
        job.now_s = float(number)
        job.ready(0)
        if number % 4 == 0:
            job.ready(1)
        job.end_all()
    assert job.averagings[-1].steps == (4, 1)


@pytest.mark.parametrize(
    ("options", "text"), [({"every": 0}, "at least 1 step"), ({"global_every": 5}, "epoch")]
)
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        NeighbourGossip(2, **options)
