"""Lines that a worker logs about peers that it cannot reach."""

from __future__ import annotations

import logging

import pytest

from offbeat.runtime.control.outages import OutageLog


class Later:
    """Stands for a timer: calls the scheduled functions when the test calls `run`."""

    def __init__(self):
        self.due = []

    def __call__(self, delay_s, function):
        assert delay_s > 0
        self.due.append(function)

    def run(self):
        due, self.due = self.due, []
        for function in due:
            function()


@pytest.fixture
def later():
    return Later()


@pytest.fixture
def notes(later):
    return OutageLog("worker 2", later)


def written(caplog):
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return lines


def test_one_line_names_all_peers_that_become_unreachable_together(notes, later, caplog):
    notes.on_unreachable("worker 0", "nothing has been received from it for 1.25 s, in step 7")
    notes.on_unreachable("the coordinator", "something else")
    notes.on_unreachable("worker 1", "something else")
    assert written(caplog) == []
    later.run()
    assert written(caplog) == [
        "worker 2 cannot reach worker 0, the coordinator and worker 1: nothing has been received from it for "
        "1.25 s, in step 7; it keeps trying"
    ]


def test_an_outage_is_logged_once_and_its_end_once(notes, later, caplog):
    notes.on_unreachable("worker 0", "nothing comes")
    later.run()
    notes.on_unreachable("worker 0", "nothing comes")  # reported by another connection
    later.run()
    assert len(written(caplog)) == 1
    notes.on_reachable("worker 0")
    notes.on_reachable("worker 0")
    later.run()
    assert written(caplog) == ["worker 2 can reach worker 0 again"]
    later.run()
    assert written(caplog) == []


def test_the_next_outage_is_logged_again(notes, later, caplog):
    for _ in range(2):
        notes.on_unreachable("worker 0", "nothing comes")
        later.run()
        notes.on_reachable("worker 0")
        later.run()
    assert [line.split(" worker 0")[0] for line in written(caplog)] == [
        "worker 2 cannot reach",
        "worker 2 can reach",
    ] * 2


def test_an_outage_that_ends_before_it_is_logged_is_not_logged(notes, later, caplog):
    notes.on_unreachable("worker 0", "nothing comes")
    notes.on_reachable("worker 0")
    later.run()
    assert written(caplog) == []


def test_the_outage_of_a_lost_peer_is_logged_no_further(notes, later, caplog):
    notes.on_unreachable("worker 0", "nothing comes")
    later.run()
    written(caplog)
    notes.on_gone("worker 0")
    notes.on_unreachable("worker 1", "nothing comes")
    later.run()
    assert written(caplog) == ["worker 2 cannot reach worker 1: nothing comes; it keeps trying"]


def test_of_many_unreachable_peers_only_some_are_named(notes, later, caplog):
    for worker in range(20):
        notes.on_unreachable(f"worker {worker}", "nothing comes")
    later.run()
    (line,) = written(caplog)
    assert "worker 7 and 12 more: nothing comes" in line
