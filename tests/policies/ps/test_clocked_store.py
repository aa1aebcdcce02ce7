"""Each push counts once per key, whatever operations bring it."""

from __future__ import annotations

from offbeat.policies.ps.clocked_store import ClockedStore
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.policies.ps.messages import Operation, PushStamp
from offbeat.policies.ps.range_clock import ClockRange
from offbeat.simulator.ps.cluster import SimulatedStore

SPACE = NamespaceSpec("w", 20, 5)


def store():
    made = ClockedStore(SimulatedStore())
    made.spaces = {"w": SPACE}
    return made


def operation(first, last, *, time=1, client=0, after=0):
    before = () if not after else (ClockRange(first, last, after),)
    return Operation(
        namespace="w",
        first=first,
        last=last,
        stamps=(PushStamp(client=client, time=time, previous_times=before),),
        content=dict.fromkeys(range(first, last), 1),
    )


def values(of):
    return [of.table(SPACE).values[key] for key in range(SPACE.keys)]


def test_overlapping_operations_of_one_push_are_applied_once_to_each_key():
    one = store()
    for first, last in ((4, 8), (0, 6), (0, 20)):
        one.apply(operation(first, last))
    assert values(one) == [1] * 20
    assert one.sequence_gaps == 0


def test_an_operation_without_the_one_before_it_is_counted_as_a_gap():
    one = store()
    one.apply(operation(0, 5, time=1))
    one.apply(operation(0, 5, time=3, after=2))
    assert one.sequence_gaps == 1


def test_an_exported_block_brings_its_times_so_that_its_operations_count_once():
    source, gainer = store(), store()
    source.apply(operation(0, 20))
    gainer.import_block(("w", 1), *source.export_block(("w", 1)))
    gainer.apply(operation(0, 10))
    assert values(gainer) == [1] * 10 + [0] * 10
    assert list(gainer.blocks()) == [("w", 0), ("w", 1)]


def test_a_block_that_was_removed_is_new_again():
    one = store()
    one.apply(operation(0, 10))
    one.remove_block(("w", 0))
    assert list(one.blocks()) == [("w", 1)]
    one.apply(operation(0, 10))
    assert values(one) == [1] * 10 + [0] * 10
