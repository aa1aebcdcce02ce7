"""The comparison of strategies in the simulator: its settings, its small network, and its ratios."""

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.methods import (
    SETTINGS,
    DigitsProblem,
    MethodSetting,
    ratios_to_bsp,
    time_to_loss,
)


def row(strategy, rate, time_s, seed=0, setting="4w_none"):
    return {"setting": setting, "strategy": strategy, "rate": rate, "seed": seed, "time_s": time_s}


def test_ratios_are_of_the_mean_times_with_the_best_rates():
    rows = [row("bsp", 0.1, 12.0), row("bsp", 0.1, 8.0, seed=1), row("bsp", 0.2, 30.0)]
    rows += [row("adpsgd", 0.1, 9.0), row("adpsgd", 0.2, 4.0), row("adpsgd", 0.2, 6.0, seed=1)]
    assert ratios_to_bsp(rows) == {"simulated_time_ratio_to_bsp_adpsgd_4w_none": 5.0 / 10.0}


def test_a_rate_with_which_one_seed_does_not_arrive_does_not_count():
    rows = [row("bsp", 0.1, 10.0), row("adpsgd", 0.1, None), row("adpsgd", 0.1, 1.0, seed=1)]
    assert ratios_to_bsp(rows) == {}
    rows += [row("adpsgd", 0.2, 7.0), row("adpsgd", 0.2, 9.0, seed=1)]
    assert ratios_to_bsp(rows) == {"simulated_time_ratio_to_bsp_adpsgd_4w_none": 0.8}


def test_options_of_a_strategy_are_part_of_the_figures_name():
    rows = [row("bsp", 0.1, 10.0), row("preduce:overlap=false", 0.1, 5.0)]
    assert list(ratios_to_bsp(rows)) == ["simulated_time_ratio_to_bsp_preduce_overlap_false_4w_none"]


@pytest.mark.parametrize("name", SETTINGS)
def test_an_all_reduce_of_all_workers_takes_its_share_of_a_step(name):
    """A ring is as slow as the slowest line in it; the lines' latencies come on top."""
    setting = SETTINGS[name]
    took_s = setting.network().all_reduce_s(4_000_000, range(setting.workers))
    assert took_s == pytest.approx(0.1 * setting.exchange_share * setting.slow_line, rel=0.05)


@pytest.mark.parametrize("share", [0.05, 0.01])
def test_single_steps_are_five_times_as_long_with_the_probability(share):
    times = MethodSetting(workers=1, burst_share=share).times()
    times_s = times.draw(0, np.random.default_rng(0), 20_000, 0)
    is_slow = times_s > 0.3
    assert is_slow.mean() == pytest.approx(share, rel=0.15)
    assert times_s[is_slow].mean() == pytest.approx(0.5, rel=0.02)
    assert times_s[~is_slow].mean() == pytest.approx(0.1, rel=0.02)


def test_the_gradient_is_the_derivative_of_the_loss():
    """With all samples as the batch, against a difference quotient."""
    problem = DigitsProblem(seed=3, lr=0.1)
    state = problem.initial_state()
    problem._x, problem._labels = problem._x[:1], problem._labels[:1]  # each batch is 16 times this sample
    gradient = problem.gradient(state, 0, 0)
    direction = np.random.default_rng(0).normal(size=len(gradient))
    step = 1e-6
    ahead, behind = (problem.loss(state.parameters + sign * step * direction) for sign in (1, -1))
    assert gradient @ direction == pytest.approx((ahead - behind) / (2 * step), rel=1e-5)


@pytest.mark.parametrize(
    "strategy", ["bsp", "partial", "preduce", "adpsgd", "prague", "localsgd:every=4", "diloco:every=4"]
)
def test_every_method_reaches_the_loss(strategy):
    setting = SETTINGS["4w_none"]
    time_s = time_to_loss(strategy, setting, rate=0.2, seed=0, loss=1.0)
    assert 0.5 < time_s < 5.0
    assert time_to_loss(strategy, setting, rate=0.2, seed=0, loss=1.0) == time_s  # the same run


def test_a_slow_worker_holds_up_lockstep_and_not_pairs():
    found = {
        (strategy, name): time_to_loss(strategy, SETTINGS[name], rate=0.1, seed=0, loss=1.0)
        for strategy in ("bsp", "adpsgd")
        for name in ("4w_none", "4w_one5x")
    }
    assert found["bsp", "4w_one5x"] > 4 * found["bsp", "4w_none"]
    assert found["adpsgd", "4w_one5x"] < 2 * found["adpsgd", "4w_none"]


def test_training_that_diverges_does_not_arrive():
    assert time_to_loss("bsp", SETTINGS["4w_none"], rate=1e6, seed=0, loss=0.1) is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--setting", "9w"], "unknown setting '9w'"),
        (["--strategy", "ssp"], "without parameter servers"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_one_line(arguments, expected, capsys):
    assert main(["methods", *arguments]) != 0
    assert expected in capsys.readouterr().err
