"""A worker's side of changing groups: what it may begin between a Halt and its Group, and what it answers."""

from __future__ import annotations

from offbeat.events import Group, Halt
from offbeat.policies.membership.group_membership import Follower, Turn


def group(generation: int, step: int, members: tuple[int, ...], joining: tuple[int, ...] = ()) -> Group:
    return Group(
        generation=generation,
        step=step,
        exchange_id=1000 * generation,
        members=members,
        joining=joining,
        weights=(1 / len(members),) * len(members),
        reason=f"reason of group {generation}",
    )


def halt(generation: int, *, abandon: bool = False) -> Halt:
    return Halt(generation=generation, abandon=abandon, reason=f"reason of halt {generation}")


def member(worker: int = 0) -> Follower:
    follower = Follower(worker)
    follower.hear_group(group(0, 0, (0, 1, 2)))
    return follower


def take_a_step(follower: Follower) -> None:
    assert follower.turn() is Turn.GO
    assert follower.finish_round()
    follower.finish_step()


def test_without_a_group_it_waits():
    assert Follower(0).turn() is Turn.WAIT


def test_it_says_why_the_group_changes_or_has_changed():
    follower = Follower(0)
    assert follower.reason == ""
    follower.hear_group(group(0, 0, (0, 1, 2)))
    assert follower.reason == "reason of group 0"
    follower.hear_halt(halt(1))
    assert follower.reason == "reason of halt 1"
    follower.hear_group(group(1, 5, (0, 1)))  # whose step has not come
    assert follower.reason == "reason of group 1"


def test_it_counts_rounds_and_steps():
    follower = member()
    take_a_step(follower)
    take_a_step(follower)
    assert (follower.step, follower.round) == (2, 2)


def test_a_step_that_has_begun_is_finished_and_no_other_is_begun_until_the_group():
    follower = member()
    assert follower.turn() is Turn.GO
    answer = follower.hear_halt(halt(1))
    assert answer is not None
    assert (answer.step, answer.has_begun, answer.has_state) == (0, True, True)
    assert follower.turn() is Turn.GO  # the rest of that step
    assert follower.finish_round()
    follower.finish_step()
    assert follower.turn() is Turn.WAIT
    follower.hear_group(group(1, 1, (0, 1)))
    assert follower.turn() is Turn.GO
    assert follower.generation == 1


def test_a_group_holds_from_its_step_on():
    follower = member()
    follower.turn()
    follower.hear_halt(halt(1))
    follower.hear_group(group(1, 2, (0, 1)))
    assert follower.generation == 0
    take_a_step(follower)
    assert follower.generation == 0
    take_a_step(follower)
    assert follower.generation == 1
    assert follower.exchange_id == 1000


def test_an_abandoned_exchange_counts_for_nothing_and_its_group_holds_at_once():
    follower = member()
    follower.turn()
    assert follower.hear_halt(halt(1, abandon=True)) is not None
    assert not follower.finish_round()
    assert follower.round == 0
    assert follower.turn() is Turn.WAIT
    follower.hear_group(group(1, 0, (0, 1)))
    assert follower.turn() is Turn.GO
    assert follower.finish_round()


def test_who_is_left_out_keeps_its_gradients_to_itself():
    follower = member(2)
    follower.hear_halt(halt(1))
    follower.hear_group(group(1, 0, (0, 1)))
    assert follower.turn() is Turn.OUT
    assert not follower.is_member
    follower.finish_step()
    assert follower.step == 0


def test_who_joins_takes_the_state_and_follows_the_group_only_then():
    follower = member(2)
    follower.hear_group(group(1, 0, (0, 1)))
    follower.hear_group(group(2, 5, (0, 1, 2), joining=(2,)))
    assert follower.turn() is Turn.TAKE
    assert follower.generation == 1  # what its Ready says: it is not there yet
    assert follower.donor == 0
    follower.take(round=7)
    assert (follower.step, follower.round, follower.generation) == (5, 7, 2)
    assert follower.turn() is Turn.GO


def test_a_joiner_without_the_state_says_so():
    follower = Follower(3)
    follower.hear_group(group(1, 5, (0, 1, 3), joining=(3,)))
    answer = follower.hear_halt(halt(2))
    assert answer is not None
    assert not answer.has_state


def test_the_donor_gives_only_once_the_group_holds():
    follower = member(0)
    follower.hear_halt(halt(1))
    follower.hear_group(group(1, 1, (0, 1, 2, 3), joining=(3,)))
    assert follower.joiners == ()
    take_a_step(follower)
    assert follower.joiners == (3,)


def test_only_the_first_that_has_the_state_is_the_donor():
    follower = member(1)
    follower.hear_group(group(1, 0, (0, 1, 2), joining=(0,)))
    assert follower.donor == 1
    assert follower.joiners == (0,)


def test_a_group_that_is_said_again_changes_nothing():
    """A coordinator that was started again repeats its last words: ids would be used twice."""
    follower = member()
    follower.exchange_id = 17
    follower.hear_group(group(0, 0, (0, 1, 2)))
    assert follower.exchange_id == 17


def test_a_group_that_a_later_halt_has_made_void_is_forgotten():
    follower = member()
    follower.hear_halt(halt(2))
    follower.hear_group(group(1, 0, (0, 1)))
    assert follower.turn() is Turn.WAIT
    assert follower.generation == 0


def test_a_group_whose_step_has_not_come_is_void_when_exchanges_are_given_up():
    """Found by a campaign: it held at once, a step early, and the group after it then did not."""
    follower = member()
    follower.turn()
    follower.hear_halt(halt(1))
    follower.hear_group(group(1, 1, (0, 1)))
    follower.hear_halt(halt(2, abandon=True))
    assert follower.turn() is Turn.WAIT
    assert follower.generation == 0
    follower.hear_group(group(2, 1, (1, 2)))
    assert follower.turn() is Turn.OUT


def test_groups_are_followed_in_their_order_each_from_its_step_on():
    """Found by a campaign: the second was named before the first one's step, and the first was forgotten."""
    follower = member()
    follower.turn()
    follower.hear_halt(halt(1))
    follower.hear_group(group(1, 1, (0, 1)))
    follower.hear_halt(halt(2))
    follower.hear_group(group(2, 2, (0, 2)))
    take_a_step(follower)
    assert (follower.generation, follower.exchange_id) == (1, 1000)
    take_a_step(follower)
    assert (follower.generation, follower.exchange_id) == (2, 2000)


def test_an_old_halt_is_not_answered():
    follower = member()
    assert follower.hear_halt(halt(3)) is not None
    assert follower.hear_halt(halt(3)) is None
    assert follower.hear_halt(halt(2)) is None
    follower.hear_group(group(3, 0, (0, 1)))
    assert follower.hear_halt(halt(3)) is None
