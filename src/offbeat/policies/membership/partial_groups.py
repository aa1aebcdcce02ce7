"""Partial all-reduce: averages over those who keep up, and changes the group when that changes.

Nothing here moves a tensor or knows how one worker does what it is told (see `offbeat.policies.follower`),
nor how a straggler is found (see `offbeat.policies.stragglers`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, assert_never

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    Brought,
    Clocked,
    Dismiss,
    EpochEnded,
    Evaluated,
    Event,
    Failed,
    Finished,
    Group,
    Halt,
    Halted,
    Joined,
    Left,
    LeftOut,
    Lost,
    NodeEvent,
    PeerReachable,
    PeerUnreachable,
    Preempted,
    Ready,
    Recalled,
    Refuse,
    Saving,
    StepTimed,
    Stop,
    Tick,
    ValidationEvent,
    Wants,
)
from offbeat.policies.data.group_assigner import Dealing
from offbeat.policies.membership.reachability import Reachability
from offbeat.policies.stragglers.classifier import StragglerClassifier

Monitor: TypeAlias = Literal["continuous", "epoch_window"]

# Exchanges that members may still begin in the step under way when they answer a Halt, repetitions included.
_EXCHANGES_IN_A_STEP_MAX = 2**16
# After how many times the patience it is asked whether silent members live, first and at most.
_PROBE_FIRST, _PROBE_MAX = 2, 32
_UNKNOWN = -1  # step
_GATHER_S = 0.25  # reports of one outage come within this time
_MOST_SILENT_S = 2.0  # before then, that most members are silent may be an outage that is not reported yet


@dataclass(kw_only=True, slots=True)
class _Worker:
    """What is known of a worker that is not gone.

    Attributes:
        can_join: it stands outside the group, works, and would take a state.
        is_hung: it does not answer.
        is_late: it has kept the others waiting for too long, and has not been Ready since.
        has_finished: its loop is over.
        is_new: it came while the job ran and has had no state yet; nobody waits for its loop to end.
        is_missed: it was left out because it could not reach the members, and has said nothing since.
        round: of its last Ready as a member.
        epoch: of its last Ready.
        iteration: Readys in that epoch, while it was outside.
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
class _Fence:
    """A change under way: everybody was told to halt."""

    generation: int
    abandon: bool
    since_s: float
    answers: dict[int, Halted] = field(default_factory=dict)
    pending: list[int] | None = None  # who may still have to answer; None: all that were asked


class PartialGroups:
    """Groups of those who are not classed as stragglers, who live, and who answer.

    A change takes two messages a member: a Halt, upon which nobody begins a further step's exchange, and the
    Group, once all have said where they are. If nobody has gone, exchanges under way are finished in the old
    group, and the Group names the first step that no one has begun. If somebody has gone, they are given up
    and repeated; who had finished one that others had not is ahead of them, so those leave the group and
    come back with the next change, with the state of one who had.

    Members that cannot reach each other cannot exchange. When such an outage is reported, the member that
    most others have lost is left out, the later one of two, until all the rest can reach each other; so are
    members that the coordinator does not hear. One that is left out comes back when it can reach all members
    again. While the coordinator does not hear more than half of the members, nothing is decided at all, for
    then it is the coordinator that sits with the minority: until it hears at least half, or until they are
    lost.

    Source: the first paper's dynamic worker classification, section 4, and DPAR (with `threshold_s` in
    `detector`). Deviations: those of `StragglerClassifier`; a return takes the state along; death and hangs,
    which the papers leave out.

    Args:
        world: how many workers make up the job at the start; their ids are 0 to `world` - 1.
        detector: arguments of `StragglerClassifier`.
        monitor: "continuous" leaves stragglers out until they recover; "epoch_window" takes everybody back
            for the profiling window of each epoch, as the paper's section 4.2 does.
        answer_s: within how many seconds a member has to answer a Halt.
        patience_s: how long, at least, the others wait for a member that is not heard of; once a threshold
            is known, half as long as they wait for one that is slow until it is classed a straggler, if that
            is longer. Half, because to leave out one that comes after all costs little: it takes the state in
            the background and misses a few steps.
        join_s: how long a member that is joining may take to come, in seconds.
        deadline_s: how long the others wait where no threshold is known yet, in seconds.
        staleness_steps_max: how old the parameters may be at most with which a worker outside computes a
            gradient that counts, in steps, at least 1; None throws such gradients away.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        world: int,
        *,
        detector: dict[str, Any] | None = None,
        monitor: Monitor = "continuous",
        answer_s: float = 2.0,
        patience_s: float = 0.5,
        join_s: float = 60.0,
        deadline_s: float = 600.0,
        staleness_steps_max: int | None = None,
    ) -> None:
        if world < 1:
            raise ValueError(f"expected a world of at least 1 worker, got {world}")
        if monitor not in ("continuous", "epoch_window"):
            raise ValueError(f"expected the monitor continuous or epoch_window, got {monitor!r}")
        for name, value_s in {
            "answer_s": answer_s,
            "patience_s": patience_s,
            "join_s": join_s,
            "deadline_s": deadline_s,
        }.items():
            if not value_s > 0:
                raise ValueError(f"expected {name} of more than 0 s, got {value_s}")
        if staleness_steps_max is not None and staleness_steps_max < 1:
            raise ValueError(f"expected parameters of at least 1 step of age, got {staleness_steps_max}")
        self._world = world
        self._classifier = StragglerClassifier(**(detector or {}))
        self._dealing = Dealing(staleness_steps_max)
        self._monitor = monitor
        self._answer_s, self._patience_s = answer_s, patience_s
        self._join_s, self._deadline_s = join_s, deadline_s
        self._workers: dict[int, _Worker] = {}
        self._gone: set[int] = set()
        self._members: tuple[int, ...] = ()
        self._before: tuple[int, ...] = ()  # members of the group before, until all follow this one
        self._unfollowed: set[int] = set()  # who may still be in the group before, and stays
        self._arriving: set[int] = set()  # joining members that have not been Ready yet
        self._generation = 0  # of the last Group
        self._halted_generation = 0  # of the last Halt
        self._left_after: dict[int, int] = {}  # members that left or finished, after how many steps
        self._passed: set[int] = set()  # those of them whose end others have gone past
        self._fence: _Fence | None = None
        self._asked: frozenset[int] = frozenset()  # who has to answer a Halt: all that may be exchanging
        self._member_set: frozenset[int] = frozenset()
        # Rounds for which not all members are Ready: since when one is, how many are, and in which step.
        self._open: dict[int, tuple[float, int, int]] = {}
        self._uneven: Ready | None = None  # in another step than others are in the same round
        self._moved_s = 0.0  # when the last Group was named
        self._heard_s = 0.0  # when a member was last Ready, or asked whether it lives
        self._ready_s = 0.0  # when a member was last Ready
        self._round = -1  # the last for which a member was
        self._silence_s = 0.0  # how long nobody is, from one round to the next
        self._probe_after = _PROBE_FIRST  # times the patience, doubled each time that all have answered
        self._exchange_id = self._step = 0  # the first ones of the last Group
        self._begun_step = -1  # the furthest that a member was Ready for
        self._working = -1  # somebody who has not finished, as long as that is so; else looked for
        self._reachability = Reachability()
        self._apart: set[int] = set()  # who is left out because it cannot reach the members
        self._reported_s: float | None = None  # the first report since it was last seen who is left out
        self._stands = False  # most members are not heard: nothing is decided
        self._is_settled = False  # nothing that `_review` looks at has changed since it last did
        self._epoch_began: dict[int, int] = {}  # epoch: its first round
        self._is_in_window = True
        self._epochs_ended = 0
        self._first_finished_s: float | None = None
        self._is_over = False  # everybody has been dismissed, or the job stopped
        self._why: dict[int, str] = {}  # worker: the last thing that changed its place

    def handle(self, event: Event) -> list[Action]:
        """Answer with a Halt, a Group, a Stop or nothing; with a Refuse to who comes when all is over.

        Raises:
            ProtocolError: a message that no worker of a running job can send; nothing changes.
        """
        if self._is_over:
            return _turn_away(event) if isinstance(event, Joined) else []
        actions = self._answer(event)
        if self._dealing.is_used and not self._is_over:
            actions += self._dealing.deals()
        return actions

    def _answer(self, event: Event) -> list[Action]:
        match event:
            case Joined():
                return self._handle_joined(event)
            case Ready():
                return self._handle_ready(event)
            case Wants():
                self._known(event)
                self._dealing.wants(event)
                return []
            case Saving():
                self._known(event)
                self._dealing.saving(event)
                return []
            case Recalled():
                if event.worker not in self._gone:  # its answer crossed its own leave
                    self._known(event)
                    self._dealing.recalled(event)
                return []
            case Brought():
                self._known(event)
                self._dealing.brought(event, self._begun_step)
                return []
            case Halted():
                return self._handle_halted(event)
            case Left() | Lost() | Failed():
                return self._handle_gone(event)
            case Tick():
                return self._handle_tick(event.now_s)
            case Finished():
                return self._handle_finished(event)
            case LeftOut() | Clocked() | StepTimed() | Evaluated() | Preempted():
                return []
            case NodeEvent() | ValidationEvent():
                return []
            case PeerUnreachable() | PeerReachable():
                return self._handle_report(event)
            case _:
                assert_never(event)

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        fence = self._fence
        return {
            "classifier": self._classifier.state_dict(),
            "dealing": self._dealing.state_dict(),
            "workers": [[worker, asdict(state)] for worker, state in self._workers.items()],
            "gone": sorted(self._gone),
            "members": list(self._members),
            "before": list(self._before),
            "unfollowed": sorted(self._unfollowed),
            "arriving": sorted(self._arriving),
            "left_after": [list(one) for one in self._left_after.items()],
            "passed": sorted(self._passed),
            "generation": self._generation,
            "halted_generation": self._halted_generation,
            "fence": None
            if fence is None
            else {
                "generation": fence.generation,
                "abandon": fence.abandon,
                "since_s": fence.since_s,
                "answers": [asdict(answer) for answer in fence.answers.values()],
            },
            "open": [[round_, *one] for round_, one in self._open.items()],
            "moved_s": self._moved_s,
            "heard_s": self._heard_s,
            "probe_after": self._probe_after,
            "ready_s": self._ready_s,
            "round": self._round,
            "silence_s": self._silence_s,
            "exchange_id": self._exchange_id,
            "step": self._step,
            "begun_step": self._begun_step,
            "reachability": self._reachability.state_dict(),
            "apart": sorted(self._apart),
            "reported_s": self._reported_s,
            "stands": self._stands,
            "is_settled": self._is_settled,
            "epoch_began": [list(one) for one in self._epoch_began.items()],
            "is_in_window": self._is_in_window,
            "why": [list(one) for one in self._why.items()],
            "epochs_ended": self._epochs_ended,
            "first_finished_s": self._first_finished_s,
            "is_over": self._is_over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a policy with the same arguments."""
        self._classifier.load_state_dict(state["classifier"])
        self._dealing.load_state_dict(state["dealing"])
        self._workers = {worker: _Worker(**known) for worker, known in state["workers"]}
        self._gone = set(state["gone"])
        self._members, self._before = tuple(state["members"]), tuple(state["before"])
        self._unfollowed, self._arriving = set(state["unfollowed"]), set(state["arriving"])
        self._left_after = dict(state["left_after"])
        self._passed = set(state["passed"])
        self._generation = state["generation"]
        self._halted_generation = state["halted_generation"]
        fence = state["fence"]
        self._fence = None
        if fence is not None:
            answers = {one["worker"]: Halted(**one) for one in fence["answers"]}
            self._fence = _Fence(**{**fence, "answers": answers})
        self._open = {round_: (since_s, count, step) for round_, since_s, count, step in state["open"]}
        self._moved_s, self._exchange_id = state["moved_s"], state["exchange_id"]
        self._heard_s, self._probe_after = state["heard_s"], state["probe_after"]
        self._ready_s, self._round = state["ready_s"], state["round"]
        self._silence_s = state["silence_s"]
        self._step = state["step"]
        self._begun_step = state["begun_step"]
        self._set_groups(self._members, self._before)
        self._reachability.load_state_dict(state["reachability"])
        self._apart, self._stands = set(state["apart"]), state["stands"]
        self._reported_s = state["reported_s"]
        self._is_settled = state["is_settled"]
        self._epoch_began = dict(state["epoch_began"])
        self._is_in_window = state["is_in_window"]
        self._why = dict(state["why"])
        self._epochs_ended = state["epochs_ended"]
        self._first_finished_s = state["first_finished_s"]
        self._is_over = state["is_over"]

    # Events ----------------------------------------------------------------------------------------------

    def _handle_joined(self, event: Joined) -> list[Action]:
        if event.worker in self._workers or event.worker in self._gone:
            return []  # the assembly answers
        self._workers[event.worker] = _Worker(can_join=True, is_new=bool(self._members))
        self._classifier.add(event.worker)
        if self._members:
            self._why[event.worker] = f"worker {event.worker} is new"
            return self._review(event.now_s)
        if len(self._workers) < self._world:
            return []
        for state in self._workers.values():
            state.can_join = False
        self._set_groups(tuple(sorted(self._workers)), ())
        self._dealing.change(self._members, (), 0)
        self._moved_s = self._heard_s = self._ready_s = event.now_s
        reason = f"all {self._world} workers are here"
        return [self._group(step=0, joining=(), reason=reason)]

    def _handle_ready(self, event: Ready) -> list[Action]:
        """Take note of a Ready; with many workers this is called far more often than all else together."""
        worker = event.worker
        state = self._known(event)
        state.is_missed = False
        if state.is_hung or state.is_late:
            state.is_hung = state.is_late = False
            self._it_lives()
        is_asked = worker in self._asked
        ended: list[Action] = []
        if event.epoch >= self._epochs_ended and is_asked:
            ended = self._end_epochs(event.epoch)
        if not is_asked:
            self._ready_outside(event, state)
        elif event.generation == self._generation and worker in self._member_set:
            if self._before or self._arriving:
                self._arriving.discard(worker)
                self._unfollowed.discard(worker)
                if not self._unfollowed:
                    self._set_groups(self._members, ())
                    self._dealing.followed(event.now_s)
            self._ready_inside(event, state)
        elif worker not in self._arriving and event.generation != self._generation:
            self._ready_inside(event, state)  # still in a step of the group before
        else:
            self._ready_outside(event, state)
        if self._uneven is not None:
            return self._stop_uneven(self._uneven)
        if self._is_settled:
            return ended
        # Who has to answer a Halt may have become fewer.
        return ended + (self._review(event.now_s) or self._see_whether_all_answered(event.now_s))

    def _stop_uneven(self, event: Ready) -> list[Action]:
        """Replicas differ once their steps hold different rounds."""
        self._is_over = True
        return [
            Stop(
                worker=None,
                step=None,
                reason=f"worker {event.worker} is in step {event.step} and others are not, all in round "
                f"{event.round}: they take a step after different numbers of backward passes. Where samples "
                "are dealt as they are needed, workers may get one batch more or less than others: "
                'accumulate inside session.no_sync(), or use shards="equal"',
            )
        ]

    def _ready_inside(self, event: Ready, state: _Worker) -> None:
        before, round_ = state.round, event.round
        if round_ <= before:  # said again, to a coordinator that was started again
            return
        state.round, state.is_new = round_, False
        if round_ > self._round:
            if self._round >= 0:  # before the first round, a model may be compiled
                self._silence_s = max(event.now_s - self._ready_s, self._silence_s / 2)
            self._round = round_
        self._ready_s = self._heard_s = event.now_s
        self._probe_after = _PROBE_FIRST
        self._dealing.ready(event)
        self._begun_step = max(self._begun_step, event.step)
        if self._left_after:
            self._passed |= {worker for worker, steps in self._left_after.items() if steps <= event.step}
            self._is_settled = False
        began = self._epoch_began.get(event.epoch)
        if began is None:
            began = self._epoch_began[event.epoch] = round_
            for epoch in [epoch for epoch in self._epoch_began if epoch < event.epoch - 1]:
                del self._epoch_began[epoch]
        self._observe(event, max(0, round_ - began))
        if self._monitor == "epoch_window":
            is_in_window = self._classifier.in_window(round_ - began + 1)
            if is_in_window != self._is_in_window:
                self._is_in_window, self._is_settled = is_in_window, False
        if event.worker in self._member_set:
            self._count_ready(before, event)

    def _count_ready(self, before: int, event: Ready) -> None:
        """A member Ready for round `before` is so for the event's; a round of which all are is closed."""
        round_ = event.round
        is_open = False
        for other in tuple(self._open):
            if before < other <= round_:
                since_s, count, step = self._open[other]
                if other == round_:
                    is_open = True
                    if step not in (_UNKNOWN, event.step):
                        self._uneven = event
                    step = event.step
                if count + 1 == len(self._members):
                    del self._open[other]
                else:
                    self._open[other] = (since_s if count else event.now_s, count + 1, step)
        if not is_open:
            self._open_round(round_, event.now_s, event.step)

    def _open_round(self, round_: int, now_s: float, step: int = _UNKNOWN) -> None:
        count = sum(
            self._workers[member].round >= round_ for member in self._members if member in self._workers
        )
        if count < len(self._members):
            self._open[round_] = (now_s, count, step)

    def _ready_outside(self, event: Ready, state: _Worker) -> None:
        if not state.can_join:
            state.can_join = event.worker not in self._member_set
            self._is_settled = False
        if event.generation == self._generation and event.worker not in self._member_set:
            self._dealing.has_followed(event.worker)
            self._dealing.wishes(event.worker)
        self._dealing.outside(event.worker)
        state.iteration = state.iteration + 1 if state.epoch == event.epoch else 0
        state.epoch, state.is_new = event.epoch, False
        self._observe(event, state.iteration)

    def _observe(self, event: Ready, iteration: int) -> None:
        verdicts = self._classifier.observe(
            event.worker, epoch=event.epoch, iteration=iteration, compute_s=event.compute_s
        )
        for verdict in verdicts:
            self._why[verdict.worker] = f"worker {verdict.worker}: {verdict.reason}"
            self._is_settled = False

    def _handle_finished(self, event: Finished) -> list[Action]:
        state = self._known(event)
        if state.is_hung or state.is_late:
            self._it_lives()
        state.has_finished, state.is_hung, state.is_late, state.is_missed = True, False, False, False
        self._dealing.finished(event.worker)
        state.can_join = event.worker not in self._asked
        self._is_settled = False
        if not state.can_join:
            self._left_after[event.worker] = event.step
            self._arrives_no_more(event)
        if self._first_finished_s is None:
            self._first_finished_s = event.now_s
        self._why[event.worker] = f"worker {event.worker} has finished after {event.step} steps"
        ended = self._end_epochs(event.epoch + 1)
        is_urgent = self._passed or self._arriving or self._all_have_finished()
        return ended + self._review(event.now_s) if is_urgent else ended

    def _arrives_no_more(self, event: Finished | Left) -> None:
        if event.step <= self._begun_step:  # another has begun a step that this one will not do
            self._passed.add(event.worker)
        if event.worker in self._arriving:
            self._arriving.discard(event.worker)
            if event.step <= self._step:  # it has ended without the state that it was to take
                self._passed.add(event.worker)

    def _end_epochs(self, count: int) -> list[Action]:
        """Say that the first `count` epochs are over, once a member is done with them."""
        if count <= self._epochs_ended:
            return []
        self._epochs_ended = count
        return [EpochEnded(epoch=count - 1, reason=f"a member is done with epoch {count - 1}")]

    def _handle_halted(self, event: Halted) -> list[Action]:
        if event.worker in self._gone:  # its answer crossed its own leave
            return []
        self._known(event)
        state = self._workers[event.worker]
        state.is_new &= not event.has_state
        # A newcomer that waits for a state has nothing to be Ready with.
        is_new = not event.has_state and state.round < 0 and state.epoch < 0
        if state.is_hung or state.is_missed or (state.is_late and is_new):  # it lives
            state.is_hung = state.is_missed = False
            state.is_late &= not is_new
            self._it_lives()
            state.can_join = event.worker not in self._asked and not state.has_finished
        fence = self._fence
        if fence is not None and event.generation == fence.generation and event.worker in self._asked:
            fence.answers[event.worker] = event
            return self._see_whether_all_answered(event.now_s)
        return [] if self._is_settled else self._review(event.now_s)

    def _it_lives(self) -> None:
        """Somebody counts again that was given up."""
        self._is_settled = False
        if self._fence is not None:
            self._fence.pending = None

    def _handle_gone(self, event: Left | Lost | Failed) -> list[Action]:
        if event.worker not in self._workers:
            if event.worker in self._gone or not self._members:
                return []
            raise ProtocolError(f"expected a worker that has joined, got {_said(event)}")
        del self._workers[event.worker]
        self._gone.add(event.worker)
        self._reachability.forget(event.worker)
        self._dealing.gone(event.worker, is_heard_out=not isinstance(event, Lost))
        self._is_settled = False
        for verdict in self._classifier.remove(event.worker):
            self._why[verdict.worker] = f"worker {verdict.worker}: {verdict.reason}"
        match event:
            case Left():
                self._left_after[event.worker] = event.step
                self._arrives_no_more(event)
                why = f"worker {event.worker} has left after {event.step} steps"
            case Lost():
                why = f"worker {event.worker} was lost: {event.cause}"
            case Failed():
                why = f"worker {event.worker} failed after {event.step} steps: {event.error}"
            case _:
                assert_never(event)
        self._why[event.worker] = why
        if not self._members:
            return []
        if not self._workers:
            self._is_over = True
            if isinstance(event, Left):
                return []
            return [Stop(worker=event.worker, step=None, reason=f"{why}; nobody is left")]
        self._see_who_can_come_back(event.now_s)
        return self._review(event.now_s) or self._see_whether_all_answered(event.now_s)

    def _handle_tick(self, now_s: float) -> list[Action]:
        if self._stands:
            return []
        is_reported = self._reported_s is not None and now_s - self._reported_s >= _GATHER_S
        if is_reported and (self._generation or self._have_all_begun()):
            actions = self._leave_out(now_s)
            if actions:
                return actions
        self._dealing.tick(now_s, self._answer_s)
        return self._see_who_is_late(now_s)

    def _have_all_begun(self) -> bool:
        """Whether every member of the first group has been Ready: before, it may lack the first state."""
        known = [self._workers[member] for member in self._members if member in self._workers]
        return all(state.round >= 0 or state.has_finished for state in known)

    def _see_who_is_late(self, now_s: float) -> list[Action]:
        fence = self._fence
        if fence is not None:
            if now_s - fence.since_s <= self._answer_s:
                return []
            silent = [
                worker
                for worker in sorted(self._asked)
                if self._answers(worker) and worker not in fence.answers and worker not in self._apart
            ]
            if self._may_be_unheard(silent) and now_s - fence.since_s <= _MOST_SILENT_S:
                return []
            for worker in silent:
                self._workers[worker].is_hung = True
                self._why[worker] = f"worker {worker} did not answer within {self._answer_s:g} s"
        else:
            silent = self._overdue(now_s) or self._unfinished(now_s)
            if not silent and self._should_probe(now_s):
                return self._probe(now_s)
            for worker in silent:
                self._workers[worker].is_late = True
                self._why[worker] = f"worker {worker} has kept the others waiting for too long"
        for worker in silent:
            self._workers[worker].can_join = self._is_settled = False
        return (self._review(now_s) or self._see_whether_all_answered(now_s)) if silent else []

    def _should_probe(self, now_s: float) -> bool:
        # Who is joining is waited for with its own deadline; a change would go over its head.
        is_calm = bool(self._members) and not self._arriving and self._first_finished_s is None
        usual_s = max(self._least_patience(), self._silence_s)
        return is_calm and now_s - self._heard_s > self._probe_after * usual_s

    def _probe(self, now_s: float) -> list[Action]:
        """Ask all members whether they live.

        All may be Ready, and one hang in the exchange: then nobody says anything, and the links may be made
        to bear silence for long. Who lives answers at once and loses nothing.
        """
        silent_s = now_s - self._heard_s
        self._heard_s, self._probe_after = now_s, min(2 * self._probe_after, _PROBE_MAX)
        return self._halt(now_s, abandon=False, why=(), reason=f"nothing was heard for {silent_s:.1f} s")

    def _overdue(self, now_s: float) -> list[int]:
        """Return the members that are not heard of for too long while others wait."""
        late = []
        if now_s - self._moved_s > self._join_s:
            late += [member for member in sorted(self._arriving) if member in self._workers]
        if self._open:
            round_ = min(self._open)
            since_s, count, _ = self._open[round_]
            if count and now_s - since_s > self._patience():
                behind = [
                    member
                    for member in self._members
                    if member in self._workers
                    and member not in self._arriving
                    and not self._workers[member].has_finished
                    and self._workers[member].round < round_
                ]
                if not self._may_be_unheard(behind) or now_s - since_s > _MOST_SILENT_S:
                    late += behind
        return late

    def _may_be_unheard(self, silent: list[int]) -> bool:
        """Whether these are most of the members: then it may be the coordinator that is cut off."""
        return 2 * len(silent) > sum(member in self._workers for member in self._members)

    def _unfinished(self, now_s: float) -> list[int]:
        """Return the workers outside that do not come to an end although every member has."""
        if self._first_finished_s is None or now_s - self._first_finished_s <= self._join_s:
            return []
        working = [worker for worker, state in self._workers.items() if not state.has_finished]
        return [] if set(working) & self._member_set else working

    def _patience(self) -> float:
        slow_s = self._slow_s()
        return self._deadline_s if slow_s is None else max(self._patience_s, slow_s / 2)

    def _least_patience(self) -> float:
        return max(self._patience_s, (self._slow_s() or 0.0) / 2)

    def _slow_s(self) -> float | None:
        """How long others wait for one until it is classed a straggler; None while no threshold is known."""
        return self._classifier.wait_to_class_s(max(self._epoch_began, default=0))

    # Who cannot reach whom -------------------------------------------------------------------------------

    def _handle_report(self, event: PeerUnreachable | PeerReachable) -> list[Action]:
        if event.peer not in self._workers or (
            event.worker not in self._workers and event.worker is not None
        ):
            return []  # the report crossed the news that one of the two is gone
        self._reachability.on_report(event)
        if isinstance(event, PeerUnreachable) and self._reported_s is None:
            self._reported_s = event.now_s
        self._see_who_can_come_back(event.now_s)
        if self._is_settled or self._fence is None:
            return [] if self._is_settled else self._review(event.now_s)
        return self._review(event.now_s) or self._see_whether_all_answered(event.now_s)

    def _see_who_can_come_back(self, now_s: float) -> None:
        """Take note at once of who can reach all members again, and of who outside cannot any more."""
        before, self._stands = self._stands, self._are_most_unheard()
        if self._stands:
            return
        if before:
            self._wait_anew(now_s)
        if not (self._reachability or self._apart):
            self._reported_s = None
            return
        members = self._settled_members() - self._apart
        out = self._reachability.kept_out(members, self._workers.keys() - members)
        self._set_apart({worker for worker in out if worker in self._apart or worker not in self._asked}, out)

    def _leave_out(self, now_s: float) -> list[Action]:
        """Begin a change without those who cannot reach the others, if there are any more than before."""
        self._reported_s = None
        members = self._settled_members()
        out = self._reachability.left_out(members, self._workers.keys() - members)
        for worker in out.keys() & self._asked:
            self._workers[worker].is_missed = True
        self._set_apart(set(out), out)
        return [] if self._is_settled else self._review(now_s) or self._see_whether_all_answered(now_s)

    def _settled_members(self) -> set[int]:
        """Return the workers whose place nobody takes that cannot reach them."""
        up = {worker for worker, state in self._workers.items() if not (state.is_hung or state.is_late)}
        return (up & self._asked) - self._arriving

    def _set_apart(self, workers: set[int], reasons: dict[int, str]) -> None:
        if workers == self._apart:
            return
        for worker in workers - self._apart:
            self._why[worker] = reasons[worker]
        for worker in self._apart - workers:
            self._why[worker] = f"worker {worker} can reach the others again"
        self._apart = workers
        self._it_lives()

    def _are_most_unheard(self) -> bool:
        """Whether the coordinator does not hear most of those who were members when it last heard them."""
        unheard = self._reachability.unheard
        if not unheard:
            return False
        missed = {worker for worker in unheard if worker in self._workers and self._workers[worker].is_missed}
        present = {member for member in self._members if member in self._workers} | missed
        return 2 * len(present & unheard) > len(present)

    def _wait_anew(self, now_s: float) -> None:
        """Most members are heard again: while they were not, nobody was late."""
        self._is_settled = False
        if self._fence is not None:
            self._fence.since_s = now_s
        self._moved_s = self._heard_s = now_s
        self._open = {round_: (now_s, count, step) for round_, (_, count, step) in self._open.items()}
        if self._first_finished_s is not None:
            self._first_finished_s = now_s

    # Changes ---------------------------------------------------------------------------------------------

    def _review(self, now_s: float) -> list[Action]:
        """Begin a change if the group should be another one, or if one under way cannot be finished."""
        if self._stands:
            self._is_settled = False
            return []
        self._is_settled = True
        broken = [
            worker
            for worker in sorted(self._asked)
            if worker in self._passed or not (self._keeps_up(worker) or worker in self._left_after)
        ]
        if self._arriving and not self._goes_on():  # they would take a step with those who take none
            broken += sorted(self._arriving)
        if self._fence is not None:
            return self._halt(now_s, abandon=True, why=broken) if broken and not self._fence.abandon else []
        if broken:
            return self._halt(now_s, abandon=True, why=broken)
        wanted = self._wanted()
        if wanted == self._members and self._all_have_finished():
            return self._dismiss()
        has_ended = bool(self._left_after) or self._all_have_finished()
        if wanted == self._members or (self._before and not has_ended):
            return []
        if self._arriving:  # the others may have begun a step that needs them
            return []
        return self._halt(now_s, abandon=False, why=set(wanted) ^ set(self._members))

    def _set_groups(self, members: tuple[int, ...], before: tuple[int, ...]) -> None:
        """Take note of who is in the group, and who may still be in the one before."""
        self._members, self._before = members, before
        self._member_set = frozenset(members)
        self._asked = self._member_set.union(before)
        self._is_settled = False

    def _answers(self, worker: int) -> bool:
        return worker in self._workers and not self._workers[worker].is_hung

    def _keeps_up(self, worker: int) -> bool:
        return self._answers(worker) and not self._workers[worker].is_late and worker not in self._apart

    def _wanted(self) -> tuple[int, ...]:
        """Return who should be in the group; never nobody, while anybody is there."""
        if self._all_have_finished():
            return tuple(sorted(worker for worker in self._workers if self._keeps_up(worker)))
        goes_on, gives = self._goes_on(), self._gives()
        able = [
            worker
            for worker, state in self._workers.items()
            if self._keeps_up(worker)
            and worker not in self._passed
            and (
                worker in self._member_set
                or (goes_on and state.can_join and not state.has_finished and (gives or not state.is_new))
            )
        ]
        takes_all = self._monitor == "epoch_window" and self._is_in_window
        slow = frozenset() if takes_all else self._classifier.stragglers
        wanted = [worker for worker in able if worker not in slow]
        return tuple(sorted(wanted or able))

    def _goes_on(self) -> bool:
        """Whether a member that has the state takes further steps."""
        return any(
            self._is_working(member) and self._keeps_up(member)
            for member in self._members
            if member not in self._arriving
        )

    def _gives(self) -> bool:
        """Whether every member is in its loop, where it can give its state to one that is new."""
        return not any(
            self._workers[member].has_finished for member in self._members if member in self._workers
        )

    def _all_have_finished(self) -> bool:
        if self._is_working(self._working):
            return False
        working = [worker for worker in self._workers if self._is_working(worker)]
        self._working = working[len(working) // 2] if working else -1  # the next to finish is hardly this one
        return not working

    def _is_working(self, worker: int) -> bool:
        state = self._workers.get(worker)
        return state is not None and not (
            state.is_hung or state.is_late or state.has_finished or state.is_new
        )

    def _dismiss(self) -> list[Action]:
        self._is_over = True
        return [Dismiss(reason="everybody has finished")]

    def _halt(self, now_s: float, *, abandon: bool, why: Any, reason: str = "") -> list[Action]:
        self._halted_generation += 1
        self._fence = _Fence(generation=self._halted_generation, abandon=abandon, since_s=now_s)
        reasons = [self._why.get(worker, f"worker {worker}") for worker in sorted(why)[:8]]
        reason = "; ".join(reasons) or reason
        return [
            Halt(generation=self._halted_generation, abandon=abandon, reason=reason),
            *self._see_whether_all_answered(now_s),
        ]

    def _see_whether_all_answered(self, now_s: float) -> list[Action]:
        fence = self._fence
        if fence is None:
            return []
        if self._is_any_awaited(fence):
            return []
        asked = sorted(worker for worker in self._asked if worker in self._workers)
        answers = [fence.answers[worker] for worker in asked if worker in fence.answers]
        if len(answers) < len(asked) and not any(answer.has_state for answer in answers):
            return []  # who hangs may have the state
        self._fence = None
        return self._repeat(answers, now_s) if fence.abandon else self._change(answers, now_s)

    def _is_any_awaited(self, fence: _Fence) -> bool:
        """Whether somebody has to answer yet; with many workers this is called for every answer.

        Who is late is not waited for again, though it may have the only state.
        """
        if fence.pending is None:
            fence.pending = sorted(self._asked, reverse=True)
        while fence.pending:
            worker = fence.pending[-1]
            if worker in self._asked and worker not in fence.answers and self._keeps_up(worker):
                return True
            fence.pending.pop()
        return False

    def _change(self, answers: list[Halted], now_s: float) -> list[Action]:
        """Name the first step that nobody has begun, and who is in the group from there on."""
        if not any(answer.has_state for answer in answers):
            return self._end()
        holders = {answer.worker for answer in answers if answer.has_state}
        members = [
            worker
            for worker in self._wanted()
            if worker in holders or self._workers[worker].can_join or self._all_have_finished()
        ]
        kept = [worker for worker in members if worker in holders]
        if not kept:  # somebody must have the state
            kept = sorted(holders)
            members = sorted({*members, *kept})
        step = max(answer.step + answer.has_begun for answer in answers)
        ended = [worker for worker, steps in self._left_after.items() if steps < step]
        if ended:  # a step has begun that needs somebody who has left
            return self._halt(now_s, abandon=True, why=ended)
        joining = tuple(worker for worker in members if worker not in kept)
        reason = self._reason(set(members) ^ set(self._members)) or "all have answered"
        self._move(answers, tuple(members), joining, now_s)
        group = self._group(step=step, joining=joining, reason=reason)
        ahead = min(answer.round - answer.step for answer in answers if answer.has_state)
        self._dealing.change(self._members, joining, step, ahead)
        return [group, *self._dismiss()] if self._all_have_finished() else [group]

    def _repeat(self, answers: list[Halted], now_s: float) -> list[Action]:
        """Go on with those who have finished most; the others come back with the next change."""
        if not any(answer.has_state for answer in answers):
            return self._end()
        begun = max(answer.step + answer.has_begun for answer in answers)
        self._passed |= {worker for worker, steps in self._left_after.items() if steps < begun}
        if any(answer.has_state and answer.worker not in self._apart for answer in answers):
            reach = [answer for answer in answers if answer.worker not in self._apart]
        else:  # nobody else has the state
            reach = answers
            self._apart -= {answer.worker for answer in answers}
            self._reported_s = now_s
        furthest = max(answer.round for answer in reach if answer.has_state)
        ahead = [answer for answer in reach if answer.has_state and answer.round == furthest]
        wanted = self._wanted()
        members = [answer for answer in ahead if answer.worker in wanted] or ahead
        for answer in answers:
            if answer not in members and self._may_come_back(answer.worker):
                self._workers[answer.worker].can_join = True
                if answer.worker not in self._apart:
                    self._why[answer.worker] = f"worker {answer.worker} takes the state of the others"
        reason = self._reason(set(self._asked) - {answer.worker for answer in members})
        self._move(answers, tuple(sorted(answer.worker for answer in members)), (), now_s)
        step = min(answer.step for answer in members)
        group = self._group(step=step, joining=(), reason=reason)
        self._dealing.repeat(self._members, furthest, step)
        self._set_groups(self._members, ())  # it holds at once
        return [group, *self._review(now_s)]

    def _may_come_back(self, worker: int) -> bool:
        return not (worker in self._passed | self._classifier.stragglers or self._workers[worker].is_late)

    def _end(self) -> list[Action]:
        """Stop: all that had a state are gone."""
        self._is_over = True
        reason = self._reason(self._asked) or "every member is gone"
        return [
            Stop(worker=None, step=None, reason=f"{reason}; nobody has the state of the training any more")
        ]

    def _move(
        self, answers: list[Halted], members: tuple[int, ...], joining: tuple[int, ...], now_s: float
    ) -> None:
        # Also who is still in a group before that, if all were only asked whether they live.
        before = tuple(worker for worker in sorted(self._asked) if worker in self._workers)
        self._set_groups(members, before)
        self._unfollowed = set(members).intersection(before).difference(joining)
        self._arriving = set(joining)
        self._moved_s = self._heard_s = now_s
        for worker in members:
            self._workers[worker].can_join = self._workers[worker].is_late = False
        for worker in joining:
            self._workers[worker].round = -1
        self._left_after = {  # who has finished takes no part in what comes after, as a member too
            worker: steps for worker, steps in self._left_after.items() if worker in members
        }
        self._passed.clear()
        used = max(answer.exchange_id for answer in answers)
        self._exchange_id = max(used, self._exchange_id) + _EXCHANGES_IN_A_STEP_MAX
        self._open.clear()
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
        return "; ".join(self._why[worker] for worker in sorted(workers)[:8] if worker in self._why)

    def _known(self, event: Ready | Wants | Saving | Recalled | Brought | Halted | Finished) -> _Worker:
        state = self._workers.get(event.worker)
        if state is None or not self._members:
            raise ProtocolError(f"expected a worker of a job that has started, got {_said(event)}")
        return state


def _turn_away(event: Joined) -> list[Action]:
    who = f"worker {event.worker} ({event.place})"
    return [Refuse(peer=event.peer, reason=f"{who} cannot take part: it came when all others were done")]


def _said(event: Event) -> str:
    return f"{type(event).__name__} of worker {getattr(event, 'worker', None)}"
