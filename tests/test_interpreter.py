"""How much of the time the interpreter's lock is held."""

from __future__ import annotations

import sys

from offbeat.runtime.interpreter import LockWatch, watched


def test_who_gets_the_lock_late_has_met_somebody_who_held_it():
    """Of four looks two get it at once, one after a tenth of the switch interval, and one after all of it."""
    now_s, late_s = 0.0, [0.0, 0.1, 0.0, 1.0]

    def sleep(duration_s):
        nonlocal now_s
        now_s += duration_s + late_s.pop(0) * sys.getswitchinterval()
        if not late_s:
            watch.is_over.set()

    watch = LockWatch(clock=lambda: now_s, sleep=sleep)
    watch.look()
    assert (watch.looks, watch.held, watch.share) == (4, 1, 0.25)


def test_a_thread_that_computes_in_python_holds_the_lock():
    with watched() as watch:
        while watch.looks < 10:
            pass
    assert watch.share > 0.5


def test_what_is_too_short_to_be_looked_at_counts_as_computing():
    assert LockWatch().share == 1.0
