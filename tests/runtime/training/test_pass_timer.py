"""Promises of `offbeat.runtime.training.pass_timer`."""

from offbeat.runtime.devices.host import Host
from offbeat.runtime.training.pass_timer import PassTimer
from offbeat.runtime.training.timing import PartTimer


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_injected_slowness_counts_as_compute_time_of_the_round_but_of_no_pass():
    clock, reported_s = Clock(), []

    def slow_down(compute_s):
        reported_s.append(compute_s)
        clock.now_s += 100

    timer = PartTimer(clock)
    passes = PassTimer(timer, Host(), slow_down)
    for compute_s in (1, 2):
        timer.switch("compute")
        clock.now_s += compute_s
        passes.end_pass()
        timer.switch("other")
        clock.now_s += 1000
    assert reported_s == [1, 2]
    assert passes.compute_s == 203
    passes.end_round()
    assert passes.compute_s == 0
