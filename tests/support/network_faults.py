"""Jobs and parameter servers whose processes each run on a host of their own, on a network that fails.

A host is a network namespace (`benchmarks.namespaces`). Each process says what it has done through a pipe,
which no fault of the network touches; so a test waits for steps and pushes themselves, and measures pauses by
the clock that all processes share.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import multiprocessing.connection
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from benchmarks.namespaces import Host, block, hosts, mend
from support.coordinator_service import Service, service
from support.group_training import compute
from support.processes import Cluster, Ended, start
from support.run_logs import wait_until

DEADLINE_S = 60.0  # for whatever has to happen at all
START_S = 120.0  # for a job or a parameter server to begin
STEPS = 10  # so many show that training goes on
PUSHES = 20  # so many show that pushes succeed
STEP_S = 0.05  # of computing; leaves the machine to others
KEYS = 64
_WINDOW = 8  # pushes of a client that are not acknowledged
_CLONE_NEWNET = 0x40000000


def enter(host: str) -> None:
    """Move this process, which has one thread, to a host."""
    with open(f"/run/netns/{host}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")


@dataclass(frozen=True)
class Step:
    """A step of a worker: when it ended, its number by the worker's count, and the members then."""

    now_s: float
    step: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Acked:
    """What a client says when a push was acknowledged: when, and how many have been."""

    now_s: float
    pushes: int


class Watched:
    """Processes on hosts, whose reports are read all the time.

    Attributes:
        places: the hosts.
        reports: what each process has said, in order.
        ended: how those ended that have.
    """

    def __init__(self, places: list[Host], cluster: Cluster, log: Path | None = None) -> None:
        self.places, self.cluster, self.log = places, cluster, log
        self.reports: dict[int, list[Any]] = {}
        self.ended: dict[int, Ended] = {}
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, name="reports", daemon=True)
        self._reader.start()

    def close(self) -> None:
        self._is_over = True
        self._reader.join()

    def pid(self, rank: int) -> int:
        found = self.cluster.processes[rank].pid
        assert found is not None
        return found

    def _read(self) -> None:
        while not self._is_over:
            pipes = {pipe: rank for rank, pipe in enumerate(self.cluster._pipes) if rank not in self.ended}
            if not pipes:
                multiprocessing.connection.wait([], 0.1)
                continue
            for pipe in multiprocessing.connection.wait(list(pipes), 0.1):
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    kind, content = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    kind, content = "ended", {}
                with self._changed:
                    if kind == "message":
                        self.reports.setdefault(rank, []).append(content)
                    else:
                        self.ended[rank] = Ended(rank=rank, exitcode=None, **content)
                    self._changed.notify_all()

    def wait_for(
        self,
        condition: Callable[[], bool],
        what: str,
        timeout_s: float = DEADLINE_S,
        *,
        needs: Collection[int] = (),
    ) -> None:
        """Wait until a condition holds, which is asked whenever a process has said something.

        Args:
            needs: processes without which it will never hold.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: condition() or any(rank in self.ended for rank in needs), timeout_s
            )
            why = f"processes that were needed have ended, or not within {timeout_s:g} s"
            assert condition(), f"{why}: {what}\n{self.state()}"

    def let_pass(self, duration_s: float, *, until_ended: Collection[int] = ()) -> None:
        """Let the time of a fault pass; less, where these processes have all ended before."""
        with self._changed:
            ranks = set(until_ended)
            self._changed.wait_for(lambda: bool(ranks) and ranks <= self.ended.keys(), duration_s)

    def no_process_ended(self) -> None:
        assert not self.ended, f"processes ended\n{self.state()}"

    def ends(self, ranks: Collection[int], timeout_s: float = DEADLINE_S) -> dict[int, Ended]:
        """Wait until these processes have ended; return how."""
        self.wait_for(lambda: set(ranks) <= self.ended.keys(), f"the end of {sorted(ranks)}", timeout_s)
        return {rank: self.ended[rank] for rank in ranks}

    def state(self) -> str:
        """All that is known, for an assertion that failed."""
        now_s = time.monotonic()
        lines = []
        for rank in range(len(self.cluster.processes)):
            said = self.reports.get(rank, [])
            last = f"{now_s - said[-1].now_s:.1f} s ago {said[-1]}" if said else "nothing yet"
            lines.append(f"process {rank}: {len(said)} reports, the last one {last}")
            if rank in self.ended:
                one = self.ended[rank]
                ago = f"{now_s - one.ended_s:.1f} s ago" if one.ended_s is not None else "killed"
                lines.append(f"  ended {ago}: {one.error_type}: {one.error}")
        if self.log is not None and self.log.exists():
            entries = [line for line in self.log.read_text().splitlines() if _is_telling(line)]
            lines += ["last entries of the run log:", *(entry[:250] for entry in entries[-30:])]
        return "\n".join(lines)


def _is_telling(line: str) -> bool:
    frequent = (
        "StepsTimed",
        "Clocked",
        "Grant",
        "Deal",
        "Computed",
        "Began",
        "Finished",
        "Tick",
        "Beat",
        "Ready",
    )
    return not any(f'"{kind}' in line for kind in frequent)


# Training --------------------------------------------------------------------------------------------------


def _train(rank: int, emit: Callable[[Any], None], names: list[str], strategy: Any, width: int) -> None:
    enter(names[rank])
    logging.getLogger("offbeat").addHandler(logging.FileHandler(_output(os.environ["OFFBEAT_RUN_LOG"], rank)))
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(50_000, 64, generator=torch.Generator().manual_seed(0)))
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(10**6):
            for (x,) in session.batches(data, 4):
                optimizer.zero_grad()
                compute(STEP_S)
                model(x).square().mean().backward()
                optimizer.step()
                emit(Step(time.monotonic(), session.step, session.members))


def _output(log: str, rank: int) -> str:
    return f"{log}.worker{rank}.txt"


class Training(Watched):
    """A job with a worker on each host but the spare ones, the coordinator on the first one or on the last.

    Attributes:
        all_workers: the workers that it begins with.
        service: the coordinator, if it belongs to no worker.
    """

    def __init__(
        self,
        places: list[Host],
        cluster: Cluster,
        log: Path,
        workers: int,
        width: int,
        service: Service | None,
    ) -> None:
        super().__init__(places, cluster, log)
        self.service = service
        self.all_workers = tuple(range(workers))
        self._width = width
        self._names = [place.name for place in places]

    def steps(self, rank: int) -> list[Step]:
        return self.reports.get(rank, [])

    def written(self, rank: int) -> str:
        """What the library has written into a worker's output."""
        return Path(_output(str(self.log), rank)).read_text()

    def newcomer(self, strategy: Any) -> int:
        """Start a worker on the first spare host, which joins the job; return the number of its process."""
        return self.cluster.add(_train, (self._names, strategy, self._width), {})

    def trains_on(
        self,
        ranks: Collection[int],
        *,
        together: Collection[tuple[int, ...]] | None = None,
        timeout_s: float = DEADLINE_S,
    ) -> None:
        """Wait until each of these has finished more steps; in one of these groups, if any are named."""
        since = {rank: len(self.steps(rank)) for rank in ranks}

        def did(rank: int) -> bool:
            new = self.steps(rank)[since[rank] :]
            return sum(together is None or tuple(sorted(one.members)) in together for one in new) >= STEPS

        in_groups = "" if together is None else f" in one of {list(together)}"
        self.wait_for(
            lambda: all(map(did, ranks)),
            f"{STEPS} more steps of each of {sorted(ranks)}{in_groups}",
            timeout_s,
            needs=ranks,
        )

    def all_train_together(self) -> None:
        """Wait until every worker that the job began with trains with all others; none may have ended."""
        self.trains_on(self.all_workers, together=[self.all_workers])
        self.no_process_ended()

    def measures(self, broken_s: float, mended_s: float | None) -> str:
        """How long each worker paused around a fault, and how soon after its end it went on."""
        shown = []
        for rank in sorted(self.reports):
            times = [one.now_s for one in self.steps(rank)]
            pauses = [b - a for a, b in itertools.pairwise(times) if b > broken_s]
            text = f"worker {rank} longest pause {max(pauses, default=0.0):.2f} s"
            if mended_s is not None:
                after = [t for t in times if t > mended_s]
                text += f", steps again {after[0] - mended_s:.2f} s after" if after else ", no step after"
                together = [
                    one.now_s
                    for one in self.steps(rank)
                    if one.now_s > mended_s and len(one.members) == len(self.all_workers)
                ]
                if together:
                    text += f", with all {together[0] - mended_s:.2f} s after"
            if rank in self.ended:
                one = self.ended[rank]
                if one.ended_s is not None:
                    text += f", ended {one.ended_s - broken_s:.2f} s after the fault began ({one.error})"
            shown.append(text)
        return "\n".join(shown)


@contextmanager
def training(
    strategy: Any,
    workers: int,
    folder: Path,
    *,
    spare: int = 0,
    has_service: bool = False,
    width: int = 400,
    env: Mapping[str, str] | None = None,
) -> Iterator[Training]:
    """A job of so many workers, each on a host, that has begun to train; a server on each, if any.

    Args:
        spare: so many hosts more, without a worker.
        has_service: the coordinator belongs to no worker, and runs on a host of its own, the last one; it may
            be started again on another one.
        width: of the model's hidden layer, each unit of which has 264 bytes of gradients.
    """
    log = folder / "log.jsonl"
    with ExitStack() as stack:
        places = stack.enter_context(hosts(workers + spare + has_service))
        coordinator = None
        if has_service:
            place = places[-1]
            coordinator = stack.enter_context(
                service(folder, moves=True, log=log, host=place.address, prefix=place.prefix)
            )
        variables = {
            "MASTER_ADDR": places[0].address,
            "OFFBEAT_RUN_LOG": str(log),
            "OFFBEAT_START_S": str(START_S),
            "OFFBEAT_SERVERS": str(workers),
            **({} if coordinator is None else coordinator.env),
            **(env or {}),
        }
        names = [place.name for place in places]
        cluster = stack.enter_context(start(_train, workers, names, strategy, width, env=variables))
        watched = Training(places, cluster, log, workers, width, coordinator)
        stack.callback(watched.close)
        watched.trains_on(watched.all_workers, timeout_s=START_S)
        try:
            yield watched
        finally:
            mend(*places)


# A parameter server ----------------------------------------------------------------------------------------


def _push(rank: int, emit: Callable[[Any], None], name: str, address: str, file: str, stop: str) -> int:
    """Push ones to all keys until the file `stop` is there; return how many were acknowledged: all."""
    enter(name)
    acked = 0
    with offbeat.PS(file, host=address, start_s=START_S) as ps:
        ones = ps.namespace("ones", keys=KEYS, dtype="float64", block_keys=4)
        under_way: list[Any] = []
        while not os.path.exists(stop) or under_way:
            if not os.path.exists(stop):
                under_way.append(ones.push(np.ones(KEYS)))
                compute(STEP_S / 2)
            while len(under_way) > _WINDOW or (under_way and os.path.exists(stop)):
                under_way.pop(0).result(10 * DEADLINE_S)
                acked += 1
                emit(Acked(time.monotonic(), acked))
    return acked


_PULL = """
import json, sys
import offbeat
with offbeat.PS(sys.argv[1], host=sys.argv[2]) as ps:
    values = ps.namespace("ones", keys=int(sys.argv[3]), dtype="float64", block_keys=4).pull().result()
    print(json.dumps({"values": values.tolist(), "servers": ps.servers}))
"""


class Serving(Watched):
    """A parameter server with a server on each host but the last one, where a client pushes.

    Attributes:
        servers: their processes.
    """

    def __init__(
        self,
        places: list[Host],
        cluster: Cluster,
        servers: list[subprocess.Popen[bytes]],
        folder: Path,
    ) -> None:
        super().__init__(places, cluster)
        self.servers, self._folder = servers, folder

    def pushes_on(self, timeout_s: float = DEADLINE_S) -> None:
        """Wait until more pushes are acknowledged than were under way."""
        since = len(self.reports.get(0, []))
        least = since + _WINDOW + PUSHES
        self.wait_for(
            lambda: len(self.reports.get(0, [])) >= least, "more pushes acknowledged", timeout_s, needs=[0]
        )

    def nothing_is_lost(self, *, nor_anybody: bool = True) -> None:
        """Let the client end, and see that a new client pulls just what was acknowledged, once.

        Args:
            nor_anybody: all servers must still be in, too.
        """
        (self._folder / "stop").touch()
        ended = self.ends([0])[0]
        assert ended.error is None, f"{ended.trace}\n{self.state()}"
        pulled = self.pulled()
        wrong = {key: value for key, value in enumerate(pulled["values"]) if value != ended.value}
        assert not wrong, f"acknowledged {ended.value} pushes, found by key {wrong}\n{self.state()}"
        if nor_anybody:
            assert len(pulled["servers"]) == len(self.servers), f"{pulled['servers']}\n{self.state()}"
            assert all(server.poll() is None for server in self.servers), self.state()

    def pulled(self) -> dict[str, Any]:
        """What a new client on the client's host is given."""
        place = self.places[-1]
        command = [*place.prefix, sys.executable, "-c", _PULL, str(self._folder / "ps.json")]
        done = subprocess.run(
            [*command, place.address, str(KEYS)],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stderr}\n{self.state()}"
        return json.loads(done.stdout)

    def state(self) -> str:
        lines = [super().state()]
        for number, server in enumerate(self.servers):
            text = (self._folder / f"server{number}.txt").read_text().strip().splitlines()
            lines.append(f"server {number}: exit code {server.poll()}; {text[-3:]}")
        return "\n".join(lines)

    def measures(self, broken_s: float, mended_s: float) -> str:
        times = [one.now_s for one in self.reports.get(0, [])]
        pauses = [b - a for a, b in itertools.pairwise(times) if b > broken_s]
        after = [t for t in times if t > mended_s]
        text = f"client longest pause {max(pauses, default=0.0):.2f} s"
        return text + (f", acknowledged again {after[0] - mended_s:.2f} s after" if after else ", none after")


@contextmanager
def serving(servers: int, folder: Path) -> Iterator[Serving]:
    """A parameter server of so many hosts with two replicas, and a client on one more that pushes."""
    file = folder / "ps.json"
    with ExitStack() as stack:
        places = stack.enter_context(hosts(servers + 1))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_kill, processes)
        for number, place in enumerate(places[:servers]):
            new = ["--new", str(servers), "--replicas", "2"] if number == 0 else []
            command = [*place.prefix, sys.executable, "-m", "offbeat", "serve", *new, str(file)]
            with (folder / f"server{number}.txt").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [*command, "--host", place.address],
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
            if number == 0:
                wait_until(file.exists, "the cluster's file")
        client = places[-1]
        arguments = (client.name, client.address, str(file), str(folder / "stop"))
        cluster = stack.enter_context(start(_push, 1, *arguments))
        watched = Serving(places, cluster, processes, folder)
        stack.callback(watched.close)
        watched.pushes_on(START_S)
        try:
            yield watched
        finally:
            mend(*places)


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


# Faults ----------------------------------------------------------------------------------------------------


def fault(
    watched: Watched, break_it: Callable[[], None], duration_s: float, until_ended: Collection[int] = ()
) -> tuple[float, float]:
    """Break the network for some seconds, or until these processes have all ended; return both times."""
    broken_s = time.monotonic()
    break_it()
    watched.let_pass(duration_s, until_ended=until_ended)
    mend(*watched.places)
    return broken_s, time.monotonic()


def part(one: Host, other: Host) -> None:
    """Let two hosts not reach each other, whom all others reach."""
    block(one, other)
    block(other, one)


def listening(place: Host) -> list[str]:
    """Where nodes on a host listen for others: `address:port`. The job's store listens on every address."""
    command = [*place.prefix, "ss", "--no-header", "--listening", "--tcp", "--numeric"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    found = [line.split()[3] for line in shown.splitlines()]
    return [address for address in found if address.startswith(f"{place.address}:")]


_CONNECT = """
import resource, socket, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
addresses, count = sys.argv[2:], int(sys.argv[1])
held = []
for number in range(count):
    host, _, port = addresses[number % len(addresses)].rpartition(":")
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex((host, int(port)))
    held.append(one)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def strangers(place: Host, count: int, addresses: Collection[str]) -> Iterator[None]:
    """Connections of a host to these addresses, spread evenly, on which nothing is ever sent."""
    command = [*place.prefix, sys.executable, "-c", _CONNECT, str(count), *addresses]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield
        finally:
            process.kill()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
