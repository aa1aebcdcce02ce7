"""Worker processes on this machine: started together, watched, and never left behind.

`offbeat train`, `compare` and `bench` start their workers here; a user's own script is started by torchrun,
Ray Train or Slurm instead, and this module is not part of that. It sets the environment that torchrun
would set, with two differences: a launch names its job by OFFBEAT_JOB, and rank 0 hosts the job's torch
TCPStore itself, unless workers that die are to be replaced. Then this process hosts it, as torchrun does, so
that a replacement finds the job whoever has died.

It never restarts a worker (a replacement is a new one, with an id of its own), never kills the others at once
because one failed (they must end with an error of their own, which names the peer that they lost), and never
lets a worker wait for somebody to read its output.

How workers are kept from outliving the process that launched them, even if that is killed by SIGKILL: each
worker asks the kernel to be killed when its parent ends (`child.tied`). The request is made by a
few lines of Python that run before the worker's command and then become it by exec: `preexec_fn` would run
Python code between fork and exec, which can deadlock in a process with threads, and a pipe whose end is
watched would need a thread in every worker. The kernel means the parent *thread*, so workers are started by
the thread that watches them, which lives for as long as any of them does. Linux only, for this reason.
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
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import IO, TYPE_CHECKING

from offbeat.errors import OffbeatError, explain
from offbeat.runtime.control.environment import JOB, NEWCOMER
from offbeat.runtime.processes.child import start_tied
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import Condition, Flag

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_TAIL_LINES = 40
_LINE_BYTES = 16_384  # a longer line is cut into several, so that a tail is bounded in bytes as well
_READ_BYTES = 65_536  # what a pipe holds by default
_DRAIN_READS = 16  # up to 1 MiB, the most that an unprivileged process may make a pipe hold
_UNDELIVERED_LINES = 10_000  # for an `on_output` that is slower than the workers
_BATCH_LINES = 100
_FINISH_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one worker ended.

    Attributes:
        rank: the worker's rank.
        returncode: its exit code; the negative signal number where a signal ended it.
        ended_s: when it ended, in seconds after the launch.
        tail: the last lines of its standard error, oldest first.
        ended_because: why the launcher ended it; None where it ended by itself (or was killed by others).
        replaced_by: the id of the worker that was started in its place, None where there is none.
    """

    rank: int
    returncode: int
    ended_s: float
    tail: tuple[str, ...]
    ended_because: str | None = None
    replaced_by: int | None = None

    @property
    def is_good(self) -> bool:
        """Whether the worker ended by itself and well."""
        return self.returncode == 0 and self.ended_because is None


def free_port() -> int:
    """Return a TCP port on which nobody listens now.

    It is drawn from below the range from which the kernel takes ports by itself, so that nothing but another
    explicit request can take it between this call and its use.
    """
    chance = random.SystemRandom()
    for _ in range(1000):
        port = chance.randrange(20_000, 32_768)
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
    raise OffbeatError("expected a free TCP port between 20000 and 32767, found none: pass master_port")


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return one line: that all is well, or which worker failed first and the last thing it said."""
    bad = [outcome for outcome in outcomes if not outcome.is_good and outcome.replaced_by is None]
    if not bad:
        good = sum(outcome.is_good for outcome in outcomes)
        replaced = [
            f"; worker {outcome.rank} {_how(outcome)} and was replaced by worker {outcome.replaced_by}"
            for outcome in outcomes
            if outcome.replaced_by is not None
        ]
        return f"{good} worker{'s' * (good > 1)} ended well" + "".join(replaced)
    by_itself = [outcome for outcome in bad if outcome.ended_because is None]
    first = min(by_itself, key=lambda outcome: outcome.ended_s) if by_itself else bad[0]
    line = f"worker {first.rank} {_how(first)}"
    said = _error_line(first.tail)
    if said:
        line += f": {said}"
    forced = [str(o.rank) for o in bad if o is not first and o.ended_because is not None]
    if forced:
        who = f"worker{'s' if len(forced) > 1 else ''} {', '.join(forced)}"
        line += f" (the launcher then had to end {who})" if by_itself else f" (as {who})"
    return line


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
    deadline_s: float | None = None,
    grace_s: float | None = 10.0,
    term_s: float = 5.0,
    replacements: int = 0,
) -> Workers:
    """Start `workers` copies of `command` on this machine, each knowing its rank, and return at once.

    Args:
        command: program and arguments, the same for every worker.
        workers: how many, at least 1.
        env: set on top of this process's own environment.
        prefix: per worker, what to put before `command` (`["ip", "netns", "exec", name]`). Workers with the
            same prefix count as on one host: LOCAL_RANK and LOCAL_WORLD_SIZE are per host.
        master_addr: where rank 0 hosts the job's TCPStore, as the workers see it.
        master_port: its port; None takes a free one.
        threads_per_worker: OMP_NUM_THREADS, unless `env` or the environment sets it already (1, as torchrun).
        on_output: called with (rank, line) for every line of standard output and standard error, from one
            thread of its own. Where it is slower than the workers, lines are left out and their number said.
        deadline_s: workers that have not ended after so many seconds are ended; None for no limit.
        grace_s: how long the others may go on after one worker failed and is not replaced, to end with their
            own error; None for no limit.
        term_s: how long a worker that is ended may take after SIGTERM, before SIGKILL.
        replacements: how many workers may be started in place of others that a signal or an exit code other
            than 0 has ended while the job ran; each joins it as a newcomer.

    Raises:
        ValueError: a bad argument.
        OffbeatError: not on Linux.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    if not command:
        raise ValueError("command must name a program")
    if prefix is not None and len(prefix) != workers:
        raise ValueError(f"prefix must have one entry a worker ({workers}), not {len(prefix)}")
    if threads_per_worker < 1:
        raise ValueError(f"threads_per_worker must be at least 1, not {threads_per_worker}")
    for name, value in (("deadline_s", deadline_s), ("grace_s", grace_s), ("term_s", term_s)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if replacements < 0:
        raise ValueError(f"replacements must not be negative, got {replacements}")
    if not sys.platform.startswith("linux"):
        raise OffbeatError("starting workers here needs Linux: launch the script with torchrun instead")
    prefixes = [tuple(p) for p in prefix or [()] * workers]
    foreign = ("TORCHELASTIC_", NEWCOMER)
    common = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    common.setdefault("OMP_NUM_THREADS", str(threads_per_worker))
    common.setdefault("PYTHONUNBUFFERED", "1")  # what a killed worker said last is still read
    common.setdefault(JOB, secrets.token_hex(4))  # two launches may have drawn the same port
    common |= dict(env or {})
    port = free_port() if master_port is None else master_port
    common |= {"WORLD_SIZE": str(workers), "MASTER_ADDR": master_addr, "MASTER_PORT": str(port)}
    spares = None
    if replacements:
        spares = _Spares(store=_host_store(master_addr, port), world=workers, left=replacements)
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    starts = [
        _Start(
            command=(*prefixes[rank], *command),
            env=common
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(prefixes[:rank].count(prefixes[rank])),
                "LOCAL_WORLD_SIZE": str(prefixes.count(prefixes[rank])),
            },
        )
        for rank in range(workers)
    ]
    return Workers(
        starts,
        on_output=on_output,
        deadline_s=deadline_s,
        grace_s=grace_s,
        term_s=term_s,
        spares=spares,
    )


def _host_store(master_addr: str, port: int) -> Store:
    from offbeat.runtime.control.rendezvous import open_store

    try:
        return open_store(master_addr, port, hosts_it=True)
    except RuntimeError as error:
        raise OffbeatError(f"cannot listen on port {port}, on which the workers were to meet") from error


@dataclass(frozen=True, kw_only=True)
class _Start:
    command: tuple[str, ...]
    env: dict[str, str]


@dataclass(kw_only=True)
class _Spares:
    """Workers that may still be started in place of others.

    Attributes:
        store: the job's, which lives for as long as this does.
        world: how many workers the job began with.
        left: how many may still be started.
    """

    store: Store
    world: int
    left: int

    def draw(self) -> int | None:
        """The id of one more worker; None where there is to be none, or no job that it could join."""
        from offbeat.runtime.control.rendezvous import draw_id, has_started

        if not self.left or not has_started(self.store):
            return None
        self.left -= 1
        return draw_id(self.store, self.world)


@dataclass(kw_only=True)
class _Worker:
    rank: int
    start: _Start
    process: subprocess.Popen[bytes]
    pidfd: int
    output: _Lines
    errors: _Lines
    outcome: Outcome | None = None

    def signal_group(self, number: int) -> None:
        # The worker leads its own process group; until it is reaped its number belongs to nobody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Workers:
    """The running workers of one launch; a context manager that leaves none of them behind.

    A worker is started in a session and process group of its own, so a Ctrl-C at the terminal reaches this
    process only, which then closes. What a worker starts in turn belongs to its group and ends with `close`.
    """

    def __init__(
        self,
        starts: Sequence[_Start],
        *,
        on_output: Callable[[int, str], None] | None,
        deadline_s: float | None,
        grace_s: float | None,
        term_s: float,
        spares: _Spares | None = None,
    ) -> None:
        self._began_s = time.monotonic()
        self._grace_s = grace_s
        self._spares = spares
        self._term_s = term_s
        self._deadlines: list[tuple[float, str]] = []  # (monotonic time, why workers are ended then)
        self._ending_because: str | None = None
        self._kill_at_s: float | None = None
        self._workers: list[_Worker] = []
        self._error: BaseException | None = None
        self._is_over = False
        self._is_closed = False
        self._pid = os.getpid()
        self._changed = Condition()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._delivery: _Delivery | None = None
        if on_output is not None:
            self._delivery = _Delivery(on_output, lambda: self._end_at(0.0, "reading its output failed"))
        if deadline_s is not None:
            self._end_at(deadline_s, f"it had not ended {deadline_s:g} s after its start")
        started = Flag()
        self._watcher = start_thread(
            "offbeat-workers", partial(self._watch, starts, started), partial(self._give_up, started)
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
        """The workers' processes, by rank, replacements last. To be looked at: signals go through `kill`."""
        return [worker.process for worker in self._workers]

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank, replacements last."""
        return [worker.process.pid for worker in self._workers]

    def running(self) -> list[int]:
        """Return the ranks that have not ended."""
        with self._changed:
            return [worker.rank for worker in self._workers if worker.outcome is None]

    def wait(self, deadline_s: float | None = None) -> list[Outcome]:
        """Wait until every worker has ended and return how, by rank, replacements last.

        Args:
            deadline_s: workers still there so many seconds from now are ended, and their outcomes say so.

        Raises:
            Exception: whatever `on_output` raised; the workers are ended then.
        """
        if deadline_s is not None:
            self._end_at(deadline_s, f"it had not ended {deadline_s:g} s after the launcher began to wait")
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
        with self._changed, contextlib.suppress(ProcessLookupError):
            if not self._is_closed:
                pidfd = next(worker.pidfd for worker in self._workers if worker.rank == rank)
                signal.pidfd_send_signal(pidfd, number)

    def close(self) -> None:
        """End what still runs: SIGTERM, then SIGKILL, to each worker's process group; reap every worker.

        In a process forked from the one that has started them this does nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._is_closed:
                return
        self._end_at(0.0, "the launcher closed")
        self._watcher.join()
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for worker in self._workers:
                worker.signal_group(signal.SIGKILL)  # what the worker left behind
                worker.process.wait()
                os.close(worker.pidfd)
            os.close(self._wake_fd)
            self._spares = None  # and the store with it
        if self._delivery is not None:
            self._delivery.finish()
        atexit.unregister(self.close)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_at(self, after_s: float, why: str) -> None:
        with self._changed:
            self._deadlines.append((time.monotonic() + after_s, why))
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    # Everything below runs in the watching thread.

    def _watch(self, starts: Sequence[_Start], started: Flag) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ, self._woken)
            try:
                for rank, start in enumerate(starts):
                    self._start(rank, start, selector)
                started.set()
                self._attend(selector)
            finally:
                for worker in self._workers:
                    worker.output.stream.close()
                    worker.errors.stream.close()
        self._end_waiting(started)

    def _give_up(self, started: Flag, error: BaseException) -> None:
        self._error = _told(error)
        for worker in self._workers:
            worker.signal_group(signal.SIGKILL)
        self._end_waiting(started)

    def _end_waiting(self, started: Flag) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        started.set()

    def _start(self, rank: int, start: _Start, selector: selectors.BaseSelector) -> None:
        process = start_tied(start.command, f"worker {rank}", start.env)
        assert process.stdout is not None
        assert process.stderr is not None
        worker = _Worker(
            rank=rank,
            start=start,
            process=process,
            pidfd=os.pidfd_open(process.pid),
            output=_Lines(rank, process.stdout, self._delivery),
            errors=_Lines(rank, process.stderr, self._delivery),
        )
        with self._changed:
            self._workers.append(worker)
        for lines in (worker.output, worker.errors):
            selector.register(lines.stream, selectors.EVENT_READ, partial(self._read, lines, selector))
        selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._ended, worker, selector))

    def _attend(self, selector: selectors.BaseSelector) -> None:
        while any(worker.outcome is None for worker in self._workers):
            for key, _ in selector.select(self._next_timer_s()):
                key.data()
            self._keep_time()

    def _next_timer_s(self) -> float | None:
        with self._changed:
            if self._ending_because is None:
                timers = [at_s for at_s, _ in self._deadlines]
            else:
                timers = [] if self._kill_at_s is None else [self._kill_at_s]
        return max(0.0, min(timers) - time.monotonic()) if timers else None

    def _keep_time(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            due = [why for at_s, why in sorted(self._deadlines) if at_s <= now_s]
            running = [worker for worker in self._workers if worker.outcome is None]
            if self._ending_because is None and due:
                self._ending_because = due[0]
                self._kill_at_s = now_s + self._term_s
                for worker in running:
                    worker.signal_group(signal.SIGTERM)
            elif self._kill_at_s is not None and now_s >= self._kill_at_s:
                self._kill_at_s = None
                for worker in running:
                    worker.signal_group(signal.SIGKILL)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _read(self, lines: _Lines, selector: selectors.BaseSelector) -> None:
        if not lines.stream.closed and lines.read() == 0:
            selector.unregister(lines.stream)
            lines.stream.close()

    def _ended(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        selector.unregister(worker.pidfd)
        for lines in (worker.output, worker.errors):  # all that it wrote is in its pipes by now
            for _ in range(_DRAIN_READS):
                if lines.stream.closed or not lines.read():
                    break
            lines.flush()
        returncode = _returncode(worker)
        outcome = Outcome(
            rank=worker.rank,
            returncode=returncode,
            ended_s=time.monotonic() - self._began_s,
            tail=tuple(worker.errors.tail),
            ended_because=self._ending_because,
        )
        if returncode != 0 and self._ending_because is None:
            outcome = self._replace(worker, outcome, selector)
        with self._changed:
            worker.outcome = outcome
            is_failure = returncode != 0 and self._ending_because is None
            if is_failure and outcome.replaced_by is None and self._grace_s is not None:
                why = f"it had not ended {self._grace_s:g} s after worker {worker.rank} failed"
                self._deadlines.append((time.monotonic() + self._grace_s, why))

    def _replace(self, worker: _Worker, outcome: Outcome, selector: selectors.BaseSelector) -> Outcome:
        """Starts another worker in place of one that died, where that is wanted and others go on."""
        others = [one for one in self._workers if one.outcome is None and one is not worker]
        rank = self._spares.draw() if self._spares is not None and others else None
        if rank is None:
            return outcome
        if self._delivery is not None:
            note = f"(this worker takes the place of worker {worker.rank}, which {_how(outcome)})"
            self._delivery.put(rank, note)
        env = worker.start.env | {"RANK": str(rank), NEWCOMER: "1"}
        self._start(rank, replace(worker.start, env=env), selector)
        return replace(outcome, replaced_by=rank)


class _Lines:
    """The lines of one pipe: kept to a bounded tail and passed on; reading never waits."""

    def __init__(self, rank: int, stream: IO[bytes], delivery: _Delivery | None) -> None:
        self.stream = stream
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._rank = rank
        self._delivery = delivery
        self._open = b""  # the line that has not ended yet
        os.set_blocking(stream.fileno(), False)

    def read(self) -> int | None:
        """Take what is there; return its size in bytes, 0 at the end of the pipe, None where nothing is."""
        try:
            data = os.read(self.stream.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None
        *lines, self._open = (self._open + data).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._open) > _LINE_BYTES:
            self._take(self._open)
            self._open = b""
        if not data:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Take the open line as it is."""
        if self._open:
            self._take(self._open)
            self._open = b""

    def _take(self, line: bytes) -> None:
        for at in range(0, max(len(line), 1), _LINE_BYTES):
            text = line[at : at + _LINE_BYTES].decode(errors="replace").rstrip("\r")
            self.tail.append(text)
            if self._delivery is not None:
                self._delivery.put(self._rank, text)


class _Delivery:
    """Calls `on_output` from a thread of its own, so that a slow one never holds up the reading of pipes."""

    def __init__(self, on_output: Callable[[int, str], None], on_error: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._on_output = on_output
        self._on_error = on_error
        self._lines: deque[tuple[int, str]] = deque()
        self._left_out: Counter[int] = Counter()
        self._is_finishing = False
        self._changed = Condition()
        self._thread = start_thread("offbeat-output", self._run, self._fail)

    def put(self, rank: int, line: str) -> None:
        """Hand over a line; the oldest one is dropped where too many wait."""
        with self._changed:
            if self.error is not None:
                return
            if len(self._lines) >= _UNDELIVERED_LINES:
                self._left_out[self._lines.popleft()[0]] += 1
            self._lines.append((rank, line))
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until all lines are delivered, but no longer than 10 s for an `on_output` that hangs."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_FINISH_S)

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            for rank, line in batch:
                self._on_output(rank, line)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = error  # raised again by Workers.wait
            self._lines.clear()
        self._on_error()

    def _take(self) -> list[tuple[int, str]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._left_out or self._is_finishing)
            if not self._lines and not self._left_out:
                return None
            notes = [(rank, f"({n} lines left out)") for rank, n in sorted(self._left_out.items())]
            self._left_out.clear()
            lines = [self._lines.popleft() for _ in range(min(len(self._lines), _BATCH_LINES))]
            return notes + lines


def _told(error: BaseException) -> BaseException:
    """Return an error as it is raised: what the operating system refuses, with what to do."""
    if not isinstance(error, OSError):
        return error
    told = OffbeatError(f"the workers cannot be watched: {explain(error)}")
    told.__cause__ = error
    return told


def _returncode(worker: _Worker) -> int:
    # Not reaped yet: the zombie keeps the number of the process group from being given to anybody else.
    try:
        ended = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # somebody waited for the process object
        return worker.process.wait()
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _how(outcome: Outcome) -> str:
    if outcome.ended_because is not None:
        return f"was ended by the launcher because {outcome.ended_because}"
    if outcome.returncode >= 0:
        return f"failed with exit code {outcome.returncode}"
    try:
        name = signal.Signals(-outcome.returncode).name
    except ValueError:
        name = f"signal {-outcome.returncode}"
    hint = " (where nobody sent it: the kernel, for want of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _error_line(tail: Sequence[str]) -> str:
    """Return the line that says what went wrong: the exception of the last traceback, else the last line."""
    lines = [line.rstrip() for line in tail if line.strip()]
    if not lines:
        return ""
    tracebacks = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = lines[tracebacks[-1] + 1 :] if tracebacks else []
    said = next((line for line in after if not line[0].isspace()), lines[-1])
    return said.strip()
