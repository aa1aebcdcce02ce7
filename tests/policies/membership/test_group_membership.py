"""A worker's view of a changing group: exchanges that may begin between a Halt and its Group, answers."""

from __future__ import annotations

from dataclasses import replace

from offbeat.events import Group, Halt, SkipRound
from offbeat.policies.membership.group_membership import ExchangeDecision, GroupMembership


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


def member(worker: int = 0) -> GroupMembership:
    membership = GroupMembership(worker)
    membership.on_group(group(0, 0, (0, 1, 2)))
    return membership


def take_a_step(membership: GroupMembership) -> None:
    assert membership.begin_exchange() is ExchangeDecision.EXCHANGE
    assert membership.finish_round()
    membership.finish_step()


def test_without_a_group_a_worker_waits():
    assert GroupMembership(0).begin_exchange() is ExchangeDecision.WAIT


def test_the_reason_of_the_latest_change_is_known():
    membership = GroupMembership(0)
    assert membership.change_reason == ""
    membership.on_group(group(0, 0, (0, 1, 2)))
    assert membership.change_reason == "reason of group 0"
    membership.on_halt(halt(1))
    assert membership.change_reason == "reason of halt 1"
    membership.on_group(group(1, 5, (0, 1)))  # its step has not begun
    assert membership.change_reason == "reason of group 1"


def test_rounds_and_steps_are_counted():
    membership = member()
    take_a_step(membership)
    take_a_step(membership)
    assert (membership.step, membership.round) == (2, 2)


def test_a_step_that_has_begun_is_finished_and_no_other_is_begun_until_the_group():
    membership = member()
    assert membership.begin_exchange() is ExchangeDecision.EXCHANGE
    answer = membership.on_halt(halt(1))
    assert answer is not None
    assert (answer.step, answer.has_begun_exchange, answer.has_state) == (0, True, True)
    assert membership.begin_exchange() is ExchangeDecision.EXCHANGE  # the rest of that step
    assert membership.finish_round()
    membership.finish_step()
    assert membership.begin_exchange() is ExchangeDecision.WAIT
    membership.on_group(group(1, 1, (0, 1)))
    assert membership.begin_exchange() is ExchangeDecision.EXCHANGE
    assert membership.generation == 1


def test_a_group_holds_from_its_step_on():
    membership = member()
    membership.begin_exchange()
    membership.on_halt(halt(1))
    membership.on_group(group(1, 2, (0, 1)))
    assert membership.generation == 0
    take_a_step(membership)
    assert membership.generation == 0
    take_a_step(membership)
    assert membership.generation == 1
    assert membership.exchange_id == 1000


def test_an_abandoned_exchange_counts_for_nothing_and_its_group_holds_at_once():
    membership = member()
    membership.begin_exchange()
    assert membership.on_halt(halt(1, abandon=True)) is not None
    assert not membership.finish_round()
    assert membership.round == 0
    assert membership.begin_exchange() is ExchangeDecision.WAIT
    membership.on_group(group(1, 0, (0, 1)))
    assert membership.begin_exchange() is ExchangeDecision.EXCHANGE
    assert membership.finish_round()


def test_an_excluded_worker_keeps_its_gradients_to_itself():
    membership = member(2)
    membership.on_halt(halt(1))
    membership.on_group(group(1, 0, (0, 1)))
    assert membership.begin_exchange() is ExchangeDecision.KEEP_LOCAL
    assert not membership.is_member
    membership.finish_step()
    assert membership.step == 0


def test_a_joining_worker_fetches_the_state_and_only_then_follows_the_group():
    membership = member(2)
    membership.on_group(group(1, 0, (0, 1)))
    membership.on_group(group(2, 5, (0, 1, 2), joining=(2,)))
    assert membership.begin_exchange() is ExchangeDecision.FETCH_STATE
    assert membership.generation == 1  # the generation of its Ready: it has not joined yet
    assert membership.donor == 0
    membership.on_state_received(round=7)
    assert (membership.step, membership.round, membership.generation) == (5, 7, 2)
    assert membership.begin_exchange() is ExchangeDecision.EXCHANGE


def test_a_joiner_without_the_state_reports_that_in_its_answer():
    membership = GroupMembership(3)
    membership.on_group(group(1, 5, (0, 1, 3), joining=(3,)))
    answer = membership.on_halt(halt(2))
    assert answer is not None
    assert not answer.has_state


def joined_finished_member() -> GroupMembership:
    """Worker 1, which has received the state of worker 0 within a step; that one had finished 7 steps."""
    membership = GroupMembership(1)
    membership.on_group(group(0, 0, (0, 2)))
    assert membership.begin_exchange() is ExchangeDecision.KEEP_LOCAL
    membership.on_halt(halt(1))
    membership.on_group(replace(group(1, 7, (0, 1), joining=(1,)), weights=(0.0, 1.0)))
    assert membership.begin_exchange() is ExchangeDecision.FETCH_STATE
    membership.on_state_received(round=9)
    return membership


def test_a_worker_that_receives_the_state_of_finished_members_ends_its_step_outside():
    membership = joined_finished_member()
    assert membership.begin_exchange() is ExchangeDecision.KEEP_LOCAL
    assert (membership.is_member, membership.generation) == (False, 0)  # what it has computed does not count
    membership.finish_step()
    assert (membership.is_member, membership.generation) == (True, 1)
    assert (membership.step, membership.round) == (7, 9)
    take_a_step(membership)
    assert (membership.step, membership.round) == (8, 10)


def test_a_worker_that_ends_its_step_outside_holds_the_state():
    membership = joined_finished_member()
    answer = membership.on_halt(halt(2))
    assert answer is not None
    assert (answer.has_state, answer.step, answer.has_begun_exchange) == (True, 7, False)
    membership.on_group(group(2, 8, (1, 3), joining=(3,)))
    membership.finish_step()
    assert membership.generation == 1  # step 7 is one of the group before
    take_a_step(membership)
    assert membership.state_recipients == (3,)


def test_a_worker_whose_loop_ends_within_a_step_outside_is_a_member():
    membership = joined_finished_member()
    membership.end_step_outside()
    assert membership.is_member


def test_the_donor_sends_the_state_only_once_the_group_holds():
    membership = member(0)
    membership.on_halt(halt(1))
    membership.on_group(group(1, 1, (0, 1, 2, 3), joining=(3,)))
    assert membership.state_recipients == ()
    take_a_step(membership)
    assert membership.state_recipients == (3,)


def test_only_the_first_that_has_the_state_is_the_donor():
    membership = member(1)
    membership.on_group(group(1, 0, (0, 1, 2), joining=(0,)))
    assert membership.donor == 1
    assert membership.state_recipients == (0,)


def test_a_repeated_group_changes_nothing():
    """A restarted coordinator repeats its last messages: ids would be used twice."""
    membership = member()
    membership.exchange_id = 17
    membership.on_group(group(0, 0, (0, 1, 2)))
    assert membership.exchange_id == 17


def test_a_group_that_a_later_halt_has_made_void_is_forgotten():
    membership = member()
    membership.on_halt(halt(2))
    membership.on_group(group(1, 0, (0, 1)))
    assert membership.begin_exchange() is ExchangeDecision.WAIT
    assert membership.generation == 0


def test_a_group_whose_step_has_not_begun_is_void_when_exchanges_are_abandoned():
    """Found by a campaign: it held at once, a step early, and the group after it then did not."""
    membership = member()
    membership.begin_exchange()
    membership.on_halt(halt(1))
    membership.on_group(group(1, 1, (0, 1)))
    membership.on_halt(halt(2, abandon=True))
    assert membership.begin_exchange() is ExchangeDecision.WAIT
    assert membership.generation == 0
    membership.on_group(group(2, 1, (1, 2)))
    assert membership.begin_exchange() is ExchangeDecision.KEEP_LOCAL


def test_groups_are_followed_in_their_order_each_from_its_step_on():
    """Found by a campaign: the second was named before the first one's step, and the first was forgotten."""
    membership = member()
    membership.begin_exchange()
    membership.on_halt(halt(1))
    membership.on_group(group(1, 1, (0, 1)))
    membership.on_halt(halt(2))
    membership.on_group(group(2, 2, (0, 2)))
    take_a_step(membership)
    assert (membership.generation, membership.exchange_id) == (1, 1000)
    take_a_step(membership)
    assert (membership.generation, membership.exchange_id) == (2, 2000)


def test_an_old_halt_is_not_answered():
    membership = member()
    assert membership.on_halt(halt(3)) is not None
    assert membership.on_halt(halt(3)) is None
    assert membership.on_halt(halt(2)) is None
    membership.on_group(group(3, 0, (0, 1)))
    assert membership.on_halt(halt(3)) is None


def skip(round_: int, generation: int = 0) -> SkipRound:
    return SkipRound(worker=0, generation=generation, round=round_, grace_s=0.0, reason="")


def member_that_may_skip() -> GroupMembership:
    """A member after one step of its loop."""
    membership = member()
    assert membership.begin_contribution()
    take_a_step(membership)
    membership.may_skip = True
    return membership


def test_a_skipped_round_and_its_step_count_without_the_loop():
    membership = member_that_may_skip()
    membership.on_skip_round(skip(1))
    assert membership.begin_skipped_round()
    assert membership.is_skipping
    assert membership.finish_skipped_round(((0, 0), (1, 0), (1, 0)))
    assert (membership.step, membership.round, membership.is_skipping) == (2, 2, False)
    assert not membership.begin_skipped_round()  # each SkipRound is carried out once


def test_the_loop_waits_for_the_end_of_a_skipped_round_and_then_no_other_begins_until_its_step():
    membership = member_that_may_skip()
    membership.on_skip_round(skip(1))
    assert membership.begin_skipped_round()
    assert not membership.begin_contribution()
    assert membership.finish_skipped_round(())
    assert membership.begin_contribution()
    membership.on_skip_round(skip(2))
    assert not membership.begin_skipped_round()
    take_a_step(membership)
    assert not membership.begin_skipped_round()  # it is the next round's turn
    membership.on_skip_round(skip(3))
    assert membership.begin_skipped_round()


def test_a_skip_of_a_round_that_is_still_to_come_is_kept():
    """It may arrive before the loop has applied the mean of the round before."""
    membership = member_that_may_skip()
    assert membership.begin_contribution()
    membership.on_skip_round(skip(2))
    assert membership.begin_exchange() is ExchangeDecision.EXCHANGE
    assert membership.finish_round()
    assert not membership.begin_skipped_round()
    membership.finish_step()
    assert membership.begin_skipped_round()


def test_nothing_is_skipped_that_the_loop_could_not_apply():
    membership = member_that_may_skip()
    membership.may_skip = False
    membership.on_skip_round(skip(1))
    assert not membership.begin_skipped_round()
    membership.may_skip = True
    assert membership.begin_skipped_round()


def test_nothing_is_skipped_during_a_halt_nor_in_a_group_that_the_loop_has_not_exchanged_in():
    membership = member_that_may_skip()
    membership.on_skip_round(skip(1))
    assert membership.on_halt(halt(1))
    assert not membership.begin_skipped_round()
    membership.on_group(group(1, 1, (0, 1)))
    membership.on_skip_round(skip(1, generation=1))
    assert not membership.begin_skipped_round()
    assert membership.begin_contribution()
    take_a_step(membership)
    membership.on_skip_round(skip(2, generation=1))
    assert membership.begin_skipped_round()


def test_a_halt_lets_a_skipped_round_finish_and_knows_of_it():
    membership = member_that_may_skip()
    membership.on_skip_round(skip(1))
    assert membership.begin_skipped_round()
    answer = membership.on_halt(halt(1))
    assert answer is not None
    assert (answer.step, answer.has_begun_exchange, answer.has_state) == (1, True, True)
    assert membership.finish_skipped_round(())
    assert membership.step == 2


def test_after_an_abandoned_skip_the_loop_contributes_only_in_the_next_group():
    """Another member may have finished the round, in which this one has weight 0."""
    membership = member_that_may_skip()
    membership.on_skip_round(skip(1))
    assert membership.begin_skipped_round()
    assert membership.on_halt(halt(1, abandon=True))
    assert not membership.finish_skipped_round(None)
    assert (membership.step, membership.round) == (1, 1)
    assert not membership.begin_contribution()
    membership.on_group(group(1, 1, (0, 1, 2)))
    assert membership.begin_contribution()


def test_what_arrives_of_a_skipped_round_after_it_was_abandoned_does_not_count():
    membership = member_that_may_skip()
    membership.on_skip_round(skip(1))
    assert membership.begin_skipped_round()
    assert membership.on_halt(halt(1, abandon=True))
    assert not membership.finish_skipped_round(((1, 0), (1, 0), (1, 0)))
    assert (membership.step, membership.round) == (1, 1)
