"""Promises of `offbeat.ray`, with real Ray clusters of several nodes on this machine.

`make test-ray` installs Ray and runs this file.
"""

import os
import signal
import socket
import ssl
from contextlib import contextmanager

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from ray.train.v2._internal.execution.checkpoint.sync_actor import (
    SynchronizationBarrierResetError,
)

import offbeat.ray
from offbeat.errors import OffbeatError
from offbeat.events import Joined, Lost, SamplesRequested, ServerRemovalRequested
from offbeat.ray.reports import ReportLedger
from offbeat.runtime.transport.addresses import read_host_and_port
from support.certificates import Authority
from support.newcomer_training import EPOCHS, Gate
from support.ray_cluster import ray_cluster, ray_driver, ray_run
from support.ray_training import FIRST_GATE, SECOND_GATE
from support.run_logs import entries_of
from support.sample_counting import SAMPLES
from support.server_training import each_once

pytestmark = pytest.mark.skipif(
    os.environ.get("OFFBEAT_TEST_RAY") != "1", reason="set OFFBEAT_TEST_RAY=1, as `make test-ray` does"
)


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate


@pytest.fixture
def cluster():
    with ray_cluster() as running:
        yield running


def trained_once(run):
    """Waits for the run's end; returns the results of its last job by worker.

    Checks that all replicas end with the same bits, that each has every sample once an epoch, and that Ray
    has the last report.
    """
    metrics, checkpoint = run.ends()
    found = run.results()
    assert len({job for job, _ in found}) == 1
    assert len({(one["digest"], one["step"]) for one in found.values()}) == 1
    for one in found.values():
        assert one["uses"] == [float(EPOCHS)] * SAMPLES
    assert checkpoint is not None
    assert metrics["epoch"] == EPOCHS - 1
    return {worker: one for (_, worker), one in found.items()}


def trained_on_servers_once(run):
    """Checks of a run that has ended that both workers have equal parameters, and used each sample once."""
    found = run.results().values()
    assert len(found) == 2
    assert len({tuple(one["last"]) for one in found}) == 1
    each_once([{int(epoch): used for epoch, used in one["used"].items()} for one in found], range(EPOCHS))


def jobs_of(run):
    return {job for job, _ in run.started()}


def test_all_replicas_end_equal_and_the_last_report_arrives(cluster, gate):
    for _ in range(3):
        cluster.add_node()
    with ray_run(cluster, gate) as run:
        gate.open()
        found = trained_once(run)
    assert sorted(found) == [0, 1, 2]
    assert len({one["node"] for one in found.values()}) == 3
    assert list(run.folder.glob("run/offbeat-*")) == []


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_worker_comes_back_alone_and_the_others_go_on(cluster, gate, rank):
    for _ in range(3):
        cluster.add_node()
    with ray_run(cluster, gate) as run:
        run.all_are_at_the_gate(range(3))
        (job,) = jobs_of(run)
        before = run.started()
        os.kill(before[job, rank]["pid"], signal.SIGKILL)
        run.wait_for_entry("a newcomer", lambda one: isinstance(one, Joined) and one.worker == 3)
        gate.open()
        found = trained_once(run)
    others = {0, 1, 2} - {rank}
    assert sorted(found) == [*sorted(others), 3]
    assert found[3]["rank"] == rank
    assert {found[worker]["pid"] for worker in others} == {before[job, worker]["pid"] for worker in others}


def test_a_node_with_a_worker_and_the_coordinator_is_survived_and_a_node_that_comes_is_used(cluster, gate):
    first = cluster.add_node(coordinator=1)
    for _ in range(2):
        cluster.add_node()
    with ray_run(cluster, gate, coordinator_options={"resources": {"coordinator": 1}}) as run:
        run.all_are_at_the_gate(range(3))
        (job,) = jobs_of(run)
        before = run.started()
        (lost,) = [worker for (_, worker), one in before.items() if one["node"] == first.node_id]
        cluster.kill_node(first)
        second = cluster.add_node(coordinator=1)
        run.wait_for_entry("the loss", lambda one: isinstance(one, Lost) and one.worker == lost)
        run.wait_for_entry("a newcomer", lambda one: isinstance(one, Joined) and one.worker == 3)
        gate.open()
        found = trained_once(run)
    others = {0, 1, 2} - {lost}
    assert sorted(found) == [*sorted(others), 3]
    assert found[3]["node"] == second.node_id
    assert {found[worker]["pid"] for worker in others} == {before[job, worker]["pid"] for worker in others}


def test_the_others_finish_without_a_node_that_is_gone_and_its_worker_ends_when_it_comes_too_late(
    cluster, gate
):
    first = cluster.add_node()
    for _ in range(2):
        cluster.add_node()
    with ray_run(cluster, gate, env={"OFFBEAT_START_S": "20"}) as run:
        run.all_are_at_the_gate(range(3))
        (lost,) = [worker for (_, worker), one in run.started().items() if one["node"] == first.node_id]
        cluster.kill_node(first)
        run.wait_for_entry("the loss", lambda one: isinstance(one, Lost) and one.worker == lost)
        gate.open()
        run.wait_for("the end of the others", lambda: len(run.results()) == 2)
        cluster.add_node()
        run.ends()
        assert "the others have finished" in run.output()
    for one in run.results().values():
        assert one["uses"] == [float(EPOCHS)] * SAMPLES


def test_an_elastic_run_begins_again_from_the_checkpoint_with_a_node_that_has_come(cluster, gate):
    for _ in range(2):
        cluster.add_node()
    with ray_run(cluster, gate, workers=[2, 3], monitor_s=1.0) as run:
        run.all_are_at_the_gate(range(2))
        (job,) = jobs_of(run)
        cluster.add_node()
        run.wait_for("three workers", lambda: len([one for one, _ in run.started() if one != job]) == 3)
        gate.open()
        found = trained_once(run)
    assert sorted(found) == [0, 1, 2]
    assert min(one["first"] for one in found.values()) > 0


def test_all_workers_begin_again_where_the_strategy_survives_no_death(cluster, gate):
    for _ in range(2):
        cluster.add_node()
    with ray_run(cluster, gate, workers=2, strategy="bsp") as run:
        run.all_are_at_the_gate(range(2))
        (job,) = jobs_of(run)
        os.kill(run.started()[job, 1]["pid"], signal.SIGKILL)
        run.wait_for("another job", lambda: len(run.started()) == 4)
        gate.open()
        found = trained_once(run)
    assert sorted(found) == [0, 1]
    assert min(one["first"] for one in found.values()) > 0


def test_a_node_with_a_parameter_server_is_survived_and_another_server_takes_its_place(cluster, gate):
    for _ in range(2):
        cluster.add_node()
    first, _ = [cluster.add_node(cpus=0, server=1) for _ in range(2)]
    options = {"num_cpus": 0, "resources": {"server": 1}}
    with ray_run(cluster, gate, workers=2, strategy="ssp", servers=2, server_options=options) as run:
        for worker in range(2):
            run.wait_for_entry(
                f"worker {worker} at work",
                lambda one, worker=worker: isinstance(one, SamplesRequested) and one.worker == worker,
            )
        run.wait_for("two servers", lambda: len(run.ring()) == 2)
        before = run.ring()
        cluster.kill_node(first)
        cluster.add_node(cpus=0, server=1)
        run.wait_for("another server", lambda: len(run.ring()) == 2 and len(run.ring() & before) == 1)
        gate.open()
        run.ends()
    trained_on_servers_once(run)


def test_servers_are_added_and_removed_while_workers_train(cluster, gate):
    for _ in range(2):
        cluster.add_node()
    for _ in range(3):
        cluster.add_node(cpus=0, server=1)
    options = {"num_cpus": 0, "resources": {"server": 1}}
    settings = {"workers": 2, "strategy": "ssp", "servers": 2, "server_options": options}
    with (
        Gate(gate.log.parent, SECOND_GATE) as second,
        ray_run(cluster, gate, env=second.env, **settings) as run,
    ):
        run.wait_for("two servers", lambda: len(run.ring()) == 2)
        before = run.ring()
        run.scale_servers(3)
        run.wait_for("three servers", lambda: len(run.ring()) == 3)
        during = run.ring()
        gate.open()
        run.wait_for_entry(
            "steps on three servers", lambda one: isinstance(one, SamplesRequested) and one.epoch > 0
        )
        run.scale_servers(1)
        run.wait_for("one server", lambda: len(run.ring()) == 1)
        after = run.ring()
        second.open()
        run.ends()
    assert after < before < during
    assert {one.server for one in entries_of(gate.log, ServerRemovalRequested)} == during - after
    trained_on_servers_once(run)


def test_a_coordinator_that_is_killed_is_found_where_the_storage_is_no_shared_file_system(cluster, gate):
    for _ in range(2):
        cluster.add_node()
    for _ in range(2):
        cluster.add_node(cpus=0, server=1)
    options = {"num_cpus": 0, "resources": {"server": 1}}
    settings = {"workers": 2, "strategy": "ssp", "servers": 1, "server_options": options}
    with ray_run(cluster, gate, storage="subtree", **settings) as run:
        run.wait_for("a server", lambda: len(run.ring()) == 1)
        killed = run.coordinator()
        os.kill(killed, signal.SIGKILL)
        run.wait_for("another coordinator", lambda: run.coordinator() not in (None, killed))
        run.scale_servers(2)
        run.wait_for("two servers", lambda: len(run.ring()) == 2)
        gate.open()
        run.ends()
        assert len(jobs_of(run)) == 1
    trained_on_servers_once(run)


def test_no_server_is_removed_before_the_first_ones_are_there(cluster, gate):
    for _ in range(2):
        cluster.add_node()
    cluster.add_node(cpus=0, server=1)
    options = {"num_cpus": 0, "resources": {"server": 0.5}}
    settings = {"workers": 2, "strategy": "ssp", "servers": 2, "server_options": options}
    with Gate(gate.log.parent, FIRST_GATE) as first, ray_run(cluster, gate, env=first.env, **settings) as run:
        run.wait_for("two workers", lambda: len(run.started()) == 2)
        with (
            ray_driver(cluster),
            pytest.raises(OffbeatError, match=r"expected all parameter servers .*no server was removed"),
        ):
            offbeat.ray.scale_servers("run", 1)
        first.open()
        run.wait_for("two servers", lambda: len(run.ring()) == 2)
        gate.open()
        run.ends()
    trained_on_servers_once(run)


@contextmanager
def run_on_two_servers(cluster, gate, **settings):
    """A run whose workers stand still; with it, the process of the older server and that of the newer one."""
    for _ in range(2):
        cluster.add_node()
    for _ in range(2):
        cluster.add_node(cpus=0, server=1)
    options = {"num_cpus": 0, "resources": {"server": 1}}
    with ray_run(cluster, gate, workers=2, servers=1, server_options=options, **settings) as run:
        run.wait_for("a server", lambda: len(run.ring()) == 1)
        (older,) = run.servers()
        run.scale_servers(2)
        run.wait_for("two servers", lambda: len(run.ring()) == 2)
        (newer,) = set(run.servers()) - {older}
        yield run, older, newer


def is_not_removed(cluster, problem):
    """Checks that the newer of two servers is reported with this problem when it is to be removed."""
    with (
        ray_driver(cluster),
        pytest.raises(OffbeatError, match=rf"in actor [0-9a-f]+ {problem}.* Servers that are left: 1"),
    ):
        offbeat.ray.scale_servers("run", 1)


def test_a_server_whose_parameters_no_other_takes_over_is_reported_and_the_job_begins_again(cluster, gate):
    with run_on_two_servers(cluster, gate, strategy="ssp without replicas") as (run, older, _):
        os.kill(older, signal.SIGSTOP)
        is_not_removed(cluster, "did not hand its parameters over to other servers")
        os.kill(older, signal.SIGCONT)
        gate.open()
        run.ends()
        assert "of parameters-0 are lost" in run.output()
    trained_on_servers_once(run)


def test_a_server_that_does_not_leave_is_reported_and_killed_and_the_workers_go_on(cluster, gate):
    with run_on_two_servers(cluster, gate, strategy="ssp") as (run, _, newer):
        os.kill(newer, signal.SIGSTOP)
        is_not_removed(cluster, "did not leave within 90 s, and was killed")
        run.wait_for("one server", lambda: len(run.ring()) == 1)
        gate.open()
        run.ends()
        assert len(jobs_of(run)) == 1
    trained_on_servers_once(run)


def test_two_runs_of_one_name_train_and_neither_is_scaled_by_that_name(cluster, gate, tmp_path):
    for _ in range(4):
        cluster.add_node()
    cluster.add_node(cpus=2)
    folder = tmp_path / "second"
    folder.mkdir()
    settings = {"workers": 2, "strategy": "ssp", "servers": 1}
    with (
        Gate(folder) as second,
        ray_run(cluster, gate, **settings) as one,
        ray_run(cluster, second, **settings) as other,
    ):
        for run in (one, other):
            run.wait_for("a server", lambda run=run: len(run.ring()) == 1)
        with (
            ray_driver(cluster),
            pytest.raises(OffbeatError, match=r"expected one run named 'run' .*, got 2"),
        ):
            offbeat.ray.scale_servers("run", 2)
        gate.open()
        second.open()
        for run in (one, other):
            run.ends()
            trained_on_servers_once(run)


def test_a_run_without_servers_of_its_own_has_none_to_scale(cluster):
    with ray_driver(cluster):
        with pytest.raises(OffbeatError, match=r"servers of its own .*, got 'run'"):
            offbeat.ray.scale_servers("run", 2)
        with pytest.raises(ValueError, match="expected at least 1 parameter server, got 0"):
            offbeat.ray.scale_servers("run", 0)


def test_workers_servers_and_the_coordinator_of_a_run_with_certificates_use_tls(cluster, gate, tmp_path):
    authority = Authority(tmp_path)
    for _ in range(3):
        cluster.add_node()
    with ray_run(cluster, gate, workers=2, strategy="ssp", servers=1, env=authority.issue("node").env) as run:
        run.wait_for("a server", lambda: len(run.ring()) == 1)
        (address,) = tmp_path.glob("run/offbeat-*/address")
        context = ssl.create_default_context(cafile=authority.certificate)
        context.check_hostname = False
        with (
            socket.create_connection(read_host_and_port(str(address))) as plain,
            context.wrap_socket(plain) as encrypted,
        ):
            assert encrypted.version() == "TLSv1.3"
        gate.open()
        run.ends()
    trained_on_servers_once(run)


def skips(ledger, rank, report):
    try:
        ledger.check(rank, report)
    except SynchronizationBarrierResetError:
        return True
    return False


def test_a_report_is_made_by_all_workers_or_by_none():
    ledger = ReportLedger()
    assert not skips(ledger, 0, (0, 0))
    assert not skips(ledger, 1, (0, 0))
    assert not skips(ledger, 0, (1, 0))
    ledger.lose(1)
    assert skips(ledger, 2, (1, 0))  # under way, and dropped by Ray
    assert skips(ledger, 0, (2, 0))
    assert skips(ledger, 1, (3, 0))  # its replacement, at its first
    assert skips(ledger, 2, (2, 0))
    assert skips(ledger, 0, (3, 0))
    assert skips(ledger, 2, (3, 0))
    assert not skips(ledger, 2, (3, 1))
    assert not skips(ledger, 1, (3, 1))


def test_reports_are_skipped_until_all_replacements_are_back():
    ledger = ReportLedger()
    ledger.lose(0)
    ledger.lose(1)
    assert skips(ledger, 0, (0, 0))
    assert skips(ledger, 2, (1, 0))
    assert skips(ledger, 1, (1, 0))
    assert not skips(ledger, 0, (2, 0))
