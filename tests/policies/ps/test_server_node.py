"""Servers, their manager and a client, message by message; many seeds are in test_simulator_ps.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from offbeat.errors import LostKeysError, ProtocolError
from offbeat.policies.ps.client import PsClient, RequestDone, RequestFailed
from offbeat.policies.ps.hash_ring import NamespaceSpec, block_point
from offbeat.policies.ps.messages import (
    PullResult,
    Push,
    PushAck,
    Rejected,
    Replicate,
    ReplicateAck,
    ServerFillDone,
    WrongMaster,
)
from offbeat.policies.ps.server_group import ServerGroup
from offbeat.policies.ps.server_node import MANAGER, SendMessage, ServerNode
from offbeat.simulator.ps.cluster import SimulatedStore, slice_content

SPACE = NamespaceSpec("w", 100, 10)


class Job:
    """Servers, a client and their manager; messages wait until the test delivers them."""

    def __init__(self, servers: int, *, replicas: int = 2) -> None:
        self.group = ServerGroup(servers, replicas=replicas, virtual_nodes=2)
        self.group.on_namespace_opened(SPACE)
        self.nodes = {server: ServerNode(server, SimulatedStore()) for server in range(servers)}
        self.client = PsClient(0, slice_content)
        self.under_way: list[tuple[str, SendMessage]] = []
        self.done: list[RequestDone] = []
        self.failed: list[RequestFailed] = []
        for server in range(servers):
            self.send_view(self.group.on_joined(server))

    def send_view(self, view):
        if view is not None:
            for server, node in self.nodes.items():
                self.take(f"server-{server}", node.on_view(view))
            self.take("client-0", self.client.on_view(view))

    def take(self, sender, outgoing):
        for one in outgoing:
            if isinstance(one, RequestDone):
                self.done.append(one)
            elif isinstance(one, RequestFailed):
                self.failed.append(one)
            else:
                self.under_way.append((sender, one))

    def deliver(self, sender: str, to: str) -> object:
        """Delivers the first message of one to another; returns it."""
        place, (_, send) = next(
            (place, one) for place, one in enumerate(self.under_way) if (one[0], one[1].to) == (sender, to)
        )
        del self.under_way[place]
        self.dispatch(sender, send)
        return send.message

    def dispatch(self, sender, send):
        if send.to == MANAGER:
            self.send_view(self.group.on_filled(send.message))
        elif send.to == "client-0":
            self.take("client-0", self.client.on_message(send.message))
        elif int(send.to[7:]) in self.nodes:
            self.take(send.to, self.nodes[int(send.to[7:])].on_message(sender, send.message))

    def settle(self):
        while self.under_way:
            sender, send = self.under_way.pop(0)
            self.dispatch(sender, send)

    def kill(self, server: int):
        del self.nodes[server]
        self.under_way = [one for one in self.under_way if f"server-{server}" not in (one[0], one[1].to)]
        self.send_view(self.group.on_lost(server))

    def push(self, content, first, last):
        number, outgoing = self.client.push("w", content, first, last)
        self.take("client-0", outgoing)
        return number

    def chain(self, key):
        return self.group.view.ring.holders(SPACE, key)

    def values(self, server, key):
        return self.nodes[server]._store.table(SPACE).values[key]


def test_a_push_is_acknowledged_after_the_last_replica_has_it():
    job = Job(3)
    master, second, third = (f"server-{server}" for server in job.chain(5))
    number = job.push({5: 1}, 5, 6)
    job.deliver("client-0", master)
    assert isinstance(job.deliver(master, second), Replicate)
    assert isinstance(job.deliver(second, third), Replicate)
    assert isinstance(job.deliver(third, second), ReplicateAck)
    assert not any(send.to == "client-0" for _, send in job.under_way)
    assert isinstance(job.deliver(second, master), ReplicateAck)
    assert isinstance(job.deliver(master, "client-0"), PushAck)
    assert job.done == [RequestDone(number, ())]
    assert [job.values(server, 5) for server in job.chain(5)] == [1, 1, 1]


def test_a_push_that_wants_values_is_answered_with_them_after_the_last_replica_has_it():
    job = Job(3)
    master, second, third = (f"server-{server}" for server in job.chain(5))
    job.push({5: 1, 6: 2}, 5, 7)
    job.settle()
    number, outgoing = job.client.push("w", {5: 1}, 5, 7, wants_values=True)
    job.take("client-0", outgoing)
    job.deliver("client-0", master)
    job.push({5: 1}, 5, 7)  # by when it is answered, another may have been applied
    job.deliver("client-0", master)
    job.deliver(master, second)
    job.deliver(second, third)
    job.deliver(third, second)
    assert not any(send.to == "client-0" for _, send in job.under_way)
    job.deliver(second, master)
    assert isinstance(job.deliver(master, "client-0"), PullResult)
    assert job.done[1:] == [RequestDone(number, ((5, 7, {5: 3, 6: 2}),))]


def test_a_push_that_wants_values_is_refused_where_they_cannot_be_read():
    def read(*_):
        raise ValueError("too much")

    job = Job(1, replicas=0)
    job.nodes[0]._store.table(SPACE).read = read
    number, outgoing = job.client.push("w", {5: 1}, 5, 6, wants_values=True)
    job.take("client-0", outgoing)
    job.deliver("client-0", "server-0")
    assert isinstance(job.deliver("server-0", "client-0"), Rejected)
    (failed,) = job.failed
    assert failed.request == number
    assert "too much" in failed.reason


def test_a_client_that_wants_values_refuses_an_answer_without_them():
    client = Job(1, replicas=0).client
    number, _ = client.push("w", {5: 1}, 5, 6, wants_values=True)
    with pytest.raises(ProtocolError, match="expected values"):
        client.on_message(PushAck(request=number, first=5, last=6))


def test_a_push_without_replicas_is_acknowledged_once():
    job = Job(1, replicas=0)
    job.push({5: 1}, 5, 6)
    job.deliver("client-0", "server-0")
    assert [type(send.message) for _, send in job.under_way] == [PushAck]


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_push_is_applied_in_place_only_when_no_other_server_needs_it(replicas):
    job = Job(2, replicas=replicas)
    job.push({5: 1}, 5, 6)
    (_, send), *_ = job.under_way
    node, push = job.nodes[int(send.to[7:])], send.message
    assert node.can_apply_in_place(push) == (replicas == 0)
    others = ({"epoch": 99}, {"namespace": "x"}, {"last": 101}, {"first": 7})
    assert not any(node.can_apply_in_place(replace(push, **other)) for other in others)
    node._store.table(SPACE).reads_pushes_once = False
    assert not node.can_apply_in_place(push)


def test_a_push_that_waits_for_others_is_not_applied_in_place():
    job = Job(1, replicas=0)
    job.send_view(job.group.on_namespace_opened(NamespaceSpec("sums", 100, 10, aggregates=True)))
    push = Push(
        client=0, request=1, epoch=9, namespace="sums", first=0, last=5, time=1, previous_times=(), content={}
    )
    push = replace(push, epoch=job.group.view.epoch)
    assert not job.nodes[0].can_apply_in_place(push)
    assert job.nodes[0].can_apply_in_place(replace(push, namespace="w"))
    job.nodes[1] = ServerNode(1, SimulatedStore())
    job.send_view(job.group.on_joined(1))  # which takes over some of it
    push = replace(push, namespace="w", epoch=job.group.view.epoch)
    assert not any(node.can_apply_in_place(push) for node in job.nodes.values())


def test_a_push_that_is_sent_again_is_acknowledged_and_not_applied_again():
    job = Job(2)
    job.push({5: 1}, 5, 6)
    (_, send), *_ = job.under_way
    job.settle()
    job.take(send.to, job.nodes[int(send.to[7:])].on_message("client-0", send.message))
    assert any(isinstance(one.message, PushAck) for _, one in job.under_way)
    job.settle()
    assert job.values(job.chain(5)[0], 5) == 1


def test_a_request_across_servers_is_done_when_every_part_is():
    job = Job(3, replicas=0)
    job.push({key: key for key in range(100)}, 0, 100)
    job.settle()
    assert len(job.done) == 1
    _, outgoing = job.client.pull("w", 0, 100)
    job.take("client-0", outgoing)
    job.settle()
    values = {key: value for _, _, part in job.done[1].parts for key, value in part.items()}
    assert values == {key: key for key in range(1, 100)} | {0: 0}


def test_a_request_of_an_old_epoch_is_answered_with_the_new_one():
    job = Job(2)
    _, outgoing = job.client.pull("w", 5, 6)
    job.kill(1 - job.chain(5)[0])
    node = next(iter(job.nodes.values()))
    (stale,) = node.on_message("client-0", outgoing[0].message)
    assert isinstance(stale.message, WrongMaster)
    assert stale.message.epoch == job.group.view.epoch


def test_a_request_of_an_unknown_epoch_waits_for_its_view():
    job = Job(2)
    late = ServerNode(7, SimulatedStore())
    _, outgoing = job.client.pull("w", 5, 6)
    assert late.on_message("client-0", outgoing[0].message) == []
    answers = late.on_view(job.group.view)
    assert isinstance(answers[0].message, WrongMaster)  # it has no part in the ring


def test_an_impossible_request_that_waited_for_a_view_is_refused_and_the_view_is_applied():
    """Otherwise the manager would be blamed, and requests of others would be lost."""
    job = Job(1)
    late = ServerNode(0, SimulatedStore())
    bad = Push(
        client=666,
        request=7,
        epoch=0,
        namespace="x",
        first=0,
        last=4,
        time=1,
        previous_times=(),
        content={0: 1},
    )
    _, outgoing = job.client.push("w", {5: 1}, 5, 6)
    assert late.on_message("client-666", bad) == late.on_message("client-0", outgoing[0].message) == []
    (to, refused), (other, pushed) = late.on_view(job.group.view)
    assert (to, other) == ("client-666", "client-0")
    assert isinstance(refused, Rejected)
    assert (refused.request, refused.first, refused.last) == (7, 0, 4)
    assert "expected keys of a namespace that was opened, got 0 to 4 of x" in refused.reason
    assert pushed == PushAck(request=1, first=5, last=6)


def test_a_request_that_a_server_refuses_is_over():
    job = Job(2)
    number, _ = job.client.push("w", dict.fromkeys(range(100), 1), 0, 100)
    (failed,) = job.client.on_message(Rejected(request=number, first=0, last=10, reason="too large"))
    assert failed == RequestFailed(number, "too large")
    assert job.client.on_message(PushAck(request=number, first=10, last=100)) == []
    assert job.client.on_view(replace(job.group.view, version=9, epoch=9)) == []


def test_the_successor_of_a_lost_master_has_the_acknowledged_pushes_and_serves_at_once():
    job = Job(4)
    job.push({5: 1}, 5, 6)
    job.settle()
    master, second, *_ = job.chain(5)
    job.kill(master)
    assert job.chain(5)[0] == second
    _, outgoing = job.client.pull("w", 5, 6)
    job.take("client-0", outgoing)
    job.deliver("client-0", f"server-{second}")
    assert job.deliver(f"server-{second}", "client-0") == PullResult(
        namespace=SPACE.name, request=2, first=5, last=6, content={5: 1}
    )


def test_the_new_last_replica_is_filled_and_the_view_then_records_it():
    job = Job(4)
    for key in range(0, 100, 3):
        job.push({key: 1}, key, key + 1)
    job.settle()
    job.kill(job.chain(0)[0])
    assert job.group.view.filling
    job.settle()
    assert not job.group.view.filling
    for key in range(0, 100, 3):
        assert [job.values(server, key) for server in job.chain(key)] == [1, 1, 1]


def test_a_server_joins_and_leaves_while_pushes_continue():
    job = Job(2)
    job.nodes[2] = ServerNode(2, SimulatedStore())
    job.push(dict.fromkeys(range(100), 1), 0, 100)
    job.send_view(job.group.on_joined(2))
    job.push(dict.fromkeys(range(100), 1), 0, 100)
    job.settle()
    assert job.group.view.ring.servers == (0, 1, 2)
    job.send_view(job.group.on_leaving(0))
    job.push(dict.fromkeys(range(100), 1), 0, 100)
    job.settle()
    assert job.group.view.ring.servers == (1, 2)
    assert len(job.done) == 3
    assert {job.values(server, key) for key in range(100) for server in job.chain(key)} == {3}


def test_a_server_that_is_not_in_the_ring_keeps_nothing():
    job = Job(2, replicas=0)
    job.push(dict.fromkeys(range(100), 1), 0, 100)
    job.settle()
    job.send_view(job.group.on_leaving(0))
    job.settle()
    assert not +job.nodes[0]._store.table(SPACE).values
    assert {job.values(1, key) for key in range(100)} == {1}


def test_a_push_of_keys_with_several_masters_is_refused_and_changes_nothing():
    job = Job(3)
    _, outgoing = job.client.push("w", dict.fromkeys(range(100), 1), 0, 100)
    assert len(outgoing) > 1
    first = outgoing[0]
    master = job.nodes[int(first.to[7:])]
    with pytest.raises(ProtocolError, match="keys with one master"):
        master.on_message("client-0", replace(first.message, last=100, content=dict.fromkeys(range(100), 1)))
    assert not +job.nodes[job.chain(0)[0]]._store.table(SPACE).values


# The manager ----------------------------------------------------------------------------------------------


def test_the_loss_of_more_servers_than_there_are_replicas_is_counted():
    job = Job(4, replicas=1)
    for server in job.chain(5):
        job.kill(server)
    assert job.group.data_losses == 1


# Losses ---------------------------------------------------------------------------------------------------


def pull(job: Job, first: int, last: int) -> RequestDone | RequestFailed:
    """The outcome of a pull."""
    job.done.clear()
    job.failed.clear()
    number, outgoing = job.client.pull("w", first, last)
    job.take("client-0", outgoing)
    job.settle()
    (found,) = [found for found in [*job.done, *job.failed] if found.request == number]
    return found


def lost_keys(job: Job) -> list[int]:
    arcs = job.group.view.lost
    points = {key: block_point("w", key // SPACE.block_keys) for key in range(SPACE.keys)}
    return [key for key, point in points.items() if any(arc.start <= point < arc.stop for arc in arcs)]


def test_requests_for_keys_whose_servers_are_all_lost_fail_and_name_both():
    job = Job(2, replicas=1)
    job.push(dict.fromkeys(range(100), 1), 0, 100)
    job.settle()
    job.kill(1)
    assert isinstance(pull(job, 5, 6), RequestDone)
    job.kill(0)
    failed = pull(job, 0, 100)
    assert isinstance(failed.error, LostKeysError)
    assert (failed.error.namespace, failed.error.ranges, failed.error.servers) == ("w", ((0, 100),), (0,))
    assert (
        failed.reason
        == str(failed.error)
        == (
            "the values of keys 0 to 99 of w are lost: all servers that had them are gone, server 0 last; "
            'open the namespace with on_loss="reset" to restart them from zero'
        )
    )


def test_a_client_that_joins_after_a_loss_gets_an_error_and_pulls_no_zeros():
    job = Job(1, replicas=0)
    job.push({5: 1}, 5, 6)
    job.settle()
    job.kill(0)
    job.nodes[1] = ServerNode(1, SimulatedStore())
    job.send_view(job.group.on_joined(1))
    job.settle()
    assert job.group.view.ring.servers == (1,)
    job.client = PsClient(0, slice_content)
    job.client.on_view(job.group.view)
    assert isinstance(pull(job, 0, 10), RequestFailed)


def test_the_next_request_reports_a_loss_once_and_requests_for_lost_keys_keep_failing():
    job = Job(3, replicas=0)
    job.push(dict.fromkeys(range(100), 1), 0, 100)
    job.settle()
    job.kill(job.chain(0)[0])
    lost = lost_keys(job)
    kept = next(key for key in range(100) if key not in lost)
    assert 0 in lost
    first = pull(job, kept, kept + 1)
    assert isinstance(first, RequestFailed)
    assert [key for begin, end in first.error.ranges for key in range(begin, end)] == lost
    for _ in range(2):
        assert pull(job, kept, kept + 1).parts == ((kept, kept + 1, {kept: 1}),)
        assert isinstance(pull(job, 0, 1), RequestFailed)
    assert isinstance(pull(job, 0, 100), RequestFailed)


def test_of_requests_under_way_only_those_for_lost_keys_fail():
    job = Job(3, replicas=0)
    gone = job.chain(0)[0]
    kept = next(key for key in range(100) if job.chain(key)[0] != gone)
    alive, lost = job.push({kept: 1}, kept, kept + 1), job.push({0: 1}, 0, 1)
    job.kill(gone)
    assert [failed.request for failed in job.failed] == [lost]
    job.settle()
    assert [done.request for done in job.done] == [alive]
    assert isinstance(pull(job, kept, kept + 1), RequestDone)  # the loss has been reported


def test_a_loss_does_not_affect_a_namespace_without_lost_keys():
    job = Job(3, replicas=0)
    job.kill(job.chain(0)[0])
    job.send_view(job.group.on_namespace_opened(NamespaceSpec("later", 100, 10)))
    number, outgoing = job.client.push("later", {}, 0, 100)
    job.take("client-0", outgoing)
    job.settle()
    assert [done.request for done in job.done] == [number]


def test_a_namespace_that_is_reset_begins_empty_on_all_its_servers():
    """Also on a server that was being filled with lost values."""
    job = Job(3, replicas=1)
    job.push(dict.fromkeys(range(100), 1), 0, 100)
    job.settle()
    master, last = job.chain(5)
    gainer = 3 - master - last
    not_held = [key for key in range(100) if gainer not in job.chain(key)]
    job.kill(master)
    job.deliver(f"server-{gainer}", f"server-{last}")  # its transfer request
    while not any(job.values(gainer, key) for key in not_held):
        job.deliver(f"server-{last}", f"server-{gainer}")  # but not all of that
    job.kill(last)
    lost = lost_keys(job)
    assert 5 in lost
    assert not any(job.values(server, key) for key in lost for server in job.nodes)
    assert isinstance(pull(job, 5, 6), RequestFailed)
    job.send_view(job.group.on_namespace_opened(SPACE, "reset"))
    job.settle()
    assert pull(job, 5, 6).parts == ((5, 6, {}),)
    job.push(dict.fromkeys(lost, 7), 0, 100)
    job.settle()
    assert {job.values(server, key) for key in lost for server in job.chain(key)} == {7}
    assert not job.group.view.lost


def test_a_namespace_opened_with_reset_before_any_loss_restarts_at_once():
    job = Job(2, replicas=0)
    assert job.group.on_namespace_opened(SPACE, "reset") is None
    job.push(dict.fromkeys(range(100), 1), 0, 100)
    job.settle()
    job.kill(0)
    job.settle()
    values = {key: value for _, _, part in pull(job, 0, 100).parts for key, value in part.items()}
    assert 0 < len(values) < 100


def test_a_request_waits_for_the_servers_that_have_not_answered_and_no_others():
    job = Job(3, replicas=0)
    job.push(dict.fromkeys(range(100), 1), 0, 100)
    masters = {job.chain(key)[0] for key in range(100)}
    assert job.client.unanswered_servers("w", 0, 100) == sorted(masters) == [0, 1, 2]
    while any(send.to != "server-1" for _, send in job.under_way):
        sender, send = next(one for one in job.under_way if one[1].to != "server-1")
        job.under_way.remove((sender, send))
        job.dispatch(sender, send)
    assert job.client.unanswered_servers("w", 0, 100) == [1]


def test_a_restarted_manager_keeps_the_lost_keys():
    job = Job(2, replicas=0)
    job.kill(0)
    again = ServerGroup(2, replicas=0, virtual_nodes=2)
    again.load_state_dict(json.loads(json.dumps(job.group.state_dict())))
    assert again.view.lost == job.group.view.lost != ()
    assert again.view.lost_arcs_dropped == job.group.view.lost_arcs_dropped != ()
    assert not again.on_namespace_opened(SPACE, "reset").lost


def test_a_restarted_manager_continues():
    job = Job(4)
    job.push(dict.fromkeys(range(100), 1), 0, 100)
    job.settle()
    job.kill(2)
    again = ServerGroup(4, replicas=2, virtual_nodes=2)
    again.load_state_dict(json.loads(json.dumps(job.group.state_dict())))
    assert again.state_dict() == job.group.state_dict()
    assert again.view.ring.moves(job.group.view.ring) == []
    job.group = again
    job.settle()
    assert not again.view.filling


def test_reports_of_an_older_view_do_not_count():
    job = Job(3)
    number = job.group.view.version
    job.kill(2)
    assert job.group.on_filled(ServerFillDone(server=0, view=number)) is None


def test_a_namespace_is_opened_once_with_a_new_epoch():
    job = Job(2)
    epoch = job.group.view.epoch
    space = NamespaceSpec("v", 50, 5)
    assert job.group.on_namespace_opened(space).epoch > epoch
    assert job.group.on_namespace_opened(space) is None
    with pytest.raises(ProtocolError, match="expected the namespace v as it was opened"):
        job.group.on_namespace_opened(NamespaceSpec("v", 60, 5))
    with pytest.raises(ProtocolError, match="expected blocks of 1 to 50 keys"):
        job.group.on_namespace_opened(NamespaceSpec("u", 50, 51))


def test_a_server_joins_only_once():
    job = Job(2)
    with pytest.raises(ProtocolError, match="expected a new server, got server 1"):
        job.group.on_joined(1)


def test_a_group_without_servers_is_refused():
    with pytest.raises(ValueError, match="at least 1 server"):
        ServerGroup(0)
