"""Late gradients on a device whose streams run late: the CPU's results, and no access that nothing orders."""

import pytest
import torch

from offbeat.runtime.devices.host import Host
from support import late_device
from support.late_device import LateDevice, RaceError
from support.late_workers import LateTraining

FAULTS = (late_device.PACKING, late_device.COPIED_OUT, late_device.MEANS, late_device.RECORDED)
SEEDS_PER_FAULT = 20
SIDES = ("member", "outside")
SEEDS = [*range(15), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(15, 150))]


def train_late(seed, side, without=None):
    """The final state of both workers, and how often the host has waited for the device."""
    device = LateDevice(seed, without)
    with device:
        state = LateTraining(seed, (device, Host()) if side == "member" else (Host(), device)).run()
        waits = device.synchronizations
        device.synchronize()
    return state, waits


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("side", SIDES)
def test_random_schedules_of_late_blocks_give_the_results_of_the_cpu_without_a_race(side, seed):
    seen, waits = train_late(seed, side)
    assert not waits, "the host has waited for the device"
    expected = LateTraining(seed, (Host(), Host())).run()
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_worker_outside_computes_with_the_members_state_after_the_step_that_is_named():
    computed = added = 0
    for seed in range(15):
        training = LateTraining(seed, (Host(), Host()))
        training.run()
        for step, state in training.begun_with:
            assert all(map(torch.equal, state, training.states[step - 1]))
        computed += len(training.begun_with)
        added += training.added
    assert computed > added > 15


def train_late_often(side, without):
    for seed in range(SEEDS_PER_FAULT):
        train_late(seed, side, without)


@pytest.mark.parametrize("without", FAULTS)
@pytest.mark.parametrize("side", SIDES)
def test_a_synchronization_of_late_gradients_that_is_left_out_is_found(side, without):
    with pytest.raises(RaceError):
        train_late_often(side, without)
