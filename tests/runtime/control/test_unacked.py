"""Promises about the actions that a peer has not acknowledged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.runtime.control.unacked import UnackedActions
from offbeat.wire.codec import ActionMessage

MESSAGES = st.lists(st.builds(ActionMessage, st.integers(1, 3), st.sampled_from([b"a", b"b", b"c"])))


def of(*counts):
    unacked = UnackedActions()
    unacked.add([ActionMessage(count, b"message %d" % number) for number, count in enumerate(counts)])
    return unacked


def test_messages_are_kept_in_order_until_their_actions_are_acknowledged():
    unacked = of(2, 1, 3)
    assert unacked.sent == 6
    unacked.on_acked(2)
    assert [*unacked] == [b"message 1", b"message 2"]
    unacked.on_acked(2)
    unacked.on_acked(6)
    assert [*unacked] == []
    assert unacked.sent == 6


@pytest.mark.parametrize("received", [1, 4, 7])
def test_fewer_than_before_more_than_sent_or_a_part_of_a_message_cannot_be_acknowledged(received):
    unacked = of(2, 1, 3)
    unacked.on_acked(2)
    with pytest.raises(ProtocolError, match="expected an acknowledgement"):
        unacked.on_acked(received)


@given(st.lists(MESSAGES, max_size=4), st.data())
def test_plain_data_restore_the_messages_of_all_peers_with_each_message_once(messages_of_peers, data):
    peers = []
    for messages in messages_of_peers:
        peers.append(UnackedActions())
        peers[-1].add(messages)
        acked = data.draw(st.integers(0, len(messages)))
        peers[-1].on_acked(sum(message.actions for message in messages[:acked]))
    numbers = {}
    plain = [peer.to_plain(numbers) for peer in peers]
    assert [*numbers.values()] == [*range(len(numbers))]
    for peer, restored in zip(peers, plain, strict=True):
        back = UnackedActions.from_plain(restored, [*numbers])
        assert [*back] == [*peer]
        assert back.sent == peer.sent
        back.on_acked(back.sent)
