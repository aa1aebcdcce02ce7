"""A simulated process of workers on a parameter server: a model of the runtime in virtual time.

It uses the same `CacheDirectory` as the runtime. Nothing here decides which worker may start a step, or which
version is fresh enough. See `offbeat.runtime.staleness.synchronizer` and
`offbeat.runtime.staleness.shared_model` for the originals of this model.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from offbeat.events import (
    AbortJob,
    Action,
    Event,
    Finished,
    JobComplete,
    Left,
    PeerList,
    RejectPeer,
    SamplesRequested,
    StepFinished,
    StepPermit,
)
from offbeat.policies.staleness.caches import CacheDirectory, PsOptions, push_time
from offbeat.policies.staleness.clock_protocol import ClockProtocol
from offbeat.simulator.core.faults import SERVERS
from offbeat.simulator.core.times import ComputeTimeSource
from offbeat.simulator.staleness.servers import PulledRow, PushedStep, SimulatedPush, SimulatedServers
from offbeat.simulator.staleness.thread_cache import ThreadCache
from offbeat.simulator.training.interface import Simulation
from offbeat.simulator.training.sample_loop import LoopActivity, SimulatedLoop
from offbeat.simulator.training.worker import (
    APPLYING,
    COMPUTING,
    ENDED,
    FINISHED,
    JOINING,
    LEAVING,
    REQUESTING,
    WAITING,
    SimulatedWorker,
)

BEGINNING, PULLING, PUSHING, REPORTING = "beginning", "pulling", "pushing", "reporting"


class PsSimulation(Simulation, Protocol):
    """What workers require of a simulated run on a parameter server.

    Attributes:
        servers: the parameter servers.
        ps_options: how the strategy uses the parameter server.
        epoch: the latest one in which a worker has started a step.
    """

    servers: SimulatedServers
    ps_options: PsOptions
    epoch: int

    def loss(self, clock: int) -> float:
        """Return the loss that all workers report at a clock."""

    def check_step(self, step: PushedStep) -> None:
        """Record a step, and check that its clock is not over."""

    def check_read(
        self, worker: PsWorkerThread, permit: StepPermit, row: PulledRow, visible: Sequence[int]
    ) -> None:
        """Check that what a worker reads contains the required steps, and its own steps once."""

    def end_process(self, process: PsWorkerProcess) -> None:
        """End the process of a thread whose job was stopped."""

    def on_thread_ended(self, process: PsWorkerProcess) -> None:
        """Note that a thread has ended."""


class PsWorkerProcess:
    """State shared by the worker threads of a process: its cache directory, its row, its pushes.

    Args:
        cluster: the cluster.
        directory: the cache directory of the process.

    Attributes:
        process: id of the process: that of its first worker.
        threads: its workers.
        pulls: pulls so far.
    """

    def __init__(self, cluster: PsSimulation, number: int, directory: CacheDirectory) -> None:
        self.cluster, self.process, self.directory = cluster, number, directory
        self.threads: list[PsWorkerThread] = []
        self.row: PulledRow | None = None
        self.pulls = 0
        self.first_clock: int | None = None  # None until it has begun
        self._is_beginning = self._is_pulling = False
        self._unpushed_steps: dict[int, list[PushedStep]] = {}  # by clock
        self._under_way: dict[int, SimulatedPush] = {}  # by time
        self._waiting_readers: deque[tuple[PsWorkerThread, int, bool]] = deque()  # thread, version, fresh

    def join(self, is_new: bool) -> None:
        """Join the servers; every thread that is beginning continues when that is done."""
        if self._is_beginning:
            return
        self._is_beginning = True
        cluster = self.cluster
        first = cluster.servers.join(self.process)
        if not is_new or not cluster.ps_options.is_versioned:
            self.directory.start_at(first, push_time(-1))
            takes_s = cluster.network.transfer_s(cluster.setting.size_bytes, self.process, SERVERS)
            cluster.engine.schedule(cluster.engine.now_s + takes_s, self._begun, first)
            return
        self.directory.start_at(first + 1)
        cluster.servers.push(
            SimulatedPush(
                self.process, push_time(first), (), lambda _: self._dispatch(self._begun, first + 1)
            )
        )

    def _begun(self, first_clock: int) -> None:
        self.first_clock = first_clock
        for thread in self.threads:
            thread.on_begun()

    def add_gradients(
        self, step: PushedStep, pushed: Sequence[PushedStep]
    ) -> tuple[int, SimulatedPush | None]:
        """Accept a thread's gradients of these steps; return their time, and the push if it was sent."""
        time = self.directory.add_gradient(step.worker, step.clock)
        if self.cluster.ps_options.is_versioned:
            self._unpushed_steps.setdefault(step.clock, []).extend(pushed)
            return time, None
        return time, self._push(time, pushed)

    def advance_clock(self, worker: int, clock: int) -> None:
        """Note that a thread adds nothing to clocks before this one any more."""
        self._push_clocks(self.directory.finish_clocks(worker, clock))

    def remove_thread(self, worker: int) -> None:
        """Note that a thread adds nothing any more."""
        self._push_clocks(self.directory.remove_thread(worker))
        self._settle()

    def _push_clocks(self, clocks: range) -> None:
        for clock in clocks:
            self._push(push_time(clock), self._unpushed_steps.pop(clock, []))
        self._serve_readers()

    def _push(self, time: int, steps: Sequence[PushedStep]) -> SimulatedPush:
        push = self._under_way[time] = SimulatedPush(
            self.process, time, tuple(steps), lambda push: self._dispatch(self._pushed, push)
        )
        self.cluster.servers.push(push)
        return push

    def _pushed(self, push: SimulatedPush) -> None:
        del self._under_way[push.time]
        self._serve_readers()
        for thread in self.threads:
            thread.on_pushed()
        self._settle()

    def is_done(self, push: SimulatedPush | None) -> bool:
        """Whether a push is known to be applied."""
        return push is None or push.time not in self._under_way

    def _settle(self) -> None:
        """Leave the servers once all threads have left and all pushes are applied."""
        if self.directory.all_threads_left and not self._under_way:
            self.cluster.servers.leave(self.process)
            for thread in self.threads:
                thread.leave_if_done()

    @property
    def is_settled(self) -> bool:
        """Whether all threads have left, and all their pushes are applied."""
        return self.directory.all_threads_left and not self._under_way

    def pull(self, reader: PsWorkerThread, version: int, *, fresh: bool) -> None:
        """Pull a row of this version or a later one for a thread; one pull at a time."""
        self._waiting_readers.append((reader, version, fresh))
        self._serve_readers()

    def fetch(self, on_row: Callable[[PulledRow], None]) -> None:
        """Pull any version in the background."""
        self.pulls += 1
        self.cluster.servers.pull(self.process, 0, lambda row: self._dispatch(on_row, row))

    def _serve_readers(self) -> None:
        """Serve waiting threads, as far as the servers have applied this process's pushes that they need."""
        while self._waiting_readers and not self._is_pulling:
            reader, version, fresh = self._waiting_readers[0]
            row = self.row
            if not fresh and row is not None and row.version >= version:
                self._waiting_readers.popleft()
                reader.on_row(row)
                continue
            if self.cluster.ps_options.is_versioned and not self._has_applied(version):
                return
            self._is_pulling = True
            self.pulls += 1
            reader.pulls += 1
            self.cluster.servers.pull(self.process, version, lambda row: self._dispatch(self._pulled, row))

    def _has_applied(self, version: int) -> bool:
        return self.directory.has_pushed(version) and push_time(version - 1) not in self._under_way

    def _pulled(self, row: PulledRow) -> None:
        self._is_pulling = False
        self.row = row
        self.directory.on_pulled(row.version)
        reader, _, _ = self._waiting_readers.popleft()
        reader.on_row(row)
        self._serve_readers()

    def _dispatch(self, call: Callable[[Any], None], argument: Any) -> None:
        """Dispatch a message for this process, which hangs together with its threads."""
        self.threads[0].dispatch(call, argument)


@dataclass(slots=True, eq=False)
class _Step:
    """The current step of a thread.

    Attributes:
        is_permitted: the coordinator has permitted it, and it has not ended.
        clock: its clock.
        read_version: the version of the parameters that it uses.
        computed_s: time that it has computed.
    """

    is_permitted: bool = False
    clock: int = 0
    read_version: int = 0
    computed_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Pushes:
    """The steps of a thread on their way to the servers.

    Attributes:
        unpushed: its steps that are in no push.
        last: its latest push.
        awaited: the push that has to be applied before it continues.
    """

    unpushed: list[PushedStep] = field(default_factory=list)
    last: SimulatedPush | None = None
    awaited: SimulatedPush | None = None


class PsWorkerThread(SimulatedWorker):
    """One worker thread of a process.

    Attributes:
        process: its process.
        clock_protocol: its `protocol`.
        steps_finished: steps that it has finished.
        spent_s: time spent, by activity.
        reads_by_staleness: reads, by the age of the version in clocks.
        reads_by_source: reads, by source.
    """

    cluster: PsSimulation

    def __init__(
        self,
        cluster: PsSimulation,
        worker: int,
        stopwatch: ComputeTimeSource,
        process: PsWorkerProcess,
        *,
        is_new: bool,
    ) -> None:
        self._doing, self._since_s = JOINING, cluster.engine.now_s
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        super().__init__(cluster, worker, stopwatch, is_new=is_new)
        self.process, self._is_newcomer = process, is_new
        self.place = f"simulated, process {process.process}"
        process.threads.append(self)
        self.protocol = self.clock_protocol = ClockProtocol()
        samples = cluster.setting.samples
        self.loop = (
            None
            if samples is None
            else SimulatedLoop(samples, self.protocol.block_queue, self, self._send_request)
        )
        self.steps_finished = 0
        self.reads_by_staleness: Counter[int] = Counter()
        self.reads_by_source: Counter[str] = Counter()
        self.pulls = 0
        self._cache = ThreadCache(process.directory, worker, cluster.fail_invariant)
        self._pushes = _Pushes()
        self._step = _Step()
        self._has_begun = False
        self._inbox: deque[tuple[Callable[[Any], None], Any]] = deque()

    # Interface of the loop -------------------------------------------------------------------------------

    @property
    def activity(self) -> str:
        """The current activity."""
        return self._doing

    @activity.setter
    def activity(self, word: str) -> None:
        """Start another activity."""
        now_s = self.cluster.engine.now_s
        self.spent_s[self._doing] += now_s - self._since_s
        self._doing, self._since_s = word, now_s

    @property
    def round(self) -> int:
        """Steps that it has finished, for its `SimulatedLoop`."""
        return self.steps_finished

    @property
    def is_member(self) -> bool:
        """Whether its gradients count, for its `SimulatedLoop`: always."""
        return True

    # Input -----------------------------------------------------------------------------------------------

    def dispatch(self, call: Callable[[Any], None], argument: Any) -> None:
        """Dispatch a message of the coordinator, of the servers or of its own computation."""
        if self.is_hung:
            self._inbox.append((call, argument))
        else:
            call(argument)

    def on_actions(self, actions: tuple[Action, ...]) -> None:
        """Process actions of the coordinator."""
        self.dispatch(self._apply_actions, actions)

    def _apply_actions(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if self.activity == ENDED:
                return
            self._apply_action(action)
        self._proceed()

    def _apply_action(self, action: Action) -> None:
        match action:
            case PeerList():
                if self.activity == JOINING:
                    self.activity = BEGINNING
                    self.process.join(self._is_newcomer)
                    self.on_begun()
            case JobComplete():
                self._is_job_complete = True
                self.leave_if_done()
            case AbortJob() | RejectPeer():
                self.cluster.end_process(self.process)
            case _:
                self.answer(action)
                if (
                    isinstance(action, StepPermit)
                    and self._has_begun
                    and not self._step.is_permitted
                    and not action.may_start
                ):
                    self.process.advance_clock(self.worker, action.clock)

    def hang(self) -> None:
        """Stop all activity."""
        self.is_hung = True
        self._computation += 1

    def resume(self, *, is_state_first: bool) -> None:
        """Resume, and process queued input."""
        self.is_hung = False
        if self.activity in (COMPUTING, APPLYING):
            self._compute_for(max(0.0, self._busy_until_s - self.cluster.hung_at_s[self.worker]))
        while self._inbox and not self.is_hung:
            call, argument = self._inbox.popleft()
            call(argument)

    def end(self) -> None:
        """End the worker."""
        if self.activity != ENDED:
            self._computation += 1
            self.activity = ENDED
            self.cluster.on_thread_ended(self.process)
            self.cluster.stop_if_empty()

    # Beginning and ending --------------------------------------------------------------------------------

    def on_begun(self) -> None:
        """Begin to train: the process has joined the servers."""
        first_clock = self.process.first_clock
        if self.activity != BEGINNING or first_clock is None:
            return
        self._has_begun = True
        if self.loop is not None:
            self.loop.enter_epoch(self.cluster.epoch)
        self._report(None, first_clock, ())

    def _finish(self, epoch: int) -> None:
        """End the thread's training: report it, push what is left, and leave if the job is complete."""
        cluster = self.cluster
        self.activity = FINISHED
        finished = Finished(
            now_s=cluster.arrival_s(self.worker), worker=self.worker, epoch=epoch, step=self.steps_finished
        )
        cluster.send_event(self.worker, finished)
        if self._pushes.unpushed:
            self._push()
        self.process.remove_thread(self.worker)
        self.leave_if_done()

    def leave_if_done(self) -> None:
        """Leave if all workers have finished and all pushes of the process are applied."""
        if self.activity == FINISHED and self._is_job_complete and self.process.is_settled:
            self._send_left()

    def _send_left(self) -> None:
        cluster = self.cluster
        self.activity = LEAVING
        self.has_left = True
        cluster.send_event(
            self.worker,
            Left(now_s=cluster.arrival_s(self.worker), worker=self.worker, step=self.steps_finished),
        )

    def _send_request(self, request: SamplesRequested) -> None:
        self._send(request)

    def _send(self, event: Event) -> None:
        self.cluster.send_event(self.worker, replace(event, now_s=self.cluster.arrival_s(self.worker)))

    # A step ----------------------------------------------------------------------------------------------

    def _proceed(self) -> None:
        """Continue if the message that it waits for is there."""
        permit = self.clock_protocol.permit
        if self.activity == REPORTING and permit is not None:
            self.process.advance_clock(self.worker, permit.clock)
            if self.is_leaving:
                self.process.remove_thread(self.worker)
                self._send_left()
            else:
                self._compute()
        elif self.activity == REQUESTING:
            self._compute()
        elif self.activity == WAITING and permit is not None and permit.may_start:
            self._start(permit)

    def _compute(self) -> None:
        """Continue the loop: another batch, the end of a step, or the end."""
        if self.loop is None:
            if self.steps_finished >= self.cluster.setting.steps_max:
                self._finish((self.steps_finished - 1) // self.cluster.setting.epoch_steps)
            else:
                self._take_batch()
            return
        match self.loop.next_activity():
            case LoopActivity.WAIT:
                self.activity = REQUESTING
            case LoopActivity.OVER:
                self._finish(self.loop.epoch - 1)
            case LoopActivity.ROUND:
                self._end_step()
            case LoopActivity.BATCH:
                self._take_batch()

    def _take_batch(self) -> None:
        if self._step.is_permitted:
            self._begin_to_compute()
        else:
            self.activity = WAITING
            self._proceed()

    def _start(self, permit: StepPermit) -> None:
        """Read parameters that are fresh enough."""
        cluster, ps_options, directory = self.cluster, self.cluster.ps_options, self.process.directory
        self._step.clock = permit.clock
        self._step.is_permitted = True
        self.activity = PULLING
        self.process.advance_clock(self.worker, permit.clock)
        if self.loop is not None:
            cluster.epoch = max(cluster.epoch, self.loop.epoch)
        if ps_options.fetch_every is not None:
            self._read_fetched(ps_options.fetch_every)
            return
        source = directory.read_source(self.worker, permit.version_min) if ps_options.is_bounded else "server"
        self.reads_by_source[source] += 1
        if source == "thread":
            self._begin_to_compute()
        elif source == "process":
            assert self.process.row is not None
            self.on_row(self.process.row)
        else:
            self.process.pull(self, permit.version_min, fresh=not ps_options.is_bounded)

    def on_row(self, row: PulledRow) -> None:
        """Install a row that is fresh enough, and compute."""
        if self.activity != ENDED:
            self._cache.install(row)
            self._begin_to_compute()

    def _read_fetched(self, fetch_every: int) -> None:
        """Install what was fetched in the background, and fetch again when it is due."""
        if self._cache.row is None:
            self.reads_by_source["server"] += 1
            self.process.pull(self, 0, fresh=True)
            return
        if self._cache.fetched is not None:
            self._cache.install(self._cache.fetched)
            self._cache.fetched = None
        if not self._cache.is_fetching and self.steps_finished % fetch_every == 0:
            self._cache.is_fetching = True
            self.reads_by_source["server"] += 1
            self.pulls += 1
            self.process.fetch(self._on_fetched)
        self._begin_to_compute()

    def _on_fetched(self, row: PulledRow) -> None:
        self._cache.fetched, self._cache.is_fetching = row, False

    def _begin_to_compute(self) -> None:
        cluster, permit = self.cluster, self.clock_protocol.permit
        assert permit is not None
        assert self._cache.row is not None
        if self.activity == PULLING:
            cluster.check_read(self, permit, self._cache.row, self._cache.own_steps)
            self._step.read_version = max(permit.version_min, self.process.directory.version(self.worker))
            if cluster.ps_options.is_versioned:
                self.reads_by_staleness[permit.clock - min(permit.clock, self._step.read_version)] += 1
        self.activity = COMPUTING
        epoch, step = divmod(self.steps_finished, cluster.setting.epoch_steps)
        if self.loop is not None:
            epoch, step = self.loop.epoch, int(self.loop.epoch_share * cluster.setting.epoch_steps)
        takes_s = self.stopwatch.next_s()
        takes_s *= self.stopwatch.slowdown(epoch, step, cluster.setting.epoch_steps, self.steps_finished)
        self._step.computed_s += takes_s
        self._compute_for(takes_s)

    def _end_busy(self, number: int) -> None:
        if number != self._computation:
            return
        if self.activity == APPLYING:
            self._apply()
        elif self.loop is None or self.loop.is_round_complete():
            self._end_step()
        else:
            self._compute()

    def _end_step(self) -> None:
        self.activity = APPLYING
        self._compute_for(self.cluster.setting.apply_s)

    def _apply(self) -> None:
        """Apply its own step locally, and hand over its gradients."""
        cluster, ps_options = self.cluster, self.cluster.ps_options
        step = PushedStep(self.worker, self.steps_finished, self._step.clock)
        cluster.check_step(step)
        self.steps_finished += 1
        if ps_options.applies_local_steps:
            self._cache.apply_own_step()
        self._pushes.unpushed.append(step)
        self.activity = PUSHING
        if len(self._pushes.unpushed) >= ps_options.push_every:
            self._push()
        self.on_pushed()

    def _push(self) -> None:
        steps, self._pushes.unpushed = self._pushes.unpushed, []
        time, push = self.process.add_gradients(steps[-1], steps)
        if self.cluster.ps_options.applies_local_steps:
            self._cache.log_update(time, steps)
        self._pushes.awaited = push if self.cluster.ps_options.is_bounded else self._pushes.last
        self._pushes.last = push

    def on_pushed(self) -> None:
        """Continue if the awaited push is applied."""
        if self.activity != PUSHING or not self.process.is_done(self._pushes.awaited):
            return
        self._pushes.awaited = None
        blocks: tuple[int, ...] = () if self.loop is None else self.loop.contribute()
        self._step.is_permitted = False
        self.active_s = self.cluster.progress_s = self.cluster.engine.now_s
        self._report(self._step.clock, self._step.read_version, blocks)
        if self.loop is not None:
            self.loop.end_round()
        self._step.computed_s = 0.0

    def _report(self, clock: int | None, version: int, blocks: tuple[int, ...]) -> None:
        """Report a finished step to the coordinator, whose StepPermit names the next clock."""
        loop = self.loop
        self.clock_protocol.permit = None
        self.activity = REPORTING
        samples = 1 if loop is None else sum(block.samples for block in loop.blocks)
        self._send(
            StepFinished(
                now_s=0.0,
                worker=self.worker,
                clock=clock,
                parameter_version=version,
                epoch=self.steps_finished // self.cluster.setting.epoch_steps if loop is None else loop.epoch,
                step=self.steps_finished,
                compute_s=self._step.computed_s,
                samples=samples,
                loss=None if clock is None else self.cluster.loss(clock),
                blocks=blocks,
            )
        )
