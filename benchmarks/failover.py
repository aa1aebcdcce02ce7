"""`python -m benchmarks failover`: servers of a parameter server are killed while workers push.

Every push covers all keys of one namespace and has a number: at each key it adds one to its worker's counter,
and its number to the worker's sum. So the final values show whether a push was lost or applied twice, even
where one of each would cancel out in the counter. A second, idle namespace gives the servers that take over
something to fetch.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.children import Child, Lines, request_all
from benchmarks.commands import FailoverOptions
from benchmarks.workers import print_progress
from offbeat.cli.result import Result
from offbeat.errors import OffbeatError
from offbeat.events import Action, ClusterView, Event, NodeLost
from offbeat.runtime.ps.client import PS
from offbeat.runtime.ps.future import Future
from offbeat.runtime.ps.namespace import Namespace
from offbeat.runtime.ps.node import ClusterFile
from offbeat.wire.log_file import read_log

_SERVERS = 4
_REPLICAS = 2
_KEYS, _BLOCK_KEYS = 1024, 32
_IN_FLIGHT = 2  # pushes per worker
_PUSHES_BETWEEN_KILLS = (5, 30)  # pushes of every worker before the next kill, at least and at most
_LIMIT_S = 60.0
_POLL_S = 0.002

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Push:
    """Start and completion of a push, in monotonic time of this machine."""

    begun_s: float
    done_s: float


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One killed server.

    Attributes:
        kind: "one", "two" at once, or during a "join".
        at_s, dead_s: just before the kill, and just after the process had ended.
        promoted_s: when other servers had answered for all keys.
    """

    round: int
    kind: str
    server: int
    at_s: float
    dead_s: float
    promoted_s: float


@dataclass(frozen=True, kw_only=True)
class DetectedKill:
    """A kill in the manager's log: when it was detected, and whether a server was joining."""

    detected_s: float
    is_join: bool


def run(options: FailoverOptions, *, command: str) -> Result:
    """Kill servers, of 4, in rounds of one, two at once, and one while another joins; start replacements.

    Raises:
        OffbeatError: a process failed, or a wait timed out.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        log = Path(folder) / "log.jsonl"
        ps = stack.enter_context(PS.local(_SERVERS, replicas=_REPLICAS, run_log=str(log)))
        pushing = [
            stack.enter_context(Child("benchmarks.failover", name=f"worker {worker}"))
            for worker in range(options.workers)
        ]
        trial = _FailoverTrial(ps, pushing, random.Random(f"failover {options.seed}"))
        trial.begin(options.mb * 1_000_000)
        for number, (kind, count) in enumerate(_rounds(options.kills)):
            print_progress(f"{len(trial.kills)} of {options.kills} killed")
            trial.round(number, kind, count)
        lost, doubled = trial.count_wrong(is_last=True)
        detected = _read_detected_kills(log, [kill.server for kill in trial.kills])
    rows = [_row(kill, detected[kill.server], trial.pushes) for kill in trial.kills]
    figures: dict[str, float] = {
        "lost_pushes": lost,
        "doubled_pushes": doubled,
        "kills_count": len(rows),
        "kills_in_join_count": sum(row["is_join"] for row in rows),
        "pushes_count": sum(map(len, trial.pushes)),
    }
    for name in ("detect_s", "promote_s", "first_served_s", "gap_s"):
        values = [row[name] for row in rows]
        figures |= {f"{name}_p50": median(values), f"{name}_max": max(values)}
    figures["push_s_p50"] = median(push.done_s - push.begun_s for pushes in trial.pushes for push in pushes)
    return Result(
        name="failover",
        command=command,
        kind="real",
        seed=options.seed,
        figures=figures,
        rows=rows,
    )


def _rounds(kills: int) -> Iterator[tuple[str, int]]:
    """Yield kind and number of kills of each round."""
    for kind in itertools.cycle(("one", "two", "join")):
        if kills <= 0:
            return
        count = min(kills, 2 if kind == "two" else 1)
        yield kind if count == 2 or kind == "join" else "one", count
        kills -= count


@dataclass
class _FailoverTrial:
    """The servers, the workers that push, and the record of kills and pushes.

    Attributes:
        pushes: of each worker, in order.
    """

    ps: PS
    workers: Sequence[Child]
    chance: random.Random
    kills: list[Kill] = field(default_factory=list)
    pushes: list[list[Push]] = field(default_factory=list)

    def begin(self, size_bytes: int) -> None:
        """Create the namespaces and connect the workers."""
        self._counters = _counters(self.ps, len(self.workers))
        self._idle = self.ps.namespace("rest", keys=size_bytes // 4)
        self._idle.push(np.ones(self._idle.keys, np.float32)).result()
        self.servers = set(self.ps.servers)
        self._ids = itertools.count(max(self.servers) + 1)
        self.pushes = [[] for _ in self.workers]
        for worker, child in enumerate(self.workers):
            cluster = msgspec.to_builtins(self.ps.cluster)
            child.lines.send({"cluster": cluster, "worker": worker, "workers": len(self.workers)})
        for child in self.workers:
            child.lines.receive()

    def round(self, number: int, kind: str, count: int) -> None:
        """Kill servers while the workers push, start replacements, and check the pushes."""
        for child in self.workers:
            child.lines.send("go")
        self._let_push(self.chance.randint(*_PUSHES_BETWEEN_KILLS))
        victims = self.chance.sample(sorted(self.servers), count)
        if kind == "join":
            with ThreadPoolExecutor(1) as executor:
                started = executor.submit(self._start)
                self._wait_for(
                    lambda: not self.ps.is_rebalanced or len(self.ps.servers) > _SERVERS,
                    "the next server to come",
                )
                self._kill(number, kind, victims)
                started.result()
        else:
            self._kill(number, kind, victims)
            self.ps.wait_until_rebalanced(self.servers)
        while len(self.servers) < _SERVERS:
            self._start()
        self.ps.wait_until_rebalanced(self.servers)
        self._let_push(_PUSHES_BETWEEN_KILLS[0])
        for worker, times_s in enumerate(request_all(self.workers, "halt")):
            self.pushes[worker] += [Push(begun_s=begun_s, done_s=done_s) for begun_s, done_s in times_s]
        lost, doubled = self.count_wrong()
        if lost or doubled:
            print_progress(f"round {number}: {lost} pushes lost, {doubled} twice")

    def count_wrong(self, *, is_last: bool = False) -> tuple[int, int]:
        """Return how many of the completed pushes are lost, and how many were applied twice."""
        values_KC = self._counters.pull().result()  # noqa: N806
        lost, doubled = wrong_pushes(values_KC, [len(pushes) for pushes in self.pushes])
        if is_last:
            idle = self._idle.pull().result()
            lost, doubled = lost + int((idle < 1).any()), doubled + int((idle > 1).any())
        return lost, doubled

    def _kill(self, number: int, kind: str, victims: Sequence[int]) -> None:
        killed_s = {}
        processes = self.ps.local_servers.processes
        for server in victims:
            killed_s[server] = time.monotonic()
            processes[server].kill()
        for server in victims:
            processes[server].wait()
        dead_s = time.monotonic()
        self._counters.pull().result()
        promoted_s = time.monotonic()
        for server, at_s in killed_s.items():
            self.servers.discard(server)
            killed = Kill(
                round=number, kind=kind, server=server, at_s=at_s, dead_s=dead_s, promoted_s=promoted_s
            )
            self.kills.append(killed)

    def _start(self) -> None:
        server = next(self._ids)
        self.ps.local_servers.start(server)
        self.servers.add(server)

    def _let_push(self, count: int) -> None:
        """Wait until every worker has made `count` more pushes."""
        before = self._counts()
        self._wait_for(
            lambda: bool((self._counts() >= before + count).all()), f"{count} pushes of every worker"
        )

    def _counts(self) -> Values:
        counts: Values = self._counters.pull(first=0, last=1).result()[0, ::2]
        return counts

    def _wait_for(self, condition: Any, what: str) -> None:
        limit_s = time.monotonic() + _LIMIT_S
        while not condition():
            if time.monotonic() > limit_s:
                raise OffbeatError(f"timed out after {_LIMIT_S:g} s waiting for {what}")
            time.sleep(_POLL_S)


def wrong_pushes(values_KC: Values, pushed: Sequence[int]) -> tuple[int, int]:  # noqa: N803
    """Return how many pushes are missing at the key with the fewest, and how many were applied twice.

    Args:
        values_KC: one row per key: for each worker its counter and its sum of numbers.
        pushed: number of pushes of each worker.
    """
    lost = doubled = 0
    for worker, count in enumerate(pushed):
        counts_K, sums_K = values_KC[:, 2 * worker], values_KC[:, 2 * worker + 1]  # noqa: N806
        missing, excess = int(max(0, (count - counts_K).max())), int(max(0, (counts_K - count).max()))
        hidden = int(((counts_K == count) & (sums_K != count * (count + 1) / 2)).any())
        lost, doubled = lost + max(missing, hidden), doubled + max(excess, hidden)
    return lost, doubled


def first_served_s(kill: Kill, pushes: Sequence[Sequence[Push]]) -> float:
    """Return the time from a kill to the first completed push that began after the server's death."""
    return min(_served(kill, one).done_s for one in pushes) - kill.at_s


def gap_s(kill: Kill, pushes: Sequence[Sequence[Push]]) -> float:
    """Return the longest time without a completed push around a kill, over the workers."""
    return max(
        later.done_s - before.done_s
        for one in pushes
        for served in (_served(kill, one),)
        for before, later in itertools.pairwise(one)
        if later.done_s > kill.at_s and before.done_s < served.done_s
    )


def _served(kill: Kill, pushes: Sequence[Push]) -> Push:
    return next(push for push in pushes if push.begun_s > kill.dead_s)


def _row(kill: Kill, detected: DetectedKill, pushes: Sequence[Sequence[Push]]) -> dict[str, Any]:
    return {
        "round": kill.round,
        "kind": kill.kind,
        "server": kill.server,
        "is_join": detected.is_join,
        "detect_s": detected.detected_s - kill.at_s,
        "promote_s": kill.promoted_s - kill.at_s,
        "first_served_s": first_served_s(kill, pushes),
        "gap_s": gap_s(kill, pushes),
    }


def _read_detected_kills(log: Path, servers: Sequence[int]) -> dict[int, DetectedKill]:
    """Return the kills in the run log, which is written with a short delay."""
    limit_s = time.monotonic() + _LIMIT_S
    while True:
        found = detected_kills(read_log(log).entries)
        if found.keys() >= set(servers):
            return found
        if time.monotonic() > limit_s:
            raise OffbeatError(
                f"the manager has not detected that servers {set(servers) - found.keys()} died"
            )
        time.sleep(_POLL_S)


def detected_kills(entries: Sequence[Event | Action]) -> dict[int, DetectedKill]:
    """Return what a run log says about each server's death, by server."""
    found: dict[int, DetectedKill] = {}
    for event, action in itertools.pairwise(entries):
        match event:
            case NodeLost(node=node) if node.startswith("server-"):
                server = int(node.removeprefix("server-"))
            case _:
                continue
        if server not in found:
            is_join = isinstance(action, ClusterView) and bool(action.next_ring)
            found[server] = DetectedKill(detected_s=event.now_s, is_join=is_join)
    return found


def _counters(ps: PS, workers: int) -> Namespace:
    return ps.namespace("counters", keys=_KEYS, width=2 * workers, dtype="float64", block_keys=_BLOCK_KEYS)


def main() -> None:
    """Push from "go" to "halt", as one worker; then send the start and completion of each push."""
    lines = Lines.to_parent()
    settings: Mapping[str, Any] = lines.receive()
    numbers = itertools.count(1)
    with PS(msgspec.convert(settings["cluster"], ClusterFile), host="127.0.0.1") as ps:
        counters = _counters(ps, settings["workers"])
        lines.send("here")
        while True:  # until the benchmark ends this process
            lines.receive()
            times_s: list[tuple[float, float]] = []
            in_flight: deque[tuple[float, Future]] = deque()
            while not lines.has_message():
                rows_KC = np.zeros((_KEYS, 2 * settings["workers"]))  # noqa: N806
                rows_KC[:, 2 * settings["worker"]] = 1
                rows_KC[:, 2 * settings["worker"] + 1] = next(numbers)
                in_flight.append((time.monotonic(), counters.push(rows_KC)))
                if len(in_flight) == _IN_FLIGHT:
                    times_s.append(_done(*in_flight.popleft()))
            lines.receive()
            times_s += [_done(*one) for one in in_flight]
            lines.send(times_s)


def _done(begun_s: float, future: Future) -> tuple[float, float]:
    future.result()
    return begun_s, time.monotonic()


if __name__ == "__main__":
    main()
