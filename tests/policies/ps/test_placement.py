"""What a view says about blocks, compared with the rings that it is made of."""

from __future__ import annotations

from itertools import pairwise

from offbeat.policies.ps.hash_ring import RING_SIZE, HashRing, NamespaceSpec, block_point
from offbeat.policies.ps.messages import PlacementView, RingArc
from offbeat.policies.ps.placement import Placement

SPACE = NamespaceSpec("w", 100, 5)
BLOCKS = [("w", block) for block in range(20)]
RING = HashRing(range(3), virtual_nodes=2, replicas=1)


def placement(server, **changes):
    return Placement(PlacementView(version=1, epoch=1, ring=RING, spaces={"w": SPACE}, **changes), server)


def test_a_server_of_the_next_ring_gains_the_blocks_that_are_new_to_it_from_the_last_holder_of_this_one():
    target = RING.with_server(3)
    views = {server: placement(server, target=target) for server in range(4)}
    gained = [block for block in BLOCKS if views[3].gains(block)]
    assert gained
    for block in BLOCKS:
        before, after = RING.holders_at(block_point(*block)), target.holders_at(block_point(*block))
        assert views[3].chain(block) == before + tuple(server for server in after if server not in before)
        assert (block in gained) == (3 in after)
        senders = [server for server, view in views.items() if block in gained and view.sends(block, 3)]
        assert senders == ([before[-1]] if block in gained else [])
    assert views[3].sources() >= {views[3].source(block) for block in gained}


def test_a_route_covers_its_keys_with_the_chain_of_each_block():
    view = placement(0)
    route = view.route("w", 3, 88)
    keys = {key: span.holders for span in route for key in range(span.first, span.last)}
    assert keys == {key: view.chain(("w", key // 5)) for key in range(3, 88)}
    assert all(one.holders != other.holders for one, other in pairwise(route))


def test_a_block_that_no_server_has_complete_has_no_source():
    everywhere = (RingArc(first=0, last=RING_SIZE),)
    view = placement(0, filling=dict.fromkeys(range(3), everywhere), lost_arcs_dropped=everywhere)
    assert view.sources() == set()
    assert all(view.is_lost(block) and view.source(block) is None for block in BLOCKS)
    assert not any(placement(0).is_lost(block) for block in BLOCKS)
