"""The order in which workers are served: those with the fewest servings, else those without blocks."""

import json

from offbeat.policies.data.open_epochs import Epoch
from offbeat.policies.data.serving_order import ServingOrder


def epoch(left: int, batch_size: int = 4) -> Epoch:
    return Epoch(1000, batch_size, 0, 1000, left, [(0, left)])


def order_of(levels: dict[int, int], *, equal_counts: bool = True) -> ServingOrder:
    """All have room for a block, and none is without one."""
    order = ServingOrder(equal_counts=equal_counts)
    for worker, level in levels.items():
        order.enter(worker, level)
        order.note_room(worker, queued=1, ahead=2)
    return order


def nothing_held(worker: int) -> int:
    return 0


def test_a_serving_is_for_the_workers_at_the_lowest_level():
    order = order_of({0: 3, 1: 2, 2: 2})
    assert order.next_serving(epoch(100), 0, nothing_held) == ([1, 2], [4, 4])
    order.on_served({1: True, 2: False})
    assert order.next_serving(epoch(100), 0, nothing_held) == ([0, 1], [4, 4])


def test_a_worker_without_blocks_is_served_when_none_at_the_lowest_level_has_room():
    order = order_of({0: 3, 1: 2})
    order.on_served({1: False})
    order.on_served({0: True, 1: False})
    order.enter(2, 3)  # has all that it may have
    assert order.next_serving(epoch(100), 0, nothing_held) == ([], [])
    order.note_room(0, queued=0, ahead=2)
    assert order.next_serving(epoch(100), 0, nothing_held) == ([0], [4])
    order.on_served({0: True})
    assert order.next_serving(epoch(100), 0, nothing_held) == ([], [])


def test_what_suffices_for_two_servings_is_cut_into_equal_parts():
    order = order_of({0: 0, 1: 0})
    assert order.next_serving(epoch(17), 0, nothing_held) == ([0, 1], [4, 4])
    assert order.next_serving(epoch(13), 0, nothing_held) == ([0, 1], [4, 3])
    assert order.next_serving(epoch(6), 0, nothing_held) == ([0, 1], [3, 3])
    assert order.next_serving(epoch(3), 0, nothing_held) == ([0, 1], [3])


def test_blocks_are_left_for_absent_members_that_need_as_many_as_the_others_had():
    order = order_of({0: 0, 1: 0})
    order.on_served({0: True, 1: True})
    assert order.next_serving(epoch(7), 0, nothing_held) == ([0, 1], [4, 3])
    # Both are at level 1 and hold a block: a member that enters has two servings to come, so 4 parts of 2.
    assert order.next_serving(epoch(8), 1, lambda worker: 1) == ([0, 1], [2, 2])


def test_a_worker_that_enters_gets_the_level_of_the_last_one_served_less_its_blocks():
    order = order_of({0: 5, 1: 4})
    assert order.entry_level(nothing_held) == 5
    order.on_served({1: True})
    order.on_served({1: True})
    assert order.entry_level({0: 1, 1: 2}.__getitem__) == 4
    order.leave(1)
    assert order.entry_level({0: 1}.__getitem__) == 4
    order.leave(0)
    assert order.entry_level(nothing_held) == 4
    assert 0 not in order
    assert not len(order)


def test_a_restored_state_serves_the_same_workers():
    order, other = order_of({0: 3, 1: 2, 2: 2}), ServingOrder(equal_counts=True)
    order.on_served({1: True, 2: True})
    other.load_state_dict(json.loads(json.dumps(order.state_dict())))
    for worker in range(3):
        other.note_room(worker, queued=1, ahead=2)
    assert vars(other) == vars(order)


def test_where_workers_use_unequal_counts_each_is_served_whenever_it_has_room():
    order = order_of({0: 0, 1: 0}, equal_counts=False)
    for _ in range(5):
        assert order.next_serving(epoch(100), 0, nothing_held) == ([0, 1], [4, 4])
        order.on_served({0: True, 1: True})
    order.on_served({1: False})
    for _ in range(5):
        assert order.next_serving(epoch(100), 0, nothing_held) == ([0], [4])
        order.on_served({0: True})
    order.on_served({0: False})
    assert order.is_served
    order.note_room(1, queued=1, ahead=2)
    assert order.next_serving(epoch(100), 0, nothing_held) == ([1], [4])


def test_where_workers_use_unequal_counts_one_that_enters_is_served_as_the_others_are():
    order = order_of({0: 0, 1: 7}, equal_counts=False)
    assert order.next_serving(epoch(100), 0, nothing_held) == ([0, 1], [4, 4])


def test_where_workers_use_unequal_counts_the_last_blocks_are_for_those_without_a_queued_one():
    order = order_of({0: 0, 1: 0, 2: 0}, equal_counts=False)
    assert order.next_serving(epoch(25), 0, nothing_held)[0] == [0, 1, 2]
    assert order.next_serving(epoch(24), 0, nothing_held) == ([], [])
    order.note_room(1, queued=0, ahead=2)
    assert order.next_serving(epoch(24), 0, nothing_held) == ([1], [4])


def test_where_workers_use_unequal_counts_no_part_is_less_than_half_a_batch_or_more_than_one():
    for batch_size in range(3, 9):
        order = order_of(dict.fromkeys(range(5), 0), equal_counts=False)
        order.note_room(3, queued=0, ahead=2)
        for left in range(batch_size, 12 * batch_size):
            _, (size, *_) = order.next_serving(epoch(left, batch_size), 0, nothing_held)
            assert batch_size / 2 <= size <= batch_size, (batch_size, left)
