"""The run log: what was written is read, wherever the writer was stopped."""

import json
from itertools import pairwise

import pytest

from offbeat.events import (
    AbortJob,
    Tick,
)
from offbeat.wire.log_file import LOG_VERSION, LogWriter, read_log
from offbeat.wire.replay import replay
from support.every_event import EXAMPLES, HEADER
from support.recorded_run import recorded_run, write_log


def test_a_log_round_trips_and_replays(tmp_path):
    write_log(recorded_run(), tmp_path / "log")
    log = read_log(str(tmp_path / "log"))
    assert log == recorded_run()
    assert replay(log) is None


def test_the_log_is_json_lines_with_the_header_first(tmp_path):
    write_log(recorded_run(), tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    assert json.loads(lines[0]) == {"offbeat_log": LOG_VERSION, **HEADER}
    assert [json.loads(line)["type"] for line in lines[1:6]] == [
        "Joined",
        "Joined",
        "PeerList",
        "Group",
        "Ready",
    ]


def test_the_header_is_in_the_file_before_anything_happens(tmp_path):
    writer = LogWriter(tmp_path / "log", HEADER)
    assert read_log(tmp_path / "log").entries == []
    writer.add_event(EXAMPLES[1])
    assert read_log(tmp_path / "log").entries == []
    writer.flush()
    assert read_log(tmp_path / "log").entries == [EXAMPLES[1]]
    writer.close()
    writer.close()


def test_the_write_buffer_is_bounded_and_an_event_stays_with_its_actions(tmp_path):
    path = tmp_path / "log"
    writer = LogWriter(path, HEADER)
    stop = AbortJob(worker=0, step=0, reason="x" * 1000)
    sizes = {path.stat().st_size}
    for _ in range(300):
        writer.add_event(Tick(now_s=0.0))
        writer.add_actions([stop, stop])
        if path.stat().st_size not in sizes:
            sizes.add(path.stat().st_size)
            assert len(path.read_bytes().splitlines()) % 3 == 1  # the header and whole threes
    writer.close()
    sizes.add(path.stat().st_size)
    steps = sorted(sizes)
    assert max(after - before for before, after in pairwise(steps)) < 64 * 1024 + 3000
    assert len(read_log(path).entries) == 900


def test_a_killed_run_leaves_a_log_that_reads_and_replays_wherever_it_was_cut(tmp_path):
    path = tmp_path / "log"
    write_log(recorded_run(), path)
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    for length in range(header, len(whole)):
        path.write_bytes(whole[:length])
        log = read_log(path)
        assert log.entries == recorded_run().entries[: len(log.entries)]
        whole_lines = whole[:length].count(b"\n") - 1
        assert len(log.entries) == whole_lines + (whole[length : length + 1] == b"\n")
        assert log.is_truncated != whole[:length].endswith(b"\n")
        if log.is_truncated:
            assert replay(log) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: expected a run log"),
        (b"hello\n", "is not a run log: expected a run log"),
        (b"\x89PNG\r\n\x1a\n", "is not a run log"),
        (b"[1]\n", "is not a run log"),
        (b'{"a": 1}\n', "is not a run log"),
        (b'{"offbeat_log": "1"}\n', "is not a run log"),
        (b'{"offbeat_log": true}\n', "is not a run log"),
        (b'{"offbeat_log": 0}\n', "is not a run log"),
        (b'{"offbeat_log": 1', "is not a run log"),
        (b"[" * 100_000, "is not a run log"),
        (b'{"offbeat_log": 3}\n', "is a run log of version 3, expected version 4: read it with"),
        (b'{"offbeat_log": 5}\n', "is a run log of version 5, expected version 4: read it with"),
        (b'{"offbeat_log": 4}\nx\n', "line 2: expected an event or action: JSON is malformed"),
        (b'{"offbeat_log": 4}\n\n', "line 2: expected an event or action"),
        (
            b'{"offbeat_log": 4}\n{"type":"Tick","now_s":1}\n{"type":"Tack"}\n',
            "line 3: .*Invalid value 'Tack'",
        ),
        (b'{"offbeat_log": 4}\n{"type":"Tick","now_s":-1}\n', "line 2: .*now_s"),
        (b'{"offbeat_log": 4}\n{"type":"Lost","now_s":1,"worker":0,"cause":"\xff"}\n', "line 2: expected"),
        (
            b'{"offbeat_log": 4}\n{"type":"AbortJob","worker":null,"step":null,"reason":"r"}\n',
            "line 2: expected an event before the first action",
        ),
    ],
)
def test_a_file_that_is_no_log_is_refused_with_file_and_line(content, words, tmp_path):
    (tmp_path / "some.log").write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_log(tmp_path / "some.log")
    assert "some.log" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.log"):
        read_log(tmp_path / "nothing.log")
