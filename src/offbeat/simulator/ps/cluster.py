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
from dataclasses import dataclass, replace
from typing import Any, cast

from offbeat.events import (
    Action,
    AggregationJoined,
    AggregationLeft,
    AggregationPaused,
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
    ServerTransferDone,
    ServerUnreachable,
    Tick,
)
from offbeat.policies.ps.client import PsClient, RequestDone, RequestFailed
from offbeat.policies.ps.clocked_store import TableStore
from offbeat.policies.ps.failure_detector import SILENCE_TIMEOUT_S
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.policies.ps.manager import PsManager, view_from_action
from offbeat.policies.ps.messages import (
    JoinAggregation,
    LeaveAggregation,
    PauseReached,
    Payload,
    PlacementView,
    PullResult,
    Push,
    PushAck,
    Replicate,
    ServerFillDone,
)
from offbeat.policies.ps.ordered_channel import Packet, ReliableChannel
from offbeat.policies.ps.range_clock import ClockRange
from offbeat.policies.ps.server_node import MANAGER, SendMessage, ServerNode
from offbeat.simulator.core.engine import Engine
from offbeat.simulator.training.cluster import ViolationError

_FAULTS_END = 30  # faults occur during the first so many requests of a client
_FAULTS = (
    *("die", "die", "be called dead", "come", "leave"),
    *("cut", "restart", "client comes", "client dies", "namespace comes"),
)
_FAULTS_OF_NETWORKS = ("cut one way", "switch", "switch", "reset", "reset", "vanish")
_CHANGES_OF_MASTERS = ("come", "leave") * 3  # additional ones, where pushes are summed
_QUIET_S = 120.0  # virtual; requests that wait until then count as stuck
_RESEND_S, _RESEND_MAX_S = 0.02, 0.1  # where a client waits 0.01 s between two requests
_TICK_S = 0.25
_UNREACHABLE_S = 1.25  # silence after which a node is reported
_DIALS_S = 1.0  # time within which a mended line is used
_RECOVERY_S = 3.0  # time within which all requests continue after the last fault
_DIGIT_BITS = 16  # of one client's pushes in a value

KeyPlace = tuple[str, int]  # a namespace, and a key or block in it
PushCounter = tuple[str, int, int]  # a namespace, a key in it, and the client whose pushes are counted
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
        """See `ServerTable.read`."""
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


@dataclass(frozen=True, kw_only=True)
class PsTrial:
    """Parameters of a trial.

    Attributes:
        seed: seed of all random numbers.
        servers, clients: their numbers at the start.
        replicas: replicas of each block.
        pushes_per_client: pushes of each client, several of which are under way at once.
        keys: keys in a namespace.
        block_keys: keys in a block.
        virtual_nodes: virtual nodes of each server on the ring.
        faults: number of faults, including servers that join or leave.
        loss_share, duplicate_share: share of the packets, 0 to 1.
        request_interval_s_max: maximum time between two requests of a client.
        cut_s_max: maximum time for which nodes are separated.
        aggregates: whether there are namespaces that aggregate, and clients that die when masters change.
    """

    seed: int
    servers: int = 4
    clients: int = 3
    replicas: int = 2
    pushes_per_client: int = 40
    keys: int = 60
    block_keys: int = 5
    virtual_nodes: int = 3
    faults: int = 3
    loss_share: float = 0.0
    duplicate_share: float = 0.0
    request_interval_s_max: float = 0.01
    cut_s_max: float = 0.1
    aggregates: bool = False


def draw_trial(seed: int) -> PsTrial:
    """Draw the trial of a seed."""
    chance = random.Random(f"trial {seed}")
    is_lossy = chance.random() < 0.5
    trial = PsTrial(
        seed=seed,
        servers=chance.randint(1, 6),
        clients=chance.randint(1, 4),
        replicas=chance.randint(0, 3),
        pushes_per_client=chance.choice([10, 40]),
        block_keys=chance.choice([1, 5, 20]),
        virtual_nodes=chance.randint(1, 4),
        faults=chance.randint(0, 6),
        loss_share=chance.choice([0.02, 0.2]) if is_lossy else 0.0,
        duplicate_share=chance.choice([0.0, 0.2]) if is_lossy else 0.0,
        aggregates=chance.random() < 0.6,
    )
    if chance.random() < 0.5:  # cuts longer than a silence that counts as a death; clients work as long
        faults = trial.faults and trial.faults + 2
        trial = replace(trial, faults=faults, request_interval_s_max=1.0, cut_s_max=2 * SILENCE_TIMEOUT_S)
    if not trial.aggregates:
        return trial
    # Faults of sums need several clients, and pushes for as long as there are faults.
    return replace(
        trial,
        clients=max(2, trial.clients),
        pushes_per_client=40,
        faults=trial.faults and max(3, trial.faults),
    )


class PsSimulation:
    """One trial; `run` raises if an invariant is violated.

    Args:
        trial: the parameters.
        make_node, make_client, make_manager: make a server, a client, and the manager.

    Attributes:
        published_views: all views that the manager published, each once.
        requests: requests of the clients so far.
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
        self._channels: dict[tuple[str, str], ReliableChannel] = {}  # by the node that holds it, and its peer
        self._cut_s: dict[tuple[str, str], tuple[float, float]] = {}  # by sender and receiver: begin and end
        self._reset_s: dict[frozenset[str], float] = {}  # when all packets under way between two were lost
        self._reported_silent: set[tuple[str, str]] = set()  # sender and receiver
        self._ends_s = 0.0  # the end of the last fault
        # Where packets are lost, some retransmissions are lost, too.
        self._recovery_s = 2 * _RECOVERY_S if trial.loss_share else _RECOVERY_S
        self._joined = {f"client-{client}" for client in self._clients}
        self._dead: set[str] = set()
        self._vanished: set[int] = set()  # servers whose hosts are dead
        self._doomed: set[int] = set()  # servers that are dead or will be declared dead
        self._doomed_clients: set[int] = set()  # clients of which the same holds
        self._withdrawn: set[tuple[str, int]] = set()  # namespaces, and clients that have withdrawn from them
        self._leaving: set[int] = set()
        self._forgotten: set[str] = set()  # dead, declared dead, or gone, according to the manager
        self._ignored: dict[str, set[str]] = {}  # by node: the nodes with which it no longer communicates
        self._requested_s: dict[tuple[int, int], float] = {}  # when requests were made
        # Requests under way: what was pushed, or what had been acknowledged when the pull was made.
        self._pushing: dict[tuple[int, int], Counter[PushCounter]] = {}
        self._pulling: dict[tuple[int, int], tuple[str, int, int, Counter[PushCounter]]] = {}
        self._fetching: dict[
            tuple[int, int], tuple[str, int, int, Counter[PushCounter]]
        ] = {}  # of pushes for values
        self._wants_times: dict[tuple[int, int], bool] = {}  # by pull
        self._namespace_of: dict[tuple[int, int], str] = {}  # by request
        self._pushed: Counter[PushCounter] = Counter()
        # What each client knows to be on all replicas; of sums, that is what all clients had pushed.
        self._acknowledged = {client: Counter[PushCounter]() for client in self._clients}
        self._masters: dict[tuple[int, KeyPlace], int] = {}  # the server that answered, by epoch and block
        # The times of a namespace that each client has passed, its pushes by time, and the clients whose
        # pushes were in the sum of a key, by view and time.
        self._rounds: Counter[tuple[str, int]] = Counter()
        self._times: dict[tuple[int, int], int] = {}  # by request
        self._pushed_at: dict[
            tuple[str, int], dict[int, Counter[PushCounter]]
        ] = {}  # by namespace and client
        self._sums: dict[tuple[int, str, int, int], tuple[int, ...]] = {}

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
        return self._manager_factory(trial.servers, virtual_nodes=trial.virtual_nodes, copies=trial.replicas)

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
        if self._vanished:
            settled_s += _UNREACHABLE_S + SILENCE_TIMEOUT_S + _DIALS_S + _TICK_S
        if now_s - _TICK_S < settled_s <= now_s:
            self._check_progress()

    def _inject_fault(self, _: None) -> None:
        chance, now_s = self._chance, self._engine.now_s
        alive = [server for server in self._nodes if server not in self._doomed]
        self._ends_s = max(self._ends_s, now_s)
        faults = _FAULTS + _FAULTS_OF_NETWORKS * (1 if self.trial.cut_s_max < SILENCE_TIMEOUT_S else 3)
        kind = chance.choice(faults + _CHANGES_OF_MASTERS if self.trial.aggregates else faults)
        if kind == "come":
            self._start_server(len(self._nodes))
        elif kind == "leave" and len(alive) > len(self._leaving) + 1:
            self._leaving.add(chance.choice(alive))
            leaving = [
                ServerRemovalRequested(now_s=now_s, node="client-0", server=server)
                for server in self._leaving
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
            self._left_to_push[client], self._acknowledged[client] = self.trial.pushes_per_client, Counter()
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
        self._doomed.add(server)
        if kind != "be called dead":
            self._dead.add(name)
        if kind == "vanish":
            self._vanished.add(server)
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
        cut_off = {node for pair, (_, until_s) in self._cut_s.items() if now_s < until_s for node in pair}
        shaky = {server for server in self._nodes if f"server-{server}" in cut_off} | self._doomed
        vanished = len(self._vanished.intersection(servers)) + (kind == "vanish")
        return self._manager._group.has_other_copies(server, shaky) and 2 * vanished <= len(servers)

    def _disturb(self, kind: str, names: Sequence[str]) -> None:
        """Disturb the network between two of these nodes, or between some of them and the rest."""
        if len(names) < 2:
            return
        chance, now_s = self._chance, self._engine.now_s
        one, other = chance.sample(names, 2)
        if kind == "reset":
            self._reset_s[frozenset((one, other))] = now_s
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
            from_s, until_s = self._cut_s.get(pair, (now_s, now_s))
            until_s = max(until_s, now_s + length_s)
            self._cut_s[pair] = from_s if from_s <= now_s < until_s else now_s, until_s
            self._engine.schedule(now_s + _UNREACHABLE_S, self._report_silence, pair)
            if until_s < _QUIET_S:
                self._ends_s = max(self._ends_s, until_s)
                self._engine.schedule(until_s + self._chance.random() * _DIALS_S, self._report_recovery, pair)

    def _is_cut_off(self, sender: str, to: str) -> bool:
        return self._engine.now_s < self._cut_s.get((sender, to), (0.0, 0.0))[1]

    def _report_silence(self, pair: tuple[str, str]) -> None:
        """Report to the manager that a cut has lasted long enough to be noticed."""
        (sender, to), now_s = pair, self._engine.now_s
        if not self._is_cut_off(sender, to) or pair in self._reported_silent or sender not in self._joined:
            return
        silent_s = now_s - self._cut_s[pair][0]
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
        if self._is_cut_off(sender, to) or pair not in self._reported_silent:
            return
        self._reported_silent.discard(pair)
        if to == MANAGER:
            self._observe(sender, NodeResumed(now_s=now_s, node=sender))
        else:
            self._send(to, MANAGER, [ServerReachable(now_s=now_s, node=to, server=_number(sender))])

    def _observe(self, node: str, event: Event) -> None:
        """Let the manager handle an observation of a node, unless it has dropped the node."""
        if node not in self._forgotten:
            self._decide(event)

    def _doom_a_client(self, within_s: float) -> None:
        """Let a random client die, or be declared dead."""
        alive = [client for client in self._clients if client and client not in self._doomed_clients]
        if not alive:
            return
        chance, client = self._chance, self._chance.choice(alive)
        self._ends_s = max(self._ends_s, self._engine.now_s)
        self._doomed_clients.add(client)
        if chance.random() < 0.5:
            self._dead.add(f"client-{client}")
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
        return are_enough and len(replaced - self._leaving) > 1

    def _lose(self, server: int) -> None:
        self._lose_node(f"server-{server}")

    def _lose_node(self, name: str) -> None:
        """Report a closed process, once that can be observed, or refuse a node."""
        if name in self._forgotten:
            return
        now_s = self._engine.now_s
        if name in self._dead and self._is_cut_off(name, MANAGER):
            self._ends_s = max(self._ends_s, self._cut_s[name, MANAGER][1])
            self._engine.schedule(self._cut_s[name, MANAGER][1], self._lose_node, name)
            return
        self._decide(NodeLost(now_s=now_s, node=name, cause="it was closed"))
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Stop the manager's communication with a node, dead or alive, after a last message that says so."""
        if name not in self._forgotten:
            self._send(MANAGER, name, [RejectPeer(peer=name, reason="it was lost")])
            self._forgotten.add(name)

    def _ignore(self, node: str, other: str) -> None:
        """Stop the communication of a node with another one."""
        self._ignored.setdefault(node, set()).add(other)
        self._channels.pop((node, other), None)

    def _make_request(self, client: int) -> None:
        """Make a request, and schedule the next."""
        name = f"client-{client}"
        if name in self._dead:
            return
        if not self._left_to_push[client]:
            self._withdraw_when_done(client)
            return
        chance = self._chance
        space = chance.choice([space for space in self._spaces if space.name in self._opened])
        self._engine.schedule(
            self._engine.now_s + chance.random() * self.trial.request_interval_s_max,
            self._make_request,
            client,
        )
        protocol = self._clients[client]
        is_pull = chance.random() < 0.3
        found = self._some_keys(chance) if is_pull or not space.aggregates else self._next_keys(client, space)
        if found is None:
            self._dispatch(name, protocol.join_aggregation(space.name))
            return
        first, last = found
        self.requests += 1
        if is_pull:
            wants_times = self._option_chance.random() < 0.5
            number, outputs = protocol.pull(space.name, first, last, times=wants_times)
            self._pulling[client, number] = (space.name, first, last, self._known_in(space, client))
            self._wants_times[client, number] = wants_times
        else:
            self._left_to_push[client] -= 1
            content = {key: 1 << _DIGIT_BITS * client for key in range(first, last) if chance.random() < 0.5}
            if self._option_chance.random() < 0.1:
                content = {}  # an empty push
            time, wants_values = self._time_of(client, space), not self.requests % 3
            number, outputs = protocol.push(space.name, content, first, last, time, wants_values=wants_values)
            own = self._pushing[client, number] = Counter((space.name, key, client) for key in content)
            self._pushed.update(own)
            if wants_values:
                known = self._known_in(space, client) | (self._acknowledged[client] + own)
                self._fetching[client, number] = (space.name, first, last, known)
        self._namespace_of[client, number] = space.name
        self._requested_s[client, number] = self._engine.now_s
        self._dispatch(name, outputs)

    def _known_in(self, space: NamespaceSpec, client: int) -> Counter[PushCounter]:
        """Return what a client's pull has to contain."""
        known = Counter(self._acknowledged[client])
        if not space.aggregates:  # its own pushes, acknowledged or not
            own = {at: n for at, n in self._pushed.items() if (at[0], at[2]) == (space.name, client)}
            known |= Counter(own)
        return known

    def _some_keys(self, chance: random.Random) -> tuple[int, int]:
        first = chance.randrange(self.trial.keys)
        return first, chance.randrange(first, self.trial.keys) + 1

    def _time_of(self, client: int, space: NamespaceSpec) -> int | None:
        """Return the time that a client chooses for its next push; None for the time that comes next.

        Where all clients push the same ranges, none skips a time whose range does not come again.
        """
        begins = self._clients[client].first_time(space.name) if space.aggregates else 1
        step = self._option_chance.choice((0, 1, 3))
        if space.aggregates and not self._is_whole(space):
            step = min(step, 1)
        if begins is None or not step:
            self._rounds[space.name, client] += 1
            return None
        self._rounds[space.name, client] += step
        return begins - 1 + self._rounds[space.name, client]

    def _is_whole(self, space: NamespaceSpec) -> bool:
        """Whether every push of a namespace has all keys."""
        return random.Random(f"{self.trial.seed} {space.name}").random() < 0.5

    def _next_keys(self, client: int, space: NamespaceSpec) -> tuple[int, int] | None:
        """Return the range that every client pushes next; None while this one does not know its time."""
        if self._is_whole(space):
            return 0, space.keys
        begins = self._clients[client].first_time(space.name)
        if begins is None:
            return None
        time = begins + self._rounds[space.name, client]
        return self._some_keys(random.Random(f"{self.trial.seed} {space.name} {time}"))

    def _withdraw_when_done(self, client: int) -> None:
        """Withdraw a client from sums after its last push, so that other clients do not wait for it."""
        if self._left_to_push[client]:
            return
        pushing = {self._namespace_of[request] for request in self._pushing if request[0] == client}
        for space in self._spaces:
            if space.aggregates and space.name not in pushing and (space.name, client) not in self._withdrawn:
                self._withdrawn.add((space.name, client))
                self._dispatch(f"client-{client}", self._clients[client].leave_aggregation(space.name))

    # The nodes -------------------------------------------------------------------------------------------

    def _receive(self, name: str, sender: str, message: Any) -> None:
        if name == MANAGER:
            self._on_manager_message(sender, message)
        elif isinstance(message, RejectPeer):
            self._dead.add(name)  # the node ends
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
            self._check_answers(node, outputs)
            self._dispatch(name, outputs)

    def _ignore_departed(self, name: str, before: PlacementView | None, after: PlacementView) -> None:
        there = {*after.ring.servers, *(() if after.target is None else after.target.servers)}
        for server in () if before is None else before.ring.servers:
            if server not in there:
                self._ignore(name, f"server-{server}")

    def _on_manager_message(self, sender: str, message: Any) -> None:
        now_s = self._engine.now_s
        if isinstance(message, ServerFillDone):
            message = ServerTransferDone(now_s=now_s, node=sender, view=message.view)
        elif isinstance(message, JoinAggregation):
            message = AggregationJoined(now_s=now_s, node=sender, namespace=message.namespace)
        elif isinstance(message, PauseReached):
            message = AggregationPaused(
                now_s=now_s,
                node=sender,
                namespace=message.namespace,
                pause_view=message.pause,
                time=message.time,
            )
        elif isinstance(message, LeaveAggregation):
            message = AggregationLeft(now_s=now_s, node=sender, namespace=message.namespace)
        elif isinstance(message, NodeJoined):
            self._joined.add(message.node)
        elif isinstance(message, NamespaceRequested):
            self._opened.add(message.name)
        self._decide(replace(cast(Any, message), now_s=now_s))

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
                self._violated(f"{name} was refused a request: {output.reason}")
            else:
                if isinstance(output.message, Push):
                    self._note_time(output.message)
                by_receiver.setdefault(output.to, []).append(output.message)
        for to, messages in by_receiver.items():
            self._send(name, to, messages)

    def _note_time(self, push: Push) -> None:
        request = push.client, push.request
        self._times[request] = push.time
        if request in self._pushing:
            self._pushed_at.setdefault((push.namespace, push.client), {})[push.time] = self._pushing[request]

    def _done(self, client: int, done: RequestDone) -> None:
        request = client, done.request
        content = self._pushing.pop(request, None)
        if content is not None:
            self._acknowledged[client].update(content)
            self._acknowledge_sum(client, done.request)
            if request in self._fetching:
                self._check_values(client, *self._fetching.pop(request), done)
            self._withdraw_when_done(client)
            return
        name, first, last, known = self._pulling.pop(request)
        values = self._check_values(client, name, first, last, known, done)
        if self._wants_times.pop(request):
            self._check_own(client, name, (first, last), values, done.times)

    def _check_values(
        self, client: int, name: str, first: int, last: int, known: Counter[PushCounter], done: RequestDone
    ) -> dict[int, int]:
        """Check that the values contain what they have to; return them by key."""
        values: dict[int, int] = {}
        for _, _, part in done.parts:
            values |= part
        for key in range(first, last):
            self._check_value((name, key), values.get(key, 0), known, f"what client {client} pulled")
        return values

    def _acknowledge_sum(self, client: int, number: int) -> None:
        """Where pushes are summed, an acknowledgement means that the other clients' pushes are in place."""
        view, name, time = (
            self._manager._group.view,
            self._namespace_of[client, number],
            self._times[client, number],
        )
        if view is None or not view.spaces[name].aggregates:
            return
        participants = view.participants.get(name, {})
        if client not in participants:
            return  # the client is out; the acknowledgement is of a view with other participants
        for other, begins in participants.items():
            if other == client or begins > time or f"client-{other}" in self._dead:
                continue
            pushed = self._pushed_at.get((name, other), {})
            if max(pushed, default=0) < time:
                self._violated(f"client {client} was acknowledged time {time} of {name} without {other}")
            self._acknowledged[client].update(pushed.get(time, Counter()))  # empty if it skipped the time

    # The network -----------------------------------------------------------------------------------------

    def _send(self, sender: str, to: str, messages: list[Any]) -> None:
        if self._may_send(sender, to):
            self._transmit(sender, to, self._channel(sender, to).send(messages, self._engine.now_s))

    def _may_send(self, sender: str, to: str) -> bool:
        if sender in self._dead or (sender == MANAGER and to in self._forgotten):
            return False
        return to not in self._ignored.get(sender, ())

    def _channel(self, name: str, to: str) -> ReliableChannel:
        channel = self._channels.get((name, to))
        if channel is None:
            slower = min(self.trial.request_interval_s_max / 0.01, 5)
            channel = ReliableChannel(resend_s=slower * _RESEND_S, resend_max_s=slower * _RESEND_MAX_S)
            self._channels[name, to] = channel
        return channel

    def _transmit(self, sender: str, to: str, packets: list[Packet]) -> None:
        """Transmit packets, which arrive in any order, once, twice or not at all."""
        chance, now_s = self._chance, self._engine.now_s
        for packet in packets:
            if self._is_cut_off(sender, to):
                continue
            for _ in range(
                (chance.random() >= self.trial.loss_share) + (chance.random() < self.trial.duplicate_share)
            ):
                arrives_s = now_s + 0.0001 + chance.random() * 0.003
                self._engine.schedule(arrives_s, self._arrive, (sender, to, packet, now_s))
        due_s = self._channel(sender, to).due_s
        if due_s is not None:
            self._engine.schedule(due_s, self._resend, (sender, to))

    def _resend(self, pair: tuple[str, str]) -> None:
        if pair in self._channels and self._dead.isdisjoint(pair):
            again = self._channels[pair].on_tick(self._engine.now_s)
            if again:
                self._transmit(*pair, again)

    def _arrive(self, what: tuple[str, str, Packet, float]) -> None:
        sender, to, packet, sent_s = what
        if to in self._dead or sender in self._ignored.get(to, ()):
            return
        if to == MANAGER and sender in self._forgotten:
            return
        was_reset = sent_s < self._reset_s.get(frozenset((sender, to)), 0.0)
        if was_reset or self._is_cut_off(sender, to):
            return
        messages, answer = self._channel(to, sender).on_packet(packet, self._engine.now_s)
        self._transmit(to, sender, answer)
        for message in messages:
            self._receive(to, sender, message)

    # Checks ----------------------------------------------------------------------------------------------

    def _violated(self, text: str) -> None:
        raise ViolationError(
            f"after {self._engine.now_s:.4f} s: {text} ({self.trial}); "
            f"again: offbeat simulate ps --seeds 1 --seed {self.trial.seed}"
        )

    def _check_answers(self, node: ServerNode, outputs: list[SendMessage]) -> None:
        """Check that in an epoch no two servers answer for one block, and that no push was missed."""
        view = node.view
        for output in outputs:
            answer = output.message
            if isinstance(answer, Replicate) and answer.master == node.server:
                self._check_sum(answer, node)
            if view is None or not isinstance(answer, PushAck | PullResult):
                continue
            space = view.spaces[self._namespace_of[_number(output.to), answer.request]]
            for block in space.blocks_of_range(answer.first, answer.last):
                place = space.name, block
                other = self._masters.setdefault((view.epoch, place), node.server)
                if other != node.server:
                    both = f"servers {other} and {node.server}"
                    self._violated(f"block {place} is served by {both} in epoch {view.epoch}")
        if node.sequence_gaps:
            self._violated(f"server {node.server} has missed a push")

    def _check_sum(self, copy: Replicate, node: ServerNode) -> None:
        """Check that the pushes of one time form one operation, on all replicas of a chain."""
        operation, view = copy.operation, node.view
        begins = {} if view is None else view.participants.get(operation.namespace, {})
        clients = tuple(mark.client for mark in operation.stamps)
        if begins.keys().isdisjoint(clients):
            return
        for key in range(operation.first, operation.last):
            at = copy.view, operation.namespace, operation.stamps[0].time, key
            is_repeated = at in self._sums and not self.trial.faults
            if is_repeated or self._sums.setdefault(at, clients) != clients:
                self._violated(f"key {key} has sums of {self._sums[at]} and {clients} at time {at[2]}")

    def _check_value(self, place: KeyPlace, value: int, known: Counter[PushCounter], what: str) -> None:
        for client in self._clients:
            counted = (*place, client)
            count = value >> _DIGIT_BITS * client & (1 << _DIGIT_BITS) - 1
            if not known[counted] <= count <= self._pushed[counted]:
                self._violated(
                    f"{what} of {place} has {count} pushes of client {client}, which had "
                    f"{known[counted]} of {self._pushed[counted]} acknowledged"
                )

    def _check_own(
        self,
        client: int,
        name: str,
        span: tuple[int, int],
        values: dict[int, int],
        times: tuple[ClockRange, ...],
    ) -> None:
        """Check that a pull contains exactly those of the client's own pushes that its times indicate."""
        pushed = self._pushed_at.get((name, client), {})
        for key in range(*span):
            upto = sum(piece.time for piece in times if piece.start <= key < piece.stop)
            expected = sum((name, key, client) in content for time, content in pushed.items() if time <= upto)
            count = values.get(key, 0) >> _DIGIT_BITS * client & (1 << _DIGIT_BITS) - 1
            if count != expected:
                self._violated(
                    f"client {client} pulled {count} of its own pushes of {(name, key)}, expected "
                    f"{expected} by its times"
                )

    def _check_progress(self) -> None:
        """Check that no request that depends on no other client is overdue."""
        view, limit_s = self._manager._group.view, self._engine.now_s - self._recovery_s
        for waiting in (self._pushing, self._pulling):
            for client, number in waiting:
                name = self._namespace_of[client, number]
                is_alone = view is not None and name in view.spaces and not view.spaces[name].aggregates
                is_there = f"client-{client}" not in self._forgotten | self._dead
                if is_alone and is_there and self._requested_s[client, number] < limit_s:
                    self._violated(
                        f"request {number} of client {client} is open {self._recovery_s} s after the faults"
                    )

    def _check_the_end(self) -> None:
        """Check the invariants that hold at the end of a run."""
        view = self._manager._group.view
        if view is None:
            self._violated("the servers never formed a cluster")
            return
        if not view.ring.servers:
            self._violated("no server is left")
        if self._manager._group.data_losses:
            self._violated(f"{len(view.lost)} arcs are lost")
        for waiting in (self._pushing, self._pulling):
            for client, number in waiting:
                if f"client-{client}" not in self._forgotten:
                    self._violated(f"request {number} of client {client} is not done")
        if view.filling or view.target is not None:
            self._violated(f"the change to view {view.version} has not ended")
        if view.paused:
            self._violated(f"the pauses of {list(view.paused)} have not ended")
        known: Counter[PushCounter] = Counter()
        for counts in self._acknowledged.values():
            known |= counts
        for space in view.spaces.values():
            for key in range(space.keys):
                self._check_key(space, key, view, known)

    def _check_key(
        self, space: NamespaceSpec, key: int, view: PlacementView, known: Counter[PushCounter]
    ) -> None:
        place, holders = (space.name, key), view.ring.holders(space, key)
        master = self._stores[holders[0]].table(space).values[key]
        self._check_value(place, master, known, "the master")
        own = self._nodes[holders[0]].push_times(*place)
        for holder in holders[1:]:
            value = self._stores[holder].table(space).values[key]
            if value != master or self._nodes[holder].push_times(*place) != own:
                self._violated(f"{place} is {master} on server {holders[0]} and {value} on {holder}")


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
