"""Groups of workers: every shard is owned, waits or is lost; every pass over it counts once."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.events import (
    Action,
    AssignTask,
    NodeLeft,
    NodeLost,
    PassesEnded,
    ProgressRequested,
    TaskDone,
    TaskRequested,
    TauSet,
    Tick,
    WorkerGroupJoined,
    WorkerGroupLeft,
    WorkerGroupRejected,
    WorkerGroupView,
)
from offbeat.policies.ps.shard_scheduler import LOSS_POLICIES, SHARDS_MAX
from offbeat.policies.ps.worker_groups import WorkerGroups

PATIENCE_S = 10.0


class Group:
    """The group "g" and its workers "client-0", "client-1", ..., at a time that a test sets."""

    def __init__(self, shards: int, on_loss: str = "replace", *joined: int) -> None:
        self.groups = WorkerGroups()
        self.shards, self.on_loss = shards, on_loss
        self.now_s = 0.0
        for client in joined:
            self.join(client)

    def join(self, client: int) -> list[Action]:
        return self._deliver(
            WorkerGroupJoined,
            client,
            shards=self.shards,
            on_loss=self.on_loss,
            wait_timeout_s=PATIENCE_S,
        )

    def leave(self, client: int) -> list[Action]:
        return self._deliver(WorkerGroupLeft, client)

    def want(self, client: int, passes: int = 100, shards_max: int = 1) -> list[Action]:
        return self._deliver(TaskRequested, client, passes_max=passes, shards_max=shards_max)

    def done(self, client: int, task: int) -> list[Action]:
        return self._deliver(TaskDone, client, task=task)

    def set_tau(self, client: int, tau: int | None) -> list[Action]:
        return self._deliver(TauSet, client, tau=tau)

    def lose(self, client: int) -> list[Action]:
        return self.groups.on_node_gone(NodeLost(now_s=self.now_s, node=name(client), cause="it was silent"))

    def quit(self, client: int) -> list[Action]:
        return self.groups.on_node_gone(NodeLeft(now_s=self.now_s, node=name(client)))

    def tick(self, after_s: float) -> list[Action]:
        self.now_s += after_s
        return self.groups.on_tick(Tick(now_s=self.now_s))

    def task(self, client: int, **options: int) -> AssignTask:
        """Request a task for a worker and return it."""
        (task,) = self.want(client, **options)
        assert isinstance(task, AssignTask)
        assert task.node == name(client)
        return task

    def work(self, client: int, **options: int) -> AssignTask:
        """Request a task and report it done."""
        task = self.task(client, **options)
        self.done(client, task.task)
        return task

    @property
    def scheduler(self) -> Any:
        return self.groups._groups["g"]

    @property
    def view(self) -> WorkerGroupView:
        return self.scheduler.view("", "r")

    def owned(self) -> dict[int, list[int]]:
        return {int(one.node[7:]): spread(one.shards) for one in self.view.workers}

    def _deliver(self, kind: type, client: int, **fields: Any) -> list[Action]:
        return self.groups.on_event(kind(now_s=self.now_s, node=name(client), group="g", **fields))


def name(client: int) -> str:
    return f"client-{client}"


def spread(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [shard for first, last in ranges for shard in range(first, last + 1)]


def cluster_view(actions: list[Action]) -> WorkerGroupView:
    """The one view among the actions, which is for all workers."""
    (found,) = [action for action in actions if isinstance(action, WorkerGroupView)]
    assert found.node == ""
    return found


# Owners of shards


def test_the_first_worker_gets_all_shards_and_later_ones_take_parts_from_neighbours():
    group = Group(12, "replace", 0)
    assert group.owned() == {0: [*range(12)]}
    group.join(1)
    assert group.owned() == {0: [*range(6)], 1: [*range(6, 12)]}
    view = cluster_view(group.join(2))
    assert group.owned() == {0: [0, 1, 2, 3], 1: [6, 7, 8, 9], 2: [4, 5, 10, 11]}
    assert [one.shards for one in view.workers] == [((0, 3),), ((6, 9),), ((4, 5), (10, 11))]
    assert view.reason == "client-2 has joined"


@pytest.mark.parametrize("members", range(1, 8))
def test_a_newcomer_gets_its_part_and_no_other_worker_gains_shards(members):
    group = Group(30, "replace", *range(members))
    before = group.owned()
    group.join(members)
    after = group.owned()
    assert len(after[members]) == 30 // (members + 1)
    assert all(set(after[one]) <= set(before[one]) for one in range(members))


def test_a_shard_in_a_task_moves_when_that_is_done():
    group = Group(4, "replace", 0)
    task = group.task(0, shards_max=4)
    group.join(1)
    assert group.owned() == {0: [0, 1, 2, 3], 1: []}
    cluster_view(group.done(0, task.task))
    assert group.owned() == {0: [0, 1], 1: [2, 3]}


def test_the_shards_of_a_leaving_worker_move_to_the_others_under_every_loss_policy():
    for on_loss in LOSS_POLICIES:
        for depart in (Group.leave, Group.quit):
            group = Group(6, on_loss, 0, 1, 2)
            depart(group, 2)
            assert group.owned() == {0: [0, 1, 2], 1: [3, 4, 5]}
            assert group.view.lost == group.view.unassigned == ()


def test_a_worker_that_leaves_receives_a_group_without_it():
    group = Group(6, "replace", 0, 1)
    announced, answer = group.leave(1)
    assert [one.node for one in cluster_view([announced]).workers] == ["client-0"]
    assert isinstance(answer, WorkerGroupView)
    assert answer.node == "client-1"
    (again,) = group.leave(1)
    assert again == answer


def test_a_worker_without_shards_takes_over_those_of_a_lost_worker():
    group = Group(2, "replace", 0, 1, 2)
    assert group.owned() == {0: [0], 1: [1], 2: []}
    group.lose(0)
    assert group.owned() == {1: [1], 2: [0]}


def test_when_all_workers_are_lost_a_newcomer_continues_where_they_were():
    for on_loss in LOSS_POLICIES:
        group = Group(3, on_loss, 0)
        group.work(0, shards_max=3)
        group.work(0, shards_max=2)
        assert group.lose(0) == []
        group.join(1)
        assert group.owned() == {1: [0, 1, 2]}
        task = group.work(1, passes=2, shards_max=3)
        assert (task.pass_number, task.shards) == (1, (2,))
        (ended,) = group.want(1, passes=2)
        assert isinstance(ended, PassesEnded)


# Losses


def test_a_lost_workers_shards_wait_for_a_newcomer_that_takes_over_all_of_them():
    group = Group(9, "replace", 0, 1, 2)
    before = group.owned()
    view = cluster_view(group.lose(1))
    assert spread(view.unassigned) == before[1]
    assert view.reason == "client-1 was lost: it was silent"
    cluster_view(group.join(3))
    assert group.owned() == {0: before[0], 2: before[2], 3: before[1]}


def test_a_newcomer_takes_over_from_the_worker_that_was_lost_first():
    group = Group(9, "replace", 0, 1, 2)
    before = group.owned()
    group.lose(2)
    group.lose(1)
    group.join(3)
    assert group.owned() == {0: before[0], 3: before[2]}
    group.join(4)
    assert group.owned() == {0: before[0], 3: before[2], 4: before[1]}


def test_after_the_timeout_the_others_share_the_waiting_shards():
    group = Group(9, "replace", 0, 1, 2)
    group.lose(1)
    assert group.tick(PATIENCE_S - 0.25) == []
    view = cluster_view(group.tick(0.25))
    assert view.unassigned == ()
    assert view.reason == "no worker has joined for 10 s"
    assert sorted(map(len, group.owned().values())) == [4, 5]


def test_with_on_loss_continue_the_others_proceed_and_a_newcomer_begins_at_their_pass():
    group = Group(4, "continue", 0, 1)
    group.set_tau(0, 0)
    view = cluster_view(group.lose(1))
    assert (view.lost, view.unassigned) == (((2, 3),), ())
    assert group.tick(1e9) == []
    for pass_number in range(3):
        assert group.work(0, shards_max=4).pass_number == pass_number
    group.join(2)
    assert group.owned() == {0: [0, 1], 2: [2, 3]}
    assert group.view.lost == ()
    task = group.task(2, shards_max=4)
    assert (task.pass_number, task.shards) == (3, (2, 3))


def test_an_unreported_task_is_assigned_to_the_new_owner_of_its_shards():
    group = Group(4, "drop_slowest", 0, 1)
    lost = group.task(1, shards_max=2)
    group.lose(1)
    first, second = group.work(0, shards_max=2), group.work(0, shards_max=2)
    assert (first.pass_number, second.pass_number) == (0, 0)
    assert lost.shards == second.shards == (2, 3)
    assert second.task != lost.task


def late(on_loss: str = "drop_slowest") -> Group:
    """Worker 0 waits for workers 1 and 2, which are at work; 2 has done more."""
    group = Group(6, on_loss, 0, 1, 2)
    group.set_tau(0, 0)
    group.work(0, shards_max=2)
    group.work(2)
    group.task(1)
    group.task(2)
    assert group.want(0) == []
    return group


def test_the_least_advanced_worker_that_keeps_another_waiting_too_long_is_dropped():
    group = late()
    assert group.tick(PATIENCE_S - 0.25) == []
    refused, view, *_ = group.tick(0.25)
    assert isinstance(refused, WorkerGroupRejected)
    assert refused.node == "client-1"
    assert refused.reason == "client-1 was dropped: it kept client-0 waiting for 10 s"
    assert isinstance(view, WorkerGroupView)
    assert [one.node for one in view.workers] == ["client-0", "client-2"]
    assert view.unassigned == view.lost == ()
    (refused,) = group.done(1, 1)
    assert isinstance(refused, WorkerGroupRejected)


def test_no_other_worker_is_dropped_for_as_long_again():
    group = Group(4, "drop_slowest", 0, 1, 2, 3)
    group.set_tau(0, 0)
    for client in (0, 3):
        group.work(client)
        assert group.want(client) == []
    for client in (1, 2):
        group.task(client)
    assert group.tick(PATIENCE_S) != []
    assert group.owned().keys() == {0, 2, 3}
    assert group.tick(PATIENCE_S - 0.25) == []
    assert group.tick(0.25) != []


def test_a_repeated_request_has_waited_since_the_first_one():
    group = late()
    group.tick(PATIENCE_S - 0.25)
    group.want(0)
    assert group.tick(0.25) != []


@pytest.mark.parametrize("on_loss", ["replace", "continue"])
def test_under_other_loss_policies_no_slow_worker_is_dropped(on_loss):
    assert late(on_loss).tick(1e9) == []


def test_a_worker_that_waits_for_its_own_task_or_has_no_shards_causes_no_drop():
    group = Group(2, "drop_slowest", 0, 1, 2)
    group.task(0)
    group.task(1)
    assert group.want(0) == group.want(2) == []
    assert group.tick(1e9) == []


# Tasks


def test_a_task_is_some_shards_of_one_pass_and_the_earliest_comes_first():
    group = Group(5, "replace", 0)
    found = [group.work(0, shards_max=2) for _ in range(4)]
    assert [(one.pass_number, one.shards) for one in found] == [
        (0, (0, 1)),
        (0, (2, 3)),
        (0, (4,)),
        (1, (0, 1)),
    ]
    assert len({one.task for one in found}) == 4


def test_a_worker_may_have_several_tasks():
    group = Group(3, "replace", 0)
    found = [group.task(0).shards for _ in range(3)]
    assert found == [(0,), (1,), (2,)]
    assert group.want(0) == []
    (answer,) = group.done(0, 1)
    assert isinstance(answer, AssignTask)
    assert (answer.pass_number, answer.shards) == (1, (1,))


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_a_pass_begins_when_every_shard_has_been_through_all_but_tau_before_it(tau):
    group = Group(2, "replace", 0, 1)
    group.set_tau(1, tau)
    for pass_number in range(tau + 1):
        assert group.work(0).pass_number == pass_number
    assert group.want(0) == []
    (answer,) = group.done(1, group.task(1).task)
    assert isinstance(answer, AssignTask)
    assert (answer.node, answer.pass_number) == ("client-0", tau + 1)


def test_a_new_tau_holds_for_all_workers_and_may_let_a_waiting_one_begin():
    group = Group(2, "replace", 0, 1)
    group.set_tau(0, 0)
    group.work(0)
    group.want(0)
    view, task = group.set_tau(1, None)
    assert isinstance(view, WorkerGroupView)
    assert (view.node, view.tau) == ("", None)
    assert isinstance(task, AssignTask)
    assert (task.node, task.pass_number) == ("client-0", 1)


def test_passes_end_for_all_when_the_last_shard_is_through():
    group = Group(2, "replace", 0, 1)
    group.work(0)
    assert group.want(0, passes=1) == []
    (ended,) = group.done(1, group.task(1).task)
    assert isinstance(ended, PassesEnded)
    assert (ended.node, ended.passes) == ("client-0", 1)


def test_a_query_of_progress_returns_each_workers_progress():
    group = Group(4, "replace", 0, 1)
    group.work(0, shards_max=2)
    group.work(0)
    (view,) = group._deliver(ProgressRequested, 1)
    assert isinstance(view, WorkerGroupView)
    assert view.node == "client-1"
    assert [(one.node, one.passes, one.shard_passes_done) for one in view.workers] == [
        ("client-0", 1, 3),
        ("client-1", 0, 0),
    ]
    assert view.passes == 0


# Impossible messages


def joins(client: int, group: str = "g", **different: Any) -> WorkerGroupJoined:
    fields = {"shards": 4, "on_loss": "replace", "wait_timeout_s": PATIENCE_S} | different
    return WorkerGroupJoined(now_s=0.0, node=name(client), group=group, **fields)


def wants(client: int, group: str = "g", shards_max: int = 1) -> TaskRequested:
    return TaskRequested(now_s=0.0, node=name(client), group=group, passes_max=1, shards_max=shards_max)


def reports(client: int, task: int) -> TaskDone:
    return TaskDone(now_s=0.0, node=name(client), group="g", task=task)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (joins(7, shards=5), "the group g as it was created, 4 shards, .* got 5 shards"),
        (joins(7, on_loss="continue"), "the group g as it was created, .*'replace', .*'continue'"),
        (joins(7, wait_timeout_s=9.0), "the group g as it was created, .*=10, .*=9"),
        (joins(0), "expected a newcomer in the group g, got client-0"),
        (joins(7, "h", shards=0), "expected 1 to 65536 shards, got 0"),
        (joins(7, "h", shards=SHARDS_MAX + 1), "expected 1 to 65536 shards, got 65537"),
        (joins(7, "h", on_loss="hope"), "replace, continue, drop_slowest, got 'hope'"),
        (wants(0, shards_max=0), "at least 1 shard"),
        (wants(7), "expected a member of the group g, got client-7"),
        (wants(0, "h"), "expected a member of the group h, got client-0"),
        (reports(0, 1), "expected one of the 1 tasks of client-0, got task 1"),
        (reports(1, 2**63 - 1), "tasks of client-1, got task 9223372036854775807"),
        (reports(7, 0), "expected a member of the group g"),
        (TauSet(now_s=0.0, node="client-7", group="g", tau=0), "expected a member of the group g"),
        (ProgressRequested(now_s=0.0, node="client-0", group="h"), "expected a member of the group h"),
    ],
)
def test_an_impossible_message_is_reported_to_its_sender_and_changes_nothing(event, why):
    group = Group(4, "replace", 0, 1)
    group.task(0)
    group.task(1)
    before = group.groups.state_dict()
    (refused,) = group.groups.on_event(event)
    assert isinstance(refused, WorkerGroupRejected)
    assert (refused.node, refused.group) == (event.node, event.group)
    assert re.search(why, refused.reason)
    assert group.groups.state_dict() == before


def test_a_task_is_reported_once():
    group = Group(4, "replace", 0)
    task = group.work(0)
    (refused,) = group.done(0, task.task)
    assert isinstance(refused, WorkerGroupRejected)
    assert group.view.workers[0].shard_passes_done == 1


def test_huge_numbers_are_numbers():
    group = Group(SHARDS_MAX, "replace", 0)
    group.set_tau(0, 2**63 - 1)
    assert len(group.work(0, passes=2**63 - 1, shards_max=2**63 - 1).shards) == SHARDS_MAX
    assert group.view.passes == 1


# Random histories

CLIENTS = 4
clients = st.integers(0, CLIENTS - 1)
steps = st.one_of(
    st.tuples(st.just("join"), clients),
    st.tuples(st.just("leave"), clients),
    st.tuples(st.just("lose"), clients),
    *[st.tuples(st.just("want"), clients, st.integers(1, 6), st.integers(1, 4))] * 4,
    *[st.tuples(st.just("finish"), st.integers(0, 9))] * 4,
    st.tuples(st.just("done"), clients, st.integers(0, 12)),
    st.tuples(st.just("set_tau"), clients, st.one_of(st.none(), st.integers(0, 2))),
    st.tuples(st.just("tick"), st.sampled_from((0.25, PATIENCE_S))),
)


class History:
    """A group, the messages of its workers, and invariants that hold after each event."""

    def __init__(self, shards: int, on_loss: str) -> None:
        self.group = Group(shards, on_loss, *range(3))
        self.tasks: dict[tuple[int, int], AssignTask] = {}  # not reported, by worker and number
        self.counted: set[tuple[int, int]] = set()

    def step(self, kind: str, *arguments: Any) -> list[Action]:
        group = self.group
        if kind == "finish":
            if not self.tasks:
                return []
            kind, arguments = "done", sorted(self.tasks)[arguments[0] % len(self.tasks)]
        before, passes = group.owned(), group.view.passes
        again = WorkerGroups()
        again.load_state_dict(json.loads(json.dumps(group.groups.state_dict())))
        actions = getattr(group, kind)(*arguments)
        known, group.groups = group.groups, again
        group.now_s -= arguments[0] if kind == "tick" else 0
        assert getattr(group, kind)(*arguments) == actions
        assert again.state_dict() == known.state_dict()
        if kind == "done" and not any(isinstance(one, WorkerGroupRejected) for one in actions):
            self._count(self.tasks.pop(arguments))
        self._deliver(actions)
        self._check(before, passes)
        return actions

    def _count(self, task: AssignTask) -> None:
        pairs = {(task.pass_number, shard) for shard in task.shards}
        assert not pairs & self.counted
        self.counted |= pairs

    def _deliver(self, actions: list[Action]) -> None:
        owned, view = self.group.owned(), self.group.view
        self.tasks = {key: task for key, task in self.tasks.items() if key[0] in owned}
        for one in actions:
            assert one.reason  # type: ignore[union-attr]
            if isinstance(one, AssignTask):
                client = int(one.node[7:])
                busy = [shard for task in self.tasks.values() for shard in task.shards]
                assert one.shards
                assert set(one.shards) <= set(owned[client]) - set(busy)
                assert not {(one.pass_number, shard) for shard in one.shards} & self.counted
                assert view.tau is None or one.pass_number <= view.passes + view.tau
                self.tasks[client, one.task] = one

    def _check(self, before: dict[int, list[int]], passes: int) -> None:
        group, view, owned = self.group, self.group.view, self.group.owned()
        held = Counter(
            [*spread(view.unassigned), *spread(view.lost), *(s for some in owned.values() for s in some)]
        )
        assert held == Counter(range(group.shards))
        assert view.passes >= passes or not owned or group.on_loss == "continue"
        gone = group.scheduler.state_dict()["passes"]
        for shard in range(group.shards):
            through = {p for p, s in self.counted if s == shard}
            assert through <= set(range(gone[shard]))
            assert group.on_loss == "continue" or len(through) == gone[shard]
        self._check_moves(before, owned)
        for node, (most, _, _) in group.scheduler._task_requests.items():
            client = int(node[7:])
            busy = {shard for key, task in self.tasks.items() for shard in task.shards if key[0] == client}
            idle = [gone[shard] for shard in owned[client] if shard not in busy]
            bound = most if view.tau is None else min(most, view.passes + view.tau + 1)
            assert view.passes < most
            assert not idle or min(idle) >= bound

    def _check_moves(self, before: dict[int, list[int]], after: dict[int, list[int]]) -> None:
        """A shard leaves a worker that stays only for one that had fewer by two or more."""
        for giver in before.keys() & after.keys():
            for taker, shards in after.items():
                if set(before[giver]) & set(shards) and giver != taker:
                    assert len(after[giver]) >= len(shards) - 1
                    assert not set(after[giver]) - set(before[giver])
        if after and not self.tasks:
            sizes = [len(shards) for shards in after.values()]
            assert max(sizes) - min(sizes) <= 1


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 9), st.sampled_from(LOSS_POLICIES), st.lists(steps, max_size=60))
def test_in_any_history_every_shard_has_one_place_and_every_pass_over_it_counts_once(
    shards, on_loss, history
):
    one = History(shards, on_loss)
    for step in history:
        one.step(*step)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.sampled_from(LOSS_POLICIES), st.lists(steps, max_size=60))
def test_after_any_history_the_remaining_workers_finish_all_passes(shards, on_loss, history):
    passes = 6
    one = History(shards, on_loss)
    for step in history:
        one.step(*step)
    one.step("tick", PATIENCE_S)
    one.step("join", CLIENTS)
    while one.tasks:
        one.step("finish", 0)
    ended: set[str] = set()
    while len(ended) < len(one.group.owned()):
        before = len(one.counted), len(ended)
        for client in one.group.owned():
            actions = one.step("want", client, passes, 2)
            while one.tasks:
                actions += one.step("finish", 0)
            ended |= {action.node for action in actions if isinstance(action, PassesEnded)}
        assert (len(one.counted), len(ended)) != before
    if on_loss != "continue":
        assert {(p, s) for p in range(passes) for s in range(shards)} <= one.counted
