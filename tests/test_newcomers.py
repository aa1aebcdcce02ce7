"""Workers that join a job while it runs, with real processes: they get the state from a peer and take part.

The model counts how often each sample was used (see `test_data_once.py`); replicas must hold the same bits,
and each sample must come once an epoch, whoever is killed and whoever joins.
"""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from cluster import values
from jobs import DEADLINE_S, job
from offbeat.events import Dismiss, Finished, Group, Halt, Joined, Lost, Ready
from offbeat.record import read_log, replay
from offbeat.runtime.grouping import Grouping
from offbeat.runtime.session import Session
from offbeat.runtime.state import StateCopier
from offbeat.strategies import AllReduce, PartialAllReduce
from test_data_once import BATCH, SAMPLES, STRATEGY, Counter, once_each
from test_groups import groups_of, spin

EPOCHS = 30


class Trained:
    """What a worker holds at the end, and what it went through.

    Attributes:
        uses: how often each sample was used, as this replica has it.
        momenta: the optimizer's state.
        epochs: in which the worker was.
        rates: learning rates that its steps were taken with, by step.
    """

    def __init__(self, model, optimizer, session, epochs, rates):
        self.uses = model.uses_N.detach().tolist()
        self.buffer = model.buffer.tolist()
        self.momenta = [row["step"].item() for row in optimizer.state.values()]
        self.worker, self.world, self.step = session.worker, session.world, session.step
        self.epochs, self.rates = epochs, rates


class Counting(Counter):
    """A counter with a buffer, which follows the first member's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(3))

    def forward(self, numbers):
        self.buffer += 1
        return super().forward(numbers)


class Adding(torch.optim.Optimizer):
    """Subtracts gradients whatever the learning rate, and counts its steps in a state of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                row = self.state[parameter]
                row["step"] = row.get("step", torch.zeros(1)) + 1
                if parameter.grad is not None:
                    parameter -= parameter.grad


def train(rank, say, strategy=STRATEGY, epochs=EPOCHS, misdeed=None, compute_s=0.01):
    """A loop as its user would write it; the same for those who come at the start and later."""
    model = Counting()
    optimizer = Adding(model.parameters())
    dataset = TensorDataset(torch.arange(SAMPLES))
    seen, rates = [], {}
    with offbeat.join(model, optimizer, strategy) as session:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        for epoch in session.epochs(epochs):
            seen.append(epoch)
            for (numbers,) in session.batches(dataset, BATCH):
                if misdeed is not None:
                    misdeed(session)
                optimizer.zero_grad()
                spin(compute_s)
                (-model(numbers)).backward()
                once_each(model)
                rates[session.step] = optimizer.param_groups[0]["lr"]
                optimizer.step()
            scheduler.step()
    return Trained(model, optimizer, session, seen, rates)


def trained_once(ended, epochs=EPOCHS):
    """Checks that all hold the same, each sample once an epoch; returns what they hold."""
    results = values(ended)
    for one in results:
        assert one.uses == [float(epochs)] * SAMPLES
        assert one.buffer == results[0].buffer
        assert one.momenta == results[0].momenta
        assert one.step == results[0].step
    return results


class Misdeed:
    """Tells that a step has come, and then perhaps does something to this process, once."""

    def __init__(self, say, step, number=signal.SIGKILL):
        self._say, self._step, self._number = say, step, number

    def __call__(self, session):
        if session.step >= self._step >= 0:
            self._step = -1
            self._say("now")
            if self._number is not None:
                os.kill(os.getpid(), self._number)


def says_when(rank, say, step=10):
    """Rank 0 says when the training is under way."""
    return train(rank, say, misdeed=Misdeed(say, step, None) if rank == 0 else None)


def entries_of(log):
    return read_log(log).entries


def wait_for(log, what, condition):
    """Waits until the run log has an entry for which the condition holds; returns the first."""
    limit_s = time.monotonic() + DEADLINE_S
    while True:
        found = [entry for entry in entries_of(log) if condition(entry)] if log.exists() else []
        if found:
            return found[0]
        assert time.monotonic() < limit_s, f"the run log never showed {what}"


def joined_within_two_rounds(log, worker):
    """Checks, from the run log, that a newcomer takes part soon; returns the group that took it in."""
    entries = entries_of(log)
    came = next(i for i, one in enumerate(entries) if isinstance(one, Joined) and one.worker == worker)
    under_way = max(one.step for one in entries[:came] if isinstance(one, Ready))
    group = next(one for one in entries[came:] if isinstance(one, Group) and worker in one.joining)
    assert group.step <= under_way + 2
    first = next(one for one in entries[came:] if isinstance(one, Ready) and one.worker == worker)
    assert first.step == group.step
    return group


def test_a_newcomer_takes_part_within_two_rounds_and_holds_what_the_others_hold(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(says_when, 3, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.said(0)
        running.add(train)
        ended = running.ends()
    *_, newcomer = trained_once(ended)
    assert (newcomer.worker, newcomer.world) == (3, 3)
    joined_within_two_rounds(log, 3)
    assert replay(read_log(log)) is None


def test_a_newcomer_begins_in_the_epoch_in_which_the_others_are_with_their_learning_rate(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(says_when, 3, 60, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.said(0)
        running.add(train)
        ended = running.ends()
    first, *_, newcomer = trained_once(ended)
    step = joined_within_two_rounds(log, 3).step
    begun = next(one for one in entries_of(log) if isinstance(one, Ready) and one.step == step)
    assert newcomer.epochs == list(range(newcomer.epochs[0], EPOCHS))
    assert 0 < begun.epoch <= newcomer.epochs[0] <= begun.epoch + 1
    shared = [step for step in newcomer.rates if step in first.rates]
    assert len(shared) > EPOCHS // 2
    assert all(newcomer.rates[step] == first.rates[step] for step in shared[1:])


def waits_in_the_middle(rank, say, log):
    """The newcomers, told from others by their numbers: they wait for one another before they join."""
    say("here")
    wait_for(log, "a first step", lambda one: isinstance(one, Ready) and one.step >= 10)
    return train(rank, say)


def test_several_newcomers_at_once_more_than_there_were_workers(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(train, 2, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        added = [running.add(waits_in_the_middle, log) for _ in range(4)]
        running.said(*added)
        ended = running.ends()
    results = trained_once(ended)
    assert sorted(one.worker for one in results) == list(range(6))
    assert any(len(group.members) == 6 for group in groups_of(log))


def resumes(rank, say):
    """As after a restart: every worker loads what was saved, with the seed that was used then."""
    load = Session.load_state_dict

    def epochs(self, count, before=Session.epochs):
        model = Counting()
        load(
            self,
            {
                "version": 1,
                "model": model.state_dict(),
                "optimizer": Adding(model.parameters()).state_dict(),
                "epoch": 0,
                "batches_taken": 0,
                "deals": True,
                "step": 0,
                "seed": 7,
                "world": 3,
            },
        )
        return before(self, count)

    Session.epochs = epochs
    return says_when(rank, say) if rank < 3 else train(rank, say)


def test_a_newcomer_runs_the_script_that_the_others_ran_though_it_loads_what_was_saved():
    """Each sample comes once only if it draws the order of an epoch from the seed that the others have."""
    with job(resumes, 3, env={"OFFBEAT_SLOW": "1:1;random:1@0.0-0.5"}) as running:
        running.said(0)
        running.add(resumes)
        ended = running.ends()
    trained_once(ended)


def dies(rank, say, victims, step=12):
    return train(rank, say, misdeed=Misdeed(say, step) if rank in victims else None)


@pytest.mark.parametrize("victim", [0, 1])
def test_each_sample_comes_once_though_a_worker_is_killed_and_a_newcomer_takes_its_place(victim, tmp_path):
    log = tmp_path / "log.jsonl"
    with job(dies, 3, (victim,), env={"OFFBEAT_RUN_LOG": str(log)}, hosts_store=True) as running:
        running.said(victim)
        wait_for(log, "the death", lambda one: isinstance(one, Lost))
        running.add(train)
        ended = running.ends()
    trained_once([one for one in ended if one.rank != victim])
    assert joined_within_two_rounds(log, 3).members == tuple({0, 1, 2, 3} - {victim})


def joins_on_a_halt(rank, say, log):
    say("here")
    wait_for(log, "a change", lambda one: isinstance(one, Halt))
    return train(rank, say)


def one_stops(rank, say):
    return train(rank, say, misdeed=Misdeed(say, 12, signal.SIGSTOP) if rank == 2 else None)


def test_a_newcomer_while_a_change_is_under_way(tmp_path):
    """The change begins with a death, and waits for one that is stopped and does not answer."""
    log = tmp_path / "log.jsonl"
    with job(one_stops, 3, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.said(running.add(joins_on_a_halt, log))
        running.said(2)
        running.signal(1, signal.SIGKILL)
        wait_for(log, "the newcomer", lambda one: isinstance(one, Joined) and one.worker == 3)
        running.signal(2, signal.SIGCONT)
        ended = running.ends()
    trained_once([one for one in ended if one.rank != 1])
    entries = entries_of(log)
    kinds = (Halt, Group)
    halt = next(i for i, one in enumerate(entries) if isinstance(one, Halt))
    came = next(i for i, one in enumerate(entries) if isinstance(one, Joined) and one.worker == 3)
    assert halt < came
    assert not any(isinstance(one, kinds) for one in entries[halt + 1 : came])


def dies_while_it_takes(rank, say):
    def die(self, optimizer, place):
        os.kill(os.getpid(), signal.SIGKILL)

    StateCopier._optimizer_state = die
    return train(rank, say)


def test_a_newcomer_that_dies_while_it_takes_the_state(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(says_when, 3, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.said(0)
        first = running.add(dies_while_it_takes)
        running.died(first)
        running.add(train)
        ended = running.ends()
    *_, newcomer = trained_once([one for one in ended if one.rank != first])
    assert newcomer.worker == 4
    joined_within_two_rounds(log, 4)


def dies_while_it_gives(rank, say):
    def misdeed(session):
        if session.step >= 12:
            StateCopier._optimizer_state = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            says(session)

    says = Misdeed(say, 12, None)
    return train(rank, say, misdeed=misdeed if rank == 0 else None)


def test_a_donor_that_dies_while_it_gives_is_followed_by_the_next(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(dies_while_it_gives, 3, env={"OFFBEAT_RUN_LOG": str(log)}, hosts_store=True) as running:
        running.said(0)
        running.add(train)
        ended = running.ends()
    trained_once(ended[1:])
    given = [group.members for group in groups_of(log) if 3 in group.joining]
    assert given[:2] == [(0, 1, 2, 3), (1, 2, 3)]
    assert ended[0].exitcode == -signal.SIGKILL


# Who is not taken ------------------------------------------------------------------------------------------


def has_another_model(rank, say):
    model = nn.Linear(3, 2)
    offbeat.join(model, torch.optim.SGD(model.parameters(), lr=1.0), STRATEGY)


def has_an_id_of_another(rank, say):
    os.environ |= {"RANK": "3", "WORLD_SIZE": "3"}
    return train(rank, say)


def test_a_newcomer_with_another_model_or_an_old_id_is_refused_and_the_job_goes_on(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(says_when, 3, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.said(0)
        odd = running.end(running.add(has_another_model))
        new = running.add(has_an_id_of_another)
        wait_for(log, "the newcomer", lambda one: isinstance(one, Group) and 3 in one.joining)
        again = running.end(running.add(has_an_id_of_another))
        ended = [running.end(rank) for rank in (0, 1, 2, new)]
    trained_once(ended)
    assert "line 1 of model and optimizer is 'parameter uses_N float64 [101]' on worker 0" in odd.error
    assert "its id, 3, has been used: give every newcomer one of its own" in again.error
    assert odd.error_type == again.error_type == "WorkerError"


@pytest.mark.parametrize("strategy", [AllReduce(), PartialAllReduce(shards="equal")], ids=str)
def test_a_job_that_takes_nobody_says_so_and_goes_on(strategy):
    with job(train_and_say, 2, strategy, hosts_store=True) as running:
        running.said(0)
        late = running.end(running.add(train, strategy))
        ended = [running.end(rank) for rank in (0, 1)]
    assert "cannot take part: the job has started without it" in late.error
    assert {one.step for one in values(ended)} == {EPOCHS * 13}


def train_and_say(rank, say, strategy):
    return train(rank, say, strategy, misdeed=Misdeed(say, 10, None) if rank == 0 else None)


# At the end ------------------------------------------------------------------------------------------------


def stays(rank, say, log, owner, name):
    """Worker 1 does not do this before a newcomer has been heard of."""
    if rank == 1:
        before = getattr(owner, name)

        def later(self, *arguments):
            say("at the end")
            wait_for(log, "the newcomer", lambda one: isinstance(one, Joined) and one.worker == 2)
            return before(self, *arguments)

        setattr(owner, name, later)
    return train(rank, say, epochs=3)


def joins_at_the_end(rank, say, log, kind):
    say("here")
    wait_for(log, kind.__name__, lambda one: isinstance(one, kind))
    return train(rank, say, epochs=3)


def test_a_newcomer_in_whose_time_nothing_is_left_to_do_holds_the_final_state(tmp_path):
    """One worker has finished, and the other stands at the end of its loop."""
    log = tmp_path / "log.jsonl"
    with job(stays, 2, log, Session, "_wait_for_the_others", env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.said(running.add(joins_at_the_end, log, Finished))
        ended = running.ends()
    *_, newcomer = trained_once(ended, 3)
    assert newcomer.epochs == []


def test_a_newcomer_that_comes_when_all_others_are_done_is_told_so(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(
        stays, 2, log, Grouping, "settle_at_the_end", env={"OFFBEAT_RUN_LOG": str(log)}, hosts_store=True
    ) as running:
        running.said(running.add(joins_at_the_end, log, Dismiss))
        ended = running.ends()
    trained_once(ended[:2], 3)
    assert "cannot take part: it came when all others were done" in ended[2].error


def test_a_newcomer_that_comes_when_nobody_is_left_is_told_so(tmp_path):
    with job(train, 2, PartialAllReduce(), 1, hosts_store=True) as running:
        values(running.ends())
        late = running.end(running.add(train))
    assert late.error.startswith("worker 2 lost the coordinator: nobody listens any more at ")
    assert late.error.endswith("; has the job ended?")
