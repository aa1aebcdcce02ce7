"""Partial all-reduce: averages over the workers that keep up, and changes the group when that set changes.

This module moves no tensor. The worker's side of the protocol is
`offbeat.policies.membership.group_membership`; stragglers are classified in
`offbeat.policies.stragglers.classifier`; how a group changes, in two phases, is described in
`offbeat.policies.membership.group_changer`.

**Theory of operation.** Every event updates what is known of its worker, and then the group is reviewed:

- `WorkerTable` and `CurrentGroup` hold the facts: which workers live, respond, have finished and are members;
- `RoundMonitor` finds members that are late and decides when to probe, `RoundQuorum` lets late members skip
  a round, `OutageMonitor` excludes workers that
  cannot reach the members, `StragglerMonitor` classifies by compute time;
- `GroupChanger` compares the group with the workers that should be in it, sends a Halt if they differ, and
  the Group when the answers are here;
- `GroupBlockAssigner` assigns samples to the members.

Invariants, besides those of the parts: members that are Ready for the same round are in the same step;
otherwise the job stops. While more than half of the members are silent, the coordinator assumes that it is
isolated itself, and decides nothing.

Timeouts: no `Halted` within `halt_timeout_s` makes a member hung; no Ready within the patience, while another
member waits, makes it late; a joining member has `join_timeout_s`. If every member is Ready and an exchange
hangs, nothing is received at all: then a planned Halt without a change serves as a probe. An excluded worker
returns by a planned change once it is Ready, or answers, and reaches all members. This holds, too, when all
members have finished and it trains on: one of them, which waits for the job's end, sends it the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    CheckpointQuery,
    ContributionReport,
    EndEpoch,
    Event,
    ExchangeUnderWay,
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
    Ready,
    RejectPeer,
    SamplesRequested,
    Tick,
)
from offbeat.policies.data.group_assigner import GroupBlockAssigner
from offbeat.policies.membership.current_group import CurrentGroup
from offbeat.policies.membership.group_changer import GroupChanger
from offbeat.policies.membership.outage_monitor import OutageMonitor
from offbeat.policies.membership.round_monitor import RoundMonitor
from offbeat.policies.membership.round_quorum import RoundQuorum
from offbeat.policies.membership.worker_table import WorkerStatus, WorkerTable
from offbeat.policies.stragglers.classifier import ClassChange
from offbeat.policies.stragglers.monitor import MonitoringMode, StragglerMonitor


class PartialGroups:
    """Groups of the workers that are not stragglers, are alive, and respond.

    Source: the dynamic worker classification (DWC) paper, section 4, and DPAR (with `threshold_s` in
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
        quorum: arguments of `RoundQuorum`; None lets every round wait for all members.

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
        quorum: dict[str, Any] | None = None,
    ) -> None:
        if world < 1:
            raise ValueError(f"expected a world of at least 1 worker, got {world}")
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
        self._world, self._answer_s = world, halt_timeout_s
        self._workers, self._group = WorkerTable(), CurrentGroup()
        self._stragglers = StragglerMonitor(detector or {}, monitor)
        self._assigner = GroupBlockAssigner(staleness_steps_max)
        self._outages = OutageMonitor(self._workers, self._group)
        self._rounds = RoundMonitor(
            self._workers,
            self._group,
            patience_min_s=patience_min_s,
            join_timeout_s=join_timeout_s,
            timeout_s=timeout_s,
        )
        self._quorum = None if quorum is None else RoundQuorum(self._workers, self._group, **quorum)
        self._changer = GroupChanger(
            self._workers,
            self._group,
            self._stragglers,
            self._outages,
            self._rounds,
            self._assigner,
            halt_timeout_s,
        )
        self._epochs_ended = 0
        self._is_over = False  # all workers have been dismissed, or the job was stopped

    def handle(self, event: Event) -> list[Action]:
        """Return a Halt, a Group, SkipRounds, an AbortJob or nothing; after the end, RejectPeer for a Joined.

        Raises:
            ProtocolError: an event that no worker of a running job can cause; nothing changes.
        """
        if self._is_over:
            return _refuse(event) if isinstance(event, Joined) else []
        actions = self._dispatch(event)
        if actions and any(isinstance(action, AbortJob | JobComplete) for action in actions):
            self._is_over = True
        if self._is_over:
            return actions
        if self._quorum is not None and not self._changer.is_pending:
            last_round = self._rounds.last_round
            if last_round is not None:
                actions += self._quorum.late_members(*last_round)
        if self._assigner.is_active:
            actions += self._assigner.pop_actions()
        return actions

    def _dispatch(self, event: Event) -> list[Action]:
        match event:
            case Joined():
                return self._handle_joined(event)
            case Ready():
                return self._handle_ready(event)
            case SamplesRequested():
                self._status_of(event)
                self._assigner.on_samples_requested(event)
                return []
            case CheckpointQuery():
                self._status_of(event)
                self._assigner.on_checkpoint_query(event)
                return []
            case ContributionReport():
                if not self._workers.is_gone(event.worker):  # the answer crossed the worker's Left
                    self._status_of(event)
                    self._assigner.on_contribution_report(event)
                return []
            case LateGradientArrived():
                self._status_of(event)
                self._assigner.on_late_gradient(event, self._group.begun_step)
                return []
            case ExchangeUnderWay():
                self._status_of(event)
                self._rounds.on_exchange_under_way(event)
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
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return {**parts, "epochs_ended": self._epochs_ended, "is_over": self._is_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a policy with the same arguments."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self._epochs_ended, self._is_over = state["epochs_ended"], state["is_over"]

    def _parts(self) -> dict[str, Any]:
        parts = {
            "workers": self._workers,
            "group": self._group,
            "stragglers": self._stragglers,
            "assigner": self._assigner,
            "outages": self._outages,
            "rounds": self._rounds,
            "changer": self._changer,
        }
        return parts if self._quorum is None else {**parts, "quorum": self._quorum}

    # Steps -----------------------------------------------------------------------------------------------

    def _handle_joined(self, event: Joined) -> list[Action]:
        worker, statuses = event.worker, self._workers.statuses
        if worker in statuses or self._workers.is_gone(worker):
            return []  # Assembly answers
        has_started = bool(self._group.members)
        statuses[worker] = WorkerStatus(can_join=has_started, is_new=has_started)
        self._stragglers.classifier.add(worker)
        if has_started:
            self._workers.note(worker, f"worker {worker} is new")
            return self._changer.review(event.now_s)
        if len(statuses) < self._world:
            return []
        self._rounds.start(event.now_s)
        return [self._changer.start(f"all {self._world} workers are here")]

    def _handle_ready(self, event: Ready) -> list[Action]:
        """Process a Ready; with many workers, most calls of this policy end here."""
        worker, group = event.worker, self._group
        status = self._status_of(event)
        status.is_silent_since_exclusion = False
        if status.is_hung or status.is_late:
            status.is_hung = status.is_late = False
            self._changer.on_reachability_changed()
        is_asked = worker in group.halt_recipients
        ended: list[Action] = []
        if event.epoch >= self._epochs_ended and is_asked:
            ended = self._end_epochs(event.epoch)
        is_in_step = True
        if not is_asked:
            self._ready_outside(event, status)
        elif event.generation == group.generation and worker in group.member_set:
            if group.on_switched(worker):
                self._changer.is_settled = False
                self._assigner.on_group_in_force(event.now_s)
            is_in_step = self._ready_inside(event, status)
        elif worker not in group.joining and event.generation != group.generation:
            is_in_step = self._ready_inside(event, status)  # still in a step of the group before
        else:
            self._ready_outside(event, status)
        if not is_in_step:
            return _stop_out_of_step(event)
        if self._changer.is_settled:
            return ended
        # The workers that have to answer a Halt may have become fewer.
        return ended + self._changer.proceed(event.now_s)

    def _ready_inside(self, event: Ready, status: WorkerStatus) -> bool:
        """Process a member's Ready; return whether its step is that of the others in its round."""
        if event.round <= status.round:  # sent again, to a restarted coordinator
            return True
        status.is_new = False
        if self._quorum is not None:
            self._quorum.on_ready(event)
        self._assigner.on_ready(event)
        self._group.on_step_begun(event.step)
        changes, has_window_changed = self._stragglers.observe_member(event)
        if changes:
            self._note_classes(changes)
        if has_window_changed or self._group.ended_after:
            self._changer.is_settled = False
        return self._rounds.on_ready(event, status)

    def _ready_outside(self, event: Ready, status: WorkerStatus) -> None:
        is_member = event.worker in self._group.member_set
        if not status.can_join:
            status.can_join = not is_member
            self._changer.is_settled = False
        if event.generation == self._group.generation and not is_member:
            self._assigner.on_left_group(event.worker)
            self._assigner.on_idle(event.worker)
        self._assigner.on_ready_outside(event.worker)
        status.iteration = status.iteration + 1 if status.epoch == event.epoch else 0
        status.epoch, status.is_new = event.epoch, False
        self._note_classes(self._stragglers.observe(event, status.iteration))

    def _note_classes(self, changes: Iterable[ClassChange]) -> None:
        for change in changes:
            self._workers.note(change.worker, f"worker {change.worker}: {change.reason}")
            self._changer.is_settled = False

    def _handle_finished(self, event: Finished) -> list[Action]:
        worker, group, status = event.worker, self._group, self._status_of(event)
        if status.is_hung or status.is_late:
            self._changer.on_reachability_changed()
        status.has_finished, status.is_hung, status.is_late, status.is_silent_since_exclusion = (
            True,
            False,
            False,
            False,
        )
        self._assigner.on_finished(worker)
        status.can_join = worker not in group.halt_recipients
        self._changer.is_settled = False
        if not status.can_join:
            group.on_ended(worker, event.step)
        self._rounds.on_finished(event.now_s)
        self._workers.note(worker, f"worker {worker} has finished after {event.step} steps")
        # Where the loop left its last epoch early, its samples are there for a worker that trains on.
        is_used_up = not self._assigner.has_samples_left(event.epoch)
        ended = self._end_epochs(event.epoch + 1 if is_used_up else event.epoch)
        if not self._changer.has_working_member():
            self._await_workers_outside()
        is_urgent = group.overtaken or group.joining or self._workers.all_have_finished()
        return ended + self._changer.review(event.now_s) if is_urgent else ended

    def _await_workers_outside(self) -> None:
        """Let workers outside join only with their next Ready: most end their loop with the epoch instead."""
        for worker, status in self._workers.statuses.items():
            if worker not in self._group.halt_recipients and not status.is_new:
                status.can_join = False

    def _end_epochs(self, count: int) -> list[Action]:
        """Announce the end of the first `count` epochs, once a member has finished them."""
        if count <= self._epochs_ended:
            return []
        self._epochs_ended = count
        return [EndEpoch(epoch=count - 1, reason=f"a member is done with epoch {count - 1}")]

    # Workers that do not respond -------------------------------------------------------------------------

    def _handle_halted(self, event: Halted) -> list[Action]:
        if self._workers.is_gone(event.worker):  # the answer crossed the worker's Left
            return []
        status = self._status_of(event)
        status.is_new &= not event.has_state
        # A new worker that waits for a state has no gradients with which it could be Ready.
        is_new = not event.has_state and status.round < 0 and status.epoch < 0
        if status.is_hung or status.is_silent_since_exclusion or (status.is_late and is_new):  # it is alive
            status.is_hung = status.is_silent_since_exclusion = False
            status.is_late &= not is_new
            self._changer.on_reachability_changed()
            status.can_join = event.worker not in self._group.halt_recipients and not status.has_finished
        return self._changer.on_halted(event)

    def _handle_gone(self, event: Left | Lost | Failed) -> list[Action]:
        worker = event.worker
        if worker not in self._workers.statuses:
            if self._workers.is_gone(worker) or not self._group.members:
                return []
            raise ProtocolError(f"expected a worker that has joined, got {_description(event)}")
        self._workers.remove(worker)
        if self._quorum is not None:
            self._quorum.remove(worker)
        self._outages.forget(worker)
        self._assigner.on_gone(worker, has_reported_all=not isinstance(event, Lost))
        self._changer.is_settled = False
        self._note_classes(self._stragglers.remove(worker))
        match event:
            case Left():
                self._group.on_ended(worker, event.step)
                why = f"worker {worker} has left after {event.step} steps"
            case Lost():
                why = f"worker {worker} was lost: {event.cause}"
            case Failed():
                why = f"worker {worker} failed after {event.step} steps: {event.error}"
            case _:
                assert_never(event)
        self._workers.note(worker, why)
        if not self._group.members:
            return []
        if not self._workers.statuses:
            self._is_over = True
            if isinstance(event, Left):
                return []
            return [AbortJob(worker=worker, step=None, reason=f"{why}; no worker is left")]
        self._update_outages(event.now_s)
        return self._changer.proceed(event.now_s)

    def _handle_report(self, event: PeerUnreachable | PeerReachable) -> list[Action]:
        if not self._outages.on_report(event):
            return []
        self._update_outages(event.now_s)
        return self._changer.proceed(event.now_s)

    def _update_outages(self, now_s: float) -> None:
        was_isolated = self._outages.is_isolated
        if self._outages.update():
            self._changer.on_reachability_changed()
        if was_isolated and not self._outages.is_isolated:
            self._rounds.restart_timeouts(now_s)
            self._changer.restart_timeout(now_s)

    def _handle_tick(self, now_s: float) -> list[Action]:
        if self._outages.is_isolated:
            return []
        if self._outages.is_exclusion_due(now_s):
            if self._outages.exclude():
                self._changer.on_reachability_changed()
            actions = self._changer.proceed(now_s)
            if actions:
                return actions
        self._assigner.on_tick(now_s, self._answer_s)
        return self._check_timeouts(now_s)

    def _check_timeouts(self, now_s: float) -> list[Action]:
        statuses = self._workers.statuses
        if self._changer.is_pending:
            silent = self._changer.hung_workers(now_s)
            for worker in silent:
                statuses[worker].is_hung = True
                self._workers.note(worker, f"worker {worker} did not answer within {self._answer_s:g} s")
        else:
            slow_s = self._stragglers.time_to_classify_s()
            silent = self._rounds.late_workers(now_s, slow_s)
            silent_s = None if silent else self._rounds.begin_probe(now_s, slow_s)
            if silent_s is not None:
                return self._changer.probe(now_s, f"nothing was received for {silent_s:.1f} s")
            for worker in silent:
                statuses[worker].is_late = True
                self._workers.note(
                    worker, f"worker {worker} was not ready in time while other workers waited"
                )
        for worker in silent:
            statuses[worker].can_join = self._changer.is_settled = False
        return self._changer.proceed(now_s) if silent else []

    def _status_of(
        self,
        event: Ready
        | SamplesRequested
        | CheckpointQuery
        | ContributionReport
        | LateGradientArrived
        | ExchangeUnderWay
        | Halted
        | Finished,
    ) -> WorkerStatus:
        status = self._workers.statuses.get(event.worker)
        if status is None or not self._group.members:
            raise ProtocolError(f"expected a worker of a job that has started, got {_description(event)}")
        return status


def _stop_out_of_step(event: Ready) -> list[Action]:
    """Stop the job: replicas differ once their steps consist of different rounds."""
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


def _refuse(event: Joined) -> list[Action]:
    newcomer = f"worker {event.worker} ({event.location})"
    return [
        RejectPeer(peer=event.peer, reason=f"{newcomer} cannot take part: it came when all others were done")
    ]


def _description(event: Event) -> str:
    return f"{type(event).__name__} of worker {getattr(event, 'worker', None)}"
