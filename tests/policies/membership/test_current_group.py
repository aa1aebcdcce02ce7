"""The group in force: who may still be in the one before, and which members that have ended are needed."""

from __future__ import annotations

import json

from offbeat.policies.membership.current_group import CurrentGroup


def changed() -> CurrentGroup:
    """Workers 0 to 2 switch to a group without 2, which 3 joins."""
    group = CurrentGroup()
    group.change((0, 1, 2), reason="all are here")
    group.change((0, 1, 3), joining=(3,), before=(0, 1, 2), generation=1, step=4, exchange_id=9, reason="")
    return group


def test_members_of_both_groups_are_halted_until_all_have_switched():
    group = changed()
    assert group.halt_recipients == {0, 1, 2, 3}
    assert not group.on_switched(0)
    assert group.halt_recipients == {0, 1, 2, 3}
    assert group.on_switched(1)
    assert group.halt_recipients == {0, 1, 3}
    assert group.joining == {3}


def test_a_member_that_has_ended_is_overtaken_once_another_one_goes_past_its_last_step():
    group = changed()
    group.on_step_begun(4)
    group.on_ended(1, 6)
    group.on_step_begun(5)
    assert group.overtaken == set()
    group.on_step_begun(6)
    assert group.overtaken == {1}
    group.on_ended(0, 6)  # step 6 has begun without it
    assert group.overtaken == {0, 1}


def test_a_joining_member_that_ends_before_the_group_s_first_step_is_overtaken():
    group = changed()
    group.on_ended(3, 4)
    assert (group.overtaken, group.joining) == ({3}, set())


def test_a_member_that_has_finished_has_no_weight_and_is_not_waited_for():
    group = CurrentGroup()
    group.change((0, 1, 2), reason="all are here")
    two = group.change((0, 1, 2), joining=(2,), finished=(0,), generation=1, reason="")
    assert (two.weights, group.joining_need_others) == ((0.0, 0.5, 0.5), True)
    one = group.change((0, 1, 2), joining=(2,), finished=(0, 1), generation=2, reason="")
    assert (one.weights, group.joining_need_others) == ((0.0, 0.0, 1.0), False)
    assert group.change((0, 1), finished=(0, 1), generation=3, reason="").weights == (0.5, 0.5)


def test_exchange_ids_are_above_all_that_were_used():
    group = changed()
    assert (group.next_exchange_id(20, 100), group.next_exchange_id(3, 100)) == (120, 109)


def test_a_restored_group_is_the_same():
    group, other = changed(), CurrentGroup()
    group.on_switched(0)
    other.load_state_dict(json.loads(json.dumps(group.state_dict())))
    assert vars(other) == vars(group)
