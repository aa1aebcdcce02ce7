"""The worker's side of the group protocol: what it may begin, what it has finished, how it answers a Halt.

The runtime's session and the simulator's workers both use this object, so that what is tested in simulation
is what runs. It sends nothing and reads no clock. The coordinator's side, with a description of the protocol,
is `offbeat.policies.membership.partial_groups`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from offbeat.events import ContributionQuery, ContributionReport, Group, Halt, Halted, SkipRound

# Rounds whose contributions are kept. A worker cut off from the coordinator is assigned no further blocks, so
# the few that it has left go into the next few rounds.
_ROUNDS_KEPT = 256


class ExchangeDecision(Enum):
    """What a worker that has gradients does with them."""

    EXCHANGE = auto()  # exchange them in `group`
    WAIT = auto()  # wait for the next Group
    FETCH_STATE = auto()  # receive the state from `donor` first, then exchange in `group`
    KEEP_LOCAL = auto()  # keep them: the worker is outside the group


class GroupMembership:
    """Membership of one worker in the groups of a job.

    Between a Halt and its Group the worker finishes the step whose exchange it has begun and begins no
    other, so that the Group can name a step that no member has begun. If the Halt abandons exchanges, the
    one under way ends without a result, and `finish_round` returns False.

    Where all members that hold the state have finished, a worker that receives it ends its step outside: no
    other one takes that step, and its gradients are those of other parameters. Its next step counts.

    Skipped rounds: where a `SkipRound` is received before the worker's loop has gradients for that round, the
    worker takes part in it without its loop, with weight 0 (`begin_skipped_round`). The round and its step
    count as finished once the mean is here: the state follows from it, and the loop applies it when its
    gradients are there. `begin_contribution` ends this: from then on the loop contributes. A group in which
    the loop has contributed to no round yet is not entered without it.

    Attributes:
        step: optimizer steps finished.
        round: exchanges finished.
        may_skip: the loop can apply the means of rounds that it did not take part in.
        skip: the last SkipRound received, until it is carried out.
        exchange_id: the first unused exchange id.
        group: the group in force, None before the first.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.step = self.round = self.exchange_id = 0
        self.group: Group | None = None
        self._queued_groups: list[Group] = []  # groups not yet in force, in order
        self._halt: Halt | None = None
        self._halted_step: int | None = None  # the step that may still be finished while halted
        self._has_begun = False
        self._is_aborted = False  # the exchange under way has been abandoned
        self._needs_state = False
        self._ends_step_outside = False
        self._followed_generation = 0
        self._is_inside = False  # this worker is in the group in force
        self.may_skip = False
        self.skip: SkipRound | None = None
        self._is_skipping = False  # the exchange under way is that of a skipped round
        self._has_abandoned_skip = False  # a skipped round was abandoned, and no group has come since
        self._is_contributing = False  # the loop has gradients for a round, or has not stepped since
        self._contributed_generation = -1  # the last group in which the loop has begun an exchange
        # The last rounds finished, without a gap: the members, and the contribution of each.
        self._contributions: deque[tuple[tuple[int, ...], Sequence[tuple[int, int]]]]
        self._contributions = deque(maxlen=_ROUNDS_KEPT)

    @property
    def generation(self) -> int:
        """Generation of the last group switched to, 0 before the first; a joiner switches as `is_member`."""
        return self._followed_generation

    @property
    def is_member(self) -> bool:
        """Whether this worker is in the group in force, holds its state and takes its steps."""
        return self._holds_state and not self._ends_step_outside

    @property
    def _holds_state(self) -> bool:
        return self._is_inside and not self._needs_state

    @property
    def is_aborted(self) -> bool:
        """Whether exchanges under way have been abandoned and no group has come into force since."""
        return self._is_aborted

    @property
    def is_change_pending(self) -> bool:
        """Whether a Halt or a Group for another group has been received."""
        return self._halt is not None or bool(self._queued_groups)

    @property
    def is_skip_due(self) -> bool:
        """Whether `skip` is for the next round, and the loop neither contributes nor has to be waited for."""
        skip = self.skip
        if skip is None or not self.may_skip or self._is_contributing or self._is_skipping:
            return False
        is_current = (skip.generation, skip.round) == (self.generation, self.round) and self.is_member
        return is_current and self._contributed_generation == skip.generation

    @property
    def is_skipping(self) -> bool:
        """Whether the exchange under way is that of a skipped round."""
        return self._is_skipping

    @property
    def change_reason(self) -> str:
        """Why the group is about to change, or has changed last; empty before the first."""
        latest = self._halt or self._latest_group
        return latest.reason if latest is not None else ""

    @property
    def _latest_group(self) -> Group | None:
        """The last Group received, whether or not it is in force."""
        return self._queued_groups[-1] if self._queued_groups else self.group

    @property
    def donor(self) -> int:
        """The member that sends the state to joining members."""
        assert self.group is not None
        return next(member for member in self.group.members if member not in self.group.joining)

    @property
    def state_recipients(self) -> tuple[int, ...]:
        """The workers to which this worker sends its state before its next exchange."""
        if self.group is None or not self.is_member or self.donor != self.worker:
            return ()
        return self.group.joining

    def on_halt(self, halt: Halt, now_s: float = 0.0) -> Halted | None:
        """Apply a Halt; return the answer, None for an outdated Halt."""
        last_group = self._latest_group
        latest = last_group.generation if last_group else 0
        if halt.generation <= (self._halt.generation if self._halt else latest):
            return None
        self._halt = halt
        self._halted_step = self.step if self._has_begun and not halt.abandon else None
        if halt.abandon:
            self._is_aborted = True
            self._queued_groups.clear()  # otherwise they would be in force at once, before their step
        return Halted(
            now_s=now_s,
            worker=self.worker,
            generation=halt.generation,
            has_state=self._holds_state,
            step=self.step,
            has_begun_exchange=self._has_begun,
            round=self.round,
            exchange_id=self.exchange_id,
        )

    def on_group(self, group: Group) -> None:
        """Apply or queue the next Group; one that a later Halt supersedes is ignored."""
        if self._halt is not None and group.generation < self._halt.generation:
            return
        last_group = self._latest_group
        if last_group is not None and group.generation <= last_group.generation:
            return  # sent again
        self._halt = self._halted_step = None
        self._queued_groups.append(group)
        self._adopt()

    def begin_exchange(self) -> ExchangeDecision:
        """Decide what to do with gradients; after EXCHANGE the worker has begun its step's exchange.

        This is the commit point of the protocol. A Halt that arrives before it prevents the exchange. After
        it, the exchange finishes, unless the Halt has `abandon` set.
        """
        self._adopt()
        if self._halt is not None and self._halted_step != self.step:
            return ExchangeDecision.WAIT
        if self.group is None:
            return ExchangeDecision.WAIT
        if not self._is_inside or self._ends_step_outside:
            return ExchangeDecision.KEEP_LOCAL
        if self._needs_state:
            return ExchangeDecision.FETCH_STATE
        if self._is_aborted:  # the next Group has not come
            return ExchangeDecision.WAIT
        self._has_begun = True
        if self._is_contributing:
            self._contributed_generation = self.group.generation
        return ExchangeDecision.EXCHANGE

    def on_skip_round(self, skip: SkipRound) -> None:
        """Keep a SkipRound until it is carried out."""
        self.skip = skip

    def begin_skipped_round(self) -> bool:
        """Begin the exchange of a round that is skipped, after its grace; return whether it may begin."""
        if not self.is_skip_due or self.begin_exchange() is not ExchangeDecision.EXCHANGE:
            return False
        self.skip, self._is_skipping = None, True
        return True

    def finish_skipped_round(self, contributions: Sequence[tuple[int, int]] | None) -> bool:
        """Count a skipped round and its step as finished; return False, without that, if it was abandoned.

        Args:
            contributions: see `finish_round`; None if the exchange has failed.
        """
        self._is_skipping = False
        if contributions is None or not self.finish_round(contributions):
            self._has_begun, self._has_abandoned_skip = False, self._is_aborted
            return False
        self.finish_step()
        return True

    def begin_contribution(self) -> bool:
        """Let no further round be skipped until the next step; return False while the worker has to wait.

        It waits for the end of a skipped round; if that was abandoned, for the next Group, as other members
        may have finished it. To be called before gradients are announced, or the state is read.
        """
        if self._is_skipping or self._has_abandoned_skip:
            return False
        self._is_contributing = True
        return True

    def on_state_received(self, *, round: int) -> None:
        """Adopt the state received from the donor, which is that before step `group.step`."""
        assert self.group is not None
        self.step, self.round = self.group.step, round
        self._contributions.clear()
        self._needs_state = False
        self._ends_step_outside = not any(
            weight
            for member, weight in zip(self.group.members, self.group.weights, strict=True)
            if member not in self.group.joining
        )
        if not self._ends_step_outside:
            self._followed_generation = self.group.generation

    def finish_round(self, contributions: Sequence[tuple[int, int]] = ()) -> bool:
        """Count an exchange as finished; return False, and count nothing, if it was abandoned.

        Args:
            contributions: for each member in order, the number of blocks in its gradients: its own, and those
                whose gradients other workers had computed for it.
        """
        if self._is_aborted:
            return False
        assert self.group is not None
        self._contributions.append((self.group.members, contributions))
        self.round += 1
        return True

    def on_contribution_query(self, query: ContributionQuery, now_s: float = 0.0) -> ContributionReport:
        """Report what another worker contributed to the rounds that this one has finished."""
        since = self.round - len(self._contributions)
        rounds = []
        for round_, (members, contributions) in enumerate(self._contributions, since):
            if round_ > query.after_round and contributions and query.lost_worker in members:
                own, late = contributions[members.index(query.lost_worker)]
                if own or late:
                    rounds.append((round_, own, late))
        return ContributionReport(
            now_s=now_s,
            worker=self.worker,
            lost_worker=query.lost_worker,
            first_round=since,
            end_round=self.round,
            contributions=tuple(rounds),
        )

    def finish_step(self) -> None:
        """Count an optimizer step, if this worker is a member."""
        self._is_contributing = False
        if self.is_member:
            self.step += 1
            self._has_begun = False
            self._adopt()
        self.end_step_outside()

    def end_step_outside(self) -> None:
        """Be a member from here on, if the state was received within a step that is over, or given up."""
        if self._ends_step_outside:
            assert self.group is not None
            self._ends_step_outside = False
            self._followed_generation = self.group.generation

    def _adopt(self) -> None:
        """Switch to queued groups when their step has come; at once if outside or after an abort."""
        while self._queued_groups:
            if self._holds_state and not self._is_aborted and self.step < self._queued_groups[0].step:
                return
            self._switch_to(self._queued_groups.pop(0))

    def _switch_to(self, group: Group) -> None:
        index = bisect_left(group.members, self.worker)
        self._is_inside = index < len(group.members) and group.members[index] == self.worker
        if self._is_inside and self.worker in group.joining:
            self._needs_state = True
            self._has_begun = False
        elif not self._is_inside:
            self._needs_state = False
        self._ends_step_outside &= self._holds_state
        self.group = group
        if not (self._needs_state or self._ends_step_outside):
            self._followed_generation = group.generation
        self._is_aborted = self._has_abandoned_skip = False
        self.exchange_id = group.exchange_id
