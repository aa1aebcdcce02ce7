"""The worker's side of the strategies that average gradients in a group."""

from __future__ import annotations

from offbeat.events import (
    Action,
    AssignBlocks,
    AssignLateBlock,
    AssignRoundBatch,
    ContributionQuery,
    Event,
    Group,
    Halt,
    ResolveLateBlock,
    SkipRound,
)
from offbeat.policies import unexpected_action
from offbeat.policies.data.block_queue import BlockQueue
from offbeat.policies.membership.group_membership import GroupMembership


class GroupProtocol:
    """Passes the actions about groups and samples to the objects that keep the worker's state.

    Late blocks hold tensors: the action is accepted here and carried out by the runtime.

    Args:
        worker: the worker's id.

    Attributes:
        membership: which groups the worker is in, and what it may begin.
        block_queue: the blocks of samples assigned to the worker.
        round_batch: the last AssignRoundBatch received: the batch of the next round; set to None before
            another is requested.
    """

    def __init__(self, worker: int) -> None:
        self.membership = GroupMembership(worker)
        self.block_queue = BlockQueue()
        self.round_batch: AssignRoundBatch | None = None

    @property
    def round(self) -> int:
        """See `WorkerProtocol.round`."""
        return self.membership.round

    def handle(self, action: Action) -> list[Event]:
        """See `WorkerProtocol.handle`."""
        match action:
            case Halt():
                answer = self.membership.on_halt(action)
                return [] if answer is None else [answer]
            case Group():
                self.membership.on_group(action)
            case SkipRound():
                self.membership.on_skip_round(action)
            case AssignBlocks():
                self.block_queue.on_assigned(action)
            case AssignRoundBatch():
                self.round_batch = action
            case ContributionQuery():
                return [self.membership.on_contribution_query(action)]
            case AssignLateBlock() | ResolveLateBlock():
                pass
            case _:
                raise unexpected_action(self, action)
        return []
