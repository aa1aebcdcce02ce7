"""Servers of parameters that are not there: which steps of whom each of them holds, and up to which clock.

Nothing here knows who may start a step, or what a step computes; see `offbeat.simulator.serving` for how
servers survive their own deaths.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from offbeat.policies.staleness.caches import clock_of, time_of
from offbeat.simulator.core.faults import SERVERS

if TYPE_CHECKING:
    from offbeat.simulator.staleness.cluster import BoundedCluster


class Step(NamedTuple):
    """One step's gradients.

    Attributes:
        worker: whose.
        number: how many steps that worker had finished before.
        clock: at which it was taken.
    """

    worker: int
    number: int
    clock: int


@dataclass(eq=False, slots=True)
class Push:
    """What a process sends to all servers.

    Attributes:
        process: who.
        time: of the push.
        steps: whose gradients are in it.
        then: is called once all servers have applied it.
        acknowledged: by how many servers.
    """

    process: int
    time: int
    steps: Sequence[Step]
    then: Callable[[Push], None]
    acknowledged: int = 0


class Piece(NamedTuple):
    """What one server had when it was asked.

    Attributes:
        time: of the last push of the process that asks that was applied.
        steps: of each worker: how many of its steps were applied.
        complete: all steps of living workers at clocks before this one were.
    """

    time: int
    steps: Counter[int]
    complete: float


class Row(NamedTuple):
    """Parameters as the servers had them.

    Attributes:
        version: as the process may take it for.
        pieces: of each server.
    """

    version: int
    pieces: Sequence[Piece]


@dataclass(eq=False, slots=True)
class _Server:
    """One server: a stretch of the parameters.

    Attributes:
        version: how many clocks were applied, where pushes are summed clock by clock.
        steps: how many steps of each worker.
        times: of each process: of its last push that was applied.
        waiting: of each process: pushes for whose clock others are awaited.
        heard_s: when the last message of each process comes, for they come in order.
    """

    version: int = 0
    steps: Counter[int] = field(default_factory=Counter)
    times: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, deque[Push]] = field(default_factory=dict)
    heard_s: dict[int, float] = field(default_factory=dict)


class Servers:
    """The parameter server, as far as versions go.

    Where pushes are summed clock by clock, a clock is applied once all processes that take part in it have
    pushed it; else each push is, on arrival. Every server does so by itself. Nobody shares a line.

    Args:
        cluster: to which they belong.
        count: how many there are.
        is_versioned: pushes are summed.
    """

    def __init__(self, cluster: BoundedCluster, count: int, *, is_versioned: bool) -> None:
        self._cluster, self._is_versioned = cluster, is_versioned
        self._servers = [_Server() for _ in range(count)]
        self._begins: dict[int, int] = {}  # of each process that takes part: from which clock on
        self._gone: set[int] = set()

    @property
    def version(self) -> int:
        """The last one that some server has."""
        return max(one.version for one in self._servers)

    @property
    def steps(self) -> list[Counter[int]]:
        """What each server has applied: of each worker, how many steps."""
        return [one.steps for one in self._servers]

    def enlist(self, process: int) -> int:
        """A process takes part; return the first clock whose sum waits for it."""
        begin = self._begins[process] = self.version if self._is_versioned else 0
        for server in self._servers:
            server.times[process] = time_of(begin - 1) if not begin else 0
        return begin

    def withdraw(self, process: int) -> None:
        """A process takes part no more; what it has pushed and waits for others is dropped."""
        self._gone.add(process)
        if self._begins.pop(process, None) is None:
            return
        for server in self._servers:
            server.waiting.pop(process, None)
            self._sum(server)

    def push(self, push: Push) -> None:
        """Send a push to every server."""
        share = self._cluster.size_bytes // len(self._servers) if push.steps else 0
        for server in self._servers:
            self._cluster.engine.at(self._arrival_s(server, push.process, share), self._hear, (server, push))

    def pull(self, process: int, version: int, then: Callable[[Row], None]) -> None:
        """Ask every server; `then` is called with the row.

        Args:
            process: who asks.
            version: for which the row may be taken, where pushes are not summed.
            then: is called.
        """
        pieces: dict[int, Piece] = {}

        def read(server: _Server) -> None:
            pieces[self._servers.index(server)] = self._piece(server, process)
            if len(pieces) == len(self._servers):
                row = Row(self._version_of(pieces, version), [piece for _, piece in sorted(pieces.items())])
                free_s = self._cluster.lines.free_s(process, SERVERS)
                takes_s = self._cluster.network.transfer_s(self._cluster.size_bytes)
                self._cluster.engine.at(free_s + takes_s, then, row)

        for server in self._servers:
            self._cluster.engine.at(self._arrival_s(server, process, 0), read, server)

    def _version_of(self, pieces: dict[int, Piece], version: int) -> int:
        if not self._is_versioned:
            return version
        return min(clock_of(piece.time) for piece in pieces.values()) + 1

    def _piece(self, server: _Server, process: int) -> Piece:
        steps = server.steps.copy()
        return Piece(server.times.get(process, 0), steps, self._cluster.complete(steps))

    def _arrival_s(self, server: _Server, process: int, size_bytes: int) -> float:
        cluster = self._cluster
        takes_s = cluster.network.transfer_s(size_bytes) * (
            1 + cluster.network.spread * cluster.chance.random()
        )
        at_s = max(server.heard_s.get(process, 0.0), cluster.lines.free_s(process, SERVERS) + takes_s)
        server.heard_s[process] = at_s
        return at_s

    def _hear(self, message: tuple[_Server, Push]) -> None:
        server, push = message
        if not self._is_versioned:
            self._apply(server, push)
        elif push.process not in self._gone:
            server.waiting.setdefault(push.process, deque()).append(push)
            self._sum(server)

    def _sum(self, server: _Server) -> None:
        """Apply what is complete."""
        while self._begins:
            waited = [one for one, begin in self._begins.items() if begin <= server.version]
            pushes = [server.waiting[one][0] for one in waited if server.waiting.get(one)]
            if len(pushes) < len(waited):
                return
            for push in pushes:
                if push.time != time_of(server.version):
                    self._cluster.violated(
                        f"process {push.process} pushes clock {clock_of(push.time)} where clock "
                        f"{server.version} is due"
                    )
                server.waiting[push.process].popleft()
                self._apply(server, push)
            server.version += 1

    def _apply(self, server: _Server, push: Push) -> None:
        for step in push.steps:
            if step.number != server.steps[step.worker]:
                self._cluster.violated(
                    f"step {step.number} of worker {step.worker} comes to a server that has "
                    f"{server.steps[step.worker]} of its steps"
                )
            if self._is_versioned and step.clock != server.version:
                self._cluster.violated(
                    f"a step of worker {step.worker} at clock {step.clock} is in the sum of clock "
                    f"{server.version}"
                )
            server.steps[step.worker] += 1
        server.times[push.process] = push.time
        push.acknowledged += 1
        if push.acknowledged == len(self._servers):
            free_s = self._cluster.lines.free_s(push.process, SERVERS)
            self._cluster.engine.at(free_s + self._cluster.network.latency_s, push.then, push)
