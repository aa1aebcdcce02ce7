"""Values that workers give to each other: which belong together, and when they are delivered."""

import json
import random

import pytest

from offbeat.errors import ProtocolError
from offbeat.events import (
    DeliverValue,
    EndGathering,
    Failed,
    Finished,
    Left,
    Lost,
    RejectPeer,
    Tick,
    ValueGiven,
)
from offbeat.policies import dispatch_event
from offbeat.policies.membership.value_gathering import VALUE_CHARACTERS_MAX, ValueGathering
from support.joined_events import joined


def given(worker, value="v", call="gather", now_s=0.0, delivers_first=False, number=0):
    return ValueGiven(
        now_s=now_s, worker=worker, number=number, call=call, delivers_first=delivers_first, value=value
    )


GONE = {
    "lost": lambda worker: Lost(now_s=0.0, worker=worker, cause="it was killed"),
    "failed": lambda worker: Failed(now_s=0.0, worker=worker, step=3, error="E"),
    "left": lambda worker: Left(now_s=0.0, worker=worker, step=3),
    "finished": lambda worker: Finished(now_s=0.0, worker=worker, epoch=1, step=3),
}


def policy(workers=3, timeout_s=60.0):
    one = ValueGathering(timeout_s=timeout_s)
    for worker in range(workers):
        assert not one.handle(joined(worker))
    return one


def handle(one, *events):
    return [action for event in events for action in one.handle(event)]


def delivered(actions):
    """By gathering, its members and the values by source."""
    found, values = [], {}
    for action in actions:
        if isinstance(action, DeliverValue):
            values[action.source] = (action.value, action.members, action.gathering)
        else:
            assert isinstance(action, EndGathering)
            assert not action.error
            assert all(tuple(one) == (action.members, action.gathering) for _, *one in values.values())
            found.append((action.members, {source: value for source, (value, *_) in values.items()}))
            values = {}
    assert not values
    return found


def test_all_get_all_values_once_the_last_is_there():
    one = policy()
    assert not handle(one, given(2, "c"), given(0, "a"))
    assert delivered(handle(one, given(1, "b"))) == [((0, 1, 2), {0: "a", 1: "b", 2: "c"})]
    assert not handle(one, given(1, "d"))  # the next one


def test_only_the_first_workers_value_is_delivered_where_that_is_wanted_and_no_empty_one():
    one = policy()
    calls = [given(worker, f"v{worker}", delivers_first=True) for worker in (2, 1, 0)]
    assert delivered(handle(one, *calls)) == [((0, 1, 2), {0: "v0"})]
    assert delivered(handle(one, *(given(worker, "") for worker in range(3)))) == [((0, 1, 2), {})]


@pytest.mark.parametrize("how", GONE)
@pytest.mark.parametrize("has_given", [True, False])
def test_who_is_gone_is_not_awaited_and_its_value_is_dropped(how, has_given):
    one = policy()
    handle(one, given(0, "a"), *([given(2, "c")] if has_given else []))
    actions = handle(one, GONE[how](2)) + handle(one, given(1, "b"))
    assert delivered(actions) == [((0, 1), {0: "a", 1: "b"})]
    assert delivered(handle(one, given(0), given(1))) == [((0, 1), {0: "v", 1: "v"})]


def test_the_last_value_may_be_missing_because_its_worker_is_gone():
    one = policy()
    handle(one, given(0, "a"), given(1, "b"))
    (_, _, end) = actions = handle(one, GONE["lost"](2))
    assert delivered(actions) == [((0, 1), {0: "a", 1: "b"})]
    assert end.reason == "worker 2 is not awaited: Lost"


def test_a_newcomer_takes_part_from_the_next_gathering_on():
    one = policy()
    assert not handle(one, given(0, "a"), joined(3), given(3, "later"), given(1, "b"))
    assert delivered(handle(one, given(2, "c"))) == [((0, 1, 2), {0: "a", 1: "b", 2: "c"})]
    later = [given(worker, f"{worker}") for worker in range(3)]
    assert delivered(handle(one, *later)) == [((0, 1, 2, 3), {0: "0", 1: "1", 2: "2", 3: "later"})]


def test_other_calls_are_an_error_that_names_two_workers():
    one = policy()
    (end,) = handle(one, given(2, call="session.barrier()"), given(0, call="session.gather_objects()"))
    assert end.members == (0, 2)
    assert end.error.startswith(
        "worker 0 called session.gather_objects() where worker 2 called session.barrier(): "
    )


def test_who_does_not_come_is_named_in_time():
    one = policy(timeout_s=5.0)
    handle(one, given(1, now_s=100.0))
    assert not handle(one, Tick(now_s=105.0))
    (end,) = handle(one, Tick(now_s=105.1))
    assert end.members == (1,)
    assert end.error == "workers [0, 2] did not call gather within 5 s, and workers [1] did"


def test_a_value_replaces_that_of_a_call_which_its_program_gave_up():
    one = policy()
    assert not handle(one, given(0, "old", number=3), given(1, "b", number=5), given(0, "new", number=4))
    actions = handle(one, given(2, "c", number=1))
    assert delivered(actions) == [((0, 1, 2), {0: "new", 1: "b", 2: "c"})]
    assert actions[-1].numbers == (4, 5, 1)


def test_of_a_call_that_was_given_up_nothing_is_left():
    one = policy()
    assert not handle(one, given(0, call="barrier"), given(0, "a", call="gather", number=1))
    assert delivered(handle(one, given(1, "b"), given(2, "c"))) == [((0, 1, 2), {0: "a", 1: "b", 2: "c"})]


def test_a_worker_that_another_policy_rejects_is_not_awaited():
    class Rejects:
        def handle(self, event):
            return [RejectPeer(peer="worker-1", reason="r"), RejectPeer(peer="nobody", reason="r")]

    one = policy()
    handle(one, given(0, "a"), given(2, "c"))
    rejected = dispatch_event([Rejects(), one], Tick(now_s=1.0))
    assert delivered(rejected[2:]) == [((0, 2), {0: "a", 2: "c"})]


def test_what_no_worker_sends_is_refused():
    one = policy()
    with pytest.raises(ProtocolError, match="at most 131072 characters, got 131073 from worker 0"):
        handle(one, given(0, "v" * (VALUE_CHARACTERS_MAX + 1)))


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_all_that_are_left_get_the_same_values_in_the_same_order(seed):
    """Programs that make the same calls, with deaths, newcomers and restarts of the coordinator."""
    draw = random.Random(seed)
    one, workers = policy(), {worker: [] for worker in range(3)}
    waiting, newcomers = set(), iter(range(3, 7))
    for _ in range(200):
        free = sorted({*workers} - waiting)
        chance = draw.random()
        if chance < 0.02 and (newcomer := next(newcomers, None)) is not None:
            workers[newcomer] = []
            actions = handle(one, joined(newcomer))
        elif chance < 0.04 and len(workers) > 1:
            worker = draw.choice(sorted(workers))
            del workers[worker]
            waiting.discard(worker)
            actions = handle(one, GONE[draw.choice([*GONE])](worker))
        elif chance < 0.06:
            state = json.loads(json.dumps(one.state_dict()))
            one = ValueGathering(timeout_s=60.0)
            one.load_state_dict(state)
            continue
        elif free:
            worker = draw.choice(free)
            waiting.add(worker)
            actions = handle(one, given(worker, f"value of {worker}"))
        else:
            raise AssertionError(f"all wait: {workers}")
        for members, values in delivered(actions):
            assert {*members} <= waiting
            assert values == {worker: f"value of {worker}" for worker in members}
            waiting -= {*members}
            for worker in members:
                workers[worker].append(members)
    longest = max(workers.values(), key=len)
    assert len(longest) > 5
    assert all(longest[len(longest) - len(own) :] == own for own in workers.values() if own)
