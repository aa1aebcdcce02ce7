"""Every event that a policy receives and every action that it returns.

Events are facts that a worker reports or that the coordinator observes; actions are decisions. Both are
frozen, keyword-only dataclasses of plain data, so that they are sent and written to the run log as they
are. Times are seconds: `now_s` is the coordinator's monotonic clock when the event reached it; every other
`*_s` is a duration measured by the worker itself. This module never reads a clock and imports nothing but
the standard library.

`worker` is an id that is never reused in a job (the rank, for workers present from the start); `step` counts
finished optimizer steps, `round` counts gradient exchanges. `node` is the name of a server or client of the
parameter server, "server-3" or "client-7".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A worker asks to join the job.

    Attributes:
        peer: the name of the worker on its links; unique even if two workers claim one id.
        location: host and process id, for messages to people.
        addresses: where the worker's links listen, best first.
        model_signature: one line per parameter or buffer (name, dtype, shape), in the model's order.
        strategy: the strategy as text; all workers must run the same.
    """

    now_s: float
    worker: int
    world: int
    peer: str
    location: str
    addresses: tuple[str, ...]
    model_signature: tuple[str, ...]
    strategy: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A worker has computed its gradients of a round and has not begun to wait for other workers.

    Where workers own their models, it has made its step with them.

    A worker that is in no group sends it too, with the step and round in which it last took part.

    Attributes:
        generation: of the last group that the worker has adopted.
        epoch: the worker's epoch.
        batches_fetched: number of batches of the epoch fetched from the session; 0 where the loop brings its
            own batches.
        compute_s: forward and backward time of this round, without waiting and exchange.
        samples: samples behind the gradients; 0 where the batch was not assigned by the session.
        blocks: ids of the assigned blocks that the gradients come from; empty where the worker is in no
            group.
    """

    now_s: float
    worker: int
    generation: int
    epoch: int
    step: int
    round: int
    compute_s: float
    samples: int
    blocks: tuple[int, ...]
    batches_fetched: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchesSkipped:
    """A worker has skipped batches of its session, and asks which batch its next round is for.

    Attributes:
        round: the worker's next round.
        batches_fetched: number of batches of the epoch fetched, including the one that it computes next; one
            more than the epoch has where none is left.
        skipped: how many of the earlier ones were skipped since its last round.
    """

    now_s: float
    worker: int
    epoch: int
    step: int
    round: int
    batches_fetched: int
    skipped: int


@dataclass(frozen=True, kw_only=True)
class SamplesRequested:
    """A worker is in an epoch and has no samples left to compute with.

    Attributes:
        samples: in the epoch; the same for all workers.
        batch_size: largest number of samples in a block; the same for all workers.
        drop_last: blocks hold exactly `batch_size` samples, and a remainder that does not fill a block is
            left out of the epoch; the same for all workers.
        is_last: the loop has no epoch after this one.
        abandons_previous: the loop left the previous epoch early: the rest of it is assigned to no worker.
        blocks_max: how many blocks the worker can use at once; 0 for the usual number.
        started_blocks: ids of the blocks that the worker has begun since its last `Ready`.
        round: exchanges finished.
        consumed_ranges: positions of the epoch, as ranges, that the state from which the job resumes has
            consumed already.
    """

    now_s: float
    worker: int
    epoch: int
    samples: int
    batch_size: int
    is_last: bool
    abandons_previous: bool
    blocks_max: int
    started_blocks: tuple[int, ...]
    round: int
    consumed_ranges: tuple[tuple[int, int], ...]
    drop_last: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointQuery:
    """A worker copies its state for a checkpoint, and asks which samples that state has consumed.

    Attributes:
        round: exchanges finished; on a parameter server, the clock before which the state holds all steps.
    """

    now_s: float
    worker: int
    round: int


@dataclass(frozen=True, kw_only=True)
class StepFinished:
    """A worker has finished a step, and asks for the clock of its next one.

    It is also sent before the first step, once the worker has the state and can begin.

    Attributes:
        clock: of the finished step; None before the first one.
        parameter_version: the least version of the parameters that the step was computed with; before the
            first step, the first clock at which the worker can push.
        epoch: the worker's epoch.
        step: steps that the worker has finished.
        compute_s: forward and backward time of the step, without waiting and communication.
        samples: samples behind the step and its loss; a loss of 0 samples does not count.
        loss: their mean training loss, None where the program has not reported it.
        blocks: ids of the assigned blocks that the step has used.
    """

    now_s: float
    worker: int
    clock: int | None
    parameter_version: int
    epoch: int
    step: int
    compute_s: float
    samples: int
    loss: float | None
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LateGradientArrived:
    """A member has the complete gradient that a worker outside the group computed for it (see
    `AssignLateBlock`).

    Attributes:
        worker: the member, which contributes the gradient.
        late_worker: the worker that computed it.
        assignment: of the assignment (see `AssignLateBlock`).
        step: optimizer steps in the parameters with which it was computed.
    """

    now_s: float
    worker: int
    late_worker: int
    assignment: int
    step: int


@dataclass(frozen=True, kw_only=True)
class StepTimed:
    """Where the wall time of one step went; the parts sum to `wall_s`.

    Attributes:
        communicate_s: exchanging with other workers.
        wait_s: waiting for slower workers; with a parameter server, at the gate.
        push_s: with a parameter server: sending gradients.
        report_s: from reporting the step to the coordinator until its answer names the next clock.
        pull_s: reading parameters from servers.
        process_cache_s, thread_cache_s: reading them from the cache of this process, or of this thread.
    """

    now_s: float
    worker: int
    step: int
    batch_s: float
    compute_s: float
    apply_s: float
    communicate_s: float
    wait_s: float
    other_s: float
    wall_s: float
    samples: int
    push_s: float = 0.0
    report_s: float = 0.0
    pull_s: float = 0.0
    process_cache_s: float = 0.0
    thread_cache_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Halted:
    """A worker has received a `Halt` and complies with it.

    Attributes:
        generation: of the `Halt`.
        has_state: the worker holds parameters that are current as of `step` and `round`.
        step: optimizer steps finished, which is the index of the step that the worker is in.
        has_begun_exchange: the worker has sent something of this step's exchange.
        round: exchanges finished.
        exchange_id: the first exchange id that it has not used.
    """

    now_s: float
    worker: int
    generation: int
    has_state: bool
    step: int
    has_begun_exchange: bool
    round: int
    exchange_id: int


@dataclass(frozen=True, kw_only=True)
class ContributionReport:
    """A member reports what a lost worker contributed to exchanges that both have finished; answers
    `ContributionQuery`.

    Attributes:
        lost_worker: the lost worker.
        first_round: the first round from which on the member remembers all contributions.
        end_round: the first round that the member has not finished.
        contributions: the rounds from `first_round` on, in order, to which the lost worker contributed
            anything: the round, the number of its own blocks, and the number of blocks whose gradients other
            workers computed for it.
    """

    now_s: float
    worker: int
    lost_worker: int
    first_round: int
    end_round: int
    contributions: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A worker has measured the model: `metrics` are plain numbers by name, the unit last in the name."""

    now_s: float
    worker: int
    epoch: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Preempted:
    """A signal announces that a worker's process will soon be terminated.

    Attributes:
        step: optimizer steps that the worker has finished.
        signal: the name of the signal.
    """

    now_s: float
    worker: int
    step: int
    signal: str


@dataclass(frozen=True, kw_only=True)
class ValidationEvent:
    """A worker's report on the validation of an epoch.

    Attributes:
        epoch: the epoch at whose end the model was in the state that is evaluated.
    """

    now_s: float
    worker: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken(ValidationEvent):
    """A worker has finished an epoch, holds a snapshot of its model, and offers to evaluate parts of the set.

    Attributes:
        digest: equal for snapshots that are equal bit for bit, and different for all others.
        is_current: the model is the one that the group trains or, with a parameter server, the leader's.
        samples: in the validation set; the same for all workers.
        evaluators: how many parts the worker evaluates at once, at least 1.
        part_deadline_s: the longest time that a part may take.
        decision_rule: what follows from the metrics, as text; the same for all workers.
    """

    digest: str
    is_current: bool
    samples: int
    evaluators: int
    part_deadline_s: float
    decision_rule: str


@dataclass(frozen=True, kw_only=True)
class PartEvaluated(ValidationEvent):
    """A worker has evaluated a part that was assigned to it.

    Attributes:
        digest: of the snapshot (see `SnapshotTaken`).
        part: its number.
        means: over the part's samples, by name.
        counts: by name, integers.
        states: of metrics that are merged: name and state, as text.
    """

    digest: str
    part: int
    means: dict[str, float]
    counts: dict[str, float]
    states: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class StatesMerged(ValidationEvent):
    """A worker has merged the states of all parts (see `MergeStates`), and computed the results.

    Attributes:
        digest: of the snapshot.
        means: numbers over the set, by name.
        counts: integers, by name.
    """

    digest: str
    means: dict[str, float]
    counts: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class RolledBack(ValidationEvent):
    """A worker's training is back at the end of `epoch`; validations of later epochs are not needed."""


@dataclass(frozen=True, kw_only=True)
class ModelsAveraged:
    """A worker has ended an averaging of models (see `AverageModels`) and goes on.

    Attributes:
        exchange_id: of the averaging.
        has_mean: its model is the mean, or for a joining member the state that it has received; otherwise the
            averaging was cancelled, and its model is unchanged.
    """

    now_s: float
    worker: int
    exchange_id: int
    has_mean: bool


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A worker's loop has ended after `step` steps; the worker stays to send or receive the final state.

    Attributes:
        epoch: the last epoch in which it worked.
    """

    now_s: float
    worker: int
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Left:
    """A worker has finished its loop and leaves in order, after `step` steps."""

    now_s: float
    worker: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A worker is gone without leaving: its connection broke or its heartbeat stopped.

    Attributes:
        cause: what was observed, as one clause ("the connection was closed").
    """

    now_s: float
    worker: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class PeerUnreachable:
    """A node has received nothing from a worker for a while, and nothing indicates that the worker has ended.

    Attributes:
        worker: the worker that reports it; None where the coordinator observes it itself.
        peer: the worker from which nothing is received.
        cause: what was observed, as one clause.
    """

    now_s: float
    worker: int | None
    peer: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class PeerReachable:
    """A node receives messages again from a worker that it has reported as unreachable.

    Attributes:
        worker: the worker that reports it; None where the coordinator observes it itself.
        peer: the worker from which messages come again.
    """

    now_s: float
    worker: int | None
    peer: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A worker raised an error of its own and ends because of it."""

    now_s: float
    worker: int
    step: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed and nothing else happened."""

    now_s: float


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


Event: TypeAlias = (
    Joined
    | Ready
    | BatchesSkipped
    | SamplesRequested
    | CheckpointQuery
    | ContributionReport
    | StepFinished
    | LateGradientArrived
    | StepTimed
    | Halted
    | Evaluated
    | Preempted
    | SnapshotTaken
    | PartEvaluated
    | StatesMerged
    | RolledBack
    | ModelsAveraged
    | Finished
    | Left
    | Lost
    | PeerUnreachable
    | PeerReachable
    | Failed
    | Tick
    | NodeJoined
    | NodeLeft
    | NodeLost
    | NodeSilent
    | NodeResumed
    | NamespaceRequested
    | AggregationJoined
    | AggregationPaused
    | AggregationLeft
    | ServerRemovalRequested
    | ServerTransferDone
    | ServerUnreachable
    | ServerReachable
    | WorkerGroupJoined
    | WorkerGroupLeft
    | TaskRequested
    | TaskDone
    | TauSet
    | ProgressRequested
)


@dataclass(frozen=True)
class Recipient:
    """A worker or node that the coordinator may send an action to.

    Attributes:
        peer: its link name.
        sender: the worker's id, or the node's name.
    """

    peer: str
    sender: int | str

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker; otherwise it is a node of the parameter server."""
        return isinstance(self.sender, int)


class _Addressed(ABC):
    """Base of all actions: each one defines its recipients, so that none is sent by default."""

    @abstractmethod
    def is_for(self, recipient: Recipient) -> bool:
        """Return whether the coordinator sends the action to this worker or node, which is present."""


class ToAllWorkers(_Addressed):
    """All workers receive the action."""

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return recipient.is_worker


class _ToWorker(_Addressed):
    """One worker receives the action."""

    worker: int

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return recipient.sender == self.worker


class _ToWorkerOrAll(_Addressed):
    """One worker receives the action, or all workers where it names none."""

    worker: int | None

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return recipient.is_worker and self.worker in (None, recipient.sender)


class _ToMembers(_Addressed):
    """The members of a group receive the action."""

    members: tuple[int, ...]

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return recipient.sender in self.members


class _ToNode(_Addressed):
    """One node of the parameter server receives the action."""

    node: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return recipient.sender == self.node


class _ToNodeOrAll(_Addressed):
    """One node of the parameter server receives the action, or all nodes where it names none."""

    node: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return recipient.sender == self.node or (not self.node and not recipient.is_worker)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How to reach one worker: its link name and its addresses, best first."""

    worker: int
    name: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PeerList(ToAllWorkers):
    """The list of workers and of the addresses on which they reach one another.

    Sent once all workers of the start have joined, and again, with all workers present then, after each later
    join.
    """

    peers: tuple[Peer, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Halt(ToAllWorkers):
    """The group will change: no member begins the exchange of a further step until the next `Group`.

    Attributes:
        generation: of the next `Group`; larger than any before.
        abandon: the exchanges under way cannot be finished, and end without a result.
    """

    generation: int
    abandon: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Group(ToAllWorkers):
    """From step `step` on, until the next `Group`, `members` average with `weights`.

    Attributes:
        generation: larger is later; a `Group` of an older generation than a `Halt` is void.
        step: the first optimizer step for which it holds; a worker in the middle of that step adopts it from
            its next exchange on.
        exchange_id: the first exchange id to use.
        members: worker ids, ascending.
        joining: the members without a current state; the first of the other members copies its state to them.
        weights: one per member, not negative, sum 1 (a mean multiplies them with sample counts).
    """

    generation: int
    step: int
    exchange_id: int
    members: tuple[int, ...]
    joining: tuple[int, ...]
    weights: tuple[float, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Block:
    """One batch: positions in the order of an epoch, assigned to one worker once.

    Attributes:
        id: never reused, even if the same positions are assigned again.
        ranges: (start, stop) in ascending order, disjoint; more than one only where blocks were returned.
    """

    id: int
    epoch: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def samples(self) -> int:
        """The number of positions."""
        return sum([stop - start for start, stop in self.ranges])


@dataclass(frozen=True, kw_only=True)
class AssignBlocks(_ToWorker):
    """Samples for one worker, or the reason why there are none.

    Attributes:
        worker: the only recipient.
        epoch: the worker's epoch.
        replaces_queue: the blocks assigned to the worker before are no longer its own.
        blocks: to be used after those that the worker has, in this order.
        is_last: after them there is nothing for the worker in its epoch.
        is_awaited: other workers have begun a round that needs this one: it takes part with weight zero.
        consumed: number of samples of the epoch that finished rounds have consumed.
    """

    worker: int
    epoch: int
    replaces_queue: bool
    blocks: tuple[Block, ...]
    is_last: bool
    is_awaited: bool
    consumed: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepPermit(_ToWorker):
    """The clock of a worker's next step, and whether the step may start; only that worker receives it.

    All work of the worker at earlier clocks is complete, so it can push those clocks, empty ones included.
    Only its last `StepPermit` counts: where that does not permit the start, another one follows, at the same
    clock or a later one. A worker that waits for samples receives later and later clocks as the other workers
    proceed, and the permission to start once samples are assigned to it.

    Attributes:
        version_min: the least version of the parameters with which the step may be computed, once it may
            start.
        complete_version: the last complete version: no later read returns an older one.
        staleness_bound: how many clocks `version_min` may lie before `clock`, None for any number.
        may_start: whether the step may start now.
        is_leader: whether this worker evaluates, prints and saves for all.
        is_preempted: whether a worker is about to be terminated, and this clock is later than every clock
            that was under way when the coordinator received the notice; without a bound, whatever the clock.
    """

    worker: int
    clock: int
    version_min: int
    complete_version: int
    staleness_bound: int | None
    may_start: bool
    is_leader: bool
    is_preempted: bool = False
    reason: str


@dataclass(frozen=True, kw_only=True)
class ContributionQuery(_ToWorker):
    """Ask a member for contributions of a lost worker that were not reported.

    Attributes:
        worker: the recipient.
        lost_worker: the lost worker.
        after_round: the last round for which a `Ready` of the lost worker was received.
    """

    worker: int
    lost_worker: int
    after_round: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ConsumedSamples(_ToWorker):
    """Which samples a worker's state has consumed; only that worker receives it.

    Attributes:
        round: exchanges that the state has finished.
        epoch: the first epoch that they have not used up.
        consumed: that epoch and later ones that have begun, each with the ranges of positions consumed.
        is_current: other workers have not gone on without this worker since; otherwise the state is an old
            one.
    """

    worker: int
    round: int
    epoch: int
    consumed: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    is_current: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class AssignLateBlock(_Addressed):
    """A worker outside the group computes a block on behalf of a member; only these two receive it.

    The member sends it parameters as of its next step, and receives the gradient. The worker's previous
    assignment is void.

    Attributes:
        worker: the worker outside the group.
        assignment: of the worker's assignments, from 0 up.
        proxy: the member.
    """

    worker: int
    assignment: int
    proxy: int
    block: Block
    reason: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return recipient.sender in (self.worker, self.proxy)


@dataclass(frozen=True, kw_only=True)
class ResolveLateBlock(_ToWorker):
    """The assignment of a late block is over; only the member on whose behalf it was computed receives it.

    Attributes:
        worker: that member.
        late_worker: the worker that computed the block, or was to.
        assignment: of the assignment.
        is_contributed: the member contributes the block, with the gradient that arrived; otherwise it
            contributes none.
    """

    worker: int
    late_worker: int
    assignment: int
    is_contributed: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class AverageModels(_ToMembers):
    """Workers that own their models average them once, each between two of its steps.

    Attributes:
        exchange_id: the first of the exchange ids of this averaging; those of one worker ascend.
        members: worker ids, ascending.
        joining: the members without a state: the first of the other members copies its state to them when it
            has the mean.
        weights: one per member, not negative, sum 1; 0 for those that are joining.
        includes_buffers: buffers are averaged too, so that the members' models are equal afterwards.
        leader: the worker that evaluates, prints and saves for all.
    """

    exchange_id: int
    members: tuple[int, ...]
    joining: tuple[int, ...]
    weights: tuple[float, ...]
    includes_buffers: bool
    leader: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class CancelAveraging(_ToMembers):
    """An averaging cannot be finished: a member that does not have the mean yet keeps its own model."""

    exchange_id: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Preempt(_ToWorkerOrAll):
    """A worker is about to be terminated: save, and leave.

    Attributes:
        worker: the recipient, None for all.
        signalled_worker: the worker that received the signal.
    """

    worker: int | None
    signalled_worker: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ValidationStarted(_ToWorkerOrAll):
    """The validation of an epoch has begun: some worker has a snapshot of the model at its end.

    Attributes:
        worker: the recipient, None for all.
    """

    worker: int | None
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SendSnapshot(_Addressed):
    """A worker sends its snapshot to another one, which evaluates parts with it; only these two receive it.

    Attributes:
        worker: the sender of the snapshot.
        receiver: its receiver, which replaces its own snapshot.
        epoch, digest: of the snapshot.
        transfer: of such transfers, from 0 up.
    """

    worker: int
    receiver: int
    epoch: int
    digest: str
    transfer: int
    reason: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return recipient.sender in (self.worker, self.receiver)


@dataclass(frozen=True, kw_only=True)
class EvaluatePart(_ToWorker):
    """A part of the validation set for one worker, which alone receives it.

    Attributes:
        epoch, digest: of the snapshot to evaluate; the worker has it, or another worker is sending it.
        part: its number, from 0.
        start, stop: positions in the set.
    """

    worker: int
    epoch: int
    digest: str
    part: int
    start: int
    stop: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class MergeStates(_ToWorker):
    """The metric states of one part, for the worker that evaluated the first part; only it receives them.

    All parts are sent, in the order of the set; with the last one the worker merges them and reports the
    results.

    Attributes:
        epoch, digest: of the snapshot.
        part, parts: the number of the part, from 0, and the number of parts.
        states: name and state, as text.
    """

    worker: int
    epoch: int
    digest: str
    part: int
    parts: int
    states: tuple[tuple[str, str], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class ValidationFinished(_ToWorkerOrAll):
    """The validation of an epoch is over.

    Attributes:
        worker: the recipient, None for all.
        snapshot_owner: the worker whose snapshot was evaluated; None where there are no metrics.
        digest: of that snapshot, or "".
        means: over the set, by name.
        counts: by name, integers.
    """

    worker: int | None
    epoch: int
    snapshot_owner: int | None
    digest: str
    means: dict[str, float]
    counts: dict[str, float]
    reason: str


@dataclass(frozen=True, kw_only=True)
class EndEpoch(ToAllWorkers):
    """The group has finished `epoch`: workers that are behind go on to the next one.

    Attributes:
        epoch: this one and all before it.
    """

    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class AssignRoundBatch(_ToWorker):
    """The next round of a worker that has skipped batches is for the batch of this number.

    Where it has skipped that batch itself, it takes part with weight 0.
    """

    worker: int
    round: int
    batch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class JobComplete(ToAllWorkers):
    """All workers have finished: receive or send the final state, as the last `Group` says, and leave."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class CloseServers(_Addressed):
    """No worker trains any more: the servers that belong to the job end."""

    reason: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return not recipient.is_worker


@dataclass(frozen=True, kw_only=True)
class AbortJob(ToAllWorkers):
    """The job cannot go on: every worker ends with this reason.

    Attributes:
        worker: the worker that caused it, None where no single worker did.
        step: the step that the worker was in, None before the first.
    """

    worker: int | None
    step: int | None
    reason: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`: all workers and all nodes."""
        return True


@dataclass(frozen=True, kw_only=True)
class RejectPeer(_Addressed):
    """One peer may not take part; the job goes on without it.

    The coordinator sends the reason to the peer and closes its connection. None of the peer's messages, its
    end included, becomes an event, because the id that it claims may belong to a running worker.

    Attributes:
        peer: the link name of the rejected peer (see `Joined.peer`).
    """

    peer: str
    reason: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return recipient.peer == self.peer


@dataclass(frozen=True, kw_only=True)
class AnnounceWorkerLost(ToAllWorkers):
    """A worker was lost or has failed, and the job goes on without it; every other worker logs the reason.

    No policy decides this: the coordinator adds it to the actions that answer the `Lost` or the `Failed`.

    Attributes:
        worker: the worker that is gone.
        reason: which worker is gone, why, which node noticed it, and which workers go on.
    """

    worker: int
    reason: str


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
class ClusterView(_ToNodeOrAll):
    """Which server holds what on the parameter server, from now on (see
    `offbeat.policies.ps.messages.PlacementView`).

    Attributes:
        node: the recipient; empty for all nodes.
        ring: the servers of the ring in force.
        virtual_nodes, copies: of every ring.
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
    copies: int
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
class ForgetClient(_Addressed):
    """A client is permanently gone; only servers receive it, and drop all that they keep for the client."""

    node: str
    reason: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return isinstance(recipient.sender, str) and recipient.sender.startswith("server-")


@dataclass(frozen=True, kw_only=True)
class RejectNamespace(_ToNodeOrAll):
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
class WorkerGroupView(_Addressed):
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

    def is_for(self, recipient: Recipient) -> bool:
        """See `_Addressed.is_for`."""
        return recipient.sender in ([self.node] if self.node else [member.node for member in self.workers])


@dataclass(frozen=True, kw_only=True)
class AssignTask(_ToNode):
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
class PassesEnded(_ToNode):
    """All shards that are not lost have been through at least as many passes as a worker asked for."""

    node: str
    group: str
    passes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerGroupRejected(_ToNode):
    """A client, the only recipient, is no longer a member of a group, or its request cannot be met."""

    node: str
    group: str
    reason: str


WorkerGroupAction: TypeAlias = WorkerGroupView | AssignTask | PassesEnded | WorkerGroupRejected

Action: TypeAlias = (
    PeerList
    | Halt
    | Group
    | AssignBlocks
    | ConsumedSamples
    | StepPermit
    | ContributionQuery
    | AssignLateBlock
    | ResolveLateBlock
    | AverageModels
    | CancelAveraging
    | Preempt
    | ValidationStarted
    | SendSnapshot
    | EvaluatePart
    | MergeStates
    | ValidationFinished
    | EndEpoch
    | AssignRoundBatch
    | JobComplete
    | CloseServers
    | AbortJob
    | RejectPeer
    | AnnounceWorkerLost
    | ClusterView
    | ForgetClient
    | RejectNamespace
    | WorkerGroupView
    | AssignTask
    | PassesEnded
    | WorkerGroupRejected
)
