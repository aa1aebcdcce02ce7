"""Worker processes on this machine: started together, monitored, never left running.

`offbeat run`, `offbeat train`, `offbeat compare` and the benchmarks start their workers here; other scripts
are started by torchrun, Ray Train or Slurm, without this module. It sets the environment that torchrun would
set; a launch names its job by OFFBEAT_JOB. Rank 0 hosts the job's torch TCPStore, unless `offbeat run` starts
the workers: then the launcher does (`launching/nodes.py`).

It never kills the remaining workers at once because one failed (each goes on, or ends with its own error,
which names the peer that it lost), and never lets a worker block on its output. A worker that is replaced is
started again with the same command and environment: it joins the running job as a newcomer by itself.

Workers do not outlive the process that launched them, even if that is killed by SIGKILL: each worker asks the
kernel to be killed when its parent ends (`child.tied_command`). A few lines of Python make that request
before they become the worker's command by exec: `preexec_fn` would run Python code between fork and exec,
which can deadlock in a process with threads, and watching the end of a pipe would need a thread in every
worker. To the kernel the parent is the *thread*, so workers are started by the thread that monitors them,
which runs as long as any of them. This makes it Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from offbeat.errors import OffbeatError, describe_os_error
from offbeat.runtime.control.environment import COORDINATOR_VARIABLE, JOB_VARIABLE, NEWCOMER_VARIABLE
from offbeat.runtime.launching.nodes import Node
from offbeat.runtime.launching.outcomes import WorkerOutcome
from offbeat.runtime.launching.worker_output import OutputLines, OutputThread
from offbeat.runtime.processes.child import start_tied
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import SignalSafeCondition, SignalSafeEvent


def find_free_port() -> int:
    """Return a TCP port that is free now.

    It lies below the kernel's range of ephemeral ports, so that only another explicit request can take it
    between this call and its use.
    """
    rng = random.SystemRandom()
    for _ in range(1000):
        port = rng.randrange(20_000, 32_768)
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
    raise OffbeatError("expected a free TCP port between 20000 and 32767, found none: pass master_port")


def launch(
    command: Sequence[str],
    workers: int,
    *,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[Sequence[str]] | None = None,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    threads_per_worker: int = 1,
    on_output: Callable[[int, str], None] | None = None,
    timeout_s: float | None = None,
    grace_s: float | None = 10.0,
    term_s: float = 5.0,
    node: Node | None = None,
    replacements: int = 0,
) -> LaunchedWorkers:
    """Start `workers` copies of `command` on this machine, each knowing its rank, and return at once.

    Args:
        command: program and arguments, the same for every worker.
        workers: how many, at least 1.
        env: variables to set in addition to this process's environment.
        prefix: per worker, what to put before `command` (`["ip", "netns", "exec", name]`). Workers with the
            same prefix count as on one host: LOCAL_RANK and LOCAL_WORLD_SIZE are per host.
        master_addr: address of the job's TCPStore, which rank 0 hosts, as the workers see it.
        master_port: its port; None selects a free one.
        threads_per_worker: OMP_NUM_THREADS, unless `env` or the environment sets it already (1, as torchrun).
        on_output: called with (rank, line) for every line of standard output and standard error, in one
            separate thread. If it is slower than the workers, lines are dropped and their number reported.
        timeout_s: workers still running after this many seconds are ended; None for no limit.
        grace_s: how long, in seconds, the remaining workers may run after one failed and is not replaced, to
            end with their own error; None for no limit.
        term_s: how long, in seconds, a worker may take to end after SIGTERM, before SIGKILL.
        node: this host's place in a job that may have several; `master_addr` and `master_port` are its own
            then. None for a job of this host's workers, without replacements.
        replacements: how often a worker may be started again after a signal or an exit code other than 0 has
            ended it while the job ran.

    Raises:
        ValueError: an invalid argument.
        OffbeatError: not on Linux.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    if not command:
        raise ValueError("command must name a program")
    if prefix is not None and len(prefix) != workers:
        raise ValueError(f"prefix must have one entry per worker ({workers}), not {len(prefix)}")
    if threads_per_worker < 1:
        raise ValueError(f"threads_per_worker must be at least 1, not {threads_per_worker}")
    for name, value in (("timeout_s", timeout_s), ("grace_s", grace_s), ("term_s", term_s)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if replacements < 0 or (replacements and node is None):
        raise ValueError(f"replacements must not be negative, and need a node, got {replacements}")
    if not sys.platform.startswith("linux"):
        raise OffbeatError("starting workers here needs Linux: launch the script with torchrun instead")
    prefixes = [tuple(p) for p in prefix or [()] * workers]
    foreign = ("TORCHELASTIC_", NEWCOMER_VARIABLE)
    common = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    common.setdefault("OMP_NUM_THREADS", str(threads_per_worker))
    common.setdefault("PYTHONUNBUFFERED", "1")  # the last output of a killed worker is not lost
    if COORDINATOR_VARIABLE not in common:  # whose job has a name already, or needs none
        common.setdefault(JOB_VARIABLE, secrets.token_hex(4))  # two launches may have drawn the same port
    common |= dict(env or {})
    if node is None:
        port = find_free_port() if master_port is None else master_port
        common |= {"WORLD_SIZE": str(workers), "MASTER_ADDR": master_addr, "MASTER_PORT": str(port)}
    else:
        common |= node.env
    first_rank = 0 if node is None else node.rank * workers
    starts = [
        _StartCommand(
            rank=first_rank + local,
            command=(*prefixes[local], *command),
            env=common
            | {
                "RANK": str(first_rank + local),
                "LOCAL_RANK": str(prefixes[:local].count(prefixes[local])),
                "LOCAL_WORLD_SIZE": str(prefixes.count(prefixes[local])),
            },
        )
        for local in range(workers)
    ]
    return LaunchedWorkers(
        starts,
        on_output=on_output,
        timeout_s=timeout_s,
        grace_s=grace_s,
        term_s=term_s,
        node=node,
        replacements=replacements,
    )


@dataclass(frozen=True, kw_only=True)
class _StartCommand:
    rank: int
    command: tuple[str, ...]
    env: dict[str, str]


@dataclass(kw_only=True)
class _WorkerProcess:
    start: _StartCommand
    process: subprocess.Popen[bytes]
    pidfd: int
    output: OutputLines
    errors: OutputLines
    outcome: WorkerOutcome | None = None

    @property
    def rank(self) -> int:
        return self.start.rank

    def signal(self, number: int) -> None:
        """Send a signal to the process alone: its own child processes may still be needed to end in order."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def signal_group(self, number: int) -> None:
        # The worker leads its own process group, whose number is not reused until the worker is reaped.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class LaunchedWorkers:
    """The running workers of one launch; a context manager that ends all of them.

    Each worker is started in its own session and process group, so a Ctrl-C at the terminal reaches this
    process only. Processes that a worker starts belong to its group and end with `close`.
    """

    def __init__(
        self,
        commands: Sequence[_StartCommand],
        *,
        on_output: Callable[[int, str], None] | None,
        timeout_s: float | None,
        grace_s: float | None,
        term_s: float,
        node: Node | None,
        replacements: int,
    ) -> None:
        self._began_s = time.monotonic()
        self._grace_s = grace_s
        self._node = node
        self._replacements_left = replacements
        self._term_s = term_s
        self._deadlines: list[tuple[float, str]] = []  # (monotonic time, why workers are ended then)
        self._ending_because: str | None = None
        self._kill_at_s: float | None = None
        self._workers: list[_WorkerProcess] = []
        self._error: BaseException | None = None
        self._is_over = False
        self._is_closed = False
        self._pid = os.getpid()
        self._changed = SignalSafeCondition()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._delivery: OutputThread | None = None
        if on_output is not None:
            self._delivery = OutputThread(on_output, lambda: self._end_at(0.0, "reading its output failed"))
        if timeout_s is not None:
            self._end_at(timeout_s, f"it had not ended {timeout_s:g} s after its start")
        started = SignalSafeEvent()
        self._monitor_thread = start_thread(
            "offbeat-workers",
            partial(self._monitor, commands, started),
            partial(self._on_monitor_failed, started),
        )
        atexit.register(self.close)
        try:
            started.wait()
        except BaseException:
            self.close()
            raise
        if self._error is not None:
            self.close()
            raise self._error

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The workers' processes, by rank, replacements last. Read only: use `kill` to send signals."""
        return [worker.process for worker in self._workers]

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank, replacements last."""
        return [worker.process.pid for worker in self._workers]

    def running_ranks(self) -> list[int]:
        """Return the ranks that have not ended."""
        with self._changed:
            return [worker.rank for worker in self._workers if worker.outcome is None]

    def wait(self, timeout_s: float | None = None) -> list[WorkerOutcome]:
        """Wait until every worker has ended and return the outcomes, by rank, replacements last.

        Args:
            timeout_s: workers still running this many seconds from now are ended; their outcomes say so.

        Raises:
            Exception: what `on_output` raised; the workers are ended then.
        """
        if timeout_s is not None:
            self._end_at(timeout_s, f"it had not ended {timeout_s:g} s after the launcher began to wait")
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over)
        except BaseException:
            self.close()
            raise
        if self._delivery is not None:
            self._delivery.finish()
            if self._delivery.error is not None:
                self.close()
                raise self._delivery.error
        if self._error is not None:
            self.close()
            raise self._error
        return [worker.outcome for worker in self._workers if worker.outcome is not None]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one worker's process (not to its group); no effect if it has ended."""
        with self._changed:
            if not self._is_closed:
                next(worker for worker in reversed(self._workers) if worker.rank == rank).signal(number)

    def end(self, reason: str) -> None:
        """Send SIGTERM to all running workers, and SIGKILL `term_s` seconds later; at once if called again.

        Returns at once. Outcomes of workers that end from now on have the reason.
        """
        with self._changed:
            if self._ending_because is not None:
                self._kill_at_s = time.monotonic()
        self._end_at(0.0, reason)

    def close(self) -> None:
        """End all running workers: SIGTERM to each, then SIGKILL to its process group; reap every worker.

        Does nothing in a process forked from the one that started them.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._is_closed:
                return
        self._end_at(0.0, "the launcher closed")
        self._monitor_thread.join()
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for worker in self._workers:
                worker.signal_group(signal.SIGKILL)  # processes that the worker left
                worker.process.wait()
                os.close(worker.pidfd)
            os.close(self._wake_fd)
            self._node = None  # closes the store, too
        if self._delivery is not None:
            self._delivery.finish()
        atexit.unregister(self.close)

    def __enter__(self) -> LaunchedWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_at(self, after_s: float, reason: str) -> None:
        with self._changed:
            self._deadlines.append((time.monotonic() + after_s, reason))
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    # The methods below run in the monitoring thread.

    def _monitor(self, starts: Sequence[_StartCommand], started: SignalSafeEvent) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ, self._on_wake)
            try:
                for start in starts:
                    self._start(start, selector)
                started.set()
                self._run_until_all_ended(selector)
            finally:
                for worker in self._workers:
                    worker.output.stream.close()
                    worker.errors.stream.close()
        self._release_waiters(started)

    def _on_monitor_failed(self, started: SignalSafeEvent, error: BaseException) -> None:
        self._error = _explained(error)
        for worker in self._workers:
            worker.signal_group(signal.SIGKILL)
        self._release_waiters(started)

    def _release_waiters(self, started: SignalSafeEvent) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        started.set()

    def _start(self, start: _StartCommand, selector: selectors.BaseSelector) -> None:
        process = start_tied(start.command, f"worker {start.rank}", start.env)
        assert process.stdout is not None
        assert process.stderr is not None
        worker = _WorkerProcess(
            start=start,
            process=process,
            pidfd=os.pidfd_open(process.pid),
            output=OutputLines(start.rank, process.stdout, self._delivery),
            errors=OutputLines(start.rank, process.stderr, self._delivery),
        )
        with self._changed:
            self._workers.append(worker)
        for lines in (worker.output, worker.errors):
            selector.register(lines.stream, selectors.EVENT_READ, partial(self._on_readable, lines, selector))
        selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._on_ended, worker, selector))

    def _run_until_all_ended(self, selector: selectors.BaseSelector) -> None:
        while any(worker.outcome is None for worker in self._workers):
            for key, _ in selector.select(self._next_timer_s()):
                key.data()
            self._on_timer()

    def _next_timer_s(self) -> float | None:
        with self._changed:
            if self._ending_because is None:
                timers = [at_s for at_s, _ in self._deadlines]
            else:
                timers = [] if self._kill_at_s is None else [self._kill_at_s]
        return max(0.0, min(timers) - time.monotonic()) if timers else None

    def _on_timer(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            due = [reason for at_s, reason in sorted(self._deadlines) if at_s <= now_s]
            running = [worker for worker in self._workers if worker.outcome is None]
            if self._ending_because is None and due:
                self._ending_because = due[0]
                self._kill_at_s = now_s + self._term_s
                for worker in running:
                    worker.signal(signal.SIGTERM)
            elif self._kill_at_s is not None and now_s >= self._kill_at_s:
                self._kill_at_s = None
                for worker in running:
                    worker.signal_group(signal.SIGKILL)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _on_readable(self, lines: OutputLines, selector: selectors.BaseSelector) -> None:
        if not lines.stream.closed and lines.read() == 0:
            selector.unregister(lines.stream)
            lines.stream.close()

    def _on_ended(self, worker: _WorkerProcess, selector: selectors.BaseSelector) -> None:
        selector.unregister(worker.pidfd)
        for lines in (worker.output, worker.errors):  # all of its output is in the pipes by now
            lines.drain()
        returncode = _returncode(worker)
        outcome = WorkerOutcome(
            rank=worker.rank,
            returncode=returncode,
            ended_s=time.monotonic() - self._began_s,
            tail=tuple(worker.errors.tail),
            end_reason=self._ending_because,
        )
        if returncode != 0 and self._ending_because is None:
            outcome = self._replace(worker, outcome, selector)
        with self._changed:
            worker.outcome = outcome
            is_failure = returncode != 0 and self._ending_because is None
            if is_failure and not outcome.is_replaced and self._grace_s is not None:
                reason = f"it had not ended {self._grace_s:g} s after worker {worker.rank} failed"
                self._deadlines.append((time.monotonic() + self._grace_s, reason))

    def _replace(
        self, worker: _WorkerProcess, outcome: WorkerOutcome, selector: selectors.BaseSelector
    ) -> WorkerOutcome:
        """Start a worker that died again, if that is still allowed and the job runs."""
        others_run = any(other.outcome is None and other is not worker for other in self._workers)
        node = self._node
        if not self._replacements_left or node is None or not (others_run or node.count > 1):
            return outcome
        if not node.can_join_again():
            return outcome
        self._replacements_left -= 1
        if self._delivery is not None:
            self._delivery.put(worker.rank, f"(this worker {outcome.end_text}, and is started again)")
        self._start(worker.start, selector)
        return replace(outcome, is_replaced=True)


def _explained(error: BaseException) -> BaseException:
    """Return the error to raise: one of the operating system is explained, with what to do."""
    if not isinstance(error, OSError):
        return error
    explained = OffbeatError(f"the workers cannot be monitored: {describe_os_error(error)}")
    explained.__cause__ = error
    return explained


def _returncode(worker: _WorkerProcess) -> int:
    # Not reaped yet: the zombie keeps the number of the process group from being reused.
    try:
        ended = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # the caller has waited for the process object
        return worker.process.wait()
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
