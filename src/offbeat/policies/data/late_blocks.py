"""Lends blocks to workers outside the group, each on behalf of a member; a component of group policies.

No gradient is moved here; `offbeat.policies.data.block_scheduler` makes the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from offbeat.events import Action, AssignLateBlock, LateGradientArrived, ResolveLateBlock
from offbeat.policies.data.block_scheduler import BlockScheduler


class _Loan(NamedTuple):
    number: int
    proxy: int
    block: int
    epoch: int


class LateBlockAssigner:
    """Assigns blocks to workers outside the group, and decides whether a late gradient counts.

    A worker outside the group computes one block at a time for a member, its *proxy*. The block stays with
    the worker until the proxy reports that it has the whole gradient: at that moment it becomes the proxy's,
    which contributes it with its next round like its own; what happens to a round or to the proxy from then
    on happens to the block as to any other. Before that moment a loan may be revoked at any time,
    and its gradient does not count if it comes later. No worker ever waits for a loan.

    Args:
        scheduler: the source of the blocks.
        staleness_steps_max: how many steps may have begun since a late gradient's parameters were current,
            including the step that applies it.
    """

    def __init__(self, scheduler: BlockScheduler, staleness_steps_max: int) -> None:
        self._scheduler = scheduler
        self._staleness_steps_max = staleness_steps_max
        self._loans: dict[int, _Loan] = {}  # by the worker that computes
        self._numbers: Counter[int] = Counter()  # of each worker's next loan
        self._proxies: frozenset[int] = frozenset()  # members that hold the state and have not ended
        self._idle: set[int] = set()  # workers outside with nothing to compute
        self._freed: set[int] = set()  # workers whose loans have ended since the last `assign`
        self._actions: list[Action] = []  # actions to send

    def __contains__(self, worker: int) -> bool:
        """Whether a worker outside the group has a loan."""
        return worker in self._loans

    def on_idle(self, worker: int) -> None:
        """Note that a worker knows that it is outside the group, and continues to compute."""
        if worker not in self._loans:
            self._idle.add(worker)

    def change_group(self, members: Iterable[int], joining: Iterable[int]) -> None:
        """Change the group: loans to its members end, and so do loans for workers that are no members."""
        members = frozenset(members)
        self._proxies = members.difference(joining)
        for worker, loan in list(self._loans.items()):
            if worker in members:
                self.revoke(worker, f"worker {worker} joins the group")
            elif loan.proxy not in self._proxies:
                self.revoke(worker, f"worker {loan.proxy} is not a member any more")
        self._idle -= members

    def on_gone(self, worker: int) -> None:
        """Remove a worker that is gone or whose training loop has ended."""
        self._proxies -= {worker}
        for late, loan in list(self._loans.items()):
            if worker in (late, loan.proxy):
                self.revoke(late, f"worker {worker} has left or finished")
        self._idle.discard(worker)
        self._freed.discard(worker)

    def revoke(self, worker: int, reason: str) -> None:
        """End a worker's loan, if it has one; the block goes back to the pool."""
        loan = self._loans.pop(worker, None)
        if loan is None:
            return
        self._scheduler.revoke(worker)
        self._idle.add(worker)
        self._freed.add(worker)
        self._settle(worker, loan, counts=False, reason=reason)

    def revoke_overdue(self, epoch: int | None) -> bool:
        """Revoke loans of epochs before this one, all loans with None; return whether there were any.

        An epoch must not be unfinished at the end of the next one: then a worker that accumulates gradients
        over batches may have no contribution left that could carry the block.
        """
        due = [worker for worker, loan in self._loans.items() if epoch is None or loan.epoch < epoch]
        for worker in due:
            self.revoke(
                worker, "other members wait for the block" if epoch is None else "its epoch is long over"
            )
            self._idle.discard(worker)  # it may hang; otherwise it asks again soon
        return bool(due)

    def on_late_gradient(self, event: LateGradientArrived, step: int) -> None:
        """Process a late gradient that a proxy has received: count it, or end the loan.

        Args:
            event: names the proxy, the worker, the loan and the step of the gradient's parameters.
            step: the last that a member has begun.
        """
        loan = self._loans.get(event.late_worker)
        if loan is None or (loan.number, loan.proxy) != (event.assignment, event.worker):
            return  # the loan ended before the event came
        age = step + 1 - event.step
        if age > self._staleness_steps_max:
            self.revoke(event.late_worker, f"its parameters are {age} steps old")
            return
        if self._scheduler.adopt(event.worker, loan.block, event.late_worker):
            del self._loans[event.late_worker]
            self._idle.add(event.late_worker)
            self._freed.add(event.late_worker)
            reason = f"its parameters are {age} of at most {self._staleness_steps_max} steps old"
            self._settle(event.late_worker, loan, counts=True, reason=reason)
        else:
            self.revoke(event.late_worker, "the block is not its own any more")

    def assign(self) -> tuple[list[Action], set[int]]:
        """Assign late blocks; return the actions to send, and the workers whose loans were not renewed."""
        loans_by_proxy = Counter(loan.proxy for loan in self._loans.values())
        for worker in sorted(self._idle):
            if not self._proxies or worker not in self._scheduler:
                continue
            block = self._scheduler.assign_late(worker)
            if block is None:
                continue
            proxy = min(self._proxies, key=lambda member: (loans_by_proxy[member], member))
            loans_by_proxy[proxy] += 1
            number = self._numbers[worker]
            self._numbers[worker] += 1
            self._loans[worker] = _Loan(number, proxy, block.id, block.epoch)
            self._freed.discard(worker)
            reason = f"worker {worker} is outside the group, member {proxy} has the fewest loans"
            self._actions.append(
                AssignLateBlock(worker=worker, assignment=number, proxy=proxy, block=block, reason=reason)
            )
        self._idle.clear()  # until their next event
        actions, self._actions = self._actions, []
        freed, self._freed = self._freed, set()
        return actions, freed

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two events as plain data."""
        return {
            "loans": [[worker, *loan] for worker, loan in self._loans.items()],
            "numbers": sorted(self._numbers.items()),
            "proxies": sorted(self._proxies),
            "idle": sorted(self._idle),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._loans = {worker: _Loan(*loan) for worker, *loan in state["loans"]}
        self._numbers = Counter(dict(state["numbers"]))
        self._proxies, self._idle = frozenset(state["proxies"]), set(state["idle"])

    def _settle(self, late: int, loan: _Loan, *, counts: bool, reason: str) -> None:
        """Queue the action that resolves a late block: the loan is over, and its gradient counts or not."""
        self._actions.append(
            ResolveLateBlock(
                worker=loan.proxy,
                late_worker=late,
                assignment=loan.number,
                is_contributed=counts,
                reason=reason,
            )
        )
