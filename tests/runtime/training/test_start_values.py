"""Values that workers give to each other before they join their job."""

import subprocess
import sys

import pytest
import torch

import offbeat
from offbeat.errors import OffbeatError
from offbeat.strategies import AllReduce
from support.processes import run, start, unlaunched_environ, values

WORKERS = 3


def agree_then_train(rank, emit):
    """Exchanges values before a session and within it, twice in one process."""
    found = []
    for _ in range(2):
        offbeat.barrier()
        found.append(offbeat.broadcast_object({"folder": f"of {rank}", "ids": (rank, 1)}))
        found.append({one: value.tolist() for one, value in offbeat.gather_objects(torch.ones(rank)).items()})
        model = torch.nn.Linear(2, 1)
        with offbeat.join(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce()) as session:
            found.append(session.gather_objects(rank))
    return found


def test_workers_agree_before_they_join():
    once = [
        {"folder": "of 0", "ids": (0, 1)},
        {0: [], 1: [1.0], 2: [1.0, 1.0]},
        {0: 0, 1: 1, 2: 2},
    ]
    for found in values(run(agree_then_train, WORKERS)):
        assert found == 2 * once


def call_late(rank, emit):
    if rank < 2:
        offbeat.barrier(timeout_s=2.0)


def test_who_does_not_call_in_time_is_named():
    first, second, _ = run(call_late, WORKERS)
    for ended in (first, second):
        assert ended.error_type == "WorkerError"
        assert "offbeat.barrier(): worker" in ended.error
        assert "of workers [2]" in ended.error


def call_differently(rank, emit):
    if rank == 1:
        offbeat.broadcast_object(1)
    else:
        offbeat.gather_objects(1)


def test_another_call_is_named():
    for ended in run(call_differently, WORKERS):
        assert "called offbeat.gather_objects() while" in ended.error or (
            "called offbeat.broadcast_object() while" in ended.error
        )


def give_too_much(rank, emit):
    offbeat.gather_objects("x" * 10**6, timeout_s=5.0)


def test_a_value_that_is_too_large_is_refused():
    for ended in run(give_too_much, 2):
        assert "offbeat.gather_objects() is for small values" in ended.error


def alone(rank, emit):
    offbeat.barrier()
    return offbeat.gather_objects(7), offbeat.broadcast_object("mine")


def test_a_newcomer_and_a_single_worker_are_alone():
    assert values(run(alone, 1)) == [({0: 7}, "mine")]
    with start(alone, 0) as cluster:
        cluster.add(alone, (), {"RANK": "1", "WORLD_SIZE": "3"})
        assert values(cluster.ends()) == [({0: 7}, "mine")]


def test_with_a_coordinator_of_its_own_a_job_has_no_store(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("OFFBEAT_COORDINATOR", "127.0.0.1:9")):
        monkeypatch.setenv(name, value)
    with pytest.raises(OffbeatError, match=r"none where OFFBEAT_COORDINATOR is set: call it on the session"):
        offbeat.barrier()


SCRIPT = """
import os, offbeat
print(offbeat.gather_objects(os.environ["RANK"]), flush=True)
offbeat.barrier()
"""


def test_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, str(tmp_path / "script.py")], capture_output=True, env=unlaunched_environ(), timeout=120
    )
    assert ended.stdout.decode().count("{0: '0', 1: '1'}") == 2
