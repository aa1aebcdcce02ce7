"""Promises of a worker's client of the coordinator: what a thread does while it waits."""

import threading
from contextlib import contextmanager

import pytest

from offbeat.errors import WorkerError
from offbeat.runtime.control.configuration import COORDINATOR
from offbeat.runtime.transport.endpoint import Endpoint
from support.coordinator_process import DEADLINE_S, open_client


@contextmanager
def connected_client():
    """A client whose coordinator accepts messages and answers none."""
    links = Endpoint(COORDINATOR, job="job", token="secret", on_message=lambda *_: None, on_lost=print)
    client = open_client(links.addresses, 1, print, world=2)
    try:
        yield client
    finally:
        client.is_failure_reported = True  # so that nothing is waited for
        client.close()
        links.close()


def is_free(lock):
    """Whether another thread can get a lock."""
    found = []

    def look():
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(DEADLINE_S)
    return found[0]


def test_a_waiting_thread_finds_due_work_under_the_lock_and_does_it_outside():
    was_free, due = [], ["first", "second"]

    def work():
        was_free.append(is_free(client.lock))

    def find():
        was_free.append(is_free(client.lock))
        return work if due and due.pop() else None

    with connected_client() as client:
        client.find_due_work = find
        client.wait_for(lambda: not due and len(was_free) == 4, DEADLINE_S, "the work")
    assert was_free == [False, True, False, True]


def test_a_thread_whose_condition_is_true_looks_for_no_work():
    looked = []
    with connected_client() as client:
        client.find_due_work = lambda: looked.append(1)
        client.wait_for(lambda: True, DEADLINE_S, "nothing")
    assert not looked


def test_waking_a_waiting_thread_makes_it_do_the_work_that_has_become_due():
    due, done, has_looked = [], threading.Event(), threading.Event()

    def find():
        has_looked.set()
        return due.pop() if due else None

    with connected_client() as client:
        client.find_due_work = find
        waiting = threading.Thread(target=client.wait_for, args=(done.is_set, None, "the work"))
        waiting.start()
        assert has_looked.wait(DEADLINE_S)
        with client.lock:
            due.append(done.set)
        client.wake()
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()


def test_a_wait_without_work_ends_at_its_deadline_and_names_what_it_waited_for():
    with connected_client() as client:
        client.find_due_work = lambda: None
        with pytest.raises(WorkerError, match=r"worker 1: timed out after 0.01 s waiting for the tide"):
            client.wait_for(lambda: False, 0.01, "the tide")
