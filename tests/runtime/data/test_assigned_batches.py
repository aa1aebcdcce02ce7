"""Each sample is used exactly once an epoch, with real workers that are slow, die or pause.

The model has one number a sample, and the loss moves only those of the batch: the final replica holds how
often each sample was used by any worker, and no sum can hide a sample that was used twice.
"""

import os
import signal

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import offbeat
from offbeat.events import ContributionReport
from offbeat.policies.membership.group_membership import GroupMembership
from offbeat.runtime.collectives import link_exchange
from offbeat.strategies import AllReduce
from support.jobs import MARK, coordinator, job
from support.processes import run, values
from support.run_logs import entries_of, wait_for_group_without
from support.sample_counting import (
    BATCH,
    CALM,
    SAMPLES,
    Counter,
    SignalAtStep,
    accumulates,
    count,
    once,
    once_but_for_the_rest,
    once_each,
)


class Samples(Dataset):
    """The numbers of the samples, for a DataLoader."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return (torch.tensor(index),)


def test_each_sample_is_used_once_when_no_worker_is_slow():
    ended = run(count, 3, CALM)
    once(ended)
    assert len({steps for _, steps in values(ended)}) == 1


@pytest.mark.long(after=1)
@pytest.mark.parametrize("slow", ["1:20", "0:20@burst=8/100000", "1:10@burst=5/12", "2:20@0.0-0.5"])
def test_each_sample_is_used_once_when_a_slow_worker_is_excluded_and_readmitted(slow):
    once(run(count, 3, env={"OFFBEAT_SLOW": slow}))


def dies(rank, emit, steps, options=None):
    before_step = SignalAtStep(emit, steps[rank]) if rank in steps else None
    return count(rank, emit, before_step=before_step, options=options)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    "steps",
    [{0: 3}, {2: 12}, {1: 5, 3: 5}, {0: 8, 1: 14, 2: 20}, {3: 27}, {1: 26, 2: 27}],
    ids=lambda steps: ", ".join(f"{rank} in step {step}" for rank, step in steps.items()),
)
def test_each_sample_is_used_once_when_workers_are_killed(steps):
    with job(dies, 4, steps) as running:
        once([one for one in running.ends() if one.rank not in steps])


@pytest.mark.parametrize(("strategy", "kept"), [(CALM, 100), (AllReduce(), 96)])
def test_with_drop_last_samples_that_do_not_fill_a_batch_are_left_out(strategy, kept):
    """101 samples in batches of 4: of one worker where batches are assigned, else of all three together."""
    once_but_for_the_rest(run(count, 3, strategy, 2, None, 0.0, None, {"drop_last": True}), kept, 2)


def test_with_drop_last_the_samples_of_killed_workers_are_reassigned():
    with job(dies, 4, {1: 5, 3: 5}, {"drop_last": True}) as running:
        once_but_for_the_rest([one for one in running.ends() if one.rank not in (1, 3)], 100)


def dies_in_the_exchange(rank, emit, victim, at_step, share):
    def before_step(session):
        if rank == victim and session.step == at_step:
            arrived = link_exchange._ScheduleRun._on_complete

            def die_on_the_way(self, number, first, last):
                if self._to_receive - (last - first) <= self._plan.received * share:
                    os.kill(os.getpid(), signal.SIGKILL)
                arrived(self, number, first, last)

            link_exchange._ScheduleRun._on_complete = die_on_the_way

    return count(rank, emit, before_step=before_step)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(("victim", "at_step"), [(0, 5), (2, 35)])
def test_each_sample_is_used_once_when_a_worker_is_killed_in_an_exchange(victim, at_step, share):
    with job(dies_in_the_exchange, 3, victim, at_step, share) as running:
        once([one for one in running.ends() if one.rank != victim])


def dies_before_reporting(rank, emit):
    """Worker 1 pauses the coordinator, takes a step with the others and dies."""
    finish_step = GroupMembership.finish_step

    def finish_step_and_die(self):
        finish_step(self)
        if self.step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    def before_step(session):
        if rank == 1 and session.step == 7:
            os.kill(coordinator(os.environ[MARK])[0], signal.SIGSTOP)

    if rank == 1:
        GroupMembership.finish_step = finish_step_and_die
    return count(rank, emit, CALM, before_step=before_step)


def test_contributions_of_a_worker_that_died_before_reporting_are_reported_by_the_others(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(dies_before_reporting, 3, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.died(1)
        os.kill(running.coordinator(), signal.SIGKILL)
        once([one for one in running.ends() if one.rank != 1])
    reports = [entry for entry in entries_of(log, ContributionReport) if entry.lost_worker == 1]
    assert any(own for entry in reports for _, own, _ in entry.contributions)


def stops(rank, emit):
    return count(
        rank, emit, epochs=30, before_step=SignalAtStep(emit, 7, signal.SIGSTOP) if rank == 1 else None
    )


def stops_in_the_exchange(rank, emit):
    due = [20] if rank == 1 else []

    def before_step(session):
        if session.step in due:
            due.clear()
            arrived = link_exchange._ScheduleRun._on_complete

            def stop(self, number, first, last):
                link_exchange._ScheduleRun._on_complete = arrived
                emit("now")
                os.kill(os.getpid(), signal.SIGSTOP)
                arrived(self, number, first, last)

            link_exchange._ScheduleRun._on_complete = stop

    return count(rank, emit, epochs=30, before_step=before_step)


@pytest.mark.long
@pytest.mark.parametrize("hangs", [stops, stops_in_the_exchange])
def test_each_sample_is_used_once_when_a_worker_hangs_and_continues(hangs, tmp_path):
    log = tmp_path / "log.jsonl"
    with job(hangs, 3, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.receive(1)
        wait_for_group_without(log, 1)
        running.signal(1, signal.SIGCONT)
        ended = running.ends()
    once(ended, 30)


@pytest.mark.parametrize("victim", [None, 1])
def test_with_gradients_accumulated_over_batches(victim):
    with job(accumulates, 3, victim) as running:
        ended = [one for one in running.ends() if one.rank != victim]
    assert {len(values([one])[0][0]) for one in ended} == {SAMPLES}
    assert all(all(uses) for uses, _ in values(ended))


def loads(rank, emit, options, victim):
    before_step = SignalAtStep(emit, 12) if rank == victim else None
    return count(rank, emit, epochs=2, dataset=Samples(), options=options, before_step=before_step)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("options", "victim"),
    [({}, 0), ({"num_workers": 2}, None), ({"num_workers": 1, "prefetch_factor": 4}, None)],
)
def test_through_a_data_loader(options, victim):
    with job(loads, 3, options, victim) as running:
        once([one for one in running.ends() if one.rank != victim], 2)


def breaks_off(rank, emit):
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dataset = TensorDataset(torch.arange(SAMPLES))
    with offbeat.join(model, optimizer, CALM) as session:
        for epoch in session.epochs(5):
            for place, (numbers,) in enumerate(session.batches(dataset, BATCH)):
                optimizer.zero_grad()
                (-model(numbers)).backward()
                once_each(model)
                optimizer.step()
                if epoch % 2 == 0 and place == 2:
                    break
    return model.uses_N.detach().tolist()


def test_a_loop_that_breaks_off_skips_the_rest_of_the_epoch():
    """Two epochs of five are used completely, of the others at most the batches before the break.

    A worker that ends an epoch a round before the others breaks off the next one, or the job, a round before
    them; gradients that they have not contributed by then are lost too.
    """
    ended = values(run(breaks_off, 3))
    assert len({tuple(uses) for uses in ended}) == 1
    uses = ended[0]
    assert 2 <= min(uses) <= max(uses) <= 5
    before_break = 3 * (3 * 3 * BATCH)
    assert 2 * SAMPLES + before_break / 2 < sum(uses) <= 2 * SAMPLES + before_break
