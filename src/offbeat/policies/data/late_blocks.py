"""Assigns late blocks to workers outside the group, each with a member as its proxy; part of group policies.

No gradient is moved here; `offbeat.policies.data.block_scheduler` makes the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from offbeat.events import Action, AssignLateBlock, LateGradientArrived, ResolveLateBlock
from offbeat.policies.data.block_scheduler import BlockScheduler


class _LateBlock(NamedTuple):
    number: int
    proxy: int
    block: int
    epoch: int


class LateBlockAssigner:
    """Assigns blocks to workers outside the group, and decides whether a late gradient counts.

    A worker outside the group computes one block at a time for a member, its *proxy*. The block stays with
    the worker until the proxy reports that it has the whole gradient: at that moment it becomes the proxy's,
    which contributes it with its next round like its own; what happens to a round or to the proxy from then
    on happens to the block as to any other. Before that moment a late block may be revoked at any time,
    and its gradient does not count if it comes later. No worker ever waits for a late block.

    Args:
        scheduler: the source of the blocks.
        staleness_steps_max: how many steps may have begun since a late gradient's parameters were current,
            including the step that applies it.
    """

    def __init__(self, scheduler: BlockScheduler, staleness_steps_max: int) -> None:
        self._scheduler = scheduler
        self._staleness_steps_max = staleness_steps_max
        self._late_blocks: dict[int, _LateBlock] = {}  # by the worker that computes
        self._numbers: Counter[int] = Counter()  # of each worker's next late block
        self._proxies: frozenset[int] = frozenset()  # members that hold the state and have not ended
        self._idle: set[int] = set()  # workers outside with nothing to compute
        self._freed: set[int] = set()  # workers whose late blocks have ended since the last `assign`
        self._actions: list[Action] = []  # actions to send

    def __contains__(self, worker: int) -> bool:
        """Whether a worker outside the group has a late block."""
        return worker in self._late_blocks

    def on_idle(self, worker: int) -> None:
        """Note that a worker knows that it is outside the group, and continues to compute."""
        if worker not in self._late_blocks:
            self._idle.add(worker)

    def change_group(self, members: Iterable[int], joining: Iterable[int]) -> None:
        """Change the group: revoke the late blocks of its members, and those whose proxy is not a member."""
        members = frozenset(members)
        self._proxies = members.difference(joining)
        for worker, late_block in list(self._late_blocks.items()):
            if worker in members:
                self.revoke(worker, f"worker {worker} joins the group")
            elif late_block.proxy not in self._proxies:
                self.revoke(worker, f"worker {late_block.proxy} is not a member any more")
        self._idle -= members

    def on_gone(self, worker: int) -> None:
        """Remove a worker that is gone or whose training loop has ended."""
        self._proxies -= {worker}
        for late, late_block in list(self._late_blocks.items()):
            if worker in (late, late_block.proxy):
                self.revoke(late, f"worker {worker} has left or finished")
        self._idle.discard(worker)
        self._freed.discard(worker)

    def revoke(self, worker: int, reason: str) -> None:
        """End a worker's late block, if it has one; the block goes back to the pool."""
        late_block = self._late_blocks.pop(worker, None)
        if late_block is None:
            return
        self._scheduler.revoke(worker)
        self._idle.add(worker)
        self._freed.add(worker)
        self._resolve(worker, late_block, counts=False, reason=reason)

    def revoke_overdue(self, epoch: int | None) -> bool:
        """Revoke the late blocks of epochs before this one, all with None; return whether there were any.

        An epoch must not be unfinished at the end of the next one: then a worker that accumulates gradients
        over batches may have no contribution left that could carry the block.
        """
        due = [
            worker
            for worker, late_block in self._late_blocks.items()
            if epoch is None or late_block.epoch < epoch
        ]
        for worker in due:
            self.revoke(
                worker, "other members wait for the block" if epoch is None else "its epoch is long over"
            )
            self._idle.discard(worker)  # it may hang; otherwise it asks again soon
        return bool(due)

    def on_late_gradient(self, event: LateGradientArrived, step: int) -> None:
        """Process a late gradient that a proxy has received: count it, or end the assignment.

        Args:
            event: names the proxy, the worker, the assignment and the step of the gradient's parameters.
            step: the last that a member has begun.
        """
        late_block = self._late_blocks.get(event.late_worker)
        if late_block is None or (late_block.number, late_block.proxy) != (event.assignment, event.worker):
            return  # the assignment ended before the event came
        age = step + 1 - event.step
        if age > self._staleness_steps_max:
            self.revoke(event.late_worker, f"its parameters are {age} steps old")
            return
        if self._scheduler.adopt(event.worker, late_block.block, event.late_worker):
            del self._late_blocks[event.late_worker]
            self._idle.add(event.late_worker)
            self._freed.add(event.late_worker)
            reason = f"its parameters are {age} of at most {self._staleness_steps_max} steps old"
            self._resolve(event.late_worker, late_block, counts=True, reason=reason)
        else:
            self.revoke(event.late_worker, "the block is not its own any more")

    def assign(self) -> tuple[list[Action], set[int]]:
        """Assign late blocks; return the actions to send, and the workers that got no other block."""
        blocks_by_proxy = Counter(late_block.proxy for late_block in self._late_blocks.values())
        for worker in sorted(self._idle):
            if not self._proxies or worker not in self._scheduler:
                continue
            block = self._scheduler.assign_late(worker)
            if block is None:
                continue
            proxy = min(self._proxies, key=lambda member: (blocks_by_proxy[member], member))
            blocks_by_proxy[proxy] += 1
            number = self._numbers[worker]
            self._numbers[worker] += 1
            self._late_blocks[worker] = _LateBlock(number, proxy, block.id, block.epoch)
            self._freed.discard(worker)
            reason = f"worker {worker} is outside the group, member {proxy} has the fewest late blocks"
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
            "late_blocks": [[worker, *late_block] for worker, late_block in self._late_blocks.items()],
            "numbers": sorted(self._numbers.items()),
            "proxies": sorted(self._proxies),
            "idle": sorted(self._idle),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._late_blocks = {worker: _LateBlock(*late_block) for worker, *late_block in state["late_blocks"]}
        self._numbers = Counter(dict(state["numbers"]))
        self._proxies, self._idle = frozenset(state["proxies"]), set(state["idle"])

    def _resolve(self, late: int, late_block: _LateBlock, *, counts: bool, reason: str) -> None:
        """Queue the action that resolves a late block: it is over, and its gradient counts or not."""
        self._actions.append(
            ResolveLateBlock(
                worker=late_block.proxy,
                late_worker=late,
                assignment=late_block.number,
                is_contributed=counts,
                reason=reason,
            )
        )
