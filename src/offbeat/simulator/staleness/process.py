"""A simulated process of workers on a parameter server: a model of the runtime in virtual time.

It uses the same `CacheDirectory` as the runtime. Nothing here decides which worker may start a step, or which
version is fresh enough. See `offbeat.runtime.server_synchronizer` and `offbeat.runtime.served_model` for the
originals of this model.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offbeat.events import (
    Action,
    Clocked,
    Deal,
    Dismiss,
    Event,
    Finished,
    Grant,
    Left,
    Refuse,
    Start,
    Stop,
    Wants,
)
from offbeat.policies.staleness.caches import CacheDirectory, time_of
from offbeat.simulator.core.times import Stopwatch
from offbeat.simulator.staleness.servers import Push, Row, Step
from offbeat.simulator.training.sample_loop import Loop, Next
from offbeat.simulator.training.worker import (
    APPLYING,
    COMPUTING,
    ENDED,
    FINISHED,
    LEAVING,
    MEETING,
    WAITING,
    WANTING,
    SimulatedWorker,
)

if TYPE_CHECKING:
    from offbeat.simulator.staleness.cluster import BoundedCluster

BEGINNING, PULLING, PUSHING, REPORTING = "beginning", "pulling", "pushing", "reporting"


class ServedProcess:
    """State shared by the worker threads of a process: its cache directory, its row, its pushes.

    Args:
        cluster: the cluster.
        directory: the cache directory of the process.

    Attributes:
        number: id of the process: that of its first worker.
        threads: its workers.
        pulls: pulls so far.
    """

    def __init__(self, cluster: BoundedCluster, number: int, directory: CacheDirectory) -> None:
        self.cluster, self.number, self.directory = cluster, number, directory
        self.threads: list[ServedWorker] = []
        self.row: Row | None = None
        self.pulls = 0
        self.first_clock: int | None = None  # None until it has begun
        self._is_beginning = self._is_pulling = False
        self._unpushed_steps: dict[int, list[Step]] = {}  # by clock
        self._under_way: dict[int, Push] = {}  # by time
        self._waiting_readers: deque[tuple[ServedWorker, int, bool]] = deque()  # thread, version, fresh

    def begin(self, is_new: bool) -> None:
        """Join the servers; every thread that is beginning continues when that is done."""
        if self._is_beginning:
            return
        self._is_beginning = True
        cluster = self.cluster
        first = cluster.servers.enlist(self.number)
        if not is_new or not cluster.terms.is_versioned:
            self.directory.begin(first, time_of(-1))
            takes_s = cluster.network.transfer_s(cluster.size_bytes)
            cluster.engine.at(cluster.engine.now_s + takes_s, self._begun, first)
            return
        self.directory.begin(first + 1)
        cluster.servers.push(
            Push(self.number, time_of(first), (), lambda _: self._dispatch(self._begun, first + 1))
        )

    def _begun(self, first_clock: int) -> None:
        self.first_clock = first_clock
        for thread in self.threads:
            thread.begun()

    def give(self, step: Step, pushed: Sequence[Step]) -> tuple[int, Push | None]:
        """Accept a thread's gradients of these steps; return their time, and the push if it was sent."""
        time = self.directory.give(step.worker, step.clock)
        if self.cluster.terms.is_versioned:
            self._unpushed_steps.setdefault(step.clock, []).extend(pushed)
            return time, None
        return time, self._push(time, pushed)

    def passed(self, worker: int, clock: int) -> None:
        """Note that a thread adds nothing to clocks before this one any more."""
        self._push_clocks(self.directory.passed(worker, clock))

    def leave(self, worker: int) -> None:
        """Note that a thread adds nothing any more."""
        self._push_clocks(self.directory.leave(worker))
        self._settle()

    def _push_clocks(self, clocks: range) -> None:
        for clock in clocks:
            self._push(time_of(clock), self._unpushed_steps.pop(clock, []))
        self._serve_readers()

    def _push(self, time: int, steps: Sequence[Step]) -> Push:
        push = self._under_way[time] = Push(
            self.number, time, tuple(steps), lambda push: self._dispatch(self._pushed, push)
        )
        self.cluster.servers.push(push)
        return push

    def _pushed(self, push: Push) -> None:
        del self._under_way[push.time]
        self._serve_readers()
        for thread in self.threads:
            thread.pushed()
        self._settle()

    def is_done(self, push: Push | None) -> bool:
        """Whether a push is known to be applied."""
        return push is None or push.time not in self._under_way

    def _settle(self) -> None:
        """Leave the servers once all threads have left and all pushes are applied."""
        if self.directory.is_empty and not self._under_way:
            self.cluster.servers.withdraw(self.number)
            for thread in self.threads:
                thread.settle()

    @property
    def is_settled(self) -> bool:
        """Whether all threads have left, and all their pushes are applied."""
        return self.directory.is_empty and not self._under_way

    def pull(self, reader: ServedWorker, version: int, *, fresh: bool) -> None:
        """Pull a row of this version or a later one for a thread; one pull at a time."""
        self._waiting_readers.append((reader, version, fresh))
        self._serve_readers()

    def fetch(self, then: Callable[[Row], None]) -> None:
        """Pull any version in the background."""
        self.pulls += 1
        self.cluster.servers.pull(self.number, 0, lambda row: self._dispatch(then, row))

    def _serve_readers(self) -> None:
        """Serve waiting threads, as far as the servers have applied this process's pushes that they need."""
        while self._waiting_readers and not self._is_pulling:
            reader, version, fresh = self._waiting_readers[0]
            row = self.row
            if not fresh and row is not None and row.version >= version:
                self._waiting_readers.popleft()
                reader.read(row)
                continue
            if self.cluster.terms.is_versioned and not self._has_applied(version):
                return
            self._is_pulling = True
            self.pulls += 1
            reader.pulls += 1
            self.cluster.servers.pull(self.number, version, lambda row: self._dispatch(self._pulled, row))

    def _has_applied(self, version: int) -> bool:
        return self.directory.has_pushed(version) and time_of(version - 1) not in self._under_way

    def _pulled(self, row: Row) -> None:
        self._is_pulling = False
        self.row = row
        self.directory.pulled(row.version)
        reader, _, _ = self._waiting_readers.popleft()
        reader.read(row)
        self._serve_readers()

    def _dispatch(self, call: Callable[[Any], None], argument: Any) -> None:
        """Dispatch a message for this process, which hangs together with its threads."""
        self.threads[0].get(call, argument)


class ServedWorker(SimulatedWorker):
    """One worker thread of a process.

    Attributes:
        process: its process.
        grant: the last Grant since the last event that one answers.
        number: steps that it has finished.
        spent_s: time spent, by activity.
        staleness: reads, by the age of the version in clocks.
        reads: reads, by source.
    """

    cluster: BoundedCluster

    def __init__(
        self,
        cluster: BoundedCluster,
        worker: int,
        stopwatch: Stopwatch,
        process: ServedProcess,
        *,
        is_new: bool,
    ) -> None:
        self._doing, self._since_s = MEETING, cluster.engine.now_s
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        super().__init__(cluster, worker, stopwatch, is_new=is_new)
        self.process, self._is_newcomer = process, is_new
        self.place = f"simulated, process {process.number}"
        process.threads.append(self)
        samples = cluster.setting.samples
        self.loop = None if samples is None else Loop(samples, self, self._send_request)
        self.grant: Grant | None = None
        self.number = 0
        self.staleness: Counter[int] = Counter()
        self.reads: Counter[str] = Counter()
        self.pulls = 0
        self._row: Row | None = None  # the row in the thread cache
        self._logged: list[tuple[int, ...]] = []  # numbers of the steps in each push of the log
        self._visible: list[int] = []  # its own steps in each piece of its parameters
        self._unpushed: list[Step] = []
        self._fetched: Row | None = None
        self._is_fetching = False
        self._awaited: Push | None = None
        self._last_push: Push | None = None
        self._has_step = self._has_begun = False
        self._clock = 0
        self._read_version = 0
        self._computed_s = 0.0
        self._inbox: deque[tuple[Callable[[Any], None], Any]] = deque()

    # Interface of the loop -------------------------------------------------------------------------------

    @property
    def doing(self) -> str:
        """The current activity."""
        return self._doing

    @doing.setter
    def doing(self, word: str) -> None:
        """Start another activity."""
        now_s = self.cluster.engine.now_s
        self.spent_s[self._doing] += now_s - self._since_s
        self._doing, self._since_s = word, now_s

    @property
    def round(self) -> int:
        """Steps that it has finished, for its `Loop`."""
        return self.number

    @property
    def is_member(self) -> bool:
        """Whether its gradients count, for its `Loop`: always."""
        return True

    # Input -----------------------------------------------------------------------------------------------

    def get(self, call: Callable[[Any], None], argument: Any) -> None:
        """Dispatch a message of the coordinator, of the servers or of its own computation."""
        if self.is_hung:
            self._inbox.append((call, argument))
        else:
            call(argument)

    def hear(self, actions: tuple[Action, ...]) -> None:
        """Process actions of the coordinator."""
        self.get(self._apply_actions, actions)

    def _apply_actions(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if self.doing == ENDED:
                return
            self._apply_action(action)
        self._proceed()

    def _apply_action(self, action: Action) -> None:
        match action:
            case Start() if self.doing == MEETING:
                self.doing = BEGINNING
                self.process.begin(self._is_newcomer)
                self.begun()
            case Grant():
                self.grant = action
                if self._has_begun and not self._has_step and not action.may_start:
                    self.process.passed(self.worker, action.clock)
            case Deal():
                assert self.loop is not None
                self.loop.hear(action)
            case Dismiss():
                self._is_dismissed = True
                self.settle()
            case Stop() | Refuse():
                self.cluster.end_process(self.process)

    def hang(self) -> None:
        """Stop all activity."""
        self.is_hung = True
        self._busy += 1

    def resume(self, *, tensors_first: bool) -> None:
        """Resume, and process queued input."""
        self.is_hung = False
        if self.doing in (COMPUTING, APPLYING):
            self._be_busy(max(0.0, self._busy_until_s - self.cluster.hung_at_s[self.worker]))
        while self._inbox and not self.is_hung:
            call, argument = self._inbox.popleft()
            call(argument)

    def end(self) -> None:
        """End the worker."""
        if self.doing != ENDED:
            self._busy += 1
            self.doing = ENDED
            self.cluster.ended(self.process)
            self.cluster.end_if_empty()

    # Beginning and ending --------------------------------------------------------------------------------

    def begun(self) -> None:
        """Begin to train: the process has joined the servers."""
        first_clock = self.process.first_clock
        if self.doing != BEGINNING or first_clock is None:
            return
        self._has_begun = True
        if self.loop is not None:
            self.loop.begin_at(self.cluster.epoch)
        self._report(None, first_clock, ())

    def _finish(self, epoch: int) -> None:
        cluster = self.cluster
        self.doing = FINISHED
        finished = Finished(now_s=cluster.arrival_s(self), worker=self.worker, epoch=epoch, step=self.number)
        cluster.tell(self, finished)
        if self._unpushed:
            self._push()
        self.process.leave(self.worker)
        self.settle()

    def settle(self) -> None:
        """Leave if all workers have finished and all pushes of the process are applied."""
        if self.doing == FINISHED and self._is_dismissed and self.process.is_settled:
            self._send_left()

    def _send_left(self) -> None:
        cluster = self.cluster
        self.doing = LEAVING
        self.has_left = True
        cluster.tell(self, Left(now_s=cluster.arrival_s(self), worker=self.worker, step=self.number))

    def _send_request(self, wants: Wants) -> None:
        self._send(wants)

    def _send(self, event: Event) -> None:
        self.cluster.tell(self, replace(event, now_s=self.cluster.arrival_s(self)))

    # A step ----------------------------------------------------------------------------------------------

    def _proceed(self) -> None:
        """Continue if the message that it waits for is there."""
        grant = self.grant
        if self.doing == REPORTING and grant is not None:
            self.process.passed(self.worker, grant.clock)
            if self.is_leaving:
                self.process.leave(self.worker)
                self._send_left()
            else:
                self._compute()
        elif self.doing == WANTING:
            self._compute()
        elif self.doing == WAITING and grant is not None and grant.may_start:
            self._start(grant)

    def _compute(self) -> None:
        """Continue the loop: another batch, the end of a step, or the end."""
        if self.loop is None:
            if self.number >= self.cluster.steps:
                self._finish((self.number - 1) // self.cluster.steps_per_epoch)
            else:
                self._take_batch()
            return
        match self.loop.next():
            case Next.WAIT:
                self.doing = WANTING
            case Next.OVER:
                self._finish(self.loop.epoch - 1)
            case Next.ROUND:
                self._end_step()
            case Next.BATCH:
                self._take_batch()

    def _take_batch(self) -> None:
        if self._has_step:
            self._begin_to_compute()
        else:
            self.doing = WAITING
            self._proceed()

    def _start(self, grant: Grant) -> None:
        """Read parameters that are fresh enough."""
        cluster, terms, directory = self.cluster, self.cluster.terms, self.process.directory
        self._clock = grant.clock
        self._has_step = True
        self.doing = PULLING
        self.process.passed(self.worker, grant.clock)
        if self.loop is not None:
            cluster.epoch = max(cluster.epoch, self.loop.epoch)
        if terms.fetch_every is not None:
            self._read_fetched(terms.fetch_every)
            return
        source = directory.read(self.worker, grant.version) if terms.is_bounded else "server"
        self.reads[source] += 1
        if source == "thread":
            self._begin_to_compute()
        elif source == "process":
            assert self.process.row is not None
            self.read(self.process.row)
        else:
            self.process.pull(self, grant.version, fresh=not terms.is_bounded)

    def read(self, row: Row) -> None:
        """Install a row that is fresh enough, and compute."""
        if self.doing != ENDED:
            self._install(row)
            self._begin_to_compute()

    def _read_fetched(self, fetch_every: int) -> None:
        """Install what was fetched in the background, and fetch again when it is due."""
        if self._row is None:
            self.reads["server"] += 1
            self.process.pull(self, 0, fresh=True)
            return
        if self._fetched is not None:
            self._install(self._fetched)
            self._fetched = None
        if not self._is_fetching and self.number % fetch_every == 0:
            self._is_fetching = True
            self.reads["server"] += 1
            self.pulls += 1
            self.process.fetch(self._on_fetched)
        self._begin_to_compute()

    def _on_fetched(self, row: Row) -> None:
        self._fetched, self._is_fetching = row, False

    def _install(self, row: Row) -> None:
        """Install a row into the thread cache, and replay its own steps that are missing in it."""
        directory, worker = self.process.directory, self.worker
        self._visible = []
        for piece in row.pieces:
            replayed = [
                number for own in self._logged[directory.held(worker, piece.time) :] for number in own
            ]
            seen = piece.steps[worker]
            if replayed != list(range(seen, seen + len(replayed))):
                self.cluster.violated(
                    f"worker {worker} replays its steps {replayed} on top of {seen} that the row has"
                )
            self._visible.append(seen + len(replayed))
        del self._logged[: directory.installed(worker, row.version, min(piece.time for piece in row.pieces))]
        self._row = row

    def _begin_to_compute(self) -> None:
        cluster, grant = self.cluster, self.grant
        assert grant is not None
        assert self._row is not None
        if self.doing == PULLING:
            cluster.check_read(self, grant, self._row, self._visible)
            self._read_version = max(grant.version, self.process.directory.version(self.worker))
            if cluster.terms.is_versioned:
                self.staleness[grant.clock - min(grant.clock, self._read_version)] += 1
        self.doing = COMPUTING
        epoch, step = divmod(self.number, cluster.steps_per_epoch)
        if self.loop is not None:
            epoch, step = self.loop.epoch, int(self.loop.share * cluster.steps_per_epoch)
        takes_s = self.stopwatch.next_s(epoch, step, cluster.steps_per_epoch, self.number)
        self._computed_s += takes_s
        self._be_busy(takes_s)

    def _end_busy(self, number: int) -> None:
        if number != self._busy:
            return
        if self.doing == APPLYING:
            self._apply()
        elif self.loop is None or self.loop.computed():
            self._end_step()
        else:
            self._compute()

    def _end_step(self) -> None:
        self.doing = APPLYING
        self._be_busy(self.cluster.apply_s)

    def _apply(self) -> None:
        """Apply its own step locally, and hand over its gradients."""
        cluster, terms = self.cluster, self.cluster.terms
        step = Step(self.worker, self.number, self._clock)
        cluster.check_step(step)
        self.number += 1
        if terms.steps_locally:
            self._visible = [count + 1 for count in self._visible]
        self._unpushed.append(step)
        self.doing = PUSHING
        if len(self._unpushed) >= terms.push_every:
            self._push()
        self.pushed()

    def _push(self) -> None:
        steps, self._unpushed = self._unpushed, []
        time, push = self.process.give(steps[-1], steps)
        if self.cluster.terms.steps_locally:
            self.process.directory.log(self.worker, time)
            self._logged.append(tuple(step.number for step in steps))
        self._awaited = push if self.cluster.terms.is_bounded else self._last_push
        self._last_push = push

    def pushed(self) -> None:
        """Continue if the awaited push is applied."""
        if self.doing != PUSHING or not self.process.is_done(self._awaited):
            return
        self._awaited = None
        blocks: tuple[int, ...] = () if self.loop is None else self.loop.contribute()
        self._has_step = False
        self.active_s = self.cluster.progress_s = self.cluster.engine.now_s
        self._report(self._clock, self._read_version, blocks)
        if self.loop is not None:
            self.loop.end_round()
        self._computed_s = 0.0

    def _report(self, clock: int | None, version: int, blocks: tuple[int, ...]) -> None:
        """Report a finished step to the coordinator, whose Grant names the next clock."""
        loop = self.loop
        self.grant = None
        self.doing = REPORTING
        samples = 1 if loop is None else sum(block.samples for block in loop.blocks)
        self._send(
            Clocked(
                now_s=0.0,
                worker=self.worker,
                clock=clock,
                version=version,
                epoch=self.number // self.cluster.steps_per_epoch if loop is None else loop.epoch,
                step=self.number,
                compute_s=self._computed_s,
                samples=samples,
                loss=None if clock is None else self.cluster.loss(clock),
                blocks=blocks,
            )
        )
