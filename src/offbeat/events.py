"""Every event that a policy sees and every action that it answers with.

Events are facts that a worker reports or that the coordinator observes; actions are decisions. Both are
frozen, keyword-only dataclasses of plain data, so that they travel on the wire and in the run log as they
are. Times are seconds: `now_s` is the coordinator's monotonic clock when the event reached it, every other
`*_s` is a duration measured by the worker itself. This module never reads a clock and imports nothing but
the standard library.

`worker` is an id that is never used twice in a job (the rank, for workers present from the start); `step`
counts finished optimizer steps, `round` counts gradient exchanges. `node` names who takes part in a parameter
server, "server-3" or "client-7".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A worker asks to take part.

    Attributes:
        peer: the name under which the worker's links know it; unique even if two workers claim one id.
        place: host and process id, for messages to people.
        addresses: where the worker's links listen, best first.
        model: one line a parameter or buffer (name, dtype, shape), in the model's order.
        strategy: the strategy as text; all workers must run the same.
    """

    now_s: float
    worker: int
    world: int
    peer: str
    place: str
    addresses: tuple[str, ...]
    model: tuple[str, ...]
    strategy: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A worker has computed its gradients of a round and waits for nobody yet.

    A worker that no group counts in says so too, with the step and round at which it last took part.

    Attributes:
        generation: of the last group that the worker has followed.
        epoch: the worker's epoch.
        batch: how many batches of it the worker has taken from its session; 0 where the loop has its own.
        compute_s: forward and backward time of this round, waiting and exchange excluded.
        samples: samples behind the gradients, 0 where the session did not deal the batch.
        blocks: ids of the dealt blocks that the gradients are of; none where no group counts on the worker.
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
    batch: int = 0


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A worker has left batches of its session out, and asks for which batch the next round is.

    Attributes:
        round: the next one of the worker.
        batch: how many batches of the epoch it has taken, the one that it computes next among them; one more
            than there are where the epoch has no more of them.
        count: how many of those before were left out since its last round.
    """

    now_s: float
    worker: int
    epoch: int
    step: int
    round: int
    batch: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Wants:
    """A worker is in an epoch and has no samples left to compute with.

    Attributes:
        samples: in the epoch; the same for all workers.
        batch_size: samples in a block at most; the same for all workers.
        drop_last: blocks hold `batch_size` samples, and what does not fill one is left out of the epoch; the
            same for all workers.
        is_last: the loop has no epoch after this one.
        skips: the loop has left the epoch before early: nobody is to be dealt the rest of it.
        ahead: how many blocks the worker can use at once, 0 for as many as usual.
        taken: ids of the blocks that it has taken since it was last Ready.
        round: exchanges finished.
        used: positions of the epoch, as ranges, that the state that the job goes on from has used already.
    """

    now_s: float
    worker: int
    epoch: int
    samples: int
    batch_size: int
    is_last: bool
    skips: bool
    ahead: int
    taken: tuple[int, ...]
    round: int
    used: tuple[tuple[int, int], ...]
    drop_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A worker takes its state down, and asks which samples that holds.

    Attributes:
        round: exchanges finished; on a parameter server, the clock before which the state holds all steps.
    """

    now_s: float
    worker: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Clocked:
    """A worker has finished a step, and asks for the clock of its next one.

    It says so as well before its first step, when it has the state and could begin.

    Attributes:
        clock: at which it took the step; None before its first one.
        version: the least version of the parameters that the step was computed with; before its first step,
            the first clock at which it can push.
        epoch: the worker's epoch.
        step: steps that it has finished.
        compute_s: forward and backward time of the step, waiting and communication excluded.
        samples: samples behind the step and its loss; a loss of none does not count.
        loss: their mean training loss, None where the program has not said it.
        blocks: ids of the dealt blocks that the step has used.
    """

    now_s: float
    worker: int
    clock: int | None
    version: int
    epoch: int
    step: int
    compute_s: float
    samples: int
    loss: float | None
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Brought:
    """A member has all of the gradient that a worker outside has computed for it (see `Lend`).

    Attributes:
        worker: the patron.
        late: who computed it.
        number: of the loan.
        step: steps that the parameters had taken with which it was computed.
    """

    now_s: float
    worker: int
    late: int
    number: int
    step: int


@dataclass(frozen=True, kw_only=True)
class StepTimed:
    """Where one step's wall time went; its parts sum to `wall_s`.

    Attributes:
        communicate_s: exchanging with other workers.
        wait_s: for slower workers; with a parameter server, at the gate.
        push_s: with a parameter server: sending gradients.
        report_s: telling the coordinator that the step is done, until it has said which clock is next.
        pull_s: getting parameters from servers.
        process_cache_s, thread_cache_s: getting them from what this process, or this thread, has already.
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
    """A worker has heard a Halt and keeps to it.

    Attributes:
        generation: of the Halt.
        has_state: it holds parameters that are current as of `step` and `round`.
        step: optimizer steps finished: the step that the worker is in.
        has_begun: it has sent something of this step's exchange.
        round: exchanges finished.
        exchange_id: the first exchange id that it has not used.
    """

    now_s: float
    worker: int
    generation: int
    has_state: bool
    step: int
    has_begun: bool
    round: int
    exchange_id: int


@dataclass(frozen=True, kw_only=True)
class Recalled:
    """A member says what a worker contributed to exchanges that both have finished, as a Recall asks.

    Attributes:
        of: the worker that is asked about.
        since: the first round of which the member remembers everything.
        until: the first round that the member has not finished.
        rounds: the rounds from `since` on, in order, to which that worker contributed anything: the round,
            how many of its own blocks, and how many whose gradients others had computed for it.
    """

    now_s: float
    worker: int
    of: int
    since: int
    until: int
    rounds: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A worker measured the model: `metrics` are plain numbers by name, a unit last in the name."""

    now_s: float
    worker: int
    epoch: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Preempted:
    """A signal says that a worker's process will soon be taken away.

    Attributes:
        step: optimizer steps that the worker has finished.
        signal: its name.
    """

    now_s: float
    worker: int
    step: int
    signal: str


@dataclass(frozen=True, kw_only=True)
class ValidationEvent:
    """What a worker says of the validation of an epoch.

    Attributes:
        epoch: at whose end the model was as it is evaluated.
    """

    now_s: float
    worker: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken(ValidationEvent):
    """A worker is through with an epoch, has a copy of its model, and would evaluate parts of the set.

    Attributes:
        digest: the same for copies that are the same bit for bit, and for no others.
        is_current: its model is the one that the others train, or, with a parameter server, that of the
            worker that leads.
        samples: in the validation set; the same for all workers.
        evaluators: how many parts it evaluates at once, at least 1.
        deadline_s: how long a part may take.
        terms: what follows from metrics, in words; the same for all workers.
    """

    digest: str
    is_current: bool
    samples: int
    evaluators: int
    deadline_s: float
    terms: str


@dataclass(frozen=True, kw_only=True)
class PartEvaluated(ValidationEvent):
    """A worker has evaluated a part that it was given.

    Attributes:
        digest: of the copy of the model (see `SnapshotTaken`).
        part: its number.
        means: over the part's samples, by name.
        counts: by name, whole numbers.
        states: of metrics that are merged: name and state, as text.
    """

    digest: str
    part: int
    means: dict[str, float]
    counts: dict[str, float]
    states: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class StatesMerged(ValidationEvent):
    """A worker has merged the states of all parts (see `MergeStates`), and computed what they come to.

    Attributes:
        digest: of the copy of the model.
        means: numbers over the set, by name.
        counts: whole ones, by name.
    """

    digest: str
    means: dict[str, float]
    counts: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class WentBack(ValidationEvent):
    """A worker's training is at the end of `epoch` again; validations of later ones are not wanted."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A worker's loop is over after `step` steps, and it stays to give or take the final state.

    Attributes:
        epoch: the last epoch in which it worked.
    """

    now_s: float
    worker: int
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Left:
    """A worker finished its loop and leaves in order, after `step` steps."""

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
    """A node has received nothing from a worker for a while, and nothing says that the worker has ended.

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
    """A node receives messages from a worker again that it has reported as unreachable.

    Attributes:
        worker: the worker that reports it; None where the coordinator observes it itself.
        peer: the worker from which messages come again.
    """

    now_s: float
    worker: int | None
    peer: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A worker met an error of its own and ends because of it."""

    now_s: float
    worker: int
    step: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time passed and nothing else happened."""

    now_s: float


@dataclass(frozen=True, kw_only=True)
class NodeEvent:
    """What is said by or about a server or a client of the parameter server.

    Attributes:
        node: its name, "server-3" or "client-7", under which its links know it; never used twice.
    """

    now_s: float
    node: str


@dataclass(frozen=True, kw_only=True)
class NodeJoined(NodeEvent):
    """It is there.

    Attributes:
        addresses: where its links listen, best first.
        functions: import paths of the user's own updates that a server has.
    """

    addresses: tuple[str, ...]
    functions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NodeLeft(NodeEvent):
    """It leaves in order."""


@dataclass(frozen=True, kw_only=True)
class NodeLost(NodeEvent):
    """It is gone without leaving.

    Attributes:
        cause: what was observed, as one clause.
    """

    cause: str


@dataclass(frozen=True, kw_only=True)
class NodeSilent(NodeEvent):
    """The coordinator has received nothing from a node for a while; its process is not known to be closed.

    It comes once for each silence. What follows from a silence is for the policy to decide.

    Attributes:
        silent_s: for how long nothing had come by then.
    """

    silent_s: float


@dataclass(frozen=True, kw_only=True)
class NodeHeard(NodeEvent):
    """The coordinator receives something from a node again that had been silent."""


@dataclass(frozen=True, kw_only=True)
class SpaceOpened(NodeEvent):
    """Somebody wants a namespace of the parameter server; the first to want it makes it.

    Attributes:
        about: what its values are and what becomes of what is pushed, as servers understand it.
        function: the import path of the user's own update that every server needs; empty where none is.
        aggregates: what all who take part push at one time is summed first.
        on_loss: what becomes of keys whose data are lost: "error", requests for them fail; "reset", they
            begin from zero, those that are lost already included; "", as it is, and "error" at first.
    """

    name: str
    keys: int
    block_keys: int
    about: str
    function: str
    aggregates: bool
    on_loss: str = ""


@dataclass(frozen=True, kw_only=True)
class ClientEnlists(NodeEvent):
    """A client wants to take part in a namespace that aggregates."""

    namespace: str


@dataclass(frozen=True, kw_only=True)
class ClientPaused(NodeEvent):
    """A client sends nothing to a namespace after some time until a view says that a pause is over.

    Attributes:
        pause: the number of the view that paused the namespace.
        time: of the client's last push.
    """

    namespace: str
    pause: int
    time: int


@dataclass(frozen=True, kw_only=True)
class ClientWithdraws(NodeEvent):
    """A client pushes no more to a namespace that aggregates; all that it has pushed there is done."""

    namespace: str


@dataclass(frozen=True, kw_only=True)
class ServerLeaves(NodeEvent):
    """Somebody wants a server to leave as soon as others have all that it holds."""

    server: int


@dataclass(frozen=True, kw_only=True)
class ServerFilled(NodeEvent):
    """A server has all that it was to be filled with in a view.

    Attributes:
        view: its number.
    """

    view: int


@dataclass(frozen=True, kw_only=True)
class ServerMissed(NodeEvent):
    """A server or a client receives nothing from a server; the report is open until `ServerReached`.

    Attributes:
        server: the one from which nothing comes.
        cause: what was observed, as one clause.
    """

    server: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class ServerReached(NodeEvent):
    """Something comes again from a server that was reported with `ServerMissed`, or the server is out."""

    server: int


@dataclass(frozen=True, kw_only=True)
class WorkerEvent(NodeEvent):
    """What a client says to a group of workers.

    Attributes:
        group: its name.
    """

    group: str


@dataclass(frozen=True, kw_only=True)
class WorkerJoins(WorkerEvent):
    """It wants to be a member; the first to want it makes the group (see `ShardScheduler`).

    Attributes:
        shards: of the group's data.
        on_loss: what becomes of a lost worker's shards.
        patience_s: how long a newcomer, or a slow worker, is waited for.
    """

    shards: int
    on_loss: str
    patience_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerLeaves(WorkerEvent):
    """It hands its shards and its unfinished tasks back."""


@dataclass(frozen=True, kw_only=True)
class TaskWanted(WorkerEvent):
    """It asks for a task.

    Attributes:
        passes: the task is to be in one of the first so many.
        shards_max: the task is to have so many shards at most.
    """

    passes: int
    shards_max: int


@dataclass(frozen=True, kw_only=True)
class TaskDone(WorkerEvent):
    """It has done a task, and what it has pushed for it is done."""

    task: int


@dataclass(frozen=True, kw_only=True)
class TauSet(WorkerEvent):
    """It bounds how many passes a shard may be ahead of another one; None for no bound."""

    tau: int | None


@dataclass(frozen=True, kw_only=True)
class ProgressWanted(WorkerEvent):
    """It asks who is how far."""


Event: TypeAlias = (
    Joined
    | Ready
    | LeftOut
    | Wants
    | Saving
    | Recalled
    | Clocked
    | Brought
    | StepTimed
    | Halted
    | Evaluated
    | Preempted
    | SnapshotTaken
    | PartEvaluated
    | StatesMerged
    | WentBack
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
    | NodeHeard
    | SpaceOpened
    | ClientEnlists
    | ClientPaused
    | ClientWithdraws
    | ServerLeaves
    | ServerFilled
    | ServerMissed
    | ServerReached
    | WorkerJoins
    | WorkerLeaves
    | TaskWanted
    | TaskDone
    | TauSet
    | ProgressWanted
)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How to reach one worker: its link name and its addresses, best first."""

    worker: int
    name: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Start:
    """These are the workers and how they reach one another.

    Said once everybody is here, and again, with all who are here then, whenever somebody comes later.
    """

    peers: tuple[Peer, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Halt:
    """The group will change: nobody begins the exchange of a further step until the Group is named.

    Attributes:
        generation: that the next Group will have; larger than any before.
        abandon: what is being exchanged cannot be finished: exchanges under way end without a result.
    """

    generation: int
    abandon: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """From step `step` on, until another Group says otherwise, `members` average with `weights`.

    Attributes:
        generation: larger is later; a Group of an older generation than a Halt is void.
        step: the first optimizer step for which it holds; who is in the midst of it follows from its next
            exchange on.
        exchange_id: the first exchange id to use.
        members: worker ids, ascending.
        joining: the members that have no current state; the first of the others copies its own to them.
        weights: one a member, not negative, sum 1 (a mean counts samples on top of them).
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
    """One batch: positions in the order of an epoch, dealt to one worker once.

    Attributes:
        id: never used again, also if the same positions are dealt once more.
        ranges: (start, stop) in ascending order, disjoint; more than one only where blocks came back.
    """

    id: int
    epoch: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def samples(self) -> int:
        """How many positions."""
        return sum([stop - start for start, stop in self.ranges])


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Samples for one worker, or why there are none.

    Attributes:
        worker: whom it is for; nobody else hears it.
        epoch: in which the worker is.
        anew: what it was dealt before is not its own any more.
        blocks: to be used after those that it has, in this order.
        over: after them there is nothing for it in its epoch.
        is_awaited: the others have begun a round that needs it: it takes part with weight zero.
        used: how many of the epoch's samples finished rounds have used.
    """

    worker: int
    epoch: int
    anew: bool
    blocks: tuple[Block, ...]
    over: bool
    is_awaited: bool
    used: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Grant:
    """The clock of a worker's next step, and whether it may start; the worker alone hears it.

    All that it did at earlier clocks is complete, so that it can push it, and where it did nothing, say so.
    Only its last Grant counts: where that says that it may not start, another one follows, at the same
    clock or a later one. A worker that waits for samples is told of later and later clocks, as the others
    go on, and that it may start once it has been dealt some.

    Attributes:
        version: the least version of the parameters that the step may be computed with, once it may start.
        complete: the last version of which nothing is missing: what is read from now on is no older.
        bound: how many clocks that may lie before `clock`, None for any number.
        may_start: whether it may start now.
        leads: whether the worker is the one to evaluate, print and save for all.
        is_preempted: whether a worker is about to be taken away, and this clock is later than every one that
            was under way when the coordinator heard of it; without a bound, whatever the clock.
    """

    worker: int
    clock: int
    version: int
    complete: int
    bound: int | None
    may_start: bool
    leads: bool
    is_preempted: bool = False
    reason: str


@dataclass(frozen=True, kw_only=True)
class Recall:
    """The member is to say what a worker contributed that was not heard to.

    Attributes:
        worker: who is asked.
        of: who cannot be asked.
        after: the last round for which that worker was heard to be Ready.
    """

    worker: int
    of: int
    after: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Used:
    """Which samples a worker's state holds; the worker alone hears it.

    Attributes:
        round: exchanges that the state has finished.
        epoch: the first that they have not used up.
        used: that and later epochs that have begun, each with the ranges of positions that they have used.
        is_current: others have not gone on without the worker since; else the state is an old one.
    """

    worker: int
    round: int
    epoch: int
    used: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    is_current: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Lend:
    """A worker outside the group computes a block for a member, its patron; nobody else hears it.

    The patron sends it parameters as of its next step, and gets the gradient. What the worker was lent
    before is void.

    Attributes:
        number: of the worker's loans, from 0 up.
    """

    worker: int
    number: int
    patron: int
    block: Block
    reason: str


@dataclass(frozen=True, kw_only=True)
class Settle:
    """A loan is over; its patron alone hears it.

    Attributes:
        worker: the patron.
        late: who computed, or was to.
        counts: the block is the patron's now, with the gradient that was brought; else there is none.
    """

    worker: int
    late: int
    number: int
    counts: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Preempt:
    """A worker is about to be taken away: save, and leave.

    Attributes:
        worker: whom it is for, None for all.
        by: the worker whom the signal has reached.
    """

    worker: int | None
    by: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Validating:
    """The validation of an epoch has begun: somebody has a copy of the model as it was at its end.

    Attributes:
        worker: whom it is for, None for all.
    """

    worker: int | None
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LendSnapshot:
    """A worker evaluates parts with another one's copy of the model; nobody else hears it.

    Attributes:
        worker: who sends its copy.
        borrower: who gets it, in the place of its own.
        epoch, digest: of the copy.
        number: of such loans, from 0 up.
    """

    worker: int
    borrower: int
    epoch: int
    digest: str
    number: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class EvaluatePart:
    """A part of the validation set for one worker; nobody else hears it.

    Attributes:
        epoch, digest: of the copy of the model to evaluate; the worker has it, or is being lent it.
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
class MergeStates:
    """What metrics have seen in one part, for the worker that has those of the first; nobody else hears it.

    All parts come, in the order of the set; with the last one it merges them and says what they come to.

    Attributes:
        epoch, digest: of the copy of the model.
        part, parts: its number, from 0, and how many there are.
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
class Validated:
    """The validation of an epoch is over.

    Attributes:
        worker: whom it is for, None for all.
        owner: whose copy of the model was evaluated; None where there are no metrics.
        digest: of that copy, or "".
        means: over the set, by name.
        counts: by name, whole numbers.
    """

    worker: int | None
    epoch: int
    owner: int | None
    digest: str
    means: dict[str, float]
    counts: dict[str, float]
    reason: str


@dataclass(frozen=True, kw_only=True)
class EpochEnded:
    """The group has done with `epoch`: whoever is behind goes on to the next one.

    Attributes:
        epoch: this one and all before it.
    """

    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RoundNamed:
    """The next round of a worker that has left batches out is for the batch of this number.

    Where that is one that it has left out, it takes part with weight 0.
    """

    worker: int
    round: int
    batch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Dismiss:
    """Everybody has finished: take or give the final state, as the last Group says, and leave."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class CloseServers:
    """Nobody trains any more: the servers that belong to the job end."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The job cannot go on: every worker ends with this reason.

    Attributes:
        worker: who caused it, None where no single worker did.
        step: the step that worker was in, None before the first.
    """

    worker: int | None
    step: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """One peer may not take part; the job goes on without it.

    The coordinator tells the peer why and closes its connection; nothing that it sent or sends, its end
    included, becomes an event, because the id that it claims may belong to a worker that runs.

    Attributes:
        peer: the link name of the one that is refused (see `Joined.peer`).
    """

    peer: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerLost:
    """A worker was lost or has failed, and the job goes on without it; every other worker says so.

    No policy decides this: the coordinator tells it, next to what was decided of the Lost or the Failed.

    Attributes:
        worker: the one that is gone.
        reason: who is gone, why, who has noticed it, and who goes on.
    """

    worker: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Keys 0 to `keys` - 1 of the parameter server under a name (see `SpaceOpened`)."""

    name: str
    keys: int
    block_keys: int
    about: str
    aggregates: bool


@dataclass(frozen=True, kw_only=True)
class Participant:
    """A client whose pushes to a namespace are summed with the others', from time `begins` on."""

    namespace: str
    client: int
    begins: int


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Nobody pushes to a namespace until somebody new begins; `view` numbers the view that said so."""

    namespace: str
    view: int


@dataclass(frozen=True, kw_only=True)
class Filling:
    """A server is being filled with what lies at places `first` to `last` - 1 of the ring."""

    server: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class LostArc:
    """Keys of a namespace whose data are lost: requests for them fail.

    Attributes:
        number: of the loss, from 1 on, among all losses of the parameter server.
        first, last: they are in the blocks at places `first` to `last` - 1 of the ring.
        server: the last one that had all of them.
    """

    number: int
    namespace: str
    first: int
    last: int
    server: int


@dataclass(frozen=True, kw_only=True)
class Server:
    """How to reach a server of the parameter server: its addresses, best first."""

    server: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Viewed:
    """Who holds what on the parameter server, from now on (see `offbeat.policies.parcels.View`).

    Attributes:
        node: who hears it; everybody where it is empty.
        ring: the servers of the ring in force.
        virtual_nodes, copies: of every ring.
        target: the servers of the ring that is being prepared; none where none is.
        servers: all who are there.
        lost: keys whose data are lost.
        emptied: places of the ring, first and behind the last, whose data are lost with this view.
        silent: servers that have been silent for too long, and are waited for all the same.
    """

    node: str
    number: int
    epoch: int
    ring: tuple[int, ...]
    virtual_nodes: int
    copies: int
    target: tuple[int, ...]
    filling: tuple[Filling, ...]
    namespaces: tuple[Namespace, ...]
    participants: tuple[Participant, ...]
    paused: tuple[Pause, ...]
    servers: tuple[Server, ...]
    reason: str
    lost: tuple[LostArc, ...] = ()
    emptied: tuple[tuple[int, int], ...] = ()
    silent: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClientGone:
    """A client is gone and does not come back; servers alone are told, and keep nothing for it any more."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SpaceRefused:
    """A namespace cannot be as `node`, which alone hears it, wants it."""

    node: str
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A member of a group of workers.

    Attributes:
        shards: that are its own, as ranges: the first and the last of each.
        passes: that all of these have been through.
        done: passes over a shard that it has reported done.
    """

    node: str
    shards: tuple[tuple[int, int], ...]
    passes: int
    done: int


@dataclass(frozen=True, kw_only=True)
class GroupViewed:
    """Whose data is whose in a group of workers, from now on, and who is how far.

    Attributes:
        node: who hears it; all members where it is empty.
        passes: that all shards have been through which are not lost.
        waiting: shards that wait for a worker, as ranges.
        lost: shards that nobody has, and that the group goes on without.
    """

    node: str
    group: str
    tau: int | None
    passes: int
    workers: tuple[Worker, ...]
    waiting: tuple[tuple[int, int], ...]
    lost: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class TaskIssued:
    """A worker is to do a pass over some of its shards; it alone hears it.

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
class PassesEnded:
    """All shards that are not lost have been through as many passes as a worker asked for, or more."""

    node: str
    group: str
    passes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerRefused:
    """A client, which alone hears it, is no member of a group any more, or cannot have what it asked for."""

    node: str
    group: str
    reason: str


GroupAction: TypeAlias = GroupViewed | TaskIssued | PassesEnded | WorkerRefused

Action: TypeAlias = (
    Start
    | Halt
    | Group
    | Deal
    | Used
    | Grant
    | Recall
    | Lend
    | Settle
    | Preempt
    | Validating
    | LendSnapshot
    | EvaluatePart
    | MergeStates
    | Validated
    | EpochEnded
    | RoundNamed
    | Dismiss
    | CloseServers
    | Stop
    | Refuse
    | WorkerLost
    | Viewed
    | ClientGone
    | SpaceRefused
    | GroupViewed
    | TaskIssued
    | PassesEnded
    | WorkerRefused
)
