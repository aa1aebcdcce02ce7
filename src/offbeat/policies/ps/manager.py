"""The manager of a parameter server as a policy of the coordinator: its nodes, and which server holds what.

Nothing here knows how a closed process is detected or what is stored.
"""

from __future__ import annotations

from typing import Any

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    AggregationJoined,
    AggregationLeft,
    AggregationPaused,
    ClusterView,
    Event,
    ForgetClient,
    Namespace,
    NamespaceRequested,
    NodeEvent,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeResumed,
    NodeSilent,
    Participant,
    Pause,
    ProgressRequested,
    RejectNamespace,
    RejectPeer,
    ServerAddress,
    ServerReachable,
    ServerRemovalRequested,
    ServerTransfer,
    ServerTransferDone,
    ServerUnreachable,
    TaskDone,
    TaskRequested,
    TauSet,
    Tick,
    WorkerGroupJoined,
    WorkerGroupLeft,
)
from offbeat.policies.ps.failure_detector import SILENCE_TIMEOUT_S, FailureDetector
from offbeat.policies.ps.hash_ring import HashRing, NamespaceSpec
from offbeat.policies.ps.messages import (
    JoinAggregation,
    LeaveAggregation,
    PauseReached,
    PlacementView,
    RingArc,
    ServerFillDone,
)
from offbeat.policies.ps.server_group import ServerGroup
from offbeat.policies.ps.worker_groups import WorkerGroupEvent, WorkerGroups

_SERVER, _CLIENT = "server-", "client-"


class PsManager:
    """Publishes the views of a `ServerGroup` to all nodes, and actions of `WorkerGroups` to clients.

    A node is gone when it leaves, when its process is closed (`NodeLost`), or when `FailureDetector` decides
    so.

    Source: the parameter server of OSDI'14, sections 3 and 4.5 ("server manager"). Deviations: of two servers
    that cannot reach each other one has to go, though the manager may reach both; the paper's task
    schedulers, one in each group of workers, are here too.

    Args:
        servers: how many there are at the start, at least 1.
        virtual_nodes, replicas: of the ring.
        silent_s: of the failure detector.

    Raises:
        ValueError: no server, or arguments that `HashRing` or `FailureDetector` rejects.
    """

    def __init__(
        self, servers: int, *, virtual_nodes: int = 16, replicas: int = 2, silent_s: float = SILENCE_TIMEOUT_S
    ) -> None:
        self._detector = FailureDetector(silent_s)
        self._waited_for: dict[str, str] = {}  # servers that are waited for, with the published reason
        self._group = ServerGroup(servers, virtual_nodes=virtual_nodes, replicas=replicas)
        self._virtual_nodes, self._replicas = virtual_nodes, replicas
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
            case NodeResumed():
                self._detector.on_recovered(event.node, event.now_s)
                return []
            case NamespaceRequested():
                return self._open(event)
            case AggregationJoined() | AggregationPaused() | AggregationLeft():
                return self._on_client(event)
            case ServerRemovalRequested():
                return self._on_server_leaves(event)
            case ServerUnreachable() | ServerReachable():
                return self._on_reachability(event)
            case ServerTransferDone():
                return self._on_filled(event)
            case (
                WorkerGroupJoined()
                | WorkerGroupLeft()
                | TaskRequested()
                | TaskDone()
                | TauSet()
                | ProgressRequested()
            ):
                return self._on_worker(event)
            case Tick():
                return [*self._detect_losses(event.now_s), *self._workers.on_tick(event)]
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
            "waited_for": dict(self._waited_for),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Policy.load_state_dict`."""
        self._group.load_state_dict(state["group"])
        self._workers.load_state_dict(state["workers"])
        self._addresses = {server: tuple(found) for server, found, _ in state["servers"]}
        self._functions = {server: tuple(found) for server, _, found in state["servers"]}
        self._needed = set(state["needed"])
        self._detector.load_state_dict(state["detector"])
        self._waited_for = dict(state["waited_for"])

    def _join(self, event: NodeJoined) -> list[Action]:
        if client_id(event.node) is not None:
            return self._publish(self._group.view, f"{event.node} has joined", node=event.node)
        server = server_id(event.node)
        if server is None:
            reason = f"expected a name such as server-3 or client-7, got {event.node}"
            return [RejectPeer(peer=event.node, reason=reason)]
        if missing := self._needed - set(event.functions):
            reason = f"expected a server that was started with the function {min(missing)}, got none"
            return [RejectPeer(peer=event.node, reason=reason)]
        try:
            view = self._group.on_joined(server)
        except ProtocolError as error:
            return [RejectPeer(peer=event.node, reason=str(error))]
        self._addresses[server], self._functions[server] = event.addresses, event.functions
        return self._publish(view, f"server {server} has joined")

    def _remove(self, event: NodeLeft | NodeLost) -> list[Action]:
        how = f"was lost: {event.cause}" if isinstance(event, NodeLost) else "has left"
        self._detector.forget(event.node)
        self._waited_for.pop(event.node, None)
        server = server_id(event.node)
        if server is None:
            client = client_id(event.node)
            if client is None:
                return self._workers.on_node_gone(event)
            gone = ForgetClient(node=event.node, reason=f"{event.node} {how}")
            return [
                gone,
                *self._publish(self._group.on_client_gone(client), gone.reason),
                *self._workers.on_node_gone(event),
            ]
        self._forget(server)
        return self._publish(self._group.on_lost(server), f"server {server} {how}")

    def _on_server_leaves(self, event: ServerRemovalRequested) -> list[Action]:
        """Let a server leave; one that is silent and waited for cannot hand over its data and is removed."""
        name = f"{_SERVER}{event.server}"
        if name in self._waited_for and self._detector.is_silent(name):
            return self._lose(event.now_s, name, f"{event.node} has given it up")
        return self._publish(self._group.on_leaving(event.server), f"server {event.server} is to leave")

    def _detect_losses(self, now_s: float) -> list[Action]:
        """Remove nodes that are lost by now, and publish which silent servers are waited for."""
        actions: list[Action] = []
        while (lost := self._detector.next_loss(now_s, self._servers(), self._is_replicated)) is not None:
            actions += self._lose(now_s, lost.node, lost.cause)
        standing = self._detector.retained_servers(now_s, self._servers())
        if standing != self._waited_for:
            ended = [f"{one} is no longer waited for" for one in self._waited_for.keys() - standing.keys()]
            self._waited_for = standing
            self._group.set_silent([one for one in self._silent() if f"{_SERVER}{one}" in standing])
            actions += self._publish(self._group.view, "; ".join([*standing.values(), *sorted(ended)]))
        return actions

    def _servers(self) -> list[str]:
        return [f"{_SERVER}{one}" for one in sorted(self._group.servers)]

    def _silent(self) -> list[int]:
        return [one for one in self._group.servers if self._detector.is_silent(f"{_SERVER}{one}")]

    def _is_replicated(self, node: str) -> bool:
        server = server_id(node)
        assert server is not None
        return self._group.has_other_replicas(server, self._silent())

    def _lose(self, now_s: float, node: str, cause: str) -> list[Action]:
        """Remove a node that may be alive, and notify it."""
        refuse = RejectPeer(peer=node, reason=f"{node} was lost: {cause}")
        return [refuse, *self._remove(NodeLost(now_s=now_s, node=node, cause=cause))]

    def _on_filled(self, event: ServerTransferDone) -> list[Action]:
        server = server_id(event.node)
        if server is None:
            reason = f"expected ServerFilled from a server, got it from {event.node}"
            return [RejectPeer(peer=event.node, reason=reason)]
        view = self._group.on_filled(ServerFillDone(server=server, view=event.view))
        return self._publish(view, "all servers have received what they gain")

    def _on_reachability(self, event: ServerUnreachable | ServerReachable) -> list[Action]:
        """Record which servers cannot reach each other; others' reports, and one on oneself, are ignored."""
        server = server_id(event.node)
        if server is None or server == event.server:
            return []
        other = f"{_SERVER}{event.server}"
        if isinstance(event, ServerReachable):
            self._detector.on_server_reachable(event.node, other)
        elif {server, event.server} <= set(self._group.servers):
            self._detector.on_server_unreachable(event.node, other, event.now_s, event.cause)
        return []

    def _open(self, event: NamespaceRequested) -> list[Action]:
        space = NamespaceSpec(event.name, event.keys, event.block_keys, event.spec, event.aggregates)
        lacking = [server for server, found in self._functions.items() if event.function not in found]
        if event.function and lacking:
            reason = f"server {lacking[0]} was started without the function {event.function}"
            return [RejectNamespace(node=event.node, name=event.name, reason=reason)]
        try:
            view = self._group.on_namespace_opened(space, event.on_loss)
        except ProtocolError as error:
            return [RejectNamespace(node=event.node, name=event.name, reason=str(error))]
        if event.function:
            self._needed.add(event.function)
        how = " and restarts from zero after losses" if event.on_loss == "reset" else ""
        return self._publish(view, f"the namespace {event.name} was opened{how}")

    def _on_worker(self, event: WorkerGroupEvent) -> list[Action]:
        return [_refuse_non_client(event)] if client_id(event.node) is None else self._workers.on_event(event)

    def _on_client(self, event: AggregationJoined | AggregationPaused | AggregationLeft) -> list[Action]:
        client, name = client_id(event.node), event.namespace
        if client is None:
            return [_refuse_non_client(event)]
        match event:
            case AggregationJoined():
                try:
                    view = self._group.on_join_aggregation(JoinAggregation(client=client, namespace=name))
                except ProtocolError as error:
                    return [RejectNamespace(node=event.node, name=name, reason=str(error))]
                return self._publish(view, f"{event.node} takes part in {name}")
            case AggregationPaused():
                reached = PauseReached(client=client, namespace=name, pause=event.pause_view, time=event.time)
                return self._publish(self._group.on_pause_reached(reached), f"all clients have paused {name}")
            case AggregationLeft():
                view = self._group.on_leave_aggregation(LeaveAggregation(client=client, namespace=name))
                return self._publish(view, f"{event.node} no longer takes part in {name}")

    def _forget(self, server: int) -> None:
        self._addresses.pop(server, None)
        self._functions.pop(server, None)

    def _publish(self, view: PlacementView | None, reason: str, *, node: str = "") -> list[Action]:
        if view is None:
            return []
        action = ClusterView(
            node=node,
            version=view.version,
            epoch=view.epoch,
            ring=view.ring.servers,
            virtual_nodes=self._virtual_nodes,
            replicas=self._replicas,
            next_ring=() if view.target is None else view.target.servers,
            transfers=tuple(
                ServerTransfer(server=server, start=arc.first, stop=arc.last)
                for server, arcs in view.filling.items()
                for arc in arcs
            ),
            namespaces=tuple(Namespace(**space._asdict()) for space in view.spaces.values()),
            participants=tuple(
                Participant(namespace=namespace, client=client, first_time=begins)
                for namespace, clients in view.participants.items()
                for client, begins in clients.items()
            ),
            paused=tuple(
                Pause(namespace=namespace, view=number) for namespace, number in view.paused.items()
            ),
            servers=tuple(
                ServerAddress(server=server, addresses=found)
                for server, found in sorted(self._addresses.items())
            ),
            reason=reason,
            lost=view.lost,
            lost_arcs_dropped=tuple((arc.first, arc.last) for arc in view.lost_arcs_dropped),
            silent_servers=view.silent_servers,
        )
        return [action]


def event_from_message(node: str, message: object) -> Event:
    """Return the event, at time 0, that reports a message of a node's policy to the manager."""
    match message:
        case ServerFillDone():
            return ServerTransferDone(now_s=0.0, node=node, view=message.view)
        case JoinAggregation():
            return AggregationJoined(now_s=0.0, node=node, namespace=message.namespace)
        case PauseReached():
            return AggregationPaused(
                now_s=0.0, node=node, namespace=message.namespace, pause_view=message.pause, time=message.time
            )
        case LeaveAggregation():
            return AggregationLeft(now_s=0.0, node=node, namespace=message.namespace)
    raise AssertionError(f"a node sends no {type(message).__name__} to the manager")


def view_from_action(action: ClusterView) -> PlacementView:
    """Return the view that a manager has published."""
    filling: dict[int, tuple[RingArc, ...]] = {}
    for one in action.transfers:
        filling[one.server] = (*filling.get(one.server, ()), RingArc(first=one.start, last=one.stop))

    participants: dict[str, dict[int, int]] = {}
    for participant in action.participants:
        participants.setdefault(participant.namespace, {})[participant.client] = participant.first_time

    def ring_of(servers: tuple[int, ...]) -> HashRing:
        return HashRing(servers, virtual_nodes=action.virtual_nodes, replicas=action.replicas)

    return PlacementView(
        version=action.version,
        epoch=action.epoch,
        ring=ring_of(action.ring),
        spaces={
            space.name: NamespaceSpec(space.name, space.keys, space.block_keys, space.spec, space.aggregates)
            for space in action.namespaces
        },
        filling=filling,
        target=ring_of(action.next_ring) if action.next_ring else None,
        participants=participants,
        paused={pause.namespace: pause.view for pause in action.paused},
        lost=action.lost,
        lost_arcs_dropped=tuple(RingArc(first=first, last=last) for first, last in action.lost_arcs_dropped),
        silent_servers=action.silent_servers,
    )


def server_id(node: str) -> int | None:
    """Return a server's id from its node name; None if the node is no server."""
    return _number(node, _SERVER)


def _refuse_non_client(event: NodeEvent) -> RejectPeer:
    reason = f"expected {type(event).__name__} from a client, got it from {event.node}"
    return RejectPeer(peer=event.node, reason=reason)


def client_id(node: str) -> int | None:
    """Return a client's id from its node name; None if the node is no client."""
    return _number(node, _CLIENT)


def _number(node: str, kind: str) -> int | None:
    number = node.removeprefix(kind)
    is_one = node.startswith(kind) and number.isdecimal() and node == f"{kind}{int(number)}"
    return int(number) if is_one else None
