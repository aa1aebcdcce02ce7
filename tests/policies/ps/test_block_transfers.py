"""The transfer of blocks from one server to another, without the nodes around it."""

from __future__ import annotations

from offbeat.policies.ps.block_transfers import IncomingBlocks, OutgoingBlocks
from offbeat.policies.ps.clocked_store import ClockedStore
from offbeat.policies.ps.hash_ring import HashRing, NamespaceSpec
from offbeat.policies.ps.messages import Operation, PlacementView, PushStamp, TransferChunk, TransferDone
from offbeat.policies.ps.placement import Placement
from offbeat.simulator.ps.cluster import SimulatedStore

SPACE = NamespaceSpec("w", 12, 1)
RING = HashRing([0], replicas=1)
# Server 1 joins server 0 as its replica, so it gains all blocks.
VIEW = PlacementView(version=2, epoch=1, ring=RING, spaces={"w": SPACE}, target=RING.with_server(1))


def store():
    made = ClockedStore(SimulatedStore())
    made.spaces = {"w": SPACE}
    return made


def push(time):
    return Operation(
        namespace="w",
        first=0,
        last=12,
        stamps=(PushStamp(client=0, time=time, previous_times=()),),
        content=dict.fromkeys(range(12), time),
    )


class Transfer:
    """A server with one push, and one that gains all of its blocks."""

    def __init__(self):
        self.source, self.gainer = store(), store()
        self.source.apply(push(1))
        self.outgoing = OutgoingBlocks(self.source, lambda *_: (), Placement(VIEW, 0))
        self.incoming = IncomingBlocks(self.gainer, Placement(VIEW, 1))
        ((_, self.request),) = self.incoming.begin_view(Placement(VIEW, 1))

    def values(self):
        return [self.gainer.table(SPACE).values[key] for key in range(12)]


def test_few_chunks_are_unacknowledged_at_a_time_and_the_end_follows_the_last_acknowledgement():
    transfer = Transfer()
    unacked = transfer.outgoing.on_request(1, transfer.request)
    assert len(unacked) == 4
    received = []
    while isinstance(unacked[0], TransferChunk):
        received.append(unacked.pop(0).block)
        unacked += transfer.outgoing.on_ack(1)
        assert len(unacked) <= 4
    assert received == list(range(12))
    assert unacked == [TransferDone(view=2)]


def test_an_operation_waits_for_its_blocks_and_is_applied_behind_each():
    transfer = Transfer()
    chunk, *_ = transfer.outgoing.on_request(1, transfer.request)
    transfer.incoming.apply(push(2))
    assert transfer.values() == [0] * 12
    transfer.incoming.on_chunk(chunk)
    assert transfer.values() == [3] + [0] * 11


def test_when_the_source_is_done_operations_on_blocks_that_it_did_not_have_are_applied():
    transfer = Transfer()
    transfer.incoming.apply(push(2))
    transfer.incoming.on_source_done(0)
    assert transfer.values() == [2] * 12
    assert not transfer.incoming.lacks(("w", 0))


def test_in_a_new_view_only_blocks_that_have_not_come_are_requested():
    transfer = Transfer()
    chunk, *_ = transfer.outgoing.on_request(1, transfer.request)
    transfer.incoming.on_chunk(chunk)
    ((source, request),) = transfer.incoming.begin_view(Placement(VIEW, 1))
    assert (source, request.present_blocks) == (0, (("w", 0),))
    assert transfer.outgoing.on_request(1, request)[0].block == 1
