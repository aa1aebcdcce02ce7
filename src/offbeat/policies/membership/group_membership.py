"""A worker's side of changing groups: what it may begin, what it has finished, what it says to a Halt.

The runtime's session and the simulator's workers both ask this object, so that what is tested in simulation
is what runs. Nothing here knows why groups change, sends anything, or looks at a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from offbeat.events import Group, Halt, Halted, Recall, Recalled

# Rounds; who is not heard is dealt nothing, and contributes the little that it has left to the next few.
_REMEMBERED = 256


class Turn(Enum):
    """What a worker that has gradients is to do with them."""

    GO = auto()  # exchange them in `group`
    WAIT = auto()  # a Group will be named
    TAKE = auto()  # take the state from `donor` first, then exchange in `group`
    OUT = auto()  # no group counts on it: keep them to itself


class Follower:
    """One worker in a job whose groups change.

    Between a Halt and its Group the worker finishes the step whose exchange it has begun and begins no
    other, so that the Group can name a step that nobody has begun. Where the Halt says that exchanges
    cannot be finished, what is under way ends without a result, and `finish_round` says so.

    Attributes:
        step: optimizer steps finished.
        round: exchanges finished.
        exchange_id: the first exchange id that is not used.
        group: the group in force, None before the first.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.step = self.round = self.exchange_id = 0
        self.group: Group | None = None
        self._named: list[Group] = []  # groups whose step has not come, in order
        self._halt: Halt | None = None
        self._halted_step: int | None = None  # the step that may still be finished while halted
        self._has_begun = False
        self._is_void = False  # the exchange under way has been abandoned
        self._needs_state = False
        self._followed = 0
        self._is_inside = False  # the group in force has this worker
        # The last rounds finished, without a gap: who took part, and what each contributed.
        self._contributions: deque[tuple[tuple[int, ...], Sequence[tuple[int, int]]]]
        self._contributions = deque(maxlen=_REMEMBERED)

    @property
    def generation(self) -> int:
        """Of the last group that it has followed, 0 before the first; a joiner follows with the state."""
        return self._followed

    @property
    def is_member(self) -> bool:
        """Whether the group in force counts on this worker and the worker holds its state."""
        return self._is_inside and not self._needs_state

    @property
    def is_void(self) -> bool:
        """Whether exchanges under way have been abandoned and no group has been named since."""
        return self._is_void

    @property
    def will_change(self) -> bool:
        """Whether another group has been announced or named."""
        return self._halt is not None or bool(self._named)

    @property
    def reason(self) -> str:
        """Why the group is to change, or has changed last; empty before the first."""
        latest = self._halt or self._latest
        return latest.reason if latest is not None else ""

    @property
    def _latest(self) -> Group | None:
        """The last group that was named, whether or not its step has come."""
        return self._named[-1] if self._named else self.group

    @property
    def donor(self) -> int:
        """The member from whom joining ones take the state."""
        assert self.group is not None
        return next(member for member in self.group.members if member not in self.group.joining)

    @property
    def joiners(self) -> tuple[int, ...]:
        """To whom this worker gives its state before its next exchange."""
        if self.group is None or not self.is_member or self.donor != self.worker:
            return ()
        return self.group.joining

    def hear_halt(self, halt: Halt, now_s: float = 0.0) -> Halted | None:
        """Stands still as the Halt says; returns the answer, None to one that is out of date."""
        known = self._latest
        latest = known.generation if known else 0
        if halt.generation <= (self._halt.generation if self._halt else latest):
            return None
        self._halt = halt
        self._halted_step = self.step if self._has_begun and not halt.abandon else None
        if halt.abandon:
            self._is_void = True
            self._named.clear()  # else they would hold at once, before their step
        return Halted(
            now_s=now_s,
            worker=self.worker,
            generation=halt.generation,
            has_state=self.is_member,
            step=self.step,
            has_begun=self._has_begun,
            round=self.round,
            exchange_id=self.exchange_id,
        )

    def hear_group(self, group: Group) -> None:
        """Takes note of the next group; one that a later Halt has made void is forgotten."""
        if self._halt is not None and group.generation < self._halt.generation:
            return
        known = self._latest
        if known is not None and group.generation <= known.generation:
            return  # said again
        self._halt = self._halted_step = None
        self._named.append(group)
        self._adopt()

    def turn(self) -> Turn:
        """Says what to do with gradients; with GO the worker has begun its step's exchange."""
        self._adopt()
        if self._halt is not None and self._halted_step != self.step:
            return Turn.WAIT
        if self.group is None:
            return Turn.WAIT
        if not self._is_inside:
            return Turn.OUT
        if self._needs_state:
            return Turn.TAKE
        if self._is_void:  # its Group has not come
            return Turn.WAIT
        self._has_begun = True
        return Turn.GO

    def take(self, *, round: int) -> None:
        """The state has come from the donor, as it is before step `group.step`."""
        assert self.group is not None
        self.step, self.round = self.group.step, round
        self._contributions.clear()
        self._needs_state = False
        self._followed = self.group.generation

    def finish_round(self, contributions: Sequence[tuple[int, int]] = ()) -> bool:
        """Counts an exchange as finished; False if it was abandoned, and then it is not.

        Args:
            contributions: of each member in order, how many blocks its gradients were of: its own, and those
                whose gradients others had computed for it.
        """
        if self._is_void:
            return False
        assert self.group is not None
        self._contributions.append((self.group.members, contributions))
        self.round += 1
        return True

    def recall(self, recall: Recall, now_s: float = 0.0) -> Recalled:
        """Says what another worker contributed to the rounds that this one has finished."""
        since = self.round - len(self._contributions)
        rounds = []
        for round_, (members, contributions) in enumerate(self._contributions, since):
            if round_ > recall.after and contributions and recall.of in members:
                own, late = contributions[members.index(recall.of)]
                if own or late:
                    rounds.append((round_, own, late))
        return Recalled(
            now_s=now_s,
            worker=self.worker,
            of=recall.of,
            since=since,
            until=self.round,
            rounds=tuple(rounds),
        )

    def finish_step(self) -> None:
        """Counts an optimizer step, if this worker is one whose steps count."""
        if self.is_member:
            self.step += 1
            self._has_begun = False
            self._adopt()

    def _adopt(self) -> None:
        """Puts named groups in force once their step has come, or at once where steps do not count."""
        while self._named:
            if self.is_member and not self._is_void and self.step < self._named[0].step:
                return
            self._follow(self._named.pop(0))

    def _follow(self, group: Group) -> None:
        place = bisect_left(group.members, self.worker)
        self._is_inside = place < len(group.members) and group.members[place] == self.worker
        if self._is_inside and self.worker in group.joining:
            self._needs_state = True
            self._has_begun = False
        elif not self._is_inside:
            self._needs_state = False
        self.group = group
        if not self._needs_state:
            self._followed = group.generation
        self._is_void = False
        self.exchange_id = group.exchange_id
