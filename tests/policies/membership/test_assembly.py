"""Assembly: one PeerList when all workers have joined with the same work, or one AbortJob with the cause."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Evaluated,
    Failed,
    Joined,
    Left,
    Lost,
    Peer,
    PeerList,
    Ready,
    RejectPeer,
    StepsTimed,
    Tick,
)
from offbeat.policies.membership.assembly import Assembly

MODEL = ("weight float32 (10, 5)", "bias float32 (10,)")


def joined(worker: int, now_s: float = 0.0, **changes) -> Joined:
    fields = {
        "now_s": now_s,
        "worker": worker,
        "world": 3,
        "peer": f"worker-{worker}",
        "location": f"host{worker} process {100 + worker}",
        "addresses": (f"10.0.0.{worker}:7000", f"unix:/tmp/{worker}"),
        "model_signature": MODEL,
        "strategy": "bsp",
    }
    return Joined(**(fields | changes))


def answers(policy: Assembly, *events) -> list:
    return [action for event in events for action in policy.handle(event)]


def only_stop(actions: list) -> AbortJob:
    (stop,) = actions
    assert isinstance(stop, AbortJob)
    return stop


@given(st.permutations([0, 1, 2]))
def test_the_last_to_join_starts_all_workers_sorted_by_id(order):
    policy = Assembly(3)
    assert answers(policy, *map(joined, order[:2])) == []
    (start,) = policy.handle(joined(order[2]))
    assert start == PeerList(
        peers=tuple(
            Peer(
                worker=worker,
                name=f"worker-{worker}",
                addresses=(f"10.0.0.{worker}:7000", f"unix:/tmp/{worker}"),
            )
            for worker in range(3)
        ),
        reason="all 3 workers are here with the same model",
    )


def test_a_world_of_one_starts_at_once():
    (start,) = Assembly(1).handle(joined(0, world=1))
    assert isinstance(start, PeerList)


@pytest.mark.parametrize(
    ("world", "timeout_s"), [(0, 30.0), (-1, 30.0), (1, 0.0), (1, -1.0), (1, float("nan"))]
)
def test_bad_arguments_are_refused(world, timeout_s):
    with pytest.raises(ValueError, match=r"expected a (world|finite timeout)"):
        Assembly(world, timeout_s)


@pytest.mark.parametrize(
    ("newcomer", "words"),
    [
        (
            joined(1, world=4),
            ["worker 1 (host1 process 101)", "expects a world of 4", "this job has 3", "WORLD_SIZE"],
        ),
        (joined(3), ["worker 3 (host3 process 103)", "not one of the workers 0 to 2", "RANK"]),
        (
            joined(0, location="host9 process 9"),
            [
                "two workers have the id 0",
                "host0 process 100",
                "host9 process 9",
                "RANK of its own",
            ],
        ),
        (
            joined(2, strategy="partial:k=2"),
            [
                "worker 2 (host2 process 102) runs the strategy 'partial:k=2'",
                "worker 0 (host0 process 100)",
                "'bsp'",
            ],
        ),
        (
            joined(1, model_signature=("weight float32 (10, 6)", MODEL[1])),
            [
                "line 1 of model and optimizer is 'weight float32 (10, 5)' on worker 0 (host0 process",
                "but 'weight float32 (10, 6)' on worker 1 (host1 process 101)",
                "build the same model on every worker",
            ],
        ),
        (
            joined(1, model_signature=MODEL[:1]),
            [
                "model and optimizer have 2 lines on worker 0 (host0 process 100) but 1 on worker 1",
                "'bias float32 (10,)' is the first line that the latter lacks",
            ],
        ),
        (
            joined(1, model_signature=(*MODEL, "scale float32 ()")),
            [
                "model and optimizer have 3 lines on worker 1 (host1 process 101) but 2 on worker 0",
                "'scale float32 ()' is the first line that the latter lacks",
            ],
        ),
        (joined(1, model_signature=()), ["but 0 on worker 1", "'weight float32 (10, 5)' is the first"]),
    ],
)
def test_a_worker_with_other_work_stops_the_job_and_the_reason_names_the_difference(newcomer, words):
    policy = Assembly(3)
    assert policy.handle(joined(0)) == []
    stop = only_stop(policy.handle(newcomer))
    assert stop.worker == newcomer.worker
    assert stop.step is None
    for part in words:
        assert part in stop.reason
    # The job has ended: a worker that would have completed it receives the reason.
    (refuse,) = answers(policy, joined(1, peer="late"))
    assert refuse == RejectPeer(peer="late", reason=refuse.reason)
    assert "the job has ended" in refuse.reason
    assert stop.reason in refuse.reason


def test_the_deadline_names_the_missing_workers_and_the_present_ones_with_their_locations():
    policy = Assembly(3, timeout_s=5.0)
    policy.handle(joined(1, now_s=100.0))
    assert policy.handle(Tick(now_s=105.0)) == []
    assert only_stop(policy.handle(Tick(now_s=105.1))) == AbortJob(
        worker=None,
        step=None,
        reason="workers 0, 2 did not join within 5 s, 1 of 3 are here (worker 1 (host1 process 101)): "
        "check why the missing workers did not start, or start the job with fewer workers",
    )
    assert policy.handle(Tick(now_s=200.0)) == []


def test_one_missing_worker_is_the_cause_of_the_stop():
    policy = Assembly(3, timeout_s=5.0)
    stop = only_stop(answers(policy, joined(2), joined(0, now_s=4.0), Tick(now_s=6.0)))
    assert stop.worker == 1
    assert "worker 1 did not join within 5 s, 2 of 3 are here (worker 0 (host0" in stop.reason


def test_the_deadline_runs_from_the_first_event_of_any_kind():
    policy = Assembly(3, timeout_s=5.0)
    assert answers(policy, Tick(now_s=50.0), Tick(now_s=55.0)) == []
    assert "0 of 3 are here: check" in only_stop(policy.handle(Tick(now_s=55.5))).reason


def test_a_large_world_is_not_listed_whole():
    policy = Assembly(5000, timeout_s=5.0)
    answers(policy, *(joined(worker, world=5000) for worker in range(100)))
    reason = only_stop(policy.handle(Tick(now_s=6.0))).reason
    assert "and 4884 more did not join" in reason
    assert "and 84 more)" in reason
    assert len(reason) < 1000


def test_no_tick_stops_a_job_that_has_started():
    policy = Assembly(3)
    answers(policy, *map(joined, range(3)))
    assert policy.handle(Tick(now_s=1e9)) == []


@pytest.mark.parametrize(
    ("event", "step", "words"),
    [
        (
            Lost(now_s=1.0, worker=1, cause="the connection was closed"),
            None,
            "was lost before the start: the conn",
        ),
        (Failed(now_s=1.0, worker=1, step=0, error="OSError: no"), 0, "failed before the start: OSError: no"),
        (Left(now_s=1.0, worker=1, step=0), 0, "left before the start, 2 of 3 are here"),
    ],
)
def test_a_worker_that_is_lost_fails_or_leaves_before_the_start_stops_the_job(event, step, words):
    policy = Assembly(3)
    stop = only_stop(answers(policy, joined(0), joined(1), event))
    assert (stop.worker, stop.step) == (1, step)
    assert "worker 1 (host1 process 101)" in stop.reason
    assert words in stop.reason


def test_a_worker_may_fail_before_it_joins():
    stop = only_stop(answers(Assembly(3), Failed(now_s=0.0, worker=2, step=0, error="no model")))
    assert stop.reason == "worker 2 failed before the start: no model"


@pytest.mark.parametrize("worker", [3, 1000])
def test_the_loss_of_a_worker_that_the_job_does_not_have_is_a_protocol_error(worker):
    policy = Assembly(3)
    with pytest.raises(ProtocolError, match=f"expected a worker from 0 to 2, got Lost of worker {worker}"):
        policy.handle(Lost(now_s=0.0, worker=worker, cause="closed"))


def test_a_latecomer_is_refused_and_the_job_continues():
    policy = Assembly(3, timeout_s=30.0)
    answers(policy, *map(joined, range(3)))
    (refuse,) = policy.handle(joined(1, now_s=30.1, peer="impostor", location="elsewhere"))
    assert refuse == RejectPeer(
        peer="impostor",
        reason="worker 1 (elsewhere) cannot take part: its id is taken by the one at host1 process 101, and "
        "the job has started without it",
    )
    (refuse,) = policy.handle(joined(7, peer="late"))
    assert (refuse.peer, "the job has started without it" in refuse.reason) == ("late", True)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_second_worker_of_one_id_ends_a_job_that_has_just_started(is_open):
    """Two jobs without names at one address: their workers cannot be distinguished."""
    policy = Assembly(3, timeout_s=30.0, accepts_late_joiners=is_open)
    answers(policy, *map(joined, range(3)))
    stop = only_stop(policy.handle(joined(1, now_s=30.0, peer="second", location="host9 process 9")))
    assert stop == AbortJob(
        worker=1,
        step=None,
        reason="two workers have the id 1, at host1 process 101 and at host9 process 9: give "
        "every worker a RANK of its own, or, if these are two jobs, give each a MASTER_PORT of its own",
    )
    (refuse,) = policy.handle(joined(2, now_s=30.0, peer="third"))
    assert stop.reason in refuse.reason


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("changes", [{"world": 4}, {"strategy": "asp"}, {"model_signature": ()}])
def test_a_worker_that_is_certainly_of_another_job_is_refused_and_the_job_continues(is_open, changes):
    policy = Assembly(3, accepts_late_joiners=is_open)
    answers(policy, *map(joined, range(3)))
    (refuse,) = policy.handle(joined(1, peer="stranger", **changes))
    assert (type(refuse), refuse.peer) == (RejectPeer, "stranger")


@pytest.mark.parametrize("is_open", [False, True])
def test_a_successor_of_a_lost_worker_is_refused(is_open):
    policy = Assembly(3, accepts_late_joiners=is_open)
    answers(policy, *map(joined, range(3)), Lost(now_s=1.0, worker=1, cause="closed"))
    (refuse,) = policy.handle(joined(1, now_s=2.0, peer="successor"))
    assert (type(refuse), refuse.peer) == (RejectPeer, "successor")


def running_events():
    return st.one_of(
        st.builds(Lost, now_s=st.just(1.0), worker=st.integers(0, 2), cause=st.just("closed")),
        st.builds(
            Failed, now_s=st.just(1.0), worker=st.integers(0, 2), step=st.integers(0, 9), error=st.just("x")
        ),
        st.builds(Left, now_s=st.just(1.0), worker=st.integers(0, 2), step=st.integers(0, 9)),
        st.builds(Tick, now_s=st.floats(0, 1e6)),
        st.builds(
            Evaluated, now_s=st.just(1.0), worker=st.integers(0, 2), epoch=st.just(0), metrics=st.just({})
        ),
        st.builds(
            Ready,
            now_s=st.just(1.0),
            worker=st.integers(0, 2),
            step=st.integers(0, 9),
            round=st.integers(0, 9),
            compute_s=st.just(0.1),
            samples=st.just(1),
        ),
        st.just(StepsTimed(now_s=1.0, worker=0, steps=())),
    )


@given(st.lists(running_events()))
def test_after_the_start_events_of_the_workers_cause_no_action(events):
    policy = Assembly(3)
    answers(policy, *map(joined, range(3)))
    assert answers(policy, *events) == []


def arrivals():
    return st.builds(
        lambda now_s, worker, strategy, world: joined(worker, now_s, strategy=strategy, world=world),
        st.floats(0, 100),
        st.integers(0, 3),
        st.sampled_from(["bsp"] * 9 + ["asp"]),
        st.sampled_from([3] * 9 + [4]),
    )


@given(st.lists(arrivals() | running_events()))
def test_with_any_events_the_job_starts_and_stops_at_most_once_with_a_reason(events):
    policy = Assembly(3)
    actions = answers(policy, *events)
    decisions = [action for action in actions if not isinstance(action, RejectPeer)]
    assert [type(action) for action in decisions] in ([], [PeerList], [AbortJob], [PeerList, AbortJob])
    assert all(action.reason for action in actions)
    if decisions:
        # No action precedes the one decision, and every refusal follows it.
        assert actions[0] == decisions[0]


@given(st.lists(arrivals() | running_events()), st.integers(0, 50))
def test_a_policy_restored_in_the_middle_continues_identically(events, cut):
    policy = Assembly(3, timeout_s=10.0)
    answers(policy, *events[:cut])
    restored = Assembly(3, timeout_s=10.0)
    restored.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert vars(restored) == vars(policy)
    for event in events[cut:]:
        assert restored.handle(event) == policy.handle(event)


def test_a_restored_policy_compares_newcomers_with_the_workers_that_joined_before():
    policy, restored = Assembly(3), Assembly(3)
    policy.handle(joined(0))
    restored.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    for event in (joined(1, model_signature=()), joined(0), joined(1, strategy="asp"), Tick(now_s=31.0)):
        one, other = Assembly(3), Assembly(3)
        one.load_state_dict(policy.state_dict())
        other.load_state_dict(restored.state_dict())
        assert one.handle(event) == other.handle(event) != []
