"""Promises of `offbeat.runtime.launching.nodes`: launchers of one job find each other, others are refused."""

import socket

import pytest

from offbeat.errors import OffbeatError
from offbeat.runtime.control.environment import Environment
from offbeat.runtime.launching.nodes import open_node
from support.processes import find_free_port

ADDRESS = "127.0.0.1"


def node(rank, port, *, count=2, workers=3, **settings):
    return open_node(
        Environment(**{"start_s": 20.0, **settings}),
        rank=rank,
        count=count,
        workers=workers,
        master_addr=ADDRESS,
        master_port=port,
    )


def test_the_workers_of_all_nodes_get_one_store_and_one_job_name():
    port = find_free_port()
    first = node(0, port)
    second = node(1, port)
    assert first.world == second.world == 6
    own = {"GROUP_RANK"}
    shared = [{name: env[name] for name in env.keys() - own} for env in (first.env, second.env)]
    assert shared[0] == shared[1]
    assert (shared[0]["MASTER_ADDR"], shared[0]["MASTER_PORT"]) == (ADDRESS, str(port))
    assert shared[0]["WORLD_SIZE"] == "6"
    assert [first.env["GROUP_RANK"], second.env["GROUP_RANK"]] == ["0", "1"]
    assert not second.can_join_again()  # no job has started


def test_the_users_name_of_the_job_is_kept():
    assert node(0, find_free_port(), job_name="mine").env["OFFBEAT_JOB"] == "mine"


def test_a_single_node_listens_on_a_port_that_is_free():
    ports = {node(0, None, count=1).env["MASTER_PORT"] for _ in range(2)}
    assert len(ports - {"0"}) == 2


def test_with_a_coordinator_apart_no_store_is_opened():
    apart = open_node(
        Environment(coordinator="head:29400"), rank=1, count=2, workers=3, master_addr=None, master_port=None
    )
    assert apart.store is None
    assert apart.env == {"WORLD_SIZE": "6", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert apart.can_join_again()


def test_a_node_that_finds_no_node_0_names_its_address():
    port = find_free_port()
    with pytest.raises(OffbeatError, match=rf"node 1 has not reached .* at {ADDRESS}:{port} within 0.5 s"):
        node(1, port, start_s=0.5)


def test_a_node_that_reaches_something_else_gives_up_in_time():
    with socket.create_server((ADDRESS, 0)) as server:  # accepts, and never answers
        with pytest.raises(OffbeatError, match="node 1 has not reached the launcher of node 0"):
            node(1, server.getsockname()[1], start_s=0.5)


def test_a_store_that_is_not_a_launchers_is_given_up_in_time():
    from offbeat.runtime.control.rendezvous import open_store

    store = open_store(ADDRESS, 0, is_host=True)
    with pytest.raises(OffbeatError, match="node 1 has not reached the launcher of node 0"):
        node(1, store.port, start_s=1.5)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"workers": 4}, "on 2 nodes with 3 workers each, and node 1 job .* on 2 nodes with 4 workers each"),
        ({"count": 3}, "on 2 nodes with 3 workers each, and node 1 job .* on 3 nodes with 3 workers each"),
        ({"job_name": "other"}, "node 0 starts job 'mine' .*, and node 1 job 'other'"),
    ],
)
def test_a_node_that_starts_another_job_is_refused(other, words):
    port = find_free_port()
    first = node(0, port, job_name="mine")
    with pytest.raises(OffbeatError, match=words):
        node(1, port, **other)
    assert first.store is not None


def test_two_nodes_of_one_rank_are_refused():
    port = find_free_port()
    opened = [node(0, port), node(1, port)]
    with pytest.raises(OffbeatError, match="another launcher has --node-rank 1"):
        node(1, port)
    del opened


def test_a_port_in_use_is_named():
    with socket.create_server((ADDRESS, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OffbeatError, match=rf"cannot listen at {ADDRESS}:{port} for the job's store"):
            node(0, port)


def test_no_worker_can_join_again_once_the_store_is_gone():
    port = find_free_port()
    first = node(0, port)
    second = node(1, port)
    first.store.set("offbeat/running", "{}")
    assert second.can_join_again()
    del first
    assert not second.can_join_again()


@pytest.mark.parametrize(
    ("rank", "count", "workers", "words"),
    [
        (0, 0, 1, "expected at least 1 node, got 0"),
        (2, 2, 1, "expected a node rank from 0 to 1, got 2"),
        (-1, 2, 1, "expected a node rank from 0 to 1, got -1"),
        (0, 1, 0, "expected at least 1 worker per node, got 0"),
    ],
)
def test_bad_places_are_refused(rank, count, workers, words):
    with pytest.raises(ValueError, match=words):
        node(rank, 1, count=count, workers=workers)


def test_several_nodes_need_the_address_of_the_first():
    with pytest.raises(ValueError, match="expected --master-addr, the address of node 0"):
        open_node(Environment(), rank=0, count=2, workers=1, master_addr=None, master_port=None)
