"""A simulated parameter server: clients that count, servers that join, leave and die, and a faulty network.

The network loses, repeats and reorders packets, resets connections, and separates nodes, in one direction or
both, a single pair or all nodes behind one switch, for up to twice as long as a silence that counts as a
death. No cut may lose anything that was acknowledged, and 3 s after the last one all requests must be done.

Every push adds 1 to some keys, in a digit that belongs to its client. At the end each key must equal what was
pushed to it, on its master and on every replica: no acknowledged push is lost, none is applied twice. Where
pushes are summed, none is acknowledged without those of all other participants. A pull that asks for the
times of the client's own pushes contains exactly these pushes. The policies decide; nothing here does.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

from offbeat.events import (
    Action,
    ClusterView,
    Event,
    ForgetClient,
    NamespaceRequested,
    NodeJoined,
    NodeLost,
    NodeResumed,
    NodeSilent,
    RejectPeer,
    ServerReachable,
    ServerRemovalRequested,
    ServerUnreachable,
    Tick,
)
from offbeat.policies.ps.client import PsClient, RequestDone, RequestFailed
from offbeat.policies.ps.clocked_store import TableStore
from offbeat.policies.ps.failure_detector import SILENCE_TIMEOUT_S
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.policies.ps.manager import PsManager, event_from_message, view_from_action
from offbeat.policies.ps.messages import (
    Payload,
    PlacementView,
    Push,
)
from offbeat.policies.ps.server_node import MANAGER, SendMessage, ServerNode
from offbeat.simulator.core.engine import Engine
from offbeat.simulator.ps.ledger import PushCounter, RequestLedger, client_unit
from offbeat.simulator.ps.network import NodeStates, PacketNetwork
from offbeat.simulator.ps.trial import PsTrial, Workload
from offbeat.simulator.training.cluster import ViolationError

_FAULTS_END = 30  # faults occur during the first so many requests of a client
_FAULTS = (
    *("die", "die", "be called dead", "come", "leave"),
    *("cut", "restart", "client comes", "client dies", "namespace comes"),
)
_FAULTS_OF_NETWORKS = ("cut one way", "switch", "switch", "reset", "reset", "vanish")
_CHANGES_OF_MASTERS = ("come", "leave") * 3  # additional ones, where pushes are summed
_QUIET_S = 120.0  # virtual; requests that wait until then count as stuck
_TICK_S = 0.25
_UNREACHABLE_S = 1.25  # silence after which a node is reported
_DIALS_S = 1.0  # time within which a mended line is used
_RECOVERY_S = 3.0  # time within which all requests continue after the last fault

MakeManager = Callable[..., PsManager]
MakeNode = Callable[[int, TableStore], ServerNode]
MakeClient = Callable[[int, Callable[[Payload, int, int], Payload]], PsClient]


class CountTable:
    """A table of integers."""

    def __init__(self) -> None:
        self.values: Counter[int] = Counter()

    reads_pushes_once = True

    def check(self, content: dict[int, int], first: int, last: int) -> None:
        """See `ServerTable.check`."""

    def dry_run(self, first: int, last: int, content: Payload) -> None:
        """See `ServerTable.dry_run`."""

    def apply(self, first: int, last: int, content: Payload) -> None:
        """See `ServerTable.apply`."""
        self.values.update(content)

    def read(self, first: int, last: int, keys: Payload | None, states: bool = False) -> Payload:
        """See `ServerTable.read`; simulated clients list no keys and request no states."""
        return slice_content(self.values, first, last)

    def key_range(self, content: Payload, first: int, last: int) -> Payload:
        """See `ServerTable.key_range`."""
        return slice_content(content, first, last)

    def combine(self, contents: Sequence[Payload], first: int, last: int) -> Payload:
        """See `ServerTable.combine`."""
        total: Counter[int] = Counter()
        for content in contents:
            total.update(slice_content(content, first, last))
        return total

    def export_block(self, first: int, last: int) -> Payload:
        """See `ServerTable.export_block`."""
        return slice_content(self.values, first, last)

    def import_block(self, first: int, last: int, content: Payload) -> None:
        """See `ServerTable.import_block`."""
        self.remove_block(first, last)
        self.values.update(content)

    def remove_block(self, first: int, last: int) -> None:
        """See `ServerTable.remove_block`."""
        for key in [key for key in self.values if first <= key < last]:
            del self.values[key]


class SimulatedStore:
    """The tables of one server."""

    def __init__(self) -> None:
        self._tables: dict[str, CountTable] = {}

    def table(self, space: NamespaceSpec) -> CountTable:
        """See `TableStore.table`."""
        return self._tables.setdefault(space.name, CountTable())


def slice_content(content: dict[int, int], first: int, last: int) -> dict[int, int]:
    """Return the content for keys `first` to `last` - 1."""
    return {key: count for key, count in content.items() if first <= key < last}


class PsSimulation:
    """One trial; `run` raises if an invariant is violated.

    Args:
        trial: the parameters.
        make_node, make_client, make_manager: make a server, a client, and the manager.

    Attributes:
        published_views: all views that the manager published, each once.
        requests: requests of the clients so far.

    Size: faults, requests, deliveries and the manager's decisions all start, stop and count the same nodes;
    a class for some of them would have to call back into the others for each node that comes or goes.
    """

    def __init__(
        self,
        trial: PsTrial,
        make_node: MakeNode = ServerNode,
        make_client: MakeClient = PsClient,
        make_manager: MakeManager = PsManager,
    ) -> None:
        self.trial = trial
        self.published_views: list[PlacementView] = []
        self.requests = 0
        self._make_node, self._make_client, self._manager_factory = make_node, make_client, make_manager
        self._engine = Engine()
        self._chance = random.Random(f"serving {trial.seed}")
        self._option_chance = random.Random(f"whims {trial.seed}")  # for options of requests
        self._workload = Workload(trial, self._option_chance)
        self._spaces = [
            NamespaceSpec(f"space {number}", trial.keys, trial.block_keys, "", aggregates=bool(number))
            for number in range(1 + trial.aggregates)
        ]
        self._manager = self._make_manager()
        self._opened = {space.name for space in self._spaces}
        for space in self._spaces:
            self._manager.handle(self._space_opened(space))
        self._nodes: dict[int, ServerNode] = {}
        self._stores: dict[int, SimulatedStore] = {}
        self._clients = {number: make_client(number, slice_content) for number in range(trial.clients)}
        self._left_to_push = dict.fromkeys(self._clients, trial.pushes_per_client)
        self._states = NodeStates()
        self._network = PacketNetwork(self._engine, trial, self._chance, self._states, self._receive)
        self._reported_silent: set[tuple[str, str]] = set()  # sender and receiver
        self._ends_s = 0.0  # the end of the last fault
        # Where packets are lost, some retransmissions are lost, too.
        self._recovery_s = 2 * _RECOVERY_S if trial.loss_share else _RECOVERY_S
        self._states.joined.update(f"client-{client}" for client in self._clients)
        self._withdrawn: set[tuple[str, int]] = set()  # namespaces, and clients that have withdrawn from them
        self._ledger = RequestLedger(self._fail_invariant, may_repeat_sums=bool(trial.faults))
        for client in self._clients:
            self._ledger.add_client(client)

    def run(self) -> None:
        """Run the trial to its end.

        Raises:
            ViolationError: an invariant was violated.
        """
        engine = self._engine
        for server in range(self.trial.servers):
            self._start_server(server)
        for client in self._clients:
            engine.schedule(self._chance.random() * 0.01, self._make_request, client)
        pace_s = self.trial.request_interval_s_max
        for _ in range(self.trial.faults):
            engine.schedule(pace_s + self._chance.random() * (_FAULTS_END - 1) * pace_s, self._inject_fault)
        engine.schedule(_TICK_S, self._tick_manager)
        engine.run(_QUIET_S)
        self._check_the_end()

    # Faults ----------------------------------------------------------------------------------------------

    def _make_manager(self) -> PsManager:
        trial = self.trial
        return self._manager_factory(
            trial.servers, virtual_nodes=trial.virtual_nodes, replicas=trial.replicas
        )

    def _space_opened(self, space: NamespaceSpec) -> NamespaceRequested:
        now_s = self._engine.now_s
        return NamespaceRequested(now_s=now_s, node="client-0", function="", **space._asdict())

    def _node_joined(self, node: str) -> NodeJoined:
        return NodeJoined(now_s=self._engine.now_s, node=node, addresses=("somewhere",), functions=())

    def _start_server(self, server: int) -> None:
        self._stores[server] = SimulatedStore()
        self._nodes[server] = self._make_node(server, self._stores[server])
        self._send(f"server-{server}", MANAGER, [self._node_joined(f"server-{server}")])

    def _tick_manager(self, _: None) -> None:
        now_s = self._engine.now_s
        self._decide(Tick(now_s=now_s))
        self._engine.schedule(now_s + _TICK_S, self._tick_manager)
        settled_s = self._ends_s + self._recovery_s
        if self._states.vanished:
            settled_s += _UNREACHABLE_S + SILENCE_TIMEOUT_S + _DIALS_S + _TICK_S
        if now_s - _TICK_S < settled_s <= now_s:
            self._check_progress()

    def _inject_fault(self, _: None) -> None:
        chance, now_s = self._chance, self._engine.now_s
        alive = [server for server in self._nodes if server not in self._states.doomed]
        self._ends_s = max(self._ends_s, now_s)
        faults = _FAULTS + _FAULTS_OF_NETWORKS * (1 if self.trial.cut_s_max < SILENCE_TIMEOUT_S else 3)
        kind = chance.choice(faults + _CHANGES_OF_MASTERS if self.trial.aggregates else faults)
        if kind == "come":
            self._start_server(len(self._nodes))
        elif kind == "leave" and len(alive) > len(self._states.leaving) + 1:
            self._states.leaving.add(chance.choice(alive))
            leaving = [
                ServerRemovalRequested(now_s=now_s, node="client-0", server=server)
                for server in self._states.leaving
            ]
            self._send("client-0", MANAGER, leaving)
        elif kind in ("cut", "cut one way", "switch", "reset"):
            names = [f"server-{server}" for server in alive] + [
                f"client-{client}" for client in self._clients
            ]
            self._disturb(kind, [*names, MANAGER])
        elif kind == "restart":
            state = json.loads(json.dumps(self._manager.state_dict()))
            self._manager = self._make_manager()
            self._manager.load_state_dict(state)
        elif kind == "namespace comes":
            name, keys = f"space {len(self._spaces)}", self.trial.keys
            aggregates = self.trial.aggregates and chance.random() < 0.5
            self._spaces.append(NamespaceSpec(name, keys, chance.randint(1, keys), "", aggregates=aggregates))
            self._send("client-0", MANAGER, [self._space_opened(self._spaces[-1])])
        elif kind == "client comes":
            client = len(self._clients)
            self._clients[client] = self._make_client(client, slice_content)
            self._left_to_push[client] = self.trial.pushes_per_client
            self._ledger.add_client(client)
            self._send(f"client-{client}", MANAGER, [self._node_joined(f"client-{client}")])
            self._make_request(client)
        elif kind == "client dies":
            self._doom_a_client(0.03)
        elif kind in ("die", "be called dead", "vanish") and self._may_lose_one(alive):
            server = chance.choice(alive)
            if self._may_lose(server, kind):
                self._doom_a_server(server, kind)

    def _doom_a_server(self, server: int, kind: str) -> None:
        name, now_s = f"server-{server}", self._engine.now_s
        self._states.doomed.add(server)
        if kind != "be called dead":
            self._states.dead.add(name)
        if kind == "vanish":
            self._states.vanished.add(server)
            self._cut_off([(name, MANAGER)], 2 * _QUIET_S)
        else:
            self._engine.schedule(now_s + 0.001 + self._chance.random() * 0.03, self._lose, server)

    def _may_lose(self, server: int, kind: str) -> bool:
        """Whether the simulation may lose a server by a fault of this kind without losing data.

        The kinds are "die", "be called dead" and "vanish". If no separation lasts long enough for a server to
        be called dead, every kind but "vanish" is allowed. Otherwise servers that are neither separated nor
        about to be lost must have all that this one has, and of the servers of the group at most half may
        have vanished, this one included.
        """
        if self.trial.cut_s_max < SILENCE_TIMEOUT_S:
            return kind != "vanish"
        now_s, servers = self._engine.now_s, self._manager._group.servers
        cut_off = {
            node for pair, (_, until_s) in self._network.cut_s.items() if now_s < until_s for node in pair
        }
        shaky = {server for server in self._nodes if f"server-{server}" in cut_off} | self._states.doomed
        vanished = len(self._states.vanished.intersection(servers)) + (kind == "vanish")
        return self._manager._group.has_other_replicas(server, shaky) and 2 * vanished <= len(servers)

    def _disturb(self, kind: str, names: Sequence[str]) -> None:
        """Disturb the network between two of these nodes, or between some of them and the rest."""
        if len(names) < 2:
            return
        chance = self._chance
        one, other = chance.sample(names, 2)
        if kind == "reset":
            self._network.reset(one, other)
            return
        pairs = [(one, other), (other, one)]
        if kind == "cut one way":
            pairs = pairs[:1]
        elif kind == "switch":
            some = set(chance.sample(names, chance.randint(1, len(names) - 1)))
            pairs = [(a, b) for a in names for b in names if (a in some) != (b in some)]
        self._cut_off(pairs, chance.random() * self.trial.cut_s_max)

    def _cut_off(self, pairs: Iterable[tuple[str, str]], length_s: float) -> None:
        """Cut the packets from the first of each pair to the second for a while."""
        now_s = self._engine.now_s
        for pair in pairs:
            until_s = self._network.cut(pair, length_s)
            self._engine.schedule(now_s + _UNREACHABLE_S, self._report_silence, pair)
            if until_s < _QUIET_S:
                self._ends_s = max(self._ends_s, until_s)
                self._engine.schedule(until_s + self._chance.random() * _DIALS_S, self._report_recovery, pair)

    def _report_silence(self, pair: tuple[str, str]) -> None:
        """Report to the manager that a cut has lasted long enough to be noticed."""
        (sender, to), now_s = pair, self._engine.now_s
        if (
            not self._network.is_cut(sender, to)
            or pair in self._reported_silent
            or sender not in self._states.joined
        ):
            return
        silent_s = now_s - self._network.cut_s[pair][0]
        if silent_s < _UNREACHABLE_S * 0.999:
            return
        if to == MANAGER:
            self._reported_silent.add(pair)
            self._observe(sender, NodeSilent(now_s=now_s, node=sender, silent_s=silent_s))
        elif to.startswith("server-") and sender.startswith("server-"):
            self._reported_silent.add(pair)
            missed = ServerUnreachable(now_s=now_s, node=to, server=_number(sender), cause="nothing has come")
            self._send(to, MANAGER, [missed])

    def _report_recovery(self, pair: tuple[str, str]) -> None:
        (sender, to), now_s = pair, self._engine.now_s
        if self._network.is_cut(sender, to) or pair not in self._reported_silent:
            return
        self._reported_silent.discard(pair)
        if to == MANAGER:
            self._observe(sender, NodeResumed(now_s=now_s, node=sender))
        else:
            self._send(to, MANAGER, [ServerReachable(now_s=now_s, node=to, server=_number(sender))])

    def _observe(self, node: str, event: Event) -> None:
        """Let the manager handle an observation of a node, unless it has dropped the node."""
        if node not in self._states.forgotten:
            self._decide(event)

    def _doom_a_client(self, within_s: float) -> None:
        """Let a random client die, or be declared dead."""
        alive = [client for client in self._clients if client and client not in self._states.doomed_clients]
        if not alive:
            return
        chance, client = self._chance, self._chance.choice(alive)
        self._ends_s = max(self._ends_s, self._engine.now_s)
        self._states.doomed_clients.add(client)
        if chance.random() < 0.5:
            self._states.dead.add(f"client-{client}")
        self._engine.schedule(self._engine.now_s + chance.random() * within_s, self._lose_client, client)

    def _lose_client(self, client: int) -> None:
        self._lose_node(f"client-{client}")

    def _may_lose_one(self, alive: list[int]) -> bool:
        """Whether one more server may be lost without losing data."""
        view = self._manager._group.view
        if view is None:
            return False
        replaced = {server for server in view.ring.servers if server in alive and server not in view.filling}
        are_enough = len(view.ring.servers) - len(replaced) < self.trial.replicas
        return are_enough and len(replaced - self._states.leaving) > 1

    def _lose(self, server: int) -> None:
        self._lose_node(f"server-{server}")

    def _lose_node(self, name: str) -> None:
        """Report a closed process, once that can be observed, or refuse a node."""
        if name in self._states.forgotten:
            return
        now_s = self._engine.now_s
        if name in self._states.dead and self._network.is_cut(name, MANAGER):
            self._ends_s = max(self._ends_s, self._network.cut_s[name, MANAGER][1])
            self._engine.schedule(self._network.cut_s[name, MANAGER][1], self._lose_node, name)
            return
        self._decide(NodeLost(now_s=now_s, node=name, cause="it was closed"))
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Stop the manager's communication with a node, dead or alive, after a last message that says so."""
        if name not in self._states.forgotten:
            self._send(MANAGER, name, [RejectPeer(peer=name, reason="it was lost")])
            self._states.forgotten.add(name)

    def _ignore(self, node: str, other: str) -> None:
        """Stop the communication of a node with another one."""
        self._states.ignored.setdefault(node, set()).add(other)
        self._network.drop_channel(node, other)

    def _make_request(self, client: int) -> None:
        """Make a request, and schedule the next."""
        name = f"client-{client}"
        if name in self._states.dead:
            return
        if not self._left_to_push[client]:
            self._withdraw_when_done(client)
            return
        chance, workload, now_s = self._chance, self._workload, self._engine.now_s
        space = chance.choice([space for space in self._spaces if space.name in self._opened])
        self._engine.schedule(
            self._engine.now_s + chance.random() * self.trial.request_interval_s_max,
            self._make_request,
            client,
        )
        protocol = self._clients[client]
        is_pull = chance.random() < 0.3
        is_free = is_pull or not space.aggregates
        found = workload.some_keys(chance) if is_free else workload.next_keys(protocol, space)
        if found is None:
            self._dispatch(name, protocol.join_aggregation(space.name))
            return
        first, last = found
        self.requests += 1
        if is_pull:
            wants_times = self._option_chance.random() < 0.5
            number, outputs = protocol.pull(space.name, first, last, times=wants_times)
            request = self._ledger.pulled(client, space, found, now_s, wants_times=wants_times)
        else:
            self._left_to_push[client] -= 1
            content = {key: client_unit(client) for key in range(first, last) if chance.random() < 0.5}
            if self._option_chance.random() < 0.1:
                content = {}  # an empty push
            time, wants_values = workload.time_of(protocol, space), not self.requests % 3
            number, outputs = protocol.push(space.name, content, first, last, time, wants_values=wants_values)
            request = self._ledger.pushed(client, space, found, now_s, content, wants_values=wants_values)
        self._ledger.requests[client, number] = self._ledger.open[client, number] = request
        self._dispatch(name, outputs)

    def _withdraw_when_done(self, client: int) -> None:
        """Withdraw a client from sums after its last push, so that other clients do not wait for it."""
        if self._left_to_push[client]:
            return
        pushing = self._ledger.namespaces_being_pushed(client)
        for space in self._spaces:
            if space.aggregates and space.name not in pushing and (space.name, client) not in self._withdrawn:
                self._withdrawn.add((space.name, client))
                self._dispatch(f"client-{client}", self._clients[client].leave_aggregation(space.name))

    # The nodes -------------------------------------------------------------------------------------------

    def _receive(self, name: str, sender: str, message: Any) -> None:
        if name == MANAGER:
            self._on_manager_message(sender, message)
        elif isinstance(message, RejectPeer):
            self._states.dead.add(name)  # the node ends
        elif isinstance(message, ForgetClient):
            self._ignore(name, message.node)
        elif name.startswith("client-"):
            client = self._clients[_number(name)]
            if isinstance(message, PlacementView):
                self._ignore_departed(name, client._view, message)
            self._dispatch(
                name,
                client.on_view(message) if isinstance(message, PlacementView) else client.on_message(message),
            )
        else:
            node = self._nodes[_number(name)]
            if isinstance(message, PlacementView):
                self._ignore_departed(name, node.view, message)
            outputs = (
                node.on_view(message)
                if isinstance(message, PlacementView)
                else node.on_message(sender, message)
            )
            self._ledger.check_answers(node, outputs)
            self._dispatch(name, outputs)

    def _ignore_departed(self, name: str, before: PlacementView | None, after: PlacementView) -> None:
        there = {*after.ring.servers, *(() if after.target is None else after.target.servers)}
        for server in () if before is None else before.ring.servers:
            if server not in there:
                self._ignore(name, f"server-{server}")

    def _on_manager_message(self, sender: str, message: Any) -> None:
        if isinstance(message, NodeJoined):
            self._states.joined.add(message.node)
        elif isinstance(message, NamespaceRequested):
            self._opened.add(message.name)
        event = message if isinstance(message, get_args(Event)) else event_from_message(sender, message)
        self._decide(replace(event, now_s=self._engine.now_s))

    def _decide(self, event: Event) -> None:
        if (
            isinstance(event, ServerRemovalRequested)
            and f"server-{event.server}" in self._manager._waited_for
        ):
            return  # a server that is waited for is not given up, so that no data is lost
        for action in self._manager.handle(event):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case ClusterView(node=""):
                self._broadcast(view_from_action(action))
            case ClusterView():
                self._send(MANAGER, action.node, [view_from_action(action)])
            case RejectPeer():
                self._forget(action.peer)
            case ForgetClient():
                for server in self._nodes:
                    self._send(MANAGER, f"server-{server}", [action])
            case _:
                raise AssertionError(f"the manager decided {action}")

    def _broadcast(self, view: PlacementView) -> None:
        before = self.published_views[-1] if self.published_views else view
        if before is view or before.version < view.version:
            self.published_views.append(view)
        for name in [f"server-{number}" for number in self._nodes] + [
            f"client-{number}" for number in self._clients
        ]:
            self._send(MANAGER, name, [view])
        servers = view.ring.servers
        if self.trial.aggregates and servers != before.ring.servers and self._chance.random() < 0.5:
            self._doom_a_client(0.006)
            if not self.trial.cut_s_max > SILENCE_TIMEOUT_S:
                self._disturb("cut", [f"server-{server}" for server in servers])

    def _dispatch(self, name: str, outputs: Iterable[SendMessage | RequestDone | RequestFailed]) -> None:
        """Send a node's messages, and process a client's results."""
        by_receiver: dict[str, list[Any]] = {}
        for output in outputs:
            if isinstance(output, RequestDone):
                self._done(_number(name), output)
            elif isinstance(output, RequestFailed):
                self._fail_invariant(f"{name} was refused a request: {output.reason}")
            else:
                if isinstance(output.message, Push):
                    self._ledger.on_push_sent(output.message)
                by_receiver.setdefault(output.to, []).append(output.message)
        for to, messages in by_receiver.items():
            self._send(name, to, messages)

    def _done(self, client: int, done: RequestDone) -> None:
        if self._ledger.on_done(client, done, self._manager._group.view, self._states.dead):
            self._withdraw_when_done(client)

    def _send(self, sender: str, to: str, messages: list[Any]) -> None:
        self._network.send(sender, to, messages)

    # Checks ----------------------------------------------------------------------------------------------

    def _fail_invariant(self, text: str) -> None:
        raise ViolationError(
            f"after {self._engine.now_s:.4f} s: {text} ({self.trial}); "
            f"again: offbeat simulate ps --seeds 1 --seed {self.trial.seed}"
        )

    def _check_progress(self) -> None:
        """Check that no request that depends on no other client is overdue."""
        view, limit_s = self._manager._group.view, self._engine.now_s - self._recovery_s
        for (client, number), request in self._ledger.open.items():
            space = None if view is None else view.spaces.get(request.namespace)
            is_there = f"client-{client}" not in self._states.forgotten | self._states.dead
            is_alone = space is not None and not space.aggregates
            if is_alone and is_there and request.made_s < limit_s:
                self._fail_invariant(
                    f"request {number} of client {client} is open {self._recovery_s} s after the faults"
                )

    def _check_the_end(self) -> None:
        """Check the invariants that hold at the end of a run."""
        view = self._manager._group.view
        if view is None:
            self._fail_invariant("the servers never formed a cluster")
            return
        if not view.ring.servers:
            self._fail_invariant("no server is left")
        if self._manager._group.data_losses:
            self._fail_invariant(f"{len(view.lost)} arcs are lost")
        for client, number in self._ledger.open:
            if f"client-{client}" not in self._states.forgotten:
                self._fail_invariant(f"request {number} of client {client} is not done")
        if view.filling or view.target is not None:
            self._fail_invariant(f"the change to view {view.version} has not ended")
        if view.paused:
            self._fail_invariant(f"the pauses of {list(view.paused)} have not ended")
        known = self._ledger.acknowledged_by_any()
        for space in view.spaces.values():
            for key in range(space.keys):
                self._check_key(space, key, view, known)

    def _check_key(
        self, space: NamespaceSpec, key: int, view: PlacementView, known: Counter[PushCounter]
    ) -> None:
        place, holders = (space.name, key), view.ring.holders(space, key)
        master = self._stores[holders[0]].table(space).values[key]
        self._ledger.check_value(place, master, known, "the master")
        own = self._nodes[holders[0]].push_times(*place)
        for holder in holders[1:]:
            value = self._stores[holder].table(space).values[key]
            if value != master or self._nodes[holder].push_times(*place) != own:
                self._fail_invariant(f"{place} is {master} on server {holders[0]} and {value} on {holder}")


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
