"""An exception of a signal handler leaves no lock held and no temporary handler installed."""

import signal
import sys
import threading

import pytest

from offbeat.runtime.processes.interrupts import DeferredSignals
from offbeat.runtime.processes.waiting import SignalSafeCondition, SignalSafeEvent

DEADLINE_S = 30.0


def is_free(lock):
    """Whether another thread can acquire the lock."""
    got = []
    thread = threading.Thread(target=lambda: got.append(lock.acquire(timeout=DEADLINE_S)))
    thread.start()
    thread.join()
    return got == [True]


def test_no_python_code_runs_between_a_with_statement_and_its_block():
    condition, ran = SignalSafeCondition(), []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_name) if event == "call" else None)
    with condition:
        pass
    sys.setprofile(before)
    assert ran == []


@pytest.mark.parametrize("call", range(10))
def test_an_interrupt_after_any_call_within_a_wait_leaves_the_lock_free(call):
    """Signal handlers run after calls; a wait that times out makes eight of them."""
    condition, calls = SignalSafeCondition(), []

    def interrupt(frame, event, function):
        if frame.f_code is SignalSafeCondition.wait.__code__ and event == "c_return":
            calls.append(function.__name__)
            if len(calls) == call + 1:
                signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    try:
        with condition:
            sys.setprofile(interrupt)
            condition.wait(0.001)
    except KeyboardInterrupt:
        assert len(calls) > call
    else:
        assert len(calls) <= call
        assert {"_release_save", "_acquire_restore"} < set(calls)
    finally:
        sys.setprofile(before)
    assert is_free(condition)


def test_an_event_wakes_all_waiting_threads_and_stays_set():
    flag, woken = SignalSafeEvent(), []
    threads = [threading.Thread(target=lambda: woken.append(flag.wait(DEADLINE_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not flag.wait(0.001)
    flag.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert woken == [True] * 3
    assert flag.is_set()
    assert flag.wait(0.0)


def test_wait_for_returns_the_last_result_of_the_predicate():
    condition = SignalSafeCondition()
    with condition:
        assert condition.wait_for(lambda: "there", 0.0) == "there"
        assert condition.wait_for(lambda: None, 0.001) is None


def test_a_lock_acquired_twice_is_released_while_waiting():
    condition, is_seen = SignalSafeCondition(), []

    def notify():
        with condition:
            is_seen.append(True)
            condition.notify_all()

    with condition, condition:
        threading.Thread(target=notify).start()
        assert condition.wait_for(lambda: is_seen, DEADLINE_S)


@pytest.mark.parametrize("call", range(4))
def test_an_interrupt_while_handlers_are_restored_skips_none_and_loses_no_signal(call):
    delivered, calls = [], []
    numbers = (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)
    before = [signal.signal(number, lambda number, _: delivered.append(number)) for number in numbers]
    handlers = [signal.getsignal(number) for number in (*numbers, signal.SIGINT)]

    def interrupt(frame, event, function):
        if (
            frame.f_code is DeferredSignals._restore.__code__
            and event == "c_return"
            and function.__name__ == "signal"
        ):
            calls.append(function)
            if len(calls) == call + 1:
                signal.raise_signal(signal.SIGINT)

    def hold():
        with DeferredSignals(lambda: None):
            signal.raise_signal(signal.SIGTERM)
            sys.setprofile(interrupt)

    try:
        with pytest.raises(KeyboardInterrupt):
            hold()
        sys.setprofile(None)
        assert [signal.getsignal(number) for number in (*numbers, signal.SIGINT)] == handlers
        assert delivered == [signal.SIGTERM]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
