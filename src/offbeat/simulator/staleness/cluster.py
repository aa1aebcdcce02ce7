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
    AbortJob,
    Action,
    AssignBlocks,
    Block,
    CloseServers,
    Event,
    Finished,
    JobComplete,
    Left,
    Lost,
    PeerList,
    RejectPeer,
    ServerReachable,
    ServerUnreachable,
    StepFinished,
    StepPermit,
)
from offbeat.policies import Policy
from offbeat.policies.staleness.caches import CacheDirectory, PsOptions
from offbeat.simulator.core.faults import SERVERS, Fault, LinkCut, Partition, WorkerDeath, WorkerHang
from offbeat.simulator.core.network_outages import UNREACHABLE_S
from offbeat.simulator.core.times import ComputeTimeSource
from offbeat.simulator.staleness.process import PsWorkerProcess, PsWorkerThread
from offbeat.simulator.staleness.servers import PulledRow, PushedStep, SimulatedServers
from offbeat.simulator.training.cluster import SimulatedCluster
from offbeat.simulator.training.setting import SimulationSetting
from offbeat.simulator.training.worker import SimulatedWorker

MakeDirectory = Callable[[Sequence[int], PsOptions], CacheDirectory]

_NOISE = 0.03  # standard deviation of the log of a version's loss


@dataclass(frozen=True, kw_only=True)
class PsSetting:
    """Parameters of a simulated run that concern the parameter server.

    Attributes:
        ps_options: how the strategy uses the parameter server.
        bounds: the minimum and maximum staleness that the policy may allow, in clocks; None for no bound.
        bound_step: maximum change of the bound from one version to the next.
        threads: workers in a process, among those that are there at the start.
        servers: number of servers, each with a part of the parameters.
        halves_after: clocks in which the training loss halves; infinite for one that only fluctuates.
        warm_start: steps that one worker takes alone.
    """

    ps_options: PsOptions
    bounds: tuple[int, int] | None
    bound_step: int = 0
    threads: int = 1
    servers: int = 1
    halves_after: float = 200.0
    warm_start: int = 0


def ps_setting(ps_options: PsOptions, arguments: Mapping[str, Any], **options: Any) -> PsSetting:
    """Return the `PsSetting` for these arguments of `BoundedStaleness`."""
    s, dynamic = arguments["s"], arguments.get("dynamic")
    if s is None or dynamic is None:
        warm_start = arguments.get("warm_start", 0)
        return PsSetting(
            ps_options=ps_options, bounds=None if s is None else (s, s), warm_start=warm_start, **options
        )
    bounds = (dynamic.get("s_min", 3), dynamic.get("s_max", 10))
    has_stragglers = arguments.get("detector") is not None  # for stragglers the maximum applies at once
    step = bounds[1] if has_stragglers else dynamic.get("step", 1)
    return PsSetting(ps_options=ps_options, bounds=bounds, bound_step=step, **options)


def make_directory(threads: Sequence[int], ps_options: PsOptions) -> CacheDirectory:
    """Return the cache directory of a process."""
    return CacheDirectory(
        threads, is_versioned=ps_options.is_versioned, clears_threads=ps_options.clears_thread_cache
    )


class SimulatedPsCluster(SimulatedCluster):
    """One simulated run on a parameter server.

    Checked invariants: no worker starts further ahead of the slowest than the bound, which stays within its
    limits and changes no faster than allowed; what a worker reads contains every step of living workers that
    the bound requires, and all its own steps once; with a bound of 0, nothing else; every clock's sum is of
    that clock's steps; no step is lost or counted twice; no worker waits at a gate without a bound, except
    during a warm start, in which one worker is alone; each sample is used once.

    Args:
        setting: parameters of the run.
        policies: builds the coordinator's policies; called again for each restarted coordinator.
        served: parameters of the run that concern the parameter server.
        directory_factory: makes a process's cache directory.
        keeps_log: whether `log` is kept.

    Attributes:
        servers: the parameter servers.
        epoch: the latest one in which a worker has started a step.
        clocks_by_worker: the clocks of the steps, by worker.
        last_bound: the bound in the last StepPermit that had one.
    """

    HAS_SERVERS: ClassVar = True

    def __init__(
        self,
        setting: SimulationSetting,
        policies: Callable[[], Sequence[Policy]],
        served: PsSetting,
        *,
        directory_factory: MakeDirectory = make_directory,
        keeps_log: bool = False,
    ) -> None:
        super().__init__(setting, policies, keeps_log=keeps_log, one_by_one=True)
        self.ps_setting, self.ps_options = served, served.ps_options
        self.servers = SimulatedServers(
            self, self.lines, self.complete_clock, served.servers, is_versioned=self.ps_options.is_versioned
        )
        self.processes: dict[int, PsWorkerProcess] = {}
        self.epoch = 0
        self.is_exactly_once = True
        self.clocks_by_worker: dict[int, list[int]] = {}
        self.last_bound: int | None = None
        self._make_directory = directory_factory
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
        return max(len(clocks) for clocks in self.clocks_by_worker.values())

    @property
    def threads(self) -> dict[int, PsWorkerThread]:
        """All workers, past and present."""
        return {
            worker: simulated
            for worker, simulated in self._workers.items()
            if isinstance(simulated, PsWorkerThread)
        }

    def loss(self, clock: int) -> float:
        """Return the loss that all workers report at a clock: it decreases, with fluctuations of 3 %."""
        chance = random.Random(f"loss {self.setting.seed} {clock}")
        falls = 0.5 ** (clock / self.ps_setting.halves_after)
        return float(falls * math.exp(chance.gauss(0.0, _NOISE)))

    def _make(self, worker: int, stopwatch: ComputeTimeSource, is_new: bool) -> SimulatedWorker:
        number = worker if is_new else worker - worker % self.ps_setting.threads
        process = self.processes.get(number)
        if process is None:
            last = worker + 1 if is_new else min(number + self.ps_setting.threads, self.setting.world)
            directory = self._make_directory(range(number, last), self.ps_options)
            process = self.processes[number] = PsWorkerProcess(self, number, directory)
        self.clocks_by_worker[worker] = []
        return PsWorkerThread(self, worker, stopwatch, process, is_new=is_new)

    # Faults: processes hang and die, not threads ----------------------------------------------------------

    def _process_workers(self, worker: int) -> tuple[int, ...]:
        simulated = self._workers.get(worker)
        if not isinstance(simulated, PsWorkerThread):
            return (worker,)
        return tuple(thread.worker for thread in simulated.process.threads)

    def _inject_fault(self, fault: Fault) -> None:
        match fault:
            case WorkerDeath() | Partition():
                affected = {
                    thread_worker
                    for worker in fault.workers
                    for thread_worker in self._process_workers(worker)
                }
                super()._inject_fault(replace(fault, workers=tuple(sorted(affected))))
            case WorkerHang() if fault.worker in self._workers:
                for thread_worker in self._process_workers(fault.worker):
                    super()._inject_fault(replace(fault, worker=thread_worker))
            case LinkCut(peer=peer) if peer == SERVERS and fault.worker in self._workers:
                super()._inject_fault(fault)
                process = self.threads[fault.worker].process
                self.engine.schedule(self.engine.now_s + UNREACHABLE_S, self._check_reachability, process)
            case _:
                super()._inject_fault(fault)

    def _check_reachability(self, process: PsWorkerProcess) -> None:
        """Report that a process receives nothing from the servers, and later that it does again."""
        now_s, number = self.engine.now_s, process.process
        if not self.is_running(number):
            return
        until_s = max(self.lines.reachable_s(number, SERVERS), self._hung_until_s.get(number, now_s))
        if until_s > now_s:
            self.engine.schedule(until_s, self._check_reachability, process)
        if not self.is_hung(number) and self._misses_servers.get(number, False) != (until_s > now_s):
            self._misses_servers[number] = until_s > now_s
            self._report_servers(number)

    def _report_servers(self, number: int) -> None:
        """Report the state of the servers for a process; repeated until the coordinator receives it."""
        if self.coordinator.is_down or not self.is_present(number) or self._is_cut_off(number):
            if self.is_running(number):
                self.engine.schedule(self.engine.now_s + self.setting.tick_s, self._report_servers, number)
            return
        now_s, node = self.engine.now_s - self.clock_lag_s, f"client-{number}"
        for server in range(self.ps_setting.servers):
            if self._misses_servers[number]:
                self.handle_event(
                    ServerUnreachable(now_s=now_s, node=node, server=server, cause="nothing comes from it")
                )
            else:
                self.handle_event(ServerReachable(now_s=now_s, node=node, server=server))

    def _restart_coordinator(self, _: Any) -> None:
        super()._restart_coordinator(_)
        for number in self._misses_servers:
            self._report_servers(number)

    def kill_worker(self, worker: int, after_s: float, cause: str) -> None:
        """See `SimulatedCluster.kill_worker`; the other threads of its process end, too."""
        for thread_worker in self._process_workers(worker):
            super().kill_worker(thread_worker, after_s, cause)

    def end_process(self, process: PsWorkerProcess) -> None:
        """End the process of a thread that received an AbortJob or a RejectPeer."""
        self.kill_worker(process.process, self.setting.detect_s, "its process has ended")

    def on_thread_ended(self, process: PsWorkerProcess) -> None:
        """Note that a thread has ended; the servers learn of it once all threads of the process have."""
        if not any(thread.is_alive for thread in process.threads):
            at_s = self.engine.now_s + self.setting.detect_s
            self.engine.schedule(at_s, lambda _: self.servers.leave(process.process))
        self._ended.update(thread.worker for thread in process.threads if not thread.is_alive)

    def _lose_worker(self, loss: tuple[int, str]) -> None:
        worker = loss[0]
        self._has_lost = True
        self._ended.add(worker)
        super()._lose_worker(loss)
        process = self.threads[worker].process
        if not self.coordinator.is_down and all(
            thread.worker in self.coordinator.lost for thread in process.threads
        ):
            self.servers.leave(process.process)

    # Events and actions ----------------------------------------------------------------------------------

    def handle_event(self, event: Event) -> bool:
        """See `SimulatedCluster.handle_event`."""
        if isinstance(event, Left | Lost | Finished):
            self._clocks.pop(event.worker, None)
        if isinstance(event, Left) and not self.is_job_complete:
            self._has_lost = True
        if isinstance(event, StepFinished) and event.clock is not None:
            self._used[event.worker, event.step] = event.blocks
        return super().handle_event(event)

    def _apply_actions(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StepPermit():
                    self._note_clock(action)
                case AssignBlocks():
                    self._blocks |= {block.id: block for block in action.blocks}
                case _:
                    pass
        for action in actions:
            match action:
                case StepPermit() | AssignBlocks():
                    if isinstance(action, StepPermit):
                        self._check_permit(action)
                    self._send(action.worker, (action,))
                case RejectPeer():
                    worker = int(action.peer.removeprefix("worker-"))
                    self._has_lost = True
                    self.coordinator.joined.discard(worker)
                    self._clocks.pop(worker, None)
                    self._send(worker, (action,))
                case PeerList() | JobComplete() | AbortJob():
                    if isinstance(action, JobComplete):
                        self.complete_s = self.engine.now_s
                    self.stopped = action if isinstance(action, AbortJob) else self.stopped
                    for worker in sorted(self.coordinator.joined):
                        self._send(worker, (action,))
                case CloseServers():
                    pass
                case _:
                    self.fail_invariant(f"expected an action for workers on servers, got {action}")

    # Invariants ------------------------------------------------------------------------------------------

    def _note_clock(self, permit: StepPermit) -> None:
        before = self._clocks.get(permit.worker, 0)
        if permit.clock < before:
            self.fail_invariant(
                f"worker {permit.worker}: its clock goes back from {before} to {permit.clock}"
            )
        self._clocks[permit.worker] = permit.clock

    def _check_permit(self, permit: StepPermit) -> None:
        bounds, worker = self.ps_setting.bounds, permit.worker
        is_warming = len(self._used) < self.ps_setting.warm_start
        if (
            is_warming
            and permit.may_start
            and not self.ps_options.assigns_samples
            and worker != min(self._clocks)
        ):
            self.fail_invariant(f"worker {worker} may start while another takes its first steps alone")
        if not permit.may_start:
            is_expected = permit.reason in ("it has no samples", "not all workers have joined yet")
            if bounds is None and not is_expected and not is_warming:
                self.fail_invariant(f"worker {worker} has to wait though there is no bound: {permit.reason}")
            return
        if bounds is None or permit.staleness_bound is None:
            if (bounds is None) != (permit.staleness_bound is None):
                self.fail_invariant(
                    f"worker {worker} may start with an unexpected bound of {permit.staleness_bound}"
                )
            return
        least = min(self._clocks.values())
        if (
            permit.clock - least > permit.staleness_bound
            or permit.clock - permit.version_min > permit.staleness_bound
        ):
            self.fail_invariant(
                f"worker {worker} may start at clock {permit.clock} with version {permit.version_min} and a "
                f"bound of {permit.staleness_bound}, and the slowest is at {least}"
            )
        if not bounds[0] <= permit.staleness_bound <= bounds[1]:
            self.fail_invariant(
                f"worker {worker} has a bound of {permit.staleness_bound}, expected one in {bounds}"
            )
        self._check_change(permit.staleness_bound, least)

    def _check_change(self, bound: int, version: int) -> None:
        before = bound if self.last_bound is None else self.last_bound
        versions = max(1, version - self._version_seen)
        if abs(bound - before) > self.ps_setting.bound_step * versions:
            self.fail_invariant(f"the bound changes from {before} to {bound} within {versions} versions")
        self.last_bound, self._version_seen = bound, max(version, self._version_seen)

    def complete_clock(self, steps: Counter[int]) -> float:
        """Return the first clock with a step of a living worker not among these, or still to come."""
        return min(
            (
                clocks[steps[worker]] if steps[worker] < len(clocks) else self._clocks.get(worker, math.inf)
                for worker, clocks in self.clocks_by_worker.items()
                if worker not in self._ended
            ),
            default=math.inf,
        )

    def check_step(self, step: PushedStep) -> None:
        """Record a step, and check that its clock is not over."""
        self.clocks_by_worker[step.worker].append(step.clock)
        is_over = self.ps_options.is_versioned and self.servers.version > step.clock
        if is_over and step.worker not in self._ended:
            self.fail_invariant(f"worker {step.worker} takes a step at clock {step.clock}, which is over")

    def check_read(
        self, worker: PsWorkerThread, permit: StepPermit, row: PulledRow, visible: Sequence[int]
    ) -> None:
        """Check that what a worker reads contains the required steps, and its own steps once."""
        reader = f"worker {worker.worker} at clock {permit.clock}"
        if self.ps_options.push_every == 1 and any(count != worker.steps_finished for count in visible):
            self.fail_invariant(
                f"{reader} has taken {worker.steps_finished} steps and sees {list(visible)} of its own"
            )
        if permit.staleness_bound is None:
            return
        required = max(0, permit.clock - permit.staleness_bound)
        complete = min(piece.complete_clock for piece in row.pieces)
        if complete < required:
            self.fail_invariant(
                f"{reader} reads values that lack steps of clock {complete}; it needs version {required}"
            )
        if permit.staleness_bound == 0 and self.ps_options.is_versioned:
            for other, clocks in self.clocks_by_worker.items():
                if any(piece.steps[other] > bisect_left(clocks, permit.clock) for piece in row.pieces):
                    self.fail_invariant(f"{reader} sees steps of worker {other} that are not before it")

    def _check_end(self) -> None:
        """Check the invariants that hold at the end of a run."""
        samples = self.setting.samples
        uses: Counter[tuple[int, int]] = Counter()
        for blocks in self._used.values():
            for block in (self._blocks[number] for number in blocks):
                for start, stop in block.ranges:
                    uses.update((block.epoch, position) for position in range(start, stop))
        if samples is not None:
            for (epoch, position), count in uses.items():
                if count > 1:
                    self.fail_invariant(f"position {position} of epoch {epoch} was used {count} times")
        if not self.is_job_complete:
            return
        expected = 0 if samples is None or self._has_lost else (samples.epochs or 0) * samples.epoch_samples
        if len(uses) < expected:
            self.fail_invariant(f"the job ended with {len(uses)} of {expected} samples used")
        for worker, clocks in self.clocks_by_worker.items():
            for steps in self.servers.steps:
                if not self._has_lost and steps[worker] != len(clocks):
                    self.fail_invariant(
                        f"worker {worker} has taken {len(clocks)} steps, and a server has {steps[worker]}"
                    )
