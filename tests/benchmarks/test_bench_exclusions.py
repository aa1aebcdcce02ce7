"""Exclusions read from a run log, and whether they were right; logs made by hand."""

import pytest

from benchmarks.exclusions import (
    GroupChange,
    GroupStep,
    evaluate_detection,
    members_at,
    read_changes,
    read_steps,
    slow_workers,
)
from offbeat.events import Finished, Group, Halt, Ready, Tick
from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule

WORKERS, BATCH = 4, 8


def ready(worker, step, *, epoch=0, now_s=None, generation=0, samples=BATCH):
    known = {"now_s": float(step) if now_s is None else now_s, "worker": worker, "epoch": epoch}
    known |= {"generation": generation, "step": step, "round": step, "compute_s": 0.1, "samples": samples}
    if "blocks" in Ready.__dataclass_fields__:
        known["blocks"] = ()
    return Ready(**known)


def group(step, members, generation=0):
    members = tuple(members)
    weights = (1 / len(members),) * len(members)
    return Group(
        generation=generation,
        step=step,
        exchange_id=0,
        members=members,
        joining=(),
        weights=weights,
        reason="",
    )


def halt(generation=1):
    return Halt(generation=generation, abandon=False, reason="")


def log_of(plan, steps=20, epoch_steps=10):
    """A log of changes that are decided when all are through a step: {decided: (first step, members)}."""
    entries = [group(0, range(WORKERS))]
    members, upcoming = set(range(WORKERS)), {}
    for step in range(steps):
        members = upcoming.pop(step, members)
        entries += [ready(worker, step, epoch=step // epoch_steps) for worker in sorted(members)]
        if step in plan:
            first, named = plan[step]
            entries += [halt(), group(first, sorted(named))]
            upcoming[first] = set(named)
    return entries


def judged(plan, slow, steps=20):
    """Judge a log against {worker: (first slow step, first step that is not)}."""
    entries = log_of(plan, steps)
    changes = read_changes(entries)
    slow_sets = [frozenset(w for w, (a, b) in slow.items() if a <= step < b) for step in range(steps)]
    return evaluate_detection(changes, read_steps(entries, changes), slow_sets)


def test_changes_are_read_with_the_step_in_which_they_were_decided():
    changes = read_changes(log_of({4: (6, {0, 1, 2}), 12: (13, {0, 1, 2, 3})}))
    assert [(c.decided, c.step, sorted(c.members)) for c in changes] == [
        (-1, 0, [0, 1, 2, 3]),
        (4, 6, [0, 1, 2]),
        (12, 13, [0, 1, 2, 3]),
    ]
    assert changes[1].named_s == 4.0
    assert [sorted(members_at(changes, step)) for step in (5, 6, 13)] == [
        [0, 1, 2, 3],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]


def test_a_group_of_the_same_members_is_no_change():
    entries = [group(0, range(4)), ready(0, 3), halt(), group(4, range(4), generation=1)]
    assert len(read_changes(entries)) == 1


def test_steps_count_the_samples_of_members_only_and_begin_again_with_an_epoch():
    entries = log_of({4: (6, {0, 1, 2})})
    entries += [ready(3, 6, now_s=50.0), ready(3, 7, now_s=51.0), Tick(now_s=60.0)]
    steps = read_steps(entries, read_changes(entries))
    assert len(steps) == 20
    assert steps[5] == GroupStep(epoch=0, used=5 * 32, samples=32, ready_s=5.0)
    assert steps[6] == GroupStep(epoch=0, used=6 * 32, samples=24, ready_s=6.0)
    assert steps[10] == GroupStep(epoch=1, used=0, samples=24, ready_s=10.0)


def test_a_part_of_an_epoch_is_a_part_of_its_samples():
    steps = [GroupStep(epoch=0, used=used, samples=10, ready_s=0.0) for used in (0, 30, 40, 50, 60)]
    slowness = InjectedSlowness([parse_slow_rule("2:3@0.0-0.5")], workers=4, seed=0)
    assert slow_workers(slowness, steps, 4, 100) == [frozenset({2})] * 3 + [frozenset()] * 2


def test_victims_are_those_that_the_seed_draws():
    steps = [GroupStep(epoch=epoch, used=0, samples=1, ready_s=0.0) for epoch in range(8)]
    slowness = InjectedSlowness([parse_slow_rule("random:3")], workers=4, seed=5)
    found = slow_workers(slowness, steps, 4, 1)
    assert all(len(drawn) == 1 for drawn in found)
    assert len(set(found)) > 1
    for epoch, drawn in enumerate(found):
        assert slowness.factor(*drawn, epoch, 0, 1, epoch) == 3


def test_an_episode_that_is_found_and_ends():
    found = judged({4: (6, {0, 1, 2}), 11: (13, {0, 1, 2, 3})}, {3: (0, 10)})
    (episode,) = found.episodes
    assert (episode.worker, episode.begins, episode.ends) == (3, 0, 10)
    assert (episode.excluded_at, episode.returned_at) == (6, 13)
    assert (found.detect_steps, found.recover_steps) == ([6], [3])
    assert (episode.detect_s, episode.recover_s) == (4.0, 2.0)
    assert (found.false_alarms, found.missed, found.early_recoveries) == (0, 0, 0)


def test_detection_steps_count_from_the_first_slow_step():
    found = judged({14: (16, {0, 1, 2}), 17: (18, {0, 1, 2, 3})}, {3: (10, 17)})
    assert (found.detect_steps, found.recover_steps) == ([6], [1])


def test_a_straggler_that_is_never_excluded_is_missed():
    found = judged({}, {3: (0, 10), 1: (12, 15)})
    assert (found.missed, found.detect_steps, found.false_alarms) == (2, [], 0)


def test_an_exclusion_after_the_episode_is_a_miss_and_a_false_alarm():
    found = judged({13: (14, {0, 1, 2})}, {3: (0, 10)})
    assert (found.missed, found.false_alarms) == (1, 1)


def test_a_decision_just_after_the_last_slow_step_is_about_that_step():
    found = judged({10: (11, {0, 1, 2})}, {3: (0, 10)})
    assert (found.missed, found.false_alarms, found.detect_steps) == (0, 0, [11])


def test_excluding_another_worker_is_a_false_alarm():
    found = judged({4: (5, {0, 1, 3}), 6: (7, {0, 1})}, {3: (0, 10)})
    assert (found.missed, found.false_alarms) == (0, 1)
    found = judged({4: (5, {0, 1})}, {3: (0, 10)})
    assert (found.missed, found.false_alarms) == (0, 1)


def test_a_return_while_slow_is_early():
    found = judged({2: (3, {0, 1, 2}), 5: (6, {0, 1, 2, 3})}, {3: (0, 10)})
    assert found.early_recoveries == 1
    assert found.recover_steps == [-4]


def test_the_last_group_in_which_all_workers_take_the_final_state_is_no_recovery():
    found = judged({2: (3, {0, 1, 2}), 19: (20, {0, 1, 2, 3})}, {3: (0, 20)})
    assert (found.early_recoveries, found.recover_steps) == (0, [])


def test_a_finished_worker_is_not_counted_as_excluded():
    entries = log_of({}, steps=10)
    entries += [Finished(now_s=10.0, worker=0, epoch=0, step=10), halt(), group(9, {1, 2, 3})]
    changes = read_changes(entries)
    assert evaluate_detection(changes, read_steps(entries, changes), [frozenset()] * 10).false_alarms == 0


def test_an_episode_that_begins_while_the_worker_is_excluded_is_not_counted():
    entries = log_of({4: (5, {0, 1, 2})})
    changes = read_changes(entries)
    slow = [frozenset({3}) if step < 8 or step >= 12 else frozenset() for step in range(20)]
    found = evaluate_detection(changes, read_steps(entries, changes), slow)
    assert [(e.begins, e.ends) for e in found.episodes] == [(0, 8)]
    assert found.missed == 0


@pytest.mark.parametrize("step", [0, 7])
def test_the_group_of_a_step_is_the_last_that_holds_by_then(step):
    changes = [
        GroupChange(step=0, decided=-1, named_s=0.0, members=frozenset({0, 1})),
        GroupChange(step=7, decided=5, named_s=5.0, members=frozenset({0})),
    ]
    assert members_at(changes, step) == changes[step // 7].members
