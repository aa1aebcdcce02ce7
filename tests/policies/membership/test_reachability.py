"""Reported outages between workers, and exclusions after which all remaining workers reach each other."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.events import PeerReachable, PeerUnreachable
from offbeat.policies.membership.reachability import Reachability


def unreachable(worker: int | None, peer: int, now_s: float = 1.0) -> PeerUnreachable:
    return PeerUnreachable(now_s=now_s, worker=worker, peer=peer, cause="it is silent")


def reachable(worker: int | None, peer: int, now_s: float = 2.0) -> PeerReachable:
    return PeerReachable(now_s=now_s, worker=worker, peer=peer)


def reported(*pairs: tuple[int | None, int]) -> Reachability:
    found = Reachability()
    for worker, peer in pairs:
        found.on_report(unreachable(worker, peer))
    return found


@pytest.mark.parametrize(
    ("pairs", "out"),
    [
        ([], set()),
        ([(1, 2), (2, 1)], {2}),  # the later of two
        ([(2, 1)], {1}),  # only 1 is not received
        ([(1, 2), (2, 1), (1, 3), (3, 1)], {1}),  # most have lost it
        ([(0, 1), (0, 2), (1, 0), (2, 0), (3, 1), (3, 2), (1, 3), (2, 3)], {0, 3}),
        ([(None, 0)], {0}),  # the coordinator receives nothing from it
        ([(None, 0), (1, 0), (0, 1), (2, 1)], {0, 1}),
    ],
)
def test_the_member_that_most_others_have_lost_is_excluded_else_the_later_one(pairs, out):
    assert set(reported(*pairs).exclusions(range(4), ())) == out


def test_the_reason_names_both_workers():
    assert reported((1, 2), (2, 1)).exclusions(range(4), ()) == {
        2: "worker 1 cannot reach worker 2: it is silent"
    }
    assert reported((None, 2)).exclusions(range(4), ()) == {
        2: "the coordinator cannot reach worker 2: it is silent"
    }


def test_a_worker_outside_takes_no_member_s_place():
    assert set(reported((0, 3), (1, 3), (3, 0), (3, 1), (4, 3)).exclusions([3], [0, 1, 4])) == {0, 1, 4}


def test_workers_outside_are_considered_in_the_order_of_their_ids():
    assert set(reported((4, 5), (5, 4)).exclusions([0], [4, 5])) == {5}


def test_a_report_is_withdrawn_and_one_of_a_lost_worker_no_longer_counts():
    found = reported((1, 2), (2, 1), (None, 3))
    found.on_report(reachable(2, 1))
    assert set(found.exclusions(range(4), ())) == {2, 3}
    found.on_report(reachable(1, 2))
    found.forget(3)
    assert not found
    assert found.silent_workers == set()


def test_the_oldest_report_is_between_workers_that_the_coordinator_reaches():
    found = Reachability()
    found.on_report(unreachable(None, 1, 0.5))
    found.on_report(unreachable(1, 2, 1.0))
    assert found.oldest_outage() is None
    found.on_report(unreachable(2, 3, 5.0))
    found.on_report(unreachable(2, 3, 6.0))  # repeated
    assert found.oldest_outage() == (5.0, 2, 3, "it is silent")


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 7)), st.integers(0, 7)), max_size=20),
    st.sets(st.integers(0, 7)),
)
@settings(deadline=None)
def test_the_remaining_workers_reach_each_other_and_members_are_excluded_only_for_a_report(pairs, members):
    pairs = [(worker, peer) for worker, peer in pairs if worker != peer]
    found = reported(*pairs)
    out = found.exclusions(members, set(range(8)) - members)
    kept = set(range(8)) - out.keys()
    assert not [pair for pair in pairs if set(pair) <= kept | {None} and pair[1] in kept]
    assert all(any(worker in pair for pair in pairs) for worker in out)
    again = Reachability()
    again.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert again.exclusions(members, set(range(8)) - members) == out
