"""Promises of rounds of several steps: quorum, grace, steps by pace, and weights by samples."""

import pytest

from offbeat.events import RejectPeer, Tick
from offbeat.policies.model_averaging.local_rounds import LocalRounds
from offbeat.policies.model_averaging.local_steps import LocalSteps
from support.averaging_job import Job


def accept_any(group, worker):
    return True


def rounds(every=10, quorum=None, grace_s=None, by_pace=True, fragments=0, delay=0):
    return LocalRounds(every, quorum, grace_s, by_pace=by_pace, fragments=fragments, delay=delay)


def all_ready(made, ready_s):
    """Workers that are ready at these times, of which the first has made a step since 0 s."""
    worker, first_s = next(iter(ready_s.items()))
    made.observe_step(worker, first_s, samples=1, step_s=first_s)
    for worker, now_s in ready_s.items():
        made.add(worker, now_s)
    return made


def begin_round(made, group):
    """A round of these workers, of those that there are: its weights and its outer step."""
    for worker in group:
        made.add(worker, 100.0)
    assert made.pop_group(frozenset(group), 100.0, accept_any) == group
    return made.weights(group), made.outer_step(group)


def test_a_round_closes_when_all_workers_are_ready():
    made = all_ready(rounds(), {0: 4.0, 1: 4.0})
    assert made.pop_group(frozenset({0, 1, 2}), 4.0, accept_any) is None
    made.add(2, 4.5)
    assert made.pop_group(frozenset({0, 1, 2}), 4.5, accept_any) == (0, 1, 2)


def test_with_a_quorum_a_round_closes_after_a_quarter_of_its_time():
    made = all_ready(rounds(), {0: 4.0, 1: 8.0})
    assert made.pop_group(frozenset({0, 1, 2}), 10.0, accept_any) is None
    assert made.pop_group(frozenset({0, 1, 2}), 10.1, accept_any) == (0, 1)


def test_the_time_of_grace_begins_when_the_quorum_is_there():
    made = all_ready(rounds(quorum=3, grace_s=1.0), {0: 1.0, 1: 2.0})
    assert made.pop_group(frozenset({0, 1, 2, 3}), 100.0, accept_any) is None
    made.add(2, 100.0)
    assert made.pop_group(frozenset({0, 1, 2, 3}), 101.0, accept_any) is None
    assert made.pop_group(frozenset({0, 1, 2, 3}), 101.1, accept_any) == (0, 1, 2)


def test_a_quorum_of_more_workers_than_there_are_is_all_of_them():
    made = all_ready(rounds(quorum=9, grace_s=0.0), {0: 1.0})
    assert made.pop_group(frozenset({0, 1}), 50.0, accept_any) is None
    made.add(1, 50.0)
    assert made.pop_group(frozenset({0, 1}), 50.0, accept_any) == (0, 1)


def test_workers_that_cannot_meet_are_in_different_rounds():
    made = all_ready(rounds(), {0: 1.0, 1: 1.0, 2: 1.0})

    def can_meet(group, worker):
        return not {0, 2} <= {*group, worker}

    assert made.pop_group(frozenset({0, 1, 2}), 1.0, can_meet) == (0, 1)
    assert made.pop_first(can_meet) == (2,)


def test_a_slow_worker_makes_as_many_steps_as_it_can_in_the_time_of_the_fastest():
    made = rounds(every=100)
    for worker, step_s in {0: 1.0, 1: 2.0, 2: 5.0, 3: 1000.0}.items():
        for number in range(5):
            made.observe_step(worker, number * step_s, samples=1, step_s=step_s)
    begin_round(made, (0, 1, 2, 3))
    assert [made.steps(worker) for worker in range(4)] == [100, 50, 20, 1]


def test_a_pause_between_two_steps_does_not_count_for_a_workers_pace():
    made = rounds(every=100)
    for worker in (0, 1):
        for step_s in (1.0, 1.0, 1.0, 50.0 if worker else 1.0, 1.0):
            made.observe_step(worker, 0.0, samples=1, step_s=step_s)
    begin_round(made, (0, 1))
    assert made.steps(1) == 100


def test_a_worker_of_unknown_pace_begins_with_a_few_steps():
    assert rounds(every=100).steps(0) == 5
    assert rounds(every=3).steps(0) == 3
    assert rounds(every=100, by_pace=False).steps(0) == 100


def test_models_are_weighted_by_the_samples_since_their_last_round():
    made = rounds()
    for worker, samples in {0: 30, 1: 10}.items():
        made.observe_step(worker, 1.0, samples=samples, step_s=1.0)
    assert begin_round(made, (0, 1))[0] == (0.75, 0.25)
    made.observe_step(0, 2.0, samples=5, step_s=1.0)  # while it is averaged
    made.end_averaging(0, has_mean=True)
    made.end_averaging(1, has_mean=False)
    made.observe_step(1, 3.0, samples=5, step_s=1.0)
    assert begin_round(made, (0, 1))[0] == (0.25, 0.75)


# The outer optimizer ---------------------------------------------------------------------------------------


def outer_round(made, group, *, failed=()):
    """A round of these workers: its weights and its outer step."""
    for worker in group:
        made.observe_step(worker, 1.0, samples=10, step_s=1.0)
    weights, step = begin_round(made, group)
    for worker in group:
        made.end_averaging(worker, has_mean=worker not in failed)
    return weights, step


def test_each_round_is_of_the_next_part_of_the_parameters():
    made = rounds(fragments=2)
    steps = [outer_round(made, (0, 1))[1] for _ in range(4)]
    assert [(step.fragment, step.number) for step in steps] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [step.behind for step in steps] == [()] * 4
    assert rounds(every=10, fragments=2, by_pace=False).steps(0) == 5


def test_a_worker_that_has_missed_a_step_of_a_part_contributes_in_the_round_after():
    made = rounds(fragments=1)
    made.observe_step(2, 1.0, samples=10, step_s=1.0)
    outer_round(made, (0, 1))
    weights, step = outer_round(made, (0, 1, 2))
    assert (weights, step.behind) == ((0.5, 0.5, 0.0), (2,))
    weights, step = outer_round(made, (0, 1, 2))
    assert (weights, step.behind) == ((0.2, 0.2, 0.6), ())  # 30 samples since it last contributed


def test_a_worker_is_behind_only_in_the_part_of_which_it_has_missed_a_step():
    made = rounds(fragments=2)
    outer_round(made, (0, 1))
    assert outer_round(made, (0, 1, 2))[1].behind == ()
    assert outer_round(made, (0, 1, 2))[1].behind == (2,)


def test_a_member_whose_averaging_has_failed_is_behind_one_for_which_it_has_not():
    made = rounds(fragments=1)
    outer_round(made, (0, 1), failed=(1,))
    assert outer_round(made, (0, 1))[1].behind == (1,)
    outer_round(made, (0, 1), failed=(0, 1))
    assert outer_round(made, (0, 1))[1].behind == ()


def test_a_newcomer_is_behind_in_all_parts():
    made = rounds(fragments=2)
    made.add_newcomer(5)
    assert [outer_round(made, (0, 5))[1].behind for _ in range(4)] == [(5,), (5,), (), ()]


def test_a_round_holds_a_worker_that_is_not_behind():
    made = rounds(quorum=1, grace_s=0.0, fragments=1)
    outer_round(made, (0, 1))
    made.add(2, 5.0)
    assert made.pop_group(frozenset({0, 1, 2}), 6.0, accept_any) is None
    made.add(1, 7.0)
    assert made.pop_group(frozenset({0, 1, 2}), 7.1, accept_any) == (1, 2)
    assert made.outer_step((1, 2)).behind == (2,)


def test_a_worker_that_trains_while_others_wait_for_the_mean_of_an_epoch_makes_no_outer_step_alone():
    made = rounds(fragments=1)
    for worker in range(3):
        made.on_joined(worker, "")
    made.observe_step(2, 5.0, samples=10, step_s=1.0)
    made.add(2, 5.0)
    assert made.pop_group(frozenset({2}), 5.0, accept_any) == (2,)
    assert (made.weights((2,)), made.outer_step((2,))) == ((1.0,), None)
    made.end_averaging(2, has_mean=True)
    for worker in (0, 1):
        made.observe_step(worker, 6.0, samples=10, step_s=1.0)
    weights, step = begin_round(made, (0, 1, 2))
    assert step.behind == ()
    assert weights == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_a_round_begins_with_a_worker_that_is_not_behind_though_another_was_ready_first():
    made = rounds(quorum=1, grace_s=0.0, fragments=1)
    outer_round(made, (0, 1))
    for worker, ready_s in {2: 5.0, 0: 6.0, 1: 7.0}.items():
        made.add(worker, ready_s)

    def cannot_meet_2(group, worker):
        return len({2}.intersection((*group, worker))) == 0 or not {0, 1}.intersection((*group, worker))

    assert made.pop_group(frozenset({0, 1, 2}), 7.0, cannot_meet_2) == (0, 1)


def test_after_a_mean_of_all_models_its_members_have_the_newest_anchor_and_no_samples_left():
    made = rounds(fragments=1)
    outer_round(made, (0, 1, 2))
    for worker in (0, 1, 2):
        made.observe_step(worker, 5.0, samples=10 * (1 + worker), step_s=1.0)
    made.begin_mean_of_all((0, 1, 2))
    for worker in (0, 1, 2):
        made.end_averaging(worker, has_mean=worker != 2)
    weights, step = outer_round(made, (0, 1, 2))
    assert (weights, step.behind) == ((0.5, 0.5, 0.0), (2,))


def test_a_worker_that_was_behind_before_a_mean_of_all_models_is_behind_after_it():
    made = rounds(fragments=1)
    outer_round(made, (0, 1))
    made.begin_mean_of_all((0, 1, 2))
    for worker in (0, 1, 2):
        made.end_averaging(worker, has_mean=True)
    assert outer_round(made, (0, 1, 2))[1].behind == (2,)


def test_where_no_worker_is_left_that_has_made_the_last_step_the_next_newest_goes_on():
    made = rounds(fragments=1)
    outer_round(made, (0, 1))
    made.discard(0)
    made.discard(1)
    made.add(2, 5.0)
    assert made.pop_group(frozenset({2}), 5.0, accept_any) == (2,)
    assert outer_round(made, (2,))[1].behind == ()


def test_a_state_continues_as_the_original_does():
    made = rounds(fragments=2)
    outer_round(made, (0, 1))
    made.begin_mean_of_all((0, 1))
    all_ready(made, {0: 4.0, 1: 8.0})
    copy = rounds(fragments=2)
    copy.load_state_dict(made.state_dict())
    assert copy.state_dict() == made.state_dict()
    assert copy.pop_group(frozenset({0, 1, 2}), 10.1, accept_any) == (0, 1)
    assert copy.steps(0) == made.steps(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "expected rounds of at least 1 step"),
        ({"every": 1, "quorum": 0}, "expected a quorum of at least 1 worker"),
        ({"every": 1, "grace_s": -1.0}, "expected a finite time of grace"),
        ({"every": 1, "grace_s": float("inf")}, "expected a finite time of grace"),
        ({"every": 4, "global_every": 3}, "expected global_every to be epoch or None"),
        ({"every": 4, "fragments": 5}, "expected from 0 to 4 fragments"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LocalSteps(2, **arguments)


def test_with_overlap_the_first_steps_samples_count_too():
    job = Job(2, policy=LocalSteps, every=1, overlap=True)
    job.end_all()
    job.ready(0, samples=30)
    job.ready(1, samples=10)
    assert job.averagings[-1].weights == (0.75, 0.25)


# A fixed delay --------------------------------------------------------------------------------------------


def test_the_steps_of_a_delay_are_steps_of_the_round():
    assert rounds(every=10, by_pace=False, fragments=2, delay=3).steps(0) == 2
    made = rounds(every=100, delay=30)
    for worker, step_s in {0: 1.0, 1: 2.0, 2: 5.0}.items():
        for number in range(5):
            made.observe_step(worker, number * step_s, samples=1, step_s=step_s)
    begin_round(made, (0, 1, 2))
    assert [made.steps(worker) for worker in range(3)] == [70, 20, 1]


def test_with_a_delay_a_model_counts_by_the_samples_up_to_its_snapshot():
    made = rounds(delay=2)
    for worker in (0, 1):
        made.observe_step(worker, 1.0, samples=10, step_s=1.0)
    made.add(0, 1.0)
    made.observe_step(0, 2.0, samples=20, step_s=1.0)  # while it waits for the other one
    made.add(1, 3.0)
    assert made.pop_group(frozenset({0, 1}), 3.0, accept_any) == (0, 1)
    assert made.weights((0, 1)) == (0.5, 0.5)
    for worker in (0, 1):
        made.end_averaging(worker, has_mean=True)
    made.observe_step(1, 4.0, samples=5, step_s=1.0)
    assert begin_round(made, (0, 1))[0] == (0.8, 0.2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delay": 1, "overlap": False}, "expected overlap with a delay, got one of 1 steps"),
        ({"delay": 0}, "at least 1 step and fewer than the 4 of a round, got 0"),
        ({"delay": 4}, "at least 1 step and fewer than the 4 of a round, got 4"),
    ],
)
def test_a_delay_needs_overlap_and_is_shorter_than_a_round(options, words):
    with pytest.raises(ValueError, match=words):
        LocalSteps(2, every=9, fragments=2, **{"overlap": True} | options)


def delayed_job(world, **options):
    """A job of rounds of 3 steps, of which workers make the last one while their models are averaged."""
    job = Job(
        world,
        policy=LocalSteps,
        every=3,
        fragments=1,
        by_pace=False,
        overlap=True,
        timeout_s=10.0,
        **{"delay": 1} | options,
    )
    job.end_all()
    return job


def rejected(actions):
    return [one.peer for one in actions if isinstance(one, RejectPeer)]


def test_with_a_delay_a_worker_that_waits_for_another_is_not_rejected_and_the_other_one_is():
    job = delayed_job(3, quorum=3)
    for _ in range(2):
        job.ready(0)
        job.ready(1)
    job.now_s = 1.0
    job.ready(0)  # and waits now
    job.ready(1)
    (peer,) = rejected(job.emit(Tick(now_s=12.0)))
    assert peer == "worker-2"
    assert job.averagings[-1].members == (0, 1)


def test_with_a_delay_a_worker_is_not_late_for_the_time_for_which_others_kept_it_waiting():
    job = delayed_job(4, quorum=3)
    job.finished(3)  # it waits for the end from now on
    for _ in range(3):
        job.ready(0)
        job.ready(1)
    (peer,) = rejected(job.emit(Tick(now_s=11.0)))
    assert peer == "worker-2"
    assert job.averagings[-1].members == (0, 1)
    assert not rejected(job.emit(Tick(now_s=11.5)))  # until they have had the time to take the mean


def test_a_step_begins_when_the_mean_is_there_only_where_the_worker_waits_for_it():
    for options, began_s in (({"delay": 1}, 7.0), ({"delay": None}, 3.0)):
        job = delayed_job(2, **options)
        for job.now_s in (1.0, 2.0, 3.0):
            job.ready(0)
            job.ready(1)
        job.now_s = 7.0
        job.averaged(0)
        assert dict(job.policy.state_dict()["began_s"])[0] == began_s
