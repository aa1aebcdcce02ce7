"""A server of a parameter server as a state machine without I/O: message in, messages out.

Nothing here knows what values are, how messages travel, or which nodes are alive: that is in the manager's
views. docs/decisions/0008-how-servers-replicate.md gives the reasons for this design.

Theory of operation: the replication chain
------------------------------------------

Parts. A namespace's keys lie in blocks, and a block has one place on the ring. The servers that hold it form
a chain: the master, its replicas, and last the servers that are being filled or that gain the block in the
ring that is being prepared (`Placement.chain`). The manager numbers views; a view fixes every chain.

A push. The client sends each part of a push to its master. The master keeps only the keys for which the
client's push is new (`RangeVectorClock.earlier_ranges`), rehearses it, applies it, and sends it down the
chain as `Replicate`, source-routed. Each holder applies the operation and forwards it; the last one replies
`ReplicateAck`, which travels back up. Each holder keeps the operation in `UnackedOperations` until
`ReplicateAck` has passed it. The master then answers the client with `PushAck`, or with `PullResult` if the
push wants values. An operation that cannot be applied goes nowhere: the client receives `Rejected`. A
namespace that aggregates differs in one point: pushes wait in `Aggregation` until those of all participants
are there, and their sum is one operation.

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

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from offbeat.errors import ProtocolError
from offbeat.policies.ps.aggregation import Aggregation, CompleteSum, PushRequest
from offbeat.policies.ps.block_transfers import IncomingBlocks, OutgoingBlocks
from offbeat.policies.ps.clocked_store import ClockedStore, TableStore
from offbeat.policies.ps.hash_ring import HashRing, NamespaceSpec
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
from offbeat.policies.ps.placement import Placement
from offbeat.policies.ps.unacked_operations import UnackedOperations

MANAGER = "manager"
CLIENT_REQUESTS = (Push, Pull)
_NO_VIEW = PlacementView(version=-1, epoch=-1, ring=HashRing(()), spaces={})


class SendMessage(NamedTuple):
    """One message for one node: "server-3", "client-7" or "manager"."""

    to: str
    message: object


class ServerNode:
    """One server: master of some arcs of the ring, replica of others, source for filling servers.

    Source: the parameter server of OSDI'14, sections 4.3 to 4.5. Deviations: docs/decisions/0008.

    Args:
        server: its id.
        store: its values.
    """

    def __init__(self, server: int, store: TableStore) -> None:
        self.server = server
        self._store = ClockedStore(store)
        self._placement = Placement(_NO_VIEW, server)
        self._unacked = UnackedOperations(server, self._store)
        self._incoming = IncomingBlocks(self._store, self._placement)
        self._outgoing = OutgoingBlocks(self._store, self._unacked.on_keys, self._placement)
        self._early: dict[int, list[tuple[str, ServerMessage]]] = {}  # by the view that they wait for
        self._deferred: list[Push | Pull] = []  # that this master cannot serve yet
        self._aggregation = Aggregation()
        # Holders that may still hand over operations of earlier views.
        self._pending_handoffs: set[int] = set()
        self._output: list[SendMessage] = []

    @property
    def view(self) -> PlacementView | None:
        """The one in force here, None before the first."""
        return None if self._placement.view is _NO_VIEW else self._placement.view

    @property
    def sequence_gaps(self) -> int:
        """See `ClockedStore`."""
        return self._store.sequence_gaps

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
        if view.version > self._placement.view.version:
            self._adopt_view(view)
        return self._drain_output()

    def can_apply_in_place(self, push: Push) -> bool:
        """Whether a push, if received now, would be read once only and nothing of it kept.

        Otherwise it waits for blocks or for the pushes of other participants, or goes to replicas.
        """
        placement = self._placement
        space = placement.view.spaces.get(push.namespace)
        if space is None or space.aggregates or push.epoch > placement.view.version:
            return False
        if placement.may_gain or not 0 <= push.first < push.last <= space.keys:
            return False
        is_alone = all(len(span.holders) == 1 for span in placement.route(space.name, push.first, push.last))
        return is_alone and self._store.table(space).reads_pushes_once

    def push_times(self, namespace: str, key: int) -> dict[int, int]:
        """Return, by client, the time of its latest push of a key that was applied here."""
        clock = self._store.clock(namespace)
        return {client: time for client in clock.clients if (time := clock.time_of(client, key))}

    def _drain_output(self) -> list[SendMessage]:
        output, self._output = self._output, []
        return output

    def _receive(self, sender: str, message: ServerMessage) -> None:
        """Keep messages of later views; drop servers' messages of earlier ones: they are sent again."""
        number = self._placement.view.version
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
                self._on_replicate_ack(message)
            case HandoffOperations():
                self._on_handoff(_server(sender), message)
            case HandoffReplayed():
                self._on_handoff_replayed(message)
            case HandoffDone():
                self._on_handoff_done(_server(sender))
            case TransferRequest():
                self._send_chunks(_server(sender), self._outgoing.on_request(_server(sender), message))
            case TransferChunk():
                self._on_transfer_chunk(_server(sender), message)
            case TransferAck():
                self._send_chunks(_server(sender), self._outgoing.on_ack(_server(sender)))
            case TransferDone():
                self._on_transfer_done(_server(sender))

    # Requests of clients ---------------------------------------------------------------------------------

    def _on_request(self, message: Push | Pull) -> None:
        """Serve a push or pull; defer it while it has to wait, answer `WrongMaster` if it is misdirected."""
        view = self._placement.view
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
        elif self._has_to_wait(space, message):
            self._deferred.append(message)
        elif isinstance(message, Pull):
            self._send_to_client(message.client, self._pulled(space, message))
        else:
            self._check(space, message)
            self._push(space, message)

    def _check(self, space: NamespaceSpec, push: Push) -> None:
        """Check that the table accepts a push, which is for keys of this master and not too old to aggregate.

        Raises:
            ProtocolError: another server is the master of some of the keys; the client takes part in the
                aggregation from a later time on; or the table does not accept the content.
        """
        route = self._placement.route(space.name, push.first, push.last)
        if any(span.holders[0] != self.server for span in route):
            raise ProtocolError(
                f"expected a push of keys with one master, server {self.server}, got {push.first} to "
                f"{push.last} of {space.name}"
            )
        begins = self._placement.view.participants.get(space.name, {}).get(push.client, 0)
        if space.aggregates and push.time < begins:
            raise ProtocolError(f"expected a push of time {begins} at least, got one of time {push.time}")
        try:
            self._store.table(space).check(push.content, push.first, push.last)
        except ValueError as error:
            raise ProtocolError(f"expected a push that {space.name} can accept: {error}") from error

    def _pulled(self, space: NamespaceSpec, pull: Pull) -> PullResult:
        if not isinstance(pull, InspectPull):
            return self._values(space, pull, pull.keys)
        clock = self._store.clock(space.name)
        pieces = clock.pieces(pull.client, pull.first, pull.last) if pull.returns_times else []
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

    def _has_to_wait(self, space: NamespaceSpec, message: Push | Pull) -> bool:
        """Whether it is for a block that has not come, or after such a request of the same client.

        No sum is begun before all holders have handed over their operations of earlier views: one of them may
        have applied a sum that contains the push of a client that is now lost.
        """
        if self._pending_handoffs and isinstance(message, Push) and space.aggregates:
            return True
        if not self._incoming.pending_sources:  # everything has come
            return False
        blocks = self._placement.blocks(message.namespace, message.first, message.last)
        return any(self._incoming.lacks(block) for block in blocks) or any(
            other.client == message.client
            and other.namespace == message.namespace
            and other.first < message.last
            and message.first < other.last
            for other in self._deferred
        )

    def _push(self, space: NamespaceSpec, push: Push) -> None:
        clock = self._store.clock(push.namespace)
        fresh = clock.earlier_ranges(push.client, push.first, push.last, push.time)
        request = PushRequest(push, pending_count=1)  # until all of it has been begun
        if fresh != [(push.first, push.last)]:
            self._wait_for_kept(request)
        if space.aggregates:
            self._add_to_sums(request, fresh)
        else:
            whole = Operation(
                namespace=push.namespace,
                first=push.first,
                last=push.last,
                stamps=(_stamp(push),),
                content=push.content,
            )
            for first, last in fresh:
                self._apply_and_replicate(self._store.part(whole, first, last), [request])
        self._release_requests([request])

    def _add_to_sums(self, request: PushRequest, fresh: list[tuple[int, int]]) -> None:
        """Let a push wait for those of the other participants, and begin the sums that it completes."""
        for first, last in fresh:
            request.pending_count += last - first  # one for each key, until its sum is begun
            for one in self._aggregation.add(request, first, last):
                requests = [request for of_client in one.requests for request in of_client]
                self._apply_and_replicate(self._sum(request.push.namespace, one), requests)
                self._release_requests(requests, one.last - one.first)

    def _wait_for_kept(self, request: PushRequest) -> None:
        """Let a request wait for operations in flight that contain parts of the same push."""
        for kept in self._unacked.of_push(request.push):
            kept.requests.append(request)
            request.pending_count += 1

    def _sum(self, namespace: str, one: CompleteSum) -> Operation:
        table = self._store.table(self._placement.view.spaces[namespace])
        pushes = [of_client[0].push for of_client in one.requests]
        contents = [table.key_range(push.content, one.first, one.last) for push in pushes]
        return Operation(
            namespace=namespace,
            first=one.first,
            last=one.last,
            stamps=tuple(_stamp(push) for push in pushes),
            content=table.combine(contents, one.first, one.last),
        )

    def _apply_and_replicate(self, operation: Operation, requests: list[PushRequest]) -> None:
        """Apply an operation as its master and send it down its chains; or refuse its requests.

        The caller holds one more count of each request, so that none completes while parts of it are not
        begun.
        """
        if requests:
            table = self._store.table(self._placement.view.spaces[operation.namespace])
            try:
                table.dry_run(operation.first, operation.last, operation.content)
            except ValueError as error:
                for request in requests:
                    request.rejection = str(error)
                return
        self._incoming.apply(operation)
        self._send_down(operation, requests)

    def _send_down(self, operation: Operation, requests: list[PushRequest]) -> None:
        """Send an operation to the other holders; the requests wait until all of them have it."""
        for part, chain in self._parts_by_chain(operation):
            if len(chain) > 1:
                for request in requests:
                    request.pending_count += 1
                copy = Replicate(
                    view=self._placement.view.version,
                    master=self.server,
                    serial=self._unacked.add_own(part, list(requests)),
                    operation=part,
                    route=chain[2:],
                )
                self._send_to_server(chain[1], copy)

    def _parts_by_chain(self, operation: Operation) -> Iterator[tuple[Operation, tuple[int, ...]]]:
        """Yield the parts of an operation that go down different chains."""
        route = self._placement.route(operation.namespace, operation.first, operation.last)
        for first, last, chain in route:
            yield self._store.part(operation, first, last), chain

    def _acknowledge(self, request: PushRequest) -> None:
        push = request.push
        if request.rejection:
            answer: PushAck | PullResult | Rejected = rejection(push, ValueError(request.rejection))
        elif push.returns_values:
            try:
                answer = self._values(self._placement.view.spaces[push.namespace], push, None)
            except ProtocolError as error:  # the sender of the message being processed is not at fault
                answer = rejection(push, error)
        else:
            answer = PushAck(request=push.request, first=push.first, last=push.last)
        self._send_to_client(push.client, answer)

    # Chains ----------------------------------------------------------------------------------------------

    def _on_replicate(self, copy: Replicate, sender: int) -> None:
        """Apply an operation as a replica, or as a server that is being filled, and forward it."""
        self._incoming.apply(copy.operation)
        if not copy.route:
            self._send_to_server(sender, ReplicateAck(view=copy.view, master=copy.master, serial=copy.serial))
            return
        self._unacked.add(copy.master, copy.serial, copy.operation, sender)
        self._send_to_server(copy.route[0], replace(copy, route=copy.route[1:]))

    def _on_replicate_ack(self, ack: ReplicateAck) -> None:
        """All holders after this one have an operation."""
        kept = self._unacked.pop(ack.master, ack.serial)
        if kept.came_from is None:
            self._release_requests(kept.requests)
        else:
            self._send_to_server(kept.came_from, ack)

    def _release_requests(self, requests: Iterable[PushRequest], count: int = 1) -> None:
        for request in requests:
            request.pending_count -= count
            if not request.pending_count:
                self._acknowledge(request)

    def _on_handoff(self, holder: int, handed: HandoffOperations) -> None:
        """Begin, like a push, the operations of a holder that this new master may not have."""
        for operation in handed.operations:
            for first, last in self._store.fresh_ranges(operation):
                self._apply_and_replicate(self._store.part(operation, first, last), [])
        self._on_handoff_replayed(HandoffReplayed(view=handed.view, chain=handed.chain, holder=holder))

    def _on_handoff_replayed(self, resent: HandoffReplayed) -> None:
        if resent.holder == self.server:
            self._unacked.on_replayed(resent.chain, self._placement)
        place = resent.chain.index(self.server)
        if place + 1 < len(resent.chain):
            self._send_to_server(resent.chain[place + 1], resent)

    def _on_handoff_done(self, holder: int) -> None:
        self._pending_handoffs.discard(holder)
        if not self._pending_handoffs:
            self._serve_deferred()

    # Views -----------------------------------------------------------------------------------------------

    def _adopt_view(self, view: PlacementView) -> None:
        is_same_epoch = view.epoch == self._placement.view.epoch
        placement = self._placement = Placement(view, self.server)
        self._store.spaces = view.spaces
        self._deferred = [*self._aggregation.set_participants(view.participants), *self._deferred]
        for block in list(self._store.blocks()):
            if placement.is_lost(block) or not placement.holds(block):
                self._store.remove_block(block)
        self._outgoing.begin_view(placement)
        for source, missing in self._incoming.begin_view(placement):
            self._send_to_server(source, missing)
        if placement.may_gain and not self._incoming.pending_sources:
            self._send_fill_done()
        for operation, waiting in self._unacked.take_all(placement):
            # In a new epoch, clients send again what was not acknowledged.
            requests = waiting if is_same_epoch else []
            self._resend_or_carry(operation, requests)
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
        for part, chain in self._parts_by_chain(operation):
            if self.server not in chain:
                continue
            if chain[0] == self.server:
                self._send_down(part, requests)
            else:
                self._unacked.carry(part)

    def _send_handoffs(self) -> None:
        """Hand over unacknowledged operations: a new master may lack what a holder after it has applied."""
        view = self._placement.view
        for chain, operations in self._unacked.carried_by_chain(self._placement).items():
            handed = HandoffOperations(view=view.version, chain=chain, operations=tuple(operations))
            self._send_to_server(chain[0], handed)

    def _send_handoff_done(self) -> None:
        """Send HandoffDone to the masters of this server's chains; note which holders owe one."""
        self._pending_handoffs.clear()
        view = self._placement.view
        if not any(space.aggregates for space in view.spaces.values()):
            return
        masters: set[int] = set()
        for master, *others in self._placement.chains():
            if master == self.server:
                self._pending_handoffs.update(others)
            elif self.server in others:
                masters.add(master)
        for master in sorted(masters):
            self._send_to_server(master, HandoffDone(view=view.version))

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

    # Transfer of blocks ----------------------------------------------------------------------------------

    def _send_chunks(self, gainer: int, messages: Iterable[TransferChunk | TransferDone]) -> None:
        for message in messages:
            self._send_to_server(gainer, message)

    def _on_transfer_chunk(self, source: int, chunk: TransferChunk) -> None:
        self._unacked.add_fetched(chunk.pending)
        self._incoming.on_chunk(chunk)
        self._serve_deferred()
        self._send_to_server(source, TransferAck(view=chunk.view))

    def _on_transfer_done(self, source: int) -> None:
        self._incoming.on_source_done(source)
        self._serve_deferred()
        if not self._incoming.pending_sources:
            self._send_fill_done()

    def _send_fill_done(self) -> None:
        done = ServerFillDone(server=self.server, view=self._placement.view.version)
        self._output.append(SendMessage(MANAGER, done))

    # Sending ---------------------------------------------------------------------------------------------

    def _send_to_server(self, server: int, message: ServerMessage) -> None:
        self._output.append(SendMessage(f"server-{server}", message))

    def _send_to_client(self, client: int, message: ClientMessage) -> None:
        self._output.append(SendMessage(f"client-{client}", message))


def _stamp(push: Push) -> PushStamp:
    return PushStamp(client=push.client, time=push.time, previous_times=push.previous_times)


def rejection(request: Push | Pull, error: Exception) -> Rejected:
    """Return the reply to the client of an invalid request."""
    return Rejected(request=request.request, first=request.first, last=request.last, reason=str(error))


def _server(sender: str) -> int:
    return int(sender.removeprefix("server-"))
