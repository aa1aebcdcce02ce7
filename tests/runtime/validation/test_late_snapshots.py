"""Snapshots and evaluators on a device whose streams run late: what serial validation gives, and no race."""

import pytest
import torch

from offbeat.runtime.validation.evaluators import CancelledError
from support import late_device
from support.late_device import RaceError
from support.validated_training import RESULTS, train_alone, validate_in_line, validate_late

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 200))]


def same(seen, expected):
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_evaluating_while_training_goes_on_gives_the_metrics_of_serial_validation_bit_for_bit(seed):
    workers = 1 + seed % 3
    metrics, state = validate_in_line(seed, workers)
    same(state, train_alone(seed))
    seen = validate_late(seed, workers)
    same(seen.state, state)
    assert not seen.waits, "the training has waited for the device"
    assert seen.results.keys() == metrics.keys()
    for (epoch, number), result in seen.results.items():
        if epoch in seen.cancelled and isinstance(result, CancelledError):
            continue
        assert result == metrics[epoch, number]


def test_the_training_takes_steps_during_most_evaluations_of_these_schedules():
    seen = [validate_late(seed, 2) for seed in range(4)]
    assert sum(one.overlapped for one in seen) > sum(len(one.results) for one in seen) / 2


def validate_often(without):
    for seed in range(12):
        seen = validate_late(seed, 1 + seed % 3, without)
        for result in seen.results.values():
            if isinstance(result, RaceError):
                raise result


@pytest.mark.parametrize("without", [late_device.RECORDED, late_device.FINISHED, RESULTS])
def test_a_synchronization_of_snapshots_that_is_left_out_is_found(without):
    with pytest.raises(RaceError):
        validate_often(without)
