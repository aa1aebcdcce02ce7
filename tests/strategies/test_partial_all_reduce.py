"""Promises of strategies whose groups change, with real workers: slow, recovering, killed, stopped.

After any fault of a worker, the others hold the same bits after every step, and all that are left hold them
at the end.
"""

import os
import signal

import pytest
import torch
from torch.utils.data import TensorDataset

import offbeat
from offbeat.events import EndEpoch, Lost
from offbeat.runtime.collectives import link_exchange
from offbeat.strategies import AllReduce, PartialAllReduce
from offbeat.wire.log_file import read_log
from support.group_training import BATCH, EPOCHS, SAMPLES, STRATEGY, agree, compute, train
from support.jobs import job
from support.processes import run, values
from support.run_logs import groups_of, wait_for_group_without
from support.sample_counting import SAMPLES as COUNTED
from support.sample_counting import Counter, once_each, take

NEVER_S = 600.0  # longer than any test's job may run


def test_partial_without_slow_workers_is_all_reduce_bit_for_bit():
    lockstep = values(run(train, 3, AllReduce(), 2))
    partial = values(run(train, 3, PartialAllReduce(limit=10**6, shards="equal"), 2))
    assert [states for states, _ in partial] == [states for states, _ in lockstep]


class PatientPartialAllReduce(PartialAllReduce):
    """Waits for silent workers much longer than the test takes, so that only the classifier excludes one."""

    def _group_arguments(self):
        return {**super()._group_arguments(), "patience_min_s": NEVER_S, "halt_timeout_s": NEVER_S}


def test_a_slow_worker_is_left_out_and_holds_the_final_state_all_the_same(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20", "OFFBEAT_RUN_LOG": str(log)}
    results = values(run(train, 3, PatientPartialAllReduce(k=5.0, limit=3, n_profile=2), env=env))
    agree(results)
    groups = groups_of(log)
    without = [number for number, group in enumerate(groups) if group.members == (0, 2)]
    assert without
    assert groups[without[0]].reason.startswith("worker 1: compute time above")
    # It gets the state when the others have finished, in the last group or before.
    assert any(group.joining == (1,) for group in groups[without[0] :])
    assert len(results[0][0]) > 2 * len(results[1][0])
    assert any(isinstance(entry, EndEpoch) for entry in read_log(log).entries)


def test_a_recovered_worker_returns_with_the_state_of_the_others(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20@burst=8/100000", "OFFBEAT_RUN_LOG": str(log)}
    results = values(run(train, 3, STRATEGY, 20, env=env))
    agree(results)
    back = [group for group in groups_of(log) if 1 in group.joining]
    assert back
    assert back[0].step in results[0][0]
    assert max(results[1][0]) > back[0].step


def stop_without_worker_1(rank, emit, shards):
    """Workers 0 and 2 end their loop after the first step without worker 1, which trains on."""
    strategy = PatientPartialAllReduce(k=5.0, limit=3, n_profile=2, shards=shards)
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dataset = TensorDataset(torch.arange(COUNTED))
    with offbeat.join(model, optimizer, strategy) as session:
        batches = (batch for _ in session.epochs(4) for (batch,) in session.batches(dataset, BATCH))
        for numbers in batches:
            compute(0.005)
            (-model(numbers)).backward()
            once_each(model)
            take(model, optimizer)
            if rank != 1 and 1 not in session.members:
                break
        batches.close()
    return model.uses_N.tolist()


@pytest.mark.long(after=1)
@pytest.mark.parametrize("shards", ["dynamic", "equal"])
def test_a_worker_outside_trains_on_with_the_state_of_members_that_have_finished(shards, tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20", "OFFBEAT_RUN_LOG": str(log)}
    first, *others = values(run(stop_without_worker_1, 3, shards, env=env))
    assert others == [first, first]
    assert (1,) in [group.members for group in groups_of(log)]
    if shards == "dynamic":
        assert set(first) == {4.0}


class SignalAtStep:
    """Sends this process a signal at a step, once."""

    def __init__(self, emit, step, number=signal.SIGKILL):
        self._emit, self._step, self._number = emit, step, number

    def __call__(self, session):
        if session.step == self._step:
            self._step = -1
            self._emit("now")
            os.kill(os.getpid(), self._number)


def dies_in_compute(rank, emit, victims):
    return train(rank, emit, before_step=SignalAtStep(emit, 7) if rank in victims else None)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("victims", [(0,), (2,), (0, 1), (1, 2, 3)], ids=str)
def test_the_others_continue_when_workers_are_killed(victims):
    with job(dies_in_compute, 4, victims) as running:
        ended = running.ends()
    alive = [one for one in ended if one.rank not in victims]
    results = values(alive)
    agree(results)
    assert all(max(states) >= SAMPLES // BATCH // 4 * EPOCHS for states, _ in results)


def dies_while_another_is_slow(rank, emit, victim):
    strategy = PartialAllReduce(limit=10**6)
    return train(rank, emit, strategy, 2, SignalAtStep(emit, 4) if rank == victim else None)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_continue_when_a_worker_is_killed_while_another_still_computes(victim):
    """The slow worker is still bound to the old group when it reaches the exchange; the new group exists."""
    with job(dies_while_another_is_slow, 3, victim, env={"OFFBEAT_SLOW": "1:20"}) as running:
        ended = running.ends()
    results = values([one for one in ended if one.rank != victim])
    agree(results)
    assert all(max(states) >= SAMPLES // BATCH // 3 * 2 for states, _ in results)


def dies_in_the_exchange(rank, emit, victim, share):
    def fault(session):
        if rank == victim and session.step == 5:
            arrived = link_exchange._ScheduleRun._on_complete

            def die_on_the_way(self, number, first, last):
                if self._to_receive - (last - first) <= self._plan.received * share:
                    os.kill(os.getpid(), signal.SIGKILL)
                arrived(self, number, first, last)

            link_exchange._ScheduleRun._on_complete = die_on_the_way

    return train(rank, emit, before_step=fault, width=20_000)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_round_that_a_death_breaks_is_repeated_or_taken_over(victim, share, tmp_path):
    log = tmp_path / "log.jsonl"
    with job(dies_in_the_exchange, 3, victim, share, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        ended = running.ends()
    agree(values([one for one in ended if one.rank != victim]))
    assert any(isinstance(entry, Lost) and entry.worker == victim for entry in read_log(log).entries)


def stops_in_compute(rank, emit):
    strategy = PartialAllReduce(limit=3, n_profile=2)
    return train(rank, emit, strategy, 30, SignalAtStep(emit, 7, signal.SIGSTOP) if rank == 1 else None)


@pytest.mark.long
def test_a_worker_that_hangs_is_excluded_and_returns_when_it_resumes(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(stops_in_compute, 3, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.receive(1)
        wait_for_group_without(log, 1)
        running.signal(1, signal.SIGCONT)
        ended = running.ends()
    agree(values(ended))
    assert any(1 in group.joining for group in groups_of(log))
