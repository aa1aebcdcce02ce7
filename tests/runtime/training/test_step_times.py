"""The times of several steps are sent as one event, and none later than the rules say."""

from dataclasses import replace

import pytest

from offbeat.events import Event, Finished, StepsTimed
from offbeat.runtime.training.step_times import STEPS_MAX, WALL_S_MAX, StepMeans, StepTimesBuffer
from support.every_event import CLOCKED
from support.round_events import ready, times_of_step

WORKER = 3
READY = ready(WORKER, 1)
STEP_FINISHED = replace(CLOCKED, worker=WORKER)
FINISHED = Finished(now_s=0.0, worker=WORKER, epoch=0, step=2)


def steps_of(events: list[Event]) -> list[list[int]]:
    for event in events:
        assert isinstance(event, StepsTimed)
        assert event.worker == WORKER
    return [[one.step for one in event.steps] for event in events]


@pytest.mark.parametrize("report", [READY, STEP_FINISHED])
def test_a_steps_report_takes_many_short_steps_along(report):
    buffer = StepTimesBuffer()
    for step in range(STEPS_MAX):
        assert buffer.pop_due(report, WORKER) == []
        buffer.add(times_of_step(step, wall_s=WALL_S_MAX / STEPS_MAX / 2))
    assert steps_of(buffer.pop_due(report, WORKER)) == [[*range(STEPS_MAX)]]
    assert buffer.pop_due(report, WORKER) == []


@pytest.mark.parametrize("report", [READY, STEP_FINISHED])
def test_a_steps_report_takes_a_second_of_steps_along(report):
    buffer = StepTimesBuffer()
    buffer.add(times_of_step(0, wall_s=0.75 * WALL_S_MAX))
    assert buffer.pop_due(report, WORKER) == []
    buffer.add(times_of_step(1, wall_s=0.25 * WALL_S_MAX))
    assert steps_of(buffer.pop_due(report, WORKER)) == [[0, 1]]


def test_every_other_event_takes_all_along():
    buffer = StepTimesBuffer()
    buffer.add(times_of_step(0, wall_s=0.0))
    assert steps_of(buffer.pop_due(FINISHED, WORKER)) == [[0]]
    assert buffer.pop_due(FINISHED, WORKER) == []


def test_what_is_left_at_the_end_is_one_event():
    buffer = StepTimesBuffer()
    assert buffer.pop_all(WORKER) == []
    buffer.add(times_of_step(0, wall_s=0.0))
    buffer.add(times_of_step(1, wall_s=0.0))
    assert steps_of(buffer.pop_all(WORKER)) == [[0, 1]]
    assert buffer.pop_all(WORKER) == []


def test_means_are_those_of_the_steps_since_they_were_read_at_an_earlier_step():
    means = StepMeans()
    assert set(means.read().values()) == {0.0}
    for step, wall_s in ((0, 1.0), (1, 3.0)):
        means.add(times_of_step(step, wall_s=wall_s))
    first = means.read()
    assert first["step_s"] == 2.0
    assert first["samples_per_s"] == 2 * times_of_step(0, wall_s=1.0).samples / 4.0
    assert means.read() == first
    means.add(times_of_step(2, wall_s=8.0))
    assert means.read()["step_s"] == 8.0
