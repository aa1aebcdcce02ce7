"""Partial all-reduce: averages over the workers that keep up, and changes the group when that set changes.

This module moves no tensor. The worker's side of the protocol is
`offbeat.policies.membership.group_membership`; stragglers are classified in
`offbeat.policies.stragglers.classifier`.

**Theory of operation.** A *group* is the set of workers that average gradients with each other. It changes in
two phases:

1. `Halt`: every member answers `Halted` with its position (steps and rounds finished, whether it has begun
   its step's exchange, the first unused exchange id, whether it holds the state). After its answer it begins
   no other step's exchange. Members of the group before answer too, until all have switched to this one.
2. `Group`: sent once every answer that is still awaited has come.

There are two kinds of change, distinguished by `Halt.abandon`:

- *Planned* (`abandon=False`; a straggler was classed, a worker recovered, joined or finished). Exchanges
  under way finish in the old group. The Group names the first step that no member has begun, and each member
  switches when it reaches that step. A joining member first receives the state from a member.
- *Repeat* (`abandon=True`; a member is lost, hung, late or unreachable, or a step has begun that needs a
  worker that has ended). Exchanges under way end without a result. Of the members that hold the state, those
  with the most finished rounds form the group, which is in force at once and repeats their step. A member
  that was behind leaves the group and returns with the next planned change, with the state of a member.

A planned change under way turns into a repeat as soon as a member fails. The next planned change waits until
every joining member has been Ready and, unless a member has ended, every other one has switched; a repeat
waits for nothing.

Invariants:

- Generations rise. A Halt supersedes every older Halt, and every older Group that arrives after it.
- Exchange ids of a Group begin 2**16 above the highest id that a member reported, so none is used twice.
- A member that is not joining holds the state. If no answer comes from a holder, the job stops.
- Members that are Ready for the same round are in the same step; otherwise the job stops.
- While more than half of the members are silent, the coordinator assumes that it is isolated itself, and
  decides nothing.

Timeouts: no `Halted` within `halt_timeout_s` makes a member hung; no Ready within the patience, while another
member waits, makes it late; a joining member has `join_timeout_s`. If every member is Ready and an exchange
hangs, nothing is received at all: then a planned Halt without a change serves as a probe. Reports that two
workers cannot reach each other are gathered for 0.25 s before a member is excluded. An excluded worker
returns by a planned change once it is Ready, or answers, and reaches all members.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, assert_never

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    CheckpointQuery,
    ContributionReport,
    EndEpoch,
    Event,
    Failed,
    Finished,
    Group,
    Halt,
    Halted,
    JobComplete,
    Joined,
    LateGradientArrived,
    Left,
    Lost,
    PeerReachable,
    PeerUnreachable,
    Ready,
    RejectPeer,
    SamplesRequested,
    Tick,
)
from offbeat.policies.data.group_assigner import GroupBlockAssigner
from offbeat.policies.membership.reachability import Reachability
from offbeat.policies.stragglers.classifier import StragglerClassifier

MonitoringMode: TypeAlias = Literal["continuous", "epoch_window"]

# Exchanges that members may still begin in the step under way when they answer a Halt, repetitions included.
_EXCHANGES_IN_A_STEP_MAX = 2**16
# Silence after which members are probed, in multiples of the patience: the first and the largest value.
_PROBE_FIRST, _PROBE_MAX = 2, 32
_UNKNOWN = -1  # step
_GATHER_S = 0.25  # reports of one outage arrive within this time
_MOST_SILENT_S = 2.0  # silence of most members may be an outage that is not reported yet, up to this time


@dataclass(kw_only=True, slots=True)
class _WorkerStatus:
    """State of a worker that has joined and is not gone.

    Attributes:
        can_join: it is outside the group, works, and can receive a state.
        is_hung: it has not answered a Halt in time.
        is_late: the group has waited for it for too long, and it has not been Ready since.
        has_finished: its training loop has ended.
        is_new: it joined while the job ran and has had no state yet; the end of the job does not wait for it.
        is_missed: it was excluded as unreachable, and nothing has been received from it since.
        round: of its last Ready as a member.
        epoch: of its last Ready.
        iteration: Readys in that epoch while it was outside the group.
    """

    can_join: bool = False
    is_hung: bool = False
    is_late: bool = False
    has_finished: bool = False
    is_new: bool = False
    is_missed: bool = False
    round: int = -1
    epoch: int = -1
    iteration: int = 0


@dataclass(kw_only=True)
class _PendingChange:
    """A change under way: its Halt was sent."""

    generation: int
    abandon: bool
    since_s: float
    answers: dict[int, Halted] = field(default_factory=dict)
    awaited: list[int] | None = None  # workers whose answers may still be awaited; None: all recipients


class PartialGroups:
    """Groups of the workers that are not stragglers, are alive, and respond.

    A change takes two messages per member: a Halt, after which the member begins no further step's exchange,
    and the Group, once all members have reported their positions. If no member has failed, exchanges under
    way finish in the old group, and the Group names the first step that no member has begun. If a member has
    failed, exchanges under way are abandoned and repeated. A member that had not finished an exchange that
    others had finished is behind: it leaves the group, and returns with the next change, with the state of a
    member.

    Members that cannot reach each other cannot exchange. When such an outage is reported, the member that
    most members cannot reach is excluded (of two, the one with the higher id), until all remaining members
    reach each other. Members that are silent towards the coordinator are excluded as well. An excluded member
    returns when it reaches all members again. While more than half of the members are silent, the policy
    decides nothing, because then the coordinator is on the side of the minority: until at least half are
    received again, or the silent members are lost.

    Source: the first paper's dynamic worker classification, section 4, and DPAR (with `threshold_s` in
    `detector`). Deviations: those of `StragglerClassifier`; a worker that returns receives the state; crashes
    and hangs, which the papers leave out.

    Args:
        world: number of workers at the start of the job; their ids are 0 to `world` - 1.
        detector: arguments of `StragglerClassifier`.
        monitor: "continuous" excludes stragglers until they recover; "epoch_window" includes all workers
            again in the profiling window of each epoch, as the paper's section 4.2 does.
        halt_timeout_s: time in which a member has to answer a Halt, in seconds.
        patience_min_s: the least time for which the group waits for a silent member, in seconds. Once a
            threshold is known, the group waits half as long as it waits for a slow member until that is
            classed a straggler, if this is longer. Half, because excluding a member that arrives after all
            costs little: it receives the state in the background and misses a few steps.
        join_timeout_s: time that a joining member has to become Ready, in seconds.
        timeout_s: time for which the group waits while no threshold is known, in seconds.
        staleness_steps_max: highest age of the parameters with which a worker outside the group computes a
            gradient that counts, in steps, at least 1; None discards such gradients.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        world: int,
        *,
        detector: dict[str, Any] | None = None,
        monitor: MonitoringMode = "continuous",
        halt_timeout_s: float = 2.0,
        patience_min_s: float = 0.5,
        join_timeout_s: float = 60.0,
        timeout_s: float = 600.0,
        staleness_steps_max: int | None = None,
    ) -> None:
        if world < 1:
            raise ValueError(f"expected a world of at least 1 worker, got {world}")
        if monitor not in ("continuous", "epoch_window"):
            raise ValueError(f"expected monitor 'continuous' or 'epoch_window', got {monitor!r}")
        for name, value_s in {
            "halt_timeout_s": halt_timeout_s,
            "patience_min_s": patience_min_s,
            "join_timeout_s": join_timeout_s,
            "timeout_s": timeout_s,
        }.items():
            if not value_s > 0:
                raise ValueError(f"expected {name} of more than 0 s, got {value_s}")
        if staleness_steps_max is not None and staleness_steps_max < 1:
            raise ValueError(f"expected staleness_steps_max of at least 1 step, got {staleness_steps_max}")
        self._world = world
        self._classifier = StragglerClassifier(**(detector or {}))
        self._assigner = GroupBlockAssigner(staleness_steps_max)
        self._monitor = monitor
        self._answer_s, self._patience_s = halt_timeout_s, patience_min_s
        self._join_s, self._timeout_s = join_timeout_s, timeout_s
        self._workers: dict[int, _WorkerStatus] = {}
        self._gone: set[int] = set()
        self._members: tuple[int, ...] = ()
        self._previous_members: tuple[int, ...] = ()  # members of the group before, until all have switched
        self._not_switched: set[int] = set()  # members of both groups that may still be in the one before
        self._joining: set[int] = set()  # joining members that have not been Ready yet
        self._generation = 0  # of the last Group
        self._halted_generation = 0  # of the last Halt
        self._ended_after: dict[int, int] = {}  # members that left or finished: steps that they finished
        self._overtaken: set[int] = set()  # those of them whose last step another member has gone past
        self._pending_change: _PendingChange | None = None
        self._halt_recipients: frozenset[int] = frozenset()  # all that may be exchanging
        self._member_set: frozenset[int] = frozenset()
        # Rounds for which not all members are Ready: time of the first Ready, count of Readys, step.
        self._open_rounds: dict[int, tuple[float, int, int]] = {}
        self._uneven_ready: Ready | None = None  # its step differs within its round
        self._group_sent_s = 0.0  # when the last Group was sent
        self._last_received_s = 0.0  # when a member was last Ready, or was probed
        self._ready_s = 0.0  # when a member was last Ready
        self._round = -1  # the last round for which a member was Ready
        self._silence_s = 0.0  # longest recent time without a Ready between two rounds
        self._probe_after = _PROBE_FIRST  # multiple of the patience, doubled by each probe
        self._exchange_id = self._step = 0  # the first ones of the last Group
        self._begun_step = -1  # the highest for which a member was Ready
        self._working_worker = -1  # cached id of a worker that has not finished; -1: none
        self._reachability = Reachability()
        self._unreachable: set[int] = set()  # workers excluded because they cannot reach the members
        self._reported_s: float | None = None  # the first report since exclusions were last decided
        self._is_isolated = False  # most members are silent: nothing is decided
        self._is_settled = False  # nothing that `_review` reads has changed since its last call
        self._epoch_began: dict[int, int] = {}  # epoch: its first round
        self._is_in_window = True
        self._epochs_ended = 0
        self._first_finished_s: float | None = None
        self._is_over = False  # all workers have been dismissed, or the job was stopped
        self._reasons: dict[int, str] = {}  # worker: reason of its last change of membership

    def handle(self, event: Event) -> list[Action]:
        """Return a Halt, a Group, an AbortJob or nothing; after the end, a RejectPeer for each Joined.

        Raises:
            ProtocolError: an event that no worker of a running job can cause; nothing changes.
        """
        if self._is_over:
            return _refuse(event) if isinstance(event, Joined) else []
        actions = self._dispatch(event)
        if self._assigner.is_active and not self._is_over:
            actions += self._assigner.pop_actions()
        return actions

    def _dispatch(self, event: Event) -> list[Action]:
        match event:
            case Joined():
                return self._handle_joined(event)
            case Ready():
                return self._handle_ready(event)
            case SamplesRequested():
                self._state_of(event)
                self._assigner.on_samples_requested(event)
                return []
            case CheckpointQuery():
                self._state_of(event)
                self._assigner.on_checkpoint_query(event)
                return []
            case ContributionReport():
                if event.worker not in self._gone:  # the answer crossed the worker's Left
                    self._state_of(event)
                    self._assigner.on_contribution_report(event)
                return []
            case LateGradientArrived():
                self._state_of(event)
                self._assigner.on_late_gradient(event, self._begun_step)
                return []
            case Halted():
                return self._handle_halted(event)
            case Left() | Lost() | Failed():
                return self._handle_gone(event)
            case Tick():
                return self._handle_tick(event.now_s)
            case Finished():
                return self._handle_finished(event)
            case PeerUnreachable() | PeerReachable():
                return self._handle_report(event)
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        change = self._pending_change
        return {
            "classifier": self._classifier.state_dict(),
            "assigner": self._assigner.state_dict(),
            "workers": [[worker, asdict(state)] for worker, state in self._workers.items()],
            "gone": sorted(self._gone),
            "members": list(self._members),
            "previous_members": list(self._previous_members),
            "not_switched": sorted(self._not_switched),
            "joining": sorted(self._joining),
            "ended_after": [list(entry) for entry in self._ended_after.items()],
            "overtaken": sorted(self._overtaken),
            "generation": self._generation,
            "halted_generation": self._halted_generation,
            "pending_change": None
            if change is None
            else {
                "generation": change.generation,
                "abandon": change.abandon,
                "since_s": change.since_s,
                "answers": [asdict(answer) for answer in change.answers.values()],
            },
            "open_rounds": [[round_, *entry] for round_, entry in self._open_rounds.items()],
            "group_sent_s": self._group_sent_s,
            "last_received_s": self._last_received_s,
            "probe_after": self._probe_after,
            "ready_s": self._ready_s,
            "round": self._round,
            "silence_s": self._silence_s,
            "exchange_id": self._exchange_id,
            "step": self._step,
            "begun_step": self._begun_step,
            "reachability": self._reachability.state_dict(),
            "unreachable": sorted(self._unreachable),
            "reported_s": self._reported_s,
            "is_isolated": self._is_isolated,
            "is_settled": self._is_settled,
            "epoch_began": [list(entry) for entry in self._epoch_began.items()],
            "is_in_window": self._is_in_window,
            "reasons": [list(entry) for entry in self._reasons.items()],
            "epochs_ended": self._epochs_ended,
            "first_finished_s": self._first_finished_s,
            "is_over": self._is_over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a policy with the same arguments."""
        self._classifier.load_state_dict(state["classifier"])
        self._assigner.load_state_dict(state["assigner"])
        self._workers = {worker: _WorkerStatus(**known) for worker, known in state["workers"]}
        self._gone = set(state["gone"])
        self._members, self._previous_members = tuple(state["members"]), tuple(state["previous_members"])
        self._not_switched, self._joining = set(state["not_switched"]), set(state["joining"])
        self._ended_after = dict(state["ended_after"])
        self._overtaken = set(state["overtaken"])
        self._generation = state["generation"]
        self._halted_generation = state["halted_generation"]
        change = state["pending_change"]
        self._pending_change = None
        if change is not None:
            answers = {entry["worker"]: Halted(**entry) for entry in change["answers"]}
            self._pending_change = _PendingChange(**{**change, "answers": answers})
        self._open_rounds = {
            round_: (since_s, count, step) for round_, since_s, count, step in state["open_rounds"]
        }
        self._group_sent_s, self._exchange_id = state["group_sent_s"], state["exchange_id"]
        self._last_received_s, self._probe_after = state["last_received_s"], state["probe_after"]
        self._ready_s, self._round = state["ready_s"], state["round"]
        self._silence_s = state["silence_s"]
        self._step = state["step"]
        self._begun_step = state["begun_step"]
        self._set_groups(self._members, self._previous_members)
        self._reachability.load_state_dict(state["reachability"])
        self._unreachable, self._is_isolated = set(state["unreachable"]), state["is_isolated"]
        self._reported_s = state["reported_s"]
        self._is_settled = state["is_settled"]
        self._epoch_began = dict(state["epoch_began"])
        self._is_in_window = state["is_in_window"]
        self._reasons = dict(state["reasons"])
        self._epochs_ended = state["epochs_ended"]
        self._first_finished_s = state["first_finished_s"]
        self._is_over = state["is_over"]

    # Events ----------------------------------------------------------------------------------------------

    def _handle_joined(self, event: Joined) -> list[Action]:
        if event.worker in self._workers or event.worker in self._gone:
            return []  # Assembly answers
        self._workers[event.worker] = _WorkerStatus(can_join=True, is_new=bool(self._members))
        self._classifier.add(event.worker)
        if self._members:
            self._reasons[event.worker] = f"worker {event.worker} is new"
            return self._review(event.now_s)
        if len(self._workers) < self._world:
            return []
        for state in self._workers.values():
            state.can_join = False
        self._set_groups(tuple(sorted(self._workers)), ())
        self._assigner.change_group(self._members, (), 0)
        self._group_sent_s = self._last_received_s = self._ready_s = event.now_s
        reason = f"all {self._world} workers are here"
        return [self._group(step=0, joining=(), reason=reason)]

    def _handle_ready(self, event: Ready) -> list[Action]:
        """Process a Ready; with many workers, most calls of this policy end here."""
        worker = event.worker
        state = self._state_of(event)
        state.is_missed = False
        if state.is_hung or state.is_late:
            state.is_hung = state.is_late = False
            self._on_counted_again()
        is_asked = worker in self._halt_recipients
        ended: list[Action] = []
        if event.epoch >= self._epochs_ended and is_asked:
            ended = self._end_epochs(event.epoch)
        if not is_asked:
            self._ready_outside(event, state)
        elif event.generation == self._generation and worker in self._member_set:
            if self._previous_members or self._joining:
                self._joining.discard(worker)
                self._not_switched.discard(worker)
                if not self._not_switched:
                    self._set_groups(self._members, ())
                    self._assigner.on_group_in_force(event.now_s)
            self._ready_inside(event, state)
        elif worker not in self._joining and event.generation != self._generation:
            self._ready_inside(event, state)  # still in a step of the group before
        else:
            self._ready_outside(event, state)
        if self._uneven_ready is not None:
            return self._stop_uneven(self._uneven_ready)
        if self._is_settled:
            return ended
        # The workers that have to answer a Halt may have become fewer.
        return ended + (self._review(event.now_s) or self._finish_if_answered(event.now_s))

    def _stop_uneven(self, event: Ready) -> list[Action]:
        """Stop the job: replicas differ once their steps consist of different rounds."""
        self._is_over = True
        return [
            AbortJob(
                worker=None,
                step=None,
                reason=f"worker {event.worker} is in step {event.step} and others are not, all in round "
                f"{event.round}: workers call step() after different numbers of backward passes. Where "
                "batches are assigned on demand, a worker may get one batch more or less than another: "
                'accumulate inside session.no_sync(), or use shards="equal"',
            )
        ]

    def _ready_inside(self, event: Ready, state: _WorkerStatus) -> None:
        before, round_ = state.round, event.round
        if round_ <= before:  # sent again, to a restarted coordinator
            return
        state.round, state.is_new = round_, False
        if round_ > self._round:
            if self._round >= 0:  # before the first round, a model may be compiled
                self._silence_s = max(event.now_s - self._ready_s, self._silence_s / 2)
            self._round = round_
        self._ready_s = self._last_received_s = event.now_s
        self._probe_after = _PROBE_FIRST
        self._assigner.on_ready(event)
        self._begun_step = max(self._begun_step, event.step)
        if self._ended_after:
            self._overtaken |= {worker for worker, steps in self._ended_after.items() if steps <= event.step}
            self._is_settled = False
        began = self._epoch_began.get(event.epoch)
        if began is None:
            began = self._epoch_began[event.epoch] = round_
            for epoch in [epoch for epoch in self._epoch_began if epoch < event.epoch - 1]:
                del self._epoch_began[epoch]
        self._observe(event, max(0, round_ - began))
        if self._monitor == "epoch_window":
            is_in_window = self._classifier.is_profiled(round_ - began + 1)
            if is_in_window != self._is_in_window:
                self._is_in_window, self._is_settled = is_in_window, False
        if event.worker in self._member_set:
            self._count_ready(before, event)

    def _count_ready(self, before: int, event: Ready) -> None:
        """Count a member as Ready for all rounds after `before`; close a round with all members Ready."""
        round_ = event.round
        is_open = False
        for other in tuple(self._open_rounds):
            if before < other <= round_:
                since_s, count, step = self._open_rounds[other]
                if other == round_:
                    is_open = True
                    if step not in (_UNKNOWN, event.step):
                        self._uneven_ready = event
                    step = event.step
                if count + 1 == len(self._members):
                    del self._open_rounds[other]
                else:
                    self._open_rounds[other] = (since_s if count else event.now_s, count + 1, step)
        if not is_open:
            self._open_round(round_, event.now_s, event.step)

    def _open_round(self, round_: int, now_s: float, step: int = _UNKNOWN) -> None:
        count = sum(
            self._workers[member].round >= round_ for member in self._members if member in self._workers
        )
        if count < len(self._members):
            self._open_rounds[round_] = (now_s, count, step)

    def _ready_outside(self, event: Ready, state: _WorkerStatus) -> None:
        if not state.can_join:
            state.can_join = event.worker not in self._member_set
            self._is_settled = False
        if event.generation == self._generation and event.worker not in self._member_set:
            self._assigner.on_left_group(event.worker)
            self._assigner.on_idle(event.worker)
        self._assigner.on_ready_outside(event.worker)
        state.iteration = state.iteration + 1 if state.epoch == event.epoch else 0
        state.epoch, state.is_new = event.epoch, False
        self._observe(event, state.iteration)

    def _observe(self, event: Ready, iteration: int) -> None:
        verdicts = self._classifier.observe(
            event.worker, epoch=event.epoch, iteration=iteration, compute_s=event.compute_s
        )
        for verdict in verdicts:
            self._reasons[verdict.worker] = f"worker {verdict.worker}: {verdict.reason}"
            self._is_settled = False

    def _handle_finished(self, event: Finished) -> list[Action]:
        state = self._state_of(event)
        if state.is_hung or state.is_late:
            self._on_counted_again()
        state.has_finished, state.is_hung, state.is_late, state.is_missed = True, False, False, False
        self._assigner.on_finished(event.worker)
        state.can_join = event.worker not in self._halt_recipients
        self._is_settled = False
        if not state.can_join:
            self._ended_after[event.worker] = event.step
            self._on_ended(event)
        if self._first_finished_s is None:
            self._first_finished_s = event.now_s
        self._reasons[event.worker] = f"worker {event.worker} has finished after {event.step} steps"
        ended = self._end_epochs(event.epoch + 1)
        is_urgent = self._overtaken or self._joining or self._all_have_finished()
        return ended + self._review(event.now_s) if is_urgent else ended

    def _on_ended(self, event: Finished | Left) -> None:
        if event.step <= self._begun_step:  # another member has begun a step that this one will not do
            self._overtaken.add(event.worker)
        if event.worker in self._joining:
            self._joining.discard(event.worker)
            if event.step <= self._step:  # it ended before it received the state
                self._overtaken.add(event.worker)

    def _end_epochs(self, count: int) -> list[Action]:
        """Announce the end of the first `count` epochs, once a member has finished them."""
        if count <= self._epochs_ended:
            return []
        self._epochs_ended = count
        return [EndEpoch(epoch=count - 1, reason=f"a member is done with epoch {count - 1}")]

    def _handle_halted(self, event: Halted) -> list[Action]:
        if event.worker in self._gone:  # the answer crossed the worker's Left
            return []
        self._state_of(event)
        state = self._workers[event.worker]
        state.is_new &= not event.has_state
        # A new worker that waits for a state has no gradients with which it could be Ready.
        is_new = not event.has_state and state.round < 0 and state.epoch < 0
        if state.is_hung or state.is_missed or (state.is_late and is_new):  # it is alive
            state.is_hung = state.is_missed = False
            state.is_late &= not is_new
            self._on_counted_again()
            state.can_join = event.worker not in self._halt_recipients and not state.has_finished
        change = self._pending_change
        if (
            change is not None
            and event.generation == change.generation
            and event.worker in self._halt_recipients
        ):
            change.answers[event.worker] = event
            return self._finish_if_answered(event.now_s)
        return [] if self._is_settled else self._review(event.now_s)

    def _on_counted_again(self) -> None:
        """Count a worker again that was excluded as hung, late or unreachable."""
        self._is_settled = False
        if self._pending_change is not None:
            self._pending_change.awaited = None

    def _handle_gone(self, event: Left | Lost | Failed) -> list[Action]:
        if event.worker not in self._workers:
            if event.worker in self._gone or not self._members:
                return []
            raise ProtocolError(f"expected a worker that has joined, got {_description(event)}")
        del self._workers[event.worker]
        self._gone.add(event.worker)
        self._reachability.forget(event.worker)
        self._assigner.on_gone(event.worker, has_reported_all=not isinstance(event, Lost))
        self._is_settled = False
        for verdict in self._classifier.remove(event.worker):
            self._reasons[verdict.worker] = f"worker {verdict.worker}: {verdict.reason}"
        match event:
            case Left():
                self._ended_after[event.worker] = event.step
                self._on_ended(event)
                why = f"worker {event.worker} has left after {event.step} steps"
            case Lost():
                why = f"worker {event.worker} was lost: {event.cause}"
            case Failed():
                why = f"worker {event.worker} failed after {event.step} steps: {event.error}"
            case _:
                assert_never(event)
        self._reasons[event.worker] = why
        if not self._members:
            return []
        if not self._workers:
            self._is_over = True
            if isinstance(event, Left):
                return []
            return [AbortJob(worker=event.worker, step=None, reason=f"{why}; no worker is left")]
        self._update_unreachable(event.now_s)
        return self._review(event.now_s) or self._finish_if_answered(event.now_s)

    def _handle_tick(self, now_s: float) -> list[Action]:
        if self._is_isolated:
            return []
        is_reported = self._reported_s is not None and now_s - self._reported_s >= _GATHER_S
        if is_reported and (self._generation or self._have_all_begun()):
            actions = self._exclude_unreachable(now_s)
            if actions:
                return actions
        self._assigner.on_tick(now_s, self._answer_s)
        return self._check_timeouts(now_s)

    def _have_all_begun(self) -> bool:
        """Whether every member of the first group has been Ready; before that it may lack the state."""
        known = [self._workers[member] for member in self._members if member in self._workers]
        return all(state.round >= 0 or state.has_finished for state in known)

    def _check_timeouts(self, now_s: float) -> list[Action]:
        change = self._pending_change
        if change is not None:
            if now_s - change.since_s <= self._answer_s:
                return []
            silent = [
                worker
                for worker in sorted(self._halt_recipients)
                if self._is_responding(worker)
                and worker not in change.answers
                and worker not in self._unreachable
            ]
            if self._may_be_isolated(silent) and now_s - change.since_s <= _MOST_SILENT_S:
                return []
            for worker in silent:
                self._workers[worker].is_hung = True
                self._reasons[worker] = f"worker {worker} did not answer within {self._answer_s:g} s"
        else:
            silent = self._overdue(now_s) or self._never_finishing(now_s)
            if not silent and self._should_probe(now_s):
                return self._probe(now_s)
            for worker in silent:
                self._workers[worker].is_late = True
                self._reasons[worker] = f"worker {worker} was not ready in time while other workers waited"
        for worker in silent:
            self._workers[worker].can_join = self._is_settled = False
        return (self._review(now_s) or self._finish_if_answered(now_s)) if silent else []

    def _should_probe(self, now_s: float) -> bool:
        # A joining member has its own deadline; a probe would interrupt its joining.
        is_calm = bool(self._members) and not self._joining and self._first_finished_s is None
        usual_s = max(self._least_patience(), self._silence_s)
        return is_calm and now_s - self._last_received_s > self._probe_after * usual_s

    def _probe(self, now_s: float) -> list[Action]:
        """Send all members a Halt that changes nothing, to find one that hangs in the exchange.

        While all members are Ready and one of them hangs, no event comes, and the links may tolerate a long
        silence. A member that is alive answers at once and loses nothing.
        """
        silent_s = now_s - self._last_received_s
        self._last_received_s, self._probe_after = now_s, min(2 * self._probe_after, _PROBE_MAX)
        return self._halt(
            now_s, abandon=False, workers=(), reason=f"nothing was received for {silent_s:.1f} s"
        )

    def _overdue(self, now_s: float) -> list[int]:
        """Return the members that were not Ready in time while other members wait."""
        late = []
        if now_s - self._group_sent_s > self._join_s:
            late += [member for member in sorted(self._joining) if member in self._workers]
        if self._open_rounds:
            round_ = min(self._open_rounds)
            since_s, count, _ = self._open_rounds[round_]
            if count and now_s - since_s > self._patience():
                behind = [
                    member
                    for member in self._members
                    if member in self._workers
                    and member not in self._joining
                    and not self._workers[member].has_finished
                    and self._workers[member].round < round_
                ]
                if not self._may_be_isolated(behind) or now_s - since_s > _MOST_SILENT_S:
                    late += behind
        return late

    def _may_be_isolated(self, silent: list[int]) -> bool:
        """Whether these are most of the members: then the coordinator itself may be isolated."""
        return 2 * len(silent) > sum(member in self._workers for member in self._members)

    def _never_finishing(self, now_s: float) -> list[int]:
        """Return the workers outside the group that have not finished in time after all members have."""
        if self._first_finished_s is None or now_s - self._first_finished_s <= self._join_s:
            return []
        working = [worker for worker, state in self._workers.items() if not state.has_finished]
        return [] if set(working) & self._member_set else working

    def _patience(self) -> float:
        slow_s = self._slow_s()
        return self._timeout_s if slow_s is None else max(self._patience_s, slow_s / 2)

    def _least_patience(self) -> float:
        return max(self._patience_s, (self._slow_s() or 0.0) / 2)

    def _slow_s(self) -> float | None:
        """How long the group waits for a slow member until it is classed; None without a threshold."""
        return self._classifier.time_to_classify_s(max(self._epoch_began, default=0))

    # Reachability ----------------------------------------------------------------------------------------

    def _handle_report(self, event: PeerUnreachable | PeerReachable) -> list[Action]:
        if event.peer not in self._workers or (
            event.worker not in self._workers and event.worker is not None
        ):
            return []  # the report crossed the Lost, Failed or Left of one of the two
        self._reachability.on_report(event)
        if isinstance(event, PeerUnreachable) and self._reported_s is None:
            self._reported_s = event.now_s
        self._update_unreachable(event.now_s)
        if self._is_settled or self._pending_change is None:
            return [] if self._is_settled else self._review(event.now_s)
        return self._review(event.now_s) or self._finish_if_answered(event.now_s)

    def _update_unreachable(self, now_s: float) -> None:
        """Update at once which excluded workers can return, and which workers outside cannot any more."""
        was_isolated, self._is_isolated = self._is_isolated, self._are_most_silent()
        if self._is_isolated:
            return
        if was_isolated:
            self._restart_timeouts(now_s)
        if not (self._reachability or self._unreachable):
            self._reported_s = None
            return
        members = self._settled_members() - self._unreachable
        out = self._reachability.outside_exclusions(members, self._workers.keys() - members)
        self._set_unreachable(
            {worker for worker in out if worker in self._unreachable or worker not in self._halt_recipients},
            out,
        )

    def _exclude_unreachable(self, now_s: float) -> list[Action]:
        """Decide which workers to exclude as unreachable, and begin a change if they have changed."""
        self._reported_s = None
        members = self._settled_members()
        out = self._reachability.exclusions(members, self._workers.keys() - members)
        for worker in out.keys() & self._halt_recipients:
            self._workers[worker].is_missed = True
        self._set_unreachable(set(out), out)
        return [] if self._is_settled else self._review(now_s) or self._finish_if_answered(now_s)

    def _settled_members(self) -> set[int]:
        """Return the working members; a worker outside joins only if it can reach all of them."""
        up = {worker for worker, state in self._workers.items() if not (state.is_hung or state.is_late)}
        return (up & self._halt_recipients) - self._joining

    def _set_unreachable(self, workers: set[int], reasons: dict[int, str]) -> None:
        if workers == self._unreachable:
            return
        for worker in workers - self._unreachable:
            self._reasons[worker] = reasons[worker]
        for worker in self._unreachable - workers:
            self._reasons[worker] = f"worker {worker} can reach all members again"
        self._unreachable = workers
        self._on_counted_again()

    def _are_most_silent(self) -> bool:
        """Whether most of the workers that were members when they were last received are silent."""
        unheard = self._reachability.silent_workers
        if not unheard:
            return False
        missed = {worker for worker in unheard if worker in self._workers and self._workers[worker].is_missed}
        present = {member for member in self._members if member in self._workers} | missed
        return 2 * len(present & unheard) > len(present)

    def _restart_timeouts(self, now_s: float) -> None:
        """Let the timeouts of group, rounds and change begin now: most members were silent until now."""
        self._is_settled = False
        if self._pending_change is not None:
            self._pending_change.since_s = now_s
        self._group_sent_s = self._last_received_s = now_s
        self._open_rounds = {
            round_: (now_s, count, step) for round_, (_, count, step) in self._open_rounds.items()
        }
        if self._first_finished_s is not None:
            self._first_finished_s = now_s

    # Changes ---------------------------------------------------------------------------------------------

    def _review(self, now_s: float) -> list[Action]:
        """Begin a change if the group should be different, or if the change under way cannot finish."""
        if self._is_isolated:
            self._is_settled = False
            return []
        self._is_settled = True
        broken = [
            worker
            for worker in sorted(self._halt_recipients)
            if worker in self._overtaken or not (self._keeps_up(worker) or worker in self._ended_after)
        ]
        if self._joining and not self._has_working_member():  # no other member begins their step
            broken += sorted(self._joining)
        if self._pending_change is not None:
            return (
                self._halt(now_s, abandon=True, workers=broken)
                if broken and not self._pending_change.abandon
                else []
            )
        if broken:
            return self._halt(now_s, abandon=True, workers=broken)
        wanted = self._target_members()
        if wanted == self._members and self._all_have_finished():
            return self._dismiss()
        has_ended = bool(self._ended_after) or self._all_have_finished()
        if wanted == self._members or (self._previous_members and not has_ended):
            return []
        if self._joining:  # other members may have begun a step that needs them
            return []
        return self._halt(now_s, abandon=False, workers=set(wanted) ^ set(self._members))

    def _set_groups(self, members: tuple[int, ...], before: tuple[int, ...]) -> None:
        """Set the members of the group, and those that may still be in the one before."""
        self._members, self._previous_members = members, before
        self._member_set = frozenset(members)
        self._halt_recipients = self._member_set.union(before)
        self._is_settled = False

    def _is_responding(self, worker: int) -> bool:
        return worker in self._workers and not self._workers[worker].is_hung

    def _keeps_up(self, worker: int) -> bool:
        return (
            self._is_responding(worker)
            and not self._workers[worker].is_late
            and worker not in self._unreachable
        )

    def _target_members(self) -> tuple[int, ...]:
        """Return the workers that should be in the group; not empty while any worker is able."""
        if self._all_have_finished():
            return tuple(sorted(worker for worker in self._workers if self._keeps_up(worker)))
        can_continue, can_send_state = self._has_working_member(), self._can_send_state()
        candidates = [
            worker
            for worker, state in self._workers.items()
            if self._keeps_up(worker)
            and worker not in self._overtaken
            and (
                worker in self._member_set
                or (
                    can_continue
                    and state.can_join
                    and not state.has_finished
                    and (can_send_state or not state.is_new)
                )
            )
        ]
        takes_all = self._monitor == "epoch_window" and self._is_in_window
        slow = frozenset() if takes_all else self._classifier.stragglers
        wanted = [worker for worker in candidates if worker not in slow]
        return tuple(sorted(wanted or candidates))

    def _has_working_member(self) -> bool:
        """Whether a member that holds the state does further steps."""
        return any(
            self._is_working(member) and self._keeps_up(member)
            for member in self._members
            if member not in self._joining
        )

    def _can_send_state(self) -> bool:
        """Whether every member is in its training loop, where it can send its state to a new worker."""
        return not any(
            self._workers[member].has_finished for member in self._members if member in self._workers
        )

    def _all_have_finished(self) -> bool:
        if self._is_working(self._working_worker):
            return False
        working = [worker for worker in self._workers if self._is_working(worker)]
        self._working_worker = working[len(working) // 2] if working else -1  # hardly the next to finish
        return not working

    def _is_working(self, worker: int) -> bool:
        state = self._workers.get(worker)
        return state is not None and not (
            state.is_hung or state.is_late or state.has_finished or state.is_new
        )

    def _dismiss(self) -> list[Action]:
        self._is_over = True
        return [JobComplete(reason="all workers have finished")]

    def _halt(self, now_s: float, *, abandon: bool, workers: Any, reason: str = "") -> list[Action]:
        self._halted_generation += 1
        self._pending_change = _PendingChange(
            generation=self._halted_generation, abandon=abandon, since_s=now_s
        )
        reasons = [self._reasons.get(worker, f"worker {worker}") for worker in sorted(workers)[:8]]
        reason = "; ".join(reasons) or reason
        return [
            Halt(generation=self._halted_generation, abandon=abandon, reason=reason),
            *self._finish_if_answered(now_s),
        ]

    def _finish_if_answered(self, now_s: float) -> list[Action]:
        change = self._pending_change
        if change is None:
            return []
        if self._is_answer_awaited(change):
            return []
        asked = sorted(worker for worker in self._halt_recipients if worker in self._workers)
        answers = [change.answers[worker] for worker in asked if worker in change.answers]
        if len(answers) < len(asked) and not any(answer.has_state for answer in answers):
            return []  # a hung worker may hold the state
        self._pending_change = None
        return self._repeat_step(answers, now_s) if change.abandon else self._plan_group(answers, now_s)

    def _is_answer_awaited(self, change: _PendingChange) -> bool:
        """Whether an answer is still awaited; this is called for every answer.

        A late worker is not awaited again, though it may hold the only state.
        """
        if change.awaited is None:
            change.awaited = sorted(self._halt_recipients, reverse=True)
        while change.awaited:
            worker = change.awaited[-1]
            if worker in self._halt_recipients and worker not in change.answers and self._keeps_up(worker):
                return True
            change.awaited.pop()
        return False

    def _plan_group(self, answers: list[Halted], now_s: float) -> list[Action]:
        """Send the Group for the first step that no member has begun."""
        if not any(answer.has_state for answer in answers):
            return self._stop_without_state()
        holders = {answer.worker for answer in answers if answer.has_state}
        members = [
            worker
            for worker in self._target_members()
            if worker in holders or self._workers[worker].can_join or self._all_have_finished()
        ]
        kept = [worker for worker in members if worker in holders]
        if not kept:  # at least one member must hold the state
            kept = sorted(holders)
            members = sorted({*members, *kept})
        step = max(answer.step + answer.has_begun_exchange for answer in answers)
        ended = [worker for worker, steps in self._ended_after.items() if steps < step]
        if ended:  # a step has begun that needs a worker that has ended
            return self._halt(now_s, abandon=True, workers=ended)
        joining = tuple(worker for worker in members if worker not in kept)
        reason = self._reason(set(members) ^ set(self._members)) or "all members have answered"
        self._apply_group(answers, tuple(members), joining, now_s)
        group = self._group(step=step, joining=joining, reason=reason)
        ahead = min(answer.round - answer.step for answer in answers if answer.has_state)
        self._assigner.change_group(self._members, joining, step, ahead)
        return [group, *self._dismiss()] if self._all_have_finished() else [group]

    def _repeat_step(self, answers: list[Halted], now_s: float) -> list[Action]:
        """Continue with the members that have finished most; the rest return with the next change."""
        if not any(answer.has_state for answer in answers):
            return self._stop_without_state()
        begun = max(answer.step + answer.has_begun_exchange for answer in answers)
        self._overtaken |= {worker for worker, steps in self._ended_after.items() if steps < begun}
        if any(answer.has_state and answer.worker not in self._unreachable for answer in answers):
            reach = [answer for answer in answers if answer.worker not in self._unreachable]
        else:  # only unreachable workers hold the state
            reach = answers
            self._unreachable -= {answer.worker for answer in answers}
            self._reported_s = now_s
        furthest = max(answer.round for answer in reach if answer.has_state)
        ahead = [answer for answer in reach if answer.has_state and answer.round == furthest]
        wanted = self._target_members()
        members = [answer for answer in ahead if answer.worker in wanted] or ahead
        for answer in answers:
            if answer not in members and self._can_return(answer.worker):
                self._workers[answer.worker].can_join = True
                if answer.worker not in self._unreachable:
                    self._reasons[answer.worker] = f"worker {answer.worker} receives the state of a member"
        reason = self._reason(set(self._halt_recipients) - {answer.worker for answer in members})
        self._apply_group(answers, tuple(sorted(answer.worker for answer in members)), (), now_s)
        step = min(answer.step for answer in members)
        group = self._group(step=step, joining=(), reason=reason)
        self._assigner.repeat_round(self._members, furthest, step)
        self._set_groups(self._members, ())  # it is in force at once
        return [group, *self._review(now_s)]

    def _can_return(self, worker: int) -> bool:
        return not (worker in self._overtaken | self._classifier.stragglers or self._workers[worker].is_late)

    def _stop_without_state(self) -> list[Action]:
        """Stop the job: every worker that held the state is gone."""
        self._is_over = True
        reason = self._reason(self._halt_recipients) or "every member is gone"
        return [
            AbortJob(worker=None, step=None, reason=f"{reason}; no worker holds the training state any more")
        ]

    def _apply_group(
        self, answers: list[Halted], members: tuple[int, ...], joining: tuple[int, ...], now_s: float
    ) -> None:
        # After a probe, this includes workers that are still in the group before the last one.
        before = tuple(worker for worker in sorted(self._halt_recipients) if worker in self._workers)
        self._set_groups(members, before)
        self._not_switched = set(members).intersection(before).difference(joining)
        self._joining = set(joining)
        self._group_sent_s = self._last_received_s = now_s
        for worker in members:
            self._workers[worker].can_join = self._workers[worker].is_late = False
        for worker in joining:
            self._workers[worker].round = -1
        self._ended_after = {  # a member that has finished takes no part in later steps
            worker: steps for worker, steps in self._ended_after.items() if worker in members
        }
        self._overtaken.clear()
        used = max(answer.exchange_id for answer in answers)
        self._exchange_id = max(used, self._exchange_id) + _EXCHANGES_IN_A_STEP_MAX
        self._open_rounds.clear()
        rounds = {self._workers[member].round for member in members}
        first = max(answer.round for answer in answers)
        for round_ in sorted({first, *(round_ for round_ in rounds if round_ > first)}):
            self._open_round(round_, now_s)

    def _group(self, *, step: int, joining: tuple[int, ...], reason: str) -> Group:
        self._generation = self._halted_generation
        self._step = step
        return Group(
            generation=self._generation,
            step=step,
            exchange_id=self._exchange_id,
            members=self._members,
            joining=joining,
            weights=(1.0 / len(self._members),) * len(self._members),
            reason=reason,
        )

    def _reason(self, workers: Any) -> str:
        return "; ".join(self._reasons[worker] for worker in sorted(workers)[:8] if worker in self._reasons)

    def _state_of(
        self,
        event: Ready
        | SamplesRequested
        | CheckpointQuery
        | ContributionReport
        | LateGradientArrived
        | Halted
        | Finished,
    ) -> _WorkerStatus:
        state = self._workers.get(event.worker)
        if state is None or not self._members:
            raise ProtocolError(f"expected a worker of a job that has started, got {_description(event)}")
        return state


def _refuse(event: Joined) -> list[Action]:
    newcomer = f"worker {event.worker} ({event.location})"
    return [
        RejectPeer(peer=event.peer, reason=f"{newcomer} cannot take part: it came when all others were done")
    ]


def _description(event: Event) -> str:
    return f"{type(event).__name__} of worker {getattr(event, 'worker', None)}"
