"""Promises of the run log of real runs: the parts of every step, the reasons, the replay, the samples."""

import os
import re
import signal
import time
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.events import AbortJob, Group, Joined, Left, Lost, PeerList, Ready, StepTimes
from offbeat.runtime.data.equal_shards import EqualShards
from offbeat.strategies import AllReduce
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.group_training import compute
from support.jobs import DEADLINE_S, job
from support.processes import values
from support.run_logs import step_times

WORKERS = 4
SAMPLES = 4 * 16 * 12 + 5
EPOCHS = 2
SLOW = 1
PARTS = [field.name for field in fields(StepTimes) if field.name.endswith("_s")]
PARTS.remove("wall_s")


def train(rank, emit, log, epochs):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = TensorDataset(torch.randn(SAMPLES, 64), torch.randint(0, 10, (SAMPLES,)))
    around_s = []  # times before and after the end of each step's lap
    with offbeat.join(model, optimizer, AllReduce(), run_log=log) as session:
        for epoch in session.epochs(epochs):
            for x, y in session.batches(dataset, 16):
                optimizer.zero_grad()
                compute(0.01)  # far more than the delay by other processes on the machine
                F.cross_entropy(model(x), y).backward()
                before_s = time.perf_counter()
                optimizer.step()
                around_s.append((before_s, time.perf_counter()))
            session.report(loss=float(epoch))
            emit(epoch)
    return around_s


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four workers, one of them slow: its log, and the times when each worker's steps ended."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    with job(train, WORKERS, str(path), EPOCHS, env={"OFFBEAT_SLOW": f"{SLOW}:5"}) as running:
        around_s = values(running.ends())
    return path, read_log(path), around_s


def test_the_parts_of_every_step_sum_to_its_wall_time(run):
    _, log, _ = run
    for worker in range(WORKERS):
        steps = step_times(log.entries, worker)
        assert [one.step for one in steps] == list(range(steps_an_epoch() * EPOCHS))
        for one in steps:
            parts_s = [getattr(one, name) for name in PARTS]
            assert min(parts_s) >= 0
            assert abs(sum(parts_s) - one.wall_s) <= max(0.01 * one.wall_s, 1e-4)


def test_the_wall_times_of_steps_leave_no_gap_between_them(run):
    """Each lap ends within its call of `step()`, so their sum lies between the innermost and outermost."""
    _, log, around_s = run
    for worker in range(WORKERS):
        covered_s = 0.0
        first_before_s, first_after_s = around_s[worker][0]
        for one, (before_s, after_s) in zip(
            step_times(log.entries, worker)[1:], around_s[worker][1:], strict=True
        ):
            covered_s += one.wall_s
            assert before_s - first_after_s <= covered_s + 1e-9
            assert covered_s <= after_s - first_before_s + 1e-9


def test_the_slow_worker_computes_longer_and_the_others_wait_longer(run):
    _, log, _ = run
    shares = []
    for worker in range(WORKERS):
        steps = step_times(log.entries, worker)
        wall_s = sum(one.wall_s for one in steps)
        shares.append(
            {name: sum(getattr(one, name) for one in steps) / wall_s for name in ("compute_s", "wait_s")}
        )
    for worker in range(WORKERS):
        if worker != SLOW:
            assert shares[worker]["wait_s"] > shares[SLOW]["wait_s"]
            assert shares[worker]["compute_s"] < shares[SLOW]["compute_s"]
    received = [
        [e.compute_s for e in log.entries if isinstance(e, Ready) and e.worker == worker]
        for worker in range(WORKERS)
    ]
    assert max(range(WORKERS), key=lambda worker: sum(received[worker])) == SLOW


def test_every_action_has_a_reason(run):
    _, log, _ = run
    actions = [e for e in log.entries if isinstance(e, PeerList | Group | AbortJob)]
    assert [type(one) for one in actions] == [PeerList, Group]
    assert all(one.reason for one in actions)


def test_the_log_begins_and_ends_with_its_workers(run):
    _, log, _ = run
    assert log.header["world"] == WORKERS
    assert not log.is_truncated
    assert sorted(e.worker for e in log.entries if isinstance(e, Joined)) == list(range(WORKERS))
    assert sorted(e.worker for e in log.entries if isinstance(e, Left)) == list(range(WORKERS))
    assert not any(isinstance(e, Lost) for e in log.entries)
    times_s = [e.now_s for e in log.entries if hasattr(e, "now_s")]
    assert times_s == sorted(times_s)


def steps_an_epoch():
    return EqualShards(samples=SAMPLES, workers=WORKERS, batch_size=16, seed=0, epoch=0, shuffle=True).steps


def test_the_samples_of_all_workers_in_an_epoch_are_the_data_set(run):
    _, log, _ = run
    for events in (step_times(log.entries), [e for e in log.entries if isinstance(e, Ready)]):
        for epoch in range(EPOCHS):
            first = epoch * steps_an_epoch()
            in_epoch = [e for e in events if first <= e.step < first + steps_an_epoch()]
            assert sum(e.samples for e in in_epoch) == SAMPLES
    assert SAMPLES % (16 * WORKERS)  # the last step has uneven batches


def test_replay_with_new_policies_reproduces_the_logged_actions(run):
    assert replay(run[1]) is None


def changed(path, tmp_path, change):
    lines = path.read_text().splitlines(keepends=True)
    copy = tmp_path / "changed.jsonl"
    copy.write_text("".join(change(lines)))
    return copy


def line_of(lines, kind, which=0):
    return [number for number, line in enumerate(lines) if f'"type":"{kind}"' in line][which]


def without(kind, which=0):
    def change(lines):
        del lines[line_of(lines, kind, which)]
        return lines

    return change


def edited(kind, pattern, text, which=0):
    def change(lines):
        number = line_of(lines, kind, which)
        lines[number], count = re.subn(pattern, text, lines[number], count=1)
        assert count == 1
        return lines

    return change


@pytest.mark.parametrize(
    "change",
    [
        without("Joined"),
        without("PeerList"),
        without("Group"),
        without("Ready"),
        without("Ready", -WORKERS - 1),
        edited("Group", r'"weights":\[0.25,0.25', '"weights":[0.2,0.3'),
        edited("Group", r'"members":\[0,1,2,3\]', '"members":[0,1,2]'),
        edited("PeerList", r'"reason":"all', '"reason":"nearly all'),
        edited("Ready", r'"step":\d+', '"step":999', 9),
        edited("Ready", r'"worker":\d', '"worker":7', 5),
    ],
    ids=lambda change: None,
)
def test_a_changed_event_or_action_is_found_by_replay(run, tmp_path, change):
    path, _, _ = run
    assert replay(read_log(changed(path, tmp_path, change))) is not None


@pytest.mark.parametrize(
    "change",
    [
        edited("Ready", r'"step":\d+', '"step":-1', 9),
        edited("StepsTimed", r'"wall_s":', '"wall_ms":', 3),
        edited("StepsTimed", r'"compute_s":', '"compute_s":-', 3),
        edited("Left", "Left", "Gone"),
        edited("Left", r"\}", ""),
    ],
    ids=lambda change: None,
)
def test_a_line_that_is_not_an_event_is_named(run, tmp_path, change):
    with pytest.raises(ValueError, match=r"changed\.jsonl, line \d+: expected an event or action"):
        read_log(changed(run[0], tmp_path, change))


def killed(tmp_path, victims):
    """Kills workers, coordinator or both in the middle of a run; returns the path of the log."""
    path = tmp_path / "run.jsonl"
    path.touch()
    with job(train, WORKERS, str(path), 10_000, env={"OFFBEAT_SLOW": "1:2"}) as running:
        # Killed together with its supervisor, a coordinator loses the entries not yet written: half a
        # second at most.
        while b"StepsTimed" not in path.read_bytes():
            running.receive(*range(WORKERS))
        if "coordinator" in victims:
            running.kill_coordinator()
        for process in running.cluster.processes if "workers" in victims else []:
            os.kill(process.pid, signal.SIGKILL)
        for process in running.cluster.processes:
            process.join(DEADLINE_S)
    return path


@pytest.mark.long(after=1)
@pytest.mark.parametrize("victims", ["coordinator and workers", "coordinator", "workers"])
def test_the_log_of_a_killed_run_is_read_and_replayed(tmp_path, victims):
    path = killed(tmp_path, victims)
    log = read_log(path)
    assert step_times(log.entries)
    assert replay(log) is None
    if "coordinator" not in victims:
        stop = [e for e in log.entries if isinstance(e, AbortJob)]
        assert len(stop) == 1
        assert "was lost" in stop[0].reason
        assert not log.is_truncated


def test_a_log_cut_anywhere_in_its_last_lines_is_read_and_replayed(run, tmp_path):
    path, whole, _ = run
    content = path.read_bytes()
    last_lines = len(b"".join(content.splitlines(keepends=True)[-2:]))
    copy = tmp_path / "cut.jsonl"
    for length in range(len(content) - last_lines, len(content)):
        copy.write_bytes(content[:length])
        log = read_log(copy)
        assert log.entries == whole.entries[: len(log.entries)]
        assert len(log.entries) >= len(whole.entries) - 2
        assert replay(log) is None
