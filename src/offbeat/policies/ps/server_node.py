"""A server of a parameter server as a state machine without I/O: message in, messages out.

Nothing here knows what values are, how messages travel, or which nodes are alive: that is in the manager's
views. docs/decisions/0008-how-servers-replicate.md gives the reasons for this design.

Theory of operation: the replication chain
------------------------------------------

Parts. A namespace's keys lie in blocks, and a block has one place on the ring. The servers that hold it form
a chain: the master, its replicas, and last the servers that are being filled or that gain the block in the
ring that is being prepared (`_chain_at`). The manager numbers views; a view fixes every chain.

A push. The client sends each part of a push to its master. The master keeps only the keys for which the
client's push is new (`RangeVectorClock.fresh`), rehearses it, applies it, and sends it down the chain as
`Copy`, source-routed. Each holder applies the operation and forwards it; the last one replies `Copied`,
which travels back up. Each holder keeps the operation in `_kept` until `Copied` has passed it. The master
then answers the client with `Pushed`, or with `Pulled` if the push wants values. An operation that cannot be
applied goes nowhere: the client receives `Refused`. A namespace that aggregates differs in one point: pushes
wait in `Aggregation` until those of all participants are there, and their sum is one operation.

A new view (`see`). Messages of servers from older views are dropped, those from newer views are kept until
this server has that view (`_early`). Then, in this order: data of blocks that are lost or that belong to
other servers are dropped; missing blocks are requested from their sources; every operation that is not
acknowledged here is sent down its new chains if this server is the master now, else handed to the master
(`Handed`), which treats it like a push and lets `Resent` follow it down the chain; where namespaces
aggregate, `HandEnd` closes the handover, and the master accepts no push to such a namespace before all
holders of its chains have sent theirs; then deferred and early messages are processed. In a new epoch,
clients send again all that was not acknowledged; within an epoch, the requests stay with their operations.

Filling. A server that gains blocks is at the end of their chains from the first moment, so it receives every
operation; the older content comes as `Chunk`s from the last complete holder. Operations on a block that has
not come are buffered and applied behind it; clocks drop what the block contains already.

Invariants. A client is answered only after all holders have applied its push. Each push is applied at most
once per key, in the client's order; `gaps` counts violations of the order. Holders of a block apply the same
operations in the same order. A deposed master with replicas can acknowledge nothing: they have a later view.

Failures. An invalid client message raises `ProtocolError` and changes nothing. A holder that does not reply
stops acknowledgements until a view without it. Values are lost only when all complete holders of a block are
gone; the view then lists the place in `emptied`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from offbeat.errors import ProtocolError
from offbeat.policies.ps.aggregation import Aggregation, Request, Sum
from offbeat.policies.ps.hash_ring import POINTS, Space, Span, block_point
from offbeat.policies.ps.messages import (
    Chunk,
    ChunkTaken,
    Content,
    Copied,
    Copy,
    Fetch,
    Filled,
    FillEnd,
    Handed,
    HandEnd,
    Inspect,
    Inspected,
    Mark,
    Operation,
    Pull,
    Pulled,
    Push,
    Pushed,
    Refused,
    Resent,
    Stale,
    ToClient,
    ToServer,
    View,
)
from offbeat.policies.ps.range_clock import RangeVectorClock

MANAGER = "manager"
_UNACKED_CHUNKS_MAX = 4
_ROUTES_MAX = 4096
OF_CLIENTS = (Push, Pull)

Block = tuple[str, int]  # a namespace, and the number of a block in it


class Table(Protocol):
    """The values of one namespace on one server; keys that were never pushed are zero."""

    @property
    def looks_once(self) -> bool:
        """Whether it reads pushed content only while applying it, and never afterwards."""

    def check(self, content: Content, first: int, last: int) -> None:
        """Check that content can be pushed to keys `first` to `last` - 1.

        Raises:
            ValueError: it cannot.
        """

    def rehearse(self, first: int, last: int, content: Content) -> None:
        """Check that `apply` accepts this in the current state; nothing changes.

        Raises:
            ValueError: it does not.
        """

    def apply(self, first: int, last: int, content: Content) -> None:
        """Apply what was pushed for keys `first` to `last` - 1."""

    def read(self, first: int, last: int, keys: Content | None, states: bool = False) -> Content:
        """Return the values of keys `first` to `last` - 1, or of those of them that `keys` lists.

        Args:
            states: also return the state that is kept for each value.

        Raises:
            ValueError: `keys` lists other keys.
        """

    def cut(self, content: Content, first: int, last: int) -> Content:
        """Return the part of `content` for keys `first` to `last` - 1."""

    def aggregated(self, contents: Sequence[Content], first: int, last: int) -> Content:
        """Combine, for example sum, what `contents` have for keys `first` to `last` - 1.

        The result may depend on their order and on the current values, so it is applied before anything else.
        """

    def copy_out(self, first: int, last: int) -> Content:
        """Return a copy of everything that is kept for keys `first` to `last` - 1."""

    def copy_in(self, first: int, last: int, content: Content) -> None:
        """Replace everything kept for keys `first` to `last` - 1 by another table's `copy_out`."""

    def drop(self, first: int, last: int) -> None:
        """Delete keys `first` to `last` - 1."""


class Store(Protocol):
    """All values of one server."""

    def table(self, space: Space) -> Table:
        """Return a namespace's table, created if needed."""


class Send(NamedTuple):
    """One message for one node: "server-3", "client-7" or "manager"."""

    to: str
    message: object


@dataclass(slots=True, eq=False)
class _UnackedOperation:
    """An operation that is not known to have reached all holders after this one.

    Attributes:
        came_from: the holder before this one, None on the master.
        requests: that wait for it, on the master.
    """

    operation: Operation
    came_from: int | None
    requests: list[Request] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Fill:
    """The transfer of blocks to one server that requests them from here.

    Attributes:
        pending: blocks that are still to be sent, in order.
        unacked: blocks that were sent and not acknowledged.
    """

    pending: list[Block]
    unacked: int = 0


class ServerNode:
    """One server: master of some arcs of the ring, replica of others, source for filling servers.

    Source: the parameter server of OSDI'14, sections 4.3 to 4.5. Deviations: docs/decisions/0008.

    Args:
        server: its id.
        store: its values.

    Attributes:
        view: the one in force here, None before the first.
        gaps: operations that came although a preceding one was missing: an acknowledged operation is lost, or
            the preceding one was refused.
    """

    def __init__(self, server: int, store: Store) -> None:
        self.server = server
        self.view: View | None = None
        self.gaps = 0
        self._store = store
        self._clocks: dict[str, RangeVectorClock] = {}
        self._kept: dict[
            tuple[int, int], _UnackedOperation
        ] = {}  # by master and serial, in the order of application
        self._serial = 0  # of this view
        self._carried: list[Operation] = []  # of earlier views, handed to a master to send again, in order
        self._unacked_fetched: list[Operation] = []  # the same, contained in blocks received in this view
        self._early: dict[int, list[tuple[str, ToServer]]] = {}  # by the view that they wait for
        self._fills: dict[int, _Fill] = {}  # by the server that is being filled from here, in this view
        self._pending_sources: set[int] = (
            set()
        )  # sources of this server that have not sent FillEnd in this view
        self._have: set[Block] = set()  # of the blocks that it gains
        self._buffered: dict[Block, list[Operation]] = {}  # on blocks that have not come
        self._deferred: list[Push | Pull] = []  # for blocks that have not come, of which this is the master
        self._aggregation = Aggregation()
        self._unheard: set[int] = set()  # holders that may still hand over operations of earlier views
        self._chains: dict[int, tuple[int, ...]] = {}  # by point: cache for this view
        self._routes: dict[tuple[str, int, int], list[Span]] = {}  # by range of keys: cache for this view
        self._output: list[Send] = []

    # Received messages -----------------------------------------------------------------------------------

    def hear(self, sender: str, message: ToServer) -> list[Send]:
        """Process a message; return the messages to send.

        Raises:
            ProtocolError: no client of this version sends such a request; nothing has changed.
        """
        self._hear(sender, message)
        return self._drain_output()

    def see(self, view: View) -> list[Send]:
        """Adopt a new view; an older one is ignored."""
        if self.view is None or view.number > self.view.number:
            self._follow(view)
        return self._drain_output()

    def keeps_nothing_of(self, push: Push) -> bool:
        """Whether a push, if received now, would be read once only and nothing of it kept.

        Otherwise it waits for blocks or for the pushes of other participants, or goes to replicas.
        """
        view = self.view
        space = None if view is None else view.spaces.get(push.namespace)
        if view is None or space is None or space.aggregates or push.epoch > view.number:
            return False
        if self._pending_sources or self._gains() or not 0 <= push.first < push.last <= space.keys:
            return False
        is_alone = all(len(chain) == 1 for _, _, chain in self._route(space.name, push.first, push.last))
        return is_alone and self._store.table(space).looks_once

    def times_of(self, namespace: str, key: int) -> dict[int, int]:
        """Return, by client, the time of its latest push of a key that was applied here."""
        clock = self._clock(namespace)
        return {client: time for client in clock.clients if (time := clock.at(client, key))}

    def _drain_output(self) -> list[Send]:
        output, self._output = self._output, []
        return output

    def _hear(self, sender: str, message: ToServer) -> None:
        """Keep messages of later views; drop servers' messages of earlier ones: they are sent again."""
        number = -1 if self.view is None else self.view.number
        is_of_client = isinstance(message, OF_CLIENTS)
        of_view = message.epoch if is_of_client else message.view  # type: ignore[union-attr]
        if of_view > number:
            self._early.setdefault(of_view, []).append((sender, message))
        elif is_of_client or of_view == number:
            self._dispatch(sender, message)

    def _dispatch(self, sender: str, message: ToServer) -> None:
        match message:
            case Push() | Pull():
                self._on_request(message)
            case Copy():
                self._on_replicate(message, _server(sender))
            case Copied():
                self._on_replicate_ack((message.master, message.serial))
            case Handed():
                self._on_handoff(_server(sender), message)
            case Resent():
                self._on_handoff_replayed(message)
            case HandEnd():
                self._on_handoff_done(_server(sender))
            case Fetch():
                self._on_transfer_request(_server(sender), message)
            case Chunk():
                self._on_transfer_chunk(_server(sender), message)
            case ChunkTaken():
                self._fills[_server(sender)].unacked -= 1
                self._send_chunks(_server(sender))
            case FillEnd():
                self._on_transfer_done(_server(sender))

    # Requests of clients ---------------------------------------------------------------------------------

    def _on_request(self, message: Push | Pull) -> None:
        view = self._now()
        space = view.spaces.get(message.namespace)
        if space is None or not 0 <= message.first < message.last <= space.keys:
            raise ProtocolError(
                f"expected keys of a namespace that was opened, got {message.first} to {message.last} of "
                f"{message.namespace}"
            )
        holders = view.ring.holders(space, message.first)
        if message.epoch < view.epoch or not holders or holders[0] != self.server:
            stale = Stale(number=message.number, first=message.first, last=message.last, epoch=view.epoch)
            self._send_to_client(message.client, stale)
        elif self._has_to_wait(message):
            self._deferred.append(message)
        elif isinstance(message, Pull):
            self._send_to_client(message.client, self._pulled(space, message))
        else:
            self._check(space, message)
            if space.aggregates:
                self._push_to_sum(message)
            else:
                self._push(message)

    def _check(self, space: Space, push: Push) -> None:
        if any(chain[0] != self.server for _, _, chain in self._route(space.name, push.first, push.last)):
            raise ProtocolError(
                f"expected a push of keys with one master, server {self.server}, got {push.first} to "
                f"{push.last} of {space.name}"
            )
        begins = self._now().participants.get(space.name, {}).get(push.client, 0)
        if space.aggregates and push.time < begins:
            raise ProtocolError(f"expected a push of time {begins} at least, got one of time {push.time}")
        try:
            self._store.table(space).check(push.content, push.first, push.last)
        except ValueError as error:
            raise ProtocolError(f"expected a push that {space.name} can accept: {error}") from error

    def _pulled(self, space: Space, pull: Pull) -> Pulled:
        if not isinstance(pull, Inspect):
            return self._values(space, pull, pull.keys)
        pieces = self._clock(space.name).pieces(pull.client, pull.first, pull.last) if pull.with_times else []
        return Inspected(
            number=pull.number,
            namespace=pull.namespace,
            first=pull.first,
            last=pull.last,
            content=self._read(space, pull, pull.keys, pull.with_states),
            times=tuple(piece for piece in pieces if piece.time),
        )

    def _values(self, space: Space, request: Push | Pull, keys: Content | None) -> Pulled:
        return Pulled(
            number=request.number,
            namespace=request.namespace,
            first=request.first,
            last=request.last,
            content=self._read(space, request, keys),
        )

    def _read(
        self, space: Space, request: Push | Pull, keys: Content | None, states: bool = False
    ) -> Content:
        try:
            return self._store.table(space).read(request.first, request.last, keys, states)
        except ValueError as error:
            raise ProtocolError(f"expected a pull that {space.name} can answer: {error}") from error

    def _has_to_wait(self, message: Push | Pull) -> bool:
        """Whether it is for a block that has not come, or after such a request of the same client.

        No sum is begun before all holders have handed over their operations of earlier views: one of them may
        have applied a sum that contains the push of a client that is now lost.
        """
        if self._unheard and isinstance(message, Push) and self._now().spaces[message.namespace].aggregates:
            return True
        if not self._pending_sources:  # everything has come
            return False
        blocks = self._blocks_of(message.namespace, message.first, message.last)
        return any(self._lacks(block) for block in blocks) or any(
            other.client == message.client
            and other.namespace == message.namespace
            and other.first < message.last
            and message.first < other.last
            for other in self._deferred
        )

    def _push(self, push: Push) -> None:
        clock = self._clock(push.namespace)
        fresh = clock.fresh(push.client, push.first, push.last, push.time)
        request = Request(push, waits_for=1)  # until all of it has been begun
        mark = Mark(client=push.client, time=push.time, after=push.after)
        whole = Operation(
            namespace=push.namespace,
            first=push.first,
            last=push.last,
            marks=(mark,),
            content=push.content,
        )
        if fresh != [(push.first, push.last)]:
            self._wait_for_kept(request)
        for first, last in fresh:
            self._apply_and_replicate(self._part(whole, first, last), [request])
        self._release_requests([request])

    def _push_to_sum(self, push: Push) -> None:
        """Let a push wait for those of the other participants, and begin the sums that it completes."""
        fresh = self._clock(push.namespace).fresh(push.client, push.first, push.last, push.time)
        request = Request(push, waits_for=1)  # until all of it has been begun
        if fresh != [(push.first, push.last)]:
            self._wait_for_kept(request)
        for first, last in fresh:
            request.waits_for += last - first  # one for each key, until its sum is begun
            for one in self._aggregation.add(request, first, last):
                requests = [request for of_client in one.requests for request in of_client]
                self._apply_and_replicate(self._sum(push.namespace, one), requests)
                self._release_requests(requests, one.last - one.first)
        self._release_requests([request])

    def _wait_for_kept(self, request: Request) -> None:
        """Let a request wait for operations in flight that contain parts of the same push."""
        for kept in self._kept.values():
            if _is_of(kept.operation, request.push):
                kept.requests.append(request)
                request.waits_for += 1

    def _sum(self, namespace: str, one: Sum) -> Operation:
        table = self._store.table(self._now().spaces[namespace])
        pushes = [of_client[0].push for of_client in one.requests]
        contents = [table.cut(push.content, one.first, one.last) for push in pushes]
        return Operation(
            namespace=namespace,
            first=one.first,
            last=one.last,
            marks=tuple(Mark(client=push.client, time=push.time, after=push.after) for push in pushes),
            content=table.aggregated(contents, one.first, one.last),
        )

    def _apply_and_replicate(self, operation: Operation, requests: list[Request]) -> None:
        """Apply an operation as its master and send it down its chains; or refuse its requests.

        The caller holds one more count of each request, so that none completes while parts of it are not
        begun.
        """
        if requests:
            table = self._store.table(self._now().spaces[operation.namespace])
            try:
                table.rehearse(operation.first, operation.last, operation.content)
            except ValueError as error:
                for request in requests:
                    request.refusal = str(error)
                return
        self._apply(operation)
        self._send_down(operation, requests)

    def _send_down(self, operation: Operation, requests: list[Request]) -> None:
        """Send an operation to the other holders; the requests wait until all of them have it."""
        for part, chain in self._by_chain(operation):
            if len(chain) > 1:
                for request in requests:
                    request.waits_for += 1
                self._send_part(_UnackedOperation(part, None, list(requests)), chain[1:])

    def _send_part(self, kept: _UnackedOperation, route: tuple[int, ...]) -> None:
        self._serial += 1
        self._kept[self.server, self._serial] = kept
        copy = Copy(
            view=self._now().number,
            master=self.server,
            serial=self._serial,
            operation=kept.operation,
            route=route[1:],
        )
        self._send_to_server(route[0], copy)

    def _acknowledge(self, request: Request) -> None:
        push = request.push
        if request.refusal:
            answer: Pushed | Pulled | Refused = refused(push, ValueError(request.refusal))
        elif push.wants_values:
            try:
                answer = self._values(self._now().spaces[push.namespace], push, None)
            except ProtocolError as error:  # the sender of the message being processed is not at fault
                answer = refused(push, error)
        else:
            answer = Pushed(number=push.number, first=push.first, last=push.last)
        self._send_to_client(push.client, answer)

    # Chains ----------------------------------------------------------------------------------------------

    def _on_replicate(self, copy: Copy, sender: int) -> None:
        """Apply an operation as a replica, or as a server that is being filled, and forward it."""
        self._apply(copy.operation)
        if not copy.route:
            self._send_to_server(sender, Copied(view=copy.view, master=copy.master, serial=copy.serial))
            return
        self._kept[copy.master, copy.serial] = _UnackedOperation(copy.operation, sender)
        onward = Copy(
            view=copy.view,
            master=copy.master,
            serial=copy.serial,
            operation=copy.operation,
            route=copy.route[1:],
        )
        self._send_to_server(copy.route[0], onward)

    def _on_replicate_ack(self, key: tuple[int, int]) -> None:
        """All holders after this one have an operation."""
        kept = self._kept.pop(key)
        if kept.came_from is None:
            self._release_requests(kept.requests)
        else:
            self._send_to_server(
                kept.came_from, Copied(view=self._now().number, master=key[0], serial=key[1])
            )

    def _release_requests(self, requests: Iterable[Request], count: int = 1) -> None:
        for request in requests:
            request.waits_for -= count
            if not request.waits_for:
                self._acknowledge(request)

    def _on_handoff(self, holder: int, handed: Handed) -> None:
        """Begin, like a push, the operations of a holder that this new master may not have."""
        for operation in handed.operations:
            for first, last in self._fresh(operation):
                self._apply_and_replicate(self._part(operation, first, last), [])
        self._on_handoff_replayed(Resent(view=handed.view, chain=handed.chain, of=holder))

    def _on_handoff_replayed(self, resent: Resent) -> None:
        if resent.of == self.server:
            self._carried = [
                operation for operation in self._carried if self._chain_of(operation) != resent.chain
            ]
        place = resent.chain.index(self.server)
        if place + 1 < len(resent.chain):
            self._send_to_server(resent.chain[place + 1], resent)

    def _on_handoff_done(self, holder: int) -> None:
        self._unheard.discard(holder)
        if not self._unheard:
            self._serve_deferred()

    # Applying --------------------------------------------------------------------------------------------

    def _apply(self, operation: Operation) -> None:
        """Apply the parts of an operation that are new here; buffer those for blocks that have not come."""
        if not self._gains():
            self._apply_now(operation)
            return
        space = self._now().spaces[operation.namespace]
        for block in self._blocks_of(operation.namespace, operation.first, operation.last):
            first, last = space.range_of(block[1])
            part = self._part(operation, max(first, operation.first), min(last, operation.last))
            if self._lacks(block):
                self._buffered.setdefault(block, []).append(part)
            else:
                self._apply_now(part)
                if self._is_gained(block):
                    self._have.add(block)

    def _apply_now(self, operation: Operation) -> None:
        clock = self._clock(operation.namespace)
        table = self._store.table(self._now().spaces[operation.namespace])
        if len(operation.marks) == 1:
            one, first, last = operation.marks[0], operation.first, operation.last
            known = clock.pieces(one.client, first, last)
            if len(known) == 1 and known[0].time < one.time and len(one.after) == 1:  # nearly always
                self.gaps += one.after[0].time > known[0].time
                table.apply(first, last, operation.content)
                clock.advance(one.client, first, last, one.time)
                return
        self.gaps += self._has_gap(clock, operation)
        for first, last in self._fresh(operation):
            table.apply(first, last, table.cut(operation.content, first, last))
            for mark in operation.marks:
                clock.set(mark.client, first, last, mark.time)

    def _fresh(self, operation: Operation) -> list[tuple[int, int]]:
        """Return the ranges where none of an operation's pushes has been applied; elsewhere all have been."""
        clock, one = self._clock(operation.namespace), operation.marks[0]
        parts = clock.fresh(one.client, operation.first, operation.last, one.time)
        for mark in operation.marks[1:]:
            parts = [part for at in parts for part in clock.fresh(mark.client, *at, mark.time)]
        return parts

    def _has_gap(self, clock: RangeVectorClock, operation: Operation) -> bool:
        """Whether a push that precedes one of the operation's pushes has not been applied here."""
        for mark in operation.marks:
            for piece in mark.after:
                first, last = max(operation.first, piece.first), min(operation.last, piece.last)
                if first < last and clock.fresh(mark.client, first, last, piece.time):
                    return True
        return False

    def _part(self, operation: Operation, first: int, last: int) -> Operation:
        if (first, last) == (operation.first, operation.last):
            return operation
        table = self._store.table(self._now().spaces[operation.namespace])
        return replace(operation, first=first, last=last, content=table.cut(operation.content, first, last))

    # Views -----------------------------------------------------------------------------------------------

    def _follow(self, view: View) -> None:
        before, self.view = self.view, view
        self._chains.clear()
        self._routes.clear()
        self._fills.clear()
        self._deferred = [*self._aggregation.follow(view.participants), *self._deferred]
        if view.emptied:
            self._drop_lost_data()
        self._drop_blocks_of_others()
        self._fetch()
        kept, self._kept, self._serial = self._kept, {}, 0
        carried, self._carried, self._unacked_fetched = [*self._carried, *self._unacked_fetched], [], []
        for operation in carried:
            self._send_again(operation, [])
        for one in kept.values():
            # In a new epoch, clients send again what was not acknowledged.
            requests = one.requests if before is not None and before.epoch == view.epoch else []
            self._send_again(one.operation, requests)
            self._release_requests(requests)  # for the whole, which has become its parts
        self._hand_to_masters()
        self._end_handing()
        self._serve_deferred()
        for number in sorted(number for number in self._early if number <= view.number):
            for sender, message in self._early.pop(number):
                if isinstance(message, OF_CLIENTS):
                    self._serve_deferred_one(message)
                else:
                    self._hear(sender, message)

    def _send_again(self, operation: Operation, requests: list[Request]) -> None:
        """Send an operation of an earlier view down its chains, or keep it for its master."""
        for part, chain in self._by_chain(operation):
            if self.server not in chain:
                continue
            if chain[0] == self.server:
                self._send_down(part, requests)
            else:
                self._carried.append(part)

    def _hand_to_masters(self) -> None:
        """Hand over unacknowledged operations: a new master may lack what a holder after it has applied."""
        by_chain: dict[tuple[int, ...], list[Operation]] = {}
        for operation in self._carried:
            by_chain.setdefault(self._chain_of(operation), []).append(operation)
        for chain, operations in by_chain.items():
            handed = Handed(view=self._now().number, chain=chain, operations=tuple(operations))
            self._send_to_server(chain[0], handed)

    def _end_handing(self) -> None:
        """Send HandEnd to the masters of this server's chains; note which holders owe one."""
        self._unheard.clear()
        if not any(space.aggregates for space in self._now().spaces.values()):
            return
        masters: set[int] = set()
        for master, *others in {self._chain_at(point) for point in self._stretch_points()} - {()}:
            if master == self.server:
                self._unheard.update(others)
            elif self.server in others:
                masters.add(master)
        for master in sorted(masters):
            self._send_to_server(master, HandEnd(view=self._now().number))

    def _drop_blocks_of_others(self) -> None:
        for namespace, block in list(self._own_blocks()):
            if self.server not in self._chain((namespace, block)):
                space = self._now().spaces[namespace]
                first, last = space.range_of(block)
                self._store.table(space).drop(first, last)
                self._clock(namespace).drop(first, last)
        for buffered in [one for one in self._buffered if self.server not in self._chain(one)]:
            del self._buffered[buffered]
        self._have = {block for block in self._have if self._is_gained(block)}

    def _drop_lost_data(self) -> None:
        """Drop what is here of keys whose data are lost, so that all their holders start from nothing."""
        for block in [block for block in self._own_blocks() if self._is_emptied(block)]:
            first, last = self._now().spaces[block[0]].range_of(block[1])
            self._store.table(self._now().spaces[block[0]]).drop(first, last)
            self._clock(block[0]).drop(first, last)
        kept = self._not_emptied(one.operation for one in self._kept.values())
        self._kept = {(self.server, -place): _UnackedOperation(one, None) for place, one in enumerate(kept)}
        self._carried = self._not_emptied(self._carried)
        self._unacked_fetched = self._not_emptied(self._unacked_fetched)
        self._buffered = {at: one for at, one in self._buffered.items() if not self._is_emptied(at)}
        self._have = {block for block in self._have if not self._is_emptied(block)}

    def _not_emptied(self, operations: Iterable[Operation]) -> list[Operation]:
        """Return the parts of operations whose keys' data are not lost; clients do not resend them."""
        found: list[Operation] = []
        for one in operations:
            blocks = list(self._blocks_of(one.namespace, one.first, one.last))
            if not any(self._is_emptied(block) for block in blocks):
                found.append(one)
                continue
            for block in blocks:
                if not self._is_emptied(block):
                    first, last = self._now().spaces[one.namespace].range_of(block[1])
                    found.append(self._part(one, max(first, one.first), min(last, one.last)))
        return found

    def _is_emptied(self, block: Block) -> bool:
        point = block_point(*block)
        return any(arc.first <= point < arc.last for arc in self._now().emptied)

    def _serve_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for message in deferred:
            self._serve_deferred_one(message)

    def _serve_deferred_one(self, message: Push | Pull) -> None:
        """Serve a deferred request; its errors go to its client, not to the sender of the current message."""
        try:
            self._on_request(message)
        except ProtocolError as error:
            self._send_to_client(message.client, refused(message, error))

    # Chains and places -----------------------------------------------------------------------------------

    def _now(self) -> View:
        assert self.view is not None
        return self.view

    def _chain(self, block: Block) -> tuple[int, ...]:
        return self._chain_at(block_point(*block))

    def _chain_of(self, operation: Operation) -> tuple[int, ...]:
        """The chain of an operation's first block."""
        return self._chain(next(self._blocks_of(operation.namespace, operation.first, operation.last)))

    def _chain_at(self, point: int) -> tuple[int, ...]:
        """The servers that have an operation at this place: master, replicas, then the next ring's."""
        chain = self._chains.get(point)
        if chain is None:
            view = self._now()
            chain = view.ring.holders_at(point)
            if view.target is not None:
                chain += tuple(one for one in view.target.holders_at(point) if one not in chain)
            self._chains[point] = chain
        return chain

    def _gainers_at(self, point: int) -> tuple[int, ...]:
        """The servers of the chain that are being filled."""
        view = self._now()
        holders = view.ring.holders_at(point)
        return tuple(
            one
            for one in self._chain_at(point)
            if one not in holders or any(arc.first <= point < arc.last for arc in view.filling.get(one, ()))
        )

    def _source_at(self, point: int) -> int | None:
        """The last server of the chain that is complete."""
        gainers = self._gainers_at(point)
        return next((one for one in reversed(self._chain_at(point)) if one not in gainers), None)

    def _gains(self) -> bool:
        view = self._now()
        return self.server in view.filling or view.target is not None

    def _is_gained(self, block: Block) -> bool:
        return self._gains() and self.server in self._gainers_at(block_point(*block))

    def _lacks(self, block: Block) -> bool:
        """Whether this server is to receive the content of a block and has not."""
        return (
            bool(self._pending_sources)
            and block not in self._have
            and self._is_gained(block)
            and self._source_at(block_point(*block)) in self._pending_sources
        )

    def _stretch_points(self) -> list[int]:
        """One point of every stretch of the ring that has one chain and one set of gainers."""
        view = self._now()
        bounds = {0, *view.ring.bounds}
        if view.target is not None:
            bounds.update(view.target.bounds)
        for arcs in view.filling.values():
            for arc in arcs:
                bounds.update((arc.first, arc.last))
        return sorted(bounds - {POINTS})

    def _by_chain(self, operation: Operation) -> Iterator[tuple[Operation, tuple[int, ...]]]:
        """Yield the parts of an operation that go down different chains."""
        for first, last, chain in self._route(operation.namespace, operation.first, operation.last):
            yield self._part(operation, first, last), chain

    def _route(self, namespace: str, first: int, last: int) -> list[Span]:
        """Return the chains of a range of keys, cached, as the same ranges recur."""
        route = self._routes.get((namespace, first, last))
        if route is None:
            if len(self._routes) == _ROUTES_MAX:
                self._routes.clear()
            route = self._routes[namespace, first, last] = list(self._walk(namespace, first, last))
        return route

    def _walk(self, namespace: str, first: int, last: int) -> Iterator[Span]:
        space = self._now().spaces[namespace]
        start, blocks = first, space.blocks(first, last)
        chain = self._chain((namespace, blocks[0]))
        for block in blocks[1:]:
            next_chain, (begin, _) = self._chain((namespace, block)), space.range_of(block)
            if next_chain != chain:
                yield Span(start, begin, chain)
                start, chain = begin, next_chain
        yield Span(start, last, chain)

    def _blocks_of(self, namespace: str, first: int, last: int) -> Iterator[Block]:
        blocks = self._now().spaces[namespace].blocks(first, last)
        return ((namespace, block) for block in blocks)

    def _own_blocks(self) -> Iterator[Block]:
        """Yield the blocks with any clock entry here: keys without values have times too."""
        for namespace, clock in sorted(self._clocks.items()):
            blocks = {
                block for first, last in clock.ranges() for block in self._blocks_of(namespace, first, last)
            }
            yield from sorted(blocks)

    # Sending ---------------------------------------------------------------------------------------------

    def _clock(self, namespace: str) -> RangeVectorClock:
        clock = self._clocks.get(namespace)
        if clock is None:
            clock = self._clocks[namespace] = RangeVectorClock()
        return clock

    def _send_to_server(self, server: int, message: ToServer) -> None:
        self._output.append(Send(f"server-{server}", message))

    def _send_to_client(self, client: int, message: ToClient) -> None:
        self._output.append(Send(f"client-{client}", message))

    # Filling other servers -------------------------------------------------------------------------------

    def _on_transfer_request(self, gainer: int, fetch: Fetch) -> None:
        """Send a server the blocks that it gains from here; later operations reach it through the chain."""
        have = set(fetch.have)
        pending = [
            block
            for block in self._own_blocks()
            if block not in have
            and gainer in self._gainers_at(block_point(*block))
            and self._source_at(block_point(*block)) == self.server
        ]
        self._fills[gainer] = _Fill(pending[::-1])
        self._send_chunks(gainer)

    def _send_chunks(self, gainer: int) -> None:
        view, fill = self._now(), self._fills[gainer]
        while fill.pending and fill.unacked < _UNACKED_CHUNKS_MAX:
            namespace, block = fill.pending.pop()
            fill.unacked += 1
            space = view.spaces[namespace]
            first, last = space.range_of(block)
            chunk = Chunk(
                view=view.number,
                namespace=namespace,
                block=block,
                content=self._store.table(space).copy_out(first, last),
                clocks=self._clock(namespace).cut_out(first, last),
                pending=tuple(self._pending(namespace, first, last)),
            )
            self._send_to_server(gainer, chunk)
        if not fill.pending and not fill.unacked:
            self._send_to_server(gainer, FillEnd(view=view.number))

    def _pending(self, namespace: str, first: int, last: int) -> Iterator[Operation]:
        """Yield operations on these keys, in order, that are applied here and not known to be everywhere."""
        for operation in [
            *self._carried,
            *self._unacked_fetched,
            *(kept.operation for kept in self._kept.values()),
        ]:
            begin, end = max(operation.first, first), min(operation.last, last)
            if operation.namespace == namespace and begin < end:
                yield self._part(operation, begin, end)

    # Being filled ----------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Request the blocks that this server gains in this view and does not have."""
        view = self._now()
        sources = {
            self._source_at(point)
            for point in self._stretch_points()
            if self.server in self._gainers_at(point)
        }
        self._pending_sources = {source for source in sources if source is not None}
        have = tuple(sorted(self._have))
        for source in sorted(self._pending_sources):
            self._send_to_server(source, Fetch(view=view.number, have=have))
        self._flush()
        if self._gains() and not self._pending_sources:
            self._output.append(Send(MANAGER, Filled(server=self.server, view=view.number)))

    def _on_transfer_chunk(self, source: int, chunk: Chunk) -> None:
        space = self._now().spaces[chunk.namespace]
        first, last = space.range_of(chunk.block)
        self._store.table(space).copy_in(first, last, chunk.content)
        clock = self._clock(chunk.namespace)
        clock.drop(first, last)
        clock.adopt(chunk.clocks)
        self._unacked_fetched += chunk.pending
        self._have.add((chunk.namespace, chunk.block))
        self._flush()
        self._serve_deferred()
        self._send_to_server(source, ChunkTaken(view=chunk.view))

    def _on_transfer_done(self, source: int) -> None:
        self._pending_sources.discard(source)
        self._flush()
        self._serve_deferred()
        if not self._pending_sources:
            self._output.append(Send(MANAGER, Filled(server=self.server, view=self._now().number)))

    def _flush(self) -> None:
        """Apply operations buffered for blocks that have come, or that no source has."""
        for block in [block for block in self._buffered if not self._lacks(block)]:
            for operation in self._buffered.pop(block):
                self._apply_now(operation)
            if self._is_gained(block):
                self._have.add(block)


def _is_of(operation: Operation, push: Push) -> bool:
    return (
        operation.namespace == push.namespace
        and operation.first < push.last
        and push.first < operation.last
        and any((mark.client, mark.time) == (push.client, push.time) for mark in operation.marks)
    )


def refused(request: Push | Pull, error: Exception) -> Refused:
    """Return the reply to the client of an invalid request."""
    return Refused(number=request.number, first=request.first, last=request.last, reason=str(error))


def _server(sender: str) -> int:
    return int(sender.removeprefix("server-"))
