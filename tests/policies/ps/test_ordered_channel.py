"""Reliable channel: every message once and in order over any network, and no endless resending."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.policies.ps.ordered_channel import Packet, ReliableChannel


def numbers(packets: list[Packet]) -> list[int]:
    return [packet.number for packet in packets]


@given(st.integers(0, 2**32), st.floats(0, 0.6), st.floats(0, 0.5), st.integers(0, 40), st.integers(0, 40))
def test_each_message_arrives_once_and_in_order_despite_loss_repetition_and_reordering(
    seed, lost, doubled, there, back
):
    chance = random.Random(seed)
    ends = [ReliableChannel(resend_s=0.5), ReliableChannel(resend_s=0.5)]
    expected = [[f"a{number}" for number in range(there)], [f"b{number}" for number in range(back)]]
    unsent = [list(one) for one in expected]
    received: list[list[str]] = [[], []]
    under_way: list[tuple[int, Packet]] = []  # receiver and packet

    def put(to, packets):
        for packet in packets:
            if chance.random() >= lost:
                under_way.extend([(to, packet)] * (1 + (chance.random() < doubled)))

    now_s = 0.0
    while any(unsent) or under_way or any(end.due_s is not None for end in ends):
        assert now_s < 20_000
        now_s += 0.1
        side = chance.randrange(2)
        if unsent[side]:
            count = chance.randint(1, 5)
            put(1 - side, ends[side].send(unsent[side][:count], now_s))
            del unsent[side][:count]
        for _ in range(min(len(under_way), 3)):
            to, packet = under_way.pop(chance.randrange(len(under_way)))
            due, answer = ends[to].on_packet(packet, now_s)
            received[1 - to] += due
            put(1 - to, answer)
        for one in (0, 1):
            put(1 - one, ends[one].on_tick(now_s))
    assert received == expected


def test_nothing_is_sent_twice_where_nothing_is_lost():
    a, b = ReliableChannel(), ReliableChannel()
    sent = a.send(["x", "y"], 0.0)
    for packet in sent:
        _, answer = b.on_packet(packet, 0.1)
        for reply in answer:
            assert a.on_packet(reply, 0.15) == ([], [])
    assert a.due_s is None
    assert a.on_tick(100.0) == []


def test_an_unacknowledged_message_is_resent_less_and_less_often():
    a = ReliableChannel(resend_s=1.0, resend_max_s=5.0)
    a.send(["x"], 0.0)
    times_s = []
    for tenth in range(300):
        if a.on_tick(tenth / 10):
            times_s.append(tenth / 10)
    assert times_s == [1.0, 3.0, 7.0, 12.0, 17.0, 22.0, 27.0]


def test_an_acknowledgement_of_some_restarts_the_timer_of_the_rest():
    a = ReliableChannel(resend_s=1.0)
    a.send(["x", "y"], 0.0)
    a.on_packet(Packet(number=-1, ack=1), 0.9)
    assert a.on_tick(1.5) == []
    assert numbers(a.on_tick(1.9)) == [1]


def test_after_a_reconnection_all_unacknowledged_messages_are_resent_at_once():
    a = ReliableChannel()
    a.send(["x", "y", "z"], 0.0)
    a.on_packet(Packet(number=-1, ack=1), 0.01)
    assert [packet.message for packet in a.on_reconnected(0.02)] == ["y", "z"]


def test_a_due_message_is_accepted_however_many_have_arrived_before_their_turn():
    a, b = ReliableChannel(), ReliableChannel()
    first, *others = a.send(range(10_000), 0.0)
    for packet in others:
        assert b.on_packet(packet, 0.0)[0] == []
    due, _ = b.on_packet(first, 0.0)
    assert due[:100] == list(range(100))
    for packet in a.on_reconnected(1.0):
        due += b.on_packet(packet, 1.0)[0]
    assert due == list(range(10_000))


def test_an_acknowledgement_of_unsent_messages_is_refused():
    a = ReliableChannel()
    a.send(["x"], 0.0)
    with pytest.raises(ProtocolError, match="an acknowledgement of at most 1 messages, got 2"):
        a.on_packet(Packet(number=-1, ack=2), 0.0)


@pytest.mark.parametrize("times", [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0)])
def test_resend_times_out_of_range_are_refused(times):
    with pytest.raises(ValueError, match="0 < resend_s <= resend_max_s"):
        ReliableChannel(resend_s=times[0], resend_max_s=times[1])
