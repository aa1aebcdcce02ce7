"""Averaging of snapshots: what the loop's thread and the links' thread do at the same time."""

import threading
from dataclasses import replace

import pytest

from offbeat.events import AverageModels, ModelsAveraged
from offbeat.policies.model_averaging.protocol import ModelAveragingProtocol
from offbeat.runtime.model_averaging.snapshot_averaging import SnapshotAveraging
from offbeat.runtime.model_averaging.synchronizer import ModelAveragingSynchronizer
from offbeat.runtime.training.timing import PartTimer

DEADLINE_S = 20.0
AVERAGING = AverageModels(
    exchange_id=8,
    members=(0, 1),
    joining=(),
    weights=(0.5, 0.5),
    steps=(1, 1),
    includes_buffers=False,
    outer_step=None,
    leader=0,
    reason="",
)


class Client:
    """The control side of worker 0, of which the other thread changes what is waited for."""

    worker, is_job_complete = 0, False

    def __init__(self):
        self.lock = threading.Condition()

    def wait_for(self, condition, timeout_s, what):
        with self.lock:
            assert self.lock.wait_for(condition, DEADLINE_S), what


class Exchange:
    """An exchange that has ended when a test says so; it is told to the waiting thread a moment later."""

    def __init__(self):
        self.ended_s, self.is_told = None, threading.Event()

    def wait(self, timeout_s):
        assert self.is_told.wait(timeout_s)


class Parameters:
    """Notes what is done with the parameters; a snapshot takes as long as a test says."""

    def __init__(self):
        self.begun, self.added, self.snapshots = [], [], 0
        self.while_taking = lambda: None

    def take_snapshot(self):
        self.snapshots += 1
        self.while_taking()

    snapshots = ()

    def all_reduce_snapshot(self, exchange, *, exchange_id, weight, fragment):
        self.begun.append((exchange_id, weight))
        return [exchange]

    def add_difference(self, before, fragment, share):
        self.added.append(share)


class Worker:
    """Worker 0 in the middle of its training, in no averaging."""

    def __init__(self, **options):
        self.client, self.parameters, self.exchange = Client(), Parameters(), Exchange()
        self.protocol = ModelAveragingProtocol(0)
        self.snapshots = SnapshotAveraging(
            self.parameters, self.client, self.protocol, lambda workers: self.exchange, **options
        )

    def receive(self, action):
        """What the links' thread does, in two steps: the client applies an action, and then tells of it."""
        with self.client.lock:
            self.protocol.handle(action)
        self.snapshots.begin_if_due()


def averaged(model_steps):
    return ModelsAveraged(now_s=0.0, worker=0, exchange_id=8, model_steps=model_steps, has_mean=True)


def test_an_averaging_that_ends_within_a_step_is_added_at_the_end_of_the_step():
    worker = Worker()
    worker.snapshots.end_step(1)
    worker.receive(AVERAGING)
    worker.snapshots.begin_if_due()
    assert worker.parameters.begun == [(8, 0.5)]
    assert worker.snapshots.end_step(2) is None
    assert worker.parameters.snapshots == 1  # that which is being averaged
    worker.exchange.ended_s = 1.0
    worker.exchange.is_told.set()
    assert worker.snapshots.end_step(3) == averaged(model_steps=1)
    assert (worker.parameters.added, worker.parameters.snapshots) == ([1.0], 2)


def test_a_member_that_keeps_its_own_share_adds_so_much_of_the_difference():
    """With a weight of 1/4, of two: half of the other's model less its own, which is 2/3 of the mean's."""
    worker = Worker()
    worker.snapshots.end_step(1)
    worker.receive(replace(AVERAGING, weights=(0.25, 0.75), keeps_own_share=True))
    worker.exchange.ended_s = 1.0
    worker.exchange.is_told.set()
    worker.snapshots.end_step(2)
    assert worker.parameters.added == pytest.approx([2 / 3])


def test_an_exchange_whose_end_is_seen_before_it_is_told_is_waited_for():
    worker = Worker()
    worker.snapshots.end_step(1)
    worker.receive(AVERAGING)
    worker.exchange.ended_s = 1.0
    telling = threading.Timer(0.05, worker.exchange.is_told.set)
    telling.start()
    assert worker.snapshots.end_step(1) is not None
    telling.join()


@pytest.mark.parametrize("arrives_in", ["this thread", "another thread"])
def test_an_averaging_that_arrives_while_the_snapshot_is_taken_begins_once_when_it_is_complete(arrives_in):
    worker = Worker()

    def arrive():
        receiving = threading.Thread(target=worker.receive, args=[AVERAGING])
        receiving.start()
        receiving.join(DEADLINE_S)
        assert not worker.parameters.begun

    worker.parameters.while_taking = (
        arrive if arrives_in == "another thread" else lambda: worker.receive(AVERAGING)
    )
    worker.snapshots.end_step(1)
    assert worker.parameters.begun == [(8, 0.5)]


def test_with_a_delay_the_mean_of_a_snapshot_is_due_so_many_steps_after_it_and_is_not_added_before():
    worker = Worker(delay=3)
    worker.snapshots.end_step(1)
    worker.snapshots.end_step(2)  # it is ready still, and keeps its snapshot
    worker.receive(AVERAGING)
    worker.exchange.ended_s = 1.0
    worker.exchange.is_told.set()
    assert worker.snapshots.end_step(3) is None
    assert [worker.snapshots.is_due(steps) for steps in (3, 4)] == [False, True]
    assert (worker.parameters.snapshots, worker.snapshots.snapshot_steps) == (1, 1)
    assert worker.snapshots.end_step(4) is None
    assert worker.parameters.added == []
    assert worker.snapshots.wait(DEADLINE_S)
    assert worker.parameters.added == [1.0]


class Synchronizer(ModelAveragingSynchronizer):
    """That of a worker whose loop has ended."""

    worker, _steps = 0, 1

    def __init__(self, worker, events):
        self._client, self._protocol, self._snapshots = worker.client, worker.protocol, worker.snapshots
        self._timeout_s, self._events = DEADLINE_S, events
        self._loop = self
        self.timer = PartTimer(lambda: 0.0)

    def send_event(self, event):
        self._events.append(event)
        self._client.is_job_complete = True

    def _average_models(self, averaging, group):
        raise AssertionError("the links' thread is about to begin this averaging")


class ArrivesWhenItIsLookedFor(ModelAveragingProtocol):
    """An averaging arrives as soon as the loop's thread has seen none and lets the links' thread act."""

    client = None
    _averaging = None

    @property
    def averaging(self):
        seen, client = self._averaging, self.client
        if client is not None:
            self.client = None
            receiving = threading.Thread(target=self._receive, args=[client])
            receiving.start()
            receiving.join(0.1)
        return seen

    @averaging.setter
    def averaging(self, averaging):
        self._averaging = averaging

    def _receive(self, client):
        with client.lock:
            self.handle(AVERAGING)


def test_without_overlap_a_worker_waits_though_the_averaging_arrives_while_it_looks_for_one():
    worker = Worker(overlap=False)
    worker.protocol = ArrivesWhenItIsLookedFor(0)
    worker.protocol.count_step()
    synchronizer = Synchronizer(worker, [])
    worker.protocol.client = worker.client
    assert synchronizer._has_to_wait()


def test_an_averaging_that_arrives_when_the_loop_has_ended_is_begun_by_the_links_alone():
    """Between the two steps of the links' thread, the loop's thread sees the averaging already."""
    worker, events = Worker(), []
    worker.snapshots.end_step(1)
    with worker.client.lock:
        worker.protocol.handle(AVERAGING)
    finishing = threading.Thread(target=Synchronizer(worker, events).finish)
    finishing.start()
    worker.exchange.ended_s = 1.0
    worker.exchange.is_told.set()
    worker.snapshots.begin_if_due()
    finishing.join(DEADLINE_S)
    assert events == [averaged(model_steps=1)]
    assert worker.parameters.begun == [(8, 0.5)]
