"""The sentence of `diagnose`, for jobs of each kind: who is wrong, since when, and what it costs."""

import pytest

from offbeat.events import AbortJob, Failed, SkipRound
from support.job_events import (
    averaging,
    finished,
    group,
    joined,
    lost,
    permit,
    ready,
    rounds,
    status_of,
    step_finished,
    timed,
)

EQUAL = {0: 1.0, 1: 1.1, 2: 0.9, 3: 1.0}
ONE_SLOW = EQUAL | {3: 4.9}
WORKERS = [joined(worker, world=4) for worker in range(4)]
START = [*WORKERS, group(0, 1, 2, 3)]


def found(*entries):
    return status_of(*entries).diagnosis


def test_a_worker_for_which_the_others_wait():
    one = found(*START, *rounds(EQUAL, 1204), *rounds(ONE_SLOW, 20, first_step=1204))
    # A step takes 4.9 s of computing and 0.1 s more; without worker 3, worker 1 would make it 1.2 s.
    assert one.saving == pytest.approx(3.8 / 5.0)
    assert (one.kind, one.workers) == ("slow", (3,))
    assert one.sentence == (
        "worker 3 takes 4.9 times as long as the others since step 1,204; without it the others save 76%"
    )


def test_of_the_slow_workers_all_are_named_since_without_one_the_others_wait_on():
    one = found(*START, *rounds(EQUAL | {2: 4.0, 3: 5.0}, 20))
    assert one.saving == pytest.approx((5.0 - 1.1) / 5.1)
    assert one.sentence == (
        "workers 2 and 3 take up to 4.5 times as long as the others since the first step; without them the "
        "others save 76%"
    )


def test_of_two_workers_the_slow_one_is_known():
    assert found(joined(0, 2), joined(1, 2), group(0, 1), *rounds({0: 1.0, 1: 3.0}, 20)).workers == (1,)


def test_where_steps_are_not_timed_computing_is_all_of_a_step():
    entries = [ready(worker, step, time_s) for step in range(9) for worker, time_s in ONE_SLOW.items()]
    assert found(*START, *entries).saving == pytest.approx(1 - 1.1 / 4.9)


def test_with_several_rounds_a_step_the_saving_is_that_of_the_step():
    entries = [
        entry
        for step in range(9)
        for worker, time_s in ONE_SLOW.items()
        for entry in (
            ready(worker, step, time_s, round_=2 * step),
            ready(worker, step, time_s, round_=2 * step + 1),
            timed(worker, step, wall_s=10.0, wait_s=9.8 - 2 * time_s, compute_s=2 * time_s, other_s=0.2),
        )
    ]
    assert found(*START, *entries).saving == pytest.approx(2 * 3.8 / 10.0)


def test_equal_workers():
    one = found(*START, *rounds(EQUAL, 20))
    assert (one.kind, one.workers, one.saving) == ("fine", (), 0.0)
    assert one.sentence == "all 4 workers take about as long: the slowest 1.1 times the median"


def test_a_slow_worker_that_is_excluded_costs_the_others_nothing():
    excluded = group(0, 1, 2, generation=1, step=20, reason="worker 3: compute time above 2 s")
    one = found(*START, *rounds(ONE_SLOW, 20), excluded)
    assert (one.kind, one.workers, one.saving) == ("excluded", (3,), 0.0)
    assert one.sentence.endswith(", and the group trains without it")
    finally_all = group(0, 1, 2, 3, generation=2, step=30, joining=(3,), reason="all have finished")
    ends = [finished(worker, 30) for worker in range(4)]
    assert found(*START, *rounds(ONE_SLOW, 20), excluded, *ends, finally_all).sentence == one.sentence


def test_a_worker_that_is_excluded_for_another_reason_has_it_in_the_sentence():
    excluded = group(0, 1, 2, generation=1, step=20, reason="worker 3 did not answer within 2 s")
    one = found(*START, *rounds(EQUAL, 20), excluded)
    assert one.sentence == "worker 3 is excluded since step 20: did not answer within 2 s"


def test_no_one_waits_for_a_worker_that_rounds_are_closed_without():
    skip = SkipRound(worker=3, generation=0, round=19, grace_s=0.0, reason="3 of 4 members are ready")
    one = found(*START, *rounds(ONE_SLOW, 20), skip)
    assert (one.kind, one.saving) == ("slow", 0.0)
    assert one.sentence.endswith("; the others do not wait for it")


@pytest.mark.parametrize(("wait_s", "saving"), [(0.0, 0.0), (0.02, 0.0), (0.6, 0.6)])
def test_with_clocks_the_saving_is_the_time_that_the_others_wait(wait_s, saving):
    entries = [
        entry
        for step in range(1, 20)
        for worker, time_s in ONE_SLOW.items()
        for entry in (
            step_finished(worker, step, time_s),
            permit(worker, may_start=True),
            timed(worker, step, wall_s=1.0, wait_s=0.0 if worker == 3 else wait_s, compute_s=0.1),
        )
    ]
    one = found(*WORKERS, *entries)
    assert (one.kind, one.workers, one.saving) == ("slow", (3,), pytest.approx(saving))
    words = "without it the others save 60%" if saving else "the others do not wait for it"
    assert one.sentence.endswith(f"; {words}")


def test_models_that_are_averaged_hold_no_one_up_where_nobody_waits():
    entries = [*rounds(ONE_SLOW, 20), averaging(0, 1, steps=1)]
    waiting = [
        timed(worker, 20 + step, wall_s=1.0, wait_s=0.0, compute_s=0.1)
        for worker in range(4)
        for step in range(16)
    ]
    assert found(*WORKERS, *entries, *waiting).sentence.endswith("; the others do not wait for it")


def test_a_lost_worker_costs_its_share_of_the_workers():
    one = found(*START, *rounds(EQUAL, 20), lost(2))
    assert (one.kind, one.workers) == ("lost", (2,))
    assert one.sentence == (
        "worker 2 was lost in step 19 (the connection was closed); 3 of 4 workers go on, "
        "with 75% of the speed"
    )
    failed = Failed(now_s=1.0, worker=1, step=25, error="ValueError: no")
    assert found(*START, *rounds(EQUAL, 20), lost(2), failed).sentence == (
        "worker 1 has failed in step 25 (ValueError: no), 1 more before; 2 of 4 workers go on, with 50% of "
        "the speed"
    )


def test_a_lost_worker_that_a_newcomer_has_replaced_costs_nothing():
    newcomer = [joined(4, world=4), *rounds({0: 1.0, 1: 1.0, 3: 1.0, 4: 1.0}, 20, first_step=20)]
    assert found(*START, *rounds(EQUAL, 20), lost(2), *newcomer).kind == "fine"


def test_a_slow_worker_that_holds_the_others_up_comes_before_a_lost_one():
    assert found(*START, *rounds(ONE_SLOW, 20), lost(2)).workers == (3,)


def test_a_slow_line():
    entries = [
        ready(worker, step, 1.0, line_s=[((worker + 1) % 4, 3.0 if 2 in (worker, (worker + 1) % 4) else 0.5)])
        for step in range(5)
        for worker in range(4)
    ]
    one = found(*START, *entries)
    assert (one.kind, one.workers) == ("line", (2,))
    assert one.saving == pytest.approx(2.5 / 4.0)
    assert one.sentence == (
        "the line of worker 2 is slow: data are on the way for 3 s, elsewhere for 0.5 s; without it the "
        "others save 62%"
    )


def test_an_aborted_job():
    one = found(*START, *rounds(ONE_SLOW, 20), AbortJob(worker=1, step=3, reason="worker 1 failed: no"))
    assert (one.kind, one.sentence) == ("aborted", "the job was aborted: worker 1 failed: no")


def test_a_job_that_starts_and_one_of_one_worker():
    one = found(*WORKERS[:2])
    assert (one.kind, one.sentence) == ("starting", "too few steps to compare workers; 2 of 4 are here")
    assert found(joined(0, world=1), *rounds({0: 1.0}, 9)).sentence == "the job has one worker"


def test_of_many_workers_the_first_are_named():
    times_s = dict.fromkeys(range(30), 1.0) | dict.fromkeys(range(30, 41), 4.0)
    assert found(group(*times_s), *rounds(times_s, 20)).sentence.startswith(
        "workers 30, 31, 32, 33, 34, 35, 36, 37 and 3 more take up to 4 times as long as the others"
    )
