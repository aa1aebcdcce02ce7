"""The publisher never holds up the coordinator, and what a sink does harms no other."""

import queue

import pytest

from offbeat.errors import OffbeatError
from offbeat.events import Lost
from offbeat.runtime.monitoring.publisher import Publisher
from support.joined_events import joined
from support.round_events import ready
from support.run_logs import wait_until

DEADLINE_S = 20.0


class Seen:
    """A sink that keeps what it gets, and waits in its first update until it may go on."""

    def __init__(self, waits=False):
        self.entries, self.workers, self.is_closed = [], 0, False
        self.has_begun, self.may_go_on = queue.SimpleQueue(), queue.SimpleQueue()
        self._waits = waits

    def update(self, view, entries):
        self.entries += entries
        self.workers = len(view.status().workers)
        if self._waits and entries:
            self._waits = False
            self.has_begun.put(None)
            self.may_go_on.get(timeout=DEADLINE_S)

    def close(self):
        self.is_closed = True


class Broken:
    """A sink that fails in one of its methods."""

    def __init__(self, where):
        self.where, self.updates = where, 0

    def update(self, view, entries):
        self.updates += 1
        if self.where == "update":
            raise ValueError("no room")

    def close(self):
        if self.where == "close":
            raise ValueError("no room")


def fails():
    raise OffbeatError("no folder")


def test_entries_reach_the_view_and_every_sink_in_order():
    first, second = Seen(), Seen()
    publisher = Publisher({"first": lambda: first, "second": lambda: second})
    publisher.start()
    events = [joined(0), joined(1), ready(0, 1), ready(1, 1)]
    for event in events:
        publisher.put(event, ())
    publisher.close()
    assert [entry.event for entry in first.entries] == events
    assert second.entries == first.entries
    assert first.workers == 2
    assert first.is_closed
    assert len(publisher.status().workers) == 2


def test_what_finds_the_queue_full_is_dropped_and_counted_while_a_sink_stands_still():
    sink = Seen(waits=True)
    publisher = Publisher({"sink": lambda: sink}, events_max=4)
    publisher.start()
    publisher.put(joined(0), ())
    sink.has_begun.get(timeout=DEADLINE_S)
    for worker in range(1, 11):
        publisher.put(joined(worker), ())
    assert publisher.dropped == 6
    assert len(publisher.status().workers) == 1  # a request is not held up either
    sink.may_go_on.put(None)
    wait_until(lambda: sink.workers == 5, "the workers that were queued")
    publisher.close()
    assert publisher.dropped == 6


@pytest.mark.parametrize("where", ["update", "close"])
def test_a_sink_that_raises_is_switched_off_with_one_line_and_the_others_go_on(where, capsys):
    broken, other = Broken(where), Seen()
    publisher = Publisher({"Broken": lambda: broken, "Other": lambda: other})
    publisher.start()
    for worker in range(3):
        publisher.put(joined(worker), ())
        wait_until(lambda: other.workers == worker + 1, "another worker")  # noqa: B023
    publisher.close()
    assert other.is_closed
    assert capsys.readouterr().err == "offbeat: Broken shows this job no longer: ValueError: no room\n"
    assert where == "close" or broken.updates == 1


def test_a_sink_that_cannot_be_made_is_named(capsys):
    other = Seen()
    publisher = Publisher({"Broken": fails, "Other": lambda: other})
    publisher.start()
    publisher.close()
    assert other.is_closed
    assert capsys.readouterr().err == "offbeat: Broken shows this job no longer: OffbeatError: no folder\n"


def test_what_is_replayed_before_the_start_changes_the_view_and_reaches_no_sink():
    sink = Seen()
    publisher = Publisher({"sink": lambda: sink}, events_max=1)
    for worker in range(3):
        publisher.put(joined(worker), ())
    assert len(publisher.status().workers) == 3
    publisher.start()
    publisher.put(Lost(now_s=1.0, worker=2, cause="closed"), ())
    publisher.close()
    assert [type(entry.event) for entry in sink.entries] == [Lost]
    assert publisher.status().deaths == 1


def test_another_job_begins_with_an_empty_view():
    publisher = Publisher({})
    publisher.put(joined(0), ())
    publisher.begin_job()
    assert publisher.status().workers == ()
    publisher.start()
    publisher.put(joined(0), ())
    publisher.begin_job()
    publisher.put(joined(1), ())
    publisher.close()
    assert [one.worker for one in publisher.status().workers] == [1]


def test_a_view_that_fails_is_not_shown_any_longer(capsys):
    publisher = Publisher({})
    publisher.start()
    publisher.put(joined(0), None)  # no actions: adding them raises
    wait_until(lambda: "this job is not shown any longer" in capsys.readouterr().err, "a message")
    with pytest.raises(OffbeatError, match="the state of the job is not known"):
        publisher.status()
