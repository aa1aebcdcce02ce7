"""Events and actions of the parameter server and its groups of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from offbeat.events.recipients import Addressed, Recipient, ToNamed, ToNode, ToNodeOrAll


@dataclass(frozen=True, kw_only=True)
class NodeEvent:
    """An event that a server or a client of the parameter server sends, or that concerns one.

    Attributes:
        node: its name on its links, "server-3" or "client-7"; never reused.
    """

    now_s: float
    node: str


@dataclass(frozen=True, kw_only=True)
class NodeJoined(NodeEvent):
    """The node has joined.

    Attributes:
        addresses: where its links listen, best first.
        functions: import paths of the user-defined updates that a server has.
    """

    addresses: tuple[str, ...]
    functions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NodeLeft(NodeEvent):
    """The node leaves in order."""


@dataclass(frozen=True, kw_only=True)
class NodeLost(NodeEvent):
    """The node is gone without leaving.

    Attributes:
        cause: what was observed, as one clause.
    """

    cause: str


@dataclass(frozen=True, kw_only=True)
class NodeSilent(NodeEvent):
    """The coordinator has received nothing from a node for a while; its process is not known to be closed.

    It is sent once per silence. The policy decides what follows from it.

    Attributes:
        silent_s: how long nothing had arrived by then.
    """

    silent_s: float


@dataclass(frozen=True, kw_only=True)
class NodeResumed(NodeEvent):
    """The coordinator receives messages again from a node that had been silent."""


@dataclass(frozen=True, kw_only=True)
class NamespaceRequested(NodeEvent):
    """A node asks for a namespace of the parameter server; the first request creates it.

    Attributes:
        spec: what its values are and how pushes are applied, in the form that servers read.
        function: the import path of the user-defined update that every server needs; empty where there is
            none.
        aggregates: the pushes of all participants at one time are summed before they are applied.
        on_loss: what happens to keys whose data are lost: "error", requests for them fail; "reset", they
            start again from zero, including those that are lost already; "", unchanged ("error" initially).
    """

    name: str
    keys: int
    block_keys: int
    spec: str
    function: str
    aggregates: bool
    on_loss: str = ""


@dataclass(frozen=True, kw_only=True)
class AggregationJoined(NodeEvent):
    """A client asks to participate in a namespace that aggregates."""

    namespace: str


@dataclass(frozen=True, kw_only=True)
class AggregationPaused(NodeEvent):
    """A client sends nothing to a namespace after some time until a view ends the pause.

    Attributes:
        pause_view: the number of the view that paused the namespace.
        time: of the client's last push.
    """

    namespace: str
    pause_view: int
    time: int


@dataclass(frozen=True, kw_only=True)
class AggregationLeft(NodeEvent):
    """A client stops pushing to a namespace that aggregates; all its pushes to it have been applied."""

    namespace: str


@dataclass(frozen=True, kw_only=True)
class ServerRemovalRequested(NodeEvent):
    """A node requests that a server leave as soon as other servers have all that it holds."""

    server: int


@dataclass(frozen=True, kw_only=True)
class ServerTransferDone(NodeEvent):
    """A server has received all data that a view assigns to it.

    Attributes:
        view: its number.
    """

    view: int


@dataclass(frozen=True, kw_only=True)
class ServerUnreachable(NodeEvent):
    """A server or a client receives nothing from a server; the report is open until `ServerReachable`.

    Attributes:
        server: the server from which nothing comes.
        cause: what was observed, as one clause.
    """

    server: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class ServerReachable(NodeEvent):
    """A server that was reported with `ServerUnreachable` sends again, or it is no longer part of the job."""

    server: int


@dataclass(frozen=True, kw_only=True)
class WorkerGroupRequest(NodeEvent):
    """A client's request to a group of workers.

    Attributes:
        group: the name of the group.
    """

    group: str


@dataclass(frozen=True, kw_only=True)
class WorkerGroupJoined(WorkerGroupRequest):
    """The client asks to be a member; the first request creates the group (see `ShardScheduler`).

    Attributes:
        shards: number of shards of the group's data.
        on_loss: what happens to the shards of a lost worker.
        wait_timeout_s: how long the group waits for a new worker, or for a slow one.
    """

    shards: int
    on_loss: str
    wait_timeout_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerGroupLeft(WorkerGroupRequest):
    """The client returns its shards and its unfinished tasks."""


@dataclass(frozen=True, kw_only=True)
class TaskRequested(WorkerGroupRequest):
    """The client asks for a task.

    Attributes:
        passes_max: the task must belong to one of the first `passes` passes.
        shards_max: the largest number of shards in the task.
    """

    passes_max: int
    shards_max: int


@dataclass(frozen=True, kw_only=True)
class TaskDone(WorkerGroupRequest):
    """The client has done a task, and its pushes for that task have been applied."""

    task: int


@dataclass(frozen=True, kw_only=True)
class TauSet(WorkerGroupRequest):
    """The client bounds how many passes one shard may be ahead of another; None for no bound."""

    tau: int | None


@dataclass(frozen=True, kw_only=True)
class ProgressRequested(WorkerGroupRequest):
    """Request the progress of every worker in the group."""


@dataclass(frozen=True, kw_only=True)
class CloseServers(Addressed):
    """No worker trains any more: the servers that belong to the job end."""

    reason: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `Addressed.is_for`."""
        return not recipient.is_worker


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Keys 0 to `keys` - 1 of the parameter server under a name (see `NamespaceRequested`)."""

    name: str
    keys: int
    block_keys: int
    spec: str
    aggregates: bool


@dataclass(frozen=True, kw_only=True)
class Participant:
    """A client whose pushes to a namespace are aggregated, from time `first_time` on."""

    namespace: str
    client: int
    first_time: int


@dataclass(frozen=True, kw_only=True)
class Pause:
    """No client pushes to a namespace until a new participant begins; `view` is the view that paused it."""

    namespace: str
    view: int


@dataclass(frozen=True, kw_only=True)
class ServerTransfer:
    """A server that is receiving the data at places `start` to `stop` - 1 of the ring."""

    server: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class LostArc:
    """Keys of a namespace whose data are lost: requests for them fail.

    Attributes:
        loss: of the loss, from 1 on, among all losses of the parameter server.
        start, stop: the keys are those of the blocks at places `start` to `stop` - 1 of the ring.
        server: the last server that had all of them.
    """

    loss: int
    namespace: str
    start: int
    stop: int
    server: int


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """How to reach a server of the parameter server: its addresses, best first."""

    server: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ClusterView(ToNodeOrAll):
    """Which server holds what on the parameter server, from now on (see
    `offbeat.policies.ps.messages.PlacementView`).

    Attributes:
        node: the recipient; empty for all nodes.
        ring: the servers of the ring in force.
        virtual_nodes, replicas: of every ring.
        next_ring: the servers of the ring in preparation; empty where there is none.
        servers: all servers present.
        lost: keys whose data are lost.
        lost_arcs_dropped: ranges of places of the ring, (first, one past the last), whose data are lost with
            this view.
        silent_servers: servers that have been silent for too long, but are still waited for.
    """

    node: str
    version: int
    epoch: int
    ring: tuple[int, ...]
    virtual_nodes: int
    replicas: int
    next_ring: tuple[int, ...]
    transfers: tuple[ServerTransfer, ...]
    namespaces: tuple[Namespace, ...]
    participants: tuple[Participant, ...]
    paused: tuple[Pause, ...]
    servers: tuple[ServerAddress, ...]
    reason: str
    lost: tuple[LostArc, ...] = ()
    lost_arcs_dropped: tuple[tuple[int, int], ...] = ()
    silent_servers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ForgetClient(Addressed):
    """A client is permanently gone; only servers receive it, and drop all that they keep for the client."""

    node: str
    reason: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `Addressed.is_for`."""
        return isinstance(recipient.sender, str) and recipient.sender.startswith("server-")


@dataclass(frozen=True, kw_only=True)
class RejectNamespace(ToNodeOrAll):
    """A namespace cannot be as `node` asks for it; only that node receives it."""

    node: str
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerGroupMember:
    """A member of a group of workers.

    Attributes:
        shards: its own shards, as ranges (first, last), both included.
        passes: that all of these have been through.
        shard_passes_done: passes over a shard that it has reported done.
    """

    node: str
    shards: tuple[tuple[int, int], ...]
    passes: int
    shard_passes_done: int


@dataclass(frozen=True, kw_only=True)
class WorkerGroupView(ToNamed):
    """The assignment of shards in a group of workers, from now on, and the progress of each worker.

    Attributes:
        node: the recipient; empty for all members.
        passes: that all shards that are not lost have been through.
        unassigned: shards that wait for a worker, as ranges.
        lost: shards that no worker has, and without which the group goes on.
    """

    node: str
    group: str
    tau: int | None
    passes: int
    workers: tuple[WorkerGroupMember, ...]
    unassigned: tuple[tuple[int, int], ...]
    lost: tuple[tuple[int, int], ...]
    reason: str

    @property
    def named_recipients(self) -> tuple[str, ...]:
        """See `Addressed.named_recipients`."""
        return (self.node,) if self.node else tuple(member.node for member in self.workers)


@dataclass(frozen=True, kw_only=True)
class AssignTask(ToNode):
    """A worker is to do a pass over some of its shards; only that worker receives it.

    Attributes:
        task: a number that no other task of the group has or had.
        pass_number: from 0 on.
    """

    node: str
    group: str
    task: int
    pass_number: int
    shards: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class PassesEnded(ToNode):
    """All shards that are not lost have been through at least as many passes as a worker asked for."""

    node: str
    group: str
    passes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerGroupRejected(ToNode):
    """A client, the only recipient, is no longer a member of a group, or its request cannot be met."""

    node: str
    group: str
    reason: str


WorkerGroupAction: TypeAlias = WorkerGroupView | AssignTask | PassesEnded | WorkerGroupRejected
