"""Promises of training on a parameter server when real processes die, pause or join.

The others continue and end in time, or end with an error that names the cause; the rules of bounded staleness
hold; and no process of the job is left.
"""

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import offbeat
from offbeat.events import AssignBlocks, Lost, StepFinished
from offbeat.runtime.training import job_connection
from offbeat.strategies import ASP, SSP, Downpour, ServerBSP
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.coordinator_service import service
from support.group_training import compute
from support.jobs import command, job, marked
from support.newcomer_training import GATE, Gate, pass_gate
from support.processes import run, values
from support.run_logs import entries_of
from support.server_training import (
    BATCH,
    SAMPLES,
    Numbers,
    StepCounter,
    check_eager,
    check_equal,
    check_versioned,
    count_steps,
    each_once,
    uses,
    violations,
)

WORKERS, STEPS, MIDDLE = 2, 24, 6
SILENT_S = 2.5  # the default is 10 s


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate


def counts(rank, emit, strategy):
    """Takes steps, with a pause in the middle; returns the reads that `check_versioned` examines."""
    model = StepCounter(WORKERS, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reads = []
    with offbeat.join(model, optimizer, strategy) as session:
        synchronizer = session._synchronizer
        for step in range(STEPS):
            if step == MIDDLE:
                emit("now")
                pass_gate()
            optimizer.zero_grad()
            loss = model()
            compute(0.005)
            loss.backward()
            reads.append((synchronizer._clock, synchronizer._cache.read_version, model.counts_W.tolist()))
            optimizer.step()
    return reads, model.counts_W.tolist()


def servers(mark):
    return [pid for pid in marked(mark) if "offbeat.runtime.ps.server" in command(pid)]


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("strategy", "check"),
    [
        (SSP(s=2, shards="equal"), lambda found: check_versioned(found, 2, steps=STEPS)),
        (ASP(shards="equal"), lambda found: check_eager(found, steps=STEPS)),
    ],
    ids=["ssp", "asp"],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_server_loses_and_duplicates_no_step(gate, strategy, check, victim):
    env = {**gate.env, "OFFBEAT_SERVERS": "2"}
    with job(counts, WORKERS, strategy, env=env) as running:
        running.receive(*range(WORKERS))
        killed = sorted(servers(running.mark))[victim]
        gate.open()
        os.kill(killed, signal.SIGKILL)
        check(values(running.ends()))
    log = read_log(gate.log)
    assert violations(log) == []
    assert replay(log) is None


def check_rules(log, *lost):
    log = read_log(log)
    assert violations(log) == []
    assert replay(log) is None
    assert [one.worker for one in log.entries if isinstance(one, Lost)] == list(lost)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    "strategy", [ServerBSP(shards="equal"), SSP(s=2), ASP()], ids=lambda strategy: strategy.name
)
def test_the_others_continue_without_a_killed_worker(strategy, victim, tmp_path):
    log = tmp_path / "log.jsonl"
    with job(uses, 3, strategy, 6, victim, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        ended = running.ends()
    check_rules(log, victim)
    check_equal([one for one in ended if one.rank != victim])
    if strategy.shards == "dynamic":
        assert used_positions(log) == Counter(
            {(epoch, position): 1 for epoch in range(6) for position in range(SAMPLES)}
        )


def used_positions(log):
    """The number of finished steps with each position of an epoch; a lost worker's blocks are reassigned."""
    blocks = {block.id: block for assignment in entries_of(log, AssignBlocks) for block in assignment.blocks}
    return Counter(
        (blocks[block].epoch, position)
        for step in entries_of(log, StepFinished)
        for block in step.blocks
        for start, stop in blocks[block].ranges
        for position in range(start, stop)
    )


def fails_in_a_thread(rank, emit, strategy, victim):
    """Two worker threads, one of which fails in its second step; returns the others' final parameters."""

    def work(thread):
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = 0
        with offbeat.join(model, optimizer, strategy, thread=thread, threads=2) as session:
            for _ in session.epochs(3):
                for _, x in session.batches(Numbers(SAMPLES), BATCH):
                    steps += 1
                    if (session.worker, steps) == (victim, 2):  # also a slow worker takes that many steps
                        raise ValueError("a thread is broken")
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(work, thread) for thread in range(2)]
        found = [one.exception() or one.result() for one in ended]
    return [one for one in found if not isinstance(one, ValueError)]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize(
    "strategy", [ServerBSP(shards="equal"), SSP(s=2)], ids=lambda strategy: strategy.name
)
def test_the_others_continue_without_a_failed_thread_also_in_its_own_process(strategy, victim):
    ended = values(run(fails_in_a_thread, 2, replace(strategy, timeout_s=20.0), victim))
    found = [one for of_process in ended for one in of_process]
    assert len(found) == 3
    assert found == [found[0]] * 3


def fails_at_last(rank, emit, strategy):
    """The second of two threads of a process fails in its last step, after the first thread has finished."""
    is_through = threading.Event()

    def work(thread):
        model = StepCounter(4, 2 * rank + thread)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with offbeat.join(model, optimizer, strategy, thread=thread, threads=2) as session:
            for step in range(STEPS):
                optimizer.zero_grad()
                model().backward()
                if session.worker == 3 and step == STEPS - 1:
                    assert is_through.wait(30)
                    compute(0.5)  # probably until the other one has reported that it has finished
                    raise ValueError("a thread is broken")
                optimizer.step()
            if thread == 0:
                is_through.set()
        return model.counts_W.tolist()

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(work, thread) for thread in range(2)]
        found = [one.exception() or one.result() for one in ended]
    return [one for one in found if not isinstance(one, ValueError)]


def test_no_worker_waits_at_the_end_for_a_thread_that_failed_in_its_last_step():
    ended = values(run(fails_at_last, 2, SSP(s=2, shards="equal", timeout_s=15.0)))
    found = [one for of_process in ended for one in of_process]
    assert len(found) == 3
    assert found == [found[0]] * 3


def refreshes(rank, emit, strategy):
    """Refreshes after every third step; returns this worker's count of its own steps at each read."""
    reads, _ = count_steps(strategy, WORKERS, rank, steps=STEPS, refreshes_every=3)
    return [counts[rank] for _, _, counts in reads]


def test_parameters_prefetched_before_a_refresh_are_not_used_after_it():
    for found in values(run(refreshes, WORKERS, Downpour(shards="equal", n_fetch=1))):
        assert found == [float(step) for step in range(STEPS)]


def takes_a_long_warm_start(rank, emit, strategy):
    compute_s = 1.2 * strategy.timeout_s / strategy.warm_start
    steps = 2 if rank else strategy.warm_start
    return count_steps(strategy, WORKERS, rank, steps=steps, compute_s=compute_s)[1]


@pytest.mark.long
def test_a_warm_start_may_take_longer_than_the_deadline_of_a_step():
    strategy = Downpour(shards="equal", warm_start=12, timeout_s=15.0)  # a busy machine's first step: seconds
    assert values(run(takes_a_long_warm_start, WORKERS, strategy)) == [[12.0, 2.0]] * WORKERS


def uses_and_is_impatient(rank, emit, strategy):
    job_connection._SILENT_S = SILENT_S
    return uses(rank, emit, strategy)


@pytest.mark.long
def test_a_paused_worker_is_lost_and_the_others_continue(gate):
    with job(uses_and_is_impatient, 3, SSP(s=2), env=gate.env) as running:
        running.receive(0, 1, 2)
        running.signal(1, signal.SIGSTOP)
        gate.open()
        others = [running.end(0), running.end(2)]
        running.signal(1, signal.SIGCONT)
        stopped = running.end(1)
    check_equal(others)
    assert stopped.error_type == "WorkerError", stopped.trace
    assert "worker 1" in stopped.error
    check_rules(gate.log, 1)


@pytest.mark.long
def test_a_newcomer_trains_with_the_parameters_and_the_data_order_of_the_others(gate):
    env = {**gate.env, "OFFBEAT_SEED": "7"}
    with job(uses, 2, SSP(s=2), 16, hosts_store=True, env=env) as running:
        running.receive(0, 1)
        running.add(uses, SSP(s=2), 16, env={"OFFBEAT_SEED": "3"})
        gate.open()
        used = check_equal(running.ends())
    each_once(used, range(16))
    check_rules(gate.log)
    assert sum(isinstance(one, StepFinished) and one.worker == 2 for one in entries_of(gate.log)) > 1


def test_a_worker_and_the_coordinator_apart_are_started_again_on_servers(gate, tmp_path):
    """Worker 1 has one of the two servers; both are killed while there is no coordinator."""
    with service(tmp_path, log=gate.log) as coordinator:
        env = {**gate.env, **coordinator.env, "OFFBEAT_SERVERS": "2"}
        with job(uses, 2, SSP(s=2), 16, env=env) as running:
            running.receive(0, 1)
            coordinator.kill()
            running.signal(1, signal.SIGKILL)
            coordinator.start()
            place = {"OFFBEAT_NEWCOMER": "auto", "RANK": "1", "WORLD_SIZE": "2"}
            running.add(uses, SSP(s=2), 16, env=place)
            gate.open()
            ended = running.ends()
        assert coordinator.ended()[0] == 0
    del ended[1]
    each_once(check_equal(ended), range(1, 16))  # what worker 1 had applied in epoch 0 is not known here
    assert replay(read_log(gate.log)) is None


def test_training_continues_with_a_restarted_coordinator(gate):
    with job(uses, 3, SSP(s=2), env=gate.env) as running:
        running.receive(0, 1, 2)
        os.kill(running.coordinator(), signal.SIGKILL)
        gate.open()
        used = check_equal(running.ends())
    each_once(used, range(6))
    check_rules(gate.log)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", [SSP(s=2, timeout_s=4.0), ASP(timeout_s=4.0)], ids=["ssp", "asp"])
def test_without_any_server_every_worker_ends_with_an_error_that_names_it(gate, strategy):
    with job(uses, 2, strategy, env=gate.env) as running:
        running.receive(0, 1)
        (server,) = servers(running.mark)
        os.kill(server, signal.SIGKILL)
        gate.open()
        for one in running.ends():
            assert one.error_type == "WorkerError", one.trace
            assert "server" in one.error, one.error


def dies_first(rank, emit, victim):
    """One worker dies when all have joined and before any step."""
    model = StepCounter(WORKERS, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with offbeat.join(model, optimizer, SSP(s=2, shards="equal")) as session:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
    return session.step, model.counts_W.tolist()


def test_a_worker_that_dies_before_its_first_step_is_not_waited_for():
    with job(dies_first, WORKERS, 1) as running:
        assert running.end(0).value == (3, [3.0, 0.0])
        running.died(1)


def test_without_the_parameters_of_the_first_worker_no_other_worker_begins():
    with job(dies_first, WORKERS, 0) as running:
        ended = running.end(1)
    assert ended.error_type == "WorkerError"
    assert "worker 0 is out, and the others do not have its initial parameters" in ended.error


def test_a_newcomer_waits_for_the_first_workers_parameters_where_training_has_not_begun(gate):
    env = {**gate.env, "OFFBEAT_SEED": "7"}
    with job(uses, 2, SSP(s=2), 6, None, {1: GATE}, hosts_store=True, env=env) as running:
        running.receive(0, 1)
        running.add(uses, SSP(s=2), 6, env={"OFFBEAT_SEED": "3"})
        gate.open_for(2)
        each_once(check_equal(running.ends()), range(6))
    check_rules(gate.log)
