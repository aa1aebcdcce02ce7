"""A log, trace or output file that cannot be written never ends a training; tested on disks that are full."""

import os
import signal
import subprocess
import sys
from collections import deque
from typing import get_args

import pytest

from offbeat.cli.main import main
from offbeat.events import Event, Left, Tick
from offbeat.policies import dispatch_event
from offbeat.runtime.training.tracing import Tracer
from offbeat.strategies import AllReduce
from offbeat.wire.log_file import LogWriter, read_log
from offbeat.wire.replay import build_policies, replay
from support.coordinator_process import coordinator, goes_on, running_job
from support.every_event import HEADER
from support.full_disks import files_of_at_most, fill, needs_disk, small_disk
from support.group_training import agree, train
from support.jobs import job
from support.joined_events import joined
from support.processes import values
from support.run_logs import step_times, wait_until

LIMIT_BYTES = 8192
FULL = {"disk": "No space left on device", "limit": "File too large"}
AT_MOST = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT_BYTES}, {LIMIT_BYTES}))"


def events_of(log):
    return sum(isinstance(entry, get_args(Event)) for entry in log.entries)


# The file --------------------------------------------------------------------------------------------------


def write_until_it_fails(path, size_bytes):
    """Writes a log that cannot grow beyond a size; returns its number of events and all intended ones."""
    policies = build_policies(HEADER)
    writer = LogWriter(path, HEADER)
    wanted = []

    def write(number):
        event = joined(number) if number < 2 else Tick(now_s=float(number))
        actions = dispatch_event(policies, event)
        wanted.append((event, *actions))
        writer.add_event(event)
        writer.add_actions(actions)
        if number % 3 == 2:
            writer.flush()

    with files_of_at_most(size_bytes), pytest.raises(OSError, match="File too large"):
        deque(map(write, range(size_bytes)), maxlen=0)
    writer.close_unflushed()
    return writer.events, wanted


def test_a_log_of_limited_size_ends_with_a_whole_event_at_any_limit(tmp_path):
    """The second event has two actions; the log never ends between them either."""
    begin = LogWriter(tmp_path / "header", HEADER).size_bytes
    ends = set()
    for size_bytes in range(begin, begin + 1400, 5):
        events, wanted = write_until_it_fails(tmp_path / "log", size_bytes)
        log = read_log(tmp_path / "log")
        assert not log.is_truncated
        assert log.entries == [entry for answered in wanted[:events] for entry in answered]
        assert replay(log) is None
        assert (tmp_path / "log").stat().st_size <= size_bytes
        ends.add(events)
    assert ends == set(range(max(ends) + 1))


# The coordinator -------------------------------------------------------------------------------------------


@pytest.fixture(params=["limit", pytest.param("disk", marks=needs_disk)])
def place(request, tmp_path):
    """A path for a log whose disk is full soon after `fill_up()`, and the system's error text."""

    class Place:
        prelude = AT_MOST if request.param == "limit" else ""
        cause = FULL[request.param]

        def fill_up(self):
            if request.param == "disk":
                fill(self.log.parent)

    one = Place()
    if request.param == "limit":
        one.log = tmp_path / "log.jsonl"
        yield one
    else:
        with small_disk(tmp_path / "disk") as disk:
            one.log = disk / "log.jsonl"
            yield one


def test_a_coordinator_whose_log_cannot_grow_reports_it_once_and_the_job_continues(place):
    options = {"tick_s": 0.002, "journal_events_max": 5, "prelude": place.prelude}
    with running_job(2, place.log, **options) as (process, peers):
        place.fill_up()
        message = process.process.stderr.readline().decode()
        goes_on(peers, process)  # without another line on standard error
    log = read_log(place.log)
    assert message == (
        f"offbeat: the run log {place.log} cannot be written any more ({place.cause}): it is complete "
        f"up to event {events_of(log)}, and the job continues without a log\n"
    )
    assert not log.is_truncated
    assert replay(log) is None
    assert not any(isinstance(entry, Left) for entry in log.entries)


@pytest.mark.parametrize(
    ("log", "cause"),
    [("/dev/full", "No space left on device"), ("/no such folder/log", "No such file or directory")],
)
def test_a_log_that_cannot_be_created_is_a_startup_error_that_names_the_file(log, cause):
    with coordinator(2, log=log) as process:
        assert process.answer["error"].endswith(f"{cause}: {log!r}")
        assert process.ended() == (1, "")


# A job -----------------------------------------------------------------------------------------------------


def trains(rank, emit, errors, epochs):
    """Standard error of all workers, and so of the coordinator, goes to a file."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    last = -1

    def before_step(session):
        nonlocal last
        if session.step // 10 > last:
            last = session.step // 10
            emit(session.step)

    return train(rank, emit, AllReduce(), epochs, before_step)


def about_the_log(errors):
    text = errors.read_text() if errors.exists() else ""
    return [line for line in text.splitlines() if "the run log" in line]


@pytest.mark.long
@needs_disk
def test_a_job_succeeds_although_its_log_is_on_a_full_disk_and_its_coordinator_is_killed(tmp_path):
    errors = tmp_path / "errors"
    with small_disk(tmp_path / "disk") as disk:
        log = disk / "log.jsonl"
        with job(trains, 3, str(errors), 10, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
            wait_until(lambda: log.exists() and b"StepsTimed" in log.read_bytes(), "a step in the log")
            fill(disk)
            wait_until(lambda: bool(about_the_log(errors)), "a line about the log")
            for _ in range(2):
                os.kill(running.coordinator(), signal.SIGKILL)
                running.receive(0, 1, 2)
            agree(values(running.ends()))
        (line,) = about_the_log(errors)
        read = read_log(log)
    assert replay(read) is None
    assert step_times(read.entries)
    assert f"the run log {log} cannot be written any more (No space left on device)" in line
    assert f"it is complete up to event {events_of(read)}, " in line


# Output and traces -----------------------------------------------------------------------------------------


@pytest.mark.long
@needs_disk
def test_offbeat_train_succeeds_although_its_folder_is_on_a_full_disk(tmp_path, capsys):
    with small_disk(tmp_path / "disk") as disk:
        line = f"train --workers 2 --epochs 40 --batch-size 16 --run-dir {disk / 'run'}"
        assert main(line.split()) == 0
        message = capsys.readouterr().err.splitlines()
        assert replay(read_log(disk / "run/log.jsonl")) is None
    assert any("log.jsonl is incomplete" in line for line in message)


@needs_disk
def test_worker_output_that_cannot_be_written_is_dropped(tmp_path):
    from offbeat.cli.job import WorkerOutputFile

    with small_disk(tmp_path / "disk") as disk:
        with WorkerOutputFile(disk / "output.txt") as output:
            output.write_line(0, "hello")
            fill(disk)
            for _ in range(1000):
                output.write_line(1, "and so on")
        assert output.error.strerror == "No space left on device"
        assert (disk / "output.txt").read_text().startswith("[worker 0] hello\n[worker 1] and so on\n")


@pytest.mark.long
def test_output_to_a_full_disk_does_not_end_workers_of_offbeat_run_replace(tmp_path):
    code = "import os; print('hello'); open('done-' + os.environ['RANK'], 'w')"
    (tmp_path / "script.py").write_text(code)
    command = [sys.executable, "-m", "offbeat", "run", "--replace", "1", "--nproc-per-node", "2", "script.py"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 1
    message = "offbeat: the workers' output is no longer shown: No space left on device"
    assert done.stderr.splitlines() == [message, "offbeat: 2 workers ended well"]
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}


def test_a_trace_that_cannot_be_written_is_reported_once(tmp_path, capsys):
    (tmp_path / "file").write_text("this is no folder")
    tracer = Tracer(str(tmp_path / "file" / "trace"), 3, first_step=0)
    for step in range(4):
        tracer.on_step_start(step)
        tracer.add_span("loop", "compute", 0.0, 1.0)
    tracer.close()
    path = tmp_path / "file" / "trace" / "worker-3.json"
    assert capsys.readouterr().err == (
        f"offbeat: the trace {path} cannot be written (Not a directory); training continues without it\n"
    )
