"""Open rounds: what each worker has contributed, until the round is completed or abandoned."""

import json

import pytest

from offbeat.errors import ProtocolError
from offbeat.events import Block
from offbeat.policies.data.open_rounds import OpenRounds

BLOCKS = [Block(number, 0, ((4 * number, 4 * number + 4),)) for number in range(4)]


def with_contributions() -> OpenRounds:
    """Round 2 with workers 1 and 0, round 3 with worker 0."""
    rounds = OpenRounds()
    rounds.add(1, 2, (BLOCKS[1],))
    rounds.add(0, 2, (BLOCKS[0],))
    rounds.add(0, 3, (BLOCKS[2], BLOCKS[3]))
    return rounds


def test_rounds_are_completed_in_order_and_once():
    rounds = with_contributions()
    with pytest.raises(ProtocolError, match="round 2 is neither completed nor abandoned, got round 3"):
        rounds.complete(3)
    assert rounds.complete(2) == [BLOCKS[1], BLOCKS[0]]
    with pytest.raises(ProtocolError, match="expected a round after 2, which is completed, got round 2"):
        rounds.complete(2)
    with pytest.raises(ProtocolError, match="got a contribution of worker 5 to round 2"):
        rounds.check_contribution(5, 2)
    assert rounds.complete(3) == [BLOCKS[2], BLOCKS[3]]
    assert rounds.numbers() == ()


def test_an_abandoned_round_gives_back_what_each_worker_contributed_and_may_be_repeated():
    rounds = with_contributions()
    assert rounds.abandon(2) == [(0, (BLOCKS[0],)), (1, (BLOCKS[1],))]
    assert rounds.blocks_from(0) == [BLOCKS[2], BLOCKS[3]]
    rounds.check_contribution(1, 2)
    rounds.add(1, 2, (BLOCKS[1],))
    assert rounds.numbers() == (2, 3)


def test_a_worker_contributes_to_a_round_once_unless_it_withdraws():
    rounds = with_contributions()
    with pytest.raises(ProtocolError, match="worker 1 has contributed to round 2 already"):
        rounds.check_contribution(1, 2)
    assert rounds.withdraw(1, 2) == (BLOCKS[1],)
    assert rounds.withdraw(1, 2) == ()
    rounds.check_contribution(1, 2)


def test_a_restored_state_has_the_same_contributions():
    rounds, other = with_contributions(), OpenRounds()
    rounds.complete(2)
    other.load_state_dict(json.loads(json.dumps(rounds.state_dict())))
    assert vars(other) == vars(rounds)
