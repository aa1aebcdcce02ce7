"""Learning rates: the paper's numbers, and properties of every choice."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.numerics.rates import (
    linear_scaling,
    lr_lambda,
    momentum_correction,
    rate_at,
    scale_to_active,
)

SCALES = st.floats(1.0, 64.0)
EPOCHS = st.floats(0.0, 100.0)


def test_the_papers_rates():
    """0.1 for 256 images (section 5.1), so 3.2 for 8192; the classifier paper's 4 x 32 and 4 x 64 at that."""
    assert linear_scaling(256) == 0.1
    assert linear_scaling(8192) == pytest.approx(3.2)
    assert [linear_scaling(4 * batch) for batch in (32, 64)] == pytest.approx([0.05, 0.1])


def test_the_papers_schedule():
    """From 0.1 to 3.2 in 5 epochs, then a tenth at 30, 60 and 80."""

    def at(epoch: float) -> float:
        return rate_at(epoch, rate=3.2, scale=32)

    assert [at(epoch) for epoch in (0, 2.5, 5, 29.999)] == pytest.approx([0.1, 1.65, 3.2, 3.2])
    assert [at(epoch) for epoch in (30, 60, 80, 89)] == pytest.approx([0.32, 0.032, 0.0032, 0.0032])


@given(SCALES, st.floats(0.5, 20.0))
def test_the_ramp_is_that_of_the_definition_and_continuous_at_its_end(scale, warm_up):
    def at(epoch: float) -> float:
        return rate_at(epoch, rate=scale * 0.1, scale=scale, warm_up_epochs=warm_up)

    for part in (0.0, 0.3, 0.9):
        assert at(part * warm_up) == pytest.approx(0.1 * (1 + (scale - 1) * part))
    assert at(math.nextafter(warm_up, 0)) == pytest.approx(at(warm_up), rel=1e-9)


@given(EPOCHS, st.floats(0.0, 30.0))
def test_a_scale_of_1_is_constant_until_the_first_decay(epoch, warm_up):
    at = rate_at(epoch, rate=0.1, scale=1.0, warm_up_epochs=warm_up, decay_at_epochs=())
    assert at == pytest.approx(0.1, rel=1e-12)


@given(EPOCHS, EPOCHS, SCALES, st.floats(0.0, 30.0))
def test_the_rate_rises_during_warm_up_and_falls_afterwards(one, other, scale, warm_up):
    early, late = sorted((one, other))
    first, second = (rate_at(epoch, rate=1.0, scale=scale, warm_up_epochs=warm_up) for epoch in (early, late))
    if late < warm_up:
        assert first <= second * (1 + 1e-12)
    if early >= warm_up:
        assert first >= second


def test_torch_follows_the_rate_step_by_step():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.4)
    made = lr_lambda(10, scale=4.0, decay_at_epochs=(6.0, 7.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, made)
    for step in range(80):
        expected = rate_at(step / 10, rate=0.4, scale=4.0, decay_at_epochs=(6.0, 7.0))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.004)


def test_with_the_correction_a_buffer_of_rates_follows_torchs_form_step_by_step():
    """v = m v + rate g, w -= v against torch.optim.SGD, while the rate changes in every step."""
    momentum, w, v, before = 0.9, 1.0, 0.0, 0.1
    parameter = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=momentum)
    for step in range(20):
        rate = 0.1 * (1 + step)
        gradient = math.sin(step)
        v = momentum * (v * momentum_correction(rate, before)) + rate * gradient
        w, before = w - v, rate
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        assert w == pytest.approx(parameter.item(), rel=1e-12)


@given(st.integers(1, 64), st.data())
def test_following_the_active_workers_keeps_the_rate_a_sample(world, data):
    active = data.draw(st.integers(1, world))
    rate = scale_to_active(linear_scaling(32 * world), active=active, world=world)
    assert rate == pytest.approx(linear_scaling(32 * active))
    assert scale_to_active(0.1, active=world, world=world) == 0.1


@pytest.mark.parametrize(
    "bad",
    [
        lambda: linear_scaling(0),
        lambda: linear_scaling(32, reference_rate=0.0),
        lambda: rate_at(-1.0, rate=0.1),
        lambda: rate_at(1.0, rate=float("nan")),
        lambda: rate_at(1.0, rate=0.1, scale=0.0),
        lambda: rate_at(1.0, rate=0.1, warm_up_epochs=-1.0),
        lambda: rate_at(1.0, rate=0.1, decay=1.5),
        lambda: rate_at(1.0, rate=0.1, decay_at_epochs=(60, 30)),
        lambda: lr_lambda(0),
        lambda: lr_lambda(10, scale=-1.0),
        lambda: momentum_correction(0.1, 0.0),
        lambda: scale_to_active(0.1, active=0, world=4),
        lambda: scale_to_active(0.1, active=5, world=4),
    ],
)
def test_bad_arguments_are_refused(bad):
    with pytest.raises(ValueError, match="expected"):
        bad()
