"""The manager as a policy: its messages when servers and clients join, leave and open namespaces."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.events import (
    Action,
    AggregationJoined,
    AggregationLeft,
    AggregationPaused,
    AssignTask,
    ClusterView,
    Event,
    ForgetClient,
    LostArc,
    NamespaceRequested,
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
    ServerTransferDone,
    ServerUnreachable,
    TaskDone,
    TaskRequested,
    TauSet,
    Tick,
    WorkerGroupJoined,
    WorkerGroupLeft,
    WorkerGroupView,
)
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.policies.ps.manager import PsManager, view_from_action
from offbeat.policies.ps.messages import PlacementView

SERVERS = 3


def joined(node: str, *functions: str) -> NodeJoined:
    return NodeJoined(now_s=0.0, node=node, addresses=(f"tcp://{node}:1",), functions=functions)


def left(node: str) -> NodeLeft:
    return NodeLeft(now_s=0.0, node=node)


def lost(node: str) -> NodeLost:
    return NodeLost(now_s=0.0, node=node, cause="it fell silent")


def opened(
    node: str,
    name: str = "w",
    *,
    keys: int = 100,
    block_keys: int = 10,
    function: str = "",
    aggregates: bool = False,
) -> NamespaceRequested:
    about = f"about {name}"
    return NamespaceRequested(
        now_s=0.0,
        node=node,
        name=name,
        keys=keys,
        block_keys=block_keys,
        spec=about,
        function=function,
        aggregates=aggregates,
    )


def enlists(client: int, name: str = "s") -> AggregationJoined:
    return AggregationJoined(now_s=0.0, node=f"client-{client}", namespace=name)


def paused(client: int, pause: int, time: int, name: str = "s") -> AggregationPaused:
    return AggregationPaused(now_s=0.0, node=f"client-{client}", namespace=name, pause_view=pause, time=time)


def withdraws(client: int, name: str = "s") -> AggregationLeft:
    return AggregationLeft(now_s=0.0, node=f"client-{client}", namespace=name)


def joins(client: int, on_loss: str = "replace") -> WorkerGroupJoined:
    return WorkerGroupJoined(
        now_s=0.0, node=f"client-{client}", group="g", shards=6, on_loss=on_loss, wait_timeout_s=1.0
    )


def asks(client: int, passes: int = 9) -> TaskRequested:
    return TaskRequested(now_s=0.0, node=f"client-{client}", group="g", passes_max=passes, shards_max=2)


def done(client: int, task: int) -> TaskDone:
    return TaskDone(now_s=0.0, node=f"client-{client}", group="g", task=task)


def begins(view: ClusterView) -> dict[int, int]:
    """First time of each client that takes part in the namespace that aggregates."""
    assert all(one.namespace == "s" for one in view.participants)
    return {one.client: one.first_time for one in view.participants}


def filled(server: int, view: int) -> ServerTransferDone:
    return ServerTransferDone(now_s=0.0, node=f"server-{server}", view=view)


def leaves(server: int, node: str = "client-0") -> ServerRemovalRequested:
    return ServerRemovalRequested(now_s=0.0, node=node, server=server)


def missed(node: str, server: int) -> ServerUnreachable:
    return ServerUnreachable(now_s=0.0, node=node, server=server, cause="no answer")


def cluster_view(actions: list[Action]) -> ClusterView:
    """The one view among the actions."""
    (found,) = [action for action in actions if isinstance(action, ClusterView)]
    return found


def all_filled(manager: PsManager, view: ClusterView) -> ClusterView:
    """Every server reports the transfers of this view done; returns the view that follows."""
    actions = [action for one in view.servers for action in manager.handle(filled(one.server, view.version))]
    return cluster_view(actions)


@pytest.fixture
def manager() -> PsManager:
    """A manager whose servers have all joined."""
    manager = PsManager(SERVERS, virtual_nodes=4, replicas=1)
    for server in range(SERVERS):
        manager.handle(joined(f"server-{server}"))
    return manager


# Joining


def test_no_node_receives_a_view_before_all_servers_have_joined() -> None:
    manager = PsManager(3)
    assert manager.handle(joined("client-0")) == []
    assert manager.handle(joined("server-2")) == []
    assert manager.handle(joined("server-0")) == []
    view = cluster_view(manager.handle(joined("server-1")))
    assert view.node == ""
    assert (view.version, view.epoch, view.ring, view.next_ring) == (0, 0, (0, 1, 2), ())
    assert view.servers == tuple(
        ServerAddress(server=one, addresses=(f"tcp://server-{one}:1",)) for one in range(3)
    )


def test_a_server_that_is_lost_before_all_have_joined_is_not_waited_for() -> None:
    manager = PsManager(2)
    manager.handle(joined("server-0"))
    assert manager.handle(lost("server-0")) == []
    assert manager.handle(joined("server-1")) == []
    assert cluster_view(manager.handle(joined("server-2"))).ring == (1, 2)


def test_only_the_joining_client_receives_the_view(manager: PsManager) -> None:
    (view,) = manager.handle(joined("client-7"))
    assert isinstance(view, ClusterView)
    assert view.node == "client-7"
    assert view.ring == (0, 1, 2)


def test_servers_are_informed_that_a_client_has_left_or_is_lost(manager: PsManager) -> None:
    manager.handle(joined("client-7"))
    manager.handle(joined("client-8"))
    assert manager.handle(left("client-7")) == [ForgetClient(node="client-7", reason="client-7 has left")]
    reason = "client-8 was lost: it fell silent"
    assert manager.handle(lost("client-8")) == [ForgetClient(node="client-8", reason=reason)]


def test_a_late_server_joins_the_ring_when_all_transfers_are_done(manager: PsManager) -> None:
    prepared = cluster_view(manager.handle(joined("server-9")))
    assert prepared.node == ""
    assert (prepared.ring, prepared.next_ring) == ((0, 1, 2), (0, 1, 2, 9))
    assert 9 in [one.server for one in prepared.servers]
    assert prepared.epoch == 0
    taken_in = all_filled(manager, prepared)
    assert (taken_in.ring, taken_in.next_ring) == ((0, 1, 2, 9), ())
    assert taken_in.version == prepared.version + 1
    assert taken_in.epoch == taken_in.version


def test_transfers_of_an_older_view_admit_no_server(manager: PsManager) -> None:
    older = cluster_view(manager.handle(joined("server-9")))
    manager.handle(opened("client-0"))
    for server in (0, 1, 2, 9):
        assert manager.handle(filled(server, older.version)) == []


def test_transfers_done_in_an_older_view_must_be_reported_again(manager: PsManager) -> None:
    manager.handle(joined("server-8"))
    older = cluster_view(manager.handle(joined("server-9")))
    assert manager.handle(filled(8, older.version)) == []
    view = cluster_view(manager.handle(opened("client-0")))
    assert manager.handle(filled(9, view.version)) == []
    assert cluster_view(manager.handle(filled(8, view.version))).ring == (0, 1, 2, 8, 9)


def test_a_server_joins_only_once(manager: PsManager) -> None:
    manager.handle(lost("server-1"))
    (refused,) = manager.handle(joined("server-1"))
    assert isinstance(refused, RejectPeer)
    assert refused.peer == "server-1"
    assert "expected a new server, got server 1" in refused.reason


@pytest.mark.parametrize(
    "node", ["server-", "server-x", "server-1-2", "server--1", "server- 1", "server-01", "server-٣"]
)
def test_a_server_without_a_number_is_refused(node: str, manager: PsManager) -> None:
    (refused,) = manager.handle(joined(node))
    assert isinstance(refused, RejectPeer)
    assert refused.peer == node
    assert "server-" in refused.reason
    assert manager.handle(opened("client-0")) != []


# Leaving


def test_a_leaving_server_is_removed_when_others_have_its_values(manager: PsManager) -> None:
    prepared = cluster_view(manager.handle(leaves(1)))
    assert (prepared.ring, prepared.next_ring) == ((0, 1, 2), (0, 2))
    gone = all_filled(manager, prepared)
    assert (gone.ring, gone.next_ring) == ((0, 2), ())
    assert manager.handle(left("server-1")) == []
    later = cluster_view(manager.handle(opened("client-0")))
    assert [one.server for one in later.servers] == [0, 2]


def test_the_last_server_does_not_leave() -> None:
    manager = PsManager(1)
    manager.handle(joined("server-0"))
    view = cluster_view(manager.handle(leaves(0)))
    assert (view.ring, view.next_ring) == ((0,), ())
    assert all_filled(manager, view).ring == (0,)


def test_a_lost_server_is_removed_at_once_with_the_reason(manager: PsManager) -> None:
    view = cluster_view(manager.handle(lost("server-1")))
    assert view.node == ""
    assert view.ring == (0, 2)
    assert view.epoch == view.version == 1
    assert view.transfers
    assert [one.server for one in view.servers] == [0, 2]
    assert "server 1 was lost: it fell silent" in view.reason


# Silence, and servers that do not reach each other


def silent(node: str, at_s: float, silent_s: float = 1.25) -> NodeSilent:
    return NodeSilent(now_s=at_s, node=node, silent_s=silent_s)


def resumed(node: str, at_s: float) -> NodeResumed:
    return NodeResumed(now_s=at_s, node=node)


def reached(node: str, server: int) -> ServerReachable:
    return ServerReachable(now_s=0.0, node=node, server=server)


def tick(manager: PsManager, at_s: float) -> list[Action]:
    return manager.handle(Tick(now_s=at_s))


def ring(manager: PsManager) -> tuple[int, ...]:
    assert manager._group.view is not None
    return manager._group.view.ring.servers


def lone(actions: list[Action]) -> tuple[RejectPeer, ClusterView]:
    """The rejection, and the view without the rejected server."""
    refused, view = actions
    assert isinstance(refused, RejectPeer)
    assert isinstance(view, ClusterView)
    return refused, view


def five(replicas: int = 2) -> PsManager:
    manager = PsManager(5, virtual_nodes=4, replicas=replicas)
    for server in range(5):
        manager.handle(joined(f"server-{server}"))
    return manager


def test_a_server_that_is_silent_for_10_s_is_lost_and_not_before(manager: PsManager) -> None:
    assert manager.handle(silent("server-1", 101.25)) == []
    assert tick(manager, 109.9) == []
    refused, view = lone(tick(manager, 110.0))
    assert (refused.peer, view.ring) == ("server-1", (0, 2))
    assert refused.reason == "server-1 was lost: nothing was received from it for 10.0 s"
    assert view.reason == "server 1 was lost: nothing was received from it for 10.0 s"
    assert tick(manager, 130.0) == []


def test_a_server_that_is_back_in_time_is_not_lost(manager: PsManager) -> None:
    manager.handle(silent("server-1", 101.25))
    manager.handle(resumed("server-1", 109.5))
    assert tick(manager, 200.0) == []
    manager.handle(silent("server-1", 201.25))
    assert tick(manager, 209.0) == []


def test_a_client_that_is_silent_for_10_s_is_lost(manager: PsManager) -> None:
    manager.handle(joined("client-7"))
    manager.handle(silent("client-7", 1.25))
    refused, gone = tick(manager, 10.0)
    assert isinstance(refused, RejectPeer)
    assert isinstance(gone, ForgetClient)
    assert (refused.peer, gone.node) == ("client-7", "client-7")


def test_while_more_than_half_of_the_servers_are_silent_none_is_lost_for_silence() -> None:
    manager = five()
    manager.handle(joined("client-0"))
    for server in (1, 2, 3, 4):
        manager.handle(silent(f"server-{server}", 1.25))
    manager.handle(silent("client-0", 1.25))
    assert tick(manager, 9.9) == []
    (view,) = tick(manager, 20.0)
    assert isinstance(view, ClusterView)
    assert "more than half of the servers are silent, so none is declared lost" in view.reason
    assert (view.version, view.ring, view.silent_servers) == (0, (0, 1, 2, 3, 4), (1, 2, 3, 4))
    assert tick(manager, 100.0) == []
    manager.handle(resumed("server-1", 100.1))
    manager.handle(resumed("server-2", 100.1))
    assert cluster_view(tick(manager, 109.9)).silent_servers == (3, 4)  # their silence counts from here
    assert {one.peer for one in tick(manager, 110.1) if isinstance(one, RejectPeer)} == {
        "server-3",
        "server-4",
        "client-0",
    }


def test_silent_servers_with_closed_processes_are_lost_at_once() -> None:
    manager = five()
    for server in (1, 2, 3):
        manager.handle(silent(f"server-{server}", 1.25))
    assert cluster_view(manager.handle(lost("server-1"))).ring == (0, 2, 3, 4)


def test_a_silent_server_with_the_last_copy_is_waited_for_and_that_is_reported() -> None:
    manager = five(replicas=0)
    manager.handle(silent("server-1", 1.25))
    (view,) = tick(manager, 11.0)
    assert isinstance(view, ClusterView)
    assert view.reason == "server-1 is silent, and requests wait for it: it has the last copy of something"
    assert (view.version, view.ring, view.silent_servers) == (0, (0, 1, 2, 3, 4), (1,))
    assert tick(manager, 60.0) == []
    manager.handle(resumed("server-1", 61.0))
    (view,) = tick(manager, 61.1)
    assert isinstance(view, ClusterView)
    assert (view.silent_servers, view.reason) == ((), "server-1 is no longer waited for")


def test_a_silent_server_is_lost_only_while_a_server_that_is_not_silent_has_the_same_values() -> None:
    manager = PsManager(5, virtual_nodes=1, replicas=1)
    for server in range(5):
        manager.handle(joined(f"server-{server}"))
    assert manager._group.view is not None
    one, other = manager._group.view.ring.holders_at(0)
    manager.handle(silent(f"server-{one}", 1.25))
    manager.handle(silent(f"server-{other}", 9.0, 1.25))  # perhaps it is dead
    assert ring(manager) == (0, 1, 2, 3, 4)
    assert cluster_view(tick(manager, 11.0)).silent_servers == (one,)
    manager.handle(resumed(f"server-{other}", 12.0))
    refused, _ = lone(tick(manager, 12.1))
    assert refused.peer == f"server-{one}"


def test_a_silent_server_that_is_waited_for_is_removed_on_request() -> None:
    manager = five(replicas=0)
    manager.handle(opened("client-0"))
    manager.handle(silent("server-1", 1.25))
    tick(manager, 11.0)
    refused, view = lone(manager.handle(leaves(1)))
    assert refused.reason == "server-1 was lost: client-0 has given it up"
    assert view.ring == (0, 2, 3, 4)
    assert {arc.server for arc in view.lost} == {1}


def test_an_outage_between_two_servers_that_ends_before_10_s_loses_neither(
    manager: PsManager,
) -> None:
    assert manager.handle(missed("server-0", 1)) == []
    assert tick(manager, 9.9) == []
    manager.handle(reached("server-0", 1))
    assert tick(manager, 100.0) == []
    assert ring(manager) == (0, 1, 2)


def test_reports_of_a_server_about_itself_are_ignored(manager: PsManager) -> None:
    assert manager.handle(missed("server-1", 1)) == []
    assert tick(manager, 100.0) == []
    assert ring(manager) == (0, 1, 2)


def test_of_two_servers_that_do_not_reach_each_other_for_10_s_the_later_one_is_lost() -> None:
    manager = five()
    manager.handle(missed("server-3", 1))
    manager.handle(missed("server-1", 3))
    refused, view = lone(tick(manager, 10.0))
    assert (refused.peer, view.ring) == ("server-3", (0, 1, 2, 4))
    assert refused.reason == (
        "server-3 was lost: server-3 and server-1 have not reached each other for 10.0 s, and server-3 "
        "cannot reach 1 of the servers and server-1 cannot reach 1: no answer"
    )


def test_of_two_servers_that_do_not_reach_each_other_the_one_with_more_outages_is_lost() -> None:
    manager = five()
    for reporter, server in (("server-2", 1), ("server-1", 4), ("server-3", 1)):
        manager.handle(missed(reporter, server))
    refused, view = lone(tick(manager, 10.0))
    assert (refused.peer, view.ring) == ("server-1", (0, 2, 3, 4))


def test_of_two_servers_that_do_not_reach_each_other_both_stay_if_each_has_a_last_copy() -> None:
    manager = five(replicas=0)
    manager.handle(missed("server-3", 1))
    (view,) = tick(manager, 10.0)
    assert isinstance(view, ClusterView)
    assert (view.version, view.ring) == (0, (0, 1, 2, 3, 4))
    both = "server-1 and server-3 do not reach each other, and both stay"
    assert view.reason == f"{both}: each has the last copy of something"
    assert tick(manager, 100.0) == []


def test_a_returning_silent_server_has_time_to_reach_the_other_servers(
    manager: PsManager,
) -> None:
    manager.handle(silent("server-1", 0.0, 0.0))
    manager.handle(missed("server-0", 1))
    manager.handle(resumed("server-1", 9.9))
    assert tick(manager, 19.8) == []
    manager.handle(reached("server-0", 1))
    assert tick(manager, 100.0) == []


def test_reports_about_removed_servers_do_not_count(manager: PsManager) -> None:
    manager.handle(missed("server-2", 77))
    manager.handle(missed("server-2", 1))
    manager.handle(lost("server-1"))
    assert tick(manager, 100.0) == []
    assert ring(manager) == (0, 2)


# Losses


def all_lost(*, on_loss: str = "") -> PsManager:
    """A manager of two servers, both of which were killed, with a namespace."""
    manager = PsManager(2, virtual_nodes=4, replicas=1)
    for server in range(2):
        manager.handle(joined(f"server-{server}"))
    manager.handle(replace(opened("client-0"), on_loss=on_loss))
    for server in range(2):
        manager.handle(lost(f"server-{server}"))
    return manager


def test_keys_lost_with_their_last_server_are_announced_to_all_nodes() -> None:
    manager = all_lost()
    view = cluster_view(manager.handle(joined("client-3")))
    assert (view.ring, view.lost_arcs_dropped) == ((), ((0, 2**62),))
    assert view.lost == (LostArc(loss=1, namespace="w", start=0, stop=2**62, server=1),)
    prepared = cluster_view(manager.handle(joined("server-8")))
    assert all_filled(manager, prepared).lost == view.lost


def test_keys_stay_lost_until_the_namespace_is_opened_with_reset() -> None:
    manager = all_lost()
    view = cluster_view(manager.handle(replace(opened("client-0"), on_loss="reset")))
    assert view.lost == ()
    assert view.epoch == view.version
    assert view.reason == "the namespace w was opened and restarts from zero after losses"


def test_a_namespace_with_reset_loses_nothing_until_it_is_opened_with_error() -> None:
    manager = all_lost(on_loss="reset")
    assert cluster_view(manager.handle(joined("client-3"))).lost == ()
    for server in (8, 9):
        all_filled(manager, cluster_view(manager.handle(joined(f"server-{server}"))))
    assert manager.handle(replace(opened("client-0"), on_loss="error")) == []
    manager.handle(lost("server-8"))
    assert {arc.server for arc in cluster_view(manager.handle(lost("server-9"))).lost} == {9}


def test_lost_keys_are_not_lost_a_second_time() -> None:
    manager = all_lost()
    all_filled(manager, cluster_view(manager.handle(joined("server-8"))))
    assert [arc.loss for arc in cluster_view(manager.handle(lost("server-8"))).lost] == [1]


def test_an_unknown_on_loss_is_refused(manager: PsManager) -> None:
    (refused,) = manager.handle(replace(opened("client-0"), on_loss="hope"))
    assert isinstance(refused, RejectNamespace)
    assert 'expected on_loss to be "error" or "reset", got \'hope\'' in refused.reason


# Permissions of senders


def test_a_client_may_not_send_reports_of_servers(manager: PsManager) -> None:
    """A client's number may be a server's; only a server reports its own transfers."""
    view = cluster_view(manager.handle(joined("server-9")))
    for server in (0, 1, 2, 9):
        report = ServerTransferDone(now_s=0.0, node=f"client-{server}", view=view.version)
        (refused,) = manager.handle(report)
        assert isinstance(refused, RejectPeer)
        assert refused.peer == report.node
    assert all_filled(manager, view).ring == (0, 1, 2, 9)


def test_no_server_is_removed_because_a_client_cannot_reach_it(manager: PsManager) -> None:
    assert manager.handle(missed("client-0", 1)) == []
    assert manager.handle(missed("client-2", 1)) == []
    assert manager.handle(Tick(now_s=1000.0)) == []


# Namespaces


def test_a_namespace_is_announced_to_all_nodes_with_a_new_epoch(manager: PsManager) -> None:
    view = cluster_view(manager.handle(opened("client-0")))
    assert view.node == ""
    assert view.epoch == view.version == 1
    assert view_from_action(view).spaces == {"w": NamespaceSpec("w", 100, 10, "about w", False)}


def test_the_same_namespace_again_changes_nothing(manager: PsManager) -> None:
    manager.handle(opened("client-0"))
    assert manager.handle(opened("client-1")) == []


def test_a_namespace_before_the_first_view_is_in_it() -> None:
    manager = PsManager(1)
    assert manager.handle(opened("client-0")) == []
    assert set(view_from_action(cluster_view(manager.handle(joined("server-0")))).spaces) == {"w"}


@pytest.mark.parametrize(
    ("different", "why"),
    [
        ({"keys": 101}, "expected the namespace w as it was opened"),
        ({"block_keys": 11}, "expected the namespace w as it was opened"),
        ({"name": "v", "keys": 5, "block_keys": 6}, "expected blocks of 1 to 5 keys"),
        ({"name": "v", "keys": 5, "block_keys": 0}, "expected blocks of 1 to 5 keys"),
        ({"name": "v", "keys": 0, "block_keys": 1}, "expected blocks of 1 to 0 keys"),
        ({"name": "v", "keys": -5, "block_keys": -5}, "expected blocks"),
        ({"name": "v", "keys": 2**63 + 1, "block_keys": 2**58}, "keys"),
    ],
)
def test_an_impossible_namespace_is_refused_to_its_client(
    different: dict[str, Any], why: str, manager: PsManager
) -> None:
    manager.handle(opened("client-0"))
    (refused,) = manager.handle(opened("client-1", **different))
    assert isinstance(refused, RejectNamespace)
    assert (refused.node, refused.name) == ("client-1", different.get("name", "w"))
    assert why in refused.reason
    assert set(view_from_action(cluster_view(manager.handle(joined("client-2")))).spaces) == {"w"}


def test_a_namespace_is_refused_where_a_server_lacks_its_function() -> None:
    manager = PsManager(2)
    manager.handle(joined("server-0", "m:f"))
    manager.handle(joined("server-1", "m:g"))
    (refused,) = manager.handle(opened("client-0", function="m:f"))
    assert isinstance(refused, RejectNamespace)
    assert refused.reason == "server 1 was started without the function m:f"


def test_a_server_without_a_function_that_is_needed_is_refused() -> None:
    manager = PsManager(1)
    manager.handle(joined("server-0", "m:f"))
    cluster_view(manager.handle(opened("client-0", function="m:f")))
    (refused,) = manager.handle(joined("server-1", "m:g"))
    assert isinstance(refused, RejectPeer)
    assert (refused.peer, "m:f" in refused.reason) == ("server-1", True)
    assert cluster_view(manager.handle(joined("server-2", "m:f", "m:g"))).next_ring == (0, 2)


def test_a_namespace_that_was_refused_needs_no_function() -> None:
    manager = PsManager(1)
    manager.handle(joined("server-0", "m:f"))
    manager.handle(opened("client-0", block_keys=0, function="m:f"))
    assert cluster_view(manager.handle(joined("server-1"))).next_ring == (0, 1)


# Participants


@pytest.fixture
def aggregating(manager: PsManager) -> PsManager:
    """A manager with a namespace that aggregates."""
    view = cluster_view(manager.handle(opened("client-0", "s", aggregates=True)))
    assert view_from_action(view).spaces["s"].aggregates
    assert view.participants == view.paused == ()
    return manager


def test_the_first_to_take_part_begins_at_once_and_all_are_informed(aggregating: PsManager) -> None:
    view = cluster_view(aggregating.handle(enlists(7)))
    assert view.node == ""
    assert view.participants == (Participant(namespace="s", client=7, first_time=1),)
    assert view.paused == ()
    assert view.epoch == view.version == 2
    assert view.reason == "client-7 takes part in s"
    assert view_from_action(view).participants == {"s": {7: 1}}
    assert aggregating.handle(enlists(7)) == []


def test_clients_that_enlist_before_all_servers_have_joined_begin_together() -> None:
    manager = PsManager(1)
    for event in (opened("client-0", "s", aggregates=True), enlists(3), enlists(1), enlists(2)):
        assert manager.handle(event) == []
    view = cluster_view(manager.handle(joined("server-0")))
    assert begins(view) == {3: 1, 1: 1, 2: 1}
    assert view.paused == ()


def test_a_later_client_begins_after_the_latest_time_once_all_have_paused(aggregating: PsManager) -> None:
    aggregating.handle(enlists(1))
    view = cluster_view(aggregating.handle(enlists(2)))
    assert (begins(view), view.paused) == ({1: 1}, (Pause(namespace="s", view=view.version),))
    assert view_from_action(view).paused == {"s": view.version}
    view = cluster_view(aggregating.handle(paused(1, view.version, 5)))
    assert (begins(view), view.paused) == ({1: 1, 2: 6}, ())
    assert view.reason == "all clients have paused s"
    pausing = cluster_view(aggregating.handle(enlists(3)))
    assert aggregating.handle(enlists(4)) == []  # it joins with the other
    assert aggregating.handle(paused(1, pausing.version, 9)) == []
    view = cluster_view(aggregating.handle(paused(2, pausing.version, 8)))
    assert begins(view) == {1: 1, 2: 6, 3: 10, 4: 10}
    assert view.epoch == view.version > pausing.version


def test_pause_reports_of_another_pause_or_of_other_clients_end_no_pause(aggregating: PsManager) -> None:
    aggregating.handle(enlists(1))
    first = cluster_view(aggregating.handle(enlists(2)))
    aggregating.handle(paused(1, first.version, 5))
    second = cluster_view(aggregating.handle(enlists(3)))
    aggregating.handle(paused(2, second.version, 5))
    for event in (
        paused(1, first.version, 5),
        paused(1, second.version + 1, 5),
        paused(3, second.version, 5),
        paused(9, second.version, 5),
        paused(1, second.version, 5, "w"),
    ):
        assert aggregating.handle(event) == []
    assert begins(cluster_view(aggregating.handle(paused(1, second.version, 5)))) == {1: 1, 2: 6, 3: 6}


def test_a_new_view_during_a_pause_keeps_the_pause(aggregating: PsManager) -> None:
    aggregating.handle(enlists(1))
    pause = cluster_view(aggregating.handle(enlists(2))).version
    view = cluster_view(aggregating.handle(lost("server-1")))
    assert view.paused == (Pause(namespace="s", view=pause),)
    assert view.version > pause
    views = cluster_view(aggregating.handle(joined("client-9")))
    assert (views.node, begins(views), views.paused) == ("client-9", {1: 1}, view.paused)
    assert begins(cluster_view(aggregating.handle(paused(1, pause, 2)))) == {1: 1, 2: 3}


@pytest.mark.parametrize("gone", [withdraws(1), left("client-1"), lost("client-1")])
def test_a_pause_does_not_wait_for_a_client_that_takes_part_no_more(
    gone: Event, aggregating: PsManager
) -> None:
    aggregating.handle(enlists(1))
    pause = cluster_view(aggregating.handle(enlists(2))).version
    aggregating.handle(paused(1, pause, 5))
    pause = cluster_view(aggregating.handle(enlists(3))).version
    assert aggregating.handle(paused(2, pause, 7)) == []
    view = cluster_view(aggregating.handle(gone))
    assert (begins(view), view.paused) == ({2: 6, 3: 8}, ())
    assert "client-1" in view.reason
    assert not [action for action in aggregating.handle(gone) if isinstance(action, ClusterView)]


@pytest.mark.parametrize("gone", [withdraws(2), left("client-2"), lost("client-2")])
def test_a_pause_for_a_newcomer_that_withdraws_or_is_lost_is_over(
    gone: Event, aggregating: PsManager
) -> None:
    aggregating.handle(enlists(1))
    aggregating.handle(enlists(2))
    view = cluster_view(aggregating.handle(gone))
    assert (begins(view), view.paused) == ({1: 1}, ())


def test_a_lost_client_does_not_take_part_again(aggregating: PsManager) -> None:
    aggregating.handle(enlists(1))
    assert begins(cluster_view(aggregating.handle(lost("client-1")))) == {}
    assert aggregating.handle(enlists(1)) == []
    assert begins(cluster_view(aggregating.handle(enlists(2)))) == {2: 1}


@pytest.mark.parametrize(("name", "why"), [("w", "expected a namespace that aggregates"), ("x", "got x")])
def test_no_client_takes_part_in_a_namespace_that_does_not_aggregate(
    name: str, why: str, aggregating: PsManager
) -> None:
    aggregating.handle(opened("client-0", "w"))
    (refused,) = aggregating.handle(enlists(7, name))
    assert isinstance(refused, RejectNamespace)
    assert (refused.node, refused.name) == ("client-7", name)
    assert why in refused.reason
    for event in (paused(7, 1, 1, name), withdraws(7, name)):
        assert aggregating.handle(event) == []


@pytest.mark.parametrize("node", ["server-1", "server-7", "worker-7", "client-", "client-07", "client-x"])
def test_only_a_client_may_send_reports_of_a_client(node: str, aggregating: PsManager) -> None:
    """A server's number may be a client's."""
    aggregating.handle(enlists(1))
    pause = cluster_view(aggregating.handle(enlists(7))).version
    for event in (
        AggregationJoined(now_s=0.0, node=node, namespace="s"),
        AggregationPaused(now_s=0.0, node=node, namespace="s", pause_view=pause, time=3),
        AggregationLeft(now_s=0.0, node=node, namespace="s"),
        replace(joins(7), node=node),
    ):
        (refused,) = aggregating.handle(event)
        assert isinstance(refused, RejectPeer)
        assert refused.peer == node
        assert f"expected {type(event).__name__} from a client, got it from {node}" in refused.reason
    assert begins(cluster_view(aggregating.handle(paused(1, pause, 2)))) == {1: 1, 7: 3}


@pytest.mark.parametrize("aggregates", [False, True])
def test_a_namespace_aggregates_for_all_or_for_none(aggregates: bool, manager: PsManager) -> None:
    manager.handle(opened("client-0", aggregates=aggregates))
    (refused,) = manager.handle(opened("client-1", aggregates=not aggregates))
    assert isinstance(refused, RejectNamespace)
    assert "expected the namespace w as it was opened" in refused.reason


def test_a_restarted_manager_keeps_participants_and_pauses(aggregating: PsManager) -> None:
    aggregating.handle(enlists(1))
    aggregating.handle(paused(1, cluster_view(aggregating.handle(enlists(2))).version, 5))
    pause = cluster_view(aggregating.handle(enlists(3))).version
    assert aggregating.handle(paused(1, pause, 9)) == []
    again = PsManager(SERVERS, virtual_nodes=4, replicas=1)
    again.load_state_dict(json.loads(json.dumps(aggregating.state_dict())))
    views = cluster_view(again.handle(joined("client-9")))
    assert (begins(views), views.paused) == ({1: 1, 2: 6}, (Pause(namespace="s", view=pause),))
    assert begins(cluster_view(again.handle(paused(2, pause, 7)))) == {1: 1, 2: 6, 3: 10}


# Groups of workers


def workers(view: Action) -> list[str]:
    assert isinstance(view, WorkerGroupView)
    return [one.node for one in view.workers]


def test_a_client_that_is_lost_or_leaves_is_a_worker_no_more(aggregating: PsManager) -> None:
    for client in (1, 2, 3):
        aggregating.handle(joins(client))
    aggregating.handle(enlists(2))
    gone, view, found = aggregating.handle(lost("client-2"))
    assert isinstance(gone, ForgetClient)
    assert isinstance(view, ClusterView)
    assert workers(found) == ["client-1", "client-3"]
    assert found.unassigned == ((3, 4),)
    _, found = aggregating.handle(left("client-3"))
    assert workers(found) == ["client-1"]


def test_the_shards_of_a_lost_worker_are_reassigned_by_the_tick_after_the_timeout(manager: PsManager) -> None:
    manager.handle(joins(1))
    manager.handle(joins(2))
    manager.handle(lost("client-2"))
    assert manager.handle(Tick(now_s=0.75)) == []
    (view,) = manager.handle(Tick(now_s=1.0))
    assert isinstance(view, WorkerGroupView)
    assert view.workers[0].shards == ((0, 5),)


def test_a_restarted_manager_keeps_the_owners_of_tasks(manager: PsManager) -> None:
    manager.handle(joins(1))
    (task,) = manager.handle(asks(1))
    assert isinstance(task, AssignTask)
    again = PsManager(SERVERS, virtual_nodes=4, replicas=1)
    again.load_state_dict(json.loads(json.dumps(manager.state_dict())))
    assert again.handle(done(1, task.task)) == []
    assert again.handle(done(1, task.task)) != []


# Configuration


@pytest.mark.parametrize(
    "arguments", [{"servers": 0}, {"servers": 1, "replicas": -1}, {"servers": 1, "virtual_nodes": 0}]
)
def test_an_impossible_cluster_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        PsManager(**arguments)


# Random histories

NODES = (*(f"server-{number}" for number in range(7)), "client-0", "client-3", "worker-1", "server-x")
nodes = st.sampled_from(NODES)
clients = st.integers(0, 5)
numbers = st.integers(0, 8)
FUNCTIONS = st.sampled_from(((), ("m:f",), ("m:f", "m:g")))
events = st.one_of(
    st.builds(lambda node, functions: joined(node, *functions), nodes, FUNCTIONS),
    st.builds(lambda server: joined(f"server-{server}", "m:f", "m:g"), numbers),
    st.builds(left, nodes),
    st.builds(lost, nodes),
    st.builds(
        lambda node, name, keys, function, aggregates: opened(
            node, name, keys=keys, function=function, aggregates=aggregates
        ),
        nodes,
        st.sampled_from("wv"),
        st.sampled_from((50, 100)),
        st.sampled_from(("", "m:f", "m:g")),
        st.booleans(),
    ),
    st.builds(lambda node: opened(node, "s", aggregates=True), nodes),
    st.builds(enlists, clients, st.sampled_from("ssw")),
    st.builds(enlists, clients),
    st.builds(paused, clients, st.integers(0, 20), st.integers(0, 9)),
    st.builds(lambda client, time: ("paused", client, time), clients, st.integers(0, 9)),
    st.builds(lambda client, time: ("paused", client, time), clients, st.integers(0, 9)),
    st.builds(withdraws, clients),
    st.builds(lambda client: lost(f"client-{client}"), clients),
    st.builds(lambda node: AggregationJoined(now_s=0.0, node=node, namespace="s"), nodes),
    st.builds(leaves, numbers),
    st.builds(missed, nodes, numbers),
    st.builds(reached, nodes, numbers),
    st.builds(silent, nodes, st.floats(0.0, 30.0)),
    st.builds(resumed, nodes, st.floats(0.0, 30.0)),
    st.builds(lambda at_s: Tick(now_s=at_s), st.floats(0.0, 60.0)),
    st.builds(lambda node: replace(opened(node), on_loss="reset"), nodes),
    st.builds(lambda server: ("filled", server), numbers),
    st.builds(lambda server: ("filled", server), numbers),
    st.just(Tick(now_s=1.0)),
    st.builds(joins, clients, st.sampled_from(("replace", "replace", "continue", "hope"))),
    st.builds(asks, clients, st.integers(0, 3)),
    st.builds(done, clients, numbers),
    st.builds(
        lambda client, tau: TauSet(now_s=0.0, node=f"client-{client}", group="g", tau=tau), clients, numbers
    ),
    st.builds(lambda node: WorkerGroupLeft(now_s=0.0, node=node, group="g"), nodes),
    st.builds(lambda node: ProgressRequested(now_s=0.0, node=node, group="g"), nodes),
)


class History:
    """A manager and the events that it received.

    A present node may report its transfers of the current view, and a participant its pause.
    """

    def __init__(self, *, has_begun: bool) -> None:
        self.manager = PsManager(2, virtual_nodes=2, replicas=1)
        if has_begun:
            self.manager.handle(joined("server-0", "m:f", "m:g"))
            self.manager.handle(joined("server-1", "m:f", "m:g"))
            self.manager.handle(opened("client-0", "s", aggregates=True))

    def event(self, drawn: Any) -> Event:
        if not isinstance(drawn, tuple):
            return drawn
        view, present = self.manager._group.view, sorted(self.manager._addresses)
        if drawn[0] == "paused":
            return paused(drawn[1], -1 if view is None else view.paused.get("s", -1), drawn[2])
        return filled(present[drawn[1] % len(present)] if present else 0, 0 if view is None else view.version)


@settings(max_examples=150, deadline=None)
@given(st.booleans(), st.lists(events, max_size=30))
def test_a_manager_with_the_state_of_another_answers_identically_at_every_point(
    has_begun: bool, drawn: list[Any]
) -> None:
    history = History(has_begun=has_begun)
    for one in drawn:
        again = PsManager(2, virtual_nodes=2, replicas=1)
        again.load_state_dict(json.loads(json.dumps(history.manager.state_dict())))
        assert again.state_dict() == history.manager.state_dict()
        event = history.event(one)
        assert again.handle(event) == history.manager.handle(event)
        assert again.state_dict() == history.manager.state_dict()


def test_a_restarted_manager_keeps_which_servers_have_finished_their_transfers(manager: PsManager) -> None:
    manager.handle(joined("server-8"))
    view = cluster_view(manager.handle(joined("server-9")))
    assert manager.handle(filled(8, view.version)) == []
    again = PsManager(SERVERS, virtual_nodes=4, replicas=1)
    again.load_state_dict(json.loads(json.dumps(manager.state_dict())))
    assert cluster_view(again.handle(filled(9, view.version))).ring == (0, 1, 2, 8, 9)


def same(view: PlacementView, other: PlacementView) -> bool:
    """Rings have no equality of their own."""

    def plain(one: PlacementView) -> tuple[Any, ...]:
        rings = [None if ring is None else ring.state_dict() for ring in (one.ring, one.target)]
        views = one.filling, one.participants, one.paused, one.lost, one.lost_arcs_dropped, one.silent_servers
        return one.version, one.epoch, rings, one.spaces, *views

    return plain(view) == plain(other)


@settings(max_examples=150, deadline=None)
@given(st.booleans(), st.lists(events, max_size=30))
def test_views_grow_match_the_server_group_and_name_reachable_servers(
    has_begun: bool, drawn: list[Any]
) -> None:
    history = History(has_begun=has_begun)
    view = history.manager._group.view
    number, epoch = (-1, -1) if view is None else (view.version, view.epoch)
    for one in drawn:
        event = history.event(one)
        actions = history.manager.handle(event)
        assert all(action.reason for action in actions)  # type: ignore[union-attr]
        for views in [action for action in actions if isinstance(action, ClusterView)]:
            assert history.manager._group.view is not None
            assert same(view_from_action(views), history.manager._group.view)
            addressed = {server.server for server in views.servers}
            assert {*views.ring, *views.next_ring} <= addressed
            assert all(server.addresses for server in views.servers)
            if views.node:
                assert (views.version, views.epoch) == (number, epoch)
                assert isinstance(event, NodeJoined)
                assert event.node == views.node
            else:
                is_same = isinstance(event, Tick) and views.version == number  # it names the silent servers
                assert is_same or views.version > number
                assert epoch <= views.epoch <= views.version
            number, epoch = views.version, views.epoch


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=60))
def test_a_participant_begins_once_and_at_most_one_time_after_those_reported(drawn: list[Any]) -> None:
    history = History(has_begun=True)
    before: dict[int, int] = {}
    latest, gone = 0, set()
    for one in drawn:
        event = history.event(one)
        assert history.manager._group.view is not None
        pause = history.manager._group.view.paused.get("s")
        if isinstance(event, AggregationPaused) and (event.namespace, event.pause_view) == ("s", pause):
            latest = max(latest, event.time if int(event.node[7:]) in before else 0)
        if isinstance(event, NodeLost | NodeLeft) and event.node.startswith("client-"):
            gone.add(int(event.node[7:]))
        for views in [one for one in history.manager.handle(event) if isinstance(one, ClusterView)]:
            view = view_from_action(views)
            now = view.participants.get("s", {})
            assert not gone & now.keys()
            assert all(now[client] == before[client] for client in before.keys() & now.keys())
            for client in now.keys() - before.keys():
                assert not before or "s" not in view.paused
                assert 1 <= now[client] <= latest + 1
            assert all(view.spaces[name].aggregates for name in (*view.paused, *view.participants))
            before = now


def test_a_view_with_a_target_and_transfers_is_decoded_as_it_was_sent(manager: PsManager) -> None:
    manager.handle(opened("client-0"))
    manager.handle(joined("server-9"))
    view = cluster_view(manager.handle(lost("server-1")))
    assert view.transfers
    assert view.next_ring == (0, 2, 9)
    found = view_from_action(view)
    assert manager._group.view is not None
    assert same(found, manager._group.view)
    assert found.target is not None
    assert found.target.servers == (0, 2, 9)
    assert sum(len(arcs) for arcs in found.filling.values()) == len(view.transfers)
