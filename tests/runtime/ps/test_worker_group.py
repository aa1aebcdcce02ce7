"""Clients that process shards of data together: real workers that join, leave, are dropped and killed."""

import os
import random
import signal
import threading
import uuid
from collections import Counter

import numpy as np
import pytest

import offbeat
from offbeat.errors import OffbeatError
from offbeat.events import (
    AssignTask,
    TaskDone,
    TaskRequested,
    TauSet,
    WorkerGroupJoined,
    WorkerGroupLeft,
    WorkerGroupRejected,
)
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.jobs import DEADLINE_S, MARK, coordinator
from support.processes import start
from support.run_logs import entries_of, wait_for_entry, wait_until

SHARDS, PASSES = 12, 20


@pytest.fixture(scope="module")
def ps():
    with offbeat.PS.local(servers=1) as ps:
        yield ps


@pytest.fixture
def other(ps):
    with offbeat.PS(ps.cluster) as other:
        yield other


@pytest.fixture
def name(request):
    return request.node.name


# One worker and its group


def test_a_single_worker_processes_all_shards_in_order(ps, name):
    with ps.join_group(name, shards=3) as group:
        assert group.members == [group.node]
        assert group.shards == [0, 1, 2]
        found = [(task.pass_number, task.shards) for task in group.tasks(passes=2, shards_per_task=2)]
        assert found == [(0, (0, 1)), (0, (2,)), (1, (0, 1)), (1, (2,))]
        (one,) = group.progress().workers
        assert (one.passes, one.shard_passes_done) == (2, 6)
        assert list(group.tasks(passes=2)) == []
        assert [task.pass_number for task in group.tasks(passes=3, shards_per_task=3)] == [2]


def test_a_task_is_reported_when_the_named_requests_are_done(ps, name):
    w = ps.namespace(name, keys=1)
    ps.tau, release = 0, threading.Event()

    def hold():
        with ps.iteration():
            held.set()
            release.wait(DEADLINE_S)

    held = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(DEADLINE_S)
    with ps.join_group(name, shards=1) as group:
        task = next(group.tasks(passes=1))
        with ps.iteration():
            pushed = w.push([1.0])
        task.done(after=[pushed])
        assert group.progress().workers[0].shard_passes_done == 0
        release.set()
        assert list(group.tasks(passes=1)) == []
        assert pushed.is_done
        assert group.progress().workers[0].shard_passes_done == 1
    holder.join()
    ps.tau = None


def test_a_failed_request_of_a_task_is_raised_by_the_next_request_for_a_task(ps, name):
    def fail():
        raise OffbeatError("it cannot be")

    with ps.join_group(name, shards=2) as group:
        tasks = group.tasks(passes=1)
        failed = ps.when_done([], fail)
        next(tasks).done(after=[failed])
        ps.when_done([]).result()
        with pytest.raises(OffbeatError, match="it cannot be"):
            next(tasks)
        assert group.progress().workers[0].shard_passes_done == 0


def test_a_task_of_an_abandoned_loop_is_returned_again(ps, name):
    with ps.join_group(name, shards=2) as group:
        for task in group.tasks(passes=1):
            left = task
            break
        assert [task.number for task in group.tasks(passes=1)] == [left.number, left.number + 1]


# Several workers


def test_workers_share_the_shards_and_a_newcomer_receives_some(ps, other, name):
    with ps.join_group(name, shards=5) as group, other.join_group(name, shards=5) as second:
        assert second.members == [group.node, second.node]
        wait_until(lambda: group.members == second.members, "news of the second worker")
        assert sorted(group.shards + second.shards) == [0, 1, 2, 3, 4]
        second.leave()
        assert group.progress().workers[0].shards == ((0, 4),)
        again = other.join_group(name, shards=5)
        wait_until(lambda: len(group.shards) == 3, "shards that are assigned to the newcomer")
        again.leave()


def test_tasks_unfinished_by_a_leaving_worker_are_done_by_another(ps, other, name):
    with ps.join_group(name, shards=2) as group:
        with other.join_group(name, shards=2) as second:
            next(second.tasks(passes=1))
        assert [task.shards for task in group.tasks(passes=1)] == [(0,), (1,)]


def test_a_client_that_closes_leaves_its_groups(ps, name):
    with ps.join_group(name, shards=4) as group:
        with offbeat.PS(ps.cluster) as other:
            other.join_group(name, shards=4)
            wait_until(lambda: len(group.members) == 2, "the other member")
        wait_until(lambda: group.shards == [0, 1, 2, 3], "the shards of the client that left")


def test_tau_belongs_to_the_group_and_may_change_while_it_runs(ps, other, name):
    with ps.join_group(name, shards=2) as group, other.join_group(name, shards=2) as second:
        assert group.tau is None
        group.tau = 0
        wait_until(lambda: second.tau == 0, "the tau that another worker has set")
        next(group.tasks(passes=9)).done()
        with pytest.raises(OffbeatError, match=f"after 0 passes, the group waits for {second.node}$"):
            next(group.tasks(passes=9, timeout_s=0.2))
        second.tau = 1
        task = next(group.tasks(passes=9))
        assert task.pass_number == 1
        task.done()
        with pytest.raises(OffbeatError, match=r"timed out after 0\.2 s waiting for a task"):
            next(group.tasks(passes=9, timeout_s=0.2))


def test_a_worker_that_keeps_others_waiting_is_dropped_and_gets_an_error(ps, other, name):
    options = {"shards": 4, "on_worker_loss": "drop_slowest", "patience_s": 0.5}
    with ps.join_group(name, **options) as group, other.join_group(name, **options) as slow:
        asked = slow.tasks(passes=2)
        slowly = next(asked)
        assert sum(len(task.shards) for task in group.tasks(passes=2)) == 8
        assert group.members == [group.node]
        slowly.done()
        other.namespace(name, keys=1)  # the manager answers this after it has rejected the report
        with pytest.raises(
            OffbeatError, match=f"{slow.node} was dropped: it kept {group.node} waiting for 0.5 s"
        ):
            next(asked)
        slow.leave()
        with other.join_group(name, **options) as again:
            assert len(again.shards) == 2


# Invalid input


def test_invalid_arguments_are_rejected_at_once(ps, name):
    for shards in (0, -1, 2**63, 2.5):
        with pytest.raises(ValueError, match="shards"):
            ps.join_group(name, shards)
    for patience_s in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="patience_s of 0 or more seconds"):
            ps.join_group(name, 4, patience_s=patience_s)
    with ps.join_group(name, 4) as group:
        with pytest.raises(ValueError, match="that this client is not in"):
            ps.join_group(name, 4)
        for tau in (-1, 2**63):
            with pytest.raises(ValueError, match="passes as tau"):
                group.tau = tau
        for wrong in ({"passes": 0}, {"passes": 2**64}, {"passes": 1, "shards_per_task": 0}):
            with pytest.raises(ValueError, match="expected 1 to"):
                group.tasks(**wrong)
        assert len(list(group.tasks(passes=1))) == 4


def test_a_group_keeps_the_options_of_its_first_worker(ps, other, name):
    with ps.join_group(name, 4):
        for wrong in (
            {"shards": 5},
            {"shards": 4, "on_worker_loss": "continue"},
            {"shards": 4, "patience_s": 1},
        ):
            with pytest.raises(OffbeatError, match=f"the group {name} as it was created, 4 shards, .* got"):
                other.join_group(name, **wrong)
        other.join_group(name, 4).leave()
    with pytest.raises(OffbeatError, match="expected 1 to 65536 shards, got 65537"):
        ps.join_group(f"{name}, larger", 65537)
    with pytest.raises(OffbeatError, match=r"expected on_worker_loss to be one of replace, .* got 'hope'"):
        ps.join_group(f"{name}, other", 4, on_worker_loss="hope")


def test_a_request_of_a_worker_that_has_left_is_rejected_at_once(ps, name):
    with ps.join_group(name, 4) as group:
        pass
    with pytest.raises(OffbeatError, match="it has left"):
        list(group.tasks(passes=1))
    group.leave()


def test_a_wait_for_a_task_ends_at_once_when_the_client_is_closed(ps, name):
    with ps.join_group(name, shards=1), offbeat.PS(ps.cluster) as other:
        group = other.join_group(name, shards=1)
        assert group.shards == []
        closer = threading.Thread(target=other.close)
        tasks = group.tasks(passes=1)
        closer.start()
        with pytest.raises(OffbeatError, match="this client was closed"):
            next(tasks)
        closer.join()
        with pytest.raises(OffbeatError, match="this client was closed"):
            other.join_group(f"{name}, another", shards=1)


def test_a_manager_that_does_not_answer_is_named_and_has_not_added_a_worker(running):
    ps, mark, _, _ = running
    manager = coordinator(mark)[0]
    os.kill(manager, signal.SIGSTOP)
    with pytest.raises(OffbeatError, match=r"timed out after 0\.2 s waiting for the manager to accept it"):
        ps.join_group("train", shards=4, timeout_s=0.2)
    os.kill(manager, signal.SIGCONT)
    with offbeat.PS(ps.cluster) as other, other.join_group("train", shards=4) as group:
        assert group.members == [group.node]
        with ps.join_group("train", shards=4) as again:
            assert again.members == [group.node, again.node]


def test_invalid_events_of_a_client_do_not_affect_other_workers(ps, other, name):
    node = other._node.name
    with ps.join_group(name, 4) as group:
        next(group.tasks(passes=1))
        for wrong in (
            TaskDone(now_s=0.0, node=node, group=name, task=0),  # a task of another worker
            TaskRequested(
                now_s=0.0, node=node, group="there is no such group", passes_max=2**63 - 1, shards_max=0
            ),
            TauSet(now_s=0.0, node=node, group=name, tau=2**63 - 1),
            WorkerGroupJoined(
                now_s=0.0, node=node, group=name, shards=2**63 - 1, on_loss="x" * 9000, wait_timeout_s=1e308
            ),
            WorkerGroupLeft(now_s=0.0, node=node, group=name),
        ):
            other._node.send_event(wrong)
        assert other.namespace(name, keys=1).pull().result() == 0.0  # its valid messages are still accepted
        assert [task.shards for task in group.tasks(passes=1)] == [(0,), (1,), (2,), (3,)]
        assert group.tau is None


# Killed workers


DIES = 2  # of the workers 0 to 2


@pytest.fixture
def running(tmp_path, monkeypatch):
    """A parameter server, the mark of its manager, the manager's log, and the file that workers wait for."""
    mark, log = uuid.uuid4().hex, tmp_path / "log.jsonl"
    monkeypatch.setenv(MARK, mark)
    with offbeat.PS.local(servers=2, run_log=str(log)) as ps:
        monkeypatch.delenv(MARK)
        yield ps, mark, log, tmp_path / "go"


def worker(rank, emit, cluster, go, on_loss, patience_s):
    """Adds 1 to a shard's key for each pass over it; worker `DIES` hangs between a push and its report."""
    with offbeat.PS(cluster) as ps:
        counts = ps.namespace("counts", keys=SHARDS)
        with ps.join_group("train", SHARDS, on_worker_loss=on_loss, patience_s=patience_s) as group:
            emit("joined")
            wait_until(go.exists, "the start")
            for task in group.tasks(PASSES, shards_per_task=2):
                pushed = counts.push(np.ones(len(task.shards)), keys=list(task.shards))
                if rank == DIES:
                    pushed.result()
                if rank == DIES and task.pass_number == PASSES // 2:
                    group.progress()  # earlier reports have been received
                    emit(task.shards)
                    threading.Event().wait()
                task.done(after=[pushed])
            return group.progress()


def counted(log):
    """The number of reports of each pass over each shard, from the manager's log."""
    entries = entries_of(log)
    tasks = {entry.task: entry for entry in entries if isinstance(entry, AssignTask)}
    found = Counter()
    for entry, answer in zip(entries, [*entries[1:], None], strict=True):
        if isinstance(entry, TaskDone) and not isinstance(answer, WorkerGroupRejected):
            found.update((tasks[entry.task].pass_number, shard) for shard in tasks[entry.task].shards)
    return found


EVERY_PASS_ONCE = {(number, shard): 1 for number in range(PASSES) for shard in range(SHARDS)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("on_loss", "patience_s"), [("replace", 600.0), ("replace", 0.0), ("drop_slowest", 600.0)]
)
def test_every_pass_is_done_when_a_worker_and_the_manager_are_killed_and_another_joins(
    running, on_loss, patience_s
):
    """A pass that the killed worker had begun is pushed again by another worker, as a new push."""
    ps, mark, log, go = running
    with start(worker, 3, ps.cluster, go, on_loss, patience_s) as workers:
        assert [workers.receive(rank) for rank in range(3)] == ["joined"] * 3
        go.touch()
        begun = workers.receive(DIES)
        workers.processes[DIES].kill()
        wait_for_entry(log, "a loss", lambda entry: "was lost" in getattr(entry, "reason", ""))
        os.kill(coordinator(mark)[0], signal.SIGKILL)
        late = workers.add(worker, (ps.cluster, go, on_loss, patience_s), {})
        ends = workers.ends()
        living = [ends[rank] for rank in (0, 1, late)]
        assert [one.error for one in living] == [None] * 3
        assert {one.value.passes for one in living} == {PASSES}
    expected = np.full(SHARDS, PASSES)
    expected[list(begun)] += 1
    assert ps.namespace("counts", keys=SHARDS).pull().result().tolist() == expected.tolist()
    ps.close()
    assert counted(log) == EVERY_PASS_ONCE
    assert replay(read_log(log)) is None


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_pushes_count_at_least_once_and_at_most_once_per_assignment_when_workers_die(running, seed):
    ps, mark, log, go = running
    counts = ps.namespace("counts", keys=SHARDS)
    chance = random.Random(f"worker group {seed}")
    with start(worker, 3, ps.cluster, go, "replace", 0.0) as workers:
        assert [workers.receive(rank) for rank in range(3)] == ["joined"] * 3
        go.touch()
        least = chance.randrange(SHARDS * PASSES // 2)
        wait_until(lambda: counts.pull().result().sum() >= least, f"as many as {least} pushes")
        victims = [workers.processes[1].pid, coordinator(mark)[0]]
        for victim in chance.sample(victims, 2):
            os.kill(victim, signal.SIGKILL)
        late = workers.add(worker, (ps.cluster, go, "replace", 0.0), {})
        workers.receive(DIES)
        workers.processes[DIES].kill()
        living = [one for one in workers.ends() if one.rank in (0, late)]
        assert [one.error for one in living] == [None] * 2
    found = counts.pull().result()
    ps.close()
    assert counted(log) == EVERY_PASS_ONCE
    begun = Counter(shard for entry in entries_of(log, AssignTask) for shard in entry.shards)
    assert all(PASSES <= found[shard] <= begun[shard] for shard in range(SHARDS))
    assert replay(read_log(log)) is None


def test_with_on_worker_loss_continue_the_others_finish_without_the_lost_shards(running):
    ps, _, log, go = running
    with start(worker, 3, ps.cluster, go, "continue", 0.0) as workers:
        assert [workers.receive(rank) for rank in range(3)] == ["joined"] * 3
        go.touch()
        begun = workers.receive(DIES)
        workers.processes[DIES].kill()
        ends = [one for one in workers.ends() if one.rank != DIES]
        assert [one.error for one in ends] == [None] * 2
        (lost,) = {one.value.lost for one in ends}
    shards = {shard for first, last in lost for shard in range(first, last + 1)}
    assert set(begun) <= shards
    ps.close()
    assert counted(log).keys() >= {
        (number, shard) for number, shard in EVERY_PASS_ONCE if shard not in shards
    }
    assert set(counted(log).values()) == {1}
    assert not {(PASSES - 1, shard) for shard in shards} & counted(log).keys()
