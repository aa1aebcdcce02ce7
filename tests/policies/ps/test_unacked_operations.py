"""Operations are kept until all holders have them, also over changes of the view."""

from __future__ import annotations

from dataclasses import replace

from offbeat.policies.ps.aggregation import PushRequest
from offbeat.policies.ps.clocked_store import ClockedStore
from offbeat.policies.ps.hash_ring import HashRing, NamespaceSpec, block_point
from offbeat.policies.ps.messages import Operation, PlacementView, Push, PushStamp, RingArc
from offbeat.policies.ps.placement import Placement
from offbeat.policies.ps.unacked_operations import UnackedOperations
from offbeat.simulator.ps.cluster import SimulatedStore

SPACE = NamespaceSpec("w", 20, 5)
VIEW = PlacementView(version=1, epoch=1, ring=HashRing(range(3), replicas=2), spaces={"w": SPACE})
PLACEMENT = Placement(VIEW, 0)
PUSH = Push(
    client=0,
    request=1,
    epoch=1,
    namespace="w",
    first=0,
    last=10,
    time=2,
    previous_times=(),
    content={},
)


def unacked():
    store = ClockedStore(SimulatedStore())
    store.spaces = {"w": SPACE}
    return UnackedOperations(0, store)


def operation(first, last, time):
    return Operation(
        namespace="w",
        first=first,
        last=last,
        stamps=(PushStamp(client=0, time=time, previous_times=()),),
        content=dict.fromkeys(range(first, last), 1),
    )


def test_operations_are_in_flight_until_they_are_acknowledged():
    kept, request = unacked(), PushRequest(PUSH)
    serial = kept.add_own(operation(0, 10, 2), [request])
    kept.add(1, serial, operation(0, 10, 1), came_from=1)
    assert [one.requests for one in kept.of_push(PUSH)] == [[request]]
    assert kept.pop(1, serial).came_from == 1
    assert kept.pop(0, serial).requests == [request]
    assert list(kept.on_keys("w", 0, 20)) == []


def test_a_new_view_takes_all_operations_the_older_ones_first_and_serials_begin_again():
    kept, request = unacked(), PushRequest(PUSH)
    serial = kept.add_own(operation(0, 10, 3), [request])
    kept.add_fetched([operation(0, 10, 2)])
    kept.carry(operation(0, 10, 1))
    assert [one.content for one in kept.on_keys("w", 8, 20)] == [{8: 1, 9: 1}] * 3
    taken = [(one.stamps[0].time, requests) for one, requests in kept.take_all(PLACEMENT)]
    assert taken == [(1, []), (2, []), (3, [request])]
    assert kept.take_all(PLACEMENT) == []
    assert kept.add_own(operation(0, 10, 3), []) == serial


def test_of_operations_on_lost_keys_the_other_blocks_remain_without_requests():
    point = block_point("w", 1)
    kept = unacked()
    kept.add_own(operation(3, 20, 1), [PushRequest(PUSH)])
    arc = RingArc(first=point, last=point + 1)
    kept_only = kept.take_all(Placement(replace(VIEW, version=2, lost_arcs_dropped=(arc,)), 0))
    spans = [(one.first, one.last) for one, _ in kept_only]
    assert spans == [(3, 5), (10, 15), (15, 20)]
    assert not any(requests for _, requests in kept_only)


def test_carried_operations_are_forgotten_when_their_chain_is_replayed():
    kept = unacked()
    for first in (0, 5, 10, 15):
        kept.carry(operation(first, first + 5, 1))
    by_chain = kept.carried_by_chain(PLACEMENT)
    assert len(by_chain) > 1
    replayed, *others = by_chain
    kept.on_replayed(replayed, PLACEMENT)
    assert list(kept.carried_by_chain(PLACEMENT)) == others
