"""Promises about a network that fails for seconds to minutes, with real processes on hosts of their own.

`make test-network` runs them, and shows how long everything took; `make test` skips them, for they take an
hour. The short ones are in `test_network.py`. Needs root, `ip` and `ss`.

A job has five workers; under `ssp` and `dtssp` each host has a server, too. The coordinator is with worker 0,
or on a host of its own where a test's name or parameters say "apart".
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import nullcontext

import pytest

from benchmarks.namespaces import block, cut, mend, missing, reset, split
from offbeat.strategies import DTSSP, SSP, AllReduce, Hybrid, PartialAllReduce
from support.network_faults import busy, fault, listening, part, serving, strangers, training

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"making hosts on this machine needs {missing()}"),
    pytest.mark.skipif("OFFBEAT_TEST_NETWORK" not in os.environ, reason="`make test-network` runs it"),
]

WORKERS, SERVERS = 5, 5
STEADY = PartialAllReduce(limit=10**6)  # no worker is excluded for being slow
LOCKSTEP = {"bsp": AllReduce(), "hybrid": Hybrid()}
ON_SERVERS = {"ssp": SSP(), "dtssp": DTSSP()}
STRATEGIES = {"partial": STEADY, **LOCKSTEP, **ON_SERVERS}
FAULTS = {
    "one host": lambda hosts: cut(hosts[3]),
    "rank 0's host": lambda hosts: cut(hosts[0]),
    "half": lambda hosts: split(hosts[3], hosts[4]),
    "a pair": lambda hosts: part(hosts[1], hosts[2]),
    "one way": lambda hosts: block(hosts[1], hosts[2]),
}
PAIRS = ("a pair", "one way")
AWAY = {"one host": (3,), "rank 0's host": (0,), "half": (3, 4)}  # cut off from a coordinator apart
LONG_S = (15.0, 60.0, 120.0)


def each(values):
    return pytest.mark.parametrize("name", values)


def durations(*durations_s):
    return pytest.mark.parametrize("duration_s", durations_s, ids=lambda s: f"{s:g}s")


def lasting(*durations_s, apart=()):
    """So many seconds with the coordinator at worker 0, and so many with it apart."""
    cases = [pytest.param(s, False, id=f"{s:g}s") for s in durations_s]
    cases += [pytest.param(s, True, id=f"{s:g}s-apart") for s in apart]
    return pytest.mark.parametrize(("duration_s", "is_apart"), cases)


def faults(*names):
    return pytest.mark.parametrize("fault_name", names, ids=lambda name: name.replace(" ", "-"))


# Short faults ----------------------------------------------------------------------------------------------


@each(STRATEGIES)
@faults(*FAULTS)
@lasting(3.0, 8.0, apart=[8.0])
def test_a_short_fault_loses_no_worker(tmp_path, name, fault_name, duration_s, is_apart):
    with training(STRATEGIES[name], WORKERS, tmp_path, has_service=is_apart) as job:
        broken_s, mended_s = fault(job, lambda: FAULTS[fault_name](job.places), duration_s)
        job.all_train_together()
        print(job.measures(broken_s, mended_s))


@each(STRATEGIES)
@pytest.mark.parametrize("pair", [(1, 2), (0, 1), (1, -1)], ids=["1-2", "0-1", "1-apart"])
def test_a_reset_loses_no_worker(tmp_path, name, pair):
    with training(STRATEGIES[name], WORKERS, tmp_path, has_service=-1 in pair) as job:
        began_s = time.monotonic()
        reset(*(job.places[rank] for rank in pair))
        job.all_train_together()
        print(job.measures(began_s, began_s))


# Long faults -----------------------------------------------------------------------------------------------


def assert_names(error, *workers):
    assert error.error_type == "WorkerError", error
    assert re.search(rf"\bworker ({'|'.join(map(str, workers))})\b", error.error), error


def assert_names_the_coordinator(error, host):
    assert error.error_type == "WorkerError", error
    assert "coordinator" in error.error, error
    assert host.address in error.error, error


def assert_reports_the_cut(error, host):
    """The error is the first symptom: the coordinator is silent, or reports that the worker was."""
    assert error.error_type == "WorkerError", error
    itself = rf"\b(worker |client-){error.rank} was lost: .*(silent|nothing was received)\b"
    assert re.search(itself, error.error) or ("coordinator" in error.error and host.address in error.error), (
        error
    )


@each(LOCKSTEP)
@faults(*FAULTS)
@lasting(*LONG_S, apart=[15.0])
def test_a_long_fault_ends_a_job_in_lockstep_and_the_silent_worker_is_named(
    tmp_path, name, fault_name, duration_s, is_apart
):
    with training(LOCKSTEP[name], WORKERS, tmp_path, has_service=is_apart) as job:
        all_ranks = job.all_workers
        broken_s, mended_s = fault(
            job, lambda: FAULTS[fault_name](job.places), duration_s, until_ended=all_ranks
        )
        ended = job.ends(all_ranks)
        print(job.measures(broken_s, mended_s))
        away = AWAY.get(fault_name, ())
        if fault_name == "rank 0's host" and not is_apart:
            away = (1, 2, 3, 4)
        silent = away or (1, 2)
        for rank in all_ranks:
            if rank in away and not is_apart:
                assert_names_the_coordinator(ended[rank], job.places[0])
            else:
                assert_names(ended[rank], *silent)


@each(ON_SERVERS)
@faults("one host", "half")
@lasting(*LONG_S, apart=[15.0])
def test_on_servers_a_long_fault_ends_workers_that_are_cut_off_and_the_others_train_on(
    tmp_path, name, fault_name, duration_s, is_apart
):
    on_servers_the_others_train_on(tmp_path, name, fault_name, duration_s, is_apart=is_apart)


@each(ON_SERVERS)
@durations(15.0)
def test_on_servers_with_the_coordinator_apart_rank_0s_host_is_like_any_other(tmp_path, name, duration_s):
    on_servers_the_others_train_on(tmp_path, name, "rank 0's host", duration_s, is_apart=True)


def on_servers_the_others_train_on(tmp_path, name, fault_name, duration_s, *, is_apart):
    away = AWAY[fault_name]
    others = tuple(rank for rank in range(WORKERS) if rank not in away)
    with training(ON_SERVERS[name], WORKERS, tmp_path, has_service=is_apart) as job:
        broken_s, mended_s = fault(job, lambda: FAULTS[fault_name](job.places), duration_s)
        job.trains_on(others)
        ended = job.ends(away)
        assert set(job.ended) == set(away), job.state()
        print(job.measures(broken_s, mended_s))
        for rank in away:
            assert_reports_the_cut(ended[rank], job.places[-1 if is_apart else 0])


@each(ON_SERVERS)
@durations(*LONG_S)
def test_on_servers_workers_without_the_coordinator_for_long_end_with_that_cause(tmp_path, name, duration_s):
    with training(ON_SERVERS[name], WORKERS, tmp_path) as job:
        others = job.all_workers[1:]
        broken_s, mended_s = fault(job, lambda: cut(job.places[0]), duration_s, until_ended=others)
        ended = job.ends(others)
        print(job.measures(broken_s, mended_s))
        for rank in others:
            assert_reports_the_cut(ended[rank], job.places[0])


@each(ON_SERVERS)
@faults(*PAIRS)
@lasting(15.0, apart=[15.0])
def test_on_servers_two_hosts_apart_for_15_s_stop_no_worker_for_good(
    tmp_path, name, fault_name, duration_s, is_apart
):
    with training(ON_SERVERS[name], WORKERS, tmp_path, has_service=is_apart) as job:
        broken_s, mended_s = fault(job, lambda: FAULTS[fault_name](job.places), duration_s)
        job.all_train_together()
        print(job.measures(broken_s, mended_s))


@each(ON_SERVERS)
@faults(*PAIRS)
@lasting(60.0, 120.0, apart=[60.0])
def test_on_servers_of_two_hosts_apart_for_long_one_is_removed(
    tmp_path, name, fault_name, duration_s, is_apart
):
    """Its server first, and then its worker, which does not reach the other's server: the others train on."""
    with training(ON_SERVERS[name], WORKERS, tmp_path, has_service=is_apart) as job:
        broken_s = time.monotonic()
        FAULTS[fault_name](job.places)
        ended = job.ends([2])
        job.trains_on([0, 1, 3, 4])
        job.let_pass(broken_s + duration_s - time.monotonic())
        job.trains_on([0, 1, 3, 4])
        mend(*job.places)
        mended_s = time.monotonic()
        job.trains_on([0, 1, 3, 4])
        assert set(job.ended) == {2}, job.state()
        print(job.measures(broken_s, mended_s))
        assert "worker 2 is out: it has not reached server-1 for more than 15 s" in ended[2].error, ended[2]


@faults("one host", "half", *PAIRS)
@lasting(*LONG_S, apart=[15.0])
def test_partial_trains_on_without_workers_that_are_cut_off_and_readmits_them(
    tmp_path, fault_name, duration_s, is_apart
):
    partial_trains_on(tmp_path, fault_name, duration_s, observer=0, is_apart=is_apart)


@durations(15.0)
def test_partial_with_the_coordinator_apart_trains_on_without_rank_0s_host(tmp_path, duration_s):
    partial_trains_on(tmp_path, "rank 0's host", duration_s, observer=1, is_apart=True)


def partial_trains_on(tmp_path, fault_name, duration_s, *, observer, is_apart):
    away = [AWAY[fault_name]] if fault_name in AWAY else [(1,), (2,)]
    groups = [tuple(rank for rank in range(WORKERS) if rank not in out) for out in away]
    with training(STEADY, WORKERS, tmp_path, has_service=is_apart) as job:
        broken_s = time.monotonic()
        FAULTS[fault_name](job.places)
        job.trains_on([observer], together=groups)
        job.let_pass(broken_s + duration_s - time.monotonic())
        job.trains_on([observer], together=groups)
        job.no_process_ended()
        mend(*job.places)
        mended_s = time.monotonic()
        job.all_train_together()
        print(job.measures(broken_s, mended_s))


@durations(*LONG_S)
def test_partial_pauses_while_the_coordinator_is_alone_and_then_continues(tmp_path, duration_s):
    with training(STEADY, WORKERS, tmp_path) as job:
        broken_s, mended_s = fault(job, lambda: cut(job.places[0]), duration_s)
        job.all_train_together()
        print(job.measures(broken_s, mended_s))


@durations(15.0)
def test_partial_pauses_while_a_coordinator_apart_reaches_less_than_half_and_then_continues(
    tmp_path, duration_s
):
    with training(STEADY, WORKERS, tmp_path, has_service=True) as job:
        broken_s, mended_s = fault(job, lambda: split(*job.places[-3:]), duration_s)
        job.all_train_together()
        print(job.measures(broken_s, mended_s))


@each(STRATEGIES)
@durations(15.0, 60.0)
def test_a_coordinator_apart_that_is_cut_off_for_long_loses_no_worker(tmp_path, name, duration_s):
    with training(STRATEGIES[name], WORKERS, tmp_path, has_service=True) as job:
        broken_s, mended_s = fault(job, lambda: cut(job.places[-1]), duration_s)
        job.all_train_together()
        job.let_pass(5.0)
        job.all_train_together()
        print(job.measures(broken_s, mended_s))


# The parameter server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loops", [0, 4], ids=["quiet", "busy"])
@durations(1.0, 3.0, 8.0)
def test_a_switch_that_is_down_costs_no_acknowledged_push_and_no_server(tmp_path, loops, duration_s):
    with busy(loops) if loops else nullcontext(), serving(SERVERS, tmp_path) as served:
        broken_s, mended_s = fault(served, lambda: cut(*served.places), duration_s)
        served.pushes_on()
        served.nothing_is_lost()
        print(served.measures(broken_s, mended_s))


@faults(*FAULTS)
@durations(3.0, 8.0)
def test_a_short_fault_costs_no_acknowledged_push_and_no_server(tmp_path, fault_name, duration_s):
    with serving(SERVERS, tmp_path) as served:
        broken_s, mended_s = fault(served, lambda: FAULTS[fault_name](served.places), duration_s)
        served.pushes_on()
        served.nothing_is_lost()
        print(served.measures(broken_s, mended_s))


@durations(*LONG_S)
def test_while_the_manager_is_alone_nothing_is_decided_and_nothing_is_lost(tmp_path, duration_s):
    with serving(SERVERS, tmp_path) as served:
        broken_s, mended_s = fault(served, lambda: cut(served.places[0]), duration_s)
        served.pushes_on()
        served.nothing_is_lost()
        print(served.measures(broken_s, mended_s))


@faults("one host", "half", *PAIRS)
@durations(*LONG_S)
def test_servers_that_are_apart_for_long_are_replaced_and_no_acknowledged_push_is_lost(
    tmp_path, fault_name, duration_s
):
    """The client is on the majority's side, with the manager; each key has two replicas."""
    with serving(SERVERS, tmp_path) as served:
        broken_s = time.monotonic()
        FAULTS[fault_name](served.places)
        served.pushes_on()
        served.let_pass(broken_s + duration_s - time.monotonic())
        served.pushes_on()
        mend(*served.places)
        mended_s = time.monotonic()
        served.pushes_on()
        served.nothing_is_lost(nor_anybody=False)
        print(served.measures(broken_s, mended_s))


@durations(3.0, *LONG_S)
def test_a_client_and_a_server_that_were_apart_continue_together(tmp_path, duration_s):
    with serving(SERVERS, tmp_path) as served:
        broken_s, mended_s = fault(served, lambda: part(served.places[2], served.places[-1]), duration_s)
        served.pushes_on()
        served.nothing_is_lost()
        print(served.measures(broken_s, mended_s))


@pytest.mark.parametrize(
    "pair",
    [(1, 2), (0, 1), (2, -1), (0, -1)],
    ids=["servers", "manager-server", "client-server", "client-manager"],
)
def test_a_reset_costs_no_acknowledged_push_and_no_server(tmp_path, pair):
    """The manager is on host 0, the client on the last one."""
    with serving(SERVERS, tmp_path) as served:
        began_s = time.monotonic()
        reset(*(served.places[place] for place in pair))
        served.pushes_on()
        served.nothing_is_lost()
        print(served.measures(began_s, began_s))


# Strangers -------------------------------------------------------------------------------------------------


def test_2000_strangers_that_send_nothing_keep_no_survivor_and_no_newcomer_out(tmp_path):
    with training(STEADY, 4, tmp_path, spare=2) as job:
        victim = 1
        addresses = [address for place in job.places[:4] for address in listening(place)]
        assert len(addresses) == 5  # the workers and the coordinator
        with strangers(job.places[-1], 2000, addresses):
            killed_s = time.monotonic()
            os.kill(job.pid(victim), signal.SIGKILL)
            job.trains_on([0, 2, 3], together=[(0, 2, 3)])
            newcomer = job.newcomer(STEADY)
            job.wait_for(
                lambda: any(len(one.members) == 4 for one in job.steps(newcomer)), "a step with the newcomer"
            )
            job.trains_on([0, 2, 3])
            assert set(job.ended) == {victim}, job.state()
            print(job.measures(killed_s, killed_s))
