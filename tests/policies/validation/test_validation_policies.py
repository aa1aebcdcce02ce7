"""When epochs are validated, the consequences of their metrics, and whether overlapping pays."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.policies.validation.early_stopping import EarlyStopping
from offbeat.policies.validation.overlap import EpochCost, OverlapChooser
from offbeat.policies.validation.schedule import (
    SkipValidation,
    TakeSnapshot,
    ValidationScheduler,
    WaitForValidation,
    split_even,
)

# Parts ----------------------------------------------------------------------------------------------------


@given(samples=st.integers(1, 300), parts=st.integers(1, 60))
def test_parts_are_contiguous_disjoint_and_even_and_cover_the_set(samples, parts):
    split = split_even(samples, parts)
    assert [position for part in split for position in part] == list(range(samples))
    assert len(split) == min(parts, samples)
    assert max(map(len, split)) - min(map(len, split)) <= 1


@pytest.mark.parametrize(("samples", "parts"), [(0, 1), (1, 0), (5, -1)])
def test_no_samples_or_no_parts_are_refused(samples, parts):
    with pytest.raises(ValueError, match="at least 1 sample and 1 part"):
        split_even(samples, parts)


# The scheduler ----------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    epochs=st.integers(1, 12),
    parts=st.integers(1, 4),
    pending_max=st.integers(0, 3),
    when_full=st.sampled_from(["block", "skip"]),
)
def test_in_whatever_order_parts_end_every_epoch_is_reported_once_and_in_order(
    seed, epochs, parts, pending_max, when_full
):
    chance = random.Random(seed)
    scheduler = ValidationScheduler(pending_max=pending_max, when_full=when_full)
    positions = split_even(10, parts)
    under_way: list[tuple[int, int]] = []
    reported: list[int] = []

    def end_one() -> None:
        epoch, part = under_way.pop(chance.randrange(len(under_way)))
        left = [number for other, number in under_way if other == epoch]
        results = scheduler.on_part_done(epoch, part, (epoch, part))
        assert results == (None if left else tuple((epoch, number) for number in range(parts)))
        while (over := scheduler.pop_finished()) is not None:
            reported.append(over)

    for epoch in range(epochs):
        while isinstance(answer := scheduler.on_epoch_ended(epoch, positions), WaitForValidation):
            assert when_full == "block"
            assert answer.epoch == scheduler.live_epochs[0]
            end_one()
        if isinstance(answer, TakeSnapshot):
            assert answer.parts == positions
            under_way += [(epoch, number) for number in range(parts)]
        else:
            assert isinstance(answer, SkipValidation)
            assert when_full == "skip"
        assert len(scheduler.live_epochs) <= pending_max + 1
        while under_way and chance.random() < 0.4:
            end_one()
    while under_way:
        end_one()
    assert reported == list(range(epochs))
    assert scheduler.live_epochs == ()


def test_an_epoch_that_is_dropped_may_end_again():
    scheduler = ValidationScheduler()
    for epoch in range(3):
        scheduler.on_epoch_ended(epoch, [range(4)])
    assert scheduler.drop_after(after=0) == (1, 2)
    assert isinstance(scheduler.on_epoch_ended(1, [range(4)]), TakeSnapshot)
    with pytest.raises(ProtocolError, match="expected a part that is being evaluated"):
        scheduler.on_part_done(2, 0, None)
    with pytest.raises(ProtocolError, match="epoch 1 ends after epoch 1"):
        scheduler.on_epoch_ended(1, [range(4)])


def test_a_failed_epoch_is_reported_in_its_turn():
    scheduler = ValidationScheduler()
    scheduler.on_epoch_ended(0, [range(2), range(2, 4)])
    scheduler.on_epoch_ended(1, [range(4)])
    scheduler.fail(1)
    assert scheduler.pop_finished() is None
    scheduler.on_part_done(0, 1, "b")
    assert scheduler.missing_parts(0) == (0,)
    assert scheduler.on_part_done(0, 0, "a") == ("a", "b")
    assert scheduler.pop_finished() == 0
    assert scheduler.pop_finished() == 1
    assert scheduler.pop_finished() is None


@pytest.mark.parametrize(
    ("arguments", "text"), [({"pending_max": -1}, "at least 0"), ({"when_full": "drop"}, "block or skip")]
)
def test_bad_arguments_of_the_scheduler_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        ValidationScheduler(**arguments)


# The monitor ------------------------------------------------------------------------------------------------


def test_training_stops_after_as_many_epochs_without_improvement_as_its_patience():
    monitor = EarlyStopping("loss", patience=2)
    verdicts = [monitor.observe(epoch, {"loss": loss}) for epoch, loss in enumerate([3, 2, 2.5, 1, 1, 1.5])]
    assert [verdict.has_improved for verdict in verdicts] == [True, True, False, True, False, False]
    assert [verdict.should_stop for verdict in verdicts] == [False] * 5 + [True]
    assert (monitor.best, monitor.best_epoch) == (1, 3)


def test_a_nan_never_improves_and_a_change_must_be_larger_than_delta():
    monitor = EarlyStopping("accuracy", mode="max", delta_min=0.1)
    values = [math.nan, 0.5, 0.6, 0.61, math.inf]
    improved = [
        monitor.observe(epoch, {"accuracy": value}).has_improved for epoch, value in enumerate(values)
    ]
    assert improved == [False, True, False, True, True]


def test_a_restored_monitor_continues():
    first = EarlyStopping("loss", patience=2)
    first.observe(0, {"loss": 1.0})
    first.observe(1, {"loss": 2.0})
    second = EarlyStopping("loss", patience=2)
    second.load_state_dict(first.state_dict())
    assert second.observe(2, {"loss": 2.0}).should_stop
    assert second.best_epoch == 0


def test_a_missing_metric_is_named():
    with pytest.raises(OffbeatError, match="to return 'loss', which is watched, got accuracy"):
        EarlyStopping("loss").observe(0, {"accuracy": 1.0})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "least"}, "'min' or 'max'"),
        ({"patience": 0}, "at least 1"),
        ({"delta_min": math.inf}, "finite"),
    ],
)
def test_bad_arguments_of_a_monitor_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        EarlyStopping("loss", **arguments)


# Whether overlapping pays -----------------------------------------------------------------------------------


def spent(train_s=10.0, train_cpu_s=10.0, validate_s=4.0, validate_cpu_s=1.0, contention_share=0.0, calls=0):
    return EpochCost(
        train_s=train_s,
        train_cpu_s=train_cpu_s,
        validate_s=validate_s,
        validate_cpu_s=validate_cpu_s,
        contention_share=contention_share,
        calls=calls,
    )


def chooser(backends=("thread", "process"), cores=2, start_s=10.0):
    return OverlapChooser(backends, cores=cores, start_s=start_s)


def test_validation_that_waits_is_overlapped():
    choice = chooser().after_inline_epoch(spent())
    assert choice.backend == "thread"
    assert "thread should save 4.00 s an epoch" in choice.reason


def test_on_busy_cores_validation_stays_in_line():
    """Training and validation that each keep both cores busy have nothing to gain from one another."""
    choice = chooser().after_inline_epoch(spent(train_cpu_s=19.8, validate_cpu_s=7.9))
    assert choice.backend == "inline"
    assert "used 99% of 2 cores" in choice.reason
    assert "not thread: it would save 0.15 s an epoch at most; not process: it would" in choice.reason


def test_threads_that_delay_each_other_by_half_save_half():
    choice = chooser().after_inline_epoch(spent(contention_share=0.5))
    assert "thread should save 2.00 s an epoch" in choice.reason


def test_an_epoch_that_takes_longer_than_both_in_line_ends_the_trial():
    choosing = chooser(["thread"])
    choosing.after_inline_epoch(spent())
    assert choosing.after_overlapped_epoch("thread", 11.0, 12.0).backend == "thread"
    back = choosing.after_overlapped_epoch("thread", 14.5, 28.0)
    assert back.backend == "inline"
    assert "14.50 s overlapped and 14.00 s in line and the cores were busy" in back.reason
    assert choosing.after_inline_epoch(spent()).backend == "inline"  # and is not tried again


def test_where_threads_delay_each_other_processes_are_started_once_that_costs_little():
    """14 s an epoch: 0.4 s are a hundredth of the time of three epochs."""
    choosing = chooser(start_s=0.4)
    answers = [choosing.after_inline_epoch(spent(validate_cpu_s=4.0, contention_share=1.0)) for _ in range(3)]
    assert [answer.backend for answer in answers] == ["inline", "inline", "process"]
    assert "two threads that evaluate delay each other by 100%" in answers[0].reason
    assert "not thread: it would save 0.00 s an epoch at most" in answers[0].reason
    assert "but starting it takes 0.4 s" in answers[0].reason


def test_a_trial_on_busy_cores_counts_against_processes_as_well():
    choosing = chooser(start_s=0.0)
    assert choosing.after_inline_epoch(spent()).backend == "thread"
    assert choosing.after_overlapped_epoch("thread", 14.5, 28.0).backend == "inline"
    assert choosing.after_inline_epoch(spent()).backend == "inline"
    choosing = chooser(start_s=0.0)
    choosing.after_inline_epoch(spent())
    assert choosing.after_overlapped_epoch("thread", 14.5, 15.0).backend == "inline"
    assert choosing.after_inline_epoch(spent()).backend == "process"


def test_an_excluded_backend_is_not_tried_and_the_reason_is_reported():
    choosing = chooser()
    choosing.exclude("thread", "it draws")
    choosing.exclude("process", "it cannot be pickled")
    choice = choosing.after_inline_epoch(spent())
    assert choice.backend == "inline"
    assert choice.reason.endswith("not thread: it draws; not process: it cannot be pickled")


def test_threads_must_keep_half_the_rate_of_evaluation_in_line():
    choosing = chooser(["thread"])
    assert choosing.minimum_rate() is None
    choosing.after_inline_epoch(spent(validate_s=4.0, calls=400))
    pace = choosing.minimum_rate()
    assert (pace.check_after_s, pace.calls_per_s_min, pace.rest_s) == (0.4, 50.0, 28.0)
    choosing.after_inline_epoch(spent(validate_s=4.0, calls=10))
    assert choosing.minimum_rate() is None  # too few for a rate


def test_threads_that_do_not_keep_the_pace_are_not_tried_again():
    choosing = chooser(["thread"])
    assert choosing.after_inline_epoch(spent()).backend == "thread"
    assert choosing.after_slow_threads("thread").backend == "inline"
    choice = choosing.after_inline_epoch(spent())
    assert choice.backend == "inline"
    assert "not thread: during training, evaluating is more than 2 times as slow" in choice.reason


@pytest.mark.parametrize("arguments", [{"cores": 0, "start_s": 1.0}, {"cores": 1, "start_s": -1.0}])
def test_bad_arguments_of_the_chooser_are_refused(arguments):
    with pytest.raises(ValueError, match="at least 1 core"):
        OverlapChooser(["thread"], **arguments)
