"""Promises of the journal: the next process finds all flushed records, wherever the writer was killed."""

import os
import random
import signal
import struct
from contextlib import contextmanager

import pytest

from offbeat.errors import OffbeatError
from offbeat.runtime.control.journal import Journal

HEAD_BYTES, RECORD_HEAD_BYTES = 16, 8
RECORDS = [random.Random(number).randbytes(number % 50) for number in range(200)]


@contextmanager
def opened(folder=None):
    """A journal whose files are closed afterwards, as at the end of its process."""
    journal = Journal(folder)
    try:
        yield journal
    finally:
        for file in journal._files:
            os.close(file)


@pytest.fixture(params=["anonymous", "in a folder"])
def journal(request, tmp_path):
    with opened(None if request.param == "anonymous" else tmp_path / "state") as journal:
        yield journal


def written_elsewhere(journal, write):
    """Writes to a journal in another process, and returns it."""
    child = os.fork()
    if not child:
        try:
            write(journal)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return journal


def test_flushed_records_are_found_and_unflushed_ones_are_not(journal):
    def write(journal):
        for record in RECORDS[:20]:
            journal.append(record)
        journal.flush()
        journal.append(b"not flushed")

    assert written_elsewhere(journal, write).read() == (b"", RECORDS[:20])


def test_a_snapshot_replaces_all_records_before_it(journal):
    def write(journal):
        for number, record in enumerate(RECORDS):
            journal.append(record)
            if number % 30 == 29:
                journal.replace_by_snapshot(b"snapshot %d" % number)
        journal.flush()

    written_elsewhere(journal, write)
    assert journal.read() == (b"snapshot 179", RECORDS[180:])
    assert journal.records_since_snapshot == 20


@pytest.mark.parametrize("snapshot", [b"", b"a snapshot"])
def test_a_truncated_journal_keeps_its_whole_records_and_accepts_further_ones(snapshot):
    begin = HEAD_BYTES + len(snapshot)
    lengths = [RECORD_HEAD_BYTES + len(record) for record in RECORDS[:4]]
    for length in range(begin, begin + sum(lengths) + 1):
        with opened() as journal:
            journal.replace_by_snapshot(snapshot)
            for record in RECORDS[:4]:
                journal.append(record)
            journal.flush()
            os.ftruncate(journal._files[journal._active], length)
            whole = sum(begin + sum(lengths[: count + 1]) <= length for count in range(4))
            assert journal.read() == (snapshot, RECORDS[:whole])
            journal.append(b"and on")
            journal.flush()
            assert journal.read() == (snapshot, [*RECORDS[:whole], b"and on"])


def test_an_incomplete_snapshot_is_ignored(journal):
    journal.replace_by_snapshot(b"the first")
    journal.append(b"a record")
    journal.flush()
    os.pwrite(journal._files[1 - journal._active], b"half a snapsh", HEAD_BYTES)
    assert journal.read() == (b"the first", [b"a record"])
    journal.replace_by_snapshot(b"the second")
    assert journal.read() == (b"the second", [])


def test_a_record_of_which_the_disk_has_lost_bytes_is_ignored_with_all_after_it(journal):
    for record in RECORDS[1:4]:
        journal.append(record)
    journal.flush()
    second = HEAD_BYTES + RECORD_HEAD_BYTES + len(RECORDS[1]) + RECORD_HEAD_BYTES
    os.pwrite(journal._files[0], bytes(len(RECORDS[2])), second)
    assert journal.read() == (b"", RECORDS[1:2])
    journal.append(b"and on")
    journal.flush()
    assert journal.read() == (b"", [*RECORDS[1:2], b"and on"])


def test_a_journal_in_a_folder_is_found_again_and_one_at_a_time_uses_it(tmp_path):
    with opened(tmp_path / "a" / "b") as first:
        first.replace_by_snapshot(b"a snapshot")
        first.append(b"a record")
        first.flush()
        with pytest.raises(OffbeatError, match=r"no other coordinator uses, got .*/a/b"):
            Journal(tmp_path / "a" / "b")
    with opened(tmp_path / "a" / "b") as second:
        assert second.read() == (b"a snapshot", [b"a record"])


def test_a_writer_killed_at_any_time_leaves_all_flushed_records():
    """The writer counts in records and in snapshots, and reports each flushed number on a pipe."""
    for _ in range(30):
        with opened() as journal:
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                for number in range(10**9):
                    journal.append(struct.pack("<Q", number) * 100)
                    journal.flush()
                    if number % 7 == 0:
                        journal.replace_by_snapshot(struct.pack("<Q", number) * 100)
                    os.write(writing, struct.pack("<Q", number))
            os.close(writing)
            for _ in range(random.randrange(1, 60)):
                (reported,) = struct.unpack("<Q", os.read(reading, 8))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            while data := os.read(reading, 8):
                (reported,) = struct.unpack("<Q", data)
            os.close(reading)
            snapshot, records = journal.read()
            numbers = [struct.unpack("<Q", one[:8])[0] for one in ([snapshot] if snapshot else []) + records]
            assert all(len(one) == 800 for one in records)
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            assert numbers[-1] in (reported, reported + 1)


def test_a_journal_stays_small_and_leaves_no_file_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with opened() as journal:
        for number in range(10_000):
            journal.append(bytes(100))
            journal.flush()
            if number % 100 == 0:
                journal.replace_by_snapshot(bytes(1000))
            assert sum(journal.file_sizes_bytes) < 20_000
    assert not list(tmp_path.iterdir())
