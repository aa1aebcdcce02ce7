"""What `JobView` derives from entries in their order, from entries with gaps, and the state as JSON."""

import random
import tracemalloc
from itertools import islice
from statistics import median_low

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.events import (
    AbortJob,
    EpochEnded,
    Failed,
    JobComplete,
    Preempted,
    RejectPeer,
    SkipRound,
)
from offbeat.wire.job_status import JobStatus
from offbeat.wire.job_view import RECENT, JobView
from support.every_event import EXAMPLES
from support.job_events import (
    averaging,
    finished,
    group,
    joined,
    left,
    lost,
    permit,
    ready,
    rounds,
    status_of,
    step_finished,
    timed,
    view_of,
    worker_of,
)

SLOW = {0: 1.0, 1: 1.0, 2: 5.0}
START = [joined(0), joined(1), joined(2), group(0, 1, 2)]
WITHOUT_2 = group(
    0,
    1,
    generation=1,
    step=20,
    reason="worker 7 is new; worker 2: compute time above 2 s (2 x 1 s) in 10 more judged iterations than "
    "not; without it 2 instead of 1 batches/s; worker 9 has left after 3 steps",
)


def states(status):
    return {one.worker: one.state for one in status.workers}


# Times ---------------------------------------------------------------------------------------------------


def test_a_worker_has_its_times_of_late_and_the_sums_of_all():
    entries = [*START, *rounds({0: 1.0, 1: 1.0, 2: 9.0}, 30), *rounds(SLOW, RECENT, first_step=30)]
    status = status_of(*entries)

    one = worker_of(status, 0)
    assert (one.compute_s, one.step_s, one.step, one.host) == (1.0, 5.1, 45, "node-1")
    assert one.wait_share == pytest.approx(4.0 / 5.1)
    assert one.compute_share == pytest.approx(1.0 / 5.1)
    assert one.samples_per_s == pytest.approx(32 / 5.1)
    assert (one.steps, one.samples) == (46, 46 * 32)
    assert one.parts_s == pytest.approx({"compute": 46.0, "wait": 30 * 8.0 + 16 * 4.0, "other": 4.6})
    assert worker_of(status, 2).compute_s == 5.0
    assert status.step_s == 5.1
    assert status.samples_per_s == pytest.approx(3 * 32 / 5.1)
    assert (status.step, status.world, status.strategy) == (45, 3, "PartialAllReduce(k=2.0)")


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.8, 1.3]), min_size=2, max_size=7))
@settings(max_examples=60, deadline=None)
def test_the_ratio_is_to_the_median_and_the_score_to_the_fastest(times_s):
    entries = rounds(dict(enumerate(times_s)), 4)
    for one in status_of(*entries).workers:
        assert one.compute_ratio == pytest.approx(times_s[one.worker] / median_low(times_s))
        assert one.score == pytest.approx(min(times_s) / times_s[one.worker])


def test_times_of_too_few_steps_and_of_one_worker_are_not_compared():
    assert all(one.compute_ratio is None for one in status_of(*START, *rounds(SLOW, 2)).workers)
    assert status_of(joined(0, world=1), *rounds({0: 1.0}, 9)).workers[0].score is None
    idle = [ready(0, step, 0.0) for step in range(9)]
    assert status_of(*START, *rounds(SLOW, 9), *idle).workers[0].compute_s == 1.0


def test_a_worker_is_slow_since_the_step_in_which_it_became_so_until_it_is_not():
    equal = {0: 1.0, 1: 1.0, 2: 1.0}
    view = view_of(*START, *rounds(equal, 40), *rounds(SLOW, 10, first_step=40))
    assert [one.slow_since_step for one in view.status().workers] == [None, None, 40]
    for entry in rounds(equal, 10, first_step=50):
        view.add(entry)
    assert worker_of(view.status(), 2).slow_since_step is None
    assert worker_of(status_of(*START, *rounds(SLOW, 20)), 2).slow_since_step == 0


def test_a_single_slow_step_makes_no_slow_worker():
    equal = {0: 1.0, 1: 1.0, 2: 1.0}
    entries = [*rounds(equal, 40), *rounds(SLOW, 1, first_step=40)]
    assert worker_of(status_of(*START, *entries), 2).slow_since_step is None


def test_a_line_is_as_good_as_its_best_connection_in_the_present_group():
    entries = [
        ready(0, 1, 1.0, line_s=[(1, 0.1)]),
        ready(1, 1, 1.0, line_s=[(2, 0.8)]),
        ready(2, 1, 1.0, line_s=[(0, 0.9)]),
    ]
    assert [one.line_s for one in status_of(*START, *entries).workers] == [0.1, 0.1, 0.8]
    later = ready(0, 2, 1.0, generation=1, line_s=[(1, 0.3)])
    assert [one.line_s for one in status_of(*START, *entries, later).workers] == [0.3, 0.3, None]


# States --------------------------------------------------------------------------------------------------


def test_a_member_waits_while_another_one_has_not_sent_its_round():
    entries = [*START, ready(0, 0, 1.0), ready(1, 0, 1.0)]
    assert states(status_of(*entries)) == {0: "training", 1: "training", 2: "joined"}
    entries += [ready(2, 0, 1.0), ready(0, 1, 1.0)]
    assert states(status_of(*entries)) == {0: "waiting", 1: "training", 2: "training"}
    entries += [ready(1, 1, 1.0), ready(2, 1, 1.0)]
    assert set(states(status_of(*entries)).values()) == {"training"}


def test_an_excluded_worker_has_the_reason_and_its_cause_counts_until_it_is_back():
    view = view_of(*START, *rounds(SLOW, 20), WITHOUT_2)
    status = view.status()
    assert status.members == (0, 1)
    one = worker_of(status, 2)
    assert (one.state, one.is_excluded, one.state_step) == ("excluded", True, 20)
    assert one.why == (
        "compute time above 2 s (2 x 1 s) in 10 more judged iterations than not; "
        "without it 2 instead of 1 batches/s"
    )
    assert one.exclusions == status.exclusions == {"compute": 1}

    for entry in rounds({0: 1.0, 1: 1.0}, 3, first_step=20, generation=1):
        view.add(entry)
    view.add(ready(2, 20, 5.0, round_=20))  # the one in which it last took part
    assert states(view.status()) == {0: "training", 1: "training", 2: "excluded"}

    view.add(group(0, 1, 2, generation=2, step=23, joining=(2,)))
    one = worker_of(view.status(), 2)
    assert (one.state, one.is_excluded, one.why, one.exclusions) == ("training", False, "", {"compute": 1})


@pytest.mark.parametrize(
    ("clause", "cause"),
    [
        ("worker 2: its line is slow: data were on the way for 3 s, elsewhere for 0.1 s", "line"),
        ("worker 2 did not answer within 2 s", "silent"),
        ("worker 2 was not ready in time while other workers waited", "late"),
        ("worker 2 cannot reach worker 1: no route to host", "unreachable"),
        ("worker 22: compute time above 1 s", "other"),
    ],
)
def test_the_cause_of_an_exclusion_is_in_what_the_reason_says_about_that_worker(clause, cause):
    entries = [*START, *rounds(SLOW, 3), group(0, 1, generation=1, step=3, reason=clause)]
    assert status_of(*entries).exclusions == {cause: 1}


def test_an_excluded_worker_whose_loop_ends_was_excluded_to_the_end():
    last = group(0, 1, 2, generation=2, step=30, joining=(2,), reason="worker 2 has finished after 20 steps")
    status = status_of(*START, *rounds(SLOW, 20), WITHOUT_2, finished(2, 20), last, JobComplete(reason="all"))
    one = worker_of(status, 2)
    assert (one.state, one.is_excluded) == ("finished", True)
    assert status.is_over


def test_the_ends_of_workers_are_told_apart():
    status = status_of(
        *START,
        joined(3),
        joined(4),
        joined(5),
        *rounds(SLOW, 7),
        lost(0),
        Failed(now_s=1.0, worker=1, step=6, error="ValueError: no"),
        Preempted(now_s=1.0, worker=2, step=6, signal="SIGTERM"),
        RejectPeer(peer="worker-3.1", reason="worker 3 is out: too late"),
        left(4, 6),
        finished(5, 6),
        left(5, 6),
    )
    assert states(status) == {0: "lost", 1: "failed", 2: "preempted", 3: "rejected", 4: "left", 5: "finished"}
    assert [one.why for one in status.workers] == [
        "the connection was closed",
        "ValueError: no",
        "it was sent SIGTERM",
        "worker 3 is out: too late",
        "",
        "",
    ]
    assert (worker_of(status, 0).state_step, worker_of(status, 1).state_step) == (6, 6)
    assert (status.deaths, status.newcomers) == (3, 3)


def test_a_rejected_peer_that_claims_a_taken_id_changes_nothing():
    claim = joined(1, host="node-9")
    other = RejectPeer(peer="worker-1.2", reason="its id is taken")
    status = status_of(*START, *rounds(SLOW, 3), claim, other)
    assert (worker_of(status, 1).host, worker_of(status, 1).state) == ("node-1", "training")


def test_on_a_parameter_server_a_worker_waits_until_its_permit():
    entries = [joined(0), joined(1), step_finished(0, 3, 1.0), step_finished(1, 1, 1.0)]
    status = status_of(*entries, permit(0, may_start=False), permit(1, may_start=True))
    assert (states(status), status.coordination, status.members) == (
        {0: "waiting", 1: "training"},
        "clocks",
        (),
    )
    assert worker_of(status, 0).why == "it is 3 ahead of the slowest, and the bound is 2"
    assert states(status_of(*entries, permit(0, may_start=False), permit(0, may_start=True)))[0] == "training"


def test_a_worker_that_owns_its_model_waits_after_the_steps_of_its_last_averaging_or_at_the_end_of_an_epoch():
    view = view_of(joined(0), joined(1), averaging(0, 1, steps=2), ready(0, 1, 1.0), ready(1, 1, 1.0))
    assert set(states(view.status()).values()) == {"training"}
    view.add(ready(0, 2, 1.0))
    assert states(view.status()) == {0: "waiting", 1: "training"}
    view.add(averaging(0, 1, steps=2))
    assert states(view.status())[0] == "training"
    view.add(EpochEnded(now_s=3.0, worker=1, epoch=0, is_complete=True))
    assert states(view.status()) == {0: "training", 1: "waiting"}


def test_rounds_that_were_closed_without_a_worker_are_counted_and_forgotten():
    skip = SkipRound(worker=2, generation=0, round=9, grace_s=0.0, reason="2 of 3 members are ready")
    view = view_of(*START, *rounds(SLOW, 10), skip)
    one = worker_of(view.status(), 2)
    assert (one.skipped_rounds, one.is_skipped) == (1, True)
    for entry in rounds(SLOW, RECENT, first_step=10):
        view.add(entry)
    assert not worker_of(view.status(), 2).is_skipped


# Gaps ----------------------------------------------------------------------------------------------------


def test_a_log_whose_first_parts_are_gone_shows_the_members_that_keep_up():
    late = [ready(2, 20, 5.0) for _ in range(4)]  # excluded: the round in which it last took part
    entries = [*rounds({0: 1.0, 1: 1.0}, 5, first_step=900), *late]
    status = status_of(*entries)
    assert status.members == (0, 1)
    assert states(status) == {0: "training", 1: "training", 2: "training"}
    assert worker_of(status, 2).compute_ratio == 5.0


def test_every_entry_is_taken_wherever_it_comes():
    for seed in range(20):
        entries = [*EXAMPLES]
        random.Random(seed).shuffle(entries)
        view = view_of(*entries)
        assert view.entries == len(EXAMPLES)
        assert JobStatus.from_json(view.status().to_json()) == view.status()


def test_a_long_job_takes_no_more_memory_than_a_short_one():
    view = view_of(*START)
    entries = rounds(SLOW, 4000)

    def add(count):
        for entry in islice(entries, count):
            view.add(entry)

    tracemalloc.start()
    try:
        add(6 * 500)
        before, _ = tracemalloc.get_traced_memory()
        add(6 * 3500)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert view.status().step == 3999
    assert after - before < 10_000


# JSON ----------------------------------------------------------------------------------------------------


def test_the_state_is_the_same_after_json_and_keys_of_a_newer_version_are_ignored():
    status = status_of(*START, *rounds(SLOW, 20), WITHOUT_2, lost(1), AbortJob(worker=1, step=3, reason="no"))
    text = status.to_json()
    assert JobStatus.from_json(text) == status
    assert JobStatus.from_json(text.replace(b'{"now_s"', b'{"newer":[1],"now_s"')) == status
    assert JobStatus.from_json(JobView().status().to_json()).workers == ()


@pytest.mark.parametrize("text", [b"", b"[]", b'{"now_s":1.0}', b"\xff", b"<html>"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="expected the state of a job as JSON: "):
        JobStatus.from_json(text)


def test_a_step_that_is_timed_as_the_log_has_it_needs_no_ready():
    status = status_of(timed(4, 7, wall_s=2.0, wait_s=0.5, compute_s=1.0, other_s=0.5))
    assert (status.workers[0].worker, status.workers[0].wait_share, status.world) == (4, 0.25, 0)
