"""Servers of a namespace that aggregates, message by message; many seeds are in test_simulator_ps.py."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from offbeat.errors import ProtocolError
from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.tables import ArrayTable
from offbeat.numerics.ps.updates import Adam
from offbeat.policies.ps.client import PsClient, RequestDone, RequestFailed
from offbeat.policies.ps.hash_ring import HashRing, NamespaceSpec
from offbeat.policies.ps.messages import (
    HandoffDone,
    HandoffOperations,
    JoinAggregation,
    LeaveAggregation,
    Operation,
    PauseReached,
    PlacementView,
    Push,
    PushAck,
    PushStamp,
    Replicate,
    ReplicateAck,
)
from offbeat.policies.ps.server_group import ServerGroup
from offbeat.policies.ps.server_node import MANAGER, ServerNode
from offbeat.simulator.ps.cluster import SimulatedStore, slice_content

SPACE = NamespaceSpec("w", 100, 10, aggregates=True)


class Job:
    """Servers, clients and their manager; messages wait until the test delivers them."""

    def __init__(self, servers: int, clients: int, *, replicas: int = 2, is_enlisted: bool = True) -> None:
        self.group = ServerGroup(servers, replicas=replicas, virtual_nodes=2)
        self.group.on_namespace_opened(SPACE)
        self.nodes = {server: ServerNode(server, SimulatedStore()) for server in range(servers)}
        self.clients = {client: PsClient(client, slice_content) for client in range(clients)}
        self.under_way: list[tuple[str, str, object]] = []
        self.sent: list[object] = []
        self.done: list[tuple[int, int]] = []
        self.failed: dict[tuple[int, int], str] = {}
        if is_enlisted:
            for client in self.clients:
                self.take(f"client-{client}", self.clients[client].join_aggregation("w"))
            self.settle()
        for server in range(servers):
            self.send_view(self.group.on_joined(server))
        self.settle()

    def send_view(self, view):
        if view is not None:
            for server, node in self.nodes.items():
                self.take(f"server-{server}", node.on_view(view))
            for client, one in self.clients.items():
                self.take(f"client-{client}", one.on_view(view))

    def take(self, sender, outgoing):
        for one in outgoing:
            if isinstance(one, RequestDone):
                self.done.append((int(sender[7:]), one.request))
            elif isinstance(one, RequestFailed):
                self.failed[int(sender[7:]), one.request] = one.reason
            else:
                self.sent.append(one.message)
                self.under_way.append((sender, one.to, one.message))

    def settle(self, *, but=()):
        """Delivers all messages, except those to or from some nodes."""
        kept = []
        while self.under_way:
            sender, to, message = self.under_way.pop(0)
            if to in but or sender in but:
                kept.append((sender, to, message))
            else:
                self.dispatch(sender, to, message)
        self.under_way = kept

    def deliver(self, kind):
        """Delivers the first message of a kind."""
        place = next(place for place, one in enumerate(self.under_way) if isinstance(one[2], kind))
        self.dispatch(*self.under_way.pop(place))

    def dispatch(self, sender, to, message):
        kind, _, number = to.partition("-")
        if to == MANAGER:
            answers = {
                JoinAggregation: self.group.on_join_aggregation,
                PauseReached: self.group.on_pause_reached,
                LeaveAggregation: self.group.on_leave_aggregation,
            }
            self.send_view(answers.get(type(message), self.group.on_filled)(message))
        elif kind == "client" and int(number) in self.clients:
            self.take(to, self.clients[int(number)].on_message(message))
        elif kind == "server" and int(number) in self.nodes:
            self.take(to, self.nodes[int(number)].on_message(sender, message))

    def push(self, client, content, first=0, last=100, time=None):
        number, outgoing = self.clients[client].push("w", content, first, last, time)
        self.take(f"client-{client}", outgoing)
        return client, number

    def lose_client(self, client):
        del self.clients[client]
        self.send_view(self.group.on_client_gone(client))

    def lose_server(self, server):
        del self.nodes[server]
        self.send_view(self.group.on_lost(server))

    def count(self, kind):
        return sum(isinstance(message, kind) for message in self.sent)

    def waiting(self, kind):
        return sum(isinstance(message, kind) for _, _, message in self.under_way)

    def values(self, key):
        """Values of the key on every holder."""
        holders = self.group.view.ring.holders(SPACE, key)
        return [self.nodes[server]._store.table(SPACE).values[key] for server in holders]

    def times(self, key):
        return self.nodes[self.group.view.ring.holders(SPACE, key)[0]].push_times("w", key)


def test_the_pushes_of_a_time_are_copied_as_one_and_acknowledged_together():
    """Replication after aggregation: k messages an iteration and range, not k n."""
    job = Job(3, 5, replicas=2)
    for client in job.clients:
        job.push(client, {5: 1}, 5, 6)
    for _ in job.clients:
        assert not job.waiting(Replicate)
        job.deliver(Push)
    assert (job.waiting(Replicate), job.waiting(PushAck)) == (1, 0)
    job.deliver(Replicate)
    job.deliver(Replicate)
    job.deliver(ReplicateAck)
    assert not job.waiting(PushAck)
    job.deliver(ReplicateAck)
    assert job.waiting(PushAck) == 5
    job.settle()
    assert job.count(Replicate) == 2
    assert sorted(client for client, _ in job.done) == [0, 1, 2, 3, 4]
    assert job.values(5) == [5, 5, 5]


def test_an_incomplete_sum_is_applied_on_no_server():
    job = Job(3, 2)
    job.push(0, {5: 1}, 5, 6)
    job.settle()
    assert job.values(5) == [0, 0, 0]
    assert job.done == []
    assert job.times(5) == {}


def test_keys_that_no_push_lists_also_take_its_time():
    job = Job(2, 2)
    job.push(0, {5: 1})
    job.push(1, {})
    job.settle()
    assert job.times(5) == job.times(77) == {0: 1, 1: 1}


def test_a_client_may_be_ahead():
    job = Job(2, 2)
    numbers = [job.push(0, {5: 1}) for _ in range(3)]
    job.settle()
    assert job.done == []
    job.push(1, {5: 10})
    job.settle()
    assert numbers[0] in job.done
    assert numbers[1] not in job.done
    assert job.values(5) == [11, 11]


def test_no_push_is_lost_with_a_master_that_has_half_of_a_time():
    job = Job(4, 3)
    for client in (0, 1):
        job.push(client, {5: 1}, 5, 6)
    job.settle()
    job.lose_server(job.group.view.ring.holders(SPACE, 5)[0])
    job.settle()
    job.push(2, {5: 1}, 5, 6)
    job.settle()
    assert job.values(5) == [3, 3, 3]
    assert len(job.done) == 3


def test_a_time_is_complete_without_lost_clients():
    job = Job(3, 3)
    job.push(0, {5: 1})
    job.push(1, {5: 10})
    job.settle()
    job.lose_client(2)
    job.settle()
    assert len(job.done) == 2
    assert job.values(5) == [11, 11, 11]


def test_pushes_of_a_lost_client_count_only_where_their_sum_was_complete():
    job = Job(4, 2, replicas=1)
    job.push(0, dict.fromkeys(range(100), 1))
    job.push(1, dict.fromkeys(range(100), 10))
    reached = {to for sender, to, _ in job.under_way if sender == "client-1"} - {"server-0"}
    job.under_way = [one for one in job.under_way if one[:2] != ("client-1", "server-0")]
    job.settle()
    job.lose_client(1)
    job.settle()
    assert len(job.done) == 1
    masters = {key: job.group.view.ring.holders(SPACE, key)[0] for key in range(100)}
    assert {master == 0 for master in masters.values()} == {True, False}
    for key, master in masters.items():
        assert job.values(key) == ([11, 11] if f"server-{master}" in reached else [1, 1])


def test_a_late_push_of_a_lost_client_is_not_applied():
    job = Job(2, 2)
    job.push(1, {5: 10}, 5, 6)
    late = job.under_way.pop()
    job.lose_client(1)
    job.settle()
    job.dispatch(*late)
    job.push(0, {5: 1}, 5, 6)
    job.settle()
    assert job.values(5) == [1, 1]


def test_a_repeated_push_counts_once():
    job = Job(2, 2)
    job.push(0, {5: 1}, 5, 6)
    ((sender, to, message),) = job.under_way
    job.settle()
    job.dispatch(sender, to, message)  # while it waits
    job.push(1, {5: 10}, 5, 6)
    job.settle()
    job.dispatch(sender, to, message)  # and afterwards
    assert job.waiting(PushAck) == 1
    job.settle()
    assert job.values(5) == [11, 11]


# Newcomers ------------------------------------------------------------------------------------------------


def test_a_newcomer_begins_with_a_time_that_no_client_has_pushed():
    job = Job(2, 2)
    for _ in range(3):
        job.push(0, {5: 1})
    job.push(1, {5: 10})
    job.settle()
    job.clients[2] = PsClient(2, slice_content)
    job.take("client-2", job.clients[2].on_view(job.group.view))
    first = job.push(2, {5: 100})  # it joins with its first push
    job.settle()
    assert job.clients[2].first_time("w") == 4
    for client, pushes in ((1, 3), (0, 1)):
        for _ in range(pushes):
            assert first not in job.done
            job.push(client, {5: 10**client})
            job.settle()
    assert first in job.done
    assert job.values(5) == [144, 144]


def test_in_a_pause_no_client_begins_a_time():
    job = Job(2, 2)
    job.clients[2] = PsClient(2, slice_content)
    job.take("client-2", job.clients[2].join_aggregation("w"))
    job.settle(but=("client-1",))
    sent = job.count(Push)
    assert job.group.view.paused
    job.push(0, {5: 1})
    job.settle(but=("client-1",))
    assert job.count(Push) == sent
    job.settle()
    assert not job.group.view.paused
    assert job.count(Push) > sent


def test_a_client_that_pushes_no_more_leaves_and_is_not_waited_for():
    job = Job(2, 2)
    job.push(0, {5: 1})
    with pytest.raises(ProtocolError, match="expected all pushes to w to be done"):
        job.clients[0].leave_aggregation("w")
    job.push(1, {5: 10})
    job.settle()
    job.take("client-0", job.clients[0].leave_aggregation("w"))
    with pytest.raises(ProtocolError, match="that this client has not left, got w"):
        job.clients[0].push("w", {5: 1}, 0, 100)
    job.push(1, {5: 10})
    job.settle()
    assert job.values(5) == [21, 21]
    assert len(job.done) == 3


def test_only_a_namespace_that_aggregates_has_participants():
    group = ServerGroup(1)
    with pytest.raises(ProtocolError, match="expected a namespace that aggregates, got v"):
        group.on_join_aggregation(JoinAggregation(client=0, namespace="v"))
    group.on_namespace_opened(NamespaceSpec("v", 10, 10))
    with pytest.raises(ProtocolError, match="expected a namespace that aggregates"):
        group.on_join_aggregation(JoinAggregation(client=0, namespace="v"))


def test_a_manager_restarted_in_a_pause_ends_the_pause():
    job = Job(2, 2)
    job.push(0, {5: 1})
    job.clients[2] = PsClient(2, slice_content)
    job.take("client-2", job.clients[2].join_aggregation("w"))
    job.settle(but=("client-1",))
    state = json.loads(json.dumps(job.group.state_dict()))
    before, job.group = job.group.view, ServerGroup(2, replicas=2, virtual_nodes=2)
    job.group.load_state_dict(state)
    again = job.group.view
    assert (again.participants, again.paused) == (before.participants, before.paused)
    assert again.paused
    job.settle()
    assert job.group.view.participants == {"w": {0: 1, 1: 1, 2: 2}}


# Times that clients choose --------------------------------------------------------------------------------


def test_pushes_at_one_chosen_time_are_one_operation():
    """A client that skips a time and pushes later adds nothing to it."""
    job = Job(2, 2)
    for time in (3, 5, 9):
        job.push(0, {5: time}, time=time)
    job.settle()
    assert job.done == []
    first = job.push(1, {5: 100}, time=5)
    job.settle()
    assert sorted(job.done) == [(0, 1), (0, 2), first]
    assert job.values(5) == [108, 108]
    assert job.times(5) == {0: 5, 1: 5}
    next_one = job.push(1, {})  # of time 6, which client 0 has left out
    job.settle()
    assert next_one in job.done
    assert job.times(5) == {0: 5, 1: 6}
    job.push(1, {5: 1000}, time=9)
    job.settle()
    assert len(job.done) == 6
    assert job.values(5) == [1117, 1117]


def test_a_newcomer_begins_after_the_times_that_others_have_chosen():
    job = Job(2, 2)
    for client in (0, 1):
        job.push(client, {5: 1}, time=20)
    job.clients[2] = PsClient(2, slice_content)
    job.take("client-2", job.clients[2].on_view(job.group.view))
    early = job.push(2, {5: 1000}, time=20)
    good = job.push(2, {5: 100}, time=23)
    job.settle()
    assert job.clients[2].first_time("w") == 21
    assert job.failed == {early: "expected time 21 or a later one of w, got 20"}
    for client in (0, 1):
        job.push(client, {5: 1}, time=23)
    job.settle()
    assert good in job.done
    assert job.values(5) == [104, 104]


def test_a_past_time_cannot_be_chosen():
    job = Job(2, 2)
    job.push(0, {5: 1})
    job.push(0, {5: 1}, time=7)
    for time in (1, 7):
        with pytest.raises(ValueError, match=f"expected a time of w later than 7, got {time}"):
            job.push(0, {5: 1}, time=time)
    late = PsClient(5, slice_content)  # which knows no view, so that nothing is sent yet
    late.push("w", {5: 1}, 0, 100, 4)
    with pytest.raises(ValueError, match="later than 4, got 3"):
        late.push("w", {5: 1}, 0, 100, 3)
    late.push("v", {5: 1}, 0, 100, 3)  # another namespace has times of its own


def test_a_push_of_a_time_before_its_client_began_is_refused():
    """It would be counted among those that the time waits for."""
    job = Job(2, 1)
    job.push(0, {5: 1})
    job.settle()
    job.clients[1] = PsClient(1, slice_content)
    job.take("client-1", job.clients[1].join_aggregation("w"))
    job.settle()
    job.push(1, {5: 10}, 5, 6)
    ((_, to, push),) = job.under_way
    with pytest.raises(ProtocolError, match="expected a push of time 2 at least, got one of time 1"):
        job.dispatch("client-1", to, replace(push, time=1))


# A change of masters --------------------------------------------------------------------------------------


class NewMaster:
    """Server 2, master of keys in a view in which client 2 is lost; it has nothing of earlier views."""

    def __init__(self) -> None:
        ring = HashRing((0, 1, 2), replicas=2)
        self.key = next(key for key in range(0, 100, 10) if ring.holders(SPACE, key)[0] == 2)
        self.chain = ring.holders(SPACE, self.key)
        self.node = ServerNode(2, SimulatedStore())
        view = PlacementView(
            version=9, epoch=9, ring=ring, spaces={"w": SPACE}, participants={"w": {0: 1, 1: 1}}
        )
        self.node.on_view(view)

    def push(self, client):
        push = Push(
            client=client,
            request=0,
            epoch=9,
            namespace="w",
            first=self.key,
            last=self.key + 1,
            time=1,
            previous_times=(),
            content={self.key: 1},
        )
        return self.node.on_message(f"client-{client}", push)

    def hand_off(self, holder, *clients):
        operation = Operation(
            namespace="w",
            first=self.key,
            last=self.key + 1,
            stamps=tuple(PushStamp(client=client, time=1, previous_times=()) for client in clients),
            content={self.key: len(clients)},
        )
        return self.node.on_message(
            f"server-{holder}", HandoffOperations(view=9, chain=self.chain, operations=(operation,))
        )

    def end(self, holder):
        return self.node.on_message(f"server-{holder}", HandoffDone(view=9))


def test_a_new_master_begins_no_sum_before_the_handoffs_of_all_holders():
    """A sum with a lost client's push may be in what one of them has; another without it would not agree."""
    new = NewMaster()
    assert new.push(0) == new.push(1) == []
    assert new.end(0) == []
    copies = [send.message for send in new.hand_off(1, 0, 1, 2) if isinstance(send.message, Replicate)]
    assert [[mark.client for mark in copy.operation.stamps] for copy in copies] == [[0, 1, 2]]
    assert new.end(1) == []  # both pushes wait for its acknowledgement
    serial = copies[0].serial
    acknowledged = new.node.on_message(
        f"server-{new.chain[1]}", ReplicateAck(view=9, master=2, serial=serial)
    )
    assert [(send.to, type(send.message)) for send in acknowledged] == [
        ("client-0", PushAck),
        ("client-1", PushAck),
    ]
    assert new.node._store.table(SPACE).values[new.key] == 3


def test_a_new_master_without_handed_off_operations_begins_the_sum():
    new = NewMaster()
    new.push(0)
    new.push(1)
    new.end(1)
    (send,) = new.end(0)
    assert [mark.client for mark in send.message.operation.stamps] == [0, 1]


def test_a_handed_off_operation_with_a_push_that_is_applied_is_dropped():
    new = NewMaster()
    new.push(0)
    new.push(1)
    new.end(1)
    new.end(0)
    assert not any(isinstance(send.message, Replicate) for send in new.hand_off(1, 2, 0))


# Bits -----------------------------------------------------------------------------------------------------


class Arrays:
    """A store of float32 rows that Adam changes."""

    def __init__(self) -> None:
        self._table = ArrayTable(SPACE.keys, SPACE.block_keys, Adam(0.1))

    def table(self, space):
        return self._table


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sums_are_bit_identical_in_any_order_of_pushes(order):
    numbers = np.random.default_rng(3)
    some = [
        Entries(0, numbers.normal(size=100).astype(np.float32)),
        Entries(0, numbers.normal(size=2).astype(np.float32), np.array([5, 7])),
        Entries(0, numbers.normal(size=3).astype(np.float32), np.array([5, 7, 98])),
    ]

    def pushed_in(order):
        node = ServerNode(0, Arrays())
        ring = HashRing((0,), replicas=0)
        begins = dict.fromkeys(range(3), 1)
        node.on_view(
            PlacementView(version=0, epoch=0, ring=ring, spaces={"w": SPACE}, participants={"w": begins})
        )
        for client in order:
            one = PsClient(client, Entries.key_range)
            one.on_view(node.view)
            for send in one.push("w", some[client], 0, 100)[1]:
                node.on_message(f"client-{client}", send.message)
        return node._store.table(SPACE).read(0, 100, None).values

    assert pushed_in(order).tobytes() == pushed_in(range(3)).tobytes()
