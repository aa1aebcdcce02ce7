"""The ring: each key has holders, few keys move, and the successor of a lost server has its values."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.policies.ps.hash_ring import RING_SIZE, HashRing, NamespaceSpec, block_point

SPACE = NamespaceSpec("w", 10**6, 100)
some_servers = st.sets(st.integers(0, 30), min_size=1, max_size=8)


@given(some_servers, st.integers(1, 5), st.integers(0, 3), st.integers(0, 10**6 - 1))
def test_a_key_has_the_holders_found_by_examining_all_points(servers, virtual_nodes, replicas, key):
    ring = HashRing(servers, virtual_nodes=virtual_nodes, replicas=replicas)
    at = block_point("w", key // 100)
    nodes = sorted(zip(ring._points, ring._owners, strict=True))
    clockwise = [node for node in nodes if node[0] >= at] + [node for node in nodes if node[0] < at]
    expected = list(dict.fromkeys(owner for _, owner in clockwise))[: replicas + 1]
    assert list(ring.holders(SPACE, key)) == expected


@given(some_servers, st.integers(0, 500), st.integers(1, 500))
def test_spans_are_disjoint_cover_the_range_and_name_the_holders_of_each_key(servers, first, length):
    ring, space = HashRing(servers, virtual_nodes=2), NamespaceSpec("w", 1000, 7)
    spans = list(ring.spans(space, first, first + length))
    assert [span.first for span in spans] == [first, *(span.last for span in spans[:-1])]
    assert spans[-1].last == first + length
    assert all(a.holders != b.holders for a, b in itertools.pairwise(spans))
    for span in spans:
        for key in range(span.first, span.last):
            assert ring.holders(space, key) == span.holders


@given(some_servers, st.integers(0, 30), st.integers(0, 10**4 - 1))
def test_one_server_more_moves_only_keys_that_it_holds(servers, server, block):
    ring = HashRing(servers - {server}, virtual_nodes=4)
    after = ring.with_server(server)
    before, then = ring.holders(SPACE, block * 100), after.holders(SPACE, block * 100)
    assert before == then or server in then
    assert [holder for holder in then if holder != server] == list(before)[: len(then) - (server in then)]


@given(some_servers.filter(lambda servers: len(servers) > 1), st.data())
def test_the_successor_of_a_lost_master_is_its_first_replica(servers, data):
    ring = HashRing(servers, virtual_nodes=4)
    lost = data.draw(st.sampled_from(sorted(servers)))
    after = ring.without_server(lost)
    for block in range(50):
        before = ring.holders(SPACE, block * 100)
        then = after.holders(SPACE, block * 100)
        left = [holder for holder in before if holder != lost]
        assert list(then[: len(left)]) == left  # a new holder is the last


@given(some_servers, some_servers, st.integers(0, RING_SIZE - 1))
def test_moves_are_where_holders_differ(servers, others, point):
    ring, after = HashRing(servers, virtual_nodes=3), HashRing(others, virtual_nodes=3)
    found = [move for move in ring.moves(after) if move.first <= point < move.last]
    before, then = ring.holders_at(point), after.holders_at(point)
    assert [(move.before, move.after) for move in found] == ([(before, then)] if before != then else [])


@given(some_servers, some_servers)
@settings(max_examples=20)
def test_moves_are_disjoint_ascending_and_as_few_as_can_be(servers, others):
    moves = HashRing(servers, virtual_nodes=3).moves(HashRing(others, virtual_nodes=3))
    for one, another in itertools.pairwise(moves):
        assert one.last <= another.first
        assert one.last < another.first or (one.before, one.after) != (another.before, another.after)
    assert all(0 <= move.first < move.last <= RING_SIZE for move in moves)


def test_one_more_of_s_servers_takes_one_part_in_s_plus_one():
    for servers in (2, 4, 9):
        ring = HashRing(range(servers), virtual_nodes=64, replicas=0)
        moved = sum(move.last - move.first for move in ring.moves(ring.with_server(servers))) / RING_SIZE
        assert moved == pytest.approx(1 / (servers + 1), rel=0.5)


@pytest.mark.parametrize("servers", [2, 5, 10])
def test_the_busiest_server_has_little_more_than_its_share(servers):
    """Over 40 rings: 1 + O(sqrt(log S / V)), with 2 for the constant."""
    loads = []
    for number in range(40):
        ids = range(1000 * number, 1000 * number + servers)
        ring = HashRing(ids, virtual_nodes=16, replicas=0)
        bounds = [*ring._points, ring._points[0] + RING_SIZE]
        share = dict.fromkeys(ids, 0)
        for place, owner in enumerate(ring._owners):
            share[owner] += bounds[place] - (bounds[place - 1] if place else bounds[-2] - RING_SIZE)
        assert sum(share.values()) == RING_SIZE
        loads.append(max(share.values()) * servers / RING_SIZE)
    assert statistics.mean(loads) < 1 + 2 * math.sqrt(math.log(servers) / 16)


def test_the_same_servers_make_the_same_ring_everywhere():
    ring = HashRing([3, 1, 2])
    assert ring.servers == (1, 2, 3)
    assert block_point("w", 5) == 4256983603534006642
    assert [ring.holders(SPACE, block * 100) for block in range(4)] == [
        (2, 1, 3),
        (1, 3, 2),
        (1, 2, 3),
        (1, 2, 3),
    ]
    assert HashRing(**ring.state_dict()).moves(ring) == []


def test_a_ring_without_servers_holds_nothing():
    assert HashRing([]).holders(SPACE, 0) == ()


@pytest.mark.parametrize(
    ("servers", "arguments", "words"),
    [
        ([1, 1], {}, "every server once"),
        ([1], {"virtual_nodes": 0}, "virtual_nodes of at least 1, got 0"),
        ([1], {"replicas": -1}, "replicas of at least 0, got -1"),
    ],
)
def test_an_impossible_ring_is_refused(servers, arguments, words):
    with pytest.raises(ValueError, match=words):
        HashRing(servers, **arguments)


def test_unknown_servers_and_ranges_outside_the_namespace_are_refused():
    with pytest.raises(ValueError, match=r"expected one of the servers \(1,\), got 2"):
        HashRing([1]).without_server(2)
    for first, last in ((3, 3), (-1, 3), (0, 10**6 + 1)):
        with pytest.raises(ValueError, match="range of keys within"):
            list(HashRing([1]).spans(SPACE, first, last))
