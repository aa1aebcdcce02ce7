"""Promises of the detector: a coordinator that receives nothing is cut off, for a limited time."""

import pytest

from offbeat.runtime.control.cut_off import CutOffDetector

LIMIT_S = 300.0
BEGAN_S = 1000.0


@pytest.fixture
def detector():
    """Detects since `BEGAN_S` that all are silent."""
    detector = CutOffDetector(LIMIT_S)
    assert not detector.on_tick(BEGAN_S - 0.5, are_all_silent=False)
    assert detector.on_tick(BEGAN_S, are_all_silent=True)
    return detector


def test_a_host_is_cut_off_as_long_as_all_are_silent_until_the_limit(detector):
    assert detector.on_tick(BEGAN_S + LIMIT_S - 0.5, are_all_silent=True)
    for after_s in (0.0, 0.5, 10 * LIMIT_S):
        assert not detector.on_tick(BEGAN_S + LIMIT_S + after_s, are_all_silent=True)


def test_a_host_that_receives_something_is_not_cut_off_and_the_limit_begins_again(detector):
    assert not detector.on_tick(BEGAN_S + LIMIT_S - 1.0, are_all_silent=False)
    again_s = BEGAN_S + 2 * LIMIT_S
    assert detector.on_tick(again_s, are_all_silent=True)
    assert detector.on_tick(again_s + LIMIT_S - 0.5, are_all_silent=True)
    assert not detector.on_tick(again_s + LIMIT_S, are_all_silent=True)


def test_a_host_that_another_process_reaches_is_not_cut_off_until_a_worker_is_received_again(detector):
    detector.on_reached()
    for now_s in (BEGAN_S + 0.5, BEGAN_S + 1.0):
        assert not detector.on_tick(now_s, are_all_silent=True)
    assert not detector.on_tick(BEGAN_S + 1.5, are_all_silent=False)
    assert detector.on_tick(BEGAN_S + 2.0, are_all_silent=True)
