"""Promises of `offbeat.runtime.training.pass_timer`."""

import torch

from offbeat.runtime.devices.host import Host
from offbeat.runtime.training.pass_timer import PassTimer
from offbeat.runtime.training.timing import PartTimer


class Device:
    """Reaches the marks of the work that is queued when a test lets it or waits, at the times of the test."""

    torch_device = torch.device("cpu")
    has_streams = True

    def __init__(self):
        self.now_s, self.reached = 0.0, 0
        self.marks_s = []

    def record_time(self):
        self.marks_s.append(self.now_s)
        return len(self.marks_s)

    def synchronize(self):
        self.reached = len(self.marks_s)

    def elapsed_s(self, begin, end):
        if max(begin, end) > self.reached:
            return None
        return self.marks_s[end - 1] - self.marks_s[begin - 1]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_injected_slowness_counts_as_compute_time_of_the_round_but_of_no_pass():
    clock, reported_s = Clock(), []

    def slow_down(wait_for_compute_s):
        reported_s.append(wait_for_compute_s())
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


def ignore(_):
    """Inject no slowness."""


def test_on_a_device_a_round_takes_the_time_that_the_device_computed_and_is_known_when_it_has():
    clock, device = Clock(), Device()
    timer = PartTimer(clock)
    passes = PassTimer(timer, device, ignore)
    for device_s in (5, 7, 11):
        timer.switch("compute")
        passes.begin_pass()
        passes.begin_pass()  # a model within the model
        clock.now_s += 1  # to queue the work
        device.now_s += device_s
        passes.end_pass()
        timer.switch("other")
        if device_s == 5:
            assert passes.compute_s == 1  # the worker's own, before the device has computed a round
        if device_s == 7:
            device.reached = 3
            assert passes.compute_s == 5  # the round before
        if device_s == 11:
            assert passes.compute_s == 5  # the device has not reached the second
        passes.end_round()
    device.reached = len(device.marks_s)
    assert passes.compute_s == 11


def test_on_a_device_slowness_begins_when_the_pass_is_computed():
    device, reported_s = Device(), []

    def slow_down(wait_for_compute_s):
        reported_s.append(wait_for_compute_s())
        assert device.reached == len(device.marks_s)
        device.now_s += 100

    passes = PassTimer(PartTimer(Clock()), device, slow_down)
    for device_s in (5, 7):
        passes.begin_pass()
        device.now_s += device_s
        passes.end_pass()
    passes.end_round()
    device.synchronize()
    assert reported_s == [5, 7]
    assert passes.compute_s == 212


def test_on_a_device_the_passes_of_a_round_are_added_up():
    device = Device()
    passes = PassTimer(PartTimer(Clock()), device, ignore)
    for _ in range(2):
        for device_s in (3, 4):
            passes.begin_pass()
            device.now_s += device_s
            passes.end_pass()
            device.now_s += 1000  # loads a batch
        passes.end_round()
        device.reached = len(device.marks_s)
    assert passes.compute_s == 7


def test_on_a_device_waits_within_a_pass_are_no_computing():
    device, reported_s = Device(), []
    passes = PassTimer(PartTimer(Clock()), device, lambda wait_for_s: reported_s.append(wait_for_s()))
    for _ in range(2):
        with passes.paused():  # before the pass
            device.now_s += 500
        passes.begin_pass()
        for _ in range(2):
            device.now_s += 3
            with passes.paused():
                device.now_s += 50
        device.now_s += 4
        passes.end_pass()
        passes.end_round()
        device.reached = len(device.marks_s)
    assert passes.compute_s == 10
    assert reported_s == [10, 10]


def test_a_round_that_begins_again_counts_what_is_computed_from_then_on():
    clock, device = Clock(), Device()
    timer = PartTimer(clock)
    on_the_host, on_a_device = PassTimer(timer, Host(), ignore), PassTimer(timer, device, ignore)
    for abandoned_s, computed_s in ((10, 1), (20, 2)):
        for passed_s in (abandoned_s, computed_s):
            timer.switch("other")
            for passes in (on_the_host, on_a_device):
                passes.begin_round()
            timer.switch("compute")
            on_a_device.begin_pass()
            clock.now_s += passed_s
            device.now_s += 100 * passed_s
        on_the_host.end_pass()
        on_a_device.end_pass()
        timer.switch("other")
        assert on_the_host.compute_s == computed_s
        on_a_device.end_round()
        device.reached = len(device.marks_s)
        assert on_a_device.compute_s == 100 * computed_s
