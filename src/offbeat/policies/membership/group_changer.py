"""Changes of the group of workers, in two phases; a component of group policies.

Which workers are late, unreachable or stragglers is decided elsewhere; here, what follows for the group.

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

A member that has finished stays in the group, without a step of its own, until another one begins a step that
it does not take. Where all members have finished, and a worker outside trains on, the planned change is one
of finished members, which send the state, and joining ones, a straggler too: no worker trains outside a group
without a member that trains.

A planned change under way turns into a repeat as soon as a member fails. The next planned change waits until
every joining member has been Ready and, unless a member has ended, every other one has switched; a repeat
waits for nothing.

Invariants:

- Generations rise. A Halt supersedes every older Halt, and every older Group that arrives after it.
- Exchange ids of a Group begin 2**16 above the highest id that a member reported, so none is used twice.
- A member that is not joining holds the state. If no answer comes from a holder, the job stops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from offbeat.events import AbortJob, Action, Group, Halt, Halted, JobComplete
from offbeat.policies.data.group_assigner import GroupBlockAssigner
from offbeat.policies.membership.current_group import CurrentGroup
from offbeat.policies.membership.outage_monitor import OutageMonitor
from offbeat.policies.membership.round_monitor import MOST_SILENT_S, RoundMonitor
from offbeat.policies.membership.worker_table import WorkerTable
from offbeat.policies.stragglers.monitor import StragglerMonitor

# Exchanges that members may still begin in the step under way when they answer a Halt, repetitions included.
_EXCHANGES_IN_A_STEP_MAX = 2**16


@dataclass(kw_only=True)
class _PendingChange:
    """A change under way: its Halt was sent."""

    generation: int
    abandon: bool
    since_s: float
    answers: dict[int, Halted] = field(default_factory=dict)
    awaited: list[int] | None = None  # workers whose answers may still be awaited; None: all recipients

    def to_plain(self) -> dict[str, Any]:
        answers = [asdict(answer) for answer in self.answers.values()]
        return {
            "generation": self.generation,
            "abandon": self.abandon,
            "since_s": self.since_s,
            "answers": answers,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> _PendingChange:
        answers = {answer["worker"]: Halted(**answer) for answer in plain["answers"]}
        return cls(**{**plain, "answers": answers})


class GroupChanger:
    """Keeps the group to the workers that keep up and are no stragglers, and ends the job when all are done.

    Args:
        workers: the workers, of which it sets `can_join` and `is_late` when the group changes.
        group: the group, which only this object changes.
        stragglers: returns which workers are excluded.
        outages: returns whether anything may be decided; readmits workers when no other has the state.
        rounds: receives new groups.
        assigner: receives new groups.
        halt_timeout_s: time in which a member has to answer a Halt, in seconds.

    Attributes:
        is_settled: nothing that `review` reads has changed since its last call.
    """

    def __init__(
        self,
        workers: WorkerTable,
        group: CurrentGroup,
        stragglers: StragglerMonitor,
        outages: OutageMonitor,
        rounds: RoundMonitor,
        assigner: GroupBlockAssigner,
        halt_timeout_s: float,
    ) -> None:
        self._workers, self._group = workers, group
        self._stragglers, self._outages, self._rounds = stragglers, outages, rounds
        self._assigner = assigner
        self._answer_s = halt_timeout_s
        self._halted_generation = 0  # of the last Halt
        self._pending: _PendingChange | None = None
        self.is_settled = False

    @property
    def is_pending(self) -> bool:
        """Whether a change is under way."""
        return self._pending is not None

    def on_reachability_changed(self) -> None:
        """Review again, and find again whose answers are awaited: which workers respond has changed."""
        self.is_settled = False
        if self._pending is not None:
            self._pending.awaited = None

    def restart_timeout(self, now_s: float) -> None:
        """Let the time for answers begin now."""
        self.is_settled = False
        if self._pending is not None:
            self._pending.since_s = now_s

    def start(self, reason: str) -> Group:
        """Form the first group, of all workers."""
        group = self._group.change(tuple(sorted(self._workers.statuses)), reason=reason)
        self.is_settled = False
        self._assigner.change_group(group.members, (), 0)
        self._stragglers.lines.set_members(group.members)
        return group

    def proceed(self, now_s: float) -> list[Action]:
        """Begin or finish a change if anything has changed that matters for it."""
        return [] if self.is_settled else self.review(now_s) or self._finish_if_answered(now_s)

    def review(self, now_s: float) -> list[Action]:
        """Begin a change if the group should be different, or if the change under way cannot finish."""
        if self._outages.is_isolated:
            self.is_settled = False
            return []
        self.is_settled = True
        group = self._group
        broken = [
            worker
            for worker in sorted(group.halt_recipients)
            if worker in group.overtaken
            or not (self._workers.keeps_up(worker) or worker in group.ended_after)
        ]
        if group.joining and group.joining_need_others and not self.has_working_member():
            broken += sorted(group.joining)
        if self._pending is not None and (self._pending.abandon or not broken):
            return []
        if broken:
            return self._halt(now_s, abandon=True, workers=broken)
        wanted = self._target_members()
        if wanted == group.members and self._workers.all_have_finished():
            return self._complete_job()
        has_ended = bool(group.ended_after) or self._workers.all_have_finished()
        if wanted == group.members or (group.previous_members and not has_ended):
            return []
        if group.joining:  # other members may have begun a step that needs them
            return []
        return self._halt(now_s, abandon=False, workers=set(wanted) ^ set(group.members))

    def _target_members(self) -> tuple[int, ...]:
        """Return the workers that should be in the group; not empty while any worker is able."""
        workers, group = self._workers, self._group
        if workers.all_have_finished():
            return tuple(sorted(worker for worker in workers.statuses if workers.keeps_up(worker)))
        # A new worker joins only where all members train, so that it does not delay the end.
        accepts_new_workers = not any(
            workers.statuses[member].has_finished for member in group.members if member in workers.statuses
        )
        candidates = [
            worker
            for worker, status in workers.statuses.items()
            if workers.keeps_up(worker)
            and worker not in group.overtaken
            and (
                worker in group.member_set
                or (
                    status.can_join and not status.has_finished and (accepts_new_workers or not status.is_new)
                )
            )
        ]
        slow = self._stragglers.left_out
        wanted = [worker for worker in candidates if worker not in slow]
        if not any(workers.is_working(worker) for worker in wanted):  # a straggler is better than no worker
            wanted = candidates
        return tuple(sorted(wanted))

    def has_working_member(self) -> bool:
        """Whether a member that holds the state does further steps."""
        return any(
            self._workers.is_working(member) and self._workers.keeps_up(member)
            for member in self._group.members
            if member not in self._group.joining
        )

    def _complete_job(self) -> list[Action]:
        return [JobComplete(reason="all workers have finished")]

    # Answers ---------------------------------------------------------------------------------------------

    def probe(self, now_s: float, reason: str) -> list[Action]:
        """Send all members a Halt that changes nothing, to find one that hangs in the exchange.

        A member that is alive answers at once and loses nothing.
        """
        return self._halt(now_s, abandon=False, workers=(), reason=reason)

    def _halt(self, now_s: float, *, abandon: bool, workers: Iterable[int], reason: str = "") -> list[Action]:
        self._halted_generation += 1
        self._pending = _PendingChange(generation=self._halted_generation, abandon=abandon, since_s=now_s)
        reason = self._workers.reason(workers, names_all=True) or reason
        return [
            Halt(generation=self._halted_generation, abandon=abandon, reason=reason),
            *self._finish_if_answered(now_s),
        ]

    def on_halted(self, event: Halted) -> list[Action]:
        """Process an answer; one to an earlier Halt only shows that its worker is alive."""
        change = self._pending
        if (
            change is not None
            and event.generation == change.generation
            and event.worker in self._group.halt_recipients
        ):
            change.answers[event.worker] = event
            return self._finish_if_answered(event.now_s)
        return [] if self.is_settled else self.review(event.now_s)

    def hung_workers(self, now_s: float) -> list[int]:
        """Return the workers that have not answered the pending Halt in time."""
        change = self._pending
        if change is None or now_s - change.since_s <= self._answer_s:
            return []
        statuses = self._workers.statuses
        silent = [
            worker
            for worker in sorted(self._group.halt_recipients)
            if worker in statuses
            and not statuses[worker].is_hung
            and worker not in change.answers
            and worker not in self._workers.unreachable
        ]
        are_most = self._workers.are_most_of(silent, self._group.members)
        return [] if are_most and now_s - change.since_s <= MOST_SILENT_S else silent

    def _finish_if_answered(self, now_s: float) -> list[Action]:
        change = self._pending
        if change is None or self._is_answer_awaited(change):
            return []
        asked = sorted(worker for worker in self._group.halt_recipients if worker in self._workers.statuses)
        answers = [change.answers[worker] for worker in asked if worker in change.answers]
        has_state = any(answer.has_state for answer in answers)
        if len(answers) < len(asked) and not has_state:
            return []  # a hung worker may hold the state
        self._pending = None
        if not has_state:
            return self._stop_without_state()
        return self._repeat_step(answers, now_s) if change.abandon else self._plan_group(answers, now_s)

    def _is_answer_awaited(self, change: _PendingChange) -> bool:
        """Whether an answer is still awaited; this is called for every answer.

        A late worker is not awaited again, though it may hold the only state.
        """
        recipients = self._group.halt_recipients
        if change.awaited is None:
            change.awaited = sorted(recipients, reverse=True)
        while change.awaited:
            worker = change.awaited[-1]
            if worker in recipients and worker not in change.answers and self._workers.keeps_up(worker):
                return True
            change.awaited.pop()
        return False

    # New groups ------------------------------------------------------------------------------------------

    def _plan_group(self, answers: list[Halted], now_s: float) -> list[Action]:
        """Send the Group for the first step that no member has begun."""
        holders = {answer.worker for answer in answers if answer.has_state}
        all_have_finished = self._workers.all_have_finished()
        members = [
            worker
            for worker in self._target_members()
            if worker in holders or self._workers.statuses[worker].can_join or all_have_finished
        ]
        kept = [worker for worker in members if worker in holders]
        if not kept:  # at least one member must hold the state
            kept = sorted(holders)
            members = sorted({*members, *kept})
        step = max(answer.step + answer.has_begun_exchange for answer in answers)
        ended = self._group.ended_before(step)
        if ended:  # a step has begun that needs a worker that has ended
            return self._halt(now_s, abandon=True, workers=ended)
        joining = tuple(worker for worker in members if worker not in kept)
        reason = self._workers.reason(set(members) ^ set(self._group.members)) or "all members have answered"
        # After a probe, this includes workers that are still in the group before the last one.
        before = tuple(
            worker for worker in sorted(self._group.halt_recipients) if worker in self._workers.statuses
        )
        group = self._change_group(answers, tuple(members), joining, before, step, reason, now_s)
        ahead = min(answer.round - answer.step for answer in answers if answer.has_state)
        self._assigner.change_group(group.members, joining, step, ahead)
        return [group, *self._complete_job()] if self._workers.all_have_finished() else [group]

    def _repeat_step(self, answers: list[Halted], now_s: float) -> list[Action]:
        """Continue with the members that have finished most; the rest return with the next change."""
        workers, group = self._workers, self._group
        begun = max(answer.step + answer.has_begun_exchange for answer in answers)
        group.overtaken.update(group.ended_before(begun))
        reach = [answer for answer in answers if answer.worker not in workers.unreachable]
        if not any(answer.has_state for answer in reach):  # only unreachable workers hold the state
            reach = answers
            self._outages.readmit([answer.worker for answer in answers], now_s)
        furthest = max(answer.round for answer in reach if answer.has_state)
        ahead = [answer for answer in reach if answer.has_state and answer.round == furthest]
        wanted = self._target_members()
        kept = [answer for answer in ahead if answer.worker in wanted] or ahead
        for answer in answers:
            if answer not in kept and self._can_return(answer.worker):
                workers.statuses[answer.worker].can_join = True
                if answer.worker not in workers.unreachable:
                    workers.note(answer.worker, f"worker {answer.worker} receives the state of a member")
        members = tuple(sorted(answer.worker for answer in kept))
        reason = workers.reason(group.halt_recipients.difference(members))
        step = min(answer.step for answer in kept)
        # It is in force at once: nobody is still in the group before.
        action = self._change_group(answers, members, (), (), step, reason, now_s)
        self._assigner.repeat_round(members, furthest, step)
        return [action, *self.review(now_s)]

    def _can_return(self, worker: int) -> bool:
        return not (
            worker in self._group.overtaken
            or worker in self._stragglers.stragglers
            or self._workers.statuses[worker].is_late
        )

    def _stop_without_state(self) -> list[Action]:
        """Stop the job: every worker that held the state is gone."""
        reason = self._workers.reason(self._group.halt_recipients) or "every member is gone"
        return [
            AbortJob(worker=None, step=None, reason=f"{reason}; no worker holds the training state any more")
        ]

    def _change_group(
        self,
        answers: list[Halted],
        members: tuple[int, ...],
        joining: tuple[int, ...],
        before: tuple[int, ...],
        step: int,
        reason: str,
        now_s: float,
    ) -> Group:
        statuses = self._workers.statuses
        is_last = self._workers.all_have_finished()  # new workers join it, too, without a step
        used = max(answer.exchange_id for answer in answers)
        group = self._group.change(
            members,
            joining=joining,
            before=before,
            finished=() if is_last else [worker for worker in members if statuses[worker].has_finished],
            generation=self._halted_generation,
            step=step,
            exchange_id=self._group.next_exchange_id(used, _EXCHANGES_IN_A_STEP_MAX),
            reason=reason,
        )
        self.is_settled = False
        for worker in members:
            statuses[worker].can_join = statuses[worker].is_late = False
        for worker in joining:
            statuses[worker].round = -1
        self._rounds.on_group_changed(max(answer.round for answer in answers), now_s)
        self._stragglers.lines.set_members(group.members)
        return group

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, without that of the other parts."""
        return {
            "halted_generation": self._halted_generation,
            "pending": None if self._pending is None else self._pending.to_plain(),
            "is_settled": self.is_settled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        pending = state["pending"]
        self._halted_generation, self.is_settled = state["halted_generation"], state["is_settled"]
        self._pending = None if pending is None else _PendingChange.from_plain(pending)
