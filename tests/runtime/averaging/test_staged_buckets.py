"""Averagers on a device whose streams run late: the CPU's results, and no access that nothing orders."""

import random
from types import SimpleNamespace

import pytest
import torch

from offbeat.numerics.collectives.buckets import Bucket
from offbeat.runtime.averaging.staged_buckets import make_buckets
from offbeat.runtime.devices.host import Host
from support import late_device
from support.late_device import LateDevice, RaceError
from support.staged_training import Training, gradient_averager, layer_averager

FAULTS = (
    late_device.PACKING,
    late_device.COPIED_OUT,
    late_device.COPIED_IN,
    late_device.MEANS,
    late_device.COPIED_BACK,
    late_device.FINISHED,
    late_device.RECORDED,
)
SEEDS_PER_FAULT = 12


def averager_of(seed, averager):
    chosen = random.Random(f"averager {seed}")
    if averager == "gradients":
        return gradient_averager(bucket_bytes=chosen.choice([1, 100, 300, 10**6]))
    return layer_averager(overlap=chosen.choice(["forward", "backward", "none"]))


def train_late(seed, averager, without=None):
    """The final state, and how often the host has waited for the device."""
    device = LateDevice(seed, without)
    with device:
        state = Training(seed, device, averager_of(seed, averager)).run()
        waits = device.synchronizations
        device.synchronize()
    return state, waits


def check(seed, averager):
    seen, waits = train_late(seed, averager)
    assert not waits, "the host has waited for the device in a step"
    expected = Training(seed, Host(), averager_of(seed, averager)).run()
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 150))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("averager", ["gradients", "layers"])
def test_random_schedules_give_the_results_of_the_cpu_without_a_race(averager, seed):
    check(seed, averager)


def train_late_often(without):
    for seed in range(SEEDS_PER_FAULT):
        train_late(seed, "gradients", without)


@pytest.mark.parametrize("without", FAULTS)
def test_a_synchronization_that_is_left_out_is_found(without):
    with pytest.raises(RaceError):
        train_late_often(without)


def bucket_of_two(device):
    memory = SimpleNamespace(zeros=device.pinned_zeros, device=device)
    bucket = Bucket(entries=(0, 1), offsets=(0, 4), elements=8, dtype=torch.float32)
    shapes = [torch.Size([4]), torch.Size([4]), torch.Size([1])]
    (made,) = make_buckets([bucket], shapes, 2, memory, torch.device("cpu"))
    return made


class NoExchange:
    """Sums nothing, and waits for nothing."""

    def all_reduce(self, flat, into, **_):
        return None


@pytest.mark.parametrize("was_sent", [False, True], ids=["new", "copied back"])
def test_a_stream_that_waits_for_no_other_may_pack_into_a_bucket_that_another_has_opened(was_sent):
    """As those of two branches of a model do."""
    for seed in range(20):
        device = LateDevice(seed)
        bucket = bucket_of_two(device)
        with device:
            ones = device.adopt(torch.ones(4))
            bucket.packing_view(0).copy_(ones)
            if was_sent:
                bucket.packing_view(1).copy_(ones)
                bucket.all_reduce(NoExchange(), exchange_id=1, index=0)
                bucket.packing_view(0)
            with device.on_side_stream(waits=False):
                if was_sent:
                    bucket.packing_view(1).add_(ones)
                else:
                    bucket.packing_view(1).copy_(ones)
            bucket.all_reduce(NoExchange(), exchange_id=2, index=0)
            device.synchronize()
        assert bucket.contribution.flat.tolist() == [1.0] * 4 + [2.0 if was_sent else 1.0] * 4


def test_memory_of_the_host_is_found_to_be_written_while_a_copy_reads_it():
    device = LateDevice(0)
    pinned, there = device.pinned_zeros(4, torch.float32), device.adopt(torch.zeros(4))
    with device:
        device.copy_in(pinned, there, [])
        with pytest.raises(RaceError, match="nothing orders"):
            pinned.fill_(1.0)


def test_what_was_queued_is_garbage_until_it_has_run():
    device = LateDevice(0)
    one = device.adopt(torch.ones(4))
    with device:
        sums = [one + one for _ in range(50)]
    assert any(total.isnan().any() for total in sums)
    with device:
        assert float(sums[-1].sum()) == 8.0
    assert device.synchronizations == 1
