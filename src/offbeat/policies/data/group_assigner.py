"""Deals samples to groups that change; a part that group policies own.

Nothing here knows why groups change, nor how an epoch is cut into blocks (see `offbeat.policies.work`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from offbeat.errors import ProtocolError
from offbeat.events import Action, Block, Brought, Ready, Recall, Recalled, Wants
from offbeat.policies.data.assigner import Dealer
from offbeat.policies.data.late_blocks import Lending

_WITNESSES = 8  # that may all die before one of them has said what it knows
_NEVER_AGAIN = 2**63  # rounds: a worker that has finished has done all that it will ever do


@dataclass(kw_only=True)
class _Unclear:
    """Who cannot be asked what it contributed.

    Attributes:
        last: the last round in which it took part.
        is_lost: it is no more.
        asked: members that were asked and have not answered.
        rounds: what is known: own blocks and those computed by others, by round.
    """

    last: int
    is_lost: bool
    asked: set[int] = field(default_factory=set)
    rounds: dict[int, tuple[int, int]] = field(default_factory=dict)

    def plain(self) -> list[Any]:
        return [self.last, self.is_lost, sorted(self.asked), [[r, *one] for r, one in self.rounds.items()]]

    @classmethod
    def of(cls, last: int, is_lost: bool, asked: list[int], rounds: list[list[int]]) -> _Unclear:
        known = {round_: (own, late) for round_, own, late in rounds}
        return cls(last=last, is_lost=is_lost, asked=set(asked), rounds=known)


class Dealing(Dealer):
    """Says who gets which samples, so that each is used once, while rounds are repeated and workers go.

    A round counts as completed once every member is known to have finished it: then nobody can repeat it. A
    worker that a group leaves out keeps what it was dealt until it has been heard to follow that group, for
    what it contributed to its last step may be heard late; then others get what is left of it.

    Who is lost, or is left out and not heard, may have taken part in rounds that others have finished and
    of which it could not tell any more (its line to the coordinator was cut, or the coordinator died with
    it). Those others were told in these exchanges how many blocks it contributed, and are asked; until one
    has answered, no round is completed and nothing that it has is given to others.

    Args:
        staleness_steps_max: lend to workers outside, whose gradients count if they are not older (see
            `Lending`); None to lend nothing.

    Attributes:
        is_used: somebody wants samples. Until then nothing is remembered of rounds.
    """

    _why_awaited: ClassVar[str] = "others wait"

    def __init__(self, staleness_steps_max: int | None = None) -> None:
        super().__init__()
        self.is_used = False
        self._lending = None if staleness_steps_max is None else Lending(self._scheduler, staleness_steps_max)
        self._members: frozenset[int] = frozenset()
        self._leaving: dict[int, float | None] = {}  # left out, and may not have followed yet: since when
        self._last: dict[int, int] = {}  # the last round of each of them, if a step is a round
        self._step = 0  # the group's first
        self._done: dict[int, int] = {}  # rounds that a member has finished, as far as is known
        self._next = 0  # the first round that is not completed
        self._lacking: set[int] = set()  # members that are not known to have finished it
        self._offered: dict[int, tuple[int, int]] = {}  # the last round and step to which each contributed
        self._ahead: int | None = None  # rounds less steps, by the last that was Ready
        self._dead: set[int] = set()  # lost, and it is not known yet which round the others finish with it
        self._unclear: dict[int, _Unclear] = {}
        self._latest = -1  # the last round for which a member is Ready
        self._waiting: dict[int, int] = {}  # who has nothing to compute with, and its next round
        self._joining: set[int] = set()  # members that have not been Ready yet, and wait for all others to be
        self._curious: set[int] = set()  # who is to be told how far the epoch is

    # Samples ---------------------------------------------------------------------------------------------

    def wants(self, event: Wants) -> None:
        """A worker is in an epoch, and has nothing to compute with.

        Raises:
            ProtocolError: an epoch, sizes or blocks that cannot be.
        """
        worker = event.worker
        if event.skips and self._lending is not None:
            self._lending.void(worker, f"worker {worker} leaves the epoch")
        has_nothing = self._begin(event)
        if not self.is_used:
            self.is_used = True
            self._scheduler.set_members(self._members)
            self._reckon()
        if worker in self._members or worker in self._leaving:
            if has_nothing:
                self._waiting[worker] = event.round
            self._has_done(worker, event.round)
        elif self._lending is not None:
            self._lending.wishes(worker)
            self._curious.add(worker)

    def ready(self, event: Ready) -> None:
        """A worker in the group, or in its last step there, has gradients.

        Raises:
            ProtocolError: they are of blocks that are not its own.
        """
        if not self.is_used:
            return
        worker, round_ = event.worker, event.round
        unclear = self._unclear.get(worker)
        if unclear is not None and round_ > unclear.last:
            self._let_go(worker, is_lost=False)
            return
        is_late = event.step >= self._step or worker not in self._leaving
        if unclear is None and worker not in self._members and is_late:
            self.has_followed(worker)
            return
        if event.blocks and not self._scheduler.contributed(worker, round_, event.blocks):
            raise ProtocolError(f"blocks {list(event.blocks)} are not worker {worker}'s any more")
        self._joining.discard(worker)
        self._offered[worker] = (round_, event.step)
        self._ahead = round_ - event.step
        self._waiting.pop(worker, None)
        self._latest = max(self._latest, round_)
        self._has_done(worker, round_)

    def outside(self, worker: int) -> None:
        """A worker that no group counts on goes on computing."""
        if self.is_used:
            self._curious.add(worker)

    def brought(self, event: Brought, step: int) -> None:
        """A member has a late gradient; `step` is the last that a member has begun."""
        if self._lending is not None:
            self._lending.brought(event, step)

    def finished(self, worker: int) -> None:
        """The worker's loop is over; what it had is nobody's."""
        if self._lending is not None:
            self._lending.ends(worker)
        if worker in self._scheduler:
            self._scheduler.retired(worker)
        self._waiting.pop(worker, None)
        for known in (self._leaving, self._last, self._unclear):  # it has said all that it will ever say
            known.pop(worker, None)
        self._has_done(worker, _NEVER_AGAIN)
        self._complete()

    def gone(self, worker: int, *, is_heard_out: bool) -> None:
        """The worker is no more; what it had is for others.

        Args:
            worker: who.
            is_heard_out: it has said so itself, so that nothing that it said before is missing.
        """
        if self._lending is not None:
            self._lending.ends(worker)
        is_asked = worker in self._members or worker in self._leaving
        self._members -= {worker}
        self._lacking.discard(worker)
        for unclear in self._unclear.values():
            unclear.asked.discard(worker)
        is_done = is_heard_out or self._done.get(worker, -1) == _NEVER_AGAIN
        if is_done or worker not in self._scheduler:
            self._forget(worker)
        elif worker in self._unclear:
            self._unclear[worker].is_lost = True
        elif not is_asked:
            self._forget(worker)
        elif self._leaving.get(worker) is not None:  # the others have gone on from its last round
            self._clear_up(worker, self._last[worker], is_lost=True)
        else:
            self._dead.add(worker)
            self._leaving.pop(worker, None)
        self._complete()

    def _forget(self, worker: int) -> None:
        if worker in self._scheduler:
            self._scheduler.lost(worker)
        for known in (
            self._done,
            self._offered,
            self._waiting,
            self._in,
            self._leaving,
            self._last,
            self._saving,
            self._unclear,
        ):
            known.pop(worker, None)
        for some in (self._joining, self._anew, self._curious, self._dead):
            some.discard(worker)

    # What was not heard ----------------------------------------------------------------------------------

    def _clear_up(self, worker: int, last: int, *, is_lost: bool) -> None:
        """Nobody waits for the worker any more, which took part in all rounds up to `last`, heard or not."""
        last = min(last, self._last.get(worker, last))
        unclear = self._unclear.get(worker)
        if unclear is not None:
            unclear.is_lost |= is_lost
        elif worker in self._scheduler and worker in self._offered and self._offered[worker][0] < last:
            self._unclear[worker] = _Unclear(last=last, is_lost=is_lost)
            self._scheduler.taken_all(worker)
        else:
            self._let_go(worker, is_lost=is_lost)

    def _let_go(self, worker: int, *, is_lost: bool) -> None:
        if is_lost:
            self._forget(worker)
        else:
            self.has_followed(worker)

    def recalled(self, event: Recalled) -> None:
        """A member has said what another worker contributed."""
        unclear = self._unclear.get(event.of)
        if unclear is None:
            return
        heard = self._offered[event.of][0]
        for round_, own, late in event.rounds:
            if heard < round_ <= unclear.last:
                unclear.rounds[round_] = (own, late)
        unclear.asked.discard(event.worker)
        if unclear.asked and not (event.since <= heard + 1 and event.until > unclear.last):
            return
        for round_, (own, late) in sorted(unclear.rounds.items()):
            blocks = self._scheduler.held(event.of)[:own] + self._scheduler.adopted(event.of)[:late]
            self._scheduler.contributed(event.of, round_, blocks)
        self._anew.add(event.of)
        self._let_go(event.of, is_lost=unclear.is_lost)
        self._complete()

    def _recalls(self) -> list[Action]:
        """Ask members what they know of those who cannot be asked, once."""
        said: list[Action] = []
        for worker, unclear in self._unclear.items():
            if unclear.asked:
                continue
            unclear.asked = set(sorted(self._members - self._joining - {worker})[:_WITNESSES])
            heard = self._offered[worker][0]
            reason = f"worker {worker} took part in rounds {heard + 1} to {unclear.last} and was not heard"
            said += [
                Recall(worker=member, of=worker, after=heard, reason=reason)
                for member in sorted(unclear.asked)
            ]
        return said

    # Groups ----------------------------------------------------------------------------------------------

    def change(self, members: Iterable[int], joining: Iterable[int], step: int, ahead: int = 0) -> None:
        """From `step` on there is another group; exchanges of the one before it are finished first.

        Args:
            members: of the new group.
            joining: those of them that have no current state.
            step: the first optimizer step for which it holds.
            ahead: how many more rounds there were than steps, where no Ready has said it.
        """
        round_ = step + (ahead if self._ahead is None else self._ahead)
        members = frozenset(members)
        if self._lending is not None:
            self._lending.move(members, joining)
        for worker in self._members - members:
            if not self.is_used:
                continue
            self._leaving[worker] = None
            self._last[worker] = round_ - 1
            offered, last_step = self._offered.get(worker, (-1, -1))
            if last_step >= step:
                self._scheduler.withdrawn(worker, offered)
            self._scheduler.taken_all(worker)
        self._joining = set(joining)
        for worker in joining:
            self.has_followed(worker)
            self._done[worker] = -1
            is_new = worker not in self._in  # who comes back has no gradients for its first round
            self._offered[worker] = (round_ - is_new, step - is_new)
        for worker in members - self._members - self._joining:
            self._offered[worker] = (-1, -1)
        self._move(members, step)

    def repeat(self, members: Iterable[int], round_: int, step: int) -> None:
        """There is another group at once; its members have finished all rounds before `round_`."""
        members = frozenset(members)
        if self._lending is not None:
            self._lending.move(members, ())
        self._joining.clear()
        if self.is_used:
            for other in self._scheduler.open_rounds():
                if other > round_:  # of who has finished more than any member, and is no more
                    self._scheduler.abandoned(other)
            again = self._scheduler.abandoned(round_)
            for worker, ids in again.items():
                if worker in members:
                    self._scheduler.contributed(worker, round_, ids)
            self._latest = round_ if members & again.keys() else round_ - 1
        for worker in sorted((self._in.keys() | self._dead) - members):
            self._clear_up(worker, round_ - 1, is_lost=worker in self._dead)
        for worker in members:
            self._done[worker] = max(self._done.get(worker, -1), round_)
        self._move(members, step)

    def followed(self, now_s: float) -> None:
        """All members that were in the group before have begun to work in this one."""
        for worker, since_s in self._leaving.items():
            if since_s is None:
                self._leaving[worker] = now_s
        for worker in sorted(self._dead & self._last.keys()):
            self._clear_up(worker, self._last[worker], is_lost=True)

    def has_followed(self, worker: int) -> None:
        """The worker knows that no group counts on it: what it still has, unless lent, is for others."""
        for known in (self._leaving, self._last, self._offered, self._unclear):
            known.pop(worker, None)
        is_lent = self._lending is not None and worker in self._lending
        if worker in self._scheduler and not is_lent and self._scheduler.revoke(worker):
            self._anew.add(worker)
        self._complete()

    def wishes(self, worker: int) -> None:
        """The worker would compute what a member lends it."""
        if self._lending is not None and self.is_used:
            self._lending.wishes(worker)

    def tick(self, now_s: float, patience_s: float) -> None:
        """Give up on those who were left out and have not been heard since."""
        for worker, since_s in list(self._leaving.items()):
            if since_s is not None and now_s - since_s > patience_s:
                self._clear_up(worker, self._last[worker], is_lost=False)

    def _move(self, members: frozenset[int], step: int) -> None:
        self._members, self._step = members, step
        for unclear in self._unclear.values():
            unclear.asked.clear()
        for worker in members:
            self._leaving.pop(worker, None)
            self._last.pop(worker, None)
        if self.is_used:
            self._scheduler.set_members(members)
            self._reckon()

    # Rounds ----------------------------------------------------------------------------------------------

    def _has_done(self, worker: int, rounds: int) -> None:
        if rounds <= self._done.get(worker, -1):
            return
        self._done[worker] = rounds
        if rounds > self._next and worker in self._lacking:
            self._lacking.discard(worker)
            self._complete()

    def _reckon(self) -> None:
        self._lacking = {worker for worker in self._members if self._done.get(worker, -1) <= self._next}
        self._complete()

    def _complete(self) -> None:
        """Complete the rounds that all members have finished, once all contributions have been heard."""
        is_clear = self.is_used and self._members and not (self._leaving or self._dead or self._unclear)
        while is_clear and not self._lacking:
            last = min(self._done[worker] for worker in self._members)
            if last == _NEVER_AGAIN:
                last = self._latest + 1
            for round_ in self._scheduler.open_rounds():
                if round_ < last:
                    self._scheduler.completed(round_)
            if last <= self._next:
                return
            self._next = last
            self._lacking = {worker for worker in self._members if self._done[worker] <= last}

    # Telling ---------------------------------------------------------------------------------------------

    def deals(self) -> list[Action]:
        """What there is to tell now: of loans, and then of who was dealt what, ascending by worker."""
        dealt: dict[int, tuple[tuple[Block, ...], bool]] = {}
        self._deal_now(dealt)
        said: list[Action] = []
        if self._lending is not None:
            is_waited_for = self._waiting and self._scheduler.is_drained()
            if self._lending.call_in(None if is_waited_for else self._scheduler.half_dealt()):
                self._deal_now(dealt)
            said, freed = self._lending.lend()
            self._anew |= freed
        awaited = [
            worker
            for worker, round_ in self._waiting.items()
            if round_ <= self._latest or self._joining or self._scheduler.taken_count(worker)
        ]
        for worker in awaited:
            del self._waiting[worker]
        told = sorted({*dealt, *awaited, *self._anew, *self._curious})
        deals = [
            self._deal(worker, *dealt.get(worker, ((), False)), is_awaited=worker in awaited)
            for worker in told
            if worker in self._in
        ]
        self._anew.clear()
        self._curious.clear()
        return [*said, *deals, *self._recalls(), *self._saved()]

    def _saved(self) -> list[Action]:
        """Answer who saves, once everything is heard that others have contributed to its rounds."""
        said: list[Action] = []
        for worker, round_ in list(self._saving.items()):
            is_current = worker in self._members and self._next <= round_
            if is_current and (
                self._leaving
                or self._dead
                or self._unclear
                or any(self._offered.get(member, (-1, -1))[0] < round_ - 1 for member in self._members)
            ):
                continue
            del self._saving[worker]
            used = self._scheduler.used_before(round_) if is_current else {}
            said.append(self._used(worker, round_, used, is_current=is_current))
        return said

    def _deal_now(self, dealt: dict[int, tuple[tuple[Block, ...], bool]]) -> None:
        for worker, blocks, over in self._scheduler.deal():
            before, was_over = dealt.get(worker, ((), False))
            dealt[worker] = ((*before, *blocks), over or was_over)
            if blocks or over:
                self._waiting.pop(worker, None)

    # Remembering -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as plain data."""
        return {
            "is_used": self.is_used,
            "scheduler": self._scheduler.state_dict(),
            "members": sorted(self._members),
            "leaving": [list(one) for one in self._leaving.items()],
            "last": [list(one) for one in self._last.items()],
            "step": self._step,
            "done": [list(one) for one in self._done.items()],
            "next": self._next,
            "lacking": sorted(self._lacking),
            "offered": [[worker, *one] for worker, one in self._offered.items()],
            "ahead": self._ahead,
            "dead": sorted(self._dead),
            "unclear": [[worker, *one.plain()] for worker, one in self._unclear.items()],
            "latest": self._latest,
            "waiting": [list(one) for one in self._waiting.items()],
            "joining": sorted(self._joining),
            "in": [[worker, *one] for worker, one in self._in.items()],
            "anew": sorted(self._anew),
            "curious": sorted(self._curious),
            "saving": [list(one) for one in self._saving.items()],
            "lending": None if self._lending is None else self._lending.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.is_used = state["is_used"]
        self._scheduler.load_state_dict(state["scheduler"])
        self._members = frozenset(state["members"])
        self._leaving = dict(state["leaving"])
        self._last = dict(state["last"])
        self._step, self._next, self._latest = state["step"], state["next"], state["latest"]
        self._done = dict(state["done"])
        self._lacking = set(state["lacking"])
        self._offered = {worker: (round_, step) for worker, round_, step in state["offered"]}
        self._ahead, self._dead = state["ahead"], set(state["dead"])
        self._unclear = {worker: _Unclear.of(*plain) for worker, *plain in state["unclear"]}
        self._waiting = dict(state["waiting"])
        self._joining = set(state["joining"])
        self._in = {worker: (epoch, samples) for worker, epoch, samples in state["in"]}
        self._anew, self._curious = set(state["anew"]), set(state["curious"])
        self._saving = dict(state["saving"])
        if self._lending is not None:
            self._lending.load_state_dict(state["lending"])
