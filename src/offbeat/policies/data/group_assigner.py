"""Assigns samples to the members of groups that change; a component of group policies.

The reasons why groups change are not known here; `offbeat.policies.data.block_scheduler` cuts an epoch into
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    Block,
    ContributionQuery,
    ContributionReport,
    LateGradientArrived,
    Ready,
    SamplesRequested,
)
from offbeat.policies.data.assigner import BlockAssigner
from offbeat.policies.data.late_blocks import LateBlockAssigner

_QUERIED_MAX = 8  # members queried about one worker; an answer is lost only if all of them die
_ALL_ROUNDS = 2**63  # rounds done, of a worker whose loop has ended


@dataclass(kw_only=True)
class _Unreported:
    """A worker that cannot report its last contributions itself.

    Attributes:
        last: the last round in which it took part.
        is_lost: the worker is lost.
        asked: members that were queried and have not answered.
        rounds: the known contributions: counts of own and of adopted blocks, by round.
    """

    last: int
    is_lost: bool
    asked: set[int] = field(default_factory=set)
    rounds: dict[int, tuple[int, int]] = field(default_factory=dict)

    def to_plain(self) -> list[Any]:
        return [
            self.last,
            self.is_lost,
            sorted(self.asked),
            [[round_, *counts] for round_, counts in self.rounds.items()],
        ]

    @classmethod
    def from_plain(cls, last: int, is_lost: bool, asked: list[int], rounds: list[list[int]]) -> _Unreported:
        rounds_by_number = {round_: (own, late) for round_, own, late in rounds}
        return cls(last=last, is_lost=is_lost, asked=set(asked), rounds=rounds_by_number)


class GroupBlockAssigner(BlockAssigner):
    """Assigns samples so that each is used once, while rounds are repeated and workers leave.

    A round is completed once every member is known to have finished it, because then no member can repeat it,
    and no member has asked for a checkpoint without it.
    A worker outside a new group keeps its blocks until it has acknowledged that group, because its
    contribution to its last step may be reported late; then the rest of its blocks goes to other workers.

    A worker that is lost, or excluded and silent, may have taken part in rounds that other members have
    finished and that it could not report any more (its connection to the coordinator was cut, or the
    coordinator died with it). Those members received in these exchanges how many blocks it contributed, and
    are queried. Until one has answered, no round is completed, and the worker's blocks are not assigned to
    other workers.

    Args:
        staleness_steps_max: assign late blocks to workers outside the group, whose gradients count if their
            parameters are not older than this (see `LateBlockAssigner`); None assigns none.

    Attributes:
        is_active: a worker has requested samples. Until then no rounds are recorded.

    Size: a round is completed, and a checkpoint query answered, only when no member is behind, no worker is
    leaving or lost and no contribution is unreported; nearly every event changes several of these together.
    """

    _awaited_reason: ClassVar[str] = "other members wait"

    def __init__(self, staleness_steps_max: int | None = None) -> None:
        super().__init__()
        self.is_active = False
        self._late_blocks = (
            None if staleness_steps_max is None else LateBlockAssigner(self._scheduler, staleness_steps_max)
        )
        self._members: frozenset[int] = frozenset()
        # Workers that left the group and have not acknowledged it: since when the new group is in force.
        self._leaving: dict[int, float | None] = {}
        self._last_rounds: dict[int, int] = {}  # the last round of each of them, if a step is a round
        self._step = 0  # the group's first
        self._rounds_done: dict[int, int] = {}  # rounds that a member is known to have finished
        self._next_round = 0  # the first round that is not completed
        self._behind: set[int] = set()  # members that are not known to have finished it
        # The last round and step to which each worker contributed.
        self._last_contributed: dict[int, tuple[int, int]] = {}
        self._rounds_ahead_of_steps: int | None = None  # rounds less steps, by the last Ready
        self._lost: set[int] = set()  # lost, and the last round finished with them is not known yet
        self._unreported: dict[int, _Unreported] = {}
        self._latest_round = -1  # the last round for which a member is Ready
        self._waiting: dict[int, int] = {}  # workers with nothing to compute: their next round
        self._joining: set[int] = set()  # members that wait for the first Ready of all members
        self._progress_due: set[int] = set()  # workers to which the progress of the epoch is to be sent

    # Samples ---------------------------------------------------------------------------------------------

    def on_samples_requested(self, event: SamplesRequested) -> None:
        """Process a worker's request for samples of an epoch.

        Raises:
            ProtocolError: an impossible epoch, size or block.
        """
        worker = event.worker
        if event.abandons_previous and self._late_blocks is not None:
            self._late_blocks.revoke(worker, f"worker {worker} leaves the epoch")
        has_nothing = self._begin_epoch(event)
        if not self.is_active:
            self.is_active = True
            self._scheduler.set_members(self._members)
            self._update_behind()
        if worker in self._members or worker in self._leaving:
            if has_nothing:
                self._waiting[worker] = event.round
            self._note_rounds_done(worker, event.round)
        elif self._late_blocks is not None and worker not in self._unreported:
            self._late_blocks.on_idle(worker)
            self._progress_due.add(worker)

    def on_ready(self, event: Ready) -> None:
        """Process the gradients of a worker that is in the group or in its last step there.

        Raises:
            ProtocolError: they are of blocks that the worker does not have.
        """
        if not self.is_active:
            return
        worker, round_ = event.worker, event.round
        unreported = self._unreported.get(worker)
        if unreported is not None and round_ > unreported.last:
            self._release(worker, is_lost=False)
            return
        is_late = event.step >= self._step or worker not in self._leaving
        if unreported is None and worker not in self._members and is_late:
            self.on_left_group(worker)
            return
        if event.blocks and not self._scheduler.contribute(worker, round_, event.blocks):
            raise ProtocolError(
                f"expected blocks that the worker has, got {list(event.blocks)}, "
                f"which are not worker {worker}'s any more"
            )
        self._joining.discard(worker)
        self._last_contributed[worker] = (round_, event.step)
        self._rounds_ahead_of_steps = round_ - event.step
        self._waiting.pop(worker, None)
        self._latest_round = max(self._latest_round, round_)
        self._note_rounds_done(worker, round_)

    def on_ready_outside(self, worker: int) -> None:
        """Note that a worker outside the group continues to compute."""
        if self.is_active:
            self._progress_due.add(worker)

    def on_late_gradient(self, event: LateGradientArrived, step: int) -> None:
        """Process a late gradient that a member has received; `step` is the last that a member has begun."""
        if self._late_blocks is not None:
            self._late_blocks.on_late_gradient(event, step)

    def on_finished(self, worker: int) -> None:
        """Retire a worker whose training loop has ended; its blocks go to other workers."""
        if self._late_blocks is not None:
            self._late_blocks.on_gone(worker)
        if worker in self._scheduler:
            self._scheduler.retire(worker)
        self._waiting.pop(worker, None)
        for known in (self._leaving, self._last_rounds, self._unreported):  # all its reports have arrived
            known.pop(worker, None)
        self._note_rounds_done(worker, _ALL_ROUNDS)
        self._complete_rounds()

    def has_samples_left(self, epoch: int) -> bool:
        """Whether samples of an epoch wait to be assigned."""
        epochs = self._scheduler.epochs
        return epoch in epochs.numbers() and epochs[epoch].pooled > 0

    def on_gone(self, worker: int, *, has_reported_all: bool) -> None:
        """Remove a worker that is gone; its blocks go to other workers.

        Args:
            worker: the worker's id.
            has_reported_all: it has announced this itself, so that all its earlier reports have arrived.
        """
        if self._late_blocks is not None:
            self._late_blocks.on_gone(worker)
        is_asked = worker in self._members or worker in self._leaving
        self._members -= {worker}
        self._behind.discard(worker)
        for unreported in self._unreported.values():
            unreported.asked.discard(worker)
        is_done = has_reported_all or self._rounds_done.get(worker, -1) == _ALL_ROUNDS
        if is_done or worker not in self._scheduler:
            self._forget(worker)
        elif worker in self._unreported:
            self._unreported[worker].is_lost = True
        elif not is_asked:
            self._forget(worker)
        elif self._leaving.get(worker) is not None:  # the members have finished its last round
            self._release_when_reported(worker, self._last_rounds[worker], is_lost=True)
        else:
            self._lost.add(worker)
            self._leaving.pop(worker, None)
        self._complete_rounds()

    def _forget(self, worker: int) -> None:
        if worker in self._scheduler:
            self._scheduler.remove_worker(worker)
        for known in (
            self._rounds_done,
            self._last_contributed,
            self._waiting,
            self._epochs_of_workers,
            self._leaving,
            self._last_rounds,
            self._checkpoint_queries,
            self._unreported,
        ):
            known.pop(worker, None)
        for ids in (self._joining, self._reset_workers, self._progress_due, self._lost):
            ids.discard(worker)

    # Contributions that were not reported ----------------------------------------------------------------

    def _release_when_reported(self, worker: int, last: int, *, is_lost: bool) -> None:
        """Release a worker that took part in the rounds up to `last`; query missing reports first."""
        last = min(last, self._last_rounds.get(worker, last))
        unreported = self._unreported.get(worker)
        if unreported is not None:
            unreported.is_lost |= is_lost
        elif (
            worker in self._scheduler
            and worker in self._last_contributed
            and self._last_contributed[worker][0] < last
        ):
            self._unreported[worker] = _Unreported(last=last, is_lost=is_lost)
            self._scheduler.mark_all_started(worker)
        else:
            self._release(worker, is_lost=is_lost)

    def _release(self, worker: int, *, is_lost: bool) -> None:
        if is_lost:
            self._forget(worker)
        else:
            self.on_left_group(worker)

    def on_contribution_report(self, event: ContributionReport) -> None:
        """Process a member's report of what another worker contributed."""
        unreported = self._unreported.get(event.lost_worker)
        if unreported is None:
            return
        last_reported = self._last_contributed[event.lost_worker][0]
        for round_, own, late in event.contributions:
            if last_reported < round_ <= unreported.last:
                unreported.rounds[round_] = (own, late)
        unreported.asked.discard(event.worker)
        if unreported.asked and not (
            event.first_round <= last_reported + 1 and event.end_round > unreported.last
        ):
            return
        for round_, (own, late) in sorted(unreported.rounds.items()):
            blocks = (
                self._scheduler.assigned_ids(event.lost_worker)[:own]
                + self._scheduler.adopted_ids(event.lost_worker)[:late]
            )
            self._scheduler.contribute(event.lost_worker, round_, blocks)
        self._reset_workers.add(event.lost_worker)
        self._release(event.lost_worker, is_lost=unreported.is_lost)
        self._complete_rounds()

    def _queries(self) -> list[Action]:
        """Query members, once, about each worker with contributions that were not reported."""
        queries: list[Action] = []
        for worker, unreported in self._unreported.items():
            if unreported.asked:
                continue
            unreported.asked = set(sorted(self._members - self._joining - {worker})[:_QUERIED_MAX])
            last_reported = self._last_contributed[worker][0]
            reason = (
                f"worker {worker} did not report its part in rounds {last_reported + 1} to {unreported.last}"
            )
            queries += [
                ContributionQuery(worker=member, lost_worker=worker, after_round=last_reported, reason=reason)
                for member in sorted(unreported.asked)
            ]
        return queries

    # Groups ----------------------------------------------------------------------------------------------

    def change_group(
        self, members: Iterable[int], joining: Iterable[int], step: int, rounds_ahead_of_steps: int = 0
    ) -> None:
        """Change the group from `step` on; exchanges of the group before it are finished first.

        Args:
            members: of the new group.
            joining: those of them that have no current state.
            step: the first optimizer step of the new group.
            rounds_ahead_of_steps: rounds less steps, used if no Ready has been received.
        """
        round_ = step + (
            rounds_ahead_of_steps if self._rounds_ahead_of_steps is None else self._rounds_ahead_of_steps
        )
        members = frozenset(members)
        if self._late_blocks is not None:
            self._late_blocks.change_group(members, joining)
        for worker in self._members - members:
            if not self.is_active:
                continue
            self._leaving[worker] = None
            self._last_rounds[worker] = round_ - 1
            last_round, last_step = self._last_contributed.get(worker, (-1, -1))
            if last_step >= step:
                self._scheduler.withdraw(worker, last_round)
            self._scheduler.mark_all_started(worker)
        self._joining = set(joining)
        for worker in joining:
            self.on_left_group(worker)
            self._rounds_done[worker] = -1
            is_new = (
                worker not in self._epochs_of_workers
            )  # one that returns has no gradients for its first round
            self._last_contributed[worker] = (round_ - is_new, step - is_new)
        for worker in members - self._members - self._joining:
            self._last_contributed[worker] = (-1, -1)
        self._set_group(members, step)

    def repeat_round(self, members: Iterable[int], round_: int, step: int) -> None:
        """Change the group at once; its members have finished all rounds before `round_` and repeat it."""
        members = frozenset(members)
        if self._late_blocks is not None:
            self._late_blocks.change_group(members, ())
        self._joining.clear()
        if self.is_active:
            for other in self._scheduler.rounds.numbers():
                if other > round_:  # of a lost worker that had finished more rounds than any member
                    self._scheduler.abandon_round(other)
            returned = self._scheduler.abandon_round(round_)
            for worker, ids in returned.items():
                if worker in members:
                    self._scheduler.contribute(worker, round_, ids)
            self._latest_round = round_ if members & returned.keys() else round_ - 1
        for worker in sorted((self._epochs_of_workers.keys() | self._lost) - members):
            self._release_when_reported(worker, round_ - 1, is_lost=worker in self._lost)
        for worker in members:
            self._rounds_done[worker] = max(self._rounds_done.get(worker, -1), round_)
        self._set_group(members, step)

    def on_group_in_force(self, now_s: float) -> None:
        """Note that all members of the group before have switched to this one."""
        for worker, since_s in self._leaving.items():
            if since_s is None:
                self._leaving[worker] = now_s
        for worker in sorted(self._lost & self._last_rounds.keys()):
            self._release_when_reported(worker, self._last_rounds[worker], is_lost=True)

    def on_left_group(self, worker: int) -> None:
        """Note that a worker knows that it is outside: its blocks, unless late ones, go to other workers."""
        for known in (self._leaving, self._last_rounds, self._last_contributed, self._unreported):
            known.pop(worker, None)
        has_late_block = self._late_blocks is not None and worker in self._late_blocks
        if worker in self._scheduler and not has_late_block and self._scheduler.revoke(worker):
            self._reset_workers.add(worker)
        self._complete_rounds()

    def on_idle(self, worker: int) -> None:
        """Note that a worker outside the group can compute a late block."""
        if self._late_blocks is not None and self.is_active:
            self._late_blocks.on_idle(worker)

    def on_tick(self, now_s: float, patience_s: float) -> None:
        """Stop waiting for workers that left the group and have sent nothing for `patience_s` since then."""
        for worker, since_s in list(self._leaving.items()):
            if since_s is not None and now_s - since_s > patience_s:
                self._release_when_reported(worker, self._last_rounds[worker], is_lost=False)

    def _set_group(self, members: frozenset[int], step: int) -> None:
        self._members, self._step = members, step
        for unreported in self._unreported.values():
            unreported.asked.clear()
        for worker in members:
            self._leaving.pop(worker, None)
            self._last_rounds.pop(worker, None)
        if self.is_active:
            self._scheduler.set_members(members)
            self._update_behind()

    # Rounds ----------------------------------------------------------------------------------------------

    def _note_rounds_done(self, worker: int, rounds: int) -> None:
        if rounds <= self._rounds_done.get(worker, -1):
            return
        self._rounds_done[worker] = rounds
        if rounds > self._next_round and worker in self._behind:
            self._behind.discard(worker)
            self._complete_rounds()

    def _update_behind(self) -> None:
        self._behind = {
            worker for worker in self._members if self._rounds_done.get(worker, -1) <= self._next_round
        }
        self._complete_rounds()

    def _complete_rounds(self) -> None:
        """Complete the rounds that all members have finished, once all contributions are known."""
        is_clear = self.is_active and self._members and not (self._leaving or self._lost or self._unreported)
        while is_clear and not self._behind:
            last = min(self._rounds_done[worker] for worker in self._members)
            if last == _ALL_ROUNDS:
                last = self._latest_round + 1
            last = min([last, *self._checkpoint_rounds()])
            for round_ in self._scheduler.rounds.numbers():
                if round_ < last:
                    self._scheduler.complete_round(round_)
            if last <= self._next_round:
                return
            self._next_round = last
            self._behind = {worker for worker in self._members if self._rounds_done[worker] <= last}

    def _checkpoint_rounds(self) -> list[int]:
        """Return the first rounds that are not in the checkpoints that members ask for."""
        return [
            round_
            for worker, round_ in self._checkpoint_queries.items()
            if worker in self._members and round_ >= self._next_round
        ]

    # Actions ---------------------------------------------------------------------------------------------

    def pop_actions(self) -> list[Action]:
        """Return the actions to send now: first of late blocks, then the assignments, ascending by worker."""
        assigned: dict[int, tuple[tuple[Block, ...], bool]] = {}
        self._assign_into(assigned)
        actions: list[Action] = []
        if self._late_blocks is not None:
            is_waited_for = self._waiting and self._scheduler.epochs.is_drained()
            if self._late_blocks.revoke_overdue(
                None if is_waited_for else self._scheduler.epochs.last_half_assigned()
            ):
                self._assign_into(assigned)
            actions, freed_workers = self._late_blocks.assign()
            self._reset_workers |= freed_workers
        awaited = [
            worker
            for worker, round_ in self._waiting.items()
            if round_ <= self._latest_round or self._joining or self._scheduler.started_count(worker)
        ]
        for worker in awaited:
            del self._waiting[worker]
        recipients = sorted({*assigned, *awaited, *self._reset_workers, *self._progress_due})
        deals = [
            self._assignment(worker, *assigned.get(worker, ((), False)), is_awaited=worker in awaited)
            for worker in recipients
            if worker in self._epochs_of_workers
        ]
        self._reset_workers.clear()
        self._progress_due.clear()
        return [*actions, *deals, *self._queries(), *self._checkpoint_answers()]

    def _checkpoint_answers(self) -> list[Action]:
        """Answer checkpoint queries, once all contributions to the rounds in the checkpoint are known."""
        answers: list[Action] = []
        for worker, round_ in list(self._checkpoint_queries.items()):
            is_current = worker in self._members and self._next_round <= round_
            if is_current and (
                self._leaving
                or self._lost
                or self._unreported
                or any(self._rounds_reported(member) < round_ for member in self._members)
            ):
                continue
            del self._checkpoint_queries[worker]
            used = self._scheduler.used_ranges(round_) if is_current else {}
            answers.append(self._consumed_samples(worker, round_, used, is_current=is_current))
        if answers:
            self._complete_rounds()
        return answers

    def _rounds_reported(self, worker: int) -> int:
        """Return the number of rounds of which it is known what a worker contributed, if anything."""
        last_contributed, _ = self._last_contributed.get(worker, (-1, -1))
        return max(last_contributed + 1, self._rounds_done.get(worker, -1))

    def _assign_into(self, assigned: dict[int, tuple[tuple[Block, ...], bool]]) -> None:
        for worker, blocks, over in self._scheduler.assign():
            before, was_over = assigned.get(worker, ((), False))
            assigned[worker] = ((*before, *blocks), over or was_over)
            if blocks or over:
                self._waiting.pop(worker, None)

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return {
            "is_active": self.is_active,
            "scheduler": self._scheduler.state_dict(),
            "members": sorted(self._members),
            "leaving": [list(entry) for entry in self._leaving.items()],
            "last_rounds": [list(entry) for entry in self._last_rounds.items()],
            "step": self._step,
            "rounds_done": [list(entry) for entry in self._rounds_done.items()],
            "next_round": self._next_round,
            "behind": sorted(self._behind),
            "last_contributed": [[worker, *entry] for worker, entry in self._last_contributed.items()],
            "rounds_ahead_of_steps": self._rounds_ahead_of_steps,
            "lost": sorted(self._lost),
            "unreported": [[worker, *entry.to_plain()] for worker, entry in self._unreported.items()],
            "latest_round": self._latest_round,
            "waiting": [list(entry) for entry in self._waiting.items()],
            "joining": sorted(self._joining),
            "epochs_of_workers": [[worker, *entry] for worker, entry in self._epochs_of_workers.items()],
            "reset_workers": sorted(self._reset_workers),
            "progress_due": sorted(self._progress_due),
            "checkpoint_queries": [list(entry) for entry in self._checkpoint_queries.items()],
            "late_blocks": None if self._late_blocks is None else self._late_blocks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.is_active = state["is_active"]
        self._scheduler.load_state_dict(state["scheduler"])
        self._members = frozenset(state["members"])
        self._leaving = dict(state["leaving"])
        self._last_rounds = dict(state["last_rounds"])
        self._step, self._next_round, self._latest_round = (
            state["step"],
            state["next_round"],
            state["latest_round"],
        )
        self._rounds_done = dict(state["rounds_done"])
        self._behind = set(state["behind"])
        self._last_contributed = {
            worker: (round_, step) for worker, round_, step in state["last_contributed"]
        }
        self._rounds_ahead_of_steps, self._lost = state["rounds_ahead_of_steps"], set(state["lost"])
        self._unreported = {worker: _Unreported.from_plain(*plain) for worker, *plain in state["unreported"]}
        self._waiting = dict(state["waiting"])
        self._joining = set(state["joining"])
        self._epochs_of_workers = {
            worker: (epoch, samples) for worker, epoch, samples in state["epochs_of_workers"]
        }
        self._reset_workers, self._progress_due = set(state["reset_workers"]), set(state["progress_due"])
        self._checkpoint_queries = dict(state["checkpoint_queries"])
        if self._late_blocks is not None:
            self._late_blocks.load_state_dict(state["late_blocks"])
