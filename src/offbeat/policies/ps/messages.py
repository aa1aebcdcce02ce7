"""The messages between clients, servers and the manager of a parameter server, as plain data.

A message carries the values of its keys as `content`, which no policy reads.
docs/decisions/0008-how-servers-replicate.md describes the protocols that use them.

Messages are never modified. Most are not frozen dataclasses all the same: those take four times as long to
create, and one is created for every push.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from offbeat.events import LostArc
from offbeat.policies.ps.hash_ring import HashRing, NamespaceSpec
from offbeat.policies.ps.range_clock import ClockRange

Payload: TypeAlias = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RingArc:
    """Places `first` to `last` - 1 on the ring."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementView:
    """The assignment of keys to servers, as the manager publishes it to all nodes.

    Attributes:
        version: increases with every view.
        epoch: the number of the latest view in which a master, a namespace or a participant changed; requests
            of clients carry it.
        ring: the servers that are responsible.
        spaces: the namespaces, by name.
        filling: servers of the ring that have not received all data that they are responsible for, and where.
        target: the ring that is being prepared, None if there is none; servers that gain in it are being
            filled.
        participants: for each namespace that aggregates, the clients whose pushes are summed, with the first
            time of each.
        paused: the namespaces in which no participant begins another time until a newcomer has been admitted,
            with the numbers of the views that paused them.
        lost: keys whose data are lost; no server serves them.
        lost_arcs_dropped: places whose data are lost with this view; every server drops what it has of them.
        silent_servers: servers that have been silent for too long and that the manager waits for
            nevertheless. They may change without another view.
    """

    version: int
    epoch: int
    ring: HashRing
    spaces: dict[str, NamespaceSpec]
    filling: dict[int, tuple[RingArc, ...]] = field(default_factory=dict)
    target: HashRing | None = None
    participants: dict[str, dict[int, int]] = field(default_factory=dict)
    paused: dict[str, int] = field(default_factory=dict)
    lost: tuple[LostArc, ...] = ()
    lost_arcs_dropped: tuple[RingArc, ...] = ()
    silent_servers: tuple[int, ...] = ()


# Between clients and servers


@dataclass(kw_only=True, slots=True)
class Push:
    """A client pushes to keys `first` to `last` - 1, all of which have the same holders.

    Attributes:
        request: of the client's request.
        epoch: of the client's view.
        time: the client's time of this push; keys of the range that `content` does not list advance to it
            too.
        previous_times: the times of the client's previous pushes, for the whole range.
        returns_values: the reply is the values of all keys of the range after the push, instead of a PushAck.
    """

    client: int
    request: int
    epoch: int
    namespace: str
    first: int
    last: int
    time: int
    previous_times: tuple[ClockRange, ...]
    content: Payload
    returns_values: bool = False


@dataclass(kw_only=True, slots=True)
class Pull:
    """A client requests the values of keys `first` to `last` - 1, or of those of them that `keys` lists."""

    client: int
    request: int
    epoch: int
    namespace: str
    first: int
    last: int
    keys: Payload | None


@dataclass(kw_only=True, slots=True)
class InspectPull(Pull):
    """A client requests more than values.

    Attributes:
        returns_states: also the state that the update keeps for each value.
        returns_times: also the times of the client's own pushes that are contained in the values.
    """

    returns_states: bool
    returns_times: bool


@dataclass(kw_only=True, slots=True)
class PushAck:
    """All holders have applied this part of a push."""

    request: int
    first: int
    last: int


@dataclass(kw_only=True, slots=True)
class PullResult:
    """The values of this part of a pull; or of a push that wants them, once all holders have applied it."""

    request: int
    namespace: str
    first: int
    last: int
    content: Payload


@dataclass(kw_only=True, slots=True)
class InspectResult(PullResult):
    """The reply to this part of an `InspectPull`.

    Attributes:
        times: of the client's own pushes that are contained in these values, ascending; empty if they were
            not requested, and without keys that the client has not pushed.
    """

    times: tuple[ClockRange, ...]


@dataclass(kw_only=True, slots=True)
class WrongMaster:
    """Another server is, or will be, the master of this part; the client needs a view of this epoch."""

    request: int
    first: int
    last: int
    epoch: int


@dataclass(kw_only=True, slots=True)
class Rejected:
    """This part of a request is invalid; the sender has applied nothing of it if it is a push."""

    request: int
    first: int
    last: int
    reason: str


# Between servers


@dataclass(kw_only=True, slots=True)
class PushStamp:
    """One client's push in an operation: its time and its previous times, for the whole range."""

    client: int
    time: int
    previous_times: tuple[ClockRange, ...]


@dataclass(kw_only=True, slots=True)
class Operation:
    """One push, or the sum of several clients' pushes, for keys `first` to `last` - 1."""

    namespace: str
    first: int
    last: int
    stamps: tuple[PushStamp, ...]
    content: Payload


@dataclass(kw_only=True, slots=True)
class Replicate:
    """An operation on its way down a replication chain.

    Attributes:
        view: in which it was sent.
        master: the head of the chain.
        serial: counts the master's operations in this view.
        route: the holders after the receiver.
    """

    view: int
    master: int
    serial: int
    operation: Operation
    route: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class ReplicateAck:
    """The receiver of a Replicate and all holders after it have applied the operation."""

    view: int
    master: int
    serial: int


@dataclass(kw_only=True, slots=True)
class HandoffOperations:
    """Operations of earlier views that were not acknowledged to the sender, for the master of this view.

    Attributes:
        chain: the chain that they go down, the master first.
    """

    view: int
    chain: tuple[int, ...]
    operations: tuple[Operation, ...]


@dataclass(kw_only=True, slots=True)
class HandoffReplayed:
    """All operations that a holder has handed to the master have come down the chain before this message.

    Attributes:
        chain: all of it, the master first.
        holder: the holder.
    """

    view: int
    chain: tuple[int, ...]
    holder: int


@dataclass(kw_only=True, slots=True)
class HandoffDone:
    """The sender has handed over all operations that it had for the receiver in this view, possibly none."""

    view: int


@dataclass(kw_only=True, slots=True)
class TransferRequest:
    """A server that is being filled requests the blocks that it gains in this view and does not have.

    Attributes:
        present_blocks: the blocks that it has, by namespace and number.
    """

    view: int
    present_blocks: tuple[tuple[str, int], ...]


@dataclass(kw_only=True, slots=True)
class TransferChunk:
    """A block as the sender has it.

    Attributes:
        view: in which it was requested.
        block: its number in the namespace.
        clocks: by client, the times of its keys.
        pending: operations contained in it that are not known to have reached all holders, in order.
    """

    view: int
    namespace: str
    block: int
    content: Payload
    clocks: dict[int, list[ClockRange]]
    pending: tuple[Operation, ...]


@dataclass(kw_only=True, slots=True)
class TransferAck:
    """The receiver of a TransferChunk has stored it; the sender may send another."""

    view: int


@dataclass(kw_only=True, slots=True)
class TransferDone:
    """The receiver has all blocks that it requested from the sender in this view."""

    view: int


# To the manager


@dataclass(kw_only=True, slots=True)
class ServerFillDone:
    """A server has received all data that it was to be filled with in this view."""

    server: int
    view: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinAggregation:
    """A client asks to take part in a namespace that aggregates."""

    client: int
    namespace: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveAggregation:
    """A client stops pushing to a namespace that aggregates; all its pushes there are done."""

    client: int
    namespace: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseReached:
    """A participant has sent nothing after this time, and sends nothing after it during this pause.

    Attributes:
        pause: the number of the view that paused the namespace.
    """

    client: int
    namespace: str
    pause: int
    time: int


ServerMessage: TypeAlias = (
    Push
    | Pull
    | InspectPull
    | Replicate
    | ReplicateAck
    | HandoffOperations
    | HandoffReplayed
    | HandoffDone
    | TransferRequest
    | TransferChunk
    | TransferAck
    | TransferDone
)
ClientMessage: TypeAlias = PushAck | PullResult | InspectResult | WrongMaster | Rejected
