"""The text for Prometheus has the types, labels and escapes that its own parser expects."""

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from offbeat.events import Group, Lost, StepsTimed
from offbeat.runtime.monitoring.prometheus import to_prometheus
from offbeat.wire.job_view import JobView
from support.joined_events import joined
from support.round_events import ready, times_of_step


def view_of(*entries):
    view = JobView()
    for entry in entries:
        view.add(entry)
    return view


def families(view, dropped=0):
    return {
        family.name: family
        for family in text_string_to_metric_families(to_prometheus(view.status(), dropped=dropped))
    }


def samples(view, dropped=0):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(view, dropped).values()
        for sample in family.samples
    }


def test_a_job_that_has_not_begun_has_metrics_without_workers():
    found = samples(JobView(), dropped=7)
    assert found["offbeat_events_dropped_total",] == 7
    assert found["offbeat_members", "training"] == 0
    assert found["offbeat_exclusions_total", "compute"] == 0  # so that the first one is an increase
    assert not [key for key in found if key[0].startswith("offbeat_worker_")]


def test_names_types_and_units_are_those_of_prometheus():
    for family in families(view_of(joined(0), joined(1), ready(0, 1))).values():
        assert family.type in ("counter", "gauge", "summary")
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")


def test_times_are_counted_by_worker_and_part():
    times = [replace(times_of_step(step, wall_s=2.0), compute_s=1.5, wait_s=0.5) for step in range(3)]
    found = samples(view_of(joined(4), StepsTimed(now_s=1.0, worker=4, steps=tuple(times))))
    assert found["offbeat_worker_seconds_total", "4", "compute"] == 4.5
    assert found["offbeat_worker_seconds_total", "4", "wait"] == 1.5
    assert found["offbeat_step_seconds_count", "4"] == 3
    assert found["offbeat_worker_samples_total", "4"] == sum(one.samples for one in times)


def test_a_lost_worker_and_an_exclusion_are_counted_by_state_and_reason():
    def group(generation, *members, reason="r"):
        weights = (1 / len(members),) * len(members)
        return Group(
            generation=generation,
            step=generation,
            exchange_id=generation,
            members=members,
            joining=(),
            weights=weights,
            reason=reason,
        )

    rounds = [ready(worker, round_) for round_ in range(4) for worker in range(3)]
    view = view_of(
        *map(joined, range(3)),
        group(1, 0, 1, 2),
        *rounds,
        group(2, 0, 1, reason="worker 2: its compute time is too long"),
        Lost(now_s=9.0, worker=1, cause="closed"),
    )
    found = samples(view)
    assert found["offbeat_exclusions_total", "compute"] == 1
    assert found["offbeat_members", "excluded"] == found["offbeat_members", "lost"] == 1
    assert found["offbeat_workers_lost_total",] == 1


@pytest.mark.parametrize("strategy", ['a "b"', "a\\b", "a\nb", "é{}=,", ""])
def test_labels_are_escaped(strategy):
    assert samples(view_of(replace(joined(0), strategy=strategy)))["offbeat_job_info", strategy] == 1
