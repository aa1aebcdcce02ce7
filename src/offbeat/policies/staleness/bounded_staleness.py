"""Bounded staleness on a parameter server: which worker may start its next step, with which samples.

Theory of operation
-------------------

A worker reports each finished step (`StepFinished`) and receives a `StepPermit`: the clock of its next step
and whether that may start. The policy owns four parts and decides only what passes between them:

- `ConsistencyGate`: the table of clocks, and the rule which clock may start;
- `LprController` (optional): the bound s, which follows the training loss;
- `SoloBlockAssigner` (with shards="dynamic"): the samples of the epoch, assigned to workers in blocks;
- `StragglerClassifier` (optional): workers that hold others back only beyond s_max.

A worker is *joined*, then *begun* (its first `StepFinished`, without a clock: it has the parameters), then it
either *runs* or *rests* in the gate, and at last it has *finished* or is *gone*. It runs while it may
compute: it has samples, or none are assigned by this policy, and no other worker takes the warm start's
steps. Other workers wait for a running worker only.

Every event that changes anything ends in `_proceed`, always in this order:

1. blocks are assigned to workers that asked for samples;
2. the worker that reported a step gets its next clock, and workers switch between running and resting;
3. versions of the parameters that are complete now pass their losses to the controller, which may change s;
4. blocks used at clocks before the version count as consumed;
5. the gate opens for all workers that s admits, and the clocks of resting workers follow the version.

Invariants. No permit is given before all workers of the start have begun or are gone. A reported step is the
one that was permitted: at its clock, with at least the version that it required; anything else is a
`ProtocolError`. The version never falls, and no worker enters at a clock that is complete. A block belongs to
one worker at a time.

Failures. The blocks of a worker that leaves early, is lost or fails are assigned again, and its clock no
longer holds the version back. If worker 0 goes before it has begun, the job stops, because all workers start
with its parameters. On each tick, workers that have kept others waiting for longer than the deadline are
refused, and so is one worker that others need and that cannot reach a server. Once all workers that have
begun have finished, the job is complete; workers that join later are refused; with the last worker gone, the
servers close.

Nothing here knows where parameters are, nor how they are pushed and pulled.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    AssignBlocks,
    CheckpointQuery,
    CloseServers,
    ContributionReport,
    Event,
    Failed,
    Finished,
    Halted,
    JobComplete,
    Joined,
    LateGradientArrived,
    Left,
    Lost,
    PeerReachable,
    PeerUnreachable,
    Preempted,
    Ready,
    RejectPeer,
    SamplesRequested,
    ServerReachable,
    ServerUnreachable,
    StepFinished,
    StepPermit,
    Tick,
)
from offbeat.policies.data.worker_assigner import SoloBlockAssigner
from offbeat.policies.ps.manager import client_id
from offbeat.policies.staleness.adaptive_bound import LprController
from offbeat.policies.staleness.clock_gate import ClockCounting, ConsistencyGate, OpenedStep
from offbeat.policies.staleness.server_outages import UNREACHABLE_S, ServerOutages
from offbeat.policies.stragglers.classifier import StragglerClassifier

_ROOT_WORKER: Final = 0  # all workers start with its parameters
_CLOCK_MAX: Final = 2**62  # later than every clock

ShardMode: TypeAlias = Literal["dynamic", "equal"]


@dataclass(kw_only=True, slots=True)
class _WorkerState:
    """The state of a worker that is not gone.

    Attributes:
        peer: its link name.
        place: host and process id.
        has_begun: it is ready to take steps.
        has_finished: its loop has ended.
    """

    peer: str
    place: str
    has_begun: bool = False
    has_finished: bool = False


class BoundedStaleness:
    """Answers every finished step with the clock of the next one, and permits its start as the bound allows.

    No worker starts before all workers of the start can begin or are gone. With s = 0 training is
    bulk-synchronous (BSP), without a bound asynchronous (ASP), in between stale-synchronous (SSP); with
    `dynamic` the bound follows the loss (DTSSP). When a version of the parameters is complete, its losses
    first change the bound; then the workers that the new bound admits may start.

    A worker that asked for samples and has none rests (see `ConsistencyGate`): a worker without samples holds
    no other back, nor does the end of an epoch, whose last blocks are with a slow worker. A `StepPermit`
    states that it rests, and another one comes with the next samples.

    The job goes on with the workers that are left, unless worker 0 goes before it has begun: all start with
    its parameters. A worker that leaves without having finished, is lost or fails returns the samples that it
    had. A worker that keeps others waiting for more than `timeout_s` is refused, unless the coordinator
    receives nothing from it: silence is not lateness. A worker that has not reached a server for
    `UNREACHABLE_S` is refused too, unless more than half of the processes miss that server: of several, the
    one that misses most servers, else the last. With a bound, other workers wait for what it cannot push;
    without one, it is refused only if others wait for it.

    When a worker is about to be terminated, all go on up to the latest clock that is under way, and are
    notified with the `StepPermit` of their next one (`StepPermit.is_preempted`); without a bound, with their
    next `StepPermit`.

    With a *warm start* the worker with the lowest id takes the first steps alone while the others rest. It
    ends early if all samples that are left have been assigned to other workers.

    Source: those of `ConsistencyGate` and `LprController`. Deviations: theirs; workers that join and leave;
    samples that are assigned as they are needed; stragglers, which others may leave further behind.

    Args:
        world: number of workers at the start; their ids are 0 to `world` - 1.
        s: the bound, at least 0; None for none. With `dynamic`, the initial bound.
        counts: what a clock is (see `ConsistencyGate`).
        timeout_s: how long other workers wait for a worker's step, in seconds.
        shards: "dynamic" assigns samples as they are needed; with "equal" none are assigned.
        dynamic: arguments of `LprController`; None for a constant bound.
        detector: arguments of `StragglerClassifier`, whose stragglers hold others back only beyond the
            largest bound of `dynamic`, which it needs; None treats all workers alike.
        warm_start: steps that one worker takes alone first, at least 0.

    Raises:
        ValueError: an argument is out of range, or two contradict each other.

    Size: each event ends in `_proceed`, which reads and changes the samples, the gate, the warm start and the
    bound together, in one order; the parts that have rules of their own are objects already.
    """

    def __init__(
        self,
        world: int,
        *,
        s: int | None = 3,
        counts: ClockCounting = "own",
        timeout_s: float = 600.0,
        shards: ShardMode = "dynamic",
        dynamic: dict[str, Any] | None = None,
        detector: dict[str, Any] | None = None,
        warm_start: int = 0,
    ) -> None:
        if world < 1:
            raise ValueError(f"expected a world of at least 1 worker, got {world}")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"expected a finite timeout of more than 0 s, got {timeout_s}")
        if shards not in ("dynamic", "equal"):
            raise ValueError(f"expected shards dynamic or equal, got {shards!r}")
        if warm_start < 0:
            raise ValueError(f"expected a warm start of at least 0 steps, got {warm_start}")
        if dynamic is not None and s is None:
            raise ValueError("expected a bound that may change, got none at all: give s or leave out dynamic")
        if detector is not None and dynamic is None:
            raise ValueError("expected dynamic along with detector: its s_max bounds how far stragglers fall")
        self._world, self._timeout_s = world, timeout_s
        self._controller = None if dynamic is None or s is None else LprController(s, **dynamic)
        s_max = None if self._controller is None else self._controller.s_max
        self._gate = ConsistencyGate(s, counts, s_max)
        self._assigner = SoloBlockAssigner() if shards == "dynamic" else None
        self._classifier = None if detector is None else StragglerClassifier(**detector)
        self._workers: dict[int, _WorkerState] = {}
        self._leader: int | None = None  # the lowest of these ids, where it is known
        self._gone: set[int] = set()
        self._has_started = False
        self._awaited: set[int] = set()  # workers of the start that have not begun
        self._holding_since_s: dict[int, float] = {}  # by worker that keeps others waiting
        self._silent: set[int] = set()  # workers from which the coordinator receives nothing
        self._server_outages = ServerOutages()
        self._is_over = False  # the job is complete, or all workers are gone
        self._warm_steps = warm_start  # left of the warm start
        self._warm_worker: int | None = None  # takes them; None outside the warm start
        self._preempted_clock: int | None = None  # the last one without `StepPermit.is_preempted`

    def handle(self, event: Event) -> list[Action]:
        """Return StepPermits, AssignBlocks, a RejectPeer, a JobComplete, a CloseServers or nothing.

        Raises:
            ProtocolError: the event cannot come from a worker of a running job.
        """
        if self._is_over:
            return self._after_end(event)
        match event:
            case Joined():
                return self._on_joined(event)
            case StepFinished():
                return self._on_step_finished(event)
            case SamplesRequested():
                return self._on_samples_requested(event)
            case CheckpointQuery():
                return self._on_checkpoint_query(event)
            case Finished():
                return self._on_finished(event)
            case Left() | Lost() | Failed():
                return self._on_gone(event)
            case Tick():
                return self._on_tick(event.now_s)
            case Ready() | Halted() | ContributionReport() | LateGradientArrived():
                raise ProtocolError(
                    f"expected nothing about groups, which this job does not have, got {_describe(event)}"
                )
            case ServerUnreachable() | ServerReachable():
                self._on_server_reachability(event)
            case Preempted():
                if self._preempted_clock is None:
                    self._preempted_clock = -1 if self._gate.s is None else self._gate.latest_clock
            case PeerUnreachable() | PeerReachable():
                if event.worker is None and event.peer in self._workers:
                    self._set_reachable(event.peer, isinstance(event, PeerReachable))
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is not a constructor argument, as plain data."""
        return {
            "controller": None if self._controller is None else self._controller.state_dict(),
            "gate": self._gate.state_dict(),
            "assigner": None if self._assigner is None else self._assigner.state_dict(),
            "classifier": None if self._classifier is None else self._classifier.state_dict(),
            "workers": [[worker, asdict(entry)] for worker, entry in self._workers.items()],
            "gone": sorted(self._gone),
            "has_started": self._has_started,
            "awaited": sorted(self._awaited),
            "holding_since_s": [list(entry) for entry in self._holding_since_s.items()],
            "silent": sorted(self._silent),
            "server_outages": self._server_outages.state_dict(),
            "is_over": self._is_over,
            "warm_steps": self._warm_steps,
            "warm_worker": self._warm_worker,
            "preempted_clock": self._preempted_clock,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a policy with the same arguments."""
        for part, name in (
            (self._controller, "controller"),
            (self._gate, "gate"),
            (self._assigner, "assigner"),
            (self._classifier, "classifier"),
            (self._server_outages, "server_outages"),
        ):
            if part is not None:
                part.load_state_dict(state[name])
        self._workers = {worker: _WorkerState(**entry) for worker, entry in state["workers"]}
        self._leader = None
        self._gone, self._awaited = set(state["gone"]), set(state["awaited"])
        self._has_started, self._is_over = state["has_started"], state["is_over"]
        self._holding_since_s = dict(state["holding_since_s"])
        self._silent = set(state["silent"])
        self._warm_steps, self._warm_worker = state["warm_steps"], state["warm_worker"]
        self._preempted_clock = state["preempted_clock"]

    # Joining and leaving ---------------------------------------------------------------------------------

    def _on_joined(self, event: Joined) -> list[Action]:
        if event.worker in self._workers or event.worker in self._gone:
            return []  # the assembly policy answers it
        self._workers[event.worker] = _WorkerState(peer=event.peer, place=event.location)
        self._leader = None
        if self._assigner is not None:
            self._assigner.on_joined(event.worker)
        if not self._has_started and len(self._workers) == self._world:
            self._has_started = True
            self._awaited = set(self._workers)
        return []

    def _on_finished(self, event: Finished) -> list[Action]:
        entry = self._active(event)
        self._end_steps(event.worker, entry)
        entry.has_finished = True
        if self._assigner is not None:
            self._assigner.on_finished(event.worker)
        return self._proceed() + self._complete_job()

    def _on_gone(self, event: Left | Lost | Failed) -> list[Action]:
        """Remove a worker; stop the job if the initial parameters are lost with it and other workers remain.

        Raises:
            ProtocolError: the worker has never joined, though the job has started.
        """
        if event.worker not in self._workers:
            if event.worker in self._gone or not self._has_started:
                return []
            raise ProtocolError(f"expected a worker that has joined, got {_describe(event)}")
        if self._lacks_initial_parameters([event.worker]) and len(self._workers) > 1:
            return self._stop(_departure_cause(event))
        self._remove(event.worker)
        if not self._workers and self._has_started and not isinstance(event, Left):
            return self._fail(f"worker {event.worker} was lost: {_departure_cause(event)}")
        return self._proceed() + self._complete_job()

    def _fail(self, cause: str) -> list[Action]:
        """End the job, which no worker is left to complete."""
        self._is_over = True
        return [AbortJob(worker=None, step=None, reason=f"{cause}; no worker is left")]

    def _lacks_initial_parameters(self, going: list[int]) -> bool:
        """Whether the worker whose parameters all start with is among these and has not provided them yet."""
        return _ROOT_WORKER in going and _ROOT_WORKER in self._awaited

    def _stop(self, cause: str) -> list[Action]:
        self._remove(_ROOT_WORKER)
        self._is_over = True
        reason = f"worker {_ROOT_WORKER} is out, and the others do not have its initial parameters: {cause}"
        return [AbortJob(worker=_ROOT_WORKER, step=None, reason=reason)]

    def _remove(self, worker: int) -> None:
        self._end_steps(worker, self._workers.pop(worker))
        self._gone.add(worker)
        self._silent.discard(worker)
        self._server_outages.forget(worker)
        if self._assigner is not None:
            self._assigner.on_gone(worker)

    def _end_steps(self, worker: int, entry: _WorkerState) -> None:
        """Remove a worker that takes no further step from the gate."""
        self._awaited.discard(worker)
        if worker not in self._gate:
            return
        self._gate.leave(worker)
        if self._classifier is not None:
            self._classifier.remove(worker)
            self._gate.set_stragglers(self._classifier.stragglers)

    def _complete_job(self) -> list[Action]:
        """Complete the job once all workers that have begun have finished."""
        if not self._has_started or self._awaited:
            return []
        if not self._workers:
            self._is_over = True
            return [_close_servers()]
        begun = [entry for entry in self._workers.values() if entry.has_begun or entry.has_finished]
        if not begun or not all(entry.has_finished for entry in begun):
            return []
        self._is_over = True
        return [JobComplete(reason="all workers have finished")]

    def _after_end(self, event: Event) -> list[Action]:
        """Handle an event after the job is complete or all workers are gone."""
        if isinstance(event, Joined):
            return [_reject(event.worker, event.peer)]
        if isinstance(event, StepFinished) and event.worker in self._workers:
            refused = _reject(event.worker, self._workers.pop(event.worker).peer)
            return [refused] if self._workers else [refused, _close_servers()]
        if not isinstance(event, Left | Lost | Failed) or self._workers.pop(event.worker, None) is None:
            return []
        return [] if self._workers else [_close_servers()]

    # Steps and samples -----------------------------------------------------------------------------------

    def _on_step_finished(self, event: StepFinished) -> list[Action]:
        worker, entry = event.worker, self._active(event)
        if event.clock is None:
            if entry.has_begun:
                raise ProtocolError(f"expected a clock from a worker that has begun, got {_describe(event)}")
            entry.has_begun = True
            self._awaited.discard(worker)
            self._gate.enter(worker, event.parameter_version)
            if self._classifier is not None:
                self._classifier.add(worker)
            return self._proceed(event)
        self._check_step(event, event.clock)
        self._holding_since_s.pop(worker, None)
        if self._assigner is not None:
            self._assigner.on_step(worker, event.clock, event.blocks)
        if self._controller is not None and event.loss is not None:
            self._controller.add_loss(event.clock, event.samples, event.loss)
        self._observe(event)
        self._warm_steps = max(0, self._warm_steps - 1)
        return self._proceed(event)

    def _check_step(self, event: StepFinished, clock: int) -> None:
        worker, gate = event.worker, self._gate
        required = gate.required_version(worker) if worker in gate and gate.is_running(worker) else None
        if required is None or clock != gate.clock(worker):
            may = f"may start at {gate.clock(worker)}" if required is not None else "may not start"
            raise ProtocolError(f"expected no step at clock {clock} of worker {worker}, which {may}")
        if event.parameter_version < required:
            raise ProtocolError(
                f"expected worker {worker} to compute its step at clock {clock} with at least version "
                f"{required} of the parameters, got {event.parameter_version}"
            )
        if event.blocks and self._assigner is None:
            raise ProtocolError(f"expected no blocks, because none are assigned, got {_describe(event)}")

    def _observe(self, event: StepFinished) -> None:
        if self._classifier is None:
            return
        if self._classifier.observe_next(event.worker, epoch=event.epoch, compute_s=event.compute_s):
            self._gate.set_stragglers(self._classifier.stragglers)

    def _on_samples_requested(self, event: SamplesRequested) -> list[Action]:
        self._active(event)
        self._require_dealing(event).on_samples_requested(event)
        return self._proceed(event)

    def _on_checkpoint_query(self, event: CheckpointQuery) -> list[Action]:
        self._active(event)
        self._require_dealing(event).on_checkpoint_query(event)
        return self._proceed()

    def _require_dealing(self, event: SamplesRequested | CheckpointQuery) -> SoloBlockAssigner:
        if self._assigner is None:
            raise ProtocolError(
                f"expected nothing about samples, because none are assigned, got {_describe(event)}"
            )
        return self._assigner

    # Permits ---------------------------------------------------------------------------------------------

    def _proceed(self, event: StepFinished | SamplesRequested | None = None) -> list[Action]:
        """Assign samples and permit steps (see the theory of operation)."""
        assignments = [] if self._assigner is None else self._assigner.pop_actions()
        affected = {assignment.worker for assignment in assignments if isinstance(assignment, AssignBlocks)}
        notified = set()
        if event is not None:
            affected.add(event.worker)
        if (warm_worker := self._choose_warm_worker()) != self._warm_worker:
            self._warm_worker = warm_worker
            affected |= self._workers.keys()
        if isinstance(event, StepFinished):
            notified.add(event.worker)
            if event.clock is not None and self._may_compute(event.worker):
                self._gate.advance(event.worker)
        notified |= {worker for worker in sorted(affected) if self._update_running(worker)}
        reasons = self._complete_versions()
        if self._assigner is not None:
            self._assigner.on_version(_CLOCK_MAX if self._gate.s is None else self._gate.version)
        return [*self._permits(notified, reasons), *assignments]

    def _update_running(self, worker: int) -> bool:
        """Let a worker run while it may compute, and rest otherwise; return whether that changed."""
        gate = self._gate
        if worker not in gate or gate.is_running(worker) == self._may_compute(worker):
            return False
        if gate.is_running(worker):
            gate.rest(worker)
        else:
            gate.enter(worker)
        return True

    def _may_compute(self, worker: int) -> bool:
        if self._warm_worker is not None and worker != self._warm_worker:
            return False
        return self._assigner is None or self._assigner.has_work(worker)

    def _choose_warm_worker(self) -> int | None:
        """Return the worker that takes the steps of the warm start now; None once that is over."""
        if not self._warm_steps:
            return None
        first = min((worker for worker in self._workers if worker in self._gate), default=None)
        if (
            self._assigner is not None
            and first in self._assigner.waiting_workers
            and self._assigner.blocking_workers()
        ):
            self._warm_steps = 0
            return None
        return first

    def _complete_versions(self) -> list[str]:
        """Let the losses of complete versions change the bound; return the reasons."""
        if self._controller is None:
            return []
        reasons = self._controller.complete_versions(self._gate.version)
        if reasons:
            self._gate.set_bound(self._controller.s)
        return reasons

    def _permits(self, notified: set[int], reasons: list[str]) -> list[Action]:
        """Notify these workers, those that may start now, and those whose clock moved while they rest."""
        opened = {entry.worker: entry for entry in self._gate.open_steps()} if self._may_open() else {}
        notified = {*notified, *opened, *self._gate.advance_resting()}
        return [
            self._permit(opened[worker], reasons) if worker in opened else self._hold(worker)
            for worker in sorted(notified)
        ]

    def _may_open(self) -> bool:
        return self._has_started and not self._awaited

    def _permit(self, opened: OpenedStep, reasons: list[str]) -> StepPermit:
        ahead = opened.clock - self._gate.version
        bound = "there is no bound" if opened.bound is None else f"the bound is {opened.bound}"
        if opened.bound != self._gate.s:
            bound += " for a straggler"
        return StepPermit(
            worker=opened.worker,
            clock=opened.clock,
            version_min=opened.version,
            complete_version=self._gate.version,
            staleness_bound=opened.bound,
            may_start=True,
            is_leader=self._leads(opened.worker),
            is_preempted=self._is_preempted(opened.clock),
            reason="; ".join([f"it is {ahead} ahead of the slowest", bound, *reasons]),
        )

    def _hold(self, worker: int) -> StepPermit:
        gate, clock = self._gate, self._gate.clock(worker)
        if self._warm_worker is not None and worker != self._warm_worker:
            reason = f"worker {self._warm_worker} takes {self._warm_steps} more steps alone"
        elif not gate.is_running(worker):
            reason = "it has no samples"
        elif not self._may_open():
            reason = "not all workers have joined yet"
        else:
            reason = f"it is {clock - gate.version} ahead of the slowest, and the bound is {gate.s}"
        return StepPermit(
            worker=worker,
            clock=clock,
            version_min=0 if gate.s is None else max(0, clock - gate.s),
            complete_version=gate.version,
            staleness_bound=gate.s,
            may_start=False,
            is_leader=self._leads(worker),
            is_preempted=self._is_preempted(clock),
            reason=reason,
        )

    def _is_preempted(self, clock: int) -> bool:
        return self._preempted_clock is not None and clock > self._preempted_clock

    def _leads(self, worker: int) -> bool:
        if self._leader not in self._workers:
            self._leader = min(self._workers)
        return worker == self._leader

    # Workers that keep others waiting --------------------------------------------------------------------

    def _set_reachable(self, worker: int, is_reachable: bool) -> None:
        if is_reachable:
            self._silent.discard(worker)
        else:
            self._silent.add(worker)

    def _on_tick(self, now_s: float) -> list[Action]:
        holding = self._holding() - self._silent if self._has_started else set()
        self._holding_since_s = {
            worker: self._holding_since_s.get(worker, now_s) for worker in sorted(holding)
        }
        late = [
            worker for worker, since_s in self._holding_since_s.items() if now_s - since_s > self._timeout_s
        ]
        if late:
            return self._refuse(late, f"other workers have waited for it for more than {self._timeout_s:g} s")
        needed = holding if self._gate.s is None else holding | self._running_workers()
        processes = len({entry.place for entry in self._workers.values()})
        least_connected = self._server_outages.least_connected(now_s, needed, processes)
        if least_connected is None:
            return []
        worker, servers = least_connected
        # Without this worker, the others may reach all servers.
        self._server_outages.restart_timers(now_s)
        missed = ", ".join(f"server-{server}" for server in servers)
        reason = (
            f"it has not reached {missed} for more than {UNREACHABLE_S:g} s, and others need what it pushes"
        )
        return self._refuse([worker], reason)

    def _refuse(self, workers: list[int], reason: str) -> list[Action]:
        if self._lacks_initial_parameters(workers):
            return self._stop(reason)
        refused = [
            RejectPeer(peer=self._workers[worker].peer, reason=f"worker {worker} is out: {reason}")
            for worker in workers
        ]
        for worker in workers:
            self._remove(worker)
        if not self._workers:
            return [*refused, *self._fail(reason)]
        return [*refused, *self._proceed(), *self._complete_job()]

    def _on_server_reachability(self, event: ServerUnreachable | ServerReachable) -> None:
        worker = client_id(event.node)
        if worker is None or worker not in self._workers:
            return
        if isinstance(event, ServerUnreachable):
            self._server_outages.on_unreachable(worker, event.server, event.now_s)
        else:
            self._server_outages.on_reachable(worker, event.server)

    def _running_workers(self) -> set[int]:
        """Workers that take a step or wait to start one, without those that are silent."""
        reachable = self._workers.keys() - self._silent
        return {worker for worker in reachable if worker in self._gate and self._gate.is_running(worker)}

    def _holding(self) -> set[int]:
        """Workers whose next action others wait for: to begin, at the gate, for samples, or to finish."""
        if self._awaited:
            return self._awaited
        holding = set(self._gate.blocking_workers())
        idle = set(self._gate.waiting)
        if self._warm_worker is not None:
            idle |= self._workers.keys() - {self._warm_worker}
        if self._assigner is not None:
            holding |= self._assigner.blocking_workers() - idle
            idle |= self._assigner.waiting_workers
        if self._warm_worker is not None and len(self._workers) > 1:
            holding |= {self._warm_worker} - idle
        if any(entry.has_finished for entry in self._workers.values()):
            working = {
                worker
                for worker, entry in self._workers.items()
                if entry.has_begun and not entry.has_finished
            }
            holding |= working - idle
        return holding

    def _active(self, event: StepFinished | SamplesRequested | CheckpointQuery | Finished) -> _WorkerState:
        entry = self._workers.get(event.worker)
        if entry is None or not self._has_started or entry.has_finished:
            raise ProtocolError(f"expected a worker that takes part in a running job, got {_describe(event)}")
        return entry


def _close_servers() -> CloseServers:
    return CloseServers(reason="all workers are gone")


def _reject(worker: int, peer: str) -> RejectPeer:
    return RejectPeer(
        peer=peer, reason=f"worker {worker} cannot take part: it came when all others were done"
    )


def _departure_cause(event: Left | Lost | Failed) -> str:
    match event:
        case Left():
            return "it has left"
        case Lost():
            return event.cause
        case Failed():
            return f"it failed after {event.step} steps: {event.error}"


def _describe(event: Event) -> str:
    return f"{type(event).__name__} of worker {getattr(event, 'worker', None)}"
