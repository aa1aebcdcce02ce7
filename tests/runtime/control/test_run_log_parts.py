"""Promises of a run log with a size limit: its parts, their removal, and a successor that continues them."""

import os
import shutil
import signal
from itertools import pairwise
from typing import get_args

import pytest

from offbeat.cli.main import main
from offbeat.events import Event, Left, Ready
from offbeat.policies import dispatch_event
from offbeat.runtime.control.run_log import LOG_BYTES_MIN, RunLog
from offbeat.strategies import AllReduce
from offbeat.wire.codec import to_plain
from offbeat.wire.log_file import read_log, read_logs
from offbeat.wire.replay import build_policies, replay
from support.coordinator_process import coordinator
from support.every_event import HEADER
from support.full_disks import files_of_at_most
from support.group_training import agree, train
from support.jobs import job
from support.joined_events import joined
from support.processes import values
from support.run_logs import step_times

PART_BYTES = LOG_BYTES_MIN // 16


class Written:
    """A log with a size limit as a coordinator writes it, of a job of two workers that compute without end.

    Attributes:
        wanted: all events with their actions, in order.
        ended: whether the log could not be written any more.
    """

    def __init__(self, path, bytes_max=LOG_BYTES_MIN):
        self.path = path
        self.ended = False
        self.wanted = []
        self.policies = build_policies(HEADER)
        self.log = RunLog(str(path), HEADER, bytes_max=bytes_max, on_end=lambda: setattr(self, "ended", True))

    def add(self, events):
        for _ in range(events):
            number = len(self.wanted)
            event = joined(number) if number < 2 else self._ready(number - 2)
            actions = dispatch_event(self.policies, event)
            self.wanted.append((event, *actions))
            self.log.write_event(to_plain(event), [to_plain(action) for action in actions])
            if self.log.is_part_due:
                self.begin_part()

    def begin_part(self):
        self.log.begin_part([policy.state_dict() for policy in self.policies])

    def add_until_a_part_begins(self):
        parts = self.log.position.part
        while self.log.position.part == parts:
            self.add(1)

    def _ready(self, number):
        round_, worker = divmod(number, 2)
        return Ready(
            now_s=float(number),
            worker=worker,
            generation=0,
            epoch=0,
            step=round_,
            round=round_,
            compute_s=0.1,
            samples=1,
            blocks=(),
        )

    def read(self):
        """The remaining parts; checks that each part replays and that the parts follow one another."""
        logs = list(read_logs(self.path).values())
        assert [replay(log) for log in logs] == [None] * len(logs)
        for before, after in pairwise(logs):
            assert after.events_before == before.events_before + events_of(before)
            assert after.header["part"] == before.header.get("part", 1) + 1
        return logs


def events_of(log):
    return sum(isinstance(entry, get_args(Event)) for entry in log.entries)


def entries_of(logs):
    return [entry for log in logs for entry in log.entries]


def flat(answered):
    return [entry for entries in answered for entry in entries]


def sizes(folder):
    return [path.stat().st_size for path in folder.iterdir()]


def test_each_part_begins_with_the_policies_state_and_replays_by_itself(tmp_path):
    written = Written(tmp_path / "log.jsonl")
    for _ in range(3):
        written.add_until_a_part_begins()
    written.add(10)
    written.log.close()
    assert entries_of(written.read()) == flat(written.wanted)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["log.000001.jsonl", "log.000002.jsonl", "log.000003.jsonl", "log.jsonl"]
    for name in names[1:]:
        part = read_log(tmp_path / name)
        assert replay(part) is None
        without = {key: value for key, value in part.header.items() if key != "states"}
        assert replay(type(part)(header=without, entries=part.entries)) is not None


def test_the_parts_never_exceed_the_size_limit_and_use_most_of_it(tmp_path):
    written = Written(tmp_path / "log.jsonl")
    for _ in range(40):
        written.add_until_a_part_begins()
        assert sum(sizes(tmp_path)) <= LOG_BYTES_MIN
        assert min(sizes(tmp_path)) > 0  # a removed part leaves no empty file
    written.add(200)
    written.log.close()
    assert 0.75 * LOG_BYTES_MIN <= sum(sizes(tmp_path)) <= LOG_BYTES_MIN
    logs = written.read()
    assert entries_of(logs) == flat(written.wanted[logs[0].events_before :])
    assert max(sizes(tmp_path)) < 1.1 * PART_BYTES


def test_a_removed_part_frees_its_space_although_a_reader_has_it_open(tmp_path):
    written = Written(tmp_path / "log.jsonl")
    with (tmp_path / "log.jsonl").open("rb") as first:
        while (
            not written.wanted or (tmp_path / "log.000001.jsonl").exists() or written.log.position.part == 1
        ):
            written.add_until_a_part_begins()
        assert os.fstat(first.fileno()).st_nlink == 0
        assert os.fstat(first.fileno()).st_size == 0


def test_a_new_log_replaces_an_existing_one_and_leaves_other_files_alone(tmp_path):
    written = Written(tmp_path / "log.jsonl")
    for _ in range(2):
        written.add_until_a_part_begins()
    mine = tmp_path / "log.000007.jsonl"
    mine.write_text('{"samples": 7}\n')
    again = Written(tmp_path / "log.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, "log.jsonl"]
    while not again.ended:
        again.add(1)
    assert mine.read_text() == '{"samples": 7}\n'


def test_a_file_with_the_name_of_the_next_part_ends_the_log_and_is_not_replaced(tmp_path, capsys):
    written = Written(tmp_path / "log.jsonl")
    (tmp_path / "log.000001.jsonl").write_text("mine")
    while not written.ended:
        written.add(1)
    assert (tmp_path / "log.000001.jsonl").read_text() == "mine"
    assert "log.000001.jsonl is there already" in capsys.readouterr().err
    assert entries_of([read_log(tmp_path / "log.jsonl")]) == flat(written.wanted)


@pytest.mark.parametrize("step", ["before", "half of the next part", "renamed", "the next part has the name"])
def test_a_successor_of_a_coordinator_killed_while_a_part_began_continues_the_old_part(step, tmp_path):
    path = tmp_path / "log.jsonl"
    written = Written(path)
    for _ in range(2):
        written.add_until_a_part_begins()
    written.add(20)
    written.log.flush()
    place, count = written.log.position, len(written.wanted)
    state = [policy.state_dict() for policy in written.policies]
    written.add(20)  # entries after the position that the successor resumes from
    written.log.flush()
    before = path.read_bytes()
    written.begin_part()
    renamed, next_file = tmp_path / "log.000003.jsonl", tmp_path / "log.jsonl.next"
    if step != "the next part has the name":
        shutil.move(path, next_file)
    if step in ("before", "half of the next part"):
        shutil.move(renamed, path)
        next_file.write_bytes(next_file.read_bytes()[:100])
        assert path.read_bytes() == before
    if step == "before":
        next_file.unlink()
    successor = Written.__new__(Written)
    successor.path, successor.ended, successor.wanted = path, False, written.wanted[:count]
    successor.policies = build_policies(HEADER)
    for policy, one in zip(successor.policies, state, strict=True):
        policy.load_state_dict(one)
    successor.log = written.log
    successor.log.resume(place)
    successor.add(50)
    successor.add_until_a_part_begins()
    successor.log.close()
    assert entries_of(successor.read()) == flat(successor.wanted)
    assert not next_file.exists()


@pytest.mark.parametrize("size_bytes", [PART_BYTES + 300, 300])
def test_a_part_that_cannot_be_created_leaves_the_earlier_parts_unchanged(size_bytes, tmp_path, capsys):
    """300 bytes are too few even for the header of a part."""
    written = Written(tmp_path / "log.jsonl")
    written.add_until_a_part_begins()
    written.add(20)
    written.log.flush()
    with files_of_at_most(size_bytes):
        written.begin_part()
    assert written.ended == (size_bytes == 300)
    if written.ended:
        line = capsys.readouterr().err
        assert (
            f"cannot be written any more (File too large): it is complete up to event {len(written.wanted)},"
            in line
        )
        assert line.count("\n") == 1
        written.add(20)  # not written
        del written.wanted[-20:]
        assert written.log.position is None
    written.log.close()
    assert entries_of(written.read()) == flat(written.wanted)
    assert not (tmp_path / "log.jsonl.next").exists()


def test_a_removed_folder_ends_the_log_with_one_line(tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    written = Written(folder / "log.jsonl")
    written.add(10)
    shutil.rmtree(folder)
    while not written.ended:
        written.add(1)
    line = capsys.readouterr().err
    assert line.startswith(
        f"offbeat: the run log {folder / 'log.jsonl'} cannot be written any more (No such file"
    )
    assert line.count("\n") == 1


def test_a_state_too_large_for_the_size_limit_ends_the_log_and_names_the_needed_limit(tmp_path, capsys):
    written = Written(tmp_path / "log.jsonl")
    written.add(100)
    written.log.begin_part([{"much": "x" * PART_BYTES}])
    assert written.ended
    assert "set a log size limit of 2" in capsys.readouterr().err
    assert entries_of(written.read()) == flat(written.wanted)


@pytest.mark.parametrize(
    ("log", "bytes_max", "words"),
    [
        ("log.jsonl", 1000, "expected a size limit of at least 1048576 bytes for the run log, got 1000"),
        (
            "/dev/null",
            LOG_BYTES_MIN,
            "expected a regular file for a run log with a size limit, got /dev/null",
        ),
    ],
)
def test_an_invalid_size_limit_is_an_error_at_startup(log, bytes_max, words, tmp_path):
    with coordinator(2, tmp_path / log, log_bytes_max=bytes_max) as process:
        assert process.answer["error"] == words
        assert process.ended() == (1, "")


# Replay ----------------------------------------------------------------------------------------------------


def test_offbeat_replay_accepts_a_folder_and_a_part(tmp_path, capsys):
    written = Written(tmp_path / "log.jsonl")
    for _ in range(20):
        written.add_until_a_part_begins()
    written.log.close()
    logs = written.read()
    before, events = logs[0].events_before, sum(map(events_of, logs))
    assert before > 0
    assert main(["replay", str(tmp_path)]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith(f"identical: {events} events, ")
    assert output[1].startswith(f"the log starts after {before} earlier events")
    part = sorted(tmp_path.iterdir())[0]
    assert main(["replay", str(part)]) == 0
    assert capsys.readouterr().out.startswith(f"identical: {events_of(logs[0])} events, ")
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join([lines[0], *lines[2:]]))
    assert main(["replay", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{part}: entry ")


@pytest.mark.parametrize("states", ["", "nonsense", "kA==", 7, None, "kpGAgA=="])
def test_a_header_with_invalid_states_is_rejected_with_a_clear_error(states, tmp_path):
    written = Written(tmp_path / "log.jsonl")
    written.add(10)
    log = read_log(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="expected the log's header to hold a state of each policy"):
        replay(type(log)(header={**log.header, "states": states}, entries=log.entries))


# A job -----------------------------------------------------------------------------------------------------


def trains(rank, emit, epochs):
    last = -1

    def before_step(session):
        nonlocal last
        if session.step // 200 > last:
            last = session.step // 200
            emit(session.step)

    return train(rank, emit, AllReduce(), epochs, before_step, compute_s=0.0)


@pytest.mark.long
def test_a_job_whose_coordinator_is_killed_repeatedly_has_a_log_within_its_size_limit(tmp_path):
    path = tmp_path / "log.jsonl"
    env = {"OFFBEAT_RUN_LOG": str(path), "OFFBEAT_RUN_LOG_BYTES_MAX": str(LOG_BYTES_MIN)}
    with job(trains, 3, 120, env=env) as running:
        for _ in range(4):
            running.receive(0, 1, 2)
            os.kill(running.coordinator(), signal.SIGKILL)
            assert sum(sizes(tmp_path)) <= LOG_BYTES_MIN
        agree(values(running.ends()))
    assert 0.5 * LOG_BYTES_MIN <= sum(sizes(tmp_path)) <= LOG_BYTES_MIN
    written = Written.__new__(Written)
    written.path = path
    logs = written.read()
    assert len(logs) > 5
    assert logs[0].events_before > 0
    entries = entries_of(logs)
    assert sorted(entry.worker for entry in entries if isinstance(entry, Left)) == [0, 1, 2]
    for worker in range(3):
        steps = [times.step for times in step_times(entries, worker)]
        assert steps == list(range(steps[0], steps[-1] + 1))
