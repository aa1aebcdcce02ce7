"""`LogTail` returns each line of a growing log once, across its parts, removed and replaced files."""

import os

import pytest

from offbeat.wire.log_file import log_part_path
from offbeat.wire.log_tail import LogTail


def header(part=1, job="a"):
    return b'{"offbeat_log":4,"job":"%s"%s}\n' % (
        job.encode(),
        b"" if part == 1 else b',"part":%d' % part,
    )


def lines(*numbers):
    return b"".join(b"line %d\n" % number for number in numbers)


def numbers_of(tail):
    """The numbers of all lines that are there now."""
    found = []
    while more := tail.read_lines():
        found += [int(line.removeprefix(b"line ")) for line in more]
    return found


def append(path, data):
    with path.open("ab") as file:
        file.write(data)


def begin_part(path, number):
    """Begins part `number`, as the writer of a log with a bound does."""
    new = path.with_name("new")
    new.write_bytes(header(number))
    path.rename(log_part_path(path, number - 1))
    new.rename(path)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log.jsonl"


def test_lines_come_once_and_whole_however_they_are_written(log):
    tail = LogTail(log)
    assert (tail.read_lines(), tail.has_begun) == ([], False)
    found = []
    for byte in header() + lines(*range(20)) + b"line 99":
        append(log, bytes([byte]))
        found += numbers_of(tail)
    assert found == [*range(20)]
    assert tail.has_begun


def test_a_log_in_parts_is_read_from_the_oldest_part_on(log):
    log.write_bytes(header() + lines(1, 2))
    begin_part(log, 2)
    append(log, lines(3))
    begin_part(log, 3)
    append(log, lines(4))
    assert numbers_of(LogTail(log)) == [1, 2, 3, 4]


def test_new_parts_are_read_after_the_rest_of_the_old_one(log):
    log.write_bytes(header() + lines(1))
    tail = LogTail(log)
    assert numbers_of(tail) == [1]
    append(log, lines(2))
    begin_part(log, 2)
    append(log, lines(3))
    begin_part(log, 3)
    assert numbers_of(tail) == [2, 3]
    append(log, lines(4))
    assert numbers_of(tail) == [4]
    assert tail.restarts == 0


def test_parts_that_were_removed_before_they_were_read_are_left_out(log):
    log.write_bytes(header() + lines(1))
    tail = LogTail(log)
    assert numbers_of(tail) == [1]
    for part in (2, 3, 4):
        begin_part(log, part)
        append(log, lines(part))
    for part in (1, 2):
        os.truncate(log_part_path(log, part), 0)
        log_part_path(log, part).unlink()
    assert numbers_of(tail) == [3, 4]


def test_lines_that_a_restarted_coordinator_writes_again_are_read_once(log):
    log.write_bytes(header() + lines(1, 2, 3))
    tail = LogTail(log)
    assert numbers_of(tail) == [1, 2, 3]
    os.truncate(log, len(header() + lines(1)))
    assert numbers_of(tail) == []
    append(log, lines(2, 3, 4))
    assert numbers_of(tail) == [4]
    assert tail.restarts == 0


def test_a_part_that_was_taken_back_starts_the_reading_over(log):
    log.write_bytes(header() + lines(1))
    begin_part(log, 2)
    append(log, lines(2))
    tail = LogTail(log)
    assert numbers_of(tail) == [1, 2]
    log_part_path(log, 1).rename(log)
    append(log, lines(2, 3))
    assert numbers_of(tail) == [1, 2, 3]
    assert tail.restarts == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_another_job_in_the_same_place_starts_the_reading_over(in_place, log):
    log.write_bytes(header() + lines(1, 2, 3))
    tail = LogTail(log)
    assert numbers_of(tail) == [1, 2, 3]
    if not in_place:
        log.unlink()
        assert numbers_of(tail) == []
    log.write_bytes(header(job="b") + lines(7))
    assert numbers_of(tail) == [7]
    assert tail.restarts == 1


def test_a_file_that_is_no_log_is_refused(log):
    log.write_bytes(b"text\n")
    with pytest.raises(ValueError, match="is not a run log"):
        LogTail(log).read_lines()
