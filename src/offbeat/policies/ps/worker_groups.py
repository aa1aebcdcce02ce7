"""The worker groups of a parameter server, by name; a part of `PsManager`.

Nothing here decides which worker gets which data: see `offbeat.policies.ps.shard_scheduler`.
"""

from __future__ import annotations

from typing import Any, TypeAlias, assert_never

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    NodeLeft,
    NodeLost,
    ProgressRequested,
    TaskDone,
    TaskRequested,
    TauSet,
    Tick,
    WorkerGroupJoined,
    WorkerGroupLeft,
    WorkerGroupRejected,
)
from offbeat.policies.ps.shard_scheduler import ShardScheduler

WorkerGroupEvent: TypeAlias = (
    WorkerGroupJoined | WorkerGroupLeft | TaskRequested | TaskDone | TauSet | ProgressRequested
)


class WorkerGroups:
    """Gives shards and tasks to groups of clients.

    A group is created by the first client that joins it, and exists as long as the manager: when all its
    workers are gone, the next one to join continues their work. An invalid request is refused to its sender,
    and changes nothing.
    """

    def __init__(self) -> None:
        self._groups: dict[str, ShardScheduler] = {}

    def on_event(self, event: WorkerGroupEvent) -> list[Action]:
        """Process an event of a client; return the actions that answer it."""
        try:
            return self._answer(event)
        except ProtocolError as error:
            return [WorkerGroupRejected(node=event.node, group=event.group, reason=str(error))]

    def on_node_gone(self, event: NodeLeft | NodeLost) -> list[Action]:
        """Remove a client that is gone from all its groups."""
        node, now_s = event.node, event.now_s
        return [
            action
            for group in self._groups.values()
            if node in group
            for action in (
                group.on_lost(node, now_s, f"{node} was lost: {event.cause}")
                if isinstance(event, NodeLost)
                else group.on_left(node, now_s)
            )
        ]

    def on_tick(self, event: Tick) -> list[Action]:
        """Advance the time of all groups."""
        return [action for group in self._groups.values() for action in group.on_tick(event.now_s)]

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as plain data."""
        return {
            "groups": [
                [group.name, group.shards, group.on_loss, group.patience_s, group.state_dict()]
                for group in self._groups.values()
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._groups = {}
        for name, shards, on_loss, patience_s, group in state["groups"]:
            self._groups[name] = ShardScheduler(name, shards, on_loss, patience_s)
            self._groups[name].load_state_dict(group)

    def _answer(self, event: WorkerGroupEvent) -> list[Action]:
        node, now_s = event.node, event.now_s
        if isinstance(event, WorkerGroupJoined):
            return self._join(event)
        group = self._groups.get(event.group)
        if isinstance(event, WorkerGroupLeft):
            return [] if group is None else self._leave(group, node, now_s)
        if group is None or node not in group:
            raise ProtocolError(f"expected a member of the group {event.group}, got {node}, which is not one")
        match event:
            case TaskRequested():
                return group.on_task_requested(node, event.passes_max, event.shards_max, now_s)
            case TaskDone():
                return group.on_task_done(node, event.task, now_s)
            case TauSet():
                return group.set_tau(event.tau, now_s)
            case ProgressRequested():
                return [group.view(node, f"{node} requested the progress")]
        assert_never(event)

    def _join(self, event: WorkerGroupJoined) -> list[Action]:
        group = self._groups.get(event.group)
        wanted = (event.shards, event.on_loss, event.wait_timeout_s)
        if group is None:
            group = ShardScheduler(event.group, *wanted)
        known = (group.shards, group.on_loss, group.patience_s)
        if known != wanted:
            raise ProtocolError(
                f"expected the group {event.group} as it was created, {_described(known)}, "
                f"got {_described(wanted)}"
            )
        if event.node in group:
            raise ProtocolError(f"expected a newcomer in the group {event.group}, got {event.node}, a member")
        self._groups[event.group] = group
        return group.on_joined(event.node, event.now_s)

    def _leave(self, group: ShardScheduler, node: str, now_s: float) -> list[Action]:
        """Remove a member; a client that was dropped may leave too, and receives the view either way."""
        actions = group.on_left(node, now_s) if node in group else []
        return [*actions, group.view(node, f"{node} has left")]


def _described(settings: tuple[int, str, float]) -> str:
    shards, on_loss, patience_s = settings
    return f"{shards} shards, on_worker_loss={on_loss!r}, patience_s={patience_s:g}"
