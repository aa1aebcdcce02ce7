"""Promises about a coordinator that is killed: another one takes its place, and training continues.

Real workers, real kills. Afterwards all replicas are equal, and the run log shows one training: every event
once, in order, and answers that fresh policies repeat.
"""

import os
import signal
from collections import Counter

import msgspec
import pytest

from offbeat.events import AbortJob, Group, Halt, Halted, Joined, Left, Lost, PeerList, Ready
from offbeat.policies.membership.group_membership import GroupMembership
from offbeat.runtime.control import client, rendezvous
from offbeat.runtime.control.channel import SEQUENCE_ACK_INTERVAL, ControlChannel
from offbeat.runtime.training import job_connection
from offbeat.strategies import DPAR, AllReduce, PartialAllReduce
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.group_training import BATCH, SAMPLES, STRATEGY, agree, train
from support.jobs import MARK, coordinator, job
from support.processes import values
from support.run_logs import step_times

STRATEGIES = {  # none of these classifies a worker as slow, however busy this machine is
    "bsp": AllReduce(),
    "partial": PartialAllReduce(limit=10**6),
    "dpar": DPAR(threshold_ms=5000.0),
}
STEPS = SAMPLES // BATCH // 3  # of an epoch with three workers
RESTARTS = 5


def emit_every_ten_steps(emit):
    last = -1

    def before_step(session):
        nonlocal last
        if session.step // 10 > last:
            last = session.step // 10
            emit(session.step)

    return before_step


def trains(rank, emit, strategy, epochs, journal_events_max=None):
    if journal_events_max is not None:
        start = rendezvous.start_coordinator
        rendezvous.start_coordinator = lambda configuration: start(
            msgspec.structs.replace(configuration, journal_events_max=journal_events_max)
        )
    return train(rank, emit, strategy, epochs, emit_every_ten_steps(emit))


def kill_now():
    """Kills the coordinator of this worker's job."""
    os.kill(coordinator(os.environ[MARK])[0], signal.SIGKILL)


def check_log_is_complete(path, workers):
    """Reads a run log and checks that no entry is lost, duplicated or out of order."""
    log = read_log(path)
    assert replay(log) is None
    assert not log.is_truncated
    assert not any(isinstance(entry, AbortJob) for entry in log.entries)
    for kind in (Joined, Left):
        assert sorted(entry.worker for entry in log.entries if isinstance(entry, kind)) == list(
            range(workers)
        )
    times_s = [entry.now_s for entry in log.entries if hasattr(entry, "now_s")]
    assert times_s == sorted(times_s)
    return log.entries


def check_each_step_once(steps, least):
    """At least `least` steps, none twice, none missing; a late request for samples may add one step."""
    assert steps == list(range(max(least, len(steps))))


def steps_of(entries, kind, worker):
    return [entry.step for entry in entries if isinstance(entry, kind) and entry.worker == worker]


# In training ----------------------------------------------------------------------------------------------


@pytest.mark.long(after=1)
@pytest.mark.parametrize("journal_events_max", [None, 7])
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_continues_when_the_coordinator_is_killed_repeatedly(name, journal_events_max, tmp_path):
    """With a new journal every 7 events, successors begin with the policies' saved state."""
    path = tmp_path / "log"
    env = {"OFFBEAT_RUN_LOG": str(path)}
    with job(trains, 3, STRATEGIES[name], 10, journal_events_max, env=env) as running:
        for _ in range(RESTARTS):
            running.receive(0, 1, 2)
            os.kill(running.coordinator(), signal.SIGKILL)
        results = values(running.ends())
    agree(results)
    entries = check_log_is_complete(path, 3)
    for worker in range(3):
        check_each_step_once([times.step for times in step_times(entries, worker)], 10 * STEPS)
        check_each_step_once(steps_of(entries, Ready, worker), 10 * STEPS)
    assert not any(isinstance(entry, Lost) for entry in entries)


@pytest.mark.long
def test_training_continues_when_coordinators_are_killed_as_soon_as_they_start(tmp_path):
    path = tmp_path / "log"
    with job(trains, 3, AllReduce(), 10, env={"OFFBEAT_RUN_LOG": str(path)}) as running:
        running.receive(0, 1, 2)
        killed = set()
        while len(killed) < RESTARTS:
            pid = running.coordinator()
            if pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        results = values(running.ends())
    agree(results)
    check_log_is_complete(path, 3)


@pytest.mark.long
def test_without_a_run_log_training_continues_after_coordinator_kills():
    with job(trains, 3, STRATEGY, 10) as running:
        for _ in range(RESTARTS):
            running.receive(0, 1, 2)
            os.kill(running.coordinator(), signal.SIGKILL)
        agree(values(running.ends()))


def test_a_coordinator_continues_without_its_supervisor(tmp_path):
    path = tmp_path / "log"
    with job(trains, 3, STRATEGY, 10, env={"OFFBEAT_RUN_LOG": str(path)}) as running:
        running.receive(0, 1, 2)
        os.kill(running.supervisor(), signal.SIGKILL)
        agree(values(running.ends()))
    check_log_is_complete(path, 3)


# During changes of the group ------------------------------------------------------------------------------


def kills_on_message(rank, emit, what):
    """Worker 0 kills the coordinator when it first receives a message of a change."""
    method = {"Halt": "on_halt", "Group": "on_group"}[what]
    on_message = getattr(GroupMembership, method)
    has_killed = False

    def kill_and_receive(self, action):
        nonlocal has_killed
        if rank == 0 and action.generation > 0 and not has_killed:
            has_killed = True
            kill_now()
        return on_message(self, action)

    setattr(GroupMembership, method, kill_and_receive)
    return train(rank, emit, STRATEGY, 10)


@pytest.mark.long
@pytest.mark.parametrize("what", ["Halt", "Group"])
def test_a_change_of_the_group_continues_with_the_next_coordinator(what, tmp_path):
    path = tmp_path / "log"
    env = {"OFFBEAT_RUN_LOG": str(path), "OFFBEAT_SLOW": "1:20@burst=8/100000"}
    with job(kills_on_message, 3, what, env=env) as running:
        agree(values(running.ends()))
    entries = check_log_is_complete(path, 3)
    groups = [entry for entry in entries if isinstance(entry, Group)]
    assert any(group.members == (0, 2) for group in groups)
    assert any(1 in group.joining for group in groups)
    assert not any(isinstance(entry, Lost) for entry in entries)
    answers = Counter((entry.worker, entry.generation) for entry in entries if isinstance(entry, Halted))
    assert set(answers.values()) == {1}
    assert len({entry.generation for entry in entries if isinstance(entry, Halt)}) > 1


# Start and end --------------------------------------------------------------------------------------------


def joins_late(rank, emit, late):
    if rank == late:
        join = client.CoordinatorClient.join

        def join_later(self, **about):
            emit("has met the others and waits to join")
            assert signal.sigwait({signal.SIGUSR1})
            return join(self, **about)

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        client.CoordinatorClient.join = join_later
    else:
        send = ControlChannel.send

        def send_and_emit(self, *events, **options):
            send(self, *events, **options)
            if isinstance(events[0], Joined):
                assert self._endpoint.flush(10)
                emit("asked to join")

        ControlChannel.send = send_and_emit
    return train(rank, emit, STRATEGY, 3)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("late", [0, 2])
def test_a_job_starts_although_coordinators_are_killed_before_its_start(late, tmp_path):
    path = tmp_path / "log"
    with job(joins_late, 3, late, env={"OFFBEAT_RUN_LOG": str(path)}) as running:
        running.receive(0, 1, 2)
        os.kill(running.coordinator(), signal.SIGKILL)
        running.coordinator()
        running.signal(late, signal.SIGUSR1)
        os.kill(running.coordinator(), signal.SIGKILL)
        agree(values(running.ends()))
    entries = check_log_is_complete(path, 3)
    assert sum(isinstance(entry, PeerList) for entry in entries) == 1


def kills_when_it_leaves(rank, emit, strategy):
    """Worker 1 kills the coordinator after it has sent Left and before the coordinator received it."""
    send = ControlChannel.send

    def kill_between_two_sends(self, *events, **options):
        if rank == 1 and any(isinstance(event, Left) for event in events):
            serving = coordinator(os.environ[MARK])[0]
            os.kill(serving, signal.SIGSTOP)
            send(self, *events, **options)
            os.kill(serving, signal.SIGKILL)
        else:
            send(self, *events, **options)

    ControlChannel.send = kill_between_two_sends
    return train(rank, emit, strategy, 2)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["bsp", "partial"])
def test_a_worker_that_leaves_while_the_coordinator_is_killed_is_logged_as_left(name, tmp_path):
    path = tmp_path / "log"
    with job(kills_when_it_leaves, 3, STRATEGIES[name], env={"OFFBEAT_RUN_LOG": str(path)}) as running:
        agree(values(running.ends()))
    entries = check_log_is_complete(path, 3)
    assert not any(isinstance(entry, Lost) for entry in entries)


# With a worker --------------------------------------------------------------------------------------------


def dies_unnoticed(rank, emit, strategy, victim):
    """The victim pauses the coordinator, then kills itself."""

    def before_step(session):
        if rank == victim and session.step == 7:
            os.kill(coordinator(os.environ[MARK])[0], signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)

    return train(rank, emit, strategy, 6, before_step)


def die_together(strategy, victim, path):
    """Returns how the other workers ended after the victim and then the coordinator were killed."""
    with job(dies_unnoticed, 3, strategy, victim, env={"OFFBEAT_RUN_LOG": str(path)}) as running:
        running.died(victim)
        os.kill(running.coordinator(), signal.SIGKILL)
        ended = running.ends()
    return [one for one in ended if one.rank != victim]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_that_dies_with_the_coordinator_is_lost_and_the_others_continue(victim, tmp_path):
    path = tmp_path / "log"
    agree(values(die_together(STRATEGY, victim, path)))
    log = read_log(path)
    assert replay(log) is None
    lost = [entry for entry in log.entries if isinstance(entry, Lost)]
    assert [entry.worker for entry in lost] == [victim]
    assert lost[0].cause.startswith("nothing listens any more")


@pytest.mark.parametrize("victim", [0, 2])
def test_in_lockstep_every_survivor_names_the_worker_that_dies_with_the_coordinator(victim, tmp_path):
    path = tmp_path / "log"
    for one in die_together(AllReduce(), victim, path):
        assert one.error_type == "WorkerError"
        assert f"worker {victim} was lost" in one.error
    assert replay(read_log(path)) is None


def test_no_process_is_left_when_all_workers_die_with_the_coordinator():
    with job(trains, 3, STRATEGY, 1000) as running:
        running.receive(0, 1, 2)
        os.kill(running.coordinator(), signal.SIGKILL)
        for rank in range(3):
            running.signal(rank, signal.SIGKILL)


# Stopped --------------------------------------------------------------------------------------------------


def reports_the_loss_of_the_coordinator(rank, emit, strategy):
    job_connection._SILENT_S = job_connection._SILENT_RETURNING_S = 2.5
    lost = ControlChannel.on_connection_lost

    def emit_and_lose(self, error):
        lost(self, error)
        emit("lost")

    ControlChannel.on_connection_lost = emit_and_lose
    has_emitted = []

    def before_step(session):
        if not has_emitted:
            has_emitted.append(True)
            emit("trains")

    return train(rank, emit, strategy, 40, before_step)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bsp", "partial"])
def test_workers_reconnect_to_a_coordinator_paused_for_longer_than_the_silence_limit(name, tmp_path):
    path = tmp_path / "log"
    env = {"OFFBEAT_RUN_LOG": str(path)}
    with job(reports_the_loss_of_the_coordinator, 3, STRATEGIES[name], env=env) as running:
        assert running.receive(0, 1, 2) == ["trains"] * 3
        stopped = running.coordinator()
        os.kill(stopped, signal.SIGSTOP)
        assert running.receive(0, 1, 2) == ["lost"] * 3
        os.kill(stopped, signal.SIGCONT)
        agree(values(running.ends()))
    entries = check_log_is_complete(path, 3)
    assert not any(isinstance(entry, Lost) for entry in entries)


# Bounds ---------------------------------------------------------------------------------------------------


def returns_the_longest_queue(rank, emit):
    longest = 0

    def before_step(session):
        nonlocal longest
        line = session._job.coordinator._channel
        longest = max(longest, len(line._unacked) + len(line._unsent))

    train(rank, emit, AllReduce(), 60, before_step, compute_s=0.0)
    return longest


@pytest.mark.long
def test_a_workers_queue_of_unacknowledged_events_does_not_grow_with_the_steps():
    with job(returns_the_longest_queue, 2) as running:
        kept = values(running.ends())
    assert 60 * SAMPLES // BATCH // 2 > 2 * SEQUENCE_ACK_INTERVAL
    assert max(kept) < 1.5 * SEQUENCE_ACK_INTERVAL
