"""Promises about a network that fails for a moment, with real processes on hosts of their own.

Longer faults are in `test_network_long.py`. Needs root, `ip` and `ss`.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from benchmarks.namespaces import block, cut, mend, missing, reset, slow_down, split
from offbeat.events import Lost
from offbeat.strategies import SSP, AllReduce, PartialAllReduce
from support.network_faults import fault, part, serving, training
from support.run_logs import groups_of, wait_for_entry

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(missing() is not None, reason=f"making hosts on this machine needs {missing()}"),
]

STEADY = PartialAllReduce(limit=10**6)  # no worker is excluded for being slow


def is_in_control(job, strategy):
    """Kill worker 2 and wait for what follows, which the coordinator decides.

    In lockstep the others may notice it first, and end without a coordinator: so the run log has to show it.
    """
    os.kill(job.pid(2), signal.SIGKILL)
    if strategy == AllReduce():
        for one in job.ends([0, 1]).values():
            assert "worker 2 was lost" in one.error, one
        wait_for_entry(job.log, "the loss", lambda one: isinstance(one, Lost) and one.worker == 2)
    else:
        job.trains_on([0, 1], together=[(0, 1)] if strategy == STEADY else None)


def test_a_reset_connection_between_two_workers_stops_no_group(tmp_path):
    with training(STEADY, 3, tmp_path) as job:
        began_s = time.monotonic()
        reset(job.places[1], job.places[2])
        job.all_train_together()
        print(job.measures(began_s, began_s))


def test_a_reset_connection_to_a_worker_and_to_the_coordinator_ends_no_job_in_lockstep(tmp_path):
    with training(AllReduce(), 3, tmp_path) as job:
        began_s = time.monotonic()
        reset(job.places[0], job.places[1])
        job.all_train_together()
        print(job.measures(began_s, began_s))


def test_of_two_workers_that_cannot_reach_each_other_one_is_excluded_until_they_can(tmp_path):
    with training(STEADY, 3, tmp_path) as job:
        broken_s = time.monotonic()
        part(job.places[1], job.places[2])
        job.trains_on([0], together=[(0, 1), (0, 2)])
        mend(*job.places)
        mended_s = time.monotonic()
        job.all_train_together()
        print(job.measures(broken_s, mended_s))
        for worker, peer in ((1, 2), (2, 1)):
            lines = [line for line in job.written(worker).splitlines() if f"worker {peer}" in line]
            assert any("cannot reach" in line and ", in step " in line for line in lines), lines
            assert any("can reach" in line and line.endswith("again") for line in lines), lines


@pytest.mark.parametrize("slow", [0, 2])
def test_a_worker_whose_line_becomes_slow_is_left_out_and_no_other(tmp_path, slow):
    """528 KB of gradients and 50 ms of computing, on a line of 2 Mbit/s."""
    with training(PartialAllReduce(), 4, tmp_path, width=2000) as job:
        others = [worker for worker in job.all_workers if worker != slow]
        began_s = time.monotonic()
        slow_down(job.places[slow], 2_000_000)
        job.wait_for(
            lambda: any(slow not in group.members for group in groups_of(job.log)),
            f"a group without worker {slow}",
            150.0,
        )
        job.trains_on(others, together=[tuple(others)])
        assert {group.members for group in groups_of(job.log)} == {job.all_workers, tuple(others)}
        (reason,) = {group.reason for group in groups_of(job.log) if slow not in group.members}
        assert f"worker {slow}: its line is slow" in reason
        until = [one for one in job.steps(others[0]) if one.now_s > began_s and slow in one.members]
        assert len(until) <= 20
        print(job.measures(began_s, None))


def test_without_rank_0s_host_the_others_train_on_where_the_coordinator_is_apart(tmp_path):
    with training(STEADY, 3, tmp_path, has_service=True) as job:
        broken_s = time.monotonic()
        cut(job.places[0])
        job.trains_on([1, 2], together=[(1, 2)])
        steps = len(job.steps(0))
        job.trains_on([1, 2], together=[(1, 2)])
        assert len(job.steps(0)) == steps, "worker 0 trains on as a job of its own"
        mend(*job.places)
        mended_s = time.monotonic()
        job.all_train_together()
        print(job.measures(broken_s, mended_s))


@pytest.mark.parametrize(
    "break_lines",
    [
        lambda hosts: cut(hosts[2]),
        lambda hosts: block(hosts[2], hosts[-1]),
        lambda hosts: block(hosts[-1], hosts[2]),
    ],
    ids=["both ways", "to the coordinator", "from the coordinator"],
)
def test_without_one_worker_the_coordinator_apart_and_the_others_go_on_beyond_10_s(tmp_path, break_lines):
    with training(STEADY, 3, tmp_path, has_service=True) as job:
        broken_s = time.monotonic()
        break_lines(job.places)
        job.trains_on([0, 1], together=[(0, 1)])
        job.let_pass(12.0)
        job.trains_on([0, 1], together=[(0, 1)])
        mend(*job.places)
        mended_s = time.monotonic()
        job.all_train_together()
        print(job.measures(broken_s, mended_s))


def test_two_of_three_workers_without_the_coordinator_apart_wait_for_it_and_so_does_the_third(tmp_path):
    """The coordinator cannot know whether the two train on: so nobody does, and no second job begins."""
    with training(STEADY, 3, tmp_path, has_service=True) as job:
        broken_s = time.monotonic()
        split(job.places[2], job.places[-1])
        job.let_pass(4.0)
        steps = [len(job.steps(worker)) for worker in job.all_workers]
        job.let_pass(10.0)
        assert [len(job.steps(worker)) for worker in job.all_workers] == steps, job.state()
        mend(*job.places)
        mended_s = time.monotonic()
        job.all_train_together()
        print(job.measures(broken_s, mended_s))


def test_on_servers_the_worker_that_reaches_the_coordinator_apart_trains_on_alone(tmp_path):
    with training(SSP(), 3, tmp_path, has_service=True) as job:
        broken_s, mended_s = fault(job, lambda: split(job.places[2], job.places[-1]), 15.0)
        for rank, one in job.ends([0, 1]).items():
            assert f"worker {rank} was lost" in one.error, one
        job.trains_on([2])
        assert set(job.ended) == {0, 1}, job.state()
        print(job.measures(broken_s, mended_s))


@pytest.mark.parametrize("duration_s", [5.0, 20.0])
@pytest.mark.parametrize("strategy", [STEADY, AllReduce(), SSP()], ids=lambda one: one.name)
def test_a_coordinator_apart_that_is_cut_off_loses_no_worker(tmp_path, strategy, duration_s):
    with training(strategy, 3, tmp_path, has_service=True) as job:
        broken_s, mended_s = fault(job, lambda: cut(job.places[-1]), duration_s)
        job.all_train_together()
        print(job.measures(broken_s, mended_s))
        is_in_control(job, strategy)


@pytest.mark.parametrize("strategy", [STEADY, AllReduce(), SSP()], ids=lambda one: one.name)
def test_a_coordinator_whose_host_is_lost_continues_the_job_on_another_host(tmp_path, strategy):
    with training(strategy, 3, tmp_path, spare=1, has_service=True) as job:
        spare, lost = job.places[-2:]
        broken_s = time.monotonic()
        cut(lost)
        job.service.kill()
        job.service.start_on(spare.address, spare.prefix)
        job.all_train_together()
        print(job.measures(broken_s, None))
        is_in_control(job, strategy)


def test_a_host_with_a_worker_and_a_server_that_is_cut_off_for_3_s_loses_neither(tmp_path):
    with training(SSP(), 3, tmp_path) as job:
        broken_s, mended_s = fault(job, lambda: cut(job.places[2]), 3.0)
        job.all_train_together()
        print(job.measures(broken_s, mended_s))


def test_a_switch_that_is_down_for_4_s_costs_no_acknowledged_push_and_no_server(tmp_path):
    with serving(5, tmp_path) as served:
        broken_s, mended_s = fault(served, lambda: cut(*served.places), 4.0)
        served.pushes_on()
        served.nothing_is_lost()
        print(served.measures(broken_s, mended_s))
