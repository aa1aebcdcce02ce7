"""A simulated cluster: workers, a coordinator that runs the real policies, a network, and injected faults.

Theory of operation.

*Time.* `Engine` is a calendar of (time, function, argument). `run` moves `now_s` to the earliest entry and
calls it; entries of equal times run in the order in which they were requested. Nothing sleeps and no thread
runs: a wait is an entry further ahead. All chance comes from `random.Random` and numpy generators seeded with
`SimulationSetting.seed`, so equal settings give equal runs.

*Parts.* A `SimulatedWorker` is a state machine (computing, waiting, exchanging, applying, …) around the
runtime's own `GroupMembership`. A `SimulatedExchange` starts when its last member has arrived, and ends for
the members one after the other. `NetworkOutages` holds the outages of the network and reports unreachable
peers. `SimulatedCluster` stands for the coordinator and for every transport: `send_event` sends an event up,
`handle_event` passes it to the policies, `_apply_actions` sends their actions down.

*Order.* Each direction of a worker's control connection is FIFO: a message arrives at the later of now +
latency and the arrival time of the message before it (`uplink_s`, `downlink_s`). A fault of the network moves
these times: it delays control messages and loses none. Only a restart of the coordinator loses messages:
those on the way belong to an earlier incarnation, and the log after its last durable entry is dropped. With
`is_exactly_once`, both sides then resend what was not recorded; else a worker sends its last Ready, Halted
and Finished again. A new coordinator replays the log; its clock lags `clock_lag_s` behind the engine's.

*Hangs.* A hung worker queues what arrives. Its pending computation is invalidated by a counter
(`_computation`) and scheduled again, with the time that it still takes, when the worker resumes. An exchange
is blocked while a member hangs or is dead, or while an outage separates members.

*Vectorization.* While nothing goes wrong, a `VectorizedGroup` computes whole rounds with arrays instead of
one engine entry for each worker. Every fault, every delivery but EndEpoch, and every look at `workers`
dissolves it: the members replay the round under way through their own code, in an engine of their own, up to
now.

*Invariants*, checked during the run and at its end (`_check_…`, and in `SimulatedExchange`): generations
increase; a group has members that are present, and at least one with the state; members of an exchange have
equal states; no group excludes members while the coordinator cannot reach most of them; no sample is used
twice, and in a job that ends well each one is used; within `stuck_after_s` some worker finishes a step. A
violation raises `ViolationError`.

Nothing here decides on membership, and nothing waits for real time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, assert_never, cast

from offbeat.errors import OffbeatError
from offbeat.events import (
    AbortJob,
    Action,
    AssignLateBlock,
    ConsumedSamples,
    EndEpoch,
    Event,
    Group,
    Halt,
    JobComplete,
    Joined,
    Left,
    Lost,
    PeerReachable,
    PeerUnreachable,
    Ready,
    Recipient,
    RejectPeer,
    ResolveLateBlock,
    Tick,
    ToAllWorkers,
)
from offbeat.policies import Policy
from offbeat.policies.data.block_scheduler import BlockScheduler
from offbeat.policies.membership.lockstep import Lockstep
from offbeat.policies.stragglers.injection import InjectedSlowness
from offbeat.simulator.core.engine import Engine
from offbeat.simulator.core.faults import (
    SERVERS,
    ConnectionReset,
    CoordinatorRestart,
    Delay,
    Fault,
    LinkCut,
    Partition,
    WorkerArrival,
    WorkerDeath,
    WorkerDeparture,
    WorkerHang,
    format_fault,
)
from offbeat.simulator.core.network_outages import COORDINATOR, UNREACHABLE_S, NetworkOutages, Outage
from offbeat.simulator.core.times import ComputeTimeSource
from offbeat.simulator.training.coordinator import SimulatedCoordinator
from offbeat.simulator.training.exchange import BlockableExchange, SimulatedExchange
from offbeat.simulator.training.interface import StateTransfer
from offbeat.simulator.training.invariants import (
    checkpoint_violation,
    count_violation,
    group_violation,
    halt_violation,
    repeated_use,
)
from offbeat.simulator.training.replicas import HistoryProblem, SampleTrackingProblem, TrainingProblem
from offbeat.simulator.training.sample_loop import SampleSetting
from offbeat.simulator.training.setting import SimulationSetting
from offbeat.simulator.training.vectorized_group import VectorizedGroup
from offbeat.simulator.training.worker import RECEIVING_STATE, SimulatedWorker

# A simulated worker computes no late block, so those assigned to it are withdrawn; and it does not wait for
# the answer to its checkpoint query.
_NOT_SIMULATED = (AssignLateBlock, ResolveLateBlock, ConsumedSamples)
_REPORTED_S = UNREACHABLE_S + 0.1  # a silence of this length has been reported to the policies


class ViolationError(OffbeatError):
    """Something happened that must never happen."""


class SimulatedCluster:
    """One simulated run.

    Args:
        setting: parameters of the run.
        policies: builds the coordinator's policies; called again for each restarted coordinator.
        problem: the training problem; by default only a history.
        keeps_log: whether `log` is kept; it is always kept where coordinators restart.
        one_by_one: simulate every worker individually all the time; the run is the same.

    Attributes:
        coordinator: the policies, their log, and the connections to workers.
        stopped: the AbortJob that ended the job, if any.
        complete_s: when the job was complete; None before.
        ready_s: when the coordinator has received the last Ready of each worker, until the job was complete.
        progress_s: when a worker last finished a step, or earlier while there is a vectorized group.
        vectorized_group: the members of the group, while their rounds are computed together.
        received_early: workers whose last Ready the coordinator has already received, during `dissolve`.
        membership_changed_s: when the last Halt or Group was sent.
        is_exactly_once: events and actions are recorded and delivered exactly once and in order, across
            restarts of the coordinator. (They are numbered where it restarts; else nothing is resent.)

    Size: it stands for all transports and injects all faults. Each message and each fault reads and changes
    the connections, the hangs and the vectorized group together, and subclasses replace single
    steps of this.
    """

    HAS_SERVERS: ClassVar = False

    def __init__(
        self,
        setting: SimulationSetting,
        policies: Callable[[], Sequence[Policy]],
        *,
        problem: TrainingProblem | None = None,
        keeps_log: bool = False,
        one_by_one: bool = False,
    ) -> None:
        for fault in setting.faults:
            if isinstance(fault, LinkCut) and fault.peer == SERVERS and not self.HAS_SERVERS:
                raise ValueError(f"fault {format_fault(fault)}: there are no servers under this strategy")
        self.setting = setting
        self.engine = Engine()
        self.chance = random.Random(f"cluster {setting.seed}")
        self.problem: TrainingProblem = problem or HistoryProblem()
        if setting.samples is not None:
            self.problem = SampleTrackingProblem(self.problem)
        self.network = setting.network
        self.exchanges: dict[int, BlockableExchange] = {}
        self.vectorized_group = VectorizedGroup(self, self.open_exchange)
        self.received_early: frozenset[int] = frozenset()
        is_plain = setting.rounds_per_step == 1 and not setting.apply_s and setting.samples is None
        self._may_vectorize = not one_by_one and is_plain and not setting.network.lines
        self._workers: dict[int, SimulatedWorker] = {}
        self.hung_at_s: dict[int, float] = {}
        self.progress_s = self.membership_changed_s = 0.0
        self.stopped: AbortJob | None = None
        self.complete_s: float | None = None
        self.ready_s: dict[int, float] = {}
        self.groups: list[tuple[float, Group]] = []
        self._hung_until_s: dict[int, float] = {}
        self.lines = NetworkOutages(self, lost_after_s=setting.lost_after_s)
        self._exchange_ids: dict[int, tuple[int, tuple[int, ...]]] = {}
        has_restart = any(isinstance(fault, CoordinatorRestart) for fault in setting.faults)
        self.coordinator = SimulatedCoordinator(
            policies, keeps_log=keeps_log or has_restart, fail_invariant=self.fail_invariant
        )
        self._slowness = (
            InjectedSlowness(setting.slow, workers=setting.world, seed=setting.seed) if setting.slow else None
        )
        self._alive = 0
        self.is_lockstep = any(isinstance(policy, Lockstep) for policy in self.coordinator.policies)
        self.is_exactly_once = setting.samples is not None or (self.is_lockstep and has_restart)
        self._may_vectorize &= not self.is_exactly_once
        self._may_resend = has_restart
        self._is_cut_short = False

    # Running -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the simulation to its end.

        Raises:
            ViolationError: an invariant was violated.
        """
        setting, engine = self.setting, self.engine
        for worker in range(setting.world):
            self._add(worker, is_new=False)
        for fault in setting.faults:
            engine.schedule(fault.at_s, self._inject_fault, fault)
        engine.schedule(setting.tick_s, self._tick)
        engine.run(setting.until_s)
        self.vectorized_group.dissolve()
        if self._alive:
            engine.run(engine.now_s)  # calls of dissolved members that are due at this very time
        if not self._is_cut_short:
            self._check_end()

    def cut_short(self) -> None:
        """End the run after the current call, in the middle of the job; its end is not checked."""
        self._is_cut_short = True
        self.engine.stop()

    def _check_end(self) -> None:
        """Check the invariants that hold at the end of a run."""
        if self.setting.samples is not None:
            self._check_uses(self.setting.samples)

    @property
    def log(self) -> list[tuple[Event, tuple[Action, ...]]]:
        """Every event with the actions that answered it."""
        return self.coordinator.log

    @property
    def clock_lag_s(self) -> float:
        """How far the coordinator's clock lags behind the engine's."""
        return self.coordinator.clock_lag_s

    @property
    def is_job_complete(self) -> bool:
        """Whether the job has completed."""
        return self.complete_s is not None

    @property
    def workers(self) -> dict[int, SimulatedWorker]:
        """All workers, past and present; reading this dissolves the vectorized group."""
        self.vectorized_group.dissolve()
        return self._workers

    @property
    def step(self) -> int:
        """Steps finished by the furthest worker, or one less while there is a vectorized group."""
        return max(
            self.vectorized_group.step, max(simulated.membership.step for simulated in self._workers.values())
        )

    @property
    def is_undisturbed(self) -> bool:
        """Whether nothing prevents a vectorized group: no outage, no hung worker, a running coordinator."""
        return (
            self._may_vectorize
            and self.lines.has_no_outages
            and not (self._hung_until_s or self.coordinator.is_down)
        )

    def _add(self, worker: int, *, is_new: bool) -> None:
        is_slowed = any(rule.worker in (None, worker) for rule in self.setting.slow)
        stopwatch = ComputeTimeSource(
            self.setting.times,
            worker,
            seed=self.setting.seed,
            slowness=self._slowness if is_slowed and worker < self.setting.world else None,
        )
        simulated = self._workers[worker] = self._make(worker, stopwatch, is_new)
        self._alive += 1
        self.engine.schedule(self.engine.now_s, simulated.join)

    def _make(self, worker: int, stopwatch: ComputeTimeSource, is_new: bool) -> SimulatedWorker:
        return SimulatedWorker(self, worker, stopwatch, is_new=is_new)

    def fail_invariant(self, what: str) -> NoReturn:
        """End the run with a ViolationError."""
        raise ViolationError(f"after {self.engine.now_s:.6f} s: {what}")

    def stop_if_empty(self) -> None:
        """End the run after one more second if no worker is left and none joins later."""
        self._alive -= 1
        if not self.lines.has_no_outages:
            self.lines.update_silences()
        if not self._alive and not self._comes_later():
            self.engine.schedule(self.engine.now_s + 1.0, lambda _: self.engine.stop())

    def _comes_later(self) -> bool:
        now_s = self.engine.now_s
        return any(isinstance(fault, WorkerArrival) and fault.at_s > now_s for fault in self.setting.faults)

    def _tick(self, _: Any) -> None:
        now_s = self.engine.now_s
        if not self.coordinator.is_down:
            self.handle_event(Tick(now_s=now_s - self.clock_lag_s))
            self.coordinator.sync()
        if now_s - self.progress_s > self.setting.stuck_after_s:
            self._check_progress()
        self.engine.schedule(now_s + self.setting.tick_s, self._tick)

    def _check_progress(self) -> None:
        alive = [simulated for simulated in self.workers.values() if simulated.is_alive]
        is_stuck = self.engine.now_s - self.progress_s > self.setting.stuck_after_s
        if is_stuck and not all(
            simulated.is_hung or self._waits_for_the_last_donor(simulated) for simulated in alive
        ):
            doing = ", ".join(f"{simulated.worker} {simulated.activity}" for simulated in alive)
            self.fail_invariant(f"no worker has finished a step since {self.progress_s:.3f} s: {doing[:400]}")

    def _waits_for_the_last_donor(self, simulated: SimulatedWorker) -> bool:
        """Whether the worker waits for the final state from a donor that it cannot reach."""
        is_last = self.is_job_complete and simulated.activity == RECEIVING_STATE
        return (
            is_last
            and self.lines.reachable_s(simulated.membership.donor, simulated.worker) > self.engine.now_s
        )

    # Control messages ----------------------------------------------------------------------------------

    def arrival_s(self, worker: int) -> float:
        """Return when an event that a worker sends now arrives, on the coordinator's clock."""
        simulated = self._workers[worker]
        return max(simulated.uplink_s, self.engine.now_s + simulated.latency_s) - self.clock_lag_s

    def send_event(self, worker: int, event: Event) -> None:
        """Send an event of a worker to the coordinator."""
        simulated = self._workers[worker]
        at_s = self.engine.now_s + simulated.latency_s
        if at_s < simulated.uplink_s:
            at_s = simulated.uplink_s
        simulated.uplink_s = at_s
        if self._may_resend and self.is_exactly_once:
            simulated.sent_events.append(event)
        self.schedule_arrival(worker, event, at_s)

    def send_ready(
        self,
        worker: int,
        generation: int,
        epoch: int,
        step: int,
        round: int,
        compute_s: float,
        samples: int = 0,
        blocks: tuple[int, ...] = (),
    ) -> None:
        """Send a Ready: the same as `send_event`, but faster."""
        simulated = self._workers[worker]
        at_s = self.engine.now_s + simulated.latency_s
        if at_s < simulated.uplink_s:
            at_s = simulated.uplink_s
        simulated.uplink_s = at_s
        ready: Ready = object.__new__(Ready)  # three times as fast as the dataclass's constructor
        object.__setattr__(
            ready,
            "__dict__",
            {
                "now_s": at_s - self.clock_lag_s,
                "worker": worker,
                "generation": generation,
                "epoch": epoch,
                "step": step,
                "round": round,
                "compute_s": compute_s,
                "samples": samples,
                "blocks": blocks,
            },
        )
        simulated.last_ready = ready
        if self._may_resend and self.is_exactly_once:
            simulated.sent_events.append(ready)
        if worker not in self.received_early:
            self.schedule_arrival(worker, ready, at_s)

    def schedule_arrival(self, worker: int, event: Event, at_s: float) -> None:
        """Schedule the arrival of an event at the coordinator."""
        self.engine.schedule(at_s, self._receive, (worker, self.coordinator.incarnation, event))

    def _receive(self, message: tuple[int, int, Event]) -> None:
        worker, incarnation, event = message
        coordinator = self.coordinator
        if incarnation != coordinator.incarnation or coordinator.is_down:
            return
        if self._may_resend and self.is_exactly_once:
            sent, recorded = self._workers[worker].sent_events, coordinator.recorded[worker]
            if recorded == len(sent) or event is not sent[recorded]:
                return  # a duplicate, or out of order
            coordinator.recorded[worker] += 1
        if type(event) is Ready and self.complete_s is None:
            self.ready_s[worker] = self.engine.now_s
        if type(event) is Joined:
            if worker in self.coordinator.joined:
                return
            if self.stopped is not None or self.is_job_complete:
                self.workers[worker].end()
                return
            self.coordinator.joined.add(worker)
            self.handle_event(event)
            if self._hung_until_s or not self.lines.has_no_outages:
                self.lines.update_silences()
        elif worker in self.coordinator.joined:
            self.handle_event(event)
        if type(event) is Left and self.is_exactly_once:
            self.coordinator.sync()
            self.engine.schedule(
                self.engine.now_s + self._workers[worker].latency_s, self._end_worker, worker
            )

    def _end_worker(self, worker: int) -> None:
        self._workers[worker].end()

    def handle_event(self, event: Event) -> bool:
        """Pass an event to the policies and send their actions; return whether there were any."""
        actions = self.coordinator.handle(event)
        if actions:
            self._apply_actions(actions)
        return bool(actions)

    def _apply_actions(self, actions: list[Action]) -> None:
        common = []
        for action in actions:
            self._check_action(action)
            if isinstance(action, ToAllWorkers):
                common.append(action)
                self.coordinator.keep_last(action)
            elif not isinstance(action, _NOT_SIMULATED):
                for worker in self._recipients(action):
                    self._send(worker, (action,))
            if isinstance(action, RejectPeer):
                self.coordinator.joined.discard(int(action.peer.removeprefix("worker-")))
        if common:
            for worker in sorted(self.coordinator.joined):
                self._send(worker, tuple(common))

    def _recipients(self, action: Action) -> list[int]:
        """Return the workers that receive an action, ascending."""
        joined, named = self.coordinator.joined, action.named_recipients
        if named is not None:
            return sorted([worker for worker in named if worker in joined])
        return [worker for worker in sorted(joined) if action.is_for(Recipient(f"worker-{worker}", worker))]

    def _check_action(self, action: Action) -> None:
        """Note what an action changes in the job, and check what must hold then."""
        match action:
            case AbortJob():
                self.stopped = action
                self._check_stop(action)
            case Group():
                self._check(self._group_violation(action))
                self.groups.append((self.engine.now_s, action))
                self.membership_changed_s = self.engine.now_s
            case Halt():
                self._check(halt_violation(action, self.coordinator.last_actions))
                self.membership_changed_s = self.engine.now_s
            case ConsumedSamples():
                self._check_saved(action)
            case JobComplete():
                self.complete_s = self.engine.now_s

    def _send(self, worker: int, actions: tuple[Action, ...]) -> None:
        number = 0
        if self._may_resend and self.is_exactly_once:
            number = len(self.coordinator.sent[worker])
            self.coordinator.sent[worker].append(actions)
        self._schedule_delivery(worker, number, actions)

    def _schedule_delivery(self, worker: int, number: int, actions: tuple[Action, ...]) -> None:
        simulated = self._workers[worker]
        at_s = self.engine.now_s + simulated.latency_s
        if at_s > simulated.downlink_s:
            simulated.downlink_s = at_s
        self.engine.schedule(
            simulated.downlink_s, self._deliver, (simulated, self.coordinator.incarnation, number, actions)
        )

    def _deliver(self, message: tuple[SimulatedWorker, int, int, tuple[Action, ...]]) -> None:
        worker, incarnation, number, actions = message
        if self.vectorized_group.is_formed:
            if worker.worker in self.vectorized_group and all(
                isinstance(action, EndEpoch) for action in actions
            ):
                return  # members ignore it
            self.vectorized_group.dissolve()
        if incarnation != self.coordinator.incarnation or not worker.is_alive:
            return
        if self._may_resend and self.is_exactly_once:
            if number != worker.received_messages:
                return  # a duplicate, or out of order
            worker.received_messages += 1
        worker.on_actions(actions)

    # What must hold ------------------------------------------------------------------------------------

    def _check(self, violation: str | None) -> None:
        if violation is not None:
            self.fail_invariant(violation)

    def _group_violation(self, group: Group) -> str | None:
        before, joined = self.groups[-1][1] if self.groups else None, self.coordinator.joined
        silent = [member for member in joined if self.lines.silence_s(member, COORDINATOR) > _REPORTED_S]
        return group_violation(group, before, joined, silent)

    def _check_stop(self, stop: AbortJob) -> None:
        if not self.groups or self.is_lockstep:
            return
        group = self.groups[-1][1]
        for worker in sorted(self.coordinator.joined.intersection(group.members)):
            simulated = self.workers[worker]
            if simulated.is_alive and simulated.membership.is_member and not simulated.has_left:
                self.fail_invariant(
                    f"the job was stopped though worker {worker} has the state: {stop.reason}"
                )

    def _check_uses(self, samples: SampleSetting) -> None:
        """Check that no sample was used twice, and that a job that ended well used each one."""
        assert isinstance(self.problem, SampleTrackingProblem)
        workers = self._workers.values()
        for simulated in workers:
            if simulated.state is not None:
                uses = self.problem.sample_uses(simulated.latest_state)
                self._check(repeated_use(simulated.worker, uses))
        members = self.groups[-1][1].members if self.groups else ()
        if self.is_job_complete:
            final = [simulated for simulated in workers if simulated.has_left and not simulated.is_leaving]
        else:
            final = [
                simulated
                for simulated in workers
                if simulated.worker in members and simulated.membership.is_member
            ]
            final = [simulated for simulated in final if simulated.is_alive and not simulated.is_hung]
        if self.stopped is not None or not final or samples.break_after_rounds is not None:
            return
        furthest = max(final, key=lambda simulated: simulated.membership.round)
        uses = self.problem.sample_uses(furthest.latest_state)
        for policy in self.coordinator.policies:
            state = policy.state_dict()
            if "assigner" in state:
                scheduler = BlockScheduler()
                scheduler.load_state_dict(state["assigner"]["scheduler"])
                is_complete = self.is_job_complete and samples.rounds is None
                self._check(count_violation(scheduler, uses, samples, is_complete=is_complete))

    def _check_saved(self, answer: ConsumedSamples) -> None:
        """Check that a saved state contains exactly the samples that the policies attribute to it."""
        samples = self.setting.samples
        assert isinstance(self.problem, SampleTrackingProblem)
        assert samples is not None
        if not answer.is_current:
            return
        uses = self.problem.sample_uses(self._workers[answer.worker].saved_states[answer.round])
        self._check(checkpoint_violation(answer, uses, samples))

    # Exchanges -----------------------------------------------------------------------------------------

    def exchange(self, worker: int) -> None:
        """Enter a worker into its next exchange."""
        simulated = self._workers[worker]
        membership = simulated.membership
        group = membership.group
        assert group is not None
        exchange_id = membership.exchange_id
        membership.exchange_id += 1
        exchange = cast(SimulatedExchange | None, self.exchanges.get(exchange_id))
        if exchange is None:
            exchange = self.open_exchange(group, exchange_id, membership.step, membership.round)
        simulated.exchange = exchange
        exchange.arrive(simulated)

    def open_exchange(self, group: Group, exchange_id: int, step: int, round: int) -> SimulatedExchange:
        """Return a new exchange without any arrived member."""
        sign = (group.generation, group.members)
        if self._exchange_ids.setdefault(exchange_id, sign) != sign:
            self.fail_invariant(
                f"exchange {exchange_id} of {sign} was used by {self._exchange_ids[exchange_id]}"
            )
        exchange = SimulatedExchange(self, group, exchange_id, step, round, self.vectorized_group.form)
        self.exchanges[exchange_id] = exchange
        return exchange

    def close_exchange(self, exchange_id: int) -> None:
        """Forget an exchange that has ended for all of its members."""
        self.exchanges.pop(exchange_id, None)

    def blockers(self, members: tuple[int, ...]) -> list[object]:
        """Return what blocks an exchange among these members: hung ones, and outages between them."""
        hung = [self._workers[worker] for worker in self._hung_until_s if worker in members]
        return [*hung, *(outage for outage in self.lines.outages if outage.separates_members(members))]

    def block_exchanges(self, outage: Outage) -> None:
        """Block the exchanges whose present members an outage separates."""
        for exchange in self.exchanges.values():
            present = tuple(worker.worker for worker in exchange.workers if worker.exchange is exchange)
            if outage.separates_members(present):
                exchange.block(outage)

    def unblock_exchanges(self, outage: Outage) -> None:
        """Let the exchanges continue that an outage has blocked."""
        for exchange in list(self.exchanges.values()):
            exchange.unblock(outage)

    def send_state(self, donor: int, joiner: int, place: int, transfer: StateTransfer) -> None:
        """Send a donor's state to the joiner at index `place`; transfers are sequential."""
        transfer_s = self.network.transfer_s(3 * self.setting.size_bytes, donor, joiner)
        self.engine.schedule(
            self.engine.now_s + (place + 1) * transfer_s,
            self._deliver_state,
            (self._workers[donor], joiner, transfer),
        )

    def _deliver_state(self, message: tuple[SimulatedWorker, int, StateTransfer]) -> None:
        donor, joiner, transfer = message
        self.vectorized_group.dissolve()
        if not (donor.is_alive or donor.has_left) or not self._workers[joiner].is_alive:
            return
        free_s = self.lines.reachable_s(donor.worker, joiner)
        if donor.is_hung:
            free_s = max(free_s, self._hung_until_s[donor.worker])
        if free_s > self.engine.now_s:
            again_s = free_s + self.network.message_s(donor.worker, joiner)
            self.engine.schedule(again_s, self._deliver_state, message)
            return
        self._workers[joiner].on_state(transfer)

    # Faults --------------------------------------------------------------------------------------------

    def _inject_fault(self, fault: Fault) -> None:
        self.vectorized_group.dissolve()
        now_s = self.engine.now_s
        named = (
            fault.workers if isinstance(fault, WorkerDeath | Partition) else (getattr(fault, "worker", None),)
        )
        if not isinstance(fault, WorkerArrival | CoordinatorRestart) and not self._workers.keys() & set(
            named
        ):
            return  # a newcomer that arrived after the end of the job
        match fault:
            case WorkerDeath():
                for worker in fault.workers:
                    self.kill_worker(worker, self.setting.detect_s, "the connection was closed")
            case WorkerHang():
                self._hang_worker(fault)
            case Delay():
                simulated = self._workers[fault.worker]
                if self.chance.random() < 0.5:
                    simulated.uplink_s = max(simulated.uplink_s, now_s + fault.duration_s)
                else:
                    simulated.downlink_s = max(simulated.downlink_s, now_s + fault.duration_s)
            case LinkCut():
                nodes, peers = frozenset(self._process_workers(fault.worker)), frozenset((_node(fault.peer),))
                if fault.lost == "peer":
                    nodes, peers = peers, nodes
                self.lines.cut(nodes, peers, fault.duration_s, is_one_way=fault.lost != "both")
            case Partition():
                self.lines.cut(frozenset(fault.workers), None, fault.duration_s, is_one_way=False)
            case ConnectionReset():
                self.lines.reset(
                    frozenset(self._process_workers(fault.worker)), frozenset((_node(fault.peer),))
                )
            case WorkerArrival():
                if self.stopped is None and any(
                    simulated.is_alive for simulated in self._workers.values()
                ):  # else the job is over
                    self._add(fault.worker, is_new=True)
            case WorkerDeparture():
                self._workers[fault.worker].is_leaving = True
            case CoordinatorRestart():
                self._restart(fault)
            case _:
                assert_never(fault)

    def _process_workers(self, worker: int) -> tuple[int, ...]:
        """Return the workers that share a process with this one, and so its connections."""
        return (worker,)

    def kill_worker(self, worker: int, after_s: float, cause: str) -> None:
        """End a worker; the coordinator learns of it after `after_s`."""
        simulated = self.workers.get(worker)
        if simulated is not None and simulated.is_alive:
            simulated.end()
            self.engine.schedule(
                max(simulated.uplink_s, self.engine.now_s + after_s), self._lose_worker, (worker, cause)
            )

    def _lose_worker(self, loss: tuple[int, str]) -> None:
        worker, cause = loss
        if self.coordinator.is_down:
            return  # the next coordinator detects it
        self.vectorized_group.dissolve()
        self.coordinator.lost.add(worker)
        if worker in self.coordinator.joined:
            self.coordinator.joined.discard(worker)
            self.handle_event(Lost(now_s=self.engine.now_s - self.clock_lag_s, worker=worker, cause=cause))

    def _hang_worker(self, fault: WorkerHang) -> None:
        simulated, now_s = self._workers[fault.worker], self.engine.now_s
        if not simulated.is_alive or simulated.is_hung:
            return
        self.hung_at_s[fault.worker] = now_s
        self._hung_until_s[fault.worker] = now_s + fault.duration_s
        simulated.hang()
        self.lines.update_silences()
        self.engine.schedule(now_s + fault.duration_s, self._resume_worker, simulated)

    def _resume_worker(self, simulated: SimulatedWorker) -> None:
        del self._hung_until_s[simulated.worker]
        if not simulated.is_alive:
            return
        simulated.resume(is_state_first=self.chance.random() < 0.5)
        self.lines.update_silences()
        self.reconnect_reachable()

    def reconnect_reachable(self, _: Any = None) -> None:
        """Reconnect workers that the coordinator reaches again; those that it gave up end."""
        for simulated in self.running_workers():
            if not (simulated.is_hung or self._is_cut_off(simulated.worker)):
                if simulated.worker in self.coordinator.lost:
                    simulated.end()
                elif simulated.worker in self.coordinator.unconnected and not self.coordinator.is_down:
                    self._reconnect(simulated)

    def _is_cut_off(self, worker: int) -> bool:
        return any(outage.separates(worker, COORDINATOR) for outage in self.lines.outages)

    # What nodes observe of each other ------------------------------------------------------------------

    def running_workers(self) -> list[SimulatedWorker]:
        """Return all running workers, hung ones included, in the order of their ids."""
        return [simulated for _, simulated in sorted(self._workers.items()) if simulated.is_alive]

    def is_running(self, worker: int) -> bool:
        """Whether the worker runs; a hung one does."""
        return worker in self._workers and self._workers[worker].is_alive

    def is_hung(self, worker: int) -> bool:
        """Whether the worker hangs and sends nothing."""
        return worker in self._hung_until_s

    def is_present(self, worker: int) -> bool:
        """Whether the coordinator has a connection to the worker."""
        return worker in self.coordinator.joined

    def is_observing(self, node: int) -> bool:
        """Whether a worker or the coordinator is able to notice events now."""
        if node == COORDINATOR:
            return not self.coordinator.is_down
        return self.is_running(node) and not self.is_hung(node)

    def session_groups(self, worker: int) -> set[tuple[int, ...]]:
        """Return the member tuples of all groups in which a worker has exchanged anything."""
        return self._workers[worker].session_groups

    def on_new_sessions(self) -> None:
        """Note that workers have new sessions, on which they detect silence from now on."""
        if self._hung_until_s or self.lines.outages:
            self.lines.update_silences()

    def report_reachability(self, node: int, event: PeerUnreachable | PeerReachable) -> None:
        """Pass a report on reachability to the policies: a worker sends it, the coordinator observes it."""
        self.vectorized_group.dissolve()
        if node == COORDINATOR:
            self.handle_event(replace(event, now_s=self.engine.now_s - self.clock_lag_s))
            return
        self.send_event(node, replace(event, now_s=self.arrival_s(node)))

    def give_up_worker(self, worker: int, cause: str) -> None:
        """Let the coordinator give up a worker."""
        self._lose_worker((worker, cause))

    def _restart(self, fault: CoordinatorRestart) -> None:
        if self.coordinator.is_down:
            return
        self.coordinator.kill()
        self.lines.update_silences()  # a killed coordinator notices nothing
        self.engine.schedule(self.engine.now_s + fault.duration_s, self._restart_coordinator)

    def _restart_coordinator(self, _: Any) -> None:
        """Replay the log and reconnect all live workers, which resend what may have been lost."""
        coordinator = self.coordinator
        coordinator.restart(self.engine.now_s)
        for worker in sorted(self._workers):
            simulated = self._workers[worker]
            if not simulated.is_alive:
                self._lose_worker((worker, "it did not connect again"))
            elif simulated.is_hung or self._is_cut_off(worker):
                self.coordinator.unconnected.add(worker)
            else:
                self._reconnect(simulated)
        self.lines.adopt_reports(coordinator.unreachable_peers(None))

    def _reconnect(self, simulated: SimulatedWorker) -> None:
        self.coordinator.unconnected.discard(simulated.worker)
        if self.is_exactly_once:
            self._resend_missed(simulated)
            return
        has_joined = self.coordinator.has_logged_join(simulated.worker)
        simulated.uplink_s = simulated.downlink_s = self.engine.now_s + self.chance.random() * 0.01
        if not has_joined:
            self.coordinator.joined.discard(simulated.worker)
            simulated.send_joined()
            return
        self._send(simulated.worker, tuple(self.coordinator.last_actions))
        for event in (simulated.last_ready, simulated.last_halted, simulated.last_finished):
            if event is not None:
                self.send_event(simulated.worker, replace(event, now_s=self.arrival_s(simulated.worker)))
        reports = self.lines.open_reports(simulated.worker)
        for peer in sorted(self.coordinator.unreachable_peers(simulated.worker)):
            if all(report.peer != peer for report in reports):
                self.report_reachability(
                    simulated.worker, PeerReachable(now_s=0.0, worker=simulated.worker, peer=peer)
                )
        for report in reports:
            self.report_reachability(simulated.worker, report)

    def _resend_missed(self, simulated: SimulatedWorker) -> None:
        """Resend like the runtime: each event is recorded once, each action received once, in order."""
        simulated.uplink_s = simulated.downlink_s = self.engine.now_s + self.chance.random() * 0.01
        recorded = self.coordinator.recorded[simulated.worker]
        if not recorded:
            self.coordinator.joined.discard(simulated.worker)
        sent_events, simulated.sent_events = simulated.sent_events, simulated.sent_events[:recorded]
        for event in sent_events[recorded:]:
            self.send_event(simulated.worker, replace(event, now_s=self.arrival_s(simulated.worker)))
        sent = self.coordinator.sent[simulated.worker]
        for number in range(simulated.received_messages, len(sent)):
            self._schedule_delivery(simulated.worker, number, sent[number])


def _node(peer: int | None) -> int:
    return COORDINATOR if peer is None else peer
