"""A parameter server that is not there: clients that count, servers that come, leave and die, and a network.

Every push adds 1 to some keys. At the end each key must be, on its master and on every replica, what was
pushed to it: no push lost that was acknowledged, none applied twice. The policies decide; nothing here does.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from offbeat.policies.channels import Channel, Packet
from offbeat.policies.client import Client, Done
from offbeat.policies.parcels import Content, Filled, Pulled, Pushed, View
from offbeat.policies.placement import Space
from offbeat.policies.server import MANAGER, Send, ServerNode, Store
from offbeat.policies.servers import ServerGroup
from offbeat.simulator.cluster import ViolationError
from offbeat.simulator.engine import Engine

_FAULTS_END_S = 0.3
_FAULTS = (
    *("die", "die", "be called dead", "come", "leave"),
    *("cut", "restart", "client comes", "client dies", "namespace comes"),
)
_QUIET_S = 60.0  # virtual; whatever still waits then waits for ever
_RESEND_S, _RESEND_MAX_S = 0.02, 0.1

Place = tuple[str, int]  # a namespace, and a key or block in it
MakeNode = Callable[[int, Store], ServerNode]


class Counts:
    """A table of whole numbers."""

    def __init__(self) -> None:
        self.values: Counter[int] = Counter()

    def check(self, content: dict[int, int], first: int, last: int) -> None:
        """See `Table.check`."""

    def apply(self, first: int, last: int, content: Content) -> None:
        """See `Table.apply`."""
        self.values.update(content)

    def read(self, first: int, last: int, keys: Content | None) -> Content:
        """See `Table.read`."""
        return cut(self.values, first, last)

    def cut(self, content: Content, first: int, last: int) -> Content:
        """See `Table.cut`."""
        return cut(content, first, last)

    def copy_out(self, first: int, last: int) -> Content:
        """See `Table.copy_out`."""
        return cut(self.values, first, last)

    def copy_in(self, first: int, last: int, content: Content) -> None:
        """See `Table.copy_in`."""
        self.drop(first, last)
        self.values.update(content)

    def drop(self, first: int, last: int) -> None:
        """See `Table.drop`."""
        for key in [key for key in self.values if first <= key < last]:
            del self.values[key]


class Tables:
    """One server's tables."""

    def __init__(self) -> None:
        self._tables: dict[str, Counts] = {}

    def table(self, space: Space) -> Counts:
        """See `Store.table`."""
        return self._tables.setdefault(space.name, Counts())


def cut(content: dict[int, int], first: int, last: int) -> dict[int, int]:
    """Return what is there for keys `first` to `last` - 1."""
    return {key: count for key, count in content.items() if first <= key < last}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is tried.

    Attributes:
        seed: of everything.
        servers, clients: how many there are at the start.
        copies: replicas of each block.
        pushes: of each client, which has some under way at once.
        keys: that are pushed to.
        block_keys: in a block.
        virtual_nodes: of each server on the ring.
        faults: how often something goes wrong, or a server comes or leaves.
        lost, doubled: share of the packets.
    """

    seed: int
    servers: int = 4
    clients: int = 3
    copies: int = 2
    pushes: int = 40
    keys: int = 60
    block_keys: int = 5
    virtual_nodes: int = 3
    faults: int = 3
    lost: float = 0.0
    doubled: float = 0.0


def trial_of(seed: int) -> Trial:
    """Return the trial of a seed, with as much of everything as it draws."""
    chance = random.Random(f"trial {seed}")
    is_lossy = chance.random() < 0.5
    return Trial(
        seed=seed,
        servers=chance.randint(1, 6),
        clients=chance.randint(1, 4),
        copies=chance.randint(0, 3),
        pushes=chance.choice([10, 40]),
        block_keys=chance.choice([1, 5, 20]),
        virtual_nodes=chance.randint(1, 4),
        faults=chance.randint(0, 6),
        lost=chance.choice([0.02, 0.2]) if is_lossy else 0.0,
        doubled=chance.choice([0.0, 0.2]) if is_lossy else 0.0,
    )


class Serving:
    """One trial; `run` raises if something happened that must not.

    Args:
        trial: what is tried.
        make_node: makes a server.

    Attributes:
        views: all that the manager said.
        requests: how many the clients made.
    """

    def __init__(self, trial: Trial, make_node: MakeNode = ServerNode) -> None:
        self.trial = trial
        self.views: list[View] = []
        self.requests = 0
        self._make_node = make_node
        self._engine = Engine()
        self._chance = random.Random(f"serving {trial.seed}")
        self._spaces = [Space("space 0", trial.keys, trial.block_keys)]
        self._group = self._make_group()
        self._group.opened(self._spaces[0])
        self._nodes: dict[int, ServerNode] = {}
        self._stores: dict[int, Tables] = {}
        self._clients = {number: Client(number, cut) for number in range(trial.clients)}
        self._left_to_push = dict.fromkeys(self._clients, trial.pushes)
        self._channels: dict[tuple[str, str], Channel] = {}  # whose end, and to whom
        self._cut_until_s: dict[frozenset[str], float] = {}
        self._dead: set[str] = set()
        self._doomed: set[int] = set()  # servers that are dead or will be called so
        self._leaving: set[int] = set()
        self._forgotten: set[str] = set()  # dead, or called dead, or gone: nobody speaks with them
        # Requests that are not done: what was pushed, or what had been acknowledged when the pull was made.
        self._pushing: dict[tuple[int, int], Counter[Place]] = {}
        self._pulling: dict[tuple[int, int], tuple[str, int, int, Counter[Place]]] = {}
        self._asked_of: dict[tuple[int, int], str] = {}  # the namespace of each request
        self._pushed: Counter[Place] = Counter()
        self._acknowledged = {client: Counter[Place]() for client in self._clients}
        self._masters: dict[tuple[int, Place], int] = {}  # who served, by epoch and block

    def run(self) -> None:
        """Runs the trial to its end.

        Raises:
            ViolationError: something happened that must not.
        """
        engine = self._engine
        for server in range(self.trial.servers):
            self._start_server(server)
        for client in self._clients:
            engine.at(self._chance.random() * 0.01, self._work, client)
        for _ in range(self.trial.faults):
            engine.at(0.01 + self._chance.random() * (_FAULTS_END_S - 0.01), self._go_wrong)
        engine.run(_QUIET_S)
        self._check_the_end()

    # What happens ----------------------------------------------------------------------------------------

    def _make_group(self) -> ServerGroup:
        trial = self.trial
        return ServerGroup(trial.servers, virtual_nodes=trial.virtual_nodes, copies=trial.copies)

    def _start_server(self, server: int) -> None:
        self._stores[server] = Tables()
        self._nodes[server] = self._make_node(server, self._stores[server])
        self._tell(f"server-{server}", MANAGER, [("joined", server)])

    def _go_wrong(self, _: None) -> None:
        chance, now_s = self._chance, self._engine.now_s
        alive = [server for server in self._nodes if server not in self._doomed]
        kind = chance.choice(
            ["die", "die", "be called dead", "come", "leave", "cut", "restart", "client dies"]
        )
        if kind == "come":
            self._start_server(len(self._nodes))
        elif kind == "leave" and len(alive) > len(self._leaving) + 1:
            self._leaving.add(chance.choice(alive))
            self._tell("client-0", MANAGER, [("leaves", server) for server in self._leaving])
        elif kind == "cut":
            names = [f"server-{server}" for server in alive] + [f"client-{one}" for one in self._clients]
            ends = frozenset(chance.sample([*names, MANAGER], 2))
            self._cut_until_s[ends] = now_s + chance.random() * 0.1
        elif kind == "restart":
            state = json.loads(json.dumps(self._group.state_dict()))
            self._group = self._make_group()
            self._group.load_state_dict(state)
        elif kind == "namespace comes":
            name, keys = f"space {len(self._spaces)}", self.trial.keys
            self._spaces.append(Space(name, keys, chance.randint(1, keys)))
            self._tell("client-0", MANAGER, [("opened", self._spaces[-1])])
        elif kind == "client comes":
            client = len(self._clients)
            self._clients[client] = Client(client, cut)
            self._left_to_push[client], self._acknowledged[client] = self.trial.pushes, Counter()
            self._tell(f"client-{client}", MANAGER, [("hello", client)])
            self._work(client)
        elif kind == "client dies" and len(self._clients) > 1:
            self._forget(f"client-{chance.randrange(1, len(self._clients))}")
        elif kind in ("die", "be called dead") and self._may_lose_one(alive):
            server = chance.choice(alive)
            self._doomed.add(server)
            if kind == "die":
                self._dead.add(f"server-{server}")
            self._engine.at(now_s + 0.001 + chance.random() * 0.03, self._lose, server)

    def _may_lose_one(self, alive: list[int]) -> bool:
        """Whether no more servers are gone, and not replaced, than nothing may be lost with."""
        view = self._group.view
        if view is None:
            return False
        replaced = {one for one in view.ring.servers if one in alive and one not in view.filling}
        are_enough = len(view.ring.servers) - len(replaced) < self.trial.copies
        return are_enough and len(replaced - self._leaving) > 1

    def _lose(self, server: int) -> None:
        self._say(self._group.lost(server))
        self._forget(f"server-{server}")

    def _forget(self, name: str) -> None:
        """Nobody speaks with this node any more, alive or dead."""
        self._forgotten.add(name)
        for pair in [pair for pair in self._channels if name in pair]:
            del self._channels[pair]

    def _work(self, client: int) -> None:
        """Makes a request, and another a little later."""
        name = f"client-{client}"
        if not self._left_to_push[client] or name in self._forgotten:
            return
        chance, keys = self._chance, self.trial.keys
        first = chance.randrange(keys)
        last = chance.randrange(first, keys) + 1
        one, name_of_space = self._clients[client], chance.choice(self._spaces).name
        self.requests += 1
        if chance.random() < 0.3:
            number, said = one.pull(name_of_space, first, last)
            known = Counter(self._acknowledged[client])
            self._pulling[client, number] = (name_of_space, first, last, known)
        else:
            self._left_to_push[client] -= 1
            content = {key: 1 for key in range(first, last) if chance.random() < 0.5}
            number, said = one.push(name_of_space, content, first, last)
            self._pushing[client, number] = Counter((name_of_space, key) for key in content)
            self._pushed.update(self._pushing[client, number])
        self._asked_of[client, number] = name_of_space
        self._take_up(name, said)
        self._engine.at(self._engine.now_s + chance.random() * 0.01, self._work, client)

    # The nodes -------------------------------------------------------------------------------------------

    def _hear(self, name: str, sender: str, message: Any) -> None:
        if name == MANAGER:
            self._manage(message)
        elif name.startswith("client-"):
            client = self._clients[_number(name)]
            self._take_up(name, client.see(message) if isinstance(message, View) else client.hear(message))
        else:
            node = self._nodes[_number(name)]
            said = node.see(message) if isinstance(message, View) else node.hear(sender, message)
            self._check_answers(node, said)
            self._take_up(name, said)

    def _manage(self, message: Any) -> None:
        if isinstance(message, Filled):
            self._say(self._group.filled(message))
        elif message[0] == "joined":
            if f"server-{message[1]}" not in self._forgotten:
                self._say(self._group.joined(message[1]))
        elif message[0] == "opened":
            self._say(self._group.opened(message[1]))
        elif message[0] == "hello":
            if self._group.view is not None:
                self._tell(MANAGER, f"client-{message[1]}", [self._group.view])
        else:
            self._say(self._group.leaves(message[1]))

    def _say(self, view: View | None) -> None:
        if view is None:
            return
        self.views.append(view)
        for name in [f"server-{one}" for one in self._nodes] + [f"client-{one}" for one in self._clients]:
            self._tell(MANAGER, name, [view])

    def _take_up(self, name: str, said: Iterable[Send | Done]) -> None:
        """Sends what a node says, and takes note of a client's requests that are done."""
        by_receiver: dict[str, list[Any]] = {}
        for one in said:
            if isinstance(one, Done):
                self._done(_number(name), one)
            else:
                by_receiver.setdefault(one.to, []).append(one.message)
        for to, messages in by_receiver.items():
            self._tell(name, to, messages)

    def _done(self, client: int, done: Done) -> None:
        content = self._pushing.pop((client, done.number), None)
        if content is not None:
            self._acknowledged[client].update(content)
            return
        name, first, last, known = self._pulling.pop((client, done.number))
        values: dict[int, int] = {}
        for _, _, part in done.parts:
            values |= part
        for key in range(first, last):
            place = name, key
            if not known[place] <= values.get(key, 0) <= self._pushed[place]:
                self._violated(
                    f"client {client} pulled {values.get(key, 0)} for {place}; it had {known[place]} of its "
                    f"pushes acknowledged, and all had pushed {self._pushed[place]}"
                )

    # The network -----------------------------------------------------------------------------------------

    def _tell(self, sender: str, to: str, messages: list[Any]) -> None:
        if self._forgotten.isdisjoint((sender, to)) and sender not in self._dead:
            self._put(sender, to, self._channel(sender, to).send(messages, self._engine.now_s))

    def _channel(self, name: str, to: str) -> Channel:
        channel = self._channels.get((name, to))
        if channel is None:
            channel = Channel(resend_s=_RESEND_S, resend_max_s=_RESEND_MAX_S)
            self._channels[name, to] = channel
        return channel

    def _put(self, sender: str, to: str, packets: list[Packet]) -> None:
        """Packets arrive in any order, once, twice or not at all."""
        chance, now_s = self._chance, self._engine.now_s
        for packet in packets:
            if now_s < self._cut_until_s.get(frozenset((sender, to)), 0.0):
                continue
            for _ in range((chance.random() >= self.trial.lost) + (chance.random() < self.trial.doubled)):
                arrives_s = now_s + 0.0001 + chance.random() * 0.003
                self._engine.at(arrives_s, self._arrive, (sender, to, packet))
        due_s = self._channel(sender, to).due_s
        if due_s is not None:
            self._engine.at(due_s, self._tick, (sender, to))

    def _tick(self, pair: tuple[str, str]) -> None:
        if pair in self._channels and pair[0] not in self._dead:
            again = self._channels[pair].tick(self._engine.now_s)
            if again:
                self._put(*pair, again)

    def _arrive(self, what: tuple[str, str, Packet]) -> None:
        sender, to, packet = what
        if to in self._dead or not self._forgotten.isdisjoint((sender, to)):
            return
        messages, answer = self._channel(to, sender).hear(packet, self._engine.now_s)
        self._put(to, sender, answer)
        for message in messages:
            self._hear(to, sender, message)

    # Checks ----------------------------------------------------------------------------------------------

    def _violated(self, text: str) -> None:
        raise ViolationError(
            f"after {self._engine.now_s:.4f} s: {text} ({self.trial}); "
            f"again: offbeat simulate ps --seeds 1 --seed {self.trial.seed}"
        )

    def _check_answers(self, node: ServerNode, said: list[Send]) -> None:
        """See that within an epoch no two servers answer for one block, and that nothing was missed."""
        view = node.view
        for one in said:
            answer = one.message
            if view is None or not isinstance(answer, Pushed | Pulled):
                continue
            space = view.spaces[self._asked_of[_number(one.to), answer.number]]
            for block in space.blocks(answer.first, answer.last):
                place = space.name, block
                other = self._masters.setdefault((view.epoch, place), node.server)
                if other != node.server:
                    both = f"servers {other} and {node.server}"
                    self._violated(f"block {place} is served by {both} in epoch {view.epoch}")
        if node.gaps:
            self._violated(f"server {node.server} has missed a push")

    def _check_the_end(self) -> None:
        view = self._group.view
        if view is None:
            self._violated("the servers never came together")
            return
        if self._group.lost_arcs:
            self._violated(f"{self._group.lost_arcs} arcs are lost")
        for waiting in (self._pushing, self._pulling):
            for client, number in waiting:
                if f"client-{client}" not in self._forgotten:
                    self._violated(f"request {number} of client {client} is not done")
        if view.filling or view.target is not None:
            self._violated(f"the change to view {view.number} has not ended")
        for space in view.spaces.values():
            for key in range(space.keys):
                self._check_key(space, key, view)

    def _check_key(self, space: Space, key: int, view: View) -> None:
        place, holders = (space.name, key), view.ring.holders(space, key)
        least = sum(known[place] for known in self._acknowledged.values())
        master = self._stores[holders[0]].table(space).values[key]
        if not least <= master <= self._pushed[place]:
            self._violated(
                f"{place} was pushed {self._pushed[place]} times, {least} of them acknowledged, and its "
                f"master has {master}"
            )
        own = self._nodes[holders[0]].times_of(*place)
        for holder in holders[1:]:
            value = self._stores[holder].table(space).values[key]
            if value != master or self._nodes[holder].times_of(*place) != own:
                self._violated(f"{place} is {master} on server {holders[0]} and {value} on {holder}")


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
