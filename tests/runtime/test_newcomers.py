"""Workers that join a job while it runs, with real processes: a newcomer gets the state from a peer.

The model counts how often each sample was used (`support/sample_counting.py`); replicas must hold the same
bits, and each sample must be used once an epoch, whichever worker is killed or joins.
"""

import os
import re
import signal
import subprocess
import sys
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.events import Finished, Group, Halt, JobComplete, Joined, Left, Lost, PeerList, Ready
from offbeat.runtime.averaging.group_binding import GroupBinding
from offbeat.runtime.control.environment import JOB_VARIABLE, NEWCOMER_VARIABLE, read_environment
from offbeat.runtime.session import Session
from offbeat.runtime.training import trained
from offbeat.runtime.training.state_copy import StateCopier
from offbeat.strategies import AllReduce, PartialAllReduce
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.coordinator_service import service
from support.jobs import DEADLINE_S, job
from support.newcomer_training import (
    EPOCHS,
    GATE_STEP,
    STEADY,
    Adding,
    Counting,
    Gate,
    pass_gate,
    train,
    wait_for_newcomer,
)
from support.processes import values
from support.run_logs import entries_of, groups_of, wait_for_entry, wait_until
from support.sample_counting import BATCH, SAMPLES, Counter


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate


def trained_once(ended, epochs=EPOCHS):
    """Checks that all hold equal state, with each sample used once an epoch; returns the results."""
    results = values(ended)
    for one in results:
        assert one.uses == [float(epochs)] * SAMPLES
        assert one.buffer == results[0].buffer
        assert one.momenta == results[0].momenta
        assert one.step == results[0].step
    return results


class SignalAtStep:
    """Reports that a step has been reached, and then sends this process a signal if one is given, once."""

    def __init__(self, emit, step, number=signal.SIGKILL):
        self._emit, self._step, self._number = emit, step, number

    def __call__(self, session):
        if session.step >= self._step >= 0:
            self._step = -1
            self._emit("now")
            if self._number is not None:
                os.kill(os.getpid(), self._number)


def joined_within_two_rounds(log, worker):
    """Checks, from the run log, that a newcomer takes part soon; returns the group that it joined."""
    entries = entries_of(log)
    joined_at = next(i for i, one in enumerate(entries) if isinstance(one, Joined) and one.worker == worker)
    under_way = max(one.step for one in entries[:joined_at] if isinstance(one, Ready))
    group = next(one for one in entries[joined_at:] if isinstance(one, Group) and worker in one.joining)
    assert group.step <= under_way + 2
    first = next(one for one in entries[joined_at:] if isinstance(one, Ready) and one.worker == worker)
    assert first.step == group.step
    return group


def joins_late(rank, emit, log):
    """A newcomer that does not join before the others wait at the gate."""
    emit("here")
    wait_for_entry(log, "the last step", lambda one: isinstance(one, Ready) and one.step >= GATE_STEP - 1)
    return train(rank, emit)


def test_a_newcomer_takes_part_within_two_rounds_and_holds_the_state_of_the_others(gate):
    with job(train, 3, env=gate.env) as running:
        running.add(joins_late, gate.log)
        gate.open_for(3)
        ended = running.ends()
    *_, newcomer = trained_once(ended)
    assert (newcomer.worker, newcomer.world) == (3, 3)
    joined_within_two_rounds(gate.log, 3)
    assert replay(read_log(gate.log)) is None


def test_a_newcomer_begins_in_the_epoch_and_with_the_learning_rate_of_the_others(gate):
    with job(train, 3, env=gate.env) as running:
        running.add(joins_late, gate.log)
        gate.open_for(3)
        ended = running.ends()
    first, *_, newcomer = trained_once(ended)
    step = joined_within_two_rounds(gate.log, 3).step
    begun = next(one for one in entries_of(gate.log) if isinstance(one, Ready) and one.step == step)
    assert newcomer.epochs == list(range(newcomer.epochs[0], EPOCHS))
    assert GATE_STEP // 9 <= begun.epoch <= newcomer.epochs[0] <= begun.epoch + 1
    assert newcomer.rates == {step: rate for step, rate in first.rates.items() if step in newcomer.rates}
    assert len(set(newcomer.rates.values())) == len(newcomer.epochs)


@pytest.mark.long
def test_more_newcomers_than_workers_may_join_at_once(gate):
    with job(train, 2, env=gate.env) as running:
        added = [running.add(joins_late, gate.log) for _ in range(4)]
        running.receive(*added)
        gate.open_for(2, 3, 4, 5)
        ended = running.ends()
    results = trained_once(ended)
    assert sorted(one.worker for one in results) == list(range(6))
    assert any(len(group.members) == 6 for group in groups_of(gate.log))


def resumes(rank, emit):
    """Like a script after a restart: every worker loads a saved state with its seed."""
    load = Session.load_state_dict

    def epochs(self, count, before=Session.epochs):
        model = Counting()
        load(
            self,
            {
                "version": 2,
                "model": model.state_dict(),
                "optimizers": trained.TrainingState(model, [Adding(model.parameters())]).optimizer_states(),
                "epoch": 0,
                "batches_taken": 0,
                "used": {},
                "samples": SAMPLES,
                "step": 0,
                "seed": 7,
                "world": 3,
            },
        )
        return before(self, count)

    Session.epochs = epochs
    return train(rank, emit)


@pytest.mark.long
def test_a_newcomer_may_run_the_same_script_that_loads_a_saved_state(gate):
    """Each sample is used once only if the newcomer draws the order of an epoch from the others' seed."""
    with job(resumes, 3, env={"OFFBEAT_SLOW": "1:1;random:1@0.0-0.5", **gate.env}) as running:
        running.add(resumes)
        gate.open_for(3)
        ended = running.ends()
    trained_once(ended)


def has_other_data(rank, emit, log):
    Session.batches = partialmethod(with_batches_of_5, before=Session.batches)
    return joins_late(rank, emit, log)


def with_batches_of_5(session, dataset, batch_size, before):
    return before(session, dataset, 5)


@pytest.mark.long
def test_a_newcomer_with_other_data_gets_an_error_and_the_others_continue(gate):
    with job(train, 3, env=gate.env) as running:
        running.add(has_other_data, gate.log)
        gate.open_for(3)
        *others, newcomer = running.ends()
    trained_once(others)
    assert newcomer.error_type == "OffbeatError"
    assert f"{SAMPLES} samples in batches of {BATCH}, got {SAMPLES} in batches of 5" in newcomer.error


# While other workers die -----------------------------------------------------------------------------------


def dies(rank, emit, victim):
    return train(rank, emit, before_step=SignalAtStep(emit, 12) if rank == victim else None)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("victim", [0, 1])
def test_each_sample_is_used_once_when_a_killed_worker_is_replaced_by_a_newcomer(victim, gate):
    with job(dies, 3, victim, env=gate.env, hosts_store=True) as running:
        running.receive(victim)
        wait_for_entry(gate.log, "the death", lambda one: isinstance(one, Lost))
        running.add(joins_late, gate.log)
        gate.open_for(3)
        ended = running.ends()
    trained_once([one for one in ended if one.rank != victim])
    assert joined_within_two_rounds(gate.log, 3).members == tuple({0, 1, 2, 3} - {victim})


def joins_on_a_halt(rank, emit, log):
    emit("here")
    wait_for_entry(log, "a change", lambda one: isinstance(one, Halt))
    return train(rank, emit)


def one_stops(rank, emit):
    return train(rank, emit, before_step=SignalAtStep(emit, 12, signal.SIGSTOP) if rank == 2 else None)


@pytest.mark.long
def test_a_newcomer_may_join_during_a_change_of_the_group(gate):
    """The change begins with a death, and waits for a paused worker that does not answer."""
    with job(one_stops, 3, env=gate.env) as running:
        running.receive(running.add(joins_on_a_halt, gate.log))
        running.receive(2)
        running.signal(1, signal.SIGKILL)
        gate.open_for(3)
        running.signal(2, signal.SIGCONT)
        ended = running.ends()
    trained_once([one for one in ended if one.rank != 1])
    entries = entries_of(gate.log)
    halt = next(i for i, one in enumerate(entries) if isinstance(one, Halt))
    joined_at = next(i for i, one in enumerate(entries) if isinstance(one, Joined) and one.worker == 3)
    assert halt < joined_at
    assert not any(isinstance(one, Halt | Group) for one in entries[halt + 1 : joined_at])


def dies_while_receiving(rank, emit):
    StateCopier._copy_optimizer_state = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return train(rank, emit)


@pytest.mark.long
def test_a_newcomer_may_die_while_it_receives_the_state(gate):
    with job(train, 3, env=gate.env) as running:
        first = running.add(dies_while_receiving)
        wait_for_newcomer(gate.log, 3)
        running.add(joins_late, gate.log)
        gate.open_for(4)
        running.died(first)
        ended = running.ends()
    *_, newcomer = trained_once([one for one in ended if one.rank != first])
    assert newcomer.worker == 4


def dies_while_sending(rank, emit):
    def before_step(session):
        StateCopier._copy_optimizer_state = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    return train(rank, emit, before_step=before_step if rank == 0 else None)


@pytest.mark.long
def test_a_donor_that_dies_while_it_sends_the_state_is_replaced_by_the_next(gate):
    with job(dies_while_sending, 3, env=gate.env, hosts_store=True) as running:
        running.add(joins_late, gate.log)
        gate.open_for(3)
        ended = running.ends()
    trained_once(ended[1:])
    given = [group.members for group in groups_of(gate.log) if 3 in group.joining]
    assert given == [(0, 1, 2, 3), (1, 2, 3)]
    assert ended[0].exitcode == -signal.SIGKILL


# Rejected newcomers ----------------------------------------------------------------------------------------


def has_another_model(rank, emit):
    model = nn.Linear(3, 2)
    offbeat.join(model, torch.optim.SGD(model.parameters(), lr=1.0), STEADY)


def has_id_3(rank, emit):
    os.environ |= {"RANK": "3", "WORLD_SIZE": "3"}
    return train(rank, emit)


@pytest.mark.long
def test_a_newcomer_with_another_model_or_an_old_id_is_rejected_and_the_job_continues(gate):
    with job(train, 3, env=gate.env) as running:
        odd = running.end(running.add(has_another_model))
        new = running.add(has_id_3)
        wait_for_entry(gate.log, "its group", lambda one: isinstance(one, Group) and 3 in one.joining)
        again = running.end(running.add(has_id_3))
        gate.open()
        trained_once([running.end(rank) for rank in (0, 1, 2, new)])
    assert (
        "line 1 of model and optimizer is 'parameter uses_N float64 [101], in group 0' on worker" in odd.error
    )
    assert "its id, 3, has been used: give every new worker an unused id" in again.error
    assert odd.error_type == again.error_type == "WorkerError"


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", [AllReduce(), PartialAllReduce(shards="equal")], ids=str)
def test_a_job_that_accepts_no_newcomer_rejects_it_and_continues(strategy, gate):
    with job(train, 2, strategy, env=gate.env, hosts_store=True) as running:
        late = running.end(running.add(train, strategy))
        gate.open()
        ended = [running.end(rank) for rank in (0, 1)]
    assert "cannot take part: the job has started without it" in late.error
    assert {one.step for one in values(ended)} == {EPOCHS * 13}


# At the end ------------------------------------------------------------------------------------------------


def stays(rank, emit, log, owner, name):
    """Worker 1 calls `owner.name` only after the newcomer's events have been logged."""
    if rank == 1:
        before = getattr(owner, name)

        def later(self, *arguments):
            emit("at the end")
            wait_for_newcomer(log, 2)
            return before(self, *arguments)

        setattr(owner, name, later)
    return train(rank, emit, epochs=3)


def joins_at_the_end(rank, emit, log, kind):
    emit("here")
    wait_for_entry(log, kind.__name__, lambda one: isinstance(one, kind))
    return train(rank, emit, epochs=3)


def test_a_newcomer_without_remaining_steps_holds_the_final_state(gate):
    """One worker has finished, and the other waits at the end of its loop."""
    gate.open()
    with job(stays, 2, gate.log, Session, "_wait_for_other_workers", env=gate.env) as running:
        running.receive(running.add(joins_at_the_end, gate.log, Finished))
        ended = running.ends()
    *_, newcomer = trained_once(ended, 3)
    assert newcomer.epochs == []


def test_a_newcomer_that_joins_when_all_others_are_done_gets_an_error(gate):
    gate.open()
    arguments = (gate.log, GroupBinding, "transfer_final_state")
    with job(stays, 2, *arguments, env=gate.env, hosts_store=True) as running:
        running.receive(running.add(joins_at_the_end, gate.log, JobComplete))
        ended = running.ends()
    trained_once(ended[:2], 3)
    assert "cannot take part: it came when all others were done" in ended[2].error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_used_in_the_running_job_joins_as_a_newcomer(gate, rank):
    """The launcher has the job's store, as torchrun's agents do; each worker may be started by itself."""
    with job(train, 3, env=gate.env, hosts_store=True) as running:
        wait_for_entry(
            gate.log, "the last step", lambda one: isinstance(one, Ready) and one.step >= GATE_STEP - 1
        )
        running.signal(rank, signal.SIGKILL)
        wait_for_entry(gate.log, "the loss", lambda one: isinstance(one, Lost) and one.worker == rank)
        env = {NEWCOMER_VARIABLE: "0", "RANK": str(rank), "WORLD_SIZE": "3"}
        if rank:  # a second rank 0 that must not return would open a job of its own
            assert "its id, 1, has been used" in running.end(running.add(train, env=env)).error
        running.add(train, env={**env, NEWCOMER_VARIABLE: "auto"})
        gate.open_for(3)
        ended = running.ends()
    assert trained_once([one for one in ended if one.value is not None])[-1].worker == 3


def breaks_off(rank, emit, log):
    """Worker 0 stops after three epochs, and stays until the newcomer has joined."""
    torch.manual_seed(0)
    model, begun = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, STEADY) as session:
        for epoch in session.epochs(EPOCHS):
            begun.append(epoch)
            for (inputs,) in session.batches(TensorDataset(torch.ones(64, 2)), batch_size=8):
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
            if epoch == 2 and session.worker == 0:
                break
        if session.worker == 0:
            emit("through")
            wait_until(lambda: any(one.worker == 1 for one in entries_of(log, Joined)), "the newcomer")
    return begun, model.weight.detach().numpy().copy()


def test_a_newcomer_goes_on_or_ends_where_the_only_worker_broke_off(tmp_path):
    """It goes on if it has got the state before; in each case both end with the same state."""
    log = tmp_path / "log"
    with service(tmp_path, log=log) as coordinator, job(breaks_off, 1, log, env=coordinator.env) as running:
        running.receive(0)
        running.add(breaks_off, log)
        (begun, weight), newcomer = values(running.ends())
    assert begun == [0, 1, 2]
    epochs_left = [*range(2, EPOCHS)]
    assert newcomer[0] in (
        [],
        [3],
        epochs_left,
        epochs_left[1:],
    )  # the state is that of an epoch that is over
    steps = {one.worker: one.step for one in entries_of(log, Left)}
    assert steps[0] == steps[1] == 8 * (EPOCHS if len(newcomer[0]) > 1 else 3)
    assert (newcomer[1] == weight).all()


def test_a_newcomer_that_joins_an_ended_job_gets_an_error():
    with job(train, 2, PartialAllReduce(), 1, hosts_store=True) as running:
        values(running.ends())
        late = running.end(running.add(train))
    assert late.error.startswith("worker 2 lost the coordinator: nothing listens any more at ")
    assert "its process has ended, because the job is over or because it failed" in late.error


@pytest.mark.long
def test_a_newcomer_takes_part_in_the_job_of_its_name(gate):
    """Another job at the same address started later, and has ended."""
    other = {JOB_VARIABLE: "other", NEWCOMER_VARIABLE: "0", "WORLD_SIZE": "2", "OFFBEAT_RUN_LOG": ""}
    with job(train, 2, env=gate.env | {JOB_VARIABLE: "mine"}, hosts_store=True) as running:
        wait_for_entry(gate.log, "the start", lambda one: isinstance(one, PeerList))
        others = [running.add(train, AllReduce(), 1, env=other | {"RANK": str(rank)}) for rank in range(2)]
        values([running.end(one) for one in others])
        new = running.add(train)
        gate.open_for(2)
        trained_once([running.end(rank) for rank in (0, 1, new)])


def test_a_newcomer_without_a_job_name_joins_the_running_job(gate):
    with job(train, 2, env=gate.env | {JOB_VARIABLE: "mine"}) as running:
        new = running.add(train, env={JOB_VARIABLE: ""})
        gate.open_for(2)
        trained_once([running.end(rank) for rank in (0, 1, new)])


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"OFFBEAT_JOB": "mine", "TORCHELASTIC_RUN_ID": "7f3a"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "7f3a"}, "7f3a"),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),  # torchrun's value without --rdzv-id
        ({"OFFBEAT_JOB": ""}, None),
        ({}, None),
    ],
)
def test_the_job_name_is_the_users_or_torchruns_or_none(environ, name):
    assert read_environment(environ).job_name == name


# Environment of a newcomer ----------------------------------------------------------------------------------

WHERE = {"MASTER_ADDR": "host", "MASTER_PORT": "4321", "OFFBEAT_NEWCOMER": "1"}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        (WHERE, -1),
        ({**WHERE, "RANK": "1", "WORLD_SIZE": "4"}, -1),  # the rank of the replaced worker
        ({**WHERE, "RANK": "4", "WORLD_SIZE": "4"}, 4),  # drawn by the launcher
    ],
)
def test_a_newcomer_needs_only_the_address_of_the_job(environ, rank):
    read = read_environment(environ)
    assert (read.is_newcomer, read.rank) == (True, rank)
    assert (read.master_addr, read.master_port) == ("host", 4321)


def test_the_start_timeout_is_30_s_unless_it_is_set():
    """By then, every problem of a start is reported."""
    assert read_environment({}).start_s == 30.0
    assert read_environment({"OFFBEAT_START_S": "1.5"}).start_s == 1.5


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**WHERE, "OFFBEAT_NEWCOMER": "yes"}, "OFFBEAT_NEWCOMER must be auto, 0 or 1, got 'yes'"),
        ({"OFFBEAT_NEWCOMER": "1"}, "MASTER_ADDR is not set although OFFBEAT_NEWCOMER is set"),
        ({"OFFBEAT_START_S": "0"}, "OFFBEAT_START_S must be a number of seconds above 0, got '0'"),
        ({"OFFBEAT_START_S": "soon"}, "OFFBEAT_START_S must be a number of seconds above 0, got 'soon'"),
        (
            {**WHERE, "OFFBEAT_NEWCOMER": "0", "RANK": "4", "WORLD_SIZE": "4"},
            "expected 0 <= RANK < WORLD_SIZE",
        ),
    ],
)
def test_an_invalid_environment_is_rejected(environ, words):
    with pytest.raises(OffbeatError, match=words):
        read_environment(environ)


# Started by a launcher -------------------------------------------------------------------------------------

OFFBEAT = [sys.executable, "-m", "offbeat"]
SCRIPT = f"""
import os, sys
print("process", os.getpid(), flush=True)
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.newcomer_training import EPOCHS, SAMPLES, train
one = train(0, print)
assert one.uses == [float(EPOCHS)] * SAMPLES
print("trained as worker", one.worker, os.environ["LOCAL_RANK"])
"""


class Launched:
    """`offbeat run` with the script above, and the lines that it prints."""

    def __init__(self, folder, gate, *options):
        (folder / "train.py").write_text(SCRIPT)
        self.log = gate.log
        self._output = folder / "output"
        with open(self._output, "w") as output:
            self.process = subprocess.Popen(
                [*OFFBEAT, "run", *options, "--nproc-per-node", "3", "train.py"],
                cwd=folder,
                env={**os.environ, **gate.env},
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate()

    @property
    def lines(self):
        return self._output.read_text().splitlines()

    def kill(self, rank, starts, condition):
        """Kills the process that is the `starts`-th of a rank, when the condition holds for a log entry."""
        start = re.compile(rf"^\[{rank}\] process (\d+)$", re.MULTILINE)

        def pids():
            return start.findall(self._output.read_text())

        wait_until(lambda: len(pids()) >= starts, f"start {starts} of rank {rank}")
        wait_for_entry(self.log, f"the entry upon which rank {rank} is killed", condition)
        os.kill(int(pids()[starts - 1]), signal.SIGKILL)

    def kill_two(self, rank):
        """Kills a worker in the middle of its training, and what replaces it as soon as that has joined."""
        self.kill(rank, 1, lambda one: isinstance(one, Ready) and one.worker == rank and one.step >= 10)
        self.kill(rank, 2, lambda one: isinstance(one, Joined) and one.worker == 3)

    def end(self):
        """Returns the exit code and the last line of standard error."""
        _, errors = self.process.communicate(timeout=2 * DEADLINE_S)
        return self.process.returncode, errors.splitlines()[-1]


KILLED = "was killed by SIGKILL (unless a person sent it: by the kernel, out of memory)"


@pytest.mark.long
def test_the_launcher_replaces_a_killed_worker_even_rank_0(tmp_path, gate):
    with Launched(tmp_path, gate, "--replace", "2") as launched:
        launched.kill_two(0)
        gate.open_for(4)
        code, last_line = launched.end()
    assert code == 0, launched.lines
    again = f"; worker 0 {KILLED} and was started again"
    assert last_line == f"offbeat: 3 workers ended well{again}{again}"
    assert launched.lines.count(f"[0] (this worker {KILLED}, and is started again)") == 2
    trained = sorted(line for line in launched.lines if "trained" in line)
    assert trained == [
        "[0] trained as worker 4 0",
        "[1] trained as worker 1 1",
        "[2] trained as worker 2 2",
    ]
    assert any(4 in group.joining for group in groups_of(gate.log))


@pytest.mark.long
def test_the_launcher_succeeds_without_a_worker_that_was_not_replaced_and_names_it(tmp_path, gate):
    with Launched(tmp_path, gate, "--replace", "1") as launched:
        launched.kill_two(1)
        gate.open()
        code, last_line = launched.end()
    assert (code, last_line) == (
        0,
        f"offbeat: 2 workers ended well; worker 1 {KILLED} and was started again; worker 1 {KILLED}",
    )
    trained = sorted(line for line in launched.lines if "trained" in line)
    assert trained == ["[0] trained as worker 0 0", "[2] trained as worker 2 2"]


@pytest.mark.long
def test_invalid_replace_options_are_rejected_before_a_process_is_started(tmp_path):
    for options, words in {
        ("--replace", "1", "--nproc-per-node", "1"): "--replace needs at least 2 workers",
        ("--replace", "-1"): "Invalid value for '--replace'",
    }.items():
        done = subprocess.run(
            [*OFFBEAT, "run", *options, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert words in done.stderr


# State that cannot be copied ------------------------------------------------------------------------------


class Collecting(torch.optim.SGD):
    """Keeps a set from its step `first` on."""

    def __init__(self, parameters, first):
        super().__init__(parameters, lr=1.0)
        self._left = first

    def step(self, closure=None):
        super().step(closure)
        self._left -= 1
        if self._left < 0:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["factors"] = {1, 2}


def trains_with_a_set(rank, emit, first):
    model = Counter()
    optimizer = Collecting(model.parameters(), first)
    has_passed = False
    with offbeat.join(model, optimizer, STEADY) as session:
        for _ in session.epochs(10**6):
            for (numbers,) in session.batches(TensorDataset(torch.arange(SAMPLES)), BATCH):
                if session.step >= GATE_STEP and not has_passed:
                    has_passed = True
                    pass_gate()
                optimizer.zero_grad()
                (-model(numbers)).backward()
                optimizer.step()


def joins_late_with_a_set(rank, emit, log, first):
    wait_for_entry(log, "the last step", lambda one: isinstance(one, Ready) and one.step >= GATE_STEP - 1)
    return trains_with_a_set(rank, emit, first)


@pytest.mark.long
def test_state_that_cannot_be_copied_is_rejected_on_all_workers_after_the_first_step():
    with job(trains_with_a_set, 2, 0) as running:
        for one in running.ends():
            assert one.was_ended_by("OffbeatError"), one.trace
            assert "the optimizer keeps 'factors' as set" in one.error
            assert "as this strategy does when a worker joins or comes back" in one.error


def test_an_error_in_the_thread_that_sends_the_state_ends_every_worker_with_its_text(gate):
    """Each worker in turn sends the state; no worker is waited for until the deadline of 600 s."""
    with job(trains_with_a_set, 2, 1, env=gate.env) as running:
        running.add(joins_late_with_a_set, gate.log, 1)
        gate.open_for(2)
        *donors, newcomer = running.ends()
    for worker, one in enumerate(donors):
        assert one.error_type == "WorkerError", one.trace
        cause = "OffbeatError: the optimizer keeps 'factors' as set"
        assert f"worker {worker} failed in its thread 'offbeat-state': {cause}" in one.error
    assert newcomer.error_type == "WorkerError", newcomer.trace
    assert "the optimizer keeps 'factors' as set" in newcomer.error
