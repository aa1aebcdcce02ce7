"""Every message between clients, servers and the manager of a parameter server, as plain data.

What a message carries for its keys is `content`, which no policy looks into. See
docs/decisions/0008-how-servers-replicate.md for what these are for.

Nobody changes a message. They are not frozen dataclasses all the same: these take four times as long to make,
and one is made for every push.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from offbeat.events import LostArc
from offbeat.policies.ps.hash_ring import Ring, Space
from offbeat.policies.ps.range_clock import Piece

Content: TypeAlias = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Arc:
    """Places `first` to `last` - 1 on the ring."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Who holds what, as the manager says it to everybody.

    Attributes:
        number: grows with every view.
        epoch: the number of the view in which some master changed last, or a namespace came, or who takes
            part in one; what clients go by.
        ring: who is responsible.
        spaces: the namespaces, by name.
        filling: servers of the ring that have not got all that they are responsible for, and where.
        target: the ring that is being prepared, None where none is; who gains in it is being filled.
        participants: of each namespace that aggregates, whose pushes are summed, and the first time of each.
        paused: the namespaces in which no participant begins another time, as one is to come; and the numbers
            of the views that paused them.
        lost: keys whose data are lost; nobody serves them.
        emptied: places whose data are lost with this view: what any server has of them it drops.
        silent: servers that have been silent for too long, and are waited for all the same. They may change
            without another view.
    """

    number: int
    epoch: int
    ring: Ring
    spaces: dict[str, Space]
    filling: dict[int, tuple[Arc, ...]] = field(default_factory=dict)
    target: Ring | None = None
    participants: dict[str, dict[int, int]] = field(default_factory=dict)
    paused: dict[str, int] = field(default_factory=dict)
    lost: tuple[LostArc, ...] = ()
    emptied: tuple[Arc, ...] = ()
    silent: tuple[int, ...] = ()


# Between clients and servers


@dataclass(kw_only=True, slots=True)
class Push:
    """A client sends something for keys `first` to `last` - 1, all of which have the same holders.

    Attributes:
        number: of the client's request.
        epoch: that the client goes by.
        time: the client's, of this push; keys of the range that `content` does not list take it too.
        after: the times of the client's pushes before this one, of the whole range.
        wants_values: it is answered with what all keys of the range hold then, instead of with Pushed.
    """

    client: int
    number: int
    epoch: int
    namespace: str
    first: int
    last: int
    time: int
    after: tuple[Piece, ...]
    content: Content
    wants_values: bool = False


@dataclass(kw_only=True, slots=True)
class Pull:
    """A client wants the values of keys `first` to `last` - 1, or of those of them that `keys` lists."""

    client: int
    number: int
    epoch: int
    namespace: str
    first: int
    last: int
    keys: Content | None


@dataclass(kw_only=True, slots=True)
class Inspect(Pull):
    """A client wants to know more than values.

    Attributes:
        with_states: what the update keeps besides them, too.
        with_times: the times of the client's own pushes that are in them, too.
    """

    with_states: bool
    with_times: bool


@dataclass(kw_only=True, slots=True)
class Pushed:
    """All holders have this part of a push."""

    number: int
    first: int
    last: int


@dataclass(kw_only=True, slots=True)
class Pulled:
    """The values of this part of a pull; or of a push that wants them, which all holders have."""

    number: int
    namespace: str
    first: int
    last: int
    content: Content


@dataclass(kw_only=True, slots=True)
class Inspected(Pulled):
    """Likewise, of one that wants to know more.

    Attributes:
        times: of the client's own pushes that are in these values, ascending; none where they are not wanted,
            and none of keys that it has not pushed.
    """

    times: tuple[Piece, ...]


@dataclass(kw_only=True, slots=True)
class Stale:
    """Another server is the master of this part, or will be; the client goes by a view of this epoch."""

    number: int
    first: int
    last: int
    epoch: int


@dataclass(kw_only=True, slots=True)
class Refused:
    """This part of a request cannot be; of a push, nothing of it was applied by who says so."""

    number: int
    first: int
    last: int
    reason: str


# Between servers


@dataclass(kw_only=True, slots=True)
class Mark:
    """One client's push in an operation: its time, and its times before, of the whole range."""

    client: int
    time: int
    after: tuple[Piece, ...]


@dataclass(kw_only=True, slots=True)
class Operation:
    """What a master has applied to keys `first` to `last` - 1: one push, or the sum of several clients'."""

    namespace: str
    first: int
    last: int
    marks: tuple[Mark, ...]
    content: Content


@dataclass(kw_only=True, slots=True)
class Copy:
    """An operation on its way down a chain.

    Attributes:
        view: in which it was sent.
        master: who begins the chain.
        serial: of the master's operations in this view.
        route: the holders behind the receiver.
    """

    view: int
    master: int
    serial: int
    operation: Operation
    route: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Copied:
    """The receiver of a Copy and all behind it have the operation."""

    view: int
    master: int
    serial: int


@dataclass(kw_only=True, slots=True)
class Handed:
    """What a holder has of earlier views that was not acknowledged to it, for the master of this one.

    Attributes:
        chain: down which it is to go, the master first.
    """

    view: int
    chain: tuple[int, ...]
    operations: tuple[Operation, ...]


@dataclass(kw_only=True, slots=True)
class Resent:
    """All that a holder has handed to the master has come down the chain before this.

    Attributes:
        chain: all of it, the master first.
        of: the holder.
    """

    view: int
    chain: tuple[int, ...]
    of: int


@dataclass(kw_only=True, slots=True)
class HandEnd:
    """The sender has handed to the receiver all that it had for it in this view; it may have been nothing."""

    view: int


@dataclass(kw_only=True, slots=True)
class Fetch:
    """Who is being filled wants the blocks that it gains in this view and has not got.

    Attributes:
        have: the blocks that it has, by namespace and number.
    """

    view: int
    have: tuple[tuple[str, int], ...]


@dataclass(kw_only=True, slots=True)
class Chunk:
    """A block as the sender has it.

    Attributes:
        view: in which it was fetched.
        block: its number in the namespace.
        clocks: by client, the times of its keys.
        pending: operations in it that are not known to have reached all holders, in order.
    """

    view: int
    namespace: str
    block: int
    content: Content
    clocks: dict[int, list[Piece]]
    pending: tuple[Operation, ...]


@dataclass(kw_only=True, slots=True)
class ChunkTaken:
    """The receiver of a Chunk has it and can take another."""

    view: int


@dataclass(kw_only=True, slots=True)
class FillEnd:
    """The receiver has all that it fetched from the sender in this view."""

    view: int


# To the manager


@dataclass(kw_only=True, slots=True)
class Filled:
    """A server has all that it was to be filled with in this view."""

    server: int
    view: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Enlist:
    """A client wants to take part in a namespace that aggregates."""

    client: int
    namespace: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Withdraw:
    """A client pushes no more to a namespace that aggregates; all that it has pushed there is done."""

    client: int
    namespace: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """A participant has sent nothing after this time, and sends nothing after it in this pause.

    Attributes:
        pause: the number of the view that paused the namespace.
    """

    client: int
    namespace: str
    pause: int
    time: int


ToServer: TypeAlias = (
    Push | Pull | Inspect | Copy | Copied | Handed | Resent | HandEnd | Fetch | Chunk | ChunkTaken | FillEnd
)
ToClient: TypeAlias = Pushed | Pulled | Inspected | Stale | Refused
