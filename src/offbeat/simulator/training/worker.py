"""A simulated worker: a model of the runtime's session in virtual time, with the same `GroupMembership`.

Nothing here decides on membership.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

from offbeat.events import (
    AbortJob,
    Action,
    CheckpointQuery,
    EndEpoch,
    Event,
    Finished,
    Group,
    Halt,
    Halted,
    JobComplete,
    Joined,
    Left,
    PeerList,
    Ready,
    RejectPeer,
    SamplesRequested,
    SkipRound,
)
from offbeat.policies import WorkerProtocol
from offbeat.policies.membership.group_membership import ExchangeDecision
from offbeat.policies.membership.group_protocol import GroupProtocol
from offbeat.simulator.core.network_outages import COORDINATOR
from offbeat.simulator.core.times import ComputeTimeSource
from offbeat.simulator.training.interface import Simulation, StateTransfer
from offbeat.simulator.training.sample_loop import LoopActivity, SimulatedLoop

COMPUTING, EXCHANGING, APPLYING = "computing", "exchanging", "applying"
WAITING, RECEIVING_STATE, JOINING, FINISHED, ENDED = (
    "waiting",
    "receiving a state",
    "joining",
    "finished",
    "ended",
)
REQUESTING, LEAVING = "requesting samples", "leaving"
CATCHING_UP = "waiting for the end of a skipped round"
_SAVES_EVERY = 13  # steps, where samples are assigned


class ExchangeUnderWay(Protocol):
    """An exchange that a worker has entered.

    Attributes:
        members: all its members, by id.
        exchange_id: a number that no other exchange has.
    """

    members: tuple[int, ...]
    exchange_id: int

    def block(self, cause: object) -> None:
        """Keep members from ending; `cause` is a worker that hangs or is dead, or an outage."""

    def unblock(self, cause: object) -> None:
        """Remove a cause; when none is left, the held members end."""


class Exchange(ExchangeUnderWay, Protocol):
    """What members require of an exchange of gradients.

    Attributes:
        mean: the result for every member.
        contributions: assigned blocks in the mean, per member; empty where no samples are assigned.
    """

    mean: Any
    contributions: Sequence[tuple[int, int]]


class SimulatedWorker:
    """One worker and its replica.

    Attributes:
        protocol: the runtime's own worker's side of the strategy.
        activity: the current activity, one of the constants above.
        state: the replica; None in a newcomer that has not received one yet.
        weight: 0 where the gradients belong to other parameters than the group's, else 1, or where samples
            are assigned, its samples in units of the batch size.
        steps_outside: computations since it was last a member.
        steps_taken: optimizer steps as a member.
        contributed_blocks: assigned blocks behind the gradients.
        active_s: when it last had gradients or finished a step.
        gradients_computed: gradients that it has computed.
        stopwatch: durations of its computations.
        loop: its progress through the samples, None where none are assigned.
        saved_states: saved states by finished rounds, where samples are assigned.
        sent_events: events sent to the coordinator, where messages are numbered.
        received_messages: messages received from the coordinator.
        session_groups: the members of all groups in which it has exchanged anything.
        place: where its process runs.
        latency_s: of messages between it and the coordinator.

    Size: it is one state machine. Each message and each end of a computation reads and changes the activity,
    the exchange, the gradients and the connection together, and a vectorized group restores all of them.
    """

    place = "simulated"

    def __init__(
        self, cluster: Simulation, worker: int, stopwatch: ComputeTimeSource, *, is_new: bool
    ) -> None:
        self.cluster = cluster
        self.worker = worker
        protocol = GroupProtocol(worker)
        self.protocol: WorkerProtocol = protocol
        self.membership = protocol.membership
        self.activity = JOINING
        self.state: Any = None if is_new else cluster.problem.initial_state()
        self.gradient: Any = None
        self.weight = 1.0
        self.contributed_blocks = 0
        self.exchange: ExchangeUnderWay | None = None
        self.is_hung = False
        self.is_leaving = False
        self.steps_outside = 0
        self.steps_taken = 0
        self.active_s = cluster.engine.now_s
        self.latency_s = cluster.network.message_s(worker, COORDINATOR)
        self.uplink_s = self.downlink_s = 0.0  # when the last message to and from the coordinator arrives
        self.last_ready: Ready | None = None
        self.last_halted: Halted | None = None
        self.has_started = self.has_left = False
        self.last_finished: Finished | None = None
        self._is_job_complete = False
        self._is_new = is_new
        self.stopwatch = stopwatch
        samples = cluster.setting.samples
        self.loop = (
            None
            if samples is None
            else SimulatedLoop(samples, self.protocol.block_queue, self.membership, self._send_request)
        )
        self.saved_states: dict[int, Any] = {}
        self.sent_events: list[Event] = []
        self.received_messages = 0
        self._means: list[Any] = []  # of the rounds of the step under way
        self._missed: list[Any] = []  # means of skipped rounds, a step each, that the loop has not applied
        self._due_skip: SkipRound | None = None  # the last one whose grace has passed
        self._resume_loop: Callable[[], None] = self._send_ready  # once no skipped round is under way
        self.membership.may_skip = cluster.setting.rounds_per_step == 1
        self.gradients_computed = 0
        self._compute_s = 0.0
        self._busy_until_s = 0.0
        self._computation = (
            0  # number of its current computation; the end of one with an older number is ignored
        )
        self._donated_to: Group | None = None  # the last group to whose joiners it sent its state
        self._received: StateTransfer | None = None
        self.session_groups: set[tuple[int, ...]] = set()
        self._queue: deque[tuple[bool, Callable[[Any], None], Any]] = deque()

    @property
    def is_alive(self) -> bool:
        """Whether it runs; a hung worker does."""
        return self.activity != ENDED

    # Input; a hung worker processes it when it resumes ------------------------------------------------

    def join(self, _: Any = None) -> None:
        """Ask to join."""
        if self.is_alive:
            self.send_joined()

    def send_joined(self) -> None:
        """Send the request to join."""
        cluster = self.cluster
        cluster.send_event(
            self.worker,
            Joined(
                now_s=cluster.arrival_s(self.worker),
                worker=self.worker,
                world=cluster.setting.world,
                peer=f"worker-{self.worker}",
                location=self.place,
                addresses=(),
                model_signature=(),
                strategy="",
                host=f"host-{self.worker % cluster.setting.hosts}",
            ),
        )

    def on_actions(self, actions: tuple[Action, ...]) -> None:
        """Process actions of the coordinator."""
        if self.is_hung:
            self._queue.append((False, self.on_actions, actions))
            return
        for action in actions:
            if self.activity == ENDED:
                return
            self._apply_action(action)
        if self.activity == REQUESTING:
            self._compute()

    def _apply_action(self, action: Action) -> None:
        match action:
            case PeerList():
                self.has_started = True
            case EndEpoch():
                self._end_epoch(action.epoch)
            case JobComplete():
                self._is_job_complete = True
                self._leave()
            case AbortJob() | RejectPeer():
                self.end()
            case _:
                self._apply_to_protocol(action)

    def _apply_to_protocol(self, action: Action) -> None:
        """Apply an action of the strategy, send what answers it, and carry out what follows."""
        answers = self.answer(action)
        match action:
            case Halt() if answers:
                self.last_halted = cast(Halted, answers[0])
                self._on_halt(action)
            case Group():
                self._on_group()
                self._skip_if_due()
            case SkipRound():
                now_s = self.cluster.engine.now_s
                self.cluster.engine.schedule(now_s + action.grace_s, self._end_grace, action)

    def answer(self, action: Action) -> list[Event]:
        """Pass an action to the worker's protocol; send and return its answers."""
        answers = self.protocol.handle(action)
        if not answers:
            return answers
        cluster = self.cluster
        answers = [replace(answer, now_s=cluster.arrival_s(self.worker)) for answer in answers]
        for answer in answers:
            cluster.send_event(self.worker, answer)
        return answers

    def on_state(self, transfer: StateTransfer) -> None:
        """Receive a donor's state."""
        if self.is_hung:
            self._queue.append((True, self.on_state, transfer))
            return
        if self._received is None or self._received.generation < transfer.generation:
            self._received = transfer
        if self._is_job_complete:
            self._leave()
        elif self.activity in (RECEIVING_STATE, JOINING):
            self._continue()

    def on_mean(self, exchange: Exchange) -> None:
        """Receive the mean of an exchange."""
        if self.is_hung:
            self._queue.append((True, self.on_mean, exchange))
            return
        if self.exchange is not exchange:
            return
        cluster = self.cluster
        self.exchange = None
        if self.membership.is_skipping:
            self._end_skipped_round(exchange)
            return
        if not self.membership.finish_round(exchange.contributions):
            cluster.fail_invariant(f"worker {self.worker} continues an exchange that it had abandoned")
        self._means.append(exchange.mean)
        if len(self._means) < cluster.setting.rounds_per_step:
            self._compute()
        elif cluster.setting.apply_s:
            self.activity = APPLYING
            self._compute_for(cluster.setting.apply_s)
        else:
            self._apply()

    def hang(self) -> None:
        """Stop all activity."""
        self.is_hung = True
        self._computation += 1
        if self.exchange is not None:
            self.exchange.block(self)

    def resume(self, *, is_state_first: bool) -> None:
        """Resume, and process queued input: that of other workers first, or all in order of arrival.

        An interrupted computation takes the time that was left of it when the worker hung.
        """
        self.is_hung = False
        queue = list(self._queue)
        self._queue.clear()
        if is_state_first:
            queue.sort(key=lambda entry: not entry[0])
        before, exchange = self._computation, self.exchange
        for _, call, argument in queue:
            call(argument)
        if exchange is not None:  # also where its own end of it was in the queue
            exchange.unblock(self)
        if self._computation == before and self.activity in (COMPUTING, APPLYING):
            self._compute_for(max(0.0, self._busy_until_s - self.cluster.hung_at_s[self.worker]))

    def end(self) -> None:
        """End the worker."""
        if self.activity == ENDED:
            return
        if self.exchange is not None:
            self.exchange.block(self)
        self.exchange = None
        self._computation += 1
        self.activity = ENDED
        self.cluster.stop_if_empty()

    def can_vectorize(self, exchange: Exchange) -> bool:
        """Whether it has begun this exchange, and the next one follows if nothing else happens."""
        cluster, membership = self.cluster, self.membership
        return (
            self.exchange is exchange
            and membership.group is self._donated_to
            and not membership.is_change_pending
            and not membership.is_skipping
            and membership.step + 1 < cluster.setting.steps_max
            and self.weight == 1.0
            and not self.is_leaving
            and self.uplink_s <= cluster.engine.now_s + self.latency_s
        )

    def fast_forward(
        self,
        exchange: Exchange,
        *,
        rounds: int,
        state: Any,
        gradient: Any,
        done_s: float,
        ready: Ready,
    ) -> None:
        """Advance to the state of a worker that has begun this exchange, `rounds` after its last one.

        Args:
            exchange: the exchange that it has begun.
            rounds: rounds finished since its last one; a step each.
            state: its state before the exchange.
            gradient: its gradient in the exchange.
            done_s: when it had computed the gradient.
            ready: the Ready that it sent then.
        """
        membership = self.membership
        membership.step, membership.round = ready.step, ready.round
        membership.exchange_id = exchange.exchange_id + 1
        self.exchange = exchange
        self.state, self.gradient = state, gradient
        self.steps_taken += rounds
        self.gradients_computed += rounds
        self.active_s = self._busy_until_s = done_s
        self.uplink_s = done_s + self.latency_s
        self.last_ready = ready

    # The loop ------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        cluster = self.cluster
        loop = self.loop
        if loop is not None:
            following = loop.next_activity()
            if following is not LoopActivity.BATCH:
                self._act_between_batches(loop, following)
                return
        self.activity = COMPUTING
        compute_s = self.stopwatch.next_s()
        if not self.stopwatch.is_never_slowed:
            step, epoch_steps = self.membership.step + self.steps_outside, cluster.setting.epoch_steps
            epoch, step_in_epoch = divmod(step, epoch_steps)
            if loop is not None:
                epoch, step_in_epoch = loop.epoch, int(loop.epoch_share * epoch_steps)
            compute_s *= self.stopwatch.slowdown(epoch, step_in_epoch, epoch_steps, step)
        self._compute_s += compute_s
        self._compute_for(compute_s)

    def _act_between_batches(self, loop: SimulatedLoop, activity: LoopActivity) -> None:
        """Do what follows in the loop where that is no batch."""
        if activity is LoopActivity.WAIT:
            self.activity = REQUESTING
        elif activity is LoopActivity.OVER:
            self._finish(loop.epoch - 1)
        elif activity is LoopActivity.ROUND:
            self._send_ready()
        else:
            self._wait_for_epoch_mean(loop.epoch - 1)

    def _compute_for(self, for_s: float) -> None:
        engine = self.cluster.engine
        self._computation += 1
        self._busy_until_s = until_s = engine.now_s + for_s
        engine.schedule(until_s, self._end_busy, self._computation)

    def _end_busy(self, number: int) -> None:
        if number != self._computation:
            return
        if self.activity == APPLYING:
            self._apply()
            return
        self.gradients_computed += 1
        if self.loop is None or self.loop.is_round_complete():
            self._send_ready()
        else:
            self._compute()

    def _send_ready(self) -> None:
        cluster, membership, loop = self.cluster, self.membership, self.loop
        self.active_s = cluster.engine.now_s
        if not self._may_contribute(self._send_ready):
            return
        self.weight = 1.0
        if loop is None:
            self.gradient = cluster.problem.gradient(self.state, self.worker, self.gradients_computed - 1)
            self._catch_up()
            epoch = (membership.step + self.steps_outside) // cluster.setting.epoch_steps
            cluster.send_ready(
                self.worker, membership.generation, epoch, membership.step, membership.round, self._compute_s
            )
        else:
            self.gradient = cluster.problem.gradient(
                self.state, self.worker, self.gradients_computed - 1, loop.blocks
            )
            self._catch_up()
            samples = sum(block.samples for block in loop.blocks)
            self.weight = samples / loop.samples.batch_size
            blocks = loop.contribute()
            self.contributed_blocks = len(blocks)
            self.last_ready = Ready(
                now_s=cluster.arrival_s(self.worker),
                worker=self.worker,
                generation=membership.generation,
                epoch=loop.epoch,
                step=membership.step,
                round=membership.round,
                compute_s=self._compute_s,
                samples=samples,
                blocks=blocks,
            )
            cluster.send_event(self.worker, self.last_ready)
        self._compute_s = 0.0
        self._continue()

    def _send_request(self, request: SamplesRequested) -> None:
        self.cluster.send_event(self.worker, replace(request, now_s=self.cluster.arrival_s(self.worker)))

    def _continue(self) -> None:
        """Decide what to do with the gradients or, in a newcomer, whether to receive a state."""
        cluster, membership = self.cluster, self.membership
        turn = membership.begin_exchange()
        if membership.group is not self._donated_to:
            self._donate_state()
        if turn in (ExchangeDecision.EXCHANGE, ExchangeDecision.FETCH_STATE):
            self._open_sessions()
        if turn is ExchangeDecision.EXCHANGE:
            self.steps_outside = 0
            self.activity = EXCHANGING
            cluster.exchange(self.worker)
        elif turn is ExchangeDecision.WAIT:
            self.activity = JOINING if self.gradient is None and self.state is None else WAITING
        elif turn is ExchangeDecision.FETCH_STATE:
            self._adopt_state()
        elif self.state is None:
            self.activity = JOINING
        else:
            self.gradient = None
            self._means.clear()
            membership.finish_step()
            self.steps_outside = 0 if membership.is_member else self.steps_outside + 1
            self._count_step()

    # Skipped rounds ------------------------------------------------------------------------------------

    @property
    def exchanged_weight(self) -> float:
        """The weight of its gradients in the exchange under way."""
        return 0.0 if self.membership.is_skipping else self.weight

    @property
    def exchanged_blocks(self) -> int:
        """The assigned blocks behind its gradients in the exchange under way."""
        return 0 if self.membership.is_skipping else self.contributed_blocks

    @property
    def latest_state(self) -> Any:
        """Its state after the steps of the rounds that it has skipped."""
        state = self.state
        for mean in self._missed:
            state = self.cluster.problem.step(state, mean)
        return state

    def _end_grace(self, skip: SkipRound) -> None:
        if self.is_hung:
            self._queue.append((False, self._end_grace, skip))
        else:
            self._due_skip = skip
            self._skip_if_due()

    def _skip_if_due(self) -> None:
        """Enter the exchange of a round that is skipped, while the loop does something else."""
        membership = self.membership
        is_due = self._due_skip is not None and membership.skip is self._due_skip
        if is_due and membership.begin_skipped_round():
            self.cluster.exchange(self.worker)

    def _end_skipped_round(self, exchange: Exchange | None) -> None:
        """Keep the mean of a skipped round for the loop; it has failed if there is no exchange."""
        contributions = None if exchange is None else exchange.contributions
        if self.membership.finish_skipped_round(contributions) and exchange is not None:
            self._missed.append(exchange.mean)
        if self.activity == CATCHING_UP:
            self._resume_loop()
        else:
            self._skip_if_due()

    def _may_contribute(self, resume: Callable[[], None]) -> bool:
        """Let no further round be skipped; where the loop has to wait, return False, and `resume` later."""
        if self.membership.begin_contribution():
            return True
        self.activity, self._resume_loop = CATCHING_UP, resume
        return False

    def _catch_up(self) -> None:
        """Apply the steps of the rounds that were skipped."""
        self.state = self.latest_state
        self._missed.clear()

    def _open_sessions(self) -> None:
        """Open sessions with all members of the group."""
        group = self.membership.group
        assert group is not None
        if group.members not in self.session_groups:
            self.session_groups.add(group.members)
            self.cluster.on_new_sessions()

    def _adopt_state(self) -> None:
        received, membership = self._received, self.membership
        if received is None or membership.group is None or received.generation != membership.group.generation:
            self.activity = RECEIVING_STATE
            return
        self.state, self._received = received.state, None
        membership.on_state_received(round=received.round)
        self.weight, self.contributed_blocks = 0.0, 0
        self.steps_outside = 0
        self._means.clear()
        if self.gradient is None:  # a newcomer
            if self.loop is not None:
                self.loop.enter_epoch(received.epoch)
            self._compute()
        else:
            self._continue()

    def _apply(self) -> None:
        cluster, membership = self.cluster, self.membership
        for mean in self._means:
            self.state = cluster.problem.step(self.state, mean)
        self._means.clear()
        membership.finish_step()
        self.steps_taken += 1
        cluster.progress_s = self.active_s = cluster.engine.now_s
        if membership.group is not self._donated_to:
            self._donate_state()
        self._count_step()

    def _count_step(self) -> None:
        """Compute the next step, unless this worker has finished or leaves."""
        cluster, membership = self.cluster, self.membership
        steps_outside = 0 if cluster.setting.counts_group_steps else self.steps_outside
        if self.loop is not None:
            self.loop.end_round()
            if membership.is_member and membership.step % _SAVES_EVERY == self.worker % _SAVES_EVERY:
                self._save_state()
        if self.is_leaving or (cluster.is_lockstep and membership.step >= cluster.setting.steps_max):
            self._send_left()
        elif membership.step + steps_outside >= cluster.setting.steps_max:
            self._finish((membership.step + steps_outside - 1) // cluster.setting.epoch_steps)
        else:
            self._compute()
            self._skip_if_due()

    def _save_state(self) -> None:
        """Save its state, and continue without waiting for the samples that it contains."""
        cluster, round_ = self.cluster, self.membership.round
        self.saved_states[round_] = self.state
        cluster.send_event(
            self.worker,
            CheckpointQuery(now_s=cluster.arrival_s(self.worker), worker=self.worker, round=round_),
        )

    def _wait_for_epoch_mean(self, epoch: int) -> None:
        """Wait for the mean of all models after an epoch, where workers own theirs; else go on."""
        self._compute()

    def _finish(self, epoch: int) -> None:
        cluster = self.cluster
        if not self._may_contribute(partial(self._finish, epoch)):
            return
        self._catch_up()
        self.membership.end_step_outside()
        self.activity = FINISHED
        self.last_finished = Finished(
            now_s=cluster.arrival_s(self.worker), worker=self.worker, epoch=epoch, step=self.membership.step
        )
        cluster.send_event(self.worker, self.last_finished)

    def _leave(self) -> None:
        """Adopt the final state if the last group requires it, and leave."""
        membership = self.membership
        if (
            membership.group is not None
            and self.worker in membership.group.joining
            and not membership.is_member
        ):
            received = self._received
            if received is None or received.generation != membership.group.generation:
                self.activity = RECEIVING_STATE
                return
            self.state = received.state
            self._missed.clear()
            membership.on_state_received(round=received.round)
        self._send_left()

    def _send_left(self) -> None:
        cluster = self.cluster
        cluster.send_event(
            self.worker,
            Left(now_s=cluster.arrival_s(self.worker), worker=self.worker, step=self.membership.step),
        )
        self.has_left = True
        if not cluster.is_exactly_once:
            self.end()
        else:
            self.activity = LEAVING  # until the coordinator has logged it

    def _end_epoch(self, epoch: int) -> None:
        """Enter the next epoch with the next step, unless a group counts on this worker."""
        if self.loop is not None:
            self.loop.epochs_ended = max(self.loop.epochs_ended, epoch + 1)
            return
        if not self.membership.is_member and self.state is not None:
            begins = (epoch + 1) * self.cluster.setting.epoch_steps
            self.steps_outside = max(self.steps_outside, begins - self.membership.step - 1)

    # Changes -------------------------------------------------------------------------------------------

    def _on_halt(self, halt: Halt) -> None:
        if halt.abandon and self.membership.is_skipping:
            self.exchange = None
            self._end_skipped_round(None)
        elif halt.abandon and self.exchange is not None:
            if self.membership.finish_round():
                self.cluster.fail_invariant(f"worker {self.worker} counts an exchange that it has abandoned")
            self.exchange = None
            self._continue()

    def _on_group(self) -> None:
        if self.activity != REQUESTING:  # a worker that requests samples sends no state
            self._donate_state()
        if self.activity == JOINING and self.state is not None:
            self._compute()
        elif self.activity in (WAITING, RECEIVING_STATE, JOINING):
            self._continue()
        elif self.activity == CATCHING_UP:
            self._resume_loop()

    def _donate_state(self) -> None:
        """Send the state to the joiners, once for each group."""
        membership = self.membership
        group = membership.group
        if group is None or group is self._donated_to or self._missed or membership.is_skipping:
            return
        self._donated_to = group
        for place, joiner in enumerate(membership.state_recipients):
            epoch = 0 if self.loop is None else self.loop.epoch
            transfer = StateTransfer(group.generation, self.state, membership.round, epoch)
            self.cluster.send_state(self.worker, joiner, place, transfer)
