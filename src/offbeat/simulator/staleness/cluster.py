"""A simulated cluster whose workers train on a parameter server, with or without bounded staleness.

Nothing here decides which worker may start a step; the invariants are checked with every step and read.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from offbeat.events import (
    Action,
    Block,
    Clocked,
    CloseServers,
    Deal,
    Dismiss,
    Event,
    Finished,
    Grant,
    Left,
    Lost,
    Refuse,
    ServerMissed,
    ServerReached,
    Start,
    Stop,
)
from offbeat.policies import Policy
from offbeat.policies.staleness.caches import CacheDirectory, Terms
from offbeat.simulator.core.faults import SERVERS, Cut, Death, Fault, Hang, Split
from offbeat.simulator.core.lines import UNREACHABLE_S
from offbeat.simulator.core.times import Stopwatch
from offbeat.simulator.staleness.process import ServedProcess, ServedWorker
from offbeat.simulator.staleness.servers import Row, Servers, Step
from offbeat.simulator.training.cluster import Cluster, Setting
from offbeat.simulator.training.worker import SimulatedWorker

MakeDirectory = Callable[[Sequence[int], Terms], CacheDirectory]

_NOISE = 0.03  # standard deviation of the log of a version's loss


@dataclass(frozen=True, kw_only=True)
class Served:
    """Parameters of a simulated run that concern the parameter server.

    Attributes:
        terms: how the strategy uses the parameter server.
        bounds: the minimum and maximum staleness that the policy may allow, in clocks; None for no bound.
        bound_step: maximum change of the bound from one version to the next.
        threads: workers in a process, among those that are there at the start.
        servers: number of servers, each with a part of the parameters.
        halves_after: clocks in which the training loss halves; infinite for one that only fluctuates.
        warm_start: steps that one worker takes alone.
    """

    terms: Terms
    bounds: tuple[int, int] | None
    bound_step: int = 0
    threads: int = 1
    servers: int = 1
    halves_after: float = 200.0
    warm_start: int = 0


def served_of(terms: Terms, arguments: Mapping[str, Any], **more: Any) -> Served:
    """Return the `Served` for these arguments of `BoundedStaleness`."""
    s, dynamic = arguments["s"], arguments.get("dynamic")
    if s is None or dynamic is None:
        warm_start = arguments.get("warm_start", 0)
        return Served(terms=terms, bounds=None if s is None else (s, s), warm_start=warm_start, **more)
    bounds = (dynamic.get("s_min", 3), dynamic.get("s_max", 10))
    has_stragglers = arguments.get("detector") is not None  # for stragglers the maximum applies at once
    step = bounds[1] if has_stragglers else dynamic.get("step", 1)
    return Served(terms=terms, bounds=bounds, bound_step=step, **more)


def make_directory(threads: Sequence[int], terms: Terms) -> CacheDirectory:
    """Return the cache directory of a process."""
    return CacheDirectory(threads, is_versioned=terms.is_versioned, clears_threads=terms.clears_thread_cache)


class BoundedCluster(Cluster):
    """One simulated run on a parameter server.

    Checked invariants: no worker starts further ahead of the slowest than the bound, which stays within its
    limits and changes no faster than allowed; what a worker reads contains every step of living workers that
    the bound requires, and all its own steps once; with a bound of 0, nothing else; every clock's sum is of
    that clock's steps; no step is lost or counted twice; no worker waits at a gate without a bound, except
    during a warm start, in which one worker is alone; each sample is used once.

    Source: the invariants of the specification's sections 2.4 and 2.5.

    Args:
        setting: parameters of the run.
        policies: builds the coordinator's policies; called again for each restarted coordinator.
        served: parameters of the run that concern the parameter server.
        directory: makes a process's cache directory.
        keeps_log: whether `log` is kept.

    Attributes:
        servers: the parameter servers.
        epoch: the latest one in which a worker has started a step.
        steps_of: the clocks of the steps, by worker.
        bound_seen: the bound in the last Grant that had one.
    """

    HAS_SERVERS: ClassVar = True

    def __init__(
        self,
        setting: Setting,
        policies: Callable[[], Sequence[Policy]],
        served: Served,
        *,
        directory: MakeDirectory = make_directory,
        keeps_log: bool = False,
    ) -> None:
        super().__init__(setting, policies, keeps_log=keeps_log, one_by_one=True)
        self.served, self.terms = served, served.terms
        self.servers = Servers(self, served.servers, is_versioned=self.terms.is_versioned)
        self.processes: dict[int, ServedProcess] = {}
        self.epoch = 0
        self.is_numbered = True
        self.steps_of: dict[int, list[int]] = {}
        self.bound_seen: int | None = None
        self._make_directory = directory
        self._clocks: dict[int, int] = {}  # the policy's clock of each worker that has begun and not ended
        self._version_seen = 0
        self._ended: set[int] = set()  # workers whose steps may be missing
        self._has_lost = False
        self._misses_servers: dict[int, bool] = {}  # by process, once it was cut from the servers
        self._blocks: dict[int, Block] = {}
        self._used: dict[tuple[int, int], tuple[int, ...]] = {}  # by worker and step

    @property
    def step(self) -> int:
        """Steps finished by the furthest worker."""
        return max(len(clocks) for clocks in self.steps_of.values())

    @property
    def threads(self) -> dict[int, ServedWorker]:
        """All workers, past and present."""
        return {
            worker: simulated
            for worker, simulated in self._workers.items()
            if isinstance(simulated, ServedWorker)
        }

    def loss(self, clock: int) -> float:
        """The loss that all workers report at a clock: it decreases, with fluctuations of 3 %."""
        chance = random.Random(f"loss {self.setting.seed} {clock}")
        falls = 0.5 ** (clock / self.served.halves_after)
        return float(falls * math.exp(chance.gauss(0.0, _NOISE)))

    def _make(self, worker: int, stopwatch: Stopwatch, is_new: bool) -> SimulatedWorker:
        number = worker if is_new else worker - worker % self.served.threads
        process = self.processes.get(number)
        if process is None:
            last = worker + 1 if is_new else min(number + self.served.threads, self.world)
            directory = self._make_directory(range(number, last), self.terms)
            process = self.processes[number] = ServedProcess(self, number, directory)
        self.steps_of[worker] = []
        return ServedWorker(self, worker, stopwatch, process, is_new=is_new)

    # Faults: processes hang and die, not threads ----------------------------------------------------------

    def _mates(self, worker: int) -> tuple[int, ...]:
        simulated = self._workers.get(worker)
        if not isinstance(simulated, ServedWorker):
            return (worker,)
        return tuple(thread.worker for thread in simulated.process.threads)

    def _fail(self, fault: Fault) -> None:
        match fault:
            case Death() | Split():
                affected = {
                    thread_worker for worker in fault.workers for thread_worker in self._mates(worker)
                }
                super()._fail(replace(fault, workers=tuple(sorted(affected))))
            case Hang() if fault.worker in self._workers:
                for thread_worker in self._mates(fault.worker):
                    super()._fail(replace(fault, worker=thread_worker))
            case Cut(peer=peer) if peer == SERVERS and fault.worker in self._workers:
                super()._fail(fault)
                process = self.threads[fault.worker].process
                self.engine.at(self.engine.now_s + UNREACHABLE_S, self._check_reachability, process)
            case _:
                super()._fail(fault)

    def _check_reachability(self, process: ServedProcess) -> None:
        """Report that a process receives nothing from the servers, and later that it does again."""
        now_s, number = self.engine.now_s, process.number
        if not self.is_running(number):
            return
        until_s = max(self.lines.free_s(number, SERVERS), self._hung_until_s.get(number, now_s))
        if until_s > now_s:
            self.engine.at(until_s, self._check_reachability, process)
        if not self.is_hung(number) and self._misses_servers.get(number, False) != (until_s > now_s):
            self._misses_servers[number] = until_s > now_s
            self._report_servers(number)

    def _report_servers(self, number: int) -> None:
        """Report the state of the servers for a process; repeated until the coordinator receives it."""
        if self._is_down or not self.is_present(number) or self._is_cut_off(number):
            if self.is_running(number):
                self.engine.at(self.engine.now_s + self.setting.tick_s, self._report_servers, number)
            return
        now_s, node = self.engine.now_s - self.behind_s, f"client-{number}"
        for server in range(self.served.servers):
            if self._misses_servers[number]:
                self.ask(ServerMissed(now_s=now_s, node=node, server=server, cause="nothing comes from it"))
            else:
                self.ask(ServerReached(now_s=now_s, node=node, server=server))

    def _come_back(self, _: Any) -> None:
        super()._come_back(_)
        for number in self._misses_servers:
            self._report_servers(number)

    def kill(self, worker: int, after_s: float, cause: str) -> None:
        """See `Cluster.kill`; the other threads of its process end, too."""
        for thread_worker in self._mates(worker):
            super().kill(thread_worker, after_s, cause)

    def end_process(self, process: ServedProcess) -> None:
        """End the process of a thread that was told to end."""
        self.kill(process.number, self.setting.detect_s, "its process has ended")

    def ended(self, process: ServedProcess) -> None:
        """Note that a thread has ended; the servers learn of it once all threads of the process have."""
        if not any(thread.is_alive for thread in process.threads):
            at_s = self.engine.now_s + self.setting.detect_s
            self.engine.at(at_s, lambda _: self.servers.withdraw(process.number))
        self._ended.update(thread.worker for thread in process.threads if not thread.is_alive)

    def _lose(self, loss: tuple[int, str]) -> None:
        worker = loss[0]
        self._has_lost = True
        self._ended.add(worker)
        super()._lose(loss)
        process = self.threads[worker].process
        if not self._is_down and all(thread.worker in self._gone for thread in process.threads):
            self.servers.withdraw(process.number)

    # Events and actions ----------------------------------------------------------------------------------

    def ask(self, event: Event) -> bool:
        """See `Cluster.ask`."""
        if isinstance(event, Left | Lost | Finished):
            self._clocks.pop(event.worker, None)
        if isinstance(event, Left) and not self.is_dismissed:
            self._has_lost = True
        if isinstance(event, Clocked) and event.clock is not None:
            self._used[event.worker, event.step] = event.blocks
        return super().ask(event)

    def _answer(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Grant():
                    self._note_clock(action)
                case Deal():
                    self._blocks |= {block.id: block for block in action.blocks}
                case _:
                    pass
        for action in actions:
            match action:
                case Grant() | Deal():
                    if isinstance(action, Grant):
                        self._check_grant(action)
                    self._send(action.worker, (action,))
                case Refuse():
                    worker = int(action.peer.removeprefix("worker-"))
                    self._has_lost = True
                    self._present.discard(worker)
                    self._clocks.pop(worker, None)
                    self._send(worker, (action,))
                case Start() | Dismiss() | Stop():
                    self.is_dismissed |= isinstance(action, Dismiss)
                    self.stopped = action if isinstance(action, Stop) else self.stopped
                    for worker in sorted(self._present):
                        self._send(worker, (action,))
                case CloseServers():
                    pass
                case _:
                    self.violated(f"expected an action for workers on servers, got {action}")

    # Invariants ------------------------------------------------------------------------------------------

    def _note_clock(self, grant: Grant) -> None:
        before = self._clocks.get(grant.worker, 0)
        if grant.clock < before:
            self.violated(f"worker {grant.worker}: its clock goes back from {before} to {grant.clock}")
        self._clocks[grant.worker] = grant.clock

    def _check_grant(self, grant: Grant) -> None:
        bounds, worker = self.served.bounds, grant.worker
        is_warming = len(self._used) < self.served.warm_start
        if is_warming and grant.may_start and not self.terms.is_dealt and worker != min(self._clocks):
            self.violated(f"worker {worker} may start while another takes its first steps alone")
        if not grant.may_start:
            is_expected = grant.reason in ("it has no samples", "not everybody is here yet")
            if bounds is None and not is_expected and not is_warming:
                self.violated(f"worker {worker} has to wait though there is no bound: {grant.reason}")
            return
        if bounds is None or grant.bound is None:
            if (bounds is None) != (grant.bound is None):
                self.violated(f"worker {worker} may start with an unexpected bound of {grant.bound}")
            return
        least = min(self._clocks.values())
        if grant.clock - least > grant.bound or grant.clock - grant.version > grant.bound:
            self.violated(
                f"worker {worker} may start at clock {grant.clock} with version {grant.version} and a bound "
                f"of {grant.bound}, and the slowest is at {least}"
            )
        if not bounds[0] <= grant.bound <= bounds[1]:
            self.violated(f"worker {worker} has a bound of {grant.bound}, expected one in {bounds}")
        self._check_change(grant.bound, least)

    def _check_change(self, bound: int, version: int) -> None:
        before = bound if self.bound_seen is None else self.bound_seen
        versions = max(1, version - self._version_seen)
        if abs(bound - before) > self.served.bound_step * versions:
            self.violated(f"the bound changes from {before} to {bound} within {versions} versions")
        self.bound_seen, self._version_seen = bound, max(version, self._version_seen)

    def complete(self, steps: Counter[int]) -> float:
        """Return the first clock with a step of a living worker not among these, or still to come."""
        return min(
            (
                clocks[steps[worker]] if steps[worker] < len(clocks) else self._clocks.get(worker, math.inf)
                for worker, clocks in self.steps_of.items()
                if worker not in self._ended
            ),
            default=math.inf,
        )

    def check_step(self, step: Step) -> None:
        """Record a step, and check that its clock is not over."""
        self.steps_of[step.worker].append(step.clock)
        is_over = self.terms.is_versioned and self.servers.version > step.clock
        if is_over and step.worker not in self._ended:
            self.violated(f"worker {step.worker} takes a step at clock {step.clock}, which is over")

    def check_read(self, worker: ServedWorker, grant: Grant, row: Row, visible: Sequence[int]) -> None:
        """Check that what a worker reads contains the required steps, and its own steps once."""
        reader = f"worker {worker.worker} at clock {grant.clock}"
        if self.terms.push_every == 1 and any(count != worker.number for count in visible):
            self.violated(f"{reader} has taken {worker.number} steps and sees {list(visible)} of its own")
        if grant.bound is None:
            return
        required = max(0, grant.clock - grant.bound)
        complete = min(piece.complete for piece in row.pieces)
        if complete < required:
            self.violated(
                f"{reader} reads values that lack steps of clock {complete}; it needs version {required}"
            )
        if grant.bound == 0 and self.terms.is_versioned:
            for other, clocks in self.steps_of.items():
                if any(piece.steps[other] > bisect_left(clocks, grant.clock) for piece in row.pieces):
                    self.violated(f"{reader} sees steps of worker {other} that are not before it")

    def _check_end(self) -> None:
        samples = self.setting.samples
        uses: Counter[tuple[int, int]] = Counter()
        for blocks in self._used.values():
            for block in (self._blocks[number] for number in blocks):
                for start, stop in block.ranges:
                    uses.update((block.epoch, position) for position in range(start, stop))
        if samples is not None:
            for (epoch, position), count in uses.items():
                if count > 1:
                    self.violated(f"position {position} of epoch {epoch} was used {count} times")
        if not self.is_dismissed:
            return
        expected = 0 if samples is None or self._has_lost else (samples.epochs or 0) * samples.count
        if len(uses) < expected:
            self.violated(f"the job ended with {len(uses)} of {expected} samples used")
        for worker, clocks in self.steps_of.items():
            for steps in self.servers.steps:
                if not self._has_lost and steps[worker] != len(clocks):
                    self.violated(
                        f"worker {worker} has taken {len(clocks)} steps, and a server has {steps[worker]}"
                    )
