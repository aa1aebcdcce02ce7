"""A server of a parameter server, as a machine without I/O: what it does upon a message, and what it says.

Nothing here knows what values are, how messages travel, or who lives: the manager's views say that. See
docs/decisions/0008-how-servers-replicate.md for why it is as it is.
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
_CHUNKS_UNDER_WAY_MAX = 4
_ROUTES_MAX = 4096
OF_CLIENTS = (Push, Pull)

Block = tuple[str, int]  # a namespace, and the number of a block in it


class Table(Protocol):
    """The values of one namespace on one server; keys that were never pushed are zero."""

    @property
    def looks_once(self) -> bool:
        """Whether it looks at what is pushed when that is applied, and at no other time."""

    def check(self, content: Content, first: int, last: int) -> None:
        """See whether something can be pushed to keys `first` to `last` - 1.

        Raises:
            ValueError: it cannot.
        """

    def rehearse(self, first: int, last: int, content: Content) -> None:
        """See whether `apply` can take this as things are; nothing changes.

        Raises:
            ValueError: it cannot.
        """

    def apply(self, first: int, last: int, content: Content) -> None:
        """Take what was pushed for keys `first` to `last` - 1."""

    def read(self, first: int, last: int, keys: Content | None, states: bool = False) -> Content:
        """Return the values of keys `first` to `last` - 1, or of those of them that `keys` lists.

        Args:
            states: with what is kept besides them.

        Raises:
            ValueError: what is listed is no such keys.
        """

    def cut(self, content: Content, first: int, last: int) -> Content:
        """Return what `content` has for keys `first` to `last` - 1."""

    def aggregated(self, contents: Sequence[Content], first: int, last: int) -> Content:
        """Return as one, such as their sum, what `contents` have for keys `first` to `last` - 1.

        It may depend on their order and on what is there, so it is applied before anything else.
        """

    def copy_out(self, first: int, last: int) -> Content:
        """Return all that is kept of keys `first` to `last` - 1, as it is now."""

    def copy_in(self, first: int, last: int, content: Content) -> None:
        """Replace all that is kept of keys `first` to `last` - 1 by what `copy_out` gave elsewhere."""

    def drop(self, first: int, last: int) -> None:
        """Forget keys `first` to `last` - 1."""


class Store(Protocol):
    """All values of one server."""

    def table(self, space: Space) -> Table:
        """Return a namespace's table, made if need be."""


class Send(NamedTuple):
    """One message for one node: "server-3", "client-7" or "manager"."""

    to: str
    message: object


@dataclass(slots=True, eq=False)
class _Kept:
    """An operation that is not known to have reached all holders behind this one.

    Attributes:
        came_from: the holder before this one, None where this is the master.
        requests: that wait for it, at the master.
    """

    operation: Operation
    came_from: int | None
    requests: list[Request] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Fill:
    """What one server fetches from here.

    Attributes:
        pending: blocks that it is still to be sent, in order.
        under_way: how many blocks it has not said that it has.
    """

    pending: list[Block]
    under_way: int = 0


class ServerNode:
    """One server: master of some arcs of the ring, replica of others, source for who is being filled.

    Source: the parameter server of OSDI'14, sections 4.3 to 4.5. Deviations: docs/decisions/0008.

    Args:
        server: its id.
        store: its values.

    Attributes:
        view: the one that it goes by, None before the first.
        gaps: operations that came although one before them was missing: something that was acknowledged is
            lost, or was refused.
    """

    def __init__(self, server: int, store: Store) -> None:
        self.server = server
        self.view: View | None = None
        self.gaps = 0
        self._store = store
        self._clocks: dict[str, RangeVectorClock] = {}
        self._kept: dict[tuple[int, int], _Kept] = {}  # by master and serial, in the order of application
        self._serial = 0  # of this view
        self._carried: list[Operation] = []  # of earlier views, that a master is to send again, in order
        self._fetched: list[Operation] = []  # likewise, in what came in this view
        self._early: dict[int, list[tuple[str, ToServer]]] = {}  # by the view that they wait for
        self._fills: dict[int, _Fill] = {}  # by who is being filled from here, in this view
        self._awaited: set[int] = set()  # who fills this one, and has not said in this view that that is all
        self._have: set[Block] = set()  # of what it gains
        self._buffered: dict[Block, list[Operation]] = {}  # on blocks that have not come
        self._deferred: list[Push | Pull] = []  # for blocks that have not come, of which this is the master
        self._aggregation = Aggregation()
        self._unheard: set[int] = set()  # holders that may have, of earlier views, what this master may not
        self._chains: dict[int, tuple[int, ...]] = {}  # by point, as far as it was asked for
        self._routes: dict[tuple[str, int, int], list[Span]] = {}  # by range of keys, likewise
        self._out: list[Send] = []

    # What comes ------------------------------------------------------------------------------------------

    def hear(self, sender: str, message: ToServer) -> list[Send]:
        """Take a message; return what is to be sent.

        Raises:
            ProtocolError: no client of this version asks for that; nothing has changed.
        """
        self._hear(sender, message)
        return self._said()

    def see(self, view: View) -> list[Send]:
        """Go by a new view; an old one changes nothing."""
        if self.view is None or view.number > self.view.number:
            self._follow(view)
        return self._said()

    def keeps_nothing_of(self, push: Push) -> bool:
        """Whether nothing of a push would be kept here, nor looked at twice, if it were heard now.

        Else it waits for something, or for others' pushes of its time, or goes to replicas.
        """
        view = self.view
        space = None if view is None else view.spaces.get(push.namespace)
        if view is None or space is None or space.aggregates or push.epoch > view.number:
            return False
        if self._awaited or self._gains() or not 0 <= push.first < push.last <= space.keys:
            return False
        is_alone = all(len(chain) == 1 for _, _, chain in self._route(space.name, push.first, push.last))
        return is_alone and self._store.table(space).looks_once

    def times_of(self, namespace: str, key: int) -> dict[int, int]:
        """Return, by client, the time of its last push of a key that was applied here."""
        clock = self._clock(namespace)
        return {client: time for client in clock.clients if (time := clock.at(client, key))}

    def _said(self) -> list[Send]:
        said, self._out = self._out, []
        return said

    def _hear(self, sender: str, message: ToServer) -> None:
        """Keep what is of a view to come, and forget what is of an old one: it is sent again."""
        number = -1 if self.view is None else self.view.number
        is_of_client = isinstance(message, OF_CLIENTS)
        of_view = message.epoch if is_of_client else message.view  # type: ignore[union-attr]
        if of_view > number:
            self._early.setdefault(of_view, []).append((sender, message))
        elif is_of_client or of_view == number:
            self._take(sender, message)

    def _take(self, sender: str, message: ToServer) -> None:
        match message:
            case Push() | Pull():
                self._serve(message)
            case Copy():
                self._copy(message, _server(sender))
            case Copied():
                self._done((message.master, message.serial))
            case Handed():
                self._take_over(_server(sender), message)
            case Resent():
                self._pass_resent(message)
            case HandEnd():
                self._handed_all(_server(sender))
            case Fetch():
                self._fill(_server(sender), message)
            case Chunk():
                self._take_chunk(_server(sender), message)
            case ChunkTaken():
                self._fills[_server(sender)].under_way -= 1
                self._send_chunks(_server(sender))
            case FillEnd():
                self._filled_by(_server(sender))

    # Clients ---------------------------------------------------------------------------------------------

    def _serve(self, message: Push | Pull) -> None:
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
            self._tell_client(message.client, stale)
        elif self._has_to_wait(message):
            self._deferred.append(message)
        elif isinstance(message, Pull):
            self._tell_client(message.client, self._pulled(space, message))
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
            raise ProtocolError(f"expected a push that {space.name} can take: {error}") from error

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
        """Whether it is for a block that has not come, or behind such a one of the same client.

        No sum is begun before all holders have said what they have of earlier views: a client may be lost
        whose push is in a sum that one of them has applied.
        """
        if self._unheard and isinstance(message, Push) and self._now().spaces[message.namespace].aggregates:
            return True
        if not self._awaited:  # everything has come
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
        request = Request(push, waits_for=1)  # for all of it to have been begun
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
            self._begin(self._part(whole, first, last), [request])
        self._end_waiting([request])

    def _push_to_sum(self, push: Push) -> None:
        """Let a push wait for those of the other participants, and begin the sums that it completes."""
        fresh = self._clock(push.namespace).fresh(push.client, push.first, push.last, push.time)
        request = Request(push, waits_for=1)  # for all of it to have been begun
        if fresh != [(push.first, push.last)]:
            self._wait_for_kept(request)
        for first, last in fresh:
            request.waits_for += last - first  # each of these keys, for the sum that it is to be in
            for one in self._aggregation.add(request, first, last):
                requests = [request for of_client in one.requests for request in of_client]
                self._begin(self._sum(push.namespace, one), requests)
                self._end_waiting(requests, one.last - one.first)
        self._end_waiting([request])

    def _wait_for_kept(self, request: Request) -> None:
        """Some of a push came before, and may still be on its way."""
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

    def _begin(self, operation: Operation, requests: list[Request]) -> None:
        """Apply an operation as its master, and send it down its chains; one that cannot be goes nowhere.

        Requests wait for something else, too, so that none is done when some of its parts are.
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
        """Send an operation to whoever else has to have it, for which these requests wait then."""
        for part, chain in self._by_chain(operation):
            if len(chain) > 1:
                for request in requests:
                    request.waits_for += 1
                self._send_part(_Kept(part, None, list(requests)), chain[1:])

    def _send_part(self, kept: _Kept, route: tuple[int, ...]) -> None:
        self._serial += 1
        self._kept[self.server, self._serial] = kept
        copy = Copy(
            view=self._now().number,
            master=self.server,
            serial=self._serial,
            operation=kept.operation,
            route=route[1:],
        )
        self._tell(route[0], copy)

    def _acknowledge(self, request: Request) -> None:
        push = request.push
        if request.refusal:
            answer: Pushed | Pulled | Refused = refused(push, ValueError(request.refusal))
        elif push.wants_values:
            try:
                answer = self._values(self._now().spaces[push.namespace], push, None)
            except ProtocolError as error:  # whose message this was the last to wait for is not to blame
                answer = refused(push, error)
        else:
            answer = Pushed(number=push.number, first=push.first, last=push.last)
        self._tell_client(push.client, answer)

    # Chains ----------------------------------------------------------------------------------------------

    def _copy(self, copy: Copy, sender: int) -> None:
        """Take an operation as a replica, or as one that is being filled."""
        self._apply(copy.operation)
        if not copy.route:
            self._tell(sender, Copied(view=copy.view, master=copy.master, serial=copy.serial))
            return
        self._kept[copy.master, copy.serial] = _Kept(copy.operation, sender)
        onward = Copy(
            view=copy.view,
            master=copy.master,
            serial=copy.serial,
            operation=copy.operation,
            route=copy.route[1:],
        )
        self._tell(copy.route[0], onward)

    def _done(self, key: tuple[int, int]) -> None:
        """All behind this one have an operation."""
        kept = self._kept.pop(key)
        if kept.came_from is None:
            self._end_waiting(kept.requests)
        else:
            self._tell(kept.came_from, Copied(view=self._now().number, master=key[0], serial=key[1]))

    def _end_waiting(self, requests: Iterable[Request], count: int = 1) -> None:
        for request in requests:
            request.waits_for -= count
            if not request.waits_for:
                self._acknowledge(request)

    def _take_over(self, holder: int, handed: Handed) -> None:
        """Send what a holder has, and this new master may not, down the chain like a push."""
        for operation in handed.operations:
            for first, last in self._fresh(operation):
                self._begin(self._part(operation, first, last), [])
        self._pass_resent(Resent(view=handed.view, chain=handed.chain, of=holder))

    def _pass_resent(self, resent: Resent) -> None:
        if resent.of == self.server:
            self._carried = [
                operation for operation in self._carried if self._chain_of(operation) != resent.chain
            ]
        place = resent.chain.index(self.server)
        if place + 1 < len(resent.chain):
            self._tell(resent.chain[place + 1], resent)

    def _handed_all(self, holder: int) -> None:
        self._unheard.discard(holder)
        if not self._unheard:
            self._serve_deferred()

    # Applying --------------------------------------------------------------------------------------------

    def _apply(self, operation: Operation) -> None:
        """Apply what of an operation is new here, once the blocks that it is for have come."""
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
        self.gaps += self._misses(clock, operation)
        for first, last in self._fresh(operation):
            table.apply(first, last, table.cut(operation.content, first, last))
            for mark in operation.marks:
                clock.set(mark.client, first, last, mark.time)

    def _fresh(self, operation: Operation) -> list[tuple[int, int]]:
        """Return where none of an operation's pushes has been applied; they all have been, or none."""
        clock, one = self._clock(operation.namespace), operation.marks[0]
        parts = clock.fresh(one.client, operation.first, operation.last, one.time)
        for mark in operation.marks[1:]:
            parts = [part for at in parts for part in clock.fresh(mark.client, *at, mark.time)]
        return parts

    def _misses(self, clock: RangeVectorClock, operation: Operation) -> bool:
        """Whether a push before one of the operation's has not been applied here."""
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
            self._empty()
        self._forget_what_is_others()
        self._fetch()
        kept, self._kept, self._serial = self._kept, {}, 0
        carried, self._carried, self._fetched = [*self._carried, *self._fetched], [], []
        for operation in carried:
            self._send_again(operation, [])
        for one in kept.values():
            # In a new epoch, clients send again what was not acknowledged.
            requests = one.requests if before is not None and before.epoch == view.epoch else []
            self._send_again(one.operation, requests)
            self._end_waiting(requests)  # for the whole, which has become its parts
        self._hand_to_masters()
        self._end_handing()
        self._serve_deferred()
        for number in sorted(number for number in self._early if number <= view.number):
            for sender, message in self._early.pop(number):
                if isinstance(message, OF_CLIENTS):
                    self._serve_late(message)
                else:
                    self._hear(sender, message)

    def _send_again(self, operation: Operation, requests: list[Request]) -> None:
        """Send an operation of an earlier view down its chains, or see to it that its master does."""
        for part, chain in self._by_chain(operation):
            if self.server not in chain:
                continue
            if chain[0] == self.server:
                self._send_down(part, requests)
            else:
                self._carried.append(part)

    def _hand_to_masters(self) -> None:
        """A master that has just become one may never have had what a holder before it in the chain had."""
        by_chain: dict[tuple[int, ...], list[Operation]] = {}
        for operation in self._carried:
            by_chain.setdefault(self._chain_of(operation), []).append(operation)
        for chain, operations in by_chain.items():
            handed = Handed(view=self._now().number, chain=chain, operations=tuple(operations))
            self._tell(chain[0], handed)

    def _end_handing(self) -> None:
        """Tell the masters of this server's chains that they have all; see who has to tell this one so."""
        self._unheard.clear()
        if not any(space.aggregates for space in self._now().spaces.values()):
            return
        masters: set[int] = set()
        for master, *others in {self._chain_at(point) for point in self._points()} - {()}:
            if master == self.server:
                self._unheard.update(others)
            elif self.server in others:
                masters.add(master)
        for master in sorted(masters):
            self._tell(master, HandEnd(view=self._now().number))

    def _forget_what_is_others(self) -> None:
        for namespace, block in list(self._own_blocks()):
            if self.server not in self._chain((namespace, block)):
                space = self._now().spaces[namespace]
                first, last = space.range_of(block)
                self._store.table(space).drop(first, last)
                self._clock(namespace).drop(first, last)
        for buffered in [one for one in self._buffered if self.server not in self._chain(one)]:
            del self._buffered[buffered]
        self._have = {block for block in self._have if self._is_gained(block)}

    def _empty(self) -> None:
        """Drop what is here of keys whose data are lost, so that all who are to hold them have nothing."""
        for block in [block for block in self._own_blocks() if self._is_emptied(block)]:
            first, last = self._now().spaces[block[0]].range_of(block[1])
            self._store.table(self._now().spaces[block[0]]).drop(first, last)
            self._clock(block[0]).drop(first, last)
        kept = self._not_emptied(one.operation for one in self._kept.values())
        self._kept = {(self.server, -place): _Kept(one, None) for place, one in enumerate(kept)}
        self._carried = self._not_emptied(self._carried)
        self._fetched = self._not_emptied(self._fetched)
        self._buffered = {at: one for at, one in self._buffered.items() if not self._is_emptied(at)}
        self._have = {block for block in self._have if not self._is_emptied(block)}

    def _not_emptied(self, operations: Iterable[Operation]) -> list[Operation]:
        """Return what of operations is for keys whose data are not lost; clients send nothing of it again."""
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
            self._serve_late(message)

    def _serve_late(self, message: Push | Pull) -> None:
        """Serve what waited; who has just said something is not to blame for it."""
        try:
            self._serve(message)
        except ProtocolError as error:
            self._tell_client(message.client, refused(message, error))

    # Places ----------------------------------------------------------------------------------------------

    def _now(self) -> View:
        assert self.view is not None
        return self.view

    def _chain(self, block: Block) -> tuple[int, ...]:
        return self._chain_at(block_point(*block))

    def _chain_of(self, operation: Operation) -> tuple[int, ...]:
        """The chain of an operation's first block."""
        return self._chain(next(self._blocks_of(operation.namespace, operation.first, operation.last)))

    def _chain_at(self, point: int) -> tuple[int, ...]:
        """Who an operation on this place goes to, the master first; last, who gains it in the next ring."""
        chain = self._chains.get(point)
        if chain is None:
            view = self._now()
            chain = view.ring.holders_at(point)
            if view.target is not None:
                chain += tuple(one for one in view.target.holders_at(point) if one not in chain)
            self._chains[point] = chain
        return chain

    def _gainers_at(self, point: int) -> tuple[int, ...]:
        """Who of the chain is being filled."""
        view = self._now()
        holders = view.ring.holders_at(point)
        return tuple(
            one
            for one in self._chain_at(point)
            if one not in holders or any(arc.first <= point < arc.last for arc in view.filling.get(one, ()))
        )

    def _source_at(self, point: int) -> int | None:
        """The last of the chain that has everything."""
        gainers = self._gainers_at(point)
        return next((one for one in reversed(self._chain_at(point)) if one not in gainers), None)

    def _gains(self) -> bool:
        view = self._now()
        return self.server in view.filling or view.target is not None

    def _is_gained(self, block: Block) -> bool:
        return self._gains() and self.server in self._gainers_at(block_point(*block))

    def _lacks(self, block: Block) -> bool:
        """Whether what this server is to have of a block has not come."""
        return (
            bool(self._awaited)
            and block not in self._have
            and self._is_gained(block)
            and self._source_at(block_point(*block)) in self._awaited
        )

    def _points(self) -> list[int]:
        """A point of every stretch of the ring that has one chain and one set of gainers."""
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
        """Return the chains of some keys; the same ranges are asked for again and again."""
        route = self._routes.get((namespace, first, last))
        if route is None:
            if len(self._routes) == _ROUTES_MAX:
                self._routes.clear()
            route = self._routes[namespace, first, last] = list(self._walk(namespace, first, last))
        return route

    def _walk(self, namespace: str, first: int, last: int) -> Iterator[Span]:
        space = self._now().spaces[namespace]
        begun, blocks = first, space.blocks(first, last)
        chain = self._chain((namespace, blocks[0]))
        for block in blocks[1:]:
            another, (begin, _) = self._chain((namespace, block)), space.range_of(block)
            if another != chain:
                yield Span(begun, begin, chain)
                begun, chain = begin, another
        yield Span(begun, last, chain)

    def _blocks_of(self, namespace: str, first: int, last: int) -> Iterator[Block]:
        blocks = self._now().spaces[namespace].blocks(first, last)
        return ((namespace, block) for block in blocks)

    def _own_blocks(self) -> Iterator[Block]:
        """Yield the blocks of which anything is known here: of a key without a value, its times are."""
        for namespace, clock in sorted(self._clocks.items()):
            blocks = {
                block for first, last in clock.ranges() for block in self._blocks_of(namespace, first, last)
            }
            yield from sorted(blocks)

    # Speaking --------------------------------------------------------------------------------------------

    def _clock(self, namespace: str) -> RangeVectorClock:
        clock = self._clocks.get(namespace)
        if clock is None:
            clock = self._clocks[namespace] = RangeVectorClock()
        return clock

    def _tell(self, server: int, message: ToServer) -> None:
        self._out.append(Send(f"server-{server}", message))

    def _tell_client(self, client: int, message: ToClient) -> None:
        self._out.append(Send(f"client-{client}", message))

    # Filling others --------------------------------------------------------------------------------------

    def _fill(self, gainer: int, fetch: Fetch) -> None:
        """Send a server the blocks that it gains from here; what is done to them it hears as all do."""
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
        while fill.pending and fill.under_way < _CHUNKS_UNDER_WAY_MAX:
            namespace, block = fill.pending.pop()
            fill.under_way += 1
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
            self._tell(gainer, chunk)
        if not fill.pending and not fill.under_way:
            self._tell(gainer, FillEnd(view=view.number))

    def _pending(self, namespace: str, first: int, last: int) -> Iterator[Operation]:
        """Yield what has been applied here and may not have been everywhere, of some keys, in order."""
        for operation in [*self._carried, *self._fetched, *(kept.operation for kept in self._kept.values())]:
            begin, end = max(operation.first, first), min(operation.last, last)
            if operation.namespace == namespace and begin < end:
                yield self._part(operation, begin, end)

    # Being filled ----------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Ask for what this server gains in this view and has not got."""
        view = self._now()
        sources = {
            self._source_at(point) for point in self._points() if self.server in self._gainers_at(point)
        }
        self._awaited = {source for source in sources if source is not None}
        have = tuple(sorted(self._have))
        for source in sorted(self._awaited):
            self._tell(source, Fetch(view=view.number, have=have))
        self._flush()
        if self._gains() and not self._awaited:
            self._out.append(Send(MANAGER, Filled(server=self.server, view=view.number)))

    def _take_chunk(self, source: int, chunk: Chunk) -> None:
        space = self._now().spaces[chunk.namespace]
        first, last = space.range_of(chunk.block)
        self._store.table(space).copy_in(first, last, chunk.content)
        clock = self._clock(chunk.namespace)
        clock.drop(first, last)
        clock.adopt(chunk.clocks)
        self._fetched += chunk.pending
        self._have.add((chunk.namespace, chunk.block))
        self._flush()
        self._serve_deferred()
        self._tell(source, ChunkTaken(view=chunk.view))

    def _filled_by(self, source: int) -> None:
        self._awaited.discard(source)
        self._flush()
        self._serve_deferred()
        if not self._awaited:
            self._out.append(Send(MANAGER, Filled(server=self.server, view=self._now().number)))

    def _flush(self) -> None:
        """Apply what was kept for blocks that have come, or of which nobody had anything."""
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
    """Return what to tell the client of a request that cannot be."""
    return Refused(number=request.number, first=request.first, last=request.last, reason=str(error))


def _server(sender: str) -> int:
    return int(sender.removeprefix("server-"))
