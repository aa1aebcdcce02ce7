"""The manager of a parameter server as a policy of the coordinator: its nodes, and which server holds what.

Nothing here knows how a closed process is detected or what is stored.
"""

from __future__ import annotations

from typing import Any

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    ClientEnlists,
    ClientGone,
    ClientPaused,
    ClientWithdraws,
    Event,
    Filling,
    Namespace,
    NodeEvent,
    NodeHeard,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeSilent,
    Participant,
    Pause,
    ProgressWanted,
    Refuse,
    Server,
    ServerFilled,
    ServerLeaves,
    ServerMissed,
    ServerReached,
    SpaceOpened,
    SpaceRefused,
    TaskDone,
    TaskWanted,
    TauSet,
    Tick,
    Viewed,
    WorkerJoins,
    WorkerLeaves,
)
from offbeat.policies.ps.failure_detector import SILENT_S, FailureDetector
from offbeat.policies.ps.hash_ring import Ring, Space
from offbeat.policies.ps.messages import Arc, Enlist, Filled, Reached, View, Withdraw
from offbeat.policies.ps.server_group import ServerGroup
from offbeat.policies.ps.worker_groups import Said, WorkerGroups

_SERVER, _CLIENT = "server-", "client-"


class Manager:
    """Publishes the views of a `ServerGroup` to all nodes, and actions of `WorkerGroups` to clients.

    A node is gone when it leaves, when its process is closed (`NodeLost`), or when `FailureDetector` decides
    so.

    Source: the parameter server of OSDI'14, sections 3 and 4.5 ("server manager"). Deviations: of two servers
    that cannot reach each other one has to go, though the manager may reach both; the paper's task
    schedulers, one in each group of workers, are here too.

    Args:
        servers: how many there are at the start, at least 1.
        virtual_nodes, copies: of the ring.
        silent_s: of the failure detector.

    Raises:
        ValueError: no server, or arguments that `Ring` or `FailureDetector` rejects.
    """

    def __init__(
        self, servers: int, *, virtual_nodes: int = 16, copies: int = 2, silent_s: float = SILENT_S
    ) -> None:
        self._detector = FailureDetector(silent_s)
        self._standing: dict[str, str] = {}  # servers that are waited for, with the published reason
        self._group = ServerGroup(servers, virtual_nodes=virtual_nodes, copies=copies)
        self._virtual_nodes, self._copies = virtual_nodes, copies
        self._workers = WorkerGroups()
        self._addresses: dict[int, tuple[str, ...]] = {}
        self._functions: dict[int, tuple[str, ...]] = {}
        self._needed: set[str] = set()  # functions that opened namespaces use

    def handle(self, event: Event) -> list[Action]:
        """See `Policy.handle`."""
        match event:
            case NodeJoined():
                return self._join(event)
            case NodeLeft() | NodeLost():
                return self._remove(event)
            case NodeSilent():
                self._detector.on_silent(event.node, event.now_s - event.silent_s)
                return []
            case NodeHeard():
                self._detector.on_heard(event.node, event.now_s)
                return []
            case SpaceOpened():
                return self._open(event)
            case ClientEnlists() | ClientPaused() | ClientWithdraws():
                return self._on_client(event)
            case ServerLeaves():
                return self._on_server_leaves(event)
            case ServerMissed() | ServerReached():
                return self._on_reachability(event)
            case ServerFilled():
                return self._on_filled(event)
            case WorkerJoins() | WorkerLeaves() | TaskWanted() | TaskDone() | TauSet() | ProgressWanted():
                return self._on_worker(event)
            case Tick():
                return [*self._detect_losses(event.now_s), *self._workers.tick(event)]
        return []

    def state_dict(self) -> dict[str, Any]:
        """See `Policy.state_dict`."""
        return {
            "group": self._group.state_dict(),
            "workers": self._workers.state_dict(),
            "servers": [
                [server, list(found), list(self._functions[server])]
                for server, found in self._addresses.items()
            ],
            "needed": sorted(self._needed),
            "detector": self._detector.state_dict(),
            "standing": dict(self._standing),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Policy.load_state_dict`."""
        self._group.load_state_dict(state["group"])
        self._workers.load_state_dict(state["workers"])
        self._addresses = {server: tuple(found) for server, found, _ in state["servers"]}
        self._functions = {server: tuple(found) for server, _, found in state["servers"]}
        self._needed = set(state["needed"])
        self._detector.load_state_dict(state["detector"])
        self._standing = dict(state["standing"])

    def _join(self, event: NodeJoined) -> list[Action]:
        if client_of(event.node) is not None:
            return self._publish(self._group.view, f"{event.node} has joined", node=event.node)
        server = server_of(event.node)
        if server is None:
            reason = f"expected a name such as server-3 or client-7, got {event.node}"
            return [Refuse(peer=event.node, reason=reason)]
        if missing := self._needed - set(event.functions):
            reason = f"expected a server that was started with the function {min(missing)}, got none"
            return [Refuse(peer=event.node, reason=reason)]
        try:
            view = self._group.joined(server)
        except ProtocolError as error:
            return [Refuse(peer=event.node, reason=str(error))]
        self._addresses[server], self._functions[server] = event.addresses, event.functions
        return self._publish(view, f"server {server} has joined")

    def _remove(self, event: NodeLeft | NodeLost) -> list[Action]:
        how = f"was lost: {event.cause}" if isinstance(event, NodeLost) else "has left"
        self._detector.forget(event.node)
        self._standing.pop(event.node, None)
        server = server_of(event.node)
        if server is None:
            client = client_of(event.node)
            if client is None:
                return self._workers.part(event)
            gone = ClientGone(node=event.node, reason=f"{event.node} {how}")
            return [
                gone,
                *self._publish(self._group.client_gone(client), gone.reason),
                *self._workers.part(event),
            ]
        self._forget(server)
        return self._publish(self._group.lost(server), f"server {server} {how}")

    def _on_server_leaves(self, event: ServerLeaves) -> list[Action]:
        """Let a server leave; one that is silent and waited for cannot hand over its data and is removed."""
        name = f"{_SERVER}{event.server}"
        if name in self._standing and self._detector.is_silent(name):
            return self._lose(event.now_s, name, f"{event.node} has given it up")
        return self._publish(self._group.leaves(event.server), f"server {event.server} is to leave")

    def _detect_losses(self, now_s: float) -> list[Action]:
        """Remove nodes that are lost by now, and publish which silent servers are waited for."""
        actions: list[Action] = []
        while (lost := self._detector.next_lost(now_s, self._servers(), self._may_lose)) is not None:
            actions += self._lose(now_s, lost.node, lost.cause)
        standing = self._detector.standing(now_s, self._servers())
        if standing != self._standing:
            ended = [f"{one} is no longer waited for" for one in self._standing.keys() - standing.keys()]
            self._standing = standing
            self._group.note_silent([one for one in self._silent() if f"{_SERVER}{one}" in standing])
            actions += self._publish(self._group.view, "; ".join([*standing.values(), *sorted(ended)]))
        return actions

    def _servers(self) -> list[str]:
        return [f"{_SERVER}{one}" for one in sorted(self._group.servers)]

    def _silent(self) -> list[int]:
        return [one for one in self._group.servers if self._detector.is_silent(f"{_SERVER}{one}")]

    def _may_lose(self, node: str) -> bool:
        server = server_of(node)
        assert server is not None
        return self._group.may_lose(server, self._silent())

    def _lose(self, now_s: float, node: str, cause: str) -> list[Action]:
        """Remove a node that may be alive, and notify it."""
        refuse = Refuse(peer=node, reason=f"{node} was lost: {cause}")
        return [refuse, *self._remove(NodeLost(now_s=now_s, node=node, cause=cause))]

    def _on_filled(self, event: ServerFilled) -> list[Action]:
        server = server_of(event.node)
        if server is None:
            reason = f"expected ServerFilled from a server, got it from {event.node}"
            return [Refuse(peer=event.node, reason=reason)]
        view = self._group.filled(Filled(server=server, view=event.view))
        return self._publish(view, "all servers have received what they gain")

    def _on_reachability(self, event: ServerMissed | ServerReached) -> list[Action]:
        """Record which servers cannot reach each other; reports of clients are ignored."""
        server = server_of(event.node)
        if server is None:
            return []
        other = f"{_SERVER}{event.server}"
        if isinstance(event, ServerReached):
            self._detector.on_reached(event.node, other)
        elif {server, event.server} <= set(self._group.servers):
            self._detector.on_missed(event.node, other, event.now_s, event.cause)
        return []

    def _open(self, event: SpaceOpened) -> list[Action]:
        space = Space(event.name, event.keys, event.block_keys, event.about, event.aggregates)
        lacking = [server for server, found in self._functions.items() if event.function not in found]
        if event.function and lacking:
            reason = f"server {lacking[0]} was started without the function {event.function}"
            return [SpaceRefused(node=event.node, name=event.name, reason=reason)]
        try:
            view = self._group.opened(space, event.on_loss)
        except ProtocolError as error:
            return [SpaceRefused(node=event.node, name=event.name, reason=str(error))]
        if event.function:
            self._needed.add(event.function)
        how = " and restarts from zero after losses" if event.on_loss == "reset" else ""
        return self._publish(view, f"the namespace {event.name} was opened{how}")

    def _on_worker(self, event: Said) -> list[Action]:
        return [_refuse_non_client(event)] if client_of(event.node) is None else self._workers.hear(event)

    def _on_client(self, event: ClientEnlists | ClientPaused | ClientWithdraws) -> list[Action]:
        client, name = client_of(event.node), event.namespace
        if client is None:
            return [_refuse_non_client(event)]
        match event:
            case ClientEnlists():
                try:
                    view = self._group.enlisted(Enlist(client=client, namespace=name))
                except ProtocolError as error:
                    return [SpaceRefused(node=event.node, name=name, reason=str(error))]
                return self._publish(view, f"{event.node} takes part in {name}")
            case ClientPaused():
                reached = Reached(client=client, namespace=name, pause=event.pause, time=event.time)
                return self._publish(self._group.reached(reached), f"all clients have paused {name}")
            case ClientWithdraws():
                view = self._group.withdrawn(Withdraw(client=client, namespace=name))
                return self._publish(view, f"{event.node} no longer takes part in {name}")

    def _forget(self, server: int) -> None:
        self._addresses.pop(server, None)
        self._functions.pop(server, None)

    def _publish(self, view: View | None, reason: str, *, node: str = "") -> list[Action]:
        if view is None:
            return []
        viewed = Viewed(
            node=node,
            number=view.number,
            epoch=view.epoch,
            ring=view.ring.servers,
            virtual_nodes=self._virtual_nodes,
            copies=self._copies,
            target=() if view.target is None else view.target.servers,
            filling=tuple(
                Filling(server=server, first=arc.first, last=arc.last)
                for server, arcs in view.filling.items()
                for arc in arcs
            ),
            namespaces=tuple(Namespace(**space._asdict()) for space in view.spaces.values()),
            participants=tuple(
                Participant(namespace=namespace, client=client, begins=begins)
                for namespace, clients in view.participants.items()
                for client, begins in clients.items()
            ),
            paused=tuple(
                Pause(namespace=namespace, view=number) for namespace, number in view.paused.items()
            ),
            servers=tuple(
                Server(server=server, addresses=found) for server, found in sorted(self._addresses.items())
            ),
            reason=reason,
            lost=view.lost,
            emptied=tuple((arc.first, arc.last) for arc in view.emptied),
            silent=view.silent,
        )
        return [viewed]


def view_of(viewed: Viewed) -> View:
    """Return the view that a manager has published."""
    filling: dict[int, tuple[Arc, ...]] = {}
    for one in viewed.filling:
        filling[one.server] = (*filling.get(one.server, ()), Arc(first=one.first, last=one.last))

    participants: dict[str, dict[int, int]] = {}
    for participant in viewed.participants:
        participants.setdefault(participant.namespace, {})[participant.client] = participant.begins

    def ring_of(servers: tuple[int, ...]) -> Ring:
        return Ring(servers, virtual_nodes=viewed.virtual_nodes, copies=viewed.copies)

    return View(
        number=viewed.number,
        epoch=viewed.epoch,
        ring=ring_of(viewed.ring),
        spaces={
            space.name: Space(space.name, space.keys, space.block_keys, space.about, space.aggregates)
            for space in viewed.namespaces
        },
        filling=filling,
        target=ring_of(viewed.target) if viewed.target else None,
        participants=participants,
        paused={pause.namespace: pause.view for pause in viewed.paused},
        lost=viewed.lost,
        emptied=tuple(Arc(first=first, last=last) for first, last in viewed.emptied),
        silent=viewed.silent,
    )


def server_of(node: str) -> int | None:
    """Return a server's id from its node name; None if the node is no server."""
    return _number(node, _SERVER)


def _refuse_non_client(event: NodeEvent) -> Refuse:
    reason = f"expected {type(event).__name__} from a client, got it from {event.node}"
    return Refuse(peer=event.node, reason=reason)


def client_of(node: str) -> int | None:
    """Return a client's id from its node name; None if the node is no client."""
    return _number(node, _CLIENT)


def _number(node: str, kind: str) -> int | None:
    number = node.removeprefix(kind)
    is_one = node.startswith(kind) and number.isdecimal() and node == f"{kind}{int(number)}"
    return int(number) if is_one else None
