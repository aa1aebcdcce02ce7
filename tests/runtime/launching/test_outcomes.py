"""Promises of `offbeat.runtime.launching.outcomes`: when a job has succeeded, and what one line says."""

import signal

import pytest

from offbeat.runtime.launching.outcomes import WorkerOutcome, has_job_succeeded, outcome_summary

WELL, FAILED, KILLED = 0, 1, -signal.SIGTERM


def outcome(rank, returncode, **more):
    return WorkerOutcome(rank=rank, returncode=returncode, ended_s=1.0, tail=(), **more)


@pytest.mark.parametrize(
    ("codes", "succeeded"),
    [
        ((WELL, WELL), True),
        ((WELL, KILLED), True),
        ((KILLED, KILLED), False),
        ((WELL, FAILED), False),
        ((FAILED, KILLED), False),
    ],
)
def test_a_job_succeeds_if_some_worker_does_and_none_fails_by_itself(codes, succeeded):
    outcomes = [outcome(rank, code) for rank, code in enumerate(codes)]
    assert has_job_succeeded(outcomes) == succeeded


def test_a_worker_that_was_replaced_counts_as_its_replacement():
    replaced = outcome(0, FAILED, is_replaced=True)
    assert has_job_succeeded([replaced, outcome(1, WELL), outcome(0, WELL)])
    assert not has_job_succeeded([replaced, outcome(1, WELL), outcome(0, FAILED)])
    assert not has_job_succeeded([replaced])


def test_a_worker_that_the_launcher_has_ended_is_not_lost():
    ended = outcome(1, KILLED, end_reason="it was late")
    assert not has_job_succeeded([outcome(0, WELL), ended])


def test_the_summary_names_who_was_lost_and_how():
    outcomes = [outcome(0, WELL), outcome(1, KILLED), outcome(2, FAILED, is_replaced=True), outcome(2, WELL)]
    assert outcome_summary(outcomes) == (
        "2 workers ended well; worker 1 was killed by SIGTERM; worker 2 failed with exit code 1 and was "
        "started again"
    )
