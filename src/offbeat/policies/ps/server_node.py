"""A server of a parameter server as a state machine without I/O: message in, messages out.

Nothing here knows what values are, how messages travel, or which nodes are alive: that is in the manager's
views. docs/decisions/0008-how-servers-replicate.md gives the reasons for this design.

Theory of operation: the replication chain
------------------------------------------

Parts. A namespace's keys lie in blocks, and a block has one place on the ring. The servers that hold it form
a chain: the master, its replicas, and last the servers that are being filled or that gain the block in the
ring that is being prepared (`_chain_at`). The manager numbers views; a view fixes every chain.

A push. The client sends each part of a push to its master. The master keeps only the keys for which the
client's push is new (`RangeVectorClock.earlier_ranges`), rehearses it, applies it, and sends it down the
chain as `Replicate`, source-routed. Each holder applies the operation and forwards it; the last one replies
`ReplicateAck`, which travels back up. Each holder keeps the operation in `_unacked` until `ReplicateAck` has
passed it. The master then answers the client with `PushAck`, or with `PullResult` if the push wants values.
An operation that cannot be applied goes nowhere: the client receives `Rejected`. A namespace that aggregates
differs in one point: pushes wait in `Aggregation` until those of all participants are there, and their sum is
one operation.

A new view (`on_view`). Messages of servers from older views are dropped, those from newer views are kept
until this server has that view (`_early`). Then, in this order: data of blocks that are lost or that belong
to other servers are dropped; missing blocks are requested from their sources; every operation that is not
acknowledged here is sent down its new chains if this server is the master now, else handed to the master
(`HandoffOperations`), which treats it like a push and lets `HandoffReplayed` follow it down the chain; where
namespaces aggregate, `HandoffDone` closes the handover, and the master accepts no push to such a namespace
before all holders of its chains have sent theirs; then deferred and early messages are processed. In a new
epoch, clients send again all that was not acknowledged; within an epoch, the requests stay with their
operations.

Filling. A server that gains blocks is at the end of their chains from the first moment, so it receives every
operation; the older content comes as `TransferChunk`s from the last complete holder. Operations on a block
that has not come are buffered and applied behind it; clocks drop what the block contains already.

Invariants. A client is answered only after all holders have applied its push. Each push is applied at most
once per key, in the client's order; `sequence_gaps` counts violations of the order. Holders of a block apply
the same operations in the same order. A deposed master with replicas can acknowledge nothing: they have a
later view.

Failures. An invalid client message raises `ProtocolError` and changes nothing. A holder that does not reply
stops acknowledgements until a view without it. Values are lost only when all complete holders of a block are
gone; the view then lists the place in `lost_arcs_dropped`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from offbeat.errors import ProtocolError
from offbeat.policies.ps.aggregation import Aggregation, CompleteSum, PushRequest
from offbeat.policies.ps.hash_ring import RING_SIZE, KeySpan, NamespaceSpec, block_point
from offbeat.policies.ps.messages import (
    ClientMessage,
    HandoffDone,
    HandoffOperations,
    HandoffReplayed,
    InspectPull,
    InspectResult,
    Operation,
    Payload,
    PlacementView,
    Pull,
    PullResult,
    Push,
    PushAck,
    PushStamp,
    Rejected,
    Replicate,
    ReplicateAck,
    ServerFillDone,
    ServerMessage,
    TransferAck,
    TransferChunk,
    TransferDone,
    TransferRequest,
    WrongMaster,
)
from offbeat.policies.ps.range_clock import RangeVectorClock

MANAGER = "manager"
_UNACKED_CHUNKS_MAX = 4
_ROUTES_MAX = 4096
CLIENT_REQUESTS = (Push, Pull)

BlockId = tuple[str, int]  # a namespace, and the number of a block in it


class ServerTable(Protocol):
    """The values of one namespace on one server; keys that were never pushed are zero."""

    @property
    def reads_pushes_once(self) -> bool:
        """Whether it reads pushed content only while applying it, and never afterwards."""

    def check(self, content: Payload, first: int, last: int) -> None:
        """Check that content can be pushed to keys `first` to `last` - 1.

        Raises:
            ValueError: it cannot.
        """

    def dry_run(self, first: int, last: int, content: Payload) -> None:
        """Check that `apply` accepts this in the current state; nothing changes.

        Raises:
            ValueError: it does not.
        """

    def apply(self, first: int, last: int, content: Payload) -> None:
        """Apply what was pushed for keys `first` to `last` - 1."""

    def read(self, first: int, last: int, keys: Payload | None, states: bool = False) -> Payload:
        """Return the values of keys `first` to `last` - 1, or of those of them that `keys` lists.

        Args:
            states: also return the state that is kept for each value.

        Raises:
            ValueError: `keys` lists other keys.
        """

    def key_range(self, content: Payload, first: int, last: int) -> Payload:
        """Return the part of `content` for keys `first` to `last` - 1."""

    def combine(self, contents: Sequence[Payload], first: int, last: int) -> Payload:
        """Combine, for example sum, what `contents` have for keys `first` to `last` - 1.

        The result may depend on their order and on the current values, so it is applied before anything else.
        """

    def export_block(self, first: int, last: int) -> Payload:
        """Return a copy of everything that is kept for keys `first` to `last` - 1."""

    def import_block(self, first: int, last: int, content: Payload) -> None:
        """Replace everything kept for keys `first` to `last` - 1 by another table's `export_block`."""

    def remove_block(self, first: int, last: int) -> None:
        """Delete keys `first` to `last` - 1."""


class TableStore(Protocol):
    """All values of one server."""

    def table(self, space: NamespaceSpec) -> ServerTable:
        """Return a namespace's table, created if needed."""


class SendMessage(NamedTuple):
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
    requests: list[PushRequest] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Fill:
    """The transfer of blocks to one server that requests them from here.

    Attributes:
        pending: blocks that are still to be sent, in order.
        unacked: blocks that were sent and not acknowledged.
    """

    pending: list[BlockId]
    unacked: int = 0


class ServerNode:
    """One server: master of some arcs of the ring, replica of others, source for filling servers.

    Source: the parameter server of OSDI'14, sections 4.3 to 4.5. Deviations: docs/decisions/0008.

    Args:
        server: its id.
        store: its values.

    Attributes:
        view: the one in force here, None before the first.
        sequence_gaps: operations that came although a preceding one was missing: an acknowledged operation is
            lost, or the preceding one was refused.
    """

    def __init__(self, server: int, store: TableStore) -> None:
        self.server = server
        self.view: PlacementView | None = None
        self.sequence_gaps = 0
        self._store = store
        self._clocks: dict[str, RangeVectorClock] = {}
        self._unacked: dict[
            tuple[int, int], _UnackedOperation
        ] = {}  # by master and serial, in the order of application
        self._serial = 0  # of this view
        self._unacked_earlier: list[
            Operation
        ] = []  # of earlier views, handed to a master to send again, in order
        self._unacked_fetched: list[Operation] = []  # the same, contained in blocks received in this view
        self._early: dict[int, list[tuple[str, ServerMessage]]] = {}  # by the view that they wait for
        self._fills: dict[int, _Fill] = {}  # by the server that is being filled from here, in this view
        self._pending_sources: set[int] = (
            set()
        )  # sources of this server that have not sent TransferDone in this view
        self._have: set[BlockId] = set()  # of the blocks that it gains
        self._buffered: dict[BlockId, list[Operation]] = {}  # on blocks that have not come
        self._deferred: list[Push | Pull] = []  # for blocks that have not come, of which this is the master
        self._aggregation = Aggregation()
        self._pending_handoffs: set[int] = (
            set()
        )  # holders that may still hand over operations of earlier views
        self._chains: dict[int, tuple[int, ...]] = {}  # by point: cache for this view
        self._routes: dict[tuple[str, int, int], list[KeySpan]] = {}  # by range of keys: cache for this view
        self._output: list[SendMessage] = []

    # Received messages -----------------------------------------------------------------------------------

    def on_message(self, sender: str, message: ServerMessage) -> list[SendMessage]:
        """Process a message; return the messages to send.

        Raises:
            ProtocolError: no client of this version sends such a request; nothing has changed.
        """
        self._receive(sender, message)
        return self._drain_output()

    def on_view(self, view: PlacementView) -> list[SendMessage]:
        """Adopt a new view; an older one is ignored."""
        if self.view is None or view.version > self.view.version:
            self._adopt_view(view)
        return self._drain_output()

    def can_apply_in_place(self, push: Push) -> bool:
        """Whether a push, if received now, would be read once only and nothing of it kept.

        Otherwise it waits for blocks or for the pushes of other participants, or goes to replicas.
        """
        view = self.view
        space = None if view is None else view.spaces.get(push.namespace)
        if view is None or space is None or space.aggregates or push.epoch > view.version:
            return False
        if self._pending_sources or self._gains() or not 0 <= push.first < push.last <= space.keys:
            return False
        is_alone = all(len(chain) == 1 for _, _, chain in self._route(space.name, push.first, push.last))
        return is_alone and self._store.table(space).reads_pushes_once

    def push_times(self, namespace: str, key: int) -> dict[int, int]:
        """Return, by client, the time of its latest push of a key that was applied here."""
        clock = self._clock(namespace)
        return {client: time for client in clock.clients if (time := clock.time_of(client, key))}

    def _drain_output(self) -> list[SendMessage]:
        output, self._output = self._output, []
        return output

    def _receive(self, sender: str, message: ServerMessage) -> None:
        """Keep messages of later views; drop servers' messages of earlier ones: they are sent again."""
        number = -1 if self.view is None else self.view.version
        is_of_client = isinstance(message, CLIENT_REQUESTS)
        of_view = message.epoch if is_of_client else message.view  # type: ignore[union-attr]
        if of_view > number:
            self._early.setdefault(of_view, []).append((sender, message))
        elif is_of_client or of_view == number:
            self._dispatch(sender, message)

    def _dispatch(self, sender: str, message: ServerMessage) -> None:
        match message:
            case Push() | Pull():
                self._on_request(message)
            case Replicate():
                self._on_replicate(message, _server(sender))
            case ReplicateAck():
                self._on_replicate_ack((message.master, message.serial))
            case HandoffOperations():
                self._on_handoff(_server(sender), message)
            case HandoffReplayed():
                self._on_handoff_replayed(message)
            case HandoffDone():
                self._on_handoff_done(_server(sender))
            case TransferRequest():
                self._on_transfer_request(_server(sender), message)
            case TransferChunk():
                self._on_transfer_chunk(_server(sender), message)
            case TransferAck():
                self._fills[_server(sender)].unacked -= 1
                self._send_chunks(_server(sender))
            case TransferDone():
                self._on_transfer_done(_server(sender))

    # Requests of clients ---------------------------------------------------------------------------------

    def _on_request(self, message: Push | Pull) -> None:
        """Serve a push or pull; defer it while it has to wait, answer `WrongMaster` if it is misdirected."""
        view = self._current_view()
        space = view.spaces.get(message.namespace)
        if space is None or not 0 <= message.first < message.last <= space.keys:
            raise ProtocolError(
                f"expected keys of a namespace that was opened, got {message.first} to {message.last} of "
                f"{message.namespace}"
            )
        holders = view.ring.holders(space, message.first)
        if message.epoch < view.epoch or not holders or holders[0] != self.server:
            stale = WrongMaster(
                request=message.request, first=message.first, last=message.last, epoch=view.epoch
            )
            self._send_to_client(message.client, stale)
        elif self._has_to_wait(message):
            self._deferred.append(message)
        elif isinstance(message, Pull):
            self._send_to_client(message.client, self._pulled(space, message))
        else:
            self._check(space, message)
            if space.aggregates:
                self._push_to_aggregate(message)
            else:
                self._push(message)

    def _check(self, space: NamespaceSpec, push: Push) -> None:
        """Check that the table accepts a push, which is for keys of this master and not too old to aggregate.

        Raises:
            ProtocolError: another server is the master of some of the keys; the client takes part in the
                aggregation from a later time on; or the table does not accept the content.
        """
        if any(chain[0] != self.server for _, _, chain in self._route(space.name, push.first, push.last)):
            raise ProtocolError(
                f"expected a push of keys with one master, server {self.server}, got {push.first} to "
                f"{push.last} of {space.name}"
            )
        begins = self._current_view().participants.get(space.name, {}).get(push.client, 0)
        if space.aggregates and push.time < begins:
            raise ProtocolError(f"expected a push of time {begins} at least, got one of time {push.time}")
        try:
            self._store.table(space).check(push.content, push.first, push.last)
        except ValueError as error:
            raise ProtocolError(f"expected a push that {space.name} can accept: {error}") from error

    def _pulled(self, space: NamespaceSpec, pull: Pull) -> PullResult:
        if not isinstance(pull, InspectPull):
            return self._values(space, pull, pull.keys)
        pieces = (
            self._clock(space.name).pieces(pull.client, pull.first, pull.last) if pull.returns_times else []
        )
        return InspectResult(
            request=pull.request,
            namespace=pull.namespace,
            first=pull.first,
            last=pull.last,
            content=self._read(space, pull, pull.keys, pull.returns_states),
            times=tuple(piece for piece in pieces if piece.time),
        )

    def _values(self, space: NamespaceSpec, request: Push | Pull, keys: Payload | None) -> PullResult:
        return PullResult(
            request=request.request,
            namespace=request.namespace,
            first=request.first,
            last=request.last,
            content=self._read(space, request, keys),
        )

    def _read(
        self, space: NamespaceSpec, request: Push | Pull, keys: Payload | None, states: bool = False
    ) -> Payload:
        try:
            return self._store.table(space).read(request.first, request.last, keys, states)
        except ValueError as error:
            raise ProtocolError(f"expected a pull that {space.name} can answer: {error}") from error

    def _has_to_wait(self, message: Push | Pull) -> bool:
        """Whether it is for a block that has not come, or after such a request of the same client.

        No sum is begun before all holders have handed over their operations of earlier views: one of them may
        have applied a sum that contains the push of a client that is now lost.
        """
        if (
            self._pending_handoffs
            and isinstance(message, Push)
            and self._current_view().spaces[message.namespace].aggregates
        ):
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
        fresh = clock.earlier_ranges(push.client, push.first, push.last, push.time)
        request = PushRequest(push, pending_count=1)  # until all of it has been begun
        mark = PushStamp(client=push.client, time=push.time, previous_times=push.previous_times)
        whole = Operation(
            namespace=push.namespace,
            first=push.first,
            last=push.last,
            stamps=(mark,),
            content=push.content,
        )
        if fresh != [(push.first, push.last)]:
            self._wait_for_kept(request)
        for first, last in fresh:
            self._apply_and_replicate(self._part(whole, first, last), [request])
        self._release_requests([request])

    def _push_to_aggregate(self, push: Push) -> None:
        """Let a push wait for those of the other participants, and begin the sums that it completes."""
        fresh = self._clock(push.namespace).earlier_ranges(push.client, push.first, push.last, push.time)
        request = PushRequest(push, pending_count=1)  # until all of it has been begun
        if fresh != [(push.first, push.last)]:
            self._wait_for_kept(request)
        for first, last in fresh:
            request.pending_count += last - first  # one for each key, until its sum is begun
            for one in self._aggregation.add(request, first, last):
                requests = [request for of_client in one.requests for request in of_client]
                self._apply_and_replicate(self._sum(push.namespace, one), requests)
                self._release_requests(requests, one.last - one.first)
        self._release_requests([request])

    def _wait_for_kept(self, request: PushRequest) -> None:
        """Let a request wait for operations in flight that contain parts of the same push."""
        for kept in self._unacked.values():
            if _is_of(kept.operation, request.push):
                kept.requests.append(request)
                request.pending_count += 1

    def _sum(self, namespace: str, one: CompleteSum) -> Operation:
        table = self._store.table(self._current_view().spaces[namespace])
        pushes = [of_client[0].push for of_client in one.requests]
        contents = [table.key_range(push.content, one.first, one.last) for push in pushes]
        return Operation(
            namespace=namespace,
            first=one.first,
            last=one.last,
            stamps=tuple(
                PushStamp(client=push.client, time=push.time, previous_times=push.previous_times)
                for push in pushes
            ),
            content=table.combine(contents, one.first, one.last),
        )

    def _apply_and_replicate(self, operation: Operation, requests: list[PushRequest]) -> None:
        """Apply an operation as its master and send it down its chains; or refuse its requests.

        The caller holds one more count of each request, so that none completes while parts of it are not
        begun.
        """
        if requests:
            table = self._store.table(self._current_view().spaces[operation.namespace])
            try:
                table.dry_run(operation.first, operation.last, operation.content)
            except ValueError as error:
                for request in requests:
                    request.rejection = str(error)
                return
        self._apply(operation)
        self._send_down(operation, requests)

    def _send_down(self, operation: Operation, requests: list[PushRequest]) -> None:
        """Send an operation to the other holders; the requests wait until all of them have it."""
        for part, chain in self._by_chain(operation):
            if len(chain) > 1:
                for request in requests:
                    request.pending_count += 1
                self._send_part(_UnackedOperation(part, None, list(requests)), chain[1:])

    def _send_part(self, kept: _UnackedOperation, route: tuple[int, ...]) -> None:
        self._serial += 1
        self._unacked[self.server, self._serial] = kept
        copy = Replicate(
            view=self._current_view().version,
            master=self.server,
            serial=self._serial,
            operation=kept.operation,
            route=route[1:],
        )
        self._send_to_server(route[0], copy)

    def _acknowledge(self, request: PushRequest) -> None:
        push = request.push
        if request.rejection:
            answer: PushAck | PullResult | Rejected = rejection(push, ValueError(request.rejection))
        elif push.returns_values:
            try:
                answer = self._values(self._current_view().spaces[push.namespace], push, None)
            except ProtocolError as error:  # the sender of the message being processed is not at fault
                answer = rejection(push, error)
        else:
            answer = PushAck(request=push.request, first=push.first, last=push.last)
        self._send_to_client(push.client, answer)

    # Chains ----------------------------------------------------------------------------------------------

    def _on_replicate(self, copy: Replicate, sender: int) -> None:
        """Apply an operation as a replica, or as a server that is being filled, and forward it."""
        self._apply(copy.operation)
        if not copy.route:
            self._send_to_server(sender, ReplicateAck(view=copy.view, master=copy.master, serial=copy.serial))
            return
        self._unacked[copy.master, copy.serial] = _UnackedOperation(copy.operation, sender)
        onward = Replicate(
            view=copy.view,
            master=copy.master,
            serial=copy.serial,
            operation=copy.operation,
            route=copy.route[1:],
        )
        self._send_to_server(copy.route[0], onward)

    def _on_replicate_ack(self, key: tuple[int, int]) -> None:
        """All holders after this one have an operation."""
        kept = self._unacked.pop(key)
        if kept.came_from is None:
            self._release_requests(kept.requests)
        else:
            self._send_to_server(
                kept.came_from, ReplicateAck(view=self._current_view().version, master=key[0], serial=key[1])
            )

    def _release_requests(self, requests: Iterable[PushRequest], count: int = 1) -> None:
        for request in requests:
            request.pending_count -= count
            if not request.pending_count:
                self._acknowledge(request)

    def _on_handoff(self, holder: int, handed: HandoffOperations) -> None:
        """Begin, like a push, the operations of a holder that this new master may not have."""
        for operation in handed.operations:
            for first, last in self._fresh(operation):
                self._apply_and_replicate(self._part(operation, first, last), [])
        self._on_handoff_replayed(HandoffReplayed(view=handed.view, chain=handed.chain, holder=holder))

    def _on_handoff_replayed(self, resent: HandoffReplayed) -> None:
        if resent.holder == self.server:
            self._unacked_earlier = [
                operation for operation in self._unacked_earlier if self._chain_of(operation) != resent.chain
            ]
        place = resent.chain.index(self.server)
        if place + 1 < len(resent.chain):
            self._send_to_server(resent.chain[place + 1], resent)

    def _on_handoff_done(self, holder: int) -> None:
        self._pending_handoffs.discard(holder)
        if not self._pending_handoffs:
            self._serve_deferred()

    # Applying --------------------------------------------------------------------------------------------

    def _apply(self, operation: Operation) -> None:
        """Apply the parts of an operation that are new here; buffer those for blocks that have not come."""
        if not self._gains():
            self._apply_now(operation)
            return
        space = self._current_view().spaces[operation.namespace]
        for block in self._blocks_of(operation.namespace, operation.first, operation.last):
            first, last = space.block_range(block[1])
            part = self._part(operation, max(first, operation.first), min(last, operation.last))
            if self._lacks(block):
                self._buffered.setdefault(block, []).append(part)
            else:
                self._apply_now(part)
                if self._is_gained(block):
                    self._have.add(block)

    def _apply_now(self, operation: Operation) -> None:
        clock = self._clock(operation.namespace)
        table = self._store.table(self._current_view().spaces[operation.namespace])
        if len(operation.stamps) == 1:
            one, first, last = operation.stamps[0], operation.first, operation.last
            known = clock.pieces(one.client, first, last)
            if len(known) == 1 and known[0].time < one.time and len(one.previous_times) == 1:  # nearly always
                self.sequence_gaps += one.previous_times[0].time > known[0].time
                table.apply(first, last, operation.content)
                clock.advance(one.client, first, last, one.time)
                return
        self.sequence_gaps += self._has_gap(clock, operation)
        for first, last in self._fresh(operation):
            table.apply(first, last, table.key_range(operation.content, first, last))
            for mark in operation.stamps:
                clock.set_time(mark.client, first, last, mark.time)

    def _fresh(self, operation: Operation) -> list[tuple[int, int]]:
        """Return the ranges where none of an operation's pushes has been applied; elsewhere all have been."""
        clock, one = self._clock(operation.namespace), operation.stamps[0]
        parts = clock.earlier_ranges(one.client, operation.first, operation.last, one.time)
        for mark in operation.stamps[1:]:
            parts = [part for at in parts for part in clock.earlier_ranges(mark.client, *at, mark.time)]
        return parts

    def _has_gap(self, clock: RangeVectorClock, operation: Operation) -> bool:
        """Whether a push that precedes one of the operation's pushes has not been applied here."""
        for mark in operation.stamps:
            for piece in mark.previous_times:
                first, last = max(operation.first, piece.start), min(operation.last, piece.stop)
                if first < last and clock.earlier_ranges(mark.client, first, last, piece.time):
                    return True
        return False

    def _part(self, operation: Operation, first: int, last: int) -> Operation:
        if (first, last) == (operation.first, operation.last):
            return operation
        table = self._store.table(self._current_view().spaces[operation.namespace])
        return replace(
            operation, first=first, last=last, content=table.key_range(operation.content, first, last)
        )

    # Views -----------------------------------------------------------------------------------------------

    def _adopt_view(self, view: PlacementView) -> None:
        before, self.view = self.view, view
        self._chains.clear()
        self._routes.clear()
        self._fills.clear()
        self._deferred = [*self._aggregation.set_participants(view.participants), *self._deferred]
        if view.lost_arcs_dropped:
            self._drop_lost_data()
        self._drop_blocks_of_others()
        self._fetch()
        kept, self._unacked, self._serial = self._unacked, {}, 0
        carried, self._unacked_earlier, self._unacked_fetched = (
            [*self._unacked_earlier, *self._unacked_fetched],
            [],
            [],
        )
        for operation in carried:
            self._resend_or_carry(operation, [])
        for one in kept.values():
            # In a new epoch, clients send again what was not acknowledged.
            requests = one.requests if before is not None and before.epoch == view.epoch else []
            self._resend_or_carry(one.operation, requests)
            self._release_requests(requests)  # for the whole, which has become its parts
        self._send_handoffs()
        self._send_handoff_done()
        self._serve_deferred()
        for number in sorted(number for number in self._early if number <= view.version):
            for sender, message in self._early.pop(number):
                if isinstance(message, CLIENT_REQUESTS):
                    self._serve_deferred_one(message)
                else:
                    self._receive(sender, message)

    def _resend_or_carry(self, operation: Operation, requests: list[PushRequest]) -> None:
        """Send an operation of an earlier view down its chains, or keep it for its master."""
        for part, chain in self._by_chain(operation):
            if self.server not in chain:
                continue
            if chain[0] == self.server:
                self._send_down(part, requests)
            else:
                self._unacked_earlier.append(part)

    def _send_handoffs(self) -> None:
        """Hand over unacknowledged operations: a new master may lack what a holder after it has applied."""
        by_chain: dict[tuple[int, ...], list[Operation]] = {}
        for operation in self._unacked_earlier:
            by_chain.setdefault(self._chain_of(operation), []).append(operation)
        for chain, operations in by_chain.items():
            handed = HandoffOperations(
                view=self._current_view().version, chain=chain, operations=tuple(operations)
            )
            self._send_to_server(chain[0], handed)

    def _send_handoff_done(self) -> None:
        """Send HandoffDone to the masters of this server's chains; note which holders owe one."""
        self._pending_handoffs.clear()
        if not any(space.aggregates for space in self._current_view().spaces.values()):
            return
        masters: set[int] = set()
        for master, *others in {self._chain_at(point) for point in self._stretch_points()} - {()}:
            if master == self.server:
                self._pending_handoffs.update(others)
            elif self.server in others:
                masters.add(master)
        for master in sorted(masters):
            self._send_to_server(master, HandoffDone(view=self._current_view().version))

    def _drop_blocks_of_others(self) -> None:
        for namespace, block in list(self._own_blocks()):
            if self.server not in self._chain((namespace, block)):
                space = self._current_view().spaces[namespace]
                first, last = space.block_range(block)
                self._store.table(space).remove_block(first, last)
                self._clock(namespace).drop(first, last)
        for buffered in [one for one in self._buffered if self.server not in self._chain(one)]:
            del self._buffered[buffered]
        self._have = {block for block in self._have if self._is_gained(block)}

    def _drop_lost_data(self) -> None:
        """Drop what is here of keys whose data are lost, so that all their holders start from nothing."""
        for block in [block for block in self._own_blocks() if self._is_emptied(block)]:
            first, last = self._current_view().spaces[block[0]].block_range(block[1])
            self._store.table(self._current_view().spaces[block[0]]).remove_block(first, last)
            self._clock(block[0]).drop(first, last)
        kept = self._not_emptied(one.operation for one in self._unacked.values())
        self._unacked = {
            (self.server, -place): _UnackedOperation(one, None) for place, one in enumerate(kept)
        }
        self._unacked_earlier = self._not_emptied(self._unacked_earlier)
        self._unacked_fetched = self._not_emptied(self._unacked_fetched)
        self._buffered = {at: one for at, one in self._buffered.items() if not self._is_emptied(at)}
        self._have = {block for block in self._have if not self._is_emptied(block)}

    def _not_emptied(self, operations: Iterable[Operation]) -> list[Operation]:
        """Return the parts of operations on keys whose data were not lost with this view.

        A client fails a request for lost keys as a whole and resends no part of it, so the holders finish the
        rest.
        """
        found: list[Operation] = []
        for one in operations:
            blocks = list(self._blocks_of(one.namespace, one.first, one.last))
            if not any(self._is_emptied(block) for block in blocks):
                found.append(one)
                continue
            for block in blocks:
                if not self._is_emptied(block):
                    first, last = self._current_view().spaces[one.namespace].block_range(block[1])
                    found.append(self._part(one, max(first, one.first), min(last, one.last)))
        return found

    def _is_emptied(self, block: BlockId) -> bool:
        point = block_point(*block)
        return any(arc.first <= point < arc.last for arc in self._current_view().lost_arcs_dropped)

    def _serve_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for message in deferred:
            self._serve_deferred_one(message)

    def _serve_deferred_one(self, message: Push | Pull) -> None:
        """Serve a deferred request; its errors go to its client, not to the sender of the current message."""
        try:
            self._on_request(message)
        except ProtocolError as error:
            self._send_to_client(message.client, rejection(message, error))

    # Chains and places -----------------------------------------------------------------------------------

    def _current_view(self) -> PlacementView:
        assert self.view is not None
        return self.view

    def _chain(self, block: BlockId) -> tuple[int, ...]:
        return self._chain_at(block_point(*block))

    def _chain_of(self, operation: Operation) -> tuple[int, ...]:
        """The chain of an operation's first block."""
        return self._chain(next(self._blocks_of(operation.namespace, operation.first, operation.last)))

    def _chain_at(self, point: int) -> tuple[int, ...]:
        """The servers that have an operation at this place: master, replicas, then the next ring's."""
        chain = self._chains.get(point)
        if chain is None:
            view = self._current_view()
            chain = view.ring.holders_at(point)
            if view.target is not None:
                chain += tuple(one for one in view.target.holders_at(point) if one not in chain)
            self._chains[point] = chain
        return chain

    def _gainers_at(self, point: int) -> tuple[int, ...]:
        """The servers of the chain that are being filled."""
        view = self._current_view()
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
        view = self._current_view()
        return self.server in view.filling or view.target is not None

    def _is_gained(self, block: BlockId) -> bool:
        return self._gains() and self.server in self._gainers_at(block_point(*block))

    def _lacks(self, block: BlockId) -> bool:
        """Whether this server is to receive the content of a block and has not."""
        return (
            bool(self._pending_sources)
            and block not in self._have
            and self._is_gained(block)
            and self._source_at(block_point(*block)) in self._pending_sources
        )

    def _stretch_points(self) -> list[int]:
        """One point of every stretch of the ring that has one chain and one set of gainers."""
        view = self._current_view()
        bounds = {0, *view.ring.stretch_starts}
        if view.target is not None:
            bounds.update(view.target.stretch_starts)
        for arcs in view.filling.values():
            for arc in arcs:
                bounds.update((arc.first, arc.last))
        return sorted(bounds - {RING_SIZE})

    def _by_chain(self, operation: Operation) -> Iterator[tuple[Operation, tuple[int, ...]]]:
        """Yield the parts of an operation that go down different chains."""
        for first, last, chain in self._route(operation.namespace, operation.first, operation.last):
            yield self._part(operation, first, last), chain

    def _route(self, namespace: str, first: int, last: int) -> list[KeySpan]:
        """Return the chains of a range of keys, cached, as the same ranges recur."""
        route = self._routes.get((namespace, first, last))
        if route is None:
            if len(self._routes) == _ROUTES_MAX:
                self._routes.clear()
            route = self._routes[namespace, first, last] = list(self._walk(namespace, first, last))
        return route

    def _walk(self, namespace: str, first: int, last: int) -> Iterator[KeySpan]:
        space = self._current_view().spaces[namespace]
        start, blocks = first, space.blocks_of_range(first, last)
        chain = self._chain((namespace, blocks[0]))
        for block in blocks[1:]:
            next_chain, (begin, _) = self._chain((namespace, block)), space.block_range(block)
            if next_chain != chain:
                yield KeySpan(start, begin, chain)
                start, chain = begin, next_chain
        yield KeySpan(start, last, chain)

    def _blocks_of(self, namespace: str, first: int, last: int) -> Iterator[BlockId]:
        blocks = self._current_view().spaces[namespace].blocks_of_range(first, last)
        return ((namespace, block) for block in blocks)

    def _own_blocks(self) -> Iterator[BlockId]:
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

    def _send_to_server(self, server: int, message: ServerMessage) -> None:
        self._output.append(SendMessage(f"server-{server}", message))

    def _send_to_client(self, client: int, message: ClientMessage) -> None:
        self._output.append(SendMessage(f"client-{client}", message))

    # Filling other servers -------------------------------------------------------------------------------

    def _on_transfer_request(self, gainer: int, fetch: TransferRequest) -> None:
        """Send a server the blocks that it gains from here; later operations reach it through the chain."""
        have = set(fetch.present_blocks)
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
        view, fill = self._current_view(), self._fills[gainer]
        while fill.pending and fill.unacked < _UNACKED_CHUNKS_MAX:
            namespace, block = fill.pending.pop()
            fill.unacked += 1
            space = view.spaces[namespace]
            first, last = space.block_range(block)
            chunk = TransferChunk(
                view=view.version,
                namespace=namespace,
                block=block,
                content=self._store.table(space).export_block(first, last),
                clocks=self._clock(namespace).extract(first, last),
                pending=tuple(self._pending(namespace, first, last)),
            )
            self._send_to_server(gainer, chunk)
        if not fill.pending and not fill.unacked:
            self._send_to_server(gainer, TransferDone(view=view.version))

    def _pending(self, namespace: str, first: int, last: int) -> Iterator[Operation]:
        """Yield operations on these keys, in order, that are applied here and not known to be everywhere."""
        for operation in [
            *self._unacked_earlier,
            *self._unacked_fetched,
            *(kept.operation for kept in self._unacked.values()),
        ]:
            begin, end = max(operation.first, first), min(operation.last, last)
            if operation.namespace == namespace and begin < end:
                yield self._part(operation, begin, end)

    # Being filled ----------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Request the blocks that this server gains in this view and does not have."""
        view = self._current_view()
        sources = {
            self._source_at(point)
            for point in self._stretch_points()
            if self.server in self._gainers_at(point)
        }
        self._pending_sources = {source for source in sources if source is not None}
        have = tuple(sorted(self._have))
        for source in sorted(self._pending_sources):
            self._send_to_server(source, TransferRequest(view=view.version, present_blocks=have))
        self._flush()
        if self._gains() and not self._pending_sources:
            self._output.append(SendMessage(MANAGER, ServerFillDone(server=self.server, view=view.version)))

    def _on_transfer_chunk(self, source: int, chunk: TransferChunk) -> None:
        space = self._current_view().spaces[chunk.namespace]
        first, last = space.block_range(chunk.block)
        self._store.table(space).import_block(first, last, chunk.content)
        clock = self._clock(chunk.namespace)
        clock.drop(first, last)
        clock.merge(chunk.clocks)
        self._unacked_fetched += chunk.pending
        self._have.add((chunk.namespace, chunk.block))
        self._flush()
        self._serve_deferred()
        self._send_to_server(source, TransferAck(view=chunk.view))

    def _on_transfer_done(self, source: int) -> None:
        self._pending_sources.discard(source)
        self._flush()
        self._serve_deferred()
        if not self._pending_sources:
            self._output.append(
                SendMessage(MANAGER, ServerFillDone(server=self.server, view=self._current_view().version))
            )

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
        and any((mark.client, mark.time) == (push.client, push.time) for mark in operation.stamps)
    )


def rejection(request: Push | Pull, error: Exception) -> Rejected:
    """Return the reply to the client of an invalid request."""
    return Rejected(request=request.request, first=request.first, last=request.last, reason=str(error))


def _server(sender: str) -> int:
    return int(sender.removeprefix("server-"))
