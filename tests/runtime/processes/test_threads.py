"""Calls with a deadline, in threads that may be abandoned."""

import threading
import time

import pytest

from offbeat.runtime.processes.threads import run_with_deadline


def test_a_call_returns_or_raises_as_it_does_without_a_deadline():
    assert run_with_deadline(lambda: 5, time.monotonic() + 30.0) == 5
    with pytest.raises(ZeroDivisionError):
        run_with_deadline(lambda: 1 // 0, time.monotonic() + 30.0)


def test_a_call_that_does_not_return_is_abandoned_at_its_deadline():
    ends, has_ended = threading.Event(), threading.Event()

    def call():
        ends.wait()
        has_ended.set()

    with pytest.raises(TimeoutError):
        run_with_deadline(call, time.monotonic() + 0.1)
    assert not has_ended.is_set()
    ends.set()
    assert has_ended.wait(30.0)
