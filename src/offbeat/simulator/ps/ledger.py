"""What the clients of a simulated parameter server have pushed and pulled, and what the answers must contain.

A push adds 1 to some keys, in a digit that belongs to its client. Nothing here knows nodes or the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from offbeat.policies.ps.client import RequestDone
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.policies.ps.messages import PlacementView, PullResult, Push, PushAck, Replicate
from offbeat.policies.ps.range_clock import ClockRange
from offbeat.policies.ps.server_node import SendMessage, ServerNode

_DIGIT_BITS: Final = 16  # of one client's pushes in a value

KeyPlace = tuple[str, int]  # a namespace, and a key or block in it
PushCounter = tuple[str, int, int]  # a namespace, a key in it, and the client whose pushes are counted


@dataclass(kw_only=True, slots=True, eq=False)
class SimulatedRequest:
    """A request of a client.

    Attributes:
        span: its keys, from the first to before the last.
        made_s: when it was made.
        pushed: what a push adds; None for a pull.
        known: what its values have to contain; None if it wants none.
        wants_times: whether a pull also asks for the times of the client's own pushes.
        time: of a push that has been sent.
    """

    namespace: str
    span: tuple[int, int]
    made_s: float
    pushed: Counter[PushCounter] | None = None
    known: Counter[PushCounter] | None = None
    wants_times: bool = False
    time: int = 0


class RequestLedger:
    """Every acknowledged push is in all later answers, and no answer contains what was not pushed.

    Args:
        fail_invariant: is called with what is wrong, and raises.
        may_repeat_sums: whether a sum may be sent down its chain again in one view.

    Attributes:
        requests: all requests, by client and the client's number.
        open: those that are not done.
        total_pushed: all that was pushed.
    """

    def __init__(self, fail_invariant: Callable[[str], None], *, may_repeat_sums: bool) -> None:
        self.requests: dict[tuple[int, int], SimulatedRequest] = {}
        self.open: dict[tuple[int, int], SimulatedRequest] = {}
        self.total_pushed: Counter[PushCounter] = Counter()
        self._fail_invariant, self._may_repeat_sums = fail_invariant, may_repeat_sums
        # What each client knows to be on all replicas; of sums, that is what all clients had pushed.
        self._acknowledged: dict[int, Counter[PushCounter]] = {}
        self._masters: dict[tuple[int, KeyPlace], int] = {}  # the server that answered, by epoch and block
        # The pushes of a namespace and client by time, and the clients whose pushes were in the sum of a key,
        # by view, namespace and time.
        self._pushed_at: dict[tuple[str, int], dict[int, Counter[PushCounter]]] = {}
        self._sums: dict[tuple[int, str, int, int], tuple[int, ...]] = {}

    def add_client(self, client: int) -> None:
        """Add a client."""
        self._acknowledged[client] = Counter()

    def pulled(
        self, client: int, space: NamespaceSpec, span: tuple[int, int], made_s: float, *, wants_times: bool
    ) -> SimulatedRequest:
        """Return a client's pull."""
        return SimulatedRequest(
            namespace=space.name,
            span=span,
            made_s=made_s,
            known=self._known_in(space, client),
            wants_times=wants_times,
        )

    def pushed(
        self,
        client: int,
        space: NamespaceSpec,
        span: tuple[int, int],
        made_s: float,
        keys: Iterable[int],
        *,
        wants_values: bool,
    ) -> SimulatedRequest:
        """Count a client's push of some keys; return it."""
        own = Counter((space.name, key, client) for key in keys)
        self.total_pushed.update(own)
        known = None
        if wants_values:
            known = self._known_in(space, client) | (self._acknowledged[client] + own)
        return SimulatedRequest(namespace=space.name, span=span, made_s=made_s, pushed=own, known=known)

    def on_push_sent(self, push: Push) -> None:
        """Note the time of a push."""
        self.requests[push.client, push.request].time = push.time
        request = self.open.get((push.client, push.request))
        if request is not None and request.pushed is not None:
            self._pushed_at.setdefault((push.namespace, push.client), {})[push.time] = request.pushed

    def on_done(
        self, client: int, done: RequestDone, view: PlacementView | None, dead: AbstractSet[str]
    ) -> bool:
        """Check the answer of a request; return whether it is a push.

        Args:
            view: the manager's view.
            dead: names of nodes that are dead.
        """
        request = self.open.pop((client, done.request))
        if request.pushed is not None:
            self._acknowledged[client].update(request.pushed)
            self._acknowledge_sum(client, request, view, dead)
        if request.known is not None:
            values: dict[int, int] = {}
            for _, _, part in done.parts:
                values |= part
            for key in range(*request.span):
                place = request.namespace, key
                self.check_value(place, values.get(key, 0), request.known, f"what client {client} pulled")
            if request.wants_times:
                self._check_own(client, request, values, done.times)
        return request.pushed is not None

    def namespaces_being_pushed(self, client: int) -> set[str]:
        """Return the namespaces to which a client's pushes are not done."""
        return {
            request.namespace
            for (of, _), request in self.open.items()
            if of == client and request.pushed is not None
        }

    def acknowledged_by_any(self) -> Counter[PushCounter]:
        """Return what any client knows to be on all replicas."""
        known: Counter[PushCounter] = Counter()
        for counts in self._acknowledged.values():
            known |= counts
        return known

    def check_answers(self, node: ServerNode, outputs: Iterable[SendMessage]) -> None:
        """Check that in an epoch no two servers answer for one block, and that no push was missed."""
        view = node.view
        for output in outputs:
            answer = output.message
            if isinstance(answer, Replicate) and answer.master == node.server:
                self._check_sum(answer, view)
            if view is None or not isinstance(answer, PushAck | PullResult):
                continue
            space = view.spaces[self.requests[_client(output.to), answer.request].namespace]
            for block in space.blocks_of_range(answer.first, answer.last):
                place = space.name, block
                other = self._masters.setdefault((view.epoch, place), node.server)
                if other != node.server:
                    both = f"servers {other} and {node.server}"
                    self._fail_invariant(f"block {place} is served by {both} in epoch {view.epoch}")
        if node.sequence_gaps:
            self._fail_invariant(f"server {node.server} has missed a push")

    def check_value(self, place: KeyPlace, value: int, known: Counter[PushCounter], what: str) -> None:
        """Check that a key's value has all known pushes of each client, and no more than were made."""
        for client in self._acknowledged:
            counted = (*place, client)
            count, pushed = _pushes_of(client, value), self.total_pushed[counted]
            if not known[counted] <= count <= pushed:
                self._fail_invariant(
                    f"{what} of {place} has {count} pushes of client {client}, which had "
                    f"{known[counted]} of {pushed} acknowledged"
                )

    def _known_in(self, space: NamespaceSpec, client: int) -> Counter[PushCounter]:
        """Return what a client's pull has to contain."""
        known = Counter(self._acknowledged[client])
        if not space.aggregates:  # its own pushes, acknowledged or not
            own = {at: n for at, n in self.total_pushed.items() if (at[0], at[2]) == (space.name, client)}
            known |= Counter(own)
        return known

    def _acknowledge_sum(
        self, client: int, request: SimulatedRequest, view: PlacementView | None, dead: AbstractSet[str]
    ) -> None:
        """Where pushes are summed, an acknowledgement means that the other clients' pushes are in place."""
        name, time = request.namespace, request.time
        if view is None or not view.spaces[name].aggregates:
            return
        participants = view.participants.get(name, {})
        if client not in participants:
            return  # the client is out; the acknowledgement is of a view with other participants
        for other, begins in participants.items():
            if other == client or begins > time or f"client-{other}" in dead:
                continue
            pushed = self._pushed_at.get((name, other), {})
            if max(pushed, default=0) < time:
                self._fail_invariant(
                    f"client {client} was acknowledged time {time} of {name} without {other}"
                )
            self._acknowledged[client].update(pushed.get(time, Counter()))  # empty if it skipped the time

    def _check_sum(self, copy: Replicate, view: PlacementView | None) -> None:
        """Check that the pushes of one time form one operation, on all replicas of a chain."""
        operation = copy.operation
        begins = {} if view is None else view.participants.get(operation.namespace, {})
        clients = tuple(mark.client for mark in operation.stamps)
        if begins.keys().isdisjoint(clients):
            return
        for key in range(operation.first, operation.last):
            at = copy.view, operation.namespace, operation.stamps[0].time, key
            is_repeated = at in self._sums and not self._may_repeat_sums
            if is_repeated or self._sums.setdefault(at, clients) != clients:
                self._fail_invariant(f"key {key} has sums of {self._sums[at]} and {clients} at time {at[2]}")

    def _check_own(
        self, client: int, request: SimulatedRequest, values: dict[int, int], times: tuple[ClockRange, ...]
    ) -> None:
        """Check that a pull contains exactly those of the client's own pushes that its times indicate."""
        name = request.namespace
        pushed = self._pushed_at.get((name, client), {})
        for key in range(*request.span):
            upto = sum(piece.time for piece in times if piece.start <= key < piece.stop)
            expected = sum((name, key, client) in content for time, content in pushed.items() if time <= upto)
            count = _pushes_of(client, values.get(key, 0))
            if count != expected:
                self._fail_invariant(
                    f"client {client} pulled {count} of its own pushes of {(name, key)}, expected "
                    f"{expected} by its times"
                )


def client_unit(client: int) -> int:
    """Return what a push of a client adds to a value."""
    return 1 << _DIGIT_BITS * client


def _pushes_of(client: int, value: int) -> int:
    return value >> _DIGIT_BITS * client & (1 << _DIGIT_BITS) - 1


def _client(name: str) -> int:
    return int(name.removeprefix("client-"))
