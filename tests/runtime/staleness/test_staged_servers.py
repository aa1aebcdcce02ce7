"""Training on servers, with a device whose streams run late: the CPU's results, and no unordered access."""

import random
from contextlib import closing
from itertools import count

import numpy as np
import pytest
import torch

import offbeat
from offbeat.runtime.devices.host import Host
from offbeat.runtime.staleness.staging import ValueStaging
from offbeat.strategies import ASP, DTSSP, SSP, Downpour, ServerBSP
from support import late_device
from support.late_device import LateDevice, RaceError
from support.staged_server_training import STEPS, ServerTraining

FAULTS = (
    late_device.PACKING,
    late_device.FINISHED,
    late_device.OVERWRITTEN,
    late_device.MEANS,
    late_device.RECORDED,
)
SEEDS_PER_FAULT = 20
jobs = count()


@pytest.fixture(scope="module")
def ps():
    with offbeat.PS.local(servers=1, replicas=1) as client:
        yield client


def strategy_of(seed):
    """A strategy, and the number of workers."""
    chosen = random.Random(f"strategy {seed}")
    strategies = [
        ServerBSP(shards="equal"),
        SSP(s=chosen.choice([1, 3]), shards="equal"),
        SSP(s=2, server_step="sequential", shards="equal"),
        DTSSP(shards="equal"),
        ASP(shards="equal"),
        Downpour(n_fetch=chosen.choice([1, 2]), n_push=chosen.choice([1, 2, 3]), shards="equal"),
    ]
    return strategies[seed % len(strategies)], chosen.choice([1, 2, 3])


def train(seed, device, ps):
    strategy, workers = strategy_of(seed)
    return ServerTraining(seed, device, ps, f"job-{next(jobs)}", strategy, workers)


def train_late(seed, ps, without=None):
    """The states at the end, the training, and the device as it was before it was closed."""
    device = LateDevice(seed, without)
    with device, closing(train(seed, device, ps)) as training:
        states = training.run()
        assert not device.synchronizations, "the host has waited for more than an event"
        device.synchronize()
    return states, training, device


def check(seed, ps):
    seen, training, device = train_late(seed, ps)
    with closing(train(seed, Host(), ps)) as on_the_host:
        expected = on_the_host.run()
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    strategy, workers = strategy_of(seed)
    pushes = workers * -(-STEPS // strategy.ps_options().push_every)
    assert pushes <= device.awaited.count("out") <= pushes + training.complete_states
    begun_again = sum(one.restarts for one in training.workers)
    if not begun_again and strategy.ps_options().push_every == 1:
        assert "in" not in device.awaited_early, "the host has waited for what it wrote to pinned memory"


SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 110))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedules_on_servers_give_the_results_of_the_cpu_without_a_race(ps, seed):
    check(seed, ps)


def train_late_often(ps, without):
    for seed in range(SEEDS_PER_FAULT):
        train_late(seed, ps, without)


@pytest.mark.parametrize("without", FAULTS)
def test_a_synchronization_that_is_left_out_on_servers_is_found(ps, without):
    with pytest.raises(RaceError):
        train_late_often(ps, without)


def test_the_reported_compute_time_is_the_devices_one_step_late(ps):
    """The simulated device counts operations, of which a pass has dozens; the host's clock counts calls."""
    _, training, _ = train_late(1, ps)
    with closing(train(1, Host(), ps)) as on_the_host:
        on_the_host.run()
    for one, other in zip(training.workers, on_the_host.workers, strict=True):
        assert one.reported_s[0] == other.reported_s[0]
        assert min(one.reported_s[1:]) > 2 * max(other.reported_s)


# Memory of the host -------------------------------------------------------------------------------------


def test_memory_that_a_push_is_made_from_is_used_again_only_when_nothing_refers_to_it():
    device = LateDevice(0)
    staging = ValueStaging(device)
    with device:
        values = device.adopt(torch.ones(4))
        (first,) = staging.to_host([values])
        in_a_request = first.numpy()[:2]
        address = first.data_ptr()
        del first
        (second,) = staging.to_host([values + values])
        assert second.data_ptr() != address
        assert in_a_request.tolist() == [1.0, 1.0]
        del in_a_request
        (third,) = staging.to_host([values])
        assert third.data_ptr() == address
    assert (second.tolist(), third.tolist()) == ([2.0] * 4, [1.0] * 4)


def test_pulled_values_are_copied_through_the_same_memory_and_are_the_devices_own_afterwards():
    device = LateDevice(0)
    staging = ValueStaging(device)
    with device:
        pulled = np.ones(4)
        copies = []
        for _ in range(3):
            copies.append(staging.to_device(0, pulled))
            pulled += 1
        device.synchronize()
    assert [one.tolist() for one in copies] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    assert device.awaited == ["in", "in"]


def test_on_the_cpu_nothing_is_copied():
    staging = ValueStaging(Host())
    values, pulled = torch.ones(4), np.ones(4)
    (hosted,) = staging.to_host([values])
    assert hosted is values
    assert staging.to_device(0, pulled).data_ptr() == pulled.ctypes.data
