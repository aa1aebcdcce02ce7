"""Averaging of models on a device whose streams run late: the CPU's results, and nothing out of order."""

import pytest
import torch

from offbeat.runtime.devices.host import Host
from support import late_device
from support.late_device import LateDevice, RaceError
from support.staged_models import ModelTraining

FAULTS = (late_device.PACKING, late_device.COPIED_OUT, late_device.MEANS, late_device.RECORDED)
SEEDS_PER_FAULT = 20
SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 100))]


def train_late(seed, without=None, **options):
    """The training after its end, its final state, and how often the host has waited for the device."""
    device = LateDevice(seed, without)
    with device:
        training = ModelTraining(seed, device, **options)
        state, waits = training.run(), device.synchronizations
        device.synchronize()
    return training, state, waits


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fragments", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_random_averagings_give_the_models_of_the_cpu_without_a_race(overlap, fragments, seed):
    _, seen, waits = train_late(seed, overlap=overlap, fragments=fragments)
    assert not waits, "the host has waited for the device"
    expected = ModelTraining(seed, Host(), overlap=overlap, fragments=fragments).run()
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Waiting(ModelTraining):
    """Notes what is waited for, and for how long at most."""

    def __init__(self, *arguments, **options):
        self.waits = []
        super().__init__(*arguments, **options)

    def wait_for(self, is_over, timeout_s, what):
        if not is_over():
            self.waits.append((what, timeout_s))
        super().wait_for(is_over, timeout_s, what)


def test_a_worker_waits_for_its_group_until_the_coordinator_says_who_is_late():
    """Each of several groups before its own may wait for a worker for as long as the deadline."""
    training = Waiting(0, Host())
    training.run()
    whats = ("the state of the other workers", "the workers of its group")
    assert set(training.waits) == {(what, None) for what in whats}


def train_late_often(without, *, overlap):
    for seed in range(SEEDS_PER_FAULT):
        train_late(seed, without, overlap=overlap)


@pytest.mark.parametrize("without", FAULTS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_synchronization_of_averaged_models_that_is_left_out_is_found(overlap, without):
    with pytest.raises(RaceError):
        train_late_often(without, overlap=overlap)


@pytest.mark.parametrize("has_closure", [False, True])
def test_the_compute_time_is_that_of_the_device_without_the_averaging(has_closure):
    """The worker's clock stands still, and the device counts what it does between two marks."""
    training, _, _ = train_late(0, has_closure=has_closure)
    assert training.reported[0].compute_s == 0
    known_s = {one.compute_s for one in training.reported} - {0}
    # Of a step with one pass, of one with two, and of the first with a closure, in which SGD makes its state.
    assert len(known_s) == 2 + has_closure
