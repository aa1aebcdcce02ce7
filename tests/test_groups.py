"""Promises of strategies whose groups change, with real workers: slow, recovering, killed, stopped.

Whatever happens to a worker, the others hold the same bits after every step, and everybody who is left at the
end holds them too.
"""

import hashlib
import itertools
import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from cluster import run, values
from jobs import job
from offbeat.events import EndEpoch, Lost
from offbeat.runtime.collectives import link_exchange
from offbeat.strategies import AllReduce, PartialAllReduce
from offbeat.wire.record import read_log
from runlogs import groups_of, wait_for_group_without

SAMPLES, BATCH, EPOCHS = 96, 4, 6
STRATEGY = PartialAllReduce(limit=3, n_profile=2)


def digest(model, optimizer):
    """The bits of everything that has to be the same on all members."""
    tensors = list(model.state_dict().values())
    tensors += [
        value
        for row in optimizer.state_dict()["state"].values()
        for value in row.values()
        if isinstance(value, torch.Tensor)
    ]
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def make(rank, width=32):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(rank, say, strategy=STRATEGY, epochs=EPOCHS, misdeed=None, compute_s=0.01, width=32):
    """A loop as its user would write it, in which a step takes `compute_s` at least.

    Returns what the members' state was after each step, and this worker's in the end.
    """
    model, optimizer = make(rank, width)
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    states = {}
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(epochs):
            for x, y in session.batches(dataset, BATCH):
                before = session.step
                if misdeed is not None:
                    misdeed(session)
                optimizer.zero_grad()
                compute(compute_s)
                nn.functional.cross_entropy(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if session.step > before:
                    states[session.step] = digest(model, optimizer)
            scheduler.step()
    return states, digest(model, optimizer)


def compute(duration_s):
    """Takes as long as a computation would, and leaves the machine to others: no worker slows another.

    What is injected as slowness is a multiple of that.
    """
    time.sleep(duration_s)


def agree(results):
    """Checks that all hold the same bits after every step that they share, and in the end."""
    for (states, _), (others, _) in itertools.combinations(results, 2):
        shared = states.keys() & others.keys()
        assert all(states[step] == others[step] for step in shared)
    assert len({final for _, final in results}) == 1


def test_with_nobody_slow_it_is_all_reduce_bit_for_bit():
    lockstep = values(run(train, 3, AllReduce(), 2))
    partial = values(run(train, 3, PartialAllReduce(limit=10**6, shards="equal"), 2))
    assert [states for states, _ in partial] == [states for states, _ in lockstep]


def test_a_slow_worker_is_left_out_and_holds_the_final_state_all_the_same(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20", "OFFBEAT_RUN_LOG": str(log)}
    results = values(run(train, 3, env=env))
    agree(results)
    groups = groups_of(log)
    assert any(group.members == (0, 2) for group in groups)
    assert "worker 1: compute time above" in next(g for g in groups if g.members == (0, 2)).reason
    assert groups[-1].joining == (1,)
    assert len(results[0][0]) > 2 * len(results[1][0])
    assert any(isinstance(entry, EndEpoch) for entry in read_log(log).entries)


def test_a_worker_that_recovers_comes_back_with_the_state_of_the_others(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20@burst=8/100000", "OFFBEAT_RUN_LOG": str(log)}
    results = values(run(train, 3, STRATEGY, 20, env=env))
    agree(results)
    back = [group for group in groups_of(log) if 1 in group.joining]
    assert back
    assert back[0].step in results[0][0]
    assert max(results[1][0]) > back[0].step


class Misdeed:
    """Sends this process a signal when a step comes, once."""

    def __init__(self, say, step, number=signal.SIGKILL):
        self._say, self._step, self._number = say, step, number

    def __call__(self, session):
        if session.step == self._step:
            self._step = -1
            self._say("now")
            os.kill(os.getpid(), self._number)


def dies_in_compute(rank, say, victims):
    return train(rank, say, misdeed=Misdeed(say, 7) if rank in victims else None)


@pytest.mark.parametrize("victims", [(0,), (2,), (0, 1), (1, 2, 3)], ids=str)
def test_the_others_go_on_when_workers_are_killed(victims):
    with job(dies_in_compute, 4, victims) as running:
        ended = running.ends()
    alive = [one for one in ended if one.rank not in victims]
    results = values(alive)
    agree(results)
    assert all(max(states) >= SAMPLES // BATCH // 4 * EPOCHS for states, _ in results)


def dies_while_another_is_slow(rank, say, victim):
    strategy = PartialAllReduce(limit=10**6)
    return train(rank, say, strategy, 2, Misdeed(say, 4) if rank == victim else None)


@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on_when_a_worker_is_killed_while_another_still_computes(victim):
    """The slow one has a seat in the old group when it comes to the exchange, and the new group is there."""
    with job(dies_while_another_is_slow, 3, victim, env={"OFFBEAT_SLOW": "1:20"}) as running:
        ended = running.ends()
    results = values([one for one in ended if one.rank != victim])
    agree(results)
    assert all(max(states) >= SAMPLES // BATCH // 3 * 2 for states, _ in results)


def dies_in_the_exchange(rank, say, victim, share):
    def misdeed(session):
        if rank == victim and session.step == 5:
            arrived = link_exchange._ScheduleRun._on_complete

            def die_on_the_way(self, number, first, last):
                if self._to_receive - (last - first) <= self._plan.received * share:
                    os.kill(os.getpid(), signal.SIGKILL)
                arrived(self, number, first, last)

            link_exchange._ScheduleRun._on_complete = die_on_the_way

    return train(rank, say, misdeed=misdeed, width=20_000)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_round_that_a_death_breaks_is_repeated_or_taken_over(victim, share, tmp_path):
    log = tmp_path / "log.jsonl"
    with job(dies_in_the_exchange, 3, victim, share, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        ended = running.ends()
    agree(values([one for one in ended if one.rank != victim]))
    assert any(isinstance(entry, Lost) and entry.worker == victim for entry in read_log(log).entries)


def stops_in_compute(rank, say):
    strategy = PartialAllReduce(limit=3, n_profile=2)
    return train(rank, say, strategy, 30, Misdeed(say, 7, signal.SIGSTOP) if rank == 1 else None)


def test_a_worker_that_hangs_is_left_out_and_comes_back_when_it_goes_on(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(stops_in_compute, 3, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.said(1)
        wait_for_group_without(log, 1)
        running.signal(1, signal.SIGCONT)
        ended = running.ends()
    agree(values(ended))
    assert any(1 in group.joining for group in groups_of(log))
