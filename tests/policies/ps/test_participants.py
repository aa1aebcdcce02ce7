"""The participants of a time are fixed before any client pushes at it."""

from __future__ import annotations

import json

from offbeat.policies.ps.participants import AggregationParticipants


def of(*clients):
    participants = AggregationParticipants()
    for client in clients:
        participants.join(client, "w", None)
    return participants


def test_a_client_that_joins_before_the_servers_begins_at_once():
    assert of(3, 5).first_times == {"w": {3: 1, 5: 1}}


def test_in_a_namespace_without_participants_a_client_begins_at_once():
    participants = AggregationParticipants()
    assert participants.join(3, "w", 7)
    assert (participants.first_times, participants.pauses) == ({"w": {3: 1}}, {})


def test_a_newcomer_begins_after_the_latest_time_that_any_client_has_sent():
    participants = of(0, 1)
    assert participants.join(2, "w", 7)
    assert participants.pauses == {"w": 7}
    assert not participants.join(3, "w", 8)  # in the same pause
    assert not participants.on_pause_reached(0, "w", 7, 4)
    assert participants.first_times == {"w": {0: 1, 1: 1}}
    assert participants.on_pause_reached(1, "w", 7, 6)
    assert participants.first_times == {"w": {0: 1, 1: 1, 2: 7, 3: 7}}
    assert participants.pauses == {}


def test_a_client_enlists_once():
    participants = of(0, 1)
    assert not participants.join(0, "w", 7)
    participants.join(2, "w", 7)
    assert not participants.join(2, "w", 8)


def test_reports_of_an_earlier_pause_do_not_count():
    participants = of(0, 1)
    participants.join(2, "w", 7)
    assert not participants.on_pause_reached(0, "w", 5, 4)
    assert not participants.on_pause_reached(1, "w", 7, 4)
    assert participants.on_pause_reached(0, "w", 7, 4)


def test_a_pause_does_not_wait_for_a_lost_client():
    participants = of(0, 1)
    participants.join(2, "w", 7)
    participants.on_pause_reached(0, "w", 7, 4)
    assert participants.on_client_lost(1)
    assert participants.first_times == {"w": {0: 1, 2: 5}}


def test_a_pause_for_a_newcomer_that_dies_is_over():
    participants = of(0, 1)
    participants.join(2, "w", 7)
    assert participants.on_client_lost(2)
    assert (participants.first_times, participants.pauses) == ({"w": {0: 1, 1: 1}}, {})


def test_when_all_others_are_lost_newcomers_begin():
    participants = of(0)
    participants.join(2, "w", 7)
    assert participants.on_client_lost(0)
    assert participants.first_times == {"w": {2: 1}}


def test_a_lost_client_does_not_return():
    participants = of(0, 1)
    assert participants.on_client_lost(1)
    assert not participants.on_client_lost(1)
    assert not participants.join(1, "w", 7)
    assert participants.first_times == {"w": {0: 1}}


def test_a_client_that_withdraws_from_one_namespace_stays_in_another():
    participants = of(0, 1)
    participants.join(1, "v", None)
    assert participants.leave(1, "w")
    assert not participants.leave(1, "w")
    assert not participants.leave(1, "u")
    assert participants.first_times == {"w": {0: 1}, "v": {1: 1}}


def test_restored_participants_continue_identically():
    participants = of(0, 1)
    participants.join(2, "w", 7)
    participants.on_pause_reached(0, "w", 7, 4)
    participants.on_client_lost(9)
    again = AggregationParticipants()
    again.load_state_dict(json.loads(json.dumps(participants.state_dict())))
    assert again.state_dict() == participants.state_dict()
    assert again.on_pause_reached(1, "w", 7, 6)
    assert again.first_times == {"w": {0: 1, 1: 1, 2: 7}}
    assert not again.join(9, "w", 8)
