"""Servers of a training job that no worker has started: `offbeat serve`, with real processes."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from offbeat.events import ClusterView
from offbeat.strategies import SSP
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.coordinator_service import DEADLINE_S, service
from support.jobs import command, job, marked
from support.newcomer_training import Gate, train
from support.run_logs import wait_for_entry
from support.server_training import check_equal, each_once, uses

EPOCHS = 6


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate


@pytest.fixture
def coordinator(tmp_path, gate):
    with service(tmp_path, log=gate.log) as running:
        yield running


def has_ring(log, servers):
    """Waits until these servers, and no others, have all data."""
    wait_for_entry(
        log,
        f"a ring of {servers}",
        lambda one: isinstance(one, ClusterView) and sorted(one.ring) == servers and not one.next_ring,
    )


@contextmanager
def started_server(coordinator, **variables):
    """`offbeat serve`, as a container runs it."""
    env = {**os.environ, **coordinator.env, "OFFBEAT_START_S": "60", **variables}
    process = subprocess.Popen(
        [sys.executable, "-m", "offbeat", "serve"], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def id_of(server):
    """Waits until it has joined; it ends by itself if it cannot."""
    found = re.fullmatch(r"server (\d+) of 'job'\n", server.stderr.readline())
    assert found is not None
    return int(found[1])


def end_of(server, timeout_s=DEADLINE_S):
    _, errors = server.communicate(timeout=timeout_s)
    return server.returncode, errors


def test_servers_that_wait_for_a_job_serve_it_and_end_with_it(coordinator, gate):
    gate.open()
    env = {**gate.env, **coordinator.env, "OFFBEAT_SERVERS_APART": "2"}
    with started_server(coordinator) as first, started_server(coordinator) as second:
        with job(uses, 2, SSP(s=2), EPOCHS, env=env) as running:
            used = check_equal(running.ends())
            assert [pid for pid in marked(running.mark) if "runtime.ps.server" in command(pid)] == []
        for server in (first, second):
            code, errors = end_of(server)
            assert code == 0, errors
            assert "of 'job'" in errors
    each_once(used, range(EPOCHS))
    assert coordinator.ended()[0] == 0
    assert replay(read_log(gate.log)) is None


@pytest.mark.long(after=1)
def test_every_server_of_a_job_may_be_replaced_by_another(coordinator, gate):
    env = {**gate.env, **coordinator.env, "OFFBEAT_SERVERS_APART": "2"}
    with (
        started_server(coordinator) as first,
        started_server(coordinator) as second,
        job(uses, 2, SSP(s=2), EPOCHS, env=env) as running,
    ):
        running.receive(0, 1)
        first.send_signal(signal.SIGKILL)
        with started_server(coordinator) as third:
            servers = sorted(map(id_of, (second, third)))
            has_ring(gate.log, servers)
            second.send_signal(signal.SIGTERM)
            assert end_of(second)[0] == 128 + signal.SIGTERM
            gate.open()
            used = check_equal(running.ends())
            assert end_of(third)[0] == 0
    each_once(used, range(EPOCHS))


@pytest.mark.long
def test_a_server_that_cannot_hand_its_data_over_says_so_and_the_job_goes_on_with_the_replicas(
    coordinator, gate
):
    env = {**gate.env, **coordinator.env, "OFFBEAT_SERVERS_APART": "2"}
    with (
        started_server(coordinator) as first,
        started_server(coordinator) as second,
        job(uses, 2, SSP(s=2), EPOCHS, env=env) as running,
    ):
        running.receive(0, 1)
        server = id_of(first)
        coordinator.kill()
        first.send_signal(signal.SIGTERM)
        code, errors = end_of(first, 2 * DEADLINE_S)
        assert code == 2, errors
        assert f"server {server} ends without having handed its data over" in errors
        coordinator.start()
        gate.open()
        used = check_equal(running.ends())
        assert end_of(second)[0] == 0
    each_once(used, range(EPOCHS))


def late(rank, emit, strategy, log):
    """Worker 1 comes when the servers have their ring."""
    if rank == 1:
        wait_for_entry(log, "a ring", lambda one: isinstance(one, ClusterView) and one.ring)
    return uses(rank, emit, strategy, EPOCHS)


def test_a_worker_that_comes_after_the_servers_belongs_to_the_first_workers(coordinator, gate):
    gate.open()
    env = {**gate.env, **coordinator.env, "OFFBEAT_SERVERS_APART": "1"}
    with started_server(coordinator) as server:
        with job(late, 2, SSP(s=2), gate.log, env=env) as running:
            used = check_equal(running.ends())
        assert end_of(server)[0] == 0
    each_once(used, range(EPOCHS))


def test_servers_of_a_job_that_has_lost_all_workers_end_and_others_serve_it_when_it_begins_again(
    coordinator, gate
):
    env = {**gate.env, **coordinator.env, "OFFBEAT_SERVERS_APART": "1"}
    with started_server(coordinator) as server, job(uses, 2, SSP(s=2), EPOCHS, env=env) as running:
        running.receive(0, 1)
        for worker in range(2):
            running.signal(worker, signal.SIGKILL)
        code, errors = end_of(server)
        assert code == 2, errors
        assert "no worker is left" in errors
        running.ends()
    gate.open()
    with started_server(coordinator) as server:
        with job(uses, 2, SSP(s=2), EPOCHS, env=env) as running:
            used = check_equal(running.ends())
        assert end_of(server)[0] == 0
    each_once(used, range(EPOCHS))


def test_a_job_without_a_parameter_server_refuses_servers(coordinator, gate):
    with job(train, 3, env={**gate.env, **coordinator.env}) as running:
        with started_server(coordinator) as server:
            code, errors = end_of(server)
        gate.open()
        running.ends()
    assert code == 2
    assert errors.endswith(
        "this process cannot take part in the job: its strategy has no parameter server: start no server, or "
        "choose another strategy\n"
    )


def test_a_server_waits_no_longer_for_a_job_than_it_was_told(coordinator):
    with started_server(coordinator, OFFBEAT_START_S="0.5") as server:
        code, errors = end_of(server)
    assert code == 2
    assert f"the coordinator at tcp://{coordinator.address} did not answer" in errors


def test_a_server_needs_a_cluster_file_or_a_coordinator(coordinator):
    with started_server(coordinator, OFFBEAT_COORDINATOR="") as server:
        code, errors = end_of(server)
    assert code == 2
    assert "expected FILE, a cluster file, or OFFBEAT_COORDINATOR=HOST:PORT" in errors
