"""Events and actions of training: joining, steps, groups, samples, models, the end."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.events.recipients import (
    Addressed,
    Recipient,
    ToAllWorkers,
    ToMembers,
    ToNamed,
    ToWorker,
    ToWorkerOrAll,
)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A worker asks to join the job.

    Attributes:
        peer: the name of the worker on its links; unique even if two workers claim one id.
        location: host and process id, for messages to people.
        addresses: where the worker's links listen, best first.
        model_signature: one line per parameter or buffer (name, dtype, shape), in the model's order.
        strategy: the strategy as text; all workers must run the same.
        host: the same for the workers of one host, and of no others; empty if it is not known.
    """

    now_s: float
    worker: int
    world: int
    peer: str
    location: str
    addresses: tuple[str, ...]
    model_signature: tuple[str, ...]
    strategy: str
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A worker has computed its gradients of a round and has not begun to wait for other workers.

    Where workers own their models, it has made its step with them; after as many steps as its last
    `AverageModels` says it waits for the next one. Its blocks count as used from here on, and `round` counts
    averagings.

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
        line_s: for each member to which the worker has sent since its last Ready, how long the last bytes of
            a message were on the way until that member had them, at most, in seconds.
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
    line_s: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExchangeUnderWay:
    """A worker has been in an exchange for a while; sent again and again until the exchange ends.

    So it does not count as late: not it, but a line or another worker is slow.

    Attributes:
        round: the round of the exchange.
        has_moved: data have passed this worker's links since the last report.
    """

    now_s: float
    worker: int
    round: int
    has_moved: bool


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
class StepTimes:
    """Where the wall time of one step went, in seconds; the parts sum to `wall_s`.

    Attributes:
        communicate_s: exchanging with other workers.
        wait_s: waiting for slower workers; with a parameter server, at the gate.
        push_s: with a parameter server: sending gradients.
        report_s: from reporting the step to the coordinator until its answer names the next clock.
        pull_s: reading parameters from servers.
        process_cache_s, thread_cache_s: reading them from the cache of this process, or of this thread.
    """

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
class StepsTimed:
    """Where the wall time of consecutive steps of a worker went, sent some steps after them."""

    now_s: float
    worker: int
    steps: tuple[StepTimes, ...]


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
class EpochEnded:
    """A worker that owns its model has left an epoch.

    Attributes:
        epoch: this one.
        is_complete: it has used the epoch up, and waits for the mean of all models; else its loop has left
            the epoch early, and it waits for nothing.
    """

    now_s: float
    worker: int
    epoch: int
    is_complete: bool


@dataclass(frozen=True, kw_only=True)
class OuterStateLoaded:
    """A worker continues with the outer optimizer's state of a checkpoint.

    Attributes:
        rounds: rounds of which that state has the outer optimizer's step.
    """

    now_s: float
    worker: int
    rounds: int


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
class ModelsAveraged:
    """A worker has ended an averaging of models (see `AverageModels`) and goes on.

    Attributes:
        exchange_id: of the averaging.
        model_steps: the steps that its model had made when it was taken for the averaging.
        has_mean: its model is the mean, or for a joining member the state that it has received; otherwise the
            averaging was cancelled, and its model is unchanged.
    """

    now_s: float
    worker: int
    exchange_id: int
    model_steps: int
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
        weights: one per member, not negative, sum 1 (a mean multiplies them with sample counts); 0 for those
            that have finished, unless all have, or the job is complete.
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
class AssignBlocks(ToWorker):
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
class StepPermit(ToWorker):
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
class ContributionQuery(ToWorker):
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
class ConsumedSamples(ToWorker):
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
class AssignLateBlock(ToNamed):
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

    @property
    def named_recipients(self) -> tuple[int, ...]:
        """See `Addressed.named_recipients`."""
        return self.worker, self.proxy


@dataclass(frozen=True, kw_only=True)
class ResolveLateBlock(ToWorker):
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
class SkipRound(ToWorker):
    """A round has its quorum and closes without this worker, unless it contributes to it in time.

    The worker takes part in the exchange with weight 0 while its loop computes on, and its gradients join the
    round after the last one that it skips.

    Attributes:
        worker: the only recipient.
        generation: of the group that the round is of.
        round: that round.
        grace_s: time from the receipt on in which the worker may still contribute, in seconds.
    """

    worker: int
    generation: int
    round: int
    grace_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """The outer optimizer's step that follows an averaging, on each member, of one part of the parameters.

    Attributes:
        fragment: of which part, from 0; the strategy says how many there are.
        number: steps of this part before this one.
        behind: members that have missed a step of this part: they contribute nothing, and the first of the
            others sends them the outer optimizer's state before this step.
    """

    fragment: int
    number: int
    behind: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AverageModels(ToMembers):
    """Workers that own their models average them once, each between two of its steps or while it trains.

    Attributes:
        exchange_id: the first of the exchange ids of this averaging; those of one worker ascend.
        members: worker ids, ascending.
        joining: the members without a state: the first of the other members copies its state to them when it
            has the mean.
        weights: one per member, not negative, sum 1; 0 for those that are joining, or behind.
        steps: one per member, at least 1: its optimizer steps until it is ready for its next averaging.
        includes_buffers: buffers are averaged too, so that the members' models are equal afterwards: at the
            end of an epoch, and of the job. The members wait for it.
        outer_step: what follows the mean; None if it becomes each member's model.
        leader: the worker that evaluates, prints and saves for all.
        keeps_own_share: of P models, a member keeps 1/P of its own, and takes the rest from the others by
            their weights, so that the members' models differ afterwards; no member is joining.
        continues: the last averaging of each member was one of snapshots, of this group, and all have its
            result: what they know of each other since then still holds. Never set where workers keep nothing
            of each other.
    """

    exchange_id: int
    members: tuple[int, ...]
    joining: tuple[int, ...]
    weights: tuple[float, ...]
    steps: tuple[int, ...]
    includes_buffers: bool
    outer_step: OuterStep | None
    leader: int
    reason: str
    keeps_own_share: bool = False
    continues: bool = False

    @property
    def group(self) -> tuple[int, ...]:
        """The members that have a model, ascending."""
        joining = frozenset(self.joining)
        return tuple(member for member in self.members if member not in joining)

    def weight_of(self, worker: int) -> float:
        """Return a member's weight."""
        return self.weights[self.members.index(worker)]

    def makes_wait(self, worker: int) -> bool:
        """Whether a member waits for its end, even where workers train on during averagings.

        It does for a model with buffers, and if it sends or receives a state.
        """
        return self.includes_buffers or (bool(self.joining) and worker in (*self.joining, self.group[0]))


@dataclass(frozen=True, kw_only=True)
class CancelAveraging(ToMembers):
    """An averaging cannot be finished: a member that does not have the mean yet keeps its own model."""

    exchange_id: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Preempt(ToWorkerOrAll):
    """A worker is about to be terminated: save, and leave.

    Attributes:
        worker: the recipient, None for all.
        signalled_worker: the worker that received the signal.
    """

    worker: int | None
    signalled_worker: int
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
class AssignRoundBatch(ToWorker):
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
        """See `Addressed.is_for`: all workers and all nodes."""
        return True


@dataclass(frozen=True, kw_only=True)
class RejectPeer(Addressed):
    """One peer may not take part; the job goes on without it.

    The coordinator sends the reason to the peer and closes its connection. None of the peer's messages, its
    end included, becomes an event, because the id that it claims may belong to a running worker.

    Attributes:
        peer: the link name of the rejected peer (see `Joined.peer`).
    """

    peer: str
    reason: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `Addressed.is_for`."""
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
