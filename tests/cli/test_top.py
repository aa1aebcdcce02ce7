"""`offbeat top`: the view at every width, the log of a running job, and the state over HTTP."""

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from rich.cells import cell_len
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.cli import output
from offbeat.cli.job_sources import JOB_PATH, HttpSource, LogSource, open_source
from offbeat.cli.main import main
from offbeat.cli.top import make_view
from offbeat.errors import OffbeatError
from offbeat.events import JobComplete
from offbeat.runtime.processes.waiting import wait_until_readable
from offbeat.strategies.registry import parse_strategy
from offbeat.wire.log_file import LogWriter, log_part_path
from support import group_training
from support.job_events import finished, group, joined, lost, rounds, status_of, view_of
from support.jobs import job
from support.newcomer_training import Gate, pass_gate
from support.processes import run, values
from support.run_logs import wait_until

OFFBEAT = [sys.executable, "-m", "offbeat"]
DEADLINE_S = 60.0
TIMES_S = {0: 0.1, 1: 0.11, 2: 0.49, 3: 0.1}
ENTRIES = [
    *(joined(worker, world=4, host=f"node-{worker}.example") for worker in range(4)),
    group(0, 1, 2, 3),
    *rounds(TIMES_S, 1204),
    group(0, 1, 3, generation=1, step=1204, reason="worker 2: compute time above 0.2 s (2 x 0.1 s)"),
    *rounds({0: 0.1, 1: 0.11, 3: 0.1}, 20, first_step=1204, generation=1),
    lost(3),
]
SENTENCE = "worker 3 was lost in step 1,223 (the connection was closed); 3 of 4 workers go on, "
HEADS = ["worker", "state", "step", "compute", "median", "waits", "score", "line", "host"]


def shown(columns, capsys, monkeypatch, entries=ENTRIES, **options):
    """The view as lines of text."""
    monkeypatch.setenv("COLUMNS", str(columns))
    output.print_output(*make_view(status_of(*entries), columns=columns, **options))
    return capsys.readouterr().out.splitlines()


def heads_of(lines):
    return next(re.findall(r"[a-z]+", line) for line in lines if "┃ worker" in line)


# The view ------------------------------------------------------------------------------------------------


def test_every_worker_has_a_line_and_one_sentence_says_what_is_wrong(capsys, monkeypatch):
    lines = shown(140, capsys, monkeypatch)
    assert lines[0] == (
        "PartialAllReduce: step 1,223, epoch 1; 210 ms a step; 305 samples/s; 4 workers: 2 training, "
        "1 excluded, 1 lost"
    )
    assert lines[1] == SENTENCE + "with 75% of the speed"
    assert heads_of(lines) == HEADS
    cells = [re.split(r"\s*│\s*", line)[1:-1] for line in lines if line.startswith("│")]
    assert cells == [
        ["0", "training", "1,223", "100 ms", "0.91", "5%", "1.00", "-", "node-0.example"],
        ["1", "training", "1,223", "110 ms", "1.00", "0%", "0.91", "-", "node-1.example"],
        ["2", "excluded", "1,203", "490 ms", "4.45", "0%", "0.20", "-", "node-2.example"],
        ["3", "lost", "1,223", "100 ms", "-", "5%", "-", "-", "node-3.example"],
    ]
    assert lines[-2:] == [
        "worker 2 is excluded since step 1,204: compute time above 0.2 s (2 x 0.1 s)",
        "worker 3 is lost since step 1,223: the connection was closed",
    ]


@pytest.mark.parametrize(
    ("columns", "heads"),
    [
        (100, HEADS),
        (80, HEADS[:-1]),
        (60, HEADS[:-3]),
        (50, HEADS[:5]),
        (40, [*HEADS[:3], "median"]),
    ],
)
def test_a_narrow_terminal_drops_columns_instead_of_wrapping(columns, heads, capsys, monkeypatch):
    lines = shown(columns, capsys, monkeypatch)
    table = [line for line in lines if line.startswith(tuple("│┃┏┡└"))]
    assert heads_of(lines) == heads
    assert len(table) == len(TIMES_S) + 5
    assert max(map(cell_len, table)) <= columns


def test_of_more_workers_than_lines_those_that_are_wrong_are_shown(capsys, monkeypatch):
    times_s = dict.fromkeys(range(60), 0.1) | {41: 0.4}
    entries = [*(joined(worker, world=60) for worker in times_s), *rounds(times_s, 20), lost(17)]
    lines = shown(100, capsys, monkeypatch, entries, rows_max=4)
    workers = [int(line.split()[1]) for line in lines if line.startswith("│")]
    assert (len(workers), workers == sorted(workers), {17, 41} <= {*workers}) == (4, True, True)
    assert "and 56 more workers" in lines


def test_the_command_prints_the_state_once_where_the_output_is_no_terminal(tmp_path, capsys, monkeypatch):
    write_log(tmp_path / "log.jsonl")
    monkeypatch.setenv("COLUMNS", "200")
    for arguments in (["top", str(tmp_path)], ["top", "--once", str(tmp_path / "log.jsonl")]):
        assert main(arguments) == 0
        assert capsys.readouterr().out.splitlines() == shown(200, capsys, monkeypatch)


def test_a_log_in_parts_is_shown_whole_and_another_job_in_its_place_anew(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    write_log(log_part_path(log, 1), ENTRIES[:5000])
    write_log(log, ENTRIES[5000:], part=2)
    assert main(["top", "--once", str(tmp_path)]) == 0
    assert SENTENCE in capsys.readouterr().out

    source = LogSource(log)
    wait_until(lambda: source.status() == status_of(*ENTRIES) and not source.is_behind, "the whole log")
    log_part_path(log, 1).unlink()
    write_log(log, [joined(7)], job="another")
    assert [one.worker for one in source.status().workers] == [7]


def write_log(path, entries=ENTRIES, **header):
    writer = LogWriter(path, header)
    for entry in entries:
        if hasattr(entry, "now_s"):
            writer.add_event(entry)
        else:
            writer.add_actions([entry])
    writer.close()


# A terminal ----------------------------------------------------------------------------------------------


class Terminal:
    """`offbeat top` in a terminal of 160 columns."""

    def __init__(self, *arguments):
        self._received = b""
        self._own, its = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
        self.process = subprocess.Popen(
            [*OFFBEAT, "top", *arguments], stdin=its, stdout=its, stderr=its, env=env
        )
        os.close(its)

    @property
    def screen(self):
        """All text that was ever shown."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._received.decode(errors="ignore"))

    def wait_for(self, text, times=1):
        """Waits until the text was drawn so often."""
        limit_s = time.monotonic() + DEADLINE_S
        while self.screen.count(text) < times:
            left_s = limit_s - time.monotonic()
            assert self._read(max(0.0, left_s)), f"{text!r} was never shown:\n{self.screen}"

    def press(self, key):
        os.write(self._own, key)

    def end(self):
        """Reads until the command has ended; returns its exit code."""
        limit_s = time.monotonic() + DEADLINE_S
        while self._read(limit_s - time.monotonic()):
            pass
        return self.process.wait(DEADLINE_S)

    def _read(self, wait_s):
        if not wait_until_readable(self._own, wait_s):
            return False
        try:
            data = os.read(self._own, 65536)
        except OSError:  # the command has ended
            return False
        self._received += data
        return bool(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._own)


def test_q_and_ctrl_c_end_the_display_of_a_job_that_runs(tmp_path):
    write_log(tmp_path / "log.jsonl")
    with Terminal(str(tmp_path)) as terminal:
        terminal.wait_for(SENTENCE)
        terminal.press(b"x")
        terminal.wait_for(SENTENCE, times=3)
        terminal.press(b"q")
        assert terminal.end() == 0
    with Terminal(str(tmp_path)) as terminal:
        terminal.wait_for(SENTENCE)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130


def train_to_gate(rank, emit):
    def stop(session):
        if session.step >= 40:  # the slow one has been excluded long before
            emit("at the gate")
            pass_gate()

    return group_training.train(rank, emit, epochs=14, before_step=stop)


def test_the_log_of_a_running_job_is_followed_to_its_end(tmp_path):
    slow, killed = 2, 1
    with (
        Gate(tmp_path) as gate,
        job(train_to_gate, 4, env={**gate.env, "OFFBEAT_SLOW": f"{slow}:8"}) as running,
    ):
        running.receive(0, killed, 3)
        with Terminal(str(gate.log)) as terminal:
            terminal.wait_for(f"worker {slow} is excluded since step ")
            terminal.wait_for(f"worker {slow} takes ")
            source = LogSource(gate.log)
            wait_until(lambda: source.status().step == 40 and not source.is_behind, "step 40 in the log")
            running.signal(killed, signal.SIGKILL)
            terminal.wait_for(f"worker {killed} was lost in step 40 ")
            gate.open()
            assert terminal.end() == 0
        running.ends()
    assert "3 finished, 1 lost" in terminal.screen.replace("1 lost, 3 finished", "3 finished, 1 lost")
    status = LogSource(gate.log).status()
    assert status.is_over
    assert {one.worker: one.state for one in status.workers} == {
        0: "finished",
        killed: "lost",
        slow: "finished",
        3: "finished",
    }


def train_any(rank, emit, strategy):
    """Trains under any strategy; a step takes 10 ms at least."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
    with offbeat.join(model, optimizer, parse_strategy(strategy)) as session:
        for _ in session.epochs(5):
            for inputs, labels in session.batches(dataset, 4):
                optimizer.zero_grad()
                group_training.compute(0.01)
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("strategy", "kind", "costs"),
    [
        ("bsp", "slow", True),
        ("partial:limit=3,n_profile=2", "excluded", False),
        ("hybrid", "slow", True),
        ("preduce", "slow", None),
        ("ssp:s=3", "slow", None),
        ("asp", "slow", None),
    ],
)
def test_in_the_log_of_a_real_job_of_each_strategy_the_slow_worker_is_found(strategy, kind, costs, tmp_path):
    env = {"OFFBEAT_SLOW": "2:8", "OFFBEAT_RUN_LOG": str(tmp_path / "log.jsonl")}
    values(run(train_any, 3, strategy, env=env))
    found = open_source(str(tmp_path)).status().diagnosis
    assert (found.kind, found.workers) == (kind, (2,))
    assert costs in (None, found.saving > 0)  # None: they wait at the ends of short epochs


# HTTP ----------------------------------------------------------------------------------------------------


@contextmanager
def serving(answers):
    """A server that answers with each of these in turn, the code and the body; returns its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == JOB_PATH
            code, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_the_state_of_a_running_job_is_asked_for_again_and_again_until_its_end():
    running = status_of(*ENTRIES)
    ended = view_of(*ENTRIES, *(finished(worker, 1300) for worker in (0, 1, 2)), JobComplete(reason="all"))
    answers = [(200, running.to_json()), (200, running.to_json()), (200, ended.status().to_json())]
    with serving(answers) as port, Terminal(f"127.0.0.1:{port}") as terminal:
        terminal.wait_for("2 training, 1 excluded, 1 lost")
        assert terminal.end() == 0
        assert "3 finished, 1 lost" in terminal.screen


def test_a_server_that_fails_later_is_named_and_the_last_state_stays():
    answers = [(200, status_of(*ENTRIES).to_json()), (500, b""), (200, b"[]"), (200, status_of().to_json())]
    with serving(answers) as port:
        source = HttpSource("127.0.0.1", port)
        first = source.status()
        assert (len(first.workers), source.trouble) == (4, "")
        assert source.status() == first
        assert (
            f"127.0.0.1:{port} has not answered for 0 s: it answers /job with HTTP/1.0 500 " in source.trouble
        )
        assert source.status() == first
        assert "expected the state of a job as JSON" in source.trouble
        assert (source.status().workers, source.trouble) == ((), "")


@pytest.mark.long
def test_a_coordinator_that_has_ended_ends_the_display_with_the_last_state():
    with ExitStack() as stack:
        port = stack.enter_context(serving([(200, status_of(*ENTRIES).to_json())]))
        with Terminal(f"127.0.0.1:{port}") as terminal:
            terminal.wait_for(SENTENCE)
            stack.close()
            assert terminal.end() == 0
    ended = terminal.screen.rpartition("PartialAllReduce: ")[2]
    assert re.search(rf"127.0.0.1:{port} has not answered for 1\d s: Connection refused", ended)
    assert "│ excluded │" in ended


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, b""), "it answers /job with HTTP/1.0 404 "),
        ((200, b"<html>"), "expected the state of a job as JSON"),
    ],
)
def test_a_server_that_is_no_coordinator_is_refused(answer, words):
    with serving([answer]) as port, pytest.raises(OffbeatError, match=re.escape(words)):
        HttpSource("127.0.0.1", port).status()


def test_a_server_that_does_not_answer_is_left_after_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(OffbeatError, match=f"127.0.0.1:{port} does not answer as a job does: timed out"):
            HttpSource("127.0.0.1", port).status()
