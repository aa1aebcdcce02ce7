"""Simulated parameter servers, reduced to versions: the steps of each worker that a server has, by clock.

Nothing here knows which worker may start a step, or what a step computes; see `offbeat.simulator.ps.cluster`
for the fault tolerance of servers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.policies.staleness.caches import push_clock, push_time
from offbeat.simulator.core.faults import SERVERS
from offbeat.simulator.core.network_outages import NetworkOutages
from offbeat.simulator.training.interface import Simulation


class PushedStep(NamedTuple):
    """The gradients of one step.

    Attributes:
        worker: the worker.
        number: steps that the worker had finished before.
        clock: the clock of the step.
    """

    worker: int
    number: int
    clock: int


@dataclass(eq=False, slots=True)
class SimulatedPush:
    """A push of a process to all servers.

    Attributes:
        process: the sender.
        time: of the push.
        steps: the steps whose gradients are in it.
        on_applied: called once all servers have applied it.
        acks: servers that have applied it.
    """

    process: int
    time: int
    steps: Sequence[PushedStep]
    on_applied: Callable[[SimulatedPush], None]
    acks: int = 0


class RowPiece(NamedTuple):
    """One server's part of a row.

    Attributes:
        time: of the last applied push of the process that pulls.
        steps: applied steps, by worker.
        complete_clock: all steps of living workers at clocks before this one were applied.
    """

    time: int
    steps: Counter[int]
    complete_clock: float


class PulledRow(NamedTuple):
    """Parameters as pulled from the servers.

    Attributes:
        version: the version that it counts as.
        pieces: one for each server.
    """

    version: int
    pieces: Sequence[RowPiece]


@dataclass(eq=False, slots=True)
class _Server:
    """One server, with a part of the parameters.

    Attributes:
        version: applied clocks, where pushes are summed clock by clock.
        steps: applied steps, by worker.
        times: time of the last applied push, by process.
        waiting: pushes whose clock is not complete, by process.
        last_arrival_s: arrival of the last message, by process; messages of a process arrive in order.
    """

    version: int = 0
    steps: Counter[int] = field(default_factory=Counter)
    times: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, deque[SimulatedPush]] = field(default_factory=dict)
    last_arrival_s: dict[int, float] = field(default_factory=dict)


class SimulatedServers:
    """The parameter servers, reduced to versions.

    Where pushes are summed clock by clock, a clock is applied once all participating processes have pushed
    it; else each push is applied on arrival. Every server does so by itself. No two transfers share a link.

    Args:
        cluster: the run.
        lines: the connections of its nodes.
        complete_clock: returns the first clock of which a living worker's step is not among these, counted
            by worker.
        count: number of servers.
        is_versioned: pushes are summed clock by clock.
    """

    def __init__(
        self,
        cluster: Simulation,
        lines: NetworkOutages,
        complete_clock: Callable[[Counter[int]], float],
        count: int,
        *,
        is_versioned: bool,
    ) -> None:
        self._cluster, self._lines, self._is_versioned = cluster, lines, is_versioned
        self._complete_clock = complete_clock
        self._servers = [_Server() for _ in range(count)]
        self._first_clocks: dict[
            int, int
        ] = {}  # of each participating process: the first clock that it pushes
        self._gone: set[int] = set()

    @property
    def version(self) -> int:
        """The latest version on any server."""
        return max(server.version for server in self._servers)

    @property
    def steps(self) -> list[Counter[int]]:
        """The applied steps on each server, by worker."""
        return [server.steps for server in self._servers]

    def join(self, process: int) -> int:
        """Let a process participate; return the first clock whose sum waits for it."""
        begin = self._first_clocks[process] = self.version if self._is_versioned else 0
        for server in self._servers:
            server.times[process] = push_time(begin - 1) if not begin else 0
        return begin

    def leave(self, process: int) -> None:
        """End the participation of a process; its pushes that wait for other processes are dropped."""
        self._gone.add(process)
        if self._first_clocks.pop(process, None) is None:
            return
        for server in self._servers:
            server.waiting.pop(process, None)
            self._apply_complete(server)

    def push(self, push: SimulatedPush) -> None:
        """Send a push to every server."""
        share = self._cluster.setting.size_bytes // len(self._servers) if push.steps else 0
        for server in self._servers:
            self._cluster.engine.schedule(
                self._arrival_s(server, push.process, share), self._receive, (server, push)
            )

    def pull(self, process: int, version: int, on_row: Callable[[PulledRow], None]) -> None:
        """Request a row from every server.

        Args:
            process: the process that pulls.
            version: the version that the row counts as, where pushes are not summed.
            on_row: called with the row.
        """
        pieces: dict[int, RowPiece] = {}

        def read(server: _Server) -> None:
            pieces[self._servers.index(server)] = self._piece(server, process)
            if len(pieces) == len(self._servers):
                row = PulledRow(
                    self._version_of(pieces, version), [piece for _, piece in sorted(pieces.items())]
                )
                free_s = self._lines.reachable_s(process, SERVERS)
                size_bytes = self._cluster.setting.size_bytes
                takes_s = self._cluster.network.transfer_s(size_bytes, process, SERVERS)
                self._cluster.engine.schedule(free_s + takes_s, on_row, row)

        for server in self._servers:
            self._cluster.engine.schedule(self._arrival_s(server, process, 0), read, server)

    def _version_of(self, pieces: dict[int, RowPiece], version: int) -> int:
        if not self._is_versioned:
            return version
        return min(push_clock(piece.time) for piece in pieces.values()) + 1

    def _piece(self, server: _Server, process: int) -> RowPiece:
        steps = server.steps.copy()
        return RowPiece(server.times.get(process, 0), steps, self._complete_clock(steps))

    def _arrival_s(self, server: _Server, process: int, size_bytes: int) -> float:
        cluster = self._cluster
        takes_s = cluster.network.transfer_s(size_bytes, process, SERVERS) * (
            1 + cluster.network.spread * cluster.chance.random()
        )
        at_s = max(
            server.last_arrival_s.get(process, 0.0), self._lines.reachable_s(process, SERVERS) + takes_s
        )
        server.last_arrival_s[process] = at_s
        return at_s

    def _receive(self, message: tuple[_Server, SimulatedPush]) -> None:
        server, push = message
        if not self._is_versioned:
            self._apply(server, push)
        elif push.process not in self._gone:
            server.waiting.setdefault(push.process, deque()).append(push)
            self._apply_complete(server)

    def _apply_complete(self, server: _Server) -> None:
        """Apply all clocks that are complete."""
        while self._first_clocks:
            expected = [process for process, begin in self._first_clocks.items() if begin <= server.version]
            pushes = [server.waiting[process][0] for process in expected if server.waiting.get(process)]
            if len(pushes) < len(expected):
                return
            for push in pushes:
                if push.time != push_time(server.version):
                    self._cluster.fail_invariant(
                        f"process {push.process} pushed clock {push_clock(push.time)} where clock "
                        f"{server.version} is due"
                    )
                server.waiting[push.process].popleft()
                self._apply(server, push)
            server.version += 1

    def _apply(self, server: _Server, push: SimulatedPush) -> None:
        for step in push.steps:
            if step.number != server.steps[step.worker]:
                self._cluster.fail_invariant(
                    f"step {step.number} of worker {step.worker} comes to a server that has "
                    f"{server.steps[step.worker]} of its steps"
                )
            if self._is_versioned and step.clock != server.version:
                self._cluster.fail_invariant(
                    f"a step of worker {step.worker} at clock {step.clock} is in the sum of clock "
                    f"{server.version}"
                )
            server.steps[step.worker] += 1
        server.times[push.process] = push.time
        push.acks += 1
        if push.acks == len(self._servers):
            free_s = self._lines.reachable_s(push.process, SERVERS)
            latency_s = self._cluster.network.message_s(push.process, SERVERS)
            self._cluster.engine.schedule(free_s + latency_s, push.on_applied, push)
