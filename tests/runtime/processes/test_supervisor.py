"""Promises of the supervisor: a killed child is restarted, a child that ends by itself is not."""

import os
import signal
import subprocess
import sys

from offbeat.runtime.processes.supervisor import DEATHS_MAX

DEADLINE_S = 60
PRELUDE = """
import os, signal, sys
from offbeat.runtime.processes.supervisor import supervise
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(text): os.write(log, text.encode() + b"\\n")
def notes(): return os.fstat(log).st_size
def times(): return len(open({log!r}).read().split())
def die(): os.kill(os.getpid(), signal.SIGKILL)
"""


def supervised(tmp_path, serve, progress="notes"):
    """Runs `serve`; returns the supervisor's exit code, its standard error and its children's notes."""
    log = tmp_path / "notes"
    code = (
        f"{PRELUDE.format(log=str(log))}\n{serve}\nsys.exit(supervise(serve, {progress}, name='the child'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=DEADLINE_S, text=True)
    return ended.returncode, ended.stderr, log.read_text().split()


def test_a_killed_child_is_restarted_as_long_as_it_makes_progress(tmp_path):
    serve = f"""
def serve():
    note("born")
    if times() < {3 * DEATHS_MAX}: die()
"""
    code, errors, notes = supervised(tmp_path, serve)
    assert code == 0
    assert len(notes) == 3 * DEATHS_MAX
    assert errors.count("the child (process ") == 3 * DEATHS_MAX - 1
    assert errors.count("was ended by a signal: Killed; it is started again") == 3 * DEATHS_MAX - 1


def test_a_child_that_is_killed_repeatedly_without_progress_is_not_restarted(tmp_path):
    serve = """
def serve():
    note("born")
    die()
"""
    code, errors, notes = supervised(tmp_path, serve, progress="lambda: None")
    assert code == 1
    assert len(notes) == DEATHS_MAX
    assert f"{DEATHS_MAX} times without progress, it is not started again" in errors


def test_a_child_that_raises_is_not_restarted(tmp_path):
    serve = """
def serve():
    note("born")
    raise KeyError("of its own")
"""
    code, errors, notes = supervised(tmp_path, serve)
    assert code == 1
    assert notes == ["born"]
    assert errors.count("KeyError: 'of its own'") == 1
    assert "started again" not in errors


def test_each_child_begins_with_the_state_before_the_first_child(tmp_path):
    serve = """
state = []
def serve():
    state.append(1)
    note(str(len(state)))
    if times() < 3: die()
"""
    assert supervised(tmp_path, serve)[2] == ["1", "1", "1"]


def test_a_child_continues_when_its_supervisor_is_killed(tmp_path):
    reading, writing = os.pipe()
    serve = f"""
def serve():
    os.kill(os.getppid(), signal.SIGKILL)
    os.write({writing}, b"goes on")
"""
    code = (
        f"{PRELUDE.format(log=str(tmp_path / 'notes'))}\n{serve}\nsys.exit(supervise(serve, notes, name=''))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[writing])
    os.close(writing)
    with os.fdopen(reading) as output:
        assert output.read() == "goes on"
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
