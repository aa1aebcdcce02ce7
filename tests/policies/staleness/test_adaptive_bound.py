"""The bound that follows the loss: the rule of DTSSP, and its invariants over any losses."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.policies.staleness.adaptive_bound import LprController

losses = st.one_of(
    st.none(),
    st.floats(-10, 10),
    st.floats(allow_nan=True, allow_infinity=True),
)


def bounds(controller: LprController, *losses: float | None) -> list[int]:
    """The bound after each version, of one step each, that had these losses."""
    trace = []
    for version, loss in enumerate(losses):
        if loss is not None:
            controller.add_loss(version, 32, loss)
        controller.complete_versions(version + 1)
        trace.append(controller.s)
    return trace


def test_the_bound_rises_by_a_step_while_the_loss_falls_by_more_than_the_limit():
    assert bounds(LprController(3), 1.0, 0.9, 0.8, 0.79) == [3, 4, 5, 5]


def test_the_bound_falls_by_a_step_while_the_loss_rises_by_more_than_the_limit():
    assert bounds(LprController(6, step=2), 1.0, 1.1, 1.15, 2.0, 4.0) == [6, 4, 4, 3, 3]


def test_the_bound_stays_when_the_change_equals_the_limit():
    assert bounds(LprController(4, limit=25.0), 1.0, 0.75, 1.0, 1.25) == [4, 4, 3, 3]


def test_the_rate_is_in_percent_of_the_loss_of_the_version_before():
    controller = LprController()
    assert bounds(controller, 0.8)
    assert controller.lpr is None
    bounds(controller, 0.7)
    assert controller.lpr == pytest.approx(12.5)
    bounds(controller, 0.84)
    assert controller.lpr == pytest.approx(-20.0)


def test_a_negative_loss_falls_when_its_magnitude_grows():
    assert bounds(LprController(5), -1.0, -1.1, -1.0) == [5, 6, 5]


def test_a_loss_of_zero_has_a_sign_to_its_change_though_no_percentage():
    assert bounds(LprController(5), 0.0, 1e-6, 0.0, 0.0) == [5, 4, 5, 5]


def test_the_loss_of_a_version_is_the_mean_by_samples_of_all_steps_at_its_clock():
    controller = LprController()
    controller.add_loss(0, 10, 1.0)
    controller.complete_versions(1)
    controller.add_loss(1, 30, 0.9)
    controller.add_loss(2, 10, 5.0)  # the next version's
    controller.add_loss(1, 10, 0.5)
    controller.complete_versions(2)
    assert controller.lpr == pytest.approx(20.0)


def test_versions_without_steps_losses_or_samples_are_skipped():
    controller = LprController()
    controller.add_loss(3, 10, 1.0)
    controller.add_loss(5, 0, 100.0)
    controller.add_loss(9, 10, 0.9)
    assert controller.complete_versions(9) == []
    assert controller.lpr is None
    assert controller.complete_versions(12) == ["the loss fell by 10 % at version 9"]
    controller.add_loss(12, 10, 1.8)
    assert controller.complete_versions(13) == ["the loss rose by 100 % at version 12"]


def test_several_versions_that_are_complete_at_once_are_weighed_in_order():
    controller = LprController(3)
    for version, loss in ((2, 0.5), (0, 1.0), (1, 0.9)):
        controller.add_loss(version, 1, loss)
    assert len(controller.complete_versions(3)) == 2
    assert controller.s == 5


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_lowers_the_bound_and_is_not_compared_with(loss):
    controller = LprController(6)
    assert bounds(controller, 1.0, loss, loss, 0.9, 0.9) == [6, 5, 4, 5, 5]


def test_one_step_with_a_nan_loss_makes_the_loss_of_its_version_nan():
    controller = LprController(6)
    bounds(controller, 1.0)
    controller.add_loss(1, 32, 0.5)
    controller.add_loss(1, 32, math.nan)
    controller.complete_versions(2)
    assert controller.s == 5


def test_with_beta_the_smoothed_loss_is_compared():
    controller = LprController(3, beta=0.75)
    assert bounds(controller, 1.0, 0.6) == [3, 4]
    assert controller.lpr == pytest.approx(10.0)
    bounds(controller, 0.9)
    assert controller.lpr == pytest.approx(0.0, abs=1e-9)


def test_with_a_window_the_means_of_the_last_losses_are_compared():
    controller = LprController(3, window=2)
    assert bounds(controller, 1.0, 0.8) == [3, 4]  # 1.0, 0.9
    assert controller.lpr == pytest.approx(10.0)
    bounds(controller, 1.0)
    assert controller.lpr == pytest.approx(0.0, abs=1e-9)
    bounds(controller, 0.44)  # 0.72 after 0.9
    assert controller.lpr == pytest.approx(20.0)


def test_with_accuracies_the_bound_rises_while_they_rise():
    controller = LprController(3, signal="accuracy")
    assert bounds(controller, 0.5, 0.6, 0.61) == [3, 4, 4]
    controller.add_loss(9, 1, 0.305)
    assert controller.complete_versions(10) == ["the accuracy fell by 50 % at version 9"]
    assert controller.s == 3
    assert bounds(controller, math.nan) == [3]


@given(st.lists(losses, max_size=60), st.integers(1, 3), st.floats(0, 20), st.integers(0, 6))
def test_the_bound_is_in_its_range_and_changes_by_at_most_a_step_a_version(losses, step, limit, s_min):
    controller = LprController(s_min + 2, s_min=s_min, s_max=s_min + 5, step=step, limit=limit)
    trace = [s_min + 2, *bounds(controller, *losses)]
    assert all(s_min <= s <= s_min + 5 for s in trace)
    assert all(abs(after - before) <= step for before, after in pairwise(trace))


@given(st.lists(losses, max_size=40))
def test_with_an_infinite_limit_the_bound_stays(losses):
    assert set(bounds(LprController(4, limit=None), *losses)) <= {4}


@given(
    st.lists(losses, min_size=1, max_size=40),
    st.integers(0, 40),
    st.sampled_from([{}, {"beta": 0.5}, {"window": 3, "signal": "accuracy"}]),
)
def test_the_same_losses_give_the_same_bounds_also_from_a_remembered_state(losses, cut, arguments):
    trace = bounds(LprController(**arguments), *losses)
    controller = LprController(**arguments)
    again = []
    for version, loss in enumerate(losses):
        if loss is not None:
            controller.add_loss(version, 32, loss)
        if version == cut:
            state = json.loads(json.dumps(controller.state_dict()))
            controller = LprController(9, **arguments)
            controller.load_state_dict(state)
        controller.complete_versions(version + 1)
        again.append(controller.s)
    assert again == trace


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"s": 2}, "got s_min=3, s=2, s_max=10"),
        ({"s": 11}, "got s_min=3, s=11, s_max=10"),
        ({"s_min": -1}, "got s_min=-1"),
        ({"step": 0}, "a step of at least 1, got 0"),
        ({"limit": -1.0}, "at least 0 percent, got -1.0"),
        ({"limit": math.inf}, "a finite limit of at least 0 percent, got inf"),
        ({"limit": math.nan}, "at least 0 percent, got nan"),
        ({"beta": 1.0}, "beta above 0 and below 1, got 1.0"),
        ({"beta": 0.0}, "beta above 0 and below 1, got 0.0"),
        ({"signal": "luck"}, "a signal of loss or accuracy, got 'luck'"),
        ({"window": 0}, "a window of at least 1 version.* got 0"),
        ({"window": 2, "beta": 0.5}, "1 with beta, got 2"),
    ],
)
def test_bad_arguments_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        LprController(**arguments)
