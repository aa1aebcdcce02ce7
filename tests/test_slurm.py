"""Promises of deploy/slurm/train.sbatch, with a real Slurm cluster on this machine.

Needs root, and Slurm and munge: `make test-slurm` says what is missing.
"""

import json
import os

import pytest

from offbeat.events import Joined, Lost, Ready
from support.newcomer_training import EPOCHS, GATE_STEP, Gate
from support.run_logs import wait_until
from support.sample_counting import SAMPLES
from support.slurm_cluster import missing, slurm

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("OFFBEAT_TEST_SLURM") != "1",
        reason="set OFFBEAT_TEST_SLURM=1, as `make test-slurm` does",
    ),
    pytest.mark.skipif(missing() is not None, reason=f"a Slurm cluster on this machine needs {missing()}"),
]


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate


@pytest.fixture
def cluster(tmp_path):
    with slurm(tmp_path, 5) as running:
        yield running


@pytest.fixture
def job(cluster, gate, tmp_path):
    """Three workers and a spare node; the fifth node is for what is requeued."""
    return cluster.submit("python", "-m", "support.launched_training", str(tmp_path), nodes=4, env=gate.env)


def all_are_at_the_gate(job, workers):
    for worker in workers:
        job.wait_for(
            f"worker {worker} at the gate",
            lambda one, worker=worker: (
                isinstance(one, Ready) and one.worker == worker and one.step >= GATE_STEP - 1
            ),
        )


def results(folder, attempt=0):
    """Of the workers that left an attempt in order, by their ids; checks that all end with the same bits."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"result-{attempt}-*.json")]
    assert len({(one["digest"], one["step"]) for one in found}) == 1
    return {one["worker"]: one for one in found}


def assert_used_once_an_epoch(found):
    """Checks that every sample was used once an epoch, as each replica has it."""
    for one in found.values():
        assert one["uses"] == [float(EPOCHS)] * SAMPLES


def test_all_replicas_of_a_job_end_equal(job, gate, tmp_path):
    gate.open()
    job.wait_for_state("COMPLETED")
    found = results(tmp_path)
    assert_used_once_an_epoch(found)
    assert sorted(found) == [0, 1, 2]
    assert len({one["node"] for one in found.values()}) == 3


def test_a_killed_task_is_replaced_on_a_spare_node(job, gate, tmp_path):
    all_are_at_the_gate(job, range(3))
    job.kill_worker(1)
    job.wait_for("the loss", lambda one: isinstance(one, Lost) and one.worker == 1)
    job.wait_for("a newcomer", lambda one: isinstance(one, Joined) and one.worker == 3)
    gate.open()
    job.wait_for_state("COMPLETED")
    found = results(tmp_path)
    assert_used_once_an_epoch(found)
    assert sorted(found) == [0, 2, 3]
    assert found[3]["node"] == "node4"
    assert "task 1: Killed" in job.output()
    assert job.shown("Restarts") == "0"


def test_a_drained_node_that_then_goes_down_ends_no_job(job, cluster, gate, tmp_path):
    all_are_at_the_gate(job, range(3))
    cluster.run("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=maintenance")
    assert cluster.node_states()["node2"] == "drng"
    cluster.kill_node("node2")
    cluster.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=maintenance")
    job.wait_for("a newcomer", lambda one: isinstance(one, Joined) and one.worker == 3)
    gate.open()
    job.wait_for_state("COMPLETED")
    found = results(tmp_path)
    assert_used_once_an_epoch(found)
    assert sorted(found) == [0, 2, 3]
    assert {one["node"] for one in found.values()} == {"node1", "node3", "node4"}
    assert job.shown("Restarts") == "0"


def test_a_requeued_job_saves_at_the_signal_and_resumes_as_a_higher_attempt(job, cluster, gate, tmp_path):
    all_are_at_the_gate(job, range(3))
    cluster.run("scontrol", "requeue", str(job.number))
    wait_until(lambda: len(list(tmp_path.glob("signalled-*"))) == 3, "a signal to every worker")
    gate.open()
    job.wait_for_state("PENDING")
    cluster.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # Slurm adds two minutes
    job.wait_for_state("COMPLETED")
    assert job.shown("Restarts") == "1"
    saved, found = results(tmp_path, attempt=0), results(tmp_path, attempt=1)
    assert sorted(saved) == sorted(found) == [0, 1, 2]
    assert {one["preempted"] for one in saved.values()} == {True}
    assert {one["first"] for one in found.values()} == {saved[0]["step"]}
    assert_used_once_an_epoch(found)


def test_several_tasks_of_a_node_are_replaced_one_by_one(cluster, gate, tmp_path):
    job = cluster.submit(
        "python", "-m", "support.launched_training", str(tmp_path), nodes=3, tasks_per_node=2, env=gate.env
    )
    all_are_at_the_gate(job, range(4))
    for worker, newcomer in ((2, 4), (3, 5)):
        job.kill_worker(worker)
        job.wait_for(
            "a newcomer", lambda one, newcomer=newcomer: isinstance(one, Joined) and one.worker == newcomer
        )
    gate.open()
    job.wait_for_state("COMPLETED")
    found = results(tmp_path)
    assert_used_once_an_epoch(found)
    assert sorted(found) == [0, 1, 4, 5]
    assert [found[worker]["node"] for worker in sorted(found)] == ["node1", "node1", "node3", "node3"]


def test_a_job_whose_workers_all_fail_ends_as_failed(cluster):
    job = cluster.submit("false", nodes=3)
    job.wait_for_state("FAILED")
    assert "no worker is left" in job.output()


def test_a_job_without_its_first_node_resumes_when_it_is_requeued(job, cluster, gate, tmp_path):
    all_are_at_the_gate(job, range(3))
    cluster.kill_node("node1")
    cluster.run("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=maintenance")
    assert job.shown("JobState") == "RUNNING"
    gate.open()
    cluster.run("scontrol", "requeue", str(job.number))
    job.wait_for_state("PENDING")
    cluster.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    job.wait_for_state("COMPLETED")
    found = results(tmp_path, attempt=1)
    assert_used_once_an_epoch(found)
    assert sorted(found) == [0, 1, 2]
    assert min(one["first"] for one in found.values()) > 0
