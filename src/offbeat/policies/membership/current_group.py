"""The group of workers in force; a component of group policies.

The reasons why a group changes are not known here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from offbeat.events import Group


class CurrentGroup:
    """The group that was sent last, and the members that may still be in a step of the previous one.

    Attributes:
        members: of the group, ascending.
        member_set: the same.
        previous_members: members of the group before, until all have switched to this one.
        halt_recipients: the members of both: all that may be exchanging.
        joining: joining members that have not been Ready yet.
        generation: of the group.
        step: the first of the group.
        weights: of the members; 0 for those that had finished before the group, unless all had.
        begun_step: the highest for which a member was Ready.
        ended_after: members that left or finished: steps that they finished.
        overtaken: workers in `ended_after` whose last step another member has gone past.
    """

    def __init__(self) -> None:
        self.members: tuple[int, ...] = ()
        self.weights: tuple[float, ...] = ()
        self.previous_members: tuple[int, ...] = ()
        self.member_set: frozenset[int] = frozenset()
        self.halt_recipients: frozenset[int] = frozenset()
        self.joining: set[int] = set()
        self.generation = self.step = 0
        self.begun_step = -1
        self.ended_after: dict[int, int] = {}
        self.overtaken: set[int] = set()
        self._not_switched: set[int] = set()  # members of both groups that may still be in the one before
        self._exchange_id = 0  # the first of the group

    def change(
        self,
        members: tuple[int, ...],
        *,
        joining: tuple[int, ...] = (),
        before: tuple[int, ...] = (),
        finished: Collection[int] = (),
        generation: int = 0,
        step: int = 0,
        exchange_id: int = 0,
        reason: str,
    ) -> Group:
        """Change the group; return the action.

        Args:
            members: of the new group, ascending.
            joining: those of them that have no current state.
            before: workers that may still exchange in an earlier group; none if this is in force at once.
            finished: members whose loop has ended, and that only send the state; none in the last group.
            generation: of the new group.
            step: first step of the new group.
            exchange_id: first exchange id of the new group.
            reason: why the group changes.
        """
        self._set_members(members, before)
        self._not_switched = set(members).intersection(before).difference(joining)
        self.joining = set(joining)
        self.ended_after = {  # a member that has finished takes no part in later steps
            worker: steps for worker, steps in self.ended_after.items() if worker in members
        }
        self.overtaken.clear()
        self.generation, self.step, self._exchange_id = generation, step, exchange_id
        working = set(members).difference(finished) or set(members)
        self.weights = tuple(1.0 / len(working) if member in working else 0.0 for member in members)
        return Group(
            generation=generation,
            step=step,
            exchange_id=exchange_id,
            members=members,
            joining=joining,
            weights=self.weights,
            reason=reason,
        )

    @property
    def joining_need_others(self) -> bool:
        """Whether the joining members wait for a step of others: not if those had finished before."""
        return any(
            weight and member not in self.joining
            for member, weight in zip(self.members, self.weights, strict=True)
        )

    def on_switched(self, worker: int) -> bool:
        """Note that a member is in this group; return whether no other one is in the one before any more."""
        if not (self.previous_members or self.joining):
            return False
        self.joining.discard(worker)
        self._not_switched.discard(worker)
        if self._not_switched:
            return False
        self._set_members(self.members, ())
        return True

    def on_step_begun(self, step: int) -> None:
        """Note that a member is Ready for a step."""
        if step > self.begun_step:
            self.begun_step = step
        if self.ended_after:
            self.overtaken |= {worker for worker, steps in self.ended_after.items() if steps <= step}

    def on_ended(self, worker: int, steps: int) -> None:
        """Note that a worker left or finished after this many steps."""
        self.ended_after[worker] = steps
        if steps <= self.begun_step:  # another member has begun a step that this one will not do
            self.overtaken.add(worker)
        if worker in self.joining:
            self.joining.discard(worker)
            if steps <= self.step:  # it ended before it received the state
                self.overtaken.add(worker)

    def ended_before(self, step: int) -> list[int]:
        """Return the members that ended before they finished as many steps."""
        return [worker for worker, steps in self.ended_after.items() if steps < step]

    def next_exchange_id(self, used: int, margin: int) -> int:
        """Return an id that is `margin` above all that were used: by a report, and in this group."""
        return max(used, self._exchange_id) + margin

    def _set_members(self, members: tuple[int, ...], before: tuple[int, ...]) -> None:
        self.members, self.previous_members = members, before
        self.member_set = frozenset(members)
        self.halt_recipients = self.member_set.union(before)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return {
            "members": list(self.members),
            "weights": list(self.weights),
            "previous_members": list(self.previous_members),
            "not_switched": sorted(self._not_switched),
            "joining": sorted(self.joining),
            "generation": self.generation,
            "step": self.step,
            "exchange_id": self._exchange_id,
            "begun_step": self.begun_step,
            "ended_after": [list(entry) for entry in self.ended_after.items()],
            "overtaken": sorted(self.overtaken),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._set_members(tuple(state["members"]), tuple(state["previous_members"]))
        self.weights = tuple(state["weights"])
        self._not_switched, self.joining = set(state["not_switched"]), set(state["joining"])
        self.generation, self.step = state["generation"], state["step"]
        self._exchange_id, self.begun_step = state["exchange_id"], state["begun_step"]
        self.ended_after, self.overtaken = dict(state["ended_after"]), set(state["overtaken"])
