"""Waiting for the events of a device, and a device that hangs, in threads and in real jobs."""

import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

import offbeat
from offbeat.errors import OffbeatError
from offbeat.runtime.devices.event_callbacks import EventCallbacks
from offbeat.runtime.processes.threads import start_thread
from offbeat.strategies import AllReduce, PartialAllReduce
from support.processes import run, start, values

DEVICE = torch.device("cuda", 0)
DEADLINE_S = 30.0


class Event(threading.Event):
    """An event of a device: happens when a test says so, and has no limit for those who wait."""

    def __init__(self):
        super().__init__()
        self.is_awaited = threading.Event()

    def synchronize(self):
        self.is_awaited.set()
        self.wait()


@contextmanager
def callbacks(timeout_s):
    """Callbacks after events, the errors of their threads, and what says that there is one."""
    errors, failed = [], threading.Event()

    def on_failure(error):
        errors.append(error)
        failed.set()

    made = EventCallbacks(
        DEVICE, lambda name, work: start_thread(name, work, on_failure), timeout_s, nullcontext
    )
    try:
        yield made, errors, failed
    finally:
        made.close()


def test_callbacks_are_made_in_order_once_their_events_have_happened():
    with callbacks(DEADLINE_S) as (made, errors, _):
        events, called, all_called = [Event() for _ in range(3)], [], threading.Event()
        made.call_after(events[:2], partial(called.append, "first"))
        made.call_after([], partial(called.append, "second"))
        made.call_after(events[2:], all_called.set)
        events[2].set()
        events[0].set()
        assert events[1].is_awaited.wait(DEADLINE_S)
        assert called == []
        events[1].set()
        assert all_called.wait(DEADLINE_S)
        assert called == ["first", "second"]
        assert errors == []


def test_a_device_that_does_nothing_any_more_is_named_after_the_deadline():
    with callbacks(1.0) as (made, errors, failed):
        hung = Event()
        made.call_after([hung], lambda: None)
        assert not made.has_hung
        assert failed.wait(DEADLINE_S)
        assert made.has_hung
        assert isinstance(errors[0], OffbeatError)
        assert str(errors[0]).startswith("cuda:0 has not done what was queued on it within 1 s: it hangs")
        hung.set()


def test_a_device_that_has_nothing_to_do_does_not_hang():
    """The second call is due in time, however long ago the first one was."""
    with callbacks(1.0) as (made, errors, failed):
        for _ in range(2):
            done = threading.Event()
            made.call_after([], done.set)
            assert done.wait(DEADLINE_S)
            assert not failed.wait(1.5)
        assert errors == []


def train(session, model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()


def whose_device_hangs(rank, emit, strategy):
    """Trains on; the device of worker 1 hangs after three steps, and what its exchange waits for, too."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, strategy) as session:
        train(session, model, optimizer, 3)
        if rank == 1:
            synchronizer = session._synchronizer
            device = EventCallbacks(DEVICE, synchronizer._start_thread, 1.0, nullcontext)
            exchange = synchronizer.binding.acquire(wait=True).exchange
            all_reduce = partial(exchange.all_reduce, after=partial(device.call_after, [Event()]))
            all_reduce(torch.ones(4), torch.empty(4), exchange_id=2**31).wait(DEADLINE_S)
        train(session, model, optimizer, 30)
    return model.weight.tolist()


def test_the_errors_of_all_workers_name_the_device_that_hangs_and_its_worker():
    for ended in run(whose_device_hangs, 3, AllReduce(timeout_s=DEADLINE_S)):
        assert ended.error_type == "WorkerError"
        assert "worker 1 failed" in ended.error
        assert "cuda:0 has not done what was queued on it within 1 s" in ended.error


def test_the_others_go_on_without_a_worker_whose_device_hangs():
    with start(whose_device_hangs, 3, PartialAllReduce(shards="equal", timeout_s=DEADLINE_S)) as running:
        ended = running.ends()
    assert "cuda:0 has not done what was queued on it within 1 s" in ended[1].error
    survivors = values([ended[0], ended[2]])
    assert survivors[0] == survivors[1]
