"""Promises of `offbeat.runtime.launch`, each kept with real processes.

No test sleeps until an event has happened: the end of a process is awaited through a pidfd, with a
deadline that is only reached when the promise is broken.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offbeat.errors import OffbeatError
from offbeat.runtime.launch import LaunchedWorkers, find_free_port, launch
from offbeat.runtime.launching.outcomes import WorkerOutcome, outcome_summary
from offbeat.runtime.processes.child import tied_command
from offbeat.runtime.processes.waiting import wait_until_readable

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starting workers needs Linux")

LIMIT_S = 60.0
RUN_FOREVER = "import signal\nwhile True: signal.pause()"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def ended(pid: int) -> bool:
    """Wait until a process has ended; False if it still runs at the deadline."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return wait_until_readable(pidfd, LIMIT_S)
    finally:
        os.close(pidfd)


class Output:
    """Keeps the output of workers and lets a test wait for a line."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self._changed = threading.Condition()

    def __call__(self, rank: int, line: str) -> None:
        with self._changed:
            self.lines.append((rank, line))
            self._changed.notify_all()

    def await_lines(self, count: int) -> list[tuple[int, str]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lines) >= count, LIMIT_S), self.lines
            return sorted(self.lines)


def test_each_worker_has_its_rank_and_the_world_in_its_environment() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MINE")
    output = Output()
    code = f"import os; print(*[os.environ.get(n) for n in {names!r}])"
    with launch(python(code), 3, env={"MINE": "yes"}, master_port=4321, on_output=output) as workers:
        outcomes = workers.wait(LIMIT_S)
    assert sorted(output.lines) == [(r, f"{r} 3 {r} 3 127.0.0.1 4321 yes") for r in range(3)]
    assert [(o.rank, o.returncode, o.end_reason) for o in outcomes] == [(r, 0, None) for r in range(3)]
    assert outcome_summary(outcomes) == "3 workers ended well"


def test_workers_with_the_same_prefix_are_on_one_host() -> None:
    output = Output()
    code = "import os; print(*[os.environ[n] for n in ('HOST', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')])"
    prefix = [["env", "HOST=a"], ["env", "HOST=b"], ["env", "HOST=a"]]
    with launch(python(code), 3, prefix=prefix, on_output=output) as workers:
        workers.wait(LIMIT_S)
    assert sorted(output.lines) == [(0, "a 0 2"), (1, "b 0 1"), (2, "a 1 2")]


def test_rank_0_hosts_the_store_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's TORCHELASTIC_USE_AGENT_STORE would make rank 0 look for a store that does not exist."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "old")
    output = Output()
    code = "import os; print([n for n in os.environ if n.startswith('TORCHELASTIC')])"
    with launch(python(code), 1, on_output=output) as workers:
        workers.wait(LIMIT_S)
    assert output.lines == [(0, "[]")]


def test_every_launch_names_its_job_unless_the_user_does() -> None:
    """Two launches may have drawn the same port; their workers must not train with one another."""
    names = []
    for env in {}, {}, {"OFFBEAT_JOB": "mine"}:
        output = Output()
        with launch(
            python("import os; print(os.environ['OFFBEAT_JOB'])"), 2, env=env, on_output=output
        ) as workers:
            workers.wait(LIMIT_S)
        (name,) = {name for _, name in output.lines}
        names.append(name)
    assert names[2] == "mine"
    assert len({"", *names}) == 4


@pytest.mark.parametrize(
    ("outside", "env", "expected"),
    [
        (None, {}, "1"),
        ("3", {}, "3"),
        (None, {"OMP_NUM_THREADS": "2"}, "2"),
        ("3", {"OMP_NUM_THREADS": "2"}, "2"),
    ],
)
def test_omp_num_threads_is_1_unless_it_is_set(
    outside: str | None, env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if outside is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", outside)
    output = Output()
    with launch(python("import os; print(os.environ['OMP_NUM_THREADS'])"), 1, env=env, on_output=output) as w:
        w.wait(LIMIT_S)
    assert output.lines == [(0, expected)]


@pytest.mark.long
def test_torch_distributed_connects_at_the_given_address() -> None:
    code = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(2) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "print(x.tolist())\n"
        "dist.destroy_process_group()"
    )
    output = Output()
    with launch(python(code), 2, on_output=output) as workers:
        outcomes = workers.wait(LIMIT_S)
    assert outcome_summary(outcomes) == "2 workers ended well"
    assert {(0, "[3.0, 3.0]"), (1, "[3.0, 3.0]")} <= set(output.lines)


def test_the_other_workers_are_not_ended_at_once_when_one_is_killed() -> None:
    """The others must end by themselves, with their own error."""
    code = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "print('ready')\n"
        "signal.sigwait([signal.SIGUSR1])\n"
        "sys.exit('lost worker 1')"
    )
    output = Output()
    with launch(python(code), 2, grace_s=LIMIT_S, on_output=output) as workers:
        output.await_lines(2)
        workers.kill(1)
        assert ended(workers.pids[1])
        workers.kill(0, signal.SIGUSR1)
        outcomes = workers.wait(LIMIT_S)
    assert [(o.returncode, o.end_reason) for o in outcomes] == [(1, None), (-signal.SIGKILL, None)]
    assert outcomes[0].tail == ("lost worker 1",)
    assert outcomes[1].ended_s <= outcomes[0].ended_s
    assert outcome_summary(outcomes).startswith("worker 1 was killed by SIGKILL")


def test_workers_that_exceed_the_grace_period_are_ended_and_reported() -> None:
    code = f"import os\nif os.environ['RANK'] == '1': raise RuntimeError('no more data')\n{RUN_FOREVER}"
    with launch(python(code), 3, grace_s=0.1) as workers:
        outcomes = workers.wait(LIMIT_S)
    why = "it had not ended 0.1 s after worker 1 failed"
    assert [o.returncode for o in outcomes] == [-signal.SIGTERM, 1, -signal.SIGTERM]
    assert [o.end_reason for o in outcomes] == [why, None, why]
    assert outcome_summary(outcomes) == (
        "worker 1 failed with exit code 1: RuntimeError: no more data "
        "(the launcher then had to end workers 0, 2)"
    )


def test_a_worker_that_succeeds_starts_no_grace_period() -> None:
    code = (
        "import os, signal\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "    print('ready')\n"
        "    signal.sigwait([signal.SIGUSR1])"
    )
    output = Output()
    with launch(python(code), 2, grace_s=0.0, on_output=output) as workers:
        output.await_lines(1)
        assert ended(workers.pids[1])
        workers.kill(0, signal.SIGUSR1)
        assert outcome_summary(workers.wait(LIMIT_S)) == "2 workers ended well"


def test_a_worker_that_ignores_sigterm_is_killed() -> None:
    code = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\n{RUN_FOREVER}"
    output = Output()
    with launch(python(code), 2, term_s=0.1, on_output=output) as workers:
        output.await_lines(2)
        outcomes = workers.wait(0.0)
    assert [o.returncode for o in outcomes] == [-signal.SIGKILL] * 2
    assert outcome_summary(outcomes) == (
        "worker 0 was ended by the launcher because it had not ended 0 s after the launcher began to wait "
        "(as worker 1)"
    )


def test_a_worker_may_clean_up_on_sigterm() -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('tidied'))\n"
        "print('ready')\n"
        "while True: signal.pause()"
    )
    output = Output()
    with launch(python(code), 1, term_s=LIMIT_S, on_output=output) as workers:
        output.await_lines(1)
        workers.close()
        outcomes = workers.wait()
    assert (outcomes[0].returncode, outcomes[0].tail) == (1, ("tidied",))
    assert outcomes[0].end_reason == "the launcher closed"


def test_sigterm_reaches_the_worker_alone_and_not_processes_that_it_needs_to_end_in_order() -> None:
    child = "import sys; print('ready', flush=True); sys.exit(len(sys.stdin.read()))"
    code = (
        "import signal, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=-1)\n"
        "def end(*_): child.communicate(b'1234567'); sys.exit(child.returncode)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready')\n"
        "while True: signal.pause()"
    )
    output = Output()
    with launch(python(code), 1, term_s=LIMIT_S, on_output=output) as workers:
        output.await_lines(2)
        workers.end("the test ends it")
        (outcome,) = workers.wait(LIMIT_S)
    assert (outcome.returncode, outcome.end_reason) == (7, "the test ends it")


def test_a_deadline_from_the_launch_applies_without_a_wait() -> None:
    with launch(python(RUN_FOREVER), 2, timeout_s=0.1) as workers:
        assert all(ended(pid) for pid in workers.pids)
        outcomes = workers.wait(LIMIT_S)
    assert {o.end_reason for o in outcomes} == {"it had not ended 0.1 s after its start"}


def test_a_flood_of_output_never_blocks_a_worker_however_slow_its_reader() -> None:
    code = (
        "import sys\n"
        "for i in range(200_000): sys.stdout.write(f'{i} ' + 'x' * 200 + '\\n')\n"
        "sys.stdout.write('y' * 3_000_000)\n"
        "print('bye', file=sys.stderr)"
    )
    may_read = threading.Event()
    seen: list[str] = []

    def read(rank: int, line: str) -> None:
        assert may_read.wait(LIMIT_S)
        seen.append(line)

    with launch(python(code), 1, env={"PYTHONUNBUFFERED": ""}, on_output=read) as workers:
        try:
            assert ended(workers.pids[0])  # while the reader is blocked
        finally:
            may_read.set()
        outcomes = workers.wait(LIMIT_S)
    assert outcomes[0].returncode == 0
    assert outcomes[0].tail == ("bye",)
    assert "bye" in seen
    assert len(seen) < 25_000
    assert max(len(line) for line in seen) <= 16_384
    notes = [line for line in seen if line.endswith("lines dropped)")]
    left_out = sum(int(line[1:].split()[0]) for line in notes)
    lines = 200_000 + -(-3_000_000 // 16_384) + 1
    assert abs(left_out + len(seen) - len(notes) - lines) <= 50  # a long line may be cut at other places


def test_a_progress_bar_is_passed_on_line_by_line() -> None:
    output = Output()
    code = f"import sys\nfor text in ('\\r1%', '\\r2%', '\\r3%'): sys.stderr.write(text)\n{RUN_FOREVER}"
    with launch(python(code), 1, on_output=output):
        assert {(0, "1%"), (0, "2%")} < set(output.await_lines(3))


def test_the_last_output_of_a_worker_is_kept_without_a_line_feed() -> None:
    code = (
        "import sys\nfor i in range(100): print(i, file=sys.stderr)\nsys.stderr.write('and out'); sys.exit(2)"
    )
    with launch(python(code), 1) as workers:
        (outcome,) = workers.wait(LIMIT_S)
    assert len(outcome.tail) == 40
    assert outcome.tail[-2:] == ("99", "and out")


def test_a_line_that_never_ends_is_passed_on_in_pieces() -> None:
    output = Output()
    with launch(python(f"print('y' * 100_000, end='', flush=True)\n{RUN_FOREVER}"), 1, on_output=output):
        assert set(output.await_lines(1)[0][1]) == {"y"}


def test_all_output_of_a_worker_is_read_after_it_has_ended() -> None:
    """A pipe can be made to hold much more than is read at once."""
    code = (
        "import fcntl, os\n"
        "fcntl.fcntl(2, fcntl.F_SETPIPE_SZ, 1 << 20)\n"
        "os.write(2, b'x' * 900_000 + b'\\nlast words')\n"
        "os._exit(1)"
    )
    with launch(python(code), 1) as workers:
        (outcome,) = workers.wait(LIMIT_S)
    assert outcome.tail[-1] == "last words"


def test_an_error_in_on_output_ends_the_job_and_is_raised() -> None:
    def fail(rank: int, line: str) -> None:
        raise LookupError(f"no place for {line}")

    with launch(python(f"print('this')\n{RUN_FOREVER}"), 2, on_output=fail) as workers:
        assert all(ended(pid) for pid in workers.pids)
        with pytest.raises(LookupError, match="no place for this"):
            workers.wait(LIMIT_S)
        assert workers.running_ranks() == []


def test_child_processes_of_a_worker_end_with_close_and_delay_no_wait() -> None:
    """The child of a worker keeps the worker's pipes open: waiting for their end would never return."""
    code = (
        "import subprocess, sys\n"
        f"print(subprocess.Popen([sys.executable, '-c', {RUN_FOREVER!r}]).pid)\n"
        "sys.stderr.write('no line feed')"
    )
    output = Output()
    with launch(python(code), 1, on_output=output) as workers:
        (outcome,) = workers.wait(LIMIT_S)
        assert (outcome.returncode, outcome.tail) == (0, ("no line feed",))
        pidfd = os.pidfd_open(int(output.await_lines(2)[0][1]))  # the child still runs
    try:
        assert wait_until_readable(pidfd, LIMIT_S)
    finally:
        os.close(pidfd)


def test_closing_twice_and_signals_to_ended_workers_are_harmless() -> None:
    workers = launch(python("pass"), 2)
    workers.wait(LIMIT_S)
    workers.kill(0)
    workers.close()
    workers.kill(0)
    workers.close()
    assert [o.returncode for o in workers.wait()] == [0, 0]
    assert [p.returncode for p in workers.processes] == [0, 0]


def test_workers_outlive_the_thread_that_launched_them() -> None:
    """The kernel's parent-death signal follows the end of a thread, which must not be the caller's."""
    code = (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "print('ready')\n"
        "signal.sigwait([signal.SIGUSR1])"
    )
    output = Output()
    launched: list[LaunchedWorkers] = []
    thread = threading.Thread(target=lambda: launched.append(launch(python(code), 1, on_output=output)))
    thread.start()
    thread.join()
    with launched[0] as workers:
        output.await_lines(1)
        workers.kill(0, signal.SIGUSR1)
        assert workers.wait(LIMIT_S)[0].returncode == 0


LAUNCHER = """
import sys, threading
from offbeat.runtime.launch import launch
printed = threading.Semaphore(0)
def print_line(rank, line):
    print(line, flush=True)
    printed.release()
workers = launch([sys.executable, "-c", CODE], 3, on_output=print_line)
for _ in range(3): printed.acquire()
"""


def launcher(then: str, *, tidy: str = "") -> tuple[subprocess.Popen[str], list[int]]:
    """Start a process that launches three workers and then does something; return it and their ids."""
    code = f"import os, signal, sys\n{tidy}\nprint(os.getpid())\n{RUN_FOREVER}"
    process = subprocess.Popen(
        python(f"CODE = {code!r}\n{LAUNCHER}\n{then}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, [int(process.stdout.readline()) for _ in range(3)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_launcher(number: int) -> None:
    process, pids = launcher("workers.wait()")
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert all(ended(pid) for pid in pids)


def test_the_end_of_the_interpreter_closes_the_workers() -> None:
    """With SIGTERM, on which a worker may clean up."""
    process, pids = launcher("", tidy="signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('tidied')))")
    assert process.wait(LIMIT_S) == 0
    assert process.stdout is not None
    assert process.stderr is not None
    assert (process.stdout.read(), process.stderr.read()) == ("tidied\n" * 3, "")
    assert all(ended(pid) for pid in pids)


def test_a_tied_process_ends_with_the_thread_that_started_it() -> None:
    started: list[subprocess.Popen[bytes]] = []
    code = f"print('ready', flush=True)\n{RUN_FOREVER}"

    def start() -> None:
        process = subprocess.Popen(tied_command(python(code)), stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with started[0] as process:
        assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_a_tied_process_is_the_command_itself() -> None:
    with subprocess.Popen(
        tied_command(["sh", "-c", "echo $$; kill -s PIPE $$"]), stdout=subprocess.PIPE
    ) as process:
        assert process.communicate(timeout=LIMIT_S)[0] == f"{process.pid}\n".encode()
    assert process.returncode == -signal.SIGPIPE  # Python ignores this signal, which a child must not inherit


def test_a_missing_command_is_reported_in_one_line(tmp_path: Path) -> None:
    with launch([str(tmp_path / "none")], 1) as workers:
        outcomes = workers.wait(LIMIT_S)
    error = f"cannot start {tmp_path / 'none'}: No such file or directory"
    assert outcome_summary(outcomes) == f"worker 0 failed with exit code 127: {error}"


def test_a_free_port_is_below_the_ephemeral_ports() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < find_free_port() < lowest for _ in range(20))


def outcome(
    rank: int, returncode: int, ended_s: float, *tail: str, because: str | None = None
) -> WorkerOutcome:
    return WorkerOutcome(rank=rank, returncode=returncode, ended_s=ended_s, tail=tail, end_reason=because)


def test_the_summary_names_the_first_worker_that_failed_by_itself() -> None:
    outcomes = [
        outcome(0, 1, 3.0, "LinkError: worker 2 is gone"),
        outcome(1, 0, 1.0),
        outcome(2, 7, 2.0, "a", "", "out of cheese ", ""),
        outcome(3, -15, 0.5, because="it was late"),
    ]
    assert outcome_summary(outcomes) == (
        "worker 2 failed with exit code 7: out of cheese (the launcher then had to end worker 3)"
    )


def test_the_summary_finds_the_exception_before_later_output() -> None:
    tail = (
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        "ValueError: first",
        "During handling of the above exception, another exception occurred:",
        "Traceback (most recent call last):",
        '  File "a.py", line 2, in <module>',
        "    x()",
        "    ~^^",
        "offbeat.errors.WorkerError: worker 2 did not answer",
        "within 5 s",
        "[W1121 socket.cpp:207] some warning",
    )
    assert outcome_summary([outcome(0, 1, 1.0, *tail)]) == (
        "worker 0 failed with exit code 1: offbeat.errors.WorkerError: worker 2 did not answer"
    )
    assert outcome_summary([outcome(0, 1, 1.0)]) == "worker 0 failed with exit code 1"
    assert outcome_summary([outcome(0, 0, 1.0)]) == "1 worker ended well"


def test_bad_arguments_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, not 0"):
        launch(["true"], 0)
    with pytest.raises(ValueError, match="command must name a program"):
        launch([], 1)
    with pytest.raises(ValueError, match=r"one entry per worker \(2\), not 1"):
        launch(["true"], 2, prefix=[["env"]])
    with pytest.raises(ValueError, match="threads_per_worker must be at least 1"):
        launch(["true"], 1, threads_per_worker=0)
    with pytest.raises(ValueError, match="grace_s must not be negative"):
        launch(["true"], 1, grace_s=-1.0)
    with pytest.raises(ValueError, match="replacements must not be negative, and need a node, got 1"):
        launch(["true"], 1, replacements=1)


def test_on_other_systems_the_error_names_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OffbeatError, match="needs Linux: launch the script with torchrun"):
        launch(["true"], 1)
